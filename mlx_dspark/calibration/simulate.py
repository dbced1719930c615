"""Replays what drafts were worth over what rounds cost, to see what a cap policy would have cost. No MLX.

This is how policies are compared on machines that are not at hand: a trace of acceptance comes from any
machine, since acceptance does not depend on it; the curves are recorded, or invented from published figures.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.events import Outlook, RoundReport

Noise = Callable[[], float]
"""A factor on the seconds of a round."""


class _RowCaps(Protocol):
    def caps(self, rows: int = 1) -> Mapping[str, int]: ...
    def parked(self, rows: int = 1) -> bool: ...
    def outlook(self, rows: int, source: str, drafted: int, width: int) -> Outlook: ...
    def observe(self, report: RoundReport) -> None: ...


class _Policy(Protocol):
    def row(self) -> Any: ...


@dataclass(frozen=True)
class Segment:
    """A stretch of an answer: `runs[t]` is how many drafts would have been accepted from its token `t` on."""

    name: str
    runs: tuple[int, ...]

    @classmethod
    def drawn(cls, name: str, chances: Sequence[float], tokens: int, rng: random.Random) -> Segment:
        """`tokens` tokens; draft `i` is accepted with chance `chances[i]` given those before it."""
        return cls(name, tuple(_run(chances, rng) for _ in range(tokens)))

    @classmethod
    def of_rounds(cls, name: str, accepted: Iterable[int]) -> Segment:
        """From the accepted drafts of each round of a run at the full block: within a round the rest of its
        drafts would have been accepted from a later token too."""
        return cls(name, tuple(left for count in accepted for left in range(count, -1, -1)))


def _run(chances: Sequence[float], rng: random.Random) -> int:
    return next((i for i, chance in enumerate(chances) if rng.random() >= chance), len(chances))


@dataclass(frozen=True)
class Stretch:
    """What one segment cost: tokens, rounds, parked rounds and seconds, and the seconds of plain decoding."""

    name: str
    tokens: int
    rounds: int
    parked: int
    seconds: float
    plain_seconds: float
    caps: Mapping[int, int]
    """How many rounds had each cap."""

    @property
    def gain(self) -> float:
        """Tokens per second as a multiple of plain decoding."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class Replay:
    """What a policy cost, segment by segment, and after each round the seconds and those of plain decoding so
    far."""

    stretches: tuple[Stretch, ...]
    course: tuple[tuple[float, float], ...]

    @property
    def gain(self) -> float:
        return sum(s.plain_seconds for s in self.stretches) / sum(s.seconds for s in self.stretches)

    def gain_after(self, rounds: int) -> float:
        """The gain without the first so many rounds; 1 where there are no more."""
        if len(self.course) <= rounds:
            return 1.0
        (seconds, plain), (all_seconds, all_plain) = self.course[rounds - 1], self.course[-1]
        return (all_plain - plain) / (all_seconds - seconds)


class Machine:
    """Runs one row of a policy; `truth` says what its rounds cost, `noise` how much each is off."""

    def __init__(self, truth: CostCurves, source: str, noise: Noise = lambda: 1.0) -> None:
        self.truth = truth
        self.source = source
        self.clock = 1.0
        self._noise = noise
        self._prices: dict[tuple[int, int], float] = {}

    def seconds(self, cap: int, depth: int = 0) -> float:
        """Seconds of a round. Raises ValueError where the curves do not have it."""
        key = (cap, depth // 256)
        if key not in self._prices:
            price = self.truth.round_seconds(cap, source=self.source, depth=depth)
            if price is None:
                raise ValueError(f"the curves have no round of {cap} drafts by {self.source}")
            self._prices[key] = price
        return self._prices[key]

    def run(self, policy: _Policy, segments: Iterable[Segment], *, depth: int = 0) -> Replay:
        """One request whose answer is these segments, after a prompt of `depth` tokens."""
        row, stretches, course = policy.row(), [], []
        spent = plain = 0.0
        for segment in segments:
            at, rounds, parked, before, plain_before = 0, 0, 0, spent, plain
            caps: dict[int, int] = {}
            while at < len(segment.runs):
                report, seconds = self._round(row, segment.runs[at], depth)
                spent += seconds
                plain += report.committed * self.seconds(0, depth)
                at, depth, rounds = at + report.committed, depth + report.committed, rounds + 1
                parked += report.parked
                caps[report.cap] = caps.get(report.cap, 0) + 1
                course.append((spent, plain))
            stretches.append(
                Stretch(segment.name, at, rounds, parked, spent - before, plain - plain_before, caps)
            )
        return Replay(tuple(stretches), tuple(course))

    def _round(self, row: _RowCaps, run: int, depth: int) -> tuple[RoundReport, float]:
        cap = row.caps().get(self.source, 0)
        accepted, seconds = min(cap, run), self.seconds(cap, depth) * self._noise()
        source, launched = self.source if cap else "", self.clock
        self.clock += seconds
        report = RoundReport(
            launched_at=launched,
            landed_at=self.clock,
            rows=1,
            width=cap + 1,
            certain=1,
            cap=cap,
            drafted=cap,
            accepted=accepted,
            committed=accepted + 1,
            depth=depth,
            source=source,
            parked=row.parked(),
            drafted_together=cap,
            outlook=row.outlook(1, source, cap, cap + 1),
        )
        row.observe(report)
        return report, seconds


class Constant:
    """A policy that always has the same cap."""

    def __init__(self, source: str, cap: int) -> None:
        self._caps = {source: cap}

    def row(self) -> Constant:
        return self

    def caps(self, rows: int = 1) -> Mapping[str, int]:
        del rows
        return self._caps

    def parked(self, rows: int = 1) -> bool:
        del rows
        return False

    def outlook(self, rows: int, source: str, drafted: int, width: int) -> Outlook:
        del rows, source, drafted, width
        return Outlook(None, None)

    def observe(self, report: RoundReport) -> None:
        del report


def oracle(truth: CostCurves, source: str, segments: Sequence[Segment], limit: int) -> tuple[Stretch, ...]:
    """Per segment, what the best of all constant caps costs, 0 included, had it been known."""
    machine = Machine(truth, source)
    replays = [machine.run(Constant(source, cap), segments).stretches for cap in range(limit + 1)]
    return tuple(
        max(of_segment, key=lambda stretch: stretch.gain) for of_segment in zip(*replays, strict=True)
    )
