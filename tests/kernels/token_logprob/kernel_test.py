"""The forward kernel in interpret mode, and compiled for TPUs."""

import functools
import pathlib
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import SingleDeviceSharding

from darl_jax.config import ConfigError
from darl_jax.kernels.token_logprob import block_sizes, kernel, scan
from darl_jax.planner import topology

inputs = types.SimpleNamespace(
  **runpy.run_path(str(pathlib.Path(__file__).parent / "inputs.py"))
)


def _both(args, *, temperature=0.7, sizes=None):
  """Statistics from the kernel and from the scan."""
  sizes = sizes or block_sizes.BlockSizes(rows=128, vocab=128)
  got = jax.jit(
    functools.partial(
      kernel.statistics, temperature=temperature, sizes=sizes, interpret=True
    )
  )(*args)
  expected = scan.statistics(*args, None, temperature=temperature, block=2048)
  return got, expected


class KernelTest(parameterized.TestCase):
  def _assert_same(self, got, expected):
    for name, g, e in zip(got._fields, got, expected, strict=True):
      if name == "best":
        np.testing.assert_array_equal(g, e, name)
      else:
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-5, err_msg=name)

  @parameterized.parameters(
    (1, 390, inputs.MIXED),
    (128, 1, inputs.MIXED),
    (128, 256, inputs.BFLOAT16),
    (128, 100, inputs.FLOAT32),
    (300, 256, inputs.FLOAT32),
    (300, 390, inputs.BFLOAT16),
    (300, 390, inputs.MIXED),
  )
  def test_equals_scan(self, tokens, vocab, dtypes):
    args = inputs.make((tokens,), vocab=vocab, dtypes=dtypes)
    self._assert_same(*_both(args))

  @parameterized.parameters(*block_sizes.KERNEL_BLOCKS)
  def test_all_block_sizes(self, sizes):
    args = inputs.make(
      (sizes.rows + 100,),
      dim=8,
      vocab=2 * sizes.vocab + 30,
      dtypes=inputs.MIXED,
    )
    self._assert_same(*_both(args, sizes=sizes))

  def test_huge_logits(self):
    # Integers: exact in both, however large.
    args = inputs.make((200,), vocab=390, scale=1e3, integer=True)
    got, expected = _both(args, temperature=1.0)
    self.assertGreater(np.max(np.abs(got.peak)), 1e4)
    self._assert_same(got, expected)

  def test_target_of_another_shard(self):
    hidden, unembedding, _ = inputs.make((5,), vocab=256)
    targets = jnp.array([-300, -1, 256, 400, 7])
    got, expected = _both((hidden, unembedding, targets))
    self._assert_same(got, expected)
    np.testing.assert_array_equal(got.chosen[:4], np.zeros(4))
    self.assertNotEqual(got.chosen[4], 0)

  def test_what_lies_beyond_the_vocabulary_does_not_matter(self):
    # The last block of 128 reads 98 rows that are not of the array; interpret
    # mode fills them with NaN, a TPU with whatever lies there.
    args = inputs.make((128,), vocab=286)
    got, expected = _both(args)
    self.assertTrue(all(np.all(np.isfinite(x)) for x in got))
    self._assert_same(got, expected)

  def test_cost(self):
    hidden, unembedding = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    cost = kernel.cost(2000, 64, 500, hidden, unembedding, rows=1024)
    self.assertEqual(cost.flops, 2 * 2000 * 64 * 500)
    self.assertEqual(cost.transcendentals, 2000 * 500)
    # The hidden states once, the unembedding for each block of rows; targets
    # and the five sums.
    self.assertEqual(
      cost.bytes_accessed, 2000 * 64 * 2 + 2 * 500 * 64 * 4 + 6 * 2000 * 4
    )

  @parameterized.parameters(
    ("v5e:2x2", (4096, 4096, 151936)),
    ("v5p:2x2x1", (4096, 4096, 151936)),
    ("v6e:2x2", (4096, 4096, 151936)),
    ("v5p:2x2x1", (300, 8192, 32001)),
  )
  def test_compiles(self, name, shape):
    try:
      device = topology.devices(name)[0]
    except ConfigError as error:
      pytest.skip(str(error))
    tokens, dim, vocab = shape
    like = functools.partial(
      jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device)
    )
    f = functools.partial(
      kernel.statistics,
      temperature=0.7,
      sizes=block_sizes.for_kernel(dim, jnp.bfloat16, jnp.float32),
    )
    compiled = (
      jax.jit(f)
      .lower(
        like((tokens, dim), jnp.bfloat16),
        like((vocab, dim), jnp.float32),
        like((tokens,), jnp.int32),
      )
      .compile()
    )
    self.assertIn("token_logprob_statistics", compiled.as_text())
