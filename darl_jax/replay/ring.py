"""The ring: the K latest behavior policies and the trajectories they began.

Every sample passes through here, and none gets lost: it is counted when its
generation is finished, and from then on it is in exactly one place.

                       admit                     take, mark_trained
  begin --> awaiting ----------> in the ring, by --------------------> trained
          verification    |      slot, unused          |
                          v                            v
                       dropped                      expired
      (failed, dead, empty, overlong, bytes)  (stale, evicted, older than ring)

A slot belongs to one behavior policy. It opens when the first trajectory begun
by that policy is admitted; with more than K open, the lowest is evicted with
its trajectories. Publishing evicts nothing, because samples arrive late; but
what it makes older than ``max_staleness`` expires, and the slot closes. That is
where staleness is checked on the way out: under one lock with the version, so
that nothing in the ring is ever stale.

One condition guards everything. Producers wait in ``reserve``, the consumer in
``take``; whoever fails closes the ring with its exception, and everyone else
raises it.

What comes in is checked in ``ingestion``; what the ring says of itself is
defined in ``accounting``.
"""

import bisect
import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from darl_jax import config as config_lib
from darl_jax import types
from darl_jax.objectives import advantages as advantages_lib
from darl_jax.replay import ingestion, saved
from darl_jax.replay.accounting import (
  Accounting,
  Occupancy,
  SlotOccupancy,
  starvation_report,
)


class RingFailed(RuntimeError):
  """The ring was closed with an exception, which is this one's cause."""


class RingClosed(RuntimeError):
  """The ring was closed, and what was asked for will not come."""


class Starved(RuntimeError):
  """The ring did not fill in time; the message says why and what to change."""


@dataclasses.dataclass(eq=False, slots=True)
class _Record:
  """A sample in the ring; only the ring changes it, under its lock."""

  sample: ingestion.Sample
  trajectory: types.Trajectory  # The sample's, with its reward.
  advantage: np.float32
  uses: int = 0
  # The count that took it in when it left unused: (counter, reason).
  left: tuple[collections.Counter, str] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
  """A trajectory as it was when the consumer took it.

  Attributes:
    id: (group_id, index in the group).
    trajectory: With its reward; the arrays are read-only.
    advantage: float32, from the full group.
    uses: Times trained on before.
    age: Learner version minus the version that began it.
  """

  id: ingestion.SampleId
  trajectory: types.Trajectory
  advantage: np.float32
  uses: int
  age: int
  _record: _Record | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
  """Everything that could be trained on when the consumer asked.

  Attributes:
    entries: Sorted by id, so that the order of arrival does not matter.
    version: The learner's version at that time.
    dead_tokens: Masked-in tokens of samples with advantage 0 that arrived since
      the last trained step (for the denominator ``all``).
  """

  entries: tuple[Entry, ...]
  version: int
  dead_tokens: int
  _dead_tokens_ever: int = dataclasses.field(default=0, repr=False)

  def __len__(self) -> int:
    return len(self.entries)


class Ring:
  """K slots of trajectories, the snapshots behind them, and their accounts.

  All methods may be called from any thread. After ``close(error)`` every method
  that waits, adds or takes raises ``RingFailed`` from that error. Those that
  only look do not, and neither do ``mark_trained`` and ``push_snapshot``: a
  step that was taken is accounted for, so that it can be saved.
  """

  def __init__(
    self,
    config: config_lib.ReplayConfig,
    *,
    advantage: advantages_lib.AdvantageKind,
    reward_tolerance: float,
    groups_per_version: int,
    truncated: bool,
    shaping: Callable[[np.ndarray], np.ndarray] | None = None,
  ):
    """Creates an empty ring.

    Args:
      config: Sizes and bounds.
      advantage: Estimator of ``objectives.advantages``.
      reward_tolerance: A group whose rewards span no more is dead.
      groups_per_version: Fresh prompt groups that one learner step is worth:
        the rate at which ``reserve`` lets producers start.
      truncated: Whether sampling truncates, so that trajectories carry the
        support that each token was drawn from.
      shaping: What a verified reward gains by the answer's sampled tokens, int
        [n] to float [n], before it becomes an advantage; None for nothing.
    """
    self._config = config
    self._truncated = truncated
    self._shaping = shaping
    self._advantage = advantage
    self._reward_tolerance = reward_tolerance
    self._groups_per_version = groups_per_version

    self._condition = threading.Condition()
    self._closed = False
    self._error: BaseException | None = None

    self._version: int | None = None
    self._first_version = 0
    self._snapshots: dict[int, types.PolicySnapshot] = {}

    self._slots: dict[int, dict[ingestion.SampleId, _Record]] = {}
    self._awaiting: dict[int, list[ingestion.Sample]] = {}  # By group.
    self._group_ids = _IdSet()
    self._num_bytes = 0

    self._generated = 0
    self._trained = 0
    self._expired: collections.Counter = collections.Counter()
    self._dropped: collections.Counter = collections.Counter()
    self._trained_tokens = 0
    # Both only grow, so that marking a pool trained cannot count twice.
    self._dead_tokens_ever = 0
    self._dead_tokens_trained = 0

    self._started = 0
    self._reserved = 0
    self._wanted: list[int] = []  # The counts that consumers wait for.
    self._reserve_wait_s = 0.0

  # ---------------------------------------------------------------- snapshots

  def push_snapshot(self, snapshot: types.PolicySnapshot) -> None:
    """Publishes a version: its parameters, as the host's own arrays.

    A leaf is copied, unless it is a read-only numpy array that owns its data.

    Trajectories that are now older than ``max_staleness`` expire; nothing else
    leaves. Held are the snapshots of open slots and those whose samples may
    still arrive; beyond ``snapshot_bytes`` the oldest without an open slot goes
    first, then the oldest. The newest is always held.

    Raises:
      ValueError: The version is no int from 0 to 2^31 - 1, or not above the
        last one.
    """
    ingestion.check_version(snapshot.version)
    # Copied before the lock is taken: this is the slow part.
    params = jax.tree.map(_owned, snapshot.params)
    version = snapshot.version
    with self._condition:
      if self._version is None:
        self._first_version = version
      elif version <= self._version:
        raise ValueError(
          f"snapshot {version} is not newer than the last one, {self._version}."
        )
      self._version = version
      self._snapshots[version] = types.PolicySnapshot(version, params)
      for begun_by in [v for v in self._slots if self._is_stale(v)]:
        self._close_slot(begun_by, "stale")
      self._release_snapshots()
      self._condition.notify_all()

  def latest(self) -> types.PolicySnapshot:
    """The newest snapshot; its arrays are read-only.

    Raises:
      LookupError: None was pushed yet.
    """
    with self._condition:
      return self._snapshots[self.version]

  def snapshot(self, version: int) -> types.PolicySnapshot:
    """The snapshot of one version; its arrays are read-only.

    Raises:
      KeyError: It is not held; names those that are.
    """
    with self._condition:
      if version not in self._snapshots:
        held = ", ".join(map(str, self._snapshots)) or "none"
        raise KeyError(f"snapshot {version} is not held; held are: {held}.")
      return self._snapshots[version]

  def holds(self, version: int) -> bool:
    """Whether ``snapshot`` has that version."""
    return version in self._snapshots

  @property
  def version(self) -> int:
    """The newest version pushed.

    Raises:
      LookupError: None was pushed yet.
    """
    if self._version is None:
      raise LookupError("no snapshot was pushed yet.")
    return self._version

  # ---------------------------------------------------------------- producers

  def reserve(self, num_groups: int, timeout_s: float) -> bool:
    """Waits until generation of ``num_groups`` groups may start.

    It may while no more groups were started than the learner can use before
    they are stale (pacing after AReaL, arXiv:2505.24298):

      started + num_groups
        <= (version - first version + max_staleness + 1) * groups_per_version

    and always when a consumer waits for more than the ring holds and nothing
    that was started is still to come: the consumer never starves for pacing.

    Returns:
      Whether it may: false on time-out, and at once when the ring was closed.

    Raises:
      RingFailed: The ring was closed with an error.
    """
    if num_groups < 1:
      raise ValueError(f"num_groups = {num_groups} must be at least 1.")

    def allowed() -> bool:
      return (
        self._started + num_groups <= self._groups_allowed()
        or self._is_starving()
      )

    with self._condition:
      start = time.monotonic()
      try:
        granted = self._wait_until(allowed, timeout_s) and not self._closed
      finally:
        self._reserve_wait_s += time.monotonic() - start
      if granted:
        self._started += num_groups
        self._reserved += num_groups
      return granted

  def begin(self, groups: Sequence[types.TrajectoryGroup]) -> None:
    """Takes in groups whose generation is finished; rewards come in ``admit``.

    The arrays are checked and copied here, all groups or none: what is checked
    is what will be trained on, whatever happens to the producer's arrays.

    Raises:
      ValueError: Naming the group and what is wrong with it.
    """
    # Before the lock: this is slow.
    samples = ingestion.ingest(groups, truncated=self._truncated)
    with self._condition:
      self._raise_if_failed()
      self._check_new(groups, samples)
      for sample in samples:
        group_id = sample.id[0]
        self._group_ids.add(group_id)
        self._awaiting.setdefault(group_id, []).append(sample)
        self._num_bytes += sample.num_bytes
      self._generated += len(samples)
      reserved = min(self._reserved, len(groups))
      self._reserved -= reserved
      self._started += len(groups) - reserved
      self._fit_budget()

  def admit(self, group: types.TrajectoryGroup) -> None:
    """Takes the rewards of a begun group, and its samples into their slots.

    Advantages are those of the full group, of shaped rewards, before any sample
    is dropped. A sample without a usable reward is no member: it was neither
    right nor wrong. In this order a sample is

      dropped  for its failure (``verifier_timeout``, ``no_reward``, ...)
      expired  ``stale_on_arrival``, or ``older_than_ring`` when K slots are
               open and all are newer
      dropped  ``overlong``, where it was cut at the length limit and
               ``replay.drop_overlong`` is set
      dropped  ``dead_group``, ``empty`` (no masked-in token) or
               ``zero_advantage``

    or enters slot ``begun_by``. Tokens of the samples with advantage 0 count as
    dead tokens of the next step, and those of overlong ones not at all.

    Beyond ``trajectory_bytes`` the oldest slot's samples are dropped
    (``bytes``): those trained on already first, since they have taught
    something, then in order of arrival.

    Raises:
      ValueError: The group was not begun, or admitted before, or has another
        number of samples, or its id is no int.
    """
    with self._condition:
      self._raise_if_failed()
      samples = self._awaited(group.group_id)
      rewards, failures = ingestion.usable_rewards(group, samples)
      if self._shaping is not None:
        rewards += self._shaping(np.array([s.num_tokens for s in samples]))
      advantages, dead = advantages_lib.group_advantages(
        rewards[None],
        np.array([failure is None for failure in failures])[None],
        kind=self._advantage,
        tolerance=self._reward_tolerance,
      )
      del self._awaiting[group.group_id]
      for sample, reward, failure, advantage in zip(
        samples, rewards, failures, advantages[0], strict=True
      ):
        turned_away = self._turn_away(
          sample, failure, advantage, dead=bool(dead[0])
        )
        if turned_away is not None:
          counter, reason = turned_away
          counter[reason] += 1
          self._num_bytes -= sample.num_bytes
          continue
        trajectory = dataclasses.replace(
          sample.trajectory, reward=float(reward)
        )
        self._insert(_Record(sample, trajectory, advantage))
      self._fit_budget()
      if self._is_served() or not self._is_outstanding():
        self._condition.notify_all()

  # ----------------------------------------------------------------- consumer

  def measured(self, measure: Callable[[], Sequence[float]]) -> list[float]:
    """What the learner goes by and no step computes again: ``measure()``.

    A recording ring writes it down, and a replayed one takes it from there.
    """
    return list(measure())

  def take(
    self, count: int, timeout_s: float, *, waited_s: float = 0.0
  ) -> Pool:
    """Waits for ``count`` trainable trajectories; returns all there are.

    They stay in the ring until ``mark_trained``: taking changes nothing.

    Args:
      count: Trajectories needed.
      timeout_s: Seconds to wait at most.
      waited_s: Seconds that the caller waited before, for the diagnosis.

    Raises:
      Starved: They did not come in time.
      RingFailed: The ring was closed with an error.
      RingClosed: It was closed without, and holds fewer.
    """
    if count < 1:
      raise ValueError(f"count = {count} must be at least 1.")
    with self._condition:
      self._wanted.append(count)
      try:
        if self._held() < count:
          # A producer in reserve may go ahead now: see _is_starving.
          self._condition.notify_all()
        enough = self._wait_until(lambda: self._held() >= count, timeout_s)
      finally:
        self._wanted.remove(count)
      if enough:
        return self._pool()
      if self._closed:
        raise RingClosed(
          f"the ring was closed with {self._held()} trainable trajectories, "
          f"and {count} are needed."
        )
      raise Starved(
        starvation_report(
          self._config,
          self.accounting(),
          self.occupancy(),
          count=count,
          timeout_s=waited_s + timeout_s,
        )
      )

  def try_take(self, count: int) -> Pool | None:
    """``take`` without waiting: None when there are fewer than ``count``."""
    with self._condition:
      self._raise_if_failed()
      return self._pool() if self._held() >= count else None

  def mark_trained(self, entries: Sequence[Entry], pool: Pool) -> None:
    """Counts a use of each entry, which was trained on, and of the pool.

    An entry counts as trained from its first use, whatever has become of it
    since it was taken: one that expired or was dropped in the meantime moves
    over from that count. Used up, it leaves. The pool's dead tokens were the
    step's, and are not reported again.

    Raises:
      ValueError: An entry is not of this ring, is named twice, or was used
        ``max_uses`` times already. Nothing is counted then.
    """
    with self._condition:
      records = [entry._record for entry in entries]
      if len({id(record) for record in records}) != len(records):
        raise ValueError("an entry is marked as trained twice in one call.")
      for entry, record in zip(entries, records, strict=True):
        if record is None:
          raise ValueError(f"entry {entry.id} was not taken from a ring.")
        if record.uses >= self._config.max_uses:
          raise ValueError(
            f"entry {entry.id} was trained on replay.max_uses = "
            f"{self._config.max_uses} times already."
          )
      for record in records:
        if record.uses == 0:
          self._trained += 1
          if record.left is not None:
            counter, reason = record.left
            counter[reason] -= 1
        record.uses += 1
        self._trained_tokens += record.sample.num_tokens
        if record.uses == self._config.max_uses:
          self._remove(record)
      self._dead_tokens_trained = max(
        self._dead_tokens_trained, pool._dead_tokens_ever
      )

  # ------------------------------------------------------------- end and state

  def close(self, error: BaseException | None = None) -> None:
    """Ends all waiting, with ``error`` raised in everyone if there is one.

    The first error stays. Without one, ``reserve`` returns false, and ``take``
    returns what it can or raises ``RingClosed``; the rest goes on working, so
    that what is under way is still accounted for.
    """
    with self._condition:
      self._closed = True
      if self._error is None:
        self._error = error
      self._condition.notify_all()

  def check(self) -> None:
    """For those who wait elsewhere: raises what ``close`` was given, if so.

    Raises:
      RingFailed: The ring was closed with an error.
    """
    self._raise_if_failed()

  def is_at(self, version: int) -> bool:
    """Whether that is the newest version pushed."""
    return self._version == version

  def accounting(self) -> Accounting:
    """The accounts, all of one moment.

    What is in the ring and what awaits verification is counted where it lies
    and not derived, so ``check`` compares two independent figures.
    """
    with self._condition:
      expired, dropped = +self._expired, +self._dropped
      return Accounting(
        generated=self._generated,
        trained=self._trained,
        expired_unused=expired.total(),
        dropped_unused=dropped.total(),
        in_ring_unused=sum(map(_num_unused, self._slots.values())),
        awaiting_verification=sum(map(len, self._awaiting.values())),
        expired=dict(expired),
        dropped=dict(dropped),
      )

  def occupancy(self) -> Occupancy:
    """What the ring holds, all of one moment."""
    with self._condition:
      return Occupancy(
        slots=tuple(
          SlotOccupancy(
            version=version,
            age=self.version - version,
            trajectories=len(slot),
            unused=_num_unused(slot),
            num_bytes=sum(r.sample.num_bytes for r in slot.values()),
          )
          for version, slot in sorted(self._slots.items())
        ),
        trajectory_bytes=self._num_bytes,
        snapshots=tuple(sorted(self._snapshots)),
        snapshot_bytes=self._snapshot_bytes(),
        groups_started=self._started,
        groups_allowed=self._groups_allowed(),
        groups_reserved=self._reserved,
        groups_awaiting=len(self._awaiting),
        reserve_wait_s=self._reserve_wait_s,
        trained_tokens=self._trained_tokens,
        dead_tokens=self._dead_tokens_ever - self._dead_tokens_trained,
      )

  # ------------------------------------------------------- saved and restored

  def capture(self) -> saved.RingState:
    """Everything that the ring holds, all of one moment; nothing is copied."""
    with self._condition:
      return saved.RingState(
        snapshots=[self._snapshots[v] for v in sorted(self._snapshots)],
        samples=[
          saved.SavedSample(
            record.sample.id, record.trajectory, record.advantage, record.uses
          )
          for slot in self._slots.values()
          for record in slot.values()
        ],
        awaiting={
          group_id: [sample.trajectory for sample in samples]
          for group_id, samples in self._awaiting.items()
        },
        counts=dict(
          first_version=self._first_version,
          slots=list(self._slots),
          generated=self._generated,
          trained=self._trained,
          expired=dict(+self._expired),
          dropped=dict(+self._dropped),
          trained_tokens=self._trained_tokens,
          dead_tokens_ever=self._dead_tokens_ever,
          dead_tokens_trained=self._dead_tokens_trained,
          groups_begun=self._started - self._reserved,
          group_ids=self._group_ids.runs(),
        ),
      )

  def restore(self, state: saved.RingState, *, groups_in_flight: int) -> None:
    """Takes over what another ring held; this one is new.

    What this ring's bounds no longer allow leaves as it would have: used up,
    stale, evicted, or beyond the bytes.

    Args:
      state: Of that ring.
      groups_in_flight: Drawn and not begun then: they will be generated again,
        as reserved.

    Raises:
      ValueError: Samples are not sound, or their counts do not add up.
      RuntimeError: The ring was used before.
    """
    counts = state.counts
    entries = [(s.id, s.trajectory) for s in state.samples]
    waiting = [
      ((group_id, index), trajectory)
      for group_id, trajectories in state.awaiting.items()
      for index, trajectory in enumerate(trajectories)
    ]
    samples = ingestion.readmit(entries + waiting, truncated=self._truncated)
    snapshots = {
      snapshot.version: types.PolicySnapshot(
        snapshot.version, jax.tree.map(_owned, snapshot.params)
      )
      for snapshot in state.snapshots
    }
    with self._condition:
      if self._version is not None or self._generated:
        raise RuntimeError("a ring that was used cannot be restored.")
      self._snapshots = snapshots
      self._version = max(snapshots)
      self._first_version = counts["first_version"]
      self._generated, self._trained = counts["generated"], counts["trained"]
      self._expired.update(counts["expired"])
      self._dropped.update(counts["dropped"])
      self._trained_tokens = counts["trained_tokens"]
      self._dead_tokens_ever = counts["dead_tokens_ever"]
      self._dead_tokens_trained = counts["dead_tokens_trained"]
      self._started = counts["groups_begun"] + groups_in_flight
      self._reserved = groups_in_flight
      self._group_ids = _IdSet(counts["group_ids"])
      for sample in samples[len(entries) :]:
        self._awaiting.setdefault(sample.id[0], []).append(sample)
      self._num_bytes = sum(sample.num_bytes for sample in samples)
      self._slots = {version: {} for version in counts["slots"]}
      self._fill_slots(state.samples, samples)
      self._release_snapshots()
      self._fit_budget()
      self.accounting().check()

  # ------------------------------------- below: the caller holds the condition

  def _fill_slots(
    self,
    held: Sequence[saved.SavedSample],
    samples: Sequence[ingestion.Sample],
  ) -> None:
    """Puts restored samples into their slots, as far as the bounds allow."""
    for old, sample in zip(held, samples, strict=False):
      record = _Record(sample, sample.trajectory, old.advantage, old.uses)
      self._slots[sample.begun_by][sample.id] = record
      if record.uses >= self._config.max_uses:
        self._remove(record)
    for begun_by in [v for v in self._slots if self._is_stale(v)]:
      self._close_slot(begun_by, "stale")
    while len(self._slots) > self._config.num_snapshots:
      self._close_slot(min(self._slots), "evicted")

  def _raise_if_failed(self) -> None:
    if self._error is not None:
      raise RingFailed(
        f"the ring was closed by {type(self._error).__name__}: {self._error}"
      ) from self._error

  def _wait_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
    """Waits until ``ready``, closed or out of time; returns ``ready``."""
    deadline = time.monotonic() + timeout_s
    while True:
      self._raise_if_failed()
      if ready():
        return True
      remaining = deadline - time.monotonic()
      if self._closed or remaining <= 0:
        return False
      self._condition.wait(remaining)

  def _held(self) -> int:
    """Trajectories in the ring: all are trainable (see the module)."""
    return sum(map(len, self._slots.values()))

  def _is_stale(self, begun_by: int) -> bool:
    return self.version - begun_by > self._config.max_staleness

  def _groups_allowed(self) -> int:
    if self._version is None:
      return 0
    versions = self._version - self._first_version
    return (
      versions + self._config.max_staleness + 1
    ) * self._groups_per_version

  def _is_outstanding(self) -> bool:
    return self._reserved > 0 or bool(self._awaiting)

  def _is_served(self) -> bool:
    """Whether some waiting consumer can have what it waits for."""
    return bool(self._wanted) and self._held() >= min(self._wanted)

  def _is_starving(self) -> bool:
    """Whether a consumer waits for what nobody is about to bring."""
    return (
      self._version is not None
      and bool(self._wanted)
      and self._held() < max(self._wanted)
      and not self._is_outstanding()
    )

  def _check_new(
    self,
    groups: Sequence[types.TrajectoryGroup],
    samples: Sequence[ingestion.Sample],
  ) -> None:
    """What ``begin`` must check against the ring's state."""
    seen = set()
    for group in groups:
      if group.group_id in self._group_ids or group.group_id in seen:
        raise ValueError(f"group {group.group_id} was begun before.")
      seen.add(group.group_id)
    newest = -1 if self._version is None else self._version
    for sample in samples:
      if sample.newest_version > newest:
        raise ValueError(
          f"{sample.name} has tokens of version {sample.newest_version}, but "
          f"the newest version is {self._version}: their age is negative."
        )

  def _awaited(self, group_id: int) -> list[ingestion.Sample]:
    """What ``begin`` took in of a group."""
    ingestion.check_group_id(group_id)
    if group_id not in self._awaiting:
      known = group_id in self._group_ids
      raise ValueError(
        f"group {group_id} was "
        + ("admitted before." if known else "not begun.")
      )
    return self._awaiting[group_id]

  def _turn_away(
    self,
    sample: ingestion.Sample,
    failure: str | None,
    advantage: np.float32,
    *,
    dead: bool,
  ) -> tuple[collections.Counter, str] | None:
    """Why a verified sample does not enter the ring, if it does not."""
    if failure is not None:
      return self._dropped, failure
    if self._is_stale(sample.begun_by):
      return self._expired, "stale_on_arrival"
    full = len(self._slots) == self._config.num_snapshots
    if full and sample.begun_by < min(self._slots):
      return self._expired, "older_than_ring"
    if (
      self._config.drop_overlong
      and sample.trajectory.finish is types.Finish.LENGTH
    ):
      return self._dropped, "overlong"
    if dead or advantage == 0:
      self._dead_tokens_ever += sample.num_tokens
    if dead:
      return self._dropped, "dead_group"
    if sample.num_tokens == 0:
      return self._dropped, "empty"
    if advantage == 0:
      return self._dropped, "zero_advantage"
    return None

  def _insert(self, record: _Record) -> None:
    """Puts a record into its slot, opening it and closing the lowest."""
    begun_by = record.sample.begun_by
    if begun_by not in self._slots:
      if len(self._slots) == self._config.num_snapshots:
        self._close_slot(min(self._slots), "evicted")
        self._release_snapshots()
      self._slots[begun_by] = {}
    self._slots[begun_by][record.sample.id] = record

  def _close_slot(self, version: int, reason: str) -> None:
    for record in tuple(self._slots[version].values()):
      self._remove(record, (self._expired, reason))
    del self._slots[version]

  def _remove(
    self,
    record: _Record,
    fate: tuple[collections.Counter, str] | None = None,
  ) -> None:
    """Takes a record out of the ring, if it is there; unused, to its fate."""
    slot = self._slots.get(record.sample.begun_by, {})
    if slot.pop(record.sample.id, None) is None:
      return
    self._num_bytes -= record.sample.num_bytes
    if record.uses == 0 and fate is not None:
      counter, reason = fate
      counter[reason] += 1
      record.left = fate

  def _fit_budget(self) -> None:
    """Drops trajectories until ``trajectory_bytes`` holds: see ``admit``."""
    for version in sorted(self._slots):
      if self._num_bytes <= self._config.trajectory_bytes:
        return
      slot = self._slots[version]
      for record in sorted(slot.values(), key=lambda r: r.uses == 0):
        self._remove(record, (self._dropped, "bytes"))
        if self._num_bytes <= self._config.trajectory_bytes:
          return

  def _snapshot_bytes(self) -> int:
    held = [snapshot.params for snapshot in self._snapshots.values()]
    return sum(leaf.nbytes for leaf in jax.tree.leaves(held))

  def _release_snapshots(self) -> None:
    """Lets go of what ``push_snapshot`` says is not held."""
    for version in tuple(self._snapshots):
      if self._is_stale(version) and version not in self._slots:
        del self._snapshots[version]
    by_need = sorted(self._snapshots, key=lambda v: (v in self._slots, v))
    for version in by_need:
      if self._snapshot_bytes() <= self._config.snapshot_bytes:
        break
      if version != self._version:
        del self._snapshots[version]

  def _pool(self) -> Pool:
    records = [
      record for slot in self._slots.values() for record in slot.values()
    ]
    records.sort(key=lambda record: record.sample.id)
    version = self.version
    return Pool(
      tuple(
        Entry(
          record.sample.id,
          record.trajectory,
          record.advantage,
          record.uses,
          version - record.sample.begun_by,
          record,
        )
        for record in records
      ),
      version,
      self._dead_tokens_ever - self._dead_tokens_trained,
      self._dead_tokens_ever,
    )


def _owned(leaf: jax.Array | np.ndarray) -> np.ndarray:
  """A read-only array on the host that shares memory with nothing.

  One that is so already (as ``sharding.transfer.to_host`` leaves them) is kept:
  whoever made an array of its own read-only has given up changing it. A
  read-only view is copied, since what it looks at may change.
  """
  if (
    type(leaf) is np.ndarray and leaf.flags.owndata and not leaf.flags.writeable
  ):
    return leaf
  copy = np.array(leaf)
  copy.setflags(write=False)
  return copy


def _num_unused(slot: dict[ingestion.SampleId, _Record]) -> int:
  return sum(record.uses == 0 for record in slot.values())


class _IdSet:
  """A set of integers that costs memory by its gaps, not by its members."""

  def __init__(self, runs: Sequence[tuple[int, int]] = ()):
    """Holds what ``runs`` of another one held."""
    self._starts = [start for start, _ in runs]  # Of disjoint runs, ascending.
    self._ends = [end for _, end in runs]  # One past each run.

  def runs(self) -> list[tuple[int, int]]:
    """First member and one past the last of each run, ascending."""
    return list(zip(self._starts, self._ends, strict=True))

  def __contains__(self, member: int) -> bool:
    at = bisect.bisect_right(self._starts, member)
    return at > 0 and member < self._ends[at - 1]

  def add(self, member: int) -> None:
    if member in self:
      return
    at = bisect.bisect_right(self._starts, member)
    extends = at > 0 and self._ends[at - 1] == member
    precedes = at < len(self._starts) and self._starts[at] == member + 1
    if extends and precedes:
      del self._starts[at]
      self._ends[at - 1] = self._ends.pop(at)
    elif extends:
      self._ends[at - 1] = member + 1
    elif precedes:
      self._starts[at] = member
    else:
      self._starts.insert(at, member)
      self._ends.insert(at, member + 1)
