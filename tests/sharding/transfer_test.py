"""Parameters on their way: learner, host, sampler."""

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


def _one_device():
  devices = jax.devices()[:1]
  return _setup(train=(1, 1, 1), rollout=(1, 1), devices=devices)


def _aligned(leaf):
  """A copy where a CPU device could read it in place."""
  room = np.empty(leaf.nbytes + 64, np.uint8)
  start = -room.ctypes.data % 64
  copy = room[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
  copy[...] = leaf
  return copy


def _assert_equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)


def _assert_placed(params, shardings):
  for leaf, sharding in zip(
    *map(jax.tree.leaves, (params, shardings)), strict=True
  ):
    assert leaf.sharding == sharding, (leaf.sharding, sharding)


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
    self.assertEqual(snapshot.version, 7)
    sampler = transfer.to_mesh(
      snapshot.params, shardings=rollout, dtype=jnp.float32
    )
    _assert_equal(sampler, values)
    _assert_placed(sampler, rollout)
    back = transfer.to_mesh(
      transfer.to_host(sampler, version=7).params,
      shardings=train,
      dtype=jnp.float32,
    )
    _assert_equal(back, values)
    _assert_placed(back, train)

  @parameterized.parameters(1, 8)
  def test_a_snapshot_survives_the_donation_of_its_source(self, num_devices):
    sizes = (
      dict(train=(1, 1, 1), rollout=(1, 1), devices=jax.devices()[:1])
      if num_devices == 1
      else {}
    )
    values, params, train, rollout = _setup(**sizes)
    snapshot = transfer.to_host(params, version=0)
    sampler = transfer.to_mesh(
      snapshot.params, shardings=rollout, dtype=jnp.float32
    )
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
    _assert_equal(sampler, values)

  @parameterized.parameters("to_mesh", "share")
  def test_no_device_array_aliases_the_host(self, function):
    _, params, _, rollout = _one_device()
    snapshot = transfer.to_host(params, version=0).params
    # Parts of arrays too: a layer is a view of the layers' stack.
    writable = dict(whole=jax.tree.map(_aligned, snapshot))
    layer = jax.tree.map(lambda leaf: leaf[0], writable["whole"]["layers"])
    writable["layer"] = layer
    shardings = dict(
      whole=rollout,
      layer=jax.tree.map(
        lambda _: rules.replicated(rollout["embedding"].mesh), layer
      ),
    )
    want = jax.tree.map(np.array, writable)
    got = getattr(transfer, function)(
      writable, shardings=shardings, dtype=jnp.float32
    )
    jax.tree.map(lambda leaf: leaf.fill(0), writable)
    _assert_equal(got, want)

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
    sampler = transfer.to_mesh(
      snapshot.params, shardings=rollout, dtype=jnp.bfloat16
    )
    _assert_equal(snapshot.params, values)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), values)
    for got, want in zip(
      jax.tree.leaves(sampler), jax.tree.leaves(rounded), strict=True
    ):
      self.assertEqual(got.dtype, jnp.bfloat16)
      np.testing.assert_array_equal(got, want)

  def test_bfloat16_parameters_keep_their_bits(self):
    _, params, _, rollout = _setup()
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    snapshot = transfer.to_host(half, version=0)
    sampler = transfer.to_mesh(
      snapshot.params, shardings=rollout, dtype=jnp.bfloat16
    )
    self.assertEqual(snapshot.params["embedding"].dtype, jnp.bfloat16)
    _assert_equal(sampler, half)


class ShareTest(parameterized.TestCase):
  def _same(self, got, want):
    """By leaf, whether it is the array itself."""
    return [
      a is b for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True)
    ]

  def test_what_lies_right_stays_where_it_is(self):
    for values, params, train, _ in (_one_device(), _setup()):
      got = transfer.share(params, shardings=train, dtype=jnp.float32)
      self.assertTrue(all(self._same(got, params)))
      _assert_equal(got, values)

  def test_one_device_is_one_place_under_any_mesh(self):
    _, params, _, rollout = _one_device()
    got = transfer.share(params, shardings=rollout, dtype=jnp.float32)
    self.assertTrue(all(self._same(got, params)))

  def test_another_mesh_takes_a_copy(self):
    values, params, _, rollout = _setup()
    got = transfer.share(params, shardings=rollout, dtype=jnp.float32)
    self.assertFalse(any(self._same(got, params)))
    _assert_placed(got, rollout)
    _assert_equal(got, values)

  def test_another_dtype_takes_a_copy(self):
    values, params, train, _ = _setup()
    got = transfer.share(params, shardings=train, dtype=jnp.bfloat16)
    _assert_placed(got, train)
    for leaf, value in zip(*map(jax.tree.leaves, (got, values)), strict=True):
      self.assertEqual(leaf.dtype, jnp.bfloat16)
      np.testing.assert_array_equal(leaf, value.astype(jnp.bfloat16))

  def test_another_cut_takes_a_copy_leaf_by_leaf(self):
    values, params, train, _ = _setup()
    embedding = train["embedding"]
    whole = rules.replicated(embedding.mesh)
    self.assertFalse(embedding.is_equivalent_to(whole, 2))
    shardings = train | dict(embedding=whole)
    got = transfer.share(params, shardings=shardings, dtype=jnp.float32)
    _assert_placed(got, shardings)
    _assert_equal(got, values)
    self.assertEqual(
      [k for k in got if not all(self._same(got[k], params[k]))], ["embedding"]
    )

  def test_a_copy_outlives_its_source(self):
    values, params, _, rollout = _setup()
    got = transfer.share(params, shardings=rollout, dtype=jnp.float32)
    jax.tree.map(lambda leaf: leaf.delete(), params)
    _assert_equal(got, values)

  def test_the_source_keeps_nothing_on_the_host(self):
    """JAX keeps what was fetched of an array that is cut, as long as it."""
    _, params, _, rollout = _setup()
    cut = params["embedding"]
    self.assertFalse(cut.is_fully_replicated)
    transfer.share(params, shardings=rollout, dtype=jnp.float32)
    self.assertIsNone(cut._npy_value)
    np.asarray(cut)
    self.assertIsNotNone(cut._npy_value)

  def test_arrays_of_the_host(self):
    values, _, _, rollout = _setup()
    got = transfer.share(values, shardings=rollout, dtype=jnp.float32)
    _assert_placed(got, rollout)
    _assert_equal(got, values)

  def test_nothing(self):
    self.assertEqual(transfer.share({}, shardings={}, dtype=jnp.float32), {})
