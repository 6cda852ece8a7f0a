"""Published checkpoints: what they say, what comes in, and what goes out."""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from absl.testing import parameterized
from jax.sharding import Mesh

from configs import darl
from darl_jax import config as config_lib
from darl_jax.config import ConfigError, ModelConfig
from darl_jax.models import hf, kv_cache, presets
from darl_jax.models.kv_cache import Span
from darl_jax.models.transformer import Policy
from darl_jax.sharding import meshes, rules

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_FIXTURES = _ROOT / "tests" / "fixtures"
_GIVEN = ("llama-tied", "qwen2-bias", "qwen3-qknorm")
_ALL = (
  *_GIVEN,
  "llama3-scaled",
  "mistral",
  "qwen3-moe",
  "qwen3-moe-unnormalized",
)
_GENERATION = dict(bos_token_id=1, eos_token_id=[2, 5], pad_token_id=0)


def _published(name: str) -> dict:
  return json.loads((_FIXTURES / name / "config.json").read_text())


def _config(folder: pathlib.Path) -> ModelConfig:
  return ModelConfig(
    **hf.read_config(folder),
    compute_dtype="float32",
    remat="none",
    **presets.FRESH,
  )


def _policy(config: ModelConfig) -> Policy:
  return Policy(config, vocab_size=config.vocab_size)


def _mesh(*shape: int) -> Mesh:
  devices = np.array(jax.devices()[: np.prod(shape)])
  return Mesh(devices.reshape(shape), meshes.TRAIN_AXES)


def _shardings(config: ModelConfig, mesh: Mesh):
  policy = _policy(config)
  return rules.param_shardings(
    policy.logical_axes,
    jax.eval_shape(policy.init, jax.random.key(0)),
    mesh=mesh,
    rules=rules.TRAIN_RULES,
  )


def _load(folder, config=None, mesh=None):
  config = config or _config(folder)
  shardings = _shardings(config, mesh or _mesh(1, 1, 1))
  return hf.load(folder, config, shardings=shardings)


def _tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
  tensors = {}
  for file in folder.glob("*.safetensors"):
    tensors |= safetensors.numpy.load_file(file)
  return tensors


def _random_params(config: ModelConfig, seed: int = 0):
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(_policy(config).init, jax.random.key(0))
  return jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes
  )


def _small(**changes) -> ModelConfig:
  small = dict(num_layers=3, embed_dim=16, mlp_dim=24, num_heads=4, head_dim=6)
  return ModelConfig(**{**presets.nano(), **small, "vocab_size": 40, **changes})


_MOE = dict(num_experts=4, experts_per_token=2, expert_mlp_dim=12)
_SHAPES = dict(
  llama=dict(qk_norm=False, tie_embeddings=False),
  scaled=dict(qk_norm=False, rope_scaling_factor=8.0, rope_theta=5e5),
  qwen2=dict(qk_norm=False, qkv_bias=True),
  qwen3=dict(),
  qwen3_moe=dict(**_MOE, tie_embeddings=False),
  qwen3_moe_unnormalized=dict(**_MOE, normalize_expert_weights=False),
)


class FolderTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder)

  def _write_config(self, values: dict) -> pathlib.Path:
    (self.folder / "config.json").write_text(json.dumps(values))
    return self.folder

  def _problems(self, function, *args, **kwargs) -> tuple[str, ...]:
    with self.assertRaises(ConfigError) as caught:
      function(*args, **kwargs)
    return caught.exception.problems

  def _assert_same(self, got, want):
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))
    for (path, x), y in zip(
      jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
      self.assertEqual(x.dtype, np.float32)
      np.testing.assert_array_equal(
        np.asarray(x), np.asarray(y), jax.tree_util.keystr(path)
      )


class ParityTest(parameterized.TestCase):
  """Against transformers, through the learner's forward and the cache."""

  @parameterized.parameters(*_ALL)
  def test_one_device(self, name):
    self._check(name, _mesh(1, 1, 1))

  @pytest.mark.slow
  @parameterized.parameters(*_GIVEN, "qwen3-moe")
  def test_eight_devices(self, name):
    self._check(name, _mesh(2, 2, 2))

  def _check(self, name: str, mesh: Mesh):
    config = _config(_FIXTURES / name)
    policy = _policy(config)
    params = _load(_FIXTURES / name, config, mesh)
    partition = rules.partition(mesh, rules.TRAIN_RULES)
    rows = rules.rows_sharding(mesh, rules.TRAIN_RULES)
    with np.load(_FIXTURES / name / "expected.npz") as file:
      expected = dict(file)
    tokens, greedy = (
      jax.device_put(expected[key].astype(np.int32), rows)
      for key in ("tokens", "greedy")
    )

    def logits(params, hidden):
      return jnp.einsum("btd,vd->btv", hidden, policy.unembedding(params))

    @jax.jit
    def logprobs(params, tokens):
      positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
      hidden = policy.hidden(
        params,
        tokens,
        positions,
        jnp.ones_like(tokens),
        partition=partition,
      )
      scores = jax.nn.log_softmax(logits(params, hidden)[:, :-1])
      return jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]

    @functools.partial(jax.jit, static_argnames="new")
    def continuation(params, prompt, new):
      batch, length = prompt.shape
      positions = jnp.broadcast_to(jnp.arange(length), prompt.shape)
      hidden, keys, values = policy.read(
        params,
        prompt,
        positions,
        jnp.ones_like(prompt),
        dtype=jnp.float32,
        partition=partition,
      )
      span = Span.of(keys, values, jnp.ones(prompt.shape, bool))
      tail = kv_cache.empty_tail(
        config, rows=batch, slots=new, dtype=jnp.float32
      )
      first = jnp.argmax(logits(params, hidden[:, -1:]), axis=-1)

      def step(carry, index):
        token, tail = carry
        hidden, tail = policy.extend(
          params,
          token,
          jnp.broadcast_to(length + index, token.shape),
          [span],
          tail,
          partition=partition,
        )
        following = jnp.argmax(logits(params, hidden), axis=-1)
        return (following.astype(jnp.int32), tail), token[:, 0]

      _, tokens = jax.lax.scan(
        step, (first.astype(jnp.int32), tail), jnp.arange(new)
      )
      return tokens.T

    np.testing.assert_allclose(
      logprobs(params, tokens), expected["token_logprobs"], atol=2e-5, rtol=0
    )
    np.testing.assert_array_equal(
      continuation(params, greedy[:, :12], 24), expected["greedy"][:, 12:]
    )

  def test_heads_that_do_not_divide_are_refused_with_advice(self):
    values = darl.get_config()
    values.model.update(hf.read_config(_FIXTURES / "llama-tied"))
    values.mesh.train.tensor = 4
    with self.assertRaises(ConfigError) as caught:
      config_lib.parse(values)
    (advice,) = [p for p in caught.exception.problems if "num_kv_heads" in p]
    self.assertIn("model.num_kv_heads = 2 does not split over", advice)
    self.assertIn("Try mesh.train.tensor=2.", advice)
    values.mesh.train.tensor = 2
    config_lib.parse(values)
    with self.assertRaisesRegex(ValueError, "heads' of size .* does not split"):
      _load(_FIXTURES / "llama-tied", mesh=_mesh(1, 1, 4))


class ReadConfigTest(FolderTestCase):
  def test_newer_style(self):
    self.assertEqual(
      hf.read_config(_FIXTURES / "llama3-scaled"),
      dict(
        num_layers=3,
        embed_dim=32,
        mlp_dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10_000.0,
        rope_scaling_factor=4.0,
        rope_low_frequency_factor=1.0,
        rope_high_frequency_factor=4.0,
        rope_original_context=16,
        context_tokens=64,
        norm_eps=1e-5,
        tie_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        num_experts=0,
        experts_per_token=0,
        expert_mlp_dim=0,
        normalize_expert_weights=True,
        vocab_size=128,
      ),
    )

  def test_older_style_says_the_same(self):
    for name in ("llama3-scaled", "llama-tied", "qwen3-moe"):
      older = _published(name)
      rope = older.pop("rope_parameters")
      older["rope_theta"] = rope.pop("rope_theta")
      older["rope_scaling"] = None if len(rope) == 1 else rope
      if name == "llama3-scaled":
        rope["type"] = rope.pop("rope_type")  # Older still.
      if name == "qwen3-moe":
        older["num_experts"] = older.pop("num_local_experts")
      self.assertEqual(
        hf.read_config(self._write_config(older)),
        hf.read_config(_FIXTURES / name),
      )

  def test_families(self):
    read = {name: hf.read_config(_FIXTURES / name) for name in _ALL}
    self.assertEqual([n for n in _ALL if read[n]["qkv_bias"]], ["qwen2-bias"])
    self.assertEqual(
      [n for n in _ALL if read[n]["qk_norm"]],
      ["qwen3-qknorm", "qwen3-moe", "qwen3-moe-unnormalized"],
    )
    self.assertEqual(
      [n for n in _ALL if read[n]["tie_embeddings"]],
      ["llama-tied", "qwen2-bias"],
    )
    # Without head_dim it is hidden_size / num_attention_heads.
    self.assertNotIn("head_dim", _published("qwen2-bias"))
    self.assertEqual(read["qwen2-bias"]["head_dim"], 8)
    experts = [
      (r["num_experts"], r["experts_per_token"], r["expert_mlp_dim"])
      for r in read.values()
    ]
    self.assertEqual(experts, [(0, 0, 0)] * 5 + [(6, 3, 20)] * 2)
    self.assertTrue(read["qwen3-moe"]["normalize_expert_weights"])
    self.assertFalse(read["qwen3-moe-unnormalized"]["normalize_expert_weights"])

  def test_is_all_of_a_model_but_how_it_is_computed(self):
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    self.assertEqual(
      names - set(hf.read_config(_FIXTURES / "mistral")),
      {"compute_dtype", "remat", *presets.FRESH},
    )

  def test_what_may_be_absent(self):
    values = _published("llama-tied")
    for name in ("num_key_value_heads", "head_dim", "tie_word_embeddings"):
      del values[name]
    del values["rope_parameters"], values["hidden_act"]
    read = hf.read_config(self._write_config(values))
    self.assertEqual((read["num_kv_heads"], read["head_dim"]), (6, 8))
    self.assertFalse(read["tie_embeddings"])
    self.assertEqual(read["rope_theta"], 10_000.0)

  @parameterized.parameters(
    ("llama-tied", dict(hidden_act="gelu"), "hidden_act = .gelu. .*: silu\\."),
    ("llama-tied", dict(attention_bias=True), "attention_bias = True"),
    ("llama-tied", dict(mlp_bias=True), "mlp_bias = True"),
    (
      "llama-tied",
      dict(quantization_config={"bits": 4}),
      "quantization_config = {.bits.: 4} .* Supported: null",
    ),
    ("llama-tied", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (
      "llama-tied",
      dict(architectures=["LlamaForSequenceClassification"]),
      "architectures = .*Classification.*LlamaForCausalLM",
    ),
    ("qwen3-qknorm", dict(attention_bias=True), "attention_bias = True"),
    ("mistral", dict(sliding_window=4096), "sliding_window = 4096 .* null"),
    (
      "qwen2-bias",
      dict(
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        layer_types=None,
      ),
      "use_sliding_window = True .* Supported: false",
    ),
    (
      "qwen2-bias",
      dict(layer_types=["full_attention", "sliding_attention"]),
      "layer_types = .'sliding_attention'.",
    ),
    ("qwen3-moe", dict(decoder_sparse_step=2), "decoder_sparse_step = 2"),
    ("qwen3-moe", dict(mlp_only_layers=[0]), "mlp_only_layers = .0."),
    (
      "llama-tied",
      dict(rope_parameters=dict(rope_type="yarn", factor=2.0)),
      "rope_parameters.rope_type = 'yarn' .* default, llama3",
    ),
    (
      "qwen3-qknorm",
      dict(rope_scaling=dict(type="linear", factor=2.0)),
      "rope_scaling.rope_type = 'linear'",
    ),
    (
      "llama-tied",
      dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))),
      "rope_parameters = .*one set for all layers",
    ),
    (
      "llama-tied",
      dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4)),
      "rope_parameters.factor is missing",
    ),
    ("llama-tied", dict(rope_theta=5.0), "rope_theta = 5.0 is not rope_para"),
    ("llama-tied", dict(hidden_size=None), "hidden_size is missing"),
    ("llama-tied", dict(hidden_size=48.0), "hidden_size = 48.0 is not a whole"),
    ("llama-tied", dict(num_hidden_layers=True), "num_hidden_layers = True"),
    ("llama-tied", dict(vocab_size=0), "vocab_size = 0 is not a whole number"),
    ("llama-tied", dict(rms_norm_eps="tiny"), "rms_norm_eps = 'tiny' is not"),
    ("llama-tied", dict(tie_word_embeddings=1), "tie_word_embeddings = 1 is"),
    ("qwen3-qknorm", dict(num_key_value_heads=None), "_heads is missing"),
    ("qwen3-moe", dict(num_local_experts=None), "num_local_experts is missing"),
  )
  def test_refused(self, name, changes, words):
    folder = self._write_config(_published(name) | changes)
    problems = self._problems(hf.read_config, folder)
    self.assertLen([p for p in problems if "missing" not in p][1:], 0)
    self.assertRegex("\n".join(problems), words)

  @parameterized.parameters(
    ("qwen2-bias", dict(sliding_window=8)),
    (
      "qwen2-bias",
      dict(
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=3,
        layer_types=None,
      ),
    ),
    ("qwen3-qknorm", dict(use_sliding_window=True)),
    ("llama-tied", dict(attention_dropout=0.1, rope_theta=100_000.0)),
    ("llama-tied", dict(rope_theta=None, rope_scaling=None)),
    ("qwen2-bias", dict(attention_bias=True)),  # It has no such field.
  )
  def test_not_in_use(self, name, changes):
    folder = self._write_config(_published(name) | changes)
    self.assertEqual(hf.read_config(folder), hf.read_config(_FIXTURES / name))

  def test_an_absent_window_of_mistral_is_a_window(self):
    values = _published("mistral")
    del values["sliding_window"]
    (problem,) = self._problems(hf.read_config, self._write_config(values))
    self.assertIn("4096", problem)

  def test_all_problems_at_once(self):
    values = _published("llama-tied") | dict(
      hidden_act="gelu", mlp_bias=True, hidden_size=None, rms_norm_eps=0
    )
    with self.assertRaises(ConfigError) as caught:
      hf.read_config(self._write_config(values))
    self.assertLen(caught.exception.problems, 4)
    self.assertStartsWith(
      str(caught.exception), f"4 problems in {self.folder}/config.json:\n  * "
    )

  def test_another_family(self):
    folder = self._write_config(dict(model_type="gemma3", mlp_bias=True))
    first, second = self._problems(hf.read_config, folder)
    self.assertIn("model_type = 'gemma3' is not implemented", first)
    self.assertIn("llama, mistral, qwen2, qwen3, qwen3_moe", first)
    self.assertIn("mlp_bias", second)

  @parameterized.parameters(
    (None, "No such file"), ("{", "not JSON"), ("[1]", "not a JSON object")
  )
  def test_no_config(self, text, words):
    if text is not None:
      (self.folder / "config.json").write_text(text)
    (problem,) = self._problems(hf.read_config, self.folder)
    self.assertIn(words, problem)


class LoadTest(FolderTestCase):
  def _write(self, tensors, config=None, file="model.safetensors"):
    safetensors.numpy.save_file(tensors, self.folder / file)
    if config:
      self._write_config(config)
    return self.folder

  def _fixture(self, name="qwen3-qknorm"):
    return _tensors(_FIXTURES / name), _published(name)

  def test_every_device_holds_its_part(self):
    for name in ("qwen2-bias", "qwen3-moe"):
      whole = _load(_FIXTURES / name)
      cut = _load(_FIXTURES / name, mesh=_mesh(2, 2, 2))
      self._assert_same(cut, whole)
      shardings = _shardings(_config(_FIXTURES / name), _mesh(2, 2, 2))
      jax.tree.map(
        lambda leaf, sharding: self.assertEqual(leaf.sharding, sharding),
        cut,
        shardings,
      )

  @parameterized.parameters(700, 3000)
  def test_pieces_of_any_size_make_the_same_parameters(self, size):
    want = _load(_FIXTURES / "qwen3-moe")
    with (
      mock.patch.object(hf, "_PIECE_BYTES", size),
      mock.patch.object(hf, "_MAPPED_BYTES", size),
      mock.patch.object(
        hf, "_read_block", side_effect=hf._read_block
      ) as read_block,
    ):
      got = _load(_FIXTURES / "qwen3-moe", mesh=_mesh(1, 1, 2))
    self._assert_same(got, want)
    leaves = jax.tree.leaves(want)
    self.assertGreater(read_block.call_count, 2 * len(leaves))

  def test_several_files_equal_one(self):
    self.assertLen(list((_FIXTURES / "llama3-scaled").glob("*.safetensors")), 4)
    folder = self._write(*self._fixture("llama3-scaled"))
    self._assert_same(_load(folder), _load(_FIXTURES / "llama3-scaled"))

  @parameterized.parameters("bfloat16", "float16")
  def test_other_dtypes_become_float32(self, dtype):
    tensors, config = self._fixture()
    halves = {k: v.astype(jnp.dtype(dtype)) for k, v in tensors.items()}
    # One tensor of a stack is wider than the others.
    wide = "model.layers.1.mlp.up_proj.weight"
    halves[wide] = tensors[wide]
    got = _load(self._write(halves, config))
    want = {k: v.astype(np.float32) for k, v in halves.items()}
    other = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    safetensors.numpy.save_file(want, other / "model.safetensors")
    self._assert_same(got, _load(other, _config(self.folder)))

  def test_copies_of_what_is_known_are_ignored(self):
    tensors, config = self._fixture("llama-tied")
    want = _load(_FIXTURES / "llama-tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[name] = np.ones(4, np.float32)
    self._assert_same(_load(self._write(tensors, config)), want)

  def test_everything_wrong_is_listed_before_anything_is_allocated(self):
    tensors, config = self._fixture()
    del tensors["model.norm.weight"]
    del tensors["model.layers.2.self_attn.q_norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(3, np.float32)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].T.copy()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    folder = self._write(tensors, config)
    with mock.patch.object(hf, "_load_parameter") as load_parameter:
      problems = self._problems(_load, folder)
    load_parameter.assert_not_called()
    self.assertCountEqual(
      problems,
      [
        "model.norm.weight [48] is missing.",
        "model.layers.2.self_attn.q_norm.weight [16] is missing.",
        "model.layers.0.self_attn.q_proj.bias [3] is unexpected.",
        f"{name} has shape [96, 48], but the config says [48, 96].",
        "lm_head.weight is of I8, not of F32, F16, BF16.",
      ],
    )

  def test_every_missing_expert_is_listed(self):
    tensors, config = self._fixture("qwen3-moe")
    for number in (1, 4):
      del tensors[f"model.layers.1.mlp.experts.{number}.up_proj.weight"]
    problems = self._problems(_load, self._write(tensors, config))
    self.assertEqual(
      problems,
      tuple(
        f"model.layers.1.mlp.experts.{number}.up_proj.weight [20, 32] is "
        "missing."
        for number in (1, 4)
      ),
    )

  def test_other_formats(self):
    self._write_config(_published("llama-tied"))
    (self.folder / "pytorch_model.bin").write_bytes(b"x")
    (problem,) = self._problems(_load, self.folder)
    self.assertIn("neither model.safetensors nor", problem)
    self.assertIn("pytorch_model.bin", problem)

  def test_a_truncated_file(self):
    folder = self._write(*self._fixture())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    (problem,) = self._problems(_load, folder)
    self.assertStartsWith(problem, "model.safetensors cannot be read")

  def test_a_wrong_index(self):
    tensors, config = self._fixture()
    names = sorted(tensors)
    self._write({n: tensors[n] for n in names[:5]}, config, "a.safetensors")
    self._write({n: tensors[n] for n in names[4:9]}, file="b.safetensors")
    index = dict.fromkeys(names[:6], "a.safetensors")
    index |= dict.fromkeys(names[6:9], "b.safetensors")
    index |= dict.fromkeys(names[9:], "c.safetensors")
    path = self.folder / "model.safetensors.index.json"
    path.write_text(json.dumps(dict(weight_map=index)))
    problems = self._problems(_load, self.folder)
    self.assertLen(problems, 3)
    self.assertStartsWith(problems[0], f"{names[5]} is not in a.safetensors")
    self.assertIn(f"{names[4]} is both in a", problems[1])
    self.assertStartsWith(problems[2], "c.safetensors cannot be read")
    for weight_map, words in (
      ({}, "has no weight_map"),
      ({"x": "../../secret.safetensors"}, "is no file's name"),
    ):
      path.write_text(json.dumps(dict(weight_map=weight_map)))
      (problem,) = self._problems(_load, self.folder)
      self.assertIn(words, problem)

  def test_an_axis_inside_a_published_one_is_never_cut(self):
    config = _config(_FIXTURES / "llama-tied")
    shardings = _shardings(config, _mesh(1, 1, 2))
    query = shardings["layers"]["attention"]["query"]
    shardings["layers"]["attention"]["query"] = query.update(
      spec=jax.sharding.PartitionSpec(None, None, None, "tensor")
    )
    with self.assertRaisesRegex(ValueError, "q_proj.*is cut"):
      hf.load(_FIXTURES / "llama-tied", config, shardings=shardings)


_MEASURE = """
import json, os, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
import psutil
from tests.models import hf_test

folder, *shape = sys.argv[1:]
mesh = hf_test._mesh(*map(int, shape))
config = hf_test._config(folder)
hf_test._load(hf_test._FIXTURES / "mistral", mesh=mesh)  # Starts everything.
before = psutil.Process().memory_info().rss
params = jax.block_until_ready(hf_test._load(folder, config, mesh))
# Not ru_maxrss: that of the process which started this one counts in it.
[line] = [x for x in open("/proc/self/status") if x.startswith("VmHWM")]
peak = 1024 * int(line.split()[1])
loaded = sum(
  shard.data.nbytes
  for leaf in jax.tree.leaves(params)
  for shard in leaf.addressable_shards
)
print(json.dumps(dict(beyond=peak - before - loaded, loaded=loaded)))
"""


class MemoryTest(FolderTestCase):
  @pytest.mark.slow
  def test_loading_holds_little_more_than_the_parameters(self):
    config = _small(
      num_layers=40,
      embed_dim=512,
      mlp_dim=2048,
      head_dim=128,
      vocab_size=65_536,
      tie_embeddings=True,
    )
    params = jax.tree.map(
      lambda leaf: np.broadcast_to(jnp.bfloat16(1), leaf.shape),
      jax.eval_shape(_policy(config).init, jax.random.key(0)),
    )
    path = self.folder / "model"
    hf.save(params, config, path, generation={}, dtype="bfloat16")
    largest = 2 * 65_536 * 512
    on_disk = (path / "model.safetensors").stat().st_size
    limit = 1.3 * largest + 200 * 2**20
    # Else a loader that first reads everything would pass.
    self.assertGreater(on_disk, limit)
    for shape in ("1 1 1", "1 2 2"):
      done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path), *shape.split()],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
      )
      self.assertEqual(done.returncode, 0, done.stderr)
      measured = json.loads(done.stdout)
      self.assertGreater(measured["loaded"], 1.99 * on_disk)
      self.assertLess(measured["beyond"], limit, measured)


class SaveTest(FolderTestCase):
  @parameterized.parameters(*_ALL)
  def test_writes_what_transformers_wrote(self, name):
    """The same tensors under the same names, and the same model."""
    config = _config(_FIXTURES / name)
    params = _load(_FIXTURES / name, config, _mesh(1, 2, 2))
    hf.save(params, config, self.folder / "out", generation=_GENERATION)
    got, want = _tensors(self.folder / "out"), _tensors(_FIXTURES / name)
    self.assertEqual(set(got), set(want))
    for tensor in want:
      np.testing.assert_array_equal(got[tensor], want[tensor], tensor)
    self.assertEqual(_config(self.folder / "out"), config)

  @parameterized.parameters(*_SHAPES)
  def test_import_gives_back_every_bit(self, shape):
    config = _small(**_SHAPES[shape])
    params = _random_params(config)
    out = self.folder / "out"
    hf.save(params, config, out, generation={}, max_shard_bytes=3000)
    self._assert_same(_load(out, config), params)
    self.assertEqual(_config(out), config)

  def test_files_are_of_the_size_asked_for(self):
    config = _small(**_MOE)
    params, out = _random_params(config), self.folder / "out"
    hf.save(params, config, out, generation={}, max_shard_bytes=3000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    self.assertGreater(len(files), 5)
    self.assertEqual(
      [f.name for f in files],
      [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        for i in range(len(files))
      ],
    )
    total = 0
    for file in files:
      tensors = safetensors.numpy.load_file(file)
      size = sum(tensor.nbytes for tensor in tensors.values())
      self.assertTrue(size <= 3000 or len(tensors) == 1, file.name)
      total += size
      for name in tensors:
        self.assertEqual(index["weight_map"][name], file.name)
    self.assertEqual(total, index["metadata"]["total_size"])
    self.assertEqual(
      total, sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    )

  def test_bfloat16(self):
    config, out = _small(), self.folder / "out"
    params = _random_params(config)
    hf.save(params, config, out, generation={}, dtype="bfloat16")
    rounded = jax.tree.map(
      lambda x: x.astype(jnp.bfloat16).astype(np.float32), params
    )
    self._assert_same(_load(out, config), rounded)
    values = json.loads((out / "config.json").read_text())
    self.assertEqual(values["torch_dtype"], "bfloat16")
    (tensor, *_) = _tensors(out).values()
    self.assertEqual(tensor.dtype, jnp.bfloat16)

  def test_what_lies_beside_the_weights(self):
    config, out = _small(), self.folder / "a" / "out"
    hf.save(
      _random_params(config),
      config,
      out,
      generation=_GENERATION | dict(temperature=0.6),
      tokenizer_files={"tokenizer.json": '{"é": 1}'},
    )
    self.assertEqual(
      json.loads((out / "generation_config.json").read_text()),
      _GENERATION | dict(temperature=0.6),
    )
    values = json.loads((out / "config.json").read_text())
    self.assertEqual(values["eos_token_id"], [2, 5])
    self.assertNotIn("temperature", values)
    self.assertEqual((out / "tokenizer.json").read_text("utf-8"), '{"é": 1}')
    modes = {file.stat().st_mode for file in out.iterdir()}
    self.assertLen(modes, 1)  # Whoever reads one reads all.

  def test_appears_whole_or_not_at_all(self):
    config, out = _small(), self.folder / "out"
    params = _random_params(config)

    def fail(*_, **__):
      self.assertFalse(out.exists())
      raise OSError("disk full")

    with (
      mock.patch.object(safetensors.numpy, "save_file", fail),
      self.assertRaisesRegex(OSError, "disk full"),
    ):
      hf.save(params, config, out, generation={})
    self.assertEqual(list(self.folder.iterdir()), [])
    hf.save(params, config, out, generation={})
    self.assertEqual(list(self.folder.iterdir()), [out])

  def test_an_existing_folder_is_refused(self):
    config, out = _small(), self.folder / "out"
    out.mkdir()
    with self.assertRaisesRegex(ConfigError, f"{out} exists"):
      hf.save(_random_params(config), config, out, generation={})
    self.assertEqual(list(out.iterdir()), [])

  @parameterized.parameters(
    (dict(qk_norm=True, qkv_bias=True), "model.qkv_bias=False"),
    (dict(qk_norm=False, **_MOE), "model.qk_norm=True"),
  )
  def test_what_no_family_has(self, changes, advice):
    config, out = _small(**changes), self.folder / "out"
    (problem,) = self._problems(
      hf.save, _random_params(config), config, out, generation={}
    )
    self.assertIn(advice, problem)
    self.assertFalse(out.exists())


class LocateTest(FolderTestCase):
  def test_a_folder(self):
    self.assertEqual(hf.locate(str(self.folder)), self.folder)

  @parameterized.parameters("nowhere", "/no/where", "./a/b", "a/b/c", "a/")
  def test_neither_folder_nor_id(self, model):
    (problem,) = self._problems(hf.locate, model)
    self.assertIn("is no folder. Try one", problem)

  def test_a_hub_id(self):
    hub = types.SimpleNamespace(
      snapshot_download=mock.Mock(return_value=str(self.folder))
    )
    with mock.patch.dict(sys.modules, huggingface_hub=hub):
      hub.__spec__ = importlib.util.spec_from_loader("huggingface_hub", None)
      self.assertEqual(hf.locate("org/model"), self.folder)
    (name,), arguments = hub.snapshot_download.call_args
    self.assertEqual(name, "org/model")
    self.assertIn("*.safetensors", arguments["allow_patterns"])
    self.assertNotIn("*", arguments["allow_patterns"])

  def test_the_hub_does_not_answer(self):
    hub = types.SimpleNamespace(
      snapshot_download=mock.Mock(side_effect=OSError("no network\nlong story"))
    )
    with mock.patch.dict(sys.modules, huggingface_hub=hub):
      hub.__spec__ = importlib.util.spec_from_loader("huggingface_hub", None)
      (problem,) = self._problems(hf.locate, "org/model")
    self.assertIn("could not be fetched from the hub: no network", problem)

  def test_no_client(self):
    with mock.patch.object(importlib.util, "find_spec", return_value=None):
      (problem,) = self._problems(hf.locate, "org/model")
    self.assertIn("pip install 'darl_jax[hub]'", problem)


class TransformersTest(FolderTestCase):
  """What is exported, as the library that others load it with computes it."""

  @parameterized.parameters(*_SHAPES)
  def test_logits(self, shape):
    torch = pytest.importorskip("torch", reason="needs torch, transformers")
    transformers = pytest.importorskip(
      "transformers", reason="needs torch, transformers"
    )
    config = _small(**_SHAPES[shape], rope_original_context=8)
    params = jax.tree_util.tree_map_with_path(
      lambda path, x: 1 + 0.3 * x if "norm" in path[-1].key else 0.25 * x,
      _random_params(config),
    )
    policy, out = _policy(config), self.folder / "out"
    hf.save(params, config, out, generation=_GENERATION, max_shard_bytes=3000)
    tokens = np.random.default_rng(0).integers(40, size=(3, 24), dtype=np.int32)
    hidden = jax.jit(policy.hidden)(
      params,
      tokens,
      np.broadcast_to(np.arange(24, dtype=np.int32), tokens.shape),
      np.ones_like(tokens),
    )
    got = np.asarray(hidden @ policy.unembedding(params).T)
    model = transformers.AutoModelForCausalLM.from_pretrained(
      out, dtype="auto", attn_implementation="eager"
    ).eval()
    self.assertEqual(model.dtype, torch.float32)
    self.assertEqual(model.generation_config.eos_token_id, [2, 5])
    with torch.no_grad():
      want = model(torch.from_numpy(tokens).long()).logits.numpy()
    self.assertGreater(np.abs(want).max(), 0.5)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)
