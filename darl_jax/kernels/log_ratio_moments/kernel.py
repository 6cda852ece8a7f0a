"""Moments of the log-ratio of each trajectory: one pass over the data.

A block of tokens belongs to few trajectories, so the kernels find the lowest
and the highest segment id in it and walk over that range: for packed rows that
is a handful of masked sums, where a one-hot product with every one of the S
segments would take S of them. Any order of ids gives the same result, at most
S steps a block.

Each step finds the moments of one trajectory's tokens in the block and merges
them with those of earlier blocks (Chan, Golub and LeVeque, "Updating formulae
and a pairwise algorithm for computing sample variances", 1979):

  n = n_a + n_b,  delta = mean_b - mean_a,  mean = mean_a + delta n_b / n
  M2 = M2_a + M2_b + delta^2 n_a n_b / n

Means are kept relative to the first block's, the pivot, so that they are as
precise as the spread allows, however far from 0 the values are.

Compiled for v5e, v5p and v6e and lowered for CUDA, but run on no accelerator:
values are tested in interpret mode. By the static schedule of the compiler for
v5p, 8 rows of 4096 tokens take about 600 cycles and 440 more for each id of
their range, so that rows of a few long trajectories are within a factor of a
few of the time that reading them takes.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from darl_jax import numerics
from darl_jax.kernels.log_ratio_moments import block_sizes, ref
from darl_jax.kernels.log_ratio_moments.block_sizes import LANES, SUBLANES

_OUTPUTS = 7

# Of the cost estimate: operations on each token outside of the walk, and for
# each of the trajectories that a block's range of ids is assumed to hold.
_FLOPS_PER_TOKEN = 12
_FLOPS_PER_TOKEN_AND_SEGMENT = 12
_SEGMENTS_PER_BLOCK = 4


class _Sums(NamedTuple):
  """What is known of a trajectory after some of its blocks.

  Attributes:
    count: Tokens.
    pivot: Any value near theirs, nats; the first block's mean.
    mean: Their mean minus the pivot, nats.
    squares: Sum of squared deviations from the mean.
    harmful: Sum of ell^2 where A ell > 0.
    scaled: Sum of ell^2 / (H + 0.01).
    max_abs: Greatest |ell|.
  """

  count: jax.Array
  pivot: jax.Array
  mean: jax.Array
  squares: jax.Array
  harmful: jax.Array
  scaled: jax.Array
  max_abs: jax.Array


class _Terms(NamedTuple):
  """Per token.

  Attributes:
    ids: Segment id; 0 for a token that is not counted.
    ell: Log-ratio, nats.
    harmful: ell^2 where A ell > 0.
    scaled: ell^2 / (H + 0.01).
  """

  ids: jax.Array
  ell: jax.Array
  harmful: jax.Array
  scaled: jax.Array


def log_ratio_moments_tpu(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  behavior_entropy: jax.Array,
  advantages: jax.Array,
  loss_mask: jax.Array,
  segment_ids: jax.Array,
  *,
  num_segments: int,
  sizes: block_sizes.BlockSizes,
  interpret: bool = False,
) -> ref.LogRatioMoments:
  """Mosaic kernel of ``ref.log_ratio_moments``; S = num_segments.

  Mosaic has no arrays of booleans in memory: given the mask it would have it
  converted to int32 by an operation of its own, a second pass. Instead the mask
  is folded into the segment ids, and ``allow_input_fusion`` lets the compiler
  fuse that select into the kernel, which then reads the mask's bytes as they
  are. It does the same for what makes the other inputs (casts, pads, a scan's
  slices), so that those need no pass of their own either.

  Raises:
    ValueError: Mosaic would refuse the block sizes.
  """
  block_sizes.check_tpu(sizes)
  rows, tokens = logprobs.shape
  per_token = pl.BlockSpec((sizes.rows, sizes.tokens), _token_block)
  per_segment = pl.BlockSpec((sizes.rows, sizes.segments), _segment_block)
  token_bytes = _token_bytes(
    segment_ids, loss_mask, logprobs, behavior_logprobs, behavior_entropy,
    advantages,
  )  # fmt: skip
  outputs = pl.pallas_call(
    functools.partial(_tpu_kernel, shape=(rows, tokens)),
    grid=_grid(rows, tokens, num_segments, sizes),
    in_specs=[per_token] * 5,
    out_specs=[per_segment] * _OUTPUTS,
    out_shape=[jax.ShapeDtypeStruct((rows, num_segments), jnp.float32)]
    * _OUTPUTS,
    cost_estimate=_cost(
      rows * tokens,
      traffic_bytes(
        rows, tokens, num_segments, token_bytes=token_bytes, sizes=sizes
      ),
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"),
      allow_input_fusion=[True] * 5,
    ),
    interpret=interpret,
    name="log_ratio_moments",
  )(
    jnp.where(loss_mask, segment_ids, 0),
    logprobs,
    behavior_logprobs,
    behavior_entropy,
    advantages,
  )
  return ref.LogRatioMoments(*outputs)


def _tpu_kernel(ids, *refs, shape):
  """Accumulates in the outputs, whose block stays while the tokens' advance."""
  inputs, outputs = refs[:4], refs[4:]
  block_rows, block_tokens = ids.shape
  segments = outputs[0].shape[1]
  step = pl.program_id(2)
  # Ids of this block's segments become 1 .. segments; those above S, if any,
  # are counted where nothing is written from.
  base = pl.program_id(1) * segments

  @pl.when(step == 0)
  def _():
    for output in outputs:
      output[...] = jnp.zeros_like(output)

  for start in range(0, block_rows, SUBLANES):
    group = slice(start, start + SUBLANES)
    position = (SUBLANES, block_tokens)
    row = jax.lax.broadcasted_iota(jnp.int32, position, 0)
    row += pl.program_id(0) * block_rows + start
    token = jax.lax.broadcasted_iota(jnp.int32, position, 1)
    token += step * block_tokens
    # What lies outside of the arrays is anything at all.
    inside = (row < shape[0]) & (token < shape[1])
    here = jnp.where(inside, ids[group], 0) - base
    here = jnp.where((here >= 1) & (here <= segments), here, 0)
    terms = _terms(here, *(x[group] for x in inputs))

    def merge(segment, _, terms=terms, group=group):
      tile = pl.multiple_of(jax.lax.div(segment - 1, LANES) * LANES, LANES)
      window = (group, pl.ds(tile, LANES))
      lane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
      old = _Sums(*(output[window] for output in outputs))
      new = _merge(old, _sums(terms, segment), lane == segment - 1 - tile)
      for output, value in zip(outputs, new, strict=True):
        output[window] = value
      return 0

    jax.lax.fori_loop(*_range(here), merge, 0)

  @pl.when(step == pl.num_programs(2) - 1)
  def _():
    done = _moments(_Sums(*(output[...] for output in outputs)))
    for output, value in zip(outputs, done, strict=True):
      output[...] = value


def _range(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The lowest id above 0 and one more than the highest; empty for none."""
  return (
    jnp.min(jnp.where(ids > 0, ids, jnp.iinfo(jnp.int32).max)),
    jnp.max(ids) + 1,
  )


def _terms(ids, logprobs, behavior_logprobs, entropy, advantages) -> _Terms:
  """Every input is selected before it meets any arithmetic."""
  counted = ids > 0
  ell = numerics.log_ratio(logprobs, behavior_logprobs, counted)
  entropy = jnp.maximum(numerics.masked(entropy, counted), 0.0)
  advantages = numerics.masked(advantages, counted)
  squared = jnp.square(ell)
  # Signs, not a product: a small advantage times a small ell underflows.
  harm = ((advantages > 0) & (ell > 0)) | ((advantages < 0) & (ell < 0))
  return _Terms(
    ids=ids,
    ell=ell,
    harmful=jnp.where(harm, squared, 0.0),
    scaled=squared / (entropy + ref.ENTROPY_OFFSET),
  )


def _sums(terms: _Terms, segment: jax.Array) -> _Sums:
  """Of one segment's tokens in a block, along the last axis, which stays."""
  here = terms.ids == segment
  total = functools.partial(jnp.sum, axis=-1, keepdims=True)
  count = total(jnp.where(here, 1.0, 0.0))
  safe = jnp.maximum(count, 1.0)
  pivot = total(jnp.where(here, terms.ell, 0.0)) / safe
  centered = jnp.where(here, terms.ell - pivot, 0.0)
  mean = total(centered) / safe  # What rounding left of it.
  squares = total(jnp.square(centered)) - count * jnp.square(mean)
  return _Sums(
    count=count,
    pivot=pivot,
    mean=mean,
    squares=jnp.maximum(squares, 0.0),
    harmful=total(jnp.where(here, terms.harmful, 0.0)),
    scaled=total(jnp.where(here, terms.scaled, 0.0)),
    max_abs=jnp.max(
      jnp.where(here, jnp.abs(terms.ell), 0.0), axis=-1, keepdims=True
    ),
  )


def _merge(old: _Sums, new: _Sums, where: jax.Array) -> _Sums:
  """``old`` [..., S] with ``new`` [..., 1] added where ``where``."""
  count = old.count + new.count
  share = new.count / jnp.maximum(count, 1.0)
  pivot = jnp.where(old.count > 0, old.pivot, new.pivot)
  delta = (new.pivot - pivot) + new.mean - old.mean
  merged = _Sums(
    count=count,
    pivot=pivot,
    mean=old.mean + delta * share,
    squares=old.squares + new.squares + jnp.square(delta) * old.count * share,
    harmful=old.harmful + new.harmful,
    scaled=old.scaled + new.scaled,
    max_abs=jnp.maximum(old.max_abs, new.max_abs),
  )
  return _Sums(
    *(jnp.where(where, m, o) for m, o in zip(merged, old, strict=True))
  )


def _moments(sums: _Sums) -> tuple[jax.Array, ...]:
  """The fields of ``LogRatioMoments``, in its order; 0 for no tokens."""
  safe = jnp.maximum(sums.count, 1.0)
  mean = sums.pivot + sums.mean
  variance = sums.squares / safe
  return (
    sums.count,
    mean,
    variance,
    variance + jnp.square(mean),
    sums.harmful / safe,
    sums.scaled / safe,
    sums.max_abs,
  )


def traffic_bytes(
  rows: int,
  tokens: int,
  num_segments: int,
  *,
  token_bytes: int,
  sizes: block_sizes.BlockSizes,
) -> int:
  """Bytes that the TPU kernel moves between HBM and vector memory.

  Counted from the grid and the blocks: a block moves when its index changes,
  and moves whole, also where it lies partly outside of the array (an upper
  bound: the hardware leaves most of that out).

  Args:
    rows: B.
    tokens: T.
    num_segments: S.
    token_bytes: Of the six inputs together, for one token; 21 in float32.
    sizes: Of the blocks.
  """
  grid = _grid(rows, tokens, num_segments, sizes)
  total = 0
  for index_map, block_bytes in (
    (_token_block, sizes.rows * sizes.tokens * token_bytes),
    (_segment_block, sizes.rows * sizes.segments * 4 * _OUTPUTS),
  ):
    last = None
    for step in itertools.product(*map(range, grid)):
      index = index_map(*step)
      total += block_bytes * (index != last)
      last = index
  return total


def _grid(rows, tokens, num_segments, sizes) -> tuple[int, int, int]:
  """Blocks of rows, of segments, of tokens; the last changes fastest."""
  return (
    pl.cdiv(rows, sizes.rows),
    pl.cdiv(num_segments, sizes.segments),
    pl.cdiv(tokens, sizes.tokens),
  )


def _token_block(row, segment, token):
  """Block of an input at a step of the grid."""
  del segment
  return row, token


def _segment_block(row, segment, token):
  """Block of an output at a step of the grid."""
  del token
  return row, segment


def _token_bytes(*inputs: jax.Array) -> int:
  return sum(x.dtype.itemsize for x in inputs)


def _cost(tokens: int, bytes_accessed: int) -> pl.CostEstimate:
  walk = _SEGMENTS_PER_BLOCK * _FLOPS_PER_TOKEN_AND_SEGMENT
  return pl.CostEstimate(
    flops=tokens * (_FLOPS_PER_TOKEN + walk),
    bytes_accessed=bytes_accessed,
    transcendentals=0,
  )


def log_ratio_moments_cuda(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  behavior_entropy: jax.Array,
  advantages: jax.Array,
  loss_mask: jax.Array,
  segment_ids: jax.Array,
  *,
  num_segments: int,
  sizes: block_sizes.BlockSizes,
  interpret: bool = False,
) -> ref.LogRatioMoments:
  """Triton kernel of ``ref.log_ratio_moments``; S = num_segments.

  A program walks along one row and keeps the sums of ``sizes.segments`` of its
  trajectories in registers. Triton rather than Mosaic GPU: the work is masked
  sums with bounds that depend on the data, nothing that asks for asynchronous
  copies or tensor cores, and Triton runs on every generation since Volta.
  Lowered only.

  Raises:
    ValueError: Triton would refuse the block sizes.
  """
  block_sizes.check_cuda(sizes)
  rows, tokens = logprobs.shape
  per_token = pl.BlockSpec((None, tokens), lambda row, segment: (row, 0))
  per_segment = pl.BlockSpec(
    (None, num_segments), lambda row, segment: (row, 0)
  )
  blocks = pl.cdiv(num_segments, sizes.segments)
  # Only the tokens of a program's own trajectories are loaded in full.
  token_bytes = blocks * _token_bytes(segment_ids, loss_mask) + _token_bytes(
    logprobs, behavior_logprobs, behavior_entropy, advantages
  )
  outputs = pl.pallas_call(
    functools.partial(
      _cuda_kernel, tokens=tokens, num_segments=num_segments, sizes=sizes
    ),
    grid=(rows, blocks),
    in_specs=[per_token] * 6,
    out_specs=[per_segment] * _OUTPUTS,
    out_shape=[jax.ShapeDtypeStruct((rows, num_segments), jnp.float32)]
    * _OUTPUTS,
    cost_estimate=_cost(
      rows * tokens, rows * (tokens * token_bytes + num_segments * 4 * _OUTPUTS)
    ),
    compiler_params=plgpu.CompilerParams(num_warps=4),
    interpret=interpret,
    name="log_ratio_moments",
  )(
    segment_ids,
    loss_mask,
    logprobs,
    behavior_logprobs,
    behavior_entropy,
    advantages,
  )
  return ref.LogRatioMoments(*outputs)


def _cuda_kernel(ids, mask, *refs, tokens, num_segments, sizes):
  """Nothing is loaded or stored outside of the arrays."""
  inputs, outputs = refs[:4], refs[4:]
  base = pl.program_id(1) * sizes.segments
  lane = jnp.arange(sizes.segments, dtype=jnp.int32)

  def block(step, old):
    window = pl.ds(step * sizes.tokens, sizes.tokens)
    position = jnp.arange(sizes.tokens, dtype=jnp.int32) + step * sizes.tokens
    inside = position < tokens
    counted = plgpu.load(mask.at[window], mask=inside, other=False)
    here = plgpu.load(ids.at[window], mask=inside, other=0)
    here = jnp.where(counted, here, 0) - base
    here = jnp.where((here >= 1) & (here <= sizes.segments), here, 0)
    terms = _terms(
      here,
      *(plgpu.load(x.at[window], mask=here > 0, other=0.0) for x in inputs),
    )

    def merge(segment, old):
      return _merge(old, _sums(terms, segment), lane == segment - 1)

    return jax.lax.fori_loop(*_range(here), merge, old)

  zeros = _Sums(*[jnp.zeros(sizes.segments, jnp.float32)] * len(_Sums._fields))
  done = _moments(
    jax.lax.fori_loop(0, pl.cdiv(tokens, sizes.tokens), block, zeros)
  )
  for output, value in zip(outputs, done, strict=True):
    plgpu.store(
      output.at[pl.ds(base, sizes.segments)],
      value,
      mask=base + lane < num_segments,
    )
