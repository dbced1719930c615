"""Every option of a request holds in a batch whose rows have other options: each row equals its solo run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, fields, replace
from functools import cache
from typing import Any

import pytest

from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.events import Committed, EngineEvent, Finished
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams, StopCheck
from mlx_dspark.foundation.settings import GenerateSettings, LoadSettings
from mlx_dspark.session import Result, Session
from mlx_dspark.session.pair import Parts
from mlx_dspark.state.layout import Layout
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.tiny import tiny_config, tiny_llama, tiny_tokenizer

NEW = 24
DRAWN = SamplingParams(temperature=0.9, seed=11)

SAMPLING: dict[str, tuple[SamplingParams, ...]] = {
    "temperature": (replace(DRAWN, temperature=0.3), replace(DRAWN, temperature=2.0)),
    "top_p": (replace(DRAWN, top_p=0.5),),
    "top_k": (replace(DRAWN, top_k=1), replace(DRAWN, top_k=5)),
    "min_p": (replace(DRAWN, min_p=0.2),),
    "repetition_penalty": (SamplingParams(repetition_penalty=1.5), replace(DRAWN, repetition_penalty=0.8)),
    "presence_penalty": (SamplingParams(presence_penalty=2.0), replace(DRAWN, presence_penalty=-1.0)),
    "frequency_penalty": (SamplingParams(frequency_penalty=1.0), replace(DRAWN, frequency_penalty=0.5)),
    "logit_bias": (SamplingParams(logit_bias={9: 8.0, 10: -8.0}), replace(DRAWN, logit_bias={40: 20.0})),
    "seed": (DRAWN, replace(DRAWN, seed=12)),
    "logprobs": (SamplingParams(logprobs=3), replace(DRAWN, logprobs=0, repetition_penalty=1.2)),
}
"""For every field of SamplingParams, requests that it changes."""

PROMPTS = [(5,), (7, 11, 13, 17), (41, 42, 43, 41, 42, 43, 41, 42), tuple(range(30, 60))]


class StopAfter:
    """A stop check that counts."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, token: int) -> bool:
        self.left -= 1
        return self.left == 0


@cache
def target(layout: Layout = Layout.LIST) -> DenseTarget:
    model = tiny_llama(seed=2, tie_word_embeddings=True)
    return target_of(model, tiny_config("llama"), context=256, layout=layout)


def lookup() -> LookupDrafter:
    drafter = LookupDrafter(min_n=1, max_n=3)
    drafter.bind(target())
    return drafter


def requests_with(field: str) -> list[GenerateRequest]:
    """Requests that differ in this field of GenerateRequest."""
    plain = GenerateRequest(PROMPTS[1], NEW)
    some = alone_tokens(plain)
    changed: dict[str, Sequence[Any]] = {
        "prompt": PROMPTS,
        "max_new_tokens": (1, 2, 300),
        "sampling": (DRAWN,),
        "end_ids": (frozenset(some[:1]), frozenset(some[5:8])),
        "stop_check": (1, 4),
    }
    if field == "stop_check":
        return [replace(plain, stop_check=StopAfter(count)) for count in changed[field]]
    return [replace(plain, **{field: value}) for value in changed[field]]


def fresh(request: GenerateRequest) -> GenerateRequest:
    """The same request; a stop check has seen nothing yet."""
    check: StopCheck | None = request.stop_check
    return replace(request, stop_check=StopAfter(check.left)) if isinstance(check, StopAfter) else request


def alone_tokens(request: GenerateRequest) -> list[int]:
    return answer(Engine(target()).stream(fresh(request)))[0]


def answer(events: Iterable[EngineEvent]) -> tuple[list[int], str, list[tuple[int, list[int]]], list[float]]:
    """Tokens, how it ended, and the logprobs as ids and as numbers."""
    tokens: list[int] = []
    ids: list[tuple[int, list[int]]] = []
    numbers: list[float] = []
    reason = ""
    for event in events:
        if isinstance(event, Committed):
            tokens += event.tokens
            for each in event.logprobs:
                ids.append((each.token, [token for token, _ in each.top]))
                numbers += [each.logprob, *(value for _, value in each.top)]
        elif isinstance(event, Finished):
            reason = event.reason
    return tokens, reason, ids, numbers


SUPPLY = [
    GenerateRequest(PROMPTS[i % 4], NEW, sampling)
    for i, sampling in enumerate(itertools.chain(*SAMPLING.values()))
]
"""Neighbours of every setting."""


def assert_as_alone(requests: Sequence[GenerateRequest], drafts: int, layout: Layout) -> None:
    """With neighbours before, between and after them, of other settings."""
    drafter = lookup() if drafts else None
    mixed = [
        each for i, request in enumerate(requests) for each in (request, *SUPPLY[i :: len(requests)][:4])
    ]
    with Scheduler(target(layout), drafter, cap=FixedCaps({"lookup": drafts}), max_rows=6) as engine:
        streams = [engine.submit(fresh(request)) for request in mixed]
        for request, stream in zip(mixed, streams, strict=True):
            got, wanted = answer(stream), answer(Engine(target()).stream(fresh(request)))
            assert got[:3] == wanted[:3]
            assert got[3] == pytest.approx(wanted[3], abs=1e-3)


drafting = pytest.mark.parametrize(
    ("drafts", "layout"), [(0, Layout.LIST), (4, Layout.LIST), (4, Layout.COMPANY)]
)


@drafting
@pytest.mark.parametrize("field", [each.name for each in fields(SamplingParams)])
def test_every_sampling_option_holds_among_others(field: str, drafts: int, layout: Layout) -> None:
    requests = [GenerateRequest(PROMPTS[i], NEW, each) for i, each in enumerate(SAMPLING[field])]
    assert_as_alone(requests, drafts, layout)


@pytest.mark.parametrize("field", [each.name for each in fields(SamplingParams)])
def test_every_option_under_test_changes_an_answer(field: str) -> None:
    for i, sampling in enumerate(SAMPLING[field]):
        if field == "seed":
            without = replace(sampling, seed=sampling.seed + 100 if sampling.seed else None)
        else:
            default = next(each for each in fields(SamplingParams) if each.name == field)
            value = default.default if default.default is not MISSING else {}
            without = replace(sampling, **{field: value})
        request = GenerateRequest(PROMPTS[i], NEW, sampling)
        changed = answer(Engine(target()).stream(replace(request, sampling=without)))
        assert answer(Engine(target()).stream(request)) != changed


@drafting
@pytest.mark.parametrize("field", [each.name for each in fields(GenerateRequest)])
def test_every_request_option_holds_among_others(field: str, drafts: int, layout: Layout) -> None:
    assert_as_alone(requests_with(field), drafts, layout)


SETTINGS: dict[str, Any] = {
    "max_new_tokens": 3,
    "temperature": 1.2,
    "top_p": 0.6,
    "top_k": 3,
    "min_p": 0.3,
    "repetition_penalty": 1.4,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.7,
    "logit_bias": {9: 7.0},
    "seed": 21,
    "logprobs": 2,
    "stop": ("e", "th"),
    "system": "Be brief.",
    "chat_template": False,
}
ALWAYS = {"max_new_tokens": 16, "temperature": 0.7, "seed": 5}


def session(max_batch: int) -> Session:
    drafter = lookup()
    return Parts(
        target(), tiny_tokenizer(), drafter, {}, frozenset({0, 2}), "lookup", max_draft=3, max_batch=max_batch
    ).session()


def said(result: Result) -> tuple[Any, ...]:
    ids = tuple(each.token for each in result.logprobs or ())
    return result.text, result.token_ids, result.finish_reason, ids, result.prompt_tokens


@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("threads", [1, 5])
def test_every_setting_of_an_answer_holds_among_threads_of_a_session(max_batch: int, threads: int) -> None:
    """At `max_batch` 1 they queue; above, they share rounds."""
    assert set(SETTINGS) == {knob.name for knob in GenerateSettings.knobs()}
    asked = [ALWAYS | {name: value} for name, value in SETTINGS.items()] * 2
    with session(1) as shared:
        alone = [said(shared.generate("the people made a water", **each)) for each in asked]
    assert len(set(alone)) >= len(SETTINGS) - 2
    with session(max_batch) as shared, ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(lambda each: shared.generate("the people made a water", **each), asked))
    assert [said(result) for result in results] == alone


def test_at_max_batch_1_answers_are_made_one_after_the_other() -> None:
    with session(1) as shared:
        streams = [shared.stream("the people", max_new_tokens=40) for _ in range(3)]
        rounds = [[e.report for e in stream if isinstance(e, Committed)] for stream in streams]
    assert all(report.rows == 1 for each in rounds for report in each)
    for one, after in itertools.pairwise(rounds):
        assert one[-1].landed_at <= after[0].launched_at


@pytest.mark.parametrize("value", [0, -1, 257, 1.5, "many", True, None])
def test_a_max_batch_that_cannot_be_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UsageError, match="max_batch") as caught:
        LoadSettings.of({"max_batch": value})
    assert caught.value.field == "max_batch"
    assert "1 to 256" in str(caught.value)
