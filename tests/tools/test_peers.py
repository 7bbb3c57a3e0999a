"""The benchmark against MaxText and PyTorch: they get our sizes, and ratios are of neighbouring
steps. Neither is run here."""

import importlib
import json
import pathlib

import pytest

from jaxscale import config as configs

FIRST = {"loss": 9.0, "device_kind": "cpu", "num_devices": 1}


@pytest.fixture
def peers(monkeypatch):
    """The module of tools/bench, whose scripts import each other."""
    folder = pathlib.Path(__file__).parents[2] / "tools" / "bench"
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("peers")


def run_of(peers, start, steps):
    first = {**FIRST, "phases": {"imports": start - 1, "step": 1}, "cpu_seconds": start / 2}
    each = [{"seconds": s, "cpu_seconds": 2 * s, "loss": 8.0} for s in steps]
    return peers.Run(first, each, {"peak_resident_bytes": 1, "peak_device_bytes": None})


def test_the_peer_is_given_our_model(peers):
    config = configs.load("configs/bench_8x256.py", ["model.compute_dtype=bfloat16"])
    given = peers.maxtext_settings(config, "minimal", "/tmp/out")
    assert {"base_emb_dim=256", "base_num_decoder_layers=8", "vocab_size=32000"} <= set(given)
    assert {"dtype=bfloat16", "per_device_batch_size=8", "remat_policy=minimal"} <= set(given)
    sizes, option = peers.torch_arguments(config, "torch compiled")
    found = json.loads(sizes.removeprefix("--sizes="))
    assert (found["d_model"], found["num_layers"], found["vocab_size"]) == (256, 8, 32_000)
    assert (found["compute_dtype"], found["batch"], option) == ("bfloat16", 8, "--compile")


@pytest.mark.parametrize(
    ("setting", "refused"),
    [("model.qk_norm=True", "only num_layers"), ("optimizer.name=lion", "optimizer.name = lion")],
)
def test_what_is_not_translated_is_refused(peers, setting, refused):
    config = configs.load("configs/bench_8x256.py", [setting])
    with pytest.raises(ValueError, match=refused):
        peers.maxtext_settings(config, "full", "/tmp/out")
    with pytest.raises(ValueError, match=refused):
        peers.torch_arguments(config, "torch eager")


def test_ratios_are_of_the_fastest_peer_and_of_neighbouring_steps(peers):
    config = configs.load("configs/bench_8x256.py")
    runs = {
        peers.OURS: [run_of(peers, 10, [1, 2, 4])],
        "maxtext full": [run_of(peers, 40, [9, 9, 9])],
        "maxtext minimal": [run_of(peers, 50, [2, 5, 4])],
    }
    ours, *_ = peers.with_ratios(runs, config, {})
    assert ours["compared_with"] == "maxtext minimal"
    assert ours["speed_ratio"] == 2  # the median of 2, 2.5 and 1
    assert ours["start_ratio"] == 0.2
    assert peers.ratios(ours).startswith("2.00 x the tokens/s of maxtext minimal (2.00 by CPU")


def test_a_peer_with_another_model_is_refused(peers):
    config = configs.load("configs/bench_8x256.py")
    other = type("Other", (), {"name": "maxtext full", "first": {"num_params": 7}})
    with pytest.raises(ValueError, match="maxtext full has 7 parameters, ours 24,776,960"):
        peers.check_same_model(config, [other])
