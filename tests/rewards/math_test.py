import itertools
import pathlib
import random
import re
import sys
import threading
import time

from absl.testing import parameterized

from darl_jax.rewards.math import MathVerifier, final_statement, last_box
from darl_jax.rewards.math import is_equal as equal
from tests.rewards import math_cases

# As the issue that asked for the grader has it: what a response ends with, the
# reference, and the verdict where a box is asked for.
CONFORMANCE = (
  (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
  (r"\boxed{3} then finally \boxed{4}", "4", 1.0),
  (r"\boxed{3} then finally \boxed{4}", "3", 0.0),
  (r"\boxed{1,234}", "1234", 1.0),
  (r"\boxed{0.5}", "1/2", 1.0),
  (r"\boxed{50\%}", "50", 1.0),
  (r"\boxed{\text{42}}", "42", 1.0),
  ("the answer is 42", "42", 0.0),
  (r"\boxed{\$18}", "18", 1.0),
  (r"\boxed{x=5}", "5", 1.0),
  (r"\boxed{(1,2)}", "(1,2)", 1.0),
  (r"\boxed{(2,1)}", "(1,2)", 0.0),
)

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/rewards.md"

# Formatting that says nothing.
FORMATS = {
  "spaces": "  {}  ",
  "dollars": "${}$",
  "parentheses": r"\({}\)",
  "group": "{{{}}}",
  "displaystyle": r"\displaystyle {}",
  "thin space": r"{}\,",
  "full stop": "{}.",
  "double dollars": "$${}$$",
  "newlines": "\n{}\n",
}

# Nothing may take long, whatever it is.
HOSTILE = {
  "text": "a" * 10**6,
  "boxes": r"\boxed{1}" * 110_000,
  "open boxes": r"\boxed{" * 140_000,
  "open braces": r"\boxed{" + "{" * 10**6,
  "braces": r"\boxed{" + "{" * 500_000 + "}" * 500_001,
  "digits": r"\boxed{" + "9" * 10**6 + "}",
  "many digits": r"\boxed{" + "9" * 380 + "}",
  "announcements": "answer is " * 100_000,
  "dollars": "$" * 10**6,
  "tower of stars": r"\boxed{10**10**10}",
  "tower": r"\boxed{10^{10^{10}}}",
  "high tower": r"\boxed{9^{9^{9^{9^9}}}}",
  "tower of e": r"\boxed{e^{e^{e^{e^{10}}}}}",
  "unbraced tower": r"\boxed{x" + "^x" * 99 + "}",
  "factorial": r"\boxed{1000000!}",
  "factorials": r"\boxed{9!!!!!}",
  "binomial": r"\boxed{\binom{10000000}{5000000}}",
  "binomial of powers": r"\boxed{\binom{10^9}{10^8}}",
  "power of sums": r"\boxed{" + "(x+1)^{9999}" * 20 + "}",
  "sine": r"\boxed{\sin(10^{1000})}",
  "hyperbolic": r"\boxed{\sinh(\sinh(\sinh(\sinh 9)))}",
  "exponent": r"\boxed{1e9999}",
  "exponents": r"\boxed{1e999999999}",
  "sum": r"\boxed{\sum_{k=1}^{10^9} \frac{1}{k}}",
  "integral": r"\boxed{\int_0^{10^9} \sin(x^x) dx}",
  "determinant": r"\boxed{\det\begin{pmatrix}" + "1&" * 90 + r"1\end{pmatrix}}",
  "items": r"\boxed{\{" + ",".join(f"x+{i}" for i in range(60)) + r"\}}",
  "commas": r"\boxed{" + "1," * 200 + "1}",
  "equations": r"\boxed{" + "=".join(["(x+1)^2-x"] * 11) + "}",
  "parentheses": r"\boxed{" + "(" * 180 + "1" + ")" * 180 + "}",
  "sums in parentheses": r"\boxed{" + "(1+" * 8 + "1" + ")" * 8 + "}",
  "groups": r"\boxed{x+" + "{" * 7 + "1" + "}" * 7 + "}",
  "fractions": r"\boxed{" + r"\frac{" * 30 + "1" + "}{2}" * 30 + "}",
  "bare fractions": r"\boxed{" + r"\frac" * 70 + "}",
  "roots": r"\boxed{" + r"\sqrt" * 70 + "2}",
  "functions": r"\boxed{" + r"\sin " * 60 + "x}",
  "variables": r"\boxed{" + "+".join(f"x_{{{i}}}" for i in range(40)) + "}",
  "capitals": r"\boxed{" + "R" * 300 + "}",
  "signs": r"\boxed{" + "-" * 299 + "1}",
  "texts": r"\boxed{" + r"\text{" * 60 + "}",
  "units": r"\boxed{42 " + "cm " * 120 + "}",
  "backslashes": r"\boxed{" + "\\" * 399 + "}",
  "names": r"\boxed{" + "a(1" * 120 + "=1}",
  "functions' names": r"\boxed{" + "a(b)" * 80 + "5=1}",
  "letters' names": r"\boxed{" + r"\alpha " * 40 + "5=1}",
  "subscripts": r"\boxed{" + "a_bc" * 80 + "5=1}",
  "words": r"\boxed{x+1 " + "aa " * 80 + "aa!}",
  "rates": r"\boxed{x+1 " + "cm / " * 70 + "aa!}",
  "period": r"\boxed{0.\overline{" + "3" * 380 + "}}",
  "not unicode": "\\boxed{\ud800}",
  "control characters": "\\boxed{\x00\x01\x02}",
}

PIECES = (
  r"x y 1 2 n e i R ( ) { } [ ] ^ _ + - / ! | = < ° \frac \sqrt \sin \log \pi "
  r"\cdot \times \binom \lfloor \rfloor \frac{x}{ (x+ x^{ \sqrt{ ^2 \text{a} f("
)


def score(response: str, reference: str, *, box: str = "required") -> float:
  return MathVerifier(box=box).score(response, {"answer": reference})


def random_formula(random_: random.Random) -> str:
  """Pieces of LaTeX in any order, often repeated or in one another."""

  pieces = PIECES.split(" ")

  def some(at_most: int) -> str:
    count = random_.randint(1, at_most)
    return "".join(random_.choice(pieces) for _ in range(count))

  kind = random_.randrange(3)
  if kind == 0:
    return some(120)
  if kind == 1:
    return (some(4) * 300)[: random_.randint(20, 300)]
  depth = random_.randint(2, 12)
  return some(3) * depth + "x" + random_.choice(")}]|x1") * depth


def pairs(table) -> list[tuple[str, str]]:
  return list(itertools.chain(*table.values()))


class ScoreTest(parameterized.TestCase):
  @parameterized.parameters(*CONFORMANCE)
  def test_conformance(self, response, reference, verdict):
    self.assertEqual(score(response, reference), verdict)
    self.assertEqual(score("So it is: " + response, reference), verdict)

  @parameterized.parameters(*math_cases.EQUAL)
  def test_equal(self, kind):
    wrong = [
      pair
      for pair in math_cases.EQUAL[kind]
      if score(rf"Hence \boxed{{{pair[0]}}}.", pair[1]) != 1.0
    ]
    self.assertEqual(wrong, [])

  @parameterized.parameters(*math_cases.DIFFERENT)
  def test_different(self, kind):
    wrong = [
      pair
      for pair in math_cases.DIFFERENT[kind]
      if score(rf"Hence \boxed{{{pair[0]}}}.", pair[1]) != 0.0
    ]
    self.assertEqual(wrong, [])

  def test_there_are_enough_cases(self):
    self.assertGreater(len(pairs(math_cases.EQUAL)), 200)
    self.assertGreater(len(pairs(math_cases.DIFFERENT)), 100)

  def test_every_reference_is_equal_to_itself(self):
    references = {pair[1] for pair in pairs(math_cases.EQUAL)}
    wrong = [text for text in references if not equal(text, text)]
    self.assertEqual(wrong, [])

  def test_a_reference_may_be_in_a_box(self):
    self.assertEqual(score(r"\boxed{5}", r"so $\boxed{5}$"), 1.0)

  def test_box_is_checked(self):
    with self.assertRaisesRegex(ValueError, "'always' is neither"):
      MathVerifier(box="always")

  def test_empty_answers_are_wrong(self):
    for text in ("", " ", r"\text{}", "{}", ".", "$$"):
      self.assertEqual(score(rf"\boxed{{{text}}}", "42"), 0.0, text)
      self.assertEqual(score(text, "42", box="preferred"), 0.0, text)

  def test_works_in_other_threads(self):
    # math-verify's own time limit would raise there.
    verdicts = []
    thread = threading.Thread(
      target=lambda: verdicts.append(score(r"\boxed{\sqrt{12}}", r"2\sqrt3"))
    )
    thread.start()
    thread.join()
    self.assertEqual(verdicts, [1.0])


class DocumentTest(parameterized.TestCase):
  def test_its_table_is_true(self):
    rows = re.findall(
      r"^\| (`.*`) \| `(.*)` \| (equal|different)\b", DOCUMENT.read_text(), re.M
    )
    self.assertGreater(len(rows), 30)
    wrong = [
      (answer, reference)
      for answers, reference, verdict in rows
      for answer in re.findall("`(.*?)`", answers)
      if equal(answer, reference) != (verdict == "equal")
    ]
    self.assertEqual(wrong, [])


class MetamorphicTest(parameterized.TestCase):
  @parameterized.parameters(*FORMATS)
  def test_formatting_does_not_matter(self, name):
    changed = []
    for table, verdict in (
      (math_cases.EQUAL, True),
      (math_cases.DIFFERENT, False),
    ):
      for answer, reference in pairs(table):
        if "$" in answer and "ollars" in name:
          continue  # A dollar sign within math is money or ends it.
        formatted = FORMATS[name].format(answer)
        if equal(formatted, reference) != verdict:
          changed.append((formatted, reference))
    self.assertEqual(changed, [])

  @parameterized.parameters((r"\frac", r"\dfrac"), (r"\frac", r"\tfrac"))
  def test_other_commands_do_not_matter(self, command, other):
    tried = 0
    for answer, reference in pairs(math_cases.EQUAL):
      if command in answer:
        tried += 1
        self.assertTrue(equal(answer.replace(command, other), reference))
        self.assertTrue(equal(answer, reference.replace(command, other)))
    self.assertGreater(tried, 20)

  # Of choices the letter counts; of names, what is named.
  @parameterized.parameters(*sorted({*math_cases.EQUAL} - {"choices", "names"}))
  def test_one_digit_matters(self, kind):
    equal_still = []
    for answer, reference in math_cases.EQUAL[kind]:
      for match in re.finditer(r"(?<!\[)\d", answer):
        # Not the next digit: it may be what the last one rounds to.
        digit = str((int(match[0]) + 3) % 10)
        other = answer[: match.start()] + digit + answer[match.end() :]
        if equal(other, reference):
          equal_still.append((other, reference))
    self.assertEqual(equal_still, [])

  def test_the_sign_matters(self):
    for answer, reference in math_cases.EQUAL["decimals"]:
      self.assertFalse(equal("-" + answer, reference), answer)

  def test_order_matters_in_tuples_alone(self):
    for items in itertools.permutations(("1", r"\frac{1}{2}", "x", "-4")):
      text = ", ".join(items)
      ordered = items == ("1", r"\frac{1}{2}", "x", "-4")
      self.assertTrue(equal(text, r"1, \frac{1}{2}, x, -4"))
      self.assertTrue(equal(rf"\{{{text}\}}", r"\{1, \frac{1}{2}, x, -4\}"))
      self.assertEqual(equal(f"({text})", r"(1, \frac{1}{2}, x, -4)"), ordered)

  def test_every_bracket_matters_in_intervals(self):
    intervals = [a + "1, 2" + b for a in "[(" for b in "])"]
    for one, two in itertools.product(intervals, repeat=2):
      self.assertEqual(equal(one, two), one == two, (one, two))

  def test_digits_of_large_integers_are_exact(self):
    number = int("123456789" * 40)
    self.assertTrue(equal(f"{number:,}", str(number)))
    self.assertFalse(equal(f"{number + 1:,}", str(number)))
    self.assertFalse(equal(f"{number}.5", str(number)))


class BoxTest(parameterized.TestCase):
  @parameterized.parameters(
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed {5}", "5"),
    (r"\fbox{5}", "5"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{a}\boxed{b} c", "b"),
    (r"\boxed{n=\boxed{5}}", "5"),
    (r"\boxed{}", ""),
    (r"\boxed{1} and \boxed{2", ""),
    (r"\boxed{1\}", ""),
    (r"\boxed 5", None),
    ("boxed{5}", None),
    ("", None),
  )
  def test_last_box(self, text, content):
    self.assertEqual(last_box(text), content)

  @parameterized.parameters(
    "The answer is 42",
    "The answer is: 42.",
    "the final answer is $42$",
    "**Answer:** 42",
    "Answer: 42 apples",
    "6 * 7 = 42, so it is \\(42\\)",
    "We add 2 and 40.\n#### 42",
    "42",
    "x = 42",
    "There are 6 boxes of 7, thus 42",
    "The answer is 41. No: the answer is 42 as 2 + 40 are more than 3",
    r"\boxed{42}, the answer is 7",
  )
  def test_preferred_reads_answers_without_a_box(self, text):
    self.assertEqual(score(text, "42", box="preferred"), 1.0)
    boxed = last_box(text) is not None
    self.assertEqual(score(text, "42"), float(boxed))

  @parameterized.parameters(
    "The answer is 43",
    "42 is not the answer: the answer is 43",
    "#### 42\n#### 43",
    "42 or 43",
    "I do not know",
    r"\boxed{43}, the answer is 42",
    r"\boxed{, the answer is 42",
  )
  def test_preferred_reads_one_answer_alone(self, text):
    self.assertEqual(score(text, "42", box="preferred"), 0.0)

  def test_a_statement_ends_with_its_sentence(self):
    self.assertEqual(final_statement("The answer is 3.5. Or 4?"), "3.5")


class HostileTest(parameterized.TestCase):
  @parameterized.parameters(*HOSTILE)
  def test_takes_no_time(self, name):
    for reference in ("42", "x^2+1", r"\{1, x\}", "2x+3y=1", r"\sqrt{2}"):
      for box in ("required", "preferred"):
        start = time.monotonic()
        self.assertEqual(score(HOSTILE[name], reference, box=box), 0.0)
        self.assertLess(time.monotonic() - start, 2.0)

  def test_what_is_much_longer_than_the_reference_is_not_read(self):
    reference = ", ".join(f"x+{i}" for i in range(1, 17))
    answer = ", ".join("1" + "+0" * 140 + f"+x+{i}-1" for i in range(1, 17))
    start = time.monotonic()
    self.assertFalse(equal(answer, reference))
    self.assertLess(time.monotonic() - start, 0.5)
    self.assertTrue(equal("5" + " " * 1000, "5"))

  def test_nothing_is_run(self):
    for text in (
      "__import__('os').abort()",
      "().__class__.__base__.__subclasses__()",
      r"\text{__import__('os').abort()}",
      "exec(chr(49))",
      "lambda: 1",
    ):
      self.assertEqual(score(rf"\boxed{{{text}}}", "1"), 0.0)
      self.assertEqual(score(rf"\boxed{{{text}}}", "x+1"), 0.0)

  def test_no_module_evaluates_text(self):
    folder = pathlib.Path(sys.modules[MathVerifier.__module__].__file__).parent
    for path in folder.glob("math*.py"):
      self.assertNotRegex(
        path.read_text(), r"\b(sympify|parse_expr|eval|exec)\("
      )

  def test_random_formulas_take_no_time(self):
    random_ = random.Random(0)
    for _ in range(400):
      text = random_formula(random_)
      start = time.monotonic()
      equal(text, "x^2+1")
      self.assertLess(time.monotonic() - start, 5.0, text)
