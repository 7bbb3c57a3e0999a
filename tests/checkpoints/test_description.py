"""What lies in a run's folder is only read: it is good, or refused in a sentence."""

import copy
import json
import pathlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale import config as configs
from jaxscale import run_folder
from jaxscale.checkpoints.description import check_metadata, read_description, write_description
from jaxscale.checkpoints.differences import array_differences, describe_difference
from jaxscale.data.skipped_ranges import with_ranges
from jaxscale.storage import durable
from jaxscale.training.learning_rate import rate_change, with_schedule

CONFIG = configs.load("configs/tiny.py")
RESOLVED = with_schedule(CONFIG, {})
SECTIONS = json.loads(json.dumps(configs.to_dict(CONFIG)))
DESCRIPTION = {
    "format": 1,
    "arrays": {"params/a": {"shape": [2, 3], "dtype": "float32", "checksum": 7}},
    "files": {"arrays/d/0": [5, "x"]},
    "metadata": {
        "config": SECTIONS,
        "data": {"fingerprint": "f", "next_example": 8, "tokenizer": "t", "passed_over": [[1, 2]]},
    },
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**30, "auto", "../x", "/etc/passwd", "module:name", "\0"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


def places(tree: Any, above: tuple = ()) -> list[tuple]:
    """The path of every value inside a tree."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = []
    for key, value in inside:
        found.append((*above, key))
        found += places(value, found[-1]) if isinstance(value, dict | list) else []
    return found


def changed(tree: Any, place: tuple, value: Any, removed: bool) -> Any:
    tree = copy.deepcopy(tree)
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    if removed:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return tree


def sentence(error: BaseException) -> None:
    assert "\n" not in str(error)
    assert 0 < len(str(error)) < 4000


def use(description: dict[str, Any]) -> None:
    """What a run does with a description that it takes for good."""
    metadata = description["metadata"]
    check_metadata(metadata)
    with_schedule(CONFIG, metadata["config"])
    array_differences(description["arrays"], DESCRIPTION["arrays"], part=False)
    describe_difference(metadata["config"], SECTIONS)
    rate_change(metadata["config"], RESOLVED.optimizer, RESOLVED.run.steps, 3)
    with_ranges(None, metadata["data"].get("passed_over", ()))
    durable.changed_file(pathlib.Path("nowhere"), description["files"])
    assert all(".." not in name and name[0] != "/" for name in description["files"])


DAMAGES = st.tuples(st.sampled_from(places(DESCRIPTION)), VALUES, st.booleans())


def check_description(damage: tuple) -> None:
    """With a digest that fits, which only somebody who means it can write; and without."""
    values = changed(DESCRIPTION, *damage)
    text = json.dumps(values | {"digest": durable.json_digest(values)})
    try:
        use(read_description(text))
    except ValueError as error:
        sentence(error)
    if durable.json_digest(values) != durable.json_digest(DESCRIPTION):
        with pytest.raises(ValueError, match="changed since it was saved"):
            read_description(json.dumps(values | {"digest": durable.json_digest(DESCRIPTION)}))


def check_config(tmp_path: Any, damage: tuple) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(SECTIONS, *damage)))
    try:
        run_folder.load_config(tmp_path)
    except ValueError as error:
        sentence(error)


def check_setting(leaf: str, value: Any) -> None:
    try:
        configs.load("configs/tiny.py", [f"{leaf}={value}"])
    except ValueError as error:
        sentence(error)


SETTINGS = [f"{part}.{leaf}" for part, leaves in SECTIONS.items() for leaf in leaves]


def examples_of(count: int) -> Any:
    def decorate(test: Any) -> Any:
        drawn = {
            "description": DAMAGES,
            "config": st.tuples(st.sampled_from(places(SECTIONS)), VALUES, st.booleans()),
            "setting": st.tuples(st.sampled_from(SETTINGS), VALUES),
        }
        return settings(max_examples=count, deadline=None)(given(**drawn)(test))

    return decorate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.mark.proof
@examples_of(100)
def test_whatever_stands_there_is_good_or_one_sentence(folder, description, config, setting):
    check_description(description)
    check_config(folder, config)
    check_setting(*setting)


@pytest.mark.slow
@examples_of(3_000)
def test_whatever_stands_there_is_good_or_one_sentence_often(folder, description, config, setting):
    check_description(description)
    check_config(folder, config)
    check_setting(*setting)


@pytest.mark.parametrize(
    "text", [b"", b"5", b"[]", b"\xff\xfe", b"[" * 10**5, b'{"a":' * 10**5, b"{}"]
)
def test_what_is_no_json_is_one_sentence(text, folder):
    with pytest.raises(ValueError, match="its description is corrupt"):
        read_description(text)
    (folder / "config.json").write_bytes(text)
    if text != b"{}":
        with pytest.raises(ValueError, match=r"config.json is not"):
            run_folder.load_config(folder)


def test_what_is_written_is_read():
    assert read_description(write_description(DESCRIPTION)) == DESCRIPTION
    check_metadata(DESCRIPTION["metadata"])
