"""From trajectories to packed device batches, and back to trajectories.

Several trajectories share a row, told apart by ``segment_ids``. Everything per
token is first one flat concatenation in the order of the entries; packing is
then one index array, and each field one scatter.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from darl_jax import config as config_lib
from darl_jax import types
from darl_jax.objectives import behavior_weights, policy_losses
from darl_jax.replay import ring, selection

# The fields of the moments of the log-ratio, as the kernel names them.
_MOMENTS = (
  "count",
  "mean",
  "variance",
  "second_moment",
  "harmful",
  "entropy_scaled",
  "max_abs",
)


@dataclasses.dataclass(frozen=True)
class Packing:
  """Where each item lies; int64 [n] each.

  Attributes:
    row: Its row, or -1 where it was not placed.
    start: Its first position in the row.
    segment: 1, 2, ... along the row.
  """

  row: np.ndarray
  start: np.ndarray
  segment: np.ndarray


def pack(lengths: np.ndarray, *, rows: int, row_tokens: int) -> Packing:
  """Packs items into rows: best fit, longest first, deterministic.

  A row holds at most ``types.row_segments`` items.

  Args:
    lengths: int [n], at least 1 each.
    rows: Rows there are.
    row_tokens: Tokens that a row holds.

  Returns:
    The place of each item. Rows are filled in ascending order: a row is opened
    only when no open one has room.
  """
  row = np.full(len(lengths), -1, np.int64)
  start = np.zeros(len(lengths), np.int64)
  segment = np.zeros(len(lengths), np.int64)
  # Open rows by their free tokens; bit f of `free` is set when rows_of[f] has
  # any, so that the tightest fit is the lowest bit from the length on.
  rows_of: dict[int, list[int]] = collections.defaultdict(list)
  free = 0
  segments = [0] * rows
  opened, most = 0, types.row_segments(row_tokens)
  for item in np.argsort(-np.asarray(lengths), kind="stable").tolist():
    length = int(lengths[item])
    fitting = free >> length
    if fitting:
      room = length + (fitting & -fitting).bit_length() - 1
      into = rows_of[room].pop()
      if not rows_of[room]:
        free ^= 1 << room
    elif opened < rows and length <= row_tokens:
      room, into = row_tokens, opened
      opened += 1
    else:
      continue
    segments[into] += 1
    if segments[into] < most:
      left = room - length
      rows_of[left].append(into)
      free |= 1 << left
    row[item], start[item], segment[item] = (
      into,
      row_tokens - room,
      segments[into],
    )
  return Packing(row, start, segment)


@dataclasses.dataclass(frozen=True)
class _Tokens:
  """Entries' tokens, concatenated; [tokens] unless said otherwise.

  Attributes:
    offsets: int64 [n + 1], where each entry begins.
    owner: Index of the entry.
    position: In its trajectory.
    advantages: float32 [n], per entry.
    support_mask: Of all tokens; None where nothing truncates.
  """

  offsets: np.ndarray
  owner: np.ndarray
  position: np.ndarray
  tokens: np.ndarray
  loss_mask: np.ndarray
  behavior_logprobs: np.ndarray
  behavior_entropy: np.ndarray
  policy_version: np.ndarray
  advantages: np.ndarray
  support_mask: types.SupportMask | None

  @classmethod
  def of(cls, entries: Sequence[ring.Entry]) -> "_Tokens":
    trajectories = [entry.trajectory for entry in entries]
    lengths = np.array([len(t.tokens) for t in trajectories], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    owner = np.repeat(np.arange(len(entries)), lengths)
    loss_mask = np.concatenate([t.loss_mask for t in trajectories])
    logprobs = np.concatenate([t.behavior_logprobs for t in trajectories])
    entropy = np.concatenate([t.behavior_entropy for t in trajectories])
    return cls(
      offsets=offsets,
      owner=owner,
      position=np.arange(len(owner)) - offsets[owner],
      tokens=np.concatenate([t.tokens for t in trajectories]),
      loss_mask=loss_mask,
      # Whatever the sampler left in masked slots stays on the host.
      behavior_logprobs=np.where(loss_mask, logprobs, np.float32(0)),
      behavior_entropy=np.where(loss_mask, entropy, np.float32(0)),
      policy_version=np.concatenate([t.policy_version for t in trajectories]),
      advantages=np.array([e.advantage for e in entries], np.float32),
      support_mask=_support_masks(trajectories),
    )

  @property
  def lengths(self) -> np.ndarray:
    """int64 [n]."""
    return np.diff(self.offsets)

  def mean_entropy(self) -> np.ndarray:
    """float64 [n], over masked-in tokens; 0 without any."""
    total = np.bincount(
      self.owner, self.behavior_entropy, minlength=len(self.advantages)
    )
    return total / np.maximum(self.num_sampled(), 1)

  def num_sampled(self) -> np.ndarray:
    """int64 [n], masked-in tokens."""
    return np.bincount(
      self.owner[self.loss_mask], minlength=len(self.advantages)
    )


def _support_masks(
  trajectories: Sequence[types.Trajectory],
) -> types.SupportMask | None:
  """Concatenated; the ring lets in either all or none of them.

  Raises:
    ValueError: Some trajectories have none.
  """
  masks = [t.support_mask for t in trajectories]
  if all(mask is None for mask in masks):
    return None
  if any(mask is None for mask in masks):
    raise ValueError("some trajectories have a support mask, and others none.")
  return types.SupportMask.concatenate(masks)


@dataclasses.dataclass(frozen=True)
class _Layout:
  """Scatters flat per-token arrays into packed ones.

  Attributes:
    shape: Of a packed array; its last axis is a row.
    source: int64 [placed tokens], index into the flat arrays.
    target: int64 [placed tokens], index into the flattened packed array.
  """

  shape: tuple[int, ...]
  source: np.ndarray
  target: np.ndarray

  @classmethod
  def of(
    cls, flat: _Tokens, packing: Packing, shape: tuple[int, ...]
  ) -> "_Layout":
    first = packing.row * shape[-1] + packing.start
    source = np.flatnonzero((packing.row >= 0)[flat.owner])
    target = first[flat.owner[source]] + flat.position[source]
    return cls(shape, source, target)

  def scatter(self, values: np.ndarray) -> np.ndarray:
    """[tokens] -> ``shape``; 0 or false where nothing lies."""
    packed = np.zeros(self.shape, values.dtype)
    packed.reshape(-1)[self.target] = values[self.source]
    return packed

  def place(self, flat: _Tokens) -> "_PlacedSupport | None":
    """Where the bytes of the support mask go, if there is one."""
    mask = flat.support_mask
    if mask is None:
      return None
    target = np.full(len(flat.tokens), -1)
    target[self.source] = self.target
    # Whatever was left in masked slots stays on the host.
    target = np.where(flat.loss_mask, target, -1)[mask.rows]
    used = target >= 0
    return _PlacedSupport(
      target[used], mask.columns[used], mask.data[used], mask.width
    )


@dataclasses.dataclass(frozen=True)
class _PlacedSupport:
  """The bytes of a packed support mask that are not 0; [bytes] each.

  Attributes:
    target: int64, their positions in the flattened packed tokens.
    columns: int32, where they lie in the positions' rows.
    data: uint8.
    width: Of a row.
  """

  target: np.ndarray
  columns: np.ndarray
  data: np.ndarray
  width: int

  def dense(self, shape: tuple[int, ...], *, first: int = 0) -> np.ndarray:
    """uint8 [``shape``, W], of the positions from ``first`` on."""
    packed = np.zeros((*shape, self.width), np.uint8)
    rows = packed.reshape(-1, self.width)
    target = self.target - first
    here = (target >= 0) & (target < len(rows))
    rows[target[here], self.columns[here]] = self.data[here]
    return packed


class ScoringPlan:
  """A pool packed for the scoring pass, and the way back.

    plan = ScoringPlan(pool.entries, score_rows=..., row_tokens=...)
    results = [score(batch) for batch in plan.batches]
    logprobs = plan.per_token([result.logprobs for result in results])
    stats = plan.statistics([result.moments for result in results])

  Attributes:
    entries: The pool, in its order.
    num_segments: Most trajectories of a row: the static size of the moments.
  """

  @classmethod
  def of(
    cls, entries: Sequence[ring.Entry], learner: config_lib.LearnerConfig
  ) -> "ScoringPlan":
    """In batches of the learner's shape."""
    return cls(
      entries, score_rows=learner.score_rows, row_tokens=learner.row_tokens
    )

  def __init__(
    self, entries: Sequence[ring.Entry], *, score_rows: int, row_tokens: int
  ):
    """Packs a pool into as many batches of one static shape as it needs.

    Args:
      entries: At least one.
      score_rows: Rows of a batch.
      row_tokens: T.

    Raises:
      ValueError: A trajectory is longer than a row, or shorter than 2 tokens.
    """
    self.entries = tuple(entries)
    self.num_segments = types.row_segments(row_tokens)
    self._flat = _Tokens.of(entries)
    lengths = self._flat.lengths
    for problem, bound in (
      (lengths > row_tokens, f"at most learner.row_tokens = {row_tokens}"),
      (
        lengths < types.MIN_TRAJECTORY_TOKENS,
        f"at least {types.MIN_TRAJECTORY_TOKENS}",
      ),
    ):
      if np.any(problem):
        wrong = int(np.argmax(problem))
        raise ValueError(
          f"trajectory {self.entries[wrong].id} has {lengths[wrong]} tokens, "
          f"and must have {bound}."
        )
    self._packing = pack(lengths, rows=len(lengths), row_tokens=row_tokens)
    num_batches = -(-(int(self._packing.row.max()) + 1) // score_rows)
    layout = _Layout.of(
      self._flat, self._packing, (num_batches, score_rows, row_tokens)
    )
    self._layout = layout
    flat, owner = self._flat, self._flat.owner
    packed = types.ScoreBatch(
      tokens=layout.scatter(flat.tokens),
      positions=layout.scatter(flat.position.astype(np.int32)),
      segment_ids=layout.scatter(self._packing.segment.astype(np.int32)[owner]),
      loss_mask=layout.scatter(flat.loss_mask),
      behavior_logprobs=layout.scatter(flat.behavior_logprobs),
      behavior_entropy=layout.scatter(flat.behavior_entropy),
      advantages=layout.scatter(flat.advantages[owner]),
    )
    self._packed = packed
    self._support = layout.place(flat)

  @property
  def batches(self) -> Iterator[types.ScoreBatch]:
    """numpy arrays [score_rows, row_tokens], for one dispatch each.

    Together they hold every entry once. Made one by one: the bits of a support
    mask take much more than what the entries hold of them.
    """
    for index in range(self._layout.shape[0]):
      batch = jax.tree.map(lambda array, i=index: array[i], self._packed)
      if self._support is not None:
        shape = batch.tokens.shape
        bits = self._support.dense(shape, first=index * batch.tokens.size)
        batch = dataclasses.replace(batch, support_mask=bits)
      yield batch

  def per_token(self, results: Sequence[Any]) -> np.ndarray:
    """Results [score_rows, row_tokens] of each batch as [tokens].

    The order is that of the entries' concatenated tokens.
    """
    packed = self._stack(results, self._layout.shape)
    return packed.reshape(-1)[self._layout.target]

  def per_trajectory(self, results: Sequence[Any]) -> np.ndarray:
    """Results [score_rows, num_segments] of each batch as [n]."""
    shape = (*self._layout.shape[:2], self.num_segments)
    packed = self._stack(results, shape).reshape(-1, self.num_segments)
    return packed[self._packing.row, self._packing.segment - 1]

  def statistics(self, moments: Sequence[Any]) -> selection.PoolStatistics:
    """The pool's statistics.

    Args:
      moments: Of each batch, with the fields of the kernel's
        ``LogRatioMoments``, [score_rows, num_segments] each.
    """
    entries = self.entries
    return selection.PoolStatistics(
      **{
        name: self.per_trajectory([getattr(m, name) for m in moments])
        for name in _MOMENTS
      },
      length=self._flat.num_sampled(),
      reward=np.array([entry.trajectory.reward for entry in entries], float),
      advantage=self._flat.advantages,
      entropy=self._flat.mean_entropy(),
      age=np.array([entry.age for entry in entries]),
      begun_by=self._flat.policy_version[self._flat.offsets[:-1]],
    )

  def tokens_of(self, per_token: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The tokens of some trajectories, concatenated in the order of ``chosen``.

    Args:
      per_token: [tokens], as ``per_token`` returns it.
      chosen: int [m], indices of entries; at least one.
    """
    offsets = self._flat.offsets
    return np.concatenate(
      [per_token[offsets[i] : offsets[i + 1]] for i in chosen]
    )

  def _stack(
    self, results: Sequence[Any], shape: tuple[int, ...]
  ) -> np.ndarray:
    packed = np.stack([np.asarray(result) for result in results])
    if packed.shape != shape:
      raise ValueError(
        f"results have shape {packed.shape}, one row per batch, and must have "
        f"{shape}."
      )
    return packed


@dataclasses.dataclass(frozen=True)
class Choice:
  """What selection took of a pool.

  Attributes:
    plan: What was scored, and how.
    per_token: float32 [tokens] of the plan, nats, under the policy that scored.
    stats: [n], of the plan's entries.
    kept: int64, indices of those that were taken, in order of preference.
  """

  plan: ScoringPlan
  per_token: np.ndarray
  stats: selection.PoolStatistics
  kept: np.ndarray

  @property
  def entries(self) -> list[ring.Entry]:
    """Those that were taken."""
    return [self.plan.entries[i] for i in self.kept]

  @property
  def logprobs(self) -> np.ndarray:
    """float32, flat over the tokens of ``entries``; at least one is needed."""
    return self.plan.tokens_of(self.per_token, self.kept)


def choose(
  pool: ring.Pool,
  score: Callable[[types.ScoreBatch], tuple[Any, Any]],
  *,
  replay: config_lib.ReplayConfig,
  learner: config_lib.LearnerConfig,
  rng: np.random.Generator,
) -> Choice:
  """Scores a pool's candidates, and selects a step's trajectories of them.

  Args:
    pool: At least one trajectory.
    score: Log-probs and moments of a batch, under the policy to be trained.
    replay: How to select.
    learner: The static shapes, and the most to take.
    rng: Of the draws.
  """
  ages = np.array([entry.age for entry in pool.entries])
  asked = selection.candidates(ages, replay, rng=rng)
  plan = ScoringPlan.of([pool.entries[i] for i in asked], learner)
  # All are dispatched before the first is waited for.
  results = [score(batch) for batch in plan.batches]
  stats = plan.statistics([moments for _, moments in results])
  kept = selection.select(stats, replay, batch_size=learner.batch_size, rng=rng)
  per_token = plan.per_token([logprobs for logprobs, _ in results])
  return Choice(plan, per_token, stats, kept)


def build_batch(
  entries: Sequence[ring.Entry],
  scored_logprobs: np.ndarray,
  *,
  objective: config_lib.ObjectiveConfig,
  learner: config_lib.LearnerConfig,
  version: int,
  dead_tokens: int,
  rng: np.random.Generator,
  snapshot_logprobs: np.ndarray | None = None,
  balance_weights: np.ndarray | None = None,
) -> tuple[types.Batch, tuple[ring.Entry, ...], dict[str, float]]:
  """Packs a step's trajectories and weighs their tokens (method 2.3).

  Trajectories are dealt to the M minibatches in a seeded random order, by
  blocks of M of about one length: minibatches differ by at most one trajectory
  and by at most the tokens of the longest. Weights are of what was placed.

  Args:
    entries: What selection took.
    scored_logprobs: float [tokens], nats, under the policy at the start of the
      step: of the entries' concatenated tokens.
    objective: Weights, clip bounds, and the size E of the version table.
    learner: The static shape.
    version: The learner's, for the age of the versions.
    dead_tokens: Of the pool; used under the denominator ``all``.
    rng: Deals the trajectories.
    snapshot_logprobs: float [tokens], nats, each under the snapshot that
      sampled it, by the learner; with ``objective.proximal = "snapshot"``.
    balance_weights: float [n], of each entry; with ``objective.balances``.

  Returns:
    batch: numpy arrays [minibatches, microbatches, B, T], and [E]. Its version
      table holds the distinct versions of the masked-in tokens, ascending; with
      more than E, the oldest share the first entry, under the oldest's number,
      so that an age-dependent clip is tight enough for all of them.
    placed: The entries in it, in their given order; the others did not fit and
      stay as they are.
    metrics: ``placed`` and ``not_placed`` trajectories; ``tokens``, masked-in
      ones; ``fill``, the share of the batch's positions in use; ``versions``,
      ``merged_versions`` and ``merged_tokens``; ``dead_tokens``; with balance
      weights ``balance_weight``, their mean over what was placed, and
      ``balance_capped``, the share at the cap.

  Raises:
    ValueError: There is no entry, scores are not one per token, one of a
      masked-in token is not finite, or what the objective needs is not given.
  """
  if not entries:
    raise ValueError("there is no trajectory to build a batch from.")
  flat = _Tokens.of(entries)
  if scored_logprobs.shape != flat.tokens.shape:
    raise ValueError(
      f"scored_logprobs have shape {scored_logprobs.shape}, and the entries "
      f"{flat.tokens.shape[0]} tokens."
    )
  scored = np.where(flat.loss_mask, scored_logprobs, 0).astype(np.float32)
  if not np.all(np.isfinite(scored)):
    wrong = flat.owner[np.argmin(np.isfinite(scored))]
    raise ValueError(
      f"trajectory {entries[wrong].id} has a scored log-prob that is not "
      "finite."
    )

  shape = (
    learner.minibatches,
    learner.microbatches,
    learner.rows // (learner.minibatches * learner.microbatches),
    learner.row_tokens,
  )
  packing = _deal(
    flat.lengths,
    minibatches=learner.minibatches,
    rows=learner.rows // learner.minibatches,
    row_tokens=learner.row_tokens,
    rng=rng,
  )
  is_placed = packing.row >= 0
  trained = flat.loss_mask & is_placed[flat.owner]
  versions, behavior_index, num_merged = _version_table(
    flat.policy_version, trained, max_versions=objective.max_versions
  )
  token_weights = np.zeros(len(trained))
  token_weights[trained] = _token_weights(
    (scored - flat.behavior_logprobs)[trained],
    behavior_index[trained],
    flat.owner[trained],
    objective=objective,
    dead_tokens=dead_tokens,
  )
  if objective.balances:
    weights = _balance_weights(balance_weights, entries)
    token_weights *= weights[flat.owner]
  clip = _clip_scale(versions, version, decay=objective.clip_age_decay)

  layout = _Layout.of(flat, packing, shape)
  support = layout.place(flat)
  batch = types.Batch(
    tokens=layout.scatter(flat.tokens),
    positions=layout.scatter(flat.position.astype(np.int32)),
    segment_ids=layout.scatter(packing.segment.astype(np.int32)[flat.owner]),
    loss_mask=layout.scatter(flat.loss_mask),
    behavior_logprobs=layout.scatter(flat.behavior_logprobs),
    proximal_logprobs=layout.scatter(
      _proximal(flat, scored, snapshot_logprobs, objective, version)
    ),
    behavior_index=layout.scatter(behavior_index),
    token_weights=layout.scatter(token_weights.astype(np.float32)),
    advantages=layout.scatter(flat.advantages[flat.owner]),
    clip_low=(objective.clip_low * clip).astype(np.float32),
    clip_high=(objective.clip_high * clip).astype(np.float32),
    versions=versions,
    behavior_entropy=(
      layout.scatter(flat.behavior_entropy)
      if objective.loss == "estr"
      else None
    ),
    support_mask=None if support is None else support.dense(shape),
  )
  placed = tuple(entries[i] for i in np.flatnonzero(is_placed))
  merged = num_merged > 0
  metrics = {
    "placed": float(len(placed)),
    "not_placed": float(len(entries) - len(placed)),
    "tokens": float(np.count_nonzero(trained)),
    "fill": len(layout.target) / batch.tokens.size,
    "versions": float(np.count_nonzero(versions >= 0)),
    "merged_versions": float(num_merged),
    "merged_tokens": float(
      np.count_nonzero(trained & (behavior_index == 0)) if merged else 0
    ),
    "dead_tokens": float(dead_tokens),
  }
  if objective.balances and placed:
    weights = weights[is_placed]
    capped = weights >= objective.max_behavior_weight
    metrics["balance_weight"] = float(np.mean(weights))
    metrics["balance_capped"] = float(np.mean(capped))
  return batch, placed, metrics


def _balance_weights(
  weights: np.ndarray | None, entries: Sequence[ring.Entry]
) -> np.ndarray:
  """float [n], checked.

  Raises:
    ValueError: They are not given, not one per entry, or not finite.
  """
  shape = None if weights is None else weights.shape
  if shape != (len(entries),) or not np.all(np.isfinite(weights)):
    raise ValueError(
      f"balance_weights have shape {shape}, and must be one finite number for "
      f"each of the {len(entries)} entries."
    )
  return weights


def _deal(
  lengths: np.ndarray,
  *,
  minibatches: int,
  rows: int,
  row_tokens: int,
  rng: np.random.Generator,
) -> Packing:
  """Deals items to minibatches and packs each; see ``build_batch``.

  Args:
    lengths: int [n].
    minibatches: M.
    rows: Of one minibatch.
    row_tokens: Tokens of a row.
    rng: Decides who is dealt where, and who is left out.

  Returns:
    Rows count through all minibatches.
  """
  # More than the rows can hold: a random share goes in. Left to the packing it
  # would be the long ones, which come first there.
  order = rng.permutation(len(lengths))
  capacity = minibatches * rows * row_tokens
  order = order[np.cumsum(lengths[order]) <= capacity]
  # Blocks of M of about one length, each dealt out in an order of its own. The
  # differences within blocks of a descending sequence add up to at most its
  # first element, which bounds the imbalance.
  order = order[np.argsort(-lengths[order], kind="stable")]
  blocks = -(-len(order) // minibatches)
  hands = np.tile(np.arange(minibatches), (blocks, 1))
  hand = rng.permuted(hands, axis=1).reshape(-1)[: len(order)]

  row = np.full(len(lengths), -1, np.int64)
  start, segment = np.zeros_like(row), np.zeros_like(row)
  for minibatch in range(minibatches):
    items = order[hand == minibatch]
    packing = pack(lengths[items], rows=rows, row_tokens=row_tokens)
    row[items] = np.where(packing.row >= 0, packing.row + minibatch * rows, -1)
    start[items], segment[items] = packing.start, packing.segment
  return Packing(row, start, segment)


def _version_table(
  policy_version: np.ndarray, trained: np.ndarray, *, max_versions: int
) -> tuple[np.ndarray, np.ndarray, int]:
  """The versions of a batch, and each token's entry.

  Args:
    policy_version: int [tokens].
    trained: bool [tokens], the tokens that count.
    max_versions: E.

  Returns:
    versions: int32 [E], ascending, then -1.
    behavior_index: int32 [tokens]; 0 where not trained.
    num_merged: How many versions share entry 0; 0 when none do.
  """
  distinct = np.unique(policy_version[trained])
  excess = max(0, len(distinct) - max_versions)
  kept = distinct if not excess else np.delete(distinct, slice(1, excess + 1))
  versions = np.full(max_versions, -1, np.int32)
  versions[: len(kept)] = kept
  # A merged version is above entry 0 and below entry 1.
  index = np.searchsorted(kept, policy_version, side="right") - 1
  index = np.where(trained, index, 0).astype(np.int32)
  return versions, index, excess + 1 if excess else 0


def _token_weights(
  ell: np.ndarray,
  behavior_index: np.ndarray,
  owner: np.ndarray,
  *,
  objective: config_lib.ObjectiveConfig,
  dead_tokens: int,
) -> np.ndarray:
  """What each trained token weighs in the loss: float64 [n].

  Args:
    ell: [n], log pi - log mu of each trained token, nats.
    behavior_index: int [n], its entry of the version table.
    owner: int [n], its trajectory.
    objective: How they are weighed.
    dead_tokens: Of the pool.
  """
  dead_tokens = dead_tokens if objective.denominator == "all" else 0
  if objective.loss == "gspo":
    return behavior_weights.trajectory_token_weights(
      owner, dead_tokens=dead_tokens
    )
  stats = behavior_weights.BehaviorStatistics.from_tokens(
    ell, behavior_index, objective.max_versions
  )
  return behavior_weights.token_weights(
    stats,
    # The balance heuristic weighs each trajectory instead.
    weighting="pooled" if objective.balances else objective.behavior_weighting,
    weight_cap=objective.weight_cap,
    kappa=objective.kappa,
    dead_tokens=dead_tokens,
  )[behavior_index]


def _proximal(
  flat: _Tokens,
  scored: np.ndarray,
  snapshot_logprobs: np.ndarray | None,
  objective: config_lib.ObjectiveConfig,
  version: int,
) -> np.ndarray:
  """float32 [tokens], log-probs of the proximal policy; 0 where masked.

  Raises:
    ValueError: Those under the snapshots are wanted, and not given.
  """
  match objective.proximal:
    case "recompute" | "ewma":  # The learner scores under its average.
      return scored
    case "loglinear":
      return np.asarray(
        policy_losses.loglinear_proximal(
          scored,
          flat.behavior_logprobs,
          flat.policy_version,
          flat.loss_mask,
          policy_version=version,
          proximal_version=version - objective.proximal_lag,
        )
      )
    case "snapshot":
      if snapshot_logprobs is None:
        raise ValueError(
          "objective.proximal = 'snapshot' needs snapshot_logprobs."
        )
      return np.where(flat.loss_mask, snapshot_logprobs, 0).astype(np.float32)


def _clip_scale(
  versions: np.ndarray, version: int, *, decay: float
) -> np.ndarray:
  """float64 [E], decay^age; positive, so that an infinite bound stays one."""
  age = np.where(versions >= 0, version - versions, 0)
  return np.maximum(float(decay) ** age, np.finfo(np.float32).tiny)
