"""A trainable encoder-decoder is planned: its counts, its ranking, and what is said of it."""

import dataclasses

import numpy as np
import pytest

from jaxscale.config import Config, load
from jaxscale.config.layout import Layout
from jaxscale.pipeline.simulator import Costs, simulate
from jaxscale.pipeline.stages import open_stages
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.cost.step import StepParts, end_operation_seconds
from jaxscale.planner.cost.uneven_pipeline import UnevenPipelineCost
from jaxscale.planner.memory.device_limit import check_device_limit
from jaxscale.planner.memory.terms import TEXTS
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.plan_layouts import plan_layouts
from jaxscale.planner.report import text_report
from jaxscale.planner.search.balance_layers import rebalance_layers
from jaxscale.planner.search.plan import predict_plan
from jaxscale.planner.search.search import search_layouts
from jaxscale.planner.search.space import Query, check_pins
from jaxscale.planner.search.trainable_model import TrainableModel

XXL = load("mt5_xxl", ["optimizer.name=adamw"])


def with_layout(config: Config, **layout) -> Config:
    return dataclasses.replace(config, layout=Layout(data=1, **layout))


BASE = load("mt5_base", ["data.global_batch_size=64"])
QUERY = Query(BASE, make_cluster("h200", 4))
PIPELINE = Layout(pipeline=4, data=1, microbatches=8, remat="full")


@pytest.mark.parametrize("chunks", [{}, {"schedule": "interleaved", "virtual_stages": 2}])
def test_a_pipelines_step_is_its_table_with_layers_of_two_kinds(chunks):
    layout = dataclasses.replace(PIPELINE, **chunks)
    plan = predict_plan(QUERY, layout)
    parts = UnevenPipelineCost.of(QUERY.work, QUERY.cluster, plan.parallelism)
    costs = parts.costs([0], plan.layers)
    # An encoder's layer has four times as many tokens, and no cross attention to the encoder's.
    assert 1.8 < costs.f[0, 0] / costs.f[0, -1] < 2.5
    table = open_stages(layout, QUERY.planned_model.stacks, QUERY.planned_model.head_cost).table
    run = simulate(table, Costs(*(tuple(np.ravel(cost).tolist()) for cost in costs)))
    seconds = (float(parts.others[0]) + run.lockstep_makespan) * (1 + float(parts.late[0]))
    assert plan.step_seconds == pytest.approx(seconds, rel=1e-9)
    assert plan.step_seconds == pytest.approx(sum(plan.terms.values()), rel=1e-9)
    assert 1.2 < plan.hfu / plan.mfu < 1.4


def test_layers_of_both_kinds_together_take_what_all_layers_take():
    parallelism = Parallelism.of(PIPELINE, 64)
    parts = UnevenPipelineCost.of(QUERY.work, QUERY.cluster, parallelism)
    every = end_operation_seconds(StepParts(QUERY.work, QUERY.cluster, parallelism))
    for name in ("f", "w", "r"):
        both = sum(getattr(stack.share, name)[0, 0] for stack in parts.stacks)
        assert both == pytest.approx(getattr(every, name)[..., 0])
    assert [stack.layers for stack in parts.stacks] == [12, 12]


def test_more_stages_go_to_the_stack_that_takes_longer():
    even = predict_plan(QUERY, PIPELINE)
    assert even.layers == (6, 6, 6, 6)
    better = rebalance_layers(QUERY, even)
    assert better.layout.schedule_spec.layers == better.layers
    assert sum(better.layers[:3]) == 12
    assert better.step_seconds < 0.96 * even.step_seconds
    open_stages(better.layout, QUERY.planned_model.stacks)


def test_the_second_zero_stage_is_ranked_before_the_third():
    """arXiv 2310.05350; sign only. With the same micro-batches."""
    pins = {"remat": "full", "offload": "none", "fsdp": 64, "accumulation": "sequential"}
    found = search_layouts(Query(XXL, make_cluster("a100-80", 64), pins), 50)
    place = {(one.zero_stage, one.microbatches): n for n, one in enumerate(found.layouts)}
    both = [count for stage, count in place if stage == 2 and (3, count) in place]
    assert both
    assert all(place[2, count] < place[3, count] for count in both)


@pytest.mark.proof
def test_a_plan_trains_and_says_what_is_not_validated():
    answer = plan_layouts(XXL, "a100-80", 64, top=1, pins={"remat": "full"})
    (best,) = answer.plans
    assert best.config.layout == best.layout
    assert best.tokens_per_second == XXL.data.tokens_per_step / best.step_seconds
    # The layers with experts of a DeepSeek-V3 follow others, too, and none of them is an encoder.
    assert TEXTS["between_stacks"] == "between stacks, as of an encoder or dense layers"
    text = text_report.ranking_text(answer)
    assert "1024 sequences of 256 tokens and 1024 encoder tokens per step" in text
    assert text.count("Seconds of an encoder with a decoder are not validated") == 1
    assert "no formula for cross attention under context parallelism" in text


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({"remat": "save_matmuls"}, "layout.remat = 'save_matmuls': there is no formula"),
        ({"offload": "activations"}, "layout.offload = 'activations': there is no formula"),
    ],
)
def test_a_policy_without_a_formula_is_refused_by_name(pin, said):
    with pytest.raises(ValueError, match=said):
        check_pins(Query(XXL, make_cluster("a100-80", 64), pin))


def test_an_axis_without_a_formula_is_refused_by_name():
    reason, message = TrainableModel(XXL).refusal(Layout(data=1, fsdp=32, context=2))
    assert "cross attention" in reason
    assert message.startswith("layout.context = 2: ")
    assert message.endswith("; set layout.context = 1")


def test_a_step_out_of_memory_is_refused_before_it_is_compiled():
    limit = 76.6e9
    check_device_limit(
        with_layout(XXL, fsdp=64, zero_stage=2, microbatches=8, remat="full"), "gpu", limit, "A100"
    )
    large = with_layout(XXL, fsdp=64, zero_stage=0, microbatches=8, remat="full")
    with pytest.raises(ValueError, match=r"needs 21\d\.\d+ GB .* no number of micro-batches fits"):
        check_device_limit(large, "gpu", limit, "A100")
    piped = with_layout(XXL, pipeline=2, fsdp=32, microbatches=16, zero_stage=0)
    with pytest.raises(ValueError, match="no number of micro-batches fits"):
        check_device_limit(piped, "gpu", limit, "A100")
