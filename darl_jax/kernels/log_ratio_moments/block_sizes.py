"""Block sizes of the log-ratio moments' kernels: the table and its rules."""

import dataclasses

# Tile of 32-bit values in a TPU's vector registers: [sublanes, lanes].
SUBLANES = 8
LANES = 128


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """What one step of the grid holds.

  Attributes:
    rows: Rows of the batch.
    tokens: Tokens of each row.
    segments: Trajectories of each row. More than that are counted in further
      passes over the data.
  """

  rows: int
  tokens: int
  segments: int


# 32 rows are the tile of the mask's bytes, and 32 x 4096 tokens are 2.75 MB:
# large enough that a step's fixed cost (a third of a microsecond) is small
# beside its transfer, and twice that (one block is fetched while another is
# used) is a third of the 16 MB of vector memory that a kernel gets by default.
# Fewer tokens a block cost time too: on v5p a step of the walk is about 440
# cycles for 8 rows of 4096 tokens, most of them waiting for reductions.
TPU = BlockSizes(rows=32, tokens=4096, segments=1024)

# Of rows with more trajectories than that: 8 rows of 8192 in 7 outputs are
# 1.8 MB, so that one pass still does.
TPU_MANY_SEGMENTS = BlockSizes(rows=8, tokens=4096, segments=8192)

# One row for each program, whose four warps hold 8 tokens a thread and the
# sums of a row's trajectories, one a thread, in registers.
CUDA = BlockSizes(rows=1, tokens=1024, segments=128)


def tpu(rows: int, tokens: int, num_segments: int) -> BlockSizes:
  """The table's entry for TPU, cut down to arrays of this shape.

  The tokens are split evenly over as many blocks as the table asks for, so that
  little of the last one lies outside of the row.
  """
  many = num_segments > TPU.segments
  entry = TPU_MANY_SEGMENTS if many else TPU
  blocks = _ceil(tokens, entry.tokens)
  return BlockSizes(
    rows=min(entry.rows, _round_up(rows, SUBLANES)),
    tokens=_round_up(_ceil(tokens, blocks), LANES),
    segments=min(entry.segments, _round_up(num_segments, LANES)),
  )


def cuda(tokens: int, num_segments: int) -> BlockSizes:
  """The table's entry for CUDA, cut down to arrays of this shape."""
  return BlockSizes(
    rows=CUDA.rows,
    tokens=min(CUDA.tokens, max(16, _power_of_two(tokens))),
    segments=min(CUDA.segments, max(16, _power_of_two(num_segments))),
  )


def check_tpu(sizes: BlockSizes) -> None:
  """Raises ValueError where Mosaic would refuse the blocks."""
  problems = [
    f"{name} = {value} must be a positive multiple of {unit}, {why}. "
    f"Try {max(unit, _round_up(value, unit))}."
    for name, value, unit, why in (
      ("rows", sizes.rows, SUBLANES, "the sublanes of a vector register"),
      ("tokens", sizes.tokens, LANES, "the lanes of a vector register"),
      ("segments", sizes.segments, LANES, "the lanes of a vector register"),
    )
    if value < 1 or value % unit
  ]
  _raise(problems)


def check_cuda(sizes: BlockSizes) -> None:
  """Raises ValueError where Triton would refuse the blocks."""
  problems = [
    f"{name} = {value} must be a power of two, as Triton's arrays are. "
    f"Try {_power_of_two(max(1, value))}."
    for name, value in (("tokens", sizes.tokens), ("segments", sizes.segments))
    if value < 1 or value & (value - 1)
  ]
  if sizes.rows != 1:
    problems.append(
      f"rows = {sizes.rows} must be 1: a program walks along one row. Try 1."
    )
  _raise(problems)


def _raise(problems: list[str]) -> None:
  if problems:
    raise ValueError("\n".join(problems))


def _ceil(value: int, unit: int) -> int:
  """Blocks of ``unit`` that cover ``value``, at least one."""
  return max(1, -(-value // unit))


def _round_up(value: int, unit: int) -> int:
  return _ceil(value, unit) * unit


def _power_of_two(value: int) -> int:
  """The smallest power of two that is at least ``value``, itself at least 1."""
  return 1 << max(0, value - 1).bit_length()
