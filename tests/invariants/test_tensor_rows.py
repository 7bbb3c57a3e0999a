"""Tensor parallelism of rows x columns (AxoNN, arXiv 2305.13525) beside fsdp and data: matmuls are
the dense ones on every grid of eight devices, and what they send is what the paper counts."""

import collections
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.compiled import hlo
from jaxscale.compiled.collectives import collectives
from jaxscale.config.layout import MANUAL_AXES, Layout
from jaxscale.ops.tensor_parallel import columns, rows
from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.resolve import is_axes, manual_part, resolve_tree
from jaxscale.sharding.specs import BATCH_ROWS
from jaxscale.sharding.zero import Zero
from jaxscale.training.kernels import make_kernels
from tests.invariants import matrix

pytestmark = pytest.mark.compiles

TOKENS, WIDTH, HIDDEN = 32, 64, 128  # m, k and n of the paper
AXES = {"up": ("embed", "mlp"), "gate": ("embed", "mlp"), "down": ("mlp", "embed")}
GRID = ("data", "fsdp", "rows", "columns")  # the paper's data, z, x and y

# Elements that a device sends for one matmul, forward and backward: all-gather and reduce-scatter
# over fsdp, all-reduces over rows, over columns and over data.
GOLDEN = {
    (8, 1, 1, 1): (0, 0, 0, 0, 14336),
    (1, 1, 8, 1): (0, 0, 7168, 0, 0),
    (1, 1, 1, 8): (0, 0, 0, 3584, 0),
    (1, 8, 1, 1): (7168, 7168, 0, 0, 0),
    (1, 2, 2, 2): (1024, 1024, 1024, 512, 0),
    (2, 1, 2, 2): (0, 0, 1024, 512, 2048),
    (2, 2, 1, 2): (2048, 2048, 0, 512, 2048),
    (2, 2, 2, 1): (2048, 2048, 1024, 0, 2048),
}


def one_matmul(kernels, weights, x):
    return kernels.columns(x, (weights["up"],))[0]


def mlp(kernels, weights, x):
    up, gate = kernels.columns(x, (weights["up"], weights["gate"]))
    return kernels.rows(jnp.sin(up) * gate, weights["down"])


class Plain(NamedTuple):
    columns = staticmethod(columns)
    rows = staticmethod(rows)


def arrays(names, out):
    keys = iter(jax.random.split(jax.random.key(0), 5))
    shapes = {
        name: [{"embed": WIDTH, "mlp": HIDDEN}[axis] for axis in AXES[name]] for name in names
    }
    weights = {name: jax.random.normal(next(keys), shape) / 8 for name, shape in shapes.items()}
    return weights, *(jax.random.normal(next(keys), (TOKENS, size)) for size in (WIDTH, out))


def run(grid, function, names, out):
    """Result, gradients of input and weights, and elements sent by (kind, axes), of the stream and
    weights as the engine has them: of ZeRO-3, in one visit."""
    sizes = dict(zip(GRID, grid))
    tensor = {"tensor": sizes["rows"] * sizes["columns"], "tensor_rows": sizes["rows"]}
    layout = Layout(data=sizes["data"], fsdp=sizes["fsdp"], **tensor)
    mesh, axes = make_mesh(layout), {name: AXES[name] for name in names}
    # Rows alone: a spread over columns of one rank.
    kernels = make_kernels(layout, "reference", "cpu") if layout.tensor > 1 else Plain()
    zero = Zero(3, layout.sizes, axes, jnp.dtype("float64"), jnp.dtype("float64"))
    weights, x, dy = arrays(names, out)
    batch = layout.batch_shards
    x, dy = (each.reshape(batch, TOKENS // batch, -1) for each in (x, dy))

    def local(shards, x, dy):
        gathered = zero.gather(shards, axes)
        y, pullback = jax.vjp(lambda weights, x: function(kernels, weights, x), gathered, x)
        dweights, dx = pullback(dy)
        return y, dx, zero.finish(zero.reduce(dweights, axes), axes)

    specs = jax.tree.map(
        lambda one: manual_part(zero.blocked_spec(one, zero.rules)), axes, is_leaf=is_axes
    )
    inner = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, BATCH_ROWS, BATCH_ROWS),
        out_specs=(BATCH_ROWS, BATCH_ROWS, specs),
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )

    def step(weights, x, dy):
        y, dx, dweights = inner(zero.split_blocks(weights), x, dy)
        return y, dx, zero.join_blocks(dweights)

    rest = tuple(name for name in ("data", "fsdp") if sizes[name] > 1)
    rows, cols = ("tensor_rows" if sizes["rows"] > 1 else None), "tensor"
    stream = NamedSharding(mesh, PartitionSpec(rest, cols, rows))
    hidden = NamedSharding(mesh, PartitionSpec(rest, None, cols))
    placed = resolve_tree(axes, zero.rules, mesh, weights)
    result = stream if out == WIDTH else hidden
    compiled = (
        jax.jit(
            step,
            in_shardings=(placed, stream, result),
            out_shardings=(result, stream, placed),
        )
        .lower(weights, x, dy)
        .compile()
    )
    sent = collections.Counter()
    for one in collectives(hlo.parse_hlo(compiled.as_text()), layout.sizes):
        share = 1 - 1 / math.prod(layout.sizes[axis] for axis in one.axes)
        times = 2 if one.kind == "all-reduce" else 1
        sent[one.kind, one.axes] += round(times * share * one.count * one.num_bytes / 8)
    y, dx, dweights = compiled(weights, x, dy)
    return (y, dx, dweights), sent


def dense(function, names, out):
    weights, x, dy = arrays(names, out)
    x, dy = x[None], dy[None]
    y, pullback = jax.vjp(lambda weights, x: function(Plain(), weights, x), weights, x)
    dweights, dx = pullback(dy)
    return y, dx, dweights


def check_values(got, wanted):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        one = np.asarray(one).reshape(other.shape)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10 * np.max(np.abs(other)))


@pytest.mark.proof(but=("(1, 8, 1, 1)", "(1, 1, 8, 1)", "(2, 2, 2, 1)"))
@pytest.mark.parametrize("grid", GOLDEN, ids=str)
def test_one_matmul_sends_what_the_paper_counts(grid):
    """An all-reduce over columns is a gather of the stream in the forward pass, and a scatter of
    its gradient in the backward pass."""
    got, sent = run(grid, one_matmul, ("up",), HIDDEN)
    check_values(got, dense(one_matmul, ("up",), HIDDEN))
    check_sent(sent, *GOLDEN[grid])


def check_sent(sent, gather, scatter, over_rows, over_columns, over_data):
    wanted = {
        ("all-gather", ("fsdp",)): gather,
        ("reduce-scatter", ("fsdp",)): scatter,
        ("all-reduce", ("tensor_rows",)): over_rows,
        ("all-gather", ("tensor",)): over_columns / 2,
        ("reduce-scatter", ("tensor",)): over_columns / 2,
        ("all-reduce", ("data",)): over_data,
    }
    assert sent == {what: count for what, count in wanted.items() if count}


@pytest.mark.proof
@pytest.mark.parametrize(
    "grid", [tuple(one.values()) for one in matrix.factorisations(GRID)], ids=str
)
def test_an_mlp_on_every_grid_is_the_dense_one(grid):
    """It sends what its three matmuls do, of which the last has rows and columns exchanged: nothing
    is laid out anew between them. Two matmuls of one input share what they send of it."""
    got, sent = run(grid, mlp, tuple(AXES), WIDTH)
    check_values(got, dense(mlp, tuple(AXES), WIDTH))
    data, fsdp, rows, cols = grid
    tokens, weights = TOKENS / (data * fsdp), 3 * WIDTH * HIDDEN / (8 / data)
    hidden = 2 * (1 - 1 / rows) * tokens * HIDDEN / cols
    stream = 2 * (1 - 1 / cols) * tokens * WIDTH / rows
    check_sent(
        sent,
        (fsdp - 1) * weights,
        (fsdp - 1) * weights,
        3 * hidden,  # of up, of gate, and of the gradient of what down takes
        2 * stream,
        2 * (1 - 1 / data) * weights,
    )
