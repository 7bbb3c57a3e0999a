"""Ids of n-grams on the host."""

import numpy as np

from jaxscale.batch import Batch
from jaxscale.models.embedding import NGRAM_NAMES, with_ngrams

ROWS = 2**20


def ids_of(tokens: list[int], segments: list[int], num_rows: int = ROWS) -> list[np.ndarray]:
    one, texts = np.array([tokens], np.int32), np.array([segments], np.int32)
    made = with_ngrams(Batch(one, one, texts, one, one, {"given": one}), num_rows)
    assert set(made.extras) == {"given", *NGRAM_NAMES}
    return [made.extras[name][0] for name in NGRAM_NAMES]


def test_n_grams_end_at_their_token_and_do_not_cross_documents():
    twos, threes = ids_of([5, 6, 7, 5, 6, 7, 6, 0], [1, 1, 1, 2, 2, 2, 2, 0])
    assert (twos >= 0).tolist() == [False, True, True, False, True, True, True, False]
    assert (threes >= 0).tolist() == [False, False, True, False, False, True, True, False]
    assert twos[1] == twos[4]  # 5 6
    assert twos[2] == twos[5] != twos[6]  # 6 7 is not 7 6
    assert threes[2] == threes[5]
    assert len({*twos, *threes} - {-1}) == 5


def test_hashes_spread_over_all_rows():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 257, 4000).tolist()
    for ids in ids_of(tokens, [1] * len(tokens), 16):
        counts = np.bincount(ids[ids >= 0], minlength=16)
        assert counts.min() > 0.7 * counts.mean()
