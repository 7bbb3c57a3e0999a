"""What differs between processes is found and said in one line."""

import copy

import pytest

from jaxscale.distributed import consistency


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    """The suite itself sets some for XLA."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


SETTINGS = {
    "config": {"optimizer": {"learning_rate": 0.1}, "data": {"source": ({"path": "a"},)}},
    "flags": {"--trackers": "none"},
}
NAMES = [f"process {i} on host{i}" for i in range(4)]


def differing(kind: str, *changes: dict) -> str:
    """The message about processes that have `changes` in one group of values."""
    reports = [consistency.describe_process(SETTINGS) for _ in changes]
    for report, change in zip(reports, changes):
        report[kind].update(change)
    return consistency.first_difference(reports, NAMES)


def test_alike_is_alike():
    assert differing("settings", {}, {}, {}) == ""


@pytest.mark.proof(but=("settings-changes0-said0",))
@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (
            "settings",
            [{}, {"config.optimizer.learning_rate": 0.2}, {}],
            "the processes differ in settings: process 1 on host1 has "
            "config.optimizer.learning_rate = 0.2, and process 0 on host0 has 0.1; start "
            "all with the same flags",
        ),
        (
            "settings",
            [{"flags.--trackers": "wandb"}, {}, {}],
            "process 0 on host0 has flags.--trackers = wandb, and process 1 on host1 has none",
        ),
        (
            "code",
            [{}, {}, {}, {"jaxscale/training/step.py": "0123"}],
            "differ in code: process 3 on host3 has jaxscale/training/step.py = 0123",
        ),
        ("versions", [{}, {"jax": "0.0.1"}], "process 1 on host1 has jax = 0.0.1, and process 0"),
        (
            "environment",
            [{}, {"XLA_FLAGS": "--xla_x=1"}],
            "process 1 on host1 has XLA_FLAGS = --xla_x=1, and process 0 on host0 has "
            "none; set the",
        ),
        (
            "environment",
            [{}, {"an NVIDIA GPU": True}, {"an NVIDIA GPU": True}],
            "process 0 on host0 has an NVIDIA GPU = False",
        ),
        ("settings", [{}, {"a": 1}, {"b": 1}, {}], "process 1 on host1 (and 1 more processes) has"),
        (
            "settings",
            [{}, {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}],
            "has a = 1, b = 2, c = 3 and 2 more, and process 0 on host0 has none, none, none;",
        ),
    ],
)
def test_who_differs_from_most_is_named(kind, changes, said):
    found = differing(kind, *changes)
    assert said in found
    assert "\n" not in found


def test_what_belongs_to_one_process_may_differ(monkeypatch):
    before = consistency.describe_process(SETTINGS)
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/3")
    assert consistency.describe_process(SETTINGS) == before
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/3 --xla_cpu_x=1")
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    changed = consistency.describe_process(SETTINGS)["environment"]
    assert changed["XLA_FLAGS"] == "--xla_cpu_x=1"
    assert changed["JAX_ENABLE_X64"] == "0"


def test_every_file_of_the_package_and_every_key_counts():
    report = consistency.describe_process(SETTINGS)
    assert {"jaxscale/training/step.py", "jaxscale/data/loader.py"} <= report["code"].keys()
    other = copy.deepcopy(SETTINGS)
    other["config"]["data"]["source"][0]["path"] = "b"
    assert consistency.describe_process(other)["settings"] != report["settings"]
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain"} <= (
        report["versions"].keys()
    )
