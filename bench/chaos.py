"""A run is killed again and again: is anything lost, done twice, or undone?

    python bench/chaos.py --kills=30 --json

A nano run is started, killed with SIGKILL at a random moment, and started again
by the same command, until it has been killed often enough; then it goes on to
its end. Some kills come while the process starts, some while it trains, and
some while a checkpoint is being written. After each kill the checkpoints on the
disk are read, by this program and not by the run:

  lost                 groups that were drawn, and are neither begun nor in
                       flight
  duplicated           groups that are both, and samples trained on too often
  version_regressions  restarts that went on from an older step than the newest
                       whole checkpoint; trajectories of a version that is not
                       there yet; steps that metrics.jsonl lacks at the end, or
                       has twice
  identity_holds       generated = trained + expired + dropped + in the ring +
                       awaiting, in every checkpoint and at the end

The accuracy at the end is compared with runs that nobody kills. With
``--synchronous`` the parameters at the end are compared instead, bit for bit.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# How often a run is killed while it starts, trains and saves.
_KINDS = {"start": 0.15, "step": 0.5, "save": 0.35}
_POLL_S = 0.002
# Of one process, until it is at work.
_STARTS_WITHIN_S = 300.0


@dataclasses.dataclass
class Findings:
  """What was found wrong, and what was seen."""

  lost: int = 0
  duplicated: int = 0
  version_regressions: int = 0
  identity_holds: bool = True
  kills: dict[str, int] = dataclasses.field(
    default_factory=lambda: dict.fromkeys(_KINDS, 0)
  )
  resumed_from: list[int] = dataclasses.field(default_factory=list)
  restore_s: list[float] = dataclasses.field(default_factory=list)


class ChaosRun:
  """One run, in as many processes as it takes."""

  def __init__(self, arguments: list[str], workdir: pathlib.Path):
    self._arguments = arguments
    self.workdir = workdir
    self._log = workdir.with_suffix(".log")

  def start(self) -> subprocess.Popen:
    with open(self._log, "w") as log:
      return subprocess.Popen(
        [
          sys.executable,
          str(_ROOT / "launch" / "main.py"),
          f"--workdir={self.workdir}",
          *self._arguments,
        ],
        cwd=_ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=os.environ
        | {
          "PYTHONPATH": str(_ROOT),
          "JAX_COMPILATION_CACHE_DIR": str(self.workdir.parent / "xla"),
          "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
      )

  def finish(self) -> None:
    """To its end, without a kill."""
    process = self.start()
    if process.wait():
      raise SystemExit(f"the run failed:\n{self._log.read_text()[-3000:]}")

  def step(self) -> int:
    """Of the last line of metrics; -1 before there is one."""
    try:
      lines = (self.workdir / "metrics.jsonl").read_bytes().split(b"\n")
      return json.loads(lines[-2])["step"]
    except (OSError, IndexError, ValueError, KeyError):
      return -1

  def checkpoints(self) -> list[pathlib.Path]:
    """Folders of steps, finished or not, the oldest first."""
    return sorted((self.workdir / "checkpoints").glob("step_*"))

  def whole(self) -> list[pathlib.Path]:
    return [p for p in self.checkpoints() if (p / "MANIFEST.json").exists()]

  def went_on(self) -> tuple[int, float] | None:
    """The step that the newest process began after, and its seconds."""
    found = re.search(
      r"goes on after step (\d+), from .*? \(([\d.]+) s\)",
      self._log.read_text(),
    )
    return (int(found[1]), float(found[2])) if found else None

  def said(self) -> str:
    return self._log.read_text()


def _kill(
  run: ChaosRun, kind: str, *, rng: np.random.Generator, stride: int
) -> bool:
  """Starts a process and kills it; false where it ended before."""
  known = {path.name for path in run.whole()}
  process = run.start()
  try:
    if kind == "start":
      time.sleep(rng.uniform(0.1, 6.0))
    else:
      first, target = None, int(rng.integers(1, 2 * stride + 1))
      deadline = time.monotonic() + _STARTS_WITHIN_S
      while process.poll() is None and time.monotonic() < deadline:
        if first is None and "train," in run.said():
          first = max(run.step(), 0)
        at_work = first is not None and run.step() >= first + target
        if at_work and (kind == "step" or _is_saving(run, known)):
          break
        time.sleep(_POLL_S)
      if kind == "step":
        time.sleep(rng.uniform(0.0, 0.2))
    if process.poll() is not None:
      if process.returncode:
        raise SystemExit(f"the run failed:\n{run.said()[-3000:]}")
      return False
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()
  return True


def _is_saving(run: ChaosRun, known: set[str]) -> bool:
  return any(
    path.name not in known and not (path / "MANIFEST.json").exists()
    for path in run.checkpoints()
  )


def _read(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  header = json.loads((folder / "run.json").read_text())
  arrays = safetensors.numpy.load((folder / "arrays.safetensors").read_bytes())
  return header, arrays


def _audit(run: ChaosRun, findings: Findings) -> None:
  """Reads every whole checkpoint on the disk."""
  for folder in run.whole():
    header, arrays = _read(folder)
    ring, actor = header["ring"], header["actor"]
    begun = {
      group for start, end in ring["group_ids"] for group in range(start, end)
    }
    in_flight = {group for group, _ in actor["in_flight"]}
    findings.lost += len(set(range(actor["drawn"])) - begun - in_flight)
    findings.duplicated += len(begun & in_flight)
    most = header["config"]["replay"]["max_uses"]
    findings.duplicated += int(np.sum(arrays["uses"] > most))
    versions = arrays.get("policy_version", np.zeros(0, int))
    findings.version_regressions += int(np.any(versions > header["step"]))
    awaiting = sum(size for _, size in header["awaiting"])
    findings.identity_holds &= ring["generated"] == (
      ring["trained"]
      + sum(ring["expired"].values())
      + sum(ring["dropped"].values())
      + int(np.sum(arrays["uses"] == 0))
      + awaiting
    )


def _audit_end(run: ChaosRun, findings: Findings, steps: int) -> dict[str, Any]:
  summary = json.loads((run.workdir / "summary.json").read_text())
  rows = [
    json.loads(line)
    for line in (run.workdir / "metrics.jsonl").read_text().splitlines()
  ]
  taken = [row["step"] for row in rows if "train/loss" in row]
  findings.version_regressions += taken != list(range(1, steps + 1))
  findings.identity_holds &= summary["generated"] == sum(
    summary[name]
    for name in (
      "trained",
      "expired_unused",
      "dropped_unused",
      "in_ring_unused",
      "awaiting_verification",
    )
  )
  stalls = [row.get("checkpoint/max_stall_s", 0.0) for row in rows]
  return {**summary, "max_stall_s": max(stalls)}


def _same_parameters(ours: ChaosRun, theirs: ChaosRun, steps: int) -> bool:
  """Of the version after the last step, as the sampler gets it."""
  file = f"step_{steps:08d}/snapshot_{steps:08d}.safetensors"
  first, second = (
    safetensors.numpy.load((run.workdir / "checkpoints" / file).read_bytes())
    for run in (ours, theirs)
  )
  return first.keys() == second.keys() and all(
    np.array_equal(first[name], second[name]) for name in first
  )


def _batter(
  run: ChaosRun, *, kills: int, steps: int, rng: np.random.Generator
) -> Findings:
  """Kills the run so often, looks at it each time, and lets it end."""
  findings = Findings()
  kinds = rng.choice(list(_KINDS), size=kills, p=list(_KINDS.values()))
  for number, kind in enumerate(kinds):
    before = max((int(p.name[5:]) for p in run.whole()), default=None)
    if not _kill(run, kind, rng=rng, stride=max(steps // kills, 1)):
      break
    findings.kills[str(kind)] += 1
    _note_restart(run, findings, before)
    _audit(run, findings)
    print(f"kill {number + 1} ({kind}): step {run.step()}", file=sys.stderr)
  before = max((int(p.name[5:]) for p in run.whole()), default=None)
  run.finish()
  _note_restart(run, findings, before)
  _audit(run, findings)
  return findings


def _note_restart(
  run: ChaosRun, findings: Findings, newest: int | None
) -> None:
  """Where the last process began, against the newest checkpoint before it."""
  began = run.went_on()
  if began is None:
    # It was killed before it said so, or there was nothing to go on from.
    findings.version_regressions += (
      newest is not None and "train," in run.said()
    )
    return
  step, seconds = began
  findings.version_regressions += newest is None or step < newest
  findings.resumed_from.append(step)
  findings.restore_s.append(seconds)


def _measure(options: argparse.Namespace, folder: pathlib.Path) -> Mapping:
  config = options.config or (
    "configs/sync_grpo.py" if options.synchronous else "configs/darl.py"
  )
  arguments = [
    f"--config={_ROOT / config}",
    f"--config.num_steps={options.steps}",
    f"--config.checkpoint.every={options.every}",
    f"--config.evaluate.every={max(options.steps // 4, 1)}",
    *options.override,
  ]
  rng = np.random.default_rng(options.seed)
  run = ChaosRun([*arguments, "--config.seed=0"], folder / "killed")
  findings = _batter(run, kills=options.kills, steps=options.steps, rng=rng)
  end = _audit_end(run, findings, options.steps)
  row = {
    "steps": options.steps,
    **dataclasses.asdict(findings),
    "restore_s": max(findings.restore_s, default=None),
    "max_stall_s": end["max_stall_s"],
    "resumed": end["resumed"],
    "accuracy": end["accuracy_after"],
  }
  others = []
  for seed in range(1 if options.synchronous else options.undisturbed):
    other = ChaosRun([*arguments, f"--config.seed={seed}"], folder / f"s{seed}")
    other.finish()
    others.append(other)
  row["undisturbed"] = [
    json.loads((other.workdir / "summary.json").read_text())["accuracy_after"]
    for other in others
  ]
  if options.synchronous:
    row["bitwise_equal"] = _same_parameters(run, others[0], options.steps)
  return row


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--kills", type=int, default=30)
  parser.add_argument("--steps", type=int, default=400)
  parser.add_argument("--every", type=int, default=10, help="Between saves.")
  parser.add_argument("--seed", type=int, default=0, help="Of the kills.")
  parser.add_argument("--undisturbed", type=int, default=3, help="Runs.")
  parser.add_argument("--synchronous", action="store_true")
  parser.add_argument("--config", help="Another one.")
  parser.add_argument(
    "--override", action="append", default=[], help="--config.x=y"
  )
  parser.add_argument("--json", action="store_true", help="On one line.")
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    row = _measure(options, pathlib.Path(folder))
  print(json.dumps(row, indent=None if options.json else 2))


if __name__ == "__main__":
  main()
