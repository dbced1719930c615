"""Marks that are quoted, blocks that come again, arguments by their schema, JSON that arrives in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_dspark.chat.answer import ChatAnswer
from mlx_dspark.chat.grammars import OWN
from mlx_dspark.chat.grammars.parsed import of_mlx_lm
from mlx_dspark.chat.json_text import MAX_DEPTH, JsonText
from mlx_dspark.chat.typed import arguments_of, typed
from mlx_dspark.foundation.chat import Turn
from mlx_dspark.foundation.events import ToolCallArguments, ToolCallBegan, ToolCallEnded
from tests.chat_syntaxes import SYNTAXES, THINK, Syntax, hermes, pieces_of

HERMES, GEMMA = SYNTAXES["hermes"], SYNTAXES["gemma"]
CALL = hermes("noop", {})


def _folded(text: str, state: Any = "text", name: str = "hermes") -> ChatAnswer:
    syntax = SYNTAXES[name]
    whole = syntax.parse([text], state=state)
    assert syntax.parse(pieces_of(text, 1), state=state) == whole
    return ChatAnswer.fold(whole)


@pytest.mark.parametrize(
    "prose",
    [
        "The `<think>` tag opens reasoning.",
        "The tag <think> opens reasoning, and </think> closes it.",
        'He wrote "<think>" and left.',
        "```xml\n<think>\nhidden\n</think>\n```\nThat is all.",
        "~~~\n<think>\n~~~",
        f"```\na\n\n{CALL}\n<think>\n```\nb",
        f"Call it like this: `{CALL}`.",
        f"```\n{CALL}\n```",
        f"“{CALL}”",
        "Use <tool_call> to call a tool.",
        "a </tool_call> b",
        "x < y, <thin> and <tool_cal",
    ],
)
def test_quoted_marks_are_prose(prose: str) -> None:
    assert _folded(prose) == ChatAnswer(prose)


@pytest.mark.parametrize("quote", ["`", '"', "'"])
def test_a_closing_mark_between_quotes_closes_nothing(quote: str) -> None:
    thought = f"I must end with {quote}</think>{quote}, so I do."
    assert _folded(f"{thought}\n</think>\n\nDone.", "reasoning") == ChatAnswer("Done.", thought)
    assert _folded(f"I quote {quote}</think>x", "reasoning") == ChatAnswer("x", f"I quote {quote}")


def test_a_closing_mark_closes_whatever_is_left_open_in_the_reasoning() -> None:
    assert _folded("```py\nx = `1\n</think>Done.", "reasoning") == ChatAnswer("Done.", "```py\nx = `1")


def test_several_blocks_of_reasoning() -> None:
    text = "<think>\none\n</think>\n\nA.\n<think>\ntwo\n</think>\nB."
    assert _folded(text) == ChatAnswer("A.\nB.", "one\ntwo")
    gemma = "<|channel>thought\none<channel|>A.<|channel>thought\ntwo<channel|>B."
    assert _folded(gemma, name="gemma") == ChatAnswer("A.B.", "onetwo")


def test_an_opener_that_the_prompt_had_already_written_is_no_text() -> None:
    assert _folded("\n<think>\nhm</think>ok", "reasoning") == ChatAnswer("ok", "hm")
    assert _folded("hm <think> </think>ok", "reasoning") == ChatAnswer("ok", "hm <think>")


def test_reasoning_that_is_cut_off_is_reasoning() -> None:
    assert _folded("<think>\nso far") == ChatAnswer("", "so far")
    assert _folded("so far", "reasoning") == ChatAnswer("", "so far")
    assert _folded("", "reasoning") == ChatAnswer()
    assert _folded(" to=self<|message|>so far", "header", "atem") == ChatAnswer("", "so far")


def test_white_space_next_to_marks_is_layout_and_all_other_is_kept() -> None:
    assert _folded("<think>\n\n  a\n b \n</think>\n\n    code\n\nend \n") == ChatAnswer(
        "    code\n\nend \n", "  a\n b"
    )
    assert _folded("\n <think>hm</think>ok") == ChatAnswer("ok", "hm")
    called = _folded(f"  Text.\n\n{CALL}\n{CALL}\n\n")
    assert called.text == "  Text."
    assert len(called.tool_calls) == 2


def test_a_call_that_breaks_off_is_marked_and_comes_back_as_text() -> None:
    text = 'Hm.\n<tool_call>{"name": "get_weather", "arguments": {"city": "a" b}}</tool_call>\n' + CALL
    events = HERMES.parse([text])
    assert events[1:4] == [
        ToolCallBegan(0, "call_0", "get_weather"),
        ToolCallArguments(0, '{"city": "a"'),
        ToolCallEnded(0, complete=False),
    ]
    answer = ChatAnswer.fold(events)
    assert answer.text == text[: -len(CALL) - 1]
    assert [call.id for call in answer.tool_calls] == ["call_1"]
    assert answer.turn == Turn("assistant", answer.text, "", answer.tool_calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("function tags", "<function=get_weather><parameter=days>3</parameter></function>"),
        (
            "function tags",
            "<seed:tool_call><function=get_weather><parameter=days>3</parameter></function></seed:tool_call>",
        ),
        ("function tags", "<tool_call><function=get_weather><parameter=days>\n3\n</parameter></function>"),
        ("named function", "<function name='get_weather'><param name=days> 3 </param></function>"),
        ("pythonic", "<|tool_call_start|>[get_weather(days=3,)]<|tool_call_end|>"),
        ("harmony", ' to=functions.get_weather<|channel|>commentary json<|message|>{"days": 3}<|call|>'),
        ("harmony", '<|channel|>commentary to=get_weather<|message|> {"days": 3}'),
        ("gemma", "<|tool_call>call:get_weather{ days : 3}<tool_call|>"),
        (
            "atem",
            '<atem:function_calls><atem:invoke id="1" name="get_weather"><atem:parameter name="days">3'
            "</atem:parameter></atem:invoke>",
        ),
    ],
)
def test_calls_as_models_vary_them(name: str, text: str) -> None:
    answer = _folded(text, SYNTAXES[name].state, name)
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [
        ("get_weather", {"days": 3})
    ]
    assert answer.text == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "<|tool_call_start|>[noop(1)]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[noop(), x]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[noop(a='it's')]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[noop(a=b'x')]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[]<|tool_call_end|>"),
        ("gemma", "<|tool_call>call:noop{} and so on<tool_call|>"),
        ("gemma", "<|tool_call>call:noop{a:}<tool_call|>"),
        ("gemma", "<|tool_call>call:noop{<tool_call|>"),
        ("gemma", "<|tool_call>call:noop<tool_call|>"),
        ("gemma", "<|tool_call>call:noop[1]<tool_call|>"),
        ("gemma", '<|tool_call>call:noop{a:"}<tool_call|>'),
        ("gemma", "<|tool_call><tool_call|>"),
        ("function tags", "<tool_call>\n<function=noop>\n<parameter>1</parameter></function></tool_call>"),
        ("atem", "<atem:function_calls></atem:function_calls>"),
        ("named function", '<function name="noop"><param>1</param></function>'),
    ],
)
def test_malformed_calls_of_any_family_are_text(name: str, text: str) -> None:
    assert _folded(f"Look: {text} there", "text", name) == ChatAnswer(f"Look: {text} there")


PARSED = {
    "glm47": "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"days": 3}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"days": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "toolcall": '<TOOLCALL>[{"name": "get_weather", "arguments": {"days": 3}}]</TOOLCALL>',
}


@pytest.mark.parametrize("module", PARSED)
def test_other_syntaxes_are_read_by_the_parsers_of_mlx_lm(module: str) -> None:
    syntax = Syntax(THINK, OWN.get(module) or of_mlx_lm(module), HERMES.write)
    text = PARSED[module]
    whole = syntax.parse([text])
    (call,) = ChatAnswer.fold(whole).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"days": 3})
    for end in range(len(text) + 1):
        cut = ChatAnswer.fold(syntax.parse(pieces_of(text[:end], 3)))
        assert cut.tool_calls or cut.text == text[:end]
    undeclared = text.replace("get_weather", "get_wealth!")
    assert ChatAnswer.fold(syntax.parse([undeclared])) == ChatAnswer(undeclared)


def test_gemma_keys_are_any_text_and_values_nest() -> None:
    body = 'call:get_weather{city:<|"|>a{b}, c: d<|"|>, x-y:[{k.1:{z:null}},<|"|>,e:<|"|>],<|"|>q<|"|>:-1.5}'
    (call,) = _folded(f"<|tool_call>{body}<tool_call|>", "text", "gemma").tool_calls
    expected = {"city": "a{b}, c: d", "x-y": [{"k.1": {"z": None}}, ",e:"], "q": -1.5}
    assert json.loads(call.arguments) == expected


def test_python_strings_with_bare_line_breaks_are_read() -> None:
    (call,) = _folded(
        "<|tool_call_start|>[get_weather(city='a\nb\\n')]<|tool_call_end|>", "text", "pythonic"
    ).tool_calls
    assert json.loads(call.arguments) == {"city": "a\nb\n"}


def test_arguments_stream_as_they_come() -> None:
    text = hermes("get_weather", {"city": "x" * 90})
    parser = HERMES.parser()
    seen = [event for piece in pieces_of(text, 10) for event in parser.feed(piece)]
    pieces = [event.text for event in seen if isinstance(event, ToolCallArguments)]
    assert len(pieces) > 8
    assert json.loads("".join(pieces)) == {"city": "x" * 90}


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"arguments": {"days": 1}, "name": "get_weather"}', {"days": 1}),
        ('{"name": "get_weather", "parameters": {"days": 1}}', {"days": 1}),
        ('{"name": "get_weather", "arguments": "{\\"days\\": 1}"}', {"days": 1}),
        ('{"id": 7, "name": "get_weather", "arguments": {"days": 1}, "more": [null]}', {"days": 1}),
        ('{"name": "get_weather"}', {}),
        ('{"name": "get_weather", "arguments": {"city": "two\nlines"}}', {"city": "two\nlines"}),
    ],
)
def test_json_calls_as_models_write_them(body: str, arguments: dict[str, Any]) -> None:
    (call,) = _folded(f"<tool_call>{body}</tool_call>").tool_calls
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "get_weather", "arguments": [1]}',
        '{"name": "get_weather", "arguments": "no json"}',
        '{"name": "get_weather", "arguments": {"days": 01}}',
        '{"name": "get_weather", "name": "noop", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"arguments": {}}',
        "{}",
        "[]",
        '{"name": "noop", "arguments": {"a": ' + "[" * (MAX_DEPTH + 1),
    ],
)
def test_what_is_no_call_is_text(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert _folded(text) == ChatAnswer(text)


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5", {"type": "string"}, "5"),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("5", {"type": ["integer", "null"]}, 5),
        ("True", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("true", {"type": "integer"}, "true"),
        ("1e3", {"type": "number"}, 1000.0),
        ("NaN", {"type": "number"}, "NaN"),
        ("['a', 1]", {"type": "array"}, ["a", 1]),
        ('{"a": "x\ny"}', {"type": "object"}, {"a": "x\ny"}),
        ("[1]", {}, [1]),
        ("1", {}, "1"),
        ("1", None, "1"),
        ("2", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 2),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"const": 2}, 2),
        ("2", {"$ref": "#/$defs/N"}, 2),
        ("2", {"$ref": "#/$defs/loop"}, "2"),
        ("2", {"$ref": "#/nowhere"}, "2"),
    ],
)
def test_bare_values_by_their_schema(raw: str, schema: Any, value: Any) -> None:
    root = {"$defs": {"N": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    found = typed(raw, schema, root)
    assert (found, type(found)) == (value, type(value))
    assert arguments_of({"p": raw}, {"properties": {"p": schema}} | root) == {"p": value}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def _read(text: str, size: int) -> tuple[bool, int, str]:
    reading, at = JsonText(), 0
    while at < len(text) and not (reading.done or reading.failed):
        used = reading.feed(text[at : at + size])
        at += used
        if used < size and at < len(text):
            break
    if not (reading.done or reading.failed):
        reading.feed("", ended=True)
    return reading.done, at, reading.text


@given(value=JSON, plain=st.booleans(), size=st.integers(1, 5), after=st.sampled_from(["", " ", "x", "}"]))
@settings(max_examples=200, deadline=None)
def test_a_json_value_ends_where_it_ends(value: Any, plain: bool, size: int, after: str) -> None:
    text = json.dumps(value, ensure_ascii=plain)
    assert _read(text + " " + after, size) == (True, len(text), text)


@example('"\\u001"', 1)
@example('"\\u001g"', 2)
@example('"\\u00151"', 3)
@example('"\\q"', 1)
@example('{"a": 1,}', 2)
@example("[1,]", 2)
@given(text=st.text(st.sampled_from('{}[]":,\\u0015eEtrue-+. \n\x01ab'), max_size=14), size=st.integers(1, 4))
@settings(max_examples=600, deadline=None)
def test_text_is_a_json_value_where_python_says_so(text: str, size: int) -> None:
    done, at, read = _read(text, size)
    whole = done and not text[at:].strip(" \t\r\n")
    try:
        value = json.loads(text, strict=False, parse_constant=lambda name: pytest.fail(name))
    except ValueError:
        assert not whole
    else:
        assert whole
        assert json.loads(read) == value
