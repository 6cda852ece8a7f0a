import dataclasses
import json
import pathlib
import tempfile

import jax
import numpy as np
import pytest
import safetensors.numpy
from absl.testing import parameterized
from jax.sharding import Mesh

from darl_jax.config import ConfigError, ModelConfig
from darl_jax.models import gguf, hf, presets, published
from darl_jax.models.transformer import Policy
from darl_jax.sharding import meshes, rules
from tests.fixtures import tiny_tokenizer
from tests.models import gguf_test

NAME = "llama-tied"


def config_of(path) -> ModelConfig:
  return ModelConfig(
    **published.read_config(path),
    compute_dtype="float32",
    remat="none",
    **presets.FRESH,
  )


def shardings_of(config: ModelConfig):
  policy = Policy(config, vocab_size=config.vocab_size)
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2, 1), meshes.TRAIN_AXES)
  return rules.param_shardings(
    policy.logical_axes,
    jax.eval_shape(policy.init, jax.random.key(0)),
    mesh=mesh,
    rules=rules.TRAIN_RULES,
  )


class PublishedTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def _problems(self, call, *arguments) -> tuple[str, ...]:
    with self.assertRaises(ConfigError) as caught:
      call(*arguments)
    self.message = str(caught.exception)
    return caught.exception.problems

  def _copy(self) -> pathlib.Path:
    return tiny_tokenizer.copy_model(NAME, self.folder / "model")

  def test_a_folder_and_a_file_are_both_models(self):
    pytest.importorskip("gguf")
    folder, file = self._copy(), gguf_test.write(str(self.folder))
    for path, reader in ((folder, hf), (file, gguf)):
      self.assertEqual(published.locate(str(path)), pathlib.Path(path))
      config = config_of(path)
      published.check(path, config)
      shardings = shardings_of(config)
      found = published.load(path, config, shardings=shardings)
      wanted = reader.load(path, config, shardings=shardings)
      jax.tree.map(np.testing.assert_array_equal, found, wanted)
      for leaf, sharding in zip(
        jax.tree.leaves(found), jax.tree.leaves(shardings), strict=True
      ):
        self.assertEqual(leaf.sharding, sharding)

  def test_rounding_is_for_files_that_are_not_exact(self):
    pytest.importorskip("gguf")
    folder, file = self._copy(), gguf_test.write(str(self.folder))
    for path, rounds in ((folder, False), (file, True)):
      config = config_of(path)
      exact, rounded = (
        published.load(
          path, config, shardings=shardings_of(config), round_to=dtype
        )["embedding"]
        for dtype in (np.float32, jax.numpy.bfloat16)
      )
      self.assertEqual(np.array_equal(exact, rounded), not rounds)

  def test_a_file_that_is_not_there(self):
    [problem] = self._problems(published.locate, "runs/none/model.gguf")
    self.assertIn("runs/none/model.gguf is no file", problem)
    self.assertIn("python launch/fetch_smollm2.py", problem)

  def test_a_folder_that_is_not_there(self):
    self.assertIn("is no folder", self._problems(published.locate, "./no")[0])

  def test_every_field_that_differs_is_named_with_the_models(self):
    folder = self._copy()
    config = config_of(folder)
    wrong = dict(num_layers=2, rope_theta=1e4, vocab_size=0, qk_norm=True)
    problems = self._problems(
      published.check, folder, dataclasses.replace(config, **wrong)
    )
    self.assertLen(problems, len(wrong))
    for name, value in wrong.items():
      right = getattr(config, name)
      self.assertIn(
        f"model.{name} = {value!r}, but the model's is {right!r}. Try "
        f"model.{name}={right!r}.",
        problems,
      )
    self.assertIn(f"--config=configs/finetune.py:{folder}", self.message)

  def test_what_is_no_shape_may_be_anything(self):
    folder = self._copy()
    published.check(
      folder,
      dataclasses.replace(
        config_of(folder),
        compute_dtype="bfloat16",
        remat="layer",
        checkpoint="elsewhere",
      ),
    )

  def test_a_missing_tensor_is_found_without_loading(self):
    folder = self._copy()
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    del tensors["model.norm.weight"]
    safetensors.numpy.save_file(tensors, file)
    problems = self._problems(published.check, folder, config_of(folder))
    self.assertEqual(problems, ("model.norm.weight [48] is missing.",))

  def test_a_missing_tensor_of_a_file(self):
    pytest.importorskip("gguf")
    tensors = gguf_test.published()
    del tensors["output_norm.weight"]
    file = gguf_test.write(str(self.folder), tensors=tensors)
    problems = self._problems(published.check, file, config_of(file))
    self.assertEqual(problems, ("output_norm.weight [64] is missing.",))

  def test_the_preset_is_what_the_real_model_publishes(self):
    # Of HuggingFaceTB/SmolLM2-135M-Instruct, what concerns the shape.
    values = dict(
      architectures=["LlamaForCausalLM"],
      model_type="llama",
      hidden_act="silu",
      hidden_size=576,
      intermediate_size=1536,
      num_hidden_layers=30,
      num_attention_heads=9,
      num_key_value_heads=3,
      max_position_embeddings=8192,
      rms_norm_eps=1e-5,
      rope_theta=100_000,
      rope_scaling=None,
      tie_word_embeddings=True,
      vocab_size=49_152,
    )
    (self.folder / "config.json").write_text(json.dumps(values))
    preset = presets.smollm2_135m()
    fields = published.read_config(self.folder)
    self.assertEqual(preset | fields, preset)
