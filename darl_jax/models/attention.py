"""Rotary embedding and grouped-query attention over masks."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec

from darl_jax.config import ModelConfig
from darl_jax.kernels.paged_attention import ops as paged
from darl_jax.kernels.partition import Partition, per_shard
from darl_jax.models.kv_cache import PagedSpan

# What a checkpoint policy may keep: the attended values of a layer.
OUTPUT = "attention_output"
# The width of a TPU's vector registers, which splash attention's tiles fill.
LANES = 128
# Tile lengths, best first: the greatest that divides the row is taken.
_SPLASH_BLOCKS = (1024, 512, 256, 128)
# Queries whose scores are held at a time where there is no such kernel.
_QUERY_BLOCK = 1024

# Cosines and sines, float32 [B, T, 1, H/2].
Rotations = tuple[jax.Array, jax.Array]


def rotary_frequencies(config: ModelConfig) -> jax.Array:
  """Radians per position of each pair, float32 [H/2].

  Frequency i is theta^(-2i/H) (RoFormer). With a scaling factor, those whose
  turns within the original context are at most the low factor are divided by
  it, those of at least the high factor are kept, and what lies between is
  interpolated linearly in turns (Llama 3.1).
  """
  half = config.head_dim // 2
  exponent = jnp.arange(half, dtype=jnp.float32) / half
  frequency = jnp.float32(config.rope_theta) ** -exponent
  if config.rope_scaling_factor == 1:
    return frequency
  low = config.rope_low_frequency_factor
  high = config.rope_high_frequency_factor
  turns = frequency * (config.rope_original_context / (2 * math.pi))
  kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return frequency * (kept + (1 - kept) / config.rope_scaling_factor)


def rotations(positions: jax.Array, *, frequencies: jax.Array) -> Rotations:
  """How far ``rotary`` turns each pair at each position.

  Args:
    positions: int32 [B, T].
    frequencies: float32 [H/2], as from ``rotary_frequencies``.

  Returns:
    Cosines and sines of the angles, which are float32.
  """
  angle = positions[..., None].astype(jnp.float32) * frequencies[None, None, :]
  angle = angle[:, :, None, :]
  # Left to itself XLA for CPUs computes them again for every head and layer.
  return jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def rotary(x: jax.Array, turns: Rotations) -> jax.Array:
  """Rotates pairs (i, i + H/2) of each head by position (RoFormer; Llama's
  half-split layout).

  Args:
    x: [B, T, heads, H].
    turns: As from ``rotations``.

  Returns:
    [B, T, heads, H] in x's dtype, computed in float32.
  """
  cos, sin = turns
  left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = [left * cos - right * sin, right * cos + left * sin]
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def attend_packed(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segment_ids: jax.Array,
  *,
  partition: Partition | None = None,
) -> jax.Array:
  """Causal attention within the segments of packed rows.

  On a TPU this is JAX's splash attention, which never holds a [T, T] array,
  where its tiles fit (heads of a multiple of 128, rows too). Elsewhere long
  rows take a block of queries at a time, and compute each block again in the
  backward pass. Padding (segment 0) attends to earlier padding, itself
  included, so that no softmax is empty; nothing else attends to it.

  Args:
    query: [B, T, N, H].
    key: [B, T, M, H]; each head serves N / M query heads.
    value: [B, T, M, H].
    segment_ids: int32 [B, T].
    partition: How rows and heads are cut; None for whole arrays.

  Returns:
    [B, T, N, H] in the query's dtype, named ``OUTPUT`` to checkpoints.
  """
  length, head_dim = query.shape[1], query.shape[3]
  tiled = length % LANES == 0 and head_dim % LANES == 0
  if tiled and partition is not None and partition.platform == "tpu":
    heads = PartitionSpec(partition.rows, None, partition.tensor, None)
    return per_shard(
      _splash,
      partition,
      in_specs=(heads, heads, heads, partition.row_spec),
      out_specs=heads,
    )(query, key, value, segment_ids)
  if length <= _QUERY_BLOCK:
    out = attend(query, key, value, packed_mask(segment_ids))
  else:
    out = _by_query_blocks(query, key, value, segment_ids)
  return checkpoint_name(out, OUTPUT)


def _splash(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segment_ids: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Splash attention on one device's rows and heads.

  Interpreted, it runs anywhere, slowly: for tests.
  """
  batch, length, heads, head_dim = query.shape
  kv_heads = key.shape[2]
  group = heads // kv_heads
  block = next(size for size in _SPLASH_BLOCKS if length % size == 0)
  mask = splash_attention.CausalMask((length, length))
  kernel = splash_attention.make_splash_mqa_single_device(
    splash_attention.MultiHeadMask([mask] * group),
    block_sizes=splash_attention.BlockSizes(
      block_q=block,
      block_kv=block,
      block_kv_compute=min(block, 512),
      block_q_dkv=block,
      block_kv_dkv=block,
      block_kv_dkv_compute=min(block, 512),
      block_q_dq=block,
      block_kv_dq=block,
    ),
    residual_checkpoint_name=OUTPUT,
    interpret=interpret,
  )
  scaled = (query.astype(jnp.float32) * head_dim**-0.5).astype(query.dtype)
  grouped = scaled.reshape(batch, length, kv_heads, group, head_dim)

  def row(query, key, value, segment_ids):
    ids = splash_attention.SegmentIds(segment_ids, segment_ids)
    return jax.vmap(kernel, in_axes=(0, 0, 0, None))(query, key, value, ids)

  out = jax.vmap(row)(
    grouped.transpose(0, 2, 3, 1, 4),
    key.transpose(0, 2, 1, 3),
    value.transpose(0, 2, 1, 3),
    segment_ids,
  )
  return out.transpose(0, 3, 1, 2, 4).reshape(query.shape)


def _by_query_blocks(
  query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array
) -> jax.Array:
  """``attend`` under the packed mask, a block of queries at a time."""
  length = query.shape[1]
  blocks = -(-length // _QUERY_BLOCK)
  padding = blocks * _QUERY_BLOCK - length
  padded = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0)))

  @jax.checkpoint
  def block(start: jax.Array) -> jax.Array:
    part = jax.lax.dynamic_slice_in_dim(padded, start, _QUERY_BLOCK, axis=1)
    at = start + jnp.arange(_QUERY_BLOCK)
    # Queries past the end see what the last one sees; they are cut off.
    at = jnp.minimum(at, length - 1)
    here = jnp.take(segment_ids, at, axis=1)
    same = here[:, :, None] == segment_ids[:, None, :]
    causal = jnp.arange(length)[None, :] <= at[:, None]
    return attend(part, key, value, same & causal[None])

  out = jax.lax.map(block, jnp.arange(blocks) * _QUERY_BLOCK)
  out = jnp.moveaxis(out, 0, 1).reshape(padded.shape)
  return out[:, :length]


def packed_mask(segment_ids: jax.Array) -> jax.Array:
  """Who attends to whom in packed rows: causal, and within a segment.

  Padding (segment 0) attends to earlier padding, itself included, so that no
  softmax is empty; nothing else attends to it.

  Args:
    segment_ids: int32 [B, T].

  Returns:
    bool [B, T, T], query by key.
  """
  length = segment_ids.shape[1]
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  causal = jnp.tril(jnp.ones((length, length), bool))
  return same & causal[None]


def attend(
  query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array
) -> jax.Array:
  """Softmax attention; each key/value head serves N / M query heads.

  Args:
    query: [B, T, N, H].
    key: [B, S, M, H].
    value: [B, S, M, H].
    mask: bool [B, T, S]; every query must be allowed at least one key.

  Returns:
    [B, T, N, H] in the query's dtype; scores and softmax are float32.
  """
  keys, values = jnp.moveaxis(key, 1, 3), jnp.swapaxes(value, 1, 2)
  return attend_ranges(query, ((keys, values, mask),))


def attend_ranges(
  query: jax.Array,
  ranges: Sequence[tuple[jax.Array, jax.Array, jax.Array]],
) -> jax.Array:
  """``attend`` over keys and values that lie in several arrays.

  Args:
    query: [B, T, N, H].
    ranges: Keys [Q, M, H, S], values [Q, M, S, H] and mask bool [Q or B, T, S]
      of each, with an S and a Q of their own: B / Q consecutive rows share an
      entry, whose keys and values are read once for all of them. Every query
      must be allowed at least one key.

  Returns:
    [B, T, N, H] in the query's dtype; scores and softmax are float32.
  """
  batch, length, heads, head_dim = query.shape
  kv_heads = ranges[0][0].shape[1]
  group = heads // kv_heads
  lowest = jnp.finfo(jnp.float32).min

  def shared(x: jax.Array, entries: int) -> jax.Array:
    """[B, T, M, group, ...] as [Q, M, rows * T * group, ...]."""
    rest = x.shape[4:]
    by_entry = x.reshape(entries, -1, kv_heads, group, *rest)
    by_head = jnp.moveaxis(by_entry, 2, 1)
    return by_head.reshape(entries, kv_heads, -1, *rest)

  def apart(x: jax.Array) -> jax.Array:
    """[Q, M, rows * T * group, X] as [B, T, M, group, X]."""
    entries, last = x.shape[0], x.shape[-1]
    by_head = x.reshape(entries, kv_heads, -1, group, last)
    by_entry = jnp.moveaxis(by_head, 1, 2)
    return by_entry.reshape(batch, length, kv_heads, group, last)

  grouped = query.reshape(batch, length, kv_heads, group, head_dim)

  def scores(key: jax.Array, mask: jax.Array) -> jax.Array:
    products = apart(
      jnp.einsum(
        "qmxh,qmhs->qmxs",
        shared(grouped, key.shape[0]),
        key,
        preferred_element_type=jnp.float32,
      )
    )
    rows = jnp.repeat(mask, batch // mask.shape[0], axis=0)[:, :, None, None]
    return jnp.where(rows, products * head_dim**-0.5, lowest)

  weights = jax.nn.softmax(
    jnp.concatenate([scores(key, mask) for key, _, mask in ranges], axis=-1),
    axis=-1,
  )
  ends = np.cumsum([key.shape[3] for key, _, _ in ranges])[:-1]
  out = sum(
    apart(
      jnp.einsum(
        "qmxs,qmsh->qmxh",
        shared(part.astype(value.dtype), value.shape[0]),
        value,
      )
    )
    for part, (_, value, _) in zip(
      jnp.split(weights, ends, axis=-1), ranges, strict=True
    )
  )
  return out.reshape(query.shape)


def attend_pages(
  query: jax.Array,
  spans: Sequence[PagedSpan],
  layer: jax.Array,
  tail: tuple[jax.Array, jax.Array, jax.Array],
  *,
  partition: Partition | None,
) -> jax.Array:
  """``attend_ranges`` where most keys and values lie in pages.

  Args:
    query: [B, 1, N, H].
    spans: Attended to one by one; a row may have nothing in any of them.
    layer: int32 [], of the spans.
    tail: Keys and values [B, M, C, H] and mask bool [B, 1, C] of what comes
      behind the spans; of each row there is something.
    partition: How rows and heads are cut; None for whole arrays.

  Returns:
    [B, 1, N, H] in the query's dtype.
  """
  keys, values, mask = tail
  parts = [paged.attend(query[:, 0], keys, values, mask[:, 0])]
  for span in spans:
    quantized = span.key_scales is not None
    out, lse = paged.paged_attention(
      query[:, 0] if quantized else query[:, 0].astype(span.keys.dtype),
      span.keys,
      span.values,
      span.table,
      head_tokens=span.head_tokens,
      head_pages=span.head_pages,
      own_tokens=span.own_tokens,
      layer=layer,
      key_scales=span.key_scales,
      value_scales=span.value_scales,
      partition=partition,
    )
    parts.append((out, jnp.where(span.readers[:, None], lse, -jnp.inf)))
  out, _ = paged.merge(parts)
  return out.astype(query.dtype)[:, None]
