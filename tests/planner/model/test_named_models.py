"""Known models have the sizes that were published, and a user's file is checked field by field."""

import dataclasses
import json

import pytest

from jaxscale.planner.model.named_models import NAMED, check_shape, find_shape
from jaxscale.planner.model.shape import ModelShape


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama3-8b", 8.03e9, 8.03e9),  # model card
        ("llama3-405b", 405.9e9, 405.9e9),  # model card
        ("mixtral-8x7b", 46.7e9, 12.9e9),  # mistral.ai, December 2023
        ("mixtral-8x22b", 141e9, 39e9),  # mistral.ai, April 2024
        ("deepseek-v3", 671e9, 37e9),  # arXiv 2412.19437
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),  # model card
        ("qwen3-235b-a22b", 235e9, 22e9),  # model card
        ("t5-11b", 11.3e9, 11.3e9),  # arXiv 1910.10683 says 11 billion
        ("mt5-xxl", 12.9e9, 12.9e9),  # arXiv 2010.11934 says 13 billion
    ],
)
def test_counts_are_the_published_ones(name, total, active):
    shape = NAMED[name]
    check_shape(shape, name)
    assert shape.num_params == pytest.approx(total, rel=0.005)
    assert shape.active_params == pytest.approx(active, rel=0.02)


def test_a_name_is_taken_in_any_case_and_a_misspelt_one_gets_the_nearest():
    assert find_shape("Mixtral_8x7B") is NAMED["mixtral-8x7b"]
    assert find_shape("Nemotron3_Nano") is NAMED["nemotron-3-nano"]
    with pytest.raises(ValueError, match=r"model 'mixtral-7b'.*did you mean 'mixtral-8x7b' or"):
        find_shape("mixtral-7b")
    with pytest.raises(ValueError, match=r"model 'nobody' is not known; it can be llama3-8b, "):
        find_shape("nobody")


def written(tmp_path, shape: ModelShape, **changes) -> str:
    """A file of a shape, with fields changed; None leaves one out."""
    fields = {**dataclasses.asdict(shape), **changes}
    path = tmp_path / "model.json"
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return str(path)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "nemotron-3-nano", "mt5-xxl"])
def test_a_file_says_the_same(name, tmp_path):
    assert find_shape(written(tmp_path, NAMED[name])) == NAMED[name]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"expert": 8}, r"model\.json: 'expert' is not a field; .*did you mean 'experts'"),
        ({"vocab": None}, r"model\.json: 'vocab' is missing; every model has"),
        ({"layers": "61"}, "layers = '61' must be int"),
        ({"gated": 1}, "gated = 1 must be bool"),
        ({"windowed_share": "half"}, "windowed_share = 'half' must be float"),
        (
            {"latent": {"query_rnk": 1}},
            r"latent: 'query_rnk' is not .*did you mean 'query_rank'",
        ),
        ({"latent": {"query_rank": 1}}, r"latent: 'kv_rank' is missing"),
        (
            {"latent": 512},
            r"latent is 512; it must be an object of LatentAttention's fields",
        ),
    ],
)
def test_a_wrong_file_is_refused(changes, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        find_shape(written(tmp_path, NAMED["deepseek-v3"], **changes))


def test_a_file_says_where_its_sizes_are_from(tmp_path):
    path = written(tmp_path, NAMED["deepseek-v3"], source="model card")
    assert find_shape(path) == NAMED["deepseek-v3"]


def test_a_file_that_is_no_object_of_fields_is_refused(tmp_path):
    path = tmp_path / "model.json"
    neither = r"model\.json does not describe a model; .*\(layers, d_model, .* run's config\.json"
    for text, said in (("{", r"json is not JSON: "), ("[1]", neither), ('{"modle": {}}', neither)):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            find_shape(str(path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 0}, "mine: layers = 0; at least 1"),
        ({"top_k": 0}, "mine: top_k = 0; at least 1"),
        ({"top_k": 9}, "mine: top_k = 9 is more than experts = 8"),
        ({"kv_heads": 5}, "mine: heads = 32 is not a multiple of kv_heads = 5"),
        ({"experts": 0}, "mine: d_ff = 0; at least 1"),
        ({"encoder_layers": 2}, "mine: encoder_seq_len = 0; at least 1"),
    ],
)
def test_sizes_that_no_model_has_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        check_shape(dataclasses.replace(NAMED["mixtral-8x7b"], **changes), "mine")
