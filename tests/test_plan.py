"""The command, and what others call."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import pytest

from jaxscale import config as configs
from jaxscale.compiled.topology import topology_name
from jaxscale.config.layout import Layout
from jaxscale.plan import main, parse_bytes, parse_pins, parse_tokens, split_pins
from jaxscale.planner import plan_layouts
from jaxscale.planner.cost.cluster import make_cluster

ROOT = pathlib.Path(__file__).parent.parent
SMALL = ["--hardware", "h100-sxm", "--devices", "16"]
COMMAND = [
    "--config",
    "configs/llama32_1b.py",
    *SMALL,
    "--pin",
    "pipeline=1",
    "remat=full",
    "offload=none",
]


def fake_topology(name):
    return types.SimpleNamespace(devices=range(16))


def test_the_command_ranks_and_writes(tmp_path, capsys):
    numbers, config, page = (tmp_path / name for name in ("plan.json", "my plan.py", "plan.html"))
    status = main(
        [
            *COMMAND,
            "--top",
            "3",
            "--why_not",
            "tensor=8,zero_stage=1",
            "--compare",
            "1",
            "2",
            "--json",
            str(numbers),
            "--write",
            str(config),
            "--report",
            str(page),
        ]
    )
    assert status == 0
    printed = capsys.readouterr().out
    for words in (
        "MFU counts",
        "layouts considered",
        "matmuls of layers and head",
        "optimizer state",
        "why not tensor=8 zero_stage=1",
        "is faster, by",
    ):
        assert words in printed
    found = json.loads(numbers.read_text())
    plans = found["plans"]
    assert len(plans) == 3
    keys = {"layout", "step_seconds", "tokens_per_second", "mfu", "hfu", "memory_bytes", "terms"}
    for plan in plans:
        assert keys <= set(plan)
        assert sum(plan["terms"].values()) == pytest.approx(plan["step_seconds"])
        assert Layout(**plan["layout"]).num_devices == 16
    assert [plan["step_seconds"] for plan in plans] == sorted(p["step_seconds"] for p in plans)
    assert all(count > 0 for count in found["rejected"].values())
    command = f"python -m jaxscale.train --config {shlex.quote(str(config))}"  # to paste
    assert f"wrote {config}: {command}\n" in printed
    assert f"Command: {command} --workdir 'runs/my plan'\n" in config.read_text()
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hardware", "h101"], "device 'h101' is not known; it can be"),
        (["--pin", "tensor"], "'tensor' is not KEY=VALUE"),
        (["--pin", "tensor=two"], "'tensor=two': layout.tensor can be a whole number"),
        (["--max_memory", "70"], "--max_memory '70' is not a size such as 70GB"),
        (["--batch_tokens", "4 million"], "is not a number such as 4M"),
        (["--hardwere", "x"], "unknown flag --hardwere; did you mean --hardware"),
        (["--compare", "1", "9"], "--compare 9: plans 1 to 1 are shown; raise --top for more"),
        (["--compare", "1", "0"], "--compare 0: plans 1 to 1 are shown"),
        (["--compare", "1", "tensor"], "'tensor' is not KEY=VALUE"),
        (["--why_not", "tensor"], "'tensor' is not KEY=VALUE"),
        (["--why_not", "tensr=3"], "--why_not tensr is not a field of a layout"),
        (["--why_not", "remat=ful"], "did you mean 'full'"),
        (["--why_not", "schedule=order.csv"], "--why_not schedule=order.csv: the planner ranks"),
        (["--why_not", "tensor=4,tensor=2"], "'tensor=2': tensor is already 4; give it once"),
        (["--pin", "remat=none"], "'remat=none': remat is already full; give it once"),
        (["--compare", "1", "zero_stage=7"], "layout.zero_stage = 7; it can be"),
        (["--trials", "3"], "--trials is read with --measure; add that"),
        (["--storage=a.db"], "--storage is read with --measure"),
        (["--topology", "h100:2x8"], "--topology is read with --prove"),
        (["--measure"], "--hardware is not read with --measure"),
        (
            ["--validate=runs.csv"],
            "python tools/planner_validation/score.py CSV",
        ),
        (["--config.layout.tensor=4"], "the planner chooses it; use --pin tensor=4"),
        (["--config.layout=auto"], "the planner chooses it; leave it out"),
        (["--prove", "2"], "--prove 2: plans 1 to 1 are shown; raise --top for more"),
        (["--prove", "1", "--topology", "foo:1x4"], "topology 'foo:1x4' is not known"),
        (["--prove", "1", "--devices", "8"], "--topology h100:1x8 has 16 devices, and the plans"),
        (["--prove", "1", "--hardware", "mi300x"], "there is no compiler target for MI300X"),
        (["--report", "nowhere/plan.html"], "--report: nowhere/plan.html: there is no folder"),
        (["--write", "docs"], "--write: docs is a folder"),
        (["--max_memory", "85GB"], "85.00 GB is more than the 84.90 GB of H100-SXM; give as"),
        (["--max_memory", "0GB"], "--max_memory '0GB' is not a size such as 70GB"),
        (["--batch_tokens", "0"], "--batch_tokens '0' is not a number such as 4M"),
        (["--batch_tokens", "9999999M"], "is not a number such as 4M, 512K or 4194304, up to"),
    ],
)
def test_refusals(words, said, capsys, monkeypatch):
    """All of them before any layout is looked at."""
    monkeypatch.setattr(plan_layouts, "search_layouts", None)
    monkeypatch.setattr("jaxscale.compiled.topology.leave_hardware_alone", lambda: None)
    if "foo:1x4" not in words:
        monkeypatch.setattr("jaxscale.compiled.topology.open_topology", fake_topology)
    with pytest.raises(SystemExit):
        main([*COMMAND, "--top", "1", *words])
    assert said in capsys.readouterr().err


def test_what_must_be_said(capsys):
    for words, said in (
        (["--config", "configs/tiny.py"], "--hardware is missing"),
        (SMALL, "--config FILE or --model NAME is missing"),
        (["--model", "mixtral-8x7b", *SMALL], "--batch_tokens is missing"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert said in capsys.readouterr().err


MODEL = [
    "--model",
    "qwen3-30b-a3b",
    "--batch_tokens",
    "1M",
    "--hardware",
    "h100-sxm",
    "--devices",
    "32",
    "--pin",
    "pipeline=1",
]


@pytest.mark.proof
def test_a_model_by_its_name_is_ranked_and_explained(tmp_path, capsys):
    numbers, page = tmp_path / "plan.json", tmp_path / "plan.html"
    main(
        [
            *MODEL,
            "--top",
            "2",
            "--why_not",
            "expert=256",
            "--compare",
            "1",
            "expert=8",
            "--json",
            str(numbers),
            "--report",
            str(page),
        ]
    )
    printed = capsys.readouterr().out
    for words in (
        "30.5 B parameters, 3.4 B active per token on 32 H100-SXM",
        "256 sequences of 4096 tokens per step",
        "for the memory of our step, describe it by a config",
        "expert all-to-alls, exposed",
        "optimizer state",
        "is faster, by",
        "no mesh of 32 devices has pipeline 1 x expert 256",
    ):
        assert words in printed
    found = json.loads(numbers.read_text())
    assert len(found["plans"]) == 2
    assert "not checked against the compiler" in found["note"]
    assert found["active_params"] == pytest.approx(3.3e9, rel=0.02)
    for plan in found["plans"]:
        assert sum(plan["terms"].values()) == pytest.approx(plan["step_seconds"])
        assert sum(plan["memory"].values()) == plan["memory_bytes"]
        assert len(plan["stage_memory_bytes"]) == plan["layout"]["pipeline"]
        assert max(plan["stage_memory_bytes"]) <= plan["memory_bytes"]
    assert "for the memory of our step" in page.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config", "configs/tiny.py"], "does not go with a config"),
        (["--config.data.seq_len=64"], "does not go with a config"),
        (["--write", "mine.py"], "--write needs a model that this version trains"),
        (["--prove", "1"], "--prove needs a model that this version trains"),
        (["--pin", "remat=save_matmuls"], "has no formula for a model given by its sizes"),
        (["--batch_tokens", "1000"], "not a whole number of sequences of seq_len = 4096"),
    ],
)
def test_refusals_of_a_model_by_its_name(words, said, capsys):
    with pytest.raises(SystemExit):
        main([*MODEL, *words])
    assert said in capsys.readouterr().err


def saved(tmp_path, **model) -> str:
    """The config.json of a run of Llama 3.2 1B, with model settings changed."""
    sections = configs.to_dict(configs.load("llama32_1b"))
    sections["model"] |= model
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sections))
    return str(path)


def test_a_file_of_a_config_is_planned_as_the_config(tmp_path, capsys):
    path, written = saved(tmp_path), tmp_path / "plan.py"
    pins = ["--pin", "pipeline=1", "remat=full", "offload=none", "--top", "2"]
    printed = []
    for words in (["--config", path], ["--model", path]):
        main([*words, *SMALL, *pins, "--config.data.seq_len=4096", "--write", str(written)])
        printed.append(capsys.readouterr().out + written.read_text())
    assert printed[0] == printed[1]
    assert "sequences of 4096 tokens" in printed[0]
    assert plan_layouts.resolve_model(path, 0, 0) == configs.load(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"data": 8}', "config.json is not the config of a run, sections of keys and values"),
        ('{"model": {"layers": 8}}', "config.model.layers"),
        ('{"model_type": "llama"}', "config.json is of a Hugging Face model; convert it"),
        ('{"models": {}}', "config.json does not describe a model; it must be"),
    ],
)
def test_a_file_of_no_config_is_refused(text, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path / "config.json"), *SMALL])
    assert said in capsys.readouterr().err


def test_a_file_of_a_config_imports_no_foreign_code(tmp_path, capsys, monkeypatch):
    (tmp_path / "foreign_model.py").write_text("raise SystemError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        main(["--model", saved(tmp_path, family="foreign_model:make"), *SMALL])
    assert "if you trust it, pass --trust_family to import it, or plan" in capsys.readouterr().err
    assert "foreign_model" not in sys.modules


def test_numbers_as_people_write_them():
    assert parse_tokens("4M") == 4 * 2**20
    assert parse_tokens("") == parse_bytes("") == 0
    assert (parse_bytes("70GB"), parse_bytes("64GiB")) == (70e9, 64 * 2**30)
    assert split_pins("remat=save:query,key,tensor=4") == ["remat=save:query,key", "tensor=4"]
    assert parse_pins(["tensor=4", "remat=full"]) == {"tensor": 4, "remat": "full"}
    assert parse_pins(["overlap_experts=True"]) == {"overlap_experts": True}


def run(*words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


@pytest.mark.proof
def test_a_function_and_a_command_neither_of_which_imports_jax():
    """Of a model that was traced before."""
    program = (
        "import sys, jaxscale\n"
        "asked = 'configs/tiny.py', 'h100-sxm', 2\n"
        "found = jaxscale.plan_layouts(*asked, pins={'pipeline': 1}, top=1)\n"
        "print(found.plans[0].layout.num_devices, 'jax' in sys.modules)\n"
    )
    assert run("-c", program) in ("2 True\n", "2 False\n")
    assert run("-c", program) == "2 False\n"
    assert "layouts considered" in run(
        "-m",
        "jaxscale.plan",
        "--config",
        "configs/tiny.py",
        "--hardware",
        "h100-sxm",
        "--devices",
        "2",
        "--pin",
        "pipeline=1",
        "--top",
        "1",
    )


@pytest.mark.proof
@pytest.mark.parametrize(
    ("devices", "pins", "said"),
    [
        (
            "3",
            [],
            "size = 8 does not split into .* = 3 parts; set data.global_batch_size to 6 or 9",
        ),
        ("12", [], "layout.fsdp 12 x .* = 12 parts; set data.global_batch_size to 12"),
        ("3", ["--pin", "tensor=3"], "data.seq_len = 64 does not split over .*tensor = 3"),
        ("6", ["--pin", "fsdp=3"], "layout.fsdp 3 x .* = 3 parts; set data.global_batch_size to 6"),
    ],
)
def test_a_batch_that_does_not_split_is_why_there_is_no_layout(devices, pins, said, capsys):
    with pytest.raises(SystemExit):
        main(["--config", "tiny", "--hardware", "h100", "--devices", devices, *pins])
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.proof
@pytest.mark.parametrize(("sequences", "nearest"), [(8, 0), (12, 16), (9, 8), (3, 8)])
def test_a_batch_that_does_not_split_is_said_with_the_nearest(sequences, nearest, capsys):
    words = ["--config", "tiny", "--hardware", "h100", "--devices", "8", "--top", "1"]
    words += ["--pin", "remat=full", "pipeline=1", f"--config.data.global_batch_size={sequences}"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert ("do not split over 8 devices" in printed) == bool(nearest)
    if nearest:
        assert f"the nearest number that splits is {nearest}\n" in printed


@pytest.mark.parametrize(
    ("config", "seen"), [("tiny", "causal attention"), ("bert_base", "attention to all tokens")]
)
def test_the_flops_of_attention_are_those_of_the_model(config, seen, capsys):
    pins = ["--pin", "remat=full", "pipeline=1", "tensor=1", "context=1"]
    words = ["--config", config, "--hardware", "h100", "--devices", "8", "--top", "1", *pins]
    assert main(words) == 0
    assert f"3 x forward, {seen} counted once" in capsys.readouterr().out


def test_a_device_of_ones_own_in_one_node(tmp_path, capsys):
    """It needs no network; of unknown power and price it has no energy and no cost."""
    device, numbers, page = (tmp_path / name for name in ("mine.json", "plan.json", "plan.html"))
    columns = {
        "name": "mine",
        "generation": "sm90",
        "cores": 132,
        "bf16_tflops": 900,
        "memory_gb": 80,
        "memory_gb_per_second": 3000,
        "node_devices": 8,
        "node_gb_per_second": 450,
    }
    device.write_text(json.dumps(columns))
    words = ["--config", "quickstart", "--hardware", str(device), "--devices", "8", "--top", "1"]
    words += ["--pin", "pipeline=1", "remat=full", "--json", str(numbers), "--report", str(page)]
    assert main(words) == 0
    assert re.search(r" GB +[\d.e-]+ +- +-\n", capsys.readouterr().out)
    (plan,) = json.loads(numbers.read_text())["plans"]
    assert plan["watts"] is None
    assert plan["joules"] is None
    assert plan["usd"] is None
    assert "<td>-</td></tr>" in page.read_text()
    device.write_text(json.dumps({**columns, "tdp_w": 700}))
    assert main(words) == 0
    (plan,) = json.loads(numbers.read_text())["plans"]
    assert 0.3 * 700 < plan["watts"] < 700
    assert plan["joules"] > 0


def test_proving_compares_predicted_with_compiled(monkeypatch, capsys, tmp_path):
    class Compiled:
        fits, peak_bytes, missing_bytes = True, 10_000_000_000, 0

    asked = []

    def compile_for(config, name):
        asked.append((config.layout, name))
        return Compiled

    monkeypatch.setattr("jaxscale.compiled.compile_ahead.compile_for", compile_for)
    monkeypatch.setattr("jaxscale.compiled.topology.leave_hardware_alone", lambda: None)
    monkeypatch.setattr("jaxscale.compiled.topology.open_topology", fake_topology)
    numbers = tmp_path / "plan.json"
    assert main([*COMMAND, "--top", "2", "--prove", "2", "--json", str(numbers)]) == 0
    proved = json.loads(numbers.read_text())["proved"]
    assert [one["compiled_bytes"] for one in proved] == [Compiled.peak_bytes] * 2
    assert [name for _, name in asked] == ["h100:2x8"] * 2
    assert "Proved by compiling for h100:2x8" in capsys.readouterr().out


def test_proving_nothing_is_a_failure(monkeypatch, capsys):
    def compile_for(config, name):
        raise ValueError("no host memory space")

    monkeypatch.setattr("jaxscale.compiled.compile_ahead.compile_for", compile_for)
    monkeypatch.setattr("jaxscale.compiled.topology.leave_hardware_alone", lambda: None)
    monkeypatch.setattr("jaxscale.compiled.topology.open_topology", fake_topology)
    assert main([*COMMAND, "--top", "1", "--prove", "1"]) == 1
    printed = capsys.readouterr().out
    assert "None of these could be compiled for h100:2x8" in printed
    assert "no host memory space" in printed


@pytest.mark.parametrize(
    ("hardware", "devices", "name"),
    [
        ("h100", 4, "h100:1x4"),
        ("h200", 12, "h200:3x4"),
        ("v5p", 16, "v5p:2x2x4"),
        ("v5e", 512, "v5e:16x16:2"),
    ],
)
def test_the_topology_has_as_many_devices_as_the_plans(hardware, devices, name):
    assert topology_name(make_cluster(hardware, devices)) == name
