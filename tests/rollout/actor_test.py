"""The thread that generates: it counts, it stops, and it does not die alone."""

import contextlib
import itertools
import threading
import time

import numpy as np
from absl.testing import parameterized

from darl_jax.config import RolloutConfig
from darl_jax.rollout.actor import Actor
from darl_jax.rollout.engine import EngineStats
from darl_jax.types import PolicySnapshot, Prompt, TrajectoryGroup

_BATCH = 3


class _Engine:
  """Stands in for the engine: groups take as many rounds as it is told.

  ``lengths`` are those of groups 0, 1, 2, ... and so on, repeated.
  """

  def __init__(self, *, slots=_BATCH, lengths=(4,), round_s=0.0, error_at=None):
    self.config = RolloutConfig(
      prompts_per_batch=_BATCH,
      samples_per_prompt=1,
      max_response_tokens=4,
      chunk_tokens=1,
      slots=slots,
      cache_tokens=0,
      prefill_tokens=1,
      extra_samples=0,
      weight_update="swap",
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      min_p=0.0,
      stop_strings=(),
      dtype="float32",
      cache_dtype="",
    )
    self.stats = EngineStats()
    self.rounds = 0
    self.submitted = []
    self.fetched = []
    self.threads = set()
    self._lengths = lengths
    self._round_s = round_s
    self._error_at = error_at
    self._left = {}

  @property
  def pending(self):
    return len(self._left)

  @property
  def free_slots(self):
    return max(self.config.slots - len(self._left), 0)

  def compiles(self):
    return {"prefill": 1, "decode": 2}

  def submit(self, prompt, group_id):
    self.submitted.append(group_id)
    rounds = self._lengths[group_id % len(self._lengths)]
    self._left[group_id] = [prompt, rounds]

  def step(self, snapshot):
    self.threads.add(threading.current_thread().name)
    self.fetched.append(snapshot.version)
    self.rounds += 1
    if self.rounds == self._error_at:
      raise ZeroDivisionError("the device is gone")
    time.sleep(self._round_s)
    done = []
    for group_id, (prompt, left) in [*self._left.items()][: self.config.slots]:
      self._left[group_id][1] -= 1
      if left == 1:
        del self._left[group_id]
        done.append(TrajectoryGroup(group_id, prompt, ()))
    self.stats = self.stats.plus(tokens=2 * len(done), slot_tokens=_BATCH)
    return done

  def generate(self, prompts, *, first_group_id, fetch):
    before = self.stats
    for index, prompt in enumerate(prompts):
      self.submit(prompt, first_group_id + index)
    groups = []
    while self.pending:
      groups += self.step(fetch())
    return groups, self.stats.since(before)

  def give_up(self):
    self._left = {}


class _Harness:
  """An actor and what it did."""

  def __init__(self, engine, *, batches=10**6, prompts=None, **changes):
    self.engine = engine
    self.delivered = []
    self.deliveries = []
    self.reserved = []
    self.errors = []
    self.failed = threading.Event()
    prompt = Prompt("p", np.array([1], np.int32), {})
    self.granted = 0
    self.room = threading.Event()
    self.room.set()

    def reserve(count, timeout_s):
      self.reserved.append((count, timeout_s, engine.pending))
      if self.granted < batches and self.room.wait(timeout_s):
        self.granted += 1
        return True
      time.sleep(min(timeout_s, 0.01))
      return False

    def deliver(groups):
      self.delivered.extend(g.group_id for g in groups)
      self.deliveries.append([g.group_id for g in groups])

    def fail(error):
      self.errors.append(error)
      self.failed.set()

    arguments = dict(
      exclusive=contextlib.nullcontext(),
      fetch=lambda: PolicySnapshot(0, {}),
      reserve=reserve,
      deliver=deliver,
      fail=fail,
    )
    self.actor = Actor(
      engine,
      itertools.repeat([prompt] * _BATCH) if prompts is None else prompts,
      **arguments | changes,
    )


def _wait_until(condition, timeout_s=5.0):
  deadline = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < deadline, "waited in vain"
    time.sleep(0.005)


def _raise(error):
  raise error


class CountsTest(parameterized.TestCase):
  def test_batches_are_numbered_counted_and_handed_on(self):
    engine = _Engine()
    harness = _Harness(engine, batches=4)
    harness.actor.start()
    _wait_until(lambda: len(harness.delivered) == 4 * _BATCH)
    harness.actor.stop()
    self.assertEqual(engine.submitted, [*range(12)])
    self.assertEqual(harness.delivered, [*range(12)])
    metrics = harness.actor.metrics()
    self.assertEqual(metrics["rollout/prompts_drawn"], 12)
    self.assertEqual(metrics["rollout/prompts_in_flight"], 0)
    self.assertEqual(metrics["rollout/tokens"], 24)
    self.assertEqual(metrics["rollout/slot_occupancy"], 24 / 48)
    # Room is asked for by the batch, and never for long.
    for count, timeout_s, _ in harness.reserved:
      self.assertEqual(count, _BATCH)
      self.assertLessEqual(timeout_s, 0.5)

  def test_all_of_the_engines_counts_are_reported(self):
    engine = _Engine()
    engine.stats = EngineStats(
      tokens=1,
      aborted_tokens=2,
      aborted=3,
      slot_tokens=4,
      prefill_tokens=5,
      prefix_hits=6,
      preemptions=7,
      swaps=8,
      chunks=9,
      seconds=10.0,
    )
    self.assertEqual(
      _Harness(engine).actor.metrics(),
      {
        "rollout/prompts_drawn": 0,
        "rollout/prompts_in_flight": 0,
        "rollout/tokens": 1,
        "rollout/aborted_tokens": 2,
        "rollout/slot_occupancy": 0.25,
        "rollout/prefix_hits": 6,
        "rollout/preemptions": 7,
        "rollout/swaps": 8,
        "rollout/seconds": 10.0,
      },
    )

  def test_synchronous_generation_needs_no_thread(self):
    harness = _Harness(_Engine())
    stats = harness.actor.generate()
    self.assertEqual(stats.tokens, 2 * _BATCH)
    self.assertEqual(harness.delivered, [0, 1, 2])
    harness.actor.generate()
    self.assertEqual(harness.delivered, [*range(6)])
    self.assertEqual(harness.reserved, [])
    harness.actor.stop()  # Never started.
    metrics = harness.actor.metrics()
    self.assertEqual(metrics["rollout/prompts_drawn"], 2 * _BATCH)
    self.assertEqual(metrics["rollout/prompts_in_flight"], 0)

  def test_compiles(self):
    harness = _Harness(_Engine())
    self.assertEqual(harness.actor.compiles(), {"prefill": 1, "decode": 2})

  def test_the_newest_snapshot_is_asked_for_before_every_round(self):
    versions = itertools.count()
    engine = _Engine()
    harness = _Harness(
      engine, batches=1, fetch=lambda: PolicySnapshot(next(versions), {})
    )
    harness.actor.start()
    _wait_until(lambda: len(harness.delivered) == _BATCH)
    harness.actor.stop()
    self.assertEqual(engine.fetched, [0, 1, 2, 3])
    self.assertEqual(engine.threads, {"actor"})

  def test_programs_run_in_exclusion(self):
    """And nothing else is done in it: the learner waits for it."""
    held = threading.Lock()
    engine = _Engine()
    seen = []

    def watched(name, function):
      def watch(*args, **kwargs):
        seen.append((name, held.locked()))
        return function(*args, **kwargs)

      return watch

    engine.step = watched("step", engine.step)
    harness = _Harness(
      engine,
      exclusive=held,
      deliver=watched("deliver", lambda groups: None),
      reserve=watched("reserve", lambda *_: True),
    )
    harness.actor.start()
    _wait_until(lambda: engine.rounds >= 8)
    harness.actor.stop()
    self.assertContainsSubset(
      {("step", True), ("deliver", False), ("reserve", False)}, set(seen)
    )
    self.assertLen(set(seen), 3)


class FlowTest(parameterized.TestCase):
  def test_groups_are_handed_on_as_they_end(self):
    harness = _Harness(_Engine(lengths=(5, 1, 3)), batches=1)
    harness.actor.start()
    _wait_until(lambda: len(harness.delivered) == _BATCH)
    harness.actor.stop()
    self.assertEqual(harness.deliveries, [[1], [2], [0]])

  def test_slots_that_are_free_are_filled_meanwhile(self):
    engine = _Engine(lengths=(20, 2, 2))
    harness = _Harness(engine, batches=4)
    harness.actor.start()
    _wait_until(lambda: len(harness.delivered) == 4 * _BATCH)
    harness.actor.stop()
    # The first group of the first batch ends after all of the second.
    order = harness.delivered
    self.assertLess(order.index(4), order.index(0))
    self.assertLess(order.index(5), order.index(0))

  def test_no_more_is_drawn_than_there_are_slots_for(self):
    engine = _Engine(slots=2 * _BATCH, lengths=(3, 4, 5))
    harness = _Harness(engine, batches=6)
    harness.actor.start()
    _wait_until(lambda: len(harness.delivered) == 6 * _BATCH)
    harness.actor.stop()
    # Nobody was asked for room while all slots were taken.
    pending = [pending for _, _, pending in harness.reserved]
    self.assertLess(max(pending), 2 * _BATCH)
    self.assertIn(_BATCH, pending)

  def test_it_decodes_on_while_there_is_no_room(self):
    engine = _Engine(lengths=(50, 1, 1))
    harness = _Harness(engine, batches=1)
    harness.actor.start()
    _wait_until(lambda: len(harness.delivered) == _BATCH)
    _wait_until(lambda: harness.reserved[-1][2] == 0)
    harness.actor.stop()
    self.assertEqual(engine.rounds, 50)
    # Without patience while something was in flight, and with some else.
    for _, timeout_s, pending in harness.reserved:
      self.assertEqual(timeout_s > 0, pending == 0)

  def test_it_waits_for_room_without_spinning(self):
    engine = _Engine()
    harness = _Harness(engine)
    harness.room.clear()
    harness.actor.start()
    time.sleep(0.5)
    asked = len(harness.reserved)
    self.assertBetween(asked, 1, 7)
    self.assertEqual(engine.rounds, 0)
    self.assertEqual(harness.actor.metrics()["rollout/prompts_drawn"], 0)
    harness.room.set()
    _wait_until(lambda: harness.delivered)
    harness.actor.stop()


class FailureTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("engine", dict(error_at=2), {}),
    ("fetch", {}, dict(fetch=lambda: _raise(ZeroDivisionError()))),
    ("reserve", {}, dict(reserve=lambda *_: _raise(ZeroDivisionError()))),
    ("deliver", {}, dict(deliver=lambda _: _raise(ZeroDivisionError()))),
    ("prompts", {}, dict(prompts=map(lambda _: 1 // 0, itertools.count()))),
  )
  def test_an_exception_goes_to_fail_within_a_second(self, engine, changes):
    harness = _Harness(_Engine(**engine), **changes)
    harness.actor.start()
    self.assertTrue(harness.failed.wait(1.0))
    self.assertLen(harness.errors, 1)
    self.assertIsInstance(harness.errors[0], ZeroDivisionError)
    # The thread has ended: there is nothing to wait for.
    harness.actor.stop(timeout_s=1.0)
    self.assertLen(harness.errors, 1)
    self.assertEqual(harness.engine.pending, 0)

  def test_prompts_that_end_are_a_failure(self):
    harness = _Harness(_Engine(), prompts=iter(()))
    harness.actor.start()
    self.assertTrue(harness.failed.wait(1.0))
    self.assertIsInstance(harness.errors[0], StopIteration)

  def test_a_failed_batch_stays_in_flight(self):
    harness = _Harness(_Engine(error_at=5))
    harness.actor.start()
    self.assertTrue(harness.failed.wait(1.0))
    harness.actor.stop()
    metrics = harness.actor.metrics()
    self.assertEqual(metrics["rollout/prompts_drawn"], 2 * _BATCH)
    self.assertEqual(metrics["rollout/prompts_in_flight"], _BATCH)

  def test_what_was_not_delivered_stays_in_flight(self):
    def deliver(groups):
      raise ZeroDivisionError

    harness = _Harness(_Engine(lengths=(1, 4)), deliver=deliver)
    harness.actor.start()
    self.assertTrue(harness.failed.wait(1.0))
    harness.actor.stop()
    metrics = harness.actor.metrics()
    self.assertEqual(metrics["rollout/prompts_in_flight"], _BATCH)


class StopTest(parameterized.TestCase):
  def test_ends_between_chunks_of_a_batch(self):
    engine = _Engine(round_s=0.1)
    harness = _Harness(engine)
    harness.actor.start()
    _wait_until(lambda: engine.rounds == 4 + 2)
    harness.actor.stop(timeout_s=2.0)
    # The second batch was given up after the chunk that was running.
    self.assertEqual(engine.rounds, 4 + 2)
    self.assertEqual(harness.delivered, [0, 1, 2])
    self.assertEqual(harness.errors, [])
    self.assertEqual(
      harness.actor.metrics()["rollout/prompts_in_flight"], _BATCH
    )
    # The engine is free for others.
    self.assertEqual(engine.pending, 0)

  def test_ends_while_there_is_no_room(self):
    harness = _Harness(_Engine(), batches=0)
    harness.actor.start()
    _wait_until(lambda: harness.reserved)
    harness.actor.stop(timeout_s=1.0)
    self.assertEqual(harness.delivered, [])
    self.assertEqual(harness.errors, [])

  def test_twice(self):
    harness = _Harness(_Engine(), batches=1)
    harness.actor.start()
    harness.actor.stop()
    harness.actor.stop()

  def test_a_chunk_that_never_ends_is_reported(self):
    release = threading.Event()
    harness = _Harness(
      _Engine(), fetch=lambda: release.wait(10.0) and PolicySnapshot(0, {})
    )
    harness.actor.start()
    _wait_until(lambda: harness.actor.metrics()["rollout/prompts_drawn"] > 0)
    with self.assertRaisesRegex(TimeoutError, "still generating 0.05 s"):
      harness.actor.stop(timeout_s=0.05)
    release.set()
    harness.actor.stop()
