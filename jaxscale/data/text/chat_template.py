"""Chat templates (Jinja): conversations rendered as text, and the parts that carry loss."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxscale.data.text.dialogue import name_of_type
from jaxscale.data.text.template_sandbox import (
    BEGIN,
    END,
    TODAY,
    compile_template,
    first_line,
    render_template,
)
from jaxscale.storage.untrusted import parse_json

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Span = tuple[int, int]
"""Characters of a text: the first, and the one after the last."""
Rendered = tuple[str, list[Span]]
"""A text, and the parts that the assistant wrote."""

_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens that it may use (`bos_token`, ...)."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def made_of(self) -> list[Any]:
        """Everything except the conversation that determines a text, as a JSON value."""
        date = [TODAY.isoformat()] if "strftime_now" in self.source else []
        return [self.source, sorted(self.tokens.items()), *date]

    def render(
        self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation, special tokens written out.

        Args:
          tools: of the assistant, each as its JSON schema.
          add_generation_prompt: appends the beginning of an assistant message.

        Raises:
          ValueError: the template refuses the conversation, or has an error.
        """
        return _without_marks(self._render(messages, tools, add_generation_prompt))[0]

    def render_with_loss(self, messages: Messages, tools: Tools = None) -> list[Rendered]:
        """The text with the parts that the assistant wrote; or several texts.

        The parts are the template's `{% generation %}` blocks, if it has any. Otherwise a message
        of the assistant is the text that it adds to the conversation before it with the generation
        prompt, as the model has to write it. A message that is rendered differently when others
        follow (Qwen3 drops its thoughts) carries loss in a separate text that ends with it.

        Raises:
          ValueError: as `render`; or the assistant writes nothing, or a message does not extend the
            conversation before it with the generation prompt.
        """
        marked = self._render(messages, tools, False)
        if marked.count(BEGIN) + marked.count(END):
            texts = [_without_marks(marked)]
        elif compile_template(self.source)[1]:
            texts = []
        else:
            texts = self._replies(messages, tools, marked)
        texts = [(text, [span for span in spans if span[0] < span[1]]) for text, spans in texts]
        texts = [(text, spans) for text, spans in texts if spans]
        if not texts:
            raise ValueError("has no message of the assistant, so nothing in it carries loss")
        return texts

    def _replies(self, messages: Messages, tools: Tools, whole: str) -> list[Rendered]:
        """The whole text with the replies that it has as they were generated, and texts that end
        with the others: each reply has loss in one of them."""
        replies = {
            i: [
                self.render(messages[:i], tools, add_generation_prompt=True),
                self.render(messages[: i + 1], tools),
            ]
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        }
        first = min(replies, default=0)
        prompt = self._prompt(messages[:first], tools) if first else ""
        for i, reply in replies.items():
            if prompt and not whole.startswith(reply[1]):
                reply += self._followed(messages[: i + 1], tools, prompt)
        texts, text = [], whole
        while replies:
            found = {i: span for i, reply in replies.items() if (span := _find(text, *reply))}
            texts.append((text, list(found.values())))
            replies = {i: reply for i, reply in replies.items() if i not in found}
            if replies:
                last = max(replies)
                before, text, *_ = replies[last]
                if not text.startswith(before):
                    place = next(n for n in range(len(before)) if text[n : n + 1] != before[n])
                    raise ValueError(
                        f"has a message of the assistant (message {last}, from 0) whose text "
                        "cannot be found: the chat template does not append it to the messages "
                        f"before it and the generation prompt (from character {place}); mark it "
                        "in the template with {% generation %} ... {% endgeneration %}"
                    )
        return texts

    def _followed(self, messages: Messages, tools: Tools, prompt: str) -> list[str]:
        """The text whose last message is rendered as if others followed, if that can be derived:
        some templates close a conversation with a further token (Phi-3), or with another one
        (Harmony), which such a message does not have."""
        text = self.render(messages, tools, add_generation_prompt=True)
        return [text.removesuffix(prompt)] if text.endswith(prompt) else []

    def _prompt(self, messages: Messages, tools: Tools) -> str:
        """The generation prompt after these messages; "" if it cannot be derived."""
        given = self.render(messages, tools).removesuffix(self.tokens.get("eos_token", ""))
        begun = self.render(messages, tools, add_generation_prompt=True)
        return begun.removeprefix(given) if begun.startswith(given) else ""

    def _render(self, messages: Messages, tools: Tools, add_generation_prompt: bool) -> str:
        given = json.dumps([list(messages), tools], ensure_ascii=False)
        if any(mark in given for mark in (BEGIN, END)):
            raise ValueError("has U+FDD0 or U+FDD1, which are not characters of any text")
        try:
            return render_template(
                compile_template(self.source)[0],
                len(given),
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except Exception as error:  # a template may raise any Python error
            raise ValueError(f"is refused by the chat template: {first_line(error)}") from error


def _find(text: str, before: str, *ends: str) -> Span | None:
    """The span of a reply in a text that begins with the conversation before it."""
    until = next((end for end in ends if text.startswith(end)), None)
    return (len(before), len(until)) if until and text.startswith(before) else None


def find_template(files: Mapping[str, bytes], where: str) -> ChatTemplate | None:
    """The template of a tokenizer: chat_template.jinja, else tokenizer_config.json's.

    Args:
      files: the contents of the other files in the tokenizer's folder, by name.
      where: names the tokenizer in messages.

    Raises:
      ValueError: a file is not JSON, there are several templates and none is called "default", or
        the template is not valid Jinja.
    """
    config = read_json(files, "tokenizer_config.json", where)
    source = config.get("chat_template")
    if "chat_template.jinja" in files:
        try:
            source = files["chat_template.jinja"].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"chat_template.jinja of {where} is not text: {error}") from error
    if isinstance(source, list):
        try:
            named = {str(one["name"]): one["template"] for one in source}
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"{where} has a list of chat templates, not each with a name and a template"
            ) from error
        if "default" not in named:
            raise ValueError(
                f"{where} has chat templates named {', '.join(named)}, and none is called "
                "'default'; keep the one to use, in chat_template.jinja next to it"
            )
        source = named["default"]
    if source is None or source == "":
        return None
    if not isinstance(source, str):
        raise ValueError(f"the chat template of {where} is {name_of_type(source)}, not text")
    older = read_json(files, "special_tokens_map.json", where)
    tokens = {
        f"{name}_token": text
        for name in _TOKENS
        if (text := token_text(config.get(f"{name}_token") or older.get(f"{name}_token")))
    }
    try:
        compile_template(source)
    except ValueError as error:
        raise ValueError(f"the chat template of {where} {error}") from error
    return ChatTemplate(source, tokens)


def token_text(token: Any) -> str | None:
    """The text of a special token in tokenizer_config.json: a text, or an object's "content"."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def read_json(files: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    """The object in a JSON file of a tokenizer's folder; empty if there is no such file.

    Raises:
      ValueError: the file does not contain an object.
    """
    try:
        value = parse_json(files.get(name, b"{}"))
    except ValueError as error:
        raise ValueError(f"{name} of {where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} of {where} is not a JSON object")
    return value


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    """The text without the marks of generation blocks, and the spans between them."""
    parts, spans, length, begins = [], [], 0, []
    for part in re.split(f"([{BEGIN}{END}])", marked):
        if part == BEGIN:
            begins.append(length)
        elif part == END:  # a template may write it itself, before any block
            start = begins.pop() if begins else length
            if not begins:  # the outermost block
                spans.append((start, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), spans
