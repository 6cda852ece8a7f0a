"""Block sizes: refused where they do not fit, chosen by what fits in VMEM."""

import jax.numpy as jnp
from absl.testing import parameterized

from darl_jax.kernels.token_logprob import block_sizes
from darl_jax.kernels.token_logprob.block_sizes import BlockSizes


class BlockSizesTest(parameterized.TestCase):
  @parameterized.parameters(
    (0, 128, "rows = 0 .*128"),
    (-128, 128, "rows = -128 .*128"),
    (300, 128, "rows = 300 .*256"),
    (1024, 500, "vocab = 500 .*512"),
  )
  def test_refuses(self, rows, vocab, message):
    with self.assertRaisesRegex(ValueError, message):
      BlockSizes(rows=rows, vocab=vocab)

  def test_scan_block_is_valid(self):
    block_sizes.check_block("block", block_sizes.SCAN_BLOCK)

  def test_vmem_bytes(self):
    bfloat16, float32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    sizes = BlockSizes(rows=256, vocab=128)
    logits = 4 * 4 * 256 * 128
    self.assertEqual(
      sizes.vmem_bytes(64, bfloat16, bfloat16),
      2 * 2 * 64 * (256 + 128) + logits,
    )
    self.assertEqual(
      sizes.vmem_bytes(64, bfloat16, float32),
      2 * 64 * (2 * 256 + 4 * 128) + 2 * 64 * 128 + logits,
    )

  @parameterized.parameters(
    (4096, jnp.bfloat16, BlockSizes(1024, 512)),
    (4096, jnp.float32, BlockSizes(1024, 512)),
    (8192, jnp.float32, BlockSizes(512, 256)),
    (10**6, jnp.float32, None),
  )
  def test_for_kernel(self, dim, dtype, expected):
    self.assertEqual(block_sizes.for_kernel(dim, jnp.bfloat16, dtype), expected)

  def test_every_entry_of_the_table_is_used(self):
    used = {
      block_sizes.for_kernel(dim, jnp.bfloat16, dtype)
      for dim in range(128, 40_000, 128)
      for dtype in (jnp.bfloat16, jnp.float32)
    }
    self.assertEqual(used - {None}, set(block_sizes.KERNEL_BLOCKS))
