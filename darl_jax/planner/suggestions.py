"""What to change where something does not fit, and by how much.

From the figures of the compiled programs: parameters, moments and gradients
shrink with mesh.train.fsdp * mesh.train.tensor, the temporaries of a learner
step with the rows that a device takes at a time, and what the sampler needs
beside its parameters with its sequences. A suggestion is arithmetic: compile
again with it.
"""

from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp

from darl_jax.config import RunConfig
from darl_jax.models import attention
from darl_jax.planner import chips
from darl_jax.planner.programs import Program

_GIB = 2**30


def suggest(
  config: RunConfig,
  chip: chips.Chip,
  programs: Sequence[Program],
  *,
  snapshot_bytes: float,
  ring_bytes: float,
  host_bytes: float,
  param_bytes: Mapping[str, float],
) -> list[str]:
  """One line each.

  Args:
    config: Of the run.
    chip: Of its devices.
    programs: Compiled, or not.
    snapshot_bytes: Of one snapshot on a host.
    ring_bytes: Of host memory that the ring takes.
    host_bytes: Memory of a host.
    param_bytes: Of the parameters on each device: on the train mesh "trained"
      and "frozen", on the rollout mesh of a "snapshot" and the "kept" rest.
  """
  lines: list[str] = []
  for program in programs:
    if program.fits:
      continue
    if program.total is None:
      lines.append(f"{program.name}: {program.failure}")
      continue
    for line in _by_program(config, chip, program, param_bytes):
      lines.append(f"{program.name}: {line}")
  model, rows = config.model, config.learner.row_tokens
  if rows > attention.LANES and (
    rows % attention.LANES or model.head_dim % attention.LANES
  ):
    near = -(-rows // attention.LANES) * attention.LANES
    lines.append(
      f"learner.row_tokens={near} and heads of a multiple of "
      f"{attention.LANES}: with {rows} and model.head_dim={model.head_dim} "
      "attention takes no kernel but blocks of queries, at twice the FLOPs."
    )
  kept = (config.replay.num_snapshots + 1) * snapshot_bytes
  if config.replay.snapshot_bytes < kept:
    held = int(config.replay.snapshot_bytes // snapshot_bytes)
    lines.append(
      f"replay.snapshot_bytes={int(kept)}: {config.replay.snapshot_bytes} "
      f"holds {held} snapshots of "
      f"{snapshot_bytes / _GIB:.2f} GiB, not replay.num_snapshots and the "
      f"newest = {config.replay.num_snapshots + 1}; older ones are dropped."
    )
  if ring_bytes > host_bytes:
    room = host_bytes - config.replay.trajectory_bytes
    slots = int(room // snapshot_bytes) - 1
    lines.append(
      f"replay.num_snapshots={slots}: the ring takes "
      f"{ring_bytes / _GIB:.0f} GiB of a host's {host_bytes / _GIB:.0f} GiB."
      if slots > 0
      else f"no host of {host_bytes / _GIB:.0f} GiB holds two snapshots of "
      f"{snapshot_bytes / _GIB:.1f} GiB: take rollout.dtype='bfloat16' or "
      "another chip."
    )
  return lines


def _by_program(
  config: RunConfig,
  chip: chips.Chip,
  program: Program,
  param_bytes: Mapping[str, float],
) -> Iterator[str]:
  if program.name == "train_step":
    yield from _train_step(config, chip, program, param_bytes)
  elif program.name == "score":
    fixed = param_bytes["trained"] + param_bytes["frozen"] + program.resident
    yield from _score(config, chip, program, fixed)
  elif program.mesh == "rollout":
    fixed = 2 * param_bytes["snapshot"] + param_bytes["kept"]
    yield from _rollout(config, chip, program, fixed)
  else:
    yield from _cut(config, chip, fixed=program.total, moving=0.0)


def _train_step(
  config: RunConfig,
  chip: chips.Chip,
  program: Program,
  param_bytes: Mapping[str, float],
) -> Iterator[str]:
  """Fewer rows at a time, recomputation, or more devices for the state."""
  learner, train = config.learner, config.mesh.train
  params = param_bytes["trained"]
  # Parameters, two moments, and gradients: of a microbatch and their sum.
  state = 3 * params + param_bytes["frozen"]
  if program.memory:
    state = program.memory.arguments
  gradients = (2 if learner.microbatches > 1 else 1) * params
  fixed = min(state + gradients, program.total)
  moving = program.total - fixed
  parts = learner.minibatches * learner.microbatches
  rows = learner.rows // (parts * train.data * train.fsdp)
  for factor in range(2, rows + 1):
    if rows % factor == 0 and fixed + moving / factor <= chip.hbm_bytes:
      yield (
        f"learner.microbatches={learner.microbatches * factor} (of "
        f"{learner.microbatches}): {rows // factor} rows a device at a time "
        f"instead of {rows}, about "
        f"{(fixed + moving / factor) / _GIB:.1f} GiB."
      )
      break
  if config.model.remat != "layer":
    model = config.model
    width = jnp.dtype(model.compute_dtype).itemsize
    kept = (
      model.num_layers * rows * learner.row_tokens * model.embed_dim * width
    )
    yield (
      f"model.remat='layer' (of {model.remat!r}): keeps "
      f"{kept / _GIB:.1f} GiB of activations a device, one layer's input each."
    )
  yield from _cut(config, chip, fixed=fixed, moving=moving)


def _score(
  config: RunConfig, chip: chips.Chip, program: Program, fixed: float
) -> Iterator[str]:
  """Fewer rows at a time, beside ``fixed`` bytes."""
  train = config.mesh.train
  fixed = min(fixed, program.total)
  moving = program.total - fixed
  unit = train.data * train.fsdp
  rows = config.learner.score_rows // unit
  fitting = int(rows * (chip.hbm_bytes - fixed) // moving) if moving > 0 else 0
  if 0 < fitting < rows:
    yield (
      f"learner.score_rows={fitting * unit} (of {rows * unit}): about "
      f"{(fixed + moving * fitting / rows) / _GIB:.1f} GiB."
    )
  else:
    yield from _cut(config, chip, fixed=fixed, moving=moving)


def _cut(
  config: RunConfig, chip: chips.Chip, *, fixed: float, moving: float
) -> Iterator[str]:
  """More devices along fsdp, each with as many rows as now."""
  train = config.mesh.train
  room = chip.hbm_bytes - moving
  factor = 2
  while fixed / factor > room and factor < 2**16:
    factor *= 2
  fsdp = train.fsdp * factor
  if room > 0 and config.model.embed_dim % fsdp == 0:
    yield (
      f"mesh.train.fsdp={fsdp} (of {train.fsdp}): {train.size * factor} train "
      f"devices, about {(fixed / factor + moving) / _GIB:.1f} GiB with as many "
      "rows on each (learner.rows, learner.score_rows in proportion)."
    )


def _rollout(
  config: RunConfig, chip: chips.Chip, program: Program, fixed: float
) -> Iterator[str]:
  """Fewer sequences beside ``fixed`` bytes, or more devices for each."""
  rollout, mesh = config.rollout, config.mesh.rollout
  fixed = min(fixed, program.total)
  moving = program.total - fixed
  room = chip.hbm_bytes - fixed
  slots = rollout.num_slots
  fitting = int(slots * room / moving) if moving > 0 else 0
  fitting = fitting // mesh.data * mesh.data
  if 0 < fitting < slots:
    yield (
      f"rollout.slots={fitting} (of {slots}): about "
      f"{(fixed + moving * fitting / slots) / _GIB:.1f} GiB."
    )
  factor = 2
  while program.total / factor > chip.hbm_bytes:
    factor *= 2
  tensor, model = mesh.tensor * factor, config.model
  if not model.num_kv_heads % tensor and not model.num_heads % tensor:
    yield (
      f"mesh.rollout.tensor={tensor} (of {mesh.tensor}): "
      f"{mesh.size * factor} rollout devices, about "
      f"{program.total / factor / _GIB:.1f} GiB."
    )
  if jnp.dtype(rollout.dtype).itemsize > 2:
    yield "rollout.dtype='bfloat16': half of both parameters and cache."
