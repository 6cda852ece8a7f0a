"""The program that people start: what it says, how it ends, what it leaves."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from absl.testing import parameterized

from darl_jax import loop
from darl_jax.checkpoint import store
from launch import endings
from tests.fixtures import tiny_tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "fixtures" / "tiny_config.py"

# Of a busy machine that compiles everything.
STARTS_WITHIN_S = 120.0
ENDS_WITHIN_S = 10.0

_folder: pathlib.Path  # Of this module's runs.


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
  global _folder
  _folder = tmp_path_factory.mktemp("launch")


def start(*arguments: str, path: str = "") -> subprocess.Popen:
  """Starts launch/main.py; ``path`` goes before the others for imports."""
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join(filter(None, (path, str(ROOT)))),
    # The runs here have the same programs, and compiling takes most of them.
    "JAX_COMPILATION_CACHE_DIR": str(_folder / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  }
  return subprocess.Popen(
    [sys.executable, "launch/main.py", *arguments],
    cwd=ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process: subprocess.Popen, timeout_s: float) -> tuple[int, str, str]:
  """Exit status, stdout and stderr; kills what does not end in time."""
  try:
    stdout, stderr = process.communicate(timeout=timeout_s)
  except subprocess.TimeoutExpired:
    process.kill()
    _, stderr = process.communicate()
    raise AssertionError(f"still runs after {timeout_s} s:\n{stderr}") from None
  return process.returncode, stdout, stderr


def summary_of(workdir: pathlib.Path) -> dict:
  return json.loads((workdir / "summary.json").read_text())


class MistakesTest(parameterized.TestCase):
  """A wrong request is answered in words, and with status 2."""

  def _assert_refused(self, *arguments, says, status=2) -> str:
    code, _, stderr = finish(start(*arguments), STARTS_WITHIN_S)
    self.assertNotIn("Traceback", stderr)
    for words in says:
      self.assertIn(words, stderr)
    self.assertEqual(code, status)

  def test_all_mistakes_are_named_at_once(self):
    self._assert_refused(
      "--config.replay.metric=varianc",
      "--config.prompts.dataset=chain_summ",
      "--config.learner.rows=47",
      "--config.mesh.train.data=2",
      says=(
        "ConfigError: 3 problems in the config:\n",
        "* replay.metric = 'varianc' is not one of variance, ",
        "Try 'variance'.",
        "* prompts.dataset = 'chain_summ' is not a reasoning-gym dataset. "
        "Try 'chain_sum'.",
        "* learner.rows = 47 do not split over ",
        "Nearest that do: 46, 48.",
      ),
    )

  def test_no_such_field(self):
    self._assert_refused(
      "--config.num_step=3",
      says=("ConfigError: no such field", 'Did you mean "num_steps"'),
    )

  def test_no_such_file(self):
    self._assert_refused(
      "--config=configs/nope.py", says=("ConfigError", "configs/nope.py")
    )

  @parameterized.parameters(
    ("configs/finetune.py", "no model is named"),
    ("configs/finetune.py:./nope", "'./nope' is no folder"),
    ("configs/finetune.py:tests", "config.json: No such file"),
  )
  def test_no_such_model(self, config, says):
    self._assert_refused(f"--config={config}", says=("ConfigError", says))

  def test_a_model_that_was_not_fetched(self):
    self._assert_refused(
      "--config=configs/smollm2.py",
      "--config.model.checkpoint=runs/none.gguf",
      says=("runs/none.gguf is no file", "python launch/fetch_smollm2.py"),
    )

  @parameterized.parameters(
    ("--config.num_steps=many", ("config.num_steps=many",)),
    ("extra", ("not understood: extra",)),
  )
  def test_flags_that_absl_refuses(self, argument, says):
    self._assert_refused(argument, says=says)


class EndingsTest(parameterized.TestCase):
  @parameterized.parameters(
    (loop.Interrupted, signal.SIGTERM, 0),
    (loop.Interrupted, signal.SIGINT, 130),
    # Asked to stop, it could not save.
    (store.CheckpointFailed, signal.SIGTERM, 1),
    (loop.Starved, signal.SIGTERM, 1),
    (loop.Starved, None, 1),
  )
  def test_a_run_that_is_not_saved_is_no_success(self, error, asked_by, status):
    self.assertEqual(endings.tell(error("why"), asked_by=asked_by), status)


class RunTest(parameterized.TestCase):
  """Runs that start."""

  def setUp(self):
    super().setUp()
    folder = tempfile.mkdtemp(dir=_folder)
    self.workdir = pathlib.Path(folder) / "run"

  def _start(
    self, *changes: str, config=TINY, flags=(), **keywords
  ) -> subprocess.Popen:
    process = start(
      *flags,
      f"--config={config}",
      f"--workdir={self.workdir}",
      *(f"--config.{change}" for change in changes),
      **keywords,
    )
    self.addCleanup(process.kill)
    return process

  def _wait_for(self, process: subprocess.Popen, file: str, text: str) -> None:
    """Until a file of the run contains ``text``."""
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline:
      with contextlib.suppress(FileNotFoundError):
        if text in (self.workdir / file).read_text():
          return
      if process.poll() is not None:
        self.fail(f"ended early:\n{process.communicate()}")
      time.sleep(0.02)
    self.fail(f"no {text!r} in {file}")

  def _signal(self, process: subprocess.Popen, signum: signal.Signals) -> str:
    """Sends a signal and asserts that the run ends as asked; its stderr."""
    family = psutil.Process(process.pid).children(recursive=True)
    self.assertNotEmpty(family)  # The verifier's workers.
    process.send_signal(signum)
    status, _, stderr = finish(process, ENDS_WITHIN_S)
    self.assertEqual(status, 0 if signum == signal.SIGTERM else 130, stderr)
    self.assertNotIn("Traceback", stderr)
    self.assertIn(
      f"Interrupted: stopped on request; see {self.workdir}", stderr
    )
    _, alive = psutil.wait_procs(family, timeout=1.0)
    self.assertEmpty(alive)
    self.assertEqual(summary_of(self.workdir)["status"], "interrupted")
    return stderr

  def test_a_run_and_then_another_in_its_folder(self):
    changes = ("num_steps=1", "warm_start.steps=60", "replay.min_batch=1")
    status, stdout, stderr = finish(self._start(*changes), STARTS_WITHIN_S)
    self.assertEqual(status, 0, stderr)
    self.assertIn("accuracy", stdout)
    self.assertNotIn("Traceback", stderr)
    summary = summary_of(self.workdir)
    self.assertEqual(summary["status"], "complete")
    self.assertEqual(summary["steps"], 1)
    before = (self.workdir / "summary.json").read_text()
    status, _, stderr = finish(self._start(*changes), STARTS_WITHIN_S)
    self.assertEqual(status, 2)
    self.assertIn(f"workdir = {self.workdir} already holds a run", stderr)
    self.assertNotIn("Traceback", stderr)
    self.assertEqual((self.workdir / "summary.json").read_text(), before)

  def test_any_published_model(self):
    model = self.workdir.parent / "model"
    tiny_tokenizer.copy_model("qwen3-qknorm", model)
    process = self._start(
      "num_steps=0",
      "learner.warmup_steps=0",
      "rollout.dtype=float32",
      "prompts.dataset=basic_arithmetic",
      "prompts.num_items=300",
      "prompts.max_tokens=64",
      "rollout.max_response_tokens=32",
      "evaluate.num_prompts=6",
      config=f"configs/finetune.py:{model}",
    )
    status, _, stderr = finish(process, STARTS_WITHIN_S)
    self.assertEqual(status, 0, stderr)
    config = json.loads((self.workdir / "config.json").read_text())
    self.assertEqual(config["model"]["checkpoint"], str(model))
    self.assertEqual(config["model"]["vocab_size"], 320)
    names = {path.name for path in self.workdir.iterdir()}
    self.assertContainsSubset(
      {"tokenizer.json", "tokenizer_config.json", "generation_config.json"},
      names,
    )

  @parameterized.parameters(
    (signal.SIGINT, ("replay.max_staleness=0", "replay.num_snapshots=1")),
    (signal.SIGTERM, ()),
  )
  def test_stopped_while_training(self, signum, changes):
    process = self._start(
      "num_steps=100000",
      "warm_start.steps=60",
      "replay.min_batch=1",
      "evaluate.every=100000",
      *changes,
    )
    self._wait_for(process, "metrics.jsonl", '"step": 3,')
    self._signal(process, signum)
    summary = summary_of(self.workdir)
    self.assertGreaterEqual(summary["steps"], 3)
    newest = max(path.name for path in (self.workdir / "checkpoints").iterdir())
    self.assertEqual(newest, f"step_{summary['steps']:08d}")
    self.assertEqual(
      summary["generated"],
      summary["trained"]
      + summary["expired_unused"]
      + summary["dropped_unused"]
      + summary["in_ring_unused"]
      + summary["awaiting_verification"],
    )

  def test_killed_and_started_again(self):
    changes = (
      "warm_start.steps=60",
      "replay.min_batch=1",
      "checkpoint.every=5",
    )
    process = self._start("num_steps=100000", *changes)
    self._wait_for(process, "metrics.jsonl", '"step": 12,')
    process.kill()
    process.communicate()
    status, stdout, stderr = finish(
      self._start("num_steps=300", *changes), STARTS_WITHIN_S
    )
    self.assertEqual(status, 0, stderr)
    self.assertIn("since it was saved: num_steps was 100000, and is 3", stdout)
    self.assertIn("goes on after step ", stdout)
    summary = summary_of(self.workdir)
    self.assertEqual((summary["steps"], summary["resumed"]), (300, 1))
    rows = (self.workdir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(row)["step"] for row in rows if "train/loss" in row]
    self.assertEqual(steps, list(range(1, 301)))

  def test_recorded_and_replayed(self):
    process = self._start(
      "num_steps=9",
      "warm_start.steps=60",
      "replay.min_batch=1",
      flags=["--record"],
    )
    status, _, stderr = finish(process, STARTS_WITHIN_S)
    self.assertEqual(status, 0, stderr)
    schedule = self.workdir / "schedule_00000000.jsonl"
    again = start(f"--replay={schedule}", f"--workdir={self.workdir}-again")
    status, stdout, stderr = finish(again, STARTS_WITHIN_S)
    self.assertEqual(status, 0, stderr)
    self.assertIn("events were done again, bit for bit as recorded", stdout)
    lines = schedule.read_text().splitlines()
    at = next(
      i for i, line in enumerate(lines) if line.startswith('["push", 5')
    )
    lines[at] = '["push", 5, 1]'
    schedule.write_text("\n".join([*lines, ""]))
    again = start(f"--replay={schedule}", f"--workdir={self.workdir}-other")
    status, _, stderr = finish(again, STARTS_WITHIN_S)
    self.assertEqual(status, 1)
    self.assertIn(f"ReplayDiverged: event {at} of the schedule: ", stderr)
    self.assertNotIn("Traceback", stderr)

  def test_stopped_during_the_warm_start(self):
    process = self._start("warm_start.steps=1000000")
    self._wait_for(process, "config.json", "}\n")
    time.sleep(0.5)  # Into the stage, where it compiles or steps.
    self._signal(process, signal.SIGINT)
    summary = summary_of(self.workdir)
    self.assertEqual(summary["steps"], 0)
    self.assertEqual(summary["generated"], 0)

  def test_a_failure_in_a_worker_ends_the_run(self):
    # Python imports this in every process that it finds it in.
    (self.workdir.parent / "sitecustomize.py").write_text(
      "import sys\n"
      "if 'darl_jax.rewards.worker' in sys.orig_argv:\n"
      "  sys.exit('the grader is not installed')\n"
    )
    process = self._start(path=str(self.workdir.parent))
    status, _, stderr = finish(process, STARTS_WITHIN_S)
    self.assertEqual(status, 1)
    self.assertIn("VerifierStartError: ", stderr)
    self.assertIn("the grader is not installed", stderr)
    self.assertIn("Traceback", stderr)
    summary = summary_of(self.workdir)
    self.assertEqual(summary["status"], "failed")
    self.assertIn("the grader is not installed", summary["error"])

  @parameterized.parameters(signal.SIGINT, signal.SIGTERM)
  def test_asked_while_it_imports(self, signum):
    # Python imports this before the program, which then waits in an import.
    (self.workdir.parent / "sitecustomize.py").write_text(
      "import sys, time\n"
      "class Finder:\n"
      "  def find_spec(name, *_):\n"
      "    if name == 'absl':\n"
      "      print('importing', flush=True)\n"
      "      time.sleep(600)\n"
      "sys.meta_path.insert(0, Finder)\n"
    )
    process = self._start(path=str(self.workdir.parent))
    self.assertEqual(process.stdout.readline(), "importing\n")
    process.send_signal(signum)
    status, _, stderr = finish(process, ENDS_WITHIN_S)
    self.assertEqual((status, stderr), (128 + signum, ""))

  def test_asked_twice_it_ends_at_once(self):
    process = self._start(
      "num_steps=100000",
      "warm_start.steps=60",
      "replay.min_batch=1",
      "evaluate.every=100000",
    )
    self._wait_for(process, "metrics.jsonl", '"step": 3,')
    family = psutil.Process(process.pid).children(recursive=True)
    # Both are pending together: Python handles the lower number first.
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    status, _, stderr = finish(process, ENDS_WITHIN_S)
    self.assertEqual(status, 128 + signal.SIGTERM, stderr)
    self.assertNotIn("Traceback", stderr)
    self.assertFalse((self.workdir / "summary.json").exists())
    _, alive = psutil.wait_procs(family, timeout=5.0)
    self.assertEmpty(alive)
