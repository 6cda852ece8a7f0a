"""What may follow a number without being part of it: units, money, things."""

import re

_NAMES = {
  "mm": "millimeter millimetre",
  "cm": "centimeter centimetre",
  "m": "meter metre",
  "km": "kilometer kilometre",
  "in": "inch inches",
  "ft": "foot feet",
  "yd": "yard",
  "mi": "mile",
  "mg": "milligram",
  "g": "gram gm",
  "kg": "kilogram",
  "lb": "pound",
  "oz": "ounce",
  "ml": "milliliter millilitre mL",
  "l": "liter litre L",
  "s": "second sec",
  "min": "minute",
  "h": "hour hr",
  "day": "",
  "week": "",
  "month": "",
  "year": "yr",
  "°": "degree deg",
  "°c": "°C celsius",
  "°f": "°F fahrenheit",
  "rad": "radian",
  "mi/h": "mph",
  "km/h": "kph kmh kmph",
  "n": "newton N",
  "j": "joule J",
  "w": "watt W",
  "v": "volt V",
  "pa": "pascal Pa",
  "hz": "hertz Hz",
  "mol": "mole",
  "k": "kelvin K",
  "unit": "",
  "th": "st nd rd",
  "$": "dollar buck usd USD",
  "cent": "¢",
  "€": "euro eur EUR",
  "£": "gbp GBP",
  "¥": "yen yuan",
  "₹": "rupee",
}
_CANONICAL = {
  spelling: unit
  for unit, spellings in _NAMES.items()
  for spelling in (unit, *spellings.split())
}
_DEGREES = ("°", "degree", "deg")
_PERCENT = frozenset(("%", "percent", "per cent", "percentage", "pct"))
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
# Words that make a claim of what follows a number.
_NO_UNIT = re.compile(
  r"\b(?:and|or|not|no|nor|is|are|was|if|then|when|where|but|wrong|false|mod|"
  r"sin|cos|tan|log|ln|exp|sqrt|over|plus|minus|times|divided|approx|maybe|else|"
  r"unless|except|either|than|less|more|least|most|half|halves|thirds?|quarters?|"
  r"[a-z]{3,}ths)\b",
  re.IGNORECASE,
)
_POWER = r"(?:\s*\^\s*\{?\s*(-?[1-3])\s*\}?)?"
_PIECE = re.compile(
  rf"\s*(?:\\text\{{([^{{}}]*)\}}|([^\W\d_]+|[°€£¥₹$%¢]))\.?{_POWER}"
  r"\s*(/|\\cdot|-)?"
)
CURRENCIES = "$€£¥₹"


def read(tail: str) -> str | None:
  r"""The unit that ``tail`` is, in one spelling.

  Args:
    tail: What follows a number, as ``math_text.clean`` leaves it:
      ``\\text{cm}``, ``cm^2``, ``%``, ``dollars``, ``red apples``.

  Returns:
    "%", a known unit such as "km/h" or "cm^2"; "" for words that count things,
    or for nothing; None if ``tail`` says anything else.
  """
  if len(tail) > 80:
    return None
  words, position = [], 0
  while position < len(tail):
    match = _PIECE.match(tail, position)
    if match is None or match.end() == position:
      return None
    position = match.end()
    inside, bare, power, joint = match.groups()
    if inside is None and not _may_be_bare(bare, tail[: match.start(2)]):
      return None
    piece = (inside if inside is not None else bare).strip()
    words.append(f"{piece}^{power}" if power and power != "1" else piece)
    words.append("/" if joint == "/" else " ")
  return _named("".join(words).strip())


def _may_be_bare(word: str, before: str) -> bool:
  """One letter is a variable, and so are several without a space before."""
  return (
    word in "°€£¥₹$%¢"
    or before.endswith(("°", "/"))
    or (len(word) > 1 and _singular(word) in _CANONICAL)
    or (len(word) > 3 and before[-1:] in ("", " "))
    or word in ("of", "per")
  )


def _named(words: str) -> str | None:
  words = words.replace("per cent", "percent")
  if words.lower() in _PERCENT:
    return "%"
  if re.search(r"\d", re.sub(r"\^-?[23]", "", words)) or not re.fullmatch(
    r"[^\W\d_]?[\w\s°€£¥₹$¢/^.'’-]*", words
  ):
    return None
  parts = re.split(r"\s*/\s*|\s+per\s+", words)
  if _NO_UNIT.search(words):
    return None
  known = [_known(part) for part in parts]
  return "/".join(known) if all(known) else ""


def _known(part: str) -> str:
  """One unit, perhaps to a power; "" if it is none that we know."""
  power, names = 1, []
  for word in part.replace("-", " ").split():
    word = word.strip(".")
    name, _, exponent = word.partition("^")
    if exponent:
      power = int(exponent)
    elif word in _POWERS:
      power = _POWERS[word]
    elif word in ("squared", "cubed"):
      power = 2 if word == "squared" else 3
    if word not in _POWERS and word not in ("squared", "cubed"):
      names.append(name)
  if len(names) == 2 and _singular(names[0]) in _DEGREES:
    # "° C" and "degrees Celsius" are one name.
    names = [f"°{names[1]}" if len(names[1]) == 1 else names[1]]
  if len(names) != 1:
    return ""
  unit = _CANONICAL.get(_singular(names[0]), "")
  return unit if power == 1 or not unit else f"{unit}^{power}"


def _singular(word: str) -> str:
  """Only looked up, so that nonsense does no harm."""
  for form in (word, word.lower()):
    if form in _CANONICAL:
      return form
    if form.endswith("s") and form[:-1] in _CANONICAL:
      return form[:-1]
  return word
