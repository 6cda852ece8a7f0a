"""Verifies answers in worker processes that can be killed.

Each worker process is served by one thread of the pool. The thread takes whole
groups off the queue, sends their answers in one message, and reads the scores
back one by one, so that a hang or a crash is pinned to its answer: that answer
becomes a recorded failure, the worker is replaced, and the rest goes on.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from darl_jax.config import ConfigError, RewardsConfig
from darl_jax.rewards.sandbox import Protections
from darl_jax.rewards.verifier import parse_task
from darl_jax.types import CORRECT, Finish, Trajectory, TrajectoryGroup

# Importing a verifier's libraries takes a second or two, more on a busy host.
_START_LIMIT_S = 60.0
_START_ATTEMPTS = 3
_MAX_ANSWERS_PER_MESSAGE = 512
_CLOSE_LIMIT_S = 1.5
# Between looks at whether a silent worker is still alive.
_LOOK_S = 0.5
_STDERR_BYTES = 8192

# Where a verdict is counted, by what its failure begins with.
_COUNTERS = {
  None: "scored",
  "timeout": "timeouts",
  "crash": "crashes",
  "error": "errors",
  "bad_score": "bad_scores",
  "aborted": "aborted",
}

# What a worker gets of our environment. PYTHONHASHSEED: some datasets walk over
# sets of strings.
_KEPT_VARIABLES = (
  "HOME",
  "LANG",
  "LC_ALL",
  "LC_CTYPE",
  "LD_LIBRARY_PATH",
  "PATH",
  "PYTHONHASHSEED",
  "PYTHONHOME",
  "TMPDIR",
  "TZ",
)


class VerifierStartError(Exception):
  """No worker process comes up; says what the last one wrote to stderr."""


class VerifierPool:
  """Scores the answers of submitted groups and delivers them with rewards.

  A trajectory's reward is 1 if its score is at least 0.99, else
  ``partial_credit`` times the score. Without a score its reward is None, and
  ``failures`` says why: "timeout", "crash: ...", "error: ..." (the verifier
  raised), "bad_score: ..." (not a number from 0 to 1) or "aborted" (the run
  cut the answer short, so that nothing can be said of it).
  """

  def __init__(
    self,
    config: RewardsConfig,
    *,
    task: Mapping[str, Any],
    decode: Callable[[np.ndarray], str],
    fail: Callable[[BaseException], None],
  ):
    """Starts the workers, in the background.

    Args:
      config: Limits and sizes.
      task: Names the verifier; see ``rewards/verifier.py``. The workers can
        import what this process can.
      decode: Sampled tokens, int32 [R], to text. Called from several threads.
      fail: Takes the first error of the pool, or of ``decode`` or a
        ``deliver``, after which nothing more is delivered. Called from one of
        the threads.

    Raises:
      ValueError: If ``task`` names no verifier.
      ConfigError: If the config requires isolation, and there is none here.
      VerifierStartError: If it does, and no worker comes up to tell.
    """
    parse_task(task)
    self._config = config
    self._task = dict(task)
    self._decode = decode
    self._fail = fail
    self._changed = threading.Condition()
    # The condition guards everything below, and which worker a slot holds.
    self._waiting: collections.deque[_Verdicts] = collections.deque()
    self._undelivered = 0
    self._queued = 0
    self._counts: collections.Counter[str] = collections.Counter()
    self._seconds = 0.0
    self._error: BaseException | None = None
    self._closed = False
    self._protections: Protections | None = None
    if config.require_isolation:
      self._check_isolation()
    self._slots = [_Slot(number) for number in range(config.workers)]
    for slot in self._slots:
      slot.thread = threading.Thread(
        target=self._serve,
        args=(slot,),
        name=f"verifier-{slot.number}",
        daemon=True,
      )
      slot.thread.start()

  def __enter__(self) -> "VerifierPool":
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def submit(
    self,
    groups: Sequence[TrajectoryGroup],
    *,
    deliver: Callable[[TrajectoryGroup], None],
  ) -> None:
    """Queues groups for verification; never waits.

    Args:
      groups: With trajectories that have no reward yet.
      deliver: Takes each group once it is verified. Called from the pool's
        threads, from several at a time.

    Raises:
      RuntimeError: If the pool is closed, or has failed (see ``__cause__``).
    """
    with self._changed:
      self._check_running()
      self._waiting.extend(_Verdicts(group, deliver) for group in groups)
      self._undelivered += len(groups)
      self._queued += sum(len(group.trajectories) for group in groups)
      self._changed.notify_all()

  def join(self, timeout_s: float) -> None:
    """Waits until every submitted group was delivered.

    Raises:
      TimeoutError: Saying what it waits for.
      RuntimeError: If the pool is closed before that, or has failed.
    """
    deadline = time.monotonic() + timeout_s
    with self._changed:
      while self._undelivered:
        self._check_running()
        left = deadline - time.monotonic()
        if left <= 0:
          raise TimeoutError(
            f"Waited {timeout_s:g} s for the verification of "
            f"{self._undelivered} groups ({self._queued} answers without a "
            f"verdict, {len(self._waiting)} groups not begun): "
            + "; ".join(map(str, self._slots))
          )
        self._changed.wait(left)
      if self._error is not None:
        self._check_running()  # The last delivery may be what failed.

  def close(self) -> None:
    """Kills the workers and ends the threads; groups not delivered are lost.

    Returns within about two seconds whatever verifiers and callbacks do. More
    calls do nothing.
    """
    with self._changed:
      self._closed = True
      self._kill_all()
      self._changed.notify_all()
    deadline = time.monotonic() + _CLOSE_LIMIT_S
    for slot in self._slots:
      if slot.thread is threading.current_thread():
        continue  # Closed by a callback: the thread ends when that returns.
      slot.thread.join(max(deadline - time.monotonic(), 0))
      if slot.thread.is_alive():
        logging.warning("Closed the verifier pool without %s.", slot)
      if slot.worker is not None:
        slot.worker.reap()

  def metrics(self) -> dict[str, float]:
    """Counts since the start, except ``queued``: answers without a verdict.

    ``seconds`` is what the workers spent on answers, over all of them.
    """
    with self._changed:
      counts = {name: self._counts[name] for name in _COUNTERS.values()}
      return counts | {
        "restarts": self._counts["restarts"],
        "queued": self._queued,
        "seconds": self._seconds,
      }

  @property
  def protections(self) -> Protections | None:
    """What the workers are kept from here; None until one has started."""
    return self._protections

  def _check_isolation(self) -> None:
    """Looks at a worker that scores nothing, before there is any other."""
    worker = _Worker()
    worker.send(self._hello({"verifier": "builtins:object"}))
    try:
      self._ready(worker)
    except (_TimedOutError, _DiedError) as error:
      raise VerifierStartError(
        f"No worker starts: {error!r}. It wrote:\n{worker.stderr()}"
      ) from error
    finally:
      worker.dispose()

  # The rest runs in the threads.

  def _serve(self, slot: "_Slot") -> None:
    try:
      self._start(slot)
      while begun := self._take(slot):
        if not slot.worker.alive():  # Died idle: no answer is to blame.
          self._restart(slot)
        self._verify(slot, begun)
    except _StoppedError:
      pass  # close() or another thread's error; who stopped us has said why.
    except BaseException as error:  # Handed to whoever runs the run.
      self._report(error)
    finally:
      if slot.worker is not None:
        slot.worker.dispose()
      slot.doing("has ended")

  def _take(self, slot: "_Slot") -> collections.deque["_Verdicts"]:
    """The next groups for one message; waits for them."""
    with self._changed:
      slot.doing("is idle")
      while not self._waiting:
        self._check_not_stopped()
        self._changed.wait()
      self._check_not_stopped()
      fair = -(-len(self._waiting) // len(self._slots))
      begun = collections.deque([self._waiting.popleft()])
      answers = len(begun[0].group.trajectories)
      while self._waiting and len(begun) < fair:
        answers += len(self._waiting[0].group.trajectories)
        if answers > _MAX_ANSWERS_PER_MESSAGE:
          break
        begun.append(self._waiting.popleft())
      return begun

  def _verify(
    self, slot: "_Slot", begun: collections.deque["_Verdicts"]
  ) -> None:
    """Finds the verdict of every answer, over as many workers as it takes."""
    self._hand_on(slot, begun)
    while begun:
      slot.doing("has its answers decoded")
      answers = [
        [
          self._decode(trajectory.response),
          dict(verdicts.group.prompt.reference),
        ]
        for verdicts in begun
        for trajectory in verdicts.missing()
      ]
      slot.worker.send(answers)
      lost = self._receive(slot, begun, len(answers))
      if lost is not None:
        self._record(begun[0], None, lost)
        self._hand_on(slot, begun)
        # What this worker never came to may go to one that is free.
        with self._changed:
          while begun and begun[-1].untouched:
            self._waiting.appendleft(begun.pop())
          self._changed.notify_all()
        self._restart(slot)

  def _receive(
    self,
    slot: "_Slot",
    begun: collections.deque["_Verdicts"],
    expected: int,
  ) -> str | None:
    """Reads verdicts in order; returns why the next one will not come."""
    for position in range(expected):
      group = begun[0].group
      slot.doing(
        f"scores an answer of group {group.group_id}, prompt {group.prompt.id}"
      )
      lost = None
      try:
        message = slot.worker.receive(self._config.time_limit_s)
      except _TimedOutError:
        lost = "timeout"
      except _DiedError as error:
        lost = f"crash: {error}"
      with self._changed:
        self._check_not_stopped()  # Then it died because we killed it.
        self._seconds += time.monotonic() - slot.since
      if lost is None and not _is_verdict(message, position):
        lost = f"crash: it wrote {message!r}"[:200]
      if lost is not None:
        return lost
      self._record(begun[0], *self._judge(*message[1:]))
      self._hand_on(slot, begun)
    return None

  def _judge(
    self, score: float | None, failure: str | None
  ) -> tuple[float | None, str | None]:
    """Reward and failure, of which exactly one is None."""
    if failure is not None:
      return None, failure
    if not (math.isfinite(score) and 0 <= score <= 1):
      return None, f"bad_score: {score}"
    if score >= CORRECT:
      return 1.0, None
    return self._config.partial_credit * score, None

  def _record(
    self, verdicts: "_Verdicts", reward: float | None, failure: str | None
  ) -> None:
    verdicts.record(reward, failure)
    kind = failure and failure.partition(":")[0]
    with self._changed:
      self._counts[_COUNTERS[kind]] += 1
      self._queued -= 1

  def _hand_on(
    self, slot: "_Slot", begun: collections.deque["_Verdicts"]
  ) -> None:
    """Delivers the groups at the front that are complete."""
    while begun and begun[0].complete():
      verdicts = begun.popleft()
      slot.doing(f"has group {verdicts.group.group_id} delivered")
      aborted = verdicts.failures.count("aborted")
      with self._changed:
        self._check_not_stopped()
        self._queued -= aborted
        self._counts["aborted"] += aborted
      verdicts.deliver(verdicts.verified())
      with self._changed:
        self._undelivered -= 1
        self._changed.notify_all()

  def _restart(self, slot: "_Slot") -> None:
    slot.worker.dispose()
    with self._changed:
      self._counts["restarts"] += 1
    logging.warning("Replacing verifier worker %d.", slot.number)
    self._start(slot)

  def _start(self, slot: "_Slot") -> None:
    """Starts a worker and waits until it is ready.

    One that dies is started anew, since memory or processes may have been
    short; one that hangs is not, since it would hang for as long again.
    """
    for attempt in range(1, _START_ATTEMPTS + 1):
      slot.doing("is starting")
      with self._changed:
        self._check_not_stopped()
        slot.worker = _Worker()
      slot.worker.send(self._hello(self._task))
      try:
        self._ready(slot.worker)
        return
      except _TimedOutError:
        reason, last = f"not ready after {_START_LIMIT_S:g} s", True
      except _DiedError as error:
        reason, last = str(error), attempt == _START_ATTEMPTS
      slot.worker.dispose()
      if last:
        break
    with self._changed:
      self._check_not_stopped()
    attempts = "1 attempt" if attempt == 1 else f"{attempt} attempts"
    raise VerifierStartError(
      f"A worker for {self._task!r} did not start in {attempts}; the last one: "
      f"{reason}. It wrote:\n{slot.worker.stderr()}"
    )

  def _hello(self, task: Mapping[str, Any]) -> dict[str, Any]:
    return {
      "task": task,
      "memory_limit_mb": self._config.memory_limit_mb,
      "time_limit_s": self._config.time_limit_s,
      "parent": os.getpid(),
    }

  def _ready(self, worker: "_Worker") -> None:
    """Waits until ``worker`` is; refuses it if it has to be confined better."""
    message = worker.receive(_START_LIMIT_S)
    worker.scratch = message["scratch"]
    protections = Protections(**message["protections"])
    if self._config.require_isolation and not protections.isolated:
      raise ConfigError(
        [
          "rewards.require_isolation = True, but this system does not keep "
          f"verifiers from the network and from files ({protections}). Try a "
          "container that allows user namespaces, or "
          "rewards.require_isolation=False."
        ]
      )
    with self._changed:
      first, self._protections = self._protections is None, protections
    if first:
      logging.info("Verifier workers: %s.", protections)

  def _report(self, error: BaseException) -> None:
    """Stops the pool; the first error goes to ``fail``."""
    with self._changed:
      first = self._error is None and not self._closed
      if first:
        self._error = error
      self._kill_all()
      self._changed.notify_all()
    if not first:
      logging.error("Verifier pool, after it stopped: %r", error)
      return
    try:
      self._fail(error)
    except Exception:
      logging.exception("The verifier pool could not hand on %r", error)

  def _kill_all(self) -> None:
    for slot in self._slots:
      if slot.worker is not None:
        slot.worker.kill()

  def _check_not_stopped(self) -> None:
    if self._closed or self._error is not None:
      raise _StoppedError

  def _check_running(self) -> None:
    if self._error is not None:
      raise RuntimeError(
        f"The verifier pool failed: {self._error!r}"
      ) from self._error
    if self._closed:
      raise RuntimeError("The verifier pool is closed.")


def _is_verdict(message: Any, position: int) -> bool:
  """Whether it is what worker.py sends; an answer's text may have run code."""
  if not isinstance(message, list) or len(message) != 3:
    return False
  echo, score, failure = message
  if echo != position:
    return False
  if failure is None:
    return isinstance(score, float)
  return isinstance(failure, str) and failure.startswith(
    ("error: ", "bad_score: ")
  )


class _StoppedError(Exception):
  """The pool was closed, or failed in another thread."""


class _TimedOutError(Exception):
  """A worker did not answer in time."""


class _DiedError(Exception):
  """A worker ended, or can no longer be understood."""


@dataclasses.dataclass
class _Slot:
  """One worker, replaced as needed, and the thread that serves it."""

  number: int
  thread: threading.Thread | None = None
  worker: "_Worker | None" = None
  activity: str = "is starting"
  since: float = dataclasses.field(default_factory=time.monotonic)

  def doing(self, activity: str) -> None:
    self.activity, self.since = activity, time.monotonic()

  def __str__(self) -> str:
    seconds = time.monotonic() - self.since
    return f"worker {self.number} {self.activity} (for {seconds:.1f} s)"


class _Verdicts:
  """The verdicts of one group's answers, filled in from the front."""

  def __init__(
    self, group: TrajectoryGroup, deliver: Callable[[TrajectoryGroup], None]
  ):
    self.group = group
    self.deliver = deliver
    self.rewards: list[float | None] = []
    self.failures: list[str | None] = []
    self.untouched = True

  def record(self, reward: float | None, failure: str | None) -> None:
    self._skip_aborted()
    self.untouched = False
    self.rewards.append(reward)
    self.failures.append(failure)

  def complete(self) -> bool:
    self._skip_aborted()
    return len(self.rewards) == len(self.group.trajectories)

  def missing(self) -> Iterator[Trajectory]:
    """The answers that are still to be scored."""
    for trajectory in self.group.trajectories[len(self.rewards) :]:
      if trajectory.finish is not Finish.ABORTED:
        yield trajectory

  def verified(self) -> TrajectoryGroup:
    return dataclasses.replace(
      self.group,
      trajectories=tuple(
        dataclasses.replace(trajectory, reward=reward)
        for trajectory, reward in zip(
          self.group.trajectories, self.rewards, strict=True
        )
      ),
      failures=tuple(self.failures),
    )

  def _skip_aborted(self) -> None:
    for trajectory in self.group.trajectories[len(self.rewards) :]:
      if trajectory.finish is not Finish.ABORTED:
        return
      self.rewards.append(None)
      self.failures.append("aborted")


class _Worker:
  """A worker process, and JSON lines to and from it.

  Attributes:
    scratch: A folder of its own that it leaves behind; empty if there is none.

  ``kill`` and ``reap`` may be called from any thread, the rest only from the
  one that made it (which Linux ties the process's life to).
  """

  def __init__(self):
    self.scratch = ""
    # A session of its own: Ctrl-C does not reach it before it reaches us, and
    # without Linux whatever it starts is killed with it.
    self._process = subprocess.Popen(
      # -P: the working directory is not searched for modules.
      [sys.executable, "-P", "-m", "darl_jax.rewards.worker"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      env=_environment(),
      start_new_session=True,
      bufsize=0,
    )
    self._unsent = b""
    self._unread = bytearray()
    self._stderr = bytearray()
    self._ended = False  # Its stdout has ended.
    self._disposed = False
    self._selector = selectors.DefaultSelector()
    for pipe, read in (
      (self._process.stdout, self._read_stdout),
      (self._process.stderr, self._read_stderr),
    ):
      os.set_blocking(pipe.fileno(), False)
      self._selector.register(pipe, selectors.EVENT_READ, read)
    os.set_blocking(self._process.stdin.fileno(), False)

  def alive(self) -> bool:
    return self._process.poll() is None

  def send(self, message: Any) -> None:
    """Queues a message; ``receive`` writes it, and never blocks on it."""
    self._unsent += json.dumps(message).encode("ascii") + b"\n"
    with contextlib.suppress(KeyError):
      self._selector.unregister(self._process.stdin)
    self._selector.register(
      self._process.stdin, selectors.EVENT_WRITE, self._write_stdin
    )

  def receive(self, limit_s: float) -> Any:
    """The next message.

    Raises:
      _TimedOutError: If it does not come within ``limit_s`` seconds.
      _DiedError: If it will never come.
    """
    deadline = time.monotonic() + limit_s
    line = self._next_line()
    while line is None:
      left = deadline - time.monotonic()
      over = not self.alive()
      self._pump(0 if over else min(max(left, 0), _LOOK_S))
      line = self._next_line()
      if line is not None:
        break
      if self._ended or over:
        raise _DiedError(self._obituary())
      # Only after a last look: this thread may be what came late.
      if left <= 0:
        raise _TimedOutError
    try:
      return json.loads(line)
    except ValueError as error:
      raise _DiedError(f"it wrote {line[:80]!r}") from error

  def kill(self) -> None:
    """Kills the process and whatever it started."""
    if self._disposed:
      return  # Its number may be another process's by now.
    if sys.platform == "linux":
      self._process.terminate()  # It kills and buries the rest; see sandbox.py.
    else:
      self._kill_group()

  def reap(self) -> None:
    """Waits for the process to end; briefly, as it should at once."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(timeout=1.0)

  def dispose(self) -> None:
    """Kills and reaps the process, and removes what led to it."""
    self.kill()
    self.reap()
    if self.alive():
      self._kill_group()
      self.reap()
    self._disposed = True
    if self.scratch:
      # Hostile depth and rights may keep a part of it.
      with contextlib.suppress(RecursionError):
        shutil.rmtree(self.scratch, ignore_errors=True)
    self._selector.close()
    for pipe in (
      self._process.stdin,
      self._process.stdout,
      self._process.stderr,
    ):
      pipe.close()

  def stderr(self) -> str:
    """The end of what it wrote to stderr."""
    return self._stderr.decode(errors="replace").strip()

  def _kill_group(self) -> None:
    # Permission: how macOS says that only a zombie is left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self._process.pid, signal.SIGKILL)

  def _pump(self, wait_s: float) -> None:
    """Moves whatever bytes can be moved, after waiting at most ``wait_s``."""
    for key, _ in self._selector.select(wait_s):
      key.data()

  def _next_line(self) -> bytes | None:
    end = self._unread.find(b"\n")
    if end < 0:
      return None
    line = bytes(self._unread[:end])
    del self._unread[: end + 1]
    return line

  def _read_stdout(self) -> None:
    chunk = self._process.stdout.read(65536)
    if chunk:
      self._unread += chunk
    elif chunk is not None:
      self._ended = True
      self._selector.unregister(self._process.stdout)

  def _read_stderr(self) -> None:
    chunk = self._process.stderr.read(65536)
    if chunk:
      self._stderr += chunk
      del self._stderr[:-_STDERR_BYTES]
    elif chunk is not None:
      self._selector.unregister(self._process.stderr)

  def _write_stdin(self) -> None:
    try:
      written = self._process.stdin.write(self._unsent[:65536])
    except BrokenPipeError:
      written = len(self._unsent)  # It died, which its stdout will tell.
    self._unsent = self._unsent[written or 0 :]
    if not self._unsent:
      self._selector.unregister(self._process.stdin)

  def _obituary(self) -> str:
    """How it ended, and its last words."""
    self.reap()  # Its stdout ends a little before it does.
    self.kill()  # Or it closed its stdout and lives on.
    self.reap()
    self._pump(0)
    code = self._process.returncode
    how = f"exit code {code}"
    if code is not None and code < 0:
      how = f"killed by {signal.Signals(-code).name}"
    last_words = self.stderr().rpartition("\n")[2][:200]
    return f"{how}: {last_words}" if last_words else how


def _environment() -> dict[str, str]:
  """A worker's environment: little, but it can import what we can."""
  kept = {
    name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ
  }
  threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
  path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
  return (
    kept
    | dict.fromkeys(threads, "1")
    | {"MPLBACKEND": "Agg", "PYTHONPATH": path}
  )
