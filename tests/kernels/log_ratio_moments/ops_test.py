"""Moments of the log-ratio of each trajectory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.kernels.log_ratio_moments import ops
from darl_jax.kernels.partition import Partition


def _batch(rng, rows, tokens, segments, *, masked=0.3, scale=0.5):
  """A packed batch, as numpy; some segments are empty, one may be one token."""
  ids = np.zeros((rows, tokens), np.int32)
  for row in range(rows):
    cuts = np.sort(rng.integers(0, tokens + 1, size=segments))
    for start, stop, i in zip(
      [0, *cuts[:-1]], cuts, range(1, segments + 1), strict=True
    ):
      ids[row, start:stop] = i
  behavior = -rng.exponential(size=(rows, tokens))
  return dict(
    logprobs=(behavior + scale * rng.normal(size=(rows, tokens))).astype("f4"),
    behavior_logprobs=behavior.astype("f4"),
    behavior_entropy=rng.exponential(size=(rows, tokens)).astype("f4"),
    advantages=rng.normal(size=(rows, segments + 1))[
      np.arange(rows)[:, None], ids
    ].astype("f4"),
    loss_mask=(rng.random((rows, tokens)) > masked) & (ids > 0),
    segment_ids=ids,
  )


def _moments(batch, num_segments):
  f = jax.jit(ops.log_ratio_moments, static_argnames="num_segments")
  return f(
    **{name: jnp.asarray(value) for name, value in batch.items()},
    num_segments=num_segments,
  )


def _transcribed(batch, num_segments):
  """Method 2.1, trajectory by trajectory, in float64."""
  rows = batch["logprobs"].shape[0]
  fields = {
    name: np.zeros((rows, num_segments))
    for name in (
      "count", "mean", "variance", "second_moment", "harmful",
      "entropy_scaled", "max_abs",
    )
  }  # fmt: skip
  for b in range(rows):
    for s in range(1, num_segments + 1):
      chosen = batch["loss_mask"][b] & (batch["segment_ids"][b] == s)
      total = int(chosen.sum())
      if total == 0:
        continue
      ell = batch["logprobs"][b][chosen].astype(np.float64)
      ell = ell - batch["behavior_logprobs"][b][chosen]
      ell = np.minimum(20.0, np.maximum(-20.0, ell))
      entropy = batch["behavior_entropy"][b][chosen].astype(np.float64)
      advantage = batch["advantages"][b][chosen].astype(np.float64)
      mean = sum(ell) / total
      variance = sum((x - mean) ** 2 for x in ell) / total
      harm = sum(x**2 for x, a in zip(ell, advantage, strict=True) if a * x > 0)
      for name, value in dict(
        count=total,
        mean=mean,
        variance=variance,
        second_moment=variance + mean**2,
        harmful=harm / total,
        entropy_scaled=sum(ell**2 / (entropy + 0.01)) / total,
        max_abs=max(abs(ell)),
      ).items():
        fields[name][b, s - 1] = value
  return fields


def _assert_equal(got, expected, **tolerance):
  for name, value in expected.items():
    field = getattr(got, name)
    assert field.dtype == jnp.float32, name
    np.testing.assert_allclose(field, value, err_msg=name, **tolerance)


class LogRatioMomentsTest(parameterized.TestCase):
  def test_by_hand(self):
    # Row 0: a prompt token, then two trajectories of 2 and 1 tokens, padding.
    ell = np.array([[5.0, 1.0, -3.0, 2.0, 7.0]], "f4")
    batch = dict(
      logprobs=ell,
      behavior_logprobs=np.zeros((1, 5), "f4"),
      behavior_entropy=np.full((1, 5), 0.99, "f4"),
      advantages=np.array([[2, 2, 2, -1, 0]], "f4"),
      loss_mask=np.array([[False, True, True, True, False]]),
      segment_ids=np.array([[1, 1, 1, 2, 0]]),
    )
    got = _moments(batch, 3)
    _assert_equal(
      got,
      dict(
        count=[[2, 1, 0]],
        mean=[[-1, 2, 0]],
        variance=[[4, 0, 0]],
        second_moment=[[5, 4, 0]],
        harmful=[[0.5, 0, 0]],  # 1^2 of two tokens; -1 * 2 < 0.
        entropy_scaled=[[5, 4, 0]],
        max_abs=[[3, 2, 0]],
      ),
      rtol=1e-6,
    )

  @parameterized.parameters(
    (1, 1, 1), (1, 7, 3), (4, 16, 4), (3, 33, 9), (8, 48, 6), (2, 5, 5)
  )
  def test_equals_float64(self, rows, tokens, segments):
    for seed in range(3):
      rng = np.random.default_rng([seed, rows, tokens])
      batch = _batch(rng, rows, tokens, segments)
      # No advantage: no update, so no harm.
      batch["advantages"][batch["segment_ids"] == segments] = 0.0
      # Tokens on either side of the clamp.
      batch["logprobs"][0, 0] += 1e4 * (-1) ** seed
      expected = _transcribed(batch, segments)
      got = _moments(batch, segments)
      for name, value in expected.items():
        # Of the greatest too: a mean of both signs has fewer digits.
        _assert_equal(
          got, {name: value}, rtol=1e-6, atol=3e-7 * np.max(np.abs(value))
        )

  def test_more_segments_than_a_row_holds(self):
    batch = _batch(np.random.default_rng(0), 3, 10, 2)
    got = _moments(batch, 6)
    _assert_equal(got, _transcribed(batch, 6), rtol=2e-5, atol=1e-6)

  def test_variance_is_stable_under_a_large_shift(self):
    rng = np.random.default_rng(0)
    batch = _batch(rng, 4, 64, 2, scale=1e-3)
    batch["logprobs"] += np.float32(15.0)
    expected = _transcribed(batch, 2)
    self.assertLess(expected["variance"].max(), 1e-5)
    _assert_equal(
      _moments(batch, 2), {"variance": expected["variance"]}, rtol=1e-2
    )

  def test_a_long_trajectory_about_a_large_mean(self):
    # The sum of 8192 values of 5 is rounded by more than their spread allows.
    rng = np.random.default_rng(0)
    batch = _batch(rng, 2, 8192, 1, masked=0.0)
    batch["segment_ids"][:] = 1
    batch["loss_mask"][:] = True
    batch["logprobs"] = (5 + 1e-3 * rng.normal(size=(2, 8192))).astype("f4")
    batch["behavior_logprobs"][:] = 0.0
    got = _moments(batch, 1)
    exact = batch["logprobs"].astype(np.float64)
    np.testing.assert_allclose(got.mean[:, 0], exact.mean(1), rtol=1e-7)
    np.testing.assert_allclose(got.variance[:, 0], exact.var(1), rtol=1e-5)

  def test_a_uniform_shift_has_variance_exactly_nothing(self):
    # The documented blindness of `variance`, and what sees it instead.
    batch = _batch(np.random.default_rng(0), 2, 16, 2, masked=0.0)
    batch["behavior_logprobs"] = np.full((2, 16), -2.0, "f4")
    batch["logprobs"] = np.full((2, 16), -1.0, "f4")
    got = _moments(batch, 2)
    live = np.asarray(got.count) > 0
    np.testing.assert_array_equal(got.variance, np.zeros((2, 2)))
    np.testing.assert_array_equal(got.second_moment, live.astype("f4"))

  def test_the_unit_is_the_trajectory(self):
    # A trajectory's metric depends on its own tokens only, as a set: not on
    # their order, its place in the row, or the row's other trajectories.
    rng = np.random.default_rng(3)
    batch = _batch(rng, 1, 12, 1, masked=0.0)
    batch["segment_ids"][:] = 1
    batch["loss_mask"][:] = True
    batch["advantages"][:] = 1.0
    alone = _moments(batch, 1)
    other = _batch(rng, 1, 20, 1, scale=3.0, masked=0.0)
    order = rng.permutation(12)
    packed = {
      name: np.concatenate([other[name], value[:, order]], axis=1)
      for name, value in batch.items()
    }
    packed["segment_ids"][:, :20] = 1
    packed["segment_ids"][:, 20:] = 2
    together = _moments(packed, 2)
    for name, value in dataclasses.asdict(alone).items():
      np.testing.assert_allclose(
        getattr(together, name)[0, 1], value[0, 0], rtol=1e-5, err_msg=name
      )

  @parameterized.parameters(np.nan, np.inf, -np.inf, 1e38)
  def test_garbage_in_masked_slots(self, garbage):
    batch = _batch(np.random.default_rng(1), 4, 24, 3)
    clean = _moments(batch, 3)
    for name in (
      "logprobs", "behavior_logprobs", "behavior_entropy", "advantages",
    ):  # fmt: skip
      batch[name] = np.where(batch["loss_mask"], batch[name], garbage)
    batch["segment_ids"] = np.where(
      batch["loss_mask"], batch["segment_ids"], 2**30
    ).astype(np.int32)
    dirty = _moments(batch, 3)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)

  def test_all_masked_is_zero(self):
    batch = _batch(np.random.default_rng(1), 2, 8, 2)
    batch["loss_mask"][:] = False
    for field in jax.tree.leaves(_moments(batch, 2)):
      np.testing.assert_array_equal(field, np.zeros((2, 2)))

  @parameterized.parameters((0.0, -1e4), (-1e4, 0.0), (-np.inf, 0.0))
  def test_extreme_logprobs_are_finite(self, logprob, behavior_logprob):
    batch = _batch(np.random.default_rng(1), 2, 8, 2, masked=0.0)
    batch["logprobs"][:] = logprob
    batch["behavior_logprobs"][:] = behavior_logprob
    got = _moments(batch, 2)
    for field in jax.tree.leaves(got):
      self.assertTrue(np.all(np.isfinite(field)))
    np.testing.assert_array_equal(got.max_abs, 20.0 * (got.count > 0))

  def test_harmful_sees_small_advantages(self):
    # The product A ell underflows to 0 in float32; its sign does not.
    batch = _batch(np.random.default_rng(1), 2, 8, 1, masked=0.0)
    ell = batch["logprobs"] - batch["behavior_logprobs"]
    batch["advantages"] = (np.sign(ell) * 1e-37).astype("f4")
    batch["logprobs"] = (1e-4 * ell).astype("f4")
    batch["behavior_logprobs"][:] = 0.0
    got = _moments(batch, 1)
    self.assertGreater(got.harmful.max(), 0.0)
    np.testing.assert_allclose(got.harmful, got.second_moment, rtol=1e-5)

  def test_no_gradient(self):
    batch = _batch(np.random.default_rng(1), 2, 8, 2)

    def total(logprobs):
      got = ops.log_ratio_moments(
        **{**batch, "logprobs": logprobs}, num_segments=2
      )
      return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(got))

    gradient = jax.jit(jax.grad(total))(jnp.asarray(batch["logprobs"]))
    np.testing.assert_array_equal(gradient, np.zeros((2, 8)))

  def test_sharded_rows_equal_unsharded_without_communication(self):
    batch = _batch(np.random.default_rng(2), 16, 24, 3)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    f = jax.jit(ops.log_ratio_moments, static_argnames="num_segments")
    sharded = jax.device_put(batch, sharding)
    got = f(**sharded, num_segments=3)
    self.assertLen(got.mean.sharding.device_set, 8)
    jax.tree.map(
      lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-6, atol=1e-7),
      got,
      _moments(batch, 3),
    )
    program = f.lower(**sharded, num_segments=3).compile().as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "permute"):
      self.assertNotIn(collective, program)

  @parameterized.parameters((("data", "fsdp"),), (("data",),))
  def test_partition_equals_whole(self, rows):
    batch = _batch(np.random.default_rng(2), 16, 24, 3)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    partition = Partition(mesh, rows, None, "fsdp")
    f = jax.jit(
      functools.partial(
        ops.log_ratio_moments, num_segments=3, partition=partition
      )
    )
    sharded = jax.device_put(batch, NamedSharding(mesh, partition.row_spec))
    got = f(**sharded)
    self.assertEqual(
      got.mean.sharding.shard_shape((16, 3)), (2 if len(rows) == 2 else 4, 3)
    )
    jax.tree.map(np.testing.assert_array_equal, got, _moments(batch, 3))
    program = f.lower(**sharded).compile().as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "permute"):
      self.assertNotIn(collective, program)

  def test_partition_has_no_gradient(self):
    batch = _batch(np.random.default_rng(1), 8, 8, 2)
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    partition = Partition(mesh, ("fsdp",), None, "fsdp")

    def total(logprobs):
      got = ops.log_ratio_moments(
        **{**batch, "logprobs": logprobs}, num_segments=2, partition=partition
      )
      return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(got))

    gradient = jax.jit(jax.grad(total))(jnp.asarray(batch["logprobs"]))
    np.testing.assert_array_equal(gradient, np.zeros((8, 8)))

  def test_refuses(self):
    batch = _batch(np.random.default_rng(1), 2, 8, 2)
    with self.assertRaisesRegex(ValueError, "num_segments"):
      ops.log_ratio_moments(**batch, num_segments=0)
    with self.assertRaises(AssertionError):
      ops.log_ratio_moments(
        **{**batch, "advantages": batch["advantages"][:, 0]}, num_segments=2
      )
    with self.assertRaises(AssertionError):
      ops.log_ratio_moments(
        **{**batch, "loss_mask": batch["loss_mask"].astype("f4")},
        num_segments=2,
      )
