"""Supervised steps on reference answers, before RL."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from darl_jax import numerics
from darl_jax.config import WarmStartConfig
from darl_jax.kernels.token_logprob import ops as logprob_ops
from darl_jax.learner import state as learner_state
from darl_jax.models import lora
from darl_jax.models.transformer import Policy
from darl_jax.sharding import rules
from darl_jax.types import Params

# Question tokens and answer tokens, the stop token included.
Example = tuple[np.ndarray, np.ndarray]

# Weight of the newest batch in the running accuracy.
_SMOOTHING = 0.2


def warm_start(
  policy: Policy,
  params: Params,
  examples: Sequence[Example],
  config: WarmStartConfig,
  *,
  mesh: Mesh,
  seed: int,
  advance: Callable[[Mapping[str, float]], None],
) -> Params:
  """Maximises the log-prob of reference answers with AdamW.

  Args:
    policy: The model.
    params: All, on the train mesh; taken over.
    examples: What batches are drawn from, with replacement.
    config: Most steps, when to stop before them, batch size, learning rate.
    mesh: The train mesh.
    seed: Of the draws.
    advance: Called after each step, with its metrics.

  Returns:
    All parameters; with adapters, they alone have changed.

  Raises:
    ValueError: There are steps to do but no examples.
  """
  if not config.steps:
    return params
  if not examples:
    raise ValueError(
      "no reference answers to warm-start from: set warm_start.steps = 0"
    )
  optimizer = optax.adamw(config.learning_rate, weight_decay=0.0)
  tokens, mask = _rows(examples)
  sharding = rules.rows_sharding(mesh, rules.TRAIN_RULES)
  partition = rules.partition(mesh, rules.TRAIN_RULES)

  trained, frozen = lora.split(params)

  def loss(trained: Params, frozen: Params, tokens: jax.Array, mask: jax.Array):
    """Mean of -log pi over answer tokens in nats, and the chance to answer
    as the reference does when sampling at temperature 1."""
    params = lora.join(trained, frozen)
    shape = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(shape[1])[None], shape)
    ones = jnp.ones(shape, jnp.int32)  # Padding is last, so it is never read.
    hidden = policy.hidden(params, tokens, positions, ones, partition=partition)
    # The last position predicts nothing and is given some target.
    logprobs, _ = logprob_ops.token_logprob(
      hidden,
      policy.unembedding(params),
      jnp.roll(tokens, -1, axis=1),
      temperature=1.0,
      partition=partition,
    )
    answers = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    by_answer = numerics.masked_sum(logprobs, answers, axis=1)
    nats = -numerics.safe_divide(jnp.sum(by_answer), numerics.count(answers))
    return nats, jnp.mean(jnp.exp(by_answer))

  def step(carry, frozen: Params, tokens: jax.Array, mask: jax.Array):
    trained, opt_state = carry
    (nats, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(
      trained, frozen, tokens, mask
    )
    updates, opt_state = optimizer.update(grads, opt_state, trained)
    return (optax.apply_updates(trained, updates), opt_state), nats, accuracy

  shardings = jax.tree.map(lambda leaf: leaf.sharding, trained)
  replicated = rules.replicated(mesh)
  opt_shardings = learner_state.opt_state_shardings(
    optimizer, trained, shardings, replicated=replicated
  )
  jitted = jax.jit(
    step,
    donate_argnums=0,
    out_shardings=((shardings, opt_shardings), replicated, replicated),
  )
  rng = np.random.default_rng(seed)
  init = jax.jit(optimizer.init, out_shardings=opt_shardings)
  carry = trained, init(trained)
  smoothed = 0.0
  for _ in range(config.steps):
    rows = rng.integers(len(tokens), size=config.batch_size)
    batch = jax.device_put((tokens[rows], mask[rows]), sharding)
    carry, nats, accuracy = jitted(carry, frozen, *batch)
    smoothed += _SMOOTHING * (float(accuracy) - smoothed)
    advance({"warm_start/loss": float(nats), "warm_start/accuracy": smoothed})
    if smoothed >= config.target_accuracy:
      break
  return lora.join(carry[0], frozen)


def _rows(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
  """Right-padded tokens int32 [n, T] and answer mask bool [n, T]."""
  width = max(len(question) + len(answer) for question, answer in examples)
  tokens = np.zeros((len(examples), width), np.int32)
  mask = np.zeros((len(examples), width), bool)
  for row, (question, answer) in enumerate(examples):
    start, end = len(question), len(question) + len(answer)
    tokens[row, :start] = question
    tokens[row, start:end] = answer
    mask[row, start:end] = True
  return tokens, mask
