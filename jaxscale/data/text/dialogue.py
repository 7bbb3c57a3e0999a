"""What people and models say to each other, as files hold it: exchanges, conversations, questions.

Nothing here imports JAX: a bad file must be refused in a fraction of a second.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Exchange(NamedTuple):
    """A prompt and the response to it."""

    prompt: str
    response: str


Conversation = list[dict[str, Any]]
"""Messages, each with a role and what a chat template needs."""


class Question(NamedTuple):
    """Multiple choice: one of the texts that may follow the prompt is right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int  # its index


def problem_of_messages(messages: Any) -> str:
    """What makes a value no list of messages, as in "has ..."; nothing where it is one."""
    if not isinstance(messages, Sequence) or not messages:
        return f"has {name_of_type(messages)} instead of a list of messages"
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"has a message ({i}, from 0) that is not an object with a 'role'"
    return ""


def read_conversations(file: pathlib.Path) -> list[Conversation]:
    """The conversations of a JSON file: a list of messages, or a list of such lists.

    Raises:
      ValueError: it holds something else.
    """
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"--messages {file} is not JSON: {error}") from error
    several = isinstance(value, list) and value and all(isinstance(one, list) for one in value)
    conversations = value if several else [value]
    for messages in conversations:
        if problem := problem_of_messages(messages):
            raise ValueError(
                f"--messages {file} {problem}; a message is {{'role': 'user', 'content': TEXT}}"
            )
    return conversations


def read_questions(file: pathlib.Path) -> list[Question]:
    """The questions of a JSONL file, one {"prompt", "choices", "answer"} a line.

    Raises:
      ValueError: a line holds something else; names it, its key and what is allowed.
    """
    questions = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.strip():
            questions.append(_question(f"--choices {file}, line {number}", line))
    if not questions:
        raise ValueError(f"--choices {file} is empty; it holds a question on each line")
    return questions


def name_of_type(value: Any) -> str:
    """The type of a value, in a message."""
    return "null" if value is None else f"a {type(value).__name__}"


def _question(where: str, line: str) -> Question:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is {name_of_type(record)}; expected an object")
    missing = [key for key in Question._fields if key not in record]
    if missing:
        raise ValueError(
            f"{where} has no {missing[0]!r}; it has {', '.join(record) or 'nothing'}, and needs "
            f"{', '.join(Question._fields)}"
        )
    prompt, choices, answer = (record[key] for key in Question._fields)
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
