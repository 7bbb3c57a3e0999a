"""Signal handling: SIGINT and SIGTERM stop a run after the current step, with a checkpoint."""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator

log = logging.getLogger("jaxscale")


@contextlib.contextmanager
def held_signals() -> Iterator[Callable[[], int]]:
    """Defers SIGINT and SIGTERM; yields a function that returns the number received, or 0."""
    numbers = [0]

    def note(number, frame):
        numbers[0] = number
        log.warning(f"{signal.Signals(number).name}: finishing the step, then saving ...")
        # A second one gets the previous handler, and acts at once.
        signal.signal(number, before[number])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: numbers[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
