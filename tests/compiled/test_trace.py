"""Traces by cause. Those of GPUs and TPUs are written by hand in the form that their profilers give
them; a CPU's own is in tests/test_train.py."""

import textwrap

import pytest
from jax.profiler import ProfileData

from jaxscale.compiled.trace import CAUSES, longest_operations, time_by_cause, trace_line

pytestmark = pytest.mark.compiles

PROGRAM = """HloModule jit_step, is_scheduled=true

%fused_dot (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  ROOT %d = bf16[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_scores (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  ROOT %d = bf16[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%gathering (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  ROOT %g = bf16[8,8]{1,0} all-gather(%a), dimensions={0}
}

ENTRY %main (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %fusion.1 = bf16[8,8]{1,0} fusion(%a), kind=kCustom, calls=%fused_dot
  %fusion.2 = bf16[8,8]{1,0} fusion(%fusion.1), kind=kLoop, calls=%fused_scores, \
metadata={op_name="jit(step)/jvp(attention)/attention_kernel/dot_general"}
  %fmha.3 = bf16[8,8]{1,0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"
  %all-reduce.4 = bf16[8,8]{1,0} all-reduce(%fusion.2), to_apply=%sum
  %permute.5 = bf16[8,8]{1,0} collective-permute(%a), \
metadata={op_name="jit(step)/jvp(attention)/attention_kernel/ppermute"}
  %start.6 = bf16[8,8]{1,0} async-start(%a), calls=%gathering
  %grouped.8 = bf16[8,8]{1,0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(step)/jvp(mlp)/grouped_rows_64/pallas_call"}
  ROOT %add.7 = bf16[8,8]{1,0} add(%all-reduce.4, %a)
}
"""


def trace(plane, lines, stat="hlo_op"):
    """A trace of {line: [(event, instruction or "", begin, end in microseconds)]}."""
    events = [event for each in lines.values() for event in each]
    names = {name: i for i, name in enumerate(dict.fromkeys(event[0] for event in events), 1)}
    text = (
        f'planes {{ name: "{plane}"\nstat_metadata {{ key: 1 value {{ id: 1 name: "{stat}" }} }}\n'
    )
    for name, i in names.items():
        text += f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}\n'
    for name, each in lines.items():
        text += f'lines {{ name: "{name}"\n'
        for event, operation, begin, end in each:
            known = f'stats {{ metadata_id: 1 str_value: "{operation}" }}' if operation else ""
            text += (
                f"events {{ metadata_id: {names[event]} offset_ps: {begin * 1_000_000} "
                f"duration_ps: {(end - begin) * 1_000_000} {known} }}\n"
            )
        text += "}\n"
    return ProfileData.from_serialized_xspace(
        ProfileData.text_proto_to_serialized_xspace(textwrap.dedent(text + "}"))
    )


def microseconds(one):
    return {cause: round(spent * 1e6, 3) for cause, spent in one.seconds_by_cause.items()}


def test_collectives_of_a_gpu_count_while_no_stream_computes():
    lines = {
        "Stream #7(Compute)": [
            ("nvjet_tst_128x256", "fusion.1", 0, 10),
            ("triton_scores", "fusion.2", 10, 14),
            ("cudnn_fmha", "fmha.3", 14, 20),
            ("loop_add_fusion", "add.7", 30, 35),
        ],
        "Stream #8(Collectives)": [
            ("ncclDevKernel_AllReduce", "all-reduce.4", 5, 24),
            ("ncclDevKernel_SendRecv", "permute.5", 34, 36),
            ("ncclDevKernel_AllGather", "start.6", 36, 38),
        ],
        "Steps": [("1", "", 0, 99)],
    }
    (one,) = time_by_cause(trace("/device:GPU:3", lines), PROGRAM)
    assert one.device == "GPU:3"
    assert microseconds(one) == {
        "attention": 10,
        "matmul": 10,
        "other": 5,
        "collectives": 4 + 1 + 2,
        "idle": 6,
    }
    assert one.seconds == pytest.approx(38e-6)
    assert sum(one.seconds_by_cause.values()) == pytest.approx(one.seconds)
    assert one.collective_seconds == pytest.approx(23e-6)
    assert trace_line([one], 2).startswith("1.9e-05 s a step on 1 device: attention 26.3%")
    assert "exposed collectives 18.4% (of 60.5% in flight), idle 15.8%" in trace_line([one], 2)


def test_the_longest_operations_of_a_graph_have_the_names_of_their_kernels():
    kernels = [("nvjet_tst", "command_buffer", begin, begin + 4) for begin in (0, 10)]
    others = [("y", "add.7", 14, 15), ("z", "grouped.8", 15, 18)]
    lines = {"Stream #7(Compute)": [("x", "fusion.1", 4, 10), *kernels, *others]}
    found = longest_operations(trace("/device:GPU:0", lines), PROGRAM, 3)
    named = [(one.operation, one.cause, one.runs) for one in found]
    assert named == [
        ("nvjet_tst", "matmul", 2),
        ("fusion.1", "matmul", 1),
        ("grouped.8", "matmul", 1),
    ]
    assert [one.seconds for one in found] == pytest.approx([8e-6, 6e-6, 3e-6])


def test_operations_of_a_tpu_are_named_by_their_text():
    lines = {
        "XLA Ops": [
            ("%while.9 = (s32[]) while(%x)", "", 0, 100),
            ("%fusion.1 = bf16[8,8] fusion(%a), calls=%fused_dot", "", 0, 40),
            ("%fusion.2 = bf16[8,8] fusion(%fusion.1)", "", 40, 50),
            ("%all-gather-done.2 = bf16[8,8] all-gather-done(%s)", "", 50, 70),
            ("%splash_mha_fwd.1 = bf16[8,8] custom-call(%a)", "", 70, 80),
        ],
        "Async XLA Ops": [("%all-gather-start.2 = bf16[8,8] all-gather-start(%a)", "", 10, 65)],
        "XLA Modules": [("jit_step(1)", "", 0, 100)],
    }
    (one,) = time_by_cause(trace("/device:TPU:0", lines), PROGRAM)
    expected = {"attention": 20, "matmul": 40, "other": 0, "collectives": 20, "idle": 0}
    assert microseconds(one) == expected
    assert one.collective_seconds == pytest.approx(60e-6)


@pytest.mark.parametrize(
    ("kernel", "cause"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm>", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("grouped_weights_131072", "matmul"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "collectives"),
        ("MemcpyH2D", "other"),
        ("input_reduce_fusion", "other"),
    ],
)
def test_kernels_of_other_programs_are_known_by_their_names(kernel, cause):
    found = trace("/device:GPU:0", {"Stream #1": [(kernel, "", 3, 5)]})
    (one,) = time_by_cause(found, PROGRAM)
    assert microseconds(one) == {**dict.fromkeys(CAUSES, 0), cause: 2}


def test_no_operation_is_no_device():
    found = trace("/host:CPU", {"python": [("fit", "", 0, 5)]})
    assert time_by_cause(found, PROGRAM) == []
    assert trace_line([], 1).startswith("0 s a step on 0 devices")
