"""Rotary embedding, masks and grouped-query attention against numpy loops."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.config import ConfigError, ModelConfig
from darl_jax.kernels.partition import Partition
from darl_jax.models import attention, presets
from darl_jax.planner import topology


def _frequencies(head_dim, theta, **changes):
  shape = dict(head_dim=head_dim, rope_theta=theta)
  return attention.rotary_frequencies(
    ModelConfig(**presets.nano() | shape | changes)
  )


def _random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _rotary(x, positions, frequencies):
  return attention.rotary(
    x, attention.rotations(positions, frequencies=frequencies)
  )


class RotaryTest(parameterized.TestCase):
  def test_rotates_pairs_half_a_head_apart(self):
    x = _random(2, 5, 3, 8)
    positions = np.array([[0, 1, 2, 3, 4], [7, 0, 1, 100, 2]], np.int32)
    theta = 500.0
    got = _rotary(
      jnp.asarray(x), jnp.asarray(positions), _frequencies(8, theta)
    )
    # Each pair is a complex number, turned by position * theta^(-2i / H).
    pairs = x[..., :4] + 1j * x[..., 4:]
    angle = positions[..., None] * theta ** (-np.arange(0, 8, 2) / 8)
    turned = pairs * np.exp(1j * angle)[:, :, None]
    want = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(got, want, atol=2e-5)

  def test_scores_depend_on_the_distance_alone(self):
    query, key = _random(1, 1, 1, 16), _random(1, 1, 1, 16, seed=1)
    frequencies = _frequencies(16, 1e4)

    @jax.jit
    def score(query_position, key_position):
      return jnp.sum(
        _rotary(query, jnp.full((1, 1), query_position), frequencies)
        * _rotary(key, jnp.full((1, 1), key_position), frequencies)
      )

    np.testing.assert_allclose(score(9, 4), score(105, 100), rtol=1e-4)
    self.assertGreater(abs(score(9, 4) - score(9, 5)), 1e-3)

  def test_angles_are_float32_in_bfloat16(self):
    x = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    # 257 is not a bfloat16: rounded to 256, it would turn by a radian less.
    got = _rotary(x, jnp.full((1, 1), 257), _frequencies(4, 1e4))
    self.assertEqual(got.dtype, jnp.bfloat16)
    want = np.cos(257) - np.sin(257)
    np.testing.assert_allclose(float(got[0, 0, 0, 0]), want, atol=0.01)

  def test_frequencies_are_stretched_as_llama_does(self):
    # By the published description: whole wavelengths in the original context.
    factor, low, high, context = 8.0, 1.0, 4.0, 8192
    got = _frequencies(
      128,
      5e5,
      rope_scaling_factor=factor,
      rope_low_frequency_factor=low,
      rope_high_frequency_factor=high,
      rope_original_context=context,
    )
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    kinds = set()
    for i, frequency in enumerate(plain):
      wavelength = 2 * np.pi / frequency
      if wavelength < context / high:
        kind, want = "kept", frequency
      elif wavelength > context / low:
        kind, want = "divided", frequency / factor
      else:
        smooth = (context / wavelength - low) / (high - low)
        kind = "between"
        want = (1 - smooth) * frequency / factor + smooth * frequency
      kinds.add(kind)
      np.testing.assert_allclose(got[i], want, rtol=1e-5)
    self.assertLen(kinds, 3)

  def test_a_factor_of_one_stretches_nothing(self):
    np.testing.assert_array_equal(
      _frequencies(16, 1e4, rope_low_frequency_factor=7.0),
      _frequencies(16, 1e4),
    )


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


class RangesTest(parameterized.TestCase):
  """Keys in several arrays, and rows that share an entry of one."""

  _batch, _length, _heads, _kv_heads, _dim = 6, 2, 4, 2, 8

  def _query(self):
    return _random(self._batch, self._length, self._heads, self._dim)

  def _range(self, entries, slots, *, seed):
    heads, dim = self._kv_heads, self._dim
    key = _random(entries, heads, dim, slots, seed=2 * seed)
    value = _random(entries, heads, slots, dim, seed=2 * seed + 1)
    rng = np.random.default_rng(seed)
    mask = rng.random((entries, self._length, slots)) < 0.6
    return key, value, mask

  def _ranges(self):
    """Of one entry for all rows, one for three, two and one; none is full."""
    ranges = [
      self._range(entries, slots, seed=seed)
      for seed, (entries, slots) in enumerate([(1, 3), (2, 5), (3, 1), (6, 4)])
    ]
    ranges[3][2][..., 0] = True
    # One whole range that some rows may not read.
    ranges[1][2][1] = False
    return ranges

  def _as_one(self, ranges):
    """The same keys in one array, with an entry for each row."""
    apiece = [
      [np.repeat(array, self._batch // len(array), axis=0) for array in each]
      for each in ranges
    ]
    keys, values, masks = zip(*apiece, strict=True)
    return (
      np.concatenate(keys, axis=3),
      np.concatenate(values, axis=2),
      np.concatenate(masks, axis=2),
    )

  @parameterized.parameters("0123", "3210", "13", "3", "331")
  def test_several_equal_one(self, order):
    query, ranges = self._query(), self._ranges()
    ranges = [ranges[int(i)] for i in order]
    # ``attend`` has a test of its own, and one range.
    key, value, mask = self._as_one(ranges)
    want = attention.attend(
      query, np.moveaxis(key, 3, 1), value.swapaxes(1, 2), mask
    )
    got = jax.jit(attention.attend_ranges)(query, ranges)
    np.testing.assert_allclose(got, want, atol=1e-5)

  def test_entries_go_to_consecutive_rows(self):
    query = self._query()
    for entries in (1, 2, 3, 6):
      key, value, mask = self._range(entries, 5, seed=entries)
      mask[..., 1] = True
      got = jax.jit(attention.attend_ranges)(query, ((key, value, mask),))
      for row in range(self._batch):
        mine = slice(row * entries // self._batch, None)
        alone = tuple(array[mine][:1] for array in (key, value, mask))
        want = attention.attend_ranges(query[row : row + 1], (alone,))
        np.testing.assert_allclose(got[row], want[0], atol=1e-5)

  def test_a_shared_entry_is_read_as_it_lies(self):
    """Not once for each row: that is what sharing saves."""
    shared = self._ranges()[1]
    program = jax.make_jaxpr(attention.attend_ranges)(self._query(), (shared,))
    products = [
      equation
      for equation in program.eqns
      if equation.primitive.name == "dot_general"
    ]
    _, key, value, _ = program.jaxpr.invars
    self.assertEqual([each.invars[1] for each in products], [key, value])

  def test_entries_must_divide_the_rows(self):
    with self.assertRaises((TypeError, ValueError)):
      attention.attend_ranges(self._query(), (self._range(4, 5, seed=0),))

  def test_weights_are_float32_across_ranges(self):
    # Scores 256 and 257 are one bfloat16, and lie in two ranges.
    query = np.array([256.0, 1.0, 0, 0], np.float32).reshape(1, 1, 1, 4)
    ranges = []
    for index in range(2):
      key = np.zeros((1, 1, 4, 1), np.float32)
      key[:, :, 0], key[:, :, 1] = 2.0, 2.0 * index
      value = np.full((1, 1, 1, 4), float(index), np.float32)
      half = [jnp.asarray(x, jnp.bfloat16) for x in (key, value)]
      ranges.append((*half, jnp.ones((1, 1, 1), bool)))
    got = attention.attend_ranges(jnp.asarray(query, jnp.bfloat16), ranges)
    self.assertEqual(got.dtype, jnp.bfloat16)
    want = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(float(got[0, 0, 0, 0]), want, atol=0.005)


class PackedTest(parameterized.TestCase):
  """Every way to attend within segments gives what ``attend`` gives."""

  def _inputs(self, batch, length, heads, kv_heads, head_dim):
    query = _random(batch, length, heads, head_dim)
    key = _random(batch, length, kv_heads, head_dim, seed=1)
    value = _random(batch, length, kv_heads, head_dim, seed=2)
    rng = np.random.default_rng(3)
    # Ascending ids with a gap or two, and padding at the end.
    segments = np.cumsum(rng.random((batch, length)) < 4 / length, axis=1) + 1
    segments[:, length - length // 8 :] = 0
    return query, key, value, segments.astype(np.int32)

  def _value_and_gradients(self, attend, inputs):
    *arrays, segments = inputs

    def loss(*arrays):
      out = attend(*arrays, segments)
      return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    (_, out), gradients = jax.jit(
      jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    )(*arrays)
    return out, gradients

  def _dense(self, query, key, value, segments):
    mask = attention.packed_mask(segments)
    return attention.attend(query, key, value, mask)

  @parameterized.parameters(12, 13, 8, 3)
  def test_blocks_of_queries_equal_the_whole(self, length):
    inputs = self._inputs(2, length, 4, 2, 8)
    want = self._value_and_gradients(self._dense, inputs)
    with mock.patch.object(attention, "_QUERY_BLOCK", 4):
      got = self._value_and_gradients(attention.attend_packed, inputs)
    for w, g in zip(*map(jax.tree.leaves, (want, got)), strict=True):
      np.testing.assert_allclose(g, w, atol=2e-5)

  def test_a_block_of_queries_never_sees_the_whole_score_matrix(self):
    inputs = self._inputs(1, 64, 1, 1, 8)
    with mock.patch.object(attention, "_QUERY_BLOCK", 16):
      program = jax.make_jaxpr(
        lambda *arrays: self._value_and_gradients(
          attention.attend_packed, arrays
        )
      )(*inputs)
    text = str(program)
    self.assertIn("16,64]", text)
    self.assertNotIn("64,64]", text)

  @parameterized.parameters((256, 2, 1), (384, 2, 2))
  def test_splash_attention_equals_the_dense_one(self, length, heads, kv_heads):
    inputs = self._inputs(2, length, heads, kv_heads, 128)
    want = self._value_and_gradients(self._dense, inputs)
    got = self._value_and_gradients(
      functools.partial(attention._splash, interpret=True), inputs
    )
    for w, g in zip(*map(jax.tree.leaves, (want, got)), strict=True):
      np.testing.assert_allclose(g, w, atol=1e-4, rtol=1e-4)

  @parameterized.parameters("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
  def test_splash_attention_compiles_for(self, name):
    try:
      devices = topology.devices(name)
    except ConfigError as error:
      self.skipTest(str(error))
    mesh = Mesh(np.array(devices).reshape(2, 2), ("rows", "tensor"))
    partition = Partition(mesh, ("rows",), "tensor", None)
    shapes = ((2, 1024, 4, 128), (2, 1024, 2, 128), (2, 1024, 2, 128))
    heads = NamedSharding(mesh, PartitionSpec("rows", None, "tensor", None))
    arrays = [
      jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=heads)
      for shape in shapes
    ]
    segments = jax.ShapeDtypeStruct(
      (2, 1024), jnp.int32, sharding=NamedSharding(mesh, partition.row_spec)
    )

    def loss(query, key, value, segments):
      out = attention.attend_packed(
        query, key, value, segments, partition=partition
      )
      return jnp.sum(jnp.square(out.astype(jnp.float32)))

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    compiled = program.lower(*arrays, segments).compile().as_text()
    self.assertIn("splash", compiled)
    # A device's score matrix of its one row and two heads.
    self.assertNotIn("1024,1024]", compiled)
