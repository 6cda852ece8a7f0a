"""TPU topologies to compile for, with no TPU attached.

libtpu, the library that drives a TPU, contains the compiler; asked for the
description of a topology it compiles for chips that are elsewhere.
"""

import math
import os
import re

import jax
from jax.experimental import topologies

from darl_jax.config import ConfigError
from darl_jax.planner import chips

# Read by libtpu when it loads: do not look for chips or for a metadata server,
# and share the machine with other processes that only compile.
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-16",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# No axis of 0: libtpu divides by it, and takes the process with it.
_PATTERN = re.compile(
  rf"({'|'.join(chips.CHIPS)}):[1-9]\d*x[1-9]\d*(x[1-9]\d*)?"
)


def devices(topology: str) -> list[jax.Device]:
  """The chips of a named topology, such as ``v5p:4x4x4`` or ``v6e:16x16``.

  They can be put in a mesh and compiled for, and nothing can run on them.

  Raises:
    ConfigError: The name is not of that form or not of a topology that exists,
      it is larger than a pod, or libtpu is not installed.
  """
  if problems := name_problems(topology):
    raise ConfigError(problems)
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  try:
    description = topologies.get_topology_desc(
      platform="tpu", topology_name=topology
    )
  except Exception as error:  # Whatever libtpu and its loader raise.
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise ConfigError(
      [
        f"topology = {topology!r} cannot be compiled for: {said}. Each "
        "axis is a multiple of what a host has (2x2, or 2x2x1); the compiler "
        "comes with: pip install 'darl_jax[tpu]'."
      ]
    ) from error
  return list(description.devices)


def name_problems(topology: str) -> list[str]:
  """What is wrong with the name; libtpu compiles for slices that do not exist.

  An empty list where nothing is, and only ``devices`` can tell.
  """
  if not _PATTERN.fullmatch(topology):
    return [
      f"topology = {topology!r} is not CHIP:AxB or CHIP:AxBxC with CHIP one "
      f"of {', '.join(chips.CHIPS)}. Try v5p:4x4x4 or v5e:4x4."
    ]
  name = topology.split(":")[0]
  chip, shape = chips.CHIPS[name], chips.slice_shape(topology)
  if len(shape) != chip.axes:
    return [
      f"topology = {topology!r} has {len(shape)} axes, where {name} has "
      f"{chip.axes}. Try {name}:{'x'.join(['4'] * chip.axes)}."
    ]
  if math.prod(shape) > chip.pod_chips:
    return [
      f"topology = {topology!r} has {math.prod(shape)} chips, more than the "
      f"{chip.pod_chips} of a whole pod."
    ]
  return []
