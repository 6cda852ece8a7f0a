"""Whether two final answers, as ``math_answer`` reads them, say the same."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from fractions import Fraction

from darl_jax.rewards import math_expression
from darl_jax.rewards.math_answer import (
  Answer,
  Chain,
  Collection,
  Matrix,
  Named,
  Ordered,
  Quantity,
  Relation,
  Words,
  key,
)
from darl_jax.rewards.math_expression import UnreadableError

# Decimals with less are what they say; with more, a rounded value.
_ROUNDED_PLACES = 4
_ROUNDED_DIGITS = 6
_CHOICE = re.compile(
  r"(?:(?:option|choice|answer) )?\(?([a-j])(?:$|\)|[.:])(.*)$", re.DOTALL
)
_SECOND_CHOICE = re.compile(r"\([a-j]\)|\b(?:or|and)\b|\b[a-j](?:[).:]|$)")


def same(answer: Answer, reference: Answer) -> bool:
  """Whether ``answer`` says what ``reference`` does.

  Raises:
    UnreadableError: They cannot be compared.
  """
  if answer == reference:
    return True
  if isinstance(answer, Chain) or isinstance(reference, Chain):
    return same(_end(answer), _end(reference))
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


def _end(answer: Answer) -> Answer:
  """What a chain ends in, unless it contradicts itself."""
  if not isinstance(answer, Chain):
    return answer
  for one, two in itertools.pairwise(answer.sides):
    if not same(one, two):
      raise UnreadableError("its sides are not equal")
  return answer.sides[-1]


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
  if key(one.text) == key(two.text):
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


def _plain(text: str) -> str:
  text = re.sub(r"\\text|[{}\"`]", "", text)
  return " ".join(text.casefold().split())
