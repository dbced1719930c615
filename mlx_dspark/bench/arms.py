"""An arm is one way to answer. It answers a case, and says what that took."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from mlx_dspark.bench.cases import Case
from mlx_dspark.bench.memory import PeakMemory
from mlx_dspark.bench.stats import VerifyRound, Work
from mlx_dspark.engine.caps import MaxDraft
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.bench_settings import CONTROL
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.events import Committed, EngineEvent, Prefilled, RoundReport, Started
from mlx_dspark.foundation.lists import Drafting
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.pair import Parts
from mlx_dspark.session.result import Result
from mlx_dspark.session.session import Session
from mlx_dspark.session.variants import variant


@dataclass(frozen=True)
class Answer:
    """One prompt's answer. `tokens` are all that were committed, the ending one included; `reading` are the
    widths of the rounds that read the prompt."""

    tokens: tuple[int, ...]
    rounds: tuple[VerifyRound, ...] = ()
    reading: tuple[int, ...] = ()
    result: Result | None = None


@dataclass(frozen=True)
class Measured:
    """One turn of an arm: the answers to a case, and what they took together.

    `prefill` counts prompt tokens, `decode` the tokens of rounds that landed after every prompt had been
    read. `first_token_seconds` is that of the first prompt. `peak_bytes` and `used_bytes`: see PeakMemory.
    """

    answers: tuple[Answer, ...]
    prefill: Work
    first_token_seconds: float
    decode: Work
    peak_bytes: int
    used_bytes: int


class Arm(Protocol):
    """One way to answer cases."""

    @property
    def label(self) -> str: ...

    @property
    def reason(self) -> str:
        """Why its text may differ from plain decoding's with no fault of anybody's; empty for no reason."""
        ...

    def takes(self, case: Case) -> bool:
        """Whether this arm can answer such a case."""
        ...

    def answer(self, case: Case, seed: int) -> Measured:
        """Answer it once. `seed` fixes what is drawn where the case has a temperature."""
        ...


def label_of(drafting: Drafting) -> str:
    """How an arm is called: its mode, and its cap where that is not the derived one."""
    cap = (
        "" if drafting.max_draft is None else f" {'full' if drafting.max_draft == 0 else drafting.max_draft}"
    )
    return f"{drafting.mode}{cap}"


def distinct(arms: Sequence[Drafting], mode: str) -> tuple[list[Drafting], list[str]]:
    """The arms, `auto` being the `mode` that it is here, each once; and what to say of those left out."""
    kept: dict[Drafting, Drafting] = {}
    remarks = []
    for arm in arms:
        meant = replace(arm, mode=mode) if arm.mode == "auto" else arm
        if (first := kept.setdefault(meant, arm)) is not arm:
            remarks.append(f"{label_of(arm)} is the same as {label_of(first)} here, and is left out")
    return list(kept), remarks


def session_of(parts: Parts, settings: LoadSettings, drafting: Drafting, *, warn: bool = True) -> Session:
    """A session for one caller in the main thread, over `parts`, drafted for in this way.

    All of them read prompts in chunks of the same length. `control` is the drafting of `auto` at a fixed cap
    of 0. What is known of costs is used and not changed: rounds of a race take longer than others. `warn` is
    that of `Parts.session`. Raises UsageError where the mode needs a drafter that is not there.
    """
    if parts.calibration is not None:
        parts = replace(parts, calibration=replace(parts.calibration, store=None))
    if drafting.mode != CONTROL:
        return variant(parts, settings, drafting.mode, cast(MaxDraft, drafting.max_draft)).session(
            own_thread=False, warn=warn
        )
    session = parts.session(own_thread=False, warn=warn)
    session.engine = Engine(parts.target, parts.drafter, cap=FixedCaps({}))
    return session


class OwnArm:
    """This program's own engine. Its policy lives on from case to case, as it does in a session."""

    reason = ""

    def __init__(self, parts: Parts, settings: LoadSettings, drafting: Drafting, label: str = "") -> None:
        self.drafting = drafting
        self.label = label or label_of(drafting)
        self._session = session_of(parts, settings, drafting)

    def takes(self, case: Case) -> bool:
        return True

    def answer(self, case: Case, seed: int) -> Measured:
        requests = [
            GenerateRequest(prompt, case.new, sampling(case, seed + row), self._session.end_ids)
            for row, prompt in enumerate(case.prompts)
        ]
        memory = PeakMemory()
        events: list[list[EngineEvent]] = [[] for _ in requests]
        for row, event in cast(Engine, self._session.engine).run(requests):
            events[row].append(event)
        held = memory.read()
        answers = [answer_of(each, self._session.fold(each)) for each in events]
        return replace(measured(answers, events), **held)


def sampling(case: Case, seed: int) -> SamplingParams:
    """How a case's tokens are drawn."""
    if case.temperature == 0:
        return SamplingParams()
    return SamplingParams(temperature=case.temperature, seed=seed)


def answer_of(events: Iterable[EngineEvent], result: Result | None = None) -> Answer:
    """The answer that an engine's events of one request amount to."""
    tokens: list[int] = []
    rounds: list[VerifyRound] = []
    reading: list[int] = []
    for event in events:
        if isinstance(event, Prefilled):
            reading.append(event.report.certain)
        elif isinstance(event, Committed):
            tokens += event.tokens
            report = event.report
            if report.drafted:
                rounds.append(VerifyRound(report.drafted, report.accepted, report.committed, report.source))
    return Answer(tuple(tokens), tuple(rounds), tuple(reading), result)


def measured(answers: Sequence[Answer], events: Sequence[Sequence[EngineEvent]]) -> Measured:
    """The times of a batch by the landing of its rounds; memory is left at 0."""
    starts = [event for each in events for event in each if isinstance(event, Started)]
    begun = min(start.at for start in starts)
    firsts = [next(_commits(each)).landed_at for each in events]
    read_at = max(firsts)
    later = [report for each in events for report in _commits(each) if report.landed_at > read_at]
    last_at = max((report.landed_at for report in later), default=read_at)
    return Measured(
        answers=tuple(answers),
        prefill=Work(sum(start.prompt_tokens - start.reused for start in starts), read_at - begun),
        first_token_seconds=firsts[0] - begun,
        decode=Work(sum(report.committed for report in later), last_at - read_at),
        peak_bytes=0,
        used_bytes=0,
    )


def _commits(events: Iterable[EngineEvent]) -> Iterator[RoundReport]:
    return (event.report for event in events if isinstance(event, Committed))
