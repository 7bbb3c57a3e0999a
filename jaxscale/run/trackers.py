"""Trackers of experiments: TensorBoard, wandb and mlflow."""

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
"""How long the end of a run waits for a server that takes none of the last numbers."""


class TrackerError(RuntimeError):
    """A tracker could not begin a run that is new; the message says which, and why."""


class Tracker(NamedTuple):
    """Where numbers are sent, besides metrics.jsonl."""

    name: str
    write: Callable[[dict[str, float], int], object]
    close: Callable[[], object]


def open_tracker(
    name: str, directory: pathlib.Path, start_step: int, config: Mapping[str, Any]
) -> Tracker:
    """One of `TRACKERS` by its name.

    Raises:
      ValueError: another name, or mlflow without MLFLOW_TRACKING_URI.
      ModuleNotFoundError: it is not installed; names the extra.
    """
    if name == "tensorboard":
        return _open_tensorboard(directory, start_step)
    if name not in TRACKERS:
        raise ValueError(f"tracker {name!r} is not known; there are {', '.join(TRACKERS)}")
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
        # Of another thread than the one that began it: mlflow would begin a second run there.
        module.log_metrics(numbers, step=step, run_id=run.info.run_id)

    return _in_background(Tracker(name, write, module.end_run))


def _in_background(tracker: Tracker) -> Tracker:
    """A tracker that no step waits for: a request to a server that is gone is tried again for
    minutes, which would look like a run in which nothing goes on."""
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
    """The file of one attempt: events, each with its length and checksums. tensorboardX's own
    writer has a thread that ends when the disk is full; the next steps would wait for it."""
    folder = directory / "tensorboard"
    folder.mkdir(exist_ok=True)
    # TensorBoard reads the files in the order of their names: one of a clock that was set back, or
    # of another host's, must not come before those of earlier attempts, which would hide it.
    parts = [path.name.split(".") for path in folder.glob("events.out.tfevents.*")]
    after = max((int(part[3]) + 1 for part in parts if part[3].isdecimal()), default=0)
    name = f"events.out.tfevents.{max(round(time.time()), after)}.{socket.gethostname()}"
    file, checksum = GrowingFile(folder / name), tensorboard_records.masked_crc32c
    proto: Any = tensorboard_events  # its classes are made when it is imported

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
    # It hides what earlier attempts wrote from this step on.
    add(step=start_step + 1, session_log=proto.SessionLog(status=proto.SessionLog.START))
    return Tracker("tensorboard", write, file.close)
