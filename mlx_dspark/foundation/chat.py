"""A conversation that a chat model is to go on with: turns, tools and options. No MLX, no templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call in an assistant's turn; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. `tool_call_id` says which call a tool's turn answers."""

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolUse, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is to be answered. `use_tools` False: the tools are declared, and may not be called."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    use_tools: bool = True
    thinking: bool | None = None
    effort: str | None = None
    thinking_budget: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
