"""The kernels of the multi-behavior loss in interpret mode, against ref.py."""

import functools
import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.kernels.multi_behavior_loss import block_sizes, kernel, ref

_BEHAVIOR = kernel.Settings("behavior", 3.0, 2.0, "truncate")
_DECOUPLED = kernel.Settings("decoupled", 3.0, 2.0, "truncate")
_MASKED = kernel.Settings("decoupled", 3.0, 2.0, "mask")
_BAND = kernel.Settings("decoupled", 3.0, 1.3, "band")
_OPEN = kernel.Settings("decoupled", math.inf, math.inf, "truncate")
_KERNELS = dict(tpu=kernel.tpu, cuda=kernel.cuda)
_BLOCKS = dict(tpu=block_sizes.TPU, cuda=block_sizes.CUDA)
# Ragged both ways. One for most tests: a kernel in interpret mode runs for
# milliseconds and compiles for a second. With nine versions its loops over them
# are not unrolled, which compiles sooner.
_SHAPE = (12, 200)


def _arrays(
  shape=_SHAPE, versions=9, *, seed=0, scale=0.4, masked=0.3, dtype="f4"
):
  """Arguments of the kernels, NaN wherever a token is masked."""
  rng = np.random.default_rng(seed)
  mu = -rng.exponential(size=shape)
  prox = mu + scale * rng.normal(size=shape)
  mask = rng.random(shape) >= masked
  floats = (
    prox + scale * rng.normal(size=shape),
    mu,
    prox,
    rng.normal(size=shape),
    rng.random(shape) / math.prod(shape),
  )
  return [
    *(jnp.asarray(np.where(mask, x, np.nan), dtype) for x in floats),
    jnp.asarray(mask),
    jnp.asarray(rng.integers(versions, size=shape), "i4"),
    jnp.linspace(0.1, 0.3, versions),
    jnp.linspace(0.4, 0.15, versions),
  ]


@functools.cache
def _kernel(platform, settings, block=None, differentiated=True):
  block = {} if block is None else dict(block=block)
  return jax.jit(
    functools.partial(
      _KERNELS[platform],
      settings=settings,
      differentiated=differentiated,
      interpret=True,
      **block,
    )
  )


@functools.cache
def _reference(settings):
  def loss(logprobs, *rest):
    return ref.multi_behavior_loss(
      logprobs,
      *rest,
      trust_region=settings.trust_region,
      dual_clip=settings.dual_clip,
      max_behavior_weight=settings.max_behavior_weight,
      behavior_weight_mode=settings.behavior_weight_mode,
    )

  def both(logprobs, *rest):
    logprobs = logprobs.astype(jnp.float32)
    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(
      logprobs, *rest
    )
    return kernel.Result(value, sums, gradient)

  return jax.jit(both)


def _pallas_call(function, *arguments):
  """The one ``pallas_call`` that a function traces to."""
  found = []

  def walk(jaxpr):
    for eqn in jaxpr.eqns:
      if eqn.primitive.name == "pallas_call":
        found.append(eqn)
      for value in eqn.params.values():
        if hasattr(value, "jaxpr"):
          walk(value.jaxpr)

  walk(jax.make_jaxpr(function)(*arguments).jaxpr)
  (eqn,) = found
  return eqn


def _counted_bytes(eqn):
  """What a call moves: a block for every step at which its place changes."""
  mapping = eqn.params["grid_mapping"]
  total = 0
  for block in mapping.block_mappings:
    index_map = jax.extend.core.jaxpr_as_fun(block.index_map_jaxpr)
    steps, last = 0, None
    for at in np.ndindex(*mapping.grid):
      place = tuple(int(i) for i in index_map(*at))
      steps += place != last
      last = place
    sizes = [getattr(size, "block_size", size) for size in block.block_shape]
    total += steps * math.prod(sizes) * block.array_aval.dtype.itemsize
  return total


class KernelTest(parameterized.TestCase):
  def assert_equal_reference(self, got, arrays, settings, rtol=1e-5):
    want = _reference(settings)(*arrays)
    mask = np.asarray(arrays[5])
    # What rounding may leave of a sum that cancels.
    size = np.abs(np.asarray(want.gradient)).sum() + 1e-9
    self.assertTrue(np.isfinite(got.loss))
    np.testing.assert_allclose(got.loss, want.loss, rtol=rtol, atol=1e-6 * size)
    np.testing.assert_allclose(
      got.gradient, want.gradient, rtol=rtol, atol=1e-9 * size
    )
    np.testing.assert_array_equal(np.asarray(got.gradient)[~mask], 0.0)
    for field in ("tokens", "ratio", "ratio_squared", "kl"):
      np.testing.assert_allclose(
        getattr(got.sums, field),
        getattr(want.sums, field),
        rtol=rtol,
        atol=1e-30,
        err_msg=field,
      )
    for field in (
      "clipped_low",
      "clipped_high",
      "clipped_dual",
      "weight_capped",
    ):
      np.testing.assert_array_equal(
        getattr(got.sums, field), getattr(want.sums, field), err_msg=field
      )

  @parameterized.product(
    platform=("tpu", "cuda"),
    case=(
      (_SHAPE, 9, _BEHAVIOR),
      (_SHAPE, 9, _DECOUPLED),
      (_SHAPE, 9, _MASKED),
      (_SHAPE, 9, _BAND),
      (_SHAPE, 9, _OPEN),
      ((8, 128), 8, _BEHAVIOR),  # One whole block, the loops unrolled.
      ((1, 1), 1, _MASKED),
      ((7, 1), 2, _DECOUPLED),  # Rows of one token.
      ((3, 48), 2, _BEHAVIOR),  # Less than a register.
      ((41, 1100), 20, _BEHAVIOR),  # Several blocks of the usual size.
    ),
  )
  def test_equals_reference(self, platform, case):
    shape, versions, settings = case
    arrays = _arrays(shape, versions)
    # Some tokens have lost their weight to a mask.
    arrays[4] = arrays[4].at[:, ::7].multiply(0)
    got = _kernel(platform, settings)(*arrays)
    self.assert_equal_reference(got, arrays, settings)

  @parameterized.parameters(
    ("tpu", block_sizes.TpuBlock(rows=8, tokens=128)),
    ("tpu", block_sizes.TpuBlock(rows=16, tokens=256)),
    ("tpu", block_sizes.TpuBlock(rows=8, tokens=1024)),
    ("tpu", block_sizes.TPU),
    ("cuda", block_sizes.CudaBlock(tokens=128, warps=1)),
    ("cuda", block_sizes.CudaBlock(tokens=512, warps=8)),
    ("cuda", block_sizes.CUDA),
  )
  def test_block_sizes(self, platform, block):
    arrays = _arrays((35, 520), seed=1)
    got = _kernel(platform, _BEHAVIOR, block)(*arrays)
    self.assert_equal_reference(got, arrays, _BEHAVIOR)

  @parameterized.product(
    platform=("tpu", "cuda"), settings=(_BEHAVIOR, _DECOUPLED)
  )
  def test_bfloat16(self, platform, settings):
    arrays = _arrays(dtype="bfloat16", seed=2)
    got = _kernel(platform, settings)(*arrays)
    self.assertEqual(got.gradient.dtype, jnp.float32)
    # The arithmetic is float32 in both, so nothing is lost but the input.
    self.assert_equal_reference(got, arrays, settings)
    # Against unrounded inputs. On average: a token that rounding moves across
    # a bound gains or loses its whole gradient.
    exact = _reference(settings)(*_arrays(seed=2))
    rounding = np.abs(np.asarray(got.gradient - exact.gradient)).sum()
    self.assertLess(rounding, 2e-2 * np.abs(exact.gradient).sum())
    np.testing.assert_allclose(got.sums.ratio, exact.sums.ratio, rtol=2e-2)
    np.testing.assert_allclose(
      got.loss, exact.loss, atol=2e-2 * np.abs(exact.gradient).sum()
    )

  @parameterized.product(
    platform=("tpu", "cuda"),
    settings=(_BEHAVIOR, _MASKED, _BAND, _OPEN),
    extreme=((0.0, -1e4), (-1e4, 0.0), (-1e4, -1e4), (-np.inf, 0.0)),
  )
  def test_extreme_logprobs(self, platform, settings, extreme):
    arrays = _arrays(seed=3)
    mask = np.asarray(arrays[5])
    for i, (start, value) in enumerate(
      ((0, extreme[0]), (0, extreme[1]), (1, extreme[1]))
    ):
      x = np.array(arrays[i])
      x[:, start::2] = np.where(mask, value, np.nan)[:, start::2]
      arrays[i] = jnp.asarray(x)
    got = _kernel(platform, settings)(*arrays)
    for leaf in jax.tree.leaves(got):
      self.assertTrue(np.all(np.isfinite(leaf)))
    self.assert_equal_reference(got, arrays, settings)

  @parameterized.product(
    platform=("tpu", "cuda"), garbage=(np.inf, -np.inf, 3e38)
  )
  def test_garbage_in_masked_slots(self, platform, garbage):
    arrays = _arrays(seed=3)
    clean = _kernel(platform, _DECOUPLED)(*arrays)
    mask = np.asarray(arrays[5])
    arrays[:5] = [jnp.where(mask, x, garbage) for x in arrays[:5]]
    arrays[6] = jnp.where(mask, arrays[6], -(2**31))
    dirty = _kernel(platform, _DECOUPLED)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)

  @parameterized.product(
    platform=("tpu", "cuda"), settings=(_BEHAVIOR, _DECOUPLED)
  )
  def test_masked_rows(self, platform, settings):
    arrays = _arrays(masked=1.0)
    got = _kernel(platform, settings)(*arrays)
    for leaf in jax.tree.leaves(got):
      np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
    arrays = _arrays()
    arrays[5] = arrays[5].at[1:4].set(False)
    got = _kernel(platform, settings)(*arrays)
    self.assert_equal_reference(got, arrays, settings)

  @parameterized.parameters("tpu", "cuda")
  def test_corners_have_the_gradient_of_the_reference(self, platform):
    # Ratios exactly on each bound, and log-ratios exactly on the clamp.
    arrays = _arrays(masked=0.0)
    bounds = np.array([0.5, 2.0, 3.0], "f4")
    # float32 logarithms whose float32 exponentials are the bounds again.
    near = np.log(bounds)[:, None] + np.arange(-2, 3) * 2.0**-24
    exact = np.asarray(jnp.exp(near.astype("f4"))) == bounds[:, None]
    self.assertTrue(exact.any(axis=1).all())
    ell = [*near[np.arange(3), exact.argmax(axis=1)], 20.0, -20.0]
    arrays[0] = arrays[0].at[:, :5].set(jnp.asarray(ell, "f4"))
    arrays[1] = arrays[1].at[:, :5].set(0.0)
    arrays[2] = arrays[2].at[:, :5].set(0.0)
    arrays[3] = arrays[3].at[::2].set(1.0).at[1::2].set(-1.0)
    arrays[7:] = jnp.full((9,), 0.5), jnp.full((9,), 1.0)
    for settings in (_BEHAVIOR, _OPEN):
      got = _kernel(platform, settings)(*arrays)
      self.assert_equal_reference(got, arrays, settings)
      self.assertTrue(np.all(got.gradient[::2, :2]))  # On 1 + hi, and below.
      self.assertTrue(np.all(got.gradient[1::2, :1]))  # On 1 - lo.
      self.assertTrue(np.all(got.gradient[1::2, 2]))  # On c, or no c.

  @parameterized.parameters("tpu", "cuda")
  def test_infinite_clip_distances(self, platform):
    arrays = _arrays(scale=2.0)
    arrays[7] = arrays[7].at[:3].set(jnp.array([0.1, 1.0, 1e-9]))
    arrays[8] = arrays[8].at[:3].set(jnp.array([jnp.inf, 0.2, 1e-9]))
    got = _kernel(platform, _BEHAVIOR)(*arrays)
    self.assert_equal_reference(got, arrays, _BEHAVIOR)
    self.assertEqual(got.sums.clipped_high[0], 0)

  @parameterized.parameters("tpu", "cuda")
  def test_versions_outside_the_table(self, platform):
    # Bounds as ``table[version]`` reads them, and part of no sum.
    arrays = _arrays(scale=1.0)
    rng = np.random.default_rng(0)
    arrays[6] = jnp.asarray(rng.integers(-20, 20, size=_SHAPE), "i4")
    arrays[6] = arrays[6].at[0, 0].set(2**31 - 1).at[0, 1].set(-(2**31))
    arrays[5] = arrays[5].at[0, :2].set(True)
    arrays[:5] = [x.at[0, :2].set(0.1) for x in arrays[:5]]
    got = _kernel(platform, _BEHAVIOR)(*arrays)
    self.assert_equal_reference(got, arrays, _BEHAVIOR)
    self.assertLess(got.sums.tokens.sum(), arrays[5].sum())

  @parameterized.parameters("tpu", "cuda")
  def test_long_sums_keep_their_digits(self, platform):
    # 0.26 million like terms: one running float32 sum would be off by 1e-4.
    arrays = _arrays((32, 8192), masked=0.0)
    arrays[3] = jnp.full((32, 8192), 0.7)
    got = _kernel(platform, _BEHAVIOR)(*arrays)
    logprobs, mu, _, advantages, weights = (
      np.asarray(x, np.float64) for x in arrays[:5]
    )
    ratio = np.exp(logprobs - mu)
    version = np.asarray(arrays[6])
    high = np.asarray(arrays[8], np.float64)[version]
    loss = -np.sum(weights * advantages * np.minimum(ratio, 1 + high))
    np.testing.assert_allclose(got.loss, loss, rtol=1e-6)
    by_version = [ratio[version == v].sum() for v in range(9)]
    np.testing.assert_allclose(got.sums.ratio, by_version, rtol=1e-6)
    np.testing.assert_array_equal(got.sums.tokens, np.bincount(version.ravel()))

  @parameterized.product(
    platform=("tpu", "cuda"), settings=(_BEHAVIOR, _MASKED)
  )
  def test_primal_writes_no_gradient(self, platform, settings):
    arrays = _arrays()
    run = _kernel(platform, settings, differentiated=False)
    got = run(*arrays)
    self.assertIsNone(got.gradient)
    want = _kernel(platform, settings)(*arrays)
    np.testing.assert_array_equal(got.loss, want.loss)
    jax.tree.map(np.testing.assert_array_equal, got.sums, want.sums)
    for aval in (x.aval for x in _pallas_call(run, *arrays).outvars):
      self.assertLess(aval.size, math.prod(_SHAPE))

  @parameterized.product(
    platform=("tpu", "cuda"),
    shape=((64, 8192), (61, 8100)),
    direction=("primal", "forward"),
    settings=(_BEHAVIOR, _DECOUPLED),
    dtype=("f4", "bfloat16"),
  )
  def test_reads_each_input_once(
    self, platform, shape, direction, settings, dtype
  ):
    run = functools.partial(
      _KERNELS[platform],
      settings=settings,
      differentiated=direction == "forward",
    )
    floats = [jax.ShapeDtypeStruct(shape, "f4")] * 4
    abstract = [
      jax.ShapeDtypeStruct(shape, dtype),
      *floats,
      jax.ShapeDtypeStruct(shape, bool),
      jax.ShapeDtypeStruct(shape, "i4"),
      *[jax.ShapeDtypeStruct((8,), "f4")] * 2,
    ]
    needed = abstract[:]
    if settings.trust_region == "behavior":
      del needed[2]
    least = sum(x.size * x.dtype.itemsize for x in needed)
    least += 4 * (1 + 8 * 8) + 4 * math.prod(shape) * (direction == "forward")
    said = block_sizes.traffic_bytes(
      shape,
      block=_BLOCKS[platform],
      direction=direction,
      trust_region=settings.trust_region,
      num_versions=8,
      logprobs_bytes=abstract[0].dtype.itemsize,
    )
    self.assertLessEqual(said, 1.15 * least)
    # The figure is what the traced grid and blocks do. A table in SMEM comes
    # whole; CUDA's mask is converted beforehand.
    eqn = _pallas_call(run, *abstract)
    counted = _counted_bytes(eqn)
    before = 2 * math.prod(shape) if platform == "cuda" else 0
    np.testing.assert_allclose(said, counted + before, rtol=1e-2)
    estimate = eqn.params["cost_estimate"]
    self.assertEqual(estimate.bytes_accessed, said)
    self.assertGreater(estimate.flops, 50 * math.prod(shape))
    self.assertEqual(
      estimate.transcendentals,
      math.prod(shape) * (3 if settings.trust_region == "decoupled" else 1),
    )
