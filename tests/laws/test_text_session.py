"""An answer as events and as a result: the result is the fold of the stream, and text ends where it must."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dspark.chat.template import encode_prompt
from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.foundation.errors import EmptyPrompt, RequestError, UsageError
from mlx_dspark.foundation.events import (
    Committed,
    EngineEvent,
    Finished,
    Prefilled,
    RoundReport,
    Started,
    Text,
    TokenLogprob,
)
from mlx_dspark.foundation.request import FinishReason, GenerateRequest
from mlx_dspark.session import Result, Session, SourceCount
from mlx_dspark.targets.load import target_of
from tests.tiny import tiny_config, tiny_llama, tiny_tokenizer

TOKENIZER: Any = tiny_tokenizer()
END = 2


class ScriptedEngine:
    """Commits given runs of tokens, as a target would that agrees to all drafts of each run but its last."""

    def __init__(self, runs: list[list[int]], source: str = "lookup") -> None:
        self.runs = runs
        self.source = source
        self.closed = False
        self.request: GenerateRequest | None = None

    def stream(self, request: GenerateRequest) -> Iterator[EngineEvent]:
        self.request = request
        return self._events(request)

    def _events(self, request: GenerateRequest) -> Iterator[EngineEvent]:
        produced, reason = 0, None
        try:
            yield Started(len(request.prompt), 0, 10.0)
            for i, run in enumerate(self.runs):
                taken, reason = self._take(request, run, produced)
                produced += len(taken)
                report = self._report(i, len(run) - 1, len(taken))
                if i == 0:
                    yield Prefilled(len(request.prompt), len(request.prompt), report)
                yield Committed(tuple(taken), report, tuple(TokenLogprob(t, -1.0) for t in taken))
                if reason:
                    break
            yield Finished(reason or "length", len(request.prompt), produced)
        finally:
            self.closed = True

    def _take(
        self, request: GenerateRequest, run: list[int], produced: int
    ) -> tuple[list[int], FinishReason | None]:
        taken = []
        for token in run:
            taken.append(token)
            if token in request.end_ids or (request.stop_check is not None and request.stop_check(token)):
                return taken, "stop"
            if produced + len(taken) == request.max_new_tokens:
                return taken, "length"
        return taken, None

    def _report(self, i: int, drafted: int, committed: int) -> RoundReport:
        drafted = 0 if i == 0 else drafted
        return RoundReport(
            launched_at=10.0 + i,
            landed_at=11.0 + i,
            rows=1,
            width=1 + drafted,
            certain=1,
            cap=6,
            drafted=drafted,
            accepted=min(drafted, committed - 1),
            committed=committed,
            depth=i,
            source=self.source if drafted else "",
        )


def _session(runs: list[list[int]]) -> Session:
    return Session(ScriptedEngine(runs), TOKENIZER, end_ids={END}, mode="lookup")


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def _cut(ids: list[int], cuts: set[int]) -> list[list[int]]:
    bounds = [0, 1, *sorted(cut for cut in cuts if 1 < cut < len(ids)), len(ids)]
    return [run for a, b in itertools.pairwise(bounds) if (run := ids[a:b])]


@given(
    ids=st.lists(st.integers(0, len(TOKENIZER) - 1), min_size=1, max_size=30),
    cuts=st.sets(st.integers(2, 30)),
    stops=st.lists(st.text(alphabet="abe \n", min_size=1, max_size=2), max_size=2),
    limit=st.integers(1, 30),
)
@settings(max_examples=200, deadline=None)
def test_the_result_is_the_fold_of_the_stream(
    ids: list[int], cuts: set[int], stops: list[str], limit: int
) -> None:
    runs, options = _cut(ids, cuts), {"max_new_tokens": limit, "stop": stops}
    events = list(_session(runs).stream("a", **options))
    result = _session(runs).generate("a", **options)
    assert result == Result.fold(events, mode="lookup", end_ids={END})
    assert result.text == "".join(event.text for event in events if isinstance(event, Text))
    committed = [token for event in events if isinstance(event, Committed) for token in event.tokens]
    assert END not in result.token_ids
    assert len(committed) <= limit
    assert [*result.token_ids] == committed[: len(committed) - (committed[-1] == END)]
    assert result.logprobs is None or [entry.token for entry in result.logprobs] == [*result.token_ids]
    assert isinstance(events[-1], Finished)
    if not stops:
        text = TOKENIZER.decode(
            result.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert result.text == text


@pytest.mark.parametrize("at", range(5))
def test_an_end_id_at_every_index_of_a_run(at: int) -> None:
    run = _ids("abcde")
    run[at] = END
    result = _session([_ids("x"), run]).generate("a")
    assert (result.text, result.finish_reason) == ("x" + "abcde"[:at], "stop")
    assert [*result.token_ids] == _ids("x" + "abcde"[:at])


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_stop_string_across_every_boundary(cut: int) -> None:
    ids = _ids("abSTOPcd")
    session = _session([run for run in (ids[:cut], ids[cut:]) if run])
    events = list(session.stream("a", stop="STOP"))
    assert all("S" not in event.text for event in events if isinstance(event, Text))
    result = session.fold(iter(events))
    assert (result.text, result.finish_reason) == ("ab", "stop")
    assert [*result.token_ids] == _ids("abSTOP")


def test_figures_of_a_scripted_answer() -> None:
    result = _session([_ids("a"), _ids("bcd"), _ids("e"), [*_ids("fg"), END]]).generate("a")
    assert (result.num_tokens, result.num_rounds, result.prefill_rounds) == (7, 4, 1)
    assert result.accept_lengths == (3, 3)
    assert (result.drafted, result.accepted, result.mean_accept_len) == (4, 4, 3.0)
    assert result.sources == {"lookup": SourceCount(2, 4, 4)}
    assert (result.ttft_seconds, result.prefill_seconds, result.seconds) == (1.0, 1.0, 4.0)
    assert (result.decode_tokens_per_sec, result.tokens_per_sec) == (6 / 3, 7 / 4)
    assert result.finish_reason == "stop"


def test_an_answer_without_tokens_has_no_logprobs_but_was_asked_for_them() -> None:
    result = _session([[END]]).generate("a", logprobs=0)
    assert (result.token_ids, result.logprobs) == ((), ())


@pytest.mark.parametrize("asked", range(6))
def test_the_end_id_is_no_token_of_a_cancelled_answer(asked: int) -> None:
    calls = itertools.count()
    session = _session([_ids("ab"), [END]])
    result = session.generate("a", cancelled=lambda: next(calls) >= asked)
    assert END not in result.token_ids
    assert result.num_tokens == (2 if asked > 2 else 0)
    assert result.finish_reason == ("stop" if asked > 4 else "cancelled")


def test_no_draft_means_no_accept_length() -> None:
    result = _session([_ids("a"), _ids("b")]).generate("a")
    assert (result.accept_lengths, result.mean_accept_len, result.sources) == ((), 0.0, {})


def test_one_token_answers_have_no_decode_rate() -> None:
    result = _session([_ids("a")]).generate("a", max_new_tokens=1)
    assert (result.num_tokens, result.finish_reason, result.decode_tokens_per_sec) == (1, "length", 0.0)


def test_cancelling_keeps_what_was_said_and_closes_the_engine() -> None:
    engine = ScriptedEngine([_ids("a"), _ids("bS"), _ids("c")])
    session = Session(engine, TOKENIZER, end_ids={END}, mode="lookup")
    said: list[str] = []
    events = session.stream("a", stop="STOP", cancelled=lambda: "b" in "".join(said))
    seen = []
    for event in events:
        seen.append(event)
        if isinstance(event, Text):
            said.append(event.text)
    result = session.fold(iter(seen))
    assert (result.text, result.finish_reason) == ("abS", "cancelled")
    assert isinstance(seen[-1], Finished)
    assert seen[-1].completion_tokens == 3
    assert engine.closed


def test_closing_the_stream_closes_the_engine() -> None:
    engine = ScriptedEngine([_ids("a"), _ids("b")])
    events = Session(engine, TOKENIZER, end_ids={END}, mode="lookup").stream("a")
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert engine.closed


def test_a_stream_that_breaks_off_folds_to_what_it_held() -> None:
    assert Result.fold([]).finish_reason == "cancelled"
    assert Result.fold([Started(3, 0, 0.0), Text("a")]).text == "a"


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"max_new_tokens": 0}, UsageError, "max_new_tokens"),
        ({"max_new_tokens": -1}, UsageError, "max_new_tokens"),
        ({"temperature": -1}, UsageError, "temperature"),
        ({"temperature": float("nan")}, UsageError, "temperature"),
        ({"top_p": 0}, UsageError, "top_p"),
        ({"seed": -1}, UsageError, "seed"),
        ({"seed": True}, UsageError, "seed"),
        ({"stop": ["a", ""]}, UsageError, "stop"),
        ({"logit_bias": {-1: 2.0}}, UsageError, "logit_bias"),
        ({"max_tokens": 3}, UsageError, "max_tokens"),
        ({"chat_template": False, "system": "x"}, RequestError, "system"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict, error: type, field: str) -> None:
    with pytest.raises(error) as caught:
        _session([_ids("a")]).stream("a", **options)
    assert caught.value.field == field
    assert field in caught.value.sentence


@pytest.mark.parametrize("prompt", ["", "  \n", [], [("user", "")]])
def test_empty_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(EmptyPrompt):
        _session([_ids("a")]).generate(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt", [[{"role": "user"}], ["hi"], [("user", 3)], [{"role": "u", "content": "", "x": ""}]]
)
def test_what_is_not_a_message_is_named(prompt: object) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        _session([_ids("a")]).generate(prompt)  # type: ignore[arg-type]


def test_conversations_in_every_spelling_render_alike() -> None:
    session = _session([_ids("a")])
    engine = session.engine
    assert isinstance(engine, ScriptedEngine)
    prompts = []
    for prompt in ("hi", [("user", "hi")], [{"role": "user", "content": "hi"}]):
        session.generate(prompt)
        assert engine.request is not None
        prompts.append(engine.request.prompt)
    assert len(set(prompts)) == 1
    assert TOKENIZER.decode(prompts[0]).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_refuses_is_reported_as_a_sentence() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    session = Session(ScriptedEngine([_ids("a")]), tokenizer, end_ids={END}, mode="lookup")
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        session.generate("hi")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        (("hi", None), "--no-chat-template"),
        (("hi", "be brief"), "system message"),
        (([{"role": "user", "content": "a"}] * 2, None), "by turns"),
    ],
)
def test_the_advice_on_a_template_that_refuses_fits_what_was_asked(asked: Any, advice: str) -> None:
    """For a lone prompt there is no order of roles to change."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ nothing.at_all }}"
    with pytest.raises(RequestError) as refusal:
        encode_prompt(tokenizer, asked[0], system=asked[1])
    assert advice in refusal.value.next_step


def test_without_a_template_a_prompt_is_raw_and_a_conversation_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    engine = ScriptedEngine([_ids("a")])
    session = Session(engine, tokenizer, end_ids={END}, mode="lookup")
    session.generate("hi there")
    assert engine.request is not None
    assert [*engine.request.prompt] == tokenizer.encode("hi there")
    with pytest.raises(RequestError, match="no chat template"):
        session.generate([("user", "hi")])
    with pytest.raises(RequestError, match="system"):
        session.generate("hi", system="be brief")


TEXTS = ["the cat", "a story of two towns", "one two three one two three one two", "x"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"stop": ["e", "q"]},
    {"temperature": 0.8, "seed": 3, "stop": "th"},
    {"repetition_penalty": 1.3, "logprobs": 1},
]


@pytest.mark.parametrize("threads", [1, 4])
def test_a_session_that_batches_answers_as_one_that_does_not(threads: int) -> None:
    """Text comes after the Committed that released it, though another thread decides the tokens."""
    model = target_of(tiny_llama(seed=5), tiny_config("llama"), context=512)
    turns = Session(Engine(model), TOKENIZER, end_ids={END}, mode="baseline", context=512)
    batching = Session(Scheduler(model, max_rows=3), TOKENIZER, end_ids={END}, mode="baseline", context=512)
    cases = list(itertools.product(TEXTS, OPTIONS))

    def ask(session: Session, text: str, options: dict[str, Any]) -> tuple[list[tuple[Any, ...]], Result]:
        events = list(session.stream(text, max_new_tokens=20, **options))
        told = [
            (type(e).__name__, getattr(e, "tokens", ()), e.text if isinstance(e, Text) else "")
            for e in events
        ]
        return told, session.fold(events)

    expected = [ask(turns, *case) for case in cases]
    with batching, ThreadPoolExecutor(threads) as pool:
        got = list(pool.map(lambda case: ask(batching, *case), cases, timeout=120))
    for (told, result), (told_alone, alone) in zip(got, expected, strict=True):
        assert told == told_alone
        assert (result.text, result.token_ids, result.finish_reason, result.prompt_tokens) == (
            alone.text,
            alone.token_ids,
            alone.finish_reason,
            alone.prompt_tokens,
        )
        assert (result.logprobs is None) == (alone.logprobs is None)
    assert any(result.finish_reason == "stop" for _, result in got)
    with pytest.raises(RequestError, match="closed"):
        batching.generate("the cat")
