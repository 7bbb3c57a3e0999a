"""Formats of stored weights: bit for bit as published, exact where weights are representable."""

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxscale.config.model.quantised_base import BLOCKS
from jaxscale.ops.storage.quantised_storage import (
    E2M1,
    FORMATS,
    NF4,
    Stored,
    mxfp4_values,
    pack,
    pack_weights,
    stored_gradients,
    unpack,
    unpack_weights,
)

SHAPE = (2, 128, 3)
DIM = 1


def weights() -> np.ndarray:
    """With a block of zeros, and one of tiny numbers."""
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    x[0, :64, 0], x[1, 64:, 2] = 0, 1e-30 * x[1, 64:, 2]
    return x


def in_blocks(x: np.ndarray, size: int) -> np.ndarray:
    """Rows of `size` numbers along the dimension."""
    return np.moveaxis(x, DIM, -1).reshape(-1, size)


def packed_and_back(x: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray]:
    stored = Stored(form, DIM)
    packed = jax.jit(lambda x: pack(x, stored))(x)
    return np.asarray(packed), np.asarray(jax.jit(lambda x: unpack(x, stored))(packed))


def test_nf4_is_bit_for_bit_that_of_bitsandbytes():
    """Of its CPU path `quantize_4bit` and `dequantize_4bit`, in NumPy: the largest magnitude of 64
    numbers, a multiplication by its inverse, `bucketize` by the midpoints of the codes, and two
    codes a byte, the first in the high half."""
    rows, (packed, values) = in_blocks(x := weights(), 64), packed_and_back(x, "nf4")
    largest = np.abs(rows).max(-1)
    inverse = np.float32(1) / np.maximum(largest, np.float32(1e-38))
    scaled = np.clip(rows * inverse[:, None], -1, 1)
    midpoints = (NF4[:-1] + NF4[1:]) / np.float32(2)
    codes = np.searchsorted(midpoints, scaled, side="left").astype(np.uint8)
    found = in_blocks(packed, 36)
    np.testing.assert_array_equal(found[:, :32], codes[:, ::2] << 4 | codes[:, 1::2])
    np.testing.assert_array_equal(found[:, 32:].copy().view("<f4")[:, 0], largest)
    np.testing.assert_array_equal(in_blocks(values, 64), NF4[codes] * largest[:, None])


def test_published_values_of_nf4_have_their_codes():
    """Each value of appendix E of arXiv 2305.14314 is its own code, at any scale of a power of two,
    and a number between two values has the code of the nearer one."""
    row = np.tile(NF4, 4).reshape(1, 64, 1)
    packed, values = packed_and_back(row * np.float32(0.25), "nf4")
    expected = [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF] * 4
    np.testing.assert_array_equal(packed[0, :32, 0], expected)
    np.testing.assert_array_equal(values, row * np.float32(0.25))
    packed, _ = packed_and_back(
        np.concatenate([row[:, :60], [[[0.08], [0.5], [-0.09], [1]]]], 1), "nf4"
    )
    np.testing.assert_array_equal(packed[0, 30:32, 0], [0x8C, 0x6F])


@pytest.mark.parametrize(
    ("form", "element", "exponent", "largest"),
    [("mxfp4", ml_dtypes.float4_e2m1fn, 2, 6), ("float8", ml_dtypes.float8_e4m3fn, 8, 448)],
)
def test_microscaling_formats_are_those_of_the_standard(form, element, exponent, largest):
    """Of 32 numbers the scale is the power of two of the largest, less that of the element type;
    elements round to even and saturate (OCP Microscaling Formats 1.0, section 6.3)."""
    ties = np.resize([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5, 6, 7.5], 32)
    x = np.concatenate([weights(), np.broadcast_to(np.tile(ties, 4)[:, None], SHAPE)], 0)
    packed, values = packed_and_back(x.astype(np.float32), form)
    rows = in_blocks(x, 32)
    most = np.abs(rows).max(-1)
    scale = np.where(most, np.floor(np.log2(np.where(most, most, 1))), -126 + exponent) - exponent
    codes = np.clip(rows / 2.0 ** scale[:, None], -largest, largest)
    codes = codes.astype(np.float32).astype(element)
    expected = codes.astype(np.float32) * np.exp2(scale)[:, None].astype(np.float32)
    np.testing.assert_array_equal(in_blocks(values, 32), expected)
    np.testing.assert_array_equal(in_blocks(packed, BLOCKS[form].num_bytes)[:, -1], scale + 127)
    again, same = packed_and_back(values, form)
    np.testing.assert_array_equal(same, values)  # representable: exact
    np.testing.assert_array_equal(again, packed)


def test_the_blocks_of_a_checkpoint_are_read_and_stored_without_loss():
    """gpt-oss's blocks, the first weight in the low half: of every scale but the extremes, also
    where a block's largest number is not the largest of its scale."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 4, 16), np.uint8)
    blocks[0] &= 0x33  # at most 1.5
    blocks[1, 0] = 0
    scales = rng.integers(5, 250, (3, 4), np.uint8)
    values = mxfp4_values(blocks, scales)
    first = E2M1[blocks[2, 3, 0] & 15] * 2.0 ** (int(scales[2, 3]) - 127)
    second = E2M1[blocks[2, 3, 0] >> 4] * 2.0 ** (int(scales[2, 3]) - 127)
    assert tuple(values[2, 96:98]) == (first, second)
    stored = Stored("mxfp4", 0)
    again = jax.jit(lambda x: unpack(pack(x, stored), stored))(values.T)
    np.testing.assert_array_equal(again, values.T)
    assert np.isnan(mxfp4_values(blocks, np.full_like(scales, 255))).all()


def test_sizes_and_gradients_of_a_tree():
    stored = {"a/q": Stored("nf4", 0), "up": Stored("mxfp4", 1)}
    tree = {"a": {"q": np.ones((64, 2)), "k": np.ones((64, 2))}, "up": np.ones((2, 32, 5))}
    packed = jax.jit(lambda tree: pack_weights(tree, stored))(tree)
    assert (packed["a"]["q"].shape, packed["up"].shape) == ((36, 2), (2, 17, 5))
    values = jax.jit(lambda packed: unpack_weights(packed, stored))(packed)
    jax.tree.map(np.testing.assert_array_equal, values, tree)
    grads = stored_gradients(jax.tree.map(jax.numpy.asarray, tree), stored)
    assert jax.tree.map(np.shape, grads) == jax.tree.map(np.shape, packed)
    assert not np.any(grads["a"]["q"])
    assert np.all(grads["a"]["k"])
    for name, form in FORMATS.items():
        assert (form.block, form.block_bytes) == BLOCKS[name]
