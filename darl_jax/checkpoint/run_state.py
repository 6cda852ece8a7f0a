"""Everything that a run goes on from, as files.

  learner/                  parameters and optimizer, by Orbax
  snapshot_00000012.safetensors   the ring's parameters of version 12
  arrays.safetensors        the ring's trajectories, what the engine remembers
  run.json                  the config, and every counter

Trajectories lie behind each other in one array per field; those in the ring
come first, those that await verification behind them.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from darl_jax.checkpoint import learner_state
from darl_jax.replay.saved import RingState, SavedSample
from darl_jax.rollout.actor import ActorState
from darl_jax.rollout.engine import EngineState, EngineStats
from darl_jax.types import (
  Finish,
  Params,
  PolicySnapshot,
  SupportMask,
  TrainState,
  Trajectory,
)

# Of the files' layout: another one cannot be read.
FORMAT = 1

_LEARNER = "learner"
_ARRAYS = "arrays.safetensors"
_JSON = "run.json"
_PER_TOKEN = (
  "tokens",
  "loss_mask",
  "behavior_logprobs",
  "behavior_entropy",
  "policy_version",
  "turn",
)
_FINISHES = tuple(Finish)
# Of what safetensors' own reader does not know, as it lies in the file.
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BFLOAT16_SUFFIX = ":bfloat16"


@dataclasses.dataclass(frozen=True, eq=False)
class RunState:
  """A run between two learner steps.

  Attributes:
    step: Learner steps taken.
    config: As ``config.to_dict`` has it.
    accuracy: Of the evaluation at this step, if there was one.
    learner: Arrays that nobody donates.
    ring: Snapshots, trajectories and accounts.
    actor: Prompts in flight, and where the next ones come from.
    meters: What is added up over the run, by name; plain JSON data.
  """

  step: int
  config: Mapping[str, Any]
  accuracy: float | None
  learner: TrainState
  ring: RingState
  actor: ActorState
  meters: Mapping[str, Any]


def write(folder: epath.Path, state: RunState) -> None:
  """Writes all files into a folder that exists, and waits for them.

  Raises:
    OSError: Not all could be written.
  """
  learner_state.save(folder / _LEARNER, state.learner)
  for snapshot in state.ring.snapshots:
    leaves = {
      jax.tree_util.keystr(path, simple=True, separator="."): leaf
      for path, leaf in jax.tree.leaves_with_path(snapshot.params)
    }
    _write_arrays(folder / _snapshot_file(snapshot.version), leaves)
  ring, actor = state.ring, state.actor
  waiting = [t for group in ring.awaiting.values() for t in group]
  trajectories = [sample.trajectory for sample in ring.samples] + waiting
  lengths = actor.engine.lengths
  arrays = {
    **_pack(trajectories),
    "sample_ids": np.array([s.id for s in ring.samples], np.int64),
    "advantages": np.array([s.advantage for s in ring.samples], np.float32),
    "uses": np.array([s.uses for s in ring.samples], np.int64),
    "response_prompts": np.frombuffer(b"".join(lengths), np.uint8),
    "response_prompt_bytes": np.array([len(key) for key in lengths], np.int64),
    "response_lengths": np.array([*lengths.values()], np.float64),
  }
  _write_arrays(folder / _ARRAYS, arrays)
  data = {
    "format": FORMAT,
    "step": state.step,
    "config": state.config,
    "accuracy": state.accuracy,
    "snapshots": [snapshot.version for snapshot in ring.snapshots],
    "awaiting": [[i, len(group)] for i, group in ring.awaiting.items()],
    "prompt_ids": [trajectory.prompt_id for trajectory in trajectories],
    "ring": ring.counts,
    "actor": {
      "drawn": actor.drawn,
      "in_flight": [[i, key] for i, key in actor.in_flight.items()],
      "prompts": actor.prompts,
      "engine": dataclasses.asdict(actor.engine.stats),
    },
    "meters": state.meters,
  }
  (folder / _JSON).write_text(json.dumps(data))


def read_header(folder: epath.Path) -> dict[str, Any]:
  """What a checkpoint says of itself; "config", "step", "accuracy" and more.

  Raises:
    OSError, ValueError: It cannot be read, or is of another format.
  """
  data = json.loads((folder / _JSON).read_text())
  if data["format"] != FORMAT:
    raise ValueError(
      f"format {data['format']}, and this program reads {FORMAT}"
    )
  return data


def read(
  folder: epath.Path, *, learner: TrainState, snapshot: Params
) -> RunState:
  """Reads what ``write`` wrote.

  Args:
    folder: Sealed, and whole.
    learner: ``jax.ShapeDtypeStruct`` with shardings: where the state goes,
      whatever mesh it came from.
    snapshot: A tree of a snapshot's structure.

  Raises:
    OSError, ValueError, KeyError: The files are not of this run's shapes.
  """
  data = read_header(folder)
  arrays = _read_arrays(folder / _ARRAYS)
  trajectories = _unpack(arrays, data["prompt_ids"])
  count = len(arrays["uses"])
  samples = [
    SavedSample((int(group), int(index)), trajectory, advantage, int(uses))
    for (group, index), trajectory, advantage, uses in zip(
      arrays["sample_ids"].reshape(-1, 2),
      trajectories,
      arrays["advantages"],
      arrays["uses"],
      strict=False,
    )
  ]
  awaiting, start = {}, count
  for group_id, size in data["awaiting"]:
    awaiting[group_id] = trajectories[start : start + size]
    start += size
  ring = RingState(
    snapshots=[
      PolicySnapshot(v, _read_params(folder / _snapshot_file(v), snapshot))
      for v in data["snapshots"]
    ],
    samples=samples,
    awaiting=awaiting,
    counts=data["ring"],
  )
  actor = data["actor"]
  return RunState(
    step=data["step"],
    config=data["config"],
    accuracy=data["accuracy"],
    learner=learner_state.restore(folder / _LEARNER, learner),
    ring=ring,
    actor=ActorState(
      drawn=actor["drawn"],
      in_flight=dict(actor["in_flight"]),
      prompts=actor["prompts"],
      engine=EngineState(
        EngineStats(**actor["engine"]), _response_lengths(arrays)
      ),
    ),
    meters=data["meters"],
  )


def learner_folder(folder: epath.Path) -> epath.Path:
  """Where a checkpoint has parameters and optimizer."""
  return folder / _LEARNER


def _snapshot_file(version: int) -> str:
  return f"snapshot_{version:08d}.safetensors"


def _read_params(path: epath.Path, like: Params) -> Params:
  arrays = _read_arrays(path)
  return jax.tree_util.tree_map_with_path(
    lambda key, _: arrays[
      jax.tree_util.keystr(key, simple=True, separator=".")
    ],
    like,
  )


def _response_lengths(arrays: Mapping[str, np.ndarray]) -> dict[bytes, float]:
  keys, ends = arrays["response_prompts"].tobytes(), 0
  lengths = {}
  for size, length in zip(
    arrays["response_prompt_bytes"].tolist(),
    arrays["response_lengths"].tolist(),
    strict=True,
  ):
    lengths[keys[ends : ends + size]] = length
    ends += size
  return lengths


def _pack(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
  """All fields but the prompts' ids, behind each other."""
  rewards = [trajectory.reward for trajectory in trajectories]
  packed = {
    "lengths": np.array([len(t.tokens) for t in trajectories], np.int64),
    "group_ids": np.array([t.group_id for t in trajectories], np.int64),
    "finishes": np.array(
      [_FINISHES.index(t.finish) for t in trajectories], np.uint8
    ),
    "is_rewarded": np.array([r is not None for r in rewards], bool),
    "rewards": np.array([r or 0.0 for r in rewards], np.float64),
  }
  if not trajectories:
    return packed
  for name in _PER_TOKEN:
    packed[name] = np.concatenate([getattr(t, name) for t in trajectories])
  if trajectories[0].support_mask is not None:
    support = SupportMask.concatenate([t.support_mask for t in trajectories])
    packed["support_data"] = support.data
    packed["support_columns"] = support.columns
    packed["support_offsets"] = support.offsets
    packed["support_width"] = np.array(support.width)
  return packed


def _unpack(
  arrays: Mapping[str, np.ndarray], prompt_ids: Sequence[str]
) -> list[Trajectory]:
  ends = np.cumsum(arrays["lengths"]).tolist()
  starts = [0, *ends[:-1]]
  return [
    Trajectory(
      prompt_id=prompt_ids[i],
      group_id=int(arrays["group_ids"][i]),
      **{name: arrays[name][start:end] for name in _PER_TOKEN},
      finish=_FINISHES[arrays["finishes"][i]],
      reward=float(arrays["rewards"][i]) if arrays["is_rewarded"][i] else None,
      support_mask=_support(arrays, start, end),
    )
    for i, (start, end) in enumerate(zip(starts, ends, strict=False))
  ]


def _support(
  arrays: Mapping[str, np.ndarray], start: int, end: int
) -> SupportMask | None:
  """Of the tokens from ``start`` to ``end``."""
  if "support_offsets" not in arrays:
    return None
  offsets = arrays["support_offsets"][start : end + 1]
  held = slice(offsets[0], offsets[-1])
  return SupportMask(
    data=arrays["support_data"][held],
    columns=arrays["support_columns"][held],
    offsets=offsets - offsets[0],
    width=int(arrays["support_width"]),
  )


def _write_arrays(path: epath.Path, arrays: Mapping[str, np.ndarray]) -> None:
  stored = {
    name + _BFLOAT16_SUFFIX * (array.dtype == _BFLOAT16): (
      array.view(np.uint16) if array.dtype == _BFLOAT16 else array
    )
    for name, array in arrays.items()
  }
  path.write_bytes(safetensors.numpy.save(stored))


def _read_arrays(path: epath.Path) -> dict[str, np.ndarray]:
  """Read-only arrays by name."""
  try:
    stored = safetensors.numpy.load(path.read_bytes())
  except safetensors.SafetensorError as error:
    raise ValueError(f"{path.name}: {error}") from error
  arrays = {}
  for name, array in stored.items():
    if name.endswith(_BFLOAT16_SUFFIX):
      array = array.view(_BFLOAT16)
    array.setflags(write=False)
    arrays[name.removesuffix(_BFLOAT16_SUFFIX)] = array
  return arrays
