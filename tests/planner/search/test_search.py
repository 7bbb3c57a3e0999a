"""The search finds what going through every layout one by one finds."""

import collections
import dataclasses
import functools
import itertools
import re

import numpy as np
import pytest

from jaxscale.choices import divisors
from jaxscale.config import Config, from_dict, load
from jaxscale.config.layout import ACCUMULATIONS, OFFLOADS, PIPELINE_GATHERS, Layout
from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline_schedules.schedule import Schedule
from jaxscale.pipeline_schedules.shipped import find_schedule
from jaxscale.planner.auto_layout import choose_settings
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.memory.step import step_memory
from jaxscale.planner.model.layout_batch import stack_layouts
from jaxscale.planner.model.named_models import NAMED
from jaxscale.planner.model.shape import ModelShape
from jaxscale.planner.report.why_not import why_infeasible
from jaxscale.planner.search.pipeline_batch import (
    batch_buffers,
    batch_step_seconds,
    least_peaks,
    make_pipelines,
)
from jaxscale.planner.search.plan import predict_plan
from jaxscale.planner.search.search import TOO_LARGE, TOO_LARGE_FOR_HOST, _distinct, search_layouts
from jaxscale.planner.search.sized_model import SizedModel
from jaxscale.planner.search.space import (
    HOST_MEMORY_BYTES,
    Query,
    check_pins,
    combine,
    enumerate_options,
    enumerate_sizes,
    mesh_shapes,
)
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.planner.tables.pipeline_slots import _most_slots, default_stage_layers
from jaxscale.planner.tables.state_ticks import _counted
from jaxscale.planner.tables.table_makespan import _cells, pipeline_table
from jaxscale.sharding.layout_checks import check_ulysses
from jaxscale.training.kernels import attention_name

CONFIG = from_dict(
    {
        "model": {
            "num_layers": 6,
            "d_model": 1024,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 128,
            "d_ff": 4096,
            "vocab_size": 32000,
        },
        "data": {"global_batch_size": 16, "seq_len": 2048},
    }
)
EIGHT = make_cluster("A100-40", 8)
FOUR = make_cluster("A100-40", 4)
with_layout = TrainableModel(CONFIG).with_layout
TRIED = ("none", "full", "save_matmuls")  # policies of remat
PIPELINES = ("1f1b", "zb_h1", "zb_v", "interleaved")


def query(memory_gb: float = 4.0, config: Config = CONFIG, **pins) -> Query:
    return Query(config, EIGHT, pins, memory_gb * 1e9)


def small_schedule(name: str, most: int = 2) -> Schedule:
    """A schedule of which a search tries no more than so many numbers of virtual stages."""
    schedule = find_schedule(name)
    searched = schedule.searched_virtual_stages[:most]
    return dataclasses.replace(schedule, searched_virtual_stages=searched)


@pytest.fixture(autouse=True)
def small_space(monkeypatch):
    """Fewer texts than the search goes through, so that each layout can be judged by itself."""
    monkeypatch.setattr("jaxscale.planner.search.trainable_model.REMATS", TRIED)
    monkeypatch.setattr("jaxscale.planner.search.trainable_model.OFFLOADS", OFFLOADS[:2])
    shipped = tuple(map(small_schedule, PIPELINES))
    monkeypatch.setattr("jaxscale.planner.search.space.SHIPPED", shipped)
    monkeypatch.setattr("jaxscale.planner.search.space.find_schedule", small_schedule)


def by_hand(asked: Query) -> list[tuple[float, Layout]]:
    """Every layout of four devices, with the pins, that the engine accepts and that fits, with
    its seconds."""
    found = []
    pipeline, count = asked.pins["pipeline"], asked.pins["microbatches"]
    for sizes in itertools.product((1, 2, 4), repeat=4):
        if np.prod(sizes) * pipeline != 4:
            continue
        mesh = dict(zip(("data", "fsdp", "context", "tensor"), sizes), pipeline=pipeline)
        for stage, options in itertools.product(range(4), string_options(pipeline)):
            if same_as_another(mesh, stage, options):
                continue
            try:
                layout = Layout(**mesh, zero_stage=stage, microbatches=count, **options)
                if asked.planned_model.refusal(layout)[0]:
                    continue
                needs = step_memory(with_layout(layout), asked.back_end, own_host=True)
            except ValueError:
                continue
            host = needs.host_stash + layout.offloads("optimizer") * needs.host_optimizer
            if needs.peak > asked.limit_bytes or host > HOST_MEMORY_BYTES:
                continue
            found.append((predict_plan(asked, layout).step_seconds, layout))
    return sorted(found, key=lambda one: one[0])


def same_as_another(mesh: dict, stage: int, options: dict) -> bool:
    """Whether a choice means nothing on these axes."""
    gathers = options["context_method"] == "gather"
    alone = mesh["fsdp"] * mesh["context"] == 1
    whole = alone or stage < 2
    return (
        (alone and stage < 3)
        or (mesh["context"] == 1 and gathers)
        or (whole and options.get("pipeline_gather") == "layer")
    )


def string_options(pipeline: int) -> list[dict]:
    if pipeline == 1:
        return [
            {
                "remat": remat,
                "offload": offload,
                "accumulation": accumulation,
                "context_method": method,
            }
            for remat in TRIED
            for offload in OFFLOADS[:2]
            for accumulation in ACCUMULATIONS
            for method in ("ring", "gather")
        ]
    return [
        {"remat": remat, "schedule": name, "virtual_stages": chunks, "context_method": method}
        | {"pipeline_gather": gather}
        for gather in PIPELINE_GATHERS
        for method in ("ring", "gather")
        for remat in TRIED
        for name in (*PIPELINES, "1f1b:fused")
        for chunks in (1, 2)
        if chunks > 1 or name != "interleaved"
    ]


@pytest.mark.proof
@pytest.mark.parametrize(("pipeline", "memory_gb"), [(1, 3.0), (2, 30.0)])
def test_the_optimum_is_that_of_going_through_all(pipeline, memory_gb, monkeypatch):
    one_each = functools.partial(small_schedule, most=1)
    monkeypatch.setattr("jaxscale.planner.search.space.find_schedule", one_each)
    pins = {"pipeline": pipeline, "microbatches": 4, "head": "last", "sequence_chunks": 1}
    if pipeline > 1:
        pins |= {"offload": "none"}
    asked = Query(CONFIG, FOUR, pins, memory_gb * 1e9)
    everything, found = _distinct(by_hand(asked)), search_layouts(asked, 3)
    assert found.seconds == pytest.approx([seconds for seconds, _ in everything[:3]], rel=1e-12)
    fastest = everything[0][0] * (1 + 1e-12)
    assert found.layouts[0] in [layout for seconds, layout in everything if seconds <= fastest]


@pytest.mark.proof(but=("sizes of experts", "decoder"))
@pytest.mark.parametrize(
    "model",
    [
        CONFIG,
        load("mt5_small", ["model.num_layers=6", "optimizer.name=adamw"]),
        SizedModel(dataclasses.replace(NAMED["mixtral-8x7b"], seq_len=4096), 64),
    ],
    ids=["decoder", "encoder-decoder", "sizes of experts"],
)
def test_pipelines_left_out_without_a_table_need_at_least_as_much(model):
    asked, nothing = Query(model, EIGHT, {"offload": "none"}), collections.Counter()
    sizes, shares = enumerate_sizes(asked, nothing, {}), []
    for options in enumerate_options(asked):
        layouts = combine(asked, sizes, options, nothing) if options["pipelined"] else None
        if layouts is None:
            continue
        (least,) = least_peaks(asked, [layouts])
        buffers = batch_buffers(make_pipelines(asked.planned_model, layouts))
        peaks = asked.planned_model.memory(layouts, buffers, asked.back_end).peak
        assert (least <= peaks).all(), options
        shares += [least / peaks]
    # Most need just that, but where each rank of two stacks is taken to have a share of both.
    assert np.median(np.concatenate(shares)) > 0.75


def test_a_pipeline_gathers_by_layer_where_a_chunk_does_not_fit():
    """Which costs time: the weights of a layer are gathered for each micro-batch."""
    pins = {"pipeline": 4, "fsdp": 2, "tensor": 1, "microbatches": 4, "remat": "full"}
    pins |= {"zero_stage": 3, "schedule": "1f1b", "virtual_stages": 1, "offload": "none"}
    roomy = search_layouts(query(30, **pins), 2)
    assert [one.pipeline_gather for one in roomy.layouts] == ["chunk", "layer"]
    chunk, layer = (predict_plan(query(30, **pins), one) for one in roomy.layouts)
    assert layer.step_seconds > chunk.step_seconds
    assert layer.memory_bytes < chunk.memory_bytes
    least = (layer.memory_bytes + chunk.memory_bytes) / 2 / 1e9
    assert [one.pipeline_gather for one in search_layouts(query(least, **pins), 2).layouts] == [
        "layer"
    ]
    pins |= {"fsdp": 1, "data": 2, "head": "last"}
    shards = search_layouts(query(30, **pins), 2)
    assert [one.pipeline_gather for one in shards.layouts] == ["chunk"]


@pytest.mark.proof
def test_slices_of_the_head_are_tried_in_the_fastest_pipelines():
    """And in all where nothing else fits. A head is as much work as a few layers here."""
    model = load("gemma2_9b", ["data.global_batch_size=32"])
    pins = {"pipeline": 4, "fsdp": 2, "tensor": 1, "context": 1, "microbatches": 16}
    pins |= {"zero_stage": 1, "schedule": "1f1b", "remat": "full", "offload": "none"}
    asked = Query(model, make_cluster("H200-SXM", 8), pins)
    sliced, last = search_layouts(asked, 2).layouts
    assert (sliced.head, dataclasses.replace(sliced, head="last")) == ("sliced", last)
    plans = [predict_plan(asked, one) for one in (sliced, last)]
    assert plans[0].step_seconds < 0.9 * plans[1].step_seconds
    for plan in plans:
        assert sum(plan.terms.values()) == pytest.approx(plan.step_seconds)
    # All ranks work on the head, so that the busiest one idles less.
    assert plans[0].terms["bubble"] < 0.5 * plans[1].terms["bubble"]
    small = dataclasses.replace(asked, memory_bytes=sum(one.memory_bytes for one in plans) / 2)
    assert [one.head for one in search_layouts(small, 2).layouts] == ["sliced"]
    assert not search_layouts(dataclasses.replace(small, pins={**pins, "head": "last"}), 2).layouts
    config = dataclasses.replace(model, layout=dataclasses.replace(last, head="auto"))
    config, line = choose_settings(config, asked.cluster)
    assert (config.layout, line.partition(",")[0]) == (
        sliced,
        "layout.head = 'auto' chose sliced",
    )
    with pytest.raises(ValueError, match="head=auto: leave it out for the planner to choose"):
        check_pins(dataclasses.replace(asked, pins={"head": "auto"}))
    further = Query(
        load("deepseek_v3", ["model.prediction_depth=1"]), asked.cluster, {"head": "sliced"}
    )
    with pytest.raises(ValueError, match="adds a loss for each further token"):
        check_pins(further)


@pytest.mark.proof
def test_segments_are_tried_in_the_fastest_pipelines():
    """Late segments are shorter: they attend to more keys."""
    settings = ["data.seq_len=32768", "data.global_batch_size=16", "model.attention=flash"]
    pins = dict.fromkeys(("data", "fsdp", "context", "tensor", "virtual_stages"), 1)
    pins |= {"pipeline": 8, "microbatches": 16, "offload": "none", "head": "last"}
    asked = Query(load("llama2_13b", settings), make_cluster("h200", 8), pins)
    split = (one for one in search_layouts(asked, 3).layouts if one.sequence_chunks > 1)
    lengths = [int(one) for one in next(split).segment_lengths.split(",")]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 1.5 * lengths[-1]


MOE = SizedModel(
    ModelShape(
        6,
        1024,
        8,
        4,
        128,
        0,
        gated=True,
        vocab=32000,
        tied=False,
        seq_len=2048,
        experts=6,
        top_k=2,
        expert_ff=1024,
    ),
    sequences=16,
)


@pytest.mark.proof
@pytest.mark.parametrize(("pipeline", "memory_gb"), [(1, 4.0), (2, 30.0)])
def test_the_optimum_with_experts_is_that_of_going_through_all(pipeline, memory_gb, monkeypatch):
    monkeypatch.setattr("jaxscale.planner.search.sized_model.REMATS", TRIED[:2])
    one_each = functools.partial(small_schedule, most=1)
    monkeypatch.setattr("jaxscale.planner.search.space.find_schedule", one_each)
    pins = {"pipeline": pipeline, "microbatches": 2, "head": "last", "sequence_chunks": 1}
    if pipeline > 1:
        pins |= {"offload": "none"}
    asked = Query(MOE, FOUR, pins, memory_gb * 1e9)
    everything = []
    for sizes in itertools.product((1, 2, 4), repeat=5):
        mesh = dict(zip(("data", "fsdp", "expert", "context", "tensor"), sizes), **pins)
        if np.prod(sizes) * pipeline != 4:
            continue
        for stage, options in itertools.product(range(4), string_options(pipeline)):
            if same_as_another(mesh, stage, options):
                continue
            try:
                layout = Layout(**mesh, zero_stage=stage, **options)
                if MOE.refusal(layout)[0]:
                    continue
                plan = predict_plan(asked, layout)
            except ValueError:
                continue
            if plan.fits:
                everything.append((plan.step_seconds, layout))
    assert {layout.expert for _, layout in everything} == {1, 2}  # 6 experts do not divide by 4
    best = _distinct(everything)
    found = search_layouts(asked, 3)
    assert found.seconds == pytest.approx([seconds for seconds, _ in best[:3]], rel=1e-12)
    fastest = best[0][0] * (1 + 1e-12)
    assert found.layouts[0] in [layout for seconds, layout in everything if seconds <= fastest]


@pytest.mark.proof
@pytest.mark.parametrize("devices", [512, 1024])
def test_the_best_plans_of_many_experts_spread_them(devices, monkeypatch):
    """DeepSeek-V3: to gather 256 experts a layer takes longer than to send tokens to eight."""
    monkeypatch.undo()
    shape = dataclasses.replace(NAMED["deepseek-v3"], seq_len=4096)
    asked = Query(SizedModel(shape, 1024), make_cluster("h100-sxm", devices), {"pipeline": 1})
    plans = [predict_plan(asked, layout) for layout in search_layouts(asked, 2).layouts]
    for one in plans:
        assert one.layout.expert > 1
        assert one.terms["expert"] > 0.01 * one.step_seconds
        assert one.fits


def test_eight_large_experts_are_gathered_rather_than_sent_to():
    """Mixtral at 64K tokens a device: its weights are few compared with the tokens. Where the
    experts are spread, what all ranks share is summed over them too, and the busiest has more to
    do."""
    shape = dataclasses.replace(NAMED["mixtral-8x7b"], seq_len=4096)
    asked = Query(SizedModel(shape, 1024), make_cluster("h100-sxm", 64), {"pipeline": 1})
    gathered = predict_plan(asked, search_layouts(asked, 1).layouts[0])
    assert gathered.layout.expert == 1
    pins = {"pipeline": 1, "remat": gathered.layout.remat, "expert": 8}
    spread = dataclasses.replace(asked, pins=pins)
    sent = predict_plan(spread, search_layouts(spread, 1).layouts[0])
    assert sent.terms["expert"] > 0.02 * sent.step_seconds
    assert sent.terms["matmul"] > 1.05 * gathered.terms["matmul"]


@pytest.mark.parametrize("nodes", [4, 8])
def test_mt5_xxl_is_ranked_with_the_second_stage_before_the_third(nodes, monkeypatch):
    """arXiv 2310.05350; sign only. With the same micro-batches, where both fit."""
    monkeypatch.undo()
    pins = {"remat": "full", "offload": "none", "fsdp": 8 * nodes, "accumulation": "sequential"}
    found = search_layouts(
        Query(SizedModel(NAMED["mt5-xxl"], 512), make_cluster("a100-80", 8 * nodes), pins), 50
    )
    place = {(one.zero_stage, one.microbatches): n for n, one in enumerate(found.layouts)}
    both = [count for stage, count in place if stage == 2 and (3, count) in place]
    assert both
    assert all(place[2, count] < place[3, count] for count in both)


@pytest.mark.parametrize("by", ["config", "shape"])
def test_long_contexts_are_shared(by, monkeypatch):
    """131,072 tokens of an 8B on 64 H100, by the two ways to say it."""
    monkeypatch.undo()
    config = load("configs/llama3_8b.py")
    data = dataclasses.replace(config.data, seq_len=131072, global_batch_size=32)
    shape = dataclasses.replace(NAMED["llama3-8b"], seq_len=131072)
    model = {"config": dataclasses.replace(config, data=data), "shape": SizedModel(shape, 32)}[by]
    asked = Query(model, make_cluster("h100-sxm", 64), {"pipeline": 1, "remat": "full"})
    best = predict_plan(asked, search_layouts(asked, 1).layouts[0])
    assert best.layout.context > 1
    assert best.fits


@pytest.mark.proof
def test_the_passes_that_are_kept_are_those_of_going_through_all(monkeypatch):
    """Where there is memory for more than recomputing needs, and for less than keeping all does."""
    monkeypatch.setattr("jaxscale.planner.search.trainable_model.REMATS", ("none", "full"))
    large = dataclasses.replace(CONFIG.data, global_batch_size=64)
    deep = dataclasses.replace(CONFIG.model, num_layers=8)
    config = dataclasses.replace(CONFIG, data=large, model=deep)
    pins = {"pipeline": 4, "microbatches": 16, "offload": "none", "head": "last"}
    asked = Query(config, FOUR, {**pins, "sequence_chunks": 1}, 4e9)
    every = [
        Layout(
            pipeline=4,
            data=1,
            microbatches=16,
            remat=remat,
            schedule=schedule,
            virtual_stages=chunks,
        )
        for remat in ("none", "full", *(f"keep:{passes}" for passes in range(1, 12)))
        for schedule, chunks in (
            ("1f1b", 1),
            ("1f1b:fused", 1),
            ("zb_h1", 1),
            ("zb_v", 2),
            ("interleaved", 2),
            ("interleaved:fused", 2),
        )
    ]
    seconds = {
        layout: predict_plan(asked, layout).step_seconds
        for layout in every
        if not why_infeasible(asked, layout)
    }
    found = search_layouts(asked, 1)
    assert found.seconds == pytest.approx([min(seconds.values())], rel=1e-12)
    assert found.layouts[0].remat.startswith("keep:")
    assert seconds[found.layouts[0]] == pytest.approx(found.seconds[0], rel=1e-12)
    others = [time for layout, time in seconds.items() if not layout.remat.startswith("keep:")]
    assert found.seconds[0] < 0.9 * min(others)


@pytest.mark.proof
def test_what_is_found_trains_and_fits():
    for layout in search_layouts(query(4.0, tensor=2), 10).layouts:
        assert why_infeasible(query(4.0, tensor=2), layout) == ""
        assert layout.num_devices == 8


def test_what_overflows_the_host_is_not_taken(monkeypatch):
    # Where data takes ranks each has more of the state.
    asked = query(4.0, pipeline=1, context=1, microbatches=4, remat="full", offload="optimizer")

    def offloaded():
        found = search_layouts(asked, 10)
        return [predict_plan(asked, layout).host_bytes for layout in found.layouts], found

    sizes, everything = offloaded()
    assert TOO_LARGE_FOR_HOST not in everything.rejected
    limit = min(sizes)
    assert limit < max(sizes)
    monkeypatch.setattr("jaxscale.planner.search.space.HOST_MEMORY_BYTES", limit)
    sizes, found = offloaded()
    assert max(sizes) <= limit
    assert found.rejected[TOO_LARGE_FOR_HOST] > 0


def test_less_memory_takes_no_less_time():
    seconds = [search_layouts(query(size, pipeline=1), 1).seconds[0] for size in (2.5, 4.0, 30.0)]
    assert seconds == sorted(seconds, reverse=True)


def test_pins_hold():
    pins = {"tensor": 2, "remat": "full", "microbatches": 4, "zero_stage": 1}
    for layout in search_layouts(query(30.0, **pins), 5).layouts:
        assert {name: getattr(layout, name) for name in pins} == pins
    for layout in search_layouts(query(30.0, pipeline=2, schedule="zb_h1"), 5).layouts:
        assert (layout.pipeline, layout.schedule) == (2, "zb_h1")


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ({"data": -1}, "--pin data=-1: leave it out for the planner to choose"),
        ({"tensor": -1}, "--pin tensor=-1: leave it out for the planner to choose"),
        ({"schedule": "order.csv"}, "--pin schedule=order.csv: the planner ranks"),
        ({"schedule": "auto"}, "--pin schedule=auto: the planner ranks"),
        ({"schedule": "1f1b:3,x"}, "'3,x' is not an option"),
        ({"virtual_stages": 0}, "--pin virtual_stages=0: at least 1"),
        ({"remat": "auto"}, "--pin remat=auto: leave it out"),
        ({"microbatches": 3}, "--pin microbatches=3: a step's .* the nearest: 2 or 4"),
    ],
)
def test_pins_that_no_plan_has_are_refused(pin, said):
    with pytest.raises(ValueError, match=said):
        check_pins(query(30.0, pipeline=2, **pin))


@pytest.mark.parametrize("pins", [{"pipeline": 1}, {"pipeline": 2, "schedule": "1f1b"}])
def test_what_does_not_fit_is_counted_and_the_smallest_named(pins):
    found = search_layouts(query(0.1, **pins), 5)
    assert not found.layouts
    assert found.rejected[TOO_LARGE] > 100
    assert found.smallest is not None
    peak = step_memory(with_layout(found.smallest), "gpu", own_host=True).peak
    # Nothing that fits needs more than this one.
    assert search_layouts(query(1.001 * peak / 1e9, **pins), 1).layouts


def test_what_the_engine_refuses_is_counted_in_its_words():
    odd = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, global_batch_size=6))
    found = search_layouts(query(30.0, odd, pipeline=1), 1)
    assert found.rejected["data.global_batch_size does not split"] > 0
    assert (
        "does not split into layout.data" in found.messages["data.global_batch_size does not split"]
    )


def test_the_trainers_checks_of_a_spread_sequence_are_the_searchs():
    """Heads that ranks exchange, and kernels that attend within one device."""
    pins = {"pipeline": 1, "context": 8, "tensor": 1, "zero_stage": 3, "microbatches": 16}
    whole = Query(CONFIG, EIGHT, {**pins, "context_method": "ulysses"}, 40e9)
    assert search_layouts(whole, 1).layouts
    changes = {"ulysses": {"num_heads": 12, "num_kv_heads": 4}, "ring": {"attention": "cudnn"}}
    for method, changed in changes.items():
        model = dataclasses.replace(CONFIG.model, **changed)
        config = dataclasses.replace(CONFIG, model=model)
        found = search_layouts(Query(config, EIGHT, {**pins, "context_method": method}, 40e9), 1)
        assert not found.layouts
        (message,) = found.messages.values()
        with pytest.raises(ValueError, match=re.escape(message)):
            check_spread_attention_or_heads(config, method)


def check_spread_attention_or_heads(config, method):
    """As the trainer does, for eight ranks of context."""
    layout = Layout(context=8, context_method=method)
    check_ulysses(layout, config.model)
    attention_name(layout, config.model, config.data, "gpu")


def test_rings_in_a_pipeline_are_for_an_even_number_of_ranks():
    twelve = make_cluster("h200", 12)
    pins = {"pipeline": 2, "schedule": "1f1b", "remat": "none", "microbatches": 1, "tensor": 1}
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, seq_len=3072))
    found = search_layouts(Query(config, twelve, {**pins, "data": 1}, 1e12), 999)
    ranks = collections.defaultdict(set)
    for one in found.layouts:
        ranks[one.context_method].add(one.context)
    assert ranks == {"ring": {6}, "gather": {3, 6}}


def test_meshes_are_all_factorisations():
    assert len(list(mesh_shapes(8))) == 35  # of 2 * 2 * 2 over five axes
    assert all(np.prod(sizes) == 12 for sizes in mesh_shapes(12))
    assert {sizes[5] for sizes in mesh_shapes(8, {"tensor": 4})} == {4}
    assert not list(mesh_shapes(8, {"tensor": 3}))
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert {sizes[3] for sizes in mesh_shapes(8, experts=6)} == {1, 2}
    assert len(list(mesh_shapes(8, experts=8))) == 56  # over six axes


@pytest.mark.proof
def test_a_hundred_thousand_layouts_are_considered(monkeypatch):
    monkeypatch.undo()
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(CONFIG.model, num_layers=32),
        data=dataclasses.replace(CONFIG.data, global_batch_size=512),
    )
    found = search_layouts(Query(config, make_cluster("H100-SXM", 64)), 10)
    assert found.considered > 1e5


@pytest.mark.proof
def test_a_hundred_thousand_layouts_of_experts_are_considered(monkeypatch):
    monkeypatch.undo()
    shape = dataclasses.replace(NAMED["mixtral-8x7b"], seq_len=4096)
    found = search_layouts(
        Query(SizedModel(shape, 512), make_cluster("H100-SXM", 64), {"remat": "full"}), 10
    )
    assert found.considered > 1e5


def test_rows_of_tensor_are_searched_where_the_engine_has_them():
    """No more than columns, unless they are pinned; every layout found is one that it takes."""
    some = {"pipeline": 1, "tensor": 8, "zero_stage": 3}
    found = search_layouts(query(40.0, **some), 99)
    tried = {(one.context, one.tensor_rows) for one in found.layouts}
    assert (1, 2) in tried
    assert all(rows == 1 or (context, rows) == (1, 2) for context, rows in tried)
    pinned = search_layouts(query(40.0, tensor_rows=4, **some), 99)
    assert {one.tensor_rows for one in pinned.layouts} == {4}
    pinned = search_layouts(query(40.0, tensor_rows=3, **some), 1)
    assert not pinned.layouts
    assert "does not divide layout.tensor" in pinned.messages["not available in this version"]


@pytest.mark.proof
def test_tables_of_more_pipelines_than_are_kept_are_built_once(monkeypatch):
    monkeypatch.undo()
    for cached in (pipeline_table, _cells, _most_slots, _counted, default_stage_layers):
        cached.cache_clear()
    built = collections.Counter()

    def counted(*words, **options):
        built[words, *options.items()] += 1
        return make_order(*words, **options)

    monkeypatch.setattr("jaxscale.planner.tables.table_makespan.make_order", counted)
    model = dataclasses.replace(CONFIG.model, num_layers=16)
    one = Query(dataclasses.replace(CONFIG, model=model), make_cluster("H100-SXM", 32))
    common = Layout(pipeline=8, data=1, fsdp=4, virtual_stages=1, remat="keep:2", microbatches=8)
    layouts = stack_layouts([dataclasses.replace(common, microbatches=m) for m in range(8, 80)])
    pipelines = make_pipelines(one.planned_model, layouts)
    batch_buffers(pipelines)
    batch_step_seconds(one, layouts, pipelines)
    assert len(built) > pipeline_table.cache_info().maxsize
    assert set(built.values()) == {1}
