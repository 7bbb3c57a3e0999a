"""Buffer slots: compiles a table to the program that the executor scans, a row per tick.

A value between the operation that writes it and the last that reads it has a slot of a buffer.
Slots are assigned by interval colouring on every rank, the lowest free one first; a buffer has as
many as any rank needs at once. NumPy only.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.pipeline.table import Table, is_head
from jaxscale.pipeline_schedules.operations import NOP, B, F, R, W, X

HEAD_RANK = "head_rank"
HEAD_COLUMNS = ("head_microbatch", "head_segment", HEAD_RANK, "head_inbox")
"""Columns of a sliced head (`head_columns`)."""
MEMORY, GRADIENT = "memory", "memory_gradient"
"""Buffers of what a stage's layers leave to later segments of a micro-batch."""

OFFLOADED = ("residual_b", "residual_w")
"""Buffers that `layout.offload` of activations has in host memory, except vectors of a layer."""


@dataclass(frozen=True, eq=False)
class TickProgram:
    """The operation of each rank in each tick, and its buffer slots.

    Every column is int32 [ticks, ranks, lanes]; there are 2 lanes only where a schedule overlaps a
    forward with a backward in one tick. -1 is none.

    - `kind` (NOP if idle), `microbatch`, `stage`, `direction`; `segment`, the first part of the
      sequence that it computes, and `parts`, how many; `chunk`, the stage's
      index on its rank, those of direction 1 after those of direction 0. If some passes are
      recomputed, an F that saves its residuals is an R without an `input`: it does the same, from
      the inbox.
    - Slots that the operation reads or writes, by buffer. `inbox`: the activation for F, the
      gradient for B or X; in the last stage, the output of its F. The first stage reads tokens.
      `input`: written by F for its R. `residual_b`: written by F or R, for B or X. `residual_w`:
      written by F or R, for W, too. `cotangent`: written by B for W. With several segments also
      `memory`, what a stage's layers leave to later segments of a micro-batch: read and written by
      each F and R, read by each B; and its gradients, `memory_gradient`: read and written by B.
      Each part of a segment has separate slots: those of the second are in `inbox.1` and so on.
    - `from_left`, `from_right`, `from_self`: the inbox slot for the result of the neighbour (the
      ranks are a ring), or of the rank itself, at the end of the tick. If nothing is received it is
      the slot after the last, so that a receiver does not branch.
    - `gather`: 1 where a rank gathers the weights of a chunk, if it stores one chunk's at a time,
      with pairs two chunks'; `weights`, the chunk's place among them.
      `reduce`: 1 where the weight gradients of a chunk are complete, until the rank's next
      operations on it.
    """

    columns: dict[str, np.ndarray]
    slots: dict[str, int]  # of each buffer


def of_part(name: str, part: int) -> str:
    """The column of a part of a segment with the slot in a buffer."""
    return f"{name}.{part}" if part else name


def make_program(table: Table, parts: Sequence[int] = ()) -> TickProgram:
    """Assigns slots and arranges the operations as [ticks, ranks, lanes].

    Args:
      parts: of each segment, which an operation computes one after the other; () is one each.
    """
    ops = table.ops
    each_has = np.array(parts or (1,) * table.order.sequence_chunks)
    first, count, most = np.cumsum(each_has) - each_has, each_has[ops.segment], int(each_has.max())
    cell = table.tick, ops.rank, ops.paired
    shape = table.ticks, table.order.ranks, 1 + int(ops.paired.max())
    columns = {"kind": np.full(shape, NOP, np.int32)}
    columns["kind"][cell] = ops.kind
    gather, weights = _weight_slots(table)
    for name, values in {
        "microbatch": ops.microbatch,
        "stage": ops.stage,
        "segment": first[ops.segment],
        "parts": count,
        "direction": ops.direction,
        "chunk": ops.direction * table.order.virtual_stages + ops.stage // table.order.ranks,
        "gather": gather,
        "weights": weights,
        "reduce": reduces(table),
    }.items():
        columns[name] = np.full(shape, -1, np.int32)
        columns[name][cell] = values

    slots = {}
    users_of = _users(table)
    for name, users in users_of.items():
        writer, reader = users[0], users[-1]
        arrives = name == "inbox"  # when the tick of its writer has ended
        whole = name in (MEMORY, GRADIENT)
        each = np.ones_like(reader) if whole else count[reader]
        value, part = _repeated(each)
        low, high = table.tick[writer] + arrives, table.tick[reader]
        assigned = _colour(ops.rank[reader][value], low[value], high[value])
        slots[name] = int(assigned.max(initial=-1)) + 1
        for n in range(1 if whole else most):
            columns[of_part(name, n)] = np.full(shape, -1, np.int32)
            for user in users[1:] if arrives else users:
                of = tuple(index[user[value[part == n]]] for index in cell)
                columns[of_part(name, n)][of] = assigned[part == n]
    if (ops.kind == R).any():
        keeping = (columns["kind"] == F) & (columns["residual_b"] >= 0)
        columns["kind"][keeping] = R
    sender, reader = users_of["inbox"]
    for n in range(most):
        inbox = columns[of_part("inbox", n)]
        found = _receives(table, sender, reader, inbox, slots["inbox"])
        columns |= {of_part(name, n): column for name, column in found.items()}
    return TickProgram(columns, slots)


def head_columns(table: Table, program: TickProgram) -> dict[str, np.ndarray]:
    """The backward passes of the last stage in each tick, whose heads all ranks compute: int32
    [ticks, ranks, heads], equal on all ranks. Micro-batch, segment, the rank of the stage, and the
    slot of its inbox with the stage's output; -1 is none."""
    ops = table.ops
    here = np.flatnonzero(is_head(table))
    here = here[np.argsort(table.tick[here], kind="stable")]
    tick = table.tick[here]
    lane = np.arange(len(here)) - np.searchsorted(tick, tick)
    slot = program.columns["inbox"][tick, ops.rank[here], ops.paired[here]]
    found = {}
    values = ops.microbatch[here], ops.segment[here], ops.rank[here], slot
    for name, value in zip(HEAD_COLUMNS, values, strict=True):
        found[name] = np.full((table.ticks, table.order.ranks, lane.max() + 1), -1, np.int32)
        found[name][tick, :, lane] = value[:, None]
    return found


def _repeated(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The index of each of several things, as often as counted, and its number among equal ones.

    >>> _repeated(np.array([2, 1]))
    (array([0, 0, 1]), array([0, 1, 0]))
    """
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def count_slots(table: Table, parts: Sequence[int] = ()) -> dict[str, np.ndarray]:
    """The slots of each buffer that each rank uses at once, int [ranks], without assigning them. A
    buffer has the maximum over ranks; `parts` as in `make_program`."""
    counts, held = {}, np.array(parts or (1,) * table.order.sequence_chunks)[table.ops.segment]
    for name, users in _users(table).items():
        writer, reader = users[0], users[-1]
        alive = np.zeros((table.order.ranks, table.ticks + 1), np.int64)
        rank, begins = table.ops.rank[reader], table.tick[writer] + (name == "inbox")
        each = 1 if name in (MEMORY, GRADIENT) else held[reader]
        np.add.at(alive, (rank, begins), each)
        np.subtract.at(alive, (rank, table.tick[reader] + 1), each)
        counts[name] = alive.cumsum(axis=1).max(axis=1)
    return counts


def _users(table: Table) -> dict[str, tuple[np.ndarray, ...]]:
    """For each buffer the operations that use its values, int [values] each: the writer, then the
    readers in order."""
    kind, stage, needs = table.ops.kind, table.ops.stage, table.needs
    received = np.flatnonzero((kind == B) | (kind == X) | ((kind == F) & (stage > 0)))
    recompute = np.flatnonzero(kind == R)
    backward = np.flatnonzero((kind == B) | (kind == X))
    weight = np.flatnonzero(kind == W)
    # The operation that writes the residuals of a backward, and the last one to read them.
    maker = np.where(needs[:, 1] >= 0, needs[:, 1], needs[:, 0])[backward]
    last = np.arange(len(kind))
    last[needs[weight, 0]] = weight
    # The backward of the last stage reads the output of the same pass's F.
    sender = np.where((kind == F) | (stage == table.order.stages - 1), needs[:, 0], needs[:, 2])
    found = {
        "inbox": (sender[received], received),
        "input": (needs[recompute, 0], recompute),
        "residual_b": (maker, backward),
        "residual_w": (maker, backward, last[backward]),
        "cotangent": (needs[weight, 0], weight),
    }
    return {**found, **_users_of_memory(table)} if table.order.sequence_chunks > 1 else found


def _users_of_memory(table: Table) -> dict[str, tuple[np.ndarray, ...]]:
    """The users of a stage's memory of a micro-batch, and of its gradients: forward passes in the
    order of segments, backward passes in reverse."""
    kind, order = table.ops.kind, table.order
    shape = X + 1, order.microbatches, order.stages, order.sequence_chunks
    where = np.full(shape, -1)
    where[kind, table.ops.microbatch, table.ops.stage, table.ops.segment] = np.arange(len(kind))
    where = where.reshape(X + 1, -1, order.sequence_chunks)
    forward, backward = where[F].T, np.maximum(where[B], where[X]).T[::-1]
    if not (backward >= 0).all():  # an evaluation
        return {MEMORY: tuple(forward), GRADIENT: (forward[0, :0],) * 2}
    again = np.where(where[R].T >= 0, where[R].T, forward)
    return {MEMORY: (*forward, *again, *backward), GRADIENT: tuple(backward)}


def _receives(
    table: Table, sender: np.ndarray, reader: np.ndarray, inbox: np.ndarray, nowhere: int
) -> dict[str, np.ndarray]:
    """The columns with the slot of each rank's received message at the end of a tick."""
    rank, paired, tick = table.ops.rank, table.ops.paired, table.tick
    hop = (rank[reader] - rank[sender]) % table.order.ranks
    channel = np.where(hop == 0, "from_self", np.where(hop == 1, "from_left", "from_right"))
    columns = {}
    for name in ("from_left", "from_right", "from_self"):
        s, r = sender[channel == name], reader[channel == name]
        columns[name] = np.full_like(inbox, nowhere)
        slot = inbox[tick[r], rank[r], paired[r]]
        columns[name][tick[s], rank[r], paired[s]] = np.where(slot < 0, nowhere, slot)
    return columns


def gathers(table: Table) -> np.ndarray:
    """int [N], 1 where an operation is of another chunk than the rank's previous one, so that
    weights are gathered; with pairs, than the last two that it gathered."""
    return _weight_slots(table)[0]


def _weight_slots(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """`gathers`, and int [N], the place of the chunk's weights: with pairs the one of two that was
    used last is kept."""
    ops, among = table.ops, np.flatnonzero(table.ops.kind != W)
    if not ops.paired.any():
        return _changes(table, among, ahead=False), np.zeros_like(ops.kind)
    gather, place = np.zeros_like(ops.kind), np.zeros_like(ops.kind)
    held: dict[int, list[tuple[int, int]]] = {}  # of each rank
    latest: dict[int, int] = {}
    for n in among.tolist():
        rank, chunk = int(ops.rank[n]), (int(ops.direction[n]), int(ops.stage[n]))
        chunks = held.setdefault(rank, [])
        if chunk not in chunks:
            gather[n] = 1
            if len(chunks) < 2:
                chunks.append(chunk)
            else:
                chunks[1 - latest[rank]] = chunk
        place[n] = latest[rank] = chunks.index(chunk)
    return gather, place


def reduces(table: Table) -> np.ndarray:
    """int [N], 1 where the rank's next weight gradient is of another chunk, so that this chunk's
    are reduced."""
    makers = np.flatnonzero((table.ops.kind == W) | (table.ops.kind == X))
    return _changes(table, makers, ahead=True)


def _changes(table: Table, among: np.ndarray, ahead: bool) -> np.ndarray:
    """int [N], 1 for operations in `among` whose next (`ahead`) or previous one is of another
    chunk."""
    ops = table.ops
    chunk = np.stack([ops.rank, ops.direction, ops.stage])[:, among]
    differs = (chunk[:, 1:] != chunk[:, :-1]).any(axis=0)
    changes = np.zeros(len(ops.kind), np.int64)
    if not len(among):
        return changes
    changes[among] = np.append(differs, True) if ahead else np.append(True, differs)
    return changes


def _colour(rank: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Interval colouring, int [values]: slots that no two values share on a rank in any tick from
    low to high, as few as possible on each rank."""
    slots = np.zeros(len(rank), np.int64)
    for r in np.unique(rank):
        free: list[int] = []
        taken: list[tuple[int, int]] = []  # last tick, slot
        mine = np.flatnonzero(rank == r)
        for n in mine[np.argsort(low[mine], kind="stable")].tolist():
            while taken and taken[0][0] < low[n]:
                heapq.heappush(free, heapq.heappop(taken)[1])
            # Every slot so far is free or taken, so the next new one is len(taken).
            slot = heapq.heappop(free) if free else len(taken)
            heapq.heappush(taken, (int(high[n]), slot))
            slots[n] = slot
    return slots
