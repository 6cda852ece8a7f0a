"""It learns: the reward of what it samples rises."""

import pathlib
import tempfile

import numpy as np
import pytest
from absl.testing import parameterized

from configs import sync_grpo
from darl_jax import config, loop, metrics

_STEPS = 160
# Steps at either end; their 5120 samples earn 0.17 +- 0.005.
_WINDOW = 20


@pytest.mark.slow
class LearnsTest(parameterized.TestCase):
  def test_sums_of_three_digits(self):
    fields = sync_grpo.get_config()  # Deterministic: no luck is involved.
    fields.num_steps = _STEPS
    with tempfile.TemporaryDirectory() as folder:
      workdir = pathlib.Path(folder) / "run"
      summary = loop.Run(config.parse(fields), workdir).execute()
      rows = metrics.read_metrics(workdir)
    rewards = [row["train/reward"] for row in rows if "train/loss" in row]
    self.assertLen(rewards, _STEPS)
    before, after = np.mean(rewards[:_WINDOW]), np.mean(rewards[-_WINDOW:])
    # Six standard errors of the difference.
    self.assertGreater(after, before + 0.04)
    self.assertGreater(
      summary["accuracy_after"], summary["accuracy_before"] + 0.05
    )
