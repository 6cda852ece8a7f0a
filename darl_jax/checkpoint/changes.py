"""Whether a run can go on under another config than it was saved with."""

import fnmatch
import json
from collections.abc import Mapping
from typing import Any

# What the saved state means depends on these: prompts are known by their
# numbers, arrays by their shapes, log-probs by the distribution they are of.
_FIXED = {
  "seed": "everything drawn so far depends on it",
  "prompts.*": "the prompts, or their tokens, would be others",
  "model.*": "the parameters, or what they compute, would be others",
  "rollout.prompts_per_batch": "batches of prompts are counted",
  "rollout.temperature": "recorded log-probs are of the tempered distribution",
  "rollout.top_k": "recorded log-probs are of the truncated distribution",
  "rollout.top_p": "recorded log-probs are of the truncated distribution",
  "rollout.min_p": "recorded log-probs are of the truncated distribution",
  "rollout.dtype": "the ring's snapshots have it",
}
# Among those, what changes nothing that was saved.
_FREE = ("model.remat",)
# To and from these values, since what they need is saved with them alone.
_SAVED_WITH = {
  ("objective.proximal", "ewma"): "it alone saves an average of policies",
  ("objective.kl_target", "reference"): (
    "it alone saves the policy that the run began with"
  ),
}
# Recorded trajectories must still fit.
_NOT_LESS = ("learner.row_tokens",)


def compare(
  saved: Mapping[str, Any], current: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
  """What differs between two configs.

  Args:
    saved: As ``config.to_dict`` had it when the run was saved.
    current: As it is now.

  Returns:
    Problems, for which the run cannot go on, in the words of ``ConfigError``;
    and notes of changes with which it can.
  """
  before, now = dict(_flat(saved)), dict(_flat(current))
  problems, notes = [], []
  for name in sorted(before.keys() | now.keys()):
    # A field that only one of both programs knows.
    if name not in before or name not in now:
      notes.append(
        f"{name} is new, and {now[name]!r}"
        if name in now
        else f"{name} = {before[name]!r} is no field any more"
      )
      continue
    old, new = before[name], now[name]
    if old == new:
      continue
    reason = _why_fixed(name)
    for value in (old, new):
      reason = _SAVED_WITH.get((name, str(value)), reason)
    if name in _NOT_LESS and new < old:
      reason = "saved trajectories may be as long"
    if reason is None:
      notes.append(f"{name} was {_shown(old)}, and is {_shown(new)}")
    else:
      problems.append(
        f"{name} = {_shown(new)}, but the run was saved with {_shown(old)}: "
        f"{reason}. Try {name}={_shown(old)}, or another workdir."
      )
  return problems, notes


def _why_fixed(name: str) -> str | None:
  if name in _FREE:
    return None
  for pattern, reason in _FIXED.items():
    if fnmatch.fnmatchcase(name, pattern):
      return reason
  return None


def _flat(config: Mapping[str, Any], prefix: str = ""):
  for name, value in config.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f"{prefix}{name}.")
    else:
      # Tuples and infinities as they come back from JSON.
      yield prefix + name, json.loads(json.dumps(value))


def _shown(value: Any) -> str:
  return repr(value)
