"""Dropout and jitter with noise that does not depend on the layout.

Shapes: B batch, T time, D features.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array


def dropout(
    x_BTD: Array,
    noise_B: Array,
    layer: Array | int,
    site: int,
    rate: float,
    position_T: Array,
) -> Array:
    """Sets each value to zero with probability `rate`, and divides the others by `1 - rate`.

    The mask is a function of the integers (noise of the example, layer, site, position, feature),
    so it is the same in every layout. The backward pass recomputes it; no mask is saved.

    Args:
      noise_B: uint32, of each example.
      layer: its index in the model, traced or not; below 2**24.
      site: the number of the dropout in its layer; 0 .. 255.
      rate: from 0, which returns x itself, to below 1.
      position_T: of each token in its sequence, before context parallelism reorders it; [T] or
        [B, T].

    Raises:
      ValueError: a rate or a site out of range.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout of rate {rate} must be at least 0 and below 1")
    if rate == 0:
        return x_BTD
    where = _where(layer, site)
    threshold = jnp.uint32(min(round(rate * 2**32), 2**32 - 1))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def drop(x_BTD: Array, noise_B: Array, where: Array, place: Array) -> Array:
        words = _words(x_BTD.shape, noise_B, where, place)
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        kept_BTD = (x_BTD.astype(wide) * jnp.asarray(1 / (1 - rate), wide)).astype(x_BTD.dtype)
        return jnp.where(words >= threshold, kept_BTD, jnp.zeros_like(x_BTD))

    return drop(x_BTD, noise_B, where, position_T)


def jitter(
    x_BTD: Array,
    noise_B: Array,
    layer: Array | int,
    site: int,
    width: float,
    position_T: Array,
) -> Array:
    """Multiplies each value by a uniform factor between 1 - width and 1 + width, in float32 or
    wider (Fedus et al., Switch Transformers, arXiv 2101.03961, section 2.4).

    Args:
      noise_B, layer, site, position_T: as in `dropout`.
      width: from 0 to 1.
    """
    if not 0 <= width <= 1:
        raise ValueError(f"jitter of width {width} must be from 0 to 1")

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def scale(x_BTD: Array, noise_B: Array, where: Array, place: Array) -> Array:
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        words = _words(x_BTD.shape, noise_B, where, place)
        even = (words >> 8).astype(wide) * 2.0**-23 - 1  # exact in float32
        return x_BTD.astype(wide) * (1 + width * even)

    return scale(x_BTD, noise_B, _where(layer, site), position_T)


SITES = 256
"""The number of sites of a layer."""


def _where(layer: Array | int, site: int) -> Array:
    if not 0 <= site < SITES:
        raise ValueError(f"dropout at site {site}: a layer has sites 0 to {SITES - 1}")
    return jnp.asarray(layer, jnp.uint32) * jnp.uint32(SITES) + jnp.uint32(site)


def _words(shape: tuple[int, ...], noise_B: Array, where: Array, place: Array) -> Array:
    """A random word for each value.

    Raises:
      ValueError: the batch has no noise.
    """
    if isinstance(noise_B, tuple):
        raise ValueError(
            "batch.noise is (), as in an evaluation; set draws_noise = True in the model to get "
            "noise in training, and skip dropout where batch.noise is ()"
        )
    feature_D = jax.lax.broadcasted_iota(jnp.uint32, (1, 1, shape[2]), 2)
    place = jnp.broadcast_to(place, shape[:2]).astype(jnp.uint32)[:, :, None]
    return _hash(noise_B.astype(jnp.uint32)[:, None, None], where, place, feature_D)


def _hash(x: Array, y: Array, z: Array, w: Array) -> Array:
    """Hash of four 32-bit words: last result of pcg4d (Jarzynski and Olano, Hash Functions for GPU
    Rendering, Journal of Computer Graphics Techniques 9(3), 2020)."""
    x, y, z, w = (v * jnp.uint32(1664525) + jnp.uint32(1013904223) for v in (x, y, z, w))
    x, y, z, w = _mix(x, y, z, w)
    x, y, z, w = (v ^ (v >> 16) for v in (x, y, z, w))
    return _mix(x, y, z, w)[3]


def _mix(x: Array, y: Array, z: Array, w: Array) -> tuple[Array, Array, Array, Array]:
    x = x + y * w
    y = y + z * x
    z = z + x * y
    return x, y, z, w + y * z
