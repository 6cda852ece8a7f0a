"""The sampler's programs, given pages and tables by hand."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh

from darl_jax.config import ModelConfig
from darl_jax.models import presets
from darl_jax.models.transformer import Policy
from darl_jax.rollout import decode as decode_lib
from darl_jax.rollout.decode import Chunk, Decoder, Pages, Rows, request_keys
from darl_jax.rollout.sampling import Sampling
from darl_jax.sharding import meshes

_VOCAB, _PAGE, _PAGES = 12, 4, 12


@functools.cache
def _policy():
  config = presets.nano() | dict(
    num_layers=2, embed_dim=16, mlp_dim=24, num_heads=4, head_dim=8
  )
  policy = Policy(ModelConfig(**config), vocab_size=_VOCAB)
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  params = jax.tree.map(
    lambda leaf: (0.5 * rng.normal(size=leaf.shape)).astype(np.float32), shapes
  )
  return policy, params


@functools.cache
def _decoder(
  *,
  temperature=1.0,
  page=_PAGE,
  unstacked=True,
  dtype="float32",
  cache_dtype="",
):
  mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), meshes.ROLLOUT_AXES)
  return Decoder(
    _policy()[0],
    sampling=Sampling(temperature=temperature),
    page_tokens=page,
    dtype=jnp.dtype(dtype),
    cache_dtype=jnp.dtype(cache_dtype or dtype),
    unstacked=unstacked,
    mesh=mesh,
  )


def _params(unstacked=True):
  policy, params = _policy()
  return policy.unstacked(params) if unstacked else params


@functools.cache
def _keys(count, seed=0):
  ids = jnp.stack([jnp.zeros(count, jnp.int32), jnp.arange(count)], axis=1)
  return np.asarray(request_keys(jax.random.key(seed), ids))


def _garbage(pages):
  """What earlier sequences may have left, loud enough to be heard."""
  return jax.tree.map(lambda x: jnp.full_like(x, 50.0), pages)


def _rows(pieces, *, width=8, table_pages=0, page=_PAGE):
  """One row for each piece: tokens, first position, pages, pages before."""
  count = len(pieces)
  rows = Rows(
    tokens=np.zeros((count, width), np.int32),
    positions=np.zeros((count, width), np.int32),
    segment_ids=np.zeros((count, width), np.int32),
    write=np.zeros((count, width // page), np.int32),
    table=np.zeros((count, table_pages), np.int32),
    head_tokens=np.zeros(count, np.int32),
    head_pages=np.zeros(count, np.int32),
    own_tokens=np.zeros(count, np.int32),
  )
  for index, (tokens, start, pages, before) in enumerate(pieces):
    length = len(tokens)
    rows.tokens[index, :length] = tokens
    rows.positions[index, :length] = np.arange(start, start + length)
    rows.segment_ids[index, :length] = 1
    rows.write[index, : len(pages)] = pages
    rows.table[index, : len(before)] = before
    rows.own_tokens[index] = start
  return rows


@dataclasses.dataclass
class _Row:
  """What one row of a chunk needs: as of ``Chunk``, but lists."""

  pending: int
  head: list  # Pages of the prefix.
  head_tokens: int
  write: int
  own: list = dataclasses.field(default_factory=list)
  count: int = 0


def _chunk(rows, *, table_pages=4, lanes=0, page=_PAGE, keys=None):
  """``lanes``: how many of them the rows make; 0 for none."""
  count = len(rows)
  zeros = functools.partial(np.zeros, dtype=np.int32)
  chunk = Chunk(
    pending=np.array([row.pending for row in rows], np.int32),
    positions=np.array(
      [row.head_tokens + page * len(row.own) for row in rows], np.int32
    ),
    counts=np.array([row.count for row in rows], np.int32),
    keys=_keys(count) if keys is None else keys,
    lanes=zeros((lanes or count, 2 if lanes else 0)),
    lane_tokens=zeros(lanes or count),
    in_lane=np.full(count, lanes > 0),
    table=zeros((count, table_pages)),
    head_tokens=zeros(count),
    head_pages=zeros(count),
    own_tokens=np.array([page * len(row.own) for row in rows], np.int32),
    write=np.array([row.write for row in rows], np.int32),
  )
  for index, row in enumerate(rows):
    table = row.own if lanes else row.head + row.own
    chunk.table[index, : len(table)] = table
    if lanes:
      lane = index // (count // lanes)
      chunk.lanes[lane, : len(row.head)] = row.head
      chunk.lane_tokens[lane] = row.head_tokens
    else:
      chunk.head_tokens[index] = row.head_tokens
      chunk.head_pages[index] = len(row.head)
  return chunk


@jax.jit
def _logits(tokens):
  """float32 [B, T, V], of what follows each token; rows have no padding."""
  policy, params = _policy()
  params = jax.tree.map(jnp.asarray, params)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
  hidden = policy.hidden(params, tokens, positions, jnp.ones_like(tokens))
  return hidden @ policy.unembedding(params).T


def _check_recorded(prompts, sampled, *, temperature=1.0, atol=1e-5):
  """Log-probs and entropy against a whole pass; prompts of one length."""
  tokens = np.concatenate([np.array(prompts), sampled.tokens], axis=1)
  start = len(prompts[0])
  logits = np.asarray(_logits(tokens), np.float64)[:, start - 1 : -1]
  logits /= temperature
  logits -= logits.max(-1, keepdims=True)
  logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  entropy = -np.sum(np.exp(logprobs) * logprobs, axis=-1)
  want = np.take_along_axis(logprobs, sampled.tokens[..., None], 2)[..., 0]
  np.testing.assert_allclose(sampled.logprobs, want, atol=atol)
  np.testing.assert_allclose(sampled.entropy, entropy, atol=atol)


def _join(*parts):
  return jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)


_PROMPTS = ([3, 1, 2, 9, 11, 4], [5, 7, 0, 0, 8, 1])


def _read_prompts(decoder, params, *, pages=None):
  """Both prompts but their last tokens: into pages 2, 3 and 4, 5."""
  pages = _garbage(decoder.empty_pages(_PAGES)) if pages is None else pages
  rows = _rows(
    [(p[:-1], 0, [2 + 2 * i, 3 + 2 * i], []) for i, p in enumerate(_PROMPTS)]
  )
  return decoder.prefill(params, pages, rows)


def _prompt_row(index, **fields):
  return _Row(
    pending=_PROMPTS[index][-1],
    head=[2 + 2 * index, 3 + 2 * index],
    head_tokens=len(_PROMPTS[index]) - 1,
    **fields,
  )


class DecoderTest(parameterized.TestCase):
  @parameterized.parameters(0.5, 1.0, 2.0)
  def test_samples_and_records_the_tempered_distribution(self, temperature):
    samples = 2000
    decoder = _decoder(temperature=temperature, page=1)
    pages = decoder.prefill(
      _params(),
      _garbage(decoder.empty_pages(_PAGES)),
      _rows([([3, 1], 0, [4, 5], [])], page=1),
    )
    row = _Row(pending=2, head=[4, 5], head_tokens=2, write=0)
    chunk = _chunk([row] * samples, page=1, keys=_keys(samples))
    _, got = decoder.decode(_params(), pages, chunk)
    logits = np.asarray(_logits(np.array([[3, 1, 2]])))[0, -1]
    probs = np.exp(logits.astype(np.float64) / temperature)
    probs /= probs.sum()
    tokens = np.asarray(got.tokens)[:, 0]
    frequency = np.bincount(tokens, minlength=_VOCAB) / samples
    # Five standard deviations of a frequency at most.
    bound = 5 * np.sqrt(probs * (1 - probs) / samples) + 1e-9
    np.testing.assert_array_less(np.abs(frequency - probs), bound)
    _check_recorded([[3, 1, 2]] * samples, got, temperature=temperature)

  @parameterized.product(unstacked=(True, False), lanes=(0, 2))
  def test_chunks_follow_prefixes_and_chunks(self, unstacked, lanes):
    """Two samples of each of two prompts, whose last pages are not full."""
    decoder, params = _decoder(unstacked=unstacked), _params(unstacked)
    pages = _read_prompts(decoder, params)
    first = [_prompt_row(i // 2, write=6 + i) for i in range(4)]
    pages, one = decoder.decode(params, pages, _chunk(first, lanes=lanes))
    second = [
      _prompt_row(i // 2, write=1, own=[6 + i], count=_PAGE) for i in range(4)
    ]
    for i, row in enumerate(second):
      row.pending = int(one.tokens[i, -1])
    _, two = decoder.decode(params, pages, _chunk(second, lanes=lanes))
    got = _join(one, two)
    self.assertEqual(got.tokens.shape, (4, 2 * _PAGE))
    self.assertEqual(got.tokens.dtype, np.int32)
    _check_recorded([_PROMPTS[i // 2] for i in range(4)], got)
    # However it is laid out.
    np.testing.assert_array_equal(got.tokens, _by_table().tokens)

  @parameterized.product(
    cache_dtype=("", "int8"), lanes=(0, 2), in_place=(True, False)
  )
  def test_pages_may_be_read_in_place(self, cache_dtype, lanes, in_place):
    """By the kernel's definition, which other devices than TPUs run."""
    # Its own: the cached decoders have traced the other way.
    decoder = _decoder.__wrapped__(unstacked=False, cache_dtype=cache_dtype)
    params = _params(unstacked=False)
    pages = _read_prompts(decoder, params)
    chunk = _chunk(
      [_prompt_row(i // 2, write=6 + i) for i in range(4)], lanes=lanes
    )
    if lanes:
      # The last row is of the first prompt, whose lane is another.
      stray = _prompt_row(0, write=9)
      chunk.in_lane[3], chunk.head_pages[3] = False, len(stray.head)
      chunk.head_tokens[3], chunk.pending[3] = stray.head_tokens, stray.pending
      chunk.table[3, : len(stray.head)] = stray.head
    with mock.patch.object(
      decode_lib.paged, "supported", return_value=in_place
    ) as asked:
      new, got = decoder.decode(params, pages, chunk)
    self.assertTrue(asked.called)
    prompts = [_PROMPTS[i // 2] for i in range(4)]
    if lanes:
      prompts[3] = _PROMPTS[0]
    _check_recorded(prompts, got, atol=0.05 if cache_dtype else 1e-5)
    if cache_dtype:
      self.assertEqual(new.keys.dtype, jnp.int8)
    else:
      np.testing.assert_array_equal(got.tokens[:3], _by_table().tokens[:3, :4])

  def test_int8_rounds_to_the_nearest_of_a_token_and_head(self):
    decoder = _decoder(unstacked=False, cache_dtype="int8")
    exact = _decoder(unstacked=False)
    params = _params(unstacked=False)
    rounded, want = (_read_prompts(each, params) for each in (decoder, exact))
    for name in ("key", "value"):
      stored, scales = (
        np.asarray(getattr(rounded, f"{name}{part}"), np.float32)
        for part in ("s", "_scales")
      )
      whole = np.asarray(getattr(want, f"{name}s"))
      read = np.s_[:, :, 2:6]
      error = np.abs(stored * scales[..., None] - whole)[read]
      bound = 0.501 * scales[read][..., None] + 1e-9
      self.assertTrue(np.all(error < bound))
      # All of the range is used.
      self.assertEqual(set(np.abs(stored[read]).max(-1).reshape(-1)), {127.0})

  def test_the_cut_into_chunks_does_not_matter(self):
    decoder = _decoder(page=2 * _PAGE)
    pages = _garbage(decoder.empty_pages(_PAGES))
    pieces = [(p[:-1], 0, [2 + i], []) for i, p in enumerate(_PROMPTS)]
    pages = decoder.prefill(_params(), pages, _rows(pieces, page=2 * _PAGE))
    rows = [
      _Row(
        pending=_PROMPTS[i // 2][-1], head=[2 + i // 2], head_tokens=5, write=0
      )
      for i in range(4)
    ]
    _, got = decoder.decode(_params(), pages, _chunk(rows, page=2 * _PAGE))
    np.testing.assert_array_equal(got.tokens, _by_table().tokens)
    np.testing.assert_allclose(got.logprobs, _by_table().logprobs, atol=1e-5)

  def test_only_the_pages_to_write_change(self):
    decoder = _decoder()
    pages = _read_prompts(decoder, _params())
    before = jax.tree.map(np.array, pages)
    for layer in before.keys:
      kept = [1, *range(6, _PAGES)]
      np.testing.assert_array_equal(layer[:, kept], 50.0)
      self.assertFalse(np.any(layer[:, [2, 4]] == 50.0))
    rows = [_prompt_row(0, write=7), _prompt_row(1, write=9)]
    # A row without a sample.
    rows.append(_Row(pending=0, head=[], head_tokens=0, write=0))
    pages, _ = decoder.decode(_params(), pages, _chunk(rows))
    others = [i for i in range(_PAGES) if i not in (0, 7, 9)]
    for was, now in zip(*map(jax.tree.leaves, (before, pages)), strict=True):
      now = np.asarray(now)
      np.testing.assert_array_equal(now[:, others], was[:, others])
      self.assertFalse(np.any(now[:, [7, 9]] == 50.0))

  def test_a_row_does_not_depend_on_the_others(self):
    decoder = _decoder()
    want = _by_table().tokens[:, :_PAGE]
    # The samples from the last to the first, and none between them.
    order = [3, None, 2, 1, None, 0]
    keys = np.zeros((6, 2), np.uint32)
    rows = []
    for at, index in enumerate(order):
      if index is None:
        rows.append(_Row(pending=7, head=[], head_tokens=0, write=0))
      else:
        rows.append(_prompt_row(index // 2, write=6 + index))
        keys[at] = _keys(4)[index]
    pages = _read_prompts(decoder, _params())
    _, got = decoder.decode(_params(), pages, _chunk(rows, keys=keys))
    for at, index in enumerate(order):
      if index is not None:
        np.testing.assert_array_equal(got.tokens[at], want[index])

  def test_samples_of_a_prompt_and_steps_draw_apart(self):
    decoder = _decoder(temperature=100.0)
    pages = _read_prompts(decoder, _params())
    chunk = _chunk([_prompt_row(0, write=0)] * 50)
    pages, got = decoder.decode(_params(), pages, chunk)
    # Nearly uniform over 12 tokens: four equal draws in a row are rare.
    self.assertLess(np.mean(np.ptp(got.tokens, axis=1) == 0), 0.05)
    self.assertGreater(len(np.unique(got.tokens, axis=0)), 45)
    # The next draws are others, and the same number draws the same.
    again = dataclasses.replace(chunk, counts=chunk.counts + 1)
    _, later = decoder.decode(_params(), pages, again)
    self.assertGreater(np.mean(later.tokens[:, 0] != got.tokens[:, 0]), 0.7)
    self.assertGreater(np.mean(later.tokens[:, 0] == got.tokens[:, 1]), 0.7)

  @parameterized.parameters(True, False)
  def test_a_prefix_is_read_in_parts(self, unstacked):
    decoder, params = _decoder(unstacked=unstacked), _params(unstacked)
    tokens = [*_PROMPTS[0], *_PROMPTS[1]][:11]
    other = tokens[::-1][:7]
    empty = lambda: _garbage(decoder.empty_pages(_PAGES))  # noqa: E731
    whole = decoder.prefill(
      params,
      empty(),
      _rows([(tokens, 0, [1, 2, 3], []), (other, 0, [4, 5], [])], width=12),
    )
    parts = decoder.prefill(
      params,
      empty(),
      _rows([(tokens[:4], 0, [1], []), (other[:4], 0, [4], [])]),
    )
    parts = decoder.prefill(
      params,
      parts,
      _rows(
        [(tokens[4:], 4, [2, 3], [1]), (other[4:], 4, [5], [4])], table_pages=3
      ),
    )
    stacked = 0 if unstacked else 1
    for one, two in zip(*map(jax.tree.leaves, (whole, parts)), strict=True):
      one, two = (
        np.moveaxis(np.asarray(x), [stacked + 1, stacked + 3], [0, 1])
        for x in (one, two)
      )
      for page, filled in ((1, 4), (2, 4), (3, 3), (4, 4), (5, 3)):
        np.testing.assert_allclose(
          one[page, :filled], two[page, :filled], atol=1e-5
        )

  def test_packed_sequences_do_not_see_each_other(self):
    decoder = _decoder()
    packed = _rows([([], 0, [4, 5, 2, 3], [])], width=16)
    # The second prompt first; each begins at a page's first slot.
    for segment, (slot, prompt) in enumerate(((0, 1), (8, 0)), 1):
      piece = slice(slot, slot + 5)
      packed.tokens[0, piece] = _PROMPTS[prompt][:-1]
      packed.positions[0, piece] = np.arange(5)
      packed.segment_ids[0, piece] = segment
    pages = _garbage(decoder.empty_pages(_PAGES))
    pages = decoder.prefill(_params(), pages, packed)
    rows = [_prompt_row(i // 2, write=0) for i in range(4)]
    _, got = decoder.decode(_params(), pages, _chunk(rows))
    np.testing.assert_array_equal(got.tokens, _by_table().tokens[:, :_PAGE])
    np.testing.assert_allclose(
      got.logprobs, _by_table().logprobs[:, :_PAGE], atol=1e-5
    )


@functools.cache
def _by_table():
  """Two chunks of two samples of each prompt, without lanes."""
  decoder = _decoder()
  pages = _read_prompts(decoder, _params())
  parts = []
  rows = [_prompt_row(i // 2, write=6 + i) for i in range(4)]
  for _ in range(2):
    pages, sampled = decoder.decode(_params(), pages, _chunk(rows))
    parts.append(sampled)
    rows = [
      _prompt_row(i // 2, write=1, own=[6 + i], count=_PAGE) for i in range(4)
    ]
    for i, row in enumerate(rows):
      row.pending = int(sampled.tokens[i, -1])
  return _join(*parts)


class PagesTest(parameterized.TestCase):
  @parameterized.product(
    unstacked=(True, False),
    dtype=("float32", "bfloat16"),
    cache_dtype=("", "int8"),
  )
  def test_are_as_announced(self, unstacked, dtype, cache_dtype):
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    decoder = Decoder(
      _policy()[0],
      sampling=Sampling(temperature=1.0),
      page_tokens=_PAGE,
      dtype=jnp.dtype(dtype),
      cache_dtype=jnp.dtype(cache_dtype or dtype),
      unstacked=unstacked,
      mesh=Mesh(devices, meshes.ROLLOUT_AXES),
    )
    pages, abstract = decoder.empty_pages(5), decoder.abstract_pages(5)
    self.assertIsInstance(pages, Pages)
    layer = (4, 5, 2, _PAGE, 8)
    shapes = [layer] * 4 if unstacked else [(2, *layer)] * 2
    if cache_dtype:
      shapes += [shape[:-1] for shape in shapes]
    self.assertEqual([x.shape for x in jax.tree.leaves(pages)], shapes)
    for leaf, want in zip(
      *map(jax.tree.leaves, (pages, abstract)), strict=True
    ):
      self.assertEqual(leaf.shape, want.shape)
      self.assertEqual(leaf.dtype, want.dtype)
      self.assertTrue(leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim))
      self.assertFalse(np.any(np.asarray(leaf)))
    for stored, scales in (
      (pages.keys, pages.key_scales),
      (pages.values, pages.value_scales),
    ):
      # Each device holds its slice's pages, of its half of the heads.
      for leaf in jax.tree.leaves(stored):
        self.assertEqual(leaf.dtype, jnp.dtype(cache_dtype or dtype))
        shard = leaf.addressable_shards[0].data
        self.assertEqual(shard.shape[-5:], (1, 5, 1, _PAGE, 8))
      for leaf in jax.tree.leaves(scales):
        self.assertEqual(leaf.dtype, jnp.float32)
        shard = leaf.addressable_shards[0].data
        self.assertEqual(shard.shape[-4:], (1, 5, 1, _PAGE))

  def test_compiles_are_counted_by_width(self):
    decoder = Decoder(
      _policy()[0],
      sampling=Sampling(temperature=1.0),
      page_tokens=_PAGE,
      dtype=jnp.float32,
      cache_dtype=jnp.dtype(jnp.float32),
      unstacked=True,
      mesh=Mesh(np.array(jax.devices()[:1]).reshape(1, 1), meshes.ROLLOUT_AXES),
    )
    self.assertEqual(decoder.compiles(), {"prefill": 0, "decode": 0})
    pages = decoder.empty_pages(3)
    for _ in range(2):
      pages = decoder.prefill(_params(), pages, _rows([([1, 2], 0, [1], [])]))
    self.assertEqual(decoder.compiles(), {"prefill": 1, "decode": 0})
    row = _Row(pending=3, head=[1], head_tokens=2, write=2)
    for width in (1, 2, 1):
      chunk = _chunk([row], table_pages=width)
      pages, _ = decoder.decode(_params(), pages, chunk)
    self.assertEqual(decoder.compiles(), {"prefill": 1, "decode": 2})

  def test_are_donated(self):
    decoder = _decoder()
    empty = decoder.empty_pages(_PAGES)
    read = _read_prompts(decoder, _params(), pages=empty)
    decoder.decode(_params(), read, _chunk([_prompt_row(0, write=6)] * 4))
    for leaf in jax.tree.leaves((empty, read)):
      self.assertTrue(leaf.is_deleted())


class RequestKeysTest(parameterized.TestCase):
  def _ids(self, prompts, samples, first=0):
    groups = np.repeat(np.arange(prompts) + first, samples)
    return jnp.stack(
      [jnp.asarray(groups), jnp.tile(jnp.arange(samples), prompts)], axis=1
    )

  def test_follow_from_group_and_sample(self):
    root = jax.random.key(0)
    whole = np.asarray(request_keys(root, self._ids(4, 3)))
    part = np.asarray(request_keys(root, self._ids(1, 3, first=2)))
    np.testing.assert_array_equal(part, whole[6:9])
    self.assertLen(np.unique(whole, axis=0), 12)
    other = np.asarray(request_keys(jax.random.key(1), self._ids(4, 3)))
    self.assertFalse(np.any(np.all(other == whole, axis=1)))
