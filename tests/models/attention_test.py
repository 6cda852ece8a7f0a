"""Rotary embedding, masks and grouped-query attention against numpy loops."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.models import attention


def _random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class RotaryTest(parameterized.TestCase):
  def test_rotates_pairs_half_a_head_apart(self):
    x = _random(2, 5, 3, 8)
    positions = np.array([[0, 1, 2, 3, 4], [7, 0, 1, 100, 2]], np.int32)
    theta = 500.0
    got = attention.rotary(jnp.asarray(x), jnp.asarray(positions), theta=theta)
    # Each pair is a complex number, turned by position * theta^(-2i / H).
    pairs = x[..., :4] + 1j * x[..., 4:]
    angle = positions[..., None] * theta ** (-np.arange(0, 8, 2) / 8)
    turned = pairs * np.exp(1j * angle)[:, :, None]
    want = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(got, want, atol=2e-5)

  def test_scores_depend_on_the_distance_alone(self):
    query, key = _random(1, 1, 1, 16), _random(1, 1, 1, 16, seed=1)

    @jax.jit
    def score(query_position, key_position):
      return jnp.sum(
        attention.rotary(query, jnp.full((1, 1), query_position), theta=1e4)
        * attention.rotary(key, jnp.full((1, 1), key_position), theta=1e4)
      )

    np.testing.assert_allclose(score(9, 4), score(105, 100), rtol=1e-4)
    self.assertGreater(abs(score(9, 4) - score(9, 5)), 1e-3)

  def test_angles_are_float32_in_bfloat16(self):
    x = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    # 257 is not a bfloat16: rounded to 256, it would turn by a radian less.
    got = attention.rotary(x, jnp.full((1, 1), 257), theta=1e4)
    self.assertEqual(got.dtype, jnp.bfloat16)
    want = np.cos(257) - np.sin(257)
    np.testing.assert_allclose(float(got[0, 0, 0, 0]), want, atol=0.01)


class PackedMaskTest(parameterized.TestCase):
  def test_causal_within_a_segment(self):
    got = attention.packed_mask(jnp.array([[1, 1, 2, 0, 0]]))
    want = [
      [1, 0, 0, 0, 0],
      [1, 1, 0, 0, 0],
      [0, 0, 1, 0, 0],
      [0, 0, 0, 1, 0],
      [0, 0, 0, 1, 1],
    ]
    np.testing.assert_array_equal(got[0], np.array(want, bool))


class AttendTest(parameterized.TestCase):
  @parameterized.parameters((4, 4), (4, 2), (6, 2), (4, 1))
  def test_equals_a_loop_over_query_heads(self, heads, kv_heads):
    batch, length, slots, dim = 2, 3, 5, 8
    query = _random(batch, length, heads, dim)
    key = _random(batch, slots, kv_heads, dim, seed=1)
    value = _random(batch, slots, kv_heads, dim, seed=2)
    mask = np.random.default_rng(3).random((batch, length, slots)) < 0.6
    mask[..., 0] = True
    got = jax.jit(attention.attend)(
      *map(jnp.asarray, (query, key, value, mask))
    )
    want = np.zeros_like(query)
    for head in range(heads):
      # Query heads that share a key/value head are neighbours.
      shared = head // (heads // kv_heads)
      scores = np.einsum("bth,bsh->bts", query[:, :, head], key[:, :, shared])
      weights = np.where(mask, np.exp(scores / np.sqrt(dim)), 0.0)
      weights /= weights.sum(-1, keepdims=True)
      want[:, :, head] = weights @ value[:, :, shared]
    np.testing.assert_allclose(got, want, atol=1e-5)

  def test_scores_are_float32_in_bfloat16(self):
    # Scores 256 and 257 are one bfloat16; the weights must tell them apart.
    key = np.zeros((1, 2, 1, 4), np.float32)
    key[0, :, 0, 0], key[0, 1, 0, 1] = 2.0, 2.0
    query = np.array([256.0, 1.0, 0, 0], np.float32).reshape(1, 1, 1, 4)
    value = np.array([[0.0] * 4, [1.0] * 4], np.float32).reshape(1, 2, 1, 4)
    half = [jnp.asarray(x, jnp.bfloat16) for x in (query, key, value)]
    got = jax.jit(attention.attend)(*half, jnp.ones((1, 1, 2), bool))
    self.assertEqual(got.dtype, jnp.bfloat16)
    want = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(float(got[0, 0, 0, 0]), want, atol=0.005)

  def test_masked_slots_do_not_matter(self):
    query, key = _random(1, 2, 2, 4), _random(1, 3, 1, 4, seed=1)
    mask = jnp.array([[[True, False, True], [True, False, False]]])
    other = key.copy()
    other[:, 1] = 1e6
    attend = jax.jit(attention.attend)
    np.testing.assert_array_equal(
      attend(query, key, key, mask), attend(query, other, other, mask)
    )
