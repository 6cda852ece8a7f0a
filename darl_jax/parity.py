"""How the sampler's log-probs compare with the learner's, token by token.

The two are different programs: prefill and decode with a cache on one side, one
forward pass over packed rows on the other. Training takes the ratio of their
probabilities for 1 where the weights are the same, and nothing in a mean shows
the few tokens for which it is not: so quantiles, the largest difference, and
the share of ratios that a clip would act on.

Both may also be compared with what another implementation computed.
"""

import dataclasses
import os
import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np

from darl_jax.config import ConfigError, RunConfig
from darl_jax.learner.step import Learner
from darl_jax.models.transformer import Policy
from darl_jax.replay.batching import ScoringPlan
from darl_jax.replay.ring import Entry
from darl_jax.rollout.engine import Engine
from darl_jax.rollout.placement import Placement
from darl_jax.sharding import meshes as meshes_lib
from darl_jax.types import Finish, Params, Prompt, Trajectory

DTYPES = ("float32", "bfloat16")
# Ratios of probabilities outside are what a clip acts on.
RATIO = (0.9, 1.1)
# In float32 the order of summation is all that may differ: nats, of the largest
# difference. In bfloat16, as a share of ratios outside, between the two sides.
TOLERANCE = 1e-3
TOLERATED_OUTSIDE = 0.1

Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Gaps:
  """How two computations of the same tokens' log-probs differ.

  Attributes:
    between: Which two.
    dtype: Of both sides' activations, and of the sampler's parameters.
    temperature: Of the distribution.
    tokens: How many were compared.
    p50: Median of the absolute difference, in nats.
    p95: 95th percentile.
    largest: Maximum.
    outside: Share of ratios of probabilities outside ``RATIO``.
  """

  between: str
  dtype: Dtype
  temperature: float
  tokens: int
  p50: float
  p95: float
  largest: float
  outside: float

  @classmethod
  def of(
    cls,
    ours: np.ndarray,
    theirs: np.ndarray,
    *,
    between: str,
    dtype: Dtype,
    temperature: float,
  ) -> "Gaps":
    """Of log-probs [tokens], at least one."""
    difference = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    absolute = np.abs(difference)
    low, high = np.log(RATIO)
    inside = (difference >= low) & (difference <= high)
    return cls(
      between=between,
      dtype=dtype,
      temperature=temperature,
      tokens=len(difference),
      p50=float(np.quantile(absolute, 0.5)),
      p95=float(np.quantile(absolute, 0.95)),
      largest=float(np.max(absolute)),
      outside=float(np.mean(~inside)),
    )

  def problem(self, tolerance: float) -> str | None:
    """What is beyond tolerance; None where nothing is.

    Args:
      tolerance: Of the largest difference in float32, in nats.
    """
    name = f"{self.between} in {self.dtype}"
    # Not "greater": NaN is beyond any tolerance.
    if self.dtype == "float32" and not self.largest <= tolerance:
      return (
        f"{name}: the largest difference is {self.largest:.2g} nats, above "
        f"{tolerance:g}"
      )
    # The two sides alone: float32 is not what bfloat16 computes.
    ours = self.between == BOTH_SIDES
    if ours and not self.outside <= TOLERATED_OUTSIDE:
      return (
        f"{name}: {self.outside:.1%} of the ratios are outside {RATIO}, more "
        f"than {TOLERATED_OUTSIDE:.0%}"
      )
    return None


BOTH_SIDES = "sampler, learner"


@dataclasses.dataclass(frozen=True)
class Expected:
  """What another implementation computed in float32, at temperature 1.

  Attributes:
    tokens: int32 [T] of each row.
    logprobs: float64 [T - 1] of each row: of all its tokens but the first.
    prompts: int32 [P] of each row.
    greedy: int32 [P + R] of each row: its prompt and greedy continuation.
  """

  tokens: tuple[np.ndarray, ...]
  logprobs: tuple[np.ndarray, ...]
  prompts: tuple[np.ndarray, ...]
  greedy: tuple[np.ndarray, ...]

  @property
  def longest_response(self) -> int:
    return max(
      len(greedy) - len(prompt)
      for greedy, prompt in zip(self.greedy, self.prompts, strict=True)
    )


def read_expected(path: str | os.PathLike, *, vocab_size: int) -> Expected:
  """Reads an ``expected.npz`` of either kind.

  Rows of one length: ``tokens`` [B, T], ``token_logprobs`` [B, T - 1] and
  ``greedy`` [B, P + R], whose first P tokens are those of ``tokens``. Or row by
  row, for i = 0, 1, ...: ``prompt_ids_i``, ``tokens_i`` (prompt and greedy
  continuation) and ``token_logprobs_i``.

  Raises:
    ConfigError: It is neither, or has tokens that the model has not.
  """
  path = pathlib.Path(path)
  try:
    with np.load(path, allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files}
    expected = _by_row(arrays) if "tokens_0" in arrays else _stacked(arrays)
  except KeyError as error:
    problem = f"it has no {error.args[0]}."
  except (OSError, ValueError, zipfile.BadZipFile) as error:
    problem = f"{error}."
  else:
    ids = np.concatenate([*expected.tokens, *expected.greedy])
    if ids.min() >= 0 and ids.max() < vocab_size:
      return expected
    problem = (
      f"it has token {ids.max()}, and the model has {vocab_size}. Try the "
      "file that was made with this model."
    )
  raise ConfigError([problem], place=str(path))


def _by_row(arrays: Mapping[str, np.ndarray]) -> Expected:
  count = sum(name.startswith("tokens_") for name in arrays)
  prompts, tokens, logprobs = (
    tuple(arrays[f"{name}_{i}"] for i in range(count))
    for name in ("prompt_ids", "tokens", "token_logprobs")
  )
  return _checked(Expected(tokens, logprobs, prompts, tokens))


def _stacked(arrays: Mapping[str, np.ndarray]) -> Expected:
  tokens, greedy = arrays["tokens"], arrays["greedy"]
  if tokens.ndim != 2 or greedy.ndim != 2 or len(tokens) != len(greedy):
    raise ValueError(
      f"tokens {tokens.shape} and greedy {greedy.shape} are not rows alike"
    )
  width = min(tokens.shape[1], greedy.shape[1])
  differ = tokens[:, :width] != greedy[:, :width]
  # Where the first row departs from its tokens, the prompt is over.
  prompt = int(np.where(differ.any(1), differ.argmax(1), width).min())
  return _checked(
    Expected(
      tuple(tokens),
      tuple(arrays["token_logprobs"]),
      tuple(greedy[:, :prompt]),
      tuple(greedy),
    )
  )


def _checked(expected: Expected) -> Expected:
  """Raises ValueError unless lengths fit together."""
  for tokens, logprobs, prompt, greedy in zip(
    expected.tokens,
    expected.logprobs,
    expected.prompts,
    expected.greedy,
    strict=True,
  ):
    if not len(logprobs) == len(tokens) - 1 > 0:
      raise ValueError(
        f"a row has {len(tokens)} tokens and {len(logprobs)} log-probs, and "
        "must have one fewer"
      )
    if not 0 < len(prompt) < len(greedy):
      raise ValueError("a row has no prompt, or no greedy continuation")
  return expected


class Sides:
  """Sampler and learner of one model in one dtype, as a run has them."""

  def __init__(
    self,
    config: RunConfig,
    *,
    meshes: meshes_lib.Meshes,
    dtype: Dtype,
    stop_ids: tuple[int, ...],
    pad_id: int,
  ):
    """Compiles nothing yet.

    Args:
      config: ``rollout.temperature`` 0 is greedy; the learner's is then 1.
      meshes: Where the two run.
      dtype: Of both sides' activations, and of the sampler's parameters.
      stop_ids: Tokens that end a response.
      pad_id: Fills what nobody reads.
    """
    self.dtype = dtype
    self.temperature = config.rollout.temperature or 1.0
    self._config = config
    model = dataclasses.replace(config.model, compute_dtype=dtype)
    policy = Policy(model, vocab_size=model.vocab_size)
    self._learner = Learner(
      policy,
      config.learner,
      config.objective,
      mesh=meshes.train,
      temperature=self.temperature,
      truncated=False,
      num_steps=1,
      publish_dtype=jnp.dtype(dtype),
    )
    self.param_shardings: Params = self._learner.param_shardings
    self._placement = Placement(
      policy, mesh=meshes.rollout, dtype=jnp.dtype(dtype)
    )
    self._engine = Engine(
      policy,
      dataclasses.replace(
        config.rollout,
        dtype=dtype,
        cache_dtype="",
        # The log-probs that others expect are of all tokens.
        **dict(top_k=0, top_p=1.0, min_p=0.0, stop_strings=()),
      ),
      mesh=meshes.rollout,
      max_prompt_tokens=config.prompts.max_tokens,
      stop_ids=stop_ids,
      pad_id=pad_id,
      seed=config.seed,
    )

  def sample(
    self, params: Params, prompts: Sequence[np.ndarray]
  ) -> list[Trajectory]:
    """The samples of each prompt int32 [P], in the prompts' order."""
    snapshot = self._placement.place(self._learner.snapshot(params, version=0))
    groups, _ = self._engine.generate(
      [
        Prompt(str(i), tokens.astype(np.int32), {})
        for i, tokens in enumerate(prompts)
      ],
      first_group_id=0,
      fetch=lambda: snapshot,
    )
    return [t for group in groups for t in group.trajectories]

  def score(
    self, params: Params, trajectories: Sequence[Trajectory]
  ) -> list[np.ndarray]:
    """The learner's log-probs [T] of each trajectory's tokens."""
    learner = self._config.learner
    plan = ScoringPlan(
      [
        Entry((i, 0), trajectory, np.float32(0), uses=0, age=0)
        for i, trajectory in enumerate(trajectories)
      ],
      score_rows=learner.score_rows,
      row_tokens=learner.row_tokens,
    )
    scored = [self._learner.score(params, batch)[0] for batch in plan.batches]
    lengths = [len(trajectory.tokens) for trajectory in trajectories]
    return np.split(plan.per_token(scored), np.cumsum(lengths)[:-1])

  def gaps(self, params: Params, prompts: Sequence[np.ndarray]) -> Gaps:
    """Of the tokens that the sampler answers ``prompts`` with."""
    trajectories = self.sample(params, prompts)
    return self._gaps(
      self.score(params, trajectories),
      [trajectory.behavior_logprobs for trajectory in trajectories],
      [trajectory.loss_mask for trajectory in trajectories],
      between=BOTH_SIDES,
    )

  def expected_gaps(
    self, params: Params, expected: Expected
  ) -> tuple[list[Gaps], int]:
    """Both sides against another implementation; needs temperature 1.

    Returns:
      Of the learner, on the expected tokens; of the sampler, on those that its
      greedy continuations begin with, if there are any. And the number of
      continuations that are not the expected ones.
    """
    rows = [
      _trajectory(tokens, logprobs)
      for tokens, logprobs in zip(
        expected.tokens, expected.logprobs, strict=True
      )
    ]
    theirs = [row.behavior_logprobs for row in rows]
    gaps = [
      self._gaps(
        self.score(params, rows),
        theirs,
        [row.loss_mask for row in rows],
        between="learner, expected",
      )
    ]
    greedy = self.sample(params, expected.prompts)
    differ = sum(
      # It stops where the file's does, or where the file was cut.
      not np.array_equal(found.tokens[: len(wanted)], wanted)
      for found, wanted in zip(greedy, expected.greedy, strict=True)
    )
    shared = [
      _shared(found, row) for found, row in zip(greedy, rows, strict=True)
    ]
    if any(mask.any() for mask in shared):
      ours = [found.behavior_logprobs for found in greedy]
      gaps.append(
        self._gaps(
          [row[: len(mask)] for row, mask in zip(ours, shared, strict=True)],
          [row[: len(mask)] for row, mask in zip(theirs, shared, strict=True)],
          shared,
          between="sampler, expected",
        )
      )
    return gaps, differ

  def _gaps(self, ours, theirs, masks, *, between: str) -> Gaps:
    mask = np.concatenate(masks)
    return Gaps.of(
      np.concatenate(ours)[mask],
      np.concatenate(theirs)[mask],
      between=between,
      dtype=self.dtype,
      temperature=self.temperature,
    )


def _shared(found: Trajectory, row: Trajectory) -> np.ndarray:
  """Mask of the sampled tokens before the first that the row has not."""
  width = min(len(found.tokens), len(row.tokens))
  equal = found.tokens[:width] == row.tokens[:width]
  return np.logical_and.accumulate(equal) & found.loss_mask[:width]


def _trajectory(tokens: np.ndarray, logprobs: np.ndarray) -> Trajectory:
  """Tokens all of which but the first are scored."""
  length = len(tokens)
  return Trajectory(
    prompt_id="",
    group_id=0,
    tokens=tokens.astype(np.int32),
    loss_mask=np.arange(length) > 0,
    behavior_logprobs=np.concatenate([[0.0], logprobs]),
    behavior_entropy=np.zeros(length, np.float32),
    policy_version=np.zeros(length, np.int32),
    turn=np.zeros(length, np.int32),
    finish=Finish.LENGTH,
  )
