"""Layout and engine of a run, or of a command that reads a run, on the local devices."""

import dataclasses
import logging
import pathlib
from typing import Any

import jax
from etils import epy

from jaxscale import config as configs
from jaxscale.choices import check_kind
from jaxscale.config import Config
from jaxscale.config.layout import Layout, resolve_sizes
from jaxscale.config.schedule_spec import AUTO
from jaxscale.distributed.initialize import num_devices
from jaxscale.formatting import gigabytes
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import Engine, make_engine

with epy.lazy_imports():  # twenty modules, needed for layout = "auto" only
    from jaxscale.planner import auto_layout
    from jaxscale.planner.report import text_report

log = logging.getLogger("jaxscale")


def open_engine(
    config: Config, workdir: pathlib.Path | None = None, **own: Any
) -> tuple[Config, Engine]:
    """Resolves the layout for the local devices and builds the engine. Compiles nothing yet.

    Args:
      config: its layout may have a size of -1 or be "auto".
      workdir: folder of a run that may have started; one with layout = "auto" keeps its first
        choice.
      own: `model`, `optimizer` and `rules` of `make_engine`.

    Returns:
      The config with its layout resolved, and the engine.

    Raises:
      ValueError: a layout that does not fit the devices, or as `make_engine`.

    Examples:
      >>> config, engine = jaxscale.open_engine(jaxscale.load("tiny"))
      >>> config.layout.data == jax.device_count()
      True
    """
    check_kind("config", config, Config, configs.CONFIG_ADVICE)
    config = resolve_layout(config, workdir)
    return config, make_engine(config, make_mesh(config.layout), **own)


def resolve_layout(config: Config, workdir: pathlib.Path | None = None) -> Config:
    """The config with a layout for the available devices: chosen by the planner if it is "auto",
    and without sizes of -1.

    Args:
      workdir: folder of a run that may have started; with layout = "auto" it keeps its layout.
    """
    config = planned(config, workdir)
    layout = _sized(config.layout)
    config = dataclasses.replace(config, layout=layout)
    return _with_choices(config, workdir) if layout.undecided else config


def _sized(layout: Layout) -> Layout:
    """`resolve_sizes` for the available devices; the advice for CPUs is to raise their number."""
    count = num_devices()
    try:
        return resolve_sizes(layout, count)
    except ValueError as error:
        if layout.auto or jax.default_backend() != "cpu" or jax.process_count() > 1:
            raise
        raise ValueError(
            f"{error}; or start with JAX_NUM_CPU_DEVICES={layout.least_devices} in the environment"
        ) from None


def planned(config: Config, workdir: pathlib.Path | None = None) -> Config:
    """The config with the planner's layout, if layout is "auto"."""
    if not config.layout.auto:
        return config
    if layout := _layout_begun(config, workdir):
        log.info(f"layout = 'auto': {text_report.layout_text(layout)}, as when the run started")
        return dataclasses.replace(config, layout=layout)
    device = jax.devices()[0]
    plan = auto_layout.choose_layout(
        config, device.device_kind, device.platform, jax.device_count()
    )
    log.info(
        f"layout = 'auto' chose {text_report.layout_text(plan.layout)}: predicted "
        f"{plan.step_seconds:.4g} s per step and {gigabytes(plan.memory_bytes)} of "
        f"{gigabytes(plan.limit_bytes)} per device"
    )
    return plan.config


def _with_choices(config: Config, workdir: pathlib.Path | None) -> Config:
    """The config with the planner's choice of the settings that are "auto", or that of a run in
    this folder on the same layout."""
    begun, names = _layout_begun(config, workdir), config.layout.undecided
    if begun and dataclasses.replace(begun, **dict.fromkeys(names, AUTO)) == config.layout:
        for name in names:
            log.info(f"layout.{name} = 'auto': {getattr(begun, name)}, as when the run started")
        return dataclasses.replace(config, layout=begun)
    device = jax.devices()[0]
    cluster = auto_layout.devices_here(device.device_kind, device.platform, jax.device_count())
    config, line = auto_layout.choose_settings(config, cluster, auto_layout.memory_here(cluster))
    log.info(line)
    return config


def _layout_begun(config: Config, workdir: pathlib.Path | None) -> Layout | None:
    """The layout in the config.json of a run that resumes, or None for a new run. Code from outside
    the package is imported only if the present config also names it.

    Raises:
      ValueError: the file is not the config of a run.
    """
    if workdir is None or not (workdir / "config.json").is_file():
        return None
    sections, now = configs.read_sections(workdir / "config.json"), configs.to_dict(config)
    names = (("model", "family"), ("layout", "schedule"))
    same = all(sections.get(part, {}).get(key) == now[part].get(key) for part, key in names)
    return configs.from_dict(sections, trust_foreign=same).layout


def for_evaluation(config: Config) -> Config:
    """The config for a command that only evaluates. If the training batch does not divide over the
    available devices, each evaluates about a micro-batch of sequences at a time."""
    layout = _sized(config.layout)
    batch, shards = config.data.global_batch_size, layout.batch_shards
    if layout.pipeline > 1 or batch % (shards * layout.microbatches) == 0:
        return config
    each = max(1, round(batch / layout.microbatches / shards))
    log.info(f"evaluating {each * shards} sequences at a time")
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, global_batch_size=each * shards),
        layout=dataclasses.replace(layout, microbatches=1, overlap_experts=False),
    )


def for_sampling(config: Config) -> Config:
    """The config for a command that only samples, without batches, schedule and training attention,
    whose settings need not fit the available devices.

    Pipeline ranks become fsdp ranks if d_model divides, else data ranks.
    """
    layout = _sized(config.layout)
    if layout.pipeline > 1:
        ranks = layout.tensor_rows * layout.zero_ranks * layout.pipeline
        axis = "data" if config.model.d_model % ranks else "fsdp"
        size = getattr(layout, axis) * layout.pipeline
        log.info(
            f"sampling without a pipeline: using layout.{axis} = {size} in place of "
            f"layout.pipeline = {layout.pipeline}"
        )
        without = {"pipeline": 1, "remat": "none", "zero_stage": 3, axis: size}
        layout = dataclasses.replace(layout, **without)
    length = 2 * layout.context * layout.tensor
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, attention="auto"),
        data=dataclasses.replace(
            config.data,
            global_batch_size=layout.batch_shards,
            seq_len=length,
            target_len=length if config.data.target_len else 0,
        ),
        layout=dataclasses.replace(layout, microbatches=1, overlap_experts=False),
    )
