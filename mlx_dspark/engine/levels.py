"""What drafts are like in each state that content may be in: a hidden Markov model's emissions. No MLX."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import exp, log
from operator import mul

LEVELS = (0.02, 0.06, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.93, 0.97)
"""Chances of a first draft."""

SLOPES = (-0.2, 0.0, 0.15)
SLOPE_SHARES = (0.2, 0.6, 0.2)
"""By how much the log-odds rise from one draft to the next, and how usual that is."""

LEAST, MOST = 0.01, 0.985
SPREAD, RECORDED_SPREAD = 1.2, 0.7
"""Of contents around what is expected of them, in log-odds."""


def alike(shares: Sequence[float]) -> list[float]:
    """These shares of the levels, as shares of the states."""
    total = sum(shares)
    return [share / total * slope for share in shares for slope in SLOPE_SHARES]


UNIFORM = tuple(alike([1.0] * len(LEVELS)))


class States:
    """A state is a level and a slope. `start` says how usual each is; `surviving[k]` holds, by state, the
    chance that `k` drafts are accepted, and `failing[k]` that the draft after them is the first that is not.
    """

    def __init__(self, limit: int, recorded: tuple[float, ...], likely: float) -> None:
        self._logits = [_logit(level) for level in LEVELS for _ in SLOPES]
        self._slopes = [slope for _ in LEVELS for slope in SLOPES]
        spread = RECORDED_SPREAD if recorded else SPREAD
        middle = _logit(recorded[0] if recorded else likely)
        near = [exp(-0.5 * ((_logit(level) - middle) / spread) ** 2) for level in LEVELS]
        share = 0.1 if recorded else 0.5
        self.start = [share * u + (1 - share) * n for u, n in zip(UNIFORM, alike(near), strict=True)]
        self.surviving: list[tuple[float, ...]] = [(1.0,) * len(self._logits)]
        self.failing: list[tuple[float, ...]] = []
        for position in range(limit):
            self._add(position, recorded[min(position, len(recorded) - 1)] if recorded else None)

    def _add(self, position: int, chance: float | None) -> None:
        before = self.surviving[-1]
        more = 0.0 if chance is None else self._fitted(position, chance)
        chances = self._chances(position, more)
        self.failing.append(tuple(s * (1 - c) for s, c in zip(before, chances, strict=True)))
        self.surviving.append(tuple(map(mul, before, chances)))

    def _chances(self, position: int, more: float) -> list[float]:
        return [
            _chance(logit + slope * position + more)
            for logit, slope in zip(self._logits, self._slopes, strict=True)
        ]

    def _fitted(self, position: int, chance: float) -> float:
        """What to add to the log-odds of all states for the chance of this draft, given those before it, to
        be the recorded one; by bisection."""
        reached = list(map(mul, self.start, self.surviving[-1]))
        wanted, low, high = chance * sum(reached), -12.0, 12.0
        for _ in range(30):
            middle = (low + high) / 2
            below = sum(map(mul, reached, self._chances(position, middle))) < wanted
            low, high = (middle, high) if below else (low, middle)
        return (low + high) / 2


@lru_cache(maxsize=32)
def states(limit: int, recorded: tuple[float, ...], likely: float) -> States:
    """The states of a drafter of `limit` drafts, whose `recorded` chances are what a start brings on average;
    without any, around `likely`."""
    return States(limit, recorded, likely)


def _logit(chance: float) -> float:
    chance = min(max(chance, LEAST), MOST)
    return log(chance / (1 - chance))


def _chance(logit: float) -> float:
    return min(max(1 / (1 + exp(-logit)), LEAST), MOST)
