"""When alarms begin, go on, end, and end the run; and what they write down."""

import dataclasses
import json
import math
import os
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest, parameterized

from configs import darl
from darl_jax import config as config_lib
from darl_jax import types, watch

_DEFAULT = config_lib.parse(darl.get_config()).watch
_WINDOW = 4

# A step in which nothing is wrong.
_GOOD = {
  "train/skipped": 0.0,
  "train/non_finite": 0.0,
  "train/ess_fraction": 0.99,
  "parity/p95": 1e-5,
  "select/kept_length": 8.0,
  "select/pool_length": 8.0,
  "select/kept_advantage_bias": 0.5,
  "select/kept_advantage": 0.01,
  "select/pool_advantage": 0.0,
  "train/entropy": 0.9,
  "train/reward": 0.4,
  "train/grad_norm": 1.0,
}

# For each alarm what sets it off, a step that just does not, and what the
# message must name: the value, the bound and a field to try.
_CASES = dict(
  non_finite=(
    {"train/non_finite": 1.0, "train/skipped": 1.0},
    {"train/non_finite": 0.0},
    ("1 of the step's", "learner.learning_rate"),
  ),
  empty_minibatch=(
    {"train/skipped": 2.0, "train/non_finite": 1.0},
    {"train/skipped": 1.0, "train/non_finite": 1.0},
    ("1 of the step's", "learner.minibatches"),
  ),
  ess_collapse=(
    {"train/ess_fraction": 0.49},
    {"train/ess_fraction": 0.5},
    ("0.49", "watch.min_ess_fraction = 0.5", "replay.max_staleness"),
  ),
  parity_drift=(
    {"parity/p95": 0.011},
    {"parity/p95": 0.01},
    ("0.011 nats", "watch.max_parity_p95 = 0.01", "rollout.dtype"),
  ),
  length_bias=(
    {"select/kept_length": 6.0},
    {"select/kept_length": 6.5},
    ("prefers short", "watch.max_length_ratio = 1.25", "length_corrected"),
  ),
  advantage_bias=(
    {"select/kept_advantage_bias": 5.1, "select/kept_advantage": 0.35},
    {"select/kept_advantage_bias": -5.0},
    ("prefers good", "+0.35", "5.1 standard", "replay.reject_fraction"),
  ),
  entropy_collapse=(
    {"train/entropy": 0.019},
    {"train/entropy": 0.05},
    ("0.019 nats", "watch.min_entropy = 0.02", "objective.clip_high"),
  ),
  entropy_drop=(
    {"train/entropy": 0.044},
    {"train/entropy": 0.0451},
    ("0.044", "of the 0.9", "watch.min_entropy_fraction = 0.05"),
  ),
  gradient_spike=(
    {"train/grad_norm": 20.1},
    {"train/grad_norm": 20.0},
    ("20.1", "watch.max_grad_norm_ratio = 20", "learner.b2"),
  ),
)
# One step is enough for these.
_AT_ONCE = ("non_finite", "gradient_spike")


def make_watch(**changes) -> watch.Watch:
  fields = dict(window=_WINDOW, patience=3, repeat_every=5, stop_after=4)
  return watch.Watch(dataclasses.replace(_DEFAULT, **(fields | changes)))


def run(w: watch.Watch, *steps, start=1) -> list[tuple[int, str, str]]:
  """(step, name, kind) of all alarms, of good steps with these changes."""
  return [
    (step, alarm.name, alarm.kind)
    for step, changes in enumerate(steps, start)
    for alarm in w.observe(step, _GOOD | changes)
  ]


def warmed(**changes) -> watch.Watch:
  """A watch whose window is full of good steps 1 to 4."""
  w = make_watch(**changes)
  assert not run(w, *[{}] * _WINDOW)
  return w


class AlarmsTest(parameterized.TestCase):
  def test_each_is_known_by_its_name(self):
    self.assertEqual(tuple(watch._READINGS), config_lib.ALARMS)
    windowed = {"reward_zero", "reward_one", "samples_lost"}
    self.assertEqual({*_CASES, *windowed}, {*config_lib.ALARMS})

  @parameterized.parameters(*_CASES)
  def test_speaks_beyond_its_bound_and_nobody_else_does(self, name):
    bad, good, words = _CASES[name]
    w = warmed(patience=1)
    self.assertNotIn((5, name, "begins"), run(w, good, start=5))
    alarms = w.observe(6, _GOOD | bad)
    found = {alarm.name: alarm for alarm in alarms if alarm.kind == "begins"}
    # What falls below the absolute bound has dropped, too.
    also = {"entropy_drop"} if name == "entropy_collapse" else set()
    self.assertEqual(found.keys(), {name} | also)
    self.assertStartsWith(found[name].text, "step 6: ")
    self.assertRegex(found[name].text, r"[Tt]ry |Where it comes again")
    for word in words:
      self.assertIn(word, found[name].text)

  @parameterized.parameters(*_CASES)
  def test_what_is_not_a_number_is_beyond_every_bound(self, name):
    metric = next(iter(_CASES[name][0]))
    if name == "length_bias":
      metric = "select/pool_length"
    alarms = warmed(patience=1).observe(5, _GOOD | {metric: math.nan})
    self.assertIn(name, [alarm.name for alarm in alarms])

  def test_either_way_of_a_bias(self):
    w = warmed(patience=1)
    (alarm,) = w.observe(5, _GOOD | {"select/kept_length": 10.1})
    self.assertIn("prefers long", alarm.text)
    w = warmed(patience=1)
    (alarm,) = w.observe(5, _GOOD | {"select/kept_advantage_bias": -6.0})
    self.assertIn("prefers bad", alarm.text)

  @parameterized.parameters(*_GOOD)
  def test_any_metric_may_be_absent(self, name):
    w = warmed()
    metrics = {key: value for key, value in _GOOD.items() if key != name}
    self.assertEqual(w.observe(5, metrics), [])

  def test_nothing_of_nothing(self):
    self.assertEqual(make_watch().observe(1, {}), [])
    # Means over nothing, beside a count of 0.
    empty = {"select/kept_length": 0.0, "select/pool_length": 0.0}
    self.assertEqual(run(warmed(patience=1), empty), [])

  @parameterized.parameters(
    ("reward_zero", 0.0, 0.02, "prompts are too hard"),
    ("reward_one", 1.0, 0.98, "harder"),
  )
  def test_a_reward_plateau_is_a_mean_over_the_window(
    self, name, flat, nearly, words
  ):
    w = make_watch()
    bad = {"train/reward": flat}
    # Not before there is a window of it.
    self.assertEqual(run(w, *[bad] * 3), [])
    (alarm,) = w.observe(4, _GOOD | bad)
    self.assertEqual((alarm.name, alarm.kind), (name, "begins"))
    self.assertIn("the last 4 steps", alarm.text)
    self.assertIn(words, alarm.text)
    # One of four at a tenth from the plateau: the mean is beyond the margin.
    w = make_watch()
    once = {"train/reward": 0.1 if flat == 0 else 0.9}
    self.assertEqual(run(w, *[bad] * 3, once, bad), [])
    w = make_watch()
    self.assertEqual(run(w, *[{"train/reward": nearly}] * 9), [])

  def test_samples_lost_are_those_of_the_window(self):
    def fates(generated, dropped, expired):
      return {
        "fate/generated": generated,
        "fate/dropped_unused": dropped,
        "fate/expired_unused": expired,
      }

    w = make_watch()
    # 96 of 100 of each step are lost; the 1000 before them were all used.
    steps = [fates(1000 + 100 * i, 90 * i, 6 * i) for i in range(5)]
    self.assertEqual(run(w, *steps[:4]), [])
    (alarm,) = w.observe(5, _GOOD | steps[4])
    self.assertEqual((alarm.name, alarm.kind), ("samples_lost", "begins"))
    self.assertIn("0.96 of the samples of the last 4 steps", alarm.text)
    self.assertIn("watch.max_lost_fraction = 0.95", alarm.text)
    # Nothing was generated: nothing to say.
    w = make_watch()
    self.assertEqual(run(w, *[fates(100, 100, 0)] * 9), [])

  def test_entropy_is_compared_with_the_first_steps_alone(self):
    w = make_watch()
    slowly = [{"train/entropy": 0.9 * 0.8**i} for i in range(13)]
    self.assertEqual(run(w, *slowly), [])
    first = np.mean([0.9 * 0.8**i for i in range(4)])
    below = {"train/entropy": 0.049 * first}
    found = run(w, *[below] * 3, start=14)
    self.assertEqual(found, [(16, "entropy_drop", "begins")])

  def test_a_gradient_is_compared_with_the_steps_before_it(self):
    w = make_watch(max_grad_norm_ratio=3.0)
    norms = [{"train/grad_norm": 2.0**i} for i in range(8)]
    self.assertEqual(run(w, *norms[:4]), [])
    # The median of 1, 2, 4, 8 is 3.
    self.assertEqual(run(w, norms[4]), [(1, "gradient_spike", "begins")])

  def test_bounds_that_are_none(self):
    w = warmed(
      patience=1,
      min_ess_fraction=0.0,
      max_parity_p95=math.inf,
      max_length_ratio=math.inf,
      max_advantage_bias=math.inf,
      min_entropy=0.0,
      min_entropy_fraction=0.0,
      max_grad_norm_ratio=math.inf,
    )
    bad = {
      "train/ess_fraction": 0.0,
      "parity/p95": 1e9,
      "select/kept_length": 1e9,
      "select/kept_advantage_bias": 1e9,
      "train/entropy": 0.0,
      "train/grad_norm": 1e9,
    }
    self.assertEqual(run(w, bad, start=5), [])


class CourseTest(parameterized.TestCase):
  """The same for all: here by one that waits, and one that does not."""

  BAD = {"train/ess_fraction": 0.1}

  def test_begins_goes_on_and_ends(self):
    w = make_watch()
    bad = self.BAD
    # Twice in a row is not three times.
    self.assertEqual(run(w, bad, bad, {}, bad, bad), [])
    self.assertEqual(run(w, bad, start=6), [(6, "ess_collapse", "begins")])
    found = run(w, *[bad] * 12, start=7)
    self.assertEqual(
      found, [(11, "ess_collapse", "lasts"), (16, "ess_collapse", "lasts")]
    )
    # A step within its bound does not end it, and is not spoken of.
    found = run(w, {}, {}, bad, {}, {}, {}, start=19)
    self.assertEqual(
      found, [(21, "ess_collapse", "lasts"), (24, "ess_collapse", "ends")]
    )
    self.assertEqual(run(w, *[{}] * 9, start=25), [])
    # And it may begin again.
    found = run(w, *[bad] * 3, start=34)
    self.assertEqual(found, [(36, "ess_collapse", "begins")])

  def test_says_since_when(self):
    w = make_watch(patience=1, repeat_every=1)
    w.observe(7, _GOOD | self.BAD)
    (lasts,) = w.observe(8, _GOOD | self.BAD)
    self.assertStartsWith(lasts.text, "step 8, since step 7: the effective")
    (ends,) = w.observe(9, _GOOD)
    self.assertEqual(
      ends.text, "step 9: ess_collapse, since step 7, is over: 0.99 now."
    )

  @parameterized.parameters(*_AT_ONCE)
  def test_at_once_and_over_with_patience(self, name):
    w = warmed()
    found = run(w, _CASES[name][0], *[{}] * 5, start=5)
    self.assertEqual(found, [(5, name, "begins"), (8, name, "ends")])

  def test_only_those_named_stop_and_only_in_a_row(self):
    w = make_watch(stop_on=("non_finite",))
    bad, _, _ = _CASES["non_finite"]
    bad = bad | self.BAD

    def stops(step, changes):
      return [a.name for a in w.observe(step, _GOOD | changes) if a.stop]

    found = [stops(i, bad) for i in (1, 2, 3)]
    found += [stops(4, {})]
    found += [stops(i, bad) for i in (5, 6, 7, 8)]
    self.assertEqual(found, [[]] * 7 + [["non_finite"]])

  def test_a_stop_is_said_though_it_was_said_just_before(self):
    w = make_watch(stop_on=("ess_collapse",), repeat_every=1000)
    alarms = [w.observe(step, _GOOD | self.BAD) for step in range(1, 5)]
    self.assertEqual([len(found) for found in alarms], [0, 0, 1, 1])
    self.assertFalse(alarms[2][0].stop)
    self.assertTrue(alarms[3][0].stop)
    self.assertEndsWith(
      alarms[3][0].text,
      "The run ends: watch.stop_on has ess_collapse, and this is step 4 of it "
      "in a row.",
    )

  def test_by_default_what_is_not_finite_stops_after_ten(self):
    w = watch.Watch(_DEFAULT)
    bad = _GOOD | _CASES["non_finite"][0]
    stops = [any(a.stop for a in w.observe(step, bad)) for step in range(1, 11)]
    self.assertEqual(stops, [False] * 9 + [True])


class StateTest(parameterized.TestCase):
  def test_goes_on_as_if_never_stopped(self):
    rng = np.random.default_rng(0)
    steps = []
    for i in range(120):
      names = rng.choice(list(_CASES), size=2)
      changes = {k: v for n in names for k, v in _CASES[n][0].items()}
      reward = float(rng.integers(2)) if i % 40 < 20 else 0.0
      fates = {
        "fate/generated": 10.0 * i,
        "fate/dropped_unused": 10.0 * i if i > 40 else 0.0,
        "fate/expired_unused": 0.0,
      }
      chosen = changes if (i // 10) % 2 else {}
      steps.append(_GOOD | chosen | fates | {"train/reward": reward})
    whole, parts = make_watch(), make_watch()
    spoken = 0
    for step, metrics in enumerate(steps, 1):
      resumed = make_watch()
      resumed.restore(json.loads(json.dumps(parts.state(), allow_nan=False)))
      parts = resumed
      said = whole.observe(step, metrics)
      self.assertEqual(parts.observe(step, metrics), said)
      spoken += len(said)
    self.assertGreater(spoken, 40)
    self.assertEqual(parts.state(), whole.state())

  def test_what_is_not_finite_is_not_remembered(self):
    w = make_watch()
    names = ("train/reward", "train/entropy", "train/grad_norm")
    run(w, *[dict.fromkeys(names, math.nan)] * 3)
    run(w, *[dict.fromkeys(names, math.inf)] * 3)
    json.dumps(w.state(), allow_nan=False)

  def test_another_window_keeps_the_newest(self):
    w = make_watch(window=8)
    run(w, *[{"train/reward": i / 8} for i in range(8)])
    smaller = make_watch(window=2)
    smaller.restore(w.state())
    self.assertEqual(smaller.state()["rewards"], [6 / 8, 7 / 8])
    self.assertLen(smaller.state()["fates"], 0)

  @parameterized.parameters(
    ({},),
    ({"rewards": 3},),
    ({"status": {"ess_collapse": {"beyond": 1, "no": 2}}},),
    ({"status": {"unheard_of": {}}},),
    ({"fates": [[1]]},),
  )
  def test_refuses_what_is_no_state_and_keeps_its_own(self, changes):
    w = make_watch()
    run(w, *[self._bad()] * 4)
    before = w.state()
    state = make_watch().state() | changes if changes else {}
    with self.assertRaisesRegex(ValueError, "watch"):
      w.restore(state)
    self.assertEqual(w.state(), before)

  def _bad(self):
    return CourseTest.BAD


def make_batch(support=False) -> types.Batch:
  rng = np.random.default_rng(1)
  shape = types.Batch.abstract(
    (1, 2, 3, 4),
    max_versions=2,
    behavior_entropy=support,
    support_width=2 if support else None,
  )
  return types.Batch(
    **{
      field.name: None
      if (leaf := getattr(shape, field.name)) is None
      else rng.integers(0, 2, leaf.shape).astype(leaf.dtype)
      for field in dataclasses.fields(types.Batch)
    }
  )


class DumpTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_can_be_read_again(self, support):
    folder = self._folder()
    batch = make_batch(support)
    batch.advantages[0, 0, 0, 0] = np.nan
    metrics = {"train/loss": 0.5, "train/kl": math.nan, "train/x": -math.inf}
    said = watch.dump_batch(folder, 7, batch, metrics)
    self.assertEqual(said, f"the batch is in {folder}/step_7.npz.")
    with np.load(folder / "step_7.npz", allow_pickle=False) as arrays:
      read = types.Batch(**arrays)
    for field in dataclasses.fields(types.Batch):
      want, got = getattr(batch, field.name), getattr(read, field.name)
      if want is None:
        self.assertIsNone(got)
        continue
      self.assertEqual(got.dtype, want.dtype)
      np.testing.assert_array_equal(got, want)
    self.assertEqual(
      json.loads((folder / "step_7.json").read_text()),
      {"step": 7, "train/loss": 0.5, "train/kl": "nan", "train/x": "-inf"},
    )
    self.assertLen(os.listdir(folder), 2)

  def test_three_of_a_folder_and_a_repeated_step_is_none_more(self):
    folder = self._folder()
    said = [
      watch.dump_batch(folder, step, make_batch(), {})
      for step in (1, 2, 2, 3, 4, 5, 3)
    ]
    self.assertEqual(
      sorted(path.name for path in folder.glob("*.npz")),
      ["step_1.npz", "step_2.npz", "step_3.npz"],
    )
    self.assertIn("no more is kept", said[4])
    self.assertEndsWith(said[6], "step_3.npz.")

  def test_a_folder_that_cannot_be_written_is_said(self):
    taken = self._folder()
    taken.write_text("a file")
    said = watch.dump_batch(taken, 1, make_batch(), {})
    self.assertRegex(said, r"could not be written to .*step_1.npz: \w")

  def _folder(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    return pathlib.Path(folder.name) / "non_finite"


if __name__ == "__main__":
  absltest.main()
