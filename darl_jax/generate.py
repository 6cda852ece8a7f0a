"""The sampling engine for a published model, without training.

from darl_jax.generate import Generator

model = Generator("runs/mine-model", max_response_tokens=64)
for answer in model.generate(["What is 2 + 3?", "Name a colour."]):
  print(model.text(answer))
"""

import os
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from darl_jax.config import (
  ConfigError,
  ModelConfig,
  RolloutConfig,
  stop_string_problems,
  tensor_problems,
  value_problems,
)
from darl_jax.models import presets, published
from darl_jax.models.transformer import Policy
from darl_jax.prompts.chat import ChatTokenizer
from darl_jax.prompts.stop_strings import StopStrings
from darl_jax.rollout.engine import Engine, is_whole, token_problem
from darl_jax.rollout.placement import Placement
from darl_jax.rollout.sampling import Sampling
from darl_jax.sharding import meshes
from darl_jax.types import Prompt, Trajectory


class Generator:
  """A model, its tokenizer and an engine on all devices.

  Attributes:
    engine: What does the work; its ``stats`` say how well.
    tokenizer: The model's own, with its chat template.
  """

  def __init__(
    self,
    model: str | os.PathLike,
    *,
    max_prompt_tokens: int = 512,
    max_response_tokens: int = 256,
    samples: int = 1,
    slots: int = 64,
    sampling: Sampling | None = None,
    stop_strings: Sequence[str] = (),
    system: str = "",
    tensor: int = 1,
    dtype: str = "float32",
    cache_dtype: str = "",
    seed: int = 0,
  ):
    """Loads the model onto every device there is.

    Args:
      model: A published model's folder, its id on the hub, or a .gguf file.
      max_prompt_tokens: Longest prompt, its chat template included.
      max_response_tokens: Longest response.
      samples: Responses to each prompt.
      slots: Responses that decode together.
      sampling: Temperature and truncation; None draws at temperature 1.
      stop_strings: A response ends with the first token after which its text
        has one of these.
      system: Message before each prompt; "" leaves it to the template.
      tensor: Devices that share a copy of the model.
      dtype: Of parameters and activations: "float32" or "bfloat16".
      cache_dtype: Of the cache; "" for ``dtype``, or "int8" for a quarter of
        float32.
      seed: Of the draws.

    Raises:
      ConfigError: An argument has no such value: all of those at once. Or the
        model is not there or not supported, or an argument does not suit it.
    """
    sampling = sampling or Sampling(temperature=1.0)
    _check(
      max_prompt_tokens=max_prompt_tokens,
      max_response_tokens=max_response_tokens,
      samples=samples,
      slots=slots,
      stop_strings=stop_strings,
      system=system,
      tensor=tensor,
      dtype=dtype,
      cache_dtype=cache_dtype,
      seed=seed,
    )
    path = published.locate(os.fspath(model))
    config = ModelConfig(
      **presets.FRESH
      | dict(compute_dtype=dtype, remat="none")
      | published.read_config(path)
    )
    _check_model(
      config,
      tensor=tensor,
      max_prompt_tokens=max_prompt_tokens,
      max_response_tokens=max_response_tokens,
    )
    data = jax.device_count() // tensor
    devices = np.array(jax.devices()[: data * tensor])
    mesh = Mesh(devices.reshape(data, tensor), meshes.ROLLOUT_AXES)
    policy = Policy(config, vocab_size=config.vocab_size)
    self.tokenizer = ChatTokenizer.load(path, system=system)
    stops = None
    if stop_strings:
      stops = StopStrings(stop_strings, decode=self.tokenizer.decode)
    published.check(path, config)
    placement = Placement(policy, mesh=mesh, dtype=jnp.dtype(dtype))
    params = published.load(path, config, shardings=placement.shardings)
    self._snapshot = placement.adopt(params, version=0)
    self._asked = 0
    self._vocab_size = config.vocab_size
    self.engine = Engine(
      policy,
      RolloutConfig(
        prompts_per_batch=slots,
        samples_per_prompt=samples,
        max_response_tokens=max_response_tokens,
        # A page of a TPU's tiles, which are longer in int8.
        chunk_tokens=32 if cache_dtype == "int8" else 16,
        slots=slots,
        cache_tokens=0,
        prefill_tokens=max(256, max_prompt_tokens),
        extra_samples=0,
        weight_update="swap",
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        stop_strings=tuple(stop_strings),
        dtype=dtype,
        cache_dtype=cache_dtype,
      ),
      mesh=mesh,
      max_prompt_tokens=max_prompt_tokens,
      stop_ids=self.tokenizer.stop_ids,
      # Nobody reads it, and some models have no row for their tokenizer's.
      pad_id=min(self.tokenizer.pad_id, config.vocab_size - 1),
      seed=seed,
      stops=stops,
    )

  def generate(self, prompts: Sequence[str | np.ndarray]) -> list[Trajectory]:
    """The responses, ``samples`` for each prompt, in the prompts' order.

    Args:
      prompts: Text, asked through the chat template, or tokens int32 [P].

    Raises:
      ValueError: What is asked is not a list of prompts, or one of them is
        empty, longer than ``max_prompt_tokens``, not text or a row of integers,
        or has a token that the model has not.
    """
    answered = dict(self.stream(prompts))
    return [t for index in range(len(answered)) for t in answered[index]]

  def stream(
    self, prompts: Sequence[str | np.ndarray]
  ) -> Iterator[tuple[int, tuple[Trajectory, ...]]]:
    """As ``generate``: each prompt's index and responses, once they are there.

    Equal prompts asked again are answered anew: what is drawn follows from
    the seed and the number of prompts asked before.
    """
    if isinstance(prompts, (str, bytes)) or not (
      isinstance(prompts, Sequence) or np.ndim(prompts) > 0
    ):
      works = (
        f"[{reprlib.repr(prompts)}]"
        if isinstance(prompts, str)
        else "list(prompts)"
      )
      raise ValueError(
        f"prompts = {reprlib.repr(prompts)} is not a list of prompts. "
        f"Try {works}."
      )
    asked = [
      Prompt(str(index), self._tokens(index, prompt), {})
      for index, prompt in enumerate(prompts)
    ]
    first = self._asked
    self._asked += len(asked)
    for group in self.engine.stream(
      asked, first_group_id=first, fetch=lambda: self._snapshot
    ):
      yield group.group_id - first, group.trajectories

  def text(self, trajectory: Trajectory) -> str:
    """The response, without special tokens."""
    return self.tokenizer.decode(trajectory.response)

  def _tokens(self, index: int, prompt: str | np.ndarray) -> np.ndarray:
    """int32 [P], and not a cast of anything but integers."""
    if isinstance(prompt, str):
      return self.tokenizer.encode_prompt(prompt)
    if isinstance(prompt, jax.Array):
      prompt = np.asarray(prompt)
    if isinstance(prompt, np.ndarray):
      usable = prompt.ndim == 1 and prompt.dtype.kind in "iu"
    else:
      usable = isinstance(prompt, Sequence) and all(map(is_whole, prompt))
      usable = usable and not isinstance(prompt, bytes)
    if not usable:
      raise ValueError(
        f"prompt {index} = {reprlib.repr(prompt)} is neither text nor a row of "
        "integers. Try a list of prompts, each a str or np.asarray(tokens, "
        "np.int32)."
      )
    tokens = list(map(int, prompt))
    if problem := token_problem(tokens, self._vocab_size):
      raise ValueError(f"prompt {index} {problem}")
    return np.asarray(tokens, np.int32)


# Arguments of ``Generator``: the config's fields that mean the same, and their
# least values where those are others.
_FIELDS = dict(
  max_prompt_tokens=("prompts.max_tokens", 1),
  max_response_tokens=("rollout.max_response_tokens", 1),
  samples=("rollout.samples_per_prompt", 1),
  slots=("rollout.slots", 1),
  system=("prompts.system", None),
  tensor=("mesh.rollout.tensor", 1),
  dtype=("rollout.dtype", None),
  cache_dtype=("rollout.cache_dtype", None),
  seed=("seed", 0),
)


def _check(*, stop_strings: Any, **arguments: Any) -> None:
  """Raises ConfigError for arguments of ``Generator`` that cannot be."""
  problems = []
  for name, value in arguments.items():
    field, least = _FIELDS[name]
    problems += value_problems(name, value, field=field, least=least)
  problems += stop_string_problems(stop_strings, name="stop_strings")
  devices, tensor = jax.device_count(), arguments["tensor"]
  if not any(problem.startswith("tensor ") for problem in problems):
    most = max(
      n for n in range(1, devices + 1) if devices % n == 0 and n <= tensor
    )
    if most != tensor:
      problems.append(
        f"tensor = {tensor} does not divide the {devices} devices. Try "
        f"tensor={most}."
      )
  if problems:
    raise ConfigError(problems)


def _check_model(
  config: ModelConfig,
  *,
  tensor: int,
  max_prompt_tokens: int,
  max_response_tokens: int,
) -> None:
  """Raises ConfigError for arguments that do not suit the model."""
  problems = tensor_problems(config, tensor, name="tensor")
  longest = max_prompt_tokens + max_response_tokens
  context = config.context_tokens
  if longest > context:
    shorter = context - max_prompt_tokens
    advice = f"max_response_tokens={shorter}"
    if shorter < 1:
      half = context // 2
      advice = f"max_prompt_tokens={half}, max_response_tokens={context - half}"
    problems.append(
      f"max_prompt_tokens + max_response_tokens = {longest} is more than the "
      f"model's context of {context} tokens. Try {advice}."
    )
  if problems:
    raise ConfigError(problems)
