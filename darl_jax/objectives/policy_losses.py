"""The policy losses beside the clipped token loss, and what masks it.

Each loss takes packed rows, returns a sum and metrics that are sums over
tokens: both add up over microbatches, since the weights c_it hold every
denominator. Gradients flow through ``logprobs`` only, and masked slots may hold
anything. The clipped token loss itself is ``kernels.multi_behavior_loss``;
``m2po_mask`` and ``estr_mask`` say which tokens keep their weight in it.

Arguments of the same name are the same everywhere:

  logprobs            float [B, T], nats, of pi, the policy being trained
  behavior_logprobs   float [B, T], nats, of mu_v, which sampled the token
  advantages          float [B, T], each trajectory's advantage on its tokens
  token_weights       float [B, T], c_it, fixed for the step
  loss_mask           bool [B, T]
  segment_ids         int [B, T], 1, 2, ... per trajectory of a row; 0 pads
  num_segments        most trajectories of a row
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from darl_jax import numerics
from darl_jax.objectives import log_ratio

KlEstimator = Literal["k1", "k2", "k3"]
Sums = dict[str, jax.Array]

_KL_ESTIMATORS: dict[str, Callable[..., jax.Array]] = {
  "k1": log_ratio.k1,
  "k2": log_ratio.k2,
  "k3": log_ratio.k3,
}


def gspo(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  advantages: jax.Array,
  token_weights: jax.Array,
  loss_mask: jax.Array,
  segment_ids: jax.Array,
  *,
  clip_low: float,
  clip_high: float,
  dual_clip: float,
  num_segments: int,
) -> tuple[jax.Array, Sums]:
  """A clipped surrogate of whole trajectories.

    s_i = exp(mean_t ell_it)
    L   = - sum_it c_it m_it min(s_i A_i, clip(s_i, 1 - lo, 1 + hi) A_i)

  and for A < 0 at least c A. With c_it = 1 / (S T_i) it is GSPO's mean over
  the S trajectories that have a token. A ratio exactly on a bound keeps its
  gradient. Source: arXiv:2507.18071; the dual clip is arXiv:1912.09729.

  Args:
    logprobs: As above, and so are the next five.
    behavior_logprobs: May be of several versions within a trajectory.
    advantages: See above.
    token_weights: See above.
    loss_mask: See above.
    segment_ids: See above.
    clip_low: lo, of the trajectory's ratio: thousandths, not tenths.
    clip_high: hi, likewise.
    dual_clip: c > 1; inf for none.
    num_segments: See above.

  Returns:
    loss: float32 [], 0 if every token is masked.
    sums: ``clipped_low``, ``clipped_high``, ``clipped_dual``: tokens of the
      trajectories that are held at that bound and have no gradient.
  """
  advantages, weights = _constants(advantages, token_weights, loss_mask)
  ell = numerics.log_ratio(
    logprobs, jax.lax.stop_gradient(behavior_logprobs), loss_mask
  )
  total = _per_trajectory(ell, segment_ids, num_segments)
  tokens = _per_trajectory(loss_mask, segment_ids, num_segments)
  ratio = jnp.exp(_on_tokens(numerics.safe_divide(total, tokens), segment_ids))
  negative = advantages < 0
  lower = jnp.where(negative, 1.0 - clip_low, 0.0)
  upper = jnp.where(negative, dual_clip, 1.0 + clip_high)
  too_low, too_high = ratio < lower, ratio > upper
  bounded = jnp.where(too_high, upper, jnp.where(too_low, lower, ratio))
  loss = -jnp.sum(weights * advantages * bounded)
  return loss, {
    "clipped_low": numerics.count(loss_mask & too_low),
    "clipped_high": numerics.count(loss_mask & too_high & (advantages > 0)),
    "clipped_dual": numerics.count(loss_mask & too_high & negative),
  }


def cispo(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  advantages: jax.Array,
  token_weights: jax.Array,
  loss_mask: jax.Array,
  behavior_index: jax.Array,
  clip_low: jax.Array,
  clip_high: jax.Array,
) -> tuple[jax.Array, Sums]:
  """REINFORCE with a clipped, detached ratio: no token loses its gradient.

    L = - sum_it c_it m_it detach(clip(r_it, 1 - lo_v, 1 + hi_v)) A_i log pi_it

  Source: arXiv:2506.13585.

  Args:
    logprobs: As above, and so are the next four.
    behavior_logprobs: See above.
    advantages: See above.
    token_weights: See above.
    loss_mask: See above.
    behavior_index: int [B, T], entry of the version table, in [0, E).
    clip_low: [E], lo of each version; 1 for no lower bound.
    clip_high: [E], hi of each version; inf for no upper bound.

  Returns:
    loss: float32 [], 0 if every token is masked.
    sums: ``clipped_low`` and ``clipped_high``: tokens whose ratio is held.
  """
  advantages, weights = _constants(advantages, token_weights, loss_mask)
  ratio = _detached_ratio(logprobs, behavior_logprobs, loss_mask)
  entry = jnp.where(loss_mask, behavior_index, 0)
  lower, upper = 1.0 - clip_low[entry], 1.0 + clip_high[entry]
  held = jnp.clip(ratio, lower, upper)
  logprobs = numerics.masked(logprobs, loss_mask)
  return -jnp.sum(weights * held * advantages * logprobs), {
    "clipped_low": numerics.count(loss_mask & (ratio < lower)),
    "clipped_high": numerics.count(loss_mask & (ratio > upper)),
  }


def topr(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  advantages: jax.Array,
  token_weights: jax.Array,
  loss_mask: jax.Array,
  segment_ids: jax.Array,
  *,
  num_segments: int,
) -> tuple[jax.Array, Sums]:
  """REINFORCE whose wrong answers count less, the less likely they have become.

    L   = - sum_it c_it m_it w_i A_i log pi_it
    w_i = 1 for A_i > 0, else detach(clip(exp(sum_t ell_it), 0, 1))

  Source: arXiv:2503.14286. The sum of a trajectory's log-ratios is clamped to
  [-20, 20] as well.

  Args:
    logprobs: As above, and so are the others.
    behavior_logprobs: See above.
    advantages: See above.
    token_weights: See above.
    loss_mask: See above.
    segment_ids: See above.
    num_segments: See above.

  Returns:
    loss: float32 [], 0 if every token is masked.
    sums: ``trajectory_weight``, sum of w_i over tokens; ``clipped_high``,
      tokens of the trajectories with A <= 0 and a ratio above 1.
  """
  advantages, weights = _constants(advantages, token_weights, loss_mask)
  ell = _on_tokens(
    trajectory_log_ratio(
      jax.lax.stop_gradient(logprobs),
      behavior_logprobs,
      loss_mask,
      segment_ids,
      num_segments=num_segments,
    ),
    segment_ids,
  )
  taper = jnp.where(advantages > 0, 1.0, jnp.exp(jnp.minimum(ell, 0.0)))
  logprobs = numerics.masked(logprobs, loss_mask)
  return -jnp.sum(weights * taper * advantages * logprobs), {
    "trajectory_weight": numerics.masked_sum(taper, loss_mask),
    "clipped_high": numerics.count(loss_mask & (advantages <= 0) & (ell > 0)),
  }


def m2po_mask(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  advantages: jax.Array,
  loss_mask: jax.Array,
  *,
  max_second_moment: float,
) -> jax.Array:
  """The tokens that M2PO keeps of an optimizer batch.

  Among the tokens that the update would push further away, (A > 0 and r > 1)
  or (A < 0 and r < 1), the one with the largest ell^2 is dropped while the mean
  of ell^2 over those left exceeds the bound; of equal ones the first goes
  first. All others are kept. No gradient flows. Source: arXiv:2510.01161.

  Args:
    logprobs: float [...], nats, of the policy before the optimizer step, over
      all that this step trains on: a microbatch's own second moment would be
      another bound.
    behavior_logprobs: float [...], nats.
    advantages: float [...].
    loss_mask: bool [...].
    max_second_moment: tau, nats^2; >= 0, inf for none.

  Returns:
    bool [...], false where masked.
  """
  ell = numerics.log_ratio(logprobs, behavior_logprobs, loss_mask)
  ell = jax.lax.stop_gradient(ell).reshape(-1)
  advantages = numerics.masked(advantages, loss_mask).reshape(-1)
  away = (advantages > 0) & (ell > 0) | (advantages < 0) & (ell < 0)
  # The largest first, and behind them those that stay in any case.
  order = jnp.argsort(jnp.where(away, -jnp.abs(ell), jnp.inf), stable=True)
  ranked = jnp.where(away, jnp.square(ell), 0.0)[order]
  # Mean over what is left once the first 0, 1, ... have been dropped: summed
  # from the small end, so that dropping one large value costs no digits.
  rank = jnp.arange(ell.size)
  left = jnp.sum(away) - rank
  mean = jax.lax.cumsum(ranked, reverse=True) / jnp.maximum(left, 1)
  dropped = jnp.sum((left > 0) & (mean > max_second_moment))
  keep = jnp.zeros(ell.shape, bool).at[order].set(rank >= dropped)
  return loss_mask & keep.reshape(loss_mask.shape)


def estr_mask(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  behavior_entropy: jax.Array,
  loss_mask: jax.Array,
  *,
  threshold: float,
  epsilon: float,
) -> jax.Array:
  """The tokens inside ESTR's trust region: ell^2 / (H + eps) <= tau.

  A certain token, H near 0, may move less than one that was a toss-up. No
  gradient flows. Source: arXiv:2607.22186, which does not publish tau.

  Args:
    logprobs: As above.
    behavior_logprobs: As above.
    behavior_entropy: float [B, T], H, nats, of mu_v at the token.
    loss_mask: As above.
    threshold: tau, nats; > 0, inf for none.
    epsilon: nats; > 0.

  Returns:
    bool [B, T], false where masked.
  """
  ell = numerics.log_ratio(logprobs, behavior_logprobs, loss_mask)
  # An entropy is never negative; a rounding error may be.
  entropy = jnp.maximum(numerics.masked(behavior_entropy, loss_mask), 0.0)
  inside = jnp.square(ell) / (entropy + epsilon) <= threshold
  return loss_mask & jax.lax.stop_gradient(inside)


def kl_penalty(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  token_weights: jax.Array,
  loss_mask: jax.Array,
  *,
  estimator: KlEstimator,
) -> jax.Array:
  """sum_it c_it m_it k_it, an estimate of KL(mu || pi); float32 [], nats.

  The tokens are mu's, which does not depend on pi: the gradients of k1 and k3
  are unbiased estimates of that of KL(mu || pi), too. See
  ``objectives.log_ratio``.

  Args:
    logprobs: As above, and so are the next three.
    behavior_logprobs: See above.
    token_weights: See above.
    loss_mask: See above.
    estimator: k1, k2 or k3.
  """
  weights = jax.lax.stop_gradient(numerics.masked(token_weights, loss_mask))
  estimate = _KL_ESTIMATORS[estimator](
    logprobs, jax.lax.stop_gradient(behavior_logprobs), loss_mask
  )
  return jnp.sum(weights * estimate)


def reference_kl_penalty(
  logprobs: jax.Array,
  reference_logprobs: jax.Array,
  token_weights: jax.Array,
  loss_mask: jax.Array,
  *,
  estimator: KlEstimator,
) -> tuple[jax.Array, Sums]:
  """sum_it c_it m_it k_it, an estimate of KL(pi || ref).

  With x = log pi - log ref:

    estimator   value            derivative by log pi
    k1          x                x
    k2          x^2 / 2          x
    k3          exp(-x) - 1 + x  1 - exp(-x)

  Over tokens of pi, x grad log pi has the mean grad KL(pi || ref). It is k2's
  derivative, and is given to k1 as well, whose own one would be 1, which pushes
  nowhere on average. k3's is that of KL(ref || pi). Tokens of an older policy
  count as if pi had sampled them. Sources: Schulman, "Approximating KL
  divergence" (2020); k3 as in arXiv:2402.03300.

  Args:
    logprobs: As above, and so are the others but the next.
    reference_logprobs: float [B, T], nats, of the reference policy.
    token_weights: See above.
    loss_mask: See above.
    estimator: k1, k2 or k3.

  Returns:
    penalty: float32 [], nats.
    sums: ``reference_kl``, sum of k_it over tokens, nats.
  """
  weights = jax.lax.stop_gradient(numerics.masked(token_weights, loss_mask))
  arguments = jax.lax.stop_gradient(reference_logprobs), logprobs, loss_mask
  estimate = _KL_ESTIMATORS[estimator](*arguments)
  if estimator == "k1":
    slope = log_ratio.k2(*arguments)
    estimate = jax.lax.stop_gradient(estimate - slope) + slope
  kl = jax.lax.stop_gradient(jnp.sum(estimate))
  return jnp.sum(weights * estimate), {"reference_kl": kl}


def loglinear_proximal(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  behavior_version: jax.Array,
  loss_mask: jax.Array,
  *,
  policy_version: int | jax.Array,
  proximal_version: int | jax.Array,
) -> jax.Array:
  """Log-probs of a proximal policy between mu and pi, without a forward pass.

    log prox = log mu + a (log pi - log mu)
    a        = (v_prox - v_mu) / (v_pi - v_mu), held to [0, 1]; 0 if v_pi = v_mu

  detached. Source: arXiv:2605.12070.

  Args:
    logprobs: As above.
    behavior_logprobs: As above.
    behavior_version: int [B, T], v_mu.
    loss_mask: As above.
    policy_version: v_pi, of ``logprobs``.
    proximal_version: v_prox, that of the policy sought.

  Returns:
    float32 [B, T], nats; 0 where masked.
  """
  behind = (policy_version - behavior_version).astype(jnp.float32)
  ahead = (proximal_version - behavior_version).astype(jnp.float32)
  share = jnp.clip(numerics.safe_divide(ahead, behind), 0.0, 1.0)
  ell = numerics.log_ratio(logprobs, behavior_logprobs, loss_mask)
  proximal = numerics.masked(behavior_logprobs, loss_mask) + share * ell
  return jax.lax.stop_gradient(proximal)


def trajectory_log_ratio(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  loss_mask: jax.Array,
  segment_ids: jax.Array,
  *,
  num_segments: int,
) -> jax.Array:
  """log pi(y) - log mu(y) of whole trajectories, clamped to [-20, 20].

  Args:
    logprobs: As above, and so are the others.
    behavior_logprobs: See above.
    loss_mask: See above.
    segment_ids: See above.
    num_segments: See above.

  Returns:
    float32 [B, num_segments + 1], nats, by segment id; 0 without a token.
  """
  ell = numerics.log_ratio(logprobs, behavior_logprobs, loss_mask)
  total = _per_trajectory(ell, segment_ids, num_segments)
  return jnp.clip(total, -numerics.MAX_LOG_RATIO, numerics.MAX_LOG_RATIO)


def trajectories_present(
  loss_mask: jax.Array, segment_ids: jax.Array, *, num_segments: int
) -> jax.Array:
  """Which segment ids of each row have a masked-in token.

  Args:
    loss_mask: As above, and so are the next two.
    segment_ids: See above.
    num_segments: See above.

  Returns:
    bool [B, num_segments + 1].
  """
  return _per_trajectory(loss_mask, segment_ids, num_segments) > 0


def vcpo_scale(
  ell: jax.Array, present: jax.Array, *, base_ess_fraction: float
) -> tuple[jax.Array, jax.Array]:
  """What VCPO multiplies the learning rate by.

    sqrt(min(1, (ESS / B) / rho_base))

  with the effective sample size of the unclipped trajectory weights. Scale the
  step and not the loss: Adam undoes what scales a gradient. Source:
  arXiv:2602.17616.

  Args:
    ell: [...], log pi(y) - log mu(y), nats, as ``trajectory_log_ratio`` returns
      them for the whole optimizer batch.
    present: bool [...], where there is a trajectory with a token; B of them.
    base_ess_fraction: rho_base, the ESS / B of a step at the full rate; > 0.

  Returns:
    scale: float32 [], in (0, 1].
    ess_fraction: float32 [], ESS / B. Both are 1 without a trajectory.
  """
  ell = jax.lax.stop_gradient(numerics.masked(ell, present))
  ell = jnp.clip(ell, -numerics.MAX_LOG_RATIO, numerics.MAX_LOG_RATIO)
  # The effective sample size does not change when all weights are scaled.
  largest = jnp.max(jnp.where(present, ell, -numerics.MAX_LOG_RATIO))
  weight = numerics.masked(jnp.exp(ell - largest), present)
  trajectories = numerics.count(present)
  ess = log_ratio.effective_sample_size(
    jnp.sum(weight), jnp.sum(jnp.square(weight))
  )
  fraction = numerics.safe_divide(ess, trajectories)
  fraction = jnp.where(trajectories > 0, fraction, 1.0)
  scale = jnp.sqrt(jnp.minimum(1.0, fraction / base_ess_fraction))
  return scale, fraction


def _constants(
  advantages: jax.Array, token_weights: jax.Array, loss_mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """float32, 0 where masked, without gradient."""
  return jax.lax.stop_gradient(
    (
      numerics.masked(advantages, loss_mask),
      numerics.masked(token_weights, loss_mask),
    )
  )


def _detached_ratio(
  logprobs: jax.Array, behavior_logprobs: jax.Array, loss_mask: jax.Array
) -> jax.Array:
  ell = numerics.log_ratio(logprobs, behavior_logprobs, loss_mask)
  return jax.lax.stop_gradient(jnp.exp(ell))


def _per_trajectory(
  values: jax.Array, segment_ids: jax.Array, num_segments: int
) -> jax.Array:
  """[B, T], 0 where masked -> float32 sums [B, num_segments + 1].

  Row by row: devices that hold whole rows exchange nothing.
  """
  return jax.vmap(
    lambda row, ids: jax.ops.segment_sum(
      row, ids, num_segments=num_segments + 1
    )
  )(values.astype(jnp.float32), segment_ids)


def _on_tokens(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """[B, num_segments + 1] -> [B, T], each trajectory's on its tokens."""
  return jnp.take_along_axis(values, segment_ids, axis=1)
