"""Seconds from costs, by hand."""

from absl.testing import parameterized

from darl_jax.planner import chips, estimate
from darl_jax.planner.hlo_cost import Collective, Cost, Kernel

SHAPE = (4, 4, 4)
CUBE = [[x, y, z] for x in range(4) for y in range(4) for z in range(4)]
V5P, V6E = chips.CHIPS["v5p"], chips.CHIPS["v6e"]


def of(cost: Cost, chip: chips.Chip = V5P) -> estimate.Estimate:
  return estimate.estimate(cost, chip, CUBE, SHAPE)


def collective(kind: str, group, *, count: float, size: float) -> Cost:
  entry = Collective(kind, "", tuple(group), count, size)
  return Cost(collectives={(kind,): entry})


class EstimateTest(parameterized.TestCase):
  def test_the_compilers_cycles(self):
    cost = Cost(
      flops=459e12,
      bytes=2765e8,
      cycles=3.5e9,
      unestimated_bytes=2765e8,
      kernels={"k": Kernel("k", "carried", 1, 459e11, 2765e6)},
    )
    result = of(cost)
    self.assertEqual(result.method, "compiler")
    self.assertAlmostEqual(result.compute, 1.0)
    self.assertAlmostEqual(result.memory, 0.1)
    # Two seconds of cycles, a kernel bound by FLOPs, bytes without estimate.
    self.assertAlmostEqual(result.kernels, 0.1)
    self.assertAlmostEqual(result.busy, 2.0 + 0.1 + 0.1)

  def test_never_below_the_roofline(self):
    self.assertAlmostEqual(of(Cost(flops=459e12, cycles=1)).busy, 1.0)
    self.assertAlmostEqual(of(Cost(bytes=2765e9, cycles=1)).busy, 1.0)

  def test_the_roofline_where_the_clock_is_not_known(self):
    result = of(Cost(flops=918e12, bytes=2 * 1638e9, cycles=1e15), V6E)
    self.assertEqual(result.method, "roofline")
    self.assertAlmostEqual(result.busy, 2.0)

  def test_both_bounds_of_collectives(self):
    # The whole cube, three rings of two links each.
    cost = collective("all-gather", range(64), count=1, size=1200e9)
    cost.flops = 459e12
    result = of(cost)
    self.assertAlmostEqual(result.collectives, 2.0)
    self.assertAlmostEqual(result.hidden, 2.0)
    self.assertAlmostEqual(result.seconds, 3.0)

  @parameterized.parameters(
    # One ring of four: half way is two hops, twice for an all-reduce.
    ("all-gather", range(4), 2e-6),
    ("all-reduce", range(4), 4e-6),
    ("collective-permute", range(4), 1e-6),
    # A whole cube: two hops along each axis.
    ("all-reduce", range(64), 12e-6),
  )
  def test_small_messages_take_their_hops(self, kind, group, seconds):
    cost = collective(kind, group, count=1000, size=8)
    self.assertAlmostEqual(of(cost).collectives, 1000 * seconds)

  def test_a_permutation_uses_one_link(self):
    # Coordinates change along z first: the first four are a ring.
    cost = collective("collective-permute", range(4), count=1, size=200e9)
    self.assertAlmostEqual(of(cost).collectives, 2.0)
