"""A header of any values gives tensors that lie in its file, or a ValueError of one line."""

import copy
import json
import math
import os
import pathlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxscale.hugging_face.safetensors_format import (
    DTYPES,
    INDEX,
    lay_out,
    open_tensors,
    read_header,
    read_metadata,
)

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I8", "shape": [8], "data_offsets": [24, 32]},
}
PLACES = [
    (),
    *[(name,) for name in HEADER],
    ("__metadata__", "format"),
    *[(name, key) for name in "ab" for key in HEADER["a"]],
    *[("a", key, i) for key in ("shape", "data_offsets") for i in (0, 1)],
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 33)
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["F32", "BF16", "F4", 24.0, 2**62, 2**64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def write(path: pathlib.Path, header: str, num_bytes: int = 32) -> pathlib.Path:
    text = header.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return path


@pytest.mark.proof
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(PLACES), VALUES)
def test_a_header_of_any_values_is_right_or_refused(tmp_path, place, value):
    header: Any = copy.deepcopy(HEADER)
    inner = header
    for key in place[:-1]:
        inner = inner[key]
    if place:
        inner[place[-1]] = value
    else:
        header = value
    path = write(tmp_path / "x.safetensors", json.dumps(header))
    tensors, refusal = {}, ""
    try:
        tensors = read_header(path)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert len(refusal.splitlines()) == 1
        assert "x.safetensors" in refusal
        return
    assert all(isinstance(text, str) for text in read_metadata(path).values())
    begin = path.stat().st_size - 32
    for name, tensor in tensors.items():
        assert type(tensor.dtype) is str
        assert all(type(size) is int and size >= 0 for size in tensor.shape)
        first, last = header[name]["data_offsets"]
        assert tensor.offset == begin + first
        if tensor.dtype in DTYPES:
            assert last - first == math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    spans = sorted(header[name]["data_offsets"] for name in tensors)
    assert sum(last - first for first, last in spans) == 32


def entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


REFUSED = {
    "negative sizes": ({"a": entry([-2, -4], [0, 32])}, "'a' needs dtype, shape and"),
    "a fraction of a size": ({"a": entry([8.0], [0, 32])}, "'a' needs dtype, shape and"),
    "a fraction of a byte": ({"a": entry([8], [0, 32.0])}, "'a' needs dtype, shape and"),
    "true for a size": ({"a": entry([8, True], [0, 32])}, "'a' needs dtype, shape and"),
    "many dims": ({"a": entry([8] + [1] * 64, [0, 32])}, "'a' needs dtype, shape and"),
    "backwards": ({"a": entry([0], [0, 32], "I8"), "b": entry([], [32, 16], "I8")}, "'b' does not"),
    "overlapping": (
        {"a": entry([6], [0, 24]), "b": entry([4], [16, 32])},
        "'b' begins at byte 16, not at 24",
    ),
    "twice the same": (
        {"a": entry([8], [0, 32]), "b": entry([8], [0, 32])},
        "byte 0, not at 32",
    ),
    "a hole": ({"a": entry([4], [16, 32])}, "'a' begins at byte 16, not at 0"),
    "metadata": ({"__metadata__": {"a": 1}, "a": entry([8], [0, 32])}, "its header is damaged"),
    "a list": ([], "its header is damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_header_that_fits_no_file_is_refused(name, tmp_path):
    header, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        read_header(write(tmp_path / "x.safetensors", json.dumps(header)))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 200 + "1" + "}" * 200, "{", '"\ud800"'])
def test_a_header_that_is_no_json_is_refused(text, tmp_path):
    path = tmp_path / "x.safetensors"
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(len(data).to_bytes(8, "little") + data)
    with pytest.raises(
        ValueError, match=r"x.safetensors is not a safetensors file: .* in its header"
    ):
        read_header(path)


@pytest.mark.parametrize(
    "index",
    ["[" * 100_000, "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}']
    + [json.dumps({"weight_map": {"a": name}}) for name in ("..", "../x", "/x", "", "a/x", "a\0")],
)
def test_an_index_names_files_of_its_folder(index, tmp_path):
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ValueError, match=f"{INDEX} (is not JSON|has no weight_map|has 'a' in )"):
        open_tensors(tmp_path)


def test_a_shard_that_is_a_pipe_is_not_waited_for(tmp_path):
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x"}}')
    os.mkfifo(tmp_path / "x")
    with pytest.raises(ValueError, match="x is not a regular file"):
        open_tensors(tmp_path)


def test_files_without_values_are_read_as_they_are_laid_out(tmp_path):
    tensors = {"a": ("F32", (2, 3)), "none": ("BF16", (0, 5)), "b": ("BF16", ())}
    assert {
        name: (one.dtype, one.shape) for name, one in lay_out(tmp_path, tensors, 10).items()
    } == tensors
    assert open_tensors(tmp_path).keys() == tensors.keys()
