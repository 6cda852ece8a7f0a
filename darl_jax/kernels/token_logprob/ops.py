"""Log-prob and entropy of the sampled token: checks and dispatch."""

import chex
import jax
import jax.numpy as jnp

from darl_jax.kernels.token_logprob import ref


def token_logprob(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  *,
  temperature: float,
) -> tuple[jax.Array, jax.Array]:
  """Log-prob of each target, and entropy; see ``ref.token_logprob``.

  Args:
    hidden: float [..., D].
    unembedding: float [V, D].
    targets: int [...], in [0, V).
    temperature: Divides the logits; above 0.

  Returns:
    (logprobs, entropy), each float32 [...], nats. The entropy carries no
    gradient.

  Raises:
    AssertionError: Shapes or dtypes do not fit.
    ValueError: The temperature is not above 0.
  """
  if not temperature > 0:
    raise ValueError(f"temperature = {temperature} must be above 0.")
  chex.assert_rank(unembedding, 2)
  chex.assert_shape(targets, hidden.shape[:-1])
  chex.assert_axis_dimension(unembedding, 1, hidden.shape[-1])
  chex.assert_type([hidden, unembedding], jnp.floating)
  chex.assert_type(targets, jnp.integer)
  return ref.token_logprob(
    hidden, unembedding, targets, temperature=temperature
  )
