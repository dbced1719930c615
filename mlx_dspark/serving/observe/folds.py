"""Figures of a server since it was started, each a fold of round reports or of results. No MLX, no HTTP."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from mlx_dspark.foundation.events import RoundReport
from mlx_dspark.session.result import Result

MILLISECONDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
SECONDS = tuple(bound / 100 for bound in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 6000, 30_000))
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)


class Histogram:
    """Counts of values by upper bound, the bound included."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def cumulated(self) -> list[tuple[str, int]]:
        """Upper bounds and how many values lie within, the last bound infinite."""
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


@dataclass
class Rounds:
    """Of all rounds that were read, by row: a round of several answers counts once for each."""

    kinds: Counter[str] = field(default_factory=Counter)
    """`prefill`, `verify`, `parked`, `plain`"""
    committed: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    offered_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    lengths: Histogram = field(default_factory=lambda: Histogram(LENGTHS))
    seconds: Histogram = field(default_factory=lambda: Histogram([each / 1000 for each in MILLISECONDS]))
    most_rows: int = 0

    def read(self, report: RoundReport) -> None:
        """A round that read a prompt."""
        self.kinds["prefill"] += 1
        self.most_rows = max(self.most_rows, report.rows)

    def decoded(self, report: RoundReport) -> None:
        """A round that added to an answer."""
        kind = "verify" if report.drafted else "parked" if report.parked else "plain"
        self.kinds[kind] += 1
        self.committed += report.committed
        self.most_rows = max(self.most_rows, report.rows)
        self.seconds.add(report.landed_at - report.launched_at)
        if report.drafted:
            self._verified(report)

    def _verified(self, report: RoundReport) -> None:
        self.sources[report.source] += 1
        self.drafted[report.source] += report.drafted
        self.accepted[report.source] += report.accepted
        self.offered_at.update(range(report.drafted))
        self.accepted_at.update(range(report.accepted))
        self.lengths.add(report.committed)

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        drafted, accepted = self.drafted.total(), self.accepted.total()
        places = range(max(self.offered_at, default=-1) + 1)
        return {
            "rounds": self.kinds.total(),
            "kinds": dict(self.kinds),
            "committed_tokens": self.committed,
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "mean_accept_len": round(self.lengths.mean, 4),
            "draft_acceptance": round(accepted / drafted, 4) if drafted else None,
            "lookup_rounds": sum(n for name, n in self.sources.items() if name.startswith("lookup")),
            "sources": dict(self.sources),
            "position_offered": [self.offered_at[place] for place in places],
            "position_acceptance": [
                round(self.accepted_at[place] / self.offered_at[place], 4) for place in places
            ],
            "accept_histogram": dict(self.lengths.cumulated()),
        }


@dataclass
class Answers:
    """Of all answers that are over, whole or not."""

    endings: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    rates: Histogram = field(default_factory=lambda: Histogram(()))
    decode_rates: Histogram = field(default_factory=lambda: Histogram(()))
    last: Result | None = None

    def ended(self, result: Result, ending: str) -> None:
        """One more is over: `ending` is its finish reason, or `failed`."""
        self.endings[ending] += 1
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.reused_tokens
        self.completion_tokens += result.num_tokens
        if result.num_tokens:
            self.last = result
            self.seconds.add(result.seconds)
            self.first_token.add(result.ttft_seconds)
            self.rates.add(result.tokens_per_sec)
        if result.decode_tokens_per_sec:
            self.decode_rates.add(result.decode_tokens_per_sec)
