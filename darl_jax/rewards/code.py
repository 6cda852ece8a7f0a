"""Runs an answer's program on tests of stdin and stdout."""

import contextlib
import os
import re
import resource
import selectors
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from darl_jax.rewards import sandbox

_MAX_PROGRAM_BYTES = 2**19
_MAX_OUTPUT_BYTES = 2**24
# Between looks at whether a program has ended that left its stdout open.
_LOOK_S = 0.02
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)")
_PYTHON = ("", "py", "python", "python3")


class CodeVerifier:
  """Scores programs by the share of their tests that they pass.

  A test runs the program in a fresh process, within the sandbox of the worker
  and below limits of its own. It is passed if the process writes the expected
  text, and then ends by itself, with exit code 0 and in time. Space at the end
  of lines and of the text does not count. Whatever else it has started or
  written is gone before the next test.
  """

  def __init__(
    self, *, time_limit_s: float, answer_limit_s: float, memory_limit_mb: int
  ):
    """Sets the limits.

    Args:
      time_limit_s: For one test.
      answer_limit_s: For all tests of an answer; those not done by then are
        failed. Keep it a second below ``rewards.time_limit_s``, whose excess
        means no verdict instead of a bad one.
      memory_limit_mb: Address space of each of the program's processes; at
        most the worker's.
    """
    self._time_limit_s = time_limit_s
    self._answer_limit_s = answer_limit_s
    self._memory_limit_mb = memory_limit_mb

  def score(self, response: str, reference: Mapping[str, Any]) -> float:
    """The share of tests passed, from 0 to 1.

    Args:
      response: Its program is the last fenced block of Python, or of no
        language; all of it if there is none.
      reference: {"tests": [{"stdin": text, "stdout": text}, ...]}; more keys
        are not read.

    Raises:
      ValueError: If there are no tests.
      RuntimeError: In a process that is no confined worker.
      SystemExit: If what a program left behind cannot be removed. The worker
        ends, and is replaced.
    """
    folder = sandbox.scratch()
    tests = reference["tests"]
    if not tests:
      raise ValueError("no tests")
    program = last_program(response).encode("utf-8", "replace")
    if len(program) > _MAX_PROGRAM_BYTES:
      return 0.0
    deadline = time.monotonic() + self._answer_limit_s
    passed = 0
    for test in tests:
      limit_s = min(self._time_limit_s, deadline - time.monotonic())
      if limit_s <= 0:
        break
      output = self._run(folder, program, test["stdin"], limit_s)
      passed += output is not None and _same(output, test["stdout"])
    return passed / len(tests)

  def _run(
    self, folder: str, program: bytes, stdin: str, limit_s: float
  ) -> bytes | None:
    """What the program writes; None if it does not end well."""
    with open(os.path.join(folder, "program.py"), "wb") as file:
      file.write(program)
    process = subprocess.Popen(
      # -I: no variable, no user's packages, and no import from the folder.
      [sys.executable, "-I", "-B", "-X", "utf8", "program.py"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      cwd=folder,
      env={"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
      start_new_session=True,
      preexec_fn=lambda: self._limit(limit_s),
      bufsize=0,
    )
    try:
      output = _converse(process, stdin.encode("utf-8", "replace"), limit_s)
      return output if process.returncode == 0 else None
    finally:
      _clear_away(process, folder)

  def _limit(self, limit_s: float) -> None:
    """Is called in the program's process, before it is the program's."""
    memory = self._memory_limit_mb * 2**20
    memory = min(memory, resource.getrlimit(resource.RLIMIT_AS)[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    seconds = int(limit_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    sandbox.deny_signals()  # Or it could end its judge.


def last_program(response: str) -> str:
  """The last fenced block that is Python's, or all of ``response``.

  Fences are CommonMark's: one that is never closed ends with the text.
  """
  found, block, fence, language = response, None, "", ""
  for line in response.splitlines():
    match = _FENCE.match(line)
    if block is None:
      if match:
        fence, language = match.groups()
        block = []
    elif match and not match[2] and match[1].startswith(fence):
      if language.lower() in _PYTHON:
        found = "\n".join(block)
      block = None
    else:
      block.append(line)
  if block is not None and language.lower() in _PYTHON:
    found = "\n".join(block)
  return found


def _converse(
  process: subprocess.Popen, stdin: bytes, limit_s: float
) -> bytes | None:
  """Feeds ``stdin`` and collects stdout until the process ends.

  Returns:
    What it wrote; None if that is too much, or takes too long.
  """
  deadline = time.monotonic() + limit_s
  output = bytearray()
  with selectors.DefaultSelector() as selector:
    for pipe, event in (
      (process.stdin, selectors.EVENT_WRITE),
      (process.stdout, selectors.EVENT_READ),
    ):
      os.set_blocking(pipe.fileno(), False)
      selector.register(pipe, event)
    unsent = memoryview(stdin)
    ended = False
    while True:
      left = deadline - time.monotonic()
      if left <= 0 or len(output) > _MAX_OUTPUT_BYTES:
        return None
      ready = [
        key.fileobj
        for key, _ in selector.select(0 if ended else min(left, _LOOK_S))
      ]
      if process.stdin in ready:
        try:
          unsent = unsent[process.stdin.write(unsent[:65536]) or 0 :]
        except BrokenPipeError:
          unsent = unsent[:0]
        if not unsent:
          selector.unregister(process.stdin)
          process.stdin.close()
      if process.stdout in ready:
        chunk = process.stdout.read(65536)
        if chunk:
          output += chunk
        elif chunk is not None:
          selector.unregister(process.stdout)
          # Mostly it ends within the millisecond.
          _wait(process, min(left, _LOOK_S))
      elif ended:
        return bytes(output)
      ended = process.poll() is not None


def _wait(process: subprocess.Popen, seconds: float) -> None:
  try:
    process.wait(seconds)
  except subprocess.TimeoutExpired:
    return


def _clear_away(process: subprocess.Popen, folder: str) -> None:
  """Ends all that the program has started, and removes all that it wrote."""
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(process.pid, signal.SIGKILL)
  gone = sandbox.kill_descendants()
  for pipe in (process.stdin, process.stdout):
    pipe.close()
  if not gone:
    sys.exit("What a program has started cannot be ended.")
  process.wait()
  try:
    _empty(folder)
  except OSError as error:
    sys.exit(f"What a program wrote cannot be removed: {error}")


def _empty(folder: str) -> None:
  """Removes all in ``folder``, however deep, and whatever its rights are."""
  prefix, moved = os.urandom(8).hex(), 0  # A name that nobody has taken.
  while names := os.listdir(folder):
    for path in [os.path.join(folder, name) for name in names]:
      if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        continue
      os.chmod(path, 0o700)
      # Moved up, since the path to the bottom could be too long for Linux.
      for name in os.listdir(path):
        inner = os.path.join(path, name)
        if stat.S_ISDIR(os.lstat(inner).st_mode):
          os.chmod(inner, 0o700)
          moved += 1
          os.rename(inner, os.path.join(folder, f"{prefix}-{moved}"))
        else:
          os.unlink(inner)
      os.rmdir(path)


def _same(output: bytes, expected: str) -> bool:
  return _lines(output.decode("utf-8", "replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
  return [line.rstrip() for line in text.rstrip().split("\n")]
