"""Scoring pass and train step: parity, accumulation, skipping, sharding."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh

from configs import darl
from darl_jax import config as config_lib
from darl_jax.config import ModelConfig
from darl_jax.kernels.token_logprob import block_sizes
from darl_jax.learner.step import Learner
from darl_jax.models import lora, presets
from darl_jax.models.transformer import Policy
from darl_jax.objectives import policy_losses
from darl_jax.rollout.engine import Engine
from darl_jax.rollout.placement import Placement
from darl_jax.sharding import meshes, transfer
from darl_jax.types import Batch, PolicySnapshot, Prompt, ScoreBatch
from tests.objectives import reference

_VOCAB = 42
# Of a ScoreBatch where nothing truncates.
_SCORED = [
  field.name
  for field in dataclasses.fields(ScoreBatch)
  if field.name != "support_mask"
]
_ROWS, _TOKENS, _VERSIONS = 16, 16, 3
_DEFAULT = config_lib.parse(darl.get_config())


@functools.cache
def _policy(compute_dtype="float32", lora_rank=0):
  config = presets.nano() | dict(
    num_layers=1,
    embed_dim=16,
    mlp_dim=32,
    num_heads=4,
    head_dim=8,
    compute_dtype=compute_dtype,
    lora_rank=lora_rank,
  )
  return Policy(ModelConfig(**config), vocab_size=_VOCAB)


def _mesh(train=(1, 1, 1)):
  devices = np.array(jax.devices()[: np.prod(train)])
  return Mesh(devices.reshape(train), meshes.TRAIN_AXES)


@functools.cache
def _learner(
  *,
  train=(1, 1, 1),
  minibatches=1,
  microbatches=1,
  temperature=1.0,
  truncated=False,
  publish_dtype="float32",
  compute_dtype="float32",
  lora_rank=0,
  trust_region="behavior",
  **objective,
) -> Learner:
  """Shared by the tests: each of its programs compiles once."""
  config = dataclasses.replace(
    _DEFAULT.learner,
    minibatches=minibatches,
    microbatches=microbatches,
    rows=_ROWS,
    row_tokens=_TOKENS,
    warmup_steps=0,
    learning_rate=1e-2,
    final_learning_rate=1e-2,
    # So large that 1e-6 of a gradient is not a step of Adam's.
    eps=1e-3,
  )
  return Learner(
    _policy(compute_dtype, lora_rank),
    config,
    dataclasses.replace(
      _DEFAULT.objective, trust_region=trust_region, **objective
    ),
    mesh=_mesh(train),
    temperature=temperature,
    truncated=truncated,
    num_steps=10,
    publish_dtype=jnp.dtype(publish_dtype),
  )


@functools.cache
def _host_params(seed=0, lora_rank=0):
  rng = np.random.default_rng(seed)
  policy = _policy(lora_rank=lora_rank)
  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  return jax.tree.map(
    lambda leaf: (0.4 * rng.normal(size=leaf.shape)).astype(np.float32), shapes
  )


def _params(learner, seed=0):
  return jax.device_put(_host_params(seed), learner.param_shardings)


def _state(learner):
  return learner.init_state(_params(learner))


def _batch(minibatches=1, microbatches=1, **changes) -> Batch:
  """Two trajectories in each row, then padding."""
  rng = np.random.default_rng(3)
  shape = (_ROWS, _TOKENS)
  lengths = (7, 6)
  segments = np.repeat([1, 2, 0], (*lengths, _TOKENS - sum(lengths)))
  positions = np.concatenate([np.arange(7), np.arange(6), np.arange(3)])
  mask = np.broadcast_to((positions >= 3) & (segments > 0), shape)
  logprobs = -np.abs(rng.normal(4.0, 0.5, shape)).astype(np.float32)
  fields = dict(
    tokens=rng.integers(_VOCAB, size=shape).astype(np.int32),
    positions=np.broadcast_to(positions, shape).astype(np.int32),
    segment_ids=np.broadcast_to(segments, shape).astype(np.int32),
    loss_mask=mask,
    behavior_logprobs=logprobs,
    proximal_logprobs=logprobs,
    behavior_index=rng.integers(_VERSIONS, size=shape).astype(np.int32),
    token_weights=np.full(shape, 1 / mask.sum(), np.float32),
    advantages=np.sign(rng.normal(size=shape)).astype(np.float32),
  )
  fields = {
    name: value.reshape(minibatches, microbatches, -1, *value.shape[1:])
    for name, value in (fields | changes).items()
  }
  return Batch(
    **fields,
    clip_low=np.full(_VERSIONS, 0.2, np.float32),
    clip_high=np.full(_VERSIONS, 0.28, np.float32),
    versions=np.arange(_VERSIONS, dtype=np.int32),
  )


def _score_batch(**changes) -> ScoreBatch:
  batch = _batch()
  fields = {
    name: getattr(batch, name)[0, 0]
    for name in _SCORED
    if name != "behavior_entropy"
  }
  entropy = np.ones((_ROWS, _TOKENS), np.float32)
  return ScoreBatch(**dict(behavior_entropy=entropy, **fields) | changes)


def _values(metrics):
  """Each (sum, count) pair as one number."""
  return {
    name: float(total) / max(float(count), 1.0)
    for name, (total, count) in metrics.items()
  }


def _assert_close(got, want, atol):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=atol),
    got,
    want,
  )


def _largest_gap(one, other):
  gaps = jax.tree.map(
    lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), one, other
  )
  return max(jax.tree.leaves(gaps))


class ParityTest(parameterized.TestCase):
  """Sampler and learner speak of the same distribution."""

  @parameterized.parameters(0.7, 1.0, 1.3)
  def test_recorded_logprobs_are_the_learners(self, temperature):
    learner = _learner(temperature=temperature)
    trajectories = self._sample(temperature)
    packed = self._pack(trajectories)
    logprobs, moments = learner.score(_params(learner), packed)
    gaps = np.abs(np.asarray(logprobs) - packed.behavior_logprobs)
    self.assertLess(gaps[packed.loss_mask].max(), 1e-5)
    # So every importance ratio is 1.
    self.assertLess(float(jnp.max(moments.max_abs)), 1e-5)
    # A segment for each trajectory, counted right.
    counts = np.asarray(moments.count)
    want = [t.num_sampled for t in trajectories]
    np.testing.assert_array_equal(counts[:, :2].reshape(-1), want)
    self.assertFalse(counts[:, 2:].any())

  def test_ratios_leave_1_with_the_first_update(self):
    learner = _learner()
    packed = self._pack(self._sample(1.0))
    fields = {
      name: getattr(packed, name)
      for name in _SCORED
      if name != "behavior_entropy"
    }
    batch = _batch(**fields, proximal_logprobs=packed.behavior_logprobs)
    state, metrics = learner.step(_state(learner), batch)
    self.assertAlmostEqual(_values(metrics)["train/ratio"], 1.0, delta=1e-5)
    self.assertAlmostEqual(_values(metrics)["train/kl"], 0.0, delta=1e-6)
    logprobs, _ = learner.score(state.params, packed)
    ell = np.asarray(logprobs) - packed.behavior_logprobs
    ratio = np.exp(ell[packed.loss_mask])
    self.assertGreater(np.mean(np.abs(ratio - 1)), 1e-3)

  @parameterized.product(
    truncation=(dict(top_p=0.9), dict(top_k=5), dict(min_p=0.4)),
    temperature=(0.7, 1.3),
  )
  def test_under_truncation(self, truncation, temperature):
    """Step 0, its ratios, and what the first update makes of them."""
    learner = _learner(temperature=temperature, truncated=True)
    trajectories = self._sample(temperature, **truncation)
    packed = self._pack(trajectories)
    supports = np.unpackbits(packed.support_mask, axis=-1).sum(axis=-1)
    # Truncation leaves out, and does not always leave one token.
    self.assertLess(supports[packed.loss_mask].mean(), 0.9 * _VOCAB)
    self.assertGreater(supports[packed.loss_mask].mean(), 2.0)
    logprobs, moments = learner.score(_params(learner), packed)
    gaps = np.abs(np.asarray(logprobs) - packed.behavior_logprobs)
    self.assertLess(gaps[packed.loss_mask].max(), 1e-5)
    self.assertLess(float(jnp.max(moments.max_abs)), 1e-5)
    # Without the support the ratios would be those of other distributions.
    whole, _ = _learner(temperature=temperature).score(
      _params(learner), dataclasses.replace(packed, support_mask=None)
    )
    gaps = np.asarray(whole) - packed.behavior_logprobs
    self.assertLess(gaps[packed.loss_mask].mean(), -0.03)

    fields = {
      field.name: getattr(packed, field.name)
      for field in dataclasses.fields(ScoreBatch)
      if field.name != "behavior_entropy"
    }
    batch = _batch(**fields, proximal_logprobs=packed.behavior_logprobs)
    state, metrics = learner.step(_state(learner), batch)
    values = _values(metrics)
    self.assertAlmostEqual(values["train/ratio"], 1.0, delta=1e-5)
    self.assertAlmostEqual(values["train/kl"], 0.0, delta=1e-6)
    # As the sampler recorded it: of the truncated distribution.
    entropy = packed.behavior_entropy[packed.loss_mask].mean()
    self.assertAlmostEqual(values["train/entropy"], entropy, delta=1e-4)
    logprobs, _ = learner.score(state.params, packed)
    ell = np.asarray(logprobs) - packed.behavior_logprobs
    ratio = np.exp(ell[packed.loss_mask])
    self.assertTrue(np.all(np.isfinite(ratio)))
    self.assertGreater(np.mean(np.abs(ratio - 1)), 1e-3)

  @parameterized.parameters(True, False)
  def test_a_batch_of_the_other_kind_is_refused(self, truncated):
    learner = _learner(truncated=truncated)
    batch = _score_batch()
    if not truncated:
      shape = (_ROWS, _TOKENS, -(-_VOCAB // 8))
      batch = _score_batch(support_mask=np.full(shape, 255, np.uint8))
    with self.assertRaisesRegex(ValueError, f"truncated = {truncated}"):
      learner.score(_params(learner), batch)

  def _sample(self, temperature, **truncation):
    rollout = dataclasses.replace(
      _DEFAULT.rollout,
      **truncation,
      prompts_per_batch=8,
      samples_per_prompt=4,
      max_response_tokens=5,
      chunk_tokens=2,
      temperature=temperature,
    )
    device = jax.devices()[1]  # Disjoint from the learner's.
    mesh = Mesh(np.array([[device]]), meshes.ROLLOUT_AXES)
    engine = Engine(
      _policy(),
      rollout,
      mesh=mesh,
      max_prompt_tokens=3,
      stop_ids=(5, 9),
      pad_id=0,
      seed=0,
    )
    placement = Placement(_policy(), mesh=mesh, dtype=jnp.float32)
    snapshot = placement.place(PolicySnapshot(0, _host_params()))
    rng = np.random.default_rng(0)
    prompts = [
      Prompt(str(i), rng.integers(_VOCAB, size=1 + i % 3).astype(np.int32), {})
      for i in range(8)
    ]
    groups, _ = engine.generate(
      prompts, first_group_id=0, fetch=lambda: snapshot
    )
    return [t for group in groups for t in group.trajectories]

  def _pack(self, trajectories) -> ScoreBatch:
    """Two trajectories per row."""
    fields = {
      name: np.zeros_like(getattr(_score_batch(), name)) for name in _SCORED
    }
    if trajectories[0].support_mask is not None:
      shape = (_ROWS, _TOKENS, -(-_VOCAB // 8))
      fields["support_mask"] = np.zeros(shape, np.uint8)
    for index, trajectory in enumerate(trajectories):
      row, second = divmod(index, 2)
      start = len(trajectories[index - 1].tokens) if second else 0
      slots = slice(start, start + len(trajectory.tokens))
      for name in (
        "tokens",
        "loss_mask",
        "behavior_logprobs",
        "behavior_entropy",
      ):
        fields[name][row, slots] = getattr(trajectory, name)
      if trajectory.support_mask is not None:
        bits = trajectory.support_mask.dense()
        fields["support_mask"][row, slots] = bits
      fields["positions"][row, slots] = np.arange(len(trajectory.tokens))
      fields["segment_ids"][row, slots] = 1 + second
      fields["advantages"][row, slots] = 1.0 if index % 3 else -1.0
    return ScoreBatch(**fields)


class ScoreTest(parameterized.TestCase):
  def test_masked_slots_do_not_matter(self):
    learner = _learner()
    params, clean = _params(learner), _score_batch()
    masked, padding = ~clean.loss_mask, clean.segment_ids == 0

    def spoil(name, where, value):
      return {name: np.where(where, value, getattr(clean, name))}

    spoiled = _score_batch(
      **spoil("behavior_logprobs", masked, np.float32(np.nan)),
      **spoil("behavior_entropy", masked, np.float32(np.inf)),
      **spoil("advantages", masked, np.float32(np.nan)),
      **spoil("tokens", padding, np.int32(7)),
      **spoil("positions", padding, np.int32(999)),
    )
    want, want_moments = learner.score(params, clean)
    got, moments = learner.score(params, spoiled)
    real = clean.loss_mask
    np.testing.assert_array_equal(np.asarray(got)[real], np.asarray(want)[real])
    jax.tree.map(np.testing.assert_array_equal, moments, want_moments)
    self.assertTrue(np.all(np.isfinite(moments.second_moment)))

  def test_rows_do_not_depend_on_each_other(self):
    learner = _learner()
    params, clean = _params(learner), _score_batch()
    want, _ = learner.score(params, clean)
    other = clean.tokens.copy()
    other[1:] = (other[1:] + 5) % _VOCAB
    got, _ = learner.score(params, _score_batch(tokens=other))
    np.testing.assert_array_equal(got[0], want[0])
    turned, _ = learner.score(
      params, _score_batch(tokens=np.roll(clean.tokens, 3, axis=0))
    )
    np.testing.assert_allclose(
      turned, np.roll(np.asarray(want), 3, axis=0), atol=1e-5
    )

  @parameterized.parameters([(2, 2, 1)], [(2, 2, 2)])
  def test_sharded_equals_unsharded(self, train):
    results = []
    for learner in (_learner(), _learner(train=train)):
      results.append(learner.score(_params(learner), _score_batch()))
    _assert_close(*results, atol=1e-5)


class StepTest(parameterized.TestCase):
  def test_counts_its_steps_and_compiles_once(self):
    learner = Learner(
      _policy(),
      _learner(minibatches=2)._config,
      _DEFAULT.objective,
      mesh=_mesh((1, 2, 1)),
      temperature=1.0,
      truncated=False,
      num_steps=10,
      publish_dtype=jnp.dtype("float32"),
    )
    state = learner.init_state(learner.init_trained(0))
    self.assertEqual(int(state.step), 0)
    layout = jax.tree.map(lambda leaf: leaf.sharding, state)
    for step in range(1, 4):
      learner.score(state.params, _score_batch())
      state, _ = learner.step(state, _batch(2))
      self.assertEqual(int(state.step), step)
    # As the run moves an older snapshot back, to check the sampler with.
    older = transfer.to_mesh(
      learner.snapshot(state.params, version=3).params,
      shardings=learner.param_shardings,
      dtype=jnp.float32,
    )
    learner.score(older, _score_batch())
    self.assertEqual(learner.compiles(), {"score": 1, "train_step": 1})
    self.assertEqual(jax.tree.map(lambda leaf: leaf.sharding, state), layout)

  def test_the_state_is_donated(self):
    learner = _learner()
    state = _state(learner)
    snapshot = transfer.to_host(state.params, version=0)
    learner.step(state, _batch())
    for leaf in jax.tree.leaves(state):
      self.assertTrue(leaf.is_deleted())
    jax.tree.map(np.testing.assert_array_equal, snapshot.params, _host_params())

  def test_metrics_are_finite_sums_and_counts(self):
    learner = _learner()
    batch = _batch()
    state = _state(learner)
    _, metrics = learner.step(state, batch)
    for name, (total, count) in metrics.items():
      self.assertEqual((total.shape, count.shape), ((), ()), name)
      self.assertTrue(np.isfinite(total) and np.isfinite(count), name)
    tokens = batch.loss_mask.sum()
    values = _values(metrics)
    self.assertEqual(values["train/tokens"], tokens)
    self.assertEqual(values["train/skipped"], 0)
    self.assertEqual(float(metrics["train/entropy"][1]), tokens)
    self.assertBetween(values["train/entropy"], 1.0, np.log(_VOCAB))
    logprobs, _ = learner.score(_params(learner), _score_batch())
    ell = (np.asarray(logprobs) - batch.behavior_logprobs[0, 0])[
      batch.loss_mask[0, 0]
    ]
    np.testing.assert_allclose(
      values["train/ratio"], np.exp(ell).mean(), rtol=1e-4
    )

  def test_an_update_raises_the_chance_of_what_paid(self):
    learner = _learner()
    clean = _score_batch()
    before, _ = learner.score(_params(learner), clean)
    # On-policy, so that no ratio is clipped.
    on_policy = np.asarray(before)
    state, metrics = learner.step(
      _state(learner),
      _batch(
        behavior_logprobs=on_policy,
        proximal_logprobs=on_policy,
        advantages=clean.advantages,
      ),
    )
    after, _ = learner.score(state.params, clean)
    rise = (np.asarray(after) - on_policy)[clean.loss_mask]
    advantages = clean.advantages[clean.loss_mask]
    self.assertGreater(np.mean(rise * advantages), 1e-3)
    # On-policy the loss is minus the weighted mean advantage.
    np.testing.assert_allclose(
      _values(metrics)["train/loss"], -advantages.mean(), atol=1e-5
    )


class AccumulationTest(parameterized.TestCase):
  def test_microbatches_add_up(self):
    whole, parts = _learner(), _learner(microbatches=4)
    want, want_metrics = whole.step(_state(whole), _batch())
    got, metrics = parts.step(_state(parts), _batch(1, 4))
    self.assertGreater(_largest_gap(want.params, _host_params()), 1e-3)
    _assert_close(got.params, want.params, atol=1e-6)
    _assert_close(got.opt_state, want.opt_state, atol=1e-6)
    _assert_close(_values(metrics), _values(want_metrics), atol=1e-5)

  def test_two_minibatches_are_two_updates(self):
    once, twice = _learner(), _learner(minibatches=2)
    batch = _batch()
    got, metrics = twice.step(_state(twice), _batch(2))
    # One after the other by hand: each holds half of the weight, times M = 2.
    state = _state(once)
    half = _ROWS // 2
    for rows in (slice(None, half), slice(half, None)):
      changes = {}
      for field in dataclasses.fields(Batch):
        value = getattr(batch, field.name)
        if getattr(value, "ndim", 0) == 4:
          part = value[0, 0, rows]
          # The other half is padding, so that the shape stays.
          changes[field.name] = np.concatenate([part, np.zeros_like(part)])
      changes["token_weights"] = 2 * changes["token_weights"]
      state, _ = once.step(state, _batch(**changes))
    _assert_close(got.params, state.params, atol=1e-5)
    self.assertEqual(int(got.step), 1)
    self.assertEqual(float(metrics["train/grad_norm"][1]), 2.0)
    self.assertEqual(int(got.opt_state[1][0].count), 2)


class LossFamilyTest(parameterized.TestCase):
  """The losses beside the clipped one, through the model."""

  def _batch(self, loss, *shape, **changes):
    """Drifted, so that every loss has something to bound."""
    rng = np.random.default_rng(4)
    size = (_ROWS, _TOKENS)
    start, _ = _learner().score(_params(_learner()), _score_batch())
    behavior = np.asarray(start) + rng.normal(scale=0.3, size=size)
    fields = dict(
      behavior_logprobs=behavior.astype(np.float32),
      proximal_logprobs=np.asarray(start),
    )
    # A trajectory has one advantage, and one weight.
    segments = _batch().segment_ids[0, 0]
    advantages = rng.normal(size=(_ROWS, 3))
    fields["advantages"] = np.take_along_axis(advantages, segments, 1).astype(
      np.float32
    )
    if loss == "estr":
      entropy = rng.uniform(0, 2, size).astype(np.float32)
      fields["behavior_entropy"] = entropy
    batch = _batch(*shape, **fields | changes)
    if loss == "m2po":  # What it rejects would be clipped, mostly.
      clip = np.ones(_VERSIONS, np.float32)
      batch = dataclasses.replace(batch, clip_low=clip, clip_high=clip * np.inf)
    return batch

  def _step(self, loss, *shape, changes=None, train=(1, 1, 1), **objective):
    minibatches, microbatches = shape or (1, 1)
    learner = _learner(
      loss=loss,
      minibatches=minibatches,
      microbatches=microbatches,
      train=train,
      **objective,
    )
    batch = self._batch(loss, *shape, **changes or {})
    state, metrics = learner.step(_state(learner), batch)
    return state, _values(metrics)

  @parameterized.parameters(
    ("gspo", {"clipped_low", "clipped_high"}),
    ("cispo", {"clipped_low", "clipped_high"}),
    ("topr", {"clipped_high", "trajectory_weight"}),
    ("estr", {"rejected", "clipped_low"}),
    ("m2po", {"rejected"}),
  )
  def test_trains_in_a_way_of_its_own(self, loss, bounded):
    clipped, _ = self._step("clipped")
    state, values = self._step(loss)
    self.assertEqual(values["train/skipped"], 0)
    self.assertGreater(_largest_gap(state.params, _host_params()), 1e-3)
    for name in bounded:
      self.assertGreater(values[f"train/{name}"], 0, name)
    self.assertGreater(_largest_gap(state.params, clipped.params), 1e-4)
    for name in ("ratio", "kl", "ess_fraction"):
      want = self._step("clipped")[1][f"train/{name}"]
      np.testing.assert_allclose(values[f"train/{name}"], want, rtol=1e-5)

  def test_topr_has_no_clip_of_tokens_to_count(self):
    _, values = self._step("topr")
    self.assertEqual(values["train/clipped_low"], 0)
    self.assertEqual(values["train/clipped_dual"], 0)

  @parameterized.parameters("gspo", "cispo", "topr", "estr", "m2po")
  def test_loss_is_the_objectives(self, loss):
    objective = _DEFAULT.objective
    batch = jax.tree.map(
      lambda x: jnp.asarray(x[0, 0] if x.ndim == 4 else x), self._batch(loss)
    )
    logprobs, _ = _learner().score(_params(_learner()), _score_batch())
    fields = (
      batch.behavior_logprobs,
      batch.advantages,
      batch.token_weights,
      batch.loss_mask,
    )
    if loss == "gspo":
      want, _ = policy_losses.gspo(
        logprobs,
        *fields,
        batch.segment_ids,
        clip_low=objective.gspo_clip_low,
        clip_high=objective.gspo_clip_high,
        dual_clip=objective.dual_clip,
        num_segments=2,
      )
    elif loss == "cispo":
      clip = batch.clip_low, batch.clip_high
      want, _ = policy_losses.cispo(
        logprobs, *fields, batch.behavior_index, *clip
      )
    elif loss == "topr":
      want, _ = policy_losses.topr(
        logprobs, *fields, batch.segment_ids, num_segments=2
      )
    else:
      ell = logprobs - batch.behavior_logprobs
      if loss == "estr":
        keep = ell**2 / (batch.behavior_entropy + 0.01) <= 0.1
      else:
        keep = policy_losses.m2po_mask(
          logprobs,
          batch.behavior_logprobs,
          batch.advantages,
          batch.loss_mask,
          max_second_moment=0.04,
        )
      r, a = jnp.exp(ell), batch.advantages
      low, high = 1 - batch.clip_low[0], 1 + batch.clip_high[0]
      term = jnp.minimum(r * a, jnp.clip(r, low, high) * a)
      term = jnp.where(a < 0, jnp.maximum(term, 3 * a), term)
      weights = batch.token_weights * (batch.loss_mask & keep)
      want = -jnp.sum(weights * term)
    _, values = self._step(loss)
    np.testing.assert_allclose(values["train/loss"], want, rtol=1e-5)
    if loss in ("estr", "m2po"):
      rejected = jnp.mean(~keep[batch.loss_mask])
      self.assertAlmostEqual(values["train/rejected"], rejected, places=5)
    if loss == "estr":  # Of the others, and not of all.
      held = (a < 0) & (r < low) & batch.loss_mask
      self.assertGreater(jnp.sum(held & ~keep), 0)
      self.assertAlmostEqual(
        values["train/clipped_low"],
        jnp.sum(held & keep) / jnp.sum(batch.loss_mask),
        places=5,
      )

  def test_m2po_masks_by_the_policy_before_each_optimizer_step(self):
    once, twice = _learner(loss="m2po"), _learner(loss="m2po", minibatches=2)
    state, batch = _state(twice), self._batch("m2po", 2, 1)
    got, metrics = twice.step(_state(twice), batch)
    half, rejected = _ROWS // 2, []
    for rows in range(2):
      # By hand: each half scored again under the parameters of the moment.
      changes = {}
      for field in dataclasses.fields(Batch):
        value = getattr(batch, field.name)
        if getattr(value, "ndim", 0) == 4:
          part = value[rows].reshape(half, _TOKENS)
          # The other half is padding, so that the shape stays.
          changes[field.name] = np.concatenate([part, np.zeros_like(part)])
      changes["token_weights"] *= 2
      scored = ScoreBatch(
        **{name: changes[name] for name in _SCORED if name in changes},
        behavior_entropy=np.ones((_ROWS, _TOKENS), np.float32),
      )
      now, _ = once.score(state.params, scored)
      before = changes["proximal_logprobs"]
      changes["proximal_logprobs"] = np.asarray(now)
      masks = [
        policy_losses.m2po_mask(
          x,
          *(
            changes[name]
            for name in ("behavior_logprobs", "advantages", "loss_mask")
          ),
          max_second_moment=0.04,
        )
        for x in (before, now)
      ]
      # The first step's mask is the scoring pass's; the second's is not.
      self.assertEqual(bool(jnp.all(masks[0] == masks[1])), rows == 0)
      half_batch = dataclasses.replace(
        _batch(**changes), clip_low=batch.clip_low, clip_high=batch.clip_high
      )
      state, values = once.step(state, half_batch)
      rejected.append(float(values["train/rejected"][0]))
    _assert_close(got.params, state.params, atol=1e-5)
    self.assertEqual(float(metrics["train/rejected"][0]), sum(rejected))

  def test_a_penalty_holds_what_is_rejected_too(self):
    _, plain = self._step("m2po")
    _, values = self._step("m2po", kl_coefficient=0.5)
    want = plain["train/loss"] + 0.5 * plain["train/kl"]
    np.testing.assert_allclose(values["train/loss"], want, rtol=1e-5)

  @parameterized.parameters("truncate", "mask", "band")
  def test_a_mask_of_the_behavior_weight_rejects(self, mode):
    noise = np.random.default_rng(5).normal(scale=0.5, size=(_ROWS, _TOKENS))
    prox = self._batch("clipped").proximal_logprobs[0, 0]
    _, values = self._step(
      "clipped",
      trust_region="decoupled",
      behavior_weight_mode=mode,
      max_behavior_weight=1.5,
      changes=dict(proximal_logprobs=(prox + noise).astype(np.float32)),
    )
    self.assertGreater(values["train/weight_capped"], 0)
    if mode == "truncate":
      self.assertNotIn("train/rejected", values)
    else:
      self.assertEqual(values["train/rejected"], values["train/weight_capped"])

  @parameterized.parameters("gspo", "cispo", "topr", "estr", "m2po")
  def test_microbatches_on_eight_devices_add_up(self, loss):
    want, want_values = self._step(loss)
    got, values = self._step(loss, 1, 2, train=(2, 2, 2))
    _assert_close(values, want_values, atol=1e-5)
    _assert_close(got.params, want.params, atol=1e-5)

  @parameterized.product(
    loss=["gspo", "cispo", "topr", "estr", "m2po"],
    name=["advantages", "token_weights", "behavior_logprobs"],
  )
  def test_what_is_not_finite_is_not_applied(self, loss, name):
    values = getattr(self._batch(loss), name)[0, 0].copy()
    slot = np.flatnonzero(_batch().loss_mask[0, 0].reshape(-1))[-1]
    values.reshape(-1)[slot] = np.nan
    state, values = self._step(loss, changes={name: values})
    self.assertEqual(values["train/non_finite"], 1)
    self.assertTrue(np.all(np.isfinite(list(values.values()))), values)
    self.assertEqual(_largest_gap(state.params, _host_params()), 0)

  def test_kl_penalty(self):
    _, plain = self._step("clipped")
    state, values = self._step("clipped", kl_coefficient=0.5)
    # The weights are 1 / N: the penalty is the mean k3 that is reported.
    want = plain["train/loss"] + 0.5 * plain["train/kl"]
    np.testing.assert_allclose(values["train/loss"], want, rtol=1e-5)
    other, _ = self._step("clipped", kl_coefficient=0.5, kl_estimator="k1")
    self.assertGreater(_largest_gap(state.params, other.params), 1e-4)

  def test_programs_take_what_the_loss_reads(self):
    for loss in ("estr", "clipped"):
      batch = self._batch(loss)
      learner = _learner(loss=loss)
      lowered = learner.programs()["train_step"]()
      shapes = jax.tree.leaves(lowered.in_avals[0][2])
      self.assertLen(shapes, len(jax.tree.leaves(batch)), loss)


class BalancedTest(parameterized.TestCase):
  """pi/prox is clipped, and mu has no say: the weights have."""

  def _step(self, *shape, train=(1, 1, 1), **changes):
    minibatches, microbatches = shape or (1, 1)
    learner = _learner(
      behavior_weighting="balance",
      trust_region="decoupled",
      minibatches=minibatches,
      microbatches=microbatches,
      train=train,
    )
    batch = _batch(*shape, **self._fields() | changes)
    state, metrics = learner.step(_state(learner), batch)
    return state, _values(metrics)

  def _fields(self):
    rng = np.random.default_rng(6)
    start, _ = _learner().score(_params(_learner()), _score_batch())
    self.start = np.asarray(start)
    fields = {
      name: (self.start + rng.normal(scale=0.4, size=self.start.shape))
      for name in ("behavior_logprobs", "proximal_logprobs")
    }
    weights = rng.uniform(0, 2, size=self.start.shape) / 100
    fields["token_weights"] = weights
    return {name: x.astype(np.float32) for name, x in fields.items()}

  def test_by_the_formula(self):
    _, values = self._step()
    fields, plain = self._fields(), _batch()
    mask, a = plain.loss_mask[0, 0], plain.advantages[0, 0].astype(np.float64)
    r = np.exp(self.start.astype(np.float64) - fields["proximal_logprobs"])
    term = np.minimum(r * a, np.clip(r, 0.8, 1.28) * a)
    term = np.where(a < 0, np.maximum(term, 3 * a), term)
    want = -np.sum((fields["token_weights"] * term)[mask])
    np.testing.assert_allclose(values["train/loss"], want, rtol=1e-5)
    high = np.mean(((r > 1.28) & (a > 0))[mask])
    np.testing.assert_allclose(values["train/clipped_high"], high, rtol=1e-5)
    # What is said of ratios is of pi/mu, as everywhere.
    ratio = np.exp(self.start - fields["behavior_logprobs"])[mask].mean()
    np.testing.assert_allclose(values["train/ratio"], ratio, rtol=1e-5)

  def test_mu_changes_ratios_alone(self):
    state, values = self._step()
    other, others = self._step(behavior_logprobs=self.start)
    _assert_close(other, state, atol=0)
    self.assertEqual(others["train/loss"], values["train/loss"])
    self.assertAlmostEqual(others["train/ratio"], 1.0, delta=1e-5)

  def test_microbatches_on_eight_devices_add_up(self):
    want, want_values = self._step()
    got, values = self._step(1, 2, train=(2, 2, 2))
    _assert_close(values, want_values, atol=1e-5)
    _assert_close(got.params, want.params, atol=1e-5)


class StepScaleTest(parameterized.TestCase):
  """VCPO: what the optimizer does, times what its samples are worth."""

  _TARGET = 0.9

  def _batch(self, *shape, **changes):
    """Drifted, and some of it from other policies."""
    scored, _ = _learner().score(_params(_learner()), _score_batch())
    noise = np.random.default_rng(1).normal(scale=0.8, size=(_ROWS, _TOKENS))
    behavior = (np.asarray(scored) + noise).astype(np.float32)
    return _batch(*shape, **dict(behavior_logprobs=behavior) | changes)

  def _ess_fraction(self, params, batch):
    """In float64, from the scoring pass."""
    logprobs, _ = _learner().score(params, _score_batch())
    ell = np.asarray(logprobs, np.float64) - batch.behavior_logprobs[0, 0]
    totals = [
      ell[row][batch.loss_mask[0, 0, row] & (segments == i)].sum()
      for row, segments in enumerate(batch.segment_ids[0, 0])
      for i in (1, 2)
    ]
    weights = np.exp(totals)
    ess = weights.sum() ** 2 / np.square(weights).sum()
    return ess / len(weights)

  @parameterized.parameters("clipped", "topr")
  def test_scales_what_the_optimizer_does(self, loss):
    plain, scaled = (
      _learner(loss=loss),
      _learner(loss=loss, step_ess_target=self._TARGET),
    )
    batch = self._batch()
    fraction = self._ess_fraction(_params(plain), batch)
    scale = np.sqrt(fraction / self._TARGET)
    self.assertBetween(scale, 0.2, 0.95)
    want, want_metrics = plain.step(_state(plain), batch)
    got, metrics = scaled.step(_state(scaled), batch)
    values, want_values = _values(metrics), _values(want_metrics)
    self.assertAlmostEqual(values.pop("train/step_scale"), scale, places=5)
    self.assertAlmostEqual(
      values.pop("train/trajectory_ess_fraction"), fraction, places=5
    )
    _assert_close(values, want_values, atol=1e-6)
    moved = jax.tree.map(
      lambda new, old: old + scale * (np.asarray(new) - old),
      want.params,
      _host_params(),
    )
    _assert_close(got.params, moved, atol=1e-6)
    self.assertGreater(_largest_gap(got.params, want.params), 1e-4)
    # The moments are those of the whole gradient.
    _assert_close(got.opt_state, want.opt_state, atol=1e-6)

  @parameterized.parameters(
    (1, 4, (1, 1, 1)), (1, 2, (2, 2, 2)), (1, 1, (2, 2, 1))
  )
  def test_is_of_the_whole_optimizer_batch(self, minibatches, parts, train):
    whole = _learner(step_ess_target=self._TARGET)
    cut = _learner(
      step_ess_target=self._TARGET, microbatches=parts, train=train
    )
    want, want_metrics = whole.step(_state(whole), self._batch())
    got, metrics = cut.step(_state(cut), self._batch(minibatches, parts))
    _assert_close(_values(metrics), _values(want_metrics), atol=1e-5)
    _assert_close(got.params, want.params, atol=1e-5)

  def test_each_optimizer_step_has_its_own(self):
    learner = _learner(step_ess_target=self._TARGET, minibatches=2)
    batch = self._batch(2)
    spoiled = dataclasses.replace(
      batch, behavior_logprobs=batch.behavior_logprobs.copy()
    )
    # The second one's trajectories have one that outweighs all others.
    spoiled.behavior_logprobs[1, 0, 0] -= 5
    _, metrics = learner.step(_state(learner), batch)
    _, spoiled_metrics = learner.step(_state(learner), spoiled)
    name = "train/step_scale"
    self.assertLess(
      _values(spoiled_metrics)[name], _values(metrics)[name] - 0.1
    )
    self.assertEqual(float(metrics[name][1]), 2)

  def test_what_is_skipped_has_none(self):
    learner = _learner(step_ess_target=self._TARGET)
    for changes in (
      dict(loss_mask=np.zeros((_ROWS, _TOKENS), bool)),
      dict(behavior_logprobs=np.full((_ROWS, _TOKENS), np.nan, "f4")),
    ):
      state, metrics = learner.step(_state(learner), self._batch(**changes))
      values = _values(metrics)
      self.assertTrue(np.all(np.isfinite(list(values.values()))), values)
      self.assertEqual(float(metrics["train/step_scale"][1]), 0)
      self.assertEqual(_largest_gap(state.params, _host_params()), 0)


class ReferenceTest(parameterized.TestCase):
  """A penalty on the way from where the run began."""

  def _step(self, learner, state, **shape):
    noise = np.random.default_rng(int(state.step)).normal(
      scale=0.3, size=(_ROWS, _TOKENS)
    )
    scored, _ = learner.score(state.params, _score_batch())
    behavior = (np.asarray(scored) + noise).astype(np.float32)
    config = learner._config
    batch = _batch(
      config.minibatches, config.microbatches, behavior_logprobs=behavior
    )
    state, metrics = learner.step(state, batch)
    return state, _values(metrics)

  @parameterized.parameters(
    (dict(), 0), (dict(train=(2, 2, 2), microbatches=2), 2)
  )
  def test_holds_the_policy_near_it(self, shape, rank):
    plain = _learner(lora_rank=rank, **shape)
    held = _learner(
      kl_coefficient=0.5, kl_target="reference", lora_rank=rank, **shape
    )
    host = _host_params(lora_rank=rank)
    start = lora.split(host)[0]
    got, want = (
      learner.init_state(jax.device_put(host, learner.param_shardings))
      for learner in (held, plain)
    )
    self.assertIsNone(want.reference)
    layout = jax.tree.map(lambda leaf: leaf.sharding, got)
    self.assertEqual(layout.reference, held.trained_shardings)
    got, values = self._step(held, got)
    want, want_values = self._step(plain, want)
    # Nothing to hold yet.
    self.assertAlmostEqual(values.pop("train/reference_kl"), 0.0, places=5)
    _assert_close(values, want_values, atol=1e-5)
    _assert_close(got.params, want.params, atol=1e-6)
    for _ in range(2):
      got, values = self._step(held, got)
      want, _ = self._step(plain, want)
    self.assertGreater(values["train/reference_kl"], 1e-4)
    jax.tree.map(np.testing.assert_array_equal, got.reference, start)
    distance = lambda params: sum(  # noqa: E731
      np.sum(np.square(np.asarray(a) - b))
      for a, b in zip(
        jax.tree.leaves(params), jax.tree.leaves(start), strict=True
      )
    )
    self.assertLess(distance(got.params), distance(want.params))
    self.assertEqual(jax.tree.map(lambda leaf: leaf.sharding, got), layout)
    self.assertEqual(held.compiles()["train_step"], 1)
    of = lambda x: (x.shape, x.dtype, x.sharding)  # noqa: E731
    self.assertEqual(
      jax.tree.map(of, got), jax.tree.map(of, held.abstract_state())
    )

  @parameterized.parameters("k1", "k2", "k3")
  def test_the_penalty_is_the_estimators(self, estimator):
    plain = _learner(loss="estr")
    held = _learner(
      kl_coefficient=0.5,
      kl_target="reference",
      kl_estimator=estimator,
      loss="estr",
    )
    entropy = np.full((_ROWS, _TOKENS), 0.1, np.float32)
    other = jax.device_put(_host_params(1), held.trained_shardings)
    batch = _batch(behavior_entropy=entropy)
    state = dataclasses.replace(_state(held), reference=other)
    x = np.asarray(held.score(state.params, _score_batch())[0]) - np.asarray(
      held.score(other, _score_batch())[0]
    )
    _, metrics = held.step(state, batch)
    _, plain_metrics = plain.step(_state(plain), batch)
    each = {"k1": x, "k2": x**2 / 2, "k3": np.exp(-x) - 1 + x}[estimator]
    mean = each[_batch().loss_mask[0, 0]].mean()
    self.assertGreater(_values(plain_metrics)["train/rejected"], 0)
    np.testing.assert_allclose(
      _values(metrics)["train/reference_kl"], mean, rtol=1e-4
    )
    # The weights are 1 / N, of the rejected tokens as well.
    np.testing.assert_allclose(
      _values(metrics)["train/loss"],
      _values(plain_metrics)["train/loss"] + 0.5 * mean,
      rtol=1e-4,
    )


class AveragedProximalTest(parameterized.TestCase):
  """The proximal policy that is an average of the policies so far."""

  def _learners(self, window, min_passed=0.9, **keywords):
    """Around the average, and around the policy at the start of the step."""
    shared = dict(
      trust_region="decoupled", behavior_weight_mode="band", **keywords
    )
    return (
      _learner(
        proximal="ewma",
        ewma_window=window,
        ewma_min_passed_fraction=min_passed,
        **shared,
      ),
      _learner(**shared),
    )

  def _state(self, learner, lora_rank=0):
    host = _host_params(lora_rank=lora_rank)
    return learner.init_state(jax.device_put(host, learner.param_shardings))

  def _batch(self, learner, params, seed=0, scale=0.3):
    """Drifted from ``params``, under which it was scored."""
    scored, _ = learner.score(params, _score_batch())
    scored = np.asarray(scored)
    noise = scale * np.random.default_rng(seed).normal(size=scored.shape)
    config = learner._config
    return _batch(
      config.minibatches,
      config.microbatches,
      behavior_logprobs=(scored + noise).astype(np.float32),
      proximal_logprobs=scored,
    )

  @parameterized.parameters(
    (1, 1, (1, 1, 1), 0), (2, 2, (1, 1, 1), 0), (1, 2, (2, 2, 2), 2)
  )
  def test_window_0_is_recompute(self, minibatches, parts, train, rank):
    averaged, plain = self._learners(
      0,
      minibatches=minibatches,
      microbatches=parts,
      train=train,
      lora_rank=rank,
    )
    got, want = (self._state(x, rank) for x in (averaged, plain))
    self.assertIsNone(want.proximal_average)
    for seed in range(3):
      batch = self._batch(plain, want.params, seed)
      got, metrics = averaged.step(got, batch)
      want, want_metrics = plain.step(want, batch)
      values, want_values = _values(metrics), _values(want_metrics)
      self.assertGreater(values["train/weight_capped"], 0)
      _assert_close(
        {name: values[name] for name in want_values}, want_values, atol=1e-5
      )
      _assert_close(got.params, want.params, atol=1e-6)
    self.assertGreater(
      _largest_gap(want.params, self._state(plain, rank).params), 1e-3
    )

  @parameterized.parameters(((1, 1, 1), 0), ((2, 2, 2), 0), ((2, 2, 2), 2))
  def test_is_the_average_of_the_policies_before_each_step(self, train, rank):
    averaged, _ = self._learners(8, 0.0, train=train, lora_rank=rank)
    state, policies = self._state(averaged, rank), []
    layout = jax.tree.map(lambda leaf: leaf.sharding, state)
    for seed in range(4):
      policies.append(jax.tree.map(np.array, state.params))
      batch = self._batch(averaged, state.params, seed)
      state, metrics = averaged.step(state, batch)
      self.assertEqual(_values(metrics)["train/proximal_resets"], 0)
    want = jax.tree.map(
      lambda *leaves: reference.ewma(leaves, window=8), *policies
    )
    _assert_close(state.proximal_average.params, want, atol=1e-6)
    self.assertGreater(_largest_gap(policies[-1], want), 1e-3)
    # Cut as the parameters are, and not by chance.
    self.assertEqual(jax.tree.map(lambda leaf: leaf.sharding, state), layout)
    self.assertEqual(
      jax.tree.map(lambda leaf: leaf.sharding, state.proximal_average.params),
      averaged.trained_shardings,
    )
    self.assertEqual(averaged.compiles()["train_step"], 1)

  def test_the_trust_region_is_around_it(self):
    """As if its log-probs had come with the batch."""
    averaged, plain = self._learners(8, 0.0)
    state = self._state(averaged)
    for seed in range(3):
      batch = self._batch(averaged, state.params, seed)
      before = jax.tree.map(np.array, state)
      state, metrics = averaged.step(state, batch)
    # One minibatch: around the policy itself nothing would be clipped.
    values = _values(metrics)
    clipped = values["train/clipped_low"] + values["train/clipped_high"]
    self.assertGreater(clipped, 0.005)
    centre = jax.device_put(
      state.proximal_average.params, plain.param_shardings
    )
    logprobs, _ = plain.score(centre, _score_batch())
    want, want_metrics = plain.step(
      jax.device_put(
        dataclasses.replace(before, proximal_average=None),
        plain._state_shardings,
      ),
      dataclasses.replace(
        batch, proximal_logprobs=np.asarray(logprobs)[None, None]
      ),
    )
    _assert_close(state.params, want.params, atol=1e-6)
    want_values = _values(want_metrics)
    _assert_close(
      {name: values[name] for name in want_values}, want_values, atol=1e-5
    )
    passed = 1 - sum(
      values[f"train/{name}"]
      for name in ("clipped_low", "clipped_high", "clipped_dual", "rejected")
    )
    self.assertAlmostEqual(values["train/proximal_passed"], passed, places=5)

  def test_starts_anew_when_too_few_tokens_pass(self):
    averaged, _ = self._learners(8)
    state = self._state(averaged)
    state, metrics = averaged.step(
      state, self._batch(averaged, state.params, scale=0.1)
    )
    self.assertEqual(_values(metrics)["train/proximal_resets"], 0)
    state, metrics = averaged.step(
      state, self._batch(averaged, state.params, scale=2.0)
    )
    self.assertLess(_values(metrics)["train/proximal_passed"], 0.9)
    self.assertEqual(_values(metrics)["train/proximal_resets"], 1)
    before = jax.tree.map(np.array, state.params)
    batch = self._batch(averaged, state.params, scale=0.1)
    state, metrics = averaged.step(state, batch)
    self.assertEqual(_values(metrics)["train/proximal_resets"], 0)
    self.assertEqual(float(state.proximal_average.weight), 1)
    jax.tree.map(
      np.testing.assert_array_equal, state.proximal_average.params, before
    )

  def test_a_step_without_a_token_is_no_reason_to(self):
    averaged, _ = self._learners(8)
    none = _batch(loss_mask=np.zeros((_ROWS, _TOKENS), bool))
    state, metrics = averaged.step(self._state(averaged), none)
    values = _values(metrics)
    self.assertTrue(np.all(np.isfinite(list(values.values()))), values)
    self.assertEqual(values["train/proximal_resets"], 0)
    self.assertEqual(float(state.proximal_average.weight), 1)

  def test_an_abstract_state_is_the_real_one(self):
    averaged, plain = self._learners(8, train=(2, 2, 2))
    of = lambda x: (x.shape, x.dtype, x.sharding)  # noqa: E731
    state = self._state(averaged)
    self.assertEqual(
      jax.tree.map(of, state), jax.tree.map(of, averaged.abstract_state())
    )
    averaged.programs()["train_step"]()
    # Where it is off, nothing is held.
    extra = len(jax.tree.leaves(state)) - len(
      jax.tree.leaves(plain.abstract_state())
    )
    self.assertEqual(extra, len(jax.tree.leaves(state.params)) + 1)


class SkippedTest(parameterized.TestCase):
  def test_a_fully_masked_batch_changes_nothing(self):
    learner = _learner()
    before = jax.tree.map(np.array, _state(learner))
    none = np.zeros((_ROWS, _TOKENS), bool)
    state, metrics = learner.step(_state(learner), _batch(loss_mask=none))
    jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
    jax.tree.map(
      np.testing.assert_array_equal, state.opt_state, before.opt_state
    )
    self.assertEqual(int(state.step), 1)
    values = _values(metrics)
    self.assertEqual(values["train/skipped"], 1)
    self.assertEqual(values["train/non_finite"], 0)
    self.assertEqual(values["train/loss"], 0)
    self.assertTrue(np.all(np.isfinite(list(values.values()))))

  @parameterized.parameters(
    ("behavior", "advantages", np.nan),
    ("behavior", "advantages", np.inf),
    ("behavior", "advantages", -np.inf),
    ("behavior", "token_weights", np.nan),
    ("behavior", "token_weights", np.inf),
    # The loss is finite; the norm of its gradient is not.
    ("behavior", "token_weights", 1e30),
    ("behavior", "behavior_logprobs", np.nan),
    ("decoupled", "behavior_logprobs", np.nan),
    ("decoupled", "proximal_logprobs", np.nan),
  )
  def test_a_batch_that_is_not_finite_is_not_applied(self, region, name, value):
    learner = _learner(minibatches=2, trust_region=region)
    spoiled = self._spoiled(name, value)
    batch = _batch(2, **spoiled)
    # A token that is held at the clip has no gradient.
    wide = np.full_like(batch.clip_high, np.inf)
    batch = dataclasses.replace(batch, clip_high=wide)
    state, metrics = learner.step(_state(learner), batch)
    for leaf in jax.tree.leaves(state):
      self.assertTrue(np.all(np.isfinite(leaf)))
    values = _values(metrics)
    self.assertTrue(np.all(np.isfinite(list(values.values()))), values)
    # The other minibatch was trained on, and it alone is counted.
    self.assertEqual(values["train/skipped"], 1)
    self.assertEqual(values["train/non_finite"], 1)
    self.assertEqual(int(state.opt_state[1][0].count), 1)
    self.assertGreater(_largest_gap(state.params, _host_params()), 1e-3)
    self.assertEqual(values["train/tokens"], _batch().loss_mask.sum() / 2)

  @parameterized.parameters(
    ("advantages", np.nan),
    ("advantages", np.inf),
    ("token_weights", -np.inf),
    ("behavior_logprobs", np.nan),
    ("params", np.nan),
    ("params", np.inf),
  )
  def test_nothing_at_all_changes(self, name, value):
    learner = _learner()
    # Of a state that has moments, so that to lose them would show.
    state, _ = learner.step(_state(learner), _batch())
    spoiled = {}
    if name == "params":
      host = jax.tree.map(np.array, state.params)
      max(jax.tree.leaves(host), key=np.size).reshape(-1)[5] = value
      params = jax.device_put(host, learner.trained_shardings)
      state = dataclasses.replace(state, params=params)
    else:
      spoiled = self._spoiled(name, value)
    before = jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), state)
    state, metrics = learner.step(state, _batch(**spoiled))
    after = jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), state)
    self.assertEqual(after.params, before.params)
    self.assertEqual(after.opt_state, before.opt_state)
    self.assertEqual(int(state.step), 2)
    values = _values(metrics)
    self.assertTrue(np.all(np.isfinite(list(values.values()))), values)
    self.assertEqual(values["train/skipped"], 1)
    self.assertEqual(values["train/non_finite"], 1)
    self.assertEqual(float(metrics["train/grad_norm"][1]), 0)

  @parameterized.parameters(np.inf, -np.inf)
  def test_an_infinite_logprob_is_a_clamped_ratio(self, value):
    learner = _learner()
    far = 1e3 if value > 0 else -1e3
    got, metrics = learner.step(
      _state(learner), _batch(**self._spoiled("behavior_logprobs", value))
    )
    want, _ = learner.step(
      _state(learner), _batch(**self._spoiled("behavior_logprobs", far))
    )
    self.assertEqual(_values(metrics)["train/skipped"], 0)
    jax.tree.map(np.testing.assert_array_equal, got, want)

  def _spoiled(self, name, value):
    """The batch's field with ``value`` on the last sampled token."""
    array = getattr(_batch(), name)[0, 0].copy()
    slot = np.flatnonzero(_batch().loss_mask[0, 0].reshape(-1))[-1]
    array.reshape(-1)[slot] = value
    return {name: array}

  def test_garbage_in_masked_slots_changes_nothing(self):
    learner = _learner()
    clean = _batch()
    masked = ~clean.loss_mask[0, 0]
    padding = clean.segment_ids[0, 0] == 0
    spoiled = {}
    for name, where, value in (
      ("behavior_logprobs", masked, np.nan),
      ("proximal_logprobs", masked, np.inf),
      ("advantages", masked, np.nan),
      ("token_weights", masked, np.inf),
      ("behavior_index", masked, 99),
      ("tokens", padding, 7),
      ("positions", padding, 999),
    ):
      values = getattr(clean, name)[0, 0]
      spoiled[name] = np.where(where, value, values).astype(values.dtype)
    want, want_metrics = learner.step(_state(learner), clean)
    got, metrics = learner.step(_state(learner), _batch(**spoiled))
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
    self.assertEqual(_values(metrics), _values(want_metrics))


class ShardedTest(parameterized.TestCase):
  @parameterized.parameters([(2, 2, 1)], [(2, 2, 2)])
  def test_the_first_step_equals_that_of_one_device(self, train):
    one, many = _learner(), _learner(train=train)
    want, want_metrics = one.step(_state(one), _batch())
    got, metrics = many.step(_state(many), _batch())
    _assert_close(_values(metrics), _values(want_metrics), atol=1e-5)
    _assert_close(got.params, want.params, atol=1e-5)
    # It really is cut: weights along fsdp, moments with them.
    up = got.params["layers"]["feed_forward"]["up"]
    moment = got.opt_state[1][0].mu["layers"]["feed_forward"]["up"]
    for leaf in (up, moment):
      self.assertEqual(
        leaf.addressable_shards[0].data.shape, (1, 8, 32 // train[2])
      )

  @parameterized.parameters(True, False)
  def test_truncated_too(self, by_blocks):
    """Microbatches on eight devices, and one batch on one."""
    rng = np.random.default_rng(1)
    shape = _batch().tokens.shape[-2:]
    mask = rng.random((*shape, _VOCAB)) < 0.4
    tokens = _batch().tokens[0, 0]
    np.put_along_axis(mask, tokens[..., None], True, axis=-1)
    support = np.packbits(mask, axis=-1, bitorder="little")
    # Where nothing was sampled it is not looked at.
    support[~_batch().loss_mask[0, 0]] = 0
    want, want_metrics = (one := _learner(truncated=True)).step(
      _state(one), _batch(support_mask=support)
    )
    whole, _ = _learner().step(_state(_learner()), _batch())
    self.assertGreater(_largest_gap(whole.params, want.params), 1e-3)
    bytes_ = 0 if by_blocks else block_sizes.SMALL_LOGITS_BYTES
    with mock.patch.object(block_sizes, "SMALL_LOGITS_BYTES", bytes_):
      many = _learner.__wrapped__(
        truncated=True, train=(2, 2, 2), microbatches=2
      )
      got, metrics = many.step(_state(many), _batch(1, 2, support_mask=support))
    _assert_close(_values(metrics), _values(want_metrics), atol=1e-5)
    _assert_close(got.params, want.params, atol=1e-5)
    # The largest array of a batch: each device has its rows' alone.
    batch = _batch(1, 2, support_mask=support)
    lies = many._batch_shardings(batch)
    self.assertEqual(lies.support_mask, lies.tokens)
    self.assertNotEqual(lies.support_mask, lies.versions)

  @parameterized.parameters([(2, 2, 1)], [(2, 2, 2)])
  def test_in_bfloat16_by_blocks_of_the_vocabulary(self, train):
    """As large models run it: the logits are never whole."""
    with mock.patch.object(block_sizes, "SMALL_LOGITS_BYTES", 0):
      one = _learner.__wrapped__(compute_dtype="bfloat16")
      many = _learner.__wrapped__(compute_dtype="bfloat16", train=train)
      want, want_metrics = one.step(_state(one), _batch())
      got, metrics = many.step(_state(many), _batch())
    want_metrics, metrics = _values(want_metrics), _values(metrics)
    for name in ("train/loss", "train/grad_norm", "train/entropy", "train/kl"):
      np.testing.assert_allclose(
        metrics[name], want_metrics[name], rtol=2e-2, err_msg=name
      )
    # A step of Adam's is 1e-2 at most.
    start = _host_params()
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), want.params, start)
    self.assertGreater(max(jax.tree.leaves(moved)), 5e-3)
    _assert_close(got.params, want.params, atol=1e-3)
    # And it is the float32 step, but for rounding.
    exact, _ = _learner().step(_state(_learner()), _batch())
    _assert_close(got.params, exact.params, atol=2e-3)


class SnapshotTest(parameterized.TestCase):
  @parameterized.parameters("float32", "bfloat16")
  def test_is_what_the_sampler_computes_with(self, dtype):
    learner = _learner(publish_dtype=dtype)
    state = _state(learner)
    snapshot = learner.snapshot(state.params, version=7)
    self.assertEqual(snapshot.version, 7)
    want = jax.tree.map(lambda leaf: leaf.astype(dtype), _host_params())
    jax.tree.map(np.testing.assert_array_equal, snapshot.params, want)
    for leaf in jax.tree.leaves(snapshot.params):
      self.assertEqual(leaf.dtype, jnp.dtype(dtype))
    # The next step donates the parameters; the snapshot is not an alias.
    learner.step(state, _batch())
    jax.tree.map(np.testing.assert_array_equal, snapshot.params, want)


def _signature(lowered) -> str:
  """Shapes, types, shardings and donations of a program's arrays."""
  [main] = [
    line for line in lowered.as_text().splitlines() if "public @main" in line
  ]
  return main


class AdapterTest(parameterized.TestCase):
  """A learner that trains adapters of a frozen model."""

  def _start(self, **keywords):
    learner = _learner(lora_rank=2, **keywords)
    params = jax.device_put(_host_params(lora_rank=2), learner.param_shardings)
    return learner, learner.init_state(params)

  def _names(self, tree) -> set[str]:
    return {
      jax.tree_util.keystr(path, simple=True, separator=".")
      for path, _ in jax.tree.leaves_with_path(tree)
    }

  def test_state_and_snapshot_hold_adapters_alone(self):
    learner, state = self._start()
    names = self._names(state.params)
    self.assertLen(names, 14)
    self.assertTrue(all(".adapters." in name for name in names))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    self.assertLen(moments, 2 * 14)
    snapshot = learner.snapshot(state.params, version=0)
    self.assertEqual(self._names(snapshot.params), names)
    self.assertNotIn("adapters", str(self._names(learner.frozen)))

  @parameterized.parameters([(1, 1, 1)], [(2, 2, 2)])
  def test_the_step_is_that_of_the_whole_model(self, train):
    """The adapters' gradient is what the whole model's says of them."""
    learner, state = self._start(train=train)
    before = jax.tree.map(np.asarray, (state.params, learner.frozen))
    whole = _learner()
    logprobs, _ = learner.score(state.params, _score_batch())
    merged = lora.merge(_host_params(lora_rank=2), learner._policy.config)
    want, _ = whole.score(
      jax.device_put(merged, whole.param_shardings), _score_batch()
    )
    np.testing.assert_allclose(logprobs, want, atol=2e-5)
    state, metrics = learner.step(state, _batch())
    _, theirs = whole.step(
      whole.init_state(jax.device_put(merged, whole.param_shardings)), _batch()
    )
    for name in ("train/loss", "train/kl", "train/entropy"):
      np.testing.assert_allclose(metrics[name], theirs[name], rtol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, learner.frozen, before[1])
    for now, then in zip(
      jax.tree.leaves(state.params), jax.tree.leaves(before[0]), strict=True
    ):
      self.assertGreater(np.abs(np.asarray(now) - then).max(), 1e-4)

  def test_frozen_kernels_take_the_compute_dtype(self):
    learner, state = self._start(compute_dtype="bfloat16")
    attention = learner.frozen["layers"]["attention"]
    self.assertEqual(attention["query"].dtype, jnp.bfloat16)
    self.assertEqual(learner.frozen["embedding"].dtype, jnp.float32)
    self.assertEqual(
      {leaf.dtype for leaf in jax.tree.leaves(state.params)},
      {jnp.dtype("float32")},
    )
    programs = learner.programs()
    programs["score"]()
    _, metrics = learner.step(state, _batch())
    self.assertGreater(metrics["train/grad_norm"][0], 0)
    # As they are planned, so they run.
    shapes = programs["train_step"]().args_info[0][1]
    self.assertEqual(
      jax.tree.map(lambda leaf: leaf.dtype, shapes),
      jax.tree.map(lambda leaf: leaf.dtype, learner.frozen),
    )


class ProgramsTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_are_the_ones_that_run(self, truncated):
    """Traced without data, each program is the one that data compiles."""
    learner = _learner(train=(2, 2, 2), minibatches=2, truncated=truncated)
    programs = learner.programs()
    state = _state(learner)
    config = learner._config
    rows = config.rows // config.minibatches
    table = np.zeros(_DEFAULT.objective.max_versions)
    width = -(-_VOCAB // 8)
    support = np.zeros((_ROWS, _TOKENS, width), np.uint8) if truncated else None
    changes = dict(support_mask=support) if truncated else {}
    batch = dataclasses.replace(
      _batch(2, **changes),
      clip_low=table.astype(np.float32),
      clip_high=table.astype(np.float32),
      versions=table.astype(np.int32),
    )
    self.assertEqual(batch.tokens.shape, (2, 1, rows, config.row_tokens))
    train = learner._train.lower(
      state, {}, jax.device_put(batch, learner._batch_shardings(batch))
    )
    got = {name: _signature(trace()) for name, trace in programs.items()}
    self.assertEqual(set(got), {"score", "train_step", "publish"})
    self.assertEqual(got["train_step"], _signature(train))
    # A dispatch of the scoring pass has rows of its own number.
    rows = np.zeros((config.score_rows, config.row_tokens))
    fields = {
      name: rows.astype(getattr(_score_batch(), name).dtype) for name in _SCORED
    }
    if truncated:
      fields["support_mask"] = np.zeros((*rows.shape, width), np.uint8)
    score = learner._score.lower(
      state.params, {}, jax.device_put(ScoreBatch(**fields), learner._rows)
    )
    self.assertEqual(got["score"], _signature(score))
