import dataclasses
import importlib
import itertools
import json
import math
import pathlib
import re
import typing

import numpy as np
import pytest
from absl.testing import parameterized
from ml_collections import config_dict

from configs import darl, finetune
from darl_jax import config as config_lib
from darl_jax.models import published

CONFIGS = sorted(
  path.stem
  for path in pathlib.Path(darl.__file__).parent.glob("*.py")
  if path.stem not in ("__init__", "finetune")  # Which needs a model.
)


def leaves(cls=config_lib.RunConfig, prefix=""):
  """(dotted name, type) of every field that is not a group of fields."""
  for name, hint in typing.get_type_hints(cls).items():
    if dataclasses.is_dataclass(hint):
      yield from leaves(hint, f"{prefix}{name}.")
    else:
      yield prefix + name, hint


GROUPS = [
  value
  for name, value in vars(config_lib).items()
  if name.endswith("Config") and dataclasses.is_dataclass(value)
]
NUMERIC = {name: hint for name, hint in leaves() if hint in (int, float)}


# The figures that the tests of combinations count with; the defaults may move.
FIGURES = dict(
  num_steps=400,
  prompts__max_tokens=12,
  rollout__prompts_per_batch=64,
  rollout__max_response_tokens=6,
  replay__max_staleness=4,
  replay__min_batch=32,
  learner__learning_rate=3e-4,
  learner__schedule="constant",
  learner__final_learning_rate=3e-4,
  learner__warmup_steps=10,
  learner__batch_size=384,
  learner__rows=128,
  learner__row_tokens=48,
  learner__score_rows=64,
)


def plain(**changes):
  """The default config as nested dicts, with dotted names replaced.

  The keyword writes a dot as two underscores.
  """
  values = darl.get_config().to_dict()
  for name, value in {**FIGURES, **changes}.items():
    *groups, field = name.split("__")
    group = values
    for part in groups:
      group = group[part]
    group[field] = value
  return values


def problems(values, **kwargs):
  with pytest.raises(config_lib.ConfigError) as caught:
    config_lib.parse(values, **kwargs)
  return caught.value.problems


def changed(name, value):
  return plain(**{name.replace(".", "__"): value})


class NamesTest(parameterized.TestCase):
  @parameterized.parameters(*GROUPS)
  def test_no_field_is_called_like_what_a_config_dict_has(self, cls):
    """Else neither config.x nor --config.x would be the field."""
    names = {field.name for field in dataclasses.fields(cls)}
    self.assertEmpty(names & set(dir(config_dict.ConfigDict)))

  def test_a_field_of_every_group_can_be_set_by_its_path(self):
    config = darl.get_config()
    for name, _ in leaves():
      *groups, field = name.split(".")
      group = config
      for each in groups:
        group = getattr(group, each)
      setattr(group, field, getattr(group, field))
      self.assertFalse(callable(getattr(group, field)), name)


class ParseTest(parameterized.TestCase):
  @parameterized.parameters((name,) for name in CONFIGS)
  def test_every_config_in_the_folder_parses(self, name):
    module = importlib.import_module(f"configs.{name}")
    parsed = config_lib.parse(module.get_config())
    self.assertIsInstance(parsed, config_lib.RunConfig)

  @parameterized.parameters("llama-tied", "qwen3-moe")
  def test_finetuning_takes_its_shape_from_the_model(self, name):
    folder = pathlib.Path(__file__).parent / "fixtures" / name
    parsed = config_lib.parse(finetune.get_config(str(folder)))
    shape = dataclasses.asdict(parsed.model)
    self.assertEqual(shape | published.read_config(folder), shape)
    self.assertEqual(parsed.model.checkpoint, str(folder))
    self.assertEqual(parsed.warm_start.steps, 0)

  def test_values_arrive(self):
    parsed = config_lib.parse(
      plain(num_steps=37, mesh__train__fsdp=2, learner__b2=0.5)
    )
    self.assertEqual(parsed.num_steps, 37)
    self.assertEqual(parsed.mesh.train.fsdp, 2)
    self.assertEqual(parsed.mesh.train.size, 2)
    self.assertEqual(parsed.learner.b2, 0.5)
    self.assertEqual(parsed.prompts.params["max_terms"], 3)

  def test_every_group_is_frozen(self):
    parsed = config_lib.parse(plain())
    groups = [parsed, parsed.mesh.train, parsed.mesh.rollout]
    groups += [
      getattr(parsed, field.name)
      for field in dataclasses.fields(parsed)
      if dataclasses.is_dataclass(field.type)
    ]
    self.assertLen(groups, 16)
    for group in groups:
      name = dataclasses.fields(group)[0].name
      with self.assertRaises(dataclasses.FrozenInstanceError):
        setattr(group, name, 1)

  def test_no_field_has_a_default_here(self):
    self.assertLen(GROUPS, 16)
    for cls in GROUPS:
      for field in dataclasses.fields(cls):
        self.assertIs(field.default, dataclasses.MISSING, field.name)
        self.assertIs(field.default_factory, dataclasses.MISSING, field.name)

  def test_a_whole_number_serves_where_any_number_does(self):
    parsed = config_lib.parse(plain(rollout__temperature=2))
    self.assertIs(type(parsed.rollout.temperature), float)

  def test_takes_config_dicts_and_mappings_alike(self):
    self.assertEqual(
      config_lib.parse(config_dict.ConfigDict(plain())),
      config_lib.parse(plain()),
    )
    frozen = config_dict.FrozenConfigDict(plain())
    self.assertEqual(config_lib.parse(frozen), config_lib.parse(plain()))

  def test_synchronous(self):
    self.assertFalse(config_lib.parse(plain()).synchronous)
    self.assertTrue(
      config_lib.parse(changed("replay.max_staleness", 0)).synchronous
    )


class RoundTripTest(parameterized.TestCase):
  @parameterized.parameters((name,) for name in CONFIGS)
  def test_to_dict(self, name):
    module = importlib.import_module(f"configs.{name}")
    parsed = config_lib.parse(module.get_config())
    text = json.dumps(config_lib.to_dict(parsed), allow_nan=False)
    self.assertEqual(config_lib.parse(json.loads(text)), parsed)
    self.assertEqual(config_lib.parse(config_lib.to_dict(parsed)), parsed)

  def test_stop_strings_survive_json(self):
    parsed = config_lib.parse(plain(rollout__stop_strings=("\n", "'END'")))
    text = json.dumps(config_lib.to_dict(parsed), allow_nan=False)
    again = config_lib.parse(json.loads(text))
    self.assertEqual(again, parsed)
    self.assertEqual(again.rollout.stop_strings, ("\n", "'END'"))

  def test_infinite_values_survive_json(self):
    values = plain(
      replay__max_metric=math.inf,
      learner__max_grad_norm=math.inf,
      objective__dual_clip=math.inf,
    )
    parsed = config_lib.parse(values)
    text = json.dumps(config_lib.to_dict(parsed), allow_nan=False)
    again = config_lib.parse(json.loads(text))
    self.assertEqual(again, parsed)
    self.assertEqual(again.learner.max_grad_norm, math.inf)


class FieldsTest(parameterized.TestCase):
  """Unknown, missing and mistyped fields."""

  @parameterized.parameters(
    ("replay.max_stalenes", "Try replay.max_staleness."),
    ("sede", "Try seed."),
    ("mesh.train.fdsp", "Try mesh.train.fsdp."),
  )
  def test_unknown_field_gets_the_nearest(self, name, advice):
    (problem,) = problems(changed(name, 1))
    self.assertStartsWith(problem, f"{name} is not a field.")
    self.assertEndsWith(problem, advice)

  @parameterized.parameters("seed", "replay.metric", "mesh.train.fsdp")
  def test_missing_field(self, name):
    values = plain()
    *groups, field = name.split(".")
    group = values
    for part in groups:
      group = group[part]
    del group[field]
    (problem,) = problems(values)
    self.assertStartsWith(problem, f"{name} is missing.")

  def test_missing_group(self):
    values = plain()
    del values["learner"]
    (problem,) = problems(values)
    self.assertStartsWith(problem, "learner is missing.")

  def test_a_long_value_is_cut(self):
    (problem,) = problems(changed("prompts.params", "[" * 100_000))
    self.assertLess(len(problem), 250)

  @parameterized.parameters(
    ("num_steps", "must be in [0, 2147483647]"),
    ("rollout.temperature", "is too large a number"),
    ("replay.metric", "is not one of"),
  )
  def test_a_number_that_python_does_not_write(self, name, words):
    (problem,) = problems(changed(name, 10**5000))
    self.assertStartsWith(problem, f"{name} = a number of 16610 bits {words}")

  def test_empty_config_misses_every_group(self):
    self.assertLen(problems({}), len(dataclasses.fields(config_lib.RunConfig)))

  def test_a_group_must_be_one(self):
    (problem,) = problems(changed("mesh.train", 8))
    self.assertIn("mesh.train = 8 is not a group of fields", problem)

  @parameterized.parameters(
    ("num_steps", 400.0, "Try 400."),
    ("num_steps", "400", "is not a whole number"),
    ("num_steps", True, "is not a whole number"),
    ("num_steps", None, "is not a whole number"),
    ("num_steps", math.inf, "is not a whole number"),
    ("rollout.temperature", "hot", "is not a number"),
    ("rollout.temperature", True, "is not a number"),
    ("rollout.temperature", None, "is not a number"),
    ("rollout.temperature", math.nan, "is not a number"),
    ("rollout.temperature", 10**400, "is too large a number"),
    ("model.remat", True, "is not one of none, attention, layer"),
    ("model.tie_embeddings", 1, "is not true or false"),
    ("model.tie_embeddings", "True", "is not true or false"),
    ("prompts.dataset", "", "is not a name"),
    ("prompts.dataset", None, "is not a name"),
    ("prompts.instruction", "", "is not a name"),
    ("prompts.tokenizer", None, "is not text"),
    ("prompts.system", 3, "is not text"),
    ("replay.metric", "varience", "Try 'variance'."),
    ("replay.metric", 3, "is not one of variance, second_moment"),
    ("model.compute_dtype", "float16", "is not one of float32, bfloat16"),
    ("rollout.stop_strings", "END", "is one text, whose .*Try ('END',)."),
    ("rollout.stop_strings", ("END", 3), "a tuple of texts. Try ('END',)."),
    ("rollout.stop_strings", (b"END",), "is not a tuple of texts. Try ()."),
    ("rollout.stop_strings", None, "is not a tuple of texts. Try ()."),
    ("rollout.stop_strings", 3, "is not a tuple of texts. Try ()."),
    ("rollout.cache_dtype", "int4", "is not one of '', float32, bfloat16,"),
    ("rollout.weight_update", ["swap"], "is not one of swap, recompute, drain"),
    (
      "prompts.system",
      "a\ud800b",
      "has half of a surrogate pair, .*Try 'a?b'.",
    ),
    ("prompts.instruction", "\udcff{question}", "Try '?{question}'."),
    ("prompts.params", "{", "is not a JSON object"),
    ("prompts.params", "[1]", "is not a JSON object"),
    ("prompts.params", '{"x": NaN}', "is not a JSON object"),
    ("prompts.params", '{"x": 1e999}', "is not a JSON object"),
    ("prompts.params", "[" * 100_000, "is not a JSON object"),
    ("prompts.params", {"min_terms": 3}, "is not a JSON object as text"),
  )
  def test_mistyped(self, name, value, words):
    (problem,) = problems(changed(name, value))
    self.assertStartsWith(problem, f"{name} = ")
    self.assertRegex(problem, re.escape(words).replace(r"\.\*", ".*"))
    self.assertIn("Try ", problem)


class RangesTest(parameterized.TestCase):
  def test_every_number_has_a_range_and_every_range_a_number(self):
    self.assertCountEqual(NUMERIC, config_lib._RANGES)

  @parameterized.parameters(
    ("seed", -1, "Try 0."),
    ("seed", 2**31, "Try 2147483647."),
    ("num_steps", -1, "must be in [0, 2147483647]. Try 0."),
    ("num_steps", 10**90, "Try 2147483647."),
    ("evaluate.temperature", -1, "must be 0 or in [1e-06, 1e+06]. Try 1e-06."),
    ("evaluate.temperature", 1e-37, "must be 0 or in [1e-06, 1e+06]. Try"),
    ("rollout.temperature", 0, "must be in [1e-06, 1e+06]. Try 1e-06."),
    ("rollout.temperature", 1e-50, "Try 1e-06."),
    ("rollout.temperature", 1e39, "Try 1e+06."),
    ("learner.learning_rate", math.inf, "must be in [0, 1]. Try 1."),
    ("learner.eps", math.inf, "above 0 and finite. Try 1."),
    ("learner.eps", "inf", "Try 1."),
    ("rollout.slots", 10**9, "must be in [0, 65536]. Try 65536."),
    ("prompts.num_items", 10**9, "Try 16777216."),
    ("learner.b1", 1.0, "must be in [0, 1). Try 0.9."),
    ("prompts.heldout_fraction", 0, "must be in (0, 1). Try 0.1."),
    ("prompts.heldout_fraction", 1, "must be in (0, 1). Try 0.9."),
    ("replay.keep_fraction", 1.5, "must be in (0, 1]. Try 1."),
    ("objective.dual_clip", 1.0, "must be above 1."),
    ("objective.weight_cap", 0.5, "must be at least 1. Try 1."),
    ("replay.max_metric", -math.inf, "Try 1."),
    ("model.rope_scaling_factor", 0.5, "Try 1."),
    ("model.num_experts", -1, "Try 0."),
  )
  def test_out_of_range(self, name, value, words):
    (problem,) = problems(changed(name, value))
    self.assertStartsWith(problem, f"{name} = {value!r} must be ")
    self.assertIn(words, problem)

  @parameterized.parameters(*NUMERIC)
  def test_advice_is_a_value_in_range(self, name):
    limits = config_lib._RANGES[name]
    kind = NUMERIC[name]
    candidates = [limits.low, limits.low - 1, limits.high, limits.high + 1]
    if kind is int:
      candidates = [int(v) for v in candidates if math.isfinite(v)]
    refused = [kind(v) for v in candidates if v not in limits]
    self.assertNotEmpty(refused)  # Else the range bounds nothing.
    for value in refused:
      found = [
        problem
        for problem in problems(changed(name, value))
        if problem.startswith(f"{name} = {value!r} must be ")
      ]
      self.assertLen(found, 1)
      advice = found[0].rsplit("Try ", 1)[1].removesuffix(".")
      self.assertIn(kind(advice), limits, found[0])

  @parameterized.parameters(
    (name,) for name, hint in NUMERIC.items() if hint is int
  )
  def test_every_integer_is_bounded(self, name):
    """None may take all of a host's memory, or wrap in an int32."""
    high = config_lib._RANGES[name].high
    self.assertIsInstance(high, int)
    found = problems(changed(name, high + 1))
    self.assertLen([p for p in found if p.startswith(f"{name} = ")], 1)

  @parameterized.parameters(
    (name,) for name, hint in NUMERIC.items() if hint is float
  )
  def test_every_float_is_one_in_float32(self, name):
    """Neither rounded to zero, nor to infinity, nor out of its range."""
    limits = config_lib._RANGES[name]
    tried = [1e-50, 1e-40, 1e39]
    tried += [limits.low + 1e-12, limits.high - 1e-12]
    refused = 0
    for value in tried:
      with np.errstate(all="ignore"):
        single = float(np.float32(value))
      small = abs(single) < np.finfo(np.float32).tiny
      if (
        value not in limits
        or single not in limits
        or (small and value != 0)
        or math.isinf(single) != math.isinf(value)
      ):
        (problem,) = problems(changed(name, value))
        advice = problem.rsplit("Try ", 1)[1].removesuffix(".")
        self.assertStartsWith(problem, f"{name} = {value!r} ")
        self.assertIn(float(advice), limits)
        refused += 1
    self.assertGreater(refused, 1)

  @parameterized.parameters(
    ("learner.b1", 1 - 1e-12, "is 1 as float32, and must be in [0, 1). Try"),
    ("rollout.top_p", 1e-50, "is 0 as float32, and must be in (0, 1]. Try"),
    ("learner.learning_rate", 1e-50, "is 0 as float32. Try 0."),
    ("learner.learning_rate", 1e-320, "is 0 as float32. Try 0."),
    ("learner.final_learning_rate", 1e-320, "is 0 as float32. Try 0."),
    ("watch.min_entropy", 1e-50, "is 0 as float32. Try 0."),
    ("watch.max_grad_norm_ratio", 1 + 1e-12, "is 1 as float32, and must be"),
    ("objective.kl_coefficient", 1e39, "is inf as float32, and must be"),
    ("objective.gspo_clip_low", 1e-50, "is 0 as float32, and must be in (0"),
    ("learner.eps", 1e-50, "is 0 as float32, and must be above 0"),
    ("learner.max_grad_norm", 1e39, "is inf as float32. Try inf."),
    ("objective.clip_low", 1e-50, "is 0 as float32"),
  )
  def test_says_what_float32_makes_of_it(self, name, value, words):
    (problem,) = problems(changed(name, value))
    self.assertStartsWith(problem, f"{name} = {value!r} {words}")

  def test_infinite_only_where_it_means_none(self):
    takes = {n for n, limits in config_lib._RANGES.items() if limits.infinite}
    self.assertEqual(
      takes,
      {
        "replay.max_metric",
        "objective.weight_cap",
        "objective.clip_high",
        "objective.gspo_clip_high",
        "objective.m2po_max_second_moment",
        "objective.estr_threshold",
        "objective.dual_clip",
        "objective.max_behavior_weight",
        "learner.max_grad_norm",
        "rollback.max_ratio",
        "watch.max_parity_p95",
        "watch.max_length_ratio",
        "watch.max_advantage_bias",
        "watch.max_lost_fraction",
        "watch.max_grad_norm_ratio",
      },
    )
    for name in takes:
      config_lib.parse(changed(name, math.inf))


_DECOUPLED = ("objective.trust_region", "decoupled")


def _balance(**changes):
  """The balance heuristic where it can work, and then some changes."""
  accepted = dict(
    objective__behavior_weighting="balance",
    objective__trust_region="decoupled",
    rollout__weight_update="drain",
  )
  return accepted | changes


# Changes to the default config that cannot work, the field to blame, and a
# value of it that the problem advises and that mends it.
COMBINATIONS = (
  (
    dict(replay__min_batch=385, learner__rows=256),
    "replay.min_batch",
    384,
  ),
  # 2 of 18 tokens fit into a row of 48, and rows go in threes.
  (
    dict(replay__min_batch=200, learner__rows=96, learner__microbatches=3),
    "learner.rows",
    102,
  ),
  (dict(replay__min_batch=200, learner__rows=96), "replay.min_batch", 192),
  (dict(learner__rows=130, learner__minibatches=4), "learner.rows", 128),
  (dict(learner__microbatches=3), "learner.rows", 126),
  (dict(learner__rows=20, mesh__train__fsdp=32), "learner.rows", 32),
  (dict(learner__score_rows=66, mesh__train__data=4), "learner.score_rows", 64),
  (
    dict(warm_start__batch_size=6, mesh__train__data=4),
    "warm_start.batch_size",
    8,
  ),
  (dict(prompts__instruction="?"), "prompts.instruction", "{question}"),
  (dict(prompts__system="Be kind."), "prompts.system", ""),
  (dict(learner__row_tokens=17), "learner.row_tokens", 18),
  (dict(rollout__stop_strings=("A", "")), "rollout.stop_strings", ("A",)),
  (dict(rollout__stop_strings=("\ufffd",)), "rollout.stop_strings", ()),
  (dict(rollout__slots=66, mesh__rollout__data=4), "rollout.slots", 68),
  (
    dict(rollout__prompts_per_batch=60_000, prompts__num_items=100_000),
    "rollout.slots",
    65536,
  ),
  (dict(rollout__cache_tokens=20), "rollout.cache_tokens", 24),
  (dict(objective__proximal="snapshot"), "objective.proximal", "recompute"),
  (dict(objective__kl_target="reference"), "objective.kl_target", "behavior"),
  (
    dict(objective__behavior_weight_mode="mask"),
    "objective.behavior_weight_mode",
    "truncate",
  ),
  (dict(objective__behavior_weight_mode="mask"), *_DECOUPLED),
  (_balance(objective__trust_region="behavior"), *_DECOUPLED),
  (
    _balance(objective__trust_region="behavior"),
    "objective.behavior_weighting",
    "pooled",
  ),
  (
    _balance(objective__proximal="loglinear"),
    "objective.proximal",
    "recompute",
  ),
  (
    _balance(objective__behavior_weight_mode="mask"),
    "objective.behavior_weight_mode",
    "truncate",
  ),
  *(
    (_balance(rollout__weight_update=how), "rollout.weight_update", "drain")
    for how in ("swap", "recompute")
  ),
  (_balance(rollout__top_k=3), "rollout.top_k", 0),
  (_balance(rollout__top_p=0.9), "rollout.top_p", 1),
  (_balance(rollout__min_p=0.1), "rollout.min_p", 0.0),
  *(
    (
      dict(rewards__overlong_penalty=0.5, rewards__overlong_buffer_tokens=n),
      "rewards.overlong_buffer_tokens",
      2,
    )
    for n in (0, 7)
  ),
  (dict(rewards__overlong_penalty=0.5), "rewards.overlong_penalty", 0.0),
  (dict(evaluate__samples_per_prompt=4), "evaluate.samples_per_prompt", 1),
  (dict(evaluate__samples_per_prompt=4), "evaluate.temperature", 1.0),
  (
    dict(
      evaluate__samples_per_prompt=2**15,
      evaluate__temperature=1.0,
      mesh__rollout__data=4,
    ),
    "evaluate.samples_per_prompt",
    2**14,
  ),
  (
    dict(num_steps=2**31 - 1, learner__minibatches=2),
    "num_steps",
    2**30 - 1,
  ),
  (
    dict(
      rollout__prompts_per_batch=33,
      rollout__samples_per_prompt=3,
      mesh__rollout__data=4,
    ),
    "rollout.slots",
    100,
  ),
  (dict(rollout__stop_strings=("\udc00", "A")), "rollout.stop_strings", ("A",)),
  (dict(rollout__cache_tokens=20), "rollout.cache_tokens", 24),
  (
    dict(rollout__prompts_per_batch=2**14, mesh__rollout__data=3),
    "rollout.slots",
    65535,
  ),
  # Of 2 tokens, 2^23 + 3 in a sample, where 2^24 are too many.
  (
    dict(
      rollout__max_response_tokens=2**23,
      rollout__chunk_tokens=1,
      rollout__slots=4,
      learner__rows=1,
      learner__row_tokens=2**24,
      learner__score_rows=1,
      replay__min_batch=1,
      warm_start__batch_size=1,
      model__context_tokens=2**24,
    ),
    "rollout.cache_tokens",
    2**24,
  ),
  (
    dict(
      rollout__max_response_tokens=2**20,
      rollout__chunk_tokens=1,
      rollout__slots=512,
      rollout__cache_tokens=2**21,
      learner__rows=1,
      learner__row_tokens=2**21,
      learner__score_rows=1,
      replay__min_batch=1,
      warm_start__batch_size=1,
      model__context_tokens=2**24,
    ),
    "rollout.slots",
    255,
  ),
  (
    dict(learner__row_tokens=2**23, learner__score_rows=1),
    "learner.rows",
    32,
  ),
  (
    dict(learner__row_tokens=2**23, learner__rows=32),
    "learner.score_rows",
    32,
  ),
  (
    dict(
      rollout__max_response_tokens=2**23,
      rollout__slots=1,
      learner__rows=1,
      learner__row_tokens=2**24,
      learner__score_rows=1,
      replay__min_batch=1,
      model__context_tokens=2**24,
    ),
    "warm_start.batch_size",
    31,
  ),
  (dict(model__num_kv_heads=3), "model.num_kv_heads", 1),
  (dict(model__head_dim=15), "model.head_dim", 16),
  (
    dict(model__rope_scaling_factor=8.0, model__rope_low_frequency_factor=4.0),
    "model.rope_low_frequency_factor",
    1,
  ),
  (dict(model__lora_rank=2), "model.lora_rank", 0),
  (
    dict(
      model__lora_rank=2,
      model__checkpoint="some/folder",
      model__lora_targets="attention.*, mlp.*",
    ),
    "model.lora_targets",
    "attention.*",
  ),
  (
    dict(
      model__lora_rank=2,
      model__checkpoint="some/folder",
      model__lora_targets=" ,",
    ),
    "model.lora_targets",
    "attention.*",
  ),
  (dict(model__context_tokens=17), "rollout.max_response_tokens", 5),
  (dict(model__context_tokens=12), "model.context_tokens", 18),
  (
    dict(
      model__num_experts=4,
      model__experts_per_token=5,
      model__expert_mlp_dim=8,
    ),
    "model.experts_per_token",
    4,
  ),
  (
    dict(model__num_experts=4, model__expert_mlp_dim=8),
    "model.experts_per_token",
    1,
  ),
  (
    dict(model__num_experts=4, model__experts_per_token=2),
    "model.expert_mlp_dim",
    192,
  ),
  # Neither the experts nor their width: 9 experts of width 15 over 2.
  (
    dict(
      model__num_experts=9,
      model__experts_per_token=2,
      model__expert_mlp_dim=15,
      mesh__train__tensor=2,
    ),
    "mesh.train.tensor",
    1,
  ),
  (dict(mesh__train__tensor=4), "mesh.train.tensor", 2),
  (dict(mesh__rollout__tensor=4), "mesh.rollout.tensor", 2),
  (
    dict(mesh__train__fsdp=5, learner__rows=130, learner__score_rows=65),
    "mesh.train.fsdp",
    1,
  ),
  (dict(replay__max_staleness=0, replay__max_uses=2), "replay.max_uses", 1),
  (
    dict(objective__loss="cispo", objective__trust_region="decoupled"),
    "objective.trust_region",
    "behavior",
  ),
  (
    dict(objective__loss="gspo", objective__behavior_weighting="moment"),
    "objective.behavior_weighting",
    "pooled",
  ),
  (
    dict(objective__loss="topr", objective__clip_age_decay=0.9),
    "objective.clip_age_decay",
    1,
  ),
  (
    dict(learner__final_learning_rate=0.0),
    "learner.final_learning_rate",
    3e-4,
  ),
  (
    dict(learner__schedule="cosine", learner__learning_rate=0.0),
    "learner.final_learning_rate",
    0,
  ),
  (dict(num_steps=5), "learner.warmup_steps", 0),
  (
    dict(replay__max_candidates=63, replay__reject_fraction=0.5),
    "replay.max_candidates",
    64,
  ),
  (
    dict(
      replay__max_candidates=127,
      replay__selection_mode="keep_best",
      replay__keep_fraction=0.25,
    ),
    "replay.max_candidates",
    128,
  ),
  (
    dict(watch__stop_on=("reward_one", "non_finit")),
    "watch.stop_on",
    ("reward_one", "non_finite"),
  ),
)


class CrossFieldTest(parameterized.TestCase):
  @parameterized.parameters(*COMBINATIONS)
  def test_refused_with_advice_that_works(self, changes, field, advised):
    found = [p for p in problems(plain(**changes)) if field in p]
    advice = " ".join(re.split("Try|Nearest", p, maxsplit=1)[1] for p in found)
    if isinstance(advised, (str, tuple)):
      self.assertIn(f"{field}={advised!r}", advice)
    else:
      self.assertIn(f"{advised:.15g}", re.findall(r"[\d.e-]*\d", advice))
    config_lib.parse(plain(**{**changes, field.replace(".", "__"): advised}))

  @parameterized.parameters((9, 16, 15), (8, 15, 15))
  def test_experts_dealt_out_or_cut(self, count, width, mlp_dim):
    config_lib.parse(
      plain(
        model__num_experts=count,
        model__experts_per_token=2,
        model__expert_mlp_dim=width,
        model__mlp_dim=mlp_dim,  # Unused with experts.
        mesh__train__tensor=2,
        mesh__rollout__tensor=2,
      )
    )

  def test_every_check_can_fail(self):
    for check in config_lib._CROSS_FIELD_CHECKS:
      found = []
      for changes, _, _ in COMBINATIONS:
        fields = config_lib._parse_fields(
          config_lib.RunConfig, plain(**changes), "", []
        )
        found += check(fields)
      self.assertNotEmpty(found, check.__name__)

  def test_every_combination_of_methods(self):
    """The table of docs/method.md, for every value that there is."""

    def makes_sense(loss, proximal, trust_region, behavior_weighting):
      if trust_region == "behavior":
        known = proximal == "recompute"
      else:
        known = loss == "clipped"
      if behavior_weighting.startswith("balance"):
        known &= trust_region == "decoupled"
        known &= proximal in ("recompute", "snapshot")
      return known and (loss != "gspo" or behavior_weighting == "pooled")

    names = ("loss", "proximal", "trust_region", "behavior_weighting")
    options = {
      name: typing.get_args(hint)
      for cls in (config_lib.ObjectiveConfig, config_lib.ReplayConfig)
      for name, hint in typing.get_type_hints(cls).items()
    }
    accepted = 0
    for values in itertools.product(*(options[name] for name in names)):
      fields = dict(zip(names, values, strict=True))
      changes = {f"objective__{name}": v for name, v in fields.items()}
      for mode in options["selection_mode"]:
        values = plain(
          **changes,
          replay__selection_mode=mode,
          rollout__weight_update="drain",
        )
        if makes_sense(**fields):
          config_lib.parse(values)
          accepted += 1
          continue
        for problem in problems(values):
          blamed = [n for n in names if f"objective.{n} = " in problem]
          self.assertLen(set(blamed), 2, problem)
    self.assertGreater(accepted, 100)

  def test_rows_that_just_hold_the_least_batch(self):
    config_lib.parse(plain(replay__min_batch=256))

  def test_warmup_and_schedule_at_their_limits(self):
    config_lib.parse(
      plain(
        num_steps=10,
        learner__warmup_steps=8,
        learner__schedule="cosine",
        learner__final_learning_rate=0.0,
      )
    )


class ManyProblemsTest(parameterized.TestCase):
  def test_all_at_once(self):
    found = problems(
      plain(
        sede=3,
        num_steps="many",
        rollout__temperature=-1.0,
        replay__metric="luck",
        learner__row_tokens=17,
        model__head_dim=15,
      )
    )
    self.assertLen(found, 6)
    for name in (
      "sede",
      "num_steps",
      "rollout.temperature",
      "replay.metric",
      "learner.row_tokens",
      "model.head_dim",
    ):
      self.assertLen([p for p in found if p.startswith(name + " ")], 1, name)

  def test_message(self):
    with pytest.raises(config_lib.ConfigError) as caught:
      config_lib.parse(plain(seed=-1, num_steps=-1))
    self.assertEqual(
      str(caught.value).splitlines(),
      [
        "2 problems in the config:",
        "  * seed = -1 must be in [0, 2147483647]. Try 0.",
        "  * num_steps = -1 must be in [0, 2147483647]. Try 0.",
      ],
    )
    with pytest.raises(config_lib.ConfigError, match="^1 problem in the"):
      config_lib.parse(plain(seed=-1))

  def test_a_cross_field_check_of_a_bad_field_is_left_out(self):
    # learner.rows would not split, but the mesh itself is the problem.
    (problem,) = problems(plain(mesh__train__fsdp=0, learner__rows=7))
    self.assertStartsWith(problem, "mesh.train.fsdp = 0 ")

  def test_extra_checks(self):
    def check(fields):
      return [f"prompts.dataset = {fields.prompts.dataset!r} is unknown."]

    (problem,) = problems(plain(), extra_checks=[check])
    self.assertEqual(problem, "prompts.dataset = 'chain_sum' is unknown.")
    self.assertLen(problems(plain(seed=-1), extra_checks=[check]), 2)
    # The check reads a field that is a problem already.
    self.assertLen(
      problems(changed("prompts.dataset", ""), extra_checks=[check]), 1
    )
