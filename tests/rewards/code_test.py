import dataclasses
import logging
import os
import pathlib
import socket
import sys
import tempfile
import textwrap
import time
from unittest import mock

import pytest
from absl.testing import parameterized

from darl_jax.rewards import code, sandbox
from tests.rewards import pool_test

ARGUMENTS = {"time_limit_s": 1.0, "answer_limit_s": 4.0, "memory_limit_mb": 512}
TASK = {
  "verifier": "darl_jax.rewards.code:CodeVerifier",
  "arguments": ARGUMENTS,
}
DOUBLE = [{"stdin": f"{i}\n", "stdout": f"{2 * i}\n"} for i in range(2)]
GOOD = "print(2 * int(input()))"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs namespaces")
# Each answers right, unless what it tries is refused.
REFUSED = {
  "allocation": "x = bytearray(10 * 2**30)",
  "allocation that the worker may": "x = bytearray(2**30)",
  "fork": """
    for _ in range(100):
      if os.fork() == 0:
        time.sleep(60)
  """,
  "number": "x = 10**10**10",
  "text to number": "x = int('9' * 10**8)",
  "zip": """
    import zlib
    bomb = zlib.compress(zlib.compress(bytes(2**30), 9), 9)
    x = zlib.decompress(zlib.decompress(bomb))
  """,
  "regular expression": """
    import re
    re.match("(a+)+$", "a" * 40 + "b")
  """,
  "recursion": """
    sys.setrecursionlimit(10**9)
    f = lambda: [f()]
    f()
  """,
  "loop": "while True: pass",
  "sleep": "time.sleep(60)",
  "deaf loop": """
    for number in range(1, 65):
      try:
        signal.signal(number, signal.SIG_IGN)
      except (OSError, ValueError):
        continue
    while True: pass
  """,
  "disk": """
    for number in range(200):
      with open(str(number), "wb") as file:
        file.write(bytes(2**20 - 1))
  """,
  "one file": """
    with open("big", "wb") as file:
      file.write(bytes(2**21))
  """,
  "memory of the judge": "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
  "files of the judge": "os.listdir(f'/proc/{os.getppid()}/fd')",
}
# What these do is of no use to them.
FUTILE = {
  "right, but failed": f"{GOOD}; sys.exit(1)",
  "right, but killed": f"{GOOD}; sys.stdout.flush(); os.kill(os.getpid(), 15)",
  "right, but hangs": f"{GOOD}; sys.stdout.flush(); time.sleep(60)",
  "right, but hangs without stdout": f"""
    {GOOD}
    sys.stdout.flush()
    os.close(1)
    time.sleep(60)
  """,
  "nothing, but exit code 0": "os._exit(0)",
  "too much": f"{GOOD}; print(1)",
  "forged verdicts": """
    for fd in [*range(3, 256)]:
      try:
        os.write(fd, b"[0, 1.0, null]\\n[1, 1.0, null]\\n")
      except OSError:
        continue
  """,
  "forged verdicts on stdout": "print('[0, 1.0, null]')",
  "closed files": "os.closerange(0, 256)",
  "no Python": "fn main() {}",
  "empty": "",
}


def program(text: str) -> str:
  imports = "import os, signal, socket, subprocess, sys, time\n"
  return imports + textwrap.dedent(text)


class LastProgramTest(parameterized.TestCase):
  @parameterized.parameters(
    ("x = 1", "x = 1"),
    ("Try\n```python\nx = 1\n```\nso", "x = 1"),
    ("```python\n1\n```\nno:\n```py\n2\n\n3\n```", "2\n\n3"),
    ("```\n1\n```\n```output\n2\n```", "1"),
    ("```python\n1\n```\n```json\n{}", "1"),
    ("~~~ Python\n1\n```\n~~~", "1\n```"),
    ("````python\n'''\n```\n'''\n````", "'''\n```\n'''"),
    ("```python\nx = 1", "x = 1"),
    ("```json\n{}\n```", "```json\n{}\n```"),
    ("", ""),
  )
  def test_finds_it(self, response, found):
    self.assertEqual(code.last_program(response), found)


class CodeTest(pool_test.PoolTestCase):
  def programs(self, *programs, tests=DOUBLE, **changes):
    """Rewards of these programs, all of one group."""
    group = pool_test.make_group(0, programs)
    prompt = dataclasses.replace(group.prompt, reference={"tests": tests})
    fields = {"task": TASK, "partial_credit": 1.0} | changes
    with self.pool(**fields) as verifiers:
      verifiers.submit([dataclasses.replace(group, prompt=prompt)])
      verifiers.join(pool_test.PATIENCE_S)
      self.assertEmpty(self.inbox.errors)
      self.protections = verifiers.protections
      self.metrics = verifiers.metrics()
      self.left = [c for c in pool_test.children() if c.pid not in self.before]
    return self.inbox.rewards()

  def test_pays_the_share_of_tests_passed(self):
    tests = [{"stdin": f"{i}\n", "stdout": "0 \n2\n\n"} for i in range(4)]
    rewards = self.programs(
      "x = int(input())\nprint('0\\n2' if x else '0  \\n2 ')",
      "print('0\\n2' if input() == '3' else '0 2')",
      "print(' 0\\n2')",
      "print('0\\n\\n2')",
      "Thus:\n```python\nprint(0)\nprint(2)\n```\n",
      tests=tests,
    )
    self.assertEqual(rewards, [1.0, 0.25, 0.0, 0.0, 1.0])

  def test_long_texts_pass_whole(self):
    text = "é☃ " * 2**18
    tests = [{"stdin": text, "stdout": text}]
    echo = "import sys\nprint(sys.stdin.read())"
    self.assertEqual(
      self.programs(echo, echo + "\nprint(1)", "print(1)", tests=tests),
      [1.0, 0.0, 0.0],
    )

  def test_each_test_has_a_fresh_process_and_folder(self):
    stays = """
      import pathlib
      files = sorted(os.listdir())
      for name in ("a", "b"):
        pathlib.Path(name).mkdir()
        pathlib.Path(name, "c").write_text("")
        os.chmod(name, 0)
      for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
      print(files)
    """
    tests = [{"stdin": "", "stdout": "['program.py']"}] * 3
    self.assertEqual(self.programs(program(stays), tests=tests), [1.0])
    self.assertEqual(self.metrics["restarts"], 0)

  def test_tests_beyond_the_answers_limit_are_failed(self):
    slow = "import time\nif int(input()):\n  time.sleep(60)\nprint(0)"
    task = TASK | {"arguments": ARGUMENTS | {"answer_limit_s": 1.5}}
    tests = [{"stdin": str(i), "stdout": "0"} for i in (0, 1, 1, 0)]
    self.assertEqual(self.programs(slow, tests=tests, task=task), [0.25])

  def test_without_tests_there_is_no_verdict(self):
    self.assertEqual(self.programs(GOOD, tests=[]), [None])

  def test_runs_nothing_outside_a_worker(self):
    verifier = code.CodeVerifier(**ARGUMENTS)
    with self.assertRaisesRegex(RuntimeError, "worker"):
      verifier.score(GOOD, {"tests": DOUBLE})

  @LINUX
  @parameterized.named_parameters((k.replace(" ", "_"), k) for k in REFUSED)
  def test_refused(self, name):
    hostile = program(REFUSED[name]) + f"\n{GOOD}\n"
    start = time.monotonic()
    rewards = self.programs(GOOD, hostile, GOOD, tests=DOUBLE[:1])
    self.assertEqual(rewards, [1.0, 0.0, 1.0])
    self.assertEqual(self.metrics["restarts"], 0)
    self.assertLen(self.left, 3)
    logging.getLogger(__name__).warning(
      "%s: %.2f s in all", name, time.monotonic() - start
    )

  @LINUX
  @parameterized.named_parameters((k.replace(" ", "_"), k) for k in FUTILE)
  def test_futile(self, name):
    hostile = program(FUTILE[name])
    rewards = self.programs(GOOD, hostile, GOOD, tests=DOUBLE[1:])
    self.assertEqual(rewards, [1.0, 0.0, 1.0])
    self.assertEqual(self.metrics["restarts"], 0)
    self.assertLen(self.left, 3)

  @LINUX
  def test_huge_output_is_not_kept(self):
    writes = """
      for _ in range(1000):
        sys.stdout.write("x" * 2**20)
        sys.stdout.flush()
    """
    limits = {"time_limit_s": 20.0, "answer_limit_s": 20.0}
    rewards = self.programs(
      GOOD,
      program(writes),
      GOOD,
      tests=DOUBLE[:1],
      task=TASK | {"arguments": ARGUMENTS | limits},
      time_limit_s=25.0,
      memory_limit_mb=512,
    )
    self.assertEqual(rewards, [1.0, 0.0, 1.0])
    self.assertEqual(self.metrics["restarts"], 0)
    self.assertLess(self.metrics["seconds"], pool_test.PROMPTLY_S)

  @LINUX
  @parameterized.parameters(
    "os.kill(os.getppid(), 9)",
    "os.killpg(os.getpgid(os.getppid()), 9)",
    "os.kill(-1, 9)",
    "os.kill(1, 9)",
  )
  def test_kills_none_but_itself(self, kill):
    rewards = self.programs(GOOD, program(kill), GOOD, tests=DOUBLE[1:])
    # Where Landlock cannot refuse it, the worker may go, and is replaced.
    scoped = sandbox._landlock_version() >= sandbox._SCOPES_SINCE
    outcomes = [0.0] if scoped else [0.0, None]
    self.assertEqual(rewards[::2], [1.0, 1.0])
    self.assertIn(rewards[1], outcomes)
    self.assertLen(self.left, 3)

  @LINUX
  def test_a_fork_bomb_ends_with_its_test(self):
    bomb = """
      while True:
        try:
          os.fork()
        except OSError:
          continue
    """
    start = time.monotonic()
    self.assertEqual(
      self.programs(GOOD, program(bomb), GOOD, tests=DOUBLE[:1]),
      [1.0, 0.0, 1.0],
    )
    self.assertLen(self.left, 3)
    self.assertLess(time.monotonic() - start, pool_test.PROMPTLY_S)

  @LINUX
  def test_a_daemon_does_not_outlive_its_test(self):
    daemon = f"""
      {GOOD}
      sys.stdout.flush()
      if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
          os.closerange(0, 256)
          time.sleep(600)
        os._exit(0)
    """
    self.assertEqual(self.programs(program(daemon)), [1.0])
    self.assertLen(self.left, 3)

  @LINUX
  def test_nothing_outside_can_be_written(self):
    with tempfile.TemporaryDirectory() as folder:
      os.chmod(folder, 0o777)
      precious = pathlib.Path(folder, "precious")
      precious.write_text("x")
      precious.chmod(0o666)
      places = [
        folder,
        str(precious),
        *("/tmp", "/var/tmp", "/dev/shm", "/", "/usr", "/root", "/etc/passwd"),
        *(sys.prefix, pathlib.Path.home(), pathlib.Path(code.__file__).parent),
      ]
      writes = f"""
        for place in {[str(place) for place in places]}:
          for attempt in (
            lambda: open(os.path.join(place, "darl-trace"), "w").close(),
            lambda: open(place, "r+").close(),
            lambda: os.mkdir(os.path.join(place, "darl-folder")),
            lambda: os.chmod(place, 0),
            lambda: os.rename(place, place + "-2"),
            lambda: os.unlink(place),
          ):
            try:
              attempt()
            except OSError:
              continue
            print(place)
        print("kept out")
      """
      tests = [{"stdin": "", "stdout": "kept out"}]
      self.assertEqual(self.programs(program(writes), tests=tests), [1.0])
      self.assertEqual(os.listdir(folder), ["precious"])
      self.assertEqual(precious.read_text(), "x")
    self.assertTrue(self.protections.writes)

  @LINUX
  def test_secrets_cannot_be_read(self):
    with tempfile.NamedTemporaryFile("w") as file:
      file.write("hunter2")
      file.flush()
      os.chmod(file.name, 0o666)
      reads = f"""
        import glob
        names = sorted({{*os.environ}} - {{"LC_CTYPE"}})
        print(*names)
        for place in (
          {file.name!r},
          "/etc/shadow",
          "/proc/{os.getpid()}/environ",
          *glob.glob("/proc/[0-9]*/environ"),
        ):
          try:
            with open(place, "rb") as file:
              if b"hunter2" in file.read():
                print(place)
          except OSError:
            continue
      """
      with mock.patch.dict(os.environ, {"PASSWORD": "hunter2"}):
        tests = [{"stdin": "", "stdout": "HOME OMP_NUM_THREADS TMPDIR"}]
        self.assertEqual(self.programs(program(reads), tests=tests), [1.0])
    self.assertTrue(self.protections.reads)

  @LINUX
  def test_there_is_no_network(self):
    with socket.create_server(("127.0.0.1", 0)) as server:
      port = server.getsockname()[1]
      datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
      datagrams.bind(("127.0.0.1", port))
      hidden = socket.socket(socket.AF_UNIX)
      hidden.bind(f"\0darl-{port}")
      hidden.listen()
      with datagrams, hidden:
        connects = f"""
          for attempt in (
            lambda: socket.create_connection(("127.0.0.1", {port}), 1),
            lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(
              b"x", ("127.0.0.1", {port})
            ),
            lambda: socket.socket(socket.AF_UNIX).connect("\\0darl-{port}"),
          ):
            try:
              attempt()
              print("connected")
            except OSError:
              print("kept out")
        """
        tests = [{"stdin": "", "stdout": "kept out\n" * 3}]
        self.assertEqual(self.programs(program(connects), tests=tests), [1.0])
        for listener in (server, datagrams, hidden):
          listener.setblocking(False)
        with self.assertRaises(BlockingIOError):
          server.accept()
        with self.assertRaises(BlockingIOError):
          datagrams.recv(1)
        with self.assertRaises(BlockingIOError):
          hidden.accept()
    self.assertTrue(self.protections.network)
