import functools
import pathlib
import tempfile

import numpy as np
import reasoning_gym
from absl.testing import parameterized

from darl_jax.prompts.tokenizer import Tokenizer

DATASETS = (
  ("chain_sum", {"min_terms": 3, "max_terms": 3, "max_digits": 1}),
  ("spell_backward", {"min_word_len": 3, "max_word_len": 4}),
  ("gsm_symbolic", {}),
  ("countdown", {}),
  ("number_sorting", {}),
)
ODD_TEXTS = (
  "",
  " ",
  "\n\n  \t",
  "<pad><bos><eos>",
  "naïve ☃ 한국어 \u0301 e\u0301 \x00 \ufffd",
  "- 12.5e-3 =",
  "State the final answer to the following arithmetic problem: ",
)


@functools.cache
def all_items(name: str) -> list[dict]:
  # Countdown's generator takes 10 ms an item.
  count = 60 if name == "countdown" else 400
  dataset = reasoning_gym.create_dataset(
    name, seed=1, size=count, **dict(DATASETS)[name]
  )
  return [dataset[i] for i in range(count)]


def items(name: str, params: dict, *, count: int | None = None) -> list[dict]:
  return all_items(name)[:count]


def trained(name: str, params: dict, *, vocab_size: int = 512) -> Tokenizer:
  drawn = items(name, params)
  drawn = drawn[: len(drawn) // 2]
  return Tokenizer.train(
    [item["question"] for item in drawn],
    answers=[item["answer"] for item in drawn],
    vocab_size=vocab_size,
  )


def pieces(tokenizer: Tokenizer, tokens: np.ndarray) -> list[str]:
  return [tokenizer.decode([token]) for token in tokens]


class TokenizerTest(parameterized.TestCase):
  @parameterized.parameters(*DATASETS)
  def test_round_trip(self, name, params):
    tokenizer = trained(name, params)
    # Items it was trained on, and as many that it was not.
    texts = [
      item[key]
      for item in items(name, params)
      for key in ("question", "answer")
    ]
    for text in (*texts, *ODD_TEXTS):
      prompt = tokenizer.encode_prompt(text)
      response = tokenizer.encode_response(text)
      self.assertEqual(tokenizer.decode(prompt), text)
      self.assertEqual(tokenizer.decode(response), text)

  @parameterized.parameters(*DATASETS)
  def test_special_tokens_are_where_they_belong(self, name, params):
    tokenizer = trained(name, params)
    (stop,) = tokenizer.stop_ids
    special = [tokenizer.pad_id, tokenizer.bos_id, stop]
    self.assertLen(set(special), 3)
    texts = [item["question"] for item in items(name, params, count=50)]
    for text in (*texts, *ODD_TEXTS):
      prompt = tokenizer.encode_prompt(text)
      response = tokenizer.encode_response(text)
      self.assertEqual(prompt.dtype, np.int32)
      self.assertEqual(response.dtype, np.int32)
      self.assertEqual(prompt[0], tokenizer.bos_id)
      self.assertEqual(response[-1], stop)
      self.assertFalse(np.isin(prompt[1:], special).any())
      self.assertFalse(np.isin(response[:-1], special).any())
      self.assertLess(prompt.max(), tokenizer.vocab_size)

  @parameterized.parameters("<eos>", "<pad>", "<bos>")
  def test_a_template_that_reads_like_a_special_token_is_text(self, name):
    questions = [f"{name}{i}{name}" for i in range(50)] + [name] * 50
    tokenizer = Tokenizer.train(questions, vocab_size=300)
    prompt = tokenizer.encode_prompt(name)
    special = [tokenizer.pad_id, tokenizer.bos_id, *tokenizer.stop_ids]
    self.assertNoCommonElements(prompt[1:].tolist(), special)
    self.assertEqual(tokenizer.decode(prompt), name)

  def test_the_template_is_one_token_and_digits_are_apart(self):
    tokenizer = trained(*DATASETS[0])
    template = "State the final answer to the following arithmetic problem: "
    prompt = tokenizer.encode_prompt(f"{template}1 - 23 + 8 =")
    self.assertEqual(
      pieces(tokenizer, prompt[1:]),
      [template, "1", " - ", "2", "3", " + ", "8", " ="],
    )

  def test_the_word_to_spell_stays_letters(self):
    tokenizer = trained(*DATASETS[1])
    template = "Spell this word backward (example: sun -> nus): "
    prompt = tokenizer.encode_prompt(f"{template}then")
    self.assertEqual(pieces(tokenizer, prompt[1:]), [template, *"then"])
    response = tokenizer.encode_response("neht")
    self.assertEqual(pieces(tokenizer, response[:-1]), [*"neht"])

  def test_a_template_is_cut_at_whole_words(self):
    questions = [f"Add 1{i} apples" for i in range(2, 9)]
    tokenizer = Tokenizer.train(questions, vocab_size=300)
    prompt = tokenizer.encode_prompt("Add 13 apples")
    self.assertEqual(
      pieces(tokenizer, prompt[1:]), ["Add ", "1", "3", " apples"]
    )

  def test_common_words_of_prose_are_tokens(self):
    name, params = DATASETS[2]
    tokenizer = trained(name, params, vocab_size=2048)
    texts = [item["question"] for item in items(name, params)]
    characters = sum(map(len, texts))
    tokens = sum(len(tokenizer.encode_prompt(text)) for text in texts)
    self.assertLess(tokens, characters / 2.5)

  def test_vocab_size_is_an_upper_bound(self):
    name, params = DATASETS[2]
    for size in (259, 260, 300, 2**20):
      tokenizer = trained(name, params, vocab_size=size)
      self.assertLessEqual(tokenizer.vocab_size, size)
    self.assertGreater(tokenizer.vocab_size, 300)
    with self.assertRaisesRegex(ValueError, "Try vocab_size=259"):
      Tokenizer.train(["a"], vocab_size=258)

  def test_save_and_load(self):
    tokenizer = trained(*DATASETS[0])
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "tokenizer.json"
      tokenizer.save(path)
      again = Tokenizer.load(path)
    for text in (*ODD_TEXTS, items(*DATASETS[0])[3]["question"]):
      np.testing.assert_array_equal(
        tokenizer.encode_prompt(text), again.encode_prompt(text)
      )
    self.assertEqual(tokenizer.stop_ids, again.stop_ids)
    self.assertEqual(tokenizer.vocab_size, again.vocab_size)

  def test_training_is_deterministic(self):
    one, two = (trained(*DATASETS[2]) for _ in range(2))
    for item in items(*DATASETS[2], count=50):
      np.testing.assert_array_equal(
        one.encode_prompt(item["question"]), two.encode_prompt(item["question"])
      )

  def test_decode_ends_at_the_first_stop_token(self):
    tokenizer = trained(*DATASETS[0])
    (stop,) = tokenizer.stop_ids
    five, six = tokenizer.encode_prompt("56")[1:]
    pad, bos = tokenizer.pad_id, tokenizer.bos_id
    sampled = np.array([bos, five, pad, six, stop, five, stop], np.int32)
    self.assertEqual(tokenizer.decode(sampled), "56")
    self.assertEqual(tokenizer.decode(np.array([], np.int32)), "")

  def test_every_token_decodes(self):
    # Half a character comes back as U+FFFD, and raises nothing.
    tokenizer = trained(*DATASETS[2])
    for token in range(tokenizer.vocab_size):
      tokenizer.decode([token])
    tokens = tokenizer.encode_prompt("☃")[:-1]
    self.assertEqual(tokenizer.decode(tokens), "\ufffd")

  def test_no_questions(self):
    tokenizer = Tokenizer.train([], vocab_size=300)
    self.assertEqual(tokenizer.decode(tokenizer.encode_prompt("a 1")), "a 1")
