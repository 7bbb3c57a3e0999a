"""Properties that every update rule must have, and what is special to Muon and Adafactor."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.config import OPTIMIZERS, SCHEDULES, OptimizerConfig
from jaxscale.sharding.resolve import is_axes
from jaxscale.training import optimizer as optim

SIZES = {
    "layers": 3,
    "vocab": 24,
    "positions": 12,
    "embed": 16,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 6,
    "mlp": 32,
}
LARGE = SIZES | {"embed": 128, "heads": 8, "kv_heads": 4, "head_dim": 32, "mlp": 136, "vocab": 144}
AXES = {
    "embed": {"tokens": ("vocab", "embed"), "positions": ("positions", "embed")},
    "layers": {
        "attention": {
            "q": ("layers", "embed", "heads", "head_dim"),
            "k": ("layers", "embed", "kv_heads", "head_dim"),
            "o": ("layers", "heads", "head_dim", "embed"),
            "q_bias": ("layers", "heads", "head_dim"),
        },
        "attention_norm": {"scale": ("layers", "embed")},
        "mlp": {
            "up": ("layers", "embed", "mlp"),
            "up_bias": ("layers", "mlp"),
            "down": ("layers", "mlp", "embed"),
        },
    },
    "head": {"norm": {"scale": ("embed",)}, "output": ("embed", "vocab")},
}
MESH_AXES = {"embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
STEPS = 6


def map_axes(function: Any, *trees: Any) -> Any:
    return jax.tree.map(function, *trees, is_leaf=is_axes)


def random_params(dtype: Any = np.float64, sizes: dict[str, int] = SIZES, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return map_axes(
        lambda names: jnp.asarray(random.normal(size=[sizes[n] for n in names]), dtype), AXES
    )


def config(name: str, **changes: Any) -> OptimizerConfig:
    base = OptimizerConfig(name=name, learning_rate=0.05, moment_dtype="float64", warmup_steps=2)
    return dataclasses.replace(base, **changes)


@functools.cache
def make(settings: OptimizerConfig) -> optax.GradientTransformation:
    return optim.make(settings, steps=STEPS, axes=AXES)


@functools.cache
def compiled(optimizer: optax.GradientTransformation) -> Any:
    @jax.jit
    def update(params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return update


def train(optimizer: Any, params: Any, gradients: Any, state: Any = None) -> tuple[Any, Any]:
    """Applies a list of gradients."""
    state = optimizer.init(params) if state is None else state
    for gradient in gradients:
        params, state = compiled(optimizer)(params, state, gradient)
    return params, state


def assert_trees_equal(left: Any, right: Any, tolerance: float = 0.0) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), left, right
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_quadratic_decreases(name: str) -> None:
    """The gradient of a sum of squares is the parameters; decay alone would shrink nothing."""
    settings = config(name, weight_decay=0.0, schedule="constant")
    params, state = random_params(), None
    for _ in range(80):
        params, state = train(make(settings), params, [params], state)
    for before, after in zip(jax.tree.leaves(random_params()), jax.tree.leaves(params)):
        assert jnp.sum(after**2) < 0.2 * jnp.sum(before**2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_only_shrinks_matrices(name: str) -> None:
    settings = config(name, weight_decay=0.5, schedule="constant", warmup_steps=0)
    params = random_params()
    zeros = jax.tree.map(jnp.zeros_like, params)
    after, _ = train(make(settings), params, [zeros])

    def check(names: tuple[str, ...], old: jax.Array, new: jax.Array) -> None:
        decays = "embed" in names and len(set(names) - {"layers"}) > 1
        np.testing.assert_allclose(new, old * (1 - 0.05 * 0.5 * decays), rtol=1e-15)

    map_axes(check, AXES, params, after)


@pytest.mark.parametrize("moment_dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("param_dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_rest_in_their_dtype(name: str, param_dtype: str, moment_dtype: str) -> None:
    optimizer = make(config(name, moment_dtype=moment_dtype))
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, param_dtype), random_params())
    begin = jax.eval_shape(optimizer.init, params)
    updates, end = jax.eval_shape(optimizer.update, params, begin, params)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), begin) == jax.tree.map(
        lambda a: (a.shape, a.dtype), end
    )
    moments = [leaf for leaf in jax.tree.leaves(end) if leaf.ndim > 1]
    assert moments
    assert {leaf.dtype for leaf in moments} == {jnp.dtype(moment_dtype)}
    assert all(leaf.dtype in (jnp.float32, jnp.float64) for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_low_precision_moments_change_little(name: str) -> None:
    """Arithmetic stays in float32: the first update does not depend on the dtype at rest."""
    gradients = [random_params(np.float32, seed=1)]
    params = random_params(np.float32)
    results = [
        train(make(config(name, moment_dtype=d)), params, gradients)[0]
        for d in ("float32", "bfloat16")
    ]
    assert_trees_equal(*results, 1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_equals_one_device(name: str) -> None:
    optimizer = make(config(name))
    sizes = LARGE if name == "adafactor" else SIZES  # large enough for rows and columns
    params, *gradients = (random_params(sizes=sizes, seed=seed) for seed in range(4))
    expected = train(optimizer, params, gradients)

    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def sharding(names: tuple[str, ...]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*map(MESH_AXES.get, names)))

    param_shardings = map_axes(sharding, AXES)
    state_shardings = map_axes(sharding, optim.state_axes(optimizer, params, AXES))
    params, *gradients = (jax.device_put(t, param_shardings) for t in (params, *gradients))
    state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)
    got = train(optimizer, params, gradients, state)
    assert_trees_equal(got, expected, 1e-12)


@pytest.mark.parametrize("sizes", [SIZES, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_axes_fit_the_state(name: str, sizes: dict[str, int]) -> None:
    optimizer = make(config(name))
    params = map_axes(
        lambda names: jax.ShapeDtypeStruct([sizes[n] for n in names], jnp.float32), AXES
    )
    state = jax.eval_shape(optimizer.init, params)
    axes = optim.state_axes(optimizer, params, AXES)
    assert jax.tree.structure(axes, is_leaf=is_axes) == jax.tree.structure(state)
    sharded = 0
    for names, leaf in zip(
        jax.tree.leaves(axes, is_leaf=is_axes), jax.tree.leaves(state), strict=True
    ):
        if names:
            assert tuple(sizes[name] for name in names) == leaf.shape
            sharded += leaf.size
        else:
            assert leaf.size <= 3  # counts, placeholders and Muon's three coefficients
    assert sharded > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_restored_in_the_middle(name: str) -> None:
    optimizer = make(config(name))
    gradients = [random_params(seed=seed) for seed in range(1, STEPS + 1)]
    straight = train(optimizer, random_params(), gradients)
    params, state = train(optimizer, random_params(), gradients[:3])
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves((params, state))]
    abstract = jax.eval_shape(lambda p: (p, optimizer.init(p)), random_params())
    params, state = jax.tree.unflatten(jax.tree.structure(abstract), arrays)
    resumed = train(optimizer, params, gradients[3:], state)
    assert_trees_equal(resumed, straight)
    counts = [leaf for leaf in jax.tree.leaves(resumed[1]) if leaf.dtype == jnp.int32]
    assert counts
    assert all(count == STEPS for count in counts)


def test_adamw_is_optax_adamw() -> None:
    settings = config("adamw", warmup_steps=0, schedule="constant")
    gradients = [random_params(seed=seed) for seed in range(1, 4)]
    mask = map_axes(lambda names: "embed" in names and len(set(names) - {"layers"}) > 1, AXES)
    reference = optax.adamw(0.05, 0.9, 0.95, weight_decay=0.1, mask=mask)
    expected, _ = train(reference, random_params(), gradients)
    got, _ = train(make(settings), random_params(), gradients)
    assert_trees_equal(got, expected, 1e-14)


MATRICES = {
    "q": lambda a: a.reshape(*a.shape[:2], -1),
    "o": lambda a: a.reshape(a.shape[0], -1, a.shape[-1]),
    "up": lambda a: a,
}


@functools.cache
def direction(name: str) -> list[Any]:
    """Two gradients, and a rule's update for the second of them at rate 1, without decay."""
    optimizer = make(
        config(name, learning_rate=1.0, weight_decay=0.0, warmup_steps=0, schedule="constant")
    )
    gradients = [random_params(sizes=LARGE, seed=seed) for seed in (1, 2)]
    zeros = jax.tree.map(jnp.zeros_like, gradients[0])
    _, state = train(optimizer, zeros, gradients[:1])
    updates, _ = train(optimizer, zeros, gradients[1:], state)
    return [g["layers"]["attention"] | g["layers"]["mlp"] for g in (*gradients, updates)]


@pytest.mark.parametrize("leaf", MATRICES)
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_stacked_equals_matrix_by_matrix(name: str, leaf: str) -> None:
    """optax on each layer's flattened matrix gives the update of the stacked parameter."""
    *gradients, updates = direction(name)
    reference = {
        "muon": optax.contrib.muon(1.0, consistent_rms=0.2),
        "adafactor": optax.adafactor(1.0, multiply_by_parameter_scale=False),
    }[name]

    @jax.jit
    @jax.vmap
    def second_update(first: jax.Array, second: jax.Array) -> jax.Array:
        _, state = reference.update(first, reference.init(first), first)
        return reference.update(second, state, second)[0]

    expected = second_update(*(MATRICES[leaf](gradient[leaf]) for gradient in gradients))
    np.testing.assert_allclose(MATRICES[leaf](updates[leaf]), expected, rtol=1e-6)


def test_muon_updates_are_nearly_orthogonal() -> None:
    *_, updates = direction("muon")
    values = np.linalg.svd(updates["up"], compute_uv=False) / (0.2 * np.sqrt(LARGE["mlp"]))
    assert 0.6 < values.min() <= values.max() < 1.3


def test_adafactor_keeps_rows_and_columns_only() -> None:
    params = random_params(sizes=LARGE)
    optimizer = make(config("adafactor"))
    size = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, params)))
    assert size < 0.05 * sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_ends(name: str) -> None:
    rate = optim.schedule(name, learning_rate=3e-4, final=0.1, warmup_steps=10, steps=110)
    rates = np.asarray(jax.jit(jax.vmap(rate))(jnp.arange(130)))
    np.testing.assert_allclose(rates[:10], 3e-4 * np.arange(1, 11) / 10, rtol=1e-15)
    assert rates[10] == 3e-4
    last = 3e-4 if name == "constant" else 3e-4 * 0.1
    assert (rates[110:] == last).all()
    assert (np.diff(rates[10:]) <= 0).all()
    middle = {"cosine": 0.55, "linear": 0.55, "wsd": 1.0, "constant": 1.0}[name]
    np.testing.assert_allclose(rates[60], 3e-4 * middle, rtol=1e-14)


def test_wsd_decays_in_the_last_fifth() -> None:
    rate = optim.schedule("wsd", learning_rate=1.0, final=0.0, warmup_steps=5, steps=100)
    assert rate(80) == 1.0
    np.testing.assert_allclose(rate(85), 0.5, rtol=1e-15)
    assert rate(81) < 1.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_is_the_same_on_host_and_device(name: str) -> None:
    rate = optim.schedule(name, learning_rate=3e-4, final=0.1, warmup_steps=7, steps=1000)
    steps = [0, 6, 7, 333, 801, 999, 1000]
    with jax.transfer_guard("disallow"):
        host = np.asarray([rate(step) for step in steps])
    np.testing.assert_array_max_ulp(jax.jit(jax.vmap(rate))(jnp.asarray(steps)), host, 2)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.schedule = 'step'.*wsd"):
        optim.schedule("step", learning_rate=1.0, final=0.1, warmup_steps=0, steps=1)
    unknown = config("adamw")
    object.__setattr__(unknown, "name", "sgd")
    with pytest.raises(ValueError, match=r"optimizer\.name = 'sgd'.*muon"):
        optim.make(unknown, steps=1, axes=AXES)
