"""KL estimators and the effective sample size."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.objectives import log_ratio

_ESTIMATORS = (log_ratio.k1, log_ratio.k2, log_ratio.k3)


class KlEstimatorsTest(parameterized.TestCase):
  def test_by_hand(self):
    args = (
      jnp.log(jnp.array([0.5, 0.1, 0.3])),
      jnp.log(jnp.array([0.25, 0.2, 0.9])),
      jnp.array([True, True, False]),
    )
    two = np.log(2.0)
    for estimator, expected in (
      (log_ratio.k1, [-two, two, 0]),
      (log_ratio.k2, [two**2 / 2, two**2 / 2, 0]),
      (log_ratio.k3, [2 - 1 - two, 0.5 - 1 + two, 0]),
    ):
      np.testing.assert_allclose(estimator(*args), expected, rtol=1e-5)

  def test_direction_is_kl_of_mu_to_pi(self):
    # Averaged over mu itself, exactly: every token once, weighted by mu.
    rng = np.random.default_rng(0)
    mu, pi = rng.dirichlet(np.ones(6), size=2)
    kl = np.sum(mu * np.log(mu / pi))
    other = np.sum(pi * np.log(pi / mu))
    self.assertGreater(abs(kl - other), 0.01)
    for estimator in (log_ratio.k1, log_ratio.k3):
      values = estimator(jnp.log(pi), jnp.log(mu), jnp.ones(6, bool))
      np.testing.assert_allclose(np.sum(mu * values), kl, rtol=1e-5)

  @parameterized.parameters(*_ESTIMATORS)
  def test_degenerate_input(self, estimator):
    logprobs = jnp.array([np.nan, np.inf, 0.0, -1e4, -1.0])
    behavior = jnp.array([-1.0, -np.inf, -1e4, 0.0, np.nan])
    mask = jnp.array([False, False, True, True, False])
    values, gradient = jax.value_and_grad(
      lambda x: jnp.sum(estimator(x, behavior, mask))
    )(logprobs)
    self.assertTrue(np.isfinite(values))
    np.testing.assert_array_equal(gradient, np.zeros(5))

  def test_small_k3_keeps_its_digits(self):
    got = log_ratio.k3(jnp.array([1e-4]), jnp.zeros(1), jnp.array([True]))
    np.testing.assert_allclose(got, [5e-9], rtol=2e-3)


class EffectiveSampleSizeTest(parameterized.TestCase):
  @parameterized.parameters(float, np.float64, np.float32, jnp.float32)
  def test_numbers(self, kind):
    # Ratios 1, 1, 2: 16 / 6.
    got = log_ratio.effective_sample_size(kind(4.0), kind(6.0))
    np.testing.assert_allclose(got, 16 / 6, rtol=1e-6)
    self.assertEqual(log_ratio.effective_sample_size(kind(0), kind(0)), 0.0)

  @parameterized.parameters(np, jnp)
  def test_arrays(self, library):
    got = log_ratio.effective_sample_size(
      library.array([7.0, 0.0, 4.0]), library.array([7.0, 0.0, 16.0])
    )
    self.assertIsInstance(got, library.ndarray)
    np.testing.assert_allclose(got, [7, 0, 1])

  def test_between_one_and_the_count(self):
    rng = np.random.default_rng(0)
    for scale in (0.0, 0.5, 3.0, 20.0):
      ratio = np.exp(np.clip(scale * rng.normal(size=50), -20, 20))
      got = log_ratio.effective_sample_size(ratio.sum(), (ratio**2).sum())
      self.assertBetween(got, 1 - 1e-9, 50 + 1e-9)
