"""Tables in a step: staleness against a NumPy simulator, meshes, checkpoints, refusals."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.checkpoints.restore import restore
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.compiled.hlo import Program, parse_hlo
from jaxscale.config.optimizer import OptimizerConfig
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.protocol import EmbeddingTable
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.tables import make_tables
from tests.invariants.layouts import (
    VOCABULARY,
    batches,
    compile_step,
    make_config,
    one_devices_state,
    open_engine,
    relative_error,
)
from tests.ops.tables.test_exchange import numpy_adagrad

RATE, WIDTH, ROWS, SIZE, COUNT = 0.1, 3, 48, 8, 2.0
LENGTHS = {"first": 8, "second": 16, "third": 8}
TABLES = {
    "one": EmbeddingTable(ROWS, WIDTH, ("first", "second"), scale=1.0),
    "other": EmbeddingTable(ROWS // 2, WIDTH, ("third",)),
}
MODEL = {
    "num_layers": 2,
    "d_model": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 32,
    "vocab_size": VOCABULARY,
    "ngram_rows": 64,
}


def own_model(tables=None, extras=None) -> Any:
    shapes = {name: (length, np.int32) for name, length in (extras or LENGTHS).items()}
    return SimpleNamespace(tables=tables or TABLES, extras=lambda seq_len: shapes)


@functools.cache
def functions(axes: tuple[tuple[str, int], ...], staleness: int):
    """Jitted, on a mesh: the initial states, and lookup and update in one."""
    config = make_config(MODEL, dict(axes), table_staleness=staleness, table_learning_rate=RATE)
    data = dataclasses.replace(config.data, global_batch_size=SIZE)
    config = dataclasses.replace(config, data=data)
    mesh = make_mesh(config.layout, jax.devices()[: config.layout.num_devices])
    tables = make_tables(config, own_model(), mesh)
    shardings = tables.place(jax.eval_shape(tables.begin))

    def one(states: Any, batch: Batch, grads: Any, step: Any, good: Any) -> Any:
        found = tables.look_up(states, batch).vectors
        return found, tables.update(states, batch, grads, step, COUNT, good)

    begin = jax.jit(tables.begin, out_shardings=shardings)
    return begin, jax.jit(one, out_shardings=(None, shardings))


def random_step(step: int) -> tuple[Batch, dict[str, np.ndarray]]:
    """A batch's ids and the gradients of its rows; the ids of step 2 are all in one block, those of
    step 3 are none."""
    rng = np.random.default_rng(step)
    sizes = {name: (SIZE, length) for name, length in LENGTHS.items()}
    most = {2: 3, 3: 0}.get(step, ROWS // 2)
    ids = {name: rng.integers(-1, most, size).astype(np.int32) for name, size in sizes.items()}
    grads = {name: rng.normal(size=(*size, WIDTH)) for name, size in sizes.items()}
    return Batch((), (), (), (), (), extras=ids), grads


def apply(table: tuple, names: tuple, extras: dict, grads: dict) -> tuple:
    ids = np.concatenate([extras[name].reshape(-1) for name in names])
    summed = np.concatenate([grads[name].reshape(-1, WIDTH) for name in names])
    rows, sums = table
    return numpy_adagrad(rows, sums, ids, summed / COUNT, RATE)


def simulate(tables: dict, steps: int, staleness: int, bad: int) -> tuple[list, dict]:
    """The rows that each step finds, and the tables at the end, in NumPy; the gradients of the step
    `bad` are dropped."""
    found, queue = [], []
    for step in range(steps):
        batch, grads = random_step(step)
        rows = {ids: name for name, table in TABLES.items() for ids in table.ids}
        found.append(
            {
                ids: np.where(x[..., None] >= 0, tables[rows[ids]][0][x], 0)
                for ids, x in batch.extras.items()
            }
        )
        queue.append((batch.extras, grads) if step != bad else None)
        due = queue.pop(0) if len(queue) > staleness else None
        if due is not None:
            tables = {name: apply(tables[name], table.ids, *due) for name, table in TABLES.items()}
    return found, tables


def check_against_simulator(axes: dict[str, int], staleness: int, steps: int, bad: int) -> None:
    begin, one = functions(tuple(axes.items()), staleness)
    states = begin()
    start = {name: (np.asarray(x.rows), np.asarray(x.sums)) for name, x in states.items()}
    assert np.std(start["one"][0]) == pytest.approx(1, rel=0.2)
    wanted, last = simulate(start, steps, staleness, bad)
    for step in range(steps):
        found, states = one(states, *random_step(step), np.int32(step), np.bool_(step != bad))
        for name, rows in wanted[step].items():
            np.testing.assert_allclose(found[name], rows, rtol=1e-10, atol=1e-14)
    for name, (rows, sums) in last.items():
        np.testing.assert_allclose(states[name].rows, rows, rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(states[name].sums, sums, rtol=1e-10)


def test_staleness_is_the_queue_of_a_numpy_simulator():
    """Duplicates within a rank, over ranks and over two arrays of ids, ids of one rank alone, no
    ids, and a step whose gradients are dropped."""
    check_against_simulator({"data": 2, "context": 2, "tensor": 2}, staleness=3, steps=8, bad=1)


def test_without_staleness_a_step_applies_its_own_gradients():
    check_against_simulator({"pipeline": 2, "fsdp": 2, "data": 1}, staleness=0, steps=5, bad=4)


def meshes_of_eight() -> list[dict[str, int]]:
    axes = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    sizes = itertools.product((1, 2, 4, 8), repeat=len(axes))
    return [dict(zip(axes, one)) for one in sizes if np.prod(one) == 8]


def marked(axes: dict[str, int]) -> Any:
    """Axes that shard the batch and those that do not are treated alike among themselves."""
    plain = axes["fsdp"] == axes["pipeline"] == 1
    name = "-".join(f"{name}{n}" for name, n in axes.items() if n > 1)
    return pytest.param(axes, id=name, marks=pytest.mark.proof if plain else pytest.mark.slow)


@pytest.mark.parametrize(
    "axes", [marked(axes) for axes in meshes_of_eight() if axes["expert"] == 1]
)
def test_tables_on_every_mesh_of_eight_are_numpy_arrays(axes):
    check_against_simulator(axes, staleness=0, steps=4, bad=-1)


def tables_of(state: Any) -> Any:
    return jax.tree.map(np.asarray, state.tables)


def applied(tables: Any) -> Any:
    """Rows and sums; what waits is in the order of the context ranks' tokens."""
    return {name: tuple(table)[:2] for name, table in tables.items()}


@functools.cache
def trained(layout: tuple, staleness: int, steps: int = 5) -> tuple[np.ndarray, Any, Any]:
    """Losses, tables and parameters after some steps."""
    engine, step = compiled(layout, staleness)
    state, losses = one_devices_state(engine), []
    for batch in batches()[:steps]:
        state, metrics = step(state, engine.shard(batch))
        losses.append(float(metrics.loss))
    return np.array(losses), tables_of(state), jax.tree.map(np.asarray, state.params)


@functools.cache
def compiled(layout: tuple, staleness: int) -> Any:
    more = {"table_staleness": staleness, "table_learning_rate": RATE}
    engine = open_engine(make_config(MODEL, dict(layout), **more))
    return engine, compile_step(engine)


STALE = (("data", 2), ("fsdp", 2), ("tensor", 2))
PIPELINE = (("pipeline", 2), ("data", 2), ("context", 2), ("microbatches", 4))
LAYOUTS = {
    "stale": (STALE, 2),
    "stale pipeline": (PIPELINE, 2),
    "layered": (
        (
            *(("fsdp", 2), ("context", 2), ("tensor", 2), ("zero_stage", 1)),
            *(("microbatches", 4), ("accumulation", "layered"), ("remat", "full")),
        ),
        0,
    ),
    "sequential": ((("fsdp", 4), ("context", 2), ("microbatches", 2)), 0),
    "two directions": (
        (("pipeline", 2), ("context", 2), ("microbatches", 4), ("schedule", "chimera")),
        0,
    ),
}
SLOW = ("sequential", "two directions")


@pytest.mark.parametrize(
    ("layout", "staleness"),
    [
        pytest.param(*one, id=name, marks=pytest.mark.slow if name in SLOW else pytest.mark.proof)
        for name, one in LAYOUTS.items()
    ],
)
def test_n_grams_train_as_on_one_device_in_float64(layout, staleness):
    got, wanted = (trained(one, staleness) for one in (layout, (("data", 1),)))
    assert np.max(np.abs(got[0] / wanted[0] - 1)) < 1e-10
    assert relative_error(applied(got[1]), applied(wanted[1]), RATE) < 1e-10
    assert relative_error(got[2], wanted[2]) < 1e-10
    assert np.count_nonzero(wanted[1]["ngrams"].rows) > 0.9 * wanted[1]["ngrams"].rows.size


def read_by(program: Program, output: int) -> set[str]:
    """The entry's instructions that an output depends on."""
    body = {one.name: one for one in program.computations[program.entry]}
    waiting, found = [list(body.values())[-1].operands[output]], set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += body[name].operands
    return found


@pytest.mark.proof
def test_a_stale_tables_program_reads_no_gradients_of_its_own_step():
    """Rows and sums depend on the step's number and the tables of the state alone; no other output
    depends on the queue."""
    engine, step = compiled(STALE, 2)
    program = parse_hlo(step.as_text())
    leaves = jax.tree_util.tree_leaves_with_path(engine.abstract_state)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    body = program.computations[program.entry]
    given = {one.name: one.rest.split(")")[0] for one in body if one.opcode == "parameter"}
    states = {name: names[int(n)] for name, n in given.items() if int(n) < len(names)}

    def arguments(output: int) -> set[str]:
        reads = read_by(program, output) & given.keys()
        return {states.get(name, "batch") for name in reads}

    for output, name in enumerate(names):
        reads = arguments(output)
        if name.endswith((".rows", ".sums")):
            assert all(one.startswith((".tables", ".step")) for one in reads), (name, reads)
            assert any(".pending" in one for one in reads)
        elif ".pending" in name:
            assert "batch" in reads
        else:
            assert not any(".pending" in one for one in reads), (name, reads)


@pytest.mark.proof
def test_a_killed_run_loses_no_gradient_that_waits(tmp_path):
    """From a checkpoint after step 3 a run continues to the bit, and on another mesh in float64."""
    engine, step = compiled(STALE, 2)
    whole = trained(STALE, 2)
    state = one_devices_state(engine)
    for batch in batches()[:3]:
        state, _ = step(state, engine.shard(batch))
    assert all(np.any(x.grads) for x in state.tables["ngrams"].pending.values())
    writer = CheckpointWriter(tmp_path)
    writer.save(3, engine.placement.to_canonical(state), {}, finite=("params", "tables"))
    writer.close()
    assert not writer.outcome()
    for layout, bound in ((STALE, 0), (PIPELINE, 1e-10)):
        there, step = compiled(layout, 2)
        state = restore(writer, 3, there.placement.canonical)
        state = there.placement.from_canonical(state)
        for batch in batches()[3:]:
            state, _ = step(state, there.shard(batch))
        params = jax.tree.map(np.asarray, there.placement.to_canonical(state).params)
        assert relative_error(applied(tables_of(state)), applied(whole[1]), RATE) <= bound
        assert relative_error(params, whole[2]) <= bound


@pytest.mark.parametrize(
    ("tables", "layout", "message"),
    [
        (
            {"t": EmbeddingTable(2**31, 4, ("first",))},
            {},
            "has 2147483648 rows; from 1 to 2147483647",
        ),
        (
            {"t": EmbeddingTable(10, 4, ("first",))},
            {"fsdp": 4},
            "do not divide over the layout's 4 devices; give it 8 or 12",
        ),
        (
            {"t": EmbeddingTable(8, 4, ("lost",))},
            {},
            "not among the int32 arrays of the model's extras",
        ),
        (
            {"t": EmbeddingTable(8, 4, ("first",)), "u": EmbeddingTable(8, 4, ("first",))},
            {},
            "which another table reads",
        ),
        (
            {"t": EmbeddingTable(8, 4, ("first",))},
            {"pipeline": 2, "microbatches": 2, "sequence_chunks": 2, "schedule": "seq1f1b"},
            "layout.sequence_chunks = 2 is not available for a model with tables",
        ),
    ],
)
def test_bad_tables_are_refused(tables, layout, message):
    config = make_config({**MODEL, "ngram_rows": 0}, layout)
    mesh = make_mesh(config.layout, jax.devices()[: config.layout.num_devices])
    with pytest.raises(ValueError, match=message):
        make_tables(config, own_model(tables), mesh)


def test_staleness_without_tables_is_refused():
    config = make_config({**MODEL, "ngram_rows": 0}, {})
    config = dataclasses.replace(config, optimizer=OptimizerConfig(table_staleness=2))
    model: Any = SimpleNamespace(tables={})
    mesh = make_mesh(config.layout, jax.devices()[:1])
    with pytest.raises(ValueError, match="table_staleness = 2, and the model has no tables"):
        make_tables(config, model, mesh)


class Unprepared(Decoder):
    """A model that takes ids as they are given."""

    def prepare(self, batch: Batch) -> Batch:
        return batch


def test_ids_of_other_rows_are_refused():
    engine = open_engine(make_config(MODEL, {}))
    model = Unprepared(engine.config.model, plain_kernels())
    batch = engine.model.prepare(batches()[0])
    batch.extras["ngram_2"][0, 0] = 64
    with pytest.raises(ValueError, match="from -1 to 64; table 'ngrams' has 64 rows"):
        dataclasses.replace(engine, model=model).shard(batch)
