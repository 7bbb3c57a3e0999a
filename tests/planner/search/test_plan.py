"""Plans: their terms and bytes add up, they are explained, written, and drawn."""

import dataclasses
import functools
import html.parser
import pathlib
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from jaxscale import config as configs
from jaxscale.config import from_dict
from jaxscale.config.layout import Layout, resolve_sizes
from jaxscale.pipeline.simulator import Costs, simulate
from jaxscale.pipeline.stages import open_stages
from jaxscale.pipeline_schedules.operations import R
from jaxscale.planner import auto_layout
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.cost.uneven_pipeline import UnevenPipelineCost
from jaxscale.planner.memory.terms import TEXTS
from jaxscale.planner.plan_layouts import plan_layouts, with_batch
from jaxscale.planner.report import html_report, json_report, text_report, why_not
from jaxscale.planner.report.write_config import write_plan
from jaxscale.planner.search.plan import RankedPlans, predict_plan
from jaxscale.planner.search.search import SearchResult, search_layouts
from jaxscale.planner.search.space import Query
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.training.flops import step_flops

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
QUERY = Query(CONFIG, make_cluster("A100-40", 8))
PIPELINE = Layout(pipeline=4, data=1, fsdp=2, microbatches=8, schedule="zb_h1", zero_stage=1)


@functools.cache
def answer(**pins) -> RankedPlans:
    return plan_layouts(
        CONFIG, "a100-40", 8, pins={"remat": "full", "offload": "none", **pins}, top=3
    )


@pytest.mark.parametrize(
    "layout", [Layout(data=2, fsdp=4), PIPELINE, Layout(data=2, fsdp=4, remat="full")]
)
def test_terms_and_bytes_add_up(layout):
    one = predict_plan(QUERY, layout)
    assert sum(one.terms.values()) == pytest.approx(one.step_seconds, rel=1e-12)
    assert min(one.terms.values()) >= 0
    assert sum(one.memory.at_peak.values()) == one.memory_bytes
    tokens = CONFIG.data.tokens_per_step / one.step_seconds
    assert one.tokens_per_second == pytest.approx(tokens)
    peak = 8 * 312e12
    flops = step_flops(CONFIG).model
    assert one.mfu == pytest.approx(flops * tokens / peak)
    assert (one.hfu > 1.1 * one.mfu) == (layout.remat == "full")
    assert set(one.terms) <= set(text_report.TERMS)


def test_layers_that_are_split_unevenly_take_the_time_that_they_take():
    """The closed forms split evenly; the last rank has the head, so fewer layers help it."""
    large_head = dataclasses.replace(
        CONFIG, model=dataclasses.replace(CONFIG.model, vocab_size=256000, num_layers=16)
    )
    query = dataclasses.replace(QUERY, model=large_head)
    by_default = predict_plan(query, dataclasses.replace(PIPELINE, fsdp=2))
    assert by_default.layers[-1] < by_default.layers[1]
    even = predict_plan(query, dataclasses.replace(PIPELINE, schedule="zb_h1:4,4,4,4"))
    assert by_default.step_seconds < even.step_seconds


def test_the_waterfall_and_the_stack_say_all_terms():
    one = answer(pipeline=1).plans[0]
    waterfall, stack = text_report.waterfall_text(one), text_report.memory_text(one)
    for name in one.terms:
        assert text_report.TERMS[name] in waterfall
    for name in one.memory.at_peak:
        assert TEXTS[name] in stack
    assert f"{one.step_seconds:.4f} s" in waterfall.splitlines()[len(one.terms)]
    assert "peak" in stack


def test_a_short_run_of_a_small_model_costs_more_than_nothing():
    """Days, MWh and GFLOP of a token are below 1 here, and were 0."""
    text = text_report.ranking_text(answer(pipeline=1))
    days, energy = re.split(r" {2,}", text.splitlines()[2])[-3:-1]
    gflop = re.search(r"MFU counts (\S+) GFLOP", text)
    assert gflop
    one, per_token = answer(pipeline=1).plans[0], step_flops(CONFIG).model
    cost = one.run_cost(CONFIG.data.tokens_per_step * CONFIG.run.steps)
    shown = [float(each) for each in (days, energy, gflop[1])]
    assert shown == pytest.approx(
        [cost.seconds / 86400, cost.joules / 3.6e9, per_token / 1e9], rel=0.05
    )


def test_replicas_are_named_only_where_there_are_some():
    one = predict_plan(QUERY, Layout(data=1, fsdp=8, zero_stage=1))
    assert one.terms["data"] > 0
    assert "replicas" not in text_report.waterfall_text(one)


def test_comparing_names_the_faster_and_the_largest_difference_first():
    first, last = answer(pipeline=1).plans[0], predict_plan(QUERY, PIPELINE)
    text = text_report.comparison(first, last)
    assert "A is faster, by" in text
    largest = max(
        text_report.TERMS, key=lambda n: abs(last.terms.get(n, 0) - first.terms.get(n, 0))
    )
    assert text.splitlines()[4].strip().startswith(text_report.TERMS[largest])


def test_why_not_says_what_is_wrong_and_what_would_do():
    tight = dataclasses.replace(QUERY, memory_bytes=2e9)
    layout = Layout(data=8, zero_stage=0)
    said = why_not.why_infeasible(tight, layout)
    assert re.search(r"it does not fit: [\d.]+ GB per device, [\d.]+ GB more than 2.00 GB", said)
    change = why_not.smallest_change(tight, layout)
    assert change is not None
    assert change[1].fits
    assert "layout." in change[0]


@pytest.mark.proof
def test_why_not_of_settings():
    model = dataclasses.replace(CONFIG.model, num_heads=4)
    config = dataclasses.replace(CONFIG, model=model)
    found = plan_layouts(config, "a100-40", 8, pins={"pipeline": 1, "offload": "none"}, top=1)
    assert "the best plan has it" in why_not.explain_why_not(
        found, {"remat": found.plans[0].layout.remat}
    )
    assert "% slower than the best" in why_not.explain_why_not(
        found, {"remat": "full", "tensor": 4}
    )
    free = dataclasses.replace(found, query=dataclasses.replace(found.query, pins={}))
    assert why_not.explain_why_not(free, {"schedule": "zb_h1"}) == (
        "why not schedule=zb_h1: the best plan has layout.pipeline = 1, where layout.schedule is "
        "not read; ask with a larger pipeline too, as pipeline=2 schedule=zb_h1"
    )
    one_row = {"tensor": 8, "tensor_rows": 1}
    assert "does not divide over layout.tensor = 8" in why_not.explain_why_not(found, one_row)
    assert "no mesh of 8 devices has pipeline 1 x tensor 3" in why_not.explain_why_not(
        found, {"tensor": 3}
    )
    said = why_not.explain_why_not(found, {"tensors": 2})
    assert "tensors is not a field of a layout" in said
    assert "--pin" not in said
    said = why_not.explain_why_not(found, {"schedule": "order.csv"})
    assert said.startswith("why not schedule=order.csv: the planner ranks")


def test_of_several_refusals_one_that_names_what_was_asked_for():
    messages = {"a": "divides by layout.tensor = 16", "b": "divides by layout.tensor = 1, twice"}
    none = SearchResult([], [], 2, {"a": 1, "b": 1}, None, messages)
    said = [
        why_not.nothing_fits(dataclasses.replace(QUERY, pins={"tensor": size}), none)
        for size in (1, 16, 4)
    ]
    assert [one.partition(": ")[2] for one in said] == [messages[key] for key in "baa"]


def test_nothing_fits_is_explained():
    with pytest.raises(ValueError, match=r"no layout on 8 A100-40.* fits\. .* needs least memory"):
        plan_layouts(
            CONFIG, "a100-40", 8, pins={"pipeline": 1, "remat": "full"}, max_memory_bytes=1e8
        )


def test_a_layout_that_the_cluster_or_the_model_cannot_have_is_not_predicted():
    assert predict_plan(QUERY, Layout(fsdp=2)) == predict_plan(QUERY, Layout(data=4, fsdp=2))
    for layout, said in (
        (Layout(data=2, fsdp=2), "(data 2 x fsdp 2) needs 4 devices and there are 8"),
        (Layout(fsdp=8, microbatches=64), "does not split into layout.data 1 x layout.fsdp 8 x "),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            predict_plan(QUERY, layout)
    model = dataclasses.replace(CONFIG.model, ngram_rows=1001)
    tables = TrainableModel(dataclasses.replace(CONFIG, model=model))
    for layout, said in (
        (Layout(data=8), "has 1001 rows, which do not divide over the layout's 8 devices"),
        (
            Layout(pipeline=2, data=1, microbatches=2, sequence_chunks=2, schedule="seq1f1b"),
            "layout.sequence_chunks = 2 is not available for a model with tables",
        ),
    ):
        assert said in tables.refusal(layout)[1]


def test_what_is_asked_wrongly_is_refused():
    for pins, said in (
        ({"tensr": 2}, "did you mean 'tensor'"),
        ({"remat": "ful"}, "did you mean 'full'"),
        ({"tensor": 3}, "no mesh of 8 devices has tensor 3"),
    ):
        with pytest.raises(ValueError, match=said):
            plan_layouts(CONFIG, "a100-40", 8, pins=pins)
    with pytest.raises(ValueError, match="top = 0 is too small; at least 1"):
        plan_layouts(CONFIG, "a100-40", 8, top=0)
    asked = {"pins": {"offload": "optimizer"}, "host_bytes_per_second": 0.0}
    with pytest.raises(ValueError, match="no rate of the link to the host; give host_gb_per_sec"):
        plan_layouts(CONFIG, "a100-40", 8, **asked)
    with pytest.raises(ValueError, match=r"not a whole number of sequences .* nearest is 4096, 2"):
        with_batch(CONFIG, 5000)
    assert with_batch(CONFIG, 4096).data.global_batch_size == 2


def test_a_written_config_is_the_plan(tmp_path):
    one = predict_plan(QUERY, PIPELINE)
    write_plan(tmp_path / "mine.py", one, "configs/some.py")
    loaded = configs.load(str(tmp_path / "mine.py"))
    assert loaded == dataclasses.replace(CONFIG, layout=PIPELINE)


@pytest.mark.proof
def test_layouts_of_this_machine():
    found = auto_layout.choose_layout(CONFIG, "cpu", "cpu", 8)
    assert found.layout.num_devices == 8
    assert found.layout.offload == "none"
    pinned = dataclasses.replace(CONFIG, layout=Layout(schedule="auto", tensor=2, remat="full"))
    taken = auto_layout.choose_layout(pinned, "cpu", "cpu", 8).layout
    assert (taken.tensor, taken.remat, taken.auto) == (2, "full", False)
    with pytest.raises(ValueError, match=r"hardware\.csv has no device 'Abacus'"):
        auto_layout.devices_here("Abacus", "gpu", 8)
    assert auto_layout.devices_here("NVIDIA H200", "gpu", 8).name == "H200-SXM"


def test_the_fastest_remat_policy_that_fits_is_chosen():
    config = configs.load("configs/mixtral_8x7b.py", ["layout.remat=auto"])
    config = dataclasses.replace(config, layout=resolve_sizes(config.layout, 64))
    cluster = make_cluster("H100-SXM", 64)
    chosen, line = auto_layout.choose_settings(config, cluster)
    query = Query(config, cluster)
    each = [
        predict_plan(query, dataclasses.replace(config.layout, remat=remat, virtual_stages=1))
        for remat in query.planned_model.remats
    ]
    fitting = [plan for plan in each if plan.memory_bytes <= plan.limit_bytes]
    assert 0 < len(fitting) < len(each)
    best = min(fitting, key=lambda plan: plan.step_seconds)
    assert best.layout.remat == chosen.layout.remat
    assert chosen == dataclasses.replace(
        config, layout=dataclasses.replace(config.layout, remat=best.layout.remat)
    )
    assert line == (
        f"layout.remat = 'auto' chose {best.layout.remat}, predicted "
        f"{best.memory_bytes / 1e9:.2f} GB of {best.limit_bytes / 1e9:.2f} GB a device"
    )
    small = dataclasses.replace(cluster, chip=dataclasses.replace(cluster.chip, memory_bytes=1e9))
    least, line = auto_layout.choose_settings(config, small)
    assert (least.layout.remat, "no policy is predicted to fit" in line) == ("full", True)
    many = dataclasses.replace(config.layout, fsdp=4096)
    config = dataclasses.replace(config, layout=many)
    least, line = auto_layout.choose_settings(config, make_cluster("H100-SXM", many.num_devices))
    assert least.layout.remat == "full"
    assert "nothing is predicted of this layout (data.global_batch_size does not split)" in line


class Page(html.parser.HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]


@functools.cache
def pipelined() -> RankedPlans:
    plans = (predict_plan(QUERY, PIPELINE), predict_plan(QUERY, Layout(data=2, fsdp=4)))
    return RankedPlans(
        QUERY, plans, search_layouts(dataclasses.replace(QUERY, pins={"tensor": 4}), 1)
    )


@pytest.mark.proof
def test_plans_are_shown_in_a_line():
    loop = pipelined()
    plan = loop.plans[1]
    said = f"Plan(Layout(data=2, fsdp=4), {plan.step_seconds:.4g} s a step, "
    assert repr(plan).startswith(said)
    assert repr(loop).startswith(f"RankedPlans(2 of {loop.found.considered:,}, the best Plan(")


@pytest.mark.proof
def test_unrolled_layers_come_with_a_caveat():
    loop = pipelined()
    query = dataclasses.replace(QUERY, pins={"unroll_layers": True})
    unrolled = dataclasses.replace(loop, query=query)
    said = "memory of unrolled layers are those of a loop"
    for report in (text_report.ranking_text, html_report.plan_page):
        assert said in report(unrolled)
        assert said not in report(loop)
    assert said in json_report.ranking_json(unrolled)["note"]


@pytest.mark.proof
def test_the_page_needs_nothing_else():
    page = Page(html_report.plan_page(pipelined()))
    assert not page.links
    assert "script" not in page.tags
    assert page.tags.count("svg") == 5  # two plans of two pictures, and a timeline
    assert page.tags.count("table") == 2


@pytest.mark.proof
def test_a_browser_shows_the_page(tmp_path):
    """Drawn by a headless browser: text where it should be, and bars of every colour."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no chromium here: apt-get install chromium")
    path, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    path.write_text(html_report.plan_page(pipelined()))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path}",
        "--window-size=1200,1600",
    ]
    subprocess.run(
        [browser, *flags, f"--screenshot={picture}", path.as_uri()],
        check=True,
        capture_output=True,
        timeout=120,
    )
    check_picture(picture)


def check_picture(picture: pathlib.Path) -> None:
    from matplotlib.image import imread  # noqa: PLC0415  Slow, and for this test alone.

    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (1600, 1200)
    for color in html_report.PALETTE[:4]:
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - wanted).max(axis=-1) < 3).sum() > 100, color
    dark = (pixels < 100).all(axis=-1)
    assert dark[:200].sum() > 1000  # the heading


def test_what_each_rank_of_a_pipeline_uses():
    """The first has most in flight, and the last allocates more than it uses."""
    plan = predict_plan(QUERY, Layout(pipeline=2, data=4, microbatches=4))
    assert plan.layers == (3, 3)
    # Not all buffers are fullest on the same rank.
    assert 0.99 * plan.memory_bytes < plan.stage_bytes[0] <= plan.memory_bytes
    assert plan.stage_bytes[1] < 0.95 * plan.memory_bytes
    flat = predict_plan(QUERY, Layout(data=8))
    assert flat.stage_bytes == [flat.memory_bytes]


def test_a_pipeline_that_keeps_passes_recomputes_the_others():
    """Its busiest rank is the first of four, with four passes in flight: it keeps half of them."""
    full, kept = (
        predict_plan(QUERY, dataclasses.replace(PIPELINE, schedule="1f1b", remat=remat)).terms
        for remat in ("full", "keep:2")
    )
    repeated, every = (terms["recompute"] / terms["matmul"] for terms in (kept, full))
    assert repeated == pytest.approx(4 / 8 * every, rel=1e-12)


@pytest.mark.parametrize("remat", ["none", "save_matmuls", "save_all_but_attention", "full"])
def test_a_pipeline_is_timed_by_the_table_that_the_engine_runs(remat):
    """Partial recompute of a layer is part of its backward pass: there is no R operation, so a
    short one costs no whole tick."""
    layout = dataclasses.replace(PIPELINE, schedule="1f1b", remat=remat)
    plan = predict_plan(QUERY, layout)
    table = open_stages(layout, CONFIG.model.num_layers, QUERY.planned_model.head_cost).table
    parts = UnevenPipelineCost.of(QUERY.work, QUERY.cluster, plan.parallelism)
    costs = parts.costs([0], plan.layers)
    run = simulate(table, Costs(*(tuple(np.ravel(cost).tolist()) for cost in costs)))
    assert (table.ops.kind == R).any() == (remat == "full")
    late = 1 + float(parts.late[0])
    whole = (float(parts.others[0]) + run.lockstep_makespan) * late
    assert plan.step_seconds == pytest.approx(whole, rel=1e-9)


def test_float8_is_planned_where_there_are_units_for_it():
    """Matmuls at twice the peak and casts between them: faster, and by less than twice."""

    def query(name, dtype):
        model = dataclasses.replace(CONFIG.model, matmul_dtype=dtype)
        return Query(dataclasses.replace(CONFIG, model=model), make_cluster(name, 8))

    layout = Layout(data=1, fsdp=8)
    wide, narrow = (predict_plan(query("H100-SXM", dtype), layout) for dtype in ("", "float8"))
    assert 0.5 < narrow.terms["matmul"] / wide.terms["matmul"] < 0.8
    assert narrow.step_seconds < wide.step_seconds
    for name, dtype, said in (
        ("A100-80", "float8", "which does not multiply it faster"),
        ("TPUv5p", "int8", "a third stays in model.compute_dtype"),
    ):
        with pytest.raises(ValueError, match=said):
            predict_plan(query(name, dtype), layout)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (({"params": "layer/*", "frozen": True},), "matches no parameter; they are embed/tokens, "),
        (({"params": "*", "frozen": True},), "freeze every parameter; leave 'frozen' out"),
    ],
)
def test_groups_that_a_run_refuses_are_not_planned(groups, said):
    optimizer = dataclasses.replace(CONFIG.optimizer, groups=groups)
    query = Query(dataclasses.replace(CONFIG, optimizer=optimizer), make_cluster("H100-SXM", 8))
    with pytest.raises(ValueError, match=said):
        predict_plan(query, Layout(data=1, fsdp=8))


def test_the_page_has_a_bar_for_every_term_at_once():
    """More than there are colours."""
    plan = SimpleNamespace(
        terms=dict.fromkeys(text_report.TERMS, 0.1), hidden={"fsdp": 0.1}, step_seconds=2.0
    )
    drawn = html_report._waterfall(plan)
    assert all(html.escape(words) in drawn for words in text_report.TERMS.values())


def test_a_plan_says_that_it_counts_gradients_which_are_frozen():
    said = "MFU and HFU count the weight gradients of parameters that optimizer.groups freeze"
    for group in ({"params": "layers/*", "frozen": True}, {"params": "*", "weight_decay": 0.0}):
        optimizer = dataclasses.replace(CONFIG.optimizer, groups=(group,))
        query = Query(dataclasses.replace(CONFIG, optimizer=optimizer), QUERY.cluster)
        assert (said in query.planned_model.note) == ("frozen" in group)
