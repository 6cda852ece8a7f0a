"""The jitted programs of the learner: scoring pass and train step."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax import numerics
from darl_jax.config import LearnerConfig, ObjectiveConfig
from darl_jax.kernels.log_ratio_moments import ops as moments_ops
from darl_jax.kernels.multi_behavior_loss import ops as loss_ops
from darl_jax.kernels.token_logprob import ops as logprob_ops
from darl_jax.learner import state as learner_state
from darl_jax.models.transformer import Policy
from darl_jax.sharding import rules
from darl_jax.types import Batch, Params, ScoreBatch, TrainState


class Learner:
  """What the train mesh runs; each program compiles once.

  ``step`` donates the state that it is given: copy what must outlive it.
  """

  def __init__(
    self,
    policy: Policy,
    config: LearnerConfig,
    objective: ObjectiveConfig,
    *,
    mesh: Mesh,
    temperature: float,
    num_steps: int,
  ):
    """Compiles nothing yet.

    Args:
      policy: The model.
      config: Optimisation and shapes.
      objective: The loss.
      mesh: The train mesh.
      temperature: Of the sampled distribution (method 0).
      num_steps: Learner steps of the run, for the schedule.
    """
    self._policy = policy
    self._config = config
    self._objective = objective
    self._mesh = mesh
    self._temperature = temperature
    self.schedule = learner_state.schedule(config, num_steps=num_steps)
    self._optimizer = learner_state.adamw(config, self.schedule)
    self.param_shapes = jax.eval_shape(policy.init, jax.random.key(0))
    self.param_shardings = rules.param_shardings(
      policy.logical_axes,
      self.param_shapes,
      mesh=mesh,
      rules=rules.TRAIN_RULES,
    )
    replicated = rules.replicated(mesh)
    self._state_shardings = TrainState(
      step=replicated,
      params=self.param_shardings,
      opt_state=learner_state.opt_state_shardings(
        self._optimizer,
        self.param_shapes,
        self.param_shardings,
        replicated=replicated,
      ),
    )
    self._rows = rules.rows_sharding(mesh, rules.TRAIN_RULES)
    self._score = jax.jit(self._score_rows)
    self._train = jax.jit(
      self._train_step,
      donate_argnames="state",
      out_shardings=(self._state_shardings, replicated),
    )

  def compiles(self) -> dict[str, int]:
    """How often each program was compiled."""
    return {
      "score": self._score._cache_size(),
      "train_step": self._train._cache_size(),
    }

  def init_params(self, seed: int) -> Params:
    """Fresh parameters, made in their shards."""
    init = jax.jit(self._policy.init, out_shardings=self.param_shardings)
    return init(jax.random.key(seed))

  def init_state(self, params: Params) -> TrainState:
    """A state at step 0, which takes ``params`` over."""
    # Scalars of the optimizer come out of eager code on one device.
    return jax.device_put(
      learner_state.init(params, self._optimizer), self._state_shardings
    )

  def score(
    self, params: Params, batch: ScoreBatch
  ) -> tuple[jax.Array, moments_ops.LogRatioMoments]:
    """Log-probs of the pool under ``params``, without gradient (method 2.1).

    Args:
      params: On the train mesh.
      batch: numpy or device arrays [B, T].

    Returns:
      Log-probs float32 [B, T], and moments [B, T // 2] per segment. Returned
      before the device has finished.
    """
    return self._score(params, jax.device_put(batch, self._rows))

  def step(
    self, state: TrainState, batch: Batch
  ) -> tuple[TrainState, dict[str, tuple[jax.Array, jax.Array]]]:
    """M optimizer steps on a batch; ``state`` is donated.

    Returns:
      The next state, one step on, and metrics as (sum, count) pairs. A
      minibatch without a token, or with a gradient that is not finite, leaves
      the parameters as they were and counts as skipped.
    """
    rows = rules.rows_sharding(self._mesh, rules.TRAIN_RULES, leading=2)
    replicated = rules.replicated(self._mesh)
    shardings = Batch(
      **{
        field.name: rows if getattr(batch, field.name).ndim == 4 else replicated
        for field in dataclasses.fields(Batch)
      }
    )
    return self._train(state, jax.device_put(batch, shardings))

  def _logprobs(
    self, params: Params, batch: Batch | ScoreBatch
  ) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy [B, T] of each token given what precedes it."""
    hidden = self._policy.hidden(
      params,
      batch.tokens,
      batch.positions,
      batch.segment_ids,
      constrain=self._constrain,
    )
    logprobs, entropy = logprob_ops.token_logprob(
      hidden[:, :-1],
      self._policy.unembedding(params).astype(hidden.dtype),
      batch.tokens[:, 1:],
      temperature=self._temperature,
    )
    shift = ((0, 0), (1, 0))  # Position 0 has no prediction and is masked.
    return jnp.pad(logprobs, shift), jnp.pad(entropy, shift)

  def _constrain(self, x: jax.Array) -> jax.Array:
    """Keeps activations [B, T, D] cut along rows, so that weights move."""
    spec = PartitionSpec(rules.TRAIN_RULES["rows"], None, None)
    return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))

  def _score_rows(self, params: Params, batch: ScoreBatch):
    logprobs, _ = self._logprobs(params, batch)
    moments = moments_ops.log_ratio_moments(
      logprobs,
      batch.behavior_logprobs,
      batch.behavior_entropy,
      batch.advantages,
      batch.loss_mask,
      batch.segment_ids,
      num_segments=self._config.row_tokens // 2,
    )
    return logprobs, moments

  def _loss(self, params: Params, batch: Batch):
    """M times the weighted sum of method 2.3 over one microbatch."""
    objective = self._objective
    logprobs, entropy = self._logprobs(params, batch)
    loss, sums = loss_ops.multi_behavior_loss(
      logprobs,
      batch.behavior_logprobs,
      batch.proximal_logprobs,
      batch.advantages,
      batch.token_weights,
      batch.loss_mask,
      batch.behavior_index,
      batch.clip_low,
      batch.clip_high,
      trust_region=objective.trust_region,
      dual_clip=objective.dual_clip,
      max_behavior_weight=objective.max_behavior_weight,
      behavior_weight_mode=objective.behavior_weight_mode,
    )
    entropy_sum = numerics.masked_sum(entropy, batch.loss_mask)
    return self._config.minibatches * loss, (sums, entropy_sum)

  def _minibatch(self, carry: tuple[Params, optax.OptState], batch: Batch):
    """One optimizer step, its gradient summed over microbatches."""
    params, opt_state = carry

    def accumulate(grads, microbatch):
      (loss, sums), new = jax.value_and_grad(self._loss, has_aux=True)(
        params, microbatch
      )
      return jax.tree.map(jnp.add, grads, new), (loss, sums)

    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, (losses, sums) = jax.lax.scan(accumulate, zeros, batch)
    loss = jnp.sum(losses)
    sums, entropy = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
    norm = optax.tree.norm(grads)
    tokens = jnp.sum(sums.tokens)
    usable = (tokens > 0) & jnp.isfinite(norm) & jnp.isfinite(loss)

    def update(_):
      updates, new = self._optimizer.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), new

    carry = jax.lax.cond(usable, update, lambda _: (params, opt_state), None)
    # What was not trained on is not counted, nor may its NaN reach a metric.
    sums, entropy = jax.tree.map(
      lambda x: jnp.where(usable, x, 0.0), (sums, entropy)
    )
    return carry, (loss, norm, usable, entropy, sums)

  def _train_step(self, state: TrainState, batch: Batch):
    microbatches = batch.tokens.shape[:2]

    def spread(table: jax.Array) -> jax.Array:
      """The version table is the same for every microbatch."""
      return jnp.broadcast_to(table, (*microbatches, *table.shape))

    scanned = dataclasses.replace(
      batch,
      clip_low=spread(batch.clip_low),
      clip_high=spread(batch.clip_high),
      versions=spread(batch.versions),
    )
    (params, opt_state), outputs = jax.lax.scan(
      self._minibatch, (state.params, state.opt_state), scanned
    )
    state = TrainState(state.step + 1, params, opt_state)
    return state, _metrics(*outputs)


def _metrics(losses, norms, usable, entropy, sums):
  """(sum, count) pairs from arrays [M] and per-version sums [M, E]."""
  minibatches = jnp.float32(losses.shape[0])
  by_version = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
  total = jax.tree.map(jnp.sum, by_version)
  tokens = total.tokens
  ess = numerics.safe_divide(
    jnp.square(by_version.ratio), by_version.ratio_squared
  )
  used = usable.astype(jnp.float32)
  finite = jnp.where(usable, norms, 0.0)
  return {
    "train/loss": (jnp.sum(jnp.where(usable, losses, 0.0)), minibatches),
    "train/grad_norm": (jnp.sum(finite), jnp.sum(used)),
    "train/skipped": (minibatches - jnp.sum(used), jnp.float32(1)),
    "train/tokens": (tokens, jnp.float32(1)),
    "train/entropy": (jnp.sum(entropy), tokens),
    "train/ratio": (total.ratio, tokens),
    "train/kl": (total.kl, tokens),
    "train/clipped_low": (total.clipped_low, tokens),
    "train/clipped_high": (total.clipped_high, tokens),
    "train/clipped_dual": (total.clipped_dual, tokens),
    "train/weight_capped": (total.weight_capped, tokens),
    "train/ess_fraction": (jnp.sum(ess), tokens),
  }
