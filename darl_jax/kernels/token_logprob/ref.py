"""Log-prob and entropy of the sampled token: the definition."""

import jax
import jax.numpy as jnp

# Log-prob, in nats, of a target that its support mask excludes. The sampler
# could not have drawn it, so minus infinity is right; this is finite, its
# exponential is exactly 0, and it is far beyond where log-ratios are clamped.
OUTSIDE_SUPPORT = -1e4
# What stands for an excluded logit: below any other, and finite, so that its
# product with a probability of 0 is 0.
EXCLUDED = -1e30


def unpack_support(packed: jax.Array) -> jax.Array:
  """Bits to booleans.

  Args:
    packed: uint8 [..., bytes], as ``np.packbits(mask, bitorder="little")``.

  Returns:
    bool [..., 8 * bytes].
  """
  shape = (*packed.shape, 8)
  shift = jax.lax.broadcasted_iota(jnp.uint8, shape, packed.ndim)
  bits = jax.lax.broadcast_in_dim(packed, shape, range(packed.ndim)) >> shift
  return (bits & 1).astype(bool).reshape(*packed.shape[:-1], -1)


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """``x`` rounded to a coarser type's precision and kept in its own dtype.

  Not a pair of casts: XLA may drop those, as "excess precision".
  """
  info = jnp.finfo(dtype)
  return jax.lax.reduce_precision(x, info.nexp, info.nmant)


def _logits(hidden: jax.Array, unembedding: jax.Array) -> jax.Array:
  """float32 [..., V], of operands rounded to hidden's dtype."""
  if unembedding.dtype != hidden.dtype:
    # The products are those of the rounded operands; the gradient passes by
    # the rounding and keeps the precision of the parameters.
    rounded = round_to(unembedding, hidden.dtype)
    unembedding += jax.lax.stop_gradient(rounded - unembedding)
    hidden = hidden.astype(jnp.float32)
  return jnp.einsum(
    "...d,vd->...v", hidden, unembedding, preferred_element_type=jnp.float32
  )


def token_logprob(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  *,
  temperature: float,
  support_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Log-prob of each target, and entropy, under the tempered policy.

    z      = hidden unembedding^T / temperature
    logp   = z[target] - logsumexp(z)
    H      = logsumexp(z) - sum_v softmax(z)_v z_v

  over the tokens of the support. Both are shift-invariant in z, so z is shifted
  by its largest entry first: the sums then lose no digits however large the
  logits are. Source: the definition of a softmax policy; temperature and
  support as in method 0 (the log-prob is that of the *sampled* distribution).

  Gradients flow through ``logp`` into ``hidden`` and ``unembedding``; the
  entropy carries none.

  Args:
    hidden: [..., D], the last layer's output.
    unembedding: [V, D], of hidden's dtype or float32; the product's operands
      are rounded to hidden's dtype, and it is accumulated and kept in float32.
    targets: int32 [...], in [0, V).
    temperature: Divides the logits.
    support_mask: uint8 [..., ceil(V / 8)], little-endian bits, of the tokens
      that could be drawn; None for all of them. Where it is empty both results
      are 0; where it lacks the target, the log-prob is ``OUTSIDE_SUPPORT``.
      Neither carries a gradient.

  Returns:
    logprobs: float32 [...], nats.
    entropy: float32 [...], nats, never negative.
  """
  logits = _logits(hidden, unembedding) / temperature
  # A comparison instead of a gather: it fuses with the sums below, its
  # transpose is a select and not a scatter, and it splits over a vocabulary
  # that is sharded.
  vocabulary = jax.lax.broadcasted_iota(
    jnp.int32, logits.shape, logits.ndim - 1
  )
  is_target = vocabulary == targets[..., None]
  if support_mask is not None:
    supported = unpack_support(support_mask)[..., : logits.shape[-1]]
    empty = ~jnp.any(supported, axis=-1)
    # Whatever the excluded logits are, they are replaced before any use. In an
    # empty row all are equal then, and its results are replaced below.
    logits = jnp.where(supported, logits, EXCLUDED)
  logits -= jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  exponentials = jnp.exp(logits)
  partition = jnp.sum(exponentials, axis=-1)
  log_partition = jnp.log(partition)
  chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
  mean_logit = jnp.sum(exponentials * logits, axis=-1) / partition
  # Rounding can take the entropy of a certain token a hair below 0.
  entropy = jnp.maximum(log_partition - mean_logit, 0.0)
  logprobs = chosen - log_partition
  if support_mask is not None:
    inside = jnp.any(supported & is_target, axis=-1)
    logprobs = jnp.where(inside, logprobs, OUTSIDE_SUPPORT)
    logprobs, entropy = (jnp.where(empty, 0.0, x) for x in (logprobs, entropy))
  return logprobs, jax.lax.stop_gradient(entropy)
