"""A model's tensors reach every layout's devices, and come back, bit for bit."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxscale.config import Config, DataConfig
from jaxscale.config.layout import Layout
from jaxscale.hugging_face import tensor_blocks, write_params
from jaxscale.hugging_face.model_folder import open_model, write_model
from jaxscale.run.pretrained import from_pretrained
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from tests.hugging_face import tiny_llama

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
LAYOUTS = [
    {},
    {"fsdp": 4, "tensor": 2},
    {"pipeline": 2, "fsdp": 4},
    {"pipeline": 2, "fsdp": 2, "data": 2, "virtual_stages": 2, "schedule": "interleaved"},
]


def engine_of(model, layout: dict):
    layout = Layout(**{"data": 1, "microbatches": 4 if "pipeline" in layout else 1, **layout})
    config = Config(model=model, data=DataConfig(global_batch_size=16), layout=layout)
    return make_engine(config, make_mesh(layout, jax.devices()[: layout.num_devices]))


def load_all(directory) -> dict[str, np.ndarray]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "fsdp_tensor", "pipeline", "interleaved"])
def test_tensors_come_back_bit_for_bit(layout, tmp_path, monkeypatch):
    """From bfloat16 into float32 parameters of a run's layout, and back: in files of at most 5 kB,
    blocks of a few rows, windows of a few more."""
    monkeypatch.setattr(tensor_blocks, "BLOCK_BYTES", 200)
    monkeypatch.setattr(write_params, "WINDOW_BYTES", 700)
    source = tiny_llama.save(tmp_path / "source", dtype=tiny_llama.BFLOAT16)
    model = open_model(source)
    engine = engine_of(model.config, layout)
    wanted = engine.placement.canonical.params
    params = model.read(engine.model.axes, wanted)

    def signature(leaf):
        return leaf.shape, leaf.dtype, leaf.sharding

    assert jax.tree.map(signature, params) == jax.tree.map(signature, wanted)
    values = load_all(source)
    q = np.asarray(params["layers"]["attention"]["q"])
    for layer in range(4):
        expected = values[f"model.layers.{layer}.self_attn.q_proj.weight"].astype(np.float32)
        np.testing.assert_array_equal(q[layer], expected.reshape(4, 6, 16).transpose(2, 0, 1))
    assert not np.asarray(params["embed"]["tokens"])[130:].any()
    assert not np.asarray(params["head"]["output"])[:, 130:].any()

    run = engine.placement.part("params").from_canonical(params)
    canonical = engine.placement.part("params").to_canonical(run)
    output = tmp_path / "output"
    write_model(
        output,
        model.config,
        engine.model.axes,
        canonical,
        dtype="bfloat16",
        workdir=source,
        max_file_bytes=5000,
    )
    assert tiny_llama.bits(load_all(output)) == tiny_llama.bits(values)
    sizes = [path.stat().st_size for path in output.glob("model-*-of-*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) < 5000 + 3000, "a header comes with the tensors"
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == values.keys()
    assert open_model(output).settings == model.settings
    assert (output / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixtral", {"expert": 2, "fsdp": 2, "tensor": 2, "zero_stage": 3}),
        ("qwen3_moe_dense", {"pipeline": 2, "expert": 2}),
    ],
)
def test_each_expert_has_separate_tensors(name, layout, tmp_path):
    """Those of a layer's experts lie on several ranks, and its first layers may have none."""
    source = GOLDENS / name
    model = open_model(source)
    engine = engine_of(model.config, layout)
    params = model.read(engine.model.axes, engine.placement.canonical.params)
    values = load_file(source / "model.safetensors")
    stack = "expert_layers" if model.config.dense_layers else "layers"
    up = params[stack]["mlp"]["up"]
    assert up.sharding.shard_shape(up.shape)[1] == model.config.num_experts // 2
    write_model(
        tmp_path / "output",
        model.config,
        engine.model.axes,
        params,
        dtype="float32",
        workdir=tmp_path,
    )
    assert tiny_llama.bits(load_all(tmp_path / "output")) == tiny_llama.bits(values)


@pytest.mark.proof
def test_a_module_that_predicts_a_further_token_is_read_and_written_where_a_run_has_it(tmp_path):
    source, rng = tmp_path / "source", np.random.default_rng(0)
    shutil.copytree(GOLDENS / "deepseek_v3", source)
    values = load_file(source / "model.safetensors")
    layer, module, width = "model.layers.1.", "model.layers.2.", 24
    own = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (width,))
    own |= {"eh_proj": (width, 2 * width)}
    more = {n.replace(layer, module): -x for n, x in values.items() if n.startswith(layer)}
    more |= {f"{module}{n}.weight": rng.normal(size=s).astype("f") for n, s in own.items()}
    more[f"{module}embed_tokens.weight"] = values["model.embed_tokens.weight"]
    more[f"{module}shared_head.head.weight"] = values["lm_head.weight"]
    values |= more
    save_file(values, source / "model.safetensors")

    without = open_model(source)
    assert without.config.prediction_depth == 0
    plain = engine_of(without.config, {})
    without.check(plain.model.axes, plain.placement.canonical.params)

    model = open_model(source, prediction_depth=1)
    engine = engine_of(model.config, {"expert": 2})
    params = model.read(engine.model.axes, engine.placement.canonical.params)
    merge = jax.tree.map(lambda x: np.asarray(x[0]), params["prediction"]["merge"])
    for part, columns in (("embedding", slice(width)), ("hidden", slice(width, None))):
        np.testing.assert_array_equal(merge[part].T, values[f"{module}eh_proj.weight"][:, columns])
    output = tmp_path / "output"
    write_model(output, model.config, engine.model.axes, params, dtype="float32", workdir=tmp_path)
    assert tiny_llama.bits(load_all(output)) == tiny_llama.bits(values)
    written = json.loads((output / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 1

    # A further module is left out, too.
    values |= {name.replace(module, "model.layers.3."): x for name, x in more.items()}
    save_file(values, source / "model.safetensors")
    written["num_nextn_predict_layers"] = 2
    (source / "config.json").write_text(json.dumps(written))
    for depth, one in enumerate((plain, engine)):
        fewer = open_model(source, prediction_depth=depth)
        fewer.check(one.model.axes, one.placement.canonical.params)


@pytest.mark.proof
def test_the_biases_that_balance_experts_stay_in_float32(tmp_path):
    """A step moves them by 0.001, which bfloat16 cannot hold."""
    source, bias = GOLDENS / "deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"
    model = from_pretrained(source, param_dtype="bfloat16")
    output = tmp_path / "output"
    write_model(
        output, model.config, model.model.axes, model.params, dtype="bfloat16", workdir=tmp_path
    )
    values = load_file(output / "model.safetensors")
    wide = {name: value for name, value in values.items() if value.dtype != "bfloat16"}
    assert tiny_llama.bits(wide) == tiny_llama.bits(
        {bias: load_file(source / "model.safetensors")[bias]}
    )
    assert open_model(output).dtype == "bfloat16"


@pytest.mark.proof
def test_a_tied_head_is_checked_and_not_written(tmp_path):
    values = tiny_llama.tensors({**tiny_llama.CONFIG, "tie_word_embeddings": True})
    copy = {**values, "lm_head.weight": values["model.embed_tokens.weight"]}
    model = open_model(tiny_llama.save(tmp_path / "a", copy, tie_word_embeddings=True))
    engine = engine_of(model.config, {})
    params = model.read(engine.model.axes, engine.placement.canonical.params)
    write_model(
        tmp_path / "b",
        model.config,
        engine.model.axes,
        params,
        dtype="float32",
        workdir=tmp_path,
    )
    assert tiny_llama.bits(load_all(tmp_path / "b")) == tiny_llama.bits(values)
    copy["lm_head.weight"] = copy["lm_head.weight"] + 1
    model = open_model(tiny_llama.save(tmp_path / "c", copy, tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"lm_head.weight: differs from model.embed_tokens"):
        model.check(engine.model.axes, engine.placement.canonical.params)


def without(name):
    return lambda values: values.pop(name)


def put(name, value):
    return lambda values: values.update({name: value})


REFUSED = [
    (without("model.norm.weight"), r"model.norm.weight \(16,\): missing"),
    (put("model.layers.4.mlp.up_proj.weight", np.zeros(3)), r"layers.4.mlp.up_proj.*: unknown"),
    (put("model.norm.weight", np.zeros(7, np.float32)), r"model.norm.weight: shape \(7,\), and"),
    (put("model.norm.weight", np.zeros(16, np.int8)), r"model.norm.weight: type I8"),
]


@pytest.mark.proof
@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_tensors_that_do_not_fit_are_refused_by_name(change, message, tmp_path):
    values = tiny_llama.tensors(tiny_llama.CONFIG)
    change(values)
    model = open_model(tiny_llama.save(tmp_path, values))
    engine = engine_of(model.config, {})
    with pytest.raises(ValueError, match=message):
        model.check(engine.model.axes, engine.placement.canonical.params)


@pytest.mark.proof(but=("-inf",))
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_tensor_with_values_that_are_not_finite_is_refused_by_name(value, tmp_path):
    values = tiny_llama.tensors(tiny_llama.CONFIG)
    values["model.layers.2.mlp.up_proj.weight"][3, 5] = value
    model = open_model(tiny_llama.save(tmp_path, values))
    engine = engine_of(model.config, {"fsdp": 2})
    with pytest.raises(
        ValueError, match=r"tensor model.layers.2.mlp.up_proj.weight has NaN or infinite values"
    ):
        model.read(engine.model.axes, engine.placement.canonical.params)


@pytest.mark.proof
def test_a_value_that_the_files_cannot_hold_is_refused(tmp_path):
    values = tiny_llama.tensors(tiny_llama.CONFIG)
    values["model.norm.weight"][3] = 1e5
    model = open_model(tiny_llama.save(tmp_path / "a", values))
    engine = engine_of(model.config, {})
    params = model.read(engine.model.axes, engine.placement.canonical.params)
    with pytest.raises(ValueError, match=r"model.norm.weight has values that are too large"):
        write_model(
            tmp_path / "b",
            model.config,
            engine.model.axes,
            params,
            dtype="float16",
            workdir=tmp_path,
        )
    assert not (tmp_path / "b").exists()
    assert jnp.isfinite(params["head"]["norm"]["scale"]).all()
