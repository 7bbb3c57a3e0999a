"""Each study in its quick form: its page is written, and its rows have the paper's properties."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from jaxscale import config as configs
from jaxscale import study
from jaxscale.config.layout import Layout
from jaxscale.run import metrics, signals, training_loop
from jaxscale.run.pretrained import from_pretrained
from jaxscale.studies import scaling, shortest, transfer, trillion, zero
from jaxscale.studies.run_study import check_columns
from jaxscale.studies.shipped import SHIPPED
from jaxscale.studies.study import EVIDENCE

NAMES = [one.name for one in SHIPPED]
ON_ONE_DEVICE = ("critical_batch",)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Name -> the JSON of its quick form, by the command, and its folder."""
    folder, found = tmp_path_factory.mktemp("studies"), {}

    def run(name):
        if name not in found:
            output = folder / name
            arguments = [name, "--quick", "--output", str(output)]
            if name in ON_ONE_DEVICE:
                env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "JAX_ENABLE_X64": "0"}
                command = [sys.executable, "-m", "jaxscale.study", *arguments]
                subprocess.run(command, env=env, check=True, capture_output=True)
            else:
                with contextlib.redirect_stdout(io.StringIO()):
                    assert study.main(arguments) == 0
            found[name] = json.loads((output / f"{name}.json").read_text())
            found[name]["folder"] = output
            assert (output / f"{name}.html").stat().st_size > 20_000
        return found[name]

    return run


@pytest.mark.proof
@pytest.mark.parametrize("name", NAMES)
def test_a_quick_study_writes_its_page(name, results):
    found = results(name)
    check_columns(study.find_study(name), found["rows"])
    assert found["findings"]
    for one in found["comparisons"]:
        assert one["evidence"] in EVIDENCE
        assert all(one[part] for part in ("what", "published", "ours", "differs"))
        assert "no plan" not in one["ours"], one


@pytest.mark.proof
def test_stage_2_takes_at_most_as_long_as_stage_3(results):
    rows = results("zero")["rows"]
    held, points = zero.later_stage_slower(rows)
    assert held == points == 6
    # Facts of 1.3: bytes of states on 8, 16, 32 and 64 GPUs, stages 0 to 3.
    states = [[row["states_16_gb"] for row in rows if row["nodes"] == n] for n in (1, 2, 4, 8)]
    assert [[round(one, 1) for one in some] for some in states] == [
        [206.7, 71.1, 48.5, 25.8],
        [206.7, 61.4, 37.1, 12.9],
        [206.7, 56.5, 31.5, 6.5],
        [206.7, 54.1, 28.7, 3.2],
    ]


@pytest.mark.proof
def test_more_nodes_can_be_slower():
    """A small model, whose step on many nodes is latency of collectives."""
    case = {"size": "small", "hardware": "A100-80", "nodes": [1, 2, 32, 64]}
    rows = zero.ZERO.rows(case, pathlib.Path())
    assert [one for one in zero.falling_rates(rows) if "stage 3" in one]
    assert zero.later_stage_slower(rows) == (4, 4)


@pytest.mark.proof
def test_latency_alone_ends_weak_scaling_and_hides_nothing_without_it(results):
    rows = results("scaling")["rows"]
    with_latency, without = (
        scaling.change(rows, "step_seconds", name) for name in ("fsdp", scaling.WITHOUT_LATENCY)
    )
    assert with_latency > 1.2 > 1.05 > without
    # Waiting devices need most of the power of busy ones.
    assert scaling.change(rows, "watts_device") > scaling.change(rows, "tokens_per_second_device")
    assert scaling.first_gain(rows, "weak", "llama2_7b")["fsdp"] == 2048
    assert {row["devices"] for row in rows if row["step_seconds"]} == {*scaling.QUICK_DEVICES}


@pytest.mark.proof
def test_bubbles_alone_do_not_end_weak_scaling_on_frontier(results):
    rows = results("trillion")["rows"]
    assert trillion.efficiency(rows, "weak", "175b") > 0.98
    strong = trillion.efficiency(rows, "strong", "175b")
    assert strong
    assert strong < trillion.efficiency(rows, "weak", "175b")
    # Reports of utilisation above 70 % are not credible (section 8 of the facts).
    assert all(row["percent_of_peak"] < 70 for row in rows if row["percent_of_peak"])
    shares = [row for row in rows if row["part"] == "importance"]
    assert {row["setting"] for row in shares} == set(trillion.SPACE)


def test_the_authors_count_of_flops():
    """FLOPs of a token with k = 3 and 4, of the table of section 8 of the facts."""
    known = {"gpt_22b": (1.391e11, 1.855e11), "gpt_175b": (1.0755e12, 1.434e12)}
    for name, counts in known.items():
        config = configs.load(name)
        tokens = config.data.global_batch_size * config.data.seq_len
        found = [trillion.counted_flops(config, recompute) / tokens for recompute in (False, True)]
        assert found == pytest.approx(counts, rel=1e-3)


@pytest.mark.proof
def test_a_modular_pipeline_shortens_the_training(results):
    rows = results("shortest")["rows"]
    rate = rows[0]["network_gb_per_second"]
    assert shortest.speedup(rows, 160, rate) > 1.1
    for variant in shortest.VARIANTS:
        line = [row for row in rows if row["variant"] == variant]
        assert all(a["days"] > b["days"] for a, b in itertools.pairwise(line))
        assert all(row["fits"] for row in line)


@pytest.mark.proof
def test_activations_keep_their_size_over_widths_with_mup_alone(results):
    """The coordinate check, from width 32 to 128."""
    rows = results("transfer")["rows"]
    assert 0.5 < transfer.size_ratio(rows, transfer.MUP) < 1.5
    assert transfer.size_ratio(rows, transfer.STANDARD) > 4


@pytest.mark.proof
def test_a_multiplied_update_is_that_of_the_rate(tmp_path):
    config = transfer.width_config(32, transfer.MUP, 3)
    at_rate = dataclasses.replace(config.optimizer, learning_rate=0.25)
    (got,) = transfer.train_at_rates(config, [(0.25, 3)], tmp_path)
    (expected,) = transfer.train_at_rates(
        dataclasses.replace(config, optimizer=at_rate), [(1.0, 3)], tmp_path
    )
    assert got == pytest.approx(expected, rel=1e-4)


def test_the_best_rate_is_between_those_tried():
    rows = [
        {"form": "muP", "width": width, "steps": 9, "learning_rate": 2.0**n, "heldout_loss": loss}
        for width, best in ((32, -5), (64, -6))
        for n, loss in ((n, abs(n - best) ** 2) for n in range(-8, -3))
    ]
    assert transfer.best_rates(rows, "muP") == {32: 2**-5, 64: 2**-6}
    assert transfer.octaves(rows, "muP") == -1
    assert transfer.lost_by_transfer(rows, "muP") == 1


def test_layouts_of_a_variant_share_the_critical_batch():
    config = configs.load("x_family:64")
    for variant in shortest.VARIANTS:
        some = list(shortest.layouts(config, variant, 8, every_depth=False))
        assert len(some) > 10
        for layout in some:
            parts = layout.data * layout.fsdp * layout.microbatches
            assert config.data.global_batch_size % parts == 0
            # A pipeline has one sequence in a micro-batch.
            assert layout.pipeline == 1 or config.data.global_batch_size == parts
            assert layout.tensor == 8


def test_sent_bytes_of_stages():
    """Twice the gradients, or one gather and one reduction, or two gathers and one reduction."""
    four = [Layout(data=1, fsdp=4, zero_stage=stage, microbatches=2) for stage in range(4)]
    found = [zero.sent_bytes(one, 1000, 2) for one in four]
    assert found == [3000, 3000, 4500, 9000]


@pytest.mark.proof
def test_a_hand_off_sees_later_tokens_and_warms_up_again(results):
    """The logits of a token depend on later tokens after the switch, not before."""
    found = results("compute_optimal")
    numbers = [row["objective"] for row in found["rows"]].index("handoff") + 1
    folder = found["folder"] / f"case_{numbers}"
    tokens = np.full((1, 8), 65)
    changed = np.where(np.arange(8) == 6, 66, tokens)
    for name, sees in (("clm", False), ("mlm", True)):
        model = from_pretrained(folder / name)
        assert bool(np.any(model(tokens)[0, :6] != model(changed)[0, :6])) is sees
        rates = [one["learning_rate"] for one in metrics.read(folder / name / "metrics.jsonl")[:-1]]
        warmup = math.ceil(0.05 * len(rates))
        assert rates.index(max(rates)) + 1 == warmup
        assert max(rates) == pytest.approx(found["rows"][numbers - 1]["learning_rate"])


def test_the_list_names_every_study(capsys):
    assert study.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    for name in NAMES:
        page = pathlib.Path("docs/studies", f"{name}.md").read_text()
        assert f"python -m jaxscale.study {name} " in page
        assert f"]({name}.png)" in page
        assert pathlib.Path("docs/studies", f"{name}.png").exists()
        assert len(page.splitlines()) <= 60
        assert max(map(len, page.splitlines())) <= 120 or re.search(r"^\|", page, re.MULTILINE)


def test_a_study_that_is_asked_to_stop_in_a_run_resumes(monkeypatch, capsys, tmp_path):
    def rows(case, folder):
        raise training_loop.Stopped("SIGTERM: stopped after step 3, saved", {})

    monkeypatch.setattr(study, "SHIPPED", [dataclasses.replace(SHIPPED[0], rows=rows)])
    name = SHIPPED[0].name
    assert study.main([name, "--quick", "--output", str(tmp_path)]) == signals.STOPPED
    assert "saved; the same command resumes from there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zer"], "'zer' is not a study; it can be zero, .*; did you mean 'zero'"),
        ([], "NAME is missing; it can be zero, "),
        (["zero", "--hardware", "H10"], "device 'H10' is not known; it can be .*; did you mean"),
        (["zero", "--quik"], "unknown flag --quik; did you mean --quick"),
    ],
)
def test_a_bad_command_is_refused_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        study.main(words)
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)
