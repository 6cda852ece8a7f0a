"""Accuracy on held-out prompts."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from darl_jax.config import RunConfig
from darl_jax.models.transformer import Policy
from darl_jax.rollout.engine import Engine
from darl_jax.types import CORRECT, PolicySnapshot, Prompt, TrajectoryGroup


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What one evaluation found.

  Attributes:
    accuracy: Share of prompts answered right; an answer whose verification
      failed is not right.
    failures: Answers whose verification failed.
    mean_length: Sampled tokens per answer.
    groups: The scored answers, one per prompt.
  """

  accuracy: float
  failures: int
  mean_length: float
  groups: tuple[TrajectoryGroup, ...]

  def metrics(self) -> dict[str, float]:
    return {
      "evaluate/accuracy": self.accuracy,
      "evaluate/failures": self.failures,
      "evaluate/mean_length": self.mean_length,
    }


class Evaluator:
  """Asks the same held-out prompts each time, once, with the same draws."""

  def __init__(
    self,
    policy: Policy,
    config: RunConfig,
    prompts: Sequence[Prompt],
    **engine_arguments,
  ):
    """Compiles nothing yet.

    Args:
      policy: The model.
      config: Of the run.
      prompts: All of the held-out ones; the first ``num_prompts`` are asked.
      **engine_arguments: As ``Engine`` takes them.
    """
    self._prompts = prompts[: config.evaluate.num_prompts]
    data = config.mesh.rollout.data
    # As many prompts at a time as training reads: its memory is enough.
    rollout = config.rollout
    most = rollout.prompts_per_batch
    batch = -(-min(len(self._prompts), most) // data) * data
    greedy = config.evaluate.temperature == 0
    once = dataclasses.replace(
      rollout,
      prompts_per_batch=batch,
      samples_per_prompt=1,
      extra_samples=0,
      slots=0,
      temperature=config.evaluate.temperature,
      # The likeliest token is what any truncation keeps.
      **dict(top_k=0, top_p=1.0, min_p=0.0) if greedy else {},
    )
    self._engine = Engine(policy, once, **engine_arguments)

  def answer(self, snapshot: PolicySnapshot) -> list[TrajectoryGroup]:
    """Answers of a snapshot on the rollout mesh, not scored yet."""
    groups, _ = self._engine.generate(
      self._prompts, first_group_id=0, fetch=lambda: snapshot
    )
    # Until the next evaluation they would take room from the sampler.
    self._engine.release()
    return groups

  def judge(self, scored: Sequence[TrajectoryGroup]) -> Evaluation:
    """What the scored answers, in the order of ``answer``, add up to."""
    answers = [trajectory for g in scored for trajectory in g.trajectories]
    rewards = [answer.reward for answer in answers]
    right = [reward is not None and reward >= CORRECT for reward in rewards]
    return Evaluation(
      accuracy=float(np.mean(right)),
      failures=sum(reward is None for reward in rewards),
      mean_length=float(np.mean([answer.num_sampled for answer in answers])),
      groups=tuple(scored),
    )
