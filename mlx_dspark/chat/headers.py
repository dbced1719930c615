"""The headers of families that write an answer as messages: which channel, and to whom."""

from __future__ import annotations

from dataclasses import dataclass

import regex

from mlx_dspark.chat.grammars.harmony import PREFIX
from mlx_dspark.chat.layouts import Layout, State
from mlx_dspark.foundation.events import Channel

_HARMONY = regex.compile(
    r"\s{0,64}(?:<\|start\|>)?(?:[\w.-]{1,256})?(?:\s{1,16}to=(?P<to>[\w.:/-]{1,256}))?\s{0,16}"
    r"(?:<\|channel\|>\s{0,16}(?P<channel>\w{1,32})?)?(?:\s{0,16}to=(?P<to>[\w.:/-]{1,256}))?\s{0,16}"
    r"(?:<\|constrain\|>)?\s{0,16}(?:\w{1,32})?\s{0,16}<\|message\|>"
)
_MUSE = regex.compile(
    r"\s{0,64}(?:<\|start\|>\w{1,32})?\s{0,16}(?:to=(?P<to>[\w.:/-]{1,256}))?\s{0,16}<\|message\|>"
)
_PATTERNS = {"harmony": _HARMONY, "muse": _MUSE}


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says: the channel of its message, and the tool that it calls, if it calls one."""

    length: int
    channel: Channel = "text"
    tool: str = ""


def header_in(family: str, text: str, *, ended: bool) -> Header | bool | None:
    """The header that `text` begins with; True where it may become one, None where it is none."""
    found = _PATTERNS[family].match(text, partial=not ended)
    if found is None:
        return None
    if found.partial:
        return True
    to = found["to"] or ""
    if family == "muse":
        return Header(found.end(), "reasoning" if to == "self" else "text")
    if to and to != "user":
        return Header(found.end(), tool=to.removeprefix(PREFIX))
    return Header(found.end(), "reasoning" if found["channel"] == "analysis" else "text")


def state_after(layout: Layout, prompt: str) -> State:
    """The state in which the answer to a prompt begins."""
    if layout.opener:
        opened = prompt.rstrip().endswith(layout.opener.rstrip())
        return "reasoning" if opened else "text"
    if not layout.message:
        return "text"
    last = prompt.rfind(layout.starts[0])
    header = header_in(layout.name, prompt[max(last, 0) :], ended=True)
    if not isinstance(header, Header) or header.length < len(prompt[max(last, 0) :].rstrip()):
        return "header"
    return header.channel
