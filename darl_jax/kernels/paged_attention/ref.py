"""Attention of one query per row over cached pages: the definition."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

# What stands for the score of a slot that is not there: below any other, and
# finite, so that differences of two of them are no NaN.
EXCLUDED = -1e30


class Scales(NamedTuple):
  """Of int8 keys and values: a token's entry of a head times its scale.

  Attributes:
    keys: float32 [..., M, slots].
    values: float32 [..., M, slots].
  """

  keys: jax.Array
  values: jax.Array


class Bounds(NamedTuple):
  """Which slots of each entry's pages, one behind the other, hold a token.

  Two ranges: 0 .. head_tokens, and own_tokens from the first slot of page
  ``head_pages`` on. Between them may lie a hole.

  Attributes:
    head_tokens: int32 [Q].
    head_pages: int32 [Q].
    own_tokens: int32 [Q].
  """

  head_tokens: jax.Array
  head_pages: jax.Array
  own_tokens: jax.Array

  def mask(self, slots: int, page_tokens: int) -> jax.Array:
    """bool [Q, slots]."""
    slot = jnp.arange(slots, dtype=jnp.int32)[None]
    own = slot - self.head_pages[:, None] * page_tokens
    return (slot < self.head_tokens[:, None]) | (
      (own >= 0) & (own < self.own_tokens[:, None])
    )


def paged_attention(
  query: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  table: jax.Array,
  bounds: Bounds,
  scales: Scales | None,
) -> tuple[jax.Array, jax.Array]:
  """``attend`` over the pages of a table, gathered one behind the other.

  Args:
    query: [B, N, H].
    keys: [pages, M, page tokens, H].
    values: [pages, M, page tokens, H].
    table: int32 [Q, n], pages of each entry; one that holds no valid slot may
      be any page.
    bounds: The valid slots of each entry.
    scales: [pages, M, page tokens] of int8 keys and values; None for others.

  Returns:
    As ``attend``.
  """
  entries, num_pages = table.shape
  heads, page_tokens = keys.shape[1:3]
  slots = num_pages * page_tokens

  def gather(pool: jax.Array) -> jax.Array:
    """[pages, M, page tokens, ...] to [Q, M, slots, ...]."""
    found = jnp.moveaxis(pool[table], 2, 1)
    return found.reshape(entries, heads, slots, *pool.shape[3:])

  if scales is not None:
    scales = Scales(*map(gather, scales))
  return attend(
    query,
    gather(keys),
    gather(values),
    bounds.mask(slots, page_tokens),
    scales,
  )


def attend(
  query: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  mask: jax.Array,
  scales: Scales | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Softmax attention over one part of a context, and that part's weight.

    s    = H^-1/2 query . keys          over the slots of the mask
    lse  = log sum exp(s)
    out  = sum exp(s - lse) values

  ``lse`` is what ``merge`` needs to join parts that were attended to one by
  one.

  Products take operands of the keys' dtype, or of the query's where the keys
  are int8, and are accumulated in float32; scores, softmax and sums are
  float32. What lies in slots outside of the mask, NaN and infinity too, changes
  nothing.

  Args:
    query: [B, N, H].
    keys: [Q, M, S, H]; each head serves N / M query heads, and each entry B / Q
      consecutive rows, for which it is read once.
    values: [Q, M, S, H].
    mask: bool [Q, S].
    scales: [Q, M, S], of int8 keys and values; None for others.

  Returns:
    out: float32 [B, N, H]; 0 where the mask is empty.
    lse: float32 [B, N]; minus infinity where the mask is empty.
  """
  batch, num_heads, head_dim = query.shape
  entries, kv_heads = keys.shape[:2]
  dtype = query.dtype if scales is not None else keys.dtype
  by_head = by_kv_head(query.astype(dtype), entries, kv_heads)
  scores = jnp.einsum(
    "qmxh,qmsh->qmxs",
    by_head,
    keys.astype(dtype),
    preferred_element_type=jnp.float32,
  )
  if scales is not None:
    scores *= scales.keys[:, :, None]
  valid = mask[:, None, None]
  scores = jnp.where(valid, scores * head_dim**-0.5, EXCLUDED)
  peak = jnp.max(scores, axis=-1, keepdims=True)
  weights = jnp.where(valid, jnp.exp(scores - peak), 0.0)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  if scales is not None:
    weights = jnp.where(valid, weights * scales.values[:, :, None], 0.0)
  sums = jnp.einsum(
    "qmxs,qmsh->qmxh",
    weights.astype(dtype),
    jnp.where(mask[:, None, :, None], values, 0).astype(dtype),
    preferred_element_type=jnp.float32,
  )
  out, lse = normalized(sums, peak, total)
  shape = (batch, num_heads, head_dim)
  return by_row(out, shape), by_row(lse, (*shape[:2], 1))[..., 0]


def normalized(
  sums: jax.Array, peak: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """``out`` and ``lse`` from sums relative to a peak.

  Args:
    sums: float32 [..., H], sum of exp(s - peak) values.
    peak: float32 [..., 1].
    total: float32 [..., 1], sum of exp(s - peak); 0 of no slots.
  """
  safe = jnp.where(total > 0, total, 1.0)
  return sums / safe, jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)


def by_kv_head(query: jax.Array, entries: int, kv_heads: int) -> jax.Array:
  """[B, N, H] as [Q, M, X, H]: the X = B / Q * N / M queries of a key head."""
  batch, num_heads, head_dim = query.shape
  group = num_heads // kv_heads
  apart = query.reshape(entries, batch // entries, kv_heads, group, head_dim)
  return jnp.swapaxes(apart, 1, 2).reshape(entries, kv_heads, -1, head_dim)


def by_row(x: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
  """[Q, M, X, ...] as ``shape``, [B, N, ...]: undoes ``by_kv_head``."""
  entries, kv_heads = x.shape[:2]
  rows, group = shape[0] // entries, shape[1] // kv_heads
  apart = x.reshape(entries, kv_heads, rows, group, shape[2])
  return jnp.swapaxes(apart, 1, 2).reshape(shape)


def merge(
  parts: Sequence[tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
  """Attention over the union of parts, from that over each.

    lse  = log sum_i exp(lse_i)
    out  = sum_i exp(lse_i - lse) out_i

  Exact, up to float32 rounding: a softmax over a union of slots is that over
  each part, weighted by the part's share of the sum of exponentials. A part
  with no slots (out 0, lse minus infinity) changes nothing.

  Args:
    parts: (out float32 [B, N, H], lse float32 [B, N]) of each; at least one.

  Returns:
    (out, lse) of the union, as ``attend``.
  """
  peak = functools.reduce(jnp.maximum, (lse for _, lse in parts))
  # Where all parts are empty: minus infinity less itself is NaN.
  peak = jnp.maximum(peak, EXCLUDED)
  shares = [jnp.exp(lse - peak) for _, lse in parts]
  sums = sum(
    share[..., None] * out
    for share, (out, _) in zip(shares, parts, strict=True)
  )
  out, lse = normalized(sums, peak[..., None], sum(shares)[..., None])
  return out, lse[..., 0]
