"""The multi-behavior policy loss: checks, its derivative, and dispatch."""

import dataclasses
import functools
import math
import typing
from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from darl_jax.kernels.multi_behavior_loss import block_sizes, kernel, ref
from darl_jax.kernels.partition import Partition, per_shard

BehaviorSums = ref.BehaviorSums
TrustRegion = Literal["behavior", "decoupled"]
BehaviorWeightMode = Literal["truncate", "mask", "band"]


def multi_behavior_loss(
  logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  proximal_logprobs: jax.Array,
  advantages: jax.Array,
  token_weights: jax.Array,
  loss_mask: jax.Array,
  behavior_index: jax.Array,
  clip_low: jax.Array,
  clip_high: jax.Array,
  *,
  trust_region: TrustRegion,
  dual_clip: float,
  max_behavior_weight: float,
  behavior_weight_mode: BehaviorWeightMode,
  partition: Partition | None = None,
) -> tuple[jax.Array, BehaviorSums]:
  """-sum c m w term over the batch; see ``ref.multi_behavior_loss``.

  On TPUs (up to ``block_sizes.MAX_VERSIONS`` versions) and NVIDIA GPUs a Pallas
  kernel reads each input once and, under differentiation, writes the gradient
  in the same pass; elsewhere it is the definition and its derivative by
  autodiff. Differentiable once, in reverse mode. The kernels have been compiled
  for TPUs and lowered for CUDA, and never run on either.

  Args:
    logprobs: float [B, T], nats, of the policy being trained; the only argument
      that gradients flow to.
    behavior_logprobs: float [B, T], nats, of the policy that sampled the token.
    proximal_logprobs: float [B, T], nats, of the policy at the start of the
      step.
    advantages: float [B, T], each trajectory's advantage on its tokens.
    token_weights: float [B, T], alpha_v / N_v.
    loss_mask: bool [B, T].
    behavior_index: int [B, T], entry of the version table, in [0, E).
    clip_low: float [E], lower clip distance of each version.
    clip_high: float [E], upper clip distance of each version.
    trust_region: Centre of the clip.
    dual_clip: Above 1; inf for none.
    max_behavior_weight: At least 1; inf for none.
    behavior_weight_mode: What happens above that cap, or outside its band.
    partition: How rows lie on the mesh: what is [B, T] is cut along
      ``partition.rows``, and what is [E] is whole on every device.

  Returns:
    (loss, sums): float32 [], and float32 [E] sums over each version's tokens;
    over all rows, and whole on every device.

  Raises:
    AssertionError: Shapes or dtypes do not fit.
    ValueError: A setting is out of its range, or the rows do not split over
      the devices.
  """
  for name, value, kind in (
    ("trust_region", trust_region, TrustRegion),
    ("behavior_weight_mode", behavior_weight_mode, BehaviorWeightMode),
  ):
    if value not in typing.get_args(kind):
      options = ", ".join(typing.get_args(kind))
      raise ValueError(f"{name} = {value!r} is not one of {options}.")
  if not dual_clip > 1:
    raise ValueError(f"dual_clip = {dual_clip} must be above 1.")
  if not max_behavior_weight >= 1:
    raise ValueError(
      f"max_behavior_weight = {max_behavior_weight} must be at least 1."
    )
  floats = (
    logprobs,
    behavior_logprobs,
    proximal_logprobs,
    advantages,
    token_weights,
  )
  chex.assert_rank(logprobs, 2)
  chex.assert_equal_shape([*floats, loss_mask, behavior_index])
  chex.assert_rank(clip_low, 1)
  chex.assert_equal_shape([clip_low, clip_high])
  chex.assert_type([*floats, clip_low, clip_high], jnp.floating)
  chex.assert_type(loss_mask, bool)
  chex.assert_type(behavior_index, jnp.integer)
  return _loss(
    _Static(
      kernel.Settings(
        trust_region, dual_clip, max_behavior_weight, behavior_weight_mode
      ),
      partition,
      logprobs.dtype,
    ),
    *floats,
    loss_mask,
    behavior_index,
    clip_low,
    clip_high,
  )


@dataclasses.dataclass(frozen=True)
class _Static:
  """What is known when a program is traced."""

  settings: kernel.Settings
  partition: Partition | None
  dtype: jnp.dtype  # Of the policy's log-probs, and so of their gradient.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static: _Static, *arrays: jax.Array):
  loss, sums, _ = _sharded(static, arrays, differentiated=False)
  return loss, sums


def _loss_forward(static: _Static, *arrays: jax.Array):
  loss, sums, gradient = _sharded(static, arrays, differentiated=True)
  return (loss, sums), gradient


def _loss_backward(static: _Static, gradient: jax.Array, cotangents):
  # No kernel: XLA fuses a product with what follows it, and drops one with a
  # constant 1. A kernel would always write it out. The sums have no gradient.
  gradient = (cotangents[0] * gradient).astype(static.dtype)
  return gradient, *(None,) * 8


_loss.defvjp(_loss_forward, _loss_backward)


def _sharded(
  static: _Static, arrays: tuple[jax.Array, ...], *, differentiated: bool
) -> kernel.Result:
  """One pass on each device's rows, and the sums over devices."""
  partition = static.partition
  axes = ()
  if partition is not None:
    axes = tuple(a for a in partition.rows if partition.size(a) > 1)
    parts = math.prod(partition.size(a) for a in axes)
    rows = arrays[0].shape[0]
    if rows % parts:
      raise ValueError(
        f"logprobs has {rows} rows, which do not split over the {parts} "
        f"devices of {', '.join(axes)}. Try {math.ceil(rows / parts) * parts}."
      )

  def local(*arrays: jax.Array) -> kernel.Result:
    loss, sums, gradient = _by_platform(
      arrays, settings=static.settings, differentiated=differentiated
    )
    if axes:
      loss, sums = jax.lax.psum((loss, sums), axes)
    return kernel.Result(loss, sums, gradient)

  whole = PartitionSpec()
  rows = whole if partition is None else partition.row_spec
  return per_shard(
    local,
    partition,
    in_specs=(rows,) * 7 + (whole,) * 2,
    out_specs=kernel.Result(whole, whole, rows if differentiated else None),
  )(*arrays)


def _by_platform(
  arrays: tuple[jax.Array, ...],
  *,
  settings: kernel.Settings,
  differentiated: bool,
) -> kernel.Result:
  """The kernel of the platform that the program is lowered for, or ``ref``."""
  static = dict(settings=settings, differentiated=differentiated)
  reference = functools.partial(_reference, **static)
  if arrays[0].size == 0:  # No kernel has a grid without a block.
    return reference(*arrays)
  few = arrays[-1].shape[0] <= block_sizes.MAX_VERSIONS
  return jax.lax.platform_dependent(
    *arrays,
    tpu=functools.partial(kernel.tpu, **static) if few else reference,
    cuda=functools.partial(kernel.cuda, **static),
    default=reference,
  )


def _reference(
  *arrays: jax.Array, settings: kernel.Settings, differentiated: bool
) -> kernel.Result:
  """The definition and, where asked for, its own derivative."""

  def loss(logprobs: jax.Array):
    return ref.multi_behavior_loss(
      logprobs, *arrays[1:], **dataclasses.asdict(settings)
    )

  logprobs = arrays[0].astype(jnp.float32)
  if not differentiated:
    return kernel.Result(*loss(logprobs), None)
  (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs)
  return kernel.Result(value, sums, gradient)
