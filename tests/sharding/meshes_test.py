"""How devices are split between learner and sampler."""

import os
import platform
import subprocess
import sys
import unittest

import jax
import numpy as np
from absl.testing import parameterized

from darl_jax.config import (
  ConfigError,
  MeshConfig,
  RolloutMeshConfig,
  TrainMeshConfig,
)
from darl_jax.sharding import meshes


def _config(train=(1, 1, 1), rollout=(1, 1)):
  return MeshConfig(TrainMeshConfig(*train), RolloutMeshConfig(*rollout))


class SplitDevicesTest(parameterized.TestCase):
  @parameterized.parameters(
    ((1, 1, 1), (1, 1), 6), ((2, 2, 1), (2, 1), 2), ((1, 2, 2), (2, 2), 0)
  )
  def test_disjoint_with_two_devices_or_more(self, train, rollout, unused):
    got = meshes.split_devices(_config(train, rollout))
    self.assertEqual(
      tuple(got.train.shape.items()),
      (("data", train[0]), ("fsdp", train[1]), ("tensor", train[2])),
    )
    self.assertEqual(
      tuple(got.rollout.shape.items()),
      (("data", rollout[0]), ("tensor", rollout[1])),
    )
    together = [*got.train.devices.flat, *got.rollout.devices.flat]
    self.assertLen(set(together), got.train.size + got.rollout.size)
    self.assertEqual(together, jax.devices()[: len(together)])
    self.assertEqual(got.unused, unused)
    self.assertFalse(got.shared)

  def test_one_device_is_shared(self):
    device = jax.devices()[3]
    got = meshes.split_devices(_config(), [device])
    self.assertEqual(got.train.devices.item(), device)
    self.assertEqual(got.rollout.devices.item(), device)
    self.assertTrue(got.shared)
    self.assertEqual(got.unused, 0)

  def test_two_devices_are_not_shared(self):
    got = meshes.split_devices(_config(), jax.devices()[:2])
    self.assertFalse(got.shared)

  @parameterized.parameters(1, 2, 3, 5, 6, 8)
  def test_too_few(self, attached):
    with self.assertRaises(ConfigError) as caught:
      meshes.split_devices(_config((2, 4, 1), (2, 2)), jax.devices()[:attached])
    (problem,) = caught.exception.problems
    for part in (
      "mesh.train (data=2 x fsdp=4 x tensor=1)",
      "mesh.rollout (data=2 x tensor=2)",
      "8 + 4 = 12 devices",
      f"{attached} are attached",
    ):
      self.assertIn(part, problem)
    # The advice works, whatever the model's sizes are.
    _, advice = problem.rstrip(".").split("Try ")
    sizes = {}
    for assignment in advice.split(", "):
      name, value = assignment.split("=")
      sizes[name.removeprefix("mesh.")] = int(value)
    self.assertEqual(set(sizes.values()), {1})
    config = _config(
      [sizes[f"train.{axis}"] for axis in meshes.TRAIN_AXES],
      [sizes[f"rollout.{axis}"] for axis in meshes.ROLLOUT_AXES],
    )
    got = meshes.split_devices(config, jax.devices()[:attached])
    self.assertEqual(got.shared, attached == 1)

  def test_order_follows_the_devices_given(self):
    devices = np.array(jax.devices())[::-1]
    got = meshes.split_devices(_config((2, 1, 1), (1, 1)), list(devices))
    self.assertEqual(list(got.train.devices.flat), list(devices[:2]))
    self.assertEqual(got.rollout.devices.item(), devices[2])


# A product of 128 MiB is more than a thread's own arena would hold. The pages
# that the third call faults in.
_COUNT_FAULTS = """
import resource
from darl_jax.sharding import meshes
meshes.prepare_cpu(1)
import jax
import jax.numpy as jnp
x, y = jnp.ones((4096, 8)), jnp.ones((8, 8192))
program = jax.jit(lambda x, y: jnp.sum((z := x @ y) * jnp.max(z)))
for call in range(3):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  jax.block_until_ready(program(x, y))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


class PrepareCpuTest(parameterized.TestCase):
  @unittest.skipUnless(platform.libc_ver()[0] == "glibc", "memory of glibc")
  def test_large_temporaries_are_not_faulted_in_again(self):
    done = subprocess.run(
      [sys.executable, "-c", _COUNT_FAULTS],
      check=True,
      capture_output=True,
      text=True,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    # All of it, by 4 KiB, would be 32,768.
    self.assertLess(int(done.stdout), 1000)
