"""Segments of a micro-batch, and the memory of layers that see earlier ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.ops.attention.context_chunks import balanced_order
from jaxscale.pipeline.layers.segments import memory_shapes, segment_of
from tests.models.gated_convolution import ConvolutionSettings, make

ROWS, TIME = 2, 12


def whole() -> Batch:
    fields = np.arange(5 * ROWS * TIME, dtype=np.int32).reshape(5, ROWS, TIME)
    noise = np.arange(ROWS, dtype=np.uint32)
    return Batch(*map(jnp.asarray, fields), extras={"more": jnp.asarray(fields[0])}, noise=noise)


def test_a_segment_has_its_tokens_and_its_place_in_the_rows():
    batch = whole()
    part = segment_of(batch, 2, 3)
    for name in ("tokens", "targets", "segments", "positions", "weights"):
        np.testing.assert_array_equal(getattr(part, name), getattr(batch, name)[:, 8:])
    np.testing.assert_array_equal(part.extras["more"], batch.tokens[:, 8:])
    np.testing.assert_array_equal(part.noise, batch.noise)
    assert part.within.begin == 8
    np.testing.assert_array_equal(part.within.segments, batch.segments)
    assert segment_of(batch, 0, 1) is batch


def test_a_segment_is_shared_by_all_ranks_of_context():
    order, batch = balanced_order(TIME, 2, 3), whole()
    on_ranks = batch._replace(tokens=batch.tokens[:, order])
    part = segment_of(on_ranks, 1, 3, 2)
    np.testing.assert_array_equal(part.tokens, batch.tokens[:, 4:8][:, balanced_order(4, 2)])


def test_memory_is_of_whole_rows():
    settings = ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6)
    (stack,) = Decoder(settings, plain_kernels()).stacks
    memory = memory_shapes(stack, whole(), 3)
    shape = jax.ShapeDtypeStruct((ROWS, TIME, 2, 6), jnp.bfloat16)
    assert memory == {"keys_0": shape, "values_0": shape}
    assert memory_shapes(stack, whole(), 1) == {}


def test_layers_that_leave_nothing_to_later_tokens_are_refused():
    (stack,) = make(ConvolutionSettings(), plain_kernels()).stacks
    assert memory_shapes(stack, whole(), 1) == {}
    with pytest.raises(ValueError, match=r"'layers' declare no memory .* set layout.sequence_chun"):
        memory_shapes(stack, whole(), 2)
