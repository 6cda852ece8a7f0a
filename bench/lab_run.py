"""One run of the lab: asynchrony that is simulated, and the same each time.

The learner, the sampler, the ring, selection and objectives are those of a
training run; there are no threads. Each step trains on prompt groups whose
behavior policies are as old as a stated law says: a group for step t of age a
is sampled from version t - a when that is the newest, and is kept until it is
due. Prompts, ages and the sampler's random numbers are those of the seed, so
that methods are compared on the same draws.
"""

import collections
import dataclasses
import functools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from darl_jax.config import RunConfig
from darl_jax.learner.step import Learner
from darl_jax.learner.warm_start import warm_start
from darl_jax.models.transformer import Policy
from darl_jax.prompts import dataset
from darl_jax.replay import batching, selection
from darl_jax.replay.ring import Ring
from darl_jax.rewards.reasoning_gym import ReasoningGymVerifier
from darl_jax.rollout.engine import Engine
from darl_jax.rollout.placement import Placement
from darl_jax.sharding import meshes
from darl_jax.types import (
  CORRECT,
  PolicySnapshot,
  Prompt,
  TrainState,
  Trajectory,
  TrajectoryGroup,
)

# Streams of random numbers, beside the seed.
_AGES, _CHOICE = 1, 2
# Groups of one run; a seed's numbers of groups follow those of the seed before.
_MAX_GROUPS = 2**17
# Scalars of a run are averaged over this many stretches of it.
_STRETCHES = 20


@dataclasses.dataclass(frozen=True)
class Staleness:
  """The law of ages (method 9).

  Attributes:
    law: ``uniform`` on 0..bound, ``fixed`` at bound, or ``mixed``: ages of the
      first tokens are uniform, and later tokens of a response are sampled by
      the version that is half the bound newer.
    bound: S, in learner steps.
  """

  law: Literal["uniform", "fixed", "mixed"]
  bound: int

  @property
  def swap(self) -> int:
    """Versions between a response's first tokens and its last."""
    return self.bound // 2 if self.law == "mixed" else 0

  def ages(self, groups: int, *, step: int, seed: int) -> np.ndarray:
    """int64 [groups], of the versions that end the responses for a step."""
    rng = np.random.default_rng([seed, _AGES, step])
    if self.law == "fixed":
      drawn = np.full(groups, self.bound)
    else:
      drawn = rng.integers(self.bound - self.swap + 1, size=groups)
    return np.minimum(drawn, step)


class Lab:
  """What runs on one task share: prompts, programs, warm starts, verdicts."""

  def __init__(self, config: RunConfig, folder: pathlib.Path):
    """Draws the prompts.

    Args:
      config: Its prompts, model, rollout, warm start and evaluation are those
        of every run.
      folder: Where warm starts are kept.
    """
    self._config = config
    self._folder = folder
    self._meshes = meshes.split_devices(config.mesh)
    self.prompts = dataset.load(config.prompts, seed=config.seed)
    tokenizer = self.prompts.tokenizer
    self.policy = Policy(config.model, vocab_size=tokenizer.vocab_size)
    self._placement = Placement(
      self.policy,
      mesh=self._meshes.rollout,
      dtype=jnp.dtype(config.rollout.dtype),
    )
    make_engine = functools.partial(
      Engine,
      self.policy,
      mesh=self._meshes.rollout,
      max_prompt_tokens=config.prompts.max_tokens,
      stop_ids=tokenizer.stop_ids,
      pad_id=tokenizer.pad_id,
      seed=config.seed,
    )
    self._engine = make_engine(config.rollout)
    self._greedy = make_engine(
      dataclasses.replace(config.rollout, samples_per_prompt=1, temperature=0.0)
    )
    self._fresh = [e.capture() for e in (self._engine, self._greedy)]
    task = dataset.verifier_task(
      config.prompts, seed=config.seed, rewards=config.rewards
    )
    self._verifier = ReasoningGymVerifier(**task["arguments"])
    self._score = functools.cache(self._verify)
    self._references = {
      prompt.id: prompt.reference
      for prompt in (*self.prompts.train, *self.prompts.heldout)
    }
    self._learners: dict[Any, Learner] = {}

  def run(
    self, config: RunConfig, staleness: Staleness, *, seed: int
  ) -> dict[str, Any]:
    """Trains from the seed's warm start; see ``_Run.row`` for what it tells."""
    run = _Run(self, config, staleness, seed=seed)
    return run.execute()

  def learner(self, config: RunConfig) -> Learner:
    """Compiled once for all seeds of a method."""
    key = (config.learner, config.objective, config.num_steps)
    if key not in self._learners:
      self._learners[key] = Learner(
        self.policy,
        config.learner,
        config.objective,
        mesh=self._meshes.train,
        temperature=config.rollout.temperature,
        truncated=config.rollout.truncates,
        num_steps=config.num_steps,
        publish_dtype=jnp.dtype(config.rollout.dtype),
      )
    return self._learners[key]

  def warm_start(self, learner: Learner, *, seed: int) -> TrainState:
    """The state that every method starts from with this seed."""
    path = self._folder / f"warm_start_{seed}.safetensors"
    shapes = learner.param_shapes
    if not path.exists():
      tokenizer = self.prompts.tokenizer
      params = warm_start(
        self.policy,
        learner.init_trained(seed),
        [
          (p.tokens, tokenizer.encode_response(p.reference["answer"]))
          for p in self.prompts.train
        ],
        self._config.warm_start,
        mesh=self._meshes.train,
        seed=seed,
        advance=lambda _: None,
      )
      partial = path.with_suffix(f".{time.monotonic_ns()}")
      path.parent.mkdir(parents=True, exist_ok=True)
      save_file(
        {
          jax.tree_util.keystr(key): np.asarray(leaf)
          for key, leaf in _leaves(params)
        },
        partial,
      )
      partial.rename(path)
    saved = load_file(path)
    return learner.init_state(
      jax.tree.unflatten(
        jax.tree.structure(shapes),
        [saved[jax.tree_util.keystr(key)] for key, _ in _leaves(shapes)],
      )
    )

  def place(self, snapshot: PolicySnapshot) -> PolicySnapshot:
    """A snapshot for the sampler."""
    return self._placement.place(snapshot)

  def sample(
    self,
    prompts: Sequence[Prompt],
    snapshots: Sequence[PolicySnapshot],
    *,
    first_group_id: int,
  ) -> list[TrajectoryGroup]:
    """Scored groups; each chunk is of the next snapshot, or of the last."""
    following = iter(snapshots)
    last = snapshots[-1]
    groups, _ = self._engine.generate(
      prompts,
      first_group_id=first_group_id,
      fetch=lambda: next(following, last),
    )
    return [self._scored(group) for group in groups]

  def accuracy(self, snapshot: PolicySnapshot) -> float:
    """Share of held-out prompts whose greedy answer is right."""
    prompts = self.prompts.heldout[: self._config.evaluate.num_prompts]
    groups, _ = self._greedy.generate(
      prompts, first_group_id=0, fetch=lambda: snapshot
    )
    return float(
      np.mean(
        [self._reward(group.trajectories[0]) >= CORRECT for group in groups]
      )
    )

  def renew(self) -> None:
    """The engines forget the weights that they know and what they answered."""
    for engine, fresh in zip(
      (self._engine, self._greedy), self._fresh, strict=True
    ):
      engine.release()
      engine.restore(fresh)

  def _scored(self, group: TrajectoryGroup) -> TrajectoryGroup:
    return dataclasses.replace(
      group,
      trajectories=tuple(
        dataclasses.replace(trajectory, reward=self._reward(trajectory))
        for trajectory in group.trajectories
      ),
    )

  def _reward(self, trajectory: Trajectory) -> float:
    return self._score(trajectory.prompt_id, trajectory.response.tobytes())

  def _verify(self, prompt_id: str, response: bytes) -> float:
    text = self.prompts.tokenizer.decode(np.frombuffer(response, np.int32))
    score = self._verifier.score(text, self._references[prompt_id])
    partial = self._config.rewards.partial_credit
    return 1.0 if score >= CORRECT else partial * score


class _Run:
  """The state of one run."""

  def __init__(
    self, lab: Lab, config: RunConfig, staleness: Staleness, *, seed: int
  ):
    self._lab = lab
    self._config = config
    self._staleness = staleness
    self._seed = seed
    self._learner = lab.learner(config)
    self._state = lab.warm_start(self._learner, seed=seed)
    self._ring = Ring(
      config.replay,
      advantage=config.objective.advantage,
      reward_tolerance=config.objective.reward_tolerance,
      groups_per_version=config.rollout.prompts_per_batch,
      truncated=config.rollout.truncates,
    )
    self._prompts = dataset.batches(
      lab.prompts.train,
      batch_size=config.rollout.prompts_per_batch,
      seed=seed,
    )
    # What is sampled by a version, for which step; and what is due at a step.
    self._planned: dict[int, list[tuple[int, Prompt]]] = (
      collections.defaultdict(list)
    )
    self._due: dict[int, list[TrajectoryGroup]] = collections.defaultdict(list)
    self._held: dict[int, PolicySnapshot] = {}
    self._num_groups = 0
    self._curve: list[list[float]] = []
    self._scalars: list[dict[str, float]] = []
    self._ages: collections.Counter[int] = collections.Counter()
    self._scored = self._skipped = self._trained_tokens = 0

  def execute(self) -> dict[str, Any]:
    config = self._config
    start, used = time.monotonic(), time.process_time()
    self._lab.renew()
    self._plan()
    self._publish(0)
    for step in range(config.num_steps):
      if step % config.evaluate.every == 0:
        self._evaluate(step)
      self._step(step)
      self._publish(step + 1)
    self._evaluate(config.num_steps)
    self._ring.accounting().check()
    return self._row(time.monotonic() - start, time.process_time() - used)

  def _plan(self) -> None:
    """Deals the prompts of all steps to the versions that sample them."""
    config = self._config
    for step in range(config.num_steps):
      ages = self._staleness.ages(
        config.rollout.prompts_per_batch, step=step, seed=self._seed
      )
      for age, prompt in zip(ages.tolist(), next(self._prompts), strict=True):
        self._planned[step - age].append((step, prompt))

  def _publish(self, version: int) -> None:
    """A new version, and all that it samples."""
    snapshot = self._learner.snapshot(self._state.params, version=version)
    self._ring.push_snapshot(snapshot)
    swap = self._staleness.swap
    self._held[version] = self._lab.place(snapshot)
    self._held.pop(version - swap - 1, None)
    planned = self._planned.pop(version, [])
    if not planned:
      return
    first = self._held[max(version - swap, 0)]
    groups = self._lab.sample(
      [prompt for _, prompt in planned],
      [first, self._held[version]],
      first_group_id=self._seed * _MAX_GROUPS + self._num_groups,
    )
    self._num_groups += len(groups)
    for (step, _), group in zip(planned, groups, strict=True):
      self._due[step].append(group)

  def _step(self, step: int) -> None:
    config = self._config
    due = self._due.pop(step)
    self._ring.begin(due)
    for group in due:
      self._ring.admit(group)
    rewards = [t.reward for group in due for t in group.trajectories]
    scalars = {"reward": float(np.mean(rewards))}
    pool = self._ring.try_take(
      selection.pool_needed(config.replay, config.replay.min_batch)
    )
    rng = np.random.default_rng([self._seed, _CHOICE, step])
    choice = None
    if pool is not None:
      choice = batching.choose(
        pool,
        functools.partial(self._learner.score, self._state.params),
        replay=config.replay,
        learner=config.learner,
        rng=rng,
      )
      self._scored += len(choice.stats)
      if len(choice.kept):
        scalars |= selection.report(
          choice.stats, choice.kept, metric=config.replay.metric
        )
    if choice is None or len(choice.kept) < config.replay.min_batch:
      self._skipped += 1
      # The version counts on; its parameters are the same.
      self._scalars.append(scalars)
      return
    batch, placed, batch_metrics = batching.build_batch(
      choice.entries,
      choice.logprobs,
      objective=config.objective,
      learner=config.learner,
      version=step,
      dead_tokens=pool.dead_tokens,
      rng=rng,
    )
    self._state, metrics = self._learner.step(self._state, batch)
    self._ring.mark_trained(placed, pool)
    self._ages.update(entry.age for entry in placed)
    self._trained_tokens += int(batch_metrics["tokens"])
    scalars["uses"] = float(np.mean([entry.uses for entry in placed]))
    for name, (total, count) in jax.device_get(metrics).items():
      if count > 0:
        scalars[name.removeprefix("train/")] = float(total / count)
    self._scalars.append(scalars)

  def _evaluate(self, step: int) -> None:
    accuracy = self._lab.accuracy(self._held[step])
    config = self._config.rollout
    generated = step * config.prompts_per_batch * config.samples_per_prompt
    self._curve.append([generated, accuracy])

  def _row(self, seconds: float, cpu_seconds: float) -> dict[str, Any]:
    """Plain JSON data.

    Returns:
      ``curve``: [generated samples, held-out accuracy] pairs; ``scalars``: by
      name, means over each twentieth of the run; ``ages``: trained
      trajectories by age; ``trained_tokens``, ``scored`` trajectories,
      ``skipped`` steps, ``seconds``, ``cpu_seconds``; ``fates``: the ring's
      accounts.
    """
    stretches = np.array_split(np.arange(len(self._scalars)), _STRETCHES)
    names = sorted({name for scalars in self._scalars for name in scalars})

    def mean(name: str, steps: np.ndarray) -> float | None:
      values = [
        self._scalars[i][name] for i in steps if name in self._scalars[i]
      ]
      return round(float(np.mean(values)), 6) if values else None

    return {
      "curve": self._curve,
      "scalars": {
        name: [mean(name, steps) for steps in stretches] for name in names
      },
      "ages": {str(age): n for age, n in sorted(self._ages.items())},
      "trained_tokens": self._trained_tokens,
      "scored": self._scored,
      "skipped": self._skipped,
      "fates": self._ring.accounting().counts(),
      "seconds": round(seconds, 2),
      "cpu_seconds": round(cpu_seconds, 2),
    }


def _leaves(tree: Mapping[str, Any]):
  return jax.tree_util.tree_flatten_with_path(tree)[0]
