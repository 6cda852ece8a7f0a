"""What scores an answer, and how a task names it."""

import importlib
from collections.abc import Mapping
from typing import Any, Protocol


class Verifier(Protocol):
  """Scores answers. It runs in a worker process, one answer at a time.

  It may be slow, hang, crash or raise: the worker is killed and replaced, and
  the answer counts as neither right nor wrong.
  """

  def score(self, response: str, reference: Mapping[str, Any]) -> float:
    """How right ``response`` is, from 0 to 1.

    Args:
      response: The sampled text; hostile input.
      reference: The prompt's ``reference``, as it came through JSON.
    """


def parse_task(task: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
  """Module, class and arguments of the verifier that ``task`` names.

  Args:
    task: Plain JSON data, {"verifier": "module:Class", "arguments": {...}}.

  Raises:
    ValueError: If it reads otherwise.
  """
  name = task.get("verifier")
  arguments = task.get("arguments", {})
  module, colon, cls = (
    name.partition(":") if isinstance(name, str) else [""] * 3
  )
  if not (module and colon and cls) or not isinstance(arguments, Mapping):
    raise ValueError(
      f"{dict(task)!r} names no verifier. Try {{'verifier': 'module:Class', "
      "'arguments': {}}."
    )
  return module, cls, dict(arguments)


def construct(task: Mapping[str, Any]) -> Verifier:
  """Imports and constructs the verifier that ``task`` names."""
  module, cls, arguments = parse_task(task)
  return getattr(importlib.import_module(module), cls)(**arguments)
