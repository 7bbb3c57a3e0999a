"""Clusters: devices of one type, and the links between them from nearest to farthest."""

import math
import pathlib
from dataclasses import dataclass, replace
from typing import Any

from jaxscale.choices import divisors, nearest
from jaxscale.hardware import Chip, chips, read_chips


@dataclass(frozen=True)
class Tier:
    """A domain of devices that are connected by one kind of link."""

    name: str
    devices: float  # of the domain; inf for the outermost
    bytes_per_second: float  # per device, as large collectives achieve
    latency_seconds: float  # per step of a collective
    mesh: bool = False  # links between pairs of devices: in a group of n each has n - 1


@dataclass(frozen=True)
class Cluster:
    """Devices and the tiers of links between them. Consecutive devices share the nearest tier."""

    chip: Chip
    num_devices: int
    tiers: tuple[Tier, ...]  # nearest first; the last one contains all devices
    torus: tuple[int, ...] = ()  # devices along each axis of a pod slice
    usd_per_hour: float = 0.0

    @property
    def name(self) -> str:
        """Name of the device."""
        return self.chip.name

    @property
    def memory_bytes(self) -> float:
        """Memory of one device."""
        return self.chip.memory_bytes

    def peak_flops(self, matmul: str = "bfloat16") -> float:
        """Peak matmul FLOP/s of one device, for operands "bfloat16", "fp8" or "fp4".

        Raises:
          ValueError: the device has no matmuls of such operands.
        """
        peaks = {
            "bfloat16": self.chip.bf16_flops_per_second,
            "fp8": self.chip.fp8_flops_per_second,
            "fp4": self.chip.fp4_flops_per_second,
        }
        if not peaks.get(matmul):
            known = ", ".join(name for name, peak in peaks.items() if peak)
            raise ValueError(f"{self.name} has no matmuls of {matmul!r} operands; it has {known}")
        return peaks[matmul]

    @property
    def wraps(self) -> tuple[bool, ...]:
        """For each side of a slice, whether its ends are joined, so that it has two directions.

        On a torus of three axes optical switches join the faces of cubes (arXiv 2208.10041): all
        sides wrap where each is a multiple of the cube's; otherwise no side does, as in 2 x 2 x 4.
        The wires of two axes are fixed: a side wraps where it is as long as the pod, as the longer
        one of 8 x 16 does on v5e (jax-ml.github.io/scaling-book/tpus, "TPU Networking"). On a side
        of 2 the second direction would be the same link.
        """
        pairs = list(zip(self.torus, sorted(self.chip.wrap_shape), strict=True))
        whole = tuple(side % least == 0 and side > 2 for side, least in pairs)
        if self.chip.torus_axes == 3:
            return (all(whole),) * len(whole)
        return whole

    @property
    def node_devices(self) -> int:
        """Devices of the largest domain below the network: a node, a rack or a pod slice."""
        if self.torus:
            return math.prod(self.torus)
        return int(min(self.tiers[-2].devices if len(self.tiers) > 1 else 1, self.num_devices))


BUS_OVER_NOMINAL = 0.78
"""Share of a link's nominal bandwidth that collectives achieve, where there is no measurement: 235
of 300 GB/s on A100, 365 of 450 on H100, 682 of 900 on B200 (ring algorithms in nccl-tests,
collected in ml-engineering)."""

NETWORK_OVER_NOMINAL = 0.9
"""The same between nodes: 4 A100 nodes achieve 94 of 100 GB/s for messages above 16 MiB
(ml-engineering); Calculon's fit to Selene has 0.9."""


def make_cluster(name: str, num_devices: int, **overrides: Any) -> Cluster:
    """A cluster of `num_devices` equal devices.

    Args:
      name: as in `hardware.csv`, in any case; or a file of the same columns, CSV or JSON (one
        object), that describes one device. "H100" finds the first of its variants, "v5p" finds
        "TPUv5p".
      overrides: fields of `hardware.Chip`, such as `network_bytes_per_second=25e9`; `torus=(8, 8)`
        for a pod slice, its sides in any order.

    Raises:
      ValueError: an unknown device (the nearest is named) or field, a slice that does not fit, or
        links that this many devices need and whose rate is not known.
    """
    if num_devices < 1:
        raise ValueError(f"{num_devices} devices; a cluster has at least 1")
    torus = overrides.pop("torus", None)
    price = overrides.pop("usd_per_hour", None)
    chip = find_device(name)
    unknown = set(overrides) - set(Chip.__dataclass_fields__)
    if unknown:
        raise ValueError(
            f"{sorted(unknown)[0]!r} cannot be overridden; it can be torus, or one "
            f"of {', '.join(Chip.__dataclass_fields__)}"
        )
    chip = replace(chip, **overrides)
    slice_shape = _torus(chip, num_devices, torus)
    return Cluster(
        chip=chip,
        num_devices=num_devices,
        tiers=_tiers(chip, slice_shape, num_devices),
        torus=slice_shape,
        usd_per_hour=chip.usd_per_hour if price is None else price,
    )


def find_device(name: str) -> Chip:
    """The device of a name or of a user's file.

    Raises:
      ValueError: an unknown name, or a file that does not describe one device.
    """
    path = pathlib.Path(name)
    if path.suffix in (".csv", ".json"):
        found = read_chips(path)
        if len(found) != 1:
            raise ValueError(f"{path} describes {len(found)} devices; it must describe one")
        return found[0]
    known = {chip.name.lower(): chip for chip in reversed(chips())}
    short = {}
    for chip in reversed(chips()):
        plain = chip.name.lower().removeprefix("tpu")
        short |= {plain: chip, plain.split("-")[0]: chip}
    short |= known
    if name.lower() in short:
        return short[name.lower()]
    near = [short[one].name for one in nearest(name.lower(), short, cutoff=0.4)]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    names = ", ".join(chip.name for chip in chips())
    raise ValueError(
        f"device {name!r} is not known; it can be {names}, or a file that describes a device, "
        f"such as device.csv{hint}"
    )


def _torus(chip: Chip, num_devices: int, torus: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of a pod slice: of whole cubes if it can be, and as close to one as possible."""
    if not chip.torus_axes:
        if torus:
            raise ValueError(f"{chip.name} devices are not on a torus; leave out torus = {torus}")
        return ()
    largest = math.prod(chip.pod_shape)
    if torus:
        if num_devices % math.prod(torus):
            raise ValueError(
                f"{num_devices} devices are not a whole number of slices {torus} of "
                f"{math.prod(torus)} devices"
            )
        return tuple(sorted(torus))
    slices = next(n for n in divisors(num_devices) if num_devices // n <= largest)
    devices = num_devices // slices
    if slices > 1 and 2 * devices <= largest:
        pods = round(num_devices / largest)
        raise ValueError(
            f"{num_devices} {chip.name} devices do not divide into slices of more than half a pod "
            f"of {largest}; give another number, such as {pods * largest}"
        )
    cubes = devices % math.prod(chip.wrap_shape) == 0
    sides = list(chip.wrap_shape) if cubes else [1] * chip.torus_axes
    for factor in sorted(_primes(devices // math.prod(sides)), reverse=True):
        sides[sides.index(min(sides))] *= factor
    return tuple(sorted(sides))


def _primes(number: int) -> list[int]:
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def _tiers(chip: Chip, torus: tuple[int, ...], num_devices: int) -> tuple[Tier, ...]:
    tiers = []
    if chip.package_devices > 1:
        tiers.append(
            Tier(
                "package",
                chip.package_devices,
                chip.package_bytes_per_second,
                chip.node_latency_seconds,
            )
        )
    if torus:
        rate = chip.torus_bytes_per_second
        tiers.append(Tier("torus", math.prod(torus), rate, chip.node_latency_seconds))
    elif chip.node_devices > 1:
        bus = chip.node_bus_bytes_per_second or BUS_OVER_NOMINAL * chip.node_bytes_per_second
        tiers.append(
            Tier("node", chip.node_devices, bus, chip.node_latency_seconds, chip.node_mesh)
        )
    rate = NETWORK_OVER_NOMINAL * chip.network_bytes_per_second
    tiers.append(Tier("network", math.inf, rate, chip.network_latency_seconds))
    nearer = (1, *(tier.devices for tier in tiers))
    return tuple(_known(chip, *pair, num_devices) for pair in zip(tiers, nearer, strict=False))


def _known(chip: Chip, tier: Tier, nearer: float, num_devices: int) -> Tier:
    """The tier, if its rate is known or nothing crosses it: all devices are in the nearer one."""
    if tier.bytes_per_second > 0:
        return tier
    if num_devices <= nearer:
        return replace(tier, bytes_per_second=math.inf)
    raise ValueError(
        f"{chip.name} has no rate of the links of a {tier.name}, which {num_devices} devices need; "
        f"give {tier.name}_gb_per_second in the file of the device"
    )
