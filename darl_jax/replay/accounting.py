"""What the ring says of itself: accounts, occupancy, and why it starves.

Everything here is a value of one moment, or a pure function of such values;
the ring does the counting.
"""

import dataclasses
from collections.abc import Mapping

from darl_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Accounting:
  """Where every sample is, at one moment. All counts are of trajectories.

  Attributes:
    generated: Finished generation.
    trained: Trained on at least once, wherever they are now.
    expired_unused: Left untrained because they, or their slot, grew too old.
    dropped_unused: Left untrained for any other reason.
    in_ring_unused: In the ring, not trained on yet.
    awaiting_verification: Generated, without a reward yet.
    expired: ``expired_unused`` by reason.
    dropped: ``dropped_unused`` by reason.
  """

  generated: int
  trained: int
  expired_unused: int
  dropped_unused: int
  in_ring_unused: int
  awaiting_verification: int
  expired: Mapping[str, int]
  dropped: Mapping[str, int]

  def counts(self) -> dict[str, int]:
    """The counts without their reasons, by name."""
    return {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if field.name not in ("expired", "dropped")
    }

  def check(self) -> None:
    """Raises RuntimeError unless every generated sample is accounted for."""
    placed = (
      self.trained
      + self.expired_unused
      + self.dropped_unused
      + self.in_ring_unused
      + self.awaiting_verification
    )
    if placed != self.generated:
      raise RuntimeError(f"{placed} samples are accounted for: {self}")

  def __str__(self) -> str:
    def reasons(counts: Mapping[str, int]) -> str:
      parts = [f"{reason} {n}" for reason, n in sorted(counts.items())]
      return f" ({', '.join(parts)})" if parts else ""

    return (
      f"generated {self.generated} = trained {self.trained}"
      f" + expired {self.expired_unused}{reasons(self.expired)}"
      f" + dropped {self.dropped_unused}{reasons(self.dropped)}"
      f" + in the ring unused {self.in_ring_unused}"
      f" + awaiting verification {self.awaiting_verification}"
    )


@dataclasses.dataclass(frozen=True)
class SlotOccupancy:
  """One open slot.

  Attributes:
    version: The behavior policy that began its trajectories.
    age: Learner version minus ``version``.
    trajectories: Held, trained on before or not.
    unused: Held and not trained on yet.
    num_bytes: Of its trajectories' arrays.
  """

  version: int
  age: int
  trajectories: int
  unused: int
  num_bytes: int


@dataclasses.dataclass(frozen=True)
class Occupancy:
  """What the ring holds, and how it is paced, at one moment.

  Attributes:
    slots: Open slots, lowest version first.
    trajectory_bytes: Of all trajectories' arrays, awaiting ones included.
    snapshots: Versions whose parameters are held, lowest first.
    snapshot_bytes: Of those parameters.
    groups_started: Prompt groups reserved or begun so far.
    groups_allowed: Those that pacing allows at this version.
    groups_reserved: Reserved, not begun.
    groups_awaiting: Begun, not admitted.
    reserve_wait_s: Seconds that producers spent waiting, in total.
    trained_tokens: Masked-in tokens trained on, once per use.
    dead_tokens: Those of dead groups since the last trained step.
  """

  slots: tuple[SlotOccupancy, ...]
  trajectory_bytes: int
  snapshots: tuple[int, ...]
  snapshot_bytes: int
  groups_started: int
  groups_allowed: int
  groups_reserved: int
  groups_awaiting: int
  reserve_wait_s: float
  trained_tokens: int
  dead_tokens: int


def starvation_report(
  config: config_lib.ReplayConfig,
  accounts: Accounting,
  state: Occupancy,
  *,
  count: int,
  timeout_s: float,
) -> str:
  """Why the ring holds too little, and what to change.

  Args:
    config: The ring's sizes and bounds.
    accounts: Where every sample is.
    state: What the ring holds, at the same moment.
    count: Trajectories that were waited for.
    timeout_s: For how long.
  """
  if not state.snapshots:
    return (
      f"after {timeout_s:g} s no snapshot was pushed, so nothing could be "
      "sampled. Call push_snapshot before the first step."
    )
  slots = [
    f"  version {slot.version} (age {slot.age}): {slot.trajectories} "
    f"trajectories, {slot.unused} unused"
    for slot in state.slots
  ]
  held = sum(slot.trajectories for slot in state.slots)
  return "\n".join(
    [
      f"after {timeout_s:g} s the ring holds {held} trainable trajectories, "
      f"and {count} are needed.",
      f"Slots at version {state.snapshots[-1]}:",
      *(slots or ["  none is open"]),
      f"Groups: {state.groups_started} started of {state.groups_allowed} "
      f"allowed; {state.groups_reserved} reserved and not begun, "
      f"{state.groups_awaiting} awaiting verification.",
      f"Samples: {accounts}.",
      f"Try {_advice(config, accounts, state)}",
    ]
  )


def _advice(
  config: config_lib.ReplayConfig, accounts: Accounting, state: Occupancy
) -> str:
  """What to change, from where most of the samples went."""
  if accounts.generated == 0:
    return (
      f"replay.timeout_s above {config.timeout_s:g} if generation is still "
      "compiling; else look at the producer: it has delivered nothing."
    )
  groups_begun = state.groups_started - state.groups_reserved
  fates = {
    "reserved": state.groups_reserved * accounts.generated / groups_begun,
    "awaiting": accounts.awaiting_verification,
    **accounts.expired,
    **accounts.dropped,
  }
  fate = max(fates, key=lambda name: fates[name])
  if fates[fate] == 0:
    return (
      "a smaller replay.min_batch, or replay.max_uses above "
      f"{config.max_uses}: nothing was lost, there are just too few samples."
    )
  match fate:
    case "reserved":
      return (
        f"replay.timeout_s above {config.timeout_s:g}: generation of "
        f"{state.groups_reserved} groups is under way."
      )
    case "awaiting":
      return "more rewards.workers: most samples await verification."
    case "stale" | "stale_on_arrival":
      return (
        f"replay.max_staleness above {config.max_staleness}: most samples grew "
        "too old before they were used."
      )
    case "evicted" | "older_than_ring":
      return (
        f"replay.num_snapshots above {config.num_snapshots}: most samples' "
        "slots were evicted before they were used."
      )
    case "bytes":
      return f"replay.trajectory_bytes above {config.trajectory_bytes}."
    case "dead_group" | "zero_advantage":
      return (
        "a smaller replay.min_batch, more rollout.samples_per_prompt, or "
        "prompts of another difficulty: most groups have equal rewards."
      )
    case "overlong":
      return (
        "a greater rollout.max_response_tokens, or replay.drop_overlong=False: "
        "most responses were cut at the length limit."
      )
    case "empty":
      return "looking at the sampler: most responses have no token."
    case _:
      return f"looking at the verifier: most samples were dropped as {fate}."
