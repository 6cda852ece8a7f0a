"""The mixture of experts, against a loop over tokens and a dense sum."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh

from darl_jax.models import experts
from darl_jax.sharding import meshes, rules

_DIM, _PER_TOKEN = 8, 3


def _arrays(num_experts, width, *, rows=4, length=5, seed=0):
  """x, weights, chosen, gate, up, down."""
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)

  tokens = (rows, length)
  chosen = np.argsort(rng.random((*tokens, num_experts)), axis=-1)
  return (
    normal(*tokens, _DIM),
    rng.random((*tokens, _PER_TOKEN)).astype(np.float32),
    chosen[..., :_PER_TOKEN].astype(np.int32),
    normal(num_experts, _DIM, width) / 3,
    normal(num_experts, _DIM, width) / 3,
    normal(num_experts, width, _DIM) / 3,
  )


def _by_token(x, weights, chosen, gate, up, down):
  """The sum over each token's experts, in float64."""
  out = np.zeros(x.shape)
  for at in np.ndindex(x.shape[:2]):
    for weight, expert in zip(weights[at], chosen[at], strict=True):
      token = x[at].astype(np.float64)
      inner = token @ gate[expert]
      hidden = inner / (1 + np.exp(-inner)) * (token @ up[expert])
      out[at] += weight * (hidden @ down[expert])
  return out


def _dense(x, weights, chosen, gate, up, down):
  """All experts for all tokens, to differentiate."""
  picked = jax.nn.one_hot(chosen, gate.shape[0])
  per_expert = jnp.einsum("btk,btke->bte", weights, picked)
  hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate))
  hidden = hidden * jnp.einsum("btd,edf->btef", x, up)
  return jnp.einsum("btef,efd,bte->btd", hidden, down, per_expert)


def _gradients(function, arrays, **kwargs):
  def loss(x, weights, gate, up, down):
    mixed = function(x, weights, chosen, gate, up, down, **kwargs)
    return jnp.sum(jnp.sin(mixed))

  chosen = jnp.asarray(arrays[2])
  differentiable = (*arrays[:2], *arrays[3:])
  return jax.jit(jax.grad(loss, argnums=range(5)))(*differentiable)


def _partition(name):
  devices = np.array(jax.devices())
  if name == "train":
    mesh = Mesh(devices.reshape(2, 2, 2), meshes.TRAIN_AXES)
    return rules.partition(mesh, rules.TRAIN_RULES)
  if name == "tensor":
    mesh = Mesh(devices[:2].reshape(1, 1, 2), meshes.TRAIN_AXES)
    return rules.partition(mesh, rules.TRAIN_RULES)
  mesh = Mesh(devices.reshape(4, 2), meshes.ROLLOUT_AXES)
  return rules.partition(mesh, rules.ROLLOUT_RULES)


class RouteTest(parameterized.TestCase):
  @parameterized.parameters(True, False)
  def test_the_likeliest_first(self, normalize):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, _DIM)).astype(np.float32)
    router = rng.normal(size=(_DIM, 6)).astype(np.float32)
    weights, chosen = experts.route(
      x, router, experts_per_token=2, normalize=normalize
    )
    logits = x.astype(np.float64) @ router
    odds = np.exp(logits)
    probabilities = odds / odds.sum(-1, keepdims=True)
    want = np.argsort(-probabilities, axis=-1)[..., :2]
    np.testing.assert_array_equal(chosen, want)
    picked = np.take_along_axis(probabilities, want, axis=-1)
    if normalize:
      picked = picked / picked.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, picked, rtol=1e-5)

  def test_is_float32_whatever_the_activations(self):
    x = jnp.ones((1, 1, 1), jnp.bfloat16)
    # In bfloat16 the three are equal, and the first would win.
    router = jnp.array([[1.0, 1.001, 1.002]])
    weights, chosen = experts.route(
      x, router, experts_per_token=1, normalize=False
    )
    self.assertEqual(int(chosen[0, 0, 0]), 2)
    self.assertEqual(weights.dtype, jnp.float32)


class MixTest(parameterized.TestCase):
  @parameterized.parameters((6, 10), (5, 10), (3, 1))
  def test_value(self, num_experts, width):
    arrays = _arrays(num_experts, width)
    got = experts.mix(*arrays)
    np.testing.assert_allclose(got, _by_token(*arrays), atol=1e-5)

  def test_gradients(self):
    arrays = _arrays(6, 10)
    for got, want in zip(
      _gradients(experts.mix, arrays), _gradients(_dense, arrays), strict=True
    ):
      self.assertGreater(np.abs(want).max(), 0.01)
      np.testing.assert_allclose(got, want, atol=1e-5)

  def test_nothing_is_dropped_where_all_choose_the_same(self):
    x, weights, chosen, *kernels = _arrays(7, 10)
    chosen = np.broadcast_to(np.array([4, 6, 0], np.int32), chosen.shape)
    arrays = (x, weights, chosen, *kernels)
    got = experts.mix(*arrays)
    np.testing.assert_allclose(got, _by_token(*arrays), atol=1e-5)
    _, _, *d_kernels = _gradients(experts.mix, arrays)
    for gradient in d_kernels:
      used = np.abs(np.asarray(gradient)).reshape(7, -1).max(-1) > 0
      np.testing.assert_array_equal(np.flatnonzero(used), [0, 4, 6])

  @parameterized.product(
    mesh=("train", "rollout", "tensor"), num_experts=(6, 5)
  )
  def test_sharded_equals_unsharded(self, mesh, num_experts):
    """Six experts are dealt out over two devices; five are each cut."""
    arrays = _arrays(num_experts, 10)
    partition = _partition(mesh)
    mix = functools.partial(experts.mix, partition=partition)
    np.testing.assert_allclose(
      jax.jit(mix)(*arrays), experts.mix(*arrays), atol=1e-5
    )
    for got, want in zip(
      _gradients(mix, arrays), _gradients(experts.mix, arrays), strict=True
    ):
      np.testing.assert_allclose(got, want, atol=1e-5)

  def test_no_device_holds_the_others_experts(self):
    partition = _partition("tensor")
    arrays = _arrays(6, 10)
    program = jax.jit(functools.partial(experts.mix, partition=partition))
    tensor = jax.sharding.NamedSharding(
      partition.mesh, jax.sharding.PartitionSpec("tensor")
    )
    placed = (*arrays[:3], *jax.device_put(arrays[3:], tensor))
    text = program.lower(*placed).compile().as_text()
    self.assertIn("all-reduce", text)
    self.assertNotIn("all-gather", text)

  def test_rows_behind_the_last_group_may_hold_anything(self):
    """On an accelerator a ragged product leaves them undefined."""
    x, weights, chosen, *kernels = map(jnp.asarray, _arrays(6, 10))
    kernels = [kernel[2:4] for kernel in kernels]
    ragged_dot = jax.lax.ragged_dot

    def spoilt(out, sizes):
      behind = jnp.arange(out.shape[0]) >= jnp.sum(sizes)
      return jnp.where(behind[:, None], jnp.nan, out)

    @jax.custom_vjp
    def undefined(rows, kernel, sizes):
      return spoilt(ragged_dot(rows, kernel, sizes), sizes)

    def forward(*arguments):
      return undefined(*arguments), arguments

    def backward(arguments, gradient):
      rows, kernel, sizes = arguments
      _, pull_back = jax.vjp(lambda r, k: ragged_dot(r, k, sizes), rows, kernel)
      d_rows, d_kernel = pull_back(gradient)
      return spoilt(d_rows, sizes), d_kernel, None

    undefined.defvjp(forward, backward)

    def run():
      def loss(x, weights, *kernels):
        out = experts._add_up(x, weights, chosen, *kernels, first=2)
        return jnp.sum(jnp.sin(out))

      return jax.value_and_grad(loss, argnums=range(5))(x, weights, *kernels)

    want = run()
    with mock.patch.object(jax.lax, "ragged_dot", undefined):
      got = run()
    for ours, theirs in zip(*map(jax.tree.leaves, (got, want)), strict=True):
      np.testing.assert_allclose(ours, theirs, atol=1e-6)

  def test_bfloat16(self):
    arrays = _arrays(6, 10)
    got = experts.mix(jnp.asarray(arrays[0], jnp.bfloat16), *arrays[1:])
    self.assertEqual(got.dtype, jnp.bfloat16)
    want = _by_token(*arrays)
    gap = np.abs(np.asarray(got, np.float32) - want)
    self.assertLess(gap.max(), 0.02 * np.abs(want).max())
    self.assertGreater(gap.max(), 0.0)
