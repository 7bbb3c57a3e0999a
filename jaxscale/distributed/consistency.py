"""Consistency check of a run's processes: settings, code, versions, environment, devices.

Nothing here imports JAX: most of it is compared before JAX is needed.
"""

import collections
import contextlib
import glob
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxscale.hardware import GPU_MEMORY_VARIABLES

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "libtpu",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
)

OWN_VARIABLES = {
    "JAX_COORDINATOR_ADDRESS",
    "JAX_PROCESS_ID",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_PARTITION_INDEX",
    "JAX_SLICE_INDEX",
    "JAX_COORDINATOR_BIND_ADDRESS",
    "JAX_COMPILATION_CACHE_DIR",
}
"""JAX's environment variables that may differ from process to process."""

ADVICE = {
    "settings": "start all with the same flags and the same config",
    "code": "install the same jaxscale everywhere",
    "versions": "install the same packages everywhere",
    "environment": "set the same variables everywhere",
    "devices": "give each process the same number of devices of one type (JAX_NUM_CPU_DEVICES on "
    "a CPU, CUDA_VISIBLE_DEVICES on GPUs)",
}
"""Group of compared values -> the remedy when they differ."""


def describe_process(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The values to compare between processes that are known before JAX is imported."""
    package = pathlib.Path(__file__).parents[1]
    code = {
        str(file.relative_to(package.parent)): hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for file in sorted(package.rglob("*.py"))
    }
    installed = {d.name: d.version for d in _distributions()}
    shown = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith("JAX_") and name not in OWN_VARIABLES) or name in GPU_MEMORY_VARIABLES
    }
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        # Each process may dump to a separate folder.
        words = [w for w in os.environ.get(name, "").split() if not w.startswith("--xla_dump")]
        shown |= {name: " ".join(words)} if words else {}
    drivers = {"an NVIDIA GPU": "/dev/nvidia[0-9]*", "a TPU": "/dev/accel*"}
    return {
        "settings": dict(_flat(settings)),
        "code": code,
        "versions": {"python": ".".join(platform.python_version_tuple()[:2]), **installed},
        "environment": shown | {name: bool(glob.glob(path)) for name, path in drivers.items()},
    }


def _distributions() -> Iterator[importlib.metadata.Distribution]:
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield importlib.metadata.distribution(name)


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree if isinstance(tree, int | float | str | None) else str(tree)


def matches_form(value: Any, example: Any, depth: int = 3) -> bool:
    """Whether a received value has the keys and types of `example`, down to `depth`; None in either
    matches anything."""
    if isinstance(example, dict) and depth:
        return (
            isinstance(value, dict)
            and (depth == 1 or value.keys() == example.keys())
            and all(matches_form(value[k], v, depth - 1) for k, v in example.items() if k in value)
        )
    if isinstance(example, list):
        return (
            isinstance(value, list)
            and len(value) == len(example)
            and all(matches_form(*pair, depth - 1) for pair in zip(value, example))
        )
    return value is None or example is None or not depth or isinstance(value, type(example))


def first_difference(
    reports: Sequence[Mapping[str, Mapping[str, Any]]], names: Sequence[str]
) -> str:
    """One sentence with the first process that differs from most, the values and the remedy; ""
    when none differs.

    Args:
      reports: for each process, group (a key of ADVICE) -> key -> value.
      names: of each process, for the message.
    """
    groups = reports[0]
    found = (_difference(group, [report[group] for report in reports], names) for group in groups)
    return next(filter(None, found), "")


def _difference(group: str, reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    texts = [json.dumps(report, sort_keys=True) for report in reports]
    common = collections.Counter(texts).most_common(1)[0][0]  # on a tie, the first
    odd = [i for i, text in enumerate(texts) if text != common]
    if not odd:
        return ""
    usual, other = reports[texts.index(common)], reports[odd[0]]
    keys = [key for key in {**usual, **other} if usual.get(key) != other.get(key)]
    here = ", ".join(f"{key} = {_value(other.get(key))}" for key in keys[:3])
    there = ", ".join(_value(usual.get(key)) for key in keys[:3])
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    rest = f" (and {len(odd) - 1} more processes)" if len(odd) > 1 else ""
    return (
        f"the processes differ in {group}: {names[odd[0]]}{rest} has {here}{more}, and "
        f"{names[texts.index(common)]} has {there}; {ADVICE[group]}"
    )


def _value(value: Any) -> str:
    return "none" if value is None else str(value)
