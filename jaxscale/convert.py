"""Conversion between Hugging Face models, PEFT adapters (LoRA) and a run's folder.

python -m jaxscale.convert --from_hf DIR [--from_peft ADAPTERS] --output RUN
python -m jaxscale.convert --to_hf --workdir RUN --output DIR
python -m jaxscale.convert --to_peft --workdir RUN --output DIR
"""

import argparse
import dataclasses
import json
import logging
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from etils import epy

from jaxscale import command_line, run_folder
from jaxscale import config as configs
from jaxscale.config.model import ModelConfig
from jaxscale.config.model.adapters import KINDS as ADAPTER_KINDS
from jaxscale.config.model.lora import OF_MLP
from jaxscale.config.model.settings import is_own_family
from jaxscale.distributed import processes
from jaxscale.distributed.initialize import num_devices
from jaxscale.formatting import human_bytes
from jaxscale.pipeline_schedules.shipped import is_foreign
from jaxscale.storage.local_tier import CHECKPOINTS, local_steps
from jaxscale.storage.object_store import is_remote

with epy.lazy_imports():  # they import JAX: a mistyped flag is refused before
    import jax

    from jaxscale.checkpoints import save
    from jaxscale.data.tokens import image_tokens, stop_ids
    from jaxscale.data.tokens import tokenizer as tokenizers
    from jaxscale.hugging_face import model_folder, peft_prompts
    from jaxscale.models import protocol, shared_layers
    from jaxscale.models.adapters import lora
    from jaxscale.ops.storage import quantised_storage
    from jaxscale.run import initial_weights
    from jaxscale.run.setup import layout, restore, text

log = logging.getLogger("jaxscale")

DTYPES = ("float32", "bfloat16", "float16")
MAX_FILE_GB = 5.0  # as in transformers


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the status of the process: 0."""
    options, overrides = command_line.parse(_parser(), sys.argv[1:] if argv is None else argv)
    with command_line.refusals():
        _check(options)
    command_line.log_to_stdout()
    processes.leave_absent_hardware_alone()
    with command_line.refusals():
        processes.take_gpu_memory()
        convert = _from_hugging_face if options.from_hf else _from_run
        result = convert(options, overrides)
    command_line.write_json(options.json, result)
    return 0


def _from_hugging_face(options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Writes config.json, the tokenizer and checkpoint 0 of a new run."""
    output, peft = options.output, options.from_peft
    model = model_folder.open_model(options.from_hf, adapters=peft)
    # The adapters' tokenizer, if any: it has the tokens that were added for them.
    beside = peft if peft and _tokenizers(peft) else model.directory
    files = _tokenizers(beside)
    # Without a tokenizer, this is where the run will look for one.
    own = str(output / (*files, *run_folder.TOKENIZERS)[0])
    config = _config_of(model, own, overrides, adapted=bool(peft))
    if depth := config.model.prediction_depth:
        model = model_folder.open_model(options.from_hf, prediction_depth=depth, adapters=peft)
    initial_weights.check_settings(config.model, model, "--config.model", config.data.seq_len)
    tokenizer = None
    if files or config.data.tokenizer != own:
        tokenizer = _fitting_tokenizer(config, beside)
    _, engine = layout.open_engine(config)
    params = initial_weights.read_weights(
        model, engine.model.axes, engine.placement.canonical.params
    )
    output.mkdir(parents=True, exist_ok=True)
    if tokenizer and not files:
        tokenizers.save_tokenizer(tokenizer, output)
    run_folder.copy_tokenizer(beside, output)
    model_folder.copy_special_ids(model.directory, output)
    host_gb = max(leaf.nbytes for leaf in jax.tree.leaves(params)) // 10**9 + 1
    _write_run(output, config, params, host_gb)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    log.info(
        f"{model.directory}: {len(model.tensors)} tensors, {num_params:,} parameters "
        f"(padding rows included), read with at most {human_bytes(model.largest_tensor_bytes)} in "
        f"host memory at a time, and written {host_gb} GB at a time\n"
        f"{_next_steps(output, model.config.causal)}"
    )
    if not tokenizer:
        log.warning(
            f"note: {model.directory} has no {' and no '.join(run_folder.TOKENIZERS)}: only the "
            f"weights are converted. To train or to generate, put one into {output}, or set "
            f"--config.data.tokenizer={'esm2' if model.config.family == 'esm' else 'FILE'}"
        )
    return {"tensors": len(model.tensors), "parameters": num_params}


def _config_of(
    model: "model_folder.HuggingFaceModel", tokenizer: str, overrides: list[str], *, adapted: bool
) -> configs.Config:
    """The config of the run.

    Raises:
      ValueError: it has adapters, and --from_peft is missing.
    """
    settings = dict(model.settings)
    if adapted and model.dtype == "float32":
        settings["param_dtype"] = model.dtype  # lossless, whatever a run may start from
    data = {"tokenizer": tokenizer, **_data_of(model.config)}
    config = configs.from_dict({"model": settings, "data": data}, overrides)
    for name in ADAPTER_KINDS:
        value = getattr(config.model, name)
        if value and (not adapted or value != settings.get(name)):
            raise ValueError(
                f"model.{name} = {value}: --from_hf reads the adapters of --from_peft DIR; for new "
                f"adapters convert without model.{name}, and train with --config.model.init_from "
                f"and --config.model.{name}"
            )
    return config


def _write_run(output: pathlib.Path, config: configs.Config, params: Any, host_gb: int) -> None:
    """Writes checkpoint 0, then config.json, which makes the folder a run."""
    checkpoints, settings = output / CHECKPOINTS, configs.to_dict(config)
    writer = save.CheckpointWriter(checkpoints, host_gb=host_gb)
    data = {"fingerprint": "", "next_example": 0}
    writer.save(0, {"params": params}, {"config": settings, "data": data})
    writer.close()
    if problem := writer.outcome():
        raise ValueError(problem)
    (output / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _data_of(model: ModelConfig) -> dict[str, Any]:
    """The data settings with which a converted model can be trained unchanged."""
    data: dict[str, Any] = {} if model.causal else {"objective": "masked"}
    if model.positions == "learned":
        data["seq_len"] = model.max_seq_len
    if model.num_encoder_layers:
        data |= {"objective": "span_corruption", "target_len": configs.DataConfig.seq_len}
    return data


def _tokenizers(directory: pathlib.Path) -> list[str]:
    return [name for name in run_folder.TOKENIZERS if (directory / name).is_file()]


def _fitting_tokenizer(config: configs.Config, directory: pathlib.Path) -> Any:
    """The tokenizer of a model whose vocabulary is fixed.

    Raises:
      ValueError: it does not fit the model, or cannot be used.
    """

    # With the largest vocabulary every tokenizer fits: no error advises to set vocab_size.
    largest = dataclasses.replace(config.model, vocab_size=2**31)
    tokenizer = text.open_tokenizer(dataclasses.replace(config, model=largest), directory)
    tokenizer = image_tokens.without_unread(tokenizer, config.model.vocab_size)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"data.tokenizer = {config.data.tokenizer!r} has {tokenizer.vocab_size} tokens, and "
            f"the model in {directory} only {config.model.vocab_size}; add the model's "
            "tokenizer.json to that folder, or set --config.data.tokenizer=FILE to a tokenizer of "
            f"at most {config.model.vocab_size} tokens"
        )
    return tokenizer


def _from_run(options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Writes a checkpoint of a run, the newest by default, in transformers' or PEFT's format."""
    workdir, output = options.workdir, options.output
    try:
        config = run_folder.load_config(workdir, overrides)
    except ValueError as error:
        _refuse_own_code(workdir, overrides, error)
        raise
    _check_can_write(config.model, workdir, peft=options.to_peft)
    base = _base_of_adapters(config.model, workdir) if options.to_peft else None
    run_folder.note_other_model(config.model, workdir)
    config = run_folder.fit_devices(config, num_devices(), overrides)
    _, engine = layout.open_engine(layout.for_sampling(config))
    if engine.model.tables:
        raise ValueError(
            f"{workdir} has tables, {', '.join(engine.model.tables)}, which have no form at "
            "Hugging Face"
        )
    tokenizer = None
    if _has_tokenizer(config.data.tokenizer, workdir):
        tokenizer = text.open_tokenizer(config, workdir)
    step, params, metadata = restore.restore_params(engine, workdir, tokenizer, options.step)
    stored = protocol.stored_weights(engine.model)
    if tokenizer:
        tokenizer = stop_ids.with_stop_ids(tokenizer, metadata["data"].get("stop_ids", ()))
    if options.to_peft:
        tensors = model_folder.write_adapters(
            output,
            config.model,
            engine.model.axes,
            lora.with_token_rows(
                config.model, quantised_storage.whole_shapes(params, stored, "float32")
            ),
            dtype=options.dtype or "float32",
            base=base,
            workdir=workdir,
        )
        log.info(_what_adapters_need(config.model, base))
    else:
        ids = {}
        if tokenizer:
            ids = {
                "end_of_text": tokenizer.boundary,
                "ends": tokenizer.ends,
                "decoder_start": tokenizer.decoder_start,
                "padding": tokenizer.pad,
                "mask": tokenizer.mask,
            }
        seq_len = config.data.seq_len if step else 0
        model = config.model
        if stored:
            params = quantised_storage.dequantise_donated(params, stored, model.param_dtype)
            log.info(f"the weights stored in {model.base_dtype} are written dequantised")
        if model.share_layers > 1:
            params, model = shared_layers.unshared_params(engine.model, params), model.unshared()
            log.info("each layer gets its own copy of the weights that it shares")
        tensors = _write_model(options, model, engine.model.axes, params, seq_len, ids)
    log.info(f"step {step} of {workdir} written to {output}: {tensors} tensors")
    return {"step": step, "tensors": tensors}


def _has_tokenizer(name: str, workdir: pathlib.Path) -> bool:
    """Whether a run has a tokenizer; a converted, untrained run may have none."""
    given = pathlib.Path(name)
    files = given, *(workdir / name for name in run_folder.TOKENIZERS)
    trained = local_steps(workdir / CHECKPOINTS) != [0]
    return trained or not given.suffix or any(file.is_file() for file in files)


def _write_model(
    options: argparse.Namespace,
    model: ModelConfig,
    axes: Any,
    params: Any,
    seq_len: int,
    ids: dict[str, Any],
) -> int:
    """Writes the model, its adapters merged; returns the number of tensors."""
    if model.lora_rank:
        params, axes = lora.merge_adapters(model, params), lora.without_adapters(axes)
        model = dataclasses.replace(
            model, lora_rank=0, lora_targets="", lora_tokens="", base_dtype="", base_targets=""
        )
        log.info("the adapters are merged into the weights (--to_peft writes adapters only)")
    return model_folder.write_model(
        options.output,
        model,
        axes,
        params,
        dtype=options.dtype or model.param_dtype,
        workdir=options.workdir,
        seq_len=seq_len,
        **ids,
        max_file_bytes=int((options.max_file_gb or MAX_FILE_GB) * 1e9),
    )


def _check_can_write(model: ModelConfig, workdir: pathlib.Path, *, peft: bool) -> None:
    """Refuses adapters without a form in the format.

    Raises:
      ValueError: with the reason, and what can be done with them.
    """
    if model.side_width:
        where = (
            "PEFT has no such adapter"
            if peft
            else "its layers have no place in transformers' model"
        )
        raise ValueError(
            f"model.side_width = {model.side_width} of {workdir}: a side network cannot be "
            f"converted, since {where}; generate, evaluate and jaxscale.from_pretrained use it"
        )
    targets = {*OF_MLP} & {*model.adapted_weights}
    other_mlps = model.dense_layers or model.shared_d_ff or "D" in model.expert_pattern
    if peft and model.num_experts and targets and other_mlps:
        raise ValueError(
            f"model.lora_targets = {model.lora_targets!r} of {workdir} adapts experts, and the "
            "MLPs next to them (dense layers, a shared expert), whose adapters PEFT does not load: "
            "it takes the names of these modules for the experts'; --to_hf writes the model with "
            "the adapters merged"
        )
    if model.prompt_tokens and not peft:
        raise ValueError(
            f"model.prompt_tokens = {model.prompt_tokens} of {workdir}: a prompt cannot be merged "
            "into a model's weights; --to_peft writes it for PEFT, without the model"
        )
    if model.prompt_tokens:
        peft_prompts.check_scale(model, f"--to_peft --workdir {workdir}")


def _base_of_adapters(model: ModelConfig, workdir: pathlib.Path) -> pathlib.Path | None:
    """The Hugging Face folder of the base model of a run's adapters, if known.

    Raises:
      ValueError: there are no adapters, or the run has also trained other parameters.
    """

    if not model.adapts:
        raise ValueError(
            f"{workdir} has no adapters (model.lora_rank = 0); --to_hf writes its model"
        )
    base = pathlib.Path(model.init_from)
    if not (base / "config.json").is_file() or not model_folder.is_hugging_face(base):
        return None
    new = initial_weights.num_new_tokens(model, model_folder.open_model(base))
    if {*range(model.vocab_size - new, model.vocab_size)} - {*model.trained_tokens}:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size} is {new} more than {base} has, and the rows of "
            "the new tokens are not trained with the adapters (model.lora_tokens); --to_hf writes "
            "the model with the adapters merged"
        )
    return base


def _what_adapters_need(model: ModelConfig, base: pathlib.Path | None) -> str:
    """A line on how PEFT loads the adapters of a run."""
    where = base or f"the model that the run started from (model.init_from = {model.init_from!r})"
    resized = (
        f" and resize_token_embeddings({model.vocab_size}) if it has fewer tokens"
        if model.trained_tokens
        else ""
    )
    merged = "" if model.prompt_tokens else "; --to_hf writes the model with the adapters merged"
    return (
        f"the adapters do not include the model's weights: PeftModel loads them with {where}"
        f"{resized}{merged}"
    )


def _refuse_own_code(workdir: pathlib.Path, overrides: list[str], error: ValueError) -> None:
    """Replaces the error of a run with a custom model or schedule, by a ValueError."""
    sections = configs.read_sections(workdir / "config.json")
    family = sections.get("model", {}).get("family")
    if isinstance(family, str) and is_own_family(family):
        raise ValueError(
            f"model.family = {family!r} of {workdir} is a custom model, which has no Hugging Face "
            "format; --to_hf can write models of the shipped families"
        ) from error
    schedule = sections.get("layout", {}).get("schedule")
    changed = any(override.startswith("layout.schedule=") for override in overrides)
    if isinstance(schedule, str) and is_foreign(schedule) and not changed:
        raise ValueError(
            f"layout.schedule = {schedule!r} of {workdir} is code from outside the package, not "
            "needed to convert: add --config.layout.schedule=1f1b"
        ) from error


def _check(options: argparse.Namespace) -> None:
    ways = (options.from_hf is not None, options.to_hf, options.to_peft)
    if sum(ways) != 1:
        raise ValueError("give --from_hf DIR, or --to_hf or --to_peft with --workdir RUN")
    if options.from_hf is None:
        if options.workdir is None:
            raise ValueError("--to_hf and --to_peft need --workdir RUN, the run to convert")
        if options.from_peft:
            raise ValueError("--from_peft needs --from_hf DIR, the base model of the adapters")
    if options.to_peft and options.max_file_gb is not None:
        raise ValueError("--max_file_gb is for --to_hf; PEFT reads adapters from one file")
    others = options.workdir, options.dtype, options.step, options.max_file_gb
    if options.from_hf and any(value is not None for value in others):
        raise ValueError(
            "--workdir, --step and --dtype are for --to_hf and --to_peft, --max_file_gb for "
            "--to_hf; --from_hf writes to --output, in the type of --config.model.param_dtype"
        )
    run_folder.check_empty(options.output)


def _model_folder(text: str) -> pathlib.Path:
    """The type of --from_hf and --from_peft.

    Raises:
      argparse.ArgumentTypeError: it is a URL.
    """
    if is_remote(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL; download it, and give the local folder")
    return pathlib.Path(text)


def _next_steps(output: pathlib.Path, causal: bool) -> str:
    generate = f'\n  python -m jaxscale.generate --workdir {output} --prompt "..."'
    return f"""
Next steps:{generate if causal else ""}
  python -m jaxscale.train --config {output}/config.json --workdir {output}_tuned \\
    --config.model.init_from={output} --config.optimizer.learning_rate=2e-5 \\
    --config.data.source=..."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.convert",
        description="Converts a Hugging Face model to a run's folder, a run to a Hugging Face "
        "model for transformers, or a run's low-rank adapters to a folder for PEFT.",
    )
    parser.add_argument(
        "--from_hf", metavar="DIR", type=_model_folder, help="the model's folder, to read"
    )
    parser.add_argument(
        "--from_peft",
        metavar="DIR",
        type=_model_folder,
        help="the folder of PEFT's low-rank adapters for the model of --from_hf, to read",
    )
    parser.add_argument("--to_hf", action="store_true", help="write a model's folder from a run")
    parser.add_argument(
        "--to_peft", action="store_true", help="write the low-rank adapters of a run, for PEFT"
    )
    parser.add_argument(
        "--workdir", metavar="RUN", type=run_folder.folder, help="the run, with --to_*"
    )
    run_folder.add_step_flag(parser)
    parser.add_argument(
        "--output", required=True, metavar="DIR", type=run_folder.new_folder, help="a new folder"
    )
    parser.add_argument(
        "--config",
        metavar=".SECTION.KEY=VALUE",
        type=run_folder.refuse_file,
        help="change a setting of the run's config, such as --config.layout.fsdp=8",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="type of the tensors written; default that of the parameters, float32 for adapters",
    )
    parser.add_argument(
        "--max_file_gb",
        metavar="GB",
        type=command_line.real(0, 1e6, above=True),
        help=f"largest size of a file of tensors written by --to_hf; default {MAX_FILE_GB:g}",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=command_line.output_file,
        help="also write the counts to FILE",
    )
    return parser


if __name__ == "__main__":
    command_line.run(main)
