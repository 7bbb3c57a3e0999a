"""The compiled steps of a run: one for each batch size of `data.batch_schedule`, and with
`run.noise_every` a second one for each, which measures the noise scale."""

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import numpy as np

from jaxscale.batch import ShardedBatch
from jaxscale.config import Config
from jaxscale.config.batch_schedule import microbatches_of
from jaxscale.data.dataset import Examples
from jaxscale.distributed import phases
from jaxscale.formatting import duration, human_bytes
from jaxscale.run.compilation_cache import programs_read
from jaxscale.run.evaluation import device_batches
from jaxscale.training.engine import Engine, make_engine
from jaxscale.training.step import StepMetrics, TrainState

log = logging.getLogger("jaxscale")

Step = Callable[[TrainState, ShardedBatch], tuple[TrainState, StepMetrics]]
Engines = Mapping[int, Engine]
"""The engine of each batch size."""


def open_engines(engine: Engine, own: Mapping[str, Any]) -> Engines:
    """The engines of all batch sizes of a run: smaller batches have fewer micro-batches, of the
    same shape.

    Args:
      engine: of the largest batch.
      own: `model`, `optimizer` and `rules` of `make_engine`.

    Raises:
      ValueError: a batch that does not divide into micro-batches, or for which a pipeline would
        split the layers in another way.
    """
    data = engine.config.data
    configs = {size: smaller_config(engine.config, size) for _, size in data.batch_schedule[:-1]}
    made = {size: make_engine(config, engine.mesh, **own) for size, config in configs.items()}
    layers = engine.placement.layer_of_row
    for size, other in made.items():
        if any(
            not np.array_equal(other.placement.layer_of_row[name], layers[name]) for name in layers
        ):
            raise ValueError(
                f"data.batch_schedule has batches of {size} sequences, for whose "
                f"{other.layout.microbatches} micro-batches the pipeline splits the layers in "
                "another way than for the largest; set the layers of each stage, such as "
                "layout.schedule = '1f1b:3,2,2,1'"
            )
    return {**made, data.global_batch_size: engine}


def smaller_config(config: Config, size: int) -> Config:
    """The config of steps of `size` sequences.

    Raises:
      ValueError: they do not divide into micro-batches.
    """
    data, layout = config.data, config.layout
    count = microbatches_of(layout.microbatches, data.global_batch_size, size)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, global_batch_size=size, batch_schedule=()),
        layout=dataclasses.replace(layout, microbatches=count),
    )


def program_rows(engine: Engine) -> list[tuple[str, str]]:
    """The rows of a layout's report about batch sizes and the noise scale."""
    config, rows = engine.config, []
    data, layout = config.data, config.layout
    if data.batch_schedule:
        sizes = [
            f"{size} sequences in {smaller_config(config, size).layout.microbatches} micro-batches "
            f"after step {step}"
            for step, size in data.batch_schedule
        ]
        rows.append(("batches", ", ".join(sizes)))
    if every := config.run.noise_every:
        count = layout.batch_shards * layout.microbatches
        tokens = data.tokens_per_step // count
        cost = f"{2 / tokens:.2g} FLOPs a parameter and token, next to 6"
        rows.append(
            (
                "noise scale",
                f"of {count} small batches of {tokens} tokens, in a second program for steps that "
                f"are multiples of {every}: {cost}, and a reading of each one's gradients",
            )
        )
    return rows


def training_batches(
    engines: Engines, config: Config, train: Examples, begin: int
) -> Generator[ShardedBatch]:
    """The batches of the steps after `begin`, without end."""
    data = config.data
    switches = [step for step, _ in data.batch_schedule if step > begin]
    for first, end in zip([begin, *switches], [*switches, None]):
        size = data.sequences_after(first)
        stream = device_batches(
            engines[size],
            train,
            size,
            start_step=first,
            first_example=data.examples_of(first),
            workers=data.workers,
        )
        with contextlib.closing(stream):
            yield from itertools.islice(stream, None if end is None else end - first)


class StepPrograms:
    """The compiled steps of a run, each compiled before its first use.

    Args:
      config: of the run.
      first: the compiled step after `begin`, which does not measure.

    Attributes:
      engines: of each batch size.
    """

    def __init__(self, engines: Engines, config: Config, first: Step, begin: int) -> None:
        self.engines = engines
        self._data, self._every = config.data, config.run.noise_every
        self._made = {(config.data.sequences_after(begin), False): first}
        self._used = first

    def of(self, step: int, pause: Callable[[], contextlib.AbstractContextManager]) -> Step:
        """The program of a step.

        Args:
          step: its number, from 1.
          pause: a context for a compilation, in which no step is timed.
        """
        measures = self._every > 0 and step % self._every == 0
        key = self._data.sequences_after(step - 1), measures
        if key not in self._made:
            engine = self.engines[key[0]]
            with pause(), jax.transfer_guard("allow"):
                phases.enter_phase("compiling a step", step)
                self._made[key] = compile_step(engine, lower_step(engine, measures=measures))
        self._used = self._made[key]
        return self._used

    def as_text(self) -> str:
        """The compiled text of the last program that was used."""
        return self._used.as_text()  # pyright: ignore[reportFunctionMemberAccess]


def lower_step(engine: Engine, *, measures: bool = False) -> jax.stages.Lowered:
    """Traces the train step, or the one that also measures the noise scale."""
    step = engine.measure if measures else engine.step
    assert step, "only a run with `run.noise_every` measures"
    return step.lower(engine.abstract_state, engine.abstract_batch)


def compile_step(engine: Engine, lowered: jax.stages.Lowered | None = None) -> Step:
    """Compiles the train step; logs the time and the memory of the step.

    Args:
      lowered: the step, if already traced.
    """
    log.info("compiling the train step ...")
    begin, read = time.monotonic(), programs_read()
    lowered = lowered or lower_step(engine)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory
    done = "compiled" if programs_read() == read else "read from the compilation cache"
    log.info(
        f"{done} in {duration(time.monotonic() - begin)}; each device stores "
        f"{human_bytes(memory.argument_size_in_bytes)} between steps and needs "
        f"{human_bytes(memory.temp_size_in_bytes)} more during a step"
    )
    return compiled
