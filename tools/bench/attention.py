"""Benchmark of attention kernels: error against the float32 reference, time and memory.

One JSON line for each kernel and shape; an error above the bound fails.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from jaxscale.ops.attention.attention import attention, choose  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape of an attention call; `documents` share a row, 0 is two documents and padding."""

    batch: int
    time: int
    heads: int
    kv_heads: int
    head_dim: int
    documents: int = 1
    sliding_window: int = 0
    dtype: str = "bfloat16"

    @property
    def forward_flops(self) -> float:
        """FLOPs of a causal pass over whole rows, independent of documents, for comparisons."""
        window = min(self.sliding_window or self.time, self.time)
        pairs = window * (window + 1) / 2 + (self.time - window) * window
        return 4 * self.batch * self.heads * self.head_dim * pairs


SHAPES = (
    Shape(2, 8192, 32, 8, 128),  # llama3_8b
    Shape(2, 8192, 32, 8, 128, documents=8),
    Shape(8, 4096, 32, 8, 64),  # llama32_1b
    Shape(8, 4096, 32, 8, 64, documents=8),
    Shape(8, 4096, 32, 8, 64, documents=0),
    Shape(8, 4096, 32, 8, 64, sliding_window=1024),
    Shape(4, 4096, 32, 32, 128, documents=4),  # llama2_7b
    Shape(1, 16384, 32, 8, 128, documents=4),  # a long context
)
REHEARSAL = (
    Shape(2, 256, 4, 2, 16),
    Shape(2, 256, 4, 2, 16, documents=3),
    Shape(2, 256, 4, 4, 16, documents=0, sliding_window=50),
)

REFERENCE_TIME = 4096
"""Longest row for the reference, which stores all scores; longer rows use the blockwise form."""

ERROR_BOUND = 0.02
"""Largest difference from the exact result, relative to its largest value; bfloat16 rounds by
0.004, and the reference computed in bfloat16 has errors of 0.003 to 0.007."""

WITHOUT_SEGMENTS = ", one document"
"""Suffix of an implementation with `one_document`, as set by
`data.objective = "causal_across_documents"`."""

Arguments = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
Kernel = Callable[..., jax.Array]


@functools.lru_cache(maxsize=1)  # every kernel of a shape has the same
def arguments(shape: Shape) -> Arguments:
    """Random q, k, v, and segments whose documents end at random places."""
    random = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(
            random.standard_normal((shape.batch, shape.time, n, shape.head_dim), np.float32),
            shape.dtype,
        )
        for n in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    segments = np.ones((shape.batch, shape.time), np.int32)
    for row in segments:
        for end in random.integers(1, shape.time, max(shape.documents, 2) - 1):
            row[end:] += shape.documents != 1
    if not shape.documents:
        segments[segments == 2] = 0
    return q, k, v, jnp.asarray(segments)


def forward_and_backward(kernel: Kernel, q, k, v, segments, cotangent):
    """The output and the gradients of q, k and v."""
    out, pullback = jax.vjp(lambda q, k, v: kernel(q, k, v, segments), q, k, v)
    return out, *pullback(cotangent.astype(out.dtype))


def cotangent(q: jax.Array) -> jax.Array:
    """A cotangent that differs everywhere, computed in advance so that it is not timed."""
    return jnp.sin(jnp.arange(q.size)).reshape(q.shape).astype(q.dtype)


def one_row(shape: Shape) -> Arguments:
    """The first row of the arguments."""
    q, k, v, segments = (value[:1] for value in arguments(shape))
    return q, k, v, segments


@functools.lru_cache(maxsize=1)
def exact(shape: Shape) -> tuple[jax.Array, ...]:
    """`forward_and_backward` of one row in float32."""
    name = "reference" if shape.time <= REFERENCE_TIME else "blockwise"
    kernel = functools.partial(attention, implementation=name, sliding_window=shape.sliding_window)
    *row, segments = one_row(shape)
    with jax.default_matmul_precision("highest"):
        wide = (value.astype(jnp.float32) for value in row)
        return jax.jit(functools.partial(forward_and_backward, kernel))(
            *wide, segments, cotangent(row[0])
        )


def errors(kernel: Kernel, shape: Shape) -> dict[str, float]:
    """Largest differences from the exact result, over one row, relative to its largest value."""
    row = one_row(shape)
    got = jax.jit(functools.partial(forward_and_backward, kernel))(*row, cotangent(row[0]))
    return {
        name: float(jnp.max(jnp.abs(one.astype(jnp.float32) - other)) / jnp.max(jnp.abs(other)))
        for name, one, other in zip(("out", "dq", "dk", "dv"), got, exact(shape))
    }


def seconds(function: Callable, args: tuple[jax.Array, ...], budget: float) -> tuple[float, int]:
    """The shortest time of a call, and its temporary bytes."""
    compiled = jax.jit(function).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    times, end = [], time.monotonic() + budget
    while len(times) < 3 or time.monotonic() < end:
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - begin)
    memory = compiled.memory_analysis()
    assert memory
    return min(times), memory.temp_size_in_bytes


def compare(implementation: str, shape: Shape, *, budget: float = 0.5) -> dict[str, Any]:
    """A record: errors, seconds and temporary bytes of one implementation.

    Args:
      implementation: of `jaxscale.ops.attention`, optionally with `WITHOUT_SEGMENTS`.
      budget: seconds for each of the two timings.
    """
    record: dict[str, Any] = {"benchmark": "attention", "implementation": implementation}
    record |= dataclasses.asdict(shape)
    kernel = functools.partial(
        attention,
        implementation=implementation.removesuffix(WITHOUT_SEGMENTS),
        one_document=implementation.endswith(WITHOUT_SEGMENTS),
        sliding_window=shape.sliding_window,
    )
    args = arguments(shape)
    try:
        record["errors"] = errors(kernel, shape)
        forward, _ = seconds(kernel, args, budget)
        both, temp_bytes = seconds(
            functools.partial(forward_and_backward, kernel), (*args, cotangent(args[0])), budget
        )
    except (RuntimeError, ValueError, NotImplementedError) as failure:
        return record | {"error": f"{type(failure).__name__}: {str(failure)[:500]}"}
    if max(record["errors"].values()) > ERROR_BOUND:
        record["error"] = f"differs by more than {ERROR_BOUND}"
    return record | {
        "forward_seconds": forward,
        "forward_backward_seconds": both,
        "temp_bytes": temp_bytes,
        "forward_flops_per_second": shape.forward_flops / forward,
        "forward_backward_flops_per_second": 3.5 * shape.forward_flops / both,
    }


def implementations(shape: Shape, *, all_of_them: bool) -> list[str]:
    """The platform's default kernel, and those to compare with it."""
    platform = jax.default_backend()
    chosen = functools.partial(
        choose,
        "auto",
        platform,
        dtype=shape.dtype,
        head_dim=shape.head_dim,
        seq_len=shape.time,
    )
    names = [chosen(), *(("cudnn", "flash") if platform == "gpu" else ())]
    if shape.documents == 1 and (best := chosen(one_document=True)) in ("cudnn", "splash"):
        names.append(best + WITHOUT_SEGMENTS)
    if all_of_them:
        names += ["blockwise", "reference"]
    return list(dict.fromkeys(names))


def show(record: dict[str, Any]) -> str:
    """A record as a printed line."""
    sizes = "x".join(str(record[key]) for key in ("batch", "time", "heads", "kv_heads", "head_dim"))
    case = f"{record['implementation']:20} {sizes:18} documents {record['documents']} window " + (
        f"{record['sliding_window']:5}"
    )
    if "forward_seconds" not in record:
        return f"{case} failed: {record['error']}"
    rate = record["forward_backward_flops_per_second"] / 1e12
    return (
        f"{case}  forward {1e3 * record['forward_seconds']:8.2f} ms, with backward "
        f"{1e3 * record['forward_backward_seconds']:8.2f} ms ({rate:6.1f} TFLOP/s), "
        f"{record['temp_bytes'] / 2**20:8.1f} MiB, error {max(record['errors'].values()):.1e}"
        + (f"  {record['error']}" if "error" in record else "")
    )


def main(argv: Sequence[str]) -> int:
    """Returns 1 if a kernel failed or its error was above the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, for any machine")
    parser.add_argument("--all", action="store_true", help="blockwise and the reference, too")
    parser.add_argument("--json", metavar="FILE", help="append a line for each kernel and shape")
    options = parser.parse_args(argv)

    def write(record: dict[str, Any]) -> None:
        print(show(record), flush=True)
        if options.json:
            with open(options.json, "a") as lines:
                lines.write(json.dumps(record) + "\n")

    shapes, budget = (REHEARSAL, 0.1) if options.rehearse else (SHAPES, 0.2)
    failed = False
    for shape in shapes:
        # `gpu.sh` gives the command a minute; the other kernels are 10 to 60 times slower.
        for name in implementations(shape, all_of_them=options.rehearse or options.all):
            record = compare(name, shape, budget=budget)
            write(record)
            failed |= "error" in record and name != "reference"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
