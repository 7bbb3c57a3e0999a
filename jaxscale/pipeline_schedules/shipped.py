"""Built-in pipeline schedules, and the lookup of built-in and custom schedules by name.

To add a schedule to the package, add a file to this folder and a line to `SHIPPED`. A custom
schedule needs neither: its name is "module:RECORD".
"""

import importlib

from jaxscale.choices import did_you_mean
from jaxscale.pipeline_schedules.bidirectional import BITPIPE, CHIMERA
from jaxscale.pipeline_schedules.breadth_first import BREADTH_FIRST
from jaxscale.pipeline_schedules.dualpipe import DUALPIPE, DUALPIPE_V
from jaxscale.pipeline_schedules.gpipe import GPIPE
from jaxscale.pipeline_schedules.interleaved import INTERLEAVED
from jaxscale.pipeline_schedules.one_f_one_b import ONE_F_ONE_B
from jaxscale.pipeline_schedules.schedule import Schedule
from jaxscale.pipeline_schedules.seq1f1b import SEQ1F1B, SEQ1F1B_INTERLEAVED
from jaxscale.pipeline_schedules.zero_bubble import ZB_H1, ZB_H2, ZB_V

SHIPPED = (
    GPIPE,
    ONE_F_ONE_B,
    INTERLEAVED,
    BREADTH_FIRST,
    SEQ1F1B,
    SEQ1F1B_INTERLEAVED,
    CHIMERA,
    BITPIPE,
    ZB_H1,
    ZB_H2,
    ZB_V,
    DUALPIPE,
    DUALPIPE_V,
)

NAMES = tuple(schedule.name for schedule in SHIPPED)

SEARCHED = tuple(one.name for one in SHIPPED if not one.splits_sequences)
"""The names of those for whole sequences, which searches try."""


def is_foreign(name: str) -> bool:
    """Whether a name is "module:RECORD", a custom schedule."""
    module, colon, record = name.partition(":")
    parts = (*module.split("."), record)
    return bool(colon) and module not in NAMES and all(part.isidentifier() for part in parts)


def find_schedule(name: str) -> Schedule:
    """A built-in schedule, or a custom one, whose module is imported.

    >>> find_schedule("zb_v").needs[0].text
    'virtual_stages = 2, a V of two chunks per rank'

    Raises:
      ValueError: the name is unknown; suggests the nearest.
    """
    if is_foreign(name):
        return _import(name)
    check_known(name, "schedule")
    return SHIPPED[NAMES.index(name)]


def check_known(name: str, setting: str) -> None:
    """Checks that a built-in schedule has the name.

    Raises:
      ValueError: none has; names `setting` as the one to change.
    """
    if name in NAMES:
        return
    raise ValueError(
        f"{setting} = {name!r} is not known; it can be {', '.join(NAMES)}, a .csv file, or "
        f"module:RECORD for a custom schedule{did_you_mean(name.lower(), NAMES)}"
    )


def _import(name: str) -> Schedule:
    module, _, record = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), record)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"schedule = {name!r} cannot be imported: {error}{did_you_mean(module.lower(), NAMES)}"
        ) from None
    if not isinstance(found, Schedule):
        raise ValueError(
            f"schedule = {name!r} is of type {type(found).__name__}; it must be a "
            "jaxscale.pipeline_schedules.schedule.Schedule"
        )
    return found
