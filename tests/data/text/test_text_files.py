"""Which files are documents, in which order, and what is said of files that cannot be."""

import glob
import logging
import os

import numpy as np
import pytest

from jaxscale.config.data_source import Source
from jaxscale.data.text import text_files
from jaxscale.data.text.text_files import draw, find_files, hash_identity


def identities(*source):
    return [file.identity for file in find_files([str(entry) for entry in source])]


@pytest.fixture
def tree(tmp_path):
    names = ["b.txt", "a.txt", "sub/c.txt", "sub/deep/d.txt", "sub/e.md", "z[1].txt"]
    for name in [*names, ".hidden/f.txt", ".g.txt", "sub/__pycache__/h.txt"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_a_folder_is_every_visible_file_below_it_sorted(tree):
    expected = ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt", "sub/e.md", "z[1].txt"]
    assert sorted(identities(tree)) == expected
    assert identities(tree) == identities(tree)


@pytest.mark.parametrize(
    "pattern",
    ["*.txt", "**/*.txt", "sub/*", "*/*.txt", "**/d.*", "s?b/[a-c].txt", "**", "sub/**/*.txt"],
)
def test_a_glob_means_what_it_means_elsewhere(tree, pattern):
    found = {file.path for file in find_files([f"{tree}/{pattern}"])}
    there = glob.glob(f"{tree}/{pattern}", recursive=True)
    assert found == {p for p in there if not p.endswith(("sub", "deep", "/")) and "__py" not in p}


def test_identity_counts_from_the_root_of_the_entry(tree):
    assert identities(tree / "sub" / "c.txt") == ["c.txt"]
    assert identities(tree / "sub" / "*.txt") == ["c.txt"]
    assert identities(tree / "**" / "c.txt") == ["sub/c.txt"]
    assert identities(tree / "z[1].txt") == ["z[1].txt"]  # a file that exists is no glob


def test_a_file_named_twice_is_one_document(tree, caplog):
    with caplog.at_level(logging.INFO, "jaxscale"):
        assert identities(tree / "a.txt", tree / "*.txt") == ["a.txt", "b.txt", "z[1].txt"]
    assert "more than once, counted once: 1" in caplog.text


def test_a_link_to_a_containing_folder_ends(tree):
    before = identities(tree)
    (tree / "sub" / "loop").symlink_to(tree)
    assert identities(tree) == before


def test_standard_library_without_tests_and_packages():
    files = find_files(["{stdlib}/**/*.py"])
    folders = {part for file in files for part in file.identity.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert {"json/decoder.py", "argparse.py"} <= {file.identity for file in files}
    assert sum(file.num_bytes for file in files) > 5_000_000
    assert [file.path for file in find_files(["{stdlib}"])] == [file.path for file in files]


@pytest.mark.parametrize("entry", ["nothing.txt", "*.text", "no/such/folder/**"])
def test_an_entry_without_files_is_named(tree, entry):
    with pytest.raises(ValueError, match=r"data.source: '.*matches no file") as error:
        find_files([str(tree), f"{tree}/{entry}"])
    assert entry in str(error.value)
    with pytest.raises(ValueError, match=r"data.validation 'code': '.*matches no file"):
        find_files([Source((entry,), name="code")])


def test_an_empty_file_is_named(tree):
    (tree / "sub" / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"sub/empty.txt is empty.*data.source"):
        find_files([str(tree)])


def test_an_empty_package_marker_is_counted_and_skipped(tree, caplog):
    before = identities(tree)
    (tree / "sub" / "__init__.py").touch()
    with caplog.at_level(logging.INFO, "jaxscale"):
        assert identities(tree) == before
    assert "empty __init__.py files, skipped: 1" in caplog.text
    with pytest.raises(ValueError, match="has only empty files"):
        find_files([str(tree / "sub" / "__init__.py")])


def test_a_broken_link_is_named(tree):
    (tree / "gone.txt").symlink_to(tree / "nowhere")
    with pytest.raises(ValueError, match=r"gone.txt cannot be read: No such file"):
        find_files([str(tree)])


def test_a_pipe_is_named_and_not_waited_for(tree):
    os.mkfifo(tree / "pipe.txt")
    with pytest.raises(ValueError, match=r"pipe.txt is not a regular file"):
        find_files([str(tree)])


def test_a_name_that_is_not_text_is_an_identity(tmp_path):
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("x")
    (file,) = find_files([str(tmp_path)])
    assert hash_identity(file.identity) != hash_identity("�.txt")


def drawn(identities, seed):
    return draw(np.array([hash_identity(name) for name in identities], np.uint64), seed)


def test_draws_are_fixed_and_even():
    numbers = drawn([f"folder/file_{i}.txt" for i in range(4000)], seed=0)
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    for share in (0.05, 0.3, 0.9):  # within 4 standard deviations
        assert abs(np.mean(numbers < share) - share) < 4 * (share * (1 - share) / 4000) ** 0.5
    assert drawn(["a.txt"], 0).item() == 0.4776813383167493
    assert drawn(["a.txt"], 0) != drawn(["a.txt"], 1) != drawn(["b.txt"], 1)


def test_draws_of_different_seeds_and_names_have_nothing_in_common():
    names = [f"file_{i}.txt" for i in range(4000)]
    numbers = np.array([drawn(names, seed) for seed in (0, 1, 2, 2**32 - 1)])
    assert np.abs(np.corrcoef(numbers) - np.eye(4)).max() < 4 / 4000**0.5
    assert abs(np.corrcoef(numbers[0][1:], numbers[0][:-1])[0, 1]) < 4 / 4000**0.5


def test_an_object_that_stands_for_a_folder_is_no_file(monkeypatch):
    """Consoles of object stores make one, of no bytes, for a new folder."""

    class Store:
        def isdir(self, name):
            return True

        def find(self, name, detail):
            sizes = {"a/": 0, "a/b/": 0, "a/b/t.txt": 9, "a/b/__pycache__/t.txt": 9}
            return {one: {"type": "file", "size": size} for one, size in sizes.items()}

        def unstrip_protocol(self, name):
            return f"s3://{name}"

    monkeypatch.setattr(text_files, "filesystem", lambda path: (Store(), "a"))
    assert [file.identity for file in find_files(["s3://a"])] == ["b/t.txt"]
