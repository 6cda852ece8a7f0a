"""Trajectories in the ring, scored again under the snapshots of a real run."""

from unittest import mock

import numpy as np
from absl.testing import parameterized

from configs import darl
from darl_jax.rescoring.rescorer import Rescorer
from darl_jax.sharding import transfer
from tests.fixtures import runs

compile_once = runs.compile_once


def ended_run() -> runs.Ended:
  """With trajectories of several versions, some of them mixed."""
  run_config = runs.make_config(
    darl,
    num_steps=8,
    replay__max_uses=4,
    replay__num_snapshots=4,
    rollout__max_response_tokens=12,
    rollout__chunk_tokens=1,
    rollout__slots=5,
    rollout__weight_update="recompute",
    learner__row_tokens=28,
    learner__learning_rate=0.05,
    learner__final_learning_rate=0.05,
    warm_start__steps=2,
  )
  ended = runs.execute(run_config, runs.new_workdir())
  assert ended.error is None, ended.error
  return ended


class RescorerTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    run = ended_run().run
    cls.ring = run.ring
    cls.rescorer = Rescorer(run.learner, run.config.learner, run.ring)
    cls.entries = run.ring._pool().entries

  def _of(self, name):
    return np.concatenate(
      [getattr(entry.trajectory, name) for entry in self.entries]
    )

  def test_what_sampled_a_token_gives_what_was_recorded(self):
    versions = np.unique(self._of("policy_version")[self._of("loss_mask")])
    self.assertGreater(len(versions), 1)
    logprobs, known = self.rescorer.under_own(self.entries)
    np.testing.assert_array_equal(known, self._of("loss_mask"))
    np.testing.assert_allclose(
      logprobs[known], self._of("behavior_logprobs")[known], atol=1e-5
    )
    self.assertEqual(np.abs(logprobs[~known]).max(), 0)

  def test_others_give_something_else(self):
    held = [v for v in range(9) if self.ring.holds(v)]
    self.assertGreater(len(held), 1)
    mask = self._of("loss_mask")
    each = dict(self.rescorer.under_each(self.entries, held))
    self.assertEqual(list(each), held)
    newest = each[held[-1]]
    for version in held[:-1]:
      self.assertGreater(np.abs(each[version] - newest)[mask].max(), 1e-3)
      np.testing.assert_array_equal(
        each[version], self.rescorer.logprobs(self.entries, version)
      )

  def test_one_snapshot_at_a_time(self):
    held = [v for v in range(9) if self.ring.holds(v)]
    with mock.patch.object(
      transfer, "to_mesh", wraps=transfer.to_mesh
    ) as to_mesh:
      scored = self.rescorer.under_each(self.entries, held)
      for count in range(1, len(held) + 1):
        next(scored)
        self.assertEqual(to_mesh.call_count, count)

  def test_a_snapshot_that_is_gone(self):
    with self.assertRaisesRegex(KeyError, "snapshot 77 is not held"):
      self.rescorer.logprobs(self.entries, 77)
    with mock.patch.object(self.ring, "holds", return_value=False):
      logprobs, known = self.rescorer.under_own(self.entries)
    self.assertFalse(known.any())
    self.assertEqual(np.abs(logprobs).max(), 0)
