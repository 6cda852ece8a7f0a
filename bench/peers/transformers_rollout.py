"""``generate`` of transformers, for ``bench/rollout.py``; see protocol.py."""

import importlib.metadata
from collections.abc import Callable, Sequence

import protocol
import torch
import transformers


class Sampler:
  """A causal language model in float32."""

  def __init__(self, folder: str):
    self._model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32
    ).eval()
    # What the folder says of sampling and stopping is not asked for.
    self._model.generation_config = transformers.GenerationConfig()

  def logprobs(self, tokens: Sequence[int]) -> list[float]:
    ids = torch.tensor([tokens])
    with torch.inference_mode():
      logits = self._model(ids).logits[0, :-1]
    each = torch.log_softmax(logits, dim=-1)
    return each.gather(1, ids[0, 1:, None])[:, 0].tolist()

  def prepare(self, prompts: list[list[int]], tokens: int) -> Callable:
    ids = torch.tensor(prompts)
    settings = transformers.GenerationConfig(
      max_new_tokens=tokens,
      do_sample=True,
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      eos_token_id=None,
      pad_token_id=0,
    )

    def run(seed: int) -> torch.Tensor:
      torch.manual_seed(seed)
      with torch.inference_mode():
        sampled = self._model.generate(
          ids,
          attention_mask=torch.ones_like(ids),
          generation_config=settings,
        )
      return sampled[:, ids.shape[1] :]

    return run


if __name__ == "__main__":
  version = importlib.metadata.version("transformers")
  protocol.serve(f"transformers {version}, torch {torch.__version__}", Sampler)
