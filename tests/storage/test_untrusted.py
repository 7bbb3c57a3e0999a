"""What is accepted of JSON and of file names that somebody else wrote."""

import json

import pytest

from jaxscale.storage import untrusted
from jaxscale.storage.untrusted import MAX_DEPTH, is_file_name, load_json, parse_json


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 1_000_000])
@pytest.mark.parametrize(
    ("begin", "inner", "end"), [("[", "1", "]"), ("[", "", "]"), ('{"a":', "1", "}")]
)
def test_json_has_a_depth(begin, inner, end, depth):
    text = begin * depth + inner + end * depth
    if depth == MAX_DEPTH:
        assert json.dumps(parse_json(text)) == json.dumps(json.loads(text))
        return
    for given in (text, text.encode()):
        with pytest.raises(ValueError, match=f"^nested more than {MAX_DEPTH} deep$"):
            parse_json(given)


def test_brackets_of_a_text_are_not_depth():
    values = ["[{" * MAX_DEPTH, [[]] * MAX_DEPTH]
    assert parse_json(json.dumps(values)) == values


def test_a_json_file_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert load_json(path) == {"a": 1}
    for data in (b"{", b'"\xff"', b"1" * 5000, b"[" * 500):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"^\S*a.json is not JSON: [^\n]+$"):
            load_json(path)
    monkeypatch.setattr(untrusted, "MAX_BYTES", 499)
    with pytest.raises(ValueError, match=r"a.json has 500 bytes; at most 499 are read as JSON$"):
        load_json(path)


def test_a_file_name_leads_nowhere_else():
    assert all(map(is_file_name, ("a", "data-00000-of-00001.arrow", "..a", ".a")))
    for name in ("", ".", "..", "/a", "../a", "a/b", "a\\b", "s3:a", "a\0", 5, None, ["a"]):
        assert not is_file_name(name), name
