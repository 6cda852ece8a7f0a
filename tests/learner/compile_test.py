"""The learner's programs compile for accelerators that are not here.

Compiled and lowered, never run: what they compute there is not shown.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import Mesh

from configs import darl
from darl_jax import config as config_lib
from darl_jax.config import ConfigError
from darl_jax.learner.step import Learner
from darl_jax.models.transformer import Policy
from darl_jax.planner import topology
from darl_jax.sharding import meshes

_KERNELS = ("log_ratio_moments", "multi_behavior_loss")


def _learner(devices, *, shape=(1, 2, 2), **model) -> Learner:
  """The default run's, on a mesh of four devices."""
  fields = darl.get_config()
  fields.model.update(model)
  fields.mesh.train.update(dict(zip(meshes.TRAIN_AXES, shape, strict=True)))
  config = config_lib.parse(fields)
  return Learner(
    Policy(config.model, vocab_size=config.model.vocab_size or 320),
    config.learner,
    config.objective,
    mesh=Mesh(np.array(devices).reshape(shape), meshes.TRAIN_AXES),
    temperature=1.0,
    truncated=False,
    num_steps=config.num_steps,
    publish_dtype=jnp.dtype("bfloat16"),
  )


class TPUTest(parameterized.TestCase):
  @parameterized.parameters("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
  def test_compiles_for(self, name):
    try:
      devices = topology.devices(name)
    except ConfigError as error:
      self.skipTest(str(error))
    programs = _learner(devices[:4]).programs()
    text = {
      name: lower().compile().as_text() for name, lower in programs.items()
    }
    self.assertIn("log_ratio_moments", text["score"])
    self.assertIn("multi_behavior_loss", text["train_step"])
    for program in ("score", "train_step"):
      self.assertIn("tpu_custom_call", text[program])
    # A kernel sees its device's rows alone: nothing gathers a batch for it.
    self.assertNotIn("f32[64,48]", text["train_step"])

  @pytest.mark.slow
  def test_an_8b_step_compiles_and_fits(self):
    """The largest program of configs/qwen3_8b_v5p.py, on its mesh."""
    try:
      devices = topology.devices("v5p:4x4x4")
    except ConfigError as error:
      self.skipTest(str(error))
    from configs import qwen3_8b_v5p

    config = config_lib.parse(qwen3_8b_v5p.get_config())
    mesh = meshes.split_devices(config.mesh, devices).train
    learner = Learner(
      Policy(config.model, vocab_size=config.model.vocab_size),
      config.learner,
      config.objective,
      mesh=mesh,
      temperature=1.0,
      truncated=False,
      num_steps=config.num_steps,
      publish_dtype=jnp.dtype("bfloat16"),
    )
    compiled = learner.programs()["train_step"]().compile()
    peak = compiled.memory_analysis().peak_memory_in_bytes
    self.assertLess(peak, 40 * 2**30)
    # Weights move once for each use, whole: no products of thin pieces.
    self.assertNotIn("collective-permute", compiled.as_text())


class CUDATest(parameterized.TestCase):
  @parameterized.parameters("score", "train_step")
  def test_lowers(self, name):
    """For one GPU; its kernels are there by name."""
    learner = _learner(jax.devices()[:1], shape=(1, 1, 1))
    jitted, abstract = {
      "score": (learner._score_rows, "score"),
      "train_step": (learner._train_step, "train_step"),
    }[name]
    arguments = learner.programs()[abstract]().args_info[0]
    shapes = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments
    )
    exported = jax.export.export(
      jax.jit(jitted),
      platforms=["cuda"],
      disabled_checks=[
        jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
      ],
    )(*shapes)
    text = exported.mlir_module()
    kernel = dict(zip(("score", "train_step"), _KERNELS, strict=True))[name]
    self.assertIn("triton", text)
    self.assertIn(kernel, text)
