import hashlib
import random

import reasoning_gym
from absl.testing import parameterized

from darl_jax.rewards.reasoning_gym import ReasoningGymVerifier

PARAMS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def make_verifier(**changes) -> ReasoningGymVerifier:
  arguments = dict(dataset="chain_sum", params=PARAMS, seed=3, num_items=50)
  return ReasoningGymVerifier(**(arguments | changes))


def reference(index: int, *, seed: int = 3) -> dict:
  item = reasoning_gym.create_dataset(
    "chain_sum", seed=seed, size=50, **PARAMS
  )[index]
  digest = hashlib.sha256(item["question"].encode()).hexdigest()
  return {"index": index, "id": digest[:32], "answer": item["answer"]}


class ReasoningGymVerifierTest(parameterized.TestCase):
  def test_the_reference_answer_is_right(self):
    verifier = make_verifier()
    for index in range(50):
      expected = reference(index)
      self.assertEqual(verifier.score(expected["answer"], expected), 1.0)

  def test_another_answer_is_not(self):
    verifier = make_verifier()
    expected = reference(7)
    wrong = str(int(expected["answer"]) + 1)
    self.assertLess(verifier.score(wrong, expected), 0.99)
    self.assertLess(verifier.score("", expected), 0.99)

  def test_partial_credit_is_its_scorers_own(self):
    verifier = make_verifier()
    expected = reference(7)
    self.assertGreater(verifier.score(expected["answer"] + "0", expected), 0)

  def test_the_reference_answer_is_not_what_counts(self):
    expected = reference(7) | {"answer": "999"}
    self.assertLess(make_verifier().score("999", expected), 0.99)

  @parameterized.parameters(
    dict(seed=4),
    dict(params=PARAMS | {"max_digits": 2}),
    dict(dataset="gcd", params={}),
  )
  def test_another_question_is_never_scored(self, **changes):
    verifier = make_verifier(**changes)
    with self.assertRaisesRegex(ValueError, "asks another question"):
      verifier.score("1", reference(7))

  def test_scores_alike_each_time(self):
    # An item is remembered: scoring must not have changed it.
    verifier = make_verifier(dataset="list_functions", params={})
    dataset = reasoning_gym.create_dataset("list_functions", seed=3, size=50)
    random.seed(7)
    item = dataset[7]
    digest = hashlib.sha256(item["question"].encode()).hexdigest()
    expected = {"index": 7, "id": digest[:32]}
    for _ in range(3):
      self.assertEqual(verifier.score(item["answer"], expected), 1.0)
