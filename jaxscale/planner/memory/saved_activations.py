"""Saved activations of a layer per token, by remat policy: exact.

The suite compares them with `training.remat.rematerialised`, value by value.
"""

from dataclasses import dataclass

from jaxscale.config.layout import Layout, RematPolicy
from jaxscale.config.model import ModelConfig
from jaxscale.ops.sizes import LANES
from jaxscale.sharding.model_trace import Ints, itemsize, maximum, select


@dataclass(frozen=True)
class SavedValue:
    """One saved activation, of all tensor ranks together."""

    name: str
    elements: int  # per token
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes per token."""
        return self.elements * self.element_bytes


def saved_values(
    model: ModelConfig, remat: RematPolicy, *, cross: bool = False, experts: bool = False
) -> list[SavedValue]:
    """The activations that a policy of `Layout.remat` saves, without a few constants per layer.

    Args:
      experts: of a layer with experts; what it saves of the rows of its experts is
        `experts.saved_row_bytes`.
      cross: of a layer with cross attention; what it saves of each token that attention reads is
        `saved_source_values`.
    """
    width, names = itemsize(model.compute_dtype), remat.names
    stream, queries = model.d_model, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    values = model.num_kv_heads * model.value_dim
    hidden = model.shared_d_ff if experts else model.d_ff
    sizes = {
        "query": queries,
        "key": keys,
        "value": values,
        "attention": queries,
        # Of a parallel block nothing but the sum of the stream needs it.
        "attention_out": stream * (not model.parallel_block),
        "mlp_up": hidden,
        "mlp_gate": hidden if model.gated else 0,
    }
    kept = {"input": stream} | {name: sizes[name] for name in names}
    if not remat.by_names:
        # The inputs of all matmuls and norms, which are as many where norms come after attention
        # and MLP. Instead of the attention block's output the residual stream after it is saved,
        # and the kernel's result even if it is recomputed.
        kept |= {"attention norm": stream, "mlp norm": stream, "attention": queries}
        if model.qk_norm:
            kept |= {"query before its norm": queries, "key before its norm": keys}
        if model.kv_rank:
            kept |= _latent_values(model, names)
        if experts and not model.shared_d_ff:
            del kept["mlp norm"]
        if model.norm_placement == "both":
            kept |= {"attention before its norm": stream, "mlp before its norm": stream}
        # What each adapter's first matrix makes; that of the MLP's output is recomputed.
        adapted = set(model.adapted_weights) - {"down"}
        kept |= {f"{name} adapter": model.lora_rank for name in adapted}
    if cross:
        both = {"query", "attention", "attention_out", "attention norm"}
        both = (both | {"q adapter", "out adapter"}) & kept.keys()
        kept |= {f"cross {name}": kept[name] for name in both}
    found = [SavedValue(name, size, width) for name, size in kept.items() if size]
    if experts and remat.by_names:
        found.append(SavedValue("experts chosen", model.experts_per_token, 4))
    elif experts:
        found += _router_values(model)
    if "attention" in names:
        # log(sum(exp(score))), of every head.
        sums = SavedValue("attention sums", model.num_heads, max(width, 4))
        found += [sums] * (1 + cross)
    return found


def _latent_values(model: ModelConfig, names: frozenset[str] | tuple[str, ...]) -> dict[str, int]:
    """What latent attention saves beside the matmuls' results, or instead: the compressed features
    before and after their norms, and values that are as wide as keys for the kernel."""
    heads = model.num_heads
    kept = {f"compressed {n}": model.kv_rank for n in range(2)}
    kept |= {f"compressed queries {n}": model.query_rank for n in range(2)}
    kept["value"] = heads * model.head_dim
    if model.value_dim < model.head_dim:
        kept["values out of attention"] = heads * model.value_dim
        if "attention" not in names:
            kept["attention"] = 0
    return kept


def _router_values(model: ModelConfig) -> list[SavedValue]:
    """Of each token in float32: the router's input, the scores, one for each choice and expert, and
    what the balancing loss reads; and masks and places of its choices."""
    experts, choices = model.num_experts, model.experts_per_token
    wide = max(itemsize(model.compute_dtype), 4)
    found = [
        SavedValue("router input", model.d_model, wide),
        SavedValue("chosen scores", choices * experts, wide),
        SavedValue("choices", choices * experts, 1),
        SavedValue("gates", choices, wide),
        SavedValue("places", choices, 4),
    ]
    if model.has_balance_loss:
        found += [SavedValue("scores", experts, wide)] * 3 + [SavedValue("chosen", experts, 1)]
    return found


def saved_source_values(model: ModelConfig, remat: RematPolicy) -> list[SavedValue]:
    """Keys and values of cross attention, for each token that it reads."""
    width, keys = itemsize(model.compute_dtype), model.num_kv_heads * model.head_dim
    found = [SavedValue(name, keys, width) for name in ("key", "value") if name in remat.names]
    if not remat.by_names:
        adapted = {"k", "v"} & {*model.adapted_weights}
        found += [SavedValue(f"{name} adapter", model.lora_rank, width) for name in adapted]
    return found


def saved_bytes(
    model: ModelConfig,
    remat: RematPolicy,
    layout: Layout | None = None,
    *,
    cross: bool = False,
    experts: bool = False,
) -> Ints:
    """Saved bytes per layer and token, of all tensor ranks together; `cross` and `experts` as
    above.

    Args:
      layout: whose rows of tensor repeat some values; None has none.
    """
    values = saved_values(model, remat, cross=cross, experts=experts)
    if layout is None:
        return sum(one.num_bytes for one in values)
    return sum(one.num_bytes * _repeats(one, layout) for one in values)


def _repeats(value: SavedValue, layout: Layout) -> Ints:
    """Ranks of tensor that save the same: of what lies between matmuls, those of all rows; of what
    a matmul gathered, where tensor has rows, those of all columns."""
    name = value.name.removeprefix("cross ")
    if name in ("attention norm", "mlp norm"):
        return select(layout.tensor_rows > 1, layout.tensor_columns, 1)
    in_stream = name in ("input", "attention_out") or name.endswith("before its norm")
    if in_stream and not name.startswith(("query", "key")):
        return 1
    return layout.tensor_rows


def saved_source_bytes(model: ModelConfig, remat: RematPolicy) -> int:
    """The same per token that cross attention reads."""
    return sum(one.num_bytes for one in saved_source_values(model, remat))


SUBLANES = 8
"""Rows of a tile of LANES columns in a TPU's memory."""


def stash_refusal(model: ModelConfig, layout: Layout) -> str:
    """Why `stash_bytes` does not know what a pipeline keeps, with what to set; "" where it does."""
    if model.kv_rank:
        return (
            f"layout.pipeline = {layout.pipeline}: there is no formula for what a pipeline keeps "
            "of latent attention; set layout.pipeline = 1"
        )
    if model.prediction_depth:
        return (
            f"layout.pipeline = {layout.pipeline}: there is no formula for what a pipeline keeps "
            f"of modules for further tokens (model.prediction_depth = {model.prediction_depth}); "
            "set layout.pipeline = 1"
        )
    if model.expert_pattern:
        return (
            f"layout.pipeline = {layout.pipeline}: there is no formula for what a pipeline keeps "
            f"of layers in turns (model.expert_pattern = {model.expert_pattern!r}); set "
            "layout.pipeline = 1"
        )
    what = "experts" if model.num_experts else "adapters" if model.lora_rank else ""
    if what and not _by_table(layout.remat_policy):
        return (
            f"layout.remat = {layout.remat!r}: there is no formula for what a pipeline keeps of "
            f"layers with {what} under a policy by names; set layout.remat = 'full', 'none' or "
            "'keep:4'"
        )
    if model.lora_rank and model.num_encoder_layers:
        return (
            f"layout.pipeline = {layout.pipeline}: there is no formula for what a pipeline keeps "
            f"of an encoder and a decoder with adapters (model.lora_rank = {model.lora_rank}); set "
            "layout.pipeline = 1"
        )
    return ""


def stash_bytes(
    model: ModelConfig,
    remat: RematPolicy,
    layout: Layout | None = None,
    *,
    cross: bool = False,
    experts: bool = False,
    tiled: bool = False,
) -> dict[str, Ints]:
    """Saved bytes of a pipeline per layer and token, of all tensor ranks together, by the table's
    buffers: "residual_b" from F to B, "residual_w" from F to W, "cotangent" from B to W.

    `layout` and `experts` are as in `saved_bytes`; what matmuls of W gathered over columns of
    tensor is saved whole. With `cross` attention, what it saves of each token that it reads is
    `source_stash_bytes`, and what layers with experts keep of their rows is
    `experts.stash_row_bytes`. A TPU's buffers are `tiled`: heads and their features are padded to
    whole tiles.

    W needs no weights: it reads saved activations and what B computed. The suite compares this with
    `pipeline.backward_split`.
    """
    names = set(remat.names)
    before, parallel = model.norm_placement in ("before", "both"), model.parallel_block
    rows = layout.tensor_rows if layout else 1
    whole = layout.tensor_columns if layout else 1
    stream, heads = model.d_model, rows * model.num_heads
    d_ff = rows * (model.shared_d_ff if experts else model.d_ff)
    queries, keys = (rows * size for size in _head_features(model, layout, tiled))
    matmuls = ("mlp_up", "mlp_gate")[: 1 + model.gated]
    hidden = len(matmuls) * d_ff
    sizes = {"query": queries, "key": keys, "value": keys}
    # Gradients of matmul outputs: of the last matmul of attention and MLP, and of the earlier ones.
    cotangent = (1 if parallel else 2) * stream + queries + 2 * keys + hidden
    # The activation is recomputed from both its factors.
    cotangent += 2 * d_ff * model.mlp_bias
    if _by_table(remat):
        residual_b = (1 if parallel else 2) * stream + queries + 2 * keys + hidden * model.mlp_bias
        residual_b += (queries + keys) * model.qk_norm
        residual_b += 2 * stream * (model.norm_placement == "both")
        residual_w = 2 * stream * whole + queries + hidden * (not model.mlp_bias)
        sums = remat.kind != "save_all_but_attention"
        # What the first matrix of an adapter makes, and its gradient. That of the MLP's output is
        # recomputed in B.
        recomputed = "down" in model.adapted_weights
        residual_w += rows * model.lora_rank * (len(model.adapted_weights) - recomputed)
        cotangent += rows * model.lora_rank * (len(model.adapted_weights) + recomputed)
    else:
        residual_b, residual_w = sum(sizes[name] for name in names & sizes.keys()), 0
        there = [name for name in matmuls if name in names]
        # Else B recomputes the norm that W reads.
        normed = not before or sizes.keys() <= names
        mlp_there = len(there) == len(matmuls)
        rest_of_mlp = mlp_there and not model.mlp_bias and "attention_out" in names
        rest_of_mlp = rest_of_mlp and model.norm_placement != "both"
        input_for_w = normed or rest_of_mlp or (parallel and mlp_there)
        input_for_w = input_for_w or (cross and {"query", "attention_out"} <= names)
        residual_w += stream * input_for_w
        residual_b += stream * (not input_for_w)
        cotangent += stream * (not normed)
        sums = "attention" in names
        residual_w += queries * sums
        cotangent += queries * (not sums)
        if rest_of_mlp:
            residual_w += stream
        elif parallel:
            cotangent += stream * (not mlp_there)
        else:
            residual_b += stream * ("attention_out" in names)
            cotangent += stream
        if model.mlp_bias:
            residual_b += len(there) * d_ff
        else:
            residual_w += len(there) * d_ff
            cotangent += hidden - len(there) * d_ff
    width = itemsize(model.compute_dtype)
    wide = max(width, 4) * heads
    found = {
        "residual_b": width * residual_b + wide * sums,
        "residual_w": width * residual_w,
        "cotangent": width * cotangent,
    }
    features, _ = _head_features(model, layout, tiled)
    more = [_cross_stash(model, remat, whole, features)] if cross else []
    if experts:
        more.append(_router_stash(model))
    return {name: size + sum(one[name] for one in more) for name, size in found.items()}


def _by_table(remat: RematPolicy) -> bool:
    """Whether a pass keeps what a layer saves without a policy, or nothing."""
    return remat.kept_passes is not None or not remat.by_names


def _head_features(model: ModelConfig, layout: Layout | None, tiled: bool) -> tuple[Ints, Ints]:
    """Features of the queries of all heads, and of the keys; `tiled` as in `stash_bytes`."""
    counts = model.num_heads, model.num_kv_heads
    if not tiled:
        queries, keys = (count * model.head_dim for count in counts)
        return queries, keys
    columns, wide = layout.tensor_columns if layout else 1, -(-model.head_dim // LANES) * LANES
    queries, keys = (
        columns * -(-maximum(1, count // columns) // SUBLANES) * SUBLANES * wide for count in counts
    )
    return queries, keys


def _cross_stash(
    model: ModelConfig, remat: RematPolicy, whole: Ints, queries: Ints
) -> dict[str, Ints]:
    """What a layer's cross attention adds, per token of the decoder; of `whole` ranks together what
    a matmul gathered."""
    width, stream, names = itemsize(model.compute_dtype), model.d_model, remat.names
    sums = max(width, 4) * model.num_heads
    if _by_table(remat):
        each = width * (stream + queries)
        kept = remat.kind != "save_all_but_attention"
        gathered = width * (stream * whole + queries)
        return {"residual_b": each + sums * kept, "residual_w": gathered, "cotangent": each}
    query, attended, joined = (one in names for one in ("query", "attention", "attention_out"))
    # Else B recomputes the norm that W reads; and W reads what enters the norms of what is saved.
    normed = joined and query
    for_w = normed or (joined and {"mlp_up", "mlp_gate"} <= {*names})
    return {
        "residual_b": width * (queries * query + stream * (joined and not for_w)) + sums * attended,
        "residual_w": width * (queries * attended + stream * for_w),
        "cotangent": width * (stream * (2 - normed) + queries * (2 - attended)),
    }


def _router_stash(model: ModelConfig) -> dict[str, int]:
    """What the router of a layer with experts adds, instead of the stream before an MLP and its
    gradient where there is no shared expert: W reads what the router read, in float32, and the
    gradients of its scores."""
    width, stream = itemsize(model.compute_dtype), model.d_model
    wide = max(width, 4)
    absent = width * stream * (not model.shared_d_ff)
    values = {one.name: one.num_bytes for one in _router_values(model)}
    read, scores = values.pop("router input"), model.num_experts * wide
    # Of each choice its row and, where rows are as many as choices, of each row its choice.
    kept = values["choices"] + values["gates"]
    kept += values["places"] * (1 if model.capacity_factor else 2)
    kept += 2 * scores * model.has_balance_loss
    return {
        "residual_b": kept,
        "residual_w": read - absent,
        "cotangent": scores - absent,
    }


def source_stash_bytes(
    model: ModelConfig, remat: RematPolicy, layout: Layout | None = None, *, tiled: bool = False
) -> dict[str, Ints]:
    """Those of cross attention's keys and values, for each token that it reads."""
    width, (_, keys) = itemsize(model.compute_dtype), _head_features(model, layout, tiled)
    saved = 2 if _by_table(remat) else sum(name in remat.names for name in ("key", "value"))
    return {"residual_b": width * saved * keys, "residual_w": 0, "cotangent": 2 * width * keys}
