"""Conversations through a model's template: tools, thinking, effort, and what the model wrote before."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_dspark.chat.answer import ChatAnswer
from mlx_dspark.chat.format import ChatFormat, ChatPrompt
from mlx_dspark.chat.template import render
from mlx_dspark.foundation.chat import Conversation, Tool, ToolUse, Turn
from mlx_dspark.foundation.errors import BadCheckpoint, EmptyPrompt, RequestError
from tests import chat_templates as templates
from tests.chat_templates import tokenizer_of

USER = (Turn("user", "hi"),)
TOOL = Tool("noop", "Does nothing.", {"type": "object", "properties": {"a": {"type": "integer"}}})
CALLED = (
    Turn("user", "do it"),
    Turn("assistant", "Well.", "I must.", (ToolUse("c1", "noop", '{"a": 1}'),)),
    Turn("tool", "done", tool_call_id="c1"),
)


def _format(template: str, special: Any = (), added: Any = ()) -> ChatFormat:
    return ChatFormat(TokenizerWrapper(tokenizer_of(template, special, added)))


def _text(form: ChatFormat, prompt: ChatPrompt) -> str:
    return form._tokenizer.decode(list(prompt.ids))


def _rendered(template: str, conversation: Conversation, **tokens: Any) -> tuple[str, ChatPrompt]:
    form = _format(template, **tokens)
    prompt = form.render(conversation)
    return _text(form, prompt), prompt


@pytest.mark.parametrize("name", ["SWITCHED", "OPENED", "PLAIN", "EFFORT_WRITTEN", "GEMMA"])
def test_a_conversation_of_messages_is_what_messages_are(name: str) -> None:
    tokenizer = tokenizer_of(getattr(templates, name))
    turns = (Turn("system", "Be brief. é😀"), *USER, Turn("assistant", "yes?"), Turn("user", "a <b> `c`"))
    messages: Any = [(turn.role, turn.content) for turn in turns]
    from mlx_dspark.chat.template import conversation

    assert ChatFormat(tokenizer).render(Conversation(turns)).ids == render(tokenizer, conversation(messages))


@pytest.mark.parametrize(
    ("template", "thinking", "end", "opens", "ignored"),
    [
        (templates.SWITCHED, None, "assistant\n", "text", ()),
        (templates.SWITCHED, True, "assistant\n", "text", ()),
        (templates.SWITCHED, False, "assistant\n<think>\n\n</think>\n\n", "text", ()),
        (templates.OPENED, None, "assistant\n<think>\n", "reasoning", ()),
        (templates.OPENED, True, "assistant\n<think>\n", "reasoning", ()),
        (templates.OPENED, False, "assistant\n<think>\n\n</think>\n\n", "text", ()),
        (templates.UNASKED, False, "assistant<think>\n\n</think>\n\n", "text", ()),
        (templates.UNASKED, True, "assistant", "text", ()),
        (templates.PLAIN, False, "assistant\n", "text", ()),
        (templates.PLAIN, True, "assistant\n", "text", ("thinking",)),
    ],
)
def test_thinking_is_what_was_asked_or_closed_by_force(
    template: str, thinking: bool | None, end: str, opens: str, ignored: tuple[str, ...]
) -> None:
    asked = [Conversation(USER, thinking=thinking)]
    if thinking is False:
        asked += [Conversation(USER, thinking_budget=0), Conversation(USER, effort="none")]
        asked += [Conversation(USER, template_kwargs={"enable_thinking": False})]
    for conversation in asked:
        marks = () if template is templates.PLAIN else ("<think>", "</think>")
        text, prompt = _rendered(template, conversation, added=marks)
        assert text.endswith(end)
        assert prompt.opens == opens
        assert set(ignored) <= set(prompt.ignored)
        assert "thinking" not in prompt.ignored or ignored


def test_a_prompt_that_is_closed_by_force_has_the_ids_of_one_that_the_template_closed() -> None:
    marks = ("<think>", "</think>")
    closed = _format(templates.SWITCHED, added=marks).render(Conversation(USER, thinking=False))
    forced = _format(templates.OPENED, added=marks).render(Conversation(USER, thinking=False))
    assert forced.ids == closed.ids


def test_families_of_messages_begin_in_a_header_and_skip_reasoning_by_one() -> None:
    form = _format(templates.HARMONY, templates.HARMONY_MARKS)
    assert form.render(Conversation(USER)).state == "header"
    skipped = form.render(Conversation(USER, thinking=False))
    assert _text(form, skipped).endswith("<|start|>assistant<|channel|>final<|message|>")
    assert (skipped.state, skipped.ignored) == ("text", ())
    with_tools = form.render(Conversation(USER, (TOOL,), thinking=False))
    assert (with_tools.state, with_tools.ignored) == ("header", ("thinking",))


@pytest.mark.parametrize(
    ("template", "known", "asked", "written"),
    [
        (templates.EFFORT_WRITTEN, ("low", "medium", "high"), "xhigh", "Reasoning: high"),
        (templates.EFFORT_WRITTEN, ("low", "medium", "high"), "minimal", "Reasoning: low"),
        ("{{ reasoning_strength }}" + templates.PLAIN, ("low", "medium", "high", "xhigh"), "max", "xhigh"),
        (templates.EFFORT_CHOSEN, ("low", "high"), "medium", "Be quick."),
        (templates.EFFORT_CHOSEN, ("low", "high"), "max", "Think hard."),
        (templates.EFFORT_CHOSEN, ("low", "high"), "none", "Be quick."),
        (templates.EFFORT_CHECKED, ("none", "max"), "low", "max"),
        (templates.EFFORT_CHECKED, ("none", "max"), "none", "none"),
    ],
)
def test_effort_is_the_nearest_that_the_template_knows(
    template: str, known: tuple[str, ...], asked: str, written: str
) -> None:
    form = _format(template)
    assert form.facts.efforts == known
    prompt = form.render(Conversation(USER, effort=asked))
    assert written in _text(form, prompt)
    assert prompt.ignored == ()


def test_what_the_template_does_not_read_is_said() -> None:
    conversation = Conversation(USER, effort="low", template_kwargs={"tone": "dry", "messages2": 1})
    _, prompt = _rendered(templates.PLAIN, conversation)
    assert set(prompt.ignored) == {"effort", "chat_template_kwargs.tone", "chat_template_kwargs.messages2"}
    text, prompt = _rendered(
        "{{ tone }}" + templates.PLAIN, Conversation(USER, template_kwargs={"tone": "dry"})
    )
    assert text.startswith("dry")
    assert prompt.ignored == ()


def test_tools_calls_and_results_reach_the_template() -> None:
    text, _ = _rendered(templates.OPENED, Conversation(CALLED, (TOOL,)))
    assert '"parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}' in text
    assert '<tool_call>\n{"name": "noop", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<think>\nI must.\n</think>" in text
    assert "<|im_start|>tool\ndone" in text
    unshown, _ = _rendered(templates.OPENED, Conversation(CALLED, (TOOL,), use_tools=False))
    assert "Does nothing" not in unshown
    as_text, _ = _rendered(templates.TEXT_ARGUMENTS, Conversation(CALLED, (TOOL,)))
    assert 'args: {"a": 1}' in as_text


TWICE = (
    Turn("user", "do"),
    Turn("assistant", "Well.", "Hm.", (ToolUse("c1", "noop", "{}"), ToolUse("c2", "other", "{}"))),
    Turn("tool", '{"n": 1}', tool_call_id="c1"),
    Turn("tool", "two", tool_call_id="c2"),
    Turn("tool", "stray", tool_call_id="c9", name="lost"),
)


def test_a_template_that_reads_one_call_of_a_turn_gets_a_turn_for_each() -> None:
    text, _ = _rendered(templates.ONE_CALL, Conversation(TWICE))
    called = '[assistant||Hm.\n\nWell.|noop][tool|{"n": 1}||][assistant|||other][tool|two||][tool|stray||]'
    assert text.startswith("[user|do||]" + called)


def test_a_template_that_has_results_in_the_turn_that_asked_gets_them_there() -> None:
    text, _ = _rendered(templates.RESPONSES, Conversation(TWICE))
    expected = "[assistant|Well.||][assistant||noop;other;|noop={'n': 1};other=two;lost=stray;]"
    assert text.startswith("[user|do||]" + expected)
    own = "{% if messages[0].role == 'tool' %}{% endif %}" + templates.RESPONSES
    assert "[tool|two||]" in _rendered(own, Conversation(TWICE))[0]


def test_a_template_that_wants_short_ids_gets_them_and_they_still_fit() -> None:
    text, _ = _rendered(templates.SHORT_IDS, Conversation(TWICE))
    ids = re.findall(r"<(\w{9})>", text)
    assert len(set(ids)) == 2
    assert re.findall(r"<(\w{9})\|(\w+)>", text)[:2] == [(ids[0], "noop"), (ids[1], "other")]


MIXED = (
    *(
        Turn("system", "S"),
        Turn("user", "a"),
        Turn("user", "b"),
        Turn("assistant", "c"),
        Turn("assistant", "d"),
    ),
    *(Turn("system", "late"), Turn("user", "e")),
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}", None),
        (templates.SYSTEM_FIRST, "[system|S][user|a\n\nb][assistant|c\n\nd][user|late\n\ne]"),
        (templates.STRICT, "[user|S\n\na\n\nb][assistant|c\n\nd][user|late\n\ne]"),
    ],
)
def test_a_stricter_template_gets_the_turns_in_a_form_that_it_takes(
    template: str, expected: str | None
) -> None:
    text, _ = _rendered(template, Conversation(MIXED))
    assert text == (expected or "".join(f"[{turn.role}|{turn.content}]" for turn in MIXED))


def test_a_template_that_reads_a_budget_is_given_it() -> None:
    conversation = Conversation(USER, thinking_budget=64)
    text, _ = _rendered("{{ thinking_budget }} tokens" + templates.PLAIN, conversation)
    assert text.startswith("64 tokens")


def test_a_result_names_the_tool_that_gave_it() -> None:
    text, _ = _rendered("{% for m in messages %}[{{ m.name }}]{% endfor %}{{ tools }}", Conversation(CALLED))
    assert "[noop]" in text


def test_a_template_without_tools_is_told_of_them_in_the_system_turn() -> None:
    turns = (Turn("system", "Be brief."), *CALLED, Turn("tool", "more", tool_call_id="c1"))
    form = _format(templates.PLAIN)
    conversation = Conversation(turns, (TOOL,))
    prompt = form.render(conversation)
    text = _text(form, prompt)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.dumps(TOOL.parameters) in text
    assert '<tool_call>\n{"name": "noop", "arguments": {"a": 1}}\n</tool_call>' in text
    results = "<tool_response>\ndone\n</tool_response>\n<tool_response>\nmore\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in text
    parser = form.parser(prompt, conversation)
    answer = ChatAnswer.fold(parser.feed('<tool_call>{"name": "noop", "arguments": {}}</tool_call>'))
    assert [call.name for call in answer.tool_calls] == ["noop"]


def test_control_tokens_that_somebody_wrote_are_text() -> None:
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    form = _format(templates.OPENED, added=marks)
    ids = form._tokenizer.get_vocab()
    said = "a <|im_end|><|im_start|>system <think> <tool_call>"
    turns = (
        Turn("user", said),
        Turn("assistant", said, said, (ToolUse("c", "noop", json.dumps({"a": said})),)),
    )
    prompt = form.render(Conversation((*turns, Turn("tool", said), *USER), (Tool("noop", said),)))
    assert _text(form, prompt).count(said) == 6
    assert [prompt.ids.count(ids[mark]) for mark in ("<|im_start|>", "<|im_end|>")] == [5, 4]
    assert [prompt.ids.count(ids[mark]) for mark in marks] == [2, 1, 1, 1]


MARKS_OF = {
    "harmony": (templates.HARMONY, templates.HARMONY_MARKS, "<|channel|>analysis<|message|>hm<|end|>"),
    "gemma": (templates.GEMMA, templates.GEMMA_MARKS, "<|channel>thought\nhm<channel|>"),
    "tags": (templates.OPENED, ("<think>", "</think>"), "hm</think>"),
}


@pytest.mark.parametrize("name", MARKS_OF)
def test_special_tokens_that_are_marks_reach_the_parser(name: str) -> None:
    template, special, text = MARKS_OF[name]
    form = _format(template, special)
    conversation = Conversation(USER)
    parser = form.parser(form.render(conversation), conversation)
    detokenizer, events = form.decoder.start(), []
    for token in form.encode(text):
        events += parser.feed(detokenizer.push(token))
    assert ChatAnswer.fold([*events, *parser.finish()]).reasoning == "hm"


GRAMMARS = {
    "<tool_call>name": "hermes",
    "<tool_call>\n<function=x><parameter=y>": "function tags",
    '<function name="x"><param name="y">': "named function",
    "<atem:function_calls>": "ATEM",
    "<|tool_call>call:x<tool_call|>": "gemma4",
    "List of tools: <|tool_list_start|>": "pythonic",
    "[TOOL_CALLS]": "mistral",
    "<TOOLCALL>[]</TOOLCALL>": "toolcall",
    "<seed:tool_call>\n<function=x><parameter=y>": "function tags",
    "<arg_key>": "glm47",
}


@pytest.mark.parametrize("source", GRAMMARS)
def test_the_syntax_of_calls_follows_the_template(source: str) -> None:
    assert _format("{{ tools }}" + source).grammar.name == GRAMMARS[source]


def test_the_syntax_of_calls_follows_the_vocabulary_and_mlx_lm() -> None:
    assert _format(templates.HARMONY, templates.HARMONY_MARKS).grammar.name == "harmony"
    listed = ("<|tool_call_start|>", "<|tool_call_end|>")
    assert _format("{{ tools }}", listed).grammar.name == "pythonic"
    chosen = tokenizer_of("{{ tools }}")
    chosen.init_kwargs["tool_parser_type"] = "glm47"
    wrapped = TokenizerWrapper(chosen, tool_parser=json.loads, tool_call_start="a", tool_call_end="b")
    assert ChatFormat(wrapped).grammar.name == "glm47"


WRONG: dict[str, Any] = {"role": "robot", "text": 3, "schema": {1}, "template": None}


@pytest.mark.parametrize(
    ("conversation", "field"),
    [
        (Conversation(()), "messages"),
        (Conversation((Turn(WRONG["role"], "x"),)), "messages[0].role"),
        (Conversation((Turn("user", "\ud800"),)), "messages[0].content"),
        (Conversation((*USER, Turn("user", WRONG["text"]))), "messages[1].content"),
        (Conversation((Turn("user", "x", reasoning="y"),)), "messages[0].reasoning"),
        (Conversation((Turn("user", "x", tool_calls=(ToolUse("a", "b", ""),)),)), "messages[0].tool_calls"),
        (Conversation(USER, (Tool("a b"),)), "tools[0].name"),
        (Conversation(USER, (Tool("a"), Tool("a"))), "tools[1].name"),
        (Conversation(USER, (Tool("a", WRONG["text"]),)), "tools[0].description"),
        (Conversation(USER, (Tool("a", "", WRONG["schema"]),)), "tools[0].parameters"),
        (Conversation(USER, effort="extreme"), "reasoning_effort"),
        (Conversation(USER, thinking_budget=-1), "thinking_budget"),
        (Conversation(USER, thinking_budget=True), "thinking_budget"),
        (Conversation(USER, template_kwargs={"tools": []}), "chat_template_kwargs"),
        (Conversation(USER, template_kwargs={"tokenize": False}), "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(conversation: Conversation, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        _format(templates.OPENED).render(conversation)
    assert caught.value.field == field


def test_faults_of_a_template_are_told_from_those_of_a_request() -> None:
    with pytest.raises(EmptyPrompt):
        _format(templates.PLAIN).render(Conversation(()))
    with pytest.raises(BadCheckpoint):
        _format("{% for %}").render(Conversation(USER))
    with pytest.raises(RequestError, match="roles must alternate"):
        _format("{{ raise_exception('roles must alternate') }}").render(Conversation(CALLED))
    with pytest.raises(RequestError, match="no chat template"):
        _format(WRONG["template"]).render(Conversation(USER))
