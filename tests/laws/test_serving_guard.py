"""Who may ask, and how: keys, hosts, pages, content types. Every route, before any of them is looked at."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.serving.app import create_app
from mlx_dspark.serving.guard import Rules
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.model import Model
from mlx_dspark.serving.run import rules_of
from tests.scripted_engine import ScriptedEngine, scripted_session
from tests.tiny_server import listening

KEY = "k3y-with-$igns"
PAGE = "https://chat.example.org"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"
WRONG = ({}, {"authorization": "Bearer wrong"}, {"x-api-key": KEY + "x"}, {"authorization": KEY})
WITH_KEY = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def app() -> Any:
    rules = rules_of(ServeSettings(api_key=KEY, cors_origin=PAGE, allow_host="box.example.org"))
    return create_app(Host(Model(scripted_session(ScriptedEngine()))), rules)


@pytest.fixture(scope="module")
def url(app: Any) -> Iterator[str]:
    with listening(app) as url:
        yield url


def routes(app: Any) -> list[tuple[str, str]]:
    """Every route with each of its methods."""
    paths = app.openapi()["paths"].items()
    return [(method.upper(), path.replace("{name}", "tiny")) for path, item in paths for method in item]


def ask(url: str, method: str, path: str, **headers: str) -> httpx.Response:
    body = {"json": ASKED} if method == "POST" else {}
    with httpx.stream(method, url + path, headers=headers, timeout=20, **body) as told:  # pyright: ignore[reportArgumentType]
        if "event-stream" not in told.headers.get("content-type", ""):
            told.read()
    return told


def test_no_route_but_health_answers_without_the_key(app: Any, url: str) -> None:
    found = routes(app)
    assert ("POST", CHAT) in found
    for method, path in [*found, ("GET", "/openapi.json"), ("POST", "/no/such"), ("DELETE", "/v1/models")]:
        for headers in WRONG:
            told = ask(url, method, path, **headers)
            assert told.status_code == (200 if path == "/health" else 401), (method, path, headers)
            assert KEY not in told.text + str(told.headers)


@pytest.mark.parametrize("headers", [WITH_KEY, {"x-api-key": KEY}, {"authorization": f"bearer {KEY}"}])
def test_the_key_opens_every_route(app: Any, url: str, headers: dict[str, str]) -> None:
    for method, path in routes(app):
        assert ask(url, method, path, **headers).status_code not in (401, 403), path


def test_health_shows_nothing_private_without_the_key(url: str) -> None:
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{url}/health", headers=WITH_KEY).json()["model"] == "scripted"


FOREIGN: list[dict[str, str]] = [
    {"host": "evil.example.org"},
    {"host": "127.0.0.1.evil.example.org"},
    {"host": "localhost.evil.example.org"},
    {"host": "evil.example.org:8080"},
    {"host": "user@127.0.0.1"},
    {"host": "127.0.0.1/x"},
    {"host": ""},
    {"origin": "https://evil.example.org"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "file://"},
    {"origin": PAGE + ".evil.example.org"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/health")])
def test_foreign_hosts_and_pages_are_refused_even_with_the_key(
    url: str, method: str, path: str, headers: dict[str, str]
) -> None:
    told = ask(url, method, path, **WITH_KEY, **headers)
    assert told.status_code in (400, 403)
    assert "access-control-allow-origin" not in told.headers


OURS: list[dict[str, str]] = [
    {},
    {"host": "localhost"},
    {"host": "LOCALHOST:9"},
    {"host": "app.localhost:8080"},
    {"host": "192.168.1.7:8080"},
    {"host": "[::1]:8080"},
    {"host": "[fe80::1]"},
    {"host": "box.example.org"},
    {"host": "localhost:8080", "origin": "http://localhost:8080", "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
    {"origin": PAGE, "sec-fetch-site": "cross-site"},
]


@pytest.mark.parametrize("headers", OURS, ids=str)
def test_our_own_hosts_and_pages_are_answered(url: str, headers: dict[str, str]) -> None:
    told = ask(url, "POST", CHAT, **WITH_KEY, **headers)
    assert told.status_code == 200
    allowed = headers.get("origin") == PAGE
    assert told.headers.get("access-control-allow-origin") == (PAGE if allowed else None)
    assert told.headers.get("vary") == ("Origin" if allowed else None)


def test_a_preflight_of_an_allowed_page_lets_the_headers_of_clients_through(url: str) -> None:
    wanted = "authorization, x-api-key, anthropic-version, x-stainless-os, content-type"
    headers = {"origin": PAGE, "access-control-request-method": "POST"}
    headers["access-control-request-headers"] = wanted
    headers["access-control-request-private-network"] = "true"
    told = httpx.options(url + CHAT, headers=headers)
    assert told.status_code == 204
    assert told.headers["access-control-allow-origin"] == PAGE
    assert told.headers["access-control-allow-headers"] == wanted
    assert told.headers["access-control-allow-private-network"] == "true"
    foreign = httpx.options(url + CHAT, headers=headers | {"origin": "https://evil.example.org"})
    assert foreign.status_code == 403
    assert ask(url, "POST", CHAT, origin=PAGE).headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "text/plain; application/json",
        "",
    ],
)
def test_only_json_is_taken(url: str, kind: str) -> None:
    content = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    told = httpx.post(
        url + CHAT, content=content, headers=WITH_KEY | ({"content-type": kind} if kind else {})
    )
    assert told.status_code == 415
    kind = "application/json; charset=utf-8"
    assert httpx.post(url + CHAT, content=content, headers=WITH_KEY | {"content-type": kind}).is_success


@pytest.mark.parametrize(
    "model", ["../../etc/passwd", "/etc/passwd", "http://127.0.0.1:1/x", "gguf:a/b/c.gguf", "~"]
)
def test_a_name_of_a_model_opens_nothing(url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx_dspark.catalog.resolve as resolve

    monkeypatch.setattr(resolve, "resolve_model", lambda *_, **__: pytest.fail("looked for a model"))
    told = httpx.post(url + CHAT, json={**ASKED, "model": model}, headers=WITH_KEY)
    assert told.json()["model"] == model
    assert httpx.get(f"{url}/v1/models/{model}", headers=WITH_KEY).status_code in (404, 405)


def test_a_slash_at_the_end_and_a_query_change_nothing(url: str) -> None:
    for path in (f"{CHAT}/", f"{CHAT}?api-version=1", "/chat/completions/?x=1"):
        assert ask(url, "POST", path, **WITH_KEY).status_code == 200
    for path in ("/", "/health", "/v1/models"):
        told = httpx.head(url + path, headers=WITH_KEY)
        assert (told.status_code, told.content) == (200, b"")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"api_key": ""}, "api_key"),
        ({"api_key": "with space"}, "api_key"),
        ({"api_key": "naïve-key"}, "api_key"),
        ({"cors_origin": "*"}, "cors_origin"),
        ({"cors_origin": ["https://a.example.org/path"]}, "cors_origin"),
        ({"allow_host": "a.example.org:80"}, "allow_host"),
        ({"default_max_tokens": 10, "max_tokens_cap": 5}, "default_max_tokens"),
    ],
)
def test_bad_settings_are_refused_and_no_key_is_shown(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        ServeSettings.of(settings)
    assert caught.value.field == field
    assert not (key := settings.get("api_key")) or key not in str(caught.value)


def test_without_a_key_everybody_here_may_ask(app: Any) -> None:
    open_app = create_app(app.state.host, Rules())
    with listening(open_app) as url:
        assert ask(url, "POST", CHAT).status_code == 200
        assert ask(url, "GET", "/health").json()["model"] == "scripted"
        assert ask(url, "POST", CHAT, origin=PAGE).status_code == 403


@pytest.mark.parametrize(
    ("version", "headers", "taken"),
    [
        ("1.0", "", True),
        ("1.1", "", False),
        ("1.0", "Host: evil.example\r\n", False),
        ("1.0", "Origin: http://evil.example\r\n", False),
        ("1.0", "Sec-Fetch-Site: cross-site\r\n", False),
        ("1.0", "Host: a\r\nHost: b\r\n", False),
    ],
)
def test_a_client_so_old_that_it_names_no_host_is_no_page(
    url: str, version: str, headers: str, taken: bool
) -> None:
    with socket.create_connection(("127.0.0.1", urlsplit(url).port or 0)) as client:
        client.sendall(f"GET /health HTTP/{version}\r\n{headers}Connection: close\r\n\r\n".encode())
        told = client.makefile("rb").readline()
    assert (told.split()[1] == b"200") is taken
