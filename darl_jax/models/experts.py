"""A mixture of SwiGLU experts: every token reaches all that it chose.

Tokens are sorted by expert and each group meets its expert's kernels in one
ragged matrix product: no expert has a capacity, and nothing is dropped.
Experts are dealt out along the mesh's tensor axis where it divides their
number, else each is cut along its width. Tokens never move: every device of
the tensor axis holds its rows' tokens anyway, computes what its experts add,
and one sum over the axis completes it. Where the kernels are also cut along
fsdp they are gathered for the layer, as all kernels are.

XLA's backend for CPUs has no ragged product and multiplies every token with
every expert: right, and slower by their number.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from darl_jax.kernels.partition import Partition, per_shard


def route(
  x: jax.Array,
  router: jax.Array,
  *,
  experts_per_token: int,
  normalize: bool,
  partition: Partition | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Chooses each token's experts, in float32 whatever the dtype of x.

  A choice that rounds differently in sampler and learner sends the token
  elsewhere: no other product of the model is as sensitive.

  Args:
    x: [B, T, D].
    router: [D, E].
    experts_per_token: k.
    normalize: Divide the chosen probabilities by their sum.
    partition: How rows are cut; None for whole arrays.

  Returns:
    float32 weights [B, T, k] and int32 experts [B, T, k], the likeliest first.
  """
  logits = jnp.einsum(
    "btd,de->bte",
    x.astype(jnp.float32),
    router.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )
  if partition is not None:
    logits = jax.lax.with_sharding_constraint(
      logits, NamedSharding(partition.mesh, partition.row_spec)
    )
  weights, chosen = jax.lax.top_k(
    jax.nn.softmax(logits, axis=-1), experts_per_token
  )
  if normalize:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return weights, chosen


def mix(
  x: jax.Array,
  weights: jax.Array,
  chosen: jax.Array,
  gate: jax.Array,
  up: jax.Array,
  down: jax.Array,
  *,
  partition: Partition | None = None,
) -> jax.Array:
  """The weighted sum of what each token's experts make of it.

  Args:
    x: [B, T, D].
    weights: float32 [B, T, k].
    chosen: int32 [B, T, k].
    gate: [E, D, F]; kernels are cast to x's dtype.
    up: [E, D, F].
    down: [E, F, D].
    partition: How rows and experts are cut; None for whole arrays.

  Returns:
    [B, T, D] in x's dtype, summed over experts and devices in float32.
    Gradients flow to everything but ``chosen``; the backward pass computes
    the experts' inner values again.
  """
  kernels = (kernel.astype(x.dtype) for kernel in (gate, up, down))
  return _mix(partition, x, weights, chosen, *kernels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(partition, x, weights, chosen, gate, up, down):
  return _forward(partition, x, weights, chosen, gate, up, down)[0]


def _forward(partition, *arrays):
  layout = _Layout(partition, num_experts=arrays[3].shape[0])

  def function(*parts):
    total = _add_up(*parts, first=layout.first_expert(parts[3]))
    return layout.sum_over_experts(total).astype(arrays[0].dtype)

  mixed = layout.per_shard(function, arrays=arrays, out_specs=layout.rows)
  return mixed, arrays


def _backward(partition, arrays, gradient):
  layout = _Layout(partition, num_experts=arrays[3].shape[0])

  def function(x, weights, chosen, gate, up, down, gradient):
    first = layout.first_expert(gate)
    _, pull_back = jax.vjp(
      lambda x, weights, *kernels: _add_up(
        x, weights, chosen, *kernels, first=first
      ),
      x,
      weights,
      gate,
      up,
      down,
    )
    d_x, d_weights, *d_kernels = pull_back(gradient.astype(jnp.float32))
    return (
      layout.sum_over_experts(d_x),
      layout.sum_over_experts(d_weights),
      *map(layout.sum_over_rows, d_kernels),
    )

  d_x, d_weights, *d_kernels = layout.per_shard(
    function,
    arrays=(*arrays, gradient),
    out_specs=(layout.rows, layout.rows, *layout.kernels),
  )
  # Whole numbers have no gradient.
  d_chosen = np.zeros(arrays[2].shape, jax.dtypes.float0)
  return d_x, d_weights, d_chosen, *d_kernels


_mix.defvjp(_forward, _backward)


class _Layout:
  """How the arguments of ``_mix`` lie on the mesh.

  Attributes:
    rows: Spec of x, weights and chosen.
    kernels: Specs of gate, up and down.
  """

  def __init__(self, partition: Partition | None, *, num_experts: int):
    self._partition = partition
    self.rows, self.kernels = Spec(), (Spec(),) * 3
    if partition is None:
      return
    tensor, parts = partition.tensor, partition.size(partition.tensor)
    self.rows = partition.row_spec
    self._dealt_out = num_experts % parts == 0
    self.kernels = (
      (Spec(tensor),) * 3
      if self._dealt_out
      else (Spec(None, None, tensor),) * 2 + (Spec(None, tensor),)
    )

  def per_shard(self, function: Callable, *, arrays, out_specs):
    rows = (self.rows,) * 3
    gradients = (self.rows,) * (len(arrays) - 6)
    return per_shard(
      function,
      self._partition,
      in_specs=(*rows, *self.kernels, *gradients),
      out_specs=out_specs,
    )(*arrays)

  def first_expert(self, gate: jax.Array) -> jax.Array | int:
    """The number of this device's first expert; ``gate`` is its own part."""
    if not self._axes((self._tensor,)) or not self._dealt_out:
      return 0
    return jax.lax.axis_index(self._tensor) * gate.shape[0]

  def sum_over_experts(self, x: jax.Array) -> jax.Array:
    return self._sum(x, (self._tensor,))

  def sum_over_rows(self, x: jax.Array) -> jax.Array:
    return self._sum(x, self._partition.rows if self._partition else ())

  @property
  def _tensor(self) -> str | None:
    return self._partition.tensor if self._partition else None

  def _axes(self, axes: tuple[str | None, ...]) -> tuple[str, ...]:
    """Those that cut something."""
    return tuple(
      axis for axis in axes if axis and self._partition.size(axis) > 1
    )

  def _sum(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    cut = self._axes(axes)
    return jax.lax.psum(x, cut) if cut else x


def _add_up(
  x: jax.Array,
  weights: jax.Array,
  chosen: jax.Array,
  gate: jax.Array,
  up: jax.Array,
  down: jax.Array,
  *,
  first: jax.Array | int,
) -> jax.Array:
  """What the experts from ``first`` on, whose kernels these are, add.

  Args:
    x: [B, T, D].
    weights: float32 [B, T, k].
    chosen: int32 [B, T, k], of all experts.
    gate: [E, D, F].
    up: [E, D, F].
    down: [E, F, D].
    first: Number of the first of these E experts.

  Returns:
    float32 [B, T, D].
  """
  num_experts, dim = gate.shape[:2]
  per_token = chosen.shape[-1]
  expert = chosen.reshape(-1) - first
  here = (expert >= 0) & (expert < num_experts)
  # What others compute is sorted behind the last group.
  expert = jnp.where(here, expert, num_experts)
  order = jnp.argsort(expert)
  ends = jnp.searchsorted(expert[order], jnp.arange(num_experts), side="right")
  sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
  real = here[order][:, None]

  def grouped(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    # Rows behind the last group are undefined; as zeros, so are gradients.
    return jnp.where(real, jax.lax.ragged_dot(rows, kernel, sizes), 0)

  rows = jnp.where(real, x.reshape(-1, dim)[order // per_token], 0)
  hidden = jax.nn.silu(grouped(rows, gate)) * grouped(rows, up)
  out = grouped(hidden, down).astype(jnp.float32)
  out = out * weights.reshape(-1)[order][:, None]
  in_place = out[jnp.argsort(order)].reshape(*chosen.shape, dim)
  return jnp.sum(in_place, axis=-2)
