"""Families: published sizes, the settings that a user may set, and their Hugging Face side."""

import dataclasses
import json
import pathlib
import re
import types

import numpy as np
import pytest

from jaxscale import config
from jaxscale.config import Config, DataConfig
from jaxscale.config.model import ModelConfig
from jaxscale.hugging_face.value_types import check_value_types
from jaxscale.model_families.family import HfConfig
from jaxscale.model_families.hf.config import with_context
from jaxscale.model_families.shipped import FAMILIES, SHIPPED
from jaxscale.training.tracing.traces import model_trace

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"


def sizes(layers, d_model, heads, kv_heads, head_dim, d_ff, vocab):
    return {
        "num_layers": layers,
        "d_model": d_model,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "d_ff": d_ff,
        "vocab_size": vocab,
    }


# The sizes of model cards, and the number of parameters there, plus the rows by which a vocabulary
# is padded to a multiple of 128.
PUBLISHED = {
    "llama": (sizes(32, 4096, 32, 8, 128, 14336, 128256), 8_030_261_248),
    "mistral": (sizes(32, 4096, 32, 8, 128, 14336, 32000), 7_241_732_096),
    "qwen2": (sizes(28, 3584, 28, 4, 128, 18944, 152064), 7_615_616_512),
    "qwen3": (sizes(36, 4096, 32, 8, 128, 12288, 151936), 8_190_735_360),
    "gemma2": (sizes(26, 2304, 8, 4, 256, 9216, 256000), 2_614_341_888),
    "gemma3": (sizes(26, 1152, 4, 1, 256, 6912, 262144), 999_885_952),
    "olmo2": (sizes(32, 4096, 32, 32, 128, 11008, 100352), 7_298_617_344),
    "olmo3": (sizes(32, 4096, 32, 32, 128, 11008, 100278), 7_298_011_136 + 74 * 2 * 4096),
    "phi3": (sizes(32, 3072, 32, 32, 96, 8192, 32064), 3_821_079_552 + 64 * 2 * 3072),
    "gpt": (
        sizes(12, 768, 12, 12, 64, 3072, 50257) | {"max_seq_len": 1024},
        124_439_808 + 47 * 768,
    ),
    "t5": (
        sizes(8, 512, 6, 6, 64, 1024, 32128) | {"num_encoder_layers": 8},
        76_961_152,
    ),
    "mt5": (
        sizes(24, 1024, 16, 16, 64, 2816, 250112) | {"num_encoder_layers": 24},
        1_229_581_312,
    ),
    "umt5": (
        sizes(8, 512, 6, 6, 64, 1024, 256384) | {"num_encoder_layers": 8},
        306_601_984,
    ),
    "gpt_neox": (sizes(16, 2048, 8, 8, 256, 8192, 50304), 1_011_781_632),
    # Without the pooler, and without the contact head and its 121 parameters.
    "bert": (
        sizes(12, 768, 12, 12, 64, 3072, 30522) | {"max_seq_len": 512},
        109_514_298 + 70 * 769,
    ),
    "esm": (sizes(6, 320, 20, 20, 16, 1280, 33), 7_512_353 + 95 * 321),
    "mixtral": (sizes(32, 4096, 32, 8, 128, 14336, 32000), 46_702_792_704),
    "qwen3_moe": (
        sizes(48, 2048, 32, 4, 128, 6144, 151936) | {"expert_d_ff": 768},
        30_532_122_624,
    ),
    # The published 1,002.6 B of experts; and attention, norms and routers of the layers, vocabulary
    # and positions of ours, and the final norm.
    "m6_t": (
        sizes(24, 1024, 16, 16, 64, 21248, 32000) | {"num_experts": 960, "max_seq_len": 1024},
        1_002_606_428_160
        + 24 * (4 * 1024 * 1025 + 4 * 1024 + 1024 * 960)
        + (32000 + 1024) * 1024
        + 2048,
    ),
    "gpt_oss": (sizes(24, 2880, 64, 8, 64, 2880, 201088), 20_914_757_184),
    # With the biases of its routers, and without the module that predicts a second token.
    "deepseek_v3": (
        sizes(61, 7168, 128, 128, 192, 18432, 129280)
        | {"kv_rank": 512, "query_rank": 1536, "rope_head_dim": 64, "value_head_dim": 128}
        | {"dense_layers": 3, "expert_d_ff": 2048, "shared_d_ff": 2048},
        671_026_419_200,
    ),
}


@pytest.mark.proof
@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_a_published_model(name):
    given, published = PUBLISHED[name]
    assert model_trace(ModelConfig(family=name, **given)).num_params == published


def shown(run):
    """The settings of a run's config.json, which is read back to the run; and so is one of before,
    which had every setting."""
    sections = config.to_dict(run)
    every = {name: dataclasses.asdict(getattr(run, name)) for name in sections}
    for one in (sections, every):
        assert config.from_dict(json.loads(json.dumps(one))) == run
    return {f"{name}.{key}" for name, section in sections.items() for key in section}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_shows_only_settings_of_its_family(name):
    model = ModelConfig(family=name)
    data = DataConfig(objective="causal" if model.causal else "masked")
    if model.num_encoder_layers:
        data = DataConfig(objective="span_corruption", target_len=64)
    found = shown(Config(model=model, data=data))
    options = {key for one in SHIPPED for key in (*one.settings, *one.fixed)}
    own = {f"model.{key}" for key in FAMILIES[name].settings}
    assert {f"model.{key}" for key in options} & found == own - {
        f"model.{key}" for key in model.unread
    }


@pytest.mark.parametrize("name", config.shipped_configs())
def test_a_shipped_configuration_is_read_back(name):
    shown(config.load(name))


@pytest.mark.parametrize(
    ("family", "setting", "on", "off", "read"),
    [
        ("mixtral", "model.num_experts", 4, 0, "model.experts_per_token"),
        ("mixtral", "model.balance_weight", 1, 0, "model.balance"),
        ("deepseek_v3", "model.prediction_depth", 1, 0, "model.prediction_weight"),
        ("llama", "model.lora_rank", 2, 0, "model.lora_alpha"),
        ("llama", "model.lora_rank", 2, 0, "model.param_dtype"),
        ("llama", "model.rope_scaling", "linear", "none", "model.rope_factor"),
        ("llama", "layout.microbatches", 2, 1, "layout.accumulation"),
        ("llama", "layout.context", 2, 1, "layout.context_method"),
        ("llama", "optimizer.name", "adamw", "lion", "optimizer.epsilon"),
        ("llama", "optimizer.schedule", "wsd", "constant", "optimizer.final_learning_rate"),
        ("llama", "run.skip_bad_steps", 1, 0, "run.spike_score"),
        ("llama", "run.checkpoint_every", 1, 0, "run.keep_every"),
    ],
)
def test_a_setting_is_shown_where_it_is_read(family, setting, on, off, read):
    given = {"model": {"family": family, "num_layers": 4}}
    assert read in shown(config.from_dict(given, [f"{setting}={on}"]))
    assert read not in shown(config.from_dict(given, [f"{setting}={off}"]))


def test_what_nothing_reads_is_shown_where_it_was_set():
    settings = {"family": "llama", "max_seq_len": 4096, "rope_low_turns": 1.0}
    found = shown(Config(model=ModelConfig(**settings)))
    assert {f"model.{key}" for key in settings} <= found
    assert not {"optimizer.keep_state", "run.spike_score", "layout.accumulation"} & found


def test_an_option_is_a_setting_or_fixed_and_never_both():
    for family in SHIPPED:
        assert not set(family.settings) & set(family.fixed), family.name
        assert {*family.settings, *family.fixed} <= set(ModelConfig.__dataclass_fields__)


# Changes of a golden's config.json that are refused, by a part of the message.
REFUSED = [
    ("llama", {"rope_parameters": {"rope_type": "axial", "factor": 2.0}}, "'axial'; it can be"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 3}}, "has beta = 3"),
    ("llama", {"hidden_act": "mish"}, "hidden_act = 'mish' is not known; it can be silu"),
    ("llama", {"sliding_window": 7}, "has sliding_window = 7, which is not known for llama"),
    ("llama", {"rope_turns": 7}, "llama models; remove it from config.json if it does not affect"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved = True; for llama it can be False"),
    ("mistral", {"attention_bias": True}, "attention_bias = True; for mistral it can be False"),
    ("mixtral", {"attention_bias": True}, "attention_bias = True; for mixtral it can be False"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod = 2; for phi3 it can be 1"),
    ("phi3", {"interpolate_factor": 2}, "interpolate_factor = 2; for phi3 it can be 1"),
    ("phi3", {"lm_head_bias": True}, "lm_head_bias = True; for phi3 it can be False"),
    ("phi3", {"mlp_bias": True}, "mlp_bias = True; for phi3 it can be False"),
    ("qwen3_moe", {"qkv_bias": True}, "qkv_bias = True; for qwen3_moe it can be False"),
    ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm = False; for qwen3_moe it can be True"),
    (
        "qwen3_moe",
        {"shared_expert_intermediate_size": 8},
        "shared_expert_intermediate_size = 8; for qwen3_moe it can be 0",
    ),
    ("llama", {"hidden_size": None}, "has no 'hidden_size', which a llama model needs"),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["chunked"]}, "has 'chunked' in layer"),
    ("gemma2", {"sliding_window_size": 6}, "sliding_window_size = 6; for gemma2 it can be 5"),
    ("gpt_neox", {"partial_rotary_factor": 1.0}, "factor = 1.0; for gpt_neox it can be 0.25"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True; for g"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "it can be None"),
    ("phi3", {"rope_scaling": {"type": "linear"}}, "rope_type = 'linear'; for phi3 it can be"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "for gpt2 it can be False"),
    ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj = 'mish' is not known"),
    ("t5", {"decoder_start_token_id": 2}, "decoder_start_token_id = 2 and pad_token_id = 0; they"),
    ("mt5", {"is_encoder_decoder": False}, "is_encoder_decoder = False; for mt5 it can be True"),
    ("mt5", {"scale_decoder_outputs": True}, "scale_decoder_outputs = True, which is not known"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
    ("bert", {"is_decoder": True}, "is_decoder = True; for bert it can be False"),
    ("bert", {"tie_word_embeddings": False}, "for bert it can be True"),
    ("bert", {"position_embedding_type": "relative_key"}, "for bert it can be 'absolute'"),
    ("esm", {"position_embedding_type": "absolute"}, "as in ESM-1b; for esm it must be 'rotary'"),
    ("esm", {"is_folding_model": True}, "is_folding_model = True; for esm it can be False"),
    ("esm", {"mask_token_id": None}, "token_dropout = true and no mask_token_id"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1; for mixtral it can be"),
    ("mixtral", {"moe_intermediate_size": 8}, "has moe_intermediate_size = 8, which is not known"),
    (
        "qwen3_moe_dense",
        {"num_hidden_layers": 10, "mlp_only_layers": [5]},
        "of 10 layers [5] have no experts; dense layers can be the first ones and",
    ),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias = True; for deepseek_v3 it can be"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False; for deepseek_v3 it can"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob = False; for deepseek_v3 it can be"),
    ("deepseek_v3", {"index_topk": 2048}, "has index_topk = 2048, which is not known for deepseek"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0; for gpt_oss it can be 1.702"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias = False; for gpt_oss it can be True"),
    ("qwen3_moe", {"decoder_sparse_step": 3}, "of 2 layers [0, 1] have no experts; dense layers"),
]


@pytest.mark.parametrize(("name", "change", "fragment"), REFUSED)
def test_what_is_not_known_is_refused_by_name(name, change, fragment):
    hf = json.loads((GOLDENS / name / "config.json").read_text())
    family = next(one for one in SHIPPED if hf["model_type"] in one.hf_types)
    hf = {key: value for key, value in {**hf, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(fragment)) as caught:
        family.from_hf(hf)
    assert "\n" not in str(caught.value)


def golden_config(family):
    """The config.json of a golden of the family."""
    for path in sorted(GOLDENS.glob("*/config.json")):
        hf = json.loads(path.read_text())
        if hf["model_type"] in family.hf_types:
            return hf
    raise AssertionError(family.name)


@pytest.mark.parametrize(
    "family", [one for one in SHIPPED if one.hf_types], ids=lambda one: one.name
)
def test_what_a_family_reads_does_not_depend_on_the_order_of_reading(family):
    """A second reading finds what the first did, and scaling begins where the context ends, which
    the sizes are read from, too."""
    hf = golden_config(family)
    once = HfConfig(types.MappingProxyType({**family.hf_defaults, **hf}))
    assert family.settings_of(once) == family.settings_of(once)
    assert once.known >= once.keys.keys()
    if "rope_scaling" not in family.settings or family.name == "phi3":  # names where it begins
        return
    hf = {key: value for key, value in hf.items() if not key.startswith("rope_")}
    for kind in ("dynamic", "yarn"):
        scaling = {"rope_type": kind, "factor": 2.0}
        newer = {"full_attention": scaling} if "local_rope_theta" in family.settings else scaling
        for form in ({"rope_scaling": scaling}, {"rope_parameters": newer}):
            settings = family.from_hf(hf | {"max_position_embeddings": 48} | form)
            assert (settings["max_seq_len"], settings["rope_original_context"]) == (48, 48)


def test_a_umt5_says_in_either_way_whether_its_head_is_scaled():
    """Transformers 4 by tie_word_embeddings, and 5.24 by another key, which it prefers."""
    hf, family = golden_config(FAMILIES["umt5"]), FAMILIES["umt5"]
    for tied in (False, True):
        said = hf | {"tie_word_embeddings": tied}
        assert family.from_hf(said)["scaled_head"] is tied
        assert family.from_hf(said | {"scale_decoder_outputs": False})["scaled_head"] is False


# Keys of published config.json files that change nothing, by a model that has them.
POOLER = {
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
}
NO_CHANGE = {
    "SmolLM2": ("llama", {"is_llama_config": True, "rope_interleaved": False}),
    "SmolLM2 Instruct": ("llama", {"transformers.js_config": {"dtype": "q4"}}),
    "LLaMA": ("llama", {"max_sequence_length": 2048}),
    "Vicuna": ("llama", {"max_length": 4096, "do_sample": True, "temperature": 0.9, "top_p": 0.6}),
    "saved by unsloth": ("llama", {"unsloth_fixed": True, "unsloth_version": "2025.1"}),
    "Gemma 2 9B-it": ("gemma2", {"sliding_window_size": 5, "_attn_implementation": "eager"}),
    "Mistral": ("mistral", {"attention_bias": False}),
    "Mixtral": ("mixtral", {"attention_bias": False}),
    "Phi-4-mini": (
        "phi3",
        {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    ),
    "Qwen3-Coder": (
        "qwen3_moe",
        {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
    ),
    "DistilGPT-2": ("gpt2", {"_num_labels": 1, "finetuning_task": None}),
    "GPT-NeoX": ("gpt_neox", {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}),
    "a Pythia saved by transformers 4": (
        "gpt_neox",
        {"rotary_pct": 0.25, "partial_rotary_factor": 0.25, "rope_theta": 10_000},
    ),
    "BERT Chinese": ("bert", {"directionality": "bidi", "hidden_dropout_prob": 0.1, **POOLER}),
    "UMT5": ("umt5", {"scalable_attention": True}),
}


@pytest.mark.parametrize("model", NO_CHANGE)
def test_keys_without_a_part_in_the_logits_change_nothing(model):
    name, more = NO_CHANGE[model]
    hf = json.loads((GOLDENS / name / "config.json").read_text())
    family = next(one for one in SHIPPED if hf["model_type"] in one.hf_types)
    check_value_types(hf | more)
    assert family.from_hf(hf | more) == family.from_hf(hf)


def test_an_epsilon_of_latent_attention_comes_back():
    """As of Moonlight-16B-A3B; DeepSeek-V3's own is transformers' default."""
    hf = json.loads((GOLDENS / "deepseek_v3" / "config.json").read_text())
    family = FAMILIES["deepseek_v3"]
    plain = {key: value for key, value in hf.items() if key != "rms_norm_eps"}
    assert family.from_hf(hf) == family.from_hf(plain)
    settings = family.from_hf(hf | {"rms_norm_eps": 1e-5})
    assert settings == family.from_hf(hf) | {"norm_eps": 1e-5}
    written = family.to_hf(ModelConfig(**settings))
    assert written["rms_norm_eps"] == 1e-5
    assert family.from_hf(written)["norm_eps"] == 1e-5


def test_a_balancing_loss_that_is_off_there_is_off_here():
    """As of published gpt-oss, whose weight of 0.9 transformers does not use."""
    hf = json.loads((GOLDENS / "gpt_oss" / "config.json").read_text())
    hf["router_aux_loss_coef"] = 0.9
    family = FAMILIES["gpt_oss"]
    settings = family.from_hf(hf | {"output_router_logits": False})
    assert settings["balance_weight"] == 0
    # Theirs is four times ours where a token has four experts, and a mean over the two layers.
    settings = family.from_hf(hf | {"output_router_logits": True})
    assert settings["balance_weight"] == pytest.approx(0.9 * 4 / 2)
    assert family.to_hf(ModelConfig(**settings))["router_aux_loss_coef"] == pytest.approx(0.9)


# Changes of a config.json that ended in a traceback, or were dropped: the whole message.
SCALES = "config.json has rope_type = "
MALFORMED = [
    ("llama", {"vocab_size": "300"}, "vocab_size = '300'; it can be a whole number above 0"),
    ("llama", {"vocab_size": 300.0}, "vocab_size = 300.0; it can be a whole number above 0"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0; it can be a whole number abo"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers = True; it can be a whole number a"),
    ("llama", {"max_position_embeddings": None}, "max_position_embeddings = None; it can be a who"),
    ("mistral", {"sliding_window": "4"}, "sliding_window = '4'; it can be a whole number, 0 or m"),
    ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6'; it can be a number"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps = None; it can be a number"),
    ("llama", {"rope_theta": None}, "rope_theta = None; it can be a number above 0"),
    ("llama", {"rope_theta": float("inf")}, "rope_theta = inf; it can be a number above 0"),
    ("qwen2", {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'; it can be true or false"),
    ("gpt_neox", {"hidden_act": 1}, "hidden_act = 1; it can be text or null"),
    ("gemma2", {"layer_types": 1}, "layer_types = 1; it can be a list or null"),
    ("llama", {"rope_scaling": [1, 2]}, "rope_scaling = [1, 2]; it can be a mapping of names to"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling has factor = '2'"),
    (
        "gemma3",
        {"rope_parameters": {"full_attention": {"rope_theta": "x"}}},
        "config.json: rope_parameters: full_attention has rope_theta = 'x'; it can be a number",
    ),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "needs 'low_freq_factor'"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": 4}}, "it can be a list of numb"),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 4}}, "which needs 'short_factor'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, f"{SCALES}'linear', which needs 'factor'"),
    ("llama", {"rope_scaling": {"type": "dynamic"}}, f"{SCALES}'dynamic', which needs 'factor'"),
    ("llama", {"rope_scaling": {"type": "yarn"}}, f"{SCALES}'yarn', which needs 'factor'"),
]


@pytest.mark.parametrize(("name", "change", "fragment"), MALFORMED)
def test_a_value_of_another_type_is_refused_by_name(name, change, fragment):
    """As `open_model` reads one: first the types, then the values."""
    hf = json.loads((GOLDENS / name / "config.json").read_text()) | change

    def read():
        check_value_types(hf)
        FAMILIES[name].from_hf(hf)

    with pytest.raises(ValueError, match=re.escape(fragment)) as caught:
        read()
    assert "\n" not in str(caught.value)


YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_context": 1024}
CONTEXTS = [
    ({}, 0, 2048),
    ({}, 512, 512),
    ({"max_seq_len": 4096}, 512, 4096),
    ({"max_seq_len": 4096}, 8192, 8192),
    (YARN, 8192, 4096),
    ({**YARN, "max_seq_len": 1024}, 0, 1024),
    ({**YARN, "max_seq_len": 1024}, 2048, 4096),
    (YARN | {"rope_scaling": "dynamic"}, 8192, 1024),
    ({"family": "gpt", "tied_embeddings": True}, 512, 2048),
]


@pytest.mark.parametrize(("settings", "trained", "written"), CONTEXTS)
def test_the_context_that_is_written_is_that_of_training_or_of_the_model_before(
    settings, trained, written
):
    model = with_context(ModelConfig(**settings), trained)
    hf = FAMILIES[model.family].to_hf(model)
    assert hf.get("max_position_embeddings", hf.get("n_positions")) == written


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("phi3_long", {"type", "short_factor", "long_factor"}),
        (
            "phi3_short",
            {"rope_type", "factor", "original_max_position_embeddings", "attention_factor"}
            | {"short_factor", "long_factor"},
        ),
    ],
)
def test_a_long_phi_is_written_as_transformers_4_reads_it_where_it_can_be(name, keys):
    """Its class refuses other keys than the three of the published files."""
    hf = json.loads((GOLDENS / name / "config.json").read_text())
    written = FAMILIES["phi3"].to_hf(ModelConfig(**FAMILIES["phi3"].from_hf(hf)))
    assert set(written["rope_scaling"]) == keys


def test_what_scores_are_divided_by_is_written_whole():
    """Gemma's class at transformers refuses 12.0."""
    for family in ("gemma2", "gemma3"):
        hf = FAMILIES[family].to_hf(ModelConfig(family=family, attention_scale_dim=12.0))
        assert repr(hf["query_pre_attn_scalar"]) == "12"


def test_the_form_of_transformers_4_is_read_too():
    """As published: without keys that have defaults, and rotary settings in their old place."""
    sizes = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 7}
    common = {**sizes, "num_attention_heads": 4, "max_position_embeddings": 64}
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    llama = FAMILIES["llama"].from_hf(
        common | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling}
    )
    assert (llama["rope_theta"], llama["rope_scaling"], llama["rope_factor"]) == (5e5, "llama3", 8)
    assert (llama["num_kv_heads"], llama["head_dim"], llama["norm_eps"]) == (4, 6, 1e-6)
    gemma = FAMILIES["gemma3"].from_hf(
        common
        | {
            "model_type": "gemma3_text",
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        }
    )
    assert (gemma["layer_pattern"], gemma["local_rope_theta"]) == ("LLLLLG", 1e4)
    assert (gemma["rope_scaling"], gemma["rope_factor"]) == ("linear", 8.0)
    neox = FAMILIES["gpt_neox"].from_hf(
        common | {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500}
    )
    assert (neox["rope_share"], neox["rope_theta"]) == (0.5, 500)
    phi = FAMILIES["phi3"].from_hf(
        common
        | {
            "model_type": "phi3",
            "rope_scaling": None,
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64,
        }
    )
    assert (phi["rope_share"], phi["rope_theta"]) == (0.5, 500.0)


def test_keys_of_published_files_are_known():
    """Those of GPT-2 XL and Qwen2.5 7B other than sizes: none of them changes the logits."""
    gpt = {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_ctx": 1024,
        "n_positions": 1024,
        "n_embd": 1600,
        "n_head": 25,
        "n_layer": 48,
        "vocab_size": 50257,
        "n_special": 0,
        "output_past": True,
        "predict_special_tokens": True,
        "resid_pdrop": 0.1,
        "summary_first_dropout": 0.1,
        "task_specific_params": {"text-generation": {"max_length": 50}},
    }
    model = ModelConfig(**FAMILIES["gpt"].from_hf(gpt))
    padding = 47 * 1600  # rows of the embedding
    assert model_trace(model).num_params == 1_557_611_200 + padding
    qwen = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
        "use_mrope": False,
    }
    model = ModelConfig(**FAMILIES["qwen2"].from_hf(qwen))
    assert model_trace(model).num_params == 7_615_616_512


ONE_GROUP = {"router_groups": 1, "router_groups_kept": 1}


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"qk_norm": True}, "model.qk_norm = True cannot be written in Hugging Face's format of"),
        ({"attention_bias": "qkv"}, "set model.family = 'qwen2'"),
        ({"family": "t5", "num_kv_heads": 2}, "model.num_kv_heads = 2 cannot be written"),
        ({"family": "mt5", "activation": "gelu"}, "model.activation = 'gelu' cannot be written"),
        ({"family": "gpt", "num_kv_heads": 2}, "model.num_kv_heads = 2 cannot be written"),
        ({"family": "gpt_neox", "head_dim": 32}, "model.head_dim = 32 cannot be written"),
        ({"family": "m6_t"}, "model.family = 'm6_t' has no Hugging Face format"),
        ({"family": "gpt_oss", "mlp_limit": 0.0}, "model.mlp_limit = 0 cannot be written"),
        ({"family": "deepseek_v3", "shared_d_ff": 9}, "model.shared_d_ff = 9 cannot be written"),
        (
            {"family": "deepseek_v3", "num_experts": 1, "experts_per_token": 1, **ONE_GROUP},
            "model.num_experts = 1 cannot be written",
        ),
        ({"family": "mixtral", "num_experts": 0}, "model.num_experts = 0 cannot be written"),
        ({"family": "esm", "causal": True}, "model.causal = True cannot be written"),
        ({"family": "gemma2", "attention_scale_dim": 0.5}, "attention_scale_dim = 0.5 cannot be"),
    ],
)
def test_what_their_format_does_not_have_is_refused(settings, fragment):
    model = ModelConfig(**settings)
    with pytest.raises(ValueError, match=re.escape(fragment)):
        FAMILIES[model.family].to_hf(model)


@pytest.mark.parametrize("tied", [True, False])
def test_a_umt5_is_written_with_the_inputs_of_its_head_scaled(tied):
    """As transformers 5.0 to 5.23 scale them in any case; the head may be the embedding."""
    model = ModelConfig(family="umt5", tied_embeddings=tied, d_model=64)
    scaled, params = FAMILIES["umt5"].hf_form(
        model, {"head": {"norm": {"scale": np.ones(64, "f")}}}
    )
    assert (scaled.scaled_head, scaled.tied_embeddings) == (True, tied)
    np.testing.assert_array_equal(params["head"]["norm"]["scale"], np.full(64, 8, "f"))


@pytest.mark.parametrize(
    ("before", "kind", "factor"), [(8.0, "llama3", 8.0), (32, "llama3", 32.0), (1.0, "none", 1.0)]
)
def test_a_run_written_before_rope_scaling_had_kinds_still_loads(before, kind, factor):
    model = {"rope_theta": 5e5, "rope_scaling": before, "tied_embeddings": True, "qk_norm": False}
    loaded = config.from_dict({"model": model}).model
    assert (loaded.rope_scaling, loaded.rope_factor, loaded.rope_theta) == (kind, factor, 5e5)
    gpt = {"family": "gpt", "rope_theta": 10_000.0, "rope_scaling": 1.0, "tied_embeddings": True}
    assert config.from_dict({"model": gpt}).model == ModelConfig(family="gpt")


def test_layers_repeat_after_a_period():
    gemma = ModelConfig(family="gemma3", num_layers=8, sliding_window=5)
    assert gemma.period == 6
    assert [gemma.window(index) for index in range(8)] == [5, 5, 5, 5, 5, 0, 5, 5]
    assert {gemma.theta(index) for index in (0, 4, 6)} == {10_000.0}
    assert gemma.theta(5) == 1_000_000.0
    everywhere = ModelConfig(sliding_window=5)
    assert (everywhere.period, everywhere.window(1), everywhere.theta(1)) == (1, 5, 10_000.0)
