"""What answers of OpenAI's chat and text completions share: usage, `x_mlx_dspark`, reasons, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mlx_dspark.serving.ask import Ask
from mlx_dspark.serving.dialects.base import About
from mlx_dspark.serving.events import Ended, Ending
from mlx_dspark.serving.faults import Fault, FaultKind
from mlx_dspark.serving.stats import stats_of

DONE = "[DONE]"
FINISH: Mapping[Ending, str] = MappingProxyType(
    {
        "stop": "stop",
        "stop_sequence": "stop",
        "length": "length",
        "tool_calls": "tool_calls",
        "cancelled": "stop",
    }
)
_TYPES: Mapping[FaultKind, str] = MappingProxyType(
    {
        "authentication": "authentication_error",
        "permission": "permission_error",
        "not_found": "not_found",
        "timeout": "timeout",
        "rate_limit": "rate_limit_error",
        "server": "server_error",
        "overloaded": "server_error",
    }
)
_CODES: Mapping[FaultKind, str] = MappingProxyType(
    {"context_overflow": "context_length_exceeded", "authentication": "invalid_api_key"}
)


def error_body(fault: Fault) -> dict[str, Any]:
    """https://platform.openai.com/docs/guides/error-codes"""
    return {
        "error": {
            "message": fault.message,
            "type": _TYPES.get(fault.kind, "invalid_request_error"),
            "param": fault.field,
            "code": _CODES.get(fault.kind),
        }
    }


class Tally:
    """What is told when all answers of a request have ended."""

    def __init__(self, ask: Ask, about: About) -> None:
        self._ask = ask
        self._about = about
        self._ended: dict[int, Ended] = {}

    def take(self, choice: int, ended: Ended) -> bool:
        """Take one end; True with the last."""
        self._ended[choice] = ended
        return len(self._ended) == self._ask.choices

    def unended(self) -> int:
        """The first answer that goes on; the last where none does."""
        return next((n for n in range(self._ask.choices) if n not in self._ended), self._ask.choices - 1)

    def usage(self) -> dict[str, Any]:
        """Tokens of all answers; a prompt counts once, however often it is answered."""
        prompt = sum(self._about.prompt_tokens)
        ends = [self._ended[choice] for choice in sorted(self._ended)]
        completion = sum(ended.result.num_tokens for ended in ends)
        cached = sum(ended.result.reused_tokens for ended in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": sum(ended.reasoning_tokens for ended in ends)},
        }

    def stats(self) -> dict[str, Any]:
        """`x_mlx_dspark`."""
        results = [self._ended[choice].result for choice in sorted(self._ended)]
        return stats_of(results, self._ask.ignored, self._about.prompt_tokens)


def closing(frames: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parts of a plain answer that come at the end of a streamed one."""
    found: dict[str, Any] = {}
    for frame in frames:
        for name in ("usage", "x_mlx_dspark"):
            if frame.get(name) is not None:
                found[name] = frame[name]
    return found
