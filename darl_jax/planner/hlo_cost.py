"""What one execution of a compiled TPU program costs a device.

``compiled.cost_analysis()`` counts the body of a loop once, and a Pallas kernel
only where it is told. This reads the text of the compiled module instead, which
is partitioned (its shapes are one device's), scheduled, and says where each
buffer lies, and multiplies each loop's body by its trips.

What is particular to TPUs: matrix products are ``convolution`` inside fusions;
a layout ending in ``S(1)`` is a buffer in VMEM, which costs no HBM traffic;
``estimated_cycles`` in the ``backend_config`` of a fusion is the compiler's own
estimate; a collective that runs under another fusion is spread over three
fusions that all name it.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from darl_jax.planner import attention_cost, hlo_trips
from darl_jax.planner.hlo_text import (
  HBM,
  NAME,
  Computation,
  Instruction,
  Module,
  parse,
)

# At the level of a computation these move nothing.
_FREE = frozenset(
  (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "add-dependency",
    "domain",
  )
)
_FREE_CALLS = frozenset(("AllocateBuffer", "Sharding", "ConcatBitcast"))
# One input whose elements become the output's: a slice behind it reads no more
# than a slice in front of it would.
_ELEMENTWISE = frozenset(("bitcast", "reshape", "convert", "copy"))
# Peak FLOP/s over HBM bytes/s are 166 (v5p) to 560 (v6e).
_FLOPS_PER_BYTE = 240
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_UPDATES = frozenset(("dynamic-update-slice", "scatter"))
_COLLECTIVES = frozenset(
  (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
  )
)


@dataclasses.dataclass
class Collective:
  """Equal collectives of a program, together.

  Attributes:
    kind: As XLA names it.
    axes: Mesh axes that a group spans, joined by "+"; empty where no mesh was
      given or the group is none of its slices.
    group: Partition numbers of one group, in ring order.
    count: Executions.
    bytes: That leave a device over its links in a ring algorithm.
  """

  kind: str
  axes: str
  group: tuple[int, ...]
  count: float = 0.0
  bytes: float = 0.0


@dataclasses.dataclass
class Kernel:
  """Executions of one Pallas kernel, together.

  Attributes:
    name: As given to ``pallas_call``.
    source: Where its cost is from: "carried" (it has an estimate), "shapes"
      (computed from those of its operands), or "none": then flops are 0 and
      bytes are those of operands and outputs.
    count: Executions.
    flops: Of all executions.
    bytes: To and from HBM.
  """

  name: str
  source: str
  count: float = 0.0
  flops: float = 0.0
  bytes: float = 0.0


@dataclasses.dataclass
class Cost:
  """Of one execution of a program on one device.

  Attributes:
    flops: Of matrix products and convolutions, kernels included.
    bytes: To and from HBM, kernels included.
    cycles: The compiler's estimate, summed over what has one.
    unestimated_bytes: To and from HBM by what has none, apart from kernels,
      collectives and asynchronous copies: these run beside what has.
    collectives: By kind and group.
    kernels: By name.
    unknown_loops: Loops whose trips could not be read, counted once.
  """

  flops: float = 0.0
  bytes: float = 0.0
  cycles: float = 0.0
  unestimated_bytes: float = 0.0
  collectives: dict[tuple, Collective] = dataclasses.field(default_factory=dict)
  kernels: dict[str, Kernel] = dataclasses.field(default_factory=dict)
  unknown_loops: list[str] = dataclasses.field(default_factory=list)

  @property
  def kernel_flops(self) -> float:
    return sum(kernel.flops for kernel in self.kernels.values())

  @property
  def kernel_bytes(self) -> float:
    return sum(kernel.bytes for kernel in self.kernels.values())

  @property
  def collective_bytes(self) -> float:
    return sum(entry.bytes for entry in self.collectives.values())

  def add(self, other: "Cost", times: float) -> None:
    """Adds ``times`` executions of ``other``."""
    self.flops += times * other.flops
    self.bytes += times * other.bytes
    self.cycles += times * other.cycles
    self.unestimated_bytes += times * other.unestimated_bytes
    for key, entry in other.collectives.items():
      mine = self.collectives.setdefault(
        key, Collective(entry.kind, entry.axes, entry.group)
      )
      mine.count += times * entry.count
      mine.bytes += times * entry.bytes
    for name, kernel in other.kernels.items():
      mine = self.kernels.setdefault(name, Kernel(name, kernel.source))
      mine.count += times * kernel.count
      mine.flops += times * kernel.flops
      mine.bytes += times * kernel.bytes
    self.unknown_loops.extend(
      name for name in other.unknown_loops if name not in self.unknown_loops
    )


def analyze(hlo_text: str, mesh: Mapping[str, int] | None = None) -> Cost:
  """The cost of one execution of a compiled module.

  A conditional costs what its most expensive branch does.

  Args:
    hlo_text: ``compiled.as_text()`` of a program compiled for a TPU.
    mesh: Axis sizes in the mesh's order, to name the axes of collectives.

  Raises:
    ValueError: The text is not that of a scheduled module.
  """
  module = parse(hlo_text)
  return _Analysis(module, dict(mesh or {})).cost(module.entry, {})


class _Analysis:
  """Walks a module from its entry."""

  def __init__(self, module: Module, mesh: dict[str, int]):
    self._module = module
    self._mesh = mesh
    self._fused: dict[str, Cost] = {}

  # Sequential code.

  def cost(self, name: str, known: Mapping[int, int]) -> Cost:
    """Of a computation outside fusions.

    Args:
      name: Of the computation.
      known: Elements of its parameter, a tuple, whose value is known.
    """
    computation = self._module.computations[name]
    total = Cost()
    for instruction in computation.instructions.values():
      self._add(total, computation, instruction, known)
    return total

  def _add(
    self,
    total: Cost,
    computation: Computation,
    instruction: Instruction,
    known: Mapping[int, int],
  ) -> None:
    opcode = instruction.opcode
    if opcode == "while":
      trips, inner = hlo_trips.trips(
        self._module, computation, instruction, known
      )
      if trips is None:
        total.unknown_loops.append(instruction.name)
      body = self.cost(instruction.called("body"), inner)
      total.add(body, 1 if trips is None else trips)
    elif opcode == "conditional":
      branches = [self.cost(name, {}) for name in _branches(instruction)]
      total.add(max(branches, key=_expense), 1)
    elif opcode == "call":
      total.add(self.cost(instruction.called("to_apply"), {}), 1)
    elif opcode == "async-start":
      total.add(self.cost(instruction.called("calls"), {}), 1)
    elif opcode in _FREE or opcode.endswith(("-done", "-update")):
      return
    else:
      total.add(self._leaf(computation, instruction), 1)

  def _leaf(self, computation: Computation, instruction: Instruction) -> Cost:
    """Of an instruction that runs no code of its own but a fusion's."""
    opcode = instruction.opcode
    if opcode == "custom-call":
      return self._custom_call(computation, instruction)
    cost = Cost()
    if opcode == "fusion":
      cost.add(self._inside(instruction.called("calls")), 1)
      moved = self._fusion_bytes(instruction)
    else:
      cost.flops = _flops(computation, instruction)
      moved = _instruction_bytes(computation, instruction)
    if cost.kernels:
      moved = 0.0  # A kernel inside a fusion has counted its own.
    cost.bytes += moved
    kind = opcode.removesuffix("-start")
    cycles = re.search(r'"estimated_cycles":"?(\d+)', instruction.text)
    if cycles:
      cost.cycles = float(cycles[1])
    elif kind == opcode and kind not in _COLLECTIVES and not cost.collectives:
      cost.unestimated_bytes = moved
    if kind in _COLLECTIVES:
      self._collect(cost, computation, instruction, kind)
    return cost

  def _custom_call(
    self, computation: Computation, instruction: Instruction
  ) -> Cost:
    target = re.search(r'custom_call_target="([^"]*)"', instruction.text)[1]
    cost = Cost()
    if target in _FREE_CALLS:
      return cost
    moved = _instruction_bytes(computation, instruction)
    if target != "tpu_custom_call":
      cost.bytes = cost.unestimated_bytes = moved
      return cost
    name = _kernel_name(instruction)
    estimate = re.search(r'"cost_estimate":\s*(\{[^}]*\})', instruction.text)
    kernel = Kernel(name, "none", count=1.0, bytes=moved)
    attention = attention_cost.splash_attention(
      name,
      instruction.text,
      [
        (buffer.dtype, buffer.dims, buffer.bytes)
        for operand in instruction.operands
        for buffer in computation.instructions[operand].buffers
      ],
    )
    if estimate:
      values = json.loads(estimate[1])
      kernel.source = "carried"
      kernel.flops = float(values.get("flops", 0))
      kernel.bytes = float(values.get("bytes_accessed", 0))
    elif attention:
      kernel.source = "shapes"
      kernel.flops, kernel.bytes = attention.flops, attention.bytes
    cost.kernels[name] = kernel
    cost.flops, cost.bytes = kernel.flops, kernel.bytes
    return cost

  # Fusions.

  def _inside(self, name: str) -> Cost:
    """Matrix products, kernels and collectives of a fused computation."""
    if name in self._fused:
      return self._fused[name]
    computation = self._module.computations[name]
    cost = Cost()
    targets = [
      instruction.text
      for instruction in computation.instructions.values()
      if instruction.opcode == "custom-call"
    ]
    starts = any('"AsyncCollectiveStart"' in text for text in targets)
    for instruction in computation.instructions.values():
      opcode = instruction.opcode
      if opcode == "fusion":
        cost.add(self._inside(instruction.called("calls")), 1)
      elif opcode == "custom-call" and "tpu_custom_call" in instruction.text:
        cost.add(self._custom_call(computation, instruction), 1)
      elif opcode in _COLLECTIVES:
        # Of the three fusions that name an asynchronous one, the first counts.
        spread = '"async_collective_fusion_config"' in instruction.text
        if starts or not spread:
          kind = opcode
          users = computation.users[instruction.name]
          if opcode == "all-reduce" and any(
            user.opcode == "dynamic-slice" for user in users
          ):
            kind = "reduce-scatter"
          self._collect(cost, computation, instruction, kind)
      else:
        cost.flops += _flops(computation, instruction)
    self._fused[name] = cost
    return cost

  def _fusion_bytes(self, instruction: Instruction) -> float:
    """HBM traffic of a fusion: what it reads of its operands, and writes."""
    computation = self._module.computations[instruction.called("calls")]
    read = sum(
      self._share(computation, parameter, 1.0) * parameter.buffers[0].bytes
      for parameter in computation.parameters.values()
      if parameter.buffers and parameter.buffers[0].space == HBM
    )
    outputs = instruction.buffers
    written = self._written(computation, len(outputs))
    return read + sum(
      min(size, buffer.bytes)
      for size, buffer in zip(written, outputs, strict=True)
      if buffer.space == HBM
    )

  def _share(
    self, computation: Computation, value: Instruction, result: float
  ) -> float:
    """Share of ``value``, inside a fusion, that its users read.

    Args:
      computation: The fused computation.
      value: Of it.
      result: Share of the computation's own result that is read.
    """
    share = result if computation.root is value else 0.0
    for user in computation.users[value.name]:
      first = user.operands[0] == value.name
      opcode = user.opcode
      if opcode in _SLICES and first:
        share += user.buffers[0].elements / max(value.buffers[0].elements, 1)
      elif opcode in _UPDATES and first:
        continue  # In place: what is not updated stays where it is.
      elif opcode == "tuple" or '"AsyncCollective' in user.text:
        continue  # Passed on.
      elif opcode in _COLLECTIVES and "async_collective_fusion" in user.text:
        continue
      elif opcode in _ELEMENTWISE:
        share += self._share(computation, user, result)
      elif opcode == "fusion":
        inner = self._module.computations[user.called("calls")]
        wanted = 1.0
        if len(user.buffers) == 1:
          wanted = self._share(computation, user, result)
        share += sum(
          self._share(inner, inner.parameters[index], wanted)
          for index, operand in enumerate(user.operands)
          if operand == value.name
        )
      else:
        return 1.0
    return min(share, 1.0)

  def _written(self, computation: Computation, outputs: int) -> list[float]:
    """Bytes that a fused computation writes of each of its outputs."""
    root = computation.root
    if root.opcode == "tuple":
      return [
        self._update(computation, computation.instructions[operand])
        for operand in root.operands
      ]
    if outputs == 1:
      return [self._update(computation, root)]
    if root.opcode == "fusion":
      inner = self._module.computations[root.called("calls")]
      return self._written(inner, outputs)
    # An asynchronous collective's buffers, counted with the collective.
    return [0.0] * outputs

  def _update(self, computation: Computation, value: Instruction) -> float:
    """Bytes written where ``value`` is an output of a fusion."""
    opcode, instructions = value.opcode, computation.instructions
    if opcode == "parameter":
      return 0.0  # Passed on.
    if opcode in _UPDATES:
      changed = value.operands[1 if opcode[0] == "d" else 2]
      return instructions[changed].buffers[0].bytes
    if opcode == "bitcast":
      return self._update(computation, instructions[value.operands[0]])
    if opcode == "fusion" and len(value.buffers) == 1:
      inner = self._module.computations[value.called("calls")]
      return self._update(inner, inner.root)
    if opcode == "get-tuple-element":
      source = instructions[value.operands[0]]
      if source.opcode == "fusion":
        inner = self._module.computations[source.called("calls")]
        index = int(re.search(r"index=(\d+)", value.text)[1])
        return self._written(inner, len(source.buffers))[index]
    return value.buffers[0].bytes

  # Collectives.

  def _collect(
    self,
    cost: Cost,
    computation: Computation,
    instruction: Instruction,
    kind: str,
  ) -> None:
    """Counts a collective in ``cost``."""
    group = _group(instruction, self._module.num_partitions)
    size = len(group)
    if size < 2:
      return
    shard = sum(
      buffer.elements * buffer.width
      for name in instruction.operands
      for buffer in computation.instructions[name].buffers
    )
    # Of a ring of n: each device passes on n - 1 parts of n.
    factor = {
      "all-gather": size - 1,
      "all-reduce": 2 * (size - 1) / size,
      "collective-permute": 1,
      "collective-broadcast": 1,
    }.get(kind, (size - 1) / size)
    axes = _axes(group, self._mesh)
    entry = Collective(kind, axes, group, 1.0, factor * shard)
    cost.add(Cost(collectives={(kind, axes or group, size): entry}), 1)


def _expense(cost: Cost) -> float:
  """To compare branches by: a byte weighs what it does on these chips."""
  return cost.flops + _FLOPS_PER_BYTE * cost.bytes


def _branches(instruction: Instruction) -> list[str]:
  listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.text)
  if listed:
    return NAME.findall(listed[1])
  return [
    instruction.called(f"{side}_computation") for side in ("true", "false")
  ]


def _kernel_name(instruction: Instruction) -> str:
  traced = re.search(r'op_name="([^"]*)"', instruction.text)
  parts = traced[1].split("/") if traced else []
  if "pallas_call" in parts[1:]:
    return parts[parts.index("pallas_call") - 1]
  return re.sub(r"[.\d]+$", "", instruction.name)


def _instruction_bytes(
  computation: Computation, instruction: Instruction
) -> float:
  """HBM traffic of an instruction that is no fusion."""
  opcode = instruction.opcode
  operands = [
    computation.instructions[name].buffers for name in instruction.operands
  ]
  outputs = instruction.buffers
  if opcode in ("copy-start", "slice-start"):
    # (destination, source, context), or (sources, destination, context).
    moved = outputs[0] if opcode == "copy-start" else outputs[1]
    source = operands[0][0]
    read = moved.bytes if source.space == HBM else 0.0
    return read + moved.hbm_bytes
  if opcode in _SLICES:
    read = outputs[0].bytes if operands[0][0].space == HBM else 0.0
    return read + outputs[0].hbm_bytes
  if opcode in _UPDATES:
    update = operands[1 if opcode[0] == "d" else 2][0]
    written = update.bytes if outputs[0].space == HBM else 0.0
    return update.hbm_bytes + written
  if opcode.endswith("-start"):
    # A collective's outputs repeat its operands.
    return sum(buffer.hbm_bytes for buffer in outputs)
  return sum(
    buffer.hbm_bytes for buffers in (*operands, outputs) for buffer in buffers
  )


# Matrix products.


def _flops(computation: Computation, instruction: Instruction) -> float:
  if instruction.opcode not in ("convolution", "dot"):
    return 0.0
  left, right = (
    computation.instructions[name].buffers[0].dims
    for name in instruction.operands[:2]
  )
  out = instruction.buffers[0].dims
  if instruction.opcode == "dot":
    listed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.text)
    axes = (
      [int(axis) for axis in listed[1].split(",") if axis] if listed else []
    )
    return 2.0 * math.prod(out) * math.prod(left[axis] for axis in axes)
  return _convolution_flops(left, right, out, instruction.text)


def _convolution_flops(
  left: Sequence[int], right: Sequence[int], out: Sequence[int], text: str
) -> float:
  """Two for every product of elements that are not padding.

  A batch axis of a matrix product is a spatial axis of a convolution, dilated
  so that each output meets one element of the kernel.
  """
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", text)
  window = re.search(r"window=\{([^}]*)\}", text)
  settings = dict(
    item.split("=") for item in (window[1].split() if window else ())
  )

  def setting(name: str, axis: int, default: str) -> str:
    values = settings.get(name)
    return values.split("x")[axis] if values else default

  flops = 2.0 * out[labels[3].index("f")] * right[labels[2].index("i")]
  groups = re.search(r"batch_group_count=(\d+)", text)
  batch = left[labels[1].index("b")]
  flops *= batch / (int(groups[1]) if groups else 1)
  for axis in range(len(labels[1]) - 2):
    digit = str(axis)
    low = setting("pad", axis, "0_0").split("_")[0]
    flops *= _meetings(
      left[labels[1].index(digit)],
      right[labels[2].index(digit)],
      out[labels[3].index(digit)],
      int(low),
      int(setting("stride", axis, "1")),
      int(setting("lhs_dilate", axis, "1")),
      int(setting("rhs_dilate", axis, "1")),
    )
  return flops


@functools.cache
def _meetings(
  size: int,
  kernel: int,
  out: int,
  low: int,
  stride: int,
  dilate: int,
  kernel_dilate: int,
) -> int:
  """Pairs of output and kernel positions that meet an element of the input."""
  total = 0
  positions = np.arange(out, dtype=np.int64) * stride - low
  for tap in range(kernel):
    at = positions + tap * kernel_dilate
    met = (at % dilate == 0) & (at >= 0) & (at < size * dilate)
    total += int(np.count_nonzero(met))
  return total


# Groups of devices.


def _group(instruction: Instruction, partitions: int) -> tuple[int, ...]:
  """The first group of a collective, in ring order."""
  text = instruction.text
  pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", text)
  if pairs:
    return _cycle(re.findall(r"\{(\d+),(\d+)\}", pairs[1]))
  listed = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
  if listed:
    return tuple(int(number) for number in listed[1].split(","))
  iota = re.search(
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text
  )
  if iota:
    shape, dims, order = (
      [int(number) for number in (part or "").split(",") if number]
      for part in iota.groups()
    )
    numbers = np.arange(math.prod(dims)).reshape(dims)
    if order:
      numbers = numbers.transpose(order)
    return tuple(numbers.reshape(shape)[0].tolist())
  named = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text)
  if named:
    return _named_group(*named.groups())
  return tuple(range(partitions))


def _cycle(pairs: list[tuple[str, str]]) -> tuple[int, ...]:
  """The devices that a permutation's first pair leads through."""
  follows = {int(source): int(target) for source, target in pairs}
  at = first = int(pairs[0][0])
  visited = [at]
  while follows.get(at, first) not in visited:
    at = follows[at]
    visited.append(at)
  return tuple(visited)


def _named_group(mesh: str, axes: str) -> tuple[int, ...]:
  """Of a mesh such as 'a'=2,'b'=4 and axes such as 'a' or 'b':(1)2.

  An axis may be split: (before)size takes ``size`` parts of it after
  ``before``.
  """
  sizes = {
    name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)
  }
  wanted = {
    name: (int(before or 1), int(size) if size else sizes[name])
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
  }
  numbers = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
  index: list[int | slice] = []
  for name, size in sizes.items():
    if name not in wanted:
      index.append(0)
      continue
    before, part = wanted[name]
    step = size // (before * part)
    index.append(slice(0, step * part, step))
  return tuple(numbers[tuple(index)].flatten().tolist())


def _axes(group: tuple[int, ...], mesh: Mapping[str, int]) -> str:
  """The mesh axes along which a group of partitions lies, joined by "+"."""
  sizes = list(mesh.values())
  if not sizes or max(group) >= math.prod(sizes):
    return ""
  coordinates = np.unravel_index(np.asarray(group), sizes)
  spanned = [
    (name, size)
    for (name, size), where in zip(mesh.items(), coordinates, strict=True)
    if len(set(where.tolist())) > 1
  ]
  whole = math.prod(size for _, size in spanned) == len(group)
  return "+".join(name for name, _ in spanned) if whole else ""
