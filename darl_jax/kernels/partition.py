"""How packed rows and parameters lie on a mesh, for what XLA cannot split.

XLA partitions a program of its own operations, but a Pallas kernel is one
opaque call to it: left alone it would gather every row on every device. So the
kernels' public functions take a ``Partition`` and run on each device's own part
inside ``shard_map``. Without one they see whole arrays.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Partition:
  """Which mesh axes cut what.

  Attributes:
    mesh: The mesh of the program.
    rows: Axes that cut the leading axis of every batch array.
    tensor: Axis that cuts heads, and the vocabulary where it divides it; None
      for neither.
    fsdp: Axis that cuts the parameters' embedding axis; None for none.
  """

  mesh: Mesh
  rows: tuple[str, ...]
  tensor: str | None
  fsdp: str | None

  def size(self, axis: str | None) -> int:
    """Devices along an axis; 1 for none."""
    return 1 if axis is None else self.mesh.shape[axis]

  @property
  def platform(self) -> str:
    """What the program is compiled for: cpu, gpu or tpu."""
    return self.mesh.devices.flat[0].platform

  @property
  def row_spec(self) -> PartitionSpec:
    """Of an array whose leading axis is the rows."""
    return PartitionSpec(self.rows)


def per_shard(
  function: Callable[..., Any],
  partition: Partition | None,
  *,
  in_specs: Any,
  out_specs: Any,
) -> Callable[..., Any]:
  """``function`` on each device's part; itself where there is only one.

  Differentiate through it only where every argument with a gradient is cut
  along all axes that the result varies over. Everything else has its custom
  rule outside, and both directions call ``per_shard``.

  Args:
    function: Of arrays; may use the mesh's axis names in collectives only where
      the axis has more than one device.
    partition: None for whole arrays.
    in_specs: A ``PartitionSpec`` per argument, as for ``jax.shard_map``.
    out_specs: As for ``jax.shard_map``; what is replicated must be equal on all
      devices, which nothing checks.
  """
  if partition is None or partition.mesh.size == 1:
    return function
  return jax.shard_map(
    function,
    mesh=partition.mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    check_vma=False,
  )
