"""Support masks on the host."""

import numpy as np
from absl.testing import parameterized

from darl_jax.types import SupportMask

_VOCAB = 43


def packed(rng, length, share, *, vocab=_VOCAB):
  """Bits [T, ceil(V / 8)], and the mask [T, V] that they are of."""
  mask = rng.random((length, vocab)) < share
  return np.packbits(mask, axis=-1, bitorder="little"), mask


class SupportMaskTest(parameterized.TestCase):
  @parameterized.product(
    length=(0, 1, 9), share=(0.0, 0.02, 0.5, 1.0), seed=(0, 1)
  )
  def test_there_and_back(self, length, share, seed):
    bits, _ = packed(np.random.default_rng(seed), length, share)
    support = SupportMask.of(bits)
    self.assertLen(support, length)
    self.assertEqual(support.width, 6)
    np.testing.assert_array_equal(support.dense(), bits)
    self.assertLen(support.data, np.count_nonzero(bits))
    for name, dtype in (
      ("data", np.uint8),
      ("columns", np.int32),
      ("offsets", np.int64),
    ):
      self.assertEqual(getattr(support, name).dtype, dtype)

  def test_has_what_the_mask_says(self):
    bits, mask = packed(np.random.default_rng(0), 200, 0.3)
    support = SupportMask.of(bits)
    for token in range(_VOCAB):
      np.testing.assert_array_equal(
        support.has(np.full(200, token, np.int32)), mask[:, token]
      )

  def test_concatenated_behind_positions_without_any(self):
    rng = np.random.default_rng(0)
    parts = [packed(rng, length, 0.1)[0] for length in (3, 1, 0, 4)]
    whole = SupportMask.concatenate([*map(SupportMask.of, parts)]).after(2)
    want = np.concatenate([np.zeros((2, 6), np.uint8), *parts])
    np.testing.assert_array_equal(whole.dense(), want)
    self.assertEqual(whole.offsets.dtype, np.int64)

  def test_of_other_widths_do_not_go_together(self):
    masks = [SupportMask.of(np.zeros((1, width), np.uint8)) for width in (5, 6)]
    with self.assertRaisesRegex(ValueError, r"widths \[5, 6\]"):
      SupportMask.concatenate(masks)

  def test_takes_as_many_bytes_as_announced(self):
    rng, vocab, length = np.random.default_rng(0), 152_000, 50
    bits, _ = packed(rng, length, 30 / vocab, vocab=vocab)
    support = SupportMask.of(bits)
    self.assertAlmostEqual(support.num_bytes / length, 160, delta=10)
    self.assertEqual(bits.nbytes / length, 19_000)
