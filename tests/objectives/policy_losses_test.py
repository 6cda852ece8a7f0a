"""The policy losses against float64 loops, and what they reduce to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.kernels.multi_behavior_loss import ops as loss_ops
from darl_jax.objectives import policy_losses
from tests.objectives import reference

_ROWS, _TOKENS, _SEGMENTS = 6, 24, 12
_LOW = np.array([0.2, 0.1, 0.3], np.float32)
_HIGH = np.array([0.28, 0.4, 0.2], np.float32)
_GSPO = dict(clip_low=0.06, clip_high=0.08, dual_clip=1.15)
_ESTR = dict(threshold=0.1, epsilon=0.01)


def _packed(seed=0, *, max_tokens=5, spread=0.25):
  """Rows of a few trajectories each, padding, prompts, and an empty one."""
  rng = np.random.default_rng(seed)
  shape = (_ROWS, _TOKENS)
  fields = dict(
    loss_mask=np.zeros(shape, bool),
    segment_ids=np.zeros(shape, np.int32),
    advantages=np.zeros(shape, np.float32),
  )
  for row in range(_ROWS):
    start = 0
    for segment in range(1, int(rng.integers(2, 4)) + 1):
      prompt = int(rng.integers(1, 3))
      sampled = int(rng.integers(1, max_tokens + 1))
      if (row, segment) == (0, 1):
        sampled = 0
      end = start + prompt + sampled
      fields["segment_ids"][row, start:end] = segment
      fields["loss_mask"][row, start + prompt : end] = True
      fields["advantages"][row, start:end] = rng.normal()
      start = end
  mu = -rng.uniform(0.2, 3.0, shape)
  return fields | dict(
    behavior_logprobs=mu.astype(np.float32),
    logprobs=(mu + spread * rng.normal(size=shape)).astype(np.float32),
    behavior_entropy=rng.uniform(0.0, 1.5, shape).astype(np.float32),
    behavior_index=rng.integers(3, size=shape).astype(np.int32),
    token_weights=(rng.uniform(0.5, 1.5, shape) / 60).astype(np.float32),
    reference_logprobs=(mu + rng.normal(size=shape)).astype(np.float32),
    proximal_logprobs=(mu + 2 * spread * rng.normal(size=shape)).astype(
      np.float32
    ),
  )


def _trajectories(packed):
  """The same for ``reference``, and where each token lies."""
  batch, places = [], []
  for row in range(_ROWS):
    for segment in range(1, int(packed["segment_ids"][row].max()) + 1):
      here = packed["segment_ids"][row] == segment
      at = np.flatnonzero(here & packed["loss_mask"][row])
      places.append((row, at))
      batch.append(
        dict(
          pi=packed["logprobs"][row, at].astype(float),
          mu=packed["behavior_logprobs"][row, at].astype(float),
          prox=packed["proximal_logprobs"][row, at].astype(float),
          ref=packed["reference_logprobs"][row, at].astype(float),
          entropy=packed["behavior_entropy"][row, at].astype(float),
          c=packed["token_weights"][row, at].astype(float),
          version=packed["behavior_index"][row, at],
          A=float(packed["advantages"][row][here][0]),
        )
      )
  return batch, places


def _pack(values, places):
  """Lists per trajectory -> [B, T]."""
  packed = np.zeros((_ROWS, _TOKENS))
  for value, (row, at) in zip(values, places, strict=True):
    packed[row, at] = value
  return packed


def _of(packed, *names):
  return [packed[name] for name in names]


_SEQUENCE = (
  "behavior_logprobs",
  "advantages",
  "token_weights",
  "loss_mask",
  "segment_ids",
)
_TOKEN = (*_SEQUENCE[:4], "behavior_index")


def _gspo(logprobs, packed):
  return policy_losses.gspo(
    logprobs, *_of(packed, *_SEQUENCE), **_GSPO, num_segments=_SEGMENTS
  )


def _cispo(logprobs, packed):
  clip = jnp.asarray(_LOW), jnp.asarray(_HIGH)
  return policy_losses.cispo(logprobs, *_of(packed, *_TOKEN), *clip)


def _topr(logprobs, packed):
  return policy_losses.topr(
    logprobs, *_of(packed, *_SEQUENCE), num_segments=_SEGMENTS
  )


def _clipped(logprobs, packed, *, low=_LOW, high=_HIGH, dual=3.0):
  arrays = _of(packed, *_TOKEN)
  loss, sums = loss_ops.multi_behavior_loss(
    logprobs,
    arrays[0],
    *arrays,
    jnp.asarray(low),
    jnp.asarray(high),
    trust_region="behavior",
    dual_clip=dual,
    max_behavior_weight=2.0,
    behavior_weight_mode="truncate",
  )
  return loss, {"tokens": jnp.sum(sums.tokens)}


def _estr(logprobs, packed):
  keep = policy_losses.estr_mask(
    logprobs,
    *_of(packed, "behavior_logprobs", "behavior_entropy", "loss_mask"),
    **_ESTR,
  )
  weights = jnp.where(keep, packed["token_weights"], 0.0)
  loss, _ = _clipped(logprobs, packed | {"token_weights": weights})
  return loss, {"kept": jnp.sum(keep.astype(jnp.float32))}


def _kl(logprobs, packed, *, estimator):
  arrays = _of(packed, "behavior_logprobs", "token_weights", "loss_mask")
  return policy_losses.kl_penalty(logprobs, *arrays, estimator=estimator), {}


def _reference_kl(logprobs, packed, *, estimator):
  arrays = _of(packed, "reference_logprobs", "token_weights", "loss_mask")
  return policy_losses.reference_kl_penalty(
    logprobs, *arrays, estimator=estimator
  )


def _m2po_keep(ell, advantages, tau):
  """Of tokens that are all masked in."""
  ell = jnp.asarray(ell, jnp.float32)
  return policy_losses.m2po_mask(
    ell - 1.0,
    jnp.full(ell.shape, -1.0),
    jnp.asarray(advantages, jnp.float32),
    jnp.ones(ell.shape, bool),
    max_second_moment=tau,
  )


_LOSSES = {
  "gspo": _gspo,
  "cispo": _cispo,
  "topr": _topr,
  "estr": _estr,
  "k1": functools.partial(_kl, estimator="k1"),
  "k2": functools.partial(_kl, estimator="k2"),
  "k3": functools.partial(_kl, estimator="k3"),
  "reference_k1": functools.partial(_reference_kl, estimator="k1"),
  "reference_k2": functools.partial(_reference_kl, estimator="k2"),
  "reference_k3": functools.partial(_reference_kl, estimator="k3"),
}
_NAMES = list(_LOSSES)
_POLICY_LOSSES = ("gspo", "cispo", "topr", "estr")


def _reference(name, batch):
  """float64 loss of a batch near ``batch``, where what is detached stays."""
  if name == "gspo":
    return functools.partial(reference.gspo, low=0.06, high=0.08, dual=1.15)
  if name == "cispo":
    return functools.partial(reference.cispo, low=_LOW, high=_HIGH, at=batch)
  if name == "topr":
    return functools.partial(reference.topr, at=batch)
  if name == "estr":
    keep = reference.estr_keep(batch, tau=0.1, eps=0.01)
    return functools.partial(
      reference.clipped, low=_LOW, high=_HIGH, dual=3.0, keep=keep
    )
  if name.startswith("reference"):
    return functools.partial(
      reference.reference_kl, estimator=name[-2:], at=batch
    )
  return functools.partial(reference.kl, estimator=name)


@functools.cache
def _jitted(name):
  return jax.jit(jax.value_and_grad(_LOSSES[name], has_aux=True))


def _value_and_grad(name, packed):
  arrays = jax.tree.map(jnp.asarray, packed)
  (loss, sums), gradient = _jitted(name)(arrays["logprobs"], arrays)
  return float(loss), np.asarray(gradient), jax.tree.map(float, sums)


class ReferenceTest(parameterized.TestCase):
  @parameterized.product(name=_NAMES, seed=[0, 1])
  def test_value_and_gradient(self, name, seed):
    packed = _packed(seed)
    batch, places = _trajectories(packed)
    want = _reference(name, batch)
    loss, gradient, _ = _value_and_grad(name, packed)
    np.testing.assert_allclose(loss, want(batch), rtol=1e-5, atol=1e-6)
    expected = _pack(reference.gradient(want, batch), places)
    self.assertGreater(np.abs(expected).max(), 1e-3)
    np.testing.assert_allclose(gradient, expected, atol=2e-6)

  @parameterized.parameters(0, 1)
  def test_the_decoupled_loss_is_mipus_first_step(self, seed):
    """Of truncated weights, around the policy at the start of the step."""
    packed = _packed(seed)
    batch, places = _trajectories(packed)
    rest = _of(packed, "behavior_logprobs", "proximal_logprobs", *_TOKEN[1:])

    def decoupled(logprobs):
      return loss_ops.multi_behavior_loss(
        logprobs,
        *rest,
        jnp.asarray(_LOW),
        jnp.asarray(_HIGH),
        trust_region="decoupled",
        dual_clip=np.inf,
        max_behavior_weight=1.3,
        behavior_weight_mode="truncate",
      )

    (loss, sums), gradient = jax.value_and_grad(decoupled, has_aux=True)(
      jnp.asarray(packed["logprobs"])
    )
    for held in (sums.weight_capped, sums.clipped_low, sums.clipped_high):
      self.assertGreater(jnp.sum(held), 0)
    want = functools.partial(reference.mipu, low=_LOW, high=_HIGH, cap=1.3)
    np.testing.assert_allclose(loss, want(batch), rtol=1e-5, atol=1e-6)
    expected = _pack(reference.gradient(want, batch), places)
    np.testing.assert_allclose(gradient, expected, atol=2e-6)

  def test_every_bound_is_met(self):
    """So the cases above are on all sides of every clip."""
    for name in ("gspo", "cispo", "topr"):
      totals = {}
      for seed in (0, 1):
        for key, value in _value_and_grad(name, _packed(seed))[2].items():
          totals[key] = totals.get(key, 0.0) + value
      self.assertGreater(min(totals.values()), 0, msg=name)
    _, _, sums = _value_and_grad("estr", _packed())
    self.assertBetween(sums["kept"], 20, 0.9 * _packed()["loss_mask"].sum())

  def test_counts(self):
    packed = _packed()
    batch, _ = _trajectories(packed)
    low = high = dual = 0
    for y in batch:
      if len(y["pi"]):
        s = np.exp(np.mean(y["pi"] - y["mu"]))
        low += len(y["pi"]) * (y["A"] < 0 and s < 0.94)
        high += len(y["pi"]) * (y["A"] > 0 and s > 1.08)
        dual += len(y["pi"]) * (y["A"] < 0 and s > 1.15)
    sums = _value_and_grad("gspo", packed)[2]
    self.assertEqual(
      sums, {"clipped_low": low, "clipped_high": high, "clipped_dual": dual}
    )
    sums = _value_and_grad("cispo", packed)[2]
    low = high = 0
    for y in batch:
      r = np.exp(y["pi"] - y["mu"])
      low += np.count_nonzero(r < 1 - _LOW[y["version"]])
      high += np.count_nonzero(r > 1 + _HIGH[y["version"]])
    self.assertEqual(sums, {"clipped_low": low, "clipped_high": high})

  @parameterized.parameters(0.0, 0.01, 0.04, 0.3, np.inf)
  def test_m2po(self, tau):
    kept = []
    for seed in range(4):
      packed = _packed(seed)
      batch, places = _trajectories(packed)
      keep = self._m2po_keep(packed, tau)
      want = reference.m2po_keep(batch, tau=tau)
      np.testing.assert_array_equal(keep, _pack(want, places).astype(bool))
      kept.append(np.mean(keep[packed["loss_mask"]]))

      # r A without a clip on what is kept: the loss of the whole.
      weights = np.where(keep, packed["token_weights"], np.float32(0))
      loss, _ = _clipped(
        packed["logprobs"],
        packed | {"token_weights": weights},
        low=np.ones(3, np.float32),
        high=np.full(3, np.inf, np.float32),
        dual=np.inf,
      )
      np.testing.assert_allclose(
        loss, reference.m2po(batch, tau=tau), rtol=1e-5, atol=1e-6
      )
    if tau in (0.01, 0.04):
      self.assertBetween(np.mean(kept), 0.5, 0.99)

  def test_m2po_ignores_what_is_masked(self):
    packed = _packed()
    want = self._m2po_keep(packed, 0.04)
    for garbage in (np.nan, np.inf, -np.inf):
      dirty = dict(packed)
      for field in ("logprobs", "behavior_logprobs", "advantages"):
        dirty[field] = np.where(packed["loss_mask"], packed[field], garbage)
      np.testing.assert_array_equal(self._m2po_keep(dirty, 0.04), want)

  def _m2po_keep(self, packed, tau):
    arrays = _of(
      packed, "logprobs", "behavior_logprobs", "advantages", "loss_mask"
    )
    keep = policy_losses.m2po_mask(
      *map(jnp.asarray, arrays), max_second_moment=tau
    )
    return np.asarray(keep)

  @parameterized.parameters((5, 4), (5, 5), (2, 1), (2, 0), (1, 1))
  def test_loglinear(self, v_pi, v_prox):
    packed = _packed()
    batch, places = _trajectories(packed)
    got = policy_losses.loglinear_proximal(
      *_of(packed, "logprobs", "behavior_logprobs", "behavior_index"),
      packed["loss_mask"],
      policy_version=v_pi,
      proximal_version=v_prox,
    )
    want = reference.loglinear(batch, v_pi=v_pi, v_prox=v_prox)
    np.testing.assert_allclose(got, _pack(want, places), atol=1e-6)

  @parameterized.parameters(0.3, 0.9, 1.0)
  def test_vcpo(self, rho):
    for seed in range(3):
      packed = _packed(seed)
      batch, _ = _trajectories(packed)
      got = self._vcpo(packed, rho)
      np.testing.assert_allclose(
        got, reference.vcpo_scale(batch, rho=rho), rtol=1e-5
      )
      if rho == 1.0:
        self.assertLess(got, 1.0)

  def test_vcpo_without_a_trajectory(self):
    packed = _packed()
    packed["loss_mask"] = np.zeros_like(packed["loss_mask"])
    self.assertEqual(self._vcpo(packed, 0.5), 1.0)

  def _vcpo(self, packed, rho):
    ell = policy_losses.trajectory_log_ratio(
      *_of(packed, "logprobs", "behavior_logprobs", "loss_mask"),
      packed["segment_ids"],
      num_segments=_SEGMENTS,
    )
    present = policy_losses.trajectories_present(
      packed["loss_mask"], packed["segment_ids"], num_segments=_SEGMENTS
    )
    want = np.zeros(ell.shape, bool)
    for row in range(_ROWS):
      want[row, packed["segment_ids"][row][packed["loss_mask"][row]]] = True
    np.testing.assert_array_equal(present, want)
    scale, fraction = policy_losses.vcpo_scale(
      ell, present, base_ess_fraction=rho
    )
    np.testing.assert_allclose(
      scale, np.sqrt(min(1, fraction / rho)), rtol=1e-6
    )
    return float(scale)


class ByHandTest(parameterized.TestCase):
  """Two trajectories of a row: A = 1 with two tokens, A = -2 with one."""

  def setUp(self):
    super().setUp()
    ln = np.log
    self._packed = dict(
      logprobs=jnp.array([[0.0, ln(0.5), ln(0.4), 0.0, ln(0.2)]]),
      behavior_logprobs=jnp.array([[0.0, ln(0.25), ln(0.8), 0.0, ln(0.4)]]),
      advantages=jnp.array([[1.0, 1.0, 1.0, -2.0, -2.0]]),
      token_weights=jnp.array([[0.0, 0.25, 0.25, 0.0, 0.5]]),
      loss_mask=jnp.array([[False, True, True, False, True]]),
      segment_ids=jnp.array([[1, 1, 1, 2, 2]]),
      behavior_index=jnp.zeros((1, 5), int),
    )

  def _check(self, loss, value, gradient):
    got, slope = jax.value_and_grad(lambda x: loss(x, self._packed)[0])(
      self._packed["logprobs"]
    )
    np.testing.assert_allclose(got, value, rtol=1e-5)
    np.testing.assert_allclose(slope, [gradient], rtol=1e-5, atol=1e-7)

  def test_gspo(self):
    # Ratios 2 and 1/2: s = 1, so 1 * 0.5. The other: s = 1/2, held at 0.94, so
    # -2 * 0.94 * 0.5 and no gradient.
    self._check(_gspo, -0.5 + 0.94, [0, -0.25, -0.25, 0, 0])

  def test_cispo(self):
    # Weights 2 -> 1.28, 1/2 -> 0.8, 1/2 -> 0.8.
    ln = np.log
    value = -0.25 * (1.28 * ln(0.5) + 0.8 * ln(0.4)) + 0.5 * 2 * 0.8 * ln(0.2)
    self._check(_cispo, value, [0, -0.32, -0.2, 0, 0.8])

  def test_topr(self):
    ln = np.log
    value = -0.25 * (ln(0.5) + ln(0.4)) + 0.5 * 0.5 * 2 * ln(0.2)
    self._check(_topr, value, [0, -0.25, -0.25, 0, 0.5])

  def test_m2po(self):
    # Moving away: 0.1 and 0.5 of A > 0, -0.3 of A < 0, squares 0.01, 0.25 and
    # 0.09. Means 0.117, then 0.05, then 0.01.
    ell = np.array([0.1, 0.5, -0.3, -0.9, 0.7])
    advantages = np.array([1.0, 2.0, -1.0, 1.0, -1.0])
    for tau, kept in (
      (0.2, [1, 1, 1, 1, 1]),
      (0.1, [1, 0, 1, 1, 1]),
      (0.04, [1, 0, 0, 1, 1]),
      (0.001, [0, 0, 0, 1, 1]),
    ):
      keep = _m2po_keep(ell, advantages, tau)
      np.testing.assert_array_equal(keep, np.array(kept, bool))

  def test_estr(self):
    # 0.09 / (0.29 + 0.01) = 0.3, and 0.09 / (0.89 + 0.01) = 0.1.
    keep = policy_losses.estr_mask(
      jnp.array([[0.3, 0.3, 0.3]]) - 1.0,
      jnp.full((1, 3), -1.0),
      jnp.array([[0.29, 0.89, np.nan]]),
      jnp.array([[True, True, False]]),
      threshold=0.2,
      epsilon=0.01,
    )
    np.testing.assert_array_equal(keep, [[False, True, False]])

  def test_kl(self):
    value = 0.25 * (1 - np.log(2)) + 0.75 * (-0.5 + np.log(2))
    got, _ = _kl(self._packed["logprobs"], self._packed, estimator="k3")
    np.testing.assert_allclose(got, value, rtol=1e-5)

  @parameterized.parameters(
    # ref/pi = 1/2, 2 and 2, so x = ln 2, -ln 2 and -ln 2.
    ("k1", lambda ln2: ln2 * (0.25 - 0.75), (1, -1, -1)),
    ("k2", lambda ln2: ln2**2 / 2, (1, -1, -1)),
    ("k3", lambda ln2: 0.25 * (ln2 - 0.5) + 0.75 * (1 - ln2), None),
  )
  def test_reference_kl(self, estimator, value, slopes):
    self._packed["reference_logprobs"] = self._packed["behavior_logprobs"]
    ln2 = np.log(2)
    slopes = np.array(slopes) * ln2 if slopes else (0.5, -1, -1)
    weighted = np.array([0.25, 0.25, 0.5]) * slopes
    self._check(
      functools.partial(_reference_kl, estimator=estimator),
      value(ln2),
      [0, weighted[0], weighted[1], 0, weighted[2]],
    )
    _, sums = _reference_kl(
      self._packed["logprobs"], self._packed, estimator="k1"
    )
    np.testing.assert_allclose(sums["reference_kl"], -ln2, rtol=1e-5)


class MaskTest(parameterized.TestCase):
  @parameterized.product(name=_NAMES, garbage=[np.nan, np.inf, -np.inf])
  def test_garbage_in_masked_slots_changes_nothing(self, name, garbage):
    packed = _packed()
    loss, gradient, sums = _value_and_grad(name, packed)
    dirty = dict(packed)
    for field in (
      "logprobs",
      "behavior_logprobs",
      "behavior_entropy",
      "advantages",
      "token_weights",
      "reference_logprobs",
    ):
      dirty[field] = np.where(packed["loss_mask"], packed[field], garbage)
    got_loss, got, got_sums = _value_and_grad(name, dirty)
    self.assertEqual(got_loss, loss)
    self.assertEqual(got_sums, sums)
    np.testing.assert_array_equal(got, gradient)

  @parameterized.product(name=_NAMES, tokens=[0, 1])
  def test_no_token_and_one(self, name, tokens):
    packed = _packed()
    mask = np.zeros((_ROWS, _TOKENS), bool)
    mask[1, 3] = bool(tokens)
    packed["loss_mask"] = mask
    packed["segment_ids"] = np.where(mask, 1, packed["segment_ids"])
    loss, gradient, _ = _value_and_grad(name, packed)
    self.assertTrue(np.isfinite(loss))
    self.assertTrue(np.all(np.isfinite(gradient)))
    np.testing.assert_array_equal(gradient[~mask], 0)
    if not tokens:
      self.assertEqual(loss, 0)

  @parameterized.product(name=_NAMES, shift=[1e4, -1e4], sign=[1, -1])
  def test_extreme_log_ratios(self, name, shift, sign):
    packed = _packed()
    packed["behavior_logprobs"] = packed["logprobs"] - np.float32(shift)
    packed["reference_logprobs"] = packed["behavior_logprobs"]
    packed["advantages"] = np.full((_ROWS, _TOKENS), sign, np.float32)
    loss, gradient, sums = _value_and_grad(name, packed)
    self.assertTrue(np.isfinite(loss))
    self.assertTrue(np.all(np.isfinite(gradient)))
    self.assertTrue(all(np.isfinite(value) for value in sums.values()))
    # The shift may be in log pi as well, whose own value is in two losses.
    packed["logprobs"] = packed["logprobs"] + np.float32(2 * shift)
    loss, gradient, _ = _value_and_grad(name, packed)
    self.assertTrue(np.isfinite(loss))
    self.assertTrue(np.all(np.isfinite(gradient)))

  @parameterized.parameters(0.0, 1e4, -1e4)
  def test_what_has_no_gradient_is_finite_too(self, shift):
    packed = _packed()
    packed["behavior_logprobs"] = packed["logprobs"] - np.float32(shift)
    ell = policy_losses.trajectory_log_ratio(
      *_of(packed, "logprobs", "behavior_logprobs", "loss_mask"),
      packed["segment_ids"],
      num_segments=_SEGMENTS,
    )
    # A sum of 20s is held to 20 as well.
    self.assertEqual(np.abs(ell).max(), 20 if shift else 0)
    scale, _ = policy_losses.vcpo_scale(ell, ell != 99, base_ess_fraction=0.5)
    self.assertBetween(float(scale), 0.0, 1.0)
    proximal = policy_losses.loglinear_proximal(
      *_of(packed, "logprobs", "behavior_logprobs", "behavior_index"),
      packed["loss_mask"],
      policy_version=3,
      proximal_version=2,
    )
    self.assertTrue(np.all(np.isfinite(proximal)))
    keep = _m2po_keep(np.full(4, shift), np.ones(4), 0.04)
    self.assertEqual(keep.all(), shift <= 0)

  def test_empty_m2po(self):
    self.assertEqual(_m2po_keep(np.zeros(0), np.zeros(0), 0.04).shape, (0,))

  def test_equal_log_ratios_go_from_the_first(self):
    # Mean 0.09 until the last has gone: no order would keep one.
    keep = _m2po_keep(np.full(3, 0.3), np.ones(3), 0.08)
    self.assertFalse(keep.any())
    # 0.36 goes, and one of the equal ones must: (0.09 + 0.0) / 2 < 0.05.
    keep = _m2po_keep(np.array([0.3, 0.3, 1e-3]), np.ones(3), 0.05)
    np.testing.assert_array_equal(keep, [False, True, True])


class SumsTest(parameterized.TestCase):
  @parameterized.product(name=_NAMES, parts=[2, 3])
  def test_microbatches_sum_to_the_batch(self, name, parts):
    packed = _packed()
    loss, gradient, sums = _value_and_grad(name, packed)
    cut = [
      _value_and_grad(
        name, {k: np.split(v, parts)[i] for k, v in packed.items()}
      )
      for i in range(parts)
    ]
    np.testing.assert_allclose(sum(c[0] for c in cut), loss, atol=1e-6)
    np.testing.assert_allclose(
      np.concatenate([c[1] for c in cut]), gradient, atol=1e-7
    )
    for key, value in sums.items():
      np.testing.assert_allclose(sum(c[2][key] for c in cut), value, rtol=1e-5)

  @parameterized.parameters(*_NAMES)
  def test_vmap(self, name):
    packed = _packed(), _packed(1)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *packed)
    losses, sums = jax.vmap(_LOSSES[name])(stacked["logprobs"], stacked)
    for i, one in enumerate(packed):
      loss, _, want = _value_and_grad(name, one)
      np.testing.assert_allclose(losses[i], loss, rtol=1e-5, atol=1e-6)
      for key, value in want.items():
        np.testing.assert_allclose(sums[key][i], value, rtol=1e-5)


class OnPolicyTest(parameterized.TestCase):
  @parameterized.parameters(*_POLICY_LOSSES)
  def test_gradient_is_reinforce(self, name):
    """At pi = mu every loss has the gradient - c A, token by token.

    GSPO's, where the weights of a trajectory's tokens are equal.
    """
    packed = _packed()
    packed["behavior_logprobs"] = packed["logprobs"]
    packed["token_weights"] = np.full((_ROWS, _TOKENS), 0.02, np.float32)
    _, gradient, _ = _value_and_grad(name, packed)
    want = -0.02 * np.where(packed["loss_mask"], packed["advantages"], 0)
    np.testing.assert_allclose(gradient, want, atol=1e-7)

  @parameterized.parameters(
    ("k1", -0.02),
    ("k2", 0.0),
    ("k3", 0.0),
    ("reference_k1", 0.0),
    ("reference_k2", 0.0),
    ("reference_k3", 0.0),
  )
  def test_gradient_of_the_penalty(self, name, slope):
    packed = _packed()
    packed["behavior_logprobs"] = packed["logprobs"]
    packed["reference_logprobs"] = packed["logprobs"]
    packed["token_weights"] = np.full((_ROWS, _TOKENS), 0.02, np.float32)
    _, gradient, _ = _value_and_grad(name, packed)
    np.testing.assert_allclose(gradient, slope * packed["loss_mask"], atol=1e-7)

  @parameterized.parameters("k1", "k3")
  def test_penalty_is_kl_of_mu_to_pi(self, estimator):
    """Summed over mu itself, value and gradient: each token once."""
    rng = np.random.default_rng(0)
    mu, logits = rng.dirichlet(np.ones(6)), rng.normal(size=6)

    def penalty(logits):
      return policy_losses.kl_penalty(
        jax.nn.log_softmax(logits)[None],
        jnp.log(mu)[None],
        jnp.asarray(mu)[None],
        jnp.ones((1, 6), bool),
        estimator=estimator,
      )

    pi = np.exp(logits) / np.exp(logits).sum()
    value, gradient = jax.value_and_grad(penalty)(jnp.asarray(logits))
    np.testing.assert_allclose(value, np.sum(mu * np.log(mu / pi)), rtol=1e-5)
    np.testing.assert_allclose(gradient, pi - mu, atol=1e-6)

  @parameterized.parameters(
    ("k1", "pi", "pi"), ("k2", None, "pi"), ("k3", "pi", "ref")
  )
  def test_reference_penalty_is_kl(self, estimator, value_of, gradient_of):
    """Summed over pi itself: KL(pi || ref), and which one's gradient."""
    rng = np.random.default_rng(0)
    ref, logits = np.log(rng.dirichlet(np.ones(6))), rng.normal(size=6)

    def penalty(logits):
      logprobs = jax.nn.log_softmax(logits)
      got, _ = policy_losses.reference_kl_penalty(
        logprobs[None],
        jnp.asarray(ref)[None],
        jnp.exp(logprobs)[None],
        jnp.ones((1, 6), bool),
        estimator=estimator,
      )
      return got

    def kl(logits, first):
      pi = jax.nn.log_softmax(logits)
      one, other = (pi, ref) if first == "pi" else (ref, pi)
      return jnp.sum(jnp.exp(one) * (one - other))

    value, gradient = jax.value_and_grad(penalty)(jnp.asarray(logits))
    if value_of:
      np.testing.assert_allclose(value, kl(logits, value_of), rtol=1e-5)
    want = jax.grad(kl)(jnp.asarray(logits), gradient_of)
    np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-6)


class ReductionTest(parameterized.TestCase):
  """To 1e-6, in value and gradient, against the fused token loss."""

  def _assert_same(self, one, other, packed, *, values=True):
    arrays = jax.tree.map(jnp.asarray, packed)
    (a, _), da = jax.value_and_grad(one, has_aux=True)(
      arrays["logprobs"], arrays
    )
    (b, _), db = jax.value_and_grad(other, has_aux=True)(
      arrays["logprobs"], arrays
    )
    self.assertGreater(np.abs(db).max(), 1e-3)
    if values:
      np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_allclose(da, db, atol=1e-6)

  def test_gspo_of_one_token_answers_is_grpo(self):
    packed = _packed(max_tokens=1)
    self._assert_same(
      lambda x, p: policy_losses.gspo(
        x,
        *_of(p, *_SEQUENCE),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=1.5,
        num_segments=_SEGMENTS,
      ),
      lambda x, p: _clipped(
        x,
        p,
        low=np.full(3, 0.2, np.float32),
        high=np.full(3, 0.28, np.float32),
        dual=1.5,
      ),
      packed,
    )

  def test_unclipped_cispo_has_the_unclipped_gradient(self):
    open_ = jnp.ones(3), jnp.full(3, jnp.inf)
    self._assert_same(
      lambda x, p: policy_losses.cispo(x, *_of(p, *_TOKEN), *open_),
      lambda x, p: _clipped(x, p, low=open_[0], high=open_[1], dual=np.inf),
      _packed(),
      values=False,
    )

  def test_cispo_within_the_bounds_is_grpo(self):
    packed = _packed(spread=0.02)
    self._assert_same(_cispo, _clipped, packed, values=False)

  def test_topr_of_one_token_less_likely_is_unclipped_grpo(self):
    # With A < 0 and r < 1 the weight is r itself.
    packed = _packed(max_tokens=1)
    packed["advantages"] = -np.abs(packed["advantages"])
    packed["logprobs"] = np.minimum(
      packed["logprobs"], packed["behavior_logprobs"]
    )
    self._assert_same(
      _topr,
      lambda x, p: _clipped(x, p, low=np.ones(3, np.float32), dual=np.inf),
      packed,
      values=False,
    )

  def test_estr_with_an_infinite_threshold_is_grpo(self):
    def estr(x, p):
      keep = policy_losses.estr_mask(
        x,
        *_of(p, "behavior_logprobs", "behavior_entropy", "loss_mask"),
        threshold=np.inf,
        epsilon=0.01,
      )
      weights = jnp.where(keep, p["token_weights"], 0.0)
      return _clipped(x, p | {"token_weights": weights})

    self._assert_same(estr, _clipped, _packed())

  def test_m2po_with_an_infinite_bound_keeps_all(self):
    rng = np.random.default_rng(0)
    keep = _m2po_keep(rng.normal(size=50), rng.normal(size=50), np.inf)
    self.assertTrue(keep.all())

  @parameterized.parameters((3, "pi"), (-1, "mu"))
  def test_loglinear_ends(self, v_prox, end):
    packed = _packed()
    got = policy_losses.loglinear_proximal(
      *_of(packed, "logprobs", "behavior_logprobs", "behavior_index"),
      packed["loss_mask"],
      policy_version=3,
      proximal_version=v_prox,
    )
    name = {"pi": "logprobs", "mu": "behavior_logprobs"}[end]
    want = np.where(packed["loss_mask"], packed[name], 0)
    np.testing.assert_allclose(got, want, atol=1e-6)

  def test_vcpo_of_equal_weights_is_1(self):
    ell = jnp.full((3, 4), 2.5)
    got = policy_losses.vcpo_scale(
      ell, jnp.ones((3, 4), bool), base_ess_fraction=1.0
    )
    np.testing.assert_allclose(got, (1.0, 1.0), rtol=1e-6)
