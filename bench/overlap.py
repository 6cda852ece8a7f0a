"""How much of generation and training overlaps: asynchronous over synchronous.

  python bench/overlap.py [--steps=40] [--json]

Runs the same steps synchronously (sync_grpo) and asynchronously (async_grpo),
side by side in one process, with and without a delay injected into generation.
The delay stands for hardware that two cores do not have: it sleeps after each
generated batch for a long-tailed time (log-normal, sigma 0.8, the same draws
for both runs) whose mean makes generation as long as a learner step. Prints
one JSON line; the first steps, which compile, are left out of the times.
"""

import pathlib
import tempfile
import time

import jax

jax.config.update("jax_num_cpu_devices", 2)

import numpy as np

from darl_jax import config as config_lib
from darl_jax import metrics
from darl_jax.loop import Run
from darl_jax.rollout.engine import Engine

_WARM_UP_STEPS = 8
_SIGMA = 0.8


def make_delayed_engine(mean_s: float, seed: int = 0):
  """An engine class whose batches take ``mean_s`` seconds longer on average."""
  rng = np.random.default_rng(seed)

  class DelayedEngine(Engine):
    def generate(self, prompts, **kwargs):
      generated = super().generate(prompts, **kwargs)
      if mean_s:
        time.sleep(mean_s * rng.lognormal(-(_SIGMA**2) / 2, _SIGMA))
      return generated

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
  config.rollout.samples_per_prompt = 16
  config.rollout.prompts_per_batch = samples // 16
  config.rewards.partial_credit = 1.0  # Hardly a group has equal rewards.
  config.learner.batch_size = samples
  config.replay.min_batch = samples * 3 // 4
  config.replay.max_staleness = min(config.replay.max_staleness, 2)
  return config_lib.parse(config)


def measure(module, *, steps: int, delay_s: float) -> dict[str, float]:
  """Seconds per step after warm-up, and what the run says of itself."""
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / "run"
    run = Run(
      run_config(module, steps=steps),
      workdir,
      make_engine=make_delayed_engine(delay_s),
    )
    summary = run.execute()
    rows = metrics.read_metrics(workdir)
  times = {row["step"]: row["time"] for row in rows if "train/loss" in row}
  seconds = times[steps] - times[_WARM_UP_STEPS]
  return {
    "seconds_per_step": seconds / (steps - _WARM_UP_STEPS),
    "generate_seconds_per_batch": rows[-2]["rollout/seconds"]
    / max(rows[-2]["rollout/prompts_drawn"], 1)
    * run.config.rollout.prompts_per_batch,
    "generated": summary["generated"],
    "trained": summary["trained"],
    "learner_wait_fraction": summary["learner_wait_fraction"],
    "rollout_wait_fraction": summary["rollout_wait_fraction"],
    "mean_age": summary["mean_age"],
  }
