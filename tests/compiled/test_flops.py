"""FLOPs of programs compiled for absent accelerators, instruction by instruction.

Skipped only where the compilers, packages of the extra `aot`, are not installed.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxscale.compiled import hlo
from jaxscale.compiled.flops import (
    computation_costs,
    instruction_flops,
    narrow_flops,
    rematerialised_flops,
)
from jaxscale.compiled.topology import compiler_installed, open_topology
from jaxscale.ops.experts.grouped_matmul import grouped_matmul, grouped_weight_gradient
from jaxscale.training.xla_options import flags_of

pytestmark = pytest.mark.compiles

ROWS, EXPERTS, WIDTH = 512, 4, 256
HIDDEN = {"forward": 128, "input gradient": 384, "weight gradient": 512, "compute type": 640}
"""Columns of each expert's matrix, by which its matmul is known among the others'."""


def experts_program(topology: str, dtype: str) -> str:
    """Four matmuls of the same experts: three with `dtype` for `model.matmul_dtype`, and a forward
    one without."""

    def run(x, of_y, weights, sizes):
        of = "ragged_dot"
        return (
            grouped_matmul(x, weights["forward"], sizes, of, dtype=dtype),
            grouped_matmul(
                of_y["input gradient"],
                weights["input gradient"],
                sizes,
                of,
                transposed=True,
                dtype=dtype,
            ),
            grouped_weight_gradient(x, of_y["weight gradient"], sizes, of, dtype=dtype),
            grouped_matmul(x, weights["compute type"], sizes, of),
        )

    device = open_topology(topology).devices[0]
    place, options = SingleDeviceSharding(device), {f.name: f.value for f in flags_of(device)}

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    arguments = (
        array(ROWS, WIDTH),
        {name: array(ROWS, hidden) for name, hidden in HIDDEN.items()},
        {name: array(EXPERTS, WIDTH, hidden) for name, hidden in HIDDEN.items()},
        array(EXPERTS, dtype=jnp.int32),
    )
    with jax.enable_x64(False):  # TPU kernels know 32 bits only
        return jax.jit(run).lower(*arguments).compile(compiler_options=options).as_text()


@pytest.mark.proof
@pytest.mark.skipif(
    not compiler_installed("tpu"), reason="no compiler for TPUs: uv sync --inexact --extra aot"
)
@pytest.mark.parametrize(
    ("topology", "dtype", "narrow"),
    [
        ("v5p:1x1x1", "int8", ["forward", "input gradient"]),
        ("v6e:1x1", "int8", ["forward", "input gradient"]),
        ("v7x:1x1x1", "float8", ["forward", "input gradient", "weight gradient"]),
    ],
)
def test_matmuls_of_experts_are_narrow_where_their_operands_are(topology, dtype, narrow):
    """A row is multiplied by the matrix of its expert alone: 2 R D F whatever the number of
    experts."""
    flops = {name: 2.0 * ROWS * WIDTH * hidden for name, hidden in HIDDEN.items()}
    expected = {flops[name]: flops[name] * (name in narrow) for name in HIDDEN}
    text = experts_program(topology, dtype)
    # Whatever the compiler calls the kernels.
    for program in map(hlo.parse_hlo, (text, text.replace("%ragged-dot", "%kernel"))):
        found = {}
        for instructions in program.computations.values():
            named = {one.name: one for one in instructions}
            each = [(instruction_flops(one, named), one) for one in instructions]
            found |= {total: narrow_flops(one, named) for total, one in each if total}
        assert found == expected
        assert computation_costs(program, narrow_flops)[program.entry] == sum(expected.values())


@pytest.mark.proof
@pytest.mark.skipif(
    not compiler_installed("gpu"), reason="no compiler for GPUs: uv sync --inexact --extra aot"
)
def test_what_xla_recomputes_by_itself_is_counted():
    """Told to use 1 % of the memory, XLA repeats matmuls of a chain of layers."""
    layers, rows, width = 4, 2**17, 1024
    matmul = 2 * rows * width**2

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.sum(x)

    place = SingleDeviceSharding(open_topology("h100:1x1").devices[0])
    x, weight = (
        jax.ShapeDtypeStruct((size, width), jnp.bfloat16, sharding=place) for size in (rows, width)
    )
    lowered = jax.jit(jax.grad(loss)).lower([weight] * layers, x)
    compiled = lowered.compile(compiler_options={"xla_gpu_memory_limit_slop_factor": 1})
    program = hlo.parse_hlo(compiled.as_text(), {})
    repeated = rematerialised_flops(program)
    assert repeated >= matmul
    # Forward and by weights in each layer, and by inputs in all but the first.
    total = computation_costs(program, instruction_flops)[program.entry]
    assert total == (3 * layers - 1) * matmul + repeated
