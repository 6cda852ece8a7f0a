"""Prompts from a JSON-lines file: one question a line.

  {"question": text, "answer": text}                                for math
  {"question": text, "tests": [{"stdin": text, "stdout": text}]}    for code

Other fields are not read. An answer as GSM8K publishes them, with the reasoning
before "####", is what follows the last "####".
"""

import difflib
import importlib.util
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import logging

from darl_jax.config import ConfigError, PromptsConfig, RewardsConfig

_BOXES = ("required", "preferred")
# For each verifier: its class, and a line of the file that it can use.
_VERIFIERS = {
  "math": (
    "darl_jax.rewards.math:MathVerifier",
    '{"question": "2 + 3 = ?", "answer": "5"}',
  ),
  "code": (
    "darl_jax.rewards.code:CodeVerifier",
    '{"question": "Add the two numbers.", "tests": [{"stdin": "2 3\\n", '
    '"stdout": "5\\n"}]}',
  ),
}
_WORKING_PARAMS = '{"verifier": "math", "box": "required"}'
_SHOWN_LINES = 3
# Of an answer's time, for running its program on all tests.
_PROGRAMS_SHARE = 0.8


def is_file_name(name: str) -> bool:
  """Whether ``prompts.dataset`` names a file."""
  return name.endswith(".jsonl")


def problems(fields: Any) -> list[str]:
  """What is wrong with ``prompts.dataset`` and ``prompts.params``.

  Args:
    fields: Anything with ``.prompts.dataset``, ``.params`` and ``.num_items``.

  Returns:
    Problems in the words of ``ConfigError``; none if every line can be used.
  """
  found = _params_problems(fields.prompts.params)
  if found:
    # What a line must have depends on the verifier.
    return found + _file_problems(fields.prompts.dataset)
  _, bad = _read(fields.prompts)
  return bad


def draw(
  config: PromptsConfig, *, seed: int
) -> list[tuple[str, dict[str, Any]]]:
  r"""The questions of the first ``num_items`` lines, in the file's order.

  Args:
    config: Names the file, and says how answers are verified.
    seed: Nothing here is random.

  Returns:
    Each question with what its verifier needs: {"answer": a right response, in
    a box where one is required}, or {"answer": None, "tests": [...]}.

  Raises:
    ConfigError: The file cannot be read, or has lines that cannot be used.
  """
  del seed
  items, bad = _read(config)
  if bad:
    raise ConfigError(bad)
  return items


def verifier_task(
  config: PromptsConfig, *, seed: int, rewards: RewardsConfig
) -> dict[str, Any]:
  """Plain JSON data: the verifier that ``prompts.params`` names."""
  del seed
  params = dict(config.params)
  kind = params.pop("verifier")
  if kind == "code":
    # A slow program then has a low score, where the worker's limit would leave
    # it without one.
    limit = _PROGRAMS_SHARE * rewards.time_limit_s
    params |= {
      "time_limit_s": limit,
      "answer_limit_s": limit,
      "memory_limit_mb": rewards.memory_limit_mb,
    }
  name, _ = _VERIFIERS[kind]
  return {"verifier": name, "arguments": params}


def too_few(config: PromptsConfig, counts: str) -> str:
  """Says what to set where distinct questions are too few.

  Args:
    config: What they were read with.
    counts: How many there are.
  """
  return (
    f"prompts.dataset = {config.dataset!r} with prompts.heldout_fraction = "
    f"{config.heldout_fraction:g} has too few questions: {counts}. Try "
    "prompts.heldout_fraction=0.5, or a file with more."
  )


def _params_problems(params: Mapping[str, Any]) -> list[str]:
  given = json.dumps(dict(params))
  verifier = params.get("verifier")
  if not isinstance(verifier, str) or verifier not in _VERIFIERS:
    what = (
      f"name verifier = {verifier!r}, which is neither 'math' nor 'code'"
      if "verifier" in params
      else "do not say how the answers of a file are verified"
    )
    return [f"prompts.params = {given!r} {what}. Try {_WORKING_PARAMS!r}."]
  known = {"math": ["verifier", "box"], "code": ["verifier"]}[verifier]
  found = []
  for key in sorted(params.keys() - set(known)):
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
    found.append(
      f"prompts.params: {key!r} is not a parameter of verifier {verifier!r}. "
      f"It takes {' and '.join(known)}. Try {near!r}."
    )
  if verifier == "math" and params.get("box") not in _BOXES:
    said = (
      f"box = {params['box']!r} is neither 'required' nor 'preferred'"
      if "box" in params
      else "do not say whether an answer without a box counts"
    )
    found.append(
      f"prompts.params = {given!r}: {said}. Try {_WORKING_PARAMS!r}."
    )
  if verifier == "math" and importlib.util.find_spec("math_verify") is None:
    found.append(
      "prompts.params: verifier 'math' needs a package that is not installed. "
      "Try pip install 'darl_jax[math]'."
    )
  return found


def _file_problems(name: str) -> list[str]:
  try:
    with open(name, "rb"):
      return []
  except OSError as error:
    return [
      f"prompts.dataset = {name!r} is no file that can be read: "
      f"{error.strerror}.{_other_files(name)}"
    ]
  except ValueError:
    return [
      f"prompts.dataset = {name!r} is no path. Try 'data/questions.jsonl'."
    ]


def _other_files(name: str) -> str:
  folder = pathlib.Path(name).parent
  if not folder.is_dir():
    return " Try a path from the folder that the run is started in."
  others = sorted(path.name for path in folder.glob("*.jsonl"))
  if not others:
    return f" Try another folder: there is no .jsonl file in {str(folder)!r}."
  near = difflib.get_close_matches(
    pathlib.Path(name).name, others, n=1, cutoff=0.0
  )[0]
  return f" Try {str(folder / near)!r}."


def _read(prompts: Any) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
  """What its lines say, and what is wrong with them or the file."""
  unreadable = _file_problems(prompts.dataset)
  if unreadable:
    return [], unreadable
  verifier = prompts.params["verifier"]
  read = {"math": _math_item, "code": _code_item}[verifier]
  items, bad, unread = [], [], 0
  for number, line in _lines(prompts.dataset):
    if len(items) + len(bad) == prompts.num_items:
      unread += 1
      continue
    try:
      items.append(_item(line, read, prompts.params))
    except ValueError as error:
      bad.append(f"line {number}: {error}")
  if unread:
    logging.warning(
      "prompts.num_items = %d leaves out the last %d lines of %s.",
      prompts.num_items,
      unread,
      prompts.dataset,
    )
  if bad:
    more = f"; and {len(bad) - _SHOWN_LINES} more"
    return items, [
      f"prompts.dataset = {prompts.dataset!r} has {len(bad)} bad lines of "
      f"{len(items) + len(bad)}: {'; '.join(bad[:_SHOWN_LINES])}"
      f"{more if len(bad) > _SHOWN_LINES else ''}. Each must be like "
      f"{_VERIFIERS[verifier][1]}."
    ]
  if not items:
    return [], [
      f"prompts.dataset = {prompts.dataset!r} has no lines. Each must be like "
      f"{_VERIFIERS[verifier][1]}."
    ]
  return items, []


def _lines(name: str) -> Iterator[tuple[int, bytes]]:
  """Lines that are not blank, with their number in the file."""
  with open(name, "rb") as file:
    for number, line in enumerate(file, start=1):
      if line.strip():
        yield number, line


def _item(
  line: bytes,
  read: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]],
  params: Mapping[str, Any],
) -> tuple[str, dict[str, Any]]:
  """A question and its reference.

  Raises:
    ValueError: Saying what is wrong with the line.
  """
  try:
    fields = json.loads(line.decode("utf-8-sig"))
  except UnicodeDecodeError as error:
    raise ValueError("is not UTF-8 text") from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f"is not JSON ({error})") from error
  if not isinstance(fields, dict):
    raise ValueError("is not a JSON object")
  return _text(fields, "question"), read(fields, params)


def _math_item(
  fields: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Any]:
  answer = fields.get("answer")
  if isinstance(answer, int) and not isinstance(answer, bool):
    answer = str(answer)
  answer = _text({"answer": answer}, "answer").rpartition("####")[2].strip()
  if not answer:
    raise ValueError('"answer" has nothing after ####')
  if params["box"] == "required" and r"\boxed" not in answer:
    answer = rf"\boxed{{{answer}}}"
  return {"answer": answer}


def _code_item(
  fields: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Any]:
  del params
  tests = fields.get("tests")
  if not isinstance(tests, list) or not tests:
    raise ValueError('"tests" is not a list with tests in it')
  for number, test in enumerate(tests):
    if not isinstance(test, dict) or not all(
      isinstance(test.get(name), str) for name in ("stdin", "stdout")
    ):
      raise ValueError(f'"tests"[{number}] has no "stdin" or "stdout" text')
  kept = [{name: test[name] for name in ("stdin", "stdout")} for test in tests]
  return {"answer": None, "tests": kept}


def _text(fields: Mapping[str, Any], name: str) -> str:
  text = fields.get(name)
  if text is None:
    raise ValueError(f'"{name}" is missing')
  if not isinstance(text, str) or not text.strip():
    raise ValueError(f'"{name}" is no text, or empty')
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(f'"{name}" has half a surrogate pair') from error
  return text
