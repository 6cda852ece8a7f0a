"""The learner's state on disk, by Orbax."""

import dataclasses

import jax
import orbax.checkpoint as ocp
from etils import epath

from darl_jax.types import Params, TrainState


def save(path: epath.Path, state: TrainState) -> None:
  """Writes a folder atomically, and waits until it is complete.

  Args:
    path: Of the folder, which is not there yet.
    state: Arrays of numpy, or sharded ones.
  """
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(_absolute(path), _tree(state))


def restore(path: epath.Path, like: TrainState) -> TrainState:
  """Reads a checkpoint into arrays shaped and sharded as ``like``'s.

  Args:
    path: A folder that ``save`` wrote.
    like: A state of arrays or of ``jax.ShapeDtypeStruct`` with shardings.
  """
  with ocp.StandardCheckpointer() as checkpointer:
    tree = checkpointer.restore(_absolute(path), _tree(like))
  return TrainState(**tree)


def restore_params(path: epath.Path, like: Params) -> Params:
  """Reads the parameters alone, a third of what a checkpoint holds.

  Args:
    path: A folder that ``save`` wrote.
    like: ``jax.ShapeDtypeStruct`` with shardings.

  Raises:
    ValueError: The checkpoint's parameters have other names or shapes.
  """
  with ocp.StandardCheckpointer() as checkpointer:
    stored = checkpointer.metadata(_absolute(path)).item_metadata["params"]
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
    return checkpointer.restore(_absolute(path), args=arguments)["params"]


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
  """By name; of anything with shapes."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
    for path, leaf in jax.tree.leaves_with_path(params)
  }


def _absolute(path: epath.Path) -> epath.Path:
  """Orbax takes no other."""
  return path if "://" in str(path) else epath.Path(path).resolve()


def _tree(state: TrainState) -> dict:
  """By field; what the objective does not need is not there."""
  fields = {
    field.name: getattr(state, field.name)
    for field in dataclasses.fields(state)
  }
  return {name: value for name, value in fields.items() if value is not None}
