"""`layout = "auto"`, and "auto" as `layout.remat` or `layout.head`: the planner's choice for given
devices."""

import dataclasses
import os
from typing import Any

from jaxscale.config import Config
from jaxscale.config.layout import LAST, Layout
from jaxscale.config.schedule_spec import AUTO
from jaxscale.formatting import gigabytes
from jaxscale.hardware import Chip, find_chip
from jaxscale.pipeline_schedules.shipped import find_schedule
from jaxscale.planner.cost.cluster import Cluster, Tier, make_cluster
from jaxscale.planner.report.why_not import nothing_fits
from jaxscale.planner.search.plan import Plan, predict_plan
from jaxscale.planner.search.search import search_layouts
from jaxscale.planner.search.space import CPU, Query, back_end_of, fraction_here


def choose_layout(config: Config, device_kind: str, platform: str, num_devices: int) -> Plan:
    """The fastest layout; settings of the config that are not at their defaults are kept.

    Raises:
      ValueError: the devices are not in `hardware.csv`, or no layout fits.
    """
    cluster = devices_here(device_kind, platform, num_devices)
    query = Query(config, cluster, pins_of(config.layout), memory_here(cluster))
    found = search_layouts(query, 1)
    if not found.layouts:
        raise ValueError(f"layout = 'auto': {nothing_fits(query, found)}")
    return predict_plan(query, found.layouts[0])


def memory_here(cluster: Cluster) -> float:
    """Bytes that a plan may use of each local device."""
    return cluster.memory_bytes * fraction_here(back_end_of(cluster))


def choose_settings(
    config: Config, cluster: Cluster, memory_bytes: float = 0.0
) -> tuple[Config, str]:
    """The config with the remat policy, the ranks of the head, or both, of the fastest step that
    fits, and a line that reports them. Where no step fits the policy is "full", which needs least
    memory; the refusal of the step follows.

    Args:
      config: the sizes of its layout resolved.
      memory_bytes: that a plan may use of each device; 0 is that of the hardware.

    Raises:
      ValueError: there are no formulas for the model.
    """
    layout = config.layout
    names = [field.name for field in dataclasses.fields(Layout)]
    pins = {name: getattr(layout, name) for name in names if name not in layout.undecided}
    if not layout.virtual_stages:
        schedule = find_schedule(layout.schedule_spec.name)
        pins["virtual_stages"] = min(schedule.searched_virtual_stages)
    query = Query(config, cluster, pins, memory_bytes)
    chosen = {name: {"remat": "full", "head": LAST}[name] for name in layout.undecided}
    said = f"since no {'policy' if 'remat' in chosen else 'step'} is predicted to fit"
    found = search_layouts(query, 1)
    if found.layouts:
        plan = predict_plan(query, found.layouts[0])
        needs, limit = gigabytes(plan.memory_bytes), gigabytes(plan.limit_bytes)
        chosen = {name: getattr(plan.layout, name) for name in chosen}
        said = f"predicted {needs} of {limit} a device"
    elif found.smallest is None:  # refused for other reasons than memory
        said = f"since nothing is predicted of this layout ({next(iter(found.rejected))})"
    lines = [f"layout.{name} = 'auto' chose {value}" for name, value in chosen.items()]
    config = dataclasses.replace(config, layout=dataclasses.replace(layout, **chosen))
    return config, f"{', '.join(lines)}, {said}"


def pins_of(layout: Layout) -> dict[str, Any]:
    """The settings of a layout that are not at their defaults."""
    return {
        field.name: getattr(layout, field.name)
        for field in dataclasses.fields(Layout)
        if getattr(layout, field.name) not in (field.default, -1, AUTO)
    }


def devices_here(device_kind: str, platform: str, num_devices: int) -> Cluster:
    """The cluster of the devices that JAX sees.

    Raises:
      ValueError: `hardware.csv` has no such device.
    """
    if platform == "cpu":
        return _cpu_cluster(num_devices)
    chip = find_chip(device_kind)
    if chip is None:
        raise ValueError(
            f"'auto' is the planner's choice, and hardware.csv has no device {device_kind!r}; set "
            "the layout and its remat; `python -m jaxscale.plan --hardware FILE` finds them for a "
            "file that describes the device"
        )
    return make_cluster(chip.name, num_devices)


def _cpu_cluster(num_devices: int) -> Cluster:
    """Virtual devices on this machine's CPU. The figures are rough, for a server core: only their
    ratios matter, since all layouts run on the same machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_devices
    chip = Chip(
        name=CPU,
        vendor="",
        year=0,
        device_kinds=("cpu",),
        generation="cpu",
        bf16_flops_per_second=50e9,
        fp8_flops_per_second=50e9,  # emulated
        memory_bytes=memory,
        memory_bytes_per_second=5e9,
        confidence="memory",
        notes="",
        host_bytes_per_second=5e9,
        node_devices=num_devices,
        node_bytes_per_second=2e9,
        node_latency_seconds=50e-6,
        network_bytes_per_second=1e9,
        network_latency_seconds=100e-6,
    )
    tiers = Tier("node", num_devices, 2e9, 50e-6), Tier("network", float("inf"), 1e9, 100e-6)
    return Cluster(chip, num_devices, tiers)
