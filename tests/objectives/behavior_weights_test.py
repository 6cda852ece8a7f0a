"""How much each behavior policy counts in a step."""

import dataclasses

import numpy as np
from absl.testing import parameterized

from darl_jax.objectives import behavior_weights

_WEIGHTINGS = ("pooled", "ess_token", "moment", "inverse_variance")
_Statistics = behavior_weights.BehaviorStatistics


def _weights(stats, weighting, *, weight_cap=2.0, kappa=1.0):
  return behavior_weights.behavior_weights(
    stats, weighting=weighting, weight_cap=weight_cap, kappa=kappa
  )


def _token_weights(
  stats, weighting, *, weight_cap=2.0, kappa=1.0, dead_tokens=0
):
  return behavior_weights.token_weights(
    stats,
    weighting=weighting,
    weight_cap=weight_cap,
    kappa=kappa,
    dead_tokens=dead_tokens,
  )


def _transcribed(ell, index, num_behaviors, weighting, weight_cap, kappa):
  """Method 2.3, version by version."""
  ell = np.clip(np.asarray(ell, np.float64), -20, 20)
  n, raw = np.zeros(num_behaviors), np.zeros(num_behaviors)
  for v in range(num_behaviors):
    own = ell[index == v]
    n[v] = len(own)
    if len(own) == 0:
      continue
    ratio = np.exp(own)
    raw[v] = dict(
      pooled=len(own),
      ess_token=ratio.sum() ** 2 / (ratio**2).sum(),
      moment=len(own) / (1 + kappa * np.mean(own**2)),
      inverse_variance=len(own) / (1 + kappa * np.var(own)),
    )[weighting]
  alpha = np.zeros(num_behaviors)
  for v in range(num_behaviors):
    if n[v] > 0:
      relative = (raw[v] / n[v]) / (raw.sum() / n.sum())
      alpha[v] = n[v] * min(weight_cap, relative)
  return alpha / alpha.sum() if n.sum() else alpha


class StatisticsTest(parameterized.TestCase):
  def test_by_hand(self):
    stats = _Statistics.from_tokens(
      np.log(np.array([2.0, 0.5, 1.0], np.float32)), np.array([2, 2, 0]), 4
    )
    two = np.log(2.0)
    for name, expected in dict(
      tokens=[1, 0, 2, 0],
      ratio=[1, 0, 2.5, 0],
      ratio_squared=[1, 0, 4.25, 0],
      ell=[0, 0, 0, 0],
      ell_squared=[0, 0, 2 * two**2, 0],
    ).items():
      field = getattr(stats, name)
      self.assertEqual(field.dtype, np.float64)
      np.testing.assert_allclose(field, expected, rtol=1e-6, atol=1e-7)

  def test_parts_add_up(self):
    rng = np.random.default_rng(0)
    ell, index = rng.normal(size=50), rng.integers(3, size=50)
    whole = _Statistics.from_tokens(ell, index, 3)
    parts = [
      _Statistics.from_tokens(ell[cut], index[cut], 3)
      for cut in (slice(0, 7), slice(7, 50))
    ]
    for field in dataclasses.fields(_Statistics):
      total = sum(getattr(part, field.name) for part in parts)
      np.testing.assert_allclose(total, getattr(whole, field.name), rtol=1e-12)

  def test_extremes_are_clamped(self):
    stats = _Statistics.from_tokens(
      np.array([1e4, -1e4, np.inf, -np.inf]), np.array([0, 1, 0, 1]), 2
    )
    np.testing.assert_allclose(stats.ell, [40, -40])
    np.testing.assert_allclose(stats.ratio, 2 * np.exp([20.0, -20.0]))

  def test_no_tokens(self):
    stats = _Statistics.from_tokens(np.zeros(0), np.zeros(0, np.int32), 3)
    np.testing.assert_array_equal(stats.tokens, np.zeros(3))

  def test_refuses(self):
    with self.assertRaisesRegex(ValueError, "1 of 2 log-ratios are NaN"):
      _Statistics.from_tokens(np.array([0.0, np.nan]), np.array([0, 0]), 1)
    for outside in (-1, 3):
      with self.assertRaisesRegex(ValueError, f"behavior_index {outside}"):
        _Statistics.from_tokens(np.zeros(2), np.array([0, outside]), 3)
    with self.assertRaisesRegex(ValueError, "must both be"):
      _Statistics.from_tokens(np.zeros(2), np.array([0]), 3)


class BehaviorWeightsTest(parameterized.TestCase):
  @parameterized.parameters(
    # Version 0: 3 tokens at ratio 1. Version 1: ratios 2 and 1/2.
    ("pooled", 1.0),
    ("ess_token", 2.5**2 / 4.25 / 2),
    ("moment", 1 / (1 + np.log(2.0) ** 2)),
    ("inverse_variance", 1 / (1 + np.log(2.0) ** 2)),
  )
  def test_by_hand(self, weighting, per_token):
    ell = np.log([1, 1, 1, 2, 0.5])
    stats = _Statistics.from_tokens(ell, np.array([0, 0, 0, 1, 1]), 2)
    expected = np.array([3, 2 * per_token]) / (3 + 2 * per_token)
    np.testing.assert_allclose(_weights(stats, weighting), expected)

  def test_moment_sees_a_shift_and_inverse_variance_does_not(self):
    stats = _Statistics.from_tokens(
      np.repeat([0.0, 1.0], 4), np.repeat([0, 1], 4), 2
    )
    np.testing.assert_allclose(_weights(stats, "moment"), [2 / 3, 1 / 3])
    np.testing.assert_allclose(_weights(stats, "inverse_variance"), [0.5, 0.5])

  @parameterized.product(
    weighting=_WEIGHTINGS, weight_cap=[1.0, 1.2, 2.0, np.inf], kappa=[0.5, 3.0]
  )
  def test_equals_transcription(self, weighting, weight_cap, kappa):
    for seed in range(12):
      rng = np.random.default_rng(seed)
      count = int(rng.choice([0, 1, 2, 30, 300]))
      index = rng.integers(5, size=count) % rng.integers(1, 6)
      # Some versions match, some are far off, in mean and in spread.
      shift, scale = rng.normal(size=5), rng.choice([0.0, 0.1, 1.0, 9.0], 5)
      ell = shift[index] + scale[index] * rng.normal(size=count)
      stats = _Statistics.from_tokens(ell, index, 5)
      np.testing.assert_allclose(
        _weights(stats, weighting, weight_cap=weight_cap, kappa=kappa),
        _transcribed(ell, index, 5, weighting, weight_cap, kappa),
        rtol=1e-9,
        atol=1e-12,
      )

  @parameterized.parameters(*_WEIGHTINGS)
  def test_equals_pooled_at_ratio_one(self, weighting):
    index = np.array([0, 0, 0, 2, 3, 3])
    stats = _Statistics.from_tokens(np.zeros(6), index, 5)
    np.testing.assert_array_equal(
      _weights(stats, weighting), np.array([3, 0, 1, 2, 0]) / 6
    )
    np.testing.assert_allclose(
      _token_weights(stats, weighting), np.array([1, 0, 1, 1, 0]) / 6
    )

  def test_cap_is_relative_to_pooled_with_one_renormalisation(self):
    # One token at ratio 1 among 99 far off: uncapped it would get 0.5 or more.
    ell = np.concatenate([[0.0], np.tile([3.0, -3.0], 50)[:99]])
    index = np.concatenate([[0], np.ones(99, int)])
    stats = _Statistics.from_tokens(ell, index, 2)
    self.assertGreater(_weights(stats, "moment", weight_cap=np.inf)[0], 0.08)
    # Capped: 1 * 2 against 99 * relative, then normalised once.
    relative = (1 / 10) / ((1 + 99 / 10) / 100)
    got = _weights(stats, "moment", weight_cap=2.0)
    np.testing.assert_allclose(got[0], 2 / (2 + 99 * relative))
    # The sum of 1 comes last, so the cap may be exceeded by what it freed.
    self.assertGreater(got[0] / (1 / 100), 2.0)

  @parameterized.product(
    weighting=_WEIGHTINGS, ell=[0.0, 20.0, -20.0, 1e4, -1e4, np.inf]
  )
  def test_extremes_are_finite_and_sum_to_one(self, weighting, ell):
    stats = _Statistics.from_tokens(
      np.array([0.0, 0.1, ell, -ell, ell]), np.array([0, 0, 1, 1, 2]), 4
    )
    got = _weights(stats, weighting)
    self.assertTrue(np.all(np.isfinite(got)))
    np.testing.assert_allclose(got.sum(), 1.0)
    self.assertTrue(np.all(got[:3] > 0))
    self.assertEqual(got[3], 0.0)

  @parameterized.parameters(*_WEIGHTINGS)
  def test_no_tokens_at_all(self, weighting):
    stats = _Statistics.from_tokens(np.zeros(0), np.zeros(0, int), 3)
    for dead_tokens in (0, 7):
      np.testing.assert_array_equal(
        _token_weights(stats, weighting, dead_tokens=dead_tokens), np.zeros(3)
      )
    np.testing.assert_array_equal(_weights(stats, weighting), np.zeros(3))

  @parameterized.product(weighting=_WEIGHTINGS, dead_tokens=[0, 13])
  def test_token_weights_add_up(self, weighting, dead_tokens):
    rng = np.random.default_rng(0)
    index = rng.integers(3, size=40)
    stats = _Statistics.from_tokens(rng.normal(size=40), index, 4)
    got = _token_weights(stats, weighting, dead_tokens=dead_tokens)
    # Summed over tokens: all of the step, or what the dead groups leave of it.
    np.testing.assert_allclose(got[index].sum(), 40 / (40 + dead_tokens))
    np.testing.assert_allclose(
      got[:3] * stats.tokens[:3] * (40 + dead_tokens) / 40,
      _weights(stats, weighting)[:3],
    )
    if weighting == "pooled":
      np.testing.assert_allclose(got[:3], 1 / (40 + dead_tokens))

  @parameterized.parameters(
    dict(weighting="ess"),
    dict(weight_cap=0.5),
    dict(weight_cap=np.nan),
    dict(kappa=-1.0),
    dict(kappa=np.inf),
    dict(dead_tokens=-1),
  )
  def test_refuses(self, **wrong):
    (name,) = wrong
    stats = _Statistics.from_tokens(np.zeros(3), np.zeros(3, int), 1)
    with self.assertRaisesRegex(ValueError, name):
      _token_weights(stats, **{"weighting": "moment", **wrong})


class TrajectoryTokenWeightsTest(parameterized.TestCase):
  @parameterized.parameters(0, 5)
  def test_by_hand(self, dead_tokens):
    # Trajectories of 3, 1 and 1 tokens, in any order.
    got = behavior_weights.trajectory_token_weights(
      np.array([7, 2, 7, 4, 7]), dead_tokens=dead_tokens
    )
    want = np.array([1 / 9, 1 / 3, 1 / 9, 1 / 3, 1 / 9])
    np.testing.assert_allclose(got, want * 5 / (5 + dead_tokens))

  def test_one_token_each_is_pooled(self):
    stats = _Statistics.from_tokens(np.zeros(6), np.zeros(6, int), 1)
    got = behavior_weights.trajectory_token_weights(np.arange(6), dead_tokens=4)
    want = _token_weights(stats, "pooled", dead_tokens=4)
    np.testing.assert_allclose(got, np.repeat(want, 6))

  def test_nothing(self):
    got = behavior_weights.trajectory_token_weights(
      np.zeros(0, int), dead_tokens=4
    )
    self.assertEqual(got.shape, (0,))

  def test_refuses(self):
    with self.assertRaisesRegex(ValueError, "dead_tokens = -1"):
      behavior_weights.trajectory_token_weights(np.zeros(3), dead_tokens=-1)
