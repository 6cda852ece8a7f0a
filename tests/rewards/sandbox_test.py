import contextlib
import logging
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from unittest import mock

import psutil
import pytest
from absl.testing import parameterized

from darl_jax.config import ConfigError
from darl_jax.rewards import sandbox
from tests.rewards import pool_test

pytestmark = pytest.mark.skipif(
  sys.platform != "linux", reason="the fences are Linux's"
)
# A system that has no namespaces to give, as most containers: root of a user
# namespace may lower its limits.
LAUNCHER = """#!/bin/sh
exec unshare --user --map-root-user sh -c '
  for kind in user mnt net pid ipc; do
    echo 0 > /proc/sys/user/max_${{kind}}_namespaces || exit 1
  done
  exec {python} "$@"' sh "$@"
"""


def order(text: str) -> str:
  """Runs ``text`` in the process that scores."""
  imports = "import os, signal, socket, subprocess, sys, time\n"
  return "run " + imports + textwrap.dedent(text)


def refused(attempt: str) -> str:
  """Scores 1 if ``attempt`` raises an OSError."""
  return order(
    f"""
      try:
        {attempt}
        score = 0.0
      except OSError:
        score = 1.0
    """
  )


DAEMON = textwrap.dedent("""
  ready, done = os.pipe()
  if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
      os.closerange(0, done)
      os.write(done, b"x")
      os.closerange(0, 256)
      for number in range(1, 65):
        try:
          signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
          continue
      time.sleep(600)
    os._exit(0)
  os.read(ready, 1)
  score = 1.0
""")
FORK_BOMB = """
while True:
  try:
    os.fork()
  except OSError:
    continue
"""


def workers() -> set[psutil.Process]:
  """All processes that forked from a worker, whoever's children they are.

  But for those of test processes beside this one, which start and end theirs
  meanwhile; an orphan of this one's can never become a child of theirs.
  """
  here = psutil.Process()
  beside = set(here.parent().children()) - {here}
  found = set()
  for process in psutil.process_iter(["cmdline"]):
    if "darl_jax.rewards.worker" in (process.info["cmdline"] or []):
      with contextlib.suppress(psutil.NoSuchProcess):  # It has ended since.
        if beside.isdisjoint(process.parents()):
          found.add(process)
  return found


class SandboxTestCase(pool_test.PoolTestCase):
  def orders(self, *orders, **changes):
    """Scores of these orders, of one group."""
    with self.pool(**changes) as verifiers:
      verifiers.submit([pool_test.make_group(0, orders)])
      verifiers.join(pool_test.PATIENCE_S)
      self.assertEmpty(self.inbox.errors)
      self.protections = verifiers.protections
      self.left = [c for c in pool_test.children() if c.pid not in self.before]
      self.metrics = verifiers.metrics()
    return self.inbox.rewards()


class ConfinedTest(SandboxTestCase):
  """A scorer that its answers have taken over, in namespaces."""

  def setUp(self):
    super().setUp()
    # Asked of another program: a mistake of ours must not skip its own tests.
    offered = ["unshare", "--net", "--pid", "--mount", "--ipc", "--fork"]
    if os.getuid():
      offered.append("--map-current-user")
    check = subprocess.run([*offered, "true"], capture_output=True)
    if check.returncode:
      self.skipTest(f"no namespaces here: {check.stderr}")

  def test_is_protected_from_everything(self):
    self.orders("score 1")
    self.assertEqual(str(self.protections).partition("open: ")[2], "nothing")

  def test_reaches_nothing_outside(self):
    with (
      tempfile.TemporaryDirectory() as folder,
      socket.create_server(("127.0.0.1", 0)) as server,
      mock.patch.dict(os.environ, {"PASSWORD": "hunter2"}),
    ):
      os.chmod(folder, 0o777)
      programs = self.enter_context(tempfile.TemporaryDirectory())
      os.chmod(programs, 0o777)
      sys.path.append(programs)  # Restored by setUp's patch.
      port = server.getsockname()[1]
      attempts = (
        f"open({programs!r} + '/x', 'w')",
        f"open({folder!r} + '/x', 'w')",
        f"os.listdir({folder!r})",
        "open(os.__file__, 'r+')",
        f"socket.create_connection(('127.0.0.1', {port}), 1)",
        f"os.kill({os.getpid()}, 0)",
        f"open('/proc/{os.getpid()}/environ')",
        "os.setuid(0)",
        "os.mkdir('/usr/x')",
        "os.chroot('.')",
      )
      rewards = self.orders(
        *map(refused, attempts),
        order("score = float('PASSWORD' not in os.environ)"),
        order(
          "score = float(len([*filter(str.isdigit, os.listdir('/proc'))]) == 2)"
        ),
        order("score = float(os.listdir() == [])"),
        order(f"score = float(os.listdir({programs!r}) == [])"),
        order("open('mine', 'w').write('x'); score = 1.0"),
        order("score = float(os.environ['TMPDIR'] == os.getcwd())"),
      )
      self.assertEqual(rewards, [1.0] * 16, self.inbox.failures())
      self.assertEqual(os.listdir(folder), [])
      server.setblocking(False)
      with self.assertRaises(BlockingIOError):
        server.accept()

  @parameterized.parameters(
    "os.kill(os.getppid(), 9); os.killpg(os.getpgid(0), 9)",
    "os.kill(os.getpid(), 11)",
    FORK_BOMB,
    "signal.signal(15, lambda *a: None)\nwhile True: pass",
    "sys.setrecursionlimit(10**9)\nf = lambda: [f()]\nf()",
    "x = 10**10**10",
    "os.dup2(2, 1); os.closerange(3, 99); score = 1.0",
    "sys.stderr.write('x' * 2**28); os._exit(0)",
    DAEMON + "\nos._exit(0)",
    DAEMON + "\ntime.sleep(60)",
  )
  def test_a_lost_worker_is_replaced_and_leaves_nothing(self, hostile):
    hostile = order(hostile)
    rewards = self.orders("score 1", hostile, "score 1", time_limit_s=1.0)
    self.assertEqual(rewards, [1.0, None, 1.0], self.inbox.failures())
    self.assertEqual(self.metrics["restarts"], 1)
    self.assertLen(self.left, 3)

  def test_a_daemon_dies_with_the_pool(self):
    with self.pool() as verifiers:
      verifiers.submit([pool_test.make_group(0, [order(DAEMON)])])
      verifiers.join(pool_test.PATIENCE_S)
      self.assertEqual(self.inbox.rewards(), [1.0])
      running = psutil.Process(
        verifiers._slots[0].worker._process.pid
      ).children(recursive=True)
      # Init, the scorer, the daemon, and a dead one in between.
      self.assertLen(running, 4)
    _, left = psutil.wait_procs(running, timeout=pool_test.PATIENCE_S)
    self.assertEmpty(left)

  def test_processes_and_disk_are_limited(self):
    forks = """
      import errno
      try:
        for _ in range(100):
          if os.fork() == 0:
            time.sleep(60)
        score = 0.0
      except BlockingIOError:
        score = 1.0
    """
    fills = """
      import errno
      written = 0
      try:
        while written < 2**27:
          with open(str(written), "wb") as file:
            written += file.write(bytes(2**20))
        score = 0.0
      except OSError as error:
        score = float(error.errno == errno.ENOSPC)
    """
    self.assertEqual(self.orders(order(fills), order(forks)), [1.0, 1.0])

  def test_a_worker_is_replaced_soon_after_its_limit(self):
    with self.pool(time_limit_s=1.0) as verifiers:
      verifiers.submit([pool_test.make_group(0, ["score 1"])])
      verifiers.join(pool_test.PATIENCE_S)
      start = time.monotonic()
      verifiers.submit([pool_test.make_group(1, [order(FORK_BOMB), "score 1"])])
      verifiers.join(pool_test.PATIENCE_S)
      over = time.monotonic() - start - 1.0
    logging.getLogger(__name__).warning("replaced %.2f s after its limit", over)
    self.assertLess(over, 2.0)

  def test_required_isolation_is_there(self):
    self.assertEqual(self.orders("score 1", require_isolation=True), [1.0])

  def test_has_no_privileges_left(self):
    status = """
      lines = dict(l.split(":", 1) for l in open("/proc/self/status"))
      words = {k: v.strip() for k, v in lines.items()}
      score = float(
        words["NoNewPrivs"] == "1"
        and all(int(words[k], 16) == 0 for k in ("CapEff", "CapPrm", "CapInh"))
      )
    """
    self.assertEqual(self.orders(order(status)), [1.0])


class WithoutNamespacesTest(SandboxTestCase):
  """The same where the system has none to give."""

  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    launcher = pathlib.Path(folder, "python")
    launcher.write_text(LAUNCHER.format(python=sys.executable))
    launcher.chmod(0o755)
    check = subprocess.run([launcher, "-c", ""], capture_output=True)
    if check.returncode:
      self.skipTest(f"cannot be arranged: {check.stderr}")
    self.enter_context(mock.patch.object(sys, "executable", str(launcher)))

  def test_says_so(self):
    self.orders("score 1")
    self.assertFalse(self.protections.network)
    self.assertFalse(self.protections.isolated)
    self.assertRegex(str(self.protections), "closed .*; open: network, ")

  def test_required_isolation_is_refused_at_once(self):
    with (
      self.assertRaisesRegex(
        ConfigError,
        r"require_isolation = True, but .*open: network.*Try .*=False",
      ),
      self.pool(require_isolation=True),
    ):
      pass

  def test_landlock_holds(self):
    with (
      tempfile.TemporaryDirectory() as folder,
      socket.create_server(("127.0.0.1", 0)) as server,
    ):
      os.chmod(folder, 0o777)
      port = server.getsockname()[1]
      self.orders("score 1")
      attempts = {
        f"open({folder!r} + '/x', 'w')": self.protections.writes,
        f"os.listdir({folder!r})": self.protections.reads,
        f"open('/proc/{os.getpid()}/environ')": self.protections.reads,
        f"socket.create_connection(('127.0.0.1', {port}), 1)": (
          self.protections.tcp
        ),
        f"os.kill({os.getpid()}, 0)": self.protections.signals,
        f"os.kill({os.getppid()}, 0)": self.protections.signals,
      }
      self.inbox.groups.clear()
      held = [attempt for attempt in attempts if attempts[attempt]]
      if not held:
        self.skipTest(str(self.protections))
      self.assertEqual(
        self.orders(*map(refused, held)), [1.0] * len(held), held
      )
      self.assertEqual(os.listdir(folder), [])

  @parameterized.parameters("", "os._exit(0)", "time.sleep(60)")
  def test_a_daemon_is_found_and_the_folder_removed(self, then):
    before, running = set(os.listdir(tempfile.gettempdir())), workers()
    daemon = order(DAEMON + then)
    with self.pool(time_limit_s=1.0) as verifiers:
      verifiers.submit([pool_test.make_group(0, ["score 1", daemon])])
      verifiers.join(pool_test.PATIENCE_S)
      self.assertEqual(self.inbox.rewards(), [1.0, None if then else 1.0])
    after = set(os.listdir(tempfile.gettempdir()))
    self.assertEmpty([x for x in after - before if "darl-verifier" in x])
    # tearDown sees no child left; an orphan would have become another's.
    self.assertEmpty(workers() - running)


class ReportTest(parameterized.TestCase):
  def test_names_both_kinds(self):
    some = sandbox.Protections(network=True, disk=True)
    self.assertEqual(
      str(some),
      "closed to verifiers: network, disk; open: tcp, writes, reads, signals, "
      "survivors, processes, root",
    )
    self.assertEndsWith(
      str(sandbox.Protections(*[True] * 9)), "; open: nothing"
    )

  @parameterized.parameters("network", "writes", "reads")
  def test_isolation_needs(self, name):
    everything = sandbox.Protections(*[True] * 9)
    self.assertTrue(everything.isolated)
    self.assertFalse(everything._replace(**{name: False}).isolated)

  def test_this_process_is_not_confined(self):
    with self.assertRaisesRegex(RuntimeError, "no confined worker"):
      sandbox.scratch()
