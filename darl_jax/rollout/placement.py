"""A policy's parameters on the rollout mesh, as the sampler wants them."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from darl_jax.models import lora
from darl_jax.models.transformer import Policy
from darl_jax.sharding import rules, transfer
from darl_jax.types import Params, PolicySnapshot


def unstacked_on(mesh: Mesh) -> bool:
  """Whether parameters and cache are kept layer by layer there.

  Out of a stacked array, XLA for CPUs copies a layer's part each time that it
  multiplies with it; for accelerators it does not, and a scan over layers
  compiles in the time of one.
  """
  return mesh.devices.flat[0].platform == "cpu"


class Placement:
  """Moves snapshots to the rollout mesh; keeps there what never changes.

  Attributes:
    shardings: Of all parameters, of which those of layers are stacked.
  """

  def __init__(self, policy: Policy, *, mesh: Mesh, dtype: jnp.dtype):
    """Places nothing yet.

    Args:
      policy: The model.
      mesh: The rollout mesh.
      dtype: Of the parameters there.
    """
    self._policy = policy
    self._dtype = dtype
    self._apart = unstacked_on(mesh)
    self._shapes = jax.eval_shape(policy.init, jax.random.key(0))
    self.shardings = rules.param_shardings(
      policy.logical_axes, self._shapes, mesh=mesh, rules=rules.ROLLOUT_RULES
    )
    if self._apart:
      self._shapes = jax.eval_shape(policy.unstacked, self._shapes)
    self._trained_shardings, self._frozen_shardings = (
      policy.unstacked_shardings(part) if self._apart else part
      for part in lora.split(self.shardings)
    )
    self._frozen: Params = {}

  def keep(self, frozen: Params) -> None:
    """Places the parameters that are not trained, once for all snapshots.

    Args:
      frozen: Device arrays, as ``lora.split`` returns them; maybe none.
    """
    if self._apart and frozen:
      frozen = self._policy.unstacked(frozen)
    self._frozen = transfer.share(
      frozen, shardings=self._frozen_shardings, dtype=self._dtype
    )

  def adopt(self, params: Params, *, version: int) -> PolicySnapshot:
    """All parameters, where they lie as ``shardings`` says and nobody donates
    them."""
    shardings = lora.join(self._trained_shardings, self._frozen_shardings)
    if self._apart:
      params = self._policy.unstacked(params)
    return PolicySnapshot(
      version,
      transfer.share(params, shardings=shardings, dtype=self._dtype),
    )

  def place(self, snapshot: PolicySnapshot) -> PolicySnapshot:
    """All parameters on the mesh: these, and those that are kept.

    Args:
      snapshot: The trained ones, on the host.
    """
    params = snapshot.params
    if self._apart:
      params = self._policy.unstacked(params)
    params = transfer.to_mesh(
      params, shardings=self._trained_shardings, dtype=self._dtype
    )
    return PolicySnapshot(snapshot.version, lora.join(params, self._frozen))

  def abstract(self) -> Params:
    """Shapes and shardings of all parameters."""
    return jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(
        leaf.shape, self._dtype, sharding=sharding
      ),
      self._shapes,
      lora.join(self._trained_shardings, self._frozen_shardings),
    )
