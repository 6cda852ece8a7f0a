"""Parameters that name the logical axes of their shape."""

import jax
import jax.numpy as jnp
from flax import nnx


class Parameter(nnx.Param):
  """Made with ``axes``: a name per dimension, as ``sharding/rules.py`` maps."""


def normal(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  axes: tuple[str, ...],
  *,
  std: float,
) -> Parameter:
  """float32, normal with standard deviation ``std``."""
  value = jax.random.normal(rngs.params(), shape, jnp.float32)
  return Parameter(value * std, axes=axes)
