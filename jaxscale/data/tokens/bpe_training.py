"""BPE training on a sample of a source, and a record of the training text."""

import hashlib
import json
import logging
import time
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxscale.data.text.documents import Piece, sample_documents
from jaxscale.data.text.text_files import File
from jaxscale.formatting import file_size

END = "<|endoftext|>"

RECORD = "tokenizer_record.txt"
"""The file next to a tokenizer.json with its `Training.record`."""

_log = logging.getLogger("jaxscale")


@dataclass(frozen=True)
class Training:
    """Everything that determines the byte pairs of a tokenizer."""

    size: int  # of the vocabulary
    files: tuple[File, ...]
    heldout: float  # `data.heldout`; held-out documents are not used
    seed: int  # `data.seed`, for that split
    num_bytes: int  # of text, approximately

    def record(self, tokenizer: bytes) -> bytes:
        """A digest of this and of the resulting tokenizer.json. Text files are not read: as in the
        cache of tokens, a file counts as changed if its name, size or time is."""
        files = [Piece(file, 0, file.num_bytes).key for file in self.files]
        values = [self.size, self.heldout, self.seed, self.num_bytes, files]
        data = json.dumps(values).encode() + tokenizer
        return hashlib.blake2b(data, digest_size=16).hexdigest().encode() + b"\n"


def train(training: Training) -> bytes:
    """Trains a byte-level BPE and returns its tokenizer.json; deterministic.

    Raises:
      ValueError: as `sample_documents`; or the text yields fewer tokens.
    """
    start = time.perf_counter()
    sample = list(
        sample_documents(
            training.files, training.num_bytes, heldout=training.heldout, seed=training.seed
        )
    )
    num_bytes = sum(document.num_bytes for document in sample)
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=training.size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator((document.text for document in sample), trainer)
    if trained.get_vocab_size() < training.size:
        raise ValueError(
            f"data.tokenizer = 'bpe:{training.size}', but the training documents of data.source "
            f"({num_bytes:,} bytes) yield only {trained.get_vocab_size()} tokens; set "
            f"data.tokenizer = 'bpe:{trained.get_vocab_size()}' or give more text"
        )
    _log.info(
        "tokenizer: BPE of %d tokens trained on %d documents (%s) in %.1f s",
        training.size,
        len(sample),
        file_size(num_bytes),
        time.perf_counter() - start,
    )
    return trained.to_str(pretty=True).encode()
