"""Rates of arms that ran by turns, with every round at the usual time of its kind.

What an arm decides shows in the rounds that it runs; what a busy machine adds to one of them is no decision.
So each round counts as long as the median round of its kind, over all arms and turns on the prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from mlx_dspark.foundation.events import Committed, EngineEvent

Kind = tuple[Hashable, ...]
"""Who drafted, the width, whether it was launched before its predecessor had landed, and whatever else
decides what a round takes."""


class Round(NamedTuple):
    kind: Kind
    seconds: float
    tokens: int


def rounds_of(events: Iterable[EngineEvent]) -> list[Round]:
    """The decoding rounds of one request by itself, from when the first of them could begin."""
    found, before = [], 0.0
    for event in events:
        report = getattr(event, "report", None)
        if report is None:
            continue
        if isinstance(event, Committed) and report.certain == 1 and before:
            kind = report.source if report.drafted else "", report.width, report.launched_at < before
            found.append(Round(kind, report.landed_at - max(report.launched_at, before), report.committed))
        before = report.landed_at
    return found


def usual(rounds: Iterable[Round]) -> dict[Kind, float]:
    """The median seconds of each kind."""
    by_kind: dict[Kind, list[float]] = {}
    for each in rounds:
        by_kind.setdefault(each.kind, []).append(each.seconds)
    return {kind: median(seconds) for kind, seconds in by_kind.items()}


def rate_by_rounds(turns: Iterable[tuple[Sequence[Round], dict[Kind, float]]]) -> float:
    """Tokens a second of turns, each with what is usual on its prompt; 0 where there is no round."""
    pairs = [(each.tokens, known[each.kind]) for rounds, known in turns for each in rounds]
    seconds = sum(second for _, second in pairs)
    return sum(tokens for tokens, _ in pairs) / seconds if seconds else 0.0
