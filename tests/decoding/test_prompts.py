"""Prompts that are conversations."""

import json

import pytest

from jaxscale.data.text.dialogue import read_conversations
from jaxscale.data.tokens.tokenizer import load_tokenizer
from jaxscale.decoding.prompts import check_decodes, encode_messages
from tests.data.dialogues import CONVERSATIONS, PLAIN, THINKING, write_lines, write_tokenizer
from tests.decoding.test_sampling import TOKENIZER
from tests.invariants.models import one_device


def test_messages_are_rendered_up_to_where_the_assistant_speaks(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, PLAIN))
    ids = encode_messages(tokenizer, CONVERSATIONS[1][:1])
    assert ids[0] == tokenizer.special["<|im_start|>"]
    assert tokenizer.decode(ids) == "user\nhello\nassistant\n"
    assert (ids == tokenizer.special["<|im_end|>"]).sum() == 1
    with pytest.raises(ValueError, match=r"--messages: .*'bytes' has no chat template"):
        encode_messages(TOKENIZER, CONVERSATIONS[1])
    with pytest.raises(ValueError, match=r"the conversation is refused by the chat template"):
        encode_messages(tokenizer, [{"role": "user", "content": 3}])


def test_tools_reach_the_template(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, THINKING))
    ids = encode_messages(tokenizer, CONVERSATIONS[1][:1], [{"name": "f"}])
    assert tokenizer.decode(ids) == 'system\n{"name": "f"}\n\nuser\nhello\nassistant\n'


def test_conversations_of_a_file(tmp_path):
    file = tmp_path / "m.json"
    file.write_text(json.dumps(CONVERSATIONS[0]))
    assert read_conversations(file) == [(CONVERSATIONS[0], None)]
    file.write_text(json.dumps(CONVERSATIONS))
    several = read_conversations(file)
    assert [messages for messages, _ in several] == CONVERSATIONS
    # The same in objects, as in a file of training, and on a line each.
    records = [{"messages": messages, "tools": []} for messages in CONVERSATIONS]
    file.write_text(json.dumps(records))
    assert read_conversations(file) == several
    for lines in (records, CONVERSATIONS):
        assert read_conversations(write_lines(file, lines)) == several
    assert read_conversations(write_lines(file, records[:1])) == several[:1]
    said = [{"role": "user", "content": "one\u2028two\x85"}]
    file.write_text(f"{json.dumps(said, ensure_ascii=False)}\n" * 2)
    assert read_conversations(file) == [(said, None)] * 2
    tools = [{"name": "f"}]
    for given in (tools, json.dumps(tools)):
        file.write_text(json.dumps({"messages": CONVERSATIONS[1], "tools": given}))
        assert read_conversations(file) == [(CONVERSATIONS[1], tools)]
    for text, match in [
        ("{", "m.json is not JSON"),
        ("[]", "m.json has an empty list instead of a list of messages"),
        ('{"role": "user"}', "m.json has an object without 'messages'; it has role: give a list"),
        ('[{"messages": []}, []]', "m.json has an empty list instead of a list of messages"),
        (f"{json.dumps(records[0])}\n{{", "m.json, line 2 is not JSON"),
        (f"{json.dumps(records[0])}\n\n[]", "m.json, line 3, has an empty list instead of"),
        (json.dumps(records[0] | {"tools": 3}), "m.json has a int instead of a list of tools"),
        (json.dumps(records[0] | {"tools": ["f"]}), r"has a tool \(0, from 0\) that is a str, not"),
        ('[{"role": "user", "content": "\\ud800"}]', "m.json has half of a surrogate pair"),
        ('[{"content": "a"}]', r"message \(0, from 0\) .*; a message is {'role': 'user'"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=match):
            read_conversations(file)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("expert choice", "with model.router = 'balanced' experts choose among all tokens"),
        ("custom block and loss", r"its blocks have no decode\(\)"),
        ("bert", "is not causal here: it predicts masked tokens"),
    ],
)
def test_why_a_model_draws_no_text(kind, why):
    with pytest.raises(ValueError, match=why):
        check_decodes(one_device(kind))
