"""The body of Anthropic's messages, and the request it amounts to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from mlx_dspark.foundation.chat import Conversation, Tool
from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.serving.ask import Ask, Defaults
from mlx_dspark.serving.dialects.anthropic_turns import InMessage, TextBlock, turns_of
from mlx_dspark.serving.dialects.fields import (
    AS_LIST,
    AS_TEXT,
    FIRST_ONLY,
    LONGEST_NAME,
    TEXT_OR_LIST,
    Open,
    Real,
    Unserved,
    checked_stops,
    shown,
    told_names,
    unknown_fields,
)

HARMLESS = frozenset(
    {
        "billing_policy",
        "cache_control",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
        "messages.content.cache_control",
        "messages.content.caller",
        "messages.content.citations",
        "messages.content.content.cache_control",
        "messages.content.content.citations",
        "messages.content.data",
        "system.cache_control",
        "system.citations",
        "tools.cache_control",
        "tools.eager_input_streaming",
    }
)
"""Taken, and without effect: none of these changes an answer."""
_NOTHING_CUT = ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
UNSERVED: Mapping[str, Unserved] = MappingProxyType(
    {
        "compaction": Unserved(),
        "container": Unserved(),
        "context_management": Unserved(_NOTHING_CUT, "Leave it out, and shorten the messages yourself."),
        "mcp_servers": Unserved(([],), "Leave it out, and declare their tools in tools."),
        "messages.content.toolset_name": Unserved(),
        "output_config.format": Unserved((), "Leave it out, and say in the prompt what to write."),
        "output_config.task_budget": Unserved(),
        "output_format": Unserved((), "Leave it out, and say in the prompt what to write."),
        "thread": Unserved(),
        "tools.allowed_callers": Unserved((["direct"],)),
        "tools.input_examples": Unserved(([],), "Put examples into the tool's description."),
        "tools.strict": Unserved((False,), "Leave it out; the input is what the model writes."),
    }
)
"""Refused by name, unless the value asks for nothing."""


class Thinking(Open):
    """Whether the model is to think; `adaptive` leaves it to the server's setting and the model.

    `display` "omitted" keeps what it thinks out of sight; the block's signature carries it to the next turn.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Open):
    """How much the model is to think."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ToolChoice(Open):
    """Which tools the model is to use."""

    type: StrictStr
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool | None = None


class ToolDeclared(Open):
    """A tool that may be called; `input_schema` is a JSON schema.

    With `defer_loading` the model is told nothing of it until the result of a tool refers to it.
    """

    type: StrictStr | None = None
    name: Annotated[str, Field(strict=True, min_length=1)]
    description: StrictStr | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: StrictBool | None = None


System = Annotated[
    Annotated[StrictStr, AS_TEXT] | Annotated[list[TextBlock], FIRST_ONLY, AS_LIST], TEXT_OR_LIST
]


class MessagesBody(Open):
    """The body of `/v1/messages`, and of `/v1/messages/count_tokens`."""

    model: StrictStr | None = None
    messages: Annotated[list[InMessage], Field(min_length=1), FIRST_ONLY]
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    system: System | None = None
    stream: StrictBool | None = None
    stop_sequences: Annotated[list[StrictStr], FIRST_ONLY] | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: StrictInt | None = None
    tools: Annotated[list[ToolDeclared], FIRST_ONLY] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


def messages_ask(body: MessagesBody, defaults: Defaults) -> Ask:
    """The request of a body. Raises RequestError naming the field."""
    _check_tool_choice(body)
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ()))
    turns, left_out = turns_of(body.system, body.messages, tools)
    thinking = body.thinking
    conversation = Conversation(
        turns,
        tools,
        body.tool_choice is None or body.tool_choice.type != "none",
        _thinks(thinking, defaults),
        (body.output_config and body.output_config.effort) or defaults.effort,
        thinking and thinking.budget_tokens,
    )
    return Ask(
        (conversation,),
        defaults.sampling(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
        defaults.tokens(body.max_tokens),
        checked_stops(body.stop_sequences or (), "stop_sequences"),
        stream=bool(body.stream),
        model=(body.model or "")[:LONGEST_NAME],
        ignored=told_names((*unknown_fields(body, HARMLESS, UNSERVED), *left_out)),
        details={"show_thinking": thinking is None or thinking.display != "omitted"},
    )


def _thinks(thinking: Thinking | None, defaults: Defaults) -> bool | None:
    if thinking is None or thinking.type == "adaptive":
        return defaults.thinking
    return thinking.type == "enabled"


def _check_tool_choice(body: MessagesBody) -> None:
    choice = body.tool_choice
    if choice is None or choice.type == "none":
        return
    if choice.type != "auto":
        raise RequestError(
            f"tool_choice.type is {shown(choice.type)}, and this server leaves the choice to the model.",
            "Give auto or none, or leave tool_choice out.",
            field="tool_choice",
        )
    if choice.disable_parallel_tool_use and body.tools:
        raise RequestError(
            "tool_choice.disable_parallel_tool_use is true, and this server does not bound the calls of an "
            "answer.",
            "Leave it out, and run the calls one after the other.",
            field="tool_choice",
        )


def _tool(tool: ToolDeclared, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{where}.type is {shown(tool.type)}, a tool that this server does not have.",
            "Declare it as a custom tool with an input_schema, or leave it out.",
            field="tools",
        )
    if tool.input_schema is None:
        raise RequestError(
            f"{where}.input_schema is missing.", "Give the JSON schema of the tool's input.", field="tools"
        )
    return Tool(tool.name, tool.description or "", tool.input_schema, not tool.defer_loading)
