"""A host batch is sharded over the mesh, in context order; a step takes no other."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxscale
from jaxscale.batch import Batch, ShardedBatch
from jaxscale.ops.attention.context_chunks import balanced_order
from tests.invariants.layouts import (
    BATCH,
    LLAMA,
    SEQ_LEN,
    VOCABULARY,
    batches,
    make_config,
    open_engine,
)

CONTEXT = {"context": 2, "fsdp": 2, "microbatches": 2}


@pytest.fixture(scope="module")
def engine():
    return open_engine(make_config({**LLAMA, "num_layers": 1}, CONTEXT))


def test_it_is_dealt_and_placed(engine):
    (batch, *_), order = batches(), balanced_order(SEQ_LEN, 2)
    sharded = engine.shard(batch)
    assert type(sharded) is ShardedBatch is jaxscale.ShardedBatch
    for host, placed, abstract in zip(
        batch[:5], sharded[:5], engine.abstract_batch[:5], strict=True
    ):
        np.testing.assert_array_equal(placed, host[:, order])
        assert (placed.sharding, placed.dtype) == (abstract.sharding, abstract.dtype)
    assert engine.local_rows(BATCH) == tuple(range(BATCH))
    again = engine.shard(batch, global_batch_size=BATCH)
    jax.tree.map(np.testing.assert_array_equal, again, sharded)
    # Of another size than the config's, where it divides.
    half = engine.shard(Batch(*(field[:4, :16] for field in batch[:5])))
    assert half.tokens.shape == (4, 16)


@pytest.mark.proof
def test_what_was_not_dealt_is_refused_before_anything_is_compiled(engine):
    """A sharded batch is traced, and no other."""
    (batch, *_) = batches()
    placed = jax.device_put(batch, engine.batch_sharding)
    counts = jax.ShapeDtypeStruct((LLAMA["vocab_size"],), np.float32)
    for wrong in (batch, placed, tuple(batch), batch._asdict()):
        with pytest.raises(ValueError, match=r"pass engine\.shard\(batch\)"):
            engine.step(engine.abstract_state, wrong)
        with pytest.raises(ValueError, match=r"pass engine\.shard\(batch\)"):
            engine.evaluate(engine.abstract_state.params, wrong, counts)
    engine.step.trace(engine.abstract_state, engine.abstract_batch)


def changed(**fields):
    return batches()[0]._replace(**fields)


def with_one(name, value):
    """A value where there is loss."""
    batch = batches()[0]
    there = tuple(np.argwhere(batch.weights > 0)[0])
    field = getattr(batch, name).copy()
    field[there] = value
    return batch._replace(**{name: field})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda engine: engine.shard(batches()[0]), "is already a ShardedBatch"),
        (lambda engine: tuple(batches()[0]), "is a tuple; pass a jaxscale.Batch"),
        (lambda engine: changed(tokens=[[1, 2]]), "tokens is a builtins.list; pass a NumPy array"),
        (lambda engine: changed(weights=jax.numpy.ones((BATCH, SEQ_LEN))), "; pass a NumPy array"),
        (lambda engine: changed(targets=np.ones((BATCH, SEQ_LEN))), "float64; pass int32"),
        (lambda engine: changed(weights=np.ones((BATCH, SEQ_LEN))), "float64; pass float32"),
        (lambda engine: changed(segments=np.ones((BATCH, 3), np.int32)), r"\(16, 3\), and"),
        (lambda engine: changed(tokens=np.ones(BATCH, np.int32)), r"it is \[batch, seq\]"),
        (lambda engine: with_one("tokens", VOCABULARY), "below model.vocab_size"),
        (lambda engine: with_one("tokens", -1), "tokens are from -1 to .* at least 0"),
        (lambda engine: with_one("targets", -100), "targets with weights are from -100 to"),
        (lambda engine: with_one("positions", -1), "positions are from -1 to"),
        (lambda engine: with_one("weights", np.nan), "weights are not all finite"),
        (
            lambda engine: Batch(*(x[:6] for x in batches()[0][:5])),
            "data.global_batch_size to 4 or 8",
        ),
        (lambda engine: Batch(*(x[:, :6] for x in batches()[0][:5])), "set data.seq_len = 4 or 8"),
    ],
)
def test_what_is_no_batch_is_refused(make, said, engine):
    with pytest.raises(ValueError, match=said):
        engine.shard(make(engine))


def test_rows_of_a_process_are_all_there(engine):
    with pytest.raises(ValueError, match="16 rows, and this process's devices take 32 of"):
        engine.shard(batches()[0], global_batch_size=32)


@pytest.mark.parametrize(
    ("row", "right"),
    [
        ([1] * SEQ_LEN, True),
        ([1] * 5 + [0] * (SEQ_LEN - 5), True),
        ([0] * SEQ_LEN, True),
        ([1] * 5 + [2] * (SEQ_LEN - 5), False),
        ([2] * SEQ_LEN, False),
        ([0] * 5 + [1] * (SEQ_LEN - 5), False),
        ([1] * 5 + [0] + [1] * (SEQ_LEN - 6), False),
    ],
)
def test_rows_are_one_document_and_padding_where_documents_see_each_other(row, right, engine):
    data = dataclasses.replace(engine.config.data, objective="causal_across_documents")
    engine = dataclasses.replace(engine, config=dataclasses.replace(engine.config, data=data))
    segments = np.ones((BATCH, SEQ_LEN), np.int32)
    segments[3] = row
    if right:
        engine.shard(changed(segments=segments))
        return
    said = (
        r"data.objective = 'causal_across_documents' takes .* row 3 of batch.segments .* 'causal'"
    )
    with pytest.raises(ValueError, match=said):
        engine.shard(changed(segments=segments))
