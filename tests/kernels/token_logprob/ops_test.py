"""The public function: values, gradients, blocks and meshes."""

import functools
import math
import pathlib
import re
import runpy
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from darl_jax.kernels.partition import Partition
from darl_jax.kernels.token_logprob import block_sizes, ops, ref

inputs = types.SimpleNamespace(
  **runpy.run_path(str(pathlib.Path(__file__).parent / "inputs.py"))
)

_AXES = ("data", "fsdp", "tensor")
_BLOCK = 128


def _partition(devices):
  mesh = Mesh(np.array(devices[:8]).reshape(2, 2, 2), _AXES)
  return Partition(mesh, rows=("data", "fsdp"), tensor="tensor", fsdp="fsdp")


def _weights(shape, seed=1):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _evaluate(f, args, weights):
  """logprobs, entropy, and gradients of the weighted sum of the former."""

  def loss(hidden, unembedding, targets, weights):
    logprobs, entropy = f(hidden, unembedding, targets)
    return jnp.sum(weights * logprobs), (logprobs, entropy)

  evaluate = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
  (_, values), gradients = evaluate(*args, weights)
  return *values, *gradients


def _blocked(args, weights, *, temperature=0.7, mask=None, block=_BLOCK):
  return _evaluate(
    lambda h, w, t: ops.blocked(h, w, t, mask, temperature, None, block),
    args,
    weights,
  )


class BlockedTest(parameterized.TestCase):
  """By blocks of the vocabulary, against the definition and float64."""

  def _check(self, args, *, temperature=0.7, masked=False, block=_BLOCK):
    targets, dtypes = args[2], (args[0].dtype, args[1].dtype)
    vocab, weights = args[1].shape[0], _weights(args[2].shape)
    support = inputs.make_support(targets, vocab) if masked else None
    mask = inputs.pack(support) if masked else None
    got = _blocked(
      args, weights, temperature=temperature, mask=mask, block=block
    )
    defined = _evaluate(
      functools.partial(
        ref.token_logprob, temperature=temperature, support_mask=mask
      ),
      args,
      weights,
    )
    exact = inputs.float64(
      *args, temperature=temperature, support=support, weights=weights
    )
    for g, d, e in zip(got[:2], defined[:2], exact[:2], strict=True):
      self.assertEqual((g.dtype, g.shape), (jnp.float32, targets.shape))
      np.testing.assert_allclose(g, d, rtol=1e-5, atol=1e-6)
      np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-5)
    self.assertTrue(np.all(got[1] >= 0))
    bound = 1e-5 if dtypes == inputs.FLOAT32 else 1e-2
    for g, d, e, a in zip(got[2:], defined[2:], exact[2:], args, strict=False):
      self.assertEqual((g.dtype, g.shape), (a.dtype, a.shape))
      self.assertTrue(np.all(np.isfinite(g)))
      self.assertLess(inputs.relative_error(g, d), bound)
      self.assertLess(inputs.relative_error(g, e), bound)

  @parameterized.parameters(
    ((1,), 390, False),
    ((4, 64), 256, False),
    ((3, 7), 100, False),  # A vocabulary smaller than a block.
    ((3, 7), 100, True),
    ((3, 7), 390, True),  # One not a multiple of a block, nor of 8.
    ((2, 3, 4), 128, True),
    ((), 300, False),
  )
  def test_shapes(self, shape, vocab, masked):
    self._check(inputs.make(shape, vocab=vocab), masked=masked)

  @parameterized.product(
    dtypes=[inputs.BFLOAT16, inputs.MIXED], masked=[False, True]
  )
  def test_dtypes(self, dtypes, masked):
    args = inputs.make((3, 7), vocab=390, dtypes=dtypes)
    self._check(args, masked=masked, temperature=1.3)

  @parameterized.parameters(128, 256, 512, block_sizes.SCAN_BLOCK)
  def test_block_sizes(self, block):
    args = inputs.make((3, 7), vocab=2 * block + 70, dtypes=inputs.MIXED)
    self._check(args, block=block)

  @parameterized.parameters(-128, 0, 100, 2000)
  def test_refuses_block_sizes(self, block):
    args = inputs.make((3,))
    with self.assertRaisesRegex(ValueError, rf"block = {block} .*128"):
      ops.blocked(*args, None, 1.0, None, block)

  @parameterized.product(
    dtypes=[inputs.FLOAT32, inputs.MIXED], masked=[False, True]
  )
  def test_huge_logits(self, dtypes, masked):
    # Integers, so that logits of +-1e4 are exact and the rest can be compared.
    args = inputs.make((9,), vocab=390, dtypes=dtypes, scale=1e3, integer=True)
    logits = args[0].astype(jnp.float32) @ args[1].T
    self.assertGreater(jnp.max(jnp.abs(logits)), 1e4)
    self._check(args, temperature=1.0, masked=masked)

  def test_excluded_logits_do_not_matter(self):
    args = inputs.make((9,), vocab=390)
    support = inputs.make_support(args[2], 390, share=0.9)
    support[3:, 200:210] = False
    np.put_along_axis(support[3:], np.asarray(args[2])[3:, None], True, -1)
    unused = ~support.any(0)
    weights = _weights((9,))
    results = []
    for value in (0.0, 1e6):
      unembedding = jnp.where(unused[:, None], value, args[1])
      results.append(
        _blocked(
          (args[0], unembedding, args[2]), weights, mask=inputs.pack(support)
        )
      )
    self.assertGreater(unused.sum(), 0)
    for a, b in zip(*results, strict=True):
      np.testing.assert_array_equal(a, b)

  def test_no_gradient_where_the_log_prob_is_a_constant(self):
    args = inputs.make((3,), vocab=390)
    mask = inputs.pack(inputs.make_support(args[2], 390))
    logprobs, entropy, d_hidden, d_unembedding = _blocked(
      args, _weights((3,)), mask=mask
    )
    # Empty, without its target, and nothing but its target.
    np.testing.assert_array_equal(logprobs, [0.0, ref.OUTSIDE_SUPPORT, 0.0])
    np.testing.assert_array_equal(entropy[jnp.array([0, 2])], [0.0, 0.0])
    np.testing.assert_array_equal(d_hidden, np.zeros((3, 12)))
    np.testing.assert_array_equal(d_unembedding, np.zeros((390, 12)))

  def test_zero_cotangents(self):
    for dtypes in (inputs.FLOAT32, inputs.MIXED):
      args = inputs.make((7,), vocab=390, dtypes=dtypes)
      for gradient in _blocked(args, np.zeros(7, np.float32))[2:]:
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))

  def test_entropy_has_no_gradient(self):
    hidden, unembedding, targets = inputs.make((7,), vocab=390)
    gradient = jax.grad(
      lambda h: jnp.sum(
        ops.blocked(h, unembedding, targets, None, 1.0, None, _BLOCK)[1]
      )
    )(hidden)
    np.testing.assert_array_equal(gradient, np.zeros_like(gradient))

  def test_finite_differences(self):
    args = inputs.make((5,), vocab=300)
    weights = _weights((5,))
    gradients = _blocked(args, weights)[2:]
    f = jax.jit(
      lambda h, w: jnp.sum(
        weights * ops.blocked(h, w, args[2], None, 0.7, None, _BLOCK)[0]
      )
    )
    rng, step = np.random.default_rng(2), 1e-2
    for i in (0, 1):
      direction = [np.zeros(x.shape, np.float32) for x in args[:2]]
      direction[i] = rng.normal(size=args[i].shape).astype(np.float32)
      plus, minus = (
        f(*(x + s * d for x, d in zip(args[:2], direction, strict=True)))
        for s in (step, -step)
      )
      slope = (plus - minus) / (2 * step)
      expected = jnp.sum(gradients[i] * direction[i])
      np.testing.assert_allclose(slope, expected, rtol=1e-2)

  @parameterized.parameters(0.3, 3.0, 6.0, 15.0)
  def test_gradient_of_float32_masters(self, scale):
    # From flat to peaked. Without the correction of the largest entries the
    # rounding of dz to bfloat16 leaves 1.1e-3 to 1.8e-3.
    args = inputs.make(
      (500,), dim=64, vocab=1000, dtypes=inputs.MIXED, scale=scale
    )
    hidden, unembedding, _ = args
    logits = hidden.astype(jnp.float32) @ unembedding.T
    targets = jax.random.categorical(jax.random.key(0), logits)
    args = hidden, unembedding, targets.astype(jnp.int32)
    weights = _weights((500,))
    got = _blocked(args, weights, temperature=1.0)[3]
    expected = inputs.float64(*args, weights=weights)[3]
    self.assertLess(inputs.relative_error(got, expected), 7e-4)

  def test_holds_no_logits(self):
    tokens, vocab, dim = 512, 2000, 8
    like = jax.ShapeDtypeStruct

    def largest(f):
      text = (
        jax.jit(jax.grad(lambda *a: jnp.sum(f(*a)[0]), argnums=(0, 1)))
        .lower(
          like((tokens, dim), jnp.float32),
          like((vocab, dim), jnp.float32),
          like((tokens,), jnp.int32),
        )
        .compile()
        .as_text()
      )
      shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", text)
      return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    blocked = largest(
      lambda h, w, t: ops.blocked(h, w, t, None, 1.0, None, _BLOCK)
    )
    self.assertEqual(blocked, tokens * _BLOCK)
    # The search itself: it does find the logits of the definition.
    whole = largest(functools.partial(ref.token_logprob, temperature=1.0))
    self.assertEqual(whole, tokens * vocab)


class TokenLogprobTest(parameterized.TestCase):
  """Choice between definition and blocks, and what is refused."""

  def _uses_blocks(self, shape, vocab, partition=None):
    like = jax.ShapeDtypeStruct
    with mock.patch.object(
      ops, "blocked", side_effect=lambda h, *_: (h[..., 0], h[..., 0])
    ) as blocked:
      jax.eval_shape(
        functools.partial(
          ops.token_logprob, temperature=1.0, partition=partition
        ),
        like((*shape, 8), jnp.float32),
        like((vocab, 8), jnp.float32),
        like(shape, jnp.int32),
      )
    return blocked.called

  def test_blocks_where_the_logits_are_large(self):
    rows = block_sizes.SMALL_LOGITS_BYTES // (4 * 1024)
    self.assertFalse(self._uses_blocks((rows // 64, 64), 1024))
    self.assertTrue(self._uses_blocks((rows // 64 + 1, 64), 1024))

  def test_counts_the_logits_of_one_device(self):
    rows = block_sizes.SMALL_LOGITS_BYTES // (4 * 1024)
    partition = _partition(jax.devices())
    self.assertFalse(self._uses_blocks((8 * rows // 64, 64), 1024, partition))
    # 4 devices cut the rows, but an odd vocabulary stays whole.
    self.assertTrue(self._uses_blocks((8 * rows // 64, 64), 1023, partition))
    self.assertFalse(self._uses_blocks((4 * rows // 64, 64), 1023, partition))

  def test_both_agree(self):
    args = inputs.make((3, 7), vocab=390, dtypes=inputs.MIXED)
    mask = inputs.pack(inputs.make_support(args[2], 390))
    f = functools.partial(ops.token_logprob, temperature=0.7, support_mask=mask)
    small = _evaluate(f, args, _weights((3, 7)))
    with mock.patch.object(block_sizes, "SMALL_LOGITS_BYTES", 0):
      large = _evaluate(f, args, _weights((3, 7)))
    for s, x in zip(small, large, strict=True):
      self.assertEqual(s.dtype, x.dtype)
      self.assertLess(inputs.relative_error(s, x), 1e-2)
    self.assertTrue(np.any(small[3] != large[3]))  # They are not the same.

  def test_a_row_does_not_depend_on_its_batch(self):
    hidden, unembedding, targets = inputs.make((8, 5), vocab=300)
    for limit in (0, 2**30):
      with mock.patch.object(block_sizes, "SMALL_LOGITS_BYTES", limit):
        f = jax.jit(
          lambda h, t: ops.token_logprob(h, unembedding, t, temperature=1.0)
        )
        whole = f(hidden, targets)
        for row in (0, 5):
          alone = f(hidden[row : row + 1], targets[row : row + 1])
          for a, w in zip(alone, whole, strict=True):
            np.testing.assert_allclose(a[0], w[row], rtol=1e-5, atol=1e-6)

  @parameterized.parameters(0.0, -1.0, np.nan)
  def test_refuses_temperature(self, temperature):
    with self.assertRaisesRegex(ValueError, "above 0"):
      ops.token_logprob(*inputs.make((2,)), temperature=temperature)

  def test_refuses_shapes_and_dtypes(self):
    hidden, unembedding, targets = inputs.make((2, 3))
    mask = inputs.pack(inputs.make_support(targets, 17))
    f = functools.partial(ops.token_logprob, temperature=1.0)
    for args, masks in (
      ((hidden, unembedding.T, targets), None),
      ((hidden, unembedding, targets[:1]), None),
      ((hidden, unembedding, targets.astype(jnp.float32)), None),
      ((hidden, unembedding.astype(jnp.bfloat16), targets), None),
      ((hidden, unembedding, targets), mask[..., :2]),
      ((hidden, unembedding, targets), mask.astype(jnp.int32)),
    ):
      with self.assertRaises(AssertionError):
        f(*args, support_mask=masks)

  def test_refuses_partitions(self):
    partition = _partition(jax.devices())
    f = functools.partial(
      ops.token_logprob, temperature=1.0, partition=partition
    )
    with self.assertRaisesRegex(ValueError, r"\(6, 4, 12\).*fsdp = 4"):
      f(*inputs.make((6, 4)))
    with self.assertRaisesRegex(ValueError, "D = 13 .*fsdp = 2"):
      f(*inputs.make((8, 4), dim=13))
    odd = Partition(partition.mesh, ("data",), "tensor", "fsdp")
    with self.assertRaisesRegex(ValueError, "'fsdp' must be among"):
      ops.token_logprob(*inputs.make((8, 4)), temperature=1.0, partition=odd)


class PartitionTest(parameterized.TestCase):
  """On a mesh of 2 x 2 x 2, in shards of rows, vocabulary and width."""

  @parameterized.parameters(
    (1000, inputs.FLOAT32, True),
    (1000, inputs.BFLOAT16, False),
    (1000, inputs.MIXED, False),
    (1000, inputs.MIXED, True),
    # Does not divide by the devices, nor by 8.
    (1001, inputs.FLOAT32, False),
    (1001, inputs.MIXED, True),
  )
  def test_sharded_equals_unsharded(self, vocab, dtypes, masked):
    partition = _partition(jax.devices())
    args = inputs.make((8, 7), vocab=vocab, dtypes=dtypes)
    weights = _weights((8, 7))
    support = inputs.make_support(args[2], vocab)
    mask = inputs.pack(support) if masked else None
    expected = _blocked(args, weights, mask=mask)
    rows = PartitionSpec(("data", "fsdp"))
    table = PartitionSpec(None if vocab % 2 else "tensor", "fsdp")

    def put(x, spec):
      return jax.device_put(x, NamedSharding(partition.mesh, spec))

    sharded = put(args[0], rows), put(args[1], table), put(args[2], rows)
    mask = put(mask, rows) if masked else None
    got = _evaluate(
      lambda h, w, t: ops.blocked(h, w, t, mask, 0.7, partition, _BLOCK),
      sharded,
      put(weights, rows),
    )
    for g, e in zip(got[:3], expected[:3], strict=True):
      self.assertTrue(
        g.sharding.is_equivalent_to(NamedSharding(partition.mesh, rows), g.ndim)
      )
      self.assertLess(inputs.relative_error(g, e), 1e-6)
    self.assertEqual(got[3].sharding.spec, table)
    # A sum over devices may round a bfloat16 gradient to its other neighbour.
    bound = 1e-3 if dtypes == inputs.BFLOAT16 else 1e-6
    self.assertLess(inputs.relative_error(got[3], expected[3]), bound)

  @parameterized.parameters(
    (("data",), None, None),
    (("data", "fsdp"), None, "fsdp"),
    ((), "tensor", None),
  )
  def test_some_axes(self, rows, tensor, fsdp):
    mesh = _partition(jax.devices()).mesh
    partition = Partition(mesh, rows, tensor, fsdp)
    args = inputs.make((8, 3), vocab=300, dtypes=inputs.MIXED)
    weights = _weights((8, 3))
    got = _evaluate(
      lambda h, w, t: ops.blocked(h, w, t, None, 0.7, partition, _BLOCK),
      args,
      weights,
    )
    for g, e in zip(got, _blocked(args, weights), strict=True):
      self.assertLess(inputs.relative_error(g, e), 1e-6)
