"""Texts of a pipeline's settings: schedule, and lengths of segments."""

import functools
import re
from dataclasses import dataclass

from jaxscale.pipeline_schedules.shipped import check_known, is_foreign

AUTO = "auto"
"""As a schedule: the planner chooses the schedule and every setting left at its default, at
start-up. As `remat` or `head`: it chooses these only."""


@dataclass(frozen=True)
class ScheduleSpec:
    """Pipeline schedule and its options, `Layout.schedule` parsed.

    >>> str(parse_schedule("1f1b:fused:3,2,2"))
    '1f1b:fused:3,2,2'
    """

    name: str  # for `pipeline.orders.make_order`
    fused: bool = False  # the backward pass is one operation
    layers: tuple[int, ...] = ()  # of each virtual stage; (): chosen by the engine

    def __str__(self) -> str:
        layers = [",".join(map(str, self.layers))] if self.layers else []
        return ":".join([self.name, *["fused"] * self.fused, *layers])


@functools.cache
def parse_schedule(schedule: str) -> ScheduleSpec:
    """Reads "1f1b", "1f1b:fused:3,2,2", "FILE.csv" or "module:RECORD".

    A foreign module is not imported here (`config.from_dict` does that).

    Raises:
      ValueError: no such schedule, or no such option.
    """
    name, *choices = schedule.split(":")
    if choices and choices[0] != "fused" and is_foreign(f"{name}:{choices[0]}"):
        name = f"{name}:{choices.pop(0)}"
    elif schedule != AUTO and not name.endswith(".csv"):
        check_known(name, "layout.schedule")
    fused, layers = False, ()
    for choice in choices:
        if choice == "fused":
            fused = True
        elif re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", choice, re.ASCII):
            layers = tuple(map(int, choice.split(",")))
        else:
            raise ValueError(
                f"layout.schedule = {schedule!r}: {choice!r} is not an option; after the name give "
                ":fused, for a backward pass in one operation, or the layers of each stage, at "
                "least one, such as :3,2,2,1"
            )
    return ScheduleSpec(name, fused, layers)


def parse_lengths(text: str) -> tuple[int, ...]:
    """Reads `layout.segment_lengths`.

    >>> parse_lengths("3072,1024")
    (3072, 1024)

    Raises:
      ValueError: not whole numbers above 0.
    """
    words = text.split(",") if text else []
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise ValueError(
            f"layout.segment_lengths = {text!r}; give a whole number of tokens above 0 for each "
            "segment, such as '3072,2048,2048,1024', or '' for equal lengths"
        )
    return tuple(map(int, words))
