"""KL estimators and the effective sample size, from log-ratios.

With samples from mu and r = pi/mu, each of k1, k2, k3 is a per-token estimate
of KL(mu || pi), in nats. Source: Schulman, "Approximating KL divergence"
(2020). They return one value a token, 0 where masked: the caller sums and
counts.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np

from darl_jax import numerics

_Numbers = typing.TypeVar("_Numbers", float, np.ndarray, jax.Array)


def k1(
  logprobs: jax.Array, behavior_logprobs: jax.Array, loss_mask: jax.Array
) -> jax.Array:
  """-log r: unbiased, of either sign, the noisiest.

  Args:
    logprobs: [...], nats, of pi.
    behavior_logprobs: [...], nats, of mu, which sampled the tokens.
    loss_mask: bool [...].

  Returns:
    float32 [...], nats; ell is clamped to [-20, 20].
  """
  return -numerics.log_ratio(logprobs, behavior_logprobs, loss_mask)


def k2(
  logprobs: jax.Array, behavior_logprobs: jax.Array, loss_mask: jax.Array
) -> jax.Array:
  """(log r)^2 / 2: biased, never negative; arguments as in ``k1``."""
  ell = numerics.log_ratio(logprobs, behavior_logprobs, loss_mask)
  return jnp.square(ell) / 2


def k3(
  logprobs: jax.Array, behavior_logprobs: jax.Array, loss_mask: jax.Array
) -> jax.Array:
  """r - 1 - log r: unbiased, never negative; arguments as in ``k1``."""
  ell = numerics.log_ratio(logprobs, behavior_logprobs, loss_mask)
  return jnp.expm1(ell) - ell


def effective_sample_size(
  sum_ratio: _Numbers, sum_ratio_squared: _Numbers
) -> _Numbers:
  """(sum r)^2 / sum r^2: how many equally weighted samples these are worth.

  Between 1 and the number of samples, and equal to it if all ratios are; 0 for
  no sample. Works on numbers and on numpy and JAX arrays alike.

  Args:
    sum_ratio: [...], sum of pi/mu.
    sum_ratio_squared: [...], sum of (pi/mu)^2.
  """
  empty = sum_ratio_squared == 0
  return sum_ratio * (sum_ratio / (sum_ratio_squared + empty))
