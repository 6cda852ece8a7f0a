"""The multi-behavior policy loss: the definition."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from darl_jax import numerics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BehaviorSums:
  """Sums over each behavior policy's masked-in tokens; they add up.

  Every field is float32 [E]: sums over microbatches, minibatches and devices
  are sums of these. They carry no gradient.

  Attributes:
    tokens: Masked-in tokens.
    clipped_low: Tokens with A < 0 held at 1 - clip_low: no gradient. Like the
      next two, without tokens of weight 0, which no clip holds.
    clipped_high: Tokens with A > 0 held at 1 + clip_high: no gradient.
    clipped_dual: Tokens with A < 0 held at dual_clip: no gradient.
    ratio: Sum of pi/mu.
    ratio_squared: Sum of (pi/mu)^2; with ``ratio``, the effective sample size.
    kl: Sum of k3 = r - 1 - log r, r = pi/mu, nats: on tokens sampled from mu an
      unbiased, non-negative estimate of KL(mu || pi).
    weight_capped: Tokens with prox/mu above its cap, or below that of mu/prox
      under the mode ``band``; 0 under the trust region ``behavior``.
  """

  tokens: jax.Array
  clipped_low: jax.Array
  clipped_high: jax.Array
  clipped_dual: jax.Array
  ratio: jax.Array
  ratio_squared: jax.Array
  kl: jax.Array
  weight_capped: jax.Array


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
  trust_region: Literal["behavior", "decoupled"],
  dual_clip: float,
  max_behavior_weight: float,
  behavior_weight_mode: Literal["truncate", "mask", "band"],
) -> tuple[jax.Array, BehaviorSums]:
  """Clipped surrogate over samples of several behavior policies.

    L    = - sum_it c_it m_it w_it term_it
    term = min(r A, clip(r, 1 - lo_v, 1 + hi_v) A)               for A >= 0
    term = max(min(r A, clip(r, 1 - lo_v, 1 + hi_v) A), c A)     for A < 0

    behavior:   r = pi/mu_v,    w = 1
    decoupled:  r = pi/prox,    w = min(prox/mu_v, max_behavior_weight), or 0
                above that cap under the mode ``mask``, or 0 outside
                [1/max_behavior_weight, max_behavior_weight] under ``band``

  For a given sign of A each term is A times a bounded ratio, with bounds
  (0, 1 + hi) for A >= 0 and (1 - lo, c) for A < 0; that is how it is computed.
  A ratio exactly on a bound keeps its gradient; one outside has none.

  Source: method 2.3, our reconstruction of D-ARL's objective; ``decoupled`` as
  in arXiv:2110.00641 and arXiv:2505.24298, its band as in arXiv:2605.12070; c
  is dual-clip PPO (arXiv:1912.09729). The learner multiplies by the number of
  minibatches M. Losses of microbatches add up: there is no mean in here, the
  weights c_it hold every denominator.

  Gradients flow through ``logprobs`` only. Masked slots may hold anything,
  NaN and infinity included. All log-ratios are clamped to [-20, 20]; beyond
  them the gradient is 0.

  Args:
    logprobs: [B, T], nats, of pi, the policy being trained.
    behavior_logprobs: [B, T], nats, of mu_v, the policy that sampled the token.
    proximal_logprobs: [B, T], nats, of the policy at the start of the step;
      not read under the trust region ``behavior``.
    advantages: [B, T], each trajectory's advantage on its tokens.
    token_weights: [B, T], c_it = alpha_v / N_v, fixed for the step.
    loss_mask: bool [B, T].
    behavior_index: int [B, T], entry of the version table, in [0, E).
    clip_low: [E], lo of each version.
    clip_high: [E], hi of each version.
    trust_region: Centre of the clip.
    dual_clip: c > 1; inf for none.
    max_behavior_weight: Cap of prox/mu_v, >= 1; inf for none.
    behavior_weight_mode: Above the cap: truncate to it, or drop the token
      (whose share of the denominator remains); ``band`` drops those below its
      inverse, too.

  Returns:
    loss: float32 [], 0 if every token is masked.
    sums: ``BehaviorSums``.
  """
  behavior_logprobs, proximal_logprobs, advantages, token_weights = (
    jax.lax.stop_gradient(
      (behavior_logprobs, proximal_logprobs, advantages, token_weights)
    )
  )
  advantages = numerics.masked(advantages, loss_mask)
  weights = numerics.masked(token_weights, loss_mask)
  behavior_ell = numerics.log_ratio(logprobs, behavior_logprobs, loss_mask)
  capped = jnp.zeros_like(loss_mask)
  if trust_region == "decoupled":
    ratio = jnp.exp(numerics.log_ratio(logprobs, proximal_logprobs, loss_mask))
    behavior_weight = jnp.exp(
      numerics.log_ratio(proximal_logprobs, behavior_logprobs, loss_mask)
    )
    capped = loss_mask & (behavior_weight > max_behavior_weight)
    if behavior_weight_mode == "band":
      capped |= loss_mask & (behavior_weight < 1.0 / max_behavior_weight)
    above = max_behavior_weight if behavior_weight_mode == "truncate" else 0.0
    weights *= jnp.where(capped, above, behavior_weight)
  else:
    ratio = jnp.exp(behavior_ell)

  entry = jnp.where(loss_mask, behavior_index, 0)
  negative = advantages < 0
  lower = jnp.where(negative, 1.0 - clip_low[entry], 0.0)
  upper = jnp.where(negative, dual_clip, 1.0 + clip_high[entry])
  too_low, too_high = ratio < lower, ratio > upper
  bounded = jnp.where(too_high, upper, jnp.where(too_low, lower, ratio))
  loss = -jnp.sum(weights * advantages * bounded)
  counts = weights != 0

  behavior_ell = jax.lax.stop_gradient(behavior_ell)
  behavior_ratio = jnp.exp(behavior_ell)
  num_versions = clip_low.shape[0]
  sums = _sum_by_version(
    BehaviorSums(
      tokens=loss_mask,
      clipped_low=counts & too_low,
      clipped_high=counts & too_high & (advantages > 0),
      clipped_dual=counts & too_high & negative,
      ratio=behavior_ratio,
      ratio_squared=jnp.square(behavior_ratio),
      kl=k3(behavior_ell, behavior_ratio),
      weight_capped=capped,
    ),
    jnp.where(loss_mask, behavior_index, num_versions),
    num_versions,
  )
  return loss, sums


def k3(ell: jax.Array, ratio: jax.Array) -> jax.Array:
  """r - 1 - log r, to a few units in its last place.

  Of a small log-ratio that difference keeps none of its digits (and expm1(ell)
  - ell few of them), so there it is the Taylor series, of which below 0.5 the
  first term left out is 1e-7 of the sum.

  Args:
    ell: [...], log r, nats.
    ratio: [...], r.
  """
  series = jnp.full_like(ell, 1 / math.factorial(8))
  for n in range(7, 1, -1):
    series = series * ell + 1 / math.factorial(n)
  return jnp.where(jnp.abs(ell) < 0.5, ell * ell * series, ratio - 1.0 - ell)


def _sum_by_version(
  values: BehaviorSums, entry: jax.Array, num_versions: int
) -> BehaviorSums:
  """[B, T] fields -> [E], over the tokens with entry < E.

  A scatter-add in each row and then a sum over rows: exact counts (a one-hot
  product rounds to bfloat16 on some hardware), and devices that hold whole rows
  exchange [E] sums only.
  """
  leaves, tree = jax.tree.flatten(values)
  stacked = jnp.stack([leaf.astype(jnp.float32) for leaf in leaves], axis=-1)
  by_row = jax.vmap(
    lambda v, e: jax.ops.segment_sum(v, e, num_segments=num_versions + 1)
  )(stacked, entry)
  totals = jnp.sum(by_row, axis=0)[:num_versions]
  return jax.tree.unflatten(tree, list(totals.T))
