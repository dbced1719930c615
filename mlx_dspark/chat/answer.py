"""A whole answer as the fold of its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlx_dspark.foundation.chat import ToolUse, Turn
from mlx_dspark.foundation.events import Text, ToolCallArguments, ToolCallBegan, ToolCallEnded


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What the assistant said, thought and called. Calls that broke off are not among them: their source
    stands in the text."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolUse, ...] = ()

    @classmethod
    def fold(cls, events: Iterable[object]) -> ChatAnswer:
        """The answer that a stream of events amounts to; events of other kinds are passed over."""
        folding = _Folding()
        for event in events:
            folding.take(event)
        calls = tuple(call.use() for call in folding.calls.values() if call.complete)
        return cls("".join(folding.text), "".join(folding.reasoning), calls)

    @property
    def turn(self) -> Turn:
        """The answer as the assistant's turn of the next conversation."""
        return Turn("assistant", self.text, self.reasoning, self.tool_calls)


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    complete: bool = False

    def use(self) -> ToolUse:
        return ToolUse(self.id, self.name, "".join(self.arguments))


@dataclass
class _Folding:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)

    def take(self, event: object) -> None:
        match event:
            case Text():
                (self.text if event.channel == "text" else self.reasoning).append(event.text)
            case ToolCallBegan():
                self.calls[event.index] = _Call(event.id, event.name)
            case ToolCallArguments():
                self.calls[event.index].arguments.append(event.text)
            case ToolCallEnded():
                self.calls[event.index].complete = event.complete
