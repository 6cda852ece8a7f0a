"""The policy: conventions of published models, packing, caching, dtypes."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.config import ModelConfig
from darl_jax.kernels.partition import Partition
from darl_jax.kernels.token_logprob import ops as logprob_ops
from darl_jax.models import kv_cache, presets, transformer
from darl_jax.models.kv_cache import Span
from darl_jax.sharding import meshes, rules

_VOCAB = 40

_FAMILIES = dict(
  llama=dict(qk_norm=False),
  qwen2=dict(qk_norm=False, qkv_bias=True),
  qwen3=dict(tie_embeddings=False, num_layers=2),
  one_kv_head=dict(num_kv_heads=1),
  as_many_kv_heads=dict(num_kv_heads=4),
  qwen3_moe=dict(
    num_experts=5,
    experts_per_token=2,
    expert_mlp_dim=10,
    num_layers=2,
    remat="layer",
  ),
  many_layers=dict(num_layers=transformer._UNROLLED_LAYERS + 1),
)


def _config(**changes) -> ModelConfig:
  small = dict(num_layers=1, embed_dim=16, mlp_dim=24, num_heads=4, head_dim=8)
  return ModelConfig(**presets.nano() | small | changes)


@functools.cache
def _policy(family: str):
  """A policy and parameters in which no scale is 1 and no bias is 0."""
  policy = transformer.Policy(_config(**_FAMILIES[family]), vocab_size=_VOCAB)
  return policy, _noisy(policy)


def _noisy(policy, seed=0):
  """Numpy parameters, made without compiling anything."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(policy.init, jax.random.key(0))

  def make(path, leaf):
    scale = "norm" in path[-1].key
    return np.asarray(scale + 0.3 * rng.normal(size=leaf.shape), leaf.dtype)

  return jax.tree_util.tree_map_with_path(make, shapes)


@functools.partial(jax.jit, static_argnums=0)
def _hidden(policy, params, tokens, positions, segment_ids):
  return policy.hidden(params, tokens, positions, segment_ids)


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(policy, params, tokens, positions, segment_ids):
  """float32 [B, T]; position 0 holds 0."""
  hidden = policy.hidden(params, tokens, positions, segment_ids)
  logprobs, _ = logprob_ops.token_logprob(
    hidden[:, :-1],
    policy.unembedding(params),
    tokens[:, 1:],
    temperature=1.0,
  )
  return jnp.pad(logprobs, ((0, 0), (1, 0)))


def _tokens(*shape, seed=0, vocab=_VOCAB):
  return np.random.default_rng(seed).integers(vocab, size=shape, dtype=np.int32)


def _whole_rows(tokens):
  """Positions and segment ids of rows that hold one trajectory each."""
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  return positions.astype(np.int32), np.ones(tokens.shape, np.int32)


def _by_family(test):
  return parameterized.named_parameters(*[(n, n) for n in _FAMILIES])(test)


class PackingTest(parameterized.TestCase):
  @parameterized.parameters("llama", "qwen3", "qwen3_moe")
  def test_packed_rows_equal_unpacked_ones(self, family):
    policy, params = _policy(family)
    lengths = (5, 2, 7)
    # One trajectory per row, and the same three behind each other in row 0.
    tokens = _tokens(3, 16)
    positions, segments = _whole_rows(tokens)
    want = np.asarray(_logprobs(policy, params, tokens, positions, segments))
    packed, packed_positions = tokens.copy(), positions.copy()
    packed_segments = np.zeros_like(segments)
    start = 0
    for row, length in enumerate(lengths):
      slots = slice(start, start + length)
      packed[0, slots] = tokens[row, :length]
      packed_positions[0, slots] = np.arange(length)
      packed_segments[0, slots] = row + 1
      start += length
    got = np.asarray(
      _logprobs(policy, params, packed, packed_positions, packed_segments)
    )
    start = 0
    for row, length in enumerate(lengths):
      # The first token of a trajectory is always masked.
      np.testing.assert_allclose(
        got[0, start + 1 : start + length], want[row, 1:length], atol=1e-5
      )
      start += length

  def test_contents_of_padding_change_nothing(self):
    policy, params = _policy("llama")
    tokens = _tokens(3, 16)
    positions, segments = _whole_rows(tokens)
    segments[0, 9:], segments[1, 4:] = 0, 0
    want = np.asarray(_logprobs(policy, params, tokens, positions, segments))
    other, moved = tokens.copy(), positions.copy()
    other[segments == 0] = 7
    moved[segments == 0] = 1000
    got = np.asarray(_logprobs(policy, params, other, moved, segments))
    real = segments > 0
    self.assertFalse(np.array_equal(got[~real], want[~real]))
    np.testing.assert_array_equal(got[real], want[real])

  def test_a_token_does_not_see_later_ones(self):
    policy, params = _policy("llama")
    tokens = _tokens(3, 16)
    other = tokens.copy()
    other[:, 6:] = (other[:, 6:] + 1) % _VOCAB
    got, want = (
      np.asarray(_logprobs(policy, params, t, *_whole_rows(t)))
      for t in (other, tokens)
    )
    np.testing.assert_array_equal(got[:, :6], want[:, :6])
    self.assertGreater(np.abs(got - want)[:, 6:].min(), 0.0)

  def test_a_batch_of_one_equals_the_row_of_eight(self):
    policy, params = _policy("llama")
    tokens = _tokens(8, 16)
    batch = np.asarray(_logprobs(policy, params, tokens, *_whole_rows(tokens)))
    for row in (0, 3, 7):
      alone = tokens[row : row + 1]
      got = _logprobs(policy, params, alone, *_whole_rows(alone))
      np.testing.assert_allclose(got[0], batch[row], atol=1e-5)


@functools.cache
def _program(policy, name, **static):
  return jax.jit(functools.partial(getattr(policy, name), **static))


def _each(function, layers):
  """``function`` of the layers, stacked or apart as they are."""
  new = tuple(function(np.asarray(layer)) for layer in layers)
  return new if isinstance(layers, tuple) else np.stack(new)


def _span(keys, values, mask):
  """Slots without a token hold what would spoil everything, were it read."""

  def spoilt(layer):
    return np.where(mask[:, None, :, None], layer, np.float32(1e6))

  return Span.of(_each(spoilt, keys), _each(spoilt, values), mask)


def _entries(span, which):
  """A span of these of its entries."""
  keys, values = (
    _each(lambda layer: layer[which], layers)
    for layers in (span.keys, span.values)
  )
  return Span(keys, values, span.mask[which])


def _read(
  policy, params, tokens, lengths, *, at=0, context=None, partition=None
):
  """Hidden states of the first ``lengths`` tokens, and the span they make.

  They continue their contexts at positions ``at``; padding is behind them.
  """
  slots = np.arange(tokens.shape[1])
  real = slots[None] < np.asarray(lengths)[:, None]
  positions = np.reshape(at, (-1, 1)) + slots[None]
  read = _program(
    policy, "read", dtype=np.dtype("float32"), partition=partition
  )
  hidden, keys, values = read(
    params,
    np.where(real, tokens, 9),
    np.where(real, positions, 1000).astype(np.int32),
    real.astype(np.int32),
    context=context,
  )
  return np.asarray(hidden), _span(keys, values, real)


def _extend(policy, params, tokens, at, spans, *, sizes, partition=None):
  """Hidden states of tokens [B, T] from positions ``at`` [B] on, and the span
  that they make.

  One dispatch, of ``sizes`` tokens at a time, with a slot to spare.
  """
  stops = np.cumsum(sizes)
  tail = kv_cache.empty_tail(
    policy.config,
    rows=len(tokens),
    slots=int(stops[-1]) + 1,
    dtype=jnp.float32,
    unstacked=isinstance(params["layers"], tuple),
  )
  parts = []
  for here in np.split(np.arange(stops[-1], dtype=np.int32), stops[:-1]):
    positions = np.asarray(at, np.int32)[:, None] + here[None]
    hidden, tail = _program(policy, "extend", partition=partition)(
      params, tokens[:, here], positions, spans, tail
    )
    parts.append(np.asarray(hidden))
  written = np.arange(stops[-1] + 1) < int(tail.length)
  mask = np.broadcast_to(written[None], (len(tokens), len(written)))
  span = _span(tail.keys, tail.values, mask)
  return np.concatenate(parts, axis=1), span


def _kept(params, policy, apart):
  return policy.unstacked(params) if apart else params


class CacheTest(parameterized.TestCase):
  """To read and extend, piece by piece, is the full forward pass."""

  def test_narrow_models_keep_their_kernels(self):
    with mock.patch.object(transformer, "_OUTPUTS_FIRST_DIM", 17):
      policy = transformer.Policy(_config(), vocab_size=_VOCAB)
    params = jax.device_get(jax.jit(policy.init)(jax.random.key(0)))
    apart = policy.unstacked(params)
    for name in ("query", "output"):
      np.testing.assert_array_equal(
        apart["layers"][0]["attention"][name],
        params["layers"]["attention"][name][0],
      )
    tokens = _tokens(2, 6)
    np.testing.assert_allclose(
      _hidden(policy, apart, tokens, *_whole_rows(tokens)),
      _hidden(policy, params, tokens, *_whole_rows(tokens)),
      atol=1e-5,
    )

  @parameterized.product(family=tuple(_FAMILIES), apart=(False, True))
  def test_read_and_extend_equal_the_full_forward(self, family, apart):
    policy, params = _policy(family)
    lengths, width, new = np.array([6, 1, 4]), 6, 4
    rows = _tokens(3, width + new)
    want = np.asarray(_hidden(policy, params, rows, *_whole_rows(rows)))
    params = _kept(params, policy, apart)
    hidden, prompts = _read(policy, params, rows[:, :width], lengths)
    self.assertEqual(isinstance(prompts.keys, tuple), apart)
    self.assertLen(prompts.keys, policy.config.num_layers)
    # Two dispatches of two tokens: the second reads what the first wrote, and
    # the first reads nothing of a span that has no token yet.
    room = _each(lambda layer: layer[:, :, :3], prompts.values)
    before = _span(room, room, np.zeros((3, 3), bool))
    parts = []
    for start in (0, 2):
      at = lengths + start
      tokens = np.take_along_axis(rows, at[:, None] + np.arange(2), axis=1)
      spans = [prompts, before]
      part, before = _extend(policy, params, tokens, at, spans, sizes=(1, 1))
      parts.append(part)
    later = np.concatenate(parts, axis=1)
    for row, length in enumerate(lengths):
      got = np.concatenate([hidden[row, :length], later[row]])
      np.testing.assert_allclose(got, want[row, : length + new], atol=2e-5)

  @parameterized.parameters(("qwen2", False), ("qwen3", True))
  def test_a_context_continues_a_sequence(self, family, apart):
    policy, params = _policy(family)
    # One of them has no context, and one nothing to add.
    first, second = np.array([6, 2, 0, 5]), np.array([3, 5, 4, 0])
    rows = _tokens(4, 9)
    whole = np.asarray(_hidden(policy, params, rows, *_whole_rows(rows)))
    params = _kept(params, policy, apart)
    _, want = _read(policy, params, rows, first + second)
    _, context = _read(policy, params, rows[:, :6], first)
    at = np.minimum(first[:, None] + np.arange(5)[None], 8)
    hidden, got = _read(
      policy,
      params,
      np.take_along_axis(rows, at, axis=1),
      second,
      at=first,
      context=context,
    )
    for row, (start, count) in enumerate(zip(first, second, strict=True)):
      here = slice(start, start + count)
      np.testing.assert_allclose(
        hidden[row, :count], whole[row, here], atol=2e-5
      )
      for mine, all_at_once in zip(got.keys, want.keys, strict=True):
        np.testing.assert_allclose(
          mine[row, :, :, :count], all_at_once[row, :, :, here], atol=2e-5
        )
      for mine, all_at_once in zip(got.values, want.values, strict=True):
        np.testing.assert_allclose(
          mine[row, :, :count], all_at_once[row, :, here], atol=2e-5
        )

  def test_rows_that_share_entries(self):
    """One beginning for all, two prompts, three samples of each."""
    policy, stacked = _policy("qwen3")
    params = policy.unstacked(stacked)
    lengths, samples, new = np.array([4, 2]), 3, 4
    start, prompts, sampled = (
      _tokens(*shape, seed=seed)
      for seed, shape in enumerate([(1, 3), (2, 4), (6, new)])
    )
    rows = np.zeros((6, 3 + 4 + new), np.int32)
    for row, tokens in enumerate(sampled):
      prompt = prompts[row // samples, : lengths[row // samples]]
      said = np.concatenate([start[0], prompt, tokens])
      rows[row, : len(said)] = said
    whole = np.asarray(_hidden(policy, stacked, rows, *_whole_rows(rows)))
    at = np.repeat(3 + lengths, samples)
    want = np.stack([whole[i, n : n + new] for i, n in enumerate(at)])
    _, start = _read(policy, params, start, [3])
    _, prompts = _read(
      policy, params, prompts, lengths, at=3, context=_entries(start, [0, 0])
    )
    # Two tokens at once, then one by one behind them.
    first, own = _extend(
      policy, params, sampled[:, :2], at, [start, prompts], sizes=(2,)
    )
    shared = [own, prompts, start]
    apiece = [
      own,
      _entries(prompts, [0] * samples + [1] * samples),
      _entries(start, [0] * 6),
    ]
    for spans in (shared, apiece):
      second, _ = _extend(
        policy, params, sampled[:, 2:], at + 2, spans, sizes=(1, 1)
      )
      got = np.concatenate([first, second], axis=1)
      np.testing.assert_allclose(got, want, atol=2e-5)

  @parameterized.parameters(False, True)
  def test_several_tokens_at_once_equal_one_by_one(self, apart):
    policy, params = _policy("qwen3")
    tokens = _tokens(2, 7)
    want = np.asarray(_hidden(policy, params, tokens, *_whole_rows(tokens)))
    params = _kept(params, policy, apart)
    # Nothing is before them.
    for sizes in ((3, 3, 1), (1, 1, 1, 3, 1)):
      got, span = _extend(policy, params, tokens, [0, 0], [], sizes=sizes)
      np.testing.assert_array_equal(span.mask, [[True] * 7 + [False]] * 2)
      np.testing.assert_allclose(got, want, atol=2e-5, err_msg=str(sizes))

  def test_keys_and_values_are_of_the_dtype_asked_for(self):
    policy, params = _policy("qwen2")
    tokens = _tokens(2, 4)
    hidden, keys, values = jax.eval_shape(
      functools.partial(policy.read, dtype=jnp.dtype("bfloat16")),
      params,
      tokens,
      *_whole_rows(tokens),
    )
    half = {hidden.dtype, keys.dtype, values.dtype}
    self.assertEqual(half, {jnp.dtype("bfloat16")})
    config = policy.config
    shape = (2, config.num_kv_heads, 4, config.head_dim)
    self.assertEqual(keys.shape, (config.num_layers, *shape))
    tail = kv_cache.empty_tail(config, rows=2, slots=4, dtype=jnp.bfloat16)
    hidden, longer = jax.eval_shape(
      policy.extend, params, tokens, tokens, [], tail
    )
    self.assertEqual(hidden.dtype, jnp.bfloat16)
    self.assertEqual(
      jax.tree.map(lambda x: (x.shape, x.dtype), longer),
      jax.tree.map(lambda x: (x.shape, x.dtype), tail),
    )

  @parameterized.parameters(False, True)
  def test_eight_devices(self, apart):
    policy, params = _policy("qwen2")
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), meshes.ROLLOUT_AXES)
    table = rules.ROLLOUT_RULES
    partition = rules.partition(mesh, table)
    shardings = rules.param_shardings(
      policy.logical_axes, params, mesh=mesh, rules=table
    )
    lengths, samples, new = np.array([5, 1, 3, 4]), 2, 2
    rows = _tokens(8, 5 + new)
    rows[1::2, :5] = rows[::2, :5]
    prompts = rows[::samples, :5]
    at = np.repeat(lengths, samples)
    sampled = np.take_along_axis(rows, at[:, None] + np.arange(new), axis=1)
    # A row's second sample says the same up to its prompt's end.
    sampled[1::2, 0] = (sampled[::2, 0] + 1) % _VOCAB
    for row, tokens in enumerate(sampled):
      rows[row, at[row] : at[row] + new] = tokens
    whole = np.asarray(_hidden(policy, params, rows, *_whole_rows(rows)))
    want = np.stack([whole[i, n : n + new] for i, n in enumerate(at)])
    params = jax.device_put(params, shardings)
    params = _kept(params, policy, apart)

    def cut(span):
      axes = ("data", "tensor", None, None)
      spec = PartitionSpec(*axes if apart else (None, *axes))
      layers = jax.device_put(
        (span.keys, span.values), NamedSharding(mesh, spec)
      )
      return Span(*layers, span.mask)

    # In two parts, the second behind the first.
    parts, context = [], None
    for start, stop in ((0, 2), (2, 5)):
      hidden, span = _read(
        policy,
        params,
        prompts[:, start:stop],
        np.clip(lengths - start, 0, stop - start),
        at=start,
        context=context,
        partition=partition,
      )
      context = cut(span)
      parts.append(context)
      for row, length in enumerate(lengths):
        here = slice(start, min(stop, length))
        count = max(here.stop - start, 0)
        np.testing.assert_allclose(
          hidden[row, :count], whole[samples * row, here][:count], atol=2e-5
        )
    got, _ = _extend(
      policy, params, sampled, at, parts, sizes=(1, 1), partition=partition
    )
    np.testing.assert_allclose(got, want, atol=2e-5)


class ProgramTest(parameterized.TestCase):
  """How the program is built must not change what it computes."""

  def test_scanned_layers_equal_unrolled_ones(self):
    policy, params = _policy("many_layers")
    tokens = _tokens(2, 6)

    def run(params):
      arguments = (params, tokens, *_whole_rows(tokens))
      lowered = jax.jit(lambda *a: policy.hidden(*a)).lower(*arguments)
      return lowered.as_text().count("stablehlo.while"), lowered.compile()(
        *arguments
      )

    loops, scanned = run(params)
    with mock.patch.object(transformer, "_UNROLLED_LAYERS", 99):
      no_loops, unrolled = run(params)
    none_either, apart = run(policy.unstacked(params))
    self.assertEqual((loops, no_loops, none_either), (1, 0, 0))
    np.testing.assert_allclose(scanned, unrolled, atol=1e-5)
    np.testing.assert_allclose(apart, unrolled, atol=1e-5)

  @parameterized.parameters("qwen2", "qwen3_moe")
  def test_layers_apart_are_those_of_the_stack(self, family):
    policy, params = _policy(family)
    apart = policy.unstacked(params)
    self.assertIsInstance(apart["layers"], tuple)
    self.assertLen(apart["layers"], policy.config.num_layers)
    # Outputs first: of experts' kernels, which have three axes, none.
    turned = dict(query=(1, 2, 0), key=(1, 2, 0), value=(1, 2, 0))
    turned |= dict(output=(2, 0, 1))
    if family == "qwen2":
      turned |= dict(gate=(1, 0), up=(1, 0), down=(1, 0))
    for index, layer in enumerate(apart["layers"]):
      want = jax.tree.map(lambda leaf, i=index: leaf[i], params["layers"])
      self.assertEqual(jax.tree.structure(layer), jax.tree.structure(want))
      want = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.transpose(
          turned.get(path[-1].key, range(leaf.ndim))
        ),
        want,
      )
      jax.tree.map(np.testing.assert_array_equal, layer, want)
    self.assertEqual(apart.keys(), params.keys())
    for name in params.keys() - {"layers"}:
      self.assertIs(apart[name], params[name])

  def test_remat_gives_the_same_gradient(self):
    tokens = _tokens(2, 6)
    gradients, kept = [], []
    for remat in ("none", "attention", "layer"):
      policy = transformer.Policy(
        _config(remat=remat, qkv_bias=True), vocab_size=_VOCAB
      )
      params = _noisy(policy)

      def loss(params, policy=policy):
        hidden = policy.hidden(params, tokens, *_whole_rows(tokens))
        return jnp.mean(jnp.sin(hidden))

      gradients.append(jax.jit(jax.grad(loss))(params))
      residuals = jax.eval_shape(
        lambda p, loss=loss: jax.vjp(loss, p)[1], params
      )
      kept.append(sum(x.size for x in jax.tree.leaves(residuals)))
    # What is stored shrinks: by all but the attention's output, then by it.
    self.assertGreater(kept[0], kept[1])
    heads, head_dim = policy.config.num_heads, policy.config.head_dim
    layers = policy.config.num_layers
    self.assertEqual(kept[1] - kept[2], layers * tokens.size * heads * head_dim)
    for leaves in zip(*map(jax.tree.leaves, gradients), strict=True):
      self.assertGreater(np.abs(np.asarray(leaves[0])).max(), 1e-6)
      for got in leaves[1:]:
        np.testing.assert_allclose(got, leaves[0], atol=1e-6)

  def test_bfloat16_is_close_to_float32(self):
    whole, params = _policy("llama")
    half = transformer.Policy(
      dataclasses.replace(whole.config, compute_dtype="bfloat16"),
      vocab_size=_VOCAB,
    )
    tokens = _tokens(3, 16)
    arguments = (params, tokens, *_whole_rows(tokens))
    hidden = jax.eval_shape(half.hidden, *arguments)
    self.assertEqual(hidden.dtype, jnp.bfloat16)
    gaps = np.abs(_logprobs(half, *arguments) - _logprobs(whole, *arguments))
    self.assertLess(gaps.max(), 0.15)
    self.assertLess(gaps.mean(), 0.03)
    self.assertGreater(gaps.max(), 0.0)

  def test_activations_are_pinned_at_every_layer(self):
    policy, params = _policy("llama")
    tokens = _tokens(2, 6)
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("rows", "tensor"))
    partition = Partition(mesh, ("rows",), "tensor", None)
    program = jax.make_jaxpr(
      functools.partial(policy.hidden, partition=partition)
    )(params, tokens, *_whole_rows(tokens))
    text = str(program)
    # After the embedding and after each layer's body.
    self.assertGreaterEqual(text.count("sharding_constraint"), 2)
    self.assertIn("'rows'", text)


class ParametersTest(parameterized.TestCase):
  @_by_family
  def test_every_parameter_names_its_axes(self, family):
    policy, params = _policy(family)
    axes = policy.logical_axes

    def check(names, leaf):
      self.assertLen(names, leaf.ndim)

    jax.tree.map(check, axes, params, is_leaf=lambda x: isinstance(x, tuple))
    self.assertEqual(axes["layers"]["attention"]["query"][0], "layer")

  @parameterized.parameters("qwen2", "qwen3", "qwen3_moe")
  def test_every_parameter_is_used(self, family):
    policy, params = _policy(family)
    tokens = _tokens(2, 6)

    def loss(params):
      hidden = policy.hidden(params, tokens, *_whole_rows(tokens))
      logits = jnp.einsum("btd,vd->btv", hidden, policy.unembedding(params))
      return jnp.mean(jnp.square(logits))

    for path, gradient in jax.tree.leaves_with_path(
      jax.jit(jax.grad(loss))(params)
    ):
      largest = np.abs(np.asarray(gradient)).max()
      self.assertGreater(largest, 1e-8, jax.tree_util.keystr(path))

  def test_init(self):
    policy = transformer.Policy(_config(num_layers=2), vocab_size=_VOCAB)
    init = jax.jit(policy.init)
    params = init(jax.random.key(0))
    self.assertEqual(
      {leaf.dtype for leaf in jax.tree.leaves(params)},
      {jnp.dtype("float32")},
    )
    self.assertNotIn("unembedding", params)
    query = np.asarray(params["layers"]["attention"]["query"], np.float32)
    self.assertGreater(np.abs(query[0] - query[1]).min(), 0.0)
    np.testing.assert_allclose(query.std(), 16**-0.5, rtol=0.1)
    # What is added to the residual stream, 2 * 2 times.
    for block, name in (("attention", "output"), ("feed_forward", "down")):
      kernel = np.asarray(params["layers"][block][name])
      fan_in = kernel[0].size // 16
      np.testing.assert_allclose(kernel.std(), (fan_in * 4) ** -0.5, rtol=0.1)
    other = init(jax.random.key(1))
    self.assertFalse(np.array_equal(params["embedding"], other["embedding"]))
