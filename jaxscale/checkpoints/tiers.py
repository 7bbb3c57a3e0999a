"""Checkpoints here and at the run's address: the newest intact one of both is used."""

import logging
import time
from collections.abc import Sequence

import jax

from jaxscale.checkpoints.folder import DamagedError
from jaxscale.checkpoints.save import Checkpoints
from jaxscale.distributed import processes
from jaxscale.formatting import duration
from jaxscale.storage import durable
from jaxscale.storage import local_tier as tiers
from jaxscale.storage.object_store import StoreError

log = logging.getLogger("jaxscale")

ATTEMPTS = 5
"""How often a reader tries to fetch, while the run that trains removes checkpoints."""


def all_steps(checkpoints: Checkpoints) -> list[int]:
    """The steps with a checkpoint in either tier, in order."""
    return sorted({*checkpoints.steps(), *steps_at_address(checkpoints)})


def steps_at_address(checkpoints: Checkpoints) -> list[int]:
    """The steps with a checkpoint at the run's address; none where it has no address."""
    store = tiers.store_of(checkpoints.directory.parent)
    return tiers.stored_steps(store) if store else []


def make_intact(checkpoints: Checkpoints, step: int) -> None:
    """Brings a checkpoint from the run's address where it is missing here, or looks damaged. Its
    arrays are not compared: that is done when they are read.

    Raises:
      DamagedError: it is not intact in either tier.
    """
    problem = None
    if step in checkpoints.steps():
        try:
            checkpoints.metadata(step)
            return
        except DamagedError as error:
            problem = error
    if not _fetched(checkpoints, step, problem):
        assert problem
        raise problem


def fetch_everywhere(checkpoints: Checkpoints, step: int, problem: DamagedError) -> None:
    """Replaces a checkpoint whose arrays are damaged by that at the run's address; every process
    makes the same call.

    Raises:
      DamagedError: `problem`, where there is no other one.
    """
    if tiers.store_of(checkpoints.directory.parent) is None:
        raise problem
    done = jax.process_index() == 0 and _fetched(checkpoints, step, problem)
    if not processes.from_first("checkpoint fetched", done):
        raise problem


def bring_newest(checkpoints: Checkpoints) -> None:
    """For a reader: the newest intact checkpoint of both tiers is then the newest one here, unless
    a run is training here.

    Raises:
      StoreError: the run's address cannot be read.
    """
    with tiers.fetching(checkpoints.directory.parent) as store:
        if store is None:
            return
        for attempt in range(1, ATTEMPTS + 1):
            stored = tiers.stored_steps(store)
            try:
                _bring_first(checkpoints, sorted({*checkpoints.steps(), *stored}, reverse=True))
                break
            except StoreError:
                if attempt == ATTEMPTS or stored == tiers.stored_steps(store):
                    raise
        newest = max(checkpoints.steps(), default=0)
        if newest in stored:
            for step in checkpoints.steps():
                # What did not come from there may still be to be put there.
                copied = (checkpoints.directory / str(step) / tiers.FETCHED).exists()
                if copied and step not in stored:
                    checkpoints.remove(step)


def bring(checkpoints: Checkpoints, step: int) -> None:
    """For a reader: a checkpoint that only the run's address has is then here, too."""
    with tiers.fetching(checkpoints.directory.parent) as store:
        if store and step in all_steps(checkpoints):
            make_intact(checkpoints, step)


def _bring_first(checkpoints: Checkpoints, steps: Sequence[int]) -> None:
    for step in steps:
        try:
            make_intact(checkpoints, step)
            return
        except DamagedError as error:
            log.warning(f"warning: {error}")


def set_aside_everywhere(checkpoints: Checkpoints, step: int) -> str:
    """Renames a damaged checkpoint in both tiers; the new names."""
    names = []
    if step in checkpoints.steps():
        names.append(str(checkpoints.set_aside(step)))
    store = tiers.store_of(checkpoints.directory.parent)
    if store and step in tiers.stored_steps(store):
        names.append(tiers.set_aside_stored(store, step))
    return " and ".join(names)


def _fetched(checkpoints: Checkpoints, step: int, problem: DamagedError | None) -> bool:
    """Whether a checkpoint came from the run's address, in place of a damaged one.

    Args:
      problem: what is wrong with the one here; None where there is none.

    Raises:
      DamagedError: that at the address is damaged, and there is none here.
    """
    store, begin = tiers.store_of(checkpoints.directory.parent), time.monotonic()
    if store is None or step not in tiers.stored_steps(store):
        return False
    try:
        path = tiers.fetch_checkpoint(store, checkpoints.directory, step)
    except ValueError as error:
        message = f"checkpoint {step} at {store.address} cannot be used ({error})"
        if problem is None:
            raise DamagedError(message, str(error)) from error
        log.warning(f"warning: {message}")
        return False
    why = "not here"
    if step in checkpoints.steps():
        assert problem
        why = f"damaged here ({problem.reason}), where it is now {checkpoints.set_aside(step)}"
    durable.move(path, checkpoints.directory / str(step))
    seconds = duration(time.monotonic() - begin)
    log.info(f"checkpoint {step} is {why}; fetched from {store.address} in {seconds}")
    return True
