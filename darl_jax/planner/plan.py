"""What a run needs on a TPU slice: every program compiled, and the whole."""

import concurrent.futures
import dataclasses
import math
import multiprocessing
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from darl_jax.config import ModelConfig, RunConfig
from darl_jax.learner.step import Learner
from darl_jax.models import lora
from darl_jax.models.transformer import Policy
from darl_jax.planner import chips, programs, suggestions, topology
from darl_jax.planner.programs import Program
from darl_jax.rollout.engine import Engine
from darl_jax.rollout.placement import Placement
from darl_jax.sharding import meshes, rules
from darl_jax.types import Params

# Programs compiled at a time, in processes: one keeps little more than a core
# busy, and two in one process wait for each other.
_AT_A_TIME = 2
# Adam keeps two moments of each parameter.
_MOMENTS = 2


@dataclasses.dataclass(frozen=True)
class Whole:
  """What no single program shows.

  Attributes:
    parameters: Of the model.
    unused_devices: Devices of the slice in neither mesh.
    snapshot_bytes: Parameters of one snapshot on a host.
    snapshots: The ring's K and the newest one.
    ring_bytes: Host memory of all snapshots and replay.trajectory_bytes.
    host_bytes: Memory of one host. One process holds the ring.
    hosts: Of the slice.
    publish_seconds: Cast, to the ring's host, and to the rollout mesh, over the
      links of that host's chips; None where the cast does not fit.
    generation_seconds: Of as many trajectories as a learner step trains on, all
      of the greatest length; None where a program does not fit.
    step_seconds: Of a learner step on them and of scoring them before it; None
      likewise.
  """

  parameters: int
  unused_devices: int
  snapshot_bytes: float
  snapshots: int
  ring_bytes: float
  host_bytes: float
  hosts: int
  publish_seconds: float | None
  generation_seconds: float | None
  step_seconds: float | None

  @property
  def host_fits(self) -> bool:
    return self.ring_bytes <= self.host_bytes

  @property
  def bottleneck(self) -> str:
    """The side that the other waits for, or "" where that is not known."""
    if self.generation_seconds is None or self.step_seconds is None:
      return ""
    slower = self.generation_seconds > self.step_seconds
    return "rollout" if slower else "train"


@dataclasses.dataclass(frozen=True)
class Plan:
  """All of it.

  Attributes:
    topology: Name of the slice.
    chip: Of its devices.
    programs: The learner's, then the sampler's.
    whole: Of the run.
    train_devices: Of the train mesh.
    rollout_devices: Of the rollout mesh.
    balanced_ratio: Rollout devices for each train device at which both sides
      take equally long, each scaled as its devices are; None where not known.
    suggestions: What to change, most useful first.
  """

  topology: str
  chip: chips.Chip
  programs: tuple[Program, ...]
  whole: Whole
  train_devices: int
  rollout_devices: int
  balanced_ratio: float | None
  suggestions: tuple[str, ...]

  @property
  def fits(self) -> bool:
    return self.whole.host_fits and all(
      program.fits for program in self.programs
    )


def plan(
  config: RunConfig,
  topology_name: str,
  *,
  vocab_size: int,
  progress: Callable[[str], None] = lambda name: None,
) -> Plan:
  """Compiles every program of a run, two at a time.

  Args:
    config: Of the run.
    topology_name: Such as ``v5p:4x4x4``.
    vocab_size: V, where the config leaves it to the tokenizer.
    progress: Told the name of each program once it is compiled.

  Raises:
    ConfigError: There is no such slice, it has too few devices, or libtpu is
      not installed.
  """
  devices = topology.devices(topology_name)
  split = meshes.split_devices(config.mesh, devices)
  chip = chips.of_device(devices[0].device_kind)
  vocab_size = config.model.vocab_size or vocab_size
  policy = Policy(config.model, vocab_size=vocab_size)
  arguments = config, topology_name, vocab_size
  names = list(_lowerings(config, policy, split))
  # The learner step takes longer than all others together: it starts first.
  order = sorted(names, key=lambda name: name != "train_step")
  by_name = {}
  with concurrent.futures.ProcessPoolExecutor(
    _AT_A_TIME, mp_context=multiprocessing.get_context("spawn")
  ) as pool:
    pending = [pool.submit(_compile, *arguments, name) for name in order]
    for done in concurrent.futures.as_completed(pending):
      program = done.result()
      by_name[program.name] = program
      progress(program.name)
  compiled = [by_name[name] for name in names]
  whole = _whole(config, policy, split, chip, by_name, len(devices))
  return Plan(
    topology=topology_name,
    chip=chip,
    programs=tuple(compiled),
    whole=whole,
    train_devices=split.train.size,
    rollout_devices=split.rollout.size,
    balanced_ratio=_balanced_ratio(whole, split),
    suggestions=tuple(
      suggestions.suggest(
        config,
        chip,
        compiled,
        snapshot_bytes=whole.snapshot_bytes,
        ring_bytes=whole.ring_bytes,
        host_bytes=whole.host_bytes,
        param_bytes=_param_bytes(config, policy, split),
      )
    ),
  )


def _compile(
  config: RunConfig, topology_name: str, vocab_size: int, name: str
) -> Program:
  """One program, in a process of its own: libtpu compiles one at a time."""
  split = meshes.split_devices(config.mesh, topology.devices(topology_name))
  policy = Policy(config.model, vocab_size=vocab_size)
  lower, mesh_name, resident = _lowerings(config, policy, split)[name]
  read = _engine(config, policy, split).prefill_tokens
  tokens, model_flops = _work(config, vocab_size, read=read)[name]
  return programs.compile_program(
    lower,
    name=name,
    mesh_name=mesh_name,
    mesh=getattr(split, mesh_name),
    slice_shape=chips.slice_shape(topology_name),
    resident=resident,
    tokens=tokens,
    model_flops=model_flops,
  )


_Lower = Callable[[], jax.stages.Lowered]


def _lowerings(
  config: RunConfig, policy: Policy, split: meshes.Meshes
) -> dict[str, tuple[_Lower, str, float]]:
  """By program: what traces it, its mesh, and what lies beside it in HBM."""
  dtype = jnp.dtype(config.rollout.dtype)
  learner = Learner(
    policy,
    config.learner,
    config.objective,
    mesh=split.train,
    temperature=config.rollout.temperature,
    truncated=config.rollout.truncates,
    num_steps=config.num_steps,
    publish_dtype=dtype,
  )
  engine = _engine(config, policy, split)
  placement = Placement(policy, mesh=split.rollout, dtype=dtype)
  param_bytes = _param_bytes(config, policy, split)
  # The optimizer's moments and the policies that the loss reads stay while
  # other programs of the learner run, and a new snapshot arrives while the
  # sampler still holds the one before.
  trained = param_bytes["trained"]
  kept = (_MOMENTS + _policies_kept(config)) * trained
  beside = {
    # Parity scores under an older snapshot, whose parameters are beside these.
    "score": kept + trained,
    "publish": kept + param_bytes["frozen"],
  }
  lowerings = {
    name: (lower, "train", beside.get(name, 0.0))
    for name, lower in learner.programs().items()
  }
  for name, lower in engine.programs(placement.abstract()).items():
    lowerings[name] = (lower, "rollout", param_bytes["snapshot"])
  return lowerings


def _policies_kept(config: RunConfig) -> int:
  """Beside its own, those whose log-probs a learner step reads."""
  objective = config.objective
  return objective.averages_policies + objective.keeps_reference


def _engine(config: RunConfig, policy: Policy, split: meshes.Meshes) -> Engine:
  return Engine(
    policy,
    # What ends a response changes no shape.
    dataclasses.replace(config.rollout, stop_strings=()),
    mesh=split.rollout,
    max_prompt_tokens=config.prompts.max_tokens,
    stop_ids=(0,),
    pad_id=0,
    seed=config.seed,
  )


def _param_bytes(
  config: RunConfig, policy: Policy, split: meshes.Meshes
) -> dict[str, float]:
  """Bytes of parameters on each device.

  Those that are trained and the frozen ones on the train mesh, and what a
  snapshot takes on the rollout mesh, where the frozen ones are ``kept``.
  """
  shapes = jax.eval_shape(policy.init, jax.random.key(0))

  def shardings(mesh, table) -> tuple[Params, Params]:
    return lora.split(
      rules.param_shardings(policy.logical_axes, shapes, mesh=mesh, rules=table)
    )

  def total(leaves: Params, shardings: Params, itemsize: int | None) -> float:
    each = jax.tree.map(
      lambda leaf, sharding: (
        math.prod(sharding.shard_shape(leaf.shape))
        * (itemsize or leaf.dtype.itemsize)
      ),
      leaves,
      shardings,
    )
    return float(sum(jax.tree.leaves(each)))

  trained, frozen = lora.split(shapes)
  dtype = jnp.dtype(config.model.compute_dtype)
  compact = jax.eval_shape(lambda x: lora.compact(x, dtype=dtype), frozen)
  train = shardings(split.train, rules.TRAIN_RULES)
  rollout = shardings(split.rollout, rules.ROLLOUT_RULES)
  published = jnp.dtype(config.rollout.dtype).itemsize
  return {
    "trained": total(trained, train[0], None),
    "frozen": total(compact, train[1], None),
    "snapshot": total(trained, rollout[0], published),
    "kept": total(frozen, rollout[1], published),
  }


def matmul_parameters(model: ModelConfig, vocab_size: int) -> tuple[int, int]:
  """Parameters that multiply each token: of the layers, and of the output.

  The embedding is looked up, not multiplied; tied, it is the output's matrix.
  """
  heads, kv_heads = model.num_heads, model.num_kv_heads
  attention = 2 * model.embed_dim * (heads + kv_heads) * model.head_dim
  feed_forward = 3 * model.embed_dim * model.mlp_dim
  if model.num_experts:  # Those that a token is sent to, and the router.
    experts = 3 * model.experts_per_token * model.expert_mlp_dim
    feed_forward = model.embed_dim * (experts + model.num_experts)
  layer = attention + feed_forward
  return model.num_layers * layer, vocab_size * model.embed_dim


def _work(
  config: RunConfig, vocab_size: int, *, read: int
) -> Mapping[str, tuple[float, float]]:
  """By program: tokens, and FLOPs of the model on them.

  Two FLOPs for each parameter of a matrix and token, forward, and four for each
  query head, its width and position that the token sees; three times that with
  the backward pass, and twice where the matrices are frozen; once more for each
  other policy that scores the batch. A packed row's trajectories are taken to
  be of the greatest length, and to see half of it on average. ``read`` are the
  tokens of a prefill dispatch.
  """
  model, rollout, learner = config.model, config.rollout, config.learner
  layers, output = matmul_parameters(model, vocab_size)
  seen = 4 * model.num_layers * model.num_heads * model.head_dim
  prompt, response = config.prompts.max_tokens, rollout.max_response_tokens
  forward = 2 * (layers + output) + seen * (prompt + response) / 2
  trained = learner.rows * learner.row_tokens
  passes = (2 if model.lora_rank else 3) + _policies_kept(config)
  # M2PO's mask: the policy before each of several optimizer steps.
  passes += config.objective.loss == "m2po" and learner.minibatches > 1
  scored = learner.score_rows * learner.row_tokens
  sampled = rollout.num_slots * rollout.chunk_tokens
  by_token = 2 * (layers + output) + seen * (prompt + response / 2)
  return {
    "score": (scored, scored * forward),
    "train_step": (trained, passes * trained * forward),
    "publish": (0.0, 0.0),
    "prefill": (read, read * (2 * layers + seen * prompt / 2)),
    "decode": (sampled, sampled * by_token),
  }


def _whole(
  config: RunConfig,
  policy: Policy,
  split: meshes.Meshes,
  chip: chips.Chip,
  by_name: Mapping[str, Program],
  num_devices: int,
) -> Whole:
  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  trained, parameters = (
    sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(part))
    for part in (lora.split(shapes)[0], shapes)
  )
  snapshot = float(trained * jnp.dtype(config.rollout.dtype).itemsize)
  snapshots = config.replay.num_snapshots + 1
  cast = _seconds(by_name["publish"])
  publish = None
  if cast is not None:
    # Every data slice of the rollout mesh gets a whole snapshot. What is for
    # chips of other hosts passes through this one's all the same.
    copies = 1 + config.mesh.rollout.data
    links = min(num_devices, chip.host_chips) * chip.host_bytes_per_s
    publish = cast + copies * snapshot / links
  rollout = config.rollout
  prefill, decode = (_seconds(by_name[name]) for name in ("prefill", "decode"))
  generation = None
  if prefill is not None and decode is not None:
    # Slots are full, since samples enter as others leave.
    samples = _trained_per_step(config)
    prompts = samples / rollout.samples_per_prompt
    reads = prompts * config.prompts.max_tokens / by_name["prefill"].tokens
    sampled = samples * rollout.max_response_tokens
    generation = reads * prefill + sampled / by_name["decode"].tokens * decode
  train, score = (_seconds(by_name[name]) for name in ("train_step", "score"))
  step = None
  if train is not None and score is not None:
    step = train + _score_passes(config) * score
  return Whole(
    parameters=parameters,
    unused_devices=split.unused,
    snapshot_bytes=snapshot,
    snapshots=snapshots,
    ring_bytes=snapshots * snapshot + config.replay.trajectory_bytes,
    host_bytes=chip.host_bytes,
    hosts=chip.hosts(num_devices),
    publish_seconds=publish,
    generation_seconds=generation,
    step_seconds=step,
  )


def _trained_per_step(config: RunConfig) -> int:
  """Trajectories of the greatest length that a learner step has room for."""
  longest = config.prompts.max_tokens + config.rollout.max_response_tokens
  learner = config.learner
  room = learner.rows * (learner.row_tokens // longest)
  return min(learner.batch_size, room)


def _score_passes(config: RunConfig) -> int:
  """Dispatches that score what a learner step trains on.

  The ring may hold more, and that is scored too.
  """
  longest = config.prompts.max_tokens + config.rollout.max_response_tokens
  learner = config.learner
  rows = -(-_trained_per_step(config) // (learner.row_tokens // longest))
  return -(-rows // learner.score_rows)


def _seconds(program: Program) -> float | None:
  return program.estimate.seconds if program.estimate else None


def _balanced_ratio(whole: Whole, split: meshes.Meshes) -> float | None:
  if not whole.bottleneck or not whole.step_seconds:
    return None
  rollout = whole.generation_seconds * split.rollout.size
  return rollout / (whole.step_seconds * split.train.size)
