"""Logical axis to mesh axis: one table per mesh, and what follows from it."""

import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.kernels.partition import Partition
from darl_jax.types import Params

MeshAxis = str | tuple[str, ...] | None

# The learner: parameters and optimizer state are cut along fsdp (ZeRO-3) and
# tensor, rows of a batch along data and fsdp.
TRAIN_RULES: Mapping[str, MeshAxis] = {
  "layer": None,
  "vocab": "tensor",
  "embed": "fsdp",
  "heads": "tensor",
  "kv_heads": "tensor",
  "head_dim": None,
  "expert": "tensor",
  "mlp": "tensor",
  "rank": None,
  "rows": ("data", "fsdp"),
}

# The sampler: every data slice holds all parameters, cut along tensor.
ROLLOUT_RULES: Mapping[str, MeshAxis] = {
  "layer": None,
  "vocab": "tensor",
  "embed": None,
  "heads": "tensor",
  "kv_heads": "tensor",
  "head_dim": None,
  "expert": "tensor",
  "mlp": "tensor",
  "rank": None,
  "rows": "data",
}

# Axes left whole where the mesh axis does not divide them: a vocabulary is what
# it is, and experts that cannot be dealt out are each cut along "mlp" instead.
_WHOLE_IF_RAGGED = ("vocab", "expert")


def spec(
  axes: tuple[str | None, ...],
  shape: tuple[int, ...],
  *,
  mesh: Mesh,
  rules: Mapping[str, MeshAxis],
) -> PartitionSpec:
  """The partition of an array whose axes have these logical names.

  A mesh axis cuts one dimension only: of those that name it, the first that it
  divides.

  Args:
    axes: A name per dimension; None leaves a dimension whole.
    shape: The array's shape.
    mesh: Whose axis sizes must divide the shape.
    rules: ``TRAIN_RULES`` or ``ROLLOUT_RULES``.

  Raises:
    ValueError: The mesh does not divide the shape, or an axis has no rule.
  """
  entries: list[MeshAxis] = []
  used: set[str] = set()
  for name, size in zip(axes, shape, strict=True):
    if name is None:
      entries.append(None)
      continue
    if name not in rules:
      raise ValueError(
        f"logical axis {name!r} has no rule; rules are {', '.join(rules)}"
      )
    target = rules[name]
    names = (target,) if isinstance(target, str) else target or ()
    parts = math.prod(mesh.shape[axis] for axis in names)
    if used.intersection(names):
      target = None
    elif size % parts:
      if name in _WHOLE_IF_RAGGED:
        target = None
      else:
        raise ValueError(
          f"axis {name!r} of size {size} does not split over {names} = {parts}"
        )
    else:
      used.update(names)
    entries.append(target)
  return PartitionSpec(*entries)


def param_shardings(
  logical_axes: Params,
  shapes: Params,
  *,
  mesh: Mesh,
  rules: Mapping[str, MeshAxis],
) -> Params:
  """A ``NamedSharding`` for every parameter.

  Args:
    logical_axes: Tree of tuples of names, as ``Policy.logical_axes``.
    shapes: The same tree of anything with a shape.
    mesh: Where the parameters go.
    rules: That mesh's table.
  """
  return jax.tree.map(
    lambda axes, leaf: NamedSharding(
      mesh, spec(axes, leaf.shape, mesh=mesh, rules=rules)
    ),
    logical_axes,
    shapes,
    is_leaf=lambda node: isinstance(node, tuple),
  )


def rows_sharding(
  mesh: Mesh, rules: Mapping[str, MeshAxis], *, leading: int = 0
) -> NamedSharding:
  """Of arrays [..., rows, ...] with ``leading`` axes before the rows."""
  return NamedSharding(mesh, PartitionSpec(*[None] * leading, rules["rows"]))


def partition(mesh: Mesh, rules: Mapping[str, MeshAxis]) -> Partition:
  """The same table for what XLA cannot split by itself."""
  rows = rules["rows"]
  return Partition(
    mesh=mesh,
    rows=(rows,) if isinstance(rows, str) else tuple(rows),
    tensor=rules["heads"],
    fsdp=rules["embed"],
  )


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())
