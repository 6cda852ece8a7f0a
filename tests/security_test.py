"""Nothing listens, and nothing reads what could run: see docs/security.md."""

import pathlib
import re

from absl.testing import parameterized

from tests.layering_test import imported_names

ROOT = pathlib.Path(__file__).resolve().parent.parent
LISTENS = {"asyncio", "http", "socket", "socketserver", "xmlrpc"}
RUNS_WHAT_IT_READS = {"dill", "marshal", "pickle", "shelve", "torch", "yaml"}
# Pickles the arguments of its own child processes.
MULTIPROCESSING = {"darl_jax/planner/plan.py"}


def problems(path: str, source: str) -> list[str]:
  """What the module at ``path`` should not do."""
  tops = {n.partition(".")[0] for n in imported_names(source, "x", False)}
  found = sorted(tops & (LISTENS | RUNS_WHAT_IT_READS))
  if "multiprocessing" in tops and path not in MULTIPROCESSING:
    found.append("multiprocessing")
  for pattern in (r"(?<![\w.])(eval|exec)\(", r"allow_pickle=True"):
    found += [match[0] for match in re.finditer(pattern, source)]
  return [f"{path}: {what}" for what in found]


class SecurityTest(parameterized.TestCase):
  def test_no_module_listens_or_runs_what_it_reads(self):
    paths = [
      path
      for folder in ("darl_jax", "launch", "configs")
      for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    self.assertGreater(len(paths), 50)
    for path in paths:
      name = path.relative_to(ROOT).as_posix()
      self.assertEqual(problems(name, path.read_text("utf-8")), [])

  @parameterized.parameters(
    "import pickle",
    "from http import server",
    "def f():\n  import socket",
    "import multiprocessing",
    "x = eval(y)",
    "np.load(f, allow_pickle=True)",
  )
  def test_sees(self, source):
    self.assertLen(problems("darl_jax/x.py", source), 1)

  @parameterized.parameters(
    "model.eval()", "import socketry", "literal_eval(x)"
  )
  def test_allows(self, source):
    self.assertEmpty(problems("darl_jax/x.py", source))
