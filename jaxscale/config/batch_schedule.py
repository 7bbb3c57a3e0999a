"""Batch-size ramp: sequences of each step, and the examples read before it.

Example i is the same in every schedule: a step reads the examples after those of all steps before.
"""

from typing import Any

BatchSchedule = tuple[tuple[int, int], ...]
"""(step, sequences): after so many steps the batches have so many sequences. () is one size."""

SUCH = "such as {0: 64, 2000: 128}"


def to_batch_schedule(given: Any, largest: int) -> BatchSchedule:
    """The schedule of a setting, a mapping or its pairs.

    Args:
      largest: `data.global_batch_size`, of the last batches.

    Raises:
      ValueError: with the values that it can have.

    >>> to_batch_schedule({0: 64, 2000: 128}, 128)
    ((0, 64), (2000, 128))
    """
    name = "data.batch_schedule"
    try:
        pairs = tuple((step, size) for step, size in dict(given).items())
    except (TypeError, ValueError):
        pairs = ((0, None),)
    if not all(type(x) is int for pair in pairs for x in pair):
        raise ValueError(f"{name} = {given!r} is not steps with numbers of sequences, {SUCH}")
    if not pairs:
        return ()
    steps, sizes = zip(*pairs)
    if steps[0] != 0:
        raise ValueError(f"{name} = {given!r} begins at step {steps[0]}; begin at 0, {SUCH}")
    if list(steps) != sorted(set(steps)):
        raise ValueError(f"{name} = {given!r}: the steps must ascend, {SUCH}")
    if list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"{name} = {given!r}: the batches must be at least 1 and grow, {SUCH}")
    if sizes[-1] != largest:
        raise ValueError(
            f"{name} = {given!r} ends with {sizes[-1]} sequences, and data.global_batch_size = "
            f"{largest}; set data.global_batch_size = {sizes[-1]}, the largest batch"
        )
    return pairs


def batch_size_at(schedule: BatchSchedule, largest: int, steps: int) -> int:
    """Sequences of the step after `steps` steps.

    >>> [batch_size_at(((0, 64), (2000, 128)), 128, step) for step in (0, 1999, 2000)]
    [64, 64, 128]
    """
    return next((size for step, size in reversed(schedule) if step <= steps), largest)


def examples_before(schedule: BatchSchedule, largest: int, steps: int) -> int:
    """Examples that the first `steps` steps read.

    >>> [examples_before(((0, 64), (2000, 128)), 128, step) for step in (0, 2000, 2001)]
    [0, 128000, 128128]
    """
    if not schedule:
        return steps * largest
    ends = [step for step, _ in schedule[1:]] + [steps]
    return sum(size * max(0, min(end, steps) - begin) for (begin, size), end in zip(schedule, ends))


def microbatches_of(microbatches: int, largest: int, size: int) -> int:
    """Micro-batches of a step of `size` sequences, each as large as those of the largest batch.

    Raises:
      ValueError: the batch does not divide into such micro-batches.

    >>> microbatches_of(8, 128, 64)
    4
    """
    count, rest = divmod(size * microbatches, largest)
    if rest or not count:
        each = largest // microbatches
        raise ValueError(
            f"data.batch_schedule has batches of {size} sequences, and a micro-batch has "
            f"data.global_batch_size / layout.microbatches = {largest} / {microbatches} = {each}; "
            f"set multiples of {each}, or raise layout.microbatches"
        )
    return count
