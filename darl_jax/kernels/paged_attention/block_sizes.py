"""How many pages the kernel works on at a time, and what it has room for."""

import math

import jax.numpy as jnp

LANES = 128

# Keys and values of a block; two blocks are in VMEM. A larger block costs fewer
# instructions for each of its slots, by the compiler's static schedule for v5e
# 0.74 at 512 slots and 0.57 at 2,048 with two key heads, 3.3 at 256 and 2.3 at
# 512 with eight; and 2 MiB take 1.5 us (v5p) to 2.6 us (v5e) to come from HBM,
# long against what a transfer takes to begin.
BLOCK_BYTES = 2 * 2**20
# A block's unused slots are not fetched, but computed with.
MAX_SLOTS = 2048
# Each is two transfers, written out one by one.
MAX_PAGES = 64

# What the compiler adds to the estimate, such as spilled registers.
_SPARE_BYTES = 8 * 2**20
# Of VMEM, 64 MiB a core or more on v5p and later.
VMEM_BYTES = 56 * 2**20
# Of SMEM, 1 MiB.
TABLE_BYTES = 512 * 2**10


def sublanes(dtype: jnp.dtype) -> int:
  """Rows of a tile of this dtype in VMEM."""
  return 32 // jnp.dtype(dtype).itemsize


def pages_per_block(
  *,
  width: int,
  kv_heads: int,
  page_tokens: int,
  head_dim: int,
  dtype: jnp.dtype,
) -> int:
  """Pages of a block: whole tiles of 128 slots, no more than a table needs.

  Args:
    width: Pages of a table's entry.
    kv_heads: M on a device.
    page_tokens: Slots of a page.
    head_dim: H.
    dtype: Of the pages.
  """
  unit = LANES // math.gcd(LANES, page_tokens)
  slot_bytes = 2 * kv_heads * head_dim * jnp.dtype(dtype).itemsize
  slots = min(BLOCK_BYTES // slot_bytes, MAX_SLOTS)
  pages = min(slots // page_tokens, MAX_PAGES, -(-width // unit) * unit)
  return max(unit, pages // unit * unit)


def vmem_limit(
  *,
  block_pages: int,
  width: int,
  kv_heads: int,
  page_tokens: int,
  head_dim: int,
  queries: int,
  dtype: jnp.dtype,
) -> int:
  """Bytes: two buffers of all that moves, scratch, scores, and some to spare.

  Args:
    block_pages: Pages of a block.
    width: Pages of a table's entry.
    kv_heads: M on a device.
    page_tokens: Slots of a page.
    head_dim: H.
    queries: X, of each key head of an entry.
    dtype: Of the pages.
  """
  itemsize = jnp.dtype(dtype).itemsize
  slots = block_pages * page_tokens
  block = 2 * kv_heads * slots * head_dim * itemsize
  tiles = kv_heads * (-(-queries // 32) * 32)
  # Query, two outputs, three scratch arrays, in tiles of 128 lanes.
  rows = tiles * (2 * (2 * head_dim + LANES) + 2 * LANES + head_dim) * 4
  scores = 4 * 4 * tiles // kv_heads * slots
  scales = 0
  if not jnp.issubdtype(dtype, jnp.floating):
    whole = -(-width // block_pages) * slots
    scales = 2 * 2 * max(kv_heads, 8) * whole * 4
  return 2 * block + rows + scores + scales + _SPARE_BYTES


def fits(
  *,
  entries: int,
  width: int,
  kv_heads: int,
  page_tokens: int,
  head_dim: int,
  queries: int,
  dtype: jnp.dtype,
) -> bool:
  """Whether the kernel takes arrays of these sizes, on a device.

  Args:
    entries: Q.
    width: Pages of a table's entry.
    kv_heads: M.
    page_tokens: Slots of a page.
    head_dim: H.
    queries: X, of each key head of an entry.
    dtype: Of the pages.
  """
  sizes = dict(
    width=width,
    kv_heads=kv_heads,
    page_tokens=page_tokens,
    head_dim=head_dim,
    dtype=dtype,
  )
  limit = vmem_limit(
    block_pages=pages_per_block(**sizes), queries=queries, **sizes
  )
  return (
    head_dim % LANES == 0
    and page_tokens % sublanes(dtype) == 0
    and 4 * entries * width <= TABLE_BYTES
    and limit <= VMEM_BYTES
  )
