"""Learner steps that are undone where they made the sampler worse (MIPU).

Sampler and learner disagree, by their precision and their kernels. So a step
that raises the learner's J(pi) may still publish a sampler that earns less than
it: J(mu_{k+1}) < J(pi_{k+1}). Each step is therefore judged on answers of
mu_{k+1} that nobody trains on, before any other sampler has its weights, and
rejected where the estimate of that difference is too far below 0: parameters
and optimizer are then what they were before the step, bit for bit, and are
published again under the step's version. See ``objectives.monotone``.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from darl_jax.config import RunConfig
from darl_jax.learner.step import Learner
from darl_jax.models.transformer import Policy
from darl_jax.objectives import advantages as advantages_lib
from darl_jax.objectives import monotone
from darl_jax.replay.batching import ScoringPlan
from darl_jax.replay.ring import Entry
from darl_jax.rewards import shaping
from darl_jax.rollout.engine import Engine
from darl_jax.types import Params, PolicySnapshot, Prompt, TrajectoryGroup


@dataclasses.dataclass(frozen=True)
class Verdict:
  """On one step.

  Attributes:
    gap: T_post, the estimate of J(mu_{k+1}) - J(pi_{k+1}).
    tolerance: c of the step.
  """

  gap: monotone.InferenceGap
  tolerance: float

  def __str__(self) -> str:
    return (
      f"T_post = {self.gap.mean:.3g} +- {self.gap.standard_error:.1g} over "
      f"{self.gap.count} answers, and the tolerance is {self.tolerance:.3g}"
    )

  @property
  def rejected(self) -> bool:
    return not monotone.accepts(self.gap, tolerance=self.tolerance)

  def metrics(self) -> dict[str, float]:
    return {
      "rollback/gap": self.gap.mean,
      "rollback/standard_error": self.gap.standard_error,
      "rollback/tolerance": self.tolerance,
      "rollback/samples": float(self.gap.count),
      "rollback/rejected": float(self.rejected),
    }


class Judge:
  """Asks each new policy prompts of the training set, and compares."""

  def __init__(
    self,
    policy: Policy,
    config: RunConfig,
    learner: Learner,
    prompts: Sequence[Prompt],
    *,
    exclusive: contextlib.AbstractContextManager,
    place: Callable[[PolicySnapshot], PolicySnapshot],
    verify: Callable[[Sequence[TrajectoryGroup]], Sequence[TrajectoryGroup]],
    measured: Callable[[Callable[[], Sequence[float]]], Sequence[float]],
    **engine_arguments: Any,
  ):
    """Compiles nothing yet.

    Args:
      policy: The model.
      config: Of the run.
      learner: Whose policy pi is.
      prompts: To draw from, afresh for each step.
      exclusive: Held while programs run on the rollout mesh.
      place: Moves a snapshot there, of which nobody else hears.
      verify: Scores groups, in their order.
      measured: Gives what it is given, or what was measured in a recorded run.
      **engine_arguments: As ``Engine`` takes them.
    """
    self._config = config
    self._learner = learner
    self._prompts = prompts
    self._exclusive = exclusive
    self._place = place
    self._verify = verify
    self._measured = measured
    self._shaping = shaping.of_lengths(
      config.rewards, max_response_tokens=config.rollout.max_response_tokens
    )
    rollout = config.rollout.beside(
      config.rollback.num_prompts,
      samples_per_prompt=config.rollout.samples_per_prompt,
      data=config.mesh.rollout.data,
    )
    # Draws of its own: what is trained on is not what is judged by.
    seed = engine_arguments.pop("seed") ^ 1
    self._engine = Engine(policy, rollout, seed=seed, **engine_arguments)
    self._fresh = self._engine.capture()

  def keep(self, state: Any) -> Any:
    """A copy of a learner's state on the host, for ``restored``.

    The ring's snapshot would not do: it has no optimizer, and the sampler's
    precision.
    """
    return jax.tree.map(np.array, state)

  def restored(self, kept: Any) -> Any:
    """The state that was kept, where the learner had it."""
    return jax.tree.map(
      lambda leaf, like: jax.device_put(leaf, like.sharding),
      kept,
      self._learner.abstract_state(),
    )

  def verdict(self, params: Params, *, version: int) -> Verdict:
    """Whether the step to the learner's parameters stands.

    Args:
      params: pi_{k+1}, on the train mesh; mu_{k+1} is their snapshot.
      version: k + 1.
    """

    def measure() -> Sequence[float]:
      groups = self.sample(self._learner.snapshot(params, version=version))
      return dataclasses.astuple(self.compare(self._verify(groups), params))

    config = self._config.rollback
    tolerance = monotone.tolerance(
      version - 1,
      first=config.tolerance,
      last=config.final_tolerance,
      steps=self._config.num_steps - 1,
    )
    gap = monotone.InferenceGap(*self._measured(measure))
    return Verdict(gap, tolerance)

  def sample(self, snapshot: PolicySnapshot) -> list[TrajectoryGroup]:
    """Answers of mu, not verified; the same ones whenever a step is redone."""
    count = self._config.rollback.num_prompts
    rng = np.random.default_rng([self._config.seed, snapshot.version, 1])
    chosen = rng.choice(len(self._prompts), count, replace=False)
    self._engine.restore(self._fresh)
    with self._exclusive:  # Room for the snapshot, too.
      placed = self._place(snapshot)
      groups, _ = self._engine.generate(
        [self._prompts[i] for i in chosen],
        first_group_id=snapshot.version * count,
        fetch=lambda: placed,
      )
    # Until the next step they would take room from the sampler.
    self._engine.release()
    return groups

  def compare(
    self, groups: Sequence[TrajectoryGroup], params: Params
  ) -> monotone.InferenceGap:
    """T_post of verified answers; those without a reward are left out."""
    entries = [
      Entry((group.group_id, i), trajectory, advantage, uses=0, age=0)
      for group in groups
      for i, (trajectory, advantage) in enumerate(
        zip(group.trajectories, self._advantages(group), strict=True)
      )
      if trajectory.reward is not None and trajectory.num_sampled
    ]
    if not entries:
      return monotone.inference_gap(np.zeros(0), np.zeros(0), cap=1.0)
    plan = ScoringPlan.of(entries, self._config.learner)
    results = [self._learner.score(params, b)[0] for b in plan.batches]
    everything = np.arange(len(entries))
    logprobs = plan.tokens_of(plan.per_token(results), everything)
    trajectories = [entry.trajectory for entry in entries]
    behavior = np.concatenate([t.behavior_logprobs for t in trajectories])
    sampled = np.concatenate([t.loss_mask for t in trajectories])
    owner = np.repeat(everything, [len(t.tokens) for t in trajectories])
    return monotone.inference_gap(
      np.array([entry.advantage for entry in entries]),
      np.bincount(owner[sampled], (logprobs - behavior)[sampled]),
      cap=self._config.rollback.max_ratio,
    )

  def _advantages(self, group: TrajectoryGroup) -> np.ndarray:
    """float32 [G], as the ring computes them."""
    trajectories, objective = group.trajectories, self._config.objective
    valid = np.array([t.reward is not None for t in trajectories])
    rewards = np.array([t.reward or 0.0 for t in trajectories])
    if self._shaping is not None:
      lengths = np.array([t.num_sampled for t in trajectories])
      rewards = rewards + self._shaping(lengths)
    advantages, _ = advantages_lib.group_advantages(
      rewards[None],
      valid[None],
      kind=objective.advantage,
      tolerance=objective.reward_tolerance,
    )
    return advantages[0]
