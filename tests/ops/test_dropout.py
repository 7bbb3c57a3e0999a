"""Dropout: its rate, its independence of everything it should be independent of, any layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxscale.ops.attention.context_chunks import balanced_order
from jaxscale.ops.dropout import dropout, jitter

BATCH, TIME, WIDTH = 8, 64, 128
PLACES = np.arange(TIME)
NOISE = jax.random.bits(jax.random.key(0), (BATCH,), jnp.uint32)


@functools.partial(jax.jit, static_argnames=("site", "rate"))
def kept(noise=NOISE, layer=3, site=0, rate=0.25, place=PLACES):
    """Where nothing is dropped."""
    x = jnp.ones((len(noise), len(place), WIDTH), jnp.float32)
    return dropout(x, noise, layer, site, rate, place) > 0


def correlation(one, other):
    """Of two masks, in standard deviations of what independent ones would have."""
    one, other = (np.asarray(x, np.float64).ravel() for x in (one, other))
    return np.corrcoef(one, other)[0, 1] * np.sqrt(one.size)


@pytest.mark.proof
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate(rate):
    mask = np.asarray(kept(rate=rate))
    # Of all, and of each example, place and feature: within five standard deviations.
    for axes in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        mean = mask.mean(axis=axes)
        deviation = np.sqrt(rate * (1 - rate) / (mask.size / mean.size))
        assert np.max(np.abs(mean - (1 - rate))) < 5 * deviation


@pytest.mark.proof
def test_masks_of_other_integers_are_independent():
    """Neighbours along each dimension, and integers that differ by one bit, a power of two, or are
    exchanged; counts of pairs within a row have the variance of independent draws."""
    mask = np.asarray(kept(rate=0.5))
    found = [
        correlation(mask[1:], mask[:-1]),
        *(correlation(mask[:, n:], mask[:, :-n]) for n in (1, 2, 4, 16, 32)),
        *(correlation(mask[..., n:], mask[..., :-n]) for n in (1, 2, 4, 16, 64)),
        *(correlation(mask, kept(layer=layer, rate=0.5)) for layer in (0, 2, 4, 7, 35)),
        *(correlation(mask, kept(site=site, rate=0.5)) for site in (1, 2, 128)),
        *(correlation(mask, kept(NOISE ^ np.uint32(1 << b), rate=0.5)) for b in (0, 1, 16, 31)),
        correlation(mask, kept(place=PLACES + TIME, rate=0.5)),
        correlation(mask[..., :TIME], np.swapaxes(mask[..., :TIME], 1, 2)),
    ]
    assert np.max(np.abs(found)) < 4.5
    for axis in (1, 2):
        counts = mask.sum(axis=axis)
        assert 0.8 < counts.var() / (mask.shape[axis] / 4) < 1.25
    # Consecutive examples' noise, as a poor counter would give: still different masks.
    close = np.asarray(kept(jnp.arange(BATCH, dtype=jnp.uint32), rate=0.5))
    assert abs(correlation(close[1:], close[:-1])) < 4.5


@pytest.mark.proof
def test_what_is_kept_is_scaled_and_the_backward_pass_drops_the_same():
    x = jax.random.normal(jax.random.key(1), (BATCH, TIME, WIDTH), jnp.bfloat16)
    run = functools.partial(dropout, noise_B=NOISE, layer=3, site=0, rate=0.25, position_T=PLACES)
    out, pullback = jax.vjp(run, x)
    assert out.dtype == x.dtype
    mask = np.asarray(kept())
    scaled = (x.astype(jnp.float32) / 0.75).astype(jnp.bfloat16)
    np.testing.assert_array_equal(out, np.where(mask, scaled, 0))
    np.testing.assert_array_equal(pullback(x)[0], out)
    # Nothing of the size of x is saved.
    saved = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(run, x)[1], x))
    assert sum(leaf.size for leaf in saved) < x.size / 4
    np.testing.assert_array_equal(dropout(x, NOISE, 3, 0, 0.0, PLACES), x)


@pytest.mark.proof
def test_a_layout_drops_the_same():
    """Rows over data and fsdp by hand, positions reordered over context, tensor by the compiler,
    layers traced as in a scan or a pipeline: the same bits as on one device."""
    x = jax.random.normal(jax.random.key(1), (BATCH, TIME, WIDTH), jnp.float32)
    wanted = [dropout(x, NOISE, layer, 2, 0.3, PLACES) for layer in (0, 5)]
    names = ("data", "fsdp", "context", "tensor")
    sizes = (1, 2, 2, 2)
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 4)
    order = balanced_order(TIME, 2)

    def step(x, noise):
        def layer(x, index):
            x = jax.lax.with_sharding_constraint(x, P(None, ("context", "tensor")))
            return x, dropout(x, noise, index, 2, 0.3, order)

        return jax.lax.scan(layer, x, jnp.array([0, 5]))[1]

    run = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(("data", "fsdp")), P(("data", "fsdp"))),
        out_specs=P(None, ("data", "fsdp")),
        axis_names={"data", "fsdp"},
        check_vma=False,
    )
    got = jax.jit(run)(x[:, order], NOISE)
    assert got.sharding.shard_shape(got.shape)[2] < TIME
    np.testing.assert_array_equal(got[:, :, np.argsort(order)], wanted)


@pytest.mark.parametrize(
    ("site", "rate", "message"),
    [(0, 1.0, "rate 1.0 must be"), (0, -0.1, "rate -0.1 must"), (256, 0.1, "site 256: .* 255")],
)
def test_what_is_out_of_range_is_refused(site, rate, message):
    with pytest.raises(ValueError, match=message):
        dropout(jnp.ones((1, 2, 3)), NOISE[:1], 0, site, rate, np.arange(2))


def test_jitter_is_even_and_goes_with_the_places():
    """At a separate site: factors have the mean and variance of a uniform distribution, and depend
    on positions however a sequence is ordered."""
    x = jnp.ones((BATCH, TIME, WIDTH), jnp.bfloat16)
    factors = jitter(x, NOISE, 3, 2, 0.1, PLACES)
    assert factors.dtype == jnp.float32
    found = np.asarray(factors, np.float64)
    count = found.size
    assert 0.9 <= found.min() < 0.9 + 100 / count
    assert 1.1 - 100 / count < found.max() <= 1.1
    variance = 0.1**2 / 3
    assert abs(found.mean() - 1) < 5 * np.sqrt(variance / count)
    # The fourth moment of an even distribution is 9/5 of its squared variance.
    assert abs(found.var() / variance - 1) < 5 * np.sqrt(0.8 / count)
    assert abs(correlation(found, kept(rate=0.5))) < 4.5
    order = np.asarray(balanced_order(TIME, 4))
    reordered = jitter(x, NOISE, 3, 2, 0.1, order)
    np.testing.assert_array_equal(reordered, factors[:, order])
    with pytest.raises(ValueError, match=r"width 1\.5 must be from 0 to 1"):
        jitter(x, NOISE, 3, 2, 1.5, PLACES)
