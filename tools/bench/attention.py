"""Benchmark of attention kernels: error against the float32 reference, time and memory.

One JSON line for each kernel and shape; an error above the bound fails. With --context the ranks of
context compute on one device, all of them together, compared with one call for the whole sequence.
"""

import argparse
import dataclasses
import functools
import json
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

from jaxscale.ops.attention.attention import attention, choose, score_settings  # noqa: E402
from jaxscale.ops.attention.context import context_attention  # noqa: E402
from jaxscale.ops.attention.context_chunks import balanced_order  # noqa: E402
from jaxscale.ops.attention.flash import flash_attention  # noqa: E402


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

RANKS = 4
CONTEXT_SHAPES = (Shape(1, 32768, 32, 8, 128), Shape(1, 32768, 32, 8, 128, documents=4))
CONTEXT_REHEARSAL = (Shape(1, 256, 4, 2, 16, documents=3),)

REFERENCE_TIME = 4096
"""Longest row for the reference, which stores all scores; longer rows use the blockwise form."""

ERROR_BOUND = 0.02
"""Largest difference from the exact result, relative to its largest value; bfloat16 rounds by
0.004, and the reference computed in bfloat16 has errors of 0.003 to 0.007."""

WITHOUT_SEGMENTS = ", one document"
"""Suffix of an implementation with `one_document`, as set by
`data.objective = "causal_across_documents"`."""

OF_RANKS = ", ranks of context"
"""Suffix of an implementation that computes the pairs of chunks of `RANKS` ranks."""

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


def errors(both: Callable, shape: Shape) -> dict[str, float]:
    """Largest differences from the exact result, over one row, relative to its largest value."""
    row = one_row(shape)
    got = jax.jit(both)(*row, cotangent(row[0]))
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


def over_ranks(function: Callable) -> Callable:
    """A function of the arrays of a rank of context as a function of whole sequences: the ranks are
    a dimension of the arrays, and their exchanges are copies."""

    def run(*arrays):
        order = balanced_order(arrays[0].shape[1], RANKS)
        parts = (jnp.stack(jnp.split(x[:, order], RANKS, axis=1)) for x in arrays)
        results = jax.vmap(function, axis_name="context")(*parts)
        back = np.argsort(order)
        return jax.tree.map(lambda x: jnp.concatenate(list(x), axis=1)[:, back], results)

    return run


class Passes(NamedTuple):
    """Functions of q, k, v and segments; the second one of a cotangent, too."""

    forward: Callable
    both: Callable


def passes_of(implementation: str, shape: Shape) -> Passes:
    """The passes of an implementation of `jaxscale.ops.attention`, by its name and suffix."""
    name = implementation.removesuffix(OF_RANKS)
    if name != implementation:
        kernel = {"flash": flash_attention, "blockwise": context_attention}[name]
        how = {"axis": "context", "method": "gather"}

        def local(q, k, v, segments):
            return kernel(q, k, v, segments, scoring=score_settings(q, k), **how)

        both = functools.partial(forward_and_backward, local)
        return Passes(over_ranks(local), over_ranks(both))
    kernel = functools.partial(
        attention,
        implementation=implementation.removesuffix(WITHOUT_SEGMENTS),
        one_document=implementation.endswith(WITHOUT_SEGMENTS),
        sliding_window=shape.sliding_window,
    )
    return Passes(kernel, functools.partial(forward_and_backward, kernel))


def compare(implementation: str, shape: Shape, *, budget: float = 0.5) -> dict[str, Any]:
    """A record: errors, seconds and temporary bytes of one implementation.

    Args:
      implementation: as in `passes_of`.
      budget: seconds for each of the two timings.
    """
    record: dict[str, Any] = {"benchmark": "attention", "implementation": implementation}
    record |= dataclasses.asdict(shape)
    passes, args = passes_of(implementation, shape), arguments(shape)
    try:
        record["errors"] = errors(passes.both, shape)
        forward, _ = seconds(passes.forward, args, budget)
        both, temp_bytes = seconds(passes.both, (*args, cotangent(args[0])), budget)
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
    case = f"{record['implementation']:24} {sizes:18} documents {record['documents']} window " + (
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
    parser.add_argument(
        "--context", action="store_true", help=f"kernels of {RANKS} ranks of context, on one device"
    )
    parser.add_argument("--json", metavar="FILE", help="append a line for each kernel and shape")
    options = parser.parse_args(argv)

    def write(record: dict[str, Any]) -> None:
        print(show(record), flush=True)
        if options.json:
            with open(options.json, "a") as lines:
                lines.write(json.dumps(record) + "\n")

    tables = {False: (SHAPES, REHEARSAL), True: (CONTEXT_SHAPES, CONTEXT_REHEARSAL)}
    shapes, budget = tables[options.context][options.rehearse], 0.1 if options.rehearse else 0.2
    failed = False
    for shape in shapes:
        # `gpu.sh` gives the command a minute; the other kernels are 10 to 60 times slower.
        names = implementations(shape, all_of_them=options.rehearse or options.all)
        if options.context:
            one_call = "flash" if jax.default_backend() == "gpu" else "blockwise"
            names = [one_call, one_call + OF_RANKS]
        for name in names:
            record = compare(name, shape, budget=budget)
            write(record)
            failed |= "error" in record and name != "reference"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
