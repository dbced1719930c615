"""The official OpenAI client against the real server and engine: streamed and plain, equal after folding, and
equal to what the session says by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from mlx_dspark.session.session import Session
from tests.scripted_engine import ScriptedEngine, scripted_session, thinking_tokenizer
from tests.tiny_server import tiny_server, tiny_session

HELLO = [{"role": "user", "content": "Hello"}]
DRAWN = {"temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def session() -> Session:
    return tiny_session(stops=True)


@pytest.fixture(scope="module")
def url(session: Session) -> Iterator[str]:
    with tiny_server(session) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with client_of(url) as client:
        yield client


def client_of(url: str) -> Any:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top_p": {**DRAWN, "top_p": 0.8},
    "top_k": {**DRAWN, "extra_body": {"top_k": 5}},
    "min_p": {**DRAWN, "extra_body": {"min_p": 0.1}},
    "penalties": {**DRAWN, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    "repetition": {"extra_body": {"repetition_penalty": 1.3}},
    "logit_bias": {"logit_bias": {"40": 100}},
    "stop": {"stop": ["e", "o"]},
    "one stop": {"stop": "a"},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "bare logprobs": {**DRAWN, "logprobs": True},
    "ended at once, with logprobs": {"logprobs": True, "logit_bias": {"2": 100}},
    "several": {**DRAWN, "n": 3},
    "several, stopped, with logprobs": {**DRAWN, "n": 2, "stop": ["e"], "logprobs": True},
}


def untimed(answer: Any) -> dict[str, Any]:
    """An answer without what two runs cannot share."""
    told = answer.model_dump() if hasattr(answer, "model_dump") else dict(answer)
    stats = dict(told.pop("x_mlx_dspark", None) or {})
    kept = {"mode", "prompt_tokens", "completion_tokens", "target_forwards", "ignored", "context_full"}
    return {k: v for k, v in told.items() if k not in ("id", "created")} | {
        "stats": {name: stats.get(name) for name in kept}
    }


def folded(chunks: list[Any]) -> dict[str, Any]:
    """Chunks as a client adds them up."""
    raw = [chunk.model_dump() for chunk in chunks]
    choices: dict[int, dict[str, Any]] = {}
    for told in (told for chunk in raw for told in chunk["choices"]):
        choice = choices.setdefault(told["index"], {"text": "", "reasoning": "", "logprobs": [], "calls": []})
        delta = told.get("delta") or {"content": told.get("text")}
        choice["text"] += delta.get("content") or ""
        choice["reasoning"] += delta.get("reasoning_content") or ""
        choice["logprobs"] += (told["logprobs"] or {}).get("content") or []
        choice["finish"] = told["finish_reason"] or choice.get("finish")
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(choice["calls"]):
                choice["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            choice["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    assert all(chunk["usage"] is None for chunk in raw[:-1])
    return {"choices": choices, "usage": raw[-1]["usage"]}


def of_plain(answer: Any) -> dict[str, Any]:
    """A plain chat answer in the form of `folded`."""
    told = answer.model_dump()
    choices = {}
    for choice in told["choices"]:
        message = choice["message"]
        calls = [
            {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            for call in message["tool_calls"] or ()
        ]
        choices[choice["index"]] = {
            "text": message["content"] or "",
            "reasoning": message.get("reasoning_content") or "",
            "logprobs": (choice["logprobs"] or {}).get("content") or [],
            "calls": calls,
            "finish": choice["finish_reason"],
        }
    return {"choices": choices, "usage": told["usage"]}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_plain_answer_is_the_streamed_one_added_up(client: Any, feature: str) -> None:
    asked = {"model": "any", "messages": HELLO, "max_tokens": 14, **FEATURES[feature]}
    plain = client.chat.completions.create(**asked)
    chunks = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert folded(list(chunks)) == of_plain(plain)
    assert len(plain.choices) == asked.get("n", 1)


@pytest.mark.parametrize("feature", [name for name in FEATURES if "several" not in name])
def test_an_answer_is_what_the_session_says(client: Any, session: Session, feature: str) -> None:
    asked = dict(FEATURES[feature])
    plain = client.chat.completions.create(model="any", messages=HELLO, max_tokens=14, **asked)
    options = {
        name: value for name, value in asked.items() if "logprobs" not in name and name != "extra_body"
    }
    options |= asked.get("extra_body", {})
    if "logit_bias" in options:
        options["logit_bias"] = {int(k): v for k, v in options["logit_bias"].items()}
    logprobs = asked.get("top_logprobs", 0) if asked.get("logprobs") else None
    result = session.generate("Hello", max_new_tokens=14, logprobs=logprobs, **options)
    choice = plain.choices[0]
    assert choice.message.content == result.text
    assert choice.finish_reason == result.finish_reason
    assert plain.usage.prompt_tokens == result.prompt_tokens
    assert plain.usage.completion_tokens == result.num_tokens
    told = choice.logprobs.content if choice.logprobs else []
    assert [each.logprob for each in told] == [each.logprob for each in result.logprobs or ()]
    assert [len(each.top_logprobs) for each in told] == [logprobs] * len(told)
    assert plain.x_mlx_dspark["target_forwards"] == result.num_rounds


def test_logprobs_spell_the_text(client: Any) -> None:
    asked = {"model": "any", "messages": HELLO, "max_tokens": 20, "logprobs": True, **DRAWN}
    choice = client.chat.completions.create(**asked).choices[0]
    spelled = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert spelled.decode("utf-8", "replace") == choice.message.content


def test_a_seed_is_derived_for_each_of_several_answers(client: Any) -> None:
    def texts(**options: Any) -> list[str]:
        asked = {"model": "any", "messages": HELLO, "max_tokens": 16, **DRAWN, **options}
        return [choice.message.content for choice in client.chat.completions.create(**asked).choices]

    assert texts(n=3) == texts(n=3)
    assert texts(n=3)[:1] == texts()
    assert len(set(texts(n=3))) == 3
    assert texts(n=2, seed=8) != texts(n=2)


def test_an_answer_is_the_same_in_company(client: Any) -> None:
    """Requests of all kinds at once, as one batch, against each alone."""
    asked = [{"model": "any", "messages": HELLO, "max_tokens": 14, **each} for each in FEATURES.values()]
    alone = [of_plain(client.chat.completions.create(**each)) for each in asked]
    streams = [client.chat.completions.create(**each, stream=True) for each in asked]
    together = [folded([*stream]) for stream in streams]
    assert [each["choices"] for each in together] == [each["choices"] for each in alone]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("Once", {}),
        ("Once", {"logprobs": 2, "stop": ["e"]}),
        ("Once", {**DRAWN, "n": 2, "logprobs": 0}),
        (["Once", "Twice"], {**DRAWN, "n": 2}),
        ([5, 6, 7], {}),
        ([[5, 6, 7], [8]], {"logprobs": 1}),
    ],
)
def test_text_completions(client: Any, prompt: Any, options: dict[str, Any]) -> None:
    asked = {"model": "any", "prompt": prompt, "max_tokens": 10, **options}
    plain = client.completions.create(**asked).model_dump()
    usage = {"include_usage": True}
    raw = [c.model_dump() for c in client.completions.create(**asked, stream=True, stream_options=usage)]
    prompts = len(prompt) if isinstance(prompt[0], str | list) and not isinstance(prompt, str) else 1
    assert len(plain["choices"]) == prompts * options.get("n", 1)
    for choice in plain["choices"]:
        mine = [told for chunk in raw for told in chunk["choices"] if told["index"] == choice["index"]]
        assert "".join(told["text"] for told in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        told = [each["logprobs"] for each in mine if each["logprobs"]]
        assert bool(told) == ("logprobs" in options)
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if told else ():
            assert [value for each in told for value in each[name]] == choice["logprobs"][name]
    assert raw[-1]["usage"] == plain["usage"]


def test_text_and_its_ids_are_one_prompt(client: Any, session: Session) -> None:
    ids = session.tokenizer.encode("Once upon")
    texts = [
        client.completions.create(model="any", prompt=prompt, max_tokens=9).choices[0].text
        for prompt in ("Once upon", ids)
    ]
    assert texts[0] == texts[1] == session.generate("Once upon", chat_template=False, max_new_tokens=9).text


def test_models(client: Any) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == ["tiny"]
    assert listed[0].context_length == 512
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(NotFoundError):
        client.models.retrieve("some/other")


def test_a_limit_of_the_answer(client: Any) -> None:
    def used(**options: Any) -> Any:
        asked = {"model": "any", "messages": HELLO, "logit_bias": {"0": -100, "2": -100}, **options}
        answer = client.chat.completions.create(**asked)
        return answer.usage.completion_tokens, answer.choices[0].finish_reason, answer.x_mlx_dspark

    assert used(max_tokens=9, max_completion_tokens=4)[:2] == (4, "length")
    tokens, reason, stats = used(max_tokens=0)
    assert (reason, stats["context_full"]) == ("length", True)
    assert tokens + stats["prompt_tokens"] == 512


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_prompt_that_leaves_no_room_is_refused_before_it_is_read(client: Any, route: str) -> None:
    long = "word " * 600
    asked = {"prompt": long} if route == "completions" else {"messages": [{"role": "user", "content": long}]}
    with pytest.raises(BadRequestError) as caught:
        client.post(f"/{route}", body=asked, cast_to=object)
    assert caught.value.code == "context_length_exceeded"
    assert "512" in str(caught.value)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("n", {"n": 0}),
    ("n", {"n": 9}),
    ("seed", {"seed": "x"}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": ["a"] * 17}),
    ("logit_bias", {"logit_bias": {"word": 1}}),
    ("logit_bias", {"logit_bias": {"999999": 1}}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("reasoning_effort", {"reasoning_effort": "enormous"}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("verbosity", {"verbosity": "low"}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("web_search_options", {"web_search_options": {}}),
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "robot", "content": "x"}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": ""}}]}),
    (
        "tools.function.strict",
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    ),
    (
        "parallel_tool_calls",
        {"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": False},
    ),
]


@pytest.mark.parametrize(("field", "options"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(client: Any, field: str, options: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**{"model": "any", "messages": HELLO}, extra_body=options)
    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error"
    assert field.rpartition(".")[2] in caught.value.message


def test_harmless_and_neutral_fields_change_nothing_and_unknown_ones_are_told(client: Any) -> None:
    asked = {"model": "any", "messages": HELLO, "max_tokens": 8}
    harmless = {
        **{"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        **{"response_format": {"type": "text"}, "modalities": ["text"], "verbosity": None, "functions": []},
        **{"parallel_tool_calls": True, "tool_choice": "auto", "prompt_cache_key": "k"},
    }
    bare = untimed(client.chat.completions.create(**asked))
    assert untimed(client.chat.completions.create(**asked, extra_body=harmless)) == bare
    told = {"wibble": 1, "messages": [HELLO[0] | {"wobble": 2}]}
    answer = client.chat.completions.create(**asked, extra_body=told)
    assert set(answer.x_mlx_dspark["ignored"]) == {"wibble", "messages.wobble"}
    assert bare["stats"]["ignored"] == []


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALLS = (
    "<think>Let me look.</think>Looking."
    '<tool_call>{"name": "look", "arguments": {"at": "a \\"quoted\\" é"}}</tool_call>'
    '<tool_call>{"name": "look", "arguments": {"at": "b"}}</tool_call>'
)


@pytest.mark.parametrize("step", [1, 4, 16])
@pytest.mark.parametrize(
    "options", [{"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, {}, {"max_tokens": 12}]
)
def test_reasoning_and_calls_streamed_and_plain(step: int, options: dict[str, Any]) -> None:
    engine = ScriptedEngine(CALLS, step=step, tokenizer=thinking_tokenizer())
    with tiny_server(scripted_session(engine)) as url, client_of(url) as client:
        asked = {"model": "any", "messages": HELLO, "max_tokens": 300, **options}
        plain = of_plain(client.chat.completions.create(**asked))
        usage = {"include_usage": True}
        streamed = folded([*client.chat.completions.create(**asked, stream=True, stream_options=usage)])
    for choice in (plain["choices"][0], streamed["choices"][0]):
        for call in choice["calls"]:
            assert call.pop("id")
    assert plain == streamed
    choice = plain["choices"][0]
    assert choice["reasoning"] == "Let me look."[: len(choice["reasoning"])]
    assert plain["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    if options.get("tools") and "tool_choice" not in options:
        assert [json.loads(call["arguments"])["at"] for call in choice["calls"]] == ['a "quoted" é', "b"]
        assert (choice["text"], choice["finish"]) == ("Looking.", "tool_calls")
    elif "max_tokens" in options:
        assert (choice["text"], choice["finish"]) == ("", "length")
    else:
        assert choice["text"] == CALLS.partition("</think>")[2]
        assert (choice["calls"], choice["finish"]) == ([], "stop")


@pytest.mark.parametrize("budget", [0, 5, 1000])
def test_a_budget_for_reasoning_is_kept(budget: int) -> None:
    tokenizer = thinking_tokenizer()

    def reply(request: Any) -> str:
        closed = "</think>" in tokenizer.decode(request.prompt)
        return "So it is." if closed else "<think>" + "hm " * 20 + "</think>So it is."

    engine = ScriptedEngine(reply, step=4, tokenizer=tokenizer)
    with tiny_server(scripted_session(engine)) as url, client_of(url) as client:
        asked = {"model": "any", "messages": HELLO, "extra_body": {"thinking_budget": budget}}
        plain = of_plain(client.chat.completions.create(**asked))
        usage = {"include_usage": True}
        streamed = folded([*client.chat.completions.create(**asked, stream=True, stream_options=usage)])
    assert plain == streamed
    choice = plain["choices"][0]
    assert (choice["text"], choice["finish"]) == ("So it is.", "stop")
    thought = plain["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert (thought > 0) == bool(choice["reasoning"]) == (budget > 0)
    assert thought <= budget + engine.step


def test_the_clients_own_accumulator_takes_the_stream() -> None:
    engine = ScriptedEngine(CALLS, step=5, tokenizer=thinking_tokenizer())
    with (
        tiny_server(scripted_session(engine)) as url,
        client_of(url) as client,
        client.chat.completions.stream(model="any", messages=HELLO, tools=[TOOL], max_tokens=300) as stream,
    ):
        last = stream.get_final_completion().choices[0]
    assert [call.function.name for call in last.message.tool_calls] == ["look", "look"]
    assert last.message.content == "Looking."
