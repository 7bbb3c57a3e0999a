"""One train step from a model, a layout and an optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.batch import Batch, ShardedBatch
from jaxscale.compiler import step_options
from jaxscale.config import Config
from jaxscale.gradients import make_gradients, make_loss
from jaxscale.layout import Layout
from jaxscale.models.decoder import Decoder
from jaxscale.optim import make, state_axes
from jaxscale.parallel import attention_name, make_kernels
from jaxscale.pipeline.place import Placement
from jaxscale.pipeline.stages import Stages, open_stages
from jaxscale.planner.held import head_cost
from jaxscale.remat import from_host
from jaxscale.rules import check_divides, check_sequence
from jaxscale.sharded_batch import dealt, local_rows, shard_batch
from jaxscale.sharding import ACTIVATIONS, resolve, resolve_tree, spread_outer
from jaxscale.zero import Zero

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
    tokens: jax.Array  # that counted in the loss


class EvaluationSums(NamedTuple):
    """Sums over a held-out batch, computed on the device."""

    nll: jax.Array  # nats
    tokens: jax.Array
    num_bytes: jax.Array  # of the text that the tokens stand for


@dataclass(frozen=True)
class Engine:
    """The jitted functions of a run and where their arguments live."""

    config: Config
    model: Decoder
    layout: Layout
    mesh: Mesh
    init: Callable[[jax.Array], TrainState]  # from a key
    step: Callable[[TrainState, ShardedBatch], tuple[TrainState, StepMetrics]]  # donates the state
    evaluate: Callable[[Tree, ShardedBatch, jax.Array], EvaluationSums]
    abstract_state: TrainState  # shapes, types and shardings
    abstract_batch: ShardedBatch  # likewise
    placement: Placement  # of the state, which is saved in another form
    state_axes: TrainState  # logical axes of every array in it
    zero: Zero
    stages: Stages | None  # of a pipeline
    batch_sharding: NamedSharding
    attention: str  # the implementation in use

    def shard(self, batch: Batch, *, global_batch_size: int | None = None) -> ShardedBatch:
        """A batch of NumPy arrays as `step` and `evaluate` take it: spread over the mesh, the
        tokens of each sequence dealt to the ranks of context in their balanced order.

        Args:
          batch: [rows, time] each, in the order of the text: all rows of a step.
          global_batch_size: when they are only the rows that this process's devices hold, in the
            order of `local_rows`: how many there are in all.

        Raises:
          ValueError: what is no batch on the host, or does not divide over the layout.
        """
        return shard_batch(batch, self.config, self.batch_sharding, global_batch_size)

    def local_rows(self, global_batch_size: int) -> tuple[int, ...]:
        """The rows of a step's batch that this process's devices hold, in order."""
        return local_rows(self.batch_sharding, global_batch_size)


def make_engine(config: Config, mesh: Mesh, *, unroll_layers: bool = False) -> Engine:
    """Builds what a run needs, compiling nothing yet.

    Args:
      config: its layout must be resolved: no -1.
      mesh: of that layout; its devices may be absent ones, for compiling alone.
      unroll_layers: writes the loops over layers out, for XLA's cost analysis.

    Raises:
      ValueError: a dimension that does not divide over its mesh axes, or a kernel that cannot
        honour the model's settings.
    """
    layout = config.layout
    check_divides(config)
    check_sequence(config)
    check_types(config)
    check_host_memory(config, mesh)
    platform = mesh.devices.flat[0].platform
    model = Decoder(config.model, make_kernels(config, platform, unroll=unroll_layers))
    optimizer = make(config.optimizer, steps=config.run.steps, axes=model.axes)
    stages = _open_stages(config) if layout.pipeline > 1 else None
    single_visit = layout.accumulation == "layered" or layout.microbatches == 1
    zero = Zero(
        layout.zero_stage, single_visit and stages is None, layout.sizes,
        spread_outer(model.axes, layout.sizes, config.model.d_model),
        jnp.dtype(config.model.compute_dtype), jnp.dtype(config.optimizer.accumulation_dtype),
    )  # fmt: skip
    gradients = make_gradients(model, layout, zero, mesh, stages, unroll_layers=unroll_layers)
    nll = make_loss(model, layout, zero, mesh, stages)

    def init(key: jax.Array) -> TrainState:
        params = model.init(key, stages.rows if stages else None)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    abstract = jax.eval_shape(init, jax.random.key(0))
    axes = TrainState((), model.axes, state_axes(optimizer, abstract.params, model.axes))
    axes = spread_outer(axes, layout.sizes, config.model.d_model)
    shardings = TrainState(
        NamedSharding(mesh, PartitionSpec()),
        resolve_tree(axes.params, zero.param_rules, mesh, abstract.params),
        resolve_tree(axes.opt_state, zero.update_rules, mesh, abstract.opt_state),
    )
    if layout.offloads("optimizer"):
        shardings = shardings._replace(opt_state=_on_host(shardings.opt_state, abstract.opt_state))
    # ZeRO stages 1 and 2 update shards of the parameters, then gather them again.
    update_shardings = resolve_tree(axes.params, zero.update_rules, mesh, abstract.params)

    step = _make_step(config, gradients, optimizer, shardings, update_shardings)

    def evaluate(params: Tree, batch: Batch, token_bytes: jax.Array) -> EvaluationSums:
        batch = dealt(batch)
        num_bytes = jnp.sum(token_bytes[batch.targets] * batch.weights)
        return EvaluationSums(nll(params, batch), jnp.sum(batch.weights), num_bytes)

    abstract_state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract, shardings,
    )  # fmt: skip
    rows = stages.rows if stages else np.arange(config.model.num_layers)
    replicated = NamedSharding(mesh, PartitionSpec())
    batch_spec = resolve(("batch", "seq"), ACTIVATIONS, layout.sizes)
    batch_sharding = NamedSharding(mesh, batch_spec)
    return Engine(
        config=config,
        model=model,
        layout=layout,
        mesh=mesh,
        init=jax.jit(
            init, out_shardings=shardings,
            # LLVM takes seconds over the generators of random bits, and gains nothing by it.
            compiler_options={"xla_backend_optimization_level": 1} if platform == "cpu" else None,
        ),
        step=jax.jit(
            step, donate_argnums=0, in_shardings=(shardings, batch_sharding),
            out_shardings=(shardings, replicated), compiler_options=step_options(mesh),
        ),
        evaluate=jax.jit(evaluate, in_shardings=(shardings.params, batch_sharding, replicated),
                         out_shardings=replicated),
        abstract_state=abstract_state,
        abstract_batch=_abstract_batch(config, batch_sharding),
        placement=Placement(rows, axes, abstract_state),
        state_axes=axes,
        zero=zero,
        stages=stages,
        batch_sharding=batch_sharding,
        attention=attention_name(config, platform),
    )  # fmt: skip


def _make_step(
    config: Config, gradients: Callable, optimizer: optax.GradientTransformation,
    shardings: TrainState, update_shardings: Tree,
) -> Callable[[TrainState, ShardedBatch], tuple[TrainState, StepMetrics]]:  # fmt: skip
    """Gradients, clipped, and the optimizer's update.

    Args:
      shardings: of the state between steps.
      update_shardings: of the parameters while the optimizer is at work.
    """
    offloads = config.layout.offloads("optimizer")

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        batch = dealt(batch)
        count = jnp.sum(batch.weights)
        (_, nll_sum), grads = gradients(state.params, batch)
        with jax.named_scope("optimizer"):
            grads = jax.tree.map(lambda grad: grad / count.astype(grad.dtype), grads)
            grad_norm = optax.tree.norm(grads)
            grads = _clip(grads, grad_norm, config.optimizer.clip_norm)
            params = jax.lax.with_sharding_constraint(state.params, update_shardings)
            opt_state = from_host(state.opt_state) if offloads else state.opt_state
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            params = jax.lax.with_sharding_constraint(params, shardings.params)
        metrics = StepMetrics(nll_sum / count, grad_norm, count)
        return TrainState(state.step + 1, params, opt_state), metrics

    return step


def _abstract_batch(config: Config, sharding: NamedSharding) -> ShardedBatch:
    shape = config.data.global_batch_size, config.data.seq_len
    ints = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    floats = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return ShardedBatch(ints, ints, ints, ints, floats)


def _open_stages(config: Config) -> Stages:
    return open_stages(config.layout, config.model.num_layers, head_cost(config))


def check_types(config: Config) -> None:
    """Refuses float64 where JAX would silently compute in float32.

    Raises:
      ValueError: with what to set.
    """
    wide = {
        f"{section}.{name}"
        for section in ("model", "optimizer")
        for name, value in vars(getattr(config, section)).items()
        if value == "float64"
    }
    if wide and not jax.config.jax_enable_x64:
        raise ValueError(
            f"{', '.join(sorted(wide))} = 'float64' needs JAX_ENABLE_X64=1 in the environment"
        )


def check_host_memory(config: Config, mesh: Mesh) -> None:
    """Refuses offloading where the back end has no host memory of its own.

    Raises:
      ValueError: with what to set.
    """
    device = mesh.devices.flat[0]
    offloads = config.layout.offload != "none" or config.layout.remat.startswith("offload:")
    if not offloads or not isinstance(device, jax.Device):
        return
    kinds = {memory.kind for memory in device.addressable_memories()}
    if "pinned_host" not in kinds:
        raise ValueError(
            f"layout.offload = {config.layout.offload!r}, layout.remat = {config.layout.remat!r}: "
            f"the {device.platform} back end has no pinned host memory, only "
            f"{', '.join(sorted(kinds))}; set layout.offload = 'none', and layout.remat = 'full' "
            "or another policy without 'offload:'"
        )


def _on_host(shardings: Tree, abstract: Tree) -> Tree:
    """The same shards in host memory; scalars stay, the compiler wants them on the device."""
    return jax.tree.map(
        lambda sharding, leaf: sharding.with_memory_kind("pinned_host") if leaf.ndim else sharding,
        shardings, abstract,
    )  # fmt: skip


def _clip(grads: Tree, norm: jax.Array, limit: float) -> Tree:
    if not limit:
        return grads
    scale = jnp.minimum(1.0, limit / norm)
    return jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
