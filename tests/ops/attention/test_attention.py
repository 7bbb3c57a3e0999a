"""Attention: the reference against loops, every implementation against the reference."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.ops.attention import platform_kernels
from jaxscale.ops.attention.attention import (
    attention,
    check,
    choose,
    decode_attention,
    score_settings,
)
from jaxscale.ops.attention.blockwise import blockwise_attention
from jaxscale.ops.attention.flash import flash_attention
from jaxscale.ops.attention.platform_kernels import maskless
from jaxscale.ops.attention.splash import splash_attention
from jaxscale.ops.rope import rotary

reference = functools.partial(attention, implementation="reference")


def blockwise(*args, block=16, **settings):
    """In small blocks."""
    scoring = score_settings(*args[:2], *args[4:6], **settings)
    return blockwise_attention(*args, scoring=scoring, block=block)


def arguments(
    time,
    heads,
    kv_heads,
    *,
    head_dim=8,
    value_dim=0,
    packing="packed",
    dtype=jnp.float64,
    batch=2,
    key_time=0,
    blind=-1,
    buckets=0,
    sinks=0,
):
    """q, k, v, segments; then the keys' segments, the table of a bias, and sinks, if there are
    any."""
    rng = np.random.default_rng(0)
    batch = 4 if packing == "every" else batch

    def documents(time):
        ways = {
            "one": np.ones((batch, time)),
            "packed": 1 + np.sort(rng.integers(0, 4, size=(batch, time))),
            "padded": np.where(np.arange(time) < 2 * time // 3, 1, 0) * np.ones((batch, 1)),
            "mixed": rng.integers(0, 3, size=(batch, time)),  # documents in no order
        }
        ways["every"] = np.concatenate([way[:1] for way in ways.values()])  # a row of each
        return jnp.asarray(ways[packing], jnp.int32)

    keys = key_time or time
    q, k, v = (
        jnp.asarray(rng.normal(size=(batch, t, n, size)), dtype)
        for t, n, size in (
            (time, heads, head_dim),
            (keys, kv_heads, head_dim),
            (keys, kv_heads, value_dim or head_dim),
        )
    )
    segments = documents(time)
    if not (key_time or buckets or sinks):
        return q, k, v, segments
    table = jnp.asarray(rng.normal(size=(buckets, heads)), dtype) if buckets else None
    far = documents(key_time) if key_time else None
    far = jnp.where(far == blind, 1, far) if blind >= 0 else far
    found = q, k, v, segments, far, table
    return (*found, jnp.asarray(rng.normal(size=heads), dtype)) if sinks else found


def with_gradients(function):
    """`differentiated`, compiled in a hurry: these programs run once."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(differentiated(function), compiler_options=options)


def differentiated(function):
    """The output and the gradients of q, k, v, bias and sinks, for a cotangent that differs
    everywhere."""

    def run(q, k, v, segments, *others):
        out, pullback = jax.vjp(
            lambda q, k, v, tables: function(q, k, v, segments, *others[:1], *tables),
            q,
            k,
            v,
            others[1:],
        )
        cotangent = jnp.sin(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype)
        *grads, tables = pullback(cotangent)
        return (out, *grads, *(table for table in tables if table is not None))

    return run


def assert_close(got, expected, tolerance):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float64), np.asarray(other, np.float64), atol=tolerance
        )


@pytest.mark.proof
@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, 9, 0),
        ({"sliding_window": 3}, 2, 0),
        ({"sliding_window": 3, "causal": False, "soft_cap": 0.5}, 2, 2),
        ({"causal": False, "scale": 0.7, "key_time": 6}, 9, 9),
        ({"scale": 1.0, "buckets": 4, "max_distance": 5}, 9, 0),
    ],
)
def test_the_reference_is_a_softmax_over_what_each_query_sees(settings, before, after):
    """Before and after: how far a query sees."""
    settings = dict(settings)
    extra = {name: settings.pop(name, 0) for name in ("key_time", "buckets")}
    args = arguments(9, 4, 2, packing="mixed", **extra)
    out = reference(*args, **settings)
    q, k, v, segments, key_segments, table = (*map(np.asarray, args), None, None)[:6]
    key_segments = key_segments if extra["key_time"] else segments
    for row, query, head in np.ndindex(2, 9, 4):
        seen = [
            key
            for key in range(max(0, query - before), min(query + after + 1, k.shape[1]))
            if key_segments[row, key] == segments[row, query]
        ]
        scores = k[row, seen, head // 2] @ q[row, query, head] * settings.get("scale", 8**-0.5)
        if cap := settings.get("soft_cap"):
            scores = cap * np.tanh(scores / cap)
        if extra["buckets"]:
            # Distances 0, 1, 2 and 3, then 4 and more.
            scores += table[np.digitize(query - np.array(seen), [1, 2, 4]), head]
        p = np.exp(scores) / np.exp(scores).sum() if seen else np.zeros(0)
        np.testing.assert_allclose(out[row, query, head], p @ v[row, seen, head // 2], atol=1e-14)


CASES: dict[str, dict] = {
    "causal": {},
    "as many key heads": {"heads": 2},
    "one key head, window of a block and one": {"kv_heads": 1, "sliding_window": 17},
    "window of one": {"sliding_window": 1},
    "capped and scaled, window": {"soft_cap": 0.7, "scale": 0.6, "sliding_window": 20},
    "both ways": {"causal": False},
    "both ways, window, capped": {"causal": False, "sliding_window": 18, "soft_cap": 0.7},
    "bias": {"buckets": 6, "max_distance": 11, "scale": 1.0},
    "bias, both ways, capped": {"buckets": 8, "max_distance": 25, "causal": False, "soft_cap": 2.0},
    "sinks": {"sinks": 1, "sliding_window": 20},
    "cross": {"key_time": 23, "causal": False, "scale": 0.4},
    "cross, more keys, capped": {"key_time": 60, "causal": False, "soft_cap": 0.7},
}
"""Settings of `attention`; documents are packed in every way in each. Key time is that of cross
attention; buckets are of a position bias."""


def parity(case, function, time=41, dtype=jnp.float64):
    """What `function` makes of a case, and the reference of the same numbers in float64; outputs
    and gradients."""
    case = {"heads": 4, "kv_heads": 2, **case}
    sizes = [case.pop(name) for name in ("heads", "kv_heads")]
    names = ("key_time", "buckets", "sinks", "head_dim", "value_dim", "blind")
    extra = {name: case.pop(name) for name in names if name in case}
    args = arguments(time, *sizes, packing="every", dtype=dtype, **extra)
    got = with_gradients(functools.partial(function, **case))(*args)
    exact = [x if x is None or x.dtype == jnp.int32 else x.astype(jnp.float64) for x in args]
    return got, with_gradients(functools.partial(reference, **case))(*exact)


@pytest.mark.proof(but=("causal", "capped and scaled, window"))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_blockwise_is_the_reference(case):
    assert_close(*parity(case, blockwise), 1e-12)


@pytest.mark.proof
def test_less_than_a_block():
    args = arguments(5, 2, 1)
    got = with_gradients(functools.partial(attention, implementation="blockwise"))(*args)
    assert_close(got, with_gradients(reference)(*args), 1e-12)


@pytest.mark.proof
@pytest.mark.parametrize(("batch", "time"), [(1, 150), (8, 130)])
def test_blockwise_is_the_reference_with_the_blocks_it_takes_by_itself(batch, time):
    args = arguments(time, 4, 2, batch=batch)
    got = with_gradients(functools.partial(attention, implementation="blockwise"))(*args)
    assert_close(got, with_gradients(reference)(*args), 1e-12)


@pytest.mark.proof
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_narrow_types_are_close_to_float64_and_kept(implementation, dtype):
    args = arguments(40, 4, 2, dtype=dtype)
    got = with_gradients(functools.partial(attention, implementation=implementation))(*args)
    expected = with_gradients(reference)(*(arg.astype(jnp.float64) for arg in args[:3]), args[3])
    assert [value.dtype for value in got] == [dtype] * 4
    assert_close(got, expected, 12 * float(jnp.finfo(dtype).eps))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kv_heads", "settings"),
    [
        (1, {}),
        (2, {"sliding_window": 100, "scale": 0.2, "soft_cap": 0.7}),
        (1, {"causal": False, "scale": 1.0}),
        (1, {"causal": False, "sliding_window": 70}),
    ],
)
def test_splash_is_the_reference(kv_heads, settings):
    with jax.enable_x64(False):
        args = arguments(256, 2, kv_heads, head_dim=16, dtype=jnp.float32, batch=1)
        expected = with_gradients(functools.partial(reference, **settings))(*args)
        run = functools.partial(splash, **settings)
        assert_close(with_gradients(run)(*args), expected, 1e-5)


def splash(*args, **settings):
    """Its kernel, on a CPU."""
    return platform_kernels.splash(*args, score_settings(*args[:2], **settings), interpret=True)


FLASH_CASES: dict[str, dict] = {
    "sinks, window, capped": {"sinks": 1, "sliding_window": 20, "soft_cap": 0.7},
    "three queries a key, both ways, window, wide keys": {
        "heads": 3,
        "kv_heads": 1,
        "head_dim": 24,
        "value_dim": 16,
        "causal": False,
        "sliding_window": 18,
    },
    "bias, both ways, capped": {
        "buckets": 8,
        "max_distance": 21,
        "causal": False,
        "soft_cap": 2.0,
    },
    "cross, fewer keys": {"key_time": 32, "causal": False, "scale": 0.4, "blind": 2},
}
"""As `CASES`; blind is a document without keys."""


def flash(*args, **settings):
    """Its kernels, on a CPU."""
    scoring = score_settings(*args[:2], *args[4:6], **settings)
    return flash_attention(*args, scoring=scoring, interpret=True)


@pytest.mark.proof(but=("sinks, window, capped",))
@pytest.mark.parametrize("case", FLASH_CASES.values(), ids=FLASH_CASES)
def test_flash_is_the_reference(case):
    got, expected = parity(case, flash, time=48)
    assert_close(got, expected, 1e-12)
    if "blind" in case:
        assert float(jnp.min(jnp.max(jnp.abs(got[0]), axis=(2, 3)))) == 0


@pytest.mark.proof
def test_flash_is_close_in_bfloat16_and_large_scores_do_not_overflow():
    args = arguments(48, 4, 2, dtype=jnp.bfloat16, packing="every")
    run = with_gradients(flash)
    got = run(*args)
    expected = with_gradients(reference)(*(arg.astype(jnp.float64) for arg in args[:3]), args[3])
    assert [value.dtype for value in got] == [jnp.bfloat16] * 4
    assert_close(got, expected, 12 * float(jnp.finfo(jnp.bfloat16).eps))
    for value in run(300 * args[0], 300 * args[1], *args[2:]):
        assert bool(jnp.all(jnp.isfinite(value)))


@pytest.mark.proof
def test_flash_keeps_no_scores_and_its_results_by_name():
    args, expected = shapes(256, 4, 2, jnp.bfloat16)
    assert kept_bytes(flash, *args) == expected

    def program(run):
        return str(jax.make_jaxpr(differentiated(run))(*args))

    def kernels(policy):
        return program(jax.checkpoint(flash, policy=policy)).count("pallas_call[")

    scores = r"256,(\d,)*256\b"
    assert not re.search(scores, program(flash))
    biased = jax.eval_shape(lambda: arguments(256, 4, 2, dtype=jnp.bfloat16, buckets=8))
    assert not re.search(scores, str(jax.make_jaxpr(differentiated(flash))(*biased)))
    assert re.search(scores, program(functools.partial(attention, implementation="reference")))
    policies = jax.checkpoint_policies
    assert kernels(policies.everything_saveable) < kernels(policies.nothing_saveable)
    if jax.__version_info__ >= (0, 12):  # before, a kernel that nobody reads is left to XLA
        by_name = policies.save_only_these_names("attention")
        assert kernels(by_name) == kernels(policies.everything_saveable)


@pytest.mark.proof
def test_scaling_in_the_rotation_adds_no_rounding_to_that_of_queries_and_keys():
    """As on a TPU. Heads of 128: their scale is not a power of two. Errors of scores of size 1,
    compared with those of queries and keys that are rounded and then scaled exactly."""
    rng = np.random.default_rng(0)
    positions = jnp.asarray(rng.integers(0, 5000, (1, 256)), jnp.int32)
    q, k = (jnp.asarray(rng.normal(size=(1, 256, 1, 128)), jnp.bfloat16) for _ in "qk")

    def scores(rope, scale=1.0):
        return scale * np.einsum("btnh,bsnh->bts", *(np.float64(rope(x)) for x in (q, k)))

    turned = functools.partial(rotary, positions_BT=positions, theta=1e4)
    exact = scores(lambda x: turned(x.astype(jnp.float64)), 128**-0.5)
    rounded, ours = (
        np.std(one - exact)
        for one in (scores(turned, 128**-0.5), scores(functools.partial(turned, factor=128**-0.25)))
    )
    assert rounded > 1e-3
    assert ours < 1.05 * rounded  # rounded twice: 1.22


@pytest.mark.proof
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


@pytest.mark.proof
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_a_packed_document_is_attended_to_as_if_it_were_alone(implementation):
    q, k, v, segments = arguments(40, 2, 1, batch=1)
    run = jax.jit(functools.partial(attention, implementation=implementation))
    packed = run(q, k, v, segments)
    for document in (1, 3):
        here = np.flatnonzero(segments[0] == document)
        alone = jax.jit(reference)(*(np.asarray(x)[:, here] for x in (q, k, v, segments)))
        np.testing.assert_allclose(packed[:, here], alone, atol=1e-13)


@pytest.mark.proof
def test_large_scores_do_not_overflow():
    q, k, v, segments = arguments(40, 2, 1, dtype=jnp.float32)
    run = with_gradients(blockwise)
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


@pytest.mark.proof
def test_a_policy_on_the_name_attention_saves_the_forward_pass():
    args = arguments(64, 4, 2)
    policy = jax.checkpoint_policies.save_only_these_names("attention")
    run = functools.partial(attention, implementation="blockwise")

    def loops(policy):
        saved = jax.checkpoint(run, policy=policy)
        text = str(jax.make_jaxpr(differentiated(saved))(*args))
        return text.count("while[")

    assert loops(policy) == loops(jax.checkpoint_policies.everything_saveable)
    assert loops(policy) < loops(jax.checkpoint_policies.nothing_saveable)
    expected = with_gradients(reference)(*args)
    assert_close(with_gradients(jax.checkpoint(run, policy=policy))(*args), expected, 1e-12)


@pytest.mark.compiles
@pytest.mark.proof
def test_blockwise_memory_grows_with_the_sequence_not_with_its_square():
    def temporary_bytes(implementation, time):
        args, _ = shapes(time, 2, 1, jnp.bfloat16)
        run = with_gradients(functools.partial(attention, implementation=implementation))
        return run.lower(*args).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes("blockwise", 2048), temporary_bytes("blockwise", 4096)
    assert long < 3 * short
    assert short < temporary_bytes("reference", 2048) / 10


@pytest.mark.proof
@pytest.mark.parametrize("nested", [False, True], ids=["compiler", "by hand"])
def test_heads_may_be_sharded_where_other_axes_are_manual(nested):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    args = arguments(40, 4, 2, batch=4)
    run = blockwise
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
            differentiated(run),
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
def on_cpu(monkeypatch):
    """Lets `attention` run platforms' kernels on a CPU: splash interpreted, and XLA's attention,
    which has the same arguments, in place of cuDNN's."""
    splash, plain = platform_kernels.splash, jax.nn.dot_product_attention
    monkeypatch.setattr(platform_kernels, "splash", functools.partial(splash, interpret=True))
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *args, **settings: plain(*args, **{**settings, "implementation": "xla"}),
    )


@pytest.fixture
def cudnn_anywhere(monkeypatch):
    """Lets cuDNN's attention be lowered on a machine that has neither the library nor a GPU."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91500)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)


@pytest.mark.usefixtures("cudnn_anywhere")
def test_cudnn_reads_no_mask_of_rows_of_one_document():
    """Also, without a mask it needs no `maskless`, and uses the kernel's window."""
    args, expected = shapes(128, 4, 2, jnp.bfloat16)

    def program(**settings):
        run = functools.partial(attention, implementation="cudnn", **settings)
        lowered = with_gradients(run).trace(*args).lower(lowering_platforms=("cuda",))
        return lowered.as_text().replace("\\22", '"'), kept_bytes(run, *args)

    unmasked, kept = program(one_document=True, sliding_window=32)
    assert unmasked.count("@__cudnn$fmhaSoftmax(") == 1
    assert unmasked.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert unmasked.count('"sliding_window_length": 32') == 2
    assert "x128x128x" not in unmasked
    assert kept == expected - args[3].size * 4  # not even the segments
    whole, _ = program(one_document=True, sliding_window=128)
    assert whole.count('"sliding_window_length": 0') == 2
    for settings in ({}, {"one_document": True, "causal": False}):
        masked, kept = program(**settings)
        assert "x128x128x" in masked
        assert kept > expected


@pytest.mark.proof
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("implementation", ["cudnn", "splash"])
@pytest.mark.parametrize("settings", [{}, {"sliding_window": 1}, {"sliding_window": 100}])
def test_rows_of_one_document_need_no_segments(implementation, settings):
    """Whatever the segments say, output and gradients are those of one document a row; before
    padding, which is not compared and has no gradient."""
    with jax.enable_x64(False):
        q, k, v, padded = arguments(
            256, 2, 1, head_dim=16, packing="padded", dtype=jnp.float32, batch=1
        )
        real = padded[..., None, None] == 1

        def run(function):
            def before_padding(*args, **settings):
                return jnp.where(real, function(*args, **settings), 0)

            return with_gradients(functools.partial(before_padding, **settings))

        expected = run(reference)(q, k, v, padded)
        kernel = functools.partial(attention, implementation=implementation, one_document=True)
        for segments in (padded, 1 + (jnp.arange(256)[None] > 90)):
            assert_close(run(kernel)(q, k, v, segments), expected, 1e-5)


@pytest.mark.proof(
    but=("padded-settings2-cudnn", "padded-settings3-cudnn", "packed-settings1-cudnn")
)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("implementation", ["cudnn", "splash"])
@pytest.mark.parametrize(
    ("packing", "settings"),
    [
        ("packed", {}),
        ("packed", {"sliding_window": 9}),
        ("padded", {"one_document": True, "causal": False}),
        ("padded", {"one_document": True, "causal": False, "sliding_window": 9}),
    ],
)
def test_other_documents_and_padding_are_not_seen(implementation, packing, settings):
    """Documents that share a row; and padding after the only one, where a token sees both ways."""
    with jax.enable_x64(False):
        args = arguments(128, 2, 1, head_dim=16, packing=packing, dtype=jnp.float32)
        run = functools.partial(attention, **settings)
        got, expected = (run(*args, implementation=name) for name in (implementation, "reference"))
        assert_close([got], [expected], 1e-5)


@pytest.mark.usefixtures("cudnn_anywhere")
def test_cudnn_lowers_to_its_kernels_and_keeps_no_mask():
    args, expected = shapes(128, 4, 2, jnp.bfloat16)

    def text(run):
        run = with_gradients(run).trace(*args).lower(lowering_platforms=("cuda",))
        return run.as_text().replace("\\22", '"')

    cudnn = functools.partial(attention, implementation="cudnn", sliding_window=32)
    causal = text(maskless(cudnn))
    assert causal.count("@__cudnn$fmhaScaleBiasSoftmax(") == 1
    assert causal.count("@__cudnn$fmhaScaleBiasSoftmaxBackward(") == 1
    assert kept_bytes(maskless(cudnn), *args) == expected
    both_ways = text(functools.partial(cudnn, causal=False, scale=1.5))
    for program, kernel in ((causal, "CAUSAL"), (both_ways, "NO_MASK")):
        assert f'"mask_type": "{kernel}"' in program
    assert '"fmha_scale": 1.5' in both_ways


@pytest.mark.usefixtures("cudnn_anywhere")
def test_cudnn_pads_no_values_that_are_narrower_than_keys():
    args = jax.eval_shape(
        lambda: arguments(128, 2, 2, dtype=jnp.bfloat16, head_dim=192, value_dim=128)
    )
    run = functools.partial(attention, implementation="cudnn", one_document=True, scale=0.1)
    text = with_gradients(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("fmhaSoftmax(", "fmhaSoftmaxBackward("):
        assert text.count(f"@__cudnn${kernel}") == 1
    assert "stablehlo.pad" not in text
    assert jax.eval_shape(run, *args).shape == (2, 128, 2, 128)


def test_auto_is_the_platforms_kernel_where_it_honours_the_settings():
    settings: dict = {"dtype": "bfloat16", "head_dim": 128, "seq_len": 4096}
    assert choose("auto", "cpu", **settings) == "blockwise"
    assert choose("auto", "gpu", **settings) == "flash"
    assert choose("auto", "tpu", **settings) == "splash"
    assert choose("auto", "gpu", **{**settings, "dtype": "float32"}) == "blockwise"
    assert choose("auto", "gpu", **{**settings, "head_dim": 256}) == "flash"
    assert choose("auto", "gpu", **{**settings, "head_dim": 96}) == "flash"
    assert choose("auto", "gpu", **{**settings, "seq_len": 4104}) == "cudnn"
    assert choose("auto", "gpu", **{**settings, "head_dim": 192}) == "flash"
    assert choose("auto", "gpu", **{**settings, "head_dim": 288}) == "blockwise"
    assert choose("auto", "gpu", **settings, spread=True) == "flash"
    assert choose("auto", "tpu", **settings, spread=True) == "splash"
    assert choose("auto", "tpu", **{**settings, "seq_len": 100}) == "blockwise"
    assert choose("reference", "tpu", **settings) == "reference"
    assert choose("auto", "gpu", **settings, uses=["soft_cap", "sinks"]) == "flash"
    assert choose("auto", "gpu", **settings, uses=["bias", "cross"]) == "flash"
    assert choose("auto", "tpu", **settings, uses=["soft_cap"]) == "splash"
    assert choose("auto", "tpu", **settings, uses=["soft_cap", "cross", "bias"]) == "splash"
    assert choose("blockwise", "tpu", **settings, uses=["bias", "cross"]) == "blockwise"


@pytest.mark.parametrize("no_packing", [{"one_document": True}, {"causal": False}])
def test_auto_on_gpus_is_cudnn_where_documents_hide_no_earlier_token(no_packing):
    settings: dict = {"dtype": "bfloat16", "head_dim": 64, "seq_len": 4096} | no_packing
    assert choose("auto", "gpu", **settings) == "cudnn"
    assert choose("auto", "gpu", **settings, uses=["sinks"]) == "flash"
    assert choose("auto", "gpu", **settings, spread=True) == "flash"
    latent = settings | {"head_dim": 192, "value_dim": 128}
    assert choose("auto", "gpu", **latent, generation="sm80") == "flash"
    assert choose("auto", "gpu", **latent, generation="sm90") == "cudnn"
    assert choose("auto", "tpu", **settings) == "splash"


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
        ("splash", "tpu", {"seq_len": 200}, "a multiple of 16 .* to 200 tokens"),
        ("triton", "gpu", {}, "model.attention = 'triton' is not known"),
        ("flash", "cpu", {}, "needs an NVIDIA GPU and the platform is cpu"),
        ("flash", "gpu", {"dtype": "float32"}, "model.compute_dtype = 'float32'"),
        ("flash", "gpu", {"head_dim": 264}, "model.head_dim to be at most 256, and it is 264"),
        ("flash", "gpu", {"seq_len": 40}, "a multiple of 16 .* to 40 tokens"),
        (
            "cudnn",
            "gpu",
            {"head_dim": 192, "value_dim": 128, "generation": "sm80"},
            "values of another size .* model.value_head_dim = 128 on sm80",
        ),
        (
            "cudnn",
            "gpu",
            {"uses": ["soft_cap"]},
            "no soft cap .* reference, blockwise, flash, splash",
        ),
        ("cudnn", "gpu", {"uses": ["cross"]}, "has no cross attention"),
        ("cudnn", "gpu", {"uses": ["bias"]}, "no relative position bias.* flash, splash"),
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


@pytest.mark.proof(
    but=("blockwise-settings4-with a window", "triton-settings0-'triton' is not known")
)
@pytest.mark.parametrize(
    ("implementation", "settings", "message"),
    [
        ("triton", {}, "'triton' is not known"),
        ("cudnn", {"soft_cap": 30.0}, "'cudnn' has no soft cap of scores, .* 'auto'"),
        ("cudnn", {"buckets": 8}, "'cudnn' has no relative position bias"),
        ("blockwise", {"key_time": 6}, "cross attention with causal order"),
        ("blockwise", {"key_time": 6, "causal": False, "sliding_window": 2}, "with a window"),
        (
            "blockwise",
            {"key_time": 6, "causal": False, "buckets": 8},
            "with a position bias.* no distance",
        ),
        ("reference", {"buckets": 3, "causal": False}, "bias of 3 buckets .* at least 4"),
        ("blockwise", {"buckets": 32, "max_distance": 16}, "a distance above 16"),
    ],
)
def test_what_attention_cannot_do_is_refused_where_it_is_called(implementation, settings, message):
    settings = dict(settings)
    extra = {name: settings.pop(name, 0) for name in ("key_time", "buckets")}
    with pytest.raises(ValueError, match=message):
        attention(*arguments(4, 1, 1, **extra), implementation=implementation, **settings)


def test_keys_of_another_length_need_segments():
    q, k, v, segments = arguments(4, 1, 1)
    with pytest.raises(ValueError, match="4 queries and 3 keys: cross attention needs"):
        attention(q, k[:, 1:], v[:, 1:], segments, implementation="blockwise", causal=False)


@pytest.mark.proof(but=("{'scale': 1.0, 'max_distance': 6}",))
@pytest.mark.parametrize(
    "settings",
    [{}, {"sliding_window": 4, "soft_cap": 0.7}, {"scale": 1.0, "max_distance": 6}],
    ids=str,
)
def test_decoding_from_a_cache_is_attention(settings):
    time, slots = 11, 16
    q, k, v, segments, _, bias = arguments(time, 4, 2, packing="one", buckets=6)
    bias = bias if "max_distance" in settings else None
    expected = jax.jit(functools.partial(reference, **settings))(q, k, v, segments, None, bias)
    # Keys lie in the cache in any order; the other slots hold what was never a key.
    order = np.random.default_rng(2).permutation(slots)[:time]
    positions = jnp.full((2, slots), -1).at[:, order].set(jnp.arange(time))
    cache_k, cache_v = (jnp.full((2, slots, 2, 8), 1e3).at[:, order].set(value) for value in (k, v))
    for first, last in ((0, time), (4, 7)):
        queries = jnp.broadcast_to(jnp.arange(first, last), (2, last - first))
        decode = jax.jit(functools.partial(decode_attention, **settings))
        got = decode(q[:, first:last], cache_k, cache_v, queries, positions, bias)
        np.testing.assert_allclose(got, expected[:, first:last], atol=1e-13)


def test_a_query_that_sees_no_key_gets_zeros():
    q, k, v, _ = arguments(3, 2, 1)
    positions = jnp.broadcast_to(jnp.arange(3), (2, 3))
    got = decode_attention(q, k, v, positions, jnp.full((2, 3), -1))
    np.testing.assert_array_equal(got, jnp.zeros_like(q))


def in_parts(kernel, length):
    """Attention of queries a part at a time, each to the keys up to its own: the gradients of keys
    and values are summed over the parts."""

    def attend(q, k, v, segments, sinks):
        def one(begin):
            some, of_some = (
                jax.lax.dynamic_slice_in_dim(x, begin, length, axis=1) for x in (q, segments)
            )
            return kernel(some, k, v, of_some, segments, None, sinks, begin)

        parts = jax.lax.map(one, jnp.arange(0, q.shape[1], length, dtype=jnp.int32))
        return jnp.concatenate(list(parts), axis=1)

    return attend


@pytest.mark.proof(but=("blockwise",))
@pytest.mark.parametrize("implementation", ["reference", "blockwise", "flash", "splash"])
def test_queries_may_be_a_part_of_the_sequence(implementation):
    q, k, v, segments, _, _, sinks = arguments(48, 4, 2, sinks=1)
    settings = {"sliding_window": 19}
    kernels = {"flash": flash_attention, "splash": splash_attention}
    if implementation in kernels:
        scoring = score_settings(q, k, segments, part=True, **settings)
        kernel = functools.partial(kernels[implementation], scoring=scoring, interpret=True)
    else:
        kernel = functools.partial(attention, implementation=implementation, **settings)

    @functools.partial(jax.jit, static_argnums=0)
    def run(attend):
        out, pullback = jax.vjp(lambda q, k, v, s: attend(q, k, v, segments, s), q, k, v, sinks)
        return (out, *pullback(jnp.sin(jnp.arange(out.size)).reshape(out.shape)))

    def whole(q, k, v, segments, sinks):
        return reference(q, k, v, segments, None, None, sinks, **settings)

    assert_close(run(in_parts(kernel, 16)), run(whole), 1e-12)


def test_cudnn_has_no_part_of_a_sequence():
    q, k, v, segments = arguments(8, 2, 2)
    with pytest.raises(ValueError, match="no queries that are a part of a sequence"):
        attention(q, k, v, segments, segments, None, None, 0, implementation="cudnn")
