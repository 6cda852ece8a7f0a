"""Prompts and snapshots in, trajectory groups out."""

import dataclasses
import functools
import itertools
import threading
import time
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import Mesh

from darl_jax.config import (
  ConfigError,
  ModelConfig,
  RolloutConfig,
)
from darl_jax.models import presets
from darl_jax.models.kv_cache import Span
from darl_jax.models.transformer import Policy
from darl_jax.rollout import engine as engine_lib
from darl_jax.rollout.actor import Actor
from darl_jax.rollout.decode import Decoder
from darl_jax.rollout.engine import Engine, EngineStats
from darl_jax.rollout.placement import Placement
from darl_jax.rollout.sampling import Sampling
from darl_jax.rollout.schedule import Prefix, Sample
from darl_jax.sharding import meshes
from darl_jax.types import Finish, PolicySnapshot, Prompt

_VOCAB, _PAD, _STOPS = 40, 0, (3, 7, 11)
# No multiples of a chunk, nor of each other.
_PROMPT_TOKENS, _LIMIT, _CHUNK = 9, 10, 4
_GREEDY = Sampling(temperature=0.0)
# So few pages that samples lose theirs; of the same shape in many tests, whose
# engines share their programs.
_TIGHT = dict(slots=5, cache_tokens=8 * _CHUNK)
# Responses of several widths of page tables, and longer than a row of prefill.
_LONG = dict(
  slots=5,
  cache_tokens=13 * _CHUNK,
  max_response_tokens=30,
  prefill_tokens=1,
)


@pytest.fixture(scope="module", autouse=True)
def _short_prompts_match():
  """What is cached is used however little it is."""
  with mock.patch.object(engine_lib, "_LEAST_MATCH", 1):
    yield


@functools.cache
def _policy():
  config = presets.nano() | dict(
    num_layers=2, embed_dim=16, mlp_dim=24, num_heads=4, head_dim=8
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
  devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
  return Mesh(devices, meshes.ROLLOUT_AXES)


# Engines that need the same programs share them.
_decoder = functools.cache(Decoder)


def _engine(
  *,
  mesh=(1, 1),
  prompt_tokens=_PROMPT_TOKENS,
  pad_id=_PAD,
  stop_ids=_STOPS,
  seed=0,
  sampling=None,
  stops=None,
  decoder=_decoder,
  **changes,
) -> Engine:
  fields = dict(
    prompts_per_batch=4,
    samples_per_prompt=4,
    max_response_tokens=_LIMIT,
    chunk_tokens=_CHUNK,
    slots=0,
    cache_tokens=64 * _CHUNK,
    prefill_tokens=16,
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
  if sampling is not None:
    fields |= dataclasses.asdict(sampling)
  with mock.patch.object(engine_lib, "Decoder", decoder):
    return Engine(
      _policy(),
      RolloutConfig(**fields | changes),
      mesh=_mesh(*mesh),
      max_prompt_tokens=prompt_tokens,
      stop_ids=stop_ids,
      pad_id=pad_id,
      seed=seed,
      stops=stops,
    )


# One engine for all tests that leave it as they found it.
_shared_engine = functools.cache(_engine)


@functools.cache
def _snapshot(version=0, *, seed=0, mesh=(1, 1), dtype="float32"):
  placement = Placement(_policy(), mesh=_mesh(*mesh), dtype=jnp.dtype(dtype))
  return placement.place(PolicySnapshot(version, _host_params(seed)))


@functools.cache
def _prompts(count=4, longest=_PROMPT_TOKENS):
  """Of unequal lengths, from 1 token to the longest allowed."""
  rng = np.random.default_rng(5)
  lengths = np.linspace(1, longest, count).astype(int)
  return tuple(
    Prompt(
      id=f"question-{i}",
      tokens=rng.integers(_VOCAB, size=length, dtype=np.int32),
      reference={"answer": i},
    )
    for i, length in enumerate(rng.permutation(lengths))
  )


def _generate(
  engine=None,
  prompts=None,
  *,
  first_group_id=0,
  fetch=_snapshot,
  max_tokens=None,
):
  engine = engine or _shared_engine()
  prompts = _prompts() if prompts is None else prompts
  if max_tokens is None:
    groups, _ = engine.generate(
      prompts, first_group_id=first_group_id, fetch=fetch
    )
  else:
    for index, prompt in enumerate(prompts):
      engine.submit(prompt, first_group_id + index, max_tokens=max_tokens)
    groups = []
    while engine.pending:
      groups += engine.step(fetch())
    groups.sort(key=lambda group: group.group_id)
  _check_idle(engine)
  return groups


def _check_idle(engine):
  """No slot is taken, and no page is lost."""
  assert engine.pending == 0
  for schedule in engine._schedules:
    assert schedule.load == 0
    schedule.pool.check()
    assert schedule.pool.available == schedule.pool.num_pages - 1


def _trajectories(groups):
  return [t for group in groups for t in group.trajectories]


def _tokens(groups):
  return [t.tokens.tolist() for t in _trajectories(groups)]


@functools.cache
def _alone(sampling=None, first_group_id=0, count=4, stop_ids=_STOPS):
  """What a batch of one gives."""
  engine = _shared_engine(slots=1, sampling=sampling, stop_ids=stop_ids)
  return _generate(engine, _prompts(count), first_group_id=first_group_id)


@functools.partial(jax.jit, static_argnames="width")
def _read(params, tokens, start, stop, keys, values, temperature, *, width):
  """Log-softmax of what follows tokens start to stop, given a cache.

  Returns:
    float32 [width, V], and the cache with these tokens' keys and values.
  """
  at = start + jnp.arange(width)
  here = jnp.where(at < stop, 1, 0)[None]
  hidden, new_keys, new_values = _policy().read(
    params,
    jnp.pad(tokens, (0, width))[at][None],
    at[None],
    here,
    dtype=jnp.float32,
    context=Span.of(keys, values, (jnp.arange(2 * width) < start)[None]),
  )
  logits = hidden[0] @ _policy().unembedding(params).T / temperature

  def put(cache, new):
    return jax.lax.dynamic_update_slice(cache, new, (0, 0, 0, start, 0))

  logprobs = jax.nn.log_softmax(logits)
  return logprobs, put(keys, new_keys), put(values, new_values)


def _distributions(
  trajectory, *, seeds=(0,), mixed=False, width=40, temperature=1.0
):
  """Of each sampled token, recomputed: log-softmax [sampled, V].

  Args:
    trajectory: Its tokens and versions count.
    seeds: Of each version's parameters.
    mixed: What was cached under one version stays for the next; else each
      distribution is of a whole pass under its token's version.
    width: At least its tokens.
    temperature: Of the distributions.
  """
  tokens = np.zeros(width, np.int32)
  length = len(trajectory.tokens)
  tokens[:length] = trajectory.tokens
  versions = trajectory.policy_version
  prompt = length - trajectory.num_sampled
  config = _policy().config
  shape = (config.num_layers, 1, config.num_kv_heads, 2 * width, 8)
  keys = values = np.zeros(shape, np.float32)
  # The token before the first of a version is read by that version.
  starts = [prompt - 1] + [
    t - 1 for t in range(prompt + 1, length) if versions[t] != versions[t - 1]
  ]
  parts = []
  for start, stop in zip(starts, [*starts[1:], length - 1], strict=True):
    params = _host_params(seeds[versions[start + 1]])
    first = start if mixed and start >= prompt else 0
    here, keys, values = _read(
      params, tokens, first, stop, keys, values, temperature, width=width
    )
    parts.append(np.asarray(here)[start - first : stop - first])
  return np.concatenate(parts)


def _gaps(trajectory, **how):
  """Between log-probs recorded and recomputed, and entropies: [2, sampled]."""
  found = _distributions(trajectory, **how)
  sampled = trajectory.loss_mask
  logprobs = found[np.arange(len(found)), trajectory.response]
  entropy = -np.sum(np.exp(found) * found, axis=1)
  return np.abs(
    [
      logprobs - trajectory.behavior_logprobs[sampled],
      entropy - trajectory.behavior_entropy[sampled],
    ]
  )


def _worst(trajectories, **how):
  """Greatest difference between what was recorded and what is recomputed."""
  return max(_gaps(trajectory, **how).max() for trajectory in trajectories)


def _fetch_in_turn(*snapshots):
  """Each for one chunk, the last for ever."""
  turns = itertools.chain(snapshots, itertools.repeat(snapshots[-1]))
  return lambda: next(turns)


class TrajectoriesTest(parameterized.TestCase):
  def test_fields(self):
    prompts = _prompts()
    groups = _generate(prompts=prompts, first_group_id=10)
    self.assertEqual([g.group_id for g in groups], [10, 11, 12, 13])
    for group, prompt in zip(groups, prompts, strict=True):
      self.assertEqual(group.prompt.id, prompt.id)
      self.assertIs(group.prompt.reference, prompt.reference)
      np.testing.assert_array_equal(group.prompt.tokens, prompt.tokens)
      # A copy: the caller may go on with its array.
      self.assertFalse(group.prompt.tokens.flags.writeable)
      self.assertTrue(prompt.tokens.flags.writeable)
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

  @parameterized.parameters(1, 3, 4, 6, None)
  def test_no_token_past_the_limit_within_a_chunk(self, limit):
    got = _trajectories(_generate(_engine(stop_ids=()), max_tokens=limit))
    # The same tokens, and fewer.
    whole = _trajectories(_alone(stop_ids=()))
    for one, other in zip(got, whole, strict=True):
      self.assertEqual(one.num_sampled, limit or _LIMIT)
      self.assertIs(one.finish, Finish.LENGTH)
      np.testing.assert_array_equal(one.tokens, other.tokens[: len(one.tokens)])

  def test_a_stop_token_at_the_limit_is_a_stop(self):
    whole = _trajectories(_generate())
    limit = next(
      t.num_sampled
      for t in whole
      if t.finish is Finish.STOP and t.num_sampled > 1
    )
    # The same tokens come out, cut at ``limit``.
    cut = _trajectories(_generate(max_tokens=limit))
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

  def test_one_token_prompts_have_nothing_to_prefill(self):
    prompts = [
      Prompt(str(token), np.array([token], np.int32), {}) for token in (5, 9)
    ]
    engine = _engine()
    with mock.patch.object(engine._decoder, "prefill") as prefill:
      got = _trajectories(_generate(engine, prompts))
    prefill.assert_not_called()
    self.assertEqual({int(t.tokens[0]) for t in got}, {5, 9})
    self.assertLess(_worst(got), 1e-4)

  def test_decoding_ends_when_every_sample_has(self):
    fetched = []

    def fetch():
      fetched.append(1)
      return _snapshot()

    engine = _engine(stop_ids=tuple(range(_VOCAB)))
    groups = _generate(engine, fetch=fetch)
    self.assertEqual({t.num_sampled for t in _trajectories(groups)}, {1})
    self.assertEqual({t.finish for t in _trajectories(groups)}, {Finish.STOP})
    # One begins the only chunk, and one takes it up.
    self.assertLen(fetched, 2)

  def test_a_chunk_is_under_way_between_steps(self):
    engine = _engine()
    with mock.patch.object(
      engine._decoder, "decode", wraps=engine._decoder.decode
    ) as decode:
      for index, prompt in enumerate(_prompts()):
        engine.submit(prompt, index)
      self.assertEqual(engine.step(_snapshot()), [])
      self.assertEqual(decode.call_count, 1)
      self.assertEqual(engine.stats.chunks, 0)
      # Its tokens bear the version that began it, and what begins now the next.
      engine.step(_snapshot(1, seed=1))
      self.assertEqual((decode.call_count, engine.stats.chunks), (2, 1))
    (group, _), *_ = engine._groups.values()
    self.assertEqual(set(group.samples[0].versions), {0})
    # What is given up takes the chunk with it.
    engine.give_up()
    self.assertEqual(_tokens(_generate(engine)), _tokens(_alone()))

  def test_int8_cache(self):
    engine = _engine(cache_dtype="int8")
    got = _trajectories(_generate(engine))
    worst = _worst(got)
    self.assertLess(worst, 0.1)
    self.assertGreater(worst, 1e-5)
    plain = _engine()
    _generate(plain)
    exact, rounded = (
      sum(leaf.nbytes for leaf in jax.tree.leaves(each._pages))
      for each in (plain, engine)
    )
    # A byte and a float32 scale for 8 of them, instead of 4 bytes each.
    self.assertEqual(rounded / exact, (8 + 4) / 32)

  def test_the_longest_that_were_seen_go_first(self):
    engine = _engine(slots=1, samples_per_prompt=1)
    prompts = _prompts(3)
    lengths = [t.num_sampled for t in _trajectories(_generate(engine, prompts))]
    self.assertGreater(len(set(lengths)), 1)
    order = []
    for group in engine.stream(prompts, first_group_id=0, fetch=_snapshot):
      order.append(group.group_id)
    want = sorted(range(3), key=lambda index: -lengths[index])
    self.assertEqual(order, want)
    # What is not known may have the limit; what is remembered is bounded.
    with mock.patch.object(engine_lib, "_REMEMBERED_PROMPTS", 2):
      _generate(engine, _prompts(5)[3:])
    self.assertLen(engine._lengths, 2)

  def test_mean_lengths_are_remembered_of_the_latest_prompts(self):
    engine = _engine()
    prompts = _prompts(3)
    got = _generate(engine, prompts)
    for prompt, group in zip(prompts, got, strict=True):
      lengths = [t.num_sampled for t in group.trajectories]
      engine.submit(prompt, group.group_id)
      (expecting, _) = engine._groups[group.group_id]
      self.assertEqual(expecting.expected, np.mean(lengths))
    # No response is longer than what was asked for.
    engine.submit(prompts[0], 7, max_tokens=1)
    self.assertEqual(engine._groups[7][0].expected, 1)
    # What is not known may have the limit.
    other = Prompt("other", np.array([1, 2, 3], np.int32), {})
    engine.submit(other, 8)
    self.assertEqual(engine._groups[8][0].expected, _LIMIT)
    engine.give_up()
    # The first was seen again since the second was.
    with mock.patch.object(engine_lib, "_REMEMBERED_PROMPTS", 2):
      for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        _generate(engine, [prompt])
    kept = [prompts[0].tokens.tobytes(), prompts[2].tokens.tobytes()]
    self.assertEqual(list(engine._lengths), kept)

  def test_bfloat16(self):
    engine = _engine(dtype="bfloat16")
    got = _trajectories(
      _generate(engine, fetch=lambda: _snapshot(dtype="bfloat16"))
    )
    for layer in jax.tree.leaves(engine._pages):
      self.assertEqual(layer.dtype, jnp.bfloat16)
    self.assertEqual(got[0].behavior_logprobs.dtype, np.float32)
    worst = _worst(got)
    self.assertLess(worst, 0.5)
    self.assertGreater(worst, 1e-4)


class LogprobsTest(parameterized.TestCase):
  @parameterized.parameters(dict(slots=1), dict(), _TIGHT)
  def test_equal_a_whole_pass(self, **changes):
    engine = _engine(stop_ids=(), **changes)
    self.assertLess(_worst(_trajectories(_generate(engine))), 1e-4)
    # Where they lost their pages, responses were read again as prefixes.
    self.assertEqual(engine.stats.preemptions > 0, "cache_tokens" in changes)

  def test_are_tempered(self):
    got = _trajectories(_generate(_engine(temperature=0.5)))
    self.assertLess(_worst(got, temperature=0.5), 1e-4)
    self.assertGreater(_worst(got), 0.1)

  def test_greedy_tokens_are_the_likeliest(self):
    got = _trajectories(_alone(sampling=_GREEDY))
    # Recorded at temperature 1.
    self.assertLess(_worst(got), 1e-4)
    for trajectory in got:
      np.testing.assert_array_equal(
        _distributions(trajectory).argmax(axis=1), trajectory.response
      )


class SupportTest(parameterized.TestCase):
  """What truncation left, recorded token by token."""

  @parameterized.parameters(
    dict(top_k=5, chunk_tokens=3),
    dict(top_p=0.8, slots=1),
    dict(min_p=0.3, **_TIGHT),
    dict(top_k=9, top_p=0.8, temperature=0.7, mesh=(2, 1)),
  )
  def test_is_that_of_a_whole_pass(self, **changes):
    engine = _engine(stop_ids=(3,), **changes)
    mesh = changes.get("mesh", (1, 1))
    got = _trajectories(_generate(engine, fetch=lambda: _snapshot(mesh=mesh)))
    self.assertEqual(engine.stats.preemptions > 0, "min_p" in changes)
    temperature = changes.get("temperature", 1.0)
    sizes = []
    for trajectory in got:
      support, mask = trajectory.support_mask, trajectory.loss_mask
      self.assertLen(support, len(mask))
      bits = np.unpackbits(support.dense(), axis=1, bitorder="little")
      self.assertFalse(np.any(bits[~mask]))
      bits = bits[mask].astype(bool)
      found = _distributions(trajectory, temperature=temperature)
      want = [self._kept(np.exp(row), changes) for row in found]
      np.testing.assert_array_equal(bits[:, :_VOCAB], want)
      # Log-probs and entropy are over it.
      found = np.where(bits, found, -np.inf)
      found -= np.log(np.exp(found).sum(axis=1, keepdims=True))
      np.testing.assert_allclose(
        trajectory.behavior_logprobs[mask],
        found[np.arange(len(found)), trajectory.response],
        atol=1e-4,
      )
      terms = np.exp(found) * np.where(bits, found, 0.0)
      np.testing.assert_allclose(
        trajectory.behavior_entropy[mask], -terms.sum(axis=1), atol=1e-4
      )
      sizes.append(bits.sum(axis=1))
    sizes = np.concatenate(sizes)
    self.assertGreater(sizes.max(), 1)
    self.assertLess(sizes.mean(), 0.7 * _VOCAB)

  def _kept(self, probs, changes):
    """Brute force: bool [V]."""
    order = np.argsort(-probs)
    kept = np.zeros(_VOCAB, bool)
    kept[order[: changes.get("top_k", _VOCAB)]] = True
    left = np.where(kept, probs, 0.0)[order]
    before = np.cumsum(left) - left
    kept[order] &= before < changes.get("top_p", 2.0) * left.sum()
    return kept & (probs >= changes.get("min_p", 0.0) * probs.max())

  def test_is_none_where_nothing_truncates(self):
    for trajectory in _trajectories(_generate()):
      self.assertIsNone(trajectory.support_mask)


def _stops(tokens, new):
  """Ends a response after two even tokens in a row, or after token 5."""
  for kept in range(len(tokens) - new + 1, len(tokens) + 1):
    last = tokens[max(kept - 2, 0) : kept]
    if last[-1] == 5 or (len(last) == 2 and not any(t % 2 for t in last)):
      return kept
  return None


class StopStringsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("all_at_once", dict()),
    ("within_a_chunk", dict(chunk_tokens=16)),
    ("over_chunks", dict(chunk_tokens=1, slots=6)),
    ("pages_lost", _TIGHT),
    ("recompute", dict(weight_update="recompute", slots=5)),
    ("truncated", dict(top_k=30, slots=1)),
  )
  def test_end_a_response_as_if_its_whole_text_were_known(self, changes):
    truncation = dict(top_k=changes.get("top_k", 0))
    whole = _trajectories(_generate(_engine(**truncation)))
    engine = _engine(stops=_stops, stop_strings=("x",), **changes)
    versions = itertools.count()

    def fetch():
      """The same weights under another number: read again by recompute."""
      if changes.get("weight_update") != "recompute":
        return _snapshot()
      return PolicySnapshot(next(versions), dict(_snapshot().params))

    got = _trajectories(_generate(engine, fetch=fetch))
    self.assertEqual(engine.stats.preemptions > 0, "cache_tokens" in changes)
    earlier = 0
    for one, other in zip(got, whole, strict=True):
      response = other.response.tolist()
      cuts = (_stops(response[:n], 1) for n in range(1, len(response) + 1))
      cut = next((kept for kept in cuts if kept is not None), len(response))
      self.assertEqual(one.response.tolist(), response[:cut])
      length = len(one.tokens)
      for name in ("loss_mask", "behavior_logprobs", "behavior_entropy"):
        self.assertLen(getattr(one, name), length)
        np.testing.assert_allclose(
          getattr(one, name), getattr(other, name)[:length], atol=1e-5
        )
      self.assertLen(one.policy_version, length)
      if "top_k" in changes:
        self.assertLen(one.support_mask, length)
      stopped = cut < len(response) or _stops(response, 1) is not None
      self.assertIs(one.finish, Finish.STOP if stopped else other.finish)
      earlier += cut < len(response)
    self.assertBetween(earlier, 4, 15)
    # What was sampled behind the end is not counted.
    self.assertEqual(engine.stats.tokens, sum(t.num_sampled for t in got))

  def test_are_asked_about_new_tokens_once(self):
    asked = []

    def stops(tokens, new):
      asked.append((tuple(tokens), new))

    engine = _engine(stops=stops, stop_strings=("x",), stop_ids=())
    got = _trajectories(_generate(engine))
    self.assertEqual(sum(new for _, new in asked), 16 * _LIMIT)
    seen = {tokens for tokens, _ in asked}
    for trajectory in got:
      self.assertIn(tuple(trajectory.response.tolist()), seen)

  def test_do_not_go_without_who_knows_them(self):
    with self.assertRaisesRegex(ValueError, "stop_strings"):
      _engine(stop_strings=("x",))
    with self.assertRaisesRegex(ValueError, "stop_strings"):
      _engine(stops=_stops)


class RequestsTest(parameterized.TestCase):
  """A request is its group and sample; nothing else decides its tokens."""

  @parameterized.named_parameters(
    ("all_at_once", dict(), True),
    ("few_slots_and_pages", _TIGHT, True),
    ("one_prompt_per_row", _TIGHT | dict(prefill_tokens=1), False),
    ("chunks_of_one", dict(chunk_tokens=1, slots=6), False),
    ("chunks_of_three", dict(chunk_tokens=3, slots=6), False),
    ("longer_than_a_response", dict(chunk_tokens=16), False),
    ("recompute", _TIGHT | dict(weight_update="recompute"), False),
    ("drain", _TIGHT | dict(weight_update="drain"), False),
  )
  def test_a_batch_of_one_gives_the_same(self, changes, greedy):
    for sampling in (None, _GREEDY)[: 1 + greedy]:
      got = _generate(_engine(sampling=sampling, **changes))
      want = _alone(sampling)
      self.assertEqual(_tokens(got), _tokens(want))
      for one, other in zip(*map(_trajectories, (got, want)), strict=True):
        self.assertIs(one.finish, other.finish)
        for field in ("behavior_logprobs", "behavior_entropy"):
          np.testing.assert_allclose(
            getattr(one, field), getattr(other, field), atol=1e-5
          )

  @parameterized.parameters("swap", "recompute", "drain")
  def test_interleaved_streams_do_not_leak(self, update):
    """Two streams of requests in random order, whatever is in flight.

    And whatever is published, since the weights are the same each time.
    """
    rng = np.random.default_rng(0)
    count = 8
    wants = [_alone(first_group_id=first, count=count) for first in (0, 500)]
    engines = [
      _engine(weight_update=update, **changes)
      for changes in (_TIGHT, {}, dict(prefill_tokens=1) | _TIGHT)
    ]
    for trial in range(9):
      engine = engines[trial % len(engines)]
      waiting = [(s, i) for s in range(2) for i in range(count)]
      waiting = [waiting[i] for i in rng.permutation(len(waiting))]
      limits = rng.integers(1, _LIMIT + 1, size=(2, count))
      done, snapshot = {}, _snapshot()
      before = engine.stats
      while waiting or engine.pending:
        for _ in range(rng.integers(4)):
          if waiting:
            stream, index = waiting.pop()
            engine.submit(
              _prompts(count)[index],
              500 * stream + index,
              max_tokens=int(limits[stream, index]),
            )
        if rng.random() < 0.2:
          version, params = snapshot.version + 1, dict(snapshot.params)
          snapshot = PolicySnapshot(version, params)
        for group in engine.step(snapshot):
          self.assertNotIn(group.group_id, done)
          done[group.group_id] = group
        for schedule in engine._schedules:
          schedule.pool.check()
      _check_idle(engine)
      for stream, index in np.ndindex(2, count):
        limit = limits[stream, index]
        got = done[500 * stream + index]
        want = wants[stream][index]
        for one, other in zip(got.trajectories, want.trajectories, strict=True):
          self.assertEqual(
            one.response.tolist(), other.response[:limit].tolist()
          )
          length = len(one.tokens)
          np.testing.assert_allclose(
            one.behavior_logprobs, other.behavior_logprobs[:length], atol=1e-5
          )
      stats = engine.stats.since(before)
      self.assertEqual(
        stats.tokens, sum(t.num_sampled for t in _trajectories(done.values()))
      )
      self.assertEqual(stats.aborted_tokens, 0)
      self.assertBetween(stats.slot_occupancy, 0.05, 1.0)
    self.assertGreater(engines[0].stats.preemptions, 0)
    self.assertGreater(engines[1].stats.prefix_hits, 0)

  def test_the_rest_of_the_batch_does_not_matter(self):
    whole = _generate(first_group_id=20)
    for index, prompt in enumerate(_prompts()):
      (alone,) = _generate(prompts=[prompt], first_group_id=20 + index)
      self.assertEqual(_tokens([alone]), _tokens([whole[index]]))

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
    root = jax.random.key_data(_engine()._root)
    self.assertFalse(
      np.array_equal(root, jax.random.key_data(jax.random.key(0)))
    )

  def test_samples_do_not_wait_for_each_other(self):
    # Two prompts at a time: in batches these would be 3 + 2 chunks.
    engine = _engine(samples_per_prompt=8, slots=16, stop_ids=())
    for index, limit in enumerate((10, 1, 4, 8)):
      engine.submit(_prompts()[index], index, max_tokens=limit)
    order = []
    while engine.pending:
      order += [group.group_id for group in engine.step(_snapshot())]
    # The longest first: the third takes the place of the fourth, and the
    # second of the first.
    self.assertEqual(order, [3, 0, 2, 1])
    self.assertEqual(engine.stats.chunks, 4)

  def test_a_group_is_yielded_when_its_last_sample_has_ended(self):
    engine = _engine(samples_per_prompt=16, slots=16, stop_ids=())
    yielded = []
    for group in engine.stream(_prompts(), first_group_id=0, fetch=_snapshot):
      yielded.append((group.group_id, engine.stats.chunks))
    self.assertEqual(yielded, [(0, 3), (1, 6), (2, 9), (3, 12)])


class ExtraSamplesTest(parameterized.TestCase):
  def test_the_first_to_end_are_kept(self):
    engine = _engine(samples_per_prompt=2, extra_samples=2)
    groups, stats = engine.generate(
      _prompts(), first_group_id=0, fetch=_snapshot
    )
    _check_idle(engine)
    aborted_tokens = kept_tokens = 0
    chosen_others = 0
    for group, all_four in zip(groups, _alone(), strict=True):
      lengths = [t.num_sampled for t in all_four.trajectories]
      chunks = [-(-length // _CHUNK) for length in lengths]
      # Together from the first chunk on.
      order = sorted(range(4), key=lambda i: (lengths[i], i))
      kept = sorted(order[:2])
      chosen_others += kept != [0, 1]
      self.assertEqual(
        _tokens([group]),
        [all_four.trajectories[i].tokens.tolist() for i in kept],
      )
      kept_tokens += sum(lengths[i] for i in kept)
      until = chunks[order[1]] * _CHUNK
      aborted_tokens += sum(min(lengths[i], until) for i in order[2:])
    self.assertGreater(chosen_others, 0)
    self.assertEqual(stats.aborted, 8)
    self.assertEqual(stats.tokens, kept_tokens)
    self.assertEqual(stats.aborted_tokens, aborted_tokens)

  def test_no_more_are_delivered_where_all_end_together(self):
    engine = _engine(
      samples_per_prompt=2, extra_samples=1, slots=16, stop_ids=()
    )
    groups, stats = engine.generate(
      _prompts(), first_group_id=0, fetch=_snapshot
    )
    self.assertEqual([len(g.trajectories) for g in groups], [2] * 4)
    self.assertEqual(stats.tokens, 4 * 2 * _LIMIT)
    self.assertEqual(stats.aborted, 4)
    self.assertEqual(stats.aborted_tokens, 4 * _LIMIT)


class PendingTest(parameterized.TestCase):
  def test_one_stream_at_a_time(self):
    engine = _engine(slots=1)
    first = engine.stream(_prompts(), first_group_id=0, fetch=_snapshot)
    got = [next(first)]
    with self.assertRaisesRegex(RuntimeError, "groups are pending"):
      next(engine.stream(_prompts(), first_group_id=10, fetch=_snapshot))
    with self.assertRaisesRegex(RuntimeError, "groups are pending"):
      engine.release()
    got += first
    self.assertLen(got, 4)
    self.assertEqual(
      _tokens(sorted(got, key=lambda g: g.group_id)), _tokens(_alone())
    )

  def test_what_is_released_is_made_again(self):
    engine = _engine()
    _generate(engine)
    engine.release()
    self.assertIsNone(engine._pages)
    self.assertIsNone(engine._snapshot)
    self.assertEqual(_tokens(_generate(engine)), _tokens(_alone()))

  def test_the_same_weights_may_get_another_version(self):
    engine = _engine(stop_ids=())
    first = _snapshot()
    snapshots = _fetch_in_turn(first, PolicySnapshot(7, first.params))
    got = _trajectories(_generate(engine, fetch=snapshots))
    self.assertEqual(
      {v for t in got for v in t.policy_version[t.loss_mask].tolist()}, {0, 7}
    )
    self.assertEqual(engine.stats.swaps, 0)
    # But a drained sample has one.
    engine = _engine(stop_ids=(), weight_update="drain")
    snapshots = _fetch_in_turn(first, PolicySnapshot(7, first.params))
    for t in _trajectories(_generate(engine, fetch=snapshots)):
      self.assertLen(set(t.policy_version.tolist()), 1)

  def test_what_was_complete_when_a_step_fails_is_counted(self):
    engine = _engine(stop_ids=tuple(range(_VOCAB)))
    for index, prompt in enumerate(_prompts()):
      engine.submit(prompt, index)
    engine.step(_snapshot())
    with (
      mock.patch.object(engine, "_begin_chunk", side_effect=ZeroDivisionError),
      self.assertRaises(ZeroDivisionError),
    ):
      engine.step(_snapshot())
    self.assertEqual(engine.pending, 0)
    self.assertEqual(engine.stats.aborted, 16)
    self.assertEqual(engine.stats.aborted_tokens, 16)


class StatsTest(parameterized.TestCase):
  def test_add_up(self):
    engine = _engine()
    groups, stats = engine.generate(
      _prompts(12), first_group_id=0, fetch=_snapshot
    )
    sampled = sum(t.num_sampled for t in _trajectories(groups))
    self.assertEqual(stats.tokens, sampled)
    self.assertEqual(stats.swaps, 0)
    self.assertEqual(stats.aborted, 0)
    self.assertEqual(stats.aborted_tokens, 0)
    self.assertEqual(stats.preemptions, 0)
    self.assertGreater(stats.seconds, 0.0)
    self.assertEqual(stats.slot_tokens, stats.chunks * 16 * _CHUNK)
    self.assertEqual(stats.slot_occupancy, sampled / stats.slot_tokens)
    self.assertGreater(stats.slot_occupancy, 0.0)
    self.assertLessEqual(stats.slot_occupancy, 1.0)
    # Each group was admitted at once.
    self.assertEqual(
      stats.prefill_tokens + stats.prefix_hits,
      sum(len(p.tokens) - 1 for p in _prompts(12)),
    )

  def test_of_a_batch_are_those_of_the_batch(self):
    engine = _engine()
    for first in (0, 40):
      groups, stats = engine.generate(
        _prompts(), first_group_id=first, fetch=_snapshot
      )
      sampled = sum(t.num_sampled for t in _trajectories(groups))
      self.assertEqual(stats.tokens, sampled)
      self.assertEqual(stats.slot_tokens, stats.chunks * 16 * _CHUNK)
    self.assertEqual(engine.stats.since(engine.stats), EngineStats())

  def test_all_slots_are_busy_where_all_responses_are_whole_chunks(self):
    engine = _engine(stop_ids=())
    _generate(engine, _prompts(8), max_tokens=8)
    self.assertEqual(engine.stats.slot_occupancy, 1.0)
    self.assertEqual(EngineStats().slot_occupancy, 0.0)

  def test_what_is_given_up_is_counted(self):
    engine = _engine(stop_ids=(), slots=20)
    for index, prompt in enumerate(_prompts()):
      engine.submit(prompt, index)
    engine.submit(_prompts()[0], 77, max_tokens=3)
    done = []
    while not done:
      done = engine.step(_snapshot())
    self.assertEqual([group.group_id for group in done], [77])
    engine.give_up()
    _check_idle(engine)
    self.assertEqual(engine.stats.tokens, 4 * 3)
    self.assertEqual(engine.stats.aborted, 16)
    # One chunk of the other slots.
    self.assertEqual(engine.stats.aborted_tokens, 16 * _CHUNK)

  def test_seconds_are_those_of_chunks_and_steps(self):
    """A clock that goes on by one each time it is asked."""
    now = [0.0]

    def monotonic():
      now[0] += 1
      return now[0]

    engine = _engine(stop_ids=())
    fake = types.SimpleNamespace(monotonic=monotonic)
    with mock.patch.object(engine_lib, "time", fake):
      engine.submit(_prompts()[0], 0)
      engine.step(_snapshot())
      self.assertEqual(engine.stats.seconds, 2 - 1)
      # The chunk was under way while the caller did something else.
      now[0] = 9.0
      engine.step(_snapshot())
      self.assertEqual(engine.stats.seconds, 10 - 1)
      # Nothing is, once it is given up or has ended.
      engine.give_up()
      now[0] = 99.0
      engine.submit(_prompts()[0], 0, max_tokens=1)
      engine.step(_snapshot())
      self.assertEqual(engine.stats.seconds, 9 + 1)
      self.assertLen(engine.step(_snapshot()), 1)
      self.assertEqual(engine.stats.seconds, 9 + 2)
      now[0] = 999.0
      engine.step(_snapshot())
      self.assertEqual(engine.stats.seconds, 9 + 3)


class VersionsTest(parameterized.TestCase):
  def test_each_token_is_stamped_with_what_sampled_it(self):
    version = iter(range(5, 99))
    groups, stats = _shared_engine().generate(
      _prompts(), first_group_id=0, fetch=lambda: _snapshot(next(version))
    )
    want = np.repeat([5, 6, 7], _CHUNK).tolist()
    for trajectory in _trajectories(groups):
      sampled = trajectory.policy_version[trajectory.loss_mask]
      self.assertEqual(sampled.tolist(), want[: len(sampled)])
      self.assertEqual(
        set(trajectory.policy_version[~trajectory.loss_mask]), {5}
      )
      self.assertEqual(trajectory.begun_by, 5)
    self.assertEqual(stats.swaps, 2)

  @parameterized.parameters(dict(), _TIGHT)
  def test_swap_goes_on_with_what_is_cached(self, **changes):
    engine = _engine(stop_ids=(), **changes)
    snapshots = [_snapshot(v, seed=v) for v in range(3)]
    got = _trajectories(_generate(engine, fetch=_fetch_in_turn(*snapshots)))
    self.assertIn(3, {len({*t.policy_version.tolist()}) for t in got})
    for trajectory in got:
      # The tokens of the version that began are exact.
      sampled = trajectory.policy_version[trajectory.loss_mask]
      gaps = _gaps(trajectory, seeds=range(3))
      self.assertLess(gaps[:, sampled == trajectory.begun_by].max(), 1e-4)
    if not changes:
      self.assertEqual(engine.stats.swaps, 2)
      # Those after it are as a cache of both gives them; their difference to
      # a whole pass is there to be seen.
      self.assertLess(_worst(got, seeds=range(3), mixed=True), 1e-4)
      self.assertGreater(_worst(got, seeds=range(3)), 1e-2)
    # Where they lost pages, all was read again under the new weights.
    self.assertEqual(engine.stats.preemptions > 0, bool(changes))

  @parameterized.parameters(dict(), _TIGHT, _LONG)
  def test_recompute_is_exact(self, **changes):
    engine = _engine(stop_ids=(), weight_update="recompute", **changes)
    snapshots = [_snapshot(v, seed=v) for v in range(3)]
    # An update every chunk, and then every third.
    turns = itertools.chain(
      snapshots, (snapshots[(i // 3) % 3] for i in itertools.count())
    )
    got = _trajectories(_generate(engine, fetch=lambda: next(turns)))
    self.assertEqual(
      {t.num_sampled for t in got}, {engine.config.max_response_tokens}
    )
    self.assertIn(3, {len({*t.policy_version.tolist()}) for t in got})
    self.assertLess(_worst(got, seeds=range(3)), 1e-4)
    self.assertGreater(engine.stats.swaps, 1)

  @parameterized.parameters(dict(), _TIGHT)
  def test_drain_lets_no_sample_see_two_versions(self, **changes):
    engine = _engine(stop_ids=(), weight_update="drain", **changes)
    snapshots = [_snapshot(v, seed=v % 3) for v in range(6)]
    got = _trajectories(
      _generate(
        engine, _prompts(12), fetch=_fetch_in_turn(*np.repeat(snapshots, 2))
      )
    )
    for trajectory in got:
      self.assertEqual(set(trajectory.policy_version), {trajectory.begun_by})
    self.assertLess(_worst(got, seeds=[0, 1, 2] * 2), 1e-4)
    self.assertGreater(len({t.begun_by for t in got}), 2)
    # And the newest weights are taken up in the end.
    self.assertEqual(got[-1].begun_by, 5 if changes else 3)
    self.assertEqual(engine.stats.swaps, 0)
    self.assertEqual(engine.stats.preemptions > 0, bool(changes))

  @parameterized.parameters("swap", "recompute", "drain")
  def test_nothing_outlives_an_update(self, update):
    engine = _engine(weight_update=update)
    before = _tokens(_generate(engine))
    new = _snapshot(1, seed=1)
    after = _generate(engine, fetch=lambda: new)
    self.assertNotEqual(_tokens(after), before)
    fresh = _generate(_engine(), fetch=lambda: new)
    for one, other in zip(*map(_trajectories, (after, fresh)), strict=True):
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_array_equal(
        one.behavior_logprobs, other.behavior_logprobs
      )
    self.assertEqual(_tokens(_generate(engine)), before)


class PlacedTest(parameterized.TestCase):
  def test_parameters_that_are_not_placed_are_refused(self):
    engine = _engine()
    params = jax.tree.map(np.asarray, _host_params())
    with self.assertRaisesRegex(ValueError, "Placement puts them there"):
      _generate(engine, fetch=lambda: PolicySnapshot(0, params))
    _check_idle(engine)


class PrefixCacheTest(parameterized.TestCase):
  def test_what_is_found_must_be_worth_a_row_of_its_own(self):
    with mock.patch.object(engine_lib, "_LEAST_MATCH", 8):
      engine = _engine(stop_ids=())
    for begin, hits in ((8, 0), (7, 0), (8, 8)):
      _, stats = engine.generate(
        [self._prompt(begin, end=begin)], first_group_id=0, fetch=_snapshot
      )
      self.assertEqual(stats.prefix_hits, hits)

  def _prompt(self, begin, end):
    """Nine tokens: the first eight of 0, 1, 2, ... or 30 instead."""
    tokens = np.full(9, 30, np.int32)
    tokens[:begin] = np.arange(begin)
    tokens[-1] = end
    return Prompt(f"{begin}-{end}", tokens, {})

  def test_is_used_across_groups(self):
    engine = _engine(stop_ids=())
    # Two full pages; the same; one of them; none.
    for begin, hits in ((8, 0), (8, 8), (7, 4), (3, 0)):
      (group,), stats = engine.generate(
        [self._prompt(begin, end=begin)], first_group_id=0, fetch=_snapshot
      )
      self.assertEqual(stats.prefix_hits, hits)
      self.assertEqual(stats.prefill_tokens, 8 - hits)
      self.assertLess(_worst(group.trajectories), 1e-4)

  @parameterized.parameters(0, 1)
  def test_dies_with_the_weights(self, version):
    """Under the same version, too, other parameters are another policy."""
    engine = _engine(stop_ids=())
    prompts = [self._prompt(8, end=20)]
    engine.generate(prompts, first_group_id=0, fetch=_snapshot)
    new = PolicySnapshot(version, _snapshot(1, seed=1).params)
    (group,), stats = engine.generate(
      prompts, first_group_id=1, fetch=lambda: new
    )
    self.assertEqual(stats.prefix_hits, 0)
    self.assertLess(_worst(group.trajectories, seeds={version: 1}), 1e-4)

  def test_an_update_between_two_samples_of_a_group(self):
    # The last four enter after the update.
    engine = _engine(samples_per_prompt=20, slots=16, stop_ids=())
    snapshots = [_snapshot(0)] * 3 + [_snapshot(1, seed=1)]
    (group,) = _generate(
      engine, [self._prompt(8, end=20)], fetch=_fetch_in_turn(*snapshots)
    )
    versions = [t.begun_by for t in group.trajectories]
    self.assertEqual(versions, [0] * 16 + [1] * 4)
    self.assertLess(_worst(group.trajectories, seeds=(0, 1)), 1e-4)


class PartsTest(parameterized.TestCase):
  """What does not fit into a row of prefill."""

  def test_a_sample_is_read_in_parts(self):
    # Rows of 8 tokens, and samples of up to 39 that lose their pages.
    engine = _engine(stop_ids=(), **_LONG)
    with mock.patch.object(
      engine._decoder, "prefill", wraps=engine._decoder.prefill
    ) as prefill:
      got = _trajectories(_generate(engine))
    rows = [call.args[2] for call in prefill.call_args_list]
    self.assertEqual({r.tokens.shape for r in rows}, {(1, 8)})
    self.assertGreater(max(int(r.own_tokens.max()) for r in rows), 16)
    self.assertGreater(len({r.table.shape[1] for r in rows}), 1)
    self.assertGreater(engine.stats.preemptions, 0)
    self.assertLess(_worst(got), 1e-4)
    for one, other in zip(got, _trajectories(_alone(stop_ids=())), strict=True):
      np.testing.assert_array_equal(
        one.tokens[: len(other.tokens)], other.tokens
      )

  @parameterized.parameters(
    # Rows of at least so many tokens, and so many of them at a time.
    (16, 32, (2, 16), 1),
    (256, 32, (1, 32), 1),
    (256, 16, (1, 16), 2),
  )
  def test_short_prompts_share_a_row(self, least, tokens, shape, dispatches):
    with mock.patch.object(engine_lib, "_min_row_tokens", return_value=least):
      engine = _engine(samples_per_prompt=2, slots=16, prefill_tokens=tokens)
    # Of 2 + 2, 1 + 1 + 2 pages.
    prompts = [
      Prompt(str(n), np.arange(n, dtype=np.int32), {})
      for n in (6, 9, 2, 5, 1, 9)
    ]
    with mock.patch.object(
      engine._decoder, "prefill", wraps=engine._decoder.prefill
    ) as prefill:
      got = _trajectories(_generate(engine, prompts))
    shapes = [call.args[2].tokens.shape for call in prefill.call_args_list]
    self.assertEqual(shapes, [shape] * dispatches)
    self.assertLess(_worst(got), 1e-4)


@functools.cache
def _without_lanes():
  with mock.patch.object(engine_lib, "_SHARED_TOKENS", 10**6):
    engine = _engine(**LanesTest.shape)
  return _generate(engine, LanesTest.prompts())


class LanesTest(parameterized.TestCase):
  """Samples of a long prompt attend to it together."""

  shape = dict(
    prompt_tokens=150,
    samples_per_prompt=2,
    slots=8,
    max_response_tokens=20,
    chunk_tokens=8,
    cache_tokens=800,
    prefill_tokens=256,
    stop_ids=(3,),
  )

  @staticmethod
  def prompts():
    return _prompts(5, longest=150)

  def _run(self, engine, **how):
    """What comes out, and what was dispatched."""
    chunks = []
    decode = engine._decoder.decode

    def spy(params, pages, chunk):
      chunks.append(jax.tree.map(np.asarray, chunk))
      return decode(params, pages, chunk)

    with mock.patch.object(engine._decoder, "decode", spy):
      got = _generate(engine, self.prompts(), **how)
    return got, chunks

  def _check(self, got):
    self.assertEqual(_tokens(got), _tokens(_without_lanes()))
    for one, other in zip(
      *map(_trajectories, (got, _without_lanes())), strict=True
    ):
      np.testing.assert_allclose(
        one.behavior_logprobs, other.behavior_logprobs, atol=1e-5
      )

  def test_change_nothing(self):
    engine = _engine(**self.shape)
    got, chunks = self._run(engine)
    self._check(got)
    # Two samples of each prompt beside each other; all 149 tokens fit. When one
    # of the fifth prompt takes the place of one of the others, there are five
    # prompts for four lanes, and one of them does without.
    self.assertEqual({chunk.lanes.shape for chunk in chunks}, {(4, 19)})
    self.assertIn((True,) * 8, {tuple(chunk.in_lane) for chunk in chunks})
    alone = [c for c in chunks if np.any(~c.in_lane & (c.positions > 0))]
    self.assertNotEmpty(alone)
    self.assertLess(_worst(_trajectories(got), width=176), 1e-4)
    # Tables without the prompts' pages are narrow.
    for chunk in chunks:
      together = np.all(chunk.in_lane | (chunk.positions == 0))
      self.assertEqual(chunk.table.shape[1] == engine._widths[0], together)

  def test_prefixes_of_the_most_samples_have_the_lanes(self):
    engine = _engine(**self.shape)
    prefixes = [Prefix(np.zeros(8, np.int32), 1, [i], 8) for i in range(1, 7)]
    prefixes[5].pages = list(range(7, 27))  # More than a lane's table has.
    counts = (1, 1, 1, 2, 2, 1)
    group = types.SimpleNamespace()
    samples = [
      Sample(group, index, np.zeros(2, np.uint32), prefix=prefix)
      for prefix, count in zip(prefixes, counts, strict=True)
      for index in range(count)
    ]
    lanes, rows = engine._seated([samples])
    self.assertEqual(
      list(map(id, lanes)), [id(prefixes[i]) for i in (3, 4, 0, 1)]
    )
    self.assertCountEqual(map(id, rows.values()), map(id, samples))
    self.assertLess(max(rows), 8)
    for row, sample in rows.items():
      if any(sample.prefix is prefix for prefix in lanes):
        self.assertIs(lanes[row // 2], sample.prefix)

  def test_where_prefixes_are_longer_than_prompts(self):
    """Samples that are read again have their responses in them."""
    engine = _engine(
      **self.shape | dict(cache_tokens=46 * 8, extra_samples=0, stop_ids=())
    )
    rng = np.random.default_rng(0)
    prompts = [
      Prompt(str(i), rng.integers(_VOCAB, size=150, dtype=np.int32), {})
      for i in range(3)
    ]
    with mock.patch.object(self, "prompts", return_value=prompts):
      got, chunks = self._run(engine)
    self.assertLess(_worst(_trajectories(got), width=176), 1e-4)
    self.assertGreater(engine.stats.preemptions, 0)
    # Those have no lane, however many are free.
    longer = [chunk.head_pages > 19 for chunk in chunks]
    self.assertTrue(any(map(np.any, longer)))
    for chunk, longer_here in zip(chunks, longer, strict=True):
      self.assertFalse(np.any(chunk.in_lane & longer_here))

  def test_recompute_reads_a_prompt_once_for_all_its_samples(self):
    same = PolicySnapshot(1, dict(_snapshot().params))
    counts = {}
    for update in ("swap", "recompute"):
      engine = _engine(**self.shape | dict(weight_update=update))
      got, chunks = self._run(engine, fetch=_fetch_in_turn(_snapshot(), same))
      self._check(got)
      self.assertEqual(engine.stats.swaps, 1)
      self.assertEqual(engine.stats.preemptions, 0)
      counts[update] = engine.stats
    swap, recompute = counts["swap"], counts["recompute"]
    self.assertEqual(recompute.chunks, swap.chunks)
    # All five prompts at most once more, and a chunk of each of eight samples.
    more = recompute.prefill_tokens - swap.prefill_tokens
    lengths = [len(prompt.tokens) - 1 for prompt in self.prompts()]
    self.assertGreater(more, min(lengths))
    self.assertLessEqual(more, sum(lengths) + 8 * 16)

  def test_with_extra_samples(self):
    # Of three samples of a prompt, a lane holds all.
    shape = self.shape | dict(extra_samples=1, slots=9, stop_ids=())
    engine = _engine(**shape)
    got, chunks = self._run(engine)
    self.assertEqual({chunk.lanes.shape for chunk in chunks}, {(3, 19)})
    self.assertLess(_worst(_trajectories(got), width=176), 1e-4)

  @parameterized.parameters(
    # Slots that are no multiple of the samples; prompts that are short.
    dict(slots=5),
    dict(prompt_tokens=100),
  )
  def test_not_here(self, **changes):
    self.assertFalse(_engine(**self.shape | changes)._may_share)


class MeshTest(parameterized.TestCase):
  """Four data slices, and two parts of each tensor."""

  def test_a_sharded_sampler_draws_the_same(self):
    engine = _engine(mesh=(4, 2), decoder=Decoder)

    def fetch(version=0):
      return lambda: _snapshot(version, mesh=(4, 2))

    got = _generate(engine, fetch=fetch())
    want = _alone()
    self.assertEqual(_tokens(got), _tokens(want))
    for one, other in zip(*map(_trajectories, (got, want)), strict=True):
      np.testing.assert_allclose(
        one.behavior_logprobs, other.behavior_logprobs, atol=1e-5
      )
    # Each slice took one of the four prompts.
    for index, prompt in enumerate(_prompts()):
      engine.submit(prompt, index)
    self.assertEqual([s.load for s in engine._schedules], [4] * 4)
    self.assertEqual(engine.free_slots, 0)
    engine.give_up()
    self.assertEqual(engine.free_slots, 16)
    # Its programs compile once, whatever comes.
    for version in range(3):
      _generate(
        engine, _prompts(8), first_group_id=4 * version, fetch=fetch(version)
      )
    compiles = engine.compiles()
    self.assertEqual(compiles["decode"], 1)
    # One for whole prompts, and one for what follows cached pages.
    self.assertLessEqual(compiles["prefill"], 2)

  def test_a_sharded_sampler_shares_prefixes(self):
    engine = _engine(mesh=(4, 2), **LanesTest.shape)
    self.assertTrue(engine._may_share)
    got = _generate(
      engine, LanesTest.prompts(), fetch=lambda: _snapshot(mesh=(4, 2))
    )
    self.assertEqual(_tokens(got), _tokens(_without_lanes()))


class CompilesTest(parameterized.TestCase):
  def test_none_after_warm_up(self):
    """Over prompts and responses of random lengths, and updates."""
    engine = _engine(**_LONG)
    rng = np.random.default_rng(0)

    def run(count, limits):
      for index in range(count):
        length = rng.integers(1, _PROMPT_TOKENS + 1)
        prompt = Prompt(
          "", rng.integers(_VOCAB, size=length, dtype=np.int32), {}
        )
        engine.submit(prompt, index, max_tokens=int(rng.choice(limits)))
      while engine.pending:
        version = engine.stats.chunks // 5 % 3
        engine.step(_snapshot(version, seed=version))

    run(8, [30])
    compiles = engine.compiles()
    run(24, range(1, 31))
    self.assertGreater(engine.stats.swaps, 5)
    self.assertEqual(engine.compiles(), compiles)

  def test_widths(self):
    self.assertEqual(engine_lib._widths(1, 16), (1,))
    self.assertEqual(engine_lib._widths(3, 16), (2, 3))
    self.assertEqual(engine_lib._widths(8, 16), (2, 4, 6, 8))
    self.assertEqual(engine_lib._widths(8, 4), (8,))
    self.assertEqual(engine_lib._widths(101, 1), (32, 64, 96, 101))
    self.assertEqual(engine_lib._widths(401, 1), (101, 202, 303, 401))
    self.assertEqual(_engine(**_LONG)._widths, (8, 11))


class RefusalTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("long", np.arange(10, dtype=np.int32), "odd-one has 10 tokens.* 9 "),
    ("empty", np.zeros(0, np.int32), "odd-one has no tokens"),
    ("wide", np.zeros(3, np.int64), r"odd-one is int64\[3\]"),
    ("matrix", np.zeros((1, 3), np.int32), r"odd-one is int32\[1, 3\]"),
    ("list", [1, 2], "odd-one's tokens are a list.* Try np.asarray"),
    ("floats", np.ones(2, np.float32), r"odd-one is float32\[2\]"),
    (
      "negative",
      np.array([1, -1, -2], np.int32),
      f"odd-one has token -1 at position 1.* 0 to {_VOCAB - 1}",
    ),
    (
      "unknown",
      np.array([_VOCAB - 1, _VOCAB], np.int32),
      f"odd-one has token {_VOCAB} at position 1",
    ),
  )
  def test_a_prompt_is_named(self, tokens, message):
    odd = Prompt("odd-one", tokens, {})
    with self.assertRaisesRegex(ValueError, message):
      _generate(prompts=[*_prompts(), odd])
    # Before anything is generated, and nothing is left.
    _check_idle(_shared_engine())

  @parameterized.parameters(0, -1, _LIMIT + 1, 2.5, 2.0, True)
  def test_max_tokens(self, limit):
    with self.assertRaisesRegex(
      ValueError,
      f"max_tokens = {limit} .* rollout.max_response_tokens = {_LIMIT}",
    ):
      _shared_engine().submit(_prompts()[0], 0, max_tokens=limit)
    _check_idle(_shared_engine())

  def test_a_number_that_is_taken(self):
    engine = _engine()
    engine.submit(_prompts()[0], 3)
    with self.assertRaisesRegex(ValueError, "group 3 is pending already"):
      engine.submit(_prompts()[1], 3)
    engine.give_up()
    engine.submit(_prompts()[1], 3)

  @parameterized.parameters(-1, 2**31, 2**32 + 1, 1.0, True, None)
  def test_group_ids_that_would_wrap(self, number):
    with self.assertRaisesRegex(ValueError, f"group_id = {number} is not"):
      _shared_engine().submit(_prompts()[0], number)
    _check_idle(_shared_engine())

  def test_the_last_group_id(self):
    engine = _shared_engine()
    engine.submit(_prompts()[0], np.int64(2**31 - 1), max_tokens=np.int32(1))
    [group] = engine.step(_snapshot()) or engine.step(_snapshot())
    self.assertEqual(group.group_id, 2**31 - 1)
    self.assertEqual({t.num_sampled for t in group.trajectories}, {1})

  @parameterized.parameters(
    (dict(seed=-1), "seed = -1 must be"),
    (dict(seed=2**32), "seed = 4294967296 must be"),
    (dict(seed=0.5), "seed = 0.5 is not a whole number"),
    (dict(pad_id=-1), f"pad_id = -1 .* 0 to {_VOCAB - 1}"),
    (dict(pad_id=_VOCAB), f"pad_id = {_VOCAB} "),
    (dict(prompt_tokens=0), "max_prompt_tokens = 0 must be"),
  )
  def test_arguments(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      _engine(**changes)

  def test_a_config_that_was_not_parsed(self):
    with self.assertRaises(ConfigError) as caught:
      _engine(
        prompts_per_batch=0,
        samples_per_prompt=0,
        max_response_tokens=2.5,
        chunk_tokens=0,
        slots=10**9,
        weight_update="later",
        temperature=1e-50,
        top_p=1e-50,
        cache_dtype="int4",
        dtype=jnp.float32,
      )
    self.assertLen(caught.exception.problems, 10)
    for problem in caught.exception.problems:
      self.assertStartsWith(problem, "rollout.")
      self.assertIn("Try ", problem)
    with self.assertRaisesRegex(ConfigError, "= 524288, more than 65536"):
      _engine(prompts_per_batch=2**16, extra_samples=4)
    with self.assertRaisesRegex(ConfigError, "rollout.stop_strings = 'END'"):
      _engine(stop_strings="END", stops=lambda tokens, new: None)

  def test_the_caller_may_write_into_its_tokens(self):
    prompts = [
      dataclasses.replace(prompt, tokens=prompt.tokens.copy())
      for prompt in _prompts()
    ]
    engine = _engine()
    for index, prompt in enumerate(prompts):
      engine.submit(prompt, index)
      prompt.tokens[:] = 1
    groups = []
    while engine.pending:
      groups += engine.step(_snapshot())
      for prompt in prompts:
        prompt.tokens[:] += 1
    groups.sort(key=lambda group: group.group_id)
    self.assertEqual(_tokens(groups), _tokens(_alone()))
    for group, prompt in zip(groups, _prompts(), strict=True):
      np.testing.assert_array_equal(group.prompt.tokens, prompt.tokens)
      self.assertFalse(group.prompt.tokens.flags.writeable)

  @parameterized.parameters(
    (lambda tokens, new: 0,),
    (lambda tokens, new: -1,),
    (lambda tokens, new: len(tokens) - new,),
    (lambda tokens, new: len(tokens) + 1,),
    (lambda tokens, new: float(len(tokens)),),
    (lambda tokens, new: True,),
  )
  def test_stops_that_keep_what_they_cannot(self, stops):
    engine = _engine(stop_strings=("END",), stops=stops, stop_ids=())
    with self.assertRaisesRegex(ValueError, "stops returned .* of 4 tokens, 4"):
      _generate(engine)
    _check_idle(engine)

  @parameterized.parameters(
    (_CHUNK, 1), (_CHUNK, 23), (1, 19), (3, 23), (16, 47)
  )
  def test_a_cache_that_one_sample_does_not_fit_into(self, chunk, tokens):
    with self.assertRaises(ConfigError) as caught:
      _engine(chunk_tokens=chunk, cache_tokens=tokens)
    message = str(caught.exception)
    self.assertIn(f"rollout.cache_tokens = {tokens} ", message)
    self.assertIn("prompts.max_tokens", message)
    works = int(message.split("Try rollout.cache_tokens=")[1].split(",")[0])
    self.assertGreater(works, tokens)
    if tokens == 1:
      # What it says works, for the longest sample there can be.
      engine = _engine(chunk_tokens=chunk, cache_tokens=works, stop_ids=())
      got = _trajectories(_generate(engine, _prompts()))
      self.assertEqual({t.num_sampled for t in got}, {_LIMIT})

  def test_no_prompts_at_all(self):
    self.assertEqual(_generate(prompts=[]), [])


class FailureTest(parameterized.TestCase):
  @parameterized.parameters(1, 2, 3)
  def test_of_fetch(self, turn):
    engine = _engine(stop_ids=())
    turns = iter(range(1, 99))

    def fetch():
      if next(turns) == turn:
        raise ZeroDivisionError("no snapshot")
      return _snapshot()

    with self.assertRaises(ZeroDivisionError):
      engine.generate(_prompts(), first_group_id=0, fetch=fetch)
    _check_idle(engine)
    got = _generate(engine)
    self.assertEqual(_tokens(got), _tokens(_alone(stop_ids=())))

  @parameterized.product(
    program=("prefill", "decode"), error=(RuntimeError, KeyboardInterrupt)
  )
  def test_of_a_program(self, program, error):
    engine = _engine(stop_ids=())
    _generate(engine)
    whole = getattr(engine._decoder, program)
    calls = iter(range(99))

    def fails(params, pages, inputs):
      if next(calls) == 1:
        # A dispatch that fails has eaten its donated input already.
        for leaf in jax.tree.leaves(pages):
          leaf.delete()
        raise error("the device is gone")
      return whole(params, pages, inputs)

    new = _snapshot(1, seed=1)
    with (
      mock.patch.object(engine._decoder, program, fails),
      self.assertRaises(error),
    ):
      engine.generate(_prompts(12), first_group_id=0, fetch=lambda: new)
    _check_idle(engine)
    # What was cached is gone, though the weights are the same.
    got = _trajectories(_generate(engine, fetch=lambda: new))
    self.assertLess(_worst(got, seeds={1: 1}), 1e-4)

  def test_a_step_that_fails_gives_all_up(self):
    engine = _engine(stop_ids=())
    engine.submit(_prompts()[0], 0)
    engine.step(_snapshot())
    with (
      mock.patch.object(
        engine._decoder, "decode", side_effect=RuntimeError("gone")
      ),
      self.assertRaisesRegex(RuntimeError, "gone"),
    ):
      engine.step(_snapshot())
    _check_idle(engine)
    self.assertEqual(engine.stats.aborted, 4)
    self.assertEqual(engine.stats.aborted_tokens, 4 * _CHUNK)
    engine.submit(_prompts()[0], 0)

  def test_a_stream_that_is_left(self):
    engine = _engine()
    for group in engine.stream(_prompts(12), first_group_id=0, fetch=_snapshot):
      if group.group_id >= 2:
        break
    del group
    engine.give_up()
    _check_idle(engine)
    self.assertEqual(_tokens(_generate(engine)), _tokens(_alone()))


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
      if timeout_s:
        # Asked with patience: nothing is in flight.
        done.set()
        time.sleep(0.01)
      return False

    actor = Actor(
      _engine(),
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
    self.assertLen(delivered, 4)
    self.assertEqual(actor.metrics()["rollout/swaps"], 1)
    longer = [t for t in _trajectories(delivered) if t.num_sampled > _CHUNK]
    self.assertGreater(len(longer), 4)
    for trajectory in longer:
      sampled = trajectory.policy_version[trajectory.loss_mask]
      rest = len(sampled) - _CHUNK
      self.assertEqual(sampled.tolist(), [0] * _CHUNK + [1] * rest)


class ProgramsTest(parameterized.TestCase):
  def test_are_the_ones_that_run(self):
    """Traced without data, each program is the one that data compiles."""
    mesh = (4, 2)
    engine = _engine(mesh=mesh)
    decoder, traced = engine._decoder, {}

    def spy(name):
      program = getattr(decoder, name)

      def run(*args):
        traced.setdefault(name, program.lower(*args).as_text())
        return program(*args)

      return mock.patch.object(decoder, name, run)

    with spy("prefill"), spy("decode"):
      _generate(engine, fetch=lambda: _snapshot(mesh=mesh))
    placement = Placement(_policy(), mesh=_mesh(*mesh), dtype=jnp.float32)
    programs = engine.programs(placement.abstract())
    self.assertEqual(set(programs), {"prefill", "decode"})
    for name, program in programs.items():
      self.assertEqual(program().as_text(), traced[name])
