"""The definition against float64, and what merging parts gives."""

import pathlib
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.kernels.paged_attention import ref

inputs = types.SimpleNamespace(
  **runpy.run_path(str(pathlib.Path(__file__).parent / "inputs.py"))
)

_attend = jax.jit(ref.attend)
_merge = jax.jit(ref.merge)
_paged = jax.jit(ref.paged_attention)

# Of bfloat16, the rounding of the weights: 2^-9 of each.
_TOLERANCE = dict(float32=2e-6, int8=2e-6, bfloat16=8e-3)


class PagedAttentionTest(parameterized.TestCase):
  @parameterized.product(
    dtype=("float32", "bfloat16", "int8"),
    heads=((8, 2), (9, 3), (4, 4)),
    rows_per_entry=(1, 3),
  )
  def test_equals_float64(self, dtype, heads, rows_per_entry):
    given = inputs.make(
      dtype=dtype, heads=heads, rows_per_entry=rows_per_entry, head_dim=32
    )
    out, lse = _paged(*given.arrays())
    self.assertEqual((out.dtype, lse.dtype), (jnp.float32, jnp.float32))
    want_out, want_lse = inputs.exact(given)
    np.testing.assert_allclose(
      out, want_out, rtol=_TOLERANCE[dtype], atol=_TOLERANCE[dtype]
    )
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)

  def test_by_hand(self):
    # One head of width 4, so that scores are halved. Slots: log 1, log 3 in
    # the head, a hole, log 4 in the own page.
    keys = np.full((3, 1, 2, 4), np.nan, "f4")
    values = np.full((3, 1, 2, 4), np.nan, "f4")
    keys[2, 0, :, :] = 0.0
    keys[2, 0, 1, 0] = 2 * np.log(3)
    values[2, 0] = [[8.0] * 4, [16.0] * 4]
    keys[1, 0, 0] = [2 * np.log(4), 0, 0, 0]
    values[1, 0, 0] = 0.0
    out, lse = ref.paged_attention(
      jnp.array([[[1.0, 0.0, 0.0, 0.0]]]),
      jnp.asarray(keys),
      jnp.asarray(values),
      jnp.array([[2, 0, 1]]),
      ref.Bounds(jnp.array([2]), jnp.array([2]), jnp.array([1])),
      None,
    )
    np.testing.assert_allclose(lse, np.log([[1 + 3 + 4]]), rtol=1e-6)
    np.testing.assert_allclose(out, np.full((1, 1, 4), 7.0), rtol=1e-6)

  @parameterized.parameters(np.nan, np.inf, -np.inf, 3e38)
  def test_garbage_changes_nothing(self, garbage):
    for dtype in ("float32", "bfloat16", "int8"):
      clean, dirty = (
        _paged(*inputs.make(dtype=dtype, head_dim=32, garbage=x).arrays())
        for x in (0.0, garbage)
      )
      jax.tree.map(np.testing.assert_array_equal, dirty, clean)

  def test_empty(self):
    out, lse = _paged(*inputs.make(("empty", "empty behind a head")).arrays())
    np.testing.assert_array_equal(out, np.zeros_like(out))
    np.testing.assert_array_equal(lse, np.full_like(lse, -np.inf))

  def test_huge_scores(self):
    given = inputs.make(scale=1e4, head_dim=32)
    out, lse = _paged(*given.arrays())
    want_out, want_lse = inputs.exact(given)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    self.assertTrue(np.all(np.isfinite(out)))
    scale = np.abs(want_out).max()
    np.testing.assert_allclose(out, want_out, atol=5e-2 * scale)


class MergeTest(parameterized.TestCase):
  def _whole(self, seed=0):
    rng = np.random.default_rng(seed)
    query = jnp.asarray(rng.normal(size=(4, 6, 8)), jnp.float32)
    keys, values = jnp.asarray(rng.normal(size=(2, 4, 3, 20, 8)), jnp.float32)
    mask = jnp.asarray(rng.random((4, 20)) < 0.7)
    return query, keys, values, mask

  @parameterized.parameters(((20,),), ((7, 20),), ((1, 2, 11, 20),))
  def test_parts_make_the_whole(self, ends):
    query, keys, values, mask = self._whole()
    mask = mask.at[1, :11].set(False)  # Empty in some parts.
    mask = mask.at[2].set(False)  # In all of them.
    parts, start = [], 0
    for end in ends:
      here = slice(start, end)
      parts.append(
        _attend(query, keys[:, :, here], values[:, :, here], mask[:, here])
      )
      start = end
    out, lse = _merge(parts)
    want_out, want_lse = _attend(query, keys, values, mask)
    np.testing.assert_allclose(out, want_out, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(out[2], np.zeros((6, 8)))
    np.testing.assert_array_equal(lse[2], np.full(6, -np.inf))

  def test_an_empty_part_changes_nothing(self):
    query, keys, values, mask = self._whole()
    part = _attend(query, keys, values, mask)
    empty = _attend(query, keys, values, jnp.zeros_like(mask))
    for parts in ([part, empty], [empty, part], [empty, part, empty]):
      jax.tree.map(np.testing.assert_array_equal, _merge(parts), part)

  def test_parts_far_apart(self):
    # Neither exp(1000) nor exp(-1000) can be held.
    out = [jnp.full((1, 1, 2), value) for value in (1.0, 3.0)]
    for lse in ([-1e3, 1e3], [1e3, -1e3], [1e3, 1e3]):
      parts = [(o, jnp.full((1, 1), x)) for o, x in zip(out, lse, strict=True)]
      got, total = _merge(parts)
      want = {-1e3: 3.0, 1e3: 1.0}[lse[0]] if lse[0] != lse[1] else 2.0
      np.testing.assert_allclose(got, np.full((1, 1, 2), want))
      np.testing.assert_allclose(total, [[1e3 + np.log(2) * (want == 2.0)]])

  def test_shared_rows(self):
    # An entry for three rows equals the entry repeated for each of them.
    query, keys, values, mask = self._whole()
    rows = jnp.concatenate([query, 2 * query, -query])
    got = _attend(rows, keys, values, mask)
    want = _attend(
      rows, *(jnp.repeat(x, 3, axis=0) for x in (keys, values, mask))
    )
    jax.tree.map(
      lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6),
      got,
      want,
    )
