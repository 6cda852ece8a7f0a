"""What the TPUs that can be compiled for can do, from public sources.

Sources, read in 2026:
  [tpu]  Cloud TPU documentation, one page per version:
         https://docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and tpu7x.
  [book] J. Austin et al., "How to Scale Your Model", part 2 and its tables:
         https://jax-ml.github.io/scaling-book/tpus
  [aot]  The limit that libtpu 0.0.42 names when a program compiled for the chip
         does not fit.
"""

import dataclasses
from collections.abc import Sequence

_GIB = 2**30
_GB = 10**9

# A message's way to the next chip takes about this long [book].
HOP_SECONDS = 1e-6


@dataclasses.dataclass(frozen=True)
class Chip:
  """One TPU version. Figures are of a device: what JAX calls one.

  A device is a chip, but for v4 and tpu7x as these are compiled for here, where
  it is one of a chip's two TensorCores, with half of what the chip has.

  Attributes:
    name: As a topology names it.
    device_kind: As ``jax.Device.device_kind`` names it.
    devices: Of a chip.
    hbm_bytes: That a program may use.
    flops_per_s: Peak, bfloat16.
    hbm_bytes_per_s: To and from HBM.
    link_bytes_per_s: Over one link to one neighbour, in one direction, of a
      chip: its devices share it.
    axes: Of the torus; a chip has two links along each.
    wraps: A slice's axis whose length is a multiple of this is a ring; others
      are lines.
    clock_hz: For the compiler's cycles; None where no public figures give it.
    pod_chips: The greatest slice.
    host_bytes: Memory of a host.
    host_chips: Chips of a host.
    host_bytes_per_s: Between a device and its host, in one direction.
  """

  name: str
  device_kind: str
  devices: int
  hbm_bytes: float
  flops_per_s: float
  hbm_bytes_per_s: float
  link_bytes_per_s: float
  axes: int
  wraps: int
  clock_hz: float | None
  pod_chips: int
  host_bytes: float
  host_chips: int
  host_bytes_per_s: float

  @property
  def ici_bytes_per_s(self) -> float:
    """Over all links of a chip, in one direction, for each of its devices."""
    return 2 * self.axes * self.link_bytes_per_s / self.devices

  def hosts(self, num_devices: int) -> int:
    """Hosts of a slice of so many devices."""
    return -(-num_devices // (self.devices * self.host_chips))

  def ring(
    self, coordinates: Sequence[Sequence[int]], slice_shape: Sequence[int]
  ) -> tuple[float, int]:
    """How fast a group's devices pass data around.

    All links of the axes that the group spans are used, which a ring along each
    of them in turn comes close to. A line has one link where a ring has two.

    Args:
      coordinates: Of each device's chip.
      slice_shape: Chips of the slice along each axis.

    Returns:
      Bytes per second that leave a device, and hops to the farthest one.
    """
    links, hops = 0, 0
    for positions, whole in zip(
      zip(*coordinates, strict=True), slice_shape, strict=True
    ):
      length = len(set(positions))
      if length == 1:
        continue
      # A ring closes only where the group goes all around.
      ring = length == whole and whole % self.wraps == 0
      links += 2 if ring else 1
      hops += length // 2 if ring else length - 1
    if not links:  # Two cores of a chip, which share its HBM.
      return self.hbm_bytes_per_s, 1
    return links * self.link_bytes_per_s / self.devices, hops

  def passing(
    self, coordinates: Sequence[Sequence[int]], slice_shape: Sequence[int]
  ) -> tuple[float, int]:
    """How fast each of a group's devices passes data to the next one.

    Args:
      coordinates: Of each device's chip, in the order of passing.
      slice_shape: Chips of the slice along each axis.

    Returns:
      Bytes per second that leave a device, and hops of the longest way. Ways of
      several hops share their links with those in between.
    """
    longest = 0
    following = [*coordinates[1:], coordinates[0]]
    for here, there in zip(coordinates, following, strict=True):
      hops = 0
      for one, other, length in zip(here, there, slice_shape, strict=True):
        distance = abs(one - other)
        if length % self.wraps == 0:
          distance = min(distance, length - distance)
        hops += distance
      longest = max(longest, hops)
    if not longest:
      return self.hbm_bytes_per_s, 1
    return self.link_bytes_per_s / longest / self.devices, longest


# v4 and v5p: 8 matrix units of 128 x 128, two operations each: the clock is the
# peak over 8 * 128 * 128 * 2. Of v5e, [book] gives it, and four such units
# agree. The figures published for v6e and tpu7x (two units of 256 x 256 per
# TensorCore) and their peaks give no plausible one.
CHIPS = {
  chip.name: chip
  for chip in (
    Chip(
      name="v4",
      device_kind="TPU v4",
      devices=2,
      hbm_bytes=15.25 * _GIB,  # [aot]; the chip has 32 GiB [tpu].
      flops_per_s=275e12 / 2,  # [tpu]
      hbm_bytes_per_s=1200 * _GB / 2,  # [tpu]
      link_bytes_per_s=45 * _GB,  # [book]
      axes=3,  # [tpu]
      wraps=4,  # [book]
      clock_hz=1.05e9,
      pod_chips=4096,  # [tpu]
      host_bytes=400 * _GB,  # [tpu]: 407 GB of a machine with 4 chips.
      host_chips=4,  # [tpu]
      host_bytes_per_s=16 * _GB / 2,  # [book]
    ),
    Chip(
      name="v5e",
      device_kind="TPU v5 lite",
      devices=1,
      hbm_bytes=15.75 * _GIB,  # [aot]; 16 GB [tpu].
      flops_per_s=197e12,  # [tpu]
      hbm_bytes_per_s=819 * _GB,  # [tpu]
      link_bytes_per_s=50 * _GB,  # [tpu]: 400 GB/s, both ways, over 4 links.
      axes=2,  # [tpu]
      wraps=16,  # [book]
      clock_hz=1.5e9,  # [book]
      pod_chips=256,  # [tpu]
      host_bytes=192 * _GB,  # [tpu]: of a machine with 4 chips.
      host_chips=4,  # [tpu]
      host_bytes_per_s=15 * _GB,  # [book]
    ),
    Chip(
      name="v5p",
      device_kind="TPU v5",
      devices=1,
      hbm_bytes=95.74 * _GIB,  # [aot]; 95 GiB [tpu].
      flops_per_s=459e12,  # [tpu]
      hbm_bytes_per_s=2765 * _GB,  # [tpu]
      link_bytes_per_s=100 * _GB,  # [tpu]: 1200 GB/s, both ways, over 6 links.
      axes=3,  # [tpu]
      wraps=4,  # [book]
      clock_hz=1.75e9,
      pod_chips=8960,  # [tpu]
      host_bytes=448 * _GB,  # [tpu]
      host_chips=4,  # [tpu]
      host_bytes_per_s=15 * _GB,  # [book]
    ),
    Chip(
      name="v6e",
      device_kind="TPU v6 lite",
      devices=1,
      hbm_bytes=31.25 * _GIB,  # [aot]; 32 GB [tpu].
      flops_per_s=918e12,  # [tpu]
      hbm_bytes_per_s=1638 * _GB,  # [tpu]
      link_bytes_per_s=100 * _GB,  # [tpu]: 800 GB/s, both ways, over 4 links.
      axes=2,  # [tpu]
      wraps=16,  # [book]
      clock_hz=None,
      pod_chips=256,  # [tpu]
      host_bytes=720 * _GB,  # [tpu]: of a machine with 4 chips.
      host_chips=4,  # [tpu]
      host_bytes_per_s=32 * _GB,  # [book]
    ),
    Chip(
      name="tpu7x",
      device_kind="TPU7x",
      devices=2,
      hbm_bytes=94.75 * _GIB,  # [aot]; the chip has 192 GiB [tpu].
      flops_per_s=2307e12 / 2,  # [tpu]
      hbm_bytes_per_s=7380 * _GB / 2,  # [tpu]
      link_bytes_per_s=100 * _GB,  # [tpu]: 1200 GB/s, both ways, over 6 links.
      axes=3,  # [tpu]
      wraps=4,  # As v5p: cubes of 4 x 4 x 4 [tpu].
      clock_hz=None,
      pod_chips=9216,  # [tpu]
      host_bytes=960 * _GB,  # [tpu]
      host_chips=4,  # [tpu]
      host_bytes_per_s=32 * _GB / 2,  # Not published: as v6e.
    ),
  )
}


def of_device(device_kind: str) -> Chip:
  """The chip of ``jax.Device.device_kind``.

  Raises:
    KeyError: It is none of these.
  """
  return {chip.device_kind: chip for chip in CHIPS.values()}[device_kind]


def slice_shape(topology: str) -> tuple[int, ...]:
  """Chips along each axis: (4, 4, 4) of ``v5p:4x4x4``."""
  return tuple(int(size) for size in topology.split(":")[1].split("x"))
