"""Small corpora, and the data sets made of them."""

import itertools

import numpy as np

from jaxscale.batch import Batch
from jaxscale.config import DataConfig
from jaxscale.data.dataset import Dataset, Split, open_dataset
from jaxscale.data.text.text_files import draw, hash_identity
from jaxscale.data.tokens.corpus import Corpus
from jaxscale.data.tokens.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")
END = BYTES.boundary


def make_corpus(texts: dict[str, bytes]) -> Corpus:
    documents = [[END, *text] for text in texts.values()]
    tokens = np.array(list(itertools.chain(*documents)), np.uint16)
    offsets = np.cumsum([0, *map(len, documents)])
    num_bytes = len(tokens) - len(documents)
    hashes = np.array([hash_identity(name) for name in texts], np.uint64)
    return Corpus((tokens,), offsets, hashes, BYTES.token_bytes, num_bytes, "fingerprint")


def numbered(count: int, size: int = 37) -> Corpus:
    """Documents with distinct content, so that a mistaken token shows."""
    rng = np.random.default_rng(0)
    return make_corpus(
        {f"{i}.txt": rng.bytes(int(rng.integers(1, 2 * size))) for i in range(count)}
    )


def opened(
    corpus: Corpus, split: Split = "train", *, vocab_size: int | None = None, **settings
) -> Dataset:
    settings = {"seq_len": 16, "heldout": 0.2} | settings
    config = DataConfig(**settings)
    return open_dataset(config, BYTES, split=split, corpus=corpus, vocab_size=vocab_size)


def documents_of(corpus: Corpus, split: str, heldout: float, seed: int) -> list[list[int]]:
    """Plainly: the documents of a split in its order, without boundaries."""
    drawn = [(number, i) for i, number in enumerate(draw(corpus.hashes, seed).tolist())]
    order = [i for number, i in sorted(drawn) if (number < heldout) == (split == "heldout")]
    bounds = corpus.offsets
    return [corpus.tokens[bounds[i] + 1 : bounds[i + 1]].tolist() for i in order]


def assert_same(a: Batch, b: Batch) -> None:
    left_extras, right_extras = dict(a.extras), dict(b.extras)
    assert left_extras.keys() == right_extras.keys()
    fields = [*zip(Batch._fields[:5], a, b)]
    fields += [(name, left, right_extras[name]) for name, left in left_extras.items()]
    for name, left, right in fields:
        np.testing.assert_array_equal(left, right, err_msg=name)
        assert left.dtype == right.dtype
