"""The thread that generates while the learner trains."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from darl_jax.rollout.engine import Engine, EngineStats
from darl_jax.types import PolicySnapshot, Prompt, TrajectoryGroup


class _Stopped(Exception):
  """The run ended while groups were being generated."""


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
      engine: Generates; nobody else uses it.
      prompts: Batches of prompts, without end.
      exclusive: Held while programs are dispatched; the last may still run
        when it is let go. Whoever else runs programs on the rollout mesh holds
        it too: devices that meet programs with collectives in different orders
        wait for each other for ever.
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
    self._drawn = self._delivered = 0

  def start(self) -> None:
    self._thread.start()

  def stop(self, timeout_s: float = 8.0) -> None:
    """Ends the thread; the chunk that it has begun is of no use then.

    Groups in flight are given up: their prompts stay counted as in flight.

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

  def generate(self) -> EngineStats:
    """One batch, in the calling thread: the whole stage when synchronous."""
    first_group_id, prompts = self._draw()
    with self._exclusive:
      groups, stats = self._engine.generate(
        prompts, first_group_id=first_group_id, fetch=self._fetch_unless_stopped
      )
    self._hand_on(groups)
    return stats

  def compiles(self) -> dict[str, int]:
    """How often each program of the sampler was compiled."""
    return self._engine.compiles()

  def metrics(self) -> dict[str, float]:
    """Counts since the start; prompts in flight are drawn, not delivered."""
    stats = self._engine.stats
    with self._lock:
      return {
        "rollout/prompts_drawn": self._drawn,
        "rollout/prompts_in_flight": self._drawn - self._delivered,
        "rollout/tokens": stats.tokens,
        "rollout/aborted_tokens": stats.aborted_tokens,
        "rollout/slot_occupancy": stats.slot_occupancy,
        "rollout/prefix_hits": stats.prefix_hits,
        "rollout/preemptions": stats.preemptions,
        "rollout/swaps": stats.swaps,
        "rollout/seconds": stats.seconds,
      }

  def _draw(self) -> tuple[int, Sequence[Prompt]]:
    """The next batch of prompts, and the number of its first group."""
    prompts = next(self._prompts)
    with self._lock:
      first_group_id = self._drawn
      self._drawn += len(prompts)
    return first_group_id, prompts

  def _hand_on(self, groups: Sequence[TrajectoryGroup]) -> None:
    self._deliver(groups)
    with self._lock:
      self._delivered += len(groups)

  def _fetch_unless_stopped(self) -> PolicySnapshot:
    if self._stop.is_set():
      raise _Stopped
    return self._fetch()

  def _run(self) -> None:
    engine = self._engine
    try:
      while not self._stop.is_set():
        # Waits for room only where there is nothing to do meanwhile.
        patience = 0.0 if engine.pending else 0.1
        size = engine.config.prompts_per_batch
        if engine.free_slots and self._reserve(size, patience):
          first_group_id, prompts = self._draw()
          for index, prompt in enumerate(prompts):
            engine.submit(prompt, first_group_id + index)
        if engine.pending:
          with self._exclusive:
            groups = engine.step(self._fetch_unless_stopped())
          if groups:
            self._hand_on(groups)
    except _Stopped:
      pass  # Asked for.
    except BaseException as error:  # Whoever waits for us must see it.
      self._fail(error)
    finally:
      engine.give_up()
