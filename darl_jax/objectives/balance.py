"""The balance heuristic over the ring's snapshots.

Small and on the host: numpy, float64.
"""

import numpy as np

from darl_jax import numerics


def balance_weights(
  proximal: np.ndarray,
  behavior: np.ndarray,
  proportions: np.ndarray,
  *,
  cap: float,
  biased_lengths: np.ndarray | None = None,
) -> np.ndarray:
  """Each trajectory's weight as a sample of the mixture of all snapshots.

    w_i = min(prox(y_i) / sum_k c_k mu_k(y_i), cap)

  It stands in for prox/mu in a decoupled trust region: the ratio pi/prox is not
  in it. Its logarithm is clamped to [-20, 20]. Source: Veach and Guibas (1995);
  its use here is ours.

  Args:
    proximal: [n], nats, log-prob of each whole trajectory under prox.
    behavior: [K, n], nats, under every stored snapshot.
    proportions: [K], c_k, share of each slot's trajectories in the ring before
      selection; at least 0, of sum 1.
    cap: At least 1; inf for none.
    biased_lengths: int [n], T_i: every log-prob is divided by it, which keeps
      the weights of long trajectories moderate and biases the estimate; None
      for the exact ones.

  Returns:
    float64 [n], in [0, cap].

  Raises:
    ValueError: Shapes or proportions do not fit, or the cap is below 1.
  """
  n, k = len(proximal), len(proportions)
  if proximal.shape != (n,) or behavior.shape != (k, n):
    raise ValueError(
      f"proximal {proximal.shape}, behavior {behavior.shape} and proportions "
      f"{proportions.shape} must be [n], [K, n] and [K]."
    )
  if np.any(proportions < 0) or abs(proportions.sum() - 1) > 1e-6:
    raise ValueError(f"proportions {proportions} are not shares of 1.")
  if not cap >= 1:
    raise ValueError(f"cap = {cap} must be at least 1.")
  logs = (behavior - proximal).astype(np.float64)
  if biased_lengths is not None:
    logs = logs / np.maximum(biased_lengths, 1)
  used = proportions > 0
  logs = logs[used] + np.log(proportions[used])[:, None]
  greatest = logs.max(axis=0)
  mixture = greatest + np.log(np.sum(np.exp(logs - greatest), axis=0))
  bound = numerics.MAX_LOG_RATIO
  return np.exp(np.minimum(np.clip(-mixture, -bound, bound), np.log(cap)))
