"""Trains: python launch/main.py --config=configs/darl.py --workdir=DIR."""

import os
import pathlib
import signal
import sys
import time

import command_line
from absl import app, flags, logging
from ml_collections import config_flags

from darl_jax import config as config_lib
from darl_jax.loop import Interrupted, Run, Starved
from darl_jax.prompts import dataset
from darl_jax.replay.recording import (
  ReplayDiverged,
  Schedule,
  ScheduleEnded,
  read_schedule,
)
from darl_jax.sharding import meshes


def define_flags() -> None:
  config_flags.DEFINE_config_file(
    "config", "configs/darl.py", "The run; any field can be set by its name."
  )
  flags.DEFINE_string(
    "workdir",
    None,
    "By default a new folder in runs/. A run in it that was not finished is "
    "gone on with.",
  )
  flags.DEFINE_bool(
    "record",
    False,
    "Write schedule_*.jsonl, from which the run can be replayed.",
  )
  flags.DEFINE_string(
    "replay", None, "A schedule to run again, bit for bit; --config is its own."
  )


def main(_) -> int:
  runs: list[Run] = []
  asked: list[int] = []

  def stop(signum, _) -> None:
    if not runs or asked:  # Nothing to save, or asked for twice.
      os._exit(128 + signum)
    asked.append(signum)
    runs[0].interrupt()

  signal.signal(signal.SIGINT, stop)
  signal.signal(signal.SIGTERM, stop)
  name = config_flags.get_config_filename(flags.FLAGS["config"])
  new = f"{pathlib.Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
  workdir = pathlib.Path(flags.FLAGS.workdir or pathlib.Path("runs") / new)
  try:
    checks = (dataset.check_config,)
    schedule = _schedule(flags.FLAGS.replay) if flags.FLAGS.replay else None
    fields = schedule.header["config"] if schedule else flags.FLAGS.config
    config = config_lib.parse(fields, extra_checks=checks)
    meshes.prepare_cpu(config.mesh.train.size + config.mesh.rollout.size)
    record = flags.FLAGS.record and not config.synchronous
    runs.append(Run(config, workdir, record=record, replay=schedule))
    runs[0].execute()
  except config_lib.ConfigError as error:
    print(f"ConfigError: {error}", file=sys.stderr)
    return 2
  except Starved as error:
    print(f"Starved: {error}", file=sys.stderr)
    return 1
  except (ReplayDiverged, ScheduleEnded) as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return 1 if isinstance(error, ReplayDiverged) else 0
  except Interrupted:
    print(
      f"stopped on request; see {workdir}/summary.json. The same command with "
      f"--workdir={workdir} goes on.",
      file=sys.stderr,
    )
    # A machine that is taken away has got what it asked for; a person has not
    # got what they started.
    return 0 if asked == [signal.SIGTERM] else 130
  return 0


def _schedule(path: str) -> Schedule:
  try:
    return read_schedule(path)
  except (OSError, ValueError) as error:
    raise config_lib.ConfigError(
      [f"{error}. Try a schedule_*.jsonl of a run with --record."],
      place="--replay",
    ) from error


if __name__ == "__main__":
  logging.set_verbosity(logging.WARNING)
  app.run(main, flags_parser=command_line.parser(define_flags))
