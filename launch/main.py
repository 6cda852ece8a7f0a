"""Trains: python launch/main.py --config=configs/darl.py --workdir=DIR."""

import os
import pathlib
import signal
import sys
import time

from absl import app, flags, logging
from ml_collections import config_flags

from darl_jax import config as config_lib
from darl_jax.loop import Run, Starved, interrupted
from darl_jax.prompts import dataset
from darl_jax.sharding import meshes


def define_and_parse_flags(argv: list[str]) -> list[str]:
  """Absl's flags, where whatever is wrong is one line and exit status 2."""
  try:
    config_flags.DEFINE_config_file(
      "config", "configs/darl.py", "The run; any field can be set by its name."
    )
    flags.DEFINE_string("workdir", None, "By default a new folder in runs/.")
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise flags.Error(f"not understood: {' '.join(rest[1:])}")
    list(flags.FLAGS.config)  # A file that did not load raises when it is read.
  except Exception as error:  # A config file is a program: it may raise any.
    said = error.args[-1] if error.args else type(error).__name__
    if isinstance(error, (AttributeError, KeyError)):
      said = f"no such field: {said}"
    print(f"ConfigError: {said} (in: {' '.join(argv[1:])})", file=sys.stderr)
    sys.exit(2)
  return rest


def main(_) -> int:
  runs: list[Run] = []

  def stop(signum, _) -> None:
    if not runs or runs[0].stopping:  # Nothing to save, or asked for twice.
      os._exit(128 + signum)
    runs[0].interrupt()

  signal.signal(signal.SIGINT, stop)
  signal.signal(signal.SIGTERM, stop)
  name = config_flags.get_config_filename(flags.FLAGS["config"])
  new = f"{pathlib.Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
  workdir = pathlib.Path(flags.FLAGS.workdir or pathlib.Path("runs") / new)
  try:
    checks = (dataset.check_config,)
    config = config_lib.parse(flags.FLAGS.config, extra_checks=checks)
    meshes.prepare_cpu(config.mesh.train.size + config.mesh.rollout.size)
    runs.append(Run(config, workdir))
    runs[0].execute()
  except config_lib.ConfigError as error:
    print(f"ConfigError: {error}", file=sys.stderr)
    return 2
  except Starved as error:
    print(f"Starved: {error}", file=sys.stderr)
    return 1
  except Exception as error:
    if not interrupted(error):
      raise
    print(f"stopped on request; see {workdir}/summary.json", file=sys.stderr)
    return 130
  return 0


if __name__ == "__main__":
  logging.set_verbosity(logging.WARNING)
  app.run(main, flags_parser=define_and_parse_flags)
