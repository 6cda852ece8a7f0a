"""Accuracy on held-out prompts."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from darl_jax.config import RunConfig
from darl_jax.models.transformer import Policy
from darl_jax.rollout.engine import Engine
from darl_jax.types import CORRECT, PolicySnapshot, Prompt, TrajectoryGroup


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What one evaluation found.

  Attributes:
    accuracy: Share of the answers that are right (avg@k); one whose
      verification failed is not.
    pass_at: By j, the chance that one of j answers to a prompt is right
      (pass@j), for the powers of two up to k and k itself; empty with one
      answer.
    failures: Answers whose verification failed.
    mean_length: Sampled tokens per answer.
    groups: The scored answers, one group of k per prompt.
  """

  accuracy: float
  pass_at: Mapping[int, float]
  failures: int
  mean_length: float
  groups: tuple[TrajectoryGroup, ...]

  def metrics(self) -> dict[str, float]:
    return {
      "evaluate/accuracy": self.accuracy,
      **{f"evaluate/pass@{j}": value for j, value in self.pass_at.items()},
      "evaluate/failures": self.failures,
      "evaluate/mean_length": self.mean_length,
    }


def pass_at(right: np.ndarray, j: int) -> float:
  """The chance that one of j answers to a prompt is right, without bias.

    pass@j = mean over prompts of 1 - C(k - c, j) / C(k, j)

  for c of a prompt's k answers right. Source: arXiv:2107.03374.

  Args:
    right: bool [prompts, k].
    j: In [1, k].
  """
  k = right.shape[1]
  # Whole numbers beyond float64 by themselves; their ratio is at most 1.
  missed = [
    math.comb(k - int(c), j) / math.comb(k, j) for c in right.sum(axis=1)
  ]
  return 1.0 - float(np.mean(missed))


class Evaluator:
  """Asks the same held-out prompts each time, with the same draws."""

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
    greedy = config.evaluate.temperature == 0
    rollout = dataclasses.replace(
      config.rollout.beside(
        len(self._prompts),
        samples_per_prompt=config.evaluate.samples_per_prompt,
        data=config.mesh.rollout.data,
      ),
      temperature=config.evaluate.temperature,
      # The likeliest token is what any truncation keeps.
      **dict(top_k=0, top_p=1.0, min_p=0.0) if greedy else {},
    )
    self._engine = Engine(policy, rollout, **engine_arguments)

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
    right = np.array(
      [reward is not None and reward >= CORRECT for reward in rewards]
    ).reshape(len(scored), -1)
    k = right.shape[1]
    counts = {2**i for i in range(k.bit_length())} | {k} if k > 1 else ()
    return Evaluation(
      accuracy=float(np.mean(right)),
      pass_at={j: pass_at(right, j) for j in sorted(counts)},
      failures=sum(reward is None for reward in rewards),
      mean_length=float(np.mean([answer.num_sampled for answer in answers])),
      groups=tuple(scored),
    )
