"""This project's train step on synthetic tokens, as a subject of `measure.py`."""

from measure import Case, serve

from jaxscale.config import Config
from jaxscale.data.synthetic import synthetic_batch

# The trainer is not used, but a run imports it, and the time to the first step counts that.
from jaxscale.run import trainer  # noqa: F401
from jaxscale.run.setup import open_engine


def build(config: Config, variant: str) -> Case:
    """The engine of a run."""
    config, engine = open_engine(config)
    batch = engine.shard(synthetic_batch(config))
    note = f"{engine.attention} attention"
    return Case(engine.init, engine.step, engine.abstract_state, batch, note)


if __name__ == "__main__":
    serve(build)
