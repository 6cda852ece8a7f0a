"""Soft punishment of answers near the longest allowed (DAPO).

Small and on the host: numpy.
"""

import numpy as np


def overlong_penalty(
  lengths: np.ndarray, *, max_tokens: int, buffer_tokens: int
) -> np.ndarray:
  """What is added to the reward of a long answer.

    0                                   for T <= L - b
    ((L - b) - T) / b, from 0 to -1     for L - b < T <= L
    -1                                  for T > L

  Source: arXiv:2503.14476.

  Args:
    lengths: int [n], T, sampled tokens.
    max_tokens: L, the longest response.
    buffer_tokens: b, tokens before L in which the penalty grows; 0 for none.

  Returns:
    float64 [n], in [-1, 0].

  Raises:
    ValueError: The buffer is longer than a response, or negative.
  """
  if not 0 <= buffer_tokens <= max_tokens:
    raise ValueError(
      f"buffer_tokens = {buffer_tokens} must be in [0, {max_tokens}]."
    )
  over = lengths - (max_tokens - buffer_tokens)
  return -np.clip(over / max(buffer_tokens, 1), 0.0, 1.0)
