"""What schedules refuse, and the orders that come out of options."""

import itertools
import re

import pytest

from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.schedule_csv import write_csv
from jaxscale.pipeline.table import compile_order
from jaxscale.pipeline_schedules.operations import F, R, W, X
from jaxscale.pipeline_schedules.schedule import NUMBERS
from jaxscale.pipeline_schedules.shipped import NAMES

REFUSED = [
    ("1f1b", (4, 8, 2, 1), "virtual_stages = 1", "virtual_stages = 1"),
    ("gpipe", (4, 8, 1, 2), "sequence_chunks = 1", "sequence_chunks = 1"),
    (
        "interleaved",
        (4, 6, 2, 1),
        "microbatches to be a multiple of stages",
        "stages = 3, or microbatches = 4, or microbatches = 8",
    ),
    (
        "seq1f1b_interleaved",
        (4, 6, 2, 3),
        "least common multiple",
        "microbatches = 4, or sequence_chunks = 2, or sequence_chunks = 4, or microbatches = 8",
    ),
    ("chimera", (3, 6, 1, 1), "an even number of stages", "stages = 2"),
    ("chimera", (4, 6, 1, 1), "multiple of stages", "microbatches = 4, or microbatches = 8"),
    ("bitpipe", (2, 4, 2, 1), "an even number of stages, at least 4", "stages = 4"),
    ("bitpipe", (4, 4, 1, 1), "virtual_stages = 2", "virtual_stages = 2"),
    ("zb_v", (4, 6, 2, 1), "microbatches >= 2 * stages - 1", "stages = 3, or microbatches = 7"),
    ("zb_h1", (4, 6, 2, 3), "virtual_stages = 1", "virtual_stages = 1 and sequence_chunks = 1"),
    ("dualpipe", (4, 6, 1, 1), "microbatches >= 2 * stages", "stages = 2, or microbatches = 8"),
    ("dualpipe", (4, 9, 1, 1), "an even number of microbatches", "microbatches = 8"),
    ("dualpipe_v", (3, 5, 2, 1), "microbatches >= 2 * stages", "stages = 2, or microbatches = 6"),
]


@pytest.mark.parametrize(("name", "numbers", "need", "nearest"), REFUSED)
def test_numbers_that_a_schedule_cannot_serve(name, numbers, need, nearest):
    with pytest.raises(ValueError, match=f"^{name} needs ") as raised:
        make_order(name, *numbers)
    message = str(raised.value)
    assert need in message
    assert nearest in message.partition("Nearest that works: ")[2]


@pytest.mark.proof
@pytest.mark.parametrize("name", NAMES)
def test_the_nearest_numbers_do_work(name):
    """Whatever is asked for is either served or answered with numbers that are."""
    for numbers in itertools.product((1, 3, 4, 7), (2, 5, 8), (1, 2, 3), (1, 3)):
        try:
            compile_order(make_order(name, *numbers))
        except ValueError as error:
            ways = str(error).partition("Nearest that works: ")[2].split(", or ")
            for way in ways:
                change = {key: int(n) for key, n in re.findall(r"(\w+) = (\d+)", way)}
                assert change
                nearest = dict(zip(NUMBERS, numbers)) | change
                assert compile_order(make_order(name, **nearest)).ticks > 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("1f2b", 4, 8), {}, "'1f2b' is not known; .*did you mean '1f1b'"),
        (("ZB_V", 4, 8), {}, "did you mean 'zb_v'"),
        (("1f1b", 4), {}, "1f1b needs stages .* microbatches = None"),
        (("1f1b", 0, 8), {}, "stages = 0; at least 1"),
        (("1f1b", 4, 8, 1, -1), {}, "sequence_chunks = -1; at least 1"),
        (("zb_h2", 4, 8), {"fused": True}, "fused = True, but zb_h2 has separate"),
        (("1f1b", 4, 8), {"keep": -1}, "keep = -1; at least 0"),
    ],
)
def test_other_refusals(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        make_order(*arguments, **options)


def test_chunks_default_to_what_the_schedule_is_made_for():
    defaults = {name: make_order(name, 4, 8).virtual_stages for name in NAMES}
    assert {name for name, v in defaults.items() if v == 2} == {
        *("bitpipe", "dualpipe_v", "interleaved", "seq1f1b_interleaved", "zb_v")
    }
    assert set(defaults.values()) == {1, 2}


def test_the_backward_is_split_unless_fused():
    assert texts(make_order("1f1b", 2, 2))[1] == "1F0 1B0 1W0 1F1 1B1 1W1"
    assert texts(make_order("1f1b", 2, 2, fused=True))[1] == "1F0 1X0 1F1 1X1"


def test_recompute_comes_before_the_backward_and_before_the_pair_that_it_is_in():
    assert texts(make_order("1f1b", 2, 2, keep=0))[1] == "1F0 1R0 1B0 1W0 1F1 1R1 1B1 1W1"
    row = texts(make_order("dualpipe", 4, 8, keep=0))[0]
    assert " 3R5^ 0F3+3X5^ " in row


def kept_at_once(row):
    """The most passes at a time, from F to their last operation, that have no R."""
    again = {op[1:4] for op in row if op.kind == R}
    alive, most = set(), 0
    for op in row:
        if op[1:4] not in again:
            alive |= {op[1:4]} if op.kind == F else set()
            most = max(most, len(alive))
            alive -= {op[1:4]} if op.kind in (W, X) else set()
    return most


def fewest_recomputed(row, keep):
    """By trying all sets of passes."""
    units = [op[1:4] for op in row if op.kind == F]
    for count in range(len(units) + 1):
        for again in itertools.combinations(units, count):
            if kept_at_once([op for op in row if op.kind != R or op[1:4] in again]) <= keep:
                return count
    raise AssertionError(row)


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize(
    "numbers",
    [("1f1b", 4, 6), ("gpipe", 2, 5), ("zb_h1", 4, 6), ("interleaved", 2, 4, 2), ("zb_v", 2, 3, 2)],
    ids=lambda numbers: numbers[0],
)
def test_ranks_keep_as_many_passes_as_they_may(numbers, keep):
    every = make_order(*numbers, keep=0)
    some = make_order(*numbers, keep=keep)
    for row, whole in zip(some.rows, every.rows):
        assert kept_at_once(row) <= keep
        assert sum(op.kind == R for op in row) == fewest_recomputed(whole, keep)
        assert [op for op in row if op.kind != R] == [op for op in whole if op.kind != R]


def test_a_rank_near_the_end_makes_less_again():
    """It has less in flight; and every pass that is kept shortens the step by its R."""
    again = [
        [sum(op.kind == R for op in row) for row in order.rows]
        for order in (make_order("1f1b", 4, 32, keep=keep) for keep in (1, 2, 3))
    ]
    assert again == [[24, 21, 16, 0], [16, 10, 0, 0], [8, 0, 0, 0]]
    ticks = [compile_order(make_order("1f1b", 4, 32, keep=keep)).ticks for keep in range(4)]
    assert ticks == [134, 123, 116, 107]
    assert compile_order(make_order("1f1b", 4, 32)).ticks == 102


def test_keeping_all_is_no_recomputing():
    with pytest.raises(ValueError, match="keep = 4, and no rank has more passes in flight"):
        make_order("1f1b", 4, 32, keep=4)


def test_an_order_from_a_file_says_itself_what_is_recomputed(tmp_path):
    path = tmp_path / "order.csv"
    order = make_order("1f1b", 2, 4, keep=1)
    path.write_text(write_csv(order))
    assert make_order(str(path), keep=0).rows == order.rows
    assert compile_order(make_order(str(path))).ticks == compile_order(order).ticks
    with pytest.raises(ValueError, match="decide what is recomputed"):
        make_order(str(path), keep=1)


def test_an_order_from_a_file_is_checked_against_the_numbers(tmp_path):
    path = tmp_path / "order.csv"
    path.write_text(write_csv(make_order("interleaved", 2, 4, 2)))
    order = make_order(str(path), 2, 4)
    assert (order.ranks, order.microbatches, order.virtual_stages) == (2, 4, 2)
    for numbers, message in {
        (3, 4): "stages = 3, but .* is an order for stages = 2",
        (2, 8): "microbatches = 8, but .* microbatches = 4",
        (2, 4, 1): "virtual_stages = 1, but .* virtual_stages = 2",
        (2, 4, 2, 2): "sequence_chunks = 2, but",
    }.items():
        with pytest.raises(ValueError, match=message):
            make_order(str(path), *numbers)
    with pytest.raises(ValueError, match="has B and W"):
        make_order(str(path), fused=True)
    with pytest.raises(ValueError, match="has no R"):
        make_order(str(path), keep=0)


def texts(order):
    return [row.replace(",", " ") for row in write_csv(order).splitlines()]
