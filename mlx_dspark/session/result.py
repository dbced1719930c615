"""The whole answer as one value: a fold of the events that a streamed answer consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_type_hints

from mlx_dspark.foundation.events import (
    ChatEvent,
    Committed,
    EngineEvent,
    Finished,
    Prefilled,
    RoundReport,
    Started,
    Text,
    TokenLogprob,
    Trouble,
)
from mlx_dspark.foundation.request import FinishReason
from mlx_dspark.session.gains import Gains, rounds_by_cap

SessionEvent = EngineEvent | ChatEvent
"""What `Session.stream` yields: Started, Prefilled*, then Committed and Text by turns, Finished. Trouble may
come anywhere between."""


@dataclass(frozen=True, slots=True)
class SourceCount:
    """What one drafter did: rounds it drafted in, tokens it drafted, tokens the target agreed to."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Result:
    """One answer and how it came about. What a field means stands beside it; `Result.meanings()` lists them.

    Times are seconds, rates are tokens a second.
    """

    text: Annotated[str, "The answer, without the stop string or end of sequence that ended it."]
    token_ids: Annotated[
        tuple[int, ...],
        "The committed tokens before the end-of-sequence id; tokens that spell a stop string are among them.",
    ]
    finish_reason: Annotated[
        FinishReason,
        "`stop`: an end-of-sequence id or a stop string; `length`: the token limit or a full context; "
        "`cancelled`: by the caller.",
    ]
    context_full: Annotated[bool, "Whether prompt and answer fill the model's context, which ended the text."]
    mode: Annotated[
        str, "Who drafted: `lookup`, `dspark`, `dflash`, `draft-model`, or `baseline` for plain decoding."
    ]
    prompt_tokens: Annotated[int, "Tokens of the prompt, chat template included."]
    reused_tokens: Annotated[int, "Prompt tokens that did not have to be read again."]
    num_rounds: Annotated[int, "Forward passes of the target, those that read the prompt included."]
    prefill_rounds: Annotated[int, "The rounds that read the prompt."]
    parked_rounds: Annotated[int, "Rounds decoded plainly because drafting was losing time."]
    cap: Annotated[int, "The most drafts that any round was allowed."]
    caps: Annotated[
        Mapping[int, int],
        "By cap of the drafter that drafted, the rounds after the prompt; 0 for those without drafts.",
    ]
    predicted_speedup: Annotated[
        float | None,
        "Decoding rate that was expected, as a multiple of plain decoding: from the measured curves, the "
        "round times seen and the acceptance so far, averaged over the time of the rounds; null where too "
        "few plain rounds were timed.",
    ]
    observed_speedup: Annotated[
        float | None,
        "Decoding rate as a multiple of plain decoding: tokens times the seconds that a plain round takes "
        "(the median of those seen, else by the measured curves), for each second of the rounds, at most "
        "the tokens of a round; null where too few plain rounds were timed.",
    ]
    drafted: Annotated[int, "Draft tokens verified."]
    accepted: Annotated[int, "Draft tokens that the target agreed to."]
    accept_lengths: Annotated[
        tuple[int, ...],
        "For each round that verified a draft, the tokens it committed, the target's own included: 1 when no "
        "draft was accepted.",
    ]
    sources: Annotated[
        Mapping[str, SourceCount],
        "By name of drafter: `rounds` it drafted in, tokens `drafted`, tokens `accepted`. Lookup is "
        "`lookup-long` where a long match says that text is being copied, else `lookup`.",
    ]
    seconds: Annotated[float, "Seconds from when the answer was begun to the last token."]
    prefill_seconds: Annotated[float, "Seconds to the end of the prompt."]
    ttft_seconds: Annotated[float, "Seconds to the first token."]
    decode_tokens_per_sec: Annotated[
        float,
        "Tokens of `token_ids` after the first round that gave any, for each second after it; 0 when there "
        "is none.",
    ]
    logprobs: Annotated[
        tuple[TokenLogprob, ...] | None,
        "For each token its `token` id, its natural-log `logprob` and the likeliest tokens as `top`; "
        "null unless asked for.",
    ]
    troubles: Annotated[
        tuple[str, ...],
        "Errors that cost time, not text: of the drafter, after which the answer was decoded plainly, or of "
        "a round of several answers, after which this one's tokens were read again; or of timing such "
        "rounds, after which caps follow the rounds seen.",
    ]

    @property
    def num_tokens(self) -> int:
        """Length of `token_ids`."""
        return len(self.token_ids)

    @property
    def mean_accept_len(self) -> float:
        """Mean of `accept_lengths`; 0 when no round verified a draft."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 0.0

    @property
    def tokens_per_sec(self) -> float:
        """All tokens over all seconds."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def prefill_tokens_per_sec(self) -> float:
        """Prompt tokens read for each second of reading."""
        fresh = self.prompt_tokens - self.reused_tokens
        return fresh / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every field and derived figure as JSON values."""
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in _DERIVED}

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What each key of `to_dict` means, in its order."""
        hints = get_type_hints(cls, include_extras=True)
        stored = {field.name: hints[field.name].__metadata__[0] for field in dataclasses.fields(cls)}
        return stored | {name: str(getattr(cls, name).__doc__) for name in _DERIVED}

    @classmethod
    def fold(
        cls,
        events: Iterable[SessionEvent],
        *,
        mode: str = "",
        end_ids: Collection[int] = (),
        context: int = 0,
    ) -> Result:
        """The result of a stream of events; `context` is the model's, in tokens, 0 where it is not known.

        A stream that breaks off before Finished folds to what it held, as `cancelled`.
        """
        folding = Folding()
        for event in events:
            folding.take(event)
        return folding.result(mode, end_ids, context)


_DERIVED = ("num_tokens", "mean_accept_len", "tokens_per_sec", "prefill_tokens_per_sec")


@dataclass
class Folding:
    """What has been seen of a stream: `take` each of its events, then ask for the `result`."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    reading: list[RoundReport] = field(default_factory=list)
    decoding: list[RoundReport] = field(default_factory=list)
    started: Started | None = None
    reason: FinishReason = "cancelled"

    def take(self, event: SessionEvent) -> None:
        match event:
            case Text(channel="text"):
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
            case Trouble():
                self.troubles.append(f"{event.what}: {event.error}")
            case Finished():
                self.reason = event.reason

    def result(self, mode: str, end_ids: Collection[int], context: int) -> Result:
        ended_by_id = bool(self.tokens) and self.tokens[-1] in end_ids
        kept = len(self.tokens) - ended_by_id
        verifying = [report for report in self.decoding if report.drafted]
        prompt_tokens = self.started.prompt_tokens if self.started else 0
        gains = Gains.of(self.decoding, self.reading[-1].landed_at if self.reading else 0.0)
        return Result(
            text="".join(self.text),
            token_ids=tuple(self.tokens[:kept]),
            finish_reason=self.reason,
            context_full=self.reason == "length" and 0 < context <= prompt_tokens + len(self.tokens),
            mode=mode,
            prompt_tokens=prompt_tokens,
            reused_tokens=self.started.reused if self.started else 0,
            num_rounds=len(self.reading) + len(self.decoding),
            prefill_rounds=len(self.reading),
            parked_rounds=sum(report.parked for report in self.decoding),
            cap=max((report.cap for report in self.decoding), default=0),
            caps=rounds_by_cap(self.decoding),
            predicted_speedup=gains.predicted,
            observed_speedup=gains.observed,
            drafted=sum(report.drafted for report in verifying),
            accepted=sum(report.accepted for report in verifying),
            accept_lengths=tuple(report.committed for report in verifying),
            sources=_sources(verifying),
            logprobs=tuple(self.logprobs[:kept]) if self.logprobs else None,
            troubles=tuple(self.troubles),
            **self._times(kept),
        )

    def _times(self, kept: int) -> dict[str, float]:
        """Seconds since the request was admitted, by the landing of its rounds."""
        if self.started is None or not (self.reading or self.decoding):
            return dict.fromkeys(("seconds", "prefill_seconds", "ttft_seconds", "decode_tokens_per_sec"), 0.0)
        start = self.started.at
        read_at = self.reading[-1].landed_at if self.reading else start
        first_at = self._first_token_at()
        last_at = (self.decoding or self.reading)[-1].landed_at
        first = sum(report.committed for report in self.decoding if report.landed_at <= first_at)
        first += sum(report.committed for report in self.reading)
        later = max(0, kept - first)
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
