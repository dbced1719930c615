"""The body of OpenAI's chat completions, and the conversation it amounts to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr

from mlx_dspark.foundation.chat import Conversation, Role, Tool, ToolUse, Turn
from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.serving.ask import Ask, Defaults
from mlx_dspark.serving.dialects.fields import (
    AS_LIST,
    AS_TEXT,
    FIRST_ONLY,
    TEXT_OR_LIST,
    Count,
    Open,
    Unserved,
    shown,
)
from mlx_dspark.serving.dialects.openai_body import (
    HARMLESS,
    Sampled,
    shared_ask,
    with_limit,
)

CHAT_HARMLESS = HARMLESS | {"messages.annotations", "messages.audio", "messages.refusal"}
"""What an assistant's message of an earlier answer carries besides what it said."""
CHAT_UNSERVED: Mapping[str, Unserved] = MappingProxyType(
    {
        "audio": Unserved(),
        "function_call": Unserved(("none", "auto"), "Use tools and tool_choice."),
        "functions": Unserved(([],), "Use tools."),
        "messages.function_call": Unserved((), "Use tool_calls."),
        "modalities": Unserved((["text"],), 'Leave it out; the answer is ["text"].'),
        "moderation": Unserved(),
        "response_format": Unserved(({"type": "text"},), "Leave it out; say in the prompt what to write."),
        "tools.function.strict": Unserved((False,), "Leave it out; arguments are what the model writes."),
        "verbosity": Unserved(("medium",), "Leave it out, and say in the prompt how much to write."),
        "web_search_options": Unserved(),
    }
)
"""Refused by name, unless the value asks for nothing."""
_TEXT_PARTS = ("text", "input_text", "output_text")


class Part(Open):
    """A part of a message's content. Only text is taken."""

    type: StrictStr
    text: StrictStr | None = None


Content = Annotated[Annotated[StrictStr, AS_TEXT] | Annotated[list[Part], FIRST_ONLY, AS_LIST], TEXT_OR_LIST]


class FunctionCall(Open):
    """A call: the function's name, and its arguments as JSON text."""

    name: StrictStr
    arguments: StrictStr = ""


class ToolCall(Open):
    """A call that the assistant made."""

    id: StrictStr = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Open):
    """One turn. `reasoning` is another name of `reasoning_content`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: StrictStr | None = None
    reasoning: StrictStr | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_ONLY] | None = None
    tool_call_id: StrictStr | None = None
    name: StrictStr | None = None


class FunctionDeclared(Open):
    """A function that may be called; `parameters` is a JSON schema."""

    name: Annotated[str, Field(strict=True, min_length=1)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None


class ToolDeclared(Open):
    """A tool that may be called."""

    type: Literal["function"]
    function: FunctionDeclared


class ChatBody(Sampled):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), FIRST_ONLY]
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    tools: Annotated[list[ToolDeclared], FIRST_ONLY] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: StrictStr | None = None
    enable_thinking: StrictBool | None = None
    thinking_budget: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def chat_ask(body: ChatBody, defaults: Defaults) -> Ask:
    """The request of a chat body. Raises RequestError naming the field."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(
            "top_logprobs is given, and logprobs is not true.", "Set logprobs too.", field="top_logprobs"
        )
    _check_tools(body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    ask = shared_ask(body, defaults, logprobs, CHAT_HARMLESS, CHAT_UNSERVED)
    return replace(
        with_limit(ask, defaults, body.max_completion_tokens),
        prompts=(_conversation(body, defaults),),
    )


def _check_tools(body: ChatBody) -> None:
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestError(
            f"tool_choice is {shown(body.tool_choice)}, and this server leaves the choice to the model.",
            "Give auto or none, or leave it out.",
            field="tool_choice",
        )
    if body.tools and body.parallel_tool_calls is False and body.tool_choice != "none":
        raise RequestError(
            "parallel_tool_calls is false, and this server does not bound the calls of an answer.",
            "Leave it out, and run the calls one after the other.",
            field="parallel_tool_calls",
        )


def _conversation(body: ChatBody, defaults: Defaults) -> Conversation:
    variables = dict(body.chat_template_kwargs or {})
    thinking = body.enable_thinking
    if thinking is None and isinstance(variables.get("enable_thinking"), bool):
        thinking = variables.pop("enable_thinking")
    return Conversation(
        tuple(_turn(message, f"messages[{i}]") for i, message in enumerate(body.messages)),
        tuple(map(_tool, body.tools or ())),
        body.tool_choice != "none",
        defaults.thinking if thinking is None else thinking,
        body.reasoning_effort or defaults.effort,
        body.thinking_budget,
        variables,
    )


def _turn(message: ChatMessage, where: str) -> Turn:
    if message.role == "user" and not message.content and message.content != "":
        raise RequestError(f"{where}.content has nothing in it.", "Give text.", field="messages")
    role: Role = "system" if message.role == "developer" else message.role
    calls = [
        ToolUse(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
    ]
    return Turn(
        role,
        _content(message.content, where),
        message.reasoning_content or message.reasoning or "",
        tuple(calls),
        message.tool_call_id or "",
        message.name or "",
    )


def _content(content: str | list[Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type in _TEXT_PARTS and part.text is None:
            raise RequestError(f"{where}.content[{i}].text is missing.", "Give it as text.", field="messages")
        if part.type not in _TEXT_PARTS:
            raise RequestError(
                f"{where}.content[{i}] is of type {shown(part.type)}, and this server takes text only.",
                "Give parts of type text.",
                field="messages",
            )
    return "".join(part.text or "" for part in content)


def _tool(tool: ToolDeclared) -> Tool:
    return Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {})
