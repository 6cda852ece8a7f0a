"""Generates groups of responses for batches of prompts of one static shape."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from darl_jax.config import RolloutConfig
from darl_jax.models.transformer import Policy
from darl_jax.rollout.decode import Decoder, SampledTokens
from darl_jax.sharding import rules
from darl_jax.types import (
  Finish,
  Params,
  PolicySnapshot,
  Prompt,
  Trajectory,
  TrajectoryGroup,
)

# Folded into the run's seed: the parameters start from the bare one.
_SAMPLING_STREAM = 1


@dataclasses.dataclass(frozen=True)
class GenerateStats:
  """Of one batch: sampled tokens kept, seconds, and weight swaps on the way."""

  tokens: int
  seconds: float
  swaps: int


class Engine:
  """Prompts and snapshots in, trajectory groups out.

  Every batch has the same shape, so that each program compiles once: fewer
  prompts than ``prompts_per_batch`` are padded with copies of the first, and
  the copies' responses are discarded.
  """

  def __init__(
    self,
    policy: Policy,
    config: RolloutConfig,
    *,
    mesh: Mesh,
    max_prompt_tokens: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
    seed: int,
  ):
    """Compiles nothing yet.

    Args:
      policy: Whose parameters the snapshots hold.
      config: Shapes of a batch; temperature 0 is greedy.
      mesh: The rollout mesh.
      max_prompt_tokens: P, to which prompts are padded on the left.
      stop_ids: Tokens that end a response; the first one sampled is kept.
      pad_id: Fills what nobody reads.
      seed: Of the sampling keys; a request's tokens follow from seed, group
        and sample alone.
    """
    self.config = config
    self._max_prompt_tokens = max_prompt_tokens
    self._stop_ids = stop_ids
    self._pad_id = pad_id
    self._rows = rules.rows_sharding(mesh, rules.ROLLOUT_RULES)
    self._mesh = mesh
    self._seed = seed
    self.decoder = Decoder(
      policy,
      samples_per_prompt=config.samples_per_prompt,
      max_response_tokens=config.max_response_tokens,
      chunk_tokens=config.chunk_tokens,
      temperature=config.temperature,
      stop_ids=stop_ids,
      pad_id=pad_id,
      dtype=jnp.dtype(config.dtype),
      mesh=mesh,
    )

  def generate(
    self,
    prompts: Sequence[Prompt],
    *,
    first_group_id: int,
    fetch: Callable[[], PolicySnapshot],
  ) -> tuple[list[TrajectoryGroup], GenerateStats]:
    """Answers each prompt G times.

    Args:
      prompts: At most ``prompts_per_batch``.
      first_group_id: Groups are numbered from here, in the prompts' order.
      fetch: The newest snapshot on the rollout mesh; asked before every
        dispatch, so that new weights are taken up between decode chunks and
        stamp the tokens that follow. The cache of earlier tokens is kept.

    Returns:
      Unverified groups in the prompts' order, and statistics.

    Raises:
      ValueError: No prompt or too many, or one that is empty or longer than the
        cache.
    """
    start = time.monotonic()
    snapshot = fetch()
    state, sampled = self.decoder.prefill(
      snapshot.params, *self._inputs(prompts, first_group_id), self._root
    )
    chunks, versions, swaps = [sampled], [snapshot.version], 0
    for _ in range(self.decoder.num_chunks):
      if np.all(state.ended):
        break
      newest = fetch()
      swaps += newest.version != snapshot.version
      snapshot = newest
      state, sampled = self.decoder.decode(snapshot.params, state)
      chunks.append(sampled)
      versions.append(snapshot.version)
    groups, tokens = self._groups(prompts, first_group_id, chunks, versions)
    return groups, GenerateStats(tokens, time.monotonic() - start, swaps)

  @functools.cached_property
  def _root(self) -> jax.Array:
    """The run's sampling key, on the rollout mesh."""
    return jax.device_put(
      jax.random.fold_in(jax.random.key(self._seed), _SAMPLING_STREAM),
      rules.replicated(self._mesh),
    )

  def programs(
    self, params: Params
  ) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Both programs of the sampler, to be compiled and not run.

    Args:
      params: Shapes of a snapshot, with their shardings on the rollout mesh.

    Returns:
      By name, a function that traces it for the shapes of the config.
    """
    return self.decoder.programs(
      params,
      num_prompts=self.config.prompts_per_batch,
      prompt_tokens=self._max_prompt_tokens,
    )

  def _inputs(self, prompts: Sequence[Prompt], first_group_id: int):
    """Left-padded prompts [Q, P], first slots [Q], request ids [Q * G, 2]."""
    size, width = self.config.prompts_per_batch, self._max_prompt_tokens
    if not 0 < len(prompts) <= size:
      raise ValueError(
        f"{len(prompts)} prompts for a batch of rollout.prompts_per_batch = "
        f"{size}"
      )
    tokens = np.full((size, width), self._pad_id, np.int32)
    first = np.zeros(size, np.int32)
    for row in range(size):
      prompt = prompts[row if row < len(prompts) else 0]
      length = len(prompt.tokens)
      if length == 0:
        raise ValueError(
          f"prompt {prompt.id} has no tokens: nothing predicts its response"
        )
      if length > width:
        raise ValueError(
          f"prompt {prompt.id} has {length} tokens, more than the {width} that "
          "the cache has room for"
        )
      tokens[row, width - length :] = prompt.tokens
      first[row] = width - length
    samples = self.config.samples_per_prompt
    request_ids = np.stack(
      [
        np.repeat(np.arange(size) + first_group_id, samples),
        np.tile(np.arange(samples), size),
      ],
      axis=1,
    ).astype(np.int32)
    return jax.device_put((tokens, first, request_ids), self._rows)

  def _groups(
    self,
    prompts: Sequence[Prompt],
    first_group_id: int,
    chunks: Sequence[SampledTokens],
    versions: Sequence[int],
  ) -> tuple[list[TrajectoryGroup], int]:
    """Cuts the rows at their stop tokens and makes trajectories of them."""
    limit = self.config.max_response_tokens
    sampled = jax.tree.map(
      lambda *parts: np.concatenate(parts, axis=1)[:, :limit], *chunks
    )
    widths = [chunk.tokens.shape[1] for chunk in chunks]
    stamps = np.repeat(np.asarray(versions, np.int32), widths)[:limit]
    stops = np.isin(sampled.tokens, self._stop_ids)
    stopped = stops.any(axis=1)
    lengths = np.where(stopped, stops.argmax(axis=1) + 1, stops.shape[1])
    samples = self.config.samples_per_prompt
    groups = []
    for index, prompt in enumerate(prompts):
      trajectories = []
      for row in range(index * samples, (index + 1) * samples):
        length = int(lengths[row])
        trajectories.append(
          _trajectory(
            prompt,
            first_group_id + index,
            sampled.tokens[row, :length],
            sampled.logprobs[row, :length],
            sampled.entropy[row, :length],
            stamps[:length],
            Finish.STOP if stopped[row] else Finish.LENGTH,
          )
        )
      groups.append(
        TrajectoryGroup(first_group_id + index, prompt, tuple(trajectories))
      )
    return groups, int(lengths[: len(prompts) * samples].sum())


def _trajectory(
  prompt: Prompt,
  group_id: int,
  tokens: np.ndarray,
  logprobs: np.ndarray,
  entropy: np.ndarray,
  versions: np.ndarray,
  finish: Finish,
) -> Trajectory:
  """A trajectory from a prompt and the arrays [R] of one response."""
  start = len(prompt.tokens)
  length = start + len(tokens)

  def widen(values: np.ndarray, dtype: np.dtype, fill) -> np.ndarray:
    whole = np.full(length, fill, dtype)
    whole[start:] = values
    return whole

  return Trajectory(
    prompt_id=prompt.id,
    group_id=group_id,
    tokens=np.concatenate([prompt.tokens, tokens]).astype(np.int32),
    loss_mask=np.arange(length) >= start,
    behavior_logprobs=widen(logprobs, np.float32, 0.0),
    behavior_entropy=widen(entropy, np.float32, 0.0),
    policy_version=widen(versions, np.int32, versions[0]),
    turn=np.zeros(length, np.int32),
    finish=finish,
  )
