"""Parameters as the sampler wants them: where, in which pieces, whose copy."""

import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.config import ModelConfig
from darl_jax.models import lora, presets
from darl_jax.models.transformer import Policy
from darl_jax.rollout import placement as placement_lib
from darl_jax.rollout.placement import Placement
from darl_jax.sharding import meshes, rules, transfer
from darl_jax.types import PolicySnapshot

_VOCAB = 42
_FAMILIES = dict(
  dense=dict(qkv_bias=True, tie_embeddings=False),
  experts=dict(num_experts=4, experts_per_token=2, expert_mlp_dim=12),
  adapters=dict(lora_rank=3),
)


@functools.cache
def _policy(family):
  """A policy, and host parameters of which no two are alike."""
  small = dict(num_layers=3, embed_dim=16, mlp_dim=24, num_heads=4, head_dim=8)
  config = ModelConfig(**presets.nano() | small | _FAMILIES[family])
  policy = Policy(config, vocab_size=_VOCAB)
  rng = np.random.default_rng(0)
  values = jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
    jax.eval_shape(policy.init, jax.random.key(0)),
  )
  return policy, values


def _mesh(data=2, tensor=2, first=0):
  """By default of four devices; the learner's are four others."""
  devices = np.array(jax.devices()[first : first + data * tensor])
  return Mesh(devices.reshape(data, tensor), meshes.ROLLOUT_AXES)


def _learners(values, policy, mesh=None):
  """Parameters as the learner has them, and its mesh."""
  mesh = mesh or Mesh(
    np.array(jax.devices()[4:]).reshape(1, 2, 2), meshes.TRAIN_AXES
  )
  shardings = rules.param_shardings(
    policy.logical_axes, values, mesh=mesh, rules=rules.TRAIN_RULES
  )
  return jax.device_put(values, shardings)


def _placement(policy, *, apart, mesh=None, dtype="float32"):
  with mock.patch.object(
    placement_lib, "unstacked_on", return_value=apart
  ) as asked:
    mesh = mesh or _mesh()
    made = Placement(policy, mesh=mesh, dtype=jnp.dtype(dtype))
  asked.assert_called_once_with(mesh)
  return made


def _place(placement, values, policy, *, version=0):
  """All of it, as a run does: the frozen ones are kept first."""
  trained, frozen = lora.split(_learners(values, policy))
  placement.keep(frozen)
  return placement.place(transfer.to_host(trained, version=version))


def _assert_as(abstract, got):
  """Shapes, dtypes and shardings are those that programs are compiled for."""
  assert jax.tree.structure(got) == jax.tree.structure(abstract)
  for (path, leaf), wanted in zip(
    jax.tree.leaves_with_path(got), jax.tree.leaves(abstract), strict=True
  ):
    assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype), path
    assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim), path


def _assert_equal(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, got, want)


class UnstackedTest(parameterized.TestCase):
  @parameterized.parameters(("cpu", True), ("tpu", False), ("gpu", False))
  def test_on(self, platform, wanted):
    device = types.SimpleNamespace(platform=platform)
    mesh = types.SimpleNamespace(devices=np.array([[device, device]]))
    self.assertEqual(placement_lib.unstacked_on(mesh), wanted)


class PlaceTest(parameterized.TestCase):
  @parameterized.product(family=tuple(_FAMILIES), apart=(False, True))
  def test_all_parameters_as_the_sampler_takes_them(self, family, apart):
    policy, values = _policy(family)
    placement = _placement(policy, apart=apart)
    placed = _place(placement, values, policy, version=7)
    self.assertEqual(placed.version, 7)
    want = policy.unstacked(values) if apart else values
    _assert_equal(placed.params, want)
    _assert_as(placement.abstract(), placed.params)
    layers = placed.params["layers"]
    attention = (layers[1] if apart else layers)["attention"]
    # Kernels of layers that are apart have their outputs first.
    specs, shapes = (
      (
        dict(query=("tensor", None, None), output=(None, "tensor", None)),
        dict(query=(2, 8, 16), output=(16, 2, 8)),
      )
      if apart
      else (
        dict(
          query=(None, None, "tensor", None),
          output=(None, "tensor", None, None),
        ),
        dict(query=(3, 16, 2, 8), output=(3, 2, 8, 16)),
      )
    )
    for name, spec in specs.items():
      sharding = NamedSharding(_mesh(), PartitionSpec(*spec))
      self.assertEqual(attention[name].sharding, sharding)
      shard = attention[name].addressable_shards[0].data
      self.assertEqual(shard.shape, shapes[name])

  @parameterized.product(apart=(False, True), family=("dense", "adapters"))
  def test_a_program_for_what_is_abstract_takes_what_is_placed(
    self, family, apart
  ):
    policy, values = _policy(family)
    placement = _placement(policy, apart=apart)
    partition = rules.partition(_mesh(), rules.ROLLOUT_RULES)
    tokens = np.random.default_rng(1).integers(_VOCAB, size=(2, 5))
    arguments = (
      tokens.astype(np.int32),
      np.broadcast_to(np.arange(5, dtype=np.int32), (2, 5)),
      np.ones((2, 5), np.int32),
    )
    hidden = functools.partial(policy.hidden, partition=partition)
    program = jax.jit(hidden).lower(placement.abstract(), *arguments).compile()
    placed = _place(placement, values, policy)
    np.testing.assert_allclose(
      program(placed.params, *arguments),
      jax.jit(policy.hidden)(values, *arguments),
      atol=2e-5,
    )

  @parameterized.product(family=("dense", "adapters"), apart=(False, True))
  def test_casts_for_the_sampler(self, family, apart):
    policy, values = _policy(family)
    placement = _placement(policy, apart=apart, dtype="bfloat16")
    placed = _place(placement, values, policy)
    _assert_as(placement.abstract(), placed.params)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), values)
    _assert_equal(placed.params, policy.unstacked(half) if apart else half)

  @parameterized.product(family=("dense", "adapters"), apart=(False, True))
  def test_aliases_no_snapshot(self, family, apart):
    policy, values = _policy(family)
    placement = _placement(policy, apart=apart, mesh=_mesh(1, 1))
    trained, frozen = lora.split(values)
    placement.keep(jax.device_put(frozen, jax.devices()[4]))
    writable = jax.tree.map(np.array, trained)
    placed = placement.place(PolicySnapshot(0, writable))
    jax.tree.map(lambda leaf: leaf.fill(0), writable)
    _assert_equal(placed.params, policy.unstacked(values) if apart else values)


class KeepTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_frozen_ones_are_placed_once(self, apart):
    policy, values = _policy("adapters")
    placement = _placement(policy, apart=apart)
    first = _place(placement, values, policy)
    trained, _ = lora.split(values)
    newer = jax.tree.map(lambda leaf: leaf + 1, trained)
    second = placement.place(PolicySnapshot(1, newer))
    of_both = zip(
      jax.tree.leaves_with_path(first.params),
      jax.tree.leaves(second.params),
      strict=True,
    )
    counts = [0, 0]
    for (path, one), other in of_both:
      adapter = "adapters" in jax.tree_util.keystr(path)
      counts[adapter] += 1
      self.assertEqual(one is other, not adapter, path)
      if adapter:
        np.testing.assert_array_equal(np.asarray(one) + 1, other)
    self.assertGreater(min(counts), 0)

  @parameterized.parameters(False, True)
  def test_nothing_is_frozen(self, apart):
    policy, values = _policy("dense")
    placement = _placement(policy, apart=apart)
    placement.keep({})
    placed = placement.place(PolicySnapshot(0, values))
    _assert_equal(placed.params, policy.unstacked(values) if apart else values)

  def test_what_lies_right_is_shared_with_the_learner(self):
    """One device: all but what is taken out of a stack."""
    policy, values = _policy("adapters")
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), meshes.TRAIN_AXES)
    _, frozen = lora.split(_learners(values, policy, mesh))
    trained = PolicySnapshot(0, lora.split(values)[0])
    for apart in (False, True):
      placement = _placement(policy, apart=apart, mesh=_mesh(1, 1))
      placement.keep(frozen)
      placed = placement.place(trained).params
      for name in frozen.keys() - {"layers"}:
        self.assertIs(placed[name], frozen[name], name)
      if not apart:
        self.assertIs(
          placed["layers"]["attention"]["key"],
          frozen["layers"]["attention"]["key"],
        )

  @parameterized.parameters(False, True)
  def test_outlives_the_learners(self, apart):
    policy, values = _policy("adapters")
    placement = _placement(policy, apart=apart)
    trained, frozen = lora.split(_learners(values, policy))
    placement.keep(frozen)
    snapshot = transfer.to_host(trained, version=0)
    jax.tree.map(lambda leaf: leaf.delete(), (trained, frozen))
    placed = placement.place(snapshot)
    _assert_equal(placed.params, policy.unstacked(values) if apart else values)

  @parameterized.parameters(False, True)
  def test_the_learners_keep_nothing_on_the_host(self, apart):
    policy, values = _policy("adapters")
    _, frozen = lora.split(_learners(values, policy))
    _placement(policy, apart=apart).keep(frozen)
    for leaf in jax.tree.leaves(frozen):
      self.assertIsNone(leaf._npy_value)


class AdoptTest(parameterized.TestCase):
  @parameterized.product(
    family=("dense", "adapters"),
    apart=(False, True),
    dtype=("float32", "bfloat16"),
  )
  def test_parameters_loaded_onto_the_mesh(self, family, apart, dtype):
    policy, values = _policy(family)
    placement = _placement(policy, apart=apart, dtype=dtype)
    loaded = jax.device_put(values, placement.shardings)
    adopted = placement.adopt(loaded, version=3)
    self.assertEqual(adopted.version, 3)
    want = jax.tree.map(lambda leaf: leaf.astype(dtype), values)
    _assert_equal(adopted.params, policy.unstacked(want) if apart else want)
    _assert_as(placement.abstract(), adopted.params)
    shared = adopted.params["embedding"] is loaded["embedding"]
    self.assertEqual(shared, dtype == "float32")
