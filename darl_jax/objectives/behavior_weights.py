"""How much each behavior policy counts in a step (method 2.3).

Computed once for the step, from the scoring pass, on the host: numpy, float64.
"""

import dataclasses
from typing import Literal

import numpy as np

from darl_jax import numerics
from darl_jax.objectives import log_ratio

BehaviorWeighting = Literal["pooled", "ess_token", "moment", "inverse_variance"]


@dataclasses.dataclass(frozen=True)
class BehaviorStatistics:
  """Sums over the masked-in tokens of each version in the selected batch.

  Every field is float64 [E]; the fields of two batches add up.

  Attributes:
    tokens: N_v.
    ratio: Sum of r = pi/mu_v.
    ratio_squared: Sum of r^2.
    ell: Sum of ell = log r, nats.
    ell_squared: Sum of ell^2.
  """

  tokens: np.ndarray
  ratio: np.ndarray
  ratio_squared: np.ndarray
  ell: np.ndarray
  ell_squared: np.ndarray

  @classmethod
  def from_tokens(
    cls, ell: np.ndarray, behavior_index: np.ndarray, num_behaviors: int
  ) -> "BehaviorStatistics":
    """Sums over single tokens.

    Args:
      ell: [n], log pi - log mu_v of each masked-in token, nats; clamped to
        [-20, 20] here.
      behavior_index: int [n], entry of the version table.
      num_behaviors: E.

    Raises:
      ValueError: Shapes differ, an entry is outside [0, E), or a log-ratio is
        NaN, which no masked-in token's may be.
    """
    if ell.ndim != 1 or ell.shape != behavior_index.shape:
      raise ValueError(
        f"ell {ell.shape} and behavior_index {behavior_index.shape} must both "
        "be [n]."
      )
    outside = (behavior_index < 0) | (behavior_index >= num_behaviors)
    if np.any(outside):
      raise ValueError(
        f"behavior_index {behavior_index[outside][0]} is outside the version "
        f"table's [0, {num_behaviors})."
      )
    if np.any(np.isnan(ell)):
      raise ValueError(
        f"{np.count_nonzero(np.isnan(ell))} of {ell.size} log-ratios are NaN: "
        "the policy's or the sampler's log-probs are."
      )
    ell = np.clip(
      ell.astype(np.float64), -numerics.MAX_LOG_RATIO, numerics.MAX_LOG_RATIO
    )
    ratio = np.exp(ell)

    def total(values: np.ndarray) -> np.ndarray:
      return np.bincount(
        behavior_index, weights=values, minlength=num_behaviors
      )

    return cls(
      tokens=total(np.ones_like(ell)),
      ratio=total(ratio),
      ratio_squared=total(ratio**2),
      ell=total(ell),
      ell_squared=total(ell**2),
    )


def behavior_weights(
  stats: BehaviorStatistics,
  *,
  weighting: BehaviorWeighting,
  weight_cap: float,
  kappa: float,
) -> np.ndarray:
  """alpha_v, the share of the step that each version's tokens get.

    pooled            alpha_v = N_v / N, the control
    otherwise         alpha_v ~ N_v min(weight_cap, (raw_v/N_v) / (sum raw / N))
    ess_token         raw_v = (sum r)^2 / sum r^2 over v's tokens
    moment            raw_v = N_v / (1 + kappa M2_v), M2_v = mean of ell^2
    inverse_variance  raw_v = N_v / (1 + kappa var_v), var_v of ell

  Normalised to sum 1, once: after it a version may hold somewhat more than
  weight_cap times its pooled share. Source: method 2.3, our reconstruction.

  Args:
    stats: Sums over each version's tokens.
    weighting: One of the above; all equal ``pooled`` when every ratio is 1.
    weight_cap: Greatest weight relative to pooled; >= 1, inf for none. Not used
      by ``pooled``.
    kappa: Strength of the last two; >= 0 and finite.

  Returns:
    float64 [E], summing to 1; 0 for a version without tokens, and all 0 without
    any.

  Raises:
    ValueError: A setting is out of its range.
  """
  if not weight_cap >= 1:
    raise ValueError(f"weight_cap = {weight_cap} must be at least 1.")
  if not 0 <= kappa < np.inf:
    raise ValueError(f"kappa = {kappa} must be at least 0 and finite.")
  present = stats.tokens > 0
  tokens = np.where(present, stats.tokens, 1.0)
  mean = stats.ell / tokens
  second_moment = stats.ell_squared / tokens
  if weighting == "pooled":
    per_token = np.ones_like(tokens)
  elif weighting == "ess_token":
    raw = log_ratio.effective_sample_size(stats.ratio, stats.ratio_squared)
    per_token = raw / tokens
  elif weighting == "moment":
    per_token = 1 / (1 + kappa * second_moment)
  elif weighting == "inverse_variance":
    # |ell| <= 20, so float64 leaves the difference some 1e-13 of noise.
    variance = np.maximum(second_moment - mean**2, 0.0)
    per_token = 1 / (1 + kappa * variance)
  else:
    raise ValueError(
      f"weighting = {weighting!r} is not one of pooled, ess_token, moment, "
      "inverse_variance."
    )
  if not np.any(present):
    return np.zeros_like(tokens)
  average = np.sum(stats.tokens * per_token) / np.sum(stats.tokens)
  relative = per_token / average
  if weighting != "pooled":
    relative = np.minimum(relative, weight_cap)
  alpha = stats.tokens * relative
  return alpha / np.sum(alpha)


def token_weights(
  stats: BehaviorStatistics,
  *,
  weighting: BehaviorWeighting,
  weight_cap: float,
  kappa: float,
  dead_tokens: int,
) -> np.ndarray:
  """c_v, the weight in the loss of one token sampled by version v.

    c_v = alpha_v / N_v * N / (N + dead_tokens)

  Args:
    stats: Sums over each version's tokens.
    weighting: As in ``behavior_weights``.
    weight_cap: As in ``behavior_weights``.
    kappa: As in ``behavior_weights``.
    dead_tokens: Masked-in tokens of the dead groups that the step drew, under
      the denominator ``all``; 0 under ``live``.

  Returns:
    float64 [E]; 0 for a version without tokens.

  Raises:
    ValueError: A setting is out of its range.
  """
  if dead_tokens < 0:
    raise ValueError(f"dead_tokens = {dead_tokens} must be at least 0.")
  alpha = behavior_weights(
    stats, weighting=weighting, weight_cap=weight_cap, kappa=kappa
  )
  tokens = np.sum(stats.tokens)
  share = tokens / (tokens + dead_tokens) if tokens > 0 else 0.0
  return alpha / np.where(stats.tokens > 0, stats.tokens, 1.0) * share


def trajectory_token_weights(
  owner: np.ndarray, *, dead_tokens: int
) -> np.ndarray:
  """c_it, for a mean over trajectories of means over their tokens.

    c_it = 1 / (S T_i) * N / (N + dead_tokens)

  with S the trajectories that have a token, so dead groups dilute the step as
  they do in ``token_weights``.

  Args:
    owner: int [N], which trajectory each masked-in token belongs to.
    dead_tokens: As in ``token_weights``.

  Returns:
    float64 [N].

  Raises:
    ValueError: ``dead_tokens`` is out of its range.
  """
  if dead_tokens < 0:
    raise ValueError(f"dead_tokens = {dead_tokens} must be at least 0.")
  if not len(owner):
    return np.zeros(0)
  _, index, lengths = np.unique(owner, return_inverse=True, return_counts=True)
  share = len(owner) / (len(owner) + dead_tokens)
  return share / (len(lengths) * lengths[index])
