"""How a peer answers the bench: JSON lines over its standard streams.

Each line that the bench writes is a request, and each gets one line. Those of
``bench/rollout.py``:

  {"do": "load", "model": DIR, "batches": [{"prompts": [[int]], "tokens": int}]}
  {"do": "logprobs", "tokens": [int]}
  {"do": "round", "seed": int}

The prompts of a batch are equally long. Loading compiles, and runs all batches
once; a round generates exactly ``tokens`` for each prompt of each batch. This
file and the peers run in environments of the peers' own, and import nothing of
the project.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class Channel:
  """The bench's requests, and the way back."""

  def __init__(self):
    """Takes the standard output: whatever a library prints is no answer."""
    self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

  def __iter__(self) -> Iterator[dict[str, Any]]:
    """Waits for each of them, until there are no more."""
    return map(json.loads, sys.stdin)

  def answer(self, **details) -> None:
    self._answers.write(json.dumps(details) + "\n")
    self._answers.flush()


class Sampler(Protocol):
  """A model of a peer's, loaded."""

  def logprobs(self, tokens: Sequence[int]) -> list[float]:
    """Of each token but the first."""

  def prepare(self, prompts: list[list[int]], tokens: int) -> Callable:
    """From a seed to sampled tokens [prompts, tokens] at temperature 1."""


def serve(name: str, load: Callable[[str], Sampler]) -> None:
  """Answers requests until there are no more.

  Args:
    name: Of the library, with its version.
    load: From a model's folder.
  """
  channel = Channel()
  sampler, runs = None, []
  for request in channel:
    if request["do"] == "load":
      sampler = load(request["model"])
      runs = [sampler.prepare(**batch) for batch in request["batches"]]
      _round(runs, seed=0)
      channel.answer(library=name)
    elif request["do"] == "logprobs":
      channel.answer(logprobs=sampler.logprobs(request["tokens"]))
    else:
      channel.answer(**_round(runs, seed=request["seed"]))


def _round(runs: Sequence[Callable], *, seed: int) -> dict:
  """Seconds of all batches, and the lengths of what each row got."""
  start = time.perf_counter()
  sampled = [run(seed + index) for index, run in enumerate(runs)]
  seconds = time.perf_counter() - start
  lengths = [[len(row) for row in batch] for batch in sampled]
  return {"seconds": seconds, "lengths": lengths}
