"""A verifier whose answers are orders: what hostile output could bring about.

Imported by worker processes; see pool_test.
"""

import os
import subprocess
import sys
import time


class Hostile:
  """Obeys the response, and scores 0.5 if there was nothing to obey."""

  def __init__(self, *, start_s: float = 0.0):
    time.sleep(start_s)
    self._kept = []

  def score(self, response, reference):
    order, _, argument = response.partition(" ")
    return getattr(self, f"_{order}", self._idle)(argument)

  def _idle(self, argument):
    return 0.5

  def _score(self, argument):
    return float(argument)

  def _pid(self, argument):
    raise ValueError(f"pid={os.getpid()}")

  def _sleep(self, argument):
    time.sleep(float(argument))
    return 1.0

  def _spin(self, argument):
    while True:
      pass

  def _burn(self, argument):
    end = time.process_time() + float(argument)
    while time.process_time() < end:
      pass
    return 1.0

  def _run(self, argument):
    # What a hole in a scorer amounts to. The program says what it scores.
    names = {}
    exec(argument, names)
    return names["score"]

  def _exit(self, argument):
    os._exit(int(argument))

  def _quit(self, argument):
    sys.exit("quit")

  def _raise(self, argument):
    raise RuntimeError(argument)

  def _exhaust(self, argument):
    raise MemoryError

  def _text(self, argument):
    return argument

  def _say(self, argument):
    # By every way that leads to stdout.
    print(argument)  # noqa: T201
    sys.stdout.flush()
    os.write(1, argument.encode() + b"\n")
    subprocess.run(["echo", argument], check=True)
    return 1.0

  def _read(self, argument):
    return 1.0 if sys.stdin.read() == "" and os.read(0, 9) == b"" else 0.0

  def _fill(self, argument):
    while True:
      self._kept.append(bytearray(2**24))

  def _write(self, argument):
    with open(argument, "wb") as file:
      file.write(bytes(2**24))
    return 1.0

  def _forge(self, argument):
    # Both of the worker's own descriptors are just above these.
    for fd in range(3, 16):
      try:
        os.write(fd, argument.encode() + b"\n")
      except OSError:
        continue
    return 1.0

  def _close(self, argument):
    os.closerange(3, 64)
    return 1.0

  def _spawn(self, argument):
    # A child that outlives the answer, holds the pipes and ignores all else.
    subprocess.Popen(
      [sys.executable, "-c", "import time; time.sleep(600)", argument],
      close_fds=False,
    )
    os._exit(4)


class Broken:
  """Cannot be constructed."""

  def __init__(self):
    raise ImportError("no module named unobtainium")


class Counting:
  """Stays alive until its parent does not."""

  def score(self, response, reference):
    return float(response == reference["answer"])
