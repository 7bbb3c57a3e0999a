"""One trial of a measured search: compiles a step, times a few, and prints one line of JSON.

python -m jaxscale.autotune.trial reads the config as a line of JSON from standard input, and exits
when its input is closed, so that it never outlives its parent.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxscale import config as configs
from jaxscale.batch import ShardedBatch
from jaxscale.data.synthetic import synthetic_batch
from jaxscale.run.setup.layout import open_engine

WARM_UP = 2
"""The number of steps before the timed ones."""


def main() -> int:
    """Returns the exit status, also 0 for a refused config."""
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    if asked is None:
        device = jax.devices()[0]
        _answer(devices=jax.device_count(), kind=device.device_kind, platform=device.platform)
        return 0
    try:
        config = configs.from_dict(asked["config"])
        config, engine = open_engine(config)
    except ValueError as error:
        _answer(refused=str(error))
        return 0
    batch = engine.shard(synthetic_batch(config))
    begin = time.monotonic()
    state = engine.init(jax.random.key(config.run.seed))
    step = engine.step.lower(state, batch).compile()
    compile_seconds = time.monotonic() - begin
    memory = step.memory_analysis()
    first, _, state = _timed(step, state, batch)
    for _ in range(WARM_UP - 1):
        _, _, state = _timed(step, state, batch)
    seconds = []
    for _ in range(asked["steps"]):
        _, took, state = _timed(step, state, batch)
        seconds.append(took)
    _answer(
        step_seconds=seconds,
        loss=first,
        compile_seconds=compile_seconds,
        memory_bytes=memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
    )
    return 0


def _timed(step: Callable, state: Any, batch: ShardedBatch) -> tuple[float, float, Any]:
    """The loss, seconds and next state of one step."""
    begin = time.perf_counter()
    state, out = step(state, batch)
    loss = float(out.loss)
    jax.block_until_ready(state)
    return loss, time.perf_counter() - begin, state


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


def _answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    sys.exit(main())
