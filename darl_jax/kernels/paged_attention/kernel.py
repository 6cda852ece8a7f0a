"""Attention of one query per row over cached pages: a TPU kernel.

A pool of pages stays in HBM. For each entry of the table the kernel copies one
block of pages after another into one of two buffers in VMEM, the next block,
be it of the next entry, always on its way while one is computed with, and joins
them by online softmax. So each used page is read once for all rows of its
entry, what is behind the last used one is not read, and nothing is written but
the results. Gathering the pages first reads and writes all that the table could
hold, used or not, and needs memory for it.

Why not the kernel that JAX ships (``ragged_paged_attention``), which compiles
at the same shapes given block sizes and a VMEM limit (``compile_test``)? Its
pages hold keys and values in turn, [pages, page tokens, 2 M, H], of one layer;
it takes a sequence's tokens to fill its pages without a hole, so that a shared
prefix would have to end with a page; it reads such a prefix once for each
sample; and it returns no log-sum-exp, without which the tokens of the current
dispatch, which are in no page yet, cannot be joined with the rest.

Why copies by hand and not blocks of a grid? A grid has as many steps as the
widest entry could need, at a third of a microsecond each or more: for 40 rows
of up to 17,408 tokens in pages of 64, 8 pages a step, 0.5 ms a layer, where
reading 8,192 tokens of each takes 0.12 ms. Here the number of blocks follows
from the entry's length.

What a layer's call costs on a chip, estimated: its bytes at the chip's peak
rate, and the compiler's static schedule of the loop over whole blocks, without
its waits, at 1.5 GHz (v5e) and at 1.75 GHz on two cores (v5p).

  ========================  ====  ===  =======  ========  ========
  configuration, chip       rows  M    context  bytes     schedule
  ========================  ====  ===  =======  ========  ========
  Qwen3-8B, v5p, tensor 4   64    2    8,192    0.194 ms  0.086 ms
  Qwen3-1.7B, v5e           8     8    4,096    0.163 ms  0.051 ms
  Qwen3-32B, v6e, tensor 8  32    1    4,096    0.040 ms  unknown
  ========================  ====  ===  =======  ========  ========

The schedule's share of the bytes' time is 0.7 in float32, whose products take
six passes each, and with int8; 0.54 where eight samples share the 8B row's
prefix; and 0.9 with pages of 16 tokens instead of 64, of which starting the
copies is half.

Compiled for v5e, v5p and v6e and tested in interpret mode; never run on a TPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from darl_jax.kernels.paged_attention import block_sizes, ref
from darl_jax.kernels.paged_attention.ref import EXCLUDED, Bounds, Scales


def paged_attention(
  query: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  table: jax.Array,
  bounds: Bounds,
  scales: Scales | None,
  *,
  block_pages: int,
  cores: int = 1,
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
  """As ``ref.paged_attention``, with the pages read where they are.

  Args:
    query: [B, N, H].
    keys: [pages, M, page tokens, H].
    values: [pages, M, page tokens, H].
    table: int32 [Q, n].
    bounds: [Q].
    scales: [pages, M, page tokens]; gathered beforehand, a thirty-second of the
      bytes of keys and values.
    block_pages: Pages that are fetched and used at a time.
    cores: TensorCores of the device, over which entries are dealt out.
    interpret: Runs as plain JAX, for tests.
  """
  entries, width = table.shape
  kv_heads, page_tokens, head_dim = keys.shape[1:]
  slots = block_pages * page_tokens
  dtype = query.dtype if scales is not None else keys.dtype
  by_head = ref.by_kv_head(query.astype(dtype), entries, kv_heads)
  rows = by_head.shape[2]
  tile = block_sizes.sublanes(dtype)
  padded = pl.cdiv(rows, tile) * tile
  by_head = jnp.pad(by_head, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
  cores = cores if entries % cores == 0 else 1
  per_core = entries // cores

  def entry(*last: int) -> pl.BlockSpec:
    return pl.BlockSpec(
      (None, kv_heads, *last),
      lambda core, i, *_: (core * per_core + i, 0, 0, 0)[: len(last) + 2],
    )

  if not interpret:
    # A BlockSpec says where the kernel looks, not where XLA puts an array.
    keys, values = (
      pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (keys, values)
    )
  in_place = pl.BlockSpec(memory_space=pltpu.HBM)
  operands = [by_head, keys, values]
  specs = [entry(padded, head_dim), in_place, in_place]
  if scales is not None:
    whole = pl.cdiv(width, block_pages) * slots
    operands += [_gathered(x, table, whole) for x in scales]
    specs += [entry(whole)] * 2
  buffer = pltpu.VMEM((2, block_pages, *keys.shape[1:]), keys.dtype)
  column = pltpu.VMEM((kv_heads, padded, block_sizes.LANES), jnp.float32)
  call = pl.pallas_call(
    functools.partial(_body, block_pages=block_pages, width=width),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(cores, per_core),
      in_specs=specs,
      out_specs=[entry(padded, head_dim), entry(padded, 1)],
      scratch_shapes=[
        buffer,
        buffer,
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
        column,
        column,
        pltpu.VMEM((kv_heads, padded, head_dim), jnp.float32),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((entries, kv_heads, padded, head_dim), jnp.float32),
      jax.ShapeDtypeStruct((entries, kv_heads, padded, 1), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=block_sizes.vmem_limit(
        block_pages=block_pages,
        width=width,
        kv_heads=kv_heads,
        page_tokens=page_tokens,
        head_dim=head_dim,
        queries=rows,
        dtype=keys.dtype,
      ),
      # Those of each transfer, four times its own instructions. The caller
      # keeps the table within the pages.
      disable_bounds_checks=True,
    ),
    cost_estimate=cost(
      entries * width,
      rows,
      keys,
      scale_bytes=0 if scales is None else 4,
    ),
    interpret=interpret,
    name="paged_attention",
  )
  out, lse = call(
    table.reshape(-1), _limits(bounds, width, page_tokens), *operands
  )
  out, lse = out[:, :, :rows], lse[:, :, :rows]
  return ref.by_row(out, query.shape), ref.by_row(lse, (*query.shape[:2], 1))[
    ..., 0
  ]


# Rows of ``_limits``.
_PAGES, _HEAD, _OWN, _END = range(4)


def _limits(bounds: Bounds, width: int, page_tokens: int) -> jax.Array:
  """int32 [4, Q]: pages up to the last used one, and the ends of the ranges.

  At least one page, so that every entry has a block to fetch.
  """
  own = bounds.head_pages * page_tokens
  end = own + bounds.own_tokens
  last = jnp.maximum(
    bounds.head_tokens, jnp.where(bounds.own_tokens > 0, end, 0)
  )
  pages = jnp.clip(-(-last // page_tokens), 1, width)
  return jnp.stack([pages, bounds.head_tokens, own, end])


def _gathered(scales: jax.Array, table: jax.Array, whole: int) -> jax.Array:
  """[pages, M, page tokens] to [Q, M, slots], ended with zeros."""
  found = jnp.moveaxis(scales[table], 2, 1)
  found = found.reshape(*found.shape[:2], -1)
  return jnp.pad(found, ((0, 0), (0, 0), (0, whole - found.shape[2])))


def _body(
  table_ref,
  limits_ref,
  query_ref,
  keys_hbm,
  values_hbm,
  *refs,
  block_pages: int,
  width: int,
):
  """One entry: its blocks of pages in turn, the next one always on its way.

  Args:
    table_ref: int32 [Q * n], SMEM.
    limits_ref: int32 [4, Q], SMEM.
    query_ref: [M, X, H].
    keys_hbm: [pages, M, page tokens, H], in HBM.
    values_hbm: [pages, M, page tokens, H], in HBM.
    *refs: Scales of keys and values, [M, slots], where there are any; outputs
      [M, X, H] and [M, X, 1]; scratch: two buffers each of keys and of values,
      a semaphore for each, the buffer that comes next, peaks and totals
      [M, X, 128] and sums [M, X, H].
    block_pages: Pages of a block.
    width: n.
  """
  *scale_refs, out_ref, lse_ref = refs[:-7]
  keys_ref, values_ref, arrived, turn_ref, peak_ref, total_ref, sums_ref = refs[
    -7:
  ]
  i, per_core = pl.program_id(1), pl.num_programs(1)
  q = pl.program_id(0) * per_core + i
  page_tokens = keys_hbm.shape[2]
  slots = block_pages * page_tokens

  def copies(entry, block, turn, page):
    """Of a block's page to the buffers of a turn."""
    where = table_ref[entry * width + block * block_pages + page]
    return [
      pltpu.make_async_copy(
        hbm.at[where], buffer.at[turn, page], arrived.at[turn]
      )
      for hbm, buffer in ((keys_hbm, keys_ref), (values_hbm, values_ref))
    ]

  def each_page(entry, block, turn, act):
    """Of those that the entry uses; what is behind them is never read."""
    count = limits_ref[_PAGES, entry] - block * block_pages
    for page in range(block_pages):

      @pl.when(page < count)
      def _(page=page):
        for copy in copies(entry, block, turn, page):
          act(copy)

  def start(entry, block, turn):
    each_page(entry, block, turn, lambda copy: copy.start())

  def wait(block, turn):
    each_page(q, block, turn, lambda copy: copy.wait())

  @pl.when(i == 0)
  def _():
    turn_ref[0] = 0
    start(q, 0, 0)

  peak_ref[...] = jnp.full_like(peak_ref, EXCLUDED)
  total_ref[...] = jnp.zeros_like(total_ref)
  sums_ref[...] = jnp.zeros_like(sums_ref)
  blocks = pl.cdiv(limits_ref[_PAGES, q], block_pages)

  def step(block, turn):
    last = block + 1 == blocks

    @pl.when(jnp.logical_not(last) | (i + 1 < per_core))
    def _():
      start(jnp.where(last, q + 1, q), jnp.where(last, 0, block + 1), 1 - turn)

    wait(block, turn)
    first = block * slots
    head, own, end = (limits_ref[at, q] for at in (_HEAD, _OWN, _END))

    def valid(shape, axis):
      slot = jax.lax.broadcasted_iota(jnp.int32, shape, axis) + first
      return (slot < head) | ((slot >= own) & (slot < end))

    if jnp.issubdtype(values_ref.dtype, jnp.floating):
      # A weight of 0 times what lies in a slot that is not there is NaN where
      # that is; whole blocks, which are most, have no such slot.
      stop = first + slots
      full = (stop <= head) | ((stop <= end) & ((first >= own) | (head >= own)))

      @pl.when(jnp.logical_not(full))
      def _():
        for page in range(block_pages):
          shape = (page_tokens, values_ref.shape[-1])
          slot = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
          slot += first + page * page_tokens
          there = (slot < head) | ((slot >= own) & (slot < end))
          for head_index in range(values_ref.shape[2]):
            at = (turn, page, head_index)
            clean = jnp.where(there, values_ref[at].astype(jnp.float32), 0.0)
            values_ref[at] = clean.astype(values_ref.dtype)

    there = valid((1, slots), 1)
    for head_index in range(keys_ref.shape[2]):
      _accumulate(
        query_ref[head_index],
        keys_ref[turn, :, head_index].reshape(slots, -1),
        values_ref[turn, :, head_index].reshape(slots, -1),
        there,
        [
          scale[head_index, pl.ds(pl.multiple_of(first, slots), slots)][None]
          for scale in scale_refs
        ],
        peak_ref.at[head_index],
        total_ref.at[head_index],
        sums_ref.at[head_index],
      )
    return 1 - turn

  turn_ref[0] = jax.lax.fori_loop(0, blocks, step, turn_ref[0])
  out_ref[...], lse_ref[...] = ref.normalized(
    sums_ref[...], peak_ref[:, :, :1], total_ref[:, :, :1]
  )


def _accumulate(
  query, keys, values, valid, scales, peak_ref, total_ref, sums_ref
):
  """One block of one key head: a step of online softmax.

  Milakov and Gimelshein, arXiv:1805.02867.

  Args:
    query: [X, H].
    keys: [slots, H].
    values: [slots, H].
    valid: bool [1, slots].
    scales: Of keys and of values, float32 [1, slots]; empty for none.
    peak_ref: float32 [X, 128], the same in every lane.
    total_ref: float32 [X, 128], the same in every lane.
    sums_ref: float32 [X, H].
  """
  dot = functools.partial(
    jax.lax.dot_general,
    preferred_element_type=jnp.float32,
    precision=jax.lax.Precision.HIGHEST
    if query.dtype == jnp.float32
    else jax.lax.Precision.DEFAULT,
  )
  scores = dot(query, keys.astype(query.dtype), (((1,), (1,)), ((), ())))
  if scales:
    scores *= scales[0]
  valid = jnp.broadcast_to(valid, scores.shape)
  scores = jnp.where(valid, scores * query.shape[1] ** -0.5, EXCLUDED)
  before = peak_ref[...]
  peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
  weights = jnp.where(valid, jnp.exp(scores - peak[:, :1]), 0.0)
  carried = jnp.exp(before - peak)
  peak_ref[...] = peak
  total_ref[...] = carried * total_ref[...] + jnp.sum(
    weights, axis=1, keepdims=True
  )
  if scales:
    weights = jnp.where(valid, weights * scales[1], 0.0)
  sums_ref[...] = carried[:, :1] * sums_ref[...] + dot(
    weights.astype(query.dtype),
    values.astype(query.dtype),
    (((1,), (0,)), ((), ())),
  )


def cost(
  pages: int, rows: int, keys: jax.Array, *, scale_bytes: int
) -> pl.CostEstimate:
  """Operations and bytes where every page of the table is used.

  Args:
    pages: Entries of the table.
    rows: Queries of each key head.
    keys: The pages, of which shape and dtype count.
    scale_bytes: Of a slot's scale of a head; 0 for none.
  """
  kv_heads, page_tokens, head_dim = keys.shape[1:]
  slots = pages * kv_heads * page_tokens
  return pl.CostEstimate(
    flops=4 * slots * rows * head_dim,
    transcendentals=slots * rows,
    bytes_accessed=2 * slots * (head_dim * keys.dtype.itemsize + scale_bytes),
  )
