"""The cap of one source for a row that runs by itself: which one, and when to leave drafting be. No MLX.

Both kinds park: they decode plainly while drafting loses, and try again on a schedule whose cost stays within
LOSS of plain decoding.
"""

from __future__ import annotations

from math import ceil
from typing import Protocol

from mlx_dspark.engine.prices import Prospects
from mlx_dspark.foundation.events import RoundReport

LOSS = 0.012
"""The share of plain decoding that probes may cost."""

SHORTEST_PARK, LONGEST_PARK = 4, 256


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
    parked. A probe, of the cap that loses least, is followed by another as long as probes pay; the row drafts
    again once the cap gains MARGIN. Plain rounds that drafting saved this row pay for more probes. Curves
    alone park nobody for long, since the first TRIED probes come soon, and now and then a cap is tried that
    they may overprice.
    """

    KEEP, MARGIN = 1.015, 1.02
    DEPTH_STEP = 1024
    TRIED = 2
    MOST_OWED = 2.0
    SHARE_OWED = 0.25
    LOOK_AFTER, HOPE = 32, 0.7
    MOST_SAVED, LOSS_OF_SAVED = 32.0, 0.03

    def __init__(self, prospects: Prospects, *, choose: bool) -> None:
        self._prospects = prospects
        self._choose = choose
        self._cap: int | None = None
        self._derived_at = (-1, 0)
        self._probe: int | None = None
        self._wait = 0
        self._saved = 0.0
        self._drafting_rounds = 0
        self._look = 0
        self._overrun = 0.0
        self._expected = 0.0

    @property
    def parked(self) -> bool:
        self._decide_first()
        return self._cap == 0 and not self.cap()

    def cap(self) -> int:
        self._decide_first()
        if self._cap == 0:
            return 0 if self._wait > 0 or self._probe is None else self._probe
        assert self._cap is not None
        return self._look or min(self._cap, self._prospects.reach(1))

    def _decide_first(self) -> None:
        if self._cap is None:
            self._decide()

    def observe(self, report: RoundReport, seconds: float, *, drafted: bool, warm: bool) -> None:
        del warm
        if self._cap is None:
            return
        plain = self._prospects.plain()
        if self._cap and drafted and plain:
            self._saved = min(self._saved + report.committed - seconds / plain, self.MOST_SAVED)
        if self._cap == 0 and not drafted:
            self._wait -= 1
            self._prospects.acceptance.fade()
        elif self._cap == 0:
            if plain:
                self._overrun += (seconds - self._expected) / plain
            self._judge_probe(report)
        elif drafted or not self._prospects.source.sporadic:
            self._decide()

    def _gains(self) -> dict[int, float]:
        return self._prospects.gains()

    def _decide(self) -> None:
        gains = self._gains()
        if not gains:
            self._cap = self._prospects.source.max_draft
            return
        self._cap = self._chosen(gains) if self._choose else self._derived()
        if gains.get(self._cap, 1.0) < 1.0:
            self._park(gains)

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

    def _park(self, gains: dict[int, float]) -> None:
        self._cap = 0
        self._overrun = min(self.MOST_OWED, self.SHARE_OWED * max(0.0, -self._saved))
        self._saved = max(0.0, self._saved)
        self._schedule(gains)

    def _schedule(self, gains: dict[int, float]) -> None:
        """Name the next probe, and put it off until plain rounds have paid for what it may cost."""
        prospects = self._prospects
        self._probe = self._untried(gains) or max(gains, key=lambda cap: gains[cap])
        plain, seconds = prospects.plain(), prospects.seconds(self._probe)
        assert plain
        assert seconds
        cost = seconds / plain * max(0.0, 1 - gains[self._probe])
        debt, self._overrun = max(0.0, self._overrun), 0.0
        self._expected = seconds
        share = LOSS if self._saved < cost else self.LOSS_OF_SAVED
        self._saved = max(0.0, self._saved - cost)
        wait = max(SHORTEST_PARK, ceil((cost + debt) / share))
        self._wait = LONGEST_PARK if not prospects.paying(1) else min(wait, LONGEST_PARK)
        if self._measured and prospects.times.drafts_timed(1, prospects.source.name) < self.TRIED:
            self._wait = min(self._wait, SHORTEST_PARK)

    def _untried(self, gains: dict[int, float]) -> int:
        """Without curves, the widest cap within reach, where none so wide was ever timed; else 0."""
        reach = self._prospects.reach(1)
        timed = self._prospects.times.widest_drafted(1, self._prospects.source.name) > reach
        return reach if not (self._measured or timed) and gains.get(reach, 0.0) > self.HOPE else 0

    def _judge_probe(self, report: RoundReport) -> None:
        gains = self._gains()
        if not gains:
            return
        best = max(gains, key=lambda cap: gains[cap]) if self._choose else self._derived()
        if gains[best] >= self.MARGIN:
            self._cap = best
        elif report.accepted < report.drafted or not self._prospects.paying(1):
            self._schedule(gains)


class TrialAlone:
    """A source that sizes each draft by itself, below the cap, so that only what it earned tells.

    A verify round earns the plain rounds it replaced and spends its own time. A source that spends more than
    it earns is parked for as long as it takes to bring the loss under LOSS of plain decoding, then tried
    again.
    """

    TRIAL = 4
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
        self._left_parked = max(least, ceil(self._lost / (LOSS * plain)))
        self._start_trial()
