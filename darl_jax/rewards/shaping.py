"""What is added to verified rewards before they become advantages."""

import functools
from collections.abc import Callable

import numpy as np

from darl_jax.config import RewardsConfig
from darl_jax.objectives import overlong


def of_lengths(
  config: RewardsConfig, *, max_response_tokens: int
) -> Callable[[np.ndarray], np.ndarray] | None:
  """What an answer's reward gains by its length.

  Args:
    config: ``overlong_penalty`` and ``overlong_buffer_tokens``.
    max_response_tokens: L, of the run's rollouts.

  Returns:
    A function of the sampled tokens, int [n], to float64 [n], in
    [-overlong_penalty, 0]; None where nothing is added.
  """
  if not config.overlong_penalty:
    return None
  return functools.partial(
    _penalty, config=config, max_response_tokens=max_response_tokens
  )


def _penalty(
  lengths: np.ndarray, *, config: RewardsConfig, max_response_tokens: int
) -> np.ndarray:
  return config.overlong_penalty * overlong.overlong_penalty(
    lengths,
    max_tokens=max_response_tokens,
    buffer_tokens=config.overlong_buffer_tokens,
  )
