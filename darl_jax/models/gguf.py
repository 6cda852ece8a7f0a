"""GGUF files of the Llama architecture: shape, parameters, tokenizer.

GGUF is the single-file format of llama.cpp. The ``gguf`` package reads it and
dequantises its tensors; what it holds becomes a model's config, the parameters
that ``Policy.init`` would make, and the tokenizer files that a published
checkpoint comes with.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from darl_jax.config import ConfigError, ModelConfig
from darl_jax.types import Params

# Metadata that says nothing about what the network computes, or that
# ``model_fields`` reads. Any other key of the architecture may ask for
# something that is not implemented, and is refused.
_KNOWN_KEYS = frozenset(
  {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
    "vocab_size",
  }
)
# Keys that are harmless with one value.
_NEUTRAL_VALUES = {
  "expert_count": 0,
  "expert_used_count": 0,
  "rope.scaling.factor": 1.0,
  "rope.scaling.type": "none",
}

# Read as a part of the config.
_ROPE_DIVISORS = "rope_freqs.weight"

# How text is cut before byte-pair merges, by the name that GGUF gives it. The
# regular expressions are part of each model's definition.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
  _CONTRACTIONS
  + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
  + r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class _Layout:
  """How one tensor of the file becomes one leaf of the parameters.

  Attributes:
    path: Of the leaf.
    shape: Of the tensor, as [out, in] or [size].
    convert: From the tensor to the leaf, or to one layer of it.
  """

  path: tuple[str, ...]
  shape: tuple[int, ...]
  convert: Callable[[np.ndarray], np.ndarray] = lambda tensor: tensor


def read_config(path: str | os.PathLike) -> dict[str, Any]:
  """The fields of ``ModelConfig`` that the file sets.

  All but ``compute_dtype`` and ``remat``, which are no part of a model.

  Raises:
    ConfigError: Listing everything that is missing or not implemented.
  """
  return _read_config(_open(path))


def load(
  path: str | os.PathLike,
  config: ModelConfig,
  *,
  shardings: Params | None = None,
  round_to: jnp.dtype = jnp.float32,
) -> Params:
  """Float32 parameters, as from ``Policy.init``.

  One tensor at a time is dequantised and written to its place on the devices,
  so that the host holds little more than the largest of them.

  Args:
    path: The file.
    config: Of the model; see ``read_config``.
    shardings: Of every parameter; by default all go to the first device.
    round_to: Values are rounded to what this dtype can hold. Who publishes a
      model in bfloat16 computes with such values; a quantised file's are not.

  Returns:
    float32 parameters as ``Policy.init`` makes them.

  Raises:
    ConfigError: Listing every field of the config that is not the file's, or
      every tensor that is missing, unexpected or of another shape, before
      anything is allocated.
  """
  file = _open(path)
  problems = [
    f"model.{name} = {getattr(config, name)!r}, but the file has {value!r}."
    for name, value in _read_config(file).items()
    if getattr(config, name) != value
  ]
  if problems:
    raise ConfigError(problems, place=str(path))
  layouts = _layouts(config)
  file.check_tensors(layouts)

  def tensor(name: str) -> np.ndarray:
    values = file.tensor(name)
    # A round trip on the host: nothing on the devices is twice as large.
    rounded = values.astype(jnp.dtype(round_to), copy=False)
    leaf = layouts[name].convert(rounded.astype(np.float32, copy=False))
    return np.ascontiguousarray(leaf)

  flat: dict[tuple[str, ...], jax.Array] = {}
  flat_shardings = nnx.traversals.flatten_mapping(shardings or {})
  for name, layout in layouts.items():
    leaf = tensor(name)
    sharding = flat_shardings.get(layout.path)
    if not name.startswith("blk."):
      flat[layout.path] = jax.device_put(leaf, sharding)
      continue
    if layout.path not in flat:
      shape = (config.num_layers, *leaf.shape)
      flat[layout.path] = jnp.zeros(shape, jnp.float32, device=sharding)
    layer = jax.device_put(leaf, _of_one_layer(sharding))
    flat[layout.path] = _write_layer(
      flat[layout.path], layer, int(name.split(".")[1])
    )
  return nnx.traversals.unflatten_mapping(flat)


def check(path: str | os.PathLike, config: ModelConfig) -> None:
  """Raises ConfigError of every tensor that ``config`` does not have so."""
  _open(path).check_tensors(_layouts(config))


def tokenizer_files(path: str | os.PathLike) -> dict[str, str]:
  """The file's tokenizer as the texts of a published checkpoint's files.

  Returns:
    By name: tokenizer.json (the ``tokenizers`` package), tokenizer_config.json
    (special tokens, chat template) and generation_config.json (stop tokens).

  Raises:
    ConfigError: The file has no byte-level BPE, or cuts text in a way that is
      not known here.
  """
  file = _open(path)
  vocabulary = _Vocabulary(file)
  eos = ("eos_token_id", "eot_token_id", "eom_token_id")
  stops = [vocabulary.special(name) for name in eos]
  stops = list(dict.fromkeys(stop for stop in stops if stop is not None))
  bos = vocabulary.special("bos_token_id")
  pad = vocabulary.special("padding_token_id")
  adds_bos = bos is not None and bool(file.get("tokenizer.ggml.add_bos_token"))
  config: dict[str, Any] = dict(
    tokenizer_class="PreTrainedTokenizerFast",
    clean_up_tokenization_spaces=False,
    add_bos_token=adds_bos,
  )
  generation: dict[str, Any] = dict(eos_token_id=stops)
  for role, token in (
    ("bos", bos),
    ("eos", (stops or [None])[0]),
    ("pad", pad),
  ):
    if token is not None:
      config[f"{role}_token"] = vocabulary.tokens[token]
      generation.setdefault(f"{role}_token_id", token)
  template = file.get("tokenizer.chat_template")
  if template is not None:
    config["chat_template"] = template
  tokenizer = vocabulary.tokenizer()
  if adds_bos:
    tokenizer.post_processor = processors.TemplateProcessing(
      single=f"{vocabulary.tokens[bos]} $A",
      special_tokens=[(vocabulary.tokens[bos], bos)],
    )
  return {
    "tokenizer.json": tokenizer.to_str(),
    "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
    "generation_config.json": json.dumps(generation, indent=2),
  }


class _File:
  """An open file of the Llama architecture."""

  def __init__(self, path: str):
    try:
      import gguf
    except ImportError as error:
      raise ConfigError(
        [
          "GGUF files need a package that is not installed. Try pip install "
          "'darl_jax[gguf]'."
        ],
        place=str(path),
      ) from error
    self.path = path

    class Reader(gguf.GGUFReader):
      """Slices the mapped file as plain arrays: in a third of the time."""

      @property
      def data(self) -> np.ndarray:
        return self._plain

      @data.setter
      def data(self, mapped: np.memmap) -> None:
        self._plain = mapped.view(np.ndarray)

    self._dequantize = gguf.quants.dequantize
    try:
      reader = Reader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
      raise ConfigError(
        [f"not a GGUF file: {error}."], place=str(path)
      ) from error
    # The reader itself keeps several arrays for each token: it is let go.
    self._metadata = {
      key: field.contents() for key, field in reader.fields.items()
    }
    self._tensors = {tensor.name: tensor for tensor in reader.tensors}

  def get(self, key: str) -> Any:
    """The value of a metadata key, or None."""
    return self._metadata.get(key)

  def keys(self, prefix: str) -> list[str]:
    """Metadata keys that start so, without the prefix."""
    return [
      key.removeprefix(prefix)
      for key in self._metadata
      if key.startswith(prefix)
    ]

  def shape(self, name: str) -> tuple[int, ...] | None:
    """[out, in] of a tensor, or None without one of that name."""
    if name not in self._tensors:
      return None
    # The file counts the fastest dimension first.
    return tuple(map(int, reversed(self._tensors[name].shape)))

  def tensor(self, name: str) -> np.ndarray:
    """float32 [out, in]."""
    tensor = self._tensors[name]
    if tensor.data.dtype == np.float32:
      # A copy: what a device is given it may alias, and this is the file.
      return np.array(tensor.data)
    values = self._dequantize(tensor.data, tensor.tensor_type)
    return values.astype(np.float32, copy=False)

  def check_tensors(self, layouts: Mapping[str, _Layout]) -> None:
    """Raises a ConfigError of every tensor that is not as expected."""
    problems = []
    for name, layout in layouts.items():
      shape = self.shape(name)
      if shape is None:
        problems.append(f"{name} {list(layout.shape)} is missing.")
      elif shape != layout.shape:
        problems.append(
          f"{name} has shape {list(shape)}, but the config says "
          f"{list(layout.shape)}."
        )
    for name in self._tensors:
      if name not in layouts and name != _ROPE_DIVISORS:
        problems.append(f"{name} is unexpected.")
    if problems:
      raise ConfigError(problems, place=self.path)


def _open(path: str | os.PathLike) -> _File:
  """A file, whose metadata take seconds to read: the last one is kept."""
  try:
    status = os.stat(path)
  except OSError as error:
    raise ConfigError(
      [f"cannot be read: {error.strerror}."], place=str(path)
    ) from error
  return _open_version(os.fspath(path), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1)
def _open_version(path: str, modified_ns: int, size: int) -> _File:
  """The file as it was then; other arguments read it again."""
  del modified_ns, size
  return _File(path)


def _read_config(file: _File) -> dict[str, Any]:
  architecture = file.get("general.architecture")
  if architecture != "llama":
    raise ConfigError(
      [
        f"general.architecture = {architecture!r} is not implemented, only "
        "'llama'. Try the folder with the model's safetensors."
      ],
      place=file.path,
    )

  def value(key: str, default: Any = None) -> Any:
    found = file.get(f"llama.{key}")
    if found is None and default is None:
      problems.append(f"llama.{key} is missing.")
      return 1
    if isinstance(found, list):
      problems.append(
        f"llama.{key} differs between layers, which is not implemented."
      )
      return 1
    return default if found is None else found

  problems: list[str] = []
  dim = value("embedding_length")
  heads = value("attention.head_count")
  embedding = file.shape("token_embd.weight") or (0,)
  fields = dict(
    num_layers=value("block_count"),
    embed_dim=dim,
    mlp_dim=value("feed_forward_length"),
    num_heads=heads,
    num_kv_heads=value("attention.head_count_kv", heads),
    head_dim=value("attention.key_length", dim // heads),
    rope_theta=_shortest(value("rope.freq_base", 10_000.0)),
    **_rope_scaling(file, problems),
    context_tokens=value("context_length"),
    norm_eps=_shortest(value("attention.layer_norm_rms_epsilon")),
    tie_embeddings=file.shape("output.weight") is None,
    qkv_bias=False,
    qk_norm=False,
    num_experts=0,
    experts_per_token=0,
    expert_mlp_dim=0,
    normalize_expert_weights=True,
    vocab_size=embedding[0],
  )
  if problems := problems + _not_implemented(file, fields["head_dim"]):
    raise ConfigError(problems, place=file.path)
  return fields


def _rope_scaling(file: _File, problems: list[str]) -> dict[str, Any]:
  """The rotary fields beside the base; adds to ``problems``.

  The file has the divisor of each frequency, [H/2], and not the numbers that
  they were made from. All of Llama 3.1 to 3.3 share three of these; the fourth
  is the greatest divisor. The divisors that follow must be the file's.
  """
  fields = dict(
    rope_scaling_factor=1.0,
    rope_low_frequency_factor=1.0,
    rope_high_frequency_factor=4.0,
    rope_original_context=8192,
  )
  if file.shape(_ROPE_DIVISORS) is None:
    return fields
  found = file.tensor(_ROPE_DIVISORS)
  fields["rope_scaling_factor"] = factor = _shortest(found.max())
  base = file.get("llama.rope.freq_base") or 10_000.0
  turns = 8192 / (2 * np.pi) * base ** -(np.arange(found.size) / found.size)
  kept = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
  expected = 1.0 / (kept + (1.0 - kept) / factor)
  if not np.allclose(found, expected, rtol=1e-4):
    problems.append(
      f"{_ROPE_DIVISORS} is not the scaling of Llama 3.1, which "
      "alone is implemented."
    )
  return fields


def _not_implemented(file: _File, head_dim: int) -> list[str]:
  """Everything that the metadata ask for and the transformer cannot do."""
  problems = [
    f"llama.{key} = {file.get('llama.' + key)!r} is not implemented."
    for key in file.keys("llama.")
    if key not in _KNOWN_KEYS
    and _NEUTRAL_VALUES.get(key) != file.get(f"llama.{key}")
  ]
  for key in ("rope.dimension_count", "attention.value_length"):
    size = file.get(f"llama.{key}")
    if size not in (None, head_dim):
      problems.append(
        f"llama.{key} = {size} is not the head's size, "
        f"{head_dim}, which is not implemented."
      )
  return problems


def _shortest(value: float) -> float:
  """The decimal number behind a float32: 1e-5, and not 9.99999975e-6."""
  return float(str(np.float32(value)))


def _layouts(config: ModelConfig) -> dict[str, _Layout]:
  """Of every tensor that a model of this shape has, by its name."""
  dim, hidden, size = config.embed_dim, config.mlp_dim, config.head_dim
  heads, kv_heads = config.num_heads, config.num_kv_heads

  def projection(name: str, count: int, *, rotated: bool) -> _Layout:
    def convert(tensor: np.ndarray) -> np.ndarray:
      if rotated:
        # Rotary pairs are neighbours in the file, and half a head apart here.
        tensor = tensor.reshape(count, size // 2, 2, dim).swapaxes(1, 2)
      return tensor.reshape(count, size, dim).transpose(2, 0, 1)

    path = ("layers", "attention", name)
    return _Layout(path, (count * size, dim), convert)

  def dense(name: str, rows: int, columns: int) -> _Layout:
    path = ("layers", "feed_forward", name)
    return _Layout(path, (rows, columns), np.transpose)

  in_layer = {
    "attn_norm": _Layout(("layers", "attention_norm"), (dim,)),
    "attn_q": projection("query", heads, rotated=True),
    "attn_k": projection("key", kv_heads, rotated=True),
    "attn_v": projection("value", kv_heads, rotated=False),
    "attn_output": _Layout(
      ("layers", "attention", "output"),
      (dim, heads * size),
      lambda tensor: tensor.T.reshape(heads, size, dim),
    ),
    "ffn_norm": _Layout(("layers", "feed_forward_norm"), (dim,)),
    "ffn_gate": dense("gate", hidden, dim),
    "ffn_up": dense("up", hidden, dim),
    "ffn_down": dense("down", dim, hidden),
  }
  table = (config.vocab_size, dim)
  layouts = {"token_embd.weight": _Layout(("embedding",), table)}
  for layer in range(config.num_layers):
    for name, layout in in_layer.items():
      layouts[f"blk.{layer}.{name}.weight"] = layout
  layouts["output_norm.weight"] = _Layout(("final_norm",), (dim,))
  if not config.tie_embeddings:
    layouts["output.weight"] = _Layout(("unembedding",), table)
  return layouts


@functools.partial(jax.jit, donate_argnums=0)
def _write_layer(
  stacked: jax.Array, values: jax.Array, layer: jax.Array
) -> jax.Array:
  """``stacked`` [layers, ...] with one layer replaced, in place."""
  return jax.lax.dynamic_update_index_in_dim(stacked, values, layer, 0)


def _of_one_layer(sharding: Any) -> Any:
  """The sharding of a slice along the leading axis."""
  if not isinstance(sharding, NamedSharding):
    return sharding
  return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


class _Vocabulary:
  """A file's byte-level BPE."""

  def __init__(self, file: _File):
    kind = file.get("tokenizer.ggml.model")
    self._pre = file.get("tokenizer.ggml.pre")
    problems = []
    if kind != "gpt2":
      problems.append(
        f"tokenizer.ggml.model = {kind!r} is not implemented, "
        "only 'gpt2' (byte-level BPE). Try the folder with the model's "
        "tokenizer.json."
      )
    elif self._pre not in _PRE_TOKENIZERS:
      known = ", ".join(sorted(_PRE_TOKENIZERS))
      problems.append(
        f"tokenizer.ggml.pre = {self._pre!r} is none of {known}. "
        "Try the folder with the model's tokenizer.json."
      )
    if problems:
      raise ConfigError(problems, place=file.path)
    self._file = file
    self.tokens: list[str] = file.get("tokenizer.ggml.tokens")
    if len(set(self.tokens)) < len(self.tokens):
      raise ConfigError(
        ["tokenizer.ggml.tokens has a token twice."], place=file.path
      )

  def special(self, name: str) -> int | None:
    token = self._file.get(f"tokenizer.ggml.{name}")
    return token if token is None or token < len(self.tokens) else None

  def tokenizer(self) -> tokenizers.Tokenizer:
    from gguf import TokenType

    get = self._file.get
    pre = _PRE_TOKENIZERS[self._pre]
    tokenizer = tokenizers.Tokenizer(
      models.BPE(
        vocab={symbol: token for token, symbol in enumerate(self.tokens)},
        merges=[
          tuple(merge.split(" ", 1)) for merge in get("tokenizer.ggml.merges")
        ],
        ignore_merges=pre.whole_words,
      )
    )
    if pre.nfc:
      tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pre.steps])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = get("tokenizer.ggml.token_type") or []
    # In order: a token that is not in the model's vocabulary takes the next id.
    for symbol, kind in zip(self.tokens, kinds, strict=False):
      token = tokenizers.AddedToken(
        symbol, normalized=False, special=kind == TokenType.CONTROL
      )
      if kind == TokenType.CONTROL:
        tokenizer.add_special_tokens([token])
      elif kind == TokenType.USER_DEFINED:
        tokenizer.add_tokens([token])
    return tokenizer


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
  """How text is cut before merges.

  Attributes:
    steps: Applied in turn; the last maps bytes to symbols.
    whole_words: A piece that is a token is taken whole, whatever the merges.
    nfc: Text is first brought to Unicode's composed form.
  """

  steps: tuple[pre_tokenizers.PreTokenizer, ...]
  whole_words: bool = False
  nfc: bool = False


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _words(digits: str) -> tuple[pre_tokenizers.PreTokenizer, ...]:
  pattern = tokenizers.Regex(_WORDS.format(digits=digits))
  split = pre_tokenizers.Split(pattern, "isolated")
  return (split, _byte_level(use_regex=False))


_PRE_TOKENIZERS = {
  "gpt-2": _PreTokenizer((_byte_level(use_regex=True),)),
  "smollm": _PreTokenizer(
    (pre_tokenizers.Digits(True), _byte_level(use_regex=True))
  ),
  "llama-bpe": _PreTokenizer(_words("{1,3}"), whole_words=True),
  "qwen2": _PreTokenizer(_words(""), nfc=True),
}
