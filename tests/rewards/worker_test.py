import json
import os
import pathlib
import subprocess
import sys
import textwrap

from absl.testing import parameterized

from darl_jax.rewards import sandbox

ENVIRONMENT = os.environ | {
  "PYTHONPATH": os.pathsep.join(
    [*filter(None, sys.path), str(pathlib.Path(__file__).parent)]
  )
}


def run_worker(*messages, **hello) -> subprocess.CompletedProcess:
  """Runs a worker on these messages, until its stdin ends."""
  hello = {
    "task": {"verifier": "hostile:Hostile"},
    "memory_limit_mb": 2048,
    "time_limit_s": 10.0,
    "parent": os.getpid(),
  } | hello
  return subprocess.run(
    [sys.executable, "-P", "-m", "darl_jax.rewards.worker"],
    input="".join(json.dumps(message) + "\n" for message in (hello, *messages)),
    capture_output=True,
    text=True,
    env=ENVIRONMENT,
    timeout=60,
  )


class WorkerTest(parameterized.TestCase):
  def test_protocol(self):
    done = run_worker(
      [["score 1", {}], ["raise no", {}]],
      [],
      [["score nan", {}], ["text x", {}]],
    )
    self.assertEqual(done.returncode, 0)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    self.assertTrue(lines[0]["ready"])
    self.assertEqual(
      set(lines[0]["protections"]), set(sandbox.Protections._fields)
    )
    self.assertEqual(lines[1], [0, 1.0, None])
    self.assertEqual(lines[2], [1, None, "error: RuntimeError: no"])
    self.assertEqual(str(lines[3]), "[0, nan, None]")
    self.assertEqual(lines[4], [1, None, "bad_score: 'x'"])

  def test_what_a_scorer_prints_goes_to_stderr(self):
    done = run_worker([["say hello", {}]])
    self.assertEqual(done.stdout.splitlines()[1:], ["[0, 1.0, null]"])
    self.assertEqual(done.stderr.count("hello"), 3)

  def test_cpu_time_of_one_answer_is_limited(self):
    # The second line of defence: here nobody else watches.
    done = run_worker([["spin", {}]], time_limit_s=0.1)
    self.assertEqual(done.returncode, -24)  # SIGXCPU

  def test_cpu_time_of_many_answers_is_not(self):
    burn = [["burn 0.3", {}]] * 8
    done = run_worker(burn, time_limit_s=0.05)
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertLen(done.stdout.splitlines(), 9)

  def test_ends_when_its_parent_is_another(self):
    done = run_worker([["score 1", {}]], parent=1)
    self.assertEqual(done.returncode, 1)
    self.assertIn("is gone", done.stderr)

  def test_imports_nothing_heavy(self):
    program = """
      import sys
      import darl_jax.rewards.worker
      heavy = {"jax", "numpy", "absl", "reasoning_gym"} & set(sys.modules)
      sys.exit(", ".join(heavy) or 0)
    """
    subprocess.run(
      [sys.executable, "-c", textwrap.dedent(program)],
      check=True,
      env=ENVIRONMENT,
      timeout=60,
    )
