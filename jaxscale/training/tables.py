"""Embedding tables of a model in a step: lookup before the dense pass, update after it.

Persia's hybrid (arXiv 2111.05897) as one deterministic program: dense parameters are updated in
each step, rows of tables with the gradients of `optimizer.table_staleness` steps before, which are
kept in the state, and so in checkpoints. The exchange that applies them then waits for nothing in
the step. At 0 both are updated in the same step.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxscale.batch import Batch
from jaxscale.config import Config
from jaxscale.models.protocol import EmbeddingTable, Model
from jaxscale.ops.array_stack import at, put
from jaxscale.ops.tables.exchange import TableShards, adagrad, look_up, update
from jaxscale.sharding.layout_checks import check_table_rows, check_table_sequences
from jaxscale.sharding.specs import (
    batch_sharding,
    manually,
    mesh_axes_of,
    over_all_ranks,
    stacked,
)

Tree = Any


class TableState(NamedTuple):
    """A table; also its shardings and axes."""

    rows: Any  # [rows, width], in the type of the model's parameters
    sums: Any  # [rows], Adagrad's, in float32 or wider
    pending: Any  # `Pending` by name of the ids; {} at staleness 0


class Pending(NamedTuple):
    """Gradients that are not applied yet: a ring of the last steps', step t at t % staleness."""

    ids: Any  # int32 [staleness, batch, length]; -1 is none
    grads: Any  # [staleness, batch, length, width], means over tokens with loss


class Tables(NamedTuple):
    """Functions of a step for the tables of a model, which may have none.

    - `begin() -> states`
    - `place(states) -> shardings`
    - `look_up(states, batch) -> batch` adds `Batch.vectors`.
    - `update(states, batch, dvectors, step, count, good) -> states`: `dvectors` are sums over
      `count` tokens; those of a step that is not `good` are dropped.
    """

    begin: Callable[[], Tree]
    place: Callable[[Tree], Tree]
    look_up: Callable[[Tree, Batch], Batch]
    update: Callable[..., Tree]


NO_TABLES = Tables(
    begin=lambda: None,
    place=lambda states: None,
    look_up=lambda states, batch: batch,
    update=lambda states, *arguments: states,
)


def make_tables(config: Config, model: Model, mesh: Mesh) -> Tables:
    """The functions of a model's tables in a layout.

    Raises:
      ValueError: a table that does not divide over the devices, has too many rows, or names ids
        that the model does not declare; a layout that splits sequences; staleness without tables.
    """
    if not model.tables:
        if stale := config.optimizer.table_staleness:
            raise ValueError(
                f"optimizer.table_staleness = {stale}, and the model has no tables; set it to 0, "
                "or give the model a table, such as model.ngram_rows"
            )
        return NO_TABLES
    _check_tables(config, model)
    parts = {name: _open_table(table, mesh, config) for name, table in model.tables.items()}
    lengths = {name: length for name, (length, _) in model.extras(config.data.seq_len).items()}

    def begin() -> Tree:
        keys = jax.random.split(jax.random.key(config.run.seed), len(parts))
        return {n: part.begin(key, lengths) for (n, part), key in zip(parts.items(), keys)}

    def place(states: Tree) -> Tree:
        return {name: part.place(states[name]) for name, part in parts.items()}

    def find(states: Tree, batch: Batch) -> Batch:
        found = [part.look_up(states[name], batch) for name, part in parts.items()]
        return batch._replace(vectors=functools.reduce(lambda a, b: {**a, **b}, found))

    def change(states: Tree, batch: Batch, dvectors: Tree, step: Any, count: Any, good: Any):
        return {
            name: part.update(states[name], batch, dvectors, step, count, good)
            for name, part in parts.items()
        }

    return Tables(begin, place, find, change)


def _check_tables(config: Config, model: Model) -> None:
    layout, extras = config.layout, model.extras(config.data.seq_len)
    rows, read = {name: table.rows for name, table in model.tables.items()}, set[str]()
    check_table_rows(layout, rows)
    check_table_sequences(layout, rows)
    for name, table in model.tables.items():
        where = f"table {name!r}"
        for ids in table.ids:
            if ids in read:
                raise ValueError(
                    f"{where} reads the ids of batch.extras[{ids!r}], which another table reads: "
                    "give each table its own"
                )
            read.add(ids)
            if ids not in extras or jnp.dtype(extras[ids][1]) != jnp.int32:
                raise ValueError(
                    f"{where} reads ids from batch.extras[{ids!r}], which are not among the int32 "
                    f"arrays of the model's extras: {sorted(extras)}"
                )


def _open_table(table: EmbeddingTable, mesh: Mesh, config: Config) -> "_MeshTable":
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    batch, ranks = batch_sharding(mesh), config.layout.num_devices
    of_batch = {axis for entry in batch.spec for axis in mesh_axes_of(entry)}
    return _MeshTable(
        table=table,
        mesh=mesh,
        shards=TableShards(axes, ranks, table.rows // ranks),
        batch=batch,
        spare=tuple(axis for axis in axes if axis not in of_batch),
        sharded=over_all_ranks(mesh),
        batch_size=config.data.global_batch_size,
        staleness=config.optimizer.table_staleness,
        rate=config.optimizer.table_learning_rate,
        dtype=jnp.dtype(config.model.param_dtype),
    )


@dataclass(frozen=True)
class _MeshTable:
    """One table on a mesh."""

    table: EmbeddingTable
    mesh: Mesh
    shards: TableShards
    batch: NamedSharding  # of ids and gradients
    spare: tuple[str, ...]  # axes whose ranks have the same batch: each takes a part of the ids
    sharded: NamedSharding  # of rows
    batch_size: int
    staleness: int
    rate: float
    dtype: Any

    def begin(self, key: jax.Array, lengths: Mapping[str, int]) -> TableState:
        shape = self.table.rows, self.table.width
        rows = jnp.zeros(shape, self.dtype)
        if self.table.scale:
            rows = self.table.scale * jax.random.normal(key, shape, self.dtype)
        sums = jnp.zeros(shape[:1], jnp.promote_types(self.dtype, jnp.float32))

        def empty(length: int) -> Pending:
            shape = self.staleness, self.batch_size, length
            grads = jnp.zeros((*shape, self.table.width), self.dtype)
            return Pending(jnp.full(shape, -1, jnp.int32), grads)

        pending = {name: empty(lengths[name]) for name in self.table.ids if self.staleness}
        return TableState(rows, sums, pending)

    def place(self, state: TableState) -> TableState:
        pending = stacked(self.batch)
        return TableState(
            self.sharded, self.sharded, jax.tree.map(lambda leaf: pending, state.pending)
        )

    def look_up(self, state: TableState, batch: Batch) -> Tree:
        ids = {name: batch.extras[name] for name in self.table.ids}

        def local(rows: jax.Array, ids: Tree) -> Tree:
            flat = jnp.concatenate([x.reshape(-1) for x in ids.values()])
            vectors = look_up(self.shards, rows, self._own(flat, -1))
            if self.spare:
                vectors = jax.lax.all_gather(vectors, self.spare, tiled=True)
            found, begin = {}, 0
            for name, x in ids.items():
                found[name] = vectors[begin : begin + x.size].reshape(*x.shape, -1)
                begin += x.size
            return found

        with jax.named_scope("tables"):
            return self._manually(local, (self.sharded, self.batch), self.batch)(state.rows, ids)

    def update(
        self, state: TableState, batch: Batch, dvectors: Tree, step: Any, count: Any, good: Any
    ) -> TableState:
        fresh = {
            name: Pending(
                jnp.where(good, batch.extras[name], -1),
                (dvectors[name] / count).astype(self.dtype),
            )
            for name in self.table.ids
        }
        due, pending = fresh, state.pending
        if self.staleness:
            slot = step % self.staleness
            due, pending = at(pending, slot), put(pending, fresh, slot)

        def local(rows: jax.Array, sums: jax.Array, due: Tree) -> tuple[jax.Array, jax.Array]:
            ids = jnp.concatenate([one.ids.reshape(-1) for one in due.values()])
            width = self.table.width
            grads = jnp.concatenate([one.grads.reshape(-1, width) for one in due.values()])
            rule = functools.partial(adagrad, rate=self.rate)
            mine = self._own(ids, -1), self._own(grads, 0)
            return update(self.shards, (rows, sums), *mine, rule)

        with jax.named_scope("tables"):
            specs = (self.sharded, self.sharded)
            run = self._manually(local, (*specs, self.batch), specs)
            rows, sums = run(state.rows, state.sums, due)
        return TableState(rows, sums, pending)

    def _own(self, x: jax.Array, fill: int) -> jax.Array:
        """This rank's part of the first dimension, among ranks with the same batch."""
        if not self.spare:
            return x
        ranks = jax.lax.axis_size(self.spare)
        share = -(-len(x) // ranks)
        missing = [(0, share * ranks - len(x))] + [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(x, missing, constant_values=fill)
        return jax.lax.dynamic_slice_in_dim(x, share * jax.lax.axis_index(self.spare), share)

    def _manually(self, local: Callable, given: Tree, returned: Tree) -> Callable:
        given, returned = jax.tree.map(lambda sharding: sharding.spec, (given, returned))
        return manually(local, self.mesh.axis_names, given, returned, self.mesh)
