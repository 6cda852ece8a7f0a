"""What was recorded of an asynchronous run is done again, bit for bit."""

import json
import pathlib
import shutil
from unittest import mock

import numpy as np
from absl.testing import parameterized

from configs import darl
from darl_jax import config, loop, metrics
from darl_jax.replay import recording
from tests.fixtures import runs

compile_once = runs.compile_once


def make_config(**changes) -> config.RunConfig:
  defaults = dict(num_steps=8, warm_start__steps=2, replay__max_uses=2)
  return runs.make_config(darl, **defaults | changes)


def record(run_config, workdir=None, **keywords) -> runs.Ended:
  workdir = workdir or runs.new_workdir()
  return runs.execute(run_config, workdir, record=True, **keywords)


def schedule_of(ended: runs.Ended, step=0) -> recording.Schedule:
  path = ended.run.workdir / f"schedule_{step:08d}.jsonl"
  return recording.read_schedule(path)


def replay(schedule, **keywords) -> runs.Ended:
  """In another process: its verifier would answer otherwise."""
  return runs.execute(
    config.parse(schedule.header["config"]),
    runs.new_workdir(),
    verifier="Constant",
    replay=schedule,
    **keywords,
  )


def learned(workdir: pathlib.Path) -> list[dict]:
  """What the learner did at each step."""
  return [
    {k: v for k, v in row.items() if k.startswith(("train/loss", "select/"))}
    for row in metrics.read_metrics(workdir)
  ]


class ReplayTest(parameterized.TestCase):
  def _assert_same(self, again: runs.Ended, ended: runs.Ended):
    self.assertIsNone(ended.error)
    self.assertIsNone(again.error)
    for ours, theirs in zip(
      runs.leaves(again.run.state), runs.leaves(ended.run.state), strict=True
    ):
      np.testing.assert_array_equal(ours, theirs)
    self.assertEqual(again.summary["trained"], ended.summary["trained"])
    self.assertEqual(again.summary["mean_age"], ended.summary["mean_age"])

  @parameterized.parameters(
    {},
    # Weights change in the middle of responses.
    dict(
      rollout__max_response_tokens=12,
      rollout__chunk_tokens=1,
      rollout__slots=5,
      learner__row_tokens=28,
    ),
    dict(rollout__slots=6, replay__trajectory_bytes=3000),
    dict(replay__max_metric=1e-9, replay__min_batch=4),
  )
  def test_bit_for_bit(self, **changes):
    ended = record(make_config(**changes))
    again = replay(schedule_of(ended))
    self._assert_same(again, ended)
    self.assertEqual(learned(again.run.workdir), learned(ended.run.workdir))
    self.assertTrue(any("bit for bit as recorded" in t for t in again.said))

  def test_long_answers(self):
    """Rewards are recorded as they were verified, and shaped once."""

    def note(verified, trained):
      def prepare(run):
        mark = run.ring.mark_trained

        def add(group):
          for index, each in enumerate(group.trajectories):
            verified[group.group_id, index] = each.reward

        def mark_trained(entries, pool):
          trained.update((e.id, e.trajectory.reward) for e in entries)
          mark(entries, pool)

        run.rewards.add, run.ring.mark_trained = add, mark_trained

      return prepare

    then, now = ({}, {}), ({}, {})
    changes = dict(
      rewards__overlong_penalty=0.5,
      rewards__overlong_buffer_tokens=4,
      replay__drop_overlong=True,
    )
    ended = record(make_config(**changes), prepare=note(*then))
    again = replay(schedule_of(ended), prepare=note(*now))
    self._assert_same(again, ended)
    self.assertEqual(learned(again.run.workdir), learned(ended.run.workdir))
    self.assertGreater(ended.summary["dropped_reasons"]["overlong"], 0)
    # Some may have come after the last step, of which nothing is done again.
    self.assertContainsSubset(now[0].items(), then[0].items())
    self.assertEqual(now[1], then[1])
    lost = [then[0][key] - reward for key, reward in then[1].items()]
    self.assertBetween(min(lost), 0, 0.5)
    self.assertBetween(max(lost), 0.1, 0.5)

  def test_a_process_that_went_on(self):
    workdir = runs.new_workdir()
    run_config = make_config()
    record(run_config, workdir, prepare=runs.interrupt_at(4))
    # Kept, since the rest of the run would replace it.
    held = workdir / "checkpoints" / "step_00000004"
    with mock.patch.object(loop.Checkpoints, "_superseded", lambda *_: ()):
      ended = record(run_config, workdir)
    self.assertTrue(held.exists())
    again = replay(schedule_of(ended, step=4))
    self._assert_same(again, ended)
    shutil.rmtree(held)
    with self.assertRaisesRegex(config.ConfigError, "begins at step 4, from"):
      replay(schedule_of(ended, step=4))

  def test_a_folder_that_holds_a_run(self):
    ended = record(make_config())
    before = (ended.run.workdir / "metrics.jsonl").read_text()
    with self.assertRaisesRegex(config.ConfigError, "replay would overwrite"):
      runs.execute(
        ended.run.config, ended.run.workdir, replay=schedule_of(ended)
      )
    after = (ended.run.workdir / "metrics.jsonl").read_text()
    self.assertEqual(after, before)

  def test_a_process_that_was_killed(self):
    ended = record(make_config(), prepare=runs.kill_at(3))
    path = ended.run.workdir / "schedule_00000000.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    again = replay(schedule_of(ended))
    self.assertIsInstance(again.error, recording.ScheduleEnded)

  @parameterized.parameters(
    ("begin", -1, "their tokens"),
    ("push", -1, "the parameters"),
    ("take", 1, "the pool's size"),
    ("latest", 1, "the newest version"),
  )
  def test_what_differs_is_named(self, kind, value, says):
    ended = record(make_config())
    schedule = schedule_of(ended)
    numbers = [i for i, event in enumerate(schedule.events) if event[0] == kind]
    number = numbers[len(numbers) // 2]
    schedule.events[number][value] += 1
    again = replay(schedule)
    self.assertIsInstance(again.error, recording.ReplayDiverged)
    self.assertRegex(
      str(again.error), f"^event {number + 1} of the schedule: {says} is "
    )

  def test_no_schedule(self):
    path = runs.new_workdir()
    for text in ("", "[]\n", '{"format": 0}\n', "{}\n", "{\n"):
      path.write_text(text)
      with self.assertRaisesRegex(config.ConfigError, "is no schedule"):
        recording.read_schedule(path)

  def test_every_event_is_on_the_disk_at_once(self):
    path = runs.new_workdir()
    writer = recording.ScheduleWriter(path, {"config": {}})
    writer.write(["push", 0, 1])
    self.assertEqual(
      [json.loads(line) for line in path.read_text().splitlines()],
      [{"format": recording.FORMAT, "config": {}}, ["push", 0, 1]],
    )
    writer.close()
