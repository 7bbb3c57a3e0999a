"""The command line: overrides are collected, everything unknown is refused in one line."""

import argparse
import os
import subprocess
import sys

import pytest

from jaxscale import command_line


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
    return command_line.parse(make_parser(), text.split())


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
            "unknown flag --confg.run.steps; did you mean --config.run.steps?",
        ),
        ("--config c --run.steps=3", "unknown flag --run.steps; did you mean --config.run.steps?"),
        (
            "--config c --config.run.steps",
            "--config.run.steps needs a value: --config.run.steps=VALUE",
        ),
        (
            "--config c --config.run.steps --describe",
            "--config.run.steps needs a value: --config.run.steps=VALUE",
        ),
        ("--config c run.steps=3", "unexpected 'run.steps=3'; every value follows its flag"),
        ("--workdir w", "the following arguments are required: --config"),
        ("--config c --profile_steps many", "argument --profile_steps: invalid int value: 'many'"),
        ("--config c --workdir", "argument --workdir: expected one argument"),
        ("--config", "argument --config: expected one argument"),
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


def test_a_bug_keeps_its_traceback():
    with pytest.raises(TypeError, match="a bug"), command_line.refusals():
        raise TypeError("a bug")


def test_a_real_command_answers_a_typo_within_a_second():
    before = os.times()
    run = subprocess.run(
        [sys.executable, "-m", "jaxscale.doctor", "--jsno", "x"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = os.times()
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "error: unknown flag --jsno; did you mean --json?\n"
    # Processor time: a busy machine does not fail the test.
    used = after.children_user + after.children_system
    assert used - before.children_user - before.children_system < 1
