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

  def state(self) -> dict[str, list[float]]:
    """What is added up, as plain JSON data."""
    with self._lock:
      return {"sums": self._sums.tolist(), "counts": self._counts.tolist()}

  def restore(self, state: Mapping[str, Sequence[float]]) -> None:
    """Goes on from there."""
    with self._lock:
      self._sums = np.array(state["sums"])
      self._counts = np.array(state["counts"])

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
    self.rollbacks = self._judged_samples = 0
    # Of the processes that the run was before, in seconds.
    self._seconds_before = self._train_seconds_before = 0.0
    self._resumed = 0
    self._verifier_before: dict[str, float] = {}

  def state(self, verifier: Mapping[str, float]) -> dict[str, Any]:
    """What is added up over the run, as plain JSON data.

    Args:
      verifier: Counts of the verifier's pool, which is new in each process.
    """
    return {
      "accuracies": list(self._accuracies),
      "steps": self._steps,
      "age_sum": self._age_sum,
      "age_count": self._age_count,
      "max_age": self._max_age,
      "learner_wait_s": self._learner_wait_s,
      "rollbacks": self.rollbacks,
      "judged_samples": self._judged_samples,
      "seconds": self._seconds,
      "train_seconds": self.train_seconds,
      "resumed": self._resumed,
      "verifier": self._with_before(verifier),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from there."""
    self._accuracies = [tuple(pair) for pair in state["accuracies"]]
    self._steps = state["steps"]
    self._age_sum, self._age_count = state["age_sum"], state["age_count"]
    self._max_age = state["max_age"]
    self._learner_wait_s = state["learner_wait_s"]
    # Runs that were saved before steps were judged have none.
    self.rollbacks = state.get("rollbacks", 0)
    self._judged_samples = state.get("judged_samples", 0)
    self._seconds_before = state["seconds"]
    self._train_seconds_before = state["train_seconds"]
    self._resumed = state["resumed"] + 1
    self._verifier_before = state["verifier"]

  def _with_before(self, verifier: Mapping[str, float]) -> dict[str, float]:
    before = self._verifier_before
    return {name: n + before.get(name, 0) for name, n in verifier.items()}

  def accuracy_at(self, step: int) -> float | None:
    """Of the evaluation at that step, if it was the last one."""
    if self._accuracies and self._accuracies[-1][0] == step:
      return self._accuracies[-1][1]
    return None

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

  def judged(self, values: Mapping[str, float]) -> None:
    """Counts a step's verdict, of ``Verdict.metrics``; none where it has none.

    Args:
      values: Metrics, these among them.
    """
    if "rollback/rejected" in values:
      self.rollbacks += int(values["rollback/rejected"])
      self._judged_samples += int(values["rollback/samples"])

  @property
  def train_seconds(self) -> float:
    """Wall clock of the training stage so far."""
    before = self._train_seconds_before
    if self._train_started is None:
      return before
    ended = self._clock() if self._train_ended is None else self._train_ended
    return before + ended - self._train_started

  @property
  def _seconds(self) -> float:
    """Wall clock of the run so far, without the time between processes."""
    return self._seconds_before + self._clock() - self._created

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
      "rollbacks": self.rollbacks,
      "judged_samples": self._judged_samples,
      "seconds": self._seconds,
      "resumed": self._resumed,
      "train_seconds": self.train_seconds,
      **accounting.counts(),
      "expired_reasons": dict(accounting.expired),
      "dropped_reasons": dict(accounting.dropped),
      "prompts_drawn": actor["rollout/prompts_drawn"],
      "prompts_in_flight": actor["rollout/prompts_in_flight"],
      "verifier": self._with_before(verifier),
      "learner_wait_fraction": waits["wait/learner"],
      "rollout_wait_fraction": waits["wait/rollout"],
      "mean_age": self._age_sum / max(self._age_count, 1),
      "max_age": self._max_age,
      "learner_tokens_per_s": speeds["speed/learner_tokens_per_s"],
      "rollout_tokens_per_s": speeds["speed/rollout_tokens_per_s"],
    }
