"""The messages of the control channel: between process 0 and the others, JSON on the way."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ProcessReport:
    """To process 0: one process's part of a gather."""

    topic: str
    report: Any


@dataclass(frozen=True)
class Broadcast:
    """From process 0: what it makes of a topic."""

    topic: str
    answer: Any


@dataclass(frozen=True)
class StopRequest:
    """To process 0: what asked one to stop, such as "SIGTERM", in its training loop."""

    request: str
    loop: int


@dataclass(frozen=True)
class Stopping:
    """From process 0: the process that was asked first, for all to say where they are."""

    who: int
    request: str
    loop: int


@dataclass(frozen=True)
class StepPosition:
    """To process 0: the step of one process, which waits there."""

    step: int
    loop: int


@dataclass(frozen=True)
class LastStep:
    """From process 0: the step after which all stop."""

    step: int
    loop: int


@dataclass(frozen=True)
class Overdue:
    """To process 0: one waits for too long, and wants all to be asked what they are doing."""


@dataclass(frozen=True)
class Inquiry:
    """From process 0: what are you doing?"""

    number: int


@dataclass(frozen=True)
class Activity:
    """To process 0: what one is doing, and whether for too long."""

    doing: str
    late: bool


@dataclass(frozen=True)
class Failure:
    """To process 0 and from there to all: one has failed, died or left."""

    text: str
    status: int = 1  # that all end with
    who: int | None = None  # in process 0, by default the sender
    hung: bool = False  # where the processes of a run wait for one another


@dataclass(frozen=True)
class Goodbye:
    """The last message of a process that is done."""


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
"""Answers to process 0; all others are of process 0 to all."""

_BY_NAME: dict[str, type[Message]] = {one.__name__: one for one in Message.__args__}


def encode(message: Message) -> dict[str, Any]:
    """As JSON has it."""
    return {"message": type(message).__name__, **vars(message)}


def decode(values: dict[str, Any]) -> Message:
    """From JSON.

    Raises:
      KeyError, TypeError: it is not one of our messages.
    """
    fields = {name: value for name, value in values.items() if name != "message"}
    return _BY_NAME[values["message"]](**fields)
