"""Reads parts of Parquet, Arrow and ArrayRecord files.

Each reader takes a path, the names of required and of optional fields, and a range of stored bytes.
It yields the number of each record with a mapping of the fields, or with an error.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, text_format

from jaxscale.choices import did_you_mean
from jaxscale.config.data_source import setting
from jaxscale.data.text.file_io import open_stored, reading
from jaxscale.storage.object_store import is_remote
from jaxscale.storage.untrusted import parse_json

_ROWS = 1024
"""Rows that are in memory at a time."""

_EXAMPLE = """
name: "example.proto" package: "e" syntax: "proto3"
message_type {
  name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".e.Features" }
}
message_type {
  name: "Features"
  field {
    name: "feature" number: 1 type: TYPE_MESSAGE type_name: ".e.Entry" label: LABEL_REPEATED
  }
}
message_type {
  name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".e.Feature" }
}
message_type {
  name: "Feature"
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".e.BytesList" }
}
message_type {
  name: "BytesList"
  field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED }
}
"""

Rows = Iterator[tuple[int, dict[str, Any] | ValueError]]


def read_parquet(
    path: str, fields: Sequence[str], may_have: Sequence[str], start: int, stop: int
) -> Rows:
    """Rows of the row groups that begin in the range; only the wanted columns are read."""
    arrow = _arrow(path)
    with _arrow_file(path) as source:
        file = arrow.parquet.ParquetFile(source, page_checksum_verification=True)
        columns = _columns(path, fields, may_have, file.schema_arrow)
        row = 0
        for i in range(file.num_row_groups):
            group = file.metadata.row_group(i)
            if start <= _begin(group) < stop:
                yield from _rows(file.iter_batches(_ROWS, row_groups=[i], columns=columns), row)
            row += group.num_rows


def read_arrow(
    path: str, fields: Sequence[str], may_have: Sequence[str], start: int, stop: int
) -> Rows:
    """Rows of an Arrow stream or file, which is one part."""
    del start, stop
    arrow = _arrow(path)
    with _arrow_file(path) as source:
        if source.read(6) == b"ARROW1":
            file = arrow.ipc.open_file(source)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
            schema = file.schema
        else:
            source.seek(0)
            batches = arrow.ipc.open_stream(source)
            schema = batches.schema
        wanted = _columns(path, fields, may_have, schema)
        columns = {name if name in schema.names else name.partition(".")[0] for name in wanted}
        yield from _rows((batch.select(sorted(columns)) for batch in batches), 0, validate=True)


def read_arrayrecord(
    path: str, fields: Sequence[str], may_have: Sequence[str], start: int, stop: int
) -> Rows:
    """The records of an ArrayRecord file in the range: text, JSON, or tf.train.Example.

    The first record determines the type of all.
    """
    del may_have  # a record is read whole
    if is_remote(path):
        raise ValueError(f"{path}: ArrayRecord files are read from this machine only; copy it here")
    with reading(path):
        size = os.stat(path).st_size
    # Imported here, so that runs without such files do not need the package.
    from array_record.python import array_record_module  # noqa: PLC0415  # pyright: ignore

    reader = array_record_module.ArrayRecordReader(path)
    try:
        count = reader.num_records()
        if not reader.ok() or not count:
            raise ValueError(f"{path} is not a complete ArrayRecord file: it has no records")
        decode = _decoder(reader.read([0])[0], fields)
        last = -(-count * min(stop, size) // size)
        for first in range(-(-count * start // size), last, _ROWS):
            records = reader.read(first, min(first + _ROWS, last))
            yield from ((first + i, decode(record)) for i, record in enumerate(records))
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    finally:
        with contextlib.suppress(RuntimeError):  # it raises the same error again
            reader.close()


TABLES = {"parquet": read_parquet, "arrow": read_arrow, "arrayrecord": read_arrayrecord}


def _arrow(path: str) -> Any:
    """pyarrow, which is an extra and takes half a second to import."""
    try:
        import pyarrow.ipc  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise ValueError(f"{path} needs the package pyarrow; install jaxscale[parquet]") from error
    return pyarrow


@contextlib.contextmanager
def _arrow_file(path: str) -> Iterator[Any]:
    """Opens a file for pyarrow, whose errors become a ValueError that names the file."""
    arrow = _arrow(path)
    try:
        with reading(path), contextlib.ExitStack() as stack:
            if is_remote(path):
                remote = stack.enter_context(open_stored(path))
                yield stack.enter_context(arrow.PythonFile(remote, mode="r"))
            else:
                yield stack.enter_context(arrow.memory_map(path))
    except (arrow.ArrowException, UnicodeError, LookupError, OverflowError) as error:
        raise ValueError(f"{path} is damaged, or not of its format: {error}") from error


def _columns(path: str, fields: Sequence[str], may_have: Sequence[str], schema: Any) -> list[str]:
    columns = [_column(path, field, schema) for field in fields]
    for field in may_have:
        with contextlib.suppress(ValueError):
            columns.append(_column(path, field, schema))
    return columns


def _column(path: str, field: str, schema: Any) -> str:
    """The name of a column, or the dotted path of one inside structures."""
    if field in schema.names:
        return field
    kind, names = None, schema.names
    for name in field.split("."):
        if name not in names:
            raise ValueError(
                f"{path} has no column {field!r}; it has {', '.join(names)}; set "
                f"{setting('field')}{did_you_mean(name, names)}"
            )
        kind = (schema if kind is None else kind).field(name).type
        names = [inner.name for inner in kind] if str(kind).startswith("struct") else []
    return field


def _begin(group: Any) -> int:
    """The byte where a row group begins."""
    columns = [group.column(i) for i in range(group.num_columns)]
    return min(c.dictionary_page_offset or c.data_page_offset for c in columns)


def _rows(batches: Iterable[Any], first: int, *, validate: bool = False) -> Rows:
    for batch in batches:
        if validate:  # or bad offsets of a damaged file would be read out of bounds
            batch.validate(full=True)
        columns = [_plain(column) for column in batch.columns]
        for i, values in enumerate(zip(*columns)):
            bad = next((value for value in values if isinstance(value, ValueError)), None)
            yield first + i, bad or dict(zip(batch.schema.names, values))
        first += batch.num_rows


def _plain(column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_decoded(value) for value in column]


def _decoded(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return ValueError(f"is not UTF-8 text: {error.reason} at byte {error.start}")


def _decoder(first: bytes, fields: Sequence[str]) -> Callable[[bytes], dict[str, Any] | ValueError]:
    for decode in (_from_example, _from_json):
        if not isinstance(decode(first), ValueError):
            return decode
    return lambda record: dict.fromkeys(fields[:1], record)


def _from_example(record: bytes) -> dict[str, Any] | ValueError:
    """The texts of a tf.train.Example."""
    try:
        example = _example().FromString(record)
    except message.DecodeError:
        return ValueError("is not a tf.train.Example, as the first record is")
    features = {f.key: list(f.value.bytes_list.value) for f in example.features.feature}
    if not features:
        return ValueError("is a tf.train.Example without features")
    return {key: values[0] if len(values) == 1 else values for key, values in features.items()}


def _from_json(record: bytes) -> dict[str, Any] | ValueError:
    try:
        value = parse_json(record.decode())
    except ValueError as error:
        return ValueError(f"is not JSON, as the first record is: {error}")
    return value if isinstance(value, dict) else ValueError("is not a JSON object")


@functools.cache
def _example() -> Any:
    """The message class of tf.train.Example, bytes only; TensorFlow is not needed."""
    file = text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("e.Example"))
