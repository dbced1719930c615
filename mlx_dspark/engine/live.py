"""Caps that follow what is seen: acceptance per row, round times of all rows. Arithmetic; no MLX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_dspark.engine.acceptance import Pool
from mlx_dspark.engine.alone import Alone, BlockAlone, TrialAlone
from mlx_dspark.engine.cutting import Cutting
from mlx_dspark.engine.prices import Prospects
from mlx_dspark.engine.times import DEPTH_STEP, RoundTimes
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.events import Outlook, RoundReport
from mlx_dspark.foundation.source import Source


class _SourceCap:
    """One source for one row.

    Alone, the row decides by itself (`alone.py`). In company nothing is tried out row by row, since all rows
    wait for the drafts of one: the cap is the one expected to gain most, from acceptance so far, the row's
    own and that of all rows, and from what the width costs so many rows, shared among those who usually draft
    together. It is 0 where none gains, but for a probe that all rows make at once.
    """

    MARGIN = 1.02
    PLAIN_SAMPLES = 3
    PATIENCE = 8
    """Short drafts of a source that finds some now and then, while plain rounds are still to be timed."""

    UNLIKELY = 0.02

    def __init__(self, prospects: Prospects, alone: Alone) -> None:
        self.prospects = prospects
        self._alone = alone
        self._compared: set[int] = set()
        self._unmeasured = 0
        self._gained: tuple[tuple[int, int, int, int], int] = (0, 0, 0, 0), 0
        self._cutting = Cutting(prospects) if prospects.source.confident else None

    def threshold(self, rows: int) -> float:
        return self._cutting.threshold if self._cutting is not None and rows == 1 else 0.0

    def parked(self, rows: int) -> bool:
        if self.measuring(rows):
            return False
        return self._alone.parked if rows == 1 else not self.cap(rows)

    def measuring(self, rows: int) -> bool:
        """Whether plain rounds are needed to compare with; in company curves will do."""
        if rows in self._compared:
            return False
        times = self.prospects.times
        enough = times.samples(rows, 1) >= self.PLAIN_SAMPLES
        if enough or (rows > 1 and times.measured(rows)):
            self._compared.add(rows)
            return False
        return True

    def cap(self, rows: int) -> int:
        if self.measuring(rows):
            source = self.prospects.source
            short = (source.own_length or source.sporadic) and self._unmeasured < self.PATIENCE
            return int(short and rows == 1)
        times = self.prospects.times
        if rows > 1:
            return self._gainful_now(rows) or int(times.probing(rows))
        return 0 if times.checking(rows) else self._alone.cap()

    def _gainful_now(self, rows: int) -> int:
        """`_gainful`, worked out anew only where something that it goes by has changed."""
        prospects = self.prospects
        known = prospects.times.repriced(rows), prospects.pool.counted, prospects.depth // DEPTH_STEP
        if self._gained[0] != (rows, *known):
            self._gained = (rows, *known), self._gainful(rows)
        return self._gained[1]

    def _gainful(self, rows: int) -> int:
        """The cap that is expected to gain most for all rows together; 0 where none does."""
        prospects = self.prospects
        plain = prospects.plain(rows)
        share = rows / prospects.pool.together(rows)
        best, most, expected, survival = 0, 0.0, 0.0, 1.0
        for cap in range(1, prospects.reach(rows) + 1):
            survival *= prospects.acceptance.among(cap - 1)
            expected += survival
            seconds = prospects.seconds(cap, rows)
            if plain is None or seconds is None or survival < self.UNLIKELY:
                break
            gain = expected * plain - self.MARGIN * share * max(0.0, seconds - plain)
            if gain > most:
                best, most = cap, gain
        return best

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


class LiveRowCaps:
    """Caps of one row from its own acceptance and the round times seen so far."""

    def __init__(self, shared: LiveCaps) -> None:
        self._shared = shared
        self._begun: set[str] = set()
        self._depth = 0
        self._sources = {source.name: _SourceCap(*shared.parts(source)) for source in shared.sources}

    def caps(self, rows: int = 1) -> Mapping[str, int]:
        pinned = self._shared.pinned
        if pinned is not None:
            return pinned
        return {name: source.cap(rows) for name, source in self._sources.items()}

    def parked(self, rows: int = 1) -> bool:
        if self._shared.pinned is not None or not self._sources:
            return False
        return all(source.parked(rows) for source in self._sources.values())

    def measuring(self, rows: int = 1) -> bool:
        if self._shared.pinned is not None:
            return False
        return any(source.measuring(rows) for source in self._sources.values())

    def thresholds(self, rows: int = 1) -> Mapping[str, float]:
        return {name: source.threshold(rows) for name, source in self._sources.items()}

    def outlook(self, rows: int, source: str, drafted: int, width: int) -> Outlook:
        times = self._shared.times
        plain = times.seconds(rows, 1, depth=self._depth)
        if width == 1:
            return Outlook(1.0 if plain else None, plain)
        if source in self._sources:
            return Outlook(self._sources[source].prospects.gain(width - 1, rows, drafted), plain)
        return Outlook(None, plain)

    def observe(self, report: RoundReport) -> None:
        self._depth = report.depth + report.committed
        warm = self._warm(report)
        whole = not (report.drafted and self.thresholds(report.rows).get(report.source))
        seconds = self._shared.times.charge(report, warm=warm and whole)
        for source in self._sources.values():
            source.observe(report, seconds, warm)

    def _warm(self, report: RoundReport) -> bool:
        """Whether a round alone tells what the next like it takes. A drafter reads the prompt before the
        first draft of a row, and kernels are made ready in a round wider than any before."""
        known = self._sources.get(report.source)
        if report.rows > 1 or not report.drafted or known is None:
            return True
        if known.prospects.source.own_length or known.prospects.source.sporadic:
            return True
        widest = self._shared.widest.get(report.source, 0)
        warm = report.source in self._begun and report.width <= widest
        self._begun.add(report.source)
        self._shared.widest[report.source] = max(widest, report.width)
        return warm


class LiveCaps:
    """Caps that never lose for long: a source that costs more than it earns is parked and probed. Round times
    and acceptance of all rows are kept here, so that new rows begin with what is known.

    `choose=True` picks the length every round; `choose=False` once for a request and its depth, from `curves`
    and the `acceptance` recorded or seen, and without curves it drafts whole blocks or nothing. `pinned` caps
    are never overridden; times and acceptance are then kept for the outlook alone.
    """

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
        self.pinned = pinned
        self.widest: dict[str, int] = {}
        self._choose = choose
        recorded = acceptance or {}
        self._pools = {s.name: Pool(s.max_draft, recorded.get(s.name, ()), likely=s.likely) for s in sources}

    def parts(self, source: Source) -> tuple[Prospects, Alone]:
        """What a new row has of a source."""
        prospects = Prospects(source, self.times, self._pools[source.name])
        if source.own_length:
            return prospects, TrialAlone(prospects)
        return prospects, BlockAlone(prospects, choose=self._choose or source.sporadic)

    def learn(self, curves: CostCurves) -> None:
        """Go by these curves, which tell more than those before them, from now on."""
        self.times.learn(curves)

    def row(self) -> LiveRowCaps:
        return LiveRowCaps(self)
