"""A conversation as values: who said what, the tools that may be called, and how the model is to think.

Knows no template, no token and no MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""How much a model is to think, from least to most; a template knows some of them, or none."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments object. With
    `shown` False it is left out of what the model is told at first: the conversation itself tells of it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    shown: bool = True


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call that the assistant made; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. `reasoning` and `tool_calls` belong to the assistant's; `tool_call_id` and `name` say which
    call a tool's turn answers."""

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolUse, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the model is to answer.

    `use_tools` False: the tools are not shown and nothing is read as a call. `thinking` None leaves it to
    mlx-lm, which has models think that can; `effort` is one of EFFORTS; `thinking_budget` is the most
    reasoning tokens of the answer, after which the block is closed. `template_kwargs` are given to the
    template as they are.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    use_tools: bool = True
    thinking: bool | None = None
    effort: str | None = None
    thinking_budget: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return self.tools if self.use_tools else ()

    @property
    def shown(self) -> tuple[Tool, ...]:
        """The tools that the model is told of at first."""
        return tuple(tool for tool in self.callable if tool.shown)
