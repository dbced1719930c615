"""Replays what drafts were worth over what rounds cost, to see what a cap policy would have cost. No MLX.

This is how policies are compared on machines that are not at hand: a trace of acceptance comes from any
machine, since acceptance does not depend on it; the curves are recorded, or invented from published figures.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlx_dspark.foundation.caps import CapPolicy, FixedCaps, RowCaps
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.events import RoundReport

Noise = Callable[[], float]
"""A factor on the seconds of a round."""


Offers = tuple[tuple[str, int], ...]
"""By name of a drafter, the longest draft it has; empty where nothing is found."""


@dataclass(frozen=True)
class Segment:
    """A stretch of an answer: `runs[t]` is how many drafts would have been accepted from its token `t` on.

    `offers[t]`, where lookup drafts: who has a draft there, the most likely first, and of how many tokens.
    """

    name: str
    runs: tuple[int, ...]
    offers: tuple[Offers, ...] = ()

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


Cut = Callable[[int, int], int]
"""From a draft's run and its cap, where the drafter would end it by its confidence."""


class Machine:
    """Runs one row of a policy; `truth` says what its rounds cost, `noise` how much each is off, `cut` where
    the drafter ends a draft when it is asked to. Without a `source` the segments have offers, which cost
    nothing to find."""

    def __init__(
        self,
        truth: CostCurves,
        source: str,
        noise: Noise = lambda: 1.0,
        cut: Cut = lambda _, cap: cap,
    ) -> None:
        self._cut = cut
        self.truth = truth
        self.source = source
        self.clock = 1.0
        self._noise = noise
        self._prices: dict[tuple[int, int], float] = {}

    def seconds(self, cap: int, depth: int = 0) -> float:
        """Seconds of a round. Raises ValueError where the curves do not have it."""
        key = (cap, depth // 256)
        if key not in self._prices:
            draft = self.truth.draft_seconds(self.source, cap, depth=depth)
            if draft is None and self.source:
                raise ValueError(f"the curves have no round of {cap} drafts by {self.source}")
            self._prices[key] = self._verify(cap + 1, depth) + (draft or 0.0) + self.truth.overhead
        return self._prices[key]

    def _verify(self, width: int, depth: int) -> float:
        return self.truth.verify_seconds(width, depth=depth) or 0.0

    def run(self, policy: CapPolicy, segments: Iterable[Segment], *, depth: int = 0) -> Replay:
        """One request whose answer is these segments, after a prompt of `depth` tokens."""
        row, stretches, course = policy.row(), [], []
        spent = plain = 0.0
        for segment in segments:
            at, rounds, parked, before, plain_before = 0, 0, 0, spent, plain
            caps: dict[int, int] = {}
            while at < len(segment.runs):
                source, cap = self._drafting(row.caps(), segment, at)
                report, seconds = self._round(row, source, cap, segment.runs[at], depth)
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

    def _drafting(self, caps: Mapping[str, int], segment: Segment, at: int) -> tuple[str, int]:
        """Who drafts, and how many tokens; 0 for nobody."""
        if self.source:
            return self.source, caps.get(self.source, 0)
        offers = segment.offers[at]
        return next(((name, min(most, caps[name])) for name, most in offers if caps.get(name)), ("", 0))

    def _round(self, row: RowCaps, source: str, cap: int, run: int, depth: int) -> tuple[RoundReport, float]:
        drafted = self._cut(run, cap) if cap and row.thresholds().get(source) else cap
        accepted, seconds = min(drafted, run), self.seconds(cap, depth)
        if drafted < cap:
            seconds += self._verify(drafted + 1, depth) - self._verify(cap + 1, depth)
        seconds *= self._noise()
        source, launched = source if cap else "", self.clock
        self.clock += seconds
        report = RoundReport(
            launched_at=launched,
            landed_at=self.clock,
            rows=1,
            width=drafted + 1,
            certain=1,
            cap=cap,
            drafted=drafted,
            accepted=accepted,
            committed=accepted + 1,
            depth=depth,
            source=source,
            parked=row.parked() and not drafted,
            drafted_together=drafted,
            outlook=row.outlook(1, source, drafted, drafted + 1),
        )
        row.observe(report)
        return report, seconds


def oracle(truth: CostCurves, source: str, segments: Sequence[Segment], limit: int) -> tuple[Stretch, ...]:
    """Per segment, what the best of all constant caps costs, 0 included, had it been known."""
    machine = Machine(truth, source)
    replays = [machine.run(FixedCaps({source: cap}), segments).stretches for cap in range(limit + 1)]
    return tuple(
        max(of_segment, key=lambda stretch: stretch.gain) for of_segment in zip(*replays, strict=True)
    )
