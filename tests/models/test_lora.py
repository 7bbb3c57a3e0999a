"""Low-rank adapters of latent attention and of experts: merged they compute the same, and no
gradient of a frozen matrix is computed."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.compiled import hlo
from jaxscale.compiled.flops import computation_costs, instruction_flops
from jaxscale.config import from_dict
from jaxscale.config.model import ModelConfig
from jaxscale.models.adapters.lora import merge_adapters, without_adapters
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.run.pretrained import Pretrained
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from tests.models import experts

LATENT, MLP = "q_down,q_plain,q_turned,kv_down,k_turned,k_plain,v,out", "up,gate,down"
SIZES = {"d_model": 16, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "d_ff": 24}
SIZES |= {"vocab_size": 32, "family": "tests.models.experts:make"}
FLOAT64 = {"param_dtype": "float64", "compute_dtype": "float64"}


@pytest.mark.proof
@pytest.mark.parametrize(
    "settings",
    [
        {**experts.EVERYTHING, **experts.LATENT_ATTENTION, "lora_targets": f"{LATENT},{MLP}"},
        {**experts.PROTOTYPES, "lora_targets": f"q,{MLP}"},
    ],
    ids=["latent", "with biases"],
)
def test_a_merged_model_is_the_same_and_a_new_one_is_its_base(settings):
    config = ModelConfig(**SIZES | FLOAT64 | settings, lora_rank=3)
    base = dataclasses.replace(config, lora_rank=0, lora_targets="")
    model, plain = (Decoder(one, plain_kernels()) for one in (config, base))
    rng, tokens = np.random.default_rng(0), np.arange(14).reshape(2, 7)
    new = jax.jit(model.init)(jax.random.key(0))
    logits = Pretrained(base, without_adapters(new), plain)(tokens)
    np.testing.assert_allclose(Pretrained(config, new, model)(tokens), logits, atol=1e-12)
    params = jax.tree.map(lambda x: 0.3 * jnp.asarray(rng.normal(size=x.shape)), new)
    logits = Pretrained(config, params, model)(tokens)
    unadapted = Pretrained(base, without_adapters(params), plain)(tokens)
    assert np.abs(logits - unadapted).max() > 1e-2
    merged = merge_adapters(config, jax.tree.map(jnp.copy, params))
    np.testing.assert_allclose(Pretrained(base, merged, plain)(tokens), logits, atol=1e-10)


BATCH, SEQ_LEN, RANK, EXPERTS, HIDDEN, STREAM, RANKS = 8, 16, 2, 4, 48, 32, 2


@pytest.mark.proof
@pytest.mark.compiles
def test_an_adapter_of_experts_costs_its_own_matmuls():
    """The step's matmuls are those of a forward and a backward pass without weight gradients, and
    the adapters'. A capacity, so that XLA states the FLOPs of all rows. Ranks of data reduce the
    adapters' gradients alone."""
    sizes = {"num_layers": 1, "d_model": STREAM, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    routed = {"num_experts": EXPERTS, "experts_per_token": 2, "capacity_factor": 1.0}
    config = from_dict(
        {
            "model": {
                **{"family": "mixtral", "vocab_size": 128, "d_ff": HIDDEN, **sizes, **routed},
                **{"lora_rank": RANK, "lora_targets": MLP, "compute_dtype": "float32"},
                "attention": "reference",
            },
            "data": {"global_batch_size": BATCH, "seq_len": SEQ_LEN},
            "layout": {"data": RANKS, "remat": "none"},
        }
    )

    def matmul(rows: int, *sizes: int) -> float:
        return 2.0 * rows * math.prod(sizes)

    tokens = BATCH * SEQ_LEN // RANKS
    rows = 2 * tokens  # of all experts
    attention = matmul(tokens, STREAM, 4 * STREAM) + 2 * matmul(tokens, SEQ_LEN, STREAM)
    frozen = matmul(tokens, STREAM, EXPERTS) + 3 * matmul(rows, STREAM, HIDDEN)
    adapter = 3 * matmul(rows, RANK, STREAM + HIDDEN)
    head = matmul(tokens, STREAM, 128)
    # The first layer's backward pass ends at its experts: of their inputs' gradients down's alone.
    down = matmul(rows, STREAM, HIDDEN)
    wanted = attention + frozen + 2 * head + down
    wanted += 3 * adapter - 2 * matmul(rows, RANK, STREAM)
    with jax.enable_x64(False):  # XLA writes the trip counts of 32-bit counters
        engine = make_engine(config, make_mesh(config.layout, jax.devices()[:RANKS]))
        step = engine.step.lower(engine.abstract_state, engine.abstract_batch).compile()
        parsed = hlo.parse_hlo(step.as_text())
    found = computation_costs(parsed, instruction_flops)[parsed.entry]
    assert found == pytest.approx(wanted, rel=1e-3)
    every = itertools.chain(*parsed.computations.values())
    reduced = [one.shape for one in every if one.opcode.startswith("all-reduce")]
    sizes = [math.prod(dims) for shape in reduced for _, dims in hlo.arrays(shape)]
    adapters = [EXPERTS * RANK * size for size in (STREAM, HIDDEN)]
    # And the counts of choices by expert, and scalars.
    assert sorted(size for size in sizes if size > EXPERTS) == sorted(3 * adapters)
