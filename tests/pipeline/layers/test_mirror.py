"""Working copies of the mirrored rank, and the sum of both directions' gradients."""

import types

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxscale.config.layout import Layout
from jaxscale.pipeline.layers.mirror import add_mirror, fold_mirror
from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.specs import manually

RANKS, ROWS = 4, 3


def test_the_copy_is_the_mirrored_ranks_and_its_gradient_returns():
    layers = np.arange(RANKS * ROWS * 2, dtype=np.float32).reshape(-1, 2)
    mesh = make_mesh(Layout(data=1, pipeline=RANKS, microbatches=RANKS), jax.devices()[:RANKS])
    spec, zero = PartitionSpec("pipeline"), types.SimpleNamespace(compute_dtype=np.float32)

    def both(rows):
        copies = add_mirror(zero, rows, ("layers", "embed"))
        return copies, fold_mirror(copies)

    run = jax.jit(manually(both, ("pipeline",), (spec,), (spec, spec), mesh))
    copies, folded = run(layers)
    of_rank = layers.reshape(RANKS, ROWS, 2)
    mirrored = np.concatenate([of_rank, of_rank[::-1]], axis=1)
    np.testing.assert_array_equal(copies.reshape(RANKS, 2 * ROWS, 2), mirrored)
    np.testing.assert_array_equal(folded, 2 * layers)
