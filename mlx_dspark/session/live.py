"""What running sessions add to the curves of a pair: batches of sizes not measured yet, and doubts."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from time import perf_counter

from mlx_dspark.calibration.measure import Measured, measuring
from mlx_dspark.calibration.plan import rows_plan
from mlx_dspark.calibration.shape import with_rows
from mlx_dspark.calibration.store import CalibrationStore
from mlx_dspark.calibration.watch import Watch
from mlx_dspark.contracts import Drafter, Target
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.events import RoundReport

BATCH_BUDGET = 6.0
"""Seconds that the measurement of one number of rows may take, in steps between live rounds."""

METER_SHARE = 0.5
"""Of the time of running rows, what their measurement may take: it holds back rounds, too."""

Steps = Generator[float, None, Measured]


def watching(curves: CostCurves, key: str, store: CalibrationStore) -> Callable[[RoundReport], None]:
    """Takes live rounds; where they disagree with the curves, the store's entry is marked."""
    watch = Watch(curves)

    def see(report: RoundReport) -> None:
        if reason := watch.see(report):
            store.mark_stale(key, curves.measured_at, reason)

    return see


class BatchMeter:
    """Measures rounds of several rows when a batch of so many runs, one item between two of its rounds.

    `learn` is given the curves whenever they have grown; what is not in doubt is stored. Whatever fails,
    which a model's own code can do in any way, is not tried again, and the live answers go on without and say
    so. Only the thread that owns MLX calls it.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        curves: CostCurves,
        learn: Callable[[CostCurves], None],
        *,
        key: str,
        store: CalibrationStore | None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.curves = curves
        self._target, self._drafter, self._learn = target, drafter, learn
        self._key, self._store = key, store
        self._steps: dict[int, Steps] = {}
        self._done = {point.rows for point in curves.verify} | {1}
        self._clock = clock
        self._next_at = 0.0

    def due(self, rows: int) -> bool:
        """Whether rounds of so many rows are still to be measured, and it is time for a step of it."""
        return not self.known(rows) and self._clock() >= self._next_at

    def known(self, rows: int) -> bool:
        """Whether nothing of so many rows is left to be measured."""
        return rows in self._done

    def step(self, rows: int) -> Exception | None:
        """Time one item of so many rows; returns what was raised, if anything was."""
        started = self._clock()
        try:
            if rows not in self._steps:
                self._steps[rows] = self._begin(rows)
            next(self._steps[rows])
        except StopIteration as end:
            self._done.add(rows)
            self._take(end.value)
        except Exception as error:  # noqa: BLE001
            self._done.add(rows)
            return error
        finally:
            now = self._clock()
            self._next_at = now + (now - started) * (1 / METER_SHARE - 1)
        return None

    def _begin(self, rows: int) -> Steps:
        from mlx_dspark.session.timing import timed_rounds

        timer = timed_rounds(self._target, self._drafter, rows=rows, deep=False)
        plan = rows_plan(timer.most, timer.depths[0], context=self._target.spec.context)
        return measuring(timer, plan, budget=BATCH_BUDGET)

    def _take(self, found: Measured) -> None:
        more = replace(found.curves, measured_at=self.curves.measured_at)
        self.curves = with_rows(self.curves, more)
        if self._store is not None and not found.refusal:
            self._store.extend(self._key, more)
        self._learn(self.curves)
