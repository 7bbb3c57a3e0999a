"""Gradient noise scale, measured in a step (arXiv 1812.06162, appendix A).

It follows from squared norms of gradients of the same parameters: of the small batches, each a
micro-batch of one rank before any reduction, and of the step. No layout keeps the gradient of a
small batch: loops over layers add it to accumulators, ZeRO scatters it, a pipeline has parts of it
on several ranks. So the model is wrapped, not the loops: each part of the parameters has one more
array, whose gradient is defined as the sum of squares of the part's other gradients. Accumulation
and reductions then sum it over micro-batches and ranks, as they do any small vector.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.config import Config
from jaxscale.models.protocol import Layer, Model, Params, Stack, Stream, Sums
from jaxscale.sharding.zero import Zero
from jaxscale.training.accumulation import quantises_once

Tree = Any

DECAY = 0.95
"""Of the averages: the last 20 measurements count most."""

SQUARES = "squares"
"""The name of the additional array in each part of the parameters, and its logical axis."""


class NoiseAverages(NamedTuple):
    """Running averages of the two parts, each for itself; also their shardings and axes.

    The mean of ratios would be biased; both averages begin at 0, so that their ratio is not.
    """

    gradient_square: Any  # squared norm of the true gradient, of the mean loss
    gradient_variance: Any  # trace of the covariance of a token's gradient


def init_averages(dtype: Any) -> NoiseAverages:
    """The averages before the first measurement."""
    # Separate arrays, since a step donates each of them.
    return NoiseAverages(jnp.zeros((), dtype), jnp.zeros((), dtype))


def estimate_noise(
    small_squares: Any, big_square: Any, small_tokens: Any, squared_weights: Any
) -> tuple[Any, Any]:
    """Unbiased estimates of the squared norm of the true gradient and of the trace of the
    covariance of a token's gradient; zeros if all tokens are in one small batch.

    With a gradient sum over n tokens as n G + noise, the expected squared norm is n^2 |G|^2 plus n
    times the trace: two linear equations, of the small batches together and of the step.

    Args:
      small_squares: the sum over small batches of the squared norm of each gradient sum.
      big_square: the squared norm of the step's gradient sum.
      small_tokens: weighted tokens of each small batch.
      squared_weights: the sum of the squares of all tokens' weights: their number, if all are 1.

    Examples:
      Four small batches of two tokens, |G|^2 = 3 and a trace of 10:

      >>> small, big = 4 * (2**2 * 3 + 2 * 10), 8**2 * 3 + 8 * 10
      >>> [float(x) for x in estimate_noise(small, big, jnp.full(4, 2.0), 8)]
      [3.0, 10.0]
    """
    pairs, total = jnp.sum(jnp.square(small_tokens)), jnp.square(jnp.sum(small_tokens))
    several = total > pairs
    square = (big_square - small_squares) / jnp.where(several, total - pairs, 1)
    weight = squared_weights * jnp.where(several, 1 - pairs / total, 1)
    variance = (small_squares - big_square * pairs / jnp.where(several, total, 1)) / weight
    return jnp.where(several, square, 0), jnp.where(several, variance, 0)


def tokens_of_small_batches(weights: jax.Array, ranks: int, microbatches: int) -> jax.Array:
    """The weighted tokens of the micro-batch of each rank, [ranks, microbatches].

    Args:
      weights: of a step's batch, [B, T], with the rows of a rank in sequence.
    """
    rows = weights.reshape(ranks, -1, microbatches, weights.shape[1])
    return jnp.sum(rows, axis=(1, 3))


@dataclass(frozen=True)
class NoiseProbe:
    """The parts of a step that measures: wrappers of the model, of its ZeRO stage, of the gradients
    and of the step."""

    model: Model
    zero: Zero
    measured: Mapping[str, Tree]  # part of the parameters -> tree of whether each counts
    ranks: int  # that divide the batch
    microbatches: int

    @classmethod
    def of(cls, config: Config, model: Model, zero: Zero, frozen: Tree) -> "NoiseProbe":
        """The probe of a run.

        Args:
          frozen: tree of the parameters with whether each is frozen.

        Raises:
          ValueError: settings with which no rank has the whole gradient of a micro-batch; names the
            one to change.
        """
        check_measurable(config, model)
        measured = {part: _measured(model, part, tree) for part, tree in frozen.items()}
        measured = {part: tree for part, tree in measured.items() if any(jax.tree.leaves(tree))}
        axes = {
            part: {**tree, SQUARES: _squares_axes(part)} if part in measured else tree
            for part, tree in zero.axes.items()
        }
        more = {part: {**tree, SQUARES: False} for part, tree in frozen.items() if part in measured}
        zero = replace(
            zero,
            axes=axes,
            frozen=zero.frozen and {**zero.frozen, **more},
        )
        layout = config.layout
        probed = _ProbedModel(model, measured)
        return cls(probed, zero, measured, layout.batch_shards, layout.microbatches)

    def gradients(self, gradients: Any) -> Any:
        """`make_gradients`' function of the probed model as one of the model, with the estimates
        among its sums, times the tokens with loss as all of a step's sums."""

        def measuring(params: Params, batch: Batch) -> tuple[Sums, Tree, Tree]:
            sums, grads, dvectors = gradients(self._with_squares(params), batch)
            small = sum(jnp.sum(grads[part].pop(SQUARES)) for part in self.measured)
            big = sum(
                jnp.sum(jnp.square(grad))
                for part, tree in self.measured.items()
                for grad in _selected(tree, grads[part])
            )
            weights = batch.weights.astype(self.zero.loss_dtype)
            tokens = tokens_of_small_batches(weights, self.ranks, self.microbatches)
            found = estimate_noise(small, big, tokens, jnp.sum(jnp.square(weights)))
            named = dict(zip(NoiseAverages._fields, found))
            return {**sums, **{n: x * jnp.sum(weights) for n, x in named.items()}}, grads, dvectors

        return measuring

    def step(self, step: Any) -> Any:
        """A step with these gradients, which also updates the averages and reports their ratio."""

        def measuring(state: Any, batch: Any) -> tuple[Any, Any]:
            after, metrics = step(state, batch)
            now = NoiseAverages(*(metrics.others[name] for name in NoiseAverages._fields))
            kept = (metrics.loss_tokens > 0) & ~metrics.others.get("skipped", jnp.array(False))

            def average(old: jax.Array, new: jax.Array) -> jax.Array:
                return jnp.where(kept, DECAY * old + (1 - DECAY) * new.astype(old.dtype), old)

            noise = jax.tree.map(average, state.noise, now)
            square, variance = noise
            ratio = jnp.where(square > 0, variance / square, jnp.inf)
            others = {**metrics.others, "noise_scale": ratio}
            return after._replace(noise=noise), metrics._replace(others=others)

        return measuring

    def _with_squares(self, params: Params) -> Params:
        def zeros(part: str) -> jax.Array:
            rows = () if part in ("embed", "head") else jax.tree.leaves(params[part])[0].shape[:1]
            return jnp.zeros((*rows, 1), self.zero.loss_dtype)

        return {
            part: {**tree, SQUARES: zeros(part)} if part in self.measured else tree
            for part, tree in params.items()
        }


def check_measurable(config: Config, model: Model) -> None:
    """Refuses settings with which the noise scale cannot be measured.

    Raises:
      ValueError: names the setting to change.
    """
    layout, rule = config.layout, config.optimizer
    if layout.batch_shards * layout.microbatches == 1:
        raise ValueError(
            f"run.noise_every = {config.run.noise_every} compares a rank's micro-batch with the "
            "step, and the step is one micro-batch of one rank; set layout.microbatches = 2, or "
            "run.noise_every = 0"
        )
    narrow = min(jnp.dtype(rule.accumulation_dtype).itemsize, jnp.dtype(rule.reduced_in).itemsize)
    for setting, allowed, instead in (
        (f"layout.expert = {layout.expert}", layout.expert == 1, "layout.expert = 1"),
        (
            f"layout.sequence_chunks = {layout.sequence_chunks}",
            layout.segments == 1,
            "layout.sequence_chunks = 1",
        ),
        (f"layout.head = {layout.head!r}", not layout.slices_head, "layout.head = 'last'"),
        (
            "layers that share weights",
            all(stack.repeats == 1 for stack in model.stacks),
            "model.share_layers = 1",
        ),
        ("pruned weights", not rule.prunes, "optimizer.sparsity = 0"),
        (
            "matrices that are quantised once a step",
            not quantises_once(model, layout),
            "layout.unroll_layers = False",
        ),
        (
            "gradients summed or sent in 16 bits",
            narrow >= 4,
            "optimizer.accumulation_dtype = 'float32'",
        ),
    ):
        if not allowed:
            raise ValueError(
                f"run.noise_every = {config.run.noise_every} with {setting} is not available in "
                f"this version: a rank's micro-batch has no whole gradient there; set {instead}, "
                "or run.noise_every = 0"
            )


def _squares_axes(part: str) -> tuple[str, ...]:
    return (SQUARES,) if part in ("embed", "head") else ("layers", SQUARES)


def _measured(model: Model, part: str, frozen: Tree) -> Tree:
    """Whether each parameter of a part counts: if it is trained, and used in one place. The
    gradient of a table that the head borrows, or that several stacks enter with, is a sum over
    places of which no rank has all."""
    if part == "embed" and len(model.stacks) > 1:
        return jax.tree.map(lambda _: False, frozen)
    borrowed = {path for path in model.borrows.values() if path[0] == part}

    def counts(path: tuple, is_frozen: bool) -> bool:
        return not is_frozen and (part, *(key.key for key in path)) not in borrowed

    return jax.tree_util.tree_map_with_path(counts, frozen)


def _selected(measured: Tree, tree: Tree) -> list[Any]:
    """The arrays of a tree that count, in order."""
    found = jax.tree.map(lambda counts, x: (x,) if counts else (), measured, tree)
    return jax.tree.leaves(found)


class _ProbedModel(Model):
    """A model with an array "squares" in each measured part of its parameters."""

    def __init__(self, model: Model, measured: Mapping[str, Tree]) -> None:
        self._model, self._of = model, measured
        self.settings, self.borrows, self.metrics = model.settings, model.borrows, model.metrics

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return tuple(map(self._probed, self._model.stacks))

    @property
    def axes(self) -> Params:
        return self._model.axes

    def init(self, key: jax.Array, rows: Any = None) -> Params:
        return self._model.init(key, rows)

    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        return self._model.loss(self._probe("head", head), stream, batch)

    def _probed(self, stack: Stack) -> Stack:
        def enter(embed: Params, stream: Stream, batch: Batch) -> Stream:
            return stack.enter(self._probe("embed", embed), stream, batch)

        def block(weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
            return stack.block(self._probe(stack.name, weights), stream, batch, layer)

        return replace(stack, enter=enter, block=block)

    def _probe(self, part: str, weights: Params) -> Params:
        """The weights of a part, whose gradients also give that of `squares`."""
        if SQUARES not in weights:
            return weights
        rest = {name: x for name, x in weights.items() if name != SQUARES}
        own = {name: x for name, x in rest.items() if name not in self.borrows or part != "head"}
        probed = _probe_squares(_selected(self._of[part], own), weights[SQUARES])
        given = iter(probed)
        own = jax.tree.map(lambda counts, x: next(given) if counts else x, self._of[part], own)
        return {**rest, **own}


@jax.custom_vjp
def _probe_squares(weights: list[jax.Array], squares: jax.Array) -> list[jax.Array]:
    """The weights. The gradient of `squares`, [1], is the sum of squares of theirs."""
    del squares
    return weights


def _squares_of(_: None, grads: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    wide = [grad.astype(jnp.promote_types(grad.dtype, jnp.float32)) for grad in grads]
    total = functools.reduce(jnp.add, [jnp.sum(jnp.square(grad)) for grad in wide])
    return grads, total[None]


_probe_squares.defvjp(lambda weights, squares: (weights, None), _squares_of)
