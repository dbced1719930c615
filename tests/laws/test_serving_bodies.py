"""What bodies may cost, and what is told of those that are not what a route takes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from mlx_dspark.serving import bodies
from mlx_dspark.serving.dialects.anthropic_body import MessagesBody
from mlx_dspark.serving.dialects.openai_chat_body import ChatBody
from mlx_dspark.serving.dialects.openai_text import MOST_IDS, TextBody
from mlx_dspark.serving.faults import Refused
from tests.scripted_engine import ScriptedEngine, scripted_session
from tests.tiny_server import tiny_server

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
KINDS: dict[str, Any] = {CHAT: ChatBody, TEXT: TextBody, MESSAGES: MessagesBody}
HELLO = [{"role": "user", "content": "Hello"}]
MANY = 40_000


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_server(scripted_session(ScriptedEngine())) as url:
        yield url


def said(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


MANY_MISTAKES: list[tuple[str, Any]] = [
    (TEXT, {"prompt": [[1.5]] * MANY}),
    (TEXT, {"prompt": ["a", *[1] * MANY]}),
    (TEXT, {"prompt": [1, *["a"] * MANY]}),
    (TEXT, {"prompt": "a", "stop": [1] * MANY}),
    (TEXT, {"prompt": "a", "logit_bias": {str(n): "a" for n in range(MANY)}}),
    (CHAT, {"messages": [{}] * MANY}),
    (CHAT, said([{}] * MANY)),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]}),
    (CHAT, {"messages": HELLO, "tools": [{}] * MANY}),
    (MESSAGES, {"messages": [{}] * MANY}),
    (MESSAGES, said([{}] * MANY)),
    (MESSAGES, said([{"type": "tool_result", "content": [{}] * MANY}])),
    (MESSAGES, {"messages": HELLO, "system": [{}] * MANY}),
    (MESSAGES, {"messages": HELLO, "tools": [{}] * MANY}),
    (MESSAGES, {"messages": HELLO, "stop_sequences": [1] * MANY}),
]


@pytest.mark.parametrize(("path", "body"), MANY_MISTAKES, ids=lambda value: str(value)[:60])
def test_of_many_mistakes_a_few_are_looked_for(path: str, body: Any) -> None:
    """Collecting all of them would keep everybody else's answer waiting."""
    with pytest.raises(Refused) as caught:
        bodies.checked(KINDS[path], json.dumps(body).encode())
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() <= 2


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": [' + b"[1]," * bodies.MOST_CONTAINERS + b"[1]]}",
        b'{"prompt": "a", "x": [' + b"{}," * bodies.MOST_CONTAINERS + b"{}]}",
        b"[" * 100_000,
    ],
)
def test_a_body_of_too_many_lists_and_objects_is_refused_before_it_is_read(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies.json, "loads", lambda _: pytest.fail("read"))
    with pytest.raises(Refused, match="50000 lists and objects"):
        bodies.checked(TextBody, raw)


def test_brackets_in_text_are_text() -> None:
    text = '[{"' * bodies.MOST_CONTAINERS
    body: Any = bodies.checked(TextBody, json.dumps({"prompt": text}).encode())
    assert body.prompt == text


def test_ids_are_bounded() -> None:
    with pytest.raises(Refused, match="prompt has too many items"):
        bodies.checked(TextBody, json.dumps({"prompt": [1] * (MOST_IDS + 1)}).encode())


def test_a_large_body_is_read_in_another_thread(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def checked(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return original(*given)

    original = bodies.checked
    monkeypatch.setattr(bodies, "checked", checked)
    for size in (10, 200_000):
        assert httpx.post(url + CHAT, json=said("Hi") | {"user": "x" * size}).status_code == 200
    assert len(set(threads)) == 2


# what is told --------------------------------------------------------------------------------------

TOLD: list[tuple[str, Any, str, str | None]] = [
    (CHAT, b"", "The body is empty", None),
    (CHAT, b'{"messages": "\xff"}', "not valid UTF-8", None),
    (CHAT, b"{", "not JSON", None),
    (CHAT, [], "The body is a list of 0, which cannot be used. Give an object.", None),
    (CHAT, {}, "messages is missing. Give it.", "messages"),
    (CHAT, {"messages": []}, "messages is empty. Give at least 1.", "messages"),
    (CHAT, {"messages": HELLO, "temperature": "hot"}, 'temperature is "hot", which', "temperature"),
    (CHAT, {"messages": HELLO, "stream": 1}, "stream is 1, which cannot be used. Give true", "stream"),
    (CHAT, {"messages": HELLO, "n": 9}, "n is 9, which cannot be used. Give 8 or less.", "n"),
    (CHAT, said(5), "messages[0].content is 5, which cannot be used. Give text", "messages"),
    (CHAT, said({}), "messages[0].content is an object, which", "messages"),
    (CHAT, said([{}]), "messages[0].content[0].type is missing", "messages"),
    (CHAT, said([{"type": "text"}]), "messages[0].content[0].text is missing", "messages"),
    (CHAT, said([{"type": "text", "text": 1}]), "messages[0].content[0].text is 1", "messages"),
    (CHAT, said(None), "messages[0].content has nothing in it", "messages"),
    (CHAT, said([]), "messages[0].content has nothing in it", "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content has nothing in it", "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": ""}]}, 'messages[0].role is "robot"', "messages"),
    (TEXT, {"prompt": "a", "echo": True}, "echo is true, which this server does not do", "echo"),
    (TEXT, {"prompt": "a", "stop": [None]}, "stop[0] is null", "stop"),
    (TEXT, {"prompt": {"a": 1}}, "prompt is an object", "prompt"),
    (TEXT, {"prompt": [[1], [2.5]]}, "prompt[1][0] is 2.5", "prompt"),
    (TEXT, {"prompt": "a", "logit_bias": {"7": "x"}}, 'logit_bias.7 is "x"', "logit_bias"),
    (MESSAGES, said([{"type": "text", "text": 5}]), "messages[0].content[0].text is 5", None),
    (MESSAGES, said(None), "messages[0].content is null", None),
    (MESSAGES, said([]), "messages[0].content has nothing in it", None),
    (
        CHAT,
        {
            "messages": HELLO,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "\ud800"}}}],
        },
        "tools[0].parameters",
        "tools[0].parameters",
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "\ud800"}}]}
            ]
        },
        "messages[0].tool_calls[0].arguments",
        "messages[0].tool_calls[0].arguments",
    ),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"a": ["\ud800"]}}, "chat_template_kwargs", None),
]


@pytest.mark.parametrize(("path", "body", "told", "field"), TOLD, ids=lambda value: str(value)[:50])
def test_a_mistake_is_told_by_its_path_with_what_to_give(
    url: str, path: str, body: Any, told: str, field: str | None
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(url + path, content=raw, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert told in error["message"]
    assert error["message"].endswith(".")
    if field is not None:
        assert error["param"] == field
