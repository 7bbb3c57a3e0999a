"""`python -m jaxscale.plan --measure`: begins with the planner's best, measures, and tells."""

import argparse
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxscale.autotune import results, search
from jaxscale.config import Config
from jaxscale.layout import Layout, resolve_sizes
from jaxscale.planner.auto_layout import devices_here
from jaxscale.planner.search.search import Query, search_layouts

log = logging.getLogger("jaxscale")

PLANNED = 6
"""Of the planner's best, with which a search begins."""


def measure(options: argparse.Namespace, config: Config, pins: Mapping[str, Any]) -> int:
    """The command, from `--trials`, `--storage`, `--trial_seconds` and `--json`.

    Raises:
      ValueError: no devices, no layouts, or a file that holds something else.
    """
    stem = pathlib.Path(options.config.partition(":")[0]).stem
    storage = options.storage or pathlib.Path("runs") / stem / "layouts.db"
    devices = search.find_devices()
    log.info(f"{devices.devices} x {devices.kind}; trials are kept in {storage}")
    first = [*config_layout(config, devices), *planner_layouts(config, devices, pins)]

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
        log.info("stopped; the same command goes on from here")
        return 130
    shares = search.importances(search.open_study(config, devices, storage, pins=pins))
    log.info("\n" + results.search_summary(trials, shares, devices))
    picture = storage.with_suffix(".png")
    results.save_png(picture, trials, shares)
    log.info(f"\nwrote {picture}; the same command with a larger --trials goes on")
    if options.json:
        options.json.write_text(json.dumps(results.search_json(trials, shares), indent=2) + "\n")
    return 0


def config_layout(config: Config, devices: search.Devices) -> list[Layout]:
    """The layout of the config, where it says one for so many devices."""
    try:
        return [] if config.layout.auto else [resolve_sizes(config.layout, devices.devices)]
    except ValueError as error:
        log.info(f"the config's own layout is left out: {error}")
        return []


def planner_layouts(
    config: Config, devices: search.Devices, pins: Mapping[str, Any]
) -> list[Layout]:
    """The planner's best on these devices; none where nothing is known of them."""
    pins = {**pins, "offload": config.layout.offload}
    try:
        cluster = devices_here(devices.kind, devices.platform, devices.devices)
        return search_layouts(Query(config, cluster, pins), PLANNED).layouts
    except ValueError as error:
        log.info(f"without the planner's best: {error}")
        return []
