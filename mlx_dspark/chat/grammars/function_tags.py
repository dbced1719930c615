"""`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`: Qwen3-Coder, Nemotron 3, Seed.

A model may leave out the outer tags. Values are bare text, typed by the tool's schema.
"""

from __future__ import annotations

from mlx_dspark.chat.script import Calls, Declare, Grammar, Match, Maybe, Schemas, Script, Until
from mlx_dspark.chat.typed import arguments_of

_FUNCTION = "<function="
_CLOSED = "</function>"
_OUTER = ("<tool_call>", "<seed:tool_call>")
_OUTER_CLOSED = r"</(?:seed:)?tool_call>"


def read(opened: str, tools: Schemas) -> Script:
    head = r"([^\s<>]{1,256})\s{0,64}>"
    found = yield Match(head if opened == _FUNCTION else rf"\s{{0,64}}{_FUNCTION}{head}")
    while found is not None and found[1]:
        name = found[1]
        yield Declare(name)
        raw: dict[str, str] = {}
        while key := (yield Match(rf"\s{{0,64}}(?:<parameter=([^<>]{{1,256}})>|{_CLOSED})"))[1]:
            raw[key.strip()] = _value((yield Until("</parameter>")))
        yield Calls(((name, arguments_of(raw, tools.get(name, {}))),))
        found = yield Maybe(rf"\s{{0,64}}(?:{_FUNCTION}{head}|{_OUTER_CLOSED})")


def _value(text: str) -> str:
    """A value without the line breaks that the tags stand on."""
    return text.removeprefix("\n").removesuffix("\n")


FUNCTION_TAGS = Grammar(
    "function tags",
    (*_OUTER, _FUNCTION),
    read,
    ("</tool_call>", "</seed:tool_call>", _CLOSED, "<parameter=", "</parameter>"),
)
