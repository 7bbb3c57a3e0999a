"""Experiment trackers: TensorBoard, wandb and mlflow."""

import importlib
import math
import os
import pathlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etils import epy

from jaxscale.storage.durable import GrowingFile

with epy.lazy_imports():
    import tensorboardX.proto.event_pb2 as tensorboard_events
    import tensorboardX.record_writer as tensorboard_records
    import tensorboardX.summary as tensorboard_summary

TRACKERS = ("tensorboard", "wandb", "mlflow")

CLOSE_SECONDS = 30.0
"""The longest wait at the end of a run for a server that accepts nothing."""


class TrackerError(RuntimeError):
    """A tracker could not start at the begin of a run; the message has its name and the reason."""


class Tracker(NamedTuple):
    """A destination of metrics in addition to metrics.jsonl."""

    name: str
    write: Callable[[dict[str, float], int], object]
    close: Callable[[], object]


def open_tracker(
    name: str, directory: pathlib.Path, start_step: int, config: Mapping[str, Any]
) -> Tracker:
    """Opens one of `TRACKERS` by its name.

    Raises:
      ValueError: another name, or mlflow without MLFLOW_TRACKING_URI.
      ModuleNotFoundError: it is not installed; names the extra.
    """
    if name == "tensorboard":
        return _open_tensorboard(directory, start_step)
    if name not in TRACKERS:
        raise ValueError(f"tracker {name!r} is not known; it can be {', '.join(TRACKERS)}")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"tracker {name!r} is not installed: pip install 'jaxscale[{name}]'"
        ) from error
    identifier = directory / f"{name}_run"
    known = identifier.read_text().strip() if identifier.exists() else None
    if name == "wandb":
        run = module.init(
            dir=directory,
            name=directory.resolve().name,
            id=known,
            resume="allow",
            config=dict(config),
        )
        identifier.write_text(run.id)
        return Tracker(name, lambda numbers, step: run.log(numbers, step=step), run.finish)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        raise ValueError(
            "tracker 'mlflow' needs a server: set MLFLOW_TRACKING_URI, such as http://HOST:5000"
        )
    run = module.start_run(run_id=known, run_name=None if known else directory.resolve().name)
    identifier.write_text(run.info.run_id)
    if not known:
        module.log_dict(dict(config), "config.json")

    def write(numbers: dict[str, float], step: int) -> None:
        # With run_id: mlflow would start a second run in a thread other than start_run's.
        module.log_metrics(numbers, step=step, run_id=run.info.run_id)

    return _in_background(Tracker(name, write, module.end_run))


def _in_background(tracker: Tracker) -> Tracker:
    """A tracker that writes in a thread: a request to a lost server is retried for minutes, which
    the watchdog would take for a hang."""
    waiting: queue.SimpleQueue[tuple[dict[str, float], int] | None] = queue.SimpleQueue()
    failed: list[Exception] = []

    def run() -> None:
        try:
            while item := waiting.get():
                tracker.write(*item)
        except Exception as error:  # of any library
            failed.append(error)

    thread = threading.Thread(target=run, name=tracker.name, daemon=True)
    thread.start()

    def write(numbers: dict[str, float], step: int) -> None:
        if failed:
            raise failed[0]
        waiting.put((numbers, step))

    def close() -> None:
        waiting.put(None)
        while thread.is_alive():
            left = waiting.qsize()
            thread.join(CLOSE_SECONDS)
            if thread.is_alive() and waiting.qsize() == left:
                raise TimeoutError(f"no answer in {CLOSE_SECONDS:.0f} s")
        if failed:
            raise failed[0]
        tracker.close()

    return Tracker(tracker.name, write, close)


def _open_tensorboard(directory: pathlib.Path, start_step: int) -> Tracker:
    """The event file of one attempt: records with length and checksums. tensorboardX's writer is
    not used: its thread dies on a full disk, and the next steps would block."""
    folder = directory / "tensorboard"
    folder.mkdir(exist_ok=True)
    # TensorBoard reads files in the order of their names, which have the time: with a clock that
    # was set back, or another host's, earlier attempts would sort later and hide this one.
    parts = [path.name.split(".") for path in folder.glob("events.out.tfevents.*")]
    after = max((int(part[3]) + 1 for part in parts if part[3].isdecimal()), default=0)
    name = f"events.out.tfevents.{max(round(time.time()), after)}.{socket.gethostname()}"
    file, checksum = GrowingFile(folder / name), tensorboard_records.masked_crc32c
    proto: Any = tensorboard_events  # protobuf makes its classes at import, unseen by pyright

    def add(**event: Any) -> None:
        data = proto.Event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = (struct.pack("<I", checksum(part)) for part in (length, data))
        file.add(length + next(sums) + data + next(sums))

    def write(numbers: dict[str, float], step: int) -> None:
        values = [
            tensorboard_summary.scalar(name, value).value[0]
            for name, value in numbers.items()
            if math.isfinite(value)
        ]
        add(step=step, summary=tensorboard_summary.Summary(value=values))

    add(file_version="brain.Event:2")
    # A START event hides earlier attempts' records from this step on.
    add(step=start_step + 1, session_log=proto.SessionLog(status=proto.SessionLog.START))
    return Tracker("tensorboard", write, file.close)
