"""The train step: gradients, clipped, and the optimizer's update."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxscale.batch import Batch, ShardedBatch
from jaxscale.config import Config
from jaxscale.data.device_batch import unpack_sharded
from jaxscale.models.protocol import Model, Rows, Sums, sum_shapes
from jaxscale.training.remat import from_host

Tree = Any


class TrainState(NamedTuple):
    """Everything that a step changes; also the trees of its shardings and axes."""

    step: Any  # int32 scalar, updates done
    params: Tree
    opt_state: Tree


class StepMetrics(NamedTuple):
    """Scalars of one step, computed on the device."""

    loss: jax.Array  # nats per token, z-loss left out
    grad_norm: jax.Array  # before clipping
    tokens: jax.Array  # int32, that the model read: every position but padding
    loss_tokens: jax.Array  # that counted in the loss
    others: dict[str, jax.Array]  # the model's own: means over `loss_tokens`, or of each layer
    by_layer: dict[str, jax.Array]  # numbers for each layer, whose means are metrics


def make_step(
    config: Config,
    model: Model,
    rows: Rows,
    gradients: Callable,
    optimizer: optax.GradientTransformation,
    frozen: Tree,
    shardings: TrainState,
    update_shardings: Tree,
) -> Callable[[TrainState, ShardedBatch], tuple[TrainState, StepMetrics]]:
    """Gradients, clipped, the optimizer's update, and what the model does after it.

    Args:
      rows: the layer in each row of the parameters' stacks.
      frozen: tree of the parameters with whether each is left as it is.
      shardings: of the state between steps.
      update_shardings: of the parameters during the update.
    """
    offloads = config.layout.offloads("optimizer")

    def step(state: TrainState, sharded: ShardedBatch) -> tuple[TrainState, StepMetrics]:
        batch = unpack_sharded(sharded)
        # A batch of long prompts may have no token that counts; its gradients are zero.
        count = jnp.maximum(jnp.sum(batch.weights), 1)
        if any(getattr(config.model, name, 0) for name in ("dropout", "router_jitter")):
            batch = batch._replace(noise=step_noise(config, state.step))
        sums, grads = gradients(state.params, batch)
        with jax.named_scope("optimizer"):
            grads = jax.tree.map(lambda x, still: jnp.zeros_like(x) if still else x, grads, frozen)
            grads, grad_norm = mean_and_norm(grads, count, config.optimizer.clip_norm)
            params = jax.lax.with_sharding_constraint(state.params, update_shardings)
            opt_state = from_host(state.opt_state) if offloads else state.opt_state
            updates, opt_state = optimizer.update(grads, opt_state, params)
            updated = optax.apply_updates(params, updates)
            params = jax.tree.map(lambda x, y, still: x if still else y, params, updated, frozen)
            params = _adjusted(model, rows, params, sums)
            params = jax.lax.with_sharding_constraint(params, shardings.params)
        tokens = count_tokens(batch)
        others, by_layer = _others(model, sums, count)
        metrics = StepMetrics(sums["nll"] / count, grad_norm, tokens, count, others, by_layer)
        return TrainState(state.step + 1, params, opt_state), metrics

    return step


def step_noise(config: Config, step: jax.Array) -> jax.Array:
    """uint32 for each row of a step's batch: of the run's seed, the step and the row, whatever the
    layout. What a model drops depends on it."""
    key = jax.random.fold_in(jax.random.key(config.run.seed), step)
    return jax.random.bits(key, (config.data.global_batch_size,), jnp.uint32)


def count_tokens(batch: Batch) -> jax.Array:
    """Positions that are no padding, an encoder's too."""
    tokens = jnp.sum(batch.segments != 0, dtype=jnp.int32)
    encoder = dict(batch.extras).get("encoder_segments")
    return tokens if encoder is None else tokens + jnp.sum(encoder != 0, dtype=jnp.int32)


def _adjusted(model: Model, rows: Rows, params: Tree, sums: Sums) -> Tree:
    """`Model.adjust`, with the sums of layers in the order of the parameters' rows."""
    adjust = getattr(model, "adjust", None)
    if adjust is None:
        return params
    placed = {
        name: sums[name][rows[stack.name]]
        for stack in model.stacks
        for name in sum_shapes(stack)
        if name != "loss"
    }
    return adjust(params, {**sums, **placed})


def _others(model: Model, sums: Sums, count: jax.Array) -> tuple[Sums, Sums]:
    """A model's own metrics: sums over tokens as means, and those of each layer: as they are, or as
    the model reports them."""
    own = {name: value for name, value in sums.items() if name not in ("loss", "nll")}
    report = getattr(model, "report", None)
    if report is not None:
        names = {name for stack in model.stacks for name in sum_shapes(stack)}
        layers = {name: value for name, value in own.items() if name in names}
        own = {name: value for name, value in own.items() if name not in names}
    means = {name: value / count if value.ndim == 0 else value for name, value in own.items()}
    return means, {} if report is None else report(layers)


def mean_and_norm(sums: Tree, count: jax.Array, limit: float) -> tuple[Tree, jax.Array]:
    """Mean gradients per token, clipped, and their norm before clipping; in float32 or wider,
    whatever type they were accumulated in.

    Args:
      count: tokens.
      limit: on the norm; 0 is none.
    """

    def widen(x: jax.Array) -> jax.Array:
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    squares = [jnp.sum(jnp.square(widen(x))) for x in jax.tree.leaves(sums)]
    root = jnp.sqrt(sum(squares))
    count = count.astype(root.dtype)
    norm = root / count
    scale = (jnp.minimum(1.0, limit / norm) if limit else 1.0) / count
    return jax.tree.map(lambda x: widen(x) * scale, sums), norm
