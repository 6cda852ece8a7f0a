"""Adapters: where they are, what they add, and what merging them gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh, PartitionSpec

from darl_jax.config import ModelConfig
from darl_jax.models import kv_cache, lora, presets
from darl_jax.models.kv_cache import Span
from darl_jax.models.transformer import Policy
from darl_jax.sharding import meshes, rules

_VOCAB = 40
_FAMILIES = dict(
  dense=dict(tie_embeddings=False, qkv_bias=True),
  experts=dict(num_experts=4, experts_per_token=2, expert_mlp_dim=12),
)


def _config(**changes) -> ModelConfig:
  small = dict(num_layers=2, embed_dim=16, mlp_dim=24, num_heads=4, head_dim=8)
  adapters = dict(lora_rank=3, lora_alpha=7.0)
  return ModelConfig(**presets.nano() | small | adapters | changes)


@functools.cache
def _policy(**changes) -> tuple[Policy, dict]:
  """A policy, and parameters of which none is what it starts with."""
  policy = Policy(_config(**changes), vocab_size=_VOCAB)
  rng = np.random.default_rng(0)

  def make(path, leaf):
    scale = "norm" in path[-1].key
    return np.asarray(scale + 0.3 * rng.normal(size=leaf.shape), leaf.dtype)

  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  return policy, jax.tree_util.tree_map_with_path(make, shapes)


def _base(policy: Policy) -> Policy:
  config = dataclasses.replace(policy.config, lora_rank=0)
  return Policy(config, vocab_size=_VOCAB)


def _tokens() -> np.ndarray:
  shape = (2, 9)
  return np.random.default_rng(1).integers(_VOCAB, size=shape, dtype=np.int32)


@functools.partial(jax.jit, static_argnums=0, static_argnames="partition")
def _hidden(policy, params, partition=None):
  tokens = _tokens()
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  segments = jnp.ones(tokens.shape, jnp.int32)
  return policy.hidden(params, tokens, positions, segments, partition=partition)


def _names(tree) -> set[str]:
  return {
    jax.tree_util.keystr(path, simple=True, separator=".")
    for path, _ in jax.tree.leaves_with_path(tree)
  }


class WhereTest(parameterized.TestCase):
  @parameterized.parameters(
    ("attention.query", {"attention.query"}),
    (
      " attention.[kv]* , *.down",
      {"attention.key", "attention.value", "feed_forward.down"},
    ),
    ("*.router", {"feed_forward.router"}),
  )
  def test_patterns(self, targets, wanted):
    config = _config(lora_targets=targets, **_FAMILIES["experts"])
    self.assertEqual(config.lora_kernels, wanted)
    policy = Policy(config, vocab_size=_VOCAB)
    trained, _ = lora.split(jax.eval_shape(policy.init, jax.random.key(0)))
    self.assertEqual(
      _names(trained),
      {
        f"layers.{block}.adapters.{kernel}.{factor}"
        for block, kernel in (name.split(".") for name in wanted)
        for factor in "ab"
      },
    )

  def test_all_linear_layers_by_default(self):
    self.assertEqual(presets.nano()["lora_targets"], "*")
    self.assertLen(_config().lora_kernels, 7)
    self.assertLen(_config(**_FAMILIES["experts"]).lora_kernels, 8)

  def test_none(self):
    config = _config(lora_rank=0)
    self.assertEmpty(config.lora_kernels)
    policy = Policy(config, vocab_size=_VOCAB)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    self.assertEqual(lora.split(params), (params, {}))
    self.assertNotIn("adapters", str(_names(params)))

  @parameterized.parameters(*_FAMILIES)
  def test_shapes(self, family):
    _, params = _policy(**_FAMILIES[family])
    layers = params["layers"]
    for block in ("attention", "feed_forward"):
      for name, factors in layers[block]["adapters"].items():
        kernel, a, b = layers[block][name], factors["a"], factors["b"]
        first = 1 + (family == "experts" and block == "feed_forward")
        if name == "router":
          first = 1
        ends = first + (2 if name == "output" else 1)
        self.assertEqual(a.shape, (*kernel.shape[:ends], 3), name)
        self.assertEqual(
          b.shape, (*kernel.shape[:first], 3, *kernel.shape[ends:]), name
        )

  def test_split_and_join(self):
    _, params = _policy(**_FAMILIES["experts"])
    trained, frozen = lora.split(params)
    self.assertEqual(_names(trained) | _names(frozen), _names(params))
    self.assertEmpty(_names(trained) & _names(frozen))
    joined = lora.join(trained, frozen)
    self.assertEqual(jax.tree.structure(joined), jax.tree.structure(params))
    jax.tree.map(np.testing.assert_array_equal, joined, params)

  def test_join_layers_apart(self):
    policy, params = _policy(**_FAMILIES["experts"])
    parts = lora.split(params)
    joined = lora.join(*map(policy.unstacked, parts))
    want = policy.unstacked(params)
    self.assertEqual(jax.tree.structure(joined), jax.tree.structure(want))
    jax.tree.map(np.testing.assert_array_equal, joined, want)
    # What is joined is left as it was.
    self.assertEqual(
      jax.tree.map(jnp.shape, parts),
      jax.tree.map(jnp.shape, lora.split(params)),
    )

  def test_join_with_nothing_frozen(self):
    policy, params = _policy(tie_embeddings=False, lora_rank=0)
    for each in (params, policy.unstacked(params)):
      self.assertEqual(
        jax.tree.structure(lora.join(each, {})), jax.tree.structure(each)
      )


class SumTest(parameterized.TestCase):
  @parameterized.parameters(*_FAMILIES)
  def test_they_start_at_zero(self, family):
    policy, _ = _policy(**_FAMILIES[family])
    params = jax.jit(policy.init)(jax.random.key(0))
    trained, frozen = lora.split(params)
    for path, leaf in jax.tree.leaves_with_path(trained):
      zero = path[-1].key == "b"
      self.assertEqual(float(jnp.abs(leaf).max()) == 0, zero, path)
    got = np.asarray(_hidden(policy, params))
    want = np.asarray(_hidden(_base(policy), frozen))
    np.testing.assert_array_equal(got, want)

  def test_a_is_drawn_by_its_inputs(self):
    policy = Policy(
      _config(embed_dim=256, lora_rank=64, lora_targets="attention.*"),
      vocab_size=_VOCAB,
    )
    trained, _ = lora.split(jax.jit(policy.init)(jax.random.key(0)))
    factors = trained["layers"]["attention"]["adapters"]
    self.assertAlmostEqual(float(factors["query"]["a"].std()), 1 / 16, places=3)
    inputs = 4 * 8  # All heads.
    spread = float(factors["output"]["a"].std())
    self.assertAlmostEqual(spread, inputs**-0.5, places=2)

  @parameterized.parameters(*_FAMILIES)
  def test_merged_equals_unmerged(self, family):
    policy, params = _policy(**_FAMILIES[family])
    merged = lora.merge(params, policy.config)
    base = _base(policy)
    self.assertEqual(
      jax.tree.map(jnp.shape, merged),
      jax.tree.map(jnp.shape, jax.eval_shape(base.init, jax.random.key(0))),
    )
    got = np.asarray(_hidden(base, merged))
    want = np.asarray(_hidden(policy, params))
    np.testing.assert_allclose(got, want, atol=1e-5)
    _, frozen = lora.split(params)
    self.assertGreater(np.abs(_hidden(base, frozen) - want).max(), 0.1)

  def test_merging_by_hand(self):
    policy, params = _policy(**_FAMILIES["dense"])
    merged = lora.merge(params, policy.config)["layers"]["attention"]
    layers = params["layers"]["attention"]
    wide = jax.tree.map(np.float64, layers["adapters"])
    for name, equation in (
      ("query", "ldr,lrnh->ldnh"),
      ("output", "lnhr,lrd->lnhd"),
    ):
      product = np.einsum(equation, wide[name]["a"], wide[name]["b"])
      want = layers[name] + 7 / 3 * product
      np.testing.assert_allclose(merged[name], want, rtol=1e-5, atol=1e-6)

  @parameterized.product(family=tuple(_FAMILIES), apart=(False, True))
  def test_the_sampler_adds_them_too(self, family, apart):
    policy, params = _policy(**_FAMILIES[family])
    tokens = _tokens()
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    want = np.asarray(_hidden(policy, params))
    if apart:
      params = policy.unstacked(params)
    read = jax.jit(functools.partial(policy.read, dtype=jnp.float32))
    hidden, keys, values = read(
      params, tokens[:, :5], positions[:, :5], np.ones((2, 5), np.int32)
    )
    np.testing.assert_allclose(hidden, want[:, :5], atol=2e-5)
    span = Span.of(keys, values, np.ones((2, 5), bool))
    tail = kv_cache.empty_tail(
      policy.config, rows=2, slots=4, dtype=jnp.float32, unstacked=apart
    )
    hidden, _ = jax.jit(policy.extend)(
      params, tokens[:, 5:], positions[:, 5:], [span], tail
    )
    np.testing.assert_allclose(hidden, want[:, 5:], atol=2e-5)

  @parameterized.parameters(*_FAMILIES)
  def test_gradients(self, family):
    """By the chain rule, from the gradient of the merged kernel."""
    policy, params = _policy(**_FAMILIES[family])
    base, scale = _base(policy), policy.config.lora_scale
    trained, frozen = lora.split(params)

    def loss(hidden):
      return jnp.sum(jnp.sin(hidden))

    got = jax.jit(
      jax.grad(lambda x: loss(_hidden(policy, lora.join(x, frozen))))
    )(trained)
    merged = jax.jit(jax.grad(lambda x: loss(_hidden(base, x))))(
      lora.merge(params, policy.config)
    )
    for block, name, of_a, of_b in (
      ("attention", "key", "ldmh,lrmh->ldr", "ldmh,ldr->lrmh"),
      ("attention", "output", "lnhd,lrd->lnhr", "lnhd,lnhr->lrd"),
      *(
        [("feed_forward", "down", "lfd,lrd->lfr", "lfd,lfr->lrd")]
        if family == "dense"
        else [
          ("feed_forward", "up", "ledf,lerf->ledr", "ledf,ledr->lerf"),
          ("feed_forward", "router", "lde,lre->ldr", "lde,ldr->lre"),
        ]
      ),
    ):
      factors = trained["layers"][block]["adapters"][name]
      grads = got["layers"][block]["adapters"][name]
      d_kernel = np.float64(merged["layers"][block][name])
      for leaf, equation, other in (("a", of_a, "b"), ("b", of_b, "a")):
        want = scale * np.einsum(equation, d_kernel, factors[other])
        np.testing.assert_allclose(grads[leaf], want, rtol=1e-3, atol=1e-4)

  @parameterized.parameters(*_FAMILIES)
  def test_eight_devices(self, family):
    policy, params = _policy(**_FAMILIES[family], num_kv_heads=2)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), meshes.TRAIN_AXES)
    shardings = rules.param_shardings(
      policy.logical_axes, params, mesh=mesh, rules=rules.TRAIN_RULES
    )
    attention = shardings["layers"]["attention"]["adapters"]
    self.assertEqual(
      attention["key"]["a"].spec, PartitionSpec(None, "fsdp", None)
    )
    self.assertEqual(
      attention["key"]["b"].spec, PartitionSpec(None, None, "tensor", None)
    )
    partition = rules.partition(mesh, rules.TRAIN_RULES)
    # Rows of data times fsdp: the two rows twice.
    spread = jax.device_put(params, shardings)
    tokens = np.concatenate([_tokens(), _tokens()])
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    got = jax.jit(
      lambda params: policy.hidden(
        params, tokens, positions, np.ones_like(tokens), partition=partition
      )
    )(spread)
    want = np.asarray(_hidden(policy, params))
    np.testing.assert_allclose(got[:2], want, atol=2e-5)
    np.testing.assert_allclose(got[2:], want, atol=2e-5)


class CompactTest(parameterized.TestCase):
  def test_kernels_alone(self):
    _, params = _policy(**_FAMILIES["experts"])
    _, frozen = lora.split(jax.tree.map(jnp.asarray, params))
    compact = lora.compact(frozen, dtype=jnp.dtype("bfloat16"))
    halved = {
      jax.tree_util.keystr(path[-1:], simple=True)
      for path, leaf in jax.tree.leaves_with_path(compact)
      if leaf.dtype == jnp.bfloat16
    }
    self.assertEqual(
      halved, {"query", "key", "value", "output", "gate", "up", "down"}
    )

  def test_nothing_changes_for_dense_models(self):
    config = _FAMILIES["dense"] | dict(compute_dtype="bfloat16")
    policy, params = _policy(**config)
    trained, frozen = lora.split(jax.tree.map(jnp.asarray, params))
    compact = lora.compact(frozen, dtype=jnp.dtype("bfloat16"))
    want = np.asarray(_hidden(policy, params), np.float32)
    got = np.asarray(_hidden(policy, lora.join(trained, compact)), np.float32)
    np.testing.assert_array_equal(got, want)
