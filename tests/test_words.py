"""Retired words: each sentence of the package, its tools and its pages uses the field's term."""

import io
import pathlib
import re
import tokenize

import pytest

RETIRED = {
    r"turns?": "period (of layers); rotates (RoPE); one after the other",
    r"meanwhile": "while ...",
    r"besides?": "next to; overlapping with; also; compared with",
    r"(go|goes|going|went) on": "continue; happen",
    r"(bring|brings|bringing|brought)": "download, load, add, include",
    r"(deal|deals|dealt|dealing)": "assign, split, distribute",
    r"room": "memory; free space",
    r"(?<!coordinator )(?<!IP )(?<!memory )address(es)?(?!:)": "URL; host:port",
    r"put at": "upload to",
    r"of (one's|your|their|its|our) own": "custom; separate",
    r"own (model|family|families|block)": "custom model",
    r"without a word": "silently",
    r"pass(ed|ing) over": "skip; exclude",
    r"(?<!inner )(?<!outer )(?<!dot )products?(?! of)": "matmul",
    r"walk(s|ed|ing)?": "loop over; iterate",
    r"sign of life": "heartbeat",
    r"(is|are|was|were) not there": "is missing; does not exist; absent (hardware)",
    r"is none of": "is not one of",
    r"likewise": "also; the same for",
    r"but for": "except",
    r"alike": "equal; the same",
    r"once more": "again",
    r"those that": "the thing's name",
    r"at hand": "available; local",
    r"has none": "has no ...",
    r"(do|does|did|doing) without": "does not need; omits",
    r"says? what": "prints, describes",
    r"draws? on": "uses",
}
"""A retired word, as a regular expression, and the words to use."""

PAGES = [
    path
    for folder in (".", "docs", "docs/studies")
    for path in sorted(pathlib.Path(folder).glob("*.md"))
]
MODULES = [
    path
    for folder in ("jaxscale", "configs", "tools", "examples")
    for path in sorted(pathlib.Path(folder).rglob("*.py"))
]
PROSE = (tokenize.COMMENT, tokenize.STRING, tokenize.FSTRING_MIDDLE)


def sentences(path: pathlib.Path) -> list[tuple[int, str]]:
    """Lines of a page, or of a module's comments and strings, without quoted code and flags."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        lines, code = [], False
        for number, line in enumerate(text.splitlines(), 1):
            code ^= line.startswith("```")
            lines += [] if code else [(number, line)]
    else:
        lines = [
            (token.start[0] + more, line)
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type in PROSE and " " in token.string  # else a name, such as a key
            for more, line in enumerate(token.string.splitlines())
            if not line.lstrip().startswith((">>>", "..."))
        ]
    return [(number, re.sub(r"`[^`]*`|\]\([^)]*\)|--\w+", "", line)) for number, line in lines]


@pytest.fixture(scope="module")
def prose() -> list[tuple[str, str]]:
    return [
        (f"{path}:{number}", line)
        for path in (*PAGES, *MODULES)
        for number, line in sentences(path)
    ]


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_is_not_used(word, prose):
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    found = [f"{where}: {line.strip()}" for where, line in prose if pattern.search(line)]
    assert not found, f"write {RETIRED[word]!r}:\n" + "\n".join(found)


def test_quoted_code_is_not_read(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("The room.\n`room` [x](room.md)\n```bash\nroom\n```\nend\n")
    module = tmp_path / "module.py"
    module.write_text('"""The room.\n\n>>> room\n"""\n\nroom = f"{room} a room"  # room\n')
    assert [number for number, line in sentences(page) if "room" in line] == [1]
    assert [number for number, line in sentences(module) if "room" in line] == [1, 6, 6]
