"""The thread that generates: it counts, it stops, and it does not die alone."""

import contextlib
import itertools
import threading
import time

import numpy as np
from absl.testing import parameterized

from darl_jax.config import RolloutConfig
from darl_jax.rollout.actor import Actor
from darl_jax.rollout.engine import GenerateStats
from darl_jax.types import PolicySnapshot, Prompt, TrajectoryGroup

_BATCH, _CHUNKS = 3, 4


class _Decoder:
  def compiles(self):
    return {"prefill": 1, "decode": 1}


class _Engine:
  """Stands in for the engine: fetches before every chunk, then sleeps."""

  def __init__(self, *, chunk_s=0.0, error_at=None):
    self.config = RolloutConfig(
      prompts_per_batch=_BATCH,
      samples_per_prompt=1,
      max_response_tokens=4,
      chunk_tokens=1,
      temperature=1.0,
      dtype="float32",
    )
    self.decoder = _Decoder()
    self.chunks = 0
    self.first_group_ids = []
    self._chunk_s = chunk_s
    self._error_at = error_at

  def generate(self, prompts, *, first_group_id, fetch):
    self.first_group_ids.append(first_group_id)
    for _ in range(_CHUNKS):
      fetch()
      self.chunks += 1
      if self.chunks == self._error_at:
        raise ZeroDivisionError("the device is gone")
      time.sleep(self._chunk_s)
    groups = [
      TrajectoryGroup(first_group_id + i, prompt, ())
      for i, prompt in enumerate(prompts)
    ]
    return groups, GenerateStats(tokens=7, seconds=0.5, swaps=1)


class _Harness:
  """An actor and what it did."""

  def __init__(self, engine, *, batches=10**6, prompts=None, **changes):
    self.delivered = []
    self.reserved = []
    self.errors = []
    self.failed = threading.Event()
    self.some_delivered = threading.Event()
    prompt = Prompt("p", np.array([1], np.int32), {})
    self.granted = 0

    def reserve(count, timeout_s):
      self.reserved.append((count, timeout_s))
      if self.granted < batches:
        self.granted += 1
        return True
      time.sleep(min(timeout_s, 0.01))
      return False

    def deliver(groups):
      self.delivered.extend(groups)
      self.some_delivered.set()

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
    self.assertEqual(engine.first_group_ids, [0, 3, 6, 9])
    self.assertEqual([g.group_id for g in harness.delivered], [*range(12)])
    self.assertEqual(
      harness.actor.metrics(),
      {
        "rollout/prompts_drawn": 12,
        "rollout/prompts_in_flight": 0,
        "rollout/tokens": 28,
        "rollout/swaps": 4,
        "rollout/seconds": 2.0,
      },
    )
    # Room is asked for by the batch, and never for long.
    for count, timeout_s in harness.reserved:
      self.assertEqual(count, _BATCH)
      self.assertLessEqual(timeout_s, 0.5)

  def test_synchronous_generation_needs_no_thread(self):
    harness = _Harness(_Engine())
    stats = harness.actor.generate()
    self.assertEqual(stats.tokens, 7)
    self.assertLen(harness.delivered, _BATCH)
    self.assertEqual(harness.reserved, [])
    harness.actor.stop()  # Never started.
    self.assertEqual(harness.actor.metrics()["rollout/prompts_drawn"], _BATCH)

  def test_compiles(self):
    harness = _Harness(_Engine())
    self.assertEqual(harness.actor.compiles(), {"prefill": 1, "decode": 1})


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

  def test_prompts_that_end_are_a_failure(self):
    harness = _Harness(_Engine(), prompts=iter(()))
    harness.actor.start()
    self.assertTrue(harness.failed.wait(1.0))
    self.assertIsInstance(harness.errors[0], StopIteration)

  def test_a_failed_batch_stays_in_flight(self):
    harness = _Harness(_Engine(error_at=_CHUNKS + 1))
    harness.actor.start()
    self.assertTrue(harness.failed.wait(1.0))
    metrics = harness.actor.metrics()
    self.assertEqual(metrics["rollout/prompts_drawn"], 2 * _BATCH)
    self.assertEqual(metrics["rollout/prompts_in_flight"], _BATCH)


class StopTest(parameterized.TestCase):
  def test_ends_between_chunks_of_a_batch(self):
    engine = _Engine(chunk_s=0.1)
    harness = _Harness(engine)
    harness.actor.start()
    _wait_until(lambda: engine.chunks == _CHUNKS + 2)
    harness.actor.stop(timeout_s=2.0)
    # The second batch was given up after the chunk that was running.
    self.assertEqual(engine.chunks, _CHUNKS + 2)
    self.assertLen(harness.delivered, _BATCH)
    self.assertEqual(harness.errors, [])
    self.assertEqual(
      harness.actor.metrics()["rollout/prompts_in_flight"], _BATCH
    )

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
