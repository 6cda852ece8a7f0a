"""Counters of loops, written as compilers write them."""

from absl.testing import parameterized

from darl_jax.planner import hlo_text, hlo_trips

TEMPLATE = """HloModule m, is_scheduled=true

%bump (p: s32[], q: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %a = s32[] {step}(%p, %q)
}}

%body (p: (s32[], s32[], s32[])) -> (s32[], s32[], s32[]) {{
  %p = (s32[], s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %s = s32[] get-tuple-element(%p), index=2
  %c = s32[]{{:S(6)}} copy(%i)
  %f = s32[] fusion(%c, %s), kind=kLoop, calls=%bump
  ROOT %t = (s32[], s32[], s32[]) tuple(%f, {carried}, %s)
}}

%less (p: s32[], q: s32[]) -> pred[] {{
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %l = pred[] compare({compared}), direction={direction}
}}

%more (p: (s32[], s32[], s32[])) -> pred[] {{
  %p = (s32[], s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %f = pred[] fusion(%i, %n), kind=kLoop, calls=%less
}}

ENTRY %main (x: s32[]) -> (s32[], s32[], s32[]) {{
  %x = s32[] parameter(0)
  %0 = s32[] constant({start})
  %1 = s32[] constant({bound})
  %2 = s32[] constant({by})
  %t = (s32[], s32[], s32[]) tuple({initial}, %1, %2)
  ROOT %w = (s32[], s32[], s32[]) while(%t), condition=%more, body=%body
}}
"""


def trips(
  start: int,
  bound: int,
  by: int,
  *,
  direction: str = "LT",
  step: str = "add",
  compared: str = "%p, %q",
  carried: str = "%n",
  initial: str = "%0",
) -> int | None:
  """Of a loop whose bound and step are carried, its condition a fusion."""
  module = hlo_text.parse(
    TEMPLATE.format(
      start=start,
      bound=bound,
      by=by,
      direction=direction,
      step=step,
      compared=compared,
      carried=carried,
      initial=initial,
    )
  )
  main = module.computations[module.entry]
  count, known = hlo_trips.trips(module, main, main.instructions["w"], {})
  if carried == "%n":
    assert known[1] == bound
    assert known[2] == by
  assert 0 not in known  # The counter changes.
  return count


def by_running(start: int, bound: int, by: int, direction: str) -> int:
  compare = {
    "LT": int.__lt__,
    "LE": int.__le__,
    "GT": int.__gt__,
    "GE": int.__ge__,
    "NE": int.__ne__,
  }[direction]
  count = 0
  while compare(start, bound):
    start, count = start + by, count + 1
  return count


class TripsTest(parameterized.TestCase):
  @parameterized.product(
    start=(-3, 0, 4), bound=(0, 7, 12), by=(1, 2, 5), direction=("LT", "LE")
  )
  def test_upwards(self, start, bound, by, direction):
    self.assertEqual(
      trips(start, bound, by, direction=direction),
      by_running(start, bound, by, direction),
    )

  @parameterized.product(
    start=(3, 0, 14), bound=(0, -7), by=(1, 3), direction=("GT", "GE")
  )
  def test_downwards(self, start, bound, by, direction):
    self.assertEqual(
      trips(start, bound, by, direction=direction, step="subtract"),
      by_running(start, bound, -by, direction),
    )

  def test_until_equal(self):
    self.assertEqual(trips(0, 12, 3, direction="NE"), 4)
    self.assertIsNone(trips(0, 13, 3, direction="NE"))

  def test_the_bound_on_the_left(self):
    count = trips(0, 10, 3, direction="GT", compared="%q, %p")
    self.assertEqual(count, 4)

  @parameterized.parameters(
    dict(carried="%i"),  # The bound changes.
    dict(initial="%x"),  # The start is an argument.
    dict(step="multiply"),
    dict(direction="GT"),  # Away from the bound: it may never end.
    dict(by=0),
  )
  def test_not_known(self, by=2, **changes):
    self.assertIsNone(trips(0, 10, by, **changes))
