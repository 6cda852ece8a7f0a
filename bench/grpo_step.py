"""How long one whole GRPO step takes: generation and training.

  python bench/grpo_step.py --json [--rounds=7] [--peer=NAME:PYTHON ...]

Trains a random Qwen3-shaped model of 6.03 M parameters in float32: 4 prompts of
28 to 32 tokens, 4 responses to each of 128 tokens, one optimizer step. Prints
one JSON line: seconds of a warm step (the median), of the first one, which
compiles, and of everything from the start of the process to the end of the
first step; where a warm step spends its time; and the processor seconds of the
process in the steps, which other work on the machine disturbs less.

With ``--peer=trl:PYTHON`` or ``--peer=tunix:PYTHON``, where PYTHON is the
interpreter of an environment of theirs (``bench/peers/README.md``), the same
job is done by them, and ratios are given: above 1, ours is faster. All run in
processes of their own, one at a time: first each from its start to the end of
its first steps, then warm steps in turn.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np
from peers import client

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_OURS = "darl"
# After the first: caches of the libraries and of the allocator fill.
_WARM_UP_STEPS = 2
_SHAPE = dict(
  num_layers=4,
  embed_dim=256,
  mlp_dim=1024,
  num_heads=8,
  num_kv_heads=4,
  head_dim=32,
  vocab_size=4096,
)
_WORK = dict(
  prompts_per_step=4,
  samples_per_prompt=4,
  max_prompt_tokens=32,
  response_tokens=128,
  learning_rate=1e-6,
)
_TOKENS = (
  _WORK["prompts_per_step"]
  * _WORK["samples_per_prompt"]
  * _WORK["response_tokens"]
)


def job() -> dict:
  """As ``peers/grpo_protocol.py`` has it."""
  rng = np.random.default_rng(1)
  longest, vocab_size = _WORK["max_prompt_tokens"], _SHAPE["vocab_size"]
  # Token 0 pads.
  prompts = [
    rng.integers(1, vocab_size, size=length).tolist()
    for length in rng.integers(longest - 4, longest + 1, size=256)
  ]
  return dict(**_SHAPE, **_WORK, prompts=prompts)


class Trainer(client.Client):
  """A trainer in a process of its own; see ``peers/``.

  Attributes:
    first: Answer for the first step, from when all is constructed.
    warm: Answers for the warm steps.
    started_s: From the start of the process to the end of the first step.
  """

  def __init__(self, name: str, python: str, folder: str, timeout_s: float):
    """Starts the process, has it construct everything, and warms it up."""
    start = time.perf_counter()
    # What this process imports ours from.
    path = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    super().__init__(
      name,
      python,
      task="grpo",
      timeout_s=timeout_s,
      pythonpath=os.pathsep.join(path) if name == _OURS else None,
    )
    self.load(folder=folder, job=job())
    self.first = self._step()
    self.started_s = time.perf_counter() - start
    self.warm: list[dict] = []
    for _ in range(_WARM_UP_STEPS):
      self._step()

  def step(self) -> None:
    """A warm one."""
    self.warm.append(self._step())

  def _step(self) -> dict:
    answer = self.ask("step")
    if answer["tokens"] != _TOKENS:
      sys.exit(f"{self.name} sampled {answer['tokens']} tokens, not {_TOKENS}")
    return answer

  def report(self) -> dict:
    seconds = [step["seconds"] for step in self.warm]
    processor = [step["processor_seconds"] for step in self.warm]
    return dict(
      library=self.library,
      warm_s=_median(seconds),
      first_s=round(self.first["seconds"], 3),
      started_s=round(self.started_s, 3),
      warm_processor_s=_median(processor),
      first_processor_s=round(self.first["processor_seconds"], 3),
      steps=[round(each, 3) for each in seconds],
    )


def compare(ours: Trainer, peer: Trainer) -> dict:
  """A peer's times, and by how much ours are shorter."""
  pairs = zip(peer.warm, ours.warm, strict=True)
  return peer.report() | dict(
    warm_ratio=_median([p["seconds"] / o["seconds"] for p, o in pairs]),
    first_ratio=round(peer.first["seconds"] / ours.first["seconds"], 3),
    started_ratio=round(peer.started_s / ours.started_s, 3),
  )


def _median(values: list[float]) -> float:
  return round(statistics.median(values), 3)


def _parse() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument(
    "--json", action="store_true", help="On one line; else indented."
  )
  client.add_flags(parser, task="grpo")
  arguments = parser.parse_args()
  if arguments.rounds < 1:
    parser.error("--rounds must be at least 1")
  if _OURS in dict(arguments.peer):
    parser.error(f"--peer: {_OURS} is ours, and measured anyway")
  return arguments


def main() -> None:
  arguments = _parse()
  with contextlib.ExitStack() as stack:
    trainers = []
    for name, python in [(_OURS, sys.executable), *arguments.peer]:
      folder = stack.enter_context(tempfile.TemporaryDirectory())
      trainer = Trainer(name, python, folder, arguments.timeout_s)
      trainers.append(stack.enter_context(trainer))
    for number in range(arguments.rounds):
      # None always goes first.
      at = number % len(trainers)
      for trainer in trainers[at:] + trainers[:at]:
        trainer.step()
  ours, *peers = trainers
  result = ours.report() | dict(
    parts={
      name: _median([step["parts"][name] for step in ours.warm])
      for name in sorted(ours.warm[0]["parts"])
    },
    peers={peer.name: compare(ours, peer) for peer in peers},
  )
  print(json.dumps(result, indent=None if arguments.json else 2))


if __name__ == "__main__":
  main()
