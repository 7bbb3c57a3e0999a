"""Report of a machine: versions, devices, missing packages, XLA flags, and a small sharded step.

JAX is imported when first used: a mistyped flag is refused before, and a broken installation is
reported without a crash.
"""

import argparse
import importlib
import importlib.metadata
import logging
import os
import pathlib
import platform
import re
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epy

from jaxscale import command_line, hardware, run_folder
from jaxscale import config as configs
from jaxscale.distributed import launcher, processes

with epy.lazy_imports():
    import jax

    from jaxscale.run.setup import preflight
    from jaxscale.sharding import specs
    from jaxscale.training import xla_options

log = logging.getLogger("jaxscale")

MINIMUM_JAX = "0.11.2"
PACKAGES = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "flax": "flax",
    "optax": "optax",
    "orbax-checkpoint": "orbax.checkpoint",
    "grain": "grain",
    "array-record": "array_record",
    "fsspec": "fsspec",
    "jinja2": "jinja2",
    "ml_collections": "ml_collections",
    "tokenizers": "tokenizers",
    "numpy": "numpy",
    "matplotlib": "matplotlib.figure",
    "tensorboardX": "tensorboardX",
    "absl-py": "absl.logging",
    "etils": "etils.epath",
    **({"backports.zstd": "backports.zstd"} if sys.version_info < (3, 14) else {}),
}
"""Distribution that a run needs -> its module that is imported as a test."""

EXTRAS = {
    "cuda13": ("jax-cuda13-plugin", "jax-cuda13-pjrt"),
    "tpu": ("libtpu",),
    "aot": ("libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    "aot-cudnn": ("nvidia-cudnn-cu13",),
    "parquet": ("pyarrow",),
    "sentencepiece": ("sentencepiece",),
    "measure": ("optuna", "scikit-learn"),
    "solver": ("ortools",),
    "s3": ("s3fs",),
    "gs": ("gcsfs",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny",),
    "docs": ("mkdocs-material", "mkdocstrings"),
    "dev": ("pytest", "pytest-xdist", "hypothesis", "ruff", "pyright", "import-linter"),
}
"""Extra of the package -> the distributions that it installs."""

ACCELERATORS = {"/dev/nvidia0": ("gpu", "cuda13"), "/dev/accel0": ("tpu", "tpu")}
"""A driver's device file -> JAX's name of the platform, and the extra to install for it."""


def versions() -> dict[str, str | None]:
    """Name -> installed version or None, with Python first."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def broken_packages() -> dict[str, list[str]]:
    """Import error -> the installed distributions that raise it, such as one whose requirements are
    missing."""
    found: dict[str, list[str]] = {}
    for name, module in PACKAGES.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # any error is reported as the result
            if version(name):
                found.setdefault(f"{type(error).__name__}: {error}", []).append(name)
    return found


def missing_extras() -> dict[str, str]:
    """Missing extra -> the command that installs it in a checkout."""
    return {
        extra: f"uv sync --inexact --extra {extra}"
        for extra, distributions in EXTRAS.items()
        if not all(version(name) for name in distributions)
    }


def devices() -> list[dict[str, Any]]:
    """The types of local devices: count, memory of each, bfloat16 peak."""
    kinds: dict[str, dict[str, Any]] = {}
    for device in jax.local_devices():
        if device.device_kind not in kinds:
            stats = device.memory_stats() or {}
            kinds[device.device_kind] = {
                "platform": device.platform,
                "kind": device.device_kind,
                "count": 0,
                "memory_bytes": stats.get("bytes_limit"),
                "bf16_peak_flops_per_second": hardware.peak_flops(device.device_kind, "bfloat16"),
            }
        kinds[device.device_kind]["count"] += 1
    return list(kinds.values())


def xla_flags() -> dict[str, Any]:
    """The table's XLA flags for this machine, each with this compiler's refusal, if any."""
    device = jax.devices()[0]
    flags = xla_options.flags_of(device)
    refused = xla_options.refused_options(flags, jax.sharding.SingleDeviceSharding(device))
    return {
        "xla_flags_version": xla_options.VERSION,
        "xla_flags": [vars(flag) | {"refusal": refused.get(flag.name)} for flag in flags],
    }


def self_test() -> dict[str, Any]:
    """One FSDP step of gradient descent over all devices of all processes, compared with NumPy.

    Weights are all-gathered, and their gradient reduce-scattered. All numbers are small integers,
    exact in float32 in any order of summation: the weights must equal NumPy's to the bit, and the
    loss, a large sum, up to rounding.

    Returns:
      `passed`, `seconds`, and `error`, the failure or None.
    """
    start = time.perf_counter()
    count = len(jax.devices())
    random = np.random.default_rng(0)
    x = random.integers(-2, 3, (4 * count, 8 * count)).astype(np.float32)
    w = random.integers(-2, 3, (8 * count, 16)).astype(np.float32)

    def step(w, x):
        def local_loss(w):
            whole = jax.lax.all_gather(w, "fsdp", tiled=True)
            y = jax.numpy.dot(x, whole, precision="highest")
            return 0.5 * jax.numpy.sum(y * y)

        loss, grad = jax.value_and_grad(local_loss)(w)
        return jax.lax.psum(loss, "fsdp"), w - grad

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    try:
        run = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(specs.FSDP_ROWS, specs.FSDP_ROWS),
                out_specs=(specs.REPLICATED, specs.FSDP_ROWS),
            )
        )
        loss, updated = run(w, x)
        y = x @ w
        expected = w - x.T @ y
        agrees = np.isclose(loss, 0.5 * np.sum(y * y)) and all(
            np.array_equal(shard.data, expected[shard.index])
            for shard in updated.addressable_shards
        )
        error = None if agrees else "the result differs from NumPy's"
    except Exception as failure:  # any error is reported as the result
        error = f"{type(failure).__name__}: {failure}"
    return {"passed": error is None, "seconds": time.perf_counter() - start, "error": error}


def examine() -> dict[str, Any]:
    """The report that `main` prints, as plain data; with the `problems` to fix."""
    report: dict[str, Any] = {"versions": versions(), "missing_extras": missing_extras()}
    report["host"] = {
        "name": socket.gethostname(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }
    try:
        report["devices"] = devices()
        platform_name = report["devices"][0]["platform"]
        report |= xla_flags()
        report["self_test"] = self_test()
    except (ImportError, RuntimeError, AssertionError) as error:
        platform_name = None
        asked = os.environ.get("JAX_PLATFORMS")
        # JAX 0.12 asserts that a plugin was loaded, without a message.
        reason = str(error) or f"no plugin for JAX_PLATFORMS = {asked} loads"
        report |= {"devices": [], "xla_flags": [], "xla_flags_version": "unknown"}
        report["self_test"] = {"passed": False, "seconds": 0.0, "error": f"no JAX: {reason}"}
    broken = broken_packages()
    report["problems"] = problems(report["versions"], broken, report["self_test"])
    own = {key: report[key] for key in ("host", "devices", "problems")}
    report["processes"] = processes.all_reports("doctor", own)
    report["hints"] = [
        f"{file} exists, but JAX runs on {platform_name}: uv sync --inexact --extra {extra}"
        for file, (wanted, extra) in ACCELERATORS.items()
        if pathlib.Path(file).exists() and platform_name != wanted
    ]
    return report


def problems(
    installed: dict[str, str | None], broken: dict[str, list[str]], test: dict[str, Any]
) -> list[str]:
    """Problems to fix before training, each with its remedy."""
    found = [
        f"{name} is not installed: uv sync --inexact"
        for name, got in installed.items()
        if got is None
    ]
    found += [
        f"{', '.join(names)} cannot be imported ({why}): uv sync --inexact --reinstall"
        for why, names in broken.items()
    ]
    jax_version = installed["jax"]
    if jax_version and _numbers(jax_version) < _numbers(MINIMUM_JAX):
        found.append(f"jax is {jax_version}; at least {MINIMUM_JAX} is needed: uv sync --inexact")
    if not test["passed"]:
        found.append(f"the self-test failed: {test['error']}")
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def show(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = _section(
        "versions", [f"{name:18} {got or 'missing'}" for name, got in report["versions"].items()]
    )
    for number, one in enumerate(report["processes"]):
        several = len(report["processes"]) > 1
        title = f"process {number} on {one['host']['name']}" if several else "machine"
        lines += _section(title, _machine(one["host"], one["devices"]))
    extras = report["missing_extras"]
    width = max(map(len, extras), default=0)
    lines += _section(
        "extras that are not installed",
        [f"{extra:{width}} {command}" for extra, command in extras.items()] or ["none"],
    )
    lines += _section(
        f"XLA flags for this platform (table of {report['xla_flags_version']})",
        list(map(_flag, report["xla_flags"])) or ["none: the defaults are used"],
    )
    test = report["self_test"]
    outcome = "agrees with NumPy" if test["passed"] else "FAILED"
    step = f"a small fully sharded step {outcome}, {test['seconds']:.1f} s"
    # A problem of several processes is printed once.
    found = dict.fromkeys(text for one in report["processes"] for text in one["problems"])
    verdict = [*map("problem: {}".format, found), *map("hint: {}".format, report["hints"])]
    verdict += ["ready to train"] * (not found)
    return "\n".join([*lines, *_section("self-test", [step]), *_section("verdict", verdict)])


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)]


def _flag(flag: dict[str, Any]) -> str:
    refused = f"; left out: {flag['refusal']}" if flag["refusal"] else ""
    return f"{flag['name']}={str(flag['value']).lower()}: {flag['reason']}{refused}"


def _machine(host: dict[str, Any], devices: list[dict[str, Any]]) -> list[str]:
    lines = [f"{host['cores']} cores, {host['memory_bytes'] / 1e9:.1f} GB of memory"]
    for row in devices:
        memory = row["memory_bytes"]
        peak = row["bf16_peak_flops_per_second"]
        lines.append(
            f"{row['count']} x {row['kind']} ({row['platform']}), "
            f"{f'{memory / 1e9:.1f} GB' if memory else 'memory of the machine'}, bfloat16 peak "
            f"{f'{peak / 1e12:.0f} TFLOP/s' if peak else 'n/a'}"
        )
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.doctor",
        description="Prints versions, devices, missing extras, compiler flags, and a self-test.",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=command_line.output_file,
        help="also write the findings as JSON",
    )
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="also check hosts, clocks, network, storage bandwidth and free space for the run of "
        "--config in --workdir",
    )
    parser.add_argument("--config", metavar="FILE", help="config of the run, for --preflight")
    parser.add_argument(
        "--workdir",
        metavar="DIR",
        type=run_folder.folder,
        help="folder or URL of that run; default as in jaxscale.train",
    )
    launcher.add_process_flags(parser)
    return parser


def _load_config(arguments: argparse.Namespace, overrides: list[str]) -> configs.Config | None:
    """The config of the run for --preflight, or None."""
    if (arguments.config or arguments.workdir or overrides) and not arguments.preflight:
        raise ValueError("--config and --workdir are for --preflight; add it, or leave them out")
    if arguments.preflight and not arguments.config:
        raise ValueError("--preflight needs the run's --config FILE; add it")
    return configs.load(arguments.config, overrides) if arguments.preflight else None


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 if there is a problem to fix before training."""
    arguments, overrides = command_line.parse(_parser(), argv)
    with command_line.refusals():
        place = launcher.find_processes(arguments)
        config = _load_config(arguments, overrides)
    command_line.log_to_stdout()
    with processes.together(place, launcher.common_flags(arguments)):
        report = examine()
        log.info(show(report))
        bad = any(one["problems"] for one in report["processes"])
        if config is not None:
            with command_line.refusals():
                workdir = arguments.workdir or run_folder.default_folder(arguments.config)
                found = preflight.examine_run(config, workdir)
            log.info("\n".join(_section("preflight", list(map(str, found)))))
            report["preflight"] = [vars(finding) for finding in found]
            bad |= any(finding.advice for finding in found)
        if not (place and place.process_id):
            command_line.write_json(arguments.json, report)
        return int(bad)


if __name__ == "__main__":
    command_line.run(main)
