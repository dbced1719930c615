"""Bodies that nobody should send: never a 500, never a hang, and the next good request is answered."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import content_type_conformance

from mlx_dspark.serving.app import create_app
from mlx_dspark.serving.dialects import DIALECTS
from mlx_dspark.serving.guard import Rules
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.model import Model
from tests.tiny_server import tiny_session

GOOD = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
}
HOST = "testserver"
BODIES = int(os.environ.get("FUZZED_BODIES", "150"))
"""For each route; `benchmarks/fuzz_server.py` tries more."""
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    with tiny_session() as session:
        host = Host(Model(session), queue=64)
        yield create_app(host, Rules(hosts=(HOST,), body_limit=200_000))
        host.close()


class Asker:
    """Asks an application in this process, on a loop of its own."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._loop = asyncio.new_event_loop()

    def __call__(self, path: str, content: bytes) -> httpx.Response:
        return self._loop.run_until_complete(asyncio.wait_for(self._post(path, content), 20))

    async def _post(self, path: str, content: bytes) -> httpx.Response:
        headers = {"content-type": "application/json"}
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            return await client.post(path, content=content, headers=headers)

    def close(self) -> None:
        self._loop.close()


@pytest.fixture(scope="module")
def ask(app: Any) -> Iterator[Asker]:
    asker = Asker(app)
    yield asker
    asker.close()


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["\ud800", "\x00", "NaN", "auto", "a" * 5000, math.inf, -0.0, 10**400])
)
VALUES = st.recursive(
    SCALARS,
    lambda e: st.lists(e, max_size=3) | st.dictionaries(st.text(max_size=8), e, max_size=3),
    max_leaves=6,
)


def fields_of(path: str) -> list[str]:
    """Every name of a body's protocol, those that are not served among them."""
    from mlx_dspark.serving.dialects import anthropic_body, openai_body, openai_chat_body, openai_text

    dialect = next(each for each in DIALECTS if path in each.paths)
    unserved = [*openai_text.UNSERVED, *openai_body.HARMLESS, *openai_chat_body.CHAT_UNSERVED]
    if path == "/v1/messages":
        unserved = [*anthropic_body.UNSERVED, *anthropic_body.HARMLESS]
    return [*dialect.body.model_fields, *(name for name in unserved if "." not in name), "unknown"]


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    """A good body with some fields replaced, at any depth, or something else altogether."""
    if draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    body = json.loads(json.dumps(GOOD[path]))
    for name in draw(st.lists(st.sampled_from(fields_of(path)), min_size=1, max_size=3)):
        body[name] = draw(VALUES | _near(name))
    body["max_tokens"] = body["max_tokens"] if draw(st.booleans()) else 3
    return body


def _object(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "text", "text")
_TEXTS = st.text(max_size=5) | SCALARS
BLOCKS = st.builds(
    lambda kind, rest: {"type": kind, **rest},
    st.sampled_from(_KINDS),
    _object(
        text=_TEXTS,
        thinking=_TEXTS,
        signature=_TEXTS,
        id=_TEXTS,
        name=_TEXTS,
        input=VALUES | st.dictionaries(st.text(max_size=3), VALUES, max_size=2),
        tool_use_id=_TEXTS,
        content=VALUES,
        is_error=st.booleans() | SCALARS,
    ),
)
"""Blocks of Anthropic's messages, few of them whole."""
TOOLS = _object(name=_TEXTS, type=SCALARS, description=_TEXTS, input_schema=VALUES)


def _near(name: str) -> st.SearchStrategy[Any]:
    """Values of the right shape with something wrong inside."""
    roles = st.sampled_from(["user", "assistant", "tool", "system", "robot"])
    message = st.fixed_dictionaries(
        {"role": roles, "content": VALUES | st.lists(BLOCKS, max_size=3)},
        optional={
            "tool_calls": VALUES,
            "tool_call_id": SCALARS,
            "name": SCALARS,
            "reasoning_content": SCALARS,
        },
    )
    function = st.fixed_dictionaries({"name": SCALARS}, optional={"parameters": VALUES, "strict": SCALARS})
    tool = st.fixed_dictionaries({"type": st.just("function"), "function": function}) | TOOLS
    variables = st.sampled_from(["enable_thinking", "messages", "x"])
    shapes: dict[str, st.SearchStrategy[Any]] = {
        "messages": st.lists(message, max_size=4),
        "tools": st.lists(tool, max_size=3),
        "prompt": st.lists(st.integers(-2, 500) | st.text(max_size=5), max_size=5),
        "logit_bias": st.dictionaries(st.integers(-5, 400).map(str), st.floats(), max_size=3),
        "stop": st.lists(st.text(max_size=3), max_size=20),
        "stop_sequences": st.lists(st.text(max_size=3), max_size=20),
        "chat_template_kwargs": st.dictionaries(variables, VALUES),
        "system": st.lists(BLOCKS, max_size=2),
        "thinking": _object(type=SCALARS, budget_tokens=SCALARS, display=SCALARS),
        "tool_choice": _object(type=SCALARS, name=SCALARS, disable_parallel_tool_use=SCALARS),
        "output_config": _object(effort=SCALARS, format=VALUES),
    }
    return shapes.get(name, st.integers(-3, 3) | st.floats(-3, 3) | st.sampled_from(["auto", "none", "low"]))


@pytest.mark.parametrize("path", GOOD)
def test_bad_bodies_are_refused_and_the_next_good_one_is_answered(ask: Asker, path: str) -> None:
    @settings(
        max_examples=BODIES,
        deadline=None,
        suppress_health_check=SLOW,
        phases=[Phase.explicit, Phase.generate],
    )
    @given(bodies(path))
    def check(body: Any) -> None:
        told = ask(path, json.dumps(body).encode())
        assert told.status_code < 500, told.text
        if told.status_code != 200:
            error = told.json()["error"]
            assert told.status_code == 400
            assert error["message"]
        elif not (isinstance(body, dict) and body.get("stream")):
            assert json.loads(told.text, parse_constant=pytest.fail)["x_mlx_dspark"]

    check()
    assert ask(path, json.dumps(GOOD[path]).encode()).status_code == 200


RAW = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b"[" * 100_000,
    b'{"a":' * 30_000 + b"1" + b"}" * 30_000,
    b'{"temperature": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "seed": 1e999}',
    b'{"prompt": "x", "temperature": NaN, "messages": []}',
    json.dumps({"messages": [{"role": "user", "content": "x"}] * 3000}).encode(),
]


@pytest.mark.parametrize("path", GOOD)
def test_bodies_that_are_no_json_or_endless_are_refused(ask: Asker, path: str) -> None:
    for raw in RAW:
        told = ask(path, raw)
        assert told.status_code == 400, (raw[:40], told.text[:300])
        assert told.json()["error"]["message"]
    assert ask(path, json.dumps(GOOD[path]).encode()).status_code == 200


def test_no_request_that_the_openapi_page_allows_fails(app: Any) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", app).exclude(path="/events")

    for operation in schema.get_all_operations():
        assert isinstance(operation, Ok)

        @settings(
            max_examples=12,
            deadline=None,
            suppress_health_check=SLOW,
            phases=[Phase.generate],
        )
        @given(operation.ok().as_strategy())
        def check(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body["max_tokens"] = 2
            response = case.call(timeout=20)
            case.validate_response(response, checks=[not_a_server_error, content_type_conformance])

        check()
