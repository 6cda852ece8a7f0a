"""How much of generation and training overlaps: asynchronous over synchronous.

  python bench/overlap.py [--steps=60]

Runs the same steps synchronously (sync_grpo) and asynchronously (async_grpo),
side by side in one process, with and without a delay injected into generation.
The delay stands for hardware that two cores do not have: it sleeps after each
batch's worth of generated groups for a long-tailed time (log-normal, sigma 0.8,
the same draws for both runs) whose mean makes generation as long as a learner
step. Prints one JSON line; the first steps, which compile, are left out of the
times.
"""

import argparse
import contextlib
import itertools
import json
import pathlib
import sys
import tempfile
import time

import numpy as np

from configs import async_grpo, sync_grpo
from darl_jax import config as config_lib
from darl_jax import metrics
from darl_jax.loop import Run
from darl_jax.rollout.engine import Engine
from darl_jax.sharding import meshes

_WARM_UP_STEPS = 8
_SIGMA = 0.8


def make_delayed_engine(mean_s: float, *, batches: int, seed: int = 0):
  """An engine class whose batches take ``mean_s`` seconds longer on average.

  The same long-tailed delays for every run, scaled to have that mean exactly.
  """
  delays = np.random.default_rng(seed).lognormal(sigma=_SIGMA, size=batches)
  delays = itertools.cycle(delays * mean_s / delays.mean())

  class DelayedEngine(Engine):
    delivered = 0

    def step(self, snapshot):
      groups = super().step(snapshot)
      for _ in groups:
        self.delivered += 1
        if self.delivered % self.config.prompts_per_batch == 0:
          time.sleep(next(delays))
      return groups

  return DelayedEngine


def run_config(module, *, steps: int) -> config_lib.RunConfig:
  """The config, with every sample in a live group and trained on once."""
  config = module.get_config()
  samples = 256
  config.num_steps = steps
  config.warm_start.target_accuracy = 1.0
  config.warm_start.steps = 60
  config.evaluate.every = 10**6
  config.evaluate.num_prompts = 16
  # Groups so large that hardly one has equal rewards: every batch feeds one
  # step, in both runs.
  config.rollout.samples_per_prompt = 64
  config.rollout.prompts_per_batch = samples // 64
  config.rewards.partial_credit = 1.0
  config.learner.batch_size = samples
  # A few samples of a batch have no advantage. Were more needed than a batch
  # has, the learner would end up waiting for two batches at each step.
  config.replay.min_batch = samples * 3 // 4
  # Rows to spare make the learner's step long: on two cores what generation
  # computes must be small beside it, or both want the same core.
  config.learner.rows = 384
  if config.replay.max_staleness:
    config.replay.max_staleness, config.replay.num_snapshots = 8, 9
  return config_lib.parse(config)


def measure(module, *, steps: int, delay_s: float) -> dict[str, float]:
  """Seconds per step after warm-up, and what the run says of itself."""
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / "run"
    run = Run(
      run_config(module, steps=steps),
      workdir,
      make_engine=make_delayed_engine(delay_s, batches=steps),
    )
    with contextlib.redirect_stdout(sys.stderr):  # The run's own display.
      summary = run.execute()
    rows = metrics.read_metrics(workdir)
  rows = {row["step"]: row for row in rows if "train/loss" in row}
  first, last = rows[_WARM_UP_STEPS], rows[steps]
  batch = run.config.rollout.prompts_per_batch

  def grown(name: str) -> float:
    return last[name] - first[name]

  seconds = grown("time") / (steps - _WARM_UP_STEPS)
  generating = grown("rollout/seconds") / grown("rollout/prompts_drawn") * batch
  return {
    "seconds_per_step": seconds,
    "generate_seconds_per_batch": generating,
    "batches_per_step": grown("rollout/prompts_drawn")
    / batch
    / (steps - _WARM_UP_STEPS),
    "trained": summary["trained"],
    "learner_wait_fraction": summary["learner_wait_fraction"],
    "rollout_wait_fraction": summary["rollout_wait_fraction"],
    "mean_age": summary["mean_age"],
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=60)
  steps = parser.parse_args().steps
  if steps <= _WARM_UP_STEPS:
    parser.error(f"--steps must be above {_WARM_UP_STEPS}")
  meshes.prepare_cpu(2)
  plain_sync = measure(sync_grpo, steps=steps, delay_s=0.0)
  plain_async = measure(async_grpo, steps=steps, delay_s=0.0)
  # Both sides alike: generating a batch then takes as long as the rest.
  generating = plain_sync["generate_seconds_per_batch"]
  delay = plain_sync["seconds_per_step"] - 2 * generating
  delayed_sync = measure(sync_grpo, steps=steps, delay_s=max(delay, 0.0))
  delayed_async = measure(async_grpo, steps=steps, delay_s=max(delay, 0.0))

  def ratio(faster: dict[str, float], slower: dict[str, float]) -> float:
    return faster["seconds_per_step"] / slower["seconds_per_step"]

  print(
    json.dumps(
      {
        "steps": steps,
        "injected_mean_delay_s": delay,
        "ratio_with_delay": ratio(delayed_async, delayed_sync),
        "ratio_without_delay": ratio(plain_async, plain_sync),
        "sync_with_delay": delayed_sync,
        "async_with_delay": delayed_async,
        "sync_without_delay": plain_sync,
        "async_without_delay": plain_async,
      }
    )
  )


if __name__ == "__main__":
  main()
