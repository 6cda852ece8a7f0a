"""How well the sampler's log-probs are the learner's, while a run goes on."""

import jax.numpy as jnp
import numpy as np

from darl_jax.config import LearnerConfig
from darl_jax.learner.step import Learner
from darl_jax.replay import batching
from darl_jax.replay.ring import Pool, Ring
from darl_jax.sharding import transfer
from darl_jax.types import Params, PolicySnapshot

# Trajectories of several versions that are computed again under each of them.
_NUM_MIXED = 8


class SamplerParity:
  """Compares what was recorded with what the same weights give the learner."""

  def __init__(self, learner: Learner, config: LearnerConfig, ring: Ring):
    self._learner = learner
    self._config = config
    self._ring = ring

  def newest(
    self, pool: Pool, plan: batching.ScoringPlan, per_token: np.ndarray
  ) -> dict[str, float]:
    """How the sampler's log-probs compare with the learner's, per token.

    Of the newest trajectories that a single version sampled from end to end,
    under that version: all of them where the scoring pass was under it, or else
    one dispatch, computed again.
    """
    whole = [
      (entry.trajectory.begun_by, i)
      for i, entry in enumerate(pool.entries)
      if entry.trajectory.policy_version[-1] == entry.trajectory.begun_by
    ]
    if not whole:
      return {}
    sampler, _ = max(whole)
    newest = [i for version, i in whole if version == sampler]
    if sampler == pool.version:
      chosen = [pool.entries[i].trajectory for i in newest]
      logprobs = plan.tokens_of(per_token, np.array(newest))
      behavior = np.concatenate([t.behavior_logprobs for t in chosen])
      mask = np.concatenate([t.loss_mask for t in chosen])
    else:
      try:
        params = self._on_train_mesh(self._ring.snapshot(sampler))
      except KeyError:  # Beyond replay.snapshot_bytes.
        return {}
      chosen = [pool.entries[i] for i in newest]
      batch = next(batching.ScoringPlan.of(chosen, self._config).batches)
      logprobs = np.asarray(self._learner.score(params, batch)[0])
      behavior, mask = batch.behavior_logprobs, batch.loss_mask
    gaps = np.abs(logprobs - behavior)[mask]
    p95, largest = float(np.quantile(gaps, 0.95)), float(np.max(gaps))
    return {"parity/p95": p95, "parity/max": largest}

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
    plan = batching.ScoringPlan.of(mixed, self._config)
    batches = list(plan.batches)
    trajectories = [entry.trajectory for entry in mixed]
    versions, behavior, mask = (
      np.concatenate([getattr(t, name) for t in trajectories])
      for name in ("policy_version", "behavior_logprobs", "loss_mask")
    )
    gaps = []
    for version in np.unique(versions[mask]):
      try:
        params = self._on_train_mesh(self._ring.snapshot(int(version)))
      except KeyError:  # Evicted, or beyond replay.snapshot_bytes.
        continue
      results = [self._learner.score(params, batch)[0] for batch in batches]
      logprobs = plan.tokens_of(plan.per_token(results), np.arange(len(mixed)))
      here = mask & (versions == version)
      gaps.append(np.abs(logprobs - behavior)[here])
    if not gaps:
      return {}
    each = np.concatenate(gaps)
    return {
      "parity/mixed_p95": float(np.quantile(each, 0.95)),
      "parity/mixed_max": float(np.max(each)),
    }

  def _on_train_mesh(self, snapshot: PolicySnapshot) -> Params:
    return transfer.to_mesh(
      snapshot.params,
      shardings=self._learner.trained_shardings,
      dtype=jnp.dtype(jnp.float32),
    )
