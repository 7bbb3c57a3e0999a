"""Splits a decoder's layers into stacks of equal layers: dense layers before MoE layers, or a
repeating pattern of both.

Letters: L layers of a stack, E experts.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.config.model import ModelConfig
from jaxscale.config.model.lora import SIDE
from jaxscale.config.model.quantised_base import BLOCKS
from jaxscale.models.adapters.side import SideLayer
from jaxscale.models.block import MLP, Attention, Block
from jaxscale.models.experts import ExpertBlock, Experts, expert_sums
from jaxscale.models.kernels import KEYS, VALUES, Kernels
from jaxscale.models.latent_attention import MultiHeadLatentAttention
from jaxscale.models.prediction import MERGE, PREDICTION, Merge
from jaxscale.models.protocol import Params, Sums, add_at_path
from jaxscale.models.weights import stack_axes, stack_params
from jaxscale.ops.storage.quantised_storage import Stored, in_stack, pack_weights
from jaxscale.sharding.resolve import leaf_name


class Part(NamedTuple):
    """Consecutive layers of a model that are one stack.

    One layer of the stack is one layer of the model, or one repetition of `expert_pattern`, whose
    layers have their parameters in "layer_0", "layer_1" and so on.
    """

    name: str  # of the stack
    blocks: tuple[Any, ...]  # of one layer of the stack: modules, made by (settings, key)
    first: int  # layers of the model before
    num_layers: int  # of the stack, each with its own weights or not

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """For each block, the path of its parameters in a layer of the stack."""
        if len(self.blocks) == 1:
            return ((),)
        return tuple((f"layer_{i}",) for i in range(len(self.blocks)))

    @property
    def expert_paths(self) -> tuple[tuple[str, ...], ...]:
        """The `paths` of blocks with experts."""
        return tuple(path for path, one in zip(self.paths, self.blocks) if one is ExpertBlock)

    def layer(self, index: Any) -> Any:
        """The index in the model of the first block in layer `index` of the stack."""
        index = index * len(self.blocks) if len(self.blocks) > 1 else index
        return self.first + index if self.first else index


def trunk_parts(config: ModelConfig, block: Any) -> tuple[Part, ...]:
    """The parts that predict the next token, without MTP modules.

    Args:
      block: the block of layers without experts.
    """
    if not config.num_experts:
        return (Part("layers", (block,), 0, config.num_layers),)
    dense, kinds = config.dense_layers, {"D": block, "E": ExpertBlock}
    blocks = tuple(kinds[letter] for letter in config.expert_pattern or "E")
    count = (config.num_layers - dense) // len(blocks)
    if not dense:
        return (Part("layers", blocks, 0, count),)
    return Part("dense_layers", (block,), 0, dense), Part("expert_layers", blocks, dense, count)


def all_parts(config: ModelConfig, block: Any) -> tuple[Part, ...]:
    """`trunk_parts` and the MTP modules, whose layers are as the model's last ones, with experts if
    it has any."""
    trunk, depth = trunk_parts(config, block), config.prediction_depth
    if not depth:
        return trunk
    last = ExpertBlock if config.num_experts else block
    return (*trunk, Part(PREDICTION, (last,), config.num_layers, depth))


def part_params(part: Part, config: ModelConfig, key: jax.Array, rows: np.ndarray | None) -> Params:
    """Initial parameters of a stack; a layer's do not depend on how layers are split into stacks.

    Args:
      key: of all layers.
      rows: the layer of the stack in each row, as in `stack_params`.
    """

    def stacked(make: Any, keys: jax.Array) -> Params:
        return stack_params(functools.partial(make, config), keys, rows)

    if part.name == PREDICTION:
        # Separate keys, so that the trunk's parameters are the same with and without MTP.
        keys = jax.random.split(jax.random.fold_in(key, 0), (2, part.num_layers))
        return {**stacked(part.blocks[0], keys[0]), MERGE: stacked(Merge, keys[1])}
    size = len(part.blocks)
    keys = jax.random.split(key, config.num_layers)[part.first :]
    keys = keys[: size * part.num_layers]
    side = {SIDE: stacked(SideLayer, keys[::size])} if config.side_width else {}
    if size == 1:
        return {**stacked(part.blocks[0], keys), **side}
    names = enumerate(map("/".join, part.paths))
    return {name: stacked(part.blocks[i], keys[i::size]) for i, name in names} | side


def part_axes(part: Part, config: ModelConfig) -> Params:
    """The logical axes of `part_params`."""
    several = [stack_axes(block, config) for block in part.blocks]
    side = {SIDE: stack_axes(SideLayer, config)} if config.side_width else {}
    if len(several) > 1:
        return {**dict(zip(map("/".join, part.paths), several)), **side}
    merge = {MERGE: stack_axes(Merge, config)} if part.name == PREDICTION else {}
    return {**several[0], **merge, **side}


def part_linear(part: Part, config: ModelConfig) -> dict[str, int]:
    """`Stack.linear` of a part's stack, for the package's built-in blocks."""
    attention: Any = MultiHeadLatentAttention if config.kv_rank else Attention
    mlps = {Block: "mlp", ExpertBlock: "mlp/shared"}
    found: dict[str, int] = {}
    for path, block in zip(part.paths, part.blocks):
        if block in mlps:
            for module, names in (
                ("attention", attention.linear_weights),
                (mlps[block], MLP.linear_weights),
            ):
                found |= {"/".join((*path, module, name)): n for name, n in names.items()}
    return found


def part_stored(part: Part, config: ModelConfig) -> dict[str, Stored]:
    """`Stack.stored` of a part's stack: in blocks along the last contracted dimension.

    Raises:
      ValueError: a block is not the package's, so that its matrices are not known.
    """
    if not config.base_dtype:
        return {}
    attention: Any = MultiHeadLatentAttention if config.kv_rank else Attention
    found: dict[str, Stored] = {}
    for path, block in zip(part.paths, part.blocks):
        if block not in (Block, ExpertBlock):
            raise ValueError(
                f"model.base_dtype = {config.base_dtype!r} is not available for a custom block, "
                f"{block.__name__}; set model.base_dtype = ''"
            )
        modules = {"attention": attention.linear_weights, "mlp": MLP.linear_weights}
        if block is ExpertBlock:
            shared = {"mlp/shared": MLP.linear_weights} if config.shared_d_ff else {}
            modules = {**modules, "mlp": Experts.expert_weights, **shared}
        found |= {
            "/".join((*path, module, name)): Stored(config.base_dtype, n - 1, config.compute_dtype)
            for module, names in modules.items()
            for name, n in names.items()
            if name in config.layer_matrices and config.is_stored(name)
        }
    return found


def pack_layers(part: Part, config: ModelConfig, params: Params) -> Params:
    """The parameters of a stack, [layers, ...], with matrices stored as `part_stored` says.

    Raises:
      ValueError: a matrix is not of whole blocks.
    """
    stored = in_stack(part_stored(part, config))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if how := stored.get(name := leaf_name(path)):
            size, block = leaf.shape[how.dim], BLOCKS[how.format].weights
            if size % block:
                raise ValueError(
                    f"model.base_dtype = {config.base_dtype!r} has blocks of {block} inputs, and "
                    f"{part.name}/{name} has {size}; leave {name.split('/')[-1]} out of "
                    f"model.base_targets, or set model.base_dtype = ''"
                )
    return pack_weights(params, stored)


def part_memory(part: Part, config: ModelConfig, kernels: Kernels) -> dict:
    """`Stack.memory` of a part's stack: one token's keys and values of every block; {} for blocks
    that are not the package's, or read later tokens."""
    if part.name == PREDICTION or not config.causal or {*part.blocks} - {Block, ExpertBlock}:
        return {}
    heads = config.num_heads if config.kv_rank else _key_heads(config, kernels)
    found = {}
    for number in range(len(part.blocks)):
        for name, features in ((KEYS, config.head_dim), (VALUES, config.value_dim)):
            shape = heads, features
            found[f"{name}_{number}"] = jax.ShapeDtypeStruct(shape, config.compute_dtype)
    return found


def _key_heads(config: ModelConfig, kernels: Kernels) -> int:
    """Key heads, with the copies of `Kernels.key_heads`."""
    one = jax.ShapeDtypeStruct((config.num_kv_heads, config.head_dim), config.compute_dtype)
    return jax.eval_shape(kernels.key_heads, one).shape[0]


def part_sums(part: Part, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the sums of a stack's layer: with several blocks, one entry for each with experts,
    except for the loss."""
    if not part.expert_paths:
        return {}
    more = (len(part.expert_paths),) if len(part.blocks) > 1 else ()
    shapes = expert_sums(config)
    return {name: () if name == "loss" else (*more, *shape) for name, shape in shapes.items()}


def join_sums(found: Sequence[Sums]) -> Sums:
    """The sums of a stack's layer, from those of its blocks with experts."""
    joined = {name: jnp.stack([one[name] for one in found]) for name in found[0]}
    return {**joined, **({"loss": jnp.sum(joined["loss"])} if "loss" in joined else {})}


def adjust_biases(
    part: Part, params: Params, load: jax.Array, change: Callable[[jax.Array], jax.Array]
) -> Params:
    """Adds `change(load_LE)` to the router biases of a stack.

    Args:
      load: of the stack, in the order of its rows, shaped as in `part_sums`.
    """
    for number, path in enumerate(part.expert_paths):
        load_LE = load[:, number] if path else load
        params = add_at_path(params, (*path, "mlp", "router_bias"), change(load_LE))
    return params
