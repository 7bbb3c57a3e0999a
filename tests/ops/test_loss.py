"""Chunked cross entropy: against the plain formula in float64, and what it never does."""

import functools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxscale.compiled import hlo
from jaxscale.compiled.collectives import collectives
from jaxscale.ops import loss_kernel
from jaxscale.ops.loss import (
    LossForm,
    _chunk_size,
    _chunks,
    _reduced_at_once,
    cross_entropy,
    logits,
)
from jaxscale.ops.loss_over_vocabulary import Slice
from jaxscale.ops.sizes import CHUNK_BYTES, loss_chunk_tokens
from jaxscale.ops.tensor_parallel import Spread

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
    return formed(x, head, targets, weights, vocab_size=V, transposed=transposed, **options)


def formed(*args, **options):
    """`cross_entropy`, with the fields of its form among its other options."""
    form = {name: options.pop(name) for name in LossForm._fields if name in options}
    return cross_entropy(*args, **options, form=LossForm(**form))


def value_and_grads(function, **options):
    """((loss, nll), gradients for x and the head), compiled."""
    return jax.jit(jax.value_and_grad(functools.partial(function, **options), (0, 1), has_aux=True))


@pytest.fixture
def kernel_on_cpu(monkeypatch):
    """Lets the loss for GPUs run on a CPU: its kernel is interpreted."""
    interpreted = functools.partial(loss_kernel.log_z_and_target, interpret=True)
    monkeypatch.setattr(loss_kernel, "log_z_and_target", interpreted)


CASES = [
    ({}, 1, False, "cpu"),
    ({}, 4, True, "tpu"),
    ({}, None, False, "gpu"),
    ({"z_loss": 0.3}, 4, False, "cpu"),
    ({"soft_cap": 3.0}, 4, True, "tpu"),
    ({"z_loss": 0.3, "soft_cap": 3.0}, 7, False, "cpu"),
    ({"z_loss": 0.3, "soft_cap": 3.0}, 4, True, "gpu"),
]


@pytest.mark.proof(
    but=("{}-None-False-gpu", "{'z_loss': 0.3, 'soft_cap': 3.0}-4-True-gpu", "{}-4-True-tpu")
)
@pytest.mark.parametrize(("options", "chunk_tokens", "transposed", "platform"), CASES, ids=str)
def test_value_and_gradients_are_those_of_the_formula(options, chunk_tokens, transposed, platform):
    args = arguments()
    more = {**options, "chunk_tokens": chunk_tokens, "transposed": transposed, "platform": platform}
    expected, expected_grads = value_and_grads(plain, **options)(*args)
    got, grads = value_and_grads(chunked, **more)(*args)
    np.testing.assert_allclose(got, expected, rtol=1e-13)
    undifferentiated = jax.jit(functools.partial(chunked, **more))(*args)
    np.testing.assert_allclose(undifferentiated, expected, rtol=1e-13)
    for grad, expected_grad in zip(grads, expected_grads):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-12, atol=1e-12)
    assert not np.any(grads[1][:, V:]), "padding of the vocabulary has a gradient"


@pytest.mark.proof
def test_a_vocabulary_without_padding_is_cut_to_itself():
    """No column is masked then: the loss is that of as many columns without the others."""
    x, head, targets, weights = arguments()
    args = x, head[:, :V], targets, weights
    got, grads = value_and_grads(chunked, chunk_tokens=4)(*args)
    expected, expected_grads = value_and_grads(plain)(*args)
    np.testing.assert_allclose(got, expected, rtol=1e-13)
    for grad, expected_grad in zip(grads, expected_grads):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-12, atol=1e-12)


RANKS = {"fsdp": 1, "context": 2, "tensor": 4}
AUTOMATIC = ("context", "tensor")
SPREADS = {
    "context": Spread(None, ("context",), ("context", "tensor")),
    "tensor": Spread("tensor", (), ("context", "tensor")),
    "both": Spread("tensor", ("context",), ("context", "tensor")),
    "features": Spread("tensor", (), ("context", "tensor"), "context"),
}


KERNEL = "log_z_and_target"


def on_ranks(function, ranks=RANKS):
    """A function of arguments that every rank has whole, compiled for `ranks`: as in a step one
    axis is manual, and context and tensor are left to the compiler."""
    devices = jax.devices()[: math.prod(ranks.values())]
    types = (AxisType.Auto,) * 3
    mesh = jax.make_mesh(tuple(ranks.values()), tuple(ranks), axis_types=types, devices=devices)
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"fsdp"}, check_vma=False
        )
    )


@pytest.mark.proof(but=("features-True-tpu",))
@pytest.mark.parametrize(
    ("spread", "transposed", "platform"),
    [
        ("context", False, "cpu"),
        ("tensor", False, "gpu"),
        ("both", True, "gpu"),
        ("features", True, "tpu"),
    ],
)
def test_ranks_change_nothing_and_a_bias_is_another_row_of_the_head(spread, transposed, platform):
    """Of a column of ones; in chunks, capped. The last of four ranks of tensor has six columns of
    padding, and of context each has 12 tokens; alone it divides an odd number of columns. Three
    tokens of two ranks have rows that are added to the head's."""
    x, head, targets, weights = arguments(time=8)
    head = head[:, : PADDED - (spread == "context")]
    rng, ids = np.random.default_rng(2), (16, 0, 3)
    bias = jnp.asarray(rng.normal(size=head.shape[1]))
    rows = jnp.asarray(rng.normal(size=(3, D)))
    more = {"z_loss": 0.3, "soft_cap": 3.0}

    def longer(x, head, bias, rows):
        ones = jnp.ones((*x.shape[:2], 1))
        head = head.at[:, jnp.asarray(ids)].add(rows.T)
        longer = jnp.concatenate([x, ones], -1), jnp.concatenate([head, bias[None]])
        return plain(*longer, targets, weights, **more)

    def biased(x, head, bias, rows):
        options = {"chunk_tokens": 5, "spread": SPREADS[spread], "transposed": transposed, **more}
        options |= {"platform": platform, "bias_V": bias, "rows_KD": rows, "ids": ids}
        return chunked(x, head, targets, weights, **options)

    args = x, head, bias, rows
    (expected, wanted), (got, grads) = (
        wrap(jax.value_and_grad(function, (0, 1, 2, 3), has_aux=True))(*args)
        for wrap, function in ((jax.jit, longer), (on_ranks, biased))
    )
    np.testing.assert_allclose(got, expected, rtol=1e-13)
    np.testing.assert_allclose(on_ranks(biased)(*args), expected, rtol=1e-13)
    for grad, expected_grad in zip(grads, wanted):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-12, atol=1e-12)
    raw = logits(x, head, vocab_size=V, bias_V=bias, rows_KD=rows, ids=ids)
    whole = head.at[:, jnp.asarray(ids)].add(rows.T)
    np.testing.assert_allclose(raw, (x @ whole + bias)[..., :V], rtol=1e-13)


@pytest.mark.proof(but=("2-4-24-True",))
@pytest.mark.parametrize(
    ("ranks", "tensor", "columns", "transposed"),
    [
        (2, 4, 24, True),
        (5, 1, 24, False),  # of 5 columns, the last 4
        (4, 1, 23, False),  # 6 and 5, of which context has 3 each
    ],
)
def test_a_head_in_slices_on_ranks_of_a_manual_axis_changes_nothing(
    ranks, tensor, columns, transposed
):
    """Each rank gets the loss, and its terms of the gradients."""
    x, head, targets, weights = arguments(time=8)
    args, ids = (x, head[:, :columns]), (16, 0, 3)
    rows = jnp.asarray(np.random.default_rng(2).normal(size=(3, D)))
    context = 2 if columns == 23 else 1
    spread = Spread("tensor" if tensor > 1 else None, ("context",) * (context > 1), AUTOMATIC)
    more = {"z_loss": 0.3, "soft_cap": 3.0, "ids": ids}
    share = -(-columns // (tensor * ranks))

    def whole(x, head, rows):
        head = head.at[:, jnp.asarray(ids)].add(rows.T)
        return plain(x, head, targets, weights, z_loss=0.3, soft_cap=3.0)

    def sliced(x, head, rows):
        blocks = head.reshape(D, tensor, -1)
        blocks = jnp.pad(blocks, [(0, 0), (0, 0), (0, share * ranks - blocks.shape[2])])
        begin = share * jax.lax.axis_index("fsdp")
        own = jax.lax.dynamic_slice_in_dim(blocks, begin, share, 2).reshape(D, -1)
        how = {"chunk_tokens": 5, "spread": spread, "slice_": Slice("fsdp", columns), **more}
        return chunked(x, own, targets, weights, rows_KD=rows, transposed=transposed, **how)

    def summed(*args):
        found, grads = jax.value_and_grad(sliced, (0, 1, 2), has_aux=True)(*args)
        return found, jax.lax.psum(grads, "fsdp")

    expected, wanted = jax.jit(jax.value_and_grad(whole, (0, 1, 2), has_aux=True))(*args, rows)
    mesh = {"fsdp": ranks, "context": context, "tensor": tensor}
    got, grads = on_ranks(summed, mesh)(*args, rows)
    np.testing.assert_allclose(got, expected, rtol=1e-13)
    np.testing.assert_allclose(on_ranks(sliced, mesh)(*args, rows), expected, rtol=1e-13)
    for grad, expected_grad in zip(grads, wanted):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.proof
def test_gradients_scale_with_the_cotangent_of_the_loss_alone():
    args = arguments()
    _, pullback = jax.vjp(lambda x, head: chunked(x, head, *args[2:]), *args[:2])
    one, zero = jnp.ones(()), jnp.zeros(())
    for grad, scaled in zip(pullback((one, zero)), pullback((-7.5 * one, one))):
        np.testing.assert_allclose(scaled, -7.5 * grad, rtol=1e-13)


@pytest.mark.proof
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


@pytest.mark.proof(but=("float32-None-untied", "float32-None-tied", "float32-10-tied"))
@pytest.mark.usefixtures("kernel_on_cpu")
@pytest.mark.parametrize("transposed", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("chunk_tokens", [10, None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_narrow_inputs_are_summed_in_float32(dtype, chunk_tokens, transposed):
    args = arguments(batch=8, time=33, dtype=dtype)
    wide = [arg.astype(jnp.float64) for arg in args[:2]] + list(args[2:])
    expected, expected_grads = value_and_grads(plain)(*wide)
    options = {"transposed": transposed, "platform": "cpu" if chunk_tokens else "gpu"}
    got, grads = value_and_grads(chunked, chunk_tokens=chunk_tokens, **options)(*args)
    assert [value.dtype for value in got] == [jnp.float32] * 2
    assert [grad.dtype for grad in grads] == [dtype] * 2
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    for grad, expected_grad in zip(grads, expected_grads):
        scale = float(jnp.max(jnp.abs(expected_grad)))
        np.testing.assert_allclose(
            np.asarray(grad, np.float64), expected_grad, atol=tolerance * scale
        )


@pytest.mark.proof
@pytest.mark.usefixtures("kernel_on_cpu")
@pytest.mark.parametrize("spread", [None, "tensor", "features"])
def test_a_kernel_for_gpus_changes_no_gradient(spread):
    """In float32, with everything that a loss may have. The last of four ranks of tensor has
    padding alone."""
    x, head, targets, weights = arguments(time=8, dtype=jnp.float32)
    bias = jnp.asarray(np.random.default_rng(2).normal(size=PADDED), jnp.float32)

    def loss(x, head, bias, platform):
        more = {"z_loss": 0.3, "soft_cap": 3.0, "bias_V": bias, "platform": platform}
        of_ranks = SPREADS[spread] if spread else None
        return chunked(x, head, targets, weights, chunk_tokens=5, spread=of_ranks, **more)

    wrap = on_ranks if spread else jax.jit
    kernel, plainly = (
        wrap(
            jax.value_and_grad(
                functools.partial(loss, platform=platform), argnums=(0, 1, 2), has_aux=True
            )
        )
        for platform in ("gpu", "tpu")
    )
    assert KERNEL in str(kernel.trace(x, head, bias).jaxpr)
    assert KERNEL not in str(plainly.trace(x, head, bias).jaxpr)
    got, expected = (jax.tree.leaves(run(x, head, bias)) for run in (kernel, plainly))
    for one, other in zip(got, expected):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6 * np.abs(other).max())


def test_a_kernel_is_called_where_no_axis_is_left_to_the_compiler():
    """Which cannot partition it; and for float32 alone."""

    def program(wrap, dtype=jnp.float32, spread=None):
        x, head, targets, weights = arguments(time=8, dtype=dtype)
        loss = functools.partial(chunked, platform="gpu", spread=spread)
        return str(wrap(lambda x: loss(x, head, targets, weights)).trace(x).jaxpr)

    def in_mesh(*sizes):
        return functools.partial(on_ranks, ranks=dict(zip(RANKS, sizes)))

    assert KERNEL in program(jax.jit)
    assert KERNEL not in program(jax.jit, jnp.float64)
    assert KERNEL in program(in_mesh(8, 1, 1))
    assert KERNEL not in program(in_mesh(2, 1, 4))
    assert KERNEL in program(in_mesh(2, 1, 4), spread=SPREADS["tensor"])


@pytest.mark.proof
def test_a_wide_head_with_narrow_activations_gets_an_unrounded_gradient():
    x, head, targets, weights = arguments(dtype=jnp.bfloat16)
    loss = lambda head: chunked(x, head, targets, weights, chunk_tokens=4)[0]  # noqa: E731
    narrow, wide = jax.grad(loss)(head), jax.grad(loss)(head.astype(jnp.float32))
    assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))
    assert np.any(np.asarray(narrow, np.float32) != np.asarray(wide))


@pytest.mark.proof
def test_the_heads_gradient_is_summed_over_chunks_in_the_accumulation_type():
    x, head, targets, weights = arguments(batch=20, time=50, dtype=jnp.float32)

    def error(dtype):
        def loss(head):
            return chunked(x, head, targets, weights, chunk_tokens=1, accumulation_dtype=dtype)[0]

        return np.abs(np.asarray(jax.jit(jax.grad(loss))(head)) - exact).mean()

    wide = [arg.astype(jnp.float64) for arg in (x, head)]
    exact = jax.jit(jax.grad(lambda head: plain(wide[0], head, targets, weights)[0]))(wide[1])
    assert error(jnp.float64) < error(jnp.float32) / 2
    # bfloat16 would lose bits of the float32 matmuls, so it is widened.
    assert error(jnp.bfloat16) == error(jnp.float32)


@pytest.mark.compiles
@pytest.mark.proof
@pytest.mark.parametrize("transposed", [False, True], ids=["untied", "tied"])
def test_full_logits_never_exist_and_nothing_gathers_over_the_vocabulary(transposed):
    tokens, vocab, width, chunk = 512, 4096, 8, 32
    x = jax.ShapeDtypeStruct((2, tokens // 2, width), jnp.float32)
    head = jax.ShapeDtypeStruct((vocab, width) if transposed else (width, vocab), jnp.float32)
    targets = jax.ShapeDtypeStruct((2, tokens // 2), jnp.int32)
    weights = jax.ShapeDtypeStruct((2, tokens // 2), jnp.float32)

    def loss(*args):
        return formed(
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


@pytest.mark.compiles
@pytest.mark.proof
@pytest.mark.parametrize("spread", ["context", "both"])
def test_each_rank_has_columns_and_a_chunk_three_numbers_a_token(spread):
    """The tokens of a chunk are exchanged over context; those of all chunks, once, over tensor. The
    head's gradient is whole on no rank of context before its one exchange, and the logits of a
    chunk exist once."""
    batch, time, vocab, chunk, context = 2, 256, 512, 32, 2
    tensor = 4 if spread == "both" else 1
    shapes = [(batch, time, D), (D, vocab), (batch, time), (batch, time)]
    types = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
    args = [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, types)]

    def gradients(*args):
        options = {"vocab_size": vocab, "chunk_tokens": chunk, "spread": SPREADS[spread]}
        return jax.value_and_grad(lambda *args: formed(*args, **options)[0], (0, 1))(*args)

    compiled = on_ranks(gradients).lower(*args).compile()
    found = collectives(hlo.parse_hlo(compiled.as_text()), RANKS)
    sent = Counter()
    for one in found:
        sent[one.axes, one.asked, one.count] += one.num_bytes
    chunks, tokens = batch * time // context // chunk, chunk * context
    numbers = ("context", "tensor") if tensor > 1 else ("context",)
    whole = 4 * D * tokens
    expected = {
        (("context",), "all-gather", chunks): whole,
        (numbers, "all-reduce", chunks): 4 * 3 * tokens,
        (("context",), "reduce-scatter", chunks): whole,
        # The head's gradient, targets and weights.
        (("context",), "all-gather", 1): 4 * D * vocab // tensor + 2 * 4 * batch * time,
    }
    if tensor > 1:
        expected |= {
            (("tensor",), asked, 1): 4 * D * batch * time // context
            for asked in ("all-gather", "reduce-scatter")
        }
    assert sent == expected
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * chunk * vocab * 4


@pytest.mark.proof
def test_partial_gradients_of_x_are_rounded_once_a_rank():
    """To bfloat16, by half a unit in the last place, 2^-8 of a number at most. So are the r - 1
    sums of parts, each of which is smaller than the sum of the parts' sizes: with the parts' own an
    error of r * 2^-8 of that at most, to first order."""
    ranks, (x, head, targets, weights) = RANKS["tensor"], arguments(batch=8, time=32)
    head = jnp.tile(head, (1, 8)).astype(jnp.bfloat16)
    x = x.astype(jnp.bfloat16)
    options = {"vocab_size": head.shape[1], "spread": SPREADS["tensor"], "chunk_tokens": 64}

    def gradient(x, head, targets, weights):
        return jax.grad(lambda x: formed(x, head, targets, weights, **options)[0])(x)

    got = np.asarray(on_ranks(gradient)(x, head, targets, weights), np.float64)
    wide_x, wide_head = x.astype(jnp.float64), head.astype(jnp.float64)
    p = jax.nn.softmax(wide_x @ wide_head) - jax.nn.one_hot(targets, head.shape[1])
    p = p * weights[..., None]
    by_rank = jnp.einsum(
        "btrv,drv->rbtd",
        p.reshape(*p.shape[:2], ranks, -1),
        wide_head.reshape(len(wide_head), ranks, -1),
    )
    error = np.abs(got - jnp.sum(by_rank, 0))
    bound = ranks * 2.0**-8 * jnp.sum(jnp.abs(by_rank), 0)
    # The gradient of the logits is rounded to bfloat16 too, whatever the ranks.
    bound += 2.0**-8 * jnp.einsum("btv,dv->btd", jnp.abs(p), jnp.abs(wide_head))
    assert np.all(error <= bound)


@pytest.mark.proof
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
    assert loss_chunk_tokens(32_768) == 1024
    assert loss_chunk_tokens(256) == CHUNK_BYTES // (4 * 256)
    assert loss_chunk_tokens(131_072, 2048) == 2048
    x = jax.ShapeDtypeStruct((1, 4096, 2048), jnp.bfloat16)
    for trained, shape in ((True, (2, 2048, 2048)), (False, (4, 1024, 2048))):
        form = LossForm(platform="gpu", trains_head=trained)
        made = jax.eval_shape(functools.partial(_chunks, form, 131_072), x)
        assert made[0].shape == shape
    assert _chunk_size(4097, 1024) == 820  # five chunks, three tokens of padding
    for tokens in (1, 7, 100, 101):
        for most in (1, 3, 64, 1000):
            size = _chunk_size(tokens, most)
            assert size <= most
            assert math.ceil(tokens / size) == math.ceil(tokens / most)
    with pytest.raises(ValueError, match="chunk_tokens = 0"):
        chunked(*arguments(), chunk_tokens=0)


@pytest.mark.proof
def test_of_nothing_but_padding_the_sum_is_zero_and_extremes_are_those_of_logsumexp():
    """As on a rank of tensor whose columns are all beyond the vocabulary."""
    raw = jnp.array([[-1e4, 3.0, 2.0, 1e4], [1e30, -1e30, 0.0, -jnp.inf], [5.0, 6.0, 7.0, 8.0]])
    is_target = jnp.arange(4) == 1
    log_z, target = _reduced_at_once(raw, is_target, None)
    np.testing.assert_allclose(log_z, jax.nn.logsumexp(raw, axis=-1), rtol=1e-15)
    np.testing.assert_array_equal(target, raw[:, 1])
    log_z, _ = _reduced_at_once(raw, is_target, jnp.zeros(4, bool))
    np.testing.assert_array_equal(log_z, -jnp.inf)
