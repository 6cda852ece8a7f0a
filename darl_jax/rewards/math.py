"""Scores the final answers of mathematics: right or wrong.

``docs/rewards.md`` lists what counts as equal. Everything is read as text: no
part of an answer is ever evaluated as code.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

from darl_jax.rewards import math_answer, math_equality, math_text
from darl_jax.rewards.math_expression import UnreadableError

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MIN_CHARS = 400
# Without a box the answer stands at the end.
_TAIL_CHARS = 2000
_ANNOUNCED = re.compile(
  r"####|answer\s*(?:is|are|=|:)+\s*:?|answer\s*\*\*\s*:?", re.IGNORECASE
)
_MATH = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(
  r"[-+]?[$€£]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?(?:[eE][-+]?\d+)?\s*%?"
)


class MathVerifier:
  """Compares the final answer of a response with the reference."""

  def __init__(self, *, box: str):
    r"""Says where the final answer stands.

    Args:
      box: "required": in the last \boxed{...}, and nowhere else. "preferred":
        there if there is a box, else after "answer is" or "####", else the
        last formula or number.
    """
    if box not in ("required", "preferred"):
      raise ValueError(f"box = {box!r} is neither 'required' nor 'preferred'.")
    self._box_required = box == "required"

  def score(self, response: str, reference: Mapping[str, Any]) -> float:
    """1.0 if the final answer is the reference's, else 0.0.

    Args:
      response: Any text.
      reference: {"answer": the right answer as LaTeX or plain text, perhaps in
        a box}.
    """
    right = reference["answer"]
    boxed_right = last_box(right)
    right = right if boxed_right is None else boxed_right
    given = last_box(response)
    if given is None:
      if self._box_required:
        return 0.0
      given = final_statement(response)
    return float(is_equal(given, right))


def is_equal(answer: str, reference: str) -> bool:
  """Whether two final answers say the same."""
  # What is so much longer is no final answer, but could take long to read.
  if len(" ".join(answer.split())) > _MIN_CHARS + 10 * len(reference):
    return False
  try:
    wanted = math_answer.readings(reference)
    given = math_answer.readings(answer)
  except RecursionError:
    return False
  return any(
    _same(one, other) for one, other in itertools.product(given, wanted)
  )


def _same(answer: math_answer.Answer, reference: math_answer.Answer) -> bool:
  """What cannot be compared is not equal."""
  try:
    return math_equality.same(answer, reference)
  except (UnreadableError, RecursionError):
    return False


def last_box(text: str) -> str | None:
  r"""What is in the last \boxed{...}: None without, "" if it is not closed."""
  start = None
  for match in _BOX.finditer(text):
    start = match.end() - 1
  if start is None:
    return None
  # No answer is longer than what would be read of it.
  text = text[start : start + 2 * math_answer.MAX_CHARS]
  end = math_text.argument(text, 0)
  return "" if end is None else text[1 : end - 1]


def final_statement(text: str) -> str:
  """The answer of a text without a box."""
  tail = text[-_TAIL_CHARS:].strip()
  announced = None
  for match in _ANNOUNCED.finditer(tail):
    announced = match
  if announced:
    said = tail[announced.end() :].strip().partition("\n")[0]
    said = re.split(r"\.(?:\s|$)", said.replace("**", "").strip())[0]
    return _statement(said, first=True)
  return _statement(tail, first=False)


def _statement(text: str, *, first: bool) -> str:
  """The text if it is short, or its first or last formula or number."""
  if len(text.split()) <= 3 and "\n" not in text:
    return text
  for pattern in (_MATH, _NUMBER):
    found = list(pattern.finditer(text))
    if found:
      match = found[0] if first else found[-1]
      return next((group for group in match.groups() if group), match[0])
  return text
