"""What was saved comes back, bit for bit, wherever it is wanted."""

import dataclasses
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.checkpoint import learner_state
from darl_jax.learner import state as state_lib
from darl_jax.objectives import ewma
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
  state = state_lib.init(params, OPTIMIZER)
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
    self.folder = epath.Path(folder) / "state"

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
    learner_state.save(self.folder, state)
    like = make_state(make_mesh(data, fsdp), step=1)
    restored = learner_state.restore(self.folder, specification(like))
    self._assert_same(restored, state)
    for ours, theirs in zip(
      jax.tree.leaves(restored), jax.tree.leaves(like), strict=True
    ):
      self.assertEqual(ours.sharding, theirs.sharding)

  def test_the_policies_that_it_keeps(self):
    state = make_state(make_mesh(2, 2), step=7)
    average = ewma.ProximalAverage.start(state.params)
    average = jax.tree.map(
      lambda new, old: jax.device_put(new, old.sharding),
      ewma.update(average, state.params, window=2),
      dataclasses.replace(average, weight=state.step),
    )
    state = dataclasses.replace(
      state,
      proximal_average=average,
      reference=jax.tree.map(lambda x: x + 1, state.params),
    )
    learner_state.save(self.folder, state)
    restored = learner_state.restore(self.folder, specification(state))
    self._assert_same(restored, state)
    self.assertIsInstance(restored.proximal_average, ewma.ProximalAverage)
    params = learner_state.restore_params(
      self.folder, specification(state.params)
    )
    self._assert_same(params, state.params)

  def test_like_may_be_a_state_of_arrays(self):
    state = make_state(make_mesh(1, 2), step=7)
    learner_state.save(self.folder, state)
    like = make_state(make_mesh(1, 2), step=1)
    self._assert_same(learner_state.restore(self.folder, like), state)

  def test_a_relative_folder(self):
    state = make_state(make_mesh(1, 1), step=2)
    relative = epath.Path(os.path.relpath(self.folder))
    learner_state.save(relative, state)
    self._assert_same(learner_state.restore(relative, state), state)
    self._assert_same(learner_state.restore(self.folder, state), state)

  def test_the_state_survives_the_save(self):
    state = make_state(make_mesh(2, 2), step=7)
    before = jax.tree.map(np.array, state)
    learner_state.save(self.folder, state)
    self._assert_same(state, before)
