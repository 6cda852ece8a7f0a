"""The text of a compiled module, taken apart.

It is that of XLA's ``HloModule::ToString``: computations of one instruction a
line, where metadata may run over several.
"""

import collections
import dataclasses
import functools
import math
import re

_BITS = {
  "pred": 8,
  "s2": 2,
  "u2": 2,
  "s4": 4,
  "u4": 4,
  "s8": 8,
  "u8": 8,
  "s16": 16,
  "u16": 16,
  "f16": 16,
  "bf16": 16,
  "s32": 32,
  "u32": 32,
  "f32": 32,
  "s64": 64,
  "u64": 64,
  "f64": 64,
  "c64": 64,
  "c128": 128,
  "token": 0,
}
HBM = 0


@dataclasses.dataclass(frozen=True)
class Buffer:
  """One array: its shape and where it lies."""

  dtype: str
  dims: tuple[int, ...]
  padded: int  # Elements, tiling included.
  space: int

  @property
  def elements(self) -> int:
    return math.prod(self.dims)

  @property
  def width(self) -> float:
    """Bytes of an element."""
    return _bits(self.dtype) / 8

  @property
  def bytes(self) -> float:
    return self.padded * self.width

  @property
  def hbm_bytes(self) -> float:
    return self.bytes if self.space == HBM else 0.0


@dataclasses.dataclass
class Instruction:
  """One line; ``text`` is all that follows the operands."""

  name: str
  shape: str
  opcode: str
  inside: str
  text: str

  @functools.cached_property
  def operands(self) -> list[str]:
    return NAME.findall(self.inside)

  @property
  def buffers(self) -> tuple[Buffer, ...]:
    return _buffers(self.shape)

  def called(self, attribute: str) -> str:
    """The computation that an attribute such as ``calls`` names."""
    return re.search(rf"\b{attribute}=%?([\w.\-]+)", self.text)[1]


class Computation:
  """Instructions by name, in order, and the root."""

  def __init__(self, name: str):
    self.name = name
    self.instructions: dict[str, Instruction] = {}
    self.root: Instruction | None = None

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    return {
      int(instruction.inside): instruction
      for instruction in self.instructions.values()
      if instruction.opcode == "parameter"
    }

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """Who reads each instruction."""
    users = collections.defaultdict(list)
    for instruction in self.instructions.values():
      for operand in dict.fromkeys(instruction.operands):
        users[operand].append(instruction)
    return users


@dataclasses.dataclass
class Module:
  computations: dict[str, Computation]
  entry: str
  num_partitions: int


NAME = re.compile(r"%([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LEFT = re.compile(r"^  (ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"(\w+)\[([\d,<= ]*)\](?:\{([^{}]*)\})?")


def parse(text: str) -> Module:
  computations: dict[str, Computation] = {}
  entry, current, instruction = "", None, None
  for line in text.splitlines():
    left = _LEFT.match(line) if current else None
    if left:
      instruction = _instruction(left[2], line[left.end() :])
      current.instructions[left[2]] = instruction
      if left[1]:
        current.root = instruction
    elif line == "}":
      current = None
    elif current:
      instruction.text += line  # Metadata may have lines of its own.
    elif " -> " in line and (header := _HEADER.match(line)):
      current = computations[header[2]] = Computation(header[2])
      entry = header[2] if header[1] else entry
  header = text[: text.find("\n")]
  if not entry or "is_scheduled=true" not in header:
    raise ValueError("not the text of a compiled, scheduled HLO module")
  partitions = re.search(r"num_partitions=(\d+)", header)
  return Module(computations, entry, int(partitions[1]) if partitions else 1)


def _instruction(name: str, right: str) -> Instruction:
  """From what stands right of the equals sign."""
  end = _closing(right, 0) + 1 if right[0] == "(" else right.find(" ")
  opened = right.find("(", end)
  closed = right.find(")", opened)
  return Instruction(
    name,
    right[:end],
    right[end:opened].strip(),
    right[opened + 1 : closed],
    right[closed + 1 :],
  )


def _closing(text: str, start: int) -> int:
  """Where the parenthesis that opens at ``start`` closes."""
  depth = 0
  for match in re.compile(r"[()]").finditer(text, start):
    depth += 1 if match[0] == "(" else -1
    if not depth:
      return match.start()
  raise ValueError("unbalanced parentheses in the HLO text")


@functools.cache
def _bits(dtype: str) -> int:
  if dtype.startswith("f8"):
    return 8
  return _BITS[dtype]


@functools.lru_cache(maxsize=65_536)
def _buffers(shape: str) -> tuple[Buffer, ...]:
  """The arrays of a shape's text; a tuple's, nested or not, in order."""
  buffers = []
  for dtype, dims, layout in _ARRAY.findall(shape):
    sizes = tuple(int(size.strip("<= ")) for size in dims.split(",") if size)
    space = re.search(r"S\((\d+)\)", layout)
    buffers.append(
      Buffer(
        dtype, sizes, _padded(sizes, layout), int(space[1]) if space else HBM
      )
    )
  return tuple(buffers)


def _padded(dims: tuple[int, ...], layout: str) -> int:
  """Elements of a tiled buffer: the minor axes fill whole tiles."""
  order, _, tiling = layout.partition(":")
  tile = re.match(r"T\(([\d,]+)\)", tiling)
  if not tile or not dims:
    return math.prod(dims)
  sizes = [dims[int(axis)] for axis in order.split(",")]
  for axis, unit in enumerate(reversed(tile[1].split(","))):
    if axis < len(sizes):
      sizes[axis] = -(-sizes[axis] // int(unit)) * int(unit)
  return math.prod(sizes)
