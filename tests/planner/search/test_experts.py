"""A trainable model with experts is planned: its ranks, its ranking, and what is said of it."""

import collections
import dataclasses

import numpy as np
import pytest

from jaxscale.config import load
from jaxscale.config.layout import Layout
from jaxscale.planner.auto_layout import choose_layout
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.cost.step import step_cost
from jaxscale.planner.memory.device_limit import check_device_limit
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.plan_layouts import plan_layouts
from jaxscale.planner.report import text_report
from jaxscale.planner.report.why_not import explain_why_not
from jaxscale.planner.report.write_config import write_plan
from jaxscale.planner.search.space import Query, check_pins, enumerate_sizes, mesh_shapes
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.training.flops import step_flops

MIXTRAL = load("configs/mixtral_8x7b.py")
PINS = {"offload": "none", "remat": "full", "context": 1, "tensor": 1}


def test_ranks_of_experts_divide_the_experts():
    query = Query(MIXTRAL, make_cluster("h100", 64), PINS)
    sizes = {shape[3] for shape in mesh_shapes(64, PINS, query.work.num_experts)}
    assert sizes == {1, 2, 4, 8}
    message = TrainableModel(MIXTRAL).refusal(Layout(data=1, expert=16))[1]
    assert "model.num_experts = 8 does not divide over layout.expert = 16" in message
    assert message.endswith("layout.expert = 8")


def test_ranks_of_experts_split_the_batch():
    small = dataclasses.replace(
        MIXTRAL, data=dataclasses.replace(MIXTRAL.data, global_batch_size=36)
    )
    message = TrainableModel(small).refusal(Layout(data=1, expert=8))[1]
    assert "layout.fsdp 1 x layout.expert 8 x" in message
    assert "set data.global_batch_size to 32 or 40" in message


@pytest.mark.proof
def test_a_plan_trains_and_says_what_is_not_validated():
    answer = plan_layouts(MIXTRAL, "h100", 64, top=2, pins=PINS)
    best = answer.plans[0]
    assert best.config.layout == best.layout
    assert best.fits
    assert best.layout.pipeline == 1
    text = text_report.ranking_text(answer)
    assert "12.9 B active per token" in text
    assert text.count("Seconds of a model with experts are not validated") == 1
    assert "layout.expert = 8" in explain_why_not(answer, {"expert": 16})


def test_a_pipeline_of_experts_is_planned_and_written(tmp_path):
    pins = PINS | {"pipeline": 4, "fsdp": 4, "schedule": "interleaved", "zero_stage": 3}
    best = plan_layouts(MIXTRAL, "h200", 64, top=1, pins=pins | {"expert": 4}).plans[0]
    assert best.fits
    assert min(best.terms["expert"], best.terms["bubble"]) > 0
    assert best.memory.at_peak["stash"] > best.memory.at_peak["working_set"]
    assert max(best.stage_bytes) <= best.memory_bytes
    write_plan(tmp_path / "mine.py", best, "mixtral_8x7b")
    assert load(str(tmp_path / "mine.py")).layout == best.layout


def test_the_nodes_of_ranks_of_experts_are_pinned():
    """Also without their number: meshes whose ranks they do not divide are left out."""
    query = Query(MIXTRAL, make_cluster("h200", 64), PINS | {"pipeline": 1, "expert_nodes": 4})
    check_pins(query)
    sizes = enumerate_sizes(query, collections.Counter(), {})
    assert sizes is not None
    assert {*np.asarray(sizes.expert).tolist()} == {4, 8}
    assert np.all(np.asarray(sizes.expert_nodes) == 4)


def test_without_ranks_of_experts_nothing_is_exchanged():
    cluster, work = make_cluster("h100", 64), TrainableModel(MIXTRAL).work

    def terms(**layout):
        one = Layout(data=1, microbatches=16, **layout)
        return step_cost(work, cluster, Parallelism.of(one, 1024)).terms

    sent = {remat: terms(fsdp=8, expert=8, remat=remat)["expert"] for remat in ("none", "full")}
    assert terms(fsdp=64, remat="full")["expert"] == 0
    # Two all-to-alls of tokens in each pass; recompute sends them, and does not collect.
    assert np.isclose(sent["full"] / sent["none"], 5 / 4)


@pytest.mark.proof(but=("mixtral_8x7b-options0-pins0",))
@pytest.mark.parametrize(
    ("base", "options", "pins"),
    [
        ("mixtral_8x7b", [], {"remat": "save:query"}),
        (
            "deepseek_v3",
            ["model.num_layers=8", "data.global_batch_size=512"],
            {"remat": "save_matmuls"},
        ),
        ("qwen3_30b_a3b", ["model.expert_pattern=DE"], {}),
    ],
)
def test_pipelines_of_experts_are_planned(base, options, pins):
    pins = PINS | pins | {"pipeline": 2, "microbatches": 16, "expert": 8}
    (plan,) = plan_layouts(load(base, options), "h200", 64, pins=pins, top=1).plans
    assert plan.layout.pipeline == 2
    assert plan.memory.stash > 0


def test_a_step_out_of_memory_is_refused_before_it_is_compiled():
    whole = dataclasses.replace(
        MIXTRAL, layout=Layout(data=1, fsdp=8, expert=8, microbatches=1, remat="full")
    )
    with pytest.raises(
        ValueError, match=r"needs \d+\.\d+ GB .*; set layout.microbatches = \d+, with"
    ):
        check_device_limit(whole, "gpu", 68e9, "H100")


@pytest.mark.proof
def test_an_automatic_layout_has_a_plan():
    config = load("configs/moe_tiny.py")
    plan = choose_layout(config, "NVIDIA H100 80GB HBM3", "gpu", 8)
    assert plan.layout.num_devices == 8
    assert plan.fits


def test_layers_in_periods_are_planned():
    pins = PINS | {"fsdp": 8, "expert": 8, "zero_stage": 3, "microbatches": 16}
    every, half = (
        plan_layouts(load("qwen3_30b_a3b", options), "h100", 64, pins=pins, top=1).plans[0]
        for options in ([], ["model.expert_pattern=DE"])
    )
    assert half.fits
    assert half.memory_bytes < every.memory_bytes
    # Every second layer exchanges rows.
    assert np.isclose(half.terms["expert"], every.terms["expert"] / 2, rtol=0.05)


@pytest.mark.proof
def test_latent_attention_is_planned():
    pins = PINS | {"data": 4, "fsdp": 64, "expert": 8, "zero_stage": 3, "microbatches": 8}
    pins |= {"accumulation": "sequential"}
    plain, more = (
        plan_layouts(load("deepseek_v3", options), "h200", 2048, pins=pins, top=1).plans[0]
        for options in ([], ["model.prediction_depth=1"])
    )
    assert plain.layout.pipeline == 1
    assert plain.fits
    # A module for a further token is one more layer with experts, and another pass of the head.
    again = step_flops(more.config).model / step_flops(plain.config).model
    assert more.memory_bytes > plain.memory_bytes
    assert np.isclose(more.step_seconds / plain.step_seconds, again, rtol=0.05)
