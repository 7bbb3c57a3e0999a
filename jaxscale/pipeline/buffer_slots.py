"""The table as the executor scans it: a row for each tick, and slots for the values in between.

A value that one operation writes and a later one reads is in a slot of a buffer in between. Slots
are assigned by interval colouring on every rank, the lowest free one first; a buffer has as many as
any rank needs at once. NumPy only.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from jaxscale.pipeline.table import Table
from jaxscale.pipeline_schedules.operations import NOP, B, F, R, W, X


@dataclass(frozen=True, eq=False)
class TickProgram:
    """What each rank does in each tick.

    Every column is int32 [ticks, ranks, lanes]; there are 2 lanes only where a schedule overlaps
    a forward with a backward in one tick. -1 stands for nothing.

    - `kind` (NOP where idle), `microbatch`, `stage`, `segment`, `direction`; `chunk`, the stage's
      index among the rank's own, in that direction. Where some passes are recomputed, an F that
      saves its residuals is an R without an `input`: it does the same, from the inbox.
    - Slots that the operation reads or writes, by buffer. `inbox`: the activation that F reads,
      the gradient that B or X reads; those of the last stage read the output of their own F. The
      first stage reads tokens. `input`: written by F for its R. `residual_b`: written by
      F, or by R, for B or X. `residual_w`: likewise, for W too. `cotangent`: written by B for W.
    - `from_left`, `from_right`, `from_self`: the inbox slot in which to put, when the tick ends,
      the result of the neighbour (the ranks are a ring) or of the rank itself in this lane; where
      nothing is to be received it is the slot after the last, so that a receiver need not branch.
    - `gather`: 1 where a rank that holds the gathered weights of one chunk at a time gathers them.
      `reduce`: 1 where the weight gradients of a chunk are complete, until the rank's next
      operations on it.
    """

    columns: dict[str, np.ndarray]
    slots: dict[str, int]  # of each buffer


def make_program(table: Table) -> TickProgram:
    """Assigns slots and spreads the operations over [ticks, ranks, lanes]."""
    ops = table.ops
    cell = table.tick, ops.rank, ops.paired
    shape = table.ticks, table.order.ranks, 1 + int(ops.paired.max())
    columns = {"kind": np.full(shape, NOP, np.int32)}
    columns["kind"][cell] = ops.kind
    for name, values in {
        "microbatch": ops.microbatch,
        "stage": ops.stage,
        "segment": ops.segment,
        "direction": ops.direction,
        "chunk": ops.stage // table.order.ranks,
        "gather": gathers(table),
        "reduce": reduces(table),
    }.items():
        columns[name] = np.full(shape, -1, np.int32)
        columns[name][cell] = values

    slots = {}
    users_of = _users(table)
    for name, users in users_of.items():
        writer, reader = users[0], users[-1]
        arrives = name == "inbox"  # when the tick of its writer has ended
        assigned = _colour(ops.rank[reader], table.tick[writer] + arrives, table.tick[reader])
        slots[name] = int(assigned.max(initial=-1)) + 1
        columns[name] = np.full(shape, -1, np.int32)
        for user in users[1:] if arrives else users:
            columns[name][tuple(index[user] for index in cell)] = assigned
    if (ops.kind == R).any():
        keeping = (columns["kind"] == F) & (columns["residual_b"] >= 0)
        columns["kind"][keeping] = R
    sender, reader = users_of["inbox"]
    columns |= _receives(table, sender, reader, columns["inbox"], slots["inbox"])
    return TickProgram(columns, slots)


def count_slots(table: Table) -> dict[str, np.ndarray]:
    """How many slots of each buffer each rank uses at once, int [ranks], without assigning them. A
    buffer has the maximum over ranks."""
    counts = {}
    for name, users in _users(table).items():
        writer, reader = users[0], users[-1]
        alive = np.zeros((table.order.ranks, table.ticks + 1), np.int64)
        rank, begins = table.ops.rank[reader], table.tick[writer] + (name == "inbox")
        np.add.at(alive, (rank, begins), 1)
        np.add.at(alive, (rank, table.tick[reader] + 1), -1)
        counts[name] = alive.cumsum(axis=1).max(axis=1)
    return counts


def _users(table: Table) -> dict[str, tuple[np.ndarray, ...]]:
    """For each buffer the operations that use a value in it, int [values] each: its writer, then
    its readers, the last one at the end."""
    kind, stage, needs = table.ops.kind, table.ops.stage, table.needs
    received = np.flatnonzero((kind == B) | (kind == X) | ((kind == F) & (stage > 0)))
    recompute = np.flatnonzero(kind == R)
    backward = np.flatnonzero((kind == B) | (kind == X))
    weight = np.flatnonzero(kind == W)
    # The operation that writes the residuals of a backward, and the last one to read them.
    maker = np.where(needs[:, 1] >= 0, needs[:, 1], needs[:, 0])[backward]
    last = np.arange(len(kind))
    last[needs[weight, 0]] = weight
    # The backward of the last stage reads the output of its own F.
    sender = np.where((kind == F) | (stage == table.order.stages - 1), needs[:, 0], needs[:, 2])
    return {
        "inbox": (sender[received], received),
        "input": (needs[recompute, 0], recompute),
        "residual_b": (maker, backward),
        "residual_w": (maker, backward, last[backward]),
        "cotangent": (needs[weight, 0], weight),
    }


def _receives(
    table: Table, sender: np.ndarray, reader: np.ndarray, inbox: np.ndarray, nowhere: int
) -> dict[str, np.ndarray]:
    """The columns with the slot where each rank puts what it receives at the end of a tick."""
    rank, paired, tick = table.ops.rank, table.ops.paired, table.tick
    hop = (rank[reader] - rank[sender]) % table.order.ranks
    channel = np.where(hop == 0, "from_self", np.where(hop == 1, "from_left", "from_right"))
    columns = {}
    for name in ("from_left", "from_right", "from_self"):
        s, r = sender[channel == name], reader[channel == name]
        columns[name] = np.full_like(inbox, nowhere)
        columns[name][tick[s], rank[r], paired[s]] = inbox[tick[r], rank[r], paired[r]]
    return columns


def gathers(table: Table) -> np.ndarray:
    """int [N], 1 where an operation needs the weights of another chunk than the one before it."""
    return _changes(table, np.flatnonzero(table.ops.kind != W), ahead=False)


def reduces(table: Table) -> np.ndarray:
    """int [N], 1 where the next operation that makes weight gradients is of another chunk."""
    makers = np.flatnonzero((table.ops.kind == W) | (table.ops.kind == X))
    return _changes(table, makers, ahead=True)


def _changes(table: Table, among: np.ndarray, ahead: bool) -> np.ndarray:
    """int [N], 1 for operations in `among` whose next or previous one there is of another chunk."""
    ops = table.ops
    chunk = np.stack([ops.rank, ops.direction, ops.stage])[:, among]
    differs = (chunk[:, 1:] != chunk[:, :-1]).any(axis=0)
    changes = np.zeros(len(ops.kind), np.int64)
    if not len(among):
        return changes
    changes[among] = np.append(differs, True) if ahead else np.append(True, differs)
    return changes


def _colour(rank: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """int [values], slots such that no two values share one on a rank in any tick from low to
    high, and no rank uses more than it must."""
    slots = np.zeros(len(rank), np.int64)
    for r in np.unique(rank):
        free: list[int] = []
        taken: list[tuple[int, int]] = []  # last tick, slot
        mine = np.flatnonzero(rank == r)
        for n in mine[np.argsort(low[mine], kind="stable")].tolist():
            while taken and taken[0][0] < low[n]:
                heapq.heappush(free, heapq.heappop(taken)[1])
            # Every slot so far is either free or taken.
            slot = heapq.heappop(free) if free else len(taken)
            heapq.heappush(taken, (int(high[n]), slot))
            slots[n] = slot
    return slots
