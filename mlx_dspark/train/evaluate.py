"""How good a drafter is, with the engine that will run it: accept length, confidence, and whether it pays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_dspark.contracts import Ask, Drafter, Observation, Proposal, Source, Target
from mlx_dspark.drafters.block import BlockDrafter
from mlx_dspark.engine.caps import cap_policy
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.events import Committed, EngineEvent, RoundReport, Trouble
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.nn.context import ContextRows
from mlx_dspark.session.result import Result

Ids = Sequence[int]

ROWS = 32
"""Prompts that are answered at once where only acceptance counts."""

BUCKETS = 10
PAYS = 1.02
"""Speculation pays when it is at least this much faster than plain decoding."""


@dataclass(frozen=True)
class Accepted:
    """Acceptance at full block. `tokens` are committed by `rounds`; `reached[i]` is the share of rounds that
    accepted at least `i + 1` drafts."""

    content: str
    temperature: float
    prompts: int
    rounds: int
    tokens: int
    reached: tuple[float, ...]

    @property
    def length(self) -> float:
        """Mean tokens committed by a round, the target's own included."""
        return self.tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class Bucket:
    """Drafts of like confidence: how many, their mean confidence, and the share of them accepted."""

    drafts: int
    confidence: float
    accepted: float


@dataclass(frozen=True)
class Calibration:
    """Confidence against acceptance of drafts whose predecessors were accepted, in tenths of confidence.

    `error` is the expected calibration error, the mean distance of the two over all drafts. Confidence is
    trained to be right at temperature 1; greedy drafts are accepted more often or less.
    """

    temperature: float
    buckets: tuple[Bucket, ...]

    @property
    def error(self) -> float:
        drafts = sum(bucket.drafts for bucket in self.buckets)
        off = sum(bucket.drafts * abs(bucket.confidence - bucket.accepted) for bucket in self.buckets)
        return off / drafts if drafts else 0.0


@dataclass(frozen=True)
class Rate:
    """Decoding in tokens a second, plain and with the drafter under the automatic cap."""

    content: str
    plain: float
    speculative: float

    @property
    def gain(self) -> float:
        return self.speculative / self.plain if self.plain else 0.0


@dataclass(frozen=True)
class Evaluation:
    """Everything measured. `calibrations` are empty without a confidence head."""

    accepted: tuple[Accepted, ...]
    rates: tuple[Rate, ...]
    calibrations: tuple[Calibration, ...]

    @property
    def verdict(self) -> str:
        """Whether the drafter pays on this machine, in a sentence."""
        gains = [rate.gain for rate in self.rates]
        mean = sum(gains) / len(gains) if gains else 0.0
        answer = "pays" if mean >= PAYS else "does not pay"
        each = ", ".join(f"{rate.content} {rate.gain:.2f}x" for rate in self.rates)
        return f"On this machine it {answer}: {mean:.2f}x plain decoding ({each})."


def evaluate(
    target: Target,
    drafter: BlockDrafter,
    contents: Mapping[str, Sequence[Ids]],
    *,
    end_ids: frozenset[int],
    tokens: int,
    temperatures: Sequence[float] = (0.0, 1.0),
    timed: int = 3,
) -> Evaluation:
    """Answer the prompts (ids) of each content, at most `tokens` tokens each.

    `drafter` is bound to `target`. The first `timed` prompts of each content are raced against plain
    decoding. Sampled answers have no seed, since a seed costs acceptance (decision 004).
    """
    accepted: list[Accepted] = []
    calibrations: list[Calibration] = []
    for temperature in temperatures:
        watch = ConfidenceWatch(drafter)
        accepted += [
            _accepted(target, watch, name, prompts, end_ids, tokens, temperature)
            for name, prompts in contents.items()
            if prompts
        ]
        if watch.pairs:
            calibrations.append(calibration_of(watch.pairs, temperature))
    rates = [
        _rate(target, drafter, name, prompts[:timed], end_ids, tokens)
        for name, prompts in contents.items()
        if prompts[:timed]
    ]
    return Evaluation(tuple(accepted), tuple(rates), tuple(calibrations))


class ConfidenceWatch:
    """The same drafter, watched: `pairs` hold its confidence in every draft that the target judged, and
    whether the draft was accepted."""

    def __init__(self, drafter: BlockDrafter) -> None:
        self._drafter = drafter
        self._drafting: list[int] = []
        self.pairs: list[tuple[float, bool]] = []

    @property
    def name(self) -> str:
        return self._drafter.name

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._drafter.sources

    @property
    def taps(self) -> tuple[int, ...]:
        return self._drafter.taps

    @property
    def max_draft(self) -> int:
        return self._drafter.max_draft

    def bind(self, target: Target) -> None:
        self._drafter.bind(target)

    def new_rows(self, n: int = 1) -> ContextRows:
        return self._drafter.new_rows(n)

    def blind(self, rows: ContextRows, anchors: Sequence[int], asked: Collection[str]) -> bool:
        return self._drafter.blind(rows, anchors, asked)

    def propose(self, rows: ContextRows, ask: Ask) -> Proposal:
        proposal = self._drafter.propose(rows, ask)
        self._drafting = [row for row, length in enumerate(proposal.lengths) if length]
        return proposal

    def observe(self, rows: ContextRows, seen: Observation) -> None:
        if rows.confidences is not None and any(seen.drafted):
            sure: list[list[float]] = rows.confidences.tolist()  # pyright: ignore[reportAssignmentType]
            for line, row in zip(sure, self._drafting, strict=True):
                judged = min(seen.drafted[row], seen.accepted[row] + 1)
                self.pairs += [(line[i], i < seen.accepted[row]) for i in range(judged)]
        self._drafter.observe(rows, seen)


def calibration_of(pairs: Sequence[tuple[float, bool]], temperature: float) -> Calibration:
    """Confidences and outcomes, sorted into buckets."""
    buckets: list[list[tuple[float, bool]]] = [[] for _ in range(BUCKETS)]
    for confidence, accepted in pairs:
        buckets[min(int(confidence * BUCKETS), BUCKETS - 1)].append((confidence, accepted))
    return Calibration(temperature, tuple(_bucket(each) for each in buckets))


def _bucket(pairs: Sequence[tuple[float, bool]]) -> Bucket:
    n = len(pairs)
    if not n:
        return Bucket(0, 0.0, 0.0)
    return Bucket(n, sum(c for c, _ in pairs) / n, sum(a for _, a in pairs) / n)


def _accepted(
    target: Target,
    drafter: Drafter,
    content: str,
    prompts: Sequence[Ids],
    end_ids: frozenset[int],
    tokens: int,
    temperature: float,
) -> Accepted:
    engine = Engine(target, drafter, cap=FixedCaps({drafter.name: drafter.max_draft}))
    reports: list[RoundReport] = []
    for start in range(0, len(prompts), ROWS):
        sampling = SamplingParams(temperature=temperature)
        chosen = prompts[start : start + ROWS]
        requests = [GenerateRequest(tuple(ids), tokens, sampling, end_ids) for ids in chosen]
        events = _untroubled(event for _, event in engine.run(requests))
        reports += [e.report for e in events if isinstance(e, Committed) and e.report.drafted]
        mx.clear_cache()
    reached = [sum(report.accepted > i for report in reports) for i in range(drafter.max_draft)]
    rounds = len(reports)
    return Accepted(
        content,
        temperature,
        len(prompts),
        rounds,
        sum(report.committed for report in reports),
        tuple(count / rounds if rounds else 0.0 for count in reached),
    )


def _rate(
    target: Target,
    drafter: BlockDrafter,
    content: str,
    prompts: Sequence[Ids],
    end_ids: frozenset[int],
    tokens: int,
) -> Rate:
    """Plain and speculative by turns, each prompt alone; the first turn only warms up."""
    plain = Engine(target)
    speculative = Engine(target, drafter, cap=cap_policy(None, drafter.sources))
    requests = [GenerateRequest(tuple(ids), tokens, SamplingParams(), end_ids) for ids in prompts]
    for engine in (plain, speculative):
        _fold(engine.stream(requests[0]))
    spent, decoded = [0.0, 0.0], [0, 0]
    for request in requests:
        for way, engine in enumerate((plain, speculative)):
            result = _fold(engine.stream(request))
            spent[way] += result.seconds - result.ttft_seconds
            decoded[way] += max(0, result.num_tokens - 1)
    rates = [count / seconds if seconds else 0.0 for count, seconds in zip(decoded, spent, strict=True)]
    return Rate(content, *rates)


def _fold(events: Iterable[EngineEvent]) -> Result:
    return Result.fold(_untroubled(events))


def _untroubled(events: Iterable[EngineEvent]) -> Iterator[EngineEvent]:
    """The same events. Raises RuntimeError when the drafter raised: what follows is plain decoding."""
    for event in events:
        if isinstance(event, Trouble):
            raise RuntimeError(f"The drafter cannot be measured.\n{event.traceback}")
        yield event


def as_dict(evaluation: Evaluation) -> dict[str, Any]:
    """The evaluation as JSON values, derived figures included."""
    return {
        "accepted": [{**vars(each), "length": each.length} for each in evaluation.accepted],
        "rates": [{**vars(each), "gain": each.gain} for each in evaluation.rates],
        "calibrations": [
            {
                "temperature": each.temperature,
                "error": each.error,
                "buckets": [vars(bucket) for bucket in each.buckets],
            }
            for each in evaluation.calibrations
        ],
        "verdict": evaluation.verdict,
    }
