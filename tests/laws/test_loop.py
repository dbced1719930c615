"""The loop's law: greedy ids equal stock mlx-lm's, whatever drafts, whatever the cap, however many rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest

from mlx_dspark.contracts import Drafter, Logits
from mlx_dspark.drafters.first_hit import FirstHit
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine import engine as engine_module
from mlx_dspark.engine import loop
from mlx_dspark.engine.caps import LiveCaps, cap_policy
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.caps import CapPolicy, FixedCaps
from mlx_dspark.foundation.errors import ContextOverflow, EmptyPrompt, RequestError
from mlx_dspark.foundation.events import Committed, EngineEvent, Finished, Prefilled, Started
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.state.layout import Layout
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.fakes import ScriptedDrafter, TextOracle, stock_greedy
from tests.tiny import VOCAB, tiny_config, tiny_llama, tiny_qwen3

NEW = 40
PROMPTS = [
    [5],
    [7, 11, 13, 17, 19, 23],
    [30, 31, 32, 33, 34, 35, 36, 37] * 5,
    [41, 42, 43, 41, 42, 43, 41, 42],
]


@lru_cache
def model_of(family: str) -> Any:
    return tiny_qwen3(seed=1) if family == "qwen3" else tiny_llama(seed=2, tie_word_embeddings=True)


@lru_cache
def target_for(family: str) -> DenseTarget:
    return target_of(model_of(family), tiny_config(family), context=512)


@lru_cache
def truth(family: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(stock_greedy(model_of(family), prompt, NEW)) for prompt in PROMPTS)


def oracle(family: str) -> TextOracle:
    return TextOracle([[*p, *t] for p, t in zip(PROMPTS, truth(family), strict=True)])


def ids_of(
    target: Any,
    drafter: Drafter | None,
    policy: CapPolicy,
    prompts: Sequence[Sequence[int]],
    *,
    new: int | Sequence[int] = NEW,
    chunk: int = 512,
    sampling: SamplingParams | None = None,
    rectangle: bool = False,
    **limits: Any,
) -> list[list[int]]:
    engine = Engine(target, drafter, cap=policy, prefill_chunk=chunk, rectangle=rectangle)
    wanted = [new] * len(prompts) if isinstance(new, int) else new
    requests = [
        GenerateRequest(tuple(p), n, sampling or SamplingParams(), **limits)
        for p, n in zip(prompts, wanted, strict=True)
    ]
    answers: list[list[int]] = [[] for _ in prompts]
    for index, event in engine.run(requests):
        if isinstance(event, Committed):
            answers[index] += event.tokens
    return answers


def scripted(family: str, right: float, **options: Any) -> ScriptedDrafter:
    return ScriptedDrafter(oracle(family), right, vocab=VOCAB, **options)


families = pytest.mark.parametrize("family", ["llama", "qwen3"])
qualities = pytest.mark.parametrize("right", [1.0, 0.7, 0.0], ids=["always-right", "70%", "always-wrong"])


@families
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_plain_decoding_equals_stock(family: str, rows: int) -> None:
    answers = ids_of(target_for(family), None, FixedCaps({}), PROMPTS[:rows])
    assert answers == [list(t) for t in truth(family)[:rows]]


@families
@qualities
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("cap", [0, 1, 2, 3, 5, 8, 16])
def test_any_draft_at_any_cap_equals_stock(family: str, right: float, rows: int, cap: int) -> None:
    drafter = scripted(family, right, seed=cap)
    answers = ids_of(target_for(family), drafter, FixedCaps({"scripted": cap}), PROMPTS[-rows:])
    assert answers == [list(t) for t in truth(family)[-rows:]]


@families
@qualities
@pytest.mark.parametrize("layout", [Layout.LIST, Layout.COMPANY])
def test_ragged_drafts_and_rows_that_end_at_different_rounds_equal_stock(
    family: str, right: float, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_for(family), "layout", layout)
    lengths = [3, NEW, 17, 9]
    drafter = scripted(family, right, ragged=True)
    answers = ids_of(target_for(family), drafter, FixedCaps({"scripted": 6}), PROMPTS, new=lengths)
    assert answers == [list(t)[:n] for t, n in zip(truth(family), lengths, strict=True)]


@families
@qualities
@pytest.mark.parametrize("chunk", [5, 512])
def test_a_rectangle_of_rows_equals_stock(family: str, right: float, chunk: int) -> None:
    prompts, lengths = [PROMPTS[i % 4] for i in range(12)], [3, NEW, 17, 9, 1, 30, 12, 25, 2, 8, NEW, 40]
    answers = [list(truth(family)[i % 4])[:n] for i, n in enumerate(lengths)]
    options = {"new": lengths, "chunk": chunk, "rectangle": True}
    drafter = scripted(family, right, ragged=True)
    assert ids_of(target_for(family), drafter, FixedCaps({"scripted": 5}), prompts, **options) == answers
    assert ids_of(target_for(family), None, FixedCaps({}), prompts, **options) == answers


@families
@qualities
@pytest.mark.parametrize("live", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("listed", [True, False])
def test_bounded_live_rows_give_each_request_what_it_gets_alone(
    family: str, right: float, live: int, listed: bool
) -> None:
    lengths = [3, NEW, 17, 9, 1, 30, 12, 25, 2, 8, NEW, 40, 1, 1, 5, 20, 7]
    sampled = {1: SAMPLERS["temperature"], 6: SAMPLERS["filters"], 11: SAMPLERS["penalties"]}
    requests = [
        GenerateRequest(tuple(PROMPTS[i % 4]), n, sampled.get(i, SamplingParams()))
        for i, n in enumerate(lengths)
    ]
    target = target_for(family)
    alone = [fold(Engine(target).run([request]))[0] for request in requests]
    for drafter in (None, scripted(family, right, ragged=True)):
        engine = Engine(target, drafter, cap=FixedCaps({"scripted": 4}), rectangle=True)
        events = list(engine.run(requests if listed else iter(requests), live_rows=live))
        assert fold(iter(events), len(requests)) == alone
        assert most_at_once(events) <= live


def fold(events: Iterator[tuple[int, EngineEvent]], count: int = 1) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in range(count)]
    for index, event in events:
        if isinstance(event, Committed):
            answers[index] += event.tokens
    return answers


def most_at_once(events: Sequence[tuple[int, EngineEvent]]) -> int:
    """The most requests that were started and not finished."""
    running = most = 0
    for _, event in events:
        running += isinstance(event, Started) - isinstance(event, Finished)
        most = max(most, running)
    assert running == 0
    return most


def test_requests_are_taken_as_rows_become_free() -> None:
    taken: list[int] = []

    def requests() -> Iterator[GenerateRequest]:
        for i in range(12):
            taken.append(i)
            yield GenerateRequest(tuple(PROMPTS[i % 4]), 5 + i)

    finished = 0
    for _, event in Engine(target_for("llama"), rectangle=True).run(requests(), live_rows=3):
        finished += isinstance(event, Finished)
        assert len(taken) <= 3 + finished
    assert (len(taken), finished) == (12, 12)


def test_a_taken_request_that_cannot_run_is_refused() -> None:
    engine = Engine(target_for("llama"), rectangle=True)
    with pytest.raises(RequestError, match="token id"):
        list(engine.run(iter([GenerateRequest((VOCAB,), 1)]), live_rows=2))
    assert list(engine.run(iter([]), live_rows=2)) == []


@families
@pytest.mark.parametrize("policy", ["auto", None, 0, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_lookup_equals_stock(family: str, policy: Any, rows: int) -> None:
    drafter = LookupDrafter(min_n=1, max_n=3)
    target = target_for(family)
    drafter.bind(target)
    answers = ids_of(target, drafter, cap_policy(policy, drafter.sources), PROMPTS[-rows:])
    assert answers == [list(t) for t in truth(family)[-rows:]]


@qualities
@pytest.mark.parametrize("rows", [1, 4])
def test_lookup_then_a_model_equals_stock_and_both_draft(right: float, rows: int) -> None:
    target = target_for("llama")
    drafter = FirstHit([LookupDrafter(min_n=2, max_n=3), scripted("llama", right)])
    drafter.bind(target)
    engine = Engine(target, drafter, cap=FixedCaps({"lookup": 4, "scripted": 3}))
    requests = [GenerateRequest(tuple(p), NEW) for p in PROMPTS[-rows:]]
    answers: list[list[int]] = [[] for _ in requests]
    sources: set[str] = set()
    for index, event in engine.run(requests):
        if isinstance(event, Committed):
            answers[index] += event.tokens
            sources.add(event.report.source)
    assert answers == [list(t) for t in truth("llama")[-rows:]]
    assert sources >= {"lookup", "scripted"}


@pytest.mark.parametrize("chunk", [1, 3, 7, 512])
def test_prefill_chunks_change_nothing(chunk: int) -> None:
    drafter = scripted("qwen3", 0.7, taps=(-1, 0, 1))
    answers = ids_of(target_for("qwen3"), drafter, FixedCaps({"scripted": 4}), PROMPTS, chunk=chunk)
    assert answers == [list(t) for t in truth("qwen3")]


def test_launch_ahead_and_its_absence_give_the_same_ids_and_states() -> None:
    lazy = target_for("llama")
    eager = target_of(tiny_llama(seed=2, tie_word_embeddings=True), tiny_config("llama"), context=512)
    eager.spec = replace(eager.spec, lazy=False)
    ends = frozenset({truth("llama")[1][9]})
    for target in (lazy, eager):
        answers = ids_of(target, None, FixedCaps({}), PROMPTS, new=[5, NEW, 1, 12], end_ids=ends)
        stopped = [_until(list(t), ends) for t in truth("llama")]
        assert answers == [s[:n] for s, n in zip(stopped, [5, NEW, 1, 12], strict=True)]


def _until(tokens: list[int], ends: frozenset[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1]
    return tokens


@qualities
@pytest.mark.parametrize("at", range(0, 12))
def test_an_end_id_at_any_place_of_a_draft_run_ends_the_text_there(right: float, at: int) -> None:
    ends = frozenset({truth("qwen3")[1][at]})
    answers = ids_of(
        target_for("qwen3"), scripted("qwen3", right), FixedCaps({"scripted": 5}), PROMPTS, end_ids=ends
    )
    assert answers == [_until(list(t), ends) for t in truth("qwen3")]


@qualities
@pytest.mark.parametrize("wanted", [1, 2, 3, 10, 11])
def test_the_token_limit_is_exact(right: float, wanted: int) -> None:
    target, drafter = target_for("llama"), scripted("llama", right)
    engine = Engine(target, drafter, cap=FixedCaps({"scripted": 7}))
    events = list(engine.stream(GenerateRequest(tuple(PROMPTS[1]), wanted)))
    tokens = [t for e in events if isinstance(e, Committed) for t in e.tokens]
    assert tokens == list(truth("llama")[1][:wanted])
    assert events[-1] == Finished("length", len(PROMPTS[1]), wanted)


def test_a_stop_check_sees_each_token_once_and_ends_the_text() -> None:
    seen: list[int] = []

    def check(token: int) -> bool:
        seen.append(token)
        return len(seen) == 13

    drafter = scripted("llama", 1.0)
    engine = Engine(target_for("llama"), drafter, cap=FixedCaps({"scripted": 5}))
    events = list(engine.stream(GenerateRequest(tuple(PROMPTS[1]), NEW, stop_check=check)))
    assert seen == list(truth("llama")[1][:13])
    assert events[-1] == Finished("stop", len(PROMPTS[1]), 13)


def test_events_tell_the_whole_story_in_order() -> None:
    drafter = scripted("qwen3", 0.7)
    engine = Engine(target_for("qwen3"), drafter, cap=FixedCaps({"scripted": 4}), prefill_chunk=16)
    events = list(engine.stream(GenerateRequest(tuple(PROMPTS[2]), NEW)))
    assert isinstance(events[0], Started)
    assert [e.done for e in events if isinstance(e, Prefilled)] == [16, 32, 40]
    assert isinstance(events[-1], Finished)
    committed = [e for e in events if isinstance(e, Committed)]
    for event in committed:
        report = event.report
        assert report.committed == len(event.tokens) <= report.accepted + 1
        assert report.accepted <= report.drafted <= report.cap <= 4
        assert report.width == report.certain + report.drafted
        assert report.source == ("scripted" if report.drafted else "")
        assert report.launched_at <= report.landed_at
    depths = [e.report.depth for e in committed]
    assert depths == sorted(depths)


@pytest.mark.parametrize("rows", [1, 3])
def test_drafters_observe_every_fed_token_with_its_features(rows: int) -> None:
    target = target_for("qwen3")
    drafter = scripted("qwen3", 0.7, taps=(-1, 1))
    lengths = [NEW] * rows
    ids_of(target, drafter, FixedCaps({"scripted": 4}), PROMPTS[1 : 1 + rows], new=lengths, chunk=4)
    seen = drafter.last_rows
    assert seen is not None
    for tokens, features in zip(seen.tokens, seen.features, strict=True):
        rows_alone = target.new_rows(1)
        with rows_alone.transaction(len(tokens)) as transaction:
            whole = target.forward(mx.array([tokens]), rows_alone, taps=(-1, 1), logits=Logits.NONE)
            transaction.commit([len(tokens)])
        assert whole.features is not None
        joined = mx.concatenate(features, axis=0)
        assert joined.shape == whole.features[0].shape
        assert mx.allclose(joined, whole.features[0], rtol=1e-4, atol=1e-4).item()


def test_taps_are_the_residual_stream_and_the_models_own_forward_is_untouched() -> None:
    model, target = model_of("qwen3"), target_for("qwen3")
    tokens = mx.array([PROMPTS[1]])
    rows = target.new_rows(1)
    with rows.transaction(tokens.shape[1]):
        out = target.forward(tokens, rows, taps=(-1, 0, 1), logits=Logits.ALL)
    assert out.logits is not None
    assert out.features is not None
    assert mx.array_equal(out.logits, model(tokens)).item()
    entering, _, last = mx.split(out.features, 3, axis=-1)
    assert mx.array_equal(entering, model.model.embed_tokens(tokens)).item()
    assert mx.array_equal(target.embed(tokens), entering).item()
    assert mx.array_equal(target.unembed(model.model.norm(last)), out.logits).item()


SAMPLERS = {
    "temperature": SamplingParams(temperature=0.8, seed=3),
    "filters": SamplingParams(temperature=1.1, top_p=0.9, top_k=20, min_p=0.01, seed=4),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, seed=5
    ),
    "greedy-penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={9: 4.0}),
}
samplers = pytest.mark.parametrize("sampling", SAMPLERS.values(), ids=SAMPLERS)


@samplers
@qualities
@pytest.mark.parametrize("cap", [1, 5])
def test_a_seed_gives_the_same_tokens_plain_or_drafted_alone_or_in_a_batch(
    sampling: SamplingParams, right: float, cap: int
) -> None:
    target = target_for("llama")
    plain = [ids_of(target, None, FixedCaps({}), [p], sampling=sampling)[0] for p in PROMPTS]
    drafter = ScriptedDrafter(
        TextOracle([[*p, *t] for p, t in zip(PROMPTS, plain, strict=True)]), right, vocab=VOCAB
    )
    policy = FixedCaps({"scripted": cap})
    alone = [ids_of(target, drafter, policy, [p], sampling=sampling)[0] for p in PROMPTS]
    together = ids_of(target, drafter, policy, PROMPTS, sampling=sampling)
    assert alone == plain
    assert together == plain
    if sampling.seed is not None:
        other = SamplingParams(temperature=sampling.temperature, seed=99)
        assert ids_of(target, None, FixedCaps({}), [PROMPTS[1]], sampling=other)[0] != plain[1]


def test_logprobs_come_with_every_token_and_are_those_of_plain_decoding() -> None:
    sampling = SamplingParams(logprobs=3)
    reported = []
    for drafter, policy in ((None, FixedCaps({})), (scripted("llama", 0.7), FixedCaps({"scripted": 4}))):
        engine = Engine(target_for("llama"), drafter, cap=policy)
        request = GenerateRequest(tuple(PROMPTS[1]), 20, sampling)
        entries = [entry for e in engine.stream(request) if isinstance(e, Committed) for entry in e.logprobs]
        assert [entry.token for entry in entries] == list(truth("llama")[1][:20])
        assert all(len(entry.top) == 3 and entry.top[0][0] == entry.token for entry in entries)
        reported.append([entry.logprob for entry in entries])
    assert reported[0] == pytest.approx(reported[1], abs=1e-4)


class Clock:
    """What the engine takes for the time: it moves by one second with each look, and where it is pushed."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (loop, engine_module):
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("pause_seconds", [0.0, 20.0])
def test_a_losing_drafter_is_parked_and_says_so_however_slow_the_reader(
    pause_seconds: float, lookup: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = scripted("llama", 0.0)
    propose = drafter.propose

    def costly(*args: Any) -> Any:
        clock.now += 1.0
        return propose(*args)

    monkeypatch.setattr(drafter, "propose", costly)
    drafter = FirstHit([LookupDrafter(), drafter]) if lookup else drafter
    policy = LiveCaps(drafter.sources, choose=False)
    engine = Engine(target_for("llama"), drafter, cap=policy)
    committed = []
    for event in engine.stream(GenerateRequest(tuple(PROMPTS[1]), NEW)):
        if isinstance(event, Committed):
            committed.append(event)
            clock.now += pause_seconds
    assert [t for e in committed for t in e.tokens] == list(truth("llama")[1])
    assert sum(e.report.source == drafter.sources[-1].name for e in committed) <= 8
    assert any(e.report.parked for e in committed)
    assert not any(e.report.parked and e.report.drafted for e in committed)


@pytest.mark.usefixtures("clock")
def test_a_good_drafter_is_never_called_parked() -> None:
    drafter = scripted("llama", 1.0)
    engine = Engine(target_for("llama"), drafter, cap=LiveCaps(drafter.sources, choose=False))
    events = list(engine.stream(GenerateRequest(tuple(PROMPTS[1]), NEW)))
    assert any(e.report.drafted for e in events if isinstance(e, Committed))
    assert not any(e.report.parked for e in events if isinstance(e, Committed))


def test_drafts_past_the_end_of_the_text_are_not_counted_as_accepted() -> None:
    ends = frozenset({truth("qwen3")[1][4]})
    drafter = scripted("qwen3", 1.0)
    engine = Engine(target_for("qwen3"), drafter, cap=FixedCaps({"scripted": 8}))
    events = list(engine.stream(GenerateRequest(tuple(PROMPTS[1]), NEW, end_ids=ends)))
    report = [e.report for e in events if isinstance(e, Committed)][-1]
    assert report.accepted == report.committed < report.drafted


def test_threads_may_share_an_engine() -> None:
    drafter = scripted("qwen3", 0.7, taps=(0, 1))
    engine = Engine(target_for("qwen3"), drafter, cap=FixedCaps({"scripted": 3}))

    def answer(i: int) -> list[int]:
        stream = engine.stream(GenerateRequest(tuple(PROMPTS[i % 4]), NEW))
        return [t for e in stream if isinstance(e, Committed) for t in e.tokens]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, range(12))) == [list(truth("qwen3")[i % 4]) for i in range(12)]


def test_lookup_rounds_run_ahead_where_no_draft_can_come() -> None:
    target, drafter = target_for("llama"), LookupDrafter(min_n=3, max_n=4)
    drafter.bind(target)
    engine = Engine(target, drafter, cap=FixedCaps({"lookup": 6}))
    events = list(engine.stream(GenerateRequest(tuple(PROMPTS[1]), NEW)))
    reports = [e.report for e in events if isinstance(e, Committed)][1:]
    assert [t for e in events if isinstance(e, Committed) for t in e.tokens] == list(truth("llama")[1])
    ahead = [b.launched_at < a.landed_at for a, b in pairwise(reports)]
    assert sum(ahead) > len(ahead) / 2


def test_closing_the_stream_early_leaves_the_engine_usable() -> None:
    engine = Engine(target_for("llama"), scripted("llama", 0.7), cap=FixedCaps({"scripted": 4}))
    stream = iter(engine.stream(GenerateRequest(tuple(PROMPTS[1]), NEW)))
    for _ in range(4):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    tokens = [
        t
        for e in engine.stream(GenerateRequest(tuple(PROMPTS[1]), NEW))
        if isinstance(e, Committed)
        for t in e.tokens
    ]
    assert tokens == list(truth("llama")[1])


def test_requests_that_cannot_run_are_refused_before_anything_happens() -> None:
    engine = Engine(target_of(model_of("llama"), tiny_config("llama"), context=32))
    with pytest.raises(ContextOverflow, match="32"):
        engine.stream(GenerateRequest(tuple(range(3, 35)), 1))
    with pytest.raises(RequestError, match="token id"):
        engine.stream(GenerateRequest((VOCAB,), 1))
    with pytest.raises(RequestError, match="logit_bias"):
        engine.stream(GenerateRequest((5,), 1, SamplingParams(logit_bias={VOCAB: 1.0})))
    with pytest.raises(EmptyPrompt):
        GenerateRequest((), 1)
    with pytest.raises(RequestError, match="max_new_tokens"):
        GenerateRequest((5,), 0)


def test_the_answer_stops_where_the_context_ends() -> None:
    engine = Engine(target_of(model_of("llama"), tiny_config("llama"), context=16))
    events = list(engine.stream(GenerateRequest(tuple(PROMPTS[1]), 100)))
    assert events[-1] == Finished("length", 6, 10)
