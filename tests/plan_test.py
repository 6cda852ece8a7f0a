"""The planner as people start it: tables, JSON, mistakes, exit status."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from absl.testing import parameterized

from darl_jax.config import ConfigError
from darl_jax.planner import topology

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = "--config=tests/fixtures/tiny_config.py"


def run(*arguments: str, path: str = "") -> subprocess.CompletedProcess:
  """Runs launch/plan.py; ``path`` goes before the others for imports."""
  # Which a libtpu in this process sets, and which would find it in the other.
  inherited = {
    name: value
    for name, value in os.environ.items()
    if name != "TPU_LIBRARY_PATH"
  }
  environment = inherited | {
    "PYTHONPATH": os.pathsep.join(filter(None, (path, str(ROOT)))),
    "COLUMNS": "200",
  }
  return subprocess.run(
    [sys.executable, "launch/plan.py", *arguments],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )


class MistakesTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.folder = tmp_path

  def _assert_refused(self, result, *says):
    self.assertEqual(result.returncode, 2, result.stderr)
    self.assertNotIn("Traceback", result.stderr)
    self.assertEmpty(result.stdout)
    for words in says:
      self.assertIn(words, result.stderr)

  def test_all_at_once(self):
    self._assert_refused(
      run(
        TINY,
        "--topology=v5p:4x4",
        "--config.replay.metric=varianc",
        "--config.learner.rows=7",
        "--config.mesh.train.fsdp=2",
      ),
      "4 problems",
      "'varianc'",
      "learner.rows = 7",
      "Try v5p:4x4x4",
    )

  def test_no_such_flag_or_file(self):
    self._assert_refused(run(TINY, "--toplogy=v5e:2x2"), "toplogy")
    self._assert_refused(run("--config=nowhere.py"), "nowhere.py")

  def test_too_few_devices(self):
    self._assert_refused(
      run(TINY, "--topology=v5e:2x2", "--config.mesh.train.data=4"),
      "need 4 + 1 = 5 devices, but 4 are attached",
    )

  def test_no_compiler(self):
    # Python finds this one before the one that is installed.
    (self.folder / "libtpu").mkdir()
    (self.folder / "libtpu" / "__init__.py").write_text("raise ImportError\n")
    self._assert_refused(
      run(TINY, "--topology=v5e:2x2", path=str(self.folder)),
      "pip install 'darl_jax[tpu]'",
    )


class PlanTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    try:
      topology.devices("v5e:2x2")
    except ConfigError as error:
      pytest.skip(str(error))

  def test_tables_and_success(self):
    result = run(TINY, "--topology=v5e:2x2")
    self.assertEqual(result.returncode, 0, result.stderr)
    for words in ("train_step", "decode", " left", "2 unused", "never run"):
      self.assertIn(words, result.stdout)

  def test_json_alone_on_stdout_where_something_does_not_fit(self):
    # An embedding of 12 GiB, where the chip has 16.
    result = run(
      TINY,
      "--topology=v5e:2x2",
      "--json",
      "--config.model.vocab_size=200000000",
    )
    self.assertEqual(result.returncode, 3, result.stderr)
    self.assertNotIn("Traceback", result.stderr)
    plan = json.loads(result.stdout)
    self.assertFalse(plan["fits"])
    by_name = {program["name"]: program for program in plan["programs"]}
    step = by_name["train_step"]
    self.assertFalse(step["fits"])
    self.assertGreater(step["total_bytes"], step["hbm_bytes"])
    self.assertNotEmpty(plan["suggestions"])
