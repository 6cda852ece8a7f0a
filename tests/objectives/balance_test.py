"""The balance heuristic against its definition."""

import numpy as np
from absl.testing import parameterized

from darl_jax.objectives import balance
from tests.objectives import reference


class BalanceWeightsTest(parameterized.TestCase):
  @parameterized.parameters(1.0, 2.0, np.inf)
  def test_equals_the_definition(self, cap):
    rng = np.random.default_rng(0)
    behavior = -rng.gamma(5, 1, size=(4, 20))
    prox = behavior.mean(0) + rng.normal(size=20)
    shares = rng.dirichlet(np.ones(4))
    got = balance.balance_weights(prox, behavior, shares, cap=cap)
    want = [
      reference.balance(prox[i], behavior[:, i], shares, cap) for i in range(20)
    ]
    np.testing.assert_allclose(got, want, rtol=1e-12)

  def test_one_snapshot_is_the_ratio(self):
    got = balance.balance_weights(
      np.log([0.2, 0.9]), np.log([[0.4, 0.3]]), np.ones(1), cap=2.0
    )
    np.testing.assert_allclose(got, [0.5, 2.0])

  def test_unbiased_over_the_mixture(self):
    # Over all outcomes: sum of mixture(y) w(y) f(y) is the mean under prox.
    rng = np.random.default_rng(1)
    mu, prox = rng.dirichlet(np.ones(6), size=3), rng.dirichlet(np.ones(6))
    shares, f = np.array([0.5, 0.3, 0.2]), rng.normal(size=6)
    w = balance.balance_weights(np.log(prox), np.log(mu), shares, cap=np.inf)
    np.testing.assert_allclose((shares @ mu) @ (w * f), prox @ f)

  def test_long_answers(self):
    # Log-probs whose exponentials are 0; an unused slot may hold anything.
    behavior = np.array([[-5000.0, -9000.0], [-5001.0, 0.0]])
    got = balance.balance_weights(
      np.array([-5000.0, -9000.0]), behavior, np.array([1.0, 0.0]), cap=5.0
    )
    np.testing.assert_allclose(got, [1.0, 1.0])
    half = balance.balance_weights(
      np.array([-4000.0]),
      np.array([[-5000.0]]),
      np.ones(1),
      cap=5.0,
      biased_lengths=np.array([1000]),
    )
    np.testing.assert_allclose(half, [np.e])

  def test_far_answers_have_finite_weights(self):
    got = balance.balance_weights(
      np.array([-100.0, -5000.0]),
      np.array([[-5000.0, -100.0]]),
      np.ones(1),
      cap=np.inf,
    )
    np.testing.assert_allclose(got, np.exp([20.0, -20.0]))

  @parameterized.parameters(
    (dict(cap=0.5), "cap = 0.5"),
    (dict(proportions=np.array([0.5, 0.6])), "not shares of 1"),
    (dict(behavior=np.zeros((3, 2))), "must be"),
  )
  def test_refused(self, change, message):
    arguments = dict(
      proximal=np.zeros(2),
      behavior=np.zeros((2, 2)),
      proportions=np.array([0.5, 0.5]),
      cap=2.0,
    )
    with self.assertRaisesRegex(ValueError, message):
      balance.balance_weights(**(arguments | change))
