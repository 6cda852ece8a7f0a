"""Prompts from reasoning-gym's procedural datasets, read through Grain.

Item i + 1 of seed 1 is item i of seed 2 there, so another seed is no held-out
set. Questions are merged where equal and split by a hash of their text, which
depends on neither the seed nor the number of items.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import reasoning_gym
from reasoning_gym import factory

from darl_jax.config import ConfigError, PromptsConfig
from darl_jax.prompts.chat import ChatTokenizer
from darl_jax.prompts.tokenizer import TaskTokenizer, Tokenizer
from darl_jax.types import Prompt

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


@dataclasses.dataclass(frozen=True)
class TaskPrompts:
  """A task's prompts, split for good.

  Attributes:
    tokenizer: A published model's, or learned from the training questions and
      their answers.
    train: Prompts to learn from.
    heldout: Prompts never trained on; no question is in both.
    num_duplicates: Items whose question an earlier item asked already.
    num_too_long: Distinct questions dropped for their length in tokens.
    longest_response: Tokens of the longest reference answer, stop token
      included; 0 if the dataset gives no reference answers.
  """

  tokenizer: TaskTokenizer
  train: tuple[Prompt, ...]
  heldout: tuple[Prompt, ...]
  num_duplicates: int
  num_too_long: int
  longest_response: int


def check_config(fields: Any) -> list[str]:
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
  problems = []
  if name in _HASH_DEPENDENT and not _strings_hash_alike():
    problems.append(
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
    problems.append(
      f"prompts.params: {key!r} is not a parameter of {name}. {advice}"
    )
  return problems if unknown else problems + _refusal(name, params)


def load(config: PromptsConfig, *, seed: int) -> TaskPrompts:
  """Draws ``config.num_items`` items and makes prompts of them.

  ``Prompt.id`` is a hash of the question's text, and ``Prompt.reference`` is
  {"id", "index", "answer"}: the item's number re-creates the whole item, and
  "answer" is one right answer, or None where the dataset gives none.

  Raises:
    ConfigError: If no prompt to train on, or none held out, is left, or the
      tokenizer cannot be read or refuses its messages.
  """
  items: dict[str, tuple[str, dict[str, Any]]] = {}
  for index, item in enumerate(_draw(config, seed=seed)):
    question, answer = item["question"], item["answer"]
    key = hashlib.sha256(question.encode()).hexdigest()[:32]
    reference = {
      "id": key,
      "index": index,
      "answer": answer if isinstance(answer, str) else None,
    }
    items.setdefault(key, (question, reference))
  train = {
    key: item
    for key, item in items.items()
    if not _is_heldout(key, config.heldout_fraction)
  }
  tokenizer = _tokenizer(config, list(train.values()))
  encoded = {
    key: Prompt(
      key, tokenizer.encode_prompt(_instructed(config, question)), reference
    )
    for key, (question, reference) in items.items()
  }
  kept = [
    prompt
    for prompt in encoded.values()
    if len(prompt.tokens) <= config.max_tokens
  ]
  prompts = TaskPrompts(
    tokenizer=tokenizer,
    train=tuple(prompt for prompt in kept if prompt.id in train),
    heldout=tuple(prompt for prompt in kept if prompt.id not in train),
    num_duplicates=config.num_items - len(items),
    num_too_long=len(items) - len(kept),
    longest_response=max(
      (
        len(tokenizer.encode_response(prompt.reference["answer"]))
        for prompt in kept
        if prompt.reference["answer"] is not None
      ),
      default=0,
    ),
  )
  if not prompts.train or not prompts.heldout:
    longest = max(len(prompt.tokens) for prompt in encoded.values())
    both = 0 < len(train) < len(items)
    raise ConfigError([_too_few(config, prompts, longest if both else None)])
  return prompts


def batches(
  prompts: Sequence[Prompt], *, batch_size: int, seed: int
) -> grain.DatasetIterator:
  """Endless batches of prompts, in another order each epoch.

  Args:
    prompts: What to draw from. No batch holds a prompt twice, unless an epoch
      ends inside it.
    batch_size: Prompts per batch.
    seed: The order depends on it alone.

  Returns:
    An iterator of ``list[Prompt]`` whose ``get_state`` (plain JSON data) and
    ``set_state`` continue exactly where it stood.

  Raises:
    ConfigError: If there are fewer prompts than one batch takes.
  """
  if batch_size > len(prompts):
    raise ConfigError(
      [
        f"rollout.prompts_per_batch = {batch_size} is more than the "
        f"{len(prompts)} distinct prompts to train on. Try "
        f"rollout.prompts_per_batch={max(len(prompts), 1)}, or a larger "
        "prompts.num_items."
      ]
    )
  # Endless for any run; grain's own endless length overflows in batches of 1.
  epochs = 2**40 // len(prompts)
  order = grain.MapDataset.source(list(prompts)).seed(seed).shuffle()
  order = order.repeat(epochs)
  # No threads: a batch is a list of prompts that are in memory already.
  options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
  return iter(order.batch(batch_size, batch_fn=list).to_iter_dataset(options))


def verifier_task(config: PromptsConfig, *, seed: int) -> dict[str, Any]:
  """Plain JSON data: the verifier of these prompts' answers, to construct."""
  return {
    "verifier": "darl_jax.rewards.reasoning_gym:ReasoningGymVerifier",
    "arguments": {
      "dataset": config.dataset,
      "params": dict(config.params),
      "seed": seed,
      "num_items": config.num_items,
    },
  }


def _draw(config: PromptsConfig, *, seed: int) -> list[dict[str, Any]]:
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
        items.append(dataset[index])
      except Exception as error:  # Each generator fails in its own way.
        raise ConfigError(
          [
            f"prompts.params = {json.dumps(dict(config.params))!r}: "
            f"{config.dataset} fails to generate item {index}: "
            f"{type(error).__name__}: {error}. Try '{{}}', its defaults."
          ]
        ) from error
  return items


def _tokenizer(
  config: PromptsConfig, train: Sequence[tuple[str, Mapping[str, Any]]]
) -> TaskTokenizer:
  """A published model's, or one trained on these questions and references."""
  if config.tokenizer:
    return ChatTokenizer.load(config.tokenizer, system=config.system)
  return Tokenizer.train(
    [_instructed(config, question) for question, _ in train],
    answers=[
      reference["answer"]
      for _, reference in train
      if reference["answer"] is not None
    ],
    vocab_size=config.vocab_size,
  )


def _instructed(config: PromptsConfig, question: str) -> str:
  # Not str.format: braces elsewhere, as of JSON or a set, are the text's own.
  return config.instruction.replace("{question}", question)


@contextlib.contextmanager
def _quiet_and_seeded() -> Iterator[None]:
  """Some generators write progress dots, or use the global generator."""
  state = random.getstate()
  try:
    with contextlib.redirect_stdout(sys.stderr):
      yield
  finally:
    random.setstate(state)


def _is_heldout(key: str, fraction: float) -> bool:
  return int(key[-16:], 16) < fraction * 2**64


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


def _too_few(
  config: PromptsConfig, prompts: TaskPrompts, longest: int | None
) -> str:
  """Says which field left no prompts, and what to set it to.

  Args:
    longest: Tokens of the longest prompt, if there would be enough of them
      without a bound on their length.
  """
  counts = (
    f"{config.num_items - prompts.num_duplicates} distinct questions gave "
    f"{len(prompts.train)} prompts to train on and {len(prompts.heldout)} held "
    "out"
  )
  if longest is not None:
    return (
      f"prompts.max_tokens = {config.max_tokens} drops {prompts.num_too_long} "
      f"questions: {counts}. Try prompts.max_tokens={longest}."
    )
  return (
    f"prompts.num_items = {config.num_items} with prompts.heldout_fraction = "
    f"{config.heldout_fraction:g} is too few: {counts}. Try "
    "prompts.num_items=20000, or params that allow more distinct questions."
  )
