"""Shards: the same whoever makes them and however often they are killed; refused when damaged."""

import itertools
import json
import logging
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import fsspec
import numpy as np
import pytest

from jaxscale.config.data_source import to_sources
from jaxscale.data.text.text_files import find_files
from jaxscale.data.tokens import copied, verify
from jaxscale.data.tokens import prepare as preparing
from jaxscale.data.tokens.corpus import Corpus, open_corpus, open_folder
from jaxscale.data.tokens.index import find_prepared
from jaxscale.data.tokens.prepare import prepare
from jaxscale.data.tokens.shards import Work, find_made, make_shard, plan
from jaxscale.data.tokens.tokenizer import Tokenizer, load_tokenizer
from jaxscale.storage import local_tier
from jaxscale.storage.object_store import ObjectStore

BYTES = load_tokenizer("bytes")


@pytest.fixture
def texts(tmp_path) -> pathlib.Path:
    """Two files of lines, two of text and one of records, about 9 kB."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(2):
        lines = [f"line {j} of file {i} is é" for j in range(80)]
        (folder / f"lines{i}.txt").write_text("\n".join(lines))
        (folder / f"whole{i}.md").write_text(f"text {i} " * 50)
    records = [{"text": f"record {j}"} for j in range(50)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


def source(folder: pathlib.Path) -> list[dict]:
    return [
        {"path": f"{folder}/lines*.txt", "boundary": "line"},
        {"path": [f"{folder}/*.md", f"{folder}/a.jsonl"]},
    ]


def works_of(
    texts: pathlib.Path,
    folder: pathlib.Path,
    tokenizer: Tokenizer = BYTES,
    shard_bytes: int = 1000,
    **changes,
) -> list[Work]:
    entries = [entry | changes for entry in source(texts)]
    return plan(find_files(entries), tokenizer, folder, shard_bytes)


def bytes_of(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def documents(corpus: Corpus) -> list[str]:
    bounds = corpus.offsets.tolist()
    parts = [corpus.read(a, b) for a, b in itertools.pairwise(bounds)]
    assert all(part[0] == BYTES.boundary for part in parts)
    return [BYTES.decode(part[1:]) for part in parts]


def test_shards_hold_every_document_once_in_order(texts, tmp_path):
    index = prepare(works_of(texts, tmp_path / "out"), BYTES)
    corpus = open_folder(str(tmp_path / "out"), BYTES)
    lines = [line for i in range(2) for line in (texts / f"lines{i}.txt").read_text().split("\n")]
    whole = [(texts / f"whole{i}.md").read_text() for i in range(2)]
    assert documents(corpus) == [*lines, *whole, *(f"record {j}" for j in range(50))]
    assert len(index.shards) > 5
    assert max(shard.num_tokens for shard in index.shards) < 2200
    assert index.num_documents == corpus.num_documents == 160 + 2 + 50
    assert index.num_tokens == corpus.num_tokens == sum(s.num_tokens for s in index.shards)
    text_bytes = sum(len(text.encode()) for text in documents(corpus))
    assert index.num_bytes == corpus.num_bytes == text_bytes
    assert (index.max_id, index.dtype, index.num_left_out) == (256, "uint16", 0)
    assert sorted(bytes_of(tmp_path / "out")) == sorted(
        ["index.json", "offsets.npy", "hashes.npy", *(shard.file for shard in index.shards)]
    )


def test_the_size_of_shards_changes_nothing_that_is_read(texts, tmp_path):
    corpora = []
    for shard_bytes in (100, 700, 0):
        folder = tmp_path / str(shard_bytes)
        prepare(works_of(texts, folder, shard_bytes=shard_bytes), BYTES)
        corpora.append(open_folder(str(folder), BYTES))
    for corpus in corpora[1:]:
        np.testing.assert_array_equal(corpus.tokens, corpora[0].tokens)
        np.testing.assert_array_equal(corpus.offsets, corpora[0].offsets)
        np.testing.assert_array_equal(corpus.hashes, corpora[0].hashes)


def test_a_run_reads_from_shards_what_it_reads_from_text(texts, tmp_path):
    prepare(works_of(texts, tmp_path / "out", shard_bytes=0), BYTES)
    prepared = open_corpus([str(tmp_path / "out")], BYTES)
    fresh = open_corpus(source(texts), BYTES)
    np.testing.assert_array_equal(prepared.tokens, fresh.tokens)
    np.testing.assert_array_equal(prepared.hashes, fresh.hashes)
    assert (prepared.entries, fresh.entries) == ((0,), (0, 160))
    np.testing.assert_array_equal(prepared.token_bytes, fresh.token_bytes)


@pytest.mark.proof(but=("1", "31", "28"))
@pytest.mark.parametrize("stop", range(1, 40, 3))
def test_work_that_ends_anywhere_is_resumed(texts, tmp_path, monkeypatch, stop):
    """Every rename of a finished file is a place to stop; what comes after must be the same."""
    prepare(works_of(texts, tmp_path / "whole"), BYTES)
    folder = tmp_path / "out"
    works = works_of(texts, folder)
    count = 0

    def rename(self, target):
        nonlocal count
        count += 1
        if count > stop:
            raise KeyboardInterrupt
        os.rename(self, target)
        return target

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", rename)
        try:
            prepare(works, BYTES)
        except KeyboardInterrupt:
            assert not (folder / "index.json").exists()
            with pytest.raises(ValueError, match=r"unfinished shards; run the command .* again"):
                open_corpus([str(folder)], BYTES)
    made = [work for work in works if find_made(work)]
    if (folder / ".unfinished").exists():
        assert len(made) == min(stop // 2, len(works))
    again = []

    def counted(work, *rest):
        again.append(work)
        make_shard(work, *rest)

    monkeypatch.setattr(preparing, "make_shard", counted)
    prepare(works, BYTES)
    assert not set(again) & set(made)
    assert bytes_of(folder) == bytes_of(tmp_path / "whole")


COMMAND = [sys.executable, "-m", "jaxscale.prepare"]


@pytest.mark.proof
def test_killed_processes_leave_nothing_lost_or_doubled(tmp_path):
    """Really killed, twice, with two workers; then as if it had never been."""
    text = tmp_path / "a.txt"
    text.write_text("".join(f"line {i} " + "word " * (i % 50) + "\n" for i in range(100_000)))
    flags = [
        "--input",
        str(text),
        "--boundary",
        "line",
        "--shard_bytes",
        "200_000",
        "--tokenizer",
        "bytes",
    ]
    whole, folder = tmp_path / "whole", tmp_path / "out"
    subprocess.run([*COMMAND, *flags, "--output", str(whole), "--workers", "0"], check=True)
    for wanted in (2, 9):
        command = [*COMMAND, *flags, "--output", str(folder), "--workers", "2"]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 60
        while len(list(folder.glob(".unfinished/*.npz"))) < wanted and run.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        run.wait()
        while processes_of(run.pid):
            assert time.monotonic() < deadline, "workers outlived their parent"
            time.sleep(0.05)
        assert not (folder / "index.json").exists()
    subprocess.run([*COMMAND, *flags, "--output", str(folder), "--workers", "2"], check=True)
    assert bytes_of(folder) == bytes_of(whole)


def processes_of(session: int) -> list[str]:
    """Processes of a session that run."""
    listing = subprocess.run(["ps", "-eo", "sess=,stat=,pid="], capture_output=True, text=True)
    rows = [line.split() for line in listing.stdout.splitlines()]
    return [row[2] for row in rows if row[0] == str(session) and not row[1].startswith("Z")]


def test_what_is_prepared_is_not_read_again(texts, tmp_path, monkeypatch):
    first = prepare(works_of(texts, tmp_path / "out"), BYTES)
    monkeypatch.setattr(preparing, "make_shard", None)
    assert prepare(works_of(texts, tmp_path / "out"), BYTES) == first


def test_only_what_changed_is_made_again_before_the_end(texts, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    works = works_of(texts, folder)
    (folder / ".unfinished").mkdir(parents=True)
    for work in works:
        make_shard(work, BYTES, lambda stored, text: None)
    changed = (texts / "a.jsonl").read_text().replace("record 4", "recorD 4")
    (texts / "a.jsonl").write_text(changed)
    again = []
    monkeypatch.setattr(
        preparing, "make_shard", lambda work, *rest: (again.append(work), make_shard(work, *rest))
    )
    prepare(works_of(texts, folder), BYTES)
    assert 0 < len(again) < len(works)
    assert all(any("a.jsonl" in piece.file.path for piece in work.pieces) for work in again)
    assert "recorD 49" in documents(open_folder(str(folder), BYTES))


@pytest.mark.parametrize("change", ["text", "tokenizer", "limit"])
def test_a_folder_of_other_text_is_not_written_over(texts, tmp_path, change):
    prepare(works_of(texts, tmp_path / "out"), BYTES)
    tokenizer, changes = BYTES, {}
    if change == "text":
        (texts / "a.jsonl").write_text('{"text": "other"}')
    elif change == "tokenizer":
        tokenizer = load_tokenizer("bpe:258", [f"{texts}/*.md"])
    else:
        changes = {"max_document_bytes": 10}
    with pytest.raises(ValueError, match=r"out has shards of other text.*another folder"):
        prepare(works_of(texts, tmp_path / "out", tokenizer, **changes), tokenizer)


def test_files_of_another_tokenizer_are_not_read_with_this_one(texts, tmp_path):
    """Workers read it from the folder of the shards, and so does who inspects them."""
    tokenizer = load_tokenizer("bpe:258", [f"{texts}/*.md"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/tokenizer_config.json").write_text('{"add_bos_token": true}')
    with pytest.raises(
        ValueError, match=r"out/tokenizer_config.json belongs to another tokenizer than"
    ):
        prepare(works_of(texts, tmp_path / "out", tokenizer), tokenizer)
    prepare(works_of(texts, tmp_path / "out"), BYTES)


def test_two_processes_do_not_write_to_one_folder(texts, tmp_path):
    (tmp_path / "out" / ".unfinished").mkdir(parents=True)
    lock = tmp_path / "out" / ".unfinished" / "lock"
    with (
        preparing._locked(lock, tmp_path),
        pytest.raises(ValueError, match="another process is preparing"),
    ):
        prepare(works_of(texts, tmp_path / "out"), BYTES)


def spoil(texts: pathlib.Path, count: int) -> None:
    lines = (texts / "a.jsonl").read_text().splitlines()
    lines[10 : 10 + count] = ["{"] * count
    (texts / "a.jsonl").write_text("\n".join(lines))


def test_a_bad_document_ends_the_work_and_is_named(texts, tmp_path, caplog):
    spoil(texts, 1)
    with pytest.raises(ValueError, match=r"a.jsonl, line 11 is not JSON.*'skip_share'"):
        prepare(works_of(texts, tmp_path / "out"), BYTES)
    # Once the share is allowed, the finished shards are still good.
    made = [work for work in works_of(texts, tmp_path / "out") if find_made(work)]
    assert made
    works = works_of(texts, tmp_path / "out", skip_share=0.02)
    assert all(find_made(works[work.number]) for work in made)
    with caplog.at_level(logging.INFO, "jaxscale"):
        index = prepare(works, BYTES)
    assert (index.num_documents, index.num_left_out) == (211, 1)
    assert "1 bad documents are left out, such as: " in caplog.text
    assert "a.jsonl, line 11 is not JSON" in caplog.text


def test_more_bad_documents_than_allowed_are_counted_and_shown(texts, tmp_path):
    spoil(texts, 3)
    message = (
        r"3 of 52 documents of .* are bad, a share of 0.058 and more than skip_share = 0.05; raise "
        r".*--skip_share of prepare\); the first: .*a.jsonl, line 11 is not JSON.*line 12.*line 13"
    )
    with pytest.raises(ValueError, match=message):
        prepare(works_of(texts, tmp_path / "out", skip_share=0.05), BYTES)
    index = prepare(works_of(texts, tmp_path / "out", skip_share=3 / 52), BYTES)
    assert index.num_left_out == 3


def test_a_document_too_long_is_split_or_refused(texts, tmp_path):
    prepare(works_of(texts, tmp_path / "out", max_document_bytes=100), BYTES)
    corpus = open_folder(str(tmp_path / "out"), BYTES)
    assert max(np.diff(corpus.offsets)) == 101
    assert "".join(documents(corpus)[160:164]) == (texts / "whole0.md").read_text()
    assert len(set(corpus.hashes[160:164].tolist())) == 1  # they are held out together
    with pytest.raises(ValueError, match=r"whole0.md has 350 bytes, more than .* = 100"):
        prepare(
            works_of(texts, tmp_path / "no", max_document_bytes=100, long_documents="refuse"),
            BYTES,
        )


@pytest.fixture
def folder(texts, tmp_path) -> pathlib.Path:
    prepare(works_of(texts, tmp_path / "out"), BYTES)
    return tmp_path / "out"


def damage_index(folder: pathlib.Path, **changes) -> None:
    values = json.loads((folder / "index.json").read_text())
    values.pop("digest", None)
    (folder / "index.json").write_text(json.dumps(values | changes))


def test_a_shard_that_is_missing_or_short_is_named(folder):
    path = folder / "tokens-00003.npy"
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    message = rf"tokens-00003.npy has {len(data) - 2} bytes, and {len(data)} were written"
    with pytest.raises(ValueError, match=message):
        open_corpus([str(folder)], BYTES)
    path.unlink()
    with pytest.raises(ValueError, match=r"tokens-00003.npy is missing, one of the \d+ shards"):
        open_corpus([str(folder)], BYTES)


def test_an_id_beyond_the_vocabulary_is_named(folder):
    corpus = open_corpus([str(folder)], BYTES)
    shard = np.load(folder / "tokens-00000.npy", mmap_mode="r+")
    shard[17] = 300
    shard.flush()
    corpus.read(0, 17)
    with pytest.raises(ValueError, match=r"tokens-00000.npy is damaged: .* the id 300.* has 257"):
        corpus.read(10, 20)


@pytest.mark.parametrize("name", ["offsets.npy", "hashes.npy", "index.json", "tokens-00003.npy"])
def test_a_bit_that_flipped_is_noticed(folder, name, monkeypatch):
    """In the small files when the folder is opened; in a shard before or during a run."""
    path = folder / name
    data = bytearray(path.read_bytes())
    place = data.rindex(b'"num_bytes": ') + 13 if name == "index.json" else -8
    data[place] ^= 1
    path.write_bytes(data)
    if name.startswith("tokens"):
        corpus = open_corpus([str(folder)], BYTES)
        with pytest.raises(ValueError, match=r"tokens-00003.npy changed since it was written"):
            corpus.verify()
        assert not corpus.verify(first=1, every=100).done()
        monkeypatch.setattr(verify, "AT_ONCE_BYTES", 0)
        with pytest.raises(ValueError, match=r"tokens-00003.npy changed since it was written"):
            corpus.verify().result(timeout=60)
    else:
        with pytest.raises(ValueError, match=rf"{name}.* (changed|damaged)"):
            open_corpus([str(folder)], BYTES)


def test_a_cut_array_is_named(folder):
    os.truncate(folder / "offsets.npy", 100)
    with pytest.raises(ValueError, match=r"offsets.npy is damaged: .*; prepare the text again"):
        open_corpus([str(folder)], BYTES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "jaxscale shards 0"}, "index.json is of another version than 'jaxscale shards"),
        ({"surprise": 1}, "index.json is damaged: .*surprise"),
        ({"dtype": "int8"}, "index.json is damaged: dtype is 'int8'"),
        ({"num_tokens": "9"}, "index.json is damaged: num_tokens is '9'"),
        (
            {"tokenizer_file": "../../x.json"},
            "tokenizer_file = '../../x.json' is not the name of a f",
        ),
        ({"tokenizer_file": "/etc/passwd"}, "tokenizer_file = '/etc/passwd' is not the name of"),
        ({"shards": [{"file": "a"}]}, "index.json is damaged: .*missing 4 required"),
        ({"shards": 3}, "index.json is damaged: 'int' object is not iterable"),
        ({"num_documents": 3}, "offsets.npy is damaged"),
        ({"max_id": 300}, "out has the id 300, and data.tokenizer = 'bytes' has 257"),
        (
            {"tokenizer_fingerprint": "x", "tokenizer": "bpe:300", "tokenizer_file": "t.json"},
            r"data.tokenizer = 'bytes' is not the tokenizer of .*out, which was prepared with "
            r"'bpe:300'; set data.tokenizer = '.*/out/t.json'",
        ),
    ],
)
def test_an_index_that_does_not_fit_is_named(folder, changes, message):
    damage_index(folder, **changes)
    with pytest.raises(ValueError, match=message):
        open_corpus([str(folder)], BYTES)


def test_a_folder_without_an_index_of_ours_is_not_shards(tmp_path):
    (tmp_path / "index.json").write_text('{"documents": []}')
    with pytest.raises(ValueError, match="has no prepared shards"):
        open_corpus([{"path": str(tmp_path), "format": "shards"}], BYTES)
    (tmp_path / "index.json").write_text('{"docu')
    with pytest.raises(ValueError, match=r"index.json is not a complete index of shards"):
        open_corpus([str(tmp_path)], BYTES)


def test_one_shard_alone_is_not_a_source(folder):
    with pytest.raises(ValueError, match=r"00000.npy is one of the shards .* folder, .*out"):
        open_corpus([f"{folder}/tokens-00000.npy"], BYTES)


def test_a_prepared_folder_is_a_separate_entry(folder):
    with pytest.raises(ValueError, match="out is one of 2 paths of its entry"):
        open_corpus([{"path": [str(folder), "other.txt"]}], BYTES)


@pytest.mark.parametrize(
    ("key", "value"),
    [("messages", "messages"), ("field", "body"), ("format", "jsonl"), ("skip_share", 0.1)],
)
def test_how_to_read_text_is_not_a_setting_of_shards(folder, key, value):
    """They would be read as they were prepared, with loss on every token."""
    with pytest.raises(ValueError, match=rf"{key} = '?{value}'? is a setting of .*out.* --{key}$"):
        open_corpus([{"path": str(folder), key: value}], BYTES)
    (kept,) = to_sources([{"path": str(folder), "format": "shards", "weight": 2}])
    assert find_prepared(kept) == str(folder)


def test_entries_of_both_kinds_make_one_corpus(folder, texts, tmp_path):
    corpus = open_corpus([f"{texts}/whole0.md", str(folder)], BYTES, tmp_path / "run")
    prepared = open_corpus([str(folder)], BYTES)
    assert corpus.entries == (0, 1)
    assert documents(corpus) == [(texts / "whole0.md").read_text(), *documents(prepared)]
    assert corpus.num_bytes == prepared.num_bytes + 350
    assert corpus.token_bytes[corpus.tokens].sum() == corpus.num_bytes


@pytest.mark.parametrize("damaged", ["", "tokens-00002.npy", "hashes.npy"])
def test_a_run_at_a_url_copies_shards_and_compares_them(folder, tmp_path, monkeypatch, damaged):
    """What differs is fetched again by the next start, and of the shards nothing else."""
    store = fsspec.filesystem("memory")
    store.put(str(folder), "/bucket/out", recursive=True)
    monkeypatch.setenv("JAXSCALE_LOCAL_TIER", str(tmp_path / "tiers"))
    directory = local_tier.local_tier("memory://bucket/run") / "tokens"
    local = open_corpus([str(folder)], BYTES)
    try:
        with pytest.raises(ValueError, match="is not the tokenizer of memory://bucket/out, which"):
            open_corpus(["memory://bucket/out"], load_tokenizer("esm2"), directory)
        assert not directory.exists(), "nothing is copied for a run that is refused"
        if damaged:
            good = store.cat_file(f"/bucket/out/{damaged}")
            store.pipe_file(f"/bucket/out/{damaged}", good[:-1] + bytes([good[-1] ^ 1]))
            with pytest.raises(ValueError, match=rf"out/.*{damaged} changed since it was"):
                open_corpus(["memory://bucket/out"], BYTES, directory)
            assert not list(directory.glob("prepared-*"))
            store.pipe_file(f"/bucket/out/{damaged}", good)
            fetched = []
            before = ObjectStore.download
            monkeypatch.setattr(
                ObjectStore,
                "download",
                lambda self, files, size: (
                    fetched.append(sorted(files)),
                    before(self, files, size),
                ),
            )
        corpus = open_corpus(["memory://bucket/out"], BYTES, directory)
        if damaged:
            assert fetched[0] == [damaged] * damaged.startswith("tokens")
        assert corpus.fingerprint == local.fingerprint
        np.testing.assert_array_equal(corpus.tokens, local.tokens)
        corpus.verify()
        again = open_corpus(["memory://bucket/out"], BYTES, directory)
        np.testing.assert_array_equal(again.tokens, local.tokens)
    finally:
        store.rm("/bucket", recursive=True)


def test_shards_without_space_are_read_in_part(folder, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "jaxscale")
    store = fsspec.filesystem("memory")
    store.put(str(folder), "/bucket/out", recursive=True)
    monkeypatch.setenv("JAXSCALE_LOCAL_TIER", str(tmp_path / "tiers"))
    monkeypatch.setattr(copied, "MOST_OF_FREE", 1e-15)
    directory = local_tier.local_tier("memory://bucket/run") / "tokens"
    try:
        corpus = open_corpus(["memory://bucket/out"], BYTES, directory)
        np.testing.assert_array_equal(corpus.tokens, open_corpus([str(folder)], BYTES).tokens)
    finally:
        store.rm("/bucket", recursive=True)
    assert "its shards are read from the store, in part, and not compared" in caplog.text
    assert not list(directory.glob("prepared-*"))


@pytest.mark.proof(but=("memory-False", "memory-True"))
@pytest.mark.parametrize(("scheme", "keep"), [("memory", True), ("memory", False), ("s3", True)])
def test_shards_are_read_in_part_from_object_stores(
    request, folder, tmp_path, monkeypatch, scheme, keep
):
    if scheme == "s3":
        request.getfixturevalue("s3_server")
    store, address = fsspec.filesystem(scheme), f"{scheme}://bucket/{os.getpid()}/out"
    store.put(str(folder), address, recursive=True)
    local = open_corpus([str(folder)], BYTES)
    fetched = []
    cat = store.cat_ranges

    def note(names, starts, stops):
        fetched.append(sum(stops) - sum(starts))
        return cat(names, starts, stops)

    monkeypatch.setattr(store, "cat_ranges", note)
    try:
        directory = tmp_path / "run" if keep else None
        corpus = open_corpus([address], BYTES, directory)
        assert corpus.fingerprint == local.fingerprint
        assert not fetched
        corpus = pickle.loads(pickle.dumps(corpus))
        for start, stop in [(0, 5), (990, 2500), (3, 3), (0, local.num_tokens)]:
            np.testing.assert_array_equal(corpus.read(start, stop), local.read(start, stop))
            assert sum(fetched) == 2 * (stop - start)  # two bytes a token
            fetched.clear()
        places = [(0, 5), (1990, 2010), (40, 50)]
        for left, right in zip(corpus.read_each(places), local.read_each(places)):
            np.testing.assert_array_equal(left, right)
        assert fetched == [70], "all in one call, which asks for them at once"
        np.testing.assert_array_equal(corpus.offsets, local.offsets)
        if keep:
            assert isinstance(corpus.offsets, np.memmap)
            # The arrays are here already.
            monkeypatch.setattr("jaxscale.data.tokens.corpus.read_file", None)
            again = open_corpus([address], BYTES, directory)
            np.testing.assert_array_equal(again.hashes, local.hashes)
        store.rm(f"{address}/tokens-00002.npy")
        with pytest.raises(ValueError, match=r"/out/tokens-00002.npy is missing"):
            open_corpus([address], BYTES)
    finally:
        store.rm(address, recursive=True)


def test_a_vocabulary_beyond_16_bits_takes_32(texts, tmp_path):
    wide = load_tokenizer("bytes")
    wide = Tokenizer(
        70_000,
        69_999,
        np.ones(70_000),
        "wide",
        lambda texts: [np.full(3, 65_536) for _ in texts],
        wide.decode,
    )
    index = prepare(works_of(texts, tmp_path / "out", wide), wide)
    assert (index.dtype, index.max_id) == ("uint32", 69_999)
    assert open_folder(str(tmp_path / "out"), wide).read(0, 2).tolist() == [69_999, 65_536]


def test_progress_is_a_share_a_rate_and_a_time():
    progress = preparing.ReadProgress(1_000_000)
    progress.stored, progress.text = 250_000, 400_000
    assert progress.line(2.0) == ("tokenised 0 MB of text (25 % of the files), 0.2 MB/s, 6 s left")
    assert preparing._duration(600) == "10 min"
    assert preparing._duration(36_000) == "10.0 h"


def test_progress_counts_every_byte_once(texts, tmp_path):
    works = works_of(texts, tmp_path / "out")
    (tmp_path / "out" / ".unfinished").mkdir(parents=True)
    progress = preparing.ReadProgress(sum(work.num_bytes for work in works))
    for work in works:
        make_shard(work, BYTES, progress.add)
    assert progress.stored == progress.total == sum(p.stat().st_size for p in texts.iterdir())
    index = prepare(works, BYTES)
    assert progress.text == index.num_bytes


def test_the_plan_depends_on_sizes_alone(texts, tmp_path):
    works = works_of(texts, tmp_path)
    pieces = [piece for work in works for piece in work.pieces]
    for path in texts.iterdir():
        own = [piece for piece in pieces if piece.file.path == str(path)]
        assert [piece.start for piece in own] == [0, *(piece.stop for piece in own[:-1])]
        assert own[-1].stop == path.stat().st_size
    assert all(work.num_bytes <= 1000 for work in works)
    assert len({work.key for work in works}) == len(works)
