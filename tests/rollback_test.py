"""Steps that are judged before they are published, and undone."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from configs import mipu, sync_grpo
from darl_jax import config, loop, metrics, rollback
from darl_jax.objectives import monotone
from darl_jax.replay import recording
from darl_jax.types import PolicySnapshot
from tests.fixtures import runs

compile_once = runs.compile_once


def make_config(module=sync_grpo, **changes) -> config.RunConfig:
  defaults = dict(
    num_steps=5,
    warm_start__steps=2,
    rollback__num_prompts=3,
    learner__minibatches=2,
  )
  return runs.make_config(module, **defaults | changes)


def reject(*versions):
  """Makes the judge find against these; it samples and verifies as ever."""

  def prepare(run):
    def compare(groups, params):
      del params
      answers = [t for group in groups for t in group.trajectories]
      assert all(t.reward is not None for t in answers)
      bad = answers[0].begun_by in versions
      return monotone.InferenceGap(-1.0 if bad else 0.5, 0.25, len(answers))

    run.judge.compare = compare

  return prepare


def watched(*prepares):
  """Also notes the learner's state before each step and after it."""
  states = {}

  def prepare(run):
    for each in prepares:
      each(run)
    take_step = run._take_step

    def noted(batch, version):
      states[version, "before"] = runs.leaves(run.state)
      result = take_step(batch, version)
      states[version, "after"] = runs.leaves(run.state)
      return result

    run._take_step = noted

  return prepare, states


def differ(ours, theirs) -> list[bool]:
  return [
    not np.array_equal(one, other)
    for one, other in zip(ours, theirs, strict=True)
  ]


@functools.cache
def undisturbed() -> runs.Ended:
  return runs.execute(make_config(), runs.new_workdir(), prepare=reject(2, 3))


class RollbackTest(parameterized.TestCase):
  @parameterized.parameters("float32", "bfloat16")
  def test_restores_parameters_and_optimizer_bit_for_bit(self, dtype):
    prepare, states = watched(reject(2, 4))
    ended = runs.execute(
      make_config(rollout__dtype=dtype), runs.new_workdir(), prepare=prepare
    )
    self.assertIsNone(ended.error)
    run = ended.run
    step, *others = range(len(runs.leaves(run.state)))
    paths = [path for path, _ in jax.tree.leaves_with_path(run.state)]
    self.assertIn("step", str(paths[step]))
    self.assertTrue(any("opt_state" in str(paths[i]) for i in others))
    for version in range(1, 6):
      before, after = states[version, "before"], states[version, "after"]
      self.assertEqual((before[step], after[step]), (version - 1, version))
      changed = differ(before[1:], after[1:])
      if version in (2, 4):
        self.assertFalse(any(changed))
      else:
        self.assertTrue(all(changed), paths)
    # The run went on: every version was published, and trained with.
    self.assertEqual(ended.summary["status"], "complete")
    self.assertEqual(ended.summary["steps"], 5)
    self.assertEqual(run.ring.version, 5)
    self.assertEqual(ended.summary["rollbacks"], 2)
    self.assertEqual(ended.summary["judged_samples"], 5 * 3 * 4)
    self.assertEqual(ended.summary["compiles"]["train_step"], 1)
    run.ring.accounting().check()
    said = [text for text in ended.said if "is undone" in text]
    self.assertLen(said, 2)
    self.assertStartsWith(
      said[0], "step 2 is undone: T_post = -1 +- 0.2 over 12"
    )

  def test_what_is_published_is_what_was_restored(self):
    published = {}

    def prepare(run):
      reject(2)(run)
      push = run.ring.push_snapshot

      def push_snapshot(snapshot):
        published[snapshot.version] = runs.leaves(snapshot.params)
        push(snapshot)

      run.ring.push_snapshot = push_snapshot

    runs.execute(make_config(), runs.new_workdir(), prepare=prepare)
    self.assertEqual(list(published), list(range(6)))
    self.assertFalse(any(differ(published[2], published[1])))
    self.assertTrue(any(differ(published[3], published[2])))

  def test_metrics(self):
    rows = metrics.read_metrics(undisturbed().run.workdir)
    rows = [row for row in rows if "train/loss" in row]
    self.assertEqual([r["rollback/rejected"] for r in rows], [0, 1, 1, 0, 0])
    self.assertEqual(rows[1]["rollback/gap"], -1.0)
    self.assertEqual(rows[1]["rollback/standard_error"], 0.25)
    self.assertEqual(rows[0]["rollback/samples"], 12)

  def test_a_sampler_of_another_precision(self):
    ended = runs.execute(
      make_config(mipu, rollout__dtype="bfloat16", num_steps=3),
      runs.new_workdir(),
    )
    self.assertIsNone(ended.error)
    rows = metrics.read_metrics(ended.run.workdir)[1:]
    self.assertLen(rows, 3)
    for row in rows:
      self.assertBetween(abs(row["rollback/gap"]), 1e-9, 0.5)
      self.assertGreater(row["rollback/standard_error"], 0)
      self.assertEqual(
        row["rollback/rejected"],
        row["rollback/gap"] < -row["rollback/tolerance"],
      )
    rejected = sum(row["rollback/rejected"] for row in rows)
    self.assertEqual(ended.summary["rollbacks"], rejected)

  def test_the_tolerance_has_a_schedule(self):
    changes = dict(
      rollback__tolerance=3.0, rollback__final_tolerance=0.0, num_steps=4
    )
    ended = runs.execute(
      make_config(**changes), runs.new_workdir(), prepare=reject(1, 2, 3, 4)
    )
    rows = metrics.read_metrics(ended.run.workdir)[1:]
    np.testing.assert_allclose(
      [row["rollback/tolerance"] for row in rows], [3, 2, 1, 0]
    )
    self.assertEqual([r["rollback/rejected"] for r in rows], [0, 0, 0, 1])

  def test_the_rate_is_the_optimizers(self):
    changes = dict(
      learner__schedule="linear", learner__final_learning_rate=1e-5
    )
    ended = runs.execute(
      make_config(**changes), runs.new_workdir(), prepare=reject(2, 3)
    )
    schedule = ended.run.learner.schedule
    rates = [
      row["train/learning_rate"]
      for row in metrics.read_metrics(ended.run.workdir)[1:]
    ]
    # The second optimizer step of the first, second (thrice) and third update.
    want = [float(schedule(n)) for n in (1, 3, 3, 3, 5)]
    np.testing.assert_allclose(rates, want, rtol=1e-6)

  def test_off_it_costs_nothing(self):
    ended = runs.execute(
      make_config(rollback__num_prompts=0, num_steps=2), runs.new_workdir()
    )
    self.assertIsNone(ended.run.judge)
    self.assertEqual(ended.summary["rollbacks"], 0)
    rows = metrics.read_metrics(ended.run.workdir)
    self.assertFalse([n for row in rows for n in row if "rollback" in n])

  def test_more_prompts_than_there_are(self):
    with self.assertRaisesRegex(
      config.ConfigError, "rollback.num_prompts = 5000, but only"
    ):
      runs.execute(make_config(rollback__num_prompts=5000), runs.new_workdir())


class GoOnTest(parameterized.TestCase):
  """A run that was ended goes on as if it had not been."""

  def _assert_same(self, ended):
    whole = undisturbed()
    self.assertIsNone(whole.error)
    self.assertIsNone(ended.error)
    self.assertFalse(
      any(differ(runs.leaves(ended.run.state), runs.leaves(whole.run.state)))
    )
    for name in ("rollbacks", "judged_samples", "generated", "accuracies"):
      self.assertEqual(ended.summary[name], whole.summary[name], name)

  @parameterized.parameters(2, 3, 4)
  def test_killed(self, step):
    workdir = runs.new_workdir()

    def prepare(run):
      reject(2, 3)(run)
      runs.kill_at(step)(run)

    first = runs.execute(make_config(), workdir, prepare=prepare)
    self.assertIsInstance(first.error, loop.Interrupted)
    self._assert_same(
      runs.execute(make_config(), workdir, prepare=reject(2, 3))
    )

  @parameterized.parameters(2, 4)
  def test_stopped_while_a_step_is_judged(self, step):
    """The step is as if it had not begun, and is taken again."""
    workdir = runs.new_workdir()

    def prepare(run):
      reject(2, 3)(run)
      sample = run.judge.sample

      def interrupted(snapshot):
        if snapshot.version == step:
          run.judge._verify = lambda groups: (run.interrupt(), run._check())
        return sample(snapshot)

      run.judge.sample = interrupted

    first = runs.execute(make_config(), workdir, prepare=prepare)
    self.assertIsInstance(first.error, loop.Interrupted)
    self.assertEqual(int(first.run.state.step), step - 1)
    self.assertEqual(first.summary["steps"], step - 1)
    self.assertEqual(first.run.checkpoints.saved_step, step - 1)
    self._assert_same(
      runs.execute(make_config(), workdir, prepare=reject(2, 3))
    )


class ReplayTest(parameterized.TestCase):
  def test_bit_for_bit_without_judging_again(self):
    workdir = runs.new_workdir()
    ended = runs.execute(
      make_config(mipu, num_steps=6),
      workdir,
      record=True,
      prepare=reject(2, 3, 5),
    )
    self.assertIsNone(ended.error)
    self.assertEqual(ended.summary["rollbacks"], 3)
    schedule = recording.read_schedule(workdir / "schedule_00000000.jsonl")

    def prepare(run):
      def sample(snapshot):
        raise AssertionError(f"version {snapshot.version} is judged again")

      run.judge.sample = sample

    again = runs.execute(
      config.parse(schedule.header["config"]),
      runs.new_workdir(),
      verifier="Constant",
      replay=schedule,
      prepare=prepare,
    )
    self.assertIsNone(again.error)
    self.assertEqual(again.summary["rollbacks"], 3)
    self.assertFalse(
      any(differ(runs.leaves(again.run.state), runs.leaves(ended.run.state)))
    )


class JudgeTest(parameterized.TestCase):
  """What a real run's judge asks and compares."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.run_ = undisturbed().run
    cls.snapshot = cls.run_.ring.latest()
    cls.groups = cls.run_.judge.sample(cls.snapshot)

  def _rewarded(self, rewards):
    """The groups' answers with these rewards [groups, samples]."""
    replace = dataclasses.replace
    return [
      replace(
        group,
        trajectories=tuple(
          replace(trajectory, reward=reward)
          for trajectory, reward in zip(group.trajectories, row, strict=True)
        ),
      )
      for group, row in zip(self.groups, rewards, strict=True)
    ]

  def _compare(self, rewards, params):
    return rollback.Judge.compare(
      self.run_.judge, self._rewarded(rewards), params
    )

  def _logprob(self, trajectory, params):
    """Of a whole answer, by a pass over it alone."""
    policy, size = self.run_.policy, len(trajectory.tokens)
    hidden = policy.hidden(
      params,
      trajectory.tokens[None],
      np.arange(size, dtype=np.int32)[None],
      np.ones((1, size), np.int32),
    )
    logits = np.asarray(hidden[0] @ policy.unembedding(params).T, np.float64)
    logits -= np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    at = np.flatnonzero(trajectory.loss_mask)
    return np.sum(logits[at - 1, trajectory.tokens[at]])

  def test_answers_are_of_the_policy_and_the_same_if_asked_again(self):
    self.assertLen(self.groups, 3)
    again = self.run_.judge.sample(self.snapshot)
    other = self.run_.judge.sample(PolicySnapshot(9, self.snapshot.params))
    for ours, theirs in zip(self.groups, again, strict=True):
      self.assertEqual(ours.prompt.id, theirs.prompt.id)
      self.assertLen(ours.trajectories, 4)
      for one, same in zip(ours.trajectories, theirs.trajectories, strict=True):
        self.assertEqual(one.begun_by, self.snapshot.version)
        np.testing.assert_array_equal(one.tokens, same.tokens)
        np.testing.assert_array_equal(
          one.behavior_logprobs, same.behavior_logprobs
        )
    self.assertNotEqual(
      [group.prompt.id for group in other],
      [group.prompt.id for group in self.groups],
    )
    trained = {prompt.id for prompt in self.run_.prompts.train}
    self.assertContainsSubset([g.prompt.id for g in self.groups], trained)

  @parameterized.parameters(False, True)
  def test_by_the_definition(self, shaped):
    params = jax.tree.map(lambda leaf: 1.1 * leaf, self.run_.state.params)
    rewards = [[1.0, 0.0, None, 0.5], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.3, 1]]
    added = (lambda n: -0.1 * n) if shaped else (lambda n: 0.0 * n)
    self.enterContext(
      mock.patch.object(self.run_.judge, "_shaping", added if shaped else None)
    )
    terms = []
    for group, row in zip(self.groups, rewards, strict=True):
      counts = [reward is not None for reward in row]
      answers = [
        t for t, c in zip(group.trajectories, counts, strict=True) if c
      ]
      earned = np.array([reward for reward in row if reward is not None])
      earned = earned + added(np.array([t.num_sampled for t in answers]))
      spread = earned.std()
      a = (earned - earned.mean()) / spread if spread > 1e-6 else 0 * earned
      for advantage, trajectory in zip(a, answers, strict=True):
        mask = trajectory.loss_mask
        mu = np.sum(trajectory.behavior_logprobs[mask], dtype=np.float64)
        ratio = np.exp(self._logprob(trajectory, params) - mu)
        terms.append(advantage * (1 - min(ratio, 2.0)))
    found = self._compare(rewards, params)
    self.assertEqual(found.count, 11)
    np.testing.assert_allclose(found.mean, np.mean(terms), atol=1e-5)
    np.testing.assert_allclose(
      found.standard_error, np.std(terms, ddof=1) / np.sqrt(11), atol=1e-5
    )
    self.assertGreater(abs(found.mean), 1e-3)

  def test_a_sampler_that_agrees_has_no_gap(self):
    rewards = [[1.0, 0.0, 0.0, 0.0]] * 3
    found = self._compare(rewards, self.run_.state.params)
    self.assertLess(abs(found.mean), 1e-4)

  def test_no_answer_has_a_reward(self):
    found = self._compare([[None] * 4] * 3, self.run_.state.params)
    self.assertEqual(found, monotone.InferenceGap(0.0, 0.0, 0))
    self.assertFalse(rollback.Verdict(found, tolerance=0.0).rejected)
