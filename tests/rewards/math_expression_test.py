import time
from fractions import Fraction

import math_verify
import mpmath
import sympy
from absl.testing import parameterized

from darl_jax.rewards import math_expression
from darl_jax.rewards.math_expression import UnreadableError


def equal(one: str, two: str) -> bool:
  return math_expression.equal(
    math_expression.parse(one), math_expression.parse(two)
  )


def proportional(one: str, two: str, *, positive: bool = False) -> bool:
  return math_expression.proportional(
    *(
      tuple(math_expression.parse(side) for side in text.split("="))
      for text in (one, two)
    ),
    positive=positive,
  )


class ParserTest(parameterized.TestCase):
  """What its parser gets wrong, and that we do not."""

  def test_it_takes_no_difference_between_cases(self):
    (parsed,) = math_verify.parse("$R - r$", parsing_timeout=None)[:1]
    self.assertEqual(sympy.simplify(parsed), 0)
    self.assertFalse(equal("R - r", "0"))
    self.assertTrue(equal("(R-r)(R+r)", "R^2-r^2"))
    self.assertTrue(equal("R_1 + r_1", "r_1 + R_1"))
    self.assertFalse(equal("R_1", "R_2"))

  def test_it_drops_degrees_in_functions(self):
    (parsed,) = math_verify.parse(r"$\cos 60^\circ$", parsing_timeout=None)[:1]
    self.assertEqual(parsed, sympy.cos(60))
    self.assertTrue(equal(r"\cos 60°", r"\frac{1}{2}"))
    self.assertFalse(equal(r"\cos 60", r"\cos 60°"))

  @parameterized.parameters("12 34", "x'", r"2516_8", "1{,}000x")
  def test_what_it_misreads_it_does_not_see(self, text):
    with self.assertRaises(UnreadableError):
      math_expression.parse(text)

  @parameterized.parameters(
    r"\binom{1000000}{500000}",
    r"\det\begin{pmatrix}1\end{pmatrix}",
    r"\sum_{k=1}^{9} k",
    r"\int x dx",
    "(" * 9 + "1" + ")+1" * 9,
    "x^x^x^x",
    "x_ " * 24 + "x",
    r"\sin " * 8 + "x1" * 8,
    "1+" * 150 + "1",
    "x^{100000}",
    "",
    "+",
    "#",
    "__import__",
  )
  def test_what_could_take_long_it_does_not_see(self, text):
    start = time.monotonic()
    with self.assertRaises(UnreadableError):
      math_expression.parse(text)
    self.assertLess(time.monotonic() - start, 1.0)

  def test_brackets_in_brackets_cost_nothing(self):
    self.assertTrue(
      equal("1+" + "{" * 7 + "x" + "}" * 7, "(" * 8 + "x" + ")" * 8 + "+1")
    )


class EqualTest(parameterized.TestCase):
  @parameterized.parameters(
    ("x^2-1", "(x-1)(x+1)"),
    (r"\sqrt{x^2}", "|x|"),
    (r"\sin 2x", r"2\sin x\cos x"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"e^{i\pi}", "-1"),
    (r"\sqrt[3]{-8}", "-2"),
    (r"\log 1000", "3"),
    (r"\ln e^2", "2"),
    ("(n+1)!", "(n+1)!"),
    (r"\lfloor 2.5\rfloor", "2"),
    (r"\lceil 2.5\rceil", "3"),
    ("0.1x", r"\frac{x}{10}"),
    (r"\alpha\beta", r"\beta\alpha"),
  )
  def test_equal(self, one, two):
    if "!" in one:  # Of whole numbers alone.
      with self.assertRaises(UnreadableError):
        equal(one, two)
    else:
      self.assertTrue(equal(one, two))

  @parameterized.parameters(
    (r"\sqrt{x^2}", "x"),
    ("x", "y"),
    ("x^2", "x^3"),
    (r"\pi", r"\frac{22}{7}"),
    (r"\sqrt{2}", r"1.41421356237309504880168872420969807857"),
    ("10^{-7}", "2 \\cdot 10^{-7}"),
    (r"\frac{1}{x}", r"\frac{2}{x}"),
    (r"\ln x^2", r"2\ln x"),  # Not of negative numbers.
  )
  def test_not_equal(self, one, two):
    self.assertFalse(equal(one, two))

  def test_without_any_value_nothing_is_equal(self):
    with self.assertRaises(UnreadableError):
      equal(r"\frac{1}{x-x}", r"\frac{2}{x-x}")

  def test_does_not_change_mpmath(self):
    digits = mpmath.mp.dps
    equal(r"\sqrt{2}", r"\sqrt{3}")
    self.assertEqual(mpmath.mp.dps, digits)


class ConstantTest(parameterized.TestCase):
  @parameterized.parameters(
    ("2^{100}", Fraction(2**100)),
    ("20!", Fraction(2432902008176640000)),
    (r"\frac{2+3}{4}", Fraction(5, 4)),
    (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)),
    ("2^{-3}", Fraction(1, 8)),
    ("|-3|", Fraction(3)),
    ("0.1+0.2", Fraction(3, 10)),
  )
  def test_exact(self, text, value):
    found = math_expression.constant(math_expression.parse(text))
    self.assertIsInstance(found, Fraction)
    self.assertEqual(found, value)

  @parameterized.parameters(
    "2^{9999999}",
    "10^{10^{10}}",
    "9999!",
    "3!!!!",
    "(9^{999})^{999}",
    r"\sin(10^{99})",
    "e^{e^{e^{9}}}",
    "x",
    r"\frac{1}{0}",
    "0^0",
  )
  def test_without_a_value(self, text):
    with self.assertRaises(UnreadableError):
      math_expression.constant(math_expression.parse(text))


class ProportionalTest(parameterized.TestCase):
  @parameterized.parameters(
    ("2x+2y=4", "x+y=2", True),
    ("x=y", "y=x", True),
    ("y=2x+3", "2x-y+3=0", True),
    ("x+y=2", "x+y=3", False),
    ("x=y", "x=2y", False),
    ("x=x", "y=y", False),
  )
  def test_equations(self, one, two, verdict):
    self.assertEqual(proportional(one, two), verdict)

  def test_inequalities_turn_with_the_sign(self):
    self.assertTrue(proportional("2x=4", "x=2", positive=True))
    self.assertFalse(proportional("2x=4", "2=x", positive=True))
