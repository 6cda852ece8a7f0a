import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import parameterized

from darl_jax.config import ConfigError, PromptsConfig
from darl_jax.prompts import dataset, question_file
from darl_jax.rewards import math

FIXTURE = pathlib.Path(__file__).parent.parent / "fixtures/word_problems.jsonl"
MATH = {"verifier": "math", "box": "required"}
LINE = {"question": "What is 2 + 3?", "answer": "5"}
TESTS = [{"stdin": "2 3\n", "stdout": "5\n"}]


def make_config(**changes) -> PromptsConfig:
  fields = dict(
    dataset=str(FIXTURE),
    params=MATH,
    num_items=1000,
    heldout_fraction=0.3,
    max_tokens=100,
    instruction="{question}",
    tokenizer="",
    system="",
    vocab_size=300,
  )
  return PromptsConfig(**(fields | changes))


def check(config: PromptsConfig) -> list[str]:
  fields = mock.Mock(prompts=config)
  return dataset.check_config(fields)


class QuestionFileTest(parameterized.TestCase):
  def write(self, *lines) -> str:
    """A file of these lines: bytes as they are, the rest as JSON."""
    folder = self.enterContext(tempfile.TemporaryDirectory())
    path = pathlib.Path(folder) / "questions.jsonl"
    path.write_bytes(
      b"".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
        for line in lines
      )
    )
    return str(path)

  def answers(self, *lines, **params) -> list[str]:
    config = make_config(dataset=self.write(*lines), params=MATH | params)
    return [
      needed["answer"] for _, needed in question_file.draw(config, seed=0)
    ]


class LoadTest(QuestionFileTest):
  def test_every_line_is_trained_on_held_out_or_counted(self):
    loaded = dataset.load(make_config(), seed=0)
    self.assertEqual(loaded.num_duplicates, 2)
    found = [*loaded.train, *loaded.heldout]
    self.assertLen(found, 37)
    self.assertLen({prompt.id for prompt in found}, 37)
    self.assertEqual(loaded.num_too_long, 0)
    lines = FIXTURE.read_text().splitlines()
    for prompt in found:
      question = json.loads(lines[prompt.reference["index"]])["question"]
      self.assertEqual(loaded.tokenizer.decode(prompt.tokens), question)
      self.assertEqual(prompt.reference["id"], prompt.id)
      json.dumps(prompt.reference)

  def test_neither_seed_nor_order_changes_the_split(self):
    shuffled = self.write(
      *(json.loads(s) for s in FIXTURE.read_text().splitlines()[::-1])
    )
    one, two, three = (
      dataset.load(config, seed=seed)
      for config, seed in (
        (make_config(), 0),
        (make_config(), 1),
        (make_config(dataset=shuffled), 0),
      )
    )
    for other in (two, three):
      self.assertEqual(
        {p.id for p in one.heldout}, {p.id for p in other.heldout}
      )
      self.assertEqual({p.id for p in one.train}, {p.id for p in other.train})

  def test_too_long_questions_are_counted(self):
    config = make_config(
      dataset=self.write(
        *({"question": "x" * n, "answer": "1"} for n in range(1, 60))
      ),
      max_tokens=20,
      vocab_size=260,
    )
    loaded = dataset.load(config, seed=0)
    self.assertGreater(loaded.num_too_long, 0)
    self.assertLen([*loaded.train, *loaded.heldout], 59 - loaded.num_too_long)

  def test_num_items_bounds_the_lines_and_says_so(self):
    with self.assertLogs(level="WARNING") as logs:
      items = question_file.draw(make_config(num_items=10), seed=0)
    self.assertLen(items, 10)
    self.assertIn("leaves out the last 29 lines", logs.output[0])

  def test_too_few_questions(self):
    config = make_config(dataset=self.write(LINE))
    with self.assertRaisesRegex(
      ConfigError,
      "1 distinct questions .* Try prompts.heldout_fraction=0.5, or",
    ):
      dataset.load(config, seed=0)

  def test_the_reference_answer_is_a_right_response(self):
    for box in ("required", "preferred"):
      params = {"verifier": "math", "box": box}
      verifier = math.MathVerifier(box=box)
      for _, needed in question_file.draw(make_config(params=params), seed=0):
        self.assertEqual(verifier.score(needed["answer"], needed), 1.0)


class LinesTest(QuestionFileTest):
  @parameterized.parameters(
    ("5", "5"),
    (5, "5"),
    ("They are 2 + 3 = <<2+3=5>>5.\n#### 5", "5"),
    ("#### 4\n#### 1,234 ", "1,234"),
    (r"\frac{1}{2}", r"\frac{1}{2}"),
  )
  def test_math_answers(self, answer, read):
    line = LINE | {"answer": answer}
    self.assertEqual(self.answers(line, box="preferred"), [read])
    self.assertEqual(self.answers(line), [rf"\boxed{{{read}}}"])

  def test_boxes_are_not_boxed_again(self):
    line = LINE | {"answer": r"so \boxed{5}"}
    self.assertEqual(self.answers(line), [r"so \boxed{5}"])

  def test_blank_lines_and_a_byte_order_mark_are_skipped(self):
    answers = self.answers(
      b"\xef\xbb\xbf" + json.dumps(LINE).encode() + b"\r\n",
      b"\n",
      b"  \n",
      LINE,
    )
    self.assertLen(answers, 2)

  def test_code(self):
    line = {"question": "Add.", "tests": [TESTS[0] | {"more": 1}], "answer": 3}
    config = make_config(dataset=self.write(line), params={"verifier": "code"})
    self.assertEqual(check(config), [])
    self.assertEqual(
      question_file.draw(config, seed=0),
      [("Add.", {"answer": None, "tests": TESTS})],
    )

  @parameterized.parameters(
    (b"{\n", "is not JSON"),
    (b"[" * 100_000 + b"\n", "is not JSON"),
    (b'{"question": "\xff"}\n', "is not UTF-8"),
    ([1], "is not a JSON object"),
    ({"answer": "5"}, '"question" is missing'),
    ({"question": "x"}, '"answer" is missing'),
    (LINE | {"question": " "}, '"question" is no text, or empty'),
    (LINE | {"question": 5}, '"question" is no text, or empty'),
    (LINE | {"question": "\ud800"}, '"question" has half a surrogate pair'),
    (LINE | {"answer": ""}, '"answer" is no text, or empty'),
    (LINE | {"answer": 0.5}, '"answer" is no text, or empty'),
    (LINE | {"answer": True}, '"answer" is no text, or empty'),
    (LINE | {"answer": "#### "}, '"answer" has nothing after ####'),
  )
  def test_bad_lines(self, line, reason):
    config = make_config(dataset=self.write(LINE, line))
    (problem,) = check(config)
    self.assertIn("has 1 bad lines of 2: line 2: " + reason, problem)
    self.assertIn("Each must be like " + '{"question": ', problem)
    with self.assertRaises(ConfigError) as caught:
      dataset.load(config, seed=0)
    self.assertEqual(caught.exception.problems, (problem,))

  @parameterized.parameters(
    ({}, "is not a list"),
    ({"tests": []}, "is not a list"),
    ({"tests": [TESTS[0], {"stdin": ""}]}, r'"tests"[1] has no'),
    ({"tests": [{"stdin": 1, "stdout": ""}]}, r'"tests"[0] has no'),
  )
  def test_bad_tests(self, fields, reason):
    path = self.write({"question": "x"} | fields)
    (problem,) = check(make_config(dataset=path, params={"verifier": "code"}))
    self.assertIn(reason, problem)

  def test_the_first_bad_lines_are_shown_and_all_counted(self):
    path = self.write(LINE, *[b"?\n"] * 7)
    (problem,) = check(make_config(dataset=path))
    self.assertIn("has 7 bad lines of 8: line 2: ", problem)
    self.assertIn("; line 4: ", problem)
    self.assertNotIn("line 5", problem)
    self.assertIn("; and 4 more. ", problem)

  def test_an_empty_file(self):
    (problem,) = check(make_config(dataset=self.write(b"\n")))
    self.assertIn("has no lines. Each must be like", problem)


class CheckConfigTest(QuestionFileTest):
  def test_nothing_wrong(self):
    self.assertEqual(check(make_config()), [])

  @parameterized.parameters(
    ({}, "do not say how the answers of a file are verified"),
    ({"verifier": "maths"}, "name verifier = 'maths', which is neither"),
    ({"verifier": ["math"]}, "which is neither"),
    ({"verifier": "math"}, "do not say whether an answer without a box"),
    (MATH | {"box": "maybe"}, "box = 'maybe' is neither 'required' nor"),
    (MATH | {"boxes": 1}, "'boxes' is not a parameter of verifier 'math'"),
    ({"verifier": "code", "box": "required"}, "'box' is not a parameter of"),
  )
  def test_params(self, params, says):
    (problem,) = check(make_config(params=params))
    self.assertIn(says, problem)
    self.assertIn(" Try '", problem)

  def test_the_params_that_it_names_work(self):
    (problem,) = check(make_config(params={}))
    named = problem.partition("Try '")[2].removesuffix("'.")
    self.assertEqual(check(make_config(params=json.loads(named))), [])

  def test_no_such_file(self):
    path = self.write(LINE)
    (problem,) = check(make_config(dataset=path.replace("ns.", "n.")))
    self.assertIn("is no file that can be read: No such file", problem)
    self.assertEndsWith(problem, f"Try {path!r}.")
    (problem,) = check(make_config(dataset="no/such/folder/x.jsonl"))
    self.assertIn("Try a path from the folder", problem)

  def test_no_path(self):
    (problem,) = check(make_config(dataset="\0.jsonl"))
    self.assertIn("is no path", problem)

  def test_all_at_once(self):
    problems = check(make_config(dataset="x.jsonl", params={}))
    self.assertLen(problems, 2)

  def test_math_verify_is_an_extra(self):
    with mock.patch.object(
      question_file.importlib.util, "find_spec", return_value=None
    ):
      (problem,) = check(make_config())
      self.assertIn("Try pip install 'darl_jax[math]'", problem)
      code = make_config(
        dataset=self.write({"question": "x", "tests": TESTS}),
        params={"verifier": "code"},
      )
      self.assertEqual(check(code), [])


class VerifierTaskTest(parameterized.TestCase):
  def test_names_the_verifier_of_the_params(self):
    self.assertEqual(
      dataset.verifier_task(make_config(), seed=0, rewards=None),
      {
        "verifier": "darl_jax.rewards.math:MathVerifier",
        "arguments": {"box": "required"},
      },
    )
    code = make_config(params={"verifier": "code"})
    self.assertEqual(
      dataset.verifier_task(
        code,
        seed=0,
        rewards=mock.Mock(time_limit_s=5.0, memory_limit_mb=600),
      ),
      {
        "verifier": "darl_jax.rewards.code:CodeVerifier",
        "arguments": {
          "time_limit_s": 4.0,
          "answer_limit_s": 4.0,
          "memory_limit_mb": 600,
        },
      },
    )

  def test_of_reasoning_gym_it_is_its_own(self):
    config = make_config(dataset="chain_sum", params={"min_terms": 3})
    self.assertEqual(
      dataset.verifier_task(config, seed=4, rewards=None),
      {
        "verifier": "darl_jax.rewards.reasoning_gym:ReasoningGymVerifier",
        "arguments": {
          "dataset": "chain_sum",
          "params": {"min_terms": 3},
          "seed": 4,
          "num_items": 1000,
        },
      },
    )
