"""What a line of a file of prompts holds, checked before any model is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_dspark.foundation.numbers import brief

FIELDS = ("prompt", "messages", "turns", "text")


class BadRecord(ValueError):
    """The record is no prompt: `args[0]` says why as the end of a sentence, `next_step` what to give."""

    def __init__(self, reason: str, next_step: str) -> None:
        self.next_step = next_step
        super().__init__(reason)


def prompt_of(record: Mapping[str, Any]) -> Any:
    """The prompt of a record with one of FIELDS: a text, or messages of a role and a content.

    `messages` comes before `prompt`, `prompt` before `text` and `turns`, of which the first is the prompt.
    Raises BadRecord.
    """
    if "messages" in record:
        return _messages(record["messages"])
    for name in ("prompt", "text"):
        if name in record:
            return _text(name, record[name])
    return _first_turn(record["turns"])


def opener_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """How a user turn begins and ends, by `begin` and perhaps `end`. Raises BadRecord."""
    begin, end = record["begin"], record.get("end", "")
    for name, value in (("begin", begin), ("end", end)):
        if not isinstance(value, str):
            raise _not_text(name, value)
    return begin, end


def _messages(found: Any) -> list[Any]:
    if not isinstance(found, list):
        raise BadRecord(f"messages is {brief(found)}, and not a list of messages", _MESSAGES)
    for i, message in enumerate(found):
        _check_message(f"messages[{i}]", message)
    if not any(message["content"].strip() for message in found):
        raise BadRecord("messages hold no text", _MESSAGES)
    return found


def _check_message(place: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise BadRecord(f"{place} is {brief(message)}, and not a message", _MESSAGES)
    for name in ("role", "content"):
        if name not in message:
            raise BadRecord(f"{place} has no {name}", _MESSAGES)
        if not isinstance(message[name], str):
            raise _not_text(f"{place}.{name}", message[name], _MESSAGES)


def _first_turn(found: Any) -> str:
    if not isinstance(found, list) or not found:
        raise BadRecord(f"turns is {brief(found)}, and not a list of texts", 'Give {"turns": ["..."]}.')
    for i, turn in enumerate(found):
        _text(f"turns[{i}]", turn)
    return found[0]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _not_text(name, value)
    if not value.strip():
        raise BadRecord(f"{name} is empty", "Give some text to answer, or take the line out.")
    return value


def _not_text(name: str, value: Any, next_step: str = "Give it as text, in quotes.") -> BadRecord:
    return BadRecord(f"{name} is {brief(value)}, and not text", next_step)


_MESSAGES = (
    'Give each message a role and a content, both as text, such as {"role": "user", "content": "..."}.'
)

Reader = Callable[[Mapping[str, Any]], Any]
"""What a record means: `prompt_of` or `opener_of`."""
