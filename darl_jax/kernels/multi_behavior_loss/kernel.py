"""The multi-behavior policy loss as one pass over the batch, in Pallas.

Every input is read once; the loss, the sums over each version's tokens and,
where it is asked for, the gradient come out of that pass. All arithmetic is
float32 and by token, and the same for both kernels (``_by_token``).

Checked by compiling for TPUs and lowering for CUDA, and by running in interpret
mode on a CPU: neither kernel has run on an accelerator.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from darl_jax import numerics
from darl_jax.kernels.multi_behavior_loss import block_sizes, ref
from darl_jax.kernels.multi_behavior_loss.block_sizes import (
  LANES,
  NUM_SUMS,
  SUBLANES,
)

# In the place of a masked token's version. A real one is made larger.
_MASKED = -(2**31)


@dataclasses.dataclass(frozen=True)
class Settings:
  """The scalars of ``ref.multi_behavior_loss``, which explains them."""

  trust_region: Literal["behavior", "decoupled"]
  dual_clip: float
  max_behavior_weight: float
  behavior_weight_mode: Literal["truncate", "mask", "band"]


class Result(NamedTuple):
  """What one pass gives.

  Attributes:
    loss: float32 [].
    sums: Fields float32 [E].
    gradient: d loss / d logprobs, float32 [B, T]; None where not asked for.
  """

  loss: jax.Array
  sums: ref.BehaviorSums
  gradient: jax.Array | None


def tpu(
  *arrays: jax.Array,
  settings: Settings,
  differentiated: bool,
  block: block_sizes.TpuBlock = block_sizes.TPU,
  interpret: bool = False,
) -> Result:
  """The loss on a TPU, by a Mosaic kernel.

  A row of blocks is walked along T, its partial sums held in VMEM; rows of
  blocks are independent, so chips of two cores take half each.

  The mask crosses over as int8, for Mosaic widens a bool argument to int32,
  which would be a pass of 5 bytes a token. The conversion is fused into the
  kernel's own reads (``allow_input_fusion``), so there is no pass of it at all.

  Args:
    *arrays: As for ``ops.multi_behavior_loss``, E at most MAX_VERSIONS.
    settings: As there.
    differentiated: Whether to write the gradient.
    block: Largest block.
    interpret: For tests: run on a CPU.
  """
  by_token, tables = _inputs(arrays, settings)
  shape, (num_versions,) = by_token[0].shape, tables[0].shape
  rows, tokens = block.fit(shape)
  grid = (pl.cdiv(shape[0], rows), pl.cdiv(shape[1], tokens))
  spec = pl.BlockSpec((rows, tokens), lambda i, j: (i, j))
  in_smem = pl.BlockSpec(memory_space=pltpu.SMEM)
  partial_shape = (num_versions + 1, NUM_SUMS)
  out_specs = [pl.BlockSpec((1, *partial_shape), lambda i, j: (i, 0, 0))]
  out_shape = [jax.ShapeDtypeStruct((grid[0], *partial_shape), jnp.float32)]
  if differentiated:
    out_specs.append(spec)
    out_shape.append(jax.ShapeDtypeStruct(shape, jnp.float32))
  outputs = pl.pallas_call(
    functools.partial(
      _tpu_kernel,
      settings=settings,
      differentiated=differentiated,
      shape=shape,
    ),
    grid=grid,
    in_specs=[in_smem] * len(tables) + [spec] * len(by_token),
    out_specs=out_specs,
    out_shape=out_shape,
    scratch_shapes=[
      pltpu.VMEM(
        (*partial_shape, min(rows, SUBLANES), min(tokens, LANES)), jnp.float32
      ),
      pltpu.VMEM((rows, tokens), jnp.int32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      allow_input_fusion=[x.dtype == jnp.int8 for x in (*tables, *by_token)],
    ),
    cost_estimate=_cost(
      by_token, num_versions, block, settings, differentiated
    ),
    name="multi_behavior_loss",
    interpret=interpret,
  )(*tables, *by_token)
  totals = jnp.sum(outputs[0], axis=0)
  return Result(
    totals[num_versions, 0],
    ref.BehaviorSums(*totals[:num_versions].T),
    outputs[1] if differentiated else None,
  )


def _tpu_kernel(
  low_ref, high_ref, *refs, settings: Settings, differentiated: bool, shape
):
  """One block; ``refs``: by token, partial sums, gradient, then scratch.

  The scratch holds registers of partial sums [E + 1, NUM_SUMS, 8, 128], the
  loss in the last entry, and the version of each token.
  """
  *by_token, mask_ref, index_ref = refs[: -3 - differentiated]
  out_ref, *gradient_refs, sums_ref, version_ref = refs[-3 - differentiated :]
  (num_versions,) = low_ref.shape
  rows, tokens = index_ref.shape
  height, width = sums_ref.shape[-2:]
  row, column = pl.program_id(0), pl.program_id(1)

  @pl.when(column == 0)
  def _():
    sums_ref[...] = jnp.zeros_like(sums_ref)

  # The mask is read here, and in one piece: XLA can fuse its conversion only
  # into reads at fixed places.
  mask = mask_ref[...].astype(jnp.int32) != 0
  for axis, first in ((0, row * rows), (1, column * tokens)):
    if shape[axis] % index_ref.shape[axis]:
      at = jax.lax.broadcasted_iota(jnp.int32, mask.shape, axis)
      mask &= at < shape[axis] - first
  version_ref[...] = jnp.where(
    mask, jnp.maximum(index_ref[...], _MASKED + 1), _MASKED
  )

  def fold(x: jax.Array) -> jax.Array:
    """[rows, width] -> [height, width]: no step across lanes or sublanes."""
    parts = [x[i : i + height] for i in range(0, rows, height)]
    return functools.reduce(jnp.add, parts)

  def by_version(body, init):
    return jax.lax.fori_loop(
      0, num_versions, body, init, unroll=num_versions <= SUBLANES
    )

  def chunk(i, _):
    at = (slice(None), pl.ds(pl.multiple_of(i * width, width), width))
    version = version_ref[at]
    nearest = _nearest(version, num_versions)

    def clip_distances():
      def select(v, distances):
        here = nearest == v
        return tuple(
          jnp.where(here, table_ref[v], distance)
          for table_ref, distance in zip(
            (low_ref, high_ref), distances, strict=True
          )
        )

      zeros = jnp.zeros(version.shape, jnp.float32)
      return by_version(select, (zeros, zeros))

    loss, gradient, values = _by_token(
      [token_ref[at] for token_ref in by_token],
      version != _MASKED,
      clip_distances,
      settings,
    )
    for gradient_ref in gradient_refs:
      gradient_ref[at] = gradient
    sums_ref[num_versions, 0] += fold(loss)

    def add(v, _):
      here = version == v
      for i, value in enumerate(values):
        sums_ref[v, i] += fold(jnp.where(here, value, 0.0))

    by_version(add, None)

  jax.lax.fori_loop(0, tokens // width, chunk, None)

  @pl.when(column == pl.num_programs(1) - 1)
  def _():
    out_ref[0] = jnp.sum(sums_ref[...], axis=(-2, -1))


def cuda(
  *arrays: jax.Array,
  settings: Settings,
  differentiated: bool,
  block: block_sizes.CudaBlock = block_sizes.CUDA,
  interpret: bool = False,
) -> Result:
  """The loss on an NVIDIA GPU, by a Triton kernel.

  Triton and not Mosaic GPU, whose strength is asynchronous copies and tensor
  cores: this is arithmetic on values that are read once, and Triton runs on
  GPUs before Hopper too.

  Each block of the rows laid end to end writes its own partial sums. The mask
  crosses over as int8, by a pass of 2 bytes a token where XLA does not fuse
  that into what makes the mask.

  Args: As for ``tpu``, with any E.
  """
  by_token, tables = _inputs(arrays, settings)
  shape, (num_versions,) = by_token[0].shape, tables[0].shape
  size = by_token[0].size
  blocks = pl.cdiv(size, block.tokens)
  groups = pl.cdiv(num_versions, SUBLANES)
  spec = pl.BlockSpec((block.tokens,), lambda i: (i,))
  table_spec = pl.BlockSpec((num_versions,), lambda i: (0,))
  sums_shape = (NUM_SUMS, groups * SUBLANES)
  out_specs = [
    pl.BlockSpec((1,), lambda i: (i,)),
    pl.BlockSpec((1, *sums_shape), lambda i: (i, 0, 0)),
  ]
  out_shape = [
    jax.ShapeDtypeStruct((blocks,), jnp.float32),
    jax.ShapeDtypeStruct((blocks, *sums_shape), jnp.float32),
  ]
  if differentiated:
    out_specs.append(spec)
    out_shape.append(jax.ShapeDtypeStruct((size,), jnp.float32))
  loss, sums, *gradient = pl.pallas_call(
    functools.partial(_cuda_kernel, settings=settings, size=size),
    grid=(blocks,),
    in_specs=[table_spec] * len(tables) + [spec] * len(by_token),
    out_specs=out_specs,
    out_shape=out_shape,
    compiler_params=plgpu.CompilerParams(num_warps=block.warps, num_stages=1),
    cost_estimate=_cost(
      by_token, num_versions, block, settings, differentiated
    ),
    name="multi_behavior_loss",
    interpret=interpret,
  )(*tables, *(x.reshape(size) for x in by_token))
  return Result(
    jnp.sum(loss),
    ref.BehaviorSums(*jnp.sum(sums, axis=0)[:, :num_versions]),
    gradient[0].reshape(shape) if differentiated else None,
  )


def _cuda_kernel(low_ref, high_ref, *refs, settings: Settings, size: int):
  """One block of tokens; ``refs``: by token, loss, sums, perhaps gradient."""
  num_by_token = 7 if settings.trust_region == "decoupled" else 6
  by_token, outputs = refs[:num_by_token], refs[num_by_token:]
  loss_ref, sums_ref, *gradient_refs = outputs
  (tokens,), (num_versions,) = by_token[0].shape, low_ref.shape
  first = pl.program_id(0) * tokens
  inside = jnp.arange(tokens) < size - first

  *floats, mask, index = (
    plgpu.load(token_ref, mask=inside, other=0) for token_ref in by_token
  )
  mask = mask != 0
  nearest = jnp.where(mask, _nearest(index, num_versions), 0)

  def clip_distances():
    return tuple(
      plgpu.load(table_ref.at[nearest]) for table_ref in (low_ref, high_ref)
    )

  loss, gradient, values = _by_token(floats, mask, clip_distances, settings)
  loss_ref[0] = jnp.sum(loss)
  for gradient_ref in gradient_refs:
    plgpu.store(gradient_ref, gradient, mask=inside)
  version = jnp.where(mask, index, _MASKED)

  def group(g, _):
    versions = g * SUBLANES + jnp.arange(SUBLANES)
    here = version[None, :] == versions[:, None]
    at = pl.ds(g * SUBLANES, SUBLANES)
    for i, value in enumerate(values):
      sums_ref[0, i, at] = jnp.sum(jnp.where(here, value[None, :], 0.0), axis=1)

  jax.lax.fori_loop(0, sums_ref.shape[-1] // SUBLANES, group, None)


def _inputs(
  arrays: tuple[jax.Array, ...], settings: Settings
) -> tuple[list[jax.Array], list[jax.Array]]:
  """What the kernels read, by token and by version, in dtypes they can read."""
  *floats, mask, index, low, high = arrays
  if settings.trust_region == "behavior":
    del floats[2]  # The proximal log-probs: not read, so not fetched.
  floats = [
    x if x.dtype in (jnp.float32, jnp.bfloat16) else x.astype(jnp.float32)
    for x in floats
  ]
  tables = [x.astype(jnp.float32) for x in (low, high)]
  return [*floats, mask.astype(jnp.int8), index.astype(jnp.int32)], tables


def _nearest(version: jax.Array, num_versions: int) -> jax.Array:
  """The entry that ``table[version]`` reads: from the end if negative."""
  version = jnp.where(version < 0, version + num_versions, version)
  return jnp.minimum(jnp.maximum(version, 0), num_versions - 1)


def _by_token(
  floats: list[jax.Array],
  mask: jax.Array,
  clip_distances: Callable[[], tuple[jax.Array, jax.Array]],
  settings: Settings,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
  """The arithmetic of ``ref.multi_behavior_loss`` on a block of any shape.

  Args:
    floats: log-probs of pi, of mu and, if decoupled, of prox; advantages; token
      weights.
    mask: bool.
    clip_distances: () -> lo and hi of each token's version.
    settings: What the reference takes.

  Returns:
    Per token: the loss, its derivative, and the fields of ``BehaviorSums``, in
    float32. The first two are 0 where masked; the fields are not.
  """
  floats = [jnp.where(mask, x.astype(jnp.float32), 0.0) for x in floats]
  logprobs, behavior_logprobs, *proximal, advantages, weights = floats
  limit = numerics.MAX_LOG_RATIO

  def clamp(ell: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.maximum(ell, -limit), limit)

  ell = logprobs - behavior_logprobs
  behavior_ell = clamp(ell)
  behavior_ratio = ratio = jnp.exp(behavior_ell)
  capped = jnp.zeros(mask.shape, bool)
  if proximal:
    ell = logprobs - proximal[0]
    ratio = jnp.exp(clamp(ell))
    weight = jnp.exp(clamp(proximal[0] - behavior_logprobs))
    capped = weight > settings.max_behavior_weight
    if settings.behavior_weight_mode == "band":
      capped |= weight < 1.0 / settings.max_behavior_weight
    truncate = settings.behavior_weight_mode == "truncate"
    above = settings.max_behavior_weight if truncate else 0.0
    weights *= jnp.where(capped, above, weight)

  low, high = clip_distances()
  negative = advantages < 0
  lower = jnp.where(negative, 1.0 - low, 0.0)
  upper = jnp.where(negative, settings.dual_clip, 1.0 + high)
  too_low, too_high = ratio < lower, ratio > upper
  bounded = jnp.where(too_high, upper, jnp.where(too_low, lower, ratio))
  scale = -weights * advantages
  counts = weights != 0
  # Exactly on the clamp, half: the derivative that autodiff gives it.
  size = jnp.abs(ell)
  slope = jnp.where(size > limit, 0.0, jnp.where(size < limit, 1.0, 0.5))
  gradient = jnp.where(too_low | too_high, 0.0, scale * ratio * slope)
  values = ref.BehaviorSums(
    tokens=jnp.ones(mask.shape, bool),
    clipped_low=counts & too_low,
    clipped_high=counts & too_high & (advantages > 0),
    clipped_dual=counts & too_high & negative,
    ratio=behavior_ratio,
    ratio_squared=behavior_ratio * behavior_ratio,
    kl=ref.k3(behavior_ell, behavior_ratio),
    weight_capped=capped,
  )
  return (
    scale * bounded,
    gradient,
    tuple(
      jnp.where(x, 1.0, 0.0) if x.dtype == bool else x
      for x in jax.tree.leaves(values)
    ),
  )


def _cost(
  by_token: list[jax.Array],
  num_versions: int,
  block: block_sizes.TpuBlock | block_sizes.CudaBlock,
  settings: Settings,
  differentiated: bool,
) -> pl.CostEstimate:
  """What XLA's scheduler and cost analysis are told about a call."""
  logprobs = by_token[0]
  decoupled = settings.trust_region == "decoupled"
  # By token some 50 operations, and for each version a comparison, two bounds,
  # and a selection and an addition for each sum.
  operations = 50 + (3 + 2 * NUM_SUMS) * num_versions
  return pl.CostEstimate(
    flops=operations * logprobs.size,
    transcendentals=(3 if decoupled else 1) * logprobs.size,
    bytes_accessed=block_sizes.traffic_bytes(
      logprobs.shape,
      block=block,
      direction="forward" if differentiated else "primal",
      trust_region=settings.trust_region,
      num_versions=num_versions,
      logprobs_bytes=logprobs.dtype.itemsize,
    ),
  )
