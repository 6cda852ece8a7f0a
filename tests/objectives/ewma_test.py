"""The averaged proximal policy."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.objectives import ewma
from tests.objectives import reference


def _policies(steps=7):
  rng = np.random.default_rng(0)
  return [rng.normal(size=(3, 2)).astype(np.float32) for _ in range(steps)]


def _run(policies, window):
  average = ewma.ProximalAverage.start({"w": jnp.asarray(policies[0])})
  for theta in policies:
    average = ewma.update(average, {"w": jnp.asarray(theta)}, window=window)
  return average


class UpdateTest(parameterized.TestCase):
  @parameterized.parameters(0, 1, 3, 10)
  def test_is_the_weighted_sum(self, window):
    policies = _policies()
    average = _run(policies, window)
    want = reference.ewma(policies, window=window)
    np.testing.assert_allclose(average.params["w"], want, atol=1e-6)
    b = window / (window + 2)
    weight = sum(b**k for k in range(len(policies)))
    np.testing.assert_allclose(average.weight, weight, rtol=1e-6)

  def test_by_hand(self):
    # W = 2: b = 1/2, Z = 1.5, (0.5 * 1 + 4) / 1.5 = 3.
    average = ewma.ProximalAverage.start(jnp.float32(1.0))
    average = ewma.update(average, jnp.float32(1.0), window=2)
    self.assertEqual((average.params, average.weight), (1.0, 1.0))
    average = ewma.update(average, jnp.float32(4.0), window=2)
    np.testing.assert_allclose(average.params, 3.0, rtol=1e-6)
    np.testing.assert_allclose(average.weight, 1.5)

  def test_window_0_is_the_current_policy_exactly(self):
    policies = _policies()
    np.testing.assert_array_equal(_run(policies, 0).params["w"], policies[-1])

  def test_keeps_float32(self):
    half = jnp.ones(2, jnp.bfloat16)
    average = ewma.ProximalAverage.start(half)
    average = ewma.update(average, half, window=20)
    average = ewma.update(average, half * 1.0078125, window=20)
    self.assertEqual(average.params.dtype, jnp.float32)
    np.testing.assert_allclose(average.params, 1 + 0.0078125 / (1 + 10 / 11))

  def test_refuses_a_negative_window(self):
    with self.assertRaisesRegex(ValueError, "window = -1"):
      ewma.update(
        ewma.ProximalAverage.start(jnp.ones(2)), jnp.ones(2), window=-1
      )

  def test_outlives_a_donated_policy(self):
    params = jnp.ones(3)
    average = ewma.ProximalAverage.start(params)
    average = ewma.update(average, params, window=2)
    params.delete()
    np.testing.assert_array_equal(average.params, np.ones(3))

  def test_vmap_and_jit(self):
    policies = np.stack([_policies(), _policies()[::-1]])
    average = jax.vmap(ewma.ProximalAverage.start)(jnp.asarray(policies[:, 0]))
    step = jax.jit(jax.vmap(lambda a, p: ewma.update(a, p, window=3)))
    for i in range(policies.shape[1]):
      average = step(average, jnp.asarray(policies[:, i]))
    for got, one in zip(average.params, policies, strict=True):
      want = reference.ewma(list(one), window=3)
      np.testing.assert_allclose(got, want, atol=1e-6)


class ResetTest(parameterized.TestCase):
  @parameterized.parameters(
    (89.0, 100.0, True), (90.0, 100.0, False), (0.0, 0.0, False)
  )
  def test_below_the_share(self, passed, tokens, reset):
    average = _run(_policies(), 3)
    theta = {"w": jnp.full((3, 2), 7.0)}
    got = ewma.reset_if_strayed(
      average,
      passed_tokens=jnp.float32(passed),
      tokens=jnp.float32(tokens),
      min_passed_fraction=0.9,
    )
    if not reset:
      jax.tree.map(np.testing.assert_array_equal, got, average)
      return
    # theta_prox <- theta, Z <- 1: of the next step's policy.
    got = ewma.update(got, theta, window=3)
    np.testing.assert_array_equal(got.params["w"], theta["w"])
    self.assertEqual(got.weight, 1)
