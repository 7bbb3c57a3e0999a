"""What the tests of layouts share: a model with awkward shapes, batches, and runs of five steps."""

import functools

import jax
import numpy as np

from jaxscale.batch import Batch
from jaxscale.config import Config, from_dict
from jaxscale.mesh import make_mesh
from jaxscale.ops.context import balanced_order
from jaxscale.step import Engine, TrainState, make_engine

SEQ_LEN, BATCH, VOCABULARY, STEPS = 24, 16, 257, 5
LEARNING_RATE = 1e-2

LLAMA = {
    "num_layers": 3, "d_model": 64, "num_heads": 16, "num_kv_heads": 8, "head_dim": 4, "d_ff": 96,
    "vocab_size": VOCABULARY, "qk_norm": True, "z_loss": 1e-3, "sliding_window": 11,
}  # fmt: skip
GPT = {
    "num_layers": 2, "d_model": 64, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8, "d_ff": 128,
    "vocab_size": VOCABULARY, "family": "gpt", "tied_embeddings": True, "max_seq_len": SEQ_LEN,
    "logit_soft_cap": 5.0, "qk_norm": True,
}  # fmt: skip


def make_config(model: dict, layout: dict, dtype: str = "float64", **optimizer) -> Config:
    """Clipping is on, and tight enough to act at every step."""
    return from_dict(
        {
            "model": {**model, "compute_dtype": dtype, "param_dtype": "float64"},
            "data": {"global_batch_size": BATCH, "seq_len": SEQ_LEN},
            "optimizer": {
                "clip_norm": 0.5, "moment_dtype": "float64", "accumulation_dtype": "float64",
                "learning_rate": LEARNING_RATE, **optimizer,
            },
            "layout": {"data": 1, **layout},
            "run": {"steps": STEPS},
        }
    )  # fmt: skip


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
                tokens[:, :-1], tokens[:, 1:], np.where(real, document + 1, 0).astype(np.int32),
                (place - begin).astype(np.int32), real.astype(np.float32),
            )
        )  # fmt: skip
    return made


def open_engine(config: Config) -> Engine:
    """The engine on as many of the eight devices as the layout needs."""
    devices = jax.devices()[: config.layout.num_devices]
    return make_engine(config, make_mesh(config.layout, devices))


def run(engine: Engine, state: TrainState | None = None, first: int = 0):
    """Five steps from the seed: losses, gradient norms, and the parameters as NumPy arrays."""
    state = engine.init(jax.random.key(0)) if state is None else state
    losses, norms = [], []
    order = balanced_order(SEQ_LEN, engine.layout.context)
    for batch in batches()[first:]:
        dealt = Batch(*(field[:, order] for field in batch))
        state, metrics = engine.step(state, jax.device_put(dealt, engine.batch_sharding))
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
    return np.array(losses), np.array(norms), jax.tree.map(np.asarray, state.params)


def relative_error(got, wanted) -> float:
    """The largest difference in a tree of parameters, relative to the largest entry of its array,
    or to what one update can move (the learning rate) where that is more: a key bias has no
    gradient but rounding errors."""
    errors = jax.tree.map(
        lambda a, b: np.max(np.abs(a - b)) / max(np.max(np.abs(b)), LEARNING_RATE), got, wanted
    )
    return max(jax.tree.leaves(errors))
