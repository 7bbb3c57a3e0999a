"""Restores a checkpoint onto any layout, after comparing names, shapes, types and checksums."""

from collections.abc import Collection, Mapping
from typing import Any

import jax

from jaxscale.checkpoints.array_sums import array_sums
from jaxscale.checkpoints.differences import array_differences, describe_difference, listing
from jaxscale.checkpoints.errors import read_everywhere, unusable
from jaxscale.checkpoints.folder import array_signature, frozen_arrays, named_arrays, read_arrays
from jaxscale.checkpoints.tiers import Checkpoints


def restore(
    checkpoints: Checkpoints,
    step: int,
    abstract_state: Any,
    *,
    config: Mapping[str, Any] | None = None,
    part: bool = False,
    without: Collection[str] = (),
) -> Any:
    """Reads a checkpoint onto the layout of `abstract_state`, whatever layout saved it.

    Args:
      step: one of `checkpoints.steps()`.
      abstract_state: tree of `jax.ShapeDtypeStruct` with shardings; without a sharding, an array is
        read to the default device.
      config: the current config, so that an error can name the settings that changed.
      part: whether the checkpoint may have more arrays than `abstract_state`.
      without: parts of the saved state to leave out.

    Returns:
      A tree like `abstract_state`, every value bit for bit as it was saved.

    Raises:
      ValueError: names, shapes or types differ, or the checkpoint cannot be used.
      UnreadableError: the operating system does not let this process read it.
    """
    directory = checkpoints.directory
    saved = read_everywhere(
        "description of a checkpoint",
        lambda: check_fits(
            checkpoints, step, abstract_state, config=config, part=part, without=without
        ),
    )
    wanted = named_arrays(abstract_state)
    frozen = frozen_arrays(saved)
    arrays = read_everywhere(
        "read of a checkpoint", lambda: read_arrays(directory, step, wanted, frozen)
    )
    sums = array_sums(arrays, finite=False)
    wrong = [name for name in arrays if saved[name]["checksum"] != sums[name].checksum]
    if wrong:
        names = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if wrong[3:] else "")
        error = ValueError(f"bits of {names} changed since they were saved")
        raise unusable(directory, step, error)
    structure = jax.tree.structure(abstract_state)
    return jax.tree.unflatten(structure, [arrays[name] for name in wanted])


def check_fits(
    checkpoints: Checkpoints,
    step: int,
    abstract_state: Any,
    *,
    config: Mapping[str, Any] | None = None,
    part: bool = False,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """The arrays of a checkpoint by name, as its description has them; none is read. The arguments
    are those of `restore`.

    Raises:
      ValueError: names, shapes or types differ, or the checkpoint cannot be used.
    """
    description = checkpoints.description(step)
    wanted = {name: array_signature(leaf) for name, leaf in named_arrays(abstract_state).items()}
    saved = {
        name: about
        for name, about in description["arrays"].items()
        if name.partition("/")[0] not in without
    }
    if found := array_differences(saved, wanted, part=part):
        saved_config = description["metadata"].get("config", {})
        changed = describe_difference(saved_config, config) if config is not None else []
        title = f"checkpoint {step} in {checkpoints.directory} does not fit this run"
        raise ValueError(listing(title, found, changed))
    return saved
