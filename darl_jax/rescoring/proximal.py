"""What a batch needs of the ring's snapshots: centres and balance weights."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from darl_jax.config import RunConfig
from darl_jax.models import lora
from darl_jax.objectives import balance
from darl_jax.replay.ring import Entry, Pool
from darl_jax.rescoring.rescorer import Rescorer
from darl_jax.types import Params


def batch_arguments(
  rescorer: Rescorer,
  config: RunConfig,
  *,
  pool: Pool,
  entries: Sequence[Entry],
  scored_logprobs: np.ndarray,
) -> dict[str, np.ndarray]:
  """For ``batching.build_batch``; nothing where the objective asks for nothing.

  Args:
    rescorer: Of the ring's snapshots.
    config: What the objective asks for.
    pool: All that could have been chosen: the mixture of versions.
    entries: The chosen ones.
    scored_logprobs: float [tokens], nats, under the policy at the start of the
      step: of the entries' concatenated tokens.

  Returns:
    ``snapshot_logprobs`` [tokens], each under the snapshot that sampled the
    token, and as they were recorded where the ring does not hold it; and
    ``balance_weights`` [n].

  Raises:
    KeyError: A snapshot of the mixture is not held.
    ValueError: Under the balance heuristic a trajectory mixes versions.
  """
  objective = config.objective
  arguments = {}
  proximal = scored_logprobs
  if objective.proximal == "snapshot":
    own, known = rescorer.under_own(entries)
    recorded = _concatenated(entries, "behavior_logprobs")
    proximal = arguments["snapshot_logprobs"] = np.where(known, own, recorded)
  if objective.balances:
    arguments["balance_weights"] = _balance_weights(
      rescorer,
      pool,
      entries,
      proximal,
      cap=objective.max_behavior_weight,
      normalized=objective.behavior_weighting == "balance_length_normalized",
    )
  return arguments


def snapshot_problems(config: RunConfig, param_shapes: Params) -> list[str]:
  """Why the ring cannot hold all snapshots that the objective will ask for.

  Args:
    config: Of the run.
    param_shapes: Of all parameters; those that are trained are published.
  """
  if not config.objective.balances:
    return []
  trained, _ = lora.split(param_shapes)
  numbers = sum(leaf.size for leaf in jax.tree.leaves(trained))
  # Older ones are stale, and so are all trajectories that they began.
  count = config.replay.max_staleness + 1
  needed = count * numbers * jnp.dtype(config.rollout.dtype).itemsize
  if config.replay.snapshot_bytes >= needed:
    return []
  return [
    f"replay.snapshot_bytes = {config.replay.snapshot_bytes} does not hold the "
    f"{count} snapshots of up to replay.max_staleness = "
    f"{config.replay.max_staleness} versions, under each of which "
    f"objective.behavior_weighting = {config.objective.behavior_weighting!r} "
    f"scores. Try replay.snapshot_bytes={needed}."
  ]


def _balance_weights(
  rescorer: Rescorer,
  pool: Pool,
  entries: Sequence[Entry],
  proximal_logprobs: np.ndarray,
  *,
  cap: float,
  normalized: bool,
) -> np.ndarray:
  """float64 [n]; see ``objectives.balance``."""
  for entry in pool.entries:
    versions = np.unique(entry.trajectory.policy_version)
    if len(versions) > 1:
      raise ValueError(
        f"trajectory {entry.id} mixes versions {versions.tolist()}, and has no "
        "probability under any one of them, which the balance heuristic needs. "
        "Try another workdir: it was sampled before rollout.weight_update was "
        "'drain'."
      )
  lengths = [len(entry.trajectory.tokens) for entry in entries]
  owner = np.repeat(np.arange(len(entries)), lengths)
  sampled = _concatenated(entries, "loss_mask")

  def of_trajectories(logprobs: np.ndarray) -> np.ndarray:
    return np.bincount(
      owner[sampled], logprobs[sampled], minlength=len(entries)
    )

  begun_by, counts = np.unique(
    [entry.trajectory.begun_by for entry in pool.entries], return_counts=True
  )
  each = rescorer.under_each(entries, begun_by.tolist())
  return balance.balance_weights(
    of_trajectories(proximal_logprobs),
    np.stack([of_trajectories(logprobs) for _, logprobs in each]),
    counts / counts.sum(),
    cap=cap,
    biased_lengths=(
      np.bincount(owner[sampled], minlength=len(entries))
      if normalized
      else None
    ),
  )


def _concatenated(entries: Sequence[Entry], name: str) -> np.ndarray:
  return np.concatenate([getattr(e.trajectory, name) for e in entries])
