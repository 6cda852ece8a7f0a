import itertools
import re

from absl.testing import parameterized

from darl_jax.rewards import math_text
from tests.rewards import math_cases

COMMA = re.compile(",")


class CleanTest(parameterized.TestCase):
  @parameterized.parameters(
    (r"\dfrac 1 2", r"\frac{1}{2}"),
    (r"\tfrac12", r"\frac{1}{2}"),
    (r"\frac{a}2", r"\frac{a}{2}"),
    (r"\frac\pi2", r"\frac{\pi}{2}"),
    (r"\frac\sqrt34", r"\frac{\sqrt{3}}{4}"),
    (r"\sqrt2", r"\sqrt{2}"),
    (r"\sqrt[3]2", r"\sqrt[3]{2}"),
    (r"\left( 1,\, 2 \right]", "( 1, 2 ]"),
    (r"\left\{ 1 \right\}", "⦃ 1 ⦄"),
    (r"1\,234", "1234"),
    (r"1{,}234{,}567", "1234567"),
    (r"3{,}14", "3.14"),
    (r"0{,}125", "0.125"),
    (r"5\ \mathrm{cm}", r"5 \text{cm}"),
    (r"\operatorname{sin} x", r"\sin x"),
    (r"$18", "$18"),
    (r"\$18", "$18"),
    (r"$18$", "18"),
    (r"$\$18$", "$18"),
    (r"90^{\circ}", "90°"),
    (r"90^\circ", "90°"),
    (r"x \leqslant 2", "x ≤2"),
    ("2π − ½", r"2\pi- \frac{1}{2}"),
    (r"5^{\text{th}}", r"5\text{th}"),
    (" 42. ", "42"),
    (".5", ".5"),
    (r"\begin{matrix}1\\[2pt]2\end{matrix}", r"\begin{matrix}1\\2\end{matrix}"),
  )
  def test_one_spelling(self, text, cleaned):
    self.assertEqual(math_text.clean(text), cleaned)

  def test_leaves_what_is_clean(self):
    for table in (math_cases.EQUAL, math_cases.DIFFERENT):
      for text in itertools.chain(*itertools.chain(*table.values())):
        once = math_text.clean(text)
        # A second time money would be math, and a set's brackets nothing.
        if not {"$", "⦃"} & set(once):
          self.assertEqual(math_text.clean(once), once)


class BracketsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("1, (2, 3], x", ["1", "(2, 3]", "x"]),
    ("", [""]),
    (",", ["", ""]),
    ("{,},[,]", ["{,}", "[,]"]),
    ("1), 2", ["1)", "2"]),
    ("(1, 2", ["(1, 2"]),
  )
  def test_split(self, text, parts):
    self.assertEqual(math_text.split(text, COMMA), parts)

  @parameterized.parameters(
    ("(1)", True),
    ("(1]", True),
    ("(1)(2)", False),
    ("(1)+(2)", False),
    ("((1)(2))", True),
    ("(", False),
    ("()", True),
    ("1", False),
    ("(1", False),
    (")1(", False),
  )
  def test_enclosed(self, text, verdict):
    self.assertEqual(math_text.enclosed(text), verdict)

  @parameterized.parameters(
    ("1", 0), ("(1)", 1), ("{[(1)]}", 3), ("(1)(2)", 1), ("))((", 2)
  )
  def test_depth(self, text, depth):
    self.assertEqual(math_text.depth(text), depth)

  @parameterized.parameters(
    ("{a}b", 3), ("{{a}{b}}c", 8), (r"{\}}x", 4), ("{a", None), (r"{a\}", None)
  )
  def test_argument(self, text, end):
    self.assertEqual(math_text.argument(text, 0), end)
