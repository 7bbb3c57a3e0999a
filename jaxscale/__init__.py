"""Training large language models on meshes of accelerators with JAX."""

import importlib
import os
import re
import signal
import sys
from typing import Any

# Ctrl-C while a command (python -m jaxscale.NAME) imports its modules: it ends, without a
# traceback. `command_line.run` takes over.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# XLA:CPU (jaxlib 0.12) blocks a thread in each collective, and its pool has one thread for each
# core. Ranks start independent collectives in different orders: with several devices in a process,
# waiting collectives can occupy every thread, and the program deadlocks.
_DEVICES = re.search(
    r"JAX_NUM_CPU_DEVICES=(\d+)|xla_force_host_platform_device_count=(\d+)",
    " ".join(f"{name}={os.environ.get(name)}" for name in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")),
)
if _DEVICES and (_NUM_DEVICES := int(_DEVICES[1] or _DEVICES[2])) > 1:
    os.environ.setdefault("PJRT_NPROC", str(max(4 * _NUM_DEVICES, os.cpu_count() or 1)))

# The public names and their modules. They are looked up when first used, so that a command can
# refuse a mistyped flag before JAX is imported.
_HOMES = {
    "Batch": "batch",
    "Config": "config",
    "Layout": "config.layout",
    "ModelConfig": "config.model",
    "ModelSettings": "config.model",
    "describe_layout": "run.setup.layout_report",
    "device_batches": "run.evaluation",
    "evaluate_loss": "run.evaluation",
    "fit": "run.training_loop",
    "from_pretrained": "run.pretrained",
    "load": "config",
    "make_engine": "training.engine",
    "make_mesh": "sharding.mesh",
    "open_engine": "run.setup.layout",
    "open_text": "run.setup.text",
    "open_trainer": "run.trainer",
    "plan_layouts": "planner.plan_layouts",
    "resolve": "sharding.resolve",
    "sample": "decoding.sampling",
    "ShardedBatch": "batch",
}


# Without it `import *` would import loaded modules, such as `config`, and no public name.
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"jaxscale has no {name!r}; it has {', '.join(sorted(_HOMES))}")
    return getattr(importlib.import_module(f"jaxscale.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
