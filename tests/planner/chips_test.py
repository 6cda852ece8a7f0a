"""Figures of the chips, against the compiler's devices and by hand."""

import pytest
from absl.testing import parameterized

from darl_jax.config import ConfigError
from darl_jax.planner import chips, topology

GB = 10**9


def line(count: int, axis: int = 0, axes: int = 3) -> list[list[int]]:
  """Coordinates along one axis."""
  return [[i if a == axis else 0 for a in range(axes)] for i in range(count)]


class ChipsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("v4", "v4:2x2x1"),
    ("v5e", "v5e:2x2"),
    ("v5p", "v5p:2x2x1"),
    ("v6e", "v6e:2x2"),
    ("tpu7x", "tpu7x:2x2x1"),
  )
  def test_is_what_the_compiler_compiles_for(self, name, topology_name):
    try:
      devices = topology.devices(topology_name)
    except ConfigError as error:
      pytest.skip(str(error))
    chip = chips.of_device(devices[0].device_kind)
    self.assertEqual(chip.name, name)
    self.assertLen(devices, 4 * chip.devices)
    self.assertEqual(chip.hosts(len(devices)), 1)
    self.assertEqual(chip.hosts(len(devices) + 1), 2)

  def test_an_unknown_device(self):
    with self.assertRaises(KeyError):
      chips.of_device("cpu")

  @parameterized.parameters(
    ("v4", 137.5e12, 270 * GB / 2),
    ("v5e", 197e12, 200 * GB),
    ("v5p", 459e12, 600 * GB),
    ("v6e", 918e12, 400 * GB),
    ("tpu7x", 1153.5e12, 600 * GB / 2),
  )
  def test_figures_of_a_device(self, name, flops, ici):
    chip = chips.CHIPS[name]
    self.assertEqual(chip.flops_per_s, flops)
    self.assertEqual(chip.ici_bytes_per_s, ici)

  @parameterized.parameters("v4", "v5p")
  def test_clocks_follow_from_the_peak(self, name):
    chip = chips.CHIPS[name]
    by_units = 8 * 128 * 128 * 2 * chip.clock_hz / chip.devices
    self.assertLess(abs(by_units / chip.flops_per_s - 1), 0.01)

  @parameterized.parameters(
    # A whole axis of a cube is a ring of two links, its half way two hops.
    ("v5p", line(4), (4, 4, 4), 200 * GB, 2),
    # Part of an axis is a line, and so is an axis of a slice below a cube.
    ("v5p", line(4), (8, 4, 4), 100 * GB, 3),
    ("v5p", line(2), (2, 2, 1), 100 * GB, 1),
    ("v5e", line(4, axes=2), (4, 4), 50 * GB, 3),
    ("v5e", line(16, axes=2), (16, 16), 100 * GB, 8),
    # Two axes carry twice as much.
    (
      "v5p",
      [[x, y, 0] for x in range(4) for y in range(4)],
      (4, 4, 4),
      400 * GB,
      4,
    ),
    # Both cores of a chip share its links; among themselves they use none.
    ("tpu7x", line(4), (4, 4, 4), 100 * GB, 2),
    ("tpu7x", [[0, 0, 0], [0, 0, 0]], (4, 4, 4), 3690 * GB, 1),
  )
  def test_rings(self, name, group, shape, rate, hops):
    self.assertEqual(chips.CHIPS[name].ring(group, shape), (rate, hops))

  @parameterized.parameters(
    (line(4), (4, 4, 4), 100 * GB, 1),
    # The way back of a line passes over all of it.
    (line(4), (8, 4, 4), 100 * GB / 3, 3),
    # The next one in a row of rows is two hops away.
    (
      [[x, y, 0] for y in range(4) for x in range(4)],
      (4, 4, 4),
      100 * GB / 2,
      2,
    ),
  )
  def test_passing_to_the_next(self, group, shape, rate, hops):
    chip = chips.CHIPS["v5p"]
    self.assertEqual(chip.passing(group, shape), (rate, hops))

  def test_slice_shape(self):
    self.assertEqual(chips.slice_shape("v5p:4x8x16"), (4, 8, 16))
