"""Benchmark of float8 accumulation: the error of a weight's gradient summed over 32,768 tokens.

The same 8-bit operands are multiplied in float32, as in a step, with fast accumulation, and by
XLA's choice of kernel; one JSON line for each.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from jaxscale.ops.matmul import (  # noqa: E402
    FLOAT8_PRECISION,
    FORWARD,
    OPERANDS,
    WEIGHT_GRADIENT,
    scaled_float8,
)
from jaxscale.training.xla_options import FLOAT8  # noqa: E402

SIZES = (32_768, 2_048, 8_192)  # tokens, features and hidden features: llama32_1b, 8 sequences
TINY = (1_024, 32, 64)

ERROR_BOUND = 2**-10
"""Bound of the relative error in the norm for a step's matmul; rounding the result to bfloat16 has
twice this error. Sums of 128 terms in 14 bits, then in float32, have about a tenth of it; sums in
14 bits only have 30 times as much."""


class Way(NamedTuple):
    """A way to multiply the operands."""

    name: str
    precision: jax.lax.Precision
    options: dict[str, Any]


def ways(platform: str) -> list[Way]:
    """All ways, a step's first."""
    cublas = {flag.name: flag.value for flag in FLOAT8 if platform == "gpu"}
    precise = FLOAT8_PRECISION[WEIGHT_GRADIENT]
    return [
        Way("as in a step", precise, cublas),
        Way("fast accumulation", FLOAT8_PRECISION[FORWARD], cublas),
        Way("XLA's choice of kernel", precise, {}),
    ]


def transposed_matmul(x: jax.Array, dy: jax.Array, *, precision: jax.lax.Precision) -> jax.Array:
    """x^T dy, in float32."""
    dims = (([0], [0]), ((), ()))
    return jax.lax.dot_general(
        x, dy, dims, precision=precision, preferred_element_type=jnp.dtype("float32")
    )


def compare(way: Way, operands: tuple[jax.Array, jax.Array], exact: jax.Array) -> dict[str, Any]:
    """A record: the error, the shortest time of five, and whether cuBLAS multiplied."""
    multiply = jax.jit(transposed_matmul, static_argnames="precision").lower(
        *operands, precision=way.precision
    )
    compiled = multiply.compile(compiler_options=way.options)
    got, times = compiled(*operands), []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*operands))
        times.append(time.perf_counter() - begin)
    return {
        "benchmark": "float8",
        "way": way.name,
        "tokens": len(operands[0]),
        "difference": float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact)),
        "seconds": min(times),
        "cublas": "__cublas$lt$matmul$f8" in (compiled.as_text() or ""),
    }


def main(argv: Sequence[str]) -> int:
    """Returns 1 if a step's matmul has an error above its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny, for any machine")
    parser.add_argument("--json", metavar="FILE", help="append a line for each way")
    options = parser.parse_args(argv)
    tokens, features, hidden = TINY if options.rehearse else SIZES
    keys = jax.random.split(jax.random.key(0))
    # Positive operands: sums grow with every term, where few bits lose most.
    x, dy = (
        scaled_float8(jax.random.uniform(key, (tokens, size)), dtype)[0]
        for key, size, dtype in zip(keys, (features, hidden), OPERANDS["float8", WEIGHT_GRADIENT])
    )
    wide = x.astype(jnp.float32), dy.astype(jnp.float32)
    exact = transposed_matmul(*wide, precision=jax.lax.Precision.HIGHEST)
    failed = False
    for number, way in enumerate(ways(jax.default_backend())):
        record = compare(way, (x, dy), exact)
        if number == 0 and not record["difference"] <= ERROR_BOUND:
            failed, record["error"] = True, f"differs by more than {ERROR_BOUND}"
        print(
            f"{way.name:22} differs by {record['difference']:.1e}, "
            f"{1e3 * record['seconds']:.2f} ms, {'cuBLAS' if record['cublas'] else 'XLA'}"
            + (f", {record['error']}" if "error" in record else ""),
            flush=True,
        )
        if options.json:
            with open(options.json, "a") as lines:
                lines.write(json.dumps(record) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
