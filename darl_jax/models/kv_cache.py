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
    keys: [layers, B, M, S, H], rotated. What attention reads is contiguous.
    values: [layers, B, M, S, H].
    first: int32 [B], the first slot of each row that is not padding.
    length: int32 [], slots filled.
  """

  keys: jax.Array
  values: jax.Array
  first: jax.Array
  length: jax.Array

  def mask(self) -> jax.Array:
    """bool [B, S]: which slots hold a token that is not padding."""
    slots = jnp.arange(self.keys.shape[3])[None, :]
    return (slots < self.length) & (slots >= self.first[:, None])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tail:
  """A cache that is only read, and the tokens that come after it.

  One dispatch appends to the tail alone and merges it at the end. Were each
  token written to the cache itself, the compiler for TPUs would lay the cache
  out for that one slot inside the decoding loop, copy all of it on the way in
  and out, and each layer's part again to read it.

  Attributes:
    cache: Of every token before.
    keys: [layers, B, M, C, H], rotated.
    values: [layers, B, M, C, H].
    length: int32 [], slots of the tail filled.
  """

  cache: KVCache
  keys: jax.Array
  values: jax.Array
  length: jax.Array

  def mask(self, num_queries: int) -> jax.Array:
    """bool [B, T, C]: which of the tail the next T tokens may read.

    A query that is padding reads nothing but itself, so that its softmax is not
    empty; nothing that is not padding reads it.
    """
    slots = jnp.arange(self.keys.shape[3])
    queries = self.length + jnp.arange(num_queries)
    causal = slots[None, :] <= queries[:, None]
    own = slots[None, :] == queries[:, None]
    real = self.cache.length + slots[None, :] >= self.cache.first[:, None]
    return (causal[None] & real[:, None, :]) | own[None]

  def write(
    self, layer: jax.Array, keys: jax.Array, values: jax.Array
  ) -> "Tail":
    """One layer's keys and values [B, T, M, H], from slot ``length`` on."""

    def put(whole: jax.Array, new: jax.Array) -> jax.Array:
      start = (layer, 0, 0, self.length, 0)
      heads_first = jnp.swapaxes(new, 1, 2).astype(whole.dtype)
      return jax.lax.dynamic_update_slice(whole, heads_first[None], start)

    return dataclasses.replace(
      self, keys=put(self.keys, keys), values=put(self.values, values)
    )

  def merged(self) -> KVCache:
    """The cache with the tail's slots written to it, which must have room."""

    def put(whole: jax.Array, tail: jax.Array) -> jax.Array:
      start = (0, 0, 0, self.cache.length, 0)
      return jax.lax.dynamic_update_slice(whole, tail, start)

    return KVCache(
      keys=put(self.cache.keys, self.keys),
      values=put(self.cache.values, self.values),
      first=self.cache.first,
      length=self.cache.length + self.length,
    )


def empty(
  config: ModelConfig, *, first: jax.Array, slots: int, dtype: jnp.dtype
) -> KVCache:
  """A cache of ``slots`` slots for rows whose padding ends at ``first`` [B]."""
  shape = (
    config.num_layers,
    first.shape[0],
    config.num_kv_heads,
    slots,
    config.head_dim,
  )
  return KVCache(
    keys=jnp.zeros(shape, dtype),
    values=jnp.zeros(shape, dtype),
    first=first,
    length=jnp.zeros((), jnp.int32),
  )


def grow(cache: KVCache, *, slots: int, times: int) -> KVCache:
  """A cache with more room, each row ``times`` times in a row.

  Args:
    cache: Of the prompts.
    slots: Empty slots to add.
    times: Samples of a prompt.
  """

  def widen(whole: jax.Array) -> jax.Array:
    repeated = jnp.repeat(whole, times, axis=1)
    return jnp.pad(repeated, ((0, 0), (0, 0), (0, 0), (0, slots), (0, 0)))

  return KVCache(
    keys=widen(cache.keys),
    values=widen(cache.values),
    first=jnp.repeat(cache.first, times, axis=0),
    length=cache.length,
  )


def append(cache: KVCache, *, slots: int) -> Tail:
  """An empty tail of ``slots`` slots after a cache."""

  def room(whole: jax.Array) -> jax.Array:
    shape = (*whole.shape[:3], slots, whole.shape[4])
    return jnp.zeros(shape, whole.dtype)

  return Tail(
    cache=cache,
    keys=room(cache.keys),
    values=room(cache.values),
    length=jnp.zeros((), jnp.int32),
  )
