"""Trains: python launch/main.py --config=configs/darl.py --workdir=DIR."""

import pathlib
import time

import stopping

stop = stopping.Stop()  # Before imports that take seconds.

import command_line  # noqa: E402
import endings  # noqa: E402
from absl import app, flags, logging  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from darl_jax import config as config_lib  # noqa: E402
from darl_jax.loop import Run  # noqa: E402
from darl_jax.prompts import dataset  # noqa: E402
from darl_jax.replay.recording import read_schedule  # noqa: E402
from darl_jax.sharding import meshes  # noqa: E402


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
  flags.DEFINE_bool("record", False, "Write schedule_*.jsonl for --replay.")
  flags.DEFINE_string(
    "replay", None, "A schedule to run again, bit for bit; --config is its own."
  )


def main(_) -> int:
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
    stop.ask(run.interrupt)
    run.execute()
  except endings.EXPECTED as error:
    return endings.tell(error, asked_by=stop.asked_by)
  return 0


if __name__ == "__main__":
  logging.set_verbosity(logging.WARNING)
  app.run(main, flags_parser=command_line.parser(define_flags))
