"""The answer to a conversation as a stream: channels and calls, stop strings, and a budget for reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from mlx_dspark.chat.answer import ChatAnswer
from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.foundation.chat import Conversation, Tool, Turn
from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.foundation.events import Committed, EngineEvent, Finished, RoundReport, Started, Text
from mlx_dspark.foundation.request import FinishReason, GenerateRequest
from mlx_dspark.session import Session
from mlx_dspark.targets.load import target_of
from tests import chat_templates as templates
from tests.chat_syntaxes import hermes
from tests.chat_templates import tokenizer_of
from tests.tiny import tiny_config, tiny_llama

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
USER = (Turn("user", "hi"),)
END = 2
TOKENIZER: Any = tokenizer_of(templates.OPENED, added=MARKS)


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Says:
    """An engine whose model says what `reply` makes of the prompt's text, so many tokens a round."""

    def __init__(self, reply: Callable[[str], Sequence[int]], step: int = 1) -> None:
        self.reply, self.step = reply, step
        self.requests: list[GenerateRequest] = []

    def stream(self, request: GenerateRequest) -> Iterator[EngineEvent]:
        self.requests.append(request)
        return self._events(request)

    def _events(self, request: GenerateRequest) -> Iterator[EngineEvent]:
        yield Started(len(request.prompt), 0, 1.0)
        said = list(self.reply(TOKENIZER.decode(list(request.prompt))))[: request.max_new_tokens]
        made, reason = 0, None
        while reason is None:
            run: list[int] = []
            while reason is None and len(run) < self.step:
                run.append(said[made])
                made += 1
                reason = self._reason(request, run[-1], made)
            report = RoundReport(1.0, 2.0, 1, 1, 1, 0, 0, 0, len(run), made)
            yield Committed(tuple(run), report)
        yield Finished(reason, len(request.prompt), made)

    def _reason(self, request: GenerateRequest, token: int, made: int) -> FinishReason | None:
        if token in request.end_ids or (request.stop_check and request.stop_check(token)):
            return "stop"
        return "length" if made == request.max_new_tokens else None


def _session(engine: Any, **more: Any) -> Session:
    return Session(engine, TOKENIZER, end_ids={END}, mode="baseline", **more)


def _endless(prompt: str) -> list[int]:
    """Reasons for ever, until the reasoning is closed for it."""
    return [*_ids("Done, 😀."), END] if "</think>" in prompt else _ids("hm é😀 " * 50)


@pytest.mark.parametrize("step", [1, 3, 16])
def test_an_answer_streams_as_channels_and_calls(step: int) -> None:
    said = f"hm\n</think>\n\nOk.\n{hermes('noop', {'a': 'é'})}"
    session = _session(Says(lambda _: [*_ids(said), END], step))
    conversation = Conversation(USER, (Tool("noop"),))
    events = list(session.stream(conversation, max_new_tokens=200))
    answer = ChatAnswer.fold(events)
    assert (answer.reasoning, answer.text) == ("hm", "Ok.")
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("noop", {"a": "é"})
    assert [type(event) for event in events].count(Finished) == 1
    result = session.fold(events)
    assert (result.text, result.finish_reason) == ("Ok.", "stop")
    assert result.token_ids == tuple(_ids(said))


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("budget", [1, 2, 5, 17])
def test_reasoning_is_closed_when_its_budget_is_spent(budget: int, step: int) -> None:
    engine = Says(_endless, step)
    conversation = Conversation(USER, thinking_budget=budget)
    events = list(_session(engine).stream(conversation, max_new_tokens=100))
    answer = ChatAnswer.fold(events)
    first, second = engine.requests
    thought = second.prompt[len(first.prompt) : -len(_ids("\n</think>\n\n"))]
    assert second.prompt == (*first.prompt, *thought, *_ids("\n</think>\n\n"))
    assert budget <= len(thought) < budget + 4
    assert answer == ChatAnswer("Done, 😀.", TOKENIZER.decode(list(thought)).rstrip())
    assert "\ufffd" not in answer.reasoning
    started, finished = events[0], events[-1]
    assert isinstance(started, Started)
    assert finished == Finished("stop", len(first.prompt), len(thought) + len(_ids("Done, 😀.")) + 1)
    assert sum(isinstance(event, Started | Finished) for event in events) == 2
    assert second.max_new_tokens == 100 - len(thought)


def test_a_budget_that_is_not_spent_changes_nothing() -> None:
    engine = Says(lambda _: [*_ids("hm</think>ok"), END])
    events = list(_session(engine).stream(Conversation(USER, thinking_budget=4), max_new_tokens=50))
    assert (len(engine.requests), ChatAnswer.fold(events)) == (1, ChatAnswer("ok", "hm"))


@pytest.mark.parametrize(("limit", "context"), [(5, 0), (100, 30)])
def test_a_budget_spent_where_no_room_is_left_ends_the_answer(limit: int, context: int) -> None:
    engine = Says(_endless)
    session = _session(engine, context=context)
    events = list(session.stream(Conversation(USER, thinking_budget=5), max_new_tokens=limit))
    assert len(engine.requests) == 1
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length"


def test_a_stop_string_ends_the_answer_within_reasoning_too() -> None:
    engine = Says(lambda _: [*_ids("hm STOP hm"), END])
    conversation = Conversation(USER, thinking_budget=50)
    events = list(_session(engine).stream(conversation, max_new_tokens=50, stop="STOP"))
    assert ChatAnswer.fold(events) == ChatAnswer("", "hm ")
    assert events[-1] == Finished("stop", len(engine.requests[0].prompt), len(_ids("hm STOP")))


def test_an_answer_that_is_cancelled_ends_with_what_it_had() -> None:
    session = _session(Says(lambda _: [*_ids("hm</think>never read"), END]))
    seen: list[Any] = []
    stream = session.stream(Conversation(USER), max_new_tokens=50, cancelled=lambda: len(seen) > 4)
    for event in stream:
        seen.append(event)
    assert isinstance(seen[-1], Finished)
    assert seen[-1].reason == "cancelled"


def test_a_conversation_is_refused_what_it_has_no_place_for() -> None:
    session = _session(Says(_endless))
    refused: dict[str, Any] = {"system": "x", "chat_template": False}
    for field, value in refused.items():
        with pytest.raises(RequestError) as caught:
            session.stream(Conversation(USER), **{field: value})
        assert caught.value.field == field


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_budget_is_lossless(scheduled: bool) -> None:
    """What follows the closed block is what plain decoding makes of the same ids."""
    config = tiny_config(vocab_size=len(TOKENIZER))
    target = target_of(tiny_llama(vocab_size=len(TOKENIZER)), config)
    engine = Engine(target)
    with _session(Scheduler(target, max_rows=2) if scheduled else engine) as session:
        conversation = Conversation(USER, thinking_budget=6)
        seen = list(session.stream(conversation, max_new_tokens=24))
    tokens = [token for event in seen if isinstance(event, Committed) for token in event.tokens]
    prompt = session.format.render(conversation).ids
    shut = _ids("\n</think>\n\n")
    spent = next(
        n for n in range(6, 24) if tokens[n:] == _plain(engine, [*prompt, *tokens[:n], *shut], 24 - n)
    )
    assert tokens[:spent] == _plain(engine, prompt, spent)
    assert any(isinstance(event, Text) and event.channel == "reasoning" for event in seen)


def _plain(engine: Engine, prompt: Sequence[int], limit: int) -> list[int]:
    events = engine.stream(GenerateRequest(tuple(prompt), limit, end_ids=frozenset({END})))
    return [token for event in events if isinstance(event, Committed) for token in event.tokens]
