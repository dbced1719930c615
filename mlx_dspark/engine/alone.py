"""The cap of one source for a row that runs by itself: which one, and when to leave drafting be. No MLX.

Both kinds park: they decode plainly while drafting loses, and try again as often as a budget allows
(`budget.py`).
"""

from __future__ import annotations

from math import ceil
from typing import Protocol

from mlx_dspark.engine.budget import Budget
from mlx_dspark.engine.prices import Prospects
from mlx_dspark.foundation.curves import expected_tokens
from mlx_dspark.foundation.events import RoundReport

SHORTEST_PARK, LONGEST_PARK = 4, 256
"""Plain rounds between probes."""


class Alone(Protocol):
    """Answers for rounds of one row. `observe` is told every one; `drafted`: this source did."""

    @property
    def parked(self) -> bool: ...

    def cap(self) -> int: ...

    def observe(self, report: RoundReport, seconds: float, *, drafted: bool, warm: bool) -> None: ...


class BlockAlone:
    """A source that drafts as many tokens as it is allowed.

    With `choose` the cap is the one with the greatest gain, chosen anew every round, where a new one must
    gain KEEP more; else the one derived for the request and its depth. Where it does not gain, the row is
    parked, and probes with the cap that loses least when its budget covers that; at once, on debt, where what
    would be had if the content were known is PROMISING. Curves alone park nobody for long, since the first
    TRIED probes come soon, and now and then a cap is tried that they may overprice. While a cap gains little,
    a plain round now and then tells what plain costs.
    """

    KEEP, SURE = 1.005, 1.04
    DEPTH_STEP = 1024
    TRIED = 2
    LOOK_AFTER, HOPE = 32, 0.7
    PROMISING = 0.08
    RECONSIDER_AFTER = 4
    LITTLE, COMPARE_AFTER, COMPARISONS = 1.12, 16, 9

    def __init__(self, prospects: Prospects, *, choose: bool) -> None:
        self._prospects = prospects
        self._choose = choose
        self._budget = Budget()
        self._cap: int | None = None
        self._derived_at = (-1, 0)
        self._probe = self._waited = 0
        self._drafting_rounds = self._look = 0
        self._since_plain, self._compare = 0, False

    @property
    def parked(self) -> bool:
        self._decide_first()
        return not self._cap and not self._probe

    def cap(self) -> int:
        self._decide_first()
        if not self._cap:
            return self._probe
        return 0 if self._compare else self._look or min(self._cap, self._prospects.reach(1))

    def _decide_first(self) -> None:
        if self._cap is None:
            self._decide()

    def observe(self, report: RoundReport, seconds: float, *, drafted: bool, warm: bool) -> None:
        del warm
        self._budget.count()
        if self._cap is None:
            return
        self._since_plain = self._since_plain + 1 if drafted else 0
        if drafted:
            self._account(report, seconds)
            self._decide()
        elif self._cap == 0:
            if not self._probe:
                self._wait()
        elif self._compare or not self._prospects.source.sporadic:
            self._decide()

    def _account(self, report: RoundReport, seconds: float) -> None:
        plain = self._prospects.plain()
        if not plain:
            return
        self._budget.draft(report.committed, seconds / plain)
        if not self._cap:
            tokens = expected_tokens(self._prospects.acceptance.chances(), report.drafted)
            self._budget.charge(seconds / plain - tokens)

    def _wait(self) -> None:
        self._prospects.acceptance.fade()
        self._budget.wait()
        self._waited += 1
        if self._waited % self.RECONSIDER_AFTER == 0:
            self._decide()

    def _decide(self) -> None:
        gains, self._compare = self._prospects.gains(), False
        if not gains:
            self._cap = self._prospects.source.max_draft
            return
        cap = self._chosen(gains) if self._choose else self._derived()
        gain = gains.get(cap, 1.0)
        if gain >= (self.SURE if self._budget.exhausted else 1.0):
            self._cap, self._probe, self._waited = cap, 0, 0
            self._compare = gain < self.LITTLE and self._unsure_of_plain
        else:
            self._park(gains)

    def _park(self, gains: dict[int, float]) -> None:
        if self._cap:
            self._budget.park()
        self._cap = self._look = 0
        probe = self._untried(gains) or max(gains, key=lambda cap: gains[cap])
        self._probe = probe if self._due(probe, gains[probe]) else 0
        if self._probe:
            self._waited = 0

    @property
    def _unsure_of_plain(self) -> bool:
        few = self._prospects.times.samples(1, 1) < self.COMPARISONS
        return few and self._since_plain >= self.COMPARE_AFTER

    def _due(self, probe: int, gain: float) -> bool:
        """Whether a probe of this cap should be made now."""
        prospects, rested = self._prospects, self._waited >= SHORTEST_PARK
        if self._waited >= LONGEST_PARK or not prospects.paying(1):
            return self._waited >= LONGEST_PARK
        if rested and self._measured and prospects.times.drafts_timed(1, prospects.source.name) < self.TRIED:
            return True
        plain, seconds = prospects.plain(), prospects.seconds(probe)
        assert plain
        assert seconds
        cost = max(0.0, 1 - gain) * seconds / plain
        if rested and self._budget.covers(cost):
            return True
        return self._budget.lends(cost) and prospects.promise() > self.PROMISING

    def _chosen(self, gains: dict[int, float]) -> int:
        """The cap that gains most by the row's own acceptance; the present one unless another is better."""
        best = max(gains, key=lambda cap: gains[cap])
        self._drafting_rounds += 1
        curious = self._drafting_rounds % self.LOOK_AFTER == 0
        self._look = self._hoped_for(gains, gains[best]) if curious else 0
        return self._cap if self._cap and gains[best] <= self.KEEP * gains[self._cap] else best

    def _hoped_for(self, gains: dict[int, float], best: float) -> int:
        """The cap, wider than any timed of late, that would gain most if the curves overstate its price as
        much as HOPE says; 0 where none would gain more than the best."""
        widest = self._prospects.times.widest_drafted(1, self._prospects.source.name) - 1
        reach = self._prospects.reach(1)
        beyond = {cap: gain / self.HOPE for cap, gain in gains.items() if widest < cap <= reach}
        hoped = max(beyond, key=lambda cap: beyond[cap], default=0)
        return hoped if hoped and beyond[hoped] > self.KEEP * best else 0

    def _derived(self) -> int:
        """The cap that gains most by the acceptance of the pair, found once for a request and depth; without
        curves, whatever could pay."""
        if not self._measured:
            return max(self._prospects.paying(1), default=1)
        place = self._prospects.depth // self.DEPTH_STEP
        if self._derived_at[0] != place:
            gains = self._prospects.gains(self._prospects.pool.chances())
            self._derived_at = place, max(gains, key=lambda cap: gains[cap])
        return self._derived_at[1]

    @property
    def _measured(self) -> bool:
        return self._prospects.times.measured(1)

    def _untried(self, gains: dict[int, float]) -> int:
        """Without curves, the widest cap within reach, where none so wide was ever timed; else 0."""
        reach = self._prospects.reach(1)
        timed = self._prospects.times.widest_drafted(1, self._prospects.source.name) > reach
        return reach if not (self._measured or timed) and gains.get(reach, 0.0) > self.HOPE else 0


class TrialAlone:
    """A source that sizes each draft by itself, below the cap, so that only what it earned tells.

    A verify round earns the plain rounds it replaced and spends its own time. A source that spends more than
    it earns is parked for as long as it takes to bring the loss under LOSS of plain decoding, then tried
    again.
    """

    TRIAL = 4
    LOSS = 0.012
    MARGIN = 1.02
    DECAY = 0.85

    def __init__(self, prospects: Prospects) -> None:
        self._prospects = prospects
        self._left_parked = 0
        self._start_trial()

    def _start_trial(self) -> None:
        self._earned = self._spent = self._lost = 0.0
        self._rounds = 0

    @property
    def parked(self) -> bool:
        return self._left_parked > 0

    def cap(self) -> int:
        return 0 if self._left_parked else max(self._prospects.paying(1), default=1)

    def observe(self, report: RoundReport, seconds: float, *, drafted: bool, warm: bool) -> None:
        plain = self._prospects.plain()
        if not drafted:
            self._left_parked = max(0, self._left_parked - 1)
        elif plain is not None and warm:
            self._weigh(report.committed * plain, seconds, plain)
        elif plain is not None:
            self._pass_over(plain)

    def _weigh(self, earned: float, spent: float, plain: float) -> None:
        self._earned = self.DECAY * self._earned + earned
        self._spent = self.DECAY * self._spent + spent
        self._lost = max(0.0, self._lost + spent - earned)
        self._rounds += 1
        hopeless = not self._prospects.paying(1)
        losing = self._earned < self._spent * self.MARGIN
        if hopeless or (losing and (self._rounds >= self.TRIAL or self._lost > 2 * plain)):
            self._park(plain, hopeless=hopeless)

    def _pass_over(self, plain: float) -> None:
        """A round of the trial whose time tells nothing."""
        self._rounds += 1
        if not self._prospects.paying(1):
            self._park(plain, hopeless=True)

    def _park(self, plain: float, *, hopeless: bool) -> None:
        least = LONGEST_PARK if hopeless else SHORTEST_PARK
        self._left_parked = max(least, ceil(self._lost / (self.LOSS * plain)))
        self._start_trial()
