"""The command line: overrides are collected, everything unknown is refused in one line."""

import argparse
import contextlib
import errno
import functools
import importlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale import command_line, config, schedule, train
from jaxscale.choices import OTHER_NAMES
from tests.without_jax import without_jax


@pytest.mark.parametrize("setting", OTHER_NAMES)
def test_what_others_call_a_setting_is_no_setting_of_another_meaning(setting):
    assert setting in config.leaves()
    keys = {leaf.partition(".")[2] for leaf in config.leaves()} - {"data"}
    assert not keys & set(OTHER_NAMES[setting])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--workdir")
    parser.add_argument("--profile_steps", type=int, default=0)
    parser.add_argument("--input", nargs="+")
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    return parser


def parse(text: str) -> tuple[argparse.Namespace, list[str]]:
    settings = ("data.global_batch_size", "data.seed", "optimizer.learning_rate", "run.steps")
    return command_line.parse(make_parser(), text.split(), (*settings, "run.seed"))


def test_overrides_are_collected_in_order_with_either_spelling():
    namespace, overrides = parse(
        "--config.run.steps=3 --config c.py:32 --config.layout.data -1 --workdir=w "
        "--config.data.source a,b --config.run.steps 4 --config.data.tokenizer="
    )
    assert overrides == [
        "run.steps=3",
        "layout.data=-1",
        "data.source=a,b",
        "run.steps=4",
        "data.tokenizer=",
    ]
    assert (namespace.config, namespace.workdir) == ("c.py:32", "w")


def test_other_flags_reach_the_parser():
    namespace, overrides = parse("--config c.py --describe --input a b --profile_steps 3")
    assert (namespace.describe, namespace.input, namespace.profile_steps) == (True, ["a", "b"], 3)
    assert (namespace.workdir, namespace.json, overrides) == (None, None, [])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--config c --workdri w", "unknown flag --workdri; did you mean --workdir?"),
        ("--config c --workdri=w", "unknown flag --workdri; did you mean --workdir?"),
        ("--config c --work w", "unknown flag --work; did you mean --workdir?"),
        ("--config c -workdir w", "unknown flag -workdir; did you mean --workdir?"),
        ("--config c --zzz", "unknown flag --zzz"),
        (
            "--config c --confg.run.steps=3",
            "unknown flag --confg.run.steps; did you mean --config.run.steps=3?",
        ),
        ("--run.steps=3", "unknown flag --run.steps; did you mean --config.run.steps=3?"),
        ("--steps=3", "unknown flag --steps; did you mean --config.run.steps=3?"),
        (
            "--learning_rat=3e-4",
            "unknown flag --learning_rat; did you mean --config.optimizer.learning_rate=3e-4?",
        ),
        ("--optim.lr 1", "unknown flag --optim.lr; did you mean --config.optimizer.learning_rate?"),
        (
            "--batch-size 8",
            "unknown flag --batch-size; did you mean --config.data.global_batch_size?",
        ),
        (
            "--seed=1",
            "unknown flag --seed; did you mean --config.data.seed=1 or --config.run.seed=1?",
        ),
        ("--output_dir a", "unknown flag --output_dir; did you mean --workdir DIR?"),
        ("--wandb", "unknown flag --wandb"),
        (
            "--config c --config.run.steps",
            "--config.run.steps needs a value: --config.run.steps=VALUE",
        ),
        (
            "--config c --config.run.steps --describe",
            "--config.run.steps needs a value: --config.run.steps=VALUE",
        ),
        ("--config c run.steps=3", "unexpected 'run.steps=3'; write --config.run.steps=3"),
        ("--config c run.steps", "unexpected 'run.steps'; every value follows its flag"),
        ("--workdir w", "the following arguments are required: --config"),
        ("--config c --profile_steps many", "argument --profile_steps: invalid int value: 'many'"),
        ("--config c --workdir", "argument --workdir: expected one argument"),
        ("--config", "argument --config: expected one argument"),
        ("--config c --input --", "unexpected '--'; every value follows its flag"),
        ("--config c --input=--", "unexpected '--'; every value follows its flag"),
    ],
)
def test_a_bad_line_is_refused_in_one_line(line, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(line)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_command_without_a_configuration_takes_no_overrides(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--workdir")
    with pytest.raises(SystemExit):
        command_line.parse(parser, ["--config.run.steps=3"])
    assert capsys.readouterr().err.startswith("error: unknown flag --config.run.steps")


def test_help_is_status_0(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    assert "--workdir" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ValueError("a = 3; at most 2"), FileNotFoundError("no x.py")])
def test_what_a_user_can_mend_is_one_line(error, capsys):
    with pytest.raises(SystemExit) as stop, command_line.refusals():
        raise error
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_what_may_pass_by_itself_is_tried_again_by_a_supervisor(capsys):
    with pytest.raises(SystemExit) as stop, command_line.refusals():
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a/tokens")
    assert stop.value.code == 1
    assert capsys.readouterr().err == "error: runs/a/tokens: no space left on device\n"


def test_errors_of_code_from_outside_the_package_are_placed(capsys):
    with pytest.raises(SystemExit), command_line.refusals():
        unpack()
    line = unpack.__code__.co_firstlineno + 1
    assert capsys.readouterr().err == (
        f"error: too many values to unpack (expected 2) ({__file__}, line {line})\n"
    )


def unpack():
    first, second = range(3)
    return first, second


def test_a_bug_keeps_its_traceback():
    with pytest.raises(TypeError, match="a bug"), command_line.refusals():
        raise TypeError("a bug")


def test_a_real_command_answers_a_typo_without_jax():
    run = without_jax("doctor", "--jsno", "x")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "error: unknown flag --jsno; did you mean --json?\n"


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback():
    command = [sys.executable, "-m", "jaxscale.schedule", "1f1b", "--stages", "4"]
    process = subprocess.Popen(
        [*command, "--microbatches", "8"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    process.stdout.close()
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_run_goes_on_when_its_lines_have_no_reader():
    program = (
        "import sys; from jaxscale import command_line as c\n"
        "c.log_to_stdout(); c.logging.getLogger('jaxscale').info('line')\n"
        "c.logging.getLogger('jaxscale').info('line'); print('done', file=sys.stderr)"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 0
    assert done.stderr == b"warning: stdout cannot be written (Broken pipe)\ndone\n"


PRINTS = """
import os, sys
from jaxscale import command_line
def main(argv):
    if os.open(os.devnull, os.O_RDONLY) < 3:
        command_line.refuse("a file has the number of a standard stream", status=3)
    if argv == ["refused"]:
        command_line.refuse("no")
    print("a warning", file=sys.stderr)
    print("the answer")
command_line.run(main)
"""


@pytest.mark.proof(
    but=("complete-<&- >&- 2>&--0-", "refused->/dev/full 2>/dev/full-2-", "refused-2>&--2-")
)
@pytest.mark.parametrize(
    ("how", "streams", "status", "said"),
    [
        ("complete", "<&- >&- 2>&-", 0, ""),
        ("complete", ">&-", 0, "a warning\n"),
        ("complete", "2>/dev/full", 0, "the answer\n"),
        (
            *("complete", ">/dev/full", 1),
            "a warning\nerror: stdout: no space left on device\n",
        ),
        ("refused", "2>&-", 2, ""),
        ("refused", ">/dev/full 2>/dev/full", 2, ""),
    ],
)
def test_the_status_is_right_where_a_stream_is_closed_or_full(how, streams, status, said):
    """A supervisor decides by it: it repeats a 1."""
    run = f'"$0" "$@" {streams}'
    done = subprocess.run(
        ["bash", "-c", run, sys.executable, "-c", PRINTS, how], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (status, said)


INTERRUPTED = """
import sys, time
from jaxscale import command_line
def main(argv):
    print("ready", flush=True)
    time.sleep(60)
command_line.run(main)
"""


def test_ctrl_c_is_one_line():
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted\n"
    assert process.returncode == 130


HANGS = """
import sys, threading
from jaxscale import command_line
def main(argv):
    threading.Thread(target=threading.Event().wait).start()  # never ends
    if argv[0] == "refuses":
        command_line.refuse("no")
    raise RuntimeError("can't start new thread")
command_line.run(main)
"""


@pytest.mark.parametrize(
    ("how", "status", "said"), [("refuses", 2, "error: no\n"), ("fails", 1, "RuntimeError: can't")]
)
def test_a_command_that_failed_ends_although_a_thread_does_not(how, status, said):
    done = subprocess.run(
        [sys.executable, "-c", HANGS, how], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == status
    assert said in done.stderr


HUGE = "99999999999999999999"
NUMBERS = {
    "plan": {
        "devices": ("0", "-5", HUGE, "1e3"),
        "top": ("0", "-3", HUGE),
        "seq_len": ("0", "-1", HUGE),
        "prove": ("0", "-1", HUGE),
        "trials": ("0", "-1", HUGE),
        "trial_seconds": ("0", "-1", "nan", "inf", HUGE),
    },
    "schedule": {
        "stages": ("0", "-1", HUGE),
        "microbatches": ("0", "-1", HUGE),
        "keep": ("-1", HUGE),
        "virtual_stages": ("0", "-1", HUGE),
        "sequence_chunks": ("0", "-1", HUGE),
    },
    "prepare": {
        "max_document_bytes": ("0", "-1", HUGE),
        "skip_share": ("-0.1", "1", "nan", HUGE),
        "workers": ("-1", HUGE),
        "shard_bytes": ("-1", HUGE),
        "training_bytes": ("0", "-1", HUGE),
        "heldout": ("-0.1", "1", "nan", HUGE),
        "seed": ("-1", HUGE),
        "examples": ("-1", HUGE),
    },
    "generate": {
        "num_tokens": ("0", "-1", HUGE),
        "temperature": ("-1", "nan", "inf", HUGE),
        "top_k": ("-1", HUGE),
        "top_p": ("0", "-1", "1.5", "nan", HUGE),
        "seed": ("-1", HUGE),
    },
    "evaluate": {"max_batches": ("0", "-1", HUGE)},
    "train": {"profile": ("0", "0:3", "-1:3", "3:2"), "num_processes": ("0", "-1", HUGE)},
    "doctor": {"num_processes": ("0", "-1", HUGE), "process_id": ("-1", HUGE)},
}
"""Every flag of every command that takes a number, and numbers that it cannot have."""


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_range_is_one_line_at_once(name, capsys):
    command = importlib.import_module(f"jaxscale.{name}")
    for flag, values in NUMBERS[name].items():
        for value in values:
            with pytest.raises(SystemExit) as ended:
                command.main([f"--{flag}={value}"])
            said = capsys.readouterr().err
            assert ended.value.code == 2
            assert said.startswith(f"error: argument --{flag}: ")
            assert said.count("\n") == 1
            assert value in said


NOWHERE = {
    "train": ["--config=/nonexistent/x.py"],
    "evaluate": ["--workdir=/nonexistent/run"],
    "generate": ["--workdir=/nonexistent/run"],
    "prepare": ["--input=/nonexistent/text", "--output=/nonexistent/out"],
    "plan": ["--config=/nonexistent/x.py", "--hardware=h100", "--devices=8"],
    "aot": ["--config=/nonexistent/x.py", "--topology=h100:1x1"],
    "schedule": ["no_such_schedule"],
}
"""Commands that read their flags, and then refuse what they are given."""

WORDS = st.sampled_from(
    ["", "0", "-1", "nan", "1e999", "a=b", "[1, 2", "/dev/null", "../..", "x" * 5000, "\0", "--"]
) | st.text("0123456789-+.e:=,/x[]{}'\" \0\u00e9", max_size=8)


@functools.cache
def flags_of(name):
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        importlib.import_module(f"jaxscale.{name}").main(["--help"])
    found = re.findall(r"^  (?:-\w, )?(--\w+)", shown.getvalue(), re.MULTILINE)
    return [flag for flag in dict.fromkeys(found) if flag != "--help"]


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ("convert --from_hf {folder} --output {folder}/out", "config.json"),
        ("plan --model {folder}/x.json --hardware h100 --devices 8", "x.json"),
        ("prepare --input {folder} --output {folder}/out --tokenizer bytes", "dataset_dict.json"),
        ("prepare --input {folder} --output {folder}/out --tokenizer {folder}/x.json", "x.json"),
        ("train --config {folder}/config.json", "config.json"),
        ("evaluate --workdir {folder}", "config.json"),
        ("generate --workdir {folder} --prompt a", "config.json"),
    ],
)
def test_a_hostile_file_is_refused_in_one_line(words, file, tmp_path, capsys):
    (tmp_path / file).write_text("[" * 100_000)
    name, *flags = words.format(folder=tmp_path).split()
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"jaxscale.{name}").main(flags)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert file in printed or "data set" in printed


def test_a_refusal_is_one_line_whatever_it_quotes(capsys):
    with pytest.raises(SystemExit):
        command_line.refuse("'é' of a\nb\u2028\x1b[2J" + 10**6 * "x" + " end")
    printed = capsys.readouterr().err
    assert printed.startswith("error: 'é' of a\\nb\\u2028\\x1b[2Jxxx")
    assert printed.endswith("xxx end\n")
    assert len(printed) < command_line.MOST_CHARACTERS + 40


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(NOWHERE)))
def test_whatever_a_flag_is_given_the_refusal_is_one_line(data, name):
    flags = st.tuples(st.sampled_from(flags_of(name)), WORDS, st.booleans())
    words = list(NOWHERE[name])
    for flag, value, joined in data.draw(st.lists(flags, min_size=1, max_size=3)):
        words += [f"{flag}={value}"] if joined else [flag, value]
    with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as ended:
        importlib.import_module(f"jaxscale.{name}").main(words)
    assert ended.value.code in (1, 2)
    assert said.getvalue().startswith("error: ")
    assert said.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    "name", ["aot", "convert", "doctor", "evaluate", "generate", "plan", "prepare", "schedule"]
)
def test_a_file_that_cannot_be_written_is_refused_at_once(name, tmp_path, capsys):
    command = importlib.import_module(f"jaxscale.{name}")
    for path, said in (
        ("/nonexistent/x.json", "there is no folder /nonexistent"),
        (str(tmp_path), "is a folder"),
        ("x" * 5000, "File name too long"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main([f"--json={path}"])
        assert ended.value.code == 2
        text = capsys.readouterr().err
        assert text.startswith(f"error: argument --json: {path}")
        assert text.endswith(f"{said}\n")


@pytest.mark.parametrize("count", ["abc", "0", "-1", "1e3", "99999999"])
def test_a_number_of_devices_that_jax_cannot_have_is_one_line(count, monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", count)
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(command_line, "_end", sys.exit)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            command_line.run(lambda argv: pytest.fail("it began"))
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: JAX_NUM_CPU_DEVICES = {count!r} in the env")


def test_a_locale_without_a_letter_is_no_error():
    """Such as the superscripts of virtual stages, or whatever a model writes."""
    command = ["-m", "jaxscale.schedule", "zb_v", "--stages=2", "--microbatches=3"]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xb9" in done.stdout


def test_no_numeric_flag_is_left_out():
    """A new flag of a command goes through `flags.whole` or `flags.real`, and into NUMBERS."""
    for path in pathlib.Path("jaxscale").glob("*.py"):
        assert not re.search(r"type=(int|float)\b", path.read_text()), path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stages", "2000", "--microbatches", "2000"], "= 4000000 forward passes; at most"),
        (["--costs", "f=nan"], "--costs 'f=nan': 'nan' is not a number; write f=1"),
        (["--costs", "f=-1"], "--costs 'f=-1': -1 is not from 0 to"),
        (["--costs", "b=inf"], "--costs 'b=inf': inf is not from 0 to"),
    ],
)
def test_a_schedule_that_nobody_could_look_at_is_refused(words, said, capsys):
    with pytest.raises(SystemExit):
        schedule.main(["1f1b", *words])
    assert said in capsys.readouterr().err


def test_a_trace_beyond_the_run_is_refused(capsys):
    with pytest.raises(SystemExit):
        train.main(["--config", "configs/tiny.py", "--config.run.steps=5", "--profile", "4:6"])
    assert "--profile: step 6 is beyond run.steps = 5" in capsys.readouterr().err
