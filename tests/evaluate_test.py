"""Greedy accuracy: of all that was asked, what was answered right."""

import dataclasses
import functools
import itertools
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax import config, evaluate
from darl_jax.models.transformer import Policy
from darl_jax.rollout.placement import Placement
from darl_jax.sharding import meshes
from darl_jax.types import PolicySnapshot, Prompt

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
get_config = runpy.run_path(str(FIXTURES / "tiny_config.py"))["get_config"]

PROMPTS = tuple(
  Prompt(f"p{i}", np.arange(1, 4 + i % 3, dtype=np.int32) * (i + 1), {})
  for i in range(9)
)


def make_config(
  *,
  num_prompts: int,
  data: int,
  most: int,
  temperature: float,
  top_k: int = 0,
  samples: int = 1,
) -> config.RunConfig:
  fields = get_config()
  fields.rollout.prompts_per_batch = -(-most // data) * data
  fields.mesh.rollout.data = data
  fields.evaluate.num_prompts = num_prompts
  fields.evaluate.temperature = temperature
  fields.evaluate.samples_per_prompt = samples
  fields.rollout.top_k = top_k
  return config.parse(fields)


@functools.cache
def answers(
  *,
  num_prompts: int,
  data: int = 1,
  most: int = 64,
  temperature: float = 0.0,
  top_k: int = 0,
  samples: int = 1,
) -> evaluate.Evaluation:
  """An evaluation in which group i scores i / 4, and the sixth one fails.

  Of several answers to a prompt the second and later ones score 0.
  """

  def reward(group, index):
    if group.group_id == 5:
      return None
    return group.group_id / 4 % 1.25 if index == 0 else 0.0

  def verify(groups):
    return [
      dataclasses.replace(
        group,
        trajectories=tuple(
          dataclasses.replace(trajectory, reward=reward(group, index))
          for index, trajectory in enumerate(group.trajectories)
        ),
      )
      for group in groups
    ]

  run_config = make_config(
    num_prompts=num_prompts,
    data=data,
    most=most,
    temperature=temperature,
    top_k=top_k,
    samples=samples,
  )
  policy = Policy(run_config.model, vocab_size=64)
  mesh = meshes.split_devices(run_config.mesh).rollout
  params = policy.init(jax.random.key(3))
  placement = Placement(policy, mesh=mesh, dtype=jnp.float32)
  snapshot = placement.place(
    PolicySnapshot(7, jax.tree.map(np.asarray, params))
  )
  evaluator = evaluate.Evaluator(
    policy,
    run_config,
    PROMPTS,
    mesh=mesh,
    max_prompt_tokens=8,
    stop_ids=(2,),
    pad_id=0,
    seed=0,
  )
  return evaluator.judge(verify(evaluator.answer(snapshot)))


class EvaluatorTest(parameterized.TestCase):
  def test_accuracy_counts_failures_as_wrong(self):
    found = answers(num_prompts=7)
    # Rewards 0, 1/4, 1/2, 3/4, 1, None, 1/4: one in seven is right.
    self.assertAlmostEqual(found.accuracy, 1 / 7)
    self.assertEqual(found.failures, 1)
    lengths = [group.trajectories[0].num_sampled for group in found.groups]
    self.assertAlmostEqual(found.mean_length, np.mean(lengths))
    self.assertEqual(
      found.metrics(),
      {
        "evaluate/accuracy": found.accuracy,
        "evaluate/failures": 1,
        "evaluate/mean_length": found.mean_length,
      },
    )

  @parameterized.parameters((2, 7), (6, 7), (24, 3))
  def test_several_answers_to_each_prompt(self, samples, num_prompts):
    found = answers(
      num_prompts=num_prompts, temperature=1.0, samples=samples, most=4
    )
    self.assertEqual(
      [group.prompt.id for group in found.groups],
      [prompt.id for prompt in PROMPTS[:num_prompts]],
    )
    for group in found.groups:
      self.assertLen(group.trajectories, samples)
    drawn = [tuple(t.response) for t in found.groups[0].trajectories]
    self.assertGreater(len(set(drawn)), 1)
    if num_prompts == 7:  # The one right answer is of the fifth prompt.
      self.assertAlmostEqual(found.accuracy, 1 / 7 / samples)
      wanted = {1: 1, 2: 2} if samples == 2 else {1: 1, 2: 2, 4: 4, 6: 6}
      for j, count in wanted.items():
        self.assertAlmostEqual(found.pass_at[j], count / samples / 7)
        self.assertEqual(
          found.metrics()[f"evaluate/pass@{j}"], found.pass_at[j]
        )
      self.assertLen(found.pass_at, len(wanted))

  def test_each_prompt_is_asked_once_in_order(self):
    found = answers(num_prompts=7)
    self.assertEqual(
      [group.prompt.id for group in found.groups],
      [prompt.id for prompt in PROMPTS[:7]],
    )
    for group in found.groups:
      self.assertLen(group.trajectories, 1)
      self.assertEqual(group.trajectories[0].begun_by, 7)

  def test_more_prompts_than_there_are(self):
    self.assertLen(answers(num_prompts=100).groups, len(PROMPTS))

  @parameterized.parameters(
    dict(most=2),  # Batches of 2, 2, 2 and 1.
    dict(data=4),  # One row more than there are prompts.
    dict(data=4, most=4),  # Two batches.
  )
  def test_batches_do_not_change_the_answers(self, **split):
    whole, parts = answers(num_prompts=7), answers(num_prompts=7, **split)
    self.assertLen(parts.groups, 7)
    self.assertEqual(parts.accuracy, whole.accuracy)
    for ours, theirs in zip(whole.groups, parts.groups, strict=True):
      self.assertEqual(ours.group_id, theirs.group_id)
      np.testing.assert_array_equal(
        ours.trajectories[0].tokens, theirs.trajectories[0].tokens
      )

  @parameterized.parameters(0.5, 2.0)
  def test_answers_are_sampled_where_asked(self, temperature):
    answered = [
      answer
      for group in answers(num_prompts=7, temperature=temperature).groups
      for answer in group.trajectories
    ]
    logprobs = np.concatenate(
      [answer.behavior_logprobs[answer.loss_mask] for answer in answered]
    )
    # Of the greedy answers all are above.
    self.assertLess(np.min(logprobs), -np.log(64))
    # Log-probs are of the tempered distribution.
    entropy = np.concatenate(
      [answer.behavior_entropy[answer.loss_mask] for answer in answered]
    )
    self.assertBetween(np.mean(-logprobs - entropy), -0.6, 0.6)

  def test_answers_are_truncated_as_the_rollouts(self):
    def entropy(**how):
      return max(
        np.max(answer.behavior_entropy)
        for group in answers(num_prompts=7, **how).groups
        for answer in group.trajectories
      )

    self.assertLessEqual(entropy(temperature=2.0, top_k=3), np.log(3) + 1e-6)
    self.assertGreater(entropy(temperature=2.0), np.log(3))
    # Greedy answers have nothing to truncate.
    greedy = answers(num_prompts=7, top_k=3)
    for ours, theirs in zip(
      greedy.groups, answers(num_prompts=7).groups, strict=True
    ):
      np.testing.assert_array_equal(
        ours.trajectories[0].tokens, theirs.trajectories[0].tokens
      )

  def test_answers_are_greedy(self):
    # Of a model with 64 tokens and random weights no sample would repeat.
    self.assertGreater(
      min(
        np.min(answer.behavior_logprobs[answer.loss_mask] + 1e-6)
        for group in answers(num_prompts=7).groups
        for answer in group.trajectories
      ),
      -np.log(64),
    )


class PassAtTest(parameterized.TestCase):
  @parameterized.parameters(1, 2, 3, 5)
  def test_is_the_mean_over_all_choices(self, j):
    right = np.random.default_rng(0).random((6, 5)) < 0.3
    want = np.mean(
      [
        any(row[list(chosen)])
        for row in right
        for chosen in itertools.combinations(range(5), j)
      ]
    )
    self.assertAlmostEqual(evaluate.pass_at(right, j), want)

  def test_ends(self):
    right = np.array([[True, False], [False, False], [True, True]])
    self.assertAlmostEqual(evaluate.pass_at(right, 1), right.mean())
    self.assertAlmostEqual(evaluate.pass_at(right, 2), 2 / 3)

  def test_more_choices_than_float64_can_count(self):
    # Of 2048 answers one is right, and half of them are chosen.
    right = np.arange(2048)[None] == 7
    self.assertAlmostEqual(evaluate.pass_at(right, 1024), 0.5)
