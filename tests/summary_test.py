"""What a run says of itself."""

import dataclasses
import json
import threading

import numpy as np
from absl.testing import parameterized

from darl_jax import summary
from darl_jax.types import Finish, Prompt, Trajectory, TrajectoryGroup


def make_group(rewards, *, lengths=None, finish=Finish.STOP) -> TrajectoryGroup:
  """One trajectory per reward, each of a one-token prompt."""
  prompt = Prompt("p", np.array([1], np.int32), {})
  trajectories = []
  for index, reward in enumerate(rewards):
    length = 1 + (lengths[index] if lengths else 2)
    zeros = np.zeros(length, np.int32)
    trajectories.append(
      Trajectory(
        prompt_id="p",
        group_id=0,
        tokens=zeros,
        loss_mask=np.arange(length) >= 1,
        behavior_logprobs=zeros.astype(np.float32),
        behavior_entropy=zeros.astype(np.float32),
        policy_version=zeros,
        turn=zeros,
        finish=finish,
        reward=reward,
      )
    )
  return TrajectoryGroup(0, prompt, tuple(trajectories))


@dataclasses.dataclass(frozen=True)
class _Entry:
  age: int


@dataclasses.dataclass(frozen=True)
class _Accounting:
  """As the ring's, as far as it is read here."""

  expired = {"stale": 2}
  dropped = {"bytes": 1}

  def counts(self):
    return {"generated": 10, "trained": 7}


@dataclasses.dataclass(frozen=True)
class _Occupancy:
  trained_tokens: int = 600


class _Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


ACTOR = {
  "rollout/prompts_drawn": 12,
  "rollout/prompts_in_flight": 2,
  "rollout/tokens": 900,
}


class RewardMeterTest(parameterized.TestCase):
  def test_means_over_samples(self):
    meter = summary.RewardMeter()
    meter.add(make_group([1.0, 0.5, None], lengths=[1, 2, 6]))
    meter.add(make_group([0.0], lengths=[3], finish=Finish.LENGTH))
    # A failed verification is no reward, but the sample has a length.
    self.assertEqual(
      meter.drain(),
      {
        "train/reward": 0.5,
        "train/accuracy": 1 / 3,
        "train/truncated": 0.25,
        "train/response_tokens": 3.0,
      },
    )

  def test_drained_is_forgotten(self):
    meter = summary.RewardMeter()
    meter.add(make_group([1.0]))
    meter.drain()
    self.assertEmpty(meter.drain())
    meter.add(make_group([0.0]))
    self.assertEqual(meter.drain()["train/reward"], 0.0)

  def test_only_failures(self):
    meter = summary.RewardMeter()
    meter.add(make_group([None, None]))
    self.assertEqual(
      set(meter.drain()), {"train/truncated", "train/response_tokens"}
    )

  def test_nothing_is_lost_between_threads(self):
    meter = summary.RewardMeter()
    group = make_group([1.0, 0.0])
    adds, workers = 400, 4

    def add():
      for _ in range(adds):
        meter.add(group)

    threads = [threading.Thread(target=add) for _ in range(workers)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    sums = meter._sums.tolist()
    total = adds * workers
    self.assertEqual(sums, [total, total, 0, 4 * total])


class SummaryTest(parameterized.TestCase):
  def _to_dict(self, told, waits=None):
    waits = waits or {"wait/learner": 0.25, "wait/rollout": 0.5}
    return told.to_dict(_Accounting(), _Occupancy(), ACTOR, {"x": 1}, waits)

  def test_nothing_happened(self):
    told = self._to_dict(summary.Summary())
    self.assertEqual(told["status"], "running")
    self.assertIsNone(told["accuracy_before"])
    self.assertIsNone(told["accuracy_after"])
    self.assertIsNone(told["accuracy_best"])
    self.assertEqual(told["steps"], 0)
    self.assertEqual(told["train_seconds"], 0)
    self.assertEqual(told["mean_age"], 0)
    json.dumps(told, allow_nan=False)

  def test_accuracies(self):
    told = summary.Summary()
    for step, accuracy in ((0, 0.25), (5, 0.75), (10, 0.5)):
      told.evaluated(step, accuracy)
    told = self._to_dict(told)
    self.assertEqual(told["accuracy_before"], 0.25)
    self.assertEqual(told["accuracy_after"], 0.5)
    self.assertEqual(told["accuracy_best"], 0.75)
    self.assertEqual(told["accuracies"], [[0, 0.25], [5, 0.75], [10, 0.5]])

  def test_steps_and_ages(self):
    told = summary.Summary()
    self.assertEqual(
      told.stepped(1, [_Entry(0), _Entry(3)]),
      {"ring/mean_age": 1.5, "ring/max_age": 3.0},
    )
    self.assertEqual(
      told.stepped(2, [_Entry(1)]), {"ring/mean_age": 1.0, "ring/max_age": 1.0}
    )
    told = self._to_dict(told)
    self.assertEqual(told["steps"], 2)
    self.assertAlmostEqual(told["mean_age"], 4 / 3)
    self.assertEqual(told["max_age"], 3)

  def test_what_the_stages_say(self):
    told = self._to_dict(summary.Summary())
    self.assertEqual(told["generated"], 10)
    self.assertEqual(told["trained"], 7)
    self.assertEqual(told["expired_reasons"], {"stale": 2})
    self.assertEqual(told["dropped_reasons"], {"bytes": 1})
    self.assertEqual(told["prompts_drawn"], 12)
    self.assertEqual(told["prompts_in_flight"], 2)
    self.assertEqual(told["verifier"], {"x": 1})
    self.assertEqual(told["learner_wait_fraction"], 0.25)
    self.assertEqual(told["rollout_wait_fraction"], 0.5)

  def test_the_clock_runs_from_start_to_first_end(self):
    clock = _Clock()
    told = summary.Summary(clock=clock)
    told.training_ended()  # Never started.
    self.assertEqual(told.train_seconds, 0)
    clock.now = 3.0
    told.training_started()
    clock.now = 5.0
    self.assertEqual(told.train_seconds, 2.0)
    told.training_ended()
    clock.now = 9.0
    told.training_ended()
    self.assertEqual(told.train_seconds, 2.0)
    told = self._to_dict(told)
    self.assertEqual((told["seconds"], told["train_seconds"]), (9.0, 2.0))

  def test_speeds_and_waits_are_of_the_training_stage(self):
    clock = _Clock()
    told = summary.Summary(clock=clock)
    clock.now = 100.0
    told.training_started()
    clock.now = 108.0
    told.training_ended()
    told.learner_waited(1.0)
    told.learner_waited(3.0)
    waits = told.waits(6.0)
    self.assertAlmostEqual(waits["wait/learner"], 0.5)
    self.assertAlmostEqual(waits["wait/rollout"], 0.75)
    self.assertEqual(told.waits(72.0)["wait/rollout"], 1.0)
    speeds = told.speeds(_Occupancy(), ACTOR)
    self.assertAlmostEqual(speeds["speed/learner_tokens_per_s"], 75.0)
    self.assertAlmostEqual(speeds["speed/rollout_tokens_per_s"], 112.5)
