"""What clients are told around their answers: ids, routes, keys, names that were not heeded; and connections
on which nothing comes."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.serving import heads
from mlx_dspark.serving.guard import Rules
from mlx_dspark.serving.heads import TimelyProtocol
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.log import LOG
from mlx_dspark.serving.run import Running
from mlx_dspark.serving.streaming import Clock
from tests.scripted_engine import ScriptedEngine, scripted_session, thinking_tokenizer
from tests.tiny_server import tiny_server, tiny_session

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"messages": HELLO, "max_tokens": 4}
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_server(tiny_session()) as url:
        yield url


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.facts: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.facts.append(vars(record).get("dspark_fields", {}))


@pytest.fixture
def log() -> Iterator[list[dict[str, Any]]]:
    kept, level = Kept(), LOG.level
    LOG.addHandler(kept)
    LOG.setLevel(logging.INFO)
    yield kept.facts
    LOG.removeHandler(kept)
    LOG.setLevel(level)


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


# ids ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health", None),
        ("POST", CHAT, ASKED),
        ("POST", CHAT, {}),
        ("POST", TEXT, "no"),
        ("GET", "/x", None),
    ],
)
def test_every_response_has_an_id_of_its_own(url: str, method: str, path: str, body: Any) -> None:
    told = [httpx.request(method, url + path, json=body) for _ in range(2)]
    ids = {each.headers["x-request-id"] for each in told}
    assert len(ids) == 2
    assert all(each.headers["request-id"] == each.headers["x-request-id"] for each in told)


@pytest.mark.parametrize(
    ("given", "kept"), [("run-7.a_B", True), ("a b", False), ("x" * 65, False), ("", False)]
)
def test_a_clients_own_id_is_kept_where_it_is_plain(
    url: str, log: list[dict[str, Any]], given: str, kept: bool
) -> None:
    told = httpx.post(url + CHAT, json=ASKED, headers={"x-request-id": given}).headers["x-request-id"]
    assert (told == given) is kept
    assert until(lambda: any(facts.get("request") == told for facts in log))


# routes and keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/docs", "/v1"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_route_that_is_not_there_is_told_with_those_that_are(url: str, method: str, path: str) -> None:
    told = httpx.request(method, url + path, json={} if method == "POST" else None)
    assert told.status_code == 404
    assert all(each in told.json()["error"]["message"] for each in (path, CHAT, MESSAGES, "/openapi.json"))


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("x", 'limit is "x", which cannot be used. Give a whole number.'),
        ("0", "Give 1 or more."),
        ("9999", "or less."),
    ],
)
def test_a_query_is_told_of_like_a_body(url: str, limit: str, told: str) -> None:
    refused = httpx.get(f"{url}/rounds", params={"limit": limit})
    assert refused.status_code == 400
    assert told in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "limit"


def test_a_wrong_method_is_told_with_the_right_one(url: str) -> None:
    told = httpx.get(url + CHAT)
    assert (told.status_code, told.headers["allow"]) == (405, "POST")
    assert told.json()["error"]["message"] == f"{CHAT} does not take GET. Use POST."


def test_a_model_that_is_not_there_is_told_with_the_one_that_is(url: str) -> None:
    assert "loaded is tiny" in httpx.get(f"{url}/v1/models/other").json()["error"]["message"]


def test_clients_of_anthropics_get_its_errors_everywhere(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    for ask in (lambda: client.models.retrieve("x"), lambda: list(client.messages.batches.list())):
        with pytest.raises(anthropic.NotFoundError) as caught:
            ask()
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["type"] == "error"
    assert "type" not in httpx.get(f"{url}/v1/models/x").json()
    with tiny_server(scripted_session(ScriptedEngine()), Rules(api_key="secret")) as locked:
        assert httpx.get(f"{locked}/v1/models", headers=VERSION).json()["type"] == "error"
        assert "type" not in httpx.get(f"{locked}/v1/models").json()


def test_a_wrong_key_is_told_apart_from_none() -> None:
    with tiny_server(scripted_session(ScriptedEngine()), Rules(api_key="secret")) as url:
        none = httpx.get(f"{url}/v1/models")
        for wrong in ({"authorization": "Bearer x"}, {"x-api-key": "x"}):
            told = httpx.get(f"{url}/v1/models", headers=wrong)
            assert (told.status_code, none.status_code) == (401, 401)
            assert told.json() != none.json()
            assert "not this server's" in told.json()["error"]["message"]


def test_a_compressed_body_is_refused_by_its_header(url: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    told = httpx.post(url + CHAT, content=gzip.compress(json.dumps(ASKED).encode()), headers=headers)
    assert told.status_code == 415
    assert "Content-Encoding" in told.json()["error"]["message"]


# names that clients chose ------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_names_of_clients_are_told_back_and_logged_in_bounds(
    url: str, path: str, log: list[dict[str, Any]]
) -> None:
    strange = {f"{'x' * 1000}{n}": n for n in range(2000)}
    told = httpx.post(url + path, json={**ASKED, "model": "m" * 100_000, **strange})
    assert told.status_code == 200
    assert len(told.content) < 10_000
    assert told.json()["x_mlx_dspark"]["ignored"][-1] == "and 1968 more"
    assert until(lambda: any("stats" in facts for facts in log))
    assert len(json.dumps(log, default=str)) < 20_000


UNHEEDED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"enable_thinking": True}, "enable_thinking"),
    (CHAT, {"thinking_budget": 5}, "thinking_budget"),
    (CHAT, {"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour"),
    (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
    (MESSAGES, {"thinking": {"type": "enabled"}}, "thinking"),
    (MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
]


@pytest.mark.parametrize(("path", "more", "name"), UNHEEDED, ids=lambda value: str(value)[:40])
def test_what_the_model_cannot_heed_is_told_by_the_bodys_own_name(
    url: str, path: str, more: dict[str, Any], name: str
) -> None:
    assert httpx.post(url + path, json=ASKED | more).json()["x_mlx_dspark"]["ignored"] == [name]


# what reaches the template -----------------------------------------------------------------------

SHOWS = (
    "{{ enable_thinking }}|{{ reasoning_effort }}|{{ colour }}|{{ messages[-1].content }}"
    "{% if reasoning_effort == 'low' %}l{% elif reasoning_effort == 'high' %}h{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
REACHED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (CHAT, {}, {"enable_thinking": False}, "False||"),
    (CHAT, {}, {"enable_thinking": True}, "True||"),
    (CHAT, {}, {"chat_template_kwargs": {"enable_thinking": False}}, "False||"),
    (CHAT, {}, {"chat_template_kwargs": {"colour": "red"}}, "||red"),
    (CHAT, {}, {"reasoning_effort": "high"}, "|high|"),
    (CHAT, {"thinking": False}, {}, "False||"),
    (CHAT, {"thinking": False}, {"enable_thinking": True}, "True||"),
    (CHAT, {"reasoning_effort": "low"}, {}, "|low|"),
    (CHAT, {"reasoning_effort": "low"}, {"reasoning_effort": "high"}, "|high|"),
    (MESSAGES, {"thinking": False}, {}, "False||"),
    (MESSAGES, {"thinking": False}, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "True||"),
    (MESSAGES, {}, {"output_config": {"effort": "high"}}, "|high|"),
    (MESSAGES, {"reasoning_effort": "low"}, {}, "|low|"),
]


@pytest.mark.parametrize(("path", "server", "more", "shown"), REACHED, ids=lambda value: str(value)[:50])
def test_what_is_asked_of_thinking_reaches_the_template(
    path: str, server: dict[str, Any], more: dict[str, Any], shown: str
) -> None:
    """From the body, else from the settings that the server was started with."""
    tokenizer, prompts = thinking_tokenizer(), list[str]()
    tokenizer.chat_template = SHOWS
    engine = ScriptedEngine(lambda request: prompts.append(tokenizer.decode(request.prompt)) or "Hi.")
    session = scripted_session(engine, tokenizer)
    with tiny_server(session, defaults=defaults(**server)) as url:
        assert httpx.post(url + path, json=ASKED | more).status_code == 200
    assert f"{shown}|Hello" in prompts[0]


def defaults(**settings: Any) -> Any:
    from types import SimpleNamespace

    from mlx_dspark.serving.loading import defaults_of

    parts: Any = SimpleNamespace(usual={})
    return defaults_of(ServeSettings(**settings), parts)


# streams -----------------------------------------------------------------------------------------


def data(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in lines if each != "[DONE]"]


@pytest.mark.parametrize(("path", "more"), [(CHAT, ASKED), (TEXT, {"prompt": "Hello"})])
def test_a_choice_that_has_ended_says_no_more(path: str, more: dict[str, Any]) -> None:
    """Keep-alives are of one that goes on."""
    engine, waits = ScriptedEngine("Hello there, hello there."), threading.Event()

    def before(request: Any, said: int) -> None:
        if request.sampling.seed != 7:
            waits.wait(0.6)

    engine.before = before
    asked = {"n": 2, "stream": True, "temperature": 1.0, "seed": 7, "max_tokens": 4}
    with tiny_server(scripted_session(engine), clock=Clock(keep_alive=0.05)) as url:
        told = httpx.post(url + path, json=more | asked, timeout=30).text
    ended: set[int] = set()
    alive = 0
    for frame in data(told):
        for choice in frame["choices"]:
            assert choice["index"] not in ended
            alive += not (
                choice.get("text") or choice.get("delta", {}).get("content") or choice["finish_reason"]
            )
            if choice["finish_reason"]:
                ended.add(choice["index"])
    assert ended == {0, 1}
    assert alive > 5


# connections -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
@pytest.mark.parametrize("later", [False, True])
def test_a_head_that_does_not_come_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, later: bool
) -> None:
    """The first one of a connection, and the next that has begun."""
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        tiny_server(scripted_session(ScriptedEngine()), http=TimelyProtocol) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=3) as connection,
    ):
        if later:
            connection.sendall(whole)
            told = b""
            while not told.endswith(b"}"):
                told += connection.recv(65536)
            sent = sent or b"G"
        connection.sendall(sent)
        assert connection.recv(65536) == b""


def test_an_answer_that_takes_longer_than_a_head_may_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.2)
    engine = ScriptedEngine()
    engine.go.clear()
    with tiny_server(scripted_session(engine), http=TimelyProtocol) as url:
        threading.Timer(0.6, engine.go.set).start()
        assert httpx.post(url + CHAT, json=ASKED).status_code == 200


def test_the_server_that_is_served_has_that_protocol() -> None:
    host = Host(None)
    assert Running(host, ServeSettings())._config().http is TimelyProtocol
    host.close()


def test_the_openapi_page_tells_of_every_status(url: str) -> None:
    page = httpx.get(f"{url}/openapi.json").json()
    for path in (CHAT, TEXT, MESSAGES):
        told = page["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "408", "413", "415", "429", "503", "504", "529"} <= set(told)
        assert "text/event-stream" in told["200"]["content"]
    assert "/events" in page["paths"]
    assert page["components"]["securitySchemes"]
