from absl.testing import parameterized

from darl_jax.rewards import math_units


class ReadTest(parameterized.TestCase):
  @parameterized.parameters(
    ("", ""),
    ("%", "%"),
    ("percent", "%"),
    (r"\text{ percent}", "%"),
    ("cm", "cm"),
    (r"\text{ centimeters}", "cm"),
    (r"\text{cm}^2", "cm^2"),
    (r"\text{cm}^{3}", "cm^3"),
    ("square meters", "m^2"),
    (r"\text{cubic feet}", "ft^3"),
    (r"\text{m}", "m"),
    ("km/h", "km/h"),
    ("miles per hour", "mi/h"),
    ("mph", "mi/h"),
    (r"\text{m/s}^2", "m/s^2"),
    ("°", "°"),
    ("degrees", "°"),
    (r"°\text{C}", "°c"),
    ("degrees Celsius", "°c"),
    ("dollars", "$"),
    ("USD", "$"),
    ("€", "€"),
    (r"\text{ red apples}", ""),
    ("apples", ""),
  )
  def test_a_unit(self, tail, unit):
    self.assertEqual(math_units.read(tail), unit)

  @parameterized.parameters(
    "m",  # A variable.
    "xy",
    "+ 1",
    r"\text{ or 43}",
    r"\text{ or }",
    "is wrong",
    "thirds",
    "hundredths",
    r"\sqrt{2}",
    "cm 5",
    "apples " * 20,
  )
  def test_no_unit(self, tail):
    self.assertIsNone(math_units.read(tail))
