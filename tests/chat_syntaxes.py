"""Answers as models of each family write them: reasoning, text and tool calls, in the family's own marks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from mlx_dspark.chat import channels
from mlx_dspark.chat.channels import ChannelParser
from mlx_dspark.chat.grammars import OWN
from mlx_dspark.chat.grammars.parsed import of_mlx_lm
from mlx_dspark.chat.layouts import GEMMA, HARMONY, MUSE, PLAIN, Layout, State, layout_of
from mlx_dspark.chat.script import Grammar
from mlx_dspark.chat.section import Section
from mlx_dspark.foundation.events import ChatEvent, Text, ToolCallArguments

THINK = layout_of("</think>", ())
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "scale": {"type": "number"},
            "exact": {"type": "boolean"},
            "hours": {"type": "array"},
            "more": {"type": "object"},
            "nothing": {"type": "null"},
            "either": {"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]},
        },
        "$defs": {"Count": {"type": "integer"}},
    },
    "noop": {},
}
Call = tuple[str, dict[str, Any]]
Write = Callable[[str, str, Sequence[Call]], str]
"""An answer from its reasoning, its text and its calls."""


@dataclass(frozen=True)
class Syntax:
    """One family. `bare` values cannot hold the mark that ends them."""

    layout: Layout
    grammar: Grammar
    write: Write
    state: State = "text"
    never: tuple[str, ...] = ()

    def parser(self, *, state: State | None = None, tools: dict[str, Any] = SCHEMAS) -> ChannelParser:
        ids = itertools.count()
        return ChannelParser(
            self.layout, state or self.state, self.grammar, tools, lambda: f"call_{next(ids)}"
        )

    def parse(self, pieces: Iterable[str], **options: Any) -> list[ChatEvent]:
        """The events of an answer in pieces, neighbouring ones joined."""
        return self.parse_with_sources(pieces, **options)[0]

    def parse_with_sources(self, pieces: Iterable[str], **options: Any) -> tuple[list[ChatEvent], list[str]]:
        """The events, and the sources of the complete calls and of what closed their sections."""
        sources: list[str] = []

        class Recording(Section):
            def _end(self, *, complete: bool) -> None:
                if complete:
                    sources.append("".join(self._source))
                super()._end(complete=complete)

            def push(self, text: str, *, ended: bool) -> Any:
                pushed = super().push(text, ended=ended)
                if self.closed and self.called:
                    sources.append("".join(self._source))
                return pushed

        with patch.object(channels, "Section", Recording):
            parser = self.parser(**options)
            events = [event for piece in pieces for event in parser.feed(piece)]
            return joined([*events, *parser.finish()]), sources


def joined(events: Iterable[ChatEvent]) -> list[ChatEvent]:
    """The events with neighbouring pieces of text, and of one call's arguments, as one."""
    found: list[ChatEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Text) and isinstance(last, Text) and event.channel == last.channel:
            found[-1] = Text(last.text + event.text, event.channel)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments):
            found[-1] = ToolCallArguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found


def pieces_of(text: str, size: int) -> Iterator[str]:
    """The text in pieces of so many characters."""
    return (text[at : at + size] for at in range(0, len(text), size))


def _tagged(call: Callable[[str, dict[str, Any]], str], between: str = "\n") -> Write:
    def write(reasoning: str, text: str, calls: Sequence[Call]) -> str:
        thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
        return thought + between.join([*([text] if text else []), *(call(*each) for each in calls)])

    return write


def hermes(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def function_tags(name: str, arguments: dict[str, Any]) -> str:
    given = "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def named_function(name: str, arguments: dict[str, Any]) -> str:
    given = "".join(
        f'<param name="{key}"><![CDATA[{_bare(value)}]]></param>' for key, value in arguments.items()
    )
    return f'<function name="{name}">{given}</function>'


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def _gemma(reasoning: str, text: str, calls: Sequence[Call]) -> str:
    thought = f"<|channel>thought\n{reasoning}<channel|>" if reasoning else ""
    made = "".join(f"<|tool_call>call:{name}{_gemma_value(given)}<tool_call|>" for name, given in calls)
    return thought + text + made


def _pythonic(reasoning: str, text: str, calls: Sequence[Call]) -> str:
    made = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls
    )
    said = _tagged(lambda name, given: "")(reasoning, text, ())
    return said + (f"<|tool_call_start|>[{made}]<|tool_call_end|>" if calls else "")


def _messages(reasoning: tuple[str, str], answer: tuple[str, str], calls: Sequence[str], start: str) -> str:
    heads = ((head, body) for head, body in (reasoning, answer) if body)
    return start.join([*(head + body for head, body in heads), *calls])


def _harmony(reasoning: str, text: str, calls: Sequence[Call]) -> str:
    made = [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(given, ensure_ascii=False)}"
        for name, given in calls
    ]
    channel = "commentary" if made else "final"
    thought, said = ("<|channel|>analysis<|message|>", reasoning), (f"<|channel|>{channel}<|message|>", text)
    return _messages(thought, said, made, "<|end|><|start|>assistant").replace("}<|end|>", "}<|call|>")


def _muse(reasoning: str, text: str, calls: Sequence[Call]) -> str:
    made = [
        f' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
        + "".join(
            f'<atem:parameter name="{key}">{_bare(value)}</atem:parameter>\n' for key, value in given.items()
        )
        + "</atem:invoke>\n</atem:function_calls>"
        for name, given in calls
    ]
    thought, said = (" to=self<|message|>", reasoning), (" to=user<|message|>", text)
    return _messages(thought, said, made, "<|eom|><|start|>assistant")


SYNTAXES = {
    "hermes": Syntax(THINK, OWN["json_tools"], _tagged(hermes)),
    "function tags": Syntax(THINK, OWN["qwen3_coder"], _tagged(function_tags), never=("</parameter>", "\r")),
    "named function": Syntax(THINK, OWN["minicpm5"], _tagged(named_function, ""), never=("]]>",)),
    "atem": Syntax(MUSE, OWN["muse_spark"], _muse, "header", never=("</atem:parameter>",)),
    "harmony": Syntax(HARMONY, OWN["harmony"], _harmony, "header"),
    "gemma": Syntax(GEMMA, OWN["gemma4"], _gemma, never=('<|"|>', "\x00")),
    "pythonic": Syntax(THINK, of_mlx_lm("pythonic"), _pythonic, never=("<|tool_call_end|>",)),
}
__all__ = ["PLAIN", "SCHEMAS", "SYNTAXES", "THINK", "Call", "Syntax", "hermes", "joined", "pieces_of"]
