"""What a person sees of a run: files, TensorBoard, a live display, a picture.

Stages return metrics; only the loop writes them, through this module. Names
that the display and the learning curve know (all others are only written):

  evaluate/accuracy             of held-out answers, in [0, 1]; greedy unless
                                evaluate.temperature says otherwise, and the
                                mean of k to each prompt (avg@k)
  evaluate/pass@k               chance that one of k answers is right
  train/reward                  mean over the samples verified since last step
  train/accuracy                share of those samples that are right
  warm_start/loss               nats per token
  ring/mean_age                 versions, mean over the trajectories trained on
  wait/learner, wait/rollout    share of the wall time spent waiting, in [0, 1]
  speed/learner_tokens_per_s    tokens trained on
  speed/rollout_tokens_per_s    tokens sampled
  fate/...                      trajectories so far, by what became of them
"""

import collections
import dataclasses
import errno
import json
import math
import os
import pathlib
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import rich.console
import rich.live
import rich.panel
import rich.text
from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2, summary_pb2

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CURVE_FILE = "learning_curve.png"

_PASS_AT = "evaluate/pass@"  # And k.

# TensorBoard's buffer goes to disk this often; metrics.jsonl never waits.
_FLUSH_S = 10.0


def flatten(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
  """Means from the (sum, count) pairs that jitted steps return.

  Pairs add up over microbatches, minibatches and devices; this is the one
  place where they become means. All are fetched from the device at once.

  Args:
    pairs: For each name a scalar sum and a scalar count.

  Returns:
    sum / count for each name. A mean over nothing has no value: it is left
    out, so that no curve shows a made-up 0.
  """
  means = {}
  for name, (total, count) in jax.device_get(dict(pairs)).items():
    if np.ndim(total) or np.ndim(count):
      raise ValueError(f"{name} is not a pair of scalars")
    if count != 0:
      means[name] = float(total) / float(count)
  return means


class _Rate:
  """A total per second over the last ``window_s`` seconds."""

  def __init__(
    self,
    *,
    window_s: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._window_s = window_s
    self._clock = clock
    self._started = clock()
    self._events: collections.deque[tuple[float, float]] = collections.deque()

  def add(self, amount: float) -> None:
    now = self._clock()
    self._events.append((now, amount))
    self._forget(now)

  def per_second(self) -> float:
    """0 before any time has passed."""
    now = self._clock()
    self._forget(now)
    elapsed = min(now - self._started, self._window_s)
    if elapsed <= 0:
      return 0.0
    return sum(amount for _, amount in self._events) / elapsed

  def _forget(self, now: float) -> None:
    while self._events and self._events[0][0] <= now - self._window_s:
      self._events.popleft()


class MetricsWriter:
  """Writes a run's metrics below its folder.

  ``metrics.jsonl`` has one JSON object a line: ``step``, ``time`` (seconds
  since 1970) and the metrics. A line is with the operating system when
  ``write`` returns, so a killed process loses none. JSON has no NaN and no
  infinity: they are written as the texts "nan", "inf" and "-inf", which
  ``float()`` reads back. ``tensorboard/`` has the same scalars as event files.

  A folder that has metrics already is continued.
  """

  def __init__(
    self, workdir: str | os.PathLike[str], *, last_step: float = math.inf
  ):
    """Opens the files.

    Args:
      workdir: The run's folder, created if absent.
      last_step: The step that the run goes on after: what was written of later
        ones is dropped.
    """
    self._workdir = pathlib.Path(workdir)
    self._workdir.mkdir(parents=True, exist_ok=True)
    path = self._workdir / METRICS_FILE
    for name in (METRICS_FILE, SAMPLES_FILE):
      _drop_after(self._workdir / name, last_step)
    # Unbuffered: each line is one write to the operating system.
    self._lines = open(path, "ab", buffering=0)  # noqa: SIM115
    folder = self._workdir / "tensorboard"
    folder.mkdir(exist_ok=True)
    # Written from this thread: tensorboardX's own writer thread, once dead of
    # a full disk, would leave the loop waiting on its queue for ever.
    self._events = event_file_writer.EventsWriter(
      str(folder / "events"), filename_suffix=f".{time.time_ns()}"
    )
    if 0 <= last_step < math.inf:
      # TensorBoard then forgets what it read of later steps.
      self._events.write_event(
        event_pb2.Event(
          step=int(last_step) + 1,
          wall_time=time.time(),
          session_log=event_pb2.SessionLog(
            status=event_pb2.SessionLog.SessionStatus.Value("START")
          ),
        )
      )
    self._next_flush = 0.0

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Appends the metrics of one step.

    Args:
      step: Learner steps taken.
      metrics: Numbers, or scalar arrays. May be called several times a step,
        with different names.

    Raises:
      OSError: The disk does not take them. The files are as they were, or
        have the whole line.
    """
    values = {}
    for name, value in metrics.items():
      if name in ("step", "time"):
        raise ValueError(f"{name!r} is not free to name a metric")
      if np.ndim(value):
        raise ValueError(f"{name} is not a scalar")
      values[name] = float(value)
    now = time.time()
    row = {"step": int(step), "time": round(now, 3), **values}
    self._append(json.dumps(_json(row), allow_nan=False).encode() + b"\n")
    self._events.write_event(
      event_pb2.Event(
        step=int(step),
        wall_time=now,
        summary=summary_pb2.Summary(
          value=[
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
          ]
        ),
      )
    )
    # Not by the wall clock, which may be set back.
    if time.monotonic() >= self._next_flush:
      self._events.flush()
      self._next_flush = time.monotonic() + _FLUSH_S

  def _append(self, line: bytes) -> None:
    """A whole line or, on a disk that is full, none of it."""
    end = self._lines.tell()
    try:
      written = self._lines.write(line)
      if written != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), METRICS_FILE)
    except OSError:
      self._lines.truncate(end)
      self._lines.seek(end)
      raise

  def write_samples(
    self, step: int, samples: Iterable[Mapping[str, Any]]
  ) -> None:
    """Appends answers for people to read to ``samples.jsonl``.

    Args:
      step: Learner steps taken.
      samples: Plain JSON data, such as prompt, response and reward.
    """
    lines = [
      json.dumps(_json({"step": step, **sample}), allow_nan=False) + "\n"
      for sample in samples
    ]
    with open(self._workdir / SAMPLES_FILE, "a", encoding="utf-8") as file:
      file.writelines(lines)

  def write_json(self, name: str, data: Any) -> None:
    """Writes ``data`` as the file ``name``, whole or not at all.

    Args:
      name: A file's name, such as "config.json".
      data: Plain JSON data; numpy and infinite numbers are converted.
    """
    if name in ("", "..") or pathlib.Path(name).name != name:
      raise ValueError(f"{name!r} is not the plain name of a file")
    text = json.dumps(_json(data), indent=2, allow_nan=False) + "\n"
    handle, temporary = tempfile.mkstemp(dir=self._workdir, prefix=f".{name}.")
    try:
      with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
      os.chmod(temporary, 0o644)  # mkstemp's are private.
      os.replace(temporary, self._workdir / name)
    except BaseException:
      os.unlink(temporary)
      raise

  def close(self) -> None:
    """Flushes and closes; more than once is harmless."""
    if not self._lines.closed:
      self._lines.close()
      self._events.close()

  def __enter__(self) -> "MetricsWriter":
    return self

  def __exit__(self, *_) -> None:
    self.close()


def _json(data: Any) -> Any:
  """``data`` as JSON can hold it."""
  if isinstance(data, Mapping):
    return {str(key): _json(value) for key, value in data.items()}
  if isinstance(data, (np.ndarray, np.generic)):
    return _json(data.tolist())
  if isinstance(data, (list, tuple)):
    return [_json(value) for value in data]
  if isinstance(data, float) and not math.isfinite(data):
    return str(data)
  return data


def _drop_after(path: pathlib.Path, last: float) -> None:
  """Cuts the lines of steps after ``last``, and what is no line.

  A process that was killed while writing leaves half a line at the end.
  """
  if not path.exists():
    return
  kept = []
  for line in path.read_bytes().split(b"\n"):
    try:
      if json.loads(line)["step"] <= last:
        kept.append(line + b"\n")
    except (ValueError, KeyError, TypeError):
      continue
  temporary = path.with_name(f".{path.name}")
  temporary.write_bytes(b"".join(kept))
  temporary.replace(path)


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, float]]:
  """The rows of ``metrics.jsonl``, one per step, in the order of steps.

  Rows of one step are merged. A run that was resumed at an earlier step
  writes the steps after it again: those of the interrupted run are dropped.
  An unfinished last line is ignored.

  Raises:
    ValueError: At a line that is no row, with its number.
  """
  rows: list[dict[str, float]] = []
  content = (pathlib.Path(workdir) / METRICS_FILE).read_text()
  for number, line in enumerate(content.split("\n")[:-1], start=1):
    try:
      row = {name: float(value) for name, value in json.loads(line).items()}
      step = row["step"] = int(row["step"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
      raise ValueError(
        f"{METRICS_FILE}, line {number} is not a row of metrics: {line[:60]!r}"
      ) from error
    while rows and rows[-1]["step"] > step:
      rows.pop()
    if rows and rows[-1]["step"] == step:
      rows[-1].update(row)
    else:
      rows.append(row)
  return rows


def save_learning_curve(
  workdir: str | os.PathLike[str],
) -> pathlib.Path | None:
  """Draws accuracy and reward, age and waiting, against learner steps.

  Returns:
    The picture, ``learning_curve.png`` in ``workdir``; None where the run
    wrote nothing to draw.
  """
  rows = read_metrics(workdir)

  def series(name: str) -> tuple[list[float], list[float]]:
    points = [
      (row["step"], row[name])
      for row in rows
      if math.isfinite(row.get(name, math.nan))
    ]
    return [step for step, _ in points], [value for _, value in points]

  drawn = ("evaluate/accuracy", "train/accuracy", "train/reward")
  drawn += ("ring/mean_age", "wait/learner", "wait/rollout")
  if not any(series(name)[0] for name in drawn):
    return None

  # Takes 0.3 s to import, and no pyplot: it would look for a display.
  from matplotlib.backends import backend_agg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(8, 6), layout="constrained")
  backend_agg.FigureCanvasAgg(figure)
  top, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
  waits = below.twinx()
  for name, label, color, axes, scale in (
    ("train/reward", "reward, samples", "tab:orange", top, 1),
    ("train/accuracy", "accuracy, samples", "tab:blue", top, 1),
    ("ring/mean_age", "mean age", "tab:gray", below, 1),
    ("wait/learner", "learner waits", "tab:cyan", waits, 100),
    ("wait/rollout", "rollout waits", "tab:purple", waits, 100),
  ):
    steps, values = series(name)
    if steps:
      values = [scale * value for value in values]
      axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
      axes.plot(steps, _running_mean(values), color=color, label=label)
  steps, values = series("evaluate/accuracy")
  if steps:
    top.plot(steps, values, "o-", color="tab:green", label="accuracy, held out")
  k = _greatest_k(name for row in rows for name in row)
  if k:
    steps, values = series(f"{_PASS_AT}{k}")
    label = f"pass@{k}, held out"
    top.plot(steps, values, "o--", color="tab:olive", label=label)
  top.set_ylabel("accuracy, reward")
  below.set_ylabel("age, versions")
  below.set_xlabel("learner step")
  below.set_ylim(bottom=0)
  waits.set_ylabel("waiting, %")
  waits.set_ylim(0, 100)
  for axes, others in ((top, ()), (below, (waits,))):
    axes.grid(alpha=0.3)
    lines = [line for a in (axes, *others) for line in a.get_lines()]
    # matplotlib's own label of a line without one begins with "_".
    named = [line for line in lines if not line.get_label().startswith("_")]
    if named:
      axes.legend(
        handles=named,
        frameon=False,
        ncols=3,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
      )
  for axes in (top, below, waits):
    axes.spines["top"].set_visible(False)
  path = pathlib.Path(workdir) / CURVE_FILE
  figure.savefig(path, dpi=120)
  return path


def _greatest_k(names: Iterable[str]) -> int:
  """Of the metrics pass@k among ``names``; 0 where there are none."""
  return max(
    (int(n.removeprefix(_PASS_AT)) for n in names if n.startswith(_PASS_AT)),
    default=0,
  )


def _running_mean(values: Sequence[float]) -> list[float]:
  """Mean over the last twentieth of the run, up to each point."""
  window = max(len(values) // 20, 1)
  sums = np.cumsum([0.0, *values])
  ends = np.arange(1, len(values) + 1)
  starts = np.maximum(ends - window, 0)
  return list((sums[ends] - sums[starts]) / (ends - starts))


# The display.


class _Trend:
  """A curve of at most ``limit`` points, coarser the longer it gets."""

  def __init__(self, limit: int = 128):
    self._limit = limit
    self._stride = 1
    self._pending: list[float] = []
    self._points: list[float] = []

  def add(self, value: float) -> None:
    if not math.isfinite(value):
      return
    self._pending.append(value)
    if len(self._pending) < self._stride:
      return
    self._points.append(sum(self._pending) / len(self._pending))
    self._pending.clear()
    if len(self._points) == self._limit:
      pairs = zip(self._points[::2], self._points[1::2], strict=True)
      self._points = [(first + second) / 2 for first, second in pairs]
      self._stride *= 2

  def points(self) -> tuple[float, ...]:
    return tuple(self._points)


@dataclasses.dataclass(frozen=True)
class _Glyphs:
  """What bars and curves are drawn with."""

  full: str
  empty: str
  levels: str
  alarm: str
  dot: str


# No full block: bars on neighbouring rows would run into one another.
_UNICODE = _Glyphs("━", "─", "▁▂▃▄▅▆▇", "▲", "·")
_ASCII = _Glyphs("=", "-", "_.-~=+*", "!", "|")


@dataclasses.dataclass(frozen=True)
class _Stage:
  name: str
  total: int
  done: int
  elapsed_s: float
  per_second: float

  @property
  def left_s(self) -> float | None:
    if self.per_second <= 0:
      return None
    return max(self.total - self.done, 0) / self.per_second


@dataclasses.dataclass(frozen=True)
class _Snapshot:
  """What one refresh shows, copied so that drawing it needs no lock."""

  stage: _Stage | None
  values: dict[str, float]
  accuracy: tuple[float, ...]  # Before the first step, latest, best; or ().
  accuracy_trend: tuple[float, ...]
  reward_trend: tuple[float, ...]
  ring: tuple[tuple[int, int, int], ...]
  alarms: tuple[tuple[str, int], ...]

  def __rich_console__(self, console, options):
    yield _panel(self, options.max_width, ascii_only=options.ascii_only)


class Progress:
  """Shows how a run goes; use it as a context manager.

  On a terminal it is a panel that rich redraws four times a second on its own
  thread; anywhere else (a log, CI) a plain line about every ``every_s``
  seconds and at each change of stage. Calls only note what they are told (some
  microseconds), and may come from any thread.
  """

  def __init__(
    self,
    *,
    console: rich.console.Console | None = None,
    every_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts nothing yet.

    Args:
      console: Standard output by default.
      every_s: Seconds between plain lines.
      clock: Seconds that only ever grow.
    """
    self._console = console or rich.console.Console()
    self._every_s = every_s
    self._clock = clock
    self._lock = threading.Lock()
    self._started = clock()
    self._next_line = 0.0
    self._stage: tuple[str, int] | None = None  # Its name and total.
    self._stage_started = 0.0
    self._done = 0
    self._rate = _Rate(clock=clock)
    self._values: dict[str, float] = {}
    self._accuracy: tuple[float, ...] = ()
    self._accuracy_trend = _Trend()
    self._reward_trend = _Trend()
    self._ring: tuple[tuple[int, int, int], ...] = ()
    self._alarms: dict[str, tuple[str, int]] = {}
    self._reader_left = False
    self._live: rich.live.Live | None = None
    if (
      self._console.is_terminal
      and not self._console.is_dumb_terminal
      and not self._console.is_jupyter
    ):
      self._live = rich.live.Live(
        console=self._console,
        refresh_per_second=4,
        get_renderable=self._snapshot,
      )

  def __enter__(self) -> "Progress":
    if self._live:
      self._live.start()
    return self

  def __exit__(self, *_) -> None:
    self._close_stage()
    if self._live:
      self._live.stop()
    elif self._values:
      self._print(_plain_line(self._snapshot(), self._seconds()))

  def stage(self, name: str, total: int, *, done: int = 0) -> None:
    """Begins a stage of ``total`` steps, which ends the one before.

    Args:
      name: What people read.
      total: Steps.
      done: Those taken before, by a run that goes on.
    """
    self._close_stage()
    now = self._clock()
    with self._lock:
      self._stage = (_one_line(name), total)
      self._stage_started = now
      self._done = done
      self._rate = _Rate(clock=self._clock)
      self._next_line = now + self._every_s
    if not self._live:
      self._print(f"[{self._seconds()}] {_one_line(name)}, {total} steps")

  def advance(self, n: int = 1, **values: float) -> None:
    """Counts ``n`` more of the stage's steps; ``values`` as in ``update``."""
    with self._lock:
      self._done += n
      self._rate.add(n)
    self.update(values)

  def update(self, values: Mapping[str, float]) -> None:
    """Notes the latest metrics, by name; see the module for those shown."""
    with self._lock:
      for name, value in values.items():
        self._values[name] = float(value)
      if "evaluate/accuracy" in values:
        latest = self._values["evaluate/accuracy"]
        before, _, best = self._accuracy or (latest, latest, latest)
        self._accuracy = (before, latest, max(best, latest))
        self._accuracy_trend.add(latest)
      if "train/reward" in values:
        self._reward_trend.add(self._values["train/reward"])
    now = self._clock()
    if not self._live and self._stage and now >= self._next_line:
      self._next_line = now + self._every_s
      self._print(_plain_line(self._snapshot(), self._seconds()))

  def ring(self, slots: Iterable[tuple[int, int, int]]) -> None:
    """Notes the ring's slots: (version, age, number of trajectories) each."""
    with self._lock:
      self._ring = tuple(slots)

  def alarm(self, text: str) -> None:
    """Shows that something looks wrong.

    Alarms that differ in their numbers only count as one, of which the latest
    is shown; in a log the 1st, 10th, 100th, ... appear.
    """
    text = _one_line(text)
    kind = re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", text)
    with self._lock:
      _, count = self._alarms.pop(kind, ("", 0))
      self._alarms[kind] = (text, count + 1)  # The latest is last.
      if len(self._alarms) > 100:
        self._alarms.pop(next(iter(self._alarms)))
    if not self._live and re.fullmatch("10*", str(count + 1)):
      times = f" ({count + 1} times)" if count else ""
      self._print(f"[{self._seconds()}] alarm: {text}{times}")

  def message(self, text: str) -> None:
    """Prints a line that stays: above the panel, or in the log."""
    text = _one_line(text)
    self._print(text if self._live else f"[{self._seconds()}] {text}")

  def _close_stage(self) -> None:
    with self._lock:
      stage, self._stage = self._stage, None
      done = self._done
    if not stage:
      return
    name, total = stage
    seconds = self._clock() - self._stage_started
    if done < total:
      text = f"{name}: stopped at {done} of {total} steps"
    else:
      text = f"{name}: {done} steps"
    self.message(f"{text} after {_duration(seconds)}")

  def _seconds(self) -> str:
    return _duration(self._clock() - self._started)

  def _snapshot(self) -> _Snapshot:
    with self._lock:
      stage = None
      if self._stage:
        name, total = self._stage
        elapsed = self._clock() - self._stage_started
        rate = self._rate.per_second()
        stage = _Stage(name, total, self._done, elapsed, rate)
      return _Snapshot(
        stage=stage,
        values=dict(self._values),
        accuracy=self._accuracy,
        accuracy_trend=self._accuracy_trend.points(),
        reward_trend=self._reward_trend.points(),
        ring=self._ring,
        alarms=tuple(self._alarms.values()),
      )

  def _print(self, line: str) -> None:
    if self._live:
      # Plain text: no markup, so a path such as run[1] stays as it is.
      self._console.print(rich.text.Text(line), soft_wrap=True)
      return
    # rich would wrap at 80 columns; a log keeps its lines whole.
    encoding = getattr(self._console.file, "encoding", None) or "utf-8"
    line = line.encode(encoding, "backslashreplace").decode(encoding)
    if self._reader_left:
      return
    try:
      self._console.file.write(line + "\n")
      self._console.file.flush()
    except BrokenPipeError:
      # Whoever read the log has gone: no reason to end a run. Nothing more may
      # reach that pipe, or the interpreter would complain of it when it exits.
      self._reader_left = True
      os.dup2(os.open(os.devnull, os.O_WRONLY), self._console.file.fileno())


def _one_line(text: str) -> str:
  """``text`` without line breaks and control characters."""
  text = "".join(c if c.isprintable() else " " for c in text)
  return " ".join(text.split())


def _duration(seconds: float) -> str:
  """Such as 0:07, 12:34 or 1:02:03."""
  minutes, seconds = divmod(int(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02}:{seconds:02}"
  return f"{minutes}:{seconds:02}"


def _amount(value: float) -> str:
  """Three digits, such as 950, 12.3k or 4.56M."""
  if not math.isfinite(value):
    return str(value)
  for unit in ("", "k", "M", "G"):
    if abs(value) < 999.5 or unit == "G":
      break
    value /= 1000
  if not unit and value == int(value):
    return str(int(value))
  digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
  return f"{value:.{digits}f}{unit}"


def _percent(share: float) -> str:
  return f"{100 * share:.0f}%"


def _plain_line(shown: _Snapshot, seconds: str) -> str:
  """One line for a log, in ASCII but for the stage's name."""
  values = shown.values
  parts = []
  if shown.stage:
    stage = shown.stage
    part = f"{stage.name} {stage.done}/{stage.total}, "
    part += f"{_amount(stage.per_second)} steps/s"
    if stage.left_s is not None:
      part += f", {_duration(stage.left_s)} left"
    parts.append(part)
  if "warm_start/loss" in values and "train/reward" not in values:
    parts.append(f"loss {values['warm_start/loss']:.3f}")
  if shown.accuracy:
    before, latest, best = shown.accuracy
    parts.append(f"accuracy {before:.3f} -> {latest:.3f} (best {best:.3f})")
  if k := _greatest_k(values):
    parts.append(f"pass@{k} {values[f'{_PASS_AT}{k}']:.3f}")
  if "train/reward" in values:
    parts.append(f"reward {values['train/reward']:.3f}")
  for who in ("learner", "rollout"):
    facts = []
    if (speed := values.get(f"speed/{who}_tokens_per_s")) is not None:
      facts.append(f"{_amount(speed)} tokens/s")
    if (wait := values.get(f"wait/{who}")) is not None:
      facts.append(f"waits {_percent(wait)}")
    if facts:
      parts.append(f"{who} {', '.join(facts)}")
  if "ring/mean_age" in values:
    parts.append(f"age {values['ring/mean_age']:.2f}")
  return f"[{seconds}] " + " | ".join(parts)


_LABEL = 10  # Columns of the label before each row.
_TEXT = 44  # Columns of the text before a row's curve or bar.


def _panel(
  shown: _Snapshot, width: int, *, ascii_only: bool
) -> rich.panel.Panel:
  """The panel, ``width`` columns wide."""
  glyphs = _ASCII if ascii_only else _UNICODE
  inner = max(width - 4, 20)
  groups = (
    _stage_rows(shown, inner, glyphs),
    _learning_rows(shown, inner, glyphs),
    _speed_rows(shown, inner, glyphs),
    _ring_rows(shown, inner, glyphs),
    _alarm_rows(shown, glyphs),
  )
  rows: list[rich.text.Text] = []
  for group in groups:
    if rows and group:
      rows.append(rich.text.Text(""))
    rows += group
  return rich.panel.Panel(
    rich.console.Group(*rows) if rows else rich.text.Text("starting"),
    title=rich.text.Text("darl_jax", style="bold"),
    title_align="left",
    border_style="dim",
    width=width,
  )


def _row(label: str, *parts: tuple[str, str]) -> rich.text.Text:
  """A row of (text, style) parts after its label."""
  text = rich.text.Text(no_wrap=True, overflow="crop")
  text.append(f"{label:<{_LABEL}}", style="bold")
  for part, style in parts:
    text.append(part, style=style)
  return text


def _bar(
  share: float, width: int, style: str, glyphs: _Glyphs
) -> tuple[tuple[str, str], tuple[str, str]]:
  """A bar of which ``share`` is filled, as the parts of a row."""
  share = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
  filled = round(share * width)
  rest = glyphs.empty * (width - filled)
  return (glyphs.full * filled, style), (rest, "dim")


def _curve(points: Sequence[float], width: int, glyphs: _Glyphs) -> str:
  """The points as one line of text, at most ``width`` wide."""
  if len(points) < 2 or width < 2:
    return ""
  edges = np.linspace(0, len(points), min(width, len(points)) + 1).astype(int)
  means = [
    sum(points[a:b]) / (b - a)
    for a, b in zip(edges[:-1], edges[1:], strict=True)
  ]
  low, high = min(means), max(means)
  scale = (len(glyphs.levels) - 1) / (high - low) if high > low else 0.0
  return "".join(glyphs.levels[round((m - low) * scale)] for m in means)


def _stage_rows(
  shown: _Snapshot, inner: int, glyphs: _Glyphs
) -> list[rich.text.Text]:
  stage = shown.stage
  if not stage:
    return []
  name = f"{stage.name} "
  left = stage.left_s
  ending = (
    f"{_duration(stage.elapsed_s)} so far"
    if left is None
    else f"{_duration(left)} left"
  )
  counts = f" {stage.done}/{stage.total} steps"
  speed = f"  {_amount(stage.per_second)}/s"
  ending = f"  {ending}"
  room = inner - max(len(name), _LABEL) - len(counts + speed + ending)
  bar = ()
  if room >= 4:
    bar = _bar(stage.done / max(stage.total, 1), room, "green", glyphs)
  return [
    _row(
      name,
      *bar,
      (counts, ""),
      (speed, "cyan"),
      (ending, "dim"),
    )
  ]


def _learning_rows(
  shown: _Snapshot, inner: int, glyphs: _Glyphs
) -> list[rich.text.Text]:
  values = shown.values
  room = min(inner - _LABEL - _TEXT, 56)
  rows = []
  if "warm_start/loss" in values and "train/reward" not in values:
    loss = f"{values['warm_start/loss']:.3f} nats per token"
    rows.append(_row("loss", (loss, "")))
  if shown.accuracy:
    before, latest, best = shown.accuracy
    now = f"{latest:.3f} now"
    rest = f"   {before:.3f} before   {best:.3f} best"
    rows.append(
      _row(
        "accuracy",
        (now, "bold green"),
        (f"{rest:<{_TEXT - len(now)}}", ""),
        (_curve(shown.accuracy_trend, room, glyphs), "green"),
      )
    )
  if k := _greatest_k(values):
    text = f"{values[f'{_PASS_AT}{k}']:.3f} now   k = {k}"
    rows.append(_row("pass@k", (text, "")))
  if "train/reward" in values:
    text = f"{values['train/reward']:.3f} mean"
    if "train/accuracy" in values:
      text += f"  {values['train/accuracy']:.3f} right"
    rows.append(
      _row(
        "reward",
        (f"{text:<{_TEXT}}", ""),
        (_curve(shown.reward_trend, room, glyphs), "yellow"),
      )
    )
  return rows


def _speed_rows(
  shown: _Snapshot, inner: int, glyphs: _Glyphs
) -> list[rich.text.Text]:
  rows = []
  room = min(inner - _LABEL - _TEXT, 20)
  for who, whom, color in (
    ("learner", "samples", "cyan"),
    ("rollout", "the learner", "magenta"),
  ):
    speed = shown.values.get(f"speed/{who}_tokens_per_s")
    wait = shown.values.get(f"wait/{who}")
    if speed is None and wait is None:
      continue
    text = "" if speed is None else f"{_amount(speed)} tokens/s"
    bar = ()
    if wait is not None:
      text = f"{text:<16}waits {_percent(wait):>4} for {whom}"
      bar = _bar(wait, room, color, glyphs)
    rows.append(_row(who, (f"{text:<{_TEXT}}", ""), *bar))
  return rows


def _ring_rows(
  shown: _Snapshot, inner: int, glyphs: _Glyphs
) -> list[rich.text.Text]:
  rows = []
  # One cell for each slot: version, age, a bar, the number of trajectories.
  columns = [[f"{v}", f"{age}", _amount(n)] for v, age, n in shown.ring]
  if columns:
    wide = [max(len(cell) for cell in c) for c in zip(*columns, strict=True)]
    most = max(n for _, _, n in shown.ring)
    oldest = max(age for _, age, _ in shown.ring)
    each = 2 + wide[0] + 5 + wide[1] + 1 + 8 + 1 + wide[2] + 2
    per_row = max((inner - _LABEL + 3) // each, 1)
    cells = []
    for (_, age, n), (version, age_text, count) in zip(
      shown.ring, columns, strict=True
    ):
      color = "green" if age * 2 <= oldest or oldest < 2 else "yellow"
      cells.append(
        (
          (f"v{version:<{wide[0]}}", ""),
          (f" age {age_text:<{wide[1]}} ", "dim"),
          *_bar(n / max(most, 1), 8, color, glyphs),
          (f" {count:<{wide[2]}}   ", ""),
        )
      )
    for start in range(0, len(cells), per_row):
      parts = [part for cell in cells[start : start + per_row] for part in cell]
      rows.append(_row("" if start else "ring", *parts))
  facts = [
    f"{name.removeprefix('fate/').replace('_', ' ')} {_amount(value)}"
    for name, value in shown.values.items()
    if name.startswith("fate/")
  ]
  if "ring/mean_age" in shown.values:
    facts.insert(0, f"mean age {shown.values['ring/mean_age']:.2f}")
  line = ""
  lines = []
  for fact in facts:
    joined = f"{line} {glyphs.dot} {fact}" if line else fact
    if line and len(joined) > inner - _LABEL:
      lines.append(line)
      joined = fact
    line = joined
  lines += [line] if line else []
  rows += [
    _row("" if i else "samples", (text, "")) for i, text in enumerate(lines)
  ]
  return rows


def _alarm_rows(shown: _Snapshot, glyphs: _Glyphs) -> list[rich.text.Text]:
  rows = []
  for text, count in shown.alarms[-3:]:
    times = f"{count}x " if count > 1 else ""
    label = "alarm" if not rows else ""
    rows.append(_row(label, (f"{glyphs.alarm} {times}{text}", "bold red")))
  return rows
