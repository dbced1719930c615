"""Measured curves equal what rounds cost; what cannot be believed is refused, and told. Clocks are fakes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dspark.calibration.measure import FEWEST_SWEEPS, MOST_SWEEPS, measure
from mlx_dspark.calibration.plan import DEEP, Item, Plan, depths, pair_plan, rows_plan
from mlx_dspark.calibration.shape import knee, verify_curve, with_rows
from mlx_dspark.calibration.watch import ENOUGH, Watch
from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint
from mlx_dspark.foundation.events import RoundReport

MOST = {"lookup": 32, "dspark": 7}
AT = (128, 4096)
PLAN = pair_plan(MOST, AT, context=8192)


def cost_of(item: Item) -> float:
    """Seconds of a scripted machine: a knee at width 8, a slope in depth, and drafters of two prices."""
    if item.source:
        return {"lookup": 1e-4, "dspark": 4e-3}[item.source] + 1e-4 * item.size
    forward = 0.02 + 1e-3 * item.size + 4e-3 * max(0, item.size - 8) + 1e-6 * item.size * item.depth
    return forward if item.bare else forward + OVERHEAD


OVERHEAD = 2e-3


class ScriptedMachine:
    """Takes the scripted cost, as `disturbed` by what else goes on; its clock moves by as much."""

    def __init__(self, disturbed: Callable[[int, float], float] = lambda n, seconds: seconds) -> None:
        self.rows, self.time = 1, 0.0
        self._disturbed, self._numbers = disturbed, count()

    def run(self, item: Item) -> float:
        seconds = self._disturbed(next(self._numbers), cost_of(item))
        self.time += seconds
        return seconds

    def clock(self) -> float:
        return self.time


def measured(machine: ScriptedMachine, plan: Plan = PLAN, budget: float = 60.0):
    return measure(machine, plan, budget=budget, clock=machine.clock, now=lambda: 5.0)


# measuring -----------------------------------------------------------------------------------------------


def check_costs(curves: CostCurves, tolerance: float = 1e-9) -> None:
    assert curves.overhead == pytest.approx(OVERHEAD, rel=tolerance)
    for point in curves.verify:
        whole = cost_of(Item(point.width, point.depth))
        assert point.seconds + curves.overhead == pytest.approx(whole, rel=tolerance)
    for source, points in curves.draft.items():
        for point in points:
            drafted = cost_of(Item(point.cap, point.depth, source))
            assert point.seconds == pytest.approx(drafted, rel=tolerance)


def test_curves_of_a_steady_machine_are_what_rounds_cost() -> None:
    found = measured(ScriptedMachine())
    assert found.refusal == ""
    assert found.curves.measured_at == 5.0
    check_costs(found.curves)
    widths = {point.width for point in found.curves.verify if point.depth == 128}
    assert 8 <= len(widths) <= 10
    assert {1, 33} <= widths
    assert len({point.width for point in found.curves.verify if point.depth == 4096}) >= 3
    assert set(found.curves.draft) == set(MOST)


@pytest.mark.parametrize("seed", range(4))
def test_what_disturbs_for_a_moment_moves_nothing(seed: int) -> None:
    noise = random.Random(seed)
    found = measured(ScriptedMachine(lambda n, s: s * (3.0 if noise.random() < 0.15 else 1.0)))
    assert found.refusal == ""
    check_costs(replace(found.curves, overhead=OVERHEAD, verify=_shifted(found.curves)), 1e-6)


def test_what_comes_round_again_and_again_hits_no_item_more_than_the_others() -> None:
    found = measured(ScriptedMachine(lambda n, s: s * (3.0 if n % len(PLAN.items) == 5 else 1.0)))
    assert found.refusal == ""
    check_costs(replace(found.curves, overhead=OVERHEAD, verify=_shifted(found.curves)), 1e-6)


def _shifted(curves: CostCurves) -> tuple[VerifyPoint, ...]:
    """The points with the scripted overhead taken off in place of the one measured."""
    moved = curves.overhead - OVERHEAD
    return tuple(replace(point, seconds=point.seconds + moved) for point in curves.verify)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [0.5, 1.0])
def test_a_noisy_machine_is_refused(seed: int, width: float) -> None:
    noise = random.Random(seed)
    found = measured(ScriptedMachine(lambda n, s: s * (1 + noise.uniform(0, width)) ** 2), budget=8.0)
    assert "beside other work" in found.refusal


def test_a_plain_round_that_varies_is_refused() -> None:
    """Everything is compared with it."""
    noise, plain = random.Random(0), cost_of(Item(1, 128))
    machine = ScriptedMachine(lambda n, s: s * noise.uniform(0.6, 2.2) if s == plain else s)
    found = measured(machine, budget=8.0)
    assert "by turns" in found.refusal


IN_THE_MIDDLE = 2 * len(PLAN.items) + 2 * len(PLAN.items)
"""So many runs warm up and sweep twice."""


@pytest.mark.parametrize("after", [len(PLAN.items), 2 * len(PLAN.items), IN_THE_MIDDLE])
@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_a_machine_that_slows_down_is_refused(factor: float, after: int) -> None:
    """The clock of a hot chip falls while it is measured, or once it is warm."""
    throttled = ScriptedMachine(lambda n, s: s * (1 if n < after else factor))
    assert "as on a hot machine" in measured(throttled, budget=8.0).refusal


def test_a_machine_that_speeds_up_too_late_is_refused() -> None:
    recovering = ScriptedMachine(lambda n, s: s * (2.0 if n < IN_THE_MIDDLE else 1.0))
    assert "less at the end" in measured(recovering, budget=6.0).refusal
    faster_and_faster = ScriptedMachine(lambda n, s: s * 0.995**n)
    assert "less at the end" in measured(faster_and_faster).refusal


@pytest.mark.parametrize("seed", range(4))
def test_costs_compare_on_a_machine_that_is_slower_by_spells(seed: int) -> None:
    """Half of the time everything takes twice as long, for some rounds of all kinds."""
    rng, slow = random.Random(seed), [False]

    def by_spells(n: int, seconds: float) -> float:
        if rng.random() < 1 / (4 * len(PLAN.items)):
            slow[0] = not slow[0]
        return seconds * (2.0 if slow[0] else 1.0) * (1 + rng.uniform(0, 0.03))

    curves = measured(ScriptedMachine(by_spells)).curves
    found = {Item(each.width, each.depth): each.seconds + curves.overhead for each in curves.verify}
    for source, points in curves.draft.items():
        found |= {Item(each.cap, each.depth, source): each.seconds for each in points}
    pace = found[Item(1, 128)] / cost_of(Item(1, 128))
    for item, seconds in found.items():
        assert seconds == pytest.approx(pace * cost_of(item), rel=0.04), item


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("sweeps", [1, 2, 3])
@pytest.mark.parametrize("factor", [1.3, 3.0])
def test_what_took_longer_at_the_beginning_alone_does_not_count(
    factor: float, sweeps: int, noise: float
) -> None:
    """Clocks rise with work, and other work ends."""
    rng, after = random.Random(1), (2 + sweeps) * len(PLAN.items)
    rising = ScriptedMachine(lambda n, s: s * (factor if n < after else 1.0) * (1 + rng.uniform(0, noise)))
    found = measured(rising, budget=100.0)
    assert found.refusal == ""
    check_costs(replace(found.curves, overhead=OVERHEAD, verify=_shifted(found.curves)), 2 * noise + 1e-9)


@pytest.mark.parametrize("slower", [0.01, 1.0, 5.0, 50.0])
def test_time_is_kept_where_needs_allow_it(slower: float) -> None:
    noise = random.Random(1)
    machine = ScriptedMachine(lambda n, s: slower * s * noise.uniform(0.9, 1.1))
    found = measured(machine, budget=12.0)
    first = 1.2 * slower * sum(map(cost_of, PLAN.items))
    needed = 1.2 * slower * FEWEST_SWEEPS * sum(map(cost_of, PLAN.needed))
    assert machine.time <= max(12.0, 2 * first + needed)
    assert {1, 8, 33} <= {point.width for point in found.curves.verify}
    assert found.sweeps <= MOST_SWEEPS
    assert set(found.curves.draft) == set(MOST)


def test_progress_rises_to_the_end() -> None:
    machine, told = ScriptedMachine(), []
    measure(machine, PLAN, budget=20.0, progress=told.append, clock=machine.clock)
    assert told == sorted(told)
    assert 0 <= told[0] <= told[-1] <= 1


@settings(deadline=None)
@given(
    per_token=st.floats(0, 1e6),
    available=st.integers(0, 1 << 33),
    context=st.integers(8, 1 << 13),
)
def test_no_depth_is_deeper_than_memory_or_context(per_token: float, available: int, context: int) -> None:
    at = depths(per_token, available, context)
    assert list(at) == sorted(at)
    assert 1 <= at[0] <= context
    for deep in at[1:]:
        assert deep <= DEEP
        assert deep + 33 <= context
        assert 3 * deep * per_token <= 0.15 * available + per_token


@settings(deadline=None)
@given(
    most=st.dictionaries(st.sampled_from("abc"), st.integers(1, 64), min_size=1),
    context=st.integers(8, 9000),
)
def test_a_plan_fits_the_context_and_names_nothing_twice(most: dict[str, int], context: int) -> None:
    at = depths(1.0, 1 << 40, context)
    for plan in (pair_plan(most, at, context=context), rows_plan(most, at[0], context=context)):
        assert len(set(plan.items)) == len(plan.items)
        assert any(item.size == 1 and not item.source for item in plan.needed)
        assert {item.source for item in plan.needed} >= set(most)
        for item in plan.items:
            assert item.source or item.depth + item.size <= context
            assert not item.source or item.size <= most[item.source]


def test_more_rows_are_added_and_the_others_stay() -> None:
    one = measured(ScriptedMachine()).curves
    machine = ScriptedMachine()
    machine.rows = 4
    four = measured(machine, rows_plan(MOST, 128, context=8192)).curves
    both = with_rows(one, four)
    for width in (1, 3, 8):
        assert both.verify_seconds(width, rows=1) == one.verify_seconds(width, rows=1)
        whole = both.round_seconds(width - 1, source="dspark", depth=128, rows=4)
        assert whole == pytest.approx(four.round_seconds(width - 1, source="dspark", depth=128, rows=4))
    assert both.verify_seconds(1, rows=2) is None
    assert with_rows(both, four) == both


# shape ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "where"),
    [
        (lambda w: 1.0, None),
        (lambda w: 0.1 * w, None),
        (lambda w: 1.0 + 0.3 * max(0, w - 8), 8),
        (lambda w: 1.0 + 0.5 * max(0, w - 4), 4),
    ],
)
def test_the_knee_is_where_the_curve_bends(seconds: Callable[[int], float], where: int | None) -> None:
    assert knee({w: seconds(w) for w in (1, 2, 3, 4, 6, 8, 12, 17, 33)}) == where


def test_the_scripted_knee_is_found() -> None:
    assert knee(verify_curve(measured(ScriptedMachine()).curves)) == 8


# watching ------------------------------------------------------------------------------------------------

CURVES = CostCurves(
    tuple(VerifyPoint(1, width, 0, 0.010 + 0.001 * width, 0.01) for width in (1, 8)),
    {"dspark": (DraftPoint(1, 7, 0, 0.004, 0.01),)},
    0.001,
    1.0,
)


def watched(
    plain: float,
    drafted: float,
    *,
    rows: int = 1,
    waited: float = 0.0,
    certain: int = 1,
    rounds: int = 2 * ENOUGH,
) -> list[str]:
    """What a watch says of rounds that take so many times what was measured."""
    watch, now, said = Watch(CURVES), 1.0, []
    for n in range(rounds):
        width, factor = (1, plain) if n % 2 else (8, drafted)
        source = "dspark" if width > 1 else ""
        seconds = factor * (CURVES.round_seconds(width - 1, source="dspark") or 0.0)
        report = RoundReport(
            now, now + seconds, rows, width, certain, width - 1, width - 1, 1, 1, n, source, waited=waited
        )
        now = report.landed_at
        said.append(watch.see(report))
    return [reason for reason in said if reason]


@pytest.mark.parametrize(
    ("plain", "drafted", "doubted"),
    [(1, 1, False), (1.1, 0.95, False), (2, 2, False), (1, 1.5, True), (1, 0.6, True), (0.69, 0.69, True)],
)
def test_rounds_that_disagree_are_told_once(plain: float, drafted: float, doubted: bool) -> None:
    assert len(watched(plain, drafted)) == doubted


def test_few_rounds_and_rounds_that_tell_nothing_are_not_believed() -> None:
    assert not watched(1, 2, rounds=2 * ENOUGH - 2)
    assert not watched(1, 2, rows=2)
    assert not watched(1, 2, certain=5)
    assert not watched(1, 2, waited=1.0)


def test_a_round_launched_ahead_is_charged_from_the_landing_before_it() -> None:
    watch, plain = Watch(CURVES), CURVES.round_seconds(0, source="") or 0.0
    drafted = CURVES.round_seconds(7, source="dspark") or 0.0
    landed = 1.0
    for n in range(ENOUGH):
        landed += plain
        assert watch.see(RoundReport(landed - 1.9 * plain, landed, 1, 1, 1, 0, 0, 0, 1, n)) == ""
    for n in range(ENOUGH):
        landed += drafted
        report = RoundReport(landed - drafted, landed, 1, 8, 1, 7, 7, 1, 2, n, "dspark")
        assert watch.see(report) == ""
