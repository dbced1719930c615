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
    """The caps of one row. Everything learnt comes through `observe`; the rest is pure.

    `rows` is how many rows the round in question has: what a width costs depends on it.
    """

    def caps(self, rows: int = 1) -> Mapping[str, int]:
        """Most drafts per source, this round; empty or all 0 means plain decoding."""
        ...

    def parked(self, rows: int = 1) -> bool:
        """Whether the row decodes plainly because drafting was losing time."""
        ...

    def measuring(self, rows: int = 1) -> bool:
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

    def caps(self, rows: int = 1) -> Mapping[str, int]:
        del rows
        return self._caps

    def parked(self, rows: int = 1) -> bool:
        del rows
        return False

    def measuring(self, rows: int = 1) -> bool:
        del rows
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
    SOONEST_PROBE, LATEST_PROBE = 16, 256
    PROBE_SHARE = 0.01

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._medians: dict[int, dict[int, float]] = {}
        self._between: dict[tuple[int, int], float] = {}
        self._plain_since: dict[int, int] = {}
        self._probe_after: dict[int, int] = {}
        self._landed_at = 0.0
        self._charged = 0.0

    def charge(self, report: RoundReport, *, warm: bool = True) -> float:
        """Seconds this round took; the same answer for each of its rows. One that is not `warm` tells nothing
        of the next like it."""
        if report.landed_at == self._landed_at:
            return self._charged
        self._charged = report.landed_at - max(report.launched_at, self._landed_at)
        self._landed_at = report.landed_at
        if report.certain == 1:
            self._count(report)
            if warm and report.waited <= self.MOST_WAITED * self._charged:
                self._note(report.rows, report.width)
        return self._charged

    def _count(self, report: RoundReport) -> None:
        since = self._plain_since.get(report.rows, 0)
        if report.width > 1:
            later = 2 * self._probe_after.get(report.rows, self.SOONEST_PROBE)
            probed = self.probing(report.rows)
            usual = min(later, self.LATEST_PROBE) if probed else self.SOONEST_PROBE
            self._probe_after[report.rows] = max(usual, self._affordable(report.rows))
        self._plain_since[report.rows] = since + 1 if report.width == 1 else 0

    def _affordable(self, rows: int) -> int:
        """After how many plain rounds one like the present costs no more than its share of them."""
        plain = self._medians.get(rows, {}).get(1)
        return ceil((self._charged - plain) / (self.PROBE_SHARE * plain)) if plain else 0

    def _note(self, rows: int, width: int) -> None:
        kept = self._seconds.setdefault((rows, width), deque(maxlen=self.KEPT))
        kept.append(self._charged)
        self._medians.setdefault(rows, {})[width] = median(kept)
        self._between.clear()

    def samples(self, rows: int, width: int) -> int:
        return len(self._seconds.get((rows, width), ()))

    def probing(self, rows: int) -> bool:
        """Whether so many rows have decoded plainly for so long that a draft is due, to see what it brings;
        rarer after each that was followed by none, and the more it costs."""
        return self._plain_since.get(rows, 0) >= self._probe_after.get(rows, self.SOONEST_PROBE)

    def widest(self, rows: int) -> int:
        """The widest round seen with so many rows; 0 when there was none."""
        return max(self._medians.get(rows, ()), default=0)

    def seconds(self, rows: int, width: int) -> float | None:
        """The usual time of a round of this width: measured, else on the line through its neighbours."""
        known = self._medians.get(rows, {})
        if width in known:
            return known[width]
        if 1 not in known or len(known) < 2:
            return None
        if (rows, width) not in self._between:
            above = min((w for w in known if w > width), default=max(known))
            below = max((w for w in known if w < min(width, above)), default=1)
            slope = max(0.0, (known[above] - known[below]) / (above - below))
            self._between[rows, width] = known[below] + slope * (width - below)
        return self._between[rows, width]


class _Pool:
    """What all rows together know of a source: acceptance by position, and who drafts in company."""

    WEIGHT = 4.0

    def __init__(self, max_draft: int) -> None:
        self._offered = [2.0] * max_draft
        self._survived = [2.0 * 0.7] * max_draft
        self._together: dict[int, float] = {}

    def count(self, report: RoundReport) -> None:
        """Take a round of one row in which this source drafted."""
        for i in range(min(report.drafted, report.accepted + 1, len(self._offered))):
            self._offered[i] = 0.98 * self._offered[i] + 1
            self._survived[i] = 0.98 * self._survived[i] + (i < report.accepted)
        seen = min(max(1.0, report.drafted_together / report.drafted), report.rows)
        self._together[report.rows] = 0.7 * self.together(report.rows) + 0.3 * seen

    def together(self, rows: int) -> float:
        """How many of so many rows usually draft in a round in which any does."""
        return self._together.get(rows, 1.0)

    def rate(self, position: int, survived: float, offered: float) -> float:
        """How likely the draft at a position is accepted after those before it, for a row that has seen this
        itself."""
        known = self._survived[position] / self._offered[position]
        return (survived + self.WEIGHT * known) / (offered + self.WEIGHT)


class _SourceCap:
    """One source for one row: acceptance by position, what it earned, and whether it is parked.

    Alone, a verify round earns the plain rounds it replaced and spends its own time. A source that spends
    more than it earns is parked for as long as it takes to bring the loss under LOSS of plain decoding, then
    tried again. Widths never timed are approached in steps, so that a steep curve is noticed before it costs
    much.

    In company nothing is tried out row by row, since all rows wait for the drafts of one: the cap is the one
    expected to gain most, from acceptance so far, the row's own and that of all rows, and from what the width
    costs so many rows, shared among those who usually draft together. It is 0 where none gains, but for a
    probe that all rows make at once.
    """

    TRIAL = 4
    MARGIN = 1.02
    DECAY = 0.85
    LOSS = 0.015
    SHORTEST_PARK, HOPELESS_PARK = 16, 256
    PLAIN_SAMPLES = 3
    STEPS = (1, 3)
    MUST_SAVE = 0.95
    UNLIKELY = 0.02

    def __init__(self, source: Source, times: RoundTimes, pool: _Pool, choose: bool) -> None:
        self._source = source
        self._times = times
        self._pool = pool
        self._choose = choose and not source.own_length
        self._best = source.max_draft
        self._left_parked = 0
        self._offered = [2.0] * source.max_draft
        self._survived = [2.0 * 0.7] * source.max_draft
        self._start_trial()

    def _start_trial(self) -> None:
        self._earned = self._spent = self._lost = 0.0
        self._rounds = 0

    def parked(self, rows: int) -> bool:
        if rows == 1:
            return self._left_parked > 0
        return not self.measuring(rows) and not self.cap(rows)

    def measuring(self, rows: int) -> bool:
        return self._times.samples(rows, 1) < self.PLAIN_SAMPLES

    def cap(self, rows: int) -> int:
        if rows > 1:
            return 0 if self.measuring(rows) else self._gainful(rows) or int(self._times.probing(rows))
        if self._left_parked:
            return 0
        if self.measuring(rows):
            return self.STEPS[0] if self._source.own_length else 0
        return min(self._best, max(self._paying(rows), default=1))

    def _gainful(self, rows: int) -> int:
        """The cap that is expected to gain most for all rows together; 0 where none does."""
        plain = self._times.seconds(rows, 1)
        share = rows / self._pool.together(rows)
        best, most, expected, survival = 0, 0.0, 0.0, 1.0
        for cap in range(1, self._reach(rows) + 1):
            survival *= self._pool.rate(cap - 1, self._survived[cap - 1], self._offered[cap - 1])
            expected += survival
            seconds = self._times.seconds(rows, cap + 1)
            if plain is None or seconds is None or survival < self.UNLIKELY:
                break
            gain = expected * plain - self.MARGIN * share * max(0.0, seconds - plain)
            if gain > most:
                best, most = cap, gain
        return best

    def _reach(self, rows: int) -> int:
        """The widest cap that may be tried next."""
        widest = self._times.widest(rows)
        step = next((step for step in self.STEPS if step >= widest), self._source.max_draft)
        return min(step, self._source.max_draft)

    def _paying(self, rows: int) -> list[int]:
        """Caps that would pay if every draft were accepted, as far as round times are known."""
        plain = self._times.seconds(rows, 1)
        paying = []
        for cap in range(1, self._reach(rows) + 1):
            seconds = self._times.seconds(rows, cap + 1)
            if seconds is None or plain is None or seconds <= self.MUST_SAVE * (cap + 1) * plain:
                paying.append(cap)
        return paying

    def observe(self, report: RoundReport, seconds: float, warm: bool) -> None:
        plain = self._times.seconds(report.rows, 1)
        if report.source == self._source.name and report.drafted:
            self._count(report)
            if plain is not None and report.rows == 1:
                if warm:
                    self._weigh(report.committed * plain, seconds, plain)
                else:
                    self._pass_over(plain)
            if self._choose:
                self._best = self._fastest()
        elif self._left_parked:
            self._left_parked -= 1

    def _count(self, report: RoundReport) -> None:
        for i in range(min(report.drafted, report.accepted + 1, self._source.max_draft)):
            self._offered[i] = 0.95 * self._offered[i] + 1
            self._survived[i] = 0.95 * self._survived[i] + (i < report.accepted)
        self._pool.count(report)

    def _weigh(self, earned: float, spent: float, plain: float) -> None:
        self._earned = self.DECAY * self._earned + earned
        self._spent = self.DECAY * self._spent + spent
        self._lost = max(0.0, self._lost + spent - earned)
        self._rounds += 1
        hopeless = not self._paying(1)
        losing = self._earned < self._spent * self.MARGIN
        if hopeless or (losing and (self._rounds >= self.TRIAL or self._lost > 2 * plain)):
            self._park(plain, hopeless=hopeless)

    def _pass_over(self, plain: float) -> None:
        """A round of the trial whose time tells nothing."""
        self._rounds += 1
        if not self._paying(1):
            self._park(plain, hopeless=True)

    def _park(self, plain: float, *, hopeless: bool) -> None:
        least = self.HOPELESS_PARK if hopeless else self.SHORTEST_PARK
        self._left_parked = max(least, ceil(self._lost / (self.LOSS * plain)))
        self._start_trial()

    def _fastest(self) -> int:
        """The cap with the most committed tokens per second; the present one unless another is 3 % better."""
        rates, expected, survival = {}, 1.0, 1.0
        for cap in range(1, self._source.max_draft + 1):
            survival *= self._survived[cap - 1] / self._offered[cap - 1]
            expected += survival
            seconds = self._times.seconds(1, cap + 1)
            if seconds:
                rates[cap] = expected / seconds
        if not rates:
            return self._best
        best = max(rates, key=lambda cap: rates[cap])
        return best if rates[best] > 1.03 * rates.get(self._best, 0.0) else self._best


class LiveRowCaps:
    """Caps of one row from its own acceptance and the round times seen so far."""

    def __init__(
        self,
        sources: Sequence[Source],
        times: RoundTimes,
        pools: Mapping[str, _Pool],
        choose: bool,
        widest: dict[str, int],
    ) -> None:
        self._times = times
        self._fixed = {source.name for source in sources if not source.own_length}
        self._begun: set[str] = set()
        self._widest = widest
        self._sources = {
            source.name: _SourceCap(source, times, pools[source.name], choose) for source in sources
        }

    def caps(self, rows: int = 1) -> Mapping[str, int]:
        return {name: source.cap(rows) for name, source in self._sources.items()}

    def parked(self, rows: int = 1) -> bool:
        return bool(self._sources) and all(source.parked(rows) for source in self._sources.values())

    def measuring(self, rows: int = 1) -> bool:
        return any(source.measuring(rows) for source in self._sources.values())

    def observe(self, report: RoundReport) -> None:
        warm = self._warm(report)
        seconds = self._times.charge(report, warm=warm)
        for source in self._sources.values():
            source.observe(report, seconds, warm)

    def _warm(self, report: RoundReport) -> bool:
        """Whether a round alone tells what the next like it takes. A drafter reads the prompt before the
        first draft of a row, and kernels are made ready in a round wider than any before."""
        if report.rows > 1 or not report.drafted or report.source not in self._fixed:
            return True
        widest = self._widest.get(report.source, 0)
        known = report.source in self._begun and report.width <= widest
        self._begun.add(report.source)
        self._widest[report.source] = max(widest, report.width)
        return known


class LiveCaps:
    """Caps that never lose for long: a source that costs more than it earns is parked and probed. Round times
    and acceptance of all rows are kept here, so that new rows begin with what is known.

    `choose=False` drafts whole blocks or nothing; `choose=True` also picks the length every round.
    """

    def __init__(self, sources: Sequence[Source], *, choose: bool) -> None:
        self._sources = tuple(sources)
        self._choose = choose
        self._times = RoundTimes()
        self._pools = {source.name: _Pool(source.max_draft) for source in sources}
        self._widest: dict[str, int] = {}

    def row(self) -> LiveRowCaps:
        return LiveRowCaps(self._sources, self._times, self._pools, self._choose, self._widest)


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
