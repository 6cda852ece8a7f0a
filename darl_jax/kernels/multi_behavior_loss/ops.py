"""The multi-behavior policy loss: checks and dispatch."""

import typing
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from darl_jax.kernels.multi_behavior_loss import ref

BehaviorSums = ref.BehaviorSums
TrustRegion = Literal["behavior", "decoupled"]
BehaviorWeightMode = Literal["truncate", "mask"]


def multi_behavior_loss(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  proximal_logprobs: jax.Array,
  advantages: jax.Array,
  token_weights: jax.Array,
  loss_mask: jax.Array,
  behavior_index: jax.Array,
  clip_low: jax.Array,
  clip_high: jax.Array,
  *,
  trust_region: TrustRegion,
  dual_clip: float,
  max_behavior_weight: float,
  behavior_weight_mode: BehaviorWeightMode,
) -> tuple[jax.Array, BehaviorSums]:
  """-sum c m w term over the batch; see ``ref.multi_behavior_loss``.

  Args:
    logprobs: float [B, T], nats, of the policy being trained; the only argument
      that gradients flow to.
    behavior_logprobs: float [B, T], nats, of the policy that sampled the token.
    proximal_logprobs: float [B, T], nats, of the policy at the start of the
      step.
    advantages: float [B, T], each trajectory's advantage on its tokens.
    token_weights: float [B, T], alpha_v / N_v.
    loss_mask: bool [B, T].
    behavior_index: int [B, T], entry of the version table, in [0, E).
    clip_low: float [E], lower clip distance of each version.
    clip_high: float [E], upper clip distance of each version.
    trust_region: Centre of the clip.
    dual_clip: Above 1; inf for none.
    max_behavior_weight: At least 1; inf for none.
    behavior_weight_mode: What happens above that cap.

  Returns:
    (loss, sums): float32 [], and float32 [E] sums over each version's tokens.

  Raises:
    AssertionError: Shapes or dtypes do not fit.
    ValueError: A setting is out of its range.
  """
  for name, value, kind in (
    ("trust_region", trust_region, TrustRegion),
    ("behavior_weight_mode", behavior_weight_mode, BehaviorWeightMode),
  ):
    if value not in typing.get_args(kind):
      options = ", ".join(typing.get_args(kind))
      raise ValueError(f"{name} = {value!r} is not one of {options}.")
  if not dual_clip > 1:
    raise ValueError(f"dual_clip = {dual_clip} must be above 1.")
  if not max_behavior_weight >= 1:
    raise ValueError(
      f"max_behavior_weight = {max_behavior_weight} must be at least 1."
    )
  floats = (
    logprobs,
    behavior_logprobs,
    proximal_logprobs,
    advantages,
    token_weights,
  )
  chex.assert_rank(logprobs, 2)
  chex.assert_equal_shape([*floats, loss_mask, behavior_index])
  chex.assert_rank(clip_low, 1)
  chex.assert_equal_shape([clip_low, clip_high])
  chex.assert_type([*floats, clip_low, clip_high], jnp.floating)
  chex.assert_type(loss_mask, bool)
  chex.assert_type(behavior_index, jnp.integer)
  return ref.multi_behavior_loss(
    *floats,
    loss_mask,
    behavior_index,
    clip_low,
    clip_high,
    trust_region=trust_region,
    dual_clip=dual_clip,
    max_behavior_weight=max_behavior_weight,
    behavior_weight_mode=behavior_weight_mode,
  )
