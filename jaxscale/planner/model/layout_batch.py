"""A batch of layouts: integer settings are arrays, other settings are common to all."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxscale.config.layout import Layout
from jaxscale.sharding.model_trace import Ints

INTEGER_FIELDS = tuple(one.name for one in dataclasses.fields(Layout) if one.type is int)
SETTINGS = tuple(one.name for one in dataclasses.fields(Layout) if one.type is not int)
"""Fields that all layouts of a batch share."""


@dataclass(frozen=True)
class LayoutBatch(Layout):
    """N layouts: each integer of `Layout` is an int or int [N]. Nothing is checked."""

    data: Ints = 1

    def __post_init__(self) -> None:
        pass

    def __len__(self) -> int:
        arrays = [value.size for value in vars(self).values() if isinstance(value, np.ndarray)]
        return max(arrays, default=1)

    def take(self, index: Any) -> Self:
        """The layouts of an index or a mask."""
        count = len(self)
        taken: dict[str, Any] = {
            name: np.broadcast_to(value, (count,))[index]
            for name, value in vars(self).items()
            if isinstance(value, np.ndarray)
        }
        return dataclasses.replace(self, **taken)

    def layout(self, n: int) -> Layout:
        """The n-th layout.

        Raises:
          ValueError: `Layout` refuses its fields.
        """
        one: dict[str, Any] = {name: getattr(self, name) for name in SETTINGS}
        for name in INTEGER_FIELDS:
            one[name] = int(np.broadcast_to(getattr(self, name), (len(self),))[n])
        return Layout(**one)


def stack_layouts(layouts: Sequence[Layout]) -> LayoutBatch:
    """A batch of layouts, or of several batches, with the other settings of the first."""

    def size(one: Layout) -> int:
        return len(one) if isinstance(one, LayoutBatch) else 1

    integers: dict[str, Any] = {
        name: np.concatenate([np.broadcast_to(getattr(one, name), size(one)) for one in layouts])
        for name in INTEGER_FIELDS
    }
    return LayoutBatch(**{name: getattr(layouts[0], name) for name in SETTINGS}, **integers)
