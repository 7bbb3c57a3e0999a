"""Checks of a layout against its model and data, without devices.

Nothing here imports JAX, since the planner uses the same checks.
"""

import math
from collections.abc import Mapping

from jaxscale.choices import nearest_divisors
from jaxscale.config import DataConfig, zero_stage
from jaxscale.config.layout import ULYSSES, Layout
from jaxscale.config.model import ModelConfig, ModelSettings
from jaxscale.config.model.settings import SPREAD_ATTENTIONS
from jaxscale.config.schedule_spec import parse_lengths
from jaxscale.sharding.rules import divides_heads, spreads_attention

MOST_ROWS = 2**31 - 1
"""Of an embedding table: ids are int32, and one number more stands for no row."""


def check_divides(layout: Layout, batch: int) -> None:
    """Refuses a batch that does not split evenly over replicas and micro-batches.

    Raises:
      ValueError: names the settings to change.
    """
    parts = layout.batch_shards * layout.microbatches
    if batch % parts:
        below, above = batch // parts * parts, -(-batch // parts) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        experts = f"layout.expert {layout.expert} x " if layout.expert > 1 else ""
        raise ValueError(
            f"data.global_batch_size = {batch} does not split into layout.data {layout.data} x "
            f"layout.fsdp {layout.fsdp} x {experts}layout.microbatches {layout.microbatches} = "
            f"{parts} parts; set data.global_batch_size to {nearest}, or change the layout"
        )


def check_overlap(layout: Layout, batch: int) -> None:
    """Refuses `overlap_experts` without expert parallelism, or with one sequence per micro-batch.

    Raises:
      ValueError: names the setting to change.
    """
    if not layout.overlap_experts:
        return
    if layout.expert == 1:
        raise ValueError(
            "layout.overlap_experts = True with layout.expert = 1: every rank has all experts, "
            "and there is no all-to-all to overlap; set layout.overlap_experts = False"
        )
    if batch >= 2 * layout.batch_shards * layout.microbatches:
        return
    fewer = nearest_divisors(layout.microbatches, layout.microbatches)
    change = (
        f"layout.microbatches = {fewer}"
        if fewer
        else f"data.global_batch_size = {2 * layout.batch_shards}"
    )
    raise ValueError(
        "layout.overlap_experts = True overlaps the all-to-all of half of a rank's sequences with "
        "the matmuls of the other half, and a rank has one sequence of a micro-batch; set "
        f"{change}, or layout.overlap_experts = False"
    )


def check_nodes(layout: Layout, model: ModelSettings) -> None:
    """Refuses `expert_nodes` with a capacity.

    Raises:
      ValueError: names the setting to change.
    """
    if layout.expert_nodes > 1 and model.capacity_factor:
        raise ValueError(
            f"layout.expert_nodes = {layout.expert_nodes} with model.capacity_factor = "
            f"{model.capacity_factor} is not available in this version: a node does not know how "
            "many tokens of others it takes; set layout.expert_nodes = 1, or "
            "model.capacity_factor = 0"
        )


def check_ring(layout: Layout) -> None:
    """Refuses `overlap_tensor` without tensor parallelism.

    Raises:
      ValueError: names the setting to change.
    """
    if layout.overlap_tensor and layout.tensor == 1:
        raise ValueError(
            "layout.overlap_tensor = True with layout.tensor = 1: matmuls have no collectives to "
            "overlap; set layout.overlap_tensor = False"
        )


def check_pipeline_gather(layout: Layout) -> None:
    """Refuses `pipeline_gather = 'layer'` where no weights are gathered or gradients scattered.

    Raises:
      ValueError: names the setting to change.
    """
    if layout.pipeline == 1 or layout.pipeline_gather == "chunk":
        return
    if layout.zero_ranks == 1 or not zero_stage.scatters(layout.zero_stage):
        raise ValueError(
            f"layout.pipeline_gather = 'layer' with layout.fsdp = {layout.fsdp}, layout.expert = "
            f"{layout.expert}, layout.context = {layout.context} and layout.zero_stage = "
            f"{layout.zero_stage}: neither weights nor gradients of a micro-batch are in shards; "
            "set layout.pipeline_gather = 'chunk'"
        )


def check_matmuls(layout: Layout, matmul_dtype: str) -> None:
    """Refuses int8 matmuls with `overlap_tensor`.

    Raises:
      ValueError: names the setting to change.
    """
    if matmul_dtype == "int8" and layout.overlap_tensor:
        raise ValueError(
            "model.matmul_dtype = 'int8' with layout.overlap_tensor = True: the chunks of a ring "
            "step would each have other scales; set layout.overlap_tensor = False"
        )


def check_ulysses(layout: Layout, model: ModelSettings) -> None:
    """Refuses heads that ranks of context cannot divide, for Ulysses.

    Raises:
      ValueError: names the setting to change.
    """
    if not isinstance(model, ModelConfig):  # others are refused by the kernel
        return
    if refusal := ulysses_refusal(layout, model.num_heads, model.num_kv_heads):
        raise ValueError(refusal)


def ulysses_refusal(layout: Layout, heads: int, key_heads: int) -> str:
    """An error text where Ulysses cannot divide a model's heads among ranks; "" where it can, or is
    not used."""
    if layout.context == 1 or layout.context_method != ULYSSES:
        return ""
    ranks, columns = layout.context, layout.tensor_columns
    heads, key_heads = heads // columns, max(key_heads // columns, 1)
    if divides_heads(ranks, heads, key_heads):
        return ""
    nearest = max(n for n in range(1, ranks) if divides_heads(n, heads, key_heads))
    each = f" on each of {columns} ranks of tensor" if columns > 1 else ""
    return (
        f"layout.context_method = 'ulysses' cannot divide {heads} heads and {key_heads} key/value "
        f"heads{each} over layout.context = {ranks}; set layout.context = {nearest}, or "
        "layout.context_method = 'ring' or 'gather'"
    )


def check_spread_attention(layout: Layout, kernel: str) -> None:
    """Refuses an attention kernel for whole sequences where they are split.

    Raises:
      ValueError: names the setting to change.
    """
    if layout.segments > 1 and kernel == "cudnn":
        raise ValueError(
            f"model.attention = 'cudnn' needs queries and keys of whole sequences, and "
            f"layout.sequence_chunks = {layout.segments} splits the queries; set model.attention = "
            "'auto', or layout.sequence_chunks = 1"
        )
    if spreads_attention(layout) and kernel not in ("auto", *SPREAD_ATTENTIONS):
        raise ValueError(
            f"model.attention = {kernel!r} needs whole sequences on a device, and layout.context = "
            f"{layout.context} shards them; set model.attention = 'auto', layout.context = 1, or "
            "layout.context_method = 'ulysses'"
        )


def check_tensor_rows(layout: Layout, model: ModelSettings) -> None:
    """Refuses rows of tensor for a model with experts or multi-token prediction.

    Raises:
      ValueError: names the setting to change.
    """
    rows = layout.tensor_rows
    if rows > 1 and model.num_experts:
        raise ValueError(
            f"layout.tensor_rows = {rows} with model.num_experts = {model.num_experts} is "
            "not available in this version: experts have their columns over tensor alone; set "
            "layout.tensor_rows = 1"
        )
    if rows > 1 and model.prediction_depth:
        raise ValueError(
            f"layout.tensor_rows = {rows} with model.prediction_depth = {model.prediction_depth} "
            "is not available in this version; set layout.tensor_rows = 1"
        )


def check_sequence_chunks(layout: Layout, model: ModelSettings) -> None:
    """Refuses segments of sequences for models whose layers need whole sequences.

    Raises:
      ValueError: names the setting to change.
    """
    if layout.segments == 1:
        return
    balances = model.num_experts and model.balance_weight
    for setting, is_needed, why, change in (
        ("num_encoder_layers", model.num_encoder_layers, "an encoder reads", ""),
        ("causal", not model.causal, "attention reads", ""),
        ("prediction_depth", model.prediction_depth, "MTP modules read", "0"),
        ("router", model.experts_choose, "experts choose from", "'top_k'"),
        ("capacity_factor", model.capacity_factor, "an expert's capacity is of", "0"),
        ("balance_weight", balances, "the auxiliary loss is a product of means over", "0"),
    ):
        if is_needed:
            other = f"model.{setting} = {change}, or " if change else ""
            raise ValueError(
                f"layout.sequence_chunks = {layout.sequence_chunks} with model.{setting} = "
                f"{getattr(model, setting)!r}: {why} whole sequences; set {other}"
                "layout.sequence_chunks = 1"
            )


def check_table_rows(layout: Layout, rows: Mapping[str, int]) -> None:
    """Refuses embedding tables whose rows do not divide over the devices.

    Args:
      rows: of each table, by its name.

    Raises:
      ValueError: names the numbers of rows that are allowed.
    """
    devices = layout.num_devices
    for name, count in rows.items():
        if not 1 <= count <= MOST_ROWS:
            raise ValueError(
                f"table {name!r} has {count} rows; from 1 to {MOST_ROWS} (ids are of 32 bits): use "
                "several tables"
            )
        if count % devices:
            below, above = count // devices * devices, -(-count // devices) * devices
            nearest = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"table {name!r} has {count} rows, which do not divide over the layout's {devices} "
                f"devices; give it {nearest} (n-grams: model.ngram_rows), or change the layout"
            )


def check_table_sequences(layout: Layout, rows: Mapping[str, int]) -> None:
    """Refuses segments of sequences for a model with tables.

    Raises:
      ValueError: names the setting to change.
    """
    if rows and layout.segments > 1:
        raise ValueError(
            f"layout.sequence_chunks = {layout.sequence_chunks} is not available for a model with "
            "tables: rows are looked up for whole sequences; set layout.sequence_chunks = 1"
        )


def check_sliced_head(layout: Layout, model: ModelSettings, *, slices_head: bool) -> None:
    """Refuses a sliced head for a model whose loss needs whole columns.

    Args:
      slices_head: the model's.

    Raises:
      ValueError: names the setting to change.
    """
    if not layout.slices_head or slices_head:
        return
    depth = getattr(model, "prediction_depth", 0)
    why = f"the model of model.family = {model.family!r} has a custom loss or head, and does "
    why += "not declare Model.slices_head"
    if depth:
        why = f"model.prediction_depth = {depth} adds a loss for each further token"
    raise ValueError(
        f"layout.head = 'sliced' is not available for this model: {why}; set layout.head = 'last'"
    )


def check_sequence(layout: Layout, data: DataConfig) -> None:
    """Refuses a sequence length that ranks of context and tensor do not divide.

    Raises:
      ValueError: with the nearest lengths that they divide.
    """
    lengths = parse_lengths(layout.segment_lengths)
    if layout.pipeline > 1 and lengths and sum(lengths) != data.seq_len:
        raise ValueError(
            f"layout.segment_lengths = {layout.segment_lengths!r} sum to {sum(lengths)}; set "
            f"lengths that sum to data.seq_len = {data.seq_len}, or '' for equal ones"
        )
    chunks = 2 * layout.context if layout.context > 1 else 1
    unit = math.lcm(chunks, layout.context * layout.tensor_columns) * layout.segments
    rows = f" / layout.tensor_rows {layout.tensor_rows}" if layout.tensor_rows > 1 else ""
    for name in ("seq_len", "target_len"):
        length = getattr(data, name)
        if length % unit:
            below, above = length // unit * unit, -(-length // unit) * unit
            nearest = f"{below} or {above}" if below else f"{above}"
            two = " (two chunks a rank)" if layout.context > 1 else ""
            parts = "sequence_chunks =" if not layout.segment_parts else "segment_lengths' parts:"
            two += f" x layout.{parts} {layout.segments}" if layout.segments > 1 else ""
            raise ValueError(
                f"data.{name} = {length} does not split over layout.context = {layout.context}"
                f"{two} x layout.tensor = {layout.tensor}{rows}, which takes multiples of {unit}; "
                f"set data.{name} = {nearest}, or change the layout"
            )
