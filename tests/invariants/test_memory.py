"""The memory of compiled steps is what the planner's formulas say."""

import math

import jax
import pytest

from jaxscale.config import Config, from_dict
from jaxscale.planner.memory.step import step_memory
from jaxscale.training.engine import Engine
from tests.invariants.layouts import open_engine

pytestmark = pytest.mark.compiles

LLAMA = {
    "num_layers": 6,
    "d_model": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 48,
    "d_ff": 320,
    "vocab_size": 384,
    "compute_dtype": "float32",
}
GPT = LLAMA | {"family": "gpt", "tied_embeddings": True, "max_seq_len": 64}
INTERLEAVED = {
    "pipeline": 2,
    "fsdp": 2,
    "tensor": 2,
    "microbatches": 4,
    "schedule": "interleaved",
    "virtual_stages": 2,
    "remat": "full",
}
LAYERED = {"microbatches": 4, "accumulation": "layered"}
QKVA = "query,key,value,attention"


def case(layout: dict, sequences: int = 16, seq_len: int = 64, model=None, **optimizer) -> Config:
    return from_dict(
        {
            "model": LLAMA | (model or {}),
            "data": {"global_batch_size": sequences, "seq_len": seq_len},
            "layout": {"data": 1} | layout,
            "optimizer": optimizer,
        }
    )


def fsdp(stage: int, remat: str = "full", **layout) -> dict:
    return {"fsdp": 4, "zero_stage": stage, "remat": remat} | layout


# Weights and gradients are most of it in some, what layers keep in others, what is at work in one
# layer in others, the head in one.
CASES = {
    "stage 0, whole stacks summed": case(fsdp(0, microbatches=4)),
    "stage 1, sequential": case(fsdp(1, microbatches=4)),
    "stage 3, layered": case(fsdp(3, **LAYERED)),
    "stage 3, offload": case(fsdp(3, offload="optimizer,activations"), 64),
    "one device": case({"remat": "full", "microbatches": 4}),
    "tensor": case({"fsdp": 2, "tensor": 2, "remat": "full"}, 32),
    "rows of tensor": case({"fsdp": 2, "tensor": 4, "tensor_rows": 2}, 64),
    "few tokens, stage 0": case(fsdp(0), 4, 16),
    "pruned": case({"remat": "full"}, 4, 16, sparsity=0.5, sparsity_steps=4),
    # Whose sums of gradients are held between visits, but for those of frozen weights.
    "adapters, stage 1": case(fsdp(1, microbatches=4), model={"lora_rank": 8}),
    "side network, stage 3": case(fsdp(3, "none"), 64, model={"side_width": 8}),
    "muon, layers dealt": case({"fsdp": 2, "zero_stage": 0, "remat": "full"}, 4, name="muon"),
}
PIPELINES = {
    "1f1b, two of four passes kept": case(
        {"pipeline": 4, "microbatches": 8, "remat": "keep:2"}, 32, model={"num_layers": 8}
    ),
    "breadth first, stage 1, tables": case(
        {
            "pipeline": 2,
            "fsdp": 2,
            "zero_stage": 1,
            "microbatches": 4,
            "virtual_stages": 2,
            "schedule": "breadth_first:fused",
            "remat": "full",
        },
        16,
        model={"num_layers": 8, "vocab_size": 4096, "ngram_rows": 4096},
    ),
}
MT5 = {"family": "mt5", "num_encoder_layers": 6, "num_kv_heads": 4}


def paired(layout: dict, sequences: int = 16, target_len: int = 64, **optimizer) -> Config:
    """A case of an encoder and a decoder."""
    data = {"objective": "span_corruption", "target_len": target_len}
    return from_dict(
        {
            "model": LLAMA | MT5,
            "data": {"global_batch_size": sequences, "seq_len": 64} | data,
            "layout": {"data": 1} | layout,
            "optimizer": optimizer,
        }
    )


ENCODERS = {"encoder, stage 3": paired(fsdp(3), 32, 16)}
MORE_ENCODERS = {
    "encoder, stage 0": paired(fsdp(0)),
    "encoder, stage 3, none": paired(fsdp(3, "none"), 64),
    "encoder, stage 2, names": paired(fsdp(2, f"save:{QKVA}", microbatches=2), 64),
    "encoder, one device": paired({"remat": "full", "microbatches": 4}),
    "encoder, tensor": paired({"fsdp": 2, "tensor": 2, "remat": "full"}, 32, 32),
    "encoder, context": paired({"fsdp": 2, "context": 2, "remat": "full"}, 32, 32),
}
PIPELINES["encoder, 1f1b"] = paired({"pipeline": 4, "microbatches": 8, "remat": "none"}, 32, 32)
MORE_PIPELINES = {
    "adapters, interleaved": case(INTERLEAVED, 32, model={"num_layers": 8, "lora_rank": 8}),
    "encoder, interleaved, stage 3, full": paired(INTERLEAVED, 32, 32),
    "1f1b": case({"pipeline": 4, "microbatches": 8, "remat": "none"}, 32, model={"num_layers": 8}),
    "interleaved, stage 3, full": case(INTERLEAVED, 32, model={"num_layers": 8}),
    "interleaved, by layer": case(
        INTERLEAVED | {"pipeline_gather": "layer"}, 32, model={"num_layers": 8}
    ),
    "zb_h1, stage 2, by layer": case(
        {"pipeline": 2, "fsdp": 2, "zero_stage": 2, "microbatches": 4, "schedule": "zb_h1"}
        | {"remat": "full", "pipeline_gather": "layer"},
        32,
        model={"num_layers": 8},
    ),
    "encoder, zb_v, stage 1, names": paired(
        {
            "pipeline": 2,
            "fsdp": 2,
            "zero_stage": 1,
            "microbatches": 4,
            "schedule": "zb_v",
            "remat": f"save:{QKVA},attention_out",
        },
        32,
        32,
    ),
    "encoder, breadth first, stage 2": paired(
        {
            "pipeline": 2,
            "fsdp": 2,
            "zero_stage": 2,
            "microbatches": 4,
            "schedule": "breadth_first:fused",
            "virtual_stages": 2,
            "remat": "full",
        },
        32,
    ),
    "encoder, uneven, two passes kept": paired(
        {"pipeline": 4, "microbatches": 8, "remat": "keep:2", "schedule": "zb_h1:3,3,2,4"}, 32, 16
    ),
    "1f1b, full": case(
        {"pipeline": 4, "microbatches": 8, "remat": "full"}, 32, model={"num_layers": 8}
    ),
    "zb_h1, stage 2": case(
        {
            "pipeline": 2,
            "fsdp": 2,
            "data": 2,
            "zero_stage": 2,
            "microbatches": 4,
            "schedule": "zb_h1",
            "remat": "save_matmuls",
        },
        64,
        model={"num_layers": 8},
    ),
    "zb_v, gpt, uneven": case(
        {"pipeline": 2, "microbatches": 6, "zero_stage": 0, "schedule": "zb_v"},
        24,
        model=GPT | {"num_layers": 7},
    ),
}
WIDE_HEADS = {"num_layers": 4, "d_model": 192, "num_heads": 6, "num_kv_heads": 6, "head_dim": 32}
MORE_CASES = {
    "stage 3, none": case(fsdp(3, "none"), 64),
    "stage 2, names": case(fsdp(2, f"save:{QKVA}", microbatches=2), 64),
    "data and fsdp": case(
        {"data": 2, "fsdp": 2, "zero_stage": 2, "microbatches": 2, "remat": "full"}, 32
    ),
    "stage 0, layered": case(fsdp(0, **LAYERED)),
    "stage 3, sequential": case(fsdp(3, microbatches=4)),
    "adapters, stage 0": case(fsdp(0, microbatches=4), model={"lora_rank": 8}),
    "adapters, none": case(fsdp(3, "none"), 64, model={"lora_rank": 8}),
    "side network": case({"microbatches": 2}, 64, model={"side_width": 8}),
    "prompts, stage 1": case(fsdp(1, microbatches=4), model={"prompt_tokens": 8}),
    "context": case({"fsdp": 2, "context": 2, "remat": "full"}, 32),
    "large vocabulary": case(fsdp(3), 64, model={"num_layers": 2, "vocab_size": 4096}),
    "gpt": case(fsdp(3), 64, model=GPT),
    "stage 2, sequential": case(fsdp(2, microbatches=4)),
    "stage 1, layered, none": case(fsdp(1, "none", **LAYERED), 64),
    "stage 3, layered, save_matmuls": case(fsdp(3, "save_matmuls", **LAYERED), 64),
    "stage 0": case(fsdp(0)),
    "stage 3": case(fsdp(3)),
    "one device, none": case({}),
    "stage 0, none": case(fsdp(0, "none"), 64),
    "tensor, none": case({"tensor": 2, "zero_stage": 0}),
    "context, none": case({"context": 2, "zero_stage": 0}),
    "context, tensor and fsdp": case(
        {
            "context": 2,
            "tensor": 2,
            "fsdp": 2,
            "microbatches": 2,
            "remat": "save_all_but_attention",
        },
        16,
        128,
    ),
    "layered over data": case(
        {"data": 4, "zero_stage": 0, "microbatches": 2, "accumulation": "layered"}, 64
    ),
    "long sequences": case({"fsdp": 2, "zero_stage": 1, "remat": "full"}, 4, 512),
    "gpt, none": case(fsdp(0, "none"), 64, model=GPT),
    "gpt, layered": case(
        {"fsdp": 2, "microbatches": 2, "accumulation": "layered", "remat": "save_matmuls"},
        32,
        model=GPT,
    ),
    "qk_norm": case({"fsdp": 2}, model={"qk_norm": True}),
    "tables, stale": case(
        {"data": 2, "fsdp": 2, "zero_stage": 2, "microbatches": 2, "remat": "full"},
        32,
        model={"ngram_rows": 4096},
        table_staleness=2,
    ),
    "all heads": case({"fsdp": 2, "remat": f"save:{QKVA}"}, 16, 128, model=WIDE_HEADS),
    "wide mlp": case(fsdp(3, f"save:{QKVA},attention_out"), 64, model={"d_ff": 1024}),
    "bfloat16": case(fsdp(3), 64, model={"compute_dtype": "bfloat16"}),
    "bfloat16, none": case(fsdp(0, "none"), 64, model={"compute_dtype": "bfloat16"}),
    "few tokens, stage 3": case(fsdp(3), 4, 16),
    "adafactor": case({"fsdp": 2, "zero_stage": 0, "remat": "full"}, 4, name="adafactor"),
    "few tokens": case(fsdp(2), 4, 16),
    "stage 1": case(fsdp(1)),
    "stage 2, all but attention": case(fsdp(2, "save_all_but_attention"), 64),
    "stage 3, offload names": case(fsdp(3, f"offload:{QKVA}"), 64),
    "muon": case({"remat": "full"}, 4, name="muon"),
    "muon, stage 3": case(fsdp(3), 4, name="muon"),
    "muon, data and tensor": case(
        {"data": 2, "fsdp": 2, "tensor": 2, "remat": "full"}, 16, name="muon"
    ),
}


def unread_bytes(config: Config) -> int:
    """Positions, which no step of an encoder-decoder reads. Before 0.12, JAX removes nothing from a
    `while` loop: the loops of a pipeline's operations, which carry the whole batch, keep them."""
    layout, data = config.layout, config.data
    paired = layout.pipeline > 1 and config.model.num_encoder_layers
    if jax.__version_info__ >= (0, 12) or not paired:
        return 0
    return 4 * data.global_batch_size * (data.seq_len + data.output_len) // layout.batch_shards


def check(config: Config) -> Engine:
    engine = open_engine(config)
    lowered = engine.step.lower(engine.abstract_state, engine.abstract_batch)
    compiled = lowered.compile()
    analysis, predicted = compiled.memory_analysis(), step_memory(config)
    assert predicted.arguments + unread_bytes(config) == analysis.argument_size_in_bytes
    assert predicted.temporaries == pytest.approx(analysis.temp_size_in_bytes, rel=0.1)
    return engine


@pytest.mark.proof
@pytest.mark.parametrize("name", ENCODERS)
def test_a_compiled_step_of_an_encoder_decoder_needs_what_the_formulas_say(name):
    check(ENCODERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_ENCODERS)
def test_other_compiled_steps_of_an_encoder_decoder_need_what_the_formulas_say(name):
    check(MORE_ENCODERS[name])


@pytest.mark.proof
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_step_needs_what_the_formulas_say(name):
    check(CASES[name])


@pytest.mark.proof
@pytest.mark.parametrize("name", PIPELINES)
def test_a_compiled_pipeline_needs_what_the_formulas_say(name):
    engine = check(PIPELINES[name])
    # Beside what a rank receives and what its passes begin with, it carries what it sends.
    kept = engine.pipeline_buffers()
    arrays = jax.tree.leaves((kept["inbox"], kept["input"]))
    sent = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in jax.tree.leaves(kept["inbox"]))
    carried = sent + sum(x.size * x.dtype.itemsize for x in arrays)
    needs, tensor = step_memory(engine.config), engine.layout.tensor
    assert needs.messages == carried // tensor
    again = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept.get("received", ())))
    assert needs.received == again // tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_other_compiled_steps_need_what_the_formulas_say(name):
    check(MORE_CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_PIPELINES)
def test_other_compiled_pipelines_need_what_the_formulas_say(name):
    check(MORE_PIPELINES[name])
