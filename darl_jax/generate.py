"""The sampling engine for a published model, without training.

from darl_jax.generate import Generator

model = Generator("runs/mine-model", max_response_tokens=64)
for answer in model.generate(["What is 2 + 3?", "Name a colour."]):
  print(model.text(answer))
"""

import numbers
import os
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from darl_jax.config import ConfigError, ModelConfig, RolloutConfig
from darl_jax.models import presets, published
from darl_jax.models.transformer import Policy
from darl_jax.prompts.chat import ChatTokenizer
from darl_jax.prompts.stop_strings import StopStrings
from darl_jax.rollout.engine import Engine
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
      ConfigError: The model is not there or not supported, the devices do not
        fit it, or an argument has no such value: all of those at once.
    """
    _check(
      dict(
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=max_response_tokens,
        samples=samples,
        slots=slots,
        tensor=tensor,
      ),
      dtype,
      cache_dtype,
    )
    sampling = sampling or Sampling(temperature=1.0)
    path = published.locate(os.fspath(model))
    config = ModelConfig(
      **presets.FRESH
      | dict(compute_dtype=dtype, remat="none")
      | published.read_config(path)
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
      pad_id=self.tokenizer.pad_id,
      seed=seed,
      stops=stops,
    )

  def generate(self, prompts: Sequence[str | np.ndarray]) -> list[Trajectory]:
    """The responses, ``samples`` for each prompt, in the prompts' order.

    Args:
      prompts: Text, asked through the chat template, or tokens int32 [P].

    Raises:
      ValueError: A prompt is empty or longer than ``max_prompt_tokens``.
    """
    answered = dict(self.stream(prompts))
    return [t for index in range(len(prompts)) for t in answered[index]]

  def stream(
    self, prompts: Sequence[str | np.ndarray]
  ) -> Iterator[tuple[int, tuple[Trajectory, ...]]]:
    """As ``generate``: each prompt's index and responses, once they are there.

    Equal prompts asked again are answered anew: what is drawn follows from
    the seed and the number of prompts asked before.
    """
    first = self._asked
    self._asked += len(prompts)
    asked = [
      Prompt(str(index), self._tokens(prompt), {})
      for index, prompt in enumerate(prompts)
    ]
    for group in self.engine.stream(
      asked, first_group_id=first, fetch=lambda: self._snapshot
    ):
      yield group.group_id - first, group.trajectories

  def text(self, trajectory: Trajectory) -> str:
    """The response, without special tokens."""
    return self.tokenizer.decode(trajectory.response)

  def _tokens(self, prompt: str | np.ndarray) -> np.ndarray:
    if isinstance(prompt, str):
      return self.tokenizer.encode_prompt(prompt)
    return np.asarray(prompt, np.int32)


def _check(counts: Mapping[str, int], dtype: str, cache_dtype: str) -> None:
  """Raises ConfigError for arguments of ``Generator`` that cannot be."""
  problems = [
    f"{name} = {count} must be an integer of at least 1. Try {name}=1."
    for name, count in counts.items()
    if not isinstance(count, numbers.Integral) or count < 1
  ]
  devices, tensor = jax.device_count(), counts["tensor"]
  if not problems and devices % tensor:
    most = max(
      n for n in range(1, devices + 1) if devices % n == 0 and n <= tensor
    )
    problems.append(
      f"tensor = {tensor} does not divide the {devices} devices. Try "
      f"tensor={most}."
    )
  for name, value, known in (
    ("dtype", dtype, ("float32", "bfloat16")),
    ("cache_dtype", cache_dtype, ("", "float32", "bfloat16", "int8")),
  ):
    if value not in known:
      problems.append(
        f"{name} = {value!r} is none of {known}. Try {known[0]!r}."
      )
  if problems:
    raise ConfigError(problems)
