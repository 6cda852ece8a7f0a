"""Centres and balance weights from the snapshots of real runs."""

import dataclasses
import functools
import math
from unittest import mock

import numpy as np
from absl.testing import parameterized

from configs import balance
from darl_jax import config, loop, metrics
from darl_jax.rescoring import proximal
from tests.fixtures import runs
from tests.objectives import reference
from tests.rescoring import rescorer_test

compile_once = runs.compile_once


def arguments(run, entries, *, pool=None, scored=None, **changes):
  """For a batch of entries of a run's ring."""
  objective = dataclasses.replace(run.config.objective, **changes)
  return proximal.batch_arguments(
    run.rescorer,
    dataclasses.replace(run.config, objective=objective),
    pool=pool or run.ring._pool(),
    entries=entries,
    scored_logprobs=scored,
  )


def sums_of(entries, flat):
  """Of the masked-in tokens of each entry, in float64."""
  ends = np.cumsum([len(e.trajectory.tokens) for e in entries])
  return [
    float(np.sum(part[e.trajectory.loss_mask], dtype=np.float64))
    for e, part in zip(entries, np.split(flat, ends[:-1]), strict=True)
  ]


class SnapshotTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.run_ = rescorer_test.ended_run().run
    cls.entries = cls.run_.ring._pool().entries

  def _recorded(self):
    return np.concatenate(
      [entry.trajectory.behavior_logprobs for entry in self.entries]
    )

  def test_nothing_is_asked_for(self):
    with mock.patch.object(self.run_.rescorer, "under_each") as under_each:
      self.assertEqual(arguments(self.run_, self.entries), {})
    under_each.assert_not_called()

  def test_is_mu_up_to_the_engine(self):
    changes = dict(trust_region="decoupled", proximal="snapshot")
    found = arguments(self.run_, self.entries, **changes)
    self.assertEqual(list(found), ["snapshot_logprobs"])
    sampled = np.concatenate([e.trajectory.loss_mask for e in self.entries])
    np.testing.assert_allclose(
      found["snapshot_logprobs"][sampled], self._recorded()[sampled], atol=1e-5
    )
    self.assertGreater(
      np.abs(found["snapshot_logprobs"] - self._recorded())[sampled].max(), 0
    )

  def test_what_was_recorded_where_it_is_gone(self):
    with mock.patch.object(self.run_.ring, "holds", return_value=False):
      found = arguments(self.run_, self.entries, proximal="snapshot")
    np.testing.assert_array_equal(found["snapshot_logprobs"], self._recorded())

  def test_balance_of_mixed_trajectories_is_refused(self):
    with self.assertRaisesRegex(
      ValueError, "mixes versions .* another workdir"
    ):
      arguments(self.run_, self.entries, behavior_weighting="balance")


@dataclasses.dataclass(frozen=True)
class Weighed:
  """One step: its batch's weights, and those by the definition."""

  weights: np.ndarray
  expected: np.ndarray
  biased: np.ndarray
  lengths: np.ndarray
  versions: int


@functools.cache
def balanced_run(policy="recompute") -> tuple[runs.Ended, list[Weighed]]:
  """A run of the balance heuristic, its weights checked where they are used."""
  steps, of_run = [], {}
  build = loop.batching.build_batch

  def prepare(run):
    choose = run._choose

    def noted(*positional):
      of_run["chosen"] = choose(*positional)
      return of_run["chosen"]

    of_run["run"], run._choose = run, noted

  def checked(entries, scored, **keywords):
    pool = of_run["chosen"].pool
    steps.append(weigh(of_run["run"], pool, entries, scored, keywords))
    return build(entries, scored, **keywords)

  run_config = runs.make_config(
    balance,
    num_steps=6,
    objective__proximal=policy,
    objective__max_behavior_weight=1.2,
    replay__max_uses=3,
    learner__learning_rate=0.02,
    learner__final_learning_rate=0.02,
    warm_start__steps=2,
  )
  with mock.patch.object(loop.batching, "build_batch", checked):
    ended = runs.execute(run_config, runs.new_workdir(), prepare=prepare)
  assert ended.error is None, ended.error
  return ended, steps


def weigh(run, pool, entries, scored, keywords) -> Weighed:
  begun = [entry.trajectory.begun_by for entry in pool.entries]
  versions = sorted(set(begun))
  shares = [begun.count(version) / len(begun) for version in versions]
  each = [
    sums_of(entries, run.rescorer.logprobs(entries, version))
    for version in versions
  ]
  prox = sums_of(entries, scored)
  if keywords.get("snapshot_logprobs") is not None:
    prox = sums_of(entries, keywords["snapshot_logprobs"])
  lengths = np.array([e.trajectory.num_sampled for e in entries])

  def expected(per):
    return np.array(
      [
        reference.balance(
          prox[i] / per[i], [mu[i] / per[i] for mu in each], shares, 1.2
        )
        for i in range(len(entries))
      ]
    )

  return Weighed(
    weights=keywords["balance_weights"],
    expected=expected(np.ones(len(entries))),
    biased=expected(lengths),
    lengths=lengths,
    versions=len(versions),
  )


class BalanceTest(parameterized.TestCase):
  @parameterized.parameters("recompute", "snapshot")
  def test_weights_are_the_definition_on_rescored_logprobs(self, policy):
    ended, steps = balanced_run(policy)
    self.assertLen(steps, 6)
    for step in steps:
      np.testing.assert_allclose(step.weights, step.expected, rtol=1e-4)
    self.assertGreater(max(step.versions for step in steps), 1)
    every = np.concatenate([step.weights for step in steps])
    self.assertGreater(np.std(every), 1e-3)
    self.assertTrue(np.any(every < 0.999))

  def test_a_run_is_finite_and_says_what_it_weighs(self):
    ended, steps = balanced_run()
    rows = [
      row
      for row in metrics.read_metrics(ended.run.workdir)
      if "train/loss" in row
    ]
    self.assertLen(rows, 6)
    for row, step in zip(rows, steps, strict=True):
      for name, value in row.items():
        self.assertTrue(math.isfinite(value), f"{name} = {value}")
      self.assertEqual(row["train/skipped"], 0)
      self.assertGreater(row["train/grad_norm"], 0)
      if row["batch/not_placed"] == 0:
        self.assertAlmostEqual(row["batch/balance_weight"], step.weights.mean())
    for leaf in runs.leaves(ended.run.state):
      self.assertTrue(np.all(np.isfinite(leaf)))

  def test_length_normalized(self):
    ended, _ = balanced_run()
    run, found = ended.run, []
    entries = run.ring._pool().entries
    newest = run.ring.version
    for weighting in ("balance", "balance_length_normalized"):
      scored = run.rescorer.logprobs(entries, newest)
      keywords = arguments(
        run, entries, scored=scored, behavior_weighting=weighting
      )
      found.append(weigh(run, run.ring._pool(), entries, scored, keywords))
    exact, normalized = found
    np.testing.assert_allclose(exact.weights, exact.expected, rtol=1e-4)
    np.testing.assert_allclose(normalized.weights, normalized.biased, rtol=1e-4)
    self.assertGreater(exact.lengths.max(), 1)
    self.assertGreater(np.abs(exact.weights - normalized.weights).max(), 1e-3)

  def test_a_snapshot_of_the_mixture_is_gone(self):
    ended, _ = balanced_run()
    run = ended.run
    entries = run.ring._pool().entries
    scored = run.rescorer.logprobs(entries, run.ring.version)
    with (
      mock.patch.dict(run.ring._snapshots),
      self.assertRaisesRegex(KeyError, "is not held"),
    ):
      del run.ring._snapshots[entries[0].trajectory.begun_by]
      arguments(run, entries, scored=scored)

  def test_a_budget_that_does_not_hold_the_snapshots(self):
    run = balanced_run()[0].run
    size = sum(leaf.nbytes for leaf in runs.leaves(run.ring.latest().params))
    needed = size * (run.config.replay.max_staleness + 1)
    replace = dataclasses.replace
    for budget, refused in ((needed, False), (needed - 1, True)):
      replay = replace(run.config.replay, snapshot_bytes=budget)
      small = replace(run.config, replay=replay)
      found = proximal.snapshot_problems(small, run.learner.param_shapes)
      self.assertLen(found, refused)
    self.assertIn(f"Try replay.snapshot_bytes={needed}.", found[0])
    with self.assertRaisesRegex(config.ConfigError, "replay.snapshot_bytes"):
      runs.execute(small, runs.new_workdir())
    pooled = replace(run.config.objective, behavior_weighting="pooled")
    self.assertEmpty(
      proximal.snapshot_problems(
        replace(small, objective=pooled), run.learner.param_shapes
      )
    )
