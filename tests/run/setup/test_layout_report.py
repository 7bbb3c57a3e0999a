"""What `--describe` prints are the numbers of the formulas."""

import dataclasses
import re

import jax
import pytest

from jaxscale.config import from_dict, load
from jaxscale.formatting import human_bytes
from jaxscale.planner.memory.at_rest import BATCH_BYTES, COUNT_BYTES, batch_bytes
from jaxscale.planner.memory.step import step_memory
from jaxscale.run.setup.layout_report import describe_layout
from jaxscale.run.setup.memory_check import check_memory
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from jaxscale.training.state_placement import state_bytes
from tests.models import two_stacks

MUON = from_dict(
    {
        "model": {
            "num_layers": 6,
            "d_model": 128,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 48,
            "d_ff": 320,
        },
        "layout": {"data": 1},
        "optimizer": {"name": "muon"},
        "data": {"global_batch_size": 8},
    }
)
CHOSEN = "save:query,mlp_up"


@pytest.fixture(scope="module")
def config():
    layout = {
        "data": 1,
        "fsdp": 2,
        "zero_stage": 2,
        "microbatches": 2,
        "remat": CHOSEN,
        "offload": "optimizer",
    }
    return from_dict({"layout": layout, "model": {"qk_norm": True, "matmul_dtype": "float8"}})


@pytest.fixture(scope="module")
def rows(config):
    """The lines, each by its first words."""
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:2]))
    lines = [line.strip().split("  ") for line in describe_layout(engine).splitlines()]
    return {line[0]: [cell.strip() for cell in line[1:] if cell] for line in lines}


@pytest.mark.proof
def test_the_paper_of_the_model(rows):
    assert rows["model"] == ["llama: Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783"]


def test_the_types(rows):
    (said,) = rows["types"]
    assert said == "parameters float32, compute bfloat16 with float8 matmuls, gradients float32"


@pytest.mark.proof
def test_the_parameters_that_a_token_uses():
    config = load("configs/moe_tiny.py", ["layout.data=1"])
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:1]))
    assert "5,906,112 (2,367,168 active per token)" in describe_layout(engine)


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_the_state_between_steps(config, offload):
    """In a device's memory: what is offloaded is on the host."""
    config = with_layout(config, offload=offload)
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:2]))
    needs = step_memory(config, "cpu", own_host=True)
    batch = batch_bytes(config.model, config.data, config.layout)
    assert state_bytes(engine.abstract_state) + batch - COUNT_BYTES == needs.arguments


@pytest.mark.proof
def test_the_temporaries_of_a_custom_model_are_by_liveness():
    """Gradients, and residuals that grow with the sequences of a pass."""

    def temporaries(**changes) -> int:
        config = from_dict(
            {
                "model": {"family": "tests.models.two_stacks:make", **two_stacks.SETTINGS},
                "data": {"global_batch_size": 16, "seq_len": 16},
                "layout": {"data": 2, "fsdp": 2, **changes},
            }
        )
        mesh = make_mesh(config.layout, jax.devices()[:4])
        engine = make_engine(config, mesh)
        (line,) = (one for one in describe_layout(engine).splitlines() if "by liveness" in one)
        needs = step_memory(config)
        assert human_bytes(needs.peak) in line
        extras = 16 * two_stacks.SOURCE_LEN * 4 // 4
        between = state_bytes(engine.abstract_state) + 16 * 16 * BATCH_BYTES // 4 + extras
        assert between == needs.arguments
        return needs.temporaries

    assert temporaries(remat="full") < temporaries()


def test_a_state_that_does_not_fit_is_refused(config, monkeypatch):
    monkeypatch.setattr(
        "jaxscale.run.setup.memory_check.host_memory_bytes", lambda: 1e5 * jax.local_device_count()
    )
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:2]))
    with pytest.raises(ValueError, match=r"state alone need .* on each device, and a program may"):
        check_memory(engine)


def with_layout(config, **changes):
    return dataclasses.replace(config, layout=dataclasses.replace(config.layout, **changes))


def test_the_peak(rows, config):
    needs = step_memory(config)
    assert rows["memory"] == [
        f"{human_bytes(needs.peak)} on each device: {human_bytes(needs.arguments)} between steps, "
        f"{human_bytes(needs.temporaries)} in a step"
    ]


@pytest.mark.parametrize(
    "remat", ["none", "full", "save_matmuls", "save_all_but_attention", CHOSEN]
)
def test_every_policy_with_its_bytes_and_the_chosen_one_marked(rows, config, remat):
    needs = step_memory(with_layout(config, remat=remat))
    stash, peak, flops = rows[f"{remat} *" if remat == CHOSEN else remat]
    assert (stash, peak) == (human_bytes(needs.stash), human_bytes(needs.peak))
    assert (flops == "+0%") == (remat in ("none", "save_matmuls"))


@pytest.mark.proof
def test_recomputed_attention_of_an_encoder_decoder_costs_something():
    config = from_dict(
        {
            "model": {"family": "mt5", "num_layers": 1, "num_encoder_layers": 1},
            "data": {"objective": "span_corruption", "global_batch_size": 1, "target_len": 64},
            "layout": {"data": 1},
        }
    )
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:1]))
    lines = [re.split(r"\s{2,}", line.strip()) for line in describe_layout(engine).splitlines()]
    added = {line[0].removesuffix(" *"): line[-1] for line in lines}
    assert added["none"] == "+0%"
    assert int(added["save_all_but_attention"].strip("+%")) > 0


def test_what_offload_moves(rows, config):
    moved = step_memory(with_layout(config, offload="optimizer,activations"))
    assert rows["optimizer *"] == [human_bytes(moved.host_optimizer)]
    assert rows["activations"] == [human_bytes(moved.host_stash)]


def test_every_stage_at_rest(rows, config):
    for stage in range(4):
        needs = step_memory(with_layout(config, zero_stage=stage))
        parameters, gradients, *_ = rows[f"zero {stage} *" if stage == 2 else f"zero {stage}"]
        assert parameters == human_bytes(needs.parameters)
        assert gradients == human_bytes(needs.gradients)


@pytest.mark.proof
def test_what_passes_a_pipeline_could_keep():
    layout = {"data": 1, "pipeline": 4, "microbatches": 8, "remat": "keep:2"}
    config = from_dict({"layout": layout, "model": {"num_layers": 8}})
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:4]))
    lines = [re.split(r"\s{2,}", line.strip()) for line in describe_layout(engine).splitlines()]
    rows = {line[0]: line[1:] for line in lines}
    held, times = [], []
    for remat in ("none", "keep:2 *", "keep:1", "full"):
        needs = step_memory(with_layout(config, remat=remat.removesuffix(" *")))
        assert rows[remat][:2] == [human_bytes(needs.stash), human_bytes(needs.peak)]
        held.append(needs.stash)
        times.append(int((rows[remat][2:] or ["0"])[0].strip("+%")))
    assert held == sorted(held, reverse=True)
    # 1F1B needs four ticks a micro-batch, and three with nothing kept, except its ramps.
    assert times == sorted(times)
    assert times[-1] == 24


@pytest.mark.proof
def test_a_dealing_that_pads_says_how_much():
    """With two chunks each rank has layers of encoder and decoder; with one, of one, and rows for
    the other's."""
    needs, padding = [], []
    for schedule, chunks in (("interleaved", 2), ("1f1b", 1), ("1f1b:3,1,2,2", 1)):
        layout = {"data": 1, "pipeline": 4, "microbatches": 8, "virtual_stages": chunks}
        config = from_dict(
            {
                "layout": layout | {"schedule": schedule},
                "model": {"family": "mt5", "num_layers": 4, "num_encoder_layers": 4},
                "data": {"objective": "span_corruption", "target_len": 64, "seq_len": 64},
            }
        )
        engine = make_engine(config, make_mesh(config.layout, jax.devices()[:4]))
        said = re.search(r"padding +(.*) of rows without a layer", describe_layout(engine))
        padding.append(said and said[1])
        needs.append(step_memory(engine.config).arguments)
    dense, *padded = needs
    assert padding == [None, *(human_bytes(size - dense) for size in padded)]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ({"data": 4}, "data 4"),
        ({"fsdp": 4, "zero_stage": 0}, "fsdp 4"),
        ({"fsdp": 4, "zero_stage": 1}, ""),
        ({"data": 2, "fsdp": 2}, "data 2 x fsdp 2"),
        ({"fsdp": 4}, ""),
    ],
    ids=str,
)
def test_state_that_replicas_hold_alike_is_named_with_its_bytes(layout, axes):
    config = from_dict(
        {
            "layout": {"data": 1} | layout,
            "model": {"vocab_size": 4096},
            "data": {"global_batch_size": 8},
        }
    )
    text = describe_layout(make_engine(config, make_mesh(config.layout, jax.devices()[:4])))
    notes = [line for line in text.splitlines() if line.startswith("note: each device stores")]
    if not axes:
        assert notes == []
        return
    here, there = (
        needs.parameters + needs.optimizer
        for needs in (
            step_memory(config),
            step_memory(with_layout(config, data=1, fsdp=4, zero_stage=3)),
        )
    )
    assert notes == [
        f"note: each device stores {human_bytes(here)} of parameters and optimizer state, of which "
        f"{human_bytes(here - there)} are replicated over {axes}; layout.fsdp = 4, "
        f"layout.data = 1 and layout.zero_stage = 3 would leave {human_bytes(there)}"
    ]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({}, "muon: 6 of 6 layers on each device, 0.00366"),
        ({"fsdp": 2}, "muon: 3 of 6 layers on each device, split over fsdp, 0.00183"),
        ({"data": 4}, "muon: 2 of 6 layers on each device, split over data, 0.00122"),
    ],
)
def test_what_muon_computes_on_each_device(layout, said):
    """3.66 GFLOP for the six layers, as the compiled update has."""
    config = dataclasses.replace(MUON, layout=dataclasses.replace(MUON.layout, **layout))
    devices = jax.devices()[: config.layout.num_devices]
    assert said in describe_layout(make_engine(config, make_mesh(config.layout, devices)))


@pytest.mark.proof
@pytest.mark.parametrize(("sequences", "microbatches"), [(8, [8]), (16, [8, 16]), (4, [])])
def test_more_micro_batches_are_advised_where_the_batch_splits_into_them(sequences, microbatches):
    config = from_dict(
        {
            "layout": {"data": 1, "pipeline": 4, "microbatches": 4},
            "model": {"num_layers": 4},
            "data": {"global_batch_size": sequences},
        }
    )
    text = describe_layout(make_engine(config, make_mesh(config.layout, jax.devices()[:4])))
    (said,) = (line for line in text.splitlines() if "the pipeline idles" in line)
    assert sorted(map(int, re.findall(r"layout\.microbatches = (\d+)", said))) == microbatches
