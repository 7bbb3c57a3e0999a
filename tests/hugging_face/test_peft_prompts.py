"""Prompts in PEFT's format: written and read again, and refusals."""

import dataclasses
import json
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxscale.hugging_face.model_folder import open_model, write_adapters
from jaxscale.models.adapters.prompt import initial_ids
from jaxscale.models.decoder import plain_kernels
from jaxscale.run.pretrained import from_pretrained
from jaxscale.training.tracing.abstract_model import find_model

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
COUNT = 4


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A golden, its config and parameters with a prompt, and the folder that is written of it."""
    base = from_pretrained(GOLDENS / "gpt2")
    config = dataclasses.replace(base.config, prompt_tokens=COUNT)
    model = find_model(config)(config, plain_kernels())
    rows = np.asarray(base.params["embed"]["tokens"])[initial_ids(config)]
    params = {
        **base.params,
        "embed": {**base.params["embed"], "prompt": {"rows": jnp.asarray(rows)}},
    }
    folder = tmp_path_factory.mktemp("prompts") / "peft"
    assert write_adapters(folder, config, model.axes, params, dtype="float32") == 1
    return base, config, rows, folder


def test_a_prompt_comes_back_and_replaces_as_many_tokens(written):
    """As PEFT has it: the vectors are put before the embeddings of the text."""
    base, config, rows, folder = written
    (tensor,) = load_file(folder / "adapter_model.safetensors").items()
    assert tensor[0] == "prompt_embeddings"
    np.testing.assert_array_equal(tensor[1], rows)
    peft = json.loads((folder / "adapter_config.json").read_text())
    expected = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": COUNT}
    assert expected.items() <= peft.items()
    assert (peft["token_dim"], peft["num_transformer_submodules"]) == (config.d_model, 1)
    back = from_pretrained(GOLDENS / "gpt2", adapters=folder)
    assert back.config == config
    np.testing.assert_array_equal(back.params["embed"]["prompt"]["rows"], rows)
    text = np.array([[5, 6, 7]])
    given = np.concatenate([initial_ids(config)[None], text], axis=1)
    np.testing.assert_allclose(back(text), base(given)[:, COUNT:], rtol=0, atol=1e-6)


REFUSED = [
    (
        {"num_virtual_tokens": 0},
        "num_virtual_tokens = 0, num_transformer_submodules = 1; they must",
    ),
    ({"num_transformer_submodules": 2}, "num_transformer_submodules = 2; they must be a number"),
    ({"modules_to_save": ["head"]}, "modules_to_save = ['head'] is not supported"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_prompt_that_cannot_be_read_is_refused(changes, message, written, tmp_path):
    folder = written[-1]
    peft = json.loads((folder / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**peft, **changes}))
    save_file({"prompt_embeddings": written[2]}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)):
        open_model(GOLDENS / "gpt2", adapters=tmp_path)


def test_other_models_and_tensors_are_refused(written, tmp_path):
    folder = written[-1]
    with pytest.raises(ValueError, match=r"gemma.* scales the embeddings of tokens"):
        open_model(GOLDENS / "gemma3", adapters=folder)
    (tmp_path / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    save_file({"other": written[2]}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="has no tensor 'prompt_embeddings', but other"):
        open_model(GOLDENS / "gpt2", adapters=tmp_path)
    save_file({"prompt_embeddings": written[2][:, 1:]}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"prompt_embeddings: shape"):
        from_pretrained(GOLDENS / "gpt2", adapters=tmp_path)
