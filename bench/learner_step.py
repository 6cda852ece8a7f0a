"""How long the learner's programs take on the nano policy, on this machine.

  python bench/learner_step.py [--against=DIR] [--rounds=5] [--calls=20]

Prints one JSON line: the least and the median milliseconds of a learner step
and of a dispatch of the scoring pass, at the shapes of ``configs/darl.py``.
With another checkout of this project, both are measured in turn, each in
processes of their own, and ratios of the medians are given too: below 1, this
one is faster.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ("step", "score")


def measure(calls: int) -> dict[str, list[float]]:
  """Milliseconds of each call, of the checkout that is first on the path."""
  import jax
  import numpy as np

  from configs import darl
  from darl_jax import config as config_lib
  from darl_jax.loop import Run
  from darl_jax.sharding import meshes
  from darl_jax.types import Batch, ScoreBatch

  config = config_lib.parse(darl.get_config())
  meshes.prepare_cpu(2)
  shape = (1, 1, config.learner.rows, config.learner.row_tokens)
  rng = np.random.default_rng(0)
  # Packed as in a run: four trajectories of 12 tokens, 4 of them sampled.
  position = np.broadcast_to(np.arange(shape[-1]) % 12, shape)
  logprobs = -rng.exponential(size=shape).astype(np.float32)
  fields = dict(
    tokens=rng.integers(280, size=shape, dtype=np.int32),
    positions=position.astype(np.int32),
    segment_ids=np.broadcast_to(np.arange(48) // 12 + 1, shape).astype("int32"),
    loss_mask=position >= 8,
    behavior_logprobs=logprobs,
    advantages=rng.normal(size=shape).astype(np.float32),
  )
  batch = Batch(
    **fields,
    proximal_logprobs=logprobs,
    behavior_index=rng.integers(4, size=shape, dtype=np.int32),
    token_weights=np.full(shape, 1e-3, np.float32),
    clip_low=np.full(8, 0.2, np.float32),
    clip_high=np.full(8, 0.28, np.float32),
    versions=np.arange(8, dtype=np.int32),
  )
  rows = config.learner.score_rows
  pool = ScoreBatch(
    **{name: values[0, 0, :rows] for name, values in fields.items()},
    behavior_entropy=np.ones((rows, shape[-1]), np.float32),
  )
  times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
  with tempfile.TemporaryDirectory() as folder:
    run = Run(config, pathlib.Path(folder) / "run")
    run.verifier.close()
    learner = run.learner
    state = learner.init_state(learner.init_trained(0))
    for call in range(calls + 3):
      start = time.perf_counter()
      state, metrics = learner.step(state, batch)
      jax.block_until_ready((state, metrics))
      middle = time.perf_counter()
      jax.block_until_ready(learner.score(state.params, pool))
      end = time.perf_counter()
      if call >= 3:  # Compiled, and the memory of the process has settled.
        times["step"].append(1e3 * (middle - start))
        times["score"].append(1e3 * (end - middle))
  return times


def in_a_process(checkout: pathlib.Path, calls: int) -> dict[str, list[float]]:
  """``measure`` of a checkout, in a process of its own."""
  done = subprocess.run(
    [sys.executable, __file__, "--worker", f"--calls={calls}"],
    cwd=checkout,
    env=os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  if done.returncode:
    sys.exit(f"{checkout} could not be measured:\n{done.stderr}")
  return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--against", type=pathlib.Path)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--calls", type=int, default=20)
  parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.worker:
    print(json.dumps(measure(arguments.calls)))
    return
  sides = {"this": ROOT}
  if arguments.against:
    sides["against"] = arguments.against.resolve()
  times = {side: {name: [] for name in PROGRAMS} for side in sides}
  for turn in range(arguments.rounds):
    # Neither side always goes first.
    for side in sorted(sides, reverse=bool(turn % 2)):
      measured = in_a_process(sides[side], arguments.calls)
      for name in PROGRAMS:
        times[side][name] += measured[name]
  result = {
    f"{side}_{name}_ms": {
      "least": round(min(values), 2),
      "median": round(statistics.median(values), 2),
    }
    for side, programs in times.items()
    for name, values in programs.items()
  }
  if arguments.against:
    for name in PROGRAMS:
      medians = [statistics.median(times[side][name]) for side in sides]
      result[f"{name}_ratio"] = round(medians[0] / medians[1], 3)
  print(json.dumps(result))


if __name__ == "__main__":
  main()
