"""Pruning by the schedule, for every update rule."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.config.optimizer import OPTIMIZERS, OptimizerConfig
from jaxscale.sharding.resolve import is_axes, leaf_name, owner_of
from jaxscale.training import optimizer as optimizers
from jaxscale.training.pruning.matrices import check_counts_updates, pruned_matrices
from jaxscale.training.pruning.pruning import Pruning, num_pruned_at, prunes_at
from tests.training.test_optimizer import config

SPARSE = {"sparsity": 0.75, "sparsity_begin": 5, "sparsity_steps": 20, "sparsity_every": 4}
GROUPS = ({"params": "embed/tokens", "sparsity": 0.4}, {"params": "*/up", "sparsity": 0.0})
AXES = {
    "embed": {"tokens": ("vocab", "embed")},
    "layers": {
        "out": ("layers", "heads", "head_dim", "embed"),
        "out_bias": ("layers", "embed"),
        "router": ("layers", "embed", "routes"),
        "up": ("layers", "embed", "mlp"),
    },
}
SIZES = {"vocab": 24, "embed": 16, "layers": 3, "heads": 4, "head_dim": 4, "routes": 8, "mlp": 32}
FROZEN = jax.tree.map(lambda names: False, AXES, is_leaf=is_axes)
PRUNED = {"embed/tokens", "layers/out"}


def random_params():
    random = np.random.default_rng(0)

    def draw(names):
        return jnp.asarray(random.normal(size=[SIZES[name] for name in names]))

    return jax.tree.map(draw, AXES, is_leaf=is_axes)


def make(settings, params):
    matrices = pruned_matrices(settings, AXES, params, FROZEN)
    pruning = Pruning(settings, matrices, {"layers": np.arange(3)})
    rule = optimizers.make(settings, steps=60, axes=AXES, frozen=FROZEN, pruned=matrices)
    return pruning, pruning.optimizer(rule)


def train(settings, params, steps):
    """Steps with random gradients, and what they leave after each."""
    pruning, rule = make(settings, params)
    rng = np.random.default_rng(1)

    def draw(params):
        return None, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)

    @jax.jit
    def step(params, state, grads):
        _, grads = pruning.gradients(lambda params: (None, grads))(params)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    state = rule.init(params)
    for _ in range(steps):
        params, state, grads = step(params, state, draw(params)[1])
        yield params, state, grads


def zeros(tree):
    return {
        leaf_name(path): np.asarray(x) == 0 for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.proof(but=("adamw",))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pruned_weights_stay_zero_without_gradients_and_moments(name):
    params, state = random_params(), None
    settings = config(name, **SPARSE, groups=GROUPS, moment_dtype="float32")
    before = {key: np.zeros_like(mask) for key, mask in zeros(params).items()}
    for number, (trained, last, grads) in enumerate(train(settings, params, 50), 1):
        params, state = trained, last
        after, found = zeros(params), zeros(grads)
        for key, mask in after.items():
            if key not in PRUNED:
                assert not mask.any()
                continue
            assert np.all(found[key][before[key]]), "of weights that were pruned before the step"
            assert np.all(mask[before[key]])
        before = after
        if number <= 5:
            assert not any(mask.any() for mask in after.values())
    matrices = pruned_matrices(settings, AXES, params, FROZEN)
    assert set(matrices) == PRUNED
    for key, matrix in matrices.items():
        count = after[key].sum(matrix.dims)
        np.testing.assert_array_equal(count, round((0.4 if "embed" in key else 0.75) * matrix.size))
    paths = dict(jax.tree_util.tree_leaves_with_path(params))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        owner = owner_of(path, paths)
        if owner and leaf_name(owner) in PRUNED and leaf.shape == paths[owner].shape:
            np.testing.assert_array_equal(np.asarray(leaf) == 0, after[leaf_name(owner)])


def test_the_schedule_rises_by_the_cube_to_the_exact_number():
    """Its mean density, if pruning takes the half of a run after its first quarter, is 1 - 0.625 of
    the final sparsity (arXiv 2309.08520)."""
    settings = OptimizerConfig(sparsity=0.75, sparsity_begin=1000, sparsity_steps=2000)
    final = 3 * 2**24 + 1  # more than float32 has all integers of
    steps = np.arange(1, 4001)
    found = np.asarray(num_pruned_at(settings, final, steps)).astype(np.int64)
    assert np.all(np.diff(found) >= 0)
    assert np.all(found[:1000] == 0)
    assert np.all(found[2999:] == final)
    share = np.clip((steps - 1000) / 2000, 0, 1)
    roundings = 5 * 2.0**-24 * final  # of four numbers and a quotient
    np.testing.assert_allclose(found, final * (1 - (1 - share) ** 3), atol=roundings + 1)
    assert abs(found.mean() / final - 0.625) < 1e-3
    settings = OptimizerConfig(**SPARSE)
    assert np.flatnonzero(prunes_at(settings, np.arange(60))).tolist() == [9, 13, 17, 21, 25]


@pytest.mark.proof
def test_a_pattern_is_reached_at_the_end_and_kept():
    params = random_params()
    settings = config(
        "adamw", sparsity=0.5, sparsity_steps=6, sparsity_begin=2, sparsity_pattern="2:4"
    )
    *_, (params, _, _) = train(settings, params, 12)
    for key, matrix in pruned_matrices(settings, AXES, params, FROZEN).items():
        x = functools.reduce(lambda tree, part: tree[part], key.split("/"), params)
        live = np.moveaxis(np.asarray(x) != 0, matrix.group_dim, -1)
        if live.shape[-1] % 4 == 0:
            assert np.all(live.reshape(-1, 4).sum(-1) == 2), key


@pytest.mark.proof
def test_adafactor_clips_by_the_size_of_live_updates():
    """As of an array that has the live weights only; its second moments are whole."""
    settings = config("adafactor", sparsity=0.5, sparsity_steps=1)
    names = {"layers": {"up": ("layers", "embed", "mlp")}}
    live = np.arange(32) % 2 == 0
    rng = np.random.default_rng(2)
    gradients = [np.where(live, rng.normal(size=(1, 4, 32)) * 10**i, 0) for i in range(3)]

    def update(chosen, pruned):
        x = jnp.asarray(weights[..., chosen])
        rule = optimizers.make(settings, steps=9, axes=names, pruned=pruned)
        state, updates = rule.init({"layers": {"up": x}}), cast("Any", None)
        for gradient in gradients:
            given = {"layers": {"up": jnp.asarray(gradient[..., chosen])}}
            found: Any = rule.update(given, state, {"layers": {"up": x}})
            updates, state = found
        return np.asarray(updates["layers"]["up"])

    weights = np.where(live, rng.normal(size=(1, 4, 32)), 0)
    small, everything = update(live, ()), slice(None)
    got = update(everything, {"layers/up"})[..., live]
    np.testing.assert_allclose(got, small, rtol=1e-12)
    assert np.abs(update(everything, ())[..., live] / small - 1).max() > 0.01


def test_a_run_without_sparsity_has_the_dense_step():
    params, dense = random_params(), config("adamw", **SPARSE | {"sparsity": 0.0})
    pruning = Pruning(dense, pruned_matrices(dense, AXES, params, FROZEN), {})
    rule = optimizers.make(dense, steps=60, axes=AXES, frozen=FROZEN)
    assert pruning.optimizer(rule) is rule
    assert pruning.gradients(train) is train
    assert pruning.step(train) is train


def test_what_cannot_be_pruned_is_refused():
    params = random_params()
    settings = config("adamw", sparsity_steps=1, groups=[{"params": "*/out*", "sparsity": 0.5}])
    with pytest.raises(ValueError, match=r"sparsity = 0.5 for layers/out_bias, and it is a vector"):
        pruned_matrices(settings, AXES, params, FROZEN)
    settings = config("adamw", sparsity=0.5, sparsity_steps=1)
    with pytest.raises(ValueError, match="prunes nothing: no matrix of the layers is trained"):
        pruned_matrices(settings, AXES, params, jax.tree.map(lambda _: True, FROZEN))
    with pytest.raises(ValueError, match="the state of optimizer= has no field 'count'"):
        check_counts_updates(optax.sgd(0.1), params)
    check_counts_updates(optax.lamb(0.1), params)
    large = {"layers": {"up": jax.ShapeDtypeStruct((1, 2**16, 2**15), jnp.float32)}}
    names = {"layers": {"up": ("layers", "embed", "mlp")}}
    with pytest.raises(ValueError, match="has 2,147,483,648 weights, and pruning counts up to"):
        pruned_matrices(settings, names, large, jax.tree.map(lambda _: False, large))
