"""The whole run, in one process: what it computes, and how it ends."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import runpy
import subprocess
import sys
import threading
import time
import traceback
import typing
from unittest import mock

import jax
import numpy as np
import psutil
import pytest
from absl.testing import parameterized
from jax.experimental.compilation_cache import compilation_cache

from configs import async_grpo, darl, decoupled_ppo, sync_grpo
from darl_jax import config, loop, metrics, watch
from darl_jax.checkpoint import run_state
from darl_jax.models import lora, published
from darl_jax.models.transformer import Policy
from darl_jax.replay.ring import RingFailed, Starved
from darl_jax.rewards.pool import VerifierStartError
from darl_jax.rollout.engine import Engine
from tests.fixtures import tiny_tokenizer

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
shrink = runpy.run_path(str(FIXTURES / "tiny_config.py"))["shrink"]

ENDS_WITHIN_S = 10.0
# Of metrics: what the clock decides.
TIMED = (
  "time",
  "speed/",
  "wait/",
  "rollout/seconds",
  "verify/seconds",
  "checkpoint/",
)

_COMPILE_ONCE = {
  "jax_compilation_cache_dir": None,
  "jax_persistent_cache_min_compile_time_secs": 0.0,
  "jax_disable_most_optimizations": True,
}

_folder: pathlib.Path  # Of this module's runs.


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
  """Most runs here have the same programs: XLA compiles them once for all.

  And does so quickly: compiling is nearly all of these runs' time.
  """
  global _folder
  _folder = tmp_path_factory.mktemp("runs")
  default = {name: jax.config.values[name] for name in _COMPILE_ONCE}
  values = _COMPILE_ONCE | {"jax_compilation_cache_dir": str(_folder / "xla")}
  for name, value in values.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield
  for name, value in default.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def make_config(module, **changes) -> config.RunConfig:
  """A config of ``configs/``, shrunk; ``replay__min_batch=3`` sets a field.

  A temperature other than 1 shows where it is forgotten.
  """
  fields = shrink(module.get_config())
  fields.rollout.temperature = 1.3
  for name, value in changes.items():
    *path, field = name.split("__")
    functools.reduce(getattr, path, fields)[field] = value
  return config.parse(fields)


@dataclasses.dataclass(frozen=True)
class Ended:
  """A run that is over, however it ended."""

  run: loop.Run
  error: Exception | None
  summary: dict
  seconds: float
  ended_at: float

  @property
  def steps(self) -> list[dict]:
    """The metrics of each learner step."""
    rows = metrics.read_metrics(self.run.workdir)
    return [row for row in rows if "train/loss" in row]

  def causes(self) -> list[BaseException]:
    """The error and what led to it."""
    chain, error = [], self.error
    while error is not None:
      chain.append(error)
      error = error.__cause__
    return chain


def execute(
  run_config, *, verifier="Varied", arguments=None, prepare=None, **keywords
) -> Ended:
  """Runs to the end, with a quick verifier in place of reasoning-gym's."""
  task = {
    "verifier": f"varied_verifier:{verifier}",
    "arguments": arguments or {},
  }
  workdir = _folder / f"run{len(list(_folder.iterdir()))}"
  with (
    mock.patch.object(sys, "path", [*sys.path, str(FIXTURES)]),
    mock.patch.object(loop.dataset, "verifier_task", return_value=task),
  ):
    run = loop.Run(run_config, workdir, **keywords)
    if prepare is not None:
      prepare(run)
    start = time.monotonic()
    try:
      run.execute()
      error = None
    except Exception as raised:
      error = raised
    now = time.monotonic()
  summary = json.loads((workdir / "summary.json").read_text())
  return Ended(run, error, summary, now - start, now)


class RecordingEngine(Engine):
  """Keeps what it generated."""

  def __init__(self, *arguments, **keywords):
    super().__init__(*arguments, **keywords)
    self.groups = []

  def generate(self, prompts, **keywords):
    groups, stats = super().generate(prompts, **keywords)
    self.groups.extend(groups)
    return groups, stats


def recorded(ended: Ended) -> list[np.ndarray]:
  """The sampled tokens of a run with a ``RecordingEngine``."""
  return [
    trajectory.tokens
    for group in ended.run.actor._engine.groups
    for trajectory in group.trajectories
  ]


@functools.cache
def synchronous(*, again=False, devices=2) -> Ended:
  del again
  meshes = {}
  if devices == 8:
    meshes = dict(mesh__train__data=2, mesh__train__fsdp=2)
    meshes |= dict(mesh__rollout__data=4)
  run_config = make_config(sync_grpo, rewards__workers=2, **meshes)
  return execute(run_config, make_engine=RecordingEngine)


@functools.cache
def asynchronous() -> Ended:
  return execute(make_config(darl, num_steps=6, warm_start__steps=2))


@functools.cache
def truncated(module=sync_grpo, **changes) -> Ended:
  run_config = make_config(module, rollout__top_p=0.9, **changes)
  return execute(run_config, make_engine=RecordingEngine)


def params_of(ended: Ended) -> list[np.ndarray]:
  return [np.asarray(leaf) for leaf in jax.tree.leaves(ended.run.state.params)]


class ResultTest(parameterized.TestCase):
  """What a run computes."""

  def test_one_seed_gives_one_result_when_synchronous(self):
    first, second = synchronous(), synchronous(again=True)
    self.assertIsNot(first, second)
    for ours, theirs in zip(params_of(first), params_of(second), strict=True):
      np.testing.assert_array_equal(ours, theirs)

    def untimed(ended):
      rows = metrics.read_metrics(ended.run.workdir)
      return [
        {k: v for k, v in row.items() if not k.startswith(TIMED)}
        for row in rows
      ]

    self.assertEqual(untimed(first), untimed(second))
    # One evaluation, and three steps of over 40 metrics.
    self.assertLen(untimed(first), 4)
    self.assertGreater(len(untimed(first)[1]), 40)

  def test_the_parameters_change(self):
    ended = synchronous()
    fresh = ended.run.learner.init_trained(ended.run.config.seed)
    for before, after in zip(
      jax.tree.leaves(fresh), params_of(ended), strict=True
    ):
      self.assertGreater(np.max(np.abs(np.asarray(before) - after)), 0)

  @parameterized.parameters(synchronous, asynchronous)
  def test_every_program_compiles_once(self, ended):
    self.assertEqual(
      ended().summary["compiles"],
      {"train_step": 1, "score": 1, "prefill": 1, "decode": 1},
    )

  def test_what_is_sampled_from_the_current_policy_has_ratio_one(self):
    for row in synchronous().steps:
      self.assertLess(row["parity/max"], 1e-5)
      self.assertAlmostEqual(row["train/ratio"], 1.0, delta=1e-5)
      self.assertEqual(row["ring/max_age"], 0)
      self.assertEqual(row["train/clipped_low"], 0)
      self.assertEqual(row["train/clipped_high"], 0)

  def test_what_an_older_policy_sampled_has_not(self):
    rows = asynchronous().steps
    self.assertLess(rows[0]["parity/max"], 1e-5)
    old = [row for row in rows if row["ring/max_age"] >= 1]
    self.assertNotEmpty(old)
    for row in old:
      self.assertGreater(row["train/kl"], 1e-9)
    # Parity is under the weights that sampled, whatever their age.
    for row in rows:
      self.assertLess(row.get("parity/max", 0.0), 1e-5)

  @parameterized.parameters("swap", "recompute")
  def test_what_several_policies_sampled_is_compared_with_each(self, update):
    """What was cached under older weights is the difference."""
    ended = execute(
      make_config(
        darl,
        num_steps=12,
        rollout__weight_update=update,
        rollout__max_response_tokens=12,
        rollout__slots=5,
        learner__row_tokens=28,
        learner__final_learning_rate=0.1,
        rollout__chunk_tokens=1,
        evaluate__every=1,
        learner__learning_rate=0.1,
        learner__warmup_steps=0,
      )
    )
    self.assertIsNone(ended.error)
    mixed = [
      r["parity/mixed_max"] for r in ended.steps if "parity/mixed_max" in r
    ]
    self.assertNotEmpty(mixed)
    if update == "swap":
      self.assertGreater(max(mixed), 1e-3)
    else:
      self.assertLess(max(mixed), 1e-4)

  def test_truncated_sampling(self):
    """Samples keep their support, from the sampler to the loss."""
    ended = truncated()
    self.assertIsNone(ended.error)
    self.assertLen(ended.steps, 3)
    for row in ended.steps:
      self.assertLess(row["parity/max"], 1e-5)
      self.assertAlmostEqual(row["train/ratio"], 1.0, delta=1e-5)
      self.assertEqual(row["train/clipped_low"], 0)
      self.assertEqual(row["train/clipped_high"], 0)
    self.assertEqual(set(ended.summary["compiles"].values()), {1})
    vocab = ended.run.state.params["embedding"].shape[0]
    for group in ended.run.actor._engine.groups:
      for trajectory in group.trajectories:
        support = trajectory.support_mask
        bits = np.unpackbits(support.dense()[trajectory.loss_mask])
        self.assertLess(bits.sum(), 0.95 * vocab * trajectory.num_sampled)
    # What is drawn is something else than without.
    self.assertNotEqual(
      [t.tolist() for t in recorded(ended)],
      [t.tolist() for t in recorded(synchronous())],
    )

  def test_truncated_sampling_by_older_policies(self):
    ended = truncated(darl, num_steps=6, warm_start__steps=2)
    self.assertIsNone(ended.error)
    old = [row for row in ended.steps if row["ring/max_age"] >= 1]
    self.assertNotEmpty(old)
    for row in old:
      self.assertGreater(row["train/kl"], 1e-9)
    for row in ended.steps:
      self.assertLess(row.get("parity/max", 0.0), 1e-5)

  def test_stop_strings(self):
    """In training and at evaluations."""
    texts = []

    def keep_texts(run):
      for engine in (run.actor._engine, run.evaluator._engine):
        deliver = engine._deliver

        def wrapped(group, deliver=deliver):
          done = deliver(group)
          decode = run.prompts.tokenizer.decode
          texts.extend(
            [decode(t.response[:n]) for n in (-1, None)]
            for t in done.trajectories
          )
          return done

        engine._deliver = wrapped

    strings = tuple("aeiou")
    ended = execute(
      make_config(sync_grpo, rollout__stop_strings=strings),
      prepare=keep_texts,
    )
    self.assertIsNone(ended.error)
    self.assertFalse(any(set(strings) & set(before) for before, _ in texts))
    self.assertNotEmpty([t for _, t in texts if set(strings) & set(t)])

  def test_eight_devices_compute_what_two_do(self):
    few, many = synchronous(), synchronous(devices=8)
    devices = jax.tree.leaves(many.run.state.params)[0].sharding.device_set
    self.assertLen(devices, 4)
    first_batch = 4 * 4
    for ours, theirs in zip(
      recorded(few)[:first_batch], recorded(many)[:first_batch], strict=True
    ):
      np.testing.assert_array_equal(ours, theirs)
    # The loss itself is near 0: the advantages of a group sum to 0.
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
      self.assertAlmostEqual(
        few.steps[0][name], many.steps[0][name], delta=1e-5, msg=name
      )
    self.assertEqual(set(many.summary["compiles"].values()), {1})

  def test_a_run_leaves_its_files(self):
    ended = asynchronous()
    names = {path.name for path in ended.run.workdir.iterdir()}
    self.assertContainsSubset(
      {
        "config.json",
        "summary.json",
        "metrics.jsonl",
        "samples.jsonl",
        "tokenizer.json",
        "learning_curve.png",
        "tensorboard",
        "checkpoints",
      },
      names,
    )
    again = config.parse(
      json.loads((ended.run.workdir / "config.json").read_text())
    )
    self.assertEqual(again, ended.run.config)
    self.assertEqual(ended.summary["status"], "complete")
    self.assertEqual(ended.summary["steps"], 6)
    self.assertIsNone(ended.summary["error"])
    self.assertEqual([step for step, _ in ended.summary["accuracies"]], [0, 6])
    assert_checkpoint_is_current(self, ended)


# One run per row; together they have every value of these four fields.
COMBINATIONS = (
  ("keep_best", "variance", "pooled", "group"),
  ("reject_worst", "second_moment", "ess_token", "group_centered"),
  ("random", "harmful", "moment", "rloo"),
  ("newest", "entropy_scaled", "inverse_variance", "group"),
  ("reject_worst", "length_corrected", "ess_token", "rloo"),
  ("keep_best", "variance", "balance", "group"),
  ("random", "variance", "balance_length_normalized", "group"),
)


class ConfigsTest(parameterized.TestCase):
  """Every config, and every value that a field can have."""

  def _assert_finite(self, ended: Ended, num_steps: int):
    self.assertIsNone(ended.error)
    self.assertLen(ended.steps, num_steps)
    for row in ended.steps:
      for name, value in row.items():
        self.assertTrue(math.isfinite(value), f"{name} = {value}")
      self.assertEqual(row["train/skipped"], 0)

  def test_default_configs(self):
    self._assert_finite(synchronous(), 3)
    self._assert_finite(asynchronous(), 6)

  @parameterized.parameters(
    (async_grpo, {"replay__num_snapshots": 1, "replay__max_staleness": 1}),
    (decoupled_ppo, {}),
  )
  def test_baselines(self, module, changes):
    self._assert_finite(execute(make_config(module, **changes)), 3)

  @parameterized.parameters(*COMBINATIONS)
  def test_values(self, mode, metric, weighting, advantage):
    changes = {}
    if weighting.startswith("balance"):
      changes = {
        "objective__trust_region": "decoupled",
        "rollout__weight_update": "drain",
      }
    run_config = make_config(
      darl,
      num_steps=2,
      replay__selection_mode=mode,
      replay__metric=metric,
      replay__max_uses=2,
      objective__behavior_weighting=weighting,
      objective__advantage=advantage,
      **changes,
    )
    self._assert_finite(execute(run_config), 2)

  def test_the_combinations_leave_no_value_out(self):
    replay = typing.get_type_hints(config.ReplayConfig)
    objective = typing.get_type_hints(config.ObjectiveConfig)
    for tried, hint in zip(
      zip(*COMBINATIONS, strict=True),
      (
        replay["selection_mode"],
        replay["metric"],
        objective["behavior_weighting"],
        objective["advantage"],
      ),
      strict=True,
    ):
      self.assertEqual(set(tried), set(typing.get_args(hint)))

  def test_little_memory_for_snapshots(self):
    # Parity wants a snapshot that is gone; the run goes on without.
    ended = execute(make_config(darl, num_steps=5, replay__snapshot_bytes=1))
    self._assert_finite(ended, 5)
    self.assertGreater(ended.summary["max_age"], 0)
    self.assertLess(len([r for r in ended.steps if "parity/max" in r]), 5)

  def test_no_steps(self):
    ended = execute(make_config(darl, num_steps=0, learner__warmup_steps=0))
    self.assertEqual(ended.summary["status"], "complete")
    self.assertEqual(ended.summary["steps"], 0)

  def test_too_few_devices(self):
    with self.assertRaisesRegex(config.ConfigError, "16 devices, but 8 are"):
      execute(
        make_config(
          sync_grpo,
          mesh__train__data=8,
          mesh__rollout__data=8,
          rollout__prompts_per_batch=8,
        )
      )

  def test_what_only_the_prompts_can_tell_is_told_at_once(self):
    with self.assertRaises(config.ConfigError) as caught:
      execute(
        make_config(
          sync_grpo,
          rollout__max_response_tokens=1,
          evaluate__num_prompts=10_000,
          model__vocab_size=7,
        )
      )
    one, two, three = sorted(caught.exception.problems)
    self.assertRegex(one, "evaluate.num_prompts = 10000, but only .* held out")
    self.assertRegex(two, "model.vocab_size = 7 has no row for .* Try .*=2..")
    self.assertRegex(three, "max_response_tokens = 1 cuts reference answers")

  def test_a_model_with_more_rows_than_the_tokenizer_has_tokens(self):
    ended = execute(make_config(sync_grpo, num_steps=1, model__vocab_size=300))
    self._assert_finite(ended, 1)
    self.assertEqual(ended.run.state.params["embedding"].shape, (300, 16))

  def test_a_folder_that_holds_a_run(self):
    workdir = synchronous().run.workdir
    before = (workdir / "summary.json").read_text()
    with self.assertRaisesRegex(config.ConfigError, "already holds a run"):
      loop.Run(make_config(sync_grpo), workdir)
    self.assertEqual((workdir / "summary.json").read_text(), before)

  def test_a_folder_that_cannot_be_made(self):
    with self.assertRaisesRegex(config.ConfigError, "no folder to write to"):
      loop.Run(make_config(sync_grpo), FIXTURES / "tiny_config.py")


def config_from(model: pathlib.Path, **changes) -> config.RunConfig:
  """Of a run that starts from a published model."""
  shape = {
    f"model__{name}": value
    for name, value in published.read_config(model).items()
  }
  terms = dict(
    min_terms=2,
    max_terms=2,
    max_digits=2,
    operators=["+"],
    allow_parentheses=False,
  )
  fields = dict(
    prompts__dataset="basic_arithmetic",  # Of the shortest questions.
    prompts__params=json.dumps(terms),
    prompts__max_tokens=40,
    learner__row_tokens=48,
  )
  return make_config(
    sync_grpo,
    model__checkpoint=str(model),
    **shape | fields | dict(num_steps=1) | changes,
  )


@functools.cache
def model_folder(name: str) -> pathlib.Path:
  return tiny_tokenizer.copy_model(name, _folder / f"model-{name}")


@functools.cache
def tuned(name: str) -> Ended:
  """A run from a published model."""
  return execute(config_from(model_folder(name)))


def published_params(ended: Ended, model: pathlib.Path) -> list[np.ndarray]:
  """The model's, as the run's learner has its own."""
  run = ended.run
  params = published.load(
    model, run.config.model, shardings=run.learner.param_shardings
  )
  return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def export(run: loop.Run, out: pathlib.Path) -> None:
  """Writes the run's newest checkpoint as a published model."""
  subprocess.run(
    [
      sys.executable,
      "launch/export.py",
      f"--workdir={run.workdir}",
      f"--out={out}",
    ],
    cwd=FIXTURES.parent.parent,
    env=os.environ | {"PYTHONPATH": str(FIXTURES.parent.parent)},
    check=True,
    capture_output=True,
  )


class CheckpointTest(parameterized.TestCase):
  """Runs that start from a published model."""

  @parameterized.parameters("llama-tied", "qwen3-moe")
  def test_a_run(self, name):
    ended = tuned(name)
    self.assertIsNone(ended.error)
    [row] = ended.steps
    self.assertLess(row["parity/max"], 2e-5)
    self.assertEqual(set(ended.summary["compiles"].values()), {1})
    for before, after in zip(
      published_params(ended, model_folder(name)),
      params_of(ended),
      strict=True,
    ):
      self.assertGreater(np.max(np.abs(before - after)), 0)

  def test_without_steps_the_parameters_are_the_models(self):
    model = model_folder("llama-tied")
    ended = execute(config_from(model, num_steps=0, learner__warmup_steps=0))
    for ours, theirs in zip(
      params_of(ended), published_params(ended, model), strict=True
    ):
      np.testing.assert_array_equal(ours, theirs)

  def test_the_warm_start_goes_on_from_there(self):
    model = model_folder("llama-tied")
    ended = execute(
      config_from(
        model,
        num_steps=0,
        learner__warmup_steps=0,
        warm_start__steps=1,
        warm_start__learning_rate=1e-4,
      )
    )
    for ours, theirs in zip(
      params_of(ended), published_params(ended, model), strict=True
    ):
      # Adam's first step is at most the learning rate.
      self.assertBetween(np.max(np.abs(ours - theirs)), 1e-6, 1.1e-4)

  def test_the_models_own_tokenizer_asks(self):
    ended = tuned("llama-tied")
    tokenizer = ended.run.prompts.tokenizer
    self.assertEqual(tokenizer.stop_ids, (2,))
    for prompt in ended.run.prompts.train:
      self.assertEqual(prompt.tokens[0], 1)
    text = (ended.run.workdir / "samples.jsonl").read_text()
    asked = json.loads(text.splitlines()[0])
    self.assertStartsWith(asked["prompt"], "<s><user>Calculate ")
    self.assertEndsWith(asked["prompt"], ".<assistant>")
    self.assertEqual(ended.run.config.prompts.tokenizer, "")

  def test_another_tokenizer_and_a_system_message(self):
    model = model_folder("llama-tied")
    other = tiny_tokenizer.copy_model("qwen2-bias", _folder / "other")
    about = json.loads((other / "tokenizer_config.json").read_text())
    about["chat_template"] = "{{ messages[0].content }}!"
    (other / "tokenizer_config.json").write_text(json.dumps(about))
    for tokenizer, starts in (("", "<s><system>Add."), (str(other), "Add.!")):
      run_config = config_from(
        model, prompts__system="Add.", prompts__tokenizer=tokenizer
      )
      with mock.patch.object(loop, "VerifierPool"):
        run = loop.Run(run_config, _folder / f"other{bool(tokenizer)}")
      run.writer.close()
      run._lock.close()
      prompt = run.prompts.train[0].tokens
      self.assertStartsWith(run.prompts.tokenizer.decode_prompt(prompt), starts)

  def test_a_config_of_another_shape(self):
    workdir = _folder / "refused"
    with self.assertRaises(config.ConfigError) as caught:
      loop.Run(
        config_from(
          model_folder("llama-tied"), model__rope_theta=5.0, model__num_layers=2
        ),
        workdir,
      )
    self.assertLen(caught.exception.problems, 2)
    self.assertIn(
      "model.num_layers = 2, but the model's is 3. Try model.num_layers=3.",
      caught.exception.problems,
    )
    self.assertFalse(workdir.exists())

  @pytest.mark.slow
  def test_what_is_exported_can_be_trained_again(self):
    ended = tuned("llama-tied")
    out = _folder / "exported"
    export(ended.run, out)
    for ours, theirs in zip(
      params_of(ended), published_params(ended, out), strict=True
    ):
      np.testing.assert_array_equal(ours, theirs)
    again = execute(config_from(out, num_steps=0, learner__warmup_steps=0))
    self.assertIsNone(again.error)
    self.assertEqual(
      [prompt.tokens.tolist() for prompt in again.run.prompts.heldout],
      [prompt.tokens.tolist() for prompt in ended.run.prompts.heldout],
    )
    for ours, theirs in zip(params_of(again), params_of(ended), strict=True):
      np.testing.assert_array_equal(ours, theirs)


@functools.cache
def adapted() -> Ended:
  """A run that trains adapters of a published model."""
  return execute(
    config_from(
      model_folder("llama-tied"),
      num_steps=2,
      model__lora_rank=2,
      model__lora_targets="attention.*",
      learner__learning_rate=1e-2,
      learner__final_learning_rate=1e-2,
      warm_start__steps=1,
    )
  )


def by_name(params) -> dict[str, np.ndarray]:
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
    for path, leaf in jax.tree.leaves_with_path(params)
  }


def sampled_with(run: loop.Run) -> dict:
  """The sampler's parameters, with all layers in one array again."""
  params = run._on_rollout_mesh(run.ring.latest()).params
  layers = jax.tree.map(lambda *parts: np.stack(parts), *params["layers"])
  return {**params, "layers": layers}


class AdapterTest(parameterized.TestCase):
  """Runs that train adapters alone."""

  def test_a_run(self):
    ended = adapted()
    self.assertIsNone(ended.error)
    self.assertEqual(set(ended.summary["compiles"].values()), {1})
    for row in ended.steps:
      self.assertLess(row["parity/max"], 2e-5)

  def test_all_else_is_the_models(self):
    ended = adapted()
    run = ended.run
    _, shardings = lora.split(run.learner.param_shardings)
    model = published.load(
      model_folder("llama-tied"), run.config.model, shardings=shardings
    )
    learner = by_name(run.learner.frozen)
    self.assertEqual(learner.keys(), by_name(model).keys())
    for name, leaf in by_name(model).items():
      np.testing.assert_array_equal(learner[name], leaf, name)
    sampler = by_name(run._on_rollout_mesh(run.ring.latest()).params)
    for name, leaf in by_name(run.policy.unstacked(model)).items():
      np.testing.assert_array_equal(sampler[name], leaf, name)

  def test_adapters_are_trained_saved_and_sampled_with(self):
    ended = adapted()
    run = ended.run
    trained = by_name(run.state.params)
    self.assertLen(trained, 8)
    fresh = by_name(run.learner.init_trained(run.config.seed))
    sampler = by_name(sampled_with(run))
    for name, leaf in trained.items():
      self.assertIn(".adapters.", name)
      self.assertGreater(np.abs(leaf - fresh[name]).max(), 1e-4, name)
      np.testing.assert_array_equal(sampler[name], leaf, name)
    assert_checkpoint_is_current(self, ended)

  def test_little_is_published(self):
    run = adapted().run
    published_bytes = sum(
      leaf.nbytes for leaf in jax.tree.leaves(run.ring.latest().params)
    )
    all_bytes = sum(
      leaf.size * leaf.dtype.itemsize
      for leaf in jax.tree.leaves(run.learner.param_shapes)
    )
    self.assertBetween(published_bytes / all_bytes, 0.01, 0.05)

  @pytest.mark.slow
  def test_merged_on_export(self):
    run = adapted().run
    out = _folder / "merged"
    export(run, out)
    model = dataclasses.replace(run.config.model, lora_rank=0)
    published.check(out, model)
    exported = Policy(model, vocab_size=model.vocab_size)
    rng = np.random.default_rng(0)
    tokens = rng.integers(model.vocab_size, size=(2, 20), dtype=np.int32)
    positions = np.broadcast_to(np.arange(20), tokens.shape)
    segments = np.ones_like(tokens)
    merged = published.load(
      out, model, shardings=lora.split(run.learner.param_shardings)[1]
    )
    got = exported.hidden(merged, tokens, positions, segments)
    unmerged = lora.join(run.state.params, run.learner.frozen)
    want = run.policy.hidden(unmerged, tokens, positions, segments)
    np.testing.assert_allclose(got, want, atol=1e-5)
    without = exported.hidden(run.learner.frozen, tokens, positions, segments)
    self.assertGreater(np.abs(without - want).max(), 1e-3)


def assert_checkpoint_is_current(test, ended: Ended) -> None:
  """The newest checkpoint is of the last step, and is the run's state."""
  run = ended.run
  found = run.checkpoints.newest()
  test.assertEqual(found.step, ended.summary["steps"])
  state = run_state.read(
    found.folder,
    learner=run.learner.abstract_state(),
    snapshot=run.state.params,
  )
  jax.tree.map(np.testing.assert_array_equal, state.learner, run.state)
  test.assertEqual(state.ring.snapshots[-1].version, found.step)


def assert_accounts_add_up(test, ended: Ended) -> None:
  summary = ended.summary
  test.assertEqual(
    summary["generated"],
    summary["trained"]
    + summary["expired_unused"]
    + summary["dropped_unused"]
    + summary["in_ring_unused"]
    + summary["awaiting_verification"],
  )
  for fate in ("expired", "dropped"):
    test.assertEqual(
      summary[f"{fate}_unused"], sum(summary[f"{fate}_reasons"].values())
    )
  group = ended.run.config.rollout.samples_per_prompt
  drawn = summary["prompts_drawn"] - summary["prompts_in_flight"]
  if summary["status"] == "complete":
    test.assertEqual(summary["generated"], drawn * group)
  else:  # Delivery may be what was cut short.
    test.assertBetween(
      summary["generated"], drawn * group, summary["prompts_drawn"] * group
    )


def assert_nothing_is_left(test) -> None:
  names = [thread.name for thread in threading.enumerate()]
  test.assertEmpty([n for n in names if n.startswith(("actor", "verifier"))])
  test.assertEmpty(
    [
      child
      for child in psutil.Process().children(recursive=True)
      if "darl_jax.rewards.worker" in child.cmdline()
    ]
  )


class EndTest(parameterized.TestCase):
  """How a run ends before its time, and what it leaves."""

  @parameterized.parameters(synchronous, asynchronous)
  def test_accounts_of_a_whole_run(self, ended):
    assert_accounts_add_up(self, ended())
    self.assertGreater(ended().summary["trained"], 0)
    assert_nothing_is_left(self)

  @parameterized.parameters(sync_grpo, darl)
  def test_a_bound_that_bars_all_is_named(self, module):
    ended = execute(
      make_config(
        module,
        replay__selection_mode="keep_best",
        replay__max_metric=-1.0,
        replay__timeout_s=4.0,
      )
    )
    self.assertIsInstance(ended.error, Starved)
    self.assertRegex(
      str(ended.error),
      r"replay.max_metric = -1 bars all but 0 of \d+ trajectories, and "
      r"replay.min_batch = 8 are needed; their mean \w+ is .* Try a greater",
    )
    assert_accounts_add_up(self, ended)
    assert_nothing_is_left(self)

  def test_answers_that_stay_unverified_at_the_end_are_counted(self):
    alarms = []

    def prepare(run):
      run._join_verifier = mock.Mock(side_effect=TimeoutError("took too long"))
      run.progress.alarm = alarms.append

    ended = execute(make_config(darl, num_steps=2), prepare=prepare)
    self.assertIsNone(ended.error)
    self.assertEqual(ended.summary["status"], "complete")
    self.assertIn("some samples stay unverified: took too long", alarms)
    assert_accounts_add_up(self, ended)
    assert_nothing_is_left(self)

  def _assert_interrupted(self, ended: Ended, *, steps: int):
    self.assertIsInstance(ended.error, loop.Interrupted)
    self.assertEqual(ended.summary["status"], "interrupted")
    self.assertEqual(ended.summary["steps"], steps)
    assert_accounts_add_up(self, ended)
    assert_checkpoint_is_current(self, ended)
    assert_nothing_is_left(self)

  @parameterized.parameters(sync_grpo, darl)
  def test_interrupted_during_a_learner_step(self, module):
    def prepare(run):
      step = run.learner.step

      def interrupted_step(state, batch):
        result = step(state, batch)  # Donates ``state``.
        if int(result[0].step) == 2:
          run.interrupt()
        return result

      run.learner.step = interrupted_step

    ended = execute(make_config(module, num_steps=50), prepare=prepare)
    self._assert_interrupted(ended, steps=2)

  def test_interrupted_while_a_group_is_delivered(self):
    def prepare(run):
      admit = run.ring.admit

      def interrupted_admit(group):
        if run.ring.version == 1:
          run.interrupt()
        admit(group)

      run.ring.admit = interrupted_admit

    ended = execute(make_config(sync_grpo, num_steps=50), prepare=prepare)
    self._assert_interrupted(ended, steps=1)

  def test_interrupted_while_the_verifier_hangs(self):
    interrupted_at = []

    def prepare(run):
      def interrupt():
        interrupted_at.append(time.monotonic())
        run.interrupt()

      begin = run.ring.begin

      def begin_and_interrupt(groups):
        begin(groups)
        threading.Timer(0.5, interrupt).start()

      run.ring.begin = begin_and_interrupt

    run_config = make_config(sync_grpo, rewards__time_limit_s=50.0)
    ended = execute(
      run_config,
      verifier="Stalling",
      arguments={"quick": run_config.evaluate.num_prompts},
      prepare=prepare,
    )
    self.assertLess(ended.ended_at - interrupted_at[0], ENDS_WITHIN_S)
    self._assert_interrupted(ended, steps=0)
    self.assertEqual(ended.summary["awaiting_verification"], 16)

  def test_interrupted_during_the_warm_start(self):
    def prepare(run):
      advance = run.progress.advance

      def interrupted_advance(count, **values):
        run.interrupt()
        advance(count, **values)

      run.progress.advance = interrupted_advance

    ended = execute(make_config(darl, warm_start__steps=50), prepare=prepare)
    self.assertIsInstance(ended.error, loop.Interrupted)
    self.assertEqual(ended.summary["status"], "interrupted")
    self.assertEqual(ended.summary["generated"], 0)
    # There is no state of the learner yet.
    self.assertFalse((ended.run.workdir / "checkpoints").exists())
    assert_nothing_is_left(self)

  def _assert_failed(self, ended: Ended, cause: type, text: str):
    [found] = [e for e in ended.causes() if isinstance(e, cause)][-1:]
    self.assertIn(text, str(found))
    shown = "".join(traceback.format_exception(ended.error))
    self.assertIn(f"{cause.__name__}: {found}", shown)
    self.assertNotIsInstance(ended.error, loop.Interrupted)
    self.assertEqual(ended.summary["status"], "failed")
    self.assertIn(text, ended.summary["error"])
    assert_accounts_add_up(self, ended)
    assert_nothing_is_left(self)

  def _assert_fault_ends(self, module, fault, cause, text, **keywords):
    """``fault(run, boom)`` arranges that ``boom()`` raises somewhere."""
    raised_at = []

    def boom(*_, **__):
      raised_at.append(time.monotonic())
      raise cause(text)

    ended = execute(
      make_config(module, num_steps=50),
      prepare=lambda run: fault(run, boom),
      **keywords,
    )
    self._assert_failed(ended, cause, text)
    self.assertLess(ended.ended_at - raised_at[0], ENDS_WITHIN_S)
    assert_checkpoint_is_current(self, ended)
    return ended

  @parameterized.parameters(sync_grpo, darl)
  def test_the_sampler_fails(self, module):
    def fault(run, boom):
      decoder = run.actor._engine._decoder
      decode = decoder.decode

      def decode_until_version_1(*arguments):
        return (decode if run.ring.version < 1 else boom)(*arguments)

      decoder.decode = decode_until_version_1
      decoder.compiles = dict

    ended = self._assert_fault_ends(
      module, fault, ZeroDivisionError, "the device is gone"
    )
    self.assertGreater(ended.summary["trained"], 0)

  @parameterized.parameters(sync_grpo, darl)
  def test_a_delivery_fails(self, module):
    def fault(run, boom):
      run.rewards.add = boom

    self._assert_fault_ends(module, fault, LookupError, "no such meter")

  def test_the_learner_fails(self):
    def fault(run, boom):
      run.learner.step = boom

    ended = self._assert_fault_ends(
      darl, fault, FloatingPointError, "the step diverged"
    )
    self.assertEqual(ended.summary["trained"], 0)

  def test_no_verifier_comes_up(self):
    ended = execute(make_config(darl), verifier="Broken")
    self._assert_failed(ended, VerifierStartError, "no such grader")
    self.assertIsInstance(ended.error, (RingFailed, RuntimeError))

  @parameterized.parameters(sync_grpo, darl)
  def test_nothing_to_learn_from(self, module):
    timeout_s = 5.0  # The first batch must compile within it.
    ended = execute(
      make_config(module, replay__timeout_s=timeout_s), verifier="Constant"
    )
    self.assertIsInstance(ended.error, Starved)
    self.assertLess(ended.summary["train_seconds"], timeout_s + ENDS_WITHIN_S)
    self.assertIn("most groups have equal rewards", ended.summary["error"])
    self.assertEqual(ended.summary["status"], "failed")
    self.assertGreater(ended.summary["dropped_reasons"]["dead_group"], 0)
    assert_accounts_add_up(self, ended)
    assert_nothing_is_left(self)


class WatchTest(parameterized.TestCase):
  """What the numerical watch does to a run."""

  def _spoiled(self, *, steps, **changes) -> Ended:
    """A run whose batches have a NaN in these steps."""
    build = loop.batching.build_batch

    def spoil(*arguments, version, **keywords):
      batch, *rest = build(*arguments, version=version, **keywords)
      if version + 1 in steps:
        advantages = np.where(batch.loss_mask, np.nan, batch.advantages)
        batch = dataclasses.replace(
          batch, advantages=advantages.astype(np.float32)
        )
      return batch, *rest

    with mock.patch.object(loop.batching, "build_batch", spoil):
      return execute(make_config(sync_grpo, num_steps=5, **changes))

  def test_a_step_that_is_not_finite_is_survived_and_written_down(self):
    ended = self._spoiled(steps={2})
    self.assertIsNone(ended.error)
    self.assertEqual(
      [row["train/non_finite"] for row in ended.steps], [0, 1, 0, 0, 0]
    )
    for leaf in jax.tree.leaves(ended.run.state):
      self.assertTrue(np.all(np.isfinite(leaf)))
    folder = ended.run.workdir / "non_finite"
    self.assertEqual(
      sorted(path.name for path in folder.iterdir()),
      ["step_2.json", "step_2.npz"],
    )
    with np.load(folder / "step_2.npz") as arrays:
      self.assertTrue(np.any(np.isnan(arrays["advantages"])))

  def test_too_many_in_a_row_end_the_run_which_is_saved(self):
    ended = self._spoiled(steps={1, 3, 4}, watch__stop_after=2)
    self.assertIsInstance(ended.error, loop.Alarmed)
    self.assertRegex(
      str(ended.error), "^step 4.*not finite.*watch.stop_on has non_finite"
    )
    self.assertEqual(ended.summary["status"], "failed")
    self.assertEqual(ended.summary["steps"], 4)
    self.assertEqual(int(ended.run.state.step), 4)
    self.assertEqual(ended.run.checkpoints.saved_step, 4)
    assert_accounts_add_up(self, ended)
    assert_nothing_is_left(self)

  def test_alarms_are_shown_and_when_they_are_over(self):
    said = []

    def prepare(run):
      observe = iter([("begins", "a"), ("lasts", "b"), ("ends", "c")])
      run.watch.observe = lambda step, metrics: [
        watch.Alarm("ess_collapse", kind, text)
        for kind, text in [next(observe)]
      ]
      run.progress.alarm = lambda text: said.append(("alarm", text))
      message = run.progress.message
      run.progress.message = lambda text: (
        said.append(("message", text)) if text == "c" else message(text)
      )

    self.assertIsNone(execute(make_config(sync_grpo), prepare=prepare).error)
    self.assertEqual(said, [("alarm", "a"), ("alarm", "b"), ("message", "c")])
