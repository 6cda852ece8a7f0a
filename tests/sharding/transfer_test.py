"""Parameters on their way: learner, host, sampler."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.config import (
  MeshConfig,
  ModelConfig,
  RolloutMeshConfig,
  TrainMeshConfig,
)
from darl_jax.models import presets
from darl_jax.models.transformer import Policy
from darl_jax.sharding import meshes, rules, transfer


def _setup(train=(1, 2, 2), rollout=(2, 2), devices=None):
  """Parameters on the train mesh; the shardings of both meshes."""
  config = MeshConfig(TrainMeshConfig(*train), RolloutMeshConfig(*rollout))
  split = meshes.split_devices(config, devices)
  policy = Policy(
    ModelConfig(**presets.nano() | dict(num_layers=1, qkv_bias=True)),
    vocab_size=42,
  )
  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  shardings = [
    rules.param_shardings(policy.logical_axes, shapes, mesh=mesh, rules=table)
    for mesh, table in (
      (split.train, rules.TRAIN_RULES),
      (split.rollout, rules.ROLLOUT_RULES),
    )
  ]
  rng = np.random.default_rng(0)
  values = jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes
  )
  return values, jax.device_put(values, shardings[0]), *shardings


def _assert_equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)


class TransferTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("disjoint", {}),
    ("shared_device", dict(train=(1, 1, 1), rollout=(1, 1), devices=1)),
  )
  def test_round_trip(self, setup):
    if "devices" in setup:
      setup = setup | dict(devices=jax.devices()[: setup["devices"]])
    values, params, train, rollout = _setup(**setup)
    snapshot = transfer.to_host(params, version=7)
    sampler = transfer.to_mesh(snapshot, shardings=rollout, dtype=jnp.float32)
    self.assertEqual((snapshot.version, sampler.version), (7, 7))
    _assert_equal(sampler.params, values)
    jax.tree.map(
      lambda leaf, sharding: self.assertEqual(leaf.sharding, sharding),
      sampler.params,
      rollout,
    )
    back = transfer.to_mesh(
      transfer.to_host(sampler.params, version=7),
      shardings=train,
      dtype=jnp.float32,
    )
    _assert_equal(back.params, values)

  @parameterized.parameters(1, 8)
  def test_a_snapshot_survives_the_donation_of_its_source(self, num_devices):
    sizes = (
      dict(train=(1, 1, 1), rollout=(1, 1), devices=jax.devices()[:1])
      if num_devices == 1
      else {}
    )
    values, params, train, rollout = _setup(**sizes)
    snapshot = transfer.to_host(params, version=0)
    sampler = transfer.to_mesh(snapshot, shardings=rollout, dtype=jnp.float32)
    update = jax.jit(
      lambda tree: jax.tree.map(lambda x: x * 0 - 5, tree),
      donate_argnums=0,
      out_shardings=train,
    )
    state = params
    for _ in range(3):
      state = update(state)
    jax.block_until_ready(state)
    self.assertTrue(params["embedding"].is_deleted())
    _assert_equal(snapshot.params, values)
    _assert_equal(sampler.params, values)

  def test_what_the_sampler_holds_does_not_alias_the_snapshot(self):
    _, params, _, rollout = _setup(
      train=(1, 1, 1), rollout=(1, 1), devices=jax.devices()[:1]
    )
    snapshot = transfer.to_host(params, version=0)
    writable = dataclasses.replace(
      snapshot, params=jax.tree.map(np.array, snapshot.params)
    )
    sampler = transfer.to_mesh(writable, shardings=rollout, dtype=jnp.float32)
    jax.tree.map(lambda leaf: leaf.fill(0), writable.params)
    _assert_equal(sampler.params, snapshot.params)

  def test_a_snapshot_is_read_only_and_owned(self):
    _, params, _, _ = _setup()
    snapshot = transfer.to_host(params, version=0)
    for leaf in jax.tree.leaves(snapshot.params):
      self.assertIsInstance(leaf, np.ndarray)
      with self.assertRaisesRegex(ValueError, "read-only"):
        leaf[...] = 0
      self.assertTrue(leaf.flags.owndata)

  def test_casts_for_the_sampler_alone(self):
    values, params, _, rollout = _setup()
    snapshot = transfer.to_host(params, version=0)
    sampler = transfer.to_mesh(snapshot, shardings=rollout, dtype=jnp.bfloat16)
    _assert_equal(snapshot.params, values)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), values)
    for got, want in zip(
      jax.tree.leaves(sampler.params), jax.tree.leaves(rounded), strict=True
    ):
      self.assertEqual(got.dtype, jnp.bfloat16)
      np.testing.assert_array_equal(got, want)

  def test_bfloat16_parameters_keep_their_bits(self):
    _, params, _, rollout = _setup()
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    snapshot = transfer.to_host(half, version=0)
    sampler = transfer.to_mesh(snapshot, shardings=rollout, dtype=jnp.bfloat16)
    self.assertEqual(snapshot.params["embedding"].dtype, jnp.bfloat16)
    _assert_equal(sampler.params, half)
