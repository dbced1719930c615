"""Caps that follow what is seen: acceptance per row, round times of all rows. Arithmetic; no MLX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mlx_dspark.engine.acceptance import Pool
from mlx_dspark.engine.alone import Alone, BlockAlone, TrialAlone
from mlx_dspark.engine.cutting import Cutting
from mlx_dspark.engine.prices import Prospects
from mlx_dspark.engine.standby import Standby
from mlx_dspark.engine.times import DEPTH_STEP, RoundTimes
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.events import UNKNOWN_OUTLOOK, Outlook, RoundReport
from mlx_dspark.foundation.source import Source


def plain_samples(rows: int) -> int:
    """How many plain rounds are timed before there are drafts."""
    return 3 if rows == 1 else 6


class _SourceCap:
    """One source for one row.

    Alone, the row decides by itself (`alone.py`). In company nothing is tried out row by row, since all rows
    wait for the drafts of one: the cap is the one at which the whole batch is expected to be fastest, by what
    the width costs so many rows and by the acceptance so far of this row and of `others`. It is 0 where none
    gains, but for a probe that all rows make at once.
    """

    MARGIN = 1.02
    PATIENCE = 8
    """Short drafts of a source that finds some now and then, while plain rounds are still to be timed."""

    UNLIKELY = 0.02

    def __init__(self, prospects: Prospects, alone: Alone, others: Others) -> None:
        self.prospects = prospects
        self._alone = alone
        self._others = others
        self._compared: set[int] = set()
        self._unmeasured = 0
        self._gained: tuple[tuple[int, ...], int] = (), 0
        self._expected: tuple[int, tuple[float, ...]] = -1, ()
        self._cutting = Cutting(prospects) if prospects.source.confident else None

    def threshold(self, rows: int) -> float:
        return self._cutting.threshold if self._cutting is not None and rows == 1 else 0.0

    @property
    def parked(self) -> bool:
        """Whether the row by itself decodes plainly."""
        return not self.measuring(1) and self._alone.parked

    def measuring(self, rows: int) -> bool:
        """Whether plain rounds are needed to compare with. Curves do not replace them: where both are off by
        as much, drafts would be thought to pay for ever."""
        if rows in self._compared:
            return False
        if self.prospects.times.samples(rows, 1) < plain_samples(rows):
            return True
        self._compared.add(rows)
        return False

    def cap(self, rows: int) -> int:
        if self.measuring(rows):
            source = self.prospects.source
            short = (source.own_length or source.sporadic) and self._unmeasured < self.PATIENCE
            return int(short and rows == 1)
        times = self.prospects.times
        if times.checking(rows):
            return 0
        return self._alone.cap() if rows == 1 else self._gainful_now(rows) or int(times.probing(rows))

    def _gainful_now(self, rows: int) -> int:
        """`_gainful`, worked out anew only where something that it goes by has changed."""
        prospects = self.prospects
        known = (
            rows,
            prospects.times.repriced(rows),
            prospects.pool.counted,
            prospects.depth // DEPTH_STEP,
            self._others.changed,
        )
        if self._gained[0] != known:
            self._gained = known, self._gainful(rows)
        return self._gained[1]

    def _gainful(self, rows: int) -> int:
        """The cap at which all rows together are expected to be fastest; 0 where that is plain decoding."""
        prospects = self.prospects
        plain, *drafting = prospects.curve(rows)
        if plain is None:
            return 0
        others, own = self._others.expected(self), self.expected()
        drafts = prospects.pool.together(rows) - 1
        best, fastest = 0, rows / plain
        for cap, seconds in enumerate(drafting[: min(prospects.reach(rows), len(own))], 1):
            if seconds is None:
                break
            tokens = rows + own[cap - 1] + drafts * others[min(cap, len(others)) - 1]
            rate = tokens / (plain + self.MARGIN * max(0.0, seconds - plain))
            if rate > fastest:
                best, fastest = cap, rate
        return best

    def expected(self) -> tuple[float, ...]:
        """By cap, how many drafts of this row are expected to be accepted in company; it ends where one more
        is unlikely to be."""
        counted = self.prospects.pool.counted
        if self._expected[0] != counted:
            expected, total, survival = [], 0.0, 1.0
            for position in range(self.prospects.source.max_draft):
                survival *= self.prospects.acceptance.among(position)
                total += survival
                if survival < self.UNLIKELY and expected:
                    break
                expected.append(total)
            self._expected = counted, tuple(expected)
        return self._expected[1]

    def observe(self, report: RoundReport, seconds: float, warm: bool) -> None:
        drafted = bool(report.drafted) and report.source == self.prospects.source.name
        self.prospects.depth = report.depth + report.committed
        self._unmeasured += drafted and self.measuring(report.rows)
        whole = not self.threshold(report.rows)
        if drafted and whole:
            self.prospects.count(report)
        if drafted and warm and report.rows == 1 and self._cutting is not None:
            self._cutting.observe(report.committed, seconds, report.cap)
        if (whole or not drafted) and report.rows == 1 and report.certain == 1:
            self._alone.observe(report, seconds, drafted=drafted, warm=warm)


class Others:
    """One source for all rows of a batch: those of its last round."""

    def __init__(self, caps: LiveCaps, name: str) -> None:
        self._caps = caps
        self._name = name
        self._sum: tuple[tuple[int, int], list[float], frozenset[int]] = (-1, -1), [], frozenset()

    @property
    def changed(self) -> int:
        """A number that changes when the rows do."""
        return self._caps.membership

    def expected(self, one: _SourceCap) -> Sequence[float]:
        """By cap, the drafts of a row other than `one` that are expected to be accepted, on average; as of
        `one` where there is no other."""
        total, places = self._total(one.prospects.pool.counted)
        n, own = len(places), one.expected()
        if id(one) not in places:
            return [each / n for each in total] if n else own
        if n == 1:
            return own
        last = len(own) - 1
        return [(each - own[min(i, last)]) / (n - 1) for i, each in enumerate(total)]

    def _total(self, counted: int) -> tuple[list[float], frozenset[int]]:
        now = counted, self._caps.membership
        if self._sum[0] != now:
            sources = self._caps.members(self._name)
            curves = [source.expected() for source in sources]
            length = max(map(len, curves), default=0)
            total = [sum(curve[min(i, len(curve) - 1)] for curve in curves) for i in range(length)]
            self._sum = now, total, frozenset(map(id, sources))
        return self._sum[1], self._sum[2]


class _Company(NamedTuple):
    """What a row was allowed in company, and all that it went by."""

    known: tuple[int, ...]
    place: int
    caps: Mapping[str, int]
    parked: bool


class LiveRowCaps:
    """Caps of one row from its own acceptance and the round times seen so far.

    In company they are worked out anew only where something that they go by has changed: there the host's
    time for one row is that of all.
    """

    COLD = 3
    """Rounds of a shape in which something may be made ready for it."""

    def __init__(self, shared: LiveCaps) -> None:
        self._shared = shared
        self._begun: set[str] = set()
        self._depth = 0
        self._company = _Company((), 0, {}, False)
        self._sources = {source.name: _SourceCap(*shared.parts(source)) for source in shared.sources}
        steady = {source.name for source in shared.sources if not source.sporadic}
        self._steady = steady or set(self._sources)

    def caps(self, rows: int = 1) -> Mapping[str, int]:
        pinned = self._shared.pinned
        if pinned is not None:
            return pinned
        if rows > 1:
            return self._in_company(rows).caps
        return self._caps(1)

    def _caps(self, rows: int) -> Mapping[str, int]:
        return {
            name: 0 if self._left_alone(source, rows) else source.cap(rows)
            for name, source in self._sources.items()
        }

    def _left_alone(self, source: _SourceCap, rows: int) -> bool:
        """Whether waiting for this source costs so many rows more than its drafts bring."""
        return source.prospects.source.sporadic and self._shared.standby.over(rows)

    def settled(self, rows: int) -> object | None:
        return self._shared.known(rows) if rows > 1 and self._shared.pinned is None else None

    def parked(self, rows: int = 1) -> bool:
        """By the sources that always have a draft, where there is one: that others find none now is no sign
        of time lost."""
        if self._shared.pinned is not None or not self._sources:
            return False
        if rows > 1:
            return self._in_company(rows).parked
        steady = [self._sources[name] for name in self._steady]
        return all(source.parked or self._left_alone(source, 1) for source in steady)

    def _in_company(self, rows: int) -> _Company:
        shared, place = self._shared.known(rows), self._depth // DEPTH_STEP
        if self._company.known is not shared or self._company.place != place:
            caps = self._caps(rows)
            parked = not any(caps[name] or self._sources[name].measuring(rows) for name in self._steady)
            self._company = _Company(shared, place, caps, parked)
        return self._company

    def measuring(self, rows: int = 1) -> bool:
        if self._shared.pinned is not None:
            return False
        return any(source.measuring(rows) for source in self._sources.values())

    def source(self, name: str) -> _SourceCap:
        return self._sources[name]

    def thresholds(self, rows: int = 1) -> Mapping[str, float]:
        return {name: source.threshold(rows) for name, source in self._sources.items()}

    def outlook(self, rows: int, source: str, drafted: int, width: int) -> Outlook:
        times = self._shared.times
        plain = times.seconds(rows, 1, depth=self._depth)
        if not (times.measured(rows) or times.samples(rows, 1) >= plain_samples(rows)):
            return UNKNOWN_OUTLOOK
        if width == 1:
            return Outlook(1.0 if plain else None, plain)
        if source in self._sources:
            return Outlook(self._sources[source].prospects.gain(width - 1, rows, drafted), plain)
        return Outlook(None, plain)

    def observe(self, report: RoundReport) -> None:
        self._depth = report.depth + report.committed
        self._shared.drafted += bool(report.drafted)
        if report.rows > 1:
            self._observe_in_company(report)
            return
        warm = self._warm(report)
        whole = not (report.drafted and self.thresholds(report.rows).get(report.source))
        seconds = self._shared.times.charge(report, warm=warm and whole)
        if report.certain == 1:
            seconds = self._shared.times.plausible(report)
            self._shared.stood_by(report, report.committed, {report.source})
        for source in self._sources.values():
            source.observe(report, seconds, warm)

    def _observe_in_company(self, report: RoundReport) -> None:
        warm = self._warm(report)
        if report.certain == 1:
            self._shared.ran(self, report, warm)
        else:
            self._shared.times.charge(report)
        for source in self._sources.values():
            if report.drafted:
                source.observe(report, 0.0, warm)
            else:
                source.prospects.depth = self._depth

    def _warm(self, report: RoundReport) -> bool:
        """Whether a round tells what the next like it takes. Kernels are made ready in a round wider than any
        before, in company in each that is of another shape; and a row alone may have its prompt read by the
        drafter before its first draft. What is compiled for a shape may be so in its second round, too: one
        of the first that takes far longer than it should is not believed."""
        known = self._sources.get(report.source)
        if not report.drafted or known is None:
            return True
        shape, seen = (report.rows, report.width), self._shared.seen[report.source]
        if report.rows > 1:
            warm = shape in seen
        elif known.prospects.source.own_length or known.prospects.source.sporadic:
            warm = True
        else:
            widest = max((width for rows, width in seen if rows == 1), default=0)
            warm = report.source in self._begun and report.width <= widest
            self._begun.add(report.source)
        seen[shape] += 1
        return warm and (seen[shape] > self.COLD or self._shared.times.believable(report))


class LiveCaps:
    """Caps that never lose for long: a source that costs more than it earns is parked and probed. Round times
    and acceptance of all rows are kept here, so that new rows begin with what is known.

    `choose=True` picks the length every round; `choose=False` once for a request and its depth, from `curves`
    and the `acceptance` recorded or seen, and without curves it drafts whole blocks or nothing. `pinned` caps
    are never overridden; times and acceptance are then kept for the outlook alone.
    """

    SETTLED = 2

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        choose: bool,
        curves: CostCurves | None = None,
        acceptance: Mapping[str, Sequence[float]] | None = None,
        pinned: Mapping[str, int] | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.times = RoundTimes(curves)
        self.standby = Standby(self.times)
        self.pinned = pinned
        self.seen: dict[str, Counter[tuple[int, int]]] = {source.name: Counter() for source in sources}
        """How often a source drafted in rounds of so many rows and such a width."""
        self.drafted = 0
        """Rounds of rows with drafts."""
        self.membership = 0
        """Changes when a batch has other rows."""
        self._members: list[LiveRowCaps] = []
        self._running: list[LiveRowCaps] = []
        self._running_at = 0.0
        self._committed = 0
        self._drafters: set[str] = set()
        self._round: RoundReport
        self._warm = True
        self._settled = 0
        self._known: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        self._choose = choose
        self._seldom = {"", *(source.name for source in sources if source.sporadic)}
        recorded = acceptance or {}
        self._pools = {
            s.name: Pool(
                s.max_draft,
                recorded.get(s.name, ()),
                likely=s.likely,
                rare=s.sporadic or s.own_length,
            )
            for s in sources
        }
        self._others = {source.name: Others(self, source.name) for source in sources}

    def parts(self, source: Source) -> tuple[Prospects, Alone, Others]:
        """What a new row has of a source."""
        prospects = Prospects(source, self.times, self._pools[source.name])
        others = self._others[source.name]
        if source.own_length:
            return prospects, TrialAlone(prospects), others
        return prospects, BlockAlone(prospects, choose=self._choose or source.sporadic), others

    def ran(self, row: LiveRowCaps, report: RoundReport, warm: bool) -> None:
        """A row ran in company. The rows of a round tell it one after the other; with the last of them the
        round is charged, and is no price where it was not `warm` for one, or soon after the batch changed:
        room for other rows is made in its first rounds."""
        if report.landed_at != self._running_at:
            self._running, self._running_at = [], report.landed_at
            self._round, self._warm = report, True
            self._committed, self._drafters = 0, set()
        self._running.append(row)
        self._committed += report.committed
        self._drafters.add(report.source)
        self._warm &= warm
        if report.drafted and not self._round.drafted:
            self._round = report
        if len(self._running) < report.rows:
            return
        self._settled += 1
        if self._running != self._members:
            self._members = self._running
            self.membership += 1
            self._settled = 0
        warm = self._warm and self._settled >= self.SETTLED
        self.times.charge(self._round, warm=warm)
        if warm:
            self.stood_by(self._round, self._committed, self._drafters)

    def stood_by(self, report: RoundReport, committed: int, drafters: set[str]) -> None:
        """The round charged last, in which these drafted; "" where a row had no draft."""
        usual = self.times.usual(report)
        self.standby.ran(
            report.rows,
            self.times.plausible(report) if usual is None else usual,
            committed,
            drafted=bool(report.drafted) and drafters <= self._seldom,
            held=report.held_back and report.width == 1,
            depth=report.depth,
        )

    def members(self, name: str) -> list[_SourceCap]:
        """A source of each row of the batch that ran last."""
        return [row.source(name) for row in self._members]

    def known(self, rows: int) -> tuple[int, ...]:
        """Another tuple whenever caps of so many rows may have changed."""
        now = rows, self.times.version, self.drafted, self.standby.over(rows)
        if self._known[0] != now:
            plain = min(self.times.samples(rows, 1), plain_samples(rows))
            due = self.times.probing(rows), self.times.checking(rows)
            known = rows, self.times.repriced(rows), *due, *now[2:], plain
            self._known = now, known if known != self._known[1] else self._known[1]
        return self._known[1]

    def learn(self, curves: CostCurves) -> None:
        """Go by these curves, which tell more than those before them, from now on."""
        self.times.learn(curves)

    def row(self) -> LiveRowCaps:
        return LiveRowCaps(self)
