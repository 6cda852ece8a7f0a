"""Ctrl-C and SIGTERM while a run trains, and before there is one.

Imports nothing that takes time: a program begins with it.
"""

import os
import signal
from collections.abc import Callable


class Stop:
  """Handles both signals from now on.

  Until ``ask`` has been called there is nothing to save, and a signal ends the
  process at once, with status 128 + its number. So does a second one.

  Attributes:
    asked_by: The signal that the run was asked to stop by, once it was.
  """

  def __init__(self):
    self.asked_by: signal.Signals | None = None
    self._interrupt: Callable[[], None] | None = None
    for signum in (signal.SIGINT, signal.SIGTERM):
      signal.signal(signum, self._handle)

  def ask(self, interrupt: Callable[[], None]) -> None:
    """Has the next signal call ``interrupt``."""
    self._interrupt = interrupt

  def _handle(self, signum: int, _) -> None:
    if self._interrupt is None or self.asked_by is not None:
      os._exit(128 + signum)
    self.asked_by = signal.Signals(signum)
    self._interrupt()
