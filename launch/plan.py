"""Plans: python launch/plan.py --config=configs/X.py --topology=v5p:4x4x4.

Compiles every program of the run for a TPU slice, with no TPU, and says what
it needs there. Exit status 3 where something does not fit.
"""

import json
import os
import sys

# Before jax is imported: the TPUs are only compiled for.
os.environ["JAX_PLATFORMS"] = "cpu"

import command_line  # noqa: E402
from absl import app, flags, logging  # noqa: E402
from ml_collections import config_flags  # noqa: E402
from rich.console import Console  # noqa: E402

from darl_jax import config as config_lib  # noqa: E402
from darl_jax.planner import plan as plan_lib  # noqa: E402
from darl_jax.planner import report, topology  # noqa: E402
from darl_jax.prompts import dataset  # noqa: E402


def define_flags() -> None:
  config_flags.DEFINE_config_file(
    "config", "configs/darl.py", "The run; any field can be set by its name."
  )
  flags.DEFINE_string("topology", "v5p:4x4x4", "The slice: CHIP:AxB[xC].")
  flags.DEFINE_bool("json", False, "Print one JSON object instead of tables.")


def main(_) -> int:
  progress = Console(stderr=True)
  try:
    name = flags.FLAGS.topology
    checks = (dataset.check_config, lambda _: topology.name_problems(name))
    config = config_lib.parse(flags.FLAGS.config, extra_checks=checks)
    vocab_size = config.model.vocab_size
    if not vocab_size:
      prompts = dataset.load(config.prompts, seed=config.seed)
      vocab_size = prompts.tokenizer.vocab_size
    compiled = []

    def show(name: str) -> None:
      compiled.append(name)
      status.update(f"compiling; done: {', '.join(compiled)}")

    with progress.status("compiling: minutes for a large model") as status:
      plan = plan_lib.plan(
        config,
        name,
        vocab_size=vocab_size,
        progress=show,
      )
  except config_lib.ConfigError as error:
    print(f"ConfigError: {error}", file=sys.stderr)
    return 2
  if flags.FLAGS.json:
    print(json.dumps(report.to_json(plan), indent=2))
  else:
    report.print_plan(plan, Console())
  return 0 if plan.fits else 3


if __name__ == "__main__":
  logging.set_verbosity(logging.WARNING)
  app.run(main, flags_parser=command_line.parser(define_flags))
