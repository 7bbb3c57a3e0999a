"""Readers of all text formats: the records of a part of a file, each with its position.

A part is a range of stored bytes. A record belongs to the part in which it begins, so that parts
can be cut without reading the file. A position is a byte of the (decompressed) file for text, lines
and FASTA, and the number of a record for other formats.

A UTF-8 byte order mark at the beginning of a file is not part of its text.
"""

import codecs
import io
import json
import pathlib
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from jaxscale.choices import nearest
from jaxscale.config.data_source import Source, setting
from jaxscale.data.text.chat_template import Messages
from jaxscale.data.text.dialogue import (
    CONVERSATIONS,
    Conversation,
    Exchange,
    name_of_type,
    to_messages,
    tools_of,
)
from jaxscale.data.text.file_io import compression, opened
from jaxscale.data.text.tables import TABLES
from jaxscale.data.text.text_files import File
from jaxscale.storage.untrusted import parse_json

Records = Iterator[tuple[int, str | Exchange | Conversation | ValueError]]
"""Positions, each with its content or with an error that a caller may skip."""


def is_splittable(file: File) -> bool:
    """Whether a part of a file can be read without the parts before it."""
    whole = boundary(file) == "file" or file.format in ("arrow", "json")
    return not whole and not compression(file.path)


def boundary(file: File) -> str:
    """The unit of a document in this file: "file", "line", "paragraph" or "record".

    Raises:
      ValueError: the entry of `data.source` sets a unit that this format does not have.
    """
    wanted = file.source.boundary
    if file.format in ("text", "fasta") and file.source.marks_loss:
        raise ValueError(
            f"{file.path} is {file.format}, which has no fields for prompt and response, or "
            f"messages; give records in {file.source.listed_in}: jsonl, json, parquet, arrow or "
            "arrayrecord"
        )
    if file.format == "text":
        if wanted == "record":
            raise ValueError(
                f"{file.path} is text, which has no records; set {setting('boundary')} to "
                f"'file', 'line' or 'paragraph', or set {setting('format')}"
            )
        return wanted or "file"
    if wanted not in (None, "record"):
        raise ValueError(
            f"{file.path} is {file.format}, of which a record is a document; "
            f"{setting('boundary')} cannot be {wanted!r}"
        )
    return "record"


def read_records(file: File, start: int, stop: int) -> Records:
    """Every record that begins between the stored bytes `start` and `stop`.

    Raises:
      ValueError: while reading; the file is damaged, or has no such column.
    """
    kind = boundary(file)
    if file.format in TABLES:
        if compression(file.path):
            raise ValueError(f"{file.path}: {file.format} is compressed internally; unpack it")
        source = file.source
        rows = TABLES[file.format](file.path, source.fields, source.may_have, start, stop)
        for position, record in rows:
            yield position, _content(record, source)
        return
    with opened(file.path) as stream:
        if compression(file.path):
            stop = 1 << 62  # `stop` counts stored bytes; the decompressed file is one part
        if file.format == "jsonl":
            yield from _json_lines(_lines(stream, start, stop), file.source)
        elif file.format == "json":
            for position, record in enumerate(_array_of(file.path, stream.read())):
                yield position, _content(record, file.source)
        elif file.format == "fasta":
            yield from _sequences(file.path, stream, start, stop)
        elif kind == "line":
            yield from _text_lines(_lines(stream, start, stop))
        elif kind == "paragraph":
            yield from _paragraphs(stream, start, stop)
        else:
            yield 0, _whole(file.path, stream.read())


def where(file: File, position: int) -> str:
    """A position in readable form: file and line, or record."""
    if file.format in TABLES or file.format == "json":
        return f"{file.path}, record {position} (from 0)"
    if boundary(file) == "file":
        return file.path
    line = 1
    with opened(file.path) as stream:
        while position > 0 and (block := stream.read(min(position, 1 << 20))):
            line += block.count(b"\n")
            position -= len(block)
    return f"{file.path}, line {line}"


def _lines(stream: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Lines, with their ends, that begin in the range."""
    position = start
    if start:  # the line with the byte before belongs to an earlier part
        stream.seek(start - 1)
        position += len(stream.readline()) - 1
    while position < stop and (line := stream.readline()):
        yield position, line if position else line.removeprefix(codecs.BOM_UTF8)
        position += len(line)


def _paragraphs(stream: BinaryIO, start: int, stop: int) -> Records:
    """Runs of non-blank lines; each belongs to the part of the blank line before it."""
    ours, begin, lines = start == 0, 0, []
    for position, line in _lines(stream, start, 1 << 62):
        if not ours and position >= stop:
            return
        if line.strip():
            if ours:
                begin = begin if lines else position
                lines.append(line)
            continue
        if lines:
            yield begin, _decoded(b"".join(lines).rstrip(b"\r\n"))
            lines = []
        if position >= stop:
            return
        ours = True
    if lines:
        yield begin, _decoded(b"".join(lines).rstrip(b"\r\n"))


def _sequences(path: str, stream: BinaryIO, start: int, stop: int) -> Records:
    """FASTA: lines of one sequence under a header line that begins with ">"."""
    begin, lines = None, []
    for position, line in _lines(stream, start, 1 << 62):
        if begin is None and position >= stop:
            return
        if line.startswith((b">", b";")) or not line.strip():
            if line.startswith(b">"):
                if begin is not None:
                    yield begin, _sequence(lines)
                begin, lines = position, []
                if position >= stop:
                    return
        elif begin is not None:
            lines.append(line)
        elif not start:
            raise ValueError(f"{path} is not FASTA: its first line does not begin with '>'")
    if begin is not None:
        yield begin, _sequence(lines)


def _sequence(lines: list[bytes]) -> str | ValueError:
    text = b"".join(b"".join(lines).split())
    wrong = text.translate(None, b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz*-.")
    if wrong:
        return ValueError(f"is not a sequence of letters: it has the byte 0x{wrong[0]:02x}")
    return text.decode() or ValueError("has no sequence under its header")


def _text_lines(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, str | ValueError]]:
    for position, line in lines:
        if line.strip():
            yield position, _decoded(line.rstrip(b"\n").removesuffix(b"\r"))


def _json_lines(lines: Iterator[tuple[int, bytes]], source: Source) -> Records:
    for position, content in _text_lines(lines):
        if isinstance(content, str):
            try:
                content = _content(parse_json(content), source)
            except json.JSONDecodeError as error:
                problem = error.msg.removesuffix(" at")
                content = ValueError(f"is not JSON: {problem} at character {error.colno}")
            except ValueError as error:  # too large a number, too many brackets
                content = ValueError(f"is not JSON that can be read: {error}")
        yield position, content


def _array_of(path: str, data: bytes) -> list[Any]:
    """The records of a file that is one JSON array.

    Raises:
      ValueError: it is not.
    """
    try:
        records = parse_json(data)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(records, list):
        raise ValueError(
            f"{path} is {name_of_type(records)}, and format = 'json' is one array of records; "
            f"with a record on each line, set {setting('format')} to 'jsonl'"
        )
    return records


def _content(record: Any, source: Source) -> str | Exchange | Conversation | ValueError:
    """The content of a record, by the fields of an entry of `data.source`."""
    if source.messages:
        messages = _messages_of(record, source.messages)
        if isinstance(messages, ValueError):
            return messages
        (field,) = source.may_have
        try:
            return Conversation(messages, tools_of(_found(record, field)))
        except ValueError as error:
            return ValueError(f"{error} in its field {field!r}")
    if not source.marks_loss:
        return _text_of(record, source.field, "field")
    prompt = _text_of(record, source.prompt, "prompt", empty=True)
    response = _text_of(record, source.response, "response")
    if isinstance(prompt, ValueError) or isinstance(response, ValueError):
        return prompt if isinstance(prompt, ValueError) else response
    return Exchange(prompt, response)


def _text_of(record: Any, field: str, key: str, *, empty: bool = False) -> str | ValueError:
    """The text in a record's field, which the entry's `key` names; `empty` allows "" ."""
    value = _value_of(record, field, key)
    if isinstance(value, bytes):
        value = _decoded(value)
    if isinstance(value, ValueError) or (isinstance(value, str) and (value or empty)):
        return value
    if isinstance(value, str):
        return ValueError(f"has nothing in its field {field!r}")
    return ValueError(f"has {name_of_type(value)} in its field {field!r} instead of text")


def _found(record: Any, field: str) -> Any:
    """The value of a field; None if a record lacks it."""
    for name in field.split("."):
        record = record.get(name) if isinstance(record, Mapping) else None
    return record


def _messages_of(record: Any, field: str) -> Messages | ValueError:
    messages = _value_of(record, field, "messages")
    if isinstance(messages, str | bytes):  # ArrayRecord and some tables store the list as JSON
        try:
            messages = parse_json(messages)
        except ValueError:
            return ValueError(f"has text in its field {field!r} instead of a list of messages")
    if isinstance(messages, ValueError):
        return messages
    try:
        return to_messages(messages)
    except ValueError as error:
        return ValueError(f"{error} in its field {field!r}")


def _value_of(record: Any, field: str, key: str) -> Any:
    if isinstance(record, ValueError):
        return record
    if not isinstance(record, Mapping):
        return ValueError(f"is {name_of_type(record)}, not an object with fields")
    value = record
    for name in [field] if field in record else field.split("."):
        inside = value if isinstance(value, Mapping) else {}
        if name not in inside:
            hint = _hint(record, name, key) if value is record else setting(key)
            return ValueError(
                f"has no field {field!r}; it has {', '.join(inside) or 'none'}; set {hint}"
            )
        value = inside[name]
    return value


def _hint(record: Mapping, name: str, key: str) -> str:
    """The setting of a field that a record lacks, with a suggestion."""
    near = nearest(name, record) or list(record)[:1]
    conversations = [name for name in CONVERSATIONS if name in record]
    if key == "field" and conversations:
        key, near = "messages", conversations
    return setting(key) + (f", such as {{'path': 'FILE', {key!r}: {near[0]!r}}}" if near else "")


def _decoded(data: bytes, encoding: str = "utf-8") -> str | ValueError:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        return ValueError(
            f"is not {error.encoding} text: byte {error.start} is 0x{data[error.start]:02x} "
            f"({error.reason}); convert or remove it"
        )


def _whole(path: str, data: bytes) -> str | ValueError:
    """A file as one text: UTF-8, or for Python source the encoding that it declares."""
    encoding = "utf-8"
    if pathlib.PurePosixPath(path).suffix == ".py":
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        except SyntaxError as error:
            return ValueError(f"is not Python source: {error}")
    text = _decoded(data.removeprefix(codecs.BOM_UTF8), encoding)
    return text or ValueError("has no text")
