"""LaTeX of a final answer, brought to one spelling.

Formatting commands go, and what has several names keeps one: every bracket is a
single character (sets are in ``⦃⦄``), as is every relation, so that the rest of
the grader can take an answer apart at its top level. Each function takes time
linear in the text, or close to it.
"""

import re
from collections.abc import Iterator

OPENING, CLOSING = "({[⦃⟨", ")}]⦄⟩"

_CHARACTERS = str.maketrans(
  {
    "−": "-",
    "–": "-",
    "—": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": "/",
    "⁄": "/",
    "∕": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "√": r"\sqrt ",
    "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "²": "^{2}",
    "³": "^{3}",
    "º": "°",
    "∘": "°",
    "，": ",",
    "：": ":",
    "（": "(",
    "）": ")",
    "％": "%",
    "\u00a0": " ",
    "\u202f": " ",
    "\u2009": " ",
    "~": " ",
    # What this module gives a meaning, a text cannot.
    "⦃": " ",
    "⦄": " ",
  }
)

# One name of each command; "" where it only changes the looks.
_COMMANDS = {
  name: meaning
  for names, meaning in (
    ("left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr", ""),
    ("displaystyle textstyle limits nolimits boldsymbol bm rm bf it", ""),
    ("quad qquad enspace thinspace newline", " "),
    ("dfrac tfrac cfrac nicefrac", r"\frac "),
    ("dbinom tbinom", r"\binom "),
    ("le leq leqslant", "≤"),
    ("ge geq geqslant", "≥"),
    ("ne neq", "≠"),
    ("approx simeq approxeq", "≈"),
    ("cup bigcup", "∪"),
    ("setminus backslash", "∖"),
    ("lor vee", " or "),
    ("land wedge", " and "),
    ("lvert rvert vert mid", "|"),
    ("cdot ast", r"\cdot "),
    ("varnothing", r"\emptyset "),
    ("lt", "<"),
    ("gt", ">"),
    ("in", "∈"),
    ("pm", "±"),
    ("div", "/"),
    ("colon", ":"),
    ("degree", "°"),
    ("langle", "⟨"),
    ("rangle", "⟩"),
    ("lbrace", "⦃"),
    ("rbrace", "⦄"),
    ("lbrack", "["),
    ("rbrack", "]"),
    ("euro", "€"),
    ("pounds", "£"),
    (
      "text textbf textit textrm textsf texttt textnormal emph mathrm mathbf "
      "mathit mathsf mathtt operatorname mbox hbox",
      r"\text",
    ),
  )
  for name in names.split()
}
_SYMBOLS = {
  "{": "⦃",
  "}": "⦄",
  "%": "%",
  "#": "#",
  "_": "_",
  "(": "",
  ")": "",
  "[": "",
  "]": "",
  "!": "",
  ",": "\x02",
  ";": "\x02",
  ":": "\x02",
  ">": "\x02",
  " ": " ",
  "\\": r"\\",
  "&": " and ",
  "$": "\x01",
}
_FUNCTION = re.compile(
  r"\\text\{(sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|ln|log|exp)\}"
)
_ORDINAL = re.compile(
  r"\^\s*(?:\{\s*(st|nd|rd|th)\s*\}|\{\s*\\text\{(st|nd|rd|th)\}\s*\}|"
  r"\\text\{(st|nd|rd|th)\})"
)
_COMMAND = re.compile(r"\\(?:([A-Za-z]+)\*?\s*|(.))", re.DOTALL)
_ROOT = re.compile(r"\s*(\[[^\[\]]*\])?\s*")
_ARGUMENT = re.compile(r"\\[A-Za-z]+|.", re.DOTALL)


def clean(text: str) -> str:
  """The one spelling of ``text``; of an answer cleaned already, itself."""
  text = text.translate(_CHARACTERS).replace("**", "^")
  text = re.sub(r"\\\\\[[^\]]{0,10}\]", r"\\\\", text)  # Space between rows.
  text = _COMMAND.sub(_renamed, text)
  text = _FUNCTION.sub(r"\\\1 ", text)
  text = _without_delimiters(text)
  # Thin spaces group digits; elsewhere they are spaces.
  text = re.sub(r"(?<=\d)\x02+(?=\d)", "", text).replace("\x02", " ")
  text = _with_grouping_read(text)
  text = re.sub(r"\^\s*(?:\{\s*(?:\\circ|°)\s*\}|\\circ\b|°)", "°", text)
  text = _ORDINAL.sub(r"\\text{\1\2\3}", text)
  text = re.sub(r"\\text\{\s*(and|or|,)\s*\}", r" \1 ", text)
  text = _with_braced_arguments(text)
  text = text.replace("*", r"\cdot ")
  text = " ".join(text.split())
  text = re.sub(r"(\\[A-Za-z]+) (?![A-Za-z])", r"\1", text)
  return text.lstrip(" ,;:").rstrip(" .,;:")


def split(text: str, separator: re.Pattern[str]) -> list[str]:
  """``text`` cut where ``separator`` matches outside all brackets."""
  parts, start = [], 0
  for begin, end in top_level(text, separator):
    parts.append(text[start:begin].strip())
    start = end
  return [*parts, text[start:].strip()]


def top_level(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, int]]:
  """Where ``pattern`` matches outside all brackets."""
  depths = _depths(text)
  for match in pattern.finditer(text):
    if depths[match.start()] == 0:
      yield match.span()


def enclosed(text: str) -> bool:
  """Whether one pair of brackets, whatever its kinds, holds all of it."""
  if len(text) < 2 or text[0] not in OPENING or text[-1] not in CLOSING:
    return False
  level = 0
  for character in text[:-1]:
    level += (character in OPENING) - (character in CLOSING)
    if level <= 0:
      return False
  return True


def depth(text: str) -> int:
  """How deep brackets nest."""
  return max(_depths(text), default=0)


def argument(text: str, start: int) -> int | None:
  """Where the brace opened at ``start`` is closed: past the closing one."""
  level = 0
  for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
    level += {"{": 1, "}": -1}.get(match[0], 0)
    if level == 0:
      return start + match.end()
  return None


def _depths(text: str) -> list[int]:
  """For each character how many brackets are open around it.

  A bracket is inside itself.
  """
  depths, level = [], 0
  for character in text:
    level += character in OPENING
    depths.append(level)
    level = max(level - (character in CLOSING), 0)
  return depths


def _renamed(match: re.Match[str]) -> str:
  name, symbol = match.groups()
  if symbol is not None:
    return _SYMBOLS.get(symbol, symbol)
  # The space ends the command's name wherever a letter follows.
  return _COMMANDS.get(name, f"\\{name} ")


def _without_delimiters(text: str) -> str:
  """Drops the dollars around math; those that are left are money."""
  if text.count("$") == 1:
    text = re.sub(r"\$(?=\s*[\d.])", "\x01", text)
  return text.replace("$", "").replace("\x01", "$")


def _with_grouping_read(text: str) -> str:
  """In ``1{,}234`` it groups digits, in ``3{,}14`` it is the decimal point."""
  text = re.sub(
    r"(?<![\d}])[1-9]\d{0,2}(?:\{,\}\d{3})+(?!\d|\{,\})",
    lambda match: match[0].replace("{,}", ""),
    text,
  )
  return re.sub(r"(?<=\d)\{,\}(?=\d)", ".", text)


def _with_braced_arguments(text: str) -> str:
  r"""``\frac12`` is ``\frac{1}{2}``, ``\sqrt3`` is ``\sqrt{3}``."""
  wanted = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1}
  pieces, position = [], 0
  for match in re.finditer(r"\\(?:frac|binom|sqrt)(?![A-Za-z])", text):
    if match.start() < position:
      continue  # The argument of the one before.
    pieces.append(text[position : match.end()])
    position = match.end()
    for _ in range(wanted[match[0]]):
      piece, position = _braced(text, position)
      pieces.append(piece)
  return "".join([*pieces, text[position:]])


def _braced(text: str, position: int) -> tuple[str, int]:
  """The argument there, in braces, and where to read on."""
  space = _ROOT.match(text, position)
  root, position = space[1] or "", space.end()
  # A parenthesis, as in sqrt(2), is left to parsers.
  if position >= len(text) or text[position] in "})(":
    return root, position
  if text[position] == "{":
    end = argument(text, position) or len(text)
    return root + _with_braced_arguments(text[position:end]), end
  match = _ARGUMENT.match(text, position)
  if match[0] != r"\sqrt":
    return f"{root}{{{match[0]}}}", match.end()
  # Its own argument goes with it.
  inner, end = _braced(text, match.end())
  return f"{root}{{{match[0]}{inner}}}", end
