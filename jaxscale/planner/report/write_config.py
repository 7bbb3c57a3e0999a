"""Writes a plan as a config file that trains."""

import dataclasses
import pathlib
import shlex
from typing import Any

from jaxscale import config as configs
from jaxscale.config import Config
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig
from jaxscale.config.read_config import read_settings
from jaxscale.planner.search.plan import Plan

TEMPLATE = '''"""{headline}

Command: python -m jaxscale.train --config {path} --workdir {run}
Hardware: {devices} {hardware}.
Expected (predicted): {seconds:.3f} s per step, {mfu:.1f} % MFU, {memory:.1f} GB per device.
"""

import ml_collections


def get_config():
    """The plan for {source}."""
{sections}
    return ml_collections.ConfigDict(
        {{"model": model, "data": data, "optimizer": optimizer, "layout": layout, "run": run}}
    )
'''


def write_plan(path: pathlib.Path, plan: Plan, source: str) -> None:
    """Writes a config that trains with a plan: the settings not at their defaults, and the layout.

    Args:
      source: the file that the model came from.
    """
    path.write_text(config_text(path, plan, source))


def config_text(path: pathlib.Path, plan: Plan, source: str) -> str:
    """The text of the file."""
    given, defaults = configs.to_dict(plan.config), configs.to_dict(Config())
    # Each family has separate defaults, and settings that others do not have.
    family = plan.config.model.family
    usual = {"family": defaults["model"]["family"]}
    defaults["model"] = read_settings(ModelConfig(family=family)) | usual
    # Every axis is written, so that another number of devices is refused.
    defaults["layout"] = dict.fromkeys(dataclasses.asdict(Layout()))
    sections = "\n".join(
        _section(name, {k: v for k, v in leaves.items() if v != defaults[name].get(k)})
        for name, leaves in given.items()
    )
    return TEMPLATE.format(
        headline=f"{pathlib.Path(source).stem.split(':')[0]} on {plan.layout.num_devices} "
        f"{plan.cluster.name}.",
        path=shlex.quote(str(path)),
        run=shlex.quote(f"runs/{path.stem}"),
        devices=plan.layout.num_devices,
        hardware=plan.cluster.name,
        seconds=plan.step_seconds,
        mfu=100 * plan.mfu,
        memory=plan.memory_bytes / 1e9,
        source=source,
        sections=sections,
    )


def _section(name: str, leaves: dict[str, Any]) -> str:
    lines = [f"    {name} = ml_collections.ConfigDict()"]
    lines += [f"    {name}.{key} = {value!r}" for key, value in leaves.items()]
    return "\n".join(lines) + "\n"
