"""The definition of the multi-behavior loss, against float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.kernels.multi_behavior_loss import ref

_FLOATS = (
  "logprobs",
  "behavior_logprobs",
  "proximal_logprobs",
  "advantages",
  "token_weights",
)
_BEHAVIOR = dict(
  trust_region="behavior",
  dual_clip=3.0,
  max_behavior_weight=2.0,
  behavior_weight_mode="truncate",
)
_DECOUPLED = dict(_BEHAVIOR, trust_region="decoupled")
_SETTINGS = (
  _BEHAVIOR,
  _DECOUPLED,
  dict(_DECOUPLED, behavior_weight_mode="mask"),
  dict(_DECOUPLED, behavior_weight_mode="band", max_behavior_weight=1.3),
  dict(_DECOUPLED, dual_clip=np.inf, max_behavior_weight=np.inf),
)


def _batch(shape, *, versions=4, scale=0.4, masked=0.3, dtype="f4"):
  rng = np.random.default_rng(0)
  mu = -rng.exponential(size=shape)
  prox = mu + scale * rng.normal(size=shape)
  mask = rng.random(shape) >= masked
  floats = (
    prox + scale * rng.normal(size=shape),
    mu,
    prox,
    rng.normal(size=shape),
    rng.random(shape),
  )
  batch = {
    name: jnp.asarray(np.where(mask, x, np.nan), dtype)
    for name, x in zip(_FLOATS, floats, strict=True)
  }
  return batch | dict(
    loss_mask=jnp.asarray(mask),
    behavior_index=jnp.asarray(rng.integers(versions, size=shape), "i4"),
    # What clip_age_decay leaves of both distances for ever older versions, and
    # no upper bound for the newest.
    clip_low=0.2 * 0.7 ** jnp.arange(versions, dtype="f4"),
    clip_high=(0.3 * 0.7 ** jnp.arange(versions, dtype="f4"))
    .at[0]
    .set(jnp.inf),
  )


def _float64(batch, settings):
  """Method 2.3 as it is written, over the tokens of the mask.

  Returns:
    The loss, the sum of its terms' sizes, the gradient [B, T] and the sums.
  """
  mask = np.asarray(batch["loss_mask"])
  pi, mu, prox, a, c = (
    np.asarray(batch[name]).astype(np.float64)[mask] for name in _FLOATS
  )
  version = np.asarray(batch["behavior_index"])[mask]
  lo, hi = (
    np.asarray(batch[name]).astype(np.float64)[version]
    for name in ("clip_low", "clip_high")
  )
  decoupled = settings["trust_region"] == "decoupled"
  most = settings["max_behavior_weight"]
  mu_ratio = np.exp(np.clip(pi - mu, -20, 20))
  ell = pi - (prox if decoupled else mu)
  r = np.exp(np.clip(ell, -20, 20))
  w, capped = np.ones_like(r), np.zeros(r.shape, bool)
  if decoupled:
    w = np.exp(np.clip(prox - mu, -20, 20))
    capped = w > most
    if settings["behavior_weight_mode"] == "band":
      capped |= w < 1 / most
    truncate = settings["behavior_weight_mode"] == "truncate"
    w = np.where(capped, most if truncate else 0.0, w)
  clipped = np.minimum(r * a, np.clip(r, 1 - lo, 1 + hi) * a)
  floor = np.where(a < 0, settings["dual_clip"], 0.0) * a
  term = np.where(a < 0, np.maximum(clipped, floor), clipped)
  gradient = np.zeros(mask.shape)
  moves = (term == r * a) & (np.abs(ell) < 20)
  gradient[mask] = np.where(moves, -c * w * r * a, 0.0)
  held = (c * w != 0) & (term != r * a)
  fields = dict(
    tokens=np.ones_like(r),
    clipped_low=held & (a < 0) & (r < 1),
    clipped_high=held & (a > 0),
    clipped_dual=held & (a < 0) & (r > 1),
    ratio=mu_ratio,
    ratio_squared=mu_ratio**2,
    kl=np.expm1(np.log(mu_ratio)) - np.log(mu_ratio),
    weight_capped=capped,
  )
  size = len(batch["clip_low"])
  sums = {
    name: np.bincount(version, weights=value, minlength=size)
    for name, value in fields.items()
  }
  terms = -c * w * term
  return terms.sum(), np.abs(terms).sum(), gradient, sums


class RefTest(parameterized.TestCase):
  def assert_equal_float64(self, batch, settings):
    rest = {k: v for k, v in batch.items() if k != "logprobs"}
    loss = functools.partial(ref.multi_behavior_loss, **rest, **settings)
    (got, sums), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
      batch["logprobs"]
    )
    want, size, want_gradient, want_sums = _float64(batch, settings)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * size)
    np.testing.assert_allclose(
      gradient, want_gradient, rtol=1e-6, atol=1e-6 * np.abs(gradient).max()
    )
    for name, value in want_sums.items():
      np.testing.assert_allclose(
        getattr(sums, name), value, rtol=1e-6, err_msg=name
      )

  @parameterized.product(
    settings=_SETTINGS,
    shape=((8, 128), (5, 201), (7, 1), (1, 1)),
  )
  def test_equals_float64(self, settings, shape):
    self.assert_equal_float64(_batch(shape), settings)

  @parameterized.product(settings=_SETTINGS, scale=(0.0, 1e-4, 1e-2, 1.0))
  def test_near_and_far_policies(self, settings, scale):
    # A KL estimate of a few times 1e-8 keeps its digits like any other.
    self.assert_equal_float64(_batch((6, 100), scale=scale), settings)

  @parameterized.product(settings=_SETTINGS, extreme=(-1e4, 1e4))
  def test_beyond_the_clamp(self, settings, extreme):
    batch = _batch((6, 100))
    shifted = batch["logprobs"].at[:, ::3].add(extreme)
    self.assert_equal_float64(batch | dict(logprobs=shifted), settings)
    shifted = batch["proximal_logprobs"].at[:, ::3].add(extreme)
    self.assert_equal_float64(batch | dict(proximal_logprobs=shifted), settings)

  @parameterized.parameters(*_SETTINGS)
  def test_masked(self, **settings):
    self.assert_equal_float64(_batch((3, 40), masked=1.0), settings)
    batch = _batch((6, 40))
    mask = batch["loss_mask"].at[2:4].set(False)
    self.assert_equal_float64(batch | dict(loss_mask=mask), settings)

  @parameterized.parameters(1e-6, 1e-3, 0.4999, 0.5, 3.0, 20.0)
  def test_k3_keeps_its_digits(self, size):
    ell = np.array([-size, size], "f4")
    exact = np.expm1(ell.astype("f8")) - ell.astype("f8")
    if size < 1e-2:  # Where float64 loses digits too.
      exact = ell.astype("f8") ** 2 * (0.5 + ell / 6 + ell**2 / 24)
    got = ref.k3(jnp.asarray(ell), jnp.exp(jnp.asarray(ell)))
    np.testing.assert_allclose(got, exact, rtol=1e-6)
