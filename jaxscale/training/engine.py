"""The engine: jitted functions of a run, from a model, a layout and an optimizer."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jaxscale.batch import Batch, ShardedBatch
from jaxscale.choices import check_count, check_kind
from jaxscale.config import Config, DataConfig, RunConfig
from jaxscale.config.layout import Layout
from jaxscale.config.width_scaling import width_ratio
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.protocol import Model, head_params
from jaxscale.models.weights import scale_initial
from jaxscale.pipeline.layer_placement import LayerPlacement
from jaxscale.pipeline.partition import StackLayers
from jaxscale.pipeline.stages import PipelineStages, open_stages
from jaxscale.sharding.layer_bytes import LayerBytes, largest_layer
from jaxscale.sharding.layout_checks import check_sliced_head
from jaxscale.sharding.resolve import has_experts, is_axes
from jaxscale.sharding.rules import Rules, own_rules
from jaxscale.sharding.specs import batch_sharding, replicated
from jaxscale.sharding.zero import Zero
from jaxscale.training import optimizer as optimizers
from jaxscale.training.device_batch import check_rows, local_rows, shard_batch, unpack_sharded
from jaxscale.training.engine_checks import (
    check_axes,
    check_engine_arguments,
    check_engine_settings,
    check_own_optimizer,
    check_stored,
)
from jaxscale.training.flops import StepFlops, step_flops
from jaxscale.training.gradients import make_gradients, make_loss, pipeline_buffers
from jaxscale.training.kernels import (
    attention_name,
    attention_text,
    device_generation,
    evaluation_kernels,
    make_kernels,
    sliced_kernels,
)
from jaxscale.training.layers.loop_form import saves_in_place
from jaxscale.training.learning_rate import schedule_of
from jaxscale.training.noise_scale import NoiseProbe, init_averages
from jaxscale.training.pruning.matrices import check_pattern_shards, pruned_matrices
from jaxscale.training.pruning.pruning import Pruning
from jaxscale.training.remat import rematerialised_attention
from jaxscale.training.state_placement import apply_by_layer, make_zero, place_state, state_bytes
from jaxscale.training.step import StepMetrics, TrainState, init_guard, make_step
from jaxscale.training.tables import make_tables
from jaxscale.training.tracing.abstract_model import (
    MakeModel,
    example_of,
    find_model,
    vector_shapes,
)
from jaxscale.training.tracing.traces import model_work
from jaxscale.training.xla_options import init_options, step_options

ENGINE_ADVICE = "pass the second result of jaxscale.open_engine(config)"

Tree = Any


class EvaluationSums(NamedTuple):
    """Sums over a held-out batch, computed on the device."""

    nll: jax.Array  # nats
    tokens: jax.Array
    num_bytes: jax.Array  # of the tokens' text


@dataclass(frozen=True)
class Engine:
    """The jitted functions of a run, and the shapes and shardings of their arguments."""

    config: Config
    model: Model
    layout: Layout
    mesh: Mesh
    init: Callable[[jax.Array], TrainState]  # from a key
    draw: Callable[[jax.Array], Tree]  # the parameters of `init`; not jitted
    begin: Callable[[Tree], TrainState]  # from parameters, which are donated
    step: Callable[[TrainState, ShardedBatch], tuple[TrainState, StepMetrics]]  # donates the state
    # The same step, which also measures the noise scale; None without `run.noise_every`.
    measure: Callable[[TrainState, ShardedBatch], tuple[TrainState, StepMetrics]] | None
    # From parameters, a batch, bytes of each token's text and, if the model has any, the tables.
    evaluate: Callable[..., EvaluationSums]
    abstract_state: TrainState  # shapes, types and shardings
    abstract_batch: ShardedBatch  # the same for a batch
    placement: LayerPlacement  # of the state's layers; checkpoints have the canonical form
    state_axes: TrainState  # logical axes of every array in it
    zero: Zero
    stages: PipelineStages | None  # of a pipeline
    batch_sharding: NamedSharding
    attention: str  # the implementation in use
    count_flops: Callable[[], StepFlops]  # per token; traces the model
    learning_rate: Callable[[Any], Any] | None  # of an update's number; None: custom optimizer

    @property
    def own_optimizer(self) -> bool:
        """Whether the update rule was given in place of `config.optimizer`'s."""
        return self.learning_rate is None

    def __repr__(self) -> str:
        """One line; all fields would be hundreds."""
        return f"Engine(model={type(self.model).__name__}, layout={self.layout})"

    def shard(self, batch: Batch, *, global_batch_size: int | None = None) -> ShardedBatch:
        """Shards a batch of NumPy arrays over the mesh, for `step` and `evaluate`; the tokens of
        each sequence are split over the context ranks in their balanced order.

        Args:
          batch: arrays [rows, time] in the order of the text, with all rows of a step.
          global_batch_size: the rows of all processes, if `batch` has only the rows of this
            process's devices, in the order of `local_rows`.

        Raises:
          ValueError: it is not a batch on the host, has values out of range, or does not divide
            over the layout.
        """
        model, sharding = self.model, self.batch_sharding
        return shard_batch(batch, self.config, sharding, global_batch_size, model)

    def local_rows(self, global_batch_size: int) -> tuple[int, ...]:
        """The rows of a step's batch on this process's devices, in order.

        Raises:
          ValueError: the batch does not divide over the layout.
        """
        check_count("global_batch_size", global_batch_size, 1)
        check_rows(self.layout, self.config.data, global_batch_size)
        return local_rows(self.batch_sharding, global_batch_size)

    def pipeline_buffers(self) -> dict[str, Tree]:
        """The shapes of a pipeline rank's buffers between ticks, by the names of
        `pipeline.executor`; {} without a pipeline."""
        if self.stages is None:
            return {}
        params, batch = self.abstract_state.params, self.abstract_batch
        batch = batch._replace(vectors=vector_shapes(self.model, batch.extras))
        return pipeline_buffers(
            self.model, self.layout, self.zero, self.mesh, self.stages, params, batch
        )


def make_engine(
    config: Config,
    mesh: Mesh,
    *,
    model: MakeModel | None = None,
    optimizer: optax.GradientTransformation | None = None,
    rules: Rules | None = None,
    unroll_loops: bool = False,
) -> Engine:
    """Builds the jitted functions of a run: init, step, evaluate. Compiles nothing yet.

    Args:
      config: its layout must be resolved: no -1, nothing "auto".
      mesh: of that layout; its devices may be absent ones, to compile only.
      model: function of `config.model` and the layout's kernels that makes a custom model; None is
        the one of `model.family`.
      optimizer: custom update rule in place of `config.optimizer`'s rule and learning rate; its
        gradients are means over tokens, clipped to `optimizer.clip_norm`.
      rules: mesh axes of custom logical axes, such as {"rank": ("tensor",)}, in addition to the
        model's `rules`.
      unroll_loops: unrolls the loops over layers, as `layout.unroll_layers` does, and those of the
        loss, for XLA's cost analysis, which counts the body of a loop once.

    Raises:
      ValueError: a dimension that does not divide over its mesh axes, or a kernel that cannot
        honour the model's settings.

    Examples:
      >>> config = jaxscale.load("tiny", ["layout.data=1"])
      >>> mesh = jaxscale.make_mesh(config.layout, jax.devices()[:1])
      >>> engine = jaxscale.make_engine(config, mesh)
      >>> engine.abstract_state.params["layers"]["mlp"]["up"].shape
      (2, 64, 128)
    """
    check_engine_arguments(config, mesh, model, optimizer, rules)
    check_engine_settings(config, mesh)
    layout, device = config.layout, mesh.devices.flat[0]
    platform, generation = device.platform, device_generation(device)
    attention = attention_name(layout, config.model, config.data, platform, generation)
    models = _make_models(config, model, attention, platform, rules, unroll_loops)
    built = models.built
    check_axes(config, built)
    stages = _open_stages(config, built, model) if layout.pipeline > 1 else None
    rows = {stack.name: np.arange(stack.num_layers) for stack in built.stacks}
    rows = stages.layer_of_row if stages else rows
    ratio = width_ratio(config.optimizer, config.model)
    draw = _make_draw(built, stages, ratio)
    shapes = jax.eval_shape(draw, jax.random.key(0))
    frozen = optimizers.frozen_params(config.optimizer.groups, built.axes, built.frozen)
    zero = make_zero(config, mesh, built.axes, shapes, models.rules, frozen)
    check_stored(built, zero, shapes)
    rate = None if optimizer else schedule_of(config.optimizer, config.schedule_steps)
    matrices = pruned_matrices(config.optimizer, built.axes, shapes, frozen)
    pruning = Pruning(config.optimizer, matrices, rows)
    made = {"axes": built.axes, "frozen": frozen, "pruned": matrices, "width_ratio": ratio}
    by_layer = functools.partial(apply_by_layer, mesh, zero)
    optimizer = pruning.optimizer(
        _update_rule(config, optimizer, shapes, **made, by_layer=by_layer)
    )
    tables = make_tables(config, built, mesh)
    begin = functools.partial(_begin, optimizer, config.run, zero.loss_dtype, tables.begin)
    axes, state = place_state(
        layout, mesh, zero, built.axes, optimizer, begin, shapes, tables.place
    )
    check_pattern_shards(config.optimizer, matrices, state.params)
    options = _compiler_options(config, mesh, zero, state)

    def train_step(trained: Model, zero: Zero, probe: NoiseProbe | None = None) -> Callable:
        found = make_gradients(trained, layout, zero, mesh, stages, unroll_loops=unroll_loops)
        found = pruning.gradients(probe.gradients(found) if probe else found)
        shardings = _shardings(state)
        parts = rows, found, optimizer, frozen, shardings, platform, tables
        step = pruning.step(make_step(config, built, *parts))
        return _jit_step(probe.step(step) if probe else step, state, mesh, options)

    measured = config.run.noise_every > 0
    probe = NoiseProbe.of(config, models.trained, zero, frozen) if measured else None
    loss = make_loss(models.evaluated, layout, zero, mesh, stages)
    evaluate = _make_evaluate(loss, tables.look_up)
    return Engine(
        config=config,
        model=built,
        layout=layout,
        mesh=mesh,
        init=_jit_init(draw, begin, state, platform),
        draw=draw,
        begin=jax.jit(begin, out_shardings=_shardings(state), donate_argnums=0),
        step=train_step(models.trained, zero),
        measure=probe and train_step(probe.model, probe.zero, probe),
        evaluate=_jit_evaluate(evaluate, state, mesh, options),
        abstract_state=state,
        abstract_batch=_abstract_batch(built, config.data, batch_sharding(mesh)),
        placement=LayerPlacement(rows, axes, state),
        state_axes=axes,
        zero=zero,
        stages=stages,
        batch_sharding=batch_sharding(mesh),
        attention=attention_text(layout, attention),
        count_flops=functools.partial(
            step_flops, config, stages.recomputed if stages else 0.0, model
        ),
        learning_rate=rate,
    )


class _Models(NamedTuple):
    """The model of a run, with the kernels for each use."""

    built: Model  # with the layout's kernels
    trained: Model  # the same, with attention under the remat policy
    evaluated: Model  # with kernels for evaluation, without stacks for training only
    rules: Rules  # the mesh axes of the model's custom logical axes


def _make_models(
    config: Config,
    model: MakeModel | None,
    attention: str,
    platform: str,
    rules: Rules | None,
    unroll_loops: bool,
) -> _Models:
    """The models of `make_engine`, by its arguments."""
    make = model or find_model(config.model)
    plain = make(config.model, plain_kernels())
    advice = "let its class extend jaxscale.models.protocol.Model, which has the optional members"
    check_kind(f"the model of model.family = {config.model.family!r}", plain, Model, advice)
    own = own_rules({**plain.rules, **(rules or {})})
    kernels = make_kernels(
        config.layout,
        attention,
        platform,
        config.model.matmul_dtype,
        one_document=config.data.one_document,
        trains_head=not config.model.adapts,
        rules=own,
        unroll=unroll_loops,
    )
    trained = kernels
    if config.layout.slices_head:
        columns = _head_columns(plain)
        slices_head = plain.slices_head and columns > 0
        check_sliced_head(config.layout, config.model, slices_head=slices_head)
        trained = sliced_kernels(kernels, columns)
    return _Models(
        make(config.model, kernels),
        make(config.model, rematerialised_attention(trained, config.layout.remat_policy)),
        make(config.model, evaluation_kernels(kernels)).evaluated,
        own,
    )


def _head_columns(model: Model) -> int:
    """The columns of the head, padding included; 0 without an axis "vocab"."""
    shapes = head_params(model, jax.eval_shape(model.init, jax.random.key(0)))
    axes = head_params(model, model.axes)
    found = jax.tree.map(
        lambda axes, x: x.shape[axes.index("vocab")] if "vocab" in axes else 0,
        axes,
        shapes,
        is_leaf=is_axes,
    )
    return max(jax.tree.leaves(found), default=0)


def _compiler_options(config: Config, mesh: Mesh, zero: Zero, state: TrainState) -> dict:
    """XLA's options for the step."""
    layout, platform = config.layout, mesh.devices.flat[0].platform
    return step_options(
        mesh,
        pipelined=layout.pipeline > 1,
        deterministic=config.run.deterministic,
        in_place=saves_in_place(layout, zero, platform),
        unrolled=layout.unroll_layers and layout.num_devices == 1,
        matmul_dtype=config.model.matmul_dtype,
        layer=_combined_layer(layout, zero, state.params),
        arguments=state_bytes(state),
    )


def _combined_layer(layout: Layout, zero: Zero, params: Tree) -> LayerBytes | None:
    """The largest layer, if its collectives are to be combined: not in a pipeline, which gathers by
    chunks; nor with experts, whose all-to-alls and loops are between the collectives, so that a
    step can wait longer for fewer, larger ones."""
    alone = layout.batch_shards * layout.context == 1
    if alone or has_experts(zero.axes) or layout.pipeline > 1:
        return None
    return largest_layer(zero, params)


def check_params(engine: Any, params: Any) -> None:
    """Refuses arguments that are not an engine or parameters, such as a state, and parameters that
    were donated.

    Raises:
      ValueError: with the argument to pass.
    """
    check_kind("engine", engine, Engine, ENGINE_ADVICE)
    if isinstance(params, TrainState):
        raise ValueError("params is of type TrainState; pass its parameters, state.params")
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(params)):
        raise ValueError(
            "params are of a state that engine.step or jaxscale.fit took and donated: pass those "
            "of the state that it returned"
        )


def _shardings(abstract: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _make_draw(
    model: Model, stages: PipelineStages | None, ratio: float
) -> Callable[[jax.Array], Tree]:
    """New parameters from a key, with layers in the order of the stages."""
    rows = stages.layer_of_row if stages else None
    return lambda key: scale_initial(model.init(key, rows), model.axes, ratio)


def _update_rule(
    config: Config, own: optax.GradientTransformation | None, shapes: Tree, **made: Any
) -> optax.GradientTransformation:
    """The custom update rule, if any, or that of the config.

    Args:
      made: arguments of `optimizers.make`.
    """
    if own:
        check_own_optimizer(config.optimizer, own, shapes)
        return own
    return optimizers.make(config.optimizer, steps=config.schedule_steps, **made)


def _begin(
    optimizer: optax.GradientTransformation,
    run: RunConfig,
    loss_dtype: jnp.dtype,
    begin_tables: Callable[[], Tree],
    params: Tree,
) -> TrainState:
    """The state before the first step, from parameters."""
    guard, step = init_guard() if run.skip_bad_steps else None, jnp.zeros((), jnp.int32)
    noise = init_averages(loss_dtype) if run.noise_every else None
    return TrainState(step, params, optimizer.init(params), guard, begin_tables(), noise)


def _jit_init(draw: Callable, begin: Callable, state: TrainState, platform: str) -> Callable:
    def init(key: jax.Array) -> TrainState:
        return begin(draw(key))

    return jax.jit(init, out_shardings=_shardings(state), compiler_options=init_options(platform))


def _jit_step(step: Callable, state: TrainState, mesh: Mesh, options: dict) -> Callable:
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(_shardings(state), batch_sharding(mesh)),
        out_shardings=(_shardings(state), replicated(mesh)),
        compiler_options=options,
    )


def _make_evaluate(
    nll: Callable[[Tree, Batch], jax.Array], look_up: Callable[[Tree, Batch], Batch]
) -> Callable[..., EvaluationSums]:
    def evaluate(
        params: Tree, sharded: ShardedBatch, token_bytes: jax.Array, tables: Tree = None
    ) -> EvaluationSums:
        batch = look_up(tables, unpack_sharded(sharded))
        num_bytes = jnp.sum(token_bytes[batch.targets] * batch.weights)
        return EvaluationSums(nll(params, batch), jnp.sum(batch.weights), num_bytes)

    return evaluate


def _jit_evaluate(evaluate: Callable, state: TrainState, mesh: Mesh, options: dict) -> Callable:
    return jax.jit(
        evaluate,
        in_shardings=(
            *(_shardings(state.params), batch_sharding(mesh), replicated(mesh)),
            *((_shardings(state.tables),) if state.tables else ()),
        ),
        out_shardings=replicated(mesh),
        compiler_options=options,
    )


def _abstract_batch(model: Model, data: DataConfig, sharding: NamedSharding) -> ShardedBatch:
    rows, example = data.global_batch_size, example_of(model, data.seq_len, data.output_len)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype, sharding=sharding),
        ShardedBatch(*example._replace(vectors=())),  # a step looks them up
    )


def _open_stages(config: Config, built: Model, make: MakeModel | None) -> PipelineStages:
    stacks = [
        StackLayers(one.name, one.num_layers, one.period, one.model_layers) for one in built.stacks
    ]
    work = model_work(config.model, config.data.seq_len, config.data.output_len, make)
    layers = sum(stack.num_layers for stack in stacks)
    return open_stages(config.layout, stacks, work.head_cost(layers))
