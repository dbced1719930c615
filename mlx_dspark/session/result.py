"""The whole answer as one value: a fold of the events that a streamed answer consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_dspark.foundation.events import (
    Committed,
    EngineEvent,
    Finished,
    Prefilled,
    RoundReport,
    Started,
    Text,
    TokenLogprob,
)
from mlx_dspark.foundation.request import FinishReason

SessionEvent = EngineEvent | Text
"""What `Session.stream` yields: Started, Prefilled*, then Committed and Text by turns, Finished."""


@dataclass(frozen=True, slots=True)
class SourceCount:
    """What one drafter did: rounds it drafted in, tokens it drafted, tokens the target agreed to."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Result:
    """One answer and how it came about. Times are seconds, rates are tokens a second.

    `token_ids` are the committed tokens before the end-of-sequence id, which is in neither `text` nor
    `token_ids`; tokens that spell a stop string are in `token_ids` but not in `text`. `num_rounds` counts
    every forward of the target, prompt included, and `prefill_rounds` those that read the prompt.
    `accept_lengths` has one entry for each round that verified at least one draft: the tokens it committed, 1
    when no draft was accepted. `sources` says by name which drafters drafted. `cap` is the most drafts any
    round was allowed; `parked_rounds` decoded plainly because drafting was losing time. `ttft_seconds` runs
    to the first token, `prefill_seconds` to the end of the prompt; `decode_tokens_per_sec` leaves out the
    first token and the time before it, `tokens_per_sec` counts everything.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    mode: str
    prompt_tokens: int
    reused_tokens: int
    num_rounds: int
    prefill_rounds: int
    parked_rounds: int
    cap: int
    drafted: int
    accepted: int
    accept_lengths: tuple[int, ...]
    sources: Mapping[str, SourceCount]
    seconds: float
    prefill_seconds: float
    ttft_seconds: float
    decode_tokens_per_sec: float
    logprobs: tuple[TokenLogprob, ...] | None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def mean_accept_len(self) -> float:
        """Mean of `accept_lengths`; 0.0 when no round verified a draft."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 0.0

    @property
    def tokens_per_sec(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def prefill_tokens_per_sec(self) -> float:
        fresh = self.prompt_tokens - self.reused_tokens
        return fresh / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every field and derived figure as JSON values."""
        derived = ("num_tokens", "mean_accept_len", "tokens_per_sec", "prefill_tokens_per_sec")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def fold(cls, events: Iterable[SessionEvent], *, mode: str = "", end_ids: Collection[int] = ()) -> Result:
        """The result of a stream of events.

        A stream that breaks off before Finished folds to what it held, as `cancelled`.
        """
        folding = _Folding()
        for event in events:
            folding.take(event)
        return folding.result(mode, end_ids)


@dataclass
class _Folding:
    """What has been seen of a stream."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reading: list[RoundReport] = field(default_factory=list)
    decoding: list[RoundReport] = field(default_factory=list)
    started: Started | None = None
    reason: FinishReason = "cancelled"

    def take(self, event: SessionEvent) -> None:
        match event:
            case Text():
                self.text.append(event.text)
            case Started():
                self.started = event
            case Prefilled():
                self.reading.append(event.report)
            case Committed():
                self.tokens += event.tokens
                self.logprobs += event.logprobs
                if not (self.reading and self.reading[-1] is event.report):
                    self.decoding.append(event.report)
            case Finished():
                self.reason = event.reason

    def result(self, mode: str, end_ids: Collection[int]) -> Result:
        ended_by_id = self.reason == "stop" and bool(self.tokens) and self.tokens[-1] in end_ids
        kept = len(self.tokens) - ended_by_id
        verifying = [report for report in self.decoding if report.drafted]
        return Result(
            text="".join(self.text),
            token_ids=tuple(self.tokens[:kept]),
            finish_reason=self.reason,
            mode=mode,
            prompt_tokens=self.started.prompt_tokens if self.started else 0,
            reused_tokens=self.started.reused if self.started else 0,
            num_rounds=len(self.reading) + len(self.decoding),
            prefill_rounds=len(self.reading),
            parked_rounds=sum(report.parked for report in self.decoding),
            cap=max((report.cap for report in self.decoding), default=0),
            drafted=sum(report.drafted for report in verifying),
            accepted=sum(report.accepted for report in verifying),
            accept_lengths=tuple(report.committed for report in verifying),
            sources=_sources(verifying),
            logprobs=tuple(self.logprobs[:kept]) or None,
            **self._times(),
        )

    def _times(self) -> dict[str, float]:
        """Seconds since the request was admitted, by the landing of its rounds."""
        if self.started is None or not (self.reading or self.decoding):
            return dict.fromkeys(("seconds", "prefill_seconds", "ttft_seconds", "decode_tokens_per_sec"), 0.0)
        start = self.started.at
        read_at = self.reading[-1].landed_at if self.reading else start
        first_at = self._first_token_at()
        last_at = (self.decoding or self.reading)[-1].landed_at
        later = sum(report.committed for report in self.decoding if report.landed_at > first_at)
        return {
            "seconds": last_at - start,
            "prefill_seconds": read_at - start,
            "ttft_seconds": first_at - start,
            "decode_tokens_per_sec": later / (last_at - first_at) if last_at > first_at else 0.0,
        }

    def _first_token_at(self) -> float:
        rounds = [*self.reading, *self.decoding]
        return next((report.landed_at for report in rounds if report.committed), rounds[-1].landed_at)


def _sources(verifying: Iterable[RoundReport]) -> dict[str, SourceCount]:
    counts: dict[str, SourceCount] = {}
    for report in verifying:
        seen = counts.get(report.source, SourceCount())
        counts[report.source] = SourceCount(
            seen.rounds + 1, seen.drafted + report.drafted, seen.accepted + report.accepted
        )
    return counts
