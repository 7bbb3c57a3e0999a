"""Loops over layers whose settings repeat with a period."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.training.layers.layer_scan import LayerPosition, ascend, descend


@pytest.mark.proof(but=("2-3", "5-1", "6-3"))
@pytest.mark.parametrize(("num_layers", "period"), [(8, 3), (6, 3), (2, 3), (5, 1)])
def test_each_layer_of_a_period_has_its_own_settings_up_and_down(num_layers, period):
    """Layers after the last whole period are written out: they have theirs, too."""

    def visit(carry, place):
        seen, count = carry
        both = jnp.array([place.index, place.kind], jnp.int32)
        return seen.at[count].set(both), count + 1

    def up(carry, place):
        return visit(carry, place), (jnp.asarray(10 * place.index + place.kind, jnp.int32),)

    begin = jnp.full((num_layers, 2), -1, jnp.int32), 0
    wanted = np.array([(index, index % period) for index in range(num_layers)])
    first = ascend(up, begin, num_layers, period)
    used = jax.tree.map(lambda x: x + 1, first[1])
    for (seen, _), kept in (first, ascend(up, begin, num_layers, period, into=used)):
        np.testing.assert_array_equal(seen, wanted)
        assert kept
        assert [int(kept.at(LayerPosition(*place))[0]) for place in wanted.tolist()] == (
            wanted @ [10, 1]
        ).tolist()
    for top, bottom in ((num_layers - 1, 0), (num_layers - 2, 1)):
        seen, count = descend(visit, begin, top, bottom, period)
        np.testing.assert_array_equal(seen[:count], wanted[bottom : top + 1][::-1])
