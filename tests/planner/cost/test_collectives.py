"""Collectives against their formulas, and against measured ones."""

import math

import numpy as np
import pytest

from jaxscale.config import load
from jaxscale.config.layout import MESH_AXES
from jaxscale.planner.cost import collectives
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.cost.communication import local_params, state_traffic
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.search.trainable_model import TrainableModel


def levels(name, devices, axis, **sizes):
    parallelism = Parallelism(zero_stage=1, **sizes)
    return collectives.axis_levels(make_cluster(name, devices), parallelism)[axis]


def test_a_gather_within_a_node_is_a_ring():
    n, size, rate = 8, 1e9, 365e9
    expected = 7 * 12e-6 + (n - 1) / n * size / rate + collectives.START_SECONDS
    got = collectives.gather_seconds(levels("h100", 8, "fsdp", fsdp=8), size)
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("size", "microseconds", "rel"),
    [(2**20, 79, 0.2), (2**24, 294, 0.1), (2**27, 1280, 0.1), (2**30, 8140, 0.05)],
)
def test_all_reduces_of_eight_a100_take_what_was_measured(size, microseconds, rel):
    """Galvatron's profile of a node."""
    got = collectives.reduce_seconds(levels("a100-80", 8, "fsdp", fsdp=8), size)
    assert got * 1e6 == pytest.approx(microseconds, rel=rel)


def test_every_member_in_a_node_has_a_separate_nic():
    """A ring over 16 nodes with q members in each moves q times what one NIC does."""
    size = 8e9
    rate = make_cluster("h100", 128).tiers[-1].bytes_per_second
    for tensor, members in ((1, 8), (2, 4), (8, 1)):
        group = levels("h100", 128, "fsdp", fsdp=128 // tensor, tensor=tensor)
        latency = sum(level.ring_seconds for level in group) + collectives.START_SECONDS
        got = collectives.gather_seconds(group, size) - latency
        total = 16 * members
        assert got == pytest.approx(size / members * (total - 1) / total / rate, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "fsdp", "context"), [("h100", 8, 4), ("h100", 2, 4), ("h100", 8, 16), ("v5p", 4, 16)]
)
def test_ranks_of_fsdp_and_context_gather_as_one_axis_of_as_many(name, fsdp, context):
    """With nothing between the two axes their groups are the same devices."""
    ranks, size = fsdp * context, 8e9
    whole = collectives.gather_seconds(levels(name, ranks, "fsdp", fsdp=ranks), size)
    both = levels(name, ranks, "zero", fsdp=fsdp, context=context)
    assert collectives.gather_seconds(both, size) == pytest.approx(whole, rel=0.02)
    # Ranks of expert are among them, but for experts.
    alone = {"fsdp": ranks, "expert": 2}
    got, expected = (levels(name, 2 * ranks, axis, **alone) for axis in ("zero_experts", "fsdp"))
    assert collectives.gather_seconds(got, size) == collectives.gather_seconds(expected, size)
    sizes = {"fsdp": fsdp, "expert": context}
    got = collectives.gather_seconds(levels(name, ranks, "zero", **sizes), size)
    assert got == collectives.gather_seconds(both, size)


def test_ranks_on_several_nodes_are_groups_over_the_nodes_and_inside():
    """Each with the links of an axis of as many ranks."""
    parts = collectives.split_levels(levels("h100", 64, "expert", expert=64), 8)
    for part, others in zip(parts, ({"tensor": 8}, {"fsdp": 8}), strict=True):
        expected = levels("h100", 64, "expert", expert=8, **others)
        got, expected = (collectives.exchange_seconds(one, 1e9) for one in (part, expected))
        assert got == pytest.approx(expected)


@pytest.mark.parametrize(("kept", "nodes"), [({}, 8), ({"router_groups_kept": 4}, 4)])
def test_a_token_crosses_the_network_once_to_each_node(kept, nodes):
    """Eight choices at random, of all nodes or of the four groups that the router keeps."""
    groups = {"router_groups": 8, **kept} if kept else {}
    found = Parallelism(expert=64, expert_nodes=8, **groups).nodes_of_token(8)
    assert found == pytest.approx(nodes * (1 - (1 - 1 / nodes) ** 8))


def test_gradients_that_are_not_scattered_cross_twice():
    """Stage 0 sums whole gradients, which is a reduce-scatter and an all-gather (arXiv 1910.02054,
    section 7): twice the time of stage 2's, except for latencies."""
    machine = make_cluster("h100", 64, network_latency_seconds=0.0, node_latency_seconds=0.0)
    work = TrainableModel(load("llama2_7b")).work
    for sizes in ({"fsdp": 64}, {"fsdp": 8, "tensor": 8}):
        parallelism = Parallelism(**sizes)
        groups = collectives.axis_levels(machine, parallelism)
        sent = state_traffic(work, local_params(work, parallelism), parallelism, groups)
        assert sent.whole == pytest.approx(2 * sent.scatter, rel=0.01)
        assert sent.update == pytest.approx(sent.scatter * 2 / parallelism.gradient_bytes, rel=0.01)


def test_all_reduces_of_four_nodes_reach_the_measured_bus_bandwidth():
    """94 GB/s of 4 NICs of 25 GB/s, above 16 MiB (ml-engineering): 2 (n - 1) / n of the message in
    that time, as nccl-tests count."""
    parallelism = Parallelism(zero_stage=1, fsdp=32)
    machine = make_cluster("a100-80", 32, network_bytes_per_second=12.5e9)
    seconds = collectives.reduce_seconds(collectives.axis_levels(machine, parallelism)["fsdp"], 4e9)
    assert 2 * 31 / 32 * 4 / seconds == pytest.approx(94, rel=0.06)


def test_axes_take_the_nearest_links_from_the_inside():
    tensor = levels("h100", 64, "tensor", tensor=8, fsdp=8)
    assert [float(level.members) for level in tensor] == [8, 1]
    fsdp = levels("h100", 64, "fsdp", tensor=8, fsdp=8)
    assert [float(level.members) for level in fsdp] == [1, 8]
    package = levels("mi250x", 64, "tensor", tensor=4, fsdp=16)
    assert [float(level.members) for level in package] == [2, 2, 1]


def test_the_axes_of_a_torus_add_up_and_a_part_of_one_has_no_way_round():
    size = 1e9
    whole = collectives.gather_seconds(levels("v6e", 256, "fsdp", fsdp=256), size)
    side = collectives.gather_seconds(levels("v6e", 256, "fsdp", fsdp=16, tensor=16), size)
    part = collectives.gather_seconds(levels("v6e", 256, "tensor", fsdp=64, tensor=4), size)
    assert whole == pytest.approx(255 / 256 * size / 360e9, rel=0.02)
    assert side == pytest.approx(15 / 16 * size / 180e9, rel=0.02)
    assert part == pytest.approx(3 / 4 * size / 90e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "devices", "rate"),
    [
        ("v5p", 64, 3 * 180e9),
        ("v5p", 32, 3 * 90e9),
        ("v5p", 4, 2 * 90e9),  # one link in each of two directions
        ("v5e", 16, 2 * 45e9),
        ("v5e", 128, 45e9 + 90e9),
    ],
)
def test_a_side_without_a_way_round_has_half_of_its_links(name, devices, rate):
    seconds = collectives.gather_seconds(levels(name, devices, "fsdp", fsdp=devices), 1e10)
    assert seconds == pytest.approx((1 - 1 / devices) * 1e10 / rate, rel=0.01)


def busiest_link(sides, wraps, lines):
    """Times what a device holds that cross the busiest link one way, in all-to-alls
    of all groups at once: every message is counted, by a shortest route, one axis after the other.

    Args:
      lines: members of a group along each side, and the distance between two of them.
    """
    places = np.indices(sides).reshape(len(sides), -1)
    groups = [c - c // gap % many * gap for c, (many, gap) in zip(places, lines)]
    source, target = np.nonzero(np.all([g[:, None] == g for g in groups], axis=0))
    now, share, busiest = places[:, source], 1 / math.prod(many for many, _ in lines), 0.0
    for n, side in enumerate(sides):
        goal = places[n, target]
        up, down = np.maximum(goal - now[n], 0), np.maximum(now[n] - goal, 0)
        if wraps[n]:
            up, down = (goal - now[n]) % side, (now[n] - goal) % side
        for sign, hops, other in ((1, up, down), (-1, down, up)):
            # With two shortest ways half takes each.
            part = np.where(hops == other, 0.5, (hops < other) if wraps[n] else 1.0)
            load = np.zeros(math.prod(sides))
            for hop in range(int((hops * (part > 0)).max())):
                link = now.copy()
                link[n] = (now[n] + sign * hop) % side
                load += np.bincount(
                    np.ravel_multi_index(link, sides), share * part * (hop < hops), len(load)
                )
            busiest = max(busiest, load.max())
        now[n] = goal
    return busiest


@pytest.mark.parametrize(
    ("name", "sides", "sizes", "lines"),
    [
        ("v5e", (16, 16), {"expert": 256}, ((16, 1), (16, 1))),
        ("v5e", (16, 16), {"fsdp": 16, "expert": 16}, ((16, 1), (1, 1))),
        ("v5e", (16, 16), {"fsdp": 32, "expert": 8}, ((8, 1), (1, 1))),
        ("v5e", (16, 16), {"fsdp": 16, "expert": 8, "tensor": 2}, ((8, 2), (1, 1))),
        ("v5e", (8, 8), {"fsdp": 8, "expert": 8}, ((8, 1), (1, 1))),
        ("v6e", (4, 16), {"expert": 64}, ((4, 1), (16, 1))),
        ("v6e", (4, 16), {"fsdp": 8, "expert": 8}, ((4, 1), (2, 1))),
        ("v5p", (2, 2, 4), {"expert": 16}, ((2, 1), (2, 1), (4, 1))),
        ("v5p", (4, 4, 4), {"expert": 64}, ((4, 1),) * 3),
        ("v5p", (4, 4, 4), {"fsdp": 16, "expert": 2, "tensor": 2}, ((2, 2), (1, 1), (1, 1))),
        ("v5p", (8, 8, 8), {"expert": 512}, ((8, 1),) * 3),
    ],
)
def test_an_exchange_on_a_torus_waits_for_the_busiest_link(name, sides, sizes, lines):
    machine = make_cluster(name, math.prod(sides), torus=sides, node_latency_seconds=0.0)
    group = collectives.axis_levels(machine, Parallelism(zero_stage=1, **sizes))["expert"]
    one_way = machine.tiers[-2].bytes_per_second / 2
    got = collectives.exchange_seconds(group, 1e9) - collectives.START_SECONDS
    expected = 1e9 * busiest_link(sides, machine.wraps, lines) / one_way
    assert got == pytest.approx(expected, rel=1e-6)


def test_an_exchange_over_slices_sends_its_share_within_each():
    """Of four slices: a quarter of a device's bytes is for devices of its slice."""
    rates = {"network_bytes_per_second": 1e15, "network_latency_seconds": 0.0}
    machine = make_cluster("v5e", 1024, **rates)
    parallelism = Parallelism(zero_stage=1, expert=1024)
    over = collectives.axis_levels(machine, parallelism)["expert"]
    inside = levels("v5e", 256, "expert", expert=256)
    expected = collectives.exchange_seconds(inside, 2.5e8)
    assert collectives.exchange_seconds(over, 1e9) == pytest.approx(expected, rel=1e-6)


def test_slices_of_a_pod_talk_over_the_network():
    inside = levels("v5e", 512, "data", data=2, fsdp=256)
    assert [float(level.members) for level in inside] == [1, 2]


def test_a_group_of_one_sends_nothing():
    alone = levels("h100", 8, "tensor", fsdp=8)
    for seconds in (
        collectives.gather_seconds,
        collectives.reduce_seconds,
        collectives.exchange_seconds,
        collectives.send_seconds,
    ):
        assert seconds(alone, 1e9) == 0


def test_arrays_give_what_single_layouts_give():
    tensor = np.array([1, 2, 4, 8, 16])
    many = collectives.axis_levels(
        make_cluster("h100", 64), Parallelism(tensor=tensor, fsdp=64 // tensor, zero_stage=3)
    )
    for n, t in enumerate(tensor):
        one = levels("h100", 64, "fsdp", tensor=int(t), fsdp=64 // int(t))
        together = collectives.gather_seconds(many["fsdp"], 1e9)[n]
        assert together == pytest.approx(float(collectives.gather_seconds(one, 1e9)))


def test_a_collective_of_a_mesh_is_that_of_its_group():
    """Whichever axes make the group: replicas and shards of eight nodes are one ring."""
    machine = make_cluster("h100", 64)
    sizes = dict.fromkeys(MESH_AXES, 1) | {"data": 4, "fsdp": 2, "tensor": 8}
    whole = levels("h100", 64, "fsdp", fsdp=8, tensor=8)
    inside = levels("h100", 64, "tensor", fsdp=8, tensor=8)

    def seconds(kind, *axes):
        return collectives.collective_seconds(machine, sizes, kind, axes, 1e9)

    assert seconds("all-gather", "data", "fsdp") == collectives.gather_seconds(whole, 1e9)
    assert seconds("reduce-scatter", "data", "fsdp") == collectives.gather_seconds(whole, 1e9)
    assert seconds("all-reduce", "tensor") == collectives.reduce_seconds(inside, 1e9)
    assert seconds("all-to-all", "tensor") == collectives.exchange_seconds(inside, 1e9)
    assert seconds("collective-permute", "data", "fsdp") == collectives.send_seconds(whole, 1e9)
    assert seconds("all-reduce") == 0
