"""A bad step updates nothing, the same on all ranks; the defaults add nothing to the program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.config import load
from jaxscale.run.setup.layout import open_engine
from jaxscale.training.step import LEAST, WINDOW, init_guard, judge

SETTINGS = [
    "model.num_layers=1",
    "model.d_model=16",
    "model.d_ff=16",
    "data.seq_len=16",
    "layout.data=2",
    "layout.fsdp=4",
]


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.compiles
@pytest.mark.proof
def test_a_number_that_is_not_finite_on_one_rank_stops_the_update_of_all():
    """Parameters and moments to the bit; step and schedule advance; memory is the update's."""
    _, plain = open_engine(load("configs/tiny.py", SETTINGS))
    _, engine = open_engine(load("configs/tiny.py", [*SETTINGS, "run.skip_bad_steps=2"]))
    state = engine.init(jax.random.key(0))
    given = jax.tree.map(np.asarray, state)
    batch = jax.tree.map(
        lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding), engine.abstract_batch
    )
    step, without = (
        one.step.lower(one.abstract_state, one.abstract_batch).compile() for one in (engine, plain)
    )
    temporaries = [one.memory_analysis().temp_size_in_bytes for one in (step, without)]
    assert temporaries[0] < 1.1 * temporaries[1] + 4096, "no second copy of the state"
    good, out = step(state, batch)
    expected, _ = without(plain.init(jax.random.key(0)), batch)
    for left, right in zip(jax.tree.leaves(good.params), jax.tree.leaves(expected.params)):
        np.testing.assert_allclose(left, right, rtol=1e-12)
    assert (bool(out.others["skipped"]), int(good.guard.good)) == (False, 1)
    # Without a token that counts a step is no measure of others.
    expected = bits(good.guard)
    empty, out = step(good, batch._replace(weights=0 * batch.weights))
    assert bits(empty.guard) == expected
    numbers = (out.loss, out.loss_tokens, out.others["skipped"])
    assert [float(number) for number in numbers] == [0, 0, 0]
    assert int(empty.step) == 2
    down = np.array(given.params["layers"]["mlp"]["down"])
    down[..., -1] = np.nan  # the last rank's, of fsdp
    layers = given.params["layers"]
    layers = layers | {"mlp": layers["mlp"] | {"down": down}}
    poisoned = given._replace(params=given.params | {"layers": layers})
    placed = jax.device_put(poisoned, jax.tree.map(lambda x: x.sharding, engine.abstract_state))
    after, out = step(placed, batch)
    assert bool(out.others["skipped"])
    assert np.isnan(out.loss)
    assert out.others["nonfinite_gradients"].any()
    assert bits(after.params) == bits(poisoned.params)
    assert int(after.step) == 1

    def counts(state, kind):
        found = jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, kind))
        return [int(one.count) for one in found if isinstance(one, kind)]

    assert counts(after, optax.ScaleByScheduleState) == [1]
    assert counts(after, optax.ScaleByAdamState) == [0]


@pytest.mark.parametrize("place", ["loss", "grad_norm"])
def test_a_spike_is_seen_against_the_median_of_good_steps(place):
    judged = jax.jit(judge, static_argnums=4)
    guard, rng = init_guard(), np.random.default_rng(0)
    # A step is given its state to reuse, which no two arrays may share.
    guard = jax.jit(lambda guard: guard, donate_argnums=0)(guard)
    for number in range(WINDOW + 40):
        values = {"loss": 3 + 0.1 * rng.normal(), "grad_norm": 1 + 0.1 * rng.normal()}
        spike = number in (LEAST - 1, LEAST + 9, WINDOW + 20)
        if spike:
            values[place] += 5
        numbers = [jnp.float32(values[name]) for name in ("loss", "grad_norm")]
        good, guard = judged(guard, *numbers, jnp.float32(9), 8.0)
        # The first is too early to tell.
        assert bool(good) == (not spike or number < LEAST)
    assert int(guard.good) == WINDOW + 38
    for value in (jnp.nan, jnp.inf):
        good, same = judged(guard, *map(jnp.float32, (value, 1, 9)), 0.0)
        assert not good
        assert bits(same) == bits(guard)
