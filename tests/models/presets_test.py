"""Named shapes have the sizes that their models are published with."""

import math

import jax
from absl.testing import parameterized

from darl_jax.config import ModelConfig
from darl_jax.models import presets
from darl_jax.models.transformer import Policy


class PresetsTest(parameterized.TestCase):
  @parameterized.parameters(
    # Elements of the published safetensors.
    ("qwen3_1p7b", 1_720_574_976),
    ("qwen3_4b", 4_022_468_096),
    ("qwen3_8b", 8_190_735_360),
    ("qwen3_14b", 14_768_307_200),
    ("qwen3_32b", 32_762_123_264),
    ("llama3_1_8b", 8_030_261_248),
  )
  def test_parameters(self, name, count):
    config = ModelConfig(**getattr(presets, name)())
    policy = Policy(config, vocab_size=config.vocab_size)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    got = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    self.assertEqual(got, count)
