"""Tables and JSON of plans made by hand."""

import dataclasses
import io
import json

from absl.testing import parameterized
from rich.console import Console

from darl_jax.planner import chips, report
from darl_jax.planner.estimate import Estimate
from darl_jax.planner.hlo_cost import Collective, Cost, Kernel
from darl_jax.planner.plan import Plan, Whole
from darl_jax.planner.programs import Memory, Program

GIB = 2**30
V5E = chips.CHIPS["v5e"]

FITS = Program(
  name="train_step",
  mesh="train",
  devices=4,
  chip=V5E,
  resident=GIB,
  tokens=1000,
  model_flops=197e12 * 4,
  compile_seconds=12.0,
  memory=Memory(2 * GIB, 2 * GIB, 2 * GIB, 5 * GIB, 2**20, 7 * GIB),
  cost=Cost(
    flops=250e12,
    bytes=3e11,
    cycles=1e9,
    collectives={(1,): Collective("all-gather", "fsdp", (0, 1, 2, 3), 36, 5e9)},
    kernels={"mystery": Kernel("mystery", "none", 1, 0, 819e9 / 8e3)},
    unknown_loops=["while.7"],
  ),
  estimate=Estimate("compiler", 1.27, 0.37, 0.5, 0.2, 1.5),
)
FAILS = Program(
  name="decode",
  mesh="rollout",
  devices=4,
  chip=V5E,
  resident=GIB,
  tokens=64,
  model_flops=1e12,
  compile_seconds=3.0,
  needed=20.5 * GIB,
  failure="RESOURCE_EXHAUSTED: Ran out of memory on HBM, ...",
)
WHOLE = Whole(
  parameters=1_720_000_000,
  unused_devices=8,
  snapshot_bytes=3.2 * GIB,
  snapshots=5,
  ring_bytes=20 * GIB,
  host_bytes=178 * GIB,
  hosts=4,
  publish_seconds=0.5,
  generation_seconds=None,
  step_seconds=2.0,
)


def plan(*programs: Program, whole: Whole = WHOLE) -> Plan:
  return Plan(
    topology="v5e:4x4",
    chip=V5E,
    programs=programs,
    whole=whole,
    train_devices=4,
    rollout_devices=4,
    balanced_ratio=2.5 if whole.generation_seconds else None,
    suggestions=("decode: rollout.prompts_per_batch=4",),
  )


def printed(which: Plan) -> str:
  out = io.StringIO()
  report.print_plan(which, Console(file=out, width=250))
  return out.getvalue()


class TableTest(parameterized.TestCase):
  def test_a_program_that_fits(self):
    text = printed(plan(FITS))
    for part in (
      "v5e:4x4",
      "15.8 GiB",
      "197 TFLOP/s",
      "8 unused",
      "never run",
      "7.75 left",
      "250",
      "279 GiB",
      "(compiler; links last, not hidden)",
      "all-gather over fsdp: 4.66 GiB in 36",
      "no FLOPs known of mystery",
      "kernels mystery 125 us",
      "Chips of 4 hosts",
      "trips unknown: while.7",
      "5 snapshots of 3.2 GiB",
      "one of 4 hosts",
      "try decode: rollout.prompts_per_batch=4",
    ):
      self.assertIn(part, text)
    [row] = [
      line
      for line in text.splitlines()
      if "500 ms" in line and "train_step" in line
    ]
    # Tokens a second and share of peak are over both bounds' greater time.
    self.assertEqual(
      row.split()[-5:], ["500", "ms", "2", "s", "500", "0.500"][-5:]
    )

  def test_one_that_the_compiler_finds_no_room_for_is_a_row(self):
    text = printed(plan(FITS, FAILS))
    [row] = [
      line for line in text.splitlines() if " over" in line and "decode" in line
    ]
    self.assertIn("decode", row)
    self.assertIn("20.50", row)
    self.assertIn("5.75 over", row)
    self.assertIn("decode: RESOURCE_EXHAUSTED: Ran out of memory", text)

  def test_one_without_a_figure(self):
    program = dataclasses.replace(FAILS, needed=None)
    self.assertRegex(printed(plan(program)), r"decode .* no *\n")
    self.assertIn("decode: RESOURCE_EXHAUSTED", printed(plan(program)))

  def test_fits_a_terminal_of_80_columns(self):
    out = io.StringIO()
    report.print_plan(plan(FITS, FAILS), Console(file=out, width=80))
    text = out.getvalue()
    self.assertNotIn("…", text)
    self.assertLessEqual(max(map(len, text.splitlines())), 80)
    # Nothing of a table's row is on another line.
    for cells in (r"train_step +2.00 .* 7.75 left", r"decode .* over"):
      self.assertRegex(text, cells)

  def test_the_bottleneck(self):
    whole = dataclasses.replace(WHOLE, generation_seconds=5.0)
    text = printed(plan(FITS, whole=whole))
    self.assertIn("Bottleneck: rollout; balanced at 2.50", text)
    self.assertIn("(now 1.00)", text)
    self.assertNotIn("Bottleneck", printed(plan(FITS)))

  def test_a_host_too_small(self):
    whole = dataclasses.replace(WHOLE, ring_bytes=200 * GIB)
    text = printed(plan(FITS, whole=whole))
    self.assertIn("hosts. does not fit", text)
    self.assertFalse(plan(FITS, whole=whole).fits)


class JsonTest(parameterized.TestCase):
  def test_what_fits(self):
    written = json.loads(json.dumps(report.to_json(plan(FITS))))
    self.assertTrue(written["fits"])
    [program] = written["programs"]
    self.assertEqual(program["total_bytes"], 8 * GIB)
    self.assertEqual(program["estimate"]["seconds"], 2.0)
    self.assertEqual(program["estimate"]["hidden"], 1.5)
    self.assertEqual(program["estimate"]["method"], "compiler")
    self.assertEqual(program["tokens_per_s"], 500)
    self.assertEqual(program["peak_share"], 0.5)
    self.assertEqual(program["kernel_share"], 0.1)
    self.assertEqual(
      program["cost"]["collectives"],
      [
        {
          "kind": "all-gather",
          "axes": "fsdp",
          "group_size": 4,
          "count": 36,
          "bytes": 5e9,
        }
      ],
    )

  def test_what_does_not(self):
    written = json.loads(json.dumps(report.to_json(plan(FITS, FAILS))))
    self.assertFalse(written["fits"])
    program = written["programs"][1]
    self.assertFalse(program["fits"])
    self.assertEqual(program["total_bytes"], 21.5 * GIB)
    self.assertIsNone(program["memory"])
    self.assertIsNone(program["cost"])
    self.assertIn("RESOURCE_EXHAUSTED", program["failure"])
    self.assertEqual(written["whole"]["bottleneck"], "")
