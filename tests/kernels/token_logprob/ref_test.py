"""The definition of log-prob and entropy against float64."""

import pathlib
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.kernels.token_logprob import ref

inputs = types.SimpleNamespace(
  **runpy.run_path(str(pathlib.Path(__file__).parent / "inputs.py"))
)
_token_logprob = jax.jit(ref.token_logprob, static_argnames="temperature")


class TokenLogprobTest(parameterized.TestCase):
  def test_by_hand(self):
    # Logits (0, log 3): probabilities 1/4 and 3/4.
    hidden = jnp.array([[np.log(3.0)], [np.log(3.0)]])
    logprobs, entropy = _token_logprob(
      hidden, jnp.array([[0.0], [1.0]]), jnp.array([0, 1]), temperature=1.0
    )
    np.testing.assert_allclose(logprobs, np.log([0.25, 0.75]), rtol=1e-6)
    expected = -0.25 * np.log(0.25) - 0.75 * np.log(0.75)
    np.testing.assert_allclose(entropy, [expected] * 2, rtol=1e-6)

  @parameterized.parameters(
    *(
      ((3, 7), temperature, dtypes, masked)
      for temperature in (0.7, 1.3)
      for dtypes in (inputs.FLOAT32, inputs.BFLOAT16, inputs.MIXED)
      for masked in (False, True)
    ),
    *(
      (shape, 1.0, inputs.FLOAT32, masked)
      for shape in ((), (1,), (2, 3, 4))
      for masked in (False, True)
    ),
  )
  def test_equals_float64(self, shape, temperature, dtypes, masked):
    # bfloat16 operands cost nothing beyond their own rounding: the float64
    # version starts from the same rounded operands.
    args = inputs.make(shape, dtypes=dtypes)
    support = inputs.make_support(args[2], 17) if masked else None
    logprobs, entropy = _token_logprob(
      *args,
      temperature=temperature,
      support_mask=inputs.pack(support) if masked else None,
    )
    expected = inputs.float64(*args, temperature=temperature, support=support)
    for got, want in zip((logprobs, entropy), expected, strict=True):
      self.assertEqual(got.dtype, jnp.float32)
      self.assertEqual(got.shape, shape)
      np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)

  @parameterized.product(
    temperature=[0.7, 1.3],
    dtypes=[inputs.FLOAT32, inputs.BFLOAT16, inputs.MIXED],
    masked=[False, True],
  )
  def test_gradient_in_closed_form(self, temperature, dtypes, masked):
    args = inputs.make((3, 5), dtypes=dtypes)
    hidden, unembedding, targets = args
    weights = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    support = inputs.make_support(targets, 17) if masked else None

    def f(hidden, unembedding):
      logprobs, entropy = ref.token_logprob(
        hidden,
        unembedding,
        targets,
        temperature=temperature,
        support_mask=inputs.pack(support) if masked else None,
      )
      # The entropy carries no gradient, so its coefficient does not matter.
      return jnp.sum(weights * logprobs) + 7 * jnp.sum(entropy)

    got = jax.jit(jax.grad(f, argnums=(0, 1)))(hidden, unembedding)
    expected = inputs.float64(
      *args, temperature=temperature, support=support, weights=weights
    )[2:]
    for g, e, dtype in zip(got, expected, dtypes, strict=True):
      self.assertEqual(g.dtype, dtype)
      bound = 1e-6 if dtype == jnp.float32 else 4e-3
      self.assertLess(inputs.relative_error(g, e), bound)

  def test_gradient_of_float32_masters_is_not_rounded(self):
    # With a cast in front, as in unembedding.astype(hidden.dtype), the
    # gradient passes through bfloat16: 8 bits, an error near 2e-3.
    args = inputs.make((3, 5), dtypes=inputs.MIXED)
    weights = np.ones((3, 5), np.float32)

    def f(unembedding):
      return jnp.sum(
        ref.token_logprob(args[0], unembedding, args[2], temperature=1.0)[0]
      )

    got = jax.jit(jax.grad(f))(args[1])
    expected = inputs.float64(*args, weights=weights)[3]
    self.assertLess(inputs.relative_error(got, expected), 1e-6)

  @parameterized.parameters(1e2, 1e4)
  def test_huge_logits(self, scale):
    hidden, unembedding, targets = inputs.make((64,), scale=scale)
    (logprobs, entropy), gradient = (
      _token_logprob(hidden, unembedding, targets, temperature=1.0),
      jax.grad(
        lambda h: jnp.sum(
          ref.token_logprob(h, unembedding, targets, temperature=1.0)[0]
        )
      )(hidden),
    )
    self.assertTrue(np.all(np.isfinite(logprobs)))
    self.assertTrue(np.all(np.isfinite(gradient)))
    # Without the shift the entropy is a difference of numbers like 1e4.
    self.assertTrue(np.all((entropy >= 0) & (entropy < np.log(17) + 1e-6)))
    best = jnp.argmax(hidden @ unembedding.T, axis=-1)
    sure, _ = _token_logprob(hidden, unembedding, best, temperature=1.0)
    self.assertTrue(np.all(sure > -np.log(17)))

  def test_entropy_of_near_certainty_keeps_its_digits(self):
    # Logits (1000, 1000 - 9): H = p (log(1 + e^-9)) + ..., all from e^-9.
    logits = np.array([1000.0, 991.0])
    _, entropy = _token_logprob(
      jnp.ones((1, 1)),
      jnp.asarray(logits[:, None]),
      jnp.array([0]),
      temperature=1.0,
    )
    q = 1 / (1 + np.exp(9.0))
    expected = -q * np.log(q) - (1 - q) * np.log1p(-q)
    np.testing.assert_allclose(entropy, [expected], rtol=1e-3)

  def test_one_word_vocabulary(self):
    args = inputs.make((3,), vocab=1)
    logprobs, entropy = _token_logprob(*args, temperature=1.0)
    np.testing.assert_array_equal(logprobs, np.zeros(3))
    np.testing.assert_array_equal(entropy, np.zeros(3))

  def test_support(self):
    hidden, unembedding, targets = inputs.make((4,))
    support = inputs.make_support(targets, 17)
    logprobs, entropy = _token_logprob(
      hidden,
      unembedding,
      targets,
      temperature=1.0,
      support_mask=inputs.pack(support),
    )
    np.testing.assert_array_equal(logprobs[:3], [0.0, -1e4, 0.0])
    np.testing.assert_array_equal(entropy[jnp.array([0, 2])], [0.0, 0.0])
    self.assertGreater(entropy[1], 0)
    everything, _ = _token_logprob(
      hidden, unembedding, targets, temperature=1.0
    )
    self.assertGreater(logprobs[3], everything[3])

  def test_excluded_logits_do_not_matter(self):
    hidden, unembedding, targets = inputs.make((8,))
    support = np.ones((8, 17), bool)
    support[:, 3] = False
    targets = jnp.where(targets == 3, 4, targets)

    def f(unembedding):
      logprobs, entropy = ref.token_logprob(
        hidden,
        unembedding,
        targets,
        temperature=1.0,
        support_mask=inputs.pack(support),
      )
      return jnp.sum(logprobs) + jnp.sum(entropy)

    value, gradient = jax.value_and_grad(f)(unembedding)
    other, same = jax.value_and_grad(f)(unembedding.at[3].set(1e6))
    self.assertEqual(value, other)
    np.testing.assert_array_equal(gradient, same)
    np.testing.assert_array_equal(gradient[3], np.zeros(12))

  def test_unpack_support(self):
    support = np.random.default_rng(0).random((2, 3, 24)) < 0.5
    np.testing.assert_array_equal(
      ref.unpack_support(inputs.pack(support)), support
    )
