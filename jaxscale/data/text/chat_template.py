"""Conversations as text: the tokenizer's own Jinja template, and which parts carry loss.

The environment is that of transformers' `apply_chat_template`: an immutable sandbox, blocks
trimmed, loop controls, `{% generation %}`, `tojson` without HTML escapes, `raise_exception` and
`strftime_now`. But its "now" is a date that stays: a run that is resumed on another day has to see
the same tokens.
"""

import datetime
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import ext, nodes, parser, sandbox

from jaxscale.storage.untrusted import parse_json

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Span = tuple[int, int]
"""Characters of a text, from the first to behind the last."""
Rendered = tuple[str, list[Span]]
"""A text, and the parts of it that the assistant says."""

TODAY = datetime.datetime(2024, 7, 26)
"""What `strftime_now` formats: the date that Llama 3's templates name where they are given none."""

_BEGIN, _END = "\ufdd0", "\ufdd1"  # code points that no text has: Unicode keeps them for programs
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
        if marked.count(_BEGIN) + marked.count(_END):
            texts = [_without_marks(marked)]
        elif _compile(self.source)[1]:
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
            i: (
                self.render(messages[:i], tools, add_generation_prompt=True),
                self.render(messages[: i + 1], tools),
            )
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        }
        texts, text = [], whole
        while turns:
            found = {i: span for i, turn in turns.items() if (span := self._find(text, *turn))}
            texts.append((text, list(found.values())))
            turns = {i: turn for i, turn in turns.items() if i not in found}
            if turns:
                last = max(turns)
                before, text = turns[last]
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

    def _find(self, text: str, before: str, until: str) -> Span | None:
        """Where a turn is in a text that begins as the conversation up to it."""
        if not text.startswith(until):  # some close a conversation with it, as Phi-3's
            until = until.removesuffix(self.tokens.get("eos_token", ""))
        if text.startswith(before) and text.startswith(until):
            return len(before), len(until)
        return None

    def _render(self, messages: Messages, tools: Tools, add_generation_prompt: bool) -> str:
        given = json.dumps([list(messages), tools], ensure_ascii=False)
        if any(mark in given for mark in (_BEGIN, _END)):
            raise ValueError("holds U+FDD0 or U+FDD1, which are not characters of any text")
        try:
            return _compile(self.source)[0].render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except Exception as error:  # a template may raise whatever Python does
            reason = str(error).splitlines() or [type(error).__name__]
            raise ValueError(f"is refused by the chat template: {reason[0]}") from error


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
        source = beside["chat_template.jinja"].decode("utf-8-sig")
    if isinstance(source, list):
        named = {one["name"]: one["template"] for one in source}
        if "default" not in named:
            raise ValueError(
                f"{where} has chat templates named {', '.join(named)}, and none is called "
                "'default'; keep the one to use, in chat_template.jinja beside it"
            )
        source = named["default"]
    if not source:
        return None
    older = read_json(beside, "special_tokens_map.json", where)
    tokens = {
        f"{name}_token": text
        for name in _TOKENS
        if (text := token_text(config.get(f"{name}_token") or older.get(f"{name}_token")))
    }
    try:
        _compile(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template of {where} is not valid: {error.message}, line {error.lineno}"
        ) from error
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
    for begin, part in _split(marked):
        if begin == _BEGIN:
            begins.append(length)
        elif begin == _END and begins:
            start = begins.pop()
            if not begins:  # the outermost block
                spans.append((start, length))
        parts.append(part)
        length += len(part)
    return "".join(parts), spans


def _split(marked: str) -> Iterator[tuple[str, str]]:
    """Parts of a text, each with the mark before it."""
    begin = ""
    while True:
        places = [i for i in (marked.find(_BEGIN), marked.find(_END)) if i >= 0]
        if not places:
            yield begin, marked
            return
        place = min(places)
        yield begin, marked[:place]
        begin, marked = marked[place], marked[place + 1 :]


class _Generation(ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: what is inside is rendered between two marks."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja wants it

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> tuple[jinja2.Template, bool]:
    """A template, and whether it marks what the assistant says."""
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = TODAY.strftime
    marks = any(
        isinstance(call.call.node, nodes.ExtensionAttribute)
        for call in environment.parse(source).find_all(nodes.CallBlock)
    )
    return environment.from_string(source), marks


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
