"""A run's folder: its config on any machine, and the commands that work from it."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jaxscale import config, evaluate, generate, run_folder, supervise, train
from jaxscale.config import Config, DataConfig
from jaxscale.config.layout import Layout, resolve_sizes
from jaxscale.config.model import ModelConfig
from jaxscale.run.setup.layout import for_sampling, open_engine
from jaxscale.run.setup.restore import restore_params
from jaxscale.run.setup.text import open_tokenizer
from jaxscale.storage import durable
from tests.without_jax import without_jax


def save(path: pathlib.Path, **layout) -> pathlib.Path:
    """A folder as training leaves it: the layout is resolved."""
    saved = Config(layout=Layout(**{"data": 1, **layout}))
    (path / "config.json").write_text(json.dumps(config.to_dict(saved)))
    return path


def load(path: pathlib.Path, *overrides: str, num_devices: int) -> Layout:
    """The layout that a command uses there."""
    loaded = run_folder.load_config(path, overrides)
    loaded = run_folder.fit_devices(loaded, num_devices, overrides)
    return resolve_sizes(loaded.layout, num_devices)


def test_a_home_folder_that_the_shell_left_unexpanded_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_folder.folder("~/run") == tmp_path / "run"


def test_what_was_saved_comes_back(tmp_path):
    assert run_folder.load_config(save(tmp_path, fsdp=4)) == Config(layout=Layout(data=1, fsdp=4))


def test_overrides_are_read_as_the_types_of_what_they_replace(tmp_path):
    loaded = run_folder.load_config(
        save(tmp_path),
        [
            "data.source=a,b",
            "data.tokenizer=3",
            "optimizer.learning_rate=1",
            "model.qk_norm=True",
            "data.seq_len=64",
            "model.compute_dtype=float32",
        ],
    )
    assert [source.path for source in loaded.data.source] == [("a",), ("b",)]
    assert loaded.data.tokenizer == "3"
    assert loaded.optimizer.learning_rate == 1.0
    assert loaded.model.qk_norm is True
    assert (loaded.data.seq_len, loaded.model.compute_dtype) == (64, "float32")
    again = run_folder.load_config(tmp_path, ["data.source=('c',)"])
    assert again.data.source[0].path == ("c",)
    one = "data.validation={'name': 'more', 'path': 'c,d.txt'}"
    (again,) = run_folder.load_config(tmp_path, [one]).data.validation
    assert (again.name, again.path) == ("more", ("c,d.txt",))


def test_a_run_from_before_the_setting_begins_prompts_as_it_did(tmp_path):
    for tokenizer, saved, expected in (
        ("t.json", {}, "boundary"),
        ("t.json", {"text_begin": "tokenizer"}, "tokenizer"),
        ("bytes", {}, "tokenizer"),
    ):
        given = config.from_dict({"data": {"tokenizer": tokenizer}})
        sections = config.to_dict(given)
        assert sections["data"].pop("text_begin", "") == (
            "" if tokenizer == "bytes" else "tokenizer"
        )
        sections["data"] |= saved
        (tmp_path / "config.json").write_text(json.dumps(sections))
        assert run_folder.load_config(tmp_path).data.text_begin == expected
        chosen = run_folder.load_config(tmp_path, ["data.text_begin=tokenizer"])
        assert chosen.data.text_begin == "tokenizer"


SAVED = {
    "data": 2,
    "fsdp": 2,
    "tensor": 2,
    "overlap_tensor": True,
    "zero_stage": 1,
    "microbatches": 2,
}


@pytest.mark.parametrize(
    ("num_devices", "overrides", "expected"),
    [
        (8, [], {"data": 2, "fsdp": 2, "tensor": 2}),
        (1, [], {}),
        (4, [], {"data": 4}),
        (4, ["layout.fsdp=2"], {"data": 2, "fsdp": 2}),
        (4, ["layout.fsdp=-1"], {"fsdp": 4}),
        (8, ["layout.tensor=4"], {"data": 2, "tensor": 4}),
        (8, ["layout.data=1", "layout.tensor=-1"], {"tensor": 8}),
    ],
)
def test_a_run_fits_other_devices(num_devices, overrides, expected, tmp_path, caplog):
    with caplog.at_level("INFO", "jaxscale"):
        layout = load(save(tmp_path, **SAVED), *overrides, num_devices=num_devices)
    overlaps = {"overlap_tensor": "tensor" in expected}  # or it would be refused
    settings = {"data": 1, "zero_stage": 1, "microbatches": 2, **expected, **overlaps}
    assert layout == Layout(**settings)
    changed = num_devices != 8 and not overrides
    assert [r.message for r in caplog.records] == changed * [
        "trained on 8 devices (data 2 x fsdp 2 x tensor 2), and here "
        f"{'is 1' if num_devices == 1 else 'are 4'}: using layout.data = {num_devices}; "
        "to change, set --config.layout.KEY=VALUE"
    ]


def test_a_model_that_was_not_trained_so_is_said(tmp_path, caplog):
    saved = save(tmp_path)
    with caplog.at_level("INFO", "jaxscale"):
        for overrides in ([], ["data.seq_len=64"], ["model.rope_theta=3"]):
            run_folder.note_other_model(run_folder.load_config(saved, overrides).model, saved)
    assert [r.message for r in caplog.records] == [
        "note: model.rope_theta = 3.0; the run was trained with 10000.0"
    ]


def test_what_training_keeps_need_not_fit(tmp_path):
    """Passes of a pipeline and host memory are for its backward pass."""
    saved = save(tmp_path, pipeline=2, remat="keep:1", offload="optimizer", microbatches=2)
    for overrides in ([], ["layout.pipeline=1"]):
        layout = load(saved, *overrides, num_devices=4)
        assert layout == Layout(data=4, microbatches=2)


def test_a_layout_that_was_asked_for_is_not_replaced(tmp_path):
    with pytest.raises(ValueError, match="needs 2 devices and there are 4"):
        load(save(tmp_path), "layout.data=2", num_devices=4)


@pytest.mark.parametrize(
    ("content", "overrides", "message"),
    [
        ("{", [], "config.json is not JSON"),
        ("[]", [], "is not the config of a run"),
        ('{"model": 3}', [], "is not the config of a run"),
        ("{}", ["layout.fspd=2"], "did you mean --config.layout.fsdp?"),
        ("{}", ["layot.fsdp=2"], "did you mean --config.layout.fsdp?"),
        ("{}", ["fsdp=2"], "did you mean --config.layout.fsdp?"),
        ("{}", ["layout.fsdp"], "--config.layout.fsdp: expected --config.section.key=value"),
        ("{}", ["data.seq_len=many"], "config.data.seq_len = 'many' is of type str"),
    ],
)
def test_what_is_no_config_is_refused(content, overrides, message, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        run_folder.load_config(tmp_path, overrides)


def command(name: str, *words: str, num_devices: int = 1) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "JAX_ENABLE_X64": "0",
    }
    return subprocess.run(
        [sys.executable, "-m", f"jaxscale.{name}", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> pathlib.Path:
    """A run of three steps on one device, with two validation sets."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    sets = [{"name": "page", "path": "README.md"}, {"name": "qa", "path": str(path) + ".jsonl"}]
    sets[1] |= {"prompt": "q", "response": "a"}
    pathlib.Path(sets[1]["path"]).write_text('{"q": "one and ", "a": "two"}\n')
    done = command(
        "train",
        "--config",
        "configs/tiny.py",
        "--workdir",
        str(path),
        "--trackers",
        "none",
        "--config.run.steps=3",
        "--config.model.num_layers=1",
        "--config.data.tokenizer=bpe:270",
        "--config.model.vocab_size=280",
        f"--config.data.validation={sets}",
        "--config.run.eval_batches=1",
    )
    assert done.returncode == 0, done.stderr
    assert "A sample at step 3:" in done.stdout
    return path


@pytest.mark.proof
def test_evaluate_a_run_on_other_devices(trained, tmp_path):
    file = tmp_path / "result.json"
    done = command("evaluate", "--workdir", str(trained), "--json", str(file), num_devices=2)
    assert done.returncode == 0, done.stderr
    assert "trained on 1 devices" in done.stdout
    assert "note:" not in done.stdout
    result = json.loads(file.read_text())
    numbers = [
        f"eval_{name}" for name in ("loss", "perplexity", "bits_per_byte", "tokens", "bytes")
    ]
    named = [f"{number}/{name}" for name in ("page", "qa") for number in numbers]
    assert list(result) == ["step", *numbers, *named]
    # All of the held-out text, so at least what training looked at, and a loss close to its own.
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval_loss" in line][-1]
    assert result["step"] == last["step"] == 3
    assert result["eval_tokens"] > last["eval_tokens"]
    assert result["eval_loss"] == pytest.approx(last["eval_loss"], rel=0.1)
    counts = [f"eval_{what}/{name}" for what in ("tokens", "bytes") for name in ("page", "qa")]
    # Validation sets are read as a whole, and of pairs only the response and its end.
    assert result["eval_bytes/page"] == pathlib.Path("README.md").stat().st_size
    assert 1 < result["eval_tokens/qa"] <= 4
    # And so does training, whatever `run.eval_batches` is.
    assert [result[name] for name in counts] == [last[name] for name in counts]
    for number in ("loss", "bits_per_byte"):
        key = f"eval_{number}/qa"
        assert result[key] == pytest.approx(last[key], rel=1e-5)
    assert f"validation set 'page':\n  loss           {result['eval_loss/page']:.4f}" in done.stdout
    assert f"{result['eval_bits_per_byte']:.4f}" in done.stdout
    assert f"{result['eval_tokens']:,}" in done.stdout


@pytest.mark.proof
def test_validation_sets_are_evaluated_without_the_text_of_training(trained, tmp_path):
    file = tmp_path / "result.json"
    alone = ["--config.data.heldout=0", "--config.data.source=/nowhere/*.txt"]
    assert evaluate.main(["--workdir", str(trained), "--json", str(file), *alone]) == 0
    result = json.loads(file.read_text())
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for name in ("page", "qa"):
        key = f"eval_loss/{name}"
        assert result[key] == pytest.approx(lines[-1][key], rel=1e-4)
    assert "eval_loss" not in result


@pytest.mark.proof
def test_generate_from_a_run(trained, tmp_path):
    """No text is read: its source may be gone."""
    file, prompts = tmp_path / "result.json", tmp_path / "prompts.txt"
    prompts.write_text("import asyncio\n\n")
    done = command(
        "generate",
        "--workdir",
        str(trained),
        "--prompt",
        "def f(",
        "--prompt_file",
        str(prompts),
        "--num_tokens",
        "12",
        "--json",
        str(file),
        "--config.data.source=/nowhere/*.txt",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["step"] == 3
    assert [sample["prompt"] for sample in result["samples"]] == ["def f(", "import asyncio", ""]
    assert result["samples"][0]["continuation"]
    for number in (1, 2, 3):
        assert f"--- {number} of 3\n" in done.stdout
    assert "def f(" in done.stdout


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("generate", ["--prompt", "a", "--tempreature", "1"], "did you mean --temperature?"),
        ("evaluate", ["--config.layot.fsdp=2"], "did you mean --config.layout.fsdp?"),
        ("evaluate", ["--config", "configs/tiny.py"], "configs/tiny.py is not read, since the run"),
        ("generate", [], "give --prompt TEXT"),
        ("generate", ["--prompt", "\udcff"], r"--prompt '\udcff' is not UTF-8 text; convert"),
        ("evaluate", ["--max_batches=0"], "argument --max_batches: 0 is not from 1 to"),
        ("evaluate", ["--max_batches=1", "--choices=q.jsonl"], "--max_batches is for text; leave"),
        ("evaluate", ["--config.data.heldout=0"], "this run has no held-out text"),
        ("generate", ["--prompt", "a", "--workdir", "nowhere"], "--workdir nowhere has no run"),
    ],
)
def test_mistakes_are_answered_without_jax(name, words, message, tmp_path):
    done = without_jax(name, "--workdir", str(save(tmp_path)), *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_of_prompts_that_is_not_text_is_named(tmp_path, capsys):
    file = tmp_path / "latin.txt"
    file.write_bytes("caf\xe9 noir".encode("latin-1"))
    with pytest.raises(SystemExit):
        generate.main(["--workdir", str(tmp_path), "--prompt_file", str(file)])
    assert f"--prompt_file {file} is not utf-8 text: byte 3 is 0xe9" in capsys.readouterr().err


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    saved = run_folder.load_config(save(tmp_path), ["layout.data=8"])
    _, engine = open_engine(saved)
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        restore_params(engine, tmp_path)


def test_a_lost_tokenizer_is_not_trained_again(tmp_path):
    saved = run_folder.load_config(save(tmp_path), ["data.tokenizer=bpe:257"])
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json is missing, the tokenizer of"):
        open_tokenizer(saved, tmp_path)


def test_a_tokenizer_beyond_the_model_is_refused(tmp_path):
    saved = run_folder.load_config(save(tmp_path), ["model.vocab_size=256"])
    with pytest.raises(ValueError, match=r"model.vocab_size = 256 is smaller than the 257 tokens"):
        open_tokenizer(saved, tmp_path)


def test_sampling_needs_neither_the_kernel_nor_the_batch_of_training(tmp_path):
    saved = Config(
        model=ModelConfig(attention="cudnn"),
        data=DataConfig(global_batch_size=3),
        layout=Layout(data=-1, fsdp=2, microbatches=3),
    )
    with pytest.raises(ValueError, match=r"data.global_batch_size = 3 does not split"):
        open_engine(saved)
    _, engine = open_engine(for_sampling(saved))
    assert (engine.layout.data, engine.layout.fsdp) == (4, 2)


def test_an_empty_workdir_is_refused(tmp_path, monkeypatch, capsys):
    """Such as of a variable that is not set: it would be the folder that one is in."""
    monkeypatch.chdir(tmp_path)
    for module, words in ((train, ["--config", "tiny"]), (generate, ["--prompt", "a"])):
        with pytest.raises(SystemExit):
            module.main([*words, "--workdir", ""])
        assert (
            "--workdir: is empty; give the run's folder, or '.' for this" in capsys.readouterr().err
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", ".lock", "config.json", "checkpoints", "checkpoints/2/arrays/d/0"]
)
@pytest.mark.parametrize("command", [train, evaluate, supervise])
def test_a_pipe_in_a_runs_folder_is_refused(name, command, tmp_path, capsys):
    """To open it would wait for a writer, which a run that is asked to stop does, too."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    flags = [f"--workdir={tmp_path}", *["--config=tiny"] * (command is not evaluate)]
    with pytest.raises(SystemExit) as refused:
        command.main(["--", "jaxscale.train", *flags] if command is supervise else flags)
    assert refused.value.code == 2
    said = f"error: {path} is a pipe, a socket or a device, not a file or folder of a run; "
    assert capsys.readouterr().err.startswith(said)
    assert durable.changed_file(tmp_path, {name: [0, ""]}) == f"{path} is missing"


def test_links_in_a_runs_folder_are_followed_once(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "disk" / "4").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "4" / "up").symlink_to(tmp_path)
    (tmp_path / "run" / "nowhere").symlink_to(tmp_path / "gone")
    run_folder.check_files(tmp_path / "run")
    os.mkfifo(tmp_path / "disk" / "4" / "pipe")
    with pytest.raises(ValueError, match="checkpoints/4/pipe is a pipe"):
        run_folder.check_files(tmp_path / "run")
