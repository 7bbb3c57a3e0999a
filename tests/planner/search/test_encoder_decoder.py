"""A trainable encoder-decoder is planned: its counts, its ranking, and what is said of it."""

import dataclasses

import pytest

from jaxscale.config import Config, load
from jaxscale.layout import Layout
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.encoder_decoder import EncoderDecoder
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.memory.room import check_room
from jaxscale.planner.memory.step import is_predicted
from jaxscale.planner.model.named_models import NAMED
from jaxscale.planner.model.shape import ModelShape
from jaxscale.planner.plan_layouts import plan_layouts
from jaxscale.planner.report import text_report
from jaxscale.planner.search.search import search_layouts
from jaxscale.planner.search.space import Query, check_pins
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.training.flops import step_flops

XXL = load("configs/mt5_xxl.py", ["optimizer.name=adamw"])


def with_layout(config: Config, **layout) -> Config:
    return dataclasses.replace(config, layout=Layout(data=1, **layout))


def test_its_shape_is_the_named_one_with_its_lengths():
    shape, named = ModelShape.of(XXL), NAMED["mt5-xxl"]
    lengths = {"seq_len": 256, "encoder_seq_len": 1024}
    tables = 2 * 32 * 64  # the biases of two stacks, which the named shape does not count
    ours = {"windowed_share": 0.0, "extra_head_params": tables}
    assert shape == dataclasses.replace(named, **lengths, **ours)
    assert shape.num_params == XXL.model.num_params


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_its_counts_are_those_of_the_model(name):
    config = load("configs/mt5_small.py", [f"model.family={name}", "model.num_layers=6"])
    model, planned = config.model, TrainableModel(config)
    assert planned.num_params == planned.shape.num_params == model.num_params
    counted = step_flops(with_layout(config), EncoderDecoder(model, plain_kernels())).model
    # The traced program computes the masked half of the decoder's own attention, too.
    half = 3 * 2 * model.num_heads * model.head_dim * 256**2 * model.num_layers / (1024 + 256)
    assert planned.flops_per_token + half == pytest.approx(counted, rel=1e-3)


def test_the_second_zero_stage_is_ranked_before_the_third():
    """arXiv 2310.05350; sign only. With the same micro-batches."""
    pins = {"remat": "full", "offload": "none", "fsdp": 64, "accumulation": "sequential"}
    found = search_layouts(Query(XXL, make_cluster("a100-80", 64), pins), 50)
    place = {(one.zero_stage, one.microbatches): n for n, one in enumerate(found.layouts)}
    both = [count for stage, count in place if stage == 2 and (3, count) in place]
    assert both
    assert all(place[2, count] < place[3, count] for count in both)


def test_a_plan_trains_and_says_what_is_not_validated():
    answer = plan_layouts(XXL, "a100-80", 64, top=1, pins={"remat": "full"})
    (best,) = answer.plans
    assert best.config.layout == best.layout
    assert best.tokens_per_second == XXL.data.tokens_per_step / best.step_seconds
    assert "encoder's output" in text_report.PARTS["between_stacks"]
    text = text_report.ranking_text(answer)
    assert "1024 sequences of 256 tokens and 1024 encoder tokens per step" in text
    assert text.count("Seconds of an encoder with a decoder are not validated") == 1
    assert "no formulas for pipelines of an encoder" in text


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


def test_a_step_without_room_is_refused_before_it_is_compiled():
    limit = 76.6e9
    check_room(
        with_layout(XXL, fsdp=64, zero_stage=2, microbatches=8, remat="full"), "gpu", limit, "A100"
    )
    large = with_layout(XXL, fsdp=64, zero_stage=0, microbatches=8, remat="full")
    with pytest.raises(ValueError, match=r"needs 21\d\.\d+ GB .* no number of micro-batches fits"):
        check_room(large, "gpu", limit, "A100")
    piped = with_layout(XXL, pipeline=2, fsdp=32, microbatches=8)
    assert not is_predicted(piped)
    check_room(piped, "gpu", limit, "A100")  # of which nothing is predicted
