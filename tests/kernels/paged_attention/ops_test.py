"""The public function: layers, slices, meshes, and what it refuses."""

import functools
import pathlib
import runpy
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.kernels.paged_attention import kernel, ops, ref
from darl_jax.kernels.partition import Partition

inputs = types.SimpleNamespace(
  **runpy.run_path(str(pathlib.Path(__file__).parent / "inputs.py"))
)

_CASES = tuple(inputs.CASES)[:8]


def _mesh():
  return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))


def _partition():
  return Partition(_mesh(), ("data",), "tensor", None)


def _arguments(dtype="float32", *, slices=4, layer=None, **options):
  """Of ``ops.paged_attention``: slices, each with pages and entries."""
  per_slice = len(_CASES) // slices
  parts = [
    inputs.make(
      _CASES[i * per_slice : (i + 1) * per_slice],
      dtype=dtype,
      heads=(8, 4),
      seed=i,
      **options,
    )
    for i in range(slices)
  ]

  def joined(*arrays):
    return np.concatenate(arrays)

  def pages(*arrays):
    whole = np.stack(arrays)
    if layer is None:
      return whole
    # Of three layers, the others all garbage.
    fill = 0 if whole.dtype == np.int8 else np.nan
    stacked = np.full((3, *whole.shape), fill, whole.dtype)
    stacked[layer] = whole
    return stacked

  query, keys, values, table, bounds, scales = zip(*parts, strict=True)
  result = dict(
    query=joined(*query),
    keys=pages(*keys),
    values=pages(*values),
    table=joined(*table),
    **{
      name: joined(*(getattr(b, name) for b in bounds))
      for name in ref.Bounds._fields
    },
  )
  if scales[0] is not None:
    result["key_scales"] = pages(*(s.keys for s in scales))
    result["value_scales"] = pages(*(s.values for s in scales))
  if layer is not None:
    result["layer"] = np.int32(layer)
  return jax.tree.map(jnp.asarray, result), parts


def _spread(arguments, mesh):
  """As the engine holds them."""
  stacked = (None,) * ("layer" in arguments)
  pages = PartitionSpec(*stacked, "data", None, "tensor")
  specs = dict.fromkeys(arguments, PartitionSpec("data"))
  specs.update(dict.fromkeys(("keys", "values"), pages))
  specs.update(query=PartitionSpec("data", "tensor"))
  specs.update(key_scales=pages, value_scales=pages, layer=PartitionSpec())
  return {
    name: jax.device_put(x, NamedSharding(mesh, specs[name]))
    for name, x in arguments.items()
  }


class PagedAttentionTest(parameterized.TestCase):
  def _assert_exact(self, got, parts, tolerance=2e-6):
    by_part = map(inputs.exact, parts)
    exact = [np.concatenate(x) for x in zip(*by_part, strict=True)]
    for g, e in zip(got, exact, strict=True):
      self.assertEqual(g.dtype, jnp.float32)
      np.testing.assert_allclose(g, e, rtol=tolerance, atol=tolerance)

  @parameterized.product(
    dtype=("float32", "int8"), slices=(1, 4), layer=(None, 0, 2)
  )
  def test_equals_float64(self, dtype, slices, layer):
    arguments, parts = _arguments(dtype, slices=slices, layer=layer)
    self._assert_exact(jax.jit(ops.paged_attention)(**arguments), parts)

  @parameterized.product(dtype=("float32", "bfloat16", "int8"), layer=(None, 1))
  def test_sharded_equals_unsharded(self, dtype, layer):
    arguments, _ = _arguments(dtype, layer=layer, rows_per_entry=2)
    f = jax.jit(functools.partial(ops.paged_attention, partition=_partition()))
    spread = _spread(arguments, _mesh())
    got = f(**spread)
    want = jax.jit(ops.paged_attention)(**arguments)
    self.assertEqual(
      got[0].sharding.shard_shape(got[0].shape), (len(_CASES) // 2, 4, 128)
    )
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
      got,
      want,
    )
    program = f.lower(**spread).compile().as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "permute"):
      self.assertNotIn(collective, program)

  def test_kernel_gets_what_the_definition_gets(self):
    # The kernel runs where the definition would, on every device's part.
    arguments, parts = _arguments("float32", layer=1)
    interpreted = functools.partial(
      kernel.paged_attention, block_pages=2, interpret=True
    )
    with mock.patch.object(ref, "paged_attention", interpreted):
      got = jax.jit(
        functools.partial(ops.paged_attention, partition=_partition())
      )(**_spread(arguments, _mesh()))
    self._assert_exact(got, parts)

  def test_a_page_without_a_valid_slot_may_be_any(self):
    # Neither way of reading pages checks where it reads.
    arguments, parts = _arguments(slices=2, layer=1)
    unused = arguments["table"] == 0
    arguments["table"] = jnp.where(unused, 10**6, arguments["table"])
    arguments["table"] = arguments["table"].at[0].set(-1)  # An empty entry.
    pages = arguments["keys"].shape[2]

    def reads(query, keys, values, table, bounds, scales):
      # In the pool, layer 1 is behind the two slices of layer 0.
      of_slice = 2 + jnp.arange(2).repeat(len(table) // 2)[:, None]
      inside = jnp.all(table // pages == of_slice, axis=1)
      return jnp.broadcast_to(inside[:, None, None], query.shape), None

    with mock.patch.object(ref, "paged_attention", reads):
      inside, _ = ops.paged_attention(**arguments)
    self.assertTrue(np.all(inside))
    self._assert_exact(jax.jit(ops.paged_attention)(**arguments), parts)

  def test_shared_prefix_own_pages_and_tail_make_the_whole(self):
    # A prompt's samples: a prefix for all four rows, pages of each row's own,
    # and tokens in no page yet; against each row's whole context in one table.
    rng = np.random.default_rng(0)
    page, rows, prefix, own, tail = 16, 4, 37, 16, 5
    width = -(-prefix // page)
    normal = functools.partial(rng.normal)
    pool = np.full((2, 1, 40, 2, page, 128), np.nan, "f4")
    shared = 1 + np.arange(width)
    for i, at in enumerate(shared):
      filled = min(page, prefix - i * page)
      pool[:, 0, at, :, :filled] = normal(size=(2, 2, filled, 128))
    mine = 10 + np.arange(rows)
    pool[:, 0, mine] = normal(size=(2, rows, 2, page, 128))
    tails = normal(size=(2, rows, 2, page, 128)).astype("f4")
    query = jnp.asarray(normal(size=(rows, 4, 128)), jnp.float32)
    keys, values = jnp.asarray(pool)
    none = jnp.zeros(rows, jnp.int32)
    attention = jax.jit(ops.paged_attention)
    parts = [
      attention(
        query,
        keys,
        values,
        jnp.asarray(shared[None]),
        head_tokens=jnp.array([prefix]),
        head_pages=jnp.array([width]),
        own_tokens=none[:1],
      ),
      attention(
        query,
        keys,
        values,
        jnp.asarray(mine[:, None]),
        head_tokens=none,
        head_pages=none,
        own_tokens=none + own,
      ),
      jax.jit(ops.attend)(
        query,
        *jnp.asarray(tails),
        jnp.broadcast_to(jnp.arange(page) < tail, (rows, page)),
      ),
    ]
    # The tail as one more page behind the own one.
    whole = pool.copy()
    last = 20 + np.arange(rows)
    whole[:, 0, last] = tails
    table = np.concatenate(
      [np.tile(shared, (rows, 1)), mine[:, None], last[:, None]], axis=1
    )
    keys, values = jnp.asarray(whole)
    want = attention(
      query,
      keys,
      values,
      jnp.asarray(table),
      head_tokens=none + prefix,
      head_pages=none + width,
      own_tokens=none + own + tail,
    )
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6),
      ops.merge(parts),
      want,
    )

  def test_no_gradient(self):
    arguments, _ = _arguments(slices=1)

    def total(query):
      out, lse = ops.paged_attention(**{**arguments, "query": query})
      return jnp.sum(out) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0))

    gradient = jax.jit(jax.grad(total))(arguments["query"])
    np.testing.assert_array_equal(gradient, np.zeros_like(gradient))

  def test_refuses(self):
    arguments, _ = _arguments(slices=2)
    for name, value in dict(
      query=arguments["query"].astype(jnp.bfloat16),
      values=arguments["values"][:, :-1],
      table=arguments["table"][:-1],
      head_tokens=arguments["head_tokens"][:, None],
      own_tokens=arguments["own_tokens"].astype(jnp.float32),
      key_scales=arguments["keys"][..., 0],
      layer=0,
    ).items():
      with self.assertRaises(AssertionError, msg=name):
        ops.paged_attention(**{**arguments, name: value})
    with self.assertRaisesRegex(ValueError, r"R = 2 must split over data = 4"):
      ops.paged_attention(**arguments, partition=_partition())

  def test_supported(self):
    def like(*shape):
      return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    arrays = like(320, 32, 128), like(36, 8, 99, 8, 64, 128), like(320, 272)
    partition = _partition()
    self.assertFalse(ops.supported(*arrays, partition=partition))
    with mock.patch.object(Partition, "platform", "tpu"):
      supported = functools.partial(ops.supported, partition=partition)
      self.assertTrue(supported(*arrays))
      self.assertFalse(supported(like(320, 32, 64), *arrays[1:]))
      # 320 entries of 1000 pages are too many, but not a fourth of them.
      self.assertTrue(supported(*arrays[:2], like(320, 1000)))
      self.assertFalse(supported(*arrays[:2], like(1280, 1000)))
