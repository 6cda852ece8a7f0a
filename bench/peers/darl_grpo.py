"""This project's own run, for ``bench/grpo_step.py``; see grpo_protocol.py.

It is the run of ``darl_jax/loop.py`` with ``max_staleness = 0``: engine, ring,
verifier processes, scoring pass, learner, snapshots and metrics files, without
evaluations between the steps. Only the task is another: prompts that are token
ids, and a reward computed from token ids.
"""

import collections
import contextlib
import functools
import importlib.metadata
import pathlib
import time
from collections.abc import Callable, Iterator
from unittest import mock

import grpo_protocol
import jax
import numpy as np
import token_text

from configs import sync_grpo
from darl_jax import config as config_lib
from darl_jax.loop import Run
from darl_jax.models import presets
from darl_jax.prompts import dataset
from darl_jax.sharding import meshes
from darl_jax.types import Prompt


class TokenIds:
  """Stands for a tokenizer where prompts are token ids already."""

  pad_id = 0
  stop_ids = ()

  def __init__(self, vocab_size: int):
    self.vocab_size = vocab_size

  def decode(self, tokens: np.ndarray) -> str:
    return token_text.decode(tokens.tolist())

  def save(self, path: pathlib.Path) -> None:
    """Nothing to save."""


def _config(job: grpo_protocol.Job) -> config_lib.RunConfig:
  """Tuned for these shapes on CPUs, as a user would."""
  config = sync_grpo.get_config()
  config.num_steps = grpo_protocol.MAX_STEPS
  config.prompts.max_tokens = job.max_prompt_tokens
  config.model.update(
    presets.qwen3_8b()
    | dict(
      num_layers=job.num_layers,
      embed_dim=job.embed_dim,
      mlp_dim=job.mlp_dim,
      num_heads=job.num_heads,
      num_kv_heads=job.num_kv_heads,
      head_dim=job.head_dim,
      vocab_size=job.vocab_size,
      compute_dtype="float32",
      remat="none",
    )
  )
  config.warm_start.steps = 0
  config.rollout.update(
    dict(
      prompts_per_batch=job.prompts_per_step,
      samples_per_prompt=job.samples_per_prompt,
      max_response_tokens=job.response_tokens,
      chunk_tokens=16,
      prefill_tokens=256,
    )
  )
  config.rewards.partial_credit = 1.0
  config.replay.update(dict(min_batch=job.sequences, timeout_s=600.0))
  config.learner.update(
    dict(
      learning_rate=job.learning_rate,
      schedule="constant",
      warmup_steps=0,
      final_learning_rate=job.learning_rate,
      batch_size=job.sequences,
      rows=job.sequences,
      row_tokens=job.max_prompt_tokens + job.response_tokens,
      score_rows=job.sequences,
    )
  )
  config.evaluate.num_prompts = 1
  return config_lib.parse(config)


def _task(job: grpo_protocol.Job) -> tuple[dataset.TaskPrompts, dict]:
  """The prompts, and the verifier."""
  prompts = [
    Prompt(str(index), np.array(tokens, np.int32), {"answer": None})
    for index, tokens in enumerate(job.prompts)
  ]
  task = dataset.TaskPrompts(
    tokenizer=TokenIds(job.vocab_size),
    train=tuple(prompts[1:]),
    heldout=tuple(prompts[:1]),
    num_duplicates=0,
    num_too_long=0,
    longest_response=0,
  )
  arguments = {"vocab_size": job.vocab_size}
  return task, {"verifier": "token_text:Verifier", "arguments": arguments}


class SteppedRun(Run):
  """A run that stops after each step, and knows the seconds of its parts."""

  def drive(self, steps: grpo_protocol.Steps) -> None:
    """Runs one step after another until there are no more to do."""
    self._steps = steps
    self._parts: collections.Counter[str] = collections.Counter()
    self._tokens = 0
    self._generating = 0.0
    self.learner.score = self._timed("score", self.learner.score)
    self.learner.step = self._timed("update", self.learner.step)
    self.execute()

  def _timed(self, part: str, function: Callable) -> Callable:
    """``function``, until its results are there: the loop needs them next."""

    @functools.wraps(function)
    def timed(*arguments, **keywords):
      with self._time(part):
        return jax.block_until_ready(function(*arguments, **keywords))

    return timed

  @contextlib.contextmanager
  def _time(self, part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    self._parts[part] += time.perf_counter() - start

  def _evaluate(self, step: int) -> None:
    """Not a part of a step."""

  def _join_verifier(self) -> None:
    with self._time("verify"):
      super()._join_verifier()

  def _publish(self, *, version: int) -> None:
    with self._time("publish"):
      super()._publish(version=version)

  def _on_rollout_mesh(self, snapshot):
    with self._time("publish"):
      return super()._on_rollout_mesh(snapshot)

  def _report(self, *arguments) -> None:
    with self._time("report"):
      super()._report(*arguments)
    counts = self.actor.metrics()
    self._parts["generate"] = counts["rollout/seconds"] - self._generating
    tokens = counts["rollout/tokens"] - self._tokens
    self._generating += self._parts["generate"]
    self._tokens += tokens
    self._steps.done(tokens=tokens, parts=self._parts)
    self._parts.clear()


def load(
  job: grpo_protocol.Job, folder: pathlib.Path
) -> Callable[[grpo_protocol.Steps], None]:
  """A run that has not begun."""
  config = _config(job)
  meshes.prepare_cpu(1)
  prompts, verifier = _task(job)
  with (
    mock.patch.object(dataset, "load", return_value=prompts),
    mock.patch.object(dataset, "verifier_task", return_value=verifier),
  ):
    return SteppedRun(config, folder / "run").drive


if __name__ == "__main__":
  version = importlib.metadata.version("jax")
  grpo_protocol.serve(f"darl_jax, jax {version}", load)
