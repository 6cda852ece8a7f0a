"""How long a program takes, from what it costs and what a chip can do.

Two ways, neither of which has met a real chip:

* ``roofline``: the greater of matrix products at the peak rate and bytes at
  full HBM bandwidth. Nothing is faster.
* ``compiler``: XLA's own estimate of cycles, summed over the program, with
  kernels at their roofline (the compiler knows nothing of them) and the bytes
  of what has no estimate at full bandwidth; at least the bytes of everything.
  Compiled alone, matrix products of a transformer's size come to 0.85 to 0.98
  of peak in this way on v5e and v5p. Element-wise work and changes of layout
  come out two to six times slower than bandwidth allows.

Collectives come on top: at full link bandwidth of the axes that a group spans,
and no faster than their messages hop. How much of them runs beside the rest is
up to the schedule, so two bounds are given: all of it, and none.
"""

import dataclasses
from collections.abc import Sequence

from darl_jax.planner import chips
from darl_jax.planner.hlo_cost import Collective, Cost, Kernel


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Seconds of one execution.

  Attributes:
    method: What ``busy`` rests on: "compiler" or "roofline".
    compute: Matrix products at the peak rate.
    memory: HBM traffic at full bandwidth.
    collectives: Of all of them, one after the other.
    kernels: Of the Pallas kernels among ``busy``.
    busy: Without collectives.
  """

  method: str
  compute: float
  memory: float
  collectives: float
  kernels: float
  busy: float

  @property
  def hidden(self) -> float:
    """With every collective beside the rest."""
    return max(self.busy, self.collectives)

  @property
  def seconds(self) -> float:
    """With no collective beside the rest: the figure to plan with."""
    return self.busy + self.collectives


def estimate(
  cost: Cost,
  chip: chips.Chip,
  coordinates: Sequence[Sequence[int]],
  slice_shape: Sequence[int],
) -> Estimate:
  """The time of one execution.

  Args:
    cost: On one device.
    chip: What it runs on.
    coordinates: Of the chip of each partition of the program.
    slice_shape: Chips of the slice along each axis.
  """
  compute = cost.flops / chip.flops_per_s
  memory = cost.bytes / chip.hbm_bytes_per_s
  kernels = sum(
    kernel_seconds(kernel, chip) for kernel in cost.kernels.values()
  )
  roofline = max(compute, memory)
  busy = roofline
  if chip.clock_hz:
    estimated = cost.cycles / chip.clock_hz + kernels
    estimated += cost.unestimated_bytes / chip.hbm_bytes_per_s
    busy = max(estimated, roofline)
  return Estimate(
    method="compiler" if chip.clock_hz else "roofline",
    compute=compute,
    memory=memory,
    collectives=sum(
      collective_seconds(entry, chip, coordinates, slice_shape)
      for entry in cost.collectives.values()
    ),
    kernels=kernels,
    busy=busy,
  )


def kernel_seconds(kernel: Kernel, chip: chips.Chip) -> float:
  """Of all executions of a Pallas kernel, at its roofline."""
  compute = kernel.flops / chip.flops_per_s
  return max(compute, kernel.bytes / chip.hbm_bytes_per_s)


def collective_seconds(
  entry: Collective,
  chip: chips.Chip,
  coordinates: Sequence[Sequence[int]],
  slice_shape: Sequence[int],
) -> float:
  """Of all executions of equal collectives; arguments as ``estimate``."""
  group = [coordinates[number][: len(slice_shape)] for number in entry.group]
  permutes = entry.kind == "collective-permute"
  way = chip.passing if permutes else chip.ring
  rate, hops = way(group, slice_shape)
  times = 2 if entry.kind == "all-reduce" else 1
  latency = entry.count * times * hops * chips.HOP_SECONDS
  return max(entry.bytes / rate, latency)
