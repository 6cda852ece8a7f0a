"""What the multi-behavior objective reduces to, through a small policy.

The whole chain (advantages, behavior weights, log-probs, loss) against GRPO
written by hand: method 2.3, last line.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from darl_jax.kernels.multi_behavior_loss import ops as loss_ops
from darl_jax.kernels.token_logprob import ops as logprob_ops
from darl_jax.objectives import advantages, behavior_weights

_CONTEXTS, _DIM, _VOCAB = 7, 5, 6
_LOW, _HIGH, _DUAL = 0.2, 0.28, 3.0


def _groups(seed=0, *, groups=5, samples=4, tokens=6):
  """Fixed groups, ragged; two of them are dead."""
  rng = np.random.default_rng(seed)
  shape = (groups, samples, tokens)
  rewards = rng.choice([0.0, 0.5, 1.0], size=shape[:2])
  rewards[:, :2] = [0.0, 1.0]
  rewards[1], rewards[3] = 1.0, 0.0
  length = rng.integers(1, tokens, size=(*shape[:2], 1))
  return dict(
    rewards=rewards,
    contexts=rng.integers(_CONTEXTS, size=shape),
    targets=rng.integers(_VOCAB, size=shape),
    # Position 0 is always masked.
    mask=(np.arange(tokens) > 0) & (np.arange(tokens) <= length),
  )


def _policy(seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(_CONTEXTS, _DIM)), rng.normal(size=(_VOCAB, _DIM))


def _probs(params):
  """float64 [contexts, V]."""
  embedding, unembedding = params
  logits = embedding @ unembedding.T
  probs = np.exp(logits - logits.max(-1, keepdims=True))
  return probs / probs.sum(-1, keepdims=True)


def _grpo_by_hand(params, behavior, groups):
  """Token-mean GRPO's gradient, token by token, in float64."""
  embedding, unembedding = params
  pi, mu = _probs(params), _probs(behavior)
  count = groups["mask"].sum()
  gradient = np.zeros_like(embedding), np.zeros_like(unembedding)
  for q, rewards in enumerate(groups["rewards"]):
    std = np.std(rewards)
    for i, reward in enumerate(rewards):
      a = (reward - np.mean(rewards)) / std if std > 0 else 0.0
      for t in np.flatnonzero(groups["mask"][q, i]):
        x, y = groups["contexts"][q, i, t], groups["targets"][q, i, t]
        r = pi[x, y] / mu[x, y]
        # d/dtheta of min(r A, clip(r) A) is r A d log pi or nothing.
        if (a > 0 and r > 1 + _HIGH) or (a < 0 and r < 1 - _LOW):
          continue
        score = np.eye(_VOCAB)[y] - pi[x]
        gradient[0][x] -= r * a * score @ unembedding / count
        gradient[1][:] -= r * a * np.outer(score, embedding[x]) / count
  return gradient


@functools.cache
def _differentiated(trust_region):
  def f(params, batch):
    embedding, unembedding = params
    logprobs, _ = logprob_ops.token_logprob(
      embedding[batch["contexts"]],
      unembedding,
      batch["targets"],
      temperature=1.0,
    )
    return loss_ops.multi_behavior_loss(
      logprobs,
      batch["behavior_logprobs"],
      batch["behavior_logprobs"],
      batch["advantages"],
      batch["token_weights"],
      batch["loss_mask"],
      batch["behavior_index"],
      batch["clip_low"],
      batch["clip_high"],
      trust_region=trust_region,
      dual_clip=_DUAL,
      max_behavior_weight=2.0,
      behavior_weight_mode="truncate",
    )[0]

  return jax.jit(jax.value_and_grad(f))


def _darl(
  params,
  behavior,
  groups,
  *,
  denominator="all",
  weighting="pooled",
  trust_region="behavior",
  parts=1,
  behaviors=1,
):
  """(loss, gradient) of one step, selection keeping every live trajectory."""
  a, dead = advantages.group_advantages(
    groups["rewards"],
    np.ones_like(groups["rewards"], bool),
    kind="group",
    tolerance=1e-6,
  )
  flat = {
    name: groups[name][~dead].reshape(-1, groups[name].shape[-1])
    for name in ("contexts", "targets", "mask")
  }
  dead_tokens = int(groups["mask"][dead].sum())
  rows, tokens = flat["mask"].shape
  at = flat["contexts"], flat["targets"]
  ell = np.log(_probs(params))[at] - np.log(_probs(behavior))[at]
  index = np.arange(rows * tokens).reshape(rows, tokens) % behaviors
  weights = behavior_weights.token_weights(
    behavior_weights.BehaviorStatistics.from_tokens(
      ell[flat["mask"]], index[flat["mask"]], behaviors
    ),
    weighting=weighting,
    weight_cap=2.0,
    kappa=1.0,
    dead_tokens=dead_tokens if denominator == "all" else 0,
  )
  batch = dict(
    contexts=flat["contexts"],
    targets=flat["targets"].astype("i4"),
    behavior_logprobs=np.log(_probs(behavior))[at].astype("f4"),
    advantages=np.repeat(a[~dead].reshape(-1, 1), tokens, axis=1),
    token_weights=weights[index].astype("f4"),
    loss_mask=flat["mask"],
    behavior_index=index.astype("i4"),
  )
  clip = dict(
    clip_low=np.full((behaviors,), _LOW, "f4"),
    clip_high=np.full((behaviors,), _HIGH, "f4"),
  )
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
  f = _differentiated(trust_region)
  results = [
    f(params, {n: np.split(v, parts)[i] for n, v in batch.items()} | clip)
    for i in range(parts)
  ]
  return jax.tree.map(lambda *xs: sum(xs), *results)


def _assert_near(got, expected, atol=1e-6):
  for g, e in zip(got, expected, strict=True):
    assert np.abs(e).max() > 0.01
    np.testing.assert_allclose(g, e, rtol=0, atol=atol)


class GrpoReductionTest(parameterized.TestCase):
  @parameterized.product(
    weighting=["pooled", "ess_token", "moment", "inverse_variance"],
    trust_region=["behavior", "decoupled"],
  )
  def test_synchronous_gradient_is_grpo(self, weighting, trust_region):
    # K = 1, max_staleness 0, everything kept, one minibatch: mu is pi.
    params, groups = _policy(), _groups()
    _, gradient = _darl(
      params, params, groups, weighting=weighting, trust_region=trust_region
    )
    _assert_near(gradient, _grpo_by_hand(params, params, groups))

  @parameterized.parameters("behavior", "decoupled")
  def test_off_policy_gradient_is_clipped_grpo(self, trust_region):
    # With one behavior policy every weighting is the pooled one.
    params, groups = _policy(), _groups()
    rng = np.random.default_rng(1)
    behavior = jax.tree.map(
      lambda x: x + 0.15 * rng.normal(size=x.shape), params
    )
    ratio = (_probs(params) / _probs(behavior))[
      groups["contexts"], groups["targets"]
    ][groups["mask"]]
    # Some clip, and none is in reach of the dual clip that GRPO has not.
    self.assertGreater(np.mean(ratio > 1 + _HIGH), 0.05)
    self.assertGreater(np.mean(ratio < 1 - _LOW), 0.05)
    self.assertLess(ratio.max(), _DUAL)
    expected = _grpo_by_hand(params, behavior, groups)
    for weighting in ("pooled", "ess_token", "moment"):
      _, gradient = _darl(
        params,
        behavior,
        groups,
        weighting=weighting,
        trust_region=trust_region,
      )
      _assert_near(gradient, expected)

  @parameterized.parameters("pooled", "ess_token", "moment", "inverse_variance")
  def test_accumulated_gradient_is_the_batch_gradient(self, weighting):
    params, groups = _policy(), _groups()
    behavior = _policy(0)
    behavior[0][:] += 0.1 * np.random.default_rng(1).normal(size=(_CONTEXTS, 1))
    step = functools.partial(
      _darl, params, behavior, groups, weighting=weighting, behaviors=3
    )
    loss, gradient = step()
    for parts in (2, 4):
      got_loss, got = step(parts=parts)
      np.testing.assert_allclose(got_loss, loss, atol=1e-6)
      _assert_near(got, gradient)

  def test_dead_groups(self):
    # `live`: adding dead groups changes nothing. `all`: their tokens dilute.
    params, groups = _policy(), _groups()
    live = {
      name: np.delete(value, [1, 3], axis=0) for name, value in groups.items()
    }
    share = live["mask"].sum() / groups["mask"].sum()
    for denominator, factor in (("live", 1.0), ("all", share)):
      loss, gradient = _darl(params, params, groups, denominator=denominator)
      alone = _darl(params, params, live, denominator=denominator)
      np.testing.assert_allclose(loss, factor * alone[0], rtol=1e-5, atol=1e-7)
      _assert_near(gradient, [factor * g for g in alone[1]])

  def test_permuted_groups(self):
    params, groups = _policy(), _groups()
    _, gradient = _darl(params, params, groups)
    rng = np.random.default_rng(2)
    order = rng.permutation(5)
    within = rng.permutation(4)
    permuted = {n: v[order][:, within] for n, v in groups.items()}
    _, got = _darl(params, params, permuted)
    _assert_near(got, gradient)
