"""The dense cache: what may be read, and how rows are repeated."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.config import ModelConfig
from darl_jax.models import kv_cache, presets


def _cache(first, slots=6, **changes):
  config = ModelConfig(**presets.nano())
  cache = kv_cache.empty(
    config, first=jnp.array(first), slots=slots, dtype=jnp.bfloat16
  )
  return dataclasses.replace(cache, **changes)


class KVCacheTest(parameterized.TestCase):
  def test_empty(self):
    cache = _cache([0, 2, 1])
    # [layers, B, M, S, H] of the nano preset.
    self.assertEqual(cache.keys.shape, (2, 3, 2, 6, 16))
    self.assertEqual(cache.values.shape, cache.keys.shape)
    self.assertEqual(cache.keys.dtype, jnp.bfloat16)
    self.assertEqual(int(cache.length), 0)

  def test_what_was_before_is_read_but_not_padding(self):
    got = np.asarray(_cache([0, 2], slots=4, length=jnp.int32(3)).mask())
    np.testing.assert_array_equal(got, [[1, 1, 1, 0], [0, 0, 1, 0]])

  def test_a_tail_is_causal(self):
    cache = _cache([0, 2], slots=4, length=jnp.int32(3))
    tail = kv_cache.append(cache, slots=3)
    causal = [[1, 0, 0], [1, 1, 0]]
    np.testing.assert_array_equal(tail.mask(2), [causal, causal])
    longer = dataclasses.replace(tail, length=jnp.int32(1))
    causal = [[1, 1, 0], [1, 1, 1]]
    np.testing.assert_array_equal(longer.mask(2), [causal, causal])

  def test_padding_in_a_tail_reads_itself_alone(self):
    tail = kv_cache.append(_cache([0, 2]), slots=3)
    got = np.asarray(tail.mask(3))
    np.testing.assert_array_equal(got[0], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(got[1], [[1, 0, 0], [0, 1, 0], [0, 0, 1]])

  def test_repeat_keeps_samples_of_a_prompt_together(self):
    cache = _cache([0, 2], length=jnp.int32(3))
    cache = dataclasses.replace(
      cache,
      keys=cache.keys.at[:, 1].set(1),
      values=cache.values.at[:, 1].set(2),
    )
    got = kv_cache.grow(cache, slots=2, times=3)
    self.assertEqual(got.keys.shape, (2, 6, 2, 8, 16))
    self.assertEqual(int(got.length), 3)
    # The new slots are empty.
    np.testing.assert_array_equal(
      np.asarray(got.values, np.float32)[:, :, :, 6:], 0
    )
    got = dataclasses.replace(
      got, keys=got.keys[..., :6, :], values=got.values[..., :6, :]
    )
    np.testing.assert_array_equal(got.first, [0, 0, 0, 2, 2, 2])
    by_row = (0, 2, 3, 4)
    np.testing.assert_array_equal(
      np.asarray(got.keys, np.float32).max(by_row), [0, 0, 0, 1, 1, 1]
    )
    np.testing.assert_array_equal(
      np.asarray(got.values, np.float32).min(by_row), [0, 0, 0, 2, 2, 2]
    )
    self.assertEqual(int(got.length), 3)

  def test_a_tail_is_written_layer_by_layer_and_merged(self):
    cache = _cache([0, 2], slots=6, length=jnp.int32(2))
    cache = dataclasses.replace(cache, keys=cache.keys + 5)
    keys = jnp.arange(2 * 2 * 2 * 16, dtype=jnp.float32).reshape(2, 2, 2, 16)
    tail = kv_cache.append(cache, slots=3)
    tail = dataclasses.replace(tail, length=jnp.int32(1))
    tail = tail.write(jnp.int32(1), keys, -keys)
    # Who writes says when the tokens count.
    self.assertEqual(int(tail.length), 1)
    tail = dataclasses.replace(tail, length=jnp.int32(3))
    got = tail.merged()
    self.assertEqual(int(got.length), 5)
    written = np.asarray(keys.astype(jnp.bfloat16), np.float32)
    want = np.zeros((2, 2, 2, 6, 16), np.float32)
    want[1, :, :, 3:5] = written.swapaxes(1, 2)
    np.testing.assert_array_equal(np.asarray(got.values, np.float32), -want)
    # What was there before the tail, and after it, stays.
    want[:, :, :, :2], want[:, :, :, 5:] = 5, 5
    np.testing.assert_array_equal(np.asarray(got.keys, np.float32), want)
