"""Tools for a model whose template has no place for them: told in the system turn, called as Hermes does.

The syntax is the one of `grammars/hermes.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from mlx_dspark.chat.messages import template_tools
from mlx_dspark.foundation.chat import Tool, ToolUse, Turn

_ASKED = """# Tools

You may call these functions, each described by a JSON schema:
<tools>
{tools}
</tools>

To call one, write its name and arguments as a JSON object between tags, and then end your turn:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""


def flattened(turns: Sequence[Turn], tools: Sequence[Tool]) -> tuple[Turn, ...]:
    """The turns with tools, calls and their results as text; results are a user's turn."""
    flat: list[Turn] = []
    for is_result, group in groupby(turns, lambda turn: turn.role == "tool"):
        if is_result:
            results = (f"<tool_response>\n{turn.content}\n</tool_response>" for turn in group)
            flat.append(Turn("user", "\n".join(results)))
        else:
            flat += map(_said, group)
    return _told(flat, tools) if tools else tuple(flat)


def _told(turns: list[Turn], tools: Sequence[Tool]) -> tuple[Turn, ...]:
    shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in template_tools(tools) or ())
    asked = _ASKED.format(tools=shown)
    if turns and turns[0].role == "system":
        return (replace(turns[0], content=f"{turns[0].content}\n\n{asked}"), *turns[1:])
    return (Turn("system", asked), *turns)


def _said(turn: Turn) -> Turn:
    if not turn.tool_calls:
        return turn
    content = "\n".join(filter(None, (turn.content, *map(_call, turn.tool_calls))))
    return replace(turn, content=content, tool_calls=())


def _call(call: ToolUse) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'
