import json

from absl.testing import parameterized

from darl_jax.rewards import verifier


class VerifierTest(parameterized.TestCase):
  def test_constructs_what_the_task_names(self):
    task = {"verifier": "fractions:Fraction", "arguments": {"numerator": 3}}
    self.assertEqual(verifier.construct(json.loads(json.dumps(task))), 3)

  def test_arguments_may_be_left_out(self):
    self.assertEqual(verifier.construct({"verifier": "builtins:list"}), [])

  @parameterized.parameters(
    {},
    {"verifier": None},
    {"verifier": "module.Class"},
    {"verifier": "module:"},
    {"verifier": ":Class"},
    {"verifier": "module:Class", "arguments": [1]},
  )
  def test_refuses_what_names_no_verifier(self, **task):
    with self.assertRaisesRegex(ValueError, "Try {'verifier': 'module:Class'"):
      verifier.parse_task(task)

  def test_a_class_that_is_not_there_is_an_error(self):
    with self.assertRaises(AttributeError):
      verifier.construct({"verifier": "fractions:Fractoin"})
