"""Programs read from their text: loops, collectives in the forms that compilers write, matmuls,
memory. The texts of TPUs and GPUs are shortened ones; those of the CPU are compiled here."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxscale.compiled import hlo
from jaxscale.compiled.collectives import collectives, summed
from jaxscale.compiled.flops import (
    computation_costs,
    instruction_cycles,
    instruction_flops,
    narrow_flops,
)
from jaxscale.compiled.live_buffers import live_at_peak

MESH = {"data": 2, "fsdp": 4}

LAYERS = """
%micro_body (p: (s32[], bf16[128,256])) -> (s32[], bf16[128,256]) {
  %p = (s32[], bf16[128,256]{1,0}) parameter(0)
  %x = bf16[128,256]{1,0} get-tuple-element(%p), index=1
  %d = bf16[128,256]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %r = (s32[], bf16[128,256]{1,0}) tuple(%i, %d)
}

%micro_condition (p: (s32[], bf16[128,256])) -> pred[] {
  %p = (s32[], bf16[128,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
"""
"""A loop of three matmuls, to be called from an ENTRY."""

GPU = (
    LAYERS
    + """
ENTRY %main (a: bf16[64,256], p: (s32[], bf16[128,256])) -> bf16[256,256] {
  %a = bf16[64,256]{1,0} parameter(0)
  %p = (s32[], bf16[128,256]{1,0}) parameter(1)
  %ag = (bf16[64,256]{1,0}, bf16[256,256]{1,0}) all-gather-start(%a), channel_id=1, \
replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="jit(f)/all_gather"}
  %w = (s32[], bf16[128,256]{1,0}) while(%p), condition=%micro_condition, body=%micro_body
  %done = bf16[256,256]{1,0} all-gather-done(%ag)
  %sum = bf16[256,256]{1,0} all-reduce(%done), channel_id=2, replica_groups={{0,4},{1,5},{2,6},{3,7\
}}, to_apply=%micro_condition, metadata={op_name="jit(f)/psum"}
  ROOT %out = bf16[256,256]{1,0} add(%sum, %done)
}
"""
)

SPARSE_CORE = (
    LAYERS
    + """
%offloaded (q: f32[256,256]) -> f32[64,256] {
  %q = f32[256,256]{1,0:T(8,128)} parameter(0)
  ROOT %rs = f32[64,256]{1,0:T(8,128)} reduce-scatter(%q), channel_id=3, replica_groups=\
mesh['data'=2,'fsdp'=4] {'fsdp'}, dimensions={0}, metadata={op_name="jit(f)/reduce_scatter"}
}

ENTRY %main (g: f32[256,256], p: (s32[], bf16[128,256])) -> f32[64,256] {
  %g = f32[256,256]{1,0:T(8,128)} parameter(0)
  %p = (s32[], bf16[128,256]{1,0}) parameter(1)
  %s = ((), (), (s32[8]{0})) custom-call-start(), called_computations={%offloaded}
  %u = ((f32[256,256]{1,0}), f32[64,256]{1,0}, (s32[8]{0})) custom-call-update(%s, %g)
  %w = (s32[], bf16[128,256]{1,0}) while(%p), condition=%micro_condition, body=%micro_body
  %done = f32[64,256]{1,0:T(8,128)} custom-call-done(%u)
  ROOT %late = f32[64,64]{1,0:T(8,128)} dot(%done, %done), lhs_contracting_dims={1}, \
rhs_contracting_dims={1}
}
"""
)
"""The matmul after the scatter does not overlap with it."""

PIECES = """
%first (a: bf16[64,256]) -> bf16[256,256] {
  %a = bf16[64,256]{1,0} parameter(0)
  ROOT %g0 = bf16[256,256]{1,0} all-gather(%a), channel_id=5, replica_groups=[2,4]<=[8], \
dimensions={0}, backend_config={"chain_id="7"}, frontend_attributes={chain_id="7"}
}

%middle (x: bf16[128,256], a: bf16[64,256]) -> bf16[128,128] {
  %x = bf16[128,256]{1,0} parameter(0)
  %a = bf16[64,256]{1,0} parameter(1)
  %g1 = bf16[256,256]{1,0} all-gather(%a), channel_id=5, replica_groups=[2,4]<=[8], \
dimensions={0}, frontend_attributes={chain_id="7"}
  ROOT %d = bf16[128,128]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%last (a: bf16[64,256]) -> bf16[256,256] {
  %a = bf16[64,256]{1,0} parameter(0)
  ROOT %g2 = bf16[256,256]{1,0} all-gather(%a), channel_id=5, replica_groups=[2,4]<=[8], \
dimensions={0}, frontend_attributes={chain_id="7"}
}

ENTRY %main (a: bf16[64,256], x: bf16[128,256]) -> bf16[256,256] {
  %a = bf16[64,256]{1,0} parameter(0)
  %x = bf16[128,256]{1,0} parameter(1)
  %start = bf16[256,256]{1,0} fusion(%a), kind=kCustom, calls=%first
  %beside = bf16[128,128]{1,0} fusion(%x, %a), kind=kOutput, calls=%middle, \
backend_config={"window_config":{"estimated_cycles":"1000"}}
  ROOT %done = bf16[256,256]{1,0} fusion(%start), kind=kCustom, calls=%last, \
backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
}
"""


def test_a_loop_runs_as_often_as_its_condition_counts():
    runs = hlo.parse_hlo(GPU).executions()
    assert runs["main"] == 1
    assert runs["micro_body"] == 3


def test_a_computation_runs_as_often_as_all_its_calls():
    entry = """
ENTRY %main (p: (s32[], bf16[128,256])) -> (s32[], bf16[128,256]) {
  %p = (s32[], bf16[128,256]{1,0}) parameter(0)
  %w = (s32[], bf16[128,256]{1,0}) while(%p), condition=%micro_condition, body=%micro_body
  ROOT %c = (s32[], bf16[128,256]{1,0}) call(%w), to_apply=%micro_body
}
"""
    program = hlo.parse_hlo(LAYERS + entry)
    assert program.executions()["micro_body"] == 3 + 1
    assert computation_costs(program, instruction_flops)["main"] == 4 * 2 * 128 * 256 * 256


@pytest.mark.parametrize(
    ("groups", "axes", "subgroup"),
    [
        ("[2,4]<=[8]", ("fsdp",), None),
        ("[4,2]<=[2,4]T(1,0)", ("data",), None),
        ("[1,8]<=[8]", ("data", "fsdp"), None),
        ("[4,2]<=[8]", ("fsdp",), (2, True)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",), (2, False)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), None),
    ],
)
def test_groups_in_short_are_those_of_their_axes(groups, axes, subgroup):
    """An iota is arranged, turned round, and cut: [2,4]T(1,0) is 0 4 1 5 2 6 3 7."""
    text = GPU.replace("[2,4]<=[8]", groups)
    found = collectives(hlo.parse_hlo(text), MESH)[0]
    assert (found.axes, found.subgroup) == (axes, subgroup)


def test_a_gather_that_starts_early_overlaps_the_loop():
    gather, total = collectives(hlo.parse_hlo(GPU), MESH)
    assert (gather.kind, gather.axes, gather.count, gather.arrays) == (
        "all-gather",
        ("fsdp",),
        1,
        1,
    )
    assert gather.num_bytes == 2 * 256 * 256
    assert gather.asynchronous
    assert gather.overlapped_flops == 3 * 2 * 128 * 256 * 256
    assert (total.kind, total.axes, total.asynchronous) == ("all-reduce", ("data",), False)
    assert total.overlapped_flops == 0


def test_a_reduce_scatter_on_the_sparse_cores_overlaps_the_loop():
    (scatter,) = collectives(hlo.parse_hlo(SPARSE_CORE), MESH)
    assert (scatter.kind, scatter.asked) == ("reduce-scatter", "reduce-scatter")
    assert scatter.axes == ("fsdp",)
    assert scatter.num_bytes == 4 * 256 * 256
    assert scatter.asynchronous
    assert scatter.overlapped_flops == 3 * 2 * 128 * 256 * 256
    assert scatter.computation == "main"


def test_the_pieces_of_a_gather_are_one():
    (gather,) = collectives(hlo.parse_hlo(PIECES), MESH)
    assert gather.count == 1
    assert gather.asynchronous
    assert gather.overlapped_flops == 2 * 128 * 128 * 256


def test_cycles_are_summed_without_what_the_compiler_does_not_know():
    program = hlo.parse_hlo(PIECES)
    assert computation_costs(program, instruction_cycles)["main"] == 1000


def test_matmuls_of_8_bits_are_told_from_others():
    """Of a matmul of each type as XLA and cuBLAS have it, a kernel of `ragged_dot` after the table
    of its groups, and one of attention after the tables of its mask, which are of 8 bits."""
    program = hlo.parse_hlo("""
ENTRY %main (a: s8[64,32], b: f8e5m2[64,32], c: f8e4m3fn[32,16], q: bf16[2,64,32]) -> bf16[64,16] {
  %a = s8[64,32] parameter(0)
  %b = f8e5m2[64,32] parameter(1)
  %c = f8e4m3fn[32,16] parameter(2)
  %q = bf16[2,64,32] parameter(3)
  %w = bf16[32,16] parameter(4)
  %e = s8[2,32,16] parameter(5)
  %t = s32[2] parameter(6)
  %v = bf16[2,64,16] parameter(7)
  %one = bf16[64,16] dot(%b, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %two = bf16[64,16] dot(%b, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %three = (bf16[64,16], s8[4]) custom-call(%b, %c), custom_call_target="__cublas$lt$matmul$f8", backend_config={"lhs_contracting_dimensions":["1"]}
  %four = s32[64,16] custom-call(%t, %a, %e), custom_call_target="tpu_custom_call", frontend_attributes={ragged_dot_tiling="64,32,16"}, backend_config={"cost_estimate":{"flops":"65536"}}
  %splash_mha_fwd.1 = bf16[2,64,32] custom-call(%a, %a, %q, %q, %v), custom_call_target="tpu_custom_call"
  %five = bf16[2,64,32] custom-call(%t, %q, %q, %v), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/transpose(jvp(splash_query_gradients_whole))/pallas_call"}
  ROOT %r = bf16[64,16] add(%one, %two)
}
""")  # noqa: E501
    matmul, pairs = 2 * 64 * 32 * 16, 2 * 2 * 64 * 64
    attention = 0.5 * pairs * (32 + 16) + pairs * (2 * 32 + 16)
    each = [computation_costs(program, own)["main"] for own in (instruction_flops, narrow_flops)]
    assert each == [4 * matmul + attention, 3 * matmul]


def test_a_mesh_that_the_program_is_not_for_is_refused():
    with pytest.raises(ValueError, match="runs on device 7 and the mesh"):
        collectives(hlo.parse_hlo(GPU), {"fsdp": 4})


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse_hlo("HloModule m\n")


@pytest.mark.parametrize(
    ("window", "left", "right", "labels", "result", "expected"),
    [
        # A matmul as a convolution without a window.
        ("", "128,256", "256,64", "bf_io->bf", "128,64", 2 * 128 * 256 * 64),
        # Eight matmuls at once: each sees its own operand and padding.
        (
            "window={size=8 pad=0_0 stride=7 lhs_dilate=8}",
            "8,128,32",
            "8,32,64",
            "0bf_0io->0bf",
            "8,128,64",
            8 * 2 * 128 * 32 * 64,
        ),
        # Five places of a window of three over four elements, padded by one on each side.
        ("window={size=3 pad=1_1}", "4,1,1", "3,1,1", "0bf_0io->0bf", "4,1,1", 2 * 10),
    ],
)
def test_matmuls_written_as_convolutions(window, left, right, labels, result, expected):
    text = f"""
ENTRY %main (a: bf16[{left}], b: bf16[{right}]) -> bf16[{result}] {{
  %a = bf16[{left}] parameter(0)
  %b = bf16[{right}] parameter(1)
  ROOT %c = bf16[{result}] convolution(%a, %b), {window}, dim_labels={labels}
}}
"""
    assert computation_costs(hlo.parse_hlo(text), instruction_flops)["main"] == expected


@pytest.fixture(scope="module")
def compiled():
    """Eight layers over eight devices, their weights gathered one by one, on the CPU."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(weights, x):
        def layer(x, shard):
            weight = jax.lax.all_gather(shard, "fsdp", tiled=True)
            return jnp.tanh(x @ weight), None

        return jax.lax.scan(layer, x, weights)[0]

    spec = PartitionSpec(None, "fsdp")
    function = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    weights = jax.ShapeDtypeStruct((8, 256, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    return jax.jit(function).lower(weights, x).compile()


@pytest.mark.compiles
def test_a_compiled_loop_of_gathers(compiled):
    program = hlo.parse_hlo(compiled.as_text())
    (row,) = summed(collectives(program, {"fsdp": 8}))
    assert (row.kind, row.count, row.num_bytes) == ("all-gather", 8, 8 * 4 * 256 * 256)


@pytest.mark.compiles
def test_matmuls_of_a_compiled_loop(compiled):
    program = hlo.parse_hlo(compiled.as_text())
    counted = computation_costs(program, instruction_flops)[program.entry]
    # The CPU may call a library for a matmul; it is a `dot` or a call of that name.
    assert counted in (8 * 2 * 64 * 256 * 256, 0)
    assert not math.isnan(counted)


@pytest.mark.compiles
def test_memory_of_a_compiled_loop(compiled):
    buffers = live_at_peak(hlo.parse_hlo(compiled.as_text()))
    memory = compiled.memory_analysis()
    arguments = sum(buffer.num_bytes for buffer in buffers if buffer.argument)
    temporaries = sum(buffer.num_bytes for buffer in buffers if not buffer.argument)
    assert arguments == pytest.approx(memory.argument_size_in_bytes, rel=0.01)
    most = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert 0.6 * most < temporaries < 1.4 * most


READ_ONCE = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %one = f32[100]{0} fusion(%a), kind=kLoop, calls=%none
  %two = f32[200]{0} fusion(%one), kind=kLoop, calls=%none
  %three = f32[20]{0} fusion(%two), kind=kLoop, calls=%none
  ROOT %out = f32[8]{0} fusion(%three), kind=kLoop, calls=%none
}
"""


def test_an_array_lives_from_who_makes_it_to_its_last_reader():
    """The reader needs it while it makes its own, and nobody later."""
    alive = [buffer.shape for buffer in live_at_peak(hlo.parse_hlo(READ_ONCE))]
    assert alive == ["f32[200]", "f32[100]", "f32[8]"]


TAKEN_LATE = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %both = (f32[50], f32[100]) fusion(%a), kind=kLoop, calls=%none
  %large = f32[100]{0} get-tuple-element(%both), index=1
  %two = f32[200]{0} fusion(%large), kind=kLoop, calls=%none
  %three = f32[300]{0} fusion(%two), kind=kLoop, calls=%none
  %small = f32[50]{0} get-tuple-element(%both), index=0
  ROOT %out = f32[8]{0} fusion(%three, %small), kind=kLoop, calls=%none
}
"""


def test_a_part_of_a_tuple_that_is_taken_late_keeps_no_other_part():
    alive = [buffer.shape for buffer in live_at_peak(hlo.parse_hlo(TAKEN_LATE))]
    assert alive == ["f32[300]", "f32[200]", "f32[50]", "f32[8]"]


NESTED = """
%body (p: ((f32[64]), (), s32[], f32[32])) -> ((f32[64]), (), s32[], f32[32]) {
  %p = ((f32[64]{0}), (), s32[], f32[32]{0}) parameter(0)
  %pair = (f32[64]{0}) get-tuple-element(%p), index=0
  %x = f32[64]{0} get-tuple-element(%pair), index=0
  %i = s32[] get-tuple-element(%p), index=2
  %y = f32[32]{0} get-tuple-element(%p), index=3
  %nothing = () get-tuple-element(%p), index=1
  %twice = f32[128]{0} fusion(%x), kind=kLoop, calls=%condition
  %z = f32[32]{0} fusion(%twice, %y), kind=kLoop, calls=%condition
  ROOT %r = ((f32[64]{0}), (), s32[], f32[32]{0}) tuple(%pair, %nothing, %i, %z)
}

%condition (p: ((f32[64]), (), s32[], f32[32])) -> pred[] {
  %p = ((f32[64]{0}), (), s32[], f32[32]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=2
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[64], b: f32[32]) -> f32[32] {
  %a = f32[64]{0} parameter(0)
  %b = f32[32]{0} parameter(1)
  %zero = s32[] constant(0)
  %nothing = () tuple()
  %pair = (f32[64]{0}) tuple(%a)
  %start = ((f32[64]{0}), (), s32[], f32[32]{0}) tuple(%pair, %nothing, %zero, %b)
  %loop = ((f32[64]{0}), (), s32[], f32[32]{0}) while(%start), condition=%condition, body=%body
  ROOT %out = f32[32]{0} get-tuple-element(%loop), index=3
}
"""


def test_memory_of_tuples_in_tuples():
    """A part of a tuple may be a tuple, an empty one too: both count as one part."""
    buffers = live_at_peak(hlo.parse_hlo(NESTED))
    alive = sorted(buffer.shape for buffer in buffers if buffer.num_bytes > 4)
    assert alive == ["f32[128]", "f32[32]", "f32[64]"]
