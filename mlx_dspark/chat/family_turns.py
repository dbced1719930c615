"""Turns laid out for templates that take fewer forms of a conversation than there are."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mlx_dspark.chat.messages import template_messages
from mlx_dspark.chat.milder_turns import milder
from mlx_dspark.foundation.chat import Turn

_READS_RESULTS = re.compile(r"""==\s*['"]tool['"]""")


def family_messages(source: str, turns: Sequence[Turn]) -> Iterator[list[dict[str, Any]]]:
    """The turns as messages for the template with this source, in the forms that it may take, best first.

    One that reads only the first call of a turn (gpt-oss) gets a turn for each call, its result after it; and
    since it takes reasoning or text beside a call, not both, the text is then the end of the reasoning. One
    that knows results as `tool_responses` and no turns of tools (Gemma 4) gets them so. One
    that wants ids of nine letters and digits (Mistral) gets such. Arguments are objects, and then text.
    """
    if "length != 9" in source or "length == 9" in source:
        turns = tuple(map(_nine_characters, turns))
    if "tool_calls[0]" in source and "message.thinking" in source:
        turns = tuple(_one_call_each(turns))
    called = any(turn.tool_calls for turn in turns)
    responses = "tool_responses" in source and not _READS_RESULTS.search(source)
    for form in milder(turns):
        for as_text in (False, True) if called else (False,):
            messages = template_messages(form, arguments_as_text=as_text)
            yield list(_with_responses(messages)) if responses else messages


def _one_call_each(turns: Sequence[Turn]) -> Iterator[Turn]:
    results: dict[str, list[Turn]] = {}
    for turn in turns:
        if turn.role == "tool":
            results.setdefault(turn.tool_call_id, []).append(turn)
    asked = {call.id for turn in turns for call in turn.tool_calls}
    for turn in turns:
        if turn.role == "tool" and turn.tool_call_id in asked:
            continue
        if not turn.tool_calls:
            yield turn
            continue
        thought = "\n\n".join(filter(None, (turn.reasoning, turn.content)))
        for call in turn.tool_calls:
            yield replace(turn, content="", reasoning=thought, tool_calls=(call,))
            thought = ""
            yield from results.pop(call.id, ())


def _nine_characters(turn: Turn) -> Turn:
    def short(name: str) -> str:
        return hashlib.sha256(name.encode()).hexdigest()[:9]

    calls = tuple(replace(call, id=short(call.id)) for call in turn.tool_calls)
    return replace(
        turn, tool_calls=calls, tool_call_id=short(turn.tool_call_id) if turn.role == "tool" else ""
    )


def _with_responses(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    calling: dict[str, Any] | None = None
    for message in messages:
        if message["role"] == "tool" and calling is not None:
            response = {"name": message["name"], "response": _object_or_text(message["content"])}
            calling.setdefault("tool_responses", []).append(response)
            continue
        calling = None
        if message.get("tool_calls"):
            if message["content"]:
                yield {"role": message["role"], "content": message["content"]}
            calling = message | {"content": ""}
            yield calling
        else:
            yield message


def _object_or_text(content: str) -> Any:
    try:
        value = json.loads(content)
    except ValueError:
        return content
    return value if isinstance(value, dict) else content
