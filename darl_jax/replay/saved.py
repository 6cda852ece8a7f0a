"""What a ring holds at one moment, so that another can go on from there."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from darl_jax import types
from darl_jax.replay.ingestion import SampleId


@dataclasses.dataclass(frozen=True, eq=False)
class SavedSample:
  """A sample in the ring.

  Attributes:
    id: (group_id, index in the group).
    trajectory: With its reward.
    advantage: float32, from the full group.
    uses: Times trained on.
  """

  id: SampleId
  trajectory: types.Trajectory
  advantage: np.float32
  uses: int


@dataclasses.dataclass(frozen=True, eq=False)
class RingState:
  """Everything in a ring. Its arrays are the ring's own, and read-only.

  Attributes:
    snapshots: Those held; the last one is the newest version.
    samples: In the order in which they entered, slot by slot.
    awaiting: By group, the samples that were begun and not admitted.
    counts: All counters, as plain JSON data.
  """

  snapshots: Sequence[types.PolicySnapshot]
  samples: Sequence[SavedSample]
  awaiting: Mapping[int, Sequence[types.Trajectory]]
  counts: Mapping[str, Any]
