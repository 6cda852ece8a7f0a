"""Low-rank adapters: all that is trained while the model itself is frozen.

LoRA (Hu et al. 2021, arXiv:2106.09685): a kernel W stays as it was published
and what is multiplied with it gains ``(alpha / rank) x a b``. The factors a and
b are leaves of the policy's tree of parameters, below ``adapters`` of their
layer; they alone have an optimizer state, are checkpointed and are published.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from darl_jax.config import ModelConfig
from darl_jax.models import parameters
from darl_jax.models.parameters import Parameter
from darl_jax.types import Params

_ADAPTERS = "adapters"
# Those that products cast to the compute dtype.
_KERNELS = frozenset(("query", "key", "value", "output", "gate", "up", "down"))


class Adapter(nnx.Module):
  """The two factors beside one kernel; their product starts at zero."""

  def __init__(
    self,
    kernel: Parameter,
    config: ModelConfig,
    *,
    num_inputs: int,
    rngs: nnx.Rngs,
  ):
    """Makes ``a`` [experts, inputs..., rank] and ``b`` [experts, rank,
    outputs...], without the first axis where the kernel has none.

    Args:
      kernel: [experts, inputs..., outputs...] or [inputs..., outputs...].
      config: With rank and alpha.
      num_inputs: Axes of the kernel that a product contracts.
      rngs: Of ``a``, drawn with a standard deviation of inputs^-1/2.
    """
    axes, shape = kernel.get_metadata("axes"), kernel.shape
    first = int(axes[0] == "expert")
    ends = first + num_inputs
    self.scale = config.lora_scale
    self.a = parameters.normal(
      rngs,
      (*shape[:ends], config.lora_rank),
      (*axes[:ends], "rank"),
      std=math.prod(shape[first:ends]) ** -0.5,
    )
    self.b = Parameter(
      jnp.zeros((*shape[:first], config.lora_rank, *shape[ends:])),
      axes=(*axes[:first], "rank", *axes[ends:]),
    )

  def merged(self, kernel: jax.Array) -> jax.Array:
    """The kernel that does alone what both do together, in float32."""
    return _merged(kernel, self.a[...], self.b[...], self.scale)


def adapters(
  layer: nnx.Module,
  block: str,
  config: ModelConfig,
  *,
  num_inputs: Mapping[str, int],
  rngs: nnx.Rngs,
) -> nnx.Dict:
  """Adapters for those kernels of a layer that ``lora_targets`` names.

  Args:
    layer: With its kernels as attributes.
    block: What their names begin with: "attention".
    config: With rank and targets.
    num_inputs: For each kernel, its axes that a product contracts.
    rngs: Of their first values.
  """
  return nnx.Dict(
    {
      name: Adapter(getattr(layer, name), config, num_inputs=inputs, rngs=rngs)
      for name, inputs in num_inputs.items()
      if f"{block}.{name}" in config.lora_kernels
    }
  )


def split(params: Params) -> tuple[Params, Params]:
  """What is trained, and what is frozen: adapters, and all beside them.

  Args:
    params: A policy's nested dict of anything.

  Returns:
    Two dicts; without adapters all is trained and the second is empty.
  """
  trained, frozen = _split(params)
  return (trained, frozen) if trained else (frozen, {})


def _split(params: Params) -> tuple[Params, Params]:
  trained, frozen = {}, {}
  for name, value in params.items():
    if name == _ADAPTERS:
      trained[name] = value
    elif isinstance(value, dict):
      ours, rest = _split(value)
      trained |= {name: ours} if ours else {}
      frozen |= {name: rest} if rest else {}
    else:
      frozen[name] = value
  return trained, frozen


def join(trained: Params, frozen: Params) -> Params:
  """What ``split`` took apart; layers may be stacked or a dict each."""
  if isinstance(trained, tuple):
    return tuple(map(join, trained, frozen))
  joined = dict(frozen)
  for name, value in trained.items():
    inside = joined.get(name)
    joined[name] = join(value, inside) if inside is not None else value
  return joined


def compact(frozen: Params, *, dtype: jnp.dtype) -> Params:
  """Frozen kernels in the dtype that products cast them to anyway.

  A kernel is read in no other. Norms, biases, router and embedding stay as they
  are: the first three are small or used in float32, and so is a tied
  embedding.

  Args:
    frozen: As ``split`` returns it, on devices; taken over.
    dtype: The compute dtype.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf.astype(dtype) if path[-1].key in _KERNELS else leaf,
    frozen,
  )


def merge(params: Params, config: ModelConfig) -> Params:
  """The parameters of the same model without adapters, in float32.

  Args:
    params: With adapters; left as they are.
    config: Of the model.
  """
  merged: dict[str, Any] = {}
  for name, value in params.items():
    if name != _ADAPTERS:
      merged[name] = merge(value, config) if isinstance(value, dict) else value
  for name, factors in params.get(_ADAPTERS, {}).items():
    merged[name] = _merged(
      merged[name], factors["a"], factors["b"], config.lora_scale
    )
  return merged


def _merged(kernel: Any, a: Any, b: Any, scale: float) -> jax.Array:
  """kernel + scale a b; leading axes that all three share are kept apart."""
  wide = [jnp.asarray(x, jnp.float32) for x in (kernel, a, b)]
  # What a and b have beyond the kernel's axes: rank, and what all share, twice.
  shared = a.ndim + b.ndim - 2 - kernel.ndim
  rank = a.shape[-1]
  groups = a.shape[:shared]
  product = jnp.matmul(
    wide[1].reshape(*groups, -1, rank),
    wide[2].reshape(*groups, rank, -1),
    precision=jax.lax.Precision.HIGHEST,
  )
  return wide[0] + scale * product.reshape(kernel.shape)
