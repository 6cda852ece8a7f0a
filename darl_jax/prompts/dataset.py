"""Prompts of a task, read through Grain.

They come from reasoning-gym's procedural datasets (``procedural.py``) or from a
file (``question_file.py``). Questions are merged where equal and split by a
hash of their text, which depends on neither the seed nor the number of items.
"""

import dataclasses
import hashlib
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any

import grain

from darl_jax.config import ConfigError, PromptsConfig, RewardsConfig
from darl_jax.prompts import procedural, question_file
from darl_jax.prompts.chat import ChatTokenizer
from darl_jax.prompts.tokenizer import TaskTokenizer, Tokenizer
from darl_jax.types import Prompt


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
    fields: Anything with those of ``.prompts``, and ``.prompts.num_items``.

  Returns:
    Problems in the words of ``ConfigError``; none if an item can be drawn.
  """
  return _source(fields.prompts.dataset).problems(fields)


def load(config: PromptsConfig, *, seed: int) -> TaskPrompts:
  """Draws up to ``config.num_items`` items and makes prompts of them.

  ``Prompt.id`` is a hash of the question's text, and ``Prompt.reference`` is
  {"id", "index", "answer"} and what else its verifier reads: "index" is the
  item's number among those drawn, which re-creates a procedural item, and
  "answer" is one right answer, or None where the dataset gives none.

  Raises:
    ConfigError: If no prompt to train on, or none held out, is left, or the
      tokenizer cannot be read or refuses its messages.
  """
  items: dict[str, tuple[str, dict[str, Any]]] = {}
  source = _source(config.dataset)
  drawn = source.draw(config, seed=seed)
  for index, (question, needed) in enumerate(drawn):
    key = hashlib.sha256(question.encode()).hexdigest()[:32]
    reference = {"id": key, "index": index} | needed
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
    num_duplicates=len(drawn) - len(items),
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
    counts = (
      f"{len(items)} distinct questions gave {len(prompts.train)} prompts to "
      f"train on and {len(prompts.heldout)} held out"
    )
    raise ConfigError(
      [
        f"prompts.max_tokens = {config.max_tokens} drops "
        f"{prompts.num_too_long} questions: {counts}. Try "
        f"prompts.max_tokens={longest}."
        if both
        else source.too_few(config, counts)
      ]
    )
  return prompts


def fingerprint(prompts: TaskPrompts) -> str:
  """Of every prompt, its tokens and its reference, in their order."""
  digest = hashlib.sha256()
  for prompt in (*prompts.train, *prompts.heldout):
    reference = json.dumps(prompt.reference, sort_keys=True)
    digest.update(f"{prompt.id} {reference} ".encode())
    digest.update(prompt.tokens.tobytes())
  return digest.hexdigest()


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


def verifier_task(
  config: PromptsConfig, *, seed: int, rewards: RewardsConfig
) -> dict[str, Any]:
  """Plain JSON data: the verifier of these prompts' answers, to construct.

  Args:
    config: What the prompts were loaded with.
    seed: Likewise.
    rewards: Limits of an answer, for a verifier that runs programs.
  """
  return _source(config.dataset).verifier_task(
    config, seed=seed, rewards=rewards
  )


def _source(name: str) -> types.ModuleType:
  """The module that reads the dataset of this name."""
  return question_file if question_file.is_file_name(name) else procedural


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


def _is_heldout(key: str, fraction: float) -> bool:
  return int(key[-16:], 16) < fraction * 2**64
