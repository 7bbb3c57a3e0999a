"""Record of a custom model's settings, from `model.family`."""

import typing

from jaxscale.config.model.settings import ModelSettings, find_make


def settings_record(family: str) -> type:
    """The settings record of a custom model: the type of its function's first parameter, or of the
    first field of its class.

    Raises:
      ValueError: it cannot be imported, or has no such record.
    """
    make = find_make(family)
    hints = typing.get_type_hints(make) if callable(make) else {}
    record = next(iter(hints.values()), None)
    if (
        not isinstance(record, type)
        or not issubclass(record, ModelSettings)
        or "__dataclass_fields__" not in vars(record)
    ):
        raise ValueError(
            f"model.family = {family!r} must be a function make(settings: YourSettings, kernels), "
            "where YourSettings is a frozen dataclass that extends jaxscale.ModelSettings, or "
            "jaxscale.ModelConfig"
        )
    for name, hint in typing.get_type_hints(record).items():
        if (typing.get_origin(hint) or hint) in (list, dict, set):
            raise ValueError(
                f"model.family = {family!r}: {record.__name__}.{name} is of type {hint}; settings "
                "must be hashable: make it a tuple"
            )
    return record
