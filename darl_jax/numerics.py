"""Masked float32 reductions and safe log-ratios.

The only place that knows how a mask, a count and an exponential meet: a masked
value is replaced *before* it is used (so NaN or infinity in a masked slot
reaches neither value nor gradient), every reduction is done in float32, and
every mean is a sum over a count that the caller can see.
"""

import jax
import jax.numpy as jnp

# Log-ratios are clamped to +-20 nats before any exponential (method 0).
MAX_LOG_RATIO = 20.0


def masked(values: jax.Array, mask: jax.Array) -> jax.Array:
  """``values`` as float32 where ``mask``, else exactly 0."""
  return jnp.where(mask, values, 0.0).astype(jnp.float32)


def masked_sum(values: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
  """Sum of ``values`` where ``mask``, in float32."""
  return jnp.sum(masked(values, mask), axis=axis)


def count(mask: jax.Array, axis=None) -> jax.Array:
  """Number of true entries, as float32."""
  return jnp.sum(mask.astype(jnp.float32), axis=axis)


def safe_divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
  """``numerator / denominator``, and 0 where the denominator is 0.

  Value and gradient are finite for every finite input.
  """
  empty = denominator == 0
  return jnp.where(empty, 0.0, numerator / jnp.where(empty, 1.0, denominator))


def log_ratio(
  logprobs: jax.Array, reference_logprobs: jax.Array, mask: jax.Array
) -> jax.Array:
  """Per-token ``logprobs - reference_logprobs`` in nats, safe to exponentiate.

  Masked tokens give 0 and carry no gradient; the rest is clamped to
  [-20, 20], outside of which the gradient is 0 too.

  Args:
    logprobs: [...], of the policy being trained.
    reference_logprobs: [...], of the behavior or proximal policy.
    mask: bool [...].

  Returns:
    float32 [...].
  """
  ell = masked(logprobs, mask) - masked(reference_logprobs, mask)
  return jnp.clip(ell, -MAX_LOG_RATIO, MAX_LOG_RATIO)
