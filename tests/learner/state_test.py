"""The learning rate's shape, what decays, and where moments lie."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import darl
from darl_jax import config as config_lib
from darl_jax.learner import state

_PEAK, _FINAL = 1e-3, 1e-5


def _config(**changes):
  learner = config_lib.parse(darl.get_config()).learner
  fields = dict(
    learning_rate=_PEAK,
    final_learning_rate=_FINAL,
    warmup_steps=5,
    minibatches=2,
    schedule="linear",
  )
  return dataclasses.replace(learner, **fields | changes)


def _params():
  return dict(
    kernel=jnp.full((2, 3), 2.0),
    final_norm=jnp.full((3,), 2.0),
    layers=dict(attention_norm=jnp.full((2,), 2.0), up=jnp.full((2,), 2.0)),
  )


class ScheduleTest(parameterized.TestCase):
  @parameterized.product(
    schedule=("linear", "cosine", "constant"),
    warmup=(0, 1, 5),
    minibatches=(1, 2),
  )
  def test_end_points(self, schedule, warmup, minibatches):
    final = _PEAK if schedule == "constant" else _FINAL
    config = _config(
      schedule=schedule,
      warmup_steps=warmup,
      minibatches=minibatches,
      final_learning_rate=final,
    )
    rate = state.schedule(config, num_steps=10)
    updates = 10 * minibatches
    rates = np.array([float(rate(i)) for i in range(updates + 5)])
    np.testing.assert_allclose(rates[updates - 1], final, rtol=1e-5)
    np.testing.assert_allclose(rates.max(), _PEAK, rtol=1e-5)
    np.testing.assert_allclose(rates[max(warmup, 1) - 1], _PEAK, rtol=1e-5)
    # Warm-up is a line that no step spends at 0; then it never rises again.
    np.testing.assert_allclose(
      rates[:warmup],
      _PEAK * np.arange(1, warmup + 1) / max(warmup, 1),
      rtol=1e-5,
    )
    self.assertTrue(np.all(np.diff(rates[warmup:]) <= 1e-12))
    # A run that goes on keeps the last rate.
    np.testing.assert_allclose(rates[updates:], final, rtol=1e-5)

  def test_halfway(self):
    for schedule, want in (
      ("linear", (_PEAK + _FINAL) / 2),
      ("cosine", (_PEAK + _FINAL) / 2),
    ):
      config = _config(schedule=schedule, warmup_steps=5, minibatches=1)
      rate = state.schedule(config, num_steps=26)  # 5 + 20 steps to the last.
      np.testing.assert_allclose(float(rate(15)), want, rtol=1e-5)
    quarter = float(rate(10))
    self.assertGreater(quarter, _FINAL + 0.8 * (_PEAK - _FINAL))  # Cosine.


class AdamwTest(parameterized.TestCase):
  def test_norm_scales_do_not_decay(self):
    config = _config(weight_decay=0.5)
    optimizer = state.adamw(config, 0.1)
    params = _params()
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    got = optax.apply_updates(params, updates)
    np.testing.assert_allclose(got["kernel"], 2 * (1 - 0.1 * 0.5))
    np.testing.assert_allclose(got["layers"]["up"], 2 * (1 - 0.1 * 0.5))
    np.testing.assert_array_equal(got["final_norm"], 2.0)
    np.testing.assert_array_equal(got["layers"]["attention_norm"], 2.0)

  def test_gradients_are_clipped_by_their_global_norm(self):
    # One step of Adam forgets the scale of a gradient; its moment does not.
    config = _config(max_grad_norm=1.0)
    optimizer = state.adamw(config, 0.1)
    params = _params()
    for scale, clipped in ((1e-2, 1.0), (1e3, None)):
      grads = jax.tree.map(lambda x, s=scale: jnp.full_like(x, s), params)
      _, opt_state = optimizer.update(grads, optimizer.init(params), params)
      want = scale * clipped if clipped else 1 / np.sqrt(13)
      np.testing.assert_allclose(
        opt_state[1][0].mu["kernel"], (1 - config.b1) * want, rtol=1e-5
      )

  def test_one_update_by_hand(self):
    config = _config(max_grad_norm=float("inf"), weight_decay=0.0)
    optimizer = state.adamw(config, state.schedule(config, num_steps=10))
    params = dict(x=jnp.array([1.0]))
    opt_state = optimizer.init(params)
    b1, b2, m, v, x = config.b1, config.b2, 0.0, 0.0, 1.0
    for i, gradient in enumerate((0.5, -2.0, 1.0)):
      updates, opt_state = optimizer.update(
        dict(x=jnp.array([gradient])), opt_state, params
      )
      params = optax.apply_updates(params, updates)
      m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
      rate = _PEAK * (i + 1) / 5
      step = (m / (1 - b1 ** (i + 1))) / (
        np.sqrt(v / (1 - b2 ** (i + 1))) + config.eps
      )
      x -= rate * step
    np.testing.assert_allclose(params["x"], [x], rtol=1e-6)


class InitTest(parameterized.TestCase):
  def test_moments_lie_where_their_parameters_do(self):
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    cut = NamedSharding(mesh, PartitionSpec("fsdp", None))
    replicated = NamedSharding(mesh, PartitionSpec())
    optimizer = state.adamw(_config(), _PEAK)
    params = dict(kernel=jax.device_put(jnp.ones((8, 2)), cut))
    got = state.init(params, optimizer)
    self.assertEqual(int(got.step), 0)
    self.assertIs(got.params, params)
    shardings = state.opt_state_shardings(
      optimizer, params, dict(kernel=cut), replicated=replicated
    )
    self.assertEqual(
      jax.tree.structure(shardings), jax.tree.structure(got.opt_state)
    )
    for (path, moment), sharding in zip(
      jax.tree.leaves_with_path(got.opt_state),
      jax.tree.leaves(shardings),
      strict=True,
    ):
      moments = "kernel" in jax.tree_util.keystr(path)
      self.assertEqual(sharding, cut if moments else replicated)
      if moments:
        self.assertEqual(moment.addressable_shards[0].data.shape, (1, 2))
