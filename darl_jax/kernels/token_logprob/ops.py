"""Log-prob and entropy of the sampled token: checks, gradient, dispatch."""

import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from darl_jax.kernels.partition import Partition, per_shard
from darl_jax.kernels.token_logprob import block_sizes, kernel, ref, scan


def token_logprob(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  *,
  temperature: float,
  support_mask: jax.Array | None = None,
  partition: Partition | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Log-prob of each target, and entropy; see ``ref.token_logprob``.

  Where a device's logits are few (``block_sizes.SMALL_LOGITS_BYTES``) this is
  the definition. Otherwise no array of [tokens, V] is ever held: blocks of the
  vocabulary are scanned, in a kernel on TPUs, and once more for the gradient.

  The unembedding's gradient is accumulated in float32 and comes in the
  unembedding's dtype. Its products take operands of hidden's dtype; what that
  rounding takes from the target's and the likeliest token's share is added
  afterwards in float32, unless the unembedding is of hidden's dtype and its
  own rounding is as large.

  Args:
    hidden: float [..., D]; rows cut along ``partition.rows``.
    unembedding: float [V, D]; V cut along ``partition.tensor`` where that
      divides it, D along ``partition.fsdp``. Of hidden's dtype, or float32 and
      then cast to it block by block.
    targets: int [...], in [0, V).
    temperature: Divides the logits; above 0.
    support_mask: uint8 [..., ceil(V / 8)], ``np.packbits(mask,
      bitorder="little")`` of the tokens that the sampler could draw; None for
      all of them.
    partition: How the arrays lie on the mesh; None for whole arrays.

  Returns:
    (logprobs, entropy), each float32 [...], nats. The entropy carries no
    gradient.

  Raises:
    AssertionError: Shapes or dtypes do not fit.
    ValueError: The temperature is not above 0, or the partition does not
      divide the arrays.
  """
  if not temperature > 0:
    raise ValueError(f"temperature = {temperature} must be above 0.")
  chex.assert_rank(unembedding, 2)
  chex.assert_shape(targets, hidden.shape[:-1])
  chex.assert_axis_dimension(unembedding, 1, hidden.shape[-1])
  chex.assert_type([hidden, unembedding], jnp.floating)
  chex.assert_type(targets, jnp.integer)
  if unembedding.dtype not in (hidden.dtype, jnp.float32):
    raise AssertionError(
      f"unembedding is {unembedding.dtype} and hidden {hidden.dtype}: it must "
      "be of hidden's dtype or float32."
    )
  vocab = unembedding.shape[0]
  if support_mask is not None:
    chex.assert_type(support_mask, jnp.uint8)
    chex.assert_shape(support_mask, (*targets.shape, -(-vocab // 8)))
  cut = _Cut.of(partition, hidden.shape, unembedding.shape)
  if cut.logits_bytes <= block_sizes.SMALL_LOGITS_BYTES:
    return ref.token_logprob(
      hidden,
      unembedding,
      targets,
      temperature=temperature,
      support_mask=support_mask,
    )
  return blocked(
    hidden,
    unembedding,
    targets,
    support_mask,
    temperature,
    partition,
    block_sizes.SCAN_BLOCK,
  )


class _Cut(NamedTuple):
  """How a partition cuts these arrays.

  Attributes:
    rows: Axes of more than one device that cut rows.
    summed: Those of them that do not cut the unembedding.
    vocab: Axis of more than one device that cuts V, or None.
    embed: Axis of more than one device that cuts D, or None.
    vocab_size: V on a device.
    logits_bytes: Of all float32 logits of a device.
  """

  rows: tuple[str, ...]
  summed: tuple[str, ...]
  vocab: str | None
  embed: str | None
  vocab_size: int
  logits_bytes: int

  @classmethod
  def of(
    cls,
    partition: Partition | None,
    hidden: tuple[int, ...],
    unembedding: tuple[int, ...],
  ) -> "_Cut":
    tokens, (vocab, dim) = math.prod(hidden[:-1]), unembedding
    if partition is None:
      return cls((), (), None, None, vocab, 4 * tokens * vocab)
    rows = tuple(a for a in partition.rows if partition.size(a) > 1)
    parts = math.prod(partition.size(a) for a in rows)
    tensor, fsdp = (
      partition.size(partition.tensor),
      partition.size(partition.fsdp),
    )
    if parts > 1 and (len(hidden) < 2 or hidden[0] % parts):
      raise ValueError(
        f"hidden has shape {hidden}: its rows must split over "
        f"{' * '.join(rows)} = {parts}."
      )
    if dim % fsdp:
      raise ValueError(f"D = {dim} must split over {partition.fsdp} = {fsdp}.")
    embed = partition.fsdp if fsdp > 1 else None
    if embed and embed not in rows:
      raise ValueError(
        f"partition.fsdp = {embed!r} must be among the axes of the rows, "
        f"{partition.rows}."
      )
    divides = tensor > 1 and not vocab % tensor
    size = vocab // tensor if divides else vocab
    return cls(
      rows=rows,
      summed=tuple(a for a in rows if a != embed),
      vocab=partition.tensor if divides else None,
      embed=embed,
      vocab_size=size,
      logits_bytes=4 * (tokens // parts) * size,
    )

  @property
  def row_spec(self) -> PartitionSpec:
    return PartitionSpec(self.rows) if self.rows else PartitionSpec()

  @property
  def weight_spec(self) -> PartitionSpec:
    return PartitionSpec(self.vocab, self.embed)

  def first(self) -> jax.Array | int:
    """The vocabulary entry that is entry 0 on this device."""
    if self.vocab is None:
      return 0
    return jax.lax.axis_index(self.vocab) * self.vocab_size

  def gathered(self, unembedding: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[V, D] of this device's part of V; cast before it is sent."""
    if self.embed is None:
      return unembedding
    return jax.lax.all_gather(
      unembedding.astype(dtype), self.embed, axis=1, tiled=True
    )


class _Residuals(NamedTuple):
  """What the backward pass needs besides the operands; all [...].

  Attributes:
    peak: float32, the largest logit.
    log_partition: float32, log of the sum of exp(z - peak).
    best: int32, the likeliest token.
    constant: bool, the log-prob is a constant: no gradient.
  """

  peak: jax.Array
  log_partition: jax.Array
  best: jax.Array
  constant: jax.Array


def _local_statistics(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  support: scan.Support | None,
  *,
  temperature: float,
  block: int,
) -> scan.Statistics:
  """Of this device's vocabulary: the kernel on a TPU where it applies."""
  scanned = functools.partial(
    scan.statistics, support=support, temperature=temperature, block=block
  )
  sizes = block_sizes.for_kernel(
    hidden.shape[1], hidden.dtype, unembedding.dtype
  )
  # float32 operands: the kernel and XLA may multiply them in different
  # precisions, and the backward pass would meet another softmax.
  if support is not None or sizes is None or hidden.dtype != jnp.bfloat16:
    return scanned(hidden, unembedding, targets)
  return jax.lax.platform_dependent(
    hidden,
    unembedding,
    targets,
    tpu=functools.partial(
      kernel.statistics, temperature=temperature, sizes=sizes
    ),
    default=scanned,
  )


def _joined(stats: scan.Statistics, cut: _Cut) -> scan.Statistics:
  """Statistics of the whole vocabulary from those of its shards."""
  if cut.vocab is None:
    return stats
  peak = jax.lax.pmax(stats.peak, cut.vocab)
  best = jnp.where(stats.peak == peak, stats.best + cut.first(), -1)
  sums = (*scan.moved(stats, peak), stats.chosen)
  return scan.Statistics(
    peak, *jax.lax.psum(sums, cut.vocab), jax.lax.pmax(best, cut.vocab)
  )


def _forward(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  support_mask: jax.Array | None,
  *,
  temperature: float,
  block: int,
  cut: _Cut,
) -> tuple[jax.Array, jax.Array, _Residuals]:
  """Local: log-probs, entropy and residuals, each [...]."""
  shape = targets.shape
  first = cut.first()
  support = None
  if support_mask is not None:
    packed = support_mask.reshape(-1, support_mask.shape[-1])
    support = scan.Support(packed, first)
  flat = targets.reshape(-1).astype(jnp.int32)
  stats = _local_statistics(
    hidden.reshape(-1, hidden.shape[-1]),
    cut.gathered(unembedding, hidden.dtype),
    flat - first,
    support,
    temperature=temperature,
    block=block,
  )
  stats = _joined(stats, cut)
  empty = stats.partition == 0
  # At least 1 in any row that has a support: the peak's own exponential.
  partition = jnp.where(empty, 1.0, stats.partition)
  log_partition = jnp.log(partition)
  # Neither part is negative, but for what a platform's log makes of 1.
  entropy = jnp.maximum(log_partition - stats.weighted / partition, 0.0)
  logprobs = stats.chosen - stats.peak - log_partition
  constant = empty
  if support is not None:
    byte = jnp.take_along_axis(support.packed, flat[:, None] // 8, axis=1)
    bit = (flat % 8).astype(jnp.uint8)
    constant = (byte[:, 0] >> bit) & 1 == 0
    logprobs = jnp.where(constant, ref.OUTSIDE_SUPPORT, logprobs)
    logprobs, entropy = (jnp.where(empty, 0.0, x) for x in (logprobs, entropy))
  residuals = _Residuals(stats.peak, log_partition, stats.best, constant)
  return jax.tree.map(
    lambda x: x.reshape(shape), (logprobs, entropy, residuals)
  )


def _backward(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  support_mask: jax.Array | None,
  logprobs: jax.Array,
  residuals: _Residuals,
  cotangent: jax.Array,
  *,
  temperature: float,
  block: int,
  cut: _Cut,
) -> tuple[jax.Array, jax.Array]:
  """Local: gradients of hidden and of this device's part of unembedding."""
  first = cut.first()
  support = None
  if support_mask is not None:
    packed = support_mask.reshape(-1, support_mask.shape[-1])
    support = scan.Support(packed, first)
  rows = hidden.reshape(-1, hidden.shape[-1])
  targets = targets.reshape(-1).astype(jnp.int32)
  logprobs, cotangent, residuals = jax.tree.map(
    lambda x: x.reshape(-1), (logprobs, cotangent, residuals)
  )
  cotangent = jnp.where(residuals.constant, 0.0, cotangent)

  def reduce(block_gradient: jax.Array) -> jax.Array:
    if cut.embed is None:
      return block_gradient
    return jax.lax.psum_scatter(
      block_gradient, cut.embed, scatter_dimension=1, tiled=True
    )

  # Sums over devices are of float32, so they come before the last rounding.
  dtype = jnp.float32 if cut.summed else unembedding.dtype
  d_hidden, d_unembedding = scan.gradients(
    rows,
    cut.gathered(unembedding, hidden.dtype),
    targets - first,
    support,
    residuals.peak,
    residuals.log_partition,
    cotangent,
    temperature=temperature,
    block=block,
    reduce=reduce,
    like=jax.ShapeDtypeStruct(unembedding.shape, dtype),
  )
  if unembedding.dtype != hidden.dtype:
    missing = _rounded_away(
      logprobs, residuals, targets, cotangent / temperature, hidden.dtype
    )
    for entries, factors in missing:
      d_unembedding = _add_rows(
        d_unembedding, rows, entries - first, factors, cut
      )
  if cut.summed:
    d_unembedding = jax.lax.psum(d_unembedding, cut.summed)
  if cut.vocab is not None:
    d_hidden = jax.lax.psum(d_hidden, cut.vocab)
  return (
    d_hidden.astype(hidden.dtype).reshape(hidden.shape),
    d_unembedding.astype(unembedding.dtype),
  )


def _rounded_away(
  logprobs: jax.Array,
  residuals: _Residuals,
  targets: jax.Array,
  scale: jax.Array,
  dtype: jnp.dtype,
) -> tuple[tuple[jax.Array, jax.Array], ...]:
  """What a cast of dz takes from each row's largest entries.

  dz is scale (1[target] - softmax(z)). Nearly all of its norm, and so of the
  rounding error's, is in the target's entry and in the likeliest other one.

  Returns:
    Pairs of entry int32 [N] and what is missing there, float32 [N].
  """

  def missing(dz: jax.Array) -> jax.Array:
    return dz - ref.round_to(dz, dtype)

  of_target = scale * (1.0 - jnp.exp(logprobs))
  of_best = -scale * jnp.exp(-residuals.log_partition)
  of_best = jnp.where(residuals.best == targets, 0.0, of_best)
  return (
    (targets, missing(of_target)),
    (residuals.best, missing(of_best)),
  )


def _add_rows(
  unembedding: jax.Array,
  hidden: jax.Array,
  entries: jax.Array,
  factors: jax.Array,
  cut: _Cut,
) -> jax.Array:
  """Adds ``factors[n] hidden[n]`` to row ``entries[n]``, in float32.

  As the gradient of an embedding's look-up does.

  Args:
    unembedding: float32, this device's part of the gradient [V, D].
    hidden: [N, D].
    entries: int32 [N], of this device's vocabulary; those outside are dropped.
    factors: float32 [N].
    cut: Where D is cut, each device takes its part of D from all rows.
  """
  if cut.embed is not None:
    hidden = jax.lax.all_to_all(
      hidden, cut.embed, split_axis=1, concat_axis=0, tiled=True
    )
    entries, factors = jax.lax.all_gather(
      (entries, factors), cut.embed, tiled=True
    )
  # Padding is alike in many rows: what adds nothing need not wait in line.
  used = (entries >= 0) & (entries < unembedding.shape[0]) & (factors != 0)
  entries = jnp.where(used, entries, unembedding.shape[0])
  updates = factors[:, None] * hidden.astype(jnp.float32)
  return unembedding.at[entries].add(updates, mode="drop")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def blocked(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  support_mask: jax.Array | None,
  temperature: float,
  partition: Partition | None,
  block: int,
) -> tuple[jax.Array, jax.Array]:
  """As ``token_logprob``, by blocks of the vocabulary at any size.

  Raises:
    ValueError: The block size is not a positive multiple of 128.
  """
  return _blocked_forward(
    hidden, unembedding, targets, support_mask, temperature, partition, block
  )[0]


def _blocked_forward(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  support_mask: jax.Array | None,
  temperature: float,
  partition: Partition | None,
  block: int,
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
  block_sizes.check_block("block", block)
  cut = _Cut.of(partition, hidden.shape, unembedding.shape)
  operands = hidden, unembedding, targets, support_mask
  rows = cut.row_spec
  logprobs, entropy, residuals = per_shard(
    functools.partial(_forward, temperature=temperature, block=block, cut=cut),
    partition,
    in_specs=(rows, cut.weight_spec, rows, rows),
    out_specs=rows,
  )(*operands)
  return (logprobs, entropy), (*operands, logprobs, residuals)


def _blocked_backward(
  temperature: float,
  partition: Partition | None,
  block: int,
  saved: tuple[Any, ...],
  cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None, None]:
  hidden, unembedding = saved[:2]
  cut = _Cut.of(partition, hidden.shape, unembedding.shape)
  rows = cut.row_spec
  gradients = per_shard(
    functools.partial(_backward, temperature=temperature, block=block, cut=cut),
    partition,
    in_specs=(rows, cut.weight_spec, rows, rows, rows, rows, rows),
    out_specs=(rows, cut.weight_spec),
  )(*saved, cotangents[0])  # The entropy carries none.
  return (*gradients, None, None)


blocked.defvjp(_blocked_forward, _blocked_backward)
