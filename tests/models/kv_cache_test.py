"""The tail: what may be read of it, and where tokens are written."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.config import ModelConfig
from darl_jax.models import kv_cache, presets

# Of the nano preset.
_LAYERS, _KV_HEADS, _HEAD_DIM = 2, 2, 16


def _tail(slots, *, rows=3, unstacked=False, length=0, dtype=jnp.bfloat16):
  tail = kv_cache.empty_tail(
    ModelConfig(**presets.nano()),
    rows=rows,
    slots=slots,
    dtype=dtype,
    unstacked=unstacked,
  )
  return dataclasses.replace(tail, length=jnp.int32(length))


def _stacked(layers):
  """float32 [layers, ...], however the layers are kept."""
  return np.stack([np.asarray(layer, np.float32) for layer in layers])


class TailTest(parameterized.TestCase):
  def test_empty(self):
    tail = kv_cache.empty_tail(
      ModelConfig(**presets.nano()), rows=3, slots=6, dtype=jnp.bfloat16
    )
    shape = (3, _KV_HEADS, 6, _HEAD_DIM)
    for whole in (tail.keys, tail.values):
      self.assertEqual(whole.shape, (_LAYERS, *shape))
      self.assertEqual(whole.dtype, jnp.bfloat16)
      np.testing.assert_array_equal(_stacked(whole), 0)
    self.assertEqual((int(tail.length), tail.length.dtype), (0, jnp.int32))
    apart = _tail(6, unstacked=True)
    for layers in (apart.keys, apart.values):
      self.assertIsInstance(layers, tuple)
      self.assertEqual([x.shape for x in layers], [shape] * _LAYERS)
      self.assertEqual({x.dtype for x in layers}, {jnp.dtype("bfloat16")})
      np.testing.assert_array_equal(_stacked(layers), 0)
    self.assertEqual(int(apart.length), 0)

  @parameterized.parameters(False, True)
  def test_what_comes_later_is_not_read(self, unstacked):
    got = _tail(4, unstacked=unstacked).mask(2)
    np.testing.assert_array_equal(got, [[1, 0, 0, 0], [1, 1, 0, 0]])
    self.assertEqual(got.dtype, bool)
    longer = _tail(4, unstacked=unstacked, length=1)
    np.testing.assert_array_equal(longer.mask(1), [[1, 1, 0, 0]])
    np.testing.assert_array_equal(
      longer.mask(3), [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    )

  @parameterized.product(unstacked=(False, True), count=(1, 2), compiled=(0, 1))
  def test_tokens_are_written_to_one_layer(self, unstacked, count, compiled):
    rows, slots, at = 3, 5, 2
    tail = _tail(slots, unstacked=unstacked, length=at)
    tail = jax.tree.map(lambda x: x + 7 if x.ndim else x, tail)
    shape = (rows, count, _KV_HEADS, _HEAD_DIM)
    keys = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    # A scan over layers does not know which one it writes.
    layer = 1 if unstacked else jnp.int32(1)
    write = kv_cache.Tail.write
    if compiled:
      write = jax.jit(write, static_argnums=1 if unstacked else ())
    got = write(tail, layer, keys, -2 * keys)
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(tail))
    # Who writes says when the tokens count.
    self.assertEqual(int(got.length), at)
    heads_first = keys.swapaxes(1, 2).astype(jnp.bfloat16).astype(np.float32)
    for name, written in (("keys", heads_first), ("values", -2 * heads_first)):
      # What was there, in other slots and other layers, stays.
      want = np.full((_LAYERS, rows, _KV_HEADS, slots, _HEAD_DIM), 7.0)
      want[1, :, :, at : at + count] = written
      layers = getattr(got, name)
      self.assertEqual(layers[0].dtype, jnp.bfloat16)
      np.testing.assert_array_equal(_stacked(layers), want)
    np.testing.assert_array_equal(_stacked(tail.keys), 7)

  def test_layers_apart_hold_what_stacked_ones_hold(self):
    keys = np.random.default_rng(0).normal(size=(3, 2, _KV_HEADS, _HEAD_DIM))
    stacked, apart = _tail(4, length=1), _tail(4, length=1, unstacked=True)
    for layer in (0, 1, 0):
      scaled = jnp.asarray(keys * (layer + 1), jnp.float32)
      stacked = stacked.write(layer, scaled, -scaled)
      apart = apart.write(layer, scaled, -scaled)
    for name in ("keys", "values"):
      np.testing.assert_array_equal(
        _stacked(getattr(apart, name)), _stacked(getattr(stacked, name))
      )
