"""What the ring refuses, what it copies, and which rewards it can use."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from darl_jax import types
from darl_jax.replay import ingestion

PROMPT_TOKENS = 2


def trajectory(group_id, versions, **changes) -> types.Trajectory:
  """One response token per entry of ``versions``, the first of which began."""
  length = PROMPT_TOKENS + len(versions)
  mask = np.arange(length) >= PROMPT_TOKENS
  fields = dict(
    prompt_id=f"p{group_id}",
    group_id=group_id,
    tokens=np.arange(length, dtype=np.int32),
    loss_mask=mask,
    behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
    behavior_entropy=np.where(mask, 0.7, 0).astype(np.float32),
    policy_version=np.array(
      [versions[0]] * PROMPT_TOKENS + list(versions), np.int32
    ),
    turn=np.zeros(length, np.int32),
    finish=types.Finish.STOP,
  )
  return types.Trajectory(**{**fields, **changes})


def group_of(group_id, *trajectories, failures=()) -> types.TrajectoryGroup:
  prompt = types.Prompt(f"p{group_id}", np.arange(2, dtype=np.int32), {})
  return types.TrajectoryGroup(group_id, prompt, trajectories, failures)


def ingest(*groups, truncated=False):
  return ingestion.ingest(groups, truncated=truncated)


def array_fields(sample: types.Trajectory):
  for field in dataclasses.fields(sample):
    value = getattr(sample, field.name)
    if isinstance(value, np.ndarray):
      yield field.name, value


class IngestTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("mask_short", dict(loss_mask=np.zeros(4, bool)), "loss_mask has shape"),
    (
      "logprobs_long",
      dict(behavior_logprobs=np.zeros(6, np.float32)),
      "behavior_logprobs has shape",
    ),
    ("turn_short", dict(turn=np.zeros(4, np.int32)), "turn has shape"),
    (
      "two_axes",
      dict(tokens=np.zeros((5, 1), np.int32)),
      r"tokens have shape \(5, 1\)",
    ),
    ("no_token", dict(tokens=np.zeros(0, np.int32)), r"\(0,\)"),
    ("dtype", dict(tokens=np.zeros(5, np.int64)), "tokens.*int64.*int32"),
    ("mask_dtype", dict(loss_mask=np.zeros(5, np.float32)), "loss_mask.*bool"),
    ("list", dict(turn=[0] * 5), "turn is a list"),
    ("device", dict(turn=jnp.zeros(5, jnp.int32)), "turn is a ArrayImpl"),
    ("mask_first", dict(loss_mask=np.ones(5, bool)), r"loss_mask\[0\]"),
    (
      "negative",
      dict(policy_version=np.array([-1, -1, 5, 5, 5], np.int32)),
      "must not be negative",
    ),
    (
      "falling",
      dict(policy_version=np.array([3, 3, 3, 5, 4], np.int32)),
      "must not fall",
    ),
    (
      "before_it_began",
      dict(policy_version=np.array([4, 4, 3, 4, 4], np.int32)),
      "must not fall",
    ),
    (
      "nan",
      dict(behavior_logprobs=np.array([0, 0, 0, np.nan, 0], np.float32)),
      "must be finite",
    ),
    (
      "infinite_entropy",
      dict(behavior_entropy=np.array([0, 0, 0, 0, np.inf], np.float32)),
      "must be finite",
    ),
    ("ragged", dict(tokens=[[1], [2, 3]]), "tokens is a list of values"),
    (
      "negative_token",
      dict(tokens=np.array([0, 1, 2, -1, 4], np.int32)),
      "tokens must not be negative",
    ),
    ("finish", dict(finish="stop"), "finish = 'stop' is no Finish"),
    ("other_group", dict(group_id=8), "belongs to group 8"),
    ("other_prompt", dict(prompt_id="x"), "of prompt x"),
  )
  def test_refuses(self, changes, message):
    good = trajectory(7, [5] * 3)
    bad = dataclasses.replace(good, **changes)
    groups = [group_of(6, trajectory(6, [4, 4, 5])), group_of(7, good, bad)]
    with self.assertRaisesRegex(ValueError, "group 7, sample 1.*" + message):
      ingest(*groups)

  @parameterized.parameters("7", 7.0, True, None)
  def test_refuses_an_id_that_is_no_int(self, group_id):
    group = group_of(7, trajectory(7, [5]))
    with self.assertRaisesRegex(ValueError, "group .*: its id is a .* an int"):
      ingest(dataclasses.replace(group, group_id=group_id))

  def test_refuses_a_sample_that_is_none(self):
    with self.assertRaisesRegex(ValueError, "group 7, sample 1 is a NoneType"):
      ingest(group_of(7, trajectory(7, [5]), None))

  def test_refuses_an_empty_group(self):
    with self.assertRaisesRegex(ValueError, "group 3 has no samples"):
      ingest(group_of(3))

  def test_no_group_is_no_sample(self):
    self.assertEqual(ingest(), [])

  def test_masked_slots_may_hold_anything(self):
    garbage = np.array([np.nan, np.inf, 0, 0, 0], np.float32)
    group = group_of(1, trajectory(1, [5] * 3, behavior_logprobs=garbage))
    self.assertLen(ingest(group), 1)

  def test_notes_what_the_ring_asks_for(self):
    unsampled = dict(loss_mask=np.zeros(3, bool))
    samples = ingest(
      group_of(4, trajectory(4, [1, 2, 2, 6]), trajectory(4, [3])),
      group_of(2, trajectory(2, [5], **unsampled)),
    )
    self.assertEqual(
      [
        (s.id, s.begun_by, s.newest_version, s.num_tokens, s.num_bytes)
        for s in samples
      ],
      # A token has 21 bytes: five arrays of four, and the mask.
      [
        ((4, 0), 1, 6, 4, 6 * 21),
        ((4, 1), 3, 3, 1, 3 * 21),
        ((2, 0), 5, 5, 0, 3 * 21),
      ],
    )
    for sample in samples:
      arrays = [array for _, array in array_fields(sample.trajectory)]
      self.assertEqual(sample.num_bytes, sum(a.nbytes for a in arrays))
    self.assertEqual(samples[1].name, "group 4, sample 1")

  def test_owns_read_only_copies_of_every_array(self):
    original = trajectory(1, [5, 6], finish=types.Finish.LENGTH)
    expected = {name: array.copy() for name, array in array_fields(original)}
    (sample,) = ingest(group_of(1, original))
    for _, array in array_fields(original):
      array[...] = 1
    copies = dict(array_fields(sample.trajectory))
    self.assertLen(copies, 6)
    for name, array in copies.items():
      np.testing.assert_array_equal(array, expected[name])
      self.assertFalse(array.flags.writeable)
      self.assertIsNone(array.base)  # It cannot change from below.
    self.assertEqual(sample.trajectory.prompt_id, "p1")
    self.assertEqual(sample.trajectory.finish, types.Finish.LENGTH)


def supported(sample: types.Trajectory, *, width=2) -> types.Trajectory:
  """Each sampled token may be drawn, and token 9."""
  bits = np.zeros((len(sample.tokens), 8 * width), bool)
  at = np.flatnonzero(sample.loss_mask)
  bits[at, sample.tokens[at]] = bits[at, 9] = True
  packed = np.packbits(bits, axis=1, bitorder="little")
  return dataclasses.replace(sample, support_mask=types.SupportMask.of(packed))


class SupportTest(parameterized.TestCase):
  """What truncated sampling left, present exactly where it truncates."""

  def test_owns_read_only_copies_and_counts_their_bytes(self):
    original = supported(trajectory(1, [5, 6]))
    bits = original.support_mask.dense()
    (sample,) = ingest(group_of(1, original), truncated=True)
    support = sample.trajectory.support_mask
    own = dict(array_fields(support))
    self.assertLen(own, 3)
    for name, array in array_fields(original.support_mask):
      array[...] = 1
      self.assertFalse(own[name].flags.writeable)
      self.assertIsNone(own[name].base)
    np.testing.assert_array_equal(support.dense(), bits)
    # Two bytes for each token, and five offsets.
    self.assertEqual(sample.num_bytes, 4 * 21 + 4 * (1 + 4) + 5 * 8)

  def test_refuses_a_trajectory_without(self):
    good = supported(trajectory(7, [5] * 3))
    with self.assertRaisesRegex(
      ValueError,
      "group 7, sample 1: .* truncates, and its support_mask is None",
    ):
      ingest(group_of(7, good, trajectory(7, [5] * 3)), truncated=True)

  def test_refuses_one_where_nothing_truncates(self):
    with self.assertRaisesRegex(
      ValueError,
      "group 7, sample 0: .* does not truncate, and it has a support",
    ):
      ingest(group_of(7, supported(trajectory(7, [5] * 3))))

  def test_refuses_a_token_that_could_not_be_drawn(self):
    good = supported(trajectory(7, [5] * 3))
    tokens = good.tokens.copy()
    tokens[-1] = 8  # Of a byte that is there, for token 9.
    bad = dataclasses.replace(good, tokens=tokens)
    with self.assertRaisesRegex(ValueError, "sample 1: .* not in its own supp"):
      ingest(group_of(7, good, bad), truncated=True)
    tokens[-1] = 9
    ingest(group_of(7, good, bad), truncated=True)

  def test_where_nothing_was_sampled_it_may_be_anything(self):
    sample = supported(trajectory(7, [5] * 3))
    support = sample.support_mask.dense()
    support[0] = 1
    mask = types.SupportMask.of(support)
    good = dataclasses.replace(sample, support_mask=mask)
    self.assertLen(ingest(group_of(7, good), truncated=True), 1)

  @parameterized.named_parameters(
    (
      "short",
      dict(offsets=np.array([0, 2, 4, 6])),
      "3 positions, but tokens 5",
    ),
    ("none", dict(offsets=np.zeros(0, np.int64)), "-1 positions"),
    ("dtype", dict(columns=np.zeros(6, np.int64)), "columns must be a row of"),
    ("width", dict(width=None), "its width an int"),
    (
      "wrapping",
      dict(offsets=np.array([0, 2**63 - 1, -(2**63), 0, 2, 6])),
      "ascending",
    ),
    ("list", dict(data=[0] * 6), "data must be a row of uint8"),
    ("start", dict(offsets=np.array([1, 1, 1, 2, 4, 6])), "ascending"),
    ("falling", dict(offsets=np.array([0, 0, 0, 4, 2, 6])), "ascending"),
    ("end", dict(offsets=np.array([0, 0, 0, 2, 4, 5])), "ascending"),
    ("data", dict(data=np.ones(5, np.uint8)), "ascending"),
    (
      "twice",
      dict(columns=np.array([0, 0, 0, 1, 0, 1], np.int32)),
      "ascending",
    ),
    ("wide", dict(columns=np.array([0, 2, 0, 1, 0, 1], np.int32)), "width 2"),
    ("below", dict(columns=np.array([-1, 1, 0, 1, 0, 1], np.int32)), "width 2"),
  )
  def test_refuses_what_is_no_mask(self, changes, message):
    good = supported(trajectory(7, [5] * 3))
    support = dataclasses.replace(good.support_mask, **changes)
    bad = dataclasses.replace(good, support_mask=support)
    with self.assertRaisesRegex(ValueError, "sample 1.*" + message):
      ingest(group_of(7, good, bad), truncated=True)

  def test_refuses_what_is_no_support(self):
    sample = trajectory(7, [5] * 3)
    bits = np.zeros((5, 2), np.uint8)
    bad = dataclasses.replace(sample, support_mask=bits)
    with self.assertRaisesRegex(ValueError, "sample 0: support_mask must be"):
      ingest(group_of(7, bad), truncated=True)

  def test_refuses_another_width_by_name(self):
    one, other = (supported(trajectory(7, [5]), width=w) for w in (2, 3))
    with self.assertRaisesRegex(
      ValueError, "group 7, sample 1: .* width 3, and group 7, sample 0 2"
    ):
      ingest(group_of(7, one, other), truncated=True)


class UsableRewardsTest(parameterized.TestCase):
  def test_every_reason(self):
    cases = [
      (1.0, None, None),
      (0.25, None, None),
      (None, "timeout", "verifier_timeout"),
      (0.5, "crash: exit code -9: x", "verifier_crash"),
      (None, None, "no_reward"),
      (float("nan"), None, "non_finite_reward"),
      (float("-inf"), None, "non_finite_reward"),
      (np.float32("nan"), None, "non_finite_reward"),
      (1e30, None, "reward_out_of_range"),
      (-(10**400), None, "reward_out_of_range"),
    ]
    rewards, failures, reasons = zip(*cases, strict=True)
    group = group_of(
      1,
      *(trajectory(1, [5], reward=reward) for reward in rewards),
      failures=failures,
    )
    usable, found = ingestion.usable_rewards(group, ingest(group))
    self.assertEqual(usable.dtype, np.float64)
    self.assertEqual(usable.tolist(), [1.0, 0.25] + [0] * 8)
    self.assertEqual(found, list(reasons))

  def test_an_aborted_sample_has_none_whatever_its_group_says_later(self):
    begun = group_of(1, trajectory(1, [5], finish=types.Finish.ABORTED))
    later = group_of(1, trajectory(1, [5], reward=1.0), failures=["timeout"])
    usable, reasons = ingestion.usable_rewards(later, ingest(begun))
    self.assertEqual((usable.tolist(), reasons), ([0.0], ["aborted"]))

  @parameterized.parameters("1", 1j, (np.ones(1),))
  def test_refuses_a_reward_that_is_no_number(self, reward):
    group = group_of(3, trajectory(3, [5], reward=reward))
    with self.assertRaisesRegex(ValueError, "group 3, sample 0: its reward is"):
      ingestion.usable_rewards(group, ingest(group))

  @parameterized.parameters(7, b"timeout")
  def test_refuses_a_failure_that_is_no_text(self, failure):
    group = group_of(3, trajectory(3, [5]), failures=(failure,))
    with self.assertRaisesRegex(ValueError, "sample 0: its failure is"):
      ingestion.usable_rewards(group, ingest(group))

  def test_refuses_other_numbers(self):
    pair = [trajectory(2, [5], reward=1.0)] * 2
    samples = ingest(group_of(2, *pair))
    with self.assertRaisesRegex(ValueError, "group 2 .* 2 samples and has 1"):
      ingestion.usable_rewards(group_of(2, pair[0]), samples)
    with self.assertRaisesRegex(ValueError, "2 samples and 1 entries in fail"):
      ingestion.usable_rewards(group_of(2, *pair, failures=("x",)), samples)


if __name__ == "__main__":
  absltest.main()
