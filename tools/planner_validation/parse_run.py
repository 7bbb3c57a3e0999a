"""Parses the columns of a published run: its model, trainer, layout and machine.

An incomplete row is not guessed: `UnhandledError` names the missing part. Unpublished choices that
users make by fit in memory (the share that is recomputed, the size of a micro-batch) are made here
the same way.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxscale.planner.cost.cluster import Cluster, make_cluster
from jaxscale.planner.model.named_models import published_shape
from jaxscale.planner.model.shape import LatentAttention, ModelShape
from tools.planner_validation.nvidia_recipes import Recipe, recipe_of
from tools.planner_validation.trainer_layout import Trainer, TrainerLayout
from tools.planner_validation.trainer_memory import trainer_memory
from tools.planner_validation.trainers import MEGATRON_2021, policy_of, traits_of


class UnhandledError(ValueError):
    """A missing or unknown part of a row."""


@dataclass(frozen=True)
class Columns:
    """A row of a CSV file."""

    texts: Mapping[str, str]

    def __call__(self, name: str) -> str:
        return (self.texts.get(name) or "").strip()

    def float(self, name: str, default: float = 0.0) -> float:
        """The number in a column; the default where it is empty.

        Raises:
          UnhandledError: it is not a number.
        """
        try:
            return float(self(name) or default)
        except ValueError:
            raise UnhandledError(f"{name} is {self(name)!r}, not a number") from None

    def int(self, name: str, default: int = 0) -> int:
        """The same, rounded."""
        return round(self.float(name, default))


def to_shape(get: Columns) -> ModelShape:
    """The model."""
    if not get("layers") or not get("hidden"):
        known = published_shape(get("model"), get.int("seq")) if get("seq") else None
        if known is None:
            raise UnhandledError(f"the dimensions of {get('model') or 'its model'} are not given")
        return known
    if not get("seq"):
        raise UnhandledError("no sequence length is given")
    attention, experts = get("attn"), get.int("n_experts")
    ranks = re.match(r"mla q(\d+) kv(\d+) nope(\d+) rope(\d+) v(\d+)", attention)
    window, share = 0, 1.0
    if found := re.match(r"swa-?(\d+)", attention):
        window = int(found[1])
        ratio = re.search(r"(\d+):(\d+)", attention)
        share = int(ratio[1]) / (int(ratio[1]) + int(ratio[2])) if ratio else 0.5
    if not (ranks or found or attention in ("", "mha", "gqa", "mqa")):
        raise UnhandledError(f"attn is {attention!r}, which is not known")
    gated = bool(get.int("gated"))
    heads = get.int("heads", 1)
    return ModelShape(
        layers=get.int("layers"),
        d_model=get.int("hidden"),
        heads=heads,
        kv_heads=get.int("kv_heads") or heads,
        head_dim=get.int("head_dim") or get.int("hidden") // heads,
        d_ff=get.int("ff"),
        gated=gated,
        vocab=get.int("vocab"),
        tied=bool(get.int("tied")),
        seq_len=get.int("seq"),
        window=window,
        windowed_share=share,
        biases=not gated and attention == "mha",
        learned_positions=not gated,
        experts=experts,
        top_k=get.int("topk"),
        expert_ff=get.int("moe_ff"),
        shared_experts=get.int("n_shared"),
        dense_layers=get.int("dense_layers"),
        latent=LatentAttention(*map(int, ranks.groups())) if ranks else None,
        extra_predictions=int("includes MTP" in get("notes")),
    )


PRECISIONS = {
    "nvfp4": "fp4",
    "fp8": "fp8",
    "mxfp8": "fp8",
    "fp8-cs": "fp8",
    "int8": "fp8",
    "": "bfloat16",
    "bf16": "bfloat16",
    "fp16": "bfloat16",
}
"""Operands of the layers' matmuls by the published precision."""


def to_traits(get: Columns) -> Trainer:
    """The trainer."""
    notes = get("notes").lower()
    traits = traits_of(get("framework"))
    if traits is None and "tensor-parallel" in notes:
        traits = MEGATRON_2021
    if traits is None:
        raise UnhandledError(f"{get('framework') or 'its trainer'} is not in trainers.py")
    changes = {}
    if get("SP") not in ("", "0", "1"):
        raise UnhandledError(f"SP is {get('SP')!r}, not 0 or 1")
    if get("SP"):
        changes["sequence_parallel"] = get("SP") == "1"
    elif "SP" in get("recompute"):
        changes["sequence_parallel"] = True
    if "flash" in get("recompute") or "transformerengine" in notes:
        changes["attention"] = "fused"
    if "mp_mode" in notes:  # Composer's FSDP: whether gradients are reduced in 16 bits
        changes["gradient_bytes"] = 2 if "mp_mode pure" in notes else 4
    if get("precision") == "bf16" and traits.attention == "written" and get.int("PP", 1) > 1:
        changes["gradient_bytes"] = 4  # Megatron's bfloat16 optimizer sums in 32 bits
    # Megatron-DeepSpeed partitions by type: its users choose two layers fewer than a multiple.
    layers, ranks = get.int("layers"), get.int("PP", 1)
    if "megatron-deepspeed" in get("framework").lower() and layers % ranks:
        changes["balanced_ends"] = (layers + 2) % ranks == 0
    # BigScience's runs there set CUDA_LAUNCH_BLOCKING=1 against hangs (its chronicle).
    changes["blocking"] = "jean zay" in notes
    changes |= recipe(get).traits
    if found := re.search(r"capacity factor ([\d.]+) \(dropping\)", notes):
        # Experts have that many slots each, which MaxText fills as GShard (arXiv 2006.16668) does.
        changes |= {"imbalance": float(found[1]), "masked_dispatch": True}
    changes["frozen"] = "lora" in f"{get('model')} {notes}".lower()
    if get("precision").lower() not in PRECISIONS:
        raise UnhandledError(f"precision is {get('precision')!r}, which is not known")
    changes["matmul"] = PRECISIONS[get("precision").lower()]
    return replace(traits, **changes)


def recipe(get: Columns) -> Recipe:
    """NVIDIA's, where the run is one of theirs."""
    return recipe_of(get("model"), get("hardware"), get("precision"), get("framework"))


def to_choice(get: Columns, shape: ModelShape, traits: Trainer) -> TrainerLayout:
    """The layout, with the published micro-batch or the largest usual one."""
    tensor, pipeline, context, expert = (get.int(name, 1) for name in ("TP", "PP", "CP", "EP"))
    if shape.experts and not get("EP") and "EP blank where not captured" in get("notes"):
        raise UnhandledError("the number of expert ranks is not given")
    devices = _devices(get, tensor * pipeline * context)
    sharding = get("sharding").lower()
    own = 1 if traits.folded_experts else expert
    if found := re.search(r"tp(\d+)", sharding):
        tensor = int(found[1])
    ranks = devices // (tensor * pipeline * context * own)
    if ranks < 1:
        raise UnhandledError(f"TP x PP x CP needs more than the {devices} devices")
    if recipe(get).fsdp and tensor * pipeline == 1:
        sharding = "fsdp"
    zero, shards, replicas = _sharding(sharding, ranks)
    split = shards * replicas * own
    micro, batch = get.int("microbatch"), get.int("global_batch")
    if not batch:
        if get("step_time_s"):
            raise UnhandledError("a step is timed and no global batch is given")
        # Only a rate was measured; it does not depend much on the number of micro-batches.
        micro = micro or max(1, USUAL_TOKENS // shape.seq_len)
        batch = split * micro * (8 * pipeline if pipeline > 1 else 1)
    if not traits.accumulates and pipeline == 1:
        micro = max(1, batch // split)
    elif not micro:
        micro = max(1, min(batch // split, USUAL_TOKENS // shape.seq_len))
    virtual = _chunks(get, shape, pipeline)
    interleaved = virtual > 1
    return TrainerLayout(
        pipeline=pipeline,
        data=replicas,
        fsdp=shards,
        expert=expert,
        context=context,
        tensor=tensor,
        zero_stage=zero,
        microbatch=micro,
        microbatches=max(1, round(batch / (split * micro))),
        virtual_stages=virtual,
        schedule="interleaved" if interleaved else "1f1b",
        fused=True,
        remat=_remat(get),
        traits=traits,
    )


USUAL_TOKENS = 8192
"""Tokens of a micro-batch on one device, where the batch is not published."""

USUAL_DEVICES = 1024
"""Devices where a rate per device-hour is published, and their number is not."""


SCHEDULE = r"(|none|dualpipe|1f1b|1f1b[-/]interleaved( where pp>1|\(vp [^)]*\))?)"
"""Pattern of the column."""


def _chunks(get: Columns, shape: ModelShape, pipeline: int) -> int:
    """Chunks of each rank; of one layer each where a row has an interleaved schedule without a
    number."""
    known = re.fullmatch(SCHEDULE, get("schedule").lower())
    if not known:
        raise UnhandledError(f"schedule is {get('schedule')!r}, which is not known")
    if pipeline == 1 or "interleaved" not in get("schedule"):
        return 1
    noted = re.search(r"VP=(\d+)", get("notes"))
    if get("VP") or noted:
        return get.int("VP") or int(noted[1])  # pyright: ignore[reportOptionalSubscript]
    return shape.layers // pipeline if shape.layers % pipeline == 0 else 1


def _devices(get: Columns, least: int) -> int:
    devices = get.int("n_devices") or least
    return USUAL_DEVICES if devices == 1 and "hours" in get("notes") else devices


SHARDING = re.compile(
    r"(?<!\w)(zero[0-3](/[0-3])?(\(distributed optimizer\))?|(ici_|dcn_)?fsdp\d*|(dp|tp|ep)\d*"
    r"|dcn|none|per pod:|across \d+ pods|x)(?![\w(])"
)
"""The words of the column."""


def _sharding(text: str, ranks: int) -> tuple[int, int, int]:
    """ZeRO stage, ranks of fsdp, replicas.

    Raises:
      UnhandledError: a word that is not in `SHARDING`.
    """
    if unread := re.sub(r"[\s/+;,]+", " ", SHARDING.sub(" ", text)).split():
        raise UnhandledError(f"sharding is {text!r}, of which {unread[0]!r} is not known")
    if text.startswith("zero"):
        return int(text[4]), ranks, 1
    shards = 1
    for found in re.finditer(r"fsdp(\d+)", text):
        shards *= int(found[1])
    if "fsdp" in text or not text:
        shards = shards if 1 < shards <= ranks else ranks
        return 3, shards, ranks // shards
    return 0, ranks, 1


def _remat(get: Columns) -> str:
    """Our remat policy for a trainer's recomputation.

    Raises:
      UnhandledError: its trainer is not known to have a policy of that name.
    """
    text, recomputed = get("recompute"), recipe(get).recompute_modules
    if text.startswith("per-recipe") or _offloads_inputs(get):
        return f"modules:{','.join(recomputed)}" if recomputed else "none"
    policy = policy_of(text, get("framework"))
    if policy is None:
        raise UnhandledError(f"recompute is {text!r}, which {_trainer(get)} is not known to have")
    return policy


def _offloads_inputs(get: Columns) -> bool:
    """MaxText's "custom", whose published runs offload layers' inputs and some names to hosts."""
    return get("recompute") == "custom" and get("framework").lower().startswith("maxtext")


def _trainer(get: Columns) -> str:
    return get("framework") or "its trainer"


FAST_HOST = 200e9
"""Bytes per second of a host link above which trainers offload activations rather than recompute
them: the links of Grace superchips have 205 to 297 GB/s."""


def fitting(
    get: Columns, shape: ModelShape, machine: Cluster, parallelism: TrainerLayout
) -> TrainerLayout:
    """The least recomputation that fits in memory, where a row does not give it."""
    said = get("recompute")
    if _offloads_inputs(get):
        return _offloaded(parallelism)
    if said and "per-recipe" not in said and "unknown" not in said:
        return parallelism
    policies = [parallelism.remat, "save:query,key,value,attention_out", "full"]
    if parallelism.traits.attention == "written":
        policies[1] = "save_all_but_attention"
    usable = USABLE * machine.memory_bytes

    def needed(**changes: str) -> float:
        return float(trainer_memory(shape, replace(parallelism, **changes)).needed)

    needs = [needed(remat=remat) for remat in policies]
    if needs[0] < usable:
        return parallelism
    if machine.chip.host_bytes_per_second > FAST_HOST:
        share = (needs[0] - usable) / max(1.0, needs[0] - needed(offload="activations"))
        return replace(parallelism, offload="activations", offload_share=min(1.0, share))
    if parallelism.traits.lockstep:
        fits = [remat for remat, size in zip(policies, needs) if size < usable]
        return replace(parallelism, remat=fits[0]) if fits else _offloaded(parallelism)
    # Trainers that can recompute some of the layers.
    share = (needs[0] - usable) / max(1.0, needs[0] - needs[2])
    return replace(parallelism, remat="full", remat_share=min(1.0, share))


def _offloaded(parallelism: TrainerLayout) -> TrainerLayout:
    return replace(parallelism, remat="offload:query,key,value", offload="activations")


USABLE = 0.97
"""Share of a device's memory that users fill."""

CHIPS = {"trainium2-core": "Trainium2", "tpuv3-chip": "TPUv3"}
"""Devices whose name in rows is neither the name in `hardware.csv` nor its beginning."""


def to_cluster(get: Columns, parallelism: TrainerLayout) -> Cluster:
    """The machine, with its own network."""
    name = CHIPS.get(get("hardware").lower(), get("hardware"))
    if name == "V100" and get.int("devices_per_node") == 16:
        name = "V100-SXM3"  # of DGX-2
    overrides = {}
    if get("inter_node_GBs_per_dev"):
        overrides["network_bytes_per_second"] = get.float("inter_node_GBs_per_dev") * 1e9
    devices = int(parallelism.num_devices)
    try:
        machine = make_cluster(name, devices, **overrides)
        if machine.torus:
            # With "dcn" in the sharding, each data-parallel replica is a slice.
            slices = int(parallelism.data) if "dcn" in get("sharding") else 1
            inside = make_cluster(machine.name, devices // slices, **overrides)
            return replace(machine, torus=inside.torus, tiers=inside.tiers)
        if get.int("devices_per_node"):
            nodes = {"node_devices": get.int("devices_per_node")}
            return make_cluster(machine.name, devices, **overrides, **nodes)
    except ValueError as error:
        raise UnhandledError(str(error)) from error
    return machine
