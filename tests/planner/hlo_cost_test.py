"""Costs read from compiled TPU modules, against what they are known to be."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from darl_jax.config import ConfigError
from darl_jax.planner import hlo_cost, topology

# Larger than VMEM, so that what is counted is HBM traffic on both sides.
TOKENS, EMBED, MLP, LAYERS = 32_768, 1024, 4096, 3


@functools.cache
def devices(name: str = "v5p:2x2x1"):
  try:
    return topology.devices(name)
  except ConfigError as error:
    pytest.skip(str(error))


def on_one(shape, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
  mesh = Mesh(np.array(devices()[:1]), ("x",))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))


def on_four(shape, *spec, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(
    shape, dtype, sharding=NamedSharding(square(), P(*spec))
  )


def square() -> Mesh:
  return Mesh(np.array(devices()).reshape(2, 2), ("fsdp", "tensor"))


def compiled(function, *arguments, **options):
  return jax.jit(function, **options).lower(*arguments).compile()


def cost_of(function, *arguments, **options) -> hlo_cost.Cost:
  mesh = arguments[0].sharding.mesh
  text = compiled(function, *arguments, **options).as_text()
  return hlo_cost.analyze(text, dict(mesh.shape))


def layer(x, weights):
  up, down = weights
  return x + jax.nn.relu(x @ up) @ down


def scanned(weights, x):
  x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
  return jnp.sum(jnp.square(x.astype(jnp.float32)))


def unrolled(weights, x):
  for index in range(LAYERS):
    x = layer(x, jax.tree.map(lambda w: w[index], weights))  # noqa: B023
  return jnp.sum(jnp.square(x.astype(jnp.float32)))


def stack():
  return (on_one((LAYERS, EMBED, MLP)), on_one((LAYERS, MLP, EMBED)))


class LoopFreeTest(parameterized.TestCase):
  """Where nothing repeats, the compiler's own analysis is right."""

  @parameterized.parameters(
    (lambda a, b: a @ b, (8192, 4096), (4096, 16_384)),
    (lambda a, b: jnp.tanh(a @ b) @ b.T, (16_384, 2048), (2048, 8192)),
    # A batch axis, which a convolution takes as a dilated spatial one.
    (
      lambda a, b: jnp.einsum("bntd,bnsd->bnts", a, b),
      (4, 8, 2048, 128),
      (4, 8, 2048, 128),
    ),
    (
      lambda a, b: jnp.einsum("td,ndh->nth", a, b),
      (16_384, 2048),
      (16, 2048, 128),
    ),
    (
      lambda a, b: jax.grad(lambda a: jnp.sum(jnp.square(a @ b)))(a),
      (32_768, 4096),
      (4096, 16_384),
    ),
  )
  def test_matches_the_compilers_analysis(self, function, left, right):
    program = compiled(function, on_one(left), on_one(right))
    cost = hlo_cost.analyze(program.as_text())
    expected = program.cost_analysis()
    self.assertLess(abs(cost.flops / expected["flops"] - 1), 0.02)
    self.assertLess(abs(cost.bytes / expected["bytes accessed"] - 1), 0.25)
    self.assertEmpty(cost.unknown_loops)
    self.assertEmpty(cost.collectives)

  def test_a_spatial_convolution(self):
    image, kernel = on_one((8, 64, 64, 128)), on_one((3, 3, 128, 256))

    def convolve(image, kernel):
      return jax.lax.conv_general_dilated(
        image,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
      )

    program = compiled(convolve, image, kernel)
    flops = hlo_cost.analyze(program.as_text()).flops
    self.assertLess(abs(flops / program.cost_analysis()["flops"] - 1), 0.02)

  def test_counts_elementwise_traffic_once(self):
    x = on_one((64, 2**20), jnp.float32)
    cost = cost_of(lambda x: jnp.tanh(x * 2) + x, x)
    self.assertEqual(cost.flops, 0)
    self.assertEqual(cost.bytes, 2 * 64 * 2**20 * 4)
    self.assertGreater(cost.cycles, 0)

  def test_a_slice_reads_no_more_than_it_takes(self):
    table = on_one((2**18, 1024), jnp.float32)
    start = on_one((), jnp.int32)

    def rows(table, start):
      part = jax.lax.dynamic_slice_in_dim(table, start, 4096)
      return jnp.tanh(part) * 2

    cost = cost_of(rows, table, start)
    self.assertLess(abs(cost.bytes / (2 * 4096 * 1024 * 4) - 1), 0.05)

  def test_an_update_in_place_writes_no_more_than_it_changes(self):
    table = on_one((2**18, 1024), jnp.float32)
    rows = on_one((4096, 1024), jnp.float32)

    def update(table, rows):
      return jax.lax.dynamic_update_slice_in_dim(table, rows * 2, 7, 0)

    cost = cost_of(update, table, rows, donate_argnums=0)
    self.assertLess(cost.bytes, 1.5 * 2 * 4096 * 1024 * 4)
    self.assertGreater(cost.bytes, 0.9 * 2 * 4096 * 1024 * 4)


class LoopTest(parameterized.TestCase):
  def _assert_alike(self, one, other):
    self.assertLess(abs(one.flops / other.flops - 1), 0.01)
    self.assertLess(abs(one.bytes / other.bytes - 1), 0.2)
    self.assertEmpty(one.unknown_loops)

  @pytest.mark.slow
  def test_a_scan_costs_what_its_unrolled_form_does(self):
    x = on_one((TOKENS, EMBED))
    one = cost_of(lambda x, w: scanned(w, x), x, stack())
    other = cost_of(lambda x, w: unrolled(w, x), x, stack())
    self._assert_alike(one, other)
    self.assertLess(abs(one.cycles / other.cycles - 1), 0.2)

  def test_a_training_step_costs_6nd(self):
    x = on_one((TOKENS, EMBED))
    gradients = jax.grad(scanned, argnums=(0, 1))
    one = cost_of(lambda x, w: gradients(w, x), x, stack())
    parameters = LAYERS * 2 * EMBED * MLP
    self.assertLess(abs(one.flops / (6 * parameters * TOKENS) - 1), 0.01)

  @pytest.mark.slow
  def test_a_scanned_gradient_costs_what_its_unrolled_form_does(self):
    # Each layer is computed again, so that both keep no more than its input:
    # else the scan moves what it stacks, and its unrolled form does not.
    def scanned(weights, x):
      body = jax.checkpoint(lambda x, w: (layer(x, w), None))
      x, _ = jax.lax.scan(body, x, weights)
      return jnp.sum(jnp.square(x.astype(jnp.float32)))

    def unrolled(weights, x):
      for index in range(LAYERS):
        per_layer = jax.tree.map(lambda w: w[index], weights)  # noqa: B023
        x = jax.checkpoint(layer)(x, per_layer)
      return jnp.sum(jnp.square(x.astype(jnp.float32)))

    one, other = (
      cost_of(
        lambda x, w: jax.grad(loss, argnums=(0, 1))(w, x),  # noqa: B023
        on_one((TOKENS, EMBED)),
        stack(),
      )
      for loss in (scanned, unrolled)
    )
    # Of a layer's two products the first is computed again: 7 for 6.
    parameters = LAYERS * 2 * EMBED * MLP
    self.assertLess(abs(one.flops / (7 * parameters * TOKENS) - 1), 0.01)
    self._assert_alike(one, other)

  @parameterized.parameters((3, 5), (7, 2), (1, 4))
  def test_nested_loops_multiply(self, outer, inner):
    def nested(x, w):
      def again(x, _):
        return jax.lax.scan(
          lambda x, _: (jnp.tanh(x @ w), None), x, length=inner
        )[0], None

      return jax.lax.scan(again, x, length=outer)[0]

    cost = cost_of(nested, on_one((512, 512)), on_one((512, 512)))
    self.assertEqual(cost.flops, outer * inner * 2 * 512**3)
    self.assertEmpty(cost.unknown_loops)

  @parameterized.parameters(
    (2, 12, 3, 4),
    (0, 10, 3, 4),
    (9, 0, -2, 5),
    (5, 5, 1, 0),
  )
  def test_any_counter(self, start, bound, step, trips):
    def body(carry):
      count, x, w = carry
      return count + step, jnp.tanh(x @ w), w

    def more(carry):
      return carry[0] < bound if step > 0 else carry[0] > bound

    def loop(x, w):
      return jax.lax.while_loop(more, body, (jnp.int32(start), x, w))[1]

    cost = cost_of(loop, on_one((512, 512)), on_one((512, 512)))
    self.assertEqual(cost.flops, trips * 2 * 512**3)
    self.assertEmpty(cost.unknown_loops)

  def test_an_unknown_loop_is_counted_once_and_named(self):
    def loop(x, w):
      return jax.lax.while_loop(
        lambda x: jnp.sum(x.astype(jnp.float32)) < 1e3,
        lambda x: jnp.tanh(x @ w),
        x,
      )

    cost = cost_of(loop, on_one((512, 512)), on_one((512, 512)))
    self.assertEqual(cost.flops, 2 * 512**3)
    self.assertLen(cost.unknown_loops, 1)

  def test_a_conditional_costs_its_most_expensive_branch(self):
    def either(x, w, flag):
      def much(x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=6)[
          0
        ]

      return jax.lax.cond(flag, lambda x: jnp.tanh(x @ w), much, x)

    cost = cost_of(
      either, on_one((512, 512)), on_one((512, 512)), on_one((), jnp.bool_)
    )
    self.assertEqual(cost.flops, 6 * 2 * 512**3)


class KernelTest(parameterized.TestCase):
  def _doubled(self, **options):
    def kernel(x, out):
      out[...] = x[...] * 2

    block = pl.BlockSpec((256, 2048), lambda i: (i, 0))
    return pl.pallas_call(
      kernel,
      out_shape=jax.ShapeDtypeStruct((32_768, 2048), jnp.float32),
      grid=(128,),
      in_specs=[block],
      out_specs=block,
      **options,
    )

  def test_a_kernel_costs_what_it_says(self):
    estimate = pl.CostEstimate(
      flops=12_345, bytes_accessed=2**20, transcendentals=0
    )
    doubled = self._doubled(name="doubler", cost_estimate=estimate)

    def run(x):
      return jax.lax.scan(lambda x, _: (doubled(x), None), x, length=3)[0]

    cost = cost_of(run, on_one((32_768, 2048), jnp.float32))
    kernel = cost.kernels["doubler"]
    self.assertEqual(kernel.source, "carried")
    self.assertEqual(kernel.count, 3)
    self.assertEqual(kernel.flops, 3 * 12_345)
    self.assertEqual(kernel.bytes, 3 * 2**20)
    self.assertEqual(cost.flops, 3 * 12_345)

  def test_one_that_reads_through_a_fusion_costs_what_it_says(self):
    """XLA then writes the estimate over several lines."""
    doubled = self._doubled(
      name="doubler",
      cost_estimate=pl.CostEstimate(
        flops=12_345, bytes_accessed=2**20, transcendentals=0
      ),
      compiler_params=pltpu.CompilerParams(allow_input_fusion=[True]),
    )
    cost = cost_of(
      lambda x: doubled(x + 1), on_one((32_768, 2048), jnp.float32)
    )
    kernel = cost.kernels["doubler"]
    self.assertEqual(kernel.source, "carried")
    self.assertEqual(kernel.flops, 12_345)
    self.assertEqual(kernel.bytes, 2**20)

  def test_one_that_says_nothing_is_named_with_the_bytes_of_its_ends(self):
    cost = cost_of(
      self._doubled(name="silent"), on_one((32_768, 2048), jnp.float32)
    )
    kernel = cost.kernels["silent"]
    self.assertEqual(kernel.source, "none")
    self.assertEqual(kernel.flops, 0)
    self.assertEqual(kernel.bytes, 2 * 32_768 * 2048 * 4)
    self.assertEqual(cost.bytes, kernel.bytes)


class CollectiveTest(parameterized.TestCase):
  SIZE = 4096 * 1024 * 4  # Bytes of a device's part below.

  @parameterized.parameters(
    ("all-gather", "fsdp", lambda x: jax.lax.all_gather(x, "fsdp"), 1),
    ("all-gather", "tensor", lambda x: jax.lax.all_gather(x, "tensor"), 1),
    (
      "all-gather",
      "fsdp+tensor",
      lambda x: jax.lax.all_gather(x, ("fsdp", "tensor")),
      3,
    ),
    ("all-reduce", "fsdp", lambda x: jax.lax.psum(x, "fsdp"), 1),
    (
      "all-reduce",
      "fsdp+tensor",
      lambda x: jax.lax.psum(x, ("fsdp", "tensor")),
      1.5,
    ),
    (
      "reduce-scatter",
      "fsdp",
      lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True),
      0.5,
    ),
    (
      "all-to-all",
      "tensor",
      lambda x: jax.lax.all_to_all(x, "tensor", 0, 1, tiled=True),
      0.5,
    ),
    (
      "collective-permute",
      "fsdp",
      lambda x: jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]),
      1,
    ),
  )
  def test_bytes_that_leave_a_device(self, kind, axes, function, factor):
    def local(x):
      return jax.lax.scan(
        lambda total, _: (total + jnp.sum(function(x * total)), None),
        jnp.float32(1),
        length=3,
      )[0][None, None]

    run = jax.shard_map(
      local,
      mesh=square(),
      in_specs=P("fsdp", "tensor"),
      out_specs=P("fsdp", "tensor"),
      check_vma=False,
    )
    cost = cost_of(run, on_four((8192, 2048), "fsdp", "tensor"))
    entries = [e for e in cost.collectives.values() if e.kind == kind]
    [entry] = [e for e in entries if e.bytes > 1000]
    self.assertEqual(entry.axes, axes)
    self.assertEqual(entry.count, 3)
    self.assertEqual(entry.bytes, 3 * factor * self.SIZE)
    size = math.prod(square().shape[axis] for axis in axes.split("+"))
    self.assertLen(entry.group, size)

  def test_what_the_partitioner_adds_to_a_layer(self):
    # Weights cut along fsdp are gathered for each use; products cut along
    # tensor are summed.
    x = on_four((8192, 1024), "fsdp", None, dtype=jnp.bfloat16)
    up = on_four((6, 1024, 4096), None, "fsdp", "tensor", dtype=jnp.bfloat16)
    down = on_four((6, 4096, 1024), None, "tensor", "fsdp", dtype=jnp.bfloat16)

    def forward(x, up, down):
      def body(x, w):
        x = jax.lax.with_sharding_constraint(
          layer(x, w), NamedSharding(square(), P("fsdp", None))
        )
        return x, None

      return jax.lax.scan(body, x, (up, down))[0]

    cost = cost_of(forward, x, up, down)
    by_kind = {
      (entry.kind, entry.axes): entry for entry in cost.collectives.values()
    }
    gathered = by_kind["all-gather", "fsdp"]
    # Each device holds half of what it needs of both matrices.
    self.assertEqual(gathered.bytes, 6 * 2 * 1024 * 2048 // 2 * 2)
    summed = by_kind["all-reduce", "tensor"]
    self.assertEqual(summed.bytes, 6 * 4096 * 1024 * 2)
    self.assertLess(
      abs(cost.flops / (6 * 4 * 8192 * 1024 * 4096 / 4) - 1), 0.01
    )


HEADER = (
  "HloModule m, is_scheduled=true, entry_computation_layout={()->f32[]}, "
  "num_partitions=8\n\n"
)


def module(*lines: str) -> str:
  """A module whose entry has these instructions."""
  body = "\n".join(f"  {line}" for line in lines)
  return f"{HEADER}ENTRY %main () -> f32[] {{\n{body}\n}}\n"


class TextTest(parameterized.TestCase):
  """What small compiled programs do not show."""

  @parameterized.parameters(
    "",
    "HloModule m\n\nENTRY %main () -> f32[] {\n}\n",
    "not HLO at all",
  )
  def test_refuses_what_is_no_compiled_module(self, text):
    with self.assertRaisesRegex(ValueError, "scheduled HLO module"):
      hlo_cost.analyze(text)

  @parameterized.parameters(
    ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", (0, 1), "c"),
    ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3), "b+c"),
    ("replica_groups=[4,2]<=[2,2,2]T(1,2,0)", (0, 4), "a"),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4), "a"),
    ("replica_groups=mesh['x'=4,'y'=2] {'x'}", (0, 2, 4, 6), "a+b"),
    ("replica_groups=mesh['x'=8] {'x':(1)2}", (0, 4), "a"),
    ("replica_groups=mesh['x'=8] {'x':(4)2}", (0, 1), "c"),
    ("replica_groups={}", tuple(range(8)), "a+b+c"),
    ("replica_groups={{0,3},{1,2},{4,7},{5,6}}", (0, 3), ""),
  )
  def test_groups(self, written, group, axes):
    text = module(
      "%p = f32[1000]{0:T(1024)} parameter(0)",
      f"ROOT %g = f32[1000]{{0:T(1024)}} all-reduce(%p), {written}, "
      "to_apply=%add",
    )
    cost = hlo_cost.analyze(text, {"a": 2, "b": 2, "c": 2})
    [entry] = cost.collectives.values()
    self.assertEqual(entry.group, group)
    self.assertEqual(entry.axes, axes)
    size = len(group)
    self.assertAlmostEqual(entry.bytes, 2 * 4000 * (size - 1) / size)

  @parameterized.parameters(
    ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", (0, 1, 2, 3)),
    ("{{0,7},{7,0}}", (0, 7)),
    ("{{2,3},{3,4}}", (2, 3, 4)),
  )
  def test_permutations(self, pairs, group):
    text = module(
      "%p = f32[1000]{0:T(1024)} parameter(0)",
      "ROOT %g = f32[1000]{0:T(1024)} collective-permute(%p), "
      f"source_target_pairs={pairs}",
    )
    [entry] = hlo_cost.analyze(text).collectives.values()
    self.assertEqual(entry.group, group)
    self.assertEqual(entry.bytes, 4000)

  def test_vmem_costs_no_hbm_traffic_and_tiles_are_filled(self):
    text = module(
      "%p = f32[3,100]{1,0:T(8,128)} parameter(0)",
      "%v = f32[3,100]{1,0:T(8,128)S(1)} copy(%p)",
      "ROOT %n = f32[3,100]{1,0:T(8,128)S(1)} negate(%v)",
    )
    self.assertEqual(hlo_cost.analyze(text).bytes, 8 * 128 * 4)

  def test_an_asynchronous_copy_counts_once(self):
    text = module(
      "%p = f32[1024]{0:T(1024)} parameter(0)",
      "%s = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0:T(1024)}, u32[]{:S(2)}) "
      "copy-start(%p)",
      "ROOT %d = f32[1024]{0:T(1024)S(1)} copy-done(%s)",
    )
    self.assertEqual(hlo_cost.analyze(text).bytes, 4096)

  def test_metadata_on_lines_of_its_own(self):
    text = module(
      "%p = f32[1024]{0:T(1024)} parameter(0)",
      '%k = f32[1024]{0:T(1024)} custom-call(%p), custom_call_target="tpu_'
      'custom_call", frontend_attributes={kernel_metadata={',
    ).removesuffix("\n}\n") + (
      '\n"xprof_metadata":"{}"\n'
      '}}, metadata={op_name="jit(f)/named/pallas_call"}, backend_config={'
      '"custom_call_config":{"cost_estimate":{"flops":"7","bytes_accessed":"9"}'
      "}}\n  ROOT %n = f32[1024]{0:T(1024)} negate(%k)\n}\n"
    )
    cost = hlo_cost.analyze(text)
    self.assertEqual(cost.kernels["named"].flops, 7)
    self.assertEqual(cost.bytes, 9 + 8192)

  def test_an_asynchronous_collective_counts_once(self):
    # Three fusions name it: where it starts, what runs beside it, where it
    # ends. The second multiplies matrices, and passes its buffers on.
    ends = "(f32[256]{0:T(256)}, f32[1024]{0:T(1024)}, u32[]{:S(2)})"
    gather = (
      "%g = f32[1024]{0:T(1024)} all-gather(%p), replica_groups=[2,4]<=[8], "
      'backend_config={"async_collective_fusion_config":{}}'
    )
    text = (
      HEADER
      + f"""
%start (p: f32[256]) -> (f32[256], f32[1024], u32[]) {{
  %p = f32[256]{{0:T(256)}} parameter(0)
  {gather}
  ROOT %c = {ends} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%beside (p: f32[256], o: f32[1024], f: u32[], a: f32[64,64]) -> (f32[64,64]) {{
  %p = f32[256]{{0:T(256)}} parameter(0)
  %o = f32[1024]{{0:T(1024)}} parameter(1)
  %f = u32[]{{:S(2)}} parameter(2)
  %a = f32[64,64]{{1,0:T(8,128)}} parameter(3)
  {gather}
  %d = f32[64,64]{{1,0:T(8,128)}} convolution(%a, %a), dim_labels=bf_io->bf
  ROOT %t = (f32[64,64]{{1,0:T(8,128)}}, f32[256]{{0:T(256)}}) tuple(%d, %p)
}}

%end (p: f32[256], o: f32[1024], f: u32[]) -> f32[1024] {{
  %p = f32[256]{{0:T(256)}} parameter(0)
  %o = f32[1024]{{0:T(1024)}} parameter(1)
  %f = u32[]{{:S(2)}} parameter(2)
  {gather}
  ROOT %c = f32[1024]{{0:T(1024)}} custom-call(%p, %o, %g, %f), \
custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (p: f32[256], a: f32[64,64]) -> f32[1024] {{
  %p = f32[256]{{0:T(256)}} parameter(0)
  %a = f32[64,64]{{1,0:T(8,128)}} parameter(1)
  %s = {ends} fusion(%p), kind=kCustom, calls=%start
  %x = f32[256]{{0:T(256)}} get-tuple-element(%s), index=0
  %y = f32[1024]{{0:T(1024)}} get-tuple-element(%s), index=1
  %z = u32[]{{:S(2)}} get-tuple-element(%s), index=2
  %b = (f32[64,64]{{1,0:T(8,128)}}, f32[256]{{0:T(256)}}) \
fusion(%x, %y, %z, %a), kind=kOutput, calls=%beside
  ROOT %e = f32[1024]{{0:T(1024)}} fusion(%x, %y, %z), kind=kCustom, calls=%end
}}
"""
    )
    cost = hlo_cost.analyze(text)
    [entry] = cost.collectives.values()
    self.assertEqual((entry.kind, entry.count), ("all-gather", 1))
    self.assertEqual(entry.bytes, 3 * 256 * 4)
    self.assertEqual(cost.flops, 2 * 64**3)
    # The product's operand, 64 of 128 lanes, and its result.
    matrices = 2 * 64 * 128 * 4
    self.assertBetween(cost.bytes, matrices, matrices + 3 * 1024 * 4)

  def test_a_sum_of_which_a_part_is_kept_is_a_reduce_scatter(self):
    text = (
      HEADER
      + """
%scatter (p: f32[1024], i: s32[]) -> f32[256] {
  %p = f32[1024]{0:T(1024)} parameter(0)
  %i = s32[] parameter(1)
  %r = f32[1024]{0:T(1024)} all-reduce(%p), replica_groups=[2,4]<=[8]
  ROOT %d = f32[256]{0:T(256)} dynamic-slice(%r, %i), dynamic_slice_sizes={256}
}

ENTRY %main (p: f32[1024], i: s32[]) -> f32[256] {
  %p = f32[1024]{0:T(1024)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = f32[256]{0:T(256)} fusion(%p, %i), kind=kCustom, calls=%scatter
}
"""
    )
    [entry] = hlo_cost.analyze(text).collectives.values()
    self.assertEqual(entry.kind, "reduce-scatter")
    self.assertEqual(entry.bytes, 4096 * 3 / 4)

  def test_a_fused_update_in_place(self):
    text = (
      HEADER
      + """
%copied (p: f32[64,1024]) -> f32[64,1024] {
  %p = f32[64,1024]{1,0:T(8,128)} parameter(0)
  ROOT %c = f32[64,1024]{1,0:T(8,128)} copy(%p)
}

%update (p: f32[64,1024], u: f32[8,1024], i: s32[]) -> f32[1,64,1024] {
  %p = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %u = f32[8,1024]{1,0:T(8,128)} parameter(1)
  %i = s32[] parameter(2)
  %c = f32[64,1024]{1,0:T(8,128)} fusion(%p), kind=kLoop, calls=%copied
  %d = f32[64,1024]{1,0:T(8,128)} dynamic-update-slice(%c, %u, %i, %i)
  ROOT %b = f32[1,64,1024]{2,1,0:T(8,128)} bitcast(%d)
}

ENTRY %main (p: f32[64,1024], u: f32[8,1024], i: s32[]) -> f32[1,64,1024] {
  %p = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %u = f32[8,1024]{1,0:T(8,128)} parameter(1)
  %i = s32[]{:S(6)} parameter(2)
  ROOT %f = f32[1,64,1024]{2,1,0:T(8,128)} fusion(%p, %u, %i), kind=kLoop, \
calls=%update
}
"""
    )
    scalar = 4
    self.assertEqual(hlo_cost.analyze(text).bytes, 2 * 8 * 1024 * 4 + scalar)
