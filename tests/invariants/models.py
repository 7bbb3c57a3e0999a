"""One of each kind of model, and short runs of it in float64, for the proofs over layouts."""

import functools
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxscale.batch import Batch
from jaxscale.config import Config, from_dict
from jaxscale.models.protocol import stored_weights
from jaxscale.ops.storage.quantised_storage import pack_weights, whole_shapes
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import Engine, make_engine
from jaxscale.training.step import TrainState
from tests.invariants import matrix
from tests.invariants.matrix import MODEL_BATCH, MODEL_LAYERS
from tests.models import experts, two_stacks

SEQ_LEN, STEPS, VOCABULARY = 16, 3, 64
FLOAT64 = {"compute_dtype": "float64", "param_dtype": "float64"}
SIZES = {"d_model": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "d_ff": 48}
OWN_MODEL = pathlib.Path(__file__).parents[2] / "docs" / "my_model.py"

Layout = dict[str, Any]


def import_own_model() -> str:
    """The model of docs/own_model.md, as a family."""
    if OWN_MODEL.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(OWN_MODEL.stem, OWN_MODEL)
        assert spec
        assert spec.loader
        sys.modules[OWN_MODEL.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return "my_model:MyModel"


class Kind(NamedTuple):
    """A model, and what `make_engine` needs beside its settings."""

    settings: dict
    own: Callable[[], dict[str, Any]] = dict
    target_len: int = 0
    objective: str = "causal"
    axes: Sequence[dict] = matrix.model_axes()  # meshes that `tools/matrix.py` runs
    every_mesh: bool = False  # each of them, not only every pair of axes
    optimizer: str = "adamw"
    sparsity: float = 0.0  # reached at the second update


T5 = {"family": "t5", "num_layers": 2, "num_encoder_layers": 2, "d_model": 16, "num_heads": 4}
T5 |= {"head_dim": 8, "d_ff": 32, "relative_buckets": 8, "relative_max_distance": 12}
MASKED = SIZES | {"num_layers": 4, "num_kv_heads": 4}

KINDS = {
    "two stacks": Kind(
        # One reader more than two stages share, and one writer more than whole periods.
        {
            "family": "tests.models.two_stacks:make",
            **two_stacks.SETTINGS,
            "readers": 5,
            "writers": 9,
        },
        lambda: {"rules": {"distances": ()}},
    ),
    "local and global layers": Kind(
        {
            "family": "gemma3",
            "num_layers": 9,  # a period for each of four stages, and one layer more
            "layer_pattern": "LG",
            "sliding_window": 3,
            "local_rope_theta": 100.0,
            "dropout": 0.2,
            **SIZES,
        },
        sparsity=0.75,
    ),
    "custom block and loss": Kind(
        {"family": import_own_model(), "num_layers": 4, **SIZES},
        lambda: {"optimizer": optax.lamb(1e-3)},
    ),
    "adapters": Kind(
        {
            **{"family": "llama", "num_layers": 4, "tied_embeddings": True, **SIZES},
            **{"lora_rank": 4, "lora_tokens": "7,40-42"},
        },
        optimizer="muon",
    ),
    "adapters of experts": Kind(
        {
            "family": "tests.models.experts:make",
            **SIZES,
            **experts.EVERYTHING,
            **experts.LATENT_ATTENTION,
            "lora_rank": 4,
            "lora_targets": ("q_down,q_plain,q_turned,kv_down,k_turned,k_plain,v,out,up,gate,down"),
        },
        axes=(),
    ),
    "adapters and a capacity": Kind(
        {
            "family": "tests.models.experts:make",
            **SIZES,
            **experts.PROTOTYPES,
            "lora_rank": 4,
            "lora_targets": "q,up,gate,down",
        },
        axes=(),
    ),
    "quantised base": Kind(
        {
            **{"family": "llama", "num_layers": 2, "d_model": 128, "num_heads": 2},
            **{"num_kv_heads": 2, "head_dim": 64, "d_ff": 128},
            **{"lora_rank": 4, "lora_targets": "q,up", "base_dtype": "nf4"},
        },
        axes=(),
    ),
    "quantised experts": Kind(
        {
            **{"family": "mixtral", "num_layers": 2, "num_experts": 4, "d_model": 128},
            **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "d_ff": 64},
            **{"lora_rank": 4, "lora_targets": "k,down"},
            **{"base_dtype": "mxfp4", "base_targets": "q,out,up,gate,down"},
        },
        axes=(),
    ),
    "side network": Kind(
        {"family": "llama", "num_layers": 4, "tied_embeddings": True, "side_width": 4, **SIZES}
    ),
    "side network of experts": Kind(
        {
            "family": "tests.models.experts:make",
            **SIZES,
            **experts.EVERYTHING,
            **experts.LATENT_ATTENTION,
            "side_width": 4,
        },
        axes=(),
    ),
    "prompts": Kind({"family": "llama", "num_layers": 4, "prompt_tokens": 3, **SIZES}),
    "shared layers": Kind(
        {
            **{"family": "gemma3", "num_layers": 12, "share_layers": 2, "dropout": 0.2},
            **{"layer_pattern": "LG", "sliding_window": 3, **SIZES},
        }
    ),
    "encoder and decoder": Kind(T5, target_len=8, objective="span_corruption"),
    "experts": Kind(
        {
            "family": "tests.models.experts:make",
            **SIZES,
            **experts.EVERYTHING,
            **experts.LATENT_ATTENTION,
            "dense_layers": 0,  # two stacks are as many as the fewest stages of `tools/matrix.py`
            "prediction_depth": 1,
        },
        axes=matrix.model_axes("expert"),
        sparsity=0.5,
    ),
    "experts on every mesh": Kind(
        {
            "family": "tests.models.experts:make",
            **SIZES,
            **experts.EVERYTHING,
            "num_layers": MODEL_LAYERS,
            "dense_layers": 0,
            "num_heads": 8,
            "num_kv_heads": 8,
        },
        axes=matrix.every_mesh("pipeline", "data", "fsdp", "expert", "tensor"),
        every_mesh=True,
    ),
    "expert choice": Kind(
        {
            "family": "tests.models.experts:make",
            **SIZES,
            **experts.EXPERT_CHOICE,
            "router": "balanced",
            "prediction_depth": 2,
        },
        objective="causal_across_documents",
    ),
    "prototypes": Kind(
        {
            "family": "tests.models.experts:make",
            **SIZES,
            **experts.PROTOTYPES,
            "expert_pattern": "DE",
        }
    ),
    "segments": Kind(
        {
            "family": "tests.models.experts:make",
            **SIZES,
            **experts.EVERYTHING,
            **experts.LATENT_ATTENTION,
            "balance_weight": 0.0,
            "num_layers": 7,
            "dense_layers": 2,
            "dropout": 0.2,
        },
        axes=(),
    ),
    "bert": Kind(MASKED | {"family": "bert", "max_seq_len": SEQ_LEN}, objective="masked"),
    "esm": Kind(
        MASKED | {"family": "esm", "dropped_token": 3, "embedding_norm": True}, objective="masked"
    ),
    # Of these only the first tier has layouts: those above have all that they have.
    "plain decoder": Kind({"family": "llama", "num_layers": 8, **SIZES}, axes=()),
    "plain experts": Kind(
        {"family": "mixtral", "num_layers": 2, "num_experts": 4, **SIZES}, axes=()
    ),
}


def make_config(kind: Kind, **layout) -> Config:
    return from_dict(
        {
            "model": {**kind.settings, **FLOAT64, "vocab_size": VOCABULARY},
            "data": {
                "global_batch_size": MODEL_BATCH,
                "seq_len": SEQ_LEN,
                "target_len": kind.target_len,
                "objective": kind.objective,
            },
            "optimizer": {
                "name": kind.optimizer,
                "sparsity": kind.sparsity,
                "sparsity_steps": 2,
                "accumulation_dtype": "float64",
                "moment_dtype": "float64",
                "second_moment_dtype": "float64",
            },
            "layout": {"data": 1, **layout},
        }
    )


def make_batches(
    extras: dict,
    seq_len: int = SEQ_LEN,
    *,
    masked: bool = False,
    one_document: bool = False,
    prompt: int = 0,
) -> Iterator[Batch]:
    """Two documents a row, of which an encoder also has padding, or one with padding; of masked
    texts a seventh of the tokens is the one that ESM-2 drops. `prompt` virtual tokens begin each
    document.
    """
    random = np.random.default_rng(0)

    def draw(length: int) -> np.ndarray:
        return random.integers(0, VOCABULARY, (MODEL_BATCH, length), np.int32)

    for _ in range(STEPS):
        tokens = draw(seq_len)
        targets = np.roll(tokens, -1)
        if masked:
            dropped = random.random(tokens.shape) < 1 / 7
            tokens, targets = np.where(dropped, np.int32(3), tokens), tokens
        place = np.broadcast_to(np.arange(seq_len, dtype=np.int32), tokens.shape)
        weights = (random.random(tokens.shape) < 0.8).astype(np.float32)
        more = {name: draw(length) for name, (length, _) in extras.items()}
        if "encoder_segments" in more:
            more["encoder_segments"] = np.sort(more["encoder_segments"] % 3)[:, ::-1].copy()
        cut = seq_len // 2 + 1
        segments, positions = 1 + place // cut, place % cut
        if one_document:
            lengths = random.integers(cut, seq_len + 1, (MODEL_BATCH, 1))
            segments, positions = (place < lengths).astype(np.int32), place
            weights *= segments
        virtual = positions < prompt
        tokens = np.where(virtual, np.int32(VOCABULARY) + positions, tokens)
        weights *= ~virtual
        yield Batch(tokens, targets, segments, positions, weights, more or ())


def batches(engine: Engine) -> list[Batch]:
    data = engine.config.data
    extras = dict(engine.model.extras(SEQ_LEN))
    masked, one_document = data.objective == "masked", data.one_document
    prompt = engine.config.model.prompt_tokens
    return list(
        make_batches(
            extras, data.output_len, masked=masked, one_document=one_document, prompt=prompt
        )
    )


def open_engine(name: str, layout: Layout) -> Engine:
    """The engine of a kind on as many of the eight devices as the layout needs."""
    config = make_config(KINDS[name], **layout)
    mesh = make_mesh(config.layout, jax.devices()[: config.layout.num_devices])
    return make_engine(config, mesh, **KINDS[name].own())


@functools.cache
def one_device(name: str) -> Engine:
    return open_engine(name, {})


BEGUN = ("two stacks", "local and global layers", "encoder and decoder")
"""Kinds that begin as a run does; the others, which are decoders too, begin with parameters that
NumPy draws, which costs no program."""


@functools.cache
def first_state(name: str) -> TrainState:
    """Of one device, as NumPy arrays: making it on every layout would cost a program each."""
    engine = one_device(name)
    if name in BEGUN:
        return jax.device_get(engine.init(jax.random.key(0)))
    rng = np.random.default_rng(0)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return rng.normal("scale" in str(path[-1]), 0.1, leaf.shape)

    state = engine.abstract_state
    stored = stored_weights(engine.model)
    whole = whole_shapes(state.params, stored, "float64")
    params = jax.tree_util.tree_map_with_path(draw, whole)
    params = jax.device_get(pack_weights(params, stored)) if stored else params
    if KINDS[name].settings["family"] == "tests.models.experts:make":
        params = jax.device_get(experts.uneven(jax.tree.map(jnp.asarray, params)))
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    return state._replace(params=params)


def on_ranks(engine: Engine, state: TrainState) -> TrainState:
    """A state in canonical form, as the engine takes it."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, engine.placement.canonical)
    return engine.placement.from_canonical(jax.device_put(state, shardings))


def advance(engine: Engine, state: TrainState, begin: int = 0, end: int = STEPS):
    """The state after the steps from `begin` to `end`, and their metrics."""
    found = []
    for batch in batches(engine)[begin:end]:
        state, metrics = engine.step(state, engine.shard(batch))
        found.append(jax.device_get(metrics))
    return state, found


def canonical(engine: Engine, state: TrainState) -> TrainState:
    return jax.device_get(engine.placement.to_canonical(state))


@functools.cache
def on_one_device(name: str):
    """Metrics of the steps, and the last state."""
    engine = one_device(name)
    state, found = advance(engine, on_ranks(engine, first_state(name)))
    return found, jax.device_get(state)


@functools.cache
def sums_of_one_device(name: str):
    """An evaluation's sums, after the steps."""
    return evaluate(one_device(name), on_one_device(name)[1])


def evaluate(engine: Engine, state: TrainState):
    batch, num_bytes = engine.shard(batches(engine)[0]), np.ones(VOCABULARY, np.float32)
    return jax.device_get(tuple(engine.evaluate(state.params, batch, num_bytes)))


def relative_error(got: Any, wanted: Any) -> float:
    """The largest difference of two trees, relative to its entry and 1e-2: parameters near zero are
    compared to what some updates move."""

    def error(a, b) -> float:
        assert np.shape(a) == np.shape(b)
        return np.max(np.abs(a - b) / (np.abs(b) + 1e-2))

    return max(jax.tree.leaves(jax.tree.map(error, got, wanted)))


def check_model_layout(name: str, layout: Layout) -> dict[str, float]:
    """Some steps against one device; returns the relative errors."""
    engine, (expected, last) = open_engine(name, layout), on_one_device(name)
    state, found = advance(engine, on_ranks(engine, first_state(name)))
    errors = {
        "loss": max(abs(a.loss / b.loss - 1) for a, b in zip(found, expected)),
        "gradient norm": max(abs(a.grad_norm / b.grad_norm - 1) for a, b in zip(found, expected)),
        "parameters": relative_error(canonical(engine, state).params, last.params),
    }
    assert max(errors.values()) < 1e-10, errors
    return errors
