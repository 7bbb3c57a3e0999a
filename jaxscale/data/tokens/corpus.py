"""Corpora: tokenised documents in shards, created once, cached, and read in part."""

import concurrent.futures
import contextlib
import errno
import functools
import io
import itertools
import logging
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.config.data_source import Source, to_sources
from jaxscale.data.text.file_io import read_file, reading
from jaxscale.data.text.text_files import File, find_files
from jaxscale.data.tokens.copied import copy_folder
from jaxscale.data.tokens.index import (
    Index,
    content_fingerprint,
    digest_values,
    find_prepared,
    path_in,
    read_index,
)
from jaxscale.data.tokens.npy_files import ArrayFile, read_slices
from jaxscale.data.tokens.prepare import prepare
from jaxscale.data.tokens.shards import key_of, plan
from jaxscale.data.tokens.tokenizer import Tokenizer
from jaxscale.data.tokens.verify import check_shards, digest_of
from jaxscale.formatting import file_size
from jaxscale.storage.durable import exclusive, move
from jaxscale.storage.local_tier import is_in_local_tier
from jaxscale.storage.object_store import filesystem, is_remote

ARRAYS = ("offsets", "hashes")
"""The arrays of a folder other than the shards, as .npy files."""

_log = logging.getLogger("jaxscale")


@dataclass(frozen=True, eq=False)
class Corpus:
    """Every document of a source as [boundary, tokens...], concatenated.

    The tokens are stored in shards, and numbered across all of them. `token_bytes` [vocab_size] is
    the UTF-8 length of each id, scaled if the tokenizer's table is not exact, so that the sum over
    all tokens is `num_bytes`, the size of the text. `fingerprint` depends on the content, not on
    the location of the files. Arrays on disk are pickled as their paths.
    """

    shards: tuple[np.ndarray | ArrayFile, ...]  # unsigned
    offsets: np.ndarray  # [num_documents + 1], int64, the first token of each document
    hashes: np.ndarray  # [num_documents], uint64, of identities, for `draw`
    token_bytes: np.ndarray
    num_bytes: int
    fingerprint: str
    entries: tuple[int, ...] = (0,)  # the first document of each entry of the source
    # For each shard uint8, 1 if the next token carries loss, or None if all do; empty if all do in
    # all shards.
    counted: tuple[np.ndarray | ArrayFile | None, ...] = ()

    def verify(self, first: int = 0, every: int = 1) -> "concurrent.futures.Future[None]":
        """`check_shards` of each `every`-th shard on disk, from the `first`."""
        files = [*self.shards, *self.counted]
        return check_shards([file for file in files[first::every] if isinstance(file, ArrayFile)])

    @property
    def num_documents(self) -> int:
        """Number of documents; long ones count as their parts."""
        return len(self.hashes)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, including the boundary before each."""
        return int(self.offsets[-1])

    @property
    def tokens(self) -> np.ndarray:
        """All tokens in memory; for small corpora."""
        return self.read(0, self.num_tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids of the tokens from `start` to `stop`, [stop - start], unsigned.

        Raises:
          IndexError: there are no such tokens.
          ValueError: an id is beyond the vocabulary, or a shard cannot be read.
        """
        return self.read_each([(start, stop)])[0]

    def read_each(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """`read` of several ranges, concurrently from an object store."""
        for start, stop in ranges:
            if not 0 <= start <= stop <= self.num_tokens:
                raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        parts = [self._parts(*span) for span in ranges]
        slices = iter(read_slices([(self.shards[i], part) for each in parts for i, part in each]))
        found = [[next(slices) for _ in each] for each in parts]
        return [self._checked(*each) for each in zip(found, ranges)]

    def _checked(self, parts: list[np.ndarray], span: tuple[int, int]) -> np.ndarray:
        """The ids of a range, from its parts in one shard each."""
        start, stop = span
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if ids.max(initial=0) >= len(self.token_bytes):
            shard = self.shards[self._parts(start, stop)[0][0]]
            where = shard.path if isinstance(shard, ArrayFile) else "the corpus"
            raise ValueError(
                f"{where} is damaged: tokens {start} to {stop} have the id {ids.max()}, and the "
                f"vocabulary has {len(self.token_bytes)}; prepare the text again"
            )
        return ids

    def read_counted(self, start: int, stop: int) -> np.ndarray:
        """Whether each token's successor in its document carries loss, bool [stop - start]."""
        return self.read_counted_each([(start, stop)])[0]

    def read_counted_each(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """`read_counted` of several ranges, concurrently from an object store."""
        found = [np.ones(stop - start, bool) for start, stop in ranges]
        wanted, targets = [], []
        for span, marks in zip(ranges, found) if self.counted else ():
            begin = 0
            for i, part in self._parts(*span):
                length = min(part.stop, len(self.shards[i])) - part.start
                if (array := self.counted[i]) is not None:
                    wanted.append((array, part))
                    targets.append(marks[begin : begin + length])
                begin += length
        for target, read in zip(targets, read_slices(wanted)):
            target[:] = read
        return found

    def marked(self, documents: np.ndarray) -> np.ndarray:
        """Whether each document is in a shard with marks of loss, bool."""
        if not self.counted:
            return np.zeros(len(documents), bool)
        shards = np.searchsorted(self._starts, self.offsets[documents], "right") - 1
        return np.array([one is not None for one in self.counted])[shards]

    def _parts(self, start: int, stop: int) -> list[tuple[int, slice]]:
        """The shards with tokens from `start` to `stop`, and the slice in each."""
        first, last = np.searchsorted(self._starts, [start, max(start, stop - 1)], "right") - 1
        return [
            (i, slice(max(start - int(self._starts[i]), 0), stop - int(self._starts[i])))
            for i in range(first, last + 1)
        ]

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """The first token of each shard."""
        return np.cumsum([0, *(len(shard) for shard in self.shards[:-1])])

    def __getstate__(self) -> dict:
        def pack(value: object) -> object:
            return _Mapped(str(value.filename)) if isinstance(value, np.memmap) else value

        return {name: pack(value) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict) -> None:
        def unpack(value: object) -> object:
            return np.load(value.path, mmap_mode="r") if isinstance(value, _Mapped) else value

        self.__dict__.update({name: unpack(value) for name, value in state.items()})


@dataclass(frozen=True)
class _Mapped:
    """An array on disk, to be mapped when a pickled corpus is loaded."""

    path: str


def open_corpus(
    source: Sequence[str | Source], tokenizer: Tokenizer, directory: pathlib.Path | None = None
) -> Corpus:
    """The documents of `data.source`: prepared folders as they are, all other text tokenised.

    The cache of an earlier call in `directory` is used if the files' names, sizes and times and the
    tokenizer are the same. Without a directory, or in a read-only one without a cache, all tokens
    are in memory.

    Raises:
      ValueError: as `find_files`, `prepare` and `open_folder`.
    """
    sources = to_sources(source)
    folders = [find_prepared(entry) for entry in sources]
    raw = [i for i, folder in enumerate(folders) if folder is None]
    own: dict[int, list[File]] = {i: [] for i in raw}
    for file in find_files([sources[i] for i in raw]) if raw else ():
        own[raw[file.entry]].append(file)
    if directory:
        _log_changes(list(filter(None, own.values())), tokenizer, directory)
    parts = [
        _tokenized(own[i], tokenizer, directory)
        if folder is None
        else open_folder(folder, tokenizer, directory)
        for i, folder in enumerate(folders)
    ]
    corpus = _joined(parts, tokenizer)
    _log.info(
        "data: %d documents, %s, %s tokens (%.2f bytes a token)",
        corpus.num_documents,
        file_size(corpus.num_bytes),
        f"{corpus.num_tokens:,}",
        corpus.num_bytes / corpus.num_tokens,
    )
    return corpus


def open_folder(
    folder: str, tokenizer: Tokenizer, directory: pathlib.Path | None = None, *, map: bool = True
) -> Corpus:
    """The corpus in a folder of prepared shards, local or at a URL.

    Args:
      directory: cache for the small arrays of a folder at a URL, which are mapped; in the local
        tier of a run, for the whole folder.
      map: memory-maps local files; otherwise reads them.

    Raises:
      ValueError: a shard is missing or cut short, or another tokenizer made them.
    """
    index = read_index(folder)
    _check_tokenizer(folder, index, tokenizer)
    if is_remote(folder) and directory and is_in_local_tier(directory):
        folder = copy_folder(folder, index, directory)
    _check_sizes(folder, index)

    def opened(file: str, dtype: str, length: int, num_bytes: int, digest: str) -> Any:
        if not file:
            return None
        array = _array_file(folder, file, dtype, length, num_bytes, digest)
        return array if map else array[:].copy()

    shards = tuple(
        opened(one.file, index.dtype, one.num_tokens, one.file_bytes, one.digest)
        for one in index.shards
    )
    counted = tuple(
        opened(one.loss_file, "uint8", one.num_tokens, one.loss_bytes, one.loss_digest)
        for one in index.shards
    )
    offsets, hashes = (_array(folder, name, index, directory, map) for name in ARRAYS)
    if len(offsets) != index.num_documents + 1 or offsets[-1] != index.num_tokens:
        raise ValueError(f"{path_in(folder, 'offsets.npy')} is damaged; prepare the text again")
    _check_content(folder, index, offsets, hashes)
    return Corpus(
        shards=shards,
        counted=_unless_none(counted),
        offsets=offsets,
        hashes=hashes,
        token_bytes=tokenizer.token_bytes * (index.num_bytes / index.written_bytes),
        num_bytes=index.num_bytes,
        fingerprint=index.fingerprint,
    )


def _check_tokenizer(folder: str, index: Index, tokenizer: Tokenizer) -> None:
    """Refuses shards of another tokenizer, or of one with other ids.

    Raises:
      ValueError: names both, and the setting to change.
    """
    if index.tokenizer_fingerprint != tokenizer.fingerprint:
        file = path_in(folder, index.tokenizer_file) if index.tokenizer_file else index.tokenizer
        raise ValueError(
            f"data.tokenizer = {tokenizer.name!r} is not the tokenizer of {folder}, which was "
            f"prepared with {index.tokenizer!r}; set data.tokenizer = {file!r}"
        )
    begin = str(list(tokenizer.begin(1)))
    if index.text_begin not in ("", begin):
        other = "tokenizer" if tokenizer.text_begin is None else "boundary"
        raise ValueError(
            f"the prompts of {folder} begin with the ids {index.text_begin}, and here with "
            f"{begin}; set data.text_begin = {other!r}, or prepare the text again"
        )
    if index.max_id >= tokenizer.vocab_size and index.vocab_size > tokenizer.vocab_size:
        name = next((name for name, i in index.special.items() if i == index.max_id), "")
        raise ValueError(
            f"{folder} has the id {index.max_id} (the special token {name!r}), and "
            f"model.vocab_size = {tokenizer.vocab_size}; remove it from the text, or from the "
            "chat template, and prepare the text again"
        )
    if index.max_id >= tokenizer.vocab_size:
        raise ValueError(
            f"{folder} has the id {index.max_id}, and data.tokenizer = {tokenizer.name!r} has "
            f"{tokenizer.vocab_size}; prepare the text again"
        )


def _array_file(
    folder: str, name: str, dtype: str, length: int, num_bytes: int, digest: str
) -> ArrayFile:
    header_bytes = num_bytes - length * np.dtype(dtype).itemsize
    return ArrayFile(path_in(folder, name), dtype, length, header_bytes, digest)


def _check_content(folder: str, index: Index, offsets: np.ndarray, hashes: np.ndarray) -> None:
    """Compares the arrays of a folder with its fingerprint.

    Raises:
      ValueError: one changed since it was written, or the digests of the shards did.
    """
    own = digest_of(offsets), digest_of(hashes)
    if content_fingerprint(index.tokenizer_fingerprint, *own, index.shards) != index.fingerprint:
        raise ValueError(
            f"{path_in(folder, 'offsets.npy')}, hashes.npy or index.json there changed since "
            "they were written: restore the whole folder, or prepare the text again"
        )


def _unless_none[Marks](counted: tuple[Marks | None, ...]) -> tuple[Marks | None, ...]:
    """() if no shard has marks."""
    return counted if any(one is not None for one in counted) else ()


def _tokenized(
    files: Sequence[File], tokenizer: Tokenizer, directory: pathlib.Path | None
) -> Corpus | None:
    """The corpus of some files, tokenised or from the cache; None without files, as for an entry
    that names only files of an earlier one."""
    if not files:
        return None
    if directory is None:
        return _in_memory(files, tokenizer)
    folder = directory / f"tokens-{key_of(plan(files, tokenizer, directory))}"
    if folder.is_dir():  # complete, since it was renamed
        try:
            return open_folder(str(folder), tokenizer)
        except ValueError as error:
            raise ValueError(
                f"{error} (a cache: remove {folder}, and the text is tokenised again)"
            ) from error
    unfinished = directory / f"unfinished-{folder.name}"
    with _reserved(directory) as ours:
        if not ours:
            return _in_memory(files, tokenizer)
        for left in directory.glob("unfinished-tokens-*"):
            if left != unfinished:  # of other text, or of an old killed run
                shutil.rmtree(left)
        if not folder.is_dir():  # resumes the rest of a killed run
            try:
                prepare(plan(files, tokenizer, unfinished), tokenizer)
            except OSError as error:  # such as a full disk, whose error names no file
                error.filename = error.filename or str(directory)
                raise
            move(unfinished, folder)
    return open_folder(str(folder), tokenizer)


def _in_memory(files: Sequence[File], tokenizer: Tokenizer) -> Corpus:
    with tempfile.TemporaryDirectory() as span:
        prepare(plan(files, tokenizer, pathlib.Path(span)), tokenizer)
        return open_folder(span, tokenizer, map=False)


@contextlib.contextmanager
def _reserved(directory: pathlib.Path) -> Iterator[bool]:
    """Excludes other processes that tokenise there; False if the folder is read-only."""
    ours, waiting = True, "data: another process tokenises in %s; waiting for it"
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = exclusive(directory / ".lock", lambda: _log.info(waiting, directory))
            stack.enter_context(lock)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            _log.info("data: %s is read-only (%s); tokenising in memory", directory, error.strerror)
            ours = False
        yield ours


def _log_changes(
    entries: Sequence[Sequence[File]], tokenizer: Tokenizer, directory: pathlib.Path
) -> None:
    there = {path.name.removeprefix("tokens-") for path in directory.glob("tokens-*")}
    wanted = {key_of(plan(files, tokenizer, directory)) for files in entries}
    if there - wanted and wanted - there:
        _log.info("data: the files or the tokenizer changed; tokenising again")


def _joined(parts: Sequence[Corpus | None], tokenizer: Tokenizer) -> Corpus:
    """The corpora of the entries of a source, concatenated."""
    corpora = [part for part in parts if part is not None]
    if len(parts) == 1:
        return corpora[0]

    def each(name: str) -> list[Any]:
        return [getattr(corpus, name) for corpus in corpora]

    starts = np.cumsum([0, *each("num_tokens")])
    counts = [part.num_documents if part else 0 for part in parts]
    num_bytes = sum(each("num_bytes"))
    own = tokenizer.token_bytes.sum()
    written = sum(corpus.num_bytes * own / corpus.token_bytes.sum() for corpus in corpora)
    return Corpus(
        shards=tuple(itertools.chain(*each("shards"))),
        offsets=np.concatenate(
            [[0], *(c.offsets[1:] + start for c, start in zip(corpora, starts))], dtype=np.int64
        ),
        hashes=np.concatenate(each("hashes")),
        token_bytes=tokenizer.token_bytes * (num_bytes / written),
        num_bytes=num_bytes,
        counted=_unless_none(
            tuple(m for c in corpora for m in c.counted or (None,) * len(c.shards))
        ),
        fingerprint=digest_values(each("fingerprint")),
        entries=tuple(np.cumsum([0, *counts[:-1]]).tolist()),
    )


def _check_sizes(folder: str, index: Index) -> None:
    """Raises if a shard is missing or cut short."""
    sizes = {}
    with reading(folder):
        if is_remote(folder):
            fs, name = filesystem(folder)
            listed = fs.ls(name, detail=True)  # s3fs lists only names by default
            sizes = {about["name"].rsplit("/", 1)[-1]: about["size"] for about in listed}
        else:
            sizes = {path.name: path.stat().st_size for path in pathlib.Path(folder).iterdir()}
    for file, num_bytes in (item for shard in index.shards for item in shard.files.items()):
        path = path_in(folder, file)
        if file not in sizes:
            raise ValueError(
                f"{path} is missing, one of the {len(index.shards)} shards of that folder; restore "
                "it, or prepare the text again"
            )
        if sizes[file] != num_bytes:
            raise ValueError(
                f"{path} has {sizes[file]} bytes, and {num_bytes} were written; restore "
                "the whole file, or prepare the text again"
            )


def _array(
    folder: str, name: str, index: Index, directory: pathlib.Path | None, map: bool
) -> np.ndarray:
    """One of the arrays other than shards; cached for a folder at a URL."""
    path = path_in(folder, f"{name}.npy")
    if is_remote(path):
        if directory is None:
            return np.load(io.BytesIO(read_file(path)))
        copy = directory / f"{name}-{index.fingerprint}.npy"
        if not copy.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            unfinished = copy.with_name(f"unfinished-{copy.name}-{uuid.uuid4().hex[:8]}")
            unfinished.write_bytes(read_file(path))
            unfinished.replace(copy)
        path = str(copy)
    try:
        with reading(path):
            return np.load(path, mmap_mode="r" if map else None)
    except ValueError as error:  # NumPy's errors name no file
        if path in str(error):
            raise
        raise ValueError(f"{path} is damaged: {error}; prepare the text again") from error
