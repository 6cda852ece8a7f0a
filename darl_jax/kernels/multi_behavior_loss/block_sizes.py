"""Block sizes of the multi-behavior loss, and the memory traffic they imply."""

import dataclasses
import math
from typing import Literal

# A TPU vector register holds 8 x 128 float32; memory is laid out in such tiles.
SUBLANES, LANES = 8, 128
# Fields of ``ref.BehaviorSums``.
NUM_SUMS = 8
# Entries of the version table up to which the TPU kernel is used: it keeps
# NUM_SUMS registers of partial sums for each, 4 MiB of VMEM at 128.
MAX_VERSIONS = 128
# Of the 16 MiB of VMEM that a kernel may use by default on the smallest chip.
_VMEM_BYTES = 8 << 20
# Seven [B, T] arrays of at most 4 bytes and the gradient, each in two buffers
# (one in flight), and one scratch array.
_VMEM_BYTES_PER_TOKEN = 2 * 8 * 4 + 4

Direction = Literal["primal", "forward", "backward"]


@dataclasses.dataclass(frozen=True)
class TpuBlock:
  """Rows and tokens of a block; the arrays are cut into a grid of them.

  Raises:
    ValueError: Not a whole number of registers, or too large.
  """

  rows: int
  tokens: int

  def __post_init__(self):
    for name, value, unit in (
      ("rows", self.rows, SUBLANES),
      ("tokens", self.tokens, LANES),
    ):
      if value < unit or value % unit:
        raise ValueError(
          f"{name} = {value} is not a positive multiple of {unit}, the side of "
          f"a TPU register. Try {max(unit, value // unit * unit)}."
        )
    used = self.rows * self.tokens * _VMEM_BYTES_PER_TOKEN
    if used > _VMEM_BYTES:
      most = _VMEM_BYTES // _VMEM_BYTES_PER_TOKEN // self.rows // LANES * LANES
      advice = f"tokens = {most}" if most else f"rows = {SUBLANES}"
      raise ValueError(
        f"rows = {self.rows} x tokens = {self.tokens} need {used} bytes of "
        f"VMEM for the blocks, above {_VMEM_BYTES}. Try {advice}."
      )

  def fit(self, shape: tuple[int, int]) -> tuple[int, int]:
    """The block for an array [B, T]: at most this large, and little overhang.

    An axis is cut into as few blocks as this size allows and these are then
    made equal. An axis shorter than a register is taken whole; otherwise no
    block is longer than the axis.
    """
    return tuple(
      size if size < unit else _even(size, min(most, size // unit * unit), unit)
      for size, most, unit in zip(
        shape, (self.rows, self.tokens), (SUBLANES, LANES), strict=True
      )
    )


@dataclasses.dataclass(frozen=True)
class CudaBlock:
  """Tokens of a block, of the rows laid end to end, and the warps that do it.

  Raises:
    ValueError: Not a power of two, or not a whole number of threads.
  """

  tokens: int
  warps: int

  def __post_init__(self):
    for name, value in (("tokens", self.tokens), ("warps", self.warps)):
      if value < 1 or value & (value - 1):
        below = 1 << (max(1, value).bit_length() - 1)
        raise ValueError(
          f"{name} = {value} is not a power of two, which every Triton shape "
          f"is. Try {below}."
        )
    if self.tokens < 32 * self.warps:
      raise ValueError(
        f"tokens = {self.tokens} is less than one for each thread of "
        f"warps = {self.warps}. Try tokens = {32 * self.warps}."
      )


# From the schedules that compilers print: nothing has run on an accelerator.
# TPU: an inner step takes 218 cycles for 32 rows, 119 for 16 and 86 for 8 (v5p,
# 8 versions, 128 tokens), since four registers hide each other's latency. With
# 1024 tokens a step of the grid spends 1,750 of 2,100 cycles on arithmetic, and
# what is fetched before the first one is 0.7 MB.
TPU = TpuBlock(rows=32, tokens=1024)
# CUDA: with 8 tokens a thread each float32 array is read in two vectors of 16
# bytes, and 64 x 8192 make 512 blocks, four for each multiprocessor of an H100.
CUDA = CudaBlock(tokens=1024, warps=4)


def _even(size: int, most: int, unit: int) -> int:
  """``size`` over the fewest parts of at most ``most``, up to a ``unit``."""
  parts = math.ceil(size / most)
  return math.ceil(size / parts / unit) * unit


def traffic_bytes(
  shape: tuple[int, int],
  *,
  block: TpuBlock | CudaBlock,
  direction: Direction,
  trust_region: Literal["behavior", "decoupled"],
  num_versions: int,
  logprobs_bytes: int = 4,
) -> int:
  """Bytes that grid and blocks move between the chip's memory and its cores.

  Blocks count in full, their overhang past the end of the array too.

  Args:
    shape: (B, T).
    block: ``TPU`` or ``CUDA``, or another block of either kernel.
    direction: ``primal`` without a gradient; ``forward`` with it written out;
      ``backward`` the gradient read back, scaled and written in the dtype of
      the log-probs.
    trust_region: ``behavior`` does not read proximal log-probs.
    num_versions: E.
    logprobs_bytes: Of a log-prob of the policy being trained; the other floats
      are float32.
  """
  if direction == "backward":
    return math.prod(shape) * (4 + logprobs_bytes)
  others = 4 if trust_region == "decoupled" else 3
  by_token = logprobs_bytes + 4 * others + 1 + 4  # The mask, the version.
  if direction == "forward":
    by_token += 4
  if isinstance(block, TpuBlock):
    rows, tokens = block.fit(shape)
    outputs = math.ceil(shape[0] / rows)
    grid_tokens = outputs * rows * math.ceil(shape[1] / tokens) * tokens
    versions = num_versions
  else:
    # Its mask is converted from bool to int8 beforehand: read and written.
    by_token += 2
    outputs = math.ceil(math.prod(shape) / block.tokens)
    grid_tokens = outputs * block.tokens
    versions = math.ceil(num_versions / SUBLANES) * SUBLANES
  return (
    grid_tokens * by_token
    + 4 * outputs * (versions + 1) * NUM_SUMS
    + 4 * 2 * num_versions
  )
