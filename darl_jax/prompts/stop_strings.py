"""Where a response ends because its text says so."""

from collections.abc import Callable, Sequence

from darl_jax import config as config_lib
from darl_jax.config import ConfigError

_REPLACEMENT = "\ufffd"
# Characters that a window may have too many or too few at its start: a space,
# a mark that a word goes on.
_SLACK = 4


class StopStrings:
  """Ends a response with the first token after which its text has a string.

  Text means what the tokenizer decodes, which is not the sum of what it makes
  of each token: a character may need several tokens, special ones have no text,
  and some tokenizers drop the space that a text begins with. So a window is
  decoded that is long enough for a string to begin before the new tokens, and
  what is found in it is believed once the whole text has it.
  """

  def __init__(
    self, strings: Sequence[str], *, decode: Callable[[Sequence[int]], str]
  ):
    """Remembers no response: it may be asked about any, in any order.

    Args:
      strings: At least one.
      decode: Tokens to text, bytes that are not UTF-8 to U+FFFD.

    Raises:
      ConfigError: A string can end nothing.
    """
    if problems := config_lib.stop_string_problems(strings):
      raise ConfigError(problems)
    self._strings = tuple(strings)
    self._decode = decode
    # As much of a string as may lie before the token that completes it.
    self._most = max(map(len, self._strings)) - 1

  def __call__(self, tokens: Sequence[int], new: int) -> int | None:
    """How many tokens of a response to keep, or None where it goes on.

    Args:
      tokens: Of the response, its stop token included if it has one.
      new: How many of them came last, since it was asked before.
    """
    known = len(tokens) - new
    start = self._window(tokens, known)
    text = self._decode(tokens[start:])
    # What stands at the end of a text for a character's first bytes, some
    # tokenizers let stand for the characters before it, too.
    if not self._has(text) and _REPLACEMENT not in text:
      return None
    for kept in range(known + 1, len(tokens) + 1):
      if self._has(self._decode(tokens[start:kept])) and self._has(
        self._decode(tokens[:kept])
      ):
        return kept
    return None

  def _window(self, tokens: Sequence[int], known: int) -> int:
    """Where the window starts: before so much text that was seen already."""
    count = needed = self._most + _SLACK  # Of one character each, or more.
    while count < known:
      text = self._decode(tokens[known - count : known])
      # A replacement stands for what the window's start or end cuts in two.
      if len(text) - text.count(_REPLACEMENT) >= needed:
        return known - count
      count *= 2
    return 0

  def _has(self, text: str) -> bool:
    return any(string in text for string in self._strings)
