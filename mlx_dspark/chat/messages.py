"""A conversation as the mappings that chat templates read, after it was checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from mlx_dspark.chat.template import is_text
from mlx_dspark.foundation.chat import EFFORTS, Conversation, Role, Tool, ToolUse, Turn
from mlx_dspark.foundation.errors import EmptyPrompt, RequestError
from mlx_dspark.foundation.numbers import brief, is_whole

RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"chat_template", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens", "conversation"}
)
"""Names that are the template call's own and cannot be set as template variables."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")


def check_conversation(conversation: Conversation) -> None:
    """Raises EmptyPrompt, or RequestError naming the field at fault."""
    if not conversation.turns:
        raise EmptyPrompt("The conversation has no messages.", "Give one to answer.", field="messages")
    for index, turn in enumerate(conversation.turns):
        _check_turn(index, turn)
    _check_tools(conversation.tools)
    effort, budget = conversation.effort, conversation.thinking_budget
    _require(effort is None or effort in EFFORTS, "reasoning_effort", effort, f"one of {', '.join(EFFORTS)}")
    budget_ok = budget is None or (is_whole(budget) and budget >= 0)
    _require(budget_ok, "thinking_budget", budget, "a number of tokens, 0 or more")
    for name in conversation.template_kwargs:
        ok = isinstance(name, str) and name not in RESERVED
        _require(ok, "chat_template_kwargs", name, "variables that the model's template reads")
    text = _all_text(conversation.template_kwargs)
    _require(text, "chat_template_kwargs", conversation.template_kwargs, "valid Unicode text in it")


def thinking_asked(conversation: Conversation) -> bool | None:
    """Whether the model is to reason, as far as the conversation says; no effort and no budget say no."""
    if conversation.thinking is not None:
        return conversation.thinking
    for name in ("enable_thinking", "thinking"):
        if isinstance(asked := conversation.template_kwargs.get(name), bool):
            return asked
    return False if conversation.effort == "none" or conversation.thinking_budget == 0 else None


def template_messages(turns: Sequence[Turn], *, arguments_as_text: bool = False) -> list[dict[str, Any]]:
    """The turns as chat templates know them: OpenAI's messages, with the reasoning under the names that
    templates read, and with arguments as objects or, where a template wants it so, as JSON text."""
    names = {call.id: call.name for turn in turns for call in turn.tool_calls}
    return [_message(turn, names, arguments_as_text) for turn in turns]


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """The tools as chat templates know them, or None where there are none."""
    if not tools:
        return None
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: Tool) -> dict[str, Any]:
    parameters = dict(tool.parameters) or {"type": "object", "properties": {}}
    return {"name": tool.name, "description": tool.description, "parameters": parameters}


def _message(turn: Turn, names: dict[str, str], arguments_as_text: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = message["thinking"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [_call(call, arguments_as_text) for call in turn.tool_calls]
    if turn.role == "tool":
        message["tool_call_id"] = turn.tool_call_id
        message["name"] = turn.name or names.get(turn.tool_call_id, "")
    return message


def _call(call: ToolUse, arguments_as_text: bool) -> dict[str, Any]:
    arguments = call.arguments if arguments_as_text else _object(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _object(text: str) -> Any:
    """The arguments as an object; text that is none stays as the model wrote it."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _check_turn(index: int, turn: Turn) -> None:
    where = f"messages[{index}]"
    _require(turn.role in get_args(Role), f"{where}.role", turn.role, f"one of {', '.join(get_args(Role))}")
    for name in ("content", "reasoning", "tool_call_id", "name"):
        value = getattr(turn, name)
        _require(isinstance(value, str) and is_text(value), f"{where}.{name}", value, "valid Unicode text")
    _require(
        not turn.tool_calls or turn.role == "assistant", f"{where}.tool_calls", turn.role, "the assistant"
    )
    for nth, call in enumerate(turn.tool_calls):
        for name in ("id", "name", "arguments"):
            value = getattr(call, name)
            _require(is_text(value), f"{where}.tool_calls[{nth}].{name}", value, "valid Unicode text")
    _require(not turn.reasoning or turn.role == "assistant", f"{where}.reasoning", turn.role, "the assistant")


def _check_tools(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        ok = isinstance(tool.name, str) and _NAME.fullmatch(tool.name) is not None
        _require(ok, f"tools[{index}].name", tool.name, "letters, digits, and any of _ . : / -")
        _require(tool.name not in seen, f"tools[{index}].name", tool.name, "each tool a name of its own")
        seen.add(tool.name)
        schema = isinstance(tool.parameters, Mapping)
        _require(schema, f"tools[{index}].parameters", tool.parameters, "a JSON schema, which is an object")
        unicode = _all_text(tool.parameters)
        _require(unicode, f"tools[{index}].parameters", tool.parameters, "valid Unicode text in it")
        text = isinstance(tool.description, str) and is_text(tool.description)
        _require(text, f"tools[{index}].description", tool.description, "valid Unicode text")


def _all_text(value: object) -> bool:
    """Whether all text in a JSON value, however deep, is valid."""
    left = [value]
    while left:
        match left.pop():
            case str() as text if not is_text(text):
                return False
            case Mapping() as members:
                left += [*members, *members.values()]
            case list() | tuple() as items:
                left += items
            case _:
                pass
    return True


def _require(ok: bool, field: str, value: object, want: str) -> None:
    if not ok:
        raise RequestError(f"{field} is {brief(value)}, which cannot be used.", f"Give {want}.", field=field)
