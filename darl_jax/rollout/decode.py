"""The sampler's programs: prompts into pages, and pages into sampled tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.config import ModelConfig
from darl_jax.kernels.paged_attention import ops as paged
from darl_jax.kernels.paged_attention.ref import Bounds
from darl_jax.models import kv_cache
from darl_jax.models.kv_cache import Layers, PagedSpan, Span
from darl_jax.models.transformer import Policy
from darl_jax.rollout import sampling
from darl_jax.rollout.sampling import Sampled, Sampling
from darl_jax.sharding import rules
from darl_jax.types import Params

_INT8_MAX = 127.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """The paged cache on the device.

  Attributes:
    keys: Layers of [R, pages, M, page tokens, H], rotated; R data slices of the
      mesh hold pages of their own.
    values: As ``keys``.
    key_scales: Layers of float32 [R, pages, M, page tokens]: an int8 key times
      its scale is the key. None for other dtypes.
    value_scales: As ``key_scales``.
  """

  keys: Layers
  values: Layers
  key_scales: Layers | None
  value_scales: Layers | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """What prefill reads, packed: every sequence begins at a page's first slot.

  Attributes:
    tokens: int32 [B, T].
    positions: int32 [B, T].
    segment_ids: int32 [B, T]; 0 pads.
    write: int32 [B, T / page tokens], the page of each page's worth of tokens;
      0 for one that nobody reads.
    table: int32 [B, n], the pages that come before a row's tokens; n = 0 where
      every sequence starts in its row.
    head_tokens: int32 [B], tokens in the first ``head_pages`` of the table.
    head_pages: int32 [B].
    own_tokens: int32 [B], tokens in the pages behind those.
  """

  tokens: np.ndarray
  positions: np.ndarray
  segment_ids: np.ndarray
  write: np.ndarray
  table: np.ndarray
  head_tokens: np.ndarray
  head_pages: np.ndarray
  own_tokens: np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
  """The rows of one decode dispatch; a row without a sample writes to page 0.

  What a row has cached lies in up to two places: a prefix that it shares with
  the other rows of its lane, and pages of its own.

  Attributes:
    pending: int32 [B], the token that each row reads first.
    positions: int32 [B], its position: the number of tokens cached.
    counts: int32 [B], tokens that the row has sampled.
    keys: uint32 [B, key words], data of the request's PRNG key.
    lanes: int32 [Q, m], pages of the prefix of B / Q rows; m = 0 for none.
    lane_tokens: int32 [Q], tokens in them.
    in_lane: bool [B], whether the row's prefix is its lane's.
    table: int32 [B, n], the row's own pages, behind its prefix's if that is not
      its lane's.
    head_tokens: int32 [B], tokens in the first ``head_pages`` of the table:
      the prefix, whose last page may not be full.
    head_pages: int32 [B].
    own_tokens: int32 [B], tokens in the pages behind those.
    write: int32 [B], the page for this chunk's tokens.
  """

  pending: np.ndarray
  positions: np.ndarray
  counts: np.ndarray
  keys: np.ndarray
  lanes: np.ndarray
  lane_tokens: np.ndarray
  in_lane: np.ndarray
  table: np.ndarray
  head_tokens: np.ndarray
  head_pages: np.ndarray
  own_tokens: np.ndarray
  write: np.ndarray


class Decoder:
  """Prefill and decode, each compiled once for each width of their tables."""

  def __init__(
    self,
    policy: Policy,
    *,
    sampling: Sampling,
    page_tokens: int,
    dtype: jnp.dtype,
    cache_dtype: jnp.dtype,
    unstacked: bool,
    mesh: Mesh,
  ):
    """Compiles nothing yet.

    Args:
      policy: The model.
      sampling: How a token is drawn.
      page_tokens: Slots of a page: tokens that a decode dispatch samples.
      dtype: Of activations.
      cache_dtype: Of pages; int8 keeps a scale for each token and head.
      unstacked: Whether parameters and pages are kept layer by layer.
      mesh: The rollout mesh.
    """
    self._policy = policy
    self._sampling = sampling
    self._page_tokens = page_tokens
    self._dtype = dtype
    self._cache_dtype = jnp.dtype(cache_dtype)
    self.unstacked = unstacked
    self._replicas = mesh.shape["data"]
    self._partition = rules.partition(mesh, rules.ROLLOUT_RULES)
    rows = rules.rows_sharding(mesh, rules.ROLLOUT_RULES)
    self._quantized = self._cache_dtype == jnp.int8
    self._pages = _page_shardings(
      policy.config, mesh, unstacked=unstacked, quantized=self._quantized
    )
    self.prefill = jax.jit(
      self._prefill, donate_argnames="pages", out_shardings=self._pages
    )
    self.decode = jax.jit(
      self._decode, donate_argnames="pages", out_shardings=(self._pages, rows)
    )

  def compiles(self) -> dict[str, int]:
    """How often each program was compiled."""
    return {
      "prefill": self.prefill._cache_size(),
      "decode": self.decode._cache_size(),
    }

  def empty_pages(self, num_pages: int) -> Pages:
    """Zeros, on the mesh; ``num_pages`` on each data slice."""
    make = self._maker(num_pages)
    return jax.jit(make, out_shardings=self._pages)()

  def abstract_pages(self, num_pages: int) -> Pages:
    """Their shapes and shardings."""
    return jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding
      ),
      jax.eval_shape(self._maker(num_pages)),
      self._pages,
    )

  def _maker(self, num_pages: int) -> Callable[[], Pages]:
    config = self._policy.config

    def make() -> Pages:
      shape = (
        self._replicas,
        num_pages,
        config.num_kv_heads,
        self._page_tokens,
        config.head_dim,
      )

      def zeros(*shape: int, dtype: jnp.dtype) -> Layers:
        if self.unstacked:
          layers = range(config.num_layers)
          return tuple(jnp.zeros(shape, dtype) for _ in layers)
        return jnp.zeros((config.num_layers, *shape), dtype)

      def scales() -> Layers | None:
        if not self._quantized:
          return None
        return zeros(*shape[:-1], dtype=jnp.float32)

      def entries() -> Layers:
        return zeros(*shape, dtype=self._cache_dtype)

      return Pages(entries(), entries(), scales(), scales())

    return make

  def _prefill(self, params: Params, pages: Pages, rows: Rows) -> Pages:
    """Fills pages with the keys and values of packed rows."""
    context = None
    if rows.table.shape[1]:
      bounds = Bounds(rows.head_tokens, rows.head_pages, rows.own_tokens)
      slots = rows.table.shape[1] * self._page_tokens
      mask = bounds.mask(slots, self._page_tokens)
      context = self._span(pages, rows.table, mask)
    _, keys, values = self._policy.read(
      params,
      rows.tokens,
      rows.positions,
      rows.segment_ids,
      dtype=self._dtype,
      context=context,
      partition=self._partition,
    )
    return self._written(pages, keys, values, rows.write)

  def _decode(
    self, params: Params, pages: Pages, chunk: Chunk
  ) -> tuple[Pages, Sampled]:
    """Samples a page's worth of tokens for each row, [B, page tokens].

    Where sampling truncates, with their support [B, page tokens, ceil(V / 8)].
    """
    spans = self._spans(pages, chunk)
    tail = kv_cache.empty_tail(
      self._policy.config,
      rows=len(chunk.pending),
      slots=self._page_tokens,
      dtype=self._dtype,
      unstacked=self.unstacked,
    )

    def step(carry, index):
      pending, tail = carry
      hidden, tail = self._policy.extend(
        params,
        pending[:, None],
        (chunk.positions + index)[:, None],
        spans,
        tail,
        partition=self._partition,
      )
      logits = self._policy.logits(
        params, hidden[:, 0], vocab_first=self.unstacked
      )
      uniforms = sampling.token_uniforms(chunk.keys, chunk.counts + index)
      sampled = sampling.sample(
        logits,
        uniforms,
        sampling=self._sampling,
        vocab_first=self.unstacked,
      )
      return (sampled.tokens, tail), sampled

    # The spans stay out of the loop, which only reads them.
    (_, tail), sampled = jax.lax.scan(
      step, (chunk.pending, tail), jnp.arange(self._page_tokens)
    )
    pages = self._written(pages, tail.keys, tail.values, chunk.write[:, None])
    return pages, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), sampled)

  def _spans(self, pages: Pages, chunk: Chunk) -> list[Span] | list[PagedSpan]:
    """What a chunk's rows have cached: read in place where a kernel can."""
    rows = len(chunk.table)
    none = jnp.zeros_like(chunk.lane_tokens)
    everyone = jnp.ones(rows, bool)
    tables = [
      (chunk.lanes, Bounds(chunk.lane_tokens, none, none), chunk.in_lane),
      (
        chunk.table,
        Bounds(chunk.head_tokens, chunk.head_pages, chunk.own_tokens),
        everyone,
      ),
    ]
    tables = [each for each in tables if each[0].shape[1]]
    if all(self._reads_pages(pages, rows, table) for table, _, _ in tables):
      return [
        PagedSpan(
          pages.keys,
          pages.values,
          pages.key_scales,
          pages.value_scales,
          table,
          *bounds,
          readers,
        )
        for table, bounds, readers in tables
      ]

    def mask(table, bounds, readers):
      slots = bounds.mask(table.shape[1] * self._page_tokens, self._page_tokens)
      return jnp.repeat(slots, rows // len(slots), axis=0) & readers[:, None]

    return [self._span(pages, each[0], mask(*each)) for each in tables]

  def _reads_pages(self, pages: Pages, rows: int, table: jax.Array) -> bool:
    """Whether attention reads the pages where they are."""
    if self.unstacked:
      return False
    config = self._policy.config
    shape = (rows, config.num_heads, config.head_dim)
    return paged.supported(
      jax.ShapeDtypeStruct(shape, self._dtype),
      pages.keys,
      table,
      partition=self._partition,
    )

  def _span(self, pages: Pages, table: jax.Array, mask: jax.Array) -> Span:
    """The pages of a table [Q, n], one behind the other."""
    table = table.reshape(self._replicas, -1, table.shape[1])

    def gather(layer: jax.Array) -> jax.Array:
      """[R, pages, M, page tokens, ...] to [Q, M, n * page tokens, ...]."""
      found = jax.vmap(lambda mine, where: mine[where])(layer, table)
      heads_first = jnp.moveaxis(found, 3, 2)
      shape = heads_first.shape
      return heads_first.reshape(-1, shape[2], shape[3] * shape[4], *shape[5:])

    def restored(layer: jax.Array, scales: jax.Array | None) -> jax.Array:
      found = gather(layer)
      if scales is None:
        return found.astype(self._dtype)
      exact = found.astype(jnp.float32) * gather(scales)[..., None]
      return exact.astype(self._dtype)

    keys = self._by_layer(restored, pages.keys, pages.key_scales)
    values = self._by_layer(restored, pages.values, pages.value_scales)
    return Span.of(keys, values, mask)

  def _written(
    self, pages: Pages, keys: Layers, values: Layers, where: jax.Array
  ) -> Pages:
    """The pages [B, n] take what the rows hold [B, M, n * page tokens, H]."""
    places = where.reshape(self._replicas, -1)

    def scatter(layer: jax.Array, new: jax.Array) -> jax.Array:
      heads, rest = new.shape[1], new.shape[3:]
      apart = new.reshape(-1, heads, where.shape[1], self._page_tokens, *rest)
      by_page = jnp.moveaxis(apart, 2, 1).reshape(
        *places.shape, heads, self._page_tokens, *rest
      )
      return jax.vmap(lambda mine, at, x: mine.at[at].set(x))(
        layer, places, by_page.astype(layer.dtype)
      )

    def put(
      stored: Layers, scales: Layers | None, new: Layers
    ) -> tuple[Layers, Layers | None]:
      if scales is None:
        return self._by_layer(scatter, stored, new), None
      new_scales = self._by_layer(_scales, new)
      whole = self._by_layer(_quantized, new, new_scales)
      return (
        self._by_layer(scatter, stored, whole),
        self._by_layer(scatter, scales, new_scales),
      )

    stored_keys, key_scales = put(pages.keys, pages.key_scales, keys)
    stored_values, value_scales = put(pages.values, pages.value_scales, values)
    return Pages(stored_keys, stored_values, key_scales, value_scales)

  def _by_layer(self, function: Callable, *layers: Layers | None) -> Layers:
    """``function`` of each layer's arrays, and of None where there are none."""
    if not self.unstacked:
      return jax.vmap(function)(*layers)
    count = range(self._policy.config.num_layers)
    return tuple(
      function(*(each and each[layer] for each in layers)) for layer in count
    )


def _scales(x: jax.Array) -> jax.Array:
  """Of int8 entries for x [..., H]: float32 [...]."""
  return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / _INT8_MAX


def _quantized(x: jax.Array, scales: jax.Array) -> jax.Array:
  """x [..., H] in whole multiples of its scales; of zeros, zeros."""
  safe = jnp.where(scales > 0, scales, 1.0)[..., None]
  return jnp.round(x.astype(jnp.float32) / safe)


def _page_shardings(
  config: ModelConfig, mesh: Mesh, *, unstacked: bool, quantized: bool
) -> Pages:
  """Left to the compiler, programs may return pages that are cut differently,
  and would compile once for each cut."""
  table = rules.ROLLOUT_RULES
  axes = (table["rows"], None, table["kv_heads"], None, None)

  def layers(*axes: Any) -> Any:
    if unstacked:
      return (NamedSharding(mesh, PartitionSpec(*axes)),) * config.num_layers
    return NamedSharding(mesh, PartitionSpec(None, *axes))

  scales = layers(*axes[:-1]) if quantized else None
  return Pages(layers(*axes), layers(*axes), scales, scales)


def request_keys(root: jax.Array, request_ids: jax.Array) -> jax.Array:
  """A key's data per request [B, ...], from ids [B, 2] of group and sample."""

  def key(ids: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(root, ids[0]), ids[1])
    return jax.random.key_data(key)

  return jax.vmap(key)(request_ids)
