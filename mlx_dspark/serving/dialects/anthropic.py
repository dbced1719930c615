"""Anthropic's messages. https://platform.claude.com/docs/en/api/messages"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mlx_dspark.foundation.errors import ContextOverflow
from mlx_dspark.serving.ask import Ask, Defaults
from mlx_dspark.serving.dialects.anthropic_body import MessagesBody, messages_ask
from mlx_dspark.serving.dialects.anthropic_frames import MessageEncoder
from mlx_dspark.serving.dialects.base import About, Dialect
from mlx_dspark.serving.faults import Fault, FaultKind

_TYPES: Mapping[FaultKind, str] = MappingProxyType(
    {
        "authentication": "authentication_error",
        "permission": "permission_error",
        "not_found": "not_found_error",
        "timeout": "timeout_error",
        "too_large": "request_too_large",
        "rate_limit": "rate_limit_error",
        "server": "api_error",
        "overloaded": "overloaded_error",
    }
)
_OVERLOADED = 529


class AnthropicMessages(Dialect):
    """`/v1/messages`."""

    paths = ("/v1/messages", "/messages")
    counting = ("/v1/messages/count_tokens", "/messages/count_tokens")
    body = MessagesBody
    names = MappingProxyType({"effort": "output_config.effort", "thinking_budget": "thinking.budget_tokens"})

    def decode(self, body: MessagesBody, defaults: Defaults) -> Ask:
        return messages_ask(body, defaults)

    def encoder(self, ask: Ask, about: About) -> MessageEncoder:
        return MessageEncoder(ask, about, error_body)

    def error(self, fault: Fault) -> dict[str, Any]:
        return error_body(fault)

    def status(self, fault: Fault) -> int:
        return _OVERLOADED if fault.kind == "overloaded" else fault.code


def error_body(fault: Fault) -> dict[str, Any]:
    """https://platform.claude.com/docs/en/api/errors"""
    kind = _TYPES.get(fault.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": _worded(fault)}}


def _worded(fault: Fault) -> str:
    """The message; of a prompt that is too long, in the words at which agents shorten their conversation."""
    error = fault.error
    if isinstance(error, ContextOverflow):
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.context} maximum"
    return fault.message
