"""Which method learns most from the same samples, and by how much (method 9).

  python bench/lab.py tune  --rows=FILE [--task=NAME] [--methods=A,B]
  python bench/lab.py table --rows=FILE [--task=NAME] [--methods=A,B]
      [--staleness=uniform:64] [--seeds=10]

``tune`` chooses each method's settings at one staleness by successive halving,
on seeds that the table does not use: all of a grid run half as long on one
seed, the best two of them to the end on another. ``table`` runs every method
with its chosen settings on the reported seeds. Each run appends one JSON line
to the file, and runs that have their line are not done again: stop it at any
time, and the same command goes on. ``lab_report.py`` reads the lines.

Runs share nothing but the file: one process per core, one thread each.
"""

import argparse
import functools
import json
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import lab_methods
import lab_run
import tqdm
from lab_methods import METHODS, TASKS

from darl_jax.sharding import meshes

_STEPS = 240
_TUNED_AT = "uniform:64"
_HALVING_SEED, _FINAL_SEED = 1, 2
_FIRST_SEED = 101
_FINALISTS = 2


class Job(NamedTuple):
  """One run. All of it but the outcome is in its row.

  Attributes:
    stage: ``halving``, ``final`` (both of tuning) or ``table``.
    settings: Index into the grid of the method.
    staleness: "law:S".
  """

  stage: str
  task: str
  method: str
  settings: int
  staleness: str
  seed: int
  steps: int


class Rows:
  """The file of finished runs, which one process appends to."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._rows: dict[Job, dict[str, Any]] = {}
    if path.exists():
      text = path.read_text()
      whole = text[: text.rfind("\n") + 1]
      if whole != text:  # Killed while it wrote: that run is done again.
        path.write_text(whole)
      for line in whole.splitlines():
        row = json.loads(line)
        self._rows[Job(*(row[name] for name in Job._fields))] = row

  def __contains__(self, job: Job) -> bool:
    return job in self._rows

  def __getitem__(self, job: Job) -> dict[str, Any]:
    return self._rows[job]

  def __iter__(self) -> Iterator[tuple[Job, dict[str, Any]]]:
    return iter(self._rows.items())

  def add(self, job: Job, outcome: dict[str, Any]) -> None:
    row = {**job._asdict(), **outcome}
    self.path.parent.mkdir(parents=True, exist_ok=True)
    with self.path.open("a") as file:
      file.write(json.dumps(row) + "\n")
    self._rows[job] = row


def outdated(rows: Rows) -> list[str]:
  """Runs whose settings are not what the method's grid has in their place now.

  A row names its settings by their index, and would stand for others.
  """
  problems = []
  for job, row in rows:
    method = METHODS.get(job.method)
    grid = METHODS[method.tuned_as].grid if method else ()
    now = grid[job.settings] if job.settings < len(grid) else None
    if row["changes"] != now:
      problems.append(
        f"{job.stage} of {job.method}, seed {job.seed}: settings "
        f"{job.settings} were {row['changes']}, and are {now}"
      )
  return problems


def tuning_score(row: dict[str, Any]) -> float:
  """Mean held-out accuracy over the run: fast and far are both worth."""
  accuracies = [accuracy for _, accuracy in row["curve"]]
  return sum(accuracies) / len(accuracies)


def halving_jobs(task: str, method: str) -> list[Job]:
  """All settings of a method, half as long."""
  staleness = "uniform:0" if METHODS[method].synchronous else _TUNED_AT
  return [
    Job("halving", task, method, i, staleness, _HALVING_SEED, _STEPS // 2)
    for i in range(len(METHODS[method].grid))
  ]


def final_jobs(rows: Rows, task: str, method: str) -> list[Job]:
  """The best of the first stage, to the end."""
  ranked = sorted(
    halving_jobs(task, method),
    key=lambda job: tuning_score(rows[job]),
    reverse=True,
  )
  return [
    job._replace(stage="final", seed=_FINAL_SEED, steps=_STEPS)
    for job in ranked[:_FINALISTS]
  ]


def chosen_settings(rows: Rows, task: str, method: str) -> int:
  """Index of the settings that tuning chose.

  Raises:
    KeyError: The method is not tuned yet.
  """
  best = max(
    final_jobs(rows, task, method), key=lambda job: tuning_score(rows[job])
  )
  return best.settings


def table_jobs(
  rows: Rows,
  task: str,
  methods: Sequence[str],
  staleness: Sequence[str],
  num_seeds: int,
  *,
  tuned_on: str,
) -> list[Job]:
  """Every method at every staleness; all of a seed before the next seed."""
  jobs = []
  for seed in range(_FIRST_SEED, _FIRST_SEED + num_seeds):
    for law in staleness:
      for name in methods:
        method = METHODS[name]
        where = "uniform:0" if method.synchronous else law
        settings = chosen_settings(rows, tuned_on, method.tuned_as)
        job = Job("table", task, name, settings, where, seed, _STEPS)
        if job not in jobs:
          jobs.append(job)
  return jobs


@functools.cache
def _lab(task: str, folder: str):
  """This process's lab of a task."""
  base = lab_methods.make_config(
    lab_methods.TASKS[task],
    lab_methods.METHODS["sync_grpo"],
    {},
    bound=0,
    steps=_STEPS,
  )
  return lab_run.Lab(base, pathlib.Path(folder) / task)


def run(job: Job, folder: str) -> dict[str, Any]:
  """Does one run, in a process that ``_start_worker`` prepared."""
  method = lab_methods.METHODS[job.method]
  tuned = lab_methods.METHODS[method.tuned_as]
  settings = tuned.grid[job.settings]
  law, bound = job.staleness.split(":")
  config = lab_methods.make_config(
    lab_methods.TASKS[job.task],
    method,
    settings,
    bound=int(bound),
    steps=job.steps,
  )
  staleness = lab_run.Staleness(law, int(bound))
  outcome = _lab(job.task, folder).run(config, staleness, seed=job.seed)
  return {"changes": settings, **outcome}


def _start_worker(cores: Any) -> None:
  """Takes a core for this process, and starts JAX on it."""
  os.sched_setaffinity(0, {cores.get()})
  meshes.prepare_cpu(1)


def _do(arguments: tuple[Job, str]) -> tuple[Job, dict[str, Any]]:
  job, folder = arguments
  return job, run(job, folder)


class Workers:
  """Processes that do runs, one on each core."""

  def __init__(self, folder: pathlib.Path, count: int):
    """Starts them.

    Args:
      folder: Where warm starts and compiled programs are kept.
      count: Of processes.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    available = sorted(os.sched_getaffinity(0))
    for index in range(count):
      cores.put(available[index % len(available)])
    self._folder = str(folder)
    self._pool = context.Pool(count, _start_worker, (cores,))

  def __enter__(self) -> "Workers":
    return self

  def __exit__(self, *_) -> None:
    self._pool.terminate()

  def do(self, jobs: Sequence[Job], rows: Rows) -> None:
    """Does what has no row yet, and appends the rows as they come."""
    left = [job for job in jobs if job not in rows]
    if not left:
      return
    arguments = [(job, self._folder) for job in left]
    done = self._pool.imap_unordered(_do, arguments)
    with tqdm.tqdm(total=len(left), unit="run", dynamic_ncols=True) as bar:
      for job, outcome in done:
        rows.add(job, outcome)
        bar.update()
        tail = [round(accuracy, 2) for _, accuracy in outcome["curve"][-3:]]
        bar.write(
          f"{job.method} {outcome['changes']} {job.staleness} seed "
          f"{job.seed}: {tail}, {outcome['cpu_seconds']:.0f} CPU s"
        )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("stage", choices=("tune", "table"))
  parser.add_argument("--rows", type=pathlib.Path, required=True)
  parser.add_argument("--task", choices=TASKS, default="spell_backward")
  parser.add_argument(
    "--tuned-on", choices=TASKS, help="whose tuning counts; --task by default"
  )
  parser.add_argument("--methods", default=",".join(METHODS))
  parser.add_argument("--staleness", default=_TUNED_AT)
  parser.add_argument("--seeds", type=int, default=10)
  parser.add_argument("--workers", type=int, default=os.cpu_count())
  parser.add_argument(
    "--folder",
    type=pathlib.Path,
    default=pathlib.Path(__file__).resolve().parent.parent / "runs" / "lab",
    help="where warm starts and compiled programs are kept",
  )
  arguments = parser.parse_args()
  methods = arguments.methods.split(",")
  if unknown := sorted(set(methods) - METHODS.keys()):
    parser.error(f"--methods: {', '.join(unknown)} not in {', '.join(METHODS)}")
  rows = Rows(arguments.rows)
  if problems := outdated(rows):
    parser.error("--rows has runs of other settings: " + "; ".join(problems))
  start = time.monotonic()
  with Workers(arguments.folder, arguments.workers) as workers:
    if arguments.stage == "tune":
      tuned = [name for name in methods if METHODS[name].grid]
      for jobs_of in (
        halving_jobs,
        functools.partial(final_jobs, rows),
      ):
        workers.do(
          [job for name in tuned for job in jobs_of(arguments.task, name)], rows
        )
      for name in tuned:
        index = chosen_settings(rows, arguments.task, name)
        print(f"{name}: {METHODS[name].grid[index]}")
    else:
      workers.do(
        table_jobs(
          rows,
          arguments.task,
          methods,
          arguments.staleness.split(","),
          arguments.seeds,
          tuned_on=arguments.tuned_on or arguments.task,
        ),
        rows,
      )
  print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
  main()
