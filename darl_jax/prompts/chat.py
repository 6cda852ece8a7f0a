"""Published models' tokenizers: a question asked through the chat template.

A question becomes a user message, which the model's own template renders to
text that is encoded once. What a model generates is never encoded again: the
loop hands on the tokens that were sampled.

Nothing that a message says can become a special token. Each occurrence of one
in a message is cut in two by a mark, which is itself a token, so that it splits
the text and the rest of the rendered prompt is encoded as if it were not there;
the marks are then taken out of the encoded prompt.
"""

import datetime
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
import tokenizers
from jinja2 import nodes

from darl_jax.config import ConfigError
from darl_jax.models import gguf
from darl_jax.prompts.tokenizer import check_text

# Cuts special tokens in messages; Unicode reserves it for such internal use.
_MARK = "\ufdd0"
# Stands for an answer where only its surroundings are of interest.
_ANSWER = "\ufdd1"

# The day that templates are told. A prompt must not change from one day of a
# run to the next; where they are told none, Llama's own templates take this.
_TODAY = datetime.datetime(2024, 7, 26)

_GENERATION = "generation_config.json"
_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
  _GENERATION,
)
# What Python raises where a template computes with what it was not given.
_EVALUATION_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class _Generation(jinja2.ext.Extension):
  """``{% generation %}`` marks what a model says; rendering it adds nothing."""

  tags = {"generation"}

  def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
  """A Jinja template, as published models carry it, in a sandbox."""

  def __init__(self, source: str, *, special_tokens: Mapping[str, str]):
    """Compiles the template.

    Args:
      source: Its text.
      special_tokens: What templates call bos_token, eos_token and so on.

    Raises:
      ConfigError: The text is no template.
    """
    self.source = source
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
      raise_exception=_raise_exception,
      strftime_now=_TODAY.strftime,
      # Templates ask whether these are none, and not only whether defined.
      tools=None,
      documents=None,
      **special_tokens,
    )
    try:
      self._template = environment.from_string(source)
    except jinja2.TemplateError as error:
      raise ConfigError(
        [f"The chat template cannot be read: {error}."]
      ) from error

  def render(
    self,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool,
  ) -> str:
    """The messages as text.

    Args:
      messages: Of "role" (system, user, assistant) and "content".
      add_generation_prompt: End with what comes before the model's answer.

    Raises:
      ConfigError: The template refuses them; it says why.
    """
    try:
      return self._template.render(
        messages=[dict(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
      )
    except (jinja2.TemplateError, *_EVALUATION_ERRORS) as error:
      roles = [message["role"] for message in messages]
      problem = (
        f"The chat template refuses messages of {', '.join(roles)}: {error}."
      )
      if "system" in roles:
        problem += " Try prompts.system=''."
      raise ConfigError([problem]) from error


class ChatTokenizer:
  """The tokenizer of a published model; the interface of ``Tokenizer``.

  Attributes:
    vocab_size: Token ids are below; a model may have more rows.
    bos_id: What a prompt starts with, or None where the model has no such
      token. The template writes it, or else the tokenizer adds it: never both.
    stop_ids: Tokens that end a response: every EOS of the model's files, and
      what its template writes after an answer, which is the first of them.
    pad_id: May be one of ``stop_ids``.
  """

  def __init__(self, files: Mapping[str, str], *, system: str):
    """Reads the texts of a published checkpoint's tokenizer files.

    Args:
      files: By name: tokenizer.json, and where there are any
        tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
        generation_config.json and the model's config.json, for its EOS.
      system: The system message; "" leaves it to the template, which may have
        one of its own.

    Raises:
      ConfigError: Everything that is wrong with the files.
    """
    # The model's config is read for its stop tokens, and not kept.
    self._files = {name: files[name] for name in _FILES if name in files}
    self._tokenizer = _read_tokenizer(files)
    named = _named_tokens(files)
    self._template = _template(files, named)
    self._system = system
    sample = self._sample()
    if system.strip() not in sample:
      raise ConfigError(
        [
          f"prompts.system = {system!r} has no place in the chat template, or "
          "there is none. Try prompts.system=''."
        ]
      )
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    named = {name: text for name, text in named.items() if text in vocabulary}
    # Special by their role, whether or not tokenizer.json says so.
    self._tokenizer.add_special_tokens(
      [tokenizers.AddedToken(t, normalized=False) for t in named.values()]
    )
    self.vocab_size: int = max(vocabulary.values()) + 1
    self.bos_id: int | None = vocabulary.get(named.get("bos_token", ""))
    self._adds_bos = self.bos_id is not None and self.bos_id in (
      self._tokenizer.encode("", add_special_tokens=True).ids
    )
    added = self._tokenizer.get_added_tokens_decoder()
    self.stop_ids: tuple[int, ...] = _stop_ids(files, added, sample)
    pad = vocabulary.get(named.get("pad_token", ""))
    self.pad_id: int = self.stop_ids[0] if pad is None else pad
    # Ids that the text of an answer leaves out.
    self._hidden = {number for number, token in added.items() if token.special}
    self._hidden |= {*self.stop_ids, self.pad_id}
    # Some models do not declare as special what separates the turns.
    written = sample + (self._template.source if self._template else "")
    protected = {
      token.content: number
      for number, token in added.items()
      if number in self._hidden
      or (token.content.strip() and token.content in written)
    }
    self._special = _any_of(protected)
    # A character outside the vocabulary is the unknown token, and no harm.
    protected.pop(named.get("unk_token", ""), None)
    self._protected_ids = frozenset(protected.values())
    self._tokenizer.add_special_tokens(
      [tokenizers.AddedToken(_MARK, normalized=False, special=True)]
    )
    self._mark_id: int = self._tokenizer.token_to_id(_MARK)

  @classmethod
  def load(cls, path: str | os.PathLike, *, system: str) -> "ChatTokenizer":
    """Reads a folder of a published checkpoint, or a GGUF file.

    Args:
      path: A folder with tokenizer.json, or a file whose name ends in .gguf.
      system: As for the constructor.

    Raises:
      ConfigError: Everything that is wrong with the files.
    """
    path = pathlib.Path(path)
    if path.suffix == ".gguf":
      return cls._read(gguf.tokenizer_files(path), system=system, place=path)
    if not (path / "tokenizer.json").is_file():
      raise ConfigError(
        [
          "There is no tokenizer.json. Try the folder of a published model, "
          "downloaded whole, or a file whose name ends in .gguf."
        ],
        place=str(path),
      )
    files = {
      name: (path / name).read_text("utf-8")
      for name in (*_FILES, "config.json")
      if (path / name).is_file()
    }
    return cls._read(files, system=system, place=path)

  @classmethod
  def _read(
    cls, files: Mapping[str, str], *, system: str, place: pathlib.Path
  ) -> "ChatTokenizer":
    try:
      return cls(files, system=system)
    except ConfigError as error:
      raise ConfigError(error.problems, place=str(place)) from error

  def save(self, path: str | os.PathLike) -> None:
    """Writes a ``tokenizer.json``, and beside it the files that go with it.

    ``load`` makes an equal tokenizer of the folder, and other software reads it
    where it reads published checkpoints.
    """
    path = pathlib.Path(path)
    # Whoever samples from an export must stop where this run did.
    generation = _read_json(self._files, _GENERATION) | dict(
      eos_token_id=list(self.stop_ids), pad_token_id=self.pad_id
    )
    files = self._files | {_GENERATION: json.dumps(generation, indent=2) + "\n"}
    for name, text in files.items():
      target = path if name == "tokenizer.json" else path.with_name(name)
      target.write_text(text, "utf-8")

  def encode_prompt(self, question: str) -> np.ndarray:
    """int32 [P]: the question as a user message, up to the answer's start."""
    text = self._harmless(question)
    if self._template is not None:
      messages = _messages(text, system=self._harmless(self._system))
      text = self._template.render(messages, add_generation_prompt=True)
    tokens = self._encode(text)
    if self._adds_bos and tokens[:1] != [self.bos_id]:
      tokens.insert(0, self.bos_id)
    return np.asarray(tokens, np.int32)

  def encode_response(self, answer: str) -> np.ndarray:
    """int32 [R]: the answer, then the stop token."""
    # The mark before it: an answer continues a text, and starts none.
    tokens = self._encode(_MARK + self._harmless(answer))
    return np.asarray([*tokens, self.stop_ids[0]], np.int32)

  def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
    """The text before the first stop token, without special tokens.

    Bytes that are not UTF-8 come back as U+FFFD, and rows of the model that
    stand for no token as nothing.
    """
    text = []
    for token in np.asarray(tokens).tolist():
      if token in self.stop_ids:
        break
      if token < self.vocab_size and token not in self._hidden:
        text.append(token)
    return self._tokenizer.decode(text, skip_special_tokens=False)

  def decode_prompt(self, tokens: np.ndarray | Sequence[int]) -> str:
    """All of a prompt, with its special tokens, for people to read."""
    ids = np.asarray(tokens).tolist()
    return self._tokenizer.decode(ids, skip_special_tokens=False)

  def _encode(self, text: str) -> list[int]:
    """Once, whole, and without adding anything."""
    tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
    return [token for token in tokens if token != self._mark_id]

  def _harmless(self, text: str) -> str:
    """The text, cut by marks wherever it would yield a special token."""
    check_text(text)
    text = text.replace(_MARK, "\ufffd")
    text = self._special.sub(lambda m: m[0][0] + _MARK + m[0][1:], text)
    if self._protected_ids.isdisjoint(self._encode(text)):
      return text
    # One overlaps another, or merges or normalisation make one of what does
    # not read like it: every character by itself.
    text = _MARK.join(text.replace(_MARK, ""))
    if self._protected_ids.isdisjoint(self._encode(text)):
      return text
    raise ValueError(f"{text!r} cannot be told from a special token.")

  def _sample(self) -> str:
    """A rendered conversation."""
    if self._template is None:
      return ""
    question = _messages("?", system=self._system)
    answer = {"role": "assistant", "content": _ANSWER}
    return self._template.render(
      question, add_generation_prompt=True
    ) + self._template.render([*question, answer], add_generation_prompt=False)


def _messages(question: str, *, system: str) -> list[dict[str, str]]:
  messages = [{"role": "user", "content": question}]
  if system:
    messages.insert(0, {"role": "system", "content": system})
  return messages


def _stop_ids(
  files: Mapping[str, str],
  added: Mapping[int, tokenizers.AddedToken],
  sample: str,
) -> tuple[int, ...]:
  """The set of stop tokens, the one that the template writes first.

  Args:
    files: As for ``ChatTokenizer``.
    added: The tokenizer's added tokens.
    sample: A conversation that ends with an answer.
  """
  numbers = {token.content: number for number, token in added.items()}
  stops = []
  _, answered, after = sample.rpartition(_ANSWER)
  turn_end = _any_of(numbers).match(after.lstrip())
  if answered and turn_end:
    stops.append(numbers[turn_end[0]])
  for name in (_GENERATION, "config.json"):
    stops += _ids(_read_json(files, name).get("eos_token_id"))
  eos = _named_tokens(files).get("eos_token")
  if eos in numbers:
    stops.append(numbers[eos])
  if not stops:
    raise ConfigError(
      [
        "No stop token: neither eos_token in tokenizer_config.json nor "
        "eos_token_id in generation_config.json or config.json."
      ]
    )
  return tuple(dict.fromkeys(stops))


def _named_tokens(files: Mapping[str, str]) -> dict[str, str]:
  """What templates call bos_token, eos_token and so on."""
  config = _read_json(files, "special_tokens_map.json")
  config |= _read_json(files, "tokenizer_config.json")
  named = {}
  for name in _NAMED_TOKENS:
    token = config.get(name)  # Text, or an object with its properties.
    text = token["content"] if isinstance(token, dict) else token
    if text is not None:
      named[name] = text
  return named


def _to_json(value: Any, **options: Any) -> str:
  """JSON as templates expect: nothing escaped for HTML."""
  return json.dumps(value, **({"ensure_ascii": False} | options))


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)


def _read_json(files: Mapping[str, str], name: str) -> dict[str, Any]:
  """The object in a file; {} without the file."""
  try:
    value = json.loads(files.get(name, "{}"))
  except ValueError as error:
    raise ConfigError([f"{name} is not JSON: {error}."]) from error
  if not isinstance(value, dict):
    raise ConfigError([f"{name} is not a JSON object."])
  return value


def _read_tokenizer(files: Mapping[str, str]) -> tokenizers.Tokenizer:
  try:
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
  except Exception as error:  # The package raises nothing more specific.
    raise ConfigError([f"tokenizer.json cannot be read: {error}."]) from error
  # Part of the file, and meant for who made it.
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer


def _template(
  files: Mapping[str, str],
  special_tokens: Mapping[str, str],
) -> ChatTemplate | None:
  """The template of a file of its own, or of the tokenizer's config."""
  config = _read_json(files, "tokenizer_config.json")
  source = files.get("chat_template.jinja", config.get("chat_template"))
  if isinstance(source, list):  # One for each use.
    source = {entry["name"]: entry["template"] for entry in source}
    source = source.get("default")
  if source is None:
    return None
  return ChatTemplate(source, special_tokens=special_tokens)


def _ids(value: int | Sequence[int] | None) -> list[int]:
  """One id, several, or none."""
  if value is None:
    return []
  return [value] if isinstance(value, int) else [*value]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
  """Matches any of the texts, the longest where several start alike.

  A single character cannot be cut in two, and is left out.
  """
  longest_first = sorted((t for t in texts if len(t) > 1), key=len)[::-1]
  return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
