"""Live rounds that take much longer than they should switch the kernels of their model off."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.events import RoundReport
from mlx_dspark.kernels.framework.live import LiveKernels

STALL, STALL_SECONDS = 20.0, 2.0
"""A round that takes so many times what was expected of it, and so many seconds, is a stall."""
SLOW, SLOW_ROUNDS = 5.0, 16
"""So many rounds of a kind in a row that take so many times what was expected are too slow."""
UNEXPECTED_SECONDS = 30.0
"""A round is a stall, too, of which nothing is expected yet and that takes so long; compiling takes less."""
_ENOUGH, _KEPT = 8, 64
_MOST_WAITED = 0.1


class SlowRounds:
    """Told every round of a session whose model has kernels. What is expected of a round is the measured cost
    where there is one, else the median of the rounds of its kind so far."""

    def __init__(self, live: LiveKernels, curves: CostCurves | None = None) -> None:
        self._live, self._curves = live, curves
        self._seen: dict[tuple[int, int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._slow: dict[tuple[int, int, int], int] = defaultdict(int)
        self._landed_at = 0.0

    def see(self, report: RoundReport) -> list[str]:
        """Take a round; the names of the kernels that it switched off."""
        seconds = report.landed_at - max(report.launched_at, self._landed_at)
        self._landed_at = max(self._landed_at, report.landed_at)
        if not self._live.live or report.waited > _MOST_WAITED * seconds:
            return []
        kind = (report.rows, report.width, report.depth.bit_length())
        expected = self._expected(report, kind)
        reason = self._reason(kind, seconds, expected)
        if not reason and self._slow[kind] == 0:
            self._seen[kind].append(seconds)
        return self._live.switch_off(reason) if reason else []

    def _expected(self, report: RoundReport, kind: tuple[int, int, int]) -> float | None:
        if self._curves is not None and report.rows == 1 and report.certain == 1:
            known = self._curves.round_seconds(report.width - 1, source=report.source, depth=report.depth)
            if known:
                return known
        seen = self._seen[kind]
        return median(seen) if len(seen) >= _ENOUGH else None

    def _reason(self, kind: tuple[int, int, int], seconds: float, expected: float | None) -> str:
        if expected is None:
            return f"a round took {seconds:.0f} s" if seconds > UNEXPECTED_SECONDS else ""
        if seconds > max(STALL_SECONDS, STALL * expected):
            return f"a round took {seconds:.1f} s in place of {expected:.3f} s"
        self._slow[kind] = self._slow[kind] + 1 if seconds > SLOW * expected else 0
        if self._slow[kind] < SLOW_ROUNDS:
            return ""
        return f"{SLOW_ROUNDS} rounds in a row took more than {SLOW:.0f} times the expected {expected:.3f} s"
