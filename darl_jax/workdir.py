"""A run's folder: who may write to it, and whether it holds a run already."""

import fcntl
import json
import pathlib
from typing import IO

from darl_jax.config import ConfigError

_LOCK = ".lock"


def claim(workdir: pathlib.Path) -> IO[str]:
  """Creates the folder and keeps other processes out of it.

  Returns:
    What holds the lock: until it is closed, or this process ends in any way.

  Raises:
    ConfigError: Another process has it, or it cannot be written to.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    lock = open(workdir / _LOCK, "w")  # noqa: SIM115
  except OSError as error:
    raise ConfigError(
      [
        f"workdir = {workdir} is no folder to write to: {error.strerror}. "
        f"Try --workdir=runs/{workdir.name}."
      ]
    ) from error
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    lock.close()
    raise ConfigError(
      [
        f"workdir = {workdir} is in use by another process. Try to stop that "
        f"one, or --workdir={workdir}-2."
      ]
    ) from error
  return lock


def problems(
  workdir: pathlib.Path,
  checkpoints: str,
  *,
  saved_step: int | None,
  num_steps: int,
) -> list[str]:
  """Why a run can neither begin nor go on here, in words of ``ConfigError``.

  Args:
    workdir: The run's folder.
    checkpoints: Where its checkpoints are.
    saved_step: Of the newest one; None where there is none.
    num_steps: Of the run.
  """
  if saved_step is not None and saved_step >= num_steps:
    return [
      f"workdir = {workdir} already holds a run of {saved_step} steps, which "
      f"are all of num_steps = {num_steps}. Try --workdir={workdir}-2, or a "
      "larger num_steps."
    ]
  if saved_step is None and (steps := _steps_taken(workdir)):
    return [
      f"workdir = {workdir} already holds a run of {steps} steps, and there is "
      f"no checkpoint to go on from in {checkpoints}. Try "
      f"--workdir={workdir}-2, or the checkpoint.directory of that run."
    ]
  return []


def _steps_taken(workdir: pathlib.Path) -> int:
  """Of a run that ended by itself; 0 where none did."""
  try:
    return json.loads((workdir / "summary.json").read_text())["steps"]
  except (OSError, ValueError, KeyError, TypeError):
    return 0
