"""A final answer as data: taken apart at its top level.

Numbers, units, lists, brackets, intervals, matrices and relations are read
here, exactly. What is none of them is an expression, or words.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from darl_jax.rewards import math_text, math_units

MAX_CHARS = 5000
_MAX_ITEMS = 32
_MAX_DEPTH = 12
# Python's own limit for an int read from text.
_MAX_DIGITS = 4000


@dataclasses.dataclass(frozen=True)
class Quantity:
  """A number or an expression.

  Attributes:
    text: How it is written, without its unit.
    number: Its value where it is written as a number.
    places: Digits after the point where it is written as a decimal.
    digits: Significant digits, likewise.
    unit: As ``math_units.read`` gives it.
  """

  text: str
  number: Fraction | None = None
  places: int = 0
  digits: int = 0
  unit: str = ""


@dataclasses.dataclass(frozen=True)
class Words:
  """Anything that has no value."""

  text: str


@dataclasses.dataclass(frozen=True)
class Ordered:
  """Items in an order: a tuple, a vector, or two ends of an interval."""

  opening: str
  closing: str
  items: tuple["Answer", ...]


@dataclasses.dataclass(frozen=True)
class Collection:
  """Items in no order: of a set, of a list without brackets, of a union."""

  kind: str  # "set", "list" or "union".
  items: tuple["Answer", ...]


@dataclasses.dataclass(frozen=True)
class Matrix:
  rows: tuple[tuple["Answer", ...], ...]


@dataclasses.dataclass(frozen=True)
class Named:
  """A value that a name is given: ``x = 5``, ``f(x) = 2x``."""

  name: str
  value: "Answer"


@dataclasses.dataclass(frozen=True)
class Chain:
  """Sides that are said to be equal, the last of which is the answer."""

  sides: tuple["Answer", ...]


@dataclasses.dataclass(frozen=True)
class Relation:
  """Two sides: ``=``, ``<``, ``≤`` or ``≠``."""

  sign: str
  left: str
  right: str


Answer = (
  Quantity | Words | Ordered | Collection | Matrix | Named | Chain | Relation
)

_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
_SEPARATOR = re.compile(r"[,;]|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_UNION = re.compile("∪")
_DIFFERENCE = re.compile("∖")
_SIGN = re.compile("[=<>≤≥≠≈]")
_MEMBER = re.compile(r"^\s*[A-Za-z](?:_\{?\w+\}?)?\s*∈\s*")
_MATRIX = re.compile(
  r"[(\[]?\s*\\begin\s*\{([pbB]?matrix|smallmatrix|array)\}"
  r"(?:\{[clr| ]*\})?(.*)\\end\s*\{\1\}\s*[)\]]?",
  re.DOTALL,
)
# Possessive, as is _TAIL: there is more than one way to match, and trying all
# of them would take exponential time.
_NAME = re.compile(
  r"(?:[A-Za-z]\([\w\s,.+-]*\)|[A-Za-z]|\\text\{[^{}]*\}|\\[a-z]+ ?|"
  r"_\{?\w+\}?|[+\-/|'(){},\s])++"
)
_LITERAL = re.compile(
  r"(?P<sign>[-+]?)\s*(?P<money>[$€£¥₹]?)\s*(?P<minus>-?)(?:"
  r"(?:(?P<whole>\d+)\s*)?\\frac\{\s*(?P<top>-?\d+)\s*\}"
  r"\{\s*(?P<bottom>-?\d+)\s*\}|"
  r"(?:(?P<whole2>\d+)\s+)?(?P<top2>\d+)\s*/\s*(?P<bottom2>\d+)|"
  r"(?P<fixed>\d*)\.(?P<lead>\d*)\\(?:overline|dot|bar)\s*"
  r"\{(?P<period>\d+)\}|"
  r"(?P<digits>\d{1,3}(?: \d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
  r"(?:[eE](?P<e>[-+]?\d{1,4})|"
  r"\s*(?:\\times|\\cdot|x)\s*10\s*\^\s*\{?\s*(?P<e2>[-+]?\d{1,4})\s*\}?)?"
  r")(?![\d.])"
)
_TAIL = re.compile(
  r"(?:\s*(?:\\text\{[^{}]*\}|(?<=[\s/])[A-Za-z]{2,}|[°%])"
  r"(?:\s*\^\s*\{?\s*-?[1-3]\s*\}?)?\s*/?)++$"
)
_SCALES = {
  "hundred": 10**2,
  "thousand": 10**3,
  "million": 10**6,
  "billion": 10**9,
  "trillion": 10**12,
}
_SCALE = re.compile(rf"\s*(\\text\{{)?\s*({'|'.join(_SCALES)})\b")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)")


def readings(text: str) -> list[Answer]:
  """What ``text`` can mean.

  There are two meanings only where a comma may group digits or separate
  numbers, as in "1,234".
  """
  text = math_text.clean(text[: MAX_CHARS + 1])
  if not text or len(text) > MAX_CHARS:
    return []
  while text[0] == "{" and text[-1] == "}" and math_text.enclosed(text):
    text = text[1:-1].strip()
    if not text:
      return []
  texts = [text]
  # In (1,234) it separates; in (1,000, 2,000) it does both, told by the space.
  if not math_text.enclosed(text) or ", " in text:
    grouped = _GROUPED.sub(lambda match: match[0].replace(",", ""), text)
    if grouped != text:
      texts.insert(0, grouped)
  return [_read(each, 0) for each in texts]


def _read(text: str, level: int) -> Answer:
  if level > _MAX_DEPTH or not text:
    return Words(text)
  deeper = functools.partial(_read, level=level + 1)
  readers: tuple[
    Callable[[str, Callable[[str], Answer]], Answer | None], ...
  ] = (
    _read_wrapped,
    _read_matrix,
    _read_list,
    _read_union,
    _read_relation,
    _read_plus_minus,
    _read_bracketed,
  )
  for reader in readers:
    answer = reader(text, deeper)
    if answer is not None:
      return answer
  return _read_quantity(text)


Reader = Callable[[str], Answer]


def _read_wrapped(text: str, deeper: Reader) -> Answer | None:
  r"""``\text{42}``, ``{42}``, ``x ∈ [1, 2]``."""
  whole = re.fullmatch(r"\\text\s*\{([^{}]*)\}", text)
  if whole:
    return deeper(whole[1].strip(" .,;:"))
  member = _MEMBER.match(text)
  if member:
    return deeper(text[member.end() :])
  if text[0] == "{" and math_text.enclosed(text):
    return deeper(text[1:-1].strip())
  return None


def _read_matrix(text: str, deeper: Reader) -> Answer | None:
  match = _MATRIX.fullmatch(text)
  if match is None:
    return None
  rows = [row for row in re.split(r"\\\\", match[2]) if row.strip()]
  cells = [row.split("&") for row in rows]
  if sum(map(len, cells)) > _MAX_ITEMS:
    return Words(text)
  return Matrix(
    tuple(tuple(deeper(cell.strip()) for cell in row) for row in cells)
  )


def _read_list(text: str, deeper: Reader) -> Answer | None:
  items = [item for item in math_text.split(text, _SEPARATOR) if item]
  if len(items) < 2:
    return None
  if len(items) > _MAX_ITEMS:
    return Words(text)
  return Collection("list", _flat(map(deeper, items), "list"))


def _read_union(text: str, deeper: Reader) -> Answer | None:
  parts = math_text.split(text, _UNION)
  if len(parts) > 1:
    if len(parts) > _MAX_ITEMS:
      return Words(text)
    return Collection("union", _flat(map(deeper, parts), "union"))
  parts = math_text.split(text, _DIFFERENCE)
  if len(parts) == 2:
    return Ordered("∖", "", tuple(map(deeper, parts)))
  return None


def _read_relation(text: str, deeper: Reader) -> Answer | None:
  signs = [text[start:end] for start, end in math_text.top_level(text, _SIGN)]
  if not signs:
    return None
  sides = math_text.split(text, _SIGN)
  if not all(sides):
    return Words(text)
  if set(signs) <= {"=", "≈"}:
    return _read_equation(signs, sides, deeper)
  interval = _as_interval(signs, sides, deeper)
  if interval is not None:
    return interval
  if len(signs) != 1:
    return Words(text)
  left, right = sides
  if signs[0] in ">≥":
    left, right = right, left
  return Relation({">": "<", "≥": "≤"}.get(signs[0], signs[0]), left, right)


def _read_equation(
  signs: Sequence[str], sides: Sequence[str], deeper: Reader
) -> Answer:
  """A named value, an equation, or a chain that ends in the value."""
  text = "".join(itertools.chain(*zip(sides, [*signs, ""], strict=True)))
  if len(sides) > _MAX_DEPTH:
    return Words(text)
  name = sides[0] if _NAME.fullmatch(sides[0]) else None
  values = list(map(deeper, sides[1:] if name else sides))
  if len(values) == 1:
    return Named(key(name), values[0])
  if not name and len(values) == 2 and _has_variable(sides[0], sides[1]):
    if _NAME.fullmatch(sides[1]):
      return Named(key(sides[1]), values[0])
    return Relation("=", *sides)
  # A rounded value says less than the one that it is of.
  if "≈" in signs:
    values = values[: signs.index("≈") + (not name)] or values
  value = values[0] if len(values) == 1 else Chain(tuple(values))
  return Named(key(name), value) if name else value


def _as_interval(
  signs: Sequence[str], sides: Sequence[str], deeper: Reader
) -> Answer | None:
  """``x > 3`` and ``1 ≤ x < 2`` as the interval that x is in."""
  variable = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?|\\(?!infty)[a-z]+ ?")
  infinity = Quantity(r"\infty")
  if len(signs) == 1 and signs[0] != "≠":
    sign = signs[0]
    if variable.fullmatch(sides[0]):
      bound = sides[1]
    elif variable.fullmatch(sides[1]):
      bound, sign = sides[0], _turned(sign)
    else:
      return None
    value = deeper(bound)
    if sign in ">≥":
      return Ordered("[" if sign == "≥" else "(", ")", (value, infinity))
    minus = Quantity(r"-\infty")
    return Ordered("(", "]" if sign == "≤" else ")", (minus, value))
  if len(signs) == 2 and variable.fullmatch(sides[1]):
    if set(signs) <= {">", "≥"}:
      sides, signs = sides[::-1], [_turned(sign) for sign in signs[::-1]]
    if set(signs) <= {"<", "≤"}:
      return Ordered(
        "[" if signs[0] == "≤" else "(",
        "]" if signs[1] == "≤" else ")",
        (deeper(sides[0]), deeper(sides[2])),
      )
  return None


def _read_plus_minus(text: str, deeper: Reader) -> Answer | None:
  if text.count("±") != 1:
    return None
  both = (text.replace("±", sign).lstrip("+ ") for sign in "+-")
  return Collection("list", tuple(map(deeper, both)))


def _read_bracketed(text: str, deeper: Reader) -> Answer | None:
  if not math_text.enclosed(text):
    return None
  opening, closing, inside = text[0], text[-1], text[1:-1].strip()
  items = math_text.split(inside, re.compile("[,;]"))
  if len(items) > _MAX_ITEMS:
    return Words(text)
  if opening == "⦃" and closing == "⦄":
    return Collection("set", tuple(deeper(item) for item in items if item))
  if not all(items):
    return Words(text)
  if len(items) > 1:
    # Vectors in angles are tuples.
    opening, closing = (
      {"⟨": "("}.get(opening, opening),
      {"⟩": ")"}.get(closing, closing),
    )
    return Ordered(opening, closing, tuple(map(deeper, items)))
  if opening + closing in ("()", "[]"):
    return deeper(inside)
  return None


def _read_quantity(text: str) -> Answer:
  if text == r"\emptyset":
    return Collection("set", ())
  match = _LITERAL.match(text)
  if match:
    scale, tail = _scaled(text[match.end() :])
    unit = math_units.read(tail)
    quantity = None if unit is None else _literal(match, unit)
    if quantity is not None:
      return dataclasses.replace(quantity, number=quantity.number * scale)
  head, unit = _without_unit(text)
  head = head.removeprefix("+").strip()
  bare = re.sub(r"\\[A-Za-z]+", "", head)
  if (
    not head
    or r"\text" in head
    or "%" in head
    or re.search(r"[A-Za-z]{4}|[A-Za-z]+\s+[A-Za-z]{2}", bare)
  ):
    return Words(text)
  return Quantity(head, unit=unit)


def _scaled(tail: str) -> tuple[int, str]:
  """What a number is counted in, as in "5 million dollars", and the rest."""
  match = _SCALE.match(tail)
  if match is None:
    return 1, tail.strip()
  rest = tail[match.end() :]
  # What is left of the words stays words.
  return _SCALES[match[2]], (match[1] or "") + rest if rest.strip(" }") else ""


def _without_unit(text: str) -> tuple[str, str]:
  """An expression, and the unit that follows it."""
  tail = _TAIL.search(text, max(len(text) - 80, 1))
  unit = math_units.read(tail[0].strip()) if tail else None
  if unit is None:
    return text, ""
  head = text[: tail.start()].strip()
  # Words are things that are counted only where they are marked as words, and
  # degrees belong to the function before them.
  if (not unit and r"\text" not in tail[0]) or (
    unit == "°" and _TRIGONOMETRIC.search(head)
  ):
    return text, ""
  return head, unit


def _literal(match: re.Match[str], unit: str) -> Quantity | None:
  """The number written there; None if it is too long or has no value."""
  part = match.groupdict()
  if len(match[0]) > _MAX_DIGITS:
    return None
  if part["money"]:
    unit = unit or part["money"]
  places = digits = 0
  whole, top, bottom = (
    part[name] or part[f"{name}2"] for name in ("whole", "top", "bottom")
  )
  if top:
    if int(bottom) == 0:
      return None
    number = Fraction(int(top), int(bottom))
    if whole:
      if not 0 <= number < 1:
        return None  # 2\frac{3}{2} is a product to some.
      number += int(whole)
  elif part["period"]:
    lead = part["lead"]
    fixed = Fraction(int((part["fixed"] or "0") + lead), 10 ** len(lead))
    nines = 10 ** len(part["period"]) - 1
    number = fixed + Fraction(int(part["period"]), nines * 10 ** len(lead))
  else:
    written = part["digits"].replace(" ", "")
    exponent = int(part["e"] or part["e2"] or 0)
    number = Fraction(written) * Fraction(10) ** exponent
    _, point, after = written.partition(".")
    if point and after:
      places = len(after) - exponent
      digits = len(written.replace(".", "").lstrip("0"))
  if (part["sign"] == "-") != bool(part["minus"]):
    number = -number
  return Quantity(match[0].strip(), number, places, digits, unit)


def _flat(items: Iterable[Answer], kind: str) -> tuple[Answer, ...]:
  """Lists of lists, as of "x = 1, ± 2", are one list."""
  flat: list[Answer] = []
  for item in items:
    if isinstance(item, Collection) and item.kind == kind:
      flat.extend(item.items)
    else:
      flat.append(item)
  return tuple(flat)


def _has_variable(*texts: str) -> bool:
  return any(
    re.search("[A-Za-z]", re.sub(r"\\(?:frac|sqrt|pi|cdot|times)", "", text))
    for text in texts
  )


def _turned(sign: str) -> str:
  return {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}[sign]


def key(text: str) -> str:
  """The text without what makes no difference to its meaning."""
  text = re.sub(r"\{(\w)\}", r"\1", text)
  return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
