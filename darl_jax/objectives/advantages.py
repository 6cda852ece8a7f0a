"""Advantages from the rewards of a group of samples of one prompt.

Small and on the host: numpy, float64 inside.
"""

from typing import Literal

import numpy as np

AdvantageKind = Literal["group", "group_centered", "rloo"]


def group_advantages(
  rewards: np.ndarray,
  valid: np.ndarray,
  *,
  kind: AdvantageKind,
  tolerance: float,
) -> tuple[np.ndarray, np.ndarray]:
  """The advantage of each sample relative to its own group.

    group           (r - mean) / std, population std, no epsilon  (GRPO)
    group_centered  r - mean                                      (Dr. GRPO)
    rloo            r - mean of the other samples

  Source: method 3; arXiv:2402.03300, arXiv:2503.20783, arXiv:2402.14740. Mean
  and std are of the samples that count: valid, and with a finite reward.

  A group whose rewards satisfy max - min <= tolerance, or with fewer than two
  samples that count, is dead: its advantages are exactly 0. That is decided by
  max - min, because a standard deviation of equal rewards may be a rounding
  error, and dividing by it makes advantages of a thousand out of nothing.

  Args:
    rewards: [Q, G], groups by row: a row holds the samples of one group and of
      no other, in any order.
    valid: bool [Q, G], false where there is no reward.
    kind: The estimator.
    tolerance: Of max - min, in units of reward; >= 0.

  Returns:
    advantages: float32 [Q, G]; 0 for samples that do not count.
    dead: bool [Q].

  Raises:
    ValueError: Shapes differ, or the kind or the tolerance is no such thing.
  """
  if rewards.ndim != 2 or rewards.shape != valid.shape:
    raise ValueError(
      f"rewards {rewards.shape} and valid {valid.shape} must both be [Q, G]."
    )
  if not tolerance >= 0:
    raise ValueError(f"tolerance = {tolerance} must be at least 0.")
  rewards = rewards.astype(np.float64)
  counts = valid.astype(bool) & np.isfinite(rewards)
  n = np.count_nonzero(counts, axis=1)
  lowest = np.min(rewards, axis=1, where=counts, initial=np.inf)
  highest = np.max(rewards, axis=1, where=counts, initial=-np.inf)
  empty = n == 0
  lowest, highest = np.where(empty, 0.0, lowest), np.where(empty, 0.0, highest)
  spread = highest - lowest
  dead = spread <= tolerance

  # Rewards moved and scaled to [0, 1]: the estimators are invariant to the one,
  # proportional or invariant to the other, and a large common reward or a tiny
  # spread then costs no digits. A group of one has spread 0 and is dead.
  live = counts & ~dead[:, None]
  scale = np.where(dead, 1.0, spread)[:, None]
  unit = np.where(live, rewards - lowest[:, None], 0.0) / scale
  n = np.maximum(n, 2)[:, None]
  centered = np.where(live, unit - unit.sum(axis=1, keepdims=True) / n, 0.0)
  if kind == "group":
    variance = np.sum(centered**2, axis=1, keepdims=True) / n
    advantages = centered / np.sqrt(np.where(dead[:, None], 1.0, variance))
  elif kind == "group_centered":
    advantages = centered * scale
  elif kind == "rloo":
    # r_i - (sum - r_i) / (n - 1) = (r_i - mean) n / (n - 1).
    advantages = centered * scale * n / (n - 1)
  else:
    raise ValueError(
      f"kind = {kind!r} is not one of group, group_centered, rloo."
    )
  return advantages.astype(np.float32), dead
