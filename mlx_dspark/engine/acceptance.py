"""How likely drafts are accepted, position by position: of one row, and of all rows together. No MLX."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import mul

from mlx_dspark.engine.levels import UNIFORM, states


class Pool:
    """Acceptance of one drafter over all rows: `recorded` with the pair, then as it is seen.

    `recorded[i]` is the chance that draft `i` is accepted given those before it; the last holds for the rest,
    and without any it is `likely`. `rare`: as far as nothing else was seen, one row of a batch at a time has
    a draft, and not all.
    """

    KEPT = 0.98
    KEPT_STATES = 0.99
    UNSEEN = 0.5

    def __init__(
        self, limit: int, recorded: Sequence[float] = (), *, likely: float = 0.7, rare: bool = False
    ) -> None:
        self.states = states(limit, tuple(recorded[:limit]), likely)
        chances = [*recorded[:limit]] or [likely]
        chances += chances[-1:] * (limit - len(chances))
        weight = 8.0 if recorded else 2.0
        self._offered = [weight] * limit
        self._survived = [weight * chance for chance in chances]
        self._rare = rare
        self._together: dict[int, float] = {}
        self.counted = 0
        """Rounds counted so far."""
        self._usual = self.states.start[:]
        self.prior = self._mixed()
        """By state, how likely content that is new begins in it."""

    def start(self) -> list[float]:
        """By state, how likely a row begins in it."""
        return self._usual[:]

    def learn(self, weights: Sequence[float], rounds: int) -> None:
        """Take what a row is believed to have been in for so many rounds."""
        kept = self.KEPT_STATES**rounds
        new = 1 - kept
        self._usual = [kept * u + new * w for u, w in zip(self._usual, weights, strict=True)]
        self.prior = self._mixed()

    def _mixed(self) -> list[float]:
        unseen, usual = self.UNSEEN, 1 - self.UNSEEN
        return [unseen * even + usual * u for even, u in zip(UNIFORM, self._usual, strict=True)]

    def count(self, drafted: int, accepted: int) -> None:
        self.counted += 1
        for i in range(min(drafted, accepted + 1, len(self._offered))):
            self._offered[i] = self.KEPT * self._offered[i] + 1
            self._survived[i] = self.KEPT * self._survived[i] + (i < accepted)

    def count_together(self, rows: int, drafted: int, drafted_together: int) -> None:
        """In a round of so many rows, one drafted `drafted` tokens of `drafted_together`."""
        seen = min(max(1.0, drafted_together / drafted), rows)
        self._together[rows] = 0.7 * self.together(rows) + 0.3 * seen

    def together(self, rows: int) -> float:
        """How many of so many rows usually draft in a round in which any does."""
        return self._together.get(rows, 1.0 if self._rare else rows)

    def chances(self) -> list[float]:
        return [self.chance(position) for position in range(len(self._offered))]

    def chance(self, position: int) -> float:
        return self._survived[position] / self._offered[position]


class Acceptance:
    """Acceptance of one drafter for one row, filtered: the content is in a state that is not seen, and
    changes to another now and then (a hidden Markov model; Rabiner 1989).

    What is expected of a draft is the mean over the states by how likely each is. So a few drafts accepted
    whole make much longer ones worth a try, which no rate per position would, and the longer no draft was
    made, the less is thought to be known.
    """

    CHANGES, CHANGES_UNSEEN = 1 / 120, 1 / 250
    """Chance that the content changes in a round with drafts, and in one without."""

    KEPT = 0.96
    TOLD_EVERY = 8

    def __init__(self, pool: Pool, limit: int) -> None:
        self._pool = pool
        self._weights = pool.start()
        self._unseen = self._rounds = 0
        self._chances: list[float] | None = None
        self._offered, self._survived = [0.0] * limit, [0.0] * limit

    def count(self, drafted: int, accepted: int) -> None:
        """Take a round in which `accepted` of `drafted` drafts were accepted."""
        states = self._pool.states
        seen = min(drafted, accepted + 1, len(self._offered))
        self._offered = _faded(self._offered, self.KEPT, seen)
        self._survived = _faded(self._survived, self.KEPT, min(seen, accepted))
        likely = states.surviving[seen] if accepted >= seen else states.failing[accepted]
        weights = list(map(mul, self.weights(), likely))
        self._weights = self._changed(weights, sum(weights), self.CHANGES)
        self._rounds += 1
        if self._rounds % self.TOLD_EVERY == 0:
            self._pool.learn(self._weights, self.TOLD_EVERY)
        self._chances = None

    def fade(self) -> None:
        """Take a round without drafts."""
        self._unseen += 1
        self._chances = None

    def weights(self) -> list[float]:
        """By state, how likely the row is in it."""
        if self._unseen:
            changed = 1 - (1 - self.CHANGES_UNSEEN) ** self._unseen
            self._weights, self._unseen = self._changed(self._weights, 1.0, changed), 0
        return self._weights

    def _changed(self, weights: Sequence[float], total: float, chance: float) -> list[float]:
        kept = (1 - chance) / total
        return [kept * w + chance * new for w, new in zip(weights, self._pool.prior, strict=True)]

    def chances(self) -> list[float]:
        """Per position, the chance that a draft is accepted given those before it, for a row by itself."""
        if self._chances is None:
            weights = self.weights()
            surviving = [sum(map(mul, weights, each)) for each in self._pool.states.surviving]
            self._chances = [after / before for before, after in pairwise(surviving)]
        return self._chances

    def best(self, shares: Sequence[float | None]) -> list[float]:
        """By state, the most tokens per plain round that any cap brings there, 1 being plain decoding's;
        `shares[cap - 1]` is a plain round's time as a share of one at that cap."""
        tokens = list(self._pool.states.surviving[0])
        best = tokens[:]
        for share, each in zip(shares, self._pool.states.surviving[1:], strict=False):
            tokens = [t + s for t, s in zip(tokens, each, strict=True)]
            if share:
                best = [max(b, share * t) for b, t in zip(best, tokens, strict=True)]
        return best

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
