"""`<|tool_call>call:f{a:<|"|>text<|"|>,b:[1,{c:true}]}<tool_call|>`: Gemma 4.

What stands between the marks is JSON but for its strings, which are between `<|"|>`, and its keys, which may
be bare. So it is rewritten as JSON and read from end to end; a section may hold several calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mlx_dspark.chat.script import Broken, Calls, Grammar, Schemas, Script, Until

_QUOTE = '<|"|>'
_BARE_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:')
_HEAD = re.compile(r"\s*call:([\w.:/-]+)\s*(?=\{)")
_JSON = json.JSONDecoder()


def read(opened: str, tools: Schemas) -> Script:
    del opened, tools
    text = yield Until("<tool_call|>", [(_QUOTE, _QUOTE)])
    calls = tuple(_calls(_as_json(text)))
    if not calls:
        raise Broken
    yield Calls(calls)


def _as_json(text: str) -> str:
    """The text as JSON; every second part of it, between quotes, is a string."""
    parts = text.split(_QUOTE)
    parts[::2] = [_BARE_KEY.sub(lambda found: f'{found[1]}"{found[2]}":', part) for part in parts[::2]]
    parts[1::2] = map(json.dumps, parts[1::2])
    return "".join(parts)


def _calls(text: str) -> Iterator[tuple[str, Any]]:
    at, text = 0, text.rstrip()
    while at < len(text):
        head = _HEAD.match(text, at)
        if head is None:
            raise Broken
        try:
            arguments, at = _JSON.raw_decode(text, head.end())
        except (ValueError, RecursionError) as error:
            raise Broken from error
        yield head[1], arguments


GEMMA_CALLS = Grammar("gemma4", ("<|tool_call>",), read, ("<tool_call|>", _QUOTE))
