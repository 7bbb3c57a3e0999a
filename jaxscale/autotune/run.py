"""`python -m jaxscale.plan --measure`: measured search from the planner's best layouts."""

import argparse
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxscale.autotune import results, search
from jaxscale.autotune.search_space import FIELDS, candidate_of
from jaxscale.choices import check_choice
from jaxscale.config import Config
from jaxscale.config.layout import Layout, resolve_sizes
from jaxscale.planner.auto_layout import devices_here
from jaxscale.planner.search.search import search_layouts
from jaxscale.planner.search.space import Query

log = logging.getLogger("jaxscale")

PLANNED = 6
"""Number of the planner's best layouts that a search starts from."""


def measure(options: argparse.Namespace, config: Config, pins: Mapping[str, Any]) -> int:
    """Runs the command, with `--trials`, `--storage`, `--trial_seconds` and `--json`; returns the
    exit status, 1 if no layout could be measured.

    Raises:
      ValueError: no devices, no layouts, or a storage file of another search.
    """
    stem = pathlib.Path(options.config.partition(":")[0]).stem
    storage = options.storage or pathlib.Path("runs") / stem / "layouts.db"
    for name in pins:  # before the process that finds the devices starts
        check_choice("--pin", name, FIELDS)
    devices = search.find_devices()
    log.info(f"{devices.devices} x {devices.kind}; trials are stored in {storage}")
    first = [*config_layout(config, devices, pins), *planner_layouts(config, devices, pins)]

    def report(trial: search.Trial, before: list[search.Trial]) -> None:
        log.info(results.trial_line(trial, before, options.trials))

    try:
        trials = search.search_by_measuring(
            config,
            devices,
            trials=options.trials,
            storage=storage,
            first=first,
            pins=pins,
            limit_seconds=options.trial_seconds,
            report=report,
        )
    except KeyboardInterrupt:
        log.info("stopped; the same command resumes the search")
        return 130
    shares = search.importances(search.open_study(config, devices, storage, pins=pins))
    log.info("\n" + results.search_summary(trials, shares, devices, config.layout))
    picture = storage.with_suffix(".png")
    results.save_png(picture, trials, shares)
    log.info(f"\nwrote {picture}; a larger --trials continues the search")
    if options.json:
        options.json.write_text(json.dumps(results.search_json(trials, shares), indent=2) + "\n")
    return 0 if results.ranked(trials) else 1


def config_layout(config: Config, devices: search.Devices, pins: Mapping[str, Any]) -> list[Layout]:
    """The layout of the config, if it fits the number of devices and the pins; else []."""
    if config.layout.auto:
        return []
    try:
        layout = resolve_sizes(config.layout, devices.devices)
        chosen = candidate_of(layout)
        for name, value in pins.items():
            if chosen[name] not in (value, None):
                raise ValueError(f"it has {name} = {chosen[name]}, and --pin has {value}")
    except ValueError as error:
        log.info(f"without the config's layout: {error}")
        return []
    return [layout]


def planner_layouts(
    config: Config, devices: search.Devices, pins: Mapping[str, Any]
) -> list[Layout]:
    """The planner's best layouts; [] if the devices are not in `hardware.csv`."""
    # Segments are no setting of the search by measuring.
    pins = {**pins, "offload": config.layout.offload, "sequence_chunks": 1}
    try:
        cluster = devices_here(devices.kind, devices.platform, devices.devices)
        return search_layouts(Query(config, cluster, pins), PLANNED).layouts
    except ValueError as error:
        log.info(f"without the planner's layouts: {error}")
        return []
