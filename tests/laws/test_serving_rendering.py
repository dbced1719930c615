"""Prompts on their way to token ids: measured before they are read, within the limits, dropped with their
client."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mlx_dspark.foundation.chat import Conversation, Turn
from mlx_dspark.foundation.errors import ContextOverflow
from mlx_dspark.serving.ask import Prompt
from mlx_dspark.serving.model import Model
from mlx_dspark.serving.streaming import Clock
from tests.scripted_engine import ScriptedEngine, scripted_session
from tests.tiny_server import tiny_server

CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
SOON = 10.0
CONTEXT = 64


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + SOON
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


class Slow:
    """Rendering that waits to be let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun: list[Any] = []
        render = Model.render

        def slow(model: Model, prompt: Prompt) -> Any:
            self.begun.append(prompt)
            assert self.go.wait(SOON)
            return render(model, prompt)

        monkeypatch.setattr(Model, "render", slow)


@contextmanager
def server(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[tuple[str, Slow]]:
    slow = Slow(monkeypatch)
    with tiny_server(scripted_session(ScriptedEngine()), **options) as url:
        try:
            yield url, slow
        finally:
            slow.go.set()


def opened(url: str, body: Any) -> socket.socket:
    """A connection on which a request was sent and nothing was read."""
    port = int(url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=SOON)
    raw = json.dumps(body)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n{raw}".encode())
    return connection


def under_way(url: str) -> int:
    return httpx.get(f"{url}/health").json()["under_way"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_whose_client_has_left_is_not_rendered(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with server(monkeypatch) as (url, slow):
        left = [opened(url, {**ASKED, "stream": stream}) for _ in range(4)]
        assert until(lambda: under_way(url) == 4)
        for connection in left:
            connection.close()
        assert until(lambda: under_way(url) == 0)
        slow.go.set()
        assert httpx.post(url + CHAT, json=ASKED).status_code == 200
        assert len(slow.begun) == 2, "the one under way, and the last"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("clock", "status"), [(Clock(queue=0.2), 503), (Clock(deadline=0.2), 504)])
def test_the_limits_of_time_hold_while_a_prompt_is_rendered(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, status: int, stream: bool
) -> None:
    with server(monkeypatch, clock=clock) as (url, _):
        assert httpx.post(url + CHAT, json={**ASKED, "stream": stream}).status_code == status
        assert under_way(url) == 0


def test_a_deadline_counts_from_when_the_request_came(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    engine.go.clear()
    slow = Slow(monkeypatch)
    with tiny_server(scripted_session(engine), clock=Clock(deadline=2.0)) as url:
        begun = time.monotonic()
        threading.Timer(1.8, slow.go.set).start()
        assert httpx.post(url + CHAT, json=ASKED).status_code == 504
        assert time.monotonic() - begun < 3.0


def test_counting_has_a_bound_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(max_rows=1)
    engine.go.clear()
    with tiny_server(scripted_session(engine), queue=0) as url, ThreadPoolExecutor(2) as pool:
        answer = pool.submit(httpx.post, url + CHAT, json=ASKED, timeout=SOON)
        assert until(lambda: engine.asked == 1)
        assert httpx.post(url + CHAT, json=ASKED).status_code == 429
        assert httpx.post(url + COUNT, json=ASKED).status_code == 200
        slow = Slow(monkeypatch)
        first = pool.submit(httpx.post, url + COUNT, json=ASKED, timeout=SOON)
        assert until(lambda: len(slow.begun) == 1)
        assert httpx.post(url + COUNT, json=ASKED).status_code == 429
        slow.go.set()
        engine.go.set()
        assert first.result().status_code == answer.result().status_code == 200


# length ------------------------------------------------------------------------------------------


def measured(text: str, chat: bool) -> tuple[Model, Prompt, list[int]]:
    """A model, a prompt for it, and how much of it the tokenizer has read."""
    session, read = scripted_session(ScriptedEngine()), list[int]()
    encode = session.tokenizer.encode

    def counted(given: str, **options: Any) -> Any:
        read.append(len(given))
        return encode(given, **options)

    session.tokenizer.encode = counted
    prompt = Conversation((Turn("user", text),)) if chat else text
    return Model(session, CONTEXT), prompt, read


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("text", ["Hello there. " * 60_000, "a" * 600_000])
def test_of_a_prompt_that_is_far_too_long_little_is_read(text: str, chat: bool) -> None:
    model, prompt, read = measured(text, chat)
    with pytest.raises(ContextOverflow) as caught:
        model.render(prompt)
    assert caught.value.at_least
    assert sum(read) < len(text) / 10
    assert CONTEXT < caught.value.prompt_tokens <= len(model.session.tokenizer.encode(text))


@pytest.mark.parametrize("words", [1, 40, 62, 63, 64, 65, 80, 500])
@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_is_refused_only_where_its_tokens_do_not_fit(words: int, chat: bool) -> None:
    model, prompt, _ = measured(" hello" * words, chat)
    roomy = Model(model.session)
    tokens = len(roomy.render(prompt).ids)
    if tokens < CONTEXT:
        assert len(model.render(prompt).ids) == tokens
    else:
        with pytest.raises(ContextOverflow) as caught:
            model.render(prompt)
        exact = caught.value.prompt_tokens == tokens
        assert exact or (caught.value.at_least and caught.value.prompt_tokens < tokens)


def test_what_templates_may_leave_out_is_not_measured() -> None:
    session = scripted_session(ScriptedEngine())
    session.tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    turns = (Turn("user", "Hi"), Turn("assistant", "a " * 9000), Turn("user", "Ho"))
    assert len(Model(session, CONTEXT).render(Conversation(turns)).ids) < CONTEXT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "\ud800 " * 40_000}]}),
        ("/v1/completions", {"prompt": "\ud800 " * 40_000}),
    ],
)
def test_long_text_that_is_none_is_refused(path: str, body: Any) -> None:
    with tiny_server(scripted_session(ScriptedEngine())) as url:
        refused = httpx.post(
            url + path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "field", "step"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a " * 5000}]}, "messages", "longer context"),
        ("/v1/completions", {"prompt": "a " * 5000}, "prompt", "longer context"),
        ("/v1/completions", {"prompt": [5] * 5000}, "prompt", "longer context"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_by_its_own_field(
    path: str, body: Any, field: str, step: str
) -> None:
    with tiny_server(scripted_session(ScriptedEngine())) as url:
        error = httpx.post(url + path, json=body).json()["error"]
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert step in error["message"]


def test_a_window_that_the_server_was_given_is_what_to_change() -> None:
    with pytest.raises(ContextOverflow, match="--context-window"):
        Model(scripted_session(ScriptedEngine()), CONTEXT).render("a " * 1000)


@pytest.mark.parametrize(
    ("body", "field"), [({"prompt": ["a"] * 9}, "prompt"), ({"prompt": "a", "n": 8}, "n")]
)
def test_more_answers_than_there_is_room_for_are_told_by_their_field(body: Any, field: str) -> None:
    with tiny_server(scripted_session(ScriptedEngine()), queue=1) as url:
        refused = httpx.post(f"{url}/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field
    assert refused.json()["error"]["message"].startswith(f"{field} asks for")
