"""Whether a published policy is at least as good as it was (MIPU, method 5).

Sampler and learner disagree by their precision and their kernels, so that
mu_{k+1}, which samples, is not pi_{k+1}, which was trained. Step 1 of MIPU is
the decoupled trust region with the policy at the start of the step as its
centre; this is step 2. Small and on the host: numpy, float64.
"""

import dataclasses

import numpy as np

from darl_jax import numerics


@dataclasses.dataclass(frozen=True)
class InferenceGap:
  """An estimate of J(mu_{k+1}) - J(pi_{k+1}), in units of advantage.

  Attributes:
    mean: T_post; 0 without an answer.
    standard_error: 0 with fewer than two answers.
    count: Answers.
  """

  mean: float
  standard_error: float
  count: int


def inference_gap(
  advantages: np.ndarray, log_ratios: np.ndarray, *, cap: float
) -> InferenceGap:
  """T_post from held-out answers of the sampler.

    T_post = mean_y A(y) (1 - min(pi_{k+1}(y) / mu_{k+1}(y), cap))

  over answers y of mu_{k+1}.

  Source: arXiv:2606.29526; the estimator is ours (method 5).

  Args:
    advantages: [n], of answers that mu_{k+1} sampled.
    log_ratios: [n], nats, log pi_{k+1} - log mu_{k+1} of whole answers; clamped
      to [-20, 20].
    cap: Of the ratio, at least 1; inf for none.

  Raises:
    ValueError: Shapes differ, or a value is NaN.
  """
  if advantages.ndim != 1 or advantages.shape != log_ratios.shape:
    raise ValueError(
      f"advantages {advantages.shape} and log_ratios {log_ratios.shape} must "
      "both be [n]."
    )
  if np.any(np.isnan(advantages)) or np.any(np.isnan(log_ratios)):
    raise ValueError("an advantage or a log-ratio is NaN.")
  bound = numerics.MAX_LOG_RATIO
  ratio = np.exp(np.clip(log_ratios.astype(np.float64), -bound, bound))
  terms = advantages.astype(np.float64) * (1 - np.minimum(ratio, cap))
  n = len(terms)
  if not n:
    return InferenceGap(0.0, 0.0, 0)
  error = float(np.std(terms, ddof=1) / np.sqrt(n)) if n > 1 else 0.0
  return InferenceGap(float(np.mean(terms)), error, n)


def accepts(gap: InferenceGap, *, tolerance: float) -> bool:
  """Whether the step stands: T_post >= -c.

  Otherwise parameters and optimizer go back to the previous snapshot.

  Args:
    gap: Of the policy just published.
    tolerance: c, at least 0, from ``tolerance``.
  """
  return gap.mean >= -tolerance


def tolerance(step: int, *, first: float, last: float, steps: int) -> float:
  """c of a learner step: linear from ``first`` to ``last`` over ``steps``."""
  return first + (last - first) * min(step / max(steps, 1), 1.0)
