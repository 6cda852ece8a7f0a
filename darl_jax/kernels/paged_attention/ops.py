"""Attention of one query per row over cached pages: checks and dispatch."""

import functools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from darl_jax.kernels.paged_attention import block_sizes, kernel, ref
from darl_jax.kernels.paged_attention.ref import Bounds, Scales
from darl_jax.kernels.partition import Partition, per_shard

attend = ref.attend
merge = ref.merge


def paged_attention(
  query: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  table: jax.Array,
  *,
  head_tokens: jax.Array,
  head_pages: jax.Array,
  own_tokens: jax.Array,
  layer: jax.Array | int | None = None,
  key_scales: jax.Array | None = None,
  value_scales: jax.Array | None = None,
  partition: Partition | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention over the pages of a table, and its weight; see ``ref.attend``.

  On a TPU a kernel that reads the pages where they are, up to the last used one
  (``kernel``), where ``supported``; elsewhere they are gathered first. Parts
  of a context that lie elsewhere, such as the tokens of a dispatch or a prefix
  in a table of its own, are attended to by themselves and joined by ``merge``.

  Args:
    query: float [B, N, H], of the cache's dtype unless that is int8.
    keys: [R, pages, M, page tokens, H], float32, bfloat16 or int8; R slices
      hold pages of their own. With ``layer``, [L, R, pages, ...] of all layers:
      a layer's part of such an array is read in place, where a program that
      first cut it out would copy it.
    values: As ``keys``.
    table: int [Q, n], pages within the slice: entries 0 .. Q / R - 1 are of the
      first, and so on. Each serves B / Q consecutive rows, which attend to the
      same slots and for which they are read once. A page without a valid slot
      may be any.
    head_tokens: int [Q], valid slots from the entry's first on.
    head_pages: int [Q], from whose end on there may be more: between the two
      lies a hole where a shared prefix ends within a page.
    own_tokens: int [Q], valid slots there.
    layer: int scalar; None where the arrays are of one layer.
    key_scales: float32, as ``keys`` without its last axis: an int8 key times
      its scale is the key. None for others.
    value_scales: As ``key_scales``.
    partition: Rows, entries and R are cut along ``partition.rows``, heads along
      ``partition.tensor``. None for whole arrays.

  Returns:
    out: float32 [B, N, H]; 0 where no slot is valid.
    lse: float32 [B, N], log of the sum of exponentials; minus infinity where no
      slot is valid.
    Without a gradient.

  Raises:
    AssertionError: Shapes or dtypes do not fit.
    ValueError: The partition does not divide the arrays.
  """
  bounds = Bounds(head_tokens, head_pages, own_tokens)
  scales = None
  if key_scales is not None or value_scales is not None:
    scales = Scales(key_scales, value_scales)
  _check(query, keys, values, table, bounds, layer, scales)
  _check_partition(query, keys, table, partition)
  stacked = (None,) * (layer is not None)
  heads = slices = rows = None
  cores = 1
  if partition is not None:
    rows = partition.row_spec
    heads = PartitionSpec(partition.rows, partition.tensor)
    slices = PartitionSpec(*stacked, partition.rows, None, partition.tensor)
    # Devices that are no TPUs have no such attribute.
    cores = getattr(partition.mesh.devices.flat[0], "num_cores", 1)
  function = per_shard(
    functools.partial(_by_platform, cores=cores),
    partition,
    in_specs=(heads, slices, slices, rows, rows, PartitionSpec(), slices),
    out_specs=heads,
  )
  arrays = jax.lax.stop_gradient((query, keys, values))
  integers = table, bounds, 0 if layer is None else layer
  integers = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), integers)
  return function(*arrays, *integers, scales)


def supported(
  query: jax.ShapeDtypeStruct,
  keys: jax.ShapeDtypeStruct,
  table: jax.ShapeDtypeStruct,
  *,
  partition: Partition,
) -> bool:
  """Whether ``paged_attention`` of such arrays is the kernel, on this mesh.

  Args:
    query: [B, N, H]; anything with a shape and a dtype.
    keys: [..., R, pages, M, page tokens, H].
    table: [Q, n].
    partition: How they are cut.
  """
  parts = _row_parts(partition)
  tensor = partition.size(partition.tensor)
  batch, num_heads, head_dim = query.shape
  entries, width = table.shape
  kv_heads, page_tokens = keys.shape[-3:-1]
  return partition.platform == "tpu" and block_sizes.fits(
    entries=entries // parts,
    width=width,
    kv_heads=kv_heads // tensor,
    page_tokens=page_tokens,
    head_dim=head_dim,
    queries=batch // entries * (num_heads // kv_heads),
    dtype=keys.dtype,
  )


def _check(query, keys, values, table, bounds, layer, scales) -> None:
  chex.assert_rank(query, 3)
  chex.assert_rank([keys, values], 5 + (layer is not None))
  chex.assert_equal_shape([keys, values])
  chex.assert_rank(table, 2)
  chex.assert_shape(list(bounds), table.shape[:1])
  chex.assert_type([table, *bounds], jnp.integer)
  chex.assert_type(query, jnp.floating)
  chex.assert_axis_dimension(keys, -1, query.shape[2])
  chex.assert_is_divisible(query.shape[0], table.shape[0])
  chex.assert_is_divisible(query.shape[1], keys.shape[-3])
  chex.assert_is_divisible(table.shape[0], keys.shape[-5])
  chex.assert_axis_dimension_gt(table, 1, 0)
  if scales is None:
    chex.assert_type([keys, values], query.dtype)
  else:
    chex.assert_type([keys, values], jnp.int8)
    chex.assert_type(list(scales), jnp.float32)
    chex.assert_shape(list(scales), keys.shape[:-1])


def _row_parts(partition: Partition) -> int:
  parts = 1
  for axis in partition.rows:
    parts *= partition.size(axis)
  return parts


def _check_partition(query, keys, table, partition) -> None:
  if partition is None:
    return
  parts, tensor = _row_parts(partition), partition.size(partition.tensor)
  problems = [
    f"{name} = {size} must split over {' * '.join(axes)} = {over}."
    for name, size, axes, over in (
      ("R", keys.shape[-5], partition.rows, parts),
      ("Q", table.shape[0], partition.rows, parts),
      ("B", query.shape[0], partition.rows, parts),
      ("M", keys.shape[-3], (str(partition.tensor),), tensor),
    )
    if size % over
  ]
  if problems:
    raise ValueError(" ".join(problems))


def _by_platform(
  query, keys, values, table, bounds, layer, scales, *, cores: int
) -> tuple[jax.Array, jax.Array]:
  """What one device does with its rows, slices and heads."""
  slices, num_pages, kv_heads, page_tokens, head_dim = keys.shape[-5:]
  entries, width = table.shape
  # The pages of all layers and slices are one pool. Clipped, since the kernel
  # does not check where it reads.
  of_slice = jnp.repeat(jnp.arange(slices), entries // slices)
  first = (layer * slices + of_slice) * num_pages
  table = jnp.clip(table, 0, num_pages - 1) + first[:, None]
  keys, values = (x.reshape(-1, *x.shape[-3:]) for x in (keys, values))
  if scales is not None:
    scales = Scales(*(x.reshape(-1, *x.shape[-2:]) for x in scales))
  sizes = dict(
    width=width,
    kv_heads=kv_heads,
    page_tokens=page_tokens,
    head_dim=head_dim,
    dtype=keys.dtype,
  )
  queries = query.shape[0] // entries * (query.shape[1] // kv_heads)
  operands = query, keys, values, table, bounds, scales
  if not block_sizes.fits(entries=entries, queries=queries, **sizes):
    return ref.paged_attention(*operands)
  return jax.lax.platform_dependent(
    *operands,
    tpu=functools.partial(
      kernel.paged_attention,
      block_pages=block_sizes.pages_per_block(**sizes),
      cores=cores,
    ),
    default=ref.paged_attention,
  )
