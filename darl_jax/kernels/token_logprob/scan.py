"""Log-prob and entropy of the sampled token, by blocks of the vocabulary.

The logits of all tokens over one block exist at a time, forward and backward:
[N, block] instead of [N, V]. A scan over rows instead would hold [rows, V] and
carry the float32 gradient [V, D] from chunk to chunk; over the vocabulary each
block of that gradient comes out of one product, finished.

Everything here is local to a device; ``ops`` joins the shards of a vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from darl_jax.kernels.token_logprob import ref


class Statistics(NamedTuple):
  """What a row's logits z over (part of) the vocabulary come down to.

  Attributes:
    peak: float32 [N], max z; ``ref.EXCLUDED`` where nothing is supported.
    partition: float32 [N], sum of exp(z - peak).
    weighted: float32 [N], sum of (z - peak) exp(z - peak).
    chosen: float32 [N], z of the target, 0 where it is not in this part.
    best: int32 [N], an entry whose z is the peak.
  """

  peak: jax.Array
  partition: jax.Array
  weighted: jax.Array
  chosen: jax.Array
  best: jax.Array


def moved(stats: Statistics, peak: jax.Array) -> tuple[jax.Array, jax.Array]:
  """``partition`` and ``weighted`` relative to another, larger peak."""
  shift = stats.peak - peak
  scale = jnp.exp(shift)
  return (
    scale * stats.partition,
    scale * (stats.weighted + shift * stats.partition),
  )


class Support(NamedTuple):
  """The tokens that could be drawn.

  Attributes:
    packed: uint8 [N, bytes], little-endian bits of the whole vocabulary.
    first: int32 scalar, the entry of the whole vocabulary that is entry 0 here.
  """

  packed: jax.Array
  first: jax.Array | int

  def block(self, start: jax.Array | int, size: int) -> jax.Array:
    """bool [N, size], of the entries from ``start`` on."""
    total = self.packed.shape[1]
    # A block need not begin at a byte's first bit: one byte more.
    num_bytes = min(size // 8 + 2, total)
    bit = self.first + start
    byte = jnp.minimum(bit // 8, total - num_bytes)
    part = jax.lax.dynamic_slice_in_dim(self.packed, byte, num_bytes, axis=1)
    return jax.lax.dynamic_slice_in_dim(
      ref.unpack_support(part), bit - 8 * byte, size, axis=1
    )


def _over_blocks(step: Callable, carry, vocab: int, block: int):
  """``step(carry, start, size)`` for each block; the last may be smaller."""
  whole = vocab // block
  if whole:
    carry = jax.lax.fori_loop(
      0, whole, lambda i, c: step(c, i * block, block), carry
    )
  rest = vocab - whole * block
  return step(carry, whole * block, rest) if rest else carry


def _weights(
  unembedding: jax.Array, start: jax.Array | int, size: int, dtype: jnp.dtype
) -> jax.Array:
  """[size, D] of the unembedding, cast."""
  part = jax.lax.dynamic_slice_in_dim(unembedding, start, size)
  if part.dtype != dtype:
    # Rounding first: XLA moves a bare cast out of the loop, and so makes a
    # second copy of the whole array.
    part = ref.round_to(part, dtype).astype(dtype)
  # As an array, cast once; else each product reads and casts it by itself.
  return jax.lax.optimization_barrier(part)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
  return jax.lax.dot_general(
    a,
    b,
    (((axis_a,), (axis_b,)), ((), ())),
    preferred_element_type=jnp.float32,
  )


def statistics(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  support: Support | None,
  *,
  temperature: float,
  block: int,
) -> Statistics:
  """One pass over the vocabulary.

  Args:
    hidden: [N, D].
    unembedding: [V, D], cast to hidden's dtype block by block.
    targets: int32 [N]; outside [0, V) where another shard has the target.
    support: None for the whole vocabulary.
    temperature: Divides the logits.
    block: Entries of the vocabulary at a time.
  """

  def step(stats: Statistics, start, size: int) -> Statistics:
    weights = _weights(unembedding, start, size, hidden.dtype)
    z = _dot(hidden, weights, 1, 1) / temperature
    entry = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) + start
    chosen = jnp.sum(jnp.where(entry == targets[:, None], z, 0.0), axis=1)
    if support is not None:
      z = jnp.where(support.block(start, size), z, ref.EXCLUDED)
    block_peak = jnp.max(z, axis=1)
    best = jnp.max(jnp.where(z == block_peak[:, None], entry, -1), axis=1)
    peak = jnp.maximum(stats.peak, block_peak)
    shifted = z - peak[:, None]
    exponentials = jnp.exp(shifted)
    if support is not None:
      # In a row without support so far the peak is EXCLUDED too.
      exponentials = jnp.where(z > ref.EXCLUDED, exponentials, 0.0)
    partition, weighted = moved(stats, peak)
    return Statistics(
      peak,
      partition + jnp.sum(exponentials, axis=1),
      weighted + jnp.sum(exponentials * shifted, axis=1),
      stats.chosen + chosen,
      jnp.where(block_peak > stats.peak, best, stats.best),
    )

  zeros = jnp.zeros(targets.shape, jnp.float32)
  carry = Statistics(
    zeros + ref.EXCLUDED, zeros, zeros, zeros, jnp.zeros_like(targets)
  )
  return _over_blocks(step, carry, unembedding.shape[0], block)


def gradients(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  support: Support | None,
  peak: jax.Array,
  log_partition: jax.Array,
  cotangent: jax.Array,
  *,
  temperature: float,
  block: int,
  reduce: Callable[[jax.Array], jax.Array],
  like: jax.ShapeDtypeStruct,
) -> tuple[jax.Array, jax.Array]:
  """Of ``sum(cotangent * logp)``, from the logits made once more.

    dz  = cotangent / temperature (1[target] - softmax(z))
    dh  = sum over blocks of dz W
    dW  = dz^T h, a block at a time, each in one product over all tokens

  The products' operands are of hidden's dtype, the sums float32.

  Args:
    hidden: [N, D].
    unembedding: [V, D].
    targets: int32 [N]; outside [0, V) where another shard has the target.
    support: As for ``statistics``.
    peak: float32 [N], of the whole row.
    log_partition: float32 [N], log of the row's ``partition``.
    cotangent: float32 [N]; 0 where the log-prob is a constant.
    temperature: Divides the logits.
    block: Entries of the vocabulary at a time.
    reduce: Of a float32 block [size, D] of dW to what this device keeps of it.
    like: Shape and dtype of what this device keeps of dW.

  Returns:
    dh float32 [N, D], and dW as ``like``.
  """
  scale = (cotangent / temperature)[:, None]

  def step(carry, start, size: int):
    d_hidden, d_unembedding = carry
    weights = _weights(unembedding, start, size, hidden.dtype)
    z = _dot(hidden, weights, 1, 1) / temperature
    # Shifted twice: where logits are large their log-sum has lost its digits.
    probs = jnp.exp(z - peak[:, None] - log_partition[:, None])
    if support is not None:
      probs = jnp.where(support.block(start, size), probs, 0.0)
    entry = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) + start
    is_target = (entry == targets[:, None]).astype(jnp.float32)
    dz = (scale * (is_target - probs)).astype(hidden.dtype)
    d_hidden += _dot(dz, weights, 1, 0)
    kept = reduce(_dot(dz, hidden, 0, 0)).astype(like.dtype)
    d_unembedding = jax.lax.dynamic_update_slice_in_dim(
      d_unembedding, kept, start, axis=0
    )
    return d_hidden, d_unembedding

  carry = (
    jnp.zeros(hidden.shape, jnp.float32),
    # Every block is written: zeros would be one more pass over the memory.
    jax.lax.empty(like.shape, like.dtype),
  )
  return _over_blocks(step, carry, unembedding.shape[0], block)
