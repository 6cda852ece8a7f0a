"""Any value in any field: a ConfigError that names it, or a run that starts."""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import operator
import typing
from typing import Any, Literal

import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import async_grpo, darl, decoupled_ppo, sync_grpo
from darl_jax import config as config_lib
from darl_jax import watch
from darl_jax.learner import state as learner_state
from darl_jax.prompts import dataset
from darl_jax.replay import ring as ring_lib
from darl_jax.replay import selection
from darl_jax.sharding import meshes


def paths(cls=config_lib.RunConfig, prefix=""):
  """(dotted name, type) of every field and of every group of fields."""
  for name, hint in typing.get_type_hints(cls).items():
    yield prefix + name, hint
    if dataclasses.is_dataclass(hint):
      yield from paths(hint, f"{prefix}{name}.")


HINTS = dict(paths())
BASES = [
  module.get_config().to_dict()
  for module in (darl, async_grpo, decoupled_ppo, sync_grpo)
]

EXTREMES = {
  int: [0, 1, 2, 7, 2**15, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63]
  + [-1, -(2**63), 10**400],
  float: [0.0, -0.0, 5e-324, 1e-45, 1e-38, 0.1, 1 - 1e-16, 1.0, 1 + 1e-15]
  + [1e9, 3.4e38, 3.5e38, 1.8e308, math.inf, -math.inf, math.nan, -1e-9],
}

_INTS = st.one_of(
  st.integers(-3, 70),
  st.sampled_from(EXTREMES[int]),
)
_FLOATS = st.one_of(
  st.floats(allow_nan=True, allow_infinity=True),
  st.floats(0, 1),
  st.sampled_from(EXTREMES[float]),
)
_TEXTS = st.one_of(
  st.text(max_size=8),
  st.sampled_from(
    ["", "inf", "-inf", "nan", "1", "true", "None", "\ud800", "\0", "\ufffd"]
    + ["{question}", "chain_sum", "a" * 10_000, "%s{}{0}", "[]", "{}", "-1e999"]
  ),
)


def _objects(children):
  return st.one_of(
    st.lists(children, max_size=3),
    st.lists(children, max_size=3).map(tuple),
    st.dictionaries(_TEXTS, children, max_size=3),
    st.dictionaries(st.one_of(_INTS, st.none()), children, max_size=2),
  )


class _Hostile:
  """Neither compared nor shown without an exception."""

  __hash__ = None

  def __eq__(self, other):
    raise RuntimeError("compared")

  def __repr__(self):
    raise RuntimeError("shown")


# What hypothesis could not show, or would compare.
_ODD = {
  "None": None,
  "bytes": b"bytes",
  "complex": 1j,
  "np.int64": np.int64(3),
  "np.float64": np.float64("nan"),
  "np.float32": np.float32(0.5),
  "np.bool": np.bool_(True),
  "array": np.array([1, 2]),
  "empty array": np.array([]),
  "set": {1, 2},
  "class": object,
  "function": len,
  "5000 digits": 10**5000,
  "hostile": _Hostile(),
}


@dataclasses.dataclass(frozen=True)
class Odd:
  name: str


def realize(value: Any) -> Any:
  """``value`` with what each ``Odd`` in it stands for."""
  if isinstance(value, Odd):
    return _ODD[value.name]
  if isinstance(value, (list, tuple)):
    return type(value)(map(realize, value))
  if isinstance(value, dict):
    return {key: realize(inner) for key, inner in value.items()}
  return value


ANY = st.recursive(
  st.one_of(
    _INTS,
    _FLOATS,
    _TEXTS,
    st.booleans(),
    st.sampled_from(sorted(_ODD)).map(Odd),
  ),
  _objects,
  max_leaves=5,
)
_JSON = st.recursive(
  # Sizes of a dataset that can be drawn in no time.
  st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(), _TEXTS),
  lambda inner: st.one_of(
    st.lists(inner, max_size=2), st.dictionaries(_TEXTS, inner, max_size=2)
  ),
  max_leaves=4,
)
_PARAMS = st.one_of(
  st.dictionaries(
    st.one_of(
      st.sampled_from(["min_terms", "max_terms", "min_digits", "max_digits"]),
      st.sampled_from(["seed", "size", "operators"]),
      _TEXTS,
    ),
    _JSON,
    max_size=3,
  ).map(json.dumps),
  st.sampled_from(["[" * 100_000, '{"a": 1e999}', '{"a": NaN}', "{", "null"]),
  st.sampled_from(['{"a": ' + "9" * 5000 + "}", '{"min_terms": 1, "a": 1}']),
)


def _typed(name: str, hint: Any) -> st.SearchStrategy:
  """Values of a field's own type, extreme ones too."""
  if name == "prompts.params":
    return _PARAMS
  if name == "prompts.dataset":
    return st.sampled_from(["chain_sum", "chain_sun", "leg_counting", "\ud800"])
  if name == "watch.stop_on":
    names = st.one_of(st.sampled_from(config_lib.ALARMS), _TEXTS)
    return st.lists(names, max_size=3).map(tuple)
  if typing.get_origin(hint) is Literal:
    return st.sampled_from(typing.get_args(hint))
  if typing.get_origin(hint) is tuple:
    return st.lists(_TEXTS, max_size=3).map(tuple)
  if dataclasses.is_dataclass(hint):
    return st.dictionaries(_TEXTS, ANY, max_size=2)
  return {bool: st.booleans(), int: _INTS, float: _FLOATS}.get(hint, _TEXTS)


@st.composite
def changes(draw):
  """(what, dotted name, value) of some changes to a config."""
  found = []
  # Mostly few: of a config with much wrong nothing is ever constructed.
  for _ in range(draw(st.sampled_from([1, 1, 1, 1, 2, 2, 3, 8]))):
    name = draw(st.sampled_from(sorted(HINTS)))
    what = draw(
      st.sampled_from(
        ["near"] * 8 + ["typed"] * 8 + ["any"] * 3 + ["del", "add"]
      )
    )
    if what == "add":
      name = name.rpartition(".")[0]
      added = draw(
        st.one_of(st.text(max_size=6), st.sampled_from(["", "seeds"]))
      )
      name = f"{name}.{added}" if name else added
    value = None
    if what == "near" and HINTS[name] in (int, float):
      value = draw(st.sampled_from([0, 1, 2, 0.5, 0.9, 1.1, 4, 1e3, 1e9, 1e30]))
    elif what in ("near", "typed"):
      what, value = "typed", draw(_typed(name, HINTS[name]))
    elif what != "del":
      value = draw(ANY)
    found.append((what, name, value))
  return found


def apply(base: dict, edits) -> tuple[dict, dict[str, Any]]:
  """The config, and what was changed of it by name."""
  config, changed = copy.deepcopy(base), {}
  for what, name, value in edits:
    *groups, last = name.split(".") if what != "add" else name.rsplit(".", 1)
    if what == "add" and groups:
      groups = groups[0].split(".")
    place = config
    for group in groups:
      place = place.get(group) if isinstance(place, dict) else None
    if not isinstance(place, dict):
      continue  # An edit before took the group away.
    if what == "del":
      place.pop(last, None)
    elif what == "near":
      usual = functools.reduce(operator.getitem, groups, base)[last]
      place[last] = HINTS[name](value * usual)
    else:
      place[last] = realize(value)
    changed[name] = value
  return config, changed


def parse(config) -> config_lib.RunConfig:
  return config_lib.parse(config, extra_checks=(dataset.check_config,))


class ConfigFuzzTest(parameterized.TestCase):
  @settings(max_examples=1100, deadline=None, derandomize=True, database=None)
  @given(st.sampled_from(range(len(BASES))), changes())
  def test_an_error_that_names_it_or_a_run(self, base, edits):
    config, changed = apply(BASES[base], edits)
    try:
      parsed = parse(config)
    except config_lib.ConfigError as error:
      self._check_error(error, changed)
    else:
      self._check_parsed(parsed)

  @parameterized.parameters(int, float)
  def test_every_number_at_its_extremes(self, kind):
    """One field at a time, where ``changes`` hits few of them alone."""
    for name, hint in HINTS.items():
      for value in EXTREMES[kind] if hint is kind else ():
        with self.subTest(f"{name} = {value!r}"):
          config, changed = apply(BASES[0], [("typed", name, value)])
          try:
            parsed = parse(config)
          except config_lib.ConfigError as error:
            self._check_error(error, changed)
          else:
            self._check_parsed(parsed)

  def _check_error(self, error, changed):
    self.assertNotEmpty(error.problems)
    str(error).encode("utf-8", "backslashreplace")
    for problem in error.problems:
      # A field, what it is, and what to do about it.
      named = [name for name in HINTS if name in problem]
      added = [name for name in changed if name in problem]
      self.assertTrue(named or added, problem)
      self.assertRegex(
        problem, r" = |is missing|is not a field|^prompts.params: |^watch"
      )
      self.assertRegex(problem, r"Try|Nearest|Set |Start the run")
      self.assertLess(len(problem), 1000)
      self.assertNotRegex(problem, r"ambiguous|Traceback|object at 0x")
    # One problem is not reported twice.
    self.assertLen(set(error.problems), len(error.problems))

  def _check_parsed(self, parsed):
    for name, hint in HINTS.items():
      value = parsed
      for part in name.split("."):
        value = getattr(value, part)
      self._check_type(name, hint, value)
    # It is what config.json says, and what a run of that would be.
    text = json.dumps(config_lib.to_dict(parsed), allow_nan=False)
    self.assertEqual(config_lib.parse(json.loads(text)), parsed)
    self._check_constructs(parsed)

  def _check_type(self, name, hint, value):
    if typing.get_origin(hint) is Literal:
      self.assertIn(value, typing.get_args(hint), name)
    elif typing.get_origin(hint) is tuple:
      self.assertIsInstance(value, tuple, name)
      self.assertTrue(all(type(text) is str for text in value), name)
    elif dataclasses.is_dataclass(hint):
      self.assertIs(type(value), hint, name)
    elif hint in (bool, int, float):
      self.assertIs(type(value), hint, name)
      self.assertFalse(hint is float and math.isnan(value), name)
    elif name == "prompts.params":
      self.assertIs(type(value), dict, name)
    else:
      self.assertIsInstance(value, str, name)

  def _check_constructs(self, parsed):
    schedule = learner_state.schedule(
      parsed.learner, num_steps=parsed.num_steps
    )
    for update in (0, 1, 1000):
      self.assertTrue(np.isfinite(float(schedule(update))))
    learner_state.adamw(parsed.learner, schedule)
    with contextlib.suppress(config_lib.ConfigError):  # More than are attached.
      meshes.split_devices(parsed.mesh)
    ring = ring_lib.Ring(
      parsed.replay,
      advantage=parsed.objective.advantage,
      reward_tolerance=parsed.objective.reward_tolerance,
      groups_per_version=parsed.rollout.prompts_per_batch,
      truncated=parsed.rollout.truncates,
    )
    ring.accounting().check()
    watch.Watch(parsed.watch).observe(1, {"train/reward": 0.5})
    for size in (0, 3):
      stats = pool(size)
      rng = np.random.default_rng([parsed.seed, 0])
      kept = selection.select(
        stats, parsed.replay, batch_size=parsed.learner.batch_size, rng=rng
      )
      self.assertLessEqual(len(kept), size)
      report = selection.report(stats, kept, metric=parsed.replay.metric)
      self.assertTrue(np.all(np.isfinite(list(report.values()))))
    selection.pool_needed(parsed.replay, parsed.replay.min_batch)


def pool(size: int) -> selection.PoolStatistics:
  names = [f.name for f in dataclasses.fields(selection.PoolStatistics)]
  arrays = {name: np.linspace(0.0, 1.0, size) for name in names}
  counts = np.arange(size)
  return selection.PoolStatistics(**arrays | dict(count=counts, length=counts))


if __name__ == "__main__":
  absltest.main()
