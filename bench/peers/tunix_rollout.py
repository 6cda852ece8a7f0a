"""Tunix's own sampler, for ``bench/rollout.py``; see protocol.py."""

import functools
import importlib.metadata
import json
import pathlib
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import protocol
from tunix.generate import sampler as sampler_lib
from tunix.models.llama3 import model as llama3_model
from tunix.models.llama3 import params as llama3_params
from tunix.models.qwen3 import model as qwen3_model
from tunix.models.qwen3 import params as qwen3_params

# By family: modules, model, and what its config calls tied embeddings.
_FAMILIES = {
  "llama": (llama3_model, llama3_params, "weight_tying"),
  "qwen3": (qwen3_model, qwen3_params, "use_tied_embedding"),
}
# Of no token: nothing is padded and nothing stops.
_NO_TOKEN = -1


class TokenIds:
  """Stands for a tokenizer where prompts are token ids already."""

  def encode(self, ids: list[int]) -> list[int]:
    return ids

  def decode(self, ids: list[int]) -> str:
    del ids
    return ""

  def bos_id(self) -> None:
    return None

  def eos_id(self) -> int:
    return _NO_TOKEN

  def pad_id(self) -> int:
    return _NO_TOKEN


class Sampler:
  """A model in float32, by Tunix's loader of safetensors."""

  def __init__(self, folder: str):
    published = json.loads((pathlib.Path(folder) / "config.json").read_text())
    family = published["model_type"]
    if family not in _FAMILIES:
      raise SystemExit(
        f"tunix_rollout.py knows {', '.join(_FAMILIES)}, and not {family}"
      )
    models, params, tied = _FAMILIES[family]
    rotary = published.get("rope_parameters") or published
    scaling = published.get("rope_scaling") or rotary
    if scaling.get("rope_type", "default") != "default":
      raise SystemExit("Tunix does not scale rotary frequencies")
    # Its attention leaves the base at the function's default, whatever the
    # model's config says.
    models.apply_rope = functools.partial(
      models.apply_rope, rope_theta=rotary["rope_theta"]
    )
    self._config = models.ModelConfig(
      num_layers=published["num_hidden_layers"],
      vocab_size=published["vocab_size"],
      embed_dim=published["hidden_size"],
      hidden_dim=published["intermediate_size"],
      num_heads=published["num_attention_heads"],
      head_dim=published.get("head_dim")
      or published["hidden_size"] // published["num_attention_heads"],
      num_kv_heads=published["num_key_value_heads"],
      rope_theta=rotary["rope_theta"],
      norm_eps=published["rms_norm_eps"],
      **{tied: published.get("tie_word_embeddings", False)},
    )
    self._model = params.create_model_from_safe_tensors(
      folder, self._config, dtype=jnp.float32
    )

  def logprobs(self, tokens: Sequence[int]) -> list[float]:
    ids = jnp.array([tokens])
    length = ids.shape[1]
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    positions = jnp.arange(length)[None]
    logits, _ = self._model(ids, positions, None, causal)
    each = jax.nn.log_softmax(logits[0, :-1])
    return jnp.take_along_axis(each, ids[0, 1:, None], axis=1)[:, 0].tolist()

  def prepare(self, prompts: list[list[int]], tokens: int) -> Callable:
    longest = max(map(len, prompts))
    # Attention reads all of the cache at each token.
    cache = sampler_lib.CacheConfig(
      cache_size=longest + tokens,
      num_layers=self._config.num_layers,
      num_kv_heads=self._config.num_kv_heads,
      head_dim=self._config.head_dim,
    )
    sampler = sampler_lib.Sampler(self._model, TokenIds(), cache)

    def run(seed: int) -> list[jax.Array]:
      return sampler(
        prompts,
        max_generation_steps=tokens,
        max_prompt_length=longest,
        temperature=1.0,
        top_p=1.0,
        seed=seed,
      ).tokens

    return run


if __name__ == "__main__":
  # Of Tunix, about itself.
  warnings.filterwarnings("ignore", message="Using deprecated _init_cache")
  version = importlib.metadata.version("google-tunix")
  protocol.serve(f"google-tunix {version}, jax {jax.__version__}", Sampler)
