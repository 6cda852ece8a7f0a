"""What was saved comes back, bit for bit, wherever it is wanted."""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax import checkpoint
from darl_jax.learner import state as learner_state
from darl_jax.types import TrainState

OPTIMIZER = optax.adamw(1e-3)


def make_mesh(data: int, fsdp: int) -> Mesh:
  devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp)
  return Mesh(devices, ("data", "fsdp"))


def make_state(mesh: Mesh, *, step: int) -> TrainState:
  """A state after one update, with arrays cut along fsdp and in two dtypes."""
  cut = NamedSharding(mesh, PartitionSpec("fsdp", None))
  whole = NamedSharding(mesh, PartitionSpec())
  rng = np.random.default_rng(step)
  params = {
    "embedding": jax.device_put(rng.normal(size=(8, 3)), cut),
    "layers": {
      "norm": jax.device_put(rng.normal(size=5).astype(jnp.bfloat16), whole)
    },
  }
  state = learner_state.init(params, OPTIMIZER)
  updates, opt_state = OPTIMIZER.update(
    jax.tree.map(lambda x: x / 3, params), state.opt_state, params
  )
  params = optax.apply_updates(params, updates)
  state = TrainState(jnp.asarray(step, jnp.int32), params, opt_state)
  # Scalars of eager code lie on one device.
  return jax.tree.map(
    lambda x: x if x.ndim else jax.device_put(x, whole), state
  )


def specification(state: TrainState) -> TrainState:
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    state,
  )


class CheckpointTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder)

  def _assert_same(self, restored: TrainState, state: TrainState):
    self.assertEqual(jax.tree.structure(restored), jax.tree.structure(state))
    for ours, theirs in zip(
      jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
    ):
      self.assertEqual(ours.dtype, theirs.dtype)
      np.testing.assert_array_equal(ours, theirs)

  @parameterized.parameters((1, 1), (1, 4), (2, 2), (2, 4))
  def test_round_trip_onto_any_mesh(self, data, fsdp):
    state = make_state(make_mesh(2, 2), step=7)
    path = checkpoint.save(self.folder, state)
    like = make_state(make_mesh(data, fsdp), step=1)
    restored = checkpoint.restore(path, specification(like))
    self._assert_same(restored, state)
    for ours, theirs in zip(
      jax.tree.leaves(restored), jax.tree.leaves(like), strict=True
    ):
      self.assertEqual(ours.sharding, theirs.sharding)

  def test_like_may_be_a_state_of_arrays(self):
    state = make_state(make_mesh(1, 2), step=7)
    path = checkpoint.save(self.folder, state)
    like = make_state(make_mesh(1, 2), step=1)
    self._assert_same(checkpoint.restore(path, like), state)

  def test_each_step_has_its_folder(self):
    mesh = make_mesh(1, 1)
    states = [make_state(mesh, step=step) for step in (3, 120)]
    paths = [checkpoint.save(self.folder, state) for state in states]
    self.assertEqual(
      [p.name for p in paths], ["step_00000003", "step_00000120"]
    )
    self.assertEqual(sorted(self.folder.iterdir()), paths)
    for path, state in zip(paths, states, strict=True):
      self._assert_same(checkpoint.restore(path, state), state)

  def test_a_relative_folder(self):
    state = make_state(make_mesh(1, 1), step=2)
    relative = pathlib.Path(
      *[".."] * (len(pathlib.Path.cwd().parts) - 1)
    ) / self.folder.relative_to("/")
    path = checkpoint.save(relative, state)
    self._assert_same(checkpoint.restore(path, state), state)

  def test_the_state_survives_the_save(self):
    state = make_state(make_mesh(2, 2), step=7)
    before = jax.tree.map(np.array, state)
    checkpoint.save(self.folder, state)
    self._assert_same(state, before)
