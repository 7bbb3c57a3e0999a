"""Lists the files of a source (paths, folders, globs, URLs) in an order that does not depend on the
file system.

A file's identity is its path below the root of its source entry, so a corpus that moves to another
folder or machine keeps its split and its order.
"""

import fnmatch
import hashlib
import logging
import os
import pathlib
import stat
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.config.data_source import Source, setting, to_sources
from jaxscale.data.text.file_io import cannot_be_read, compression, opened, read_file, reading
from jaxscale.storage.object_store import answer, filesystem, is_remote
from jaxscale.storage.untrusted import is_file_name, parse_json

STDLIB = "{stdlib}"
_STDLIB_SKIPS = ("site-packages", "dist-packages", "test", "tests", "idle_test")
"""Folders in the standard library's that contain other packages or tests."""

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".arrayrecord": "arrayrecord",
    ".array_record": "arrayrecord",
    ".fa": "fasta",
    ".fasta": "fasta",
    ".fna": "fasta",
    ".faa": "fasta",
}
SAVED = ("dataset_dict.json", "state.json", "dataset_info.json")
"""Files of `save_to_disk`: one for a dataset with splits, two for one without."""

_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "updated", "created")
"""Fields in which object stores give a file's version; the first one present is used."""

_log = logging.getLogger("jaxscale")


@dataclass(frozen=True)
class File:
    """A file in the state in which the source was listed."""

    path: str
    identity: str  # the path below the root of its source entry, with forward slashes
    num_bytes: int  # as stored
    version: str  # changes when the file does
    format: str
    source: Source  # how it is read
    entry: int = 0  # of `data.source`


def find_files(source: Sequence[str | Source]) -> list[File]:
    """Lists the files of `data.source`, entry by entry, each entry sorted.

    An entry's path is a file, a folder (every file below it) or a glob with `*`, `?`, `[...]` and
    `**`; `{stdlib}` at its start is the source of Python's standard library, without its tests and
    without installed packages. Hidden files, hidden folders and `__pycache__` are left out, as in
    a shell. If a folder contains files of records, such as a local Hugging Face dataset, only these
    are read. A file that is named twice counts once.

    Raises:
      ValueError: an entry matches nothing, or a file is empty or cannot be read. Only an empty
        `__init__.py`, which marks a Python package, is skipped, and counted in the log.
    """
    found: dict[tuple[str, tuple[str, ...]], File] = {}
    num_repeated, markers = 0, 0
    sources = to_sources(source)
    for file in _named_files(sources):
        key = file.path, file.source.fields
        if key in found:
            num_repeated += 1
        elif file.num_bytes:
            found[key] = file
        elif pathlib.PurePosixPath(file.path).name == "__init__.py":
            markers += 1
        else:
            listed_in = file.source.listed_in
            raise ValueError(f"{file.path} is empty; delete it, or remove it from {listed_in}")
    if not found:
        paths = ", ".join(path for one in sources for path in one.path)
        raise ValueError(f"{sources[0].listed_in}: {paths} has only empty files")
    if num_repeated:
        _log.info("data: files named more than once, counted once: %d", num_repeated)
    if markers:
        _log.info("data: empty __init__.py files, skipped: %d", markers)
    return list(found.values())


def _named_files(sources: Sequence[Source]) -> Iterator[File]:
    for entry, one in enumerate(sources):
        for path in one.path:
            files = _list_remote(path, one, entry) if is_remote(path) else _list(path, one, entry)
            if not files:
                raise ValueError(
                    f"{one.listed_in}: {path!r} matches no file; give files, folders or globs "
                    "such as 'text/**/*.txt'"
                )
            yield from files


def hash_identity(identity: str) -> int:
    """A 64-bit hash of a document's identity."""
    name = identity.encode("utf-8", "surrogateescape")  # a file's name need not be text
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def draw(hashes: np.ndarray, seed: int) -> np.ndarray:
    """Each document's random number in [0, 1), independent of the other documents.

    Documents below `data.heldout` are held out; the others are read in ascending order.

    Args:
      hashes: of identities, [num_documents], uint64.
    """
    return (_mix(hashes ^ _mix(np.array([seed], np.uint64))) >> np.uint64(11)) / 2**53


def _mix(numbers: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele et al., OOPSLA 2014), which mixes all bits."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _list(path: str, source: Source, entry: int) -> list[File]:
    """The local files that an entry's path names."""
    root, paths = _expand(path)
    files = []
    for found in paths:
        try:
            status = found.stat()
        except OSError as error:
            raise cannot_be_read(str(found), error) from error
        if not stat.S_ISREG(status.st_mode):  # reading from a pipe could block forever
            raise ValueError(f"{found} is not a regular file; remove it from {source.listed_in}")
        files.append(
            File(
                str(found),
                found.relative_to(root).as_posix(),
                status.st_size,
                str(status.st_mtime_ns),
                _format(str(found), source),
                source,
                entry,
            )
        )
    return _sorted(files, whole_folder=os.path.isdir(path))


def _list_remote(path: str, source: Source, entry: int) -> list[File]:
    fs, name = filesystem(path)
    with reading(path):
        parts = name.split("/")
        fixed = _count_fixed(parts)
        whole_folder = answer(path, lambda: fs.isdir(name)) and fixed == len(parts)
        if fixed < len(parts):
            found = fs.glob(name, detail=True)
        elif whole_folder:
            found = _find_remote(fs, path, name)
        else:
            found = {name: fs.info(name)} if fs.isfile(name) else {}
    root = "/".join(parts if whole_folder else parts[: min(fixed, len(parts) - 1)])
    files = []
    for place, about in found.items():
        identity = place.removeprefix(root).lstrip("/")
        # An object whose name ends with a slash represents a folder.
        if about["type"] != "file" or place.endswith("/") or _is_hidden(identity.split("/")):
            continue
        version = next((str(about[key]) for key in _VERSIONS if key in about), "")
        url = fs.unstrip_protocol(place)
        files.append(
            File(url, identity, about["size"], version, _format(url, source), source, entry)
        )
    return _sorted(files, whole_folder=whole_folder)


def _find_remote(fs: Any, path: str, name: str) -> dict[str, Any]:
    """The file system's records of the files below a folder."""
    found = fs.find(name, detail=True)
    names = [place.removeprefix(f"{name}/") for place in found]
    saved = _saved_dataset(path.rstrip("/"), names)
    return found if saved is None else {f"{name}/{one}": fs.info(f"{name}/{one}") for one in saved}


def _count_fixed(parts: Sequence[str]) -> int:
    """The number of components before the first with a wildcard."""
    return next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts))


def _is_hidden(parts: Sequence[str]) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in parts)


def _sorted(files: list[File], *, whole_folder: bool) -> list[File]:
    """The files sorted by identity; for a folder with record files, only these."""
    files = sorted(files, key=lambda file: file.identity.split("/"))
    records = [file for file in files if file.format not in ("text", "json")]
    records = records or list(filter(_is_array, files))
    if whole_folder and records and len(records) < len(files):
        _log.info(
            "data: files other than those with records, skipped: %d",
            len(files) - len(records),
        )
        files = records
    for file in files:
        if file.format == "json" and file.source.format is None and not _is_array(file):
            raise ValueError(
                f"{file.path} may have one record per line, or be a text; set "
                f"{setting('format')} to 'jsonl' or 'text' (it is not one array of records)"
            )
    return files


def _is_array(file: File) -> bool:
    """Whether a .json file begins like an array."""
    if file.format != "json":
        return False
    with opened(file.path) as stream:
        return stream.read(4096).lstrip()[:1] == b"["


def _format(path: str, source: Source) -> str:
    if source.format:
        return source.format
    name = pathlib.PurePosixPath(path.lower())
    suffix = name.with_suffix("").suffix if compression(path) else name.suffix
    return "json" if suffix == ".json" else _SUFFIXES.get(suffix, "text")


def _expand(entry: str) -> tuple[pathlib.Path, Iterator[pathlib.Path]]:
    """The root of an entry, to which identities are relative, and its files."""
    if entry.startswith(STDLIB):
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        pattern = pathlib.PurePath(entry.removeprefix(STDLIB).lstrip("/") or "**/*.py").parts
        return root, _match(root, pattern, _STDLIB_SKIPS)
    path = pathlib.Path(entry).expanduser().absolute()
    # These return False for a folder without permission, which the listing then names.
    if os.path.isfile(path):
        return path.parent, iter([path])
    if os.path.isdir(path):
        saved = _saved_dataset(str(path), [name for name in SAVED if os.path.isfile(path / name)])
        return path, _match(path, ("**", "*")) if saved is None else (path / one for one in saved)
    parts = path.parts
    fixed = min(_count_fixed(parts), len(parts) - 1)
    root = pathlib.Path(*parts[:fixed])
    return root, _match(root, parts[fixed:])


def _saved_dataset(folder: str, names: Collection[str]) -> list[str] | None:
    """The names of a dataset's files, if Hugging Face's `save_to_disk` wrote one here.

    Args:
      names: of files in the folder, including all of `SAVED` that exist.
    """
    splits, state, info = SAVED
    if splits in names:
        found = _file_names(folder, splits, "splits")
        raise ValueError(
            f"{folder} has the splits {', '.join(found)} of a dataset; name one of them: "
            f"{folder}/{'/'.join(found[:1])}"
        )
    if state not in names or info not in names:
        return None
    if _file_names(folder, state, "_indices_data_files"):
        raise ValueError(
            f"{folder} has reordered rows (indices); save it again after flatten_indices()"
        )
    return _file_names(folder, state, "_data_files")


def _file_names(folder: str, file: str, key: str) -> list[str]:
    """The files or folders that a JSON file of `SAVED` names, checked to be in its folder."""
    data = read_file(f"{folder}/{file}")
    try:
        named = parse_json(data).get(key) or []
        names = [one if isinstance(one, str) else one["filename"] for one in named]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is not a complete dataset: {error!r} in {file}") from error
    for name in names:
        if not is_file_name(name):
            raise ValueError(f"{folder}/{file} names {name!r}, which is not a file of this folder")
    return names


def _match(
    folder: pathlib.Path, pattern: Sequence[str], skips: Sequence[str] = ()
) -> Iterator[pathlib.Path]:
    """Files below `folder` that match, component by component; `**` is any number of folders."""
    head, *rest = pattern
    if head == "**":
        yield from _match(folder, rest or ["*"], skips)
    for path in _entries(folder, ("__pycache__", *skips), hidden=head.startswith(".")):
        if head == "**":
            if os.path.isdir(path) and not _loops(path):
                yield from _match(path, pattern, skips)
        elif not fnmatch.fnmatchcase(path.name, head):
            continue
        elif rest:
            yield from _match(path, rest, skips)
        elif not os.path.isdir(path):
            yield path


def _entries(folder: pathlib.Path, skips: Sequence[str], *, hidden: bool) -> list[pathlib.Path]:
    """The entries of a folder, sorted; `hidden` includes names that begin with a dot."""
    try:
        entries = sorted(path for path in folder.iterdir() if path.name not in skips)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise cannot_be_read(str(folder), error) from error
    return [path for path in entries if hidden or not path.name.startswith(".")]


def _loops(path: pathlib.Path) -> bool:
    """Whether a link leads back to a folder that contains it."""
    return path.is_symlink() and path.parent.resolve().is_relative_to(path.resolve())
