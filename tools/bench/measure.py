"""A measured process: reports its start-up, then runs a train step for each line that it reads.

Each subject (`ours.py`, `baseline.py`) is a program that builds a `Case` and serves it; `train.py`
starts them and interleaves their steps, so that other load affects all equally.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.metadata
import json
import pathlib
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxscale import config as configs
from jaxscale.compiled import trace
from jaxscale.config import Config

TRACED = 2
"""Traced steps."""

LONGEST = 40
"""Reported operations of a trace."""


class Case(NamedTuple):
    """A train step and its arguments."""

    init: Any  # jitted: key -> state
    step: Any  # jitted: (state, batch) -> (state, loss or a tuple that begins with it)
    state: Any  # shapes, types and shardings; has a field `params`
    batch: Any  # arrays on the devices
    note: str = ""  # a choice that the case made, such as its attention kernel
    while_compiling: Callable[[], None] = lambda: None  # as a run does while its step compiles


def serve(build: Callable[[Config, str], Case]) -> None:
    """Main function of a subject: flags, first step, a step per line, memory at the end of
    input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--started", type=float, required=True, help="the parent's monotonic time")
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value")
    parser.add_argument("--variant", default="")
    parser.add_argument("--trace", type=pathlib.Path, help="folder for a trace of two more steps")
    options = parser.parse_args()
    phases, mark = {}, options.started

    def done(phase: str) -> None:
        nonlocal mark
        now = time.monotonic()
        phases[phase], mark = now - mark, now

    done("imports")
    config = configs.load(options.config, options.set)
    case = build(config, options.variant)
    done("build")
    # As in a run: one program compiles while the other is traced, and parameters are initialised
    # while the step compiles.
    key = jax.random.key(config.run.seed)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiling = pool.submit(case.init.lower(key).compile)
        lowered = case.step.lower(case.state, case.batch)
        done("trace")
        pool.submit(case.while_compiling)
        state = compiling.result()(key)
    done("init")
    compiled = lowered.compile()
    done("compile")
    state, loss = _step(compiled, state, case.batch)
    done("step")
    memory, device = compiled.memory_analysis(), jax.devices()[0]
    _say(
        phases=phases,
        cpu_seconds=time.process_time(),
        loss=loss,
        note=case.note,
        platform=device.platform,
        device_kind=device.device_kind,
        num_devices=jax.device_count(),
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        versions={name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
    )
    while sys.stdin.readline() == "step\n":
        begin, cpu_begin = time.perf_counter(), time.process_time()
        state, loss = _step(compiled, state, case.batch)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        _say(seconds=seconds, cpu_seconds=cpu_seconds, loss=loss)
    traced = options.trace and _trace(options.trace, compiled, state, case.batch)
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.devices()]
    _say(
        peak_resident_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        peak_device_bytes=max((peak for peak in peaks if peak), default=None),
        trace=traced,
    )


def _trace(folder: pathlib.Path, compiled: Any, state: Any, batch: Any) -> dict[str, Any]:
    """The time breakdown of TRACED more steps; writes the program's text next to the trace."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow the host down
    folder.mkdir(parents=True, exist_ok=True)
    text = compiled.as_text()
    (folder / "program.txt").write_text(text)
    with jax.profiler.trace(folder, profiler_options=options):
        for _ in range(TRACED):
            state, _ = _step(compiled, state, batch)
    found = trace.read_trace(folder)
    return {
        "steps": TRACED,
        "devices": [dataclasses.asdict(one) for one in trace.time_by_cause(found, text)],
        "longest": [
            dataclasses.asdict(one) for one in trace.longest_operations(found, text, LONGEST)
        ],
    }


def _step(compiled: Callable, state: Any, batch: Any) -> tuple[Any, float]:
    """Runs one step to completion; the loss is on the host."""
    state, out = compiled(state, batch)
    jax.block_until_ready(state)
    return state, float(jax.tree.leaves(out)[0])


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)
