"""Which trajectories of the ring's pool a step is trained on (method 2.1, 2.2).

Arrays in, indices out, one value per trajectory of the pool. The metrics are
means over tokens and never sums, because a sum rejects long answers.
"""

import bisect
import dataclasses
import math
import sys

import numpy as np

from darl_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class PoolStatistics:
  """What selection and its report know of each trajectory of a pool.

  ell = log pi - log mu of a masked-in token, nats, from the scoring pass; a
  mean is over the trajectory's T_i masked-in tokens. Every field is [n].

  Attributes:
    count: T_i, as the scoring pass counted it.
    mean: Of ell.
    variance: Population variance of ell.
    second_moment: variance + mean^2.
    harmful: Mean of ell^2 where A ell > 0, else 0.
    entropy_scaled: Mean of ell^2 / (H + 0.01).
    max_abs: Greatest |ell|.
    length: Masked-in tokens, as the ring counted them.
    reward: As verified.
    advantage: From the full group.
    entropy: Mean entropy of the behavior policy, nats.
    age: Learner version minus ``begun_by``.
    begun_by: Version that began the trajectory.
  """

  count: np.ndarray
  mean: np.ndarray
  variance: np.ndarray
  second_moment: np.ndarray
  harmful: np.ndarray
  entropy_scaled: np.ndarray
  max_abs: np.ndarray
  length: np.ndarray
  reward: np.ndarray
  advantage: np.ndarray
  entropy: np.ndarray
  age: np.ndarray
  begun_by: np.ndarray

  def __post_init__(self):
    shapes = {
      field.name: np.shape(getattr(self, field.name))
      for field in dataclasses.fields(self)
    }
    if len(set(shapes.values())) != 1 or len(shapes["count"]) != 1:
      raise ValueError(f"every field must be [n] for one n, not {shapes}.")
    if not np.array_equal(self.count, self.length):
      wrong = np.flatnonzero(self.count != self.length)[0]
      raise ValueError(
        f"the scoring pass counted {self.count[wrong]} tokens in trajectory "
        f"{wrong}, and the ring {self.length[wrong]}: they are out of order."
      )

  def __len__(self) -> int:
    return len(self.count)


def mismatch(stats: PoolStatistics, *, metric: str) -> np.ndarray:
  """How badly each trajectory matches the current policy; lower is better.

    variance          var_i; the second moment where T_i < 2
    second_moment     m2_i
    harmful           mean of ell^2 where A_i ell > 0
    entropy_scaled    mean of ell^2 / (H + 0.01)
    length_corrected  (m2_i / m2_pool - 1) sqrt(T_i / 2), m2_pool the token mean
                      over the pool; 0 if that is 0

  Source: method 2.1, our reconstruction of what the D-ARL paper only names.

  Args:
    stats: [n] each.
    metric: One of the above.

  Returns:
    float64 [n]; +inf, which no selection takes, for a trajectory without
    masked-in tokens or whose metric is not a number.
  """
  count = np.asarray(stats.count, np.float64)
  second_moment = np.asarray(stats.second_moment, np.float64)
  if metric == "variance":
    values = np.where(count >= 2, stats.variance, second_moment)
  elif metric == "second_moment":
    values = second_moment
  elif metric == "harmful":
    values = np.asarray(stats.harmful, np.float64)
  elif metric == "entropy_scaled":
    values = np.asarray(stats.entropy_scaled, np.float64)
  elif metric == "length_corrected":
    defined = (count > 0) & np.isfinite(second_moment)
    tokens = np.sum(count, where=defined)
    total = np.sum(count * np.where(defined, second_moment, 0.0))
    if total > 0:
      values = (second_moment * tokens / total - 1) * np.sqrt(count / 2)
    else:
      values = np.where(defined, 0.0, np.inf)
  else:
    raise ValueError(f"metric = {metric!r} is not one of method 2.1.")
  return np.where((count > 0) & np.isfinite(values), values, np.inf)


def candidates(
  ages: np.ndarray,
  config: config_lib.ReplayConfig,
  *,
  rng: np.random.Generator,
) -> np.ndarray:
  """Which trajectories of the pool are scored for a step.

  A uniform draw of ``config.max_candidates``, so that a large ring costs no
  more than that; the youngest where those are what the mode takes.

  Args:
    ages: int [n], in learner steps.
    config: The mode and its numbers.
    rng: Of the draw.

  Returns:
    int64 [at most n], ascending indices.
  """
  n = len(ages)
  most = config.max_candidates or n
  if most >= n:
    return np.arange(n)
  drawn = rng.permutation(n)
  if config.selection_mode == "newest":
    drawn = drawn[np.argsort(ages[drawn], kind="stable")]
  return np.sort(drawn[:most])


def select(
  stats: PoolStatistics,
  config: config_lib.ReplayConfig,
  *,
  batch_size: int,
  rng: np.random.Generator,
) -> np.ndarray:
  """Draws a step's trajectories from the pool.

    keep_best     the ceil(keep_fraction n) best matched
    reject_worst  a uniform draw from all but the floor(reject_fraction n) worst
    random        a uniform draw from all                          (a control)
    newest        the youngest of all                              (a control)

  n counts the trajectories that have a metric. Ties are broken by a seeded
  draw. keep_best and reject_worst take none above ``max_metric``, and no mode
  takes one without a metric or more than ``batch_size``. The controls take as
  many as reject_worst would with the same fields, whatever their metrics, so
  that they differ from it in which samples are taken and in nothing else.

  Args:
    stats: [n] each.
    config: The mode and its numbers.
    batch_size: Most trajectories to take.
    rng: For ties and draws.

  Returns:
    int64 [at most batch_size], distinct indices in order of preference; fewer
    than ``min_batch`` are the caller's to refuse.
  """
  metric = mismatch(stats, metric=config.metric)
  lot = rng.random(len(stats))
  ranked = np.lexsort((lot, metric))
  ranked = ranked[: np.count_nonzero(np.isfinite(metric))]
  eligible = ranked[: _num_eligible(config, len(ranked))]
  eligible = eligible[metric[eligible] <= config.max_metric]
  size = min(batch_size, len(eligible))
  if config.selection_mode == "keep_best":
    return eligible[:size]
  # Sorted, so that the draw does not depend on how they rank: among samples of
  # the current policy that is rounding noise, and differs between devices.
  eligible, everything = np.sort(eligible), np.sort(ranked)
  if config.selection_mode == "reject_worst":
    return rng.permutation(eligible)[:size]
  if config.selection_mode == "random":
    return rng.permutation(everything)[:size]
  youngest = np.lexsort((lot[everything], stats.age[everything]))
  return everything[youngest[:size]]


def pool_needed(config: config_lib.ReplayConfig, min_batch: int) -> int:
  """Size of the smallest pool from which ``min_batch`` can be selected.

  Provided that all have a metric, and none above ``max_metric``.
  """
  return bisect.bisect_left(
    range(sys.maxsize), min_batch, key=lambda n: _num_eligible(config, n)
  )


def _num_eligible(config: config_lib.ReplayConfig, pool: int) -> int:
  """How many of a ranked pool the mode may take, best matched first."""
  # A fraction of a whole number may miss a whole number by a rounding error.
  if config.selection_mode == "keep_best":
    return math.ceil(config.keep_fraction * pool - 1e-9)
  return pool - math.floor(config.reject_fraction * pool + 1e-9)


def report(
  stats: PoolStatistics,
  kept: np.ndarray,
  *,
  metric: str,
) -> dict[str, float]:
  """What selection did to the pool; ``watch.py`` says whether it is biased.

  Args:
    stats: [n] each.
    kept: Indices of what ``select`` took.
    metric: The one that it used.

  Returns:
    ``<part>_count`` and the means ``<part>_length``, ``_reward``,
    ``_advantage``, ``_entropy``, ``_age`` and ``_metric`` for the parts kept,
    dropped and pool; a mean over nothing is 0, beside its count of 0. The mean
    of the metric leaves out those that have none: ``pool_excluded``.
    ``kept_advantage_bias`` is the difference of kept and pool in standard
    errors of a uniform draw of k of n, without replacement:
    sqrt(var / k * (n - k) / (n - 1)).
  """
  n = len(stats)
  values = mismatch(stats, metric=metric)
  defined = np.isfinite(values)
  is_kept = np.zeros(n, bool)
  is_kept[kept] = True
  metrics = {"pool_excluded": float(n - np.count_nonzero(defined))}
  for part, chosen in (
    ("kept", is_kept),
    ("dropped", ~is_kept),
    ("pool", np.ones(n, bool)),
  ):
    metrics[f"{part}_count"] = float(np.count_nonzero(chosen))
    for name, column, where in (
      ("length", stats.length, chosen),
      ("reward", stats.reward, chosen),
      ("advantage", stats.advantage, chosen),
      ("entropy", stats.entropy, chosen),
      ("age", stats.age, chosen),
      ("metric", values, chosen & defined),
    ):
      metrics[f"{part}_{name}"] = _mean(column, where)

  advantage = np.asarray(stats.advantage, np.float64)
  k = np.count_nonzero(is_kept)
  spread = np.var(advantage) if n else 0.0
  variance = spread / max(k, 1) * (n - k) / max(n - 1, 1)
  shift = metrics["kept_advantage"] - metrics["pool_advantage"]
  # No variance: everything was kept, or all are alike. Then nothing can shift.
  bias = shift / math.sqrt(variance) if k and variance > 1e-20 else 0.0
  metrics["kept_advantage_bias"] = bias
  return metrics


def _mean(values: np.ndarray, where: np.ndarray) -> float:
  chosen = np.asarray(values, np.float64)[where]
  return float(chosen.mean()) if chosen.size else 0.0
