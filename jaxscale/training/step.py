"""The train step: gradients, clipping, optimizer update; bad steps are skipped."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.batch import Batch, ShardedBatch
from jaxscale.config import Config
from jaxscale.models.protocol import Model, Rows, Sums, sum_shapes
from jaxscale.sharding.host_memory import from_host
from jaxscale.training.device_batch import unpack_sharded
from jaxscale.training.optimizer import frozen_params, is_schedule
from jaxscale.training.tables import NO_TABLES, Tables
from jaxscale.training.update_in_turn import update_in_turn

Tree = Any


class TrainState(NamedTuple):
    """Everything that a step changes; also the trees of its shardings and axes."""

    step: Any  # int32 scalar, updates done
    params: Tree
    opt_state: Tree
    guard: Tree = None  # a `Guard` with `run.skip_bad_steps`
    tables: Tree = None  # a `TableState` for each of `Model.tables`
    noise: Tree = None  # `NoiseAverages` with `run.noise_every`


class Guard(NamedTuple):
    """Window of good steps by which bad steps are judged; also its shardings and axes."""

    losses: Any  # [WINDOW], of the last good steps; NaN before there are as many
    grad_norms: Any  # the same for gradient norms
    good: Any  # int32, good steps so far


WINDOW = 128
"""Good steps that a spike is compared with."""

LEAST = 32
"""Good steps before spikes are detected."""


class StepMetrics(NamedTuple):
    """Scalars of one step, computed on the device."""

    loss: jax.Array  # nats per token, without z-loss; 0 if no token has loss
    grad_norm: jax.Array  # before clipping
    tokens: jax.Array  # int32, positions without padding
    loss_tokens: jax.Array  # sum of the weights of tokens with loss
    others: dict[str, jax.Array]  # the model's metrics: means over `loss_tokens`, or of each layer
    by_layer: dict[str, jax.Array]  # numbers for each layer, whose means are metrics


def make_step(
    config: Config,
    model: Model,
    rows: Rows,
    gradients: Callable,
    optimizer: optax.GradientTransformation,
    frozen: Tree,
    shardings: TrainState,
    platform: str,
    tables: Tables = NO_TABLES,
) -> Callable[[TrainState, ShardedBatch], tuple[TrainState, StepMetrics]]:
    """The train step: gradients, clipping, the optimizer's update, and `Model.adjust`.

    Args:
      rows: the layer in each row of the parameters' stacks.
      frozen: tree of the parameters with whether each is frozen.
      shardings: of the state between steps.
      platform: of the devices.
      tables: the model's embedding tables.
    """
    offloads, run = config.layout.offloads("optimizer"), config.run
    # Without parameters that the model declares frozen, which it may adjust.
    by_groups = frozen_params(config.optimizer.groups, model.axes)

    def step(state: TrainState, sharded: ShardedBatch) -> tuple[TrainState, StepMetrics]:
        batch = unpack_sharded(sharded)
        # A batch of long prompts may have no token with loss; its gradients are zero.
        loss_tokens = jnp.sum(batch.weights)
        count = jnp.where(loss_tokens == 0, 1, loss_tokens)
        if model.draws_noise:
            batch = batch._replace(
                noise=step_noise(run.seed, config.data.global_batch_size, state.step)
            )
        batch = tables.look_up(state.tables, batch)
        sums, grads, dvectors = gradients(state.params, batch)
        with jax.named_scope("optimizer"):
            grads = jax.tree.map(lambda x, no: jnp.zeros_like(x) if no else x, grads, frozen)
            squares = sums_of_squares(grads)
            grads, grad_norm = mean_and_norm(grads, count, config.optimizer.clip_norm)
            params, opt_state = state.params, state.opt_state
            if offloads and platform == "gpu":
                # XLA for GPUs (jax 0.12) would fetch it early in the backward pass, while the
                # activations are live: 43.4 GiB of temporaries instead of 36.2 (Llama 3.2 1B).
                # XLA for TPUs fetches late; there the barrier takes 0.3 GiB more.
                opt_state, _ = jax.lax.optimization_barrier((opt_state, grads))
            opt_state = from_host(opt_state) if offloads else opt_state

            def update(params: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
                updates, opt_state = optimizer.update(grads, opt_state, params)
                updated = optax.apply_updates(params, updates)
                params = _restore_frozen(params, updated, frozen)
                adjusted = _apply_adjust(model, rows, params, sums)
                return _restore_frozen(params, adjusted, by_groups), opt_state

            update = functools.partial(update_in_turn, update, grad_norm)
            loss, good, guard = sums["nll"] / count, jnp.array(True), state.guard
            if run.skip_bad_steps:
                good, guard = judge(state.guard, loss, grad_norm, loss_tokens, run.spike_score)
                params, opt_state = _if_good(good, update, params, opt_state)
            else:
                params, opt_state = update(params, opt_state)
            params = jax.lax.with_sharding_constraint(params, shardings.params)
        looked_up = tables.update(state.tables, batch, dvectors, state.step, count, good)
        tokens = count_tokens(batch)
        others, by_layer = _model_metrics(model, sums, count)
        if run.skip_bad_steps:
            wrong = ~jnp.isfinite(jnp.stack(squares))
            others |= {"skipped": ~good, "nonfinite_gradients": wrong}
        metrics = StepMetrics(loss, grad_norm, tokens, loss_tokens, others, by_layer)
        after = TrainState(state.step + 1, params, opt_state, guard, looked_up, state.noise)
        return after, metrics

    return step


def init_guard() -> Guard:
    """The guard of a new run."""
    # Separate arrays, since a step donates each of them.
    losses, norms = (jnp.full(WINDOW, jnp.nan, jnp.float32) for _ in range(2))
    return Guard(losses, norms, jnp.zeros((), jnp.int32))


def judge(
    guard: Guard, loss: jax.Array, grad_norm: jax.Array, loss_tokens: jax.Array, spike_score: float
) -> tuple[jax.Array, Guard]:
    """Whether a step is good, with a finite loss and gradient norm and no spike; and the guard
    after it. Both numbers are of the whole batch, so every rank decides the same.

    Args:
      loss_tokens: if 0, loss and gradient are 0: such a step is good, but not added to the window.
      spike_score: least distance of a spike above the median of the last good steps, in robust
        standard deviations, 1.4826 times the median distance from it; 0 detects no spikes.
    """

    def score(x: jax.Array, window: jax.Array) -> jax.Array:
        median = jnp.nanmedian(window)
        spread = 1.4826 * jnp.nanmedian(jnp.abs(window - median))
        # With losses that hardly change the next one must not count as a spike.
        return (x - median) / (spread + 1e-3 * jnp.abs(median))

    loss, grad_norm = loss.astype(jnp.float32), grad_norm.astype(jnp.float32)
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if spike_score:
        scores = jnp.maximum(score(loss, guard.losses), score(grad_norm, guard.grad_norms))
        good &= ~((guard.good >= LEAST) & (scores > spike_score))
    slot = guard.good % WINDOW
    after = Guard(
        guard.losses.at[slot].set(loss),
        guard.grad_norms.at[slot].set(grad_norm),
        guard.good + 1,
    )
    kept = good & (loss_tokens > 0)
    return good, jax.tree.map(lambda new, old: jnp.where(kept, new, old), after, guard)


def _if_good(good: jax.Array, update: Callable, params: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
    """The state after an update; after a bad step the state before it, with one more step counted
    in the learning-rate schedule.

    A loop of one trip or none updates the state in place. `jnp.where` would need memory for both
    states, and `lax.cond` copies its operands.
    """

    def count(node: Any) -> Any:
        if not is_schedule(node):
            return node
        return optax.ScaleByScheduleState(
            jnp.where(good, node.count, optax.safe_increment(node.count))
        )

    _, params, opt_state = jax.lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (jnp.array(False), *update(*carry[1:])),
        (good, params, opt_state),
    )
    return params, jax.tree.map(count, opt_state, is_leaf=is_schedule)


def step_noise(seed: int, rows: int, step: jax.Array) -> jax.Array:
    """uint32 for each row of a step's batch, from the run's seed, the step and the row in any
    layout; the seed of dropout."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.random.bits(key, (rows,), jnp.uint32)


def count_tokens(batch: Batch) -> jax.Array:
    """Positions that are not padding, including an encoder's."""
    tokens = jnp.sum(batch.segments != 0, dtype=jnp.int32)
    encoder = dict(batch.extras).get("encoder_segments")
    return tokens if encoder is None else tokens + jnp.sum(encoder != 0, dtype=jnp.int32)


def _restore_frozen(before: Tree, after: Tree, frozen: Tree) -> Tree:
    return jax.tree.map(lambda x, y, is_frozen: x if is_frozen else y, before, after, frozen)


def _apply_adjust(model: Model, rows: Rows, params: Tree, sums: Sums) -> Tree:
    """`Model.adjust`, with the sums of layers in the order of the parameters' rows."""
    if model.adjust is None:
        return params
    placed = {
        name: sums[name][rows[stack.name]]
        for stack in model.stacks
        for name in sum_shapes(stack)
        if name != "loss"
    }
    return model.adjust(params, {**sums, **placed})


def _model_metrics(model: Model, sums: Sums, count: jax.Array) -> tuple[Sums, Sums]:
    """A model's metrics: means of sums over tokens, and numbers of each layer, by `Model.report` if
    it has one."""
    own = {name: value for name, value in sums.items() if name not in ("loss", "nll")}
    report, by_layer = {}, set()
    if model.report:
        by_layer = {name for stack in model.stacks for name in sum_shapes(stack)} & own.keys()
        report = model.report({name: own.pop(name) for name in by_layer})
    return {name: x / count if x.ndim == 0 else x for name, x in own.items()}, report


def mean_and_norm(sums: Tree, count: jax.Array, limit: float) -> tuple[Tree, jax.Array]:
    """Mean gradients per token, clipped, and their norm before clipping; in float32 or wider for
    any accumulation type.

    Args:
      count: tokens.
      limit: on the norm; 0 means none.
    """

    root = jnp.sqrt(sum(sums_of_squares(sums)))
    count = count.astype(root.dtype)
    norm = root / count
    scale = (jnp.minimum(1.0, limit / norm) if limit else 1.0) / count
    return jax.tree.map(lambda x: _widen(x) * scale, sums), norm


def sums_of_squares(tree: Tree) -> list[jax.Array]:
    """The sum of squares of each array, in float32 or wider."""
    return [jnp.sum(jnp.square(_widen(x))) for x in jax.tree.leaves(tree)]


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
