"""MIPU's estimator and decision."""

import numpy as np
from absl.testing import parameterized

from darl_jax.objectives import monotone


class InferenceGapTest(parameterized.TestCase):
  def test_by_hand(self):
    # Terms 1 (1 - 0.5), -1 (1 - 2), 2 (1 - 3), the last capped from 9.
    gap = monotone.inference_gap(
      np.array([1.0, -1.0, 2.0]), np.log([0.5, 2.0, 9.0]), cap=3.0
    )
    terms = np.array([0.5, 1.0, -4.0])
    np.testing.assert_allclose(gap.mean, terms.mean())
    np.testing.assert_allclose(
      gap.standard_error, terms.std(ddof=1) / np.sqrt(3)
    )
    self.assertEqual(gap.count, 3)

  def test_is_the_difference_of_returns(self):
    # Over all answers exactly, with advantages of mean 0 under mu.
    rng = np.random.default_rng(0)
    mu, pi = rng.dirichlet(np.ones(5), size=2)
    a = rng.normal(size=5)
    a -= mu @ a
    count = 200_000
    draws = np.repeat(np.arange(5), np.round(mu * count).astype(int))
    gap = monotone.inference_gap(a[draws], np.log(pi / mu)[draws], cap=np.inf)
    np.testing.assert_allclose(gap.mean, mu @ a - pi @ a, atol=1e-4)

  def test_degenerate(self):
    empty = monotone.inference_gap(np.zeros(0), np.zeros(0), cap=2.0)
    self.assertEqual(empty, monotone.InferenceGap(0.0, 0.0, 0))
    one = monotone.inference_gap(np.array([1.0]), np.array([1e4]), cap=np.inf)
    self.assertTrue(np.isfinite(one.mean))
    self.assertEqual(one.standard_error, 0.0)
    same = monotone.inference_gap(np.ones(4), np.zeros(4), cap=1.0)
    self.assertEqual(same.mean, 0.0)

  def test_refused(self):
    with self.assertRaisesRegex(ValueError, "NaN"):
      monotone.inference_gap(np.array([np.nan]), np.zeros(1), cap=1.0)
    with self.assertRaisesRegex(ValueError, "must both be"):
      monotone.inference_gap(np.zeros(2), np.zeros(1), cap=1.0)


class AcceptsTest(parameterized.TestCase):
  @parameterized.parameters(
    (0.1, 0.0, True), (0.0, 0.0, True), (-0.1, 0.0, False),
    (-0.1, 0.1, True), (-0.2, 0.1, False),
  )  # fmt: skip
  def test_bound(self, mean, c, want):
    gap = monotone.InferenceGap(mean, 0.01, 10)
    self.assertEqual(monotone.accepts(gap, tolerance=c), want)

  def test_schedule(self):
    c = [monotone.tolerance(t, first=0.4, last=0.0, steps=4) for t in range(6)]
    np.testing.assert_allclose(c, [0.4, 0.3, 0.2, 0.1, 0.0, 0.0], atol=1e-12)
    self.assertEqual(monotone.tolerance(0, first=1.0, last=0.5, steps=0), 1.0)
