"""Special tokens that a model has no ids for: left out if no text needs them, and else refused."""

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from jaxscale.config import DataConfig
from jaxscale.data.mixture import open_examples
from jaxscale.data.text.chat_template import ChatTemplate
from jaxscale.data.text.text_files import find_files
from jaxscale.data.tokens.corpus import open_corpus
from jaxscale.data.tokens.image_tokens import without_unread
from jaxscale.data.tokens.prepare import prepare
from jaxscale.data.tokens.shards import plan
from jaxscale.data.tokens.tokenizer import load_tokenizer
from tests.data.dialogues import write_lines

WORDS = ["<eos>", "<bos>", "<pad>", *"abcdefghij<>_image "]
IMAGE, SIZE = "<image>", len(dict.fromkeys(WORDS))
TALK = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
SAID = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"


def write(folder, *special, ordinary=(), template=SAID) -> str:
    """A tokenizer of letters, `SIZE` tokens, and further tokens behind them."""
    folder.mkdir(exist_ok=True)
    words = {word: i for i, word in enumerate(dict.fromkeys(WORDS))}
    made = tokenizers.Tokenizer(models.BPE(words, []))
    made.add_special_tokens(WORDS[:3])
    made.add_special_tokens(list(special))
    made.add_tokens(list(ordinary))
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder / "tokenizer.json")


def test_a_special_token_that_no_text_becomes_is_left_out(tmp_path):
    """As Gemma 3's, one beyond the embedding; its name in a document is text."""
    whole = load_tokenizer(write(tmp_path, IMAGE))
    assert (whole.vocab_size, whole.text_size) == (SIZE + 1, SIZE)
    cut = without_unread(whole, SIZE)
    assert (cut.vocab_size, len(cut.token_bytes)) == (SIZE, SIZE)
    assert IMAGE not in cut.special
    assert (cut.fingerprint, cut.boundary) == (whole.fingerprint, whole.boundary)
    (ids,) = cut.encode([f"ab{IMAGE}c"])
    assert ids.max() < SIZE
    assert whole.encode_chat is not None
    assert cut.encode_chat is not None
    np.testing.assert_array_equal(cut.encode_chat("ab<eos>").ids, whole.encode_chat("ab<eos>").ids)
    with pytest.raises(ValueError, match=rf"special token '{IMAGE}' \(in 'ab{IMAGE}c'\), whose id"):
        cut.encode_chat(f"ab{IMAGE}c")
    assert without_unread(whole, SIZE + 1) is whole


@pytest.mark.parametrize(
    ("special", "ordinary"),
    [((IMAGE,), ("abc",)), (("<mask>", IMAGE), ()), (("<extra_id_0>",), ())],
    ids=["text", "mask", "sentinel"],
)
def test_a_token_that_a_text_or_an_objective_makes_is_needed(special, ordinary, tmp_path):
    whole = load_tokenizer(write(tmp_path, *special, ordinary=ordinary))
    assert without_unread(whole, SIZE) is whole
    assert without_unread(load_tokenizer("bytes"), 100).vocab_size == 257


def examples(source, tokenizer, folder=None):
    config = DataConfig(source=source, seq_len=16, heldout=0, global_batch_size=1)
    corpus = open_corpus(config.source, tokenizer, folder)
    return open_examples(config, tokenizer, corpus, split="train", vocab_size=SIZE)


@pytest.mark.parametrize("where", ["conversation", "template"])
def test_conversations_with_it_are_refused_and_others_are_read(where, tmp_path):
    talk = [{"messages": TALK}] * 20
    template = SAID
    good = {"path": str(write_lines(tmp_path / "a.jsonl", talk)), "messages": "messages"}
    cut = without_unread(load_tokenizer(write(tmp_path / "t", IMAGE)), SIZE)
    row = examples([good], cut)[0]
    assert row.tokens.max() < SIZE
    if where == "template":
        template = f"{IMAGE}{SAID}"
    else:
        talk = [*talk, {"messages": [{"role": "user", "content": IMAGE}, TALK[1]]}]
    path = write(tmp_path / "u", IMAGE, template=template)
    cut = without_unread(load_tokenizer(path), SIZE)
    assert isinstance(cut.template, ChatTemplate)
    bad = {"path": str(write_lines(tmp_path / "b.jsonl", talk)), "messages": "messages"}
    message = rf"token '{IMAGE}'.* whose id {SIZE} is beyond model.vocab_size = {SIZE}; remove it"
    with pytest.raises(ValueError, match=message):
        examples([bad], cut, tmp_path / "run")


@pytest.mark.parametrize("text", ["abc", IMAGE])
def test_shards_that_were_prepared_with_it_are_read_unless_they_hold_it(text, tmp_path):
    whole = load_tokenizer(write(tmp_path / "t", IMAGE))
    talk = [{"messages": [{"role": "user", "content": text}, TALK[1]]}] * 20
    source = {"path": str(write_lines(tmp_path / "a.jsonl", talk)), "messages": "messages"}
    prepare(plan(find_files([source]), whole, tmp_path / "out"), whole)
    cut = without_unread(whole, SIZE)
    if text == IMAGE:
        message = rf"out has the id {SIZE} \(the special token '{IMAGE}'\), and model.vocab_size ="
        with pytest.raises(ValueError, match=message):
            examples([str(tmp_path / "out")], cut)
    else:
        np.testing.assert_array_equal(
            examples([str(tmp_path / "out")], cut)[0].tokens, examples([source], cut)[0].tokens
        )
