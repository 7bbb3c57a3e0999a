"""Seconds of a collective, from the links of a cluster: latency and bandwidth, in closed form.

A group of ranks lies on levels: those of it that share a package, those that share a node, and so
on outwards. A large collective runs on all levels at once, as the rings of NCCL and the
dimension-wise algorithms of a torus do, so that the slowest level sets its bandwidth; its
latencies add up. Everything works on arrays of layouts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.layout import MESH_AXES
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.model.parallelism import Parallelism

Floats = Any  # a float, or float [N]

TREE_BANDWIDTH = 0.67
"""Of a ring's, that a tree reaches: all-reduces of 16 MB over 8 A100 take 294 us and of 1 MB 79 us
(Galvatron's profile); a ring of 12 us a step would need 295 and 176, the tree 289 and 85."""

START_SECONDS = 8e-6
"""Of a collective's kernel before the first byte moves (NCCL's tuning table: 8.4 us for a ring of
large messages)."""

LINE = 0.5
"""Of a torus axis' bandwidth, that is left where its ends do not meet: one direction of two."""


EXCHANGE_KERNEL = 460e9
"""Bytes a second that one device sends others at most by the kernels which dispatch tokens and
combine them, with the 16 to 32 multiprocessors that trainers give them: on GB200 and B200 472 to
550 to and from 8 to 32 devices, themselves included (16-bit tokens, the whole call; table in
Hybrid-EP's README, DeepEP's branch for it). Links of Hopper are slower than that."""


@dataclass(frozen=True)
class Level:
    """Members of a group that reach each other over links of one kind; floats or float [N]."""

    members: Floats
    sent: Floats  # over it in a gather, of what one member of the next nearer level gathers
    bytes_per_second: Floats  # that one member sends
    ring_seconds: Floats  # latency of a walk from member to member
    tree_seconds: Floats  # of a walk down a tree


Levels = tuple[Level, ...]  # from the nearest


def axis_levels(cluster: Cluster, parallelism: Parallelism) -> dict[str, Levels]:
    """The levels of each mesh axis' groups; consecutive devices are of the same tensor group."""
    sizes = {axis: np.asarray(getattr(parallelism, axis), float) for axis in MESH_AXES}
    if parallelism.traits.folded_experts:
        # The ranks of expert are those of tensor, context and data together, nearest first.
        folded = sizes.pop("expert")
        levels = _levels(cluster, sizes)
        return {**levels, "expert": _levels(cluster, {"expert": folded})["expert"]}
    return _levels(cluster, sizes)


def _levels(cluster: Cluster, sizes: dict[str, np.ndarray]) -> dict[str, Levels]:
    return _torus_levels(cluster, sizes) if cluster.torus else _tier_levels(cluster, sizes)


def _tier_levels(cluster: Cluster, sizes: dict[str, np.ndarray]) -> dict[str, Levels]:
    stride, found = np.ones(()), {}
    for axis in reversed(sizes):
        left, reach, levels = sizes[axis], stride, []
        for tier in cluster.tiers:
            # Every member has its own link, so a domain that holds q of them has q links.
            inside = left if np.isinf(tier.devices) else tier.devices // reach
            members = np.clip(inside, 1, left)
            rate = tier.bytes_per_second
            if tier.mesh:
                rate = rate * np.minimum(1, np.maximum(members - 1, 1) / (tier.devices - 1))
            # A ring goes through all members, wherever they are: each link carries what all but
            # one of them have.
            sent = np.where(members > 1, 1 - 1 / sizes[axis], 0.0)
            levels.append(_level(members, sent, rate, tier.latency_seconds))
            left, reach = np.maximum(left / members, 1), reach * members
        found[axis] = tuple(levels)
        stride = stride * sizes[axis]
    return found


def _level(members: np.ndarray, sent: Floats, rate: Floats, latency: float) -> Level:
    return Level(members, sent, rate, (members - 1) * latency, np.log2(members) * latency)


def _torus_levels(cluster: Cluster, sizes: dict[str, np.ndarray]) -> dict[str, Levels]:
    """Deals the sides of the torus out to the mesh axes, from the fastest.

    A logical axis takes whole sides where it can, and each side that it covers adds bandwidth. A
    part of a side has no way round.
    """
    torus, network = cluster.tiers[-2], cluster.tiers[-1]
    left = {n: np.asarray(float(side)) for n, side in enumerate(cluster.torus)}
    found = {}
    for axis in reversed(sizes):
        rest = sizes[axis]
        members, rate, hops = np.ones(()), np.zeros(()), np.zeros(())
        # A side that fits exactly first, as the device meshes of JAX do.
        for exact in (True, False):
            for n, side in enumerate(cluster.torus):
                here = np.gcd(rest.astype(int), left[n].astype(int)).astype(float)
                here = np.where((here == left[n]) | (not exact), here, 1.0)
                taken = here > 1
                share = np.where(here == side, 1.0, LINE)
                rate = rate + taken * share * torus.bytes_per_second
                hops = hops + taken * np.where(here == side, here / 2, here - 1)
                members, rest, left[n] = members * here, rest / here, left[n] / here
        latency = hops * torus.latency_seconds
        rate = np.where(rate > 0, rate, torus.bytes_per_second)
        inside = Level(members, 1 - 1 / members, rate, latency, latency)
        outside = _level(rest, 1 - 1 / rest, network.bytes_per_second, network.latency_seconds)
        found[axis] = (inside, outside)
    return found


def gather_seconds(levels: Levels, num_bytes: Floats, times: Floats = 1) -> Floats:
    """An all-gather that leaves `num_bytes` on every member; a reduce-scatter takes the same.

    `times` of them follow each other.
    """
    seconds = _bandwidth_seconds(levels, num_bytes) + _latency(levels, "ring_seconds")
    return times * np.where(group_size(levels) > 1, seconds + START_SECONDS, 0.0)


def reduce_seconds(levels: Levels, num_bytes: Floats, times: Floats = 1) -> Floats:
    """An all-reduce of `num_bytes`: a ring, or a tree where that is faster."""
    bandwidth = 2 * _bandwidth_seconds(levels, num_bytes)
    ring = bandwidth + 2 * _latency(levels, "ring_seconds")
    tree = bandwidth / TREE_BANDWIDTH + 2 * _latency(levels, "tree_seconds")
    return times * np.where(group_size(levels) > 1, np.minimum(ring, tree) + START_SECONDS, 0.0)


def exchange_seconds(levels: Levels, num_bytes: Floats, merged: int = 0) -> Floats:
    """An all-to-all in which each member holds `num_bytes`, and keeps its own share of them.

    Messages of all pairs start at once.

    Args:
      merged: every piece is there so many times, for members chosen at random, and crosses to a
        domain of the next level only once (node-limited dispatch, DeepSeek-V3, section 3.2.2).
    """
    whole, inner, slowest = group_size(levels), np.ones(()), np.zeros(())
    for level in levels:
        reached = inner * level.members
        outside = (reached - inner) / whole  # of what a member holds, that leaves over this level
        if merged:
            domains = np.maximum(whole / inner, 1)
            copies = (domains - 1) * (1 - (1 - 1 / domains) ** merged) / merged
            outside = np.minimum(outside, copies)
        rate = level.bytes_per_second
        rate = np.minimum(rate, EXCHANGE_KERNEL) if merged else rate
        slowest = np.maximum(slowest, num_bytes * outside / rate)
        inner = reached
    seconds = slowest + _latency(levels, "tree_seconds")
    return np.where(whole > 1, seconds + START_SECONDS, 0.0)


def send_seconds(levels: Levels, num_bytes: Floats, times: Floats = 1) -> Floats:
    """A message to the neighbour, over the farthest level that the group reaches."""
    rate, latency = np.asarray(levels[0].bytes_per_second), np.zeros(())
    for level in levels:
        farther = level.members > 1
        rate = np.where(farther, level.bytes_per_second, rate)
        latency = np.where(farther, level.ring_seconds / np.maximum(level.members - 1, 1), latency)
    return times * np.where(group_size(levels) > 1, num_bytes / rate + latency, 0.0)


def group_size(levels: Levels) -> Floats:
    """Members of a group."""
    total = np.ones(())
    for level in levels:
        total = total * level.members
    return total


def _bandwidth_seconds(levels: Levels, num_bytes: Floats) -> Floats:
    """Of one way round: the slowest level, each with the share that its members do not hold."""
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
