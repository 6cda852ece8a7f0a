"""The policy: a pre-norm decoder with rotary, grouped-query attention, SwiGLU.

One class for every family that a ``ModelConfig`` can describe (Llama, Qwen2
with ``qkv_bias``, Qwen3 with ``qk_norm``). The layers' parameters are stacked
along a leading axis and scanned, so that compile time does not grow with depth.
Every parameter names its logical axes where it is made; ``sharding/rules.py``
maps those names to mesh axes.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from darl_jax.config import ModelConfig
from darl_jax.models import attention
from darl_jax.models.kv_cache import KVCache
from darl_jax.types import Params

# Layers are unrolled in the compiled program up to this many: a loop costs a
# small model more than the longer compile.
_UNROLLED_LAYERS = 4


class Parameter(nnx.Param):
  """A parameter that knows the logical axes of its shape."""


def _parameter(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  *,
  std: float,
) -> Parameter:
  """Normal with standard deviation ``std``."""
  value = jax.random.normal(rngs.params(), shape, jnp.float32)
  return Parameter(value * std, axes=axes)


def _scale(size: int, axis: str) -> Parameter:
  return Parameter(jnp.ones((size,), jnp.float32), axes=(axis,))


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
  """RMSNorm over the last axis, in float32; returns x's dtype."""
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  normed = wide * jax.lax.rsqrt(mean_square + eps)
  broadcast = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
  return (normed * broadcast).astype(x.dtype)


def _project(
  x: jax.Array, kernel: Parameter, *, num_inputs: int = 1
) -> jax.Array:
  """Contracts x's last axes with the kernel's first ``num_inputs``.

  As one matrix product over flattened tokens: with two token axes to contract,
  XLA's CPU backend takes twice as long for the kernel's gradient.

  Args:
    x: [B, T, inputs...].
    kernel: [inputs..., outputs...].

  Returns:
    [B, T, outputs...] in x's dtype.
  """
  tokens, outputs = x.shape[:2], kernel.shape[num_inputs:]
  width = math.prod(kernel.shape[:num_inputs])
  matrix = kernel[...].astype(x.dtype).reshape(width, -1)
  return (x.reshape(-1, width) @ matrix).reshape(*tokens, *outputs)


class Attention(nnx.Module):
  """Projections around grouped-query attention, with an optional cache."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    dim, head_dim = config.embed_dim, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    self.config = config

    def projection(count: int, axis: str) -> Parameter:
      shape, axes = (dim, count, head_dim), ("embed", axis, "head_dim")
      return _parameter(rngs, shape, axes, std=dim**-0.5)

    self.query = projection(heads, "heads")
    self.key = projection(kv_heads, "kv_heads")
    self.value = projection(kv_heads, "kv_heads")
    # What is added to the residual stream starts smaller with depth (GPT-2).
    self.output = _parameter(
      rngs,
      (heads, head_dim, dim),
      ("heads", "head_dim", "embed"),
      std=(heads * head_dim * 2 * config.num_layers) ** -0.5,
    )
    if config.qkv_bias:

      def bias(count: int, axis: str) -> Parameter:
        zeros = jnp.zeros((count, head_dim), jnp.float32)
        return Parameter(zeros, axes=(axis, "head_dim"))

      self.query_bias = bias(heads, "heads")
      self.key_bias = bias(kv_heads, "kv_heads")
      self.value_bias = bias(kv_heads, "kv_heads")
    if config.qk_norm:
      self.query_norm = _scale(head_dim, "head_dim")
      self.key_norm = _scale(head_dim, "head_dim")

  def __call__(
    self,
    x: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: tuple[jax.Array, jax.Array, jax.Array] | None,
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Attends within x, or over a cache that x's keys are first written to.

    Args:
      x: [B, T, D].
      positions: int32 [B, T].
      mask: bool [B, T, S], or [B, T, T] without a cache.
      cache: This layer's keys and values [B, S, M, H] and the slot at which
        x's first token is written.

    Returns:
      [B, T, D], and the updated keys and values.
    """
    config, dtype = self.config, x.dtype

    def project(kernel: Parameter, bias: str) -> jax.Array:
      heads = _project(x, kernel)
      if config.qkv_bias:
        heads = heads + getattr(self, bias)[...].astype(dtype)[None, None]
      return heads

    query = project(self.query, "query_bias")
    key = project(self.key, "key_bias")
    value = project(self.value, "value_bias")
    if config.qk_norm:
      query = rms_norm(query, self.query_norm[...], eps=config.norm_eps)
      key = rms_norm(key, self.key_norm[...], eps=config.norm_eps)
    query = attention.rotary(query, positions, theta=config.rope_theta)
    key = attention.rotary(key, positions, theta=config.rope_theta)
    written = None
    if cache is not None:
      keys, values, slot = cache
      key = jax.lax.dynamic_update_slice_in_dim(
        keys, key.astype(keys.dtype), slot, axis=1
      )
      value = jax.lax.dynamic_update_slice_in_dim(
        values, value.astype(values.dtype), slot, axis=1
      )
      written = key, value
    out = attention.attend(query, key.astype(dtype), value.astype(dtype), mask)
    return _project(out, self.output, num_inputs=2), written


class FeedForward(nnx.Module):
  """SwiGLU."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    dim, hidden = config.embed_dim, config.mlp_dim
    into, back = ("embed", "mlp"), ("mlp", "embed")
    self.gate = _parameter(rngs, (dim, hidden), into, std=dim**-0.5)
    self.up = _parameter(rngs, (dim, hidden), into, std=dim**-0.5)
    # As for the attention's output.
    std = (hidden * 2 * config.num_layers) ** -0.5
    self.down = _parameter(rngs, (hidden, dim), back, std=std)

  def __call__(self, x: jax.Array) -> jax.Array:
    gated = jax.nn.silu(_project(x, self.gate)) * _project(x, self.up)
    return _project(gated, self.down)


class Block(nnx.Module):
  """One layer."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.attention_norm = _scale(config.embed_dim, "embed")
    self.attention = Attention(config, rngs=rngs)
    self.feed_forward_norm = _scale(config.embed_dim, "embed")
    self.feed_forward = FeedForward(config, rngs=rngs)

  def __call__(self, x, positions, mask, cache):
    eps = self.config.norm_eps
    normed = rms_norm(x, self.attention_norm[...], eps=eps)
    attended, written = self.attention(normed, positions, mask, cache)
    x = x + attended
    normed = rms_norm(x, self.feed_forward_norm[...], eps=eps)
    return x + self.feed_forward(normed), written


class Transformer(nnx.Module):
  """Token ids in, final hidden states out."""

  def __init__(self, config: ModelConfig, *, vocab_size: int, rngs: nnx.Rngs):
    self.config = config

    def table() -> Parameter:
      shape, axes = (vocab_size, config.embed_dim), ("vocab", "embed")
      # Rows of unit norm: with tied embeddings, logits start of order 1.
      return _parameter(rngs, shape, axes, std=config.embed_dim**-0.5)

    self.embedding = table()
    keys = jax.random.split(rngs.params(), config.num_layers)
    self.layers = nnx.vmap(
      lambda key: Block(config, rngs=nnx.Rngs(params=key))
    )(keys)
    self.final_norm = _scale(config.embed_dim, "embed")
    if not config.tie_embeddings:
      self.unembedding = table()

  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: KVCache | None,
    *,
    dtype: jnp.dtype,
    constrain: Callable[[jax.Array], jax.Array],
  ) -> tuple[jax.Array, KVCache | None]:
    """See ``Policy.hidden`` and ``Policy.extend``."""
    x = constrain(self.embedding[...][tokens].astype(dtype))
    graphdef, stacked = nnx.split(self.layers)

    def layer(x, per_layer):
      params, keys_values = per_layer
      block = nnx.merge(graphdef, params)
      layer_cache = None if cache is None else (*keys_values, cache.length)
      x, written = block(x, positions, mask, layer_cache)
      return constrain(x), written

    if self.config.remat:
      layer = jax.checkpoint(layer)
    keys_values = None if cache is None else (cache.keys, cache.values)
    x, written = jax.lax.scan(
      layer,
      x,
      (stacked, keys_values),
      unroll=self.config.num_layers <= _UNROLLED_LAYERS,
    )
    x = rms_norm(x, self.final_norm[...], eps=self.config.norm_eps)
    if cache is not None:
      cache = dataclasses.replace(
        cache,
        keys=written[0],
        values=written[1],
        length=cache.length + tokens.shape[1],
      )
    return x, cache


class Policy:
  """A transformer as pure functions of a nested dict of parameters."""

  def __init__(self, config: ModelConfig, *, vocab_size: int):
    self.config = config
    self.vocab_size = vocab_size
    abstract = nnx.eval_shape(lambda: self._make(jax.random.key(0)))
    self._graphdef, self._state = nnx.split(abstract)

  def _make(self, key: jax.Array) -> Transformer:
    rngs = nnx.Rngs(params=key)
    return Transformer(self.config, vocab_size=self.vocab_size, rngs=rngs)

  def init(self, key: jax.Array) -> Params:
    """Fresh parameters, a nested dict; jit it to make them sharded."""
    return nnx.to_pure_dict(nnx.state(self._make(key)))

  @property
  def logical_axes(self) -> Params:
    """For each parameter the names of its axes, as a tuple of strings."""
    axes = {}
    for path, variable in nnx.to_flat_state(self._state):
      stacked = ("layer",) if path[0] == "layers" else ()
      axes[path] = stacked + variable.get_metadata("axes")
    return nnx.traversals.unflatten_mapping(axes)

  def hidden(
    self,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
  ) -> jax.Array:
    """Final hidden states of packed rows.

    Args:
      params: As from ``init``.
      tokens: int32 [B, T].
      positions: int32 [B, T], restarting with each segment.
      segment_ids: int32 [B, T]; 0 pads.
      constrain: Applied to every [B, T, D] activation that crosses a layer, to
        pin its sharding.

    Returns:
      [B, T, D] in the compute dtype; ``[b, t]`` predicts token t + 1.
    """
    model = self._merge(params)
    mask = attention.packed_mask(segment_ids)
    dtype = jnp.dtype(self.config.compute_dtype)
    return model(
      tokens, positions, mask, None, dtype=dtype, constrain=constrain
    )[0]

  def extend(
    self, params: Params, tokens: jax.Array, cache: KVCache
  ) -> tuple[jax.Array, KVCache]:
    """Appends tokens to a cache.

    Args:
      params: As from ``init``; activations take the cache's dtype.
      tokens: int32 [B, T], written to slots length .. length + T - 1.
      cache: Rows whose padding, if any, is on the left.

    Returns:
      Hidden states [B, T, D], and the longer cache.
    """
    model = self._merge(params)
    slots = cache.length + jnp.arange(tokens.shape[1])
    positions = jnp.maximum(slots[None, :] - cache.first[:, None], 0)
    return model(
      tokens,
      positions,
      cache.mask(tokens.shape[1]),
      cache,
      dtype=cache.keys.dtype,
      constrain=lambda x: x,
    )

  def unembedding(self, params: Params) -> jax.Array:
    """[V, D], the embedding itself where tied."""
    tied = self.config.tie_embeddings
    return params["embedding" if tied else "unembedding"]

  def _merge(self, params: Params) -> Transformer:
    state = jax.tree.map(lambda leaf: leaf, self._state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(self._graphdef, state)
