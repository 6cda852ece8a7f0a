"""What rewards gain by length."""

import dataclasses

import numpy as np
from absl.testing import parameterized

from configs import darl
from darl_jax import config as config_lib
from darl_jax.rewards import shaping

_REWARDS = config_lib.parse(darl.get_config()).rewards


class OfLengthsTest(parameterized.TestCase):
  def test_by_hand(self):
    config = dataclasses.replace(
      _REWARDS, overlong_penalty=0.5, overlong_buffer_tokens=4
    )
    added = shaping.of_lengths(config, max_response_tokens=10)
    np.testing.assert_allclose(
      added(np.array([6, 8, 10, 0])), [0.0, -0.25, -0.5, 0.0]
    )

  def test_off(self):
    self.assertIsNone(shaping.of_lengths(_REWARDS, max_response_tokens=10))
