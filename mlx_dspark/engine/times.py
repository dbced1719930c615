"""What rounds take: by the curves measured beforehand, and by the rounds seen since, which count for more."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import median

from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.events import RoundReport

DEPTH_STEP = 512
"""Depths this near have the same price."""


SAME = 0.005
"""Medians this near are the same, relatively, however little rounds differ."""

SPAN = 2
"""Of widths less apart, the slope of a correction is mostly noise."""


@dataclass(slots=True)
class _Samples:
    """The newest times of one kind of round, as multiples of what the curves say, which is 1 without them.
    `overlapped`: of rounds that were launched before their predecessor landed. They tell the price once there
    are enough of them."""

    apart: deque[float]
    overlapped: deque[float]
    at: int = 0
    middle: float = 0.0
    count: int = 0

    @property
    def by_itself(self) -> float:
        """The median of those that were not launched ahead, as rounds with drafts are not."""
        return median(self.apart) if self.apart and self.overlapped else self.middle

    @property
    def kept(self) -> int:
        """How many there are, of either kind; `count` is of those that tell the price."""
        return len(self.apart) + len(self.overlapped)

    def add(self, value: float, at: int, overlapped: bool, same: float) -> bool:
        """Whether that moved the middle by more than `same`, relatively, or few are known."""
        (self.overlapped if overlapped else self.apart).append(value)
        enough = len(self.overlapped) >= RoundTimes.TRUSTED or not self.apart
        best = self.overlapped if enough else self.apart
        before, few, middle = self.middle, self.count < RoundTimes.TRUSTED, median(best)
        self.count, self.at = len(best), at
        if not few and abs(middle - before) <= same * before:
            return False
        self.middle = middle
        return True


@dataclass
class _Known:
    """All that is known of rounds of so many rows: `by_width` per source, "" being plain."""

    by_width: dict[str, dict[int, _Samples]] = field(default_factory=dict)
    rounds: int = 0
    plain_since: int = 0
    compared_at: int = 0
    probe_after: int = 0
    times: dict[str, dict[int, _Samples]] = field(default_factory=dict)
    prices: dict[tuple[str, int, int], float | None] = field(default_factory=dict)
    curves: dict[tuple[str, int, int], tuple[float | None, ...]] = field(default_factory=dict)
    repriced: int = 0

    def reprice(self) -> None:
        """Something was learnt: what was derived is derived anew when it is asked for."""
        self.repriced += 1
        self.prices.clear()
        self.curves.clear()
        self.times.clear()


class RoundTimes:
    """Live round times in seconds by number of rows, source and width: the median of the newest few, in
    place of the curves' price for it, and as a correction of their prices for the widths around it. Without
    curves a width that was never timed lies on the line through its neighbours.

    A round that was launched before its predecessor landed is charged from that landing on. One whose time
    the reader of the events took a part of tells nothing and is left out. Where plain rounds were launched
    ahead, as plain decoding does it, those alone say what plain costs. Against curves, times that are `STALE`
    rounds old count for less.
    """

    KEPT = 21
    TRUSTED, CHANCE = 3, 2.0
    STALE = 512
    CHECK_AFTER, CHECKED_BY = 256, 2
    MOST_WAITED = 0.1
    MOST_OFF = 2.0
    SAME_OF_SPREAD = 0.125
    SOONEST_PROBE, LATEST_PROBE = 16, 256
    PROBE_SHARE = 0.01

    def __init__(self, curves: CostCurves | None = None) -> None:
        self._curves = curves
        self._known: dict[int, _Known] = {}
        self._expectations: dict[tuple[int, int, str, int], float | None] = {}
        self._landed_at = 0.0
        self._charged = 0.0
        self._overlapped = False
        self.version = 0
        self.spread = 0.04

    def charge(self, report: RoundReport, *, warm: bool = True) -> float:
        """Seconds this round took; the same answer for each of its rows. One that is not `warm` tells nothing
        of the next like it."""
        if report.landed_at == self._landed_at:
            return self._charged
        self._charged = self._taken(report)
        self._overlapped = overlapped = report.launched_at < self._landed_at
        self._landed_at = report.landed_at
        if report.certain == 1:
            self.version += 1
            known = self._of(report.rows)
            known.rounds += 1
            self._count(report, known, warm)
            if warm and report.waited <= self.MOST_WAITED * self._charged:
                self._note(report, known, overlapped)
        return self._charged

    def usual(self, report: RoundReport) -> float | None:
        """What rounds like the one charged last take by their median, else by the curves; None where neither
        tells. A machine that does other work now and then makes their mean longer than their median, by which
        rounds are compared."""
        source, overlapped = report.source if report.width > 1 else "", self._overlapped
        expected = self._expected(report.rows, report.width, source, report.depth)
        samples = self._of(report.rows).by_width.get(source, {}).get(report.width)
        if samples is not None:
            known = samples.overlapped if overlapped and report.width == 1 else samples.apart
            if len(known) >= self.TRUSTED:
                return median(known) * (expected or 1.0)
        return expected and self.seconds(report.rows, report.width, source=source, depth=report.depth)

    def plausible(self, report: RoundReport) -> float:
        """The seconds charged last, but no more of them than are such a round's doing: the first of a shape
        may make kernels for longer than a whole answer takes."""
        return min(self._charged, self._most(report, self.usual(report)))

    def believable(self, report: RoundReport) -> bool:
        """Whether a round that is still to be charged took what its like may take."""
        source = report.source if report.width > 1 else ""
        price = self.seconds(report.rows, report.width, source=source, depth=report.depth)
        return self._taken(report) <= self._most(report, price)

    def _taken(self, report: RoundReport) -> float:
        """Seconds of a round that is still to be charged."""
        return report.landed_at - max(report.launched_at, self._landed_at)

    def _most(self, report: RoundReport, price: float | None) -> float:
        """What such a round takes at the most, where its price is known or that of a plain one."""
        plain = self.seconds(report.rows, 1, depth=report.depth)
        known = price if price is not None or plain is None else report.width * plain
        return inf if known is None else self.MOST_OFF * known

    def _of(self, rows: int) -> _Known:
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = _Known(probe_after=self.SOONEST_PROBE)
        return known

    def _count(self, report: RoundReport, known: _Known, warm: bool) -> None:
        if report.width > 1 and not warm:
            return
        if report.width > 1:
            later = 2 * known.probe_after
            usual = min(later, self.LATEST_PROBE) if self.probing(report.rows) else self.SOONEST_PROBE
            known.probe_after = max(usual, self._affordable(report))
        known.plain_since = known.plain_since + 1 if report.width == 1 else 0
        if known.plain_since >= self.CHECKED_BY:
            known.compared_at = known.rounds

    def _affordable(self, report: RoundReport) -> int:
        """After how many plain rounds one like the present costs no more than its share of them."""
        plain = self.seconds(report.rows, 1, depth=report.depth)
        return ceil((self._charged - plain) / (self.PROBE_SHARE * plain)) if plain else 0

    def _note(self, report: RoundReport, known: _Known, overlapped: bool) -> None:
        source = report.source if report.width > 1 else ""
        expected = self._expected(report.rows, report.width, source, report.depth) or 1.0
        by_width = known.by_width.setdefault(source, {})
        samples = by_width.get(report.width)
        if samples is None:
            samples = by_width[report.width] = _Samples(deque(maxlen=self.KEPT), deque(maxlen=self.KEPT))
        elif samples.count >= self.TRUSTED:
            off = abs(self._charged / expected / samples.middle - 1)
            self.spread += 0.05 * (min(off, 0.5) - self.spread)
        same = max(SAME, self.SAME_OF_SPREAD * self.spread)
        if samples.add(self._charged / expected, known.rounds, overlapped and report.width == 1, same):
            known.reprice()

    def _expected(self, rows: int, width: int, source: str, depth: int) -> float | None:
        """What the curves say; of a source that was never timed, as if it drafted in no time."""
        if self._curves is None:
            return None
        at = (rows, width, source, depth // DEPTH_STEP)
        if at not in self._expectations:
            depth = at[3] * DEPTH_STEP
            verify = self._curves.verify_seconds(width, depth=depth, rows=rows)
            draft = self._curves.draft_seconds(source, width - 1, depth=depth, rows=rows)
            whole = None if verify is None else verify + (draft or 0.0) + self._curves.overhead
            self._expectations[at] = whole or None
        return self._expectations[at]

    def learn(self, curves: CostCurves) -> None:
        """Take curves that tell more. What was noted of rows that had no price so far is let go: it was in
        seconds, and is not of a price."""
        unpriced = [rows for rows in self._known if not self.measured(rows)]
        self._curves = curves
        self._expectations.clear()
        for rows, known in self._known.items():
            if rows in unpriced and self.measured(rows):
                known.by_width.clear()
            known.reprice()
        self.version += 1

    def repriced(self, rows: int) -> int:
        """A number that changes whenever a price of so many rows may have."""
        return self._of(rows).repriced

    def measured(self, rows: int) -> bool:
        """Whether curves say what rounds of so many rows cost."""
        return self._expected(rows, 1, "", 0) is not None

    def samples(self, rows: int, width: int) -> int:
        """How many times of such rounds are known, whoever drafted."""
        known = self._known.get(rows)
        return sum(each[width].kept for each in known.by_width.values() if width in each) if known else 0

    def runs_ahead(self, rows: int) -> bool:
        """Whether the price of a plain round is that of one launched ahead."""
        known = self._known.get(rows)
        plain = known.by_width.get("", {}).get(1) if known else None
        return plain is not None and len(plain.overlapped) >= self.TRUSTED

    def drafts_timed(self, rows: int, source: str) -> int:
        """How many times of rounds are known in which this source drafted."""
        known = self._known.get(rows)
        return sum(each.count for each in known.by_width.get(source, {}).values()) if known else 0

    def widest_drafted(self, rows: int, source: str) -> int:
        """The widest round timed of late in which this source drafted; 0 when there was none."""
        known = self._known.get(rows)
        if known is None:
            return 0
        by_width = known.by_width.get(source, {})
        return max((w for w, each in by_width.items() if known.rounds - each.at <= self.STALE), default=0)

    def checking(self, rows: int) -> bool:
        """Whether no rounds with so many rows were plain for so long that some are due, to compare with."""
        known = self._known.get(rows)
        return known is not None and known.rounds - known.compared_at >= self.CHECK_AFTER

    def probing(self, rows: int) -> bool:
        """Whether so many rows have decoded plainly for so long that a draft is due, to see what it brings;
        rarer after each that was followed by none, and the more it costs."""
        known = self._of(rows)
        return known.plain_since >= known.probe_after

    def widest(self, rows: int) -> int:
        """The widest round seen with so many rows; 0 when there was none."""
        known = self._known.get(rows)
        return max((width for each in known.by_width.values() for width in each), default=0) if known else 0

    def seconds(self, rows: int, width: int, *, source: str = "", depth: int = 0) -> float | None:
        """The usual time of a round of this width, in which `source` drafts; None where nothing tells it."""
        known = self._known.get(rows) or self._of(rows)
        kind = (source if width > 1 else "", width, depth // DEPTH_STEP)
        if kind not in known.prices:
            known.prices[kind] = self._price(known, rows, width, kind[0], kind[2] * DEPTH_STEP)
        return known.prices[kind]

    def curve(self, rows: int, widest: int, *, source: str, depth: int = 0) -> tuple[float | None, ...]:
        """`seconds` of every width from 1 to `widest`; the same object until something is learnt."""
        known, place = self._of(rows), depth // DEPTH_STEP
        found = known.curves.get((source, widest, place))
        if found is None:
            found = tuple(
                self.seconds(rows, width, source=source, depth=depth) for width in range(1, widest + 1)
            )
            known.curves[source, widest, place] = found
        return found

    def _price(self, known: _Known, rows: int, width: int, source: str, depth: int) -> float | None:
        if source not in known.times:
            known.times[source] = known.by_width.get("", {}) | known.by_width.get(source, {})
        times = known.times[source]
        expected = self._expected(rows, width, source, depth)
        if expected is None:
            return _on_line(
                {w: each.middle if w == width else each.by_itself for w, each in times.items()}, width
            )
        return expected * self._correction(times, width, known.rounds)

    def _correction(self, times: Mapping[int, _Samples], width: int, now: int) -> float:
        """By how much the curves are off at this width: as seen there, else as around it. What is seen there
        counts by how far it is beyond chance (James and Stein 1961)."""
        own = times.get(width)
        others = {w: each.by_itself for w, each in times.items() if w != width}
        around = _between(others, width) if others else 1.0
        if own is None:
            return around
        count = 1 if now - own.at > self.STALE else own.count
        off = own.middle - around
        if not off:
            return around
        chance = self.CHANCE * (self.spread * own.middle) ** 2 / count
        trust = 1.0 if count >= self.TRUSTED else count / (count + 2)
        return around + trust * off * max(0.0, 1 - chance / (off * off))


def _between(known: Mapping[int, float], width: int) -> float:
    """On the line between neighbours; beyond the last on the line through those that drafted, if they lie
    SPAN apart, at most doubled and at least halved."""
    below = max((w for w in known if w <= width), default=None)
    above = min((w for w in known if w >= width), default=None)
    if below is None or below == above:
        return known[min(known) if below is None else below]
    if above is not None:
        line = known[below] + (known[above] - known[below]) * (width - below) / (above - below)
        return min(line, known[above]) if below == 1 else line
    first = min((w for w in known if w > 1), default=below)
    if below - first < SPAN:
        return known[below]
    line = known[below] + (known[below] - known[first]) * (width - below) / (below - first)
    return min(max(line, known[below] / 2), known[below] * 2)


def _on_line(known: Mapping[int, float], width: int) -> float | None:
    """The time at a width: measured, else on the line through its neighbours, plain being one of them."""
    if width in known:
        return known[width]
    if 1 not in known or len(known) < 2:
        return None
    above = min((w for w in known if w > width), default=max(known))
    below = max((w for w in known if w < min(width, above)), default=1)
    slope = max(0.0, (known[above] - known[below]) / (above - below))
    return known[below] + slope * (width - below)
