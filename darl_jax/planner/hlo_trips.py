"""How often a loop of a compiled module runs.

A module compiled for a TPU does not say; its counter has to be followed.
"""

import dataclasses
import re
from collections.abc import Mapping

from darl_jax.planner.hlo_text import Computation, Instruction, Module

# One operand, whose value these have.
_SAME = frozenset(
  (
    "bitcast",
    "reshape",
    "convert",
    "copy",
    "copy-start",
    "copy-done",
    "broadcast",
  )
)


def trips(
  module: Module,
  computation: Computation,
  loop: Instruction,
  known: Mapping[int, int],
) -> tuple[int | None, dict[int, int]]:
  """How often a loop runs, and the carried values that it never changes.

  The condition compares a counter with a constant: the counter is a carried
  element that starts at a known value and that the body adds a constant to.

  Args:
    module: All of it.
    computation: Where the loop is.
    loop: The ``while`` instruction.
    known: Elements of the computation's parameter, a tuple, whose value is
      known.

  Returns:
    Trips, or None where they cannot be read; and known elements of what the
    loop's body takes.
  """
  return _Tracer(module).trips(computation, loop, known)


# What is known of a scalar while it is traced through a loop: an integer, or
# the loop's carried element at an index plus an offset.


@dataclasses.dataclass(frozen=True)
class _Carried:
  index: int
  offset: int = 0


_Value = int | _Carried | None


class _Tracer:
  """Follows scalars through the computations of a module."""

  def __init__(self, module: Module):
    self._module = module

  def trips(
    self, computation: Computation, loop: Instruction, known: Mapping[int, int]
  ) -> tuple[int | None, dict[int, int]]:
    """See ``trips``."""
    initial = computation.instructions[loop.operands[0]]
    body = self._module.computations[loop.called("body")]
    condition = self._module.computations[loop.called("condition")]
    starts, inner = {}, {}
    count = len(loop.buffers)
    for index in range(count):
      start = self._element(computation, initial, index, known)
      if isinstance(start, int):
        starts[index] = start
        if self._element(body, body.root, index, {}) == _Carried(index):
          inner[index] = start
    compare, values = self._comparison(condition, inner)
    if compare is None or None in values:
      return None, inner
    direction = re.search(r"direction=(\w+)", compare.text)[1]
    counter, bound = values
    if isinstance(bound, _Carried):
      counter, bound = bound, counter
      direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(
        direction, direction
      )
    if not isinstance(counter, _Carried) or not isinstance(bound, int):
      return None, inner
    after = self._element(body, body.root, counter.index, inner)
    start = starts.get(counter.index)
    if start is None or not isinstance(after, _Carried):
      return None, inner
    if after.index != counter.index or not after.offset:
      return None, inner
    return (
      _count(start + counter.offset, after.offset, bound, direction),
      inner,
    )

  def _comparison(
    self, condition: Computation, known: Mapping[int, int]
  ) -> tuple[Instruction | None, list[_Value]]:
    """The comparison that a condition ends in, and both its sides."""
    root, scope = condition.root, (condition, known, None)
    while root.opcode in ("fusion", "bitcast", "copy"):
      computation, known, outer = scope
      if root.opcode != "fusion":
        root = computation.instructions[root.operands[0]]
        continue
      inner = self._module.computations[root.called("calls")]
      scope = (inner, {}, (computation, root, known, outer))
      root = inner.root
    if root.opcode != "compare":
      return None, []
    computation, known, outer = scope
    return root, [
      self._value(computation, computation.instructions[name], known, outer)
      for name in root.operands
    ]

  def _element(
    self,
    computation: Computation,
    instruction: Instruction,
    index: int,
    known: Mapping[int, int],
    outer: tuple | None = None,
  ) -> _Value:
    """What element ``index`` of a tuple is."""
    if instruction.opcode == "tuple":
      name = instruction.operands[index]
      return self._value(
        computation, computation.instructions[name], known, outer
      )
    if instruction.opcode == "parameter" and outer is None:
      return known.get(index, _Carried(index))
    if instruction.opcode == "fusion":
      inner = self._module.computations[instruction.called("calls")]
      scope = (computation, instruction, known, outer)
      return self._element(inner, inner.root, index, {}, scope)
    return None

  def _value(
    self,
    computation: Computation,
    instruction: Instruction,
    known: Mapping[int, int],
    outer: tuple | None,
  ) -> _Value:
    """What an integer scalar is.

    Args:
      computation: Where it is.
      instruction: The scalar.
      known: Of the computation's parameter, a tuple of a loop.
      outer: In a fused computation, where its operands come from: computation,
        fusion, known and outer of that.
    """
    opcode = instruction.opcode

    def operand(index: int) -> _Value:
      name = instruction.operands[index]
      return self._value(
        computation, computation.instructions[name], known, outer
      )

    if opcode == "constant":
      text = instruction.inside
      return int(text) if re.fullmatch(r"-?\d+", text) else None
    if opcode == "parameter" and outer is not None:
      parent, fusion, parent_known, parent_outer = outer
      name = fusion.operands[int(instruction.inside)]
      return self._value(
        parent, parent.instructions[name], parent_known, parent_outer
      )
    if opcode == "get-tuple-element":
      source = computation.instructions[instruction.operands[0]]
      index = int(re.search(r"index=(\d+)", instruction.text)[1])
      return self._element(computation, source, index, known, outer)
    if opcode in _SAME:
      return operand(0)
    if opcode == "fusion":
      inner = self._module.computations[instruction.called("calls")]
      scope = (computation, instruction, known, outer)
      return self._value(inner, inner.root, {}, scope)
    if opcode in ("add", "subtract"):
      return _sum(operand(0), operand(1), -1 if opcode == "subtract" else 1)
    return None


def _sum(a: _Value, b: _Value, sign: int) -> _Value:
  """a + sign b, where no more than one of them is carried."""
  if a is None or b is None:
    return None
  if isinstance(b, int):
    if isinstance(a, int):
      return a + sign * b
    return _Carried(a.index, a.offset + sign * b)
  if isinstance(a, int) and sign == 1:
    return _Carried(b.index, b.offset + a)
  return None


def _count(start: int, step: int, bound: int, direction: str) -> int | None:
  """Trips of a loop that runs while start + i step compares with bound."""
  distance = bound - start
  if direction in ("LE", "GE"):
    distance += 1 if direction == "LE" else -1
  elif direction == "NE":
    return distance // step if distance % step == 0 else None
  elif direction not in ("LT", "GT"):
    return None
  if (step > 0) != (direction in ("LT", "LE")):
    return None  # Away from the bound.
  return max(-(-distance // step), 0)
