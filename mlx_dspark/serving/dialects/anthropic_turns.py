"""Anthropic's system prompt and messages as the turns of a conversation.

Neighbouring messages of one role are one turn. The results of tools come before the rest of what the user
says. System text between the messages, for which few templates have a place, becomes part of the user's turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import StrictBool, StrictStr

from mlx_dspark.foundation.chat import Tool, ToolUse, Turn
from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.serving.dialects.anthropic_signature import carried
from mlx_dspark.serving.dialects.fields import AS_LIST, AS_TEXT, FIRST_ONLY, TEXT_OR_LIST, Open, shown

REMINDER = "<system-reminder>\n{}\n</system-reminder>"
"""How the user's turn carries what the system says in between."""
FUNCTION = "<functions>\n<function>{}</function>\n</functions>"
"""How the result of a tool tells of a tool."""
BILLING = "x-anthropic-billing-header:"
"""A block of the system prompt that begins so is meant for who counts, changes with every request, and is
not shown to the model."""
_BETWEEN = "\n\n"


class TextBlock(Open):
    """A block of system text."""

    type: Literal["text"]
    text: StrictStr


class Block(Open):
    """A block of a message; which fields it has depends on its type."""

    type: StrictStr
    text: StrictStr | None = None
    thinking: StrictStr | None = None
    signature: StrictStr | None = None
    id: StrictStr | None = None
    name: StrictStr | None = None
    input: dict[str, Any] | None = None
    tool_use_id: StrictStr | None = None
    tool_name: StrictStr | None = None
    content: Content | None = None
    is_error: StrictBool | None = None


Content = Annotated[Annotated[StrictStr, AS_TEXT] | Annotated[list[Block], FIRST_ONLY, AS_LIST], TEXT_OR_LIST]
Block.model_rebuild()


class InMessage(Open):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content


def turns_of(
    system: str | Sequence[TextBlock] | None, messages: Sequence[InMessage], tools: Sequence[Tool] = ()
) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
    """The turns, and the names of what was left out of them. Raises RequestError naming the field."""
    turns = _Turns(tools)
    turns.begin(system)
    for i, message in enumerate(messages):
        turns.take(message, f"messages[{i}]")
    return turns.end(), tuple(turns.left_out)


class _Turns:
    """Turns as the messages add up."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._system: list[str] = []
        self._done: list[Turn] = []
        self._results: list[Turn] = []
        self._said: list[str] = []
        self._assistant: list[tuple[Block, str]] | None = None
        self.left_out: list[str] = []

    def begin(self, system: str | Sequence[TextBlock] | None) -> None:
        texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
        for text in texts:
            if text.startswith(BILLING):
                self.left_out.append(f"system.{BILLING.rstrip(':')}")
            elif text:
                self._system.append(text)

    def take(self, message: InMessage, where: str) -> None:
        content = message.content
        blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
        named = [(block, f"{where}.content[{j}]") for j, block in enumerate(blocks)]
        if message.role == "user" and not named:
            raise RequestError(f"{where}.content has nothing in it.", "Give text.", field="messages")
        if message.role == "assistant":
            self._flush_user()
            self._assistant = [*(self._assistant or ()), *named]
            return
        self._flush_assistant()
        for block, place in named:
            self._user(block, place, system=message.role == "system")

    def end(self) -> tuple[Turn, ...]:
        if self._assistant is not None:
            raise RequestError(
                "messages ends with an assistant's turn, which this server does not go on with.",
                "End with a message of the user.",
                field="messages",
            )
        self._flush_user()
        system = [Turn("system", _BETWEEN.join(self._system))] if self._system else []
        return (*system, *self._done)

    def _user(self, block: Block, place: str, *, system: bool) -> None:
        if block.type == "tool_result" and not system:
            self._results.append(self._result(block, place))
            return
        text = _text(block, place)
        if not system:
            self._said.append(text)
        elif self._done or self._results or self._said:
            self._said.append(REMINDER.format(text))
        else:
            self._system.append(text)

    def _result(self, block: Block, place: str) -> Turn:
        """A tool's turn; templates have no place for `is_error`, so that its text says so."""
        content = block.content or ""
        if not isinstance(content, str):
            parts = [self._part(part, f"{place}.content[{i}]") for i, part in enumerate(content)]
            content = _BETWEEN.join(parts)
        told = f"Error: {content}" if block.is_error else content
        return Turn("tool", told, tool_call_id=_given(block.tool_use_id, f"{place}.tool_use_id"))

    def _part(self, part: Block, place: str) -> str:
        """A part of a result; a reference to a tool is the tool's declaration."""
        if part.type != "tool_reference":
            return _text(part, place)
        tool = self._tools.get(_given(part.tool_name, f"{place}.tool_name"))
        if tool is None:
            raise RequestError(
                f"{place} refers to the tool {shown(part.tool_name)}, which is not declared.",
                "Declare it in tools.",
                field="messages",
            )
        declared = {"description": tool.description, "name": tool.name, "parameters": tool.parameters}
        return FUNCTION.format(json.dumps(declared, ensure_ascii=False))

    def _flush_user(self) -> None:
        self._done += self._results
        if self._said:
            self._done.append(Turn("user", _BETWEEN.join(self._said)))
        self._results, self._said = [], []

    def _flush_assistant(self) -> None:
        if self._assistant is None:
            return
        texts, thoughts, calls = [], [], []
        for block, place in self._assistant:
            match block.type:
                case "thinking":
                    thought = _given(block.thinking, f"{place}.thinking")
                    thoughts.append(thought or carried(block.signature or ""))
                case "redacted_thinking":
                    self.left_out.append("messages.content.redacted_thinking")
                case "tool_use":
                    calls.append(_call(block, place))
                case _:
                    texts.append(_text(block, place))
        self._done.append(Turn("assistant", "".join(texts), "".join(thoughts), tuple(calls)))
        self._assistant = None


def _text(block: Block, place: str) -> str:
    if block.type != "text":
        raise RequestError(
            f"{place} is of type {shown(block.type)}, which this server does not take there.",
            "Give blocks of type text.",
            field="messages",
        )
    return _given(block.text, f"{place}.text")


def _call(block: Block, place: str) -> ToolUse:
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    return ToolUse(_given(block.id, f"{place}.id"), _given(block.name, f"{place}.name"), arguments)


def _given(value: str | None, name: str) -> str:
    if value is None:
        raise RequestError(f"{name} is missing.", "Give it as text.", field="messages")
    return value
