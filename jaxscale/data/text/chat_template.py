"""Conversations as text: the tokenizer's own Jinja template, and which parts carry loss."""

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
"""Characters of a text, from the first to behind the last."""
Rendered = tuple[str, list[Span]]
"""A text, and the parts of it that the assistant says."""

_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens that it may name (`bos_token`, ...)."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def made_of(self) -> list[Any]:
        """All that a text depends on besides its conversation, as JSON can hold it."""
        date = [TODAY.isoformat()] if "strftime_now" in self.source else []
        return [self.source, sorted(self.tokens.items()), *date]

    def render(
        self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation, special tokens written out.

        Args:
          tools: that the assistant may use, each as its JSON schema.
          add_generation_prompt: ends with what begins a turn of the assistant.

        Raises:
          ValueError: the template refuses the conversation, or is at fault.
        """
        return _without_marks(self._render(messages, tools, add_generation_prompt))[0]

    def render_with_loss(self, messages: Messages, tools: Tools = None) -> list[Rendered]:
        """The text, and the parts of it that the assistant says; or several texts.

        By the template's `{% generation %}` blocks where it has them. Otherwise a turn is what it
        adds to the conversation before it, rendered with the prompt for a generation: what the
        model will have to write there. A turn that the template renders in another way when more
        follows, as Qwen3's, without its thoughts, carries loss in a text that ends with it.

        Raises:
          ValueError: as `render`; or the assistant says nothing, or a turn is not added to the
            conversation before it, with the prompt for a generation.
        """
        marked = self._render(messages, tools, False)
        if marked.count(BEGIN) + marked.count(END):
            texts = [_without_marks(marked)]
        elif compile_template(self.source)[1]:
            texts = []
        else:
            texts = self._turns(messages, tools, marked)
        texts = [(text, [span for span in spans if span[0] < span[1]]) for text, spans in texts]
        texts = [(text, spans) for text, spans in texts if spans]
        if not texts:
            raise ValueError("has no turn of the assistant, so that nothing in it carries loss")
        return texts

    def _turns(self, messages: Messages, tools: Tools, whole: str) -> list[Rendered]:
        """The whole text with the turns that it has as they were generated, and texts that end with
        the others: each turn has loss in one of them."""
        turns = {
            i: [
                self.render(messages[:i], tools, add_generation_prompt=True),
                self.render(messages[: i + 1], tools),
            ]
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        }
        first = min(turns, default=0)
        prompt = self._prompt(messages[:first], tools) if first else ""
        for i, turn in turns.items():
            if prompt and not whole.startswith(turn[1]):
                turn += self._followed(messages[: i + 1], tools, prompt)
        texts, text = [], whole
        while turns:
            found = {i: span for i, turn in turns.items() if (span := _find(text, *turn))}
            texts.append((text, list(found.values())))
            turns = {i: turn for i, turn in turns.items() if i not in found}
            if turns:
                last = max(turns)
                before, text, *_ = turns[last]
                if not text.startswith(before):
                    place = next(n for n in range(len(before)) if text[n : n + 1] != before[n])
                    raise ValueError(
                        f"has a turn of the assistant (message {last}, from 0) that the chat "
                        "template does not add to what is before it and its prompt for a "
                        f"generation (which differ from character {place} on), so that what it "
                        "says cannot be found; mark it in the template with {% generation %} ... "
                        "{% endgeneration %}"
                    )
        return texts

    def _followed(self, messages: Messages, tools: Tools, prompt: str) -> list[str]:
        """The text with the last message as one that others follow, where that can be told: some
        templates close a conversation with a further token (Phi-3's), or with another one
        (Harmony), which such a message does not have."""
        text = self.render(messages, tools, add_generation_prompt=True)
        return [text.removesuffix(prompt)] if text.endswith(prompt) else []

    def _prompt(self, messages: Messages, tools: Tools) -> str:
        """What begins a turn of the assistant after these messages; "" where it cannot be told."""
        given = self.render(messages, tools).removesuffix(self.tokens.get("eos_token", ""))
        begun = self.render(messages, tools, add_generation_prompt=True)
        return begun.removeprefix(given) if begun.startswith(given) else ""

    def _render(self, messages: Messages, tools: Tools, add_generation_prompt: bool) -> str:
        given = json.dumps([list(messages), tools], ensure_ascii=False)
        if any(mark in given for mark in (BEGIN, END)):
            raise ValueError("holds U+FDD0 or U+FDD1, which are not characters of any text")
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
        except Exception as error:  # a template may raise whatever Python does
            raise ValueError(f"is refused by the chat template: {first_line(error)}") from error


def _find(text: str, before: str, *ends: str) -> Span | None:
    """Where a turn is in a text that begins as the conversation up to it."""
    until = next((end for end in ends if text.startswith(end)), None)
    return (len(before), len(until)) if until and text.startswith(before) else None


def find_template(beside: Mapping[str, bytes], where: str) -> ChatTemplate | None:
    """The template of a tokenizer: chat_template.jinja, else tokenizer_config.json's.

    Args:
      beside: the contents of the files beside the tokenizer's, by name.
      where: names the tokenizer in messages.

    Raises:
      ValueError: a file is not JSON, there are several templates and none is called "default", or
        the template is not valid Jinja.
    """
    config = read_json(beside, "tokenizer_config.json", where)
    source = config.get("chat_template")
    if "chat_template.jinja" in beside:
        try:
            source = beside["chat_template.jinja"].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"chat_template.jinja beside {where} is not text: {error}") from error
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
                "'default'; keep the one to use, in chat_template.jinja beside it"
            )
        source = named["default"]
    if source is None or source == "":
        return None
    if not isinstance(source, str):
        raise ValueError(f"the chat template of {where} is {name_of_type(source)}, and not text")
    older = read_json(beside, "special_tokens_map.json", where)
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
    """A special token as tokenizer_config.json names it: its text, or an object with "content"."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def read_json(beside: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    """The object in a file beside a tokenizer; empty where there is no such file.

    Raises:
      ValueError: it holds something else.
    """
    try:
        value = parse_json(beside.get(name, b"{}"))
    except ValueError as error:
        raise ValueError(f"{name} beside {where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} beside {where} is not a JSON object")
    return value


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    """The text without the marks of generation blocks, and where they stood."""
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
