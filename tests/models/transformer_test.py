"""The policy: conventions of published models, packing, caching, dtypes."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh

from darl_jax.config import ModelConfig
from darl_jax.kernels.partition import Partition
from darl_jax.kernels.token_logprob import ops as logprob_ops
from darl_jax.models import kv_cache, presets, transformer

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


class CacheTest(parameterized.TestCase):
  @parameterized.parameters(
    "qwen2", "qwen3", "one_kv_head", "qwen3_moe", "many_layers"
  )
  def test_prefill_and_decode_equal_the_full_forward(self, family):
    policy, params = _policy(family)
    lengths, width, new = (6, 1, 4), 6, 4
    prefill = jax.jit(functools.partial(policy.prefill, dtype=jnp.float32))
    extend = jax.jit(policy.extend)
    rows = _tokens(3, width + new)
    # What each row says, moved to the left and padded on the right.
    moved, segments = np.zeros_like(rows), np.zeros_like(rows)
    for row, length in enumerate(lengths):
      moved[row, : length + new] = rows[row, width - length :]
      segments[row, : length + new] = 1
    positions, _ = _whole_rows(rows)
    want = np.asarray(_hidden(policy, params, moved, positions, segments))
    padded = rows[:, :width].copy()
    first = width - np.array(lengths, np.int32)
    # Prompts end at ``width``; what is on their left is padding.
    padded[np.arange(width)[None] < first[:, None]] = 9
    hidden, cache = prefill(params, padded, first)
    cache = kv_cache.grow(cache, slots=new + 3, times=1)
    parts = [hidden]
    # Two dispatches of two tokens: within one and from one to the next.
    for start in range(width, width + new, 2):
      tail = kv_cache.append(cache, slots=2)
      for t in (start, start + 1):
        hidden, tail = extend(params, rows[:, t : t + 1], tail)
        parts.append(hidden)
      cache = tail.merged()
    got = np.concatenate(parts, axis=1)
    self.assertEqual(int(cache.length), width + new)
    for row, length in enumerate(lengths):
      np.testing.assert_allclose(
        got[row, first[row] :], want[row, : length + new], atol=2e-5
      )

  def test_several_tokens_at_once_equal_one_by_one(self):
    policy, params = _policy("one_kv_head")
    extend = jax.jit(policy.extend)
    tokens = _tokens(2, 7)
    first = np.array([0, 2], np.int32)

    def run(sizes):
      cache = kv_cache.empty(
        policy.config, first=first, slots=8, dtype=jnp.float32
      )
      tail = kv_cache.append(cache, slots=7)
      parts = []
      for part in np.split(tokens, np.cumsum(sizes)[:-1], axis=1):
        hidden, tail = extend(params, part, tail)
        parts.append(hidden)
      return np.concatenate(parts, axis=1)

    np.testing.assert_allclose(run([3, 3, 1]), run([3, 1, 1, 1, 1]), atol=1e-5)


class ProgramTest(parameterized.TestCase):
  """How the program is built must not change what it computes."""

  def test_scanned_layers_equal_unrolled_ones(self):
    policy, params = _policy("many_layers")
    tokens = _tokens(2, 6)
    arguments = (params, tokens, *_whole_rows(tokens))

    def run():
      lowered = jax.jit(lambda *a: policy.hidden(*a)).lower(*arguments)
      return lowered.as_text().count("stablehlo.while"), lowered.compile()(
        *arguments
      )

    loops, scanned = run()
    with mock.patch.object(transformer, "_UNROLLED_LAYERS", 99):
      no_loops, unrolled = run()
    self.assertEqual((loops, no_loops), (1, 0))
    np.testing.assert_allclose(scanned, unrolled, atol=1e-5)

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
