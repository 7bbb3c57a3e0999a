"""Published runs become shapes, machines and choices; what a row lacks is said."""

import csv
import pathlib

import pytest

from jaxscale.planner.model.shape import ModelShape
from tools.planner_validation import published_runs
from tools.planner_validation.parse_run import Columns, UnhandledError
from tools.planner_validation.trainer_activations import trainer_layer_bytes
from tools.planner_validation.trainer_memory import trainer_memory

EVERY_COLUMN = {
    "id": "R1",
    "source": "nobody",
    "hardware": "A100-80",
    "n_devices": "128",
    "devices_per_node": "16",
    "inter_node_GBs_per_dev": "12.5",
    "precision": "bf16",
    "framework": "Megatron-LM",
    "model": "one",
    "layers": "8",
    "hidden": "1024",
    "heads": "16",
    "kv_heads": "4",
    "head_dim": "32",
    "ff": "2816",
    "gated": "1",
    "vocab": "32000",
    "tied": "1",
    "seq": "2048",
    "n_experts": "64",
    "topk": "6",
    "moe_ff": "704",
    "n_shared": "2",
    "dense_layers": "1",
    "attn": "swa-512 (1:3)",
    "TP": "4",
    "SP": "1",
    "PP": "2",
    "VP": "2",
    "CP": "2",
    "EP": "4",
    "sharding": "zero1",
    "microbatch": "3",
    "global_batch": "96",
    "schedule": "1F1B-interleaved",
    "recompute": "full",
    "step_time_s": "2.5",
    "mem_GB": "61.5",
    "notes": "",
}

PATH = pathlib.Path(__file__).parents[3] / "tools/planner_validation/rows.csv"


@pytest.fixture(scope="module")
def texts():
    with PATH.open(newline="") as file:
        return list(csv.DictReader(file))


def by_model(texts, model, **wanted):
    return next(
        row
        for row in texts
        if row["model"] == model and all(row[name] == value for name, value in wanted.items())
    )


def test_every_row_is_handled_or_has_a_reason(texts):
    found = published_runs.read_runs(PATH)
    assert len(found.runs) + len(found.bills) + len(found.unhandled) == len(texts)
    assert {source for source, _ in found.unhandled} == {"Ultra-Scale Playbook plots"}
    assert all("dimensions" in reason for _, reason in found.unhandled)


def test_layouts_take_all_devices_and_all_sequences(texts):
    for row in published_runs.read_runs(PATH).runs:
        given = next(one for one in texts if one["id"] == row.id)
        parallelism = row.parallelism
        if given["n_devices"]:
            assert int(parallelism.num_devices) == int(given["n_devices"])
        if given["global_batch"]:
            assert float(parallelism.global_batch) == pytest.approx(
                float(given["global_batch"]), rel=0.05
            )
        assert row.shape.num_params > 0


def test_parameters_are_the_sources_own(texts):
    for row in published_runs.read_runs(PATH).runs:
        given = next(one for one in texts if one["id"] == row.id)
        if "reported params" in given["notes"]:
            reported = int(given["notes"].split("reported params ")[1].split(";")[0])
            assert row.shape.num_params == pytest.approx(reported, rel=0.01)


def test_tokens_a_second_become_a_step(texts):
    texts = dict(by_model(texts, "llama3-70b", framework="MaxText"))
    row = published_runs.to_row(Columns(texts))
    tokens = float(row.parallelism.global_batch) * row.shape.seq_len
    rate = tokens / row.step_seconds / float(row.parallelism.num_devices)
    texts |= {"step_time_s": "", "tok_s_dev": str(rate)}
    assert published_runs.to_row(Columns(texts)).step_seconds == pytest.approx(row.step_seconds)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": "", "model": "a secret"}, "dimensions of a secret are not given"),
        ({"seq": ""}, "no sequence length"),
        ({"framework": "abacus"}, "abacus is not in trainers.py"),
        ({"hardware": "H101"}, "device 'H101' is not known; it can be"),
        ({"TP": "4096"}, "needs more than the"),
        ({"TP": "eight"}, "TP is 'eight', not a number"),
        ({"global_batch": ""}, "no global batch is given"),
        (
            {"recompute": "offload"},
            "recompute is 'offload', which Megatron-LM is not known to have",
        ),
        ({"recompute": "minimal"}, "recompute is 'minimal', which Megatron-LM is not known"),
        ({"recompute": "full(block 10)"}, r"recompute is 'full\(block 10\)'"),
        ({"recompute": "selective(per-op)"}, r"recompute is 'selective\(per-op\)'"),
        ({"recompute": "selective", "framework": "NeMo AutoModel"}, "which NeMo AutoModel is not"),
        ({"recompute": "custom: query_proj=offload", "framework": "MaxText"}, "'custom: query_pr"),
        ({"recompute": "custom"}, "recompute is 'custom', which Megatron-LM is not known to have"),
        ({"sharding": "zero"}, "sharding is 'zero', of which 'zero' is not known"),
        ({"sharding": "zero4"}, "sharding is 'zero4', of which 'zero4' is not known"),
        ({"sharding": "hsdp64 x dp2"}, "of which 'hsdp64' is not known"),
        ({"schedule": "zero bubble"}, "schedule is 'zero bubble', which is not known"),
        ({"precision": "fp32"}, "precision is 'fp32', which is not known"),
        ({"attn": "linear"}, "attn is 'linear', which is not known"),
        ({"SP": "yes"}, "SP is 'yes', not 0 or 1"),
        (
            {
                "n_experts": "8",
                "topk": "2",
                "moe_ff": "1024",
                "EP": "",
                "notes": "EP blank where not captured",
            },
            "the number of expert ranks is not given",
        ),
    ],
)
def test_what_a_row_lacks_is_said(texts, changes, reason):
    texts = {**texts[0], **by_model(texts, "gpt-vtrain-3.6b"), **changes}
    with pytest.raises(UnhandledError, match=reason):
        published_runs.to_row(Columns(texts))


def choice_of(texts, **changes):
    return published_runs.to_row(
        Columns({**by_model(texts, "gpt-vtrain-3.6b"), **changes})
    ).parallelism


def test_notes_and_layers_say_how_a_trainer_ran(texts):
    run = {"framework": "Megatron-DeepSpeed", "layers": "70", "PP": "8", "TP": "8"}
    assert choice_of(texts, **run).traits.balanced_ends  # 72 of them on 8 ranks
    assert not choice_of(texts, **run | {"layers": "72"}).traits.balanced_ends
    assert choice_of(texts, **run, notes="Jean Zay").traits.blocking
    dropping = {"n_experts": "8", "topk": "2", "moe_ff": "1024", "framework": "MaxText", "PP": "1"}
    traits = choice_of(texts, **dropping, notes="capacity factor 1.25 (dropping)").traits
    assert traits.imbalance == 1.25
    assert traits.masked_dispatch


def test_memory_is_of_what_was_read(texts):
    given = {**by_model(texts, "gpt-vtrain-3.6b"), "mem_GB": "20"}
    device, allocator, allocated = (
        published_runs.to_row(Columns({**given, **changes}))
        for changes in ({}, {"framework": "nanotron v0.5"}, {"notes": "20 GB allocated"})
    )
    assert [row.reading for row in (device, allocator, allocated)] == [
        "device",
        "allocator",
        "allocated",
    ]
    assert (device.memory_bytes, allocated.memory_bytes) == (20e9, 20e9)
    assert allocator.memory_bytes == 20 * 2**30
    found = trainer_memory(device.shape, device.parallelism)
    assert found.read("device") == found.reserved
    assert found.read("device") - found.read("allocator") == found.context
    assert found.read("allocator") > found.read("allocated")


def test_every_column_of_a_file_is_read_in_its_unit(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(",".join(part) for part in zip(*EVERY_COLUMN.items())) + "\n")
    (row,) = published_runs.read_runs(path).runs
    assert (row.id, row.source, row.hardware, row.model, row.framework, row.precision) == (
        "R1",
        "nobody",
        "A100-80",
        "one",
        "Megatron-LM",
        "bf16",
    )
    assert (row.memory_bytes, row.reading, row.step_seconds) == (61_500_000_000, "device", 2.5)
    assert (row.out_of_memory, row.sizes) == (False, {})
    assert row.shape == ModelShape(
        layers=8,
        d_model=1024,
        heads=16,
        kv_heads=4,
        head_dim=32,
        d_ff=2816,
        gated=True,
        vocab=32000,
        tied=True,
        seq_len=2048,
        window=512,
        windowed_share=0.25,
        experts=64,
        top_k=6,
        expert_ff=704,
        shared_experts=2,
        dense_layers=1,
    )
    parallelism = row.parallelism
    expected = {
        "pipeline": 2,
        "data": 1,
        "fsdp": 2,
        "expert": 4,
        "context": 2,
        "tensor": 4,
        "zero_stage": 1,
        "microbatch": 3,
        "microbatches": 4,
        "virtual_stages": 2,
    }
    assert {name: int(getattr(parallelism, name)) for name in expected} == expected
    assert (parallelism.schedule, parallelism.remat) == ("interleaved", "full")
    assert parallelism.traits.sequence_parallel
    machine = row.cluster
    assert (machine.num_devices, machine.node_devices, machine.memory_bytes) == (128, 16, 85.1e9)
    assert machine.tiers[-1].bytes_per_second == pytest.approx(0.9 * 12.5e9, rel=1e-12)


def test_a_recipe_says_what_is_sharded_and_made_again(texts):
    bridge = {
        "framework": "Megatron-Bridge 26.02",
        "hardware": "GB300",
        "PP": "1",
        "TP": "1",
        "recompute": "per-recipe",
        "precision": "MXFP8",
    }
    plain = choice_of(texts, **bridge, sharding="zero1")
    assert plain.zero_stage == 1
    assert choice_of(texts, **bridge, sharding="zero1", model="llama3-70b").zero_stage == 3
    assert choice_of(texts, **bridge, model="deepseek-v3").remat == "modules:mla_up_proj"


def test_a_maxtext_policy_keeps_what_its_names_say(texts):
    """From nothing kept to everything; arrays in host memory take no device memory."""

    def needed(word):
        row = published_runs.to_row(
            Columns({**by_model(texts, "llama3-70b", framework="MaxText"), "recompute": word})
        )
        assert row.parallelism.remat_share == 1
        return row, trainer_memory(row.shape, row.parallelism).needed

    order = [
        "full",
        "save_out_proj",
        "save_qkv_proj",
        "save_dot_except_mlp",
        "save_dot_with_context_except_mlp",
        "minimal",
        "minimal_with_context",
        "none",
    ]
    sizes = [needed(word)[1] for word in order]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)
    for word in ("qkv_proj_offloaded", "minimal_offloaded"):
        assert needed(word)[1] == sizes[0]
    # A token of a layer: its input, queries, keys, values and what attention returns, in 16 bits,
    # and the sums of each head's softmax.
    row, _ = needed("minimal_with_context")
    parallelism, shape = row.parallelism, row.shape
    elements = 2 * shape.d_model + 2 * shape.head_dim * (shape.heads + shape.kv_heads)
    elements += 2 * shape.heads + 2 * shape.d_ff
    tokens = float(parallelism.microbatch) * shape.seq_len
    assert trainer_layer_bytes(shape, parallelism) == tokens * 2 * elements


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column 'hardware'; it is not a file of measured runs"):
        published_runs.read_runs(path)


def test_what_is_not_said_to_be_made_again_follows_from_memory(texts):
    row = published_runs.to_row(Columns(by_model(texts, "llama3-70b", framework="MaxText")))
    assert row.parallelism.remat != "none"  # 70B on 80 GB each, 16,384 tokens on a device
    said = {**by_model(texts, "llama3-70b", framework="MaxText"), "recompute": "none"}
    assert published_runs.to_row(Columns(said)).parallelism.remat == "none"


def test_energy_of_a_run_is_read_from_its_notes():
    bills = {bill.source: bill for bill in published_runs.read_runs(PATH).bills}
    assert bills["GLaM (2112.06905)"].device_hours == 1024 * 574
    assert bills["GLaM (2112.06905)"].overhead == 1.11
    assert bills["LLaMA Table 15"].joules == pytest.approx(475 * 3.6e9)
