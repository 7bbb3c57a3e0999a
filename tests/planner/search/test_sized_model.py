"""What a described model refuses, in whose words, and what is said of it."""

import dataclasses
import re
from typing import Any

import pytest

from jaxscale.config import load
from jaxscale.config.layout import Layout
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.model.named_models import NAMED
from jaxscale.planner.model.shape import ModelShape
from jaxscale.planner.plan_layouts import plan_layouts, resolve_model
from jaxscale.planner.report import text_report, why_not
from jaxscale.planner.search.sized_model import SizedModel
from jaxscale.planner.search.space import Query, check_pins

MIXTRAL = SizedModel(dataclasses.replace(NAMED["mixtral-8x7b"], seq_len=4096), 512, "mixtral-8x7b")
MT5 = SizedModel(NAMED["mt5-xxl"], 512)
DEEPSEEK = SizedModel(NAMED["deepseek-v3"], 512)
NEMOTRON = SizedModel(NAMED["nemotron-3-nano"], 512)
GPT = SizedModel(NAMED["gpt3-175b"], 512)


@pytest.mark.parametrize(
    ("model", "layout", "reason", "said"),
    [
        (MIXTRAL, {"expert": 16}, "a dimension", "experts = 8 .* nearest .* layout.expert = 8$"),
        (MIXTRAL, {"tensor": 16}, "a dimension", "kv_heads = 8 .* layout.tensor = 8$"),
        (
            MIXTRAL,
            {"fsdp": 3, "microbatches": 1},
            "the batch",
            r"set --batch_tokens to 2088960 \(510 sequences\) or 2101248 \(513 sequences\)",
        ),
        (MIXTRAL, {"expert": 8, "fsdp": 128}, "the batch", "= 1024 parts; set --batch_tokens to 4"),
        (MIXTRAL, {"context": 4096}, "the sequence", "seq_len = 4096 .* multiples of 8192"),
        (MT5, {"pipeline": 2}, "there are no formulas for pipelines", "set layout.pipeline = 1"),
        (MT5, {"context": 2}, "there is no formula for cross", "set layout.context = 1"),
        (MT5, {"expert": 2}, "a dimension", "layout.expert = 2, but the model has no experts"),
        (DEEPSEEK, {"tensor": 256}, "a dimension", "^heads = 128 does not divide"),
        (NEMOTRON, {"tensor": 4}, "a dimension", "kv_heads = 2 does not divide"),
        (
            MIXTRAL,
            {"context": 64, "context_method": "ulysses"},
            "the heads do not divide",
            "32 heads and 8 key/value heads over layout.context = 64; set layout.context = 32",
        ),
        (MIXTRAL, {"remat": "save_matmuls"}, "no formula", "it can be none, full, save_all_but_"),
        (MIXTRAL, {"offload": "activations"}, "no formula", "it can be none, optimizer$"),
        (
            GPT,
            {"remat": "save:query,key,value,attention,attention_out"},
            "no formula",
            "it can be none, full, save_all_but_attention$",
        ),
    ],
)
def test_refusals_name_the_nearest(model, layout, reason, said):
    fields: dict[str, Any] = {"data": 1, "context_method": "gather", **layout}
    found = model.refusal(Layout(**fields))
    assert found[0].startswith(reason)
    assert re.search(said, found[1])


def test_a_layout_that_divides_is_not_refused():
    for model, layout in (
        (MIXTRAL, {"expert": 8, "tensor": 8, "fsdp": 4, "pipeline": 2}),
        (DEEPSEEK, {"expert": 64, "tensor": 128}),
        (MT5, {"tensor": 64}),
    ):
        one = dataclasses.replace(Layout(data=1), **layout)
        assert model.refusal(one) == ("", "")


def test_a_planned_layout_is_checked_as_others_are():
    with pytest.raises(ValueError, match=r"layout.expert = 0"):
        Layout(expert=0)
    with pytest.raises(ValueError, match=r"layout.zero_stage = 4"):
        Layout(expert=4, zero_stage=4)
    with pytest.raises(ValueError, match=r"context_method = 'ring' with layout.pipeline = 2"):
        Layout(expert=4, pipeline=2, context=3)
    one = dataclasses.replace(Layout(data=2), expert=4)
    assert (one.num_devices, one.batch_shards) == (8, 8)
    assert "expert 4" in text_report.layout_text(one)


def test_pins_that_no_formula_knows_are_refused_at_once():
    machine = make_cluster("h100-sxm", 64)
    for pins, said in (
        ({"remat": "save_matmuls"}, "layout.remat = 'save_matmuls' has no formula"),
        ({"expert": 3}, "no mesh of 64 devices has expert 3: .*; the nearest: expert = 2 or 4"),
        ({"expert": 24}, "the nearest: expert = 8$"),
    ):
        with pytest.raises(ValueError, match=said):
            check_pins(Query(MIXTRAL, machine, pins))


@pytest.mark.proof
def test_why_not_of_experts():
    answer = plan_layouts(
        "mixtral-8x7b",
        "h100-sxm",
        64,
        seq_len=4096,
        batch_tokens=2**21,
        top=2,
        pins={"pipeline": 1, "remat": "full"},
    )
    said = why_not.explain_why_not(answer, {"expert": 16})
    assert "experts = 8 does not divide over layout.expert = 16" in said
    assert "smallest change: expert=8, for a step of" in said
    assert "the nearest: expert = 2 or 4" in why_not.explain_why_not(answer, {"expert": 3})
    assert "expert all-to-alls, exposed" in why_not.explain_why_not(
        answer, {"expert": 8, "tensor": 2}
    )
    tight = Query(MIXTRAL, make_cluster("h100-sxm", 64), memory_bytes=20e9)
    layout = Layout(data=1, fsdp=16, expert=4, remat="full")
    assert "it does not fit" in why_not.why_infeasible(tight, layout)
    change = why_not.smallest_change(tight, layout)
    assert change is not None
    assert change[1].fits


def test_what_has_to_be_known_is_said_once():
    assert "for the memory of our step, describe it by a config" in DEEPSEEK.note
    assert "cannot train a model with state-space mixers" in NEMOTRON.note
    assert "plan a config (--config mt5_xxl)" in MT5.note
    dense = SizedModel(NAMED["llama3-8b"], 512)
    assert "describe it by a config (--config FILE)" in dense.note
    answer = plan_layouts(
        "mt5-xxl", "h100-sxm", 64, batch_tokens=2**20, top=1, pins={"remat": "full"}
    )
    text = text_report.ranking_text(answer)
    assert text.count("not checked against the compiler") == 1
    assert "2048 sequences of 512 tokens and 1024 encoder tokens per step" in text
    with pytest.raises(ValueError, match=r"mt5-xxl is given by its sizes; describe it by a config"):
        answer.plans[0].config  # noqa: B018  It raises.
    with pytest.raises(ValueError, match=r"has state-space mixers; --json FILE"):
        NEMOTRON.with_layout(Layout())
    with pytest.raises(ValueError, match=r"describe it by a config \(--config FILE\)"):
        dense.with_layout(Layout())


def test_a_shape_can_be_given_as_it_is():
    shape = ModelShape(8, 1024, 8, 4, 128, 4096, gated=True, vocab=32000, tied=False, seq_len=1024)
    answer = plan_layouts(shape, "a100-40", 8, batch_tokens=2**16, top=1, pins={"pipeline": 1})
    assert answer.query.planned_model.sequences == 64
    assert resolve_model("llama2_7b", 0, 0) == load("llama2_7b")  # shipped, and no named shape
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (shape, {}, "--batch_tokens is missing"),
        (
            shape,
            {"batch_tokens": 1500},
            "whole number of sequences of seq_len = 1024; .* 1024",
        ),
        (
            "configs/tiny.py",
            {"seq_len": 64},
            "--seq_len 64 is for a model given by .*data.seq_len=64",
        ),
        ("lama3-8b", {}, "model 'lama3-8b' is not known; .*did you mean 'llama3-8b'"),
    ]
    for model, asked, said in wrong:
        with pytest.raises(ValueError, match=said):
            plan_layouts(model, "a100-40", 8, **asked)
