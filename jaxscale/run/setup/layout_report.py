"""Report of a layout (`--describe`): sharding of every parameter, memory, pipeline, warnings."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.choices import check_kind
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig, by_liveness, is_own_family
from jaxscale.config.model.adapters import KINDS
from jaxscale.config.remat_policy import REMATS, parse_remat
from jaxscale.formatting import human_bytes, table
from jaxscale.model_families.shipped import find_family
from jaxscale.models.protocol import head_params, stored_weights
from jaxscale.ops.storage.quantised_storage import unpack_weights
from jaxscale.pipeline import summary
from jaxscale.pipeline.layer_placement import stack_of
from jaxscale.pipeline.stages import PipelineStages, open_stages
from jaxscale.planner.memory.at_rest import sides
from jaxscale.planner.memory.step import step_memory
from jaxscale.planner.memory.terms import Memory
from jaxscale.planner.search.trainable_model import check_parameters
from jaxscale.run.setup.layout_bytes import (
    buffer_bytes,
    gradient_bytes,
    host_array_table,
    leaf_bytes,
    tree_bytes,
)
from jaxscale.run.setup.step_programs import program_rows
from jaxscale.sharding.model_trace import ParamShape
from jaxscale.sharding.resolve import is_axes, layer_rules, leaf_name
from jaxscale.sharding.rules import Axes, Rules
from jaxscale.sharding.zero import Zero
from jaxscale.training.accumulation import quantises_once
from jaxscale.training.engine import ENGINE_ADVICE, Engine
from jaxscale.training.flops import step_flops
from jaxscale.training.pruning.matrices import pruned_matrices
from jaxscale.training.state_placement import state_bytes
from jaxscale.training.tracing.traces import model_trace, model_work

LARGE_BYTES = 1 << 20
"""The size from which a replicated parameter gets a warning."""


def describe_layout(engine: Engine) -> str:
    """A text with the layout, its memory and that of its alternatives, and the sharding of every
    parameter.

    Bytes are predicted by `planner.memory`, without compiling.

    Examples:
      >>> config, engine = jaxscale.open_engine(jaxscale.load("tiny"))
      >>> print(jaxscale.describe_layout(engine))
      layout
        model          llama: ...
    """
    check_kind("engine", engine, Engine, ENGINE_ADVICE)
    parts = [_summary(engine), *_pipeline(engine), _stages(engine)]
    parts += [*_remats(engine), *_offloads(engine), *host_array_table(engine)]
    return "\n\n".join([*parts, _parameters(engine), *_warnings(engine)])


def _summary(engine: Engine) -> str:
    layout, config = engine.layout, engine.config.model
    matmuls = f" with {config.matmul_dtype} matmuls" if config.matmul_dtype else ""
    stored = f", of the base {config.base_dtype}" if config.base_dtype else ""
    rows = [
        *_family(engine),
        ("devices", f"{layout.num_devices}: {layout.axes_text or 'every axis 1'}"),
        ("zero stage", f"{layout.zero_stage} over {_zero_axes(layout)}"),
        ("micro-batches", f"{layout.microbatches}, {layout.accumulation}"),
        ("remat", layout.remat),
        ("attention", engine.attention),
        *_tensor(layout),
        (
            "types",
            f"parameters {config.param_dtype}{stored}, compute {config.compute_dtype}{matmuls}, "
            f"gradients {engine.zero.accumulation_dtype}{_reduced_in(engine)}",
        ),
        ("parameters", _parameter_counts(engine)),
        *_tables(engine),
        *_adapters(engine),
        *_optimizer(engine),
        *_pruning(engine),
        *program_rows(engine),
        ("memory", _peak(engine)),
    ]
    return "layout\n" + table(rows)


def _family(engine: Engine) -> list[tuple[str, str]]:
    """The row of a shipped model's family and paper."""
    model = engine.config.model
    if is_own_family(model.family):
        return []
    return [("model", f"{model.family}: {find_family(model.family).paper}")]


def _tables(engine: Engine) -> list[tuple[str, str]]:
    """The row of each embedding table."""
    config, found = engine.config, []
    for name, one in engine.model.tables.items():
        state = engine.abstract_state.tables[name]
        size = human_bytes(state_bytes(state))
        stale = config.optimizer.table_staleness
        late = f", updated {stale} steps later" if stale else ""
        share = one.rows // engine.layout.num_devices
        text = f"{one.rows:,} rows of {one.width}, {share:,} on each device ({size}){late}"
        found.append((f"table {name}", text))
    return found


def _adapters(engine: Engine) -> list[tuple[str, str]]:
    """The row of a model's adapters, and of the cost of a step with them."""
    model, data = engine.config.model, engine.config.data
    if not model.adapts:
        return []
    work = model_work(model, data.seq_len, data.output_len)
    name = next(name for name in KINDS if getattr(model, name))
    cost = f"{work.training_flops / work.sequence_flops:.2f} forward passes"
    return [("adapters", f"{name} = {getattr(model, name)}; a step has the FLOPs of {cost}")]


def _tensor(layout: Layout) -> list[tuple[str, str]]:
    """The row of `layout.overlap_tensor`."""
    if not layout.overlap_tensor:
        return []
    return [("tensor", f"ring collectives of {layout.tensor - 1} sends, overlapping with matmuls")]


def _muon_flops(array: ParamShape) -> int:
    """FLOPs of Muon's update of a layer's matrix; 0 for a vector."""
    if not (pair := [math.prod(side) for side in sides(array)]):
        return 0
    return 5 * (4 * min(pair) ** 2 * max(pair) + 2 * min(pair) ** 3)


def _optimizer(engine: Engine) -> list[tuple[str, str]]:
    """The row of Muon's FLOPs on each device, for a decoder without experts."""
    settings = engine.config.model
    others = is_own_family(settings.family) or settings.num_encoder_layers or settings.num_experts
    if engine.config.optimizer.name != "muon" or others:
        return []
    sizes, model = engine.layout.sizes, engine.config.model
    rows = jax.tree.leaves(engine.abstract_state.params["layers"])[0].shape[0]
    rules = layer_rules(sizes, rows)
    over = [axis for axis in (rules[-1]["layers"] if rules else ()) if sizes[axis] > 1]
    each = math.ceil(rows / math.prod(sizes[axis] for axis in over or ["pipeline"]))
    flops = sum(
        map(_muon_flops, (one for one in model_trace(model).parameters if one.part == "layers"))
    )
    where = f", split over {' x '.join(over)}" if over else ""
    return [
        (
            "optimizer",
            f"muon: {each} of {rows} layers on each device{where}, "
            f"{each * flops / 1e12:.3g} TFLOP per step, divided by tensor",
        )
    ]


def _pruning(engine: Engine) -> list[tuple[str, str]]:
    """The row of pruned weights, and of what pruning costs."""
    rule = engine.config.optimizer
    if not rule.prunes:
        return []
    params = engine.placement.part("params").canonical
    fixed = engine.zero.frozen or jax.tree.map(lambda leaf: False, params)
    found = pruned_matrices(rule, engine.model.axes, params, fixed).values()
    weights = sum(one.size * one.count for one in found)
    zeros = sum(one.num_pruned * one.count for one in found)
    end = rule.sparsity_begin + (rule.sparsity_steps or 0)
    reads = f"{rule.pruning_reads:.3g} readings of each weight per step"
    return [
        (
            "sparsity",
            f"{zeros:,} of {weights:,} weights are zero after update {end}, {weights - zeros:,} "
            f"remain; until then pruning makes {reads}, and sums counts only",
        )
    ]


def _pipeline(engine: Engine) -> list[str]:
    """The schedule of a rank, and its buffers between ticks."""
    if engine.stages is None:
        return []
    zero, buffers = engine.zero, buffer_bytes(engine)
    buffers["embedding and head, gathered"] = _outer_bytes(engine)
    rows = [*summary.table_rows(engine.stages)]
    if zero.kept.gathers or zero.reduces:
        axes = _zero_axes(engine.layout)
        rows.append((f"over {axes}", f"a {engine.layout.pipeline_gather} at a time"))
    if padding := _padding(engine):
        rows.append(("padding", f"{human_bytes(padding)} of rows without a layer, mean over ranks"))
    rows += [(f"buffer: {name}", human_bytes(size)) for name, size in buffers.items() if size]
    return ["pipeline\n" + table(rows)]


def _outer_bytes(engine: Engine) -> int:
    """Bytes of a pipeline rank's gathered embedding and head, or slice of the head; a whole tied
    head is the embedding."""
    zero, params = engine.zero, engine.abstract_state.params
    rules = {**zero.replicated_rules, "outer_embed": zero.replicated_rules["embed"]}
    width, head, axes = zero.compute_dtype.itemsize, params["head"], zero.axes["head"]
    embed = tree_bytes(params["embed"], zero.axes["embed"], rules, zero.sizes, width)
    if engine.layout.slices_head:
        head, axes = (head_params(engine.model, tree) for tree in (params, zero.axes))
        rules = {**rules, "vocab": (*rules["vocab"], "pipeline")}
    return embed + tree_bytes(head, axes, rules, zero.sizes, width)


def _padding(engine: Engine) -> int:
    """Bytes between steps of rows without a layer: each rank has the rows of the largest rank, and
    each chunk those of the largest chunk."""
    zero, state, axes = engine.zero, engine.abstract_state, engine.state_axes
    empty = {name: float((rows < 0).mean()) for name, rows in engine.placement.layer_of_row.items()}

    def absent(path: tuple, leaf: Any, names: Axes) -> float:
        if "layers" not in names:
            return 0.0
        return empty[stack_of(path, empty)] * leaf_bytes(leaf, names, zero.state_rules, zero.sizes)

    trees = ((tree.params, tree.opt_state) for tree in (state, axes))
    return round(sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(absent, *trees))))


def _reduced_in(engine: Engine) -> str:
    dtype = engine.zero.reduction_dtype
    return "" if dtype == engine.zero.accumulation_dtype else f" (summed over ranks in {dtype})"


def _stages(engine: Engine) -> str:
    """The table of the model's bytes on a device for each ZeRO stage."""
    names = ("parameters", "gradients", "optimizer", "weights in use", "together")
    rows: list[tuple[str, ...]] = [("", *names)]
    state, axes = engine.abstract_state, engine.state_axes
    for stage in range(4):
        zero = dataclasses.replace(engine.zero, stage=stage)
        at_rest = zero.state_rules
        params = tree_bytes(state.params, axes.params, at_rest, zero.sizes)
        rules = zero.accumulator_rules(single_visit=engine.layout.single_visit)
        grads = gradient_bytes(engine, rules)
        moments = tree_bytes(state.opt_state, axes.opt_state, at_rest, zero.sizes)
        kept = _kept_weights(engine, zero)
        if engine.stages and engine.stages.table.order.directions > 1:
            more_grads, more_weights = _second_direction(engine, zero, rules)
            grads, kept = grads + more_grads, kept + more_weights
        chosen = " *" if stage == engine.zero.stage else ""
        sizes = (params, grads, moments, kept, params + grads + moments + kept)
        rows.append((f"zero {stage}{chosen}", *(human_bytes(size) for size in sizes)))
    return "bytes of the model on each device in a step\n" + table(rows)


def _second_direction(engine: Engine, zero: Zero, rules: Rules) -> tuple[int, int]:
    """Bytes of gradients and weights that a pipeline with two directions adds: accumulators of the
    mirrored rank's layers, and the layers of both in the compute type, unless those of one are kept
    anyway."""
    stacks, width = [stack.name for stack in engine.model.stacks], zero.compute_dtype.itemsize
    params, axes = (
        {name: tree.params[name] for name in stacks}
        for tree in (engine.abstract_state, engine.state_axes)
    )
    grads = tree_bytes(params, axes, rules, zero.sizes, zero.accumulation_dtype.itemsize)
    if zero.keeps:
        return grads, tree_bytes(params, axes, zero.replicated_rules, zero.sizes, width)
    return grads, 2 * tree_bytes(params, axes, zero.state_rules, zero.sizes, width)


def _kept_weights(engine: Engine, zero: Zero) -> int:
    """Bytes of the weights that a step keeps in the compute type, gathered or cast once; quantised
    weights are two arrays of half the bytes."""
    params, axes = engine.abstract_state.params, engine.state_axes.params
    if not zero.keeps:
        at_rest = jnp.dtype(engine.config.model.param_dtype)
        layout = dataclasses.replace(engine.layout, zero_stage=zero.stage)
        quantises = quantises_once(engine.model, layout)
        casts = quantises or (layout.casts_once and at_rest != zero.compute_dtype)
        stacks = [stack.name for stack in engine.model.stacks] if casts else []
        params, axes = ({name: tree[name] for name in stacks} for tree in (params, axes))
    width = zero.compute_dtype.itemsize
    return tree_bytes(params, axes, zero.replicated_rules, zero.sizes, width)


def _zero_axes(layout: Layout) -> str:
    others = (f" x {axis} {n}" for axis in ("expert", "context") if (n := layout.sizes[axis]) > 1)
    return f"fsdp {layout.fsdp}{''.join(others)}"


def _parameter_counts(engine: Engine) -> str:
    model, canonical = engine.config.model, engine.placement.part("params").canonical
    whole = jax.eval_shape(lambda x: unpack_weights(x, stored_weights(engine.model)), canonical)
    count = sum(leaf.size for leaf in jax.tree.leaves(whole))
    notes = []
    if isinstance(model, ModelConfig) and model.num_experts:
        active = model_trace(model).num_active_params(model.experts_per_token)
        notes.append(f"{active:,} active per token")
    if engine.zero.frozen is not None:
        trained = engine.zero.trained(canonical, engine.zero.frozen)
        notes.append(f"{sum(leaf.size for leaf in trained):,} trained")
    return f"{count:,}" + (f" ({', '.join(notes)})" if notes else "")


def _peak(engine: Engine) -> str:
    needs = _predict(engine)
    said = (
        f"{human_bytes(needs.peak)} on each device: {human_bytes(needs.arguments)} between steps, "
        f"{human_bytes(needs.temporaries)} in a step"
    )
    return f"{said}, temporaries by liveness" if by_liveness(engine.config.model) else said


def _remats(engine: Engine) -> list[str]:
    """The table of remat policies: bytes saved for the backward pass, peak memory, added FLOPs."""
    config, layout = engine.config, engine.layout
    if config.model.side_width:
        return []  # its layers have nothing to recompute
    if engine.stages:
        return _passes(engine, engine.stages)
    policies = [*REMATS, *([] if layout.remat in REMATS else [layout.remat])]
    predicted = {remat: _predict(engine, remat=remat) for remat in policies}
    policies.sort(key=lambda remat: -predicted[remat].stash)
    rows = [("", "saved by layers", "whole step", "FLOPs")]
    for remat in policies:
        chosen, needs = " *" if remat == layout.remat else "", predicted[remat]
        changed = dataclasses.replace(layout, remat=remat)
        flops = step_flops(dataclasses.replace(config, layout=changed))
        more = flops.hardware / flops.model
        held, peak = human_bytes(needs.stash), human_bytes(needs.peak)
        rows.append((f"{remat}{chosen}", held, peak, f"+{more - 1:.0%}"))
    return ["layout.remat on each device\n" + table(rows)]


def _passes(engine: Engine, chosen: PipelineStages) -> list[str]:
    """The table of memory and time of a pipeline that saves residuals of none, some or all
    passes."""
    layout = engine.layout
    if layout.schedule_spec.name.endswith(".csv"):
        return []  # the file has the recompute operations

    def open_with(remat: str) -> PipelineStages:
        changed = dataclasses.replace(layout, remat=remat)
        return open_stages(changed, chosen.stacks, chosen.head_cost)

    def seconds(stages: PipelineStages) -> float:
        return stages.simulated.lockstep_makespan

    everything = open_with("none")
    shortest = seconds(everything)
    most = everything.program.slots["residual_b"]
    # With all except one saved, recomputing that one needs as much memory as saving it.
    some = sorted({most * quarters // 4 for quarters in (1, 2, 3)} - {0, most - 1, most})
    policies = ["none", *(f"keep:{n}" for n in reversed(some))]
    policies += ["full"] * (not layout.offloads("activations"))
    policies += [layout.remat] * (layout.remat not in policies)
    rows = [("", "saved in slots", "whole step", "time")]
    for remat in policies:
        needs, slower = _predict(engine, remat=remat), ""
        if parse_remat(remat).kept_passes is not None:
            slower = f"+{seconds(open_with(remat)) / shortest - 1:.0%}"
        held, peak = human_bytes(needs.stash), human_bytes(needs.peak)
        rows.append((remat + " *" * (remat == layout.remat), held, peak, slower))
    return ["layout.remat on each device\n" + table(rows)]


def _offloads(engine: Engine) -> list[str]:
    """The table of bytes that each offload moves, on back ends with separate host memory."""
    rows, layout = [], engine.layout
    has_activations = layout.pipeline == 1 or layout.remat_policy.kept_passes != 0
    for what in ("optimizer", "activations")[: 1 + has_activations]:
        needs = _predict(engine, offload=what)
        chosen = " *" if layout.offloads(what) else ""
        moved = needs.host_optimizer if what == "optimizer" else needs.host_stash
        rows.append((f"{what}{chosen}", human_bytes(moved)))
    return ["layout.offload moves to host memory\n" + table(rows)]


def _predict(engine: Engine, **changes: Any) -> Memory:
    """The predicted memory of a step on this back end."""
    platform = engine.mesh.devices.flat[0].platform
    layout = dataclasses.replace(engine.layout, **changes)
    config = dataclasses.replace(engine.config, layout=layout)
    return step_memory(config, platform, own_host=platform != "cpu")


def _parameters(engine: Engine) -> str:
    rows = [("parameter", "logical axes", "mesh axes", "shape", "bytes per device")]
    for name, axes, leaf in _leaves(engine):
        spec = leaf.sharding.spec
        mesh_axes = ", ".join("+".join(e) if isinstance(e, tuple) else e or "-" for e in spec)
        shape = " x ".join(map(str, leaf.shape))
        size = human_bytes(leaf_bytes(leaf, axes, engine.zero.state_rules, engine.zero.sizes))
        rows.append((name, ", ".join(axes), mesh_axes, shape, size))
    return table(rows)


def _warnings(engine: Engine) -> list[str]:
    """Warnings about large replicated parameters, replicated state that could be sharded, and a
    pipeline with a large bubble."""
    ranks = engine.layout.tensor
    zero = _zero_axes(engine.layout)
    shards = [axis for axis, on in (("tensor", ranks > 1), (zero, engine.zero.gathers)) if on]
    found = [
        f"warning: {name} ({human_bytes(leaf.size * leaf.dtype.itemsize)}) is replicated over "
        f"{' and '.join(shards)}: none of its axes is sharded over them"
        for name, _, leaf in _leaves(engine)
        if shards and leaf.size * leaf.dtype.itemsize >= LARGE_BYTES
        if not any(leaf.sharding.spec)
    ]
    found += _replicated(engine)
    if engine.stages:
        sequences = engine.config.data.global_batch_size
        if advice := summary.advice(engine.layout, engine.stages, sequences):
            found.append(advice)
    return ["\n".join(found)] if found else []


def _replicated(engine: Engine) -> list[str]:
    """A note on parameters and optimizer state that data and fsdp ranks replicate and could
    shard."""
    layout, config = engine.layout, engine.config
    alone = layout.data * layout.fsdp
    sharded = dataclasses.replace(layout, data=1, fsdp=alone, zero_stage=3)
    try:
        check_parameters(dataclasses.replace(config, layout=sharded))
    except ValueError:
        return []  # a dimension does not divide over that many ranks
    now, then = _predict(engine), _predict(engine, data=1, fsdp=alone, zero_stage=3)
    here, there = (needs.parameters + needs.optimizer for needs in (now, then))
    if here - there < LARGE_BYTES:
        return []
    axes = " x ".join(
        f"{name} {getattr(layout, name)}" for name in ("data", "fsdp") if getattr(layout, name) > 1
    )
    return [
        f"note: each device stores {human_bytes(here)} of parameters and optimizer state, of which "
        f"{human_bytes(here - there)} are replicated over {axes}; layout.fsdp = {alone}, "
        f"layout.data = 1 and layout.zero_stage = 3 would leave {human_bytes(there)}"
    ]


def _leaves(engine: Engine) -> list[tuple[str, Axes, Any]]:
    axes = jax.tree.leaves(engine.state_axes.params, is_leaf=is_axes)
    leaves = jax.tree_util.tree_leaves_with_path(engine.abstract_state.params)
    return [(leaf_name(path), a, leaf) for a, (path, leaf) in zip(axes, leaves)]
