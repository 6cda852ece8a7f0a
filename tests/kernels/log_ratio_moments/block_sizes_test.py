"""The block sizes of the log-ratio moments, and what they refuse."""

import dataclasses

from absl.testing import parameterized

from darl_jax.kernels.log_ratio_moments import block_sizes
from darl_jax.kernels.log_ratio_moments.block_sizes import BlockSizes

_VMEM_BYTES = 16 * 2**20  # What a kernel gets by default.


class BlockSizesTest(parameterized.TestCase):
  @parameterized.parameters(block_sizes.TPU, block_sizes.TPU_MANY_SEGMENTS)
  def test_table_is_valid_and_fits_vector_memory(self, sizes):
    block_sizes.check_tpu(sizes)
    inputs = sizes.rows * sizes.tokens * (4 * 4 + 1 + 4)
    outputs = sizes.rows * sizes.segments * 4 * 7
    # Each twice; the rest is for the kernel's own values.
    self.assertLess(2 * (inputs + outputs), 0.6 * _VMEM_BYTES)

  def test_table_of_cuda_is_valid(self):
    block_sizes.check_cuda(block_sizes.CUDA)

  @parameterized.parameters(1, 7, 8, 33, 64)
  def test_cut_down_to_a_shape(self, rows):
    for tokens in (1, 127, 128, 300, 4096, 4097, 8200, 20_000):
      for segments in (1, 5, 128, 129, 1024, 1025, 8192, 30_000):
        sizes = block_sizes.tpu(rows, tokens, segments)
        block_sizes.check_tpu(sizes)
        blocks = -(-tokens // 4096)
        self.assertBetween(sizes.tokens * blocks, tokens, tokens + 128 * blocks)
        self.assertLess(sizes.rows, rows + 8)
        self.assertLess(sizes.segments, segments + 128)
        sizes = block_sizes.cuda(tokens, segments)
        block_sizes.check_cuda(sizes)
        self.assertLess(sizes.tokens, max(17, 2 * tokens))
        self.assertLess(sizes.segments, max(17, 2 * segments))

  def test_many_segments_take_fewer_rows(self):
    self.assertEqual(block_sizes.tpu(64, 8192, 128), BlockSizes(32, 4096, 128))
    self.assertEqual(block_sizes.tpu(64, 8192, 2000), BlockSizes(8, 4096, 2048))

  @parameterized.parameters(
    (dict(rows=12), "rows = 12 .* multiple of 8, .* Try 16"),
    (dict(tokens=100), "tokens = 100 .* multiple of 128, .* Try 128"),
    (dict(segments=0), "segments = 0 .* multiple of 128, .* Try 128"),
    (dict(rows=-8, tokens=1), "rows = -8 .* Try 8.\ntokens = 1 .* Try 128"),
  )
  def test_tpu_refuses(self, change, message):
    sizes = dataclasses.replace(block_sizes.TPU, **change)
    with self.assertRaisesRegex(ValueError, message):
      block_sizes.check_tpu(sizes)

  @parameterized.parameters(
    (dict(rows=2), "rows = 2 must be 1: .* Try 1"),
    (dict(tokens=96), "tokens = 96 .* power of two, .* Try 128"),
    (dict(segments=0), "segments = 0 .* power of two, .* Try 1"),
  )
  def test_cuda_refuses(self, change, message):
    sizes = dataclasses.replace(block_sizes.CUDA, **change)
    with self.assertRaisesRegex(ValueError, message):
      block_sizes.check_cuda(sizes)
