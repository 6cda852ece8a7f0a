"""Log-probs of the ring's trajectories under the snapshots that it holds.

Exact: a forward pass over all tokens, on the train mesh, in the learner's
precision. Snapshots move there one at a time, so that the mesh holds one set of
parameters beside the learner's, however many are asked for.
"""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from darl_jax.config import LearnerConfig
from darl_jax.learner.step import Learner
from darl_jax.replay.batching import ScoringPlan
from darl_jax.replay.ring import Entry, Ring
from darl_jax.sharding import transfer


class Rescorer:
  """Scores trajectories again, under other weights than the newest."""

  def __init__(self, learner: Learner, config: LearnerConfig, ring: Ring):
    """
    Args:
      learner: Whose scoring program is used.
      config: Its shapes.
      ring: Holds the snapshots.
    """
    self._learner = learner
    self._config = config
    self._ring = ring

  def logprobs(self, entries: Sequence[Entry], version: int) -> np.ndarray:
    """Under one snapshot.

    Args:
      entries: At least one.
      version: Of the snapshot.

    Returns:
      float32, nats, flat over the entries' tokens; position 0 of each is 0.

    Raises:
      KeyError: The ring does not hold it: evicted, or beyond
        ``replay.snapshot_bytes``.
    """
    [(_, logprobs)] = self.under_each(entries, [version])
    return logprobs

  def under_each(
    self, entries: Sequence[Entry], versions: Sequence[int]
  ) -> Iterator[tuple[int, np.ndarray]]:
    """Under several snapshots, in turn: (version, as ``logprobs``) each.

    Raises:
      KeyError: As ``logprobs``, when it comes to that version.
    """
    plan = ScoringPlan.of(entries, self._config)
    batches = list(plan.batches)
    everything = np.arange(len(plan.entries))
    for version in versions:
      params = transfer.to_mesh(
        self._ring.snapshot(version).params,
        shardings=self._learner.trained_shardings,
        dtype=jnp.dtype(jnp.float32),
      )
      # All are dispatched before the first is waited for.
      results = [self._learner.score(params, batch)[0] for batch in batches]
      yield version, plan.tokens_of(plan.per_token(results), everything)

  def under_own(
    self, entries: Sequence[Entry]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Each sampled token under the snapshot that sampled it.

    Returns:
      float32 as ``logprobs``, and bool of the same shape: where there is a
      log-prob. There is none on prompts, and where the snapshot is not held.
    """
    versions = np.concatenate([e.trajectory.policy_version for e in entries])
    sampled = np.concatenate([e.trajectory.loss_mask for e in entries])
    held = [v for v in np.unique(versions[sampled]) if self._ring.holds(int(v))]
    own = np.zeros(len(versions), np.float32)
    known = np.zeros(len(versions), bool)
    for version, logprobs in self.under_each(entries, list(map(int, held))):
      here = sampled & (versions == version)
      own[here], known[here] = logprobs[here], True
    return own, known
