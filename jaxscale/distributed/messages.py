"""Message types of the control channel, sent as JSON between process 0 and the others."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ProcessReport:
    """To process 0: one process's report for a gather."""

    topic: str
    report: Any


@dataclass(frozen=True)
class Broadcast:
    """From process 0: its answer on a topic."""

    topic: str
    answer: Any


@dataclass(frozen=True)
class StopRequest:
    """To process 0: a request to stop, such as "SIGTERM", and the number of the training loop."""

    request: str
    loop: int


@dataclass(frozen=True)
class Stopping:
    """From process 0: the process that was asked first to stop; all answer with their step."""

    who: int
    request: str
    loop: int


@dataclass(frozen=True)
class StepPosition:
    """To process 0: the step at which one process waits for the decision."""

    step: int
    loop: int


@dataclass(frozen=True)
class LastStep:
    """From process 0: the step after which all stop."""

    step: int
    loop: int


@dataclass(frozen=True)
class Overdue:
    """To process 0: a process has waited too long; process 0 asks all what they are doing."""


@dataclass(frozen=True)
class Inquiry:
    """From process 0: the question what each process is doing."""

    number: int


@dataclass(frozen=True)
class Activity:
    """To process 0: the activity of one process, and whether it takes too long."""

    doing: str
    late: bool


@dataclass(frozen=True)
class Failure:
    """To process 0, which forwards it to all: a process has failed, died or left."""

    text: str
    status: int = 1  # exit status of all processes
    who: int | None = None  # None: the sender, filled in by process 0
    hung: bool = False  # the processes wait for one another


@dataclass(frozen=True)
class Goodbye:
    """The last message of a process that has finished."""


Message = (
    ProcessReport
    | Broadcast
    | StopRequest
    | Stopping
    | StepPosition
    | LastStep
    | Overdue
    | Inquiry
    | Activity
    | Failure
    | Goodbye
)

UPWARD = StepPosition | Activity
"""Replies that go to process 0; every other reply is a broadcast of process 0."""

_BY_NAME: dict[str, type[Message]] = {one.__name__: one for one in Message.__args__}


def encode(message: Message) -> dict[str, Any]:
    """The JSON object of a message."""
    return {"message": type(message).__name__, **vars(message)}


def decode(values: dict[str, Any]) -> Message:
    """The message of a JSON object.

    Raises:
      KeyError, TypeError: the object is not a message of this channel.
    """
    fields = {name: value for name, value in values.items() if name != "message"}
    return _BY_NAME[values["message"]](**fields)
