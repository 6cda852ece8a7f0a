"""Scores answers with reasoning-gym's own scorers."""

import functools
import hashlib
import random
from collections.abc import Mapping
from typing import Any

import reasoning_gym

# Samples of one prompt arrive together, so a small memory is enough.
_REMEMBERED_ITEMS = 1024


class ReasoningGymVerifier:
  """Draws each prompt's item again and lets its dataset score the answer."""

  def __init__(
    self,
    *,
    dataset: str,
    params: Mapping[str, Any],
    seed: int,
    num_items: int,
  ):
    """Rebuilds the dataset that the prompts came from.

    Args:
      dataset: Its name.
      params: Its own parameters.
      seed: What the prompts were drawn with.
      num_items: Likewise; some generators depend on it.
    """
    self._dataset = reasoning_gym.create_dataset(
      dataset, seed=seed, size=num_items, **params
    )
    self._item = functools.lru_cache(_REMEMBERED_ITEMS)(self._draw)

  def score(self, response: str, reference: Mapping[str, Any]) -> float:
    """How right ``response`` is, from 0 to 1.

    Args:
      response: An answer, as text.
      reference: {"index": the item's number, "id": the first 32 hexadecimal
        digits of the sha256 of its question}; more keys are not read.

    Raises:
      ValueError: If the item drawn here asks another question. Scoring the
        answer against it would be worse than having no reward.
    """
    item, question_id = self._item(reference["index"])
    if question_id != reference["id"]:
      raise ValueError(
        f"item {reference['index']} asks another question here: the dataset "
        "is not reproducible, or not the one that the prompt came from"
      )
    return self._dataset.score_answer(answer=response, entry=item)

  def _draw(self, index: int) -> tuple[dict[str, Any], str]:
    random.seed(index)  # As when the prompts were drawn: see list_functions.
    item = self._dataset[index]
    return item, hashlib.sha256(item["question"].encode()).hexdigest()[:32]
