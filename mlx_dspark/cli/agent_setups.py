"""What coding agents need to know of a server: variables, arguments, settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

NO_KEY = "none"
"""In place of a key where the server asks for none: agents want one."""
_PROVIDER = "mlx-dspark"
_LEAST_COMPACTED = 100_000
_COMPACTED = 0.8
_ROOM = 24_000
"""Tokens of context below which Claude Code can hardly work."""
PI_EXTENSION = Path(__file__).parent / "pi_provider.mjs"


@dataclass(frozen=True)
class Server:
    """A running server. `context` and `answer` are the most tokens of prompt and answer, and of an answer;
    `thinks`: its model can reason."""

    url: str
    key: str | None
    model: str
    context: int | None
    answer: int
    thinks: bool = True


@dataclass(frozen=True)
class Setup:
    """How an agent is pointed at a server. `sets` and `unsets` are variables of its process, `arguments` come
    before the user's own, and `settings` say the same in a file of the agent's. `remark` is what the user
    should know."""

    sets: Mapping[str, str]
    unsets: Sequence[str] = ()
    arguments: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    remark: str = ""


_TIERS = ("OPUS", "SONNET", "HAIKU", "FABLE")
_ELSEWHERE = (
    "ANTHROPIC_API_KEY",
    "CLAUDE_CODE_USE_ANTHROPIC_AWS",
    "CLAUDE_CODE_USE_ANTHROPIC_GOOGLE_CLOUD",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_GATEWAY",
    "CLAUDE_CODE_USE_MANTLE",
    "CLAUDE_CODE_USE_VERTEX",
)
"""What would have Claude Code ask somebody else."""


def claude(server: Server) -> Setup:
    """For Claude Code: https://code.claude.com/docs/en/settings#environment-variables.

    Below 100,000 tokens of context its own compaction cannot be told the size; there it compacts when the
    server says that a prompt is too long.
    """
    sets = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key or NO_KEY,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_SMALL_FAST_MODEL": server.model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(server.answer, server.context or server.answer)),
    }
    for tier in _TIERS:
        sets |= {
            f"ANTHROPIC_DEFAULT_{tier}_MODEL": server.model,
            f"ANTHROPIC_DEFAULT_{tier}_MODEL_NAME": server.model,
            f"ANTHROPIC_DEFAULT_{tier}_MODEL_DESCRIPTION": f"mlx-dspark at {server.url}",
        }
    window = int((server.context or 0) * _COMPACTED)
    if window >= _LEAST_COMPACTED:
        sets["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(window)
    return Setup(sets, _ELSEWHERE, settings={"env": sets}, remark=_tight(server.context))


def _tight(context: int | None) -> str:
    if context is None or context >= _ROOM:
        return ""
    return (
        f"Claude Code's own prompt is some 15,000 tokens, and the context is {context}: choose a model, or a "
        f"--context-window, of {_ROOM} or more."
    )


def pi(server: Server) -> Setup:
    """For pi: https://pi.dev. Its extension reads the provider from the environment."""
    model: dict[str, Any] = {
        "id": server.model,
        "name": server.model,
        "reasoning": server.thinks,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "maxTokens": min(server.answer, server.context or server.answer),
    }
    if server.context:
        model["contextWindow"] = server.context
    provider = {
        "baseUrl": server.url,
        "api": "anthropic-messages",
        "apiKey": server.key or NO_KEY,
        "models": [model],
    }
    return Setup(
        {"PI_MLX_DSPARK_PROVIDER": json.dumps(provider)},
        arguments=("-e", str(PI_EXTENSION), "--provider", _PROVIDER, "--model", server.model),
        settings={"providers": {_PROVIDER: provider}},
    )


def opencode(server: Server) -> Setup:
    """For OpenCode: https://opencode.ai/docs/config."""
    model: dict[str, Any] = {"name": server.model}
    if server.context:
        model["limit"] = {"context": server.context, "output": min(server.answer, server.context)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlx-dspark",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key or NO_KEY},
        "models": {server.model: model},
    }
    told = f"{_PROVIDER}/{server.model}"
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": told,
        "small_model": told,
        "provider": {_PROVIDER: provider},
    }
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, settings=config)
