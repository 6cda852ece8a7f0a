"""The jitted programs of the learner: scoring pass and train step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from darl_jax import numerics, types
from darl_jax.config import LearnerConfig, ObjectiveConfig
from darl_jax.kernels.log_ratio_moments import ops as moments_ops
from darl_jax.kernels.multi_behavior_loss import ops as loss_ops
from darl_jax.kernels.token_logprob import ops as logprob_ops
from darl_jax.learner import state as learner_state
from darl_jax.models import lora
from darl_jax.models.transformer import Policy
from darl_jax.objectives import ewma, policy_losses
from darl_jax.sharding import rules, transfer
from darl_jax.types import (
  Batch,
  Params,
  PolicySnapshot,
  ScoreBatch,
  TrainState,
)

# LLVM's optimiser spends seconds on the random numbers of a model's parameters,
# whose program then runs once, for a fraction of that, and no faster.
_RUNS_ONCE = {"xla_backend_optimization_level": 1}


class Learner:
  """What the train mesh runs; each program compiles once.

  ``step`` donates the state that it is given: copy what must outlive it. With
  adapters (``model.lora_rank``) a state holds them alone, and the learner the
  frozen parameters.

  Attributes:
    schedule: Learning rate by optimizer step.
    param_shapes: Of all parameters.
    param_shardings: Of all parameters.
    trained_shardings: Of those that are trained and published.
    frozen: The others, once there is a state; empty without adapters.
  """

  def __init__(
    self,
    policy: Policy,
    config: LearnerConfig,
    objective: ObjectiveConfig,
    *,
    mesh: Mesh,
    temperature: float,
    truncated: bool,
    num_steps: int,
    publish_dtype: jnp.dtype,
  ):
    """Compiles nothing yet.

    Args:
      policy: The model.
      config: Optimisation and shapes.
      objective: The loss.
      mesh: The train mesh.
      temperature: Of the sampled distribution (method 0).
      truncated: Whether sampling truncates: batches then carry the support of
        each token, and its log-prob and entropy are over that.
      num_steps: Learner steps of the run, for the schedule.
      publish_dtype: Of the snapshots: what the sampler computes with.
    """
    self._policy = policy
    self._config = config
    self._objective = objective
    self._mesh = mesh
    self._temperature = temperature
    self._truncated = truncated
    self.schedule = learner_state.schedule(config, num_steps=num_steps)
    self._optimizer = learner_state.adamw(config, self.schedule)
    self.param_shapes = jax.eval_shape(policy.init, jax.random.key(0))
    self.param_shardings = rules.param_shardings(
      policy.logical_axes,
      self.param_shapes,
      mesh=mesh,
      rules=rules.TRAIN_RULES,
    )
    self.frozen: Params = {}
    self.trained_shardings, _ = lora.split(self.param_shardings)
    replicated = rules.replicated(mesh)
    self._state_shardings = TrainState(
      step=replicated,
      params=self.trained_shardings,
      opt_state=learner_state.opt_state_shardings(
        self._optimizer,
        lora.split(self.param_shapes)[0],
        self.trained_shardings,
        replicated=replicated,
      ),
      proximal_average=(
        ewma.ProximalAverage(self.trained_shardings, replicated)
        if objective.averages_policies
        else None
      ),
      reference=self.trained_shardings if objective.keeps_reference else None,
    )
    self._rows = rules.rows_sharding(mesh, rules.TRAIN_RULES)
    self._partition = rules.partition(mesh, rules.TRAIN_RULES)
    self._init = jax.jit(
      lambda key: lora.split(policy.init(key))[0],
      out_shardings=self.trained_shardings,
      compiler_options=(
        _RUNS_ONCE if self._partition.platform == "cpu" else None
      ),
    )
    self._cast = jax.jit(
      lambda params: jax.tree.map(
        lambda leaf: leaf.astype(publish_dtype), params
      ),
      out_shardings=self.trained_shardings,
    )
    self._score = jax.jit(self._score_rows, out_shardings=self._rows)
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

  def init_trained(self, seed: int) -> Params:
    """Fresh parameters of those that are trained, made in their shards."""
    return self._init(jax.random.key(seed))

  def init_state(self, params: Params) -> TrainState:
    """A state at step 0, which takes all ``params`` over."""
    trained, frozen = lora.split(params)
    self.frozen = self._compact(frozen)
    # Scalars come out of eager code on one device.
    return jax.device_put(self._fresh_state(trained), self._state_shardings)

  def _fresh_state(self, trained: Params) -> TrainState:
    state = learner_state.init(trained, self._optimizer)
    if self._objective.averages_policies:
      average = ewma.ProximalAverage.start(trained)
      state = dataclasses.replace(state, proximal_average=average)
    if self._objective.keeps_reference:  # A copy: the step donates both.
      reference = jax.tree.map(jnp.copy, trained)
      state = dataclasses.replace(state, reference=reference)
    return state

  def _compact(self, frozen: Params) -> Params:
    dtype = jnp.dtype(self._policy.config.compute_dtype)
    return lora.compact(frozen, dtype=dtype)

  def abstract_state(self) -> TrainState:
    """Shapes and shardings of a state."""
    trained, _ = lora.split(self.param_shapes)
    return _abstract(
      jax.eval_shape(self._fresh_state, trained), self._state_shardings
    )

  def snapshot(self, params: Params, *, version: int) -> PolicySnapshot:
    """The trained parameters on the host, as the sampler will have them.

    They are cast on the mesh, so that half the bytes cross to the host where
    the sampler computes in bfloat16.
    """
    return transfer.to_host(self._cast(params), version=version)

  def programs(self) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """What the learner runs again and again, to be compiled and not run.

    Returns:
      By name, a function that traces it for the shapes of the config.
    """
    trained, frozen = lora.split(self.param_shapes)
    _, frozen_shardings = lora.split(self.param_shardings)
    params = _abstract(trained, self.trained_shardings)
    compacted = jax.eval_shape(self._compact, frozen)
    frozen = _abstract(compacted, frozen_shardings)
    state = self.abstract_state()
    config = self._config
    microbatches = config.minibatches * config.microbatches
    width = -(-self._policy.vocab_size // 8) if self._truncated else None
    batch = Batch.abstract(
      (
        config.minibatches,
        config.microbatches,
        config.rows // microbatches,
        config.row_tokens,
      ),
      max_versions=self._objective.max_versions,
      behavior_entropy=self._objective.loss == "estr",
      support_width=width,
    )
    scored = ScoreBatch.abstract(
      (config.score_rows, config.row_tokens), support_width=width
    )
    return {
      "score": lambda: self._score.lower(
        params,
        frozen,
        _abstract(scored, jax.tree.map(lambda _: self._rows, scored)),
      ),
      "train_step": lambda: self._train.lower(
        state, frozen, _abstract(batch, self._batch_shardings(batch))
      ),
      "publish": lambda: self._cast.lower(params),
    }

  def score(
    self, params: Params, batch: ScoreBatch
  ) -> tuple[jax.Array, moments_ops.LogRatioMoments]:
    """Log-probs of the pool under ``params``, without gradient (method 2.1).

    Args:
      params: The trained ones, on the train mesh.
      batch: numpy or device arrays [B, T].

    Returns:
      Log-probs float32 [B, T], and moments [B, ``types.row_segments``].
      Returned before the device has finished.
    """
    return self._score(params, self.frozen, jax.device_put(batch, self._rows))

  def step(
    self, state: TrainState, batch: Batch
  ) -> tuple[TrainState, dict[str, tuple[jax.Array, jax.Array]]]:
    """M optimizer steps on a batch; ``state`` is donated.

    Returns:
      The next state, one step on, and metrics as (sum, count) pairs. A
      minibatch without a token, or with a gradient that is not finite, leaves
      the parameters as they were and counts as skipped, of which those for
      what is not finite are counted again.
    """
    shardings = self._batch_shardings(batch)
    return self._train(state, self.frozen, jax.device_put(batch, shardings))

  def _batch_shardings(self, batch: Batch) -> Batch:
    rows = rules.rows_sharding(self._mesh, rules.TRAIN_RULES, leading=2)
    replicated = rules.replicated(self._mesh)
    return jax.tree.map(
      lambda leaf: rows if leaf.ndim >= 4 else replicated, batch
    )

  def _logprobs(
    self, trained: Params, frozen: Params, batch: Batch | ScoreBatch
  ) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy [B, T] of each token given what precedes it.

    Raises:
      ValueError: The batch has a support mask and sampling does not truncate,
        or the other way round.
    """
    support = batch.support_mask
    if (support is not None) != self._truncated:
      raise ValueError(
        f"truncated = {self._truncated}, and the batch has "
        f"{'no' if support is None else 'a'} support mask."
      )
    params = lora.join(trained, frozen)
    hidden = self._policy.hidden(
      params,
      batch.tokens,
      batch.positions,
      batch.segment_ids,
      partition=self._partition,
    )
    # Each position predicts the next token, and the last one nothing: it is
    # given some target, so that all shapes keep their round sizes. Position 0
    # has no prediction and is masked. A token's support is that of its draw.
    predicted = logprob_ops.token_logprob(
      hidden,
      self._policy.unembedding(params),
      jnp.roll(batch.tokens, -1, axis=1),
      temperature=self._temperature,
      support_mask=None if support is None else jnp.roll(support, -1, axis=1),
      partition=self._partition,
    )
    return jax.tree.map(
      lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0))), predicted
    )

  def _score_rows(self, params: Params, frozen: Params, batch: ScoreBatch):
    logprobs, _ = self._logprobs(params, frozen, batch)
    moments = moments_ops.log_ratio_moments(
      logprobs,
      batch.behavior_logprobs,
      batch.behavior_entropy,
      batch.advantages,
      batch.loss_mask,
      batch.segment_ids,
      num_segments=types.row_segments(self._config.row_tokens),
      partition=self._partition,
    )
    return logprobs, moments

  def _loss(
    self,
    params: Params,
    frozen: Params,
    batch: Batch,
    keep: jax.Array | None,
  ):
    """M times the weighted sum of method 2.3 over one microbatch.

    Args:
      params: The trained ones.
      frozen: The others.
      batch: [B, T].
      keep: bool [B, T], what a mask over the optimizer batch has left of it;
        None where there is none.
    """
    objective = self._objective
    logprobs, entropy = self._logprobs(params, frozen, batch)
    loss, sums, own = self._policy_loss(logprobs, batch, keep)
    if objective.kl_coefficient:
      penalty, penalty_sums = self._kl_penalty(logprobs, batch)
      loss += objective.kl_coefficient * penalty
      own = own | penalty_sums
    entropy_sum = numerics.masked_sum(entropy, batch.loss_mask)
    return self._config.minibatches * loss, (
      (sums, entropy_sum, own),
      self._trajectories(logprobs, batch),
    )

  def _kl_penalty(
    self, logprobs: jax.Array, batch: Batch
  ) -> tuple[jax.Array, policy_losses.Sums]:
    """By all tokens' weights: one that a mask rejects is held near, too."""
    rest = batch.token_weights, batch.loss_mask
    estimator = self._objective.kl_estimator
    if self._objective.keeps_reference:
      return policy_losses.reference_kl_penalty(
        logprobs, batch.reference_logprobs, *rest, estimator=estimator
      )
    penalty = policy_losses.kl_penalty(
      logprobs, batch.behavior_logprobs, *rest, estimator=estimator
    )
    return penalty, {}

  def _trajectories(
    self, logprobs: jax.Array, batch: Batch
  ) -> tuple[jax.Array, jax.Array] | None:
    """Log-ratios of a microbatch's trajectories, and which there are.

    Of the policy before the optimizer step, with which its gradient is taken.
    None where nothing scales the step.
    """
    if not self._objective.step_ess_target:
      return None
    num_segments = types.row_segments(self._config.row_tokens)
    ell = policy_losses.trajectory_log_ratio(
      jax.lax.stop_gradient(logprobs),
      batch.behavior_logprobs,
      batch.loss_mask,
      batch.segment_ids,
      num_segments=num_segments,
    )
    present = policy_losses.trajectories_present(
      batch.loss_mask, batch.segment_ids, num_segments=num_segments
    )
    return ell, present

  def _policy_loss(
    self, logprobs: jax.Array, batch: Batch, keep: jax.Array | None
  ) -> tuple[jax.Array, loss_ops.BehaviorSums, policy_losses.Sums]:
    """The loss that the config names, and the metrics of its own."""
    objective = self._objective
    if objective.loss == "estr":
      keep = policy_losses.estr_mask(
        logprobs,
        batch.behavior_logprobs,
        batch.behavior_entropy,
        batch.loss_mask,
        threshold=objective.estr_threshold,
        epsilon=objective.estr_epsilon,
      )
    if objective.loss in ("clipped", "estr", "m2po"):
      return self._masked_loss(logprobs, batch, keep)
    of_tokens = (
      batch.behavior_logprobs,
      batch.advantages,
      batch.token_weights,
      batch.loss_mask,
    )
    num_segments = types.row_segments(self._config.row_tokens)
    if objective.loss == "gspo":
      loss, own = policy_losses.gspo(
        logprobs,
        *of_tokens,
        batch.segment_ids,
        clip_low=objective.gspo_clip_low,
        clip_high=objective.gspo_clip_high,
        dual_clip=objective.dual_clip,
        num_segments=num_segments,
      )
    elif objective.loss == "cispo":
      loss, own = policy_losses.cispo(
        logprobs,
        *of_tokens,
        batch.behavior_index,
        batch.clip_low,
        batch.clip_high,
      )
    else:
      loss, own = policy_losses.topr(
        logprobs, *of_tokens, batch.segment_ids, num_segments=num_segments
      )
    return loss, self._ratio_sums(logprobs, batch), own

  def _masked_loss(
    self, logprobs: jax.Array, batch: Batch, keep: jax.Array | None
  ) -> tuple[jax.Array, loss_ops.BehaviorSums, policy_losses.Sums]:
    """The clipped loss of what ``keep``, or a mask of prox/mu, leaves of it."""
    if keep is None:
      loss, sums = self._clipped_loss(logprobs, batch)
      if self._objective.behavior_weight_mode == "truncate":
        return loss, sums, {}
      return loss, sums, {"rejected": jnp.sum(sums.weight_capped)}
    # A weight that is not finite stays, and shows.
    weights = batch.token_weights
    weights = jnp.where(keep | ~jnp.isfinite(weights), weights, 0.0)
    batch = dataclasses.replace(batch, token_weights=weights)
    rejected = numerics.count(batch.loss_mask & ~keep)
    return *self._clipped_loss(logprobs, batch), {"rejected": rejected}

  def _clipped_loss(
    self, logprobs: jax.Array, batch: Batch
  ) -> tuple[jax.Array, loss_ops.BehaviorSums]:
    objective = self._objective
    if objective.balances:
      return self._balanced_loss(logprobs, batch)
    return loss_ops.multi_behavior_loss(
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
      partition=self._partition,
    )

  def _balanced_loss(
    self, logprobs: jax.Array, batch: Batch
  ) -> tuple[jax.Array, loss_ops.BehaviorSums]:
    """Of pi/prox alone: the weights have what stands in for prox/mu."""
    loss, sums = loss_ops.multi_behavior_loss(
      logprobs,
      batch.proximal_logprobs,
      batch.proximal_logprobs,
      batch.advantages,
      batch.token_weights,
      batch.loss_mask,
      batch.behavior_index,
      batch.clip_low,
      batch.clip_high,
      trust_region="behavior",
      dual_clip=self._objective.dual_clip,
      max_behavior_weight=float("inf"),
      behavior_weight_mode="truncate",
      partition=self._partition,
    )
    return loss, dataclasses.replace(
      self._ratio_sums(logprobs, batch),
      clipped_low=sums.clipped_low,
      clipped_high=sums.clipped_high,
      clipped_dual=sums.clipped_dual,
    )

  def _ratio_sums(
    self, logprobs: jax.Array, batch: Batch
  ) -> loss_ops.BehaviorSums:
    """What the kernel says of the ratios, with no clip that it could count."""
    _, sums = loss_ops.multi_behavior_loss(
      jax.lax.stop_gradient(logprobs),
      batch.behavior_logprobs,
      batch.proximal_logprobs,
      batch.advantages,
      batch.token_weights,
      batch.loss_mask,
      batch.behavior_index,
      jnp.ones_like(batch.clip_low),
      jnp.full_like(batch.clip_high, jnp.inf),
      trust_region="behavior",
      dual_clip=float("inf"),
      max_behavior_weight=float("inf"),
      behavior_weight_mode="truncate",
      partition=self._partition,
    )
    return sums

  def _minibatch(
    self, frozen: Params, carry: tuple[Params, optax.OptState], batch: Batch
  ):
    """One optimizer step, its gradient summed over microbatches."""
    params, opt_state = carry
    keep = self._mask_of_optimizer_batch(params, frozen, batch)

    def accumulate(grads, microbatch):
      (loss, aux), new = jax.value_and_grad(self._loss, has_aux=True)(
        params, frozen, *microbatch
      )
      # Cut as the parameters are, at once: each device then receives the sum
      # of its own part, and no device ever holds a whole gradient.
      new = jax.lax.with_sharding_constraint(new, self.trained_shardings)
      return jax.tree.map(jnp.add, grads, new), (loss, *aux)

    zeros = jax.lax.with_sharding_constraint(
      jax.tree.map(jnp.zeros_like, params), self.trained_shardings
    )
    grads, (losses, sums, trajectories) = jax.lax.scan(
      accumulate, zeros, (batch, keep)
    )
    loss = jnp.sum(losses)
    sums, entropy, own = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
    norm = optax.tree.norm(grads)
    tokens = jnp.sum(sums.tokens)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    usable = (tokens > 0) & finite
    scaling = self._step_scale(trajectories)

    def update(_):
      updates, new = self._optimizer.update(grads, opt_state, params)
      if scaling:  # After Adam, which would undo it.
        updates = optax.tree.scale(scaling["step_scale"], updates)
      return optax.apply_updates(params, updates), new

    carry = jax.lax.cond(usable, update, lambda _: (params, opt_state), None)
    # What was not trained on is not counted, nor may its NaN reach a metric.
    sums, entropy, own, scaling = jax.tree.map(
      lambda x: jnp.where(usable, x, 0.0), (sums, entropy, own, scaling)
    )
    return carry, (loss, norm, usable, finite, entropy, sums, own, scaling)

  def _mask_of_optimizer_batch(
    self, params: Params, frozen: Params, batch: Batch
  ) -> jax.Array | None:
    """M2PO's, bool [microbatches, B, T], by the policy before the step.

    The scoring pass was under that policy where there is one minibatch; with
    more of them each costs a forward pass. None for any other loss.
    """
    if self._objective.loss != "m2po":
      return None
    logprobs = batch.proximal_logprobs
    if self._config.minibatches > 1:
      logprobs = self._logprobs_of_each(params, frozen, batch)
    return policy_losses.m2po_mask(
      logprobs,
      batch.behavior_logprobs,
      batch.advantages,
      batch.loss_mask,
      max_second_moment=self._objective.m2po_max_second_moment,
    )

  def _step_scale(
    self, trajectories: tuple[jax.Array, jax.Array] | None
  ) -> dict[str, jax.Array]:
    """VCPO's factor of the optimizer's update, and why; {} for none."""
    if trajectories is None:
      return {}
    scale, ess_fraction = policy_losses.vcpo_scale(
      *trajectories, base_ess_fraction=self._objective.step_ess_target
    )
    return {"step_scale": scale, "trajectory_ess_fraction": ess_fraction}

  def _train_step(self, state: TrainState, frozen: Params, batch: Batch):
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
    average = state.proximal_average
    if average is not None:
      average = ewma.update(
        average, state.params, window=self._objective.ewma_window
      )
      proximal = self._logprobs_of_all(average.params, frozen, scanned)
      scanned = dataclasses.replace(scanned, proximal_logprobs=proximal)
    if state.reference is not None:
      logprobs = self._logprobs_of_all(state.reference, frozen, scanned)
      scanned = dataclasses.replace(scanned, reference_logprobs=logprobs)
    (params, opt_state), outputs = jax.lax.scan(
      functools.partial(self._minibatch, frozen),
      (state.params, state.opt_state),
      scanned,
    )
    metrics = _metrics(*outputs)
    if average is not None:
      passed, tokens = _passed(metrics)
      metrics["train/proximal_passed"] = passed, tokens
      average = ewma.reset_if_strayed(
        average,
        passed_tokens=passed,
        tokens=tokens,
        min_passed_fraction=self._objective.ewma_min_passed_fraction,
      )
      reset = (average.weight == 0).astype(jnp.float32)
      metrics["train/proximal_resets"] = reset, jnp.float32(1)
    state = TrainState(
      state.step + 1, params, opt_state, average, state.reference
    )
    return state, metrics

  def _logprobs_of_all(
    self, params: Params, frozen: Params, batch: Batch
  ) -> jax.Array:
    """[minibatches, microbatches, B, T], one microbatch at a time."""
    return jax.lax.map(
      functools.partial(self._logprobs_of_each, params, frozen), batch
    )

  def _logprobs_of_each(
    self, params: Params, frozen: Params, batch: Batch
  ) -> jax.Array:
    """[microbatches, B, T], one microbatch at a time."""
    return jax.lax.map(
      lambda microbatch: self._logprobs(params, frozen, microbatch)[0], batch
    )


def _passed(
  metrics: dict[str, tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
  """Tokens that passed every mask and clip, and all tokens.

  No token counts as rejected and as clipped.
  """
  tokens, _ = metrics["train/tokens"]
  stopped = ("rejected", "clipped_low", "clipped_high", "clipped_dual")
  held = sum(
    metrics[f"train/{name}"][0]
    for name in stopped
    if f"train/{name}" in metrics
  )
  return tokens - held, tokens


def _abstract(shapes: Any, shardings: Any) -> Any:
  """Shapes that know where they lie, to trace a program with."""
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    shapes,
    shardings,
  )


def _metrics(losses, norms, usable, finite, entropy, sums, own, scaling):
  """(sum, count) pairs from arrays [M] and per-version sums [M, E].

  A loss's own metrics, of the same name, come in place of the kernel's.
  """
  minibatches = jnp.float32(losses.shape[0])
  by_version = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
  total = jax.tree.map(jnp.sum, by_version)
  tokens = total.tokens
  ess = numerics.safe_divide(
    jnp.square(by_version.ratio), by_version.ratio_squared
  )
  used = usable.astype(jnp.float32)
  norm = jnp.sum(jnp.where(usable, norms, 0.0))
  non_finite = jnp.sum(jnp.logical_not(finite).astype(jnp.float32))
  metrics = {
    "train/loss": (jnp.sum(jnp.where(usable, losses, 0.0)), minibatches),
    "train/grad_norm": (norm, jnp.sum(used)),
    "train/skipped": (minibatches - jnp.sum(used), jnp.float32(1)),
    "train/non_finite": (non_finite, jnp.float32(1)),
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
  metrics |= {f"train/{name}": (jnp.sum(own[name]), tokens) for name in own}
  return metrics | {
    f"train/{name}": (jnp.sum(values), jnp.sum(used))
    for name, values in scaling.items()
  }
