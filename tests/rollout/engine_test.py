"""Prompts and snapshots in, trajectory groups out."""

import functools
import itertools
import threading
import time
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from darl_jax.config import (
  MeshConfig,
  ModelConfig,
  RolloutConfig,
  RolloutMeshConfig,
  TrainMeshConfig,
)
from darl_jax.models import presets
from darl_jax.models.transformer import Policy
from darl_jax.rollout.actor import Actor
from darl_jax.rollout.engine import Engine
from darl_jax.sharding import meshes, rules, transfer
from darl_jax.types import Finish, PolicySnapshot, Prompt

_VOCAB, _PAD, _STOPS = 40, 0, (3, 7, 11, 19)
_PROMPT_TOKENS = 5
_LIMIT = 7


@functools.cache
def _policy():
  config = presets.nano() | dict(
    num_layers=1, embed_dim=16, mlp_dim=24, num_heads=4, head_dim=8
  )
  return Policy(ModelConfig(**config), vocab_size=_VOCAB)


@functools.cache
def _host_params(seed=0):
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(_policy().init, jax.random.key(0))
  return jax.tree.map(
    lambda leaf: (0.4 * rng.normal(size=leaf.shape)).astype(np.float32), shapes
  )


@functools.cache
def _mesh(data, tensor):
  return meshes.split_devices(
    MeshConfig(TrainMeshConfig(1, 1, 1), RolloutMeshConfig(data, tensor))
  ).rollout


def _config(**changes):
  fields = dict(
    prompts_per_batch=4,
    samples_per_prompt=4,
    max_response_tokens=_LIMIT,
    chunk_tokens=2,
    temperature=1.0,
    dtype="float32",
  )
  return RolloutConfig(**fields | changes)


def _engine(*, mesh=(1, 1), pad_id=_PAD, stop_ids=_STOPS, seed=0, **changes):
  return Engine(
    _policy(),
    _config(**changes),
    mesh=_mesh(*mesh),
    max_prompt_tokens=_PROMPT_TOKENS,
    stop_ids=stop_ids,
    pad_id=pad_id,
    seed=seed,
  )


# One engine for all tests that look at outputs: it compiles once.
_shared_engine = functools.cache(_engine)


def _snapshot(version=0, *, seed=0, mesh=(1, 1)) -> PolicySnapshot:
  shapes = jax.eval_shape(_policy().init, jax.random.key(0))
  shardings = rules.param_shardings(
    _policy().logical_axes,
    shapes,
    mesh=_mesh(*mesh),
    rules=rules.ROLLOUT_RULES,
  )
  return transfer.to_mesh(
    PolicySnapshot(version, _host_params(seed)),
    shardings=shardings,
    dtype=np.float32,
  )


def _prompts(count=4):
  """Of unequal lengths, from 1 token to the longest allowed."""
  rng = np.random.default_rng(5)
  return [
    Prompt(
      id=f"question-{i}",
      tokens=rng.integers(_VOCAB, size=1 + 2 * i % _PROMPT_TOKENS).astype(
        np.int32
      ),
      reference={"answer": i},
    )
    for i in range(count)
  ]


def _generate(engine=None, prompts=None, *, first_group_id=0, fetch=_snapshot):
  groups, _ = (engine or _shared_engine()).generate(
    _prompts() if prompts is None else prompts,
    first_group_id=first_group_id,
    fetch=fetch,
  )
  return groups


def _trajectories(groups):
  return [t for group in groups for t in group.trajectories]


def _tokens(groups):
  return [t.tokens.tolist() for t in _trajectories(groups)]


class TrajectoriesTest(parameterized.TestCase):
  def test_fields(self):
    prompts = _prompts()
    groups = _generate(prompts=prompts, first_group_id=10)
    self.assertEqual([g.group_id for g in groups], [10, 11, 12, 13])
    for group, prompt in zip(groups, prompts, strict=True):
      self.assertIs(group.prompt, prompt)
      self.assertLen(group.trajectories, 4)
      for trajectory in group.trajectories:
        length, start = len(trajectory.tokens), len(prompt.tokens)
        for name, dtype in (
          ("tokens", np.int32),
          ("loss_mask", bool),
          ("behavior_logprobs", np.float32),
          ("behavior_entropy", np.float32),
          ("policy_version", np.int32),
          ("turn", np.int32),
        ):
          field = getattr(trajectory, name)
          self.assertEqual((field.shape, field.dtype), ((length,), dtype))
        self.assertEqual(trajectory.prompt_id, prompt.id)
        self.assertEqual(trajectory.group_id, group.group_id)
        self.assertIsNone(trajectory.reward)
        np.testing.assert_array_equal(trajectory.tokens[:start], prompt.tokens)
        np.testing.assert_array_equal(
          trajectory.loss_mask, np.arange(length) >= start
        )
        sampled = trajectory.loss_mask
        self.assertTrue(np.all(trajectory.behavior_logprobs[sampled] < 0))
        self.assertTrue(np.all(trajectory.behavior_entropy[sampled] > 0))
        self.assertFalse(np.any(trajectory.behavior_logprobs[~sampled]))
        self.assertFalse(np.any(trajectory.behavior_entropy[~sampled]))

  def test_the_first_stop_token_is_kept_and_nothing_after_it(self):
    ends = []
    for trajectory in _trajectories(_generate()):
      response = trajectory.response
      stops = np.isin(response, _STOPS)
      if trajectory.finish is Finish.STOP:
        ends.append(int(response[-1]))
        np.testing.assert_array_equal(np.flatnonzero(stops), [len(stops) - 1])
      else:
        self.assertIs(trajectory.finish, Finish.LENGTH)
        self.assertLen(response, _LIMIT)
        self.assertFalse(stops.any())
    # Both ends occur, and more than one of the stop tokens.
    self.assertLess(len(ends), 16)
    self.assertGreater(len(set(ends)), 1)

  def test_no_token_past_the_limit_within_a_chunk(self):
    # 1 + 3 * 2 tokens are decoded, and 6 are allowed.
    engine = _engine(max_response_tokens=6, stop_ids=())
    lengths = {t.num_sampled for t in _trajectories(_generate(engine))}
    self.assertEqual(lengths, {6})

  def test_a_stop_token_at_the_limit_is_a_stop(self):
    whole = _trajectories(_generate())
    limit = next(
      t.num_sampled
      for t in whole
      if t.finish is Finish.STOP and t.num_sampled > 1
    )
    # The same tokens come out, cut at ``limit``.
    cut = _trajectories(_generate(_engine(max_response_tokens=limit)))
    for one, other in zip(cut, whole, strict=True):
      self.assertEqual(one.num_sampled, min(other.num_sampled, limit))
      stopped = other.finish is Finish.STOP and other.num_sampled <= limit
      self.assertIs(one.finish, Finish.STOP if stopped else Finish.LENGTH)

  @parameterized.parameters(_STOPS[0], _VOCAB - 1)
  def test_the_pad_id_does_not_matter(self, pad_id):
    want = _trajectories(_generate())
    got = _trajectories(_generate(_engine(pad_id=pad_id)))
    for one, other in zip(got, want, strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
      self.assertEqual(one.finish, other.finish)

  def test_stats(self):
    groups, stats = _shared_engine().generate(
      _prompts(), first_group_id=0, fetch=_snapshot
    )
    sampled = sum(t.num_sampled for t in _trajectories(groups))
    self.assertEqual(stats.tokens, sampled)
    self.assertEqual(stats.swaps, 0)
    self.assertGreater(stats.seconds, 0.0)


class VersionsTest(parameterized.TestCase):
  def test_each_token_is_stamped_with_what_sampled_it(self):
    version = iter(range(5, 99))
    groups, stats = _shared_engine().generate(
      _prompts(), first_group_id=0, fetch=lambda: _snapshot(next(version))
    )
    # The first token comes with the prefill, then two with each chunk.
    want = [5, 6, 6, 7, 7, 8, 8]
    for trajectory in _trajectories(groups):
      sampled = trajectory.policy_version[trajectory.loss_mask]
      self.assertEqual(sampled.tolist(), want[: len(sampled)])
      self.assertEqual(
        set(trajectory.policy_version[~trajectory.loss_mask]), {5}
      )
      self.assertEqual(trajectory.begun_by, 5)
    self.assertEqual(stats.swaps, 3)

  def test_swapped_weights_sample_the_tokens_that_follow(self):
    snapshots = iter([_snapshot(0), *[_snapshot(1, seed=1)] * 9])
    old = _trajectories(_generate())
    swapped = _trajectories(_generate(fetch=lambda: next(snapshots)))
    changed = 0
    for one, other in zip(swapped, old, strict=True):
      first = int(np.argmax(one.loss_mask))
      self.assertEqual(one.tokens[first], other.tokens[first])
      self.assertEqual(
        one.behavior_logprobs[first], other.behavior_logprobs[first]
      )
      if one.num_sampled > 1 and other.num_sampled > 1:
        changed += (
          one.behavior_entropy[first + 1] != other.behavior_entropy[first + 1]
        )
    self.assertGreater(changed, 4)

  def test_output_changes_after_a_publication_and_nothing_is_kept(self):
    engine = _shared_engine()
    before = _tokens(_generate(engine))
    after = _generate(engine, fetch=lambda: _snapshot(1, seed=1))
    self.assertNotEqual(_tokens(after), before)
    fresh = _generate(_engine(), fetch=lambda: _snapshot(1, seed=1))
    for one, other in zip(*map(_trajectories, (after, fresh)), strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_array_equal(
        one.behavior_logprobs, other.behavior_logprobs
      )
    self.assertEqual(_tokens(_generate(engine)), before)


class PublicationInFlightTest(parameterized.TestCase):
  """The actor takes up a version that comes while it generates."""

  def test_a_trajectory_carries_two_versions(self):
    begun, published, done = (threading.Event() for _ in range(3))
    newest, delivered, errors = [_snapshot(0)], [], []
    rooms = iter([True])

    def fetch():
      if begun.is_set():
        published.wait(10.0)
      begun.set()
      return newest[-1]

    def deliver(groups):
      delivered.extend(groups)

    def reserve(count, timeout_s):
      if next(rooms, False):
        return True
      done.set()
      time.sleep(0.01)
      return False

    actor = Actor(
      _shared_engine(),
      itertools.repeat(_prompts()),
      exclusive=threading.Lock(),
      fetch=fetch,
      reserve=reserve,
      deliver=deliver,
      fail=errors.append,
    )
    actor.start()
    self.assertTrue(begun.wait(30.0))
    newest.append(_snapshot(1, seed=1))
    published.set()
    self.assertTrue(done.wait(60.0))
    actor.stop()
    self.assertEqual(errors, [])
    self.assertEqual(actor.metrics()["rollout/swaps"], 1)
    longer = [t for t in _trajectories(delivered) if t.num_sampled > 1]
    self.assertGreater(len(longer), 4)
    for trajectory in longer:
      sampled = trajectory.policy_version[trajectory.loss_mask]
      self.assertEqual(sampled.tolist(), [0] + [1] * (len(sampled) - 1))


class RequestsTest(parameterized.TestCase):
  """A request is its group and sample; nothing else decides its tokens."""

  def test_the_rest_of_the_batch_does_not_matter(self):
    prompts = _prompts()
    whole = _generate(first_group_id=20)
    for index in range(4):
      # Alone, in the first row; the batch is filled up with copies.
      (alone,) = _generate(
        prompts=prompts[index : index + 1], first_group_id=20 + index
      )
      self.assertEqual(_tokens([alone]), _tokens([whole[index]]))
      for one, other in zip(
        alone.trajectories, whole[index].trajectories, strict=True
      ):
        np.testing.assert_allclose(
          one.behavior_logprobs, other.behavior_logprobs, atol=1e-5
        )

  def test_groups_samples_and_seeds_draw_apart(self):
    prompts = _prompts()[:1] * 4
    groups = _generate(prompts=prompts)
    drawn = {tuple(t) for t in _tokens(groups)}
    self.assertGreater(len(drawn), 12)
    other = _generate(_engine(seed=1), prompts=prompts)
    self.assertNotEqual(_tokens(other), _tokens(groups))
    self.assertNotEqual(
      _tokens(_generate(prompts=prompts, first_group_id=4)), _tokens(groups)
    )
    self.assertEqual(_tokens(_generate(prompts=prompts)), _tokens(groups))

  def test_the_sampling_key_is_not_the_key_of_the_parameters(self):
    engine = _shared_engine()
    with mock.patch.object(
      engine.decoder, "prefill", wraps=engine.decoder.prefill
    ) as prefill:
      _generate(engine)
    root = jax.random.key_data(prefill.call_args.args[-1])
    self.assertFalse(
      np.array_equal(root, jax.random.key_data(jax.random.key(0)))
    )

  @parameterized.parameters(1, 3)
  def test_copies_that_fill_the_batch_are_dropped(self, count):
    prompts = _prompts()[:count]
    groups, stats = _shared_engine().generate(
      prompts, first_group_id=0, fetch=_snapshot
    )
    self.assertEqual([g.prompt.id for g in groups], [p.id for p in prompts])
    self.assertEqual(
      stats.tokens, sum(t.num_sampled for t in _trajectories(groups))
    )

  def test_a_sharded_sampler_draws_the_same(self):
    engine = _engine(mesh=(2, 2))
    got = _generate(engine, fetch=lambda: _snapshot(mesh=(2, 2)))
    want = _generate()
    self.assertEqual(_tokens(got), _tokens(want))
    for one, other in zip(*map(_trajectories, (got, want)), strict=True):
      np.testing.assert_allclose(
        one.behavior_logprobs, other.behavior_logprobs, atol=1e-5
      )
    # And its programs too compile once, batch after batch.
    for version in range(3):
      _generate(
        engine,
        first_group_id=4 * version,
        fetch=lambda: _snapshot(mesh=(2, 2)),
      )
    self.assertEqual(engine.decoder.compiles(), {"prefill": 1, "decode": 1})


class ShapesTest(parameterized.TestCase):
  def test_each_program_compiles_once(self):
    engine = _engine()
    version = iter(range(99))
    for batch in range(4):
      _generate(
        engine,
        _prompts()[: 1 + batch],
        first_group_id=100 * batch,
        fetch=lambda: _snapshot(next(version)),
      )
    self.assertEqual(engine.decoder.compiles(), {"prefill": 1, "decode": 1})

  def test_decoding_ends_when_every_row_has(self):
    fetched = []

    def fetch():
      fetched.append(1)
      return _snapshot()

    engine = _engine(stop_ids=tuple(range(_VOCAB)))
    groups = _generate(engine, fetch=fetch)
    self.assertEqual({t.num_sampled for t in _trajectories(groups)}, {1})
    self.assertLen(fetched, 1)

  def test_a_prompt_that_is_too_long_is_named(self):
    long = Prompt("long-one", np.arange(6, dtype=np.int32), {})
    with self.assertRaisesRegex(ValueError, "long-one has 6 tokens.* 5 "):
      _generate(prompts=[*_prompts(2), long])

  def test_an_empty_prompt_is_named(self):
    empty = Prompt("empty-one", np.zeros(0, np.int32), {})
    with self.assertRaisesRegex(ValueError, "empty-one has no tokens"):
      _generate(prompts=[*_prompts(2), empty])

  @parameterized.parameters(0, 5)
  def test_a_wrong_number_of_prompts_is_refused(self, count):
    with self.assertRaisesRegex(
      ValueError, f"{count} prompts .* rollout.prompts_per_batch = 4"
    ):
      _generate(prompts=_prompts(count))


class ProgramsTest(parameterized.TestCase):
  def test_are_the_ones_that_run(self):
    """Traced without data, each program is the one that data compiles."""
    engine = _engine(mesh=(2, 2))
    snapshot = _snapshot(mesh=(2, 2))
    shapes = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding
      ),
      snapshot.params,
    )
    programs = engine.programs(shapes)
    self.assertEqual(set(programs), {"prefill", "decode"})
    decoder = engine.decoder
    inputs = (snapshot.params, *engine._inputs(_prompts(2), 0), engine._root)
    prefill = decoder.prefill.lower(*inputs)
    self.assertEqual(programs["prefill"]().as_text(), prefill.as_text())
    state, _ = decoder.prefill(*inputs)
    decode = decoder.decode.lower(snapshot.params, state)
    self.assertEqual(programs["decode"]().as_text(), decode.as_text())
