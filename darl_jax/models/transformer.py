"""The policy: a pre-norm decoder with rotary, grouped-query attention, SwiGLU.

One class for every family that a ``ModelConfig`` can describe (Llama and
Mistral, Qwen2 with ``qkv_bias``, Qwen3 with ``qk_norm``, Qwen3 MoE with
``num_experts``). The layers' parameters are stacked
along a leading axis and scanned, so that compile time does not grow with depth.
Every parameter names its logical axes where it is made; ``sharding/rules.py``
maps those names to mesh axes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from darl_jax.config import ModelConfig
from darl_jax.kernels.partition import Partition
from darl_jax.models import attention, experts, lora, parameters
from darl_jax.models.kv_cache import Layers, PagedSpan, Span, Tail
from darl_jax.models.parameters import Parameter
from darl_jax.types import Params

# Layers are unrolled in the compiled program up to this many: a loop costs a
# small model more than the longer compile.
_UNROLLED_LAYERS = 4


# Queries, keys and values to the attended values and anything kept.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


# Layers that are apart have their kernels' outputs first in models at least so
# wide: in narrower ones it costs more to turn the activations than it saves.
_OUTPUTS_FIRST_DIM = 256
# Axes of each kernel that its input is contracted with, of dense layers.
_INPUT_AXES = dict(query=1, key=1, value=1, output=2, gate=1, up=1, down=1)


class _Layout(NamedTuple):
  """How parameters lie.

  Attributes:
    partition: How they are cut; None for whole ones.
    outputs_first: Whether kernels are [outputs..., inputs...], as
      ``Policy.unstacked`` makes them.
  """

  partition: Partition | None
  outputs_first: bool


def _scale(size: int, axis: str) -> Parameter:
  return Parameter(jnp.ones((size,), jnp.float32), axes=(axis,))


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
  """RMSNorm over the last axis, in float32; returns x's dtype."""
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  normed = wide * jax.lax.rsqrt(mean_square + eps)
  broadcast = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
  return (normed * broadcast).astype(x.dtype)


class _Cut(NamedTuple):
  """How a parameter lies, and how a product takes it: whole along fsdp."""

  kept: NamedSharding
  used: NamedSharding


def _cut(kernel: Parameter, partition: Partition | None) -> _Cut | None:
  """None where a product can take the parameter as it lies."""
  if partition is None or partition.size(partition.fsdp) == 1:
    return None
  mesh_axis = {
    "embed": partition.fsdp,
    "heads": partition.tensor,
    "kv_heads": partition.tensor,
    "mlp": partition.tensor,
  }
  kept = [mesh_axis.get(name) for name in kernel.get_metadata("axes")]
  used = [None if axis == partition.fsdp else axis for axis in kept]
  return _Cut(
    *(
      NamedSharding(partition.mesh, PartitionSpec(*axes))
      for axes in (kept, used)
    )
  )


def _matrix(
  kernel: jax.Array, width: int, dtype: jnp.dtype, cut: _Cut | None
) -> jax.Array:
  """The kernel as [inputs, outputs]; cast before it is gathered."""
  kernel = kernel.astype(dtype)
  if cut:
    kernel = jax.lax.with_sharding_constraint(kernel, cut.kept)
    kernel = jax.lax.with_sharding_constraint(kernel, cut.used)
  return kernel.reshape(width, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, kernel: jax.Array, cut: _Cut | None) -> jax.Array:
  """x [tokens, inputs] times a kernel, which is gathered whole for it.

  Left to itself XLA for TPUs passes pieces of parameter and gradient around and
  multiplies with each: at 32 devices these products are too thin to fill the
  matrix units, and a learner step takes half as long again. The backward pass
  gathers once more instead of keeping what was gathered, and sums the kernel's
  gradient over tokens and devices in float32.
  """
  return x @ _matrix(kernel, x.shape[1], x.dtype, cut)


def _product_forward(x, kernel, cut):
  return _product(x, kernel, cut), (x, kernel)


def _product_backward(cut, saved, cotangent):
  x, kernel = saved
  d_x = cotangent @ _matrix(kernel, x.shape[1], x.dtype, cut).T
  d_kernel = jax.lax.dot_general(
    x,
    cotangent,
    (((0,), (0,)), ((), ())),
    preferred_element_type=jnp.float32,
  ).reshape(kernel.shape)
  if cut:
    d_kernel = jax.lax.with_sharding_constraint(d_kernel, cut.used)
    d_kernel = jax.lax.with_sharding_constraint(d_kernel, cut.kept)
  return d_x, d_kernel.astype(kernel.dtype)


_product.defvjp(_product_forward, _product_backward)


def _outputs_first_product(
  x: jax.Array, kernel: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """[outputs, tokens] of x [tokens, inputs] and a kernel [outputs, inputs].

  XLA for CPUs copies the second factor of a product into tiles at each call, so
  the small one must be it, and would itself swap the factors back.
  """
  inputs = jax.lax.optimization_barrier(x.T)
  product = jnp.matmul(
    kernel.astype(x.dtype), inputs, preferred_element_type=dtype
  )
  return jax.lax.optimization_barrier(product)


def _project(
  x: jax.Array,
  kernel: Parameter,
  layout: _Layout,
  *,
  num_inputs: int = 1,
  adapter: lora.Adapter | None = None,
) -> jax.Array:
  """Contracts x's last axes with the kernel's first ``num_inputs``.

  As one matrix product over flattened tokens: with two token axes to contract,
  XLA's CPU backend takes twice as long for the kernel's gradient.

  Args:
    x: [B, T, inputs...].
    kernel: [inputs..., outputs...], or as the layout says.
    layout: How the kernel lies.
    num_inputs: Axes of the kernel to contract.
    adapter: Of the kernel; its two thin products are added.

  Returns:
    [B, T, outputs...] in x's dtype.
  """
  tokens, values = x.shape[:2], kernel[...]
  if layout.outputs_first:
    outputs = values.shape[: values.ndim - num_inputs]
    matrix = values.reshape(math.prod(outputs), -1)
    rows = x.reshape(-1, matrix.shape[1])
    product = _outputs_first_product(rows, matrix, x.dtype).T
  else:
    outputs = values.shape[num_inputs:]
    rows = x.reshape(-1, math.prod(values.shape[:num_inputs]))
    product = _product(rows, values, _cut(kernel, layout.partition))
  product = product.reshape(*tokens, *outputs)
  if adapter is None:
    return product
  factors = _Layout(layout.partition, outputs_first=False)
  inner = _project(x, adapter.a, factors, num_inputs=num_inputs)
  return product + adapter.scale * _project(inner, adapter.b, factors)


class Attention(nnx.Module):
  """Projections around grouped-query attention, with an optional cache."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    dim, head_dim = config.embed_dim, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    self.config = config

    def projection(count: int, axis: str) -> Parameter:
      shape, axes = (dim, count, head_dim), ("embed", axis, "head_dim")
      return parameters.normal(rngs, shape, axes, std=dim**-0.5)

    self.query = projection(heads, "heads")
    self.key = projection(kv_heads, "kv_heads")
    self.value = projection(kv_heads, "kv_heads")
    # What is added to the residual stream starts smaller with depth (GPT-2).
    self.output = parameters.normal(
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
    self.adapters = lora.adapters(
      self,
      "attention",
      config,
      num_inputs=dict(query=1, key=1, value=1, output=2),
      rngs=rngs,
    )

  def __call__(
    self,
    x: jax.Array,
    turns: attention.Rotations,
    attend: Attend,
    layout: _Layout,
  ) -> tuple[jax.Array, Any]:
    """Projects x to queries, keys and values, attends, and projects back.

    Args:
      x: [B, T, D].
      turns: Of the tokens' positions.
      attend: From queries [B, T, N, H], keys and values [B, T, M, H] to
        [B, T, N, H] and anything that it keeps.
      layout: How the kernels lie.

    Returns:
      [B, T, D], and what ``attend`` keeps.
    """
    config, dtype = self.config, x.dtype

    def project(name: str) -> jax.Array:
      kernel, adapter = getattr(self, name), self.adapters.get(name)
      heads = _project(x, kernel, layout, adapter=adapter)
      if config.qkv_bias:
        bias = getattr(self, f"{name}_bias")
        heads = heads + bias[...].astype(dtype)[None, None]
      return heads

    query, key, value = (project(name) for name in ("query", "key", "value"))
    if config.qk_norm:
      query = rms_norm(query, self.query_norm[...], eps=config.norm_eps)
      key = rms_norm(key, self.key_norm[...], eps=config.norm_eps)
    query = attention.rotary(query, turns)
    key = attention.rotary(key, turns)
    out, kept = attend(query, key, value)
    adapter = self.adapters.get("output")
    return (
      _project(out, self.output, layout, num_inputs=2, adapter=adapter),
      kept,
    )


class FeedForward(nnx.Module):
  """SwiGLU."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    dim, hidden = config.embed_dim, config.mlp_dim
    into, back = ("embed", "mlp"), ("mlp", "embed")
    self.gate = parameters.normal(rngs, (dim, hidden), into, std=dim**-0.5)
    self.up = parameters.normal(rngs, (dim, hidden), into, std=dim**-0.5)
    # As for the attention's output.
    std = (hidden * 2 * config.num_layers) ** -0.5
    self.down = parameters.normal(rngs, (hidden, dim), back, std=std)

    self.adapters = lora.adapters(
      self,
      "feed_forward",
      config,
      num_inputs=dict(gate=1, up=1, down=1),
      rngs=rngs,
    )

  def __call__(self, x: jax.Array, layout: _Layout) -> jax.Array:
    def project(x: jax.Array, name: str) -> jax.Array:
      kernel, adapter = getattr(self, name), self.adapters.get(name)
      return _project(x, kernel, layout, adapter=adapter)

    gated = jax.nn.silu(project(x, "gate")) * project(x, "up")
    return project(gated, "down")


class MixtureOfExperts(nnx.Module):
  """SwiGLU experts, a few of which a router chooses for each token."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    dim, hidden = config.embed_dim, config.expert_mlp_dim
    count = config.num_experts
    self.config = config

    def kernels(rows: int, columns: int, *axes: str, std: float) -> Parameter:
      shape = (count, rows, columns)
      return parameters.normal(rngs, shape, ("expert", *axes), std=std)

    self.router = parameters.normal(
      rngs, (dim, count), ("embed", "expert"), std=dim**-0.5
    )
    self.gate = kernels(dim, hidden, "embed", "mlp", std=dim**-0.5)
    self.up = kernels(dim, hidden, "embed", "mlp", std=dim**-0.5)
    # As for the attention's output.
    std = (hidden * 2 * config.num_layers) ** -0.5
    self.down = kernels(hidden, dim, "mlp", "embed", std=std)
    self.adapters = lora.adapters(
      self,
      "feed_forward",
      config,
      num_inputs=dict(router=1, gate=1, up=1, down=1),
      rngs=rngs,
    )

  def _kernel(self, name: str) -> jax.Array:
    """With its adapter merged in: tokens are sorted to experts only once."""
    kernel, adapter = getattr(self, name)[...], self.adapters.get(name)
    return kernel if adapter is None else adapter.merged(kernel)

  def __call__(self, x: jax.Array, layout: _Layout) -> jax.Array:
    weights, chosen = experts.route(
      x,
      self._kernel("router"),
      experts_per_token=self.config.experts_per_token,
      normalize=self.config.normalize_expert_weights,
      partition=layout.partition,
    )
    return experts.mix(
      x,
      weights,
      chosen,
      *(self._kernel(name) for name in ("gate", "up", "down")),
      partition=layout.partition,
    )


class Block(nnx.Module):
  """One layer."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.attention_norm = _scale(config.embed_dim, "embed")
    self.attention = Attention(config, rngs=rngs)
    self.feed_forward_norm = _scale(config.embed_dim, "embed")
    kind = MixtureOfExperts if config.num_experts else FeedForward
    self.feed_forward = kind(config, rngs=rngs)

  def __call__(
    self,
    x: jax.Array,
    turns: attention.Rotations,
    attend: Attend,
    layout: _Layout,
  ) -> tuple[jax.Array, Any]:
    eps = self.config.norm_eps
    normed = rms_norm(x, self.attention_norm[...], eps=eps)
    attended, kept = self.attention(normed, turns, attend, layout)
    x = x + attended
    normed = rms_norm(x, self.feed_forward_norm[...], eps=eps)
    return x + self.feed_forward(normed, layout), kept


class Transformer(nnx.Module):
  """All parameters of the model; ``Policy`` computes with them."""

  def __init__(self, config: ModelConfig, *, vocab_size: int, rngs: nnx.Rngs):
    self.config = config

    def table() -> Parameter:
      shape, axes = (vocab_size, config.embed_dim), ("vocab", "embed")
      # Rows of unit norm: with tied embeddings, logits start of order 1.
      return parameters.normal(rngs, shape, axes, std=config.embed_dim**-0.5)

    self.embedding = table()
    keys = jax.random.split(rngs.params(), config.num_layers)
    self.layers = nnx.vmap(
      lambda key: Block(config, rngs=nnx.Rngs(params=key))
    )(keys)
    self.final_norm = _scale(config.embed_dim, "embed")
    if not config.tie_embeddings:
      self.unembedding = table()


def _rematerialised(layer: Callable, remat: str) -> Callable:
  """``layer``, whose backward pass computes again what ``remat`` says."""
  if remat == "none":
    return layer
  policies = jax.checkpoint_policies
  policy = {
    "layer": policies.nothing_saveable,
    "attention": policies.save_only_these_names(attention.OUTPUT),
  }[remat]
  # A scan's body is never merged with its own backward pass.
  return jax.checkpoint(layer, policy=policy, prevent_cse=False)


class Policy:
  """A transformer as pure functions of a nested dict of parameters.

  Where a function takes parameters, their layers may be stacked along a leading
  axis, as ``init`` makes them, and are then scanned; or be apart, as
  ``unstacked`` returns them, and are then unrolled.
  """

  def __init__(self, config: ModelConfig, *, vocab_size: int):
    self.config = config
    self.vocab_size = vocab_size
    self._turned = config.embed_dim >= _OUTPUTS_FIRST_DIM
    abstract = nnx.eval_shape(lambda: self._make(jax.random.key(0)))
    self._state = nnx.state(abstract)
    self._block = nnx.split(
      nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(params=0)))
    )

  def _make(self, key: jax.Array) -> Transformer:
    rngs = nnx.Rngs(params=key)
    return Transformer(self.config, vocab_size=self.vocab_size, rngs=rngs)

  def init(self, key: jax.Array) -> Params:
    """Fresh parameters, a nested dict; jit it to make them sharded.

    ``lora.split`` says which of them are trained.
    """
    return nnx.to_pure_dict(nnx.state(self._make(key)))

  @property
  def logical_axes(self) -> Params:
    """For each parameter the names of its axes, as a tuple of strings."""
    axes = {}
    for path, variable in nnx.to_flat_state(self._state):
      stacked = ("layer",) if path[0] == "layers" else ()
      axes[path] = stacked + variable.get_metadata("axes")
    return nnx.traversals.unflatten_mapping(axes)

  def unstacked(self, params: Params) -> Params:
    """The same parameters as XLA's backend for CPUs reads them fastest.

    Each layer has a dict of its own, in which the kernels of dense layers are
    [outputs..., inputs...] if the model is wide.

    Args:
      params: Arrays, of the device or of the host.
    """

    def leaf(path: KeyPath, stacked: Any, index: int) -> Any:
      inputs = self._input_axes(path)
      axes = (*range(inputs, stacked.ndim - 1), *range(inputs))
      return stacked[index].transpose(axes)

    def layer(index: int) -> Params:
      return jax.tree_util.tree_map_with_path(
        functools.partial(leaf, index=index), params["layers"]
      )

    layers = tuple(map(layer, range(self.config.num_layers)))
    return {**params, "layers": layers}

  def unstacked_shardings(self, shardings: Params) -> Params:
    """Where ``unstacked`` parameters lie, of which the stacked ones lie so."""
    if not shardings:
      return {}

    def leaf(path: KeyPath, stacked: NamedSharding) -> NamedSharding:
      axes, inputs = stacked.spec[1:], self._input_axes(path)
      spec = PartitionSpec(*axes[inputs:], *axes[:inputs])
      return NamedSharding(stacked.mesh, spec)

    layer = jax.tree_util.tree_map_with_path(leaf, shardings["layers"])
    return {**shardings, "layers": (layer,) * self.config.num_layers}

  def _input_axes(self, path: KeyPath) -> int:
    """Leading axes of a layer's leaf that go behind the others."""
    block, leaf = path[0].key, path[-1].key
    dense = block != "feed_forward" or not self.config.num_experts
    if not (dense and self._turned):
      return 0
    return _INPUT_AXES.get(leaf, 0)

  def hidden(
    self,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    partition: Partition | None = None,
  ) -> jax.Array:
    """Final hidden states of packed rows.

    Args:
      params: As from ``init``.
      tokens: int32 [B, T].
      positions: int32 [B, T], restarting with each segment.
      segment_ids: int32 [B, T]; 0 pads.
      partition: How rows and heads are cut; None for whole arrays.

    Returns:
      [B, T, D] in the compute dtype; ``[b, t]`` predicts token t + 1.
    """

    def attend(query, key, value, carry, _):
      out = attention.attend_packed(
        query, key, value, segment_ids, partition=partition
      )
      return out, carry, None

    return self._forward(
      params,
      tokens,
      positions,
      attend,
      None,
      dtype=jnp.dtype(self.config.compute_dtype),
      partition=partition,
      remat=self.config.remat,
    )[0]

  def read(
    self,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    dtype: jnp.dtype,
    context: Span | None = None,
    partition: Partition | None = None,
  ) -> tuple[jax.Array, Layers, Layers]:
    """Reads packed rows for what attention will want of them.

    Args:
      params: Stacked or not.
      tokens: int32 [B, T].
      positions: int32 [B, T], counted from where each sequence starts.
      segment_ids: int32 [B, T]; 0 pads. With a context, each row continues one
        sequence: its only segment.
      dtype: Of activations, keys and values.
      context: What comes before the tokens, an entry for each row.
      partition: How rows and heads are cut; None for whole arrays.

    Returns:
      Hidden states [B, T, D], and layers of keys (rotated) and values
      [B, M, T, H].
    """

    def attend(query, key, value, carry, layer):
      if context is None:
        out = attention.attend_packed(
          query, key, value, segment_ids, partition=partition
        )
      else:
        mask = attention.packed_mask(segment_ids)
        own = (jnp.moveaxis(key, 1, 3), jnp.swapaxes(value, 1, 2), mask)
        before = _part(context, layer, tokens.shape[1])
        out = attention.attend_ranges(query, (before, own))
      heads_first = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), (key, value))
      return out, carry, heads_first

    hidden, _, (keys, values) = self._forward(
      params,
      tokens,
      positions,
      attend,
      None,
      dtype=dtype,
      partition=partition,
    )
    return hidden, keys, values

  def extend(
    self,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    spans: Sequence[Span] | Sequence[PagedSpan],
    tail: Tail,
    *,
    partition: Partition | None = None,
  ) -> tuple[jax.Array, Tail]:
    """Appends tokens to a tail.

    Args:
      params: Stacked or not, as are spans and tail; activations take the
        tail's dtype.
      tokens: int32 [B, T], for which the tail must have room; one of each row
        where spans are paged.
      positions: int32 [B, T].
      spans: What comes before the tail, in any order; all paged or none.
      tail: What earlier calls appended.
      partition: How rows are cut; None for whole arrays.

    Returns:
      Hidden states [B, T, D], and the longer tail.
    """
    num_tokens = tokens.shape[1]
    among = tail.mask(num_tokens)

    def attend(query, key, value, carry, layer):
      written = dataclasses.replace(tail, keys=carry[0], values=carry[1]).write(
        layer, key, value
      )
      mask = jnp.broadcast_to(among[None], (len(tokens), *among.shape))
      keys, values = written.keys[layer], written.values[layer]
      if any(isinstance(span, PagedSpan) for span in spans):
        out = attention.attend_pages(
          query, spans, layer, (keys, values, mask), partition=partition
        )
      else:
        ranges = [_part(span, layer, num_tokens) for span in spans]
        ranges.append((jnp.swapaxes(keys, 2, 3), values, mask))
        out = attention.attend_ranges(query, ranges)
      return out, (written.keys, written.values), None

    hidden, (keys, values), _ = self._forward(
      params,
      tokens,
      positions,
      attend,
      (tail.keys, tail.values),
      dtype=tail.keys[0].dtype,
      partition=partition,
    )
    return hidden, Tail(keys, values, tail.length + num_tokens)

  def logits(
    self, params: Params, hidden: jax.Array, *, vocab_first: bool
  ) -> jax.Array:
    """float32 [B, V] of hidden states [B, D]; [V, B] where ``vocab_first``,
    which is faster on CPUs (``_outputs_first_product``)."""
    unembedding = self.unembedding(params)
    if vocab_first:
      return _outputs_first_product(hidden, unembedding, jnp.float32)
    return jnp.einsum(
      "bd,vd->bv",
      hidden,
      unembedding.astype(hidden.dtype),
      preferred_element_type=jnp.float32,
    )

  def unembedding(self, params: Params) -> jax.Array:
    """[V, D], the embedding itself where tied."""
    tied = self.config.tie_embeddings
    return params["embedding" if tied else "unembedding"]

  def _forward(
    self,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any, Any]],
    carry: Any,
    *,
    dtype: jnp.dtype,
    partition: Partition | None,
    remat: str = "none",
  ) -> tuple[jax.Array, Any, Any]:
    """All layers in turn.

    Args:
      params: Stacked or not.
      tokens: int32 [B, T].
      positions: int32 [B, T].
      attend: Called with queries, keys and values of a layer, the carry and
        the layer's number; returns the attended values, the carry, and
        anything to keep for each layer.
      carry: Handed from layer to layer.
      dtype: Of the activations.
      partition: Pins every activation to its rows.
      remat: What a backward pass computes again, as in ``ModelConfig``.

    Returns:
      Hidden states [B, T, D], the carry, and what was kept: stacked, or a
      tuple for each array of what ``attend`` keeps.
    """

    def pinned(x: jax.Array) -> jax.Array:
      """Activations stay cut along rows, so that weights move instead."""
      if partition is None:
        return x
      return jax.lax.with_sharding_constraint(
        x, NamedSharding(partition.mesh, partition.row_spec)
      )

    def layer(x_carry, per_layer):
      x, carry = x_carry
      layer_params, index = per_layer

      def attend_here(query, key, value):
        out, *kept = attend(query, key, value, carry, index)
        return out, kept

      graphdef, state = self._block
      state = jax.tree.map(lambda leaf: leaf, state)
      nnx.replace_by_pure_dict(state, layer_params)
      block = nnx.merge(graphdef, state)
      x, (new_carry, kept) = block(x, turns, attend_here, layout)
      return (pinned(x), new_carry), kept

    x = pinned(params["embedding"][tokens].astype(dtype))
    layers, num_layers = params["layers"], self.config.num_layers
    layout = _Layout(
      partition, outputs_first=isinstance(layers, tuple) and self._turned
    )
    turns = attention.rotations(
      positions, frequencies=attention.rotary_frequencies(self.config)
    )
    layer = _rematerialised(layer, remat)
    if isinstance(layers, tuple):
      each = []
      for index in range(num_layers):
        (x, carry), kept = layer((x, carry), (layers[index], index))
        each.append(kept)
      kept = jax.tree.map(lambda *parts: parts, *each)
    else:
      (x, carry), kept = jax.lax.scan(
        layer,
        (x, carry),
        (layers, jnp.arange(num_layers)),
        unroll=num_layers <= _UNROLLED_LAYERS,
      )
    final = params["final_norm"]
    return rms_norm(x, final, eps=self.config.norm_eps), carry, kept


def _part(
  span: Span, layer: jax.Array | int, num_tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """One layer of a span, as ``attention.attend_ranges`` takes it."""
  shape = (len(span.mask), num_tokens, span.mask.shape[1])
  mask = jnp.broadcast_to(span.mask[:, None], shape)
  return span.keys[layer], span.values[layer], mask
