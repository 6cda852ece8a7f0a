"""Tables, plots and a verdict from the lab's rows: writes docs/lab.md.

  python bench/lab_report.py bench/lab_rows/*.jsonl [--docs=docs]

The numbers of a run:

  efficiency   generated samples to an accuracy held for three evaluations, by
               linear interpolation between evaluations; unreached is censored
  performance  mean held-out accuracy over the last tenth of the run
  collapse     a performance below half of the best evaluation before

Methods are compared seed by seed: ratios of samples by their geometric mean,
with t intervals over the paired logarithms, differences of performance by t
intervals over the paired differences, and p-values after Holm over all
comparisons of one table. Where a baseline is censored it counts as all that was
generated, which is in its favor; where D-ARL is, or half of the baseline's
seeds are, a table gives no ratio. The verdict goes by that bound on the ratio
however many seeds of the baseline are censored, and says how many.
"""

import argparse
import collections
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import scipy.stats
from lab_methods import METHODS

# Chosen from the last runs of tuning, before any reported seed was run: what
# the best published rival reaches there.
PRESETS = (0.35, 0.4, 0.45)
_HELD = 3
_GOAL_FEWER, _GOAL_ACCURACY = 0.347, 0.064

Row = Mapping[str, Any]


class Paired(NamedTuple):
  """A mean over paired seeds, its 95 % t interval and two-sided p-value."""

  mean: float
  low: float
  high: float
  p: float
  n: int


def paired(differences: Sequence[float]) -> Paired:
  """Of differences, one per seed; no interval from fewer than two."""
  x = np.asarray(differences, float)
  if len(x) < 2 or not np.all(np.isfinite(x)):
    mean = float(np.mean(x)) if len(x) else math.nan
    return Paired(mean, -math.inf, math.inf, 1.0, len(x))
  error = float(np.std(x, ddof=1) / math.sqrt(len(x)))
  mean = float(np.mean(x))
  if error == 0:
    return Paired(mean, mean, mean, float(mean == 0), len(x))
  half = float(scipy.stats.t.ppf(0.975, len(x) - 1)) * error
  p = 2 * float(scipy.stats.t.sf(abs(mean) / error, len(x) - 1))
  return Paired(mean, mean - half, mean + half, p, len(x))


def holm(p_values: Sequence[float]) -> list[float]:
  """Holm's step-down adjustment; monotone, at most 1."""
  order = np.argsort(p_values)
  adjusted = np.empty(len(p_values))
  worst = 0.0
  for rank, index in enumerate(order):
    worst = max(worst, (len(p_values) - rank) * p_values[index])
    adjusted[index] = min(worst, 1.0)
  return adjusted.tolist()


def samples_to(row: Row, accuracy: float) -> float:
  """Generated samples to reach it for ``_HELD`` evaluations; inf if never."""
  curve = row["curve"]
  for i in range(len(curve) - _HELD + 1):
    if all(reached >= accuracy for _, reached in curve[i : i + _HELD]):
      if i == 0:
        return float(curve[0][0])
      # Held from the evaluation before on it would have been found there.
      (x0, y0), (x1, y1) = curve[i - 1 : i + 1]
      return x0 + (accuracy - y0) / (y1 - y0) * (x1 - x0)
  return math.inf


def performance(row: Row) -> float:
  """Mean accuracy over the last tenth of the run."""
  last = row["curve"][-1][0]
  return float(np.mean([a for x, a in row["curve"] if x >= 0.9 * last]))


def collapsed(row: Row) -> bool:
  best = max(accuracy for _, accuracy in row["curve"])
  return performance(row) < best / 2


class Table:
  """The rows of one task at one staleness."""

  def __init__(self, rows: Iterable[Row]):
    """Sorts them by method and seed.

    Raises:
      ValueError: A method has two rows of one seed: from other settings, or
        from files that hold the same.
    """
    self.rows: dict[str, dict[int, Row]] = collections.defaultdict(dict)
    for row in rows:
      method, seed = row["method"], row["seed"]
      if seed in self.rows[method]:
        raise ValueError(f"{method} has two rows of seed {seed}.")
      self.rows[method][seed] = row

  @property
  def methods(self) -> list[str]:
    return [name for name in METHODS if name in self.rows]

  def fewer(self, method: str, baseline: str, accuracy: float) -> Paired | None:
    """Log of samples of the method over the baseline's; None if censored."""
    seeds = self._seeds(method, baseline)
    if 2 * self.censored(baseline, accuracy, beside=method) >= len(seeds):
      return None
    return self.fewer_at_least(method, baseline, accuracy)

  def fewer_at_least(
    self, method: str, baseline: str, accuracy: float
  ) -> Paired | None:
    """The same, or above it where the baseline is censored, in however many.

    None where the method is censored itself.
    """
    seeds = self._seeds(method, baseline)
    if not seeds or self.censored(method, accuracy, beside=baseline):
      return None
    ours = [samples_to(self.rows[method][s], accuracy) for s in seeds]
    theirs = [samples_to(self.rows[baseline][s], accuracy) for s in seeds]
    totals = [self.rows[baseline][s]["curve"][-1][0] for s in seeds]
    theirs = np.minimum(theirs, totals)
    return paired(np.log(np.maximum(ours, 1)) - np.log(np.maximum(theirs, 1)))

  def censored(self, method: str, accuracy: float, *, beside: str) -> int:
    """Seeds that did not reach it, of those that another method has, too."""
    return sum(
      math.isinf(samples_to(self.rows[method][s], accuracy))
      for s in self._seeds(method, beside)
    )

  def better(self, method: str, baseline: str) -> Paired:
    """Difference of performance."""
    return paired(
      [
        performance(self.rows[method][s]) - performance(self.rows[baseline][s])
        for s in self._seeds(method, baseline)
      ]
    )

  def mean_performance(self, method: str, beside: str = "") -> float:
    """Over the seeds that another method has, too."""
    seeds = self._seeds(method, beside or method)
    return float(np.mean([performance(self.rows[method][s]) for s in seeds]))

  def _seeds(self, *methods: str) -> list[int]:
    return sorted(set.intersection(*(set(self.rows[m]) for m in methods)))


# ------------------------------------------------------------------- markdown


def _percent(part: float) -> str:
  return f"{100 * part:+.1f} %"


def _interval(x: Paired, show) -> str:
  return f"{show(x.mean)} [{show(x.low)}, {show(x.high)}]"


def summary_table(table: Table) -> list[str]:
  """Every method: efficiency, performance, and what it cost."""
  lines = [
    "| method | seeds | "
    + " | ".join(f"samples to {a:g}" for a in PRESETS)
    + " | performance ± sd | collapsed | trained tokens | scored | CPU s |",
    "|" + "---|" * (len(PRESETS) + 7),
  ]
  for name in table.methods:
    rows = list(table.rows[name].values())
    cells = []
    for accuracy in PRESETS:
      reached = [samples_to(row, accuracy) for row in rows]
      missed = sum(map(math.isinf, reached))
      middle = float(np.median(reached))
      shown = "unreached" if math.isinf(middle) else f"{middle:,.0f}"
      cells.append(shown + (f" ({missed} censored)" if missed else ""))
    scores = [performance(row) for row in rows]
    spread = np.std(scores, ddof=1) if len(scores) > 1 else math.nan

    def mean(field: str, rows=rows) -> float:
      return float(np.mean([row[field] for row in rows]))

    lines.append(
      f"| {name} | {len(rows)} | {' | '.join(cells)} | "
      f"{np.mean(scores):.3f} ± {spread:.3f} | "
      f"{sum(map(collapsed, rows))} | {mean('trained_tokens'):,.0f} | "
      f"{mean('scored'):,.0f} | {mean('cpu_seconds'):.0f} |"
    )
  return lines


def comparison_table(table: Table, method: str) -> list[str]:
  """The method against every other, seed by seed."""
  others = [name for name in table.methods if name != method]
  cells: list[tuple[str, str, Paired | None]] = []
  for name in others:
    for accuracy in PRESETS:
      cells.append((name, f"{accuracy:g}", table.fewer(method, name, accuracy)))
    cells.append((name, "performance", table.better(method, name)))
  given = [cell for cell in cells if cell[2] is not None]
  adjusted = dict(
    zip(
      [cell[:2] for cell in given],
      holm([cell[2].p for cell in given]),
      strict=True,
    )
  )
  lines = [
    f"| {method} against | "
    + " | ".join(f"samples to {a:g}" for a in PRESETS)
    + " | performance, points | relative |",
    "|" + "---|" * (len(PRESETS) + 3),
  ]
  for name in others:
    shown = []
    for other, column, value in cells:
      if other != name:
        continue
      if value is None:
        shown.append("censored")
        continue
      if column == "performance":
        text = _interval(value, lambda x: f"{100 * x:+.1f}")
      else:
        text = _interval(value, lambda x: _percent(math.exp(x) - 1))
      star = "*" if adjusted[name, column] < 0.05 else ""
      shown.append(text + star)
    theirs = table.mean_performance(name, method)
    ours = table.mean_performance(method, name)
    relative = _percent(ours / theirs - 1) if theirs else "-"
    lines.append(f"| {name} | {' | '.join(shown)} | {relative} |")
  lines.append("")
  lines.append(
    "In brackets 95 % paired t intervals; * p < 0.05 after Holm over the table."
  )
  return lines


def tuning_table(rows: Sequence[Row]) -> list[str]:
  """What tuning saw: mean accuracy over each run."""

  def score(row: Row) -> str:
    return f"{np.mean([a for _, a in row['curve']]):.3f}"

  by_method = collections.defaultdict(lambda: collections.defaultdict(dict))
  for row in rows:
    by_method[row["method"]][row["settings"]][row["stage"]] = row
  lines = ["| method | settings | half as long | final |", "|---|---|---|---|"]
  for name in METHODS:
    for _, stages in sorted(by_method.get(name, {}).items()):
      changes = next(iter(stages.values()))["changes"]
      settings = ", ".join(
        f"{key.split('.')[1]} {value:g}" for key, value in changes.items()
      )
      halving, final = (
        score(stages[stage]) if stage in stages else ""
        for stage in ("halving", "final")
      )
      lines.append(f"| {name} | {settings} | {halving} | {final} |")
  return lines


def best_baseline(tuning: Sequence[Row]) -> str | None:
  """Of the asynchronous rivals, by the final runs of tuning."""
  scores = {}
  for row in tuning:
    name = row["method"]
    rival = not name.startswith("darl") and not METHODS[name].synchronous
    if row["stage"] == "final" and rival:
      score = float(np.mean([a for _, a in row["curve"]]))
      scores[name] = max(score, scores.get(name, 0.0))
  return max(scores, key=scores.get) if scores else None


def _fewer_samples(
  table: Table, baseline: str
) -> tuple[list[Paired | None], str]:
  """D-ARL's samples to each accuracy against a baseline's: bounds, and a line.

  Where D-ARL is censored there is none.
  """
  values = [table.fewer_at_least("darl", baseline, a) for a in PRESETS]
  shown = []
  for accuracy, value in zip(PRESETS, values, strict=True):
    if value is None:
      shown.append(f"to {accuracy:g}: D-ARL is censored")
      continue
    text = _interval(value, lambda x: _percent(math.exp(x) - 1))
    missed = table.censored(baseline, accuracy, beside="darl")
    bound = f" or less ({missed} of {value.n} censored)" if missed else ""
    shown.append(f"to {accuracy:g}: {text}{bound}")
  return values, f"Against {baseline} {', '.join(shown)}."


def verdict(table: Table, tuning: Sequence[Row]) -> list[str]:
  """Each goal and whether the table supports it."""
  lines = []
  published = best_baseline(tuning)
  with_ring = f"{published}+ring"

  def judged(goal: str, met: bool, evidence: str) -> None:
    lines.append(f"- **{'Met' if met else 'Not met'}**: {goal}. {evidence}")

  if published in table.rows:
    values, shown = _fewer_samples(table, published)
    judged(
      f"{100 * _GOAL_FEWER:g} % fewer generated samples than the best "
      f"asynchronous baseline as published, {published} (chosen on the tuning "
      "seeds)",
      all(v and math.exp(v.mean) - 1 <= -_GOAL_FEWER for v in values),
      shown,
    )
    ours = table.mean_performance("darl", published)
    theirs = table.mean_performance(published, "darl")
    points = _interval(
      table.better("darl", published), lambda x: f"{100 * x:+.1f}"
    )
    judged(
      f"accuracy at least {100 * _GOAL_ACCURACY:g} % higher (relative) than "
      f"{published}",
      ours >= (1 + _GOAL_ACCURACY) * theirs,
      f"{ours:.3f} against {theirs:.3f}"
      + (f", {_percent(ours / theirs - 1)}" if theirs else "")
      + f"; in points {points}.",
    )
  for goal, names in (
    (
      f"fewer samples than that baseline with the same reuse, {with_ring}",
      [with_ring],
    ),
    ("better than random and newest", ["darl_random", "darl_newest"]),
  ):
    compared = [
      _fewer_samples(table, name) for name in names if name in table.rows
    ]
    if compared:
      judged(
        goal + ", with intervals that exclude 0",
        all(v and v.high < 0 for values, _ in compared for v in values),
        " ".join(shown for _, shown in compared),
      )
  fallen = {
    name: sum(map(collapsed, rows.values()))
    for name, rows in table.rows.items()
  }
  judged(
    "no collapse of D-ARL",
    fallen["darl"] == 0,
    f"{fallen['darl']} of {len(table.rows['darl'])} runs; others: "
    + (
      ", ".join(
        f"{name} {n}" for name, n in fallen.items() if n and name != "darl"
      )
      or "none"
    )
    + ".",
  )
  return lines


# ---------------------------------------------------------------------- plots

_PANELS = (
  ("as published", lambda name: not METHODS[name].ring),
  ("with the ring", lambda name: name.endswith("+ring")),
  ("D-ARL and controls", lambda name: name.startswith("darl")),
)


def plot_curves(table: Table, path: pathlib.Path) -> None:
  """Accuracy against generated samples: means and 95 % t bands over seeds."""
  figure, axes = plt.subplots(
    1, len(_PANELS), figsize=(15, 4.6), sharey=True, layout="constrained"
  )
  for axis, (title, belongs) in zip(axes, _PANELS, strict=True):
    names = [name for name in table.methods if belongs(name)]
    if "darl" not in names and "darl" in table.rows:
      names.append("darl")
    for name in names:
      curves = np.array(
        [[a for _, a in row["curve"]] for row in table.rows[name].values()]
      )
      first = next(iter(table.rows[name].values()))
      x = np.array([x for x, _ in first["curve"]]) / 1000
      mean = curves.mean(axis=0)
      style = dict(color="black", linewidth=2.2) if name == "darl" else {}
      (line,) = axis.plot(x, mean, label=name, **style)
      if len(curves) > 1:
        half = scipy.stats.t.ppf(0.975, len(curves) - 1) * scipy.stats.sem(
          curves, axis=0
        )
        axis.fill_between(
          x, mean - half, mean + half, alpha=0.15, color=line.get_color()
        )
    axis.set_title(title)
    axis.set_xlabel("generated samples, thousands")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
  axes[0].set_ylabel("held-out accuracy, greedy")
  figure.savefig(path, dpi=110)
  plt.close(figure)


_DIAGNOSTICS = (
  ("ess_fraction", "effective sample size, share"),
  ("clipped_high", "clipped above, share"),
  ("clipped_low", "clipped below, share"),
  ("grad_norm", "gradient norm"),
  ("entropy", "entropy of the policy, nats"),
  ("kept_advantage", "mean advantage of the kept"),
)


def plot_diagnostics(
  table: Table, methods: Sequence[str], path: pathlib.Path
) -> None:
  """What training looked like inside, and the ages of what was trained."""
  figure, axes = plt.subplots(2, 4, figsize=(16, 7), layout="constrained")
  flat = axes.flatten()
  for axis, (name, title) in zip(flat, _DIAGNOSTICS, strict=False):
    for method in methods:
      lines = [
        [math.nan if v is None else v for v in row["scalars"][name]]
        for row in table.rows[method].values()
        if name in row["scalars"]
      ]
      if lines:
        axis.plot(
          np.linspace(0, 1, len(lines[0])), np.mean(lines, axis=0), label=method
        )
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("share of the run", fontsize=8)
    axis.grid(alpha=0.3)
  for method in methods:
    ages: collections.Counter[int] = collections.Counter()
    for row in table.rows[method].values():
      ages.update({int(age): count for age, count in row["ages"].items()})
    total = sum(ages.values())
    x = np.arange(max(ages) + 1)
    flat[6].plot(x, np.cumsum([ages[i] for i in x]) / total, label=method)
    scalars = [row["scalars"] for row in table.rows[method].values()]
    shares = [
      [
        math.nan if k is None or not p else k / p
        for k, p in zip(s["kept_count"], s["pool_count"], strict=True)
      ]
      for s in scalars
    ]
    flat[7].plot(np.linspace(0, 1, len(shares[0])), np.mean(shares, axis=0))
  flat[6].set_title("trained trajectories no older than (steps)", fontsize=9)
  flat[7].set_title("kept of what was scored, share", fontsize=9)
  flat[0].legend(fontsize=7)
  figure.savefig(path, dpi=100)
  plt.close(figure)


def tables_of(rows: Sequence[Row]) -> dict[str, Table]:
  """By law of ages; synchronous methods are in each, whose ages are all 0."""

  def synchronous(row: Row) -> bool:
    return METHODS[row["method"]].synchronous

  laws = {row["staleness"] for row in rows if not synchronous(row)}
  return {
    law: Table(r for r in rows if synchronous(r) or r["staleness"] == law)
    for law in sorted(
      laws, key=lambda law: (law.split(":")[0], int(law.split(":")[1]))
    )
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("rows", nargs="+", type=pathlib.Path)
  root = pathlib.Path(__file__).resolve().parent.parent
  parser.add_argument("--docs", type=pathlib.Path, default=root / "docs")
  arguments = parser.parse_args()
  rows = [
    json.loads(line)
    for path in arguments.rows
    for line in path.read_text().splitlines()
  ]
  parts = [(arguments.docs / "lab_intro.md").read_text().rstrip(), ""]
  images = arguments.docs / "lab"
  images.mkdir(parents=True, exist_ok=True)
  for task in sorted({row["task"] for row in rows}):
    of_task = [row for row in rows if row["task"] == task]
    tuning = [row for row in of_task if row["stage"] != "table"]
    tables = [row for row in of_task if row["stage"] == "table"]
    for staleness, table in tables_of(tables).items():
      parts += [f"## {task}, ages {staleness}", ""]
      if "darl" in table.rows:
        parts += verdict(table, tuning) + [""]
      parts += summary_table(table) + [""]
      if "darl" in table.rows:
        parts += comparison_table(table, "darl") + [""]
      stem = f"{task}_{staleness.replace(':', '_')}"
      plot_curves(table, images / f"{stem}.png")
      parts += [f"![accuracy](lab/{stem}.png)", ""]
      wanted = ("grpo", "topr", "cispo", "darl_random", "darl", "darl_clipped")
      shown = [name for name in wanted if name in table.rows]
      plot_diagnostics(table, shown, images / f"{stem}_inside.png")
      parts += [f"![inside](lab/{stem}_inside.png)", ""]
    if tuning:
      parts += [f"## {task}: the tuning grid", ""]
      parts += [
        "Mean held-out accuracy over each run: half as long on seed 1, the "
        "best two of each method to the end on seed 2.",
        "",
      ]
      parts += tuning_table(tuning) + [""]
  (arguments.docs / "lab.md").write_text("\n".join(parts).rstrip() + "\n")


if __name__ == "__main__":
  main()
