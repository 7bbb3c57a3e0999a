"""Virtual prompt tokens before each document of a packed row."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.config import DataConfig
from jaxscale.data.dataset import open_dataset
from jaxscale.data.prompts import prompted_windows
from tests.data.documents import BYTES, END, assert_same, documents_of, make_corpus, numbered
from tests.data.test_whole_documents import numbered as marked_and_plain

FIRST = BYTES.vocab_size
"""The id of the first virtual token."""


def opened(corpus, num_prompt: int, **settings):
    tokenizer = dataclasses.replace(BYTES, prompt=tuple(range(FIRST, FIRST + num_prompt)))
    config = DataConfig(**{"seq_len": 16, "heldout": 0.2, **settings})
    return open_dataset(config, tokenizer, split="train", corpus=corpus)


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 5))
def test_rows_are_as_full_as_prompts_leave_room(lengths, num_prompt):
    seq_len = 12
    begins = prompted_windows(np.array(lengths), seq_len, num_prompt)
    assert begins[0] == 0
    assert begins[-1] == sum(lengths)
    ends = np.cumsum(lengths)

    def used(begin, end):
        """Positions of a row: its tokens, and a prompt for each document in it."""
        return end - begin + num_prompt * (1 + np.sum((ends > begin) & (ends < end)))

    for begin, end in itertools.pairwise(begins):
        assert begin < end
        assert used(begin, end) <= seq_len
        if end < begins[-1]:  # one more token, with its prompt if it begins a document
            assert used(begin, end + 1) > seq_len


@pytest.mark.parametrize("objective", ["causal", "prefix"])
def test_each_document_of_a_row_has_its_prompt_without_loss(objective):
    corpus, count = numbered(12), 3
    plain, dataset = opened(corpus, 0), opened(corpus, count, objective=objective)
    assert dataset.fingerprint != plain.fingerprint
    assert dataset.num_tokens == plain.num_tokens
    found = {dataset.window(i): dataset[i] for i in range(len(dataset))}
    text, weights = [], []
    for _, row in sorted(found.items()):
        assert row.tokens.shape == (16,)
        for segment in range(1, row.segments.max() + 1):
            piece = row.segments == segment
            tokens, positions = row.tokens[piece], row.positions[piece]
            np.testing.assert_array_equal(positions, np.arange(len(tokens)))
            np.testing.assert_array_equal(tokens[:count], FIRST + np.arange(count))
            assert (tokens[count:] < FIRST).all()
            assert not row.weights[piece][:count].any()
            text += tokens[count:].tolist()
            weights += row.weights[piece][count:].tolist()
        assert not row.weights[row.segments == 0].any()
    documents = documents_of(corpus, "train", 0.2, 0)
    assert text == [one for document in documents for one in (END, *document)]
    assert all(weights) == (objective == "causal")


def test_whole_documents_have_room_for_their_prompts(caplog):
    """And one that no longer fits is left out, and said."""
    corpus, count = marked_and_plain([14, 9, 4, 5], [30]), 3
    with caplog.at_level("INFO", "jaxscale"):
        dataset = opened(corpus, count, heldout=0)
    assert "1 of 4 prompts with responses" in caplog.text
    assert "14 tokens without its prompt" in caplog.text
    rows = [dataset[i] for i in range(len(dataset))]
    sizes = [
        int(np.sum(row.segments == n)) for row in rows for n in range(1, row.segments.max() + 1)
    ]
    assert {9, 4, 5} <= {size - count for size in sizes}
    assert sum(sizes) - count * len(sizes) == 9 + 4 + 5 + 30


def test_a_prompt_without_room_for_text_is_refused():
    with pytest.raises(ValueError, match=r"half of data.seq_len = 16 to text; raise .* to 18 or"):
        opened(numbered(12), 9)


def test_without_prompts_nothing_changes():
    corpus = make_corpus({"a": b"abcdefghij" * 3, "b": b"xyz" * 9})
    config = DataConfig(seq_len=16, heldout=0)
    plain = open_dataset(config, BYTES, split="train", corpus=corpus)
    again = opened(corpus, 0, heldout=0)
    assert again.fingerprint == plain.fingerprint
    for i in range(len(plain)):
        assert_same(again[i], plain[i])
