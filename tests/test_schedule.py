"""The command that draws schedules."""

import json
import subprocess
import sys

import pytest

from jaxscale import schedule

NUMBERS = {
    "makespan",
    "idle_fraction",
    "lockstep_makespan",
    "lockstep_idle_fraction",
    "peak_stash",
    "messages",
}


def run(capsys, *words):
    schedule.main(words)
    return capsys.readouterr().out


def test_json_has_the_numbers_and_the_text_the_timeline(tmp_path, capsys):
    path = tmp_path / "numbers.json"
    out = run(capsys, "1f1b", "--stages=4", "--microbatches=8", "--fused", "--json", str(path))
    numbers = json.loads(path.read_text())
    assert set(numbers) == NUMBERS
    assert numbers["makespan"] == 33
    assert numbers["idle_fraction"] == 9 / 33
    assert numbers["lockstep_makespan"] == 40
    assert numbers["lockstep_idle_fraction"] == 16 / 40
    assert numbers["peak_stash"] == [4, 3, 2, 1]
    assert numbers["messages"] == 48
    assert "rank 3 |......F0X0==F1X1==F2X2==" in out
    assert "27.3 %" in out
    assert "40.0 %" in out
    assert "4 3 2 1" in out


def test_costs_recompute_and_chunks(tmp_path, capsys):
    path = tmp_path / "numbers.json"
    run(
        capsys,
        "interleaved",
        "--stages",
        "4",
        "--microbatches",
        "8",
        "--virtual_stages",
        "2",
        "--costs",
        "f=2,b=2,w=2,r=2",
        "--json",
        str(path),
    )
    numbers = json.loads(path.read_text())
    assert numbers["makespan"] == 70
    assert numbers["peak_stash"] == [0.5] * 4  # a chunk at a time: all are recomputed


def test_the_order_can_be_edited_and_given_back(tmp_path, capsys):
    path = tmp_path / "order.csv"
    first = run(capsys, "zb_h1", "--stages=3", "--microbatches=4", "--csv", str(path))
    again = run(capsys, str(path), "--stages=3", "--microbatches=4")
    first, source = first.rsplit("paper", 1)  # a file has no paper
    assert source.strip() == "Zero Bubble Pipeline Parallelism, arXiv 2401.10241"
    assert first.partition(":")[2] == again.partition(":")[2]
    path.write_text(path.read_text().replace("1W2", "1W1"))
    refused(capsys, "1W1 is repeated", str(path))


def test_a_solved_order_is_drawn_with_its_gap_and_given_back(tmp_path, capsys):
    order, numbers = tmp_path / "order.csv", tmp_path / "numbers.json"
    words = ["--stages=2", "--microbatches=3", "--costs=f=1,b=1.2,w=0.8", "--stage_costs=1,1.6"]
    files = [f"--csv={order}", f"--json={numbers}"]
    out = run(
        capsys, "--solve", *words, "--saved_passes=2", "--time_limit=600", "--threads=1", *files
    )
    found = json.loads(numbers.read_text())
    assert found["gap"] == pytest.approx(0, abs=1e-9)
    assert found["lockstep_makespan"] == pytest.approx(found["bound"], rel=1e-9)
    assert max(found["peak_stash"]) <= 2
    assert f"no order is faster than {found['bound']:g}, gap 0.0 %" in out
    assert f"({found['named']}), the fastest schedule within the limit" in out
    run(capsys, str(order), *words, f"--json={numbers}")
    again = json.loads(numbers.read_text())
    assert again["lockstep_makespan"] == found["lockstep_makespan"]


def test_picture(tmp_path, capsys):
    path = tmp_path / "picture.png"
    run(capsys, "zb_v", "--stages=2", "--microbatches=3", "--png", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("1f1b", "--stages=4", "--microbatch=8"), "did you mean --microbatches?"),
        (("1f1b", "--stages=4", "--microbatches=8.5"), "'8.5' is not a whole number"),
        (("1fb", "--stages=4", "--microbatches=8"), "did you mean '1f1b'?"),
        (("1f1b", "--microbatches=8"), "1f1b needs stages"),
        (("1f1b", "--stages=2", "--microbatches=2", "--costs", "g=1"), "'g=1' is not a kind"),
        (("1f1b", "--stages=2", "--microbatches=2", "--costs", "f"), "'f': '' is not a number"),
        (("1f1b", "--stages=2", "--microbatches=2", "--costs", "f=-1"), "-1 is not from 0 to"),
        (("no.csv",), "no.csv: no such file or directory"),
        (("1f1b:fused", "--stages=4"), "1f1b --fused"),
        (
            ("1f1b", "--stages=2", "--microbatches=2", "--json=/no/where"),
            "/no/where: there is no folder /no",
        ),
        (("zb_v", "--stages=4", "--microbatches=4"), "microbatches = 7"),
        (("1f1b", "--stages=4", "--microbatches=8", "--keep=2"), "--costs r=1"),
        ((), "NAME"),
        (("1f1b", "--stages=2", "--microbatches=2", "--saved_passes=2"), "is for --solve; add it"),
        (("1f1b", "--stages=2", "--microbatches=2", "--stage_costs=1,x"), "'x' is not a number"),
        (("1f1b", "--stages=2", "--microbatches=2", "--stage_costs=1,1,1"), "has 3 numbers"),
        (
            ("1f1b", "--stages=2", "--microbatches=2", "--stage_costs=1,1", "--costs=b=1/1/1"),
            "--stage_costs has 2 numbers, and --costs b has 3",
        ),
        (("--solve", "--stages=2"), "--solve needs --stages and --microbatches"),
        (("--solve", "--stages=2", "--microbatches=2", "--fused"), "leave out --fused, --keep"),
        (("--solve", "--stages=2", "--microbatches=2", "--saved_passes=0.5"), "0.5 is not from 1"),
        (("--solve", "--stages=2", "--microbatches=2", "--costs=r=1"), "set --costs r=0"),
        (("gpipe", "--solve", "--stages=2", "--microbatches=4"), "gpipe saves 4 passes, more than"),
    ],
)
def test_refusals_are_one_line(capsys, words, message):
    refused(capsys, message, *words)


def refused(capsys, message, *words):
    with pytest.raises(SystemExit) as stopped:
        schedule.main(words)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_neither_jax_nor_matplotlib_is_imported_for_text():
    program = (
        "import sys; from jaxscale import schedule; "
        "schedule.main(['1f1b', '--stages=8', '--microbatches=32']); "
        "print(sorted({'jax', 'flax', 'matplotlib'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[-1] == "[]"
    assert out.startswith("1f1b: 8 ranks, 32 micro-batches")
