"""Log-prob and entropy of the sampled token."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.kernels.token_logprob import ops

_token_logprob = jax.jit(ops.token_logprob, static_argnames="temperature")


def _inputs(shape, *, dim=12, vocab=17, seed=0, dtype=jnp.float32, scale=1.0):
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(scale * rng.normal(size=(*shape, dim)), dtype)
  unembedding = jnp.asarray(rng.normal(size=(vocab, dim)), dtype)
  targets = jnp.asarray(rng.integers(vocab, size=shape), jnp.int32)
  return hidden, unembedding, targets


def _float64(hidden, unembedding, targets, temperature):
  """The same from the probabilities, in float64."""
  logits = (
    np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64).T
  )
  logits /= temperature
  probs = np.exp(logits - logits.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  targets = np.asarray(targets)[..., None]
  logprobs = np.log(np.take_along_axis(probs, targets, -1)[..., 0])
  return probs, logprobs, -np.sum(probs * np.log(probs), -1)


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

  @parameterized.product(
    shape=[(), (1,), (5,), (3, 7), (2, 3, 4)],
    temperature=[0.7, 1.0, 1.3],
    dtype=[jnp.float32, jnp.bfloat16],
  )
  def test_equals_float64(self, shape, temperature, dtype):
    args = _inputs(shape, dtype=dtype)
    logprobs, entropy = _token_logprob(*args, temperature=temperature)
    _, expected_logprobs, expected_entropy = _float64(*args, temperature)
    self.assertEqual(logprobs.dtype, jnp.float32)
    self.assertEqual(entropy.dtype, jnp.float32)
    # bfloat16 operands cost nothing beyond their own rounding: the reference
    # starts from the same rounded operands.
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=2e-5)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=2e-5, atol=1e-6)

  @parameterized.parameters(0.7, 1.0, 1.3)
  def test_gradient_in_closed_form(self, temperature):
    hidden, unembedding, targets = _inputs((3, 5))
    weights = np.random.default_rng(1).normal(size=(3, 5))

    def f(hidden, unembedding):
      logprobs, entropy = _token_logprob(
        hidden, unembedding, targets, temperature=temperature
      )
      # The entropy carries no gradient, so its coefficient does not matter.
      return jnp.sum(jnp.asarray(weights) * logprobs) + 7 * jnp.sum(entropy)

    got = jax.jit(jax.grad(f, argnums=(0, 1)))(hidden, unembedding)
    probs, _, _ = _float64(hidden, unembedding, targets, temperature)
    # d logp / d logits = onehot - softmax.
    score = np.eye(17)[np.asarray(targets)] - probs
    score *= weights[..., None] / temperature
    expected = (
      score @ np.asarray(unembedding),
      np.einsum("btv,btd->vd", score, np.asarray(hidden)),
    )
    for g, e in zip(got, expected, strict=True):
      np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5)

  def test_bfloat16_gradient_is_finite_and_near(self):
    hidden, unembedding, targets = _inputs((3, 5), dtype=jnp.bfloat16)

    def f(hidden, unembedding):
      return jnp.sum(
        _token_logprob(hidden, unembedding, targets, temperature=1.0)[0]
      )

    got = jax.grad(f)(hidden, unembedding)
    near = jax.grad(f)(
      hidden.astype(jnp.float32), unembedding.astype(jnp.float32)
    )
    self.assertEqual(got.dtype, jnp.bfloat16)
    np.testing.assert_allclose(
      got.astype(jnp.float32), near, rtol=2e-2, atol=2e-2
    )

  @parameterized.parameters(1e2, 1e4)
  def test_huge_logits(self, scale):
    hidden, unembedding, targets = _inputs((64,), scale=scale)
    (logprobs, entropy), gradient = (
      _token_logprob(hidden, unembedding, targets, temperature=1.0),
      jax.grad(
        lambda h: jnp.sum(
          _token_logprob(h, unembedding, targets, temperature=1.0)[0]
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
    hidden, unembedding, targets = _inputs((3,), vocab=1)
    logprobs, entropy = _token_logprob(
      hidden, unembedding, targets, temperature=1.0
    )
    np.testing.assert_array_equal(logprobs, np.zeros(3))
    np.testing.assert_array_equal(entropy, np.zeros(3))

  def test_a_row_does_not_depend_on_its_batch(self):
    hidden, unembedding, targets = _inputs((8, 5))
    f = jax.jit(lambda h, t: _token_logprob(h, unembedding, t, temperature=1.0))
    whole = f(hidden, targets)
    for row in range(8):
      alone = f(hidden[row : row + 1], targets[row : row + 1])
      for a, w in zip(alone, whole, strict=True):
        np.testing.assert_allclose(a[0], w[row], rtol=1e-5, atol=1e-6)

  @parameterized.parameters(0.0, -1.0, np.nan)
  def test_refuses_temperature(self, temperature):
    with self.assertRaisesRegex(ValueError, "above 0"):
      ops.token_logprob(*_inputs((2,)), temperature=temperature)

  def test_refuses_shapes(self):
    hidden, unembedding, targets = _inputs((2, 3))
    with self.assertRaises(AssertionError):
      ops.token_logprob(hidden, unembedding.T, targets, temperature=1.0)
    with self.assertRaises(AssertionError):
      ops.token_logprob(hidden, unembedding, targets[:1], temperature=1.0)
    with self.assertRaises(AssertionError):
      ops.token_logprob(
        hidden, unembedding, targets.astype(jnp.float32), temperature=1.0
      )
