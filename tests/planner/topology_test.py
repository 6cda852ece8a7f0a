"""Names of slices: what exists, and what is said of what does not."""

import pytest
from absl.testing import parameterized

from darl_jax.config import ConfigError
from darl_jax.planner import topology


class TopologyTest(parameterized.TestCase):
  @parameterized.parameters(
    ("v5p", "not CHIP:AxB"),
    ("v9:2x2", "v4, v5e, v5p, v6e, tpu7x"),
    ("v5e:2", "not CHIP:AxB"),
    ("v5e:0x4", "not CHIP:AxB"),
    ("v5p:2x2x0", "not CHIP:AxB"),
    ("v5e:2x2 ", "not CHIP:AxB"),
    ("v5e:2x2x2", "3 axes, where v5e has 2. Try v5e:4x4."),
    ("v5p:4x4", "2 axes, where v5p has 3. Try v5p:4x4x4."),
    ("v5e:16x32", "512 chips, more than the 256"),
    ("v6e:32x16", "512 chips, more than the 256"),
    ("v4:16x16x20", "5120 chips, more than the 4096"),
    ("v5p:20x20x24", "9600 chips, more than the 8960"),
    ("tpu7x:20x20x24", "9600 chips, more than the 9216"),
  )
  def test_refuses(self, name, says):
    with self.assertRaises(ConfigError) as caught:
      topology.devices(name)
    self.assertIn(says, str(caught.exception))
    self.assertIn(repr(name), str(caught.exception))

  @parameterized.parameters("v5e:16x16", "v5p:16x20x28", "v4:16x16x16")
  def test_a_whole_pod_is_a_slice(self, name):
    self.assertEmpty(topology.name_problems(name))

  @parameterized.parameters("v5e:3x4", "v5p:1x1x1")
  def test_hands_on_what_the_compiler_refuses(self, name):
    self.assertEmpty(topology.name_problems(name))
    with self.assertRaises(ConfigError) as caught:
      topology.devices(name)
    self.assertIn("cannot be compiled for", str(caught.exception))
    self.assertIn("pip install 'darl_jax[tpu]'", str(caught.exception))

  def test_devices(self):
    try:
      devices = topology.devices("v5e:4x4")
    except ConfigError as error:
      pytest.skip(str(error))
    self.assertLen(devices, 16)
    self.assertLen({tuple(device.coords) for device in devices}, 16)
