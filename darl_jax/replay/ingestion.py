"""What the ring lets in: checked, copied, and judged.

A producer's arrays are checked and copied once, when its groups are finished
(``ingest``); what is checked is what will be trained on. Rewards come later,
and with them the reasons why a sample has none (``usable_rewards``). Nothing
here knows the ring's state, so none of it needs the ring's lock.
"""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from darl_jax import types

SampleId = tuple[int, int]  # (group_id, index in the group)

_DTYPES = {
  name: np.dtype(dtype)
  for name, dtype in (
    ("tokens", np.int32),
    ("loss_mask", np.bool_),
    ("behavior_logprobs", np.float32),
    ("behavior_entropy", np.float32),
    ("policy_version", np.int32),
    ("turn", np.int32),
  )
}
_SUPPORT_DTYPES = {
  "data": np.dtype(np.uint8),
  "columns": np.dtype(np.int32),
  "offsets": np.dtype(np.int64),
}
_LAST_VERSION = 2**31 - 1
# Greater rewards and what advantages are computed from them leave float32.
_MAX_REWARD = 1e18
_BYTES_PER_TOKEN = sum(dtype.itemsize for dtype in _DTYPES.values())


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Sample:
  """A checked trajectory whose arrays belong to the ring.

  Attributes:
    id: (group_id, index in the group).
    trajectory: Its arrays are read-only copies; its reward means nothing yet.
    begun_by: The version that began it.
    newest_version: Of its tokens.
    num_tokens: Masked-in ones: T_i.
    num_bytes: Of its arrays.
  """

  id: SampleId
  trajectory: types.Trajectory
  begun_by: int
  newest_version: int
  num_tokens: int
  num_bytes: int

  @property
  def name(self) -> str:
    """For messages."""
    return _name(self.id)


def ingest(
  groups: Sequence[types.TrajectoryGroup], *, truncated: bool
) -> list[Sample]:
  """The groups' samples, in order: checked, then copied.

  Args:
    groups: Finished, not verified.
    truncated: Whether the run's sampling truncates: every trajectory then has
      its support mask, and else none has.

  Raises:
    ValueError: Naming the group and what is wrong with it.
  """
  sample_ids, trajectories = [], []
  for group in groups:
    check_group_id(group.group_id)
    if not group.trajectories:
      raise ValueError(f"group {group.group_id} has no samples.")
    for index, trajectory in enumerate(group.trajectories):
      sample_id = (group.group_id, index)
      if not isinstance(trajectory, types.Trajectory):
        raise ValueError(
          f"{_name(sample_id)} is a {type(trajectory).__name__}, and must be a "
          "Trajectory."
        )
      owner = (trajectory.group_id, trajectory.prompt_id)
      if owner != (group.group_id, group.prompt.id):
        raise ValueError(
          f"{_name(sample_id)} of prompt {group.prompt.id} says that it "
          f"belongs to group {owner[0]} of prompt {owner[1]}."
        )
      sample_ids.append(sample_id)
      trajectories.append(_own(sample_id, trajectory, truncated=truncated))
  return _check_contents(sample_ids, trajectories) if sample_ids else []


def check_group_id(group_id: Any) -> None:
  """Raises ValueError unless it is an int.

  A float or a bool may be equal to one: True is group 1.
  """
  if type(group_id) is not int:
    raise ValueError(
      f"group {group_id!r}: its id is a {type(group_id).__name__}, and must be "
      "an int."
    )


def check_version(version: Any) -> None:
  """Raises ValueError unless it is one that int32 tokens' versions can be."""
  if type(version) is not int or not 0 <= version <= _LAST_VERSION:
    raise ValueError(
      f"snapshot {version!r}: its version must be an int from 0 to "
      f"{_LAST_VERSION}."
    )


def readmit(
  samples: Sequence[tuple[SampleId, types.Trajectory]], *, truncated: bool
) -> list[Sample]:
  """Samples that were let in before, and come back from a file.

  Args:
    samples: By id; they need not be whole groups.
    truncated: As ``ingest`` takes it.

  Raises:
    ValueError: Naming the group and what is wrong with it.
  """
  sample_ids = [sample_id for sample_id, _ in samples]
  trajectories = [
    _own(sample_id, trajectory, truncated=truncated)
    for sample_id, trajectory in samples
  ]
  return _check_contents(sample_ids, trajectories) if sample_ids else []


def usable_rewards(
  group: types.TrajectoryGroup, samples: Sequence[Sample]
) -> tuple[np.ndarray, list[str | None]]:
  """The rewards of a verified group, and why a sample has none.

  Args:
    group: Verified; only its rewards and failures are looked at.
    samples: What ``ingest`` made of it.

  Returns:
    Rewards float64 [G], 0 where there is no usable one; for each sample None,
    or the reason why its reward cannot be used.

  Raises:
    ValueError: The group has another number of samples, or of failures, or one
      that is no text, or a reward that is no number.
  """
  if len(group.trajectories) != len(samples):
    raise ValueError(
      f"group {group.group_id} was begun with {len(samples)} samples and has "
      f"{len(group.trajectories)} now."
    )
  failures = group.failures or (None,) * len(samples)
  if len(failures) != len(samples):
    raise ValueError(
      f"group {group.group_id} has {len(samples)} samples and "
      f"{len(failures)} entries in failures."
    )
  rewards = np.zeros(len(samples))
  reasons: list[str | None] = []
  for i, (sample, failure) in enumerate(zip(samples, failures, strict=True)):
    reward = group.trajectories[i].reward
    reason = None
    if sample.trajectory.finish is types.Finish.ABORTED:
      reason = "aborted"  # Cut off by the run: its reward means nothing.
    elif failure is not None:
      if not isinstance(failure, str):
        raise ValueError(
          f"{sample.name}: its failure is a {type(failure).__name__}, and must "
          "be text or None."
        )
      # "crash: exit code -9" is of kind crash: few kinds, many messages.
      reason = "verifier_" + failure.partition(":")[0].strip()
    elif reward is None:
      reason = "no_reward"
    elif not isinstance(reward, numbers.Real):
      raise ValueError(
        f"{sample.name}: its reward is a {type(reward).__name__}, and must be "
        "a number or None."
      )
    elif not abs(reward) < float("inf"):
      reason = "non_finite_reward"
    elif abs(reward) > _MAX_REWARD:
      reason = "reward_out_of_range"
    else:
      rewards[i] = reward
    reasons.append(reason)
  return rewards, reasons


def _name(sample_id: SampleId) -> str:
  return f"group {sample_id[0]}, sample {sample_id[1]}"


def _own(
  sample_id: SampleId, trajectory: types.Trajectory, *, truncated: bool
) -> types.Trajectory:
  """A trajectory of read-only copies, of right shape and dtype."""
  tokens = trajectory.tokens
  _check_dtype(sample_id, "tokens", tokens, _DTYPES["tokens"])
  shape = tokens.shape
  if len(shape) != 1 or shape[0] == 0:
    raise ValueError(
      f"{_name(sample_id)}: tokens have shape {shape}, and must be [T], T > 0."
    )
  if not isinstance(trajectory.finish, types.Finish):
    raise ValueError(
      f"{_name(sample_id)}: finish = {trajectory.finish!r} is no Finish."
    )
  copies = {}
  for name, dtype in _DTYPES.items():
    array = getattr(trajectory, name)
    _check_dtype(sample_id, name, array, dtype)
    if array.shape != shape:
      raise ValueError(
        f"{_name(sample_id)}: {name} has shape {array.shape}, but tokens have "
        f"{shape}. All arrays of a trajectory have one length."
      )
    copies[name] = _read_only(array)
  support = trajectory.support_mask
  if (support is not None) != truncated:
    raise ValueError(
      f"{_name(sample_id)}: the run's sampling "
      + (
        "truncates, and its support_mask is None."
        if truncated
        else "does not truncate, and it has a support_mask."
      )
    )
  if support is not None:
    copies["support_mask"] = _own_support(sample_id, support, shape[0])
  return dataclasses.replace(trajectory, **copies)


def _check_dtype(
  sample_id: SampleId, name: str, array: Any, dtype: np.dtype
) -> None:
  if type(array) is not np.ndarray or array.dtype != dtype:
    found = getattr(array, "dtype", "values")
    raise ValueError(
      f"{_name(sample_id)}: {name} is a {type(array).__name__} of {found}, "
      f"and must be a numpy array of {dtype}."
    )


def _own_support(
  sample_id: SampleId, support: types.SupportMask, length: int
) -> types.SupportMask:
  """Read-only, of this many positions, and sound."""
  if (
    not isinstance(support, types.SupportMask) or type(support.width) is not int
  ):
    raise ValueError(
      f"{_name(sample_id)}: support_mask must be a SupportMask, and its width "
      "an int."
    )
  copies = {}
  for name, dtype in _SUPPORT_DTYPES.items():
    array = getattr(support, name)
    if type(array) is not np.ndarray or array.dtype != dtype or array.ndim != 1:
      raise ValueError(
        f"{_name(sample_id)}: support_mask.{name} must be a row of {dtype}."
      )
    copies[name] = _read_only(array)
  counts, columns = np.diff(support.offsets), support.columns
  if len(support.offsets) != length + 1:
    raise ValueError(
      f"{_name(sample_id)}: support_mask has {len(support.offsets) - 1} "
      f"positions, but tokens {length}."
    )
  if (
    support.offsets[0] != 0
    or np.any(counts < 0)
    # Differences of what is further apart than 64 bits are small.
    or np.any((support.offsets < 0) | (support.offsets > len(columns)))
    or not support.offsets[-1] == len(columns) == len(support.data)
    or np.any((columns < 0) | (columns >= support.width))
    or np.any(np.diff(support.rows * support.width + columns) <= 0)
  ):
    raise ValueError(
      f"{_name(sample_id)}: support_mask is no rows of ascending columns below "
      f"its width {support.width}."
    )
  return dataclasses.replace(support, **copies)


def _read_only(array: np.ndarray) -> np.ndarray:
  """A copy."""
  copy = array.copy()
  copy.setflags(write=False)
  return copy


def _check_contents(
  sample_ids: Sequence[SampleId], trajectories: Sequence[types.Trajectory]
) -> list[Sample]:
  """Checks the arrays' values and notes versions and counts of tokens.

  Over all tokens of the call at once: a loop over trajectories would cost more
  than everything else that the ring does.
  """
  lengths = np.array([t.tokens.size for t in trajectories])
  starts = np.cumsum(lengths) - lengths
  owner = np.repeat(np.arange(len(trajectories)), lengths)
  loss_mask = np.concatenate([t.loss_mask for t in trajectories])
  logprobs = np.concatenate([t.behavior_logprobs for t in trajectories])
  entropy = np.concatenate([t.behavior_entropy for t in trajectories])
  versions = np.concatenate([t.policy_version for t in trajectories])
  sampled = np.flatnonzero(loss_mask)
  sampled_by, sampled_owner = versions[sampled], owner[sampled]
  # The version of the sampled token before; of the first, who began the sample.
  previous = np.concatenate([sampled_by[:1], sampled_by[:-1]])
  first = np.diff(sampled_owner, prepend=-1) != 0
  begun_by = versions[starts]
  previous = np.where(first, begun_by[sampled_owner], previous)
  undefined = ~(np.isfinite(logprobs) & np.isfinite(entropy))[sampled]
  num_bytes = lengths * _BYTES_PER_TOKEN
  tokens = np.concatenate([t.tokens for t in trajectories])
  outside = np.zeros(len(owner), bool)
  if trajectories[0].support_mask is not None:
    masks = [t.support_mask for t in trajectories]
    for sample_id, mask in zip(sample_ids, masks, strict=True):
      if mask.width != masks[0].width:
        raise ValueError(
          f"{_name(sample_id)}: support_mask has width {mask.width}, and "
          f"{_name(sample_ids[0])} {masks[0].width}."
        )
    num_bytes += [mask.num_bytes for mask in masks]
    outside = ~types.SupportMask.concatenate(masks).has(tokens)

  for owners, reason in (
    (np.flatnonzero(loss_mask[starts]), "loss_mask[0] must be false"),
    (owner[tokens < 0], "tokens must not be negative"),
    (owner[versions < 0], "policy_version must not be negative"),
    (
      sampled_owner[sampled_by < previous],
      "policy_version must not fall along the response",
    ),
    (
      sampled_owner[undefined],
      "behavior_logprobs and behavior_entropy must be finite on sampled tokens",
    ),
    (
      owner[loss_mask & outside],
      "a sampled token is not in its own support",
    ),
  ):
    if owners.size:
      raise ValueError(f"{_name(sample_ids[owners[0]])}: {reason}.")

  return [
    Sample(*facts)
    for facts in zip(
      sample_ids,
      trajectories,
      begun_by.tolist(),
      np.maximum.reduceat(versions, starts).tolist(),
      np.add.reduceat(loss_mask, starts, dtype=np.int64).tolist(),
      num_bytes.tolist(),
      strict=True,
    )
  ]
