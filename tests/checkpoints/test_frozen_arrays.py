"""Arrays that no step changes are written once; every checkpoint is whole all the same."""

import contextlib
import errno
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.checkpoints import save as checkpoint
from jaxscale.checkpoints.errors import DamagedError
from jaxscale.checkpoints.restore import restore
from jaxscale.checkpoints.retention import Retention
from jaxscale.checkpoints.save import CheckpointWriter
from tests.checkpoints.test_save import LAYOUTS, abstract, assert_same_bits, shardings

FROZEN = ("params/embed", "params/small")


def make_state(step: int = 0) -> Any:
    random = np.random.default_rng(0)
    embed, small = random.normal(size=(64, 1000)), random.normal(size=5).astype(np.float32)
    return {
        "params": {
            "embed": jnp.asarray(embed),
            "small": jnp.asarray(small),
            "b": jnp.ones(3) * step,
        },
        "step": jnp.asarray(step),
    }


def save(checkpoints: CheckpointWriter, step: int, state: Any, frozen: Any = FROZEN) -> None:
    checkpoints.save(step, state, {}, frozen=frozen)
    checkpoints.wait()
    assert checkpoints.outcome() == ""


@pytest.fixture
def opened(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Checkpoints of which two are kept, and the log lines other than those of saves."""
    caplog.set_level(logging.INFO, "jaxscale")
    lines = lambda: [line for line in caplog.messages if " saved in " not in line]  # noqa: E731
    with contextlib.closing(CheckpointWriter(tmp_path, Retention(2))) as checkpoints:
        yield checkpoints, lines


def frozen_files(checkpoints: CheckpointWriter, step: int) -> dict[str, int]:
    """The inodes of a checkpoint's frozen arrays."""
    place = checkpoints.directory / str(step) / "frozen"
    return {
        path.relative_to(place).as_posix(): path.stat().st_ino
        for path in place.rglob("*")
        if path.is_file()
    }


def size(folder: pathlib.Path, links: Callable[[int], bool]) -> int:
    about = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum(one.st_size for one in about if links(one.st_nlink))


@pytest.mark.proof
def test_each_checkpoint_is_whole_in_any_layout(opened) -> None:
    """The first of them, which wrote the arrays, is long deleted."""
    checkpoints, lines = opened
    for step, layout in enumerate((LAYOUTS[-1], *LAYOUTS), 1):
        state = make_state(step)
        save(checkpoints, step, jax.device_put(state, shardings(state, layout)))
    assert checkpoints.steps() == [len(LAYOUTS), 1 + len(LAYOUTS)]
    files = [frozen_files(checkpoints, step) for step in checkpoints.steps()]
    assert files[0] == files[1] != {}
    newest = checkpoints.directory / str(checkpoints.latest())
    assert size(newest, lambda count: count == 2) > 64 * 1000 * 8 * 0.9  # random bits: no zip
    assert size(newest, lambda count: count == 1) < 20_000
    for step in checkpoints.steps():
        state = make_state(step)
        for layout in LAYOUTS:
            assert_same_bits(restore(checkpoints, step, abstract(state, layout)), state)
        for name in ("embed", "b"):
            wanted = {"params": {name: abstract(state)["params"][name]}}
            found = restore(checkpoints, step, wanted, part=True)
            assert_same_bits(found, {"params": {name: state["params"][name]}})
    assert lines() == []
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == sorted(
        map(str, checkpoints.steps())
    )


def test_what_did_change_or_is_frozen_since_is_written(tmp_path: pathlib.Path) -> None:
    """As after a change of `optimizer.groups`. A checkpoint before it keeps its own."""
    states = {step: make_state(step) for step in (1, 2, 3, 4)}
    states[2]["params"]["small"] += 1
    frozen = {1: FROZEN, 2: FROZEN, 3: FROZEN[:1], 4: ()}
    with contextlib.closing(CheckpointWriter(tmp_path, Retention(4))) as checkpoints:
        for step, state in states.items():
            save(checkpoints, step, state, frozen[step])
        for step, state in states.items():
            assert_same_bits(restore(checkpoints, step, abstract(state)), state)
    assert {path.stat().st_nlink for path in tmp_path.rglob("*") if path.is_file()} == {1}
    assert (tmp_path / "3" / "frozen").is_dir()
    assert not (tmp_path / "4" / "frozen").exists()


def test_a_file_system_without_links(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, lines = opened
    save(checkpoints, 1, make_state(1))

    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    save(checkpoints, 2, make_state(2))
    assert lines() == [
        "checkpoint 2: frozen arrays are written again, since they cannot be linked to those of "
        "checkpoint 1 (Operation not supported)"
    ]
    for step in (1, 2):
        assert_same_bits(restore(checkpoints, step, abstract(make_state())), make_state(step))
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["1", "2"]


def test_damage_is_not_passed_on_where_a_size_shows_it(opened) -> None:
    checkpoints, lines = opened
    save(checkpoints, 1, make_state(1))
    place = checkpoints.directory / "1" / "frozen"
    largest = max((p for p in place.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, 100)
    save(checkpoints, 2, make_state(2))
    assert_same_bits(restore(checkpoints, 2, abstract(make_state())), make_state(2))
    (line,) = lines()
    assert line.startswith("checkpoint 2: frozen arrays are written again")
    assert "cannot be used" in line


def test_a_flipped_bit_is_seen_in_every_checkpoint_that_has_it(opened) -> None:
    checkpoints, _ = opened
    for step in (1, 2):
        save(checkpoints, step, make_state(step))
    place = checkpoints.directory / "1" / "frozen"
    largest = max((p for p in place.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)  # the same file: both have it
    for step in (1, 2):
        with pytest.raises(DamagedError, match=f"checkpoint {step} in .* cannot be used"):
            restore(checkpoints, step, abstract(make_state()))


@pytest.mark.proof
@pytest.mark.parametrize("begin_or_end", ["begin_write", "complete_folder"])
def test_a_save_that_fails_leaves_no_links(
    opened, begin_or_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, lines = opened
    save(checkpoints, 1, make_state(1))

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, begin_or_end, fail)
        checkpoints.save(2, make_state(2), {}, frozen=FROZEN)
        checkpoints.wait()
    assert "saving checkpoint 2" in lines()[0]
    assert "No space left on device" in lines()[0]
    save(checkpoints, 3, make_state(3))
    assert frozen_files(checkpoints, 3) == frozen_files(checkpoints, 1)
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["1", "3"]
