"""A file of questions, from the config to rewards."""

import json
import pathlib

import numpy as np
from absl.testing import parameterized

from darl_jax import config as config_lib
from darl_jax.prompts import dataset
from darl_jax.rewards.pool import VerifierPool
from darl_jax.types import Finish, Prompt, Trajectory, TrajectoryGroup
from tests.fixtures import tiny_config

FIXTURE = pathlib.Path(__file__).parent / "fixtures/word_problems.jsonl"
PATIENCE_S = 60.0


def parse(box: str) -> config_lib.RunConfig:
  fields = tiny_config.get_config()
  fields.prompts.dataset = str(FIXTURE)
  fields.prompts.params = json.dumps({"verifier": "math", "box": box})
  fields.prompts.heldout_fraction = 0.3
  fields.prompts.max_tokens = 80
  fields.prompts.vocab_size = 300
  fields.rollout.max_response_tokens = 40
  fields.learner.row_tokens = 120
  return config_lib.parse(fields, extra_checks=(dataset.check_config,))


def answered(
  number: int, prompt: Prompt, responses: list[np.ndarray]
) -> TrajectoryGroup:
  """A group as the sampler delivers it."""
  trajectories = []
  for response in responses:
    tokens = np.concatenate([prompt.tokens, response]).astype(np.int32)
    zeros = np.zeros(len(tokens), np.int32)
    trajectories.append(
      Trajectory(
        prompt_id=prompt.id,
        group_id=number,
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) >= len(prompt.tokens),
        behavior_logprobs=zeros.astype(np.float32),
        behavior_entropy=zeros.astype(np.float32),
        policy_version=zeros,
        turn=zeros,
        finish=Finish.STOP,
      )
    )
  return TrajectoryGroup(number, prompt, tuple(trajectories))


class OwnDatasetTest(parameterized.TestCase):
  @parameterized.parameters("required", "preferred")
  def test_rewards(self, box):
    config = parse(box)
    loaded = dataset.load(config.prompts, seed=config.seed)
    encode = loaded.tokenizer.encode_response
    groups = []
    for number, prompt in enumerate((*loaded.train, *loaded.heldout)):
      right = prompt.reference["answer"]
      bare = right[len(r"\boxed{") : -1] if box == "required" else right
      texts = [right, rf"First 3, then $\boxed{{{bare}}}$.", bare, "99991"]
      groups.append(answered(number, prompt, [*map(encode, texts)]))
    delivered, errors = [], []
    with VerifierPool(
      config.rewards,
      task=dataset.verifier_task(
        config.prompts, seed=config.seed, rewards=config.rewards
      ),
      decode=loaded.tokenizer.decode,
      fail=errors.append,
    ) as pool:
      pool.submit(groups, deliver=delivered.append)
      pool.join(PATIENCE_S)
      counts = pool.metrics()
    self.assertEqual(errors, [])
    self.assertLen(delivered, 37)
    self.assertEqual(counts["scored"], 4 * 37)
    without_a_box = float(box == "preferred")
    for group in delivered:
      self.assertEqual(
        [trajectory.reward for trajectory in group.trajectories],
        [1.0, 1.0, without_a_box, 0.0],
        group.prompt.reference,
      )
