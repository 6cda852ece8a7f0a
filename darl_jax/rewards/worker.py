"""The process that scores answers: ``python -m darl_jax.rewards.worker``.

Reads JSON lines from stdin and writes JSON lines to stdout:

  in   {"task", "memory_limit_mb", "time_limit_s", "parent"}   once
  out  {"ready": true, "protections", "scratch"}               once
  in   [[response, reference], ...]
  out  [position, score, failure]                              one per answer

``failure`` is null, or says why there is no score. ``scratch`` is a folder to
remove after the process's end, or empty. Whatever the verifier writes to stdout
goes to stderr. The process ends when stdin does, and on Linux as soon as its
parent's thread does. Imports nothing heavy: it is started again after every
time-out.

On Linux there are up to three processes: one that is killed by its parent and
kills the others, one that scores, and one that Linux wants (see sandbox.py).
"""

import json
import os
import resource
import sys
import time
from typing import Any, TextIO

from darl_jax.rewards import sandbox
from darl_jax.rewards.verifier import Verifier, construct

_MAX_FAILURE_CHARS = 300


def main() -> None:
  parent = sandbox.supervise()
  requests, answers = _private_channel()
  hello = json.loads(requests.readline())
  if parent != hello["parent"]:
    sys.exit("The process that asked for this worker is gone.")
  _limit_memory(hello["memory_limit_mb"] * 2**20)
  verifier = construct(hello["task"])
  # Not earlier: an import may write a cache.
  protections, scratch = sandbox.confine()
  _send(
    answers,
    {
      "ready": True,
      "protections": protections._asdict(),
      "scratch": scratch,
    },
  )
  for line in requests:
    for position, (response, reference) in enumerate(json.loads(line)):
      _limit_cpu(hello["time_limit_s"])
      score, failure = _score(verifier, response, reference)
      _send(answers, [position, score, failure])


def _score(
  verifier: Verifier, response: str, reference: dict[str, Any]
) -> tuple[float | None, str | None]:
  """A score, or why there is none."""
  try:
    score = verifier.score(response, reference)
  except MemoryError:
    raise  # Who knows what is left: end, and be replaced.
  except Exception as error:
    failure = f"error: {type(error).__name__}: {error}"
    return None, failure[:_MAX_FAILURE_CHARS]
  try:
    return float(score), None
  except (TypeError, ValueError, OverflowError):
    return None, f"bad_score: {score!r}"[:_MAX_FAILURE_CHARS]


def _private_channel() -> tuple[TextIO, TextIO]:
  """Takes stdin and stdout away from the verifier, and returns them."""
  requests = open(os.dup(0), encoding="ascii")  # noqa: SIM115
  answers = open(os.dup(1), "w", encoding="ascii")  # noqa: SIM115
  nothing = os.open(os.devnull, os.O_RDONLY)
  os.dup2(nothing, 0)
  os.close(nothing)
  os.dup2(2, 1)
  sys.stdin = open(0)  # noqa: SIM115
  return requests, answers


def _send(answers: TextIO, message: Any) -> None:
  answers.write(json.dumps(message) + "\n")
  answers.flush()


def _limit_memory(limit: int) -> None:
  _, hard = resource.getrlimit(resource.RLIMIT_AS)
  if hard != resource.RLIM_INFINITY:
    limit = min(limit, hard)
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_cpu(seconds: float) -> None:
  """Bounds the next answer even if nobody is left to kill this process."""
  _, hard = resource.getrlimit(resource.RLIMIT_CPU)
  # Well above what the parent allows, as a second line of defence.
  limit = int(time.process_time() + 2 * seconds) + 2
  if hard != resource.RLIM_INFINITY:
    limit = min(limit, hard)
  resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


if __name__ == "__main__":
  main()
