"""The family of objectives in float64 numpy, written from their formulas.

Loops over trajectories and tokens, and nothing in common with the code that it
checks. A batch is a list of trajectories; each is a dict of arrays over its
masked-in tokens alone (pi, mu, prox, ref, entropy: nats; A; c; version), so
that there is no mask, no padding and no row in here.
"""

import math

import numpy as np


def clamp(ell):
  return min(max(ell, -20.0), 20.0)


def clipped_term(r, a, low, high, dual):
  """min(r A, clip(r) A), and at least dual * A for A < 0."""
  term = min(r * a, min(max(r, 1 - low), 1 + high) * a)
  return max(term, dual * a) if a < 0 else term


def clipped(batch, *, low, high, dual, keep=None):
  loss = 0.0
  for i, y in enumerate(batch):
    for t in range(len(y["pi"])):
      if keep is not None and not keep[i][t]:
        continue
      r = math.exp(clamp(y["pi"][t] - y["mu"][t]))
      v = y["version"][t]
      loss -= y["c"][t] * clipped_term(r, y["A"], low[v], high[v], dual)
  return loss


def mipu(batch, *, low, high, cap):
  """min(pi_k/mu_k, cap) times the clipped pi/pi_k, ``prox`` being pi_k."""
  loss = 0.0
  for y in batch:
    for t in range(len(y["pi"])):
      w = min(math.exp(clamp(y["prox"][t] - y["mu"][t])), cap)
      r = math.exp(clamp(y["pi"][t] - y["prox"][t]))
      v = y["version"][t]
      term = clipped_term(r, y["A"], low[v], high[v], math.inf)
      loss -= y["c"][t] * w * term
  return loss


def gspo(batch, *, low, high, dual):
  loss = 0.0
  for y in batch:
    tokens = len(y["pi"])
    if not tokens:
      continue
    total = 0.0
    for t in range(tokens):
      total += clamp(y["pi"][t] - y["mu"][t])
    s = math.exp(total / tokens)
    loss -= sum(y["c"]) * clipped_term(s, y["A"], low, high, dual)
  return loss


def cispo(batch, *, low, high, at):
  """``at``: the batch at which the detached weights are taken."""
  loss = 0.0
  for y, fixed in zip(batch, at, strict=True):
    for t in range(len(y["pi"])):
      r = math.exp(clamp(fixed["pi"][t] - fixed["mu"][t]))
      v = y["version"][t]
      weight = min(max(r, 1 - low[v]), 1 + high[v])
      loss -= y["c"][t] * weight * y["A"] * y["pi"][t]
  return loss


def topr(batch, *, at):
  loss = 0.0
  for y, fixed in zip(batch, at, strict=True):
    total = 0.0
    for t in range(len(y["pi"])):
      total += clamp(fixed["pi"][t] - fixed["mu"][t])
    weight = 1.0 if y["A"] > 0 else min(math.exp(clamp(total)), 1.0)
    for t in range(len(y["pi"])):
      loss -= y["c"][t] * weight * y["A"] * y["pi"][t]
  return loss


def m2po_keep(batch, *, tau):
  """Bools per trajectory: drop the largest until the mean is small."""
  trusted = {}
  for i, y in enumerate(batch):
    for t in range(len(y["pi"])):
      ell = clamp(y["pi"][t] - y["mu"][t])
      r = math.exp(ell)
      if (y["A"] > 0 and r > 1) or (y["A"] < 0 and r < 1):
        trusted[i, t] = ell * ell
  keep = [[True] * len(y["pi"]) for y in batch]
  while trusted and sum(trusted.values()) / len(trusted) > tau:
    i, t = max(trusted, key=trusted.get)
    keep[i][t] = False
    del trusted[i, t]
  return keep


def m2po(batch, *, tau):
  """At fixed ``keep`` the unmasked tokens' r A, with no clip."""
  keep, loss = m2po_keep(batch, tau=tau), 0.0
  for i, y in enumerate(batch):
    for t in range(len(y["pi"])):
      if keep[i][t]:
        r = math.exp(clamp(y["pi"][t] - y["mu"][t]))
        loss -= y["c"][t] * r * y["A"]
  return loss


def estr_keep(batch, *, tau, eps):
  keep = []
  for y in batch:
    keep.append([])
    for t in range(len(y["pi"])):
      ell = clamp(y["pi"][t] - y["mu"][t])
      keep[-1].append(ell**2 / (y["entropy"][t] + eps) <= tau)
  return keep


def kl(batch, *, estimator):
  total = 0.0
  for y in batch:
    for t in range(len(y["pi"])):
      ell = clamp(y["pi"][t] - y["mu"][t])
      value = {
        "k1": -ell,
        "k2": ell**2 / 2,
        "k3": math.exp(ell) - 1 - ell,
      }[estimator]
      total += y["c"][t] * value
  return total


def reference_kl(batch, *, estimator, at):
  """``at``: the batch at which the value of k1 is taken."""
  total = 0.0
  for y, fixed in zip(batch, at, strict=True):
    for t in range(len(y["pi"])):
      x = clamp(y["pi"][t] - y["ref"][t])
      x0 = clamp(fixed["pi"][t] - fixed["ref"][t])
      value = {
        "k1": x0 + (x**2 - x0**2) / 2,
        "k2": x**2 / 2,
        "k3": math.exp(-x) - 1 + x,
      }[estimator]
      total += y["c"][t] * value
  return total


def loglinear(batch, *, v_pi, v_prox):
  proximal = []
  for y in batch:
    proximal.append([])
    for t in range(len(y["pi"])):
      v_mu = y["version"][t]
      a = 0.0 if v_pi == v_mu else (v_prox - v_mu) / (v_pi - v_mu)
      a = min(max(a, 0.0), 1.0)
      ell = clamp(y["pi"][t] - y["mu"][t])
      proximal[-1].append(y["mu"][t] + a * ell)
  return proximal


def balance(prox, behavior, proportions, cap):
  """One trajectory's weight; log-probs of it as a whole."""
  mixture = sum(
    c * math.exp(mu - prox) for c, mu in zip(proportions, behavior, strict=True)
  )
  return min(1 / mixture, cap)


def vcpo_scale(batch, *, rho):
  weights = []
  for y in batch:
    if len(y["pi"]):
      total = 0.0
      for t in range(len(y["pi"])):
        total += clamp(y["pi"][t] - y["mu"][t])
      weights.append(math.exp(clamp(total)))
  if not weights:
    return 1.0
  ess = sum(weights) ** 2 / sum(w * w for w in weights)
  return math.sqrt(min(1.0, ess / len(weights) / rho))


def ewma(policies, *, window):
  """sum_k b^(t-k) theta_k / sum_k b^(t-k), as it stands."""
  b = window / (window + 2)
  t = len(policies) - 1
  top, bottom = np.zeros_like(policies[0], np.float64), 0.0
  for k, theta in enumerate(policies):
    top += b ** (t - k) * theta.astype(np.float64)
    bottom += b ** (t - k)
  return top / bottom


def gradient(loss, batch, *, step=1e-6):
  """Central differences in every pi_it, as a list of lists."""
  result = []
  for i, y in enumerate(batch):
    result.append([])
    for t in range(len(y["pi"])):
      values = []
      for sign in (1, -1):
        moved = [dict(z) for z in batch]
        moved[i]["pi"] = np.array(y["pi"], np.float64)
        moved[i]["pi"][t] += sign * step
        values.append(loss(moved))
      result[-1].append((values[0] - values[1]) / (2 * step))
  return result
