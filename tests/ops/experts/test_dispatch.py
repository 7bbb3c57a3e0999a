"""Tokens to their experts and back, on meshes of eight devices, against plain sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxscale.config.layout import MANUAL_AXES, MESH_AXES
from jaxscale.ops.attention.context_chunks import balanced_order
from jaxscale.ops.experts.dispatch import Dispatch, capacity_of, num_kept
from jaxscale.ops.experts.expert_matmuls import (
    expert_bias,
    expert_columns,
    expert_rows,
    send_gates,
)
from jaxscale.ops.experts.plan import plan_dispatch
from jaxscale.sharding.resolve import automatic_axes

B, T, D, F, E, K = 8, 16, 6, 8, 8, 3
ROWS, EXPERTS = PartitionSpec(("data", "fsdp", "expert")), PartitionSpec("expert")
MESHES = [  # of pipeline, data, fsdp, expert, context, tensor
    (1, 1, 1, 1, 1, 1),
    (1, 1, 2, 4, 1, 1),
    (1, 1, 1, 4, 1, 2),
    (1, 2, 1, 2, 2, 1),
    (1, 1, 1, 2, 2, 2),
    (1, 1, 1, 1, 2, 4),
]


@functools.cache
def example():
    """Inputs, with experts that are chosen by nobody and by everybody, and tokens with no expert,
    or with fewer than K; and a gradient of the result."""
    rng = np.random.default_rng(0)
    shapes = (B, T, D), (E, D, F), (E, F, D), (E, F), (E, D), (B, T, K), (B, T, D)
    *arguments, dy = (rng.normal(size=shape) for shape in shapes)
    experts = np.stack([[rng.permutation(E)[:K] for _ in range(T)] for _ in range(B)])
    experts[0, :5], experts[1, :, 0], experts[1, :, 1], experts[1, :, 2] = -1, 7, 2, 3
    experts[experts == 5] = -1
    return arguments, experts.astype(np.int32), dy


def plainly(x, up, down, up_bias, down_bias, gates, keeps):
    """Every token through every expert, one after the other."""
    _, experts, _ = example()
    y = jnp.zeros_like(x)
    for expert in range(E):
        weight = jnp.sum(jnp.where((experts == expert) & keeps, gates, 0), axis=-1)
        hidden = jnp.tanh(x @ up[expert] + up_bias[expert])
        y += weight[..., None] * (hidden @ down[expert] + down_bias[expert])
    return y


def kept(capacity):
    """Which choices an expert takes, in the order of the text."""
    _, experts, _ = example()
    keeps, seen = np.zeros(experts.shape, bool), np.zeros((B, E), int)
    for row, token, choice in np.ndindex(*experts.shape):
        expert = experts[row, token, choice]
        if expert >= 0:
            keeps[row, token, choice] = not capacity or seen[row, expert] < capacity
            seen[row, expert] += 1
    return keeps


@functools.cache
def wanted(capacity):
    arguments, _, dy = example()

    @jax.jit
    def result_and_gradients(arguments, dy):
        y, pullback = jax.vjp(functools.partial(plainly, keeps=kept(capacity)), *arguments)
        return y, pullback(dy)

    return result_and_gradients(arguments, dy)


def through_experts(dispatch, factor, experts, x, up, down, up_bias, down_bias, gates):
    plan = plan_dispatch(dispatch, experts, E, capacity_of(factor, T, K, E))
    (hidden,) = expert_columns(dispatch, x, (up,), plan)
    gates = send_gates(dispatch, gates, plan)
    hidden = jnp.tanh(hidden + expert_bias(dispatch, up_bias, plan)) * gates[..., None]
    # That others return first, here the tokens themselves, changes nothing.
    return expert_rows(dispatch, hidden, down, plan, down_bias, gates, x), num_kept(plan)


def ragged_all_to_all(
    operand,
    output,
    input_offsets,
    send_sizes,
    output_offsets,
    recv_sizes,
    *,
    axis_name,
    axis_index_groups,
):
    """JAX's, which CPUs do not have, from its documentation: every rank sees what all send, and
    takes its own slices."""
    everything = operand, input_offsets, send_sizes, output_offsets
    groups = axis_index_groups or [range(jax.lax.axis_size(axis_name))]
    sent = [
        jax.lax.all_gather(array, axis_name, axis_index_groups=axis_index_groups)
        for array in everything
    ]
    numbers = {rank: number for group in groups for number, rank in enumerate(group)}
    me = jnp.array([numbers[rank] for rank in sorted(numbers)])[jax.lax.axis_index(axis_name)]
    ranks = sent[0].shape[0]
    slices = len(send_sizes) // ranks
    row = jnp.arange(max(len(operand), len(output)))
    for source, part in np.ndindex(ranks, slices):
        number = me * slices + part
        operands, begin, size, place = (array[source] for array in sent)
        number_of_rows = jnp.where(
            size[number] == recv_sizes[source * slices + part], size[number], -(10**6)
        )
        taken = operands[jnp.minimum(begin[number] + row, len(operands) - 1)]
        where = jnp.where(row < number_of_rows, place[number] + row, len(output))
        output = output.at[where].set(taken, mode="drop")
    return output


def on_mesh(sizes, local, in_specs, out_specs):
    """`local` with the axes manual that are so in a step, compiled."""
    devices = jax.devices()[: np.prod(sizes)]
    return jax.jit(
        jax.shard_map(
            local,
            mesh=jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 6, devices=devices),
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(MANUAL_AXES),
            check_vma=False,
        )
    )


CASES = [(sizes, factor, False, 1) for sizes in MESHES for factor in (0.0, 1.0)]
CASES += [(sizes, 0.0, True, 1) for sizes in (MESHES[2], MESHES[4])]
# Two nodes of two ranks of expert, and of one; and four of one, more than a token's choices.
CASES += [(MESHES[2], 0.0, ragged, 2) for ragged in (True, False)]
CASES += [(MESHES[4], 0.0, True, 2), (MESHES[1], 0.0, False, 4)]
# Other cases have these meshes with a capacity or with two nodes.
SLOW = [CASES[place] for place in (4, 8, 13)]


@pytest.mark.proof(but=("sizes3-1.0-False-1",))
@pytest.mark.parametrize(
    ("sizes", "factor", "ragged", "nodes"),
    [pytest.param(*one, marks=pytest.mark.slow) if one in SLOW else one for one in CASES],
)
def test_every_mesh_gives_what_one_device_does(sizes, factor, ragged, nodes, monkeypatch):
    """Results, the number of choices that are kept, and every gradient."""
    axes = dict(zip(MESH_AXES, sizes))
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    ranks = axes["expert"], axes["tensor"], axes["context"]
    dispatch = Dispatch(*ranks, automatic_axes(axes), ragged=ragged, nodes=nodes)
    order = balanced_order(T, axes["context"])

    def summed(x, names):
        names = tuple(name for name in names if axes[name] > 1)
        return jax.lax.psum(x, names) if names else x

    def local(arguments, experts, dy):
        y, pullback, count = jax.vjp(
            lambda *args: through_experts(dispatch, factor, experts, *args),
            *arguments,
            has_aux=True,
        )
        dx, *dweights, dgates = pullback(dy)
        dweights = (summed(dw, ("data", "fsdp")) for dw in dweights)
        return y, (dx, *dweights, dgates), summed(count, ("data", "fsdp", "expert"))

    arguments = ROWS, *[EXPERTS] * 4, ROWS
    run = on_mesh(sizes, local, (arguments, ROWS, ROWS), (ROWS, arguments, PartitionSpec()))
    (x, *weights, gates), experts, dy = example()
    reordered = (x[:, order], *weights, gates[:, order]), experts[:, order], dy[:, order]
    y, (dx, *dweights, dgates), count = run(*reordered)
    capacity = capacity_of(factor, T, K, E)
    result, gradients = wanted(capacity)
    assert count == kept(capacity).sum()
    text = np.argsort(order)
    got = y[:, text], dx[:, text], *dweights, dgates[:, text]
    for one, other in zip(got, (result, *gradients)):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_a_tokens_experts_are_added_up_in_float32():
    """128 and a half from each of two more experts: in bfloat16 each half would be lost."""
    plan = plan_dispatch(Dispatch(), jnp.array([[[0, 1, 2]]]), 4)
    hidden = jnp.array([[[128.0], [0.5], [0.5]]], jnp.bfloat16)
    y = expert_rows(Dispatch(), hidden, jnp.ones((4, 1, 1), jnp.bfloat16), plan)
    assert y.dtype == jnp.bfloat16
    assert y.item() == 129


def test_capacity_is_rounded_up_and_at_most_the_sequence():
    assert capacity_of(1.25, 100, 2, 8) == 32  # 31.25
    assert capacity_of(100.0, 16, 1, 8) == 16
    assert capacity_of(0.0, 16, 1, 8) == 0


@pytest.mark.proof
@pytest.mark.parametrize("sizes", [MESHES[1], MESHES[2], MESHES[4]])
@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_matmuls_of_8_bits_are_the_same_on_every_mesh(sizes, dtype):
    """Of numbers that are near enough to each other that a scale, which is of what a rank has,
    makes none of them subnormal."""
    _, experts, _ = example()
    rng = np.random.default_rng(1)
    x, up, dy = (
        np.round(rng.uniform(0.25, 4, shape) * 64) / 64 * rng.choice([-1, 1], shape)
        for shape in ((B, T, D), (E, D, F), (B, T, F))
    )

    def run(sizes):
        axes = dict(zip(MESH_AXES, sizes))
        ranks = axes["expert"], axes["tensor"], axes["context"]
        dispatch = Dispatch(*ranks, automatic_axes(axes), dtype=dtype)
        order = balanced_order(T, axes["context"])
        back = np.broadcast_to(np.eye(F), (E, F, F))

        def forward(x, up, experts):
            plan = plan_dispatch(dispatch, experts, E)
            (hidden,) = expert_columns(dispatch, x, (up,), plan)
            return hidden, plan

        def local(x, up, experts, dy):
            y, pullback, plan = jax.vjp(lambda x, up: forward(x, up, experts), x, up, has_aux=True)
            # Each row gets the gradient of its token.
            wide = Dispatch(*ranks, automatic_axes(axes))
            (dhidden,) = expert_columns(wide, dy, (jnp.asarray(back[: len(up)]),), plan)
            dx, dup = pullback(dhidden)
            summed = tuple(name for name in ("data", "fsdp") if axes[name] > 1)
            dup = jax.lax.psum(dup, summed) if summed else dup
            return expert_rows(wide, y, jnp.asarray(back[: len(up)]), plan), dx, dup

        run_there = on_mesh(sizes, local, (ROWS, EXPERTS, ROWS, ROWS), (ROWS, ROWS, EXPERTS))
        y, dx, dup = run_there(x[:, order], up, experts[:, order], dy[:, order])
        text = np.argsort(order)
        return y[:, text], dx[:, text], dup

    for got, expected in zip(run(sizes), run(MESHES[0])):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11)
