"""Keys and values that attention reads: of a context, and of a chunk's tokens.

Either is kept for all layers at once or layer by layer (``Layers``): a scan
over layers wants one stacked array, and where the layers are unrolled an array
of each layer's own is read without a copy.
"""

import dataclasses

import jax
import jax.numpy as jnp

from darl_jax.config import ModelConfig

# Stacked [layers, ...], or a tuple of one array per layer.
Layers = jax.Array | tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Span:
  """A part of the context that is only read.

  Attributes:
    keys: Layers of [Q, M, H, S], rotated. Each of the Q entries serves B / Q
      consecutive rows: one, or the samples of a prompt.
    values: Layers of [Q, M, S, H].
    mask: bool [Q or B, S], which slots hold a token that is to be read.
  """

  keys: Layers
  values: Layers
  mask: jax.Array

  @classmethod
  def of(cls, keys: Layers, values: Layers, mask: jax.Array) -> "Span":
    """From layers of keys and values [Q, M, S, H], as ``Policy.read`` has them.

    A CPU reads keys that lie as a span's do in two thirds of the time, and a
    span is read once for each token.
    """
    return cls(
      jax.tree.map(lambda layer: jnp.swapaxes(layer, -1, -2), keys),
      values,
      mask,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedSpan:
  """A part of the context that is read where it lies, in pages.

  Attributes:
    keys: [layers, R, pages, M, page tokens, H], rotated; all that there are.
    values: As ``keys``.
    key_scales: float32 [layers, R, pages, M, page tokens] of int8 keys; None
      for others.
    value_scales: As ``key_scales``.
    table: int32 [Q, n], the pages of each entry, which serves B / Q consecutive
      rows.
    head_tokens: int32 [Q], tokens in the first pages of the table;
    head_pages: int32 [Q], so many, of which the last may not be full.
    own_tokens: int32 [Q], tokens in the pages behind those.
    readers: bool [B], the rows that read their entry.
  """

  keys: jax.Array
  values: jax.Array
  key_scales: jax.Array | None
  value_scales: jax.Array | None
  table: jax.Array
  head_tokens: jax.Array
  head_pages: jax.Array
  own_tokens: jax.Array
  readers: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tail:
  """The tokens that one dispatch appends, which later ones of it read.

  Were each token written to its span, the compiler for TPUs would lay the span
  out for that one slot inside the decoding loop, copy all of it on the way in
  and out, and each layer's part again to read it.

  Attributes:
    keys: Layers of [B, M, C, H], rotated.
    values: Layers of [B, M, C, H].
    length: int32 [], slots filled, the same in every row.
  """

  keys: Layers
  values: Layers
  length: jax.Array

  def mask(self, num_queries: int) -> jax.Array:
    """bool [T, C]: which of the tail the next T tokens may read."""
    slots = jnp.arange(self.keys[0].shape[-2])
    queries = self.length + jnp.arange(num_queries)
    return slots[None, :] <= queries[:, None]

  def write(
    self, layer: jax.Array | int, keys: jax.Array, values: jax.Array
  ) -> "Tail":
    """One layer's keys and values [B, T, M, H], from slot ``length`` on."""

    def put(whole: Layers, new: jax.Array) -> Layers:
      new = jnp.swapaxes(new, 1, 2).astype(whole[0].dtype)
      start = (0, 0, self.length, 0)
      if isinstance(whole, tuple):
        longer = jax.lax.dynamic_update_slice(whole[layer], new, start)
        return (*whole[:layer], longer, *whole[layer + 1 :])
      return jax.lax.dynamic_update_slice(whole, new[None], (layer, *start))

    return dataclasses.replace(
      self, keys=put(self.keys, keys), values=put(self.values, values)
    )


def empty_tail(
  config: ModelConfig,
  *,
  rows: int,
  slots: int,
  dtype: jnp.dtype,
  unstacked: bool = False,
) -> Tail:
  """A tail of ``slots`` slots, stacked or of an array for each layer."""
  shape = (rows, config.num_kv_heads, slots, config.head_dim)

  def room() -> Layers:
    if unstacked:
      return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
    return jnp.zeros((config.num_layers, *shape), dtype)

  return Tail(room(), room(), jnp.zeros((), jnp.int32))
