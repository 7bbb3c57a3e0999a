"""Low-rank adapters (LoRA, arXiv 2106.09685), trained in place of a model's weights.

Letters: a leading dimensions, e separate matrices (of experts), c contracted dimensions, o output
dimensions, r rank.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxscale.config.model import ModelConfig
from jaxscale.config.model.lora import ADAPTER, is_adapter
from jaxscale.models.weights import Weights
from jaxscale.ops.tensor_parallel import linear
from jaxscale.sharding.resolve import is_axes, leaf_name

HEAD = "output"
"""The name of the head's matrix, whose columns are tokens."""

TIED_ROWS = "tied_lora"
"""The name of the embedding's `TokenRows` in a head that is tied to it."""


class LowRank(nnx.Module):
    """The adapter of a weight [*e, *c, *o]: matrices a [*e, *c, r] and b [*e, r, *o].

    `lora_alpha / lora_rank` times their matmul is added to the weight. b is initially zero.

    Args:
      axes: logical axes of the weight.
      contracted: the number of contracted dimensions.
      inputs: the size of a contracted "embed" that is not the residual stream's.
      each: the number of dimensions e.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *axes: str,
        contracted: int = 1,
        inputs: int = 0,
        each: int = 0,
    ) -> None:
        first, last = axes[: each + contracted], axes[each + contracted :]
        self.a = weights.adapter(*first, "lora_rank", inputs=inputs, each=each)
        self.b = weights.zeros(*axes[:each], "lora_rank", *last, wide=True)
        self.contracted, self.scale = contracted, config.lora_alpha / config.lora_rank

    def __call__(self, x: jax.Array, heads: Callable = lambda b: b) -> jax.Array:
        """[*a, *c] -> [*a, *o], the term to add to the weight's matmul.

        Args:
          heads: `Kernels.key_heads`, for a weight of key/value heads.
        """
        return self.matmul(x, self.a[...], heads(self.b[...]))

    def matmul(self, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """The same with matrices from the caller."""
        return linear(self.scale * linear(x, a, contracted=self.contracted), b)


class TokenRows(nnx.Module):
    """Trained rows of a frozen token table: [lora_tokens, embed], initially zero, added to the
    rows of the tokens in `lora_tokens`."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.rows = weights.zeros("lora_tokens", "embed", wide=True)
        self.ids = config.trained_tokens

    def __call__(
        self,
        tokens_BT: jax.Array,
        lookup: Callable[[jax.Array, jax.Array, str, DTypeLike], jax.Array],
        dtype: DTypeLike,
    ) -> jax.Array:
        """The term to add to the token embeddings, [batch, time, embed].

        Args:
          lookup: `Kernels.lookup`.
        """
        is_id_BTK = tokens_BT[..., None] == np.asarray(self.ids, tokens_BT.dtype)
        rows_BTD = lookup(self.rows[...], jnp.argmax(is_id_BTK, -1), "lora_tokens", dtype)
        return jnp.where(jnp.any(is_id_BTK, -1)[..., None], rows_BTD, 0)


def rows_of(config: ModelConfig, weights: Weights) -> TokenRows | None:
    """`TokenRows` of a token table, or None where no token is trained."""
    return TokenRows(config, weights) if config.trained_tokens else None


def borrowed_rows(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The embedding's `TokenRows` as `Model.borrows` of a tied head."""
    tied = config.trained_tokens and config.tied_embeddings
    return {TIED_ROWS: ("embed", "tokens_lora", "rows")} if tied else {}


def rows_in_head(config: ModelConfig, head: Mapping[str, Any]) -> dict[str, Any]:
    """The head's trained token rows, as arguments of `ops.loss.cross_entropy`.

    Args:
      head: as in `Model.loss`.
    """
    if not config.trained_tokens:
        return {}
    rows = head[TIED_ROWS] if config.tied_embeddings else head[HEAD + ADAPTER]["rows"]
    return {"rows_KD": rows, "ids": config.trained_tokens}


def adapter_of(
    name: str, config: ModelConfig, weights: Weights, *axes: str, **dims: int
) -> LowRank | None:
    """`LowRank` of a weight, with its arguments, or None unless `lora_targets` names the weight."""
    if name not in config.adapted_weights:
        return None
    return LowRank(config, weights, *axes, **dims)


def plus(y: jax.Array, adapter: LowRank | None, x: jax.Array) -> jax.Array:
    """A weight's matmul `y` of `x` with the term of its adapter, if any."""
    return y if adapter is None else y + adapter(x)


def frozen_names(axes: Any) -> tuple[str, ...]:
    """The names of all parameters except adapters.

    Args:
      axes: `Model.axes`.
    """
    paths = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_axes)[0]
    names = [leaf_name(path) for path, _ in paths]
    return tuple(name for name in names if not is_adapter(name))


def without_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of parameters or axes without adapters."""
    return {
        name: without_adapters(leaf) if isinstance(leaf, Mapping) else leaf
        for name, leaf in params.items()
        if not is_adapter(name)
    }


def with_adapters(params: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """A tree without adapters, plus the adapters of another tree."""
    joined = dict(params)
    for name, leaf in others.items():
        if is_adapter(name):
            joined[name] = leaf
        elif isinstance(leaf, Mapping):
            joined[name] = with_adapters(params[name], leaf)
    return joined


def only_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """The adapters of a tree, at their paths."""
    return {
        name: leaf if is_adapter(name) else only_adapters(leaf)
        for name, leaf in params.items()
        if is_adapter(name) or isinstance(leaf, Mapping)
    }


def merge_adapters(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """Merges adapters into their weights, in float32 or wider: the parameters of an equivalent
    model without adapters. Donates the input weights.

    Args:
      config: of the model with adapters.
      params: in canonical form, on any layout.
    """
    merged = dict(params)
    for name, leaf in params.items():
        if name.endswith(ADAPTER):
            weight = name.removesuffix(ADAPTER)
            if "rows" in leaf:
                merged[weight] = _with_rows(weight, params[weight], leaf["rows"], config)
            else:
                scale = config.lora_alpha / config.lora_rank
                merged[weight] = _merged(params[weight], leaf["a"], leaf["b"], scale)
            del merged[name]
        elif isinstance(leaf, Mapping):
            merged[name] = merge_adapters(config, leaf)
    return merged


def _merged(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    @functools.partial(jax.jit, donate_argnums=0, out_shardings=weight.sharding)
    def merge(weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        wide = jnp.promote_types(weight.dtype, jnp.float32)
        multiply: Callable = functools.partial(jnp.tensordot, axes=1, precision="highest")
        for _ in range(a.ndim + b.ndim - 2 - weight.ndim):  # of layers, and of experts
            multiply = jax.vmap(multiply)
        added = multiply(a.astype(wide), b.astype(wide))
        return (weight.astype(wide) + scale * added).astype(weight.dtype)

    return merge(weight, a, b)


def with_token_rows(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """Moves the rows of `lora_tokens` from the frozen tables, which get zeros, to the adapters:
    the parameters of an equivalent model. Donates the input tables.

    As in PEFT's format the adapters then contain the tokens' full rows, and weight decay applies
    to these.

    Args:
      params: on any layout.
    """
    found = dict(params)
    for name, leaf in params.items():
        if name.endswith(ADAPTER) and "rows" in leaf:
            table = name.removesuffix(ADAPTER)
            found[table], rows = _without_rows(table, params[table], leaf["rows"], config)
            found[name] = {"rows": rows}
        elif isinstance(leaf, Mapping) and not name.endswith(ADAPTER):
            found[name] = with_token_rows(config, leaf)
    return found


def _with_rows(name: str, table: jax.Array, rows: jax.Array, config: ModelConfig) -> jax.Array:
    """Adds rows to a token table: the embedding [vocab, embed] or the head [embed, vocab]."""
    place = _places(name, config)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=table.sharding)
    def add(table: jax.Array, rows: jax.Array) -> jax.Array:
        added = rows.T if name == HEAD else rows
        return table.at[place].set((table[place] + added).astype(table.dtype))

    return add(table, rows)


def _without_rows(
    name: str, table: jax.Array, rows: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Moves rows of a token table to `rows`; the table gets zeros."""
    place = _places(name, config)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(table.sharding, rows.sharding))
    def split(table: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        taken = table[place].T if name == HEAD else table[place]
        return table.at[place].set(0), rows + taken

    return split(table, rows)


def _places(name: str, config: ModelConfig) -> Any:
    """The index of `lora_tokens` in a token table: rows of the embedding, columns of the head."""
    ids = np.asarray(config.trained_tokens)
    return (slice(None), ids) if name == HEAD else ids
