"""Prompts with responses, and conversations: loss on what is to be learned, and nothing else."""

import dataclasses
import itertools
import json
import logging
import pathlib
import types
from typing import cast

import numpy as np
import pyarrow
import pyarrow.ipc
import pytest
import tokenizers
from pyarrow import parquet
from tokenizers import processors

from jaxscale.config import DataConfig
from jaxscale.config.data_source import to_sources
from jaxscale.data.dataset import Dataset, open_dataset, open_validation
from jaxscale.data.loader import batches
from jaxscale.data.mixture import open_examples
from jaxscale.data.text.text_files import find_files
from jaxscale.data.tokens.corpus import open_corpus, open_folder
from jaxscale.data.tokens.encode import encode_pairs
from jaxscale.data.tokens.prepare import prepare
from jaxscale.data.tokens.shards import plan
from jaxscale.data.tokens.tokenizer import Tokenizer, begin_texts, load_tokenizer
from jaxscale.decoding.likelihood import _encode
from jaxscale.decoding.prompts import prompt_ids
from jaxscale.training.engine import Engine
from tests.data.dialogues import CONVERSATIONS, MARKED, THINKING, write_lines, write_tokenizer
from tests.data.documents import assert_same

PAIRS = [{"question": "what is " * (1 + i), "answer": "of course " * (1 + i % 3)} for i in range(9)]
BYTES = load_tokenizer("bytes")


def dataset_of(source, tokenizer: Tokenizer, **settings) -> Dataset:
    corpus = open_corpus([source], tokenizer)
    length = min(settings.pop("seq_len", 16), corpus.num_tokens)  # a window is a sequence at least
    config = DataConfig(source=(source,), heldout=0, seq_len=length, **settings)
    return open_dataset(config, tokenizer, split="train", corpus=corpus)


def learned(dataset: Dataset, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Every segment of every example: what is read, and what is predicted of it."""
    names = {tokenizer.boundary: "$", tokenizer.start: "^" if tokenizer.bos else "$"}
    shown = []
    for i in range(len(dataset)):
        row = dataset[i]
        for segment in range(1, row.segments.max() + 1):
            ours = row.segments == segment
            counted = ours & (row.weights > 0)
            texts = (row.tokens[ours], row.targets[counted])
            shown.append(
                tuple(
                    "".join(names.get(t, "") or tokenizer.decode([t]) for t in ids) for ids in texts
                )
            )
    return shown


def pairs(path: pathlib.Path) -> dict:
    return {"path": str(path), "prompt": "question", "response": "answer"}


def test_loss_is_on_responses_and_their_ends(tmp_path):
    source = pairs(write_lines(tmp_path / "a.jsonl", PAIRS))
    dataset = dataset_of(source, BYTES, seq_len=1024)
    found = set(learned(dataset, BYTES))
    assert found == {("$" + one["question"] + one["answer"], one["answer"] + "$") for one in PAIRS}
    short = dataset_of(source, BYTES, seq_len=128)
    assert sum(short[i].weights.sum() for i in range(len(short))) == sum(
        len(one["answer"]) + 1 for one in PAIRS
    )
    bits = BYTES.token_bytes[short[0].targets] * short[0].weights
    assert bits.sum() <= short[0].weights.sum()


def test_prompts_begin_as_the_post_processor_of_their_tokenizer_has_it(tmp_path):
    """Nothing comes before a prompt where it puts nothing there, unless data.text_begin says so."""
    nothing = load_tokenizer(write_tokenizer(tmp_path / "t"))
    first = load_tokenizer(write_tokenizer(tmp_path / "u", bos=True))
    path = write_tokenizer(tmp_path / "v")
    made = tokenizers.Tokenizer.from_file(path)
    made.post_processor = processors.TemplateProcessing(
        single="<|im_start|> <s> $A",
        special_tokens=[(name, made.token_to_id(name)) for name in ("<|im_start|>", "<s>")],
    )
    made.save(path)
    both = load_tokenizer(path)
    records = [{"question": "hello", "answer": " you"}, {"question": "", "answer": "you"}]
    lines = write_lines(tmp_path / "a.jsonl", records)
    text = write_lines(tmp_path / "b.jsonl", [{"text": "hello you"}])
    for tokenizer, begin, old in (
        (nothing, "", "$"),
        (first, "^", "^"),
        (both, "|^", "|"),
        (load_tokenizer("bytes"), "$", "$"),
    ):
        special = tokenizer.special
        names = {tokenizer.boundary: "$", special.get("<s>"): "^", special.get("<|im_start|>"): "|"}
        for rule, before in (("tokenizer", begin), ("boundary", old)):
            chosen = begin_texts(tokenizer, rule)
            corpus = open_corpus([pairs(lines), str(text)], chosen)
            shown = [names.get(i) or chosen.decode([i]) for i in corpus.tokens.tolist()]
            counted = corpus.read_counted(0, corpus.num_tokens)
            learned = "".join(x if lost else "." for x, lost in zip(shown[1:], counted))
            close = "" if before == "$" else "$"
            plain = old + "hello you" + ("$" if tokenizer.bos is not None else "")
            asked = f"{before}hello you{close}{before or '$'}you{close if before else ''}"
            assert "".join(shown) == asked + plain
            assert " you" in learned
            assert not set("helo") & set(learned.partition(" you")[0])
            prompts = ["hello", ""]
            engine = cast(Engine, types.SimpleNamespace(model=None))
            read = [prompt_ids(engine, chosen, prompt) for prompt in prompts]
            assert ["".join(names.get(i) or chosen.decode([i]) for i in ids) for ids in read] == [
                before + "hello",
                before or "$",
            ]
            likely = _encode(engine, chosen, [("hello", " you"), ("", "you")])
            assert [ids[:n].tolist() for n, ids in zip(likely[1], likely[2])] == [
                ids.tolist() for ids in read
            ]


def test_prepared_prompts_that_begin_otherwise_are_refused(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t"))
    entry = to_sources([pairs(write_lines(tmp_path / "a.jsonl", PAIRS))])[0]
    old = begin_texts(tokenizer, "boundary")
    folder = tmp_path / "shards"
    prepare(plan(find_files([entry]), old, folder), old, workers=0)
    assert open_folder(str(folder), old).tokens[0] == tokenizer.boundary
    said = r"begin with the ids \[0\], and here with \[\]; set data.text_begin = 'boundary', or"
    with pytest.raises(ValueError, match=said):
        open_folder(str(folder), tokenizer)


def test_a_tokenizer_with_a_first_token_closes_documents(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t", bos=True))
    assert tokenizer.bos == tokenizer.start == tokenizer.special["<s>"]
    plain = load_tokenizer(write_tokenizer(tmp_path / "u"))
    assert (plain.bos, plain.start) == (None, plain.boundary)
    assert plain.fingerprint != tokenizer.fingerprint
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "hello"}, {"text": "you"}])
    found = learned(dataset_of(str(lines), tokenizer, seq_len=4), tokenizer)
    whole = learned(dataset_of(str(lines), tokenizer, seq_len=64), tokenizer)
    assert sorted(whole) == [("^hello$", "hello$"), ("^you$", "you$")]
    assert "".join(sorted(text for _, text in found)).count("$") == 2
    source = pairs(write_lines(tmp_path / "b.jsonl", PAIRS[:1]))
    assert learned(dataset_of(source, tokenizer, seq_len=32), tokenizer) == [
        ("^what is of course $", "of course $")
    ]
    # tokenizer_config.json decides where it says anything.
    off = load_tokenizer(write_tokenizer(tmp_path / "v", bos=True, add_bos_token=False))
    on = load_tokenizer(write_tokenizer(tmp_path / "w", add_bos_token=True, bos_token="<s>"))
    assert (off.bos, on.bos) == (None, tokenizer.bos)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, ()),
        ({"hf_config.json": {"eos_token_id": [2, 999]}}, (2,)),
        ({"hf_config.json": {"eos_token_id": 2}, "generation_config.json": {}}, ()),
        (
            {"hf_config.json": {"eos_token_id": 2}, "generation_config.json": {"eos_token_id": 1}},
            (1,),
        ),
    ],
)
def test_the_ends_of_texts_are_those_of_generate_in_transformers(files, ends, tmp_path):
    """It takes them from a model's config.json where there is no generation_config.json."""
    path = write_tokenizer(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_tokenizer(path).ends == ends


def test_conversations_are_what_the_template_renders(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t", MARKED, eos_token="<|im_end|>"))
    assert tokenizer.ends == (tokenizer.special["<|im_end|>"],)
    records = [{"chat": {"messages": messages}} for messages in CONVERSATIONS]
    source = {
        "path": str(write_lines(tmp_path / "a.jsonl", records)),
        "messages": "chat.messages",
    }
    dataset = dataset_of(source, tokenizer, seq_len=256)
    found = {
        tokenizer.decode(row.targets[(row.weights > 0) & (row.segments == segment)])
        for row in (dataset[i] for i in range(len(dataset)))
        for segment in range(1, row.segments.max() + 1)
    }
    assert found == {"4 é5 of course", "hello you"}
    row = dataset[0]
    ends = row.targets == tokenizer.special["<|im_end|>"]
    assert row.weights[ends].sum() == 3  # of the assistant's messages, not of the others
    assert ends.sum() == sum(map(len, CONVERSATIONS))
    # Bits per byte count what is said, not the names of special tokens.
    corpus = open_corpus([source], tokenizer)
    said = sum(len(m["content"].encode()) for messages in CONVERSATIONS for m in messages)
    roles = sum(len(m["role"]) + 2 for messages in CONVERSATIONS for m in messages)
    assert corpus.num_bytes == said + roles


def test_messages_that_change_when_others_follow_are_documents(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, THINKING))
    path = write_lines(tmp_path / "a.jsonl", [{"messages": one} for one in CONVERSATIONS])
    corpus = open_corpus([{"path": str(path), "messages": "messages"}], tokenizer)
    (line,) = [line for line in caplog.messages if "more than conversations" in line]
    assert line.startswith("data: 1 documents more than conversations: the chat template renders")
    found = []
    for begin, end in itertools.pairwise(corpus.offsets):
        counted = corpus.read_counted(begin, end)
        ids = np.append(corpus.read(begin, end), tokenizer.boundary)
        found.append(tokenizer.decode(ids[1:][counted]))
    thought = "<think>\n\n</think>\n\n"
    assert found == [f"{thought}{said}\n" for said in ("5 of course", "4 é", "hello you")]
    # One conversation, on one side of the split.
    assert corpus.hashes[0] == corpus.hashes[1] != corpus.hashes[2]


@pytest.mark.proof
def test_prepared_marks_are_those_of_the_text(tmp_path):
    """Shards in processes, in memory, mapped and mixed with text give the same examples."""
    path = write_tokenizer(tmp_path / "t", MARKED)
    tokenizer = load_tokenizer(path)
    parquet.write_table(
        pyarrow.table({"id": range(40), "messages": CONVERSATIONS * 20}),
        tmp_path / "a.parquet",
        row_group_size=7,
    )
    source = {"path": str(tmp_path / "a.parquet"), "messages": "messages"}
    folder = tmp_path / "out"
    index = prepare(plan(find_files([source]), tokenizer, folder, 300), tokenizer, workers=2)
    assert len(index.shards) > 2
    assert (folder / "tokenizer_config.json").is_file()
    again = load_tokenizer(str(folder / "tokenizer.json"))
    assert (again.fingerprint, again.template) == (tokenizer.fingerprint, tokenizer.template)
    text = write_lines(tmp_path / "b.jsonl", [{"text": "hello you " * 30}])
    fresh = open_corpus([source, str(text)], tokenizer)
    mapped = open_corpus([str(folder), str(text)], again, tmp_path / "run")
    assert fresh.num_tokens == mapped.num_tokens
    marks = fresh.read_counted(0, fresh.num_tokens)
    assert 0 < marks[: fresh.offsets[40]].mean() < 0.5
    assert marks[fresh.offsets[40] :].all()
    for corpus in (mapped, open_corpus([str(folder), str(text)], again, tmp_path / "run")):
        np.testing.assert_array_equal(corpus.tokens, fresh.tokens)
        np.testing.assert_array_equal(corpus.read_counted(0, corpus.num_tokens), marks)
        for start in range(0, corpus.num_tokens, 97):
            stop = min(start + 150, corpus.num_tokens)
            np.testing.assert_array_equal(corpus.read_counted(start, stop), marks[start:stop])
    missing = folder / index.shards[0].loss_file
    missing.unlink()
    with pytest.raises(ValueError, match=r"loss-00000.npy is missing"):
        open_folder(str(folder), again)


@pytest.mark.proof
def test_a_run_resumes_with_the_same_marks(tmp_path):
    source = pairs(write_lines(tmp_path / "a.jsonl", PAIRS))
    dataset = dataset_of(source, BYTES, seq_len=128)
    whole = batches(dataset, global_batch_size=2)
    seen = [next(whole) for _ in range(5)]
    later = next(batches(dataset, global_batch_size=2, start_step=4, workers=1))
    np.testing.assert_array_equal(later.weights, seen[4].weights)
    np.testing.assert_array_equal(later.targets, seen[4].targets)
    other = dict(source, prompt="answer", response="question")
    assert dataset_of(other, BYTES, seq_len=128).fingerprint != dataset.fingerprint


BAD = [
    ({"question": "a"}, "line 2 has no field 'answer'; it has question; set 'response'"),
    ({"question": 3, "answer": "b"}, "line 2 has a int in its field 'question' instead of text"),
    ({"question": "a", "answer": ""}, "line 2 has nothing in its field 'answer'"),
]
BAD_MESSAGES = [
    ([], "line 1 has an empty list instead of a list of messages in its field 'messages'"),
    ("hi", "line 1 has text in its field 'messages' instead of a list of messages"),
    ([{"content": "a"}], r"line 1 has a message \(0, from 0\) that is not an object with a 'role'"),
    (CONVERSATIONS[0][:2], "line 1 has no message of the assistant"),
    ([{"role": "user", "content": 3}], "line 1 is refused by the chat template: .*int"),
]


@pytest.mark.parametrize(("record", "match"), BAD)
def test_a_bad_pair_is_named(tmp_path, record, match):
    path = write_lines(tmp_path / "a.jsonl", [*PAIRS[:1], record])
    with pytest.raises(ValueError, match=rf"a.jsonl, {match}"):
        open_corpus([pairs(path)], BYTES)
    kept = open_corpus([pairs(path) | {"skip_share": 0.5}], BYTES)
    assert kept.num_documents == 1


@pytest.mark.parametrize(("messages", "match"), BAD_MESSAGES)
def test_bad_messages_are_named(tmp_path, messages, match):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": messages}])
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t"))
    with pytest.raises(ValueError, match=rf"a.jsonl, {match}"):
        open_corpus([{"path": str(path), "messages": "messages"}], tokenizer)


def test_messages_need_a_template_and_an_objective_that_keeps_marks(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CONVERSATIONS[0]}])
    source = {"path": str(path), "messages": "messages"}
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t", None))
    for one in (BYTES, tokenizer):
        with pytest.raises(ValueError, match=r"a.jsonl has messages, .*has no chat template"):
            open_corpus([source], one)
    text = tmp_path / "a.txt"
    text.write_text("no fields")
    with pytest.raises(ValueError, match=r"a.txt is text, which has no fields for prompt"):
        open_corpus([pairs(text)], BYTES)
    with pytest.raises(
        ValueError, match=r"'span_corruption' conflicts .*set data.objective = 'caus"
    ):
        dataset_of(
            pairs(write_lines(tmp_path / "b.jsonl", PAIRS)), BYTES, objective="span_corruption"
        )


def test_messages_may_be_json_in_a_text_column(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t", MARKED))
    texts = [json.dumps(messages) for messages in CONVERSATIONS]
    parquet.write_table(pyarrow.table({"messages": texts}), tmp_path / "a.parquet")
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": one} for one in CONVERSATIONS])
    found = [
        open_corpus([{"path": str(path), "messages": "messages"}], tokenizer).tokens
        for path in (tmp_path / "a.parquet", lines)
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("field", ["messages", "chat.messages"])
def test_tools_of_a_record_reach_the_template(field, tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t", THINKING))
    tools = [{"name": "f", "arguments": {"x": "int"}}]
    records = [{"messages": CONVERSATIONS[1], "tools": value} for value in (tools, None, [])]
    records.append({"messages": CONVERSATIONS[1]})
    wrap = (lambda one: {"chat": one}) if "." in field else (lambda one: one)
    lines = write_lines(tmp_path / "a.jsonl", list(map(wrap, records)))
    rows = [record | {"tools": json.dumps(record.get("tools"))} for record in records]
    table = pyarrow.Table.from_pylist([{"id": 1} | wrap(row) for row in rows])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write(table)
    assert tokenizer.template
    assert tokenizer.encode_chat
    shown = tokenizer.encode_chat(tokenizer.template.render(CONVERSATIONS[1], tools)).ids
    plain = tokenizer.encode_chat(tokenizer.template.render(CONVERSATIONS[1])).ids
    assert len(shown) > len(plain)
    for path in (lines, tmp_path / "a.parquet", tmp_path / "a.arrow"):
        corpus = open_corpus([{"path": str(path), "messages": field}], tokenizer)
        assert corpus.tokens.tolist() == [*shown, *plain, *plain, *plain]
    bad = write_lines(tmp_path / "b.jsonl", [wrap(records[1] | {"tools": 3})])
    with pytest.raises(ValueError, match=r"line 1 has a int instead of a list of tools in its"):
        open_corpus([{"path": str(bad), "messages": field}], tokenizer)


@pytest.mark.parametrize("begun", [False, True], ids=["boundary", "bos"])
def test_an_encoder_reads_prompts_and_its_decoder_writes_responses(begun, tmp_path):
    """Whole pairs, as many as fit in a row, each once in an epoch; too long ones are left out."""
    tokenizer = dataclasses.replace(BYTES, bos=255 if begun else None)
    long = [{"question": "q" * 80, "answer": "a"}, {"question": "q", "answer": "a" * 40}]
    source = pairs(write_lines(tmp_path / "a.jsonl", [*PAIRS, *long, {**PAIRS[0], "question": ""}]))
    settings = {"seq_len": 80, "target_len": 40, "objective": "prefix", "heldout": 0}
    config = DataConfig(source=(source,), **settings)
    assert config.source[0].apart
    dataset = open_dataset(config, tokenizer, split="train")
    found, rows = [], [dataset[i] for i in range(2 * len(dataset))]
    for row in rows:
        read, segments = (row.extras[f"encoder_{name}"] for name in ("tokens", "segments"))
        for segment in range(1, row.segments.max() + 1):
            ours = row.segments == segment
            *prompt, end = read[segments == segment]
            *response, last = row.targets[ours]
            assert end == last == tokenizer.boundary
            assert row.tokens[ours].tolist() == [tokenizer.decoder_start, *response]
            assert (row.weights[ours] == 1).all()
            found.append((bytes(prompt).decode(), bytes(response).decode()))
        assert segments.max() == row.segments.max() > 0
    expected = [(one["question"], one["answer"]) for one in PAIRS] + [("", PAIRS[0]["answer"])]
    assert sorted(found) == sorted(2 * expected)
    assert len(dataset) < len(expected), "rows hold several"
    again = open_dataset(config, tokenizer, split="train")
    assert again.fingerprint == dataset.fingerprint
    assert_same(again[len(rows) - 1], rows[-1])
    beyond = dataclasses.replace(dataset, split="heldout")[len(dataset) + 3]
    assert not beyond.weights.any()


def test_pairs_that_an_encoder_cannot_read_are_refused(tmp_path):
    source = pairs(write_lines(tmp_path / "a.jsonl", PAIRS))
    short = {"seq_len": 4, "target_len": 4, "heldout": 0, "objective": "prefix"}
    for own, change, said in (
        (
            [source],
            {},
            "all 9 prompts and responses do not fit in data.seq_len = 4 and",
        ),
        ([source], {"objective": "ul2"}, "'ul2' defines the decoder's text, .* = 'prefix'"),
        ([{"path": "a.jsonl", "messages": "m"}], {}, "are conversations, and data.target_len = 4"),
        (
            [source, "README.md"],
            {},
            "and other texts, .*source with a weight and data.heldout = 0",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            open_dataset(DataConfig(source=own, **{**short, **change}), BYTES, split="train")


def test_pairs_with_weighted_text_have_no_held_out_split_for_an_encoder(tmp_path):
    """Following the message that refuses it gives a run, with an evaluation of each."""
    text = tmp_path / "text.txt"
    text.write_text("one line\n" * 40)
    kinds = [
        pairs(write_lines(tmp_path / "a.jsonl", PAIRS)),
        {"path": str(text), "boundary": "line"},
    ]
    weighted = [{**entry, "weight": 1} for entry in kinds]
    named = [{**entry, "name": name} for entry, name in zip(kinds, "ab")]
    settings = {"seq_len": 80, "target_len": 40, "objective": "prefix", "source": weighted}
    config = DataConfig(**settings, heldout=0.5)
    corpus = open_corpus(config.source, BYTES)
    with pytest.raises(ValueError, match=r"and data.heldout = 0 .* data.validation evaluates each"):
        open_examples(config, BYTES, corpus, split="heldout", vocab_size=257)
    config = DataConfig(**settings, heldout=0, validation=named)
    mixture = open_examples(config, BYTES, corpus, split="train", vocab_size=257)
    assert all(mixture[i].weights.any() for i in range(4))
    for entry in config.validation:
        assert open_validation(config, entry, BYTES)[0].weights.any()


def test_prepared_conversations_are_no_pairs(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, MARKED))
    lines = write_lines(tmp_path / "a.jsonl", [{"messages": one} for one in CONVERSATIONS])
    corpus = open_corpus([{"path": str(lines), "messages": "messages"}], tokenizer)
    config = DataConfig(seq_len=64, target_len=64, objective="prefix", heldout=0)
    with pytest.raises(ValueError, match=r"has conversations, and .* one response each; prepare"):
        open_dataset(config, tokenizer, split="train", corpus=corpus)


def test_a_response_apart_has_the_ids_that_it_has_alone():
    """As a decoder writes it, in front of which there is no text."""

    def encode(texts):  # like SentencePiece, which marks the begin of a text
        return [np.array([1000 + ord(text[0]), *map(ord, text[1:])]) for text in texts]

    tokenizer, pairs = dataclasses.replace(BYTES, encode=encode), [("ab", "cd")]
    ((_, together),) = encode_pairs(tokenizer, pairs)
    ((_, apart),) = encode_pairs(tokenizer, pairs, [True])
    assert together.tolist() == [ord("c"), ord("d")]
    assert apart.tolist() == encode(["cd"])[0].tolist() == [1000 + ord("c"), ord("d")]
