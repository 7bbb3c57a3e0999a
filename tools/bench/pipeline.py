"""python tools/bench/pipeline.py [--microbatches 2,4,8,16] [--rounds 5] [--json FILE]

Times the loss and gradients of a pipeline of two ranks, each a CPU device of one thread, against
what its table predicts, and against the way in which pipelines are usually written in JAX: the
stages under `jax.vmap`, a shift of their inputs, and a scan that autodiff turns round (GPipe).

The prediction takes the table, and how long a chunk's forward pass, its two backward halves, the
head and the embedding take on both devices at once, each timed for itself. Cases are stepped in
turn, so that a busy machine slows all alike; a time is the least of the rounds, the ratio to the
usual way the median of the rounds' ratios.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

RANKS = 2
SCHEDULES = ("1f1b", "1f1b:fused", "gpipe", "zb_h1")
USUAL = "vmap, shift, autodiff"


class Case(NamedTuple):
    """A compiled function of parameters and batch, and how long its runs took."""

    name: str
    microbatches: int
    run: Callable[[], Any]
    predicted: float | None  # seconds
    temp_bytes: int
    seconds: list[float]


def main(argv: Sequence[str]) -> int:
    """Prints a table, and appends a line for each case to `--json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", default="2,4,8,16")
    parser.add_argument("--num_layers", type=int, default=8)
    parser.add_argument("--d_model", type=int, default=512)
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="append a line for each case")
    options = parser.parse_args(argv)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(RANKS)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    )

    cases = []
    for m in map(int, options.microbatches.split(",")):
        cases += [ours(options, schedule, m) for schedule in SCHEDULES]
        cases.append(usual(options, m))
    for _ in range(options.rounds):
        for case in cases:
            case.seconds.append(seconds(case.run))
    report(cases, options)
    return 0


def seconds(run: Callable[[], Any]) -> float:
    """Of one call."""
    import jax  # noqa: PLC0415

    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def make_config(options: argparse.Namespace, schedule: str, microbatches: int) -> Any:
    """A Llama-style model of two ranks' size, with a small vocabulary."""
    from jaxscale.config import from_dict  # noqa: PLC0415

    width = options.d_model
    return from_dict({
        "model": {"num_layers": options.num_layers, "d_model": width, "num_heads": width // 64,
                  "num_kv_heads": width // 64, "head_dim": 64, "d_ff": 4 * width,
                  "vocab_size": 256, "compute_dtype": "float32"},
        "data": {"global_batch_size": options.sequences * microbatches,
                 "seq_len": options.seq_len},
        "layout": {"data": 1, "pipeline": RANKS, "microbatches": microbatches,
                   "schedule": schedule},
    })  # fmt: skip


def ours(options: argparse.Namespace, schedule: str, microbatches: int) -> Case:
    """A schedule by the executor."""
    import jax  # noqa: PLC0415
    from measure import synthetic_batch  # noqa: PLC0415

    from jaxscale.gradients import make_gradients  # noqa: PLC0415
    from jaxscale.mesh import make_mesh  # noqa: PLC0415
    from jaxscale.pipeline.simulate import Costs, simulate  # noqa: PLC0415
    from jaxscale.step import make_engine  # noqa: PLC0415

    config = make_config(options, schedule, microbatches)
    engine = make_engine(config, make_mesh(config.layout))
    assert engine.stages is not None
    gradients = make_gradients(engine.model, engine.layout, engine.zero, engine.mesh, engine.stages)
    params = engine.init(jax.random.key(0)).params
    batch = jax.device_put(synthetic_batch(config), engine.batch_sharding)
    program = jax.jit(gradients).lower(params, batch).compile()
    unit = unit_seconds(options, engine, params, batch)
    layers = engine.stages.layers
    costs = Costs(
        f=(unit["f"] * layers[0] + unit["embed"], unit["f"] * layers[1]),
        b=(unit["b"] * layers[0] + unit["embed_b"], unit["b"] * layers[1] + unit["head"]),
        w=tuple(unit["w"] * n for n in layers),
    )
    predicted = simulate(engine.stages.table, costs).lockstep_makespan
    temp = program.memory_analysis().temp_size_in_bytes  # pyright: ignore
    print(f"  compiled {schedule}, {microbatches} micro-batches", flush=True)
    jax.block_until_ready(program(params, batch))  # warms up
    return Case(schedule, microbatches, lambda: program(params, batch), predicted, temp, [])


UNITS: dict[int, dict[str, float]] = {}
"""Seconds of a layer's operations and of what is outside the layers, by sequences."""


def unit_seconds(options: argparse.Namespace, engine: Any, params: Any, batch: Any) -> dict:
    """Each operation on both devices at once, many times in a loop, least of three."""
    if options.sequences in UNITS:
        return UNITS[options.sequences]
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    from jax.sharding import PartitionSpec  # noqa: PLC0415

    from jaxscale.batch import Batch  # noqa: PLC0415
    from jaxscale.layout import MANUAL_AXES  # noqa: PLC0415
    from jaxscale.pipeline.split import split  # noqa: PLC0415

    model, times = engine.model, 20
    part = Batch(*(field[: options.sequences] for field in batch))
    layer = jax.tree.map(lambda x: x[0], params["layers"])
    embed, head = params["embed"], model.head_params(params)

    def operations(layer, embed, head, part):
        """Name -> a function and its arguments."""
        x = jnp.ones((options.sequences, options.seq_len, options.d_model), jnp.float32)
        parts = split(model.block, layer, x, part)
        kept_b, kept_w, saved = (
            [jnp.ones(s.shape, s.dtype) for s in some]
            for some in (parts.kept_b, parts.kept_w, parts.saved)
        )
        return {
            "nothing": (lambda layer: layer, layer),
            "f": (lambda layer, x: parts.forward(layer, x, part), layer, x),
            "b": (lambda layer, *rest: parts.input_gradient(layer, part, *rest),
                  layer, kept_b, kept_w, x),
            "w": (lambda *args: parts.weight_gradient(part, *args), kept_w, saved),
            "head": (jax.value_and_grad(lambda h, x: model.loss(h, x, part)[0], (0, 1)), head, x),
            "embed": (lambda embed: model.embed(embed, part), embed),
            "embed_b": (lambda embed, x: jax.vjp(lambda e: model.embed(e, part), embed)[1](x),
                        embed, x),
        }  # fmt: skip

    def looped(name):
        def local(*args):
            function, *args = operations(*args)[name]

            def nudged(x, i):
                # Something of the loop's own, so that nothing can be taken out of it.
                return x + (i * 1e-9).astype(x.dtype) if x.dtype == jnp.float32 else x

            def one(i, total):
                outs = function(*jax.tree.map(lambda x: nudged(x, i), args))
                return total + sum(jnp.sum(x[..., :1]) for x in jax.tree.leaves(outs) if x.ndim)

            return jax.lax.fori_loop(0, times, one, jnp.zeros(()))[None]

        run = jax.jit(jax.shard_map(
            local, mesh=engine.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("pipeline"),
            axis_names=set(MANUAL_AXES), check_vma=False,
        ))  # fmt: skip
        args = (layer, embed, head, part)
        jax.block_until_ready(run(*args))
        return min(seconds(lambda: run(*args)) for _ in range(3)) / times

    names = ("nothing", "f", "b", "w", "head", "embed", "embed_b")
    UNITS[options.sequences] = unit = {name: looped(name) for name in names}
    # Making the arguments differ takes time too, of which that for a layer's weights is the most.
    unit["f"] -= unit["nothing"]
    unit["b"] -= unit["nothing"]
    print(", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in unit.items()), flush=True)
    return unit


def usual(options: argparse.Namespace, microbatches: int) -> Case:
    """GPipe as a scan over shifts: all stages compute at once, each on its own micro-batch, and
    what comes out of one goes into the next; autodiff makes the backward pass, and keeps what it
    needs of every tick."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    from jax.sharding import NamedSharding, PartitionSpec  # noqa: PLC0415
    from measure import synthetic_batch  # noqa: PLC0415

    from jaxscale.mesh import make_mesh  # noqa: PLC0415
    from jaxscale.models.decoder import Decoder, Kernels  # noqa: PLC0415
    from jaxscale.ops.attention import attention  # noqa: PLC0415

    config = make_config(options, "gpipe", microbatches)
    mesh = make_mesh(config.layout)
    attend = functools.partial(attention, implementation="blockwise")  # what ours takes here
    model = Decoder(config.model, Kernels(attend))
    split_over = NamedSharding(mesh, PartitionSpec("pipeline"))

    def loss(params, batches):
        stacks = jax.tree.map(lambda x: x.reshape(RANKS, -1, *x.shape[1:]), params["layers"])
        embedded = jax.vmap(lambda batch: model.embed(params["embed"], batch))(batches)

        def stage(layers, x, batch):
            return jax.lax.scan(lambda x, layer: (model.block(layer, x, batch), None), x, layers)[0]

        def tick(xs, t):
            came = jax.lax.dynamic_index_in_dim(embedded, jnp.minimum(t, microbatches - 1))
            xs = jnp.concatenate([came, xs[:-1]])  # the shift
            xs = jax.lax.with_sharding_constraint(xs, split_over)
            number = jnp.clip(t - jnp.arange(RANKS), 0, microbatches - 1)
            xs = jax.vmap(stage)(stacks, xs, jax.tree.map(lambda x: x[number], batches))
            xs = jax.lax.with_sharding_constraint(xs, split_over)
            return xs, xs[-1]

        zeros = jnp.zeros((RANKS, *embedded.shape[1:]), embedded.dtype)
        _, outs = jax.lax.scan(tick, zeros, jnp.arange(microbatches + RANKS - 1))
        head = model.head_params(params)
        return jax.lax.map(
            lambda args: model.loss(head, *args)[0], (outs[RANKS - 1 :], batches)
        ).sum()  # fmt: skip

    params = model.init(jax.random.key(0))
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = {name: jax.tree.map(lambda _: whole, part) for name, part in params.items()}
    shardings["layers"] = jax.tree.map(lambda _: split_over, params["layers"])
    params = jax.device_put(params, shardings)
    batches = jax.tree.map(
        lambda x: jnp.asarray(x).reshape(microbatches, -1, *x.shape[1:]), synthetic_batch(config)
    )
    batches = jax.device_put(batches, NamedSharding(mesh, PartitionSpec()))
    program = jax.jit(jax.value_and_grad(loss)).lower(params, batches).compile()
    temp = program.memory_analysis().temp_size_in_bytes  # pyright: ignore
    print(f"  compiled {USUAL}, {microbatches} micro-batches", flush=True)
    jax.block_until_ready(program(params, batches))
    return Case(USUAL, microbatches, lambda: program(params, batches), None, temp, [])


def report(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Times, predictions and ratios."""
    base = {case.microbatches: case for case in cases if case.name == USUAL}
    print(f"\n{'schedule':24}{'micro':>6}{'ms':>9}{'predicted':>11}{'ratio':>7}{'faster':>8}"
          f"{'temp MB':>9}")  # fmt: skip
    lines = []
    for case in cases:
        least = min(case.seconds)
        pairs = zip(base[case.microbatches].seconds, case.seconds, strict=True)
        faster = statistics.median(a / b for a, b in pairs)
        predicted = " " * 18
        if case.predicted is not None:
            predicted = f"{1e3 * case.predicted:11.0f}{least / case.predicted:7.2f}"
        print(f"{case.name:24}{case.microbatches:6}{1e3 * least:9.0f}{predicted}{faster:8.2f}"
              f"{case.temp_bytes / 1e6:9.1f}")  # fmt: skip
        lines.append({
            "schedule": case.name, "microbatches": case.microbatches, "seconds": case.seconds,
            "predicted_seconds": case.predicted, "times_faster": faster,
            "temp_bytes": case.temp_bytes, "options": vars(options),
        })  # fmt: skip
    if options.json:
        with open(options.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
