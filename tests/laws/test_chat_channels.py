"""An answer's channels and calls: the same wherever the text is cut, and nothing lost."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_dspark.chat.answer import ChatAnswer
from mlx_dspark.chat.detokenize import TextDecoder
from mlx_dspark.foundation.events import Text, ToolCallArguments, ToolCallBegan, ToolCallEnded
from tests.chat_syntaxes import SYNTAXES, Call, Syntax, pieces_of
from tests.tiny import tiny_tokenizer

DECODER = TextDecoder(tiny_tokenizer())
ALPHABET = st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t <>{}\"'`")
PROSE = st.text(st.sampled_from("ab é你😀.,"), min_size=1, max_size=12).map(str.strip).filter(bool)
STRINGS = st.text(ALPHABET, max_size=12) | st.sampled_from(
    [
        "</tool_call>",
        "<think>",
        '{"a": "\\"}',
        "line\nline",
        "</function>",
        "<|call|>",
        "it's",
        "<tool_call|>",
    ]
)
PLAIN_VALUES = st.none() | st.booleans() | st.integers(-99, 99) | st.text(st.sampled_from("ab é"), max_size=4)
VALUES = {
    "city": STRINGS,
    "days": st.integers(-(10**12), 10**12),
    "scale": st.floats(-1e6, 1e6) | st.integers(-9, 9),
    "exact": st.booleans(),
    "hours": st.lists(PLAIN_VALUES, max_size=3),
    "more": st.dictionaries(
        st.sampled_from(["k", "key2"]), PLAIN_VALUES | st.lists(PLAIN_VALUES), max_size=2
    ),
    "nothing": st.none(),
    "either": st.none() | st.integers(0, 9),
}
ARGUMENTS = st.fixed_dictionaries({}, optional=VALUES)
CALLS = st.lists(
    st.tuples(st.just("get_weather"), ARGUMENTS) | st.just(("noop", dict[str, Any]())), max_size=3
)
NAMES = pytest.mark.parametrize("name", SYNTAXES)


def _writable(syntax: Syntax, calls: list[Call]) -> bool:
    return not any(
        mark in json.dumps(given, ensure_ascii=False) for _, given in calls for mark in syntax.never
    )


def _called(answer: ChatAnswer) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


@NAMES
@given(reasoning=PROSE | st.just(""), text=PROSE | st.just(""), calls=CALLS)
@settings(max_examples=60, deadline=None)
def test_what_a_model_says_is_read_back(name: str, reasoning: str, text: str, calls: list[Call]) -> None:
    syntax = SYNTAXES[name]
    if not _writable(syntax, calls):
        return
    written = syntax.write(reasoning, text, calls)
    answer = ChatAnswer.fold(syntax.parse([written]))
    assert (answer.text.strip(), answer.reasoning.strip()) == (text, reasoning)
    assert _called(answer) == calls


@NAMES
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_tokens_of_any_number_a_step_make_no_difference(name: str, data: st.DataObject) -> None:
    syntax = SYNTAXES[name]
    calls = data.draw(CALLS)
    written = syntax.write(data.draw(PROSE | st.just("")), data.draw(PROSE | st.just("")), calls)
    whole = syntax.parse([written])
    detokenizer, pieces = DECODER.start(), [""]
    for token in tiny_tokenizer().encode(written, add_special_tokens=False):
        pieces.append(detokenizer.push(token))
    pieces.append(detokenizer.finish())
    step = data.draw(st.integers(1, 16))
    assert syntax.parse("".join(pieces[at : at + step]) for at in range(0, len(pieces), step)) == whole


FULL: list[Call] = [
    ("get_weather", {"city": 'Ba\nh </tool_call> "é"', "days": 3, "hours": [1, "x"], "more": {"k": [None]}}),
    ("noop", {}),
]


@NAMES
def test_every_cut_gives_the_same_events(name: str) -> None:
    syntax = SYNTAXES[name]
    written = syntax.write("I think.\n\nSo.", "Let me look.", FULL) + "\n\n"
    whole = syntax.parse([written])
    assert len(ChatAnswer.fold(whole).tool_calls) == 2
    for at in range(len(written) + 1):
        assert syntax.parse([written[:at], written[at:]]) == whole, (written[:at], written[at:])


@NAMES
def test_an_answer_cut_off_anywhere_loses_nothing(name: str) -> None:
    syntax = SYNTAXES[name]
    written = syntax.write("I think.", "Let me look.", FULL)
    whole = ChatAnswer.fold(syntax.parse([written]))
    for end in range(len(written) + 1):
        events, sources = syntax.parse_with_sources(pieces_of(written[:end], 5))
        _check_order(events)
        answer = ChatAnswer.fold(events)
        assert list(answer.tool_calls) == list(whole.tool_calls[: len(answer.tool_calls)])
        thinking = written.find("I think.") < end <= written.find("I think.") + len("I think.")
        assert not (thinking and answer.text)
        assert _accounted(syntax, written[:end], answer, sources), (written[:end], answer)


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "get_weather", "noop", ">", "<"]
MARKS += ["<|channel|>", "analysis", "<|message|>", "<|end|>", "<|start|>", "assistant", " to=functions.noop"]
MARKS += ["<|eom|>", " to=self", "<|channel>thought", "<channel|>", "<|tool_call>", "<tool_call|>", "call:"]
MARKS += ["<atem:function_calls>", "</atem:function_calls>", '<atem:invoke name="noop">', "</atem:invoke>"]
MARKS += ["<function name=", '"noop"', "</function>", "<|tool_call_start|>", "[noop()]", "<|tool_call_end|>"]
MARKS += ["{", "}", '{"name": "noop", ', '"arguments": {', '"', "`", "```", "\n", " ", "x", "\\", ",", "你"]
GARBAGE = st.lists(st.sampled_from(MARKS), max_size=24).map("".join)


@NAMES
@given(text=GARBAGE, size=st.integers(1, 7), state=st.sampled_from(["own", "reasoning", "text"]))
@settings(max_examples=250, deadline=None)
def test_garbage_comes_back_as_text(name: str, text: str, size: int, state: Any) -> None:
    syntax = SYNTAXES[name]
    options = {} if state == "own" else {"state": state}
    events, sources = syntax.parse_with_sources([text], **options)
    assert syntax.parse(pieces_of(text, size), **options) == events
    _check_order(events)
    assert _accounted(syntax, text, ChatAnswer.fold(events), sources), events


@NAMES
def test_only_declared_tools_are_called(name: str) -> None:
    syntax = SYNTAXES[name]
    written = syntax.write("", "Hm.", [("noop", {}), *FULL])
    for tools in ({}, {"other": {}}):
        events = syntax.parse(pieces_of(written, 3), tools=tools)
        assert all(isinstance(event, Text) for event in events)
        shown = "".join(event.text for event in events if isinstance(event, Text))
        assert all(part in shown for part in ("noop", "get_weather", "days"))


def _check_order(events: list[Any]) -> None:
    """Indexes count from 0, ids differ, and each call's events stand together."""
    began = [event for event in events if isinstance(event, ToolCallBegan)]
    assert [event.index for event in began] == list(range(len(began)))
    assert len({event.id for event in began}) == len(began)
    calls = [event for event in events if not isinstance(event, Text)]
    shape = "".join({ToolCallBegan: "B", ToolCallArguments: "A", ToolCallEnded: "E"}[type(e)] for e in calls)
    assert re.fullmatch("(BA?E)*", shape), shape
    for event in events:
        if isinstance(event, ToolCallEnded) and event.complete:
            pieces = [e.text for e in events if isinstance(e, ToolCallArguments) and e.index == event.index]
            assert isinstance(json.loads("".join(pieces)), dict)


def _accounted(syntax: Syntax, source: str, answer: ChatAnswer, left_out: list[str]) -> bool:
    """Whether `source` is what the answer shows, in order, with marks, headers and `left_out` between.

    White space is not looked at.
    """
    text, thought = _bare(answer.text), _bare(answer.reasoning)
    source, left_out = _bare(source), [bare for part in left_out if (bare := _bare(part))]
    patterns = _removable(syntax)

    @cache
    def fits(at: int, shown: int, thinking: int, left: int) -> bool:
        if at == len(source):
            return (shown, thinking, left) == (len(text), len(thought), len(left_out))
        ways = [(found.end(), left) for pattern in patterns if (found := pattern.match(source, at))]
        if left < len(left_out) and source.startswith(left_out[left], at):
            ways.append((at + len(left_out[left]), left + 1))
        if any(fits(end, shown, thinking, then) for end, then in ways):
            return True
        if text[shown : shown + 1] == source[at] and fits(at + 1, shown + 1, thinking, left):
            return True
        return thought[thinking : thinking + 1] == source[at] and fits(at + 1, shown, thinking + 1, left)

    return fits(0, 0, 0, 0)


def _bare(text: str) -> str:
    return re.sub(r"\s", "", text)


def _removable(syntax: Syntax) -> list[re.Pattern[str]]:
    """The marks and headers of a family, without white space; a header may be cut off by the end."""
    layout = syntax.layout
    found = [re.escape(mark) for mark in (layout.opener, layout.closer, *layout.ends) if mark]
    if layout.message:
        role, to, marks = (
            r"(<\|start\|>)?[\w.-]*",
            r"(to=[\w.:/-]*)?",
            "|".join(map(re.escape, layout.starts)),
        )
        found.append(rf"{role}{to}(<\|channel\|>\w*)?{to}(<\|constrain\|>)?\w*<\|message\|>")
        found.append(rf"({marks})[\w.:/=<|>-]*$")
    return [re.compile(mark) for mark in found]
