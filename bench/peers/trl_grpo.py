"""``GRPOTrainer`` of TRL, for ``bench/grpo_step.py``; see grpo_protocol.py."""

import importlib.metadata
import pathlib
from collections.abc import Callable

import datasets
import grpo_protocol
import token_text
import tokenizers
import torch
import transformers
import trl


def _model(job: grpo_protocol.Job) -> transformers.Qwen3ForCausalLM:
  config = transformers.Qwen3Config(
    num_hidden_layers=job.num_layers,
    hidden_size=job.embed_dim,
    intermediate_size=job.mlp_dim,
    num_attention_heads=job.num_heads,
    num_key_value_heads=job.num_kv_heads,
    head_dim=job.head_dim,
    vocab_size=job.vocab_size,
    tie_word_embeddings=False,
    dtype="float32",
  )
  return transformers.AutoModelForCausalLM.from_config(config)


def _tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
  """Token ids are words; the stop token is none that the model can sample."""
  words = {str(token): token for token in range(vocab_size)}
  stop = "<stop>"
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({**words, stop: vocab_size}, unk_token="0")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="0", eos_token=stop
  )


class AfterStep(transformers.TrainerCallback):
  """Sees what each step sampled, and where it ends.

  Attributes:
    steps: To be set before training begins.
  """

  def __init__(self, vocab_size: int):
    self.steps: grpo_protocol.Steps | None = None
    self._vocab_size = vocab_size
    self._tokens = 0

  def reward(self, completion_ids: list[list[int]], **_) -> list[float]:
    self._tokens += sum(map(len, completion_ids))
    return [
      token_text.reward(tokens, vocab_size=self._vocab_size)
      for tokens in completion_ids
    ]

  def on_step_end(self, *_, **__) -> None:
    tokens, self._tokens = self._tokens, 0
    self.steps.done(tokens=tokens)


def load(
  job: grpo_protocol.Job, folder: pathlib.Path
) -> Callable[[grpo_protocol.Steps], None]:
  """A trainer that has not begun."""
  config = trl.GRPOConfig(
    output_dir=str(folder),
    max_steps=grpo_protocol.MAX_STEPS,
    per_device_train_batch_size=job.sequences,
    num_generations=job.samples_per_prompt,
    max_completion_length=job.response_tokens,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    beta=0.0,
    learning_rate=job.learning_rate,
    lr_scheduler_type="constant",
    # Its defaults suit accelerators: less memory, more time.
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    dataloader_pin_memory=False,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
  )
  after_step = AfterStep(job.vocab_size)
  trainer = trl.GRPOTrainer(
    model=_model(job),
    args=config,
    reward_funcs=[after_step.reward],
    train_dataset=datasets.Dataset.from_list(
      [{"prompt": token_text.decode(tokens)} for tokens in job.prompts]
    ),
    processing_class=_tokenizer(job.vocab_size),
    callbacks=[after_step],
  )

  def train(steps: grpo_protocol.Steps) -> None:
    after_step.steps = steps
    trainer.train()

  return train


if __name__ == "__main__":
  version = importlib.metadata.version("trl")
  grpo_protocol.serve(
    f"trl {version}, transformers {transformers.__version__}, "
    f"torch {torch.__version__}",
    load,
  )
