"""The learner's state on disk."""

import pathlib

import orbax.checkpoint as ocp

from darl_jax.types import TrainState


def save(directory: pathlib.Path, state: TrainState) -> pathlib.Path:
  """Writes a checkpoint atomically and waits until it is complete.

  Args:
    directory: Of the run's checkpoints; the state goes to its own folder,
      named by its step.
    state: Sharded arrays; each process writes its shards.

  Returns:
    The checkpoint's folder.
  """
  path = directory.absolute() / f"step_{int(state.step):08d}"
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, _tree(state))
  return path


def restore(path: pathlib.Path, like: TrainState) -> TrainState:
  """Reads a checkpoint into arrays shaped and sharded as ``like``'s.

  Args:
    path: A folder that ``save`` returned.
    like: A state of arrays or of ``jax.ShapeDtypeStruct`` with shardings.
  """
  with ocp.StandardCheckpointer() as checkpointer:
    tree = checkpointer.restore(path.absolute(), _tree(like))
  return TrainState(**tree)


def _tree(state: TrainState) -> dict:
  return {
    "step": state.step,
    "params": state.params,
    "opt_state": state.opt_state,
  }
