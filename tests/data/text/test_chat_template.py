"""Conversations are rendered as transformers renders them, and only the assistant's words count."""

import pytest

from jaxscale.data.text.chat_template import ChatTemplate, find_template
from tests.data.dialogues import CONVERSATIONS, HARMONY, MARKED, PLAIN, THINKING

# Those of transformers 5 for the same templates and messages.
RENDERED = (
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhat is 2 + 2 ?<|im_end|>\n"
    "<|im_start|>assistant\n4 é<|im_end|>\n<|im_start|>user\nand 3 ?<|im_end|>\n"
    "<|im_start|>assistant\n5 of course<|im_end|>\n"
)


def said(source: str, messages, **tokens: str) -> list[str]:
    ((text, spans),) = ChatTemplate(source, tokens).render_with_loss(messages)
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize("source", [PLAIN, MARKED])
def test_a_conversation_is_the_text_that_transformers_renders(source):
    template = ChatTemplate(source)
    ((text, _),) = template.render_with_loss(CONVERSATIONS[0])
    assert text == RENDERED
    assert template.render(CONVERSATIONS[0]) == RENDERED
    begun = template.render(CONVERSATIONS[0][:2], add_generation_prompt=True)
    assert RENDERED.startswith(begun)
    assert begun.endswith("<|im_start|>assistant\n")


def test_marks_of_a_template_show_the_assistant():
    assert said(MARKED, CONVERSATIONS[0]) == ["4 é<|im_end|>", "5 of course<|im_end|>"]
    # In a macro and a loop, and one inside another: the outer one.
    source = (
        "{% macro reply(m) %}<{% generation %}{% generation %}{{ m.content }}{% endgeneration %}!"
        "{% endgeneration %}>{% endmacro %}{% for m in messages %}{{ reply(m) }}{% endfor %}"
    )
    assert said(source, CONVERSATIONS[1]) == ["hello!", "hello you!"]


def test_without_marks_a_reply_is_the_text_that_it_adds():
    assert said(PLAIN, CONVERSATIONS[0]) == ["4 é<|im_end|>\n", "5 of course<|im_end|>\n"]


def test_a_conversation_may_be_closed_by_the_end_of_a_text():
    """As in the template of Phi-3: after its last message, whoever wrote it."""
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    first, last = said(source, CONVERSATIONS[0], eos_token="<|endoftext|>")
    assert (first, last) == ("4 é<|end|>\n", "5 of course<|end|>\n<|endoftext|>")


def test_an_end_that_stands_for_another_between_messages_carries_loss():
    """As in Harmony's template: an answer ends with <|return|>, and with <|end|> where more
    follows, which a removed eos_token would leave without any end."""
    first, last = said(HARMONY, CONVERSATIONS[0], eos_token="<|return|>")
    assert first == "<|channel|>final<|message|>4 é<|end|>"
    assert last == "<|channel|>final<|message|>5 of course<|return|>"


def test_a_reply_that_changes_when_more_follows_ends_a_separate_text():
    """As Qwen3's: each reply is learned as it has to be written, after the text before it."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": ["f"]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "", "tool_calls": ["g"]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "d"},
    ]
    template = ChatTemplate(THINKING)
    texts = template.render_with_loss(messages)
    found = {}
    for text, spans in texts:
        for begin, end in spans:
            found[text[begin:end]] = text[:begin], text[end:]
    expected = {
        "<think>\nhm\n</think>\n\nb<|im_end|>\n": 1,
        '<think>\nlook\n</think>\n\n<tool_call>"f"</tool_call><|im_end|>\n': 3,
        '<think>\n\n</think>\n\n<tool_call>"g"</tool_call><|im_end|>\n': 5,
        "<think>\n\n</think>\n\nd<|im_end|>\n": 7,
    }
    assert found.keys() == expected.keys()
    for reply, i in expected.items():
        assert found[reply][0] == template.render(messages[:i], add_generation_prompt=True)
    # Unchanged replies share the text of the whole conversation.
    assert [len(spans) for _, spans in texts] == [2, 1, 1]
    assert texts[0][0] == template.render(messages)
    assert "hm" not in texts[0][0]
    assert [after for _, after in found.values()].count("") == 3


def test_an_end_that_only_a_last_reply_has_is_learned_with_each():
    source = (
        "{% for m in messages %}{{ m.role[0] ~ ':' ~ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}</s>{% endif %};{% endfor %}"
    )
    texts = ChatTemplate(source).render_with_loss(CONVERSATIONS[0])
    said = [[text[begin:end] for begin, end in spans] for text, spans in texts]
    assert said == [["a:5 of course</s>;"], ["a:4 é</s>;"]]


REFUSED = [
    # The text before a reply changes with it.
    (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content if loop.last else '' }};{% endfor %}",
        r"message 4, from 0\) whose text cannot be found: .*\(from character 11\)",
    ),
    # The generation prompt begins thoughts that the reply lacks.
    (
        "{% for m in messages %}{{ m.role[0] ~ ':' ~ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:<think>' }}{% endif %}",
        r"message 4, from 0\) whose text cannot be found: .*\(from character 47\)",
    ),
    (
        "{{ raise_exception('no system message') }}",
        "refused by the chat template: no system message",
    ),
    ("{{ messages[0].content + 1 }}", "refused by the chat template: "),
    ("{{ messages.append(1) }}", "refused by the chat template: .*append.* is unsafe"),
    ("{{ ''.__class__.__mro__ }}", "refused by the chat template: .*__class__.* is unsafe"),
    ("{% generation %}{% endgeneration %}", "has no message of the assistant"),
]


@pytest.mark.parametrize(("source", "match"), REFUSED)
def test_what_cannot_be_rendered_is_refused(source, match):
    with pytest.raises(ValueError, match=match):
        ChatTemplate(source).render_with_loss(CONVERSATIONS[0])


def test_the_marks_of_the_renderer_cannot_come_from_a_text():
    with pytest.raises(ValueError, match=r"U\+FDD0"):
        ChatTemplate(MARKED).render([{"role": "user", "content": "a\ufdd0b"}])
    with pytest.raises(ValueError, match="has no message of the assistant"):
        ChatTemplate(PLAIN).render_with_loss(CONVERSATIONS[0][:2])


def test_globals_and_filters_of_transformers():
    source = (
        "{{ {'a': '<é>'} | tojson }} {{ [1] | tojson(indent=1) }} {{ bos_token }}{{ eos_token }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(CONVERSATIONS[1]) == '{"a": "<é>"} [\n 1\n] <s>'
    loop = "{% for m in messages %}{% break %}{% endfor %}{{ tools }}"
    assert ChatTemplate(loop).render(CONVERSATIONS[1]) == "None"


def test_the_date_of_a_template_stays():
    """Tokens that were made with the date of the day, before, are made again."""
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {"bos_token": "<s>"})
    assert template.render(CONVERSATIONS[1]) == "26 Jul 2024"
    assert template.made_of[1:] == [[("bos_token", "<s>")], "2024-07-26T00:00:00"]
    assert ChatTemplate("x").made_of == ["x", []], "as shards that were prepared before"


def test_the_template_of_a_tokenizer():
    config = b'{"chat_template": "old", "eos_token": {"content": "</s>"}, "pad_token": null}'
    found = find_template({"tokenizer_config.json": config}, "t.json")
    assert found == ChatTemplate("old", {"eos_token": "</s>"})
    files = {"tokenizer_config.json": config, "chat_template.jinja": b"new"}
    assert find_template(files, "t.json") == ChatTemplate("new", {"eos_token": "</s>"})
    assert find_template({}, "t.json") is None
    several = b'{"chat_template": [{"name": "%s", "template": "it"}]}'
    found = find_template({"tokenizer_config.json": several % b"default"}, "t.json")
    assert found == ChatTemplate("it")
    with pytest.raises(ValueError, match=r"t.json has chat templates named rag, .*'default'"):
        find_template({"tokenizer_config.json": several % b"rag"}, "t.json")
    with pytest.raises(ValueError, match=r"template of t.json is not valid: .*line 2"):
        find_template({"chat_template.jinja": b"\n{% if %}"}, "t.json")
    with pytest.raises(ValueError, match=r"tokenizer_config.json of t.json is not JSON"):
        find_template({"tokenizer_config.json": b"{"}, "t.json")
