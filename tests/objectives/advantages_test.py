"""Advantages from the rewards of a group."""

import numpy as np
from absl.testing import parameterized

from darl_jax.objectives import advantages

_KINDS = ("group", "group_centered", "rloo")


def _advantages(rewards, valid=None, *, kind="group", tolerance=1e-6):
  rewards = np.asarray(rewards)
  valid = np.ones(rewards.shape, bool) if valid is None else np.asarray(valid)
  return advantages.group_advantages(
    rewards, valid, kind=kind, tolerance=tolerance
  )


def _transcribed(rewards, valid, kind, tolerance):
  """Method 3, sample by sample, in float64."""
  result = np.zeros(rewards.shape)
  for q, row in enumerate(rewards):
    chosen = [i for i in range(len(row)) if valid[q, i] and np.isfinite(row[i])]
    values = [float(row[i]) for i in chosen]
    if not values or max(values) - min(values) <= tolerance:
      continue
    mean = sum(values) / len(values)
    std = (sum((r - mean) ** 2 for r in values) / len(values)) ** 0.5
    for i, r in zip(chosen, values, strict=True):
      others = (sum(values) - r) / (len(values) - 1)
      result[q, i] = dict(
        group=(r - mean) / std, group_centered=r - mean, rloo=r - others
      )[kind]
  return result


class GroupAdvantagesTest(parameterized.TestCase):
  @parameterized.parameters(
    ("group", [np.sqrt(3), -1 / np.sqrt(3)]),
    ("group_centered", [0.75, -0.25]),
    ("rloo", [1.0, -1 / 3]),
  )
  def test_by_hand(self, kind, expected):
    right, wrong = expected
    got, dead = _advantages([[0.0, 1.0, 0.0, 0.0]], kind=kind)
    np.testing.assert_allclose(got, [[wrong, right, wrong, wrong]], rtol=1e-6)
    self.assertEqual(got.dtype, np.float32)
    np.testing.assert_array_equal(dead, [False])

  @parameterized.product(
    kind=_KINDS, shape=[(1, 1), (1, 2), (6, 8), (40, 5), (0, 4), (3, 0)]
  )
  def test_equals_transcription(self, kind, shape):
    for seed in range(5):
      rng = np.random.default_rng(seed)
      rewards = rng.choice([0.0, 0.125, 0.5, 1.0], size=shape)
      rewards += (seed % 2) * rng.normal(size=shape)
      rewards[rng.random(shape) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
      valid = rng.random(shape) > 0.2
      got, dead = _advantages(rewards, valid, kind=kind)
      expected = _transcribed(rewards, valid, kind, 1e-6)
      np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
      np.testing.assert_array_equal(dead, ~np.any(expected != 0, axis=1))

  @parameterized.product(
    kind=_KINDS,
    reward=[0.0, 0.1, 1 / 3, 1e-30, -7.7, 1e6 + 0.1],
    group=[1, 2, 3, 7, 8],
  )
  def test_equal_rewards_give_exactly_zero(self, kind, reward, group):
    # The mean of equal rewards need not be that reward, and std is then a
    # residue; max - min is not.
    for dtype in (np.float32, np.float64):
      got, dead = _advantages(
        np.full((2, group), reward, dtype), kind=kind, tolerance=0.0
      )
      np.testing.assert_array_equal(got, np.zeros((2, group)))
      np.testing.assert_array_equal(dead, [True, True])

  @parameterized.parameters(*_KINDS)
  def test_tolerance_is_of_the_spread(self, kind):
    # 0.1 + 0.2 is not 0.3; 1 + 1e-7 is 1 within a tolerance of 1e-6.
    rewards = [[0.3, 0.1 + 0.2, 0.3], [1.0, 1.0 + 1e-7, 1.0], [0.0, 0.5, 0.25]]
    got, dead = _advantages(rewards, kind=kind, tolerance=1e-6)
    np.testing.assert_array_equal(got[:2], np.zeros((2, 3)))
    np.testing.assert_array_equal(dead, [True, True, False])
    # At the tolerance: dead. Above it: not.
    _, dead = _advantages(rewards, kind=kind, tolerance=0.5)
    np.testing.assert_array_equal(dead, [True, True, True])
    _, dead = _advantages(rewards, kind=kind, tolerance=0.499)
    np.testing.assert_array_equal(dead, [True, True, False])
    _, dead = _advantages(rewards, kind=kind, tolerance=0.0)
    np.testing.assert_array_equal(dead, [False, False, False])

  @parameterized.parameters(*_KINDS)
  def test_tiny_spread_above_the_tolerance_is_well_defined(self, kind):
    got, _ = _advantages([[5e-324, 0.0]], kind=kind, tolerance=0.0)
    self.assertTrue(np.all(np.isfinite(got)))
    if kind == "group":
      np.testing.assert_allclose(got, [[1.0, -1.0]])

  @parameterized.product(kind=_KINDS, bad=[np.nan, np.inf, -np.inf])
  def test_non_finite_and_invalid_are_left_out(self, kind, bad):
    expected, _ = _advantages([[0.0, 1.0, 0.5]], kind=kind)
    rewards = [[0.0, bad, 1.0, 0.5, 1.0]]
    valid = [[True, True, True, True, False]]
    got, dead = _advantages(rewards, valid, kind=kind)
    np.testing.assert_array_equal(got[:, [0, 2, 3]], expected)
    np.testing.assert_array_equal(got[:, [1, 4]], [[0.0, 0.0]])
    np.testing.assert_array_equal(dead, [False])

  @parameterized.parameters(*_KINDS)
  def test_nothing_to_compare_with(self, kind):
    got, dead = _advantages(
      [[1.0, 0.0], [np.nan, 1.0], [np.nan, np.inf]],
      [[True, False], [True, True], [True, True]],
      kind=kind,
      tolerance=0.0,
    )
    np.testing.assert_array_equal(got, np.zeros((3, 2)))
    np.testing.assert_array_equal(dead, [True, True, True])

  @parameterized.parameters(*_KINDS)
  def test_permutation_invariant(self, kind):
    rng = np.random.default_rng(0)
    rewards = rng.random((5, 6))
    rewards[1] = 0.5
    valid = rng.random((5, 6)) > 0.3
    got, dead = _advantages(rewards, valid, kind=kind)
    groups = rng.permutation(5)
    order = rng.permuted(np.tile(np.arange(6), (5, 1)), axis=1)
    permute = lambda x: np.take_along_axis(x, order, 1)[groups]  # noqa: E731
    permuted, permuted_dead = _advantages(
      permute(rewards), permute(valid), kind=kind
    )
    np.testing.assert_allclose(permuted, permute(got), rtol=1e-6)
    np.testing.assert_array_equal(permuted_dead, dead[groups])

  @parameterized.parameters(*_KINDS)
  def test_groups_do_not_mix(self, kind):
    # An incomplete group is normalised by its own count, and its neighbours
    # do not notice.
    rewards = np.array([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]])
    valid = np.array([[True, True, False, False], [True] * 4])
    got, _ = _advantages(rewards, valid, kind=kind)
    for q in range(2):
      alone, _ = _advantages(rewards[q : q + 1, valid[q]], kind=kind)
      np.testing.assert_array_equal(got[q, valid[q]], alone[0])

  @parameterized.parameters(*_KINDS)
  def test_a_common_reward_does_not_matter(self, kind):
    rewards = np.random.default_rng(0).choice([0.0, 0.25, 1.0], size=(8, 6))
    got, _ = _advantages(rewards, kind=kind)
    shifted, _ = _advantages(rewards + 2.0**50, kind=kind)
    np.testing.assert_array_equal(shifted, got)

  def test_group_has_unit_deviation(self):
    rewards = np.random.default_rng(0).random((4, 6))
    got, _ = _advantages(rewards)
    np.testing.assert_allclose(got.mean(1), np.zeros(4), atol=1e-7)
    np.testing.assert_allclose(got.std(1), np.ones(4), rtol=1e-6)

  def test_arguments_are_left_alone(self):
    rewards = np.array([[0.0, np.nan, 1.0]])
    valid = np.ones((1, 3), bool)
    _advantages(rewards, valid)
    np.testing.assert_array_equal(rewards, [[0.0, np.nan, 1.0]])
    np.testing.assert_array_equal(valid, np.ones((1, 3), bool))

  @parameterized.parameters(
    dict(kind="grpo"), dict(tolerance=-1.0), dict(tolerance=np.nan)
  )
  def test_refuses(self, **wrong):
    (name,) = wrong
    with self.assertRaisesRegex(ValueError, name):
      _advantages([[0.0, 1.0]], **wrong)

  def test_refuses_shapes(self):
    with self.assertRaisesRegex(ValueError, "Q, G"):
      _advantages([[0.0, 1.0]], [[True]])
    with self.assertRaisesRegex(ValueError, "Q, G"):
      _advantages([0.0, 1.0])
