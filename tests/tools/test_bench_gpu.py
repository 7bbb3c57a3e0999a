"""The parts of `tools/bench/gpu.sh`, which run on a GPU only."""

import pathlib
import subprocess
import sys

import pytest

from jaxscale import config as configs
from tools.bench import grouped

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools/bench"))
    import gpu  # noqa: PLC0415

    yield gpu
    for name in ("gpu", "provenance", "train"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_case_is_a_config_that_loads(gpu, rehearse):
    for part in gpu.parts(rehearse):
        if "--layouts" in part.program:
            given = [word.removeprefix("--config.") for word in part.program if "=" in word]
            (layout,) = [word for word in given if word.startswith("microbatches=")]
            given.remove(layout)
            given += [f"layout.{word}" for word in layout.split(",")]
            file = part.program[part.program.index("--config") + 1]
            config = configs.load(ROOT / file, given)
            assert config.data.global_batch_size % config.layout.microbatches == 0


def test_a_device_gets_the_cases_that_fit_it(gpu):
    """A whole 8B with its moments fits a large one only."""
    small, large = (
        [part.name for part in gpu.parts(False, memory_gib)] for memory_gib in (79.6, 140.4)
    )
    whole = [name for name in small if "8b" in name and "num_layers" not in name]
    assert all("lora" in name for name in whole)
    assert any("8b" in name and "float8" in name for name in large)
    assert len(set(large)) == len(large)
    assert [name.split(",")[0] for name in small[:4]] == [name.split(",")[0] for name in large[:4]]


def test_one_call_has_time_for_what_is_aimed_at(gpu):
    """Experts, a long context, context ranks and adapters; then the 8B at its fastest."""
    new, first = len(gpu.EXPERTS_AND_LONG) // 2 + 1, len(gpu.FIRST_CASES)
    found = list(gpu.parts(False, 140.4))[: new + first]
    for some in (found[:new], found[new:]):
        assert sum(part.limit_seconds for part in some) <= gpu.BUDGET_SECONDS
    assert all(part.limit_seconds <= 120 for part in found[:new])
    large = [part.name for part in found[new:] if "8b" in part.name]
    assert len(large) == first
    assert sum("float8" in name for name in large) == 1


def test_a_part_fails_by_what_it_says_not_by_an_error_that_it_measured(gpu):
    """As loss.py does; memory that runs out is no failure."""
    program = "import sys; open(sys.argv[2], 'w').write('{\"error\": %s}'); sys.exit(%d)"
    for error, status, well in (
        ("1e-7", 0, True),
        ("1e-2", 1, False),
        (f'\\"{gpu.OUT_OF_MEMORY}\\"', 1, True),
        ('\\"differs\\"', 1, False),
    ):
        part = gpu.Part("loss", ["-c", program % (error, status)], 30)
        records, found = gpu.run(part, 30, None)
        assert found == well
        assert len(records) == (2 if error == "1e-2" else 1), "which says how it ended"


def test_steps_end_in_their_time_with_what_they_measured(gpu, monkeypatch):
    """Steps of 30 seconds after a start of 40: a third would end after 130."""
    import train  # noqa: PLC0415

    class Slow:
        name, clock, done = "slow", 40.0, 0

        def __init__(self, *unused):
            pass

        def step(self):
            Slow.clock += 30
            Slow.done += 1

        def finish(self):
            return Slow.done

        def close(self):
            pass

    monkeypatch.setattr(train, "Subject", Slow)
    monkeypatch.setattr(train.time, "monotonic", lambda: Slow.clock)
    tiny = str(ROOT / "configs/tiny.py")
    assert train.measure(tiny, [], [train.OURS], steps=9, end=110) == {"slow": 2}
    assert train.measure(tiny, [], [train.OURS], steps=9, end=110) == {"slow": 3}
    traced = {"steps": 9, "end": 250, "trace": "folder"}
    assert train.measure(tiny, [], [train.OURS], **traced) == {"slow": 5}, "two more are traced"


@pytest.mark.proof
def test_the_programs_need_no_packages_that_read_training_data():
    programs = ("gpu", "train", "ours", "attention", "loss", "gpu_layouts", "float8")
    blocked = "sys.modules['grain'] = sys.modules['array_record'] = None"
    subprocess.run(
        [sys.executable, "-c", f"import sys; {blocked}; import {', '.join(programs)}"],
        cwd=ROOT / "tools/bench",
        check=True,
    )


def test_kernels_of_many_experts_move_little_more_than_operands_and_results():
    """Of uneven groups, if the L2 cache keeps nothing from one panel of programs to the next."""
    case = grouped.CASES["qwen3_30b_a3b"]
    needed, moved = (
        grouped.needed_bytes(case),
        grouped.kernel_bytes(case, grouped.group_sizes(case)),
    )
    assert moved.keys() == needed.keys()
    assert all(needed[name] <= moved[name] <= 1.2 * needed[name] for name in needed)
