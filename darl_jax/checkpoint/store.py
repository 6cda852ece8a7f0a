"""The checkpoints of a run: written beside training, kept, found, and read."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

from absl import logging
from etils import epath

from darl_jax.checkpoint import run_state, sealed
from darl_jax.config import CheckpointConfig, ConfigError

_PREFIX = "step_"
# Seconds of waiting for the disk after which it says so.
_SAY_AFTER_S = 5.0


@dataclasses.dataclass(frozen=True)
class Found:
  """A checkpoint that is whole.

  Attributes:
    folder: Where.
    step: Learner steps taken.
    header: What it says of itself; see ``run_state.read_header``.
  """

  folder: epath.Path
  step: int
  header: dict


class CheckpointFailed(Exception):
  """The last checkpoint of a run could not be written."""


class Checkpoints:
  """One run's folder of checkpoints, each in a sealed folder of its own.

  ``save`` hands a state over to a thread that writes it. A failure to write
  ends nothing: it is counted and said, and the next one is tried.

  Attributes:
    folder: Where they are.
    saved_step: Of the last one that was written, or gone on from.
  """

  def __init__(
    self,
    config: CheckpointConfig,
    folder: epath.Path,
    *,
    say: Callable[[str], None],
  ):
    """Touches nothing.

    Args:
      config: What is kept.
      folder: Of this run alone, here or in a bucket.
      say: Takes what a person should know.
    """
    self._config = config
    self.folder = folder
    self._say = say
    self._thread: threading.Thread | None = None
    self._error: Exception | None = None
    self._writing: int | None = None
    self.saved_step: int | None = None
    self._accuracies: dict[int, float | None] = {}
    self._saved = self._failed = 0
    self._stall_s = self._max_stall_s = self._write_s = self._bytes = 0.0

  # ------------------------------------------------------------------- reading

  def newest(self) -> Found | None:
    """The newest checkpoint that is whole; None where none was ever written.

    Those that are damaged are named, and the one before is tried.

    Raises:
      ConfigError: All that were written are damaged; names each.
    """
    damaged = []
    for folder in self._folders():
      if not sealed.is_sealed(folder):
        continue  # Its writing was cut short: it never was a checkpoint.
      wrong = sealed.damage(folder)
      if wrong is None:
        try:
          header = run_state.read_header(folder)
          return Found(folder, int(folder.name[len(_PREFIX) :]), header)
        except (OSError, ValueError, KeyError) as error:
          wrong = f"run.json: {error}"
      damaged.append(f"{folder} is damaged: {wrong}.")
      self._say(f"{damaged[-1]} Trying the one before it.")
    if damaged:
      raise ConfigError(
        [
          f"{message} Try to restore it from a copy, or another workdir."
          for message in damaged
        ],
        place="the checkpoints",
      )
    return None

  def resumed_from(self, found: Found) -> None:
    """What is newer is damaged, and will be replaced: it is kept no longer."""
    self.saved_step = found.step
    for folder in self._folders():
      if int(folder.name[len(_PREFIX) :]) > found.step:
        sealed.remove(folder)

  def _folders(self) -> list[epath.Path]:
    """Of all steps, finished or not, the newest first."""
    if not self.folder.exists():
      return []
    steps = [
      path
      for path in self.folder.iterdir()
      if path.name.removeprefix(_PREFIX).isdigit()
    ]
    return sorted(steps, key=lambda path: path.name, reverse=True)

  # ------------------------------------------------------------------- writing

  def save(
    self, capture: Callable[[], run_state.RunState], *, wait: bool = False
  ) -> None:
    """Takes a state and writes it, by default while the run goes on.

    Args:
      capture: Makes the state; called once the last one is written.
      wait: Until it is written.

    Raises:
      CheckpointFailed: It could not be written, and ``wait`` was wanted.
    """
    start = time.monotonic()
    self.wait()
    state = capture()
    self._writing = state.step
    self._error = None
    self._thread = threading.Thread(
      target=self._write, args=(state,), name="checkpoint", daemon=True
    )
    self._thread.start()
    if wait:
      self.wait()
      if self._error is not None:
        raise CheckpointFailed(
          f"the checkpoint of step {state.step} could not be written to "
          f"{self.folder}: {self._error}"
        ) from self._error
      return
    self._stall_s = time.monotonic() - start
    self._max_stall_s = max(self._max_stall_s, self._stall_s)

  def wait(self) -> None:
    """Until nothing is being written."""
    while self._thread is not None and self._thread.is_alive():
      self._thread.join(_SAY_AFTER_S)
      if self._thread.is_alive():
        self._say(
          f"waiting for the checkpoint of step {self._writing}, which is being "
          f"written to {self.folder}"
        )

  def metrics(self) -> dict[str, float]:
    """Of the last checkpoint seconds and bytes, and counts of all."""
    return {
      "checkpoint/stall_s": self._stall_s,
      "checkpoint/max_stall_s": self._max_stall_s,
      "checkpoint/write_s": self._write_s,
      "checkpoint/bytes": self._bytes,
      "checkpoint/saved": self._saved,
      "checkpoint/failed": self._failed,
    }

  # Below: the thread that writes.

  def _write(self, state: run_state.RunState) -> None:
    start = time.monotonic()
    folder = self.folder / f"{_PREFIX}{state.step:08d}"
    try:
      if folder.exists():  # Damaged, or its writing was cut short.
        sealed.remove(folder)
      folder.mkdir(parents=True)
      run_state.write(folder, state)
      self._bytes = sealed.seal(folder)
      self._accuracies[state.step] = state.accuracy
      for old in self._superseded(state.step):
        sealed.remove(old)
    except Exception as error:  # A full disk must not end the training.
      logging.debug("Saving step %d", state.step, exc_info=True)
      self._error = error
      self._failed += 1
      self._say(
        f"the checkpoint of step {state.step} could not be written to "
        f"{self.folder}: {type(error).__name__}: {error}. The run goes on, "
        "and tries again at the next one."
      )
      return
    self.saved_step = state.step
    self._saved += 1
    self._write_s = time.monotonic() - start

  def _superseded(self, step: int) -> Iterator[epath.Path]:
    """Which folders need not be kept any longer."""
    whole = []
    for folder in self._folders():
      number = int(folder.name[len(_PREFIX) :])
      if sealed.is_sealed(folder):
        whole.append((number, self._accuracy(number, folder), folder))
      elif number != step:
        yield folder
    rated = [each for each in whole if each[1] is not None]
    rated.sort(key=lambda each: (each[1], each[0]), reverse=True)
    kept = [*whole[: self._config.keep_last], *rated[: self._config.keep_best]]
    names = {folder.name for *_, folder in kept}
    yield from (folder for *_, folder in whole if folder.name not in names)

  def _accuracy(self, step: int, folder: epath.Path) -> float | None:
    """At that step, also where another process wrote it."""
    if step not in self._accuracies:
      try:
        self._accuracies[step] = run_state.read_header(folder)["accuracy"]
      except (OSError, ValueError, KeyError):
        self._accuracies[step] = None
    return self._accuracies[step]
