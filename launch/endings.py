"""What a run ends with, in words and without a traceback."""

import signal
import sys

from darl_jax.checkpoint.store import CheckpointFailed
from darl_jax.config import ConfigError
from darl_jax.loop import Interrupted, Starved
from darl_jax.replay.recording import ReplayDiverged, ScheduleEnded
from darl_jax.watch import Alarmed

_STATUS = {
  ConfigError: 2,
  Starved: 1,
  CheckpointFailed: 1,
  Alarmed: 1,
  Interrupted: 130,
  ReplayDiverged: 1,
  ScheduleEnded: 0,
}
# All that is no defect of the program.
EXPECTED = tuple(_STATUS)


def tell(error: Exception, *, asked_by: signal.Signals | None) -> int:
  """Says it on stderr; returns the exit status.

  Args:
    error: One of ``EXPECTED``.
    asked_by: The signal that the run was asked to stop by.
  """
  print(f"{type(error).__name__}: {error}", file=sys.stderr)
  if isinstance(error, Interrupted) and asked_by == signal.SIGTERM:
    return 0  # A machine that is taken away got what it asked for: it is saved.
  return _STATUS[type(error)]
