"""Arrays of a length that is not known before, and parts of them."""

import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxscale.data.tokens.npy_files import ArrayFile, ArrayWriter


@pytest.mark.proof
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**16 - 1))), st.sampled_from([np.uint16, np.int64]))
def test_what_is_appended_is_one_array(tmp_path, parts, dtype):
    path = tmp_path / "a.npy"
    with ArrayWriter(path, dtype) as writer:
        for part in parts:
            writer.append(part)
    array = np.load(path)
    assert array.dtype == dtype
    assert array.tolist() == [number for part in parts for number in part]
    assert writer.length == len(array)
    np.save(tmp_path / "b.npy", array)
    assert path.read_bytes() == (tmp_path / "b.npy").read_bytes()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_part_is_read_wherever_the_file_is(tmp_path, scheme):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    header = path.stat().st_size - 200
    array = pickle.loads(pickle.dumps(ArrayFile(f"{scheme}{path}", "uint16", 100, header)))
    assert len(array) == 100
    for part in (slice(3, 9), slice(90, 200), slice(5, 5), slice(7, 3)):
        np.testing.assert_array_equal(array[part], np.arange(100)[part])


def test_a_file_that_is_gone_or_short_is_named(tmp_path):
    array = ArrayFile(str(tmp_path / "gone.npy"), "uint16", 100, 128)
    with pytest.raises(ValueError, match=r"gone.npy cannot be read: No such file"):
        array[:3]
    (tmp_path / "short.npy").write_bytes(b"x" * 130)
    remote = ArrayFile(f"file://{tmp_path}/short.npy", "uint16", 100, 128)
    assert len(remote[0:1]) == 1
    with pytest.raises(ValueError, match=r"short.npy is cut short: it has no bytes 128 to 138"):
        remote[0:5]
