"""The sampler's programs: prompts into pages, and pages into sampled tokens."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.config import ModelConfig
from darl_jax.models import kv_cache
from darl_jax.models.kv_cache import Layers, Span
from darl_jax.models.transformer import Policy
from darl_jax.rollout import sampling
from darl_jax.rollout.sampling import Sampled, Sampling
from darl_jax.sharding import rules
from darl_jax.types import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """The paged cache on the device.

  Attributes:
    keys: Layers of [R, pages, M, page tokens, H], rotated; R data slices of the
      mesh hold pages of their own.
    values: Layers of [R, pages, M, page tokens, H].
  """

  keys: Layers
  values: Layers


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
    context: int32 [B], tokens in them.
  """

  tokens: np.ndarray
  positions: np.ndarray
  segment_ids: np.ndarray
  write: np.ndarray
  table: np.ndarray
  context: np.ndarray


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
    table: int32 [B, n], the row's own pages; without lanes the prefix's, too.
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
    unstacked: bool,
    mesh: Mesh,
  ):
    """Compiles nothing yet.

    Args:
      policy: The model.
      sampling: How a token is drawn.
      page_tokens: Slots of a page: tokens that a decode dispatch samples.
      dtype: Of activations and cache.
      unstacked: Whether parameters and pages are kept layer by layer.
      mesh: The rollout mesh.
    """
    self._policy = policy
    self._sampling = sampling
    self._page_tokens = page_tokens
    self._dtype = dtype
    self.unstacked = unstacked
    self._replicas = mesh.shape["data"]
    self._partition = rules.partition(mesh, rules.ROLLOUT_RULES)
    rows = rules.rows_sharding(mesh, rules.ROLLOUT_RULES)
    self._pages = _page_shardings(policy.config, mesh, unstacked)
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
      layers, zeros = config.num_layers, lambda *s: jnp.zeros(s, self._dtype)

      def each() -> Layers:
        if self.unstacked:
          return tuple(zeros(*shape) for _ in range(layers))
        return zeros(layers, *shape)

      return Pages(each(), each())

    return make

  def _prefill(self, params: Params, pages: Pages, rows: Rows) -> Pages:
    """Fills pages with the keys and values of packed rows."""
    context = None
    if rows.table.shape[1]:
      slots = jnp.arange(rows.table.shape[1] * self._page_tokens)
      context = self._span(
        pages, rows.table, slots[None] < rows.context[:, None]
      )
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
    spans = []
    if chunk.lanes.shape[1]:
      slots = jnp.arange(chunk.lanes.shape[1] * self._page_tokens)
      mask = slots[None] < chunk.lane_tokens[:, None]
      spans.append(self._span(pages, chunk.lanes, mask))
    if chunk.table.shape[1]:
      slots = jnp.arange(chunk.table.shape[1] * self._page_tokens)[None]
      own = slots - chunk.head_pages[:, None] * self._page_tokens
      mask = (slots < chunk.head_tokens[:, None]) | (
        (own >= 0) & (own < chunk.own_tokens[:, None])
      )
      spans.append(self._span(pages, chunk.table, mask))
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
      unembedding = self._policy.unembedding(params).astype(hidden.dtype)
      logits = jnp.einsum(
        "bd,vd->bv",
        hidden[:, 0],
        unembedding,
        preferred_element_type=jnp.float32,
      )
      uniforms = sampling.token_uniforms(chunk.keys, chunk.counts + index)
      sampled = sampling.sample(logits, uniforms, sampling=self._sampling)
      return (sampled.tokens, tail), sampled

    # The spans stay out of the loop, which only reads them.
    (_, tail), sampled = jax.lax.scan(
      step, (chunk.pending, tail), jnp.arange(self._page_tokens)
    )
    pages = self._written(pages, tail.keys, tail.values, chunk.write[:, None])
    return pages, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), sampled)

  def _span(self, pages: Pages, table: jax.Array, mask: jax.Array) -> Span:
    """The pages of a table [Q, n], one behind the other."""
    table = table.reshape(self._replicas, -1, table.shape[1])

    def gather(layer: jax.Array) -> jax.Array:
      """From [R, pages, M, page tokens, H] to [Q, M, n * page tokens, H]."""
      found = jax.vmap(lambda mine, where: mine[where])(layer, table)
      heads_first = jnp.moveaxis(found, 3, 2)
      shape = heads_first.shape
      return heads_first.reshape(-1, shape[2], shape[3] * shape[4], shape[5])

    keys, values = (
      self._by_layer(gather, layers) for layers in (pages.keys, pages.values)
    )
    return Span.of(keys, values, mask)

  def _written(
    self, pages: Pages, keys: Layers, values: Layers, where: jax.Array
  ) -> Pages:
    """The pages [B, n] take what the rows hold [B, M, n * page tokens, H]."""
    places = where.reshape(self._replicas, -1)

    def scatter(layer: jax.Array, new: jax.Array) -> jax.Array:
      heads, width = new.shape[1], new.shape[3]
      apart = new.reshape(-1, heads, where.shape[1], self._page_tokens, width)
      by_page = jnp.moveaxis(apart, 2, 1).reshape(
        *places.shape, heads, self._page_tokens, width
      )
      return jax.vmap(lambda mine, at, x: mine.at[at].set(x))(
        layer, places, by_page.astype(layer.dtype)
      )

    return Pages(
      self._by_layer(scatter, pages.keys, keys),
      self._by_layer(scatter, pages.values, values),
    )

  def _by_layer(self, function: Callable, *layers: Layers) -> Layers:
    if self.unstacked:
      return tuple(map(function, *layers))
    return jax.vmap(function)(*layers)


def _page_shardings(config: ModelConfig, mesh: Mesh, unstacked: bool) -> Pages:
  """Left to the compiler, programs may return pages that are cut differently,
  and would compile once for each cut."""
  table = rules.ROLLOUT_RULES
  axes = (table["rows"], None, table["kv_heads"], None, None)
  if unstacked:
    layers = (NamedSharding(mesh, PartitionSpec(*axes)),) * config.num_layers
  else:
    layers = NamedSharding(mesh, PartitionSpec(None, *axes))
  return Pages(layers, layers)


def request_keys(root: jax.Array, request_ids: jax.Array) -> jax.Array:
  """A key's data per request [B, ...], from ids [B, 2] of group and sample."""

  def key(ids: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(root, ids[0]), ids[1])
    return jax.random.key_data(key)

  return jax.vmap(key)(request_ids)
