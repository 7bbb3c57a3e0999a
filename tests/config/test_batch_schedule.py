"""Batch-size ramps: the examples of each step, and the schedules that are refused."""

import pytest

from jaxscale.config import from_dict, load, to_dict
from jaxscale.config.batch_schedule import (
    batch_size_at,
    examples_before,
    microbatches_of,
    to_batch_schedule,
)

RAMP = ((0, 2), (3, 4), (5, 8))


def test_steps_read_consecutive_examples():
    sizes = [batch_size_at(RAMP, 8, step) for step in range(7)]
    assert sizes == [2, 2, 2, 4, 4, 8, 8]
    assert [examples_before(RAMP, 8, step) for step in range(8)] == [
        sum(sizes[:step]) for step in range(8)
    ]
    assert [examples_before((), 8, step) for step in range(3)] == [0, 8, 16]


def test_microbatches_keep_their_shape():
    assert [microbatches_of(8, 128, size) for size in (16, 64, 128)] == [1, 4, 8]
    for size in (8, 24):
        with pytest.raises(ValueError, match="8 = 16; set multiples of 16"):
            microbatches_of(8, 128, size)


def test_a_schedule_is_written_and_read():
    given = "data.batch_schedule={0: 2, 3: 4, 5: 8}"
    config = load("tiny", [given])
    assert config.data.batch_schedule == RAMP
    assert hash(config.data) is not None
    assert from_dict(to_dict(config)) == config
    assert load("tiny", ["data.batch_schedule=0: 2, 3: 4, 5: 8"]) == config
    assert load("tiny", [given, "data.batch_schedule={}"]) == load("tiny")
    assert (config.data.sequences_after(3), config.data.examples_of(4)) == (4, 10)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({1: 2, 3: 8}, "begins at step 1; begin at 0"),
        (((0, 2), (5, 4), (3, 8)), "the steps must ascend"),
        ({0: 8, 3: 4, 5: 8}, "the batches must be at least 1 and grow"),
        ({0: 0, 3: 8}, "the batches must be at least 1 and grow"),
        ({0: 2, 3: 4}, "ends with 4 sequences, and data.global_batch_size = 8; set"),
        ({0: 2.5, 3: 8}, "is not steps with numbers of sequences, such as"),
        ((0, 8), "is not steps with numbers of sequences, such as"),
    ],
)
def test_a_bad_schedule_is_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        to_batch_schedule(schedule, 8)


def test_a_file_has_a_mapping(tmp_path):
    file = tmp_path / "ramp.py"
    file.write_text(
        "import ml_collections\n\n\ndef get_config():\n"
        "    data = ml_collections.ConfigDict()\n    data.batch_schedule = {0: 2, 3: 4, 5: 8}\n"
        "    return ml_collections.ConfigDict({'data': data})\n"
    )
    assert load(str(file)).data.batch_schedule == RAMP
