"""Keys and values of the tokens decoded so far."""

import dataclasses

import jax
import jax.numpy as jnp

from darl_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """A dense cache whose rows advance together.

  Prompts are left-padded, so that the token sampled next has the same slot in
  every row.

  Attributes:
    keys: [layers, B, S, M, H], rotated.
    values: [layers, B, S, M, H].
    first: int32 [B], the first slot of each row that is not padding.
    length: int32 [], slots filled.
  """

  keys: jax.Array
  values: jax.Array
  first: jax.Array
  length: jax.Array

  def mask(self, num_queries: int) -> jax.Array:
    """bool [B, T, S]: which slots the next ``num_queries`` tokens may read."""
    slots = jnp.arange(self.keys.shape[2])
    queries = self.length + jnp.arange(num_queries)
    causal = slots[None, :] <= queries[:, None]
    # A padding query reads itself alone, so that its softmax is not empty.
    real = slots[None, :] >= self.first[:, None]
    own = slots[None, :] == queries[:, None]
    return (causal[None] & real[:, None, :]) | own[None]


def empty(
  config: ModelConfig, *, first: jax.Array, slots: int, dtype: jnp.dtype
) -> KVCache:
  """A cache of ``slots`` slots for rows whose padding ends at ``first`` [B]."""
  shape = (
    config.num_layers,
    first.shape[0],
    slots,
    config.num_kv_heads,
    config.head_dim,
  )
  return KVCache(
    keys=jnp.zeros(shape, dtype),
    values=jnp.zeros(shape, dtype),
    first=first,
    length=jnp.zeros((), jnp.int32),
  )


def repeat(cache: KVCache, times: int) -> KVCache:
  """Each row ``times`` times in a row: the samples of one prompt."""
  return KVCache(
    keys=jnp.repeat(cache.keys, times, axis=1),
    values=jnp.repeat(cache.values, times, axis=1),
    first=jnp.repeat(cache.first, times, axis=0),
    length=cache.length,
  )
