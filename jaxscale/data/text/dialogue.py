"""Dialogue data: prompts with responses, conversations, multiple-choice questions.

Nothing here imports JAX: a bad file must be refused in a fraction of a second.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.storage.untrusted import parse_json

CONVERSATIONS = ("messages", "conversations")
"""Fields of a conversation in records; the second is ShareGPT's."""

SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Speaker in ShareGPT's conversations -> role."""


class Exchange(NamedTuple):
    """A prompt and the response to it."""

    prompt: str
    response: str


class Conversation(NamedTuple):
    """Messages, each with a role and further fields for a chat template, and the tools."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None


class Question(NamedTuple):
    """A multiple-choice question: several continuations of a prompt, one of them correct."""

    prompt: str
    choices: tuple[str, ...]
    answer: int  # index of the correct one


def problem_of_messages(messages: Any) -> str:
    """The reason why a value is not a list of messages, as in "has ..."; "" if it is one."""
    if not isinstance(messages, Sequence) or not messages:
        given = "an empty list" if messages == [] else name_of_type(messages)
        return f"has {given} instead of a list of messages"
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"has a message ({i}, from 0) that is not an object with a 'role'"
    return ""


def to_messages(value: Any) -> Sequence[Mapping[str, Any]]:
    """A list of messages; ShareGPT's, `{"from": "human", "value": TEXT}`, get a role and content.

    Raises:
      ValueError: the value is not such a list; as in "has ...".
    """
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    messages = [_with_role(i, one) for i, one in enumerate(value)] if listed else value
    if problem := problem_of_messages(messages):
        raise ValueError(problem)
    return messages


def _with_role(number: int, message: Any) -> Any:
    if not isinstance(message, Mapping) or "role" in message or "from" not in message:
        return message
    speaker, text = message["from"], message.get("value")
    if speaker not in SHAREGPT:
        raise ValueError(
            f"has a message ({number}, from 0) 'from' {speaker!r}, which is not known; it can be "
            f"{', '.join(SHAREGPT)}"
        )
    if not isinstance(text, str):
        raise ValueError(
            f"has a message ({number}, from 0) whose 'value' is {name_of_type(text)}, not text"
        )
    others = {name: one for name, one in message.items() if name not in ("from", "value")}
    return {"role": SHAREGPT[speaker], "content": text} | others


def tools_of(tools: Any) -> Sequence[Mapping[str, Any]] | None:
    """The tools of a record, which tables store as JSON in a text; None without tools.

    Raises:
      ValueError: the value is not a list of tools; as in "has ...".
    """
    if isinstance(tools, str | bytes) and tools:
        try:
            tools = parse_json(tools)
        except ValueError:
            raise ValueError("has text instead of a list of tools") from None
    if not tools:
        return None
    if not isinstance(tools, Sequence):
        raise ValueError(f"has {name_of_type(tools)} instead of a list of tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValueError(
                f"has a tool ({i}, from 0) that is {name_of_type(tool)}, not an object"
            )
    return tools


def read_conversations(file: pathlib.Path) -> list[Conversation]:
    """The conversations of a JSON file, one or a list, or of a JSONL file, one on each line.

    Each is a list of messages, or an object with "messages" and perhaps "tools".

    Raises:
      ValueError: the file contains anything else.
    """
    text = file.read_text("utf-8-sig")
    try:
        value = parse_json(text)
    except ValueError as error:
        found = _each_line(f"--messages {file}", text)
        if not found:
            raise ValueError(f"--messages {file} is not JSON: {error}") from error
        return [_conversation(where, value) for where, value in found]
    several = isinstance(value, list) and all(
        isinstance(one, list)
        or (isinstance(one, dict) and not one.keys().isdisjoint(CONVERSATIONS))
        for one in value
    )
    values = value if several and value else [value]
    return [_conversation(f"--messages {file}", one) for one in values]


def _check_text(where: str, value: Any) -> None:
    """Refuses text in a JSON value that no tokenizer accepts.

    Raises:
      ValueError: a text is not valid Unicode.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has half of a surrogate pair, {error.object[error.start]!r}, which is not "
            "text; remove it"
        ) from error


def _each_line(where: str, text: str) -> list[tuple[str, Any]]:
    """The values of JSON lines with their positions; empty if the first line is not JSON by itself.

    Raises:
      ValueError: a later line is not JSON.
    """
    values = []
    # Not splitlines(), which also splits at U+2028 inside a text.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                values.append((f"{where}, line {number},", parse_json(line)))
            except ValueError as error:
                if not values:
                    return []
                raise ValueError(f"{where}, line {number} is not JSON: {error}") from error
    return values


def _conversation(where: str, value: Any) -> Conversation:
    _check_text(where, value)
    messages, tools = value, None
    if isinstance(value, Mapping):
        found = [name for name in CONVERSATIONS if name in value]
        if not found:
            names = ", ".join(value) or "nothing"
            raise ValueError(
                f"{where} has an object without 'messages'; it has {names}: give a list of "
                "messages, or {'messages': [...], 'tools': [...]}"
            )
        messages, tools = value[found[0]], value.get("tools")
    try:
        messages = to_messages(messages)
    except ValueError as error:
        raise ValueError(
            f"{where} {error}; a message is {{'role': 'user', 'content': TEXT}}"
        ) from error
    try:
        return Conversation(messages, tools_of(tools))
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error


def read_questions(file: pathlib.Path) -> list[Question]:
    """The questions of a JSONL file, one {"prompt", "choices", "answer"} a line.

    Raises:
      ValueError: a line is not a question; names the line, the key and the allowed values.
    """
    questions = []
    # Not splitlines(): see _each_line.
    for number, line in enumerate(file.read_text("utf-8-sig").split("\n"), 1):
        if line.strip():
            questions.append(_question(f"--choices {file}, line {number}", line))
    if not questions:
        raise ValueError(f"--choices {file} is empty; give one question per line")
    return questions


def name_of_type(value: Any) -> str:
    """The name of a value's type in messages."""
    return "null" if value is None else f"a {type(value).__name__}"


def _fields(where: str, line: str) -> list[Any]:
    """The fields of a question's record."""
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is {name_of_type(record)}; expected an object")
    _check_text(where, record)
    missing = [key for key in Question._fields if key not in record]
    if missing:
        raise ValueError(
            f"{where} has no {missing[0]!r}; it has {', '.join(record) or 'nothing'}, and needs "
            f"{', '.join(Question._fields)}"
        )
    return [record[key] for key in Question._fields]


def _question(where: str, line: str) -> Question:
    prompt, choices, answer = _fields(where, line)
    if not isinstance(prompt, str):
        raise ValueError(f"{where}: prompt is {name_of_type(prompt)}; expected text")
    texts = isinstance(choices, list) and all(isinstance(one, str) and one for one in choices)
    if not texts or len(choices) < 2:
        raise ValueError(f"{where}: choices = {choices!r}; expected a list of at least two texts")
    whole = isinstance(answer, int) and not isinstance(answer, bool)
    if not whole or not 0 <= answer < len(choices):
        raise ValueError(
            f"{where}: answer = {answer!r}; expected the index of a choice, from 0 to "
            f"{len(choices) - 1}"
        )
    return Question(prompt, tuple(choices), answer)
