"""Adapters of experts in PEFT's format: what they add to the weights, and refusals."""

import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxscale.models.adapters.lora import merge_adapters
from jaxscale.run.pretrained import from_pretrained

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
EXPERTS, WIDTH, HIDDEN, RANK, ALPHA = 4, 24, 16, 3, 8
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
SIZES = {GATE_UP: (WIDTH, 2 * HIDDEN), DOWN: (HIDDEN, WIDTH)}
"""Inputs and outputs of a parameter."""


def written(folder, targets, *, swapped=(), sizes=SIZES):
    """A folder as PEFT writes it; returns A and B of each parameter in the first of two layers.

    Args:
      swapped: the parameters whose inputs and outputs are swapped.
    """
    rng, tensors, first = np.random.default_rng(0), {}, {}
    for layer in (1, 0):
        for target in targets:
            inputs, outputs = sizes[target][:: -1 if target in swapped else 1]
            a = rng.normal(size=(EXPERTS * RANK, inputs))
            b = rng.normal(size=(outputs, RANK * EXPERTS))
            nested = ".base_layer" if target == GATE_UP and DOWN in targets else ""
            name = f"base_model.model.model.layers.{layer}.mlp.experts{nested}"
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            first[target] = a, b
    peft = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_parameters": [*targets]}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(peft))
    save_file(tensors, folder / "adapter_model.safetensors")
    return first


def delta(a, b, *, swapped):
    """What PEFT adds to each expert [inputs, outputs], by the indices of its tensors."""
    added = np.zeros((EXPERTS, a.shape[1], b.shape[0]))
    for expert in range(EXPERTS):
        for rank in range(RANK):
            columns = b[:, rank * EXPERTS + expert]
            added[expert] += np.outer(a[expert * RANK + rank], columns) * ALPHA / RANK
    return added.transpose(0, 2, 1) if swapped else added


def of_transformers(name):
    """The parameters of the first layer's experts, as inputs by outputs."""
    tensors = load_file(GOLDENS / name / "model.safetensors")
    if name == "gpt_oss":
        return {target: tensors[f"model.layers.0.{target}"] for target in SIZES}
    prefix = "model.layers.0.block_sparse_moe.experts"
    one = {
        part: np.stack([tensors[f"{prefix}.{i}.{part}.weight"].T for i in range(EXPERTS)])
        for part in ("w1", "w2", "w3")
    }
    return {GATE_UP: np.concatenate([one["w1"], one["w3"]], axis=-1), DOWN: one["w2"]}


@pytest.mark.parametrize(
    ("name", "targets", "swapped"),
    [
        ("mixtral", (DOWN, GATE_UP), False),
        pytest.param("mixtral", (GATE_UP,), True, marks=pytest.mark.proof),
        pytest.param("gpt_oss", (GATE_UP, DOWN), False, marks=pytest.mark.proof),
        ("gpt_oss", (GATE_UP, DOWN), True),
    ],
)
def test_adapters_of_experts_add_what_peft_adds(name, targets, swapped, tmp_path):
    """To the gates and ups of a layer, which are halves in Mixtral, and alternate in gpt-oss."""
    adapters = written(tmp_path / "peft", targets, swapped=targets if swapped else ())
    model = from_pretrained(GOLDENS / name, adapters=tmp_path / "peft", param_dtype="float64")
    mlp = merge_adapters(model.config, model.params)["layers"]["mlp"]
    found = {part: np.asarray(mlp[part][0]) for part in ("gate", "up", "down")}
    pairs = np.stack([found["gate"], found["up"]], axis=-1)
    if name == "mixtral":
        pairs = pairs.swapaxes(-1, -2)
    ours = {GATE_UP: pairs.reshape(EXPERTS, WIDTH, 2 * HIDDEN), DOWN: found["down"]}
    for target, weight in of_transformers(name).items():
        added = delta(*adapters[target], swapped=swapped) if target in targets else 0
        np.testing.assert_allclose(ours[target], weight + added, rtol=0, atol=1e-10)


REFUSED = {
    "a square matrix": (
        "qwen3_moe",
        {"targets": (GATE_UP,), "sizes": {GATE_UP: (WIDTH, WIDTH)}},
        r"\['mlp.experts.gate_up_proj'\] are square matrices, of which PEFT's versions have stored",
    ),
    "a bias": (
        "gpt_oss",
        {"targets": (f"{GATE_UP}_bias",), "sizes": {f"{GATE_UP}_bias": (WIDTH, HIDDEN)}},
        "'mlp.experts.gate_up_proj_bias' is not supported: it can name mlp.experts.gate_up_proj",
    ),
    "a model without experts": (
        "llama",
        {"targets": (DOWN,)},
        "it can name nothing in a model without experts",
    ),
    "one of two swapped": (
        "mixtral",
        {"targets": (GATE_UP, DOWN), "swapped": (DOWN,)},
        r"mlp.experts.lora_A.weight: shape \(12, 24\), and \(12, 16\) by config.json",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_of_experts_that_cannot_be_read_are_refused(case, tmp_path):
    name, options, message = REFUSED[case]
    written(tmp_path / "peft", **options)
    with pytest.raises(ValueError, match=message):
        from_pretrained(GOLDENS / name, adapters=tmp_path / "peft")
