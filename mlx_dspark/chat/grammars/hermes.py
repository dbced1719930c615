"""`<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`: Hermes, Qwen. The arguments are streamed."""

from __future__ import annotations

import json
from typing import Any

from mlx_dspark.chat.script import (
    Begin,
    Broken,
    Calls,
    Declare,
    End,
    Grammar,
    Json,
    Match,
    Maybe,
    Schemas,
    Script,
)

_KEY = r'\s{0,64}"(name|arguments|parameters|[^"\\]{0,64})"\s{0,64}:'
_ARGUMENTS = ("arguments", "parameters")


def read(opened: str, tools: Schemas) -> Script:
    del opened, tools
    name, held, streamed = "", None, False
    mark = yield Match(r"\s{0,64}\{")
    while mark[0][-1] != "}":
        key = (yield Match(_KEY))[1]
        if key in _ARGUMENTS and name and not streamed:
            kind = (yield Match(r'\s{0,64}(["{])'))[1]
            if kind == "{":
                streamed = True
                yield Begin(name)
                yield Json("{", streamed=True)
            else:
                held = _spelled((yield Json('"')))
        else:
            value = yield Json()
            if key == "name":
                name = _name(value, name)
                yield Declare(name)
            elif key in _ARGUMENTS:
                held = _spelled(value)
        mark = yield Match(r"\s{0,64}[,}]")
    if not name:
        raise Broken
    yield End() if streamed else Calls(((name, {} if held is None else held),))
    yield Maybe(r"\s{0,64}</tool_call>")


def _name(text: str, before: str) -> str:
    name = json.loads(text)
    if not isinstance(name, str) or before:
        raise Broken
    return name


def _spelled(text: str) -> Any:
    """The arguments, which some models write as JSON within a string."""
    try:
        value = json.loads(text)
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise Broken from error


HERMES = Grammar("hermes", ("<tool_call>",), read, ("</tool_call>",))
