"""The draw against float64 and its own definition, at the edges too."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.kernels.token_logprob import ops
from darl_jax.rollout.sampling import Sampling, sample, token_uniforms

# Where a uniform just below 1 falls: the largest float32 there is.
_LAST_UNIFORM = np.float32(1 - 2.0**-24)

_sample = jax.jit(sample, static_argnames=("sampling", "vocab_first"))


def _distribution(logits, sampling):
  """Of one row, float64 [V], and the tokens kept, bool [V]: by sorting."""
  scaled = logits.astype(np.float64) / (sampling.temperature or 1.0)
  kept = np.isfinite(scaled)

  def probs():
    exponentials = np.exp(np.where(kept, scaled - scaled[kept].max(), -np.inf))
    return exponentials / exponentials.sum()

  if sampling.top_k and sampling.top_k < kept.sum():
    kept = kept & (scaled >= np.sort(scaled)[-sampling.top_k])
  if sampling.top_p < 1:
    descending = np.sort(probs())[::-1]
    last = np.searchsorted(np.cumsum(descending), sampling.top_p)
    kept = kept & (probs() >= descending[last])
  if sampling.min_p:
    kept = kept & (probs() >= sampling.min_p * probs().max())
  return probs(), kept


def _check(got, logits, sampling):
  """Everything recorded of the tokens drawn, against float64."""
  vocab = logits.shape[1]
  for row, token in enumerate(np.asarray(got.tokens)):
    probs, kept = _distribution(logits[row], sampling)
    assert kept[token] and probs[token] > 0, (row, token)
    np.testing.assert_allclose(
      got.logprobs[row], np.log(probs[token]), rtol=1e-6, atol=1e-5
    )
    positive = probs[probs > 0]
    np.testing.assert_allclose(
      got.entropy[row], -np.sum(positive * np.log(positive)), atol=1e-5
    )
    if sampling.truncates:
      want = np.packbits(kept, bitorder="little")
      assert got.support.shape == (len(logits), -(-vocab // 8))
      np.testing.assert_array_equal(got.support[row], want)
  assert (got.support is not None) == sampling.truncates


def _rows(seed, rows, vocab, scale=3.0):
  normal = np.random.default_rng(seed).normal(size=(rows, vocab))
  return (scale * normal).astype(np.float32)


def _uniforms(seed, rows):
  return np.random.default_rng(seed).random(rows, np.float32)


def _all_truncations():
  return itertools.product((0, 7), (1.0, 0.8), (0.0, 0.05))


class DistributionTest(parameterized.TestCase):
  @parameterized.parameters(
    Sampling(1.6), Sampling(1.0, 7, 0.8, 0.05),
    *(Sampling(0.7, *truncation) for truncation in _all_truncations()),
  )  # fmt: skip
  def test_equals_float64(self, sampling):
    # Flat and peaked rows; a vocabulary of neither whole blocks nor bytes.
    logits = np.concatenate(
      [_rows(i, 4, 301, scale) for i, scale in enumerate((0.1, 1, 4, 20))]
    )
    logits[1::4, ::3] = -np.inf
    got = _sample(logits, _uniforms(1, len(logits)), sampling=sampling)
    _check(got, logits, sampling)

  @parameterized.parameters(
    Sampling(0.0), Sampling(0.7), Sampling(0.9, 5, 0.9, 0.01)
  )
  def test_vocab_first_is_the_same(self, sampling):
    for vocab in (1, 127, 128, 1000):
      logits = _rows(vocab, 6, vocab)
      logits[1] = np.nan
      logits[2, : vocab // 2] = -np.inf
      uniforms = np.linspace(0, _LAST_UNIFORM, 6, dtype=np.float32)
      want = _sample(logits, uniforms, sampling=sampling)
      got = _sample(logits.T, uniforms, sampling=sampling, vocab_first=True)
      for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)

  @parameterized.parameters(dict(vocab=1), dict(vocab=128), dict(vocab=129))
  def test_any_vocabulary(self, vocab):
    logits = _rows(vocab, 8, vocab)
    for sampling in (Sampling(1.0), Sampling(0.9, 5, 0.9, 0.01)):
      got = _sample(logits, _uniforms(2, 8), sampling=sampling)
      _check(got, logits, sampling)

  @parameterized.parameters(0.0, 1.0)
  def test_one_token_is_certain(self, temperature):
    got = _sample(
      np.array([[-7.0]], np.float32),
      np.array([0.3], np.float32),
      sampling=Sampling(temperature),
    )
    self.assertEqual(
      (got.tokens[0], got.logprobs[0], got.entropy[0]), (0, 0.0, 0.0)
    )

  def test_a_nucleus_of_most_of_the_vocabulary(self):
    """More tokens than are looked at first, in one row of two."""
    logits = _rows(5, 2, 2000, 0.3)
    logits[1] *= 30
    sampling = Sampling(1.0, top_p=0.97)
    kept = [_distribution(row, sampling)[1].sum() for row in logits]
    self.assertGreater(kept[0], 1500)
    self.assertLess(kept[1], 100)
    got = _sample(logits, _uniforms(3, 2), sampling=sampling)
    _check(got, logits, sampling)

  @parameterized.parameters(
    dict(kept=1, top_k=1), dict(kept=4, top_k=3), dict(kept=4, top_k=4),
    dict(kept=7, top_k=5), dict(kept=8, top_k=99),
    # Probabilities: 0.554, 0.204, twice 0.075, thrice 0.028, 0.010.
    dict(kept=1, top_p=1e-9), dict(kept=1, top_p=0.55),
    dict(kept=2, top_p=0.56), dict(kept=4, top_p=0.9),
    dict(kept=7, top_p=0.91),
    # Of what top-k left: 0.610, 0.225, twice 0.083. The tie counts.
    dict(kept=1, top_k=3, top_p=0.6), dict(kept=2, top_k=3, top_p=0.63),
    # Of the most likely token's: 0.368, 0.135 = exp(-2), 0.0498, 0.0183.
    dict(kept=4, min_p=math.exp(-2)), dict(kept=1, min_p=0.37),
    dict(kept=2, top_k=3, min_p=0.14),
    # Of what min-p would leave, the first alone holds 0.731.
    dict(kept=2, top_p=0.7, min_p=0.2),
  )  # fmt: skip
  def test_tokens_tied_with_the_last_kept_are_kept(self, kept, **truncation):
    places = np.array([5, 3, 0, 7, 6, 1, 4, 2])
    logits = np.empty((1, 8), np.float32)
    logits[0, places] = [3, 2, 1, 1, 0, 0, 0, -1]
    got = _sample(logits, _uniforms(0, 1), sampling=Sampling(1.0, **truncation))
    bits = np.unpackbits(np.asarray(got.support[0]), bitorder="little")
    np.testing.assert_array_equal(
      bits, np.isin(np.arange(8), places[:kept]).astype(np.uint8)
    )

  def test_all_tied_are_all_kept(self):
    logits = np.full((1, 200), 2.5, np.float32)
    for truncation in (dict(top_k=3), dict(top_p=0.1), dict(min_p=0.9)):
      sampling = Sampling(1.0, **truncation)
      got = _sample(logits, _uniforms(0, 1), sampling=sampling)
      _check(got, logits, sampling)
      np.testing.assert_allclose(got.entropy, np.log(200), atol=1e-5)

  @parameterized.parameters(0.01, 50.0)
  def test_extreme_logits(self, temperature):
    logits = np.array(
      [
        [1e4, -1e4, 1e4, 0, 9999, 9998],
        [-1e4, -1e4, -1e4, -9999, -1e4, -1e4],
        [-np.inf, 1e4, -1e4, -np.inf, -np.inf, -1e4],
        [3e38, -3e38, 0, 3e38, 1, 2],
      ],
      np.float32,
    )
    for sampling in (
      Sampling(temperature),
      Sampling(temperature, top_p=0.9, min_p=0.01),
    ):
      got = _sample(logits, _uniforms(0, 4), sampling=sampling)
      _check(got, logits, sampling)
      self.assertTrue(np.all(np.asarray(got.entropy) >= 0))

  def test_excluded_tokens_are_in_no_support(self):
    logits = np.full((1, 20), -np.inf, np.float32)
    logits[0, [4, 9, 17]] = [1.0, 3.0, 2.0]
    for truncation in (dict(top_k=10), dict(top_p=0.9999), dict(min_p=1e-9)):
      sampling = Sampling(1.0, **truncation)
      got = _sample(logits, _uniforms(0, 1), sampling=sampling)
      bits = np.unpackbits(np.asarray(got.support[0]), bitorder="little")
      self.assertEqual(list(np.flatnonzero(bits)), [4, 9, 17])
      _check(got, logits, sampling)

  @parameterized.parameters(
    Sampling(0.0), Sampling(1.0), Sampling(1.0, top_k=3),
    Sampling(1.0, top_p=0.5), Sampling(1.0, min_p=0.1),
  )  # fmt: skip
  def test_a_row_without_a_distribution_says_so(self, sampling):
    logits = _rows(0, 7, 301)
    logits[1] = -np.inf
    logits[2, 300] = np.nan
    logits[3, :] = np.nan
    logits[4, 17] = np.inf
    logits[5, 0], logits[5, 1:] = np.nan, -np.inf
    got = _sample(logits, _uniforms(4, 7), sampling=sampling)
    undefined = np.array([0, 1, 1, 1, 1, 1, 0], bool)
    np.testing.assert_array_equal(np.isnan(got.logprobs), undefined)
    np.testing.assert_array_equal(np.isnan(got.entropy), undefined)
    self.assertTrue(np.all(np.asarray(got.tokens)[undefined] == 0))
    if sampling.truncates:
      np.testing.assert_array_equal(~np.any(got.support, axis=1), undefined)
    # The rows beside them are not affected.
    alone = _sample(logits[[0, 6]], _uniforms(4, 7)[[0, 6]], sampling=sampling)
    np.testing.assert_array_equal(
      np.asarray(got.tokens)[~undefined], alone.tokens
    )

  @parameterized.parameters(
    Sampling(0.7), Sampling(0.7, top_k=7), Sampling(1.3, top_p=0.8, min_p=0.01)
  )
  def test_the_learner_recomputes_the_same_log_prob(self, sampling):
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(12, 16)).astype(np.float32)
    unembedding = rng.normal(size=(301, 16)).astype(np.float32)
    logits = jnp.einsum("bd,vd->bv", hidden, unembedding)
    got = _sample(logits, _uniforms(6, 12), sampling=sampling)
    logprobs, entropy = ops.token_logprob(
      jnp.asarray(hidden),
      jnp.asarray(unembedding),
      got.tokens,
      temperature=sampling.temperature,
      support_mask=got.support,
    )
    np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-5)
    np.testing.assert_allclose(got.entropy, entropy, atol=1e-5)


class GreedyTest(parameterized.TestCase):
  def test_takes_the_lowest_of_the_likeliest(self):
    logits = _rows(0, 6, 301)
    logits[0, [40, 290]] = 50.0
    logits[1, [130, 131, 5]] = 50.0
    logits[2, :] = -2.0
    logits[3, 300] = 50.0
    logits[4, :299] = -np.inf
    got = _sample(logits, np.zeros(6, np.float32), sampling=Sampling(0.0))
    np.testing.assert_array_equal(got.tokens, np.argmax(logits, axis=-1))
    _check(got, logits, Sampling(0.0))

  def test_needs_no_uniform(self):
    logits = _rows(1, 4, 301)
    for uniform in (0.0, 0.5, np.nan):
      got = _sample(
        logits, np.full(4, uniform, np.float32), sampling=Sampling(0.0)
      )
      np.testing.assert_array_equal(got.tokens, np.argmax(logits, axis=-1))


class DrawTest(parameterized.TestCase):
  @parameterized.parameters(49152, 50257)
  def test_inverts_the_cumulative_probability(self, vocab):
    rows = 16
    logits = _rows(7, rows, vocab, 2.0)
    cumulative = np.cumsum(
      [_distribution(row, Sampling(1.0))[0] for row in logits], axis=1
    )
    agreed = []
    for seed in range(8):
      uniforms = _uniforms(seed, rows)
      got = _sample(logits, uniforms, sampling=Sampling(1.0))
      for row, (token, uniform) in enumerate(
        zip(got.tokens, uniforms, strict=True)
      ):
        below = cumulative[row, token - 1] if token else 0.0
        self.assertLess(below - 1e-6, uniform)
        self.assertLess(uniform, cumulative[row, token] + 1e-6)
        agreed.append(below <= uniform < cumulative[row, token])
    self.assertGreater(np.mean(agreed), 0.97)

  @parameterized.parameters(Sampling(0.7), Sampling(1.0, top_p=0.8, min_p=0.02))
  def test_evenly_spaced_uniforms_count_out_the_probabilities(self, sampling):
    logits = _rows(8, 1, 500, 1.5)
    probs, _ = _distribution(logits[0], sampling)
    rows, calls = 8192, 8
    count = rows * calls
    uniforms = (np.arange(count) + 0.5) / count
    drawn = [
      _sample(
        np.repeat(logits, rows, axis=0),
        part.astype(np.float32),
        sampling=sampling,
      ).tokens
      for part in np.split(uniforms, calls)
    ]
    counts = np.bincount(np.concatenate(drawn), minlength=500)
    # An interval of length x holds between x - 1 and x + 1 such points.
    self.assertLess(np.max(np.abs(counts - count * probs)), 1 + 1e-6 * count)

  def test_frequencies_are_the_probabilities(self):
    logits = _rows(9, 1, 500, 1.5)
    probs, _ = _distribution(logits[0], Sampling(1.0))
    rows, calls = 8192, 25
    keys = jax.random.key_data(jax.random.split(jax.random.key(2), rows))
    counts = np.zeros(500)
    for call in range(calls):
      uniforms = token_uniforms(keys, jnp.full(rows, call, jnp.int32))
      got = _sample(
        np.repeat(logits, rows, axis=0), uniforms, sampling=Sampling(1.0)
      )
      counts += np.bincount(got.tokens, minlength=500)
    expected = probs * rows * calls
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    statistic = np.sum((observed - expected) ** 2 / expected)
    freedom = len(expected) - 1
    # Five standard deviations of a chi-square: neither too far nor too near.
    self.assertLess(abs(statistic - freedom), 5 * np.sqrt(2 * freedom))

  @parameterized.parameters(Sampling(1.0), Sampling(1.0, top_k=30))
  def test_the_first_and_last_uniform_draw_possible_tokens(self, sampling):
    logits = _rows(10, 4, 301, 1.0)
    # The last block is excluded; the first, but for its last token; blocks in
    # the middle; the last tokens of the last block.
    logits[0, 256:] = -np.inf
    logits[1, :127] = -np.inf
    logits[2, 100:290] = -np.inf
    logits[3, 260:] = -np.inf
    for uniform, end in ((0.0, 0), (_LAST_UNIFORM, -1)):
      got = _sample(logits, np.full(4, uniform, np.float32), sampling=sampling)
      _check(got, logits, sampling)
      for row, token in enumerate(np.asarray(got.tokens)):
        probs, _ = _distribution(logits[row], sampling)
        self.assertEqual(token, np.flatnonzero(probs)[end])

  def test_uniforms_out_of_range_draw_possible_tokens(self):
    logits = _rows(11, 5, 301)
    logits[:, [0, 1, 2, 299, 300]] = -np.inf
    uniforms = np.array([1.0, -0.5, 7.0, np.inf, -np.inf], np.float32)
    got = _sample(logits, uniforms, sampling=Sampling(1.0))
    _check(got, logits, Sampling(1.0))

  def test_rounding_draws_no_unlikely_token(self):
    """One token of each block holds all but exp(-60) of its mass."""
    rng = np.random.default_rng(12)
    blocks, size = 384, 128
    logits = np.full((blocks, size), -60.0, np.float32)
    likely = rng.integers(size, size=blocks)
    logits[np.arange(blocks), likely] = rng.normal(size=blocks)
    logits[::3] = -60.0
    logits = logits.reshape(1, -1)
    cumulative = np.cumsum(_distribution(logits[0], Sampling(1.0))[0])
    # Where a block ends, and the float32 next to it on both sides.
    ends = cumulative[size - 1 :: size].astype(np.float32)[:-1]
    near = [ends]
    for direction in (0, 1):
      step = ends
      for _ in range(4):
        step = np.nextafter(step, np.float32(direction))
        near.append(step)
    for uniforms in near:
      uniforms = np.clip(uniforms, 0, _LAST_UNIFORM)
      got = _sample(
        np.repeat(logits, len(uniforms), axis=0),
        uniforms,
        sampling=Sampling(1.0),
      )
      self.assertGreater(np.min(got.logprobs), -20.0)


class ProgramTest(parameterized.TestCase):
  @parameterized.parameters(
    Sampling(0.0), Sampling(0.8, 40, 0.9, 0.01), Sampling(0.8, top_p=0.9)
  )
  def test_a_row_depends_on_itself_alone(self, sampling):
    # Of the nuclei, those of some rows have more than the tokens that are
    # looked at first.
    logits = _rows(13, 8, 1000)
    logits[::2] /= 10
    uniforms = _uniforms(14, 8)
    whole = _sample(logits, uniforms, sampling=sampling)
    order = np.random.default_rng(15).permutation(8)
    permuted = _sample(logits[order], uniforms[order], sampling=sampling)
    jax.tree.map(
      lambda got, want: np.testing.assert_array_equal(got, want[order]),
      permuted,
      whole,
    )
    rows = np.arange(1, 8, 2)
    part = _sample(logits[rows], uniforms[rows], sampling=sampling)
    np.testing.assert_array_equal(part.tokens, whole.tokens[rows])
    np.testing.assert_allclose(part.logprobs, whole.logprobs[rows], atol=1e-6)
    if sampling.truncates:
      np.testing.assert_array_equal(part.support, whole.support[rows])

  @parameterized.parameters(
    Sampling(0.0), Sampling(0.8, 40, 0.9, 0.01), Sampling(0.8, top_p=0.9)
  )
  def test_sharded_equals_unsharded(self, sampling):
    logits, uniforms = _rows(16, 8, 1024), _uniforms(17, 8)
    logits[::2] /= 10
    want = _sample(logits, uniforms, sampling=sampling)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    got = _sample(
      jax.device_put(
        logits, NamedSharding(mesh, PartitionSpec("data", "tensor"))
      ),
      jax.device_put(uniforms, NamedSharding(mesh, PartitionSpec("data"))),
      sampling=sampling,
    )
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-6)
    np.testing.assert_allclose(got.entropy, want.entropy, atol=1e-5)
    if sampling.truncates:
      np.testing.assert_array_equal(got.support, want.support)

  def test_compiles_once_for_a_shape(self):

    @functools.partial(jax.jit, static_argnames="sampling")
    def program(logits, uniforms, *, sampling):
      return sample(logits, uniforms, sampling=sampling)

    for seed in range(3):
      program(
        _rows(seed, 2, 130),
        _uniforms(seed, 2),
        sampling=Sampling(0.5, top_p=0.9),
      )
    self.assertEqual(program._cache_size(), 1)
    program(_rows(0, 2, 130), _uniforms(0, 2), sampling=Sampling(0.5))
    self.assertEqual(program._cache_size(), 2)

  @parameterized.parameters(Sampling(1.0), Sampling(1.0, top_p=0.9))
  def test_neither_sorts_nor_accumulates_the_vocabulary(self, sampling):
    program = jax.make_jaxpr(functools.partial(sample, sampling=sampling))
    text = str(program(_rows(0, 2, 5000), _uniforms(0, 2)))
    self.assertNotRegex(text, r"\bsort\[")
    self.assertRegex(text, r"i32\[2,40\] = cumsum")
    self.assertNotRegex(text, r"5000\] = cumsum")

  @parameterized.parameters(
    ((2, 3, 4), (2,), np.float32), ((2, 3), (3,), np.float32),
    ((2, 3), (2,), np.float16),
  )  # fmt: skip
  def test_refuses_other_arrays(self, logits, uniforms, dtype):
    with self.assertRaises(AssertionError):
      sample(
        jnp.zeros(logits, dtype),
        jnp.zeros(uniforms, jnp.float32),
        sampling=Sampling(1.0),
      )


class SamplingTest(parameterized.TestCase):
  def test_names_every_problem(self):
    with self.assertRaises(ValueError) as caught:
      Sampling(temperature=-1.0, top_k=-2, top_p=0.0, min_p=1.0)
    message = str(caught.exception)
    for part in (
      "temperature = -1.0", "top_k = -2", "top_p = 0.0", "min_p = 1.0",
    ):  # fmt: skip
      self.assertIn(part, message)
    self.assertLen(message.splitlines(), 4)

  @parameterized.parameters(
    dict(temperature=float("nan")), dict(temperature=float("inf")),
    dict(temperature=1e-37), dict(temperature=1e39), dict(top_k=2.5),
    dict(top_k=2.0), dict(top_k=float("nan")), dict(top_p=1.1),
    dict(top_p=-0.1), dict(top_p=float("nan")), dict(min_p=-0.1),
    dict(min_p=1.5), dict(min_p=float("nan")),
  )  # fmt: skip
  def test_refuses_what_is_out_of_range(self, **change):
    (name,) = change
    with self.assertRaisesRegex(ValueError, f"^{name} = .*Try "):
      Sampling(**dict(temperature=1.0) | change)

  @parameterized.parameters(dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1))
  def test_greedy_has_nothing_to_truncate(self, **truncation):
    with self.assertRaisesRegex(ValueError, "greedy"):
      Sampling(0.0, **truncation)
    self.assertTrue(Sampling(1.0, **truncation).truncates)

  def test_what_is_off_truncates_nothing(self):
    self.assertFalse(Sampling(0.0).truncates)
    self.assertFalse(Sampling(0.7, top_k=0, top_p=1.0, min_p=0.0).truncates)
    self.assertEqual(hash(Sampling(0.7)), hash(Sampling(0.7)))


class TokenUniformsTest(parameterized.TestCase):
  def test_a_row_s_depends_on_its_key_and_count_alone(self):
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 6))
    counts = jnp.array([0, 1, 2, 0, 5, 9], jnp.int32)
    whole = np.asarray(token_uniforms(keys, counts))
    rows = np.array([4, 2, 3])
    np.testing.assert_array_equal(
      token_uniforms(keys[rows], counts[rows]), whole[rows]
    )
    again = token_uniforms(keys, counts.at[1].set(2))
    np.testing.assert_array_equal(again != whole, np.arange(6) == 1)
    again = token_uniforms(keys.at[3].set(keys[0]), counts)
    self.assertEqual(again[3], again[0])
    self.assertNotEqual(whole[3], whole[0])

  def test_are_midpoints_spread_evenly(self):
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), 200))
    uniforms = np.concatenate(
      [token_uniforms(keys, jnp.full(200, i, jnp.int32)) for i in range(50)]
    )
    self.assertEqual(uniforms.dtype, np.float32)
    odd = uniforms.astype(np.float64) * 2**24
    np.testing.assert_array_equal(odd % 2, 1)
    self.assertTrue(np.all((uniforms > 0) & (uniforms < 1)))
    # Kolmogorov's distance, of which 2 / sqrt(n) is exceeded once in 1500.
    steps = np.arange(1, len(uniforms) + 1) / len(uniforms)
    self.assertLess(
      np.max(np.abs(np.sort(uniforms) - steps)), 2 / np.sqrt(len(uniforms))
    )
    # Neither the rows nor the positions of one row are alike.
    table = uniforms.reshape(50, 200)
    for axis in (0, 1):
      self.assertGreater(np.min(np.std(table, axis=axis)), 0.15)
    self.assertGreater(len(np.unique(uniforms)), 9900)
