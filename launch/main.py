"""Trains: python launch/main.py --config=configs/darl.py --workdir=DIR."""

import pathlib
import signal
import sys
import time

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from darl_jax import config as config_lib
from darl_jax.config import ConfigError
from darl_jax.loop import Interrupted, Run
from darl_jax.prompts import dataset

_CONFIG = config_flags.DEFINE_config_file(
  "config", "configs/darl.py", "The run; any field can be set by its name."
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where the run writes; by default a new folder in runs/."
)


def main(argv: list[str]) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"not understood: {' '.join(argv[1:])}")
  name = pathlib.Path(
    config_flags.get_config_filename(flags.FLAGS["config"])
  ).stem
  default = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
  workdir = pathlib.Path(_WORKDIR.value or default)
  try:
    config = config_lib.parse(
      _CONFIG.value, extra_checks=(dataset.check_config,)
    )
    # Virtual CPU devices, used where no accelerator is attached.
    devices = config.mesh.train.size + config.mesh.rollout.size
    jax.config.update("jax_num_cpu_devices", devices)
    run = Run(config, workdir)
  except ConfigError as error:
    print(f"ConfigError: {error}", file=sys.stderr)
    return 2
  for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda *_: run.interrupt())
  try:
    run.execute()
  except Exception as error:
    if not isinstance(error.__cause__, Interrupted):
      raise
    print(f"stopped on request; see {workdir}/summary.json", file=sys.stderr)
    return 130
  return 0


if __name__ == "__main__":
  logging.set_verbosity(logging.WARNING)
  app.run(main)
