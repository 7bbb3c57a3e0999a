"""Hugging Face model folders (config.json, safetensors, tokenizer): opened, read and written.

Nothing in a folder is run: no code (`auto_map`), no pickles.
"""

import dataclasses
import fnmatch
import json
import logging
import math
import pathlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import tokenizers

from jaxscale.config.model import ModelConfig
from jaxscale.config.model.lora import is_adapter
from jaxscale.hugging_face.checkpoint_rules import (
    ParameterTensors,
    check_tensors,
    parameter_tensors,
)
from jaxscale.hugging_face.peft_adapters import (
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_TENSORS,
    adapter_config,
    adapter_rules,
    fused_metadata,
    open_adapters,
)
from jaxscale.hugging_face.peft_experts import AdapterForm
from jaxscale.hugging_face.peft_prompts import EMBEDDINGS, prompt_config
from jaxscale.hugging_face.quantised_tensors import without_quantisation
from jaxscale.hugging_face.read_params import read_params
from jaxscale.hugging_face.safetensors_format import DTYPES, SINGLE, StoredTensor, open_tensors
from jaxscale.hugging_face.text_part import DEFAULTS, text_settings, text_tensors
from jaxscale.hugging_face.value_types import check_value_types
from jaxscale.hugging_face.write_params import write_params
from jaxscale.model_families.family import Family
from jaxscale.model_families.hf.config import with_context
from jaxscale.model_families.shipped import SHIPPED, find_family
from jaxscale.ops.storage.quantised_storage import StoredWeights
from jaxscale.run_folder import GENERATION, HF_CONFIG, TOKENIZERS, copy_tokenizer
from jaxscale.sharding.resolve import is_axes, leaf_name
from jaxscale.storage.untrusted import load_json

log = logging.getLogger("jaxscale")

FAMILIES = {kind: family for family in SHIPPED for kind in family.hf_types}
"""`model_type` of config.json -> family."""

AS_IT_IS = "PreTrainedTokenizerFast"
"""The class of transformers 4 and 5 that uses a tokenizer.json unchanged."""

MAX_FILE_BYTES = 5_000_000_000  # as in transformers


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model's folder: its settings, and the location of its tensors."""

    directory: pathlib.Path
    settings: Mapping[str, Any]  # ours
    tensors: Mapping[str, StoredTensor]
    ignored: tuple[str, ...]  # patterns of tensors without a parameter
    left_out: tuple[str, ...]  # patterns of trained tensors that are not read
    adapters: pathlib.Path | None = None  # a folder of PEFT adapters
    form: AdapterForm = "ours"  # of the adapters' tensors
    stored_vocab: int | None = None  # tokens of the model, if the adapters have more

    has_state = False  # of an optimizer
    stop_ids = ()  # the tokenizer reads them from the folder

    @property
    def config(self) -> ModelConfig:
        """The config of the model; settings that config.json lacks have their defaults."""
        return ModelConfig(**self.settings)

    @property
    def context(self) -> int:
        """The longest text for the weights, in tokens, from config.json."""
        return self.config.max_seq_len

    @property
    def dtype(self) -> str:
        """The narrowest type for all parameters: bfloat16 if all tensors are, except adapters and
        tensors that are always float32; else float32."""
        rules = find_family(self.config.family).tensors(self.config)
        wide = [rule.name.format(layer="*", expert="*") for rule in rules if rule.wide]
        narrow = all(
            one.dtype == "BF16" or any(fnmatch.fnmatchcase(name, pattern) for pattern in wide)
            for name, one in self.tensors.items()
            if one.dtype in DTYPES and not name.startswith((PEFT_PREFIX, EMBEDDINGS))
        )
        return "bfloat16" if narrow else "float32"

    @property
    def largest_tensor_bytes(self) -> int:
        """The approximate host memory for reading the parameters."""
        return max(
            math.prod(one.shape) * DTYPES[one.dtype].itemsize
            for one in self.tensors.values()
            if one.dtype in DTYPES
        )

    def check(self, axes: Any, shapes: Any) -> tuple[ParameterTensors, ...]:
        """The tensors of each parameter, after a check of all names and shapes; reads headers only.

        Args:
          axes: the tree of logical axes of the parameters.
          shapes: the tree of their shapes, in canonical form.

        Raises:
          ValueError: tensors are missing, unknown, or of another shape or type; names them.
        """
        parameters = parameters_of(
            self.config, axes, shapes, form=self.form, stored_vocab=self.stored_vocab
        )
        where = f"{self.directory} with {self.adapters}" if self.adapters else self.directory
        check_tensors(self.tensors, parameters, (*self.ignored, *self.left_out), where)
        return parameters

    def read(self, axes: Any, abstract: Any, stored: StoredWeights = MappingProxyType({})) -> Any:
        """The parameters, in canonical form, on the devices of `abstract`; see `check` and
        `read_params`. Logs the trained tensors that are not read."""
        parameters = self.check(axes, abstract)
        others = self.tensors.keys() - {name for one in parameters for name in one.tensors}
        for pattern in self.left_out:
            if count := len(fnmatch.filter(others, pattern)):
                log.warning(
                    f"note: {count} tensors {pattern} of {self.directory} have no part in the "
                    "logits: they are not read, and not in an export"
                )
        return read_params(self.tensors, parameters, abstract, stored)


def is_hugging_face(directory: pathlib.Path) -> bool:
    """Whether a folder is a Hugging Face model's rather than a run's.

    Raises:
      FileNotFoundError: it is neither.
    """
    return "model_type" in _read_json(directory / "config.json")


def open_model(
    directory: pathlib.Path,
    *,
    prediction_depth: int = 0,
    adapters: pathlib.Path | None = None,
) -> HuggingFaceModel:
    """Opens a folder; reads no values.

    Args:
      prediction_depth: number of multi-token prediction (MTP) modules to read.
      adapters: a folder of PEFT adapters to read as well.

    Raises:
      FileNotFoundError: no config.json, no checkpoint, or no adapters.
      ValueError: a model, a setting or a file that is not supported; names it.
    """
    whole = _read_json(directory / "config.json")
    try:
        hf = text_settings(whole)
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error
    kind = hf.get("model_type")
    if kind is None and isinstance(whole.get("model"), dict):
        raise ValueError(
            f"{directory} is the folder of a run, not of a Hugging Face model; write one with "
            f"convert --to_hf --workdir {directory}"
        )
    family = _find_family(directory, kind, whole)
    tensors: Mapping[str, StoredTensor] = open_tensors(directory)
    if kind != whole["model_type"]:
        tensors = text_tensors(tensors, directory)
    try:
        hf, tensors = without_quantisation(hf, tensors)
        check_value_types(hf)
        settings = family.from_hf(hf, tensors)
        if prediction_depth:
            settings["prediction_depth"] = prediction_depth
        layers = ModelConfig(**settings).num_layers
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error
    for old, new in family.hf_renamed.items():
        tensors = {_with_end(name, old, new): tensor for name, tensor in tensors.items()}
    if not any(name.startswith(family.hf_prefix) for name in tensors):
        tensors = {family.hf_prefix + name: tensor for name, tensor in tensors.items()}
    form, stored_vocab = "ours", None
    if adapters:
        model = ModelConfig(**settings)
        found = open_adapters(adapters, model, family.tensors(model))
        settings |= found.settings
        tensors, form = {**tensors, **found.tensors}, found.form
        stored_vocab = found.stored_vocab
    further = range(layers, layers + (hf.get("num_nextn_predict_layers") or 1))
    left_out = (pattern.format(layers=k) for pattern in family.left_out for k in further)
    left_out = tuple(dict.fromkeys(left_out))
    return HuggingFaceModel(
        directory, settings, tensors, family.ignored, left_out, adapters, form, stored_vocab
    )


def _find_family(directory: pathlib.Path, kind: Any, whole: Mapping[str, Any]) -> Family:
    """The family of a model_type; logs custom code that the folder names.

    Args:
      whole: config.json.

    Raises:
      ValueError: there is none.
    """
    if not isinstance(kind, str) or kind not in FAMILIES:
        own = " (its auto_map names custom code, which is not run)" if "auto_map" in whole else ""
        raise ValueError(
            f"{directory / 'config.json'}: model_type {kind!r} is not supported{own}; it can be "
            f"{', '.join(sorted({*FAMILIES, *DEFAULTS}))}"
        )
    for name in ("config.json", "tokenizer_config.json"):
        if (directory / name).is_file() and "auto_map" in _read_json(directory / name):
            log.warning(
                f"note: {directory / name} names custom code (auto_map), which is not run: the "
                f"model is jaxscale's {FAMILIES[kind].name}, the tokenizer that of its file"
            )
    return FAMILIES[kind]


def _with_end(name: str, old: str, new: str) -> str:
    return name.removesuffix(old) + new if name.endswith(old) else name


def parameters_of(
    config: ModelConfig,
    axes: Any,
    shapes: Any,
    *,
    form: AdapterForm = "ours",
    stored_vocab: int | None = None,
) -> tuple[ParameterTensors, ...]:
    """The tensors of each parameter of a model, with its adapters.

    Args:
      form: of the adapters' tensors.
      stored_vocab: rows of the stored embedding tables; None for the model's vocabulary.
    """
    size = stored_vocab or config.vocab_size
    stored = dataclasses.replace(config, vocab_size=size, lora_tokens="")
    rules = find_family(config.family).tensors(stored)
    leaves = jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)
    names = [leaf_name(path) for path, _ in leaves]
    rules += tuple(adapter_rules(rules, names, config, form))
    return parameter_tensors(rules, axes, shapes, size)


def write_model(
    directory: pathlib.Path,
    config: ModelConfig,
    axes: Any,
    params: Any,
    *,
    dtype: str,
    workdir: pathlib.Path,
    seq_len: int = 0,
    end_of_text: int | None = None,
    ends: Sequence[int] = (),
    decoder_start: int | None = None,
    padding: int | None = None,
    mask: int | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> int:
    """Writes a folder that transformers loads; it gets its name when it is complete.

    Args:
      params: in canonical form.
      dtype: of the tensors: float32, bfloat16 or float16; some are always float32.
      workdir: a run's folder, whose tokenizer is copied.
      seq_len: length of the training sequences; 0 if the model was not trained.
      end_of_text: id of that token, unless the model that the weights come from has one.
      ends: further ids of the tokenizer that end generated text, such as the end of a message.
      decoder_start: id of the decoder's first token, in an encoder-decoder.
      padding: id of the padding token, if the tokenizer has one.
      mask: id of the mask token, if the tokenizer has one.
      max_file_bytes: of each file of tensors.

    Returns:
      The number of tensors.

    Raises:
      ValueError: the folder exists, the family has no Hugging Face format for this model, or values
        are too large for `dtype`.
    """
    family = find_family(config.family)
    config, params = family.hf_form(config, params)
    hf = family.to_hf(with_context(config, seq_len))
    unfinished = _unfinished(directory)
    parameters = parameters_of(config, axes, params)
    stored = write_params(unfinished, parameters, params, dtype, max_file_bytes)
    if padding is None and not (config.causal and not config.num_encoder_layers):
        # transformers needs one here: ESM counts positions by it, T5 shifts its labels. A decoder
        # needs none, and would not train the embedding of this id.
        padding = end_of_text
    ids = {"bos_token_id": None, "eos_token_id": end_of_text, "pad_token_id": padding}
    if config.num_encoder_layers:
        ids["decoder_start_token_id"] = decoder_start
    written = {**hf, **ids, **_special_ids(workdir), "torch_dtype": dtype}
    written["eos_token_id"] = _with_ends(written["eos_token_id"], ends)
    (unfinished / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    copy_tokenizer(workdir, unfinished)
    generation = unfinished / GENERATION
    if ends and generation.is_file():  # it takes precedence over config.json in transformers
        said = _read_json(generation)
        said["eos_token_id"] = _with_ends(said.get("eos_token_id"), ends)
        generation.write_text(json.dumps(said, indent=2) + "\n")
    (unfinished / HF_CONFIG).unlink(missing_ok=True)
    name_tokenizer_class(unfinished, {"mask_token_id": mask, **written})
    unfinished.rename(directory)
    return len(stored)


def write_adapters(
    directory: pathlib.Path,
    config: ModelConfig,
    axes: Any,
    params: Any,
    *,
    dtype: str,
    base: pathlib.Path | None = None,
    workdir: pathlib.Path | None = None,
) -> int:
    """Writes the adapters of a model as PEFT loads them; the folder gets its name when complete.

    Args:
      params: adapters and model, in canonical form, as `with_token_rows` returns them.
      dtype: as in `write_model`.
      base: the Hugging Face folder of the base model, if known.
      workdir: a run's folder, whose tokenizer is copied if it may have new tokens.

    Returns:
      The number of tensors.

    Raises:
      ValueError: as in `write_model`.
    """
    parameters = parameters_of(config, axes, params)
    adapters = [one for one in parameters if is_adapter(one.name)]
    of_adapters = [name for one in adapters for name in one.tensors]
    of_model = {name for one in parameters for name in one.tensors}.difference(of_adapters)
    rules = find_family(config.family).tensors(config)
    base_name = base and str(base)
    if config.prompt_tokens:
        peft = prompt_config(config, base_name)
    else:
        peft = adapter_config(config, rules, of_model, of_adapters, base_name)
    unfinished = _unfinished(directory)
    metadata = fused_metadata(config, rules)
    write_params(unfinished, adapters, params, dtype, sys.maxsize, metadata)
    (unfinished / SINGLE).rename(unfinished / PEFT_TENSORS)
    (unfinished / PEFT_CONFIG).write_text(json.dumps(peft, indent=2) + "\n")
    if workdir and config.trained_tokens:
        copy_tokenizer(workdir, unfinished)
    unfinished.rename(directory)
    return len(of_adapters)


def _unfinished(directory: pathlib.Path) -> pathlib.Path:
    """A new folder for the files of `directory` until they are complete.

    Raises:
      ValueError: `directory` exists.
    """
    if directory.exists():
        raise ValueError(f"--output {directory} exists; name a new folder")
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def copy_special_ids(directory: pathlib.Path, workdir: pathlib.Path) -> None:
    """Copies the files with the ids of a model's special tokens into a run's folder:
    generation_config.json, and config.json under another name. They belong to the weights, whatever
    the tokenizer of the run; existing files are not replaced.

    Args:
      directory: a Hugging Face model's folder, or a run's.
    """
    config = "config.json" if is_hugging_face(directory) else HF_CONFIG
    for name, copy in ((config, HF_CONFIG), (GENERATION, GENERATION)):
        if (directory / name).is_file() and not (workdir / copy).exists():
            shutil.copyfile(directory / name, workdir / copy)


def _special_ids(workdir: pathlib.Path) -> dict[str, Any]:
    """The ids of special tokens in the config.json of the model from which a run started."""
    if not (workdir / HF_CONFIG).is_file():
        return {}
    hf = _read_json(workdir / HF_CONFIG)
    return {name: value for name, value in hf.items() if name.endswith("_token_id")}


def _with_ends(eos: int | list[int] | None, ends: Sequence[int]) -> int | list[int] | None:
    """`eos_token_id` with the `ends` that it lacks: without the end of a message, `generate` of
    transformers would continue after it."""
    known = eos if isinstance(eos, list) else [] if eos is None else [eos]
    further = [end for end in ends if end not in known]
    if not further:
        return eos
    return [*known, *further] if known else further


def name_tokenizer_class(directory: pathlib.Path, hf: Mapping[str, Any]) -> None:
    """Sets the class in tokenizer_config.json, so that the tokenizer's file is used unchanged.
    Without a class, transformers takes that of the model type, which may split texts differently
    (Qwen's, at every digit), assign other ids to the pieces of a SentencePiece model (Gemma's), add
    an end token (T5's), or fail for lack of a token (Gemma's, BERT's). Forms that only transformers
    5 reads are written as 4 and 5 do: its name of that class, and its list of special tokens.

    Args:
      hf: config.json, with the ids of special tokens.
    """
    path = directory / "tokenizer_config.json"
    given = _read_json(path) if path.is_file() else {}
    config = dict(given)
    if isinstance(given.get("extra_special_tokens"), list):  # in 4 it is a mapping
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if given.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = AS_IT_IS
    elif "tokenizer_class" not in given and any(
        (directory / name).is_file() for name in TOKENIZERS
    ):
        names = _special_names(directory / "tokenizer.json", hf)
        config = {"tokenizer_class": AS_IT_IS, **names, **config}
    if config == given:
        return
    path.write_text(json.dumps(config, indent=2) + "\n")
    if hf["model_type"] == "qwen2" and config.get("tokenizer_class") == AS_IT_IS:
        log.warning(
            "note: AutoTokenizer of transformers 5 splits texts of every qwen2 model as Qwen's, "
            "whatever tokenizer_config.json says; load this tokenizer with "
            "PreTrainedTokenizerFast.from_pretrained(DIR)"
        )


def _special_names(file: pathlib.Path, hf: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by role for the tokenizer_config.json of a tokenizer.json; a SentencePiece
    model contains them."""
    if not file.is_file():
        return {}
    added = tokenizers.Tokenizer.from_file(str(file)).get_added_tokens_decoder()
    # Transformers makes every token that is named here a special one.
    special = {i: token.content for i, token in added.items() if token.special}
    ids = {f"{name}_token": hf.get(f"{name}_token_id") for name in ("bos", "eos", "pad", "mask")}
    first = {name: one[0] if isinstance(one, list) and one else one for name, one in ids.items()}
    return {name: special[i] for name, i in first.items() if type(i) is int and i in special}


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path.parent} is not a folder; download a Hugging Face model first: hf download "
            "NAME --local-dir DIR"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} contains no model: no {path.name}")
    values = load_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a mapping of names to values")
    return values
