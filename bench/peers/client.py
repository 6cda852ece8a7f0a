"""The bench's end of the conversation with a peer; see ``protocol.py``."""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

_FOLDER = pathlib.Path(__file__).resolve().parent


class Client:
  """A script of this folder, in a process of its own environment.

  Attributes:
    name: Of the peer.
    library: What it runs, with versions, once ``load`` was answered.
  """

  def __init__(
    self,
    name: str,
    python: str,
    *,
    task: str,
    timeout_s: float,
    pythonpath: str | None = None,
  ):
    """Starts the process, which waits.

    Args:
      name: Of the peer.
      python: The interpreter of its environment.
      task: The script is ``{name}_{task}.py``.
      timeout_s: Of each answer.
      pythonpath: Where else it imports from.
    """
    self.name = name
    self.library = ""
    self._timeout_s = timeout_s
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if pythonpath:
      environment["PYTHONPATH"] = pythonpath
    try:
      self._process = subprocess.Popen(
        [python, _FOLDER / f"{name}_{task}.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
      )
    except OSError as error:
      sys.exit(f"--peer={name}:{python}: {error}")

  def __enter__(self):
    return self

  def __exit__(self, *_) -> None:
    """Ends it."""
    self._process.kill()
    self._process.communicate()

  def load(self, **details) -> None:
    """Has it load what the details say."""
    self.library = self.ask("load", **details)["library"]

  def ask(self, what: str, **details) -> dict:
    """Exits with a message if there is no answer in time."""
    start = time.monotonic()
    timer = threading.Timer(self._timeout_s, self._process.kill)
    timer.start()
    try:
      # If it has ended, there will be no line to read.
      with contextlib.suppress(BrokenPipeError):
        json.dump({"do": what, **details}, self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
      line = self._process.stdout.readline()
    finally:
      timer.cancel()
    if line:
      return json.loads(line)
    if time.monotonic() - start >= self._timeout_s:
      sys.exit(
        f"{self.name} did not answer {what!r} within {self._timeout_s:g} s. "
        "Try a longer --timeout-s."
      )
    status = self._process.wait()
    sys.exit(f"{self.name} ended with status {status} at {what!r}; see above")


def add_flags(parser: argparse.ArgumentParser, *, task: str) -> None:
  """Adds ``--peer``, which may be given for several, and ``--timeout-s``."""
  parser.add_argument(
    "--peer",
    type=lambda text: _peer(text, task),
    action=_Once,
    default=[],
    metavar="NAME:PYTHON",
    help="Measured in turn with ours; may be given for several.",
  )
  parser.add_argument(
    "--timeout-s", type=float, default=1800.0, help="Of a peer's answer."
  )


def _peer(text: str, task: str) -> tuple[str, str]:
  """A name, and the interpreter of its environment."""
  name, _, python = text.partition(":")
  scripts = _FOLDER.glob(f"*_{task}.py")
  known = sorted(path.name.removesuffix(f"_{task}.py") for path in scripts)
  if name not in known or not python:
    raise argparse.ArgumentTypeError(
      f"{text!r} is not NAME:PYTHON with a name of {', '.join(known)}"
    )
  return name, python


class _Once(argparse.Action):
  """Appends a peer that is not there yet."""

  def __call__(self, parser, namespace, values, option_string=None):
    peers = getattr(namespace, self.dest)
    if values[0] in dict(peers):
      parser.error(f"{option_string}: each of them once")
    setattr(namespace, self.dest, [*peers, values])
