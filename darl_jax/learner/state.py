"""The optimizer and the state that a learner step updates."""

import jax
import jax.numpy as jnp
import optax

from darl_jax.config import LearnerConfig
from darl_jax.types import Params, TrainState


def schedule(config: LearnerConfig, *, num_steps: int) -> optax.Schedule:
  """Learning rate by optimizer step.

  Linear up over ``warmup_steps``, then as ``config.schedule`` says, to reach
  ``final_learning_rate`` at the run's last optimizer step.

  Args:
    config: Rates and shape.
    num_steps: Learner steps of the run, each of ``minibatches`` updates.
  """
  last = max(num_steps * config.minibatches - 1, 1)
  decay = max(last - config.warmup_steps, 1)
  peak, final = config.learning_rate, config.final_learning_rate
  if config.schedule == "constant":
    after = optax.constant_schedule(peak)
  elif config.schedule == "linear":
    after = optax.linear_schedule(peak, final, decay)
  else:
    after = optax.cosine_decay_schedule(
      peak, decay, alpha=final / peak if peak else 0.0
    )
  if not config.warmup_steps:
    return after
  # The first update is already above 0, so that no step is spent on nothing.
  warmup = optax.linear_schedule(
    peak / config.warmup_steps, peak, config.warmup_steps - 1
  )
  return optax.join_schedules([warmup, after], [config.warmup_steps])


def adamw(
  config: LearnerConfig, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
  """AdamW after clipping by the global norm; matrices alone decay."""

  def decays(params: Params) -> Params:
    return jax.tree_util.tree_map_with_path(
      lambda path, _: not path[-1].key.endswith(("norm", "bias")), params
    )

  return optax.chain(
    optax.clip_by_global_norm(config.max_grad_norm),
    optax.adamw(
      learning_rate,
      b1=config.b1,
      b2=config.b2,
      eps=config.eps,
      weight_decay=config.weight_decay,
      mask=decays,
    ),
  )


def opt_state_shardings(
  optimizer: optax.GradientTransformation,
  param_shapes: Params,
  param_shardings: Params,
  *,
  replicated: jax.sharding.Sharding,
) -> optax.OptState:
  """For each array of the optimizer's state, where it belongs.

  Moments lie where, and are cut as, their parameters are; all else is
  replicated. A program whose outputs are left to the compiler may return them
  cut another way, which compiles the next call again.
  """
  return optax.tree_map_params(
    optimizer,
    lambda _, sharding: sharding,
    jax.eval_shape(optimizer.init, param_shapes),
    param_shardings,
    transform_non_params=lambda _: replicated,
  )


def init(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
  """A state at step 0 around ``params``, which it takes over.

  The optimizer's moments are created where, and cut as, the parameters are.
  """
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
  )
