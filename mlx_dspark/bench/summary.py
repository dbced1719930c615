"""From turns to figures: a line for each group of cases and arm. No MLX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_dspark.bench.arms import Measured
from mlx_dspark.bench.stats import (
    Spread,
    Work,
    accept_length,
    acceptance,
    rates,
    ratios,
    reached,
)
from mlx_dspark.bench.suite import Judged, Measurement

NOISE = 0.1
"""Highest less lowest rate of plain decoding, as a share of the median: above it, ratios are in doubt."""


@dataclass(frozen=True)
class Line:
    """One arm on one group. Rates are tokens a second; each is the spread over trials of a trial's total.

    `against_plain` compares decoding with plain decoding in the same trials; `predicted` is what each answer
    expected of that. `reached[i]` is the share of verify rounds that accepted at least `i + 1` drafts,
    `acceptance[i]` the chance of draft `i + 1` where it was verified and those before it were accepted.
    `verdicts` counts prompts by how their greedy answers compare with plain decoding's. `cap` is the most
    drafts that a round was allowed.
    """

    group: str
    arm: str
    decode: Spread | None
    against_plain: Spread | None
    predicted: Spread | None
    prefill: Spread | None
    first_token_seconds: Spread | None
    accept_length: float | None
    reached: tuple[float, ...]
    acceptance: tuple[float, ...]
    drafted: int
    accepted: int
    rounds: int
    parked_rounds: int
    cap: int
    peak_bytes: int
    used_bytes: int
    verdicts: dict[str, int]
    troubles: tuple[str, ...]


def lines(found: Measurement, judged: Sequence[Judged], baseline: int) -> list[Line]:
    """A line for each group and each arm that took part in it, groups in the order of their cases."""
    groups = dict.fromkeys(case.group for case in found.cases)
    return [
        _line(found, judged, group, arm, baseline)
        for group in groups
        for arm in range(len(found.arms))
        if any(found.taken(i, arm) for i in _cases(found, group))
    ]


def noisy(lines: Sequence[Line], baseline: str) -> dict[str, float]:
    """By group, how much plain decoding's own rate moved between trials, where that is more than NOISE."""
    return {
        line.group: line.decode.width
        for line in lines
        if line.arm == baseline and line.decode is not None and line.decode.width > NOISE
    }


def _cases(found: Measurement, group: str) -> list[int]:
    return [i for i, case in enumerate(found.cases) if case.group == group]


def _line(found: Measurement, judged: Sequence[Judged], group: str, arm: int, baseline: int) -> Line:
    cases = _cases(found, group)
    taken = [each for i in cases for each in found.taken(i, arm)]
    results = [each.result for one in taken for each in one.answers if each.result is not None]
    rounds = [each for one in taken for answer in one.answers for each in answer.rounds]
    ours, theirs = _paired(found, cases, arm, baseline)
    kinds = Counter(each.verdict.kind for each in judged if each.arm == arm and each.case in cases)
    return Line(
        group=group,
        arm=found.arms[arm],
        decode=rates(_works(found, cases, arm, lambda each: each.decode)),
        against_plain=ratios(ours, theirs),
        predicted=Spread.of([one for each in results if (one := each.predicted_speedup) is not None]),
        prefill=rates(_works(found, cases, arm, lambda each: each.prefill)),
        first_token_seconds=Spread.of([each.first_token_seconds for each in taken]),
        accept_length=accept_length(rounds),
        reached=reached(rounds),
        acceptance=acceptance(rounds),
        drafted=sum(each.drafted for each in rounds),
        accepted=sum(each.accepted for each in rounds),
        rounds=sum(result.num_rounds - result.prefill_rounds for result in results),
        parked_rounds=sum(result.parked_rounds for result in results),
        cap=max((result.cap for result in results), default=0),
        peak_bytes=max(each.peak_bytes for each in taken),
        used_bytes=max(each.used_bytes for each in taken),
        verdicts=dict(kinds),
        troubles=tuple(dict.fromkeys(trouble for result in results for trouble in result.troubles)),
    )


def _works(
    found: Measurement, cases: Sequence[int], arm: int, part: Callable[[Measured], Work]
) -> list[list[Work]]:
    """By trial, the work of all cases; the trials that an interrupt cut short count when no other does."""
    by_trial = [
        [part(taken[trial]) for i in cases if len(taken := found.taken(i, arm)) > trial]
        for trial in range(found.trials)
    ]
    whole = [works for works in by_trial if len(works) == len(cases)]
    return whole or [works for works in by_trial[:1] if works]


def _paired(
    found: Measurement, cases: Sequence[int], arm: int, baseline: int
) -> tuple[list[list[Work]], list[list[Work]]]:
    """By trial, the decoding of two arms on the same cases."""
    both = [i for i in cases if found.taken(i, arm) and found.taken(i, baseline)]
    pairs = [_works(found, both, each, lambda taken: taken.decode) for each in (arm, baseline)]
    trials = min(map(len, pairs)) if both else 0
    return pairs[0][:trials], pairs[1][:trials]
