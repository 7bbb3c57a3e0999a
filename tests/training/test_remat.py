"""What policies keep of attention, with the kernels whose results have names and with cuDNN's."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.config.remat_policy import parse_remat
from jaxscale.models.decoder import Decoder
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import layer_function
from jaxscale.ops.attention.attention import attention
from jaxscale.ops.attention.platform_kernels import maskless
from jaxscale.ops.split_vjp import split_vjp
from jaxscale.training.remat import rematerialised, rematerialised_attention
from jaxscale.training.tracing.trace_saved import trace_saved
from tests.ops.programs import equations

MODEL = ModelConfig(
    num_layers=1, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, vocab_size=64
)
CUDNN = "@__cudnn$fmhaScaleBiasSoftmax(", "@__cudnn$fmhaScaleBiasSoftmaxBackward("
FLASH = "flash_forward", "flash_key_gradients"


def kernels_read(jaxpr):
    """The names of the Pallas kernels of a program whose results are read: JAX before 0.12 leaves
    the others in it, and XLA drops them."""
    every = [equation for equation, _ in equations(jaxpr)]
    parameters = jax.tree.leaves([list(equation.params.values()) for equation in every])
    inner = [getattr(value, "jaxpr", value) for value in parameters]
    reads = [equation.invars for equation in every]
    reads += [one.outvars for one in inner if hasattr(one, "eqns")]
    read = set(map(id, itertools.chain(*reads)))
    calls = [equation for equation in every if equation.primitive.name == "pallas_call"]
    return [call.params["name"] for call in calls if not read.isdisjoint(map(id, call.outvars))]


@pytest.fixture(params=["cudnn", "flash"])
def kernel(request, monkeypatch):
    """Of a GPU's attention, on a machine that has neither a GPU nor cuDNN."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91500)
    return request.param


@pytest.mark.proof(
    but=("cudnn-offload:attention-1", "cudnn-save_all_but_attention-2", "cudnn-save:attention-1")
)
@pytest.mark.parametrize(
    ("remat", "runs"),
    [
        ("none", 1),
        ("full", 2),
        ("save_all_but_attention", 2),
        ("save_matmuls", 1),
        ("save:query,key,value", 2),
        ("save:query,key,value,attention", 1),
        ("save:attention", 1),
        ("offload:attention", 1),
    ],
)
def test_the_kernel_runs_again_where_its_result_is_not_kept(kernel, remat, runs):
    policy = parse_remat(remat)
    attend = functools.partial(attention, implementation=kernel)
    if kernel == "cudnn" and not policy.by_names:
        attend = maskless(attend)
    decoder = Decoder(MODEL, rematerialised_attention(Kernels(attend), policy))
    layer = rematerialised(layer_function(decoder.stacks[0]), policy)
    layers = jax.eval_shape(decoder.init, jax.random.key(0))["layers"]
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], jnp.bfloat16), layers)
    x = jax.ShapeDtypeStruct((2, 64, MODEL.d_model), jnp.bfloat16)
    ints = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    batch = Batch(ints, ints, ints, ints, jax.ShapeDtypeStruct((2, 64), jnp.float32))

    def loss(weights, x, batch):
        (stream, _), _ = layer(weights, {"x": x}, {}, (batch, 0))
        return stream["x"].astype(jnp.float32).sum()

    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(weights, x, batch)
    if kernel == "cudnn":
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
        forward, backward = CUDNN
    else:
        program, (forward, backward) = kernels_read(traced.jaxpr.jaxpr), FLASH
    assert program.count(forward) == runs
    assert program.count(backward) == 1
    if not remat.startswith("offload:"):
        arguments = weights, {"x": x}, {}, (batch, jax.ShapeDtypeStruct((), jnp.int32))
        _, _, kept = jax.eval_shape(split_vjp(layer)[0], *arguments)
        # The frequencies of rotary positions are not among them.
        found = collections.Counter(leaf.size // 2 for leaf in kept)
        expected: collections.Counter[int] = collections.Counter()
        for one in trace_saved(MODEL, 64, 64, remat, piped=False).of("layers").values:
            expected[round(one.heads * one.features * one.entries)] += round(one.count)
        assert found == expected
