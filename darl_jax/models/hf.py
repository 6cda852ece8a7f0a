"""Published checkpoints in and out: the folders of the Hugging Face hub.

A folder holds ``config.json`` and the weights as safetensors, in one file or in
several with an index. ``read_config`` and ``load`` bring it in, ``save`` writes
one that other software loads. The two are inverse: float32 weights come back
bit for bit.

Families by ``model_type``: llama, mistral, qwen2, qwen3, qwen3_moe. A model
that uses anything else than ``ModelConfig`` describes is refused, never
approximated.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import pathlib
import shutil
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

from darl_jax.config import ConfigError, ModelConfig
from darl_jax.models import presets
from darl_jax.models.transformer import Policy
from darl_jax.types import Params

# Architecture by family.
_FAMILIES = dict(
  llama="LlamaForCausalLM",
  mistral="MistralForCausalLM",
  qwen2="Qwen2ForCausalLM",
  qwen3="Qwen3ForCausalLM",
  qwen3_moe="Qwen3MoeForCausalLM",
)
# What a feature that is not implemented must say; each may be absent.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = dict(
  hidden_act=("silu", None),
  attention_bias=(False, None),
  mlp_bias=(False, None),
  partial_rotary_factor=(1, None),
  quantization_config=(None,),
  is_encoder_decoder=(False, None),
  add_cross_attention=(False, None),
  decoder_sparse_step=(1, None),
  mlp_only_layers=([], None),
)
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# What a model is on the hub, without weights in other formats.
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges*")

# Bytes on their way from a file to the devices' memory, all devices together.
_PIECE_BYTES = 16 * 2**20
# Bytes of files whose pages stay mapped.
_MAPPED_BYTES = 32 * 2**20
# A file of the weights is at most this large, unless one tensor is larger.
MAX_SHARD_BYTES = 4 * 2**30


# --------------------------------------------------------------------- config


def locate(model: str) -> pathlib.Path:
  """The folder of a model: a local one, or a hub id, which is downloaded.

  Raises:
    ConfigError: It is no folder, and the hub's client or the hub is missing.
  """
  folder = pathlib.Path(model).expanduser()
  if folder.is_dir():
    return folder
  if model.count("/") != 1 or not all(model.split("/")) or model[0] in "./~":
    raise ConfigError(
      [f"{model!r} is no folder. Try one that holds {_CONFIG}."],
      place="the model",
    )
  if importlib.util.find_spec("huggingface_hub") is None:
    raise ConfigError(
      [
        f"{model!r} is no folder, and the hub's client is not installed. Try "
        "pip install 'darl_jax[hub]', or a folder."
      ],
      place="the model",
    )
  import huggingface_hub  # Optional, and slow to import.

  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(
        model, allow_patterns=list(_HUB_PATTERNS)
      )
    )
  except Exception as error:  # Whatever the network and the hub may do.
    said = (str(error).splitlines() or [type(error).__name__])[0]
    raise ConfigError(
      [
        f"{model!r} is no folder, and could not be fetched from the hub: "
        f"{said} Try a folder, or an id that the hub has."
      ],
      place="the model",
    ) from error


def read_config(folder: str | os.PathLike) -> dict[str, Any]:
  """The fields of ``ModelConfig`` that a published ``config.json`` sets.

  All but ``compute_dtype`` and ``remat``, which are no part of a model. Rotary
  parameters may be at the top level (``rope_theta``, ``rope_scaling``) or in
  ``rope_parameters``.

  Raises:
    ConfigError: Listing everything that is missing, mistyped, or not
      implemented.
  """
  path = pathlib.Path(folder) / _CONFIG
  published = _Published(_read_json(path))
  family = published.family()
  published.check_neutral(family)
  fields = {}
  if family:
    published.check_attention(family)
    fields = {
      **published.shape(family),
      **published.rotary(),
      **published.experts(family),
    }
  if published.problems:
    raise ConfigError(published.problems, place=str(path))
  return fields


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  """Raises ConfigError where there is no JSON object."""
  try:
    value = json.loads(path.read_text("utf-8"))
  except OSError as error:
    said = error.strerror
  except (ValueError, RecursionError):
    said = "not JSON"
  else:
    if isinstance(value, dict):
      return value
    said = "not a JSON object"
  raise ConfigError(
    [f"{path.name}: {said}. Try a folder as the hub has it."],
    place=str(path.parent),
  )


_REQUIRED = object()


class _Published:
  """A published config, and what is wrong with it so far.

  Attributes:
    problems: In the order they were met.
  """

  def __init__(self, values: Mapping[str, Any]):
    self._values = values
    self.problems: list[str] = []

  def family(self) -> str | None:
    """``model_type``; None where it is not implemented."""
    name = self._values.get("model_type")
    architectures = self._values.get("architectures") or []
    if not isinstance(name, str) or name not in _FAMILIES:
      self._refuse("model_type", name, ", ".join(_FAMILIES))
      return None
    if architectures and _FAMILIES[name] not in architectures:
      self._refuse("architectures", architectures, [_FAMILIES[name]])
    return name

  def check_neutral(self, family: str | None) -> None:
    for name, accepted in _NEUTRAL.items():
      if name == "attention_bias" and family == "qwen2":
        continue  # It has its biases without saying so.
      value = self._values.get(name)
      if value not in accepted:
        self._refuse(name, value, accepted[0])

  def check_attention(self, family: str) -> None:
    """Sliding windows, which each family announces in its own way."""
    values = self._values
    kinds = values.get("layer_types") or []
    if other := sorted({str(kind) for kind in kinds} - {"full_attention"}):
      self._refuse("layer_types", other, ["full_attention"])
    window = values.get("sliding_window")
    # Absent, it is 4096 in this family.
    if family == "mistral" and ("sliding_window" not in values or window):
      self._refuse("sliding_window", window or "absent, which is 4096", None)
    elif family.startswith("qwen") and values.get("use_sliding_window"):
      full = values.get("max_window_layers")
      layers = values.get("num_hidden_layers")
      everywhere = isinstance(full, int) and isinstance(layers, int)
      if window and not kinds and not (everywhere and full >= layers):
        self._refuse("use_sliding_window", True, False)

  def shape(self, family: str) -> dict[str, Any]:
    heads = self._whole("num_attention_heads")
    dim = self._whole("hidden_size")
    # Absent, it has another value in each family; only here it is a rule.
    kv_heads = self._whole(
      "num_key_value_heads", heads if family == "llama" else _REQUIRED
    )
    if self._values.get("head_dim") is not None:
      head_dim = self._whole("head_dim")
    elif family == "qwen3":
      head_dim = 128
    else:
      head_dim = dim // heads if dim and heads else None
    return dict(
      num_layers=self._whole("num_hidden_layers"),
      embed_dim=dim,
      mlp_dim=self._whole("intermediate_size"),
      num_heads=heads,
      num_kv_heads=kv_heads,
      head_dim=head_dim,
      context_tokens=self._whole("max_position_embeddings"),
      norm_eps=self._number(self._values, "rms_norm_eps"),
      tie_embeddings=self._boolean("tie_word_embeddings", False),
      qkv_bias=family == "qwen2",
      qk_norm=family.startswith("qwen3"),
      vocab_size=self._whole("vocab_size"),
    )

  def rotary(self) -> dict[str, Any]:
    values = self._values
    rope, where = values.get("rope_parameters"), "rope_parameters."
    if rope is None:
      rope, where = values.get("rope_scaling") or {}, "rope_scaling."
    if not isinstance(rope, Mapping) or any(
      isinstance(value, Mapping) for value in rope.values()
    ):
      self._refuse(where.rstrip("."), rope, "one set for all layers")
      return {}
    thetas = [x.get("rope_theta") for x in (rope, values)]
    thetas = [theta for theta in thetas if theta is not None]
    if len(thetas) == 2 and thetas[0] != thetas[1]:
      self.problems.append(
        f"rope_theta = {thetas[1]!r} is not {where}rope_theta = "
        f"{thetas[0]!r}. Remove one of them."
      )
    theta = dict(rope_theta=(*thetas, 10_000.0)[0])
    fields = dict(
      presets.UNSCALED, rope_theta=self._number(theta, "rope_theta")
    )
    if rope.get("partial_rotary_factor", 1) != 1:
      self._refuse(
        f"{where}partial_rotary_factor", rope["partial_rotary_factor"], 1
      )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
      fields |= dict(
        rope_scaling_factor=self._number(rope, "factor", where),
        rope_low_frequency_factor=self._number(rope, "low_freq_factor", where),
        rope_high_frequency_factor=self._number(
          rope, "high_freq_factor", where
        ),
        rope_original_context=self._whole(
          "original_max_position_embeddings", values=rope, where=where
        ),
      )
    elif kind != "default":
      self._refuse(f"{where}rope_type", kind, "default, llama3")
    return fields

  def experts(self, family: str) -> dict[str, Any]:
    if family != "qwen3_moe":
      return dict(presets.DENSE)
    # The library's newer versions write the second name.
    names = [
      n for n in ("num_experts", "num_local_experts") if n in self._values
    ]
    return dict(
      num_experts=self._whole((names or ["num_experts"])[0]),
      experts_per_token=self._whole("num_experts_per_tok"),
      expert_mlp_dim=self._whole("moe_intermediate_size"),
      normalize_expert_weights=self._boolean("norm_topk_prob", False),
    )

  def _refuse(self, name: str, value: Any, supported: Any) -> None:
    text = repr(value)
    text = text if len(text) <= 100 else text[:97] + "..."
    if not isinstance(supported, str):
      supported = json.dumps(supported)
    self.problems.append(
      f"{name} = {text} is not implemented. Supported: {supported}."
    )

  def _get(self, name: str, default: Any, values: Any, where: str) -> Any:
    value = values.get(name)
    if value is None and default is _REQUIRED:
      self.problems.append(f"{where}{name} is missing.")
      return None
    return default if value is None else value

  def _whole(
    self,
    name: str,
    default: Any = _REQUIRED,
    *,
    values: Mapping[str, Any] | None = None,
    where: str = "",
  ) -> int | None:
    values = self._values if values is None else values
    value = self._get(name, default, values, where)
    known = value is not None
    if known and (type(value) is not int or value < 1):
      self.problems.append(
        f"{where}{name} = {value!r} is not a whole number above 0."
      )
      return None
    return value

  def _number(
    self, values: Mapping[str, Any], name: str, where: str = ""
  ) -> float | None:
    value = self._get(name, _REQUIRED, values, where)
    if value is None:
      return None
    if type(value) not in (int, float) or not 0 < value < math.inf:
      self.problems.append(
        f"{where}{name} = {value!r} is not a finite number above 0."
      )
      return None
    return float(value)

  def _boolean(self, name: str, default: bool) -> bool:
    value = self._get(name, default, self._values, "")
    if not isinstance(value, bool):
      self.problems.append(f"{name} = {value!r} is not true or false.")
    return value


# --------------------------------------------------------------------- layout


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """How one of our parameters is spread over published tensors.

  Attributes:
    name: Of the published tensors; {layer} and {expert} are the numbers along
      our leading axes.
    rows: Which of our axes after those the published first axis is made of.
    columns: The same of its second axis; none of a vector.
  """

  name: str
  rows: tuple[int, ...]
  columns: tuple[int, ...] = ()

  @property
  def num_leading(self) -> int:
    return self.name.count("{")

  def indices(self, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Along our leading axes, of each published tensor."""
    return itertools.product(*map(range, shape[: self.num_leading]))

  def name_at(self, index: Sequence[int]) -> str:
    numbers = zip(("layer", "expert"), index, strict=False)
    return self.name.format(**dict(numbers))

  def published_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of each tensor of a parameter of this shape."""
    inner = shape[self.num_leading :]
    groups = (self.rows, self.columns) if self.columns else (self.rows,)
    return tuple(math.prod(inner[axis] for axis in axes) for axes in groups)

  def to_ours(self, tensor: np.ndarray, inner: tuple[int, ...]) -> np.ndarray:
    """A published tensor, or a block of one, as our axes ``inner``."""
    axes = self.rows + self.columns
    split = tensor.reshape([inner[axis] for axis in axes])
    return split.transpose(np.argsort(axes))

  def to_published(self, value: np.ndarray) -> np.ndarray:
    """The inverse of ``to_ours`` for a whole tensor."""
    flat = value.transpose(self.rows + self.columns)
    shape = (1,) * self.num_leading + value.shape
    return np.ascontiguousarray(flat.reshape(self.published_shape(shape)))


def _matrix(name: str, *, rows: tuple[int, ...], columns: tuple[int, ...]):
  return _Tensor(f"model.layers.{{layer}}.{name}.weight", rows, columns)


def _vector(name: str, *, axes: tuple[int, ...] = (0,)) -> _Tensor:
  return _Tensor(f"model.layers.{{layer}}.{name}", axes)


def _layout(config: ModelConfig) -> dict[tuple[str, ...], _Tensor]:
  """By the path in our tree, each published tensor of a model."""
  into = dict(rows=(1, 2), columns=(0,))
  layers: dict[tuple[str, ...], _Tensor] = {
    ("attention_norm",): _vector("input_layernorm.weight"),
    ("feed_forward_norm",): _vector("post_attention_layernorm.weight"),
    ("attention", "query"): _matrix("self_attn.q_proj", **into),
    ("attention", "key"): _matrix("self_attn.k_proj", **into),
    ("attention", "value"): _matrix("self_attn.v_proj", **into),
    ("attention", "output"): _matrix(
      "self_attn.o_proj", rows=(2,), columns=(0, 1)
    ),
  }
  if config.qkv_bias:
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
      layers["attention", f"{ours}_bias"] = _vector(
        f"self_attn.{theirs}_proj.bias", axes=(0, 1)
      )
  if config.qk_norm:
    for ours, theirs in (("query", "q"), ("key", "k")):
      layers["attention", f"{ours}_norm"] = _vector(
        f"self_attn.{theirs}_norm.weight"
      )
  transposed = dict(rows=(1,), columns=(0,))
  inside = "mlp.experts.{expert}" if config.num_experts else "mlp"
  for name in ("gate", "up", "down"):
    layers["feed_forward", name] = _matrix(
      f"{inside}.{name}_proj", **transposed
    )
  if config.num_experts:
    layers["feed_forward", "router"] = _matrix("mlp.gate", **transposed)
  layout = {("layers", *path): tensor for path, tensor in layers.items()}
  layout["embedding",] = _Tensor("model.embed_tokens.weight", (0,), (1,))
  layout["final_norm",] = _Tensor("model.norm.weight", (0,))
  if not config.tie_embeddings:
    layout["unembedding",] = _Tensor("lm_head.weight", (0,), (1,))
  return layout


def _path(keys: Sequence[Any]) -> tuple[str, ...]:
  return tuple(key.key for key in keys)


# --------------------------------------------------------------------- import


def load(
  folder: str | os.PathLike, config: ModelConfig, *, shardings: Params
) -> Params:
  """The weights of a published checkpoint, in their shards.

  Each process reads what its devices hold, in pieces of a few megabytes which
  the devices cast and write to their place: beyond the parameters themselves,
  the host holds no more than some of these, however large a tensor is.

  Args:
    folder: With ``model.safetensors``, or several files and their index.
    config: Of the model, with its ``vocab_size``; see ``read_config``.
    shardings: A ``NamedSharding`` per parameter, as
      ``rules.param_shardings`` makes them.

  Returns:
    float32 parameters as ``Policy.init`` makes them, from tensors of float32,
    float16 or bfloat16.

  Raises:
    ConfigError: Listing every tensor that is missing, unexpected, of another
      shape or not of floats, before anything is allocated.
  """
  folder = pathlib.Path(folder)
  shapes = _shapes(config)
  layout = _layout(config)
  with _Checkpoint(folder) as checkpoint:
    checkpoint.check(layout, shapes, tied=config.tie_embeddings)
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf, sharding: _load_parameter(
        checkpoint, layout[_path(path)], leaf.shape, sharding
      ),
      shapes,
      shardings,
    )


def check(folder: str | os.PathLike, config: ModelConfig) -> None:
  """Raises ConfigError as ``load`` would, having read no more than headers."""
  with _Checkpoint(pathlib.Path(folder)) as checkpoint:
    checkpoint.check(
      _layout(config), _shapes(config), tied=config.tie_embeddings
    )


def _shapes(config: ModelConfig) -> Params:
  policy = Policy(config, vocab_size=config.vocab_size)
  return jax.eval_shape(policy.init, jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class _Header:
  """What a file says of one of its tensors."""

  file: str
  dtype: str
  shape: tuple[int, ...]


class _Checkpoint:
  """The safetensors files of a folder."""

  def __init__(self, folder: pathlib.Path):
    """Reads every header.

    Raises:
      ConfigError: Files are missing or broken, or the index is wrong.
    """
    self._folder = folder
    self._stack = contextlib.ExitStack()
    self._handles: dict[str, Any] = {}
    self._mapped = 0
    self.headers: dict[str, _Header] = {}
    problems: list[str] = []
    indexed = self._index(problems)
    for file in sorted(set(indexed.values())) if indexed else [_SINGLE]:
      try:
        found = self._read_headers(file)
      except (OSError, safetensors.SafetensorError) as error:
        problems.append(f"{file} cannot be read: {error}.")
        continue
      for name in sorted(set(found) & set(self.headers)):
        problems.append(
          f"{name} is both in {self.headers[name].file} and in {file}."
        )
      self.headers.update(found)
      problems += [
        f"{name} is not in {file}, where {_INDEX} has it."
        for name, where in indexed.items()
        if where == file and name not in found
      ]
    if problems:
      raise ConfigError(problems, place=str(folder))

  def __enter__(self) -> "_Checkpoint":
    return self

  def __exit__(self, *_) -> None:
    self._close()

  def _index(self, problems: list[str]) -> dict[str, str]:
    """File by tensor; empty where there is one file."""
    if (self._folder / _SINGLE).exists():
      return {}
    if not (self._folder / _INDEX).exists():
      there = sorted(p.name for p in self._folder.glob("*") if p.is_file())
      problems.append(
        f"there is neither {_SINGLE} nor {_INDEX}, only "
        f"{', '.join(there) or 'nothing'}."
      )
      raise ConfigError(problems, place=str(self._folder))
    index = _read_json(self._folder / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
      problems.append(f"{_INDEX} has no weight_map.")
      raise ConfigError(problems, place=str(self._folder))
    outside = [f for f in index.values() if pathlib.Path(str(f)).name != f]
    if outside:
      problems.append(
        f"{_INDEX} names {outside[0]!r}, which is no file's name."
      )
      raise ConfigError(problems, place=str(self._folder))
    return index

  def _read_headers(self, file: str) -> dict[str, _Header]:
    with safetensors.safe_open(self._folder / file, "np") as handle:
      headers = {}
      for name in handle.offset_keys():
        tensor = handle.get_slice(name)
        headers[name] = _Header(
          file, tensor.get_dtype(), tuple(tensor.get_shape())
        )
      return headers

  def check(
    self,
    layout: Mapping[tuple[str, ...], _Tensor],
    shapes: Params,
    *,
    tied: bool,
  ) -> None:
    """Raises ConfigError unless the tensors are exactly the layout's."""
    wanted = {}
    for keys, leaf in jax.tree.leaves_with_path(shapes):
      tensor = layout[_path(keys)]
      published = tensor.published_shape(leaf.shape)
      for index in tensor.indices(leaf.shape):
        wanted[tensor.name_at(index)] = published
    problems = [
      f"{name} {list(shape)} is missing."
      for name, shape in wanted.items()
      if name not in self.headers
    ]
    for name, header in self.headers.items():
      if name not in wanted:
        if not _ignored(name, tied=tied):
          problems.append(f"{name} {list(header.shape)} is unexpected.")
        continue
      if header.shape != wanted[name]:
        problems.append(
          f"{name} has shape {list(header.shape)}, but the config says "
          f"{list(wanted[name])}."
        )
      if header.dtype not in _DTYPES:
        problems.append(
          f"{name} is of {header.dtype}, not of {', '.join(_DTYPES)}."
        )
    if problems:
      raise ConfigError(problems, place=str(self._folder))

  def dtype(self, names: Sequence[str]) -> np.dtype:
    """One that holds all of these tensors."""
    return np.result_type(
      *{jnp.dtype(_DTYPES[self.headers[name].dtype]) for name in names}
    )

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A block of a tensor: a copy.

    Pages of a file stay in memory as long as it is mapped, so it is now and
    then closed.
    """
    header = self.headers[name]
    if header.file not in self._handles:
      self._handles[header.file] = self._stack.enter_context(
        safetensors.safe_open(self._folder / header.file, "np")
      )
    block = self._handles[header.file].get_slice(name)[index]
    rows = index[0].stop - index[0].start
    width = math.prod(header.shape[1:])
    self._mapped += rows * width * block.itemsize
    if self._mapped >= _MAPPED_BYTES:
      self._close()
    return block

  def _close(self) -> None:
    self._stack.close()
    self._handles.clear()
    self._mapped = 0


def _ignored(name: str, *, tied: bool) -> bool:
  """Tensors that transformers ignores too: copies of what is known."""
  tied_copy = tied and name == "lm_head.weight"
  return tied_copy or name.endswith(".rotary_emb.inv_freq")


def _load_parameter(
  checkpoint: _Checkpoint,
  tensor: _Tensor,
  shape: tuple[int, ...],
  sharding: NamedSharding,
) -> jax.Array:
  """One parameter, float32, piece by piece.

  A piece is a block at the same place of every shard: of one published tensor
  each, as many of its rows as ``_PIECE_BYTES`` allow.
  """
  leading = tensor.num_leading
  local = sharding.shard_shape(shape)
  names = [tensor.name_at(index) for index in tensor.indices(shape)]
  dtype = checkpoint.dtype(names)
  block = [1] * leading + list(local[leading:])
  axis = leading + tensor.rows[0]
  devices = len(sharding.addressable_devices)
  row_bytes = devices * dtype.itemsize * math.prod(block) // block[axis]
  block[axis] = max(1, min(block[axis], _PIECE_BYTES // row_bytes))
  num_shards = [whole // part for whole, part in zip(shape, local, strict=True)]
  piece_shape = tuple(b * n for b, n in zip(block, num_shards, strict=True))

  def piece_at(start: tuple[int, ...]) -> jax.Array:
    blocks: dict[tuple[int, ...], np.ndarray] = {}  # Replicas share them.

    def read(index: tuple[slice, ...]) -> np.ndarray:
      origin = tuple(
        (part.start or 0) // block[i] * local[i] + start[i]
        for i, part in enumerate(index)
      )
      if origin not in blocks:
        blocks[origin] = _read_block(
          checkpoint, tensor, shape, origin, tuple(block)
        ).astype(dtype, copy=False)
      return blocks[origin]

    return jax.make_array_from_callback(piece_shape, sharding, read)

  value, write = _zeros(shape, sharding)(), _writer(sharding)
  for start in _starts(local, block):
    piece = piece_at(start)
    value = write(value, piece, np.array(start, np.int32))
    value.block_until_ready()  # Or pieces pile up.
  return value


def _starts(
  local: Sequence[int], block: Sequence[int]
) -> Iterator[tuple[int, ...]]:
  """Where the blocks of a shard begin; the last of a row may overlap."""
  return itertools.product(
    *(
      [min(start, whole - part) for start in range(0, whole, part)]
      for whole, part in zip(local, block, strict=True)
    )
  )


def _read_block(
  checkpoint: _Checkpoint,
  tensor: _Tensor,
  shape: tuple[int, ...],
  origin: tuple[int, ...],
  block: tuple[int, ...],
) -> np.ndarray:
  """The part of a parameter that begins at ``origin``, from one tensor."""
  leading = tensor.num_leading

  def span(axes: tuple[int, ...]) -> slice:
    first, *rest = (leading + axis for axis in axes)
    for axis in rest:
      if block[axis] != shape[axis]:
        raise ValueError(f"{tensor.name}: axis {axis} of {shape} is cut")
    step = math.prod(shape[axis] for axis in rest)
    return slice(origin[first] * step, (origin[first] + block[first]) * step)

  groups = (tensor.rows, tensor.columns) if tensor.columns else (tensor.rows,)
  read = checkpoint.read(
    tensor.name_at(origin[:leading]), tuple(map(span, groups))
  )
  return tensor.to_ours(read, block[leading:]).reshape(block)


@functools.cache
def _zeros(shape: tuple[int, ...], sharding: NamedSharding):
  """Makes zeros in their shards; compiled once for parameters alike."""
  return jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=sharding)


@functools.cache
def _writer(sharding: NamedSharding):
  """Writes a piece into every shard of a parameter, in place."""

  def write(value: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(
      value, piece.astype(value.dtype), [start[i] for i in range(value.ndim)]
    )

  spec = sharding.spec
  return jax.jit(
    jax.shard_map(
      write,
      mesh=sharding.mesh,
      in_specs=(spec, spec, PartitionSpec()),
      out_specs=spec,
      check_vma=False,
    ),
    donate_argnums=0,
  )


# --------------------------------------------------------------------- export


def save(
  params: Params,
  config: ModelConfig,
  folder: str | os.PathLike,
  *,
  generation: Mapping[str, Any],
  tokenizer_files: Mapping[str, str] = types.MappingProxyType({}),
  dtype: Literal["float32", "bfloat16"] = "float32",
  max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
  """Writes a folder that transformers and inference servers load.

  Mistral's equations are Llama's, and are written as such. The folder appears
  under its name when it is complete; one file of the weights at a time is held
  in the host's memory.

  Args:
    params: As ``Policy.init`` makes them, on this process's devices or host.
    config: Of the model.
    folder: Must not exist; its parent is created.
    generation: For ``generation_config.json``; ``bos_token_id``,
      ``eos_token_id`` and ``pad_token_id``, where given, also go to
      ``config.json``.
    tokenizer_files: Text of each file by its name.
    dtype: Of the weights; float32 loses nothing.
    max_shard_bytes: Of each file of the weights, unless one tensor is larger.

  Raises:
    ConfigError: The folder exists, or no family has this combination.
  """
  folder = pathlib.Path(folder)
  problems = _export_problems(config)
  if folder.exists() or folder.is_symlink():
    problems.append(f"{folder} exists. Try a new folder.")
  if problems:
    raise ConfigError(problems, place="the export")
  vocab_size = params["embedding"].shape[0]
  published = _published_config(config, vocab_size, dtype)
  published |= {k: v for k, v in generation.items() if k in _TOKEN_IDS}
  folder.parent.mkdir(parents=True, exist_ok=True)
  partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
  partial.mkdir()
  try:
    _write_json(partial / _CONFIG, published)
    _write_json(partial / _GENERATION, dict(generation))
    for name, text in tokenizer_files.items():
      (partial / name).write_text(text, "utf-8")
    _write_weights(
      params, _layout(config), partial, jnp.dtype(dtype), max_shard_bytes
    )
    partial.rename(folder)
  except BaseException:
    shutil.rmtree(partial)
    raise


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _family(config: ModelConfig) -> str:
  if config.num_experts:
    return "qwen3_moe"
  if config.qk_norm:
    return "qwen3"
  return "qwen2" if config.qkv_bias else "llama"


def _export_problems(config: ModelConfig) -> list[str]:
  problems = []
  if config.qk_norm and config.qkv_bias:
    problems.append(
      "model.qk_norm and model.qkv_bias: no published family has both. Try "
      "model.qkv_bias=False."
    )
  if config.num_experts and not config.qk_norm:
    problems.append(
      f"model.num_experts = {config.num_experts} without model.qk_norm: no "
      "published family has that. Try model.qk_norm=True."
    )
  return problems


def _published_config(
  config: ModelConfig, vocab_size: int, dtype: str
) -> dict[str, Any]:
  """``config.json`` in the older style, which every version reads."""
  family = _family(config)
  scaling = None
  if config.rope_scaling_factor != 1:
    scaling = dict(
      rope_type="llama3",
      factor=config.rope_scaling_factor,
      low_freq_factor=config.rope_low_frequency_factor,
      high_freq_factor=config.rope_high_frequency_factor,
      original_max_position_embeddings=config.rope_original_context,
    )
  published = dict(
    architectures=[_FAMILIES[family]],
    model_type=family,
    hidden_act="silu",
    hidden_size=config.embed_dim,
    intermediate_size=config.mlp_dim,
    num_hidden_layers=config.num_layers,
    num_attention_heads=config.num_heads,
    num_key_value_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    max_position_embeddings=config.context_tokens,
    rms_norm_eps=config.norm_eps,
    rope_theta=config.rope_theta,
    rope_scaling=scaling,
    tie_word_embeddings=config.tie_embeddings,
    vocab_size=vocab_size,
    torch_dtype=dtype,
    use_cache=True,
  )
  if family.startswith("qwen"):
    published |= dict(use_sliding_window=False, sliding_window=None)
  if family != "qwen2":
    published |= dict(attention_bias=False)
  if config.num_experts:
    published |= dict(
      num_experts=config.num_experts,
      num_experts_per_tok=config.experts_per_token,
      moe_intermediate_size=config.expert_mlp_dim,
      norm_topk_prob=config.normalize_expert_weights,
      decoder_sparse_step=1,
      mlp_only_layers=[],
    )
  return published


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
  path.write_text(text + "\n", "utf-8")


def _write_weights(
  params: Params,
  layout: Mapping[tuple[str, ...], _Tensor],
  folder: pathlib.Path,
  dtype: np.dtype,
  max_shard_bytes: int,
) -> None:
  """The safetensors files, and their index where there are several."""
  # Each tensor's parameter and index, by name; then the names of each file.
  sources, files, room, total = {}, [], 0, 0
  for keys, leaf in jax.tree.leaves_with_path(params):
    tensor = layout[_path(keys)]
    size = math.prod(tensor.published_shape(leaf.shape)) * dtype.itemsize
    for index in tensor.indices(leaf.shape):
      name = tensor.name_at(index)
      sources[name] = (tensor, leaf, index)
      if size > room:
        files.append([])
        room = max_shard_bytes
      files[-1].append(name)
      room, total = room - size, total + size
  weight_map = {}
  for number, names in enumerate(files, start=1):
    file = _SINGLE
    if len(files) > 1:
      file = f"model-{number:05}-of-{len(files):05}.safetensors"
    safetensors.numpy.save_file(
      {name: _published_tensor(*sources[name], dtype) for name in names},
      folder / file,
      metadata={"format": "pt"},  # Or transformers refuses it.
    )
    # The library makes files that only their owner reads.
    shutil.copymode(folder / _CONFIG, folder / file)
    weight_map |= dict.fromkeys(names, file)
  if len(files) > 1:
    metadata = dict(total_size=total)
    _write_json(folder / _INDEX, dict(metadata=metadata, weight_map=weight_map))


def _published_tensor(
  tensor: _Tensor,
  leaf: jax.Array | np.ndarray,
  index: tuple[int, ...],
  dtype: np.dtype,
) -> np.ndarray:
  if index and isinstance(leaf, jax.Array):
    leaf = _take(leaf, index)  # No more than this comes to the host.
  elif index:
    leaf = leaf[index]
  return tensor.to_published(np.asarray(leaf).astype(dtype, copy=False))


@jax.jit
def _take(leaf: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
  for number in index:
    leaf = jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)
  return leaf
