"""Masked float32 reductions and safe log-ratios."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax import numerics

_GARBAGE = (np.nan, np.inf, -np.inf, 1e38)


class MaskedTest(parameterized.TestCase):
  @parameterized.parameters(*_GARBAGE)
  def test_masked_slots_reach_neither_value_nor_gradient(self, garbage):
    values = jnp.array([1.0, garbage, 3.0])
    mask = jnp.array([True, False, True])
    value, gradient = jax.value_and_grad(
      lambda v: numerics.masked_sum(v**2, mask)
    )(values)
    self.assertEqual(value, 10.0)
    np.testing.assert_array_equal(
      gradient[np.array([0, 2])], np.array([2.0, 6.0])
    )

  def test_masked_is_float32_and_zero(self):
    got = numerics.masked(
      jnp.array([2.0, jnp.nan], jnp.bfloat16), jnp.array([True, False])
    )
    self.assertEqual(got.dtype, jnp.float32)
    np.testing.assert_array_equal(got, [2.0, 0.0])

  def test_bfloat16_is_summed_in_float32(self):
    # In bfloat16 a sum of ones stops at 256.
    ones = jnp.ones((1000,), jnp.bfloat16)
    mask = jnp.arange(1000) < 999
    self.assertEqual(numerics.masked_sum(ones, mask), 999.0)
    self.assertEqual(numerics.count(mask), 999.0)

  def test_reduces_over_the_axis(self):
    values = jnp.arange(6.0).reshape(2, 3)
    mask = jnp.array([[True, False, True], [False, False, False]])
    np.testing.assert_array_equal(
      numerics.masked_sum(values, mask, axis=1), [2.0, 0.0]
    )
    np.testing.assert_array_equal(numerics.count(mask, axis=1), [2.0, 0.0])


class SafeDivideTest(parameterized.TestCase):
  @parameterized.parameters(0.0, 1.0, -3.0, 1e30)
  def test_zero_denominator_is_zero_with_finite_gradient(self, numerator):
    value, gradients = jax.value_and_grad(numerics.safe_divide, argnums=(0, 1))(
      jnp.float32(numerator), jnp.float32(0.0)
    )
    self.assertEqual(value, 0.0)
    np.testing.assert_array_equal(jnp.stack(gradients), [0.0, 0.0])

  def test_divides(self):
    np.testing.assert_allclose(
      numerics.safe_divide(jnp.array([6.0, -1.0]), jnp.array([4.0, 8.0])),
      [1.5, -0.125],
    )


class LogRatioTest(parameterized.TestCase):
  def test_by_hand(self):
    got = numerics.log_ratio(
      jnp.array([-1.0, -2.0, -9.0]),
      jnp.array([-1.5, -1.0, -3.0]),
      jnp.array([True, True, False]),
    )
    np.testing.assert_array_equal(got, [0.5, -1.0, 0.0])

  @parameterized.parameters(
    (0.0, -1e4, 20.0), (-1e4, 0.0, -20.0), (-np.inf, -1.0, -20.0)
  )
  def test_clamped_without_gradient(self, logprob, reference, expected):
    value, gradient = jax.value_and_grad(
      lambda x: jnp.sum(
        jnp.exp(
          numerics.log_ratio(x, jnp.array([reference]), jnp.array([True]))
        )
      )
    )(jnp.array([logprob]))
    np.testing.assert_allclose(value, np.exp(expected), rtol=1e-6)
    np.testing.assert_array_equal(gradient, [0.0])

  @parameterized.product(policy=_GARBAGE, reference=_GARBAGE)
  def test_masked_garbage(self, policy, reference):
    mask = jnp.array([True, False])

    def f(logprobs):
      reference_logprobs = jnp.array([-1.0, reference])
      return jnp.sum(
        jnp.exp(numerics.log_ratio(logprobs, reference_logprobs, mask))
      )

    value, gradient = jax.value_and_grad(f)(jnp.array([-1.0, policy]))
    self.assertEqual(value, 2.0)
    np.testing.assert_array_equal(gradient, [1.0, 0.0])
