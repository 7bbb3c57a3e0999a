"""Every format gives its documents, however it is cut, and reports errors with their position."""

import dataclasses
import errno
import functools
import gzip
import io
import itertools
import json
import logging
import pathlib
import tempfile

import fsspec
import pyarrow
import pytest
from array_record.python import array_record_module
from backports import zstd
from fsspec.spec import AbstractBufferedFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from jaxscale.command_line import refusals
from jaxscale.data.text import file_io, formats
from jaxscale.data.text.dialogue import Conversation
from jaxscale.data.text.documents import Bad, Document, Piece, cut, read_documents
from jaxscale.data.text.file_io import AwayError, reading
from jaxscale.data.text.formats import is_splittable, read_records, where
from jaxscale.data.text.tables import _example
from jaxscale.data.text.text_files import File, find_files, hash_identity
from jaxscale.data.tokens.index import read_index

TEXTS = ["one", "two\nlines", "é and 中", "  spaces  ", "x" * 3000, "seven"]

# How each format is written, and the file's name.


def write_jsonl(path: pathlib.Path, texts: list[str], field: str = "text") -> None:
    path.write_text("".join(json.dumps({field: text, "id": 3}) + "\n" for text in texts))


def write_gzip(path: pathlib.Path, texts: list[str]) -> None:
    write_jsonl(path, texts)
    path.write_bytes(gzip.compress(path.read_bytes()))


def write_zstd(path: pathlib.Path, texts: list[str]) -> None:
    write_jsonl(path, texts)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(zstd.compress(line) for line in lines))  # a frame for each


def write_parquet(path: pathlib.Path, texts: list[str]) -> None:
    parquet.write_table(
        pyarrow.table({"id": range(len(texts)), "text": texts}), path, row_group_size=2
    )


def write_arrow(path: pathlib.Path, texts: list[str]) -> None:
    table = pyarrow.table({"id": range(len(texts)), "text": texts})
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_arrow_file(path: pathlib.Path, texts: list[str]) -> None:
    table = pyarrow.table({"text": texts})
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_arrayrecord(path: pathlib.Path, records: list[str] | list[bytes]) -> None:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:2")
    for record in records:
        writer.write(record.encode() if isinstance(record, str) else record)
    writer.close()


def write_json_records(path: pathlib.Path, texts: list[str]) -> None:
    write_arrayrecord(path, [json.dumps({"text": text}) for text in texts])


def write_examples(path: pathlib.Path, texts: list[str]) -> None:
    records = []
    for text in texts:
        example = _example()()
        example.features.feature.add(key="other").value.bytes_list.value.append(b"no")
        example.features.feature.add(key="text").value.bytes_list.value.append(text.encode())
        records.append(example.SerializeToString())
    write_arrayrecord(path, records)


def write_array(path: pathlib.Path, texts: list[str]) -> None:
    path.write_text(json.dumps([{"text": text} for text in texts], indent=1))


WRITERS = {
    "a.json": write_array,
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_gzip,
    "a.ndjson.zst": write_zstd,
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "b.arrow": write_arrow_file,
    "a.arrayrecord": write_arrayrecord,
    "b.array_record": write_json_records,
    "c.arrayrecord": write_examples,
}


def listed(path: object, **options) -> File:
    (file,) = find_files([{"path": str(path), **options}])
    return file


def whole(file: File) -> Piece:
    return Piece(file, 0, file.num_bytes)


def texts_of(file: File, piece_bytes: int = 0) -> list[str]:
    pieces = cut([file], piece_bytes) if piece_bytes else [whole(file)]
    documents = list(itertools.chain(*map(read_documents, pieces)))
    assert all(isinstance(document, Document) for document in documents), documents
    return [document.text for document in documents]  # type: ignore


def problem_of(file: File) -> str:
    (bad,) = [d for d in read_documents(whole(file)) if isinstance(d, Bad)]
    return str(bad)


@pytest.mark.parametrize("name", WRITERS)
def test_records_come_back_whole_and_cut(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path, TEXTS)
    file = listed(path)
    assert texts_of(file) == TEXTS
    for piece_bytes in (1, 7, 100, 1000):
        if file.num_bytes / piece_bytes < 4000:
            assert texts_of(file, piece_bytes) == TEXTS


@pytest.mark.parametrize("name", WRITERS)
def test_a_document_is_its_file_and_its_place_there(tmp_path, name):
    WRITERS[name](tmp_path / name, TEXTS)
    file = listed(tmp_path / name)
    hashes = [document.hash for document in read_documents(whole(file))]
    assert len(set(hashes)) == len(TEXTS)
    positions = [position for position, _ in read_records(*whole(file))]
    assert hashes == [hash_identity(f"{name}#{position}") for position in positions]
    if "jsonl" not in name and "ndjson" not in name:
        assert positions == list(range(len(TEXTS)))
    elif not name.endswith("st"):
        data = gzip.decompress((tmp_path / name).read_bytes()) if "gz" in name else None
        data = data or (tmp_path / name).read_bytes()
        assert [data[position : position + 9] for position in positions] == [b'{"text": '] * 6


@pytest.mark.parametrize(
    ("record", "field"),
    [({"body": "x"}, "body"), ({"a": {"b": "x"}}, "a.b"), ({"a.b": "x", "a": {"b": "y"}}, "a.b")],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
def test_a_field_may_be_inside_another(tmp_path, record, field, suffix):
    path = tmp_path / f"a{suffix}"
    table = pyarrow.Table.from_pylist([record])
    if suffix == ".jsonl":
        path.write_text(json.dumps(record))
    elif suffix == ".parquet":
        if "." in next(iter(record)):
            pytest.skip("Parquet cannot say which of the two is meant")
        parquet.write_table(table, path)
    else:
        with ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    assert texts_of(listed(path, field=field)) == ["x"]


TEXT = "first line\r\nsecond\n\n  \nthird é\nfourth\n \n\nlast, no end"


@pytest.mark.parametrize(
    ("boundary", "expected"),
    [
        ("file", [TEXT]),
        ("line", ["first line", "second", "third é", "fourth", "last, no end"]),
        ("paragraph", ["first line\r\nsecond", "third é\nfourth", "last, no end"]),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_is_cut_at_the_boundary_that_is_asked_for(tmp_path, boundary, expected, suffix):
    data = TEXT.encode()
    packed = {"": data, ".gz": gzip.compress(data), ".zst": zstd.compress(data)}[suffix]
    (tmp_path / f"a.txt{suffix}").write_bytes(packed)
    file = listed(tmp_path / f"a.txt{suffix}", boundary=boundary)
    assert texts_of(file) == expected
    assert is_splittable(file) == (not suffix and boundary != "file")
    for piece_bytes in range(1, len(data) + 1):
        assert texts_of(file, piece_bytes) == expected


FASTA = b">one first\nACGT\nacgt\n\n>two\nMK*-\n;old comment\n.X\n>three\nA"


def test_a_sequence_is_a_document(tmp_path):
    (tmp_path / "a.fasta").write_bytes(FASTA)
    file = listed(tmp_path / "a.fasta")
    for piece_bytes in range(1, len(FASTA) + 1):
        assert texts_of(file, piece_bytes) == ["ACGTacgt", "MK*-.X", "A"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["a", "\n", "\r", " ", ">", "bc", "é"])).map("".join), st.data())
def test_cutting_text_anywhere_loses_and_doubles_nothing(tmp_path, text, data):
    path = tmp_path / "a.txt"
    path.write_text("start" + text, newline="")
    boundary = data.draw(st.sampled_from(["line", "paragraph"]))
    file = listed(path, boundary=boundary)
    piece_bytes = data.draw(st.integers(1, file.num_bytes))
    assert texts_of(file, piece_bytes) == texts_of(file)
    together = "".join(texts_of(file)).replace("\n", "").replace("\r", "").split()
    assert "".join(together) == "".join(("start" + text).split())


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (formats._paragraphs, b"a line\n" * 1000),
        (functools.partial(formats._sequences, "a.fa"), b">chromosome\n" + b"ACGT\n" * 1000),
    ],
)
def test_a_part_in_which_nothing_begins_is_not_read_beyond_its_end(read, text):
    """Each of many parts of a chromosome would read all that follows."""
    stream = io.BytesIO(text)
    assert not list(read(stream, 100, 200))
    assert stream.tell() < 250, "no more than the line at its end"
    assert [position for position, _ in read(io.BytesIO(text), 0, 100)] == [0]


@pytest.mark.proof
@given(
    st.text(min_size=1).filter(lambda text: text.isprintable()),
    st.integers(4, 40),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_long_documents_are_split_between_characters(tmp_path, text, limit):
    path = tmp_path / "a.txt"
    path.write_text(text)
    documents = list(read_documents(whole(listed(path, max_document_bytes=limit))))
    assert "".join(document.text for document in documents) == text  # type: ignore
    assert all(0 < document.num_bytes <= limit for document in documents)  # type: ignore
    assert {document.hash for document in documents} == {hash_identity("a.txt")}  # type: ignore


def test_long_documents_are_refused_where_that_is_set(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["short", "x" * 101])
    file = listed(tmp_path / "a.jsonl", max_document_bytes=100, long_documents="refuse")
    problem = problem_of(file)
    assert "a.jsonl, line 2 has 101 bytes, more than max_document_bytes = 100" in problem
    assert "--long_documents of prepare) to 'split'" in problem


LINES = [
    ("{", "is not JSON: Expecting property name enclosed in double quotes at character"),
    ('{"text": "a"} x', "is not JSON: Extra data"),
    ("[1, 2]", "is a list, not an object with fields"),
    ("null", "is null, not an object"),
    (
        '{"txt": "a"}',
        "has no field 'text'; it has txt; set 'field' in its entry of data.source or "
        "data.validation (--field of prepare), such as {'path': 'FILE', 'field': 'txt'}",
    ),
    ('{"messages": []}', "has no field 'text'; it has messages; set 'messages' in its entry of"),
    ('{"a": 1, "b": 2}', "has no field 'text'; it has a, b"),
    ("{}", "has no field 'text'; it has none"),
    ('{"text": 3}', "has a int in its field 'text' instead of text"),
    ('{"text": null}', "has null in its field 'text' instead of text"),
    ('{"text": ""}', "has nothing in its field 'text'"),
    ('{"text": "\\ud800"}', "has half of a surrogate pair"),
    ("[" * 100_000, "is not JSON that can be read"),
    ("1" * 5000, "is not JSON that can be read"),
    (b'{"text": "\xff"}', r"is not utf-8 text: byte 10 is 0xff"),
]


@pytest.mark.parametrize(("line", "problem"), LINES, ids=range(len(LINES)))
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path, line, problem, suffix):
    line = line if isinstance(line, bytes) else line.encode()
    data = b'{"text": "good"}\n\n' + line + b'\n{"text": "good too"}\n'
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    file = listed(path)
    first, bad, last = read_documents(whole(file))
    assert isinstance(first, Document)
    assert isinstance(last, Document)
    assert (first.text, last.text) == ("good", "good too")
    assert str(bad).startswith(f"{path}, line 3 {problem}")
    assert where(file, 0) == f"{path}, line 1"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b">a\nAC1\n>b\nA", "line 1 is not a sequence of letters: it has the byte 0x31"),
        (b">a\nA\n>b\n\n>c\nA", "line 3 has no sequence under its header"),
    ],
)
def test_a_bad_sequence_is_named(tmp_path, data, problem):
    (tmp_path / "a.fa").write_bytes(data)
    assert problem_of(listed(tmp_path / "a.fa")) == f"{tmp_path}/a.fa, {problem}"


def test_bad_utf8_names_file_and_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xffdef")
    message = f"{tmp_path}/a.txt is not utf-8 text: byte 3 is 0xff"
    assert problem_of(listed(tmp_path / "a.txt")).startswith(message)
    (tmp_path / "a.txt").write_bytes(b"abc\nd\xff\n")
    message = f"{tmp_path}/a.txt, line 2 is not utf-8 text: byte 1 is 0xff"
    assert problem_of(listed(tmp_path / "a.txt", boundary="line")).startswith(message)


def test_python_source_has_the_encoding_it_declares(tmp_path):
    (tmp_path / "a.py").write_bytes(b"# coding: latin-1\n# \xe9")
    assert texts_of(listed(tmp_path / "a.py")) == ["# coding: latin-1\n# é"]
    (tmp_path / "b.py").write_bytes(b"# coding: klingon\n")
    assert "b.py is not Python source: unknown encoding" in problem_of(listed(tmp_path / "b.py"))
    (tmp_path / "c.py").write_bytes(b"# coding: ascii\n\xe9")
    assert "c.py is not ascii text: byte 16" in problem_of(listed(tmp_path / "c.py"))


@pytest.mark.parametrize(
    ("name", "data", "boundary"),
    [
        ("a.txt", b"a text\n", "file"),
        ("a.txt", b"a text", "line"),
        ("a.txt", b"a text\n\n", "paragraph"),
        ("a.py", b"# a text", None),
        ("a.jsonl", b'{"text": "a text"}\n', None),
        ("a.fa", b">a\nACGT\n", None),
    ],
)
def test_a_byte_order_mark_at_the_beginning_is_no_text(tmp_path, name, data, boundary):
    """Nor does it end up in a part; elsewhere the character is text."""
    path, mark = tmp_path / name, "\ufeff".encode()
    path.write_bytes(data)
    expected = texts_of(listed(path, boundary=boundary))
    path.write_bytes(mark + data)
    file = listed(path, boundary=boundary)
    for piece_bytes in (1, 2, 4, file.num_bytes):
        assert texts_of(file, piece_bytes) == expected
    packed = path.with_name(f"{name}.gz")
    packed.write_bytes(gzip.compress(mark + data))
    assert texts_of(listed(packed, boundary=boundary)) == expected
    if boundary == "file":
        path.write_bytes(mark * 2 + data)
        assert texts_of(listed(path)) == ["\ufeff" + expected[0]]
        path.write_bytes(mark)
        assert problem_of(listed(path)) == f"{path} has no text"


def test_text_is_read_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes("é\r\n\x00\u2028".encode())
    assert texts_of(listed(tmp_path / "a.txt")) == ["é\r\n\x00\u2028"]


def test_rows_without_text_are_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["a", None, "b"])  # type: ignore
    assert problem_of(listed(tmp_path / "a.parquet")) == (
        f"{tmp_path}/a.parquet, record 1 (from 0) has null in its field 'text' instead of text"
    )
    binary = pyarrow.table({"text": pyarrow.array([b"a", b"\xff", b"b"])})
    parquet.write_table(binary, tmp_path / "b.parquet")
    assert "record 1 (from 0) is not utf-8 text: byte 0" in problem_of(
        listed(tmp_path / "b.parquet")
    )
    as_text = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, binary["text"].chunk(0).buffers(), null_count=0
    )
    parquet.write_table(pyarrow.table({"text": as_text}), tmp_path / "c.parquet")
    assert "record 1 (from 0) is not UTF-8 text" in problem_of(listed(tmp_path / "c.parquet"))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "b.arrow"])
def test_a_missing_column_is_named(tmp_path, name):
    WRITERS[name](tmp_path / name, TEXTS)
    with pytest.raises(ValueError, match=rf"{name} has no column 'txt'; .*did you mean 'text'"):
        texts_of(listed(tmp_path / name, field="txt"))
    with pytest.raises(ValueError, match=r"has no column 'text.a'; it has ; set 'field'"):
        texts_of(listed(tmp_path / name, field="text.a"))


def test_records_of_another_kind_than_the_first_are_named(tmp_path):
    write_arrayrecord(tmp_path / "a.arrayrecord", ['{"text": "a"}', "b"])
    problem = problem_of(listed(tmp_path / "a.arrayrecord"))
    assert "record 1 (from 0) is not JSON, as the first record is" in problem


DAMAGE = [
    ("a.jsonl.gz", r"is cut short: its compressed data have no end.*\(after .*, line \d+\)"),
    ("a.ndjson.zst", r"is cut short: its compressed data have no end"),
    ("a.parquet", "is damaged, or not of its format"),
    ("a.arrow", "is damaged, or not of its format|cannot be read: Expected to be able to read"),
    ("b.arrow", "is damaged, or not of its format"),
    ("a.arrayrecord", "is not a complete ArrayRecord file: it has no records"),
]


@pytest.mark.parametrize(("name", "message"), DAMAGE)
def test_a_file_that_was_cut_short_is_named(tmp_path, name, message):
    path = tmp_path / name
    WRITERS[name](path, [f"{i * i * 7919 % 10007} " * 200 for i in range(300)])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=message) as error:
        list(read_documents(whole(listed(path))))
    assert str(path) in str(error.value)


def test_a_flipped_bit_in_what_is_compressed_is_named(tmp_path):
    write_gzip(tmp_path / "a.jsonl.gz", [str(i * 7919 % 10007) for i in range(3000)])
    data = bytearray((tmp_path / "a.jsonl.gz").read_bytes())
    data[-6] ^= 1  # of the checksum
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(ValueError, match=r"a.jsonl.gz is damaged: CRC check failed"):
        list(read_documents(whole(listed(tmp_path / "a.jsonl.gz"))))


def test_a_file_without_documents_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match=r"a.jsonl has no document; remove it"):
        texts_of(listed(tmp_path / "a.jsonl"))
    write_gzip(tmp_path / "a.jsonl.gz", [])
    with pytest.raises(ValueError, match=r"a.jsonl.gz has no document"):
        texts_of(listed(tmp_path / "a.jsonl.gz"))
    (tmp_path / "a.fa").write_text("\n")
    with pytest.raises(ValueError, match=r"a.fa has no document"):
        texts_of(listed(tmp_path / "a.fa"))


def test_a_sequence_before_any_header_is_no_fasta(tmp_path):
    (tmp_path / "a.fa").write_text("ACGT\n>a\nA\n")
    with pytest.raises(ValueError, match=r"a.fa is not FASTA: its first line"):
        texts_of(listed(tmp_path / "a.fa"))


@pytest.mark.parametrize(
    ("name", "boundary", "message"),
    [
        ("a.txt", "record", "a.txt is text, which has no records"),
        ("a.jsonl", "line", "a.jsonl is jsonl, of which a record is a document"),
        ("a.fa", "paragraph", "cannot be 'paragraph'"),
    ],
)
def test_a_boundary_that_the_format_does_not_have_is_named(tmp_path, name, boundary, message):
    (tmp_path / name).write_text("x")
    with pytest.raises(ValueError, match=message):
        list(cut([listed(tmp_path / name, boundary=boundary)], 10))


def test_a_file_that_vanished_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    file = listed(tmp_path / "a.txt")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ValueError, match=r"a.txt cannot be read: No such file"):
        texts_of(file)


@pytest.mark.parametrize(
    ("path", "error", "kind"),
    [
        ("a/t.txt", OSError(errno.ETIMEDOUT, "Connection timed out"), AwayError),
        ("a/t.txt", OSError(errno.EIO, "Input/output error"), AwayError),
        ("a/t.txt", OSError(errno.ENAMETOOLONG, "File name too long"), ValueError),
        ("a/t.txt", OSError("Expected to be able to read 4 bytes"), ValueError),
        ("s3://a/t.txt", RuntimeError("500 of a library"), AwayError),
        ("s3://a/t.txt", FileNotFoundError("a/t.txt"), ValueError),
        ("s3://a/t.txt", PermissionError("Access Denied"), ValueError),
    ],
)
def test_an_error_that_may_pass_is_no_refusal(path, error, kind, capsys):
    """A supervisor tries again after status 1, and gives up after 2."""
    with pytest.raises(SystemExit) as ended, refusals(), reading("outer"), reading(path):
        raise error
    assert ended.value.code == (1 if kind is AwayError else 2)
    assert capsys.readouterr().err.startswith(f"error: {path} cannot be read: ")
    assert type(ended.value.__context__) is kind


def test_an_index_that_cannot_be_read_now_is_not_called_incomplete(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(file_io, "open_stored", fail)
    with pytest.raises(AwayError, match=r"^\S*/index.json cannot be read: Transport endpoint is"):
        read_index(str(tmp_path))


@pytest.mark.parametrize("name", [name for name in WRITERS if "record" not in name])
def test_documents_are_read_from_object_stores(tmp_path, name, caplog):
    WRITERS[name](tmp_path / name, TEXTS)
    store = fsspec.filesystem("memory")
    store.pipe(f"/bucket/deep/{name}", (tmp_path / name).read_bytes())
    store.pipe("/bucket/README.md", b"not a record")
    store.pipe("/bucket/.hidden", b"x")
    try:
        for path in (f"memory://bucket/deep/{name}", "memory://bucket/**/a.*"):
            if path.endswith("*") and name[0] != "a":
                continue
            file = listed(path)
            assert texts_of(file, 100) == TEXTS
            assert file.identity == (f"deep/{name}" if "*" in path else name)
        with caplog.at_level(logging.INFO, "jaxscale"):
            assert listed("memory://bucket").identity == f"deep/{name}"
        assert "other than those with records, skipped: 1" in caplog.text
        assert listed(f"file://{tmp_path}/{name}").identity == name
        with pytest.raises(ValueError, match="matches no file"):
            listed("memory://bucket/nothing")
    finally:
        store.rm("/bucket", recursive=True)


class StoredFile(AbstractBufferedFile):
    """As object stores' packages open one: what was fetched and what was read are counted."""

    def __init__(self, data: bytes, counts: dict[str, int], **options) -> None:
        super().__init__(None, "big", size=len(data), **options)
        self.data, self.counts = data, counts

    def _fetch_range(self, start: int, end: int) -> bytes:
        self.counts["fetched"] += end - start
        return self.data[start:end]

    def read(self, length: int = -1) -> bytes:
        data = super().read(length)
        self.counts["read"] += len(data)
        return data


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_what_an_object_store_has_is_fetched_once_and_no_more_than_is_wanted(
    tmp_path, monkeypatch, name
):
    """fsspec's own `readline` copies a block for each line, and s3fs's blocks are 50 MB."""
    texts, path, counts = [f"{i:0100}" for i in range(2000)], tmp_path / name, {}
    if name == "a.parquet":
        table = pyarrow.table({"text": texts})
        parquet.write_table(table, path, 100, compression="none", use_dictionary=False)
    else:
        write_jsonl(path, texts)

    class Store:
        def open(self, name, mode, block_size=50 * 2**20):
            counts.update(fetched=0, read=0)
            return StoredFile(path.read_bytes(), counts, block_size=block_size)

    monkeypatch.setattr(file_io, "filesystem", lambda path: (Store(), path))
    monkeypatch.setattr(file_io, "BUFFER_BYTES", 2**12)
    monkeypatch.setattr(file_io, "AHEAD_BYTES", 2**13)
    file = dataclasses.replace(listed(path), path=f"s3://bucket/{name}")
    assert texts_of(file) == texts
    assert file.num_bytes <= counts["read"] < 1.5 * file.num_bytes
    assert list(read_records(file, 0, 1000))
    assert 1000 < counts["fetched"] < file.num_bytes / 2


def test_a_scheme_that_cannot_be_opened_is_named():
    with pytest.raises(ValueError, match="nowhere://a cannot be opened: Protocol not known"):
        listed("nowhere://a")
    file = File("memory://a.arrayrecord", "a", 10, "", "arrayrecord", listed(__file__).source)
    with pytest.raises(ValueError, match=r"a.arrayrecord: ArrayRecord files are read from this"):
        list(read_documents(whole(file)))


def saved_dataset(folder: pathlib.Path, **state) -> None:
    """As `save_to_disk` of Hugging Face's datasets leaves it."""
    folder.mkdir()
    write_arrow(folder / "data-00000-of-00002.arrow", TEXTS[:4])
    write_arrow(folder / "data-00001-of-00002.arrow", TEXTS[4:])
    write_arrow(folder / "cache-1234.arrow", ["left by a map"])
    (folder / "dataset_info.json").write_text("{}")
    files = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files} | state))


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_saved_dataset_is_its_data_files(tmp_path, scheme):
    saved_dataset(tmp_path / "saved")
    files = find_files([f"{scheme}{tmp_path}/saved"])
    assert list(itertools.chain(*map(texts_of, files))) == TEXTS
    (tmp_path / "saved/data-00001-of-00002.arrow").unlink()
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        find_files([f"{scheme}{tmp_path}/saved"])


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_saved_dataset_with_splits_or_an_order_is_refused(tmp_path, scheme):
    saved_dataset(tmp_path / "saved", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(ValueError, match=r"reordered rows.*flatten_indices"):
        find_files([f"{scheme}{tmp_path}/saved"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"the splits train, test.*name one of them: .*/train"):
        find_files([f"{scheme}{tmp_path}"])
    (tmp_path / "dataset_dict.json").write_text('{"splits"')
    with pytest.raises(ValueError, match="is not a complete dataset: JSONDecodeError"):
        find_files([f"{scheme}{tmp_path}"])


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ('{"_data_files": [{"filename": "../outside.arrow"}]}', r"state.json names '../outside"),
        ('{"_data_files": [{"filename": "/etc/passwd"}]}', r"state.json names '/etc/passwd', wh"),
        ('{"_data_files": [{"filename": 5}]}', "state.json names 5, which is not a file of this"),
        ('{"_data_files": 5}', "is not a complete dataset: TypeError"),
        ("[]", "is not a complete dataset: AttributeError"),
        (DEEP, "is not a complete dataset: ValueError.'nested more than"),
    ],
)
def test_a_saved_dataset_has_its_files_in_its_folder(state, message, tmp_path):
    write_arrow(tmp_path / "outside.arrow", TEXTS)
    saved_dataset(tmp_path / "saved")
    (tmp_path / "saved/state.json").write_text(state)
    with pytest.raises(ValueError, match=message):
        find_files([str(tmp_path / "saved")])


def test_of_a_folder_with_records_only_those_are_read(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", TEXTS)
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "info.json").write_text("{}")
    assert texts_of(listed(tmp_path)) == TEXTS


def test_json_must_be_said_to_be_lines_or_text(tmp_path):
    write_jsonl(tmp_path / "a.json", TEXTS)
    with pytest.raises(ValueError, match=r"a.json may have one record per line.*'jsonl' or 'text'"):
        listed(tmp_path / "a.json")
    assert texts_of(listed(tmp_path / "a.json", format="jsonl")) == TEXTS


def damaged(data: bytes, change) -> bytes:
    kind, place, byte = change
    place = int(place * len(data))
    if kind == "cut":
        return data[:place]
    if kind == "flip":
        return data[:place] + bytes([byte]) + data[place + 1 :]
    return data[:place] + bytes([byte]) * 9 + data[place:]


@functools.cache
def intact(name: str) -> bytes:
    texts = {"a.fa": FASTA, "a.txt": TEXT.encode(), "a.txt.gz": gzip.compress(TEXT.encode())}
    if name in texts:
        return texts[name]
    with tempfile.TemporaryDirectory() as folder:
        WRITERS[name](pathlib.Path(folder, name), TEXTS)
        return pathlib.Path(folder, name).read_bytes()


@pytest.mark.proof
@pytest.mark.parametrize("name", [*WRITERS, "a.fa", "a.txt", "a.txt.gz"])
@settings(
    deadline=5000, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(["cut", "flip", "insert"]), st.floats(0, 0.999), st.integers(0, 255)
        ),
        max_size=3,
    ),
    junk=st.none() | st.binary(min_size=1, max_size=200),
    boundary=st.sampled_from([None, "line", "paragraph"]),
    pieces=st.integers(1, 3),
)
def test_whatever_the_bytes_there_are_documents_or_a_message(
    tmp_path, name, changes, junk, boundary, pieces
):
    data = intact(name)
    for change in changes:
        data = damaged(data, change)
    data = junk or data or b"x"
    path = tmp_path / name
    path.write_bytes(data)
    options = {"format": "json"} if name == "a.json" else {}  # else it is told by its first byte
    file = listed(path, boundary=boundary if ".txt" in name else None, **options)
    try:
        for piece in cut([file], -(-len(data) // pieces)):
            for document in read_documents(piece):
                if isinstance(document, Bad):
                    assert str(document).startswith(str(path))
                else:
                    assert document.num_bytes == len(document.text.encode()) > 0
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017


def test_an_array_of_records_that_is_none_is_refused(tmp_path):
    for text, said in (
        ("[{}", r"a.json is not JSON: "),
        ("[" * 10**5, r"a.json is not JSON: "),
        ('{"a": 1}', r"a.json is a dict, and format = 'json' is one array .* to 'jsonl'"),
    ):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            list(read_documents(whole(listed(tmp_path / "a.json", format="json"))))
    (tmp_path / "a.json").write_text('[{"text": "one"}, {"text": 2}]')
    problem = problem_of(listed(tmp_path / "a.json"))
    assert "a.json, record 1 (from 0) has a int in its field 'text'" in problem


def test_conversations_of_sharegpt(tmp_path):
    """Under the name that they have there, in any format; an unknown speaker is refused."""
    said = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "hello"},
        {"from": "gpt", "value": "you", "weight": 1},
        {"from": "observation", "value": "3"},
    ]
    (tmp_path / "a.json").write_text(json.dumps([{"conversations": said}]))
    parquet.write_table(
        pyarrow.Table.from_pylist([{"conversations": said}]), tmp_path / "a.parquet"
    )
    for name in ("a.json", "a.parquet"):
        file = listed(tmp_path / name, messages="conversations")
        ((_, found),) = read_records(*whole(file))
        assert isinstance(found, Conversation)
        shown = [(m["role"], m["content"]) for m in found.messages]
        roles = ["system", "user", "assistant", "tool"]
        assert shown == list(zip(roles, ["be brief", "hello", "you", "3"]))
    file = listed(tmp_path / "a.json")
    assert "set 'messages' in its entry" in problem_of(file)
    assert "{'path': 'FILE', 'messages': 'conversations'}" in problem_of(file)
    for bad, problem in (
        ({"from": "bard", "value": "a"}, "'from' 'bard', which is not known; it can be system, hu"),
        (
            {"from": "gpt", "value": None},
            "(1, from 0) whose 'value' is null, not text in its field",
        ),
        ({"value": "a"}, "(1, from 0) that is not an object with a 'role'"),
    ):
        (tmp_path / "b.json").write_text(json.dumps([{"conversations": [said[0], bad]}]))
        assert problem in problem_of(listed(tmp_path / "b.json", messages="conversations"))
