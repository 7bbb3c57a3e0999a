"""Prompts that are conversations."""

import json

import pytest

from jaxscale.data.text.dialogue import read_conversations
from jaxscale.data.tokens.tokenizer import load_tokenizer
from jaxscale.decoding.prompts import encode_messages
from tests.data.dialogues import CONVERSATIONS, PLAIN, write_tokenizer
from tests.decoding.test_sampling import TOKENIZER


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


def test_conversations_of_a_file(tmp_path):
    file = tmp_path / "m.json"
    file.write_text(json.dumps(CONVERSATIONS[0]))
    assert read_conversations(file) == CONVERSATIONS[:1]
    file.write_text(json.dumps(CONVERSATIONS))
    assert read_conversations(file) == CONVERSATIONS
    for text, match in [
        ("{", "m.json is not JSON"),
        ("[]", "m.json has a list instead of a list of messages"),
        ('[{"content": "a"}]', r"message \(0, from 0\) .*; a message is {'role': 'user'"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=match):
            read_conversations(file)
