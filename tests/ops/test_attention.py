"""Attention: the reference against loops, every implementation against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.config import from_dict
from jaxscale.ops import attention_kernels, blockwise
from jaxscale.ops.attention import attention, check, choose, decode_attention
from jaxscale.ops.attention_kernels import maskless
from jaxscale.ops.rope import rotary
from jaxscale.training.kernels import make_kernels

reference = functools.partial(attention, implementation="reference")


def arguments(time, heads, kv_heads, *, head_dim=8, packing="packed", dtype=jnp.float64, batch=2):
    """q, k, v, segments."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(batch, time, n, head_dim)), dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    segments = {
        "one": np.ones((batch, time)),
        "packed": 1 + np.sort(rng.integers(0, 4, size=(batch, time))),
        "padded": np.where(np.arange(time) < 2 * time // 3, 1, 0) * np.ones((batch, 1)),
        "mixed": rng.integers(0, 3, size=(batch, time)),  # documents in no order
    }[packing]
    return q, k, v, jnp.asarray(segments, jnp.int32)


def with_gradients(function):
    """The output and the three gradients, for a cotangent that differs everywhere."""

    @jax.jit
    def run(q, k, v, segments):
        out, pullback = jax.vjp(lambda q, k, v: function(q, k, v, segments), q, k, v)
        cotangent = jnp.sin(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype)
        return (out, *pullback(cotangent))

    return run


def assert_close(got, expected, tolerance):
    for one, other in zip(got, expected):
        np.testing.assert_allclose(
            np.asarray(one, np.float64), np.asarray(other, np.float64), atol=tolerance
        )


@pytest.mark.parametrize("window", [0, 3])
def test_the_reference_is_a_softmax_over_what_each_query_sees(window):
    q, k, v, segments = (np.asarray(arg) for arg in arguments(9, 4, 2, packing="mixed"))
    out = reference(q, k, v, segments, sliding_window=window)
    for row, query, head in np.ndindex(2, 9, 4):
        first = max(0, query - window + 1) if window else 0
        seen = [
            key for key in range(first, query + 1) if segments[row, key] == segments[row, query]
        ]
        scores = k[row, seen, head // 2] @ q[row, query, head] / np.sqrt(8)
        p = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(out[row, query, head], p @ v[row, seen, head // 2], atol=1e-14)


BLOCKWISE = {
    "heads": {"time": 48, "heads": 2, "kv_heads": 2, "packing": "one"},
    "grouped": {"time": 48, "heads": 4, "kv_heads": 2},
    "one kv head": {"time": 48, "heads": 3, "kv_heads": 1},
    "padding": {"time": 48, "heads": 2, "kv_heads": 1, "packing": "padded"},
    "documents in no order": {"time": 48, "heads": 2, "kv_heads": 1, "packing": "mixed"},
    "a broken last block": {"time": 41, "heads": 2, "kv_heads": 1},
    "less than a block": {"time": 5, "heads": 2, "kv_heads": 1},
    "window of a block and one": {
        "time": 48,
        "heads": 2,
        "kv_heads": 1,
        "window": 17,
        "packing": "one",
    },
    "window of one": {"time": 41, "heads": 2, "kv_heads": 1, "window": 1},
    "window, packed, grouped": {"time": 41, "heads": 4, "kv_heads": 2, "window": 20},
}


@pytest.mark.parametrize("case", BLOCKWISE.values(), ids=BLOCKWISE)
def test_blockwise_is_the_reference(case):
    case = dict(case)
    window = case.pop("window", 0)
    args = arguments(**case)
    got = with_gradients(
        functools.partial(blockwise.blockwise_attention, sliding_window=window, block=16)
    )(*args)
    expected = with_gradients(functools.partial(reference, sliding_window=window))(*args)
    assert_close(got, expected, 1e-12)


@pytest.mark.parametrize(("batch", "time"), [(1, 150), (8, 130)])
def test_blockwise_is_the_reference_with_the_blocks_it_takes_by_itself(batch, time):
    args = arguments(time, 4, 2, batch=batch)
    got = with_gradients(functools.partial(attention, implementation="blockwise"))(*args)
    assert_close(got, with_gradients(reference)(*args), 1e-12)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_narrow_types_are_close_to_float64_and_kept(implementation, dtype):
    args = arguments(40, 4, 2, dtype=dtype)
    got = with_gradients(functools.partial(attention, implementation=implementation))(*args)
    expected = with_gradients(reference)(*(arg.astype(jnp.float64) for arg in args[:3]), args[3])
    assert [value.dtype for value in got] == [dtype] * 4
    assert_close(got, expected, 12 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_splash_is_the_reference(window, kv_heads):
    with jax.enable_x64(False):
        args = arguments(256, 2, kv_heads, head_dim=16, dtype=jnp.float32, batch=1)
        kernel = functools.partial(attention_kernels.splash, sliding_window=window, interpret=True)
        expected = with_gradients(functools.partial(reference, sliding_window=window))(*args)
        assert_close(with_gradients(kernel)(*args), expected, 1e-5)


def test_on_a_tpu_scores_have_no_rounding_but_that_of_queries_and_keys():
    """Heads of 128: their scale is no power of two. Errors of scores of size 1, beside those of
    queries and keys that are rounded and then scaled exactly."""
    config = from_dict(
        {"model": {"head_dim": 128, "compute_dtype": "bfloat16"}, "data": {"seq_len": 128}}
    )
    turn = make_kernels(config, "tpu").rotary.keywords  # of the kernel, which a CPU does not have
    rng = np.random.default_rng(0)
    positions = jnp.asarray(rng.integers(0, 5000, (1, 256)), jnp.int32)
    q, k = (jnp.asarray(rng.normal(size=(1, 256, 1, 128)), jnp.bfloat16) for _ in "qk")

    def scores(turn, scale=1.0):
        return scale * np.einsum("btnh,bsnh->bts", *(np.float64(turn(x)) for x in (q, k)))

    turned = functools.partial(rotary, positions_BT=positions, theta=1e4)
    exact = scores(lambda x: turned(x.astype(jnp.float64)), 128**-0.5)
    rounded, ours = (
        np.std(one - exact)
        for one in (scores(turned, 128**-0.5), scores(functools.partial(turned, **turn)))
    )
    assert rounded > 1e-3
    assert ours < 1.05 * rounded  # once more rounded: 1.22


def test_splash_takes_what_is_scaled_before():
    with jax.enable_x64(False):
        q, *rest = arguments(128, 2, 1, head_dim=16, dtype=jnp.float32, batch=1)
        run = functools.partial(attention_kernels.splash, sliding_window=0, interpret=True)
        np.testing.assert_array_equal(run(q, *rest), run(q / 4, *rest, scaled=True))


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_documents_and_padding_have_no_influence_on_each_other(implementation):
    q, k, v, segments = arguments(40, 4, 2)
    segments = segments.at[:, 30:].set(0)
    run = with_gradients(functools.partial(attention, implementation=implementation))
    before = run(q, k, v, segments)
    assert all(bool(jnp.all(jnp.isfinite(value))) for value in before)
    other = segments != 2
    moved = [jnp.where(other[..., None, None], 5 - 3 * value, value) for value in (q, k, v)]
    for one, changed in zip(before, run(*moved, segments)):
        np.testing.assert_array_equal(one[~other], changed[~other])


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_a_packed_document_is_attended_to_as_if_it_were_alone(implementation):
    q, k, v, segments = arguments(40, 2, 1, batch=1)
    run = jax.jit(functools.partial(attention, implementation=implementation))
    packed = run(q, k, v, segments)
    for document in (1, 3):
        here = np.flatnonzero(segments[0] == document)
        alone = jax.jit(reference)(*(np.asarray(x)[:, here] for x in (q, k, v, segments)))
        np.testing.assert_allclose(packed[:, here], alone, atol=1e-13)


def test_large_scores_do_not_overflow():
    q, k, v, segments = arguments(40, 2, 1, dtype=jnp.float32)
    run = with_gradients(functools.partial(blockwise.blockwise_attention, block=16))
    for value in run(300 * q, 300 * k, v, segments):
        assert bool(jnp.all(jnp.isfinite(value)))


def kept_bytes(function, *args):
    """What the backward pass keeps, arguments included."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))


def shapes(time, heads, kv_heads, dtype):
    q, k, v, segments = jax.eval_shape(
        lambda: arguments(time, heads, kv_heads, dtype=dtype, head_dim=16)
    )
    minimum = 2 * q.size + k.size + v.size  # the arguments and the output
    statistics = q.size // 16 * 4 + segments.size * 4
    return (q, k, v, segments), minimum * q.dtype.itemsize + statistics


def test_blockwise_keeps_its_arguments_the_output_and_a_number_per_row():
    args, expected = shapes(64, 4, 2, jnp.bfloat16)
    assert kept_bytes(functools.partial(attention, implementation="blockwise"), *args) == expected


def test_a_policy_on_the_name_attention_saves_the_forward_pass():
    args = arguments(64, 4, 2)
    policy = jax.checkpoint_policies.save_only_these_names("attention")
    run = functools.partial(attention, implementation="blockwise")

    def loops(policy):
        saved = jax.checkpoint(run, policy=policy)
        text = str(jax.make_jaxpr(with_gradients(saved))(*args))
        return text.count("while[")

    assert loops(policy) == loops(jax.checkpoint_policies.everything_saveable)
    assert loops(policy) < loops(jax.checkpoint_policies.nothing_saveable)
    expected = with_gradients(reference)(*args)
    assert_close(with_gradients(jax.checkpoint(run, policy=policy))(*args), expected, 1e-12)


def test_blockwise_memory_grows_with_the_sequence_not_with_its_square():
    def temporary_bytes(implementation, time):
        args, _ = shapes(time, 2, 1, jnp.bfloat16)
        run = with_gradients(functools.partial(attention, implementation=implementation))
        return run.lower(*args).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes("blockwise", 2048), temporary_bytes("blockwise", 4096)
    assert long < 3 * short
    assert short < temporary_bytes("reference", 2048) / 10


@pytest.mark.parametrize("nested", [False, True], ids=["compiler", "by hand"])
def test_heads_may_be_sharded_where_other_axes_are_manual(nested):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    args = arguments(40, 4, 2, batch=4)
    run = functools.partial(blockwise.blockwise_attention, block=16)
    if nested:
        heads = P(None, None, "tensor")
        run = jax.shard_map(
            run,
            in_specs=(heads, heads, heads, P()),
            out_specs=heads,
            axis_names={"tensor"},
            check_vma=False,
        )
    step = jax.jit(
        jax.shard_map(
            lambda q, k, v, s: with_gradients(run)(q, k, v, s),
            mesh=mesh,
            in_specs=P("fsdp"),
            out_specs=P("fsdp"),
            axis_names={"fsdp"},
            check_vma=False,
        )
    )
    sharded = [jax.device_put(x, NamedSharding(mesh, P("fsdp", None, "tensor"))) for x in args[:3]]
    half = [with_gradients(reference)(*(x[rows : rows + 2] for x in args)) for rows in (0, 2)]
    expected = [np.concatenate(parts) for parts in zip(*half)]
    assert_close(step(*sharded, args[3]), expected, 1e-12)


@pytest.fixture
def cudnn_anywhere(monkeypatch):
    """Lets cuDNN's attention be lowered on a machine that does not have the library."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91500)


@pytest.mark.usefixtures("cudnn_anywhere")
def test_cudnn_lowers_to_its_kernels_and_keeps_no_mask():
    args, expected = shapes(128, 4, 2, jnp.bfloat16)
    run = maskless(functools.partial(attention, implementation="cudnn", sliding_window=32))
    text = with_gradients(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaScaleBiasSoftmax(") == 1
    assert text.count("@__cudnn$fmhaScaleBiasSoftmaxBackward(") == 1
    assert kept_bytes(run, *args) == expected


def test_auto_is_the_platforms_kernel_where_it_honours_the_settings():
    settings = {"dtype": "bfloat16", "head_dim": 128, "seq_len": 4096}
    assert choose("auto", "cpu", **settings) == "blockwise"
    assert choose("auto", "gpu", **settings) == "cudnn"
    assert choose("auto", "tpu", **settings) == "splash"
    assert choose("auto", "gpu", **{**settings, "dtype": "float32"}) == "blockwise"
    assert choose("auto", "gpu", **{**settings, "head_dim": 256}) == "blockwise"
    assert choose("auto", "tpu", **{**settings, "seq_len": 100}) == "blockwise"
    assert choose("reference", "tpu", **settings) == "reference"


@pytest.mark.parametrize(
    ("implementation", "platform", "changed", "message"),
    [
        ("cudnn", "cpu", {}, "needs an NVIDIA GPU and the platform is cpu"),
        ("cudnn", "gpu", {"dtype": "float32"}, "model.compute_dtype = 'float32'"),
        ("cudnn", "gpu", {"head_dim": 12}, "model.head_dim .* it is 12"),
        ("cudnn", "gpu", {"head_dim": 256}, "model.head_dim .* it is 256"),
        ("cudnn", "gpu", {"seq_len": 33}, "data.seq_len, and it is 33"),
        ("splash", "gpu", {}, "needs a TPU and the platform is gpu"),
        ("splash", "tpu", {"dtype": "float64"}, "model.compute_dtype = 'float64'"),
        ("splash", "tpu", {"seq_len": 200}, "data.seq_len .* multiple of 128, and it is 200"),
        ("flash", "gpu", {}, "model.attention = 'flash' is not known"),
    ],
)
def test_a_kernel_that_cannot_honour_the_settings_is_refused(
    implementation, platform, changed, message
):
    settings = {"dtype": "bfloat16", "head_dim": 128, "seq_len": 4096} | changed
    for function in (
        lambda: check(implementation, platform=platform, **settings),
        lambda: choose(implementation, platform, **settings),
    ):
        with pytest.raises(ValueError, match=f"model.attention = '{implementation}'.*"):
            function()
        with pytest.raises(ValueError, match=message):
            function()


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="'flash' is not known"):
        attention(*arguments(4, 1, 1), implementation="flash")


@pytest.mark.parametrize("window", [0, 4])
def test_decoding_from_a_cache_is_attention(window):
    time, slots = 11, 16
    q, k, v, segments = arguments(time, 4, 2, packing="one")
    expected = jax.jit(functools.partial(reference, sliding_window=window))(q, k, v, segments)
    # Keys lie in the cache in any order; the other slots hold what was never a key.
    order = np.random.default_rng(2).permutation(slots)[:time]
    positions = jnp.full((2, slots), -1).at[:, order].set(jnp.arange(time))
    cache_k, cache_v = (jnp.full((2, slots, 2, 8), 1e3).at[:, order].set(value) for value in (k, v))
    for first, last in ((0, time), (4, 7)):
        queries = jnp.broadcast_to(jnp.arange(first, last), (2, last - first))
        decode = jax.jit(functools.partial(decode_attention, sliding_window=window))
        got = decode(q[:, first:last], cache_k, cache_v, queries, positions)
        np.testing.assert_allclose(got, expected[:, first:last], atol=1e-13)


def test_a_query_that_sees_no_key_gets_zeros():
    q, k, v, _ = arguments(3, 2, 1)
    positions = jnp.broadcast_to(jnp.arange(3), (2, 3))
    got = decode_attention(q, k, v, positions, jnp.full((2, 3), -1))
    np.testing.assert_array_equal(got, jnp.zeros_like(q))
