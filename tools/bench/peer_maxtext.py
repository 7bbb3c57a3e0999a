"""MaxText's trainer as a subject of `peers.py`: its train command, with the compiled step timed.

It runs in MaxText's environment, so it imports nothing of this project. Its protocol is that of
`measure.py`: a report after the first step, after a step for each line read, and at the end.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import pathlib
import resource
import sys
import time
from typing import Any

SAY = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # MaxText's output goes to stderr


def main() -> None:
    """Trains until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--started", type=float, required=True, help="the parent's monotonic time")
    options, settings = parser.parse_known_args()
    phases = _Phases(options.started)
    package = importlib.import_module("maxtext")
    train = importlib.import_module("maxtext.trainers.pre_train.train")
    phases.done("imports")
    memory: list[Any] = []
    shown, made = train.max_utils.print_compiled_memory_stats, train.train_utils

    def keep(stats: Any, **words: Any) -> None:
        memory.append(stats)
        shown(stats, **words)

    jitted = made.jit_train_and_eval_step

    def jit_train_and_eval_step(*arguments: Any, **words: Any) -> tuple[Any, Any]:
        step, evaluation = jitted(*arguments, **words)
        phases.done("build")
        return _Timed(step, phases, memory), evaluation

    train.max_utils.print_compiled_memory_stats = keep
    made.jit_train_and_eval_step = jit_train_and_eval_step
    base = pathlib.Path(str(package.__file__)).parent / "configs" / "base.yml"
    train.main(["train", str(base), *settings])


class _Phases:
    def __init__(self, started: float) -> None:
        self.seconds: dict[str, float] = {}
        self._mark = started

    def done(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._mark = now - self._mark, now


class _Timed:
    """The jitted step; each call waits for a line of input, and for its result."""

    def __init__(self, step: Any, phases: _Phases, memory: list[Any]) -> None:
        self._step, self._phases, self._memory = step, phases, memory
        self._first = True

    def lower(self, *arguments: Any, **words: Any) -> Any:
        return self._step.lower(*arguments, **words)

    def __call__(self, state: Any, *rest: Any) -> Any:
        import jax  # noqa: PLC0415
        from flax import nnx  # noqa: PLC0415

        if self._first:
            self._phases.done("compile")
            num_params = sum(leaf.size for leaf in jax.tree.leaves(state.filter(nnx.Param)))
        elif sys.stdin.readline() != "step\n":
            _say(
                peak_resident_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                peak_device_bytes=None,
            )
            os._exit(0)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        state, metrics = jax.block_until_ready(self._step(state, *rest))
        loss = float(metrics["scalar"]["learning/loss"])
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        if not self._first:
            _say(seconds=seconds, cpu_seconds=cpu_seconds, loss=loss)
            return state, metrics
        self._first = False
        self._phases.done("step")
        device = jax.devices()[0]
        _say(
            phases=self._phases.seconds,
            cpu_seconds=time.process_time(),
            loss=loss,
            note=f"{num_params} parameters",
            num_params=num_params,
            platform=device.platform,
            device_kind=device.device_kind,
            num_devices=jax.device_count(),
            argument_bytes=self._memory[0].argument_size_in_bytes,
            temp_bytes=self._memory[0].temp_size_in_bytes,
            versions={
                name: importlib.metadata.version(name)
                for name in ("maxtext", "jax", "jaxlib", "flax")
            },
        )
        return state, metrics


def _say(**fields: Any) -> None:
    print(json.dumps(fields), file=SAY, flush=True)


if __name__ == "__main__":
    main()
