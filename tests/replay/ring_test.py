"""The ring: fates, pacing, waiting, and accounts that always add up."""

import collections
import dataclasses
import itertools
import random
import sys
import threading
import time
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from darl_jax import config as config_lib
from darl_jax import types
from darl_jax.replay import accounting
from darl_jax.replay import ring as ring_lib
from darl_jax.sharding import transfer

PROMPT_TOKENS = 2
# Long enough for a loaded machine; no test waits for it unless it fails.
PATIENCE_S = 20.0
# The time-out of calls that must be woken up: running it out is a failure.
LONGER_S = 10 * PATIENCE_S


def make_config(**changes) -> config_lib.ReplayConfig:
  fields = dict(
    num_snapshots=4,
    max_staleness=8,
    max_uses=1,
    drop_overlong=False,
    metric="harmful",
    selection_mode="reject_worst",
    keep_fraction=0.5,
    reject_fraction=0.25,
    max_metric=float("inf"),
    min_batch=2,
    snapshot_bytes=2**20,
    trajectory_bytes=2**20,
    timeout_s=1.0,
  )
  return config_lib.ReplayConfig(**{**fields, **changes})


def make_ring(
  *, groups_per_version=4, truncated=False, shaping=None, **changes
) -> ring_lib.Ring:
  return ring_lib.Ring(
    make_config(**changes),
    advantage="group",
    reward_tolerance=1e-6,
    groups_per_version=groups_per_version,
    truncated=truncated,
    shaping=shaping,
  )


def snapshot(version: int, size: int = 4) -> types.PolicySnapshot:
  return types.PolicySnapshot(
    version, {"w": np.full(size, version, np.float32)}
  )


def trajectory(group_id, versions, *, finish=types.Finish.STOP, **changes):
  """One response token per entry of ``versions``, the first of which began."""
  begun_by = versions[0]
  sampled = list(versions) if finish is not types.Finish.ABORTED else []
  length = PROMPT_TOKENS + len(sampled)
  mask = np.arange(length) >= PROMPT_TOKENS
  fields = dict(
    prompt_id=f"p{group_id}",
    group_id=group_id,
    tokens=np.arange(length, dtype=np.int32),
    loss_mask=mask,
    behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
    behavior_entropy=np.where(mask, 0.7, 0).astype(np.float32),
    policy_version=np.array([begun_by] * PROMPT_TOKENS + sampled, np.int32),
    turn=np.zeros(length, np.int32),
    finish=finish,
  )
  return types.Trajectory(**{**fields, **changes})


def group_of(group_id, trajectories) -> types.TrajectoryGroup:
  prompt = types.Prompt(
    f"p{group_id}", np.arange(PROMPT_TOKENS, dtype=np.int32), {}
  )
  return types.TrajectoryGroup(group_id, prompt, tuple(trajectories))


def make_group(group_id, version, *, size=2, tokens=3):
  return group_of(
    group_id, [trajectory(group_id, [version] * tokens) for _ in range(size)]
  )


def verified(group, rewards, failures=()):
  return dataclasses.replace(
    group,
    trajectories=tuple(
      dataclasses.replace(t, reward=reward)
      for t, reward in zip(group.trajectories, rewards, strict=True)
    ),
    failures=tuple(failures),
  )


def push(ring, *groups, rewards=(0.0, 1.0)):
  """Generates and verifies groups."""
  ring.begin(groups)
  for group in groups:
    cycle = [rewards[i % len(rewards)] for i in range(len(group.trajectories))]
    ring.admit(verified(group, cycle))


def ids(pool):
  return [entry.id for entry in pool.entries]


class Background:
  """A call in another thread, whose outcome is asked for within a limit."""

  def __init__(self, call, *args):
    self.result = self.error = None

    def run():
      try:
        self.result = call(*args)
      except BaseException as error:  # Handed to the test by outcome().
        self.error = error

    self.thread = threading.Thread(target=run, daemon=True)
    self.thread.start()

  def still_waits(self, seconds=0.05) -> bool:
    self.thread.join(seconds)
    return self.thread.is_alive()

  def outcome(self, seconds=PATIENCE_S):
    self.thread.join(seconds)
    if self.thread.is_alive():
      raise AssertionError(f"still waiting after {seconds} s")
    if self.error is not None:
      raise self.error
    return self.result


class SnapshotTest(parameterized.TestCase):
  def test_copies_every_leaf_read_only(self):
    ring = make_ring()
    mine = np.zeros(3, np.float32)
    params = {"a": mine, "b": [jnp.ones(2), jnp.ones((), jnp.bfloat16)]}
    ring.push_snapshot(types.PolicySnapshot(7, params))
    mine[:] = 9
    held = ring.latest().params
    np.testing.assert_array_equal(held["a"], np.zeros(3))
    self.assertEqual(held["b"][1].dtype, jnp.bfloat16)
    for leaf in (held["a"], *held["b"]):
      self.assertIs(type(leaf), np.ndarray)
      with self.assertRaises(ValueError):
        leaf[...] = 1
    self.assertFalse(np.shares_memory(held["b"][0], params["b"][0]))

  def test_keeps_what_is_read_only_and_owns_its_data(self):
    ring = make_ring()
    params = {"a": jnp.ones(2), "b": jnp.ones((), jnp.bfloat16)}
    given = transfer.to_host(params, version=0)
    ring.push_snapshot(given)
    held = ring.latest().params
    for name in params:
      self.assertIs(held[name], given.params[name])

  def test_copies_views_and_subclasses_though_they_are_read_only(self):
    class Special(np.ndarray):
      pass

    mine = np.zeros(3, np.float32)
    view = mine[:]
    view.setflags(write=False)
    special = Special(3, np.float32)
    special[:] = 0
    special.setflags(write=False)
    self.assertTrue(special.flags.owndata)
    ring = make_ring()
    params = [view, special, np.asarray(jnp.zeros(3))]
    ring.push_snapshot(types.PolicySnapshot(0, params))
    mine[:] = 9
    for held, given in zip(ring.latest().params, params, strict=True):
      self.assertIs(type(held), np.ndarray)
      self.assertFalse(held.flags.writeable)
      self.assertFalse(np.shares_memory(held, given))
      np.testing.assert_array_equal(held, np.zeros(3))

  def test_a_donated_original_does_not_take_the_copy_with_it(self):
    ring = make_ring()
    original = jnp.arange(4.0)
    ring.push_snapshot(types.PolicySnapshot(0, original))
    original.delete()
    np.testing.assert_array_equal(ring.latest().params, np.arange(4.0))

  @parameterized.parameters(3, 2)
  def test_versions_must_increase(self, second):
    ring = make_ring()
    ring.push_snapshot(snapshot(3))
    with self.assertRaisesRegex(ValueError, f"snapshot {second} .* 3"):
      ring.push_snapshot(snapshot(second))
    self.assertEqual(ring.version, 3)

  def test_nothing_pushed_yet(self):
    ring = make_ring()
    for ask in (ring.latest, lambda: ring.version):
      with self.assertRaises(LookupError):
        ask()

  def test_holds_what_is_young_enough_for_late_samples(self):
    ring = make_ring(max_staleness=2)
    for version in range(5):
      ring.push_snapshot(snapshot(version))
    self.assertEqual(ring.occupancy().snapshots, (2, 3, 4))
    self.assertEqual(ring.snapshot(3).params["w"][0], 3)
    with self.assertRaisesRegex(KeyError, "snapshot 1 is not held.*2, 3, 4"):
      ring.snapshot(1)

  def test_budget_releases_slotless_ones_first_then_the_oldest(self):
    ring = make_ring(snapshot_bytes=3 * 16)
    for version in range(3):
      ring.push_snapshot(snapshot(version))
    push(ring, make_group(1, 0), make_group(2, 1))
    ring.push_snapshot(snapshot(3))  # 2 has no slot.
    self.assertEqual(ring.occupancy().snapshots, (0, 1, 3))
    ring.push_snapshot(snapshot(4))  # Neither has 3.
    self.assertEqual(ring.occupancy().snapshots, (0, 1, 4))
    ring.push_snapshot(snapshot(5, size=8))  # 32 bytes: 4 and one more go.
    self.assertEqual(ring.occupancy().snapshots, (1, 5))
    self.assertEqual(ring.occupancy().snapshot_bytes, 48)

  def test_the_newest_is_held_over_any_budget(self):
    ring = make_ring(snapshot_bytes=1)
    for version in range(3):
      ring.push_snapshot(snapshot(version))
    self.assertEqual(ring.occupancy().snapshots, (2,))


class BeginTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.ring = make_ring()
    self.ring.push_snapshot(snapshot(5))

  @parameterized.named_parameters(
    ("not_finite", [5, 5, 5, 5, 5], np.nan, "must be finite"),
    (
      "future",
      [5, 5, 5, 5, 6],
      0,
      "version 6, but the newest version is 5: their age is negative",
    ),
  )
  def test_takes_all_groups_or_none(self, versions, logprob, message):
    good = group_of(6, [trajectory(6, [4, 4, 5])])
    bad = dataclasses.replace(
      trajectory(7, [5] * 3),
      policy_version=np.array(versions, np.int32),
      behavior_logprobs=np.array([0, 0, 0, logprob, 0], np.float32),
    )
    with self.assertRaisesRegex(ValueError, "group 7, sample 1.*" + message):
      self.ring.begin([good, group_of(7, [trajectory(7, [5] * 3), bad])])
    self.assertEqual(self.ring.accounting().generated, 0)
    self.assertEqual(self.ring.occupancy().trajectory_bytes, 0)
    self.ring.begin([good])

  def test_refuses_a_sample_without_support_where_sampling_truncates(self):
    ring = make_ring(truncated=True)
    ring.push_snapshot(snapshot(5))
    with self.assertRaisesRegex(ValueError, "its support_mask is None"):
      ring.begin([group_of(1, [trajectory(1, [5] * 3)])])
    self.assertEqual(ring.accounting().generated, 0)

  def test_refuses_a_group_twice(self):
    push(self.ring, make_group(3, 5))
    for groups in ([make_group(3, 5)], [make_group(4, 5), make_group(4, 5)]):
      with self.assertRaisesRegex(ValueError, "was begun before"):
        self.ring.begin(groups)

  def test_refuses_samples_before_any_snapshot(self):
    with self.assertRaisesRegex(ValueError, "newest version is None"):
      make_ring().begin([make_group(0, 0)])

  @parameterized.parameters(1.0, True, np.int64(1), "1", None, ([1],))
  def test_refuses_to_admit_an_id_that_is_no_int(self, group_id):
    """Some are equal to that of the group which waits."""
    group = make_group(1, 5)
    self.ring.begin([group])
    odd = dataclasses.replace(verified(group, [0, 1]), group_id=group_id)
    with self.assertRaisesRegex(ValueError, "group .*: its id is a .* an int"):
      self.ring.admit(odd)
    self.ring.admit(verified(group, [0, 1]))

  @parameterized.parameters(-1, 2**31, 6.0, True, np.int32(6), "6", None)
  def test_refuses_a_version_that_no_token_can_have(self, version):
    for ring in (make_ring(), self.ring):
      with self.assertRaisesRegex(ValueError, "version must be an int from 0"):
        ring.push_snapshot(types.PolicySnapshot(version, {"w": np.ones(1)}))
    self.assertEqual(self.ring.version, 5)
    self.ring.push_snapshot(snapshot(2**31 - 1))

  def test_refuses_to_admit_what_does_not_wait(self):
    group = make_group(1, 5)
    with self.assertRaisesRegex(ValueError, "group 1 was not begun"):
      self.ring.admit(verified(group, [0, 1]))
    push(self.ring, group)
    with self.assertRaisesRegex(ValueError, "group 1 was admitted before"):
      self.ring.admit(verified(group, [0, 1]))
    self.ring.begin([make_group(2, 5)])
    with self.assertRaisesRegex(ValueError, "group 2 .* 2 samples and has 3"):
      self.ring.admit(verified(make_group(2, 5, size=3), [0, 1, 0]))
    with self.assertRaisesRegex(ValueError, "2 samples and 1 entries in fail"):
      self.ring.admit(verified(make_group(2, 5), [0, 1], ["timeout"]))
    self.ring.admit(verified(make_group(2, 5), [0, 1]))
    self.ring.accounting().check()

  def test_later_changes_of_the_arrays_change_nothing(self):
    group = make_group(1, 5)
    self.ring.begin([group])
    for sample in group.trajectories:
      for field in dataclasses.fields(sample):
        value = getattr(sample, field.name)
        if isinstance(value, np.ndarray):
          value[...] = 1
    self.ring.admit(verified(group, [0, 1]))
    for entry in self.ring.take(2, 1.0).entries:
      expected = trajectory(1, [5] * 3)
      for field in dataclasses.fields(expected):
        value = getattr(entry.trajectory, field.name)
        if isinstance(value, np.ndarray):
          np.testing.assert_array_equal(value, getattr(expected, field.name))
          with self.assertRaises(ValueError):
            value[...] = 0
          self.assertIsNone(value.base)  # It cannot change from below.
      self.assertEqual(entry.trajectory.reward, entry.id[1])


class FateTest(parameterized.TestCase):
  """Where samples go. Every test ends with accounts that add up."""

  def setUp(self):
    super().setUp()
    self.rings = []

  def tearDown(self):
    for ring in self.rings:
      ring.accounting().check()
    super().tearDown()

  def ring(self, *versions, **changes):
    ring = make_ring(**changes)
    self.rings.append(ring)
    for version in versions:
      ring.push_snapshot(snapshot(version))
    return ring

  def test_advantages_are_of_the_full_group(self):
    ring = self.ring(0)
    push(ring, make_group(1, 0, size=4), rewards=[1.0, 0.0, 0.0, 0.0])
    advantages = [entry.advantage for entry in ring.take(4, 1.0).entries]
    np.testing.assert_allclose(
      advantages, np.array([3, -1, -1, -1]) / np.sqrt(3), rtol=1e-6
    )
    self.assertEqual(advantages[0].dtype, np.float32)

  def test_failures_are_no_members_and_dropped_with_their_reason(self):
    ring = self.ring(0)
    group = make_group(1, 0, size=7)
    aborted = trajectory(1, [0], finish=types.Finish.ABORTED)
    group = group_of(1, [*group.trajectories, aborted])
    ring.begin([group])
    rewards = [1.0, 0.0, None, 0.5, None, float("nan"), 1.0, 1.0]
    failures = [None, None, "timeout", "crash: killed", None, None, None, None]
    ring.admit(verified(group, rewards, failures))
    pool = ring.take(3, 1.0)
    self.assertEqual(ids(pool), [(1, 0), (1, 1), (1, 6)])
    # 1, 0, 1: the mean is 2/3, and the population std sqrt(2)/3.
    np.testing.assert_allclose(
      [entry.advantage for entry in pool.entries],
      np.array([1, -2, 1]) / np.sqrt(2),
      rtol=1e-6,
    )
    self.assertEqual(
      ring.accounting().dropped,
      {
        "verifier_timeout": 1,
        "verifier_crash": 1,
        "no_reward": 1,
        "non_finite_reward": 1,
        "aborted": 1,
      },
    )
    self.assertEqual(pool.dead_tokens, 0)

  def test_dead_groups_leave_their_tokens_once(self):
    ring = self.ring(0)
    push(ring, make_group(1, 0, tokens=5), rewards=[1.0])
    push(ring, make_group(2, 0), make_group(3, 0, tokens=4))
    self.assertEqual(ring.accounting().dropped, {"dead_group": 2})
    pool = ring.take(1, 1.0)
    self.assertEqual(pool.dead_tokens, 10)
    # Taken and not trained on: they are still to come.
    pool = ring.take(1, 1.0)
    self.assertEqual(pool.dead_tokens, 10)
    # Those that arrive in between belong to the next step.
    push(ring, make_group(4, 0, tokens=2), rewards=[0.0])
    ring.mark_trained(pool.entries[:1], pool)
    ring.mark_trained(pool.entries[1:2], pool)
    self.assertEqual(ring.take(1, 1.0).dead_tokens, 4)
    self.assertEqual(ring.occupancy().dead_tokens, 4)

  def test_a_sample_at_the_mean_has_nothing_to_teach(self):
    ring = self.ring(0)
    push(ring, make_group(1, 0, size=3), rewards=[0.0, 0.5, 1.0])
    self.assertEqual(ids(ring.take(1, 1.0)), [(1, 0), (1, 2)])
    self.assertEqual(ring.accounting().dropped, {"zero_advantage": 1})
    self.assertEqual(ring.take(1, 1.0).dead_tokens, 3)

  def test_shaped_rewards_become_advantages(self):
    ring = self.ring(0, shaping=lambda lengths: -0.5 * (lengths > 2))
    group = group_of(1, [trajectory(1, [0] * n) for n in (1, 2, 3, 4)])
    ring.begin([group])
    ring.admit(verified(group, [1.0, None, 1.0, 0.0]))
    entries = ring.take(1, 1.0).entries
    self.assertEqual([e.trajectory.reward for e in entries], [1.0, 0.5, -0.5])
    rewards = np.array([1.0, 0.5, -0.5])
    np.testing.assert_allclose(
      [e.advantage for e in entries],
      (rewards - rewards.mean()) / rewards.std(),
      rtol=1e-6,
    )

  def _admit_cut(self, *rewards, **changes):
    ring = self.ring(0, **changes)
    finishes = (types.Finish.STOP, types.Finish.LENGTH, types.Finish.STOP)
    samples = [trajectory(1, [0, 0], finish=finish) for finish in finishes]
    push(ring, group_of(1, samples), rewards=rewards)
    return ring

  def test_answers_that_were_cut_are_dropped_and_count_in_their_group(self):
    ring = self._admit_cut(1.0, 0.0, 1.0, drop_overlong=True)
    self.assertEqual(ring.accounting().dropped, {"overlong": 1})
    pool, kept = ring.take(1, 1.0), self._admit_cut(1.0, 0.0, 1.0)
    self.assertEqual(ids(pool), [(1, 0), (1, 2)])
    self.assertEqual(ids(kept.take(1, 1.0)), [(1, 0), (1, 1), (1, 2)])
    self.assertEqual(
      [entry.advantage for entry in pool.entries],
      [kept.take(1, 1.0).entries[i].advantage for i in (0, 2)],
    )
    ring.accounting().check()

  def test_answers_that_were_cut_are_no_dead_tokens(self):
    ring = self._admit_cut(0.0, 0.0, 0.0, drop_overlong=True)
    self.assertEqual(
      ring.accounting().dropped, {"overlong": 1, "dead_group": 2}
    )
    self.assertEqual(ring.occupancy().dead_tokens, 4)

  def test_a_response_without_tokens_is_dropped(self):
    ring = self.ring(0)
    sample = trajectory(1, [0, 0], loss_mask=np.zeros(4, bool))
    push(ring, group_of(1, [sample, trajectory(1, [0, 0])]))
    self.assertEqual(ids(ring.take(1, 1.0)), [(1, 1)])
    self.assertEqual(ring.accounting().dropped, {"empty": 1})

  def test_publishing_evicts_nothing(self):
    ring = self.ring(0, 1, num_snapshots=2, max_staleness=8)
    push(ring, make_group(1, 0), make_group(2, 1))
    for version in range(2, 9):
      ring.push_snapshot(snapshot(version))
    self.assertLen(ring.try_take(1), 4)
    self.assertEqual([s.version for s in ring.occupancy().slots], [0, 1])

  def test_more_than_k_slots_evict_the_lowest(self):
    ring = self.ring(*range(4), num_snapshots=2)
    push(ring, make_group(1, 2), make_group(2, 0))
    self.assertLen(ring.try_take(1), 4)
    push(ring, make_group(3, 1))  # Late, but 0 is lower.
    self.assertEqual(ring.accounting().expired, {"evicted": 2})
    self.assertEqual(ids(ring.try_take(1)), [(1, 0), (1, 1), (3, 0), (3, 1)])
    push(ring, make_group(4, 0))  # Older than the full ring.
    self.assertEqual(
      ring.accounting().expired, {"evicted": 2, "older_than_ring": 2}
    )
    push(ring, make_group(5, 1))  # Its slot is open.
    self.assertLen(ring.try_take(1), 6)

  def test_late_samples_open_a_slot_of_a_ring_that_is_not_full(self):
    ring = self.ring(*range(4), num_snapshots=2)
    push(ring, make_group(1, 3))
    push(ring, make_group(2, 0))
    self.assertEqual([s.version for s in ring.occupancy().slots], [0, 3])

  def test_the_slot_is_that_of_the_policy_that_began(self):
    ring = self.ring(*range(4))
    push(ring, group_of(1, [trajectory(1, [1, 2, 3]), trajectory(1, [3])]))
    self.assertEqual([s.version for s in ring.occupancy().slots], [1, 3])
    self.assertEqual([e.age for e in ring.take(2, 1.0).entries], [2, 0])

  def test_staleness_at_both_ends(self):
    ring = self.ring(*range(4), max_staleness=2)
    push(ring, make_group(1, 0), make_group(2, 1), make_group(3, 2))
    self.assertEqual(ring.accounting().expired, {"stale_on_arrival": 2})
    self.assertEqual([e.age for e in ring.take(1, 1.0).entries], [2, 2, 1, 1])
    ring.push_snapshot(snapshot(4))
    self.assertEqual([e.age for e in ring.take(1, 1.0).entries], [2, 2])
    self.assertEqual(
      ring.accounting().expired, {"stale_on_arrival": 2, "stale": 2}
    )

  def test_stale_dead_groups_are_no_dead_tokens(self):
    ring = self.ring(0, 9, max_staleness=2)
    push(ring, make_group(1, 0), rewards=[1.0])
    self.assertEqual(ring.accounting().expired, {"stale_on_arrival": 2})
    self.assertEqual(ring.occupancy().dead_tokens, 0)

  def test_max_uses(self):
    ring = self.ring(0, max_uses=2)
    push(ring, make_group(1, 0, tokens=3))
    first = ring.take(2, 1.0)
    ring.mark_trained(first.entries[:1], first)
    second = ring.take(2, 1.0)
    self.assertEqual([entry.uses for entry in second.entries], [1, 0])
    accounts = ring.accounting()
    self.assertEqual((accounts.trained, accounts.in_ring_unused), (1, 1))
    ring.mark_trained(second.entries, second)
    self.assertEqual(ids(ring.take(1, 1.0)), [(1, 1)])
    self.assertEqual(ring.accounting().trained, 2)
    self.assertEqual(ring.occupancy().trained_tokens, 9)
    with self.assertRaisesRegex(ValueError, r"\(1, 0\) was .*max_uses = 2"):
      ring.mark_trained(second.entries[:1], second)

  def test_used_ones_leave_without_expiring(self):
    ring = self.ring(0, max_uses=2, max_staleness=1)
    push(ring, make_group(1, 0))
    pool = ring.take(2, 1.0)
    ring.mark_trained(pool.entries[:1], pool)
    ring.push_snapshot(snapshot(2))
    accounts = ring.accounting()
    self.assertEqual((accounts.trained, accounts.expired_unused), (1, 1))
    # The second use of one that left: still trained once.
    ring.mark_trained(pool.entries[:1], pool)
    self.assertEqual(ring.accounting().trained, 1)
    self.assertEqual(ring.occupancy().trajectory_bytes, 0)

  @parameterized.parameters("stale", "evicted", "bytes")
  def test_trained_after_it_left(self, how):
    budget = dict(trajectory_bytes=300) if how == "bytes" else {}
    ring = self.ring(0, 1, num_snapshots=1, max_staleness=5, **budget)
    push(ring, make_group(1, 0, tokens=3))
    pool = ring.take(2, 1.0)
    if how == "stale":
      ring.push_snapshot(snapshot(6))
    elif how == "evicted":
      push(ring, make_group(2, 1, tokens=3))
    else:
      push(ring, make_group(2, 0, tokens=3))
      push(ring, make_group(3, 0, tokens=3))
    accounts = ring.accounting()
    lost = {**accounts.expired, **accounts.dropped}
    self.assertGreaterEqual(lost[how], 2)
    ring.mark_trained(pool.entries, pool)
    accounts = ring.accounting()
    left = {**accounts.expired, **accounts.dropped}
    self.assertEqual(accounts.trained, 2)
    self.assertEqual(left.get(how, 0), lost[how] - 2)
    accounts.check()

  def test_marking_is_all_or_nothing(self):
    ring = self.ring(0)
    push(ring, make_group(1, 0))
    pool = ring.take(2, 1.0)
    first, second = pool.entries
    forged = dataclasses.replace(second, _record=None)
    for entries in ([first, first], [first, forged]):
      with self.assertRaises(ValueError):
        ring.mark_trained(entries, pool)
      self.assertEqual(ring.accounting().trained, 0)

  def test_bytes_drop_the_oldest_slots_used_ones_first(self):
    # 5 tokens of 21 bytes each: 105 bytes a sample.
    ring = self.ring(0, 1, max_uses=2, trajectory_bytes=4 * 105)
    push(ring, make_group(1, 1), make_group(2, 0))
    self.assertEqual(ring.occupancy().trajectory_bytes, 420)
    pool = ring.take(4, 1.0)
    ring.mark_trained([pool.entries[3]], pool)  # (2, 1), of the oldest slot.
    push(ring, make_group(3, 1, size=1))  # Dead, but held for a while.
    self.assertEqual(ids(ring.take(1, 1.0)), [(1, 0), (1, 1), (2, 0)])
    self.assertEqual(ring.accounting().dropped, {"dead_group": 1})
    push(ring, make_group(4, 1))
    self.assertEqual(ids(ring.take(1, 1.0)), [(1, 0), (1, 1), (4, 0), (4, 1)])
    push(ring, make_group(5, 1))
    self.assertEqual(ids(ring.take(1, 1.0)), [(4, 0), (4, 1), (5, 0), (5, 1)])
    self.assertEqual(ring.accounting().dropped, {"dead_group": 1, "bytes": 3})
    self.assertEqual(ring.occupancy().trajectory_bytes, 420)

  def test_bytes_of_what_awaits_verification_count(self):
    ring = self.ring(0, trajectory_bytes=3 * 105)
    push(ring, make_group(1, 0))
    ring.begin([make_group(2, 0)])
    self.assertEqual(ids(ring.take(1, 1.0)), [(1, 1)])
    self.assertEqual(ring.occupancy().trajectory_bytes, 315)

  def test_occupancy(self):
    ring = self.ring(0, 1, max_uses=2)
    push(ring, make_group(1, 0), make_group(2, 1, size=4))
    pool = ring.take(1, 1.0)
    ring.mark_trained(pool.entries[2:5], pool)
    first, second = ring.occupancy().slots
    self.assertEqual(
      first, accounting.SlotOccupancy(0, 1, 2, 2, num_bytes=2 * 105)
    )
    self.assertEqual(
      second, accounting.SlotOccupancy(1, 0, 4, 1, num_bytes=4 * 105)
    )


class PoolTest(parameterized.TestCase):
  def test_order_of_arrival_does_not_matter(self):
    groups = [make_group(g, g % 3, size=3) for g in range(12)]
    pools = []
    for seed in range(3):
      ring = make_ring(groups_per_version=99)
      for version in range(3):
        ring.push_snapshot(snapshot(version))
      shuffled = random.Random(seed).sample(groups, len(groups))
      push(ring, *shuffled, rewards=(0.0, 0.2, 1.0))
      pools.append(ring.take(1, 1.0))
    self.assertEqual(
      ids(pools[0]), [(g, i) for g in range(12) for i in (0, 1, 2)]
    )
    for pool in pools[1:]:
      self.assertEqual(ids(pool), ids(pools[0]))
      self.assertEqual(
        [entry.advantage for entry in pool.entries],
        [entry.advantage for entry in pools[0].entries],
      )

  def test_an_entry_is_as_it_was_when_taken(self):
    ring = make_ring(max_uses=3)
    ring.push_snapshot(snapshot(0))
    push(ring, make_group(1, 0))
    pool = ring.take(2, 1.0)
    ring.mark_trained(pool.entries, pool)
    ring.push_snapshot(snapshot(1))
    self.assertEqual((pool.version, pool.entries[0].uses), (0, 0))
    self.assertEqual(pool.entries[0].age, 0)
    again = ring.take(2, 1.0)
    self.assertEqual((again.version, again.entries[0].uses), (1, 1))
    self.assertEqual(again.entries[0].age, 1)
    with self.assertRaises(dataclasses.FrozenInstanceError):
      again.entries[0].uses = 0

  def test_try_take(self):
    ring = make_ring()
    ring.push_snapshot(snapshot(0))
    push(ring, make_group(1, 0))
    self.assertIsNone(ring.try_take(3))
    self.assertLen(ring.try_take(2), 2)


class WaitingTest(parameterized.TestCase):
  def test_take_waits_for_enough(self):
    ring = make_ring()
    ring.push_snapshot(snapshot(0))
    push(ring, make_group(1, 0))
    waiter = Background(ring.take, 4, LONGER_S)
    self.assertTrue(waiter.still_waits())
    push(ring, make_group(2, 0))
    self.assertLen(waiter.outcome(), 4)

  def test_reserve_paces(self):
    # Version 0 allows (0 + 1 + 1) * 4 groups, and each version 4 more.
    ring = make_ring(max_staleness=1, groups_per_version=4)
    self.assertFalse(ring.reserve(1, 0.0))  # Nothing to sample from.
    ring.push_snapshot(snapshot(10))
    self.assertTrue(ring.reserve(5, 0.0))
    self.assertFalse(ring.reserve(4, 0.0))
    self.assertTrue(ring.reserve(3, 0.0))
    waiter = Background(ring.reserve, 4, LONGER_S)
    self.assertTrue(waiter.still_waits())
    ring.push_snapshot(snapshot(11))
    self.assertTrue(waiter.outcome())
    self.assertFalse(ring.reserve(1, 0.0))
    state = ring.occupancy()
    self.assertEqual((state.groups_started, state.groups_allowed), (12, 12))
    self.assertGreater(state.reserve_wait_s, 0.04)

  def test_begun_groups_use_up_reservations_then_count_as_started(self):
    ring = make_ring(max_staleness=0, groups_per_version=4)
    ring.push_snapshot(snapshot(0))
    ring.reserve(2, 0.0)
    ring.begin([make_group(g, 0) for g in range(3)])
    state = ring.occupancy()
    self.assertEqual(state.groups_reserved, 0)
    self.assertEqual((state.groups_started, state.groups_awaiting), (3, 3))
    self.assertTrue(ring.reserve(1, 0.0))
    self.assertFalse(ring.reserve(1, 0.0))

  def test_never_starves_for_pacing(self):
    ring = make_ring(max_staleness=0, groups_per_version=1)
    ring.push_snapshot(snapshot(0))
    self.assertTrue(ring.reserve(1, 0.0))
    consumer = Background(ring.take, 2, LONGER_S)
    producer = Background(ring.reserve, 1, LONGER_S)
    # What is reserved, and then what awaits verification, is still to come.
    self.assertTrue(producer.still_waits())
    self.assertFalse(ring.reserve(1, 0.0))
    ring.begin([make_group(1, 0)])
    self.assertTrue(producer.still_waits())
    self.assertFalse(ring.reserve(1, 0.0))
    # It was dead: only now must more be started, and once.
    ring.admit(verified(make_group(1, 0), [1.0, 1.0]))
    self.assertTrue(producer.outcome())
    self.assertFalse(ring.reserve(1, 0.05))
    push(ring, make_group(2, 0))
    self.assertLen(consumer.outcome(), 2)
    # Nobody waits: pacing holds again.
    self.assertFalse(ring.reserve(1, 0.0))

  def test_a_served_consumer_does_not_starve(self):
    ring = make_ring(max_staleness=0, groups_per_version=1)
    ring.push_snapshot(snapshot(0))
    consumer = Background(ring.take, 2, LONGER_S)
    self.assertTrue(consumer.still_waits())
    with ring._condition:  # It cannot wake up yet.
      push(ring, make_group(1, 0))
      self.assertFalse(ring.reserve(1, 0.0))
    self.assertLen(consumer.outcome(), 2)

  def test_a_consumer_that_comes_later_wakes_the_paced_producer(self):
    ring = make_ring(max_staleness=0, groups_per_version=1)
    ring.push_snapshot(snapshot(0))
    ring.reserve(1, 0.0)
    push(ring, make_group(1, 0), rewards=[1.0])
    producer = Background(ring.reserve, 1, LONGER_S)
    self.assertTrue(producer.still_waits())
    consumer = Background(ring.take, 2, LONGER_S)
    self.assertTrue(producer.outcome())
    push(ring, make_group(2, 0))
    self.assertLen(consumer.outcome(), 2)

  @parameterized.parameters((1, 0), (1, 1), (2, 1))
  def test_threads_of_any_staleness_finish(self, num_snapshots, staleness):
    # Row 32 of the user reports: an age of 0 deadlocked. Most groups are dead,
    # so that pacing alone would starve the learner.
    ring = make_ring(
      num_snapshots=num_snapshots,
      max_staleness=staleness,
      groups_per_version=2,
    )
    ring.push_snapshot(snapshot(0))
    lot = random.Random(0)

    def produce():
      group_id = 0
      while ring.reserve(2, PATIENCE_S):
        version = ring.latest().version
        groups = [make_group(group_id + i, version) for i in range(2)]
        group_id += 2
        push(ring, *groups, rewards=[0.0, float(lot.random() < 0.4)])

    producer = Background(produce)
    for version in range(1, 16):
      pool = ring.take(4, PATIENCE_S)
      self.assertLessEqual(max(e.age for e in pool.entries), staleness)
      ring.mark_trained(pool.entries, pool)
      ring.push_snapshot(snapshot(version))
    ring.close()
    producer.outcome()
    ring.accounting().check()
    self.assertGreaterEqual(ring.accounting().trained, 4 * 15)

  def test_the_synchronous_loop_needs_no_thread(self):
    ring = make_ring(num_snapshots=1, max_staleness=0, groups_per_version=2)
    for version in range(5):
      ring.push_snapshot(snapshot(version))
      push(ring, make_group(2 * version, version))
      self.assertIsNone(ring.try_take(4))
      push(ring, make_group(2 * version + 1, version))
      pool = ring.try_take(4)
      ring.mark_trained(pool.entries, pool)
    self.assertEqual(ring.accounting().trained, 20)

  def test_starved_says_why(self):
    ring = make_ring(groups_per_version=99)
    for version in range(5):
      ring.push_snapshot(snapshot(version))
    push(ring, make_group(1, 4))
    push(ring, make_group(2, 4, size=3), rewards=[1.0])
    start = time.monotonic()
    with self.assertRaises(ring_lib.Starved) as caught:
      ring.take(5, 0.05)
    self.assertLess(time.monotonic() - start, 5)
    for text in (
      "after 0.05 s the ring holds 2 trainable trajectories, and 5 are needed",
      "version 4 (age 0): 2 trajectories, 2 unused",
      "generated 5 = trained 0",
      "dropped 3 (dead_group 3)",
      "replay.min_batch",
    ):
      self.assertIn(text, str(caught.exception))

  def test_starved_without_a_snapshot(self):
    with self.assertRaisesRegex(ring_lib.Starved, "no snapshot was pushed"):
      make_ring().take(1, 0.01)

  def test_an_error_reaches_whoever_waits_within_a_second(self):
    ring = make_ring(max_staleness=0, groups_per_version=1)
    ring.push_snapshot(snapshot(0))
    push(ring, make_group(0, 0))
    waiters = [
      Background(ring.take, 99, LONGER_S),
      Background(ring.take, 100, LONGER_S),
    ]
    self.assertTrue(all(waiter.still_waits() for waiter in waiters))
    error = OSError("the sampler is gone")
    ring.close(error)
    start = time.monotonic()
    for waiter in waiters:
      with self.assertRaisesRegex(
        ring_lib.RingFailed, "OSError: the sampler is gone"
      ) as caught:
        waiter.outcome()
      self.assertIs(caught.exception.__cause__, error)
    self.assertLess(time.monotonic() - start, 1)

  def test_an_error_reaches_the_waiting_producer(self):
    ring = make_ring(max_staleness=0, groups_per_version=1)
    ring.push_snapshot(snapshot(0))
    ring.reserve(1, 0.0)
    waiter = Background(ring.reserve, 1, LONGER_S)
    self.assertTrue(waiter.still_waits())
    ring.close(KeyboardInterrupt())
    with self.assertRaises(ring_lib.RingFailed):
      waiter.outcome(1.0)

  def test_an_error_reaches_whoever_comes_next(self):
    ring = make_ring()
    ring.push_snapshot(snapshot(0))
    push(ring, make_group(1, 0))
    ring.begin([make_group(2, 0)])
    pool = ring.take(2, 1.0)
    first = ValueError("first")
    ring.close(first)
    ring.close(ValueError("second"))
    ring.close()
    for call in (
      lambda: ring.take(1, 1.0),
      lambda: ring.try_take(1),
      lambda: ring.reserve(1, 1.0),
      lambda: ring.begin([make_group(3, 0)]),
      lambda: ring.admit(verified(make_group(2, 0), [0, 1])),
      ring.check,
    ):
      with self.assertRaises(ring_lib.RingFailed) as caught:
        call()
      self.assertIs(caught.exception.__cause__, first)
    # Those that only look still can, and a step that was taken is counted.
    ring.accounting().check()
    self.assertEqual((ring.latest().version, ring.version), (0, 0))
    ring.mark_trained(pool.entries, pool)
    ring.push_snapshot(snapshot(1))
    self.assertEqual(ring.accounting().trained, len(pool))
    self.assertEqual((ring.latest().version, ring.version), (1, 1))

  def test_plain_close_ends_waiting_and_keeps_the_accounts(self):
    ring = make_ring(max_staleness=0, groups_per_version=1)
    ring.push_snapshot(snapshot(0))
    ring.reserve(1, 0.0)
    producer = Background(ring.reserve, 1, LONGER_S)
    consumer = Background(ring.take, 2, LONGER_S)
    self.assertTrue(producer.still_waits() and consumer.still_waits())
    ring.close()
    self.assertFalse(producer.outcome(1.0))
    with self.assertRaises(ring_lib.RingClosed):
      consumer.outcome(1.0)
    ring.check()  # Nothing failed.
    ring.push_snapshot(snapshot(1))  # Pacing would allow it now.
    self.assertFalse(ring.reserve(1, LONGER_S))
    push(ring, make_group(1, 1))
    self.assertLen(ring.take(2, 0.0), 2)
    ring.accounting().check()

  def test_waits_do_not_hold_the_lock(self):
    ring = make_ring()
    waiter = Background(ring.take, 1, LONGER_S)
    self.assertTrue(waiter.still_waits())
    Background(ring.occupancy).outcome(5.0)
    ring.close()
    with self.assertRaises(ring_lib.RingClosed):
      waiter.outcome()

  def test_one_admission_too_few_does_not_wake_the_consumer(self):
    # 64 needless wake-ups a batch would cost more than the ring itself.
    ring = make_ring()
    ring.push_snapshot(snapshot(0))
    ring.reserve(8, 0.0)
    waiter = Background(ring.take, 8, LONGER_S)
    self.assertTrue(waiter.still_waits())
    with mock.patch.object(
      ring._condition, "notify_all", wraps=ring._condition.notify_all
    ) as notify:
      push(ring, *(make_group(g, 0) for g in range(3)))
      self.assertEqual(notify.call_count, 0)
      push(ring, make_group(3, 0))
    self.assertLen(waiter.outcome(), 8)


class Household:
  """A ring in use by several threads, with books of its own."""

  def __init__(self, **changes):
    self.changes = changes
    self.ring = make_ring(groups_per_version=99, **changes)
    self.ring.push_snapshot(snapshot(0))
    self.to_verify = collections.deque()
    self.group_ids = itertools.count()
    self.uses = collections.Counter()
    self.stop = threading.Event()

  def generate(self, lot):
    if len(self.to_verify) > 4:  # Else the backlog alone fills any budget.
      time.sleep(1e-4)
      return
    newest = self.ring.version
    count = lot.randrange(1, 4)
    self.ring.reserve(count, 0.0)
    groups = []
    for _ in range(count):
      group_id = next(self.group_ids)
      begun = max(0, newest - lot.randrange(4))
      groups.append(
        group_of(
          group_id,
          [
            trajectory(group_id, [begun, lot.randint(begun, newest)])
            for _ in range(lot.randrange(1, 4))
          ],
        )
      )
    self.ring.begin(groups)
    self.to_verify.extend(groups)

  def verify(self, lot):
    try:
      group = self.to_verify.popleft()
    except IndexError:
      time.sleep(1e-4)
      return
    size = len(group.trajectories)
    self.ring.admit(
      verified(
        group,
        [lot.choice([0.0, 0.5, 1.0, None]) for _ in range(size)],
        [lot.choice([None] * 5 + ["timeout"]) for _ in range(size)],
      )
    )

  def learn(self, lot):
    pool = self.ring.try_take(1)
    if pool is None:
      time.sleep(1e-4)
      return
    ages = [entry.age for entry in pool.entries]
    assert min(ages) >= 0 and max(ages) <= self.changes["max_staleness"]
    chosen = [entry for entry in pool.entries if lot.random() < 0.5]
    if lot.random() < 0.5:  # The race: entries leave before they are marked.
      self.ring.push_snapshot(snapshot(pool.version + lot.randrange(1, 3)))
    time.sleep(0)
    self.ring.mark_trained(chosen, pool)
    self.uses.update(entry.id for entry in chosen)

  def watch(self, lot):
    del lot
    self.ring.accounting().check()
    state = self.ring.occupancy()
    assert len(state.slots) <= self.changes["num_snapshots"]
    assert state.snapshots[-1] <= self.ring.version

  def is_eventful(self) -> bool:
    accounts = self.ring.accounting()
    counts = [accounts.trained, accounts.expired_unused]
    if "trajectory_bytes" in self.changes:
      counts.append(accounts.dropped.get("bytes", 0))
    return min(counts) > 50

  def run(self, seed: int):
    """Until enough has happened; then everything is verified."""

    def work(number, operation):
      lot = random.Random(f"{seed} {number}")
      while not self.stop.is_set():
        operation(lot)

    operations = [self.generate, self.generate, self.verify, self.verify]
    operations += [self.learn, self.watch]
    threads = [
      Background(work, number, operation)
      for number, operation in enumerate(operations)
    ]
    start = time.monotonic()
    while time.monotonic() - start < PATIENCE_S and not (
      time.monotonic() - start > 0.5 and self.is_eventful()
    ):
      time.sleep(0.05)
    self.stop.set()
    for thread in threads:
      thread.outcome()
    while self.to_verify:
      self.verify(random.Random(seed))


class InterleavingTest(parameterized.TestCase):
  """Random operations from several threads: the accounts hold at any moment."""

  def setUp(self):
    super().setUp()
    # Threads change often, so that they meet in the middle of things.
    self.addCleanup(sys.setswitchinterval, sys.getswitchinterval())
    sys.setswitchinterval(1e-5)

  @parameterized.parameters(
    dict(seed=0, num_snapshots=2, max_staleness=3, max_uses=1),
    dict(seed=1, num_snapshots=1, max_staleness=0, max_uses=1),
    dict(seed=2, num_snapshots=4, max_staleness=2, max_uses=3),
    dict(
      seed=3,
      num_snapshots=3,
      max_staleness=8,
      max_uses=2,
      trajectory_bytes=1500,
      snapshot_bytes=40,
    ),
  )
  def test_accounts(self, seed, **changes):
    household = Household(**changes)
    household.run(seed)
    ring, uses = household.ring, household.uses
    accounts = ring.accounting()
    accounts.check()
    self.assertTrue(household.is_eventful(), accounts)
    self.assertEqual(accounts.awaiting_verification, 0)
    # The test's own books agree.
    self.assertEqual(accounts.trained, len(uses))
    self.assertLessEqual(max(uses.values()), changes["max_uses"])
    self.assertEqual(ring.occupancy().trained_tokens, 2 * uses.total())
    # Nothing is left behind once everything has expired.
    ring.push_snapshot(snapshot(ring.version + 99))
    ring.accounting().check()
    self.assertEqual(ring.occupancy().trajectory_bytes, 0)
    self.assertEqual(ring.accounting().in_ring_unused, 0)


class IdSetTest(parameterized.TestCase):
  @parameterized.parameters(range(5))
  def test_is_a_set(self, seed):
    lot = random.Random(seed)
    mine, reference = ring_lib._IdSet(), set()
    for member in [lot.randrange(60) for _ in range(80)]:
      self.assertEqual(member in mine, member in reference)
      mine.add(member)
      reference.add(member)
      for other in range(-1, 61):
        self.assertEqual(other in mine, other in reference)

  def test_costs_its_gaps(self):
    ids = _shuffled_blocks(2000)
    mine = ring_lib._IdSet()
    for member in ids:
      mine.add(member)
    self.assertLen(mine._starts, 1)


def _shuffled_blocks(count):
  numbers = list(range(count))
  lot = random.Random(0)
  for start in range(0, count, 50):
    block = numbers[start : start + 50]
    lot.shuffle(block)
    numbers[start : start + 50] = block
  return numbers


if __name__ == "__main__":
  absltest.main()
