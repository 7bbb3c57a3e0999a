"""Published training runs, one a row, as the planner's records.

The columns are those of a CSV file with a source, a machine, a model, a layout and what was
measured. A row that does not say enough is not guessed at: `read` says why.
"""

import csv
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxscale.planner import published
from jaxscale.planner.choice import Choice, Traits
from jaxscale.planner.machine import Cluster, cluster
from jaxscale.planner.shape import Latent, Shape
from jaxscale.planner.software import traits_of

Columns = Mapping[str, str]


class UnhandledError(ValueError):
    """What a row lacks."""


@dataclass(frozen=True)
class Row:
    """A run: what was planned, and what was measured of it (0 where nothing was)."""

    id: str
    source: str
    hardware: str
    model: str
    shape: Shape
    cluster: Cluster
    choice: Choice
    step_seconds: float
    memory_bytes: float
    out_of_memory: bool
    columns: Columns

    @property
    def times_step(self) -> bool:
        """Whether the row says enough for a prediction of its step."""
        return self.step_seconds > 0

    @property
    def machine(self) -> tuple[str, str]:
        """Runs that share one calibration."""
        return self.source, self.hardware


def read(path: str | pathlib.Path) -> tuple[list[Row], list[tuple[Columns, str]]]:
    """The rows of a file that can be handled, and the others with the reason.

    Raises:
      ValueError: the file is not of this format; names a missing column.
    """
    with pathlib.Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        missing = sorted({"source", "hardware", "layers", "hidden"} - set(reader.fieldnames or ()))
        if missing:
            raise ValueError(f"{path} has no column {missing[0]!r}; it is no file of measured runs")
        found, unhandled = [], []
        for columns in reader:
            try:
                found.append(to_row(columns))
            except UnhandledError as reason:
                unhandled.append((columns, str(reason)))
    return found, unhandled


def to_row(columns: Columns) -> Row:
    """One row.

    Raises:
      UnhandledError: it lacks something, or names something that is not known.
    """
    get = _Getter(columns)
    shape = _shape(get)
    traits = _traits(get)
    devices = get.int("n_devices") or get.int("TP", 1) * get.int("PP", 1)
    choice = _choice(get, traits, devices)
    machine = _cluster(get, choice)
    if not _says_remat(get):
        choice = _lightest_that_fits(shape, machine, choice)
    step = _step_seconds(get, shape, choice, devices)
    memory, failed = _memory(get)
    return Row(
        id=get("id"), source=get("source"), hardware=get("hardware"), model=get("model"),
        shape=shape, cluster=machine, choice=choice, step_seconds=step, memory_bytes=memory,
        out_of_memory=failed, columns=columns,
    )  # fmt: skip


@dataclass(frozen=True)
class _Getter:
    columns: Columns

    def __call__(self, name: str) -> str:
        return (self.columns.get(name) or "").strip()

    def float(self, name: str, default: float = 0.0) -> float:
        try:
            return float(self(name) or default)
        except ValueError:
            return default

    def int(self, name: str, default: int = 0) -> int:
        return round(self.float(name, default))


def _shape(get: _Getter) -> Shape:
    if not get("layers") or not get("hidden"):
        raise UnhandledError(f"the dimensions of {get('model') or 'its model'} are not given")
    if not get("seq"):
        raise UnhandledError("no sequence length is given")
    attention, experts = get("attn"), get.int("n_experts")
    ranks = re.match(r"mla q(\d+) kv(\d+) nope(\d+) rope(\d+) v(\d+)", attention)
    window, share = 0, 1.0
    if found := re.match(r"swa(\d+)", attention):
        window = int(found[1])
        ratio = re.search(r"(\d+):(\d+)", attention)
        share = int(ratio[1]) / (int(ratio[1]) + int(ratio[2])) if ratio else 0.5
    gated = bool(get.int("gated"))
    return Shape(
        layers=get.int("layers"), d_model=get.int("hidden"), heads=get.int("heads"),
        kv_heads=get.int("kv_heads") or get.int("heads"),
        head_dim=get.int("head_dim") or get.int("hidden") // get.int("heads"),
        d_ff=get.int("ff"), gated=gated, vocab=get.int("vocab"), tied=bool(get.int("tied")),
        seq_len=get.int("seq"), window=window, windowed_share=share,
        biases=not gated and not attention.startswith("gqa"), learned_positions=not gated,
        experts=experts, top_k=get.int("topk"), expert_ff=get.int("moe_ff"),
        shared_experts=get.int("n_shared"), dense_layers=get.int("dense_layers"),
        latent=Latent(*map(int, ranks.groups())) if ranks else None,
    )  # fmt: skip


PRECISIONS = {"nvfp4": "fp4", "fp8": "fp8", "mxfp8": "fp8", "fp8-cs": "fp8", "int8": "fp8"}
"""Operands of the layers' products by the precision that is printed; all else are 16 bits."""


def _traits(get: _Getter) -> Traits:
    traits = traits_of(get("framework"))
    if traits is None:
        raise UnhandledError(
            f"{get('framework') or 'its trainer'} is not among planner/software.py"
        )
    notes = get("notes").lower()
    changes = {}
    if "transformerengine" in notes:
        changes["attention"] = "fused"
    if get("SP"):
        changes["sequence_parallel"] = get("SP") == "1"
    elif "SP" in get("recompute"):
        changes["sequence_parallel"] = True
    if "flash" in get("recompute"):
        changes["attention"] = "fused"
    if "mp_mode" in notes:  # Composer's FSDP: what is reduced in 16 bits
        changes["gradient_bytes"] = 2 if "mp_mode pure" in notes else 4
    if get("precision") == "bf16" and traits.attention == "written" and get.int("PP", 1) > 1:
        changes["gradient_bytes"] = 4  # Megatron's bfloat16 optimizer sums in 32 bits
    if "embedding-balanced" in get("group"):
        changes["balanced_ends"] = True
    changes["matmul"] = PRECISIONS.get(get("precision").lower(), "bfloat16")
    return replace(traits, **changes)


def _choice(get: _Getter, traits: Traits, devices: int) -> Choice:
    tensor, pipeline, context, expert = (get.int(name, 1) for name in ("TP", "PP", "CP", "EP"))
    sharding = get("sharding").lower()
    own = 1 if traits.folded_experts else expert
    if found := re.search(r"tp(\d+)", sharding):
        tensor = int(found[1])
    ranks = devices // (tensor * pipeline * context * own)
    if ranks < 1:
        raise UnhandledError(f"TP x PP x CP needs more than the {devices} devices")
    zero, shards, replicas = _sharding(sharding, ranks)
    batch, micro = get.int("global_batch"), get.int("microbatch")
    if not batch:
        raise UnhandledError("no global batch is given")
    split = shards * replicas * own
    if not micro or not (traits.accumulates or pipeline > 1):
        micro = max(1, batch // split) if pipeline == 1 else 1
    microbatches = max(1, round(batch / (split * micro)))
    virtual = get.int("VP", 1) if pipeline > 1 else 1
    interleaved = "interleaved" in get("schedule") and virtual > 1
    return Choice(
        pipeline=pipeline, data=replicas, fsdp=shards, expert=expert, context=context,
        tensor=tensor, zero_stage=zero, microbatch=micro, microbatches=microbatches,
        virtual_stages=virtual if interleaved else 1,
        schedule="interleaved" if interleaved else "1f1b", fused=True,
        remat=_remat(get("recompute"), traits), context_method="ring", traits=traits,
    )  # fmt: skip


def _sharding(text: str, ranks: int) -> tuple[int, int, int]:
    """ZeRO stage, ranks of fsdp, replicas."""
    if text.startswith("zero"):
        return int(text[4]), ranks, 1
    shards = 1
    for found in re.finditer(r"fsdp(\d+)", text):
        shards *= int(found[1])
    if "fsdp" in text:
        shards = shards if 1 < shards <= ranks else ranks
        return 3, shards, ranks // shards
    return 0, ranks, 1


def _says_remat(get: _Getter) -> bool:
    return get("recompute") not in ("", "per-recipe (see scripts/performance)") and (
        "unknown" not in get("recompute")
    )


FAST_HOST = 200e9
"""Bytes a second of a host link beside which activations can wait in host memory for free: those
of Grace superchips, 450 GB/s, bring a layer's back while one computes."""


def _lightest_that_fits(shape: Shape, machine: Cluster, choice: Choice) -> Choice:
    """What a trainer's users would have chosen: no more recomputation than memory asks for."""
    policies = ["none", "save:query,key,value,attention_out", "full"]
    if choice.traits.attention == "written":
        policies[1] = "save_all_but_attention"
    if machine.chip.host_bytes_per_second > FAST_HOST:
        return choice

    def peak(remat: str) -> float:
        return float(published.memory(shape, replace(choice, remat=remat)).peak)

    peaks = [peak(remat) for remat in policies]
    if peaks[0] < machine.memory_bytes or choice.traits.lockstep:
        fits = [remat for remat, size in zip(policies, peaks) if size < machine.memory_bytes]
        return replace(choice, remat=(fits or ["full"])[0])
    # Trainers in which a number of layers can be made again.
    share = (peaks[0] - machine.memory_bytes) / max(1.0, peaks[0] - peaks[2])
    return replace(choice, remat="full", remat_share=min(1.0, share))


def _remat(text: str, traits: Traits) -> str:
    """A policy of ours for what others call recomputation."""
    if text.startswith("full"):
        return "full"
    if text == "custom":  # MaxText: names are saved or offloaded, most of the rest is repeated
        return "save:query,key,value,attention_out"
    if "selective" in text and traits.attention == "written":
        return "save_all_but_attention"
    return "none"


CHIPS = {"a100-80": "A100-80", "h100": "H100-SXM", "h200": "H200-SXM", "b200": "B200-SXM",
         "b300": "B300-SXM", "gb200": "GB200-NVL72", "gb300": "GB300-NVL72", "v100": "V100-SXM2",
         "trainium2-core": "Trainium2"}  # fmt: skip


def _cluster(get: _Getter, choice: Choice) -> Cluster:
    name = get("hardware")
    overrides = {}
    if get("inter_node_GBs_per_dev"):
        overrides["network_bytes_per_second"] = get.float("inter_node_GBs_per_dev") * 1e9
    devices = int(choice.num_devices)
    try:
        machine = cluster(CHIPS.get(name.lower(), name), devices, **overrides)
        if machine.torus:
            # Slices are what is not said to be on the network between them.
            slices = int(choice.data) if "dcn" in get("sharding") else 1
            inside = cluster(machine.name, devices // slices, **overrides)
            return replace(machine, torus=inside.torus, tiers=inside.tiers)
        if get.int("devices_per_node"):
            nodes = {"node_devices": get.int("devices_per_node")}
            return cluster(machine.name, devices, **overrides, **nodes)
    except ValueError as error:
        raise UnhandledError(str(error)) from error
    return machine


def _step_seconds(get: _Getter, shape: Shape, choice: Choice, devices: int) -> float:
    """The step as it was measured, or as follows from measured tokens or operations."""
    if get.float("step_time_s"):
        return get.float("step_time_s")
    tokens = float(choice.global_batch) * shape.seq_len
    if get.float("tok_s_dev"):
        return tokens / (get.float("tok_s_dev") * devices)
    return get.float("calc_step_s")


def _memory(get: _Getter) -> tuple[float, bool]:
    text = get("mem_GB")
    if text.upper() == "OOM" or "out of memory" in get("notes").lower():
        return 0.0, True
    return get.float("mem_GB") * 1e9, False
