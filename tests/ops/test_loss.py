"""Chunked cross entropy: against the plain formula in float64, and what it never does."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.ops.loss import _chunk_size, cross_entropy, logits

D, V, PADDED = 12, 17, 24


def arguments(batch=3, time=5, dtype=jnp.float64):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(batch, time, D)), dtype)
    head = jnp.asarray(rng.normal(size=(D, PADDED)), dtype)
    targets = jnp.asarray(rng.integers(0, V, size=(batch, time)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 3, size=(batch, time)) / 2, jnp.float32)
    return x, head, targets, weights


def plain(x, head, targets, weights, *, soft_cap=0.0, z_loss=0.0):
    scores = (x @ head)[..., :V]
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    log_z = jax.nn.logsumexp(scores, axis=-1)
    nll = log_z - jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(weights * (nll + z_loss * log_z**2)), jnp.sum(weights * nll)


def chunked(x, head, targets, weights, *, transposed=False, **options):
    head = head.T if transposed else head
    return cross_entropy(x, head, targets, weights, vocab_size=V, transposed=transposed, **options)


def value_and_grads(function, **options):
    """((loss, nll), gradients for x and the head), compiled."""
    return jax.jit(jax.value_and_grad(functools.partial(function, **options), (0, 1), has_aux=True))


CASES = [
    ({}, 1, False),
    ({}, 4, True),
    ({}, None, False),
    ({"z_loss": 0.3}, 4, False),
    ({"soft_cap": 3.0}, 4, True),
    ({"z_loss": 0.3, "soft_cap": 3.0}, 7, False),
    ({"z_loss": 0.3, "soft_cap": 3.0}, None, True),
]


@pytest.mark.parametrize(("options", "chunk_tokens", "transposed"), CASES, ids=str)
def test_value_and_gradients_are_those_of_the_formula(options, chunk_tokens, transposed):
    args = arguments()
    more = {**options, "chunk_tokens": chunk_tokens, "transposed": transposed}
    expected, expected_grads = value_and_grads(plain, **options)(*args)
    got, grads = value_and_grads(chunked, **more)(*args)
    np.testing.assert_allclose(got, expected, rtol=1e-13)
    undifferentiated = jax.jit(functools.partial(chunked, **more))(*args)
    np.testing.assert_allclose(undifferentiated, expected, rtol=1e-13)
    for grad, expected_grad in zip(grads, expected_grads):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-12, atol=1e-12)
    assert not np.any(grads[1][:, V:]), "padding of the vocabulary has a gradient"


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_shards_of_the_sequence_change_nothing(chunk_tokens):
    args, options = arguments(time=8), {"z_loss": 0.3, "soft_cap": 3.0}
    expected, expected_grads = value_and_grads(plain, **options)(*args)
    got, grads = value_and_grads(chunked, **options, chunk_tokens=chunk_tokens, shards=4)(*args)
    np.testing.assert_allclose(got, expected, rtol=1e-13)
    for grad, expected_grad in zip(grads, expected_grads):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_a_bias_is_another_row_of_the_head():
    """Of a column of ones; on shards, in chunks, capped."""
    x, head, targets, weights = arguments(time=8)
    bias = jnp.asarray(np.random.default_rng(2).normal(size=PADDED))
    more = {"z_loss": 0.3, "soft_cap": 3.0}

    def longer(x, head, bias):
        ones = jnp.ones((*x.shape[:2], 1))
        rows = jnp.concatenate([x, ones], -1), jnp.concatenate([head, bias[None]])
        return plain(*rows, targets, weights, **more)

    options = {"chunk_tokens": 3, "shards": 4, "transposed": True, **more}

    def biased(x, head, bias):
        return chunked(x, head, targets, weights, bias_V=bias, **options)

    (expected, wanted), (got, grads) = (
        jax.jit(jax.value_and_grad(function, (0, 1, 2), has_aux=True))(x, head, bias)
        for function in (longer, biased)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-13)
    for grad, expected_grad in zip(grads, wanted):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-12, atol=1e-12)
    raw = logits(x, head, vocab_size=V, bias_V=bias)
    np.testing.assert_allclose(raw, (x @ head + bias)[..., :V], rtol=1e-13)


def test_gradients_scale_with_the_cotangent_of_the_loss_alone():
    args = arguments()
    _, pullback = jax.vjp(lambda x, head: chunked(x, head, *args[2:]), *args[:2])
    one, zero = jnp.ones(()), jnp.zeros(())
    for grad, scaled in zip(pullback((one, zero)), pullback((-7.5 * one, one))):
        np.testing.assert_allclose(scaled, -7.5 * grad, rtol=1e-13)


def test_tokens_of_weight_zero_have_no_loss_and_no_gradient():
    x, head, targets, weights = arguments()
    weights = weights.at[1].set(0)
    nothing = chunked(x, head, targets, weights * 0)
    assert [float(value) for value in nothing] == [0, 0]
    grad = jax.grad(lambda x: chunked(x, head, targets, weights)[0])(x)
    assert not np.any(grad[1])
    other = x.at[1].multiply(3)
    np.testing.assert_array_equal(
        chunked(x, head, targets, weights), chunked(other, head, targets, weights)
    )


@pytest.mark.parametrize("transposed", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("chunk_tokens", [10, None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_narrow_inputs_are_summed_in_float32(dtype, chunk_tokens, transposed):
    args = arguments(batch=8, time=33, dtype=dtype)
    wide = [arg.astype(jnp.float64) for arg in args[:2]] + list(args[2:])
    expected, expected_grads = value_and_grads(plain)(*wide)
    got, grads = value_and_grads(chunked, chunk_tokens=chunk_tokens, transposed=transposed)(*args)
    assert [value.dtype for value in got] == [jnp.float32] * 2
    assert [grad.dtype for grad in grads] == [dtype] * 2
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    for grad, expected_grad in zip(grads, expected_grads):
        scale = float(jnp.max(jnp.abs(expected_grad)))
        np.testing.assert_allclose(
            np.asarray(grad, np.float64), expected_grad, atol=tolerance * scale
        )


def test_a_wide_head_beside_narrow_activations_gets_an_unrounded_gradient():
    x, head, targets, weights = arguments(dtype=jnp.bfloat16)
    loss = lambda head: chunked(x, head, targets, weights, chunk_tokens=4)[0]  # noqa: E731
    narrow, wide = jax.grad(loss)(head), jax.grad(loss)(head.astype(jnp.float32))
    assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))
    assert np.any(np.asarray(narrow, np.float32) != np.asarray(wide))


def test_the_heads_gradient_is_summed_over_chunks_in_the_accumulation_type():
    x, head, targets, weights = arguments(batch=20, time=50, dtype=jnp.float32)

    def error(dtype):
        def loss(head):
            return chunked(x, head, targets, weights, chunk_tokens=1, accumulation_dtype=dtype)[0]

        return np.abs(jax.jit(jax.grad(loss))(head) - exact).mean()

    wide = [arg.astype(jnp.float64) for arg in (x, head)]
    exact = jax.grad(lambda head: plain(wide[0], head, targets, weights)[0])(wide[1])
    assert error(jnp.float64) < error(jnp.float32) / 2
    # bfloat16 would lose what the products have in float32, so it is widened.
    assert error(jnp.bfloat16) == error(jnp.float32)


@pytest.mark.parametrize("transposed", [False, True], ids=["untied", "tied"])
def test_full_logits_never_exist_and_nothing_gathers_over_the_vocabulary(transposed):
    tokens, vocab, width, chunk = 512, 4096, 8, 32
    x = jax.ShapeDtypeStruct((2, tokens // 2, width), jnp.float32)
    head = jax.ShapeDtypeStruct((vocab, width) if transposed else (width, vocab), jnp.float32)
    targets = jax.ShapeDtypeStruct((2, tokens // 2), jnp.int32)
    weights = jax.ShapeDtypeStruct((2, tokens // 2), jnp.float32)

    def loss(*args):
        return cross_entropy(
            *args, vocab_size=vocab - 5, chunk_tokens=chunk, transposed=transposed, z_loss=1e-4
        )[0]

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    text = str(step.trace(x, head, targets, weights).jaxpr)
    assert "gather" not in text
    assert "scatter" not in text
    shapes = [shape.split(",") for shape in re.findall(r"[a-z]+\d+\[([\d,]+)\]", text)]
    assert max(math.prod(map(int, shape)) for shape in shapes) == chunk * vocab
    memory = step.lower(x, head, targets, weights).compile().memory_analysis()
    assert memory.temp_size_in_bytes < tokens * vocab * 4 / 4


def test_the_vocabulary_may_be_sharded_over_an_axis_that_the_compiler_handles():
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    x, head, targets, weights = arguments(batch=4, time=6)

    def local(x, head, targets, weights):
        loss = lambda x, head: chunked(x, head, targets, weights, chunk_tokens=5)  # noqa: E731
        (loss, nll), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, head)
        return jax.lax.psum((loss, nll, grads[1]), "fsdp"), grads[0]

    rows = P("fsdp")
    step = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(rows, P(), rows, rows),
            out_specs=(P(), rows),
            axis_names={"fsdp"},
            check_vma=False,
        )
    )
    sharded_head = jax.device_put(head, NamedSharding(mesh, P(None, "tensor")))
    (loss, nll, grad_head), grad_x = step(x, sharded_head, targets, weights)
    expected, grads = value_and_grads(plain)(x, head, targets, weights)
    np.testing.assert_allclose((loss, nll), expected, rtol=1e-13)
    np.testing.assert_allclose(grad_x, grads[0], atol=1e-12)
    np.testing.assert_allclose(grad_head, grads[1], atol=1e-12)
    assert "all-gather" not in step.lower(x, sharded_head, targets, weights).compile().as_text()


def test_tokens_that_are_spread_over_ranks_of_context_stay_where_they_are():
    """A chunk takes as many tokens from each rank: nothing but sums crosses, forward and backward,
    and the logits of a chunk exist once."""
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,))
    batch, time, vocab, chunk = 2, 256, 512, 32
    tokens, head = NamedSharding(mesh, P(None, "context")), NamedSharding(mesh, P())
    shapes = [
        jax.ShapeDtypeStruct((batch, time, D), jnp.float32, sharding=tokens),
        jax.ShapeDtypeStruct((D, vocab), jnp.float32, sharding=head),
        jax.ShapeDtypeStruct((batch, time), jnp.int32, sharding=tokens),
        jax.ShapeDtypeStruct((batch, time), jnp.float32, sharding=tokens),
    ]

    def loss(*args):
        return cross_entropy(*args, vocab_size=vocab, chunk_tokens=chunk, shards=4)[0]

    compiled = (
        jax.jit(jax.grad(loss, (0, 1)), out_shardings=(tokens, head)).lower(*shapes).compile()
    )
    text = compiled.as_text()
    for moves in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {moves}(" not in text
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * chunk * vocab * 4


def test_logits_are_those_of_the_loss_without_the_padding():
    x, head, targets, weights = arguments(dtype=jnp.bfloat16)
    for transposed in (False, True):
        got = logits(
            x, head.T if transposed else head, vocab_size=V, soft_cap=3.0, transposed=transposed
        )
        assert got.shape == (3, 5, V)
        assert got.dtype == jnp.float32
        log_p = jax.nn.log_softmax(got)
        nll = -jnp.sum(weights * jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0])
        assert nll == pytest.approx(
            float(chunked(x, head, targets, weights, soft_cap=3.0)[1]), rel=1e-5
        )


def test_chunks_are_equal_and_hold_the_logits_that_were_asked_for():
    assert _chunk_size(4096, 32768, None) == 1024
    assert _chunk_size(4096, 256, None) == 4096
    assert _chunk_size(4097, 131072, None) == 820  # five chunks, three tokens of padding
    for tokens in (1, 7, 100, 101):
        for most in (1, 3, 64, 1000):
            size = _chunk_size(tokens, 10, most)
            assert size <= most
            assert math.ceil(tokens / size) == math.ceil(tokens / most)
    with pytest.raises(ValueError, match="chunk_tokens = 0"):
        _chunk_size(10, 10, 0)
