"""Log-prob and entropy of the sampled token: the definition."""

import jax
import jax.numpy as jnp


def token_logprob(
  hidden: jax.Array,
  unembedding: jax.Array,
  targets: jax.Array,
  *,
  temperature: float,
) -> tuple[jax.Array, jax.Array]:
  """Log-prob of each target, and entropy, under the tempered policy.

    z      = hidden unembedding^T / temperature
    logp   = z[target] - logsumexp(z)
    H      = logsumexp(z) - sum_v softmax(z)_v z_v

  Both are shift-invariant in z, so z is shifted by its largest entry first:
  the sums then lose no digits however large the logits are. Source: the
  definition of a softmax policy; temperature as in method 0 (the log-prob is
  that of the *sampled* distribution).

  Gradients flow through ``logp`` into ``hidden`` and ``unembedding``; the
  entropy carries none.

  Args:
    hidden: [..., D], the last layer's output.
    unembedding: [V, D]; the product is accumulated and kept in float32
      whatever the dtype of the operands.
    targets: int32 [...], in [0, V).
    temperature: Divides the logits.

  Returns:
    logprobs: float32 [...], nats.
    entropy: float32 [...], nats, never negative.
  """
  logits = jnp.einsum(
    "...d,vd->...v", hidden, unembedding, preferred_element_type=jnp.float32
  )
  logits = logits / temperature
  logits -= jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  exponentials = jnp.exp(logits)
  partition = jnp.sum(exponentials, axis=-1)
  log_partition = jnp.log(partition)
  # A comparison instead of a gather: it fuses with the sums above, its
  # transpose is a select and not a scatter, and it splits over a vocabulary
  # that is sharded.
  vocabulary = jax.lax.broadcasted_iota(
    jnp.int32, logits.shape, logits.ndim - 1
  )
  chosen = jnp.sum(
    jnp.where(vocabulary == targets[..., None], logits, 0.0), axis=-1
  )
  mean_logit = jnp.sum(exponentials * logits, axis=-1) / partition
  # Rounding can take the entropy of a certain token a hair below 0.
  entropy = jnp.maximum(log_partition - mean_logit, 0.0)
  return chosen - log_partition, jax.lax.stop_gradient(entropy)
