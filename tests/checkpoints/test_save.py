"""Checkpoints come back bit for bit on any layout, or say why not; killed saves cost nothing."""

import errno
import gc
import itertools
import json
import logging
import math
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale import config as configs
from jaxscale.checkpoints import array_sums, errors, save, tiers
from jaxscale.checkpoints import folder as checkpoint_folder
from jaxscale.checkpoints.differences import describe_difference
from jaxscale.checkpoints.restore import restore
from jaxscale.checkpoints.retention import Retention
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.storage import durable

METADATA = {"config": {"model": {"d_model": 16, "axes": ("a", "b")}}, "data": {"examples": 96}}
LAYOUTS = [(8, 1), (1, 8), (4, 2), (2, 2), (1, 1)]
SPECS = {
    "embed": ("fsdp", "tensor"),
    "bias": ("tensor",),
    "scale": ("fsdp",),
    "layers": (None, "tensor", "fsdp"),
}


def make_state(seed: int = 0) -> dict[str, Any]:
    """Every kind of leaf, in dicts, tuples and NamedTuples; odd bits included."""
    rng = np.random.default_rng(seed)
    params = {
        "embed": rng.normal(size=(16, 24)),
        "layers": jnp.asarray(rng.normal(size=(3, 8, 16)), jnp.bfloat16),
        "bias": rng.normal(size=16).astype(np.float32).view(np.uint32).view(np.float32),
        "scale": np.asarray([np.nan, -0.0, np.inf, 5e-324] * 4),
    }
    params = jax.tree.map(jnp.asarray, params)
    rule = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1))
    return {
        "step": jnp.asarray(seed, jnp.int32),
        "params": params,
        "opt_state": rule.init(params),
        "key": jax.random.key_data(jax.random.key(seed)),
        "flags": (jnp.asarray([True, False]), jnp.asarray(2**40 + seed)),
    }


def shardings(state: Any, layout: tuple[int, int]) -> Any:
    """fsdp x tensor on as many devices; parameters and their moments are split."""
    devices = jax.devices()[: layout[0] * layout[1]]
    mesh = jax.make_mesh(layout, ("fsdp", "tensor"), (AxisType.Auto,) * 2, devices=devices)

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return NamedSharding(mesh, PartitionSpec(*SPECS.get(name, ())))

    return jax.tree_util.tree_map_with_path(sharding, state)


def abstract(state: Any, layout: tuple[int, int] = (1, 1)) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings(state, layout),
    )


def assert_same_bits(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.fixture
def lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """What is logged, whatever a command of another test made of the log."""
    caplog.set_level(logging.INFO, "jaxscale")
    monkeypatch.setattr(logging.getLogger("jaxscale"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("jaxscale"), "propagate", True)
    return lambda: caplog.messages


@pytest.fixture
def opened() -> Iterator[Callable[..., CheckpointWriter]]:
    """Opens checkpoints that are closed at the end of the test."""
    everything = []

    def open_checkpoints(*args: Any, **settings: Any) -> CheckpointWriter:
        everything.append(CheckpointWriter(*args, **settings))
        return everything[-1]

    yield open_checkpoints
    for checkpoints in everything:
        checkpoints.close()


@pytest.fixture(scope="session")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Steps 3 and 6, complete."""
    folder = tmp_path_factory.mktemp("two_steps")
    checkpoints = CheckpointWriter(folder)
    for step in (3, 6):
        checkpoints.save(step, make_state(step), METADATA)
    checkpoints.close()
    return folder


@pytest.fixture
def saved(two_steps: pathlib.Path, tmp_path: pathlib.Path, opened: Callable) -> CheckpointWriter:
    """A copy of them for one test."""
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    return opened(tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("begin", LAYOUTS, ids=str)
def test_any_layout_reads_any_layout(
    begin: tuple[int, int], tmp_path: pathlib.Path, opened: Callable
) -> None:
    state = make_state()
    checkpoints = opened(tmp_path)
    checkpoints.save(1, jax.device_put(state, shardings(state, begin)), METADATA)
    checkpoints.wait()
    for end in LAYOUTS:
        wanted = abstract(state, end)
        restored = restore(checkpoints, 1, wanted)
        assert_same_bits(restored, state)
        for leaf, want in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
            assert leaf.sharding == want.sharding


def test_small_arrays_are_written_whole_and_large_ones_by_all_who_have_them(
    tmp_path: pathlib.Path, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part that a device writes is cut out by a separate program."""
    cut, slice_in_dim = [], jax.lax.slice_in_dim

    def counted(x: jax.Array, **part: int) -> jax.Array:
        cut.append((x.shape, part["start_index"], part["limit_index"]))
        return slice_in_dim(x, **part)

    monkeypatch.setattr(jax.lax, "slice_in_dim", counted)
    monkeypatch.setattr(checkpoint_folder, "SHARED_WRITE_BYTES", 64)
    state = {"small": np.arange(14.0), "large": np.arange(16.0)}
    checkpoints = opened(tmp_path)
    checkpoints.save(1, jax.device_put(state, shardings(state, (2, 1))), {})
    checkpoints.wait()
    assert sorted(cut) == [((16,), 0, 8), ((16,), 8, 16)]
    assert_same_bits(restore(checkpoints, 1, abstract(state)), state)


def test_state_may_be_donated_at_once(tmp_path: pathlib.Path, opened: Callable) -> None:
    values = np.random.default_rng(0).normal(size=(64, 1024, 8))
    layout = shardings({"embed": values}, (4, 2))
    state = {"embed": jnp.asarray(values)}
    checkpoints = opened(tmp_path)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda a: a * 0 + 7, tree), donate_argnums=0)
    for step in (1, 2, 3):
        state = jax.device_put({"embed": values + step}, layout)
        checkpoints.save(step, state, {})
        for _ in range(5):
            state = overwrite(state)
        jax.block_until_ready(state)
    checkpoints.wait()
    for step in (1, 2, 3):
        restored = restore(checkpoints, step, abstract({"embed": values}))
        np.testing.assert_array_equal(restored["embed"], values + step)


def test_saved_is_reported_only_when_it_is(
    tmp_path: pathlib.Path, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, checkpoints = [], opened(tmp_path)
    note = lambda line: seen.append((line.split(" in ")[0], checkpoints.steps()))  # noqa: E731
    monkeypatch.setattr(save.log, "info", note)
    assert checkpoints.latest() is None
    for step in (1, 2):
        checkpoints.save(step, make_state(), {})
    checkpoints.wait()
    assert seen == [("checkpoint 1 saved", [1]), ("checkpoint 2 saved", [1, 2])]


def test_nothing_but_a_line_of_the_log_is_printed(
    tmp_path: pathlib.Path, opened: Callable, lines: Callable, capfd: pytest.CaptureFixture
) -> None:
    checkpoints = opened(tmp_path)
    checkpoints.save(1, make_state(), {})
    checkpoints.wait()
    restore(checkpoints, 1, abstract(make_state()))
    (line,) = lines()
    assert line.startswith("checkpoint 1 saved in 0.")
    assert capfd.readouterr() == ("", "")


def test_metadata_comes_back(saved: CheckpointWriter) -> None:
    assert saved.description(6)["metadata"] == {
        "config": {"model": {"d_model": 16, "axes": ["a", "b"]}},
        "data": {"examples": 96},
    }


def test_metadata_comes_back_as_json_has_it(tmp_path: pathlib.Path, opened: Callable) -> None:
    checkpoints = opened(tmp_path)
    checkpoints.save(1, {"a": jnp.ones(2)}, {"data": {2: (0.1, None), 10: 2**60}})
    checkpoints.wait()
    metadata = checkpoints.description(1)["metadata"]
    assert metadata == {"data": {"2": [0.1, None], "10": 2**60}}


def test_part_of_a_checkpoint(saved: CheckpointWriter) -> None:
    wanted = {"params": abstract(make_state(), (2, 2))["params"]}
    restored = restore(saved, 3, wanted, part=True)
    assert_same_bits(restored, {"params": make_state(3)["params"]})


def test_without_a_sharding_it_goes_to_the_default_device(saved: CheckpointWriter) -> None:
    restored = restore(saved, 6, jax.eval_shape(lambda: make_state(6)))
    assert_same_bits(restored, make_state(6))
    assert {leaf.device for leaf in jax.tree.leaves(restored)} == {jax.devices()[0]}


def test_last_and_every_are_kept(tmp_path: pathlib.Path, opened: Callable) -> None:
    checkpoints = opened(tmp_path, Retention(2, every=5))
    for step in range(1, 13):
        checkpoints.save(step, {"a": jnp.ones(2)}, {})
    checkpoints.wait()
    assert checkpoints.steps() == [5, 10, 11, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "11", "12", "5"]
    for step in checkpoints.steps():
        restore(checkpoints, step, {"a": jax.ShapeDtypeStruct((2,), jnp.float64)})


def test_failed_deletion_does_not_stop_a_run(
    tmp_path: pathlib.Path, opened: Callable, monkeypatch: pytest.MonkeyPatch, lines: Callable
) -> None:
    checkpoints = opened(tmp_path, Retention(1))

    def refuse(path: pathlib.Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError("no")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        for step in (1, 2, 3):
            checkpoints.save(step, {"a": jnp.ones(2)}, {})
        checkpoints.wait()
    assert "checkpoint 1 is no longer kept but could not be deleted: no" in lines()
    assert checkpoints.steps() == [3]
    checkpoints.save(4, {"a": jnp.ones(2)}, {})
    checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_leftovers_are_ignored_then_removed(tmp_path: pathlib.Path, opened: Callable) -> None:
    for name in ("9.orbax-checkpoint-tmp", "8.deleted", "notes"):
        (tmp_path / name / "arrays").mkdir(parents=True)
    checkpoints = opened(tmp_path)
    assert checkpoints.latest() is None
    checkpoints.save(9, {"a": jnp.ones(2)}, {})
    checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["9", "notes"]


def test_save_that_cannot_begin(tmp_path: pathlib.Path, opened: Callable) -> None:
    checkpoints = opened(tmp_path / "run")
    (tmp_path / "run").write_text("a file where a folder should be")
    checkpoints.save(1, {"a": jnp.ones(2)}, {})
    found = checkpoints.outcome() or ""
    assert re.match(r"saving checkpoint 1 in .*run failed \(.*; there is none yet", found)
    (tmp_path / "run").unlink()
    checkpoints.save(2, {"a": jnp.ones(2)}, {})
    checkpoints.wait()
    assert checkpoints.steps() == [2]


def test_disk_full(tmp_path: pathlib.Path, opened: Callable, lines: Callable) -> None:
    """The failure is reported with its true reason; then saving continues."""
    checkpoints = opened(tmp_path)
    state = {"a": jnp.asarray(np.random.default_rng(0).normal(size=100_000))}
    checkpoints.save(1, state, {})
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        checkpoints.save(2, state, {})
        checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert lines()[1:] == [
        f"warning: saving checkpoint 2 in {tmp_path} failed (File too large); the newest one there "
        "is 1"
    ]
    assert checkpoints.outcome() == lines()[1].removeprefix("warning: ")
    assert checkpoints.steps() == [1]
    checkpoints.save(3, state, {})
    checkpoints.wait()
    assert checkpoints.outcome() == ""
    assert checkpoints.steps() == [1, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


def test_who_waits_hears_of_files_that_grow(
    tmp_path: pathlib.Path, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a write which continues is not taken for one that hangs."""
    checkpoints, heard, waits = opened(tmp_path), threading.Event(), []

    def grow(step: int, *_: object) -> None:
        for size in (1, 2, 3):
            (tmp_path / "1.unfinished" / "more").write_bytes(bytes(size))
            waits.append(heard.wait(10))
            heard.clear()

    monkeypatch.setattr(save, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(checkpoints, "_finish", grow)
    checkpoints.save(1, {"a": jnp.ones(2)}, {})
    checkpoints.wait(growing=heard.set)
    assert waits == [True] * 3


def test_a_save_that_fails_with_the_whole_storage_is_no_success(
    saved: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the background nor at the next one, where the folder cannot even be listed."""
    stale = mock.Mock(side_effect=OSError(errno.ESTALE, os.strerror(errno.ESTALE)))
    state = {"a": jnp.ones(2)}
    with monkeypatch.context() as patch:

        def leave(*_: object) -> None:
            patch.setattr(tiers, "local_steps", stale)
            stale()

        patch.setattr(checkpoint_folder, "_open_arrays", leave)
        for step in (7, 8):
            saved.save(step, state, {})
            saved.wait()
            why = f"saving checkpoint {step} in {saved.directory} failed (Stale file handle)"
            assert saved.outcome() == why
    saved.save(7, state, {})
    saved.wait()
    assert (saved.outcome(), saved.steps()) == ("", [3, 6, 7])


def test_a_checkpoint_whose_last_rename_is_not_on_disk_is_saved_again(
    tmp_path: pathlib.Path, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, state = opened(tmp_path / "all"), {"a": jnp.ones(2)}
    with monkeypatch.context() as patch:
        sync = durable.sync

        def refuse(path: pathlib.Path) -> None:
            if path == tmp_path / "all":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(path)

        patch.setattr(durable, "sync", refuse)
        checkpoints.save(5, state, {})
        checkpoints.wait()
        assert "failed (Input/output error); there is none yet" in (checkpoints.outcome() or "")
    checkpoints.save(5, state, {})
    checkpoints.wait()
    assert checkpoints.steps() == [5]


def test_a_record_of_the_last_save_that_cannot_be_written_fails_no_save(
    tmp_path: pathlib.Path, opened: Callable, lines: Callable
) -> None:
    marker = tmp_path / "last_saved"
    marker.mkdir()
    checkpoints = opened(tmp_path / "all", newest_file=marker)
    checkpoints.save(5, {"a": jnp.ones(2)}, {})
    checkpoints.wait()
    assert (checkpoints.outcome(), checkpoints.steps()) == ("", [5])
    assert lines()[0] == (
        f"warning: checkpoint 5 is saved, but {marker} is not written (Is a directory)"
    )


def test_a_step_is_saved_once(saved: CheckpointWriter) -> None:
    with pytest.raises(ValueError, match="checkpoint 6 is already in"):
        saved.save(6, make_state(), {})


@pytest.mark.parametrize("value", [np.float32(1), float("nan"), {1}])
def test_metadata_must_be_json(saved: CheckpointWriter, value: object) -> None:
    with pytest.raises(ValueError, match="metadata of checkpoint 7 is not JSON"):
        saved.save(7, make_state(), {"data": value})
    assert saved.latest() == 6


def test_typed_keys_are_refused(saved: CheckpointWriter) -> None:
    with pytest.raises(ValueError, match=r"rng/0 is a typed random key.*key_data"):
        saved.save(7, {"rng": [jax.random.key(0)]}, {})


@pytest.mark.parametrize("settings", [{"last": 0}, {"last": 1, "every": -1}])
def test_retention_is_checked(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"run\.keep_last = .* run\.keep_every = "):
        Retention(**settings)


def test_differences_are_listed(saved: CheckpointWriter) -> None:
    wanted = abstract(make_state())
    params = wanted["params"]
    params["layers"] = jax.ShapeDtypeStruct((3, 8, 32), jnp.float32)
    params["bias_2"] = params.pop("bias")
    config = {"model": {"d_model": 32, "axes": ["a", "b"], "d_ff": 64}}
    with pytest.raises(ValueError, match="does not fit") as error:
        restore(saved, 6, wanted, config=config)
    assert str(error.value).splitlines() == [
        f"checkpoint 6 in {saved.directory} does not fit this run; 3 arrays differ:",
        "  params/bias: only in the checkpoint",
        "  params/bias_2: not in the checkpoint",
        "  params/layers: shape [3, 8, 16] saved, [3, 8, 32] wanted; "
        "dtype bfloat16 saved, float32 wanted",
        "  settings that changed since it was saved:",
        "    config.model.d_ff = 64 now, not read when saved",
        "    config.model.d_model = 16 when saved, 32 now",
    ]


def test_many_differences_are_counted(saved: CheckpointWriter) -> None:
    wanted = {f"p{i:02}": jax.ShapeDtypeStruct((), jnp.float32) for i in range(30)}
    with pytest.raises(ValueError, match="30 arrays differ") as error:
        restore(saved, 6, wanted, part=True)
    assert len(str(error.value).splitlines()) == 22
    assert str(error.value).endswith("and 10 more")


def test_describe_difference() -> None:
    before = {"run": {"steps": 10, "seed": 0}, "old": 1, "data": {"source": ("a",)}}
    now = {"run": {"steps": 20, "seed": 0}, "data": {"source": ["a"]}}
    assert describe_difference(before, now) == [
        "old = 1 when saved, not read now",
        "run.steps = 10 when saved, 20 now",
    ]


def test_what_only_an_older_version_wrote_is_no_difference() -> None:
    tiny = configs.load("tiny")
    saved = {name: dict(settings) for name, settings in configs.to_dict(tiny).items()}
    saved["model"] |= {"balance": "sequence", "router_groups": 1}  # of experts
    saved["optimizer"]["b1"] = 0.8
    assert describe_difference(saved, configs.to_dict(tiny)) == [
        "optimizer.b1 = 0.8 when saved, 0.9 now"
    ]


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def largest(directory: pathlib.Path) -> pathlib.Path:
    return max(directory.rglob("d/*"), key=lambda path: path.stat().st_size)


DAMAGES = {
    "no description": lambda step: shutil.rmtree(step / "description"),
    "no arrays": lambda step: shutil.rmtree(step / "arrays"),
    "cut description": lambda step: os.truncate(step / "description" / "metadata", 50),
    "changed description": lambda step: flip(step / "description" / "metadata"),
    "no index": lambda step: (step / "arrays" / "manifest.ocdbt").unlink(),
    "changed index": lambda step: flip(step / "arrays" / "manifest.ocdbt"),
    "changed values": lambda step: flip(largest(step / "arrays" / "ocdbt.process_0")),
    "no values": lambda step: largest(step / "arrays" / "ocdbt.process_0").unlink(),
}


@pytest.fixture
def collected() -> Iterator[None]:
    """Collects here what a test leaves: another test would be blamed for its complaints. What was
    there before, a million objects in the end, is not looked through."""
    gc.freeze()
    yield
    for _ in range(3):
        gc.collect()
    gc.unfreeze()


# Reads that were under way when one failed complain when they are collected.
@pytest.mark.proof
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_the_one_before(damage: str, saved: CheckpointWriter) -> None:
    DAMAGES[damage](saved.directory / "6")
    assert saved.latest() == 6
    message = r"checkpoint 6 in .* cannot be used \(.*remove .*6 to resume from checkpoint 3"
    with pytest.raises(ValueError, match=message):
        restore(saved, 6, abstract(make_state()))
    assert_same_bits(restore(saved, 3, abstract(make_state())), make_state(3))


def test_damage_of_the_only_one(saved: CheckpointWriter) -> None:
    shutil.rmtree(saved.directory / "3" / "description")
    with pytest.raises(ValueError, match=r"checkpoint 3 .*; there is none before it"):
        saved.metadata(3)


def test_a_number_that_changed_in_the_metadata_is_noticed(saved: CheckpointWriter) -> None:
    """By the digest alone: it is still JSON, and the arrays are as they were."""
    path = saved.directory / "6" / "description" / "metadata"
    description = json.loads(path.read_text())
    description["metadata"]["data"]["examples"] += 1
    path.write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"checkpoint 6 .*its description changed since"):
        saved.metadata(6)


def test_process_0_looks_at_the_files_of_a_checkpoint_once(
    saved: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = mock.Mock(side_effect=durable.changed_file)
    monkeypatch.setattr(durable, "changed_file", looks)
    for step, count in ((6, 1), (3, 2)):
        saved.description(step)
        restore(saved, step, abstract(make_state()))
        assert looks.call_count == count
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    saved.description(6)
    assert looks.call_count == 2


def test_unknown_step(saved: CheckpointWriter) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint 5 in .*; there are \[3, 6\]"):
        saved.metadata(5)


ENDLESS = """
import logging, sys
import jax.numpy as jnp
from jaxscale.checkpoints.retention import Retention
from jaxscale.checkpoints.save import CheckpointWriter
checkpoints = CheckpointWriter(sys.argv[1], Retention(2))
logging.basicConfig(format="%(message)s", level="INFO", stream=sys.stdout)
step = checkpoints.latest() or 0
while True:
    step += 1
    state = {"a": jnp.arange(50_000.0) * step, "frozen": jnp.arange(9_000.0), "step": step}
    checkpoints.save(step, state, {"step": step}, frozen={"frozen"})
"""


@pytest.mark.proof
def test_kill_9_costs_at_most_the_save_under_way(tmp_path: pathlib.Path) -> None:
    """Killed at random instants of endless saving and deleting, again and again in one folder."""
    moments = random.Random(0)
    for _ in range(3):
        command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            lines = [process.stdout.readline()]
            time.sleep(moments.uniform(0.05, 0.4))
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        reported = max(int(line.split()[1]) for line in lines)
        checkpoints = CheckpointWriter(tmp_path)
        steps = checkpoints.steps()
        assert steps[-1] == checkpoints.latest() >= reported
        assert len(steps) >= min(2, reported)
        for step in steps:
            wanted = {
                "a": jax.ShapeDtypeStruct((50_000,), jnp.float64),
                "frozen": jax.ShapeDtypeStruct((9_000,), jnp.float64),
                "step": jax.ShapeDtypeStruct((), jnp.int64),
            }
            restored = restore(checkpoints, step, wanted)
            np.testing.assert_array_equal(restored["a"], np.arange(50_000.0) * step)
            np.testing.assert_array_equal(restored["frozen"], np.arange(9_000.0))
            description = checkpoints.description(step)
            assert restored["step"] == description["metadata"]["step"] == step
        checkpoints.close()


DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
)


def of_bits(data: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes as arrays of a type: the last dimension has those of one element."""
    wanted = jnp.dtype(dtype)
    if dtype == "bool":
        return (data & 1).astype(bool)[..., 0]
    return np.ascontiguousarray(data).view(wanted)[..., 0]


@pytest.mark.proof(but=("float8_e4m3fn", "float32", "uint8"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_sees_every_bit_and_every_place(dtype: str) -> None:
    """Each flipped bit changes it, and each exchange of two elements that differ."""
    size, shape = jnp.dtype(dtype).itemsize, (2, 3, 4)
    data = np.random.default_rng(0).integers(0, 256, (*shape, size), np.uint8)
    flat, places = data.reshape(-1, size), np.arange(math.prod(shape))
    made = [flat]
    for place, byte, bit in itertools.product(places, range(size), range(8)):
        if dtype != "bool" or bit == 0:
            made.append(flat.copy())
            made[-1][place, byte] ^= 1 << bit
    for i, j in itertools.combinations(places, 2):
        if not np.array_equal(of_bits(flat, dtype)[i], of_bits(flat, dtype)[j]):
            made.append(flat.copy())
            made[-1][[i, j]] = flat[[j, i]]
    arrays = of_bits(np.stack(made), dtype).reshape(-1, *shape)
    sums = np.asarray(jax.vmap(array_sums.device_sum)(jnp.asarray(arrays))[0])
    assert len(sums) > 24
    assert not np.any(sums[1:] == sums[0])
    on_host = array_sums.array_sums({str(i): array for i, array in enumerate(arrays[:300])})
    assert [one.checksum for one in on_host.values()] == sums[:300].tolist()


@pytest.mark.proof(but=("bfloat16", "float64"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_checksum_is_of_the_array_not_of_its_layout(dtype: str) -> None:
    array = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(jnp.dtype(dtype))
    # One word for 32 bits and less, two for 64, times the odd numbers in order.
    words = array.reshape(-1).view(np.uint32 if dtype == "float64" else np.uint16)
    odd = 2 * np.arange(words.size, dtype=np.uint64) + 1
    expected = int(np.sum(words * odd) % 2**32)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), (AxisType.Auto,) * 2)
    for spec in ((), ("fsdp",), (None, "tensor", "fsdp"), (("fsdp", "tensor"),)):
        for memory in ("device", "pinned_host"):
            sharding = NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory)
            placed = jax.device_put(array, sharding)
            assert int(array_sums.device_sum(placed)[0]) == expected
            assert array_sums.array_sums({"": placed})[""].checksum == expected


@pytest.mark.proof
@pytest.mark.parametrize("shape", [(3, 40_000), (70_000,), (5, 33_000, 2), ()])
def test_sums_of_long_rows_are_those_of_the_device(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for value in (0.0, np.nan):
        array[(0,) * len(shape)] = value
        found = array_sums.array_sums({"": array})[""]
        assert found == tuple(map(np.asarray, array_sums.device_sum(jnp.asarray(array))))
        unasked = array_sums.array_sums({"": array}, finite=False)[""]
        assert unasked == (found.checksum, True)


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?"])
def test_a_path_that_orbax_takes_for_a_pattern_is_refused(
    name: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ValueError, match=r"a path with one of \* \? \[; choose another --workdir"):
        CheckpointWriter(tmp_path / name / "checkpoints")


def test_what_cannot_be_read_gets_no_name(
    saved: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened as a reader would before it is "saved" and older ones are deleted."""
    before = ocp.AsyncCheckpointer.wait_until_finished

    def lose(writer: ocp.AsyncCheckpointer) -> None:
        before(writer)
        # Orbax waits before it writes, too, when there is no such file yet.
        (saved.directory / "7.unfinished" / "arrays" / "manifest.ocdbt").unlink(missing_ok=True)

    monkeypatch.setattr(ocp.AsyncCheckpointer, "wait_until_finished", lose)
    # One array: others, still being opened when the first fails, would complain in a later test.
    saved.save(7, {"a": jnp.ones(2)}, {})
    saved.wait()
    assert re.match(r"saving checkpoint 7 in .* failed \(.* does not exist", saved.outcome() or "")
    assert saved.steps() == [3, 6]


def test_other_arrays_than_the_state_has_get_no_name(
    saved: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"a": {"shape": [3], "dtype": "float64"}}
    monkeypatch.setattr(checkpoint_folder, "_open_arrays", lambda path: wrong)
    saved.save(7, {"a": jnp.ones(2)}, {})
    saved.wait()
    why = "the written arrays cannot be read: a: shape [3] saved, [2] wanted"
    assert why in (saved.outcome() or "")
    assert saved.steps() == [3, 6]


def test_it_is_on_disk_before_it_has_its_name(
    saved: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file and folder is, and then the folder that has the new name."""
    synced, seen = set(), {}
    before = os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(os.stat(descriptor).st_ino)
        if (saved.directory / "7").exists():
            seen["after"] = os.stat(descriptor).st_ino
        before(descriptor)

    def rename(path: pathlib.Path, target: pathlib.Path) -> None:
        seen["missing"] = [p for p in path.rglob("*") if p.stat().st_ino not in synced]
        os.rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(pathlib.Path, "rename", rename)
    saved.save(7, make_state(7), {})
    saved.wait()
    assert saved.latest() == 7
    assert seen == {"missing": [], "after": saved.directory.stat().st_ino}


def test_what_is_being_read_is_not_deleted(tmp_path: pathlib.Path, opened: Callable) -> None:
    writer, reader = opened(tmp_path, Retention(1)), opened(tmp_path)
    state = {"a": jnp.ones(2)}
    writer.save(1, state, {})
    writer.wait()
    with reader.held(1) as there:
        assert there
        for step in (2, 3):
            writer.save(step, state, {})
        writer.wait()
        assert writer.steps() == [1, 3]
        restore(reader, 1, {"a": jax.ShapeDtypeStruct((2,), jnp.float64)})
    writer.save(4, state, {})
    writer.wait()
    assert writer.steps() == [4]
    with reader.held(3) as there:
        assert not there


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_disk_that_is_really_full(tmp_path: pathlib.Path, opened: Callable) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no rights to mount")
    try:
        checkpoints = opened(tmp_path / "run")
        state = {"a": jnp.asarray(np.random.default_rng(0).normal(size=30_000))}
        for step in (1, 2):
            checkpoints.save(step, state, {})
            checkpoints.wait()
        assert "(No space left on device); the newest one there is 1" in checkpoints.outcome()
        shutil.rmtree(checkpoints.directory / "1")
        checkpoints.save(3, state, {})
        checkpoints.wait()
        assert checkpoints.steps() == [3]
        checkpoints.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_what_one_process_cannot_read_no_process_reads(monkeypatch):
    """Each reports before it raises: the others would wait for it, or go another way."""
    reports = []

    def all_reports(topic, own):
        reports.append(own)
        return [own, theirs]

    def fail():
        raise errors.DamagedError("checkpoint 4 is damaged", "cut")

    monkeypatch.setattr(errors.processes, "alone", lambda: False)
    monkeypatch.setattr(errors.processes, "all_reports", all_reports)
    theirs = ["", ""]
    assert errors.read_everywhere("topic", lambda: 5) == 5
    with pytest.raises(errors.DamagedError, match="checkpoint 4"):
        errors.read_everywhere("topic", fail)
    theirs = ["checkpoint 4 is damaged there", "cut"]
    with pytest.raises(errors.DamagedError, match="there"):
        errors.read_everywhere("topic", lambda: 5)
    theirs = ["no permission", ""]
    with pytest.raises(errors.UnreadableError, match="no permission"):
        errors.read_everywhere("topic", fail)
    assert len(reports) == 4
