"""Click logs in Criteo's format: a writer of synthetic ones, and a reader.

A line is a label (0 or 1), 13 counts and 26 categories (8 hexadecimal digits), with tabs between;
counts and categories may be missing. The synthetic clicks follow a known function: a sigmoid of an
effect of each category, of products of effects of neighbouring fields, and of the counts.
"""

import pathlib
import zlib
from typing import NamedTuple

import numpy as np

COUNTS, FIELDS = 13, 26


class Clicks(NamedTuple):
    """Impressions."""

    labels: np.ndarray  # int32 [n]
    counts: np.ndarray  # float32 [n, 13], logarithms
    ids: np.ndarray  # int32 [n, 26], rows of a table; -1 is missing


def write_synthetic(path: pathlib.Path, lines: int, categories: int = 2000, seed: int = 0) -> None:
    """Writes impressions whose categories have Zipf's frequencies."""
    of_world, of_lines = np.random.default_rng(0), np.random.default_rng(seed)
    effects = of_world.normal(size=(FIELDS, categories))
    chosen = np.minimum(of_lines.zipf(1.3, (lines, FIELDS)), categories) - 1
    counts = of_lines.geometric(0.1, (lines, COUNTS)) - 1
    effect = effects[np.arange(FIELDS), chosen]
    score = 0.3 * effect.sum(1) + 0.2 * (effect[:, ::2] * effect[:, 1::2]).sum(1)
    score += 0.3 * (np.log1p(counts[:, 0]) - np.log1p(counts[:, 1])) - 1
    labels = of_lines.random(lines) < 1 / (1 + np.exp(-score))
    missing = of_lines.random((lines, FIELDS)) < 0.03
    with path.open("w", encoding="ascii") as file:
        for label, row, picked, lost in zip(labels, counts, chosen, missing):
            names = (f"{x:08x}" * (not y) for x, y in zip(picked * 2654435761 % 2**32, lost))
            file.write("\t".join([str(int(label)), *map(str, row), *names]) + "\n")


def read(path: pathlib.Path, num_rows: int) -> Clicks:
    """Reads impressions; a category is hashed with its field to one of `num_rows` rows.

    Raises:
      ValueError: a line has another number of columns.
    """
    labels, counts, ids = [], [], []
    with path.open(encoding="ascii") as file:
        for number, line in enumerate(file, 1):
            label, *rest = line.rstrip("\n").split("\t")
            if len(rest) != COUNTS + FIELDS:
                raise ValueError(
                    f"{path}, line {number} has {1 + len(rest)} columns; Criteo's format has "
                    f"{1 + COUNTS + FIELDS}, with tabs between"
                )
            labels.append(int(label))
            counts.append([max(0, int(x or 0)) for x in rest[:COUNTS]])
            named = enumerate(rest[COUNTS:])
            ids.append([zlib.crc32(f"{i} {x}".encode()) % num_rows if x else -1 for i, x in named])
    return Clicks(
        np.array(labels, np.int32),
        np.log1p(np.array(counts, np.float32)),
        np.array(ids, np.int64).astype(np.int32),
    )
