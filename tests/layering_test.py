"""Who may import whom, and where a module may live.

A module of darl_jax imports strictly lower layers, or its own package. So the
stages never import each other: they meet only in loop.py, through types.py.
"""

import ast
import pathlib

import pytest
from absl.testing import parameterized

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "darl_jax"

LAYERS = (
  ("types", "config", "numerics"),
  ("kernels", "objectives"),
  ("sharding", "models"),
  ("prompts", "rollout", "rewards", "replay", "learner"),
  (
    "checkpoint",
    "metrics",
    "evaluate",
    "summary",
    "planner",
    "parity",
    "generate",
    "watch",
    "workdir",
    "rescoring",
    "rollback",
  ),
  ("loop",),
)
STAGES = LAYERS[3]
LAYER_OF = {name: i for i, names in enumerate(LAYERS) for name in names}

# The repository's own code above the package, which it must not know.
OUTSIDE = ("configs", "launch", "tests", "bench")


def imported_names(source: str, module: str, is_package: bool) -> set[str]:
  """Full dotted names that ``source`` imports, wherever it does so."""
  names = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        parents = module.split(".")
        drop = node.level - 1 if is_package else node.level
        parents = parents[: len(parents) - drop]
        base = ".".join([*parents, base] if base else parents)
      names.update(f"{base}.{alias.name}" for alias in node.names)
  return names


def violations(root: pathlib.Path) -> list[str]:
  """What is wrong with the imports and the places of root/darl_jax."""
  problems = []
  for path in sorted((root / PACKAGE).rglob("*.py")):
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    parts = parts[:-1] if is_package else parts
    module = ".".join(parts)
    if parts[-1] in ("utils", "util", "helpers", "common", "misc"):
      problems.append(f"{module}: a name that says nothing")
    if len(parts) > 1 and parts[1] not in LAYER_OF:
      problems.append(f"{module}: belongs to no layer")
      continue
    for name in sorted(imported_names(path.read_text(), module, is_package)):
      top, *rest = name.split(".")
      if top in OUTSIDE:
        problems.append(f"{module} imports {name}: outside the package")
      if top != PACKAGE:
        continue
      target = rest[0] if rest else ""
      if len(parts) == 1:
        problems.append(f"{module} imports {name}: the root stays empty")
      elif target not in LAYER_OF:
        problems.append(f"{module} imports {name}: no such layer")
      elif target == parts[1]:
        continue
      elif LAYER_OF[target] >= LAYER_OF[parts[1]]:
        problems.append(f"{module} imports {name}: not a lower layer")
  return problems


class RepositoryTest(parameterized.TestCase):
  def test_every_module_keeps_the_rules(self):
    self.assertEqual(violations(ROOT), [])

  def test_sees_the_modules(self):
    # Guards the test above against looking in the wrong place.
    found = {path.stem for path in (ROOT / PACKAGE).rglob("*.py")}
    self.assertContainsSubset({"types", "config", "metrics", "ref"}, found)

  def test_every_package_can_be_imported_and_installed(self):
    for path in (ROOT / PACKAGE).rglob("*.py"):
      self.assertTrue((path.parent / "__init__.py").exists(), path.parent)

  def test_no_stage_imports_another(self):
    for stage in STAGES:
      others = {f"{PACKAGE}.{other}" for other in STAGES if other != stage}
      for path in (ROOT / PACKAGE / stage).rglob("*.py"):
        source = path.read_text()
        for name in imported_names(source, f"{PACKAGE}.{stage}.x", False):
          prefix = ".".join(name.split(".")[:2])
          self.assertNotIn(prefix, others, f"{path} imports {name}")

  def test_tests_mirror_the_package(self):
    # tests/<package>/<module>_test.py tests darl_jax/<package>/<module>.py.
    for path in sorted((ROOT / "tests").rglob("*_test.py")):
      folder = path.relative_to(ROOT / "tests").parent
      if folder == pathlib.Path("."):
        continue  # Tests of the whole, such as this one.
      self.assertTrue((ROOT / PACKAGE / folder).is_dir(), path)


class CheckerTest(parameterized.TestCase):
  """The checker itself: each forbidden thing is seen, each allowed one not."""

  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.root = tmp_path

  def _violations(self, path: str, source: str) -> list[str]:
    file = self.root / PACKAGE / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    return violations(self.root)

  @parameterized.parameters(
    ("learner/step.py", "from darl_jax.replay import ring"),
    ("learner/step.py", "from darl_jax import replay"),
    ("learner/step.py", "import darl_jax.replay.ring as r"),
    ("learner/step.py", "from ..replay import ring"),
    ("learner/step.py", "from .. import replay"),
    ("learner/__init__.py", "from ..rollout.engine import Engine"),
    ("learner/step.py", "def f():\n  from darl_jax.rewards import pool"),
    ("learner/step.py", "if TYPE_CHECKING:\n  import darl_jax.prompts"),
    ("learner/step.py", "from darl_jax import loop"),
    ("learner/step.py", "from darl_jax import metrics"),
    ("config.py", "from darl_jax import types"),
    ("models/transformer.py", "from darl_jax.sharding import rules"),
    ("kernels/a/ops.py", "from darl_jax.objectives import log_ratio"),
    ("metrics.py", "from darl_jax import evaluate"),
    ("learner/step.py", "from configs import darl"),
    ("learner/step.py", "import launch.main"),
    ("learner/step.py", "import darl_jax"),
    ("__init__.py", "from darl_jax import loop"),
    ("mystery/step.py", ""),
    ("mystery.py", ""),
    ("learner/utils.py", ""),
    ("utils.py", ""),
  )
  def test_refuses(self, path, source):
    self.assertNotEmpty(self._violations(path, source))

  @parameterized.parameters(
    ("learner/step.py", "from darl_jax import config, numerics, types"),
    ("learner/step.py", "from darl_jax.learner import state"),
    ("learner/step.py", "from . import state"),
    ("learner/__init__.py", "from .state import State"),
    ("learner/step.py", "from darl_jax.kernels.token_logprob import ops"),
    ("kernels/a/ops.py", "from darl_jax.kernels.a import ref"),
    ("loop.py", "from darl_jax import checkpoint, metrics\nimport jax"),
    ("learner/step.py", "import types\nimport numpy as np"),
  )
  def test_allows(self, path, source):
    self.assertEqual(self._violations(path, source), [])
