"""A drafter that raises costs drafts, never text: its rows go on plainly, and are told once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from mlx_dspark.cli.show import closing_line
from mlx_dspark.contracts import Ask, Observation, Proposal
from mlx_dspark.drafters.first_hit import FirstHit
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.events import Committed, EngineEvent, Finished, Trouble
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.nn.probs import PointMass
from mlx_dspark.session import Result
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.fakes import ScriptedDrafter, ScriptedRows, TextOracle
from tests.tiny import VOCAB, tiny_config, tiny_llama

PROMPTS = [(5, 6, 7), (41, 42, 43, 41, 42, 43), (7, 11, 13, 17, 19, 23, 29)]
SAMPLERS = [SamplingParams(), SamplingParams(temperature=0.8, seed=3), SamplingParams(repetition_penalty=1.2)]
NEW = 24
CAP = FixedCaps({"scripted": 3})


@cache
def target() -> DenseTarget:
    return target_of(tiny_llama(seed=2, tie_word_embeddings=True), tiny_config("llama"), context=512)


def request(i: int) -> GenerateRequest:
    return GenerateRequest(PROMPTS[i], NEW, SAMPLERS[i])


@cache
def alone(i: int) -> tuple[int, ...]:
    return tokens_of(Engine(target()).stream(request(i)))


def tokens_of(events: Any) -> tuple[int, ...]:
    return tuple(t for event in events if isinstance(event, Committed) for t in event.tokens)


Fault = Callable[["Faulty", str, Sequence[Sequence[int]]], None]


class FaultyRows(ScriptedRows):
    drafter: Faulty

    def join(self, other: ScriptedRows) -> None:
        self.drafter.fault(self.drafter, "join", self.tokens + other.tokens)
        super().join(other)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.drafter.fault(self.drafter, "select", self.tokens)


class Faulty(ScriptedDrafter):
    """Tells `fault` what it is about to do and for which rows' tokens; `fault` may raise."""

    def __init__(self, fault: Fault) -> None:
        texts = [[*request(i).prompt, *alone(i)] for i in range(3)]
        super().__init__(TextOracle(texts), 0.8, vocab=VOCAB, taps=(0,))
        self.fault = fault
        self.calls: dict[str, int] = {}

    def new_rows(self, n: int = 1) -> FaultyRows:
        rows = FaultyRows(n)
        rows.drafter = self
        return rows

    def propose(self, rows: ScriptedRows, ask: Ask) -> Proposal:
        self.fault(self, "propose", [t if cap else [] for t, cap in zip(rows.tokens, ask.caps, strict=True)])
        return super().propose(rows, ask)

    def observe(self, rows: ScriptedRows, seen: Observation) -> None:
        """Row by row, so that those before the fault are reached."""
        for r, tokens in enumerate(seen.tokens):
            if tokens:
                self.fault(self, "observe", [[*rows.tokens[r], *tokens]])
                mine = [[] if other != r else tokens for other in range(len(seen.tokens))]
                super().observe(rows, replace(seen, tokens=mine))

    def blind(self, rows: ScriptedRows, anchors: Sequence[int], asked: Collection[str]) -> bool:
        self.fault(self, "blind", rows.tokens)
        return False


def always(what: str) -> Fault:
    """Raises for every row with 5 tokens or more."""

    def fault(drafter: Faulty, now: str, tokens: Sequence[Sequence[int]]) -> None:
        if now == what and any(len(row) >= 5 for row in tokens):
            raise ValueError(f"a broken {what}")

    return fault


def for_one(what: str, i: int) -> Fault:
    """Raises where request `i` is among the rows, and has 3 tokens beyond its prompt."""
    prompt = list(PROMPTS[i])

    def fault(drafter: Faulty, now: str, tokens: Sequence[Sequence[int]]) -> None:
        reached = any(list(row[: len(prompt)]) == prompt and len(row) > len(prompt) + 3 for row in tokens)
        if now == what and reached:
            raise ValueError(f"a broken {what}")

    return fault


def once(what: str, at: int) -> Fault:
    def fault(drafter: Faulty, now: str, tokens: Sequence[Sequence[int]]) -> None:
        drafter.calls[now] = drafter.calls.get(now, 0) + 1
        if now == what and drafter.calls[now] == at:
            raise ValueError(f"a broken {what}")

    return fault


def together(drafter: Any, cap: FixedCaps = CAP) -> list[list[EngineEvent]]:
    """The events of all requests, which run as one batch, or one after the other where none is joined."""
    with Scheduler(target(), drafter, cap=cap, max_rows=3) as engine:
        streams = [engine.submit(request(i)) for i in range(3)]
        return [list(stream) for stream in streams]


def troubles_of(events: Sequence[EngineEvent]) -> list[Trouble]:
    return [event for event in events if isinstance(event, Trouble)]


def drafted(events: Sequence[EngineEvent]) -> int:
    return sum(event.report.drafted for event in events if isinstance(event, Committed))


def assert_untouched(answers: Sequence[Sequence[EngineEvent]]) -> None:
    for i, events in enumerate(answers):
        assert tokens_of(events) == alone(i)
        assert isinstance(events[-1], Finished)
        assert len(troubles_of(events)) <= 1


@pytest.mark.usefixtures("troubles")
@pytest.mark.parametrize("what", ["propose", "observe", "join", "select"])
def test_a_drafter_that_always_raises_leaves_every_text_as_it_is(what: str) -> None:
    answers = together(Faulty(always(what)))
    assert_untouched(answers)
    seen = [trouble for events in answers for trouble in troubles_of(events)]
    assert seen
    assert all(trouble.what == "drafting stopped" for trouble in seen)
    assert all(trouble.error == f"ValueError: a broken {what}" for trouble in seen)
    assert all("in fault" in trouble.traceback for trouble in seen)


@pytest.mark.usefixtures("troubles")
@pytest.mark.parametrize("what", ["propose", "observe"])
@pytest.mark.parametrize("i", range(3))
def test_a_row_whose_drafts_raise_stops_drafting_alone(what: str, i: int) -> None:
    answers = together(Faulty(for_one(what, i)))
    assert_untouched(answers)
    assert [len(troubles_of(events)) for events in answers] == [int(r == i) for r in range(3)]
    for r, events in enumerate(answers):
        place = events.index(troubles_of(events)[0]) if r == i else 0
        assert (drafted(events[place + 1 :]) > 0) is (r != i)


@pytest.mark.usefixtures("troubles")
@pytest.mark.parametrize("what", ["propose", "observe"])
@pytest.mark.parametrize("at", [1, 2, 4, 7])
def test_a_call_that_raises_once_stops_at_most_the_rows_it_was_for(what: str, at: int) -> None:
    """A row that the failing call did not reach is shown its tokens after all, and drafts on."""
    answers = together(Faulty(once(what, at)))
    assert_untouched(answers)
    assert any(troubles_of(events) for events in answers)


@pytest.mark.usefixtures("troubles")
@pytest.mark.parametrize("what", ["propose", "observe", "blind"])
@pytest.mark.parametrize("how", ["engine", "rectangle", "scheduler"])
def test_every_engine_goes_on_plainly_and_tells_once(what: str, how: str) -> None:
    drafter = Faulty(always(what))
    if how == "scheduler":
        with Scheduler(target(), drafter, cap=CAP) as engine:
            events = list(engine.stream(request(1)))
    else:
        events = list(Engine(target(), drafter, cap=CAP, rectangle=how == "rectangle").stream(request(1)))
    if what == "blind":
        events = list(Engine(target(), drafter, cap=FixedCaps({"scripted": 0})).stream(request(1)))
    assert tokens_of(events) == alone(1)
    assert len(troubles_of(events)) == (what != "blind")
    result = Result.fold(events)
    assert list(result.troubles) == [f"drafting stopped: {t.error}" for t in troubles_of(events)]
    assert all(trouble in closing_line(result) for trouble in result.troubles)


@pytest.mark.usefixtures("troubles")
def test_the_next_request_drafts_again() -> None:
    with Scheduler(target(), Faulty(once("propose", 2)), cap=CAP) as engine:
        assert troubles_of(list(engine.submit(request(1))))
        events = list(engine.submit(request(1)))
    assert not troubles_of(events)
    assert drafted(events)


class Misshapen(ScriptedDrafter):
    """Proposals that are not what was asked for."""

    def __init__(self, how: str) -> None:
        super().__init__(lambda _, n: [1] * n, 1.0, vocab=VOCAB)
        self.how = how

    def propose(self, rows: ScriptedRows, ask: Ask) -> Proposal:
        good = super().propose(rows, ask)
        match self.how:
            case "too long":
                tokens = mx.concatenate([good.tokens, good.tokens], axis=1)
                return Proposal(tokens, tuple(2 * m for m in good.lengths), PointMass(tokens, VOCAB))
            case "a row too few":
                return replace(good, lengths=good.lengths[1:])
            case "a row too many":
                return replace(good, lengths=(*good.lengths, 0))
            case "narrow":
                return replace(good, tokens=good.tokens[:, 1:])
            case _:
                return replace(good, tokens=good.tokens[0])


@pytest.mark.usefixtures("troubles")
@pytest.mark.parametrize("how", ["too long", "a row too few", "a row too many", "narrow", "flat"])
def test_proposals_that_were_not_asked_for_are_refused(how: str) -> None:
    answers = together(Misshapen(how))
    assert_untouched(answers)
    assert all("ValueError: drafts of" in troubles_of(events)[0].error for events in answers)


@pytest.mark.usefixtures("troubles")
@pytest.mark.parametrize("what", ["propose", "observe"])
def test_a_part_of_a_composition_that_raises_stops_the_drafting_of_its_rows(what: str) -> None:
    lookup = LookupDrafter(min_n=2, max_n=3)
    lookup.bind(target())
    cap = FixedCaps({"lookup": 3, "scripted": 3})
    answers = together(FirstHit([lookup, Faulty(always(what))]), cap)
    assert_untouched(answers)
    assert any(troubles_of(events) for events in answers)
