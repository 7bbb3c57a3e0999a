"""Initial weights: loads a Hugging Face model, a run, or LoRA adapters.

`open_weights` reads configs and headers only; values are read once their shardings are known.
"""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale import config as configs
from jaxscale.checkpoints.folder import named_arrays
from jaxscale.checkpoints.restore import restore
from jaxscale.checkpoints.tiers import Checkpoints
from jaxscale.config.model import ModelConfig, is_own_family
from jaxscale.config.model.adapters import ADAPTERS, KINDS
from jaxscale.config.model.lora import to_ranges
from jaxscale.config.model.rope_scaling import SCALING, USUAL_TURNS
from jaxscale.config.optimizer import OptimizerConfig
from jaxscale.data.tokens.tokenizer import Tokenizer
from jaxscale.hugging_face.model_folder import HuggingFaceModel, is_hugging_face, open_model
from jaxscale.models.adapters.lora import (
    only_adapters,
    with_adapters,
    with_token_rows,
    without_adapters,
)
from jaxscale.models.adapters.prompt import with_initial_prompt
from jaxscale.models.protocol import stored_weights
from jaxscale.ops.storage.quantised_storage import StoredWeights, quantise_donated, whole_shapes
from jaxscale.pipeline.layer_placement import LayerPlacement
from jaxscale.run_folder import TOKENIZERS, folder_of
from jaxscale.sharding.resolve import is_axes, leaf_name
from jaxscale.sharding.rules import Axes
from jaxscale.storage.local_tier import CHECKPOINTS, fetch_files, fetching
from jaxscale.training.engine import Engine
from jaxscale.training.optimizer import is_schedule
from jaxscale.training.step import TrainState

log = logging.getLogger("jaxscale")

MAY_DIFFER = (
    "init_from",
    "attention",
    "balance",
    "balance_rate",
    "balance_weight",
    "capacity_factor",
    "causal",
    "compute_dtype",
    "dropout",
    "matmul_dtype",
    "param_dtype",
    "prediction_weight",
    "rope_length",
    "router_jitter",
    "router_z_loss",
    "unshare_at",
    "unshare_clip",
    "z_loss",
)
"""Model settings that do not change the meaning of weights: kernels, types, and training."""

TUNING_RATE = 1e-4
"""Learning rates above this are for training from scratch, or for adapters."""

ROPE = ("rope_theta", "local_rope_theta", "rope_scaling", *SCALING)
"""RoPE settings, which may differ if the new run's sequences are longer than the weights' context:
context extension."""


@dataclasses.dataclass(frozen=True)
class RunWeights:
    """The parameters of a run's newest checkpoint."""

    directory: pathlib.Path
    config: ModelConfig
    context: int  # sequence length of the weights
    checkpoints: Checkpoints = dataclasses.field(repr=False)
    step: int
    optimizer: Mapping[str, Any]  # section of the run's config.json
    own_optimizer: bool | None = None  # whether it was given in Python; None: not recorded
    stop_ids: tuple[int, ...] = ()  # ids that end generation

    @property
    def dtype(self) -> str:
        """The type of the parameters."""
        return self.config.param_dtype

    def check(self, axes: Any, shapes: Any) -> None:
        """Does nothing: `read` compares names and shapes with the checkpoint."""

    def read(self, axes: Any, abstract: Any, stored: StoredWeights = MappingProxyType({})) -> Any:
        """The parameters in canonical form, with the types and shardings of `abstract`; its further
        rows of the vocabulary are zero.

        Args:
          stored: parameters to quantise, which `abstract` has whole.
        """
        there = self.checkpoints.arrays(self.step, "params")

        def saved(path: Any, names: Axes, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            like = there.get(leaf_name(path), jax.ShapeDtypeStruct(leaf.shape, self.dtype))
            shape = leaf.shape
            if len(like.shape) == len(shape):
                sizes = zip(names, like.shape, shape)
                shape = tuple(min(old, new) if n == "vocab" else new for n, old, new in sizes)
            return jax.ShapeDtypeStruct(shape, like.dtype, sharding=leaf.sharding)

        wanted = jax.tree_util.tree_map_with_path(saved, axes, abstract, is_leaf=is_axes)
        params = self.restore("params", wanted)
        return quantise_donated(jax.tree.map(_widened, params, abstract), stored)

    def restore(self, part: str, abstract: Any) -> Any:
        """A part of the state in canonical form: "params" or "opt_state".

        Raises:
          ValueError: names, shapes or types differ from `abstract`.
        """
        return restore(self.checkpoints, self.step, {part: abstract}, part=True)[part]


def _widened(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The array in another type, padded with zeros."""
    if x.shape == like.shape:
        return x.astype(like.dtype)
    widths = [(0, new - old) for old, new in zip(x.shape, like.shape)]
    pad = jax.jit(lambda x: jnp.pad(x, widths).astype(like.dtype), out_shardings=like.sharding)
    return pad(x)


Weights = HuggingFaceModel | RunWeights


def open_weights(
    directory: pathlib.Path, trusted_family: str = "", prediction_depth: int = 0
) -> Weights:
    """Opens a Hugging Face model's folder, or the newest checkpoint of a run.

    Args:
      trusted_family: a custom model that may be imported, such as that of the new run.
      prediction_depth: the number of MTP modules to read of a Hugging Face model.

    Raises:
      FileNotFoundError: the folder contains neither.
      ValueError: it cannot be used; with the reason.
    """
    with fetching(directory) as store:
        if store:
            fetch_files(store, directory)
    if is_hugging_face(directory):
        return open_model(directory, prediction_depth=prediction_depth)
    sections = configs.read_sections(directory / "config.json")
    # Data settings that the model is checked with: not causal, or with few positions.
    along = ("objective", "seq_len", "target_len")
    data = {key: value for key, value in sections.get("data", {}).items() if key in along}
    given = {"model": sections.get("model", {}), "data": data}
    family = given["model"].get("family", "")
    if is_own_family(family) and family != trusted_family:
        raise ValueError(
            f"{directory} has a model of code from outside the package, model.family = "
            f"{family!r}; only a run with the same model.family can start from it"
        )
    config = configs.from_dict(given)
    checkpoints = Checkpoints(directory / CHECKPOINTS)
    with checkpoints.reading() as step:
        if step is None:
            raise FileNotFoundError(f"{directory} is a run's folder without a checkpoint yet")
        metadata = checkpoints.metadata(step)
    context = max(config.data.seq_len, config.model.max_seq_len)
    return RunWeights(
        directory,
        config.model,
        context,
        checkpoints,
        step,
        sections.get("optimizer", {}),
        metadata.get("own_optimizer"),
        tuple(metadata["data"].get("stop_ids", ())),
    )


def may_differ(model: ModelConfig) -> set[str]:
    """`MAY_DIFFER` for this model, shipped or custom."""
    names = set[str](MAY_DIFFER)
    if model.experts_choose:
        names.remove("capacity_factor")  # the number of tokens that experts choose
    # Without a table of positions it is only the length of training texts.
    if isinstance(model, ModelConfig) and model.max_positions is None:
        names.add("max_seq_len")
    return names


def check_settings(
    model: ModelConfig, weights: Weights, why: str, seq_len: int, *, may_grow: bool = False
) -> None:
    """Refuses weights of a model with other settings; logs changed settings of `ROPE`, and the
    number of new tokens.

    Args:
      why: the setting that names the weights, for the message.
      seq_len: `data.seq_len` of the new run.
      may_grow: whether the vocabulary may be larger.

    Raises:
      ValueError: with a line for each setting that differs.
    """
    differ = _differences(model, weights)
    context, new = weights.context, num_new_tokens(model, weights)
    if may_grow and new:
        _check_trained(model, range(model.vocab_size - new, model.vocab_size), weights.directory)
        line = differ.pop("vocab_size")
        log.info(f"note: {line}: the rows of {new} new tokens start as the mean of the old rows")
    longer = seq_len > context
    refused = [line for name, line in differ.items() if not (longer and name in ROPE)]
    if not longer and not differ.keys().isdisjoint(ROPE):
        refused.append(f"(RoPE settings may differ if data.seq_len is above {context})")
    if weights.config.lora_rank and not model.lora_rank:
        refused.append(
            "(`python -m jaxscale.convert --to_hf` writes the model with its adapters merged)"
        )
    if refused:
        title = f"{why}: the weights in {weights.directory} are of a model with other settings:"
        raise ValueError("\n  ".join([title, *refused]))
    if differ:
        log.info(
            f"note: {'; '.join(differ.values())}: RoPE settings may differ, since data.seq_len = "
            f"{seq_len} is above the weights' context of {context} tokens"
        )


def _differences(model: ModelConfig, weights: Weights) -> dict[str, str]:
    """Setting -> a line on its difference, for settings that change the meaning of weights."""
    ours, theirs = _as_used(model), _as_used(weights.config)
    none = "no such setting"
    free = may_differ(model) | set(ADAPTERS if adds_adapters(model, weights) else ())
    return {
        name: f"model.{name} = {ours.get(name, none)!r} here, {theirs.get(name, none)!r} there"
        for name in {**ours, **theirs}
        if name not in free and ours.get(name, none) != theirs.get(name, none)
    }


def _check_trained(model: ModelConfig, new: range, directory: pathlib.Path) -> None:
    """Refuses new tokens whose rows adapters would freeze at one initial mean.

    Raises:
      ValueError: names the setting that trains them.
    """
    left = sorted({*new} - {*model.trained_tokens}) if model.adapts else []
    if left and not model.lora_rank:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size} is {len(new)} more than the weights in "
            f"{directory} have, and these adapters freeze the rows of new tokens; set "
            f"model.vocab_size = {new.start}"
        )
    if left:
        raise ValueError(
            f"model.vocab_size = {model.vocab_size} is {len(new)} more than the weights in "
            f"{directory} have, and model.lora_rank = {model.lora_rank} freezes the rows of the "
            "new tokens at the mean of the old rows; to train them, set "
            f"model.lora_tokens = '{to_ranges(sorted({*left, *model.trained_tokens}))}'"
        )


def _as_used(model: ModelConfig) -> dict[str, Any]:
    """The settings of a model, with the default bounds of RoPE scaling filled in, which Hugging
    Face writes."""
    settings = dataclasses.asdict(model)
    if model.rope_scaling in USUAL_TURNS:
        settings |= zip(("rope_low_turns", "rope_high_turns"), model.rope_turns)
    return settings


def adds_adapters(model: ModelConfig, weights: Weights) -> bool:
    """Whether a model adds adapters to weights without adapters."""
    return model.adapts and not weights.config.adapts


def num_new_tokens(model: ModelConfig, weights: Weights) -> int:
    """The number of tokens that a run's vocabulary has more than its weights; 0 for a custom model,
    whose arrays may differ."""
    if is_own_family(model.family):
        return 0
    return max(0, model.vocab_size - weights.config.vocab_size)


def open_initial(engine: Engine, workdir: pathlib.Path) -> Weights | None:
    """The initial weights of a new run: of `model.init_from`, or of the checkpoint 0 that `convert`
    wrote to its folder; None: random.

    Raises:
      ValueError: they do not fit the run.
    """
    config, model = engine.config, engine.config.model
    name = model.init_from
    if (workdir / CHECKPOINTS / "0").is_dir():
        if name:
            raise ValueError(
                f"model.init_from = {name!r}, and {workdir} already has initial weights "
                "(checkpoint 0); leave model.init_from empty, or start a new --workdir"
            )
        why, folder = f"--workdir {workdir}", workdir
    elif name:
        why, folder = f"model.init_from = {name!r}", folder_of(name)
    else:
        if model.adapts:
            name = next(name for name in KINDS if getattr(model, name))
            log.warning(
                f"warning: model.{name} = {getattr(model, name)} freezes random weights: set "
                "model.init_from to a model's folder, or to a run"
            )
        return None
    weights = open_weights(folder, model.family, model.prediction_depth)
    check_settings(model, weights, why, config.data.seq_len, may_grow=True)
    axes, placement = _placement(engine, weights)
    weights.check(
        axes, whole_shapes(placement.canonical, _quantised(engine, weights), model.param_dtype)
    )
    if not engine.own_optimizer:
        _warn_of_rate(config.optimizer, model.adapts, why)
    if adds_adapters(model, weights):
        _say_type(model, weights)
    if config.optimizer.keep_state:
        _check_state(engine, weights, why)
    return weights


def _warn_of_rate(optimizer: OptimizerConfig, adapted: bool, why: str) -> None:
    frozen = any(group.frozen for group in optimizer.groups)
    if optimizer.learning_rate > TUNING_RATE and not (adapted or frozen):
        log.warning(
            f"warning: optimizer.learning_rate = {optimizer.learning_rate} is high for all weights "
            f"of a trained model ({why}), which may forget its training; fine-tuning takes 1e-5 to "
            "5e-5: set optimizer.learning_rate, such as 2e-5"
        )
    if base := optimizer.mup_base_width:
        log.info(
            f"note: optimizer.mup_base_width = {base} scales learning rates, and no initial "
            f"values: those are of {why}"
        )


def _say_type(model: ModelConfig, weights: Weights) -> None:
    """Logs the type in which weights frozen by adapters are stored."""
    wide, stored = jnp.dtype(weights.dtype), jnp.dtype(model.param_dtype)
    exact = jnp.promote_types(wide, stored) == stored
    if model.base_dtype:
        names = model.base_targets or "all matrices"
        log.info(f"note: of the frozen layers' weights {names} are stored in {model.base_dtype}")
    log.info(
        f"note: the frozen weights are stored in {model.param_dtype}, "
        + ("exactly as in" if exact else f"rounded from the {weights.dtype} of")
        + f" {weights.directory}"
        + ("" if exact else f"; for exact weights set model.param_dtype={weights.dtype}")
    )


def _check_state(engine: Engine, weights: Weights, why: str) -> None:
    """Refuses weights without an optimizer's state, or with the state of another optimizer or other
    parameters.

    Raises:
      ValueError: names the settings that differ.
    """
    if not isinstance(weights, RunWeights) or not (
        saved := weights.checkpoints.arrays(weights.step, "opt_state")
    ):
        raise ValueError(
            f"optimizer.keep_state = True, and {why} is a model without an optimizer's state; set "
            "optimizer.keep_state = False, or start from a trained run"
        )
    model, ours, theirs = engine.config.model, engine.config.optimizer, weights.optimizer
    if num_new_tokens(model, weights):
        raise ValueError(
            f"optimizer.keep_state = True, and model.vocab_size = {model.vocab_size} is "
            f"above the {weights.config.vocab_size} of {why}: new tokens have no moments; set "
            "optimizer.keep_state = False"
        )
    own = engine.own_optimizer
    differ = [
        f"optimizer.{name} = {getattr(ours, name)!r} here, {theirs[name]!r} there"
        for name in ("name", "moment_dtype", "second_moment_dtype") * (not own)
        if theirs.get(name, getattr(ours, name)) != getattr(ours, name)
    ]
    if weights.own_optimizer not in (None, own):
        differ = ["an optimizer given in Python " + ("here" if own else "there") + " only"]
    if differ:
        raise ValueError(
            f"optimizer.keep_state = True, and {why} has the state of another optimizer: "
            f"{'; '.join(differ)}; set the same, or optimizer.keep_state = False"
        )
    differ = saved.keys() ^ named_arrays(engine.placement.canonical.opt_state).keys()
    if differ and own:
        raise ValueError(
            f"optimizer.keep_state = True, and {why} has the state of another optimizer, such as "
            f"{min(differ)}; pass the same optimizer=, or set optimizer.keep_state = False"
        )
    if differ:
        raise ValueError(
            f"optimizer.keep_state = True, and {why} has moments of other parameters: it was "
            f"trained with optimizer.groups = {theirs.get('groups', ())}; freeze the same "
            "parameters, or set optimizer.keep_state = False"
        )


def check_tokenizer(tokenizer: Tokenizer, weights: Weights) -> None:
    """Logs a line if a run's tokenizer differs from the one in the folder of its weights."""
    files = [weights.directory / name for name in TOKENIZERS]
    theirs = next((file.read_bytes() for file in files if file.is_file()), b"")
    if theirs != tokenizer.file:
        log.info(
            f"note: data.tokenizer = {tokenizer.name!r} is not the tokenizer in "
            f"{weights.directory}: ids may stand for other text than in the weights' training"
        )


def initial_state(engine: Engine, weights: Weights, key: jax.Array) -> TrainState:
    """The state of a new run with these parameters, at step 0. The optimizer is new, except for
    moments with `optimizer.keep_state`; the learning-rate schedule always restarts."""
    axes, placement = _placement(engine, weights)
    stored = _quantised(engine, weights)
    abstract = whole_shapes(placement.canonical, stored, engine.config.model.param_dtype)
    params = weights.read(axes, abstract, stored)
    if new := num_new_tokens(engine.config.model, weights):
        params = with_new_tokens(params, axes, weights.config.vocab_size, new)
    params = placement.from_canonical(params, donate=True)
    if adds_adapters(engine.config.model, weights):
        params = with_adapters(params, _draw_adapters(engine, key))
        params = with_token_rows(engine.config.model, params)
        params = with_initial_prompt(engine.config.model, params)
    log.info(f"parameters read from {weights.directory}")
    state = engine.begin(params)
    if engine.model.tables and isinstance(weights, RunWeights):
        kept = weights.restore("tables", engine.placement.canonical.tables)
        state = state._replace(tables=kept)
    if engine.config.optimizer.keep_state:
        assert isinstance(weights, RunWeights), "`open_initial` refuses others"
        kept = weights.restore("opt_state", engine.placement.canonical.opt_state)
        kept = engine.placement.part("opt_state").from_canonical(kept, donate=True)
        kept = jax.tree.map(
            lambda new, old: new if is_schedule(new) else old,
            state.opt_state,
            kept,
            is_leaf=is_schedule,
        )
        state = state._replace(opt_state=kept)
        log.info(f"the optimizer's moments are from step {weights.step} of that run")
    return state


def read_weights(weights: Weights, axes: Any, abstract: Any) -> Any:
    """`weights.read`, with the rows of tokens in a PEFT folder in place of the model's rows."""
    params = weights.read(axes, abstract)
    if isinstance(weights, RunWeights) or not weights.config.trained_tokens:
        return params
    return with_adapters(with_token_rows(weights.config, params), only_adapters(params))


def _draw_adapters(engine: Engine, key: jax.Array) -> dict[str, Any]:
    """New adapters, as `engine.init` draws them; XLA removes all other parameters as dead code."""
    abstract = only_adapters(engine.abstract_state.params)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(lambda key: only_adapters(engine.draw(key)), out_shardings=shardings)(key)


def _quantised(engine: Engine, weights: Weights) -> StoredWeights:
    """The parameters to quantise as they are read: not those of a run that has quantised ones."""
    return {} if weights.config.base_dtype else stored_weights(engine.model)


def _placement(engine: Engine, weights: Weights) -> tuple[Any, LayerPlacement]:
    """The logical axes and the placement of the parameters that are read."""
    axes, placement = engine.model.axes, engine.placement.part("params")
    if not adds_adapters(engine.config.model, weights):
        return axes, placement
    parts = {name: without_adapters(getattr(placement, name)) for name in ("axes", "abstract")}
    return without_adapters(axes), dataclasses.replace(placement, **parts)


def with_new_tokens(params: Any, axes: Any, known: int, new: int) -> Any:
    """Parameters whose rows of new tokens are the mean of the known rows, so that initially no new
    token is likelier than these (Hewitt, "Initializing new word embeddings", 2021)."""

    def fill(x: jax.Array, dim: int) -> jax.Array:
        rows = jax.lax.slice_in_dim(x, 0, known, axis=dim)
        mean = jnp.mean(rows, dim, dtype=jnp.promote_types(x.dtype, jnp.float32), keepdims=True)
        row = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
        return jnp.where((known <= row) & (row < known + new), mean.astype(x.dtype), x)

    def filled(names: Axes, x: jax.Array) -> jax.Array:
        if "vocab" not in names:
            return x
        one = functools.partial(fill, dim=names.index("vocab"))
        return jax.jit(one, donate_argnums=0, out_shardings=x.sharding)(x)

    return jax.tree.map(filled, axes, params, is_leaf=is_axes)
