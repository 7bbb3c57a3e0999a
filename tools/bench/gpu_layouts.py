"""Layout equality on one GPU: losses and gradient norms of two steps in each layout that one device
allows, and with one-document attention, must agree.

In float64 up to rounding; in bfloat16, with the platform's attention kernel, within the precision
of the type.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxscale import config as configs
from jaxscale.data.synthetic import synthetic_batch
from jaxscale.run.setup.layout import open_engine

CONFIG = "configs/tiny.py"
SETTINGS = ("data.seq_len=256", "model.head_dim=64", "model.qk_norm=True")
CASES = (
    "",
    "layout.remat=full",
    "layout.microbatches=2",
    "layout.zero_stage=0",
    "layout.remat=full,layout.microbatches=4",
    "data.objective=causal_across_documents",
)
BOUNDS = {"bfloat16": 5e-3, "float64": 1e-12}
"""Type -> largest relative difference from the first case; the type with GPU kernels first."""


def two_steps(settings: Sequence[str]) -> tuple[list[float], str]:
    """Loss and gradient norm of each, and the attention kernel that ran."""
    config, engine = open_engine(configs.load(CONFIG, settings))
    batch = engine.shard(synthetic_batch(config))
    state, numbers = engine.init(jax.random.key(0)), []
    for _ in range(2):
        state, out = engine.step(state, batch)
        numbers += [float(out.loss), float(out.grad_norm)]
    return numbers, engine.attention


def check(dtype: str) -> Iterator[dict[str, Any]]:
    """A record for each case."""
    # Only for float64: in bfloat16 loop counters have 32 bits, as in runs.
    jax.config.update("jax_enable_x64", dtype == "float64")
    types = [f"model.compute_dtype={dtype}"]
    if dtype == "float64":
        types += [
            f"{name}={dtype}"
            for name in (
                "model.param_dtype",
                "optimizer.moment_dtype",
                "optimizer.second_moment_dtype",
                "optimizer.accumulation_dtype",
            )
        ]
    first = None
    for case in CASES:
        begin = time.monotonic()
        settings = [*SETTINGS, *types, *filter(None, case.split(","))]
        numbers, attention = two_steps(settings)
        first = first or numbers
        difference = max(abs(a - b) / abs(b) for a, b in zip(numbers, first))
        agrees = difference <= BOUNDS[dtype]
        record = {
            "benchmark": "layouts",
            "config": CONFIG,
            "settings": settings,
            "numbers": numbers,
            "attention": attention,
            "difference": difference,
            "bound": BOUNDS[dtype],
            "seconds": time.monotonic() - begin,
        }
        if not agrees:
            record["error"] = f"{difference:.1e} is more than {BOUNDS[dtype]:.0e}"
        print(
            f"{dtype:8} {case or 'one device':39} {attention:9} loss {numbers[2]:.6f}, "
            f"differs by {difference:.1e}{'' if agrees else ', TOO MUCH'}",
            flush=True,
        )
        yield record


def main(argv: Sequence[str]) -> int:
    """Returns 1 if a case differs by more than its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="append a line for each case")
    options = parser.parse_args(argv)
    failed = False
    for record in itertools.chain.from_iterable(map(check, BOUNDS)):
        failed |= "error" in record
        if options.json:  # at once: a part that takes too long is ended
            with open(options.json, "a") as lines:
                lines.write(json.dumps(record) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
