"""A final answer as data: taken apart at its top level, and compared.

Numbers, units, lists, brackets, intervals, matrices and relations are read
here, exactly. What is none of them is an expression, or words.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from darl_jax.rewards import math_expression, math_text, math_units
from darl_jax.rewards.math_expression import UnreadableError

MAX_CHARS = 5000
_MAX_ITEMS = 32
_MAX_DEPTH = 12
# Python's own limit for an int read from text.
_MAX_DIGITS = 4000
# Decimals with less are what they say; with more, a rounded value.
_ROUNDED_PLACES = 4
_ROUNDED_DIGITS = 6


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
class Relation:
  """Two sides: ``=``, ``<``, ``≤`` or ``≠``."""

  sign: str
  left: str
  right: str


Answer = Quantity | Words | Ordered | Collection | Matrix | Named | Relation

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
_CHOICE = re.compile(
  r"(?:(?:option|choice|answer) )?\(?([a-j])(?:$|\)|[.:])(.*)$", re.DOTALL
)
_SECOND_CHOICE = re.compile(r"\([a-j]\)|\b(?:or|and)\b|\b[a-j](?:[).:]|$)")


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


def same(answer: Answer, reference: Answer) -> bool:
  """Whether ``answer`` says what ``reference`` does."""
  if answer == reference:
    return True
  if isinstance(answer, Named) or isinstance(reference, Named):
    return _same_named(answer, reference)
  if isinstance(answer, Collection) or isinstance(reference, Collection):
    return _same_collection(answer, reference)
  if isinstance(answer, Ordered) and isinstance(reference, Ordered):
    return _same_sequence(answer, reference)
  if isinstance(answer, Matrix) or isinstance(reference, Matrix):
    return _same_matrix(answer, reference)
  if isinstance(answer, Relation) and isinstance(reference, Relation):
    return _same_relation(answer, reference)
  if isinstance(answer, Quantity) and isinstance(reference, Quantity):
    return _same_quantity(answer, reference)
  return _same_words(answer, reference)


# Reading.


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
    return Named(_key(name), values[0])
  if not name and len(values) == 2 and _has_variable(sides[0], sides[1]):
    if _NAME.fullmatch(sides[1]):
      return Named(_key(sides[1]), values[0])
    return Relation("=", *sides)
  # What stands at the end, unless the chain contradicts itself. A rounded
  # value says less than the one that it is of.
  exact = values[: signs.index("≈") + (not name)] if "≈" in signs else values
  exact = exact or values
  for one, two in itertools.pairwise(exact):
    try:
      if not same(one, two):
        return Words(text)
    except UnreadableError:
      return Words(text)
  return Named(_key(name), exact[-1]) if name else exact[-1]


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


# Comparing.


def _same_quantity(answer: Quantity, reference: Quantity) -> bool:
  units = answer.unit, reference.unit
  percent = [unit == "%" for unit in units]
  if all(units) and units[0] != units[1] and not any(percent):
    return False
  if answer.number is None or reference.number is None:
    return percent[0] == percent[1] and (
      _same_words(answer, reference) or _same_expression(answer, reference)
    )
  if _same_number(answer, reference):
    return True
  # 50 % is 50 where a percentage was asked for, and a half otherwise.
  if percent == [True, False]:
    return _same_number(_hundredth(answer), reference)
  if percent == [False, True]:
    return _same_number(answer, _hundredth(reference))
  return False


def _hundredth(quantity: Quantity) -> Quantity:
  places = quantity.places + 2 if quantity.digits else 0
  return dataclasses.replace(
    quantity, number=quantity.number / 100, places=places
  )


def _same_number(one: Quantity, two: Quantity) -> bool:
  if one.number == two.number:
    return True
  rounded = [each for each in (one, two) if _is_rounded(each)]
  if not rounded:
    return False
  coarse = min(rounded, key=lambda each: each.places)
  fine = two if coarse is one else one
  # A finer decimal may be the value of a coarser one, not another of its kind.
  if fine.digits and fine.places <= coarse.places:
    return False
  return _rounds_to(fine.number, coarse)


def _is_rounded(quantity: Quantity) -> bool:
  return (
    quantity.places >= _ROUNDED_PLACES and quantity.digits >= _ROUNDED_DIGITS
  )


def _rounds_to(number: Fraction, decimal: Quantity) -> bool:
  """Whether ``decimal`` is the number rounded, or cut off, where it ends."""
  unit = Fraction(1, 10**decimal.places)
  difference = abs(number) - abs(decimal.number)
  return (number < 0) == (decimal.number < 0) and (
    -unit / 2 <= difference < unit
  )


def _same_expression(one: Quantity, two: Quantity) -> bool:
  if _key(one.text) == _key(two.text):
    return True
  trees = math_expression.parse(one.text), math_expression.parse(two.text)
  for decimal, tree in ((one, trees[1]), (two, trees[0])):
    if _is_rounded(decimal) and not tree.free_symbols:
      value = math_expression.real_constant(tree)
      if value is not None and _rounds_to(value, decimal):
        return True
  return math_expression.equal(*trees)


def _same_named(answer: Answer, reference: Answer) -> bool:
  names = [each.name for each in (answer, reference) if isinstance(each, Named)]
  if len(names) == 2 and names[0] == names[1]:
    return same(answer.value, reference.value)
  if isinstance(answer, Relation) or isinstance(reference, Relation):
    return _same_relation(_as_relation(answer), _as_relation(reference))
  if len(names) == 2:
    return False
  if isinstance(answer, Named):
    return same(answer.value, reference)
  return same(answer, reference.value)


def _as_relation(answer: Answer) -> Relation:
  if isinstance(answer, Relation):
    return answer
  if isinstance(answer, Named) and isinstance(answer.value, Quantity):
    return Relation("=", answer.name, answer.value.text)
  raise UnreadableError("it is no relation")


def _same_relation(answer: Relation, reference: Relation) -> bool:
  if answer.sign != reference.sign:
    return False
  one, two = (
    (math_expression.parse(each.left), math_expression.parse(each.right))
    for each in (answer, reference)
  )
  return math_expression.proportional(
    one, two, positive=answer.sign in ("<", "≤")
  )


def _same_collection(answer: Answer, reference: Answer) -> bool:
  """Sets, lists and unions: each item has its like."""
  if isinstance(answer, Ordered) or isinstance(reference, Ordered):
    # "1, 2" without brackets is the tuple that was asked for.
    lists = [
      each for each in (answer, reference) if isinstance(each, Collection)
    ]
    other = answer if lists[0] is reference else reference
    return (
      lists[0].kind == "list"
      and isinstance(other, Ordered)
      and other.opening + other.closing == "()"
      and len(other.items) == len(lists[0].items)
      and _pairwise(lists[0].items, other.items)
    )
  if not (isinstance(answer, Collection) and isinstance(reference, Collection)):
    # "0.25 or 1/4" says one thing twice; a set of one is its element.
    one, other = (
      (answer, reference)
      if isinstance(answer, Collection)
      else (reference, answer)
    )
    return len(one.items) > 0 and all(
      _same_or_no(item, other) for item in one.items
    )
  kinds = {answer.kind, reference.kind}
  if kinds == {"set", "union"}:
    return False
  given, wanted = answer.items, reference.items
  if "set" in kinds:
    given, wanted = _distinct(given), _distinct(wanted)
  return len(given) == len(wanted) and _matched(given, wanted)


def _matched(given: Sequence[Answer], wanted: Sequence[Answer]) -> bool:
  left = list(wanted)
  for item in given:
    for index, candidate in enumerate(left):
      if _same_or_no(item, candidate):
        del left[index]
        break
    else:
      return False
  return True


def _distinct(items: Sequence[Answer]) -> list[Answer]:
  kept: list[Answer] = []
  for item in items:
    if not any(_same_or_no(item, other) for other in kept):
      kept.append(item)
  return kept


def _same_or_no(answer: Answer, reference: Answer) -> bool:
  try:
    return same(answer, reference)
  except UnreadableError:
    return False


def _same_sequence(answer: Ordered, reference: Ordered) -> bool:
  if len(answer.items) != len(reference.items):
    return False
  brackets = [each.opening + each.closing for each in (answer, reference)]
  # Of two items the brackets say what is open; vectors come in any.
  if brackets[0] != brackets[1] and (
    len(answer.items) == 2 or not set(brackets) <= {"()", "[]"}
  ):
    return False
  return _pairwise(answer.items, reference.items)


def _same_matrix(answer: Answer, reference: Answer) -> bool:
  one, two = _as_rows(answer), _as_rows(reference)
  return [len(row) for row in one] == [len(row) for row in two] and all(
    map(_pairwise, one, two)
  )


def _as_rows(answer: Answer) -> Sequence[Sequence[Answer]]:
  """A vector's items are a column's."""
  if isinstance(answer, Matrix):
    return answer.rows
  if isinstance(answer, Ordered) and answer.opening in "([":
    return [[item] for item in answer.items]
  raise UnreadableError("it is no matrix")


def _pairwise(one: Sequence[Answer], two: Sequence[Answer]) -> bool:
  return len(one) == len(two) and all(map(same, one, two))


def _same_words(answer: Answer, reference: Answer) -> bool:
  one, two = _text(answer), _text(reference)
  if one is None or two is None:
    return False
  one, two = _plain(one), _plain(two)
  return bool(one) and (one == two or _same_choice(one, two))


def _same_choice(answer: str, reference: str) -> bool:
  """Whether the reference is a letter, perhaps with what it stands for."""
  wanted, given = _CHOICE.match(reference), _CHOICE.match(answer)
  return bool(
    wanted
    and given
    and wanted[1] == given[1]
    and not _SECOND_CHOICE.search(given[2])
  )


def _text(answer: Answer) -> str | None:
  """Of what has no value as a number, how it is written."""
  if isinstance(answer, Words):
    return answer.text
  if isinstance(answer, Quantity) and answer.number is None:
    return answer.text
  return None


# Both.


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


def _key(text: str) -> str:
  """The text without what makes no difference to its meaning."""
  text = re.sub(r"\{(\w)\}", r"\1", text)
  return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _plain(text: str) -> str:
  text = re.sub(r"\\text|[{}\"`]", "", text)
  return " ".join(text.casefold().split())
