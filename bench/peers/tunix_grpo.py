"""Tunix's ``GRPOLearner``, for ``bench/grpo_step.py``; see grpo_protocol.py."""

import importlib.metadata
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence

import grpo_protocol
import jax
import numpy as np
import optax
import token_text
import tunix_rollout
from flax import nnx
from tunix.models.qwen3 import model as qwen3_model
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout


class TokenText(tunix_rollout.TokenIds):
  """Stands for a tokenizer whose text is token ids."""

  def encode(self, text: str) -> list[int]:
    return token_text.encode(text)

  def decode(self, ids: Sequence[int]) -> str:
    return token_text.decode(np.asarray(ids).tolist())


def _cluster(job: grpo_protocol.Job) -> rl_cluster.RLCluster:
  """Actor and sampler with one fresh model on one device."""
  config = qwen3_model.ModelConfig(
    num_layers=job.num_layers,
    vocab_size=job.vocab_size,
    embed_dim=job.embed_dim,
    hidden_dim=job.mlp_dim,
    num_heads=job.num_heads,
    head_dim=job.head_dim,
    num_kv_heads=job.num_kv_heads,
    rope_theta=1_000_000,
    norm_eps=1e-6,
    use_tied_embedding=False,
  )
  mesh = jax.make_mesh(
    (1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  with mesh:
    model = qwen3_model.Qwen3(config, rngs=nnx.Rngs(0))
  roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT)
  return rl_cluster.RLCluster(
    actor=model,
    tokenizer=TokenText(),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh=dict.fromkeys((*roles, rl_cluster.Role.REFERENCE), mesh),
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(job.learning_rate),
        eval_every_n_steps=grpo_protocol.MAX_STEPS,
        max_steps=grpo_protocol.MAX_STEPS,
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=job.response_tokens,
        max_prompt_length=job.max_prompt_tokens,
        # Attention reads all of the cache at each token.
        kv_cache_size=job.max_prompt_tokens + job.response_tokens,
        temperature=1.0,
        top_p=1.0,
      ),
    ),
  )


def load(
  job: grpo_protocol.Job, folder: pathlib.Path
) -> Callable[[grpo_protocol.Steps], None]:
  """A learner that has not begun."""
  del folder
  cluster = _cluster(job)
  sampled = []

  def reward(completions: Sequence[str], **_) -> list[float]:
    tokens = [token_text.encode(text) for text in completions]
    sampled.extend(map(len, tokens))
    return [
      token_text.reward(each, vocab_size=job.vocab_size) for each in tokens
    ]

  learner = grpo_learner.GRPOLearner(
    rl_cluster=cluster,
    algo_config=grpo_learner.GRPOConfig(
      num_generations=job.samples_per_prompt, num_iterations=1, beta=0.0
    ),
    reward_fns=reward,
  )

  def batches(steps: grpo_protocol.Steps) -> Iterator[dict[str, np.ndarray]]:
    """Prompts; asked for the next ones, the learner has done a step."""
    texts = itertools.cycle(map(token_text.decode, job.prompts))
    while True:
      prompts = list(itertools.islice(texts, job.prompts_per_step))
      yield {"prompts": np.array(prompts)}
      # The update is dispatched, and may not have ended.
      jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
      steps.done(tokens=sum(sampled))
      sampled.clear()

  return lambda steps: learner.train(batches(steps))


if __name__ == "__main__":
  version = importlib.metadata.version("google-tunix")
  grpo_protocol.serve(f"google-tunix {version}, jax {jax.__version__}", load)
