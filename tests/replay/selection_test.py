"""Metrics, selection and its report, on pools made by hand."""

import collections
import dataclasses
import math

import numpy as np
from absl.testing import absltest, parameterized

from darl_jax import config as config_lib
from darl_jax.replay import selection

INF = float("inf")


def make_config(**changes) -> config_lib.ReplayConfig:
  fields = dict(
    num_snapshots=4,
    max_staleness=8,
    max_uses=1,
    drop_overlong=False,
    metric="second_moment",
    selection_mode="keep_best",
    keep_fraction=0.5,
    reject_fraction=0.25,
    max_metric=INF,
    min_batch=2,
    snapshot_bytes=1,
    trajectory_bytes=1,
    timeout_s=1.0,
  )
  return config_lib.ReplayConfig(**{**fields, **changes})


def make_stats(n: int, **columns) -> selection.PoolStatistics:
  columns = {name: np.array(column) for name, column in columns.items()}
  count = columns.pop("count", np.full(n, 4))
  fields = {
    field.name: np.zeros(n)
    for field in dataclasses.fields(selection.PoolStatistics)
  }
  return selection.PoolStatistics(
    **{**fields, "count": count, "length": count, **columns}
  )


def select(stats, *, batch_size=100, seed=0, **changes) -> list[int]:
  return selection.select(
    stats,
    make_config(**changes),
    batch_size=batch_size,
    rng=np.random.default_rng(seed),
  ).tolist()


class StatisticsTest(parameterized.TestCase):
  def test_refuses_columns_of_different_lengths(self):
    with self.assertRaisesRegex(ValueError, "every field must be"):
      make_stats(3, age=[1, 2])

  def test_refuses_scores_in_another_order(self):
    with self.assertRaisesRegex(ValueError, "3.* tokens in trajectory 1.* 4"):
      make_stats(2, count=[4, 3], length=[4, 4])


class MismatchTest(parameterized.TestCase):
  @parameterized.named_parameters(
    # A single token has no variance; its second moment stands in.
    ("variance", "variance", [0.5, 9.0, 0.25]),
    ("second_moment", "second_moment", [2.0, 9.0, 1.0]),
    ("harmful", "harmful", [0.1, 0.2, 0.3]),
    ("entropy_scaled", "entropy_scaled", [7.0, 6.0, 5.0]),
    # m2_pool = (8 * 2 + 1 * 9 + 3 * 1) / 12 = 7/3.
    (
      "length_corrected",
      "length_corrected",
      [
        (2 / (7 / 3) - 1) * 2,
        (9 / (7 / 3) - 1) * math.sqrt(0.5),
        (1 / (7 / 3) - 1) * math.sqrt(1.5),
      ],
    ),
  )
  def test_by_hand(self, metric, expected):
    stats = make_stats(
      4,
      count=[8, 1, 3, 0],
      variance=[0.5, 0.0, 0.25, 0.0],
      second_moment=[2.0, 9.0, 1.0, 0.0],
      harmful=[0.1, 0.2, 0.3, 0.0],
      entropy_scaled=[7.0, 6.0, 5.0, 0.0],
    )
    values = selection.mismatch(stats, metric=metric)
    np.testing.assert_allclose(values, [*expected, INF], rtol=1e-12)
    self.assertEqual(values.dtype, np.float64)

  @parameterized.parameters(
    "variance",
    "second_moment",
    "harmful",
    "entropy_scaled",
    "length_corrected",
  )
  def test_what_is_no_number_matches_worst(self, metric):
    bad = [np.nan, INF, 1.0, 2.0]
    stats = make_stats(
      4,
      variance=bad,
      second_moment=bad,
      harmful=bad,
      entropy_scaled=bad,
    )
    values = selection.mismatch(stats, metric=metric)
    np.testing.assert_array_equal(np.isinf(values), [True, True, False, False])
    self.assertLess(values[2], values[3])

  def test_a_pool_without_mismatch(self):
    stats = make_stats(3, count=[4, 2, 0])
    np.testing.assert_array_equal(
      selection.mismatch(stats, metric="length_corrected"), [0, 0, INF]
    )

  def test_refuses_another_metric(self):
    with self.assertRaisesRegex(ValueError, "'sum'"):
      selection.mismatch(make_stats(1), metric="sum")


class SelectTest(parameterized.TestCase):
  METRIC = (5.0, 1.0, 4.0, 2.0, 3.0, 0.5, 9.0, 7.0)

  def setUp(self):
    super().setUp()
    self.stats = make_stats(
      8, second_moment=self.METRIC, age=[0, 1, 2, 3, 3, 2, 1, 0]
    )

  @parameterized.parameters(
    (0.5, 100, [5, 1, 3, 4]),
    (0.51, 100, [5, 1, 3, 4, 2]),  # Of 4.08 rounded up.
    (0.5, 3, [5, 1, 3]),  # The best of them.
    (1.0, 100, [5, 1, 3, 4, 2, 0, 7, 6]),
    (0.01, 100, [5]),
  )
  def test_keep_best(self, fraction, batch_size, expected):
    self.assertEqual(
      select(self.stats, keep_fraction=fraction, batch_size=batch_size),
      expected,
    )

  @parameterized.parameters((0.25, {6, 7}), (0.37, {6, 7}), (0.0, set()))
  def test_reject_worst_drops_the_worst(self, fraction, dropped):
    kept = select(
      self.stats, selection_mode="reject_worst", reject_fraction=fraction
    )
    self.assertCountEqual(kept, set(range(8)) - dropped)

  @parameterized.parameters(
    # Row 36 of the user reports: the proportions are those of the spec.
    dict(mode="reject_worst", reject=0.0, eligible=range(8)),
    dict(mode="reject_worst", reject=0.25, eligible=range(6)),
    dict(mode="random", reject=0.25, eligible=range(8)),
  )
  def test_draws_uniformly(self, mode, reject, eligible):
    # By rank, so that eligible ones are 0 .. .
    stats = make_stats(8, second_moment=sorted(self.METRIC))
    rng = np.random.default_rng(0)
    config = make_config(selection_mode=mode, reject_fraction=reject)
    draws, size = 4000, 3
    singles, pairs = collections.Counter(), collections.Counter()
    for _ in range(draws):
      kept = selection.select(stats, config, batch_size=size, rng=rng).tolist()
      self.assertLen(set(kept), size)
      singles.update(kept)
      pairs.update([(kept[0], kept[1])])  # The order is drawn too.
    n = len(eligible)
    self.assertEqual(set(singles), set(eligible))
    rate = size / n
    slack = 5 * math.sqrt(draws * rate * (1 - rate))
    for index in eligible:
      self.assertBetween(
        singles[index], draws * rate - slack, draws * rate + slack
      )
    self.assertLen(pairs, n * (n - 1))

  def test_newest(self):
    kept = select(self.stats, selection_mode="newest", batch_size=4)
    self.assertCountEqual(kept, [0, 1, 6, 7])
    self.assertCountEqual(kept[:2], [0, 7])

  @parameterized.parameters("newest", "keep_best")
  def test_ties_are_drawn(self, mode):
    stats = make_stats(6)
    drawn = collections.Counter(
      select(
        stats,
        selection_mode=mode,
        batch_size=1,
        seed=seed,
        keep_fraction=1.0,
      )[0]
      for seed in range(300)
    )
    self.assertLen(drawn, 6)
    self.assertLess(max(drawn.values()), 90)

  def test_the_newest_control_does_not_prefer_the_matched(self):
    stats = make_stats(6, second_moment=range(6))
    drawn = collections.Counter(
      select(stats, selection_mode="newest", batch_size=1, seed=seed)[0]
      for seed in range(300)
    )
    self.assertLen(drawn, 6)
    self.assertLess(max(drawn.values()), 90)

  def test_ties_at_the_cut_of_reject_worst_are_drawn(self):
    drawn = collections.Counter()
    for seed in range(200):
      drawn.update(
        select(
          make_stats(4),
          selection_mode="reject_worst",
          reject_fraction=0.5,
          seed=seed,
        )
      )
    self.assertEqual(drawn.total(), 400)
    self.assertBetween(min(drawn.values()), 65, 100)

  @parameterized.parameters("keep_best", "reject_worst", "random", "newest")
  def test_same_seed_same_draw(self, mode):
    draws = {
      tuple(select(self.stats, selection_mode=mode, batch_size=3, seed=seed))
      for seed in (1, 1, 1)
    }
    self.assertLen(draws, 1)

  @parameterized.parameters("keep_best", "reject_worst")
  def test_max_metric_bounds(self, mode):
    kept = select(
      self.stats, selection_mode=mode, keep_fraction=1.0, max_metric=2.0
    )
    self.assertCountEqual(kept, [1, 3, 5])

  @parameterized.product(
    mode=["random", "newest"],
    bound=[
      dict(max_metric=2.0),
      dict(reject_fraction=0.5),
      dict(reject_fraction=0.5, max_metric=1.0),
    ],
  )
  def test_controls_take_as_many_but_not_the_same(self, mode, bound):
    fields = dict(reject_fraction=0.0) | bound
    size = len(select(self.stats, selection_mode="reject_worst", **fields))
    self.assertBetween(size, 1, 7)
    drawn = [
      select(self.stats, selection_mode=mode, seed=seed, **fields)
      for seed in range(200)
    ]
    self.assertEqual({len(kept) for kept in drawn}, {size})
    taken = {index for kept in drawn for index in kept}
    if mode == "random":
      self.assertLen(taken, 8)
    else:
      oldest = max(self.stats.age[list(taken)])
      others = set(range(8)) - taken
      self.assertTrue(all(self.stats.age[i] >= oldest for i in others))

  @parameterized.parameters("keep_best", "reject_worst", "random", "newest")
  def test_without_tokens_none_is_taken(self, mode):
    stats = make_stats(4, count=[0, 2, 0, 2], second_moment=[0, 1, np.nan, 2])
    kept = select(
      stats, selection_mode=mode, keep_fraction=1.0, reject_fraction=0.0
    )
    self.assertCountEqual(kept, [1, 3])

  def test_fractions_count_those_with_a_metric(self):
    stats = make_stats(8, count=[2] * 4 + [0] * 4)
    self.assertLen(select(stats, keep_fraction=0.5), 2)

  def test_an_empty_pool(self):
    self.assertEqual(select(make_stats(0)), [])

  @parameterized.product(
    mode=["keep_best", "reject_worst", "random", "newest"],
    fraction=[0.07, 0.1, 0.25, 1 / 3, 0.5, 0.9],
  )
  def test_pool_needed_is_the_smallest(self, mode, fraction):
    config = dict(
      selection_mode=mode, keep_fraction=fraction, reject_fraction=fraction
    )
    for min_batch in (1, 2, 7, 30):
      needed = selection.pool_needed(make_config(**config), min_batch)
      self.assertGreaterEqual(
        len(select(make_stats(needed), **config)), min_batch
      )
      self.assertLess(len(select(make_stats(needed - 1), **config)), min_batch)

  def test_a_whole_number_is_not_rounded_up(self):
    # 0.07 * 100 is 7.000000000000001 in floating point, 0.29 * 100 28.99...
    self.assertLen(select(make_stats(100), keep_fraction=0.07), 7)
    kept = select(
      make_stats(100), selection_mode="reject_worst", reject_fraction=0.29
    )
    self.assertLen(kept, 71)


class ReportTest(parameterized.TestCase):
  def test_by_hand(self):
    stats = make_stats(
      4,
      count=[2, 4, 6, 0],
      reward=[1.0, 0.0, 0.0, 1.0],
      advantage=[1.0, -1.0, -1.0, 1.0],
      entropy=[0.1, 0.2, 0.3, 0.4],
      age=[0, 1, 2, 3],
      second_moment=[1.0, 2.0, 3.0, 9.0],
    )
    metrics = selection.report(stats, np.array([1, 0]), metric="second_moment")
    expected = dict(
      kept_count=2, kept_length=3, kept_reward=0.5, kept_advantage=0,
      kept_entropy=0.15, kept_age=0.5, kept_metric=1.5,
      dropped_count=2, dropped_length=3, dropped_reward=0.5,
      dropped_advantage=0, dropped_entropy=0.35, dropped_age=2.5,
      dropped_metric=3, pool_count=4, pool_length=3, pool_reward=0.5,
      pool_advantage=0, pool_entropy=0.25, pool_age=1.5, pool_metric=2,
      pool_excluded=1, kept_advantage_bias=0,
    )  # fmt: skip
    self.assertEqual(set(metrics), set(expected))
    for name, value in expected.items():
      self.assertAlmostEqual(metrics[name], value, msg=name)

  def test_advantage_bias_is_in_errors_of_a_uniform_draw(self):
    # The finding of the toy: +0.35 kept of a pool around 0 is far out.
    advantage = np.where(np.arange(400) % 2, 1.0, -1.0)
    kept = np.concatenate([np.arange(1, 271, 2), np.arange(0, 130, 2)])
    metrics = selection.report(
      make_stats(400, advantage=advantage), kept, metric="variance"
    )
    self.assertAlmostEqual(metrics["kept_advantage"], 0.35)
    error = math.sqrt(1 / 200 * 200 / 399)
    self.assertAlmostEqual(metrics["kept_advantage_bias"], 0.35 / error)

  def test_uniform_draws_spread_by_one_standard_error(self):
    rng = np.random.default_rng(0)
    stats = make_stats(60, advantage=rng.normal(size=60))
    biases = [
      selection.report(stats, rng.permutation(60)[:40], metric="variance")[
        "kept_advantage_bias"
      ]
      for _ in range(2000)
    ]
    self.assertAlmostEqual(np.std(biases), 1.0, delta=0.06)

  @parameterized.parameters(([],), (range(4),))
  def test_nothing_or_everything_kept(self, kept):
    stats = make_stats(4, count=[1, 2, 3, 4], advantage=[1.0, 2.0, 3.0, -6.0])
    metrics = selection.report(stats, np.array(kept, int), metric="variance")
    self.assertTrue(all(math.isfinite(value) for value in metrics.values()))
    self.assertEqual(metrics["kept_advantage_bias"], 0.0)


if __name__ == "__main__":
  absltest.main()
