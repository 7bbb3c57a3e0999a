"""Refusal of steps predicted out of memory, before minutes go into compiling them."""

import dataclasses
from collections.abc import Iterator

from jaxscale.choices import divisors
from jaxscale.config import Config
from jaxscale.config.model import by_liveness
from jaxscale.formatting import gigabytes
from jaxscale.planner.memory.experts import rows_of_token
from jaxscale.planner.memory.step import step_memory
from jaxscale.planner.memory.terms import Memory
from jaxscale.sharding.model_trace import itemsize

MARGIN = 1.15
"""Ratio of predicted peak to limit beyond which a step is refused: the largest error on the steps
of `tools/aot_table.json` is 14.5 % (docs/planning.md), and the suite limits each to 15 %."""
CUSTOM_MARGIN = 1.5
"""The same for a custom model: the prediction for a block that writes out its attention scores was
44 % too high."""


def check_device_limit(config: Config, back_end: str, limit_bytes: float, device: str) -> None:
    """Refuses a step whose predicted peak is clearly beyond a device's memory.

    Args:
      config: its layout resolved.
      back_end: "gpu", "tpu" or "cpu".
      limit_bytes: memory of the device that a program may use.
      device: its name.

    Raises:
      ValueError: names a number of micro-batches, or of expert ranks, that fits, where one does.
    """
    needs = _needs(config, back_end)
    margin = CUSTOM_MARGIN if by_liveness(config.model) else MARGIN
    if needs.peak <= margin * limit_bytes:
        return
    layout = config.layout
    each = config.data.global_batch_size // (layout.batch_shards * layout.microbatches)
    said = (
        f"layout.microbatches = {layout.microbatches} puts {each} sequences of "
        f"{config.data.seq_len} tokens in a pass, which needs "
        f"{gigabytes(needs.peak)} per device by the planner's formulas; a program may use "
        f"{gigabytes(limit_bytes)} of {device}; "
    )
    for count in _more(config):
        changed = dataclasses.replace(
            config, layout=dataclasses.replace(layout, microbatches=count)
        )
        needs = _needs(changed, back_end)
        if needs.peak <= limit_bytes:
            said += f"set layout.microbatches = {count}, with {gigabytes(needs.peak)}"
            break
    else:
        said += "no number of micro-batches fits: "
        said += _fewer_expert_ranks(config, back_end, limit_bytes)
    raise ValueError(f"{said}, or proceed anyway with --skip_memory_check")


def _fewer_expert_ranks(config: Config, back_end: str, limit_bytes: float) -> str:
    """Remedy where experts may receive too many rows: on as many devices, fewer ranks of expert and
    more of fsdp."""
    model, layout = config.model, config.layout
    elsewhere = "python -m jaxscale.plan finds layouts that do"
    if not model.num_experts or model.capacity_factor or layout.expert == 1:
        return elsewhere
    length = config.data.output_len
    shards = layout.batch_shards * layout.microbatches * layout.context
    rows = int(rows_of_token(model, layout, length))
    array = rows * config.data.global_batch_size * length // shards * model.d_model
    size = gigabytes(itemsize(model.compute_dtype) * array)
    said = (
        f"with layout.expert = {layout.expert} a rank allocates {rows} rows for each of its "
        f"tokens, as many as may arrive, {size} an array; "
    )
    for ranks in reversed(divisors(layout.expert)[:-1]):
        fsdp = layout.fsdp * layout.expert // ranks
        changed = dataclasses.replace(layout, expert=ranks, fsdp=fsdp)
        needs = _needs(dataclasses.replace(config, layout=changed), back_end)
        if needs.peak <= limit_bytes:
            fits = f"set layout.expert = {ranks} and layout.fsdp = {fsdp}, with "
            return said + fits + gigabytes(needs.peak)
    return said + elsewhere


def _needs(config: Config, back_end: str) -> Memory:
    return step_memory(config, back_end, own_host=back_end != "cpu")


def _more(config: Config) -> Iterator[int]:
    """Larger numbers of micro-batches that split the batch and that the layout supports."""
    layout = config.layout
    for count in divisors(config.data.global_batch_size // layout.batch_shards):
        if count > layout.microbatches:
            try:
                dataclasses.replace(layout, microbatches=count)
            except ValueError:  # the schedule does not support it
                continue
            yield count
