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
    # [layers, B, S, M, H] of the nano preset.
    self.assertEqual(cache.keys.shape, (2, 3, 6, 2, 16))
    self.assertEqual(cache.values.shape, cache.keys.shape)
    self.assertEqual(cache.keys.dtype, jnp.bfloat16)
    self.assertEqual(int(cache.length), 0)

  def test_prefill_reads_what_is_before_and_not_padding(self):
    got = np.asarray(_cache([0, 2], slots=4).mask(3))
    np.testing.assert_array_equal(
      got[0], [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    )
    # Padding reads itself alone.
    np.testing.assert_array_equal(
      got[1], [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    )

  def test_decode_reads_all_filled_slots_and_its_own(self):
    cache = _cache([0, 2], length=jnp.int32(3))
    got = np.asarray(cache.mask(1))
    np.testing.assert_array_equal(got[0], [[1, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(got[1], [[0, 0, 1, 1, 0, 0]])

  def test_repeat_keeps_samples_of_a_prompt_together(self):
    cache = _cache([0, 2], length=jnp.int32(3))
    cache = dataclasses.replace(
      cache,
      keys=cache.keys.at[:, 1].set(1),
      values=cache.values.at[:, 1].set(2),
    )
    got = kv_cache.repeat(cache, 3)
    np.testing.assert_array_equal(got.first, [0, 0, 0, 2, 2, 2])
    by_row = (0, 2, 3, 4)
    np.testing.assert_array_equal(
      np.asarray(got.keys, np.float32).max(by_row), [0, 0, 0, 1, 1, 1]
    )
    np.testing.assert_array_equal(
      np.asarray(got.values, np.float32).min(by_row), [0, 0, 0, 2, 2, 2]
    )
    self.assertEqual(int(got.length), 3)
