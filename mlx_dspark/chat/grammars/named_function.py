"""`<function name="f"><param name="a"><![CDATA[1]]></param></function>`: MiniCPM5.

Values are bare text or CDATA, typed by the tool's schema.
"""

from __future__ import annotations

import re

from mlx_dspark.chat.script import Calls, Declare, Grammar, Match, Schemas, Script, Until
from mlx_dspark.chat.typed import arguments_of

_OPENER = "<function name="
_NAME = r"""\s{0,16}("[^"<>]{1,256}"|'[^'<>]{1,256}'|[^\s"'<>]{1,256})\s{0,64}>"""
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>\s*", re.DOTALL)


def read(opened: str, tools: Schemas) -> Script:
    del opened
    name = (yield Match(_NAME))[1].strip("\"'")
    yield Declare(name)
    raw: dict[str, str] = {}
    while key := (yield Match(rf"\s{{0,64}}(?:<param\s{{1,16}}name\s{{0,16}}={_NAME}|</function>)"))[1]:
        raw[key.strip("\"'")] = _value((yield Until("</param>", [("<![CDATA[", "]]>")])))
    yield Calls(((name, arguments_of(raw, tools.get(name, {}))),))


def _value(text: str) -> str:
    cdata = _CDATA.fullmatch(text)
    return cdata[1] if cdata else text.strip()


NAMED_FUNCTION = Grammar(
    "named function", (_OPENER,), read, ("</function>", "<param", "</param>", "<![CDATA[", "]]>")
)
