"""Rotary embedding and grouped-query attention over masks."""

import jax
import jax.numpy as jnp


def rotary(x: jax.Array, positions: jax.Array, *, theta: float) -> jax.Array:
  """Rotates pairs (i, i + H/2) of each head by position (RoFormer; Llama's
  half-split layout).

  Args:
    x: [B, T, heads, H].
    positions: int32 [B, T].
    theta: Base of the frequencies.

  Returns:
    [B, T, heads, H] in x's dtype; angles are computed in float32.
  """
  half = x.shape[-1] // 2
  exponent = jnp.arange(half, dtype=jnp.float32) / half
  frequency = jnp.float32(theta) ** -exponent
  angle = positions[..., None].astype(jnp.float32) * frequency[None, None, :]
  cos = jnp.cos(angle)[:, :, None, :]
  sin = jnp.sin(angle)[:, :, None, :]
  left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = [left * cos - right * sin, right * cos + left * sin]
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


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
  batch, length, heads, head_dim = query.shape
  kv_heads = key.shape[2]
  query = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
  scores = jnp.einsum(
    "btmgh,bsmh->bmgts", query, key, preferred_element_type=jnp.float32
  )
  scores = scores * head_dim**-0.5
  lowest = jnp.finfo(jnp.float32).min
  scores = jnp.where(mask[:, None, None], scores, lowest)
  weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  out = jnp.einsum("bmgts,bsmh->btmgh", weights, value)
  return out.reshape(batch, length, heads, head_dim)
