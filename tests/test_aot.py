"""The step compiled for absent machines: its memory, its collectives, its verdict.

Skipped only where the compilers, packages of the extra `aot`, are not installed.
"""

import functools
import json
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import pytest

from jaxscale import aot
from jaxscale.compiled import compile_ahead, hlo, topology
from jaxscale.compiled.collectives import collectives
from jaxscale.compiled.compile_ahead import CompileReport, compile_for
from jaxscale.compiled.flops import (
    FLASH_MATMULS,
    GROUPED_KERNEL,
    computation_costs,
    instruction_flops,
)
from jaxscale.config import from_dict
from jaxscale.training.kernels import ATTENTION_SCOPE
from jaxscale.training.layers import loop_form
from jaxscale.training.layers.layer_scan import ONE_LAYER
from jaxscale.training.tracing.traces import model_trace, model_work
from tools.bench.bytes_moved import updates_in_place

# Which attention on GPUs is written for.
pytestmark = [
    pytest.mark.compiles,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

LAYERS, ARRAYS = 4, 9  # of a layer: seven matrices and two norms
OUTER = 3  # embedding, last norm, head
MICROBATCHES = 4
MODEL = {
    "num_layers": LAYERS,
    "d_model": 256,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 128,
    "d_ff": 1024,
    "vocab_size": 512,
    "compute_dtype": "bfloat16",
}
LARGE = MODEL | {"d_model": 2048, "num_heads": 16, "num_kv_heads": 16, "d_ff": 8192}
MODELS = {"tpu": MODEL, "gpu": LARGE}
EXPERTS = MODEL | {"family": "mixtral", "num_layers": 1, "num_experts": 4, "experts_per_token": 2}
PLATFORMS = {
    "v5p:2x2x1": "tpu",
    "v5e:2x2": "tpu",
    "v5e:1x1": "tpu",
    "h200:1x4": "gpu",
    "h200:1x1": "gpu",
}


@functools.cache
def compiled(
    name: str, accumulation: str = "sequential", microbatches: int = 1, **model
) -> CompileReport:
    """A ZeRO-3 step over four devices."""
    settings = {"fsdp": -1, "accumulation": accumulation, "microbatches": microbatches}
    return compiled_model(name, MODELS[PLATFORMS[name]] | model, settings)


def compiled_model(
    name: str, model: dict, layout: dict, data: Mapping[str, Any] = types.MappingProxyType({})
) -> CompileReport:
    """A step over four devices."""
    if not topology.compiler_installed(PLATFORMS[name]):
        pytest.skip(f"no compiler for {PLATFORMS[name]}s: uv sync --inexact --extra aot")
    config = from_dict(
        {
            "model": model,
            "data": {"global_batch_size": 16, "seq_len": 256, **data},
            "layout": {"data": 1, "remat": "full", **layout},
        }
    )
    # The suite runs in float64 and a run does not: TPU kernels know 32 bits only.
    jax.config.update("jax_enable_x64", False)
    try:
        return compile_for(config, name)
    finally:
        jax.config.update("jax_enable_x64", True)


def arrays(report: CompileReport, *asked: str) -> float:
    """How many arrays go through the collectives that a program asked for, in a step."""
    return sum(one.arrays for one in report.collectives if one.asked in asked)


@pytest.mark.proof
@pytest.mark.parametrize("name", ["v5p:2x2x1", "h200:1x4"])
def test_arguments_are_the_shards_of_the_state_and_the_batch(name):
    report = compiled(name, "layered", MICROBATCHES)
    num_params = model_trace(from_dict({"model": MODELS[PLATFORMS[name]]}).model).num_params
    state = 3 * 4 * num_params / 4  # parameters and two moments in float32, a quarter of each
    batch = 5 * 4 * 16 * 256 / 4
    # Norms are padded on TPUs.
    assert report.argument_bytes == pytest.approx(state + batch, rel=0.01)
    assert report.alias_bytes == pytest.approx(state, rel=0.01)
    assert report.fits
    assert report.peak_bytes < report.limit_bytes
    assert report.devices == 4


@pytest.mark.proof
@pytest.mark.parametrize("name", ["v5p:2x2x1", "h200:1x4"])
def test_layered_accumulation_gathers_a_layer_once_a_pass(name):
    """For any number of micro-batches; the last layer's backward pass reuses its weights."""
    report = compiled(name, "layered", MICROBATCHES)
    assert arrays(report, "all-gather") == (2 * LAYERS - 1) * ARRAYS + OUTER
    assert {one.axes for one in report.collectives if one.asked == "all-gather"} == {("fsdp",)}


@pytest.mark.proof
@pytest.mark.parametrize("name", ["v5p:2x2x1", "h200:1x4"])
def test_rows_of_the_embedding_are_summed_in_float32(name):
    """Whatever computes: here bfloat16."""
    program = compiled(name, "layered", MICROBATCHES).program
    scatters = re.findall(r"= \(?(\w+)\[[\d,]*\]\S* scatter\(", program)
    assert set(scatters) == {"f32"}, scatters


@pytest.mark.proof
@pytest.mark.parametrize("name", ["v5p:2x2x1", "h200:1x4"])
def test_the_collectives_of_a_layer_run_beside_one(name):
    """The gather of the next layer's weights and the reduction of the last one's gradients."""
    report = compiled(name, "layered", MICROBATCHES)
    hidden = [one for one in report.collectives if one.asynchronous and one.overlapped_flops > 0]
    assert {"all-gather", "reduce-scatter"} <= {one.asked for one in hidden}


@pytest.mark.proof
def test_the_weights_of_a_large_layer_travel_together_and_so_do_its_gradients():
    """XLA for GPUs by itself does not combine results of more than 30 MB, and had four collectives
    in flight: three of the four reduce-scatters of a layer of Llama 3 8B overlapped nothing."""
    report = compiled("h200:1x4", "layered", MICROBATCHES)
    found = collectives(hlo.parse_hlo(report.program), {"fsdp": 4})
    loops = [one for one in found if one.num_bytes > 1e6 and one.count > 1]
    assert {one.arrays for one in loops} == {ARRAYS}
    # The first and the last layer are outside of loops, forward one of them, backward both.
    runs = sorted((one.kind, one.count) for one in loops)
    assert runs == [
        ("all-gather", LAYERS - 2),
        ("all-gather", LAYERS - 1),
        ("reduce-scatter", LAYERS - 2),
    ]


@pytest.mark.proof
def test_gradients_of_a_layer_are_added_in_place():
    """At an index that it knows, XLA for GPUs would read and write the gradients of all layers: 8B
    with unrolled layers took 4.7 s in place of 3.0. And below ZeRO stage 3 no micro-batch casts a
    matrix."""
    layout = {"unroll_layers": True, "microbatches": 2, "zero_stage": 2}
    model = MODEL | {"num_layers": 2, "attention": "blockwise"}
    report = compiled_model("h200:1x1", model, layout)
    program = hlo.parse_hlo(report.program)
    fused = {
        instruction.attribute(r"calls=%?([\w.\-]+)")
        for instructions in program.computations.values()
        for instruction in instructions
        if instruction.opcode == "fusion"
    }
    kernels = [program.computations[name] for name in fused]
    adding = [
        updates_in_place(kernel[-1], kernel)
        for kernel in kernels
        if kernel[-1].opcode == "dynamic-update-slice" and kernel[-1].shape.startswith("f32[2,")
    ]
    assert len(adding) >= 2 * ARRAYS
    assert all(adding)
    assert "__cublas$lt$matmul" in report.program, "which adds to the stream as it writes"
    matrices = [f"bf16[1,{shape}]" for shape in ("256,8,128", "8,128,256", "256,1024", "1024,256")]
    casts = [
        (name, hlo.arrays(one.shape))
        for name, instructions in program.computations.items()
        for one in instructions
        if one.opcode == "fusion" and any(shape in one.shape for shape in matrices)
    ]
    assert {name for name, _ in casts} == {program.entry}
    assert sum(len(made) for _, made in casts) == 2 * 7


@functools.cache
def compiled_experts(name: str) -> CompileReport:
    """A step with experts on four ranks, and exchanges of half of the tokens at a time."""
    return compiled_model(name, EXPERTS, {"expert": -1, "overlap_experts": True})


@pytest.mark.proof
@pytest.mark.parametrize("name", ["h200:1x4", pytest.param("v5p:2x2x1", marks=pytest.mark.slow)])
def test_half_of_the_tokens_travel_beside_the_experts_of_the_other_half(name):
    """Of each half's two all-to-alls, one overlaps with matmuls, in both passes: the
    first half's, and the last half's, which nothing of the layer comes before or after, have not.
    In one piece the forward pass overlaps nothing."""
    report = compiled_experts(name)
    found = collectives(hlo.parse_hlo(report.program), {"expert": 4})
    rows = EXPERTS["d_model"] * 2 * (16 // 4 // 2) * 256 * 2  # bytes of a half's choices
    sent = sorted(
        (one.first, one.overlapped_flops > 0)
        for one in found
        if one.kind == "ragged-all-to-all" and one.num_bytes >= rows
    )
    beside = [overlapped for _, overlapped in sent]
    assert sum(beside[:4]) >= 2
    assert sum(beside[-4:]) >= 2
    assert len(beside) >= 8
    assert sum(beside) / len(beside) > 0.5


@pytest.mark.proof
def test_experts_on_gpus_wait_for_no_host():
    """Their matmuls are kernels, not loops over blocks with a dynamic trip count, and count their
    FLOPs: of two choices of each token, three matrices, forward and both gradients, and again the
    two of the hidden features, which are recomputed."""
    report = compiled_experts("h200:1x4")
    program = hlo.parse_hlo(report.program)
    loops = [line for line in report.program.splitlines() if " while(" in line]
    assert loops
    assert all("known_trip_count" in line for line in loops)

    def of_kernels(instruction: hlo.Instruction, named: Mapping) -> float | None:
        flops = instruction_flops(instruction, named)
        is_kernel = GROUPED_KERNEL.search(instruction.op_name)
        return flops if is_kernel or flops is None else 0.0

    found = computation_costs(program, of_kernels)[program.entry]
    matrix = 2.0 * EXPERTS["d_model"] * EXPERTS["d_ff"]
    assert found == (3 * 3 + 2) * matrix * 2 * 16 / 4 * 256


LATENT = EXPERTS | {"family": "deepseek_v3", "num_layers": 2, "dense_layers": 1, "num_experts": 16}
LATENT |= {"head_dim": 192, "rope_head_dim": 64, "value_head_dim": 128, "kv_rank": 64}
LATENT |= {"expert_d_ff": 256}
T5 = MODEL | {"family": "mt5", "num_layers": 2, "num_encoder_layers": 2, "head_dim": 64}
PAIRED = {"objective": "span_corruption", "target_len": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "context", "data"),
    [(MODEL, 1, {}), (MODEL, 2, {}), (T5, 1, PAIRED), (T5, 2, PAIRED), (LATENT, 1, {})],
    ids=["llama", "llama, context", "mt5", "mt5, context", "deepseek_v3"],
)
def test_attention_on_gpus_waits_for_no_host(model, context, data):
    """A loop whose trip count the compiler does not know asks the host in every iteration."""
    layout = {"fsdp": -1, "context": context}
    report = compiled_model("h200:1x4", model, layout, data)
    assert report.attention.startswith("flash")
    kernels = re.findall(r"/(flash_\w+)/pallas_call", report.program)
    assert {name.removesuffix("_whole") for name in kernels} == set(FLASH_MATMULS)
    loops = [line for line in report.program.splitlines() if " while(" in line]
    assert loops
    if model is LATENT:  # The matmuls of experts are loops over blocks of rows.
        loops = [line for line in loops if ATTENTION_SCOPE in line]
    assert all("known_trip_count" in line or f"{ONE_LAYER}/while" in line for line in loops)


@pytest.mark.proof
def test_residuals_of_all_microbatches_lie_in_arrays_that_nothing_fills_or_copies():
    """On GPUs XLA would fill new ones with zeros and copy them, in every pass."""
    layout = {"data": 4, "fsdp": 1, "zero_stage": 0, "microbatches": MICROBATCHES}
    report = compiled_model("h200:1x4", MODEL | {"attention": "blockwise"}, layout)
    program = hlo.parse_hlo(report.program)
    stream = f"bf16[{LAYERS},1,1,256,256]"  # what enters each layer
    made = [
        one
        for instructions in program.computations.values()
        for one in instructions
        if stream in one.shape and one.opcode in ("copy", "custom-call", "fusion")
    ]
    assert not [one.name for one in made if one.opcode == "copy" or "broadcast" in one.name]
    assert sum("AllocateBuffer" in one.rest for one in made) == 1


@pytest.mark.proof
def test_heads_are_turned_by_a_kernel():
    """In each pass, queries and keys; the top layer is outside the loop, forward and backward,
    the bottom one backward."""
    report = compiled("v5p:2x2x1", "layered", MICROBATCHES)
    kernels = re.findall(r"= \S+ custom-call\(.*/rotary/pallas_call", report.program)
    forward, backward, repeated = 2, 3, 3
    assert len(kernels) == 2 * (forward + backward + repeated)


def instructions(report: CompileReport, of: str) -> Sequence[hlo.Instruction]:
    """Of the entry, or of the loop over layers that this pass goes through."""
    program = hlo.parse_hlo(report.program)
    entry = program.computations[program.entry]
    if of == "entry":
        return entry
    # Of several loops only those over layers hold a pass of the whole block.
    bodies = [
        program.computations[name]
        for one in entry
        if one.opcode == "while"
        for name, _ in program.calls(one)
    ]
    (body,) = (body for body in bodies if any(of in one.op_name for one in body))
    return body


def places(found: Sequence[hlo.Instruction], opcode: str, word: str) -> list[int]:
    """Where instructions with a word in their name stand."""
    return [i for i, x in enumerate(found) if x.opcode.endswith(opcode) and word in x.name]


@pytest.mark.proof
def test_the_gradients_of_the_head_are_reduced_before_those_of_layers_are_computed_on_tpus():
    """Whole, in float32, they would be there until all layers are done."""
    entry = instructions(compiled("v5p:2x2x1", "layered", MICROBATCHES), "entry")
    shard = f"f32[1,{MODEL['d_model'] // 4},{MODEL['vocab_size']}]"
    head = [i for i in places(entry, "-done", "reduce-scatter") if shard in entry[i].shape]
    backward = places(entry, "while", "")[-1]
    assert len(head) == 2, "the embedding's has the same form, and comes last"
    assert head[0] < backward < head[1]


@pytest.mark.slow
def test_a_layers_gradients_are_reduced_while_the_one_below_is_recomputed_on_tpus(monkeypatch):
    """They would be there, in float32, while the others are computed."""
    monkeypatch.setattr(loop_form, "HIDING_TOKENS", 1)
    body = instructions(compiled("v5p:2x2x1"), "transpose(jvp(")
    reduced = places(body, "-done", "reduce-scatter")
    matmuls = [(i, x.op_name) for i, x in enumerate(body) if "/mlp/dot_general" in x.op_name]
    again = [i for i, name in matmuls if "/rematted_computation/" in name]
    own = [i for i, name in matmuls if "/rematted_computation/" not in name]
    assert len(reduced) == 7
    assert min(again) < max(reduced) < min(own)


@pytest.mark.proof
def test_products_are_those_of_the_model():
    """With loops multiplied out; the attention of this size has loops, too, so only its
    lower bound is known."""
    config = from_dict({"model": MODEL}).model
    report = compiled("v5p:2x2x1", "layered", MICROBATCHES)
    tokens = 16 * 256 / 4
    if report.flops is not None:
        matrices = model_work(config, 256, 256).hardware_flops("full") / 256 * tokens
        assert report.flops == pytest.approx(matrices, rel=0.1)
    assert report.optimal_seconds is None or report.optimal_seconds > 0


def test_what_does_not_fit_is_a_verdict_with_what_was_needed(monkeypatch, tmp_path, capsys):
    wide = {"d_model": 8192, "d_ff": 32768, "num_heads": 64, "num_kv_heads": 64}
    report = compiled("v5e:1x1", **wide)
    assert not report.fits
    assert report.missing_bytes > 10e9
    assert report.limit_bytes == pytest.approx(15.75 * 2**30, rel=1e-3)
    assert report.peak_bytes == report.limit_bytes + report.missing_bytes
    numbers = json.loads(json.dumps(aot.numbers(report)))
    assert numbers["fits"] is False
    assert numbers["optimal_seconds"] is None
    monkeypatch.setattr(compile_ahead, "compile_for", lambda *_, **__: report)
    kept = tmp_path / "program.txt"
    assert aot.main(["--config", "tiny", "--topology", "v5e:1x1", "--hlo", str(kept)]) == 0
    printed = capsys.readouterr().out
    assert "does not fit, by" in printed
    assert f"{kept} is not written: the compiler refused the step" in printed
    assert not kept.exists()


@pytest.mark.proof
def test_the_command_prints_and_writes(tmp_path, capsys):
    if not topology.compiler_installed("gpu"):
        pytest.skip("no compiler for GPUs: uv sync --inexact --extra aot")
    written, kept = tmp_path / "report.json", tmp_path / "program.txt"
    status = aot.main(
        [
            "--config",
            "configs/tiny.py",
            "--topology",
            "a100-40:1x4",
            "--json",
            str(written),
            "--hlo",
            str(kept),
            "--config.model.compute_dtype=bfloat16",
            "--config.model.attention=blockwise",
            "--config.layout.tensor=4",
            "--config.layout.overlap_tensor=True",
            "--config.layout.remat=full",
        ]
    )
    assert status == 0
    printed = capsys.readouterr().out
    assert "a100-40:1x4: 4 devices, tensor 4" in printed
    assert "collectives of a step" in printed
    numbers = json.loads(written.read_text())
    assert numbers["devices"] == 4
    assert numbers["peak_bytes"] < numbers["limit_bytes"]
    assert math.isclose(
        sum(one["bytes"] > 0 for one in numbers["collectives"]), len(numbers["collectives"])
    )
    assert "ENTRY" in kept.read_text()
    check_ring(numbers["collectives"], rings=2 * 11, sent=3 * 8 * 64 // 4 * 64)


def test_offloading_is_refused_for_absent_gpus_with_the_settings_that_ask_for_it(capsys):
    if not topology.compiler_installed("gpu"):
        pytest.skip("no compiler for GPUs: uv sync --inexact --extra aot")
    words = ["--config", "configs/tiny.py", "--topology", "h100:1x1"]
    with pytest.raises(SystemExit):
        aot.main([*words, "--config.layout.offload=optimizer"])
    assert capsys.readouterr().err.strip() == (
        "error: layout.offload = 'optimizer': JAX cannot compile offloading for absent gpu "
        "devices; set layout.offload = 'none'"
    )
    with pytest.raises(SystemExit):
        aot.main([*words, "--config.layout.remat=offload:mlp_up"])
    assert "devices; set layout.remat = 'full' or another" in capsys.readouterr().err


def check_ring(found: Sequence[Mapping[str, Any]], rings: int, sent: int) -> None:
    """Every step of every ring overlaps with matmuls. A layer has four rings forward, repeats the
    first three, and has four backward, in each of which a rank sends `sent` numbers."""
    steps = [one for one in found if one["kind"] == "collective-permute"]
    assert sum(one["bytes"] for one in steps) == rings * sent * 2
    assert all(one["beside_flops"] > 0 for one in steps)


@pytest.mark.slow
def test_ring_steps_run_beside_matmuls_on_tpus():
    report = compiled_model("v5p:2x2x1", MODEL, {"tensor": 4, "overlap_tensor": True})
    rings, sent = LAYERS * 11, 3 * 16 * 256 // 4 * MODEL["d_model"]
    check_ring(aot.numbers(report)["collectives"], rings, sent)


def test_an_unknown_machine_is_refused_with_those_that_are_known(capsys):
    with pytest.raises(SystemExit):
        aot.main(["--config", "configs/tiny.py", "--topology", "h2000:8x8"])
    message = capsys.readouterr().err
    sentence = "error: topology 'h2000:8x8' is not known; did you mean 'h200'? There are TPUs "
    assert message.startswith(sentence)
    assert "v5p:8x8x8" in message


@pytest.mark.parametrize("flag", ["--hlo", "--json"])
def test_files_that_cannot_be_written_are_refused_before_it_is_compiled(flag, capsys):
    with pytest.raises(SystemExit):
        aot.main(["--config", "tiny", "--topology", "v5p:2x2x1", flag, "/nonexistent/x"])
    assert f"argument {flag}: /nonexistent/x: there is no folder /nonexistent" in (
        capsys.readouterr().err
    )


def test_a_step_that_cannot_fit_is_refused_before_it_is_compiled(monkeypatch, capsys):
    if not topology.compiler_installed("tpu"):
        pytest.skip("no compiler for TPUs: uv sync --inexact --extra aot")
    monkeypatch.setattr(compile_ahead, "compile_for", None)
    with pytest.raises(SystemExit):
        aot.main(["--config", "configs/llama3_8b.py", "--topology", "v5e:2x4"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "a program may use 16.9" in said
    assert "--skip_memory_check" in said
