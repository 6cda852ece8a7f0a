"""Compiles programs for chips that are elsewhere, and keeps what came of it."""

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from darl_jax.planner import chips, hlo_cost
from darl_jax.planner import estimate as estimate_lib

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# As libtpu words it when a program's buffers exceed HBM, before and after
# their assignment.
_OUT_OF_HBM = (
  r"total memory required for HLO temporaries \(([\d.]+)([KMGT]?)\)",
  r"Ran out of memory in memory space hbm\. Used ([\d.]+)([KMGT]?)",
)


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of HBM that a program takes on each device.

  Attributes:
    arguments: Its inputs.
    outputs: Its results, those that take an input's place included.
    aliased: Of the results that take an input's place.
    temporaries: What it needs in between.
    code: The program itself.
    peak: Of all of these at a time.
  """

  arguments: float
  outputs: float
  aliased: float
  temporaries: float
  code: float
  peak: float


@dataclasses.dataclass(frozen=True)
class Program:
  """One compiled program of the run.

  Attributes:
    name: Of the program.
    mesh: "train" or "rollout".
    devices: Of that mesh.
    chip: What it was compiled for.
    resident: Bytes on each device beside the program's own, while it runs.
    tokens: That one execution is worth.
    model_flops: Of the model on these tokens, over all devices; nothing that
      is computed twice counts twice.
    compile_seconds: Lowering included.
    memory: None where the compiler ran out of it, or refused the program.
    needed: Bytes on each device that the compiler asked for instead; None where
      it did not say, or refused the program for another reason.
    failure: Why there is no program, or "".
    cost: Of one execution on one device.
    estimate: Of its seconds.
  """

  name: str
  mesh: str
  devices: int
  chip: chips.Chip
  resident: float
  tokens: float
  model_flops: float
  compile_seconds: float
  memory: Memory | None = None
  needed: float | None = None
  failure: str = ""
  cost: hlo_cost.Cost | None = None
  estimate: estimate_lib.Estimate | None = None

  @property
  def total(self) -> float | None:
    """Bytes of HBM on each device while it runs, if known."""
    own = self.memory.peak if self.memory else self.needed
    return None if own is None else own + self.resident

  @property
  def fits(self) -> bool:
    return (
      self.memory is not None
      and self.memory.peak + self.resident <= self.chip.hbm_bytes
    )

  @property
  def tokens_per_s(self) -> float | None:
    return self.tokens / self.estimate.seconds if self.estimate else None

  @property
  def peak_share(self) -> float | None:
    """Model FLOPs over what all devices could do in the estimated time."""
    if not self.estimate:
      return None
    possible = self.estimate.seconds * self.devices * self.chip.flops_per_s
    return self.model_flops / possible

  @property
  def kernel_share(self) -> float | None:
    """Of the Pallas kernels in the estimated time."""
    if not self.estimate:
      return None
    return self.estimate.kernels / self.estimate.seconds


def compile_program(
  lower: Callable[[], jax.stages.Lowered],
  *,
  name: str,
  mesh_name: str,
  mesh: jax.sharding.Mesh,
  slice_shape: Sequence[int],
  resident: float,
  tokens: float,
  model_flops: float,
) -> Program:
  """Compiles one program and reads its cost.

  Args:
    lower: Traces it.
    name: Of the program.
    mesh_name: "train" or "rollout".
    mesh: Of TPU devices that need not be attached.
    slice_shape: Chips of their slice along each axis.
    resident: See ``Program``.
    tokens: See ``Program``.
    model_flops: See ``Program``.

  Returns:
    The program; one that does not fit is returned too.
  """
  devices = list(mesh.devices.flat)
  program = Program(
    name=name,
    mesh=mesh_name,
    devices=len(devices),
    chip=chips.of_device(devices[0].device_kind),
    resident=resident,
    tokens=tokens,
    model_flops=model_flops,
    compile_seconds=0.0,
  )
  start = time.monotonic()
  lowered = lower()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    # Out of memory, mostly. Some slices also refuse a mesh of a part of them.
    return dataclasses.replace(
      program,
      compile_seconds=time.monotonic() - start,
      needed=needed_hbm(str(error)),
      failure=str(error).splitlines()[0],
    )
  seconds = time.monotonic() - start
  cost = hlo_cost.analyze(compiled.as_text(), dict(mesh.shape))
  return dataclasses.replace(
    program,
    compile_seconds=seconds,
    memory=memory(compiled.memory_analysis()),
    cost=cost,
    estimate=estimate_lib.estimate(
      cost, program.chip, [device.coords for device in devices], slice_shape
    ),
  )


def memory(stats: Any) -> Memory:
  """From ``compiled.memory_analysis()``."""
  live = (
    stats.argument_size_in_bytes
    + stats.output_size_in_bytes
    - stats.alias_size_in_bytes
    + stats.temp_size_in_bytes
    + stats.generated_code_size_in_bytes
  )
  return Memory(
    arguments=stats.argument_size_in_bytes,
    outputs=stats.output_size_in_bytes,
    aliased=stats.alias_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    code=stats.generated_code_size_in_bytes,
    peak=max(live, stats.peak_memory_in_bytes),
  )


def needed_hbm(message: str) -> float | None:
  """Bytes that the compiler would have needed, from its error message.

  None where it ran out of something else, such as the VMEM of a kernel.
  """
  for pattern in _OUT_OF_HBM:
    if found := re.search(pattern, message):
      return float(found[1]) * _UNITS[found[2]]
  return None
