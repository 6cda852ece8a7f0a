"""What the lab compares: methods, the grids they are tuned on, and tasks.

A method is what it changes of the lab's base config. Rivals come twice: as
published (each sample is used for one step), and with the ring: D-ARL's K, its
most uses of a sample and its filter of dead groups, with samples drawn at
random. Every tuned method has six settings to choose from, three learning rates
times two values of the knob that its paper names; without such a knob, six
learning rates. With the ring it has the settings that were chosen without.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from configs import darl
from darl_jax import config as config_lib

Changes = Mapping[str, Any]

# What a sample may be used, and how long beyond its arrival it is kept.
_MAX_USES = 4
_KEPT_STEPS = 8

_GROUPS, _SAMPLES = 16, 16


@dataclasses.dataclass(frozen=True)
class Task:
  """A reasoning-gym dataset that a nano policy learns within a run.

  Attributes:
    dataset: Its name.
    params: Its parameters.
    prompt_tokens: Of the longest prompt.
    response_tokens: Of the longest answer that is not cut.
    warm_start: Sampled accuracy at which supervised steps end.
    partial_credit: Of answers that are not right.
  """

  dataset: str
  params: Mapping[str, Any]
  prompt_tokens: int
  response_tokens: int
  warm_start: float
  partial_credit: float


TASKS = {
  "spell_backward": Task(
    dataset="spell_backward",
    params=dict(min_word_len=4, max_word_len=4),
    prompt_tokens=6,
    response_tokens=6,
    warm_start=0.03,
    partial_credit=0.5,
  ),
}


@dataclasses.dataclass(frozen=True)
class Method:
  """One line of the table.

  Attributes:
    name: Unique.
    changes: Of the base config, by the dotted names of fields.
    ring: Whether samples are kept and used again.
    grid: Settings to choose from by tuning; maybe none.
    settings_of: The method whose settings it has, if it is not tuned itself.
    synchronous: Compared at S = 0 only.
  """

  name: str
  changes: Changes
  ring: bool
  grid: tuple[Changes, ...] = ()
  settings_of: str = ""
  synchronous: bool = False

  @property
  def tuned_as(self) -> str:
    """The method whose tuning decides the settings."""
    return self.settings_of or self.name


def _grid(rates: tuple[float, ...], *knobs: Changes) -> tuple[Changes, ...]:
  return tuple(
    {"learner.learning_rate": rate, **knob}
    for rate, knob in itertools.product(rates, knobs or ({},))
  )


_RATES = (3e-4, 5e-4, 1e-3)
_SIX_RATES = (2e-4, 3e-4, 5e-4, 1e-3, 1.5e-3, 2e-3)
_INF = float("inf")

_CLIP_HIGH = ({"objective.clip_high": 0.28}, {"objective.clip_high": 0.5})
_RIVALS: dict[str, tuple[Changes, tuple[Changes, ...]]] = {
  "grpo": ({}, _grid(_RATES, *_CLIP_HIGH)),
  "decoupled_ppo": (
    {"objective.trust_region": "decoupled"},
    _grid(
      _RATES,
      {"objective.max_behavior_weight": 2.0},
      {"objective.max_behavior_weight": 5.0},
    ),
  ),
  "ewma_ppo": (
    {
      "objective.trust_region": "decoupled",
      "objective.proximal": "ewma",
      "objective.behavior_weight_mode": "band",
      "objective.max_behavior_weight": 5.0,
    },
    _grid(
      _RATES,
      {"objective.ewma_window": 8},
      {"objective.ewma_window": 64},
    ),
  ),
  "m2po": (
    {
      "objective.loss": "m2po",
      "objective.clip_low": 1.0,
      "objective.clip_high": _INF,
      "objective.dual_clip": _INF,
    },
    _grid(
      _RATES,
      {"objective.m2po_max_second_moment": 0.04},
      {"objective.m2po_max_second_moment": 0.2},
    ),
  ),
  "estr": (
    {"objective.loss": "estr", "objective.dual_clip": _INF},
    _grid(
      _RATES,
      {"objective.estr_threshold": 0.1},
      {"objective.estr_threshold": 0.5},
    ),
  ),
  # The published range is for answers of thousands of tokens: a mean over five
  # moves as much as 30 times further.
  "gspo": (
    {"objective.loss": "gspo"},
    _grid(
      _RATES,
      {"objective.gspo_clip_low": 0.03, "objective.gspo_clip_high": 0.04},
      {"objective.gspo_clip_low": 0.2, "objective.gspo_clip_high": 0.28},
    ),
  ),
  "cispo": (
    {"objective.loss": "cispo"},
    _grid((2e-4, 3e-4, 5e-4), *_CLIP_HIGH),
  ),
  "topr": ({"objective.loss": "topr"}, _grid(_SIX_RATES)),
}

_DARL = {
  "objective.behavior_weighting": "ess_token",
  "replay.selection_mode": "reject_worst",
  "replay.metric": "harmful",
  "replay.max_candidates": 512,
}
_DARL_GRID = _grid(
  (1e-3, 1.5e-3, 2e-3),
  {"replay.reject_fraction": 0.5, "replay.max_metric": 0.5},
  {"replay.reject_fraction": 0.0, "replay.max_metric": 0.2},
)
_DARL_CISPO = {**_DARL, "objective.loss": "cispo"}


def _control(name: str, **changes: Any) -> Method:
  return Method(
    name,
    {**_DARL_CISPO, **changes},
    ring=True,
    settings_of="darl",
  )


METHODS: dict[str, Method] = {
  method.name: method
  for method in (
    Method(
      "sync_grpo",
      {},
      ring=False,
      grid=_grid(_RATES, *_CLIP_HIGH),
      synchronous=True,
    ),
    *(
      Method(name, changes, ring=False, grid=grid)
      for name, (changes, grid) in _RIVALS.items()
    ),
    *(
      Method(f"{name}+ring", changes, ring=True, settings_of=name)
      for name, (changes, _) in _RIVALS.items()
    ),
    Method("darl", _DARL_CISPO, ring=True, grid=_DARL_GRID),
    Method("darl_clipped", _DARL, ring=True, grid=_DARL_GRID),
    _control("darl_random", **{"replay.selection_mode": "random"}),
    _control("darl_newest", **{"replay.selection_mode": "newest"}),
    _control("darl_pooled", **{"objective.behavior_weighting": "pooled"}),
  )
}


def make_config(
  task: Task, method: Method, settings: Changes, *, bound: int, steps: int
) -> config_lib.RunConfig:
  """The config of a run.

  Args:
    task: What is learned.
    method: How.
    settings: Of the method's grid.
    bound: S, the greatest age of a sample that arrives.
    steps: Learner steps.
  """
  config = _base(task, steps=steps)
  kept = _KEPT_STEPS if method.ring else 0
  config.replay.max_uses = _MAX_USES if method.ring else 1
  config.replay.max_staleness = bound + kept
  # Samples of every age that arrives have a slot.
  config.replay.num_snapshots = bound + kept + 1
  config.objective.max_versions = bound + kept + 1
  for name, value in {**method.changes, **settings}.items():
    section, field = name.split(".")
    config[section][field] = value
  config.learner.final_learning_rate = config.learner.learning_rate
  return config_lib.parse(config)


def _base(task: Task, *, steps: int) -> config_dict.ConfigDict:
  """What all methods have in common."""
  config = darl.get_config()
  samples = _GROUPS * _SAMPLES
  config.num_steps = steps
  config.prompts.update(
    dataset=task.dataset,
    params=json.dumps(task.params),
    max_tokens=task.prompt_tokens,
  )
  config.warm_start.target_accuracy = task.warm_start
  config.rewards.partial_credit = task.partial_credit
  config.rollout.update(
    prompts_per_batch=_GROUPS,
    samples_per_prompt=_SAMPLES,
    max_response_tokens=task.response_tokens,
    slots=samples,
    prefill_tokens=_GROUPS * 8,
  )
  config.replay.update(
    selection_mode="random",
    metric="second_moment",
    max_metric=_INF,
    reject_fraction=0.0,
    max_candidates=samples,
    min_batch=16,
  )
  config.objective.update(behavior_weighting="pooled")
  config.learner.update(
    schedule="constant",
    batch_size=samples,
    minibatches=2,
    rows=samples,
    row_tokens=task.prompt_tokens + task.response_tokens,
    score_rows=samples // 2,
  )
  config.evaluate.update(every=20, num_prompts=256)
  return config
