"""Virtual prompt tokens before each document of packed rows (prompt tuning)."""

import numpy as np

from jaxscale.batch import Batch
from jaxscale.data.packing import Vocabulary, number


def prompted_windows(lengths: np.ndarray, seq_len: int, num_prompt: int) -> np.ndarray:
    """The begin of each row's text, and the end of the last, int64, when each row takes as many of
    the next tokens as fit with a prompt before each of its documents, cut ones included.

    Args:
      lengths: tokens of each document.
      seq_len: positions of a row, more than `num_prompt`.
    """
    begins, free, done = [0], seq_len, 0
    for length in lengths.tolist():
        while length:
            if free <= num_prompt:
                begins.append(done)
                free = seq_len
            taken = min(length, free - num_prompt)
            free -= num_prompt + taken
            done += taken
            length -= taken
    return np.array([*begins, done])


def with_prompts(example: Batch, vocabulary: Vocabulary) -> Batch:
    """An example without padding, with the prompt before each of its segments: without loss, at
    the segment's first positions."""
    count = len(vocabulary.prompt)
    if not count:
        return example
    begins = np.flatnonzero(np.diff(example.segments, prepend=0))
    places = np.repeat(begins, count)
    prompt = np.tile(np.array(vocabulary.prompt, np.int32), len(begins))
    lengths = np.diff(begins, append=len(example.tokens)) + count
    return Batch(
        np.insert(example.tokens, places, prompt),
        np.insert(example.targets, places, 0),
        *number(lengths),
        np.insert(example.weights, places, 0),
    )
