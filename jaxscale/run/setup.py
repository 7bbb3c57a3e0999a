"""What the commands share: opening a run's engine, text and parameters, and evaluation."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import math
import pathlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale import config as configs
from jaxscale import run_folder
from jaxscale.batch import ShardedBatch
from jaxscale.choices import check_count, check_kind
from jaxscale.config import Config
from jaxscale.data.dataset import Dataset, Examples, open_validation
from jaxscale.data.loader import batches
from jaxscale.data.mixture import open_examples
from jaxscale.data.tokens.corpus import open_corpus
from jaxscale.data.tokens.fit import without_unread
from jaxscale.data.tokens.tokenizer import Tokenizer, from_file, load_tokenizer, save_tokenizer
from jaxscale.distributed import processes
from jaxscale.formatting import gigabytes
from jaxscale.hardware import (
    GPU_MEMORY_FRACTION,
    GPU_MEMORY_VARIABLES,
    find_chip,
    gpu_memory_fraction,
    host_memory_bytes,
)
from jaxscale.hugging_face.model_folder import copy_special_ids, is_hugging_face
from jaxscale.layout import AUTO, Layout, resolve_sizes
from jaxscale.model_config import ModelConfig
from jaxscale.run.both_tiers import bring, bring_newest
from jaxscale.sharding.mesh import make_mesh
from jaxscale.storage.description import check_metadata
from jaxscale.storage.tiers import CHECKPOINTS, local_steps
from jaxscale.training.checkpoint import Checkpoints
from jaxscale.training.engine import ENGINE_ADVICE, Engine, check_params, make_engine

EXAMPLES_ADVICE = (
    "pass `train`, `heldout` or one of `validation` of what jaxscale.open_text returns "
    "(`heldout` is None where nothing is held out)"
)

log = logging.getLogger("jaxscale")


@dataclass(frozen=True)
class Text:
    """A run's tokenizer, its two splits, and its validation sets by name; `heldout` is None when
    nothing is held out."""

    tokenizer: Tokenizer
    train: Examples
    heldout: Examples | None
    validation: Mapping[str, Examples] = field(default_factory=dict)
    # Of tokens on disk, under way.
    verification: tuple[concurrent.futures.Future, ...] = field(default=(), repr=False)

    def check_tokens(self) -> None:
        """Call it from time to time.

        Raises:
          ValueError: a file of tokens was found to have changed since it was written.
        """
        for outcome in self.verification:
            if outcome.done():
                outcome.result()

    @property
    def evaluations(self) -> dict[str, Examples]:
        """What the model is evaluated on, by name; the held-out text has none."""
        return ({"": self.heldout} if self.heldout else {}) | dict(self.validation)


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss; `tokens` counted, standing for `num_bytes` bytes of text."""

    loss: float  # nats per token; NaN where no token counts
    tokens: int
    num_bytes: float

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite above a loss of 709, where floats end."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """The loss of the same text in bits over its bytes: comparable between tokenizers."""
        if not self.num_bytes:
            return math.nan
        return self.loss * self.tokens / math.log(2) / self.num_bytes

    def record(self, name: str = "") -> dict[str, float]:
        """Its numbers by the names that metrics.jsonl has: `eval_loss`, or `eval_loss/NAME` of a
        validation set."""
        values = {
            "eval_loss": self.loss,
            "eval_perplexity": self.perplexity,
            "eval_bits_per_byte": self.bits_per_byte,
            "eval_tokens": self.tokens,
            "eval_bytes": round(self.num_bytes),
        }
        return {f"{key}/{name}" if name else key: value for key, value in values.items()}


def open_engine(
    config: Config, workdir: pathlib.Path | None = None, **own: Any
) -> tuple[Config, Engine]:
    """The config with its layout resolved, and the engine.

    Args:
      config, workdir: of `resolve_layout`.
      own: `model`, `optimizer` and `rules` of `make_engine`.

    Raises:
      ValueError: as `make_engine`.
    """
    check_kind("config", config, Config, configs.CONFIG_ADVICE)
    config = resolve_layout(config, workdir)
    return config, make_engine(config, make_mesh(config.layout), **own)


def resolve_layout(config: Config, workdir: pathlib.Path | None = None) -> Config:
    """The config with a layout for the devices at hand: chosen by the planner where it is "auto",
    and without sizes of -1.

    Args:
      workdir: of a run that may have started; one with layout = "auto" keeps its first choice.
    """
    config = planned(config, workdir)
    layout = _sized(config.layout)
    config = dataclasses.replace(config, layout=layout)
    return _with_remat(config, workdir) if layout.remat == AUTO else config


def _sized(layout: Layout) -> Layout:
    """`resolve_sizes` for the devices at hand; CPUs can be as many as a layout needs."""
    try:
        return resolve_sizes(layout, jax.device_count())
    except ValueError as error:
        if layout.auto or jax.default_backend() != "cpu" or jax.process_count() > 1:
            raise
        raise ValueError(
            f"{error}; or start with JAX_NUM_CPU_DEVICES={layout.least_devices} in the environment"
        ) from None


def check_host_room(config: Config) -> None:
    """Refuses a run on CPUs that is plainly larger than the memory of this host, before arrays of
    its shapes are even described: the host would kill it without a word.

    Raises:
      ValueError: names the settings.
    """
    if jax.default_backend() != "cpu" or not isinstance(config.model, ModelConfig):
        return
    # Imported here as in `planned`.
    from jaxscale.planner.memory.at_rest import whole_state_bytes  # noqa: PLC0415

    limit, processes_here = host_memory_bytes(), jax.process_count()
    state = whole_state_bytes(config)
    # Tokens, positions, segments and weights.
    batch = config.data.tokens_per_step * 4 * jnp.dtype(jnp.int32).itemsize
    for name, needs, settings in (
        ("parameters and optimizer state", state, "model.num_layers or model.d_model"),
        ("a batch", batch, "data.global_batch_size or data.seq_len"),
    ):
        if needs / processes_here > limit:
            raise ValueError(
                f"{name} of the run need {gigabytes(needs)}, and this host has "
                f"{gigabytes(limit)} of memory: lower {settings}, or train on more hosts"
            )


def check_memory(engine: Engine) -> None:
    """Refuses, before anything is compiled, a step that is predicted not to fit the memory of these
    devices, where their memory is known; of a model without formulas, a state that does not fit.

    Raises:
      ValueError: with the number of micro-batches that fits.
    """
    # Imported here as in `planned`.
    from jaxscale.planner.memory.room import check_room  # noqa: PLC0415
    from jaxscale.planner.search.space import MEMORY_FRACTION, fraction_here  # noqa: PLC0415
    from jaxscale.run.layout_report import state_bytes  # noqa: PLC0415

    device = engine.mesh.devices.flat[0]
    back_end = device.platform
    if back_end == "cpu":
        limit = host_memory_bytes() / jax.local_device_count()
        name = "this host's memory, which its devices share"
    else:
        chip = find_chip(device.device_kind)
        if not chip or back_end not in MEMORY_FRACTION:
            return
        limit, name = chip.memory_bytes * fraction_here(back_end), chip.name
        if back_end == "gpu" and (taken := gpu_memory_fraction()) < GPU_MEMORY_FRACTION:
            name += (
                f" (of which JAX takes {taken:.0%}: {GPU_MEMORY_VARIABLES[0]} in the environment)"
            )
    if (needs := state_bytes(engine)) > limit:
        raise ValueError(
            f"parameters and optimizer state alone need {gigabytes(needs)} on each device, and "
            f"a program may have {gigabytes(limit)} of {name}: raise layout.fsdp with "
            "layout.zero_stage = 3, layout.tensor or layout.pipeline"
        )
    check_room(engine.config, back_end, limit, name)


def planned(config: Config, workdir: pathlib.Path | None = None) -> Config:
    """The config with the layout that the planner chooses, where layout is "auto"."""
    if not config.layout.auto:
        return config
    if not config.model.has_formulas:
        raise ValueError(
            "layout = 'auto' plans with formulas, and there are none for "
            f"{config.model.without_formulas}; set the layout"
        )
    # Imported here: twenty modules that most runs do not need.
    from jaxscale.planner.auto_layout import choose_layout  # noqa: PLC0415
    from jaxscale.planner.report.text_report import layout_text  # noqa: PLC0415

    if layout := _layout_begun(config, workdir):
        log.info(f"layout = 'auto': {layout_text(layout)}, as when the run started")
        return dataclasses.replace(config, layout=layout)
    device = jax.devices()[0]
    plan = choose_layout(config, device.device_kind, device.platform, jax.device_count())
    log.info(
        f"layout = 'auto' chose {layout_text(plan.layout)}: predicted {plan.step_seconds:.4g} s "
        f"per step and {gigabytes(plan.memory_bytes)} of "
        f"{gigabytes(plan.limit_bytes)} per device"
    )
    return plan.config


def _with_remat(config: Config, workdir: pathlib.Path | None) -> Config:
    """The config with the remat policy that the planner chooses, or the one that a run in this
    folder began with, on the same layout."""
    # Imported here as in `planned`.
    from jaxscale.planner.auto_layout import choose_remat, devices_here, memory_here  # noqa: PLC0415

    begun = _layout_begun(config, workdir)
    if begun and dataclasses.replace(begun, remat=AUTO) == config.layout:
        log.info(f"layout.remat = 'auto': {begun.remat}, as when the run started")
        return dataclasses.replace(config, layout=begun)
    device = jax.devices()[0]
    cluster = devices_here(device.device_kind, device.platform, jax.device_count())
    config, line = choose_remat(config, cluster, memory_here(cluster))
    log.info(line)
    return config


def _layout_begun(config: Config, workdir: pathlib.Path | None) -> Layout | None:
    """The layout in the config.json of a run that resumes, or None for a new one. The file is only
    read: code from outside the package is imported where the present config names it, too.

    Raises:
      ValueError: the file is not the config of a run.
    """
    if workdir is None or not (workdir / "config.json").is_file():
        return None
    sections, now = configs.read_sections(workdir / "config.json"), configs.to_dict(config)
    names = (("model", "family"), ("layout", "schedule"))
    same = all(sections.get(part, {}).get(key) == now[part].get(key) for part, key in names)
    return configs.from_dict(sections, trust_foreign=same).layout


def for_evaluation(config: Config) -> Config:
    """The config for a command that only evaluates. Where the batch of training does not split over
    the devices at hand, each evaluates about as many sequences at a time as a micro-batch has."""
    layout = _sized(config.layout)
    batch, shards = config.data.global_batch_size, layout.batch_shards
    if layout.pipeline > 1 or batch % (shards * layout.microbatches) == 0:
        return config
    each = max(1, round(batch / layout.microbatches / shards))
    log.info(f"evaluating {each * shards} sequences at a time")
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, global_batch_size=each * shards),
        layout=dataclasses.replace(layout, microbatches=1, overlap_experts=False),
    )


def for_sampling(config: Config) -> Config:
    """The config for a command that only samples: it has no batches, no schedule and its own
    attention, so the run's settings for those need not fit the devices at hand.

    The ranks of a pipeline become ranks of fsdp where d_model divides, else of data.
    """
    layout = _sized(config.layout)
    if layout.pipeline > 1:
        ranks = layout.tensor_rows * layout.context * layout.fsdp * layout.pipeline
        axis = "data" if config.model.d_model % ranks else "fsdp"
        size = getattr(layout, axis) * layout.pipeline
        log.info(
            f"samples are drawn without a pipeline: using layout.{axis} = {size} in place of "
            f"layout.pipeline = {layout.pipeline}"
        )
        without = {"pipeline": 1, "remat": "none", "zero_stage": 3, axis: size}
        layout = dataclasses.replace(layout, **without)
    length = 2 * layout.context * layout.tensor
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, attention="auto"),
        data=dataclasses.replace(
            config.data,
            global_batch_size=layout.batch_shards,
            seq_len=length,
            target_len=length if config.data.target_len else 0,
        ),
        layout=dataclasses.replace(layout, microbatches=1, overlap_experts=False),
    )


def open_tokenizer(config: Config, workdir: pathlib.Path) -> Tokenizer:
    """The tokenizer of a run that has started, without its text.

    Raises:
      FileNotFoundError: the tokenizer trained for this run is missing from its folder.
      ValueError: the tokenizer cannot be used with this model; names the setting.
    """
    name, path = config.data.tokenizer, workdir / "tokenizer.json"
    if name.startswith("bpe:") and not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: the byte pairs of data.tokenizer = {name!r} that the run was "
            "trained with; restore the file"
        )
    tokenizer = _kept(config, workdir) or load_tokenizer(name, directory=workdir, keep=True)
    return _fitting(tokenizer, config)


def open_text(config: Config, workdir: str | pathlib.Path) -> Text:
    """Opens the text that `config.data` names; tokenises it the first time.

    Raises:
      ValueError: the data cannot be used with this model; names the setting.
    """
    check_kind("config", config, Config, configs.CONFIG_ADVICE)
    data, workdir = config.data, pathlib.Path(workdir)
    if getattr(config.model, "num_encoder_layers", 0) and not data.target_len:
        raise ValueError(
            f"model.family = {config.model.family!r} has an encoder, which reads data.seq_len = "
            f"{data.seq_len} tokens, and a decoder; set data.target_len, the tokens that it "
            f"writes, and data.objective to {' or '.join(configs.PAIRED_OBJECTIVES)}"
        )
    tokenizer = _kept(config, workdir) or load_tokenizer(
        data.tokenizer,
        data.source,
        workdir,
        heldout=data.heldout,
        seed=data.seed,
        # A run with weights needs the tokenizer that they were trained with, and the other
        # processes that of the first, which has just saved it.
        keep=bool(local_steps(workdir / CHECKPOINTS)) or not processes.first_of_all(),
    )
    tokenizer = _fitting(tokenizer, config)
    if data.tokenizer.startswith("bpe:"):
        save_tokenizer(tokenizer, workdir)
    corpus = open_corpus(data.source, tokenizer, workdir / "tokens")
    share = jax.process_index(), jax.process_count()
    verification = [corpus.verify(*share)]
    size = config.model.vocab_size
    train = open_examples(data, tokenizer, corpus, split="train", vocab_size=size)
    heldout = None
    if data.heldout or (config.run.eval_every and not data.validation):
        heldout = open_examples(data, tokenizer, corpus, split="heldout", vocab_size=size)
    validation = open_validation_sets(config, workdir, tokenizer)
    verification += [one.stream.corpus.verify(*share) for one in validation.values()]
    return Text(tokenizer, train, heldout, validation, tuple(verification))


def open_validation_sets(
    config: Config, workdir: pathlib.Path, tokenizer: Tokenizer
) -> dict[str, Dataset]:
    """The sets of `data.validation` by name, without the text of training.

    Raises:
      ValueError: as `open_text`.
    """
    return {
        source.name: open_validation(
            config.data,
            source,
            tokenizer,
            workdir / "validation" / source.name,
            vocab_size=config.model.vocab_size,
        )
        for source in config.data.validation
    }


def keep_tokenizer(config: Config, tokenizer: Tokenizer, workdir: pathlib.Path) -> None:
    """Writes the tokenizer of a new run into its folder, with the special tokens of the model that
    it starts from, so that the folder can be moved, and exported to Hugging Face's format."""
    if not tokenizer.file:
        return
    save_tokenizer(tokenizer, workdir)
    origin = getattr(config.model, "init_from", "")
    if origin and is_hugging_face(folder := run_folder.folder_of(origin)):
        copy_special_ids(folder, workdir)


def _kept(config: Config, workdir: pathlib.Path) -> Tokenizer | None:
    """The tokenizer that a run has in its folder, if its name is that of a file."""
    kept = run_folder.kept_tokenizer(config.data.tokenizer, workdir)
    return from_file(str(kept), config.data.tokenizer) if kept else None


def _fitting(tokenizer: Tokenizer, config: Config) -> Tokenizer:
    tokenizer = without_unread(tokenizer, config.model.vocab_size)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {config.model.vocab_size} is smaller than the "
            f"{tokenizer.vocab_size} tokens of data.tokenizer = {config.data.tokenizer!r}; set "
            f"model.vocab_size = {tokenizer.vocab_size}"
        )
    dropped = getattr(config.model, "dropped_token", -1)
    if config.data.objective == "masked" and dropped not in (-1, tokenizer.mask):
        raise ValueError(
            f"model.dropped_token = {dropped} is not the mask of data.tokenizer = "
            f"{config.data.tokenizer!r}, which is {tokenizer.mask}; set model.dropped_token = "
            f"{-1 if tokenizer.mask is None else tokenizer.mask}"
        )
    return tokenizer


def restore_params(
    engine: Engine,
    workdir: pathlib.Path,
    tokenizer: Tokenizer | None = None,
    wanted_step: int | None = None,
) -> tuple[int, Any, dict[str, Any]]:
    """A checkpoint's step, its parameters on this engine's mesh in canonical form, and its
    metadata. It is not deleted meanwhile by a run that goes on.

    Args:
      tokenizer: is compared with the one that the checkpoint was trained with.
      wanted_step: None is the newest checkpoint.

    Raises:
      FileNotFoundError: the run has no checkpoint yet.
      ValueError: there is no such checkpoint, it holds other parameters, or cannot be used.
    """
    checkpoints = Checkpoints(workdir / CHECKPOINTS)
    try:
        if wanted_step is None:
            bring_newest(checkpoints)
        else:
            bring(checkpoints, wanted_step)
        with held_checkpoint(checkpoints, wanted_step) as step:
            if step is None:
                raise FileNotFoundError(
                    f"--workdir {workdir} holds no checkpoint yet; the command that trains it "
                    "writes one every run.checkpoint_every steps, and at the end"
                )
            metadata = metadata_of(checkpoints, step)
            if tokenizer:
                check_tokenizer_of(metadata, tokenizer, f"checkpoint {step} in {workdir}")
            wanted = {"params": engine.placement.canonical.params}
            params = checkpoints.restore(step, wanted, part=True)["params"]
            return step, params, metadata
    finally:
        checkpoints.close()


def metadata_of(checkpoints: Checkpoints, step: int) -> dict[str, Any]:
    """What a run added to the description of its checkpoint.

    Raises:
      ValueError: it is not that of a run, or the checkpoint cannot be used.
    """
    metadata = checkpoints.metadata(step)
    try:
        check_metadata(metadata)
    except ValueError as error:
        place = checkpoints.directory / str(step)
        raise ValueError(f"{place} is not a checkpoint of a run: {error}") from error
    return metadata


@contextlib.contextmanager
def held_checkpoint(
    checkpoints: Checkpoints, wanted_step: int | None = None
) -> Generator[int | None]:
    """The step of a checkpoint, the newest one by default, or None; it is not deleted inside the
    context."""
    while True:
        steps = checkpoints.steps()
        if wanted_step is not None and wanted_step not in steps:
            raise ValueError(
                f"--step {wanted_step}: {checkpoints.directory} holds no checkpoint {wanted_step}; "
                f"it holds {', '.join(map(str, steps)) or 'none'}"
            )
        step = checkpoints.latest() if wanted_step is None else wanted_step
        step = processes.from_first("checkpoint", step)
        with checkpoints.held(step or 0) as there:
            gone = step is not None and not there
            if not any(processes.all_reports("checkpoint", gone)):
                yield step
                processes.all_reports("checkpoint read", None)
                return


def check_tokenizer_of(metadata: Mapping[str, Any], tokenizer: Tokenizer, what: str) -> None:
    """Refuses another tokenizer than that of a checkpoint, whose ids mean other text.

    Raises:
      ValueError: they differ.
    """
    trained = metadata["data"].get("tokenizer", tokenizer.fingerprint)  # older ones do not say
    if trained != tokenizer.fingerprint:
        raise ValueError(
            f"{what} was trained with another tokenizer than {tokenizer.name!r} is now: put the "
            "file back as it was"
        )


def device_batches(
    engine: Engine,
    dataset: Examples,
    global_batch_size: int,
    *,
    start_step: int = 0,
    workers: int = 0,
) -> Generator[ShardedBatch]:
    """Batches for `Engine.step`; each process loads the rows that its devices hold.

    Raises:
      ValueError: a batch that does not divide over the layout, or an argument of another kind.
    """
    check_kind("engine", engine, Engine, ENGINE_ADVICE)
    check_kind("dataset", dataset, Examples, EXAMPLES_ADVICE)
    check_count("start_step", start_step, 0)
    check_count("workers", workers, 0)
    rows = engine.local_rows(global_batch_size)
    return _sharded_batches(engine, dataset, global_batch_size, start_step, rows, workers)


def _sharded_batches(
    engine: Engine,
    dataset: Examples,
    global_batch_size: int,
    start_step: int,
    rows: tuple[int, ...],
    workers: int,
) -> Generator[ShardedBatch]:
    for batch in batches(
        dataset,
        global_batch_size=global_batch_size,
        start_step=start_step,
        rows=rows,
        workers=workers,
    ):
        yield engine.shard(batch, global_batch_size=global_batch_size)


def evaluate_loss(
    engine: Engine,
    params: Any,
    heldout: Examples,
    global_batch_size: int,
    max_batches: int | None = None,
    stops: Callable[[], Any] = lambda: False,
) -> Evaluation:
    """The loss on held-out text: the first `max_batches` batches of it, or all.

    Every call sees the same examples in the same order, whatever the layout.

    Args:
      stops: asked after each batch; the evaluation ends early when it is true.
      params: of the engine's state, or in canonical form on any devices, as `fit`, checkpoints and
        `from_pretrained` give them.

    Raises:
      ValueError: an argument of another kind, or below 1; params of another engine's pipeline.
    """
    check_params(engine, params)
    check_kind("heldout", heldout, Examples, EXAMPLES_ADVICE)
    if max_batches is not None:
        check_count("max_batches", max_batches, 1)
    params = engine.placement.part("params").from_canonical(params)
    sums, token_bytes = np.zeros(3), jnp.asarray(heldout.token_bytes, jnp.float32)
    with contextlib.closing(device_batches(engine, heldout, global_batch_size)) as stream:
        for batch in itertools.islice(stream, max_batches):
            out = jax.device_get(engine.evaluate(params, batch, token_bytes))
            sums += np.array(out, np.float64)
            if stops():
                break
    nll, tokens, num_bytes = sums.tolist()
    return Evaluation(nll / tokens if tokens else math.nan, int(tokens), num_bytes)
