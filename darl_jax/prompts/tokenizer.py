"""Text to tokens and back.

The vocabulary is learned from the task's own text, as whole pieces and never
as merges of parts: a piece that many texts share (the question's template, its
common words and operators) becomes one token, and whatever varies from one
question to the next stays digits, letters and bytes. Byte-pair merges would
glue the letters of the very word that is to be spelled backward.
"""

import collections
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from darl_jax import config as config_lib

_PAD, _BOS, _EOS = "<pad>", "<bos>", "<eos>"

# A piece shared by fewer texts than this (and fewer than four) varies with
# the question: it is spelled out.
_MIN_SHARE = 0.005

# Words with the space before them, single digits, and runs of anything else up
# to the next word or digit. The template's two ends are tried first.
_PIECES = (
  r"{ends} ?\p{{L}}+|\p{{N}}|"
  r"[^\p{{L}}\p{{N}}]+?(?={tail} ?\p{{L}}|\p{{N}}|\z)"
)


class TaskTokenizer(Protocol):
  """What a run needs of a tokenizer: ``Tokenizer`` and ``ChatTokenizer``.

  Attributes:
    vocab_size: Token ids are below; a model may have more rows.
    pad_id: Fills what is not read; it may be a stop token.
    stop_ids: Tokens that end a response; ``encode_response`` ends with the
      first.
  """

  vocab_size: int
  pad_id: int
  stop_ids: tuple[int, ...]

  def encode_prompt(self, question: str) -> np.ndarray:
    """int32 [P]: all that the model reads before it answers."""

  def encode_response(self, answer: str) -> np.ndarray:
    """int32 [R]: the answer, then the stop token."""

  def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
    """The text before the first stop token, without special tokens."""

  def decode_prompt(self, tokens: np.ndarray | Sequence[int]) -> str:
    """All of a prompt, for people to read."""

  def save(self, path: str | os.PathLike) -> None:
    """Writes a ``tokenizer.json``, and beside it whatever else it needs."""


class Tokenizer:
  """A vocabulary of bytes and common pieces; lossless on every text.

  Text never yields a special token: "<eos>" in a question is five characters.
  """

  def __init__(self, tokenizer: tokenizers.Tokenizer):
    """Wraps a tokenizer that has <pad>, <bos> and <eos>; see ``train``."""
    # Not part of the file format, so it is set here and not in ``train``.
    tokenizer.encode_special_tokens = True
    self._tokenizer = tokenizer
    missing = [
      name for name in (_PAD, _BOS, _EOS) if tokenizer.token_to_id(name) is None
    ]
    if missing:
      raise ValueError(f"The tokenizer has no {', '.join(missing)}.")
    self.pad_id: int = tokenizer.token_to_id(_PAD)
    self.bos_id: int = tokenizer.token_to_id(_BOS)
    self.stop_ids: tuple[int, ...] = (tokenizer.token_to_id(_EOS),)

  @classmethod
  def train(
    cls,
    questions: Iterable[str],
    *,
    answers: Iterable[str] = (),
    vocab_size: int,
  ) -> "Tokenizer":
    """Learns the pieces that questions and answers share.

    Args:
      questions: Of one task; what all of them begin and end with is taken
        for its template.
      answers: Texts whose common pieces count too, but not as a template.
      vocab_size: Upper bound; at least 259 (three special tokens, 256 bytes).

    Raises:
      ValueError: If ``vocab_size`` cannot hold the bytes.
    """
    questions = list(questions)
    texts = questions + list(answers)
    byte_level = pre_tokenizers.ByteLevel(
      add_prefix_space=False, use_regex=False
    )
    splitter = pre_tokenizers.Sequence(
      [
        pre_tokenizers.Split(
          tokenizers.Regex(_pattern(*_template(questions))), "isolated"
        ),
        byte_level,
      ]
    )
    symbols = [_PAD, _BOS, _EOS, *sorted(byte_level.alphabet())]
    if vocab_size < len(symbols):
      raise ValueError(
        f"vocab_size = {vocab_size} cannot hold three special tokens and 256 "
        f"bytes. Try vocab_size={len(symbols)}."
      )
    symbols += _common_pieces(
      texts, splitter, limit=vocab_size - len(symbols), known=symbols
    )
    tokenizer = tokenizers.Tokenizer(
      models.BPE(
        vocab={symbol: token for token, symbol in enumerate(symbols)},
        merges=[],
        ignore_merges=True,  # A piece that is a token is taken whole.
      )
    )
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_PAD, _BOS, _EOS])
    return cls(tokenizer)

  @classmethod
  def load(cls, path: str | os.PathLike) -> "Tokenizer":
    """Reads a ``tokenizer.json`` that ``save`` wrote."""
    return cls(
      tokenizers.Tokenizer.from_str(pathlib.Path(path).read_text("utf-8"))
    )

  def save(self, path: str | os.PathLike) -> None:
    """Writes a ``tokenizer.json``."""
    pathlib.Path(path).write_text(self._tokenizer.to_str(), "utf-8")

  @property
  def vocab_size(self) -> int:
    return self._tokenizer.get_vocab_size()

  def encode_prompt(self, question: str) -> np.ndarray:
    """int32 [P]: BOS, then the question."""
    return np.asarray([self.bos_id, *self._encode(question)], np.int32)

  def encode_response(self, answer: str) -> np.ndarray:
    """int32 [R]: the answer, then the stop token."""
    return np.asarray([*self._encode(answer), self.stop_ids[0]], np.int32)

  def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
    """The text before the first stop token, without special tokens.

    Bytes that are not UTF-8 come back as U+FFFD.
    """
    text = []
    for token in np.asarray(tokens).tolist():
      if token in self.stop_ids:
        break
      text.append(token)
    return self._tokenizer.decode(text, skip_special_tokens=True)

  def decode_prompt(self, tokens: np.ndarray | Sequence[int]) -> str:
    """The question."""
    return self.decode(tokens)

  def _encode(self, text: str) -> list[int]:
    check_text(text)
    return self._tokenizer.encode(text, add_special_tokens=False).ids


def check_text(text: str) -> None:
  """Raises ValueError for a text that no tokenizer takes."""
  if problem := config_lib.text_problem(text):
    raise ValueError(f"{text!r} {problem}")


def _template(questions: Sequence[str]) -> tuple[str, str]:
  """What every question begins and ends with, cut at whole words."""
  prefix = os.path.commonprefix(questions)
  if any(_inside_word(question, len(prefix)) for question in questions):
    prefix = re.sub(r"\w+\Z", "", prefix)
  rests = [question[len(prefix) :] for question in questions]
  suffix = os.path.commonprefix([rest[::-1] for rest in rests])[::-1]
  if any(_inside_word(rest, len(rest) - len(suffix)) for rest in rests):
    suffix = re.sub(r"\A\w+", "", suffix)
  return prefix, suffix


def _inside_word(text: str, cut: int) -> bool:
  """Whether cutting ``text`` there would cut a word or a number in two."""
  return bool(re.match(r"\w\w", text[max(cut - 1, 0) : cut + 1]))


def _pattern(prefix: str, suffix: str) -> str:
  """The regular expression whose matches are the pieces of a text.

  None of them may read like a special token, which it would become.
  """
  prefix, suffix = (
    "" if end in (_PAD, _BOS, _EOS) else end for end in (prefix, suffix)
  )
  suffix = re.escape(suffix) + r"\z|" if suffix else ""
  prefix = r"\A" + re.escape(prefix) + "|" if prefix else ""
  return _PIECES.format(ends=prefix + suffix, tail=suffix)


def _common_pieces(
  texts: Sequence[str],
  splitter: pre_tokenizers.PreTokenizer,
  *,
  limit: int,
  known: Iterable[str],
) -> list[str]:
  """The at most ``limit`` shared pieces that save most tokens, best first."""
  uses: collections.Counter[str] = collections.Counter()
  holders: collections.Counter[str] = collections.Counter()
  for text in texts:
    pieces = [piece for piece, _ in splitter.pre_tokenize_str(text)]
    uses.update(pieces)
    holders.update(set(pieces))
  fewest = max(4, _MIN_SHARE * len(texts))
  known = set(known)
  shared = [
    piece
    for piece, count in holders.items()
    if count >= fewest and piece not in known
  ]
  shared.sort(key=lambda piece: (-uses[piece] * (len(piece) - 1), piece))
  return shared[:limit]
