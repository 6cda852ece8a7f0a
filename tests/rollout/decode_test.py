"""What the sampler draws, and what it records about it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.config import (
  MeshConfig,
  ModelConfig,
  RolloutMeshConfig,
  TrainMeshConfig,
)
from darl_jax.models import presets
from darl_jax.models.transformer import Policy
from darl_jax.rollout.decode import Decoder, request_keys
from darl_jax.sharding import meshes

_VOCAB, _PAD = 12, 0


@functools.cache
def _policy():
  config = presets.nano() | dict(
    num_layers=1, embed_dim=16, mlp_dim=24, num_heads=2, head_dim=8
  )
  policy = Policy(ModelConfig(**config), vocab_size=_VOCAB)
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  params = jax.tree.map(
    lambda leaf: (0.5 * rng.normal(size=leaf.shape)).astype(np.float32), shapes
  )
  return policy, params


def _decoder(**changes):
  mesh = MeshConfig(TrainMeshConfig(1, 1, 1), RolloutMeshConfig(1, 1))
  arguments = dict(
    samples_per_prompt=3,
    max_response_tokens=5,
    chunk_tokens=2,
    temperature=1.0,
    stop_ids=(),
    pad_id=_PAD,
    dtype=jnp.float32,
    mesh=meshes.split_devices(mesh).rollout,
  )
  return Decoder(_policy()[0], **arguments | changes)


def _requests(prompts, samples, first=0):
  groups = np.repeat(np.arange(prompts) + first, samples)
  return np.stack([groups, np.tile(np.arange(samples), prompts)], axis=1)


def _run(decoder, samples=3, chunks=2, seed=0):
  """Tokens, log-probs and entropy [B, 1 + chunks * 2] of two prompts."""
  _, params = _policy()
  prompts = np.array([[0, 5, 7], [3, 1, 2]], np.int32)
  state, sampled = decoder.prefill(
    params,
    prompts,
    np.array([1, 0], np.int32),
    _requests(2, samples).astype(np.int32),
    jax.random.key(seed),
  )
  parts = [sampled]
  for _ in range(chunks):
    state, sampled = decoder.decode(params, state)
    parts.append(sampled)
  return jax.tree.map(lambda *p: np.concatenate(p, axis=1), *parts), state


@jax.jit
def _logits(tokens):
  """float32 [B, T, V], of what follows each token; rows have no padding."""
  policy, params = _policy()
  params = jax.tree.map(jnp.asarray, params)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
  hidden = policy.hidden(params, tokens, positions, jnp.ones_like(tokens))
  return hidden @ policy.unembedding(params).T


class DecoderTest(parameterized.TestCase):
  @parameterized.parameters(0.5, 1.0, 2.0)
  def test_samples_and_records_the_tempered_distribution(self, temperature):
    samples = 2000
    decoder = _decoder(samples_per_prompt=samples, temperature=temperature)
    got, _ = _run(decoder, samples=samples, chunks=0)
    for row, prompt in enumerate(([5, 7], [3, 1, 2])):
      logits = np.asarray(_logits(np.array([prompt])))[0, -1]
      probs = np.exp(logits.astype(np.float64) / temperature)
      probs /= probs.sum()
      rows = slice(row * samples, (row + 1) * samples)
      tokens = got.tokens[rows, 0]
      frequency = np.bincount(tokens, minlength=_VOCAB) / samples
      # Five standard deviations of a frequency at most.
      bound = 5 * np.sqrt(probs * (1 - probs) / samples) + 1e-9
      np.testing.assert_array_less(np.abs(frequency - probs), bound)
      np.testing.assert_allclose(
        got.logprobs[rows, 0], np.log(probs)[tokens], atol=1e-5
      )
      np.testing.assert_allclose(
        got.entropy[rows, 0], -np.sum(probs * np.log(probs)), atol=1e-5
      )

  def test_temperature_0_is_greedy_and_recorded_at_temperature_1(self):
    got, _ = _run(_decoder(temperature=0.0))
    for row, prompt in ((0, [5, 7]), (2, [5, 7]), (3, [3, 1, 2])):
      tokens = np.array([[*prompt, *got.tokens[row]]])
      logits = np.asarray(_logits(tokens))[0, len(prompt) - 1 : -1]
      np.testing.assert_array_equal(logits.argmax(-1), got.tokens[row])
      logprobs = np.asarray(jax.nn.log_softmax(logits))
      np.testing.assert_allclose(got.logprobs[row], logprobs.max(-1), atol=1e-5)

  def test_samples_of_a_prompt_and_steps_draw_apart(self):
    decoder = _decoder(samples_per_prompt=50, temperature=100.0)
    got, _ = _run(decoder, samples=50)
    # Nearly uniform over 12 tokens: five equal draws in a row are rare.
    self.assertLess(np.mean(np.ptp(got.tokens, axis=1) == 0), 0.02)
    self.assertGreater(len(np.unique(got.tokens, axis=0)), 95)

  def test_rows_that_ended_hold_padding(self):
    stops = (2, 4, 9)
    decoder = _decoder(
      samples_per_prompt=20, temperature=3.0, stop_ids=stops, pad_id=11
    )
    got, state = _run(decoder, samples=20)
    ended = np.cumsum(np.isin(got.tokens, stops), axis=1) > 0
    after = np.pad(ended, ((0, 0), (1, 0)))[:, :-1]
    self.assertTrue(after.any())
    self.assertTrue(np.all(got.tokens[after] == 11))
    self.assertFalse(np.all(got.tokens[~after] == 11))
    np.testing.assert_array_equal(state.ended, ended[:, -1])
    for stop in stops:
      self.assertIn(stop, got.tokens)

  @parameterized.parameters(
    (1, 2, 0), (2, 2, 1), (5, 2, 2), (6, 2, 3), (4, 9, 1)
  )
  def test_chunks_cover_the_longest_response(self, longest, chunk, chunks):
    decoder = _decoder(max_response_tokens=longest, chunk_tokens=chunk)
    self.assertEqual(decoder.num_chunks, chunks)

  def test_the_cut_into_chunks_does_not_matter(self):
    want, _ = _run(_decoder())
    decoder = _decoder(chunk_tokens=4)
    got, _ = _run(decoder, chunks=1)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


class RequestKeysTest(parameterized.TestCase):
  def test_follow_from_group_and_sample(self):
    root = jax.random.key(0)
    whole = np.asarray(request_keys(root, jnp.asarray(_requests(4, 3))))
    part = np.asarray(request_keys(root, jnp.asarray(_requests(1, 3, first=2))))
    np.testing.assert_array_equal(part, whole[6:9])
    self.assertLen(np.unique(whole, axis=0), 12)
    other = np.asarray(
      request_keys(jax.random.key(1), jnp.asarray(_requests(4, 3)))
    )
    self.assertFalse(np.any(np.all(other == whole, axis=1)))
