"""Whole runs of every loss of the family."""

import math
import typing

import pytest
from absl.testing import parameterized

from configs import (
  async_grpo,
  balance,
  cispo,
  dr_grpo,
  estr,
  ewma_ppo,
  gspo,
  loglinear_ppo,
  m2po,
  reference_kl,
  rloo,
  snapshot_ppo,
  topr,
  vcpo,
)
from darl_jax import config, metrics
from tests.fixtures import runs

compile_once = runs.compile_once

# What each config must report beside the others.
FAMILY = {
  "clipped": (async_grpo, "train/clipped_high"),
  "gspo": (gspo, "train/clipped_high"),
  "cispo": (cispo, "train/clipped_high"),
  "topr": (topr, "train/trajectory_weight"),
  "m2po": (m2po, "train/rejected"),
  "estr": (estr, "train/rejected"),
}


# With the clipped loss, what else they set.
CLIPPED = {
  dr_grpo: ("advantage", "group_centered"),
  rloo: ("advantage", "rloo"),
  balance: ("behavior_weighting", "balance"),
  loglinear_ppo: ("proximal", "loglinear"),
  snapshot_ppo: ("proximal", "snapshot"),
  ewma_ppo: ("proximal", "ewma"),
  vcpo: ("step_ess_target", 0.5),
  reference_kl: ("kl_target", "reference"),
}


class LossFamilyTest(parameterized.TestCase):
  def test_every_loss_has_its_config(self):
    hints = typing.get_type_hints(config.ObjectiveConfig)
    self.assertCountEqual(FAMILY, typing.get_args(hints["loss"]))
    for loss, (module, _) in FAMILY.items():
      parsed = config.parse(module.get_config())
      self.assertEqual(parsed.objective.loss, loss)

  @parameterized.parameters(*CLIPPED.items())
  def test_what_the_others_set(self, module, expected):
    name, value = expected
    parsed = config.parse(module.get_config())
    self.assertEqual(getattr(parsed.objective, name), value)
    self.assertEqual(parsed.objective.loss, "clipped")

  @pytest.mark.slow
  @parameterized.parameters(*FAMILY)
  def test_two_steps(self, loss):
    module, own = FAMILY[loss]
    self._assert_trains(module, own)

  @pytest.mark.slow
  @parameterized.parameters(loglinear_ppo, snapshot_ppo, ewma_ppo)
  def test_proximal_policies(self, module):
    self._assert_trains(module, "train/rejected")

  @pytest.mark.slow
  @parameterized.parameters(
    (vcpo, "train/step_scale"), (reference_kl, "train/reference_kl")
  )
  def test_what_goes_with_any_loss(self, module, own):
    self._assert_trains(module, own)

  def _assert_trains(self, module, own):
    workdir = runs.new_workdir()
    ended = runs.execute(runs.make_config(module, num_steps=2), workdir)
    self.assertIsNone(ended.error)
    rows = [row for row in metrics.read_metrics(workdir) if "train/loss" in row]
    self.assertLen(rows, 2)
    for row in rows:
      self.assertIn(own, row)
      self.assertEqual(row["train/skipped"], 0)
      for name, value in row.items():
        self.assertTrue(math.isfinite(value), f"{name} = {value}")
