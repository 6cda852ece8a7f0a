"""The Pallas kernels: values in interpret mode, and what they compile to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.config import ConfigError
from darl_jax.kernels.log_ratio_moments import block_sizes, kernel, ops, ref
from darl_jax.kernels.log_ratio_moments.block_sizes import BlockSizes
from darl_jax.kernels.partition import Partition, per_shard
from darl_jax.planner import topology

_TRITON = "__gpu$xla.gpu.triton"
_FLOATS = ("logprobs", "behavior_logprobs", "behavior_entropy", "advantages")


def _batch(rows, tokens, segments, *, seed=0, scale=0.5, masked=0.3):
  """Packed rows as numpy: a prefix of padding, then segments of any length."""
  rng = np.random.default_rng([seed, rows, tokens, segments])
  ids = np.sort(rng.integers(0, segments + 1, (rows, tokens)), axis=1)
  behavior = -rng.exponential(size=(rows, tokens))
  return dict(
    logprobs=(behavior + scale * rng.normal(size=(rows, tokens))).astype("f4"),
    behavior_logprobs=behavior.astype("f4"),
    behavior_entropy=rng.exponential(size=(rows, tokens)).astype("f4"),
    advantages=rng.normal(size=(rows, tokens)).astype("f4"),
    loss_mask=(rng.random((rows, tokens)) > masked) & (ids > 0),
    segment_ids=ids.astype(np.int32),
  )


@functools.cache
def _interpreted(platform, num_segments, sizes):
  """Compiled once for each shape, as compiling takes most of the time."""
  kernels = dict(
    tpu=kernel.log_ratio_moments_tpu, cuda=kernel.log_ratio_moments_cuda
  )
  return jax.jit(
    functools.partial(
      kernels[platform], num_segments=num_segments, sizes=sizes, interpret=True
    )
  )


def _on(platform, batch, num_segments, *, tokens=128, segments=128, rows=8):
  """The kernel of a platform, interpreted, with blocks of that size."""
  rows = rows if platform == "tpu" else 1
  sizes = BlockSizes(rows, tokens, segments)
  return _interpreted(platform, num_segments, sizes)(**batch)


_definition = jax.jit(ref.log_ratio_moments, static_argnames="num_segments")


def _expected(batch, num_segments):
  return _definition(**batch, num_segments=num_segments)


def _assert_close(got, expected, *, rtol=1e-5):
  for field in dataclasses.fields(expected):
    value = np.asarray(getattr(expected, field.name))
    result = getattr(got, field.name)
    assert result.dtype == jnp.float32 and result.shape == value.shape
    # A mean of both signs has fewer digits than its terms.
    atol = 0.1 * rtol * np.max(np.abs(value), initial=0.0)
    np.testing.assert_allclose(
      result, value, rtol=rtol, atol=atol, err_msg=field.name
    )


_PLATFORMS = ("tpu", "cuda")
# Ragged in rows and tokens; trajectories cross the blocks' border.
_SHAPE = (11, 300, 3)


class ValuesTest(parameterized.TestCase):
  @parameterized.product(
    platform=_PLATFORMS,
    shape=(
      (8, 256, 3),  # Aligned.
      (3, 33, 5),  # Rows shorter than a block.
      _SHAPE,
      (5, 1, 1),  # One token.
      (2, 130, 130),  # Trajectories of about one token; two tiles of ids.
      (9, 140, 300),  # More trajectories than a block holds.
    ),
  )
  def test_equals_definition(self, platform, shape):
    batch = _batch(*shape)
    # An empty row, a fully masked one, and tokens beyond the clamp.
    if shape[0] > 2:
      batch["segment_ids"][0] = 0
      batch["loss_mask"][1] = False
      batch["logprobs"][2, 0::3] += 1e4
      batch["logprobs"][2, 1::3] -= 1e4
    _assert_close(_on(platform, batch, shape[2]), _expected(batch, shape[2]))

  @parameterized.product(platform=_PLATFORMS)
  def test_bfloat16(self, platform):
    batch = _batch(*_SHAPE)
    for name in _FLOATS:
      batch[name] = batch[name].astype(jnp.bfloat16)
    _assert_close(_on(platform, batch, 3), _expected(batch, 3))

  @parameterized.named_parameters(
    ("tpu", "tpu", block_sizes.TPU),
    ("tpu_many", "tpu", block_sizes.TPU_MANY_SEGMENTS),
    ("cuda", "cuda", block_sizes.CUDA),
  )
  def test_sizes_of_the_table(self, platform, sizes):
    # Just over one block in each direction; the ids about the border of two.
    batch = _batch(sizes.rows + 1, sizes.tokens + 4, 6)
    ids = batch["segment_ids"]
    batch["segment_ids"] = np.where(ids, ids + sizes.segments - 3, 0)
    num_segments = sizes.segments + 3
    got = _on(platform, batch, num_segments, **dataclasses.asdict(sizes))
    _assert_close(got, _expected(batch, num_segments))

  @parameterized.product(platform=_PLATFORMS)
  def test_ids_in_any_order(self, platform):
    # Packed rows have ascending ids, but nothing rests on it.
    batch = _batch(*_SHAPE)
    np.random.default_rng(0).permuted(
      batch["segment_ids"], axis=1, out=batch["segment_ids"]
    )
    _assert_close(_on(platform, batch, 3), _expected(batch, 3))

  @parameterized.product(
    platform=_PLATFORMS, garbage=(np.nan, np.inf, -np.inf, 3e38)
  )
  def test_garbage_in_masked_slots(self, platform, garbage):
    batch = _batch(*_SHAPE)
    clean = _on(platform, batch, 3)
    for name in _FLOATS:
      batch[name] = np.where(batch["loss_mask"], batch[name], garbage).astype(
        "f4"
      )
    ids = np.where(batch["loss_mask"], batch["segment_ids"], 2**30)
    batch["segment_ids"] = ids.astype(np.int32)
    dirty = _on(platform, batch, 3)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)

  @parameterized.product(platform=_PLATFORMS)
  def test_what_is_outside_of_the_arrays(self, platform):
    # Anything at all, where interpret mode has what is dropped anyway: so here
    # the arrays are larger than the kernel is told.
    batch = _batch(8, 256, 3, masked=0.0)
    inside = np.zeros((8, 256), bool)
    inside[:5, :200] = True
    for name in _FLOATS:
      batch[name] = np.where(inside, batch[name], np.nan).astype("f4")
    ids, mask = batch.pop("segment_ids"), batch.pop("loss_mask")
    if platform == "tpu":
      call = functools.partial(
        pl.pallas_call,
        functools.partial(kernel._tpu_kernel, shape=(5, 200)),
        grid=(1, 1, 2),
        in_specs=[pl.BlockSpec((8, 128), lambda i, j, t: (i, t))] * 5,
        out_specs=[pl.BlockSpec((8, 128), lambda i, j, t: (i, j))] * 7,
      )
      inputs = (np.where(mask, ids, 0), *batch.values())
    else:
      call = functools.partial(
        pl.pallas_call,
        functools.partial(
          kernel._cuda_kernel,
          tokens=200,
          num_segments=3,
          sizes=BlockSizes(1, 128, 16),
        ),
        grid=(5, 1),
        in_specs=[pl.BlockSpec((None, 256), lambda i, j: (i, 0))] * 6,
        out_specs=[pl.BlockSpec((None, 16), lambda i, j: (i, 0))] * 7,
      )
      inputs = (ids, mask, *batch.values())
    got = call(
      out_shape=[jax.ShapeDtypeStruct((8, 16), jnp.float32)] * 7,
      interpret=True,
    )(*inputs)
    batch.update(loss_mask=mask & inside, segment_ids=ids)
    _assert_close(
      ref.LogRatioMoments(*(field[:5, :3] for field in got)),
      jax.tree.map(lambda field: field[:5], _expected(batch, 3)),
    )
    # Other rows have no tokens, or no program.
    rest = np.array(got)
    rest[:, :5, :3] = 0.0
    expected = 0.0 if platform == "tpu" else np.nan
    outside = np.full_like(rest, expected)
    outside[:, :5, :3] = 0.0
    np.testing.assert_array_equal(rest, outside)

  @parameterized.product(platform=_PLATFORMS)
  def test_one_bad_token_spoils_its_own_trajectory_only(self, platform):
    batch = _batch(*_SHAPE, masked=0.0)
    clean = _on(platform, batch, 3)
    row, token = 4, int(np.argmax(batch["segment_ids"][4] == 2))
    batch["logprobs"][row, token] = np.nan
    dirty = _on(platform, batch, 3)
    for field in dataclasses.fields(clean):
      if field.name in ("count", "harmful", "max_abs"):
        continue  # A NaN is counted, harms nobody, and may lose a comparison.
      value = np.array(getattr(clean, field.name))
      value[row, 1] = np.nan
      np.testing.assert_array_equal(getattr(dirty, field.name), value)

  @parameterized.product(platform=_PLATFORMS)
  def test_ids_out_of_range_are_counted_nowhere(self, platform):
    batch = _batch(*_SHAPE, masked=0.0)
    batch["segment_ids"][:, 50:60] = 4
    batch["segment_ids"][:, 60:70] = -1
    batch["segment_ids"][:, 70:80] = 2**31 - 1
    batch["segment_ids"][:, 80:90] = -(2**31)
    counted = (batch["segment_ids"] >= 1) & (batch["segment_ids"] <= 3)
    got = _on(platform, batch, 3)
    np.testing.assert_array_equal(np.sum(got.count, 1), np.sum(counted, 1))
    batch["loss_mask"] = counted
    _assert_close(got, _expected(batch, 3))

  @parameterized.product(platform=_PLATFORMS, mean=(5.0, -19.0))
  def test_variance_of_little_noise_about_a_large_mean(self, platform, mean):
    rng = np.random.default_rng(0)
    ell = (mean + 1e-3 * rng.normal(size=(2, 4000))).astype("f4")
    zeros = np.zeros_like(ell)
    batch = dict(
      logprobs=ell,
      behavior_logprobs=zeros,
      behavior_entropy=zeros,
      advantages=zeros,
      loss_mask=np.ones_like(ell, bool),
      segment_ids=np.ones_like(ell, np.int32),
    )
    got = _on(platform, batch, 1, tokens=256)
    ell = ell.astype(np.float64)
    np.testing.assert_allclose(got.mean[:, 0], ell.mean(1), rtol=1e-7)
    np.testing.assert_allclose(got.variance[:, 0], ell.var(1), rtol=1e-5)

  @parameterized.product(platform=_PLATFORMS)
  def test_variance_of_a_drift(self, platform):
    # The pivot is the first block's mean, far from all that follow.
    rng = np.random.default_rng(0)
    batch = _batch(1, 1024, 1, masked=0.0)
    ell = 1e-3 * rng.normal(size=(1, 1024)) + 10.0
    ell[0, :128] -= 25.0
    batch.update(
      logprobs=ell.astype("f4"), behavior_logprobs=np.zeros((1, 1024), "f4")
    )
    batch["segment_ids"][:] = 1
    batch["loss_mask"][:] = True
    got = _on(platform, batch, 1)
    expected = np.var(batch["logprobs"].astype(np.float64))
    np.testing.assert_allclose(got.variance, [[expected]], rtol=1e-6)

  def test_in_a_shard_map(self):
    batch = _batch(32, 150, 4)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    partition = Partition(mesh, ("data", "fsdp"), None, "fsdp")
    f = per_shard(
      functools.partial(
        kernel.log_ratio_moments_tpu,
        num_segments=4,
        sizes=BlockSizes(8, 128, 128),
        interpret=True,
      ),
      partition,
      in_specs=partition.row_spec,
      out_specs=partition.row_spec,
    )
    _assert_close(jax.jit(f)(*batch.values()), _expected(batch, 4))

  @parameterized.product(platform=_PLATFORMS)
  def test_refuses_block_sizes(self, platform):
    with self.assertRaisesRegex(ValueError, "tokens = 100 .* Try 128"):
      _on(platform, _batch(2, 8, 2), 2, tokens=100)


class TrafficTest(parameterized.TestCase):
  @parameterized.parameters(
    (64, 8192, 128, 4),
    (64, 8192, 128, 2),
    (61, 8000, 100, 4),
    (64, 8200, 128, 4),
    (64, 8192, 1024, 4),
    (64, 16384, 8192, 4),
  )
  def test_each_input_is_read_once(self, rows, tokens, segments, float_bytes):
    token_bytes = 4 * float_bytes + 1 + 4
    traffic = kernel.traffic_bytes(
      rows,
      tokens,
      segments,
      token_bytes=token_bytes,
      sizes=block_sizes.tpu(rows, tokens, segments),
    )
    size = rows * (tokens * token_bytes + segments * 4 * 7)
    self.assertBetween(traffic / size, 1.0, 1.15)

  @parameterized.parameters(
    # Blocks of segments, of tokens; blocks of inputs that are fetched.
    (1, 1, 1),
    (1, 2, 2),
    (2, 1, 1),  # The same block again: it stays.
    (2, 2, 4),
  )
  def test_by_hand(self, segments, tokens, fetched):
    traffic = kernel.traffic_bytes(
      8,
      tokens * 256,
      segments * 128,
      token_bytes=21,
      sizes=BlockSizes(8, 256, 128),
    )
    inputs, outputs = 8 * 256 * 21, 8 * 128 * 4 * 7
    self.assertEqual(traffic, fetched * inputs + segments * outputs)


def _abstract(rows, tokens, dtype, sharding=None):
  return [
    jax.ShapeDtypeStruct((rows, tokens), d, sharding=sharding)
    for d in [dtype] * 4 + [jnp.bool_, jnp.int32]
  ]


def _tpu_mesh(name):
  """The chips of a topology, with the axes of a train mesh."""
  try:
    devices = topology.devices(name)
  except ConfigError as error:
    pytest.skip(str(error))
  return Mesh(np.array(devices).reshape(1, 2, 2), ("data", "fsdp", "tensor"))


_TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")


class TpuTest(parameterized.TestCase):
  """Compiled for chips that are not there; nothing here runs."""

  @parameterized.product(
    name=_TOPOLOGIES,
    shape=((64, 8192, 128, jnp.float32), (61, 8000, 100, jnp.bfloat16)),
  )
  def test_is_one_program_that_reads_once(self, name, shape):
    rows, tokens, segments, dtype = shape
    one = Mesh(_tpu_mesh(name).devices.ravel()[:1], ("data",))
    arrays = _abstract(rows, tokens, dtype, NamedSharding(one, PartitionSpec()))
    f = functools.partial(ops.log_ratio_moments, num_segments=segments)
    compiled = jax.jit(f).lower(*arrays).compile()
    self.assertEqual(compiled.as_text().count("tpu_custom_call"), 1)
    # The compiler's own count, which sees every pass outside of the kernel.
    size = sum(x.size * x.dtype.itemsize for x in arrays)
    size += rows * segments * 4 * 7
    cost = compiled.cost_analysis()
    self.assertBetween(cost["bytes accessed"] / size, 0.99, 1.15)
    self.assertGreaterEqual(cost["flops"], 40 * rows * tokens)
    self.assertEqual(compiled.memory_analysis().temp_size_in_bytes, 0)

  @parameterized.product(
    name=_TOPOLOGIES,
    shape=((1, 1, 1), (20, 300, 200), (64, 16384, 8192), (33, 8192, 1024)),
  )
  def test_other_shapes(self, name, shape):
    rows, tokens, segments = shape
    one = Mesh(_tpu_mesh(name).devices.ravel()[:1], ("data",))
    arrays = _abstract(
      rows, tokens, jnp.float32, NamedSharding(one, PartitionSpec())
    )
    f = functools.partial(ops.log_ratio_moments, num_segments=segments)
    text = jax.jit(f).lower(*arrays).compile().as_text()
    self.assertIn("tpu_custom_call", text)

  @parameterized.product(name=_TOPOLOGIES)
  def test_partitioned(self, name):
    mesh = _tpu_mesh(name)
    partition = Partition(mesh, ("data", "fsdp"), "tensor", "fsdp")
    arrays = _abstract(
      64, 4096, jnp.float32, NamedSharding(mesh, partition.row_spec)
    )
    f = functools.partial(
      ops.log_ratio_moments, num_segments=128, partition=partition
    )
    compiled = jax.jit(f).lower(*arrays).compile()
    text = compiled.as_text()
    self.assertIn("tpu_custom_call", text)
    for collective in ("all-gather", "all-reduce", "all-to-all", "permute"):
      self.assertNotIn(collective, text)
    for sharding in jax.tree.leaves(compiled.output_shardings):
      self.assertEqual(sharding.shard_shape((64, 128)), (32, 128))

  def test_in_the_scoring_pass(self):
    # As the learner calls it: in a scan over rows, on padded log-probs.
    mesh = _tpu_mesh("v5p:2x2x1")
    partition = Partition(mesh, ("data", "fsdp"), "tensor", "fsdp")

    def score(_, rows):
      logprobs = jnp.pad(rows[0][:, 1:] * 2, ((0, 0), (1, 0)))
      return None, ops.log_ratio_moments(
        logprobs, *rows[1:], num_segments=128, partition=partition
      )

    spec = PartitionSpec(None, *partition.row_spec)
    arrays = [
      jax.ShapeDtypeStruct(
        (3, *x.shape), x.dtype, sharding=NamedSharding(mesh, spec)
      )
      for x in _abstract(64, 1024, jnp.bfloat16)
    ]
    f = jax.jit(lambda *arrays: jax.lax.scan(score, None, arrays)[1])
    self.assertIn("tpu_custom_call", f.lower(*arrays).compile().as_text())


class CudaTest(parameterized.TestCase):
  """Lowered for a GPU that is not there; nothing here runs."""

  @parameterized.parameters(
    (64, 8192, 128, jnp.float32),
    (61, 8000, 100, jnp.bfloat16),
    (1, 1, 1, jnp.float32),
    (3, 33, 4096, jnp.float32),
  )
  def test_lowers(self, rows, tokens, segments, dtype):
    f = functools.partial(ops.log_ratio_moments, num_segments=segments)
    self._lower(f, _abstract(rows, tokens, dtype))

  def test_partitioned(self):
    mesh = Mesh(
      np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor")
    )
    partition = Partition(mesh, ("data", "fsdp"), "tensor", "fsdp")
    f = functools.partial(
      ops.log_ratio_moments, num_segments=128, partition=partition
    )
    sharding = NamedSharding(mesh, partition.row_spec)
    self._lower(f, _abstract(64, 4096, jnp.float32, sharding))

  def _lower(self, f, arrays):
    exported = jax.export.export(
      jax.jit(f),
      platforms=["cuda"],
      disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(_TRITON)],
    )(*arrays)
    text = exported.mlir_module()
    self.assertEqual(text.count(_TRITON), 1)
    self.assertNotIn("scatter", text)
