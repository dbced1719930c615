"""Do live rounds cost what was measured? Numbers in, a reason out; no MLX."""

from __future__ import annotations

from collections import deque
from statistics import median

from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.events import RoundReport

ENOUGH = 24
"""Rounds of a kind before anything is said of them."""
KEPT = 64
APART = 1.3
"""Plain and drafted rounds may be off by factors that are so far apart."""
FASTER = 1.25
"""All rounds may take so much less than was measured. That they take more, all alike, moves no cap, and other
work on the machine is enough for it; that they take less says that the machine was slow when it was
measured."""
_MOST_WAITED = 0.1


class Watch:
    """Told every round; says once why the curves should be measured anew.

    Rounds of several rows tell nothing, nor does one whose time the reader of the events took a part of.
    """

    def __init__(self, curves: CostCurves) -> None:
        self._curves = curves
        self._off: dict[bool, deque[float]] = {False: deque(maxlen=KEPT), True: deque(maxlen=KEPT)}
        self._landed_at = 0.0
        self._said = False

    def see(self, report: RoundReport) -> str:
        """Take a round; the reason to measure anew, once, else an empty string."""
        seconds = report.landed_at - max(report.launched_at, self._landed_at)
        self._landed_at = report.landed_at
        expected = self._expected(report)
        if self._said or not expected or report.waited > _MOST_WAITED * seconds:
            return ""
        self._off[report.drafted > 0].append(seconds / expected)
        reason = self._reason()
        self._said = bool(reason)
        return reason

    def _expected(self, report: RoundReport) -> float | None:
        if report.rows > 1 or report.certain != 1:
            return None
        return self._curves.round_seconds(report.width - 1, source=report.source, depth=report.depth)

    def _reason(self) -> str:
        plain, drafted = (median(each) if len(each) >= ENOUGH else None for each in self._off.values())
        if plain is not None and drafted is not None and not 1 / APART < drafted / plain < APART:
            return (
                f"live rounds took {plain:.2f} times what was measured without drafts, {drafted:.2f} times "
                "with them"
            )
        known = [each for each in (plain, drafted) if each is not None]
        if known and max(known) < 1 / FASTER:
            return f"live rounds took {max(known):.2f} times what was measured"
        return ""
