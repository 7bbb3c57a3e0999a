"""Which arrays of a state rest in host memory."""

import numpy as np

from jaxscale.sharding.host_arrays import StateArray, choose_host_arrays

MATRIX, EXPERT = ("layers", "embed", "mlp"), ("layers", "experts", "embed", "mlp")


def array(path: str, moment: str = "", axes=MATRIX, size: int = 100, device=None) -> StateArray:
    return StateArray(path, moment, axes, size, size // 10 if device is None else device)


STATE = [
    array("embed/table", axes=("vocab", "embed")),
    array("layers/norm", axes=("layers", "embed")),
    array("layers/norm", "mu", axes=("layers", "embed")),
    array("layers/up"),
    array("layers/experts/up", axes=EXPERT, size=50),
    array("embed/table", "mu", axes=("vocab", "embed"), size=900),
    array("layers/up", "nu"),
    array("layers/up", "mu"),
    array("layers/down", "mu", size=200),
    array("layers/experts/up", "mu", axes=EXPERT, size=50),
]


def moved(offload_bytes: int) -> list[str]:
    return [one.name for one, is_moved in choose_host_arrays(STATE, offload_bytes) if is_moved]


def test_moments_leave_first_then_weights_of_layers_experts_before_others():
    """Vectors stay on the device, and weights outside the layers."""
    assert moved(10**6) == [
        "layers/experts/up (mu)",
        "layers/down (mu)",
        "layers/up (mu)",
        "layers/up (nu)",
        "embed/table (mu)",
        "layers/experts/up",
        "layers/up",
    ]


def test_arrays_are_whole_and_no_more_than_needed():
    assert moved(0) == []
    assert moved(1) == moved(5) == ["layers/experts/up (mu)"]
    assert moved(6) == moved(25) == ["layers/experts/up (mu)", "layers/down (mu)"]


def test_many_layouts_choose_as_each_alone():
    two = [array("layers/up", "mu", device=np.array([10, 20])), array("layers/up", device=3)]
    chosen = [list(is_moved) for _, is_moved in choose_host_arrays(two, np.array([11, 20]))]
    assert chosen == [[True, True], [True, False]]
