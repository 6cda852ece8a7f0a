"""One token per row from logits: truncation, draw, and what to record of it."""

import dataclasses
import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from darl_jax.config import Truncation, value_problems

# Tokens in a block. The lanes of a TPU's vector; published vocabularies are
# padded to its multiples, and the blocks are then the logits, reshaped.
_BLOCK = 128
# Shares of a draw are counted in units of 2^-30 of the whole: the finest that
# an int32 sums with room for rounding.
_UNITS = 2.0**30
# Of float32 infinity.
_INFINITY_BITS = 0x7F800000
# Among how many of the most likely tokens a nucleus is looked for first. On a
# CPU to take them costs a sixth of a search among all of them; four times as
# many, half.
_CANDIDATES = 256


# The config's fields that mean the same; greedy answers are for evaluation.
_FIELDS = dict(
  temperature="evaluate.temperature",
  top_k="rollout.top_k",
  top_p="rollout.top_p",
  min_p="rollout.min_p",
)


@dataclasses.dataclass(frozen=True)
class Sampling(Truncation):
  """How tokens are drawn; hashable, so static under jit.

  Truncations apply in this order, each to the distribution that the one before
  left, as in transformers. Tokens that tie with the last one kept are kept
  (equal tempered logits, as float32), and the most likely token always is.

  Attributes:
    temperature: Divides the logits; 0 takes the most likely token.
    top_k: Keeps the k most likely tokens; 0 keeps all.
    top_p: Keeps a token if those more likely than it hold less than this share
      of the probability; 1 keeps all.
    min_p: Keeps a token whose probability is at least this share of the most
      likely token's; 0 keeps all.

  Raises:
    ValueError: A field is out of range, or temperature 0 is truncated: it has
      nothing to truncate, and records log-probs of all tokens.
  """

  temperature: float
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0

  def __post_init__(self):
    problems = [
      problem
      for name, field in _FIELDS.items()
      for problem in value_problems(name, getattr(self, name), field=field)
    ]
    if not problems and self.temperature == 0 and self.truncates:
      problems.append(
        f"temperature = 0 (greedy) with top_k = {self.top_k}, top_p = "
        f"{self.top_p}, min_p = {self.min_p}: greedy decoding has nothing to "
        "truncate. Set top_k = 0, top_p = 1, min_p = 0, or a temperature above "
        "0."
      )
    if problems:
      raise ValueError("\n".join(problems))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
  """One token per row, and the distribution that it was drawn from.

  Attributes:
    tokens: int32 [B].
    logprobs: float32 [B], nats, tempered, truncated and renormalized. At
      temperature 0, of the distribution of all tokens at temperature 1.
    entropy: float32 [B], nats, never negative, of the same distribution.
    support: uint8 [B, ceil(V / 8)], little-endian bits of the tokens that
      truncation left, as ``kernels.token_logprob`` takes them; None where
      ``Sampling.truncates`` is false. A logit of -inf is never among them.
  """

  tokens: jax.Array
  logprobs: jax.Array
  entropy: jax.Array
  support: jax.Array | None


def token_uniforms(keys: jax.Array, counts: jax.Array) -> jax.Array:
  """One uniform number per row, of nothing but its request and position.

  Args:
    keys: uint32 [B, key words], data of a PRNG key per request.
    counts: int32 [B], tokens that each request has sampled so far.

  Returns:
    float32 [B], in (0, 1): the midpoints of 2^23 equal intervals, which are
    exact in float32. 0 and 1 are left out: at 0, the first token would be drawn
    2^-23 of the time, however unlikely.
  """

  def bits(key: jax.Array, count: jax.Array) -> jax.Array:
    return jax.random.bits(jax.random.fold_in(key, count), dtype=jnp.uint32)

  drawn = jax.vmap(bits)(jax.random.wrap_key_data(keys), counts)
  return ((drawn >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


def sample(
  logits: jax.Array,
  uniforms: jax.Array,
  *,
  sampling: Sampling,
  vocab_first: bool = False,
) -> Sampled:
  """Draws one token per row by inverting the cumulative probability.

    z      = (logits - max logits) / temperature, over the tokens kept
    token  = the first at which the cumulative softmax(z) exceeds the uniform
    logp   = z[token] - logsumexp(z)
    H      = logsumexp(z) - sum_v softmax(z)_v z_v

  One uniform number per row instead of a Gumbel variable per token, and no
  cumulative sum over V: the sums of blocks tell the block, and the chosen
  block's own entries the token. Source: inverse transform sampling; method 0.

  A row's results depend on its own logits and uniform alone. A token that is
  excluded, beyond V or of probability 0 is never drawn, whatever the uniform.

  Args:
    logits: float32 [B, V], or [V, B]; -inf excludes a token.
    uniforms: float32 [B], in [0, 1); others are clamped. Unused at
      temperature 0, where the lowest of tied tokens is taken.
    sampling: Temperature and truncation.
    vocab_first: Whether the logits are [V, B].

  Returns:
    See ``Sampled``. A row that has a NaN or +inf, or nothing but -inf, defines
    no distribution: its token is 0, its log-prob and entropy are NaN, and its
    support is empty.

  Raises:
    AssertionError: Shapes or dtypes do not fit.
  """
  chex.assert_rank(logits, 2)
  chex.assert_type([logits, uniforms], jnp.float32)
  if vocab_first and sampling.truncates:
    logits, vocab_first = logits.T, False
  rows = 1 if vocab_first else 0
  chex.assert_shape(uniforms, logits.shape[rows : rows + 1])
  peak = jnp.max(logits, axis=1 - rows)
  defined = jnp.isfinite(peak)
  # Shifted first: then neither large logits nor a small temperature overflow.
  shifted = logits - jnp.expand_dims(peak, 1 - rows)
  tempered = shifted / (sampling.temperature or 1.0)
  support = None
  if sampling.truncates:
    kept = _kept(tempered, sampling) & defined[:, None]
    support = jnp.packbits(kept, axis=-1, bitorder="little")
    tempered = jnp.where(kept, tempered, -jnp.inf)
  blocks = _in_blocks(tempered, rows)
  masses = jnp.exp(blocks)
  # -inf is replaced before its product with 0, which would be NaN.
  moments = jnp.where(masses > 0, masses * blocks, 0.0)
  # The barrier: XLA would make of a sum of sums another sum of all.
  block_masses, block_moments = jax.lax.optimization_barrier(
    tuple(_by_block(x, jnp.sum, rows) for x in (masses, moments))
  )
  total = jnp.sum(block_masses, axis=-1)
  log_total = jnp.log(total)
  mean = jnp.sum(block_moments, axis=-1) / total

  if sampling.temperature == 0:
    peaks = _by_block(_in_blocks(logits, rows), jnp.max, rows)
    block = jnp.argmax(peaks, axis=-1)
    chosen = _chosen(blocks, block, rows)
    entry = jnp.argmax(chosen, axis=-1)
  else:
    block, within = _draw(block_masses, uniforms)
    chosen = _chosen(blocks, block, rows)
    entry, _ = _draw(jnp.exp(chosen), within)
  tokens = (block * _BLOCK + entry).astype(jnp.int32)
  logprobs = _row_entries(chosen, entry) - log_total
  return Sampled(
    tokens=jnp.where(defined, tokens, 0),
    logprobs=jnp.where(defined, logprobs, jnp.nan),
    # Rounding can take the entropy of a certain token a hair below 0.
    entropy=jnp.where(defined, jnp.maximum(log_total - mean, 0.0), jnp.nan),
    support=support,
  )


def _in_blocks(x: jax.Array, rows: int) -> jax.Array:
  """[B, V] to [B, blocks, block], -inf beyond V.

  Where ``rows`` is 1, [V, B] to [blocks, block, B].
  """
  missing = -x.shape[1 - rows] % _BLOCK
  if missing:
    padding = [(0, missing), (0, missing)]
    padding[rows] = (0, 0)
    x = jnp.pad(x, padding, constant_values=-jnp.inf)
  if rows:
    return x.reshape(-1, _BLOCK, x.shape[1])
  return x.reshape(x.shape[0], -1, _BLOCK)


def _by_block(
  blocks: jax.Array, reduce: Callable[..., jax.Array], rows: int
) -> jax.Array:
  """``reduce`` of each block: [B, blocks]."""
  return reduce(blocks, axis=1).T if rows else reduce(blocks, axis=2)


def _chosen(blocks: jax.Array, index: jax.Array, rows: int) -> jax.Array:
  """The block that each row has chosen: [B, block]."""
  if not rows:
    return _row_entries(blocks, index)
  each = jnp.take_along_axis(blocks, index[None, None], axis=0, mode="clip")
  return each[0].T


def _row_entries(x: jax.Array, index: jax.Array) -> jax.Array:
  """``x[b, index[b]]`` for each row b: [B, ...] of [B, N, ...]."""
  index = index.reshape(-1, *[1] * (x.ndim - 1))
  return jnp.take_along_axis(x, index, axis=1, mode="clip")[:, 0]


def _draw(
  masses: jax.Array, fractions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Where a fraction of the cumulative mass falls.

  In integers, whose sums are exact in any order: with rounded sums, an entry of
  mass 0 could appear to raise the cumulative mass.

  Args:
    masses: float32 [B, N], at least 0, one of a row above 0.
    fractions: float32 [B], in [0, 1).

  Returns:
    index: int32 [B], of the entry; its mass is above 0.
    within: float32 [B], in [0, 1], the part of its mass that lies below.
  """
  total = jnp.sum(masses, axis=-1, keepdims=True)
  shares = jnp.round(masses / total * _UNITS).astype(jnp.int32)
  upper = jnp.cumsum(shares, axis=-1)
  end = upper[:, -1]
  target = (fractions * end.astype(jnp.float32)).astype(jnp.int32)
  target = jnp.clip(target, 0, end - 1)
  index = jnp.sum(upper <= target[:, None], axis=-1, dtype=jnp.int32)
  share = _row_entries(shares, index)
  below = target - (_row_entries(upper, index) - share)
  within = (below.astype(jnp.float32) + 0.5) / share.astype(jnp.float32)
  return index, within


def _kept(tempered: jax.Array, sampling: Sampling) -> jax.Array:
  """Which tokens truncation leaves, bool [B, V].

  Every truncation keeps the tokens down to some value, so the ties too.

  Args:
    tempered: float32 [B, V], 0 for the most likely token.
    sampling: What to keep.
  """
  lowest = jnp.full(tempered.shape[0], -jnp.inf)
  likeliest = None
  if sampling.top_k > 0:
    likeliest = _likeliest(tempered, sampling.top_k)
    # Not the last column: XLA makes a sort of a top_k that is sliced.
    lowest = jnp.min(likeliest, axis=-1)
  if sampling.top_p < 1:
    left = jnp.where(tempered >= lowest[:, None], jnp.exp(tempered), 0.0)
    bound = sampling.top_p * jnp.sum(left, axis=-1)
    if likeliest is None:
      lowest = _lowest_of_nucleus(tempered, bound)
    else:
      # What is above any token that top-k left is among its k tokens.
      lowest = jnp.maximum(lowest, _lowest_above_bound(likeliest, bound))
  if sampling.min_p > 0:
    lowest = jnp.maximum(lowest, math.log(sampling.min_p))
  return (tempered >= lowest[:, None]) & (tempered > -jnp.inf)


def _likeliest(tempered: jax.Array, count: int) -> jax.Array:
  """The largest values of each row, [B, count], or all if there are fewer."""
  return jax.lax.top_k(tempered, min(count, tempered.shape[1]))[0]


def _lowest_of_nucleus(tempered: jax.Array, bound: jax.Array) -> jax.Array:
  """As ``_lowest_above_bound``; cheaper where few tokens hold the bound."""
  candidates = _likeliest(tempered, _CANDIDATES)
  among_candidates = _lowest_above_bound(candidates, bound)
  found = jnp.sum(jnp.exp(candidates), axis=-1) >= bound
  among_all = jax.lax.cond(
    jnp.all(found),
    lambda: among_candidates,
    lambda: _lowest_above_bound(tempered, bound),
  )
  # A row that needs no search of all does not take its result either: sums of
  # other terms round otherwise, and a row must not depend on other rows.
  return jnp.where(found, among_candidates, among_all)


def _lowest_above_bound(tempered: jax.Array, bound: jax.Array) -> jax.Array:
  """The lowest value such that the mass above it is less than the bound.

  By bisection on the bits of -value, which are ordered as float32 are: exact,
  and 31 sums whatever the bound. A sort costs several times that on CPUs.

  Args:
    tempered: float32 [B, N], at most 0; the mass of each is its exponential.
    bound: float32 [B], above 0.

  Returns:
    float32 [B]; -inf where all the mass is less than the bound.
  """
  masses = jnp.exp(tempered)

  def halve(_, interval: tuple[jax.Array, jax.Array]):
    inside, outside = interval
    middle = inside + (outside - inside) // 2
    above = tempered > _negative(middle)[:, None]
    mass = jnp.sum(jnp.where(above, masses, 0.0), axis=-1)
    is_inside = mass < bound
    return (
      jnp.where(is_inside, middle, inside),
      jnp.where(is_inside, outside, middle),
    )

  rows = tempered.shape[0]
  # Nothing is above 0. Infinity is tried; what is beyond it is not.
  interval = (
    jnp.zeros(rows, jnp.int32),
    jnp.full(rows, _INFINITY_BITS + 1, jnp.int32),
  )
  return _negative(jax.lax.fori_loop(0, 31, halve, interval)[0])


def _negative(bits: jax.Array) -> jax.Array:
  """int32 bits of a positive float32 to its negative."""
  return -jax.lax.bitcast_convert_type(bits, jnp.float32)
