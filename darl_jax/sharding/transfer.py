"""The only place that moves parameters between meshes.

Learner -> host (the ring's copy) -> rollout mesh. Both directions go leaf by
leaf, so that no more than one leaf is staged beyond what is kept.
"""

import jax
import jax.numpy as jnp
import numpy as np

from darl_jax.types import Params, PolicySnapshot


def to_host(params: Params, *, version: int) -> PolicySnapshot:
  """A snapshot of device parameters as numpy arrays that nobody else owns.

  The copy is real even where the device's memory is the host's: the learner
  donates its parameters to the next step, and an alias would die with them.
  """
  return PolicySnapshot(version, jax.tree.map(_own, params))


def _own(leaf: jax.Array) -> np.ndarray:
  copy = np.array(leaf)
  copy.flags.writeable = False
  return copy


def share(params: Params, *, shardings: Params, dtype: jnp.dtype) -> Params:
  """Parameters that nobody donates, on another mesh.

  Args:
    params: Host arrays, or device arrays of any mesh.
    shardings: A sharding per leaf, of the other mesh.
    dtype: There.

  Returns:
    The same arrays where they lie right already, and copies of the others.
  """

  def on_mesh(leaf, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(leaf, jax.Array):
      if leaf.dtype == dtype and leaf.sharding.is_equivalent_to(
        sharding, leaf.ndim
      ):
        return leaf
      # What is fetched of an array stays with it on the host.
      leaf = leaf.copy()
    return _put(leaf, sharding, dtype)

  return jax.tree.map(on_mesh, params, shardings)


def to_mesh(params: Params, *, shardings: Params, dtype: jnp.dtype) -> Params:
  """Host parameters on a mesh, cast and resharded leaf by leaf.

  Args:
    params: numpy arrays.
    shardings: A sharding per leaf.
    dtype: Of the parameters on the mesh.

  Returns:
    Device arrays, none of which is an alias. The cast is on the host: what
    crosses to the device is already in ``dtype``.
  """
  return jax.tree.map(
    lambda leaf, sharding: _put(leaf, sharding, dtype), params, shardings
  )


def _put(leaf, sharding: jax.sharding.Sharding, dtype: jnp.dtype) -> jax.Array:
  return jax.device_put(np.array(leaf, dtype=dtype), sharding)
