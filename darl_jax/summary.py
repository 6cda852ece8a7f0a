"""What a run adds up while it goes, and says of itself at the end."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from darl_jax.replay.accounting import Accounting, Occupancy
from darl_jax.replay.ring import Entry
from darl_jax.types import CORRECT, Finish, TrajectoryGroup


class RewardMeter:
  """What the policy earns: every verified sample since the last drain.

  Dead groups and samples that are never selected count as well, so this is the
  policy's performance and not the batch's. Safe to add to from any thread.
  """

  _NAMES = ("reward", "accuracy", "truncated", "response_tokens")

  def __init__(self):
    self._lock = threading.Lock()
    self._sums = np.zeros(len(self._NAMES))
    self._counts = np.zeros(len(self._NAMES))

  def add(self, group: TrajectoryGroup) -> None:
    samples = group.trajectories
    rewards = [t.reward for t in samples if t.reward is not None]
    sums = (
      sum(rewards),
      sum(reward >= CORRECT for reward in rewards),
      sum(t.finish is Finish.LENGTH for t in samples),
      sum(t.num_sampled for t in samples),
    )
    counts = (len(rewards), len(rewards), len(samples), len(samples))
    with self._lock:
      self._sums += sums
      self._counts += counts

  def drain(self) -> dict[str, float]:
    """Means since the last drain; none where nothing was verified."""
    with self._lock:
      sums, counts = self._sums, self._counts
      self._sums, self._counts = np.zeros_like(sums), np.zeros_like(counts)
    return {
      f"train/{name}": float(total / count)
      for name, total, count in zip(self._NAMES, sums, counts, strict=True)
      if count
    }


class Summary:
  """How far the run got: the content of ``summary.json``."""

  def __init__(self, *, clock: Callable[[], float] = time.monotonic):
    self.status = "running"
    self.error: str | None = None
    self._clock = clock
    self._created = clock()
    self._train_started: float | None = None
    self._train_ended: float | None = None
    self._accuracies: list[tuple[int, float]] = []
    self._steps = 0
    self._age_sum = self._age_count = self._max_age = 0
    self._learner_wait_s = 0.0

  def training_started(self) -> None:
    self._train_started = self._clock()

  def training_ended(self) -> None:
    if self._train_started is not None and self._train_ended is None:
      self._train_ended = self._clock()

  def ended(self, error: BaseException | None, *, interrupted: bool) -> None:
    """Notes how the run ended, and with what error if with one."""
    if error is None:
      self.status = "complete"
      return
    self.status = "interrupted" if interrupted else "failed"
    notes = getattr(error, "__notes__", ())
    self.error = "\n".join([f"{type(error).__name__}: {error}", *notes])

  def learner_waited(self, seconds: float) -> None:
    self._learner_wait_s += seconds

  def evaluated(self, step: int, accuracy: float) -> None:
    self._accuracies.append((step, accuracy))

  def stepped(self, step: int, entries: Sequence[Entry]) -> dict[str, float]:
    """Counts one learner step on ``entries``; returns their ages' metrics."""
    ages = [entry.age for entry in entries]
    self._steps = step
    self._age_sum += sum(ages)
    self._age_count += len(ages)
    self._max_age = max(self._max_age, *ages)
    return {
      "ring/mean_age": float(np.mean(ages)),
      "ring/max_age": float(max(ages)),
    }

  @property
  def train_seconds(self) -> float:
    """Wall clock of the training stage so far."""
    if self._train_started is None:
      return 0.0
    ended = self._clock() if self._train_ended is None else self._train_ended
    return ended - self._train_started

  def waits(self, rollout_wait_s: float) -> dict[str, float]:
    """Share of the training stage that each side spent waiting."""
    seconds = max(self.train_seconds, 1e-9)
    return {
      "wait/learner": min(self._learner_wait_s / seconds, 1.0),
      "wait/rollout": min(rollout_wait_s / seconds, 1.0),
    }

  def speeds(
    self, occupancy: Occupancy, actor: Mapping[str, float]
  ) -> dict[str, float]:
    """Sampled tokens per second of the training stage, on both sides."""
    seconds = max(self.train_seconds, 1e-9)
    return {
      "speed/learner_tokens_per_s": occupancy.trained_tokens / seconds,
      "speed/rollout_tokens_per_s": actor["rollout/tokens"] / seconds,
    }

  def to_dict(
    self,
    accounting: Accounting,
    occupancy: Occupancy,
    actor: Mapping[str, float],
    verifier: Mapping[str, float],
    waits: Mapping[str, float],
  ) -> dict[str, Any]:
    """Everything, as plain JSON data."""
    accuracies = [accuracy for _, accuracy in self._accuracies]
    speeds = self.speeds(occupancy, actor)
    return {
      "status": self.status,
      "error": self.error,
      "accuracy_before": accuracies[0] if accuracies else None,
      "accuracy_after": accuracies[-1] if accuracies else None,
      "accuracy_best": max(accuracies, default=None),
      "accuracies": [list(pair) for pair in self._accuracies],
      "steps": self._steps,
      "seconds": self._clock() - self._created,
      "train_seconds": self.train_seconds,
      **accounting.counts(),
      "expired_reasons": dict(accounting.expired),
      "dropped_reasons": dict(accounting.dropped),
      "prompts_drawn": actor["rollout/prompts_drawn"],
      "prompts_in_flight": actor["rollout/prompts_in_flight"],
      "verifier": dict(verifier),
      "learner_wait_fraction": waits["wait/learner"],
      "rollout_wait_fraction": waits["wait/rollout"],
      "mean_age": self._age_sum / max(self._age_count, 1),
      "max_age": self._max_age,
      "learner_tokens_per_s": speeds["speed/learner_tokens_per_s"],
      "rollout_tokens_per_s": speeds["speed/rollout_tokens_per_s"],
    }
