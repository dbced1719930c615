"""The official Anthropic client against the real server: streamed and plain, equal after folding."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from mlx_dspark.serving.dialects.anthropic_body import HARMLESS, UNSERVED
from mlx_dspark.serving.dialects.anthropic_signature import SIGNATURE, carried, carrying
from mlx_dspark.serving.guard import Rules
from mlx_dspark.serving.streaming import Clock
from tests.scripted import scripted_session
from tests.scripted_engine import ScriptedEngine
from tests.scripted_engine import scripted_session as engine_session
from tests.tiny_server import tiny_server

GOLDEN = Path(__file__).parent.parent / "golden" / "anthropic"
CONTEXT = 4000
READ = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
CALL = '<tool_call>\n{"name": "Read", "arguments": {"path": "%s", "lines": [1, 2.5, null]}}\n</tool_call>'
REFERRED = {
    "type": "tool_result",
    "tool_use_id": "t1",
    "content": [{"type": "tool_reference", "tool_name": "Nope"}],
}
BROKEN = '<tool_call>\n{"name": "Read", "arguments": {"path": oh}}\n</tool_call> No.'
UNCLOSED = '<tool_call>\n{"name": "Read", "arguments": {"path": "a.py"}, oops'
CALLED = {"path": "a.py", "lines": [1, 2.5, None]}


@dataclass(frozen=True)
class Case:
    """A scripted answer, how it is asked for, and what must come of it."""

    answer: str
    asked: dict[str, Any]
    blocks: list[dict[str, Any]]
    reason: str
    stop: str | None = None


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text}


def _use(**given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "name": "Read", "input": given}


TOOLS = {"tools": [READ]}
CASES = {
    "text": Case("Hello, wörld 👩‍🚀!", {}, [_text("Hello, wörld 👩‍🚀!")], "end_turn"),
    "nothing": Case("", {}, [], "end_turn"),
    "thinking": Case("<think>\nHm.\n</think>\n\nYes.", {}, [_thinking("Hm."), _text("Yes.")], "end_turn"),
    "thinking not shown": Case(
        "<think>\nHm.\n</think>\n\nYes.",
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        [_thinking(""), _text("Yes.")],
        "end_turn",
    ),
    "thoughts in turn": Case(
        "<think>\nHm.\n</think>\n\nOne.\n<think>\nOh.\n</think>\n\nTwo.",
        {},
        [_thinking("Hm."), _text("One."), _thinking("\nOh."), _text("\nTwo.")],
        "end_turn",
    ),
    "no thinking": Case("Yes.", {"thinking": {"type": "disabled"}}, [_text("Yes.")], "end_turn"),
    "two calls": Case(
        f"Look.\n{CALL % 'a.py'}\n{CALL % 'b.py'}",
        TOOLS,
        [_text("Look."), _use(**CALLED), _use(**CALLED | {"path": "b.py"})],
        "tool_use",
    ),
    "thinking and a call": Case(
        f"<think>\nHm.\n</think>\n\n{CALL % 'a.py'}", TOOLS, [_thinking("Hm."), _use(**CALLED)], "tool_use"
    ),
    "a call of nothing declared": Case(CALL % "a.py", {}, [_text(CALL % "a.py")], "end_turn"),
    "tools not to be used": Case(
        CALL % "a.py", TOOLS | {"tool_choice": {"type": "none"}}, [_text(CALL % "a.py")], "end_turn"
    ),
    "stop sequence": Case(
        "One two three", {"stop_sequences": ["five", " thr"]}, [_text("One two")], "stop_sequence", " thr"
    ),
    "cut off": Case("abcdefgh", {"max_tokens": 3}, [_text("abc")], "max_tokens"),
    "a call cut off": Case(
        CALL % "a.py",
        TOOLS | {"max_tokens": 62},
        [_use(path="a.py"), _text((CALL % "a.py")[:62])],
        "max_tokens",
    ),
    "a call broken at its end": Case(UNCLOSED, TOOLS, [_use(path="a.py"), _text(UNCLOSED)], "end_turn"),
    "a broken call": Case(BROKEN, TOOLS, [_use(), _text(BROKEN)], "end_turn"),
    "thinking cut off": Case("<think>\nabcdefgh", {"max_tokens": 10}, [_thinking("ab")], "max_tokens"),
}


class Played:
    """A script that answers what the test says next."""

    answer = ""

    def __call__(self, prompt: str) -> str:
        self.prompt = prompt
        number = re.findall(r"case ([a-z ]+)\.", prompt)[-1]
        return CASES[number].answer


@pytest.fixture(scope="module")
def script() -> Played:
    return Played()


@pytest.fixture(scope="module")
def url(script: Played) -> Iterator[str]:
    with tiny_server(scripted_session(script, context=CONTEXT)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def _asked(name: str, **more: Any) -> Any:
    said = [{"role": "user", "content": f"This is case {name}."}]
    return {"model": "m", "max_tokens": 300, "messages": said} | CASES[name].asked | more


def _plain(blocks: Any) -> list[dict[str, Any]]:
    """Blocks without what no test can foresee."""
    told = [block.model_dump(exclude_none=True) for block in blocks]
    return [
        {name: value for name, value in block.items() if name not in ("id", "signature")} for block in told
    ]


@pytest.mark.parametrize("name", CASES)
def test_plain_equals_streamed_equals_what_was_said(client: Anthropic, name: str) -> None:
    case = CASES[name]
    plain = client.messages.create(**_asked(name))
    with client.messages.stream(**_asked(name)) as stream:
        streamed = stream.get_final_message()
    for message in (plain, streamed):
        assert _plain(message.content) == case.blocks
        assert message.stop_reason == case.reason
        assert message.stop_sequence == case.stop
        ids = [block.id for block in message.content if block.type == "tool_use"]
        assert len({*ids}) == len(ids)
        assert all(block.signature for block in message.content if block.type == "thinking")
    assert plain.usage == streamed.usage
    assert plain.usage.cache_read_input_tokens == plain.usage.cache_creation_input_tokens == 0


EVENT = {"content_block_start": "s", "content_block_delta": "d", "content_block_stop": "e"}


@pytest.mark.parametrize("name", CASES)
def test_events_come_in_order(url: str, name: str) -> None:
    frames = _frames(url, _asked(name, stream=True))
    assert all(event == data["type"] for event, data in frames)
    kinds = [event for event, _ in frames]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    middle = "".join(EVENT[kind] for kind in kinds[2:-2])
    assert re.fullmatch("(sd*e)*", middle)
    indexes = [data["index"] for _, data in frames if "index" in data]
    assert indexes == sorted(indexes)
    start = frames[0][1]["message"]
    count = httpx.post(f"{url}/messages/count_tokens", json=_asked(name)).json()
    assert start["usage"]["input_tokens"] == count["input_tokens"] > 0


def _frames(url: str, body: Any) -> list[tuple[str, Any]]:
    raw = httpx.post(f"{url}/messages", json=body).text
    assert raw.endswith("\n\n")
    pairs = [frame.split("\n", 1) for frame in raw[:-2].split("\n\n")]
    return [(event.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for event, data in pairs]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.asked.get("tools")])
def test_only_a_call_that_is_whole_has_arguments_that_can_be_read(url: str, name: str) -> None:
    """Some clients run what they can read, whatever the reason to stop."""
    told: dict[int, str] = {}
    for _, data in _frames(url, _asked(name, stream=True)):
        if data.get("content_block", {}).get("type") == "tool_use":
            told[data["index"]] = ""
        if data["type"] == "content_block_delta" and data["delta"]["type"] == "input_json_delta":
            told[data["index"]] += data["delta"]["partial_json"]
    for text in told.values():
        if CASES[name].reason == "tool_use":
            assert isinstance(json.loads(text), dict)
        else:
            with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
                json.loads(text)


@pytest.mark.parametrize("name", ["thinking_and_a_call", "stop_sequence"])
def test_the_stream_is_the_one_on_record(url: str, name: str) -> None:
    told = _frames(url, _asked(name.replace("_", " "), stream=True))
    assert recorded(told) == (GOLDEN / f"{name}.txt").read_text()


def recorded(frames: list[tuple[str, Any]]) -> str:
    """A stream without ids and rates, and with neighbouring deltas joined."""
    joined: list[tuple[str, Any]] = []
    for event, data in frames:
        data.pop("x_mlx_dspark", None)
        before = joined[-1][1].get("delta", {}) if joined else {}
        if event == "content_block_delta" and before.get("type") == data["delta"]["type"]:
            name = next(name for name in before if name != "type")
            before[name] += data["delta"][name]
        else:
            joined.append((event, data))
    lines = [f"event: {event}\ndata: {json.dumps(data, ensure_ascii=False)}\n" for event, data in joined]
    return re.sub(r'"(msg|call)_[0-9a-f]+"', r'"\1_1"', "\n".join(lines))


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("tool_choice.type", TOOLS | {"tool_choice": {"type": "any"}}),
        ("tool_choice.type", TOOLS | {"tool_choice": {"type": "tool", "name": "Read"}}),
        (
            "disable_parallel_tool_use",
            TOOLS | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
        ("tools[0].type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        ("tools[0].input_schema", {"tools": [{"name": "bash"}]}),
        ("tools.strict", {"tools": [READ | {"strict": True}]}),
        ('tool "Nope"', {"messages": [{"role": "user", "content": [REFERRED]}]}),
        ("output_config.format", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        ("output_config.effort", {"output_config": {"effort": "huge"}}),
        ("context_management", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
        (
            "mcp_servers",
            {"mcp_servers": [{"type": "url", "url": "http://localhost", "authorization_token": "s3cret"}]},
        ),
        ("container", {"container": "c"}),
        ("thinking.type", {"thinking": {"type": "between_tools"}}),
        ("budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 0}}),
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": -1}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("messages", {"messages": []}),
        (
            "assistant",
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        ),
        (
            "messages[0].content[0]",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        ),
        ("text is missing", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ],
)
@pytest.mark.parametrize("route", ["messages", "messages/count_tokens"])
def test_what_is_not_done_is_refused_by_name(url: str, route: str, field: str, more: Any) -> None:
    refused = httpx.post(f"{url}/v1/{route}", json=_asked("text") | more)
    told = refused.json()
    assert refused.status_code == 400
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert field in told["error"]["message"]
    assert "s3cret" not in refused.text


def test_the_page_lists_the_fields_that_are_not_served() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "anthropic.md").read_text()
    _, harmless, unserved = page.split("\n## ")
    for listed, names in ((harmless, HARMLESS), (unserved, UNSERVED)):
        assert set(re.findall("`(.*?)`", listed)) == set(names)


def test_thinking_is_ended_at_its_budget(client: Anthropic) -> None:
    asked = _asked("thinking cut off", max_tokens=50, thinking={"type": "enabled", "budget_tokens": 4})
    told = client.messages.create(**asked)
    assert _plain(told.content) == [_thinking("ab")]
    assert told.usage.output_tokens_details
    assert told.usage.output_tokens_details.thinking_tokens == 4


def test_harmless_fields_are_taken_and_unknown_ones_told(client: Anthropic) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    said = [{"role": "user", "content": [{"type": "text", "text": "This is case text.", **cached}]}]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"},
        {"type": "text", "text": "Be good.", **cached},
    ]
    more = {"metadata": {"user_id": "u"}, "service_tier": "auto", "tools": [READ | cached]}
    extra = {"strange": 1, "context_management": {"edits": []}}
    told = client.messages.create(**_asked("text", messages=said, system=system, **more), extra_body=extra)
    assert told.model_dump()["x_mlx_dspark"]["ignored"] == ["strange", "system.x-anthropic-billing-header"]


def test_what_was_said_reaches_the_model(client: Anthropic, script: Played) -> None:
    """Results come before the rest, system text becomes the user's, errors are told, thinking is kept."""
    use = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "ä"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [_text("none")]}
    said = [
        {"role": "user", "content": [_text("one"), _text("two")]},
        {"role": "assistant", "content": [thought, _text("Look."), use]},
        {"role": "user", "content": [_text("This is case text."), result]},
        {"role": "system", "content": "Be quick."},
    ]
    client.messages.create(**_asked("text", system="Be good.", messages=said))
    assert script.prompt == (
        "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\none\n\ntwo<|im_end|>\n"
        '<|im_start|>assistant\n<think>\nHm.\n</think>\n\nLook.\n<tool_call>\n{"name": "Read", '
        '"arguments": {"path": "ä"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nError: none\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nThis is case text.\n\n<system-reminder>\nBe quick.\n</system-reminder><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thinking_comes_back_in_the_next_turn(client: Anthropic, script: Played, display: str) -> None:
    asked = _asked("thoughts in turn", thinking={"type": "adaptive", "display": display})
    first = client.messages.create(**asked)
    shown = [block.thinking for block in first.content if block.type == "thinking"]
    assert shown == (["Hm.", "\nOh."] if display == "summarized" else ["", ""])
    said = [*asked["messages"], {"role": "assistant", "content": first.content}]
    client.messages.create(**asked | {"messages": [*said, {"role": "user", "content": "Again, case text."}]})
    assert "assistant\n<think>\nHm.\nOh.\n</think>\n\nOne.\nTwo.<|im_end|>" in script.prompt


@pytest.mark.parametrize("signature", ["", "EqoB", "bWx4LWRzcGFyay50!", SIGNATURE])
def test_what_is_no_signature_of_ours_carries_nothing(signature: str) -> None:
    assert carried(signature) == ""
    assert carried(carrying("Hm. ä\n")) == "Hm. ä\n"


def test_a_deferred_tool_is_told_of_where_it_is_referred_to(client: Anthropic, script: Played) -> None:
    """It is no part of the prompt's beginning, which therefore stays as it is; it can be called."""
    search = READ | {"name": "Search"}
    use = {"type": "tool_use", "id": "t1", "name": "Search", "input": {}}
    found = REFERRED | {"content": [{"type": "tool_reference", "tool_name": "Read"}]}
    first = _asked("two calls")["messages"]
    told = [*first, {"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]
    beginnings = []
    for said in (first, told):
        tools = [search, READ | {"defer_loading": True}]
        answer = client.messages.create(**_asked("two calls", tools=tools, messages=said))
        assert _plain(answer.content) == CASES["two calls"].blocks
        beginnings.append(script.prompt.partition("</tools>")[0])
        assert ("<functions>" in script.prompt) == (said is told)
    assert beginnings[0] == beginnings[1]
    assert '"Search"' in beginnings[0]
    assert '"Read"' not in beginnings[0]
    declared = script.prompt.partition("<function>")[2].partition("</function>")[0]
    assert json.loads(declared) == {
        "description": READ["description"],
        "name": "Read",
        "parameters": READ["input_schema"],
    }


def test_a_prompt_that_is_too_long_is_counted_and_refused_in_the_known_words(client: Anthropic) -> None:
    long = _asked("text", messages=[{"role": "user", "content": "This is case text." + "Z" * CONTEXT}])
    long.pop("max_tokens")
    count = client.messages.count_tokens(**long).input_tokens
    assert count > CONTEXT
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as raised:
            client.messages.create(**long, max_tokens=5, stream=stream)
        told: Any = raised.value.body
        assert told["error"]["message"] == f"prompt is too long: {count} tokens > {CONTEXT} maximum"


def test_an_answer_that_fills_the_context_says_so(client: Anthropic) -> None:
    asked = _asked("text", messages=[{"role": "user", "content": "This is case text."}])
    count = client.messages.count_tokens(model="m", messages=asked["messages"]).input_tokens
    filled = "Z" * (CONTEXT - count - 3)
    said = [{"role": "user", "content": f"{filled}This is case text."}]
    told = client.messages.create(**asked | {"messages": said})
    assert told.stop_reason == "model_context_window_exceeded"
    assert told.usage.input_tokens + told.usage.output_tokens == CONTEXT


def test_errors_have_the_statuses_that_clients_expect() -> None:
    session = scripted_session(lambda _: "", context=CONTEXT)
    with tiny_server(session, Rules(api_key="secret", body_limit=2000), queue=0) as url:
        asked: Any = _asked("text")
        for key, error in (("wrong", anthropic.AuthenticationError), ("secret", None)):
            with Anthropic(base_url=url, api_key=key, max_retries=0) as client:
                if error is None:
                    client.messages.create(**asked)
                    continue
                with pytest.raises(error) as raised:
                    client.messages.create(**asked)
                told: Any = raised.value.body
                assert told["error"]["type"] == "authentication_error"
        with Anthropic(base_url=url, api_key="secret", max_retries=0) as client:
            with pytest.raises(anthropic.RequestTooLargeError):
                client.messages.create(**asked | {"system": "Z" * 3000})
            session.close()
            with pytest.raises(anthropic.OverloadedError):
                client.messages.create(**asked)


def test_a_silent_stream_pings_and_a_full_queue_says_when_to_come_again() -> None:
    engine = ScriptedEngine("Hello there.", max_rows=1)
    engine.go.clear()
    session = engine_session(engine)
    with (
        tiny_server(session, clock=Clock(keep_alive=0.1), queue=0) as url,
        Anthropic(base_url=url, api_key="x", max_retries=0) as client,
    ):
        told: list[tuple[str, Any]] = []
        waiting = threading.Thread(target=lambda: told.extend(_frames(url, _asked("text", stream=True))))
        waiting.start()
        while not httpx.get(f"{url}/health").json()["under_way"]:
            time.sleep(0.01)
        with pytest.raises(anthropic.RateLimitError) as raised:
            client.messages.create(**_asked("text"))
        assert int(raised.value.response.headers["retry-after"]) >= 1
        time.sleep(0.5)
        engine.go.set()
        waiting.join()
        kinds = [event for event, _ in told]
        assert kinds.count("ping") >= 3
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"


def test_a_failure_after_the_stream_began_is_an_event(script: Played) -> None:
    def broken(prompt: str) -> str:
        raise RuntimeError("no answer")

    with tiny_server(scripted_session(broken)) as url:
        *_, (event, told) = _frames(f"{url}", _asked("text", stream=True))
        assert (event, told["error"]["type"]) == ("error", "api_error")
        with (
            Anthropic(base_url=url, api_key="x", max_retries=0) as client,
            pytest.raises(anthropic.APIStatusError),
            client.messages.stream(**_asked("text")) as stream,
        ):
            stream.get_final_message()


def test_the_model_is_listed(client: Anthropic) -> None:
    (listed,) = client.models.list()
    assert listed == client.models.retrieve("scripted")
    assert (listed.id, listed.display_name, listed.type) == ("scripted", "scripted", "model")
    assert listed.max_input_tokens == CONTEXT
    assert listed.created_at.tzinfo


def test_a_random_model_streams_what_it_says() -> None:
    with tiny_server() as url, Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
        plain = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        assert _plain(plain.content) == _plain(streamed.content)
        assert plain.usage == streamed.usage
        assert plain.usage.output_tokens == 12
        assert plain.stop_reason == streamed.stop_reason == "max_tokens"
