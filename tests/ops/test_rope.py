"""Rotary positions: against an independent formula, and the properties they exist for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.rope import RopeScaling, rotary, rotary_on_tpu
from jaxscale.ops.sizes import LANES

B, T, N, H = 2, 6, 3, 16


def arguments(dtype=jnp.float64, heads=N):
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 50_000, size=(B, T)).astype(np.int32)
    return jnp.asarray(rng.normal(size=(B, T, heads, H)), dtype), positions


def complex_rotary(x, positions, theta, scaling):
    """The textbook form: each pair of features is a complex number, times exp(i * angle)."""
    frequencies = np.array([theta ** (-2 * pair / H) for pair in range(H // 2)])
    for pair, frequency in enumerate(frequencies):
        wavelength = 2 * np.pi / frequency
        if wavelength > 8192 / 1.0:
            frequencies[pair] = frequency / scaling
        elif wavelength > 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequencies[pair] = (1 - smooth) * frequency / scaling + smooth * frequency
    rotate = np.exp(1j * positions[..., None, None] * frequencies)
    turned = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * rotate
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize(("theta", "scaling"), [(1e4, 1.0), (5e5, 1.0), (5e5, 8.0), (5e5, 32.0)])
def test_rotary_is_multiplication_by_a_complex_number(theta, scaling):
    x, positions = arguments()
    np.testing.assert_allclose(
        rotary(x, positions, theta=theta, scaling=RopeScaling("llama3", scaling)),
        complex_rotary(np.asarray(x), positions, theta, scaling),
        atol=1e-10,
    )


def test_llama_3_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    x, positions = arguments()
    plain = rotary(x, positions, theta=5e5)
    scaled = rotary(x, positions, theta=5e5, scaling=RopeScaling("llama3", 8.0))
    pairs = np.arange(H // 2)
    wavelengths = 2 * np.pi * 5e5 ** (2 * pairs / H)
    short, long = pairs[wavelengths < 8192 / 4], pairs[wavelengths > 8192]
    assert len(short)
    assert len(long)
    np.testing.assert_array_equal(plain[..., short], scaled[..., short])
    stretched = rotary(x, positions / 8, theta=5e5)
    np.testing.assert_allclose(stretched[..., long], scaled[..., long], atol=1e-12)


def test_scores_depend_on_the_distance_only():
    q, positions = arguments()
    k = q[::-1]
    product = lambda shift: jnp.einsum(  # noqa: E731
        "btnh,bsnh->bnts",
        rotary(q, positions + shift, theta=1e4),
        rotary(k, positions + shift, theta=1e4),
    )
    np.testing.assert_allclose(product(0), product(1234), atol=1e-9)


def test_position_zero_rotates_nothing_and_lengths_are_kept():
    x, positions = arguments()
    np.testing.assert_array_equal(rotary(x, positions * 0, theta=1e4), x)
    np.testing.assert_allclose(
        jnp.linalg.norm(rotary(x, positions, theta=1e4), axis=-1), jnp.linalg.norm(x, axis=-1)
    )


@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_narrow_types_are_computed_in_float32_and_rounded_once(dtype):
    x, _ = arguments(dtype)
    positions = jnp.tile(jnp.arange(T), (B, 1)) + 4000
    exact = rotary(x.astype(jnp.float64), positions, theta=1e4)
    got = rotary(x, positions, theta=1e4)
    assert got.dtype == dtype
    # The angle itself, near 4000, has float32's rounding.
    tolerance = max(float(jnp.finfo(dtype).eps), 4000 * float(jnp.finfo(jnp.float32).eps))
    np.testing.assert_allclose(got.astype(jnp.float64), exact, atol=4 * tolerance)


def test_the_gradient_rotates_back_and_keeps_no_array_of_the_inputs_size():
    x, positions = arguments()
    turned, pullback = jax.vjp(lambda x: rotary(x, positions, theta=1e4), x)
    np.testing.assert_allclose(pullback(turned)[0], x, atol=1e-12)
    kept = [leaf.size for leaf in jax.tree.leaves(pullback)]
    assert max(kept, default=0) <= B * T


YARN = RopeScaling("yarn", 4.0, original_context=64, high_turns=32.0)


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_scales_all():
    x, positions = arguments()
    scaled = rotary(x, positions, theta=1e4, scaling=YARN) / (1 + 0.1 * np.log(4))
    rotations = 64 * 1e4 ** (-2 * np.arange(H // 2) / H) / (2 * np.pi)
    assert rotations[0] < 32  # no pair is fast enough for the usual bound, but the first is kept
    plain, stretched = (rotary(x, positions / by, theta=1e4) for by in (1, 4))
    np.testing.assert_allclose(scaled[..., 0], plain[..., 0], atol=1e-9)
    slow = np.flatnonzero(rotations < 0.1)
    assert len(slow)
    np.testing.assert_allclose(scaled[..., slow], stretched[..., slow], atol=1e-9)


def test_linear_scaling_divides_positions():
    x, positions = arguments()
    scaled = rotary(x, positions, theta=1e4, scaling=RopeScaling("linear", 4.0))
    np.testing.assert_allclose(scaled, rotary(x, positions / 4, theta=1e4), atol=1e-9)


def test_the_features_beyond_the_rotated_ones_are_only_scaled():
    x, positions = arguments()
    turned = rotary(x, positions, theta=1e4, rotary_dim=4, factor=0.5)
    np.testing.assert_array_equal(turned[..., 4:], 0.5 * x[..., 4:])
    alone = rotary(x[..., :4], positions, theta=1e4, factor=0.5)
    np.testing.assert_array_equal(turned[..., :4], alone)


@pytest.mark.parametrize(
    ("heads", "scaling"), [(1, RopeScaling("llama3", 8.0)), (6, YARN)], ids=["llama3", "yarn"]
)
def test_the_kernel_rotates_and_rotates_back_as_rotary_does(heads, scaling):
    """Interpreted here: the same multiplications and sums in float32, up to their order."""
    rng = np.random.default_rng(0)

    def value_and_gradient(function):
        def loss(x):
            turned = function(x, positions, theta=1e4, scaling=scaling, factor=0.3)
            return jnp.sum(jnp.sin(turned)), turned

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    with jax.enable_x64(False):
        positions = jnp.asarray(rng.integers(0, 5000, (2, 256)), jnp.int32)
        x = jnp.asarray(rng.normal(size=(2, 256, heads, LANES)), jnp.float32)
        kernel = functools.partial(rotary_on_tpu, interpret=True)
        (_, got), got_gradient = value_and_gradient(kernel)(x)
        (_, expected), gradient = value_and_gradient(rotary)(x)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    np.testing.assert_allclose(got_gradient, gradient, atol=1e-6)


def test_the_kernel_keeps_its_type_and_nothing_but_the_positions():
    x = jax.ShapeDtypeStruct((2, 256, 3, LANES), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def both(x, positions):
        rotate = functools.partial(rotary_on_tpu, theta=1e4, interpret=True)
        return jax.vjp(lambda x: rotate(x, positions), x)

    turned, pullback = jax.eval_shape(both, x, positions)
    assert (turned.shape, turned.dtype) == (x.shape, x.dtype)
    assert [leaf.shape for leaf in jax.tree.leaves(pullback)] == [positions.shape]
