"""The types that the stages exchange, and the legend of array shapes.

Shape letters, used in every docstring:

  B  rows of a packed batch          V  vocabulary
  T  tokens of a row or trajectory   D  embedding
  P  tokens of a prompt              F  mlp hidden
  R  sampled tokens of a response    N  query heads
  G  samples per prompt              M  key/value heads
  K  snapshots in the ring           H  head dimension
  E  entries of the version table    S  cache slots

Index convention, once, everywhere: ``logprobs[b, t]`` is the log-prob of
``tokens[b, t]`` given what precedes it; position 0 is always masked. Log-probs
are of the *sampled* distribution: temperature is applied by the sampler and
by the learner alike, and so is the support that truncation (top-k, top-p,
min-p) left the sampler.

Types that stay on the host hold numpy arrays; ``Batch`` and ``TrainState`` are
pytrees of device arrays with static shapes.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

Params = Any  # A pytree of arrays.

# Shorter trajectories cannot be: one token of prompt, one sampled.
MIN_TRAJECTORY_TOKENS = 2
# Trajectories that share a packed row, at most: one for each lane of a TPU's
# vector registers, so that a row's moments are one register wide.
_MAX_ROW_SEGMENTS = 128

# An answer is right from this score on: verifiers pay partial credit below it,
# and some compare floats.
CORRECT = 0.99


def row_segments(row_tokens: int) -> int:
  """Most trajectories of a packed row: the static size of its moments."""
  return min(row_tokens // MIN_TRAJECTORY_TOKENS, _MAX_ROW_SEGMENTS)


class Finish(enum.Enum):
  """Why a response ended."""

  STOP = "stop"  # It sampled a stop token, or completed a stop string.
  LENGTH = "length"  # It reached the longest response allowed.
  ABORTED = "aborted"  # The run stopped it.


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A question, ready to be answered.

  Attributes:
    id: Identifies the question: equal questions have equal ids.
    tokens: int32 [P], the prompt exactly as the policy sees it.
    reference: What the verifier needs to score an answer; plain JSON data.
  """

  id: str
  tokens: np.ndarray
  reference: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class SupportMask:
  """Packed bits uint8 [T, W] of the tokens that each position was drawn from.

  W is ceil(V / 8), and the bits are little-endian, as ``kernels.token_logprob``
  takes them. Held are the bytes that are not 0, in compressed sparse rows: 5
  bytes for each of them and 8 for the position, where the bits themselves take
  W. Of 152 thousand tokens that is about 160 bytes per token if truncation
  leaves 30, and not 19 thousand.

  Attributes:
    data: uint8 [N], the bytes that are not 0, position by position.
    columns: int32 [N], where they lie in their rows; ascending in each.
    offsets: int64 [T + 1], where each position begins in both.
    width: W.
  """

  data: np.ndarray
  columns: np.ndarray
  offsets: np.ndarray
  width: int

  @classmethod
  def of(cls, bits: np.ndarray) -> "SupportMask":
    """From uint8 [T, W]."""
    length, width = bits.shape
    flat = bits.reshape(-1)
    # Among booleans numpy finds the few true ones in a twentieth of the time.
    found = np.flatnonzero(flat != 0)
    return cls(
      data=flat[found],
      columns=(found % width).astype(np.int32),
      offsets=np.searchsorted(found, np.arange(length + 1) * width),
      width=width,
    )

  @classmethod
  def concatenate(cls, masks: Sequence["SupportMask"]) -> "SupportMask":
    """Of positions one behind the other; at least one mask.

    Raises:
      ValueError: They are not of one width.
    """
    widths = {mask.width for mask in masks}
    if len(widths) != 1:
      raise ValueError(f"support masks have widths {sorted(widths)}.")
    counts = np.concatenate([np.diff(mask.offsets) for mask in masks])
    return cls(
      data=np.concatenate([mask.data for mask in masks]),
      columns=np.concatenate([mask.columns for mask in masks]),
      offsets=np.concatenate([[0], np.cumsum(counts)]),
      width=widths.pop(),
    )

  def after(self, count: int) -> "SupportMask":
    """These positions behind ``count`` that have no support."""
    offsets = np.concatenate([np.zeros(count, np.int64), self.offsets])
    return dataclasses.replace(self, offsets=offsets)

  @property
  def rows(self) -> np.ndarray:
    """int64 [N], the position of each byte."""
    return np.repeat(np.arange(len(self)), np.diff(self.offsets))

  def dense(self) -> np.ndarray:
    """uint8 [T, W]."""
    bits = np.zeros((len(self), self.width), np.uint8)
    bits[self.rows, self.columns] = self.data
    return bits

  def has(self, tokens: np.ndarray) -> np.ndarray:
    """Whether each position could draw its token int [T]: bool [T]."""
    rows = self.rows
    here = self.columns == tokens[rows] // 8
    found = np.zeros(len(self), bool)
    found[rows[here]] = (self.data >> (tokens[rows] % 8))[here] & 1
    return found

  @property
  def num_bytes(self) -> int:
    return self.data.nbytes + self.columns.nbytes + self.offsets.nbytes

  def __len__(self) -> int:
    """T."""
    return len(self.offsets) - 1


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """A prompt and one sampled response, as the behavior policies left it.

  What changes later (advantage, uses, fate) lives in the ring's record of it.

  Attributes:
    prompt_id: The prompt's id.
    group_id: Shared by the G samples drawn for one prompt at one time.
    tokens: int32 [T], prompt and response.
    loss_mask: bool [T], true on sampled tokens, the stop token included.
    behavior_logprobs: float32 [T], nats, under the policy that sampled the
      token, temperature and truncation applied; 0 where masked.
    behavior_entropy: float32 [T], nats, of that same distribution.
    policy_version: int32 [T], the snapshot that sampled each token. Prompt
      tokens carry the version that began the response.
    turn: int32 [T], the turn of a conversation a token belongs to.
    finish: Why the response ended.
    reward: None until verified, and where verification failed; never NaN.
    support_mask: Of T positions, the tokens that truncation left where each
      was sampled; none elsewhere. None where nothing truncates.
  """

  prompt_id: str
  group_id: int
  tokens: np.ndarray
  loss_mask: np.ndarray
  behavior_logprobs: np.ndarray
  behavior_entropy: np.ndarray
  policy_version: np.ndarray
  turn: np.ndarray
  finish: Finish
  reward: float | None = None
  support_mask: SupportMask | None = None

  @property
  def begun_by(self) -> int:
    """The snapshot that began this response: the slot it belongs to."""
    return int(self.policy_version[0])

  @property
  def response(self) -> np.ndarray:
    """int32 [R], the sampled tokens."""
    return self.tokens[self.loss_mask]

  @property
  def num_sampled(self) -> int:
    return int(np.count_nonzero(self.loss_mask))


@dataclasses.dataclass(frozen=True)
class TrajectoryGroup:
  """The G samples of one prompt: the unit of advantages and of admission.

  Attributes:
    group_id: Unique within a run.
    prompt: What was asked.
    trajectories: The G samples.
    failures: For each sample None, or why its verification failed (a
      recorded failure has no reward: it is neither right nor wrong).
  """

  group_id: int
  prompt: Prompt
  trajectories: tuple[Trajectory, ...]
  failures: tuple[str | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class PolicySnapshot:
  """The parameters of one version, immutable and never donated.

  Attributes:
    version: Number of learner steps behind these parameters.
    params: Pytree of numpy arrays on the host, or of device arrays once it
      was moved to a mesh.
  """

  version: int
  params: Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoreBatch:
  """Packed trajectories for one dispatch of the scoring pass.

  Attributes: as in ``Batch``, without leading axes; ``behavior_entropy`` is
  float32 [B, T], nats.
  """

  tokens: jax.Array
  positions: jax.Array
  segment_ids: jax.Array
  loss_mask: jax.Array
  behavior_logprobs: jax.Array
  behavior_entropy: jax.Array
  advantages: jax.Array
  support_mask: jax.Array | None = None

  @classmethod
  def abstract(
    cls, shape: tuple[int, int], *, support_width: int | None
  ) -> "ScoreBatch":
    """The shapes and dtypes of a batch [B, T]; see ``Batch.abstract``."""
    arrays = {
      field.name: _abstract(field.name, shape)
      for field in dataclasses.fields(cls)
      if field.name != "support_mask"
    }
    return cls(**arrays, support_mask=_abstract_support(shape, support_width))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """Packed trajectories for one learner step; every shape is static.

  Leading axes [minibatches, microbatches] are scanned by the step; they are
  written here as "...".

  Attributes:
    tokens: int32 [..., B, T].
    positions: int32 [..., B, T], restarting at 0 with each trajectory.
    segment_ids: int32 [..., B, T], 1, 2, ... per trajectory of a row; 0 pads.
    loss_mask: bool [..., B, T].
    behavior_logprobs: float32 [..., B, T].
    proximal_logprobs: float32 [..., B, T], of the proximal policy; under the
      weights at the start of the step where the learner averages it.
    behavior_index: int32 [..., B, T], entry of the version table that sampled
      the token.
    token_weights: float32 [..., B, T], alpha_v / N_v (method 2.3), detached.
    advantages: float32 [..., B, T], each trajectory's advantage on its tokens.
    clip_low: float32 [E], lower clip distance of each version.
    clip_high: float32 [E], upper clip distance of each version.
    versions: int32 [E], the version table; -1 marks an unused entry.
    behavior_entropy: float32 [..., B, T], nats, of the policy that sampled the
      token; None where the loss does not read it.
    support_mask: uint8 [..., B, T, ceil(V / 8)], little-endian bits of the
      tokens among which ``tokens[b, t]`` was drawn, none where it was not; None
      where nothing truncates.
    reference_logprobs: float32 [..., B, T], of the policy that the run began
      with; None until the learner has scored under it, if the loss reads it.
  """

  tokens: jax.Array
  positions: jax.Array
  segment_ids: jax.Array
  loss_mask: jax.Array
  behavior_logprobs: jax.Array
  proximal_logprobs: jax.Array
  behavior_index: jax.Array
  token_weights: jax.Array
  advantages: jax.Array
  clip_low: jax.Array
  clip_high: jax.Array
  versions: jax.Array
  behavior_entropy: jax.Array | None = None
  support_mask: jax.Array | None = None
  reference_logprobs: jax.Array | None = None

  @classmethod
  def abstract(
    cls,
    shape: tuple[int, int, int, int],
    *,
    max_versions: int,
    behavior_entropy: bool,
    support_width: int | None,
  ) -> "Batch":
    """The shapes and dtypes of a batch [minibatches, microbatches, B, T].

    Args:
      shape: Of an array of tokens.
      max_versions: E.
      behavior_entropy: Whether the loss reads it.
      support_width: ceil(V / 8) where sampling truncates; else None.
    """
    table = ("clip_low", "clip_high", "versions")
    absent = {"support_mask", "reference_logprobs"}
    if not behavior_entropy:
      absent.add("behavior_entropy")
    arrays = {
      field.name: _abstract(
        field.name, (max_versions,) if field.name in table else shape
      )
      for field in dataclasses.fields(cls)
      if field.name not in absent
    }
    return cls(**arrays, support_mask=_abstract_support(shape, support_width))


def _abstract(field: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
  """One field of a batch; what is neither an id nor a mask is float32."""
  ids = ("tokens", "positions", "segment_ids", "behavior_index", "versions")
  dtype = np.int32 if field in ids else np.float32
  return jax.ShapeDtypeStruct(shape, bool if field == "loss_mask" else dtype)


def _abstract_support(
  shape: tuple[int, ...], width: int | None
) -> jax.ShapeDtypeStruct | None:
  if width is None:
    return None
  return jax.ShapeDtypeStruct((*shape, width), np.uint8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """What the learner updates; donated to every step.

  Attributes:
    step: int32 [], learner steps taken: the version of ``params``.
    params: The policy's parameters.
    opt_state: optax state.
    proximal_average: ``objectives.ewma.ProximalAverage`` of the policies before
      this one; None where the proximal policy is another.
    reference: The parameters that the run began with; None where nothing is
      held near them.
  """

  step: jax.Array
  params: Params
  opt_state: Any
  proximal_average: Any = None
  reference: Params | None = None
