"""An asynchronous run, written down and done again in one thread.

Two threads and the verifier meet in the ring, under its lock. So the order in
which the ring was changed and asked is the whole schedule of a run: which
prompts were drawn when, under which weights each chunk was sampled, when which
rewards came, and what each step could choose from. ``RecordingRing`` writes
that order down, and ``ReplayedRing`` does the same things in the same order
whenever the learner asks it for something.

A schedule is a file of JSON lines: a header, then one event a line.

  ["reserve", groups]               the actor draws so many prompts
  ["latest", version]               ... fetches weights, and takes a round
  ["begin", [group, ...], crc]      ... delivers groups
  ["admit", group, rewards, failures]   the verifier delivers a group
  ["push", version, crc]            the learner publishes
  ["take", count]                   ... takes a pool of so many trajectories
  ["train", count]                  ... has trained on so many
  ["measured", value, ...]          ... has measured these
"""

import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from darl_jax import types
from darl_jax.config import ConfigError
from darl_jax.replay.ring import Entry, Pool, Ring

FORMAT = 1


class ReplayDiverged(Exception):
  """What was done again is not what was recorded; says where."""


class ScheduleEnded(Exception):
  """The schedule has no more events: the recorded process ended there."""


class ScheduleWriter:
  """Appends events to a file; each is with the operating system at once."""

  def __init__(self, path: pathlib.Path, header: Mapping[str, Any]):
    """Begins a new file.

    Args:
      path: Of the file.
      header: What the schedule is of; plain JSON data.
    """
    self._file = open(path, "wb", buffering=0)  # noqa: SIM115
    self.write({"format": FORMAT, **header})

  def write(self, event: Any) -> None:
    self._file.write(json.dumps(event).encode() + b"\n")

  def close(self) -> None:
    self._file.close()


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A recorded schedule.

  Attributes:
    header: What it is of.
    events: In their order.
  """

  header: Mapping[str, Any]
  events: Sequence[Sequence[Any]]


def read_schedule(path: str | os.PathLike[str]) -> Schedule:
  """What a ``ScheduleWriter`` wrote; half a line at the end is ignored.

  Raises:
    ConfigError: It cannot be read, is no schedule, or is of another format.
  """
  try:
    lines = pathlib.Path(path).read_bytes().split(b"\n")[:-1]
    header, *events = map(json.loads, lines)
    if header["format"] != FORMAT:
      raise ValueError(f"format {header['format']} instead of {FORMAT}")
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ConfigError(
      [
        f"{path} is no schedule: {error}. Try a schedule_*.jsonl of a run "
        "with --record."
      ],
      place="--replay",
    ) from error
  return Schedule(header, events)


class RecordingRing(Ring):
  """A ring that writes down what is done to it, in that order."""

  def __init__(self, *arguments, record: Callable[[Any], None], **keywords):
    """
    Args:
      *arguments: Of ``Ring``.
      record: Takes each event, under the ring's lock.
      **keywords: Of ``Ring``.
    """
    super().__init__(*arguments, **keywords)
    self._record = record

  # The lock is held from before the ring's own method on, which takes it again:
  # no other event comes between what is done and what is written.

  def reserve(self, num_groups: int, timeout_s: float) -> bool:
    with self._condition:
      granted = super().reserve(num_groups, timeout_s)
      if granted:
        self._record(["reserve", num_groups])
      return granted

  def latest(self) -> types.PolicySnapshot:
    with self._condition:
      snapshot = super().latest()
      self._record(["latest", snapshot.version])
      return snapshot

  def begin(self, groups: Sequence[types.TrajectoryGroup]) -> None:
    with self._condition:
      super().begin(groups)
      ids = [group.group_id for group in groups]
      self._record(["begin", ids, _crc_of_groups(groups)])

  def admit(self, group: types.TrajectoryGroup) -> None:
    with self._condition:
      super().admit(group)
      rewards = [trajectory.reward for trajectory in group.trajectories]
      self._record(["admit", group.group_id, rewards, [*group.failures]])

  def push_snapshot(self, snapshot: types.PolicySnapshot) -> None:
    with self._condition:
      super().push_snapshot(snapshot)
      held = self._snapshots[snapshot.version]
      self._record(["push", snapshot.version, _crc_of_params(held.params)])

  def take(
    self, count: int, timeout_s: float, *, waited_s: float = 0.0
  ) -> Pool:
    with self._condition:
      pool = super().take(count, timeout_s, waited_s=waited_s)
      self._record(["take", len(pool)])
      return pool

  def mark_trained(self, entries: Sequence[Entry], pool: Pool) -> None:
    with self._condition:
      super().mark_trained(entries, pool)
      self._record(["train", len(entries)])

  def measured(self, measure: Callable[[], Sequence[float]]) -> list[float]:
    values = super().measured(measure)  # Slow, and not about the ring.
    with self._condition:
      self._record(["measured", *values])
    return values


class Producers(Protocol):
  """What the actor's and the verifier's threads would do."""

  def submit(self) -> None:
    """Draws prompts and queues them."""

  def advance(self) -> Sequence[types.TrajectoryGroup]:
    """A round of generation: fetches weights; returns complete groups."""

  def admit(self, group: types.TrajectoryGroup) -> None:
    """Delivers a verified group to the ring."""


class ReplayedRing(Ring):
  """A ring that does what was recorded when the learner comes to it.

  Nobody else may use it: the whole run is in the learner's thread.
  """

  def __init__(self, *arguments, schedule: Schedule, **keywords):
    """
    Args:
      *arguments: Of ``Ring``.
      schedule: Done event by event.
      **keywords: Of ``Ring``.
    """
    super().__init__(*arguments, **keywords)
    self._events: Iterator[tuple[int, Sequence[Any]]] = enumerate(
      schedule.events, 1
    )
    self.producers: Producers | None = None
    self.done = 0  # Events, all of them as recorded.
    self._complete: list[types.TrajectoryGroup] = []  # Generated, not begun.
    self._unverified: dict[int, types.TrajectoryGroup] = {}

  def hold(self, groups: Sequence[types.TrajectoryGroup]) -> None:
    """Groups whose recorded rewards come later."""
    self._unverified.update((group.group_id, group) for group in groups)

  def push_snapshot(self, snapshot: types.PolicySnapshot) -> None:
    number, (version, crc) = self._until("push")
    super().push_snapshot(snapshot)
    held = self._snapshots[snapshot.version]
    self._compare(number, "the version", snapshot.version, version)
    self._compare(number, "the parameters", _crc_of_params(held.params), crc)

  def take(
    self, count: int, timeout_s: float, *, waited_s: float = 0.0
  ) -> Pool:
    number, (size,) = self._until("take")
    pool = super().take(count, 0.0)
    self._compare(number, "the pool's size", len(pool), size)
    return pool

  def mark_trained(self, entries: Sequence[Entry], pool: Pool) -> None:
    number, (count,) = self._until("train")
    super().mark_trained(entries, pool)
    self._compare(number, "the batch's size", len(entries), count)

  def measured(self, measure: Callable[[], Sequence[float]]) -> list[float]:
    _, values = self._until("measured")
    return list(values)

  def _until(self, awaited: str) -> tuple[int, Sequence[Any]]:
    """Does what was recorded before the next event of the learner's.

    Returns:
      That event's number and values.
    """
    for number, (kind, *values) in self._events:
      self.done = number - 1
      if kind == awaited:
        return number, values
      if kind in ("push", "take", "train", "measured"):
        raise ReplayDiverged(
          f"event {number} of the schedule is {kind!r}, and the learner comes "
          f"to {awaited!r}"
        )
      self._do(number, kind, *values)
    raise ScheduleEnded(f"the schedule ends before version {self.version + 1}")

  def _do(self, number: int, kind: str, *values: Any) -> None:
    """What another thread did then."""
    match kind, values:
      case "reserve", (groups,):
        # Granted then, perhaps since a consumer waited, as nobody does here.
        self._started += groups
        self._reserved += groups
        self.producers.submit()
      case "latest", (version,):
        self._compare(number, "the newest version", self.version, version)
        self._complete += self.producers.advance()
      case "begin", (group_ids, crc):
        groups, self._complete = self._complete, []
        found = [group.group_id for group in groups]
        self._compare(number, "the groups delivered", found, group_ids)
        self._compare(number, "their tokens", _crc_of_groups(groups), crc)
        self.begin(groups)
        self.hold(groups)
      case "admit", (group_id, rewards, failures):
        group = self._unverified.pop(group_id)
        self.producers.admit(_verified(group, rewards, failures))
      case _:
        raise ReplayDiverged(f"event {number} is no event: {kind!r} {values}")

  def _compare(self, number: int, what: str, found: Any, recorded: Any) -> None:
    if found != recorded:
      raise ReplayDiverged(
        f"event {number} of the schedule: {what} is {found}, and was recorded "
        f"as {recorded}. It is the first that differs."
      )


def _verified(
  group: types.TrajectoryGroup,
  rewards: Sequence[float | None],
  failures: Sequence[str | None],
) -> types.TrajectoryGroup:
  return dataclasses.replace(
    group,
    trajectories=tuple(
      dataclasses.replace(trajectory, reward=reward)
      for trajectory, reward in zip(group.trajectories, rewards, strict=True)
    ),
    failures=tuple(failures),
  )


def _crc_of_groups(groups: Sequence[types.TrajectoryGroup]) -> int:
  """Of tokens, their log-probs, and who sampled them."""
  crc = 0
  for group in groups:
    for each in group.trajectories:
      for array in (each.tokens, each.behavior_logprobs, each.policy_version):
        crc = zlib.crc32(np.ascontiguousarray(array), crc)
  return crc


def _crc_of_params(params: types.Params) -> int:
  crc = 0
  for leaf in jax.tree.leaves(params):
    crc = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8), crc)
  return crc
