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
  """Device parameters that nobody donates, for another mesh.

  Args:
    params: On any mesh.
    shardings: A sharding per leaf, of the other mesh.
    dtype: There.

  Returns:
    The same arrays where they lie right already, and copies of the others.
  """

  def on_mesh(leaf: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    if leaf.dtype == dtype and leaf.sharding.is_equivalent_to(
      sharding, leaf.ndim
    ):
      return leaf
    return jax.device_put(np.array(leaf, dtype=dtype), sharding)

  return jax.tree.map(on_mesh, params, shardings)


def to_mesh(
  snapshot: PolicySnapshot, *, shardings: Params, dtype: jnp.dtype
) -> PolicySnapshot:
  """A host snapshot on a mesh, cast and resharded leaf by leaf.

  Args:
    snapshot: With numpy leaves.
    shardings: A sharding per leaf.
    dtype: Of the parameters on the mesh.

  Returns:
    The snapshot with device arrays. The cast is on the host: what crosses to
    the device is already in ``dtype``.
  """
  return PolicySnapshot(
    snapshot.version,
    jax.tree.map(
      lambda leaf, sharding: jax.device_put(
        np.array(leaf, dtype=dtype), sharding
      ),
      snapshot.params,
      shardings,
    ),
  )
