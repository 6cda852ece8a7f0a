"""A proximal policy that is a moving average of the policies so far.

  theta_prox = sum_k b^(t-k) theta_k / sum_k b^(t-k),  b = W / (W + 2)

with W the staleness window: its mean age is W / 2, that of samples spread over
the window. Source: arXiv:2605.12070 (method 6).
"""

import dataclasses

import jax
import jax.numpy as jnp

from darl_jax.types import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProximalAverage:
  """The average since the last reset.

  Attributes:
    params: theta_prox; float32, whatever the policy's are.
    weight: float32 [], Z, the sum of the weights b^(t-k); 0 before the first
      update, and then at least 1.
  """

  params: Params
  weight: jax.Array

  @classmethod
  def start(cls, params: Params) -> "ProximalAverage":
    """The average of no policy yet, shaped and cut as ``params`` are."""
    zeros = jax.tree.map(
      lambda leaf: jnp.zeros_like(leaf, dtype=jnp.float32), params
    )
    return cls(zeros, jnp.zeros((), jnp.float32))


def update(
  average: ProximalAverage, params: Params, *, window: int
) -> ProximalAverage:
  """Takes in the policy of this step; once per learner step, before it.

    Z <- b Z + 1,  theta_prox <- theta_prox + (theta - theta_prox) / Z

  The first one, and the one after a reset, gives theta itself.

  Args:
    average: Until the previous step.
    params: theta, at the start of this step.
    window: W, versions; >= 0. With 0 the average is the current policy.

  Raises:
    ValueError: The window is negative.
  """
  if window < 0:
    raise ValueError(f"window = {window} must be at least 0.")
  weight = average.weight * (window / (window + 2)) + 1.0

  def mean(old: jax.Array, new: jax.Array) -> jax.Array:
    new = new.astype(jnp.float32)
    # Exactly `new` where Z is 1, which old + (new - old) need not be.
    return jnp.where(weight == 1.0, new, old + (new - old) / weight)

  return ProximalAverage(jax.tree.map(mean, average.params, params), weight)


def reset_if_strayed(
  average: ProximalAverage,
  *,
  passed_tokens: jax.Array,
  tokens: jax.Array,
  min_passed_fraction: float,
) -> ProximalAverage:
  """Z <- 0 where too few tokens got through: the next update starts anew.

  Args:
    average: That of the step.
    passed_tokens: [], masked-in tokens of the step that passed both the mask of
      prox/mu and the clip of pi/prox.
    tokens: [], all masked-in tokens of the step; with none nothing is reset.
    min_passed_fraction: In [0, 1]; 0.9 as published.
  """
  strayed = passed_tokens < min_passed_fraction * tokens
  weight = jnp.where(strayed, 0.0, average.weight)
  return dataclasses.replace(average, weight=weight)
