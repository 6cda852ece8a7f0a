"""Log-prob and entropy of the sampled token: the forward pass as a TPU kernel.

A block of hidden states stays in VMEM while the unembedding streams past it;
the logits of a pair of blocks live in VMEM only and come down to running sums,
as in online softmax (Milakov and Gimelshein, arXiv:1805.02867). So the logits
never pass through HBM, as those of ``scan.statistics`` do.

Compiled for TPUs and checked in interpret mode; never run on one.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from darl_jax.kernels.token_logprob import ref
from darl_jax.kernels.token_logprob.block_sizes import BlockSizes
from darl_jax.kernels.token_logprob.scan import Statistics


def _body(
  targets_ref,
  hidden_ref,
  unembedding_ref,
  peak_ref,
  partition_ref,
  weighted_ref,
  chosen_ref,
  best_ref,
  *,
  vocab: int,
  temperature: float,
):
  """One block of the vocabulary against one block of tokens.

  The outputs, [1, rows], stay in VMEM for all blocks of the vocabulary.
  Logits are [vocab, rows]: the sums over the vocabulary then add registers
  instead of lanes within one, and the running sums lie along lanes.
  """
  block = pl.program_id(1)
  size = unembedding_ref.shape[0]

  @pl.when(block == 0)
  def _():
    peak_ref[...] = jnp.full_like(peak_ref, ref.EXCLUDED)
    partition_ref[...] = jnp.zeros_like(partition_ref)
    weighted_ref[...] = jnp.zeros_like(weighted_ref)
    chosen_ref[...] = jnp.zeros_like(chosen_ref)
    best_ref[...] = jnp.zeros_like(best_ref)

  z = jax.lax.dot_general(
    unembedding_ref[...].astype(hidden_ref.dtype),
    hidden_ref[...],
    (((1,), (1,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  z *= 1 / temperature
  entry = jax.lax.broadcasted_iota(jnp.int32, z.shape, 0) + block * size
  if vocab % size:
    # The last block reaches beyond the array, where anything may lie.
    z = jnp.where(entry < vocab, z, ref.EXCLUDED)
  chosen_ref[...] += jnp.sum(
    jnp.where(entry == targets_ref[...], z, 0.0), axis=0, keepdims=True
  )
  before = peak_ref[...]
  block_peak = jnp.max(z, axis=0, keepdims=True)
  best = jnp.max(jnp.where(z == block_peak, entry, -1), axis=0, keepdims=True)
  best_ref[...] = jnp.where(block_peak > before, best, best_ref[...])
  peak = jnp.maximum(before, block_peak)
  peak_ref[...] = peak
  shifted = z - peak
  exponentials = jnp.exp(shifted)
  shift = before - peak
  scale = jnp.exp(shift)
  weighted_ref[...] = scale * (
    weighted_ref[...] + shift * partition_ref[...]
  ) + jnp.sum(exponentials * shifted, axis=0, keepdims=True)
  partition_ref[...] = scale * partition_ref[...] + jnp.sum(
    exponentials, axis=0, keepdims=True
  )


def statistics(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  *,
  temperature: float,
  sizes: BlockSizes,
  interpret: bool = False,
) -> Statistics:
  """As ``scan.statistics`` without a support.

  Args:
    hidden: [N, D].
    unembedding: [V, D], cast to hidden's dtype block by block.
    targets: int32 [N]; outside [0, V) where another shard has the target.
    temperature: Divides the logits.
    sizes: Neither need divide N or V.
    interpret: Runs as plain JAX, for tests.
  """
  (tokens, dim), vocab = hidden.shape, unembedding.shape[0]
  rows, entries = min(sizes.rows, tokens), min(sizes.vocab, vocab)
  blocks = pl.cdiv(tokens, rows), pl.cdiv(vocab, entries)
  row = pl.BlockSpec((1, rows), lambda i, j: (0, i))
  floats = jax.ShapeDtypeStruct((1, tokens), jnp.float32)
  call = pl.pallas_call(
    functools.partial(_body, vocab=vocab, temperature=temperature),
    grid=blocks,
    in_specs=[
      row,
      pl.BlockSpec((rows, dim), lambda i, j: (i, 0)),
      pl.BlockSpec((entries, dim), lambda i, j: (j, 0)),
    ],
    out_specs=[row] * 5,
    out_shape=[floats] * 4 + [jax.ShapeDtypeStruct((1, tokens), jnp.int32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=_vmem_limit(
        sizes.vmem_bytes(dim, hidden.dtype, unembedding.dtype)
      ),
    ),
    cost_estimate=cost(
      tokens, dim, vocab, hidden.dtype, unembedding.dtype, rows=rows
    ),
    interpret=interpret,
    name="token_logprob_statistics",
  )
  outputs = call(targets.astype(jnp.int32)[None, :], hidden, unembedding)
  return Statistics(*(x[0] for x in outputs))


def _vmem_limit(estimate: int) -> int:
  """Room for what the estimate leaves out, such as the compiler's spills."""
  return estimate + 8 * 2**20


def cost(
  tokens: int,
  dim: int,
  vocab: int,
  hidden: jnp.dtype,
  unembedding: jnp.dtype,
  *,
  rows: int,
) -> pl.CostEstimate:
  """Operations and bytes: the compiler cannot see into the kernel."""
  return pl.CostEstimate(
    flops=2 * tokens * dim * vocab,
    transcendentals=tokens * vocab,
    bytes_accessed=tokens * dim * hidden.itemsize
    + pl.cdiv(tokens, rows) * vocab * dim * unembedding.itemsize
    + 6 * 4 * tokens,
  )
