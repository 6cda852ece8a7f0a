"""How well the sampler's log-probs are the learner's, while a run goes on."""

from collections.abc import Sequence

import numpy as np

from darl_jax.replay.batching import ScoringPlan
from darl_jax.replay.ring import Entry, Pool
from darl_jax.rescoring.rescorer import Rescorer

# Trajectories that are computed again, at most.
_NUM_RESCORED = 32
# Of those of several versions, under each of them.
_NUM_MIXED = 8


class SamplerParity:
  """Compares what was recorded with what the same weights give the learner."""

  def __init__(self, rescorer: Rescorer):
    self._rescorer = rescorer

  def newest(
    self, plan: ScoringPlan, per_token: np.ndarray, *, version: int
  ) -> dict[str, float]:
    """Per token, of the newest trajectories that one version sampled whole.

    Under that version: all of them where the scoring pass was under it, or else
    some, computed again.

    Args:
      plan: What was scored, and how.
      per_token: Its log-probs.
      version: That it was scored under.
    """
    whole = [
      (entry.trajectory.begun_by, i)
      for i, entry in enumerate(plan.entries)
      if entry.trajectory.policy_version[-1] == entry.trajectory.begun_by
    ]
    if not whole:
      return {}
    sampler, _ = max(whole)
    newest = np.array([i for begun_by, i in whole if begun_by == sampler])
    if sampler != version:
      newest = newest[:_NUM_RESCORED]
    chosen = [plan.entries[i] for i in newest]
    if sampler == version:
      logprobs = plan.tokens_of(per_token, newest)
    else:
      try:
        logprobs = self._rescorer.logprobs(chosen, sampler)
      except KeyError:  # Beyond replay.snapshot_bytes.
        return {}
    gaps = _gaps(chosen, logprobs)
    return {
      "parity/p95": float(np.quantile(gaps, 0.95)),
      "parity/max": float(np.max(gaps)),
    }

  def mixed(self, pool: Pool) -> dict[str, float]:
    """What it costs to go on under new weights with what old ones cached.

    Each token of the newest trajectories that several versions sampled, against
    a forward pass of all tokens before it under the token's own version. With
    ``rollout.weight_update`` "recompute" that is what sampled it; with "swap"
    the earlier keys and values were others.
    """
    mixed = [
      entry
      for entry in pool.entries
      if entry.trajectory.policy_version[-1] != entry.trajectory.begun_by
    ][-_NUM_MIXED:]
    if not mixed:
      return {}
    logprobs, known = self._rescorer.under_own(mixed)
    behavior = np.concatenate([e.trajectory.behavior_logprobs for e in mixed])
    gaps = np.abs(logprobs - behavior)[known]
    if not len(gaps):
      return {}
    return {
      "parity/mixed_p95": float(np.quantile(gaps, 0.95)),
      "parity/mixed_max": float(np.max(gaps)),
    }


def _gaps(entries: Sequence[Entry], logprobs: np.ndarray) -> np.ndarray:
  """Of the sampled tokens."""
  behavior = np.concatenate([e.trajectory.behavior_logprobs for e in entries])
  mask = np.concatenate([e.trajectory.loss_mask for e in entries])
  return np.abs(logprobs - behavior)[mask]
