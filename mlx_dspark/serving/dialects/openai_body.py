"""The bodies of OpenAI's chat and text completions, and what they amount to.

https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from mlx_dspark.foundation.chat import Conversation, Role, Tool, ToolUse, Turn
from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.serving.ask import Ask, Defaults

Real = StrictFloat | StrictInt


class Part(BaseModel):
    """A part of a message's content. Only text is taken."""

    model_config = ConfigDict(extra="allow")
    type: StrictStr
    text: StrictStr | None = None


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: StrictStr
    arguments: StrictStr = ""


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")
    id: StrictStr = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[Part] | None = None
    reasoning_content: StrictStr | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    name: StrictStr | None = None


class FunctionDeclared(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(strict=True, min_length=1)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None


class ToolDeclared(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: FunctionDeclared


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: StrictBool | None = None


class Sampled(BaseModel):
    """The fields that both bodies have."""

    model_config = ConfigDict(extra="allow")
    model: StrictStr | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: StrictInt | None = None
    min_p: Real | None = None
    repetition_penalty: Real | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    logit_bias: dict[str, Real] | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    stop: StrictStr | list[StrictStr] | None = None
    seed: StrictInt | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=8)] | None = None


class ChatBody(Sampled):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    tools: list[ToolDeclared] | None = None
    tool_choice: Any = None
    reasoning_effort: StrictStr | None = None
    enable_thinking: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def chat_ask(body: ChatBody, defaults: Defaults) -> Ask:
    """The request of a chat body. Raises RequestError naming the field."""
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    shown = (body.top_logprobs or 0) if body.logprobs else None
    return ask_of(body, defaults, (conversation_of(body, defaults),), limit, shown)


def ask_of(
    body: Sampled, defaults: Defaults, prompts: tuple[Any, ...], limit: int | None, logprobs: int | None
) -> Ask:
    """The request of a body, with what its two kinds tell in their own ways."""
    return Ask(
        prompts,
        _sampling(body, defaults, logprobs),
        defaults.tokens(limit),
        stops_of(body.stop),
        body.n or 1,
        bool(body.stream),
        body.model or "",
        tuple(sorted(body.model_extra or ())),
        {"usage": _wants_usage(body)},
    )


def conversation_of(body: ChatBody, defaults: Defaults) -> Conversation:
    """The conversation of a chat body."""
    return Conversation(
        tuple(turn_of(message, f"messages[{i}]") for i, message in enumerate(body.messages)),
        tuple(_tool(tool) for tool in body.tools or ()),
        body.tool_choice != "none",
        defaults.thinking if body.enable_thinking is None else body.enable_thinking,
        body.reasoning_effort or defaults.effort,
        None,
        body.chat_template_kwargs or {},
    )


def turn_of(message: ChatMessage, where: str) -> Turn:
    """A turn. Raises RequestError where its content is not text."""
    role: Role = "system" if message.role == "developer" else message.role
    calls = tuple(
        ToolUse(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
    )
    return Turn(
        role,
        _content(message.content, where),
        message.reasoning_content or "",
        calls,
        message.tool_call_id or "",
        message.name or "",
    )


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _content(content: str | list[Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"{where}.content[{i}] is a part of type {part.type!r}, and this server takes text only.",
                "Give parts of type text.",
                field="messages",
            )
    return "".join(part.text or "" for part in content)


def _tool(tool: ToolDeclared) -> Tool:
    return Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {})


def _wants_usage(body: Sampled) -> bool:
    asked = body.stream_options is not None and body.stream_options.include_usage
    return bool(asked) or not body.stream


def _sampling(body: Sampled, defaults: Defaults, logprobs: int | None) -> SamplingParams:
    return defaults.sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=None if body.logit_bias is None else biases_of(body.logit_bias),
        seed=body.seed,
        logprobs=logprobs,
    )


def biases_of(given: Mapping[str, Any]) -> dict[int, float]:
    """Token ids to numbers. Raises RequestError where a name is no token id."""
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise RequestError(
            f"logit_bias names {json.dumps(next(iter(given)))}, which is not a token id.",
            "Give token ids (0 and up) with numbers.",
            field="logit_bias",
        ) from None
