"""Moments of the log-ratio of each trajectory: checks and dispatch."""

import functools

import chex
import jax
import jax.numpy as jnp

from darl_jax.kernels.log_ratio_moments import block_sizes, kernel, ref
from darl_jax.kernels.partition import Partition, per_shard

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
  partition: Partition | None = None,
) -> LogRatioMoments:
  """Mismatch of each trajectory; see ``ref.log_ratio_moments``.

  One pass over the data by a Pallas kernel on TPU (Mosaic) and CUDA (Triton),
  neither of which has been run on an accelerator: compiled for the first,
  lowered for the second. Elsewhere the definition itself, whose scatter-add is
  the fastest on a CPU.

  Args:
    logprobs: float [B, T], nats, of the current policy.
    behavior_logprobs: float [B, T], nats, of the policy that sampled.
    behavior_entropy: float [B, T], nats, of that policy.
    advantages: float [B, T], each trajectory's advantage on its tokens.
    loss_mask: bool [B, T].
    segment_ids: int [B, T], 1 .. S per trajectory of a row; 0 pads.
    num_segments: S, at least 1.
    partition: How the rows are cut over a mesh; None for whole arrays. Every
      row is on one device, so there is no communication.

  Returns:
    float32 [B, S] fields, segment id s at position s - 1; no gradient.

  Raises:
    AssertionError: Shapes or dtypes do not fit.
    ValueError: num_segments is below 1, or the rows do not split evenly over
      the partition.
  """
  if num_segments < 1:
    raise ValueError(f"num_segments = {num_segments} must be at least 1.")
  floats = (logprobs, behavior_logprobs, behavior_entropy, advantages)
  chex.assert_rank(logprobs, 2)
  chex.assert_equal_shape([*floats, loss_mask, segment_ids])
  chex.assert_type(floats, jnp.floating)
  chex.assert_type(loss_mask, bool)
  chex.assert_type(segment_ids, jnp.integer)
  specs = None if partition is None else partition.row_spec
  function = per_shard(
    functools.partial(_by_platform, num_segments=num_segments),
    partition,
    in_specs=specs,
    out_specs=specs,
  )
  return function(
    *jax.lax.stop_gradient(floats), loss_mask, segment_ids.astype(jnp.int32)
  )


def _by_platform(*arrays: jax.Array, num_segments: int) -> LogRatioMoments:
  """The moments of the rows of one device."""
  rows, tokens = arrays[0].shape
  return jax.lax.platform_dependent(
    *arrays,
    tpu=functools.partial(
      kernel.log_ratio_moments_tpu,
      num_segments=num_segments,
      sizes=block_sizes.tpu(rows, tokens, num_segments),
    ),
    cuda=functools.partial(
      kernel.log_ratio_moments_cuda,
      num_segments=num_segments,
      sizes=block_sizes.cuda(tokens, num_segments),
    ),
    default=functools.partial(ref.log_ratio_moments, num_segments=num_segments),
  )
