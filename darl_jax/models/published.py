"""A published model wherever it is: a folder, a hub id, or a GGUF file.

What a run starts from, by the one text that names it (``model.checkpoint``).
"""

import dataclasses
import os
import pathlib
from typing import Any

import jax.numpy as jnp

from darl_jax.config import ConfigError, ModelConfig
from darl_jax.models import gguf, hf
from darl_jax.types import Params

_GGUF = ".gguf"


def locate(model: str) -> pathlib.Path:
  """The folder or file of a model; one on the hub is downloaded.

  Args:
    model: A local folder, a hub id, or a file whose name ends in .gguf.

  Raises:
    ConfigError: It is not there.
  """
  path = pathlib.Path(model).expanduser()
  if path.suffix != _GGUF or path.is_dir():
    return hf.locate(model)
  if not path.is_file():
    raise ConfigError(
      [
        f"{model} is no file. Try the path of one; python "
        "launch/fetch_smollm2.py fetches a small model."
      ],
      place="the model",
    )
  return path


def read_config(path: str | os.PathLike) -> dict[str, Any]:
  """The fields of ``ModelConfig`` that a published model sets.

  All but ``compute_dtype``, ``remat``, ``checkpoint`` and those of adapters,
  which are no part of a model.

  Args:
    path: A folder, or a GGUF file.

  Raises:
    ConfigError: Listing everything that is missing or not implemented.
  """
  return _reader(path).read_config(path)


def check(path: str | os.PathLike, config: ModelConfig) -> None:
  """Raises ConfigError unless ``load`` would succeed; allocates nothing.

  It lists every field of the config that is not the model's, or every tensor
  that is missing, unexpected or of another shape.
  """
  differ = {
    name: value
    for name, value in read_config(path).items()
    if getattr(config, name) != value
  }
  if differ:
    ours = dataclasses.asdict(config)
    raise ConfigError(
      [
        f"model.{name} = {ours[name]!r}, but the model's is {value!r}. Try "
        f"model.{name}={value!r}."
        for name, value in differ.items()
      ],
      place=f"the shape of {path}; --config=configs/finetune.py:{path} takes "
      "it from there",
    )
  _reader(path).check(path, _without_adapters(config))


def load(
  path: str | os.PathLike,
  config: ModelConfig,
  *,
  shardings: Params,
  round_to: jnp.dtype = jnp.float32,
) -> Params:
  """The model's float32 parameters, without adapters, streamed into shards.

  Args:
    path: A folder, or a GGUF file.
    config: Of the model; see ``check``.
    shardings: A ``NamedSharding`` per parameter.
    round_to: Of a GGUF file, what dtype the dequantised values are rounded to.
      A folder's are as they were published.

  Raises:
    ConfigError: As ``check`` does.
  """
  config = _without_adapters(config)
  if _reader(path) is hf:
    return hf.load(path, config, shardings=shardings)
  return gguf.load(path, config, shardings=shardings, round_to=round_to)


def _without_adapters(config: ModelConfig) -> ModelConfig:
  return dataclasses.replace(config, lora_rank=0)


def _reader(path: str | os.PathLike) -> Any:
  """The module that reads this kind of model."""
  return gguf if pathlib.Path(path).suffix == _GGUF else hf
