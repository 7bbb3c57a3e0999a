"""What the tests of layouts share: a model with awkward shapes, batches, and runs of five steps."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxscale.batch import Batch
from jaxscale.compiled import collectives, hlo
from jaxscale.config import Config, from_dict
from jaxscale.config.layout import Layout
from jaxscale.config.optimizer import UNUSED
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import Engine, make_engine
from jaxscale.training.step import TrainState
from tools.zero_traffic import step_traffic

SEQ_LEN, BATCH, VOCABULARY, STEPS = 32, 16, 257, 5
LEARNING_RATE = 1e-2
CLIP_NORM = 5e-4
"""Tight enough to act at every step, and to leave Adam nothing to magnify: it divides rounding
errors, 1e-16 of the largest gradient, by its epsilon of 1e-8 where an element of the gradient
happens to be no larger."""
LEAST_GRADIENT = 2e-6 * CLIP_NORM
"""Smaller arrays of gradients are compared relative to this."""

LLAMA = {
    "num_layers": 4,
    "d_model": 64,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 4,
    "d_ff": 96,
    "vocab_size": VOCABULARY,
    "qk_norm": True,
    "z_loss": 1e-3,
    "sliding_window": 11,
}
GPT = {
    "num_layers": 2,
    "d_model": 64,
    "num_heads": 8,
    "num_kv_heads": 2,  # fewer than the most ranks of tensor
    "head_dim": 8,
    "d_ff": 128,
    "vocab_size": VOCABULARY,
    "family": "gpt",
    "tied_embeddings": True,
    "max_seq_len": SEQ_LEN,
    "logit_soft_cap": 5.0,
    "qk_norm": True,
}

EXPERTS = {
    "family": "mixtral",
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 48,
    "num_experts": 4,
    "vocab_size": VOCABULARY,
}


def make_config(model: dict, layout: dict, dtype: str = "float64", **optimizer) -> Config:
    """In `dtype`, and sums and parameters in float64."""
    unused = UNUSED.get(optimizer.get("name", ""), ())
    moments = {"moment_dtype", "second_moment_dtype"}.difference(unused)
    return from_dict(
        {
            "model": {**model, "compute_dtype": dtype, "param_dtype": "float64"},
            "data": {"global_batch_size": BATCH, "seq_len": SEQ_LEN},
            "optimizer": {
                "clip_norm": CLIP_NORM,
                **dict.fromkeys(moments, "float64"),
                "accumulation_dtype": "float64",
                "learning_rate": LEARNING_RATE,
                **optimizer,
            },
            "layout": {"data": 1, **layout},
            "run": {"steps": STEPS},
        }
    )


@functools.cache
def batches() -> list[Batch]:
    """Rows of several documents each, with padding of very different lengths between rows."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(STEPS):
        tokens = rng.integers(0, VOCABULARY, (BATCH, SEQ_LEN + 1)).astype(np.int32)
        lengths = rng.integers(1, SEQ_LEN + 1, (BATCH, 1))
        cuts = np.sort(rng.integers(1, SEQ_LEN, (BATCH, 2)), axis=1)
        place = np.broadcast_to(np.arange(SEQ_LEN), (BATCH, SEQ_LEN))
        document = (place[..., None] >= cuts[:, None]).sum(-1)
        begin = np.where(document == 0, 0, np.take_along_axis(cuts, np.maximum(document - 1, 0), 1))
        real = place < lengths
        made.append(
            Batch(
                tokens[:, :-1],
                tokens[:, 1:],
                np.where(real, document + 1, 0).astype(np.int32),
                (place - begin).astype(np.int32),
                real.astype(np.float32),
            )
        )
    return made


def open_engine(config: Config) -> Engine:
    """The engine on as many of the eight devices as the layout needs."""
    devices = jax.devices()[: config.layout.num_devices]
    return make_engine(config, make_mesh(config.layout, devices))


class Results(NamedTuple):
    """Of five steps."""

    losses: np.ndarray
    norms: np.ndarray  # of gradients, before clipping
    params: Any
    gradients: Any  # their running means: first moments, of optimizers that have some


def run(engine: Engine, state: TrainState | None = None, first: int = 0, step=None) -> Results:
    """Five steps from the seed.

    Args:
      step: the engine's, compiled, where the caller has it.
    """
    state = one_devices_state(engine) if state is None else state
    losses, norms, step = [], [], step or engine.step
    for batch in batches()[first:]:
        state, metrics = step(state, engine.shard(batch))
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
    moments = [value for _, value in optax.tree.get_all_with_path(state.opt_state, "mu")]
    params, gradients = (jax.tree.map(np.asarray, tree) for tree in (state.params, moments))
    return Results(np.array(losses), np.array(norms), params, gradients)


@functools.cache
def initial_state(config: Config) -> TrainState:
    """Of one device, as NumPy arrays: making it on every layout would double the tests' time."""
    state = open_engine(config).init(jax.random.key(0))
    return jax.tree.map(np.asarray, state)


def one_devices_state(engine: Engine, **model) -> TrainState:
    """The initial state of one device, of a `model` with other settings, where the engine's step
    has it; in a pipeline layers lie otherwise."""
    config = dataclasses.replace(engine.config, layout=Layout(data=1))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, engine.abstract_state)
    return jax.device_put(initial_state(config), shardings)


def compile_step(engine: Engine, options: dict[str, Any] | None = None) -> Any:
    """The step of a test's batches, with the compiler's options."""
    lowered = engine.step.lower(engine.abstract_state, engine.abstract_batch)
    return lowered.compile(compiler_options=options)


def check_collectives(config: Config, compiled: Any) -> None:
    """Over data, fsdp and expert, and these with context, a step sends what theory says, to the
    array and to the byte. Over context alone attention sends, too, and the compiler sums gradients;
    over expert tokens travel to experts."""
    sent, expected = collections.Counter(), collections.Counter()
    program = hlo.parse_hlo(compiled.as_text())
    for one in collectives.collectives(program, config.layout.sizes):
        scalars = one.num_bytes <= 8 * one.arrays
        ours = set(one.axes) <= {"data", "fsdp", "expert", "context"} and one.axes != ("context",)
        if ours and not scalars and "all-to-all" not in one.kind:
            sent[one.kind, one.axes, "arrays"] += one.count * one.arrays
            sent[one.kind, one.axes, "bytes"] += one.count * one.num_bytes
    for one in step_traffic(config):
        if one.axes == ("context",):
            continue
        expected[one.kind, one.axes, "arrays"] += one.arrays
        expected[one.kind, one.axes, "bytes"] += one.num_bytes
    for what, count in sent.items():
        if what[0] != "all-reduce":
            assert count == expected.pop(what), what
    for (kind, axes, what), count in expected.items():
        # Sums of scalars may travel with ours: of losses, tokens, the gradient's norm.
        scalars = sent[kind, axes, "arrays"] - expected[kind, axes, "arrays"]
        assert kind == "all-reduce", what
        assert 0 <= scalars < 20
        assert 0 <= sent[kind, axes, what] - count <= 8 * scalars, what


def relative_error(got, wanted, least: float = LEARNING_RATE) -> float:
    """The largest difference in a tree of arrays, relative to the largest entry of its array, or
    to `least` where that is more. Parameters are compared to what one update can move: a key bias
    has no gradient but rounding errors."""
    errors = jax.tree.map(
        lambda a, b: np.max(np.abs(a - b)) / max(np.max(np.abs(b)), least), got, wanted
    )
    return max(jax.tree.leaves(errors))
