"""The public function compiled for TPUs and lowered for GPUs."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.config import ConfigError
from darl_jax.kernels.partition import Partition
from darl_jax.kernels.token_logprob import block_sizes, ops
from darl_jax.planner import topology


def _partition(devices):
  mesh = Mesh(
    np.array(devices[:8]).reshape(2, 2, 2), ("data", "fsdp", "tensor")
  )
  return Partition(mesh, rows=("data", "fsdp"), tensor="tensor", fsdp="fsdp")


def _loss(hidden, unembedding, targets, weights, *, partition=None):
  with mock.patch.object(block_sizes, "SMALL_LOGITS_BYTES", 0):
    logprobs, _ = ops.token_logprob(
      hidden, unembedding, targets, temperature=0.7, partition=partition
    )
  return jnp.sum(weights * logprobs)


def _abstract(mesh, *, rows, table, vocab):
  def like(shape, dtype, spec):
    return jax.ShapeDtypeStruct(
      shape, dtype, sharding=NamedSharding(mesh, spec)
    )

  return (
    like((8, 256, 128), jnp.bfloat16, rows),
    like((vocab, 128), jnp.float32, table),
    like((8, 256), jnp.int32, rows),
    like((8, 256), jnp.float32, rows),
  )


class CompileTest(parameterized.TestCase):
  """By blocks; run on neither."""

  def _text(self, name, make_partition, *, table, vocab):
    """The program compiled for a topology, and its bytes of temporaries."""
    try:
      devices = topology.devices(name)
    except ConfigError as error:
      pytest.skip(str(error))
    partition = make_partition(devices)
    args = _abstract(
      partition.mesh,
      rows=PartitionSpec(partition.rows),
      table=table,
      vocab=vocab,
    )
    loss = functools.partial(_loss, partition=partition)
    f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    compiled = f.lower(*args).compile()
    # Not assertIn, which would print all of it.
    self.assertTrue("token_logprob_statistics" in compiled.as_text())
    return compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes

  @parameterized.parameters("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
  def test_one_chip(self, name):
    text, temporaries = self._text(
      name,
      lambda devices: Partition(
        Mesh(np.array(devices[:1]), ("data",)), ("data",), None, None
      ),
      table=PartitionSpec(),
      vocab=50_000,
    )
    # A block of logits and the gradient of hidden, in float32, and as much for
    # the rest; all logits would be 410 MB, and all of dW 26 MB.
    block = 4 * 2048 * (block_sizes.SCAN_BLOCK + 128)
    self.assertLess(temporaries, 2 * block)
    # No second copy of the unembedding, cast as a whole.
    self.assertFalse("bf16[50000,128]" in text)

  @parameterized.parameters("v5e:2x4", "v5p:2x2x2", "v6e:2x4")
  def test_mesh(self, name):
    text, _ = self._text(
      name, _partition, table=PartitionSpec("tensor", "fsdp"), vocab=10_000
    )
    # The unembedding is cast before it is sent, at half the bytes.
    gathered = re.findall(r"(\w+)\[5000,128\]\S* all-gather", text)
    self.assertEqual(set(gathered), {"bf16"})
    # Its gradient is summed as float32.
    scattered = re.findall(r"(\w+)\[\d+,64\]\S* reduce-scatter", text)
    self.assertEqual(set(scattered), {"f32"})

  def test_lowers_for_cuda(self):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    whole = PartitionSpec()
    args = _abstract(mesh, rows=whole, table=whole, vocab=5000)
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    exported = jax.export.export(
      jax.jit(jax.value_and_grad(_loss, argnums=(0, 1))), platforms=["cuda"]
    )(*args)
    # The scan, in XLA's own operations: the kernel is the TPU's.
    self.assertTrue("stablehlo.while" in exported.mlir_module())
    self.assertFalse("tpu_custom_call" in exported.mlir_module())
