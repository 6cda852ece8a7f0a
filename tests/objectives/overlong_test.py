"""The soft punishment of long answers."""

import numpy as np
from absl.testing import parameterized

from darl_jax.objectives import overlong


class OverlongPenaltyTest(parameterized.TestCase):
  @parameterized.parameters(
    (4, [0, 0, -0.25, -0.5, -0.75, -1, -1]), (0, [0, 0, 0, 0, 0, 0, -1])
  )
  def test_by_hand(self, buffer, want):
    got = overlong.overlong_penalty(
      np.array([1, 6, 7, 8, 9, 10, 11]), max_tokens=10, buffer_tokens=buffer
    )
    np.testing.assert_allclose(got, want)

  @parameterized.parameters(-1, 11)
  def test_refused(self, buffer):
    with self.assertRaisesRegex(ValueError, "buffer_tokens"):
      overlong.overlong_penalty(
        np.array([1]), max_tokens=10, buffer_tokens=buffer
      )
