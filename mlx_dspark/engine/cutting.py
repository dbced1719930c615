"""Whether drafts of one row end where the drafter's confidence falls, and at what. Arithmetic; no MLX."""

from __future__ import annotations

from math import prod

from mlx_dspark.engine.prices import Prospects


class _Tally:
    """Tokens and time, in plain rounds, of late."""

    KEPT = 0.95

    def __init__(self) -> None:
        self.tokens = self.spent = 0.0

    def add(self, tokens: int, spent: float) -> None:
        self.tokens = self.KEPT * self.tokens + tokens
        self.spent = self.KEPT * self.spent + spent

    @property
    def gain(self) -> float:
        return self.tokens / self.spent if self.spent else 0.0


class Cutting:
    """Drafts are cut only where that can pay: where width still costs within the cap, so that a draft whose
    chance of being accepted is below its price is better left, and where the drafter is often wrong within
    the block. The threshold is that price, in tokens. Cut and whole drafts are then compared by what they
    brought, in stretches of TRIAL rounds; the better stay for KEPT_FOR.
    """

    TRIAL, KEPT_FOR = 24, 192
    LEAST_PRICE, MOST_SURVIVING, BETTER = 0.15, 0.6, 1.01

    def __init__(self, prospects: Prospects) -> None:
        self._prospects = prospects
        self._tallies = {True: _Tally(), False: _Tally()}
        self._left = self.TRIAL
        self._trying = False
        self.threshold = 0.0

    def observe(self, tokens: int, seconds: float, cap: int) -> None:
        """Take a round that drafted at this cap."""
        plain, on = self._prospects.plain(), self.threshold > 0
        if not plain:
            return
        self._tallies[on].add(tokens, seconds / plain)
        self._left -= 1
        if self._left <= 0 or (on and self._tallies[True].gain < 1.0 and not self._trying):
            self._next(cap, on)

    def _next(self, cap: int, on: bool) -> None:
        """Try the other way for a while, or stay with the better one."""
        price = self.price(cap)
        if not price:
            self.stop()
        elif not self._trying:
            self._trying, self._left = True, self.TRIAL
            self._tallies[not on] = _Tally()
            self.threshold = 0.0 if on else price
        else:
            cut = self._tallies[True].gain > self.BETTER * self._tallies[False].gain
            self._trying, self._left = False, self.KEPT_FOR
            self.threshold = price if cut else 0.0

    def stop(self) -> None:
        """Whole drafts for now."""
        self._trying, self._left, self.threshold = False, self.TRIAL, 0.0

    def price(self, cap: int) -> float:
        """What one more draft within this cap costs, in tokens; 0 where cutting cannot pay."""
        prospects = self._prospects
        plain, gain = prospects.plain(), prospects.gain(cap)
        first, last = prospects.seconds(1), prospects.seconds(cap)
        if cap < 2 or not plain or gain is None or first is None or last is None:
            return 0.0
        price = gain * (last - first) / ((cap - 1) * plain)
        surviving = prod(prospects.acceptance.chances()[:cap])
        return min(price, 0.95) if price >= self.LEAST_PRICE and surviving <= self.MOST_SURVIVING else 0.0
