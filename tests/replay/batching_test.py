"""Packing, the way back from the scoring pass, and a step's batch."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
from absl.testing import absltest, parameterized

from darl_jax import config as config_lib
from darl_jax import types
from darl_jax.kernels.log_ratio_moments import ops
from darl_jax.replay import batching, ring

ROW_TOKENS = 24


def make_entry(rng, index, *, version_range=(0, 5), prompt=None, response=None):
  """A trajectory with a masked-out stretch, as tool output leaves it."""
  prompt = prompt or int(rng.integers(1, 5))
  response = response or int(rng.integers(1, 12))
  length = prompt + response
  mask = np.arange(length) >= prompt
  if response > 4:
    mask[prompt + 2] = False
  versions = np.sort(rng.integers(*version_range, size=length))
  versions[:prompt] = versions[prompt]
  garbage = np.where(np.arange(length) == 0, np.nan, 5.0)
  trajectory = types.Trajectory(
    prompt_id=f"p{index}",
    group_id=index,
    tokens=rng.integers(1, 99, length).astype(np.int32),
    loss_mask=mask,
    behavior_logprobs=np.where(mask, -rng.random(length), garbage).astype(
      np.float32
    ),
    behavior_entropy=np.where(mask, rng.random(length), garbage).astype(
      np.float32
    ),
    policy_version=versions.astype(np.int32),
    turn=np.zeros(length, np.int32),
    finish=types.Finish.STOP,
    reward=float(index % 2),
  )
  return ring.Entry(
    id=(index, 0),
    trajectory=trajectory,
    advantage=np.float32(rng.normal()),
    uses=0,
    age=int(5 - versions[0]),
  )


def make_entries(n, seed=0, **kwargs):
  rng = np.random.default_rng(seed)
  return [make_entry(rng, index, **kwargs) for index in range(n)]


def concatenated(entries, name):
  return np.concatenate([getattr(e.trajectory, name) for e in entries])


def make_scores(entries, seed=1):
  """The policy's log-probs, near the behavior's; NaN where masked."""
  rng = np.random.default_rng(seed)
  logprobs = concatenated(entries, "behavior_logprobs")
  noise = rng.normal(scale=0.3, size=logprobs.shape)
  mask = concatenated(entries, "loss_mask")
  return np.where(mask, logprobs + noise, np.nan).astype(np.float32)


def make_objective(**changes) -> config_lib.ObjectiveConfig:
  fields = dict(
    loss="clipped",
    advantage="group",
    reward_tolerance=1e-6,
    behavior_weighting="ess_token",
    weight_cap=2.0,
    kappa=1.0,
    trust_region="behavior",
    proximal="recompute",
    proximal_lag=1,
    ewma_window=3,
    ewma_min_passed_fraction=0.9,
    clip_low=0.2,
    clip_high=0.28,
    clip_age_decay=1.0,
    gspo_clip_low=3e-4,
    gspo_clip_high=4e-4,
    m2po_max_second_moment=0.04,
    estr_threshold=0.1,
    estr_epsilon=0.01,
    step_ess_target=0.0,
    dual_clip=3.0,
    denominator="live",
    max_behavior_weight=2.0,
    behavior_weight_mode="truncate",
    kl_coefficient=0.0,
    kl_target="behavior",
    kl_estimator="k3",
    max_versions=8,
  )
  return config_lib.ObjectiveConfig(**{**fields, **changes})


def make_learner(**changes) -> config_lib.LearnerConfig:
  fields = dict(
    learning_rate=1e-3,
    schedule="constant",
    warmup_steps=0,
    final_learning_rate=1e-3,
    b1=0.9,
    b2=0.99,
    eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
    batch_size=64,
    minibatches=2,
    microbatches=2,
    rows=32,
    row_tokens=ROW_TOKENS,
    score_rows=4,
  )
  return config_lib.LearnerConfig(**{**fields, **changes})


def build(
  entries,
  *,
  learner=None,
  seed=0,
  dead_tokens=0,
  snapshot_logprobs=None,
  balance_weights=None,
  **objective,
):
  return batching.build_batch(
    entries,
    make_scores(entries),
    objective=make_objective(**objective),
    learner=learner or make_learner(),
    version=5,
    dead_tokens=dead_tokens,
    rng=np.random.default_rng(seed),
    snapshot_logprobs=snapshot_logprobs,
    balance_weights=balance_weights,
  )


def segments(batch):
  """Each packed trajectory: (minibatch, slice of every [..., T] field)."""
  fields = {
    field.name: getattr(batch, field.name)
    for field in dataclasses.fields(batch)
    if getattr(getattr(batch, field.name), "ndim", 0) == batch.tokens.ndim
  }
  found = []
  for row in np.ndindex(*batch.tokens.shape[:-1]):
    for segment in range(1, batch.segment_ids[row].max() + 1):
      where = batch.segment_ids[row] == segment
      found.append(
        (row[0], {name: values[row][where] for name, values in fields.items()})
      )
  return found


class PackTest(parameterized.TestCase):
  @parameterized.parameters(*range(20))
  def test_never_overlaps(self, seed):
    rng = np.random.default_rng(seed)
    row_tokens = int(rng.integers(4, 40))
    lengths = rng.integers(1, row_tokens + 4, size=int(rng.integers(0, 60)))
    rows = int(rng.integers(1, 20))
    packing = batching.pack(lengths, rows=rows, row_tokens=row_tokens)
    used = np.zeros((rows, row_tokens), int)
    seen = set()
    for length, row, start, segment in zip(
      lengths, packing.row, packing.start, packing.segment, strict=True
    ):
      if row < 0:
        continue
      self.assertLessEqual(start + length, row_tokens)
      used[row, start : start + length] += 1
      seen.add((row, segment))
    self.assertLessEqual(used.max(initial=0), 1)
    self.assertLen(seen, np.count_nonzero(packing.row >= 0))
    # Rows are filled from the left, without gaps, and numbered 1, 2, ...
    self.assertTrue(np.all(np.diff(used, axis=1) <= 0))
    for row in range(rows):
      numbers = sorted(segment for r, segment in seen if r == row)
      self.assertEqual(numbers, list(range(1, len(numbers) + 1)))
    # Nothing that was left out would fit.
    free = row_tokens - used.sum(1)
    left_out = lengths[packing.row < 0]
    if left_out.size:
      self.assertGreater(left_out.min(), free.max())

  def test_is_tight(self):
    lengths = np.random.default_rng(0).integers(10, 2000, size=2000)
    packing = batching.pack(lengths, rows=2000, row_tokens=4096)
    ideal = lengths.sum() / 4096
    self.assertLess(packing.row.max() + 1, 1.02 * ideal + 1)

  def test_a_row_holds_no_more_than_its_moments_have_room_for(self):
    packing = batching.pack(np.full(300, 2), rows=4, row_tokens=1000)
    self.assertEqual(types.row_segments(1000), 128)
    np.testing.assert_array_equal(
      np.bincount(packing.row, minlength=4), [128, 128, 44, 0]
    )
    self.assertEqual(packing.segment.max(), 128)
    # A short row is full before it has so many.
    self.assertEqual(types.row_segments(48), 24)

  def test_does_better_than_in_order(self):
    packing = batching.pack(np.array([4, 4, 6, 6, 5, 5]), rows=3, row_tokens=10)
    self.assertEqual(sorted(packing.row.tolist()), [0, 0, 1, 1, 2, 2])

  def test_opens_rows_in_order_and_is_deterministic(self):
    packing = batching.pack(np.array([7, 7, 7, 3]), rows=9, row_tokens=10)
    self.assertEqual(packing.row.tolist(), [0, 1, 2, 2])
    self.assertEqual(packing.start.tolist(), [0, 0, 0, 7])
    self.assertEqual(packing.segment.tolist(), [1, 1, 1, 2])


def supported(entries, *, vocab=99, share=0.1):
  """Entries with a support of each token, of the masked ones too."""
  rng = np.random.default_rng(7)

  def add(entry):
    trajectory = entry.trajectory
    mask = rng.random((len(trajectory.tokens), vocab)) < share
    mask[np.arange(len(mask)), trajectory.tokens] = True
    bits = np.packbits(mask, axis=1, bitorder="little")
    support = types.SupportMask.of(bits)
    return dataclasses.replace(
      entry, trajectory=dataclasses.replace(trajectory, support_mask=support)
    )

  return [add(entry) for entry in entries]


def check_supports(test, batch, entries):
  """Each placed token has its own support, and nothing else has any."""
  wanted = {e.trajectory.tokens.tobytes(): e.trajectory for e in entries}
  test.assertEqual(batch.support_mask.shape, (*batch.tokens.shape, 13))
  test.assertEqual(batch.support_mask.dtype, np.uint8)
  used = np.zeros_like(batch.loss_mask)
  for row in np.ndindex(*batch.tokens.shape[:-1]):
    for segment in range(1, batch.segment_ids[row].max() + 1):
      where = batch.segment_ids[row] == segment
      trajectory = wanted[batch.tokens[row][where].tobytes()]
      bits = trajectory.support_mask.dense()
      bits[~trajectory.loss_mask] = 0
      np.testing.assert_array_equal(batch.support_mask[row][where], bits)
      used[row] |= where
  test.assertFalse(np.any(batch.support_mask[~used]))
  test.assertTrue(np.all(batch.support_mask[batch.loss_mask].any(axis=-1)))


class SupportTest(parameterized.TestCase):
  """The support of truncated sampling, from trajectories to batches."""

  def test_scoring_batches(self):
    entries = supported(make_entries(50))
    plan = batching.ScoringPlan(entries, score_rows=4, row_tokens=ROW_TOKENS)
    batches = list(plan.batches)
    self.assertGreater(len(batches), 2)
    for batch in batches:
      check_supports(self, batch, entries)

  @parameterized.parameters(32, 8)
  def test_a_steps_batch(self, rows):
    entries = supported(make_entries(50))
    batch, placed, _ = build(entries, learner=make_learner(rows=rows))
    self.assertEqual(len(placed) < 50, rows == 8)
    check_supports(self, batch, entries)

  def test_changes_nothing_else(self):
    plain, _, _ = build(make_entries(50))
    batch, _, _ = build(supported(make_entries(50)))
    self.assertIsNone(plain.support_mask)
    same = dataclasses.replace(batch, support_mask=None)
    jax.tree.map(np.testing.assert_array_equal, same, plain)
    plans = [
      batching.ScoringPlan(entries, score_rows=4, row_tokens=ROW_TOKENS)
      for entries in (make_entries(50), supported(make_entries(50)))
    ]
    for one, other in zip(*(plan.batches for plan in plans), strict=True):
      self.assertIsNone(one.support_mask)
      same = dataclasses.replace(other, support_mask=None)
      jax.tree.map(np.testing.assert_array_equal, same, one)

  def test_all_have_one_or_none_has(self):
    entries = supported(make_entries(3)) + make_entries(1)
    with self.assertRaisesRegex(ValueError, "and others none"):
      build(entries)


class ScoringPlanTest(parameterized.TestCase):
  def plan(self, entries):
    return batching.ScoringPlan(entries, score_rows=4, row_tokens=ROW_TOKENS)

  def test_every_entry_is_packed_once_and_whole(self):
    entries = make_entries(50)
    plan = self.plan(entries)
    self.assertGreater(len(list(plan.batches)), 2)
    packed = []
    for batch in plan.batches:
      self.assertEqual(batch.tokens.shape, (4, ROW_TOKENS))
      self.assertLessEqual(batch.segment_ids.max(), plan.num_segments)
      packed += [segment for _, segment in segments(batch)]
    self.assertLen(packed, len(entries))
    unseen = {e.trajectory.tokens.tobytes(): e for e in entries}
    for segment in packed:
      entry = unseen.pop(segment["tokens"].tobytes())
      mask = entry.trajectory.loss_mask
      np.testing.assert_array_equal(segment["loss_mask"], mask)
      np.testing.assert_array_equal(segment["positions"], np.arange(len(mask)))
      for name in ("behavior_logprobs", "behavior_entropy"):
        np.testing.assert_array_equal(
          segment[name], np.where(mask, getattr(entry.trajectory, name), 0)
        )
      np.testing.assert_array_equal(
        segment["advantages"], np.full(len(mask), entry.advantage)
      )
    self.assertEmpty(unseen)

  def test_padding_is_zero_and_dtypes_are_the_contracts(self):
    for batch in self.plan(make_entries(7)).batches:
      padding = batch.segment_ids == 0
      for name, dtype in (
        ("tokens", np.int32),
        ("positions", np.int32),
        ("segment_ids", np.int32),
        ("loss_mask", np.bool_),
        ("behavior_logprobs", np.float32),
        ("behavior_entropy", np.float32),
        ("advantages", np.float32),
      ):
        values = getattr(batch, name)
        self.assertEqual(values.dtype, dtype, name)
        self.assertFalse(np.any(values[padding]), name)
        self.assertTrue(np.all(np.isfinite(values)), name)

  def test_results_come_back_in_the_entries_order(self):
    entries = make_entries(50)
    plan = self.plan(entries)
    tokens = plan.per_token([batch.tokens for batch in plan.batches])
    np.testing.assert_array_equal(tokens, concatenated(entries, "tokens"))
    chosen = np.array([31, 0, 7, 49])
    np.testing.assert_array_equal(
      plan.tokens_of(tokens, chosen),
      concatenated([entries[i] for i in chosen], "tokens"),
    )

  def test_refuses_results_of_another_shape(self):
    plan = self.plan(make_entries(50))
    with self.assertRaisesRegex(ValueError, "must have"):
      plan.per_token([batch.tokens for batch in list(plan.batches)[1:]])

  def test_statistics_with_the_real_kernel(self):
    entries = make_entries(50)
    plan = self.plan(entries)
    score = jax.jit(
      functools.partial(ops.log_ratio_moments, num_segments=plan.num_segments)
    )
    moments = [
      score(
        # Policy log-probs 0: ell = - log mu.
        np.zeros_like(batch.behavior_logprobs),
        batch.behavior_logprobs,
        batch.behavior_entropy,
        batch.advantages,
        batch.loss_mask,
        batch.segment_ids,
      )
      for batch in plan.batches
    ]
    stats = plan.statistics(moments)
    self.assertLen(stats, 50)
    for i, entry in enumerate(entries):
      mask = entry.trajectory.loss_mask
      ell = -entry.trajectory.behavior_logprobs[mask].astype(np.float64)
      self.assertEqual(stats.count[i], mask.sum())
      np.testing.assert_allclose(stats.mean[i], ell.mean(), rtol=1e-5)
      np.testing.assert_allclose(stats.variance[i], ell.var(), atol=1e-6)
      harm = np.where(entry.advantage * ell > 0, ell**2, 0).mean()
      np.testing.assert_allclose(stats.harmful[i], harm, rtol=1e-4)
      np.testing.assert_allclose(stats.max_abs[i], ell.max(), rtol=1e-6)
      entropy = entry.trajectory.behavior_entropy[mask].mean()
      np.testing.assert_allclose(stats.entropy[i], entropy, rtol=1e-6)
      self.assertEqual(stats.length[i], mask.sum())
      self.assertEqual(stats.reward[i], entry.trajectory.reward)
      self.assertEqual(stats.advantage[i], entry.advantage)
      self.assertEqual(stats.age[i], entry.age)
      self.assertEqual(stats.begun_by[i], entry.trajectory.begun_by)

  def test_statistics_refuse_moments_in_another_order(self):
    plan = self.plan(make_entries(50))
    shape = (4, plan.num_segments)
    moments = SimpleNamespace(
      **{name: np.ones(shape) for name in batching._MOMENTS}
    )
    with self.assertRaisesRegex(ValueError, "out of order"):
      plan.statistics([moments] * len(list(plan.batches)))

  def test_refuses_what_a_row_cannot_hold(self):
    entries = make_entries(3)
    entries[1] = make_entry(np.random.default_rng(0), 1, response=30)
    with self.assertRaisesRegex(
      ValueError, r"\(1, 0\) has 3. tokens.*learner.row_tokens = 24"
    ):
      self.plan(entries)


class LossTest(parameterized.TestCase):
  """What a batch holds for the losses of the family."""

  @parameterized.parameters(("live", 1.0), ("all", None))
  def test_gspo_weighs_trajectories_alike(self, denominator, total):
    batch, _, metrics = build(
      make_entries(40),
      loss="gspo",
      behavior_weighting="pooled",
      denominator=denominator,
      dead_tokens=37,
    )
    if total is None:
      total = metrics["tokens"] / (metrics["tokens"] + 37)
    found = segments(batch)
    self.assertLen(found, 40)
    for _, segment in found:
      weights, mask = segment["token_weights"], segment["loss_mask"]
      self.assertFalse(np.any(weights[~mask]))
      want = total / 40 / np.count_nonzero(mask)
      np.testing.assert_allclose(weights[mask], want, rtol=1e-6)

  def test_entropy_for_estr_alone(self):
    entries = make_entries(20)
    batch, _, _ = build(entries, loss="estr")
    by_tokens = {e.trajectory.tokens.tobytes(): e for e in entries}
    for _, segment in segments(batch):
      trajectory = by_tokens[segment["tokens"].tobytes()].trajectory
      np.testing.assert_array_equal(
        segment["behavior_entropy"],
        np.where(trajectory.loss_mask, trajectory.behavior_entropy, 0),
      )
    for loss in ("clipped", "cispo", "topr", "m2po"):
      self.assertIsNone(build(entries, loss=loss)[0].behavior_entropy)


class BuildBatchTest(parameterized.TestCase):
  def test_static_shape_dtypes_and_padding(self):
    batch, placed, metrics = build(make_entries(20))
    self.assertLen(placed, 20)
    padding = batch.segment_ids == 0
    for name, dtype in (
      ("tokens", np.int32),
      ("positions", np.int32),
      ("segment_ids", np.int32),
      ("loss_mask", np.bool_),
      ("behavior_logprobs", np.float32),
      ("proximal_logprobs", np.float32),
      ("behavior_index", np.int32),
      ("token_weights", np.float32),
      ("advantages", np.float32),
    ):
      values = getattr(batch, name)
      self.assertEqual(values.shape, (2, 2, 8, ROW_TOKENS), name)
      self.assertEqual(values.dtype, dtype, name)
      self.assertFalse(np.any(values[padding]), name)
      self.assertTrue(np.all(np.isfinite(values)), name)
    for name, dtype in (
      ("clip_low", np.float32),
      ("clip_high", np.float32),
      ("versions", np.int32),
    ):
      self.assertEqual(getattr(batch, name).shape, (8,))
      self.assertEqual(getattr(batch, name).dtype, dtype)
    self.assertAlmostEqual(metrics["fill"], 1 - padding.mean())

  def test_contents_are_the_entries(self):
    entries = make_entries(40)
    scores = make_scores(entries)
    ends = np.cumsum([len(e.trajectory.tokens) for e in entries])
    scores_of = dict(
      zip(range(len(entries)), np.split(scores, ends[:-1]), strict=True)
    )
    batch, placed, _ = build(entries)
    self.assertEqual([e.id for e in placed], [e.id for e in entries])
    unseen = {e.trajectory.tokens.tobytes(): e for e in entries}
    for _, segment in segments(batch):
      entry = unseen.pop(segment["tokens"].tobytes())
      mask = entry.trajectory.loss_mask
      np.testing.assert_array_equal(segment["positions"], np.arange(len(mask)))
      np.testing.assert_array_equal(segment["loss_mask"], mask)
      np.testing.assert_array_equal(
        segment["behavior_logprobs"][mask],
        entry.trajectory.behavior_logprobs[mask],
      )
      np.testing.assert_array_equal(
        segment["proximal_logprobs"][mask], scores_of[entry.id[0]][mask]
      )
      np.testing.assert_array_equal(
        segment["advantages"], np.full(len(mask), entry.advantage)
      )
      np.testing.assert_array_equal(
        batch.versions[segment["behavior_index"][mask]],
        entry.trajectory.policy_version[mask],
      )
      self.assertFalse(np.any(segment["token_weights"][~mask]))
    self.assertEmpty(unseen)

  @parameterized.product(
    weighting=["pooled", "ess_token", "moment", "inverse_variance"],
    denominator=["live", "all"],
  )
  def test_token_weights_sum_to_the_live_share(self, weighting, denominator):
    batch, _, metrics = build(
      make_entries(40),
      behavior_weighting=weighting,
      denominator=denominator,
      dead_tokens=37,
    )
    tokens = np.count_nonzero(batch.loss_mask)
    self.assertEqual(metrics["tokens"], tokens)
    expected = 1.0 if denominator == "live" else tokens / (tokens + 37)
    self.assertAlmostEqual(
      np.sum(batch.token_weights, dtype=np.float64), expected, places=5
    )
    if weighting == "pooled":
      np.testing.assert_allclose(
        batch.token_weights[batch.loss_mask], expected / tokens, rtol=1e-6
      )

  @parameterized.parameters("balance", "balance_length_normalized")
  def test_balance_weights_are_of_trajectories(self, weighting):
    entries = make_entries(40)
    weights = np.random.default_rng(2).uniform(0, 2.5, 40).clip(max=2)
    weights[3] = 0.0
    batch, placed, metrics = build(
      entries, behavior_weighting=weighting, balance_weights=weights
    )
    pooled, _, _ = build(entries, behavior_weighting="pooled")
    self.assertLen(placed, 40)
    of_entry = dict(
      zip(
        (e.trajectory.tokens.tobytes() for e in entries), weights, strict=True
      )
    )
    for (_, ours), (_, theirs) in zip(
      segments(batch), segments(pooled), strict=True
    ):
      np.testing.assert_allclose(
        ours["token_weights"],
        theirs["token_weights"] * of_entry[ours["tokens"].tobytes()],
        rtol=1e-6,
      )
    self.assertAlmostEqual(metrics["balance_weight"], weights.mean())
    self.assertAlmostEqual(metrics["balance_capped"], np.mean(weights == 2))
    self.assertGreater(metrics["balance_capped"], 0)

  def test_balance_weights_that_do_not_fit(self):
    for weights in (None, np.ones(39), np.full(40, np.inf)):
      with self.assertRaisesRegex(ValueError, "each of the 40 entries"):
        build(
          make_entries(40),
          behavior_weighting="balance",
          balance_weights=weights,
        )

  def test_weights_count_only_what_was_placed(self):
    # As pooled: every token weighs 1 / N, with N of the batch.
    batch, placed, metrics = build(
      make_entries(40),
      learner=make_learner(rows=8),
      behavior_weighting="pooled",
    )
    self.assertLess(len(placed), 40)
    self.assertEqual(metrics["not_placed"], 40 - len(placed))
    tokens = sum(e.trajectory.num_sampled for e in placed)
    np.testing.assert_allclose(
      batch.token_weights[batch.loss_mask], 1 / tokens, rtol=1e-6
    )
    self.assertEqual(metrics["tokens"], tokens)

  def test_what_does_not_fit_is_drawn_and_not_the_short_ones(self):
    # Two long ones fill a row: left to the packing, no short one would be in.
    rng = np.random.default_rng(0)
    entries = [
      make_entry(rng, i, prompt=2, response=10 if i % 2 else 2)
      for i in range(60)
    ]
    short = long = 0
    for seed in range(40):
      learner = make_learner(rows=8, minibatches=1)
      _, placed, _ = build(entries, learner=learner, seed=seed)
      is_long = sum(entry.id[0] % 2 for entry in placed)
      long, short = long + is_long, short + len(placed) - is_long
    self.assertBetween(short / long, 0.8, 1.25)

  def test_versions_and_clip_bounds(self):
    batch, _, metrics = build(
      make_entries(40, version_range=(2, 5)), clip_age_decay=0.5
    )
    self.assertEqual(batch.versions.tolist(), [2, 3, 4, -1, -1, -1, -1, -1])
    scale = np.array([1 / 8, 1 / 4, 1 / 2])
    np.testing.assert_allclose(batch.clip_low[:3], 0.2 * scale, rtol=1e-6)
    np.testing.assert_allclose(batch.clip_high[:3], 0.28 * scale, rtol=1e-6)
    np.testing.assert_allclose(batch.clip_low[3:], 0.2, rtol=1e-6)
    np.testing.assert_allclose(batch.clip_high[3:], 0.28, rtol=1e-6)
    self.assertEqual((metrics["versions"], metrics["merged_versions"]), (3, 0))
    self.assertEqual(metrics["merged_tokens"], 0)

  def test_an_infinite_clip_stays_one(self):
    rng = np.random.default_rng(0)
    entries = [make_entry(rng, 0, version_range=(0, 1))]
    batch, _, _ = batching.build_batch(
      entries,
      make_scores(entries),
      objective=make_objective(clip_high=float("inf"), clip_age_decay=0.5),
      learner=make_learner(),
      version=5000,
      dead_tokens=0,
      rng=rng,
    )
    self.assertEqual(batch.clip_high[0], np.inf)
    self.assertGreater(batch.clip_low[0], 0)

  @parameterized.parameters((4, 2), (2, 4), (1, 5))
  def test_the_oldest_versions_are_merged_and_counted(self, size, num_merged):
    entries = make_entries(40)  # Versions 0 to 4.
    batch, _, metrics = build(entries, max_versions=size)
    self.assertEqual(batch.versions.tolist(), [0, *range(6 - size, 5)])
    unseen = {e.trajectory.tokens.tobytes(): e for e in entries}
    merged_tokens = 0
    for _, segment in segments(batch):
      entry = unseen.pop(segment["tokens"].tobytes())
      mask = entry.trajectory.loss_mask
      version = entry.trajectory.policy_version[mask]
      entry_of = np.where(version < num_merged, 0, version - num_merged + 1)
      np.testing.assert_array_equal(segment["behavior_index"][mask], entry_of)
      merged_tokens += np.count_nonzero(version < num_merged)
    self.assertEqual(metrics["merged_versions"], num_merged)
    self.assertEqual(metrics["merged_tokens"], merged_tokens)
    self.assertEqual(metrics["versions"], size)
    self.assertAlmostEqual(batch.token_weights.sum(), 1, places=5)

  @parameterized.product(minibatches=[1, 3, 4], n=[2, 11, 40, 41])
  def test_minibatches_are_balanced(self, minibatches, n):
    entries = make_entries(n)
    for seed in range(5):
      batch, placed, _ = build(
        entries,
        learner=make_learner(
          minibatches=minibatches, microbatches=1, rows=24 * minibatches
        ),
        seed=seed,
      )
      self.assertLen(placed, n)
      items = np.bincount(
        [minibatch for minibatch, _ in segments(batch)],
        minlength=minibatches,
      )
      tokens = np.count_nonzero(batch.segment_ids, axis=(1, 2, 3))
      longest = max(len(e.trajectory.tokens) for e in entries)
      self.assertLessEqual(np.ptp(items), 1)
      self.assertLessEqual(np.ptp(tokens), longest)

  def test_the_deal_is_random_and_seeded(self):
    rng = np.random.default_rng(0)
    entries = [make_entry(rng, i, prompt=2, response=i + 1) for i in range(12)]

    def hands(seed):
      batch, _, _ = build(entries, seed=seed)
      return sorted(
        segment["tokens"].tobytes()
        for minibatch, segment in segments(batch)
        if minibatch == 0
      )

    self.assertEqual(hands(0), hands(0))
    self.assertNotEqual(hands(0), hands(1))
    # Not even the longest is tied to a minibatch.
    key = entries[-1].trajectory.tokens.tobytes()
    in_first = sum(key in hands(seed) for seed in range(60))
    self.assertBetween(in_first, 15, 45)

  def test_refuses_scores_that_do_not_fit(self):
    entries = make_entries(4)
    scores = make_scores(entries)
    arguments = dict(
      objective=make_objective(),
      learner=make_learner(),
      version=5,
      dead_tokens=0,
      rng=np.random.default_rng(0),
    )
    with self.assertRaisesRegex(ValueError, "scored_logprobs have shape"):
      batching.build_batch(entries, scores[1:], **arguments)
    last = entries[-1].trajectory
    self.assertTrue(last.loss_mask[-1])
    scores[-1] = -np.inf
    with self.assertRaisesRegex(ValueError, r"\(3, 0\).* not finite"):
      batching.build_batch(entries, scores, **arguments)
    with self.assertRaisesRegex(ValueError, "no trajectory"):
      batching.build_batch([], scores[:0], **arguments)


class ProximalTest(parameterized.TestCase):
  """Which policy ``Batch.proximal_logprobs`` are of."""

  def _found(self, entries, **keywords):
    """As ``build`` placed them, and by version; both of masked-in tokens."""
    batch, placed, _ = build(entries, trust_region="decoupled", **keywords)
    self.assertLen(placed, len(entries))
    mask = batch.loss_mask
    return tuple(
      np.asarray(getattr(batch, name))[mask]
      for name in ("proximal_logprobs", "behavior_logprobs")
    )

  def test_each(self):
    entries = make_entries(9)
    scores = make_scores(entries)
    mask = concatenated(entries, "loss_mask")
    behavior = concatenated(entries, "behavior_logprobs")
    versions = concatenated(entries, "policy_version")
    age = 5 - versions
    share = np.maximum(age - 1, 0) / np.maximum(age, 1)
    snapshot = np.where(mask, behavior + 0.25, np.nan).astype(np.float32)
    for expected, keywords in (
      (scores, dict(proximal="recompute")),
      (scores, dict(proximal="ewma")),
      (snapshot, dict(proximal="snapshot", snapshot_logprobs=snapshot)),
      (behavior + share * (scores - behavior), dict(proximal="loglinear")),
    ):
      found, _ = self._found(entries, **keywords)
      np.testing.assert_allclose(
        np.sort(found), np.sort(expected[mask]), atol=1e-5
      )

  def test_snapshots_that_are_not_given(self):
    with self.assertRaisesRegex(ValueError, "needs snapshot_logprobs"):
      build(make_entries(9), proximal="snapshot")


if __name__ == "__main__":
  absltest.main()
