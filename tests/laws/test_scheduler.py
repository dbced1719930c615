"""Continuous batching: each request gets what it gets alone, whoever joins, leaves, fails or is dropped."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dspark.contracts import Drafter
from mlx_dspark.drafters.first_hit import FirstHit
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.caps import cap_policy
from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.loop import Batch, VerifyLoop
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.engine.stream import Stream
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint
from mlx_dspark.foundation.errors import ContextOverflow, RequestError
from mlx_dspark.foundation.events import Committed, EngineEvent, Finished, Prefilled, Started, Trouble
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.state.layout import Layout
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.fakes import ScriptedDrafter, TextOracle
from tests.tiny import VOCAB, tiny_config, tiny_llama

DEADLINE = 60.0
"""Seconds after which a wait counts as a deadlock."""

PROMPTS = [
    (5,),
    (7, 11, 13, 17, 19, 23),
    (30, 31, 32, 33, 34, 35, 36, 37) * 5,
    (41, 42, 43, 41, 42, 43, 41, 42),
]
SAMPLERS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.1, top_p=0.9, top_k=20, seed=4),
    SamplingParams(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3, seed=5),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={9: 4.0}),
]


@lru_cache
def target(layout: Layout = Layout.LIST) -> DenseTarget:
    model = tiny_llama(seed=2, tie_word_embeddings=True)
    return target_of(model, tiny_config("llama"), context=512, layout=layout)


def request(i: int, new: int = 20) -> GenerateRequest:
    """Request `i` of a fixed, varied supply."""
    return GenerateRequest(PROMPTS[i % len(PROMPTS)], new, SAMPLERS[i % len(SAMPLERS)])


@cache
def alone(i: int, new: int = 20) -> tuple[int, ...]:
    return tokens_of(Engine(target()).stream(request(i, new)))


def tokens_of(events: Iterator[EngineEvent]) -> tuple[int, ...]:
    return tuple(t for event in events if isinstance(event, Committed) for t in event.tokens)


def events_of(stream: Stream) -> list[EngineEvent]:
    """Everything up to the end, with a deadline for each event."""
    events = []
    while True:
        try:
            events.append(stream.next(DEADLINE))
        except StopIteration:
            return events


def answer(stream: Stream) -> tuple[int, ...]:
    return tokens_of(iter(events_of(stream)))


def scripted(right: float, **options: Any) -> ScriptedDrafter:
    texts = [[*request(i).prompt, *alone(i)] for i in range(20)]
    return ScriptedDrafter(TextOracle(texts), right, vocab=VOCAB, ragged=True, **options)


def lookup() -> LookupDrafter:
    drafter = LookupDrafter(min_n=1, max_n=3)
    drafter.bind(target())
    return drafter


class Seldom(FixedCaps):
    """Lets rows draft in one round of so many."""

    def __init__(self, caps: dict[str, int], every: int) -> None:
        super().__init__(caps)
        self._every, self._asked = every, 0

    def caps(self, rows: int = 1) -> Mapping[str, int]:
        self._asked += 1
        return {} if self._asked % self._every else super().caps(rows)


DRAFTING: dict[str, Callable[[], tuple[Drafter | None, Any]]] = {
    "plain": lambda: (None, None),
    "lookup": lambda: (lookup(), FixedCaps({"lookup": 4})),
    "lookup, live caps": lambda: (d := lookup(), cap_policy(None, d.sources)),
    "always right": lambda: (scripted(1.0), FixedCaps({"scripted": 5})),
    "70%": lambda: (scripted(0.7, taps=(0, 1)), FixedCaps({"scripted": 5})),
    "70%, seldom": lambda: (scripted(0.7, taps=(0, 1)), Seldom({"scripted": 3}, 23)),
    "always wrong": lambda: (scripted(0.0), FixedCaps({"scripted": 3})),
    "lookup, then 70%": lambda: (
        FirstHit([lookup(), scripted(0.7)]),
        FixedCaps({"lookup": 4, "scripted": 3}),
    ),
}
drafting = pytest.mark.parametrize("how", DRAFTING)
layouts = pytest.mark.parametrize("layout", [Layout.LIST, Layout.COMPANY])


def scheduler(how: str = "plain", layout: Layout = Layout.LIST, **options: Any) -> Scheduler:
    drafter, cap = DRAFTING[how]()
    return Scheduler(target(layout), drafter, cap=cap, **options)


@layouts
@drafting
@pytest.mark.parametrize("max_rows", [1, 2, 8])
def test_every_request_gets_what_it_gets_alone(how: str, max_rows: int, layout: Layout) -> None:
    with scheduler(how, layout, max_rows=max_rows) as engine:
        streams = [engine.submit(request(i)) for i in range(20)]
        assert [answer(stream) for stream in streams] == [alone(i) for i in range(20)]


@layouts
@drafting
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_members_join_and_leave_in_any_order(how: str, layout: Layout, data: st.DataObject) -> None:
    """Requests of any length come at any token of the others, and some are cancelled at any token."""
    plan = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, 19), st.integers(1, 20), st.integers(0, 6), st.none() | st.integers(0, 9)
            ),
            min_size=1,
            max_size=6,
        )
    )
    with scheduler(how, layout, max_rows=data.draw(st.integers(1, 5)), prefill_chunk=7) as engine:
        streams, taken = [], []
        for which, new, wait, _ in plan:
            streams.append(engine.submit(request(which, new)))
            taken.append([])
            for stream, events in zip(streams, taken, strict=True):
                events += take(stream, wait)
        for stream, events, (which, new, _, stop) in zip(streams, taken, plan, strict=True):
            if stop is not None:
                events += take(stream, stop)
                stream.cancel()
            events += events_of(stream)
            got = tokens_of(iter(events))
            assert got == alone(which, new)[: len(got)]
            last = events[-1]
            assert isinstance(last, Finished)
            assert last.reason == "cancelled" or len(got) == last.completion_tokens == new


def take(stream: Stream, count: int) -> list[EngineEvent]:
    """Up to `count` events."""
    events: list[EngineEvent] = []
    try:
        while len(events) < count:
            events.append(stream.next(DEADLINE))
    except StopIteration:
        pass
    return events


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_rows_that_end_in_any_order_are_each_delivered_at_once(order: tuple[int, ...]) -> None:
    """Their ends can be read while the engine is held in a later round of the row that lasts longest."""
    lengths = [2, 6, 10, 60]
    gate, seen = threading.Event(), itertools.count()

    def check(token: int) -> bool:
        assert next(seen) != 30 or gate.wait(DEADLINE)
        return False

    with scheduler("plain", max_rows=4) as engine:
        held = Hold(engine)
        streams = {}
        for i in order:
            asked = request(i, lengths[i])
            streams[i] = engine.submit(replace(asked, stop_check=check) if i == 3 else asked)
        held.release()
        assert [answer(streams[i]) for i in range(3)] == [alone(i, lengths[i]) for i in range(3)]
        gate.set()
        assert answer(streams[3]) == alone(3, 60)


class Hold:
    """Keeps the engine thread busy in a stop check until released, so that what is submitted meets."""

    def __init__(self, engine: Scheduler) -> None:
        self._reached, self._gate = threading.Event(), threading.Event()
        self.stream = engine.submit(GenerateRequest((5,), 1, stop_check=self._wait))
        assert self._reached.wait(DEADLINE)

    def _wait(self, token: int) -> bool:
        self._reached.set()
        assert self._gate.wait(DEADLINE)
        return False

    def release(self) -> None:
        self._gate.set()


@pytest.mark.parametrize("layout", [Layout.LIST, Layout.COMPANY])
def test_what_goes_for_plain_rounds_as_before_is_what_would_be_asked_now(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join and leave, and probes come now and then."""
    kept, own = [], VerifyLoop._as_before

    def as_before(self: VerifyLoop, batch: Batch) -> Any:
        plain = own(self, batch)
        if plain is not None:
            n = len(batch.rows)
            assert not any(cap for row in batch.rows for cap in row.caps.caps(n).values())
            assert plain.parked == self._parked(batch)
            assert plain.outlooks == self._outlooks(batch, (), (0,) * n)
        kept.append(plain is not None)
        return plain

    monkeypatch.setattr(VerifyLoop, "_as_before", as_before)
    drafter = scripted(0.0)
    verify = [VerifyPoint(rows, width, 16, 0.001 * width, 0.01) for rows in (1, 2, 3) for width in (1, 17)]
    drafts = [DraftPoint(rows, cap, 16, 0.5, 0.01) for rows in (1, 2, 3) for cap in (1, 16)]
    curves = CostCurves(tuple(verify), {"scripted": tuple(drafts)}, 0.0, 0.0)
    cap = cap_policy("auto", drafter.sources, curves=curves)
    with Scheduler(target(layout), drafter, cap=cap, max_rows=3) as engine:
        streams = [engine.submit(request(i, 90 + 7 * i)) for i in range(7)]
        for i, stream in enumerate(streams):
            assert answer(stream) == alone(i, 90 + 7 * i)
    assert 0 < sum(kept) < len(kept)


def test_requests_that_meet_share_their_rounds_and_never_exceed_the_limit() -> None:
    with scheduler("plain", max_rows=3) as engine:
        held = Hold(engine)
        streams = [engine.submit(request(i)) for i in range(7)]
        held.release()
        reports = [e.report for s in streams for e in events_of(s) if isinstance(e, Committed)]
    assert max(report.rows for report in reports) == 3


def test_rows_in_company_lie_in_a_rectangle_and_a_row_alone_by_itself() -> None:
    """Rounds of the rows that run, while others join, leave and come back."""
    lies: set[tuple[bool, int]] = set()
    failing: Any = Failing(lambda tokens, depth: False, Layout.COMPANY)
    forward = failing.forward

    def watched(tokens: mx.array, rows: Any, **options: Any) -> Any:
        lies.add((rows.padded, len(rows)))
        return forward(tokens, rows, **options)

    failing.forward = watched
    with Scheduler(failing, max_rows=3) as engine:
        held = Hold(engine)
        streams = {i: engine.submit(request(i, 5 + 9 * i)) for i in range(5)}
        held.release()
        assert {i: answer(stream) for i, stream in streams.items()} == {
            i: alone(i, 5 + 9 * i) for i in streams
        }
    assert lies == {(False, 1), (True, 2), (True, 3)}


@pytest.mark.parametrize("how", [how for how in DRAFTING if "live" not in how])
def test_one_request_has_the_events_of_an_engine(how: str) -> None:
    """The same kinds in the same order, the same rounds, and rounds launched ahead. Live caps follow the
    clock, and are left out."""
    drafter, cap = DRAFTING[how]()
    wanted = list(Engine(target(), drafter, cap=cap, prefill_chunk=16).stream(request(2)))
    with scheduler(how, Layout.COMPANY, max_rows=4, prefill_chunk=16) as engine:
        got = events_of(engine.submit(request(2)))
    assert [shape(event) for event in got] == [shape(event) for event in wanted]
    if how == "plain":
        reports = [e.report for e in got if isinstance(e, Committed)][1:]
        ahead = [b.launched_at < a.landed_at for a, b in itertools.pairwise(reports)]
        assert sum(ahead) > len(ahead) / 2


def shape(event: EngineEvent) -> Any:
    """An event without its times."""
    if isinstance(event, Committed | Prefilled):
        event = replace(event, report=replace(event.report, launched_at=0.0, landed_at=0.0, waited=0.0))
    return replace(event, at=0.0) if isinstance(event, Started) else event


def test_a_long_prompt_holds_the_others_up_by_one_chunk_at_a_time() -> None:
    """Between two chunks of it there is a round of the rows that run, and it does not wait for their end."""
    order: list[tuple[str, float]] = []
    with scheduler("plain", max_rows=3, prefill_chunk=2) as engine:
        held = Hold(engine)
        short = engine.submit(GenerateRequest((5, 6), 60))
        long = engine.submit(GenerateRequest(PROMPTS[2], 5))
        held.release()
        for name, stream in (("short", short), ("long", long)):
            for event in events_of(stream):
                if isinstance(event, Committed | Prefilled):
                    chunk = isinstance(event, Prefilled)
                    order.append((f"{name} chunk" if chunk else f"{name} round", event.report.landed_at))
    names = [name for name, _ in sorted(order, key=lambda entry: entry[1])]
    first, last = names.index("long chunk"), len(names) - names[::-1].index("long chunk")
    between = [name for name in names[first:last] if name != "short chunk"]
    assert between.count("long chunk") == 20
    assert not any(a == b == "long chunk" for a, b in itertools.pairwise(between))
    assert not any(a == b == "short round" for a, b in itertools.pairwise(between))


@drafting
@pytest.mark.parametrize("at", range(0, 9))
def test_a_request_cancelled_at_any_event_ends_and_leaves_its_neighbours_alone(how: str, at: int) -> None:
    with scheduler(how, max_rows=3, prefill_chunk=7) as engine:
        before, doomed, after = (engine.submit(request(i)) for i in (3, 2, 1))
        events = take(doomed, at)
        doomed.cancel()
        events += events_of(doomed)
        assert (answer(before), answer(after)) == (alone(3), alone(1))
        assert isinstance(events[-1], Finished)
        got = tokens_of(iter(events))
        assert got == alone(2)[: len(got)]
        assert events[-1].completion_tokens == len(got)


def test_cancelling_takes_effect_within_one_chunk_and_within_one_round() -> None:
    with scheduler("plain", max_rows=2, prefill_chunk=1) as engine:
        reading = engine.submit(request(2, 100))
        take(reading, 3)
        assert events_after_cancelling(engine, reading) <= 1
        running = engine.submit(request(1, 400))
        while not isinstance(running.next(DEADLINE), Committed):
            pass
        assert events_after_cancelling(engine, running) <= 1


def events_after_cancelling(engine: Scheduler, stream: Stream) -> int:
    """Cancels while the engine thread is held, then counts the events that still come before the last."""
    held = Hold(engine)
    backlog = stream._ticket.events.qsize()
    stream.cancel()
    held.release()
    return len(events_of(stream)) - 1 - backlog


@layouts
def test_dropped_and_closed_streams_leave_the_batch_and_free_its_memory(layout: Layout) -> None:
    with scheduler("plain", layout, max_rows=4) as engine:
        answer(engine.submit(request(0)))
        mx.clear_cache()
        before = mx.get_active_memory()
        dropped = engine.submit(request(1, 400))
        closed = engine.submit(request(2, 400))
        unread = engine.submit(request(3, 400))
        take(dropped, 2)
        take(closed, 2)
        del dropped, unread
        gc.collect()
        closed.close()
        with pytest.raises(StopIteration):
            closed.next()
        assert answer(engine.submit(request(4))) == alone(4)
        assert engine.wait(DEADLINE)
        assert mx.get_active_memory() <= before


@drafting
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_stop_check_that_raises_fails_its_own_row(how: str, at: int) -> None:
    seen = itertools.count()

    def check(token: int) -> bool:
        if next(seen) == at:
            raise ValueError("a broken check")
        return False

    with scheduler(how, max_rows=3) as engine:
        held = Hold(engine)
        before, after = engine.submit(request(3)), engine.submit(request(1))
        doomed = engine.submit(replace(request(2), stop_check=check))
        held.release()
        with pytest.raises(ValueError, match="a broken check"):
            answer(doomed)
        assert (answer(before), answer(after)) == (alone(3), alone(1))


class Failing:
    """The tiny target, whose forward raises where `when` says so of the tokens fed and the depths."""

    def __init__(self, when: Callable[[mx.array, list[int]], bool], layout: Layout = Layout.LIST) -> None:
        self.spec = target().spec
        self.new_rows = target(layout).new_rows
        self.when = when

    def forward(self, tokens: mx.array, rows: Any, **options: Any) -> Any:
        if self.when(tokens, rows.depth):
            raise RuntimeError("out of memory")
        return target().forward(tokens, rows, **options)


def once(at: int) -> Callable[[mx.array, list[int]], bool]:
    calls = itertools.count(1)
    return lambda tokens, depth: next(calls) == at


@pytest.mark.usefixtures("troubles")
@pytest.mark.parametrize("at", [1, 2, 3, 5, 7, 9, 12, 16, 20])
@drafting
def test_a_forward_that_raises_once_fails_at_most_a_request_that_was_alone_in_it(how: str, at: int) -> None:
    failing: Any = Failing(once(at))
    drafter, cap = DRAFTING[how]()
    with Scheduler(failing, drafter, cap=cap, max_rows=4) as engine:
        streams = [engine.submit(request(i)) for i in range(4)]
        outcomes = [outcome(stream) for stream in streams]
        for i, (events, error) in enumerate(outcomes):
            got = tokens_of(iter(events))
            assert got == alone(i)[: len(got)]
            assert (error is None) == (got == alone(i))
            assert error is None or "out of memory" in str(error)
        failed = sum(error is not None for _, error in outcomes)
        told = sum(
            isinstance(e, Trouble) and e.what == "read again" for events, _ in outcomes for e in events
        )
        assert failed <= 1
        assert failed == 0 or told == 0
        failing.when = lambda tokens, depth: False
        assert answer(engine.submit(request(3))) == alone(3)


def outcome(stream: Stream) -> tuple[list[EngineEvent], Exception | None]:
    """What came, and what was raised."""
    events: list[EngineEvent] = []
    try:
        while True:
            events.append(stream.next(DEADLINE))
    except StopIteration:
        return events, None
    except Exception as error:  # noqa: BLE001
        return events, error


@pytest.mark.usefixtures("troubles")
@layouts
@pytest.mark.parametrize("deepest", [30, 41, 45, 55])
def test_a_row_that_makes_every_forward_raise_fails_alone(deepest: int, layout: Layout) -> None:
    """Request 2 is the only one that gets so deep, while its prompt is read or later."""
    failing: Any = Failing(lambda tokens, depth: max(depth) + tokens.shape[1] > deepest, layout)
    with Scheduler(failing, max_rows=4, prefill_chunk=8) as engine:
        held = Hold(engine)
        streams = {i: engine.submit(request(i)) for i in (3, 2, 1, 0)}
        held.release()
        with pytest.raises(RuntimeError, match="out of memory") as caught:
            answer(streams.pop(2))
        assert "In the engine thread" in caught.value.__notes__[0]
        assert {i: answer(stream) for i, stream in streams.items()} == {i: alone(i) for i in streams}


@layouts
def test_short_prompts_that_meet_are_read_together(layout: Layout) -> None:
    with scheduler("70%", layout, max_rows=6) as engine:
        held = Hold(engine)
        streams = [engine.submit(request(i)) for i in (1, 3, 5, 7, 9)]
        held.release()
        events = [events_of(stream) for stream in streams]
    read = [e.report for each in events for e in each if isinstance(e, Prefilled)]
    assert [report.rows for report in read] == [5] * 5
    assert sorted(report.certain for report in read) == [6, 6, 6, 8, 8]
    assert [tokens_of(iter(each)) for each in events] == [alone(i) for i in (1, 3, 5, 7, 9)]


@pytest.mark.usefixtures("troubles")
@pytest.mark.parametrize("bad", [None, 3])
def test_prompts_that_cannot_be_read_together_are_read_alone(bad: int | None) -> None:
    """One of them cannot be read at all, or each can."""

    def when(tokens: mx.array, depth: list[int]) -> bool:
        together = len(depth) > 1 and max(depth) == 0
        return together or (
            bad is not None and tokens[:, : len(PROMPTS[bad])].tolist() == [list(PROMPTS[bad])]
        )

    failing: Any = Failing(when)
    with Scheduler(failing, max_rows=6) as engine:
        held = Hold(engine)
        streams = {i: engine.submit(request(i)) for i in (1, 3, 5)}
        held.release()
        for i, stream in streams.items():
            events, error = outcome(stream)
            assert sum(isinstance(e, Trouble) and e.what == "read again" for e in events) == 1
            assert (error is not None) == (i == bad)
            assert error is not None or tokens_of(iter(events)) == alone(i)


@pytest.mark.usefixtures("troubles")
def test_rows_that_fail_only_in_company_are_not_read_again_for_ever() -> None:
    failing: Any = Failing(lambda tokens, depth: len(depth) > 1)
    with Scheduler(failing, max_rows=3) as engine:
        held = Hold(engine)
        streams = [engine.submit(request(i, 60)) for i in range(3)]
        held.release()
        outcomes = [outcome(stream) for stream in streams]
        assert any(error is not None for _, error in outcomes)
        for i, (events, error) in enumerate(outcomes):
            assert error is not None or tokens_of(iter(events)) == alone(i, 60)
        assert answer(engine.submit(request(3))) == alone(3)


def test_requests_that_cannot_run_are_refused_at_once() -> None:
    with scheduler("plain") as engine:
        with pytest.raises(RequestError, match="token id"):
            engine.submit(GenerateRequest((VOCAB,), 1))
        with pytest.raises(ContextOverflow):
            engine.submit(GenerateRequest((5,) * 512, 1))
        assert answer(engine.submit(request(1))) == alone(1)


def test_a_slow_reader_holds_nobody_up() -> None:
    with scheduler("plain", max_rows=2) as engine:
        slow = engine.submit(request(1, 100))
        assert answer(engine.submit(request(2))) == alone(2)
        assert engine.wait(DEADLINE)
        assert answer(slow) == alone(1, 100)


@pytest.mark.parametrize("drain", [True, False])
def test_closing_finishes_or_cancels_what_is_there(drain: bool) -> None:
    engine = scheduler("plain", max_rows=2)
    streams = [engine.submit(request(i, 60)) for i in range(5)]
    take(streams[0], 2)
    closing = threading.Thread(target=engine.close, kwargs={"drain": drain})
    closing.start()
    closing.join(DEADLINE)
    assert not engine.running
    ends = []
    for i, stream in enumerate(streams):
        events = events_of(stream)
        got = tokens_of(iter(events))
        assert got == alone(i, 60)[: len(got)]
        last = events[-1] if events else Finished("cancelled", 0, 0)
        assert isinstance(last, Finished)
        ends.append(last.reason)
    assert ("cancelled" in ends) is not drain
    with pytest.raises(RequestError, match="closed"):
        engine.submit(request(0))
    engine.close()


def test_an_engine_that_is_dropped_ends_its_thread_but_not_under_a_reader() -> None:
    engine = scheduler("plain")
    thread, stream = engine._thread, engine.submit(request(1))
    del engine
    gc.collect()
    assert answer(stream) == alone(1)
    del stream
    gc.collect()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def test_an_engine_may_be_closed_from_its_own_thread() -> None:
    engine = scheduler("plain")
    stream = engine.submit(replace(request(1), stop_check=lambda token: bool(engine.close())))
    assert events_of(stream)[-1] == Finished("cancelled", 6, 1)
    engine._thread.join(DEADLINE)
    assert not engine.running


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        ("plain", Layout.LIST),
        ("lookup, live caps", Layout.LIST),
        ("lookup, live caps", Layout.COMPANY),
        ("always right", Layout.LIST),
    ],
)
def test_many_threads_with_random_drops_neither_mix_nor_hang_nor_leak(how: str, layout: Layout) -> None:
    with scheduler(how, layout, max_rows=6, prefill_chunk=7) as engine:
        answer(engine.submit(request(0)))
        assert engine.wait(DEADLINE)
        mx.clear_cache()
        before = mx.get_active_memory()
        until = time.monotonic() + 2.0

        def client(number: int) -> int:
            rng, done = random.Random(number), 0
            while time.monotonic() < until:
                i = rng.randrange(20)
                stream = engine.submit(request(i))
                fate = rng.random()
                if fate < 0.25:
                    take(stream, rng.randrange(6))
                    stream.close()
                elif fate < 0.5:
                    got = tokens_of(iter(take(stream, rng.randrange(6))))
                    assert got == alone(i)[: len(got)]
                else:
                    assert answer(stream) == alone(i)
                    done += 1
            return done

        for i in range(20):
            alone(i)
        with ThreadPoolExecutor(16) as pool:
            answered = list(pool.map(client, range(16), timeout=DEADLINE))
        assert engine.wait(DEADLINE)
        assert sum(answered) > 0
        assert mx.get_active_memory() <= before
