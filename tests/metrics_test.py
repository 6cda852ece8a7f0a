import io
import json
import math
import os
import pathlib
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from absl.testing import parameterized
from matplotlib import image
from tensorboardX.proto import event_pb2

from darl_jax import metrics

ROOT = pathlib.Path(__file__).resolve().parent.parent


class FakeClock:
  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


def scalars(workdir):
  """(step, name) -> value over all event files, in TensorBoard's format."""
  found = {}
  for path in sorted((workdir / "tensorboard").iterdir()):
    data = path.read_bytes()
    while data:
      (length,) = struct.unpack("<Q", data[:8])
      event = event_pb2.Event.FromString(data[12 : 12 + length])
      for value in event.summary.value:
        found[event.step, value.tag] = value.simple_value
      data = data[16 + length :]
  return found


class FlattenTest(parameterized.TestCase):
  def test_means_of_pairs_from_a_jitted_step(self):
    @jax.jit
    def step(x, mask):
      return {
        "loss": (jnp.sum(x * mask), jnp.sum(mask)),
        "nothing": (jnp.float32(0), jnp.float32(0)),
        "tokens": (jnp.sum(mask), 1),
      }

    pairs = step(jnp.array([1.0, 4.0, 9.0]), jnp.array([1.0, 1.0, 0.0]))
    means = metrics.flatten(pairs)
    self.assertEqual(means, {"loss": 2.5, "tokens": 2.0})
    self.assertIs(type(means["loss"]), float)

  def test_pairs_add_up(self):
    # The mean over unequal microbatches, and not the mean of their means.
    parts = [{"x": (6.0, 3.0)}, {"x": (10.0, 1.0)}]
    total = jax.tree.map(lambda *values: sum(values), *parts)
    self.assertEqual(metrics.flatten(total), {"x": 4.0})

  def test_a_nan_is_shown(self):
    means = metrics.flatten({"x": (math.nan, 2.0), "y": (1.0, math.nan)})
    self.assertTrue(math.isnan(means["x"]))
    self.assertTrue(math.isnan(means["y"]))

  def test_refuses_arrays(self):
    with self.assertRaisesRegex(ValueError, "ratio is not a pair of scalars"):
      metrics.flatten({"ratio": (np.ones(3), np.ones(3))})


class RateTest(parameterized.TestCase):
  def test_over_a_window(self):
    clock = FakeClock()
    rate = metrics._Rate(window_s=10.0, clock=clock)
    self.assertEqual(rate.per_second(), 0.0)
    clock.now += 2.0
    rate.add(100)
    self.assertEqual(rate.per_second(), 50.0)  # Since it began.
    clock.now += 8.0
    rate.add(300)
    self.assertEqual(rate.per_second(), 40.0)
    clock.now += 4.0  # The first 100 are 12 seconds ago.
    self.assertEqual(rate.per_second(), 30.0)
    clock.now += 10.0
    self.assertEqual(rate.per_second(), 0.0)


class MetricsWriterTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.workdir = tmp_path / "runs" / "new"

  def _rows(self):
    text = (self.workdir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]

  def test_lines(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write(0, {"evaluate/accuracy": 0.25})
      writer.write(
        np.int32(3), {"a": np.float32(1.5), "b": jnp.float32(2), "c": True}
      )
    first, second = self._rows()
    self.assertEqual(first["step"], 0)
    self.assertEqual(first["evaluate/accuracy"], 0.25)
    self.assertAlmostEqual(first["time"], time.time(), delta=60)
    del second["time"]
    self.assertEqual(second, {"step": 3, "a": 1.5, "b": 2.0, "c": 1.0})

  def test_values_that_json_lacks(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(name):
      raise AssertionError(f"{name} is not JSON")

    text = (self.workdir / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=refuse)
    self.assertEqual((row["a"], row["b"], row["c"]), ("nan", "inf", "-inf"))
    (read,) = metrics.read_metrics(self.workdir)
    self.assertTrue(math.isnan(read["a"]))
    self.assertEqual((read["b"], read["c"]), (math.inf, -math.inf))

  @parameterized.parameters("step", "time")
  def test_refuses_reserved_names(self, name):
    writer = metrics.MetricsWriter(self.workdir)
    with writer, self.assertRaisesRegex(ValueError, name):
      writer.write(1, {name: 1.0})
    self.assertEqual(self._rows(), [])

  def test_refuses_arrays_and_writes_no_half_row(self):
    writer = metrics.MetricsWriter(self.workdir)
    with writer, self.assertRaisesRegex(ValueError, "bad is not a scalar"):
      writer.write(1, {"good": 1.0, "bad": np.ones(2)})
    self.assertEqual(self._rows(), [])

  def test_tensorboard(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write(1, {"train/reward": 0.25, "wait/learner": 0.5})
      writer.write(2, {"train/reward": 0.75})
    # Two writers in one second do not share a file.
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write(3, {"train/reward": 1.0})
    self.assertEqual(
      scalars(self.workdir),
      {
        (1, "train/reward"): 0.25,
        (1, "wait/learner"): 0.5,
        (2, "train/reward"): 0.75,
        (3, "train/reward"): 1.0,
      },
    )

  def test_a_killed_process_loses_no_line(self):
    script = """
      import os, signal, sys
      from darl_jax import metrics
      writer = metrics.MetricsWriter(sys.argv[1])
      for step in range(5):
        writer.write(step, {"x": step})
      os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
      [sys.executable, "-c", textwrap.dedent(script), str(self.workdir)],
      cwd=ROOT,
    )
    self.assertEqual(done.returncode, -signal.SIGKILL)
    self.assertEqual([row["x"] for row in self._rows()], [0, 1, 2, 3, 4])

  def test_continues_after_an_unfinished_line(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write(1, {"x": 1.0})
    with open(self.workdir / "metrics.jsonl", "a") as file:
      file.write('{"step": 2, "x"')
    self.assertLen(metrics.read_metrics(self.workdir), 1)
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write(2, {"x": 2.0})
    self.assertEqual([row["x"] for row in self._rows()], [1.0, 2.0])

  def test_close_twice(self):
    writer = metrics.MetricsWriter(self.workdir)
    writer.close()
    writer.close()
    with self.assertRaises(ValueError):
      writer.write(1, {"x": 1.0})

  def test_write_json(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write_json("summary.json", {"old": 1})
      writer.write_json(
        "summary.json",
        {
          "inf": math.inf,
          "array": np.arange(3),
          "scalar": np.float32(0.5),
          "nested": [{"nan": np.float64("nan")}, (1, None, True, "text")],
        },
      )
    self.assertEqual(
      json.loads((self.workdir / "summary.json").read_text()),
      {
        "inf": "inf",
        "array": [0, 1, 2],
        "scalar": 0.5,
        "nested": [{"nan": "nan"}, [1, None, True, "text"]],
      },
    )

  def test_write_json_is_whole_or_not_at_all(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write_json("summary.json", {"old": 1})
      before = {path.name for path in self.workdir.iterdir()}
      with self.assertRaises(TypeError):
        writer.write_json("summary.json", {"new": object()})
      with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics.os, "fsync", self._full_disk)
        with self.assertRaises(OSError):
          writer.write_json("summary.json", {"new": 1})
    text = (self.workdir / "summary.json").read_text()
    self.assertEqual(json.loads(text), {"old": 1})
    self.assertEqual({path.name for path in self.workdir.iterdir()}, before)

  def _full_disk(self, _):
    raise OSError("No space left on device")

  @parameterized.parameters("../x.json", "a/b.json", "", "..")
  def test_write_json_refuses_paths(self, name):
    writer = metrics.MetricsWriter(self.workdir)
    with writer, self.assertRaisesRegex(ValueError, "plain name"):
      writer.write_json(name, {})


class ReadMetricsTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.workdir = tmp_path

  def test_merges_rows_of_a_step_and_forgets_what_was_done_again(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      for step in (1, 2, 3, 4):
        writer.write(step, {"x": step})
      writer.write(4, {"y": 40})
      # Resumed from the state after step 2.
      writer.write(3, {"x": -3})
      writer.write(3, {"y": 30})
    rows = metrics.read_metrics(self.workdir)
    for row in rows:
      del row["time"]
    self.assertEqual(
      rows,
      [{"step": 1, "x": 1}, {"step": 2, "x": 2}, {"step": 3, "x": -3, "y": 30}],
    )

  @parameterized.parameters("{", "[1]", '{"x": 1}', '{"step": 1, "x": [2]}')
  def test_names_a_broken_line(self, line):
    (self.workdir / "metrics.jsonl").write_text(f'{{"step": 0}}\n{line}\n')
    with self.assertRaisesRegex(ValueError, "line 2 is not a row"):
      metrics.read_metrics(self.workdir)


class LearningCurveTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.workdir = tmp_path

  def _shows(self, color):
    pixels = image.imread(self.workdir / "learning_curve.png")[..., :3]
    return bool(np.any(np.all(np.round(pixels * 255) == color, axis=-1)))

  def test_draws_what_there_is(self):
    green, orange = (44, 160, 44), (255, 127, 14)
    with metrics.MetricsWriter(self.workdir) as writer:
      writer.write(0, {"evaluate/accuracy": 0.3})
      writer.write(50, {"evaluate/accuracy": 0.5, "train/reward": math.nan})
      path = metrics.save_learning_curve(self.workdir)
      self.assertEqual(path, self.workdir / "learning_curve.png")
      self.assertTrue(self._shows(green))
      self.assertFalse(self._shows(orange))
      for step in range(51, 90):
        writer.write(step, {"train/reward": 0.5, "wait/learner": 0.25})
    metrics.save_learning_curve(self.workdir)
    self.assertTrue(self._shows(green))
    self.assertTrue(self._shows(orange))

  def test_draws_pass_at_the_greatest_k(self):
    olive = (188, 189, 34)
    with metrics.MetricsWriter(self.workdir) as writer:
      for step in (0, 50):
        writer.write(step, {"evaluate/accuracy": 0.3})
      metrics.save_learning_curve(self.workdir)
      self.assertFalse(self._shows(olive))
      for step in (100, 150):
        writer.write(
          step, {"evaluate/pass@8": math.nan, "evaluate/pass@16": 0.7}
        )
    metrics.save_learning_curve(self.workdir)
    self.assertTrue(self._shows(olive))

  def test_nothing_to_draw(self):
    with metrics.MetricsWriter(self.workdir) as writer:
      self.assertIsNone(metrics.save_learning_curve(self.workdir))
      writer.write(1, {"something/else": 1.0, "train/reward": math.nan})
    self.assertIsNone(metrics.save_learning_curve(self.workdir))
    self.assertEmpty(list(self.workdir.glob("*.png")))

  def test_running_mean(self):
    values = [0.0] * 20 + [1.0] * 20  # Window of 2.
    smooth = metrics._running_mean(values)
    self.assertEqual(smooth[:20], [0.0] * 20)
    self.assertEqual(smooth[20:22], [0.5, 1.0])
    self.assertEqual(metrics._running_mean([3.0, 5.0]), [3.0, 5.0])


def told(progress):
  """Tells a display all that it can show."""
  progress.stage("train", 400)
  progress.update({"evaluate/accuracy": 0.3})
  for step in range(100):
    progress.advance(
      1,
      **{
        "train/reward": 0.3 + step / 1000,
        "train/accuracy": 0.25,
        "ring/mean_age": 1.34,
        "wait/learner": 0.125,
        "wait/rollout": 0.63,
        "speed/learner_tokens_per_s": 12_345.0,
        "speed/rollout_tokens_per_s": 987.0,
        "fate/trained": 384.0 * step,
        "fate/in_the_ring": 512.0,
      },
    )
  progress.update({"evaluate/accuracy": 0.55})
  progress.update({"evaluate/accuracy": 0.5})
  progress.ring([(97, 3, 96), (98, 2, 120), (99, 1, 256), (100, 0, 0)])
  for ratio in (1.51, 1.62, 1.73):
    progress.alarm(f"kept and pool differ in length by {ratio}")
  progress.alarm("a verifier died")


class PlainProgressTest(parameterized.TestCase):
  """Where no terminal is: a log."""

  def setUp(self):
    super().setUp()
    self.file = io.StringIO()
    self.clock = FakeClock()

  def _progress(self, **kwargs):
    console = rich.console.Console(file=self.file, force_terminal=False)
    return metrics.Progress(console=console, clock=self.clock, **kwargs)

  def _lines(self):
    return self.file.getvalue().splitlines()

  def test_a_line_every_few_seconds_and_at_each_stage(self):
    with self._progress(every_s=5.0) as progress:
      progress.stage("warm start", 20)
      self.assertEqual(self._lines(), ["[0:00] warm start, 20 steps"])
      for _ in range(20):  # A second each.
        self.clock.now += 1.0
        progress.advance(1, **{"warm_start/loss": 0.5})
      self.assertEqual(
        self._lines()[1:],
        [
          "[0:05] warm start 5/20, 1 steps/s, 0:15 left | loss 0.500",
          "[0:10] warm start 10/20, 1 steps/s, 0:10 left | loss 0.500",
          "[0:15] warm start 15/20, 1 steps/s, 0:05 left | loss 0.500",
          "[0:20] warm start 20/20, 1 steps/s, 0:00 left | loss 0.500",
        ],
      )
      progress.stage("train", 512)
      self.assertEqual(
        self._lines()[5:],
        [
          "[0:20] warm start: 20 steps after 0:20",
          "[0:20] train, 512 steps",
        ],
      )

  def test_shows_everything_on_one_line_of_ascii(self):
    with self._progress(every_s=5.0) as progress:
      self.clock.now += 3600.0
      told(progress)
      self.clock.now += 5.0
      progress.update({})
    line = next(line for line in self._lines() if "100/400" in line)
    self.assertEqual(
      line,
      "[1:00:05] train 100/400, 20 steps/s, 0:15 left"
      " | accuracy 0.300 -> 0.500 (best 0.550) | reward 0.399"
      " | learner 12.3k tokens/s, waits 12%"
      " | rollout 987 tokens/s, waits 63% | age 1.34",
    )
    self.assertTrue(self.file.getvalue().isascii())
    # The last words, after a run that did not finish.
    self.assertIn("train: stopped at 100 of 400 steps", self._lines()[-2])
    self.assertIn("accuracy 0.300 -> 0.500", self._lines()[-1])

  def test_pass_at_the_greatest_k(self):
    with self._progress(every_s=5.0) as progress:
      progress.stage("train", 10)
      self.clock.now += 5.0
      progress.update(
        {
          "evaluate/accuracy": 0.5,
          "evaluate/pass@2": 0.6,
          "evaluate/pass@16": 0.9,
          "evaluate/pass@8": 0.8,
        }
      )
    self.assertIn("(best 0.500) | pass@16 0.900", self._lines()[1])

  def test_alarms_are_counted_not_repeated(self):
    with self._progress() as progress:
      for i in range(250):
        progress.alarm(f"parity is off by {i / 7:.3f} at step {i}")
      progress.alarm("another")
    self.assertEqual(
      self._lines(),
      [
        "[0:00] alarm: parity is off by 0.000 at step 0",
        "[0:00] alarm: parity is off by 1.286 at step 9 (10 times)",
        "[0:00] alarm: parity is off by 14.143 at step 99 (100 times)",
        "[0:00] alarm: another",
      ],
    )

  def test_kinds_of_alarms_are_bounded(self):
    progress = self._progress()
    for i in range(1000):
      letters = "".join(chr(97 + int(digit)) for digit in str(i))
      progress.alarm(f"kind {letters}")
    self.assertLen(progress._alarms, 100)

  def test_text_of_others_stays_one_printable_line(self):
    with self._progress() as progress:
      progress.message("a\nb \x1b[31m[red]c[/red]" + " long" * 100)
    (line,) = self._lines()
    self.assertStartsWith(line, "[0:00] a b [31m[red]c[/red] long")
    self.assertEndsWith(line, "long")

  def test_an_ascii_log_takes_any_text(self):
    raw = io.BytesIO()
    self.file = io.TextIOWrapper(raw, encoding="ascii")
    with self._progress() as progress:
      progress.alarm("π differs from µ")
    self.assertIn(b"\\u03c0 differs", raw.getvalue())

  def test_goes_on_when_nobody_reads_the_log(self):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
      console = rich.console.Console(file=file, force_terminal=False)
      with metrics.Progress(console=console, clock=self.clock) as progress:
        # Two: the first finds out, and the second must not try again.
        progress.message("into the void")
        progress.message("and again")
      # What is flushed at exit goes nowhere, and complains of nothing.
      file.write("the last words")

  def test_rate_forgets_the_first_step(self):
    with self._progress(every_s=1e9) as progress:
      progress.stage("train", 1000)
      self.clock.now += 60.0  # Compiling.
      for _ in range(60):
        self.clock.now += 1.0
        progress.advance()
      self.assertAlmostEqual(progress._snapshot().stage.per_second, 1.0)
      self.assertAlmostEqual(progress._snapshot().stage.left_s, 940.0)


class TerminalProgressTest(parameterized.TestCase):
  def _console(self, width=80, encoding="utf-8", **kwargs):
    raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    return rich.console.Console(
      file=raw,
      width=width,
      height=24,
      force_terminal=True,
      color_system=None,
      _environ={},
      **kwargs,
    )

  def _drawn(self, progress, console):
    """The panel's lines, as drawn."""
    with console.capture() as capture:
      console.print(progress._snapshot())
    return capture.get().splitlines()

  def test_picture(self):
    clock = FakeClock()
    console = self._console()
    progress = metrics.Progress(console=console, clock=clock)
    clock.now += 1.0
    told(progress)
    clock.now += 10.0
    self.assertEqual(
      self._drawn(progress, console),
      [
        "╭─ darl_jax " + "─" * 67 + "╮",
        "│ train     ━━━━━━━━━────────────────────────── "
        "100/400 steps  10/s  0:30 left │",
        "│" + " " * 78 + "│",
        "│ accuracy  0.500 now   0.300 before   0.550 best       ▁▇▆"
        + " " * 20
        + "│",
        "│ reward    0.399 mean  0.250 right                     "
        "▁▁▂▂▂▂▃▃▃▄▄▄▄▅▅▅▆▆▆▆▇▇ │",
        "│" + " " * 78 + "│",
        "│ learner   12.3k tokens/s  waits  12% for samples      "
        "━━──────────────────   │",
        "│ rollout   987 tokens/s    waits  63% for the learner  "
        "━━━━━━━━━━━━━───────   │",
        "│" + " " * 78 + "│",
        "│ ring      v97  age 3 ━━━───── 96    v98  age 2 ━━━━──── 120"
        + " " * 18
        + "│",
        "│           v99  age 1 ━━━━━━━━ 256   v100 age 0 ──────── 0"
        + " " * 20
        + "│",
        "│ samples   mean age 1.34 · trained 38.0k · in the ring 512"
        + " " * 20
        + "│",
        "│" + " " * 78 + "│",
        "│ alarm     ▲ 3x kept and pool differ in length by 1.73"
        + " " * 24
        + "│",
        "│           ▲ a verifier died" + " " * 50 + "│",
        "╰" + "─" * 78 + "╯",
      ],
    )

  def test_pass_at_the_greatest_k(self):
    console = self._console()
    progress = metrics.Progress(console=console)
    progress.update({"evaluate/pass@2": 0.6, "evaluate/pass@16": 0.9})
    row = "│ pass@k    0.900 now   k = 16" + " " * 49 + "│"
    self.assertIn(row, self._drawn(progress, console))

  @parameterized.product(
    width=(20, 40, 80, 120, 300), encoding=("utf-8", "ascii")
  )
  def test_fits_any_terminal(self, width, encoding):
    console = self._console(width, encoding)
    progress = metrics.Progress(console=console)
    told(progress)
    progress.update(
      {
        **{f"fate/reason_{i}": 10.0**i for i in range(12)},
        "wait/learner": math.nan,
        "wait/rollout": 7.0,
        "train/reward": math.inf,
        "speed/learner_tokens_per_s": math.nan,
      }
    )
    progress.alarm("π " * 200)
    for total in (400, 0):
      progress.stage("a stage", total)
      lines = self._drawn(progress, console)
      self.assertEqual({len(line) for line in lines}, {width}, lines)
      if encoding == "ascii":
        drawn = "".join(line for line in lines if "π" not in line)
        self.assertTrue(drawn.isascii(), drawn)

  def test_a_long_row_is_cut_not_wrapped(self):
    heights = set()
    for alarm in ("word", "word " * 100):
      console = self._console()
      progress = metrics.Progress(console=console)
      progress.alarm(alarm)
      heights.add(len(self._drawn(progress, console)))
    self.assertEqual(heights, {3})

  def test_refreshes_by_itself_and_stays_after_the_end(self):
    console = self._console()
    with metrics.Progress(console=console) as progress:
      told(progress)
      deadline = time.monotonic() + 10.0
      shown = b""
      while b"100/400" not in shown and time.monotonic() < deadline:
        time.sleep(0.05)
        console.file.flush()
        shown = console.file.buffer.getvalue()
      self.assertIn(b"100/400", shown)
      progress.message("saved [bold]run[1]")
      sys.stdout.write("printed by others\n")
    console.file.flush()
    text = console.file.buffer.getvalue().decode()
    self.assertIn("saved [bold]run[1]", text)
    self.assertIn("printed by others", text)
    self.assertIn("train: stopped at 100 of 400 steps", text)
    self.assertIn("0.550 best", text.split("stopped at")[1])
    self.assertEndsWith(text, "\x1b[?25h")  # The cursor is back.

  def test_the_terminal_is_back_after_an_error(self):
    console = self._console()
    progress = metrics.Progress(console=console)
    with self.assertRaisesRegex(RuntimeError, "learner"), progress:
      progress.stage("train", 10)
      raise RuntimeError("learner")
    console.file.flush()
    self.assertEndsWith(console.file.buffer.getvalue(), b"\x1b[?25h")
    self.assertFalse(progress._live.is_started)

  def test_dumb_terminals_get_a_log(self):
    console = rich.console.Console(
      file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"}
    )
    with metrics.Progress(console=console) as progress:
      progress.stage("train", 10)
    self.assertStartsWith(console.file.getvalue(), "[0:00] train, 10 steps\n")

  def test_drawing_while_others_write(self):
    progress = metrics.Progress(console=self._console())
    errors = []
    done = threading.Event()

    def draw():
      try:
        while not done.is_set():
          metrics._panel(progress._snapshot(), 80, ascii_only=False)
      except RuntimeError as error:
        errors.append(error)

    thread = threading.Thread(target=draw)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
      thread.start()
      for i in range(2000):
        progress.update({f"fate/{i}": 1.0})
      done.set()
      thread.join()
    finally:
      sys.setswitchinterval(interval)
    self.assertEqual(errors, [])

  def test_a_snapshot_is_a_copy(self):
    progress = metrics.Progress(console=self._console())
    told(progress)
    snapshot = progress._snapshot()
    progress.update({"fate/later": 1.0})
    self.assertNotIn("fate/later", snapshot.values)

  def test_costs_little(self):
    progress = metrics.Progress(console=self._console())
    told(progress)
    values = {f"metric/{i}": 1.0 for i in range(60)}

    def best(call, times):
      taken = []
      for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
      return min(taken)

    console = self._console(120)
    # Bounds are generous: about 0.01 ms and 2 ms on a quiet core.
    self.assertLess(best(lambda: progress.advance(1, **values), 50), 0.0005)
    self.assertLess(best(lambda: self._drawn(progress, console), 10), 0.02)


class TrendTest(parameterized.TestCase):
  def test_stays_short_and_keeps_its_shape(self):
    trend = metrics._Trend(limit=8)
    for i in range(64):
      trend.add(float(i))
    trend.add(math.nan)
    points = trend.points()
    self.assertBetween(len(points), 4, 8)
    gaps = {b - a for a, b in zip(points[:-1], points[1:], strict=True)}
    self.assertLen(gaps, 1)  # Still a straight line.
    self.assertLess(points[0], 8.0)


class TextTest(parameterized.TestCase):
  @parameterized.parameters(
    (0, "0"),
    (950, "950"),
    (999.6, "1.00k"),
    (12_345, "12.3k"),
    (9.996, "10.0"),
    (3.14159, "3.14"),
    (0.5, "0.50"),
    (1.2e6, "1.20M"),
    (5e12, "5000G"),
    (-1500, "-1.50k"),
    (math.nan, "nan"),
    (math.inf, "inf"),
  )
  def test_amount(self, value, text):
    self.assertEqual(metrics._amount(value), text)

  @parameterized.parameters(
    (0, "0:00"), (7.9, "0:07"), (61, "1:01"), (3723, "1:02:03")
  )
  def test_duration(self, seconds, text):
    self.assertEqual(metrics._duration(seconds), text)
