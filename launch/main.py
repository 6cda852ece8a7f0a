"""Trains: python launch/main.py --config=configs/darl.py --workdir=DIR."""

import pathlib
import signal
import sys
import time

from absl import app, flags, logging
from ml_collections import config_flags

from darl_jax import config as config_lib
from darl_jax.config import ConfigError
from darl_jax.loop import Run, interrupted
from darl_jax.prompts import dataset
from darl_jax.sharding import meshes

try:
  _CONFIG = config_flags.DEFINE_config_file(
    "config", "configs/darl.py", "The run; any field can be set by its name."
  )
except (AttributeError, KeyError) as error:  # Raised here, not when parsing.
  print(f"ConfigError: no such field: {error.args[0]}", file=sys.stderr)
  sys.exit(2)
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
    meshes.prepare_cpu(config.mesh.train.size + config.mesh.rollout.size)
    run = Run(config, workdir)
  except ConfigError as error:
    print(f"ConfigError: {error}", file=sys.stderr)
    return 2
  for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda *_: run.interrupt())
  try:
    run.execute()
  except Exception as error:
    if not interrupted(error):
      raise
    print(f"stopped on request; see {workdir}/summary.json", file=sys.stderr)
    return 130
  return 0


def parse_flags(argv: list[str]) -> list[str]:
  arguments = app.parse_flags_with_usage(argv)
  try:
    list(_CONFIG.value)  # A file that did not load raises when it is read.
  except OSError as error:
    print(f"ConfigError: {error}", file=sys.stderr)
    sys.exit(2)
  return arguments


if __name__ == "__main__":
  logging.set_verbosity(logging.WARNING)
  app.run(main, flags_parser=parse_flags)
