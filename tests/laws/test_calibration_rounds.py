"""Rounds timed through the engine's loop cost what was scripted, and rows of any family are filled unread."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx
import pytest

from mlx_dspark.calibration.measure import Measured, measure
from mlx_dspark.calibration.plan import Item, pair_plan, rows_plan
from mlx_dspark.calibration.shape import with_rows
from mlx_dspark.cli.show import closing_line
from mlx_dspark.contracts import Ask, Drafter, Forward, Logits, Proposal
from mlx_dspark.drafters.first_hit import FirstHit
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.session.live import METER_SHARE, BatchMeter
from mlx_dspark.session.result import Result
from mlx_dspark.session.timing import SEED_TOKENS, RoundTimer
from mlx_dspark.state.rows import RowStates
from mlx_dspark.state.synthetic import bytes_per_token, can_fill, fill
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.fakes import ScriptedDrafter, TableTarget
from tests.tiny import tiny_config, tiny_llama
from tests.tiny_families import family_config, tiny_family

FAMILIES = [
    "llama",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "lfm2",
    "qwen3_5",
    "nemotron_h",
    "deepseek_v3",
    "llama4",
]


class Clock:
    """Moves when something is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CostlyTarget(TableTarget):
    """A table whose forwards take scripted time on a clock."""

    def __init__(self, clock: Clock, *, lazy: bool, context: int) -> None:
        super().__init__(mx.random.normal((48, 48), key=mx.random.key(3)), context)
        self.spec = self.spec.__class__("table", 48, 1, 0, context, lazy=lazy)
        self._clock = clock

    def forward(
        self,
        tokens: mx.array,
        rows: RowStates,
        *,
        taps: tuple[int, ...] = (),
        logits: Logits | mx.array = Logits.ALL,
    ) -> Forward:
        self._clock.now += forward_seconds(tokens.shape[1], rows.depth[0], len(rows))
        return super().forward(tokens, rows, taps=taps, logits=logits)


def forward_seconds(width: int, depth: int, rows: int) -> float:
    """Depth counts in steps, since rounds launched ahead are a few tokens deeper."""
    return 0.01 + 1e-3 * width * rows + 5e-2 * (depth // 512) * width


class CostlyDrafter(ScriptedDrafter):
    def __init__(self, clock: Clock, name: str = "scripted") -> None:
        super().__init__(lambda _, n: [0] * n, 1.0, vocab=48, max_draft=9, name=name)
        self._clock = clock

    def propose(self, rows: Any, ask: Ask) -> Proposal:
        self._clock.now += draft_seconds(max(ask.caps))
        return super().propose(rows, ask)


def draft_seconds(cap: int) -> float:
    return 2e-3 + 3e-4 * cap


def check(curves: CostCurves, rows: int) -> None:
    assert curves.overhead == pytest.approx(0, abs=1e-12)
    for point in curves.verify:
        assert point.rows == rows
        assert point.seconds == pytest.approx(forward_seconds(point.width, point.depth, rows))
    for point in curves.draft["scripted"]:
        assert point.seconds == pytest.approx(draft_seconds(point.cap))


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_curves_of_a_scripted_pair_are_what_was_scripted(lazy: bool, rows: int) -> None:
    clock = Clock()
    target, drafter = CostlyTarget(clock, lazy=lazy, context=2048), CostlyDrafter(clock)
    timer = RoundTimer(target, drafter, rows=rows, clock=clock)
    assert len(timer.depths) == 2
    found = measure(timer, pair_plan(timer.most, timer.depths, context=2048), budget=60.0, clock=clock)
    assert found.refusal == ""
    check(found.curves, rows)
    assert {point.depth for point in found.curves.verify} == set(timer.depths)


def test_the_parts_of_a_composition_are_timed_each_by_itself() -> None:
    clock = Clock()
    target = CostlyTarget(clock, lazy=False, context=512)
    drafter = FirstHit([LookupDrafter(), CostlyDrafter(clock)])
    drafter.bind(target)
    timer = RoundTimer(target, drafter, clock=clock, deep=False)
    found = measure(timer, pair_plan(timer.most, timer.depths, context=512), budget=60.0, clock=clock)
    check(found.curves, 1)
    assert {point.seconds for point in found.curves.draft["lookup"]} == {0.0}
    assert max(point.width for point in found.curves.verify) == 33


def test_a_lookup_drafter_finds_what_it_is_timed_on() -> None:
    target = CostlyTarget(Clock(), lazy=False, context=512)
    lookup = LookupDrafter()
    lookup.bind(target)
    lengths: list[int] = []
    propose = lookup.propose

    def noted(rows: Any, ask: Ask) -> Proposal:
        proposal = propose(rows, ask)
        lengths.append(proposal.lengths[0])
        return proposal

    lookup.propose = noted  # type: ignore[method-assign]
    timer = RoundTimer(target, lookup, deep=False)
    for cap, source in ((1, "lookup"), (6, "lookup"), (32, "lookup-long")):
        timer.run(Item(cap, timer.depths[0], source))
    assert lengths == [1, 6, 32]


# rows that were not read ---------------------------------------------------------------------------------


@lru_cache
def target_for(family: str) -> DenseTarget:
    return target_of(tiny_family(family, seed=1), family_config(family), context=512)


def read(target: DenseTarget, tokens: list[int]) -> RowStates:
    states = target.new_rows()
    with states.transaction(len(tokens)) as transaction:
        mx.eval(target.forward(mx.array([tokens]), states).logits)
        transaction.commit([len(tokens)])
    return states


def logits_after(target: DenseTarget, states: RowStates, feed: list[int]) -> mx.array:
    with states.transaction(len(feed)):
        logits = target.forward(mx.array([feed] * len(states)), states).logits
        assert logits is not None
        mx.eval(logits)
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_filled_as_deep_as_its_seed_is_its_seed(family: str) -> None:
    target = target_for(family)
    states, filled = read(target, [5, 9, 7, 30, 31, 8]), target.new_rows(2)
    assert can_fill(states)
    fill(filled, states.capture(0), 6)
    assert filled.depth == [6, 6]
    there, here = logits_after(target, filled, [4, 6, 90]), logits_after(target, states, [4, 6, 90])
    for row in range(2):
        assert mx.allclose(there[row], here[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_timed_at_depths_it_never_read(family: str) -> None:
    target, clock = target_for(family), Clock()
    widest = 0
    forward = target.forward

    def counted(tokens: mx.array, rows: RowStates, **how: Any) -> Forward:
        nonlocal widest
        widest = max(widest, tokens.shape[1])
        out = forward(tokens, rows, **how)
        assert out.logits is None or mx.all(mx.isfinite(out.logits)).item()
        return out

    drafter = ScriptedDrafter(lambda _, n: [0] * n, 1.0, vocab=target.spec.vocab, max_draft=7, taps=(0,))
    target.forward = counted  # type: ignore[method-assign]
    try:
        timer = RoundTimer(target, drafter, clock=clock)
        assert len(timer.depths) == 2
        for item in pair_plan(timer.most, timer.depths, context=512).items:
            timer.run(item)
    finally:
        target.forward = forward  # type: ignore[method-assign]
    assert widest == SEED_TOKENS, "no prompt is read"


def test_a_token_of_depth_takes_what_its_keys_and_values_take() -> None:
    target = target_of(tiny_llama(), tiny_config("llama"))
    layers, kv_heads, head_size, float32 = 2, 2, 16, 4
    states = read(target, [5, 6, 7])
    assert bytes_per_token(states.capture(0)) == layers * 2 * kv_heads * head_size * float32


@pytest.mark.parametrize("available", [0, 1 << 20])
def test_without_memory_nothing_is_timed_deep(available: int) -> None:
    target = target_of(tiny_llama(), tiny_config("llama"))
    lookup = LookupDrafter()
    lookup.bind(target)
    assert len(RoundTimer(target, lookup, available=available).depths) == 1


# batches -------------------------------------------------------------------------------------------------

ONE_ROW = CostCurves(
    (VerifyPoint(1, 1, 128, 0.01, 0.0),), {"lookup": (DraftPoint(1, 6, 128, 1e-4, 0.0),)}, 0.0, 7.0
)


class NoStore:
    def __init__(self) -> None:
        self.extended: list[CostCurves] = []

    def extend(self, key: str, more: CostCurves) -> str:
        assert key == "key"
        self.extended.append(more)
        return ""


def meter_of(
    target: Any, drafter: Drafter, learnt: list[CostCurves], store: Any, clock: Clock | None = None
) -> BatchMeter:
    """Without a clock steps take no time, so that one is due after every round."""
    return BatchMeter(target, drafter, ONE_ROW, learnt.append, key="key", store=store, clock=clock or Clock())


def test_several_rows_are_measured_between_the_rounds_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_llama(), tiny_config("llama"))
    lookup = LookupDrafter()
    lookup.bind(target)
    run = RoundTimer.run
    monkeypatch.setattr(
        RoundTimer,
        "run",
        lambda timer, item: 0 * run(timer, item) + forward_seconds(item.size, 0, timer.rows),
    )
    learnt: list[CostCurves] = []
    store = NoStore()
    meter = meter_of(target, lookup, learnt, store)
    assert not meter.due(1)
    requests = [GenerateRequest(tuple(range(5, 9 + i)), 90) for i in range(3)]

    def texts(meter: BatchMeter | None) -> list[list[int]]:
        with Scheduler(target, lookup, cap=FixedCaps({"lookup": 4}), max_rows=3, meter=meter) as scheduler:
            streams = [scheduler.submit(request) for request in requests]
            return [
                [token for event in stream if isinstance(event, Committed) for token in event.tokens]
                for stream in streams
            ]

    assert texts(meter) == texts(None)
    assert not meter.due(3)
    assert learnt
    assert learnt[-1].verify_seconds(4, depth=128, rows=3) == pytest.approx(forward_seconds(4, 0, 3))
    assert learnt[-1].verify_seconds(1, depth=128) == 0.01
    assert all(more.measured_at == ONE_ROW.measured_at for more in store.extended)
    assert with_rows(ONE_ROW, store.extended[0]) == learnt[0]


def test_measuring_several_rows_takes_no_more_than_its_share_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, steps = Clock(), [0.3, 0.02, 0.0, 0.1] * 5
    meter = meter_of(CostlyTarget(clock, lazy=False, context=512), LookupDrafter(), [], None, clock)

    def measured(rows: int) -> Any:
        for seconds in steps:
            clock.now += seconds
            yield seconds
        return Measured(CostCurves((VerifyPoint(rows, 1, 128, 0.02, 0.0),), {}, 0.0, 8.0), "", 1, 0.1)

    monkeypatch.setattr(meter, "_begin", measured)
    measuring = rounds = 0.0
    while not meter.known(2):
        before = clock.now
        if meter.due(2):
            assert meter.step(2) is None
            measuring += clock.now - before
        clock.now += 0.01
        rounds += 0.01
    assert measuring == pytest.approx(sum(steps))
    assert measuring <= (rounds + 0.01) * METER_SHARE / (1 - METER_SHARE)


@pytest.mark.parametrize(("refusal", "stored"), [("", True), ("uneven", False)])
def test_what_is_in_doubt_of_several_rows_serves_this_session_only(
    monkeypatch: pytest.MonkeyPatch, refusal: str, stored: bool
) -> None:
    learnt: list[CostCurves] = []
    store = NoStore()
    clock = Clock()
    meter = meter_of(CostlyTarget(clock, lazy=False, context=512), CostlyDrafter(clock), learnt, store)
    two = CostCurves((VerifyPoint(2, 1, 128, 0.02, 0.0),), {}, 0.0, 8.0)

    def measured(rows: int) -> Any:
        assert rows == 2
        yield 0.5
        return Measured(two, refusal, 1, 0.1)

    monkeypatch.setattr(meter, "_begin", measured)
    assert meter.step(2) is None
    assert meter.due(2)
    assert meter.step(2) is None
    assert not meter.due(2)
    assert learnt[-1].verify_seconds(1, depth=128, rows=2) == pytest.approx(0.02)
    assert bool(store.extended) is stored


def test_what_fails_to_be_measured_is_not_tried_again() -> None:
    clock = Clock()
    target = CostlyTarget(clock, lazy=False, context=512)
    drafter = CostlyDrafter(clock)
    learnt: list[CostCurves] = []
    meter = meter_of(target, drafter, learnt, NoStore())

    def fails(n: int = 1, *, rectangle: bool = False) -> RowStates:
        raise RuntimeError("no room")

    target.new_rows = fails  # type: ignore[method-assign]
    assert str(meter.step(4)) == "no room"
    assert not meter.due(4)
    assert meter.due(2)
    assert not learnt


@pytest.mark.usefixtures("troubles")
def test_answers_say_that_their_rounds_could_not_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_llama(), tiny_config("llama"))
    lookup = LookupDrafter()
    lookup.bind(target)
    meter = meter_of(target, lookup, [], NoStore())

    def fails(rows: int) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(meter, "_begin", fails)
    requests = [GenerateRequest(tuple(range(5, 9 + i)), 40) for i in range(2)]
    with Scheduler(target, lookup, cap=FixedCaps({"lookup": 4}), max_rows=2, meter=meter) as scheduler:
        streams = [scheduler.submit(request) for request in requests]
        results = [Result.fold(stream) for stream in streams]
    for result in results:
        assert result.troubles == ("costs not measured: RuntimeError: no room",)
        assert result.to_dict()["troubles"] == result.troubles
        assert result.troubles[0] in closing_line(result)
        assert result.num_tokens == 40


def test_rows_need_a_shorter_plan() -> None:
    most = {"lookup": 32, "dspark": 7}
    assert (
        len(rows_plan(most, 128, context=8192).items)
        < len(pair_plan(most, (128, 4096), context=8192).items) / 2
    )
