"""Signals that end a run: SIGINT and SIGTERM, held until a step is done and saved."""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator

log = logging.getLogger("jaxscale")


@contextlib.contextmanager
def held_signals() -> Iterator[Callable[[], int]]:
    """Holds SIGINT and SIGTERM back until the loop asks; the number received, or 0."""
    numbers = [0]

    def note(number, frame):
        numbers[0] = number
        log.warning(f"{signal.Signals(number).name}: finishing the step, then saving ...")
        # A second one acts at once.
        signal.signal(number, before[number])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: numbers[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
