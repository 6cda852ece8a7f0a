"""A plan as a table for people and as one JSON object for programs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from darl_jax.planner.estimate import kernel_seconds
from darl_jax.planner.plan import Plan
from darl_jax.planner.programs import Program

# Largest first; the last one is for all that is smaller.
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def to_json(plan: Plan) -> dict[str, Any]:
  """Every figure, in bytes, seconds and FLOPs; null where there is none."""
  whole = dataclasses.asdict(plan.whole)
  return {
    "topology": plan.topology,
    "chip": dataclasses.asdict(plan.chip),
    "fits": plan.fits,
    "train_devices": plan.train_devices,
    "rollout_devices": plan.rollout_devices,
    "programs": [_program_json(program) for program in plan.programs],
    "whole": whole
    | {
      "host_fits": plan.whole.host_fits,
      "bottleneck": plan.whole.bottleneck,
      "balanced_ratio": plan.balanced_ratio,
    },
    "suggestions": list(plan.suggestions),
  }


def _program_json(program: Program) -> dict[str, Any]:
  cost, estimate = program.cost, program.estimate
  result = {
    "name": program.name,
    "mesh": program.mesh,
    "devices": program.devices,
    "compile_seconds": program.compile_seconds,
    "fits": program.fits,
    "total_bytes": program.total,
    "resident_bytes": program.resident,
    "hbm_bytes": program.chip.hbm_bytes,
    "failure": program.failure,
    "memory": dataclasses.asdict(program.memory) if program.memory else None,
    "tokens": program.tokens,
    "model_flops": program.model_flops,
    "tokens_per_s": program.tokens_per_s,
    "peak_share": program.peak_share,
    "kernel_share": program.kernel_share,
    "cost": None,
    "estimate": None,
  }
  if cost is not None:
    result["cost"] = {
      "flops": cost.flops,
      "bytes": cost.bytes,
      "cycles": cost.cycles,
      "collective_bytes": cost.collective_bytes,
      "collectives": [
        {
          "kind": entry.kind,
          "axes": entry.axes,
          "group_size": len(entry.group),
          "count": entry.count,
          "bytes": entry.bytes,
        }
        for entry in cost.collectives.values()
      ],
      "kernels": [
        dataclasses.asdict(kernel)
        | {"seconds": kernel_seconds(kernel, program.chip)}
        for kernel in cost.kernels.values()
      ],
      "unknown_loops": cost.unknown_loops,
    }
  if estimate is not None:
    result["estimate"] = dataclasses.asdict(estimate) | {
      "hidden": estimate.hidden,
      "seconds": estimate.seconds,
    }
  return result


def print_plan(plan: Plan, console: Console) -> None:
  """The tables, what the whole needs, and what to change."""
  chip, whole = plan.chip, plan.whole
  console.print(
    f"[bold]{plan.topology}[/]: {chip.name}, "
    f"{_size(chip.hbm_bytes)} and {chip.flops_per_s / 1e12:.0f} "
    f"TFLOP/s a device; {plan.train_devices} train, {plan.rollout_devices} "
    f"sample, {whole.unused_devices} unused. Compiled, never run."
  )
  console.print(_memory_table(plan))
  console.print(_cost_table(plan))
  console.print(_time_table(plan))
  if lines := list(_details(plan)):
    console.print("\n".join(lines), highlight=False)
  console.print("\n".join(_whole_lines(plan)), highlight=False)
  for line in plan.suggestions:
    console.print(f"[bold yellow]try[/] {line}", highlight=False)


def _table(title: str, *columns: str) -> Table:
  """Narrow enough for a terminal of 80 columns."""
  table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
  for number, name in enumerate(columns):
    table.add_column(name, justify="right" if number else "left", no_wrap=True)
  return table


def _memory_table(plan: Plan) -> Table:
  table = _table(
    "HBM of a device, GiB",
    "program",
    "arguments",
    "outputs",
    "temporary",
    "peak",
    "beside",
    "total",
    "fits",
  )
  for program in plan.programs:
    memory = program.memory
    cells = ["", "", "", ""]
    if memory:
      cells = [
        _gib(value)
        for value in (
          memory.arguments,
          memory.outputs - memory.aliased,
          memory.temporaries,
          memory.peak,
        )
      ]
    elif program.needed is not None:
      cells[-1] = _gib(program.needed)
    table.add_row(
      program.name,
      *cells,
      _gib(program.resident),
      "" if program.total is None else _gib(program.total),
      _fits(program),
    )
  return table


def _gib(value: float) -> str:
  return f"{value / 2**30:.2f}"


def _fits(program: Program) -> str:
  if program.total is None:
    return "[bold red]no[/]"
  spare = program.chip.hbm_bytes - program.total
  if program.fits:
    return f"[green]{_gib(spare)} left[/]"
  return f"[bold red]{_gib(-spare)} over[/]"


def _cost_table(plan: Plan) -> Table:
  table = _table(
    "What one execution does on a device",
    "program",
    "TFLOP",
    "HBM traffic",
    "over links",
    "share of kernels",
    "compiled in",
  )
  for program in plan.programs:
    cells = [""] * 4
    if cost := program.cost:
      cells = [
        f"{cost.flops / 1e12:.3g}",
        _size(cost.bytes),
        _size(cost.collective_bytes),
        f"{program.kernel_share:.2g}",
      ]
    table.add_row(program.name, *cells, f"{program.compile_seconds:.0f} s")
  return table


def _time_table(plan: Plan) -> Table:
  method = next((p.estimate.method for p in plan.programs if p.estimate), "")
  table = _table(
    f"Estimated time of one execution ({method}; links last, not hidden)",
    "program",
    "at peak",
    "at HBM's",
    "busy",
    "+ links",
    "= time",
    "tokens/s",
    "of peak",
  )
  for program in plan.programs:
    if estimate := program.estimate:
      table.add_row(
        program.name,
        _time(estimate.compute),
        _time(estimate.memory),
        _time(estimate.busy),
        _time(estimate.collectives),
        f"[bold]{_time(estimate.seconds)}[/]",
        f"{program.tokens_per_s:,.0f}" if program.tokens else "",
        f"{program.peak_share:.3f}" if program.model_flops else "",
      )
  return table


def _details(plan: Plan) -> Iterator[str]:
  """Collectives, and what could not be counted."""
  for program in plan.programs:
    if program.failure:
      yield f"{program.name}: {program.failure}"
    if not program.cost:
      continue
    parts = [
      f"{entry.kind} over {entry.axes or len(entry.group)}: "
      f"{_size(entry.bytes)} in {entry.count:.0f}"
      for entry in sorted(
        program.cost.collectives.values(), key=lambda entry: -entry.bytes
      )
    ]
    if parts:
      yield f"{program.name}: " + "; ".join(parts)
    kernels = [
      f"{kernel.name} {_time(kernel_seconds(kernel, program.chip))}"
      for kernel in program.cost.kernels.values()
    ]
    if kernels:
      yield f"{program.name}: kernels {', '.join(kernels)}"
    unknown = [
      kernel.name
      for kernel in program.cost.kernels.values()
      if kernel.source == "none"
    ]
    if unknown:
      yield f"{program.name}: no FLOPs known of {', '.join(unknown)}"
    if program.cost.unknown_loops:
      yield (
        f"{program.name}: counted once, trips unknown: "
        f"{', '.join(program.cost.unknown_loops)}"
      )


def _whole_lines(plan: Plan) -> Iterator[str]:
  whole = plan.whole
  verdict = "" if whole.host_fits else " [bold red]does not fit[/]"
  yield (
    f"{whole.parameters / 1e9:.3g} B parameters. Host memory: "
    f"{whole.snapshots} snapshots of {_size(whole.snapshot_bytes)} and the "
    f"trajectories, {_size(whole.ring_bytes)} of {_size(whole.host_bytes)} on "
    f"one of {whole.hosts} hosts.{verdict}"
  )
  if whole.hosts > 1:
    yield (
      f"Chips of {whole.hosts} hosts. A run is one process so far, and drives "
      "the chips of one host: this is what one that spans them will need."
    )
  if whole.publish_seconds is not None:
    yield (
      f"Publishing: {_size(whole.snapshot_bytes)} in "
      f"{_time(whole.publish_seconds)}."
    )
  if whole.bottleneck:
    have = plan.rollout_devices / plan.train_devices
    yield (
      "All of the greatest length, what a learner step trains on takes "
      f"{_time(whole.step_seconds)} to score and train on, and "
      f"{_time(whole.generation_seconds)} to generate. "
      f"Bottleneck: {whole.bottleneck}; balanced at {plan.balanced_ratio:.2f} "
      f"rollout devices for each train device (now {have:.2f})."
    )


def _size(value: float) -> str:
  """Bytes with three digits and a unit."""
  return _with_unit(value, _SIZES)


def _time(seconds: float) -> str:
  return _with_unit(seconds, _TIMES)


def _with_unit(value: float, units: tuple[tuple[float, str], ...]) -> str:
  if not value:
    return "0"
  unit, name = next((u for u in units if value >= u[0]), units[-1])
  return f"{value / unit:.3g} {name}"
