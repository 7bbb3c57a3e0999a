"""Seconds of a collective by a latency-bandwidth model, in closed form over arrays of layouts.

A group of ranks spans levels: members in one package, in one node, and so on outwards. A large
collective runs on all levels at once, as NCCL's rings and the dimension-wise algorithms of a torus
do: the slowest level sets its bandwidth, and the latencies add up.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxscale.config.layout import MESH_AXES
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.model.parallelism import Parallelism

Floats = Any  # a float, or float [N]

TREE_BANDWIDTH = 0.67
"""Bandwidth of a tree all-reduce over a ring's: all-reduces of 16 MB over 8 A100 take 294 us, of 1
MB 79 us (Galvatron's profile); a ring at 12 us per step gives 295 and 176, the tree 289 and 85."""

START_SECONDS = 8e-6
"""Start-up time of a collective's kernel (NCCL's tuning table: 8.4 us for a ring of large
messages)."""

LINE = 0.5
"""Share of a torus axis' bandwidth without a wrap-around link: one direction of two."""


@dataclass(frozen=True)
class Level:
    """One level of a group: members connected by one kind of link; floats or float [N]."""

    members: Floats
    sent: Floats  # share of an all-gather that crosses it, of what the next nearer level gathers
    bytes_per_second: Floats  # per member
    exchange_rate: Floats  # the same of an all-to-all; less on a torus, see `_torus_levels`
    ring_seconds: Floats  # latency of passing through all members in a ring
    tree_seconds: Floats  # latency of descending a tree


Levels = tuple[Level, ...]  # nearest first


def axis_levels(cluster: Cluster, parallelism: Parallelism) -> dict[str, Levels]:
    """The levels of each mesh axis' groups; consecutive devices are in the same tensor group.

    "zero" is for the ranks that a ZeRO stage shards over, of fsdp, expert and context together;
    "zero_experts" is the same without expert, for experts.
    """
    sizes = {axis: np.asarray(getattr(parallelism, axis), float) for axis in MESH_AXES}
    # Tensor rows are adjacent to its columns: with rows, context has one rank.
    del sizes["tensor"]
    sizes |= {
        "tensor_rows": np.asarray(parallelism.tensor_rows, float),
        "tensor": np.asarray(parallelism.tensor_columns, float),
    }
    levels = _levels(cluster, sizes)

    def together(*axes: str) -> Levels:
        several = zip(*(levels[axis] for axis in axes), strict=True)
        join = functools.partial(_together, torus=bool(cluster.torus))
        return tuple(functools.reduce(join, one) for one in several)

    zero, experts = together("fsdp", "expert", "context"), together("fsdp", "context")
    return {**levels, "zero": zero, "zero_experts": experts}


def _levels(cluster: Cluster, sizes: dict[str, np.ndarray]) -> dict[str, Levels]:
    return _torus_levels(cluster, sizes) if cluster.torus else _tier_levels(cluster, sizes)


def _tier_levels(cluster: Cluster, sizes: dict[str, np.ndarray]) -> dict[str, Levels]:
    stride, found = np.ones(()), {}
    for axis in reversed(sizes):
        left, reach, levels = sizes[axis], stride, []
        for tier in cluster.tiers:
            # Every member has its own link: a domain with q members has q links.
            inside = left if np.isinf(tier.devices) else tier.devices // reach
            members = np.clip(inside, 1, left)
            rate = tier.bytes_per_second
            if tier.mesh:
                rate = rate * np.minimum(1, np.maximum(members - 1, 1) / (tier.devices - 1))
            # A ring passes through all members, wherever they are: each link carries the shards of
            # all but one of them.
            sent = np.where(members > 1, 1 - 1 / sizes[axis], 0.0)
            levels.append(_level(members, sent, rate, tier.latency_seconds))
            left, reach = np.maximum(left / members, 1), reach * members
        found[axis] = tuple(levels)
        stride = stride * sizes[axis]
    return found


def _level(members: np.ndarray, sent: Floats, rate: Floats, latency: float) -> Level:
    return Level(members, sent, rate, rate, (members - 1) * latency, np.log2(members) * latency)


def _together(one: Level, other: Level, torus: bool) -> Level:
    """A level of groups that span two axes. Torus axes have separate links; members of a tier share
    theirs."""
    rates = one.bytes_per_second, other.bytes_per_second
    both = rates[0] + rates[1] if torus else np.minimum(*rates)
    alone = np.where(np.asarray(other.members) > 1, rates[1], rates[0])
    crossed = (np.asarray(one.members) > 1) & (np.asarray(other.members) > 1)
    return Level(
        members=one.members * other.members,
        sent=1 - (1 - one.sent) * (1 - other.sent),
        bytes_per_second=np.where(crossed, both, alone),
        exchange_rate=np.minimum(one.exchange_rate, other.exchange_rate),
        ring_seconds=one.ring_seconds * other.members + other.ring_seconds,
        tree_seconds=one.tree_seconds + other.tree_seconds,
    )


def _torus_levels(cluster: Cluster, sizes: dict[str, np.ndarray]) -> dict[str, Levels]:
    """Assigns the axes of the torus to the mesh axes, fastest mesh axis first.

    A mesh axis takes whole torus axes where it can, and each one adds bandwidth. A part of a torus
    axis has no wrap-around link, nor does a whole one that does not wrap.

    A byte of an all-to-all passes through all devices between its ends, one axis after the other,
    so the middle link of the busiest axis sets the time, and more axes do not help. Along `n`
    devices in a line half of each device's bytes are for the other half of the line: `n / 4` times
    those bytes cross the link in the middle, in either direction. In a ring there are two such
    links: `n / 8` (jax-ml.github.io/scaling-book/sharding, "Our final communication primitive"). A
    group of every s-th device shares its links with s - 1 others like it.
    """
    torus, network = cluster.tiers[-2], cluster.tiers[-1]
    left = {n: np.asarray(float(side)) for n, side in enumerate(cluster.torus)}
    found = {}
    for axis in reversed(sizes):
        rest = sizes[axis]
        members, rate, hops, middle = np.ones(()), np.zeros(()), np.zeros(()), np.zeros(())
        # A torus axis that fits exactly comes first, as in JAX's device meshes.
        for exact in (True, False):
            for n, side in enumerate(cluster.torus):
                here = np.gcd(rest.astype(int), left[n].astype(int)).astype(float)
                here = np.where((here == left[n]) | (not exact), here, 1.0)
                taken = here > 1
                ring = (here == side) & cluster.wraps[n]
                rate = rate + taken * np.where(ring, 1.0, LINE) * torus.bytes_per_second
                # The farthest member is half way round a ring, or at the other end of a line.
                hops = hops + taken * np.where(ring, here / 2, here - 1)
                span = here * side / left[n]
                around = cluster.wraps[n] & (span == side)
                middle = np.maximum(middle, taken * span / np.where(around, 8, 4))
                members, rest, left[n] = members * here, rest / here, left[n] / here
        latency = hops * torus.latency_seconds
        rate = np.where(rate > 0, rate, torus.bytes_per_second)
        sent = 1 - 1 / members
        one_way = LINE * torus.bytes_per_second
        exchange = one_way * np.where(members > 1, sent, 1) / np.where(members > 1, middle, 1)
        inside = Level(members, sent, rate, exchange, latency, latency)
        outside = _level(rest, 1 - 1 / rest, network.bytes_per_second, network.latency_seconds)
        found[axis] = (inside, outside)
    return found


def gather_seconds(levels: Levels, num_bytes: Floats) -> Floats:
    """An all-gather with `num_bytes` of output; a reduce-scatter takes as long."""
    seconds = _bandwidth_seconds(levels, num_bytes) + _latency(levels, "ring_seconds")
    return np.where(group_size(levels) > 1, seconds + START_SECONDS, 0.0)


def reduce_seconds(levels: Levels, num_bytes: Floats) -> Floats:
    """An all-reduce of `num_bytes`: ring or tree, whichever is faster."""
    # A reduce-scatter and an all-gather, each of which moves the bytes once.
    bandwidth = 2 * _bandwidth_seconds(levels, num_bytes)
    ring = bandwidth + 2 * _latency(levels, "ring_seconds")
    tree = bandwidth / TREE_BANDWIDTH + 2 * _latency(levels, "tree_seconds")
    return np.where(group_size(levels) > 1, np.minimum(ring, tree) + START_SECONDS, 0.0)


def exchange_seconds(levels: Levels, num_bytes: Floats) -> Floats:
    """An all-to-all in which each member has `num_bytes`, its own share included.

    Messages of all pairs start at once.
    """
    whole, inner, slowest = group_size(levels), np.ones(()), np.zeros(())
    for level in levels:
        reached = inner * level.members
        outside = (reached - inner) / whole  # share of a member's bytes that crosses this level
        slowest = np.maximum(slowest, num_bytes * outside / level.exchange_rate)
        inner = reached
    seconds = slowest + _latency(levels, "tree_seconds")
    return np.where(whole > 1, seconds + START_SECONDS, 0.0)


def split_levels(levels: Levels, parts: Floats) -> tuple[Levels, Levels]:
    """The levels of groups of one member in each of `parts` consecutive parts of a group, and of
    the groups inside a part."""
    across, inside, left = [], [], group_size(levels) / parts
    for level in levels:
        near = np.minimum(level.members, left)
        pairs = ((across, level.members / near), (inside, near))
        for found, members in pairs:
            share = (members - 1) / np.maximum(level.members - 1, 1)
            found.append(
                replace(
                    level,
                    members=members,
                    sent=1 - 1 / members,
                    ring_seconds=share * level.ring_seconds,
                    tree_seconds=share * level.tree_seconds,
                )
            )
        left = left / near
    return tuple(across), tuple(inside)


def send_seconds(levels: Levels, num_bytes: Floats) -> Floats:
    """A message to a neighbour, over the farthest level that the group spans."""
    rate, latency = np.asarray(levels[0].bytes_per_second), np.zeros(())
    for level in levels:
        farther = level.members > 1
        rate = np.where(farther, level.bytes_per_second, rate)
        latency = np.where(farther, level.ring_seconds / np.maximum(level.members - 1, 1), latency)
    return np.where(group_size(levels) > 1, num_bytes / rate + latency, 0.0)


def collective_seconds(
    cluster: Cluster, sizes: Mapping[str, int], kind: str, axes: Sequence[str], num_bytes: float
) -> float:
    """One collective over some axes of a mesh, by XLA's name for its type.

    A group that skips an axis between its own is priced with it: the farthest links, which are the
    same, set the seconds.

    Args:
      sizes: axis -> size, every mesh axis, outermost first.
      num_bytes: of the whole array, gathered or not yet scattered.
    """
    if not axes:
        return 0.0
    names = list(sizes)
    positions = sorted(names.index(axis) for axis in axes)
    joined = names[positions[0] : positions[-1] + 1]
    whole = math.prod(sizes[axis] for axis in joined)
    merged = {**sizes, **dict.fromkeys(joined, 1), joined[-1]: whole}
    levels = _levels(cluster, {axis: np.asarray(size, float) for axis, size in merged.items()})
    levels = levels[joined[-1]]
    match kind:
        case "all-gather" | "reduce-scatter":
            return float(gather_seconds(levels, num_bytes))
        case "all-reduce":
            return float(reduce_seconds(levels, num_bytes))
        case "all-to-all" | "ragged-all-to-all":
            return float(exchange_seconds(levels, num_bytes))
        case _:
            return float(send_seconds(levels, num_bytes))


def group_size(levels: Levels) -> Floats:
    """Number of members of a group."""
    total = np.ones(())
    for level in levels:
        total = total * level.members
    return total


def _bandwidth_seconds(levels: Levels, num_bytes: Floats) -> Floats:
    """Seconds of one pass over the data, set by the slowest level."""
    slowest, share = np.zeros(()), np.ones(())
    for level in levels:
        seconds = num_bytes * share * level.sent / level.bytes_per_second
        slowest, share = np.maximum(slowest, seconds), share / level.members
    return slowest


def _latency(levels: Levels, kind: str) -> Floats:
    total = np.zeros(())
    for level in levels:
        total = total + getattr(level, kind)
    return total
