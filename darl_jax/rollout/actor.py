"""The thread that generates while the learner trains."""

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from darl_jax.rollout.engine import Engine, EngineState, EngineStats
from darl_jax.types import PolicySnapshot, Prompt, TrajectoryGroup


class PromptSource(Protocol):
  """Batches of prompts, without end, that can be gone on with."""

  def __next__(self) -> Sequence[Prompt]: ...

  def get_state(self) -> Any:
    """Where it stands: plain JSON data."""

  def set_state(self, state: Any) -> None:
    """Goes on from there."""


@dataclasses.dataclass(frozen=True)
class ActorState:
  """Where generation stands, so that it can be gone on with.

  Attributes:
    drawn: Groups drawn so far.
    in_flight: By group, the prompt's id: drawn and not delivered.
    prompts: Where the prompts' source stands; plain JSON data.
    engine: What the engine counted and remembers.
  """

  drawn: int
  in_flight: Mapping[int, str]
  prompts: Any
  engine: EngineState


class _Stopped(Exception):
  """The run ended while groups were being generated."""


class Actor:
  """Draws prompts, generates, and hands the groups on, until stopped.

  An exception in the thread goes to ``fail`` at once; the thread then ends.
  """

  def __init__(
    self,
    engine: Engine,
    prompts: PromptSource,
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
      prompts: What is drawn from.
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
    # Held while groups are drawn and while they are handed on.
    self._lock = threading.Lock()
    self._drawn = 0
    self._in_flight: dict[int, Prompt] = {}
    self._requeued: dict[int, Prompt] = {}  # Of those, not submitted yet.

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

  def submit(self) -> None:
    """Draws a batch of prompts and queues it: half a round of the thread."""
    first_group_id, prompts = self._draw()
    for index, prompt in enumerate(prompts):
      self._engine.submit(prompt, first_group_id + index)

  def advance(self) -> list[TrajectoryGroup]:
    """One chunk under the newest weights: the other half.

    Returns:
      Groups that are complete, to be handed on.
    """
    with self._exclusive:
      return self._engine.step(self._fetch_unless_stopped())

  def replay_round(self) -> list[TrajectoryGroup]:
    """``advance`` of a recorded round; what is requeued comes first."""
    if self._requeued:
      self.submit()
    groups = self.advance()
    with self._lock:
      for group in groups:
        del self._in_flight[group.group_id]
    return groups

  @contextlib.contextmanager
  def captured(self) -> Iterator[ActorState]:
    """Where generation stands; nothing is drawn or handed on meanwhile.

    What is captured inside, such as the ring, agrees with it: each group is
    either in flight here or delivered there.
    """
    with self._lock:
      yield ActorState(
        drawn=self._drawn,
        in_flight={i: prompt.id for i, prompt in self._in_flight.items()},
        # Whoever writes it does so while the source goes on.
        prompts=copy.deepcopy(self._prompts.get_state()),
        engine=self._engine.capture(),
      )

  def restore(self, state: ActorState, prompts: Mapping[str, Prompt]) -> None:
    """Goes on from there: what was in flight is generated first.

    Args:
      state: Of an actor with the same prompts.
      prompts: By id.

    Raises:
      KeyError: A prompt in flight is not among them.
    """
    self._prompts.set_state(state.prompts)
    self._engine.restore(state.engine)
    self._drawn = state.drawn
    self._in_flight = {i: prompts[key] for i, key in state.in_flight.items()}
    self._requeued = dict(self._in_flight)

  def compiles(self) -> dict[str, int]:
    """How often each program of the sampler was compiled."""
    return self._engine.compiles()

  def metrics(self) -> dict[str, float]:
    """Counts since the start; prompts in flight are drawn, not delivered."""
    stats = self._engine.stats
    with self._lock:
      return {
        "rollout/prompts_drawn": self._drawn,
        "rollout/prompts_in_flight": len(self._in_flight),
        "rollout/tokens": stats.tokens,
        "rollout/aborted_tokens": stats.aborted_tokens,
        "rollout/slot_occupancy": stats.slot_occupancy,
        "rollout/prefix_hits": stats.prefix_hits,
        "rollout/preemptions": stats.preemptions,
        "rollout/swaps": stats.swaps,
        "rollout/seconds": stats.seconds,
      }

  def _draw(self) -> tuple[int, Sequence[Prompt]]:
    """The next prompts to generate for, and the number of their first group.

    Those that were in flight when the run was saved come first, as many as are
    numbered in a row.
    """
    with self._lock:
      if self._requeued:
        first = next(iter(self._requeued))
        prompts = []
        while first + len(prompts) in self._requeued:
          prompts.append(self._requeued.pop(first + len(prompts)))
        return first, prompts
      prompts = next(self._prompts)
      first = self._drawn
      self._drawn += len(prompts)
      self._in_flight.update(enumerate(prompts, first))
    return first, prompts

  def _hand_on(self, groups: Sequence[TrajectoryGroup]) -> None:
    with self._lock:
      self._deliver(groups)
      for group in groups:
        del self._in_flight[group.group_id]

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
        # What was in flight when the run was saved is reserved already.
        if self._requeued or (
          engine.free_slots and self._reserve(size, patience)
        ):
          self.submit()
        if engine.pending:
          groups = self.advance()
          if groups:
            self._hand_on(groups)
    except _Stopped:
      pass  # Asked for.
    except BaseException as error:  # Whoever waits for us must see it.
      self._fail(error)
    finally:
      engine.give_up()
