"""This project's train step on synthetic tokens, as a subject of `measure.py`."""

from measure import Case, serve

from jaxscale.config import Config
from jaxscale.data.synthetic import synthetic_batch
from jaxscale.run.setup.layout import open_engine

# Imported although unused here: the time to a run's first step includes the trainer's imports.
from jaxscale.run.trainer import import_later


def build(config: Config, variant: str) -> Case:
    """The engine of a run."""
    config, engine = open_engine(config)
    batch = engine.shard(synthetic_batch(config))
    note = f"{engine.attention} attention"
    return Case(engine.init, engine.step, engine.abstract_state, batch, note, import_later)


if __name__ == "__main__":
    serve(build)
