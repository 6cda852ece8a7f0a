"""Prompts from reasoning-gym's procedural datasets.

Item i + 1 of seed 1 is item i of seed 2 there, so another seed is no held-out
set.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import reasoning_gym
from reasoning_gym import factory

from darl_jax.config import ConfigError, PromptsConfig, RewardsConfig

# Their generators walk over sets of strings, so that items change with the
# seed of Python's string hash: a resumed run would not meet its prompts again.
_HASH_DEPENDENT = frozenset(
  {
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
  }
)

# Set elsewhere in the config, so refused among a dataset's own parameters.
_SET_ELSEWHERE = {"seed": "seed", "size": "prompts.num_items"}


def problems(fields: Any) -> list[str]:
  """What is wrong with ``prompts.dataset`` and ``prompts.params``.

  Args:
    fields: Anything with ``.prompts.dataset`` and ``.prompts.params``.

  Returns:
    Problems in the words of ``ConfigError``; none if an item can be drawn.
  """
  name = fields.prompts.dataset
  if name not in factory.DATASETS:
    return [
      f"prompts.dataset = {name!r} is not a reasoning-gym dataset. "
      f"Try {_nearest(name, factory.DATASETS)!r}."
    ]
  found = []
  if name in _HASH_DEPENDENT and not _strings_hash_alike():
    found.append(
      f"prompts.dataset = {name!r} draws other items in every process, since "
      "Python's string hash is random. Start the run with PYTHONHASHSEED=0."
    )
  params = fields.prompts.params
  known = {field.name for field in dataclasses.fields(_params_class(name))}
  known -= _SET_ELSEWHERE.keys()
  unknown = sorted(params.keys() - known)
  for key in unknown:
    advice = (
      f"Set {_SET_ELSEWHERE[key]} instead."
      if key in _SET_ELSEWHERE
      else f"Try {_nearest(key, known)!r}."
    )
    found.append(
      f"prompts.params: {key!r} is not a parameter of {name}. {advice}"
    )
  return found if unknown else found + _refusal(name, params)


def draw(
  config: PromptsConfig, *, seed: int
) -> list[tuple[str, dict[str, Any]]]:
  """The questions, and "answer": one right answer, or None without.

  Raises:
    ConfigError: If the dataset fails to generate an item.
  """
  dataset = reasoning_gym.create_dataset(
    config.dataset, seed=seed, size=config.num_items, **config.params
  )
  items = []
  with _quiet_and_seeded():
    for index in range(config.num_items):
      # list_functions draws from Python's global generator; the verifier
      # seeds it the same way before it draws this item again.
      random.seed(index)
      try:
        item = dataset[index]
      except Exception as error:  # Each generator fails in its own way.
        raise ConfigError(
          [
            f"prompts.params = {json.dumps(dict(config.params))!r}: "
            f"{config.dataset} fails to generate item {index}: "
            f"{type(error).__name__}: {error}. Try '{{}}', its defaults."
          ]
        ) from error
      answer = item["answer"]
      items.append(
        (
          item["question"],
          {"answer": answer if isinstance(answer, str) else None},
        )
      )
  return items


def verifier_task(
  config: PromptsConfig, *, seed: int, rewards: RewardsConfig
) -> dict[str, Any]:
  """Plain JSON data: the verifier that draws each item again."""
  del rewards
  return {
    "verifier": "darl_jax.rewards.reasoning_gym:ReasoningGymVerifier",
    "arguments": {
      "dataset": config.dataset,
      "params": dict(config.params),
      "seed": seed,
      "num_items": config.num_items,
    },
  }


def too_few(config: PromptsConfig, counts: str) -> str:
  """Says what to set where distinct questions are too few.

  Args:
    config: What they were drawn with.
    counts: How many there are.
  """
  return (
    f"prompts.num_items = {config.num_items} with prompts.heldout_fraction = "
    f"{config.heldout_fraction:g} is too few: {counts}. Try "
    "prompts.num_items=20000, or params that allow more distinct questions."
  )


@contextlib.contextmanager
def _quiet_and_seeded() -> Iterator[None]:
  """Some generators write progress dots, or use the global generator."""
  state = random.getstate()
  try:
    with contextlib.redirect_stdout(sys.stderr):
      yield
  finally:
    random.setstate(state)


def _params_class(name: str) -> type:
  return factory.DATASETS[name][1]


def _refusal(name: str, params: Mapping[str, Any]) -> list[str]:
  """Why the dataset does not work with these parameters, if it does not."""
  try:
    with _quiet_and_seeded():
      reasoning_gym.create_dataset(name, seed=0, size=2, **params)[0]
  except Exception as error:  # Each dataset refuses in its own way.
    reason = str(error) or type(error).__name__
    return [
      f"prompts.params = {json.dumps(dict(params))!r} are refused by {name}: "
      f"{reason}. Try '{{}}', its defaults."
    ]
  return []


def _strings_hash_alike() -> bool:
  """Whether every Python process like this one hashes strings alike."""
  return os.environ.get("PYTHONHASHSEED", "random") != "random"


def _nearest(name: str, options: Sequence[str]) -> str:
  return difflib.get_close_matches(name, sorted(options), n=1, cutoff=0.0)[0]
