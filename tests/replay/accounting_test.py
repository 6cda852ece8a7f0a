"""Accounts that add up, and what a ring that does not fill says."""

import dataclasses

from absl.testing import absltest, parameterized

from darl_jax import config as config_lib
from darl_jax.replay import accounting

CONFIG = config_lib.ReplayConfig(
  num_snapshots=4,
  max_staleness=8,
  max_uses=3,
  drop_overlong=False,
  metric="harmful",
  selection_mode="reject_worst",
  keep_fraction=0.5,
  reject_fraction=0.25,
  max_metric=float("inf"),
  min_batch=2,
  snapshot_bytes=2**20,
  trajectory_bytes=2**10,
  timeout_s=1.0,
)


def make_accounts(
  *, trained=0, unused=0, awaiting=0, expired=None, dropped=None
) -> accounting.Accounting:
  expired, dropped = expired or {}, dropped or {}
  lost = [sum(expired.values()), sum(dropped.values())]
  return accounting.Accounting(
    generated=trained + unused + awaiting + sum(lost),
    trained=trained,
    expired_unused=lost[0],
    dropped_unused=lost[1],
    in_ring_unused=unused,
    awaiting_verification=awaiting,
    expired=expired,
    dropped=dropped,
  )


def make_state(**changes) -> accounting.Occupancy:
  state = accounting.Occupancy(
    slots=(),
    trajectory_bytes=0,
    snapshots=(3, 4),
    snapshot_bytes=0,
    groups_started=5,
    groups_allowed=99,
    groups_reserved=0,
    groups_awaiting=0,
    reserve_wait_s=0.0,
    trained_tokens=0,
    dead_tokens=0,
  )
  return dataclasses.replace(state, **changes)


def report(accounts, **changes) -> str:
  return accounting.starvation_report(
    CONFIG, accounts, make_state(**changes), count=7, timeout_s=1.5
  )


class AccountingTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.accounts = make_accounts(
      trained=2,
      unused=3,
      awaiting=4,
      expired={"stale": 1, "evicted": 5},
      dropped={"bytes": 6},
    )

  @parameterized.parameters(
    "generated",
    "trained",
    "expired_unused",
    "dropped_unused",
    "in_ring_unused",
    "awaiting_verification",
  )
  def test_check_sees_a_lost_sample(self, name):
    self.accounts.check()
    changes = {name: getattr(self.accounts, name) + 1}
    with self.assertRaisesRegex(RuntimeError, r"2\d samples are .*: generated"):
      dataclasses.replace(self.accounts, **changes).check()

  def test_says_where_every_sample_is(self):
    self.assertEqual(
      str(self.accounts),
      "generated 21 = trained 2 + expired 6 (evicted 5, stale 1)"
      " + dropped 6 (bytes 6) + in the ring unused 3"
      " + awaiting verification 4",
    )

  def test_counts(self):
    self.assertEqual(
      self.accounts.counts(),
      {
        "generated": 21,
        "trained": 2,
        "expired_unused": 6,
        "dropped_unused": 6,
        "in_ring_unused": 3,
        "awaiting_verification": 4,
      },
    )


class StarvationReportTest(parameterized.TestCase):
  def test_no_snapshot(self):
    self.assertIn(
      "after 1.5 s no snapshot was pushed",
      report(make_accounts(), snapshots=(), groups_started=0),
    )

  def test_says_what_there_is(self):
    accounts = make_accounts(unused=3, dropped={"dead_group": 2})
    text = report(
      accounts,
      slots=(
        accounting.SlotOccupancy(3, 1, 2, 1, num_bytes=8),
        accounting.SlotOccupancy(4, 0, 3, 2, num_bytes=8),
      ),
      groups_reserved=1,
      groups_awaiting=2,
    )
    for line in (
      "after 1.5 s the ring holds 5 trainable trajectories, and 7 are needed.",
      "Slots at version 4:",
      "  version 3 (age 1): 2 trajectories, 1 unused",
      "  version 4 (age 0): 3 trajectories, 2 unused",
      "Groups: 5 started of 99 allowed; 1 reserved and not begun, 2 awaiting "
      "verification.",
      f"Samples: {accounts}.",
    ):
      self.assertIn(line, text.splitlines())

  def test_nothing_was_delivered(self):
    text = report(make_accounts(), groups_started=9, groups_reserved=9)
    self.assertIn("none is open", text)
    self.assertIn("replay.timeout_s above 1 if", text)
    self.assertIn("the producer", text)

  @parameterized.parameters(
    (dict(), "replay.max_uses above 3: .* just too few samples"),
    (dict(awaiting=4), "more rewards.workers"),
    (dict(expired={"stale": 4}), "replay.max_staleness above 8"),
    (dict(expired={"stale_on_arrival": 4}), "replay.max_staleness above 8"),
    (dict(expired={"evicted": 4}), "replay.num_snapshots above 4"),
    (dict(expired={"older_than_ring": 4}), "replay.num_snapshots above 4"),
    (dict(dropped={"bytes": 4}), "replay.trajectory_bytes above 1024"),
    (dict(dropped={"dead_group": 4}), "a smaller replay.min_batch"),
    (dict(dropped={"zero_advantage": 4}), "rollout.samples_per_prompt"),
    (dict(dropped={"empty": 4}), "looking at the sampler"),
    (dict(dropped={"overlong": 4}), "a greater rollout.max_response_tokens"),
    (dict(dropped={"no_reward": 4}), "the verifier: .* dropped as no_reward"),
    # The largest loss decides.
    (dict(awaiting=3, dropped={"empty": 4}), "looking at the sampler"),
    (dict(awaiting=5, dropped={"empty": 4}), "more rewards.workers"),
  )
  def test_advises_on_where_most_samples_went(self, counts, text):
    accounts = make_accounts(trained=2, unused=2, **counts)
    self.assertRegex(report(accounts), f"Try .*{text}")

  @parameterized.parameters(
    (2, "generation of 2 groups is under way"), (1, "more rewards.workers")
  )
  def test_reserved_groups_count_by_the_samples_to_expect(self, reserved, text):
    # 2 groups have begun, with 2 samples each.
    accounts = make_accounts(unused=1, awaiting=3)
    self.assertRegex(
      report(accounts, groups_started=2 + reserved, groups_reserved=reserved),
      f"Try .*{text}",
    )


if __name__ == "__main__":
  absltest.main()
