"""Evaluation: batches on the mesh, and the loss on held-out text."""

import contextlib
import itertools
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.batch import ShardedBatch
from jaxscale.choices import check_count, check_kind
from jaxscale.data.dataset import Examples
from jaxscale.data.loader import batches
from jaxscale.run.metrics import token_count
from jaxscale.training.engine import ENGINE_ADVICE, Engine, check_params

EXAMPLES_ADVICE = (
    "pass `train`, `heldout` or one of `validation` of the result of jaxscale.open_text "
    "(`heldout` is None with data.heldout = 0)"
)


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out text, and metrics derived from it."""

    loss: float  # nats per token; NaN if no token has loss
    tokens: float  # the sum of tokens' weights, an integer if whole
    num_bytes: float  # of the tokens' text

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite for a loss above 709, by overflow."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits per byte of text, comparable between tokenizers."""
        if not self.num_bytes:
            return math.nan
        return self.loss * self.tokens / math.log(2) / self.num_bytes

    def record(self, name: str = "") -> dict[str, float]:
        """The fields of metrics.jsonl: `eval_loss`, ..., or `eval_loss/NAME`, ... of a validation
        set."""
        values = {
            "eval_loss": self.loss,
            "eval_perplexity": self.perplexity,
            "eval_bits_per_byte": self.bits_per_byte,
            "eval_tokens": self.tokens,
            "eval_bytes": round(self.num_bytes),
        }
        return {f"{key}/{name}" if name else key: value for key, value in values.items()}


def device_batches(
    engine: Engine,
    dataset: Examples,
    global_batch_size: int,
    *,
    start_step: int = 0,
    first_example: int | None = None,
    workers: int = 0,
) -> Generator[ShardedBatch]:
    """A generator of sharded batches for `Engine.step`; batches of training text never end.

    Each process loads the rows of its devices.

    Args:
      dataset: `train`, `heldout` or one of `validation` of `open_text`.
      global_batch_size: rows of a step, of all processes.
      start_step: steps to skip.
      first_example: of the first batch; None if all steps have `global_batch_size` rows.
      workers: processes that prefetch batches; 0 prefetches in a thread.

    Raises:
      ValueError: a batch that does not divide over the layout, or an argument of another type.

    Examples:
      With `trainer` of the example of `fit`:

      >>> batch = next(jaxscale.device_batches(trainer.engine, trainer.text.train, 8))
      >>> batch.tokens.shape
      (8, 64)
    """
    check_kind("engine", engine, Engine, ENGINE_ADVICE)
    check_kind("dataset", dataset, Examples, EXAMPLES_ADVICE)
    check_count("start_step", start_step, 0)
    check_count("workers", workers, 0)
    if first_example is not None:
        check_count("first_example", first_example, 0)
    rows, begin = engine.local_rows(global_batch_size), (start_step, first_example)
    return _sharded_batches(engine, dataset, global_batch_size, begin, rows, workers)


def _sharded_batches(
    engine: Engine,
    dataset: Examples,
    global_batch_size: int,
    begin: tuple[int, int | None],
    rows: tuple[int, ...],
    workers: int,
) -> Generator[ShardedBatch]:
    for batch in batches(
        dataset,
        global_batch_size=global_batch_size,
        start_step=begin[0],
        first_example=begin[1],
        rows=rows,
        workers=workers,
    ):
        yield engine.shard(batch, global_batch_size=global_batch_size)


def evaluate_loss(
    engine: Engine,
    params: Any,
    heldout: Examples,
    global_batch_size: int,
    max_batches: int | None = None,
    stops: Callable[[], Any] = lambda: False,
    tables: Any = None,
) -> Evaluation:
    """Evaluates the loss on held-out text, in nats per token.

    Every call sees the same examples in the same order, in every layout.

    Args:
      params: of the engine's state, or in canonical form on any devices, as returned by `fit` and
        `from_pretrained`.
      heldout: `heldout` or one of `validation` of `open_text`.
      global_batch_size: rows of a batch, of all processes.
      max_batches: evaluates the first ones only; None evaluates all.
      stops: called after each batch; the evaluation ends early when it returns true.
      tables: of the engine's state, if the model has tables: `state.tables`.

    Returns:
      A record with `loss`, `perplexity`, `bits_per_byte`, `tokens` and `num_bytes`.

    Raises:
      ValueError: an argument of another type, or below 1; params of another engine's pipeline.

    Examples:
      With `trainer` and `state` of the example of `fit`:

      >>> engine, heldout = trainer.engine, trainer.text.heldout
      >>> jaxscale.evaluate_loss(engine, state.params, heldout, 8, max_batches=1).tokens
      512
    """
    check_params(engine, params)
    check_kind("heldout", heldout, Examples, EXAMPLES_ADVICE)
    if max_batches is not None:
        check_count("max_batches", max_batches, 1)
    if bool(tables) != bool(engine.model.tables):
        raise ValueError(
            "the model's tables and those of the state belong together: pass tables=state.tables "
            f"(the model has {', '.join(engine.model.tables) or 'none'})"
        )
    looked_up = (tables,) if tables else ()
    params = engine.placement.part("params").from_canonical(params)
    sums, token_bytes = np.zeros(3), jnp.asarray(heldout.token_bytes, jnp.float32)
    with contextlib.closing(device_batches(engine, heldout, global_batch_size)) as stream:
        for batch in itertools.islice(stream, max_batches):
            out = jax.device_get(engine.evaluate(params, batch, token_bytes, *looked_up))
            sums += np.array(out, np.float64)
            if stops():
                break
    nll, tokens, num_bytes = sums.tolist()
    return Evaluation(nll / tokens if tokens else math.nan, token_count(tokens), num_bytes)
