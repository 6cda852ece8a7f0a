r"""Expressions: read by math-verify's parser, compared by their values.

The parser (math-verify 0.9.0 on latex2sympy2_extended 1.11.0) is given only
what it reads right and quickly. Left out or rewritten before it, since it

* takes no difference between r and R, and drops the prime of x';
* reads ``12 34`` as 46 and drops degrees under a cosine;
* evaluates binomials and determinants of any size while it parses;
* takes seconds for ten braces in one another.

Its comparison is not used: it rounds to six decimals, so that 1e-7 is 2e-7, and
it simplifies for as long as that takes. Two expressions are equal here if they
have the same values, to 40 digits, at points with positive and with negative
coordinates. That takes milliseconds and is wrong with no chance to speak of.
"""

import functools
import logging
import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

import math_verify
import mpmath
import sympy
from latex2sympy2_extended import NormalizationConfig
from mpmath import libmp

from darl_jax.rewards import math_text

MAX_CHARS = 300
_MAX_DEPTH = 8
_MAX_BITS = 20_000
_MAX_EXPONENT = 10_000
_MAX_FACTORIAL = 1000

_DIGITS = 60
_TOLERANCE = mpmath.mpf(10) ** -40

# Everything else it does not get to see.
_COMMAND = re.compile(
  r"frac|sqrt|pi|sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|sinh|cosh|tanh|"
  r"ln|log|exp|cdot|times|binom|lfloor|rfloor|lceil|rceil|alpha|beta|gamma|"
  r"delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|"
  r"psi|omega|varphi|vartheta|varepsilon"
)
_ALLOWED = re.compile(r"[\w\s\\{}()\[\]^+\-/.|!]*", re.ASCII)
_LETTER = re.compile(r"\\[A-Za-z]+|([A-Z])(?:_(?:\{(\w+)\}|(\w)))?", re.ASCII)
_FUNCTION_NAMES = re.compile(
  r"(?<![\\A-Za-z])(sin|cos|tan|log|ln|exp|pi)(?![A-Za-z])"
)
_FUNCTION = re.compile(
  r"\\(?:sin|cos|tan|sec|csc|cot|ln|log|exp|arc\w+|sinh|cosh|tanh)"
)
# An exponent of an exponent without braces, which LaTeX refuses.
_TWO_EXPONENTS = re.compile(r"\^\s*(?:\\?\w+|\{[^{}]*\})\s*(?:_\{\w+\}\s*)?\^")
_CONFIG = math_verify.LatexExtractionConfig(
  boxed_match_priority=-1,
  normalization_config=NormalizationConfig(
    basic_latex=True,
    units=False,
    malformed_operators=True,
    nits=False,
    boxed="none",
  ),
)

# It warns that its timeout, which works by signals, is off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class UnreadableError(Exception):
  """The text is no expression that can be compared."""


Value = Fraction | mpmath.mpc


@functools.lru_cache(256)
def parse(text: str) -> sympy.Basic:
  """The expression's tree, as written: nothing of it is evaluated.

  Args:
    text: As ``math_text.clean`` leaves it.

  Raises:
    UnreadableError: It is too long or too deep, has commands or signs that no
      final answer needs, or the parser does not understand it.
  """
  text = _rewritten(text)
  found = math_verify.parse(
    f"${text}$",
    extraction_config=[_CONFIG],
    fallback_mode="no_fallback",
    parsing_timeout=None,
  )
  if len(found) != 1 or not isinstance(found[0], sympy.Expr):
    raise UnreadableError(text)
  return found[0]


def equal(one: sympy.Basic, two: sympy.Basic) -> bool:
  """Whether both have the same values.

  Raises:
    UnreadableError: One of them cannot be evaluated.
  """
  compared = 0
  for point in _points(one, two):
    a, b = _value_or_none(one, point), _value_or_none(two, point)
    if (a is None) != (b is None):
      return False
    if a is not None:
      if not _close(a, b):
        return False
      compared += 1
  if not compared:
    raise UnreadableError("it has no value anywhere")
  return True


def proportional(
  one: tuple[sympy.Basic, sympy.Basic],
  two: tuple[sympy.Basic, sympy.Basic],
  *,
  positive: bool,
) -> bool:
  """Whether left - right of both differ by a constant factor other than 0.

  Args:
    one: Left and right side of a relation.
    two: Likewise.
    positive: Whether the factor must be above 0, as for inequalities.

  Raises:
    UnreadableError: A side cannot be evaluated.
  """
  with mpmath.workdps(_DIGITS):
    ratios = []
    for point in _points(*one, *two):
      values = [_value_or_none(side, point) for side in (*one, *two)]
      if None in values:
        continue
      a, b, c, d = map(_inexact, values)
      if min(abs(a - b), abs(c - d)) <= _TOLERANCE:
        return False
      ratios.append((a - b) / (c - d))
    if len(ratios) < 2 or any(not _close(r, ratios[0]) for r in ratios):
      return False
    return not positive or (
      abs(ratios[0].imag) <= _TOLERANCE and ratios[0].real > 0
    )


def constant(tree: sympy.Basic) -> Value:
  """Its value, exact if it is rational arithmetic alone.

  Raises:
    UnreadableError: It depends on a variable, or has no value.
  """
  value = _value_or_none(tree, {})
  if value is None:
    raise UnreadableError("it has no value")
  return value


def real_constant(tree: sympy.Basic) -> Fraction | None:
  """Its value to 50 digits; None if it is not real.

  Raises:
    UnreadableError: It depends on a variable, or has no value.
  """
  value = constant(tree)
  if isinstance(value, Fraction):
    return value
  return None if value.imag else Fraction(mpmath.nstr(value.real, 50))


def _inexact(value: Value) -> mpmath.mpc:
  """The value to 60 digits."""
  if isinstance(value, Fraction):
    with mpmath.workdps(_DIGITS):
      return mpmath.mpc(mpmath.mpf(value.numerator) / value.denominator)
  return mpmath.mpc(value)


def _rewritten(text: str) -> str:
  """What the parser reads as the text means it."""
  if len(text) > MAX_CHARS:
    raise UnreadableError("it is too long")
  text = _with_degrees(text)
  text = _FUNCTION_NAMES.sub(r"\\\1 ", text)
  text = re.sub(r"_(\w)", r"_{\1}", text)
  # Brackets around brackets mean nothing and cost much.
  for _ in range(_MAX_DEPTH):
    text = re.sub(r"\{\s*\{([^{}]*)\}\s*\}", r"{\1}", text)
    text = re.sub(r"\(\s*\(([^()]*)\)\s*\)", r"(\1)", text)
  if (
    not _ALLOWED.fullmatch(text)
    or math_text.depth(text) > _MAX_DEPTH
    or not all(map(_COMMAND.fullmatch, re.findall(r"\\([A-Za-z]*)", text)))
    or re.search(r"\d\s*_", text)
    or re.search(r"\d\s+[\d.]", text)
    or re.search(r"\d\.(?!\d)", text)
    or re.search(r"\^\s*[{(]*\d{5}", text)
    or ("binom" in text and re.search(r"\d{4}", text))
    or text.count("binom") > 1
    or text.count("|") > 4
    # Each without brackets doubles the parser's time.
    or len(_FUNCTION.findall(text)) > 6
    or _TWO_EXPONENTS.search(text)
    or re.search(r"_(?!\{\w+\})", text)
  ):
    raise UnreadableError(text)
  text = _LETTER.sub(_lower, text)
  if len(text) > MAX_CHARS + 100:
    raise UnreadableError("it has too many capital letters")
  return text


def _with_degrees(text: str) -> str:
  r"""60° under a function is an angle; elsewhere the sign adds nothing."""
  if "°" not in text:
    return text
  if re.search(r"sin|cos|tan|sec|csc|cot", text):
    return re.sub(r"(\d+(?:\.\d+)?|[a-z])\s*°", r"(\1\\pi /180)", text)
  return text.replace("°", "")


def _lower(match: re.Match[str]) -> str:
  if match[1] is None:
    return match[0]
  below = match[2] or match[3] or ""
  return f"{match[1].lower()}_{{900{below}}}"


def _points(*trees: sympy.Basic) -> list[Mapping[str, mpmath.mpf]]:
  """Where to compare: the coordinates depend on the variables' names alone."""
  names = sorted(
    {symbol.name for tree in trees for symbol in tree.free_symbols} - {"i"}
  )
  if not names:
    return [{}]
  points = []
  for number in range(5):
    point = {}
    for index, name in enumerate(names):
      size = random.Random(f"{name} {number}").uniform(0.4, 2.4)
      negative = number == 2 or (number > 2 and (index + number) % 2)
      point[name] = mpmath.mpf(-size if negative else size)
    points.append(point)
  return points


def _value_or_none(
  tree: sympy.Basic, point: Mapping[str, mpmath.mpf]
) -> Value | None:
  """None where the expression has no value at this point."""
  try:
    with mpmath.workdps(_DIGITS):
      value = _value(tree, point)
  except (ZeroDivisionError, ValueError, OverflowError, libmp.NoConvergence):
    return None
  except (RecursionError, KeyError) as error:
    raise UnreadableError(type(error).__name__) from error
  if not isinstance(value, Fraction) and not mpmath.isfinite(value):
    return None
  return value


def _value(tree: sympy.Basic, point: Mapping[str, mpmath.mpf]) -> Value:
  if isinstance(tree, sympy.Symbol):
    return (
      mpmath.mpc(0, 1) if tree.name == "i" else mpmath.mpc(point[tree.name])
    )
  if isinstance(tree, sympy.Rational):
    return Fraction(int(tree.p), int(tree.q))
  if isinstance(tree, sympy.Float):
    return Fraction(str(tree))  # What was written, not its nearest binary.
  if tree in _CONSTANTS:
    return mpmath.mpc(_CONSTANTS[tree])
  operation = _OPERATIONS.get(type(tree))
  if operation is None:
    raise UnreadableError(type(tree).__name__)
  values = [_value(part, point) for part in tree.args]
  return operation(*values)


def _sum(*values: Value) -> Value:
  if all(isinstance(value, Fraction) for value in values):
    return _bounded(sum(values, Fraction(0)))
  return mpmath.fsum(_inexact(value) for value in values)


def _product(*values: Value) -> Value:
  product = Fraction(1)
  for value in values:
    if isinstance(product, Fraction) and isinstance(value, Fraction):
      product = _bounded(product * value)
    else:
      product = _inexact(product) * _inexact(value)
  return product


def _power(base: Value, exponent: Value) -> Value:
  if abs(_inexact(exponent)) > _MAX_EXPONENT:
    raise UnreadableError("an exponent is too large")
  if isinstance(base, Fraction) and isinstance(exponent, Fraction):
    if base == 0 and exponent <= 0:
      raise ZeroDivisionError
    if exponent.denominator == 1:
      if _bits(base) * abs(exponent) > _MAX_BITS:
        raise UnreadableError("a power is too large")
      return base ** int(exponent)
    root = _exact_root(base, exponent)
    if root is not None:
      return root
    # The cube root of -8 is -2, as every textbook has it.
    if base < 0 and exponent.denominator % 2:
      sign = -1 if exponent.numerator % 2 else 1
      return sign * mpmath.power(_inexact(-base), _inexact(exponent))
  return mpmath.power(_inexact(base), _inexact(exponent))


def _exact_root(base: Fraction, exponent: Fraction) -> Fraction | None:
  """Of squares alone: 4 to the 1/2 is exactly 2."""
  if base < 0 or exponent.denominator != 2 or abs(exponent.numerator) > 9:
    return None
  top, rest = libmp.sqrtrem(base.numerator)
  bottom, remainder = libmp.sqrtrem(base.denominator)
  if rest or remainder:
    return None
  return Fraction(int(top), int(bottom)) ** exponent.numerator


def _exponential(value: Value) -> Value:
  if abs(_inexact(value)) > _MAX_EXPONENT:
    raise UnreadableError("an exponent is too large")
  return mpmath.exp(_inexact(value))


def _logarithm(value: Value, base: Value | None = None) -> Value:
  if value == 0:
    raise ZeroDivisionError
  result = mpmath.log(_inexact(value))
  return result if base is None else result / mpmath.log(_inexact(base))


def _factorial(value: Value) -> Value:
  if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
    raise UnreadableError("a factorial of no whole number")
  if value > _MAX_FACTORIAL:
    raise UnreadableError("a factorial is too large")
  return Fraction(int(libmp.ifac(int(value))))


def _binomial(n: Value, k: Value) -> Value:
  if k < 0 or k > n:
    raise UnreadableError("a binomial of other numbers")
  return _factorial(n) / (_factorial(k) * _factorial(n - k))


def _floor(value: Value) -> Value:
  if isinstance(value, Fraction):
    return Fraction(value.__floor__())
  if value.imag:
    raise UnreadableError("the floor of a complex number")
  return mpmath.mpc(mpmath.floor(value.real))


def _ceiling(value: Value) -> Value:
  return _product(Fraction(-1), _floor(_product(Fraction(-1), value)))


def _of_float(function: Callable[[mpmath.mpc], mpmath.mpc]):
  def bounded(value: Value) -> Value:
    value = _inexact(value)
    if abs(value) > _MAX_EXPONENT:  # They grow like exp in some direction.
      raise UnreadableError("an argument is too large")
    return mpmath.mpc(function(value))

  return bounded


_CONSTANTS = {sympy.pi: mpmath.pi, sympy.E: mpmath.e, sympy.I: mpmath.mpc(0, 1)}
_OPERATIONS = {
  sympy.Add: _sum,
  sympy.Mul: _product,
  sympy.Pow: _power,
  sympy.exp: _exponential,
  sympy.log: _logarithm,
  sympy.Abs: lambda value: (
    abs(value) if isinstance(value, Fraction) else mpmath.mpc(abs(value))
  ),
  sympy.factorial: _factorial,
  sympy.binomial: _binomial,
  sympy.floor: _floor,
  sympy.ceiling: _ceiling,
  sympy.UnevaluatedExpr: lambda value: value,
} | {
  function: _of_float(getattr(mpmath, function.__name__))
  for function in (
    sympy.sin,
    sympy.cos,
    sympy.tan,
    sympy.sec,
    sympy.csc,
    sympy.cot,
    sympy.asin,
    sympy.acos,
    sympy.atan,
    sympy.sinh,
    sympy.cosh,
    sympy.tanh,
  )
}


def _bits(value: Fraction) -> int:
  return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
  if _bits(value) > _MAX_BITS:
    raise UnreadableError("a number is too large")
  return value


def _close(a: Value, b: Value) -> bool:
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    return a == b
  with mpmath.workdps(_DIGITS):
    a, b = _inexact(a), _inexact(b)
    return abs(a - b) <= _TOLERANCE * max(1, abs(a), abs(b))
