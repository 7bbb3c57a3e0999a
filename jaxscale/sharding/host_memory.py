"""Transfers between device memory and host memory inside a jitted function."""

from typing import Any

import jax

Tree = Any


def to_host(tree: Tree) -> Tree:
    """Moves arrays to host memory, inside a jitted function."""
    return jax.device_put(tree, jax.memory.Space.Host)


def from_host(tree: Tree) -> Tree:
    """Moves arrays that are in host memory to the device, inside a jitted function."""
    device = jax.memory.Space.Device
    return jax.tree.map(lambda x: jax.device_put(x, device) if is_on_host(x) else x, tree)


def is_on_host(x: Any) -> bool:
    """Whether an array is in host memory, inside a jitted function."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host
