"""Entries of `data.source` in every form a configuration has, and the message for each mistake."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale import config
from jaxscale.config.data_source import (
    BOUNDARIES,
    FORMATS,
    LONG_DOCUMENTS,
    Source,
    to_plain,
    to_sources,
)

FILE = """
import ml_collections

def get_config():
    return ml_collections.ConfigDict({"data": {"source": %r}})
"""


def test_a_path_and_a_mapping_are_the_same_record():
    assert to_sources(["a"]) == to_sources([{"path": "a"}]) == (Source(("a",)),)
    assert to_sources([{"path": ["a", "b"]}]) == (Source(("a", "b")),)


SOURCES = st.builds(
    dict,
    path=st.lists(st.text(min_size=1), min_size=1, max_size=3),
    field=st.sampled_from(["text", "a.b"]),
    max_document_bytes=st.sampled_from([0, 4, 1000]),
    long_documents=st.sampled_from(LONG_DOCUMENTS),
    skip_share=st.floats(0, 0.99),
    format=st.sampled_from([None, *FORMATS]),
    weight=st.none() | st.floats(0, 1e9) | st.just([[0, 1], [10, 0.5]]),
)


@pytest.mark.proof
@given(st.lists(SOURCES, min_size=1, max_size=3))
def test_sources_survive_json(entries):
    sources = to_sources(entries)
    plain = json.loads(json.dumps([to_plain(source) for source in sources]))
    assert to_sources(plain) == sources


def test_sources_survive_a_file_and_the_command_line(tmp_path):
    path = tmp_path / "c.py"
    entries = ["a.txt", {"path": "b.jsonl", "field": "body.text", "weight": [[0, 1], [100, 2]]}]
    path.write_text(FILE % (entries,))
    loaded = config.load(str(path))
    assert loaded.data.source == to_sources(entries)
    assert loaded.data.source[1].weight == ((0, 1.0), (100, 2.0))
    assert config.load(str(path), [f"data.source={entries}"]) == loaded
    assert config.load(str(path), [f"data.source={entries[1]}"]).data.source == to_sources(
        entries[1:]
    )
    assert config.from_dict(json.loads(json.dumps(config.to_dict(loaded)))) == loaded


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, r"data.source\[0\] = 3 is of type int; expected a path, or a mapping"),
        ({}, r"data.source\[0\] = {} has no 'path'"),
        ({"path": "a", "feild": "b"}, r"unknown key 'feild'; it can be .*did you mean 'field'\?"),
        ({"path": "a", "zzz": "b"}, r"unknown key 'zzz'; it can be path, format"),
        ({"path": 3}, r"\['path'\] = 3 is of type int; expected a path or a list of paths"),
        ({"path": ["a", ""]}, "is empty or has an empty path"),
        ({"path": []}, "is empty or has an empty path"),
        ({"path": "a", "format": "jsnl"}, r"format = 'jsnl' is not known.*did you mean 'jsonl'"),
        ({"path": "a", "boundary": "lines"}, r"did you mean 'line'"),
        ({"path": "a", "boundary": 3}, r"\['boundary'\] = 3 is of type int; expected text"),
        ({"path": "a", "long_documents": "cut"}, "it can be split, refuse"),
        ({"path": "a", "field": "a..b"}, "field 'a..b' must be a name"),
        ({"path": "a", "field": None}, "expected text"),
        ({"path": "a", "max_document_bytes": -1}, "max_document_bytes = -1"),
        ({"path": "a", "max_document_bytes": 3}, "at least 4, or 0 for no limit"),
        ({"path": "a", "max_document_bytes": 2.5}, "expected a whole number"),
        ({"path": "a", "max_document_bytes": float("inf")}, "expected a whole number"),
        ({"path": "a", "skip_share": 1}, "skip_share = 1.0 must be at least 0 and below 1"),
        ({"path": "a", "skip_share": "no"}, "expected a number"),
        (
            {"path": "a", "format": "jsonl", "boundary": "line"},
            "with format = 'jsonl' a document is a record",
        ),
        ({"path": "a", "format": "text", "boundary": "record"}, "'record' is not for text"),
        ({"path": "a", "weight": -1}, "weight = -1.0 must be finite and at least 0"),
        ({"path": "a", "weight": float("nan")}, "must be finite"),
        ({"path": "a", "weight": "x"}, r"expected a number, or a list of \[step, weight\]"),
        ({"path": "a", "weight": [[0.5, 1]]}, r"a list of \[step, weight\]"),
        ({"path": "a", "weight": [[5, 1]]}, "must begin at step 0, with increasing"),
        ({"path": "a", "weight": [[0, 1], [0, 2]]}, "must begin at step 0, with increasing"),
        ({"path": "a", "weight": []}, "must begin at step 0"),
    ],
)
def test_what_cannot_be_is_named(entry, message):
    with pytest.raises(ValueError, match=message):
        to_sources([entry])


def test_no_entry_is_an_error():
    with pytest.raises(ValueError, match=r"data.source = \[\] is empty; give files"):
        to_sources([])


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_boundary_without_a_format_waits_for_the_files(boundary):
    assert Source(("a",), boundary=boundary).boundary == boundary
