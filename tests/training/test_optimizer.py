"""Properties that every update rule must have, and what is special to Muon and Adafactor."""

import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from jaxscale.config.optimizer import OPTIMIZERS, UNUSED, OptimizerConfig
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
    "lora_rank": 5,
}
LARGE = SIZES | {"embed": 128, "heads": 8, "kv_heads": 4, "head_dim": 32, "mlp": 136, "vocab": 144}
LARGE["lora_rank"] = 128
AXES = {
    "embed": {"tokens": ("vocab", "embed"), "positions": ("positions", "embed")},
    "layers": {
        "attention": {
            "q": ("layers", "embed", "heads", "head_dim"),
            "k": ("layers", "embed", "kv_heads", "head_dim"),
            "o": ("layers", "heads", "head_dim", "embed"),
            "q_bias": ("layers", "heads", "head_dim"),
            "o_lora": {
                "a": ("layers", "heads", "head_dim", "lora_rank"),
                "b": ("layers", "lora_rank", "embed"),
            },
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
    """Without settings that the rule has no use for."""
    wide = {"moment_dtype": "float64", "second_moment_dtype": "float64"}
    settings = {"learning_rate": 0.05, "warmup_steps": 2} | wide | changes
    unused = UNUSED.get(name, ())
    return OptimizerConfig(name, **{key: settings[key] for key in settings if key not in unused})


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


@pytest.mark.proof
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_quadratic_decreases(name: str) -> None:
    """The gradient of a sum of squares is the parameters; decay alone would shrink nothing."""
    settings = config(name, weight_decay=0.0, schedule="constant")
    params, state = random_params(), None
    for _ in range(80):
        params, state = train(make(settings), params, [params], state)
    for before, after in zip(jax.tree.leaves(random_params()), jax.tree.leaves(params)):
        assert jnp.sum(after**2) < 0.2 * jnp.sum(before**2)


@pytest.mark.proof(but=("adamw",))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_only_shrinks_matrices(name: str) -> None:
    settings = config(name, weight_decay=0.5, schedule="constant", warmup_steps=0)
    params = random_params()
    zeros = jax.tree.map(jnp.zeros_like, params)
    after, _ = train(make(settings), params, [zeros])

    def check(names: tuple[str, ...], old: jax.Array, new: jax.Array) -> None:
        decays = _is_matrix(names)
        np.testing.assert_allclose(new, old * (1 - 0.05 * 0.5 * decays), rtol=1e-15)

    map_axes(check, AXES, params, after)


GROUPS = (
    {"params": "layers/attention/*", "frozen": True},
    {"params": "layers/mlp/up", "learning_rate_scale": 0.5, "weight_decay": 0.0},
    {"params": "*/positions", "weight_decay": 0.25},
    {"params": "head/output", "learning_rate_scale": 0.0},
    {"params": "head/*", "weight_decay": 0.0},  # the line before has matched head/output
)


@pytest.mark.proof(but=("lion",))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_change_their_parameters_only(name: str) -> None:
    """After one step from the same moments the update of a group is the rule's own, with its decay,
    times its scale."""
    params, gradients = random_params(), [random_params(seed=1), random_params(seed=2)]
    settings = config(name, schedule="constant", weight_decay=0.5, groups=GROUPS)
    frozen = optim.frozen_params(settings.groups, AXES)
    rule = optim.make(settings, steps=STEPS, axes=AXES, frozen=frozen)
    got, state = train(rule, params, gradients[:1])
    plain, _ = train(
        make(config(name, schedule="constant", weight_decay=0.5)), params, gradients[:1]
    )
    bare, _ = train(
        make(config(name, schedule="constant", weight_decay=0.0)), params, gradients[:1]
    )

    def part(tree: Any, *path: str) -> Any:
        return functools.reduce(lambda found, key: found[key], path, tree)

    def change(tree: Any, *path: str) -> Any:
        return part(tree, *path) - part(params, *path)

    still = part(frozen, "layers", "attention")
    assert all(still.values())
    assert_trees_equal(part(got, "layers", "attention"), part(params, "layers", "attention"))
    assert_trees_equal(part(got, "head", "output"), part(params, "head", "output"))
    untouched = "layers/attention_norm", "layers/mlp/down", "embed/tokens", "head/norm"
    for path in (name.split("/") for name in untouched):
        assert_trees_equal(part(got, *path), part(plain, *path))
    up = ("layers", "mlp", "up")
    assert_trees_equal(change(got, *up), 0.5 * change(bare, *up), 1e-14)
    table = ("embed", "positions")
    halfway = (change(plain, *table) + change(bare, *table)) / 2
    assert_trees_equal(change(got, *table), halfway, 1e-14)
    shapes = {x.shape for x in jax.tree.leaves(state)}
    assert part(params, "layers", "attention", "q").shape not in shapes  # no moments
    axes = optim.state_axes(rule, params, AXES)
    jax.tree.map(
        lambda names, leaf: len(names) in (leaf.ndim, 0) or pytest.fail(f"{names}: {leaf.shape}"),
        axes,
        state,
        is_leaf=is_axes,
    )
    train(rule, got, gradients[1:], state)


def test_groups_that_match_nothing_are_refused() -> None:
    groups = config("adamw", groups=[{"params": "layers/*"}, {"params": "hed/*"}]).groups
    with pytest.raises(
        ValueError, match=r"groups\[1\] = 'hed/\*' matches no parameter; they are emb"
    ):
        optim.frozen_params(groups, AXES)
    with pytest.raises(ValueError, match=r"the model's frozen \['head/none'\] are not among its"):
        optim.frozen_params((), AXES, ("head/none",))
    assert optim.frozen_params((), AXES, ("head/output",))["head"]["output"]
    with pytest.raises(ValueError, match=r"groups freeze every parameter; leave 'frozen' out"):
        optim.frozen_params(config("adamw", groups=[{"params": "*", "frozen": True}]).groups, AXES)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [{"params": "head/*", "weight_decay": 0.5}, {"params": "head/norm/*", "frozen": True}],
            r"groups\[1\] = 'head/norm/\*' changes nothing: earlier entries match head/norm/sc",
        ),
        (
            [{"params": "*/up_bias", "learning_rate_scale": 0.1}],
            r"groups\[0\] = '\*/up_bias' changes nothing: .* itself updates or freezes layers/mlp",
        ),
    ],
)
def test_groups_that_change_nothing_are_refused(groups: Any, message: str) -> None:
    moved = ("layers/mlp/up_bias",)
    with pytest.raises(ValueError, match=message):
        optim.frozen_params(config("adamw", groups=groups).groups, AXES, moved)
    for wider in (
        {"params": "*bias", "weight_decay": 0.1},
        {"params": "*/up_bias", "frozen": True},
    ):
        optim.frozen_params(config("adamw", groups=[wider]).groups, AXES, moved)


def test_adamw_is_torchs() -> None:
    """Ten steps, of gradients from 0.001 to 10; `tools/hf_goldens.py` wrote the file. An update is
    ten roundings or so in either: 16 of the size of the parameter, or of the rate."""
    golden = load_file(pathlib.Path("tests/goldens/adamw.safetensors"))
    settings = OptimizerConfig(
        learning_rate=0.01,
        schedule="constant",
        b1=0.8,
        b2=0.97,
        epsilon=1e-5,
        weight_decay=0.3,
        groups=({"params": "vector", "learning_rate_scale": 0.1},),
    )
    rule = optim.make(settings, steps=10, axes={"matrix": ("embed", "mlp"), "vector": ("embed",)})
    names = ("matrix", "vector")
    params = {name: jnp.asarray(golden[f"params/{name}"][0]) for name in names}
    state = rule.init(params)
    for step in range(10):
        grads = {name: jnp.asarray(golden[f"grads/{name}"][step]) for name in names}
        params, state = compiled(rule)(params, state, grads)
        for name, got in params.items():
            bound = (step + 1) * 16 * 2**-24 * np.maximum(np.abs(got), 0.01)
            assert np.all(np.abs(got - golden[f"params/{name}"][step + 1]) <= bound), (step, name)
        assert params["matrix"].dtype == jnp.float32


# Of each rule: first moments, and second moments.
MOMENTS = {
    "adamw": ({"mu"}, {"nu"}),
    "adafactor": (set(), {"rows", "columns", "whole"}),
    "lion": ({"mu"}, set()),
    "muon": ({"mu"}, {"nu"}),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [("float64", "float32"), ("float32", "float64"), ("bfloat16", "float32")],
)
@pytest.mark.parametrize("param_dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_rest_in_their_dtypes(name: str, param_dtype: str, first: str, second: str) -> None:
    optimizer = make(config(name, moment_dtype=first, second_moment_dtype=second))
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, param_dtype), random_params())
    begin = jax.eval_shape(optimizer.init, params)
    updates, end = jax.eval_shape(optimizer.update, params, begin, params)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), begin) == jax.tree.map(
        lambda a: (a.shape, a.dtype), end
    )
    for fields, dtype in zip(MOMENTS[name], (first, second), strict=True):
        for field in fields:
            trees = [tree for _, tree in optax.tree.get_all_with_path(end, field)]
            assert {leaf.dtype for leaf in jax.tree.leaves(trees)} == {jnp.dtype(dtype)}
    assert all(leaf.dtype in (jnp.float32, jnp.float64) for leaf in jax.tree.leaves(updates))


@pytest.mark.proof
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_low_precision_moments_change_little(name: str) -> None:
    """Arithmetic stays in float32: the first update does not depend on the dtypes at rest."""
    gradients = [random_params(np.float32, seed=1)]
    params = random_params(np.float32)
    results = [
        train(make(config(name, moment_dtype=first, second_moment_dtype=second)), params, gradients)
        for first, second in (("float32", "float64"), ("bfloat16", "float32"))
    ]
    assert_trees_equal(results[0][0], results[1][0], 1e-6)


@pytest.mark.proof
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_forget_large_gradients(name: str) -> None:
    """After 50 gradients of 1 come 2,000 of -0.001. A second moment then falls by a thousandth in a
    step, half the precision of bfloat16, in which it would stay where it was.

    A first moment in bfloat16 is rounded by 2^-9 in each step, and forgets by b1: 2^-9 / (1 - b1)
    is what adds up, 2 % for 0.9; Lion sees the sign of its moment only.
    """
    axes = {"up": ("layers", "embed", "mlp"), "scale": ("layers", "embed")}
    shapes = {"up": (2, 128, 128), "scale": (2, 128)}
    gradients = np.where(np.arange(2050) < 50, 1.0, -1e-3).astype(np.float32)

    def last_update(moment_dtype: str) -> Any:
        narrow = config(
            name,
            learning_rate=1.0,
            weight_decay=0.0,
            warmup_steps=0,
            schedule="constant",
            b1=0.9,
            b2=0.95 if name == "lion" else 0.999,
            moment_dtype=moment_dtype,
            second_moment_dtype="float32",
        )
        optimizer = optim.make(narrow, steps=1, axes=axes)
        params = {key: jnp.zeros(shape, jnp.float32) for key, shape in shapes.items()}

        def step(state: Any, gradient: jax.Array) -> tuple[Any, None]:
            tree = jax.tree.map(lambda x: jnp.full_like(x, gradient), params)
            return optimizer.update(tree, state, params)[1], None

        @jax.jit
        def run() -> Any:
            state, _ = jax.lax.scan(step, optimizer.init(params), gradients)
            tree = jax.tree.map(lambda x: jnp.full_like(x, gradients[-1]), params)
            return optimizer.update(tree, state, params)[0]

        return run()

    assert_trees_equal(last_update("bfloat16"), last_update("float32"), 0.02)


@pytest.mark.proof
def test_stochastic_rounding_keeps_what_rounding_to_the_nearest_freezes() -> None:
    """Second moments that fall by a thousandth in a step, half the precision of bfloat16. A number
    with a last bit u goes down by u with the probability 0.001 / u, else it stays: a variance of at
    most 0.001 u, u being at most 2^-7 of it, in each step."""
    size, steps = 4096, 3000
    scales = np.random.default_rng(0).uniform(0.5, 2, size).astype(np.float32)
    factors = np.where(np.arange(steps) < 50, 2.0**4, 2.0**-10).astype(np.float32)
    axes = {"scale": ("embed",)}

    def second_moments(dtype: str, rounding: str) -> np.ndarray:
        settings = config("adamw", b2=0.999, second_moment_dtype=dtype, moment_rounding=rounding)
        optimizer = optim.make(settings, steps=steps, axes=axes)
        params = {"scale": jnp.zeros(size, jnp.float32)}

        def step(state: Any, factor: jax.Array) -> tuple[Any, None]:
            return optimizer.update({"scale": factor * scales}, state, params)[1], None

        state = jax.jit(lambda: jax.lax.scan(step, optimizer.init(params), factors)[0])()
        return np.asarray(optax.tree.get(state, "nu")["scale"], np.float64)

    exact = second_moments("float32", "nearest")
    errors = second_moments("bfloat16", "stochastic") / exact - 1
    deviation = math.sqrt(steps * 0.001 * 2**-7)
    assert np.abs(errors).max() < 6 * deviation
    assert abs(errors.mean()) < 5 * deviation / math.sqrt(size)


SETTINGS = {
    "learning_rate": 0.03,
    "b1": 0.8,
    "b2": 0.97,
    "weight_decay": 0.3,
    "schedule": "constant",
    "warmup_steps": 0,
}


@pytest.mark.proof(but=("adamw", "lion"))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_the_papers(name: str) -> None:
    """Five steps of a plain NumPy form of each rule, matrix by matrix; all settings differ."""
    params = random_params(sizes=LARGE)
    gradients = [random_params(sizes=LARGE, seed=seed) for seed in range(1, 6)]
    got, _ = train(make(config(name, **SETTINGS)), params, gradients)

    def check(names: tuple[str, ...], start: Any, end: Any, *grads: Any) -> None:
        expected = np.array(start)
        stacks = range(LARGE["layers"]) if names[0] == "layers" else [...]
        rule = plain_adam if name == "muon" and not _is_layers_matrix(names) else PLAIN[name]
        inner = tuple(n for n in names if n != "layers")
        for layer in stacks:
            expected[layer] = plain_steps(
                rule, inner, expected[layer], [np.array(g)[layer] for g in grads]
            )
        np.testing.assert_allclose(end, expected, rtol=1e-9, atol=1e-11)

    map_axes(check, AXES, params, got, *gradients)


def _is_layers_matrix(names: tuple[str, ...]) -> bool:
    return names[0] == "layers" and _is_matrix(names)


def _is_matrix(names: tuple[str, ...]) -> bool:
    return not {"embed", "lora_rank"}.isdisjoint(names) and len(set(names) - {"layers"}) > 1


def plain_steps(rule: Any, names: tuple[str, ...], w: Any, gradients: list[Any]) -> Any:
    """The parameter after decoupled decay, of matrices alone, and the updates of a rule.

    A matrix is flattened to two dimensions, of which "embed" is one, or the rank of an adapter.
    """
    shape = w.shape
    is_matrix = _is_matrix(names)
    if is_matrix:
        sides = (shape[0], -1) if names[0] in ("embed", "lora_rank") else (-1, shape[-1])
        w, gradients = w.reshape(sides), [g.reshape(sides) for g in gradients]
    state: dict[str, Any] = {}
    for t, g in enumerate(gradients, 1):
        update = rule(state, t, g) + SETTINGS["weight_decay"] * w * is_matrix
        w = w - SETTINGS["learning_rate"] * update
    return w.reshape(shape)


def plain_adam(state: dict[str, Any], t: int, g: Any) -> Any:
    """arXiv 1412.6980, algorithm 1."""
    b1, b2 = SETTINGS["b1"], SETTINGS["b2"]
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * g**2
    return state["m"] / (1 - b1**t) / (np.sqrt(state["v"] / (1 - b2**t)) + 1e-8)


def plain_lion(state: dict[str, Any], t: int, g: Any) -> Any:
    """arXiv 2302.06675, algorithm 2: b1 is of the update, b2 of the moment."""
    m = state.get("m", 0)
    state["m"] = SETTINGS["b2"] * m + (1 - SETTINGS["b2"]) * g
    return np.sign(SETTINGS["b1"] * m + (1 - SETTINGS["b1"]) * g)


def plain_adafactor(state: dict[str, Any], t: int, g: Any) -> Any:
    """arXiv 1804.04235, algorithms 4 and 5, its decay 1 - t^-0.8 and clipping at 1."""
    decay = 1 - t**-0.8
    square = g**2 + 1e-30
    if g.ndim == 2 and min(g.shape) >= 128:
        state["r"] = decay * state.get("r", 0) + (1 - decay) * square.mean(1)
        state["c"] = decay * state.get("c", 0) + (1 - decay) * square.mean(0)
        second = np.outer(state["r"], state["c"]) / state["r"].mean()
    else:
        second = state["v"] = decay * state.get("v", 0) + (1 - decay) * square
    update = g / np.sqrt(second)
    return update / max(1, np.sqrt(np.mean(update**2)))


def plain_muon(state: dict[str, Any], t: int, g: Any) -> Any:
    """Jordan et al. 2024: Nesterov momentum (as optax has it, both terms without their bias), five
    Newton-Schulz iterations; the size of arXiv 2502.16982."""
    beta = 0.95
    a, b, c = (np.float64(np.float32(x)) for x in (3.4445, -4.775, 2.0315))
    state["m"] = beta * state.get("m", 0) + (1 - beta) * g
    x = beta * state["m"] / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
    x /= np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return 0.2 * np.sqrt(max(x.shape)) * x


PLAIN = {
    "adamw": plain_adam,
    "lion": plain_lion,
    "adafactor": plain_adafactor,
    "muon": plain_muon,
}


@pytest.mark.proof
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


@pytest.mark.proof
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


@pytest.mark.proof
def test_adamw_is_optax_adamw() -> None:
    settings = config("adamw", warmup_steps=0, schedule="constant")
    gradients = [random_params(seed=seed) for seed in range(1, 4)]
    mask = map_axes(_is_matrix, AXES)
    reference = optax.adamw(0.05, 0.9, 0.95, weight_decay=0.1, mask=mask)
    expected, _ = train(reference, random_params(), gradients)
    got, _ = train(make(settings), random_params(), gradients)
    assert_trees_equal(got, expected, 1e-14)


@pytest.mark.compiles
def test_the_schedule_is_computed_once() -> None:
    """And not again in the update of each parameter."""
    params, optimizer = random_params(), make(config("adamw", schedule="cosine"))
    lowered = compiled(optimizer).lower(params, optimizer.init(params), params)
    assert lowered.compile().as_text().count(" cosine(") == 1


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


@pytest.mark.proof(but=("adafactor-up", "adafactor-o", "muon-o"))
@pytest.mark.parametrize("leaf", MATRICES)
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_stacked_equals_matrix_by_matrix(name: str, leaf: str) -> None:
    """optax on each layer's flattened matrix gives the update of the stacked parameter."""
    *gradients, updates = direction(name)
    reference = {
        "muon": optax.contrib.muon(1.0, optim.MUON_COEFFICIENTS, consistent_rms=0.2),
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


def test_an_unknown_name_is_refused() -> None:
    unknown = config("adamw")
    object.__setattr__(unknown, "name", "sgd")
    with pytest.raises(ValueError, match=r"optimizer\.name = 'sgd'.*muon"):
        optim.make(unknown, steps=1, axes=AXES)


def test_own_state_of_another_shape_is_replicated_and_said():
    axes = {"layers": {"w": ("layers", "embed", "mlp")}, "head": {"b": ("embed",)}}
    shapes = {
        "layers": {"w": jax.ShapeDtypeStruct((2, 256, 128), jnp.float32)},
        "head": {"b": jax.ShapeDtypeStruct((256,), jnp.float32)},
    }
    rule, said = optax.chain(optax.scale_by_factored_rms(), optax.trace(0.9)), []
    found = optim.state_axes(rule, shapes, axes, lambda *one: said.append(one))
    assert found[1].trace == axes
    assert found[0].v_row["layers"]["w"] == ()
    assert [(name.split("/")[1], shape, in_layers) for name, shape, _, in_layers in said] == [
        ("v_row", (2, 128), True),
        ("v_col", (2, 256), True),
    ]
