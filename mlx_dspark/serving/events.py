"""What a dialect is told of one answer: text by channel, tool calls, log-probabilities, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlx_dspark.foundation.events import ChatEvent
from mlx_dspark.session.result import Result

Ending = Literal["stop", "stop_sequence", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as text, the bytes it stands for, and its natural-log probability."""

    text: str
    bytes: bytes
    logprob: float
    top: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the tokens that the text which follows was made of."""

    tokens: tuple[TokenText, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is complete. `stop` is the stop string that ended it; `result` how it came about."""

    ending: Ending
    result: Result
    stop: str | None = None
    reasoning_tokens: int = 0


AnswerEvent = ChatEvent | Logprobs | Ended
