"""Compiled programs, and those that the compiler finds no room for."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.config import ConfigError
from darl_jax.planner import programs, topology

GIB = 2**30


class MessageTest(parameterized.TestCase):
  @parameterized.parameters(
    (
      "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
      "for HLO temporaries (190.73G) exceeds available HBM (95.74G).",
      190.73 * GIB,
    ),
    (
      "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory "
      "in memory space hbm. Used 23.50G of 15.75G hbm. Exceeded hbm capacity "
      "by 7.75G.",
      23.5 * GIB,
    ),
    (
      "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 900.0M "
      "of 500.0M hbm.",
      900 * 2**20,
    ),
    (
      "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.00M "
      "of 16.00M vmem.",
      None,
    ),
    ("RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed", None),
  )
  def test_needed_hbm(self, message, needed):
    self.assertEqual(programs.needed_hbm(message), needed)


class MemoryTest(parameterized.TestCase):
  def test_peak_is_no_less_than_what_lives_together(self):
    stats = types.SimpleNamespace(
      argument_size_in_bytes=100,
      output_size_in_bytes=80,
      alias_size_in_bytes=70,
      temp_size_in_bytes=30,
      generated_code_size_in_bytes=5,
      peak_memory_in_bytes=120,
    )
    self.assertEqual(programs.memory(stats).peak, 145)
    stats.peak_memory_in_bytes = 150
    self.assertEqual(programs.memory(stats).peak, 150)


class CompileTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    try:
      devices = topology.devices("v5e:2x2")
    except ConfigError as error:
      pytest.skip(str(error))
    self.mesh = Mesh(np.array(devices).reshape(2, 2), ("fsdp", "tensor"))

  def _compile(self, function, *shapes, resident=0.0) -> programs.Program:
    arguments = [
      jax.ShapeDtypeStruct(
        shape,
        jnp.bfloat16,
        sharding=NamedSharding(self.mesh, PartitionSpec("fsdp", "tensor")),
      )
      for shape in shapes
    ]
    return programs.compile_program(
      lambda: jax.jit(function).lower(*arguments),
      name="product",
      mesh_name="train",
      mesh=self.mesh,
      slice_shape=(2, 2),
      resident=resident,
      tokens=4096,
      model_flops=2 * 4096**3,
    )

  def test_a_program(self):
    program = self._compile(lambda a, b: a @ b, (4096, 4096), (4096, 4096))
    self.assertTrue(program.fits)
    self.assertEqual(program.chip.name, "v5e")
    self.assertEqual(program.devices, 4)
    self.assertEqual(program.memory.arguments, 2 * 4096**2 * 2 / 4)
    self.assertEqual(program.cost.flops, 2 * 4096**3 / 4)
    axes = {entry.axes for entry in program.cost.collectives.values()}
    self.assertContainsSubset(axes, {"fsdp", "tensor"})
    seconds = program.estimate.seconds
    self.assertAlmostEqual(program.tokens_per_s, 4096 / seconds)
    self.assertAlmostEqual(
      program.peak_share, 2 * 4096**3 / (seconds * 4 * 197e12)
    )
    self.assertGreater(program.compile_seconds, 0)

  def test_what_lies_beside_it_counts(self):
    program = self._compile(
      lambda a: a * 2, (4096, 4096), resident=15.75 * GIB - 2**20
    )
    self.assertFalse(program.fits)
    self.assertAlmostEqual(
      program.total, program.memory.peak + program.resident
    )

  def test_out_of_hbm_is_a_result(self):
    program = self._compile(lambda a, b: a + b, (2**17, 2**17), (2**17, 2**17))
    self.assertFalse(program.fits)
    self.assertIsNone(program.memory)
    # Two arguments and a result of 8 GiB each.
    self.assertAlmostEqual(program.needed / GIB, 24.0, delta=0.1)
    self.assertIn("RESOURCE_EXHAUSTED", program.failure)
    self.assertIsNone(program.tokens_per_s)
    self.assertIsNone(program.peak_share)

  def test_out_of_vmem_is_a_result(self):
    def double(x, out):
      out[...] = x[...] * 2

    kernel = pl.pallas_call(
      double, out_shape=jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    )
    program = self._compile(
      jax.shard_map(
        lambda x: kernel(x.astype(jnp.float32)),
        mesh=self.mesh,
        in_specs=PartitionSpec("fsdp", "tensor"),
        out_specs=PartitionSpec("fsdp", "tensor"),
        check_vma=False,
      ),
      (16_384, 16_384),
    )
    self.assertFalse(program.fits)
    self.assertIsNone(program.total)
    self.assertIn("vmem", program.failure)

  def test_what_the_compiler_refuses_for_another_reason_is_a_result(self):
    def refuse():
      raise jax.errors.JaxRuntimeError("INTERNAL: not on such a slice\nmore")

    program = programs.compile_program(
      lambda: types.SimpleNamespace(compile=refuse),
      name="x",
      mesh_name="train",
      mesh=self.mesh,
      slice_shape=(2, 2),
      resident=0.0,
      tokens=1.0,
      model_flops=1.0,
    )
    self.assertFalse(program.fits)
    self.assertIsNone(program.total)
    self.assertEqual(program.failure, "INTERNAL: not on such a slice")

  def test_a_mistake_in_a_program_is_not_hidden(self):
    with self.assertRaises(TypeError):
      self._compile(lambda x: x + "y", (128, 128))
