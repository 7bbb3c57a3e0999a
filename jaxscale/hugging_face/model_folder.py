"""A model's folder as transformers writes it: config.json, tensors, tokenizer.

Nothing in it is run: no code (`auto_map`), no pickles.
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
from jaxscale.hugging_face.read_params import read_params
from jaxscale.hugging_face.safetensors_format import DTYPES, SINGLE, StoredTensor, open_tensors
from jaxscale.hugging_face.text_part import DEFAULTS, text_settings, text_tensors
from jaxscale.hugging_face.value_types import check_value_types
from jaxscale.hugging_face.write_params import write_params
from jaxscale.model_families.family import Family
from jaxscale.model_families.hf.config import with_context
from jaxscale.model_families.shipped import SHIPPED, find_family
from jaxscale.run_folder import GENERATION, HF_CONFIG, TOKENIZERS, copy_tokenizer
from jaxscale.sharding.resolve import is_axes, leaf_name
from jaxscale.storage.untrusted import load_json

log = logging.getLogger("jaxscale")

FAMILIES = {kind: family for family in SHIPPED for kind in family.hf_types}
"""By `model_type` of config.json."""

AS_IT_IS = "PreTrainedTokenizerFast"
"""The class of transformers 4 and 5 that reads a tokenizer's file as it is."""

MAX_FILE_BYTES = 5_000_000_000  # as in transformers


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model's folder: its settings, and where its tensors are."""

    directory: pathlib.Path
    settings: Mapping[str, Any]  # ours
    tensors: Mapping[str, StoredTensor]
    ignored: tuple[str, ...]  # patterns of tensors without a parameter
    left_out: tuple[str, ...]  # likewise, of trained ones
    adapters: pathlib.Path | None = None  # the folder of those that PEFT wrote for it
    shared: bool = False  # as `adapter_rules`
    stored_vocab: int | None = None  # tokens in it, where the adapters have more

    has_state = False  # of an optimizer
    stop_ids = ()  # those of its files come with the tokenizer

    @property
    def config(self) -> ModelConfig:
        """Its settings, with the defaults of the others."""
        return ModelConfig(**self.settings)

    @property
    def context(self) -> int:
        """Tokens that the weights are for, by their config.json."""
        return self.config.max_seq_len

    @property
    def dtype(self) -> str:
        """The type that holds every parameter: bfloat16 where all tensors are, but for those that
        are never and adapters, else float32."""
        rules = find_family(self.config.family).tensors(self.config)
        wide = [rule.name.format(layer="*", expert="*") for rule in rules if rule.wide]
        narrow = all(
            one.dtype == "BF16" or any(fnmatch.fnmatchcase(name, pattern) for pattern in wide)
            for name, one in self.tensors.items()
            if one.dtype in DTYPES and not name.startswith(PEFT_PREFIX)
        )
        return "bfloat16" if narrow else "float32"

    @property
    def largest_tensor_bytes(self) -> int:
        """About what the host holds while the parameters are read."""
        return max(
            math.prod(one.shape) * DTYPES[one.dtype].itemsize
            for one in self.tensors.values()
            if one.dtype in DTYPES
        )

    def check(self, axes: Any, shapes: Any) -> tuple[ParameterTensors, ...]:
        """The tensors of each parameter, all of them accounted for; reads headers only.

        Args:
          axes: the tree of logical axes of the parameters.
          shapes: the tree of their shapes, in canonical form.

        Raises:
          ValueError: names missing and unknown tensors, and those of another shape or type.
        """
        parameters = parameters_of(
            self.config, axes, shapes, shared=self.shared, stored_vocab=self.stored_vocab
        )
        where = f"{self.directory} with {self.adapters}" if self.adapters else self.directory
        check_tensors(self.tensors, parameters, (*self.ignored, *self.left_out), where)
        return parameters

    def read(self, axes: Any, abstract: Any) -> Any:
        """The parameters, in canonical form, on the devices of `abstract`; as `check` and
        `read_params`. A line names the trained tensors that are left out."""
        parameters = self.check(axes, abstract)
        others = self.tensors.keys() - {name for one in parameters for name in one.tensors}
        for pattern in self.left_out:
            if count := len(fnmatch.filter(others, pattern)):
                log.warning(
                    f"note: {count} tensors {pattern} of {self.directory} have no part in the "
                    "logits: they are not read, and not in an export"
                )
        return read_params(self.tensors, parameters, abstract)


def is_hugging_face(directory: pathlib.Path) -> bool:
    """Whether a folder is a model's as transformers writes it, and not a run's.

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
      prediction_depth: how many of the modules that predict further tokens are read.
      adapters: a folder with adapters of PEFT, which are read, too.

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
            f"{directory} is the folder of a run, not of a Hugging Face model; convert --to_hf "
            f"--workdir {directory} writes one"
        )
    family = _find_family(directory, kind, whole)
    tensors: Mapping[str, StoredTensor] = open_tensors(directory)
    if kind != whole["model_type"]:
        tensors = text_tensors(tensors, directory)
    try:
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
    shared, stored_vocab = False, None
    if adapters:
        model = ModelConfig(**settings)
        found = open_adapters(adapters, model, family.tensors(model))
        settings |= found.settings
        tensors, shared = {**tensors, **found.tensors}, found.shared
        stored_vocab = found.stored_vocab
    further = range(layers, layers + (hf.get("num_nextn_predict_layers") or 1))
    left_out = (pattern.format(layers=k) for pattern in family.left_out for k in further)
    left_out = tuple(dict.fromkeys(left_out))
    return HuggingFaceModel(
        directory, settings, tensors, family.ignored, left_out, adapters, shared, stored_vocab
    )


def _find_family(directory: pathlib.Path, kind: Any, whole: Mapping[str, Any]) -> Family:
    """The family of a model_type; a line says where the folder names code of its own.

    Args:
      whole: config.json.

    Raises:
      ValueError: there is none, or its weights are quantized.
    """
    if not isinstance(kind, str) or kind not in FAMILIES:
        own = (
            " (its auto_map names code of its own, which is not run)" if "auto_map" in whole else ""
        )
        raise ValueError(
            f"{directory / 'config.json'}: model_type {kind!r} is not supported{own}; it can be "
            f"{', '.join(sorted({*FAMILIES, *DEFAULTS}))}"
        )
    for name in ("config.json", "tokenizer_config.json"):
        if (directory / name).is_file() and "auto_map" in _read_json(directory / name):
            log.warning(
                f"note: {directory / name} names code of its own (auto_map), which is not run: the "
                f"model is jaxscale's {FAMILIES[kind].name}, and the tokenizer that of its file"
            )
    if "quantization_config" in whole:
        raise ValueError(f"{directory / 'config.json'}: quantized weights are not supported")
    return FAMILIES[kind]


def _with_end(name: str, old: str, new: str) -> str:
    return name.removesuffix(old) + new if name.endswith(old) else name


def parameters_of(
    config: ModelConfig,
    axes: Any,
    shapes: Any,
    *,
    shared: bool = False,
    stored_vocab: int | None = None,
) -> tuple[ParameterTensors, ...]:
    """The tensors of each parameter of a model, with its adapters.

    Args:
      shared: as `adapter_rules`.
      stored_vocab: tokens that the tensors of tables have; None is the model's.
    """
    size = stored_vocab or config.vocab_size
    stored = dataclasses.replace(config, vocab_size=size, lora_tokens="")
    rules = find_family(config.family).tensors(stored)
    leaves = jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes)
    names = [leaf_name(path) for path, _ in leaves]
    rules += tuple(adapter_rules(rules, names, config, shared=shared))
    return parameter_tensors(rules, axes, shapes, size)


def write_model(
    directory: pathlib.Path,
    config: ModelConfig,
    axes: Any,
    params: Any,
    *,
    dtype: str,
    beside: pathlib.Path,
    seq_len: int = 0,
    end_of_text: int | None = None,
    ends: Sequence[int] = (),
    decoder_start: int | None = None,
    padding: int | None = None,
    mask: int | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> int:
    """Writes a folder that transformers loads; it has its name only once it is complete.

    Args:
      params: in canonical form.
      dtype: of the tensors: float32, bfloat16 or float16; some are in float32 always.
      beside: a run's folder, whose tokenizer goes along.
      seq_len: of the sequences that it was trained on; 0 if it was not.
      end_of_text: the id of that token, where the weights do not come from a model that says it.
      ends: of the tokenizer, other ids that end what is generated, such as a turn.
      decoder_start: likewise, of an encoder-decoder.
      padding: likewise, where the tokenizer has such a token.
      mask: likewise.
      max_file_bytes: of each file of tensors.

    Returns:
      The number of tensors.

    Raises:
      ValueError: the folder exists, the family has no such form, or values are too large.
    """
    family = find_family(config.family)
    config, params = family.hf_form(config, params)
    hf = family.to_hf(with_context(config, seq_len))
    unfinished = _unfinished(directory)
    parameters = parameters_of(config, axes, params)
    stored = write_params(unfinished, parameters, params, dtype, max_file_bytes)
    if padding is None and not (config.causal and not config.num_encoder_layers):
        # transformers cannot do without: ESM counts positions by it, T5 its labels. A decoder can,
        # and would not train the embedding of this id.
        padding = end_of_text
    ids = {"bos_token_id": None, "eos_token_id": end_of_text, "pad_token_id": padding}
    if config.num_encoder_layers:
        ids["decoder_start_token_id"] = decoder_start
    written = {**hf, **ids, **_special_ids(beside), "torch_dtype": dtype}
    written["eos_token_id"] = _with_ends(written["eos_token_id"], ends)
    (unfinished / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    copy_tokenizer(beside, unfinished)
    generation = unfinished / GENERATION
    if ends and generation.is_file():  # where it is, transformers does not ask config.json
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
    beside: pathlib.Path | None = None,
) -> int:
    """Writes the adapters of a model as PEFT loads them; the folder has its name only once it is
    complete.

    Args:
      params: in canonical form, with those of the model; as `with_token_rows` returns them.
      dtype: as `write_model`.
      base: the Hugging Face folder of the model that they are for, if that is known.
      beside: a run's folder, whose tokenizer goes along where it may have new tokens.

    Returns:
      The number of tensors.

    Raises:
      ValueError: the folder exists, the family has no such form, or values are too large.
    """
    parameters = parameters_of(config, axes, params)
    adapters = [one for one in parameters if is_adapter(one.name)]
    of_adapters = [name for one in adapters for name in one.tensors]
    of_model = {name for one in parameters for name in one.tensors}.difference(of_adapters)
    rules = find_family(config.family).tensors(config)
    peft = adapter_config(config, rules, of_model, of_adapters, base and str(base))
    unfinished = _unfinished(directory)
    metadata = fused_metadata(config, rules)
    write_params(unfinished, adapters, params, dtype, sys.maxsize, metadata)
    (unfinished / SINGLE).rename(unfinished / PEFT_TENSORS)
    (unfinished / PEFT_CONFIG).write_text(json.dumps(peft, indent=2) + "\n")
    if beside and config.trained_tokens:
        copy_tokenizer(beside, unfinished)
    unfinished.rename(directory)
    return len(of_adapters)


def _unfinished(directory: pathlib.Path) -> pathlib.Path:
    """A new folder for the files of another, until it is complete.

    Raises:
      ValueError: the other exists.
    """
    if directory.exists():
        raise ValueError(f"--output {directory} exists; name a new folder")
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def copy_special_ids(directory: pathlib.Path, workdir: pathlib.Path) -> None:
    """Copies the files that have the ids of a model's special tokens into a run's folder:
    generation_config.json, and config.json under another name. They belong to the weights, whatever
    the tokenizer of the run is; files that the run has are left.

    Args:
      directory: a Hugging Face model's folder, or a run's.
    """
    config = "config.json" if is_hugging_face(directory) else HF_CONFIG
    for name, copy in ((config, HF_CONFIG), (GENERATION, GENERATION)):
        if (directory / name).is_file() and not (workdir / copy).exists():
            shutil.copyfile(directory / name, workdir / copy)


def _special_ids(workdir: pathlib.Path) -> dict[str, Any]:
    """The ids of special tokens in the config.json of the model that a run comes from."""
    if not (workdir / HF_CONFIG).is_file():
        return {}
    hf = _read_json(workdir / HF_CONFIG)
    return {name: value for name, value in hf.items() if name.endswith("_token_id")}


def _with_ends(eos: int | list[int] | None, ends: Sequence[int]) -> int | list[int] | None:
    """The `eos_token_id` with ids that the model before did not end with: without that of a turn,
    `generate` of transformers would go on after it."""
    known = eos if isinstance(eos, list) else [] if eos is None else [eos]
    further = [end for end in ends if end not in known]
    if not further:
        return eos
    return [*known, *further] if known else further


def name_tokenizer_class(directory: pathlib.Path, hf: Mapping[str, Any]) -> None:
    """Says that the tokenizer's file is to be read as it is. Where tokenizer_config.json names no
    class, transformers takes that of the model's type, which may split texts otherwise (Qwen's
    every digit), take ids of its own for the pieces of a SentencePiece model (Gemma's), end texts
    (T5's), or find no token of its own and fail (Gemma's, BERT's). What only transformers 5 reads
    is written as 4 and 5 do: its name of that class, and its list of further special tokens.

    Args:
      hf: the config.json, with the ids of special tokens.
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
    """What tokenizer_config.json says of a tokenizer.json; a SentencePiece model says it itself."""
    if not file.is_file():
        return {}
    added = tokenizers.Tokenizer.from_file(str(file)).get_added_tokens_decoder()
    # An ordinary token that is named would become a special one.
    special = {i: token.content for i, token in added.items() if token.special}
    ids = {f"{name}_token": hf.get(f"{name}_token_id") for name in ("bos", "eos", "pad", "mask")}
    first = {name: one[0] if isinstance(one, list) and one else one for name, one in ids.items()}
    return {name: special[i] for name, i in first.items() if type(i) is int and i in special}


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path.parent} is not a folder; download a model of Hugging Face first: hf download "
            "NAME --local-dir DIR"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} holds no model: no {path.name}")
    values = load_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a mapping of names to values")
    return values
