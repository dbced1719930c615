"""Timing rounds: everything in turn, over and over, until the medians stand; then a verdict on the whole.

What is timed is behind `Workload`. No MLX here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from statistics import median, quantiles
from time import perf_counter, time
from typing import Protocol

from mlx_dspark.calibration.plan import Item, Plan
from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint

FEWEST_SWEEPS, MOST_SWEEPS = 5, 25
STEADY = 0.02
"""Standard error of every median, relative, at which timing may stop."""
UNSURE = 0.05
"""Standard error of the usual median, or of a plain round's, above which nothing is believed."""
DRIFT = 0.15
"""Change from the first to the last third of the sweeps above which nothing is believed."""
WARM_UP = 0.2
"""Part of the budget that may go into doing everything a second time before it is timed: the first time,
kernels are made and buffers grow, which says nothing of the next."""
LEAST_LEFT = 0.25
"""Part of the budget that is planned with for the timing itself, however long the first time took."""
_LEAST_SHARE = 0.05
_ALIKE = 0.9
"""Part of the items that must change the same way to call it the machine's doing."""
_OF_NORMAL = 1.4826
_MEDIAN_ERROR = 1.2533


class Workload(Protocol):
    """Does one item and tells how many seconds it took."""

    @property
    def rows(self) -> int:
        """How many rows every round has."""
        ...

    def run(self, item: Item) -> float: ...


@dataclass(frozen=True)
class Measured:
    """Curves, and why they should not be kept, if so."""

    curves: CostCurves
    refusal: str
    sweeps: int
    seconds: float


def measure(
    workload: Workload,
    plan: Plan,
    *,
    budget: float,
    progress: Callable[[float], None] = lambda _: None,
    clock: Callable[[], float] = perf_counter,
    now: Callable[[], float] = time,
) -> Measured:
    """Do the plan in about `budget` seconds, or as much of it as can be done in these.

    `progress` is told which part is done, from 0 to 1; `now` gives unix time.
    """
    steps = measuring(workload, plan, budget=budget, clock=clock, now=now)
    while True:
        try:
            progress(next(steps))
        except StopIteration as done:
            return done.value


def measuring(
    workload: Workload,
    plan: Plan,
    *,
    budget: float,
    clock: Callable[[], float] = perf_counter,
    now: Callable[[], float] = time,
) -> Generator[float, None, Measured]:
    """As `measure`, in steps of one item: yields the part that is done. Time between steps does not count.

    Every sweep takes the items once, in an order of its own, so that what disturbs the machine for a moment
    disturbs all of them alike.
    """
    spent, cost = 0.0, dict.fromkeys(plan.items, inf)
    for most in (inf, WARM_UP * budget):
        begun = spent
        for item in plan.items:
            if spent - begun > most:
                break
            started = clock()
            cost[item] = min(cost[item], workload.run(item))
            spent += clock() - started
            yield min(1.0, spent / budget)
    items = plan.affordable(cost, max(budget - spent, LEAST_LEFT * budget) / FEWEST_SWEEPS)
    order = random.Random(0)
    samples: dict[Item, list[float]] = {item: [] for item in items}
    sweeps, begun = 0, spent
    while sweeps < FEWEST_SWEEPS or not _enough(samples, (spent - begun) / sweeps, budget - spent):
        for item in order.sample(items, len(items)):
            started = clock()
            samples[item].append(workload.run(item))
            spent += clock() - started
            yield min(1.0, max(spent / budget, sweeps / MOST_SWEEPS))
        sweeps += 1
    steady = _steady(samples)
    curves = _curves(_levelled(steady), workload.rows, now())
    return Measured(curves, _refusal(steady, cost), sweeps, spent)


def _steady(samples: dict[Item, list[float]]) -> dict[Item, list[float]]:
    """The samples without the first sweeps, where those took longer and the others did not: clocks rise, or
    other work ends. All of them where too few are left to tell."""
    sweeps = max(map(len, samples.values()))
    for first in range(sweeps - FEWEST_SWEEPS + 1):
        rest = {item: each[first:] for item, each in samples.items()}
        if not _shorter(_changes(rest)):
            return rest
    return samples


def _levelled(samples: Mapping[Item, Sequence[float]]) -> dict[Item, list[float]]:
    """The samples of a machine that is as fast in every sweep as in most: what makes all items of a sweep
    longer says nothing of how they compare, which is what caps go by."""
    middle = {item: median(each) for item, each in samples.items()}
    counted = [item for item, each in samples.items() if middle[item] and _counts(each, samples)]
    sweeps = range(max(map(len, samples.values())))
    levels = [median(samples[item][sweep] / middle[item] for item in counted) for sweep in sweeps]
    usual = median(levels)
    return {
        item: [seconds * usual / level for seconds, level in zip(each, levels, strict=True)]
        for item, each in samples.items()
    }


def _enough(samples: dict[Item, list[float]], sweep: float, left: float) -> bool:
    """Whether the medians stand, or another sweep would take longer than there is time."""
    if max(map(len, samples.values())) >= MOST_SWEEPS or sweep > left:
        return True
    steady = _steady(samples)
    return not _shorter(_changes(steady)) and max(map(_error_of, _counted(_levelled(steady)))) <= STEADY


def spread_of(samples: Sequence[float]) -> float:
    """Half of the range of the middle half of the samples, relative to their median."""
    middle = median(samples)
    if len(samples) < 2 or not middle:
        return 0.0
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / middle


def _error_of(samples: Sequence[float]) -> float:
    """The standard error of the median, relative to it."""
    return _MEDIAN_ERROR * _OF_NORMAL * spread_of(samples) / sqrt(len(samples))


def _refusal(samples: Mapping[Item, Sequence[float]], warm: Mapping[Item, float]) -> str:
    """What says that the machine was not the same all along; empty where nothing does.

    `warm` is what the items took before they were timed.
    """
    levelled, changes = _levelled(samples), _changes(samples)
    counted = _counted(levelled)
    change = median(changes)
    if change > 1 + DRIFT and sum(each > 1 for each in changes) >= _ALIKE * len(changes):
        return _slower(change)
    if _shorter(changes):
        return f"rounds took {1 - change:.0%} less at the end than at the beginning, as beside other work"
    spread = median(map(spread_of, counted))
    if max(median(map(_error_of, counted)), _error_of(_plain_round(levelled))) > UNSURE:
        return f"the same round took {spread:.0%} more or less by turns, as beside other work"
    since = median(median(each) / warm[item] if warm[item] else 1.0 for item, each in samples.items())
    return _slower(since) if since > 1 + DRIFT else ""


def _slower(change: float) -> str:
    return f"rounds took {change - 1:.0%} longer at the end than at the beginning, as on a hot machine"


def _plain_round(samples: Mapping[Item, Sequence[float]]) -> Sequence[float]:
    rounds = [item for item in samples if not item.source and not item.bare]
    return samples[min(rounds, key=lambda item: (item.depth, item.size))]


def _counted(samples: Mapping[Item, Sequence[float]]) -> list[Sequence[float]]:
    """The samples of what takes a part worth mentioning of a round."""
    return [each for each in samples.values() if _counts(each, samples)]


def _counts(each: Sequence[float], samples: Mapping[Item, Sequence[float]]) -> bool:
    return median(each) >= _LEAST_SHARE * median(_plain_round(samples))


def _changes(samples: Mapping[Item, Sequence[float]]) -> list[float]:
    return [_change(each) for each in _counted(samples)]


def _shorter(changes: Sequence[float]) -> bool:
    """Whether rounds of all kinds took less at the end."""
    return median(changes) < 1 / (1 + DRIFT) and sum(each < 1 for each in changes) >= _ALIKE * len(changes)


def _change(samples: Sequence[float]) -> float:
    """How the last third of the samples compares with the first."""
    third = max(1, len(samples) // 3)
    first = median(samples[:third])
    return median(samples[-third:]) / first if first else 1.0


def _curves(samples: Mapping[Item, Sequence[float]], rows: int, measured_at: float) -> CostCurves:
    overhead = _overhead(samples)
    verify, draft = [], {}
    for item, each in sorted(samples.items(), key=lambda pair: (pair[0].depth, pair[0].size)):
        seconds, spread = median(each), spread_of(each)
        if item.source:
            point = DraftPoint(rows, item.size, item.depth, seconds, spread)
            draft[item.source] = (*draft.get(item.source, ()), point)
        elif not item.bare:
            verify.append(VerifyPoint(rows, item.size, item.depth, seconds - overhead, spread))
    return CostCurves(tuple(verify), draft, overhead, measured_at)


def _overhead(samples: Mapping[Item, Sequence[float]]) -> float:
    """What a round takes beyond the forward in it; never more than half of the shortest round."""
    bare = next((item for item in samples if item.bare), None)
    if bare is None or (whole := replace(bare, bare=False)) not in samples:
        return 0.0
    pairs = zip(samples[whole], samples[bare], strict=True)
    return min(max(0.0, median(a - b for a, b in pairs)), median(_plain_round(samples)) / 2)
