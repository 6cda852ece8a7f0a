"""The multi-behavior policy loss."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.kernels.multi_behavior_loss import block_sizes, ops
from darl_jax.kernels.partition import Partition
from darl_jax.planner import topology

_SETTINGS = dict(
  trust_region="behavior",
  dual_clip=3.0,
  max_behavior_weight=2.0,
  behavior_weight_mode="truncate",
)
_DECOUPLED = dict(_SETTINGS, trust_region="decoupled")
_MASKED = dict(_DECOUPLED, behavior_weight_mode="mask")
_BAND = dict(_DECOUPLED, behavior_weight_mode="band", max_behavior_weight=1.3)
_ALL_SETTINGS = (_SETTINGS, _DECOUPLED, _MASKED, _BAND)
_FLOATS = (
  "logprobs",
  "behavior_logprobs",
  "proximal_logprobs",
  "advantages",
  "token_weights",
)
# What a version's clip distances are not: they come by version.
_BY_TOKEN = (*_FLOATS, "loss_mask", "behavior_index")


def _batch(seed=0, *, rows=4, tokens=12, versions=3, scale=0.4, masked=0.3):
  rng = np.random.default_rng(seed)
  shape = (rows, tokens)
  behavior = -rng.exponential(size=shape)
  proximal = behavior + scale * rng.normal(size=shape)
  batch = dict(
    logprobs=proximal + scale * rng.normal(size=shape),
    behavior_logprobs=behavior,
    proximal_logprobs=proximal,
    advantages=np.repeat(rng.normal(size=(rows, 1)), tokens, axis=1),
    token_weights=rng.random(shape) / rows / tokens,
  )
  batch = {name: value.astype("f4") for name, value in batch.items()}
  return batch | dict(
    loss_mask=rng.random(shape) >= masked,
    behavior_index=rng.integers(versions, size=shape).astype("i4"),
    clip_low=np.linspace(0.1, 0.3, versions).astype("f4"),
    clip_high=np.linspace(0.4, 0.15, versions).astype("f4"),
  )


def _partition(devices, tensor=1):
  """Rows over data and fsdp, as on the train mesh."""
  data = 2 if len(devices) > 1 else 1
  mesh = Mesh(
    np.array(devices).reshape(data, -1, tensor), ("data", "fsdp", "tensor")
  )
  return Partition(mesh, rows=("data", "fsdp"), tensor="tensor", fsdp="fsdp")


def _abstract(shape, *, versions, dtype="f4", mesh=None, rows=None):
  """Shapes of a batch, laid out on a mesh if there is one."""

  def array(shape, dtype, spec):
    sharding = None if mesh is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  whole = PartitionSpec()
  rows = whole if rows is None else rows
  dtypes = dict.fromkeys(_FLOATS, "f4") | dict(
    logprobs=dtype, loss_mask=bool, behavior_index="i4"
  )
  return {name: array(shape, d, rows) for name, d in dtypes.items()} | {
    name: array((versions,), "f4", whole) for name in ("clip_low", "clip_high")
  }


@functools.cache
def _compiled(**settings):
  """(batch) -> ((loss, sums), gradient for the policy's log-probs)."""

  def f(logprobs, rest):
    return ops.multi_behavior_loss(logprobs, **rest, **settings)

  differentiated = jax.value_and_grad(f, has_aux=True)
  return jax.jit(
    lambda batch: differentiated(
      batch["logprobs"], {k: v for k, v in batch.items() if k != "logprobs"}
    )
  )


def _loss(batch, **settings):
  (loss, sums), gradient = _compiled(**settings)(batch)
  return loss, sums, gradient


def _transcribed(batch, **settings):
  """Method 2.3 token by token, in float64: the loss and its gradient."""
  loss, sums = 0.0, {}
  gradient = np.zeros(batch["logprobs"].shape)
  for name in (
    "tokens",
    "clipped_low",
    "clipped_high",
    "clipped_dual",
    "ratio",
    "ratio_squared",
    "kl",
    "weight_capped",
  ):
    sums[name] = np.zeros(len(batch["clip_low"]))
  clamp = lambda x: min(20.0, max(-20.0, x))  # noqa: E731
  for at in zip(*np.nonzero(batch["loss_mask"]), strict=True):
    pi, mu, prox, a, c = (float(batch[name][at]) for name in _FLOATS)
    v = batch["behavior_index"][at]
    low, high = float(batch["clip_low"][v]), float(batch["clip_high"][v])
    centre = prox if settings["trust_region"] == "decoupled" else mu
    r = np.exp(clamp(pi - centre))
    clipped = min(1 + high, max(1 - low, r))
    term = min(r * a, clipped * a)
    if a < 0:
      term = max(term, settings["dual_clip"] * a)
    w = 1.0
    if settings["trust_region"] == "decoupled":
      w = np.exp(clamp(prox - mu))
      most, mode = (
        settings[name]
        for name in ("max_behavior_weight", "behavior_weight_mode")
      )
      if w > most or (mode == "band" and w < 1 / most):
        sums["weight_capped"][v] += 1
        w = most if mode == "truncate" else 0.0
    loss -= c * w * term
    if term == r * a and abs(pi - centre) < 20:
      gradient[at] = -c * w * r * a
    behavior_ratio = np.exp(clamp(pi - mu))
    sums["tokens"][v] += 1
    if c * w:
      sums["clipped_low"][v] += a < 0 and r < 1 - low
      sums["clipped_high"][v] += a > 0 and r > 1 + high
      sums["clipped_dual"][v] += a < 0 and r > settings["dual_clip"]
    sums["ratio"][v] += behavior_ratio
    sums["ratio_squared"][v] += behavior_ratio**2
    sums["kl"][v] += behavior_ratio - 1 - np.log(behavior_ratio)
  return loss, sums, gradient


class MultiBehaviorLossTest(parameterized.TestCase):
  def test_by_hand(self):
    # Five tokens of two versions, the last masked: version 0 clips to
    # [0.8, 1.2], version 1 to [0.5, 2].
    batch = dict(
      logprobs=np.log([[1.5, 1.5, 0.6, 5.0, 1.0]]),
      behavior_logprobs=np.zeros((1, 5)),
      proximal_logprobs=np.full((1, 5), np.nan),
      advantages=np.array([[2.0, 2.0, -1.0, -1.0, 9.0]]),
      token_weights=np.array([[0.1, 0.2, 0.3, 0.4, 5.0]]),
      clip_low=np.array([0.2, 0.5]),
      clip_high=np.array([0.2, 1.0]),
    )
    batch = {name: value.astype("f4") for name, value in batch.items()} | dict(
      loss_mask=np.array([[True, True, True, True, False]]),
      behavior_index=np.array([[0, 1, 0, 1, 0]]),
    )
    loss, sums, gradient = _loss(batch, **_SETTINGS)
    # Terms: 1.2 * 2 (clipped), 1.5 * 2, -0.8 (clipped), -3 (dual clip).
    expected = -(0.1 * 2.4 + 0.2 * 3.0 - 0.3 * 0.8 - 0.4 * 3.0)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, -0.6, 0, 0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(sums.tokens, [2, 2])
    np.testing.assert_array_equal(sums.clipped_low, [1, 0])
    np.testing.assert_array_equal(sums.clipped_high, [1, 0])
    np.testing.assert_array_equal(sums.clipped_dual, [0, 1])
    np.testing.assert_array_equal(sums.weight_capped, [0, 0])
    np.testing.assert_allclose(sums.ratio, [2.1, 6.5], rtol=1e-6)
    np.testing.assert_allclose(sums.ratio_squared, [2.61, 27.25], rtol=1e-6)
    # Without a weight nothing is held, and all else is counted.
    _, empty, _ = _loss(
      batch | dict(token_weights=np.zeros((1, 5), "f4")), **_SETTINGS
    )
    for name in ("clipped_low", "clipped_high", "clipped_dual"):
      np.testing.assert_array_equal(getattr(empty, name), [0, 0])
    np.testing.assert_array_equal(empty.tokens, sums.tokens)
    np.testing.assert_array_equal(empty.kl, sums.kl)

  def test_decoupled_by_hand(self):
    # prox/mu = 4 and 1.5 under a cap of 2; pi/prox = 1.1, not clipped.
    batch = _batch(rows=1, tokens=2, versions=1, masked=0.0) | dict(
      behavior_logprobs=np.zeros((1, 2), "f4"),
      proximal_logprobs=np.log([[4.0, 1.5]]).astype("f4"),
      logprobs=np.log([[4.4, 1.65]]).astype("f4"),
      advantages=np.ones((1, 2), "f4"),
      token_weights=np.ones((1, 2), "f4"),
      clip_high=np.array([0.2], "f4"),
    )
    loss, sums, gradient = _loss(batch, **_DECOUPLED)
    np.testing.assert_allclose(loss, -1.1 * (2 + 1.5), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-2.2, -1.65]], rtol=1e-6)
    np.testing.assert_array_equal(sums.weight_capped, [1])
    # ESS and KL are about pi/mu, whatever the centre of the clip.
    np.testing.assert_allclose(sums.ratio, [4.4 + 1.65], rtol=1e-6)
    loss, _, gradient = _loss(batch, **_MASKED)
    np.testing.assert_allclose(loss, -1.1 * 1.5, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, -1.65]], rtol=1e-6)

  def test_band_by_hand(self):
    # prox/mu = 0.25, 1, 4 and 0.5 in a band of [1/3, 3]; pi/prox = 1.1, and
    # 1.5 where it is dropped, so that no clip is counted.
    batch = _batch(rows=1, tokens=4, versions=1, masked=0.0) | dict(
      behavior_logprobs=np.zeros((1, 4), "f4"),
      proximal_logprobs=np.log([[0.25, 1, 4, 0.5]]).astype("f4"),
      logprobs=np.log([[0.375, 1.1, 4.4, 0.55]]).astype("f4"),
      advantages=np.ones((1, 4), "f4"),
      token_weights=np.ones((1, 4), "f4"),
      clip_high=np.array([0.2], "f4"),
    )
    settings = dict(_BAND, max_behavior_weight=3.0)
    loss, sums, gradient = _loss(batch, **settings)
    np.testing.assert_allclose(loss, -1.1 * 1.5, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, -1.1, 0, -0.55]], rtol=1e-6)
    np.testing.assert_array_equal(sums.weight_capped, [2])
    np.testing.assert_array_equal(sums.clipped_high, [0])
    np.testing.assert_array_equal(sums.tokens, [4])
    _, sums, _ = _loss(batch, **dict(settings, behavior_weight_mode="mask"))
    np.testing.assert_array_equal(sums.weight_capped, [1])
    np.testing.assert_array_equal(sums.clipped_high, [1])

  @parameterized.product(
    settings=_ALL_SETTINGS,
    shape=[(1, 1, 1), (1, 9, 2), (5, 13, 4), (3, 1, 3)],
  )
  def test_equals_float64(self, settings, shape):
    rows, tokens, versions = shape
    for seed, scale in enumerate((0.0, 0.3, 1.0, 8.0)):
      batch = _batch(
        seed, rows=rows, tokens=tokens, versions=versions, scale=scale
      )
      loss, sums, gradient = _loss(batch, **settings)
      expected_loss, expected_sums, expected = _transcribed(batch, **settings)
      size = np.abs(expected).max() + abs(expected_loss) + 1e-3
      np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, atol=1e-5)
      np.testing.assert_allclose(
        gradient, expected, rtol=1e-4, atol=1e-5 * size
      )
      for name, value in expected_sums.items():
        np.testing.assert_allclose(
          getattr(sums, name), value, rtol=1e-4, atol=1e-5, err_msg=name
        )

  def test_no_dual_clip(self):
    settings = dict(_SETTINGS, dual_clip=np.inf)
    batch = _batch(scale=2.0)
    batch["advantages"][0] = 0.0  # inf * 0.
    loss, sums, gradient = _loss(batch, **settings)
    expected_loss, _, expected = _transcribed(batch, **settings)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(sums.clipped_dual, np.zeros(3))
    self.assertNotAlmostEqual(
      float(loss), float(_loss(batch, **_SETTINGS)[0]), places=3
    )

  @parameterized.product(
    settings=_ALL_SETTINGS, garbage=[np.nan, np.inf, -np.inf, 1e38]
  )
  def test_garbage_in_masked_slots(self, settings, garbage):
    batch = _batch(scale=1.0)
    clean = _loss(batch, **settings)
    for name in _FLOATS:
      batch[name] = np.where(batch["loss_mask"], batch[name], garbage).astype(
        "f4"
      )
    batch["behavior_index"] = np.where(
      batch["loss_mask"], batch["behavior_index"], -(2**30)
    ).astype("i4")
    dirty = _loss(batch, **settings)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)

  @parameterized.product(
    settings=_ALL_SETTINGS,
    dual_clip=[3.0, np.inf],
    extreme=[(0.0, -1e4), (-1e4, 0.0), (-1e4, -1e4), (-np.inf, 0.0)],
  )
  def test_extreme_logprobs_are_finite(self, settings, dual_clip, extreme):
    batch = _batch()
    batch["logprobs"][:, ::2] = extreme[0]
    batch["behavior_logprobs"][:, ::2] = extreme[1]
    batch["proximal_logprobs"][:, ::3] = extreme[1]
    got = _loss(batch, **dict(settings, dual_clip=dual_clip))
    for leaf in jax.tree.leaves(got):
      self.assertTrue(np.all(np.isfinite(leaf)))

  @parameterized.parameters(*_ALL_SETTINGS)
  def test_all_masked(self, **settings):
    batch = _batch()
    batch["loss_mask"][:] = False
    loss, sums, gradient = _loss(batch, **settings)
    self.assertEqual(loss, 0.0)
    np.testing.assert_array_equal(gradient, np.zeros_like(gradient))
    for field in jax.tree.leaves(sums):
      np.testing.assert_array_equal(field, np.zeros(3))

  @parameterized.product(settings=_ALL_SETTINGS, parts=[2, 4])
  def test_microbatches_sum_to_the_batch(self, settings, parts):
    # Ragged: the microbatches hold different numbers of tokens, one none.
    batch = _batch(rows=8, scale=1.0)
    batch["loss_mask"][6:] = False
    whole = _loss(batch, **settings)
    micro = [
      _loss(
        batch | {n: np.split(batch[n], parts)[i] for n in _BY_TOKEN},
        **settings,
      )
      for i in range(parts)
    ]
    loss, sums, _ = jax.tree.map(lambda *xs: sum(xs), *micro)
    gradient = np.concatenate([part[2] for part in micro])
    np.testing.assert_allclose(loss, whole[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, whole[2], rtol=0, atol=1e-6)
    jax.tree.map(
      lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6),
      sums,
      whole[1],
    )

  @parameterized.parameters(*_ALL_SETTINGS)
  def test_on_policy_gradient(self, **settings):
    batch = _batch()
    batch["logprobs"] = batch["proximal_logprobs"] = batch["behavior_logprobs"]
    loss, sums, gradient = _loss(batch, **settings)
    expected = -batch["token_weights"] * batch["advantages"]
    expected = np.where(batch["loss_mask"], expected, 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    np.testing.assert_allclose(loss, expected.sum(), rtol=1e-5)
    np.testing.assert_array_equal(sums.ratio, sums.tokens)
    np.testing.assert_array_equal(sums.kl, np.zeros(3))

  @parameterized.parameters(*_ALL_SETTINGS)
  def test_finite_differences(self, **settings):
    batch = _batch(scale=0.3)
    _, _, gradient = _loss(batch, **settings)
    step = 2e-3
    checked = 0
    for at in zip(*np.nonzero(batch["loss_mask"]), strict=True):
      losses = []
      for sign in (-1, 1):
        moved = batch | dict(logprobs=batch["logprobs"].copy())
        moved["logprobs"][at] += sign * step
        # Alone: float32 sums of the others would drown the difference.
        moved["loss_mask"] = np.zeros_like(batch["loss_mask"])
        moved["loss_mask"][at] = True
        losses.append(float(_loss(moved, **settings)[0]))
      got = (losses[1] - losses[0]) / (2 * step)
      scale = abs(batch["advantages"][at] * batch["token_weights"][at])
      if abs(got - gradient[at]) > 0.01 * scale:
        # Only across a corner of the clip, where the two sides differ.
        sides = [
          _transcribed(
            batch | dict(logprobs=batch["logprobs"] + np.float32(s)), **settings
          )[2][at]
          for s in (-step, step)
        ]
        self.assertEqual(np.count_nonzero(sides), 1)
      else:
        checked += 1
    self.assertGreater(checked, 0.9 * batch["loss_mask"].sum())

  def test_gradient_flows_through_the_policy_only(self):
    batch = _batch(scale=1.0)
    fixed = ("loss_mask", "behavior_index", "clip_low", "clip_high")

    def f(floats):
      rest = {name: jnp.asarray(batch[name]) for name in fixed}
      loss, sums = ops.multi_behavior_loss(**floats, **rest, **_DECOUPLED)
      return loss, sums

    floats = {name: jnp.asarray(batch[name]) for name in _FLOATS}
    gradients = jax.jit(jax.grad(lambda x: f(x)[0]))(floats)
    self.assertGreater(np.abs(gradients.pop("logprobs")).max(), 0.0)
    for name, gradient in gradients.items():
      np.testing.assert_array_equal(
        gradient, np.zeros_like(gradient), err_msg=name
      )
    of_sums = jax.jit(
      jax.grad(lambda x: sum(jnp.sum(s) for s in jax.tree.leaves(f(x)[1])))
    )(floats)
    for name, gradient in of_sums.items():
      np.testing.assert_array_equal(
        gradient, np.zeros_like(gradient), err_msg=name
      )

  @parameterized.parameters(0.2, 1.0, 5.0)
  def test_decoupled_with_prox_mu_is_behavior(self, scale):
    batch = _batch(scale=scale)
    batch["proximal_logprobs"] = batch["behavior_logprobs"]
    expected = _loss(batch, **_SETTINGS)
    for settings in (_DECOUPLED, _MASKED):
      got = _loss(batch, **settings)
      # The same numbers, summed in another order.
      jax.tree.map(
        lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-6, atol=1e-7),
        got,
        expected,
      )

  def test_permuted_rows_and_relabelled_versions(self):
    # Neither a trajectory's row nor its version's place in the table matters.
    batch = _batch(rows=6, scale=1.0)
    loss, sums, gradient = _loss(batch, **_SETTINGS)
    rng = np.random.default_rng(5)
    rows, versions = rng.permutation(6), np.array([2, 0, 1])
    permuted = {name: batch[name][rows] for name in _BY_TOKEN}
    permuted["behavior_index"] = np.argsort(versions)[
      permuted["behavior_index"]
    ].astype("i4")
    for name in ("clip_low", "clip_high"):
      permuted[name] = batch[name][versions]
    got_loss, got_sums, got = _loss(permuted, **_SETTINGS)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    np.testing.assert_array_equal(got, np.asarray(gradient)[rows])
    np.testing.assert_allclose(got_sums.ratio, sums.ratio[versions], rtol=1e-5)

  def test_dead_groups_change_nothing_but_counts(self):
    # Advantage exactly 0: appended rows leave loss and gradient alone.
    batch = _batch(rows=4, scale=1.0)
    loss, _, gradient = _loss(batch, **_SETTINGS)
    dead = _batch(1, rows=2, scale=3.0)
    dead["advantages"][:] = 0.0
    both = batch | {n: np.concatenate([batch[n], dead[n]]) for n in _BY_TOKEN}
    got_loss, got_sums, got = _loss(both, **_SETTINGS)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-6)
    np.testing.assert_array_equal(got[:4], gradient)
    np.testing.assert_array_equal(got[4:], np.zeros_like(got[4:]))
    self.assertEqual(got_sums.tokens.sum(), both["loss_mask"].sum())
    self.assertEqual(
      got_sums.clipped_high.sum() + got_sums.clipped_low.sum(),
      sum(
        _transcribed(batch, **_SETTINGS)[1][name].sum()
        for name in ("clipped_low", "clipped_high")
      ),
    )

  def test_a_ratio_on_the_bound_keeps_its_gradient(self):
    # clip_high so small that 1 + clip_high is 1 in float32 (a very old
    # version under clip_age_decay): on policy the gradient is whole, not half.
    batch = _batch(versions=1)
    batch["logprobs"] = batch["behavior_logprobs"]
    batch["advantages"][:] = 1.0
    batch["clip_high"][:] = 1e-9
    _, _, gradient = _loss(batch, **_SETTINGS)
    np.testing.assert_array_equal(
      gradient, np.where(batch["loss_mask"], -batch["token_weights"], 0.0)
    )

  def test_small_kl_keeps_its_digits(self):
    batch = _batch(masked=0.0, versions=1)
    batch["behavior_logprobs"][:] = 0.0
    batch["logprobs"][:] = 1e-3
    _, sums, _ = _loss(batch, **_SETTINGS)
    np.testing.assert_allclose(sums.kl / sums.tokens, [5e-7], rtol=1e-3)

  @parameterized.parameters(*_ALL_SETTINGS)
  def test_sharded_rows_equal_unsharded(self, **settings):
    batch = _batch(rows=16, scale=1.0)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    whole = NamedSharding(mesh, PartitionSpec())
    sharded = {
      name: jax.device_put(value, rows if name in _BY_TOKEN else whole)
      for name, value in batch.items()
    }
    got = _loss(sharded, **settings)
    self.assertLen(got[2].sharding.device_set, 8)
    jax.tree.map(
      lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6),
      got,
      _loss(batch, **settings),
    )
    # Devices exchange sums, never rows.
    program = _compiled(**settings).lower(sharded).compile().as_text()
    self.assertIn("all-reduce", program)
    for collective in ("all-gather", "all-to-all", "permute"):
      self.assertNotIn(collective, program)

  @parameterized.parameters(
    (_SETTINGS, 1), (_DECOUPLED, 1), (_MASKED, 1), (_SETTINGS, 2)
  )
  def test_partitioned_rows_equal_unsharded(self, settings, tensor):
    batch = _batch(rows=16, scale=1.0)
    partition = _partition(jax.devices(), tensor)
    rows = NamedSharding(partition.mesh, partition.row_spec)
    sharded = batch | {n: jax.device_put(batch[n], rows) for n in _BY_TOKEN}
    differentiated = _compiled(**settings, partition=partition)
    got = differentiated(sharded)
    self.assertEqual(got[1].sharding.spec, partition.row_spec)
    self.assertTrue(got[0][0].sharding.is_fully_replicated)
    expected = _compiled(**settings)(batch)
    jax.tree.map(
      lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6),
      got,
      expected,
    )
    primal = jax.jit(
      functools.partial(
        ops.multi_behavior_loss, **settings, partition=partition
      )
    )
    jax.tree.map(
      lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6),
      primal(**sharded),
      expected[0],
    )
    # Devices exchange sums, never rows.
    program = differentiated.lower(sharded).compile().as_text()
    self.assertIn("all-reduce", program)
    for collective in ("all-gather", "all-to-all", "permute"):
      self.assertNotIn(collective, program)

  def test_partition_of_one_device(self):
    batch = _batch(scale=1.0)
    partition = _partition(jax.devices()[:1])
    jax.tree.map(
      np.testing.assert_array_equal,
      _compiled(**_DECOUPLED, partition=partition)(batch),
      _compiled(**_DECOUPLED)(batch),
    )

  def test_refuses_rows_that_do_not_split(self):
    partition = _partition(jax.devices())
    with self.assertRaisesRegex(ValueError, "logprobs has 4 rows.*Try 8"):
      ops.multi_behavior_loss(**_batch(), **_SETTINGS, partition=partition)

  @parameterized.parameters(*_ALL_SETTINGS)
  def test_gradient_has_the_dtype_of_the_logprobs(self, **settings):
    batch = _batch(scale=1.0)
    rounded = batch | dict(logprobs=jnp.asarray(batch["logprobs"], "bfloat16"))
    loss, sums, gradient = _loss(rounded, **settings)
    self.assertEqual(loss.dtype, jnp.float32)
    self.assertEqual(gradient.dtype, jnp.bfloat16)
    same = batch | dict(logprobs=np.asarray(rounded["logprobs"], "f4"))
    want_loss, want_sums, want = _loss(same, **settings)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, sums, want_sums)
    # Rounded once: half a unit of bfloat16's eight bits.
    np.testing.assert_allclose(gradient.astype("f4"), want, rtol=2**-8)

  @parameterized.parameters(-3.0, 0.0, 7.0)
  def test_gradient_is_scaled_by_what_follows(self, scale):
    batch = _batch(scale=1.0)
    rest = {k: v for k, v in batch.items() if k != "logprobs"}

    def f(logprobs, scale):
      loss, sums = ops.multi_behavior_loss(logprobs, **rest, **_DECOUPLED)
      return scale * loss + jnp.sum(sums.ratio)

    got = jax.jit(jax.grad(f))(batch["logprobs"], scale)
    _, _, gradient = _loss(batch, **_DECOUPLED)
    np.testing.assert_allclose(got, scale * gradient, rtol=1e-6)

  def test_empty_batch(self):
    batch = _batch()
    empty = batch | {n: batch[n][:0] for n in _BY_TOKEN}
    loss, sums, gradient = _loss(empty, **_SETTINGS)
    self.assertEqual(loss, 0.0)
    self.assertEqual(gradient.shape, (0, 12))
    np.testing.assert_array_equal(sums.tokens, np.zeros(3))

  @parameterized.parameters(
    dict(dual_clip=1.0),
    dict(dual_clip=np.nan),
    dict(max_behavior_weight=0.5),
    dict(trust_region="behaviour"),
    dict(behavior_weight_mode="clip"),
  )
  def test_refuses_settings(self, **wrong):
    (name,) = wrong
    with self.assertRaisesRegex(ValueError, name):
      ops.multi_behavior_loss(**_batch(), **dict(_SETTINGS, **wrong))

  @parameterized.parameters(
    dict(advantages=np.zeros((4, 1), "f4")),
    dict(loss_mask=np.ones((4, 12), "f4")),
    dict(behavior_index=np.ones((4, 12), "f4")),
    dict(clip_low=np.ones((2,), "f4")),
  )
  def test_refuses_arrays(self, **wrong):
    with self.assertRaises(AssertionError):
      ops.multi_behavior_loss(**dict(_batch(), **wrong), **_SETTINGS)


class AcceleratorProgramTest(parameterized.TestCase):
  """Programs for accelerators that are elsewhere: made here, not run."""

  def devices(self, name):
    if importlib.util.find_spec("libtpu") is None:
      self.skipTest("libtpu, which compiles for TPUs, is not installed")
    return topology.devices(name)

  @parameterized.product(
    chip=("v5e:2x2", "v5p:2x2x1", "v6e:2x2"), settings=_ALL_SETTINGS[:2]
  )
  def test_compiles_for_one_tpu(self, chip, settings):
    mesh = Mesh(np.array(self.devices(chip)[:1]), ("data",))
    shape = (64, 8192)
    batch = _abstract(shape, versions=8, mesh=mesh)
    compiled = _compiled(**settings).lower(batch).compile()
    text = compiled.as_text()
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 1)
    # Neither a converted mask nor a scaled copy of the gradient: each input is
    # read once, the gradient written once.
    proximal = settings["trust_region"] == "decoupled"
    least = 64 * 8192 * (4 * (4 + proximal) + 1 + 4 + 4)
    got = compiled.cost_analysis()["bytes accessed"]
    self.assertBetween(got, least, 1.02 * least)
    said = block_sizes.traffic_bytes(
      shape,
      block=block_sizes.TPU,
      direction="forward",
      trust_region=settings["trust_region"],
      num_versions=8,
    )
    self.assertBetween(said, least, 1.02 * least)

  @parameterized.product(
    chip=("v5e:2x2", "v5p:2x2x1", "v6e:2x2"),
    shape=((8, 8192, 8), (4, 130, 3), (20, 1, 12)),
  )
  def test_compiles_for_a_tpu_mesh(self, chip, shape):
    *shape, versions = shape
    partition = _partition(self.devices(chip))
    batch = _abstract(
      tuple(shape),
      versions=versions,
      dtype="bfloat16",
      mesh=partition.mesh,
      rows=partition.row_spec,
    )
    program = _compiled(**_DECOUPLED, partition=partition).lower(batch)
    text = program.compile().as_text()
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 1)
    self.assertIn("all-reduce", text)
    for collective in ("all-gather", "all-to-all", "permute"):
      self.assertNotIn(collective, text)

  @parameterized.parameters((64, 8192), (61, 8100))
  def test_backward_is_one_pass(self, *shape):
    mesh = Mesh(np.array(self.devices("v5p:2x2x1")[:1]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    scalar = jax.ShapeDtypeStruct((), "f4", sharding=whole)
    batch = _abstract(shape, versions=8, dtype="bfloat16", mesh=mesh)

    def f(batch, cotangent):
      def loss(logprobs):
        rest = batch | dict(logprobs=logprobs)
        return ops.multi_behavior_loss(**rest, **_SETTINGS)[0]

      _, backward = jax.vjp(loss, batch["logprobs"])
      return backward(cotangent)

    compiled = jax.jit(f).lower(batch, scalar).compile()
    least = {
      "forward": shape[0] * shape[1] * (2 + 3 * 4 + 1 + 4 + 4),
      "backward": shape[0] * shape[1] * (4 + 2),
    }
    said = {
      direction: block_sizes.traffic_bytes(
        shape,
        block=block_sizes.TPU,
        direction=direction,
        trust_region="behavior",
        num_versions=8,
        logprobs_bytes=2,
      )
      for direction in least
    }
    for direction, size in least.items():
      self.assertBetween(said[direction], size, 1.15 * size)
    got = compiled.cost_analysis()["bytes accessed"]
    self.assertLessEqual(got, 1.15 * sum(least.values()))

  def test_without_differentiation_no_gradient_is_written(self):
    mesh = Mesh(np.array(self.devices("v5e:2x2")[:1]), ("data",))
    batch = _abstract((64, 8192), versions=8, mesh=mesh)
    run = functools.partial(ops.multi_behavior_loss, **_SETTINGS)
    compiled = jax.jit(lambda batch: run(**batch)).lower(batch).compile()
    got = compiled.cost_analysis()["bytes accessed"]
    self.assertLessEqual(got, 1.02 * 64 * 8192 * (4 * 4 + 1 + 4))

  @parameterized.parameters(
    dict(shape=(64, 8192), versions=8),
    dict(shape=(8, 201), versions=20, partitioned=True, dtype="bfloat16"),
  )
  def test_lowers_for_cuda(self, partitioned=False, **batch):
    # On CPU devices: what they are matters only when the program is compiled.
    partition = _partition(jax.devices()) if partitioned else None
    layout = {}
    if partitioned:
      layout = dict(mesh=partition.mesh, rows=partition.row_spec)
    name = "__gpu$xla.gpu.triton"
    exported = jax.export.export(
      _compiled(**_DECOUPLED, partition=partition),
      platforms=["cuda"],
      disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name)],
    )(_abstract(**batch, **layout))
    self.assertEqual(exported.mlir_module().count(f"@{name}"), 1)

  def test_too_many_versions_for_the_kernel(self):
    most = block_sizes.MAX_VERSIONS
    for versions, calls in ((most, 1), (most + 1, 0)):
      exported = jax.export.export(_compiled(**_SETTINGS), platforms=["tpu"])(
        _abstract((4, 256), versions=versions)
      )
      text = exported.mlir_module()
      self.assertEqual(text.count("@tpu_custom_call"), calls)
