"""How likely drafts are accepted, position by position: of one row, and of all rows together. No MLX."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

_LEAST, _MOST = 0.01, 0.99


class Pool:
    """Acceptance of one drafter over all rows: `recorded` with the pair, then as it is seen.

    `recorded[i]` is the chance that draft `i` is accepted given those before it; the last holds for the rest,
    and without any it is `likely`.
    """

    KEPT = 0.98

    def __init__(self, limit: int, recorded: Sequence[float] = (), *, likely: float = 0.7) -> None:
        chances = [*recorded[:limit]] or [likely]
        chances += chances[-1:] * (limit - len(chances))
        self.shape = tuple(_odds(chance) / _odds(chances[max(0, i - 1)]) for i, chance in enumerate(chances))
        """The odds of each draft against those of the draft before it."""
        weight = 8.0 if recorded else 2.0
        self._offered = [weight] * limit
        self._survived = [weight * chance for chance in chances]
        self._together: dict[int, float] = {}

    def count(self, drafted: int, accepted: int) -> None:
        for i in range(min(drafted, accepted + 1, len(self._offered))):
            self._offered[i] = self.KEPT * self._offered[i] + 1
            self._survived[i] = self.KEPT * self._survived[i] + (i < accepted)

    def count_together(self, rows: int, drafted: int, drafted_together: int) -> None:
        """In a round of so many rows, one drafted `drafted` tokens of `drafted_together`."""
        seen = min(max(1.0, drafted_together / drafted), rows)
        self._together[rows] = 0.7 * self.together(rows) + 0.3 * seen

    def together(self, rows: int) -> float:
        """How many of so many rows usually draft in a round in which any does."""
        return self._together.get(rows, 1.0)

    def chances(self) -> list[float]:
        return [self.chance(position) for position in range(len(self._offered))]

    def chance(self, position: int) -> float:
        return self._survived[position] / self._offered[position]


class Acceptance:
    """Acceptance of one drafter for one row. Begins with what the pool knows.

    Content changes, so old rounds fade; and it changes at once, so when a much better or much worse drafter
    explains the newest rounds better, only these count on (a cumulative sum of log-likelihood ratios; Page
    1954). A position that was rarely offered of late follows the one before it, as it did in the record.
    """

    KEPT, KEPT_NEWEST = 0.96, 0.7
    KEPT_UNSEEN, FADED = 0.97, 2.0
    CHANGED = 6.0
    ODDS = 6.0
    DOUBT = 2.0
    FOLLOWS = 6.0

    def __init__(self, pool: Pool, limit: int) -> None:
        self._pool = pool
        self._offered, self._survived = [0.0] * limit, [0.0] * limit
        self._newest_offered, self._newest_survived = [0.0] * limit, [0.0] * limit
        self._prior = 4.0
        self._better = self._worse = 0.0
        self._chances: list[float] | None = None

    def count(self, drafted: int, accepted: int) -> None:
        """Take a round in which `accepted` of `drafted` drafts were accepted."""
        chances = self.chances()
        seen = min(drafted, accepted + 1, len(self._offered))
        for i in range(seen):
            self._suspect(chances[i], i < accepted)
        self._offered = _faded(self._offered, self.KEPT, seen)
        self._survived = _faded(self._survived, self.KEPT, min(seen, accepted))
        self._newest_offered = _faded(self._newest_offered, self.KEPT_NEWEST, seen)
        self._newest_survived = _faded(self._newest_survived, self.KEPT_NEWEST, min(seen, accepted))
        self._prior *= self.KEPT
        if max(self._better, self._worse) > self.CHANGED:
            self._forget()
        self._chances = None

    def fade(self) -> None:
        """Take a round without drafts: the longer none was seen, the less the old ones count."""
        for offered, survived in (
            (self._offered, self._survived),
            (self._newest_offered, self._newest_survived),
        ):
            if max(offered) <= self.FADED:
                continue
            for i, total in enumerate(offered):
                if total > self.FADED:
                    kept = max(self.KEPT_UNSEEN, self.FADED / total)
                    offered[i], survived[i] = kept * total, kept * survived[i]
        self._prior *= self.KEPT_UNSEEN
        self._chances = None

    def _suspect(self, chance: float, survived: bool) -> None:
        odds = _odds(chance)
        chance, better, worse = odds / (1 + odds), odds * self.ODDS, odds / self.ODDS
        better, worse = better / (1 + better), worse / (1 + worse)
        for_better = log(better / chance) if survived else log((1 - better) / (1 - chance))
        for_worse = log(worse / chance) if survived else log((1 - worse) / (1 - chance))
        self._better = max(0.0, self._better + for_better)
        self._worse = max(0.0, self._worse + for_worse)

    def _forget(self) -> None:
        self._better = self._worse = 0.0
        self._prior = self.DOUBT
        self._offered, self._survived = self._newest_offered[:], self._newest_survived[:]

    def chances(self) -> list[float]:
        """Per position, the chance that a draft is accepted given those before it, for a row by itself."""
        if self._chances is None:
            self._chances = self._estimate()
        return self._chances

    def _estimate(self) -> list[float]:
        chance, weight, chances = self._pool.chance(0), self._prior, []
        for shape, offered, survived in zip(self._pool.shape, self._offered, self._survived, strict=True):
            if chances:
                odds = _odds(chance) * shape
                chance, weight = odds / (1 + odds), self.FOLLOWS
            if total := offered + weight:
                chance = (survived + weight * chance) / total
            chances.append(chance)
        return chances

    def among(self, position: int, weight: float = 4.0) -> float:
        """The chance at one position for a row in company, of which all rows know `weight` rounds' worth."""
        known = self._survived[position] + weight * self._pool.chance(position)
        return known / (self._offered[position] + weight)


def _faded(counts: list[float], kept: float, more: int) -> list[float]:
    """All of them fade, and one is added to the first `more`."""
    faded = [kept * count for count in counts]
    for i in range(more):
        faded[i] += 1
    return faded


def _odds(chance: float) -> float:
    if chance >= _MOST:
        return _MOST / (1 - _MOST)
    return chance / (1 - chance) if chance > _LEAST else _LEAST / (1 - _LEAST)
