"""Where a response's text says that it ends, whatever its tokens are."""

import functools
import pathlib
import tempfile

import numpy as np
import tokenizers
from absl.testing import parameterized
from tokenizers import decoders, models, pre_tokenizers

from darl_jax.config import ConfigError
from darl_jax.prompts.chat import ChatTokenizer
from darl_jax.prompts.stop_strings import StopStrings
from darl_jax.prompts.tokenizer import Tokenizer
from tests.fixtures import tiny_tokenizer


@functools.cache
def _task():
  """Bytes, and pieces that many texts share, such as " END"."""
  texts = [f"{i} + {i} END of it, é done.\n\n" for i in range(40)]
  tokenizer = Tokenizer.train(["1?", "2?"], answers=texts, vocab_size=290)
  return tokenizer.decode, tokenizer.vocab_size, tokenizer._encode


@functools.cache
def _chat():
  """Special tokens in between, which have no text."""
  with tempfile.TemporaryDirectory() as folder:
    path = tiny_tokenizer.copy_model(
      "llama-tied", pathlib.Path(folder) / "model"
    )
    tokenizer = ChatTokenizer.load(path, system="")
  return tokenizer.decode, tokenizer.vocab_size, tokenizer._encode


@functools.cache
def _sentencepiece():
  """As Llama 2 and Mistral have it: a run of bytes is text as a whole or not
  at all, and the space that a text begins with is dropped."""
  pieces = [f"<0x{byte:02X}>" for byte in range(256)]
  pieces += ["▁", "▁E", "E", "N", "D", "ND", "▁END", "a", "b", "é", ".", "\n"]
  vocabulary = {piece: token for token, piece in enumerate(pieces)}
  tokenizer = tokenizers.Tokenizer(
    models.BPE(vocab=vocabulary, merges=[], byte_fallback=True)
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  return (
    tokenizer.decode,
    len(pieces),
    lambda text: tokenizer.encode(text).ids,
  )


def _brute_force(tokens, strings, decode):
  """The first prefix whose text has a string; None if none has."""
  for kept in range(1, len(tokens) + 1):
    if any(string in decode(tokens[:kept]) for string in strings):
      return kept
  return None


def _in_chunks(tokens, stops, lengths):
  """What comes of asking whenever some tokens have come."""
  known = 0
  for length in lengths:
    here = tokens[: known + length]
    kept = stops(here, len(here) - known)
    if kept is not None:
      return kept
    known = len(here)
    if known == len(tokens):
      return None
  raise AssertionError("the chunks do not hold the tokens")


def _chunks(size):
  return [size] * 1000


class StopStringsTest(parameterized.TestCase):
  @parameterized.product(
    kind=(_task, _chat, _sentencepiece), chunk=(1, 2, 3, 7, 100)
  )
  def test_split_over_tokens_and_chunks(self, kind, chunk):
    decode, _, encode = kind()
    tokens = encode("a.ENDb.a")
    for strings in (["END"], ["a.END"], ["D"], ["NDb", "ENDb.a"], [".END"]):
      stops = StopStrings(strings, decode=decode)
      want = _brute_force(tokens, strings, decode)
      self.assertIsNotNone(want)
      self.assertEqual(_in_chunks(tokens, stops, _chunks(chunk)), want)
    stops = StopStrings(["ENDa"], decode=decode)
    self.assertIsNone(_in_chunks(tokens, stops, _chunks(chunk)))

  def test_in_the_middle_of_a_token(self):
    decode, _, encode = _task()
    tokens = encode("12 END of it")
    texts = [decode([token]) for token in tokens]
    self.assertIn(" END", texts)  # One token.
    stops = StopStrings(["EN"], decode=decode)
    kept = stops(tokens, len(tokens))
    self.assertEqual(decode(tokens[:kept]), "12 END")

  def test_the_first_token_after_which_there_is_one_wins(self):
    decode, _, encode = _task()
    tokens = encode("abcdefg")
    self.assertLen(tokens, 7)
    # "cdef" begins before "de" and ends after it.
    for strings in (["cdef", "de"], ["de", "cdef"]):
      stops = StopStrings(strings, decode=decode)
      for chunk in (1, 2, 7):
        self.assertEqual(_in_chunks(tokens, stops, _chunks(chunk)), 5)

  def test_a_character_of_several_tokens(self):
    decode, _, encode = _task()
    tokens = encode("x☃y")
    self.assertLen(tokens, 5)
    for string, want in (("☃", 4), ("x☃", 4), ("☃y", 5)):
      stops = StopStrings([string], decode=decode)
      for chunk in (1, 2, 3, 5):
        self.assertEqual(_in_chunks(tokens, stops, _chunks(chunk)), want)

  def test_tokens_without_text_lie_between(self):
    decode, vocab, encode = _chat()
    hidden = next(
      token
      for token in range(vocab)
      if not decode([token]) and decode([token, *encode("a")]) == "a"
    )
    # More of them than the window would reach back.
    tokens = [*encode("xE"), *[hidden] * 50, *encode("N"), hidden, *encode("D")]
    stops = StopStrings(["END"], decode=decode)
    for chunk in (1, 4, 100):
      got = _in_chunks(tokens, stops, _chunks(chunk))
      self.assertEqual(got, len(tokens))

  def test_the_stop_token_after_a_string_goes(self):
    decode, vocab, encode = _chat()
    stop = next(
      token for token in range(vocab) if decode([token, *encode("a")]) == ""
    )
    tokens = [*encode("xEND"), stop]
    stops = StopStrings(["END"], decode=decode)
    self.assertEqual(stops(tokens, 2), len(tokens) - 1)
    stops = StopStrings(["ENDE"], decode=decode)
    self.assertIsNone(stops(tokens, 2))

  @parameterized.product(kind=(_task, _chat, _sentencepiece), seed=(0, 1, 2, 3))
  def test_random_tokens(self, kind, seed):
    """As deciding on the whole text, token by token."""
    decode, vocab, encode = kind()
    rng = np.random.default_rng(seed)
    found = 0
    for _ in range(60):
      # Parts of the strings, and bytes in any order.
      parts = ["E", "N", "D", "ND", " END", "a", "é", "é.", "☃", "\n", "b"]
      noise = rng.choice([0.0, 0.1, 0.5])
      tokens = []
      for _ in range(rng.integers(1, 40)):
        if rng.random() < noise:
          tokens.append(int(rng.integers(vocab)))
        else:
          tokens += encode(str(rng.choice(parts)))
      text = decode(tokens)
      strings = ["END", "ND ", "é.", "\n☃", "☃", "aE", "b" * 9]
      strings = rng.choice(strings, size=rng.integers(1, 3)).tolist()
      if len(text) > 20 and rng.random() < 0.5:
        start = rng.integers(len(text) - 12)
        piece = text[start : start + rng.integers(1, 12)]
        strings += [piece] * ("\ufffd" not in piece)
      stops = StopStrings(strings, decode=decode)
      want = _brute_force(tokens, strings, decode)
      found += want is not None
      got = _in_chunks(tokens, stops, rng.integers(1, 9, size=50))
      self.assertEqual(got, want, (tokens, strings))
    self.assertBetween(found, 10, 58)

  def test_decodes_a_window_and_not_the_whole(self):
    decode, _, encode = _task()
    lengths = []

    def counting(tokens):
      lengths.append(len(tokens))
      return decode(tokens)

    stops = StopStrings(["ENDING"], decode=counting)
    tokens = encode("abc " * 500)
    self.assertIsNone(stops(tokens, 4))
    self.assertLen(lengths, 2)
    self.assertLess(max(lengths), 16)

  @parameterized.parameters(
    ([""], "has ''"),
    (["END", ""], r"Try rollout.stop_strings=\('END',\)"),
    (["a\ufffd"], "U\\+FFFD"),
    (["a\udc00"], "half of a surrogate"),
    ("END", r"is one text.* Try \('END',\)"),
    (["END", 3], r"not a tuple of texts. Try \('END',\)"),
    ([b"END"], r"not a tuple of texts. Try \(\)"),
    (3, r"not a tuple of texts. Try \(\)"),
    (None, r"not a tuple of texts. Try \(\)"),
  )
  def test_refuses(self, strings, message):
    with self.assertRaisesRegex(ConfigError, message):
      StopStrings(strings, decode=_task()[0])
