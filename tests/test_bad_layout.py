"""Layouts that do not fit a model, its batch or the devices are refused before anything compiles,
with the setting to change and the nearest that works."""

import re

import pytest

from jaxscale.batch import Batch
from jaxscale.config import from_dict
from jaxscale.models.decoder import Decoder
from jaxscale.models.head import Head
from jaxscale.models.protocol import Params, Stream, Sums
from jaxscale.run.setup.layout import open_engine

MODEL = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "d_ff": 96, "vocab_size": 300}
DATA = {"global_batch_size": 16, "seq_len": 32}

# (settings, what the error says); eight devices.
SEGMENTS = (
    "layout.schedule=seq1f1b layout.sequence_chunks=2 layout.pipeline=2 layout.microbatches=2"
)
SLICED = "layout.head=sliced layout.pipeline=2 layout.microbatches=2"
REFUSED = [
    # devices
    ("layout.fsdp=16", "the layout (fsdp 16) needs a multiple of 16 devices and there are 8"),
    ("layout.data=3", "(data 3) needs 3 devices and there are 8"),
    ("layout.data=2 layout.fsdp=2 layout.context=4", "needs 16 devices and there are 8"),
    ("layout.tensor=5", "needs a multiple of 5 devices and there are 8"),
    (
        "layout.data=1 layout.context=-1 layout.tensor=3",
        "(tensor 3) needs a multiple of 3 devices and there are 8",
    ),
    # the batch
    ("data.global_batch_size=12", "set data.global_batch_size to 8 or 16, or change the layout"),
    ("data.global_batch_size=4", "set data.global_batch_size to 8, or change the layout"),
    ("layout.microbatches=3", "microbatches 3 = 24 parts; set data.global_batch_size to 24"),
    ("layout.fsdp=4 layout.microbatches=4", "= 32 parts; set data.global_batch_size to 32"),
    ("layout.accumulation=layered layout.microbatches=5", "set data.global_batch_size to 40"),
    # heads, widths and the vocabulary over tensor
    (
        "layout.tensor=8 model.num_heads=4",
        "model.num_heads = 4 does not divide over",
    ),
    ("layout.tensor=8 model.num_heads=4", "the nearest that does is layout.tensor = 4"),
    ("layout.tensor=4 model.num_heads=12 model.num_kv_heads=3", "model.num_kv_heads = 3 does not"),
    ("layout.tensor=4 model.num_heads=6 model.num_kv_heads=6", "is layout.tensor = 3 or 6"),
    ("layout.tensor=4 model.d_ff=90", "model.d_ff = 90 does not divide over layout.tensor = 4"),
    ("layout.tensor=4 model.d_ff=90", "the nearest that does is layout.tensor = 3 or 5"),
    # the width over fsdp, in every stage that shards something
    ("layout.fsdp=8 model.d_model=60", "model.d_model = 60 does not divide over layout.fsdp = 8"),
    ("layout.fsdp=8 model.d_model=60", "the nearest that does is layout.fsdp = 6 or 10"),
    ("layout.fsdp=8 model.d_model=60 layout.zero_stage=1", "layout.fsdp = 6 or 10"),
    ("layout.fsdp=4 model.d_model=62 layout.zero_stage=2", "is layout.fsdp = 2 or 31"),
    # sequences over context and tensor
    ("layout.context=4 data.seq_len=36", "takes multiples of 8; set data.seq_len = 32 or 40"),
    ("layout.context=8 data.seq_len=24", "set data.seq_len = 16 or 32, or change the layout"),
    ("layout.context=8 data.seq_len=8", "set data.seq_len = 16, or change the layout"),
    ("layout.tensor=4 data.seq_len=30", "x layout.tensor = 4, which takes multiples of 4"),
    ("layout.context=2 layout.tensor=4 data.seq_len=28", "set data.seq_len = 24 or 32"),
    # rows of tensor
    (
        "layout.tensor=4 layout.tensor_rows=3",
        "layout.tensor_rows = 3 does not divide layout.tensor = 4; the nearest that does is "
        "layout.tensor_rows = 2 or 4",
    ),
    ("layout.tensor_rows=2", "does not divide layout.tensor = 1; the nearest that does is layout."),
    ("layout.tensor_rows=0", "layout.tensor_rows = 0 is too small; at least 1"),
    (
        "layout.tensor=2 layout.tensor_rows=2 layout.context=2",
        "layout.tensor_rows = 2 with layout.context = 2 is not available in this version",
    ),
    (
        "model.family=mixtral layout.tensor=2 layout.tensor_rows=2 layout.expert=2",
        "set layout.expert = 1, or layout.tensor_rows = 1",
    ),
    (
        "model.family=mixtral layout.tensor=2 layout.tensor_rows=2",
        "layout.tensor_rows = 2 with model.num_experts = 8 is not available in this version",
    ),
    (
        "layout.tensor=4 layout.tensor_rows=4 model.d_model=90",
        "model.d_model = 90 does not divide over layout.tensor_rows = 4; the nearest that does is "
        "layout.tensor_rows = 3 or 5",
    ),
    (
        "layout.fsdp=4 layout.tensor=2 layout.tensor_rows=2 model.d_model=100",
        "model.d_model / layout.tensor_rows = 50 does not divide over layout.fsdp = 4; the nearest "
        "that does is layout.fsdp = 2 or 5",
    ),
    (
        "layout.tensor=8 layout.tensor_rows=2 model.num_heads=6 model.num_kv_heads=6",
        "model.num_kv_heads = 6 does not divide over layout.tensor / layout.tensor_rows = 4; the "
        "nearest that does is layout.tensor / layout.tensor_rows = 3 or 6",
    ),
    (
        "layout.tensor=8 layout.tensor_rows=2 data.seq_len=30",
        "layout.tensor = 8 / layout.tensor_rows 2, which takes multiples of 4; set data.seq_len = "
        "28 or 32",
    ),
    # attention that cannot be had
    ("layout.context=2 model.attention=reference", "needs whole sequences on a device, and layout"),
    ("layout.context=2 model.attention=reference", "or layout.context_method = 'ulysses'"),
    (
        "layout.context=4 layout.fsdp=2 layout.context_method=ulysses "
        "model.num_heads=6 model.num_kv_heads=2",
        "set layout.context = 2, or layout.context_method = 'ring' or 'gather'",
    ),
    ("model.attention=cudnn", "needs an NVIDIA GPU and the platform is cpu"),
    ("model.attention=splash", "needs a TPU and the platform is cpu"),
    # what a remat policy or a type cannot mean
    (
        "model.family=gpt model.tied_embeddings=True layout.remat=save:mlp_gate",
        "names mlp_gate, and the MLP of model.family = 'gpt' has no gate; leave mlp_gate",
    ),
    ("model.compute_dtype=float64", "model.compute_dtype = 'float64' needs JAX_ENABLE_X64=1"),
    ("optimizer.moment_dtype=float64", "optimizer.moment_dtype = 'float64' needs JAX_ENABLE_X64"),
    (
        "layout.overlap_tensor=True layout.tensor=2 model.matmul_dtype=int8",
        "model.matmul_dtype = 'int8' with layout.overlap_tensor = True",
    ),
    (
        "layout.expert=2",
        "layout.expert = 2, but this model has no experts (model.family = 'llama'); set",
    ),
    (
        "model.family=mixtral layout.data=1 layout.expert=8 model.num_experts=6",
        "model.num_experts = 6 does not divide over layout.expert = 8; the nearest that does is "
        "layout.expert = 6",
    ),
    (
        "model.family=mixtral layout.expert=2 layout.fsdp=4 data.global_batch_size=12",
        "layout.expert 2 x layout.microbatches 1 = 8 parts; set data.global_batch_size to 8 or 16",
    ),
    (
        "model.family=qwen3_moe layout.tensor=4 model.expert_d_ff=34",
        "model.expert_d_ff (or model.d_ff) = 34 does not divide over layout.tensor = 4",
    ),
    (
        "model.family=mixtral layout.expert=16",
        "(expert 16) needs a multiple of 16 devices and there are 8",
    ),
    (
        "model.family=qwen3_moe model.num_layers=4 model.expert_pattern=DE layout.pipeline=4 "
        "layout.microbatches=4",
        "4, 2 periods of model.expert_pattern, is less than the 4 stages of layout.pipeline = 4 x "
        "1 chunks; each needs at least one period of 2 layers: set model.num_layers = 8, or layout",
    ),
    ("model.family=mixtral layout.expert=0", "layout.expert = 0; at least 1, or -1"),
    (
        "model.family=mixtral layout.expert=4 layout.expert_nodes=3",
        "layout.expert_nodes = 3 does not divide layout.expert = 4; the nearest that does is",
    ),
    (
        "model.family=mixtral layout.expert=4 layout.expert_nodes=2 model.capacity_factor=2",
        "layout.expert_nodes = 2 with model.capacity_factor = 2.0 is not available in this ver",
    ),
    (
        "model.family=mixtral layout.overlap_experts=True",
        "layout.overlap_experts = True with layout.expert = 1: every rank has all experts, and t",
    ),
    (
        "model.family=mixtral layout.expert=2 layout.overlap_experts=True layout.microbatches=2",
        "a rank has one sequence of a micro-batch; set layout.microbatches = 1, or layout.overlap",
    ),
    (
        "model.family=mixtral layout.expert=8 layout.overlap_experts=True data.global_batch_size=8",
        "set data.global_batch_size = 16, or layout.overlap_experts = False",
    ),
    (
        "layout.overlap_tensor=True",
        "layout.overlap_tensor = True with layout.tensor = 1: matmuls have no collectives to",
    ),
    (
        "layout.overlap_tensor=True layout.tensor=4 layout.tensor_rows=2",
        "layout.overlap_tensor = True with layout.tensor_rows = 2 is not available in this version",
    ),
    (
        "layout.overlap_tensor=True layout.tensor=2 layout.pipeline=2 layout.microbatches=2",
        "layout.overlap_tensor = True with layout.pipeline = 2 is not available in this version",
    ),
    (
        "layout.unroll_layers=True layout.pipeline=2 layout.microbatches=4",
        "layout.unroll_layers = True with layout.pipeline = 2 is not available in this version",
    ),
    (
        "model.family=mixtral layout.unroll_layers=True layout.expert=2",
        "layout.unroll_layers = True with layout.expert = 2 is not available in this version",
    ),
    ("layout.pipeline_gather=layers", "layout.pipeline_gather = 'layers' is not known"),
    (
        "layout.pipeline_gather=layer layout.pipeline=2 layout.microbatches=2 layout.fsdp=2 "
        "layout.zero_stage=1",
        "neither weights nor gradients of a micro-batch are in shards; set layout.pipeline_gather",
    ),
    ("layout.head=first", "layout.head = 'first' is not known; it can be last, sliced, auto"),
    (
        f"{SLICED} model.family=deepseek_v3 model.num_experts=0 model.kv_rank=8 "
        "model.num_kv_heads=8 model.rope_head_dim=4 model.prediction_depth=1",
        "layout.head = 'sliced' is not available for this model: model.prediction_depth = 1 adds a "
        "loss for each further token; set layout.head = 'last'",
    ),
    ("layout.sequence_chunks=0", "layout.sequence_chunks = 0 is too small; at least 1"),
    (
        "layout.sequence_chunks=2 layout.pipeline=2 layout.microbatches=2",
        "layout.schedule = '1f1b': 1f1b needs sequence_chunks = 1",
    ),
    (
        f"{SEGMENTS} layout.segment_lengths=100,0",
        "layout.segment_lengths = '100,0'; give a whole number of tokens above 0 for each segment",
    ),
    (
        f"{SEGMENTS} layout.segment_lengths=64,32,32",
        "has 3 lengths for layout.sequence_chunks = 2; give as many as there are segments",
    ),
    (
        f"{SEGMENTS} layout.segment_lengths=96,64",
        "sum to 160; set lengths that sum to data.seq_len = ",
    ),
    (
        f"{SEGMENTS} layout.segment_lengths=67,61",
        "their largest common divisor is 1, in 128 parts of which a sequence would be computed; "
        "at most 64: set multiples of a larger number",
    ),
    (
        f"{SEGMENTS} layout.context=2 layout.context_method=ulysses",
        "layout.context_method = 'ulysses' with layout.sequence_chunks = 2 is not available",
    ),
    (
        f"{SEGMENTS} layout.context=2",
        "layout.context_method = 'ring' with layout.sequence_chunks = 2 is not available",
    ),
    (
        f"{SEGMENTS} layout.sequence_chunks=3",
        "x layout.sequence_chunks = 3 x layout.tensor = 1, which takes multiples of 3; set",
    ),
    (
        f"{SEGMENTS} model.attention=cudnn",
        "model.attention = 'cudnn' needs queries and keys of whole sequences",
    ),
    (
        f"{SEGMENTS} model.family=bert model.max_seq_len=512 data.objective=masked",
        "with model.causal = False: attention reads whole sequences; set layout.sequence_chunks",
    ),
    (
        f"{SEGMENTS} model.family=t5 model.num_encoder_layers=2 data.objective=ul2 "
        "data.target_len=64",
        "with model.num_encoder_layers = 2: an encoder reads whole sequences",
    ),
    (
        f"{SEGMENTS} model.family=deepseek_v3 model.num_experts=0 model.kv_rank=8 "
        "model.num_kv_heads=8 model.rope_head_dim=4 model.prediction_depth=1",
        "with model.prediction_depth = 1: MTP modules read whole sequences; set "
        "model.prediction_depth = 0, or layout.sequence_chunks = 1",
    ),
    (
        f"{SEGMENTS} model.family=mixtral model.num_experts=4",
        "with model.balance_weight = 0.02: the auxiliary loss is a product of means over whole",
    ),
    (
        f"{SEGMENTS} model.family=mixtral model.num_experts=4 model.balance_weight=0 "
        "model.capacity_factor=1",
        "an expert's capacity is of whole sequences; set model.capacity_factor = 0",
    ),
    (
        f"{SEGMENTS} model.family=tests.models.experts:make model.num_experts=4 "
        "model.router=expert_choice model.capacity_factor=1 model.balance_weight=0",
        "with model.router = 'expert_choice': experts choose from whole sequences",
    ),
]


@pytest.fixture
def narrow(monkeypatch):
    """Without 64-bit types, as outside the suite."""
    import jax  # noqa: PLC0415

    with jax.enable_x64(False):
        yield


class OwnLoss(Decoder):
    """A decoder with a loss of its own."""

    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        return super().loss(head, stream, batch)


class OwnHead(Decoder):
    """A decoder with a head of its own."""

    head_type = type("OwnHead", (Head,), {})


def test_a_loss_or_head_of_its_own_takes_no_slice():
    layout = {"head": "sliced", "pipeline": 2, "microbatches": 2}
    config = from_dict({"model": MODEL, "data": DATA, "layout": layout})
    said = "the model of model.family = 'llama' has a custom loss or head, and does"
    for model in (OwnLoss, OwnHead):
        with pytest.raises(ValueError, match=said):
            open_engine(config, model=model)
    assert open_engine(config)[1].stages.slices_head


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_a_layout_that_does_not_fit_is_refused(settings, said, narrow):
    sections = {"model": dict(MODEL), "data": dict(DATA), "optimizer": {}, "layout": {}}
    for setting in settings.split():
        key, _, text = setting.partition("=")
        section, _, name = key.partition(".")
        number = re.fullmatch(r"-?\d+", text)
        sections[section][name] = int(text) if number else text == "True" or text
    with pytest.raises(ValueError, match=re.escape(said)):
        open_engine(from_dict(sections))
