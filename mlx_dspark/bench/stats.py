"""Medians with spread, and acceptance by position. Numbers in, numbers out; no MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """The median of some figures, the lowest, the highest, and how many there were."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread | None:
        """None where there is no figure."""
        if not figures:
            return None
        return cls(median(figures), min(figures), max(figures), len(figures))

    @property
    def width(self) -> float:
        """Highest less lowest, as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class VerifyRound:
    """A round that verified `drafted` tokens of `source`, `accepted` of them, and committed `committed`."""

    drafted: int
    accepted: int
    committed: int
    source: str = ""


def accept_length(rounds: Sequence[VerifyRound]) -> float | None:
    """Mean tokens that these rounds committed, the target's own included; None without a round."""
    return sum(each.committed for each in rounds) / len(rounds) if rounds else None


def reached(rounds: Sequence[VerifyRound]) -> tuple[float, ...]:
    """Share of the rounds that accepted at least 1, 2, ... drafts, for as far as any did."""
    most = max((each.accepted for each in rounds), default=0)
    return tuple(sum(each.accepted > i for each in rounds) / len(rounds) for i in range(most))


def acceptance(rounds: Sequence[VerifyRound]) -> tuple[float, ...]:
    """The chance that draft 1, 2, ... is accepted where it was verified and those before it were accepted."""
    shares: list[float] = []
    for i in range(max((each.drafted for each in rounds), default=0)):
        tried = [each.accepted > i for each in rounds if each.drafted > i and each.accepted >= i]
        if not tried:
            break
        shares.append(sum(tried) / len(tried))
    return tuple(shares)


@dataclass(frozen=True)
class Work:
    """So many tokens in so many seconds."""

    tokens: int
    seconds: float


def rate(work: Sequence[Work]) -> float | None:
    """Tokens a second over all of it; None where no time was taken."""
    seconds = sum(each.seconds for each in work)
    return sum(each.tokens for each in work) / seconds if seconds > 0 else None


def rates(by_trial: Sequence[Sequence[Work]]) -> Spread | None:
    """The rate of each trial, over all that was done in it."""
    return Spread.of([each for work in by_trial if (each := rate(work)) is not None])


def ratios(by_trial: Sequence[Sequence[Work]], base: Sequence[Sequence[Work]]) -> Spread | None:
    """The rate of each trial in units of the base's in the same trial."""
    pairs = [(rate(ours), rate(theirs)) for ours, theirs in zip(by_trial, base, strict=True)]
    return Spread.of([ours / theirs for ours, theirs in pairs if ours is not None and theirs])
