"""The thread that generates while the learner trains."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from darl_jax.rollout.engine import Engine, GenerateStats
from darl_jax.types import PolicySnapshot, Prompt, TrajectoryGroup


class _Stopped(Exception):
  """The run ended while a batch was being generated."""


class Actor:
  """Draws prompts, generates, and hands the groups on, until stopped.

  An exception in the thread goes to ``fail`` at once; the thread then ends.
  """

  def __init__(
    self,
    engine: Engine,
    prompts: Iterator[Sequence[Prompt]],
    *,
    exclusive: contextlib.AbstractContextManager,
    fetch: Callable[[], PolicySnapshot],
    reserve: Callable[[int, float], bool],
    deliver: Callable[[Sequence[TrajectoryGroup]], None],
    fail: Callable[[BaseException], None],
  ):
    """Starts nothing yet.

    Args:
      engine: Generates one batch at a time.
      prompts: Batches of prompts, without end.
      exclusive: Held while generating. Whoever else runs programs on the
        rollout mesh holds it too: devices that meet programs with collectives
        in different orders wait for each other for ever.
      fetch: The newest snapshot on the rollout mesh.
      reserve: Asks for room for a number of groups, waiting at most so many
        seconds; true once granted.
      deliver: Takes unverified groups.
      fail: Takes what went wrong.
    """
    self._engine = engine
    self._prompts = prompts
    self._exclusive = exclusive
    self._fetch = fetch
    self._reserve = reserve
    self._deliver = deliver
    self._fail = fail
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, name="actor", daemon=True)
    self._lock = threading.Lock()
    self._drawn = self._delivered = self._tokens = self._swaps = 0
    self._seconds = 0.0

  def start(self) -> None:
    self._thread.start()

  def stop(self, timeout_s: float = 8.0) -> None:
    """Ends the thread after the chunk that it is decoding.

    The batch in flight is given up: its prompts stay counted as in flight.

    Raises:
      TimeoutError: It is still generating after ``timeout_s``.
    """
    self._stop.set()
    if self._thread.ident is not None:
      self._thread.join(timeout_s)
    if self._thread.is_alive():
      raise TimeoutError(
        f"the actor is still generating {timeout_s:g} s after it was asked to "
        "stop"
      )

  def generate(self) -> GenerateStats:
    """One batch, in the calling thread: the whole stage when synchronous."""
    prompts = next(self._prompts)
    with self._lock:
      first_group_id = self._drawn
      self._drawn += len(prompts)
    with self._exclusive:
      groups, stats = self._engine.generate(
        prompts, first_group_id=first_group_id, fetch=self._fetch_unless_stopped
      )
    self._deliver(groups)
    with self._lock:
      self._delivered += len(groups)
      self._tokens += stats.tokens
      self._swaps += stats.swaps
      self._seconds += stats.seconds
    return stats

  def compiles(self) -> dict[str, int]:
    """How often each program of the sampler was compiled."""
    return self._engine.decoder.compiles()

  def metrics(self) -> dict[str, float]:
    """Counts since the start; prompts in flight are drawn, not delivered."""
    with self._lock:
      return {
        "rollout/prompts_drawn": self._drawn,
        "rollout/prompts_in_flight": self._drawn - self._delivered,
        "rollout/tokens": self._tokens,
        "rollout/swaps": self._swaps,
        "rollout/seconds": self._seconds,
      }

  def _fetch_unless_stopped(self) -> PolicySnapshot:
    if self._stop.is_set():
      raise _Stopped
    return self._fetch()

  def _run(self) -> None:
    try:
      size = self._engine.config.prompts_per_batch
      while not self._stop.is_set():
        if self._reserve(size, 0.1):
          self.generate()
    except _Stopped:
      pass  # Asked for.
    except BaseException as error:  # Whoever waits for us must see it.
      self._fail(error)
