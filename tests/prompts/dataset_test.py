import ast
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from unittest import mock

import numpy as np
import pytest
import reasoning_gym
import tokenizers
from absl.testing import parameterized
from reasoning_gym import factory

from darl_jax.config import ConfigError, PromptsConfig
from darl_jax.prompts import dataset, procedural

DIGITS = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}

# Which of reasoning-gym's datasets cannot be drawn with default parameters.
UNDRAWABLE = {"composite": "Must specify at least one dataset"}


def make_config(**changes) -> PromptsConfig:
  fields = dict(
    dataset="chain_sum",
    params=DIGITS,
    num_items=500,
    heldout_fraction=0.2,
    max_tokens=12,
    instruction="{question}",
    tokenizer="",
    system="",
    vocab_size=320,
  )
  return PromptsConfig(**(fields | changes))


def check(name: str, params: dict) -> list[str]:
  prompts = types.SimpleNamespace(dataset=name, params=params)
  return dataset.check_config(types.SimpleNamespace(prompts=prompts))


def ids(prompts) -> list[str]:
  return [prompt.id for prompt in prompts]


class LoadTest(parameterized.TestCase):
  def test_two_seeds_alone_would_overlap(self):
    # Why the split goes by a hash: the next seed is the same draw, shifted.
    one, two = (
      [d[i]["question"] for i in range(d.size)]
      for d in (
        reasoning_gym.create_dataset("chain_sum", seed=seed, size=100, **DIGITS)
        for seed in (1, 2)
      )
    )
    self.assertEqual(one[1:], two[:-1])

  def test_train_and_heldout_are_disjoint_across_seeds(self):
    one, two = (
      dataset.load(make_config(num_items=20_000), seed=s) for s in (1, 2)
    )
    train = {*ids(one.train), *ids(two.train)}
    heldout = {*ids(one.heldout), *ids(two.heldout)}
    self.assertGreater(len(train), 2000)
    self.assertGreater(len(heldout), 400)
    self.assertEmpty(train & heldout)
    questions = [
      [p.tokens.tobytes() for p in part] for part in (one.train, one.heldout)
    ]
    self.assertEmpty(set(questions[0]) & set(questions[1]))
    share = len(heldout) / (len(train) + len(heldout))
    self.assertBetween(share, 0.17, 0.23)

  def test_the_split_does_not_depend_on_the_number_of_items(self):
    few, many = (
      dataset.load(make_config(num_items=n), seed=1) for n in (300, 3000)
    )
    self.assertContainsSubset(ids(few.heldout), ids(many.heldout))
    self.assertContainsSubset(ids(few.train), ids(many.train))

  def test_a_larger_fraction_holds_out_more_of_the_same(self):
    less, more = (
      dataset.load(make_config(heldout_fraction=f), seed=1) for f in (0.1, 0.4)
    )
    self.assertLess(len(less.heldout), len(more.heldout))
    self.assertContainsSubset(ids(less.heldout), ids(more.heldout))

  def test_equal_questions_merge(self):
    loaded = dataset.load(make_config(num_items=20_000), seed=0)
    found = [*ids(loaded.train), *ids(loaded.heldout)]
    self.assertLen(set(found), len(found))
    self.assertEqual(len(found) + loaded.num_duplicates, 20_000)
    self.assertGreater(loaded.num_duplicates, 10_000)
    drawn = reasoning_gym.create_dataset(
      "chain_sum", seed=0, size=20_000, **DIGITS
    )
    self.assertLen(found, len({item["question"] for item in drawn}))

  def test_prompt(self):
    loaded = dataset.load(make_config(), seed=5)
    drawn = reasoning_gym.create_dataset(
      "chain_sum", seed=5, size=500, **DIGITS
    )
    for prompt in (*loaded.train, *loaded.heldout):
      item = drawn[prompt.reference["index"]]
      self.assertEqual(loaded.tokenizer.decode(prompt.tokens), item["question"])
      self.assertEqual(prompt.reference["answer"], item["answer"])
      self.assertEqual(prompt.reference["id"], prompt.id)
      self.assertGreaterEqual(len(prompt.id), 16)
      bos = np.flatnonzero(prompt.tokens == loaded.tokenizer.bos_id)
      self.assertEqual(bos.tolist(), [0])
      json.dumps(prompt.reference)

  def test_loading_again_gives_the_same_in_another_process(self):
    program = """
      import sys
      from darl_jax.config import PromptsConfig
      from darl_jax.prompts import dataset, procedural
      import dataset_test
      loaded = dataset.load(dataset_test.make_config(dataset="list_functions",
          params={}, max_tokens=4096), seed=7)
      sys.stdout.write(repr(dataset_test.ids(loaded.train)))
    """
    path = os.pathsep.join([*filter(None, sys.path), os.path.dirname(__file__)])
    output = subprocess.run(
      [sys.executable, "-c", textwrap.dedent(program)],
      env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "99"},
      capture_output=True,
      check=True,
      text=True,
    ).stdout
    config = make_config(dataset="list_functions", params={}, max_tokens=4096)
    here = dataset.load(config, seed=7)
    self.assertEqual(ast.literal_eval(output), ids(here.train))

  def test_leaves_the_global_generator_alone(self):
    random.seed(4)
    state = random.getstate()
    dataset.load(make_config(), seed=5)
    self.assertEqual(random.getstate(), state)

  def test_too_long_prompts_are_dropped_and_counted(self):
    config = make_config(params=DIGITS | {"max_digits": 3})
    free = dataset.load(config, seed=0)
    lengths = [len(p.tokens) for p in (*free.train, *free.heldout)]
    tight = dataset.load(
      make_config(params=DIGITS | {"max_digits": 3}, max_tokens=10), seed=0
    )
    kept = [len(p.tokens) for p in (*tight.train, *tight.heldout)]
    self.assertLessEqual(max(kept), 10)
    self.assertGreater(tight.num_too_long, 0)
    self.assertEqual(
      len(kept) + tight.num_too_long, len(lengths) + free.num_too_long
    )

  def test_longest_response(self):
    loaded = dataset.load(make_config(), seed=0)
    self.assertEqual(loaded.longest_response, 4)  # "-", two digits, stop.

  def test_answers_may_be_missing(self):
    config = make_config(dataset="graph_color", params={}, max_tokens=4096)
    loaded = dataset.load(config, seed=0)
    self.assertIsNone(loaded.train[0].reference["answer"])
    self.assertEqual(loaded.longest_response, 0)

  def test_a_generator_that_fails_at_a_later_item(self):
    class Dataset:
      def __getitem__(self, index):
        if index == 2:
          raise ZeroDivisionError("no such sum")
        return {"question": f"What is {index}?", "answer": str(index)}

    with (
      mock.patch.object(
        procedural.reasoning_gym, "create_dataset", return_value=Dataset()
      ),
      self.assertRaisesRegex(
        ConfigError, "fails to generate item 2: ZeroDivisionError: no such sum"
      ),
    ):
      dataset.load(make_config(), seed=0)

  def test_no_prompt_short_enough(self):
    with self.assertRaisesRegex(
      ConfigError, r"prompts.max_tokens = 3 drops .* Try prompts.max_tokens=8\."
    ):
      dataset.load(make_config(max_tokens=3), seed=0)

  def test_nothing_held_out(self):
    with self.assertRaisesRegex(ConfigError, "0 held out. Try prompts.num_it"):
      dataset.load(make_config(num_items=50, heldout_fraction=1e-9), seed=0)

  def test_speed(self):
    start = time.monotonic()
    dataset.load(make_config(num_items=20_000), seed=0)
    seconds = time.monotonic() - start
    logging.getLogger(__name__).warning("20,000 items in %.2f s", seconds)
    self.assertLess(seconds, 15.0)  # Only that nothing is absurd.


class TokenizerTest(parameterized.TestCase):
  def published(self, template: str) -> str:
    """A folder with a tokenizer of bytes and a chat template."""
    folder = self.enterContext(tempfile.TemporaryDirectory())
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = ["<end>", *sorted(byte_level.alphabet())]
    tokenizer = tokenizers.Tokenizer(
      tokenizers.models.BPE(
        vocab={text: token for token, text in enumerate(vocabulary)}, merges=[]
      )
    )
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(f"{folder}/tokenizer.json")
    config = {"eos_token": "<end>", "chat_template": template}
    with open(f"{folder}/tokenizer_config.json", "w") as file:
      json.dump(config, file)
    return folder

  def test_a_published_one_asks_through_its_template(self):
    template = (
      "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
    )
    config = make_config(
      tokenizer=self.published(template),
      system="Add {up}.",
      instruction="{question} Give {x}, a number.",
      max_tokens=999,
    )
    loaded = dataset.load(config, seed=5)
    bare = dataset.load(make_config(), seed=5)
    self.assertEqual(ids(loaded.train), ids(bare.train))
    self.assertEqual(ids(loaded.heldout), ids(bare.heldout))
    for prompt, same in zip(loaded.train, bare.train, strict=True):
      question = bare.tokenizer.decode(same.tokens)
      self.assertEqual(
        loaded.tokenizer.decode_prompt(prompt.tokens),
        f"system:Add {{up}}.|user:{question} Give {{x}}, a number.|",
      )
      self.assertEqual(prompt.reference, same.reference)
    self.assertEqual(loaded.tokenizer.stop_ids, (0,))

  def test_the_instruction_is_of_the_trained_ones_template_too(self):
    loaded = dataset.load(
      make_config(instruction="{question}\nBriefly:"), seed=5
    )
    bare = dataset.load(make_config(), seed=5)
    for prompt, same in zip(loaded.train, bare.train, strict=True):
      question = bare.tokenizer.decode(same.tokens)
      self.assertEqual(
        loaded.tokenizer.decode_prompt(prompt.tokens), question + "\nBriefly:"
      )
      self.assertLessEqual(len(prompt.tokens), len(same.tokens) + 1)

  def test_what_cannot_be_read_is_a_config_error(self):
    with self.assertRaisesRegex(ConfigError, "There is no tokenizer.json"):
      dataset.load(make_config(tokenizer="nowhere"), seed=5)
    refusing = self.published("{{ raise_exception('never') }}")
    with self.assertRaisesRegex(ConfigError, "refuses messages of user: never"):
      dataset.load(make_config(tokenizer=refusing), seed=5)


class CheckConfigTest(parameterized.TestCase):
  def test_nothing_wrong(self):
    self.assertEqual(check("chain_sum", DIGITS), [])
    self.assertEqual(check("gsm_symbolic", {}), [])

  @parameterized.parameters(
    ("chainsum", "chain_sum"), ("spell_backwards", "spell_backward")
  )
  def test_unknown_dataset(self, name, near):
    (problem,) = check(name, {})
    self.assertStartsWith(problem, f"prompts.dataset = '{name}' is not")
    self.assertEndsWith(problem, f"Try '{near}'.")

  def test_every_unknown_parameter_is_named(self):
    one, two = check("chain_sum", {"max_term": 3, "digits_min": 1})
    self.assertIn("'digits_min' is not a parameter of chain_sum", one)
    self.assertEndsWith(two, "Try 'max_terms'.")

  @parameterized.parameters(("seed", "seed"), ("size", "prompts.num_items"))
  def test_parameters_that_are_set_elsewhere(self, key, field):
    (problem,) = check("chain_sum", {key: 3})
    self.assertEndsWith(problem, f"Set {field} instead.")

  @parameterized.parameters(
    ({"min_terms": 5, "max_terms": 3}, "max_terms must be >= min_terms"),
    ({"min_terms": "x"}, "not supported between"),
  )
  def test_refused_parameters(self, params, reason):
    (problem,) = check("chain_sum", params)
    self.assertIn("are refused by chain_sum: ", problem)
    self.assertIn(reason, problem)

  def test_items_that_change_with_the_string_hash(self):
    with mock.patch.dict(os.environ):
      os.environ.pop("PYTHONHASHSEED", None)
      (problem,) = check("ransom_note", {})
      self.assertIn("Start the run with PYTHONHASHSEED=0", problem)
      self.assertEqual(check("chain_sum", {}), [])
    with mock.patch.dict(os.environ, PYTHONHASHSEED="0"):
      self.assertEqual(check("ransom_note", {}), [])


class BatchesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.prompts = dataset.load(make_config(), seed=0).train[:30]

  def take(self, iterator, count: int) -> list[list[str]]:
    return [ids(next(iterator)) for _ in range(count)]

  def test_an_epoch_holds_each_prompt_once(self):
    iterator = dataset.batches(self.prompts, batch_size=10, seed=1)
    for _ in range(3):
      epoch = sum(self.take(iterator, 3), [])
      self.assertCountEqual(epoch, ids(self.prompts))

  def test_epochs_differ_in_order(self):
    iterator = dataset.batches(self.prompts, batch_size=30, seed=1)
    first, second, third = self.take(iterator, 3)
    self.assertNotEqual(first, ids(self.prompts))
    self.assertNotEqual(first, second)
    self.assertNotEqual(second, third)

  def test_the_order_is_the_seeds(self):
    one, again, other = (
      self.take(dataset.batches(self.prompts, batch_size=7, seed=s), 20)
      for s in (1, 1, 2)
    )
    self.assertEqual(one, again)
    self.assertNotEqual(one, other)

  @parameterized.parameters(0, 1, 5)
  def test_state(self, steps):
    iterator = dataset.batches(self.prompts, batch_size=7, seed=1)
    self.take(iterator, steps)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = self.take(iterator, 10)
    self.take(iterator, 3)
    iterator.set_state(state)
    self.assertEqual(self.take(iterator, 10), expected)
    fresh = dataset.batches(self.prompts, batch_size=7, seed=1)
    fresh.set_state(state)
    self.assertEqual(self.take(fresh, 10), expected)

  def test_batches_of_one_prompt(self):
    batches = dataset.batches(self.prompts, batch_size=1, seed=0)
    drawn = self.take(batches, 2 * len(self.prompts))
    for epoch in (drawn[: len(self.prompts)], drawn[len(self.prompts) :]):
      self.assertCountEqual(sum(epoch, []), ids(self.prompts))

  def test_too_few_prompts(self):
    with self.assertRaisesRegex(
      ConfigError,
      "= 31 is more than the 30 .* Try rollout.prompts_per_batch=30",
    ):
      dataset.batches(self.prompts, batch_size=31, seed=1)


class VerifierTaskTest(parameterized.TestCase):
  def test_is_json_and_rebuilds_the_items(self):
    config = make_config()
    task = json.loads(
      json.dumps(dataset.verifier_task(config, seed=9, rewards=None))
    )
    self.assertEqual(
      task["verifier"], "darl_jax.rewards.reasoning_gym:ReasoningGymVerifier"
    )
    arguments = task["arguments"]
    rebuilt = reasoning_gym.create_dataset(
      arguments["dataset"],
      seed=arguments["seed"],
      size=arguments["num_items"],
      **arguments["params"],
    )
    loaded = dataset.load(config, seed=9)
    for prompt in loaded.train:
      self.assertEqual(
        rebuilt[prompt.reference["index"]]["question"],
        loaded.tokenizer.decode(prompt.tokens),
      )


# Draws some items of every dataset and writes what must be reproducible.
DRAW_ALL = """
  import contextlib, io, json, sys
  import dataset_test
  from reasoning_gym import factory
  drawn = {}
  with contextlib.redirect_stdout(io.StringIO()):
    for name in sorted(set(factory.DATASETS) - set(dataset_test.UNDRAWABLE)):
      drawn[name] = dataset_test.draw_some(name)
  json.dump(drawn, sys.stdout)
"""


def draw_some(name: str) -> list[list[str | None]]:
  config = make_config(dataset=name, params={}, num_items=8)
  return [
    [question, needed["answer"]]
    for question, needed in procedural.draw(config, seed=1)
  ]


@pytest.mark.slow
# Some of them leave their data files open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class EveryDatasetTest(parameterized.TestCase):
  def test_can_be_loaded(self):
    failed = {}
    with mock.patch.dict(os.environ, PYTHONHASHSEED="0"):
      for name in sorted(factory.DATASETS):
        if problems := check(name, {}):
          failed[name] = problems
          continue
        config = make_config(
          dataset=name,
          params={},
          num_items=12,
          heldout_fraction=0.5,
          max_tokens=2**20,
          vocab_size=2048,
        )
        loaded = dataset.load(config, seed=1)
        for prompt in (*loaded.train, *loaded.heldout):
          json.dumps(prompt.reference)
    self.assertCountEqual(failed, UNDRAWABLE)
    for name, reason in UNDRAWABLE.items():
      self.assertIn(reason, failed[name][0])

  def test_those_that_change_with_the_string_hash_are_known(self):
    path = os.pathsep.join([*filter(None, sys.path), os.path.dirname(__file__)])
    one, two = (
      json.loads(
        subprocess.run(
          [sys.executable, "-c", textwrap.dedent(DRAW_ALL)],
          env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed},
          stdout=subprocess.PIPE,
          check=True,
        ).stdout
      )
      for seed in ("1", "2")
    )
    differ = {name for name in one if one[name] != two[name]}
    self.assertEqual(differ, procedural._HASH_DEPENDENT)
