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
  # A machine that is taken away has got what it asked for: the run is saved.
  return 0 if asked_by == signal.SIGTERM else _STATUS[type(error)]
