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
from darl_jax.checkpoint.store import CheckpointFailed
from darl_jax.loop import Interrupted, Run, Starved
from darl_jax.prompts import dataset
from darl_jax.replay.recording import (
  ReplayDiverged,
  ScheduleEnded,
  read_schedule,
)
from darl_jax.sharding import meshes
from darl_jax.watch import Alarmed

# What a run ends with, in words and without a traceback.
_STATUS = {
  config_lib.ConfigError: 2,
  Starved: 1,
  CheckpointFailed: 1,
  Alarmed: 1,
  Interrupted: 130,
  ReplayDiverged: 1,
  ScheduleEnded: 0,
}


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
  asked: list[int] = []
  run: Run | None = None

  def stop(signum, _) -> None:
    if run is None or asked:  # Nothing to save, or asked for twice.
      os._exit(128 + signum)
    asked.append(signum)
    run.interrupt()

  signal.signal(signal.SIGINT, stop)
  signal.signal(signal.SIGTERM, stop)
  given = flags.FLAGS
  name = config_flags.get_config_filename(given["config"])
  new = f"{pathlib.Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
  workdir = pathlib.Path(given.workdir or pathlib.Path("runs") / new)
  try:
    schedule = read_schedule(given.replay) if given.replay else None
    fields = schedule.header["config"] if schedule else given.config
    checks = (dataset.check_config,)
    config = config_lib.parse(fields, extra_checks=checks)
    meshes.prepare_cpu(config.mesh.train.size + config.mesh.rollout.size)
    run = Run(config, workdir, record=given.record, replay=schedule)
    run.execute()
  except tuple(_STATUS) as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    # A machine that is taken away has got what it asked for: the run is saved.
    return 0 if asked == [signal.SIGTERM] else _STATUS[type(error)]
  return 0


if __name__ == "__main__":
  logging.set_verbosity(logging.WARNING)
  app.run(main, flags_parser=command_line.parser(define_flags))
