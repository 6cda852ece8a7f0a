"""Parity: of the sampler, the learner, and another implementation."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from absl.testing import parameterized

from configs import darl
from darl_jax import config as config_lib
from darl_jax import parity
from darl_jax.config import ConfigError, RunConfig
from darl_jax.models import published
from darl_jax.sharding import meshes
from tests.fixtures import tiny_tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"


def gaps(ours, theirs, *, between=parity.BOTH_SIDES, dtype="float32"):
  return parity.Gaps.of(
    np.array(ours),
    np.array(theirs),
    between=between,
    dtype=dtype,
    temperature=1.0,
  )


class GapsTest(parameterized.TestCase):
  def test_by_hand(self):
    theirs = np.log([0.5, 0.5, 0.5, 0.5])
    ours = np.log([0.5, 0.54, 0.56, 0.44])
    found = gaps(ours, theirs)
    self.assertEqual(found.tokens, 4)
    self.assertEqual(found.outside, 0.5)
    self.assertAlmostEqual(found.largest, math.log(0.5 / 0.44))
    middle = (math.log(1.08) + math.log(1.12)) / 2
    self.assertAlmostEqual(found.p50, middle)
    self.assertAlmostEqual(
      found.p95, math.log(1.12) * 0.15 + math.log(0.5 / 0.44) * 0.85
    )

  @parameterized.parameters(
    (0.0005, "float32", parity.BOTH_SIDES, None),
    (0.002, "float32", parity.BOTH_SIDES, "0.002 nats, above 0.001"),
    (0.002, "float32", "learner, expected", "0.002 nats, above 0.001"),
    (math.nan, "float32", parity.BOTH_SIDES, "nan nats"),
    (0.09, "bfloat16", parity.BOTH_SIDES, None),
    (0.2, "bfloat16", parity.BOTH_SIDES, "20.0% of the ratios are outside"),
    (math.nan, "bfloat16", parity.BOTH_SIDES, "20.0% of the ratios are"),
    # Expected values are of float32.
    (0.2, "bfloat16", "learner, expected", None),
  )
  def test_tolerance(self, difference, dtype, between, says):
    ours = [-1.0 + difference] + [-1.0] * 4
    problem = gaps(ours, [-1.0] * 5, between=between, dtype=dtype).problem(
      parity.TOLERANCE
    )
    if says is None:
      self.assertIsNone(problem)
    else:
      self.assertIn(says, problem)
      self.assertIn(f"{between} in {dtype}", problem)


class ExpectedTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory())
    self.path = pathlib.Path(folder) / "expected.npz"

  def _refused(self, vocab_size=10, **arrays) -> str:
    np.savez(self.path, **{k: np.array(v) for k, v in arrays.items()})
    with self.assertRaises(ConfigError) as caught:
      parity.read_expected(self.path, vocab_size=vocab_size)
    self.assertIn(str(self.path), str(caught.exception))
    return caught.exception.problems[0]

  def test_rows_of_one_length(self):
    expected = parity.read_expected(
      FIXTURES / "llama-tied" / "expected.npz", vocab_size=320
    )
    self.assertEqual([len(row) for row in expected.tokens], [40] * 4)
    self.assertEqual([len(row) for row in expected.prompts], [12] * 4)
    self.assertEqual(expected.longest_response, 24)

  def test_a_continuation_that_agrees_by_chance_is_no_prompt(self):
    np.savez(
      self.path,
      tokens=[[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7, 8]],
      greedy=[[1, 2, 3, 9], [1, 2, 5, 6], [1, 2, 9, 9]],
      token_logprobs=np.zeros((3, 3)),
    )
    expected = parity.read_expected(self.path, vocab_size=10)
    self.assertEqual([row.tolist() for row in expected.prompts], [[1, 2]] * 3)

  def test_row_by_row(self):
    expected = parity.read_expected(
      FIXTURES / "smollm2_expected.npz", vocab_size=49_152
    )
    self.assertEqual([len(row) for row in expected.prompts], [39, 36, 48])
    self.assertEqual([len(row) for row in expected.logprobs], [70, 43, 74])
    self.assertEqual(expected.longest_response, 32)
    for prompt, tokens in zip(expected.prompts, expected.tokens, strict=True):
      np.testing.assert_array_equal(tokens[: len(prompt)], prompt)

  def test_what_is_no_such_file(self):
    rows = dict(tokens=[[1, 2, 3]], token_logprobs=[[0.0, 0.0]])
    self.assertIn("no greedy", self._refused(**rows))
    self.assertIn(
      "not rows alike", self._refused(**rows, greedy=[[1, 2], [1, 2]])
    )
    self.assertIn("no greedy cont", self._refused(**rows, greedy=[[1, 2]]))
    self.assertIn(
      "it has token 3, and the model has 3",
      self._refused(**rows, greedy=[[1, 3]], vocab_size=3),
    )
    rows["token_logprobs"] = [[0.0] * 3]
    self.assertIn(
      "3 tokens and 3 log-probs", self._refused(**rows, greedy=[[1, 3]])
    )
    self.path.write_text("nothing of the kind")
    with self.assertRaises(ConfigError):
      parity.read_expected(self.path, vocab_size=3)
    with self.assertRaises(ConfigError):
      parity.read_expected(self.path.with_name("none"), vocab_size=3)


@functools.cache
def make_config(name: str, temperature: float) -> RunConfig:
  config = darl.get_config()
  config.model.update(published.read_config(FIXTURES / name))
  config.prompts.max_tokens = 16
  config.rollout.update(
    dict(
      prompts_per_batch=4,
      samples_per_prompt=2,
      max_response_tokens=24,
      chunk_tokens=5,
    )
  )
  config.replay.min_batch = 1
  config.learner.update(dict(rows=2, score_rows=2, row_tokens=96))
  config = config_lib.parse(config)
  rollout = dataclasses.replace(
    config.rollout,
    temperature=temperature,
    samples_per_prompt=2 if temperature else 1,
  )
  return dataclasses.replace(config, rollout=rollout)


def make_sides(name: str, temperature: float):
  """The two sides, and the parameters that both compute with."""
  config = make_config(name, temperature)
  sides = parity.Sides(
    config,
    meshes=meshes.split_devices(config.mesh),
    dtype="float32",
    stop_ids=(),
    pad_id=0,
  )
  params = published.load(
    FIXTURES / name, config.model, shardings=sides.param_shardings
  )
  return sides, params


def prompts(count: int = 5) -> list[np.ndarray]:
  """Of different lengths; one more than a batch takes."""
  rng = np.random.default_rng(0)
  return [rng.integers(3, 128, 4 + 3 * i, np.int32) for i in range(count)]


class SidesTest(parameterized.TestCase):
  @parameterized.parameters(
    ("llama-tied", 0.7), ("qwen3-qknorm", 1.3), ("qwen3-moe", 1.3)
  )
  def test_sampler_and_learner(self, name, temperature):
    sides, params = make_sides(name, temperature)
    found = sides.gaps(params, prompts())
    self.assertEqual(found.tokens, 5 * 2 * 24)
    self.assertEqual(found.temperature, temperature)
    self.assertLess(found.largest, 2e-5)
    self.assertEqual(found.outside, 0)

  @parameterized.parameters("llama-tied", "qwen2-bias", "qwen3-moe")
  def test_expected(self, name):
    sides, params = make_sides(name, 0.0)
    expected = parity.read_expected(
      FIXTURES / name / "expected.npz", vocab_size=params["embedding"].shape[0]
    )
    [learner], differ = sides.expected_gaps(params, expected)
    self.assertEqual(learner.between, "learner, expected")
    self.assertEqual(learner.tokens, 4 * 39)
    self.assertLess(learner.largest, 2e-5)
    self.assertEqual(differ, 0)

  def test_the_samplers_own_log_probs_of_an_expected_continuation(self):
    sides, params = make_sides("llama-tied", 0.0)
    stacked = parity.read_expected(
      FIXTURES / "llama-tied" / "expected.npz", vocab_size=320
    )
    [first, *_] = sides.sample(params, stacked.prompts)
    [scored] = sides.score(params, [first])
    wrong = first.tokens.copy()
    wrong[-5] = (wrong[-5] + 1) % 320
    for tokens, shared, differs in ((first.tokens, 24, 0), (wrong, 19, 1)):
      expected = parity.Expected(
        (tokens,), (scored[1:],), stacked.prompts[:1], (tokens,)
      )
      (_, sampler), differ = sides.expected_gaps(params, expected)
      self.assertEqual(sampler.between, "sampler, expected")
      self.assertEqual(sampler.tokens, shared)
      self.assertLess(sampler.largest, 2e-5)
      self.assertEqual(differ, differs)

  def test_other_weights_on_one_side_are_seen(self):
    sides, params = make_sides("llama-tied", 1.0)
    trajectories = sides.sample(params, prompts())
    params["layers"]["attention_norm"] *= 1.01
    masks = [trajectory.loss_mask for trajectory in trajectories]
    found = sides._gaps(
      sides.score(params, trajectories),
      [trajectory.behavior_logprobs for trajectory in trajectories],
      masks,
      between=parity.BOTH_SIDES,
    )
    self.assertIsNotNone(found.problem(parity.TOLERANCE))


def run(*arguments: str) -> tuple[int, str, str]:
  """Exit status, stdout and stderr of launch/parity.py."""
  environment = os.environ | {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    # The tests' own, with which XLA cannot multiply in bfloat16 on a CPU.
    "XLA_FLAGS": "",
  }
  done = subprocess.run(
    [sys.executable, "launch/parity.py", *arguments],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  return done.returncode, done.stdout, done.stderr


class LaunchTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder)

  @pytest.mark.slow
  def test_a_folder_with_expected_values(self):
    name = FIXTURES / "llama-tied"
    status, stdout, stderr = run(
      f"--model={name}", f"--expected={name / 'expected.npz'}", "--tokens=8"
    )
    self.assertEqual(status, 0, stdout + stderr)
    for words in (
      "sampler, learner",
      "learner, expected",
      "bfloat16",
      "greedy continuations that differ in float32: 0",
    ):
      self.assertIn(words, stdout)

  @pytest.mark.slow
  def test_values_that_are_not_the_models(self):
    with np.load(FIXTURES / "llama-tied" / "expected.npz") as file:
      arrays = dict(file)
    arrays["token_logprobs"][2, 7] += 0.01
    arrays["greedy"][1, -1] += 1
    np.savez(self.folder / "expected.npz", **arrays)
    # Its prompts go through a chat template.
    model = tiny_tokenizer.copy_model("llama-tied", self.folder / "model")
    status, stdout, stderr = run(
      f"--model={model}",
      f"--expected={self.folder / 'expected.npz'}",
      "--json",
      "--prompts=2",
      "--tokens=8",
      "--temperature=0.7",
    )
    self.assertEqual(status, 1, stdout + stderr)
    report = json.loads(stdout)
    self.assertEqual(report["greedy_differ"], {"float32": 1, "bfloat16": 1})
    by_expected, by_greedy = report["problems"]
    self.assertIn("learner, expected in float32", by_expected)
    self.assertIn("0.01 nats, above 0.001", by_expected)
    self.assertIn("1 greedy continuations in float32", by_greedy)
    [sampled, expected, coarser, _] = report["gaps"]
    self.assertEqual(sampled["temperature"], 0.7)
    self.assertLess(sampled["largest"], 2e-5)
    self.assertEqual(expected["temperature"], 1.0)
    # Far from float32, as only bfloat16 is.
    self.assertEqual(coarser["dtype"], "bfloat16")
    self.assertBetween(coarser["p50"], 1e-4, 0.05)

  @parameterized.parameters(
    (("--model=./none",), "is no folder"),
    (("--model=none.gguf",), "none.gguf is no file"),
    ((), "--model"),
    (("--model=tests", "--temperature=0"), "temperature"),
    ((f"--model={FIXTURES / 'mistral'}", "--expected=none.npz"), "none.npz"),
    (("--model=tests", "extra"), "not understood: extra"),
  )
  def test_bad_input(self, arguments, says):
    status, stdout, stderr = run(*arguments)
    self.assertEqual((status, stdout), (2, ""), stderr)
    self.assertStartsWith(stderr, "ConfigError: ")
    self.assertIn(says, stderr)
    self.assertNotIn("Traceback", stderr)
