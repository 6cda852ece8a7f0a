"""The public function compiled for TPUs, beside JAX's kernel; none is run."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.experimental.pallas.ops.tpu import ragged_paged_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.config import ConfigError
from darl_jax.kernels.paged_attention import ops
from darl_jax.kernels.partition import Partition
from darl_jax.planner import topology

# So many pages that no layer's fit in VMEM, where a copy would go unseen.
_LAYERS, _PAGES, _PAGE, _WIDTH, _ROWS = 3, 4000, 64, 272, 8


def _partition(name, data, tensor):
  try:
    devices = topology.devices(name)[: data * tensor]
  except ConfigError as error:
    pytest.skip(str(error))
  mesh = Mesh(np.array(devices).reshape(data, tensor), ("data", "tensor"))
  return Partition(mesh, ("data",), "tensor", None)


def _arguments(partition, heads, dtype, *, lanes=_ROWS):
  """Of a scan over stacked layers: queries of each, and all pages."""
  num_heads, kv_heads = heads

  def like(shape, dtype, *axes):
    sharding = NamedSharding(partition.mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  slices = partition.size("data")
  shape = (_LAYERS, slices, _PAGES, kv_heads, _PAGE, 128)
  cut = (None, "data", None, "tensor")
  bounds = like((lanes,), jnp.int32, "data")
  arguments = dict(
    query=like(
      (_LAYERS, _ROWS, num_heads, 128),
      jnp.bfloat16 if dtype == "int8" else dtype,
      None,
      "data",
      "tensor",
    ),
    keys=like(shape, jnp.dtype(dtype), *cut),
    values=like(shape, jnp.dtype(dtype), *cut),
    table=like((lanes, _WIDTH), jnp.int32, "data"),
    head_tokens=bounds,
    head_pages=bounds,
    own_tokens=bounds,
  )
  if dtype == "int8":
    scales = like(shape[:-1], jnp.float32, *cut)
    arguments.update(key_scales=scales, value_scales=scales)
  return arguments


def _layers(partition, query, **rest):
  def layer(_, step):
    index, query = step
    return None, ops.paged_attention(
      query, **rest, layer=index, partition=partition
    )

  return jax.lax.scan(layer, None, (jnp.arange(_LAYERS), query))[1]


class CompileTest(parameterized.TestCase):
  @parameterized.parameters(
    ("v5e:2x2", 2, 2, (32, 8), "bfloat16", 8),
    ("v5e:2x2", 2, 2, (32, 8), "float32", 8),
    ("v5e:2x2", 2, 2, (32, 8), "int8", 8),
    ("v5e:2x2", 4, 1, (16, 8), "bfloat16", 8),
    ("v5e:2x2", 4, 1, (16, 8), "float32", 8),
    ("v5e:2x2", 4, 1, (16, 8), "int8", 8),
    ("v6e:2x2", 4, 1, (32, 8), "bfloat16", 8),
    ("v6e:2x2", 4, 1, (16, 8), "float32", 8),
    ("v6e:2x2", 2, 2, (16, 8), "int8", 8),
    # Two cores, and a sample's prompt read once for four of them.
    ("v5p:2x2x1", 1, 4, (32, 8), "bfloat16", 8),
    ("v5p:2x2x1", 1, 4, (32, 8), "bfloat16", 2),
  )
  def test_compiles(self, name, data, tensor, heads, dtype, lanes):
    partition = _partition(name, data, tensor)
    arguments = _arguments(partition, heads, dtype, lanes=lanes)
    one = {k: arguments[k] for k in ("keys", "table")}
    query = jax.ShapeDtypeStruct(arguments["query"].shape[1:], dtype)
    self.assertTrue(ops.supported(query, **one, partition=partition))
    compiled = (
      jax.jit(functools.partial(_layers, partition))
      .lower(**arguments)
      .compile()
    )
    # Not assertIn, which would print all of it.
    text = compiled.as_text()
    self.assertTrue("paged_attention" in text and "tpu_custom_call" in text)
    # Neither a layer's pages nor the table's are copied. Of the latter there
    # are fewer, and keys alone would be as many bytes as this.
    pages = arguments["keys"]
    page = np.prod(pages.shape[3:]) * pages.dtype.itemsize // tensor
    copied = lanes // data * _WIDTH * page
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    self.assertLess(temporaries, 0.25 * copied)

  def test_pages_stay_in_hbm(self):
    # Such few pages, made by the program, XLA would keep in VMEM, where the
    # kernel does not look.
    partition = _partition("v5e:2x2", 2, 2)
    arguments = _arguments(partition, (32, 8), "bfloat16")
    for name in ("keys", "values"):
      x = arguments[name]
      arguments[name] = jax.ShapeDtypeStruct(
        (*x.shape[:2], 50, *x.shape[3:]), x.dtype, sharding=x.sharding
      )

    def doubled(keys, values, **rest):
      return _layers(partition, keys=2 * keys, values=2 * values, **rest)

    text = jax.jit(doubled).lower(**arguments).compile().as_text()
    pools = re.findall(r"bf16\[150,4,64,128\]\S*", text)
    self.assertNotEmpty(pools)
    self.assertEmpty([pool for pool in pools if "S(1)" in pool])

  def test_other_shapes_are_gathered(self):
    # Heads of 64, as of a small model.
    partition = _partition("v5e:2x2", 2, 2)
    arguments = _arguments(partition, (8, 2), "bfloat16")
    for name in ("query", "keys", "values"):
      x = arguments[name]
      arguments[name] = jax.ShapeDtypeStruct(
        (*x.shape[:-1], 64), x.dtype, sharding=x.sharding
      )
    compiled = (
      jax.jit(functools.partial(_layers, partition))
      .lower(**arguments)
      .compile()
    )
    self.assertFalse("tpu_custom_call" in compiled.as_text())

  @parameterized.parameters(
    ("v5e:2x2", (32, 8), "bfloat16"),
    ("v5e:2x2", (16, 8), "float32"),
    ("v5e:2x2", (16, 8), "int8"),
    ("v6e:2x2", (32, 8), "int8"),
    ("v6e:2x2", (32, 8), "float32"),
    ("v6e:2x2", (16, 8), "bfloat16"),
  )
  def test_kernel_of_jax_compiles_too(self, name, heads, dtype):
    # It is not for this that ours is: see ``kernel``.
    num_heads, kv_heads = heads
    partition = _partition(name, 1, 1)
    whole = NamedSharding(partition.mesh, PartitionSpec())
    like = functools.partial(jax.ShapeDtypeStruct, sharding=whole)
    attention = functools.partial(
      ragged_paged_attention.ragged_paged_attention,
      num_kv_pages_per_block=8,
      num_queries_per_block=8,
      vmem_limit_bytes=32 * 2**20,
      **(dict(k_scale=1.0, v_scale=1.0) if dtype == "int8" else {}),
    )
    lowered = jax.jit(
      jax.shard_map(
        attention,
        mesh=partition.mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
      )
    ).lower(
      like((_ROWS, num_heads, 128), jnp.bfloat16 if dtype == "int8" else dtype),
      like((_PAGES, _PAGE, 2 * kv_heads, 128), jnp.dtype(dtype)),
      like((_ROWS,), jnp.int32),
      like((_ROWS, _WIDTH), jnp.int32),
      like((_ROWS + 1,), jnp.int32),
      like((1,), jnp.int32),
    )
    self.assertTrue("tpu_custom_call" in lowered.compile().as_text())
