"""Transfers between device memory and host memory inside a jitted function."""

from typing import Any

import jax

Tree = Any


def to_host(tree: Tree) -> Tree:
    """Moves arrays to host memory, inside a jitted function."""
    return jax.device_put(tree, jax.memory.Space.Host)


def from_host(tree: Tree) -> Tree:
    """Moves arrays back to the device, inside a jitted function."""
    return jax.device_put(tree, jax.memory.Space.Device)
