"""The kernel in interpret mode, against the definition."""

import contextlib
import functools
import io
import pathlib
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.experimental.pallas import tpu as pltpu

from darl_jax.kernels.paged_attention import block_sizes, kernel, ref

inputs = types.SimpleNamespace(
  **runpy.run_path(str(pathlib.Path(__file__).parent / "inputs.py"))
)

_reference = jax.jit(ref.paged_attention)


@functools.cache
def _kernel(block_pages, cores=1, interpret=True):
  return jax.jit(
    functools.partial(
      kernel.paged_attention,
      block_pages=block_pages,
      cores=cores,
      interpret=interpret,
    )
  )


def _simulated():
  """TPU memories and transfers, instead of plain JAX."""
  return pltpu.InterpretParams(
    dma_execution_mode="on_wait",
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
    detect_races=True,
  )


class KernelTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(pltpu.reset_tpu_interpret_mode_state)

  def _assert_same(self, got, want, dtype="float32"):
    # The definition rounds the weights against the whole row's peak, the
    # kernel against that of the blocks so far.
    tolerance = 4e-3 if dtype == "bfloat16" else 2e-6
    for name, g, w in zip(("out", "lse"), got, want, strict=True):
      self.assertEqual((g.dtype, g.shape), (jnp.float32, w.shape))
      np.testing.assert_allclose(
        g, w, rtol=tolerance, atol=tolerance, err_msg=name
      )

  @parameterized.parameters(
    # All in one block; two, the last of which ends beyond the table; three.
    ("float32", 6, 1, (8, 2)),
    ("float32", 4, 1, (8, 2)),
    ("float32", 2, 3, (8, 4)),
    ("bfloat16", 4, 1, (16, 4)),
    ("bfloat16", 2, 2, (9, 3)),
    ("int8", 4, 1, (16, 4)),
    ("int8", 8, 2, (4, 4)),
  )
  def test_equals_definition(self, dtype, block_pages, rows_per_entry, heads):
    given = inputs.make(
      dtype=dtype,
      rows_per_entry=rows_per_entry,
      heads=heads,
      page_tokens=32 if dtype == "int8" else 16,
    ).arrays()
    got = _kernel(block_pages)(*given)
    self._assert_same(got, _reference(*given), dtype)

  @parameterized.parameters(np.nan, np.inf)
  def test_garbage_changes_nothing(self, garbage):
    for dtype in ("float32", "int8"):
      clean, dirty = (
        _kernel(4)(*inputs.make(dtype=dtype, garbage=x).arrays())
        for x in (0.0, garbage)
      )
      jax.tree.map(np.testing.assert_array_equal, dirty, clean)

  def test_huge_scores(self):
    # Integers: exact in both, however large.
    given = inputs.make()
    query, keys = (np.round(1e3 * x) for x in (given.query, given.keys))
    given = given._replace(query=query, keys=keys).arrays()
    got, want = _kernel(4)(*given), _reference(*given)
    self.assertGreater(np.max(np.abs(np.nan_to_num(want[1], neginf=0))), 1e6)
    self._assert_same(got, want)

  @parameterized.parameters((1, 2), (2, 4), (2, 1))
  def test_transfers(self, cores, block_pages):
    # Copies happen when they are waited for, and buffers begin as NaN.
    given = inputs.make().arrays()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
      got = _kernel(block_pages, cores, _simulated())(*given)
      jax.block_until_ready(got)
    self._assert_same(got, _reference(*given))
    self.assertNotIn("RACE", said.getvalue())

  def test_no_page_behind_the_last_used_one_is_read(self):
    given = inputs.make(("hole", "one token", "aligned"))
    table = given.table.copy()
    for entry, used in enumerate((4, 1, 4)):
      table[entry, used:] = 10**6  # Raises where it is followed.
    got = _kernel(4, 1, _simulated())(*given._replace(table=table).arrays())
    self._assert_same(got, _reference(*given.arrays()))

  def test_limits(self):
    bounds = inputs.make().bounds
    pages, head, own, end = np.asarray(
      kernel._limits(bounds, inputs.WIDTH, inputs.PAGE)
    )
    used = inputs.mask(bounds, inputs.PAGE)
    last = [int(np.max(np.nonzero(row)[0], initial=0)) for row in used]
    np.testing.assert_array_equal(pages, [x // inputs.PAGE + 1 for x in last])
    np.testing.assert_array_equal(head, bounds.head_tokens)
    np.testing.assert_array_equal(end - own, bounds.own_tokens)

  def test_cost(self):
    keys = jax.ShapeDtypeStruct((100, 8, 64, 128), jnp.bfloat16)
    cost = kernel.cost(10, 4, keys, scale_bytes=0)
    self.assertEqual(cost.bytes_accessed, 2 * 10 * 8 * 64 * 128 * 2)
    self.assertEqual(cost.flops, 2 * 2 * 10 * 8 * 64 * 4 * 128)
    self.assertEqual(cost.transcendentals, 10 * 8 * 64 * 4)

  def test_size_of_the_table(self):
    # The block that is used for wide tables, here wider than all of them.
    given = inputs.make(page_tokens=64).arrays()
    pages = block_sizes.pages_per_block(
      width=1000, kv_heads=2, page_tokens=64, head_dim=128, dtype=jnp.float32
    )
    self.assertGreater(pages, inputs.WIDTH)
    self._assert_same(_kernel(pages)(*given), _reference(*given))
