"""Block sizes of the multi-behavior loss."""

import math

from absl.testing import parameterized

from darl_jax.kernels.multi_behavior_loss import block_sizes


class BlockSizesTest(parameterized.TestCase):
  @parameterized.parameters(
    ((64, 8192), (32, 1024)),
    ((1, 8192), (1, 1024)),
    ((7, 127), (7, 127)),
    ((8, 128), (8, 128)),
    # Blocks of 32 and 1024 would hang over by three quarters and by half.
    ((33, 1100), (24, 640)),
    # No block longer than its axis, so not 32 and 256.
    ((31, 255), (16, 128)),
  )
  def test_fit(self, shape, expected):
    self.assertEqual(block_sizes.TPU.fit(shape), expected)

  def test_every_fit_is_a_block_that_can_be(self):
    most = (block_sizes.TPU.rows, block_sizes.TPU.tokens)
    for rows in range(1, 130):
      for tokens in (*range(1, 400, 7), 1024, 1025, 5000):
        shape = (rows, tokens)
        block = block_sizes.TPU.fit(shape)
        for size, got, unit, limit in zip(
          shape, block, (8, 128), most, strict=True
        ):
          self.assertLessEqual(got, min(size, limit))
          self.assertTrue(got == size or got % unit == 0)
          # Some overhang, but no block without a part of the array.
          self.assertLess(math.ceil(size / got) * got - size, got)

  @parameterized.parameters(
    (dict(rows=12, tokens=128), "rows = 12 .*multiple of 8.* Try 8"),
    (dict(rows=0, tokens=128), "rows = 0 .* Try 8"),
    (dict(rows=8, tokens=200), "tokens = 200 .*multiple of 128.* Try 128"),
    (dict(rows=64, tokens=4096), "rows = 64 x tokens = 4096 .*Try tokens"),
    (dict(rows=2048, tokens=128), "rows = 2048 .*Try rows = 8"),
  )
  def test_refuses_tpu_blocks(self, sizes, message):
    with self.assertRaisesRegex(ValueError, message):
      block_sizes.TpuBlock(**sizes)

  def test_advice_works(self):
    with self.assertRaisesRegex(ValueError, r"Try tokens = (\d+)\.") as caught:
      block_sizes.TpuBlock(rows=64, tokens=4096)
    tokens = int(str(caught.exception).split("= ")[-1].rstrip("."))
    block_sizes.TpuBlock(rows=64, tokens=tokens)
    with self.assertRaises(ValueError):
      block_sizes.TpuBlock(rows=64, tokens=tokens + 128)

  @parameterized.parameters(
    (dict(tokens=1000, warps=4), "tokens = 1000 .*power of two.* Try 512"),
    (dict(tokens=0, warps=4), "tokens = 0 .* Try 1"),
    (dict(tokens=1024, warps=3), "warps = 3 .*power of two.* Try 2"),
    (dict(tokens=64, warps=4), "tokens = 64 .*warps = 4.* Try tokens = 128"),
  )
  def test_refuses_cuda_blocks(self, sizes, message):
    with self.assertRaisesRegex(ValueError, message):
      block_sizes.CudaBlock(**sizes)

  def test_traffic(self):
    block = block_sizes.TpuBlock(rows=8, tokens=128)
    traffic = dict(block=block, trust_region="behavior", num_versions=2)
    tokens = 16 * 256
    # log-probs, behavior log-probs, advantages, weights; mask; version; then
    # 3 x 8 partial sums for each of two rows of blocks, and the two tables.
    primal = tokens * (4 * 4 + 1 + 4) + 2 * 4 * 24 + 4 * 4
    self.assertEqual(
      block_sizes.traffic_bytes((16, 256), direction="primal", **traffic),
      primal,
    )
    self.assertEqual(
      block_sizes.traffic_bytes((16, 256), direction="forward", **traffic),
      primal + 4 * tokens,
    )
    self.assertEqual(
      block_sizes.traffic_bytes(
        (16, 256), direction="backward", logprobs_bytes=2, **traffic
      ),
      tokens * (4 + 2),
    )
