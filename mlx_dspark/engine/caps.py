"""How many drafts a row may have verified this round. Numbers in, numbers out; no MLX.

A cap is chosen per row and per drafter (source). A cap of 0 is plain decoding, and always a candidate unless
the user pinned a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Literal, Protocol

from mlx_dspark.contracts import Source
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.events import RoundReport

MaxDraft = int | Literal["auto"] | None


class RowCaps(Protocol):
    """The caps of one row. `caps` is pure; everything learnt comes through `observe`."""

    def caps(self) -> Mapping[str, int]:
        """Most drafts per source, this round; empty or all 0 means plain decoding."""
        ...

    @property
    def parked(self) -> bool:
        """Whether the row decodes plainly because drafting was losing time."""
        ...

    @property
    def measuring(self) -> bool:
        """Whether plain rounds are being timed, so that none should be launched ahead."""
        ...

    def observe(self, report: RoundReport) -> None:
        """Told every round of the row, in order, prefill included."""
        ...


class CapPolicy(Protocol):
    """Makes the caps of new rows; what rows share (round times) lives here."""

    def row(self) -> RowCaps: ...


class FixedCaps:
    """The user's number for every source, never overridden. Serves as policy and as caps."""

    def __init__(self, caps: Mapping[str, int]) -> None:
        self._caps = dict(caps)

    def row(self) -> FixedCaps:
        return self

    def caps(self) -> Mapping[str, int]:
        return self._caps

    @property
    def parked(self) -> bool:
        return False

    @property
    def measuring(self) -> bool:
        return False

    def observe(self, report: RoundReport) -> None:
        del report


class RoundTimes:
    """Live round times in seconds by number of rows and width: the median of the newest few.

    A round that was launched before its predecessor landed is charged from that landing on. One whose time
    the reader of the events took a part of tells nothing and is left out.
    """

    KEPT = 15
    MOST_WAITED = 0.1

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._landed_at = 0.0
        self._charged = 0.0

    def charge(self, report: RoundReport) -> float:
        """Seconds this round took; the same answer for each of its rows."""
        if report.landed_at == self._landed_at:
            return self._charged
        self._charged = report.landed_at - max(report.launched_at, self._landed_at)
        self._landed_at = report.landed_at
        if report.certain == 1 and report.waited <= self.MOST_WAITED * self._charged:
            kept = self._seconds.setdefault((report.rows, report.width), deque(maxlen=self.KEPT))
            kept.append(self._charged)
        return self._charged

    def samples(self, rows: int, width: int) -> int:
        return len(self._seconds.get((rows, width), ()))

    def widest(self, rows: int) -> int:
        """The widest round seen with so many rows; 0 when there was none."""
        return max((width for n, width in self._seconds if n == rows), default=0)

    def seconds(self, rows: int, width: int) -> float | None:
        """The usual time of a round of this width: measured, else on the line through its neighbours."""
        known = {w: median(times) for (n, w), times in self._seconds.items() if n == rows}
        if width in known:
            return known[width]
        if 1 not in known or len(known) < 2:
            return None
        above = min((w for w in known if w > width), default=max(known))
        below = max((w for w in known if w < min(width, above)), default=1)
        slope = max(0.0, (known[above] - known[below]) / (above - below))
        return known[below] + slope * (width - below)


class _SourceCap:
    """One source for one row: acceptance by position, what it earned, and whether it is parked.

    A verify round earns the plain rounds it replaced and spends its own time. A source that spends more than
    it earns is parked for as long as it takes to bring the loss under LOSS of plain decoding, then tried
    again. Widths never timed are approached in steps, so that a steep curve is noticed before it costs much.
    """

    TRIAL = 4
    MARGIN = 1.02
    DECAY = 0.85
    LOSS = 0.015
    SHORTEST_PARK, HOPELESS_PARK = 16, 256
    PLAIN_SAMPLES = 3
    STEPS = (1, 3)
    MUST_SAVE = 0.95

    def __init__(self, source: Source, times: RoundTimes, choose: bool) -> None:
        self._source = source
        self._times = times
        self._choose = choose and not source.own_length
        self._rows = 1
        self._best = source.max_draft
        self._left_parked = 0
        self._offered = [2.0] * source.max_draft
        self._survived = [2.0 * 0.7] * source.max_draft
        self._start_trial()

    def _start_trial(self) -> None:
        self._earned = self._spent = self._lost = 0.0
        self._rounds = 0

    @property
    def parked(self) -> bool:
        return self._left_parked > 0

    @property
    def measuring(self) -> bool:
        return self._times.samples(self._rows, 1) < self.PLAIN_SAMPLES

    @property
    def cap(self) -> int:
        if self.parked:
            return 0
        if self.measuring:
            return self.STEPS[0] if self._source.own_length else 0
        return min(self._best, max(self._paying(), default=1))

    def _paying(self) -> list[int]:
        """Caps that would pay if every draft were accepted, as far as round times are known."""
        plain = self._times.seconds(self._rows, 1)
        widest = self._times.widest(self._rows)
        reach = next((step for step in self.STEPS if step >= widest), self._source.max_draft)
        paying = []
        for cap in range(1, min(reach, self._source.max_draft) + 1):
            seconds = self._times.seconds(self._rows, cap + 1)
            if seconds is None or plain is None or seconds <= self.MUST_SAVE * (cap + 1) * plain:
                paying.append(cap)
        return paying

    def observe(self, report: RoundReport, seconds: float) -> None:
        self._rows = report.rows
        plain = self._times.seconds(report.rows, 1)
        if report.source == self._source.name and report.drafted:
            self._count(report)
            if plain is not None:
                self._weigh(report.committed * plain, seconds, plain)
            if self._choose:
                self._best = self._fastest()
        elif self._left_parked:
            self._left_parked -= 1

    def _count(self, report: RoundReport) -> None:
        for i in range(min(report.drafted, report.accepted + 1, self._source.max_draft)):
            self._offered[i] = 0.95 * self._offered[i] + 1
            self._survived[i] = 0.95 * self._survived[i] + (i < report.accepted)

    def _weigh(self, earned: float, spent: float, plain: float) -> None:
        self._earned = self.DECAY * self._earned + earned
        self._spent = self.DECAY * self._spent + spent
        self._lost = max(0.0, self._lost + spent - earned)
        self._rounds += 1
        hopeless = not self._paying()
        losing = self._earned < self._spent * self.MARGIN
        if hopeless or (losing and (self._rounds >= self.TRIAL or self._lost > 2 * plain)):
            least = self.HOPELESS_PARK if hopeless else self.SHORTEST_PARK
            self._left_parked = max(least, ceil(self._lost / (self.LOSS * plain)))
            self._start_trial()

    def _fastest(self) -> int:
        """The cap with the most committed tokens per second; the present one unless another is 3 % better."""
        rates, expected, survival = {}, 1.0, 1.0
        for cap in range(1, self._source.max_draft + 1):
            survival *= self._survived[cap - 1] / self._offered[cap - 1]
            expected += survival
            seconds = self._times.seconds(self._rows, cap + 1)
            if seconds:
                rates[cap] = expected / seconds
        if not rates:
            return self._best
        best = max(rates, key=lambda cap: rates[cap])
        return best if rates[best] > 1.03 * rates.get(self._best, 0.0) else self._best


class LiveRowCaps:
    """Caps of one row from its own acceptance and the round times seen so far."""

    def __init__(self, sources: Sequence[Source], times: RoundTimes, choose: bool) -> None:
        self._times = times
        self._sources = {source.name: _SourceCap(source, times, choose) for source in sources}

    def caps(self) -> Mapping[str, int]:
        return {name: source.cap for name, source in self._sources.items()}

    @property
    def parked(self) -> bool:
        return bool(self._sources) and all(source.parked for source in self._sources.values())

    @property
    def measuring(self) -> bool:
        return any(source.measuring for source in self._sources.values())

    def observe(self, report: RoundReport) -> None:
        seconds = self._times.charge(report)
        for source in self._sources.values():
            source.observe(report, seconds)


class LiveCaps:
    """Caps that never lose for long: a source that costs more than it earns is parked and probed.

    `choose=False` drafts whole blocks or nothing; `choose=True` also picks the length every round.
    """

    def __init__(self, sources: Sequence[Source], *, choose: bool) -> None:
        self._sources = tuple(sources)
        self._choose = choose
        self._times = RoundTimes()

    def row(self) -> LiveRowCaps:
        return LiveRowCaps(self._sources, self._times, self._choose)


def cap_policy(max_draft: MaxDraft, sources: Sequence[Source]) -> CapPolicy:
    """The policy a user's `--max-draft` asks for.

    None: whole blocks, parked where they lose. "auto": the length chosen every round, 0 included. 0: the
    drafter's whole block, always. N: at most N, always. Raises UsageError for anything else.
    """
    if max_draft is None or max_draft == "auto":
        return LiveCaps(sources, choose=max_draft == "auto")
    if not isinstance(max_draft, int) or isinstance(max_draft, bool) or max_draft < 0:
        raise UsageError(
            f"max_draft is {max_draft!r}, which is out of range.",
            'Give a positive number, 0 for the whole block, or "auto".',
            field="max_draft",
        )
    return FixedCaps({s.name: min(max_draft, s.max_draft) if max_draft else s.max_draft for s in sources})
