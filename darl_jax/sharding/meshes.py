"""Splits the devices into a train mesh and a rollout mesh."""

import ctypes
import dataclasses
import os
import platform
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from darl_jax.config import ConfigError, MeshConfig

# mallopt(3): M_MMAP_THRESHOLD and M_TOP_PAD in bytes, and M_TRIM_THRESHOLD
# (never).
_KEEP_FREED_MEMORY = ((-3, 2**30), (-2, 2**26), (-1, -1))

# Seconds that XLA lets some devices of one program wait for the others before
# it ends the process. Its own 40 are less than a laptop's sleep.
_MEET_WITHIN_S = 1800

TRAIN_AXES = ("data", "fsdp", "tensor")
ROLLOUT_AXES = ("data", "tensor")


@dataclasses.dataclass(frozen=True)
class Meshes:
  """Where the learner and the sampler run.

  Attributes:
    train: Axes data, fsdp, tensor.
    rollout: Axes data, tensor; shares the device when there is only one.
    unused: Devices of neither.
  """

  train: Mesh
  rollout: Mesh
  unused: int

  @property
  def shared(self) -> bool:
    return bool(set(self.train.devices.flat) & set(self.rollout.devices.flat))


def prepare_cpu(num_devices: int) -> None:
  """Sets up the host for runs without an accelerator; call it first of all.

  Makes virtual CPU devices (an attached accelerator comes first all the same),
  and has the C library keep the memory that XLA's temporaries free: returning
  it to the system and faulting it in again takes a third of a small learner
  step. Does nothing to the memory where the C library is not glibc. For the
  same reason a program of one device runs in the thread that calls it, not in
  one of XLA's: but for the main thread, glibc maps anew what is larger than 64
  MiB, whatever it is told.

  Virtual devices that wait for each other do so through a pause of the machine.

  Raises:
    RuntimeError: JAX has started.
  """
  jax.config.update("jax_num_cpu_devices", num_devices)
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  # First, so that flags which are set already have the last word.
  os.environ["XLA_FLAGS"] = " ".join(
    (
      f"--xla_cpu_collective_call_terminate_timeout_seconds={_MEET_WITHIN_S}",
      os.environ.get("XLA_FLAGS", ""),
    )
  ).strip()
  if platform.libc_ver()[0] == "glibc":
    libc = ctypes.CDLL(None)
    for option, value in _KEEP_FREED_MEMORY:
      libc.mallopt(option, value)


def split_devices(
  config: MeshConfig, devices: Sequence[jax.Device] | None = None
) -> Meshes:
  """The first devices train, the next ones sample.

  Disjoint when there are two devices or more; with one, both meshes are that
  device.

  Args:
    config: Sizes of both meshes.
    devices: All attached ones by default.

  Raises:
    ConfigError: There are too few devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  train, rollout = config.train, config.rollout
  shared = len(devices) == 1
  needed = (
    max(train.size, rollout.size) if shared else train.size + rollout.size
  )
  if needed > len(devices):
    raise ConfigError(
      [
        f"mesh.train (data={train.data} x fsdp={train.fsdp} x "
        f"tensor={train.tensor}) and mesh.rollout (data={rollout.data} x "
        f"tensor={rollout.tensor}) need {train.size} + {rollout.size} = "
        f"{train.size + rollout.size} devices, but {len(devices)} are "
        # One device each: the only sizes that fit any model and any number.
        "attached. Try mesh.train.data=1, mesh.train.fsdp=1, "
        "mesh.train.tensor=1, mesh.rollout.data=1, mesh.rollout.tensor=1."
      ]
    )
  start = 0 if shared else train.size
  train_devices = np.array(devices[: train.size]).reshape(
    train.data, train.fsdp, train.tensor
  )
  rollout_devices = np.array(devices[start : start + rollout.size]).reshape(
    rollout.data, rollout.tensor
  )
  return Meshes(
    train=Mesh(train_devices, TRAIN_AXES),
    rollout=Mesh(rollout_devices, ROLLOUT_AXES),
    unused=len(devices) - needed,
  )
