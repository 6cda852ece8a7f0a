"""The learner's state on disk."""

import pathlib

import jax
import orbax.checkpoint as ocp

from darl_jax.types import Params, TrainState


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


def restore_params(path: pathlib.Path, like: Params) -> Params:
  """Reads the parameters alone, a third of what a checkpoint holds.

  Args:
    path: A folder that ``save`` returned.
    like: ``jax.ShapeDtypeStruct`` with shardings.

  Raises:
    ValueError: The checkpoint's parameters have other names or shapes.
  """
  with ocp.StandardCheckpointer() as checkpointer:
    stored = checkpointer.metadata(path.absolute()).item_metadata["params"]
  theirs, ours = _shapes(stored), _shapes(like)
  if theirs != ours:
    differ = sorted(dict(theirs.items() ^ ours.items()))
    raise ValueError(
      f"{len(differ)} parameters differ: "
      + "; ".join(
        f"{name} is {theirs.get(name, 'not there')}, not "
        f"{ours.get(name, 'wanted')}"
        for name in differ
      )
    )
  item = {"params": like}
  arguments = ocp.args.PyTreeRestore(
    item=item,
    restore_args=ocp.checkpoint_utils.construct_restore_args(item),
    partial_restore=True,
  )
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    return checkpointer.restore(path.absolute(), args=arguments)["params"]


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
  """By name; of anything with shapes."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
    for path, leaf in jax.tree.leaves_with_path(params)
  }


def newest(directory: pathlib.Path) -> pathlib.Path | None:
  """The folder that ``save`` completed for the greatest step; None if none."""
  complete = (
    path
    for path in directory.glob("step_*")
    if path.name.removeprefix("step_").isdigit()
  )
  return max(complete, default=None, key=lambda path: int(path.name[5:]))


def _tree(state: TrainState) -> dict:
  return {
    "step": state.step,
    "params": state.params,
    "opt_state": state.opt_state,
  }
