import contextlib
import functools
import logging
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import time
from unittest import mock

import numpy as np
import psutil
import pytest
from absl.testing import parameterized

from darl_jax import types
from darl_jax.config import RewardsConfig
from darl_jax.rewards import pool

HOSTILE = {"verifier": "hostile:Hostile"}
NO_START = HOSTILE | {"arguments": {"start_s": 600.0}}
PATIENCE_S = 30.0  # For a busy machine; nothing here takes a tenth of it.
PROMPTLY_S = 10.0  # What takes two seconds at most on one that is not.


def make_config(**changes) -> RewardsConfig:
  fields = dict(
    workers=1,
    time_limit_s=10.0,
    memory_limit_mb=2048,
    partial_credit=0.5,
    overlong_penalty=0.0,
    overlong_buffer_tokens=0,
    require_isolation=False,
  )
  return RewardsConfig(**(fields | changes))


def make_group(
  group_id: int, responses, *, answer="x", finish=types.Finish.STOP
) -> types.TrajectoryGroup:
  prompt = types.Prompt(f"p{group_id}", np.arange(2), {"answer": answer})
  trajectories = []
  for response in responses:
    text = np.frombuffer(response.encode(), np.uint8).astype(np.int32)
    tokens = np.concatenate([prompt.tokens, text]).astype(np.int32)
    zeros = np.zeros(len(tokens), np.int32)
    trajectories.append(
      types.Trajectory(
        prompt_id=prompt.id,
        group_id=group_id,
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) >= 2,
        behavior_logprobs=zeros.astype(np.float32),
        behavior_entropy=zeros.astype(np.float32),
        policy_version=zeros,
        turn=zeros,
        finish=finish,
      )
    )
  return types.TrajectoryGroup(group_id, prompt, tuple(trajectories))


def decode(tokens: np.ndarray) -> str:
  return tokens.astype(np.uint8).tobytes().decode()


class Inbox:
  """What a pool handed back."""

  def __init__(self):
    self.groups: list[types.TrajectoryGroup] = []
    self.errors: list[BaseException] = []
    self.failed = threading.Event()

  def fail(self, error: BaseException) -> None:
    self.errors.append(error)
    self.failed.set()

  def rewards(self, group_id: int = 0) -> list[float | None]:
    (group,) = [g for g in self.groups if g.group_id == group_id]
    return [trajectory.reward for trajectory in group.trajectories]

  def failures(self, group_id: int = 0) -> tuple[str | None, ...]:
    (group,) = [g for g in self.groups if g.group_id == group_id]
    return group.failures


def wait_until(condition) -> None:
  deadline = time.monotonic() + PATIENCE_S
  while not condition():
    assert time.monotonic() < deadline, "waited in vain"
    time.sleep(0.01)


def children() -> list[psutil.Process]:
  return psutil.Process().children(recursive=True)


def scoring_process(verifiers: pool.VerifierPool) -> psutil.Process:
  """The only worker's; on Linux the last child of the one that we started."""
  process = psutil.Process(verifiers._slots[0].worker._process.pid)
  return [process, *process.children()][-1]


class PoolTestCase(parameterized.TestCase):
  """Pools whose workers obey orders, and what they delivered."""

  def setUp(self):
    super().setUp()
    # Workers import what this process can.
    here = str(pathlib.Path(__file__).parent)
    self.enter_context(mock.patch.object(sys, "path", [*sys.path, here]))
    self.before = {child.pid for child in children()}
    self.inbox = Inbox()

  def tearDown(self):
    super().tearDown()
    left = [c for c in children() if c.pid not in self.before]
    self.assertEqual(left, [], "a test left child processes")
    for thread in threading.enumerate():
      if "verifier" in thread.name:
        thread.join(PATIENCE_S)
        self.assertFalse(thread.is_alive(), thread.name)

  @contextlib.contextmanager
  def pool(self, *, task=HOSTILE, deliver=None, **changes):
    with pool.VerifierPool(
      make_config(**changes),
      task=task,
      decode=decode,
      fail=self.inbox.fail,
    ) as verifiers:
      # Every test hands on to one place.
      verifiers.submit = functools.partial(
        verifiers.submit, deliver=deliver or self.inbox.groups.append
      )
      yield verifiers

  def score(self, *responses: str, **changes) -> dict[str, float]:
    """Verifies one group, and returns the metrics."""
    with self.pool(**changes) as verifiers:
      verifiers.submit([make_group(0, responses)])
      verifiers.join(PATIENCE_S)
      self.assertEmpty(self.inbox.errors)
      return verifiers.metrics()


class PoolTest(PoolTestCase):
  def test_rewards(self):
    metrics = self.score("score 1", "score 0.99", "score 0.98", "score 0")
    self.assertEqual(self.inbox.rewards(), [1.0, 1.0, 0.49, 0.0])
    self.assertEqual(self.inbox.failures(), (None,) * 4)
    self.assertEqual(metrics["scored"], 4)
    self.assertEqual(metrics["queued"], 0)
    self.assertGreater(metrics["seconds"], 0)

  def test_everything_else_of_a_group_is_kept(self):
    group = make_group(7, ["score 1"])
    with self.pool() as verifiers:
      verifiers.submit([group])
      verifiers.join(PATIENCE_S)
    (verified,) = self.inbox.groups
    self.assertIs(verified.prompt, group.prompt)
    self.assertEqual(verified.group_id, 7)
    self.assertIs(verified.trajectories[0].tokens, group.trajectories[0].tokens)
    self.assertIsNone(group.trajectories[0].reward)

  @parameterized.parameters("sleep 600", "spin")
  def test_a_hang_is_killed_and_the_rest_is_scored(self, order):
    metrics = self.score(
      "score 1", order, "score 0", order, "score 1", time_limit_s=1.0
    )
    self.assertEqual(self.inbox.rewards(), [1.0, None, 0.0, None, 1.0])
    self.assertEqual(
      self.inbox.failures(), (None, "timeout", None, "timeout", None)
    )
    self.assertEqual(metrics["timeouts"], 2)
    self.assertEqual(metrics["restarts"], 2)
    self.assertGreaterEqual(metrics["seconds"], 2.0)

  def test_the_limit_is_for_one_answer(self):
    self.score(*["sleep 0.4"] * 4, time_limit_s=1.4)
    self.assertEqual(self.inbox.failures(), (None,) * 4)

  def test_starting_does_not_count_as_answering(self):
    metrics = self.score(
      "sleep 600",
      "score 1",
      task=HOSTILE | {"arguments": {"start_s": 1.0}},
      time_limit_s=0.8,
    )
    self.assertEqual(self.inbox.failures(), ("timeout", None))
    self.assertEqual(metrics["timeouts"], 1)

  @parameterized.parameters(
    ("exit 7", "crash: exit code 7"),
    ("exit 0", "crash: exit code 0"),
    ("quit", "crash: exit code 1: quit"),
    ("spawn", "crash: exit code 4"),
    ("exhaust", "crash: exit code 1: MemoryError"),
    ("raise oh no", "error: RuntimeError: oh no"),
    ("score nan", "bad_score: nan"),
    ("score 7.0", "bad_score: 7.0"),
    ("score -0.1", "bad_score: -0.1"),
    ("score inf", "bad_score: inf"),
    ("text abc", "bad_score: 'abc'"),
    ("forge [0, 1.0", "crash: it wrote"),
    ("forge [5, 1.0, null]", "crash: it wrote"),
    ("forge {}", "crash: it wrote"),
    ("close", "crash: exit code 1: OSError"),
  )
  def test_a_failure_is_recorded_for_its_answer(self, order, failure):
    metrics = self.score("score 1", order, "score 0")
    self.assertEqual(self.inbox.rewards(), [1.0, None, 0.0])
    first, second, third = self.inbox.failures()
    self.assertIsNone(first)
    self.assertStartsWith(second, failure)
    self.assertIsNone(third)
    kind = failure.partition(":")[0]
    counter = {"crash": "crashes", "error": "errors"}.get(kind, "bad_scores")
    self.assertEqual(metrics[counter], 1)
    self.assertEqual(metrics["scored"], 2)
    self.assertEqual(metrics["restarts"], int(kind == "crash"))

  def test_long_reasons_are_cut(self):
    self.score("raise " + "x" * 10_000)
    self.assertLess(len(self.inbox.failures()[0]), 400)

  def test_stdout_is_not_the_channel(self):
    self.score("say [0, 0.0, null]", "score 1")
    self.assertEqual(self.inbox.rewards(), [1.0, 1.0])

  def test_stdin_is_not_the_channel(self):
    self.score("read", "score 1")
    self.assertEqual(self.inbox.rewards(), [1.0, 1.0])

  def test_memory_is_limited(self):
    metrics = self.score("fill", "score 1", memory_limit_mb=512)
    self.assertEqual(self.inbox.rewards(), [None, 1.0])
    self.assertStartsWith(self.inbox.failures()[0], "crash: exit code 1: Memor")
    self.assertEqual(metrics["restarts"], 1)

  def test_files_are_limited(self):
    self.score("write big", "score 1")  # In its scratch folder.
    self.assertIn("File too large", self.inbox.failures()[0])
    self.assertEqual(self.inbox.rewards(), [None, 1.0])

  def test_the_environment_is_small_and_keeps_the_string_hash(self):
    secret = {"SOME_TOKEN": "s", "PYTHONHASHSEED": "5"}
    with mock.patch.dict(os.environ, secret):
      environment = pool._environment()
    self.assertNotIn("SOME_TOKEN", environment)
    self.assertEqual(environment["PYTHONHASHSEED"], "5")
    self.assertEqual(environment["OMP_NUM_THREADS"], "1")

  def test_a_worker_that_cannot_start_fails_the_run_with_its_stderr(self):
    with self.pool(task={"verifier": "hostile:Broken"}) as verifiers:
      verifiers.submit([make_group(0, ["score 1"])])
      self.assertTrue(self.inbox.failed.wait(PATIENCE_S))
      with self.assertRaisesRegex(RuntimeError, "unobtainium"):
        verifiers.join(PATIENCE_S)
      with self.assertRaisesRegex(RuntimeError, "unobtainium"):
        verifiers.submit([make_group(1, ["score 1"])])
    (error,) = self.inbox.errors
    self.assertIsInstance(error, pool.VerifierStartError)
    self.assertRegex(str(error), "(?s)in 3 attempts.*Traceback.*unobtainium")
    self.assertEmpty(self.inbox.groups)

  def test_a_worker_that_never_becomes_ready_fails_the_run(self):
    with (
      mock.patch.object(pool, "_START_LIMIT_S", 0.3),
      self.pool(task=NO_START),
    ):
      self.assertTrue(self.inbox.failed.wait(PATIENCE_S))
    # A hang is not tried again: a second would last as long.
    self.assertRegex(
      str(self.inbox.errors[0]), "in 1 attempt; .* not ready after 0.3 s"
    )

  @parameterized.parameters(
    {"task": {}},
    {"task": {"verifier": "hostile"}},
    {"task": {"verifier": ":Hostile"}},
    {"task": {"verifier": 3}},
    {"task": {"verifier": "hostile:Hostile", "arguments": [1]}},
  )
  def test_a_task_that_names_no_verifier_is_refused_at_once(self, task):
    with (
      self.assertRaisesRegex(ValueError, "module:Class"),
      self.pool(task=task),
    ):
      pass

  def test_an_error_in_deliver_goes_to_fail(self):
    def deliver(group):
      raise KeyError(f"group {group.group_id}")

    with self.pool(deliver=deliver) as verifiers:
      verifiers.submit([make_group(i, ["score 1"]) for i in range(3)])
      self.assertTrue(self.inbox.failed.wait(PATIENCE_S))
      with self.assertRaisesRegex(RuntimeError, "group 0"):
        verifiers.join(PATIENCE_S)
    self.assertIsInstance(self.inbox.errors[0], KeyError)
    self.assertLen(self.inbox.errors, 1)

  def test_an_error_in_decode_goes_to_fail(self):
    with self.pool() as verifiers:
      group = make_group(0, ["score 1"])
      bad = np.full(len(group.trajectories[0].tokens), 255, np.int32)
      group = types.TrajectoryGroup(
        0,
        group.prompt,
        (types.dataclasses.replace(group.trajectories[0], tokens=bad),),
      )
      verifiers.submit([group])
      self.assertTrue(self.inbox.failed.wait(PATIENCE_S))
    self.assertIsInstance(self.inbox.errors[0], UnicodeDecodeError)

  def test_join_says_what_it_waits_for(self):
    with self.pool() as verifiers:
      verifiers.submit([make_group(3, ["score 1"])])
      verifiers.join(PATIENCE_S)
      verifiers.submit([make_group(4, ["sleep 600", "score 1"])])
      wait_until(lambda: "group 4" in verifiers._slots[0].activity)
      start = time.monotonic()
      with self.assertRaisesRegex(
        TimeoutError,
        r"Waited 0.5 s for .* 1 groups \(2 answers .*worker 0 scores an answer "
        r"of group 4, prompt p4 \(for \d+\.\d s\)",
      ):
        verifiers.join(0.5)
      self.assertGreaterEqual(time.monotonic() - start, 0.5)

  def test_join_says_that_a_worker_is_starting(self):
    with self.pool(task=NO_START) as verifiers:
      verifiers.submit([make_group(4, ["score 1"])])
      with self.assertRaisesRegex(TimeoutError, "worker 0 is starting"):
        verifiers.join(0.1)

  def test_join_says_that_deliver_hangs(self):
    entered, gate = threading.Event(), threading.Event()

    def deliver(group):
      entered.set()
      gate.wait()

    with self.pool(deliver=deliver) as verifiers:
      verifiers.submit([make_group(4, ["score 1"])])
      self.assertTrue(entered.wait(PATIENCE_S))
      with self.assertRaisesRegex(TimeoutError, "has group 4 delivered"):
        verifiers.join(0.1)
      # And close is not held up by it.
      start = time.monotonic()
      verifiers.close()
      self.assertLess(time.monotonic() - start, PROMPTLY_S)
      gate.set()

  def test_join_with_nothing_to_do_returns(self):
    with self.pool() as verifiers:
      verifiers.join(0.0)

  @parameterized.parameters("sleep 600", "spin", "sleep 0.01")
  def test_close_during_work(self, order):
    with self.pool(workers=2, time_limit_s=600.0) as verifiers:
      verifiers.submit([make_group(0, ["score 1"])])
      verifiers.join(PATIENCE_S)
      verifiers.submit([make_group(i, [order] * 64) for i in range(1, 99)])
      time.sleep(0.1)
      start = time.monotonic()
      verifiers.close()
      self.assertLess(time.monotonic() - start, PROMPTLY_S)
      verifiers.close()
      with self.assertRaisesRegex(RuntimeError, "closed"):
        verifiers.submit([make_group(9, ["score 1"])])
      with self.assertRaisesRegex(RuntimeError, "closed"):
        verifiers.join(1.0)
    self.assertEmpty(self.inbox.errors)  # Closing is no failure.

  def test_close_during_start(self):
    start = time.monotonic()
    with self.pool(task=NO_START):
      pass
    self.assertLess(time.monotonic() - start, PROMPTLY_S)
    self.assertEmpty(self.inbox.errors)

  def test_close_from_a_callback(self):
    done = threading.Event()

    def deliver(group):
      verifiers.close()
      done.set()

    with self.pool(deliver=deliver) as verifiers:
      verifiers.submit([make_group(0, ["score 1"])])
      self.assertTrue(done.wait(PATIENCE_S))

  def test_submit_does_not_wait(self):
    with self.pool(time_limit_s=600.0) as verifiers:
      groups = [make_group(i, ["sleep 600"]) for i in range(1000)]
      start = time.monotonic()
      verifiers.submit(groups)
      self.assertLess(time.monotonic() - start, PROMPTLY_S)

  def test_one_worker_delivers_in_order(self):
    with self.pool() as verifiers:
      for i in range(50):
        verifiers.submit([make_group(i, ["score 1"] * 3)])
      verifiers.join(PATIENCE_S)
    self.assertEqual([g.group_id for g in self.inbox.groups], [*range(50)])

  def test_a_hang_holds_up_only_its_group(self):
    with self.pool(workers=2, time_limit_s=600.0) as verifiers:
      groups = [make_group(i, ["score 1"]) for i in range(40)]
      verifiers.submit([make_group(100, ["sleep 600"])])
      wait_until(
        lambda: any("group 100" in s.activity for s in verifiers._slots)
      )
      verifiers.submit(groups[:1])
      verifiers.submit(groups[1:])
      wait_until(lambda: len(self.inbox.groups) == 40)
    self.assertNotIn(100, [group.group_id for group in self.inbox.groups])

  def test_groups_behind_a_crash_are_all_verified(self):
    with self.pool(workers=2) as verifiers:
      responses = ["score 1", "exit 3", "score 0"]
      verifiers.submit([make_group(i, responses) for i in range(6)])
      verifiers.join(PATIENCE_S)
      metrics = verifiers.metrics()
    self.assertEqual(sorted(g.group_id for g in self.inbox.groups), [*range(6)])
    for i in range(6):
      self.assertEqual(self.inbox.rewards(i), [1.0, None, 0.0])
    self.assertEqual(metrics["crashes"], 6)

  def test_groups_behind_a_crash_need_not_wait_for_the_new_worker(self):
    with self.pool(workers=2) as verifiers:
      wait_until(lambda: all(s.activity == "is idle" for s in verifiers._slots))
      verifiers._task = NO_START  # The new one never comes.
      crash = [make_group(0, ["exit 3"])]
      rest = [make_group(i, ["score 1"]) for i in range(1, 20)]
      verifiers.submit(crash + rest)
      verifiers.join(PATIENCE_S)
    self.assertLen(self.inbox.groups, 20)

  def test_a_worker_that_dies_idle_blames_no_answer(self):
    with self.pool() as verifiers:
      verifiers.submit([make_group(0, ["pid"])])
      verifiers.join(PATIENCE_S)
      scoring_process(verifiers).kill()
      worker = verifiers._slots[0].worker
      wait_until(lambda: not worker.alive())
      verifiers.submit([make_group(1, ["score 1"])])
      verifiers.join(PATIENCE_S)
      self.assertEqual(verifiers.metrics()["restarts"], 1)
    self.assertEqual(self.inbox.failures(1), (None,))

  def test_a_stopped_worker_is_a_time_out_even_while_it_is_written_to(self):
    with self.pool(time_limit_s=1.0) as verifiers:
      verifiers.submit([make_group(0, ["pid"])])
      verifiers.join(PATIENCE_S)
      scoring_process(verifiers).suspend()
      big = "score 1 " + " " * 2**20  # More than the pipe holds.
      verifiers.submit([make_group(1, [big, "score 1"])])
      verifiers.join(PATIENCE_S)
    self.assertEqual(self.inbox.failures(1), ("timeout", None))

  def test_long_answers_pass_whole(self):
    task = {"verifier": "hostile:Counting"}
    long = 'é\n"\\☃' * 2**17
    with self.pool(task=task) as verifiers:
      verifiers.submit([make_group(0, [long, long + "."], answer=long)])
      verifiers.join(PATIENCE_S)
    self.assertEqual(self.inbox.rewards(), [1.0, 0.0])

  def test_an_aborted_answer_is_not_judged(self):
    aborted = make_group(0, ["score 0"], finish=types.Finish.ABORTED)
    rest = make_group(0, ["score 1", "score 0"])
    group = types.TrajectoryGroup(
      0,
      rest.prompt,
      (
        rest.trajectories[0],
        aborted.trajectories[0],
        rest.trajectories[1],
        aborted.trajectories[0],
      ),
    )
    with self.pool() as verifiers:
      verifiers.submit([group, make_group(1, [])])
      verifiers.join(PATIENCE_S)
      metrics = verifiers.metrics()
    self.assertEqual(self.inbox.rewards(), [1.0, None, 0.0, None])
    self.assertEqual(self.inbox.failures(), (None, "aborted", None, "aborted"))
    self.assertEqual(self.inbox.rewards(1), [])
    self.assertEqual(metrics["aborted"], 2)
    self.assertEqual(metrics["queued"], 0)

  @pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
  @parameterized.parameters("spin", "sleep 600", "idle")
  def test_workers_die_with_their_parent(self, order):
    program = f"""
      import sys, time
      from darl_jax.rewards.pool import VerifierPool
      sys.path.append({str(pathlib.Path(__file__).parent)!r})
      import pool_test
      pool = VerifierPool(
        pool_test.make_config(time_limit_s=600.0),
        task=pool_test.HOSTILE,
        decode=pool_test.decode,
        fail=sys.stderr.write,
      )
      def deliver(group):
        sys.stderr.write(str(group.failures[0]) + chr(10))
      pool.submit([pool_test.make_group(0, ["pid"])], deliver=deliver)
      pool.join(60)
      pool.submit([pool_test.make_group(1, [{order!r}])], deliver=deliver)
      time.sleep(600)
    """
    with subprocess.Popen(
      [sys.executable, "-c", textwrap.dedent(program)],
      stderr=subprocess.PIPE,
      text=True,
      env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
      overdue = threading.Timer(2 * PATIENCE_S, parent.kill)
      overdue.start()
      try:
        # Libraries may have something to say before.
        said = [parent.stderr.readline()]
        while said[-1] and "pid=" not in said[-1]:
          said.append(parent.stderr.readline())
        self.assertIn("pid=", said[-1], said)
        workers = psutil.Process(parent.pid).children(recursive=True)
        self.assertNotEmpty(workers)
        time.sleep(0.2)
      finally:
        overdue.cancel()
        parent.kill()  # Or leaving the block would wait for it.
      _, left = psutil.wait_procs(workers, timeout=PATIENCE_S)
      self.assertEmpty(left)

  def test_throughput(self):
    task = {"verifier": "hostile:Counting"}
    groups = [make_group(i, ["12"] * 8, answer="12") for i in range(64)]
    with self.pool(task=task) as verifiers:
      verifiers.submit([make_group(1000, ["12"], answer="12")])
      verifiers.join(PATIENCE_S)  # It has started.
      start = time.monotonic()
      verifiers.submit(groups)
      verifiers.join(PATIENCE_S)
      seconds = time.monotonic() - start
    logging.getLogger(__name__).warning(
      "512 answers in %.3f s, %.0f a second", seconds, 512 / seconds
    )
    self.assertLen(self.inbox.groups, 65)
    self.assertLess(seconds, PROMPTLY_S)  # Only that nothing is absurd.
