"""Stop ids are the tokens that end what a corpus teaches the assistant to say."""

import dataclasses

import pytest

from jaxscale.data.tokens.corpus import open_corpus
from jaxscale.data.tokens.stop_ids import describe_stop_ids, find_response_ends, with_stop_ids
from jaxscale.data.tokens.tokenizer import load_tokenizer
from tests.data.dialogues import CONVERSATIONS, HARMONY, MARKED, PLAIN, write_lines, write_tokenizer

HARMONY_OF_THREE = (
    HARMONY.replace("<|end|>", "<|im_end|>")
    .replace("<|return|>", "<s>")
    .replace("<|start|>", "<|im_start|>")
)
"""Its tokens by the names that the tokenizer has."""
GLM = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<s>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
END_OUTSIDE = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
THOUGHT = [[*CONVERSATIONS[1][:1], CONVERSATIONS[1][1] | {"thinking": "be brief"}]]


def ends_of(folder, template, conversations=CONVERSATIONS, lines=1, **config):
    tokenizer = load_tokenizer(write_tokenizer(folder, template, **config))
    records = [{"messages": one} for one in conversations] * lines
    source = {"path": str(write_lines(folder / "a.jsonl", records)), "messages": "messages"}
    return tokenizer, find_response_ends(open_corpus([source], tokenizer), tokenizer)


@pytest.mark.parametrize(
    ("template", "conversations", "expected", "num_open"),
    [
        (PLAIN, CONVERSATIONS, ["<|im_end|>"], 0),
        (MARKED, CONVERSATIONS, ["<|im_end|>"], 0),
        (PHI, CONVERSATIONS, ["<|endoftext|>", "<|im_end|>"], 0),
        (HARMONY_OF_THREE, CONVERSATIONS, ["<|im_end|>", "<s>"], 0),
        # <|end|> closes thoughts before the answer, and is not the end of the response.
        (HARMONY_OF_THREE, [*CONVERSATIONS, *THOUGHT], ["<s>"], 0),
        (GLM, CONVERSATIONS, [], 3),
        (END_OUTSIDE, CONVERSATIONS, [], 3),
    ],
    ids=["chatml", "generation", "phi", "harmony", "thoughts", "glm", "outside"],
)
def test_the_tokens_that_end_responses(template, conversations, expected, num_open, tmp_path):
    tokenizer, found = ends_of(tmp_path, template, conversations, eos_token="<|endoftext|>")
    special = tokenizer.special
    assert set(found.stop_ids) == {special[name] for name in expected}
    responses = sum(m["role"] == "assistant" for one in conversations for m in one)
    assert (found.num_responses, found.num_open) == (responses, num_open)
    stopping = with_stop_ids(tokenizer, found.stop_ids)
    assert {*stopping.ends, stopping.boundary} == {*found.stop_ids, tokenizer.boundary}
    line, warning = describe_stop_ids(stopping, found)
    assert all(f"({name})" in line for name in (*expected, "<|endoftext|>"))
    assert bool(warning) == bool(num_open)
    assert not warning or warning.startswith("3 of 3 responses have no end token with loss, ")


def test_a_name_of_a_special_token_in_a_few_texts_changes_nothing(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>c"}]
    tokenizer, few = ends_of(tmp_path / "few", PLAIN, [*CONVERSATIONS * 50, messages])
    assert few.stop_ids == (tokenizer.special["<|im_end|>"],)
    _, many = ends_of(tmp_path / "many", PLAIN, [*CONVERSATIONS, messages])
    assert many.stop_ids == ()


def test_documents_of_other_sources_have_no_responses(tmp_path):
    """Plain text has its last loss on the boundary after it, and a response on that as well."""
    tokenizer, _ = ends_of(tmp_path, PLAIN)
    (tmp_path / "plain.txt").write_text("hello you")
    plain, chat = str(tmp_path / "plain.txt"), str(tmp_path / "a.jsonl")
    pair = str(write_lines(tmp_path / "b.jsonl", [{"q": "hello", "a": "you"}]))
    sources = [
        plain,
        {"path": pair, "prompt": "q", "response": "a"},
        {"path": chat, "messages": "messages"},
        plain.replace("plain", "*"),
    ]
    for one in (tokenizer, dataclasses.replace(tokenizer, bos=tokenizer.special["<s>"])):
        found = find_response_ends(open_corpus(sources, one), one)
        assert tokenizer.special["<|im_end|>"] in found.stop_ids
        assert set(found.stop_ids) <= {tokenizer.special["<|im_end|>"], tokenizer.boundary}
        assert found.num_open == 0
        assert find_response_ends(open_corpus([plain], one), one).num_responses == 0
        assert describe_stop_ids(one, find_response_ends(open_corpus([plain], one), one)) == (
            "",
            "",
        )
