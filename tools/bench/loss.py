"""Benchmark of chunked cross entropy: error against whole logits, time and memory by chunk size.

Loss and gradients together, as in a step; one JSON line for each size. First the reduction of one
chunk's logits alone, by XLA and by our kernel with several block sizes; without a GPU the kernel is
interpreted, and only its error is meaningful. With --compile h200:1x1, for absent hardware: memory
traffic and memory.
"""

import argparse
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
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from jaxscale import command_line  # noqa: E402
from jaxscale.compiled import hlo, topology  # noqa: E402
from jaxscale.compiled.flops import computation_costs, instruction_cycles  # noqa: E402
from jaxscale.ops.loss import LossForm, _reduced_at_once, cross_entropy  # noqa: E402
from jaxscale.ops.loss_kernel import LogitBlock, log_z_and_target  # noqa: E402
from tools.bench.bytes_moved import bytes_moved  # noqa: E402

SIZES = {"num_tokens": 16_384, "features": 2_048, "vocab": 128_256}  # llama32_1b, 4 sequences
HEADS = {"llama32_1b": (2_048, 128_256), "llama3_8b": (4_096, 128_256)}
"""Features and vocabulary, to compile for."""
TINY = {"num_tokens": 1_024, "features": 64, "vocab": 512}
CHUNKS = (None, 1_024, 2_048, 4_096, 8_192)
"""Tokens of a chunk; None is the default of training."""

ERROR_BOUND = 0.01
"""Relative, in the norm of a gradient; bfloat16 rounds by 0.004."""

REDUCED = {"rows": 2_048, "columns": 128_256}  # a chunk of llama32_1b
TINY_REDUCED = {"rows": 8, "columns": 20_000}
BLOCKS = (LogitBlock(2_048, 8), LogitBlock(4_096, 8), LogitBlock(8_192, 8))
CHECKED_ROWS = 64
"""Rows also computed in float64."""
REDUCTION_BOUND = 1e-5
"""Bound of the error of log Z, which is about 13; float32 rounds that by 5e-7."""


def whole(x_ND: jax.Array, head_DV: jax.Array, targets_N: jax.Array) -> jax.Array:
    """The loss from all logits at once."""
    logits_NV = jnp.dot(x_ND, head_DV, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_NV, targets_N).sum()


def chunked(chunk_tokens: int | None, platform: str) -> Callable:
    """The loss of a train step on such devices."""

    def loss(x_ND: jax.Array, head_DV: jax.Array, targets_N: jax.Array) -> jax.Array:
        return cross_entropy(
            x_ND[None],
            head_DV,
            targets_N[None],
            jnp.ones((1, targets_N.size)),
            vocab_size=head_DV.shape[1],
            form=LossForm(chunk_tokens, platform),
        )[0]

    return loss


def measure(loss: Callable, args: tuple, expected: Any) -> tuple[dict[str, Any], Any]:
    """A record, and its loss and gradients."""
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile()
    got = jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - begin)
    (num_tokens, features), vocab = args[0].shape, args[1].shape[1]
    memory = compiled.memory_analysis()
    assert memory
    record = {
        "seconds": min(times),
        "flops_per_second": 6 * num_tokens * features * vocab / min(times),
        "temp_bytes": memory.temp_size_in_bytes,
    }
    if expected is not None:
        differences = jax.tree.map(lambda a, b: (a - b).astype(jnp.float32), got, expected)
        pairs = zip(jax.tree.leaves(differences), jax.tree.leaves(expected))
        record["error"] = max(
            float(jnp.linalg.norm(difference) / jnp.linalg.norm(value.astype(jnp.float32)))
            for difference, value in pairs
        )
    return record, got


def reductions(rows: int, columns: int, *, rehearse: bool) -> list[dict[str, Any]]:
    """A record for each implementation of log Z and the target's logit of every row."""
    keys = jax.random.split(jax.random.key(1))
    logits = 2 * jax.random.normal(keys[0], (rows, columns), jnp.float32)
    targets = jax.random.randint(keys[1], (rows,), 0, columns, jnp.int32)
    exact = np.asarray(logits[:CHECKED_ROWS], np.float64)
    expected = np.log(np.exp(exact).sum(1)), exact[np.arange(len(exact)), targets[:CHECKED_ROWS]]

    def by_xla(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _reduced_at_once(logits, jnp.arange(columns) == targets[:, None], None)

    ways: dict[str, Callable] = {"xla": by_xla}
    interpret = jax.default_backend() != "gpu"
    for block in BLOCKS:
        ways[f"kernel, {block.columns} columns, {block.warps} warps"] = functools.partial(
            log_z_and_target, end=columns, block=block, interpret=interpret
        )
    repeats, records = 2 if rehearse else 50, []
    for name, way in ways.items():
        got = jax.jit(way)(logits, targets)
        error = max(
            float(np.max(np.abs(np.asarray(one[:CHECKED_ROWS], np.float64) - value)))
            for one, value in zip(got, expected)
        )
        seconds = repeated_seconds(way, logits, targets, repeats)
        records.append(
            {
                "benchmark": "loss reduction",
                "way": name,
                "rows": rows,
                "columns": columns,
                "error": error,
                "seconds": seconds,
                "bytes_per_second": logits.nbytes / seconds,
            }
        )
    return records


def repeated_seconds(way: Callable, logits: jax.Array, targets: jax.Array, repeats: int) -> float:
    """Seconds of one call, from a loop of several in one program, to exclude launch time."""

    @jax.jit
    def program(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        def again(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            # Different targets in each trip, so that XLA does not hoist the call out of the loop.
            log_z, target = way(logits, (targets + i) % logits.shape[1])
            return sums[0] + log_z, sums[1] + target

        zeros = jnp.zeros(logits.shape[0], logits.dtype)
        return jax.lax.fori_loop(0, repeats, again, (zeros, zeros))

    times = []
    for _ in range(4):
        begin = time.perf_counter()
        jax.block_until_ready(program(logits, targets))
        times.append(time.perf_counter() - begin)
    return min(times[1:]) / repeats


def compile_sizes(name: str) -> list[dict[str, Any]]:
    """A record for each head and chunk size, from the program for one device of a topology."""
    topology.leave_hardware_alone()
    machine = topology.open_topology(name)
    mesh = Mesh(np.array(machine.devices[:1]), "x")
    here, num_tokens = NamedSharding(mesh, PartitionSpec()), SIZES["num_tokens"]
    records = []
    for model, (features, vocab) in HEADS.items():
        args = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=here)
            for shape, dtype in (
                ((num_tokens, features), jnp.bfloat16),
                ((features, vocab), jnp.float32),
                ((num_tokens,), jnp.int32),
            )
        ]
        for chunk in CHUNKS[1:]:
            step = jax.jit(jax.value_and_grad(chunked(chunk, machine.platform), (0, 1)))
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # for kernels: of which device
                compiled = step.lower(*args).compile()
            memory, text = compiled.memory_analysis(), compiled.as_text()
            assert memory
            assert text
            program = hlo.parse_hlo(text)
            moved, seconds = bytes_moved(program), None
            if machine.clock_hertz:
                cycles = computation_costs(program, instruction_cycles)[program.entry]
                seconds = cycles / machine.clock_hertz
            records.append(
                {
                    "model": model,
                    "chunk_tokens": chunk,
                    "bytes_moved": moved,
                    "temp_bytes": memory.temp_size_in_bytes,
                    "estimated_seconds": seconds,
                }
            )
            estimate = f", {1e3 * seconds:.1f} ms by the compiler's estimate" if seconds else ""
            print(
                f"{model:10} {chunk:6} tokens a chunk: {moved / 1e9:6.1f} GB moved, "
                f"{memory.temp_size_in_bytes / 1e9:5.2f} GB of temporaries{estimate}",
                flush=True,
            )
    return records


def main(argv: Sequence[str]) -> int:
    """Returns 1 if an error is above its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny, for any machine")
    parser.add_argument("--compile", metavar="TOPOLOGY", help="compile and count bytes only")
    parser.add_argument("--json", metavar="FILE", help="append a line for each size")
    options = parser.parse_args(argv)
    if options.compile:
        with command_line.refusals():
            topology.platform_of(options.compile)
        write(
            options.json, [{"benchmark": "loss", **one} for one in compile_sizes(options.compile)]
        )
        return 0
    failed = False
    reduced = TINY_REDUCED if options.rehearse else REDUCED
    for record in reductions(**reduced, rehearse=options.rehearse):
        failed |= not record["error"] < REDUCTION_BOUND
        print(
            f"{record['way']:29} {1e6 * record['seconds']:9.1f} us, "
            f"{record['bytes_per_second'] / 1e12:6.3f} TB/s, error {record['error']:.1e}",
            flush=True,
        )
        write(options.json, [record])
    sizes = TINY if options.rehearse else SIZES
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (sizes["features"], sizes["vocab"])
    args = (
        jax.random.normal(keys[0], (sizes["num_tokens"], shape[0]), jnp.bfloat16),
        jax.random.normal(keys[1], shape, jnp.bfloat16) * shape[0] ** -0.5,
        jax.random.randint(keys[2], (sizes["num_tokens"],), 0, shape[1]),
    )
    expected = None
    here = jax.default_backend()
    for name, loss in [("whole", whole), *((str(one), chunked(one, here)) for one in CHUNKS)]:
        record, got = measure(loss, args, expected)
        expected = expected or got
        difference = record.pop("error", 0.0)
        failed |= difference > ERROR_BOUND
        record = {"benchmark": "loss", "chunk_tokens": name, "difference": difference, **record}
        print(
            f"{name:6} {1e3 * record['seconds']:9.2f} ms {record['temp_bytes'] / 2**20:9.1f} MiB "
            f"{record['flops_per_second'] / 1e12:6.1f} TFLOP/s, differs by {difference:.1e}",
            flush=True,
        )
        write(options.json, [{**record, **sizes}])
    return int(failed)


def write(path: str | None, records: Sequence[dict[str, Any]]) -> None:
    """Appends a line for each record to a file."""
    if path:
        with open(path, "a") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
