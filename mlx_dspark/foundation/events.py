"""What the engine says while it works, as one typed stream. Every result is a fold of these events."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mlx_dspark.foundation.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, and of the most likely tokens beside it."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Outlook(NamedTuple):
    """What was expected of a round before it ran: `gain`, its tokens per second as a multiple of plain
    decoding, and `plain_seconds`, what a plain round takes. None where nothing is known."""

    gain: float | None
    plain_seconds: float | None


UNKNOWN_OUTLOOK = Outlook(None, None)


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One round as one row saw it. Times are `time.perf_counter` seconds, shared by the rows of a round.

    `cap` is the most drafts the row was allowed, `drafted` how many were verified, `accepted` how many of
    them the target agreed to, `committed` how many tokens the round added to the output, `certain` how many
    tokens were fed without doubt, `depth` the committed length before the round, `source` who drafted.
    `parked`: drafting was losing time, so the row decoded plainly. `waited`: seconds in which the reader of
    the events held up the engine while the round was in flight. `drafted_together`: drafts of all its rows.
    `outlook`: what was expected of the round. `held_back`: it was launched only when the round before it had
    landed, because a row might have drafted.
    """

    launched_at: float
    landed_at: float
    rows: int
    width: int
    certain: int
    cap: int
    drafted: int
    accepted: int
    committed: int
    depth: int
    source: str = ""
    parked: bool = False
    waited: float = 0.0
    drafted_together: int = 0
    outlook: Outlook = UNKNOWN_OUTLOOK
    held_back: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted. `reused` prompt tokens need no prefill."""

    prompt_tokens: int
    reused: int
    at: float


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`done` of `total` prompt tokens are read."""

    done: int
    total: int
    report: RoundReport


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens added to the output by one round, in order; `logprobs` is empty unless asked for."""

    tokens: tuple[int, ...]
    report: RoundReport
    logprobs: tuple[TokenLogprob, ...] = ()


TroubleKind = Literal["drafting stopped", "read again", "costs not measured"]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something raised that costs this request time and no text.

    `drafting stopped`: the drafter raised, so the rest is decoded plainly. `read again`: a round of several
    requests raised, so this one's tokens are read again, by themselves. `costs not measured`: timing rounds
    of so many requests raised, so caps follow the rounds seen. `error` is what was raised, in one line, and
    `traceback` where.
    """

    what: TroubleKind
    error: str
    traceback: str

    @classmethod
    def of(cls, what: TroubleKind, error: Exception) -> Trouble:
        where = "".join(traceback.format_exception(error))
        return cls(what, " ".join(f"{type(error).__name__}: {error}".split()), where)


@dataclass(frozen=True, slots=True)
class Finished:
    """The request is complete. `completion_tokens` counts every committed token, the ending one included."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int


EngineEvent = Started | Prefilled | Committed | Trouble | Finished

Channel = Literal["text", "reasoning"]
"""`reasoning`: what the model says to itself before it answers."""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer: whole characters only, never a part of a stop string."""

    text: str
    channel: Channel = "text"


@dataclass(frozen=True, slots=True)
class ToolCallBegan:
    """The model calls a declared tool; `index` counts an answer's calls from 0, `id` is the call's own."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the call's arguments, which are one JSON object as text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The call's arguments are complete.

    `complete` False: the call broke off, by its syntax or by the end of the answer. It must not be run, its
    arguments are less than a JSON object, and its source follows as Text, so that nothing is lost.
    """

    index: int
    complete: bool = True


ChatEvent = Text | ToolCallBegan | ToolCallArguments | ToolCallEnded
