"""The sampling engine for a published model, as a user meets it."""

import functools
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.config import ConfigError
from darl_jax.generate import Generator
from darl_jax.rollout.sampling import Sampling
from darl_jax.types import Finish
from tests.fixtures import tiny_tokenizer

_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def _model() -> pathlib.Path:
  return tiny_tokenizer.copy_model(
    "llama-tied", pathlib.Path(_FOLDER.name) / "model"
  )


@functools.cache
def _generator(**changes) -> Generator:
  shape = dict(max_prompt_tokens=40, max_response_tokens=20, slots=16)
  return Generator(_model(), **shape | changes)


class GeneratorTest(parameterized.TestCase):
  def test_greedy_continuations_are_the_models(self):
    """Token for token what another implementation wrote down."""
    model = _generator(sampling=Sampling(temperature=0.0))
    with np.load(_model() / "expected.npz") as file:
      expected = file["greedy"].astype(np.int32)
    answers = model.generate(list(expected[:, :12]))
    for answer, row in zip(answers, expected, strict=True):
      wanted = row[12 : 12 + len(answer.response)]
      np.testing.assert_array_equal(answer.response, wanted)

  def test_text_goes_through_the_chat_template(self):
    model = _generator()
    [answer] = model.generate(["Add 2 and 3."])
    prompt = answer.tokens[~answer.loss_mask]
    np.testing.assert_array_equal(
      prompt, model.tokenizer.encode_prompt("Add 2 and 3.")
    )
    self.assertEqual(
      model.text(answer), model.tokenizer.decode(answer.response)
    )

  def test_samples_in_the_prompts_order(self):
    model = _generator(samples=3)
    prompts = [np.arange(10, 10 + n, dtype=np.int32) for n in (7, 1, 4, 9)]
    answers = model.generate(prompts)
    self.assertLen(answers, 12)
    for index, answer in enumerate(answers):
      np.testing.assert_array_equal(
        answer.tokens[~answer.loss_mask], prompts[index // 3]
      )
    self.assertLen({answer.tokens.tobytes() for answer in answers}, 12)

  def test_asked_again_it_answers_anew(self):
    model = _generator(samples=3)
    prompt = [np.arange(10, 15, dtype=np.int32)]
    first, second = (
      [answer.tokens.tolist() for answer in model.generate(prompt)]
      for _ in range(2)
    )
    self.assertNotEqual(first, second)

  def test_truncation_reaches_the_engine(self):
    greedy = _generator(sampling=Sampling(temperature=0.0))
    nearly = _generator(sampling=Sampling(temperature=1.0, top_k=1))
    prompts = [np.arange(10, 18, dtype=np.int32)]
    [want], [got] = greedy.generate(prompts), nearly.generate(prompts)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    # One token is certain, where greedy log-probs are of all of them.
    np.testing.assert_allclose(got.behavior_logprobs, 0.0, atol=1e-6)
    self.assertLess(want.behavior_logprobs.min(), -0.1)

  def test_stop_strings(self):
    prompts = [np.arange(10, 10 + n, dtype=np.int32) for n in range(1, 9)]
    make = _generator.__wrapped__
    plain = make()
    answers = plain.generate(prompts)
    # Two letters from the middle of an answer's text.
    text = max(map(plain.text, answers), key=len)
    string = text[len(text) // 2 :][:2]
    self.assertLen(string, 2)
    model = make(stop_strings=(string,))  # Draws the same.
    ended = 0
    for answer, whole in zip(model.generate(prompts), answers, strict=True):
      length = len(answer.response)
      np.testing.assert_array_equal(answer.response, whole.response[:length])
      self.assertNotIn(string, model.tokenizer.decode(answer.response[:-1]))
      if string in model.text(whole):
        self.assertEndsWith(model.text(answer), string)
        self.assertIs(answer.finish, Finish.STOP)
        ended += 1
      else:
        self.assertEqual(answer.finish, whole.finish)
    self.assertGreater(ended, 0)

  @parameterized.parameters(
    ("",), (("",),), ("END",), (("END", 3),), ((b"END",),), (3,), (None,),
  )  # fmt: skip
  def test_bad_stop_strings(self, strings):
    with self.assertRaisesRegex(ConfigError, r"\* stop_strings = "):
      Generator(_model(), stop_strings=strings)

  @parameterized.parameters(
    (np.zeros(41, np.int32), "41 tokens, more than the 40"),
    ([], "has no tokens"),
    (np.array([1, -1]), "prompt 1 has token -1 at position 1.* 0 to 319"),
    ([320], "prompt 1 has token 320 at position 0"),
    (np.array([2**32 + 5]), "prompt 1 has token 4294967301 at position 0"),
    ([2**70], "prompt 1 has token 1180591620717411303424"),
    (np.array([1.0, 2.0]), "prompt 1 = .* neither text nor a row of integers"),
    ([1, 2.5], r"prompt 1 = \[1, 2.5\] is neither"),
    ([1, True], "is neither"),
    (np.array([True]), "is neither"),
    (np.zeros((1, 3), np.int32), "is neither"),
    (b"text", "is neither"),
    (7, "prompt 1 = 7 is neither"),
    (None, "is neither"),
    ("a\ud800b", "half of a surrogate pair.* Try 'a.b'"),
  )
  def test_a_bad_prompt(self, prompt, message):
    model = _generator()
    with self.assertRaisesRegex(ValueError, message):
      model.generate([[10, 11], prompt])
    self.assertEqual(model.engine.pending, 0)

  @parameterized.parameters("Add 2 and 3.", b"Add", 7, None)
  def test_what_is_no_list_of_prompts(self, prompts):
    with self.assertRaisesRegex(ValueError, "is not a list of prompts. Try"):
      _generator().generate(prompts)
    with self.assertRaisesRegex(ValueError, "prompt 0 = .*neither"):
      _generator().generate(np.arange(3, dtype=np.int32))

  def test_rows_of_any_integers(self):
    model = _generator(sampling=Sampling(temperature=0.0))
    row = [10, 300, 12]
    kinds = [row, np.array(row), np.array(row, np.uint16), jnp.array(row)]
    answers = model.generate(kinds)
    self.assertLen({answer.tokens.tobytes() for answer in answers}, 1)

  def test_no_model(self):
    with self.assertRaises(ConfigError):
      Generator(_FOLDER.name)

  def test_no_further_than_the_models_context(self):
    with self.assertRaisesRegex(
      ConfigError, "= 257 is more than .* 256 .*Try max_response_tokens=56"
    ):
      Generator(_model(), max_prompt_tokens=200, max_response_tokens=57)
    _generator(max_prompt_tokens=200, max_response_tokens=56)
    with self.assertRaisesRegex(
      ConfigError, "Try max_prompt_tokens=128, max_response_tokens=128"
    ):
      Generator(_model(), max_prompt_tokens=256)

  def test_heads_and_context_at_once(self):
    with self.assertRaises(ConfigError) as caught:
      Generator(_model(), tensor=4, max_prompt_tokens=999)
    self.assertLen(caught.exception.problems, 3)
    for problem in caught.exception.problems[:2]:
      self.assertRegex(
        problem, "heads = . does not split over tensor = 4. Try tensor=2"
      )

  def test_stream_yields_what_is_ready(self):
    model = _generator()
    prompts = [np.arange(10, 10 + n, dtype=np.int32) for n in range(1, 9)]
    seen = dict(model.stream(prompts))
    self.assertCountEqual(seen, range(8))
    self.assertTrue(all(len(answers) == 1 for answers in seen.values()))

  def test_bfloat16(self):
    model = _generator(dtype="bfloat16")
    [answer] = model.generate([np.arange(10, 14, dtype=np.int32)])
    self.assertTrue(np.all(np.isfinite(answer.behavior_logprobs)))
    self.assertEqual(model._snapshot.params["embedding"].dtype, jnp.bfloat16)

  def test_every_argument_that_cannot_be_is_named(self):
    with self.assertRaises(ConfigError) as caught:
      Generator(
        _model(),
        max_prompt_tokens=2.5,
        max_response_tokens=True,
        samples=0,
        slots=-1,
        tensor=0,
        dtype="float16",
        system="\ud800",
        stop_strings=("",),
        seed=2**32,
      )
    message = str(caught.exception)
    for part in (
      "max_prompt_tokens = 2.5", "max_response_tokens = True", "samples = 0",
      "slots = -1", "tensor = 0", "'float16'", "system = ", "stop_strings = ",
      "seed = 4294967296",
    ):  # fmt: skip
      self.assertIn(f"* {part}" if "float16" not in part else part, message)
    self.assertLen(caught.exception.problems, 9)
    with self.assertRaisesRegex(ConfigError, "slots = 1000000000 must be in"):
      Generator(_model(), slots=10**9)
    with self.assertRaisesRegex(ConfigError, "tensor = 3 .* Try tensor=2"):
      Generator(_model(), tensor=3)
    with self.assertRaisesRegex(ConfigError, "tensor = 16 .* Try tensor=8"):
      Generator(_model(), tensor=16)
    with self.assertRaisesRegex(ConfigError, "cache_dtype = 'int4'"):
      Generator(_model(), cache_dtype="int4")
    with self.assertRaisesRegex(ConfigError, "does not split over tensor = 8"):
      Generator(_model(), tensor=8)
    for seed in (-1, 2**31, 0.5):
      with self.assertRaisesRegex(ConfigError, rf"\* seed = {seed} .*Try"):
        Generator(_model(), seed=seed)
