"""What the caps of one source would bring one row: its acceptance against what rounds take. No MLX."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from mlx_dspark.engine.acceptance import Acceptance, Pool
from mlx_dspark.engine.times import RoundTimes
from mlx_dspark.foundation.curves import expected_tokens
from mlx_dspark.foundation.events import RoundReport
from mlx_dspark.foundation.source import Source


class Prospects:
    """One source as one row sees it. `depth` follows the row."""

    STEPS = (1, 3)
    MUST_SAVE = 0.95

    def __init__(self, source: Source, times: RoundTimes, pool: Pool) -> None:
        self.source = source
        self.times = times
        self.pool = pool
        self.acceptance = Acceptance(pool, source.max_draft)
        self.depth = 0
        self._best: tuple[tuple[float | None, ...], list[float]] = (), []
        self._paying: tuple[tuple[float | None, ...], int, list[int]] = (), 0, []

    def count(self, report: RoundReport) -> None:
        """Take a round in which this source drafted."""
        self.acceptance.count(report.drafted, report.accepted)
        self.pool.count(report.drafted, report.accepted)
        self.pool.count_together(report.rows, report.drafted, report.drafted_together)

    def plain(self, rows: int = 1) -> float | None:
        """Seconds of a plain round."""
        return self.times.seconds(rows, 1, depth=self.depth)

    def seconds(self, cap: int, rows: int = 1) -> float | None:
        """Seconds of a round of so many drafts."""
        return self.times.seconds(rows, cap + 1, source=self.source.name, depth=self.depth)

    def gain(self, cap: int, rows: int = 1, drafted: int | None = None) -> float | None:
        """Tokens per second at this cap against plain decoding; `drafted` are the row's own drafts where the
        round is wider for others. None where no time is known. Where few times make such a round cheaper than
        a plain one, it is as dear: nothing gains more than the tokens of a round."""
        plain, seconds = self.plain(rows), self.seconds(cap, rows)
        if not plain or not seconds:
            return None
        length, seconds = cap if drafted is None else drafted, max(seconds, plain)
        if rows > 1:
            return (
                expected_tokens([self.acceptance.among(i) for i in range(length)], length) * plain / seconds
            )
        return expected_tokens(self.acceptance.chances(), length) * plain / seconds

    def gains(self, chances: Sequence[float] | None = None) -> dict[int, float]:
        """The gain of each cap, for a row by itself, as far as times are known; by its own acceptance, or
        these `chances`."""
        plain, *drafting = self.curve(1)
        if not plain:
            return {}
        chances = chances or self.acceptance.chances()
        expected, survival, gains = 1.0, 1.0, {}
        for cap, (chance, seconds) in enumerate(zip(chances, drafting, strict=False), 1):
            survival *= chance
            expected += survival
            if seconds:
                gains[cap] = expected * plain / seconds
        return gains

    def curve(self, rows: int) -> tuple[float | None, ...]:
        """Seconds of a plain round, and of every cap from 1 on."""
        name, widest = self.source.name, self.source.max_draft + 1
        return self.times.curve(rows, widest, source=name, depth=self.depth)

    def promise(self) -> float:
        """By how many tokens a plain round, for a row by itself, falls short of what could be had in its time
        if the state of the content were known."""
        curve = self.curve(1)
        if self._best[0] is not curve:
            plain, *drafting = curve
            shares = [plain / seconds if plain and seconds else None for seconds in drafting]
            self._best = curve, self.acceptance.best(shares)
        return sum(map(mul, self._best[1], self.acceptance.weights())) - 1

    def reach(self, rows: int) -> int:
        """The widest cap that may be tried next: without curves, widths are approached in steps."""
        if self.times.measured(rows):
            return self.source.max_draft
        widest = self.times.widest(rows)
        step = next((step for step in self.STEPS if step >= widest), self.source.max_draft)
        return min(step, self.source.max_draft)

    def paying(self, rows: int) -> list[int]:
        """Caps within reach that would pay if every draft were accepted, as far as times are known."""
        curve, reach = self.curve(rows), self.reach(rows)
        if self._paying[0] is not curve or self._paying[1] != reach:
            plain, *drafting = curve
            paying = [
                cap
                for cap, seconds in enumerate(drafting[:reach], 1)
                if seconds is None or plain is None or seconds <= self.MUST_SAVE * (cap + 1) * plain
            ]
            self._paying = curve, reach, paying
        return self._paying[2]
