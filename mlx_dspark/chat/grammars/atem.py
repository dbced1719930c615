"""`<atem:function_calls><atem:invoke name="f"><atem:parameter name="a">1</atem:parameter>…`: Muse.

Values are bare text, typed by the tool's schema, with their white space.
"""

from __future__ import annotations

from mlx_dspark.chat.script import Calls, Declare, Grammar, Match, Maybe, Schemas, Script, Until
from mlx_dspark.chat.typed import arguments_of

_OPENER, _CLOSER = "<atem:function_calls>", "</atem:function_calls>"
_NAMED = r'\s[^<>]{0,256}?name="([^"<>]{1,256})"[^<>]{0,256}>'
_INVOKE = rf"\s{{0,64}}<atem:invoke{_NAMED}"


def read(opened: str, tools: Schemas) -> Script:
    del opened
    found = yield Match(_INVOKE)
    while found is not None and found[1]:
        name = found[1]
        yield Declare(name)
        raw: dict[str, str] = {}
        while key := (yield Match(rf"\s{{0,64}}(?:<atem:parameter{_NAMED}|</atem:invoke>)"))[1]:
            raw[key] = yield Until("</atem:parameter>")
        yield Calls(((name, arguments_of(raw, tools.get(name, {}))),))
        found = yield Maybe(rf"{_INVOKE}|\s{{0,64}}{_CLOSER}")


ATEM = Grammar(
    "ATEM",
    (_OPENER,),
    read,
    (_CLOSER, "<atem:invoke", "</atem:invoke>", "<atem:parameter", "</atem:parameter>"),
)
