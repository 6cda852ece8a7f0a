"""Moments of the log-ratio of each trajectory: checks and dispatch."""

import chex
import jax
import jax.numpy as jnp

from darl_jax.kernels.log_ratio_moments import ref

LogRatioMoments = ref.LogRatioMoments


def log_ratio_moments(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  behavior_entropy: jax.Array,
  advantages: jax.Array,
  loss_mask: jax.Array,
  segment_ids: jax.Array,
  *,
  num_segments: int,
) -> LogRatioMoments:
  """Mismatch of each trajectory; see ``ref.log_ratio_moments``.

  Args:
    logprobs: float [B, T], nats, of the current policy.
    behavior_logprobs: float [B, T], nats, of the policy that sampled.
    behavior_entropy: float [B, T], nats, of that policy.
    advantages: float [B, T], each trajectory's advantage on its tokens.
    loss_mask: bool [B, T].
    segment_ids: int [B, T], 1 .. S per trajectory of a row; 0 pads.
    num_segments: S, at least 1.

  Returns:
    float32 [B, S] fields, segment id s at position s - 1; no gradient.

  Raises:
    AssertionError: Shapes or dtypes do not fit.
    ValueError: num_segments is below 1.
  """
  if num_segments < 1:
    raise ValueError(f"num_segments = {num_segments} must be at least 1.")
  floats = (logprobs, behavior_logprobs, behavior_entropy, advantages)
  chex.assert_rank(logprobs, 2)
  chex.assert_equal_shape([*floats, loss_mask, segment_ids])
  chex.assert_type(floats, jnp.floating)
  chex.assert_type(loss_mask, bool)
  chex.assert_type(segment_ids, jnp.integer)
  return ref.log_ratio_moments(
    *floats, loss_mask, segment_ids, num_segments=num_segments
  )
