"""Benchmark of experts' grouped matmuls: Pallas kernels, the loop over blocks, XLA's ragged dot.

Times the forward pass and both gradients, checks them against the loop, and counts the bytes that
the kernels move; one JSON line for each. `--compile` counts bytes only, without a device.
"""

import argparse
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from jaxscale.ops.experts import grouped_kernels  # noqa: E402
from jaxscale.ops.experts.grouped_matmul import (  # noqa: E402
    grouped_matmul,
    grouped_weight_gradient,
)

WAYS = ("blocks", "kernels", "ragged_dot")
"""The first is the reference."""

ERROR_BOUND = 2**-7
"""Of the relative error in the norm: results are rounded to bfloat16."""


class Experts(NamedTuple):
    """A grouped matmul [R, D] x [E, D, F]: the rows of one rank in a layer."""

    rows: int
    experts: int
    inputs: int
    features: int


CASES = {
    "qwen3_30b_a3b": Experts(131_072, 128, 2048, 768),  # 4 x 4,096 tokens, 8 experts each
    "mixtral_8x7b": Experts(32_768, 8, 4096, 14_336),  # 4 x 4,096 tokens, 2 experts each
}
TINY = {"tiny": Experts(64, 4, 32, 48)}


def group_sizes(case: Experts) -> np.ndarray:
    """Uneven groups, as routers choose them: shares spread by a half."""
    shares = np.random.default_rng(0).gamma(4.0, size=case.experts)
    return np.random.default_rng(1).multinomial(case.rows, shares / shares.sum()).astype(np.int32)


def passes(how: dict[str, Any]) -> dict[str, Callable[..., jax.Array]]:
    """The three matmuls of (x, w, dy, sizes), by name."""
    multiply = functools.partial(grouped_matmul, **how)
    return {
        "forward": lambda x, w, dy, sizes: multiply(x, w, sizes),
        "gradient of rows": lambda x, w, dy, sizes: multiply(dy, w, sizes, transposed=True),
        "gradient of weights": lambda x, w, dy, sizes: grouped_weight_gradient(x, dy, sizes, **how),
    }


def needed_bytes(case: Experts) -> dict[str, int]:
    """Operands and results in bfloat16, each once."""
    matrices = case.experts * case.inputs * case.features
    once = 2 * (case.rows * (case.inputs + case.features) + matrices)
    return dict.fromkeys(passes({}), once)


def kernel_bytes(case: Experts, sizes: np.ndarray) -> dict[str, int]:
    """Bytes in bfloat16 between memory and the L2 cache, if that holds what a panel of programs
    shares, and nothing from one panel to the next.

    A panel (`grouped_kernels.ProgramOrder`) reads its rows and the matrices of its groups once. Of
    a gradient of weights it reads its features of the group's rows, and all of the other operand's.
    """
    tiles = grouped_kernels.HOPPER
    matrices = case.experts * case.inputs * case.features
    places = np.asarray(grouped_kernels.tile_places(jnp.asarray(sizes), case.rows, tiles.rows))
    found = {}
    for name, depth, columns in (
        ("forward", case.inputs, case.features),
        ("gradient of rows", case.features, case.inputs),
    ):
        order = grouped_kernels.row_order(len(places), columns, tiles.rows * depth * 2)
        groups = [places[i : i + order.panel, 0] for i in range(0, len(places), order.panel)]
        read = sum(len(set(one[one < case.experts])) for one in groups)
        found[name] = 2 * (case.rows * (depth + columns) + read * depth * columns)
    panels = math.ceil(math.ceil(case.inputs / tiles.rows) / grouped_kernels.PANEL_TILES[0])
    read = case.rows * (case.inputs + panels * case.features)
    return found | {"gradient of weights": 2 * (read + matrices)}


def shortest_seconds(run: Callable[..., jax.Array], arguments: tuple) -> float:
    """Seconds of one call: the shortest of several, each of four calls in a row."""
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        for _ in range(4):
            result = run(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begin) / 4)
    return min(times)


def compare(case: Experts, interpret: bool) -> list[dict[str, Any]]:
    """A record for each way and pass; its `error` says why there is no time."""
    sizes = group_sizes(case)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (
        (case.rows, case.inputs),
        (case.experts, case.inputs, case.features),
        (case.rows, case.features),
    )
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes)]
    arguments = (*arrays, jnp.asarray(sizes))
    flops = 2 * case.rows * case.inputs * case.features
    must, moved, expected, records = needed_bytes(case), kernel_bytes(case, sizes), {}, []
    for way in WAYS:
        how = {"implementation": way, "interpret": interpret}
        for name, function in passes(how).items():
            record: dict[str, Any] = {"benchmark": "grouped matmul", "way": way, "pass": name}
            try:
                run = jax.jit(function).lower(*arguments).compile()
                got = run(*arguments).astype(jnp.float32)
                seconds = shortest_seconds(run, arguments)
                memory = run.memory_analysis()
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                # Every row by every matrix may need more memory than there is.
                record["error"] = str(error).splitlines()[0]
                records.append(record)
                continue
            wanted = expected.setdefault(name, got)
            record |= {
                "difference": float(jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)),
                "seconds": seconds,
                "flops_per_second": flops / seconds,
                "temp_bytes": memory.temp_size_in_bytes if memory else None,
                "bytes_ratio": moved[name] / must[name] if way == "kernels" else None,
            }
            records.append(record)
    return records


def count_text(case: Experts) -> str:
    """A line for each pass: the bytes that its kernel moves, and the bytes needed."""
    must, moved = needed_bytes(case), kernel_bytes(case, group_sizes(case))
    return "\n".join(
        f"{name:20} {moved[name] / 1e9:6.3f} GB of {must[name] / 1e9:6.3f}, "
        f"ratio {moved[name] / must[name]:.3f}"
        for name in must
    )


def main(argv: Sequence[str]) -> int:
    """Returns 1 if a result differs from the loop's by more than its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny, for any machine")
    parser.add_argument("--compile", action="store_true", help="count bytes, without a device")
    parser.add_argument("--json", metavar="FILE", help="append a line for each way and pass")
    options = parser.parse_args(argv)
    failed = False
    for name, case in (TINY if options.rehearse else CASES).items():
        print(f"{name}: {case}\n{count_text(case)}", flush=True)
        if options.compile:
            continue
        for record in compare(case, interpret=jax.default_backend() == "cpu"):
            failed |= record.get("difference", 0) > ERROR_BOUND
            rate = record.get("flops_per_second", 0) / 1e12
            print(
                f"{record['way']:10} {record['pass']:20} "
                + (
                    record.get("error")
                    or f"{1e3 * record['seconds']:9.3f} ms {rate:6.1f} TFLOP/s, "
                    f"differs by {record['difference']:.1e}"
                ),
                flush=True,
            )
            if options.json:
                with open(options.json, "a") as lines:
                    lines.write(json.dumps({"case": name, **case._asdict(), **record}) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
