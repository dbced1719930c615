"""An answer as Anthropic's events, and the message that they add up to.

https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic_core import from_json

from mlx_dspark.foundation.events import Text, ToolCallArguments, ToolCallBegan, ToolCallEnded
from mlx_dspark.serving.ask import Ask
from mlx_dspark.serving.dialects.anthropic_signature import SIGNATURE, carrying
from mlx_dspark.serving.dialects.base import About, Encoder, Frame
from mlx_dspark.serving.events import AnswerEvent, Ended, Ending
from mlx_dspark.serving.faults import Fault
from mlx_dspark.serving.stats import stats_of

_REASONS: Mapping[Ending, str] = MappingProxyType(
    {
        "stop": "end_turn",
        "stop_sequence": "stop_sequence",
        "length": "max_tokens",
        "tool_calls": "tool_use",
        "cancelled": "end_turn",
    }
)
_JOINED = MappingProxyType({"text_delta": "text", "thinking_delta": "thinking"})


class MessageEncoder(Encoder):
    """The start of the message, one block after the other, and the reason to stop."""

    def __init__(self, ask: Ask, about: About, error_body: Callable[[Fault], dict[str, Any]]) -> None:
        self._ask = ask
        self._about = about
        self._error_body = error_body
        self._index = -1
        self._open = ""
        self._hidden = ""

    def begin(self) -> Sequence[Frame]:
        message = {
            "id": f"msg_{self._about.id}",
            "type": "message",
            "role": "assistant",
            "model": self._about.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(sum(self._about.prompt_tokens), 0, 0, 0),
        }
        return [_frame("message_start", message=message), *self.keep_alive()]

    def take(self, choice: int, event: AnswerEvent) -> Sequence[Frame]:
        match event:
            case Text(channel="reasoning"):
                return self._thinking(event.text)
            case Text():
                begun = self._begun("text", {"type": "text", "text": ""})
                return [*begun, self._delta("text_delta", text=event.text)]
            case ToolCallBegan():
                call = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                return [*self._closed(), *self._begun("tool_use", call)]
            case ToolCallArguments():
                return [self._delta("input_json_delta", partial_json=event.text)]
            case ToolCallEnded():
                return self._closed()
            case Ended():
                return [*self._closed(), self._stopped(event)]
            case _:
                return []

    def end(self) -> Sequence[Frame]:
        return [_frame("message_stop")]

    def keep_alive(self) -> Sequence[Frame]:
        return [_frame("ping")]

    def failed(self, fault: Fault) -> Sequence[Frame]:
        return [Frame(self._error_body(fault), "error")]

    def fold(self, frames: Sequence[Frame]) -> dict[str, Any]:
        message: dict[str, Any] = {}
        blocks: list[_Block] = []
        for told in (frame.data for frame in frames):
            match told["type"]:
                case "message_start":
                    message = dict(told["message"])
                case "content_block_start":
                    blocks.append(_Block(told["content_block"]))
                case "content_block_delta":
                    blocks[told["index"]].take(told["delta"])
                case "message_delta":
                    usage = message["usage"] | told["usage"]
                    message |= told["delta"] | {"usage": usage, "x_mlx_dspark": told["x_mlx_dspark"]}
                case _:
                    pass
        return message | {"content": [block.folded() for block in blocks]}

    def _thinking(self, text: str) -> Sequence[Frame]:
        begun = self._begun("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        if self._ask.details["show_thinking"]:
            return [*begun, self._delta("thinking_delta", thinking=text)]
        self._hidden += text
        return begun

    def _begun(self, kind: str, block: Mapping[str, Any]) -> Sequence[Frame]:
        """What lets a block of this kind be open."""
        if self._open == kind:
            return []
        closed = self._closed()
        self._index, self._open = self._index + 1, kind
        return [*closed, _frame("content_block_start", index=self._index, content_block=dict(block))]

    def _closed(self) -> Sequence[Frame]:
        """What lets no block be open."""
        if not self._open:
            return []
        signed: list[Frame] = []
        if self._open == "thinking":
            signature = carrying(self._hidden) if self._hidden else SIGNATURE
            signed = [self._delta("signature_delta", signature=signature)]
        self._open = self._hidden = ""
        return [*signed, _frame("content_block_stop", index=self._index)]

    def _delta(self, kind: str, **told: str) -> Frame:
        return _frame("content_block_delta", index=self._index, delta={"type": kind, **told})

    def _stopped(self, ended: Ended) -> Frame:
        result = ended.result
        reason = _REASONS[ended.ending]
        if ended.ending == "length" and result.context_full:
            reason = "model_context_window_exceeded"
        usage = _usage(
            result.prompt_tokens - result.reused_tokens,
            result.reused_tokens,
            result.num_tokens,
            ended.reasoning_tokens,
        )
        return _frame(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": ended.stop},
            usage=usage,
            x_mlx_dspark=stats_of([result], self._ask.ignored),
        )


class _Block:
    """One block as its deltas add up, the way the SDKs add them."""

    def __init__(self, begun: Mapping[str, Any]) -> None:
        self._block = dict(begun)
        self._json = ""

    def take(self, delta: Mapping[str, Any]) -> None:
        if delta["type"] == "input_json_delta":
            self._json += delta["partial_json"]
        elif delta["type"] == "signature_delta":
            self._block["signature"] = delta["signature"]
        else:
            name = _JOINED[delta["type"]]
            self._block[name] += delta[name]

    def folded(self) -> dict[str, Any]:
        return self._block | ({"input": _arguments(self._json)} if self._json else {})


def _arguments(text: str) -> Any:
    """Arguments as they were written, or as far as they were when the answer broke off."""
    try:
        return json.loads(text)
    except ValueError:
        return from_json(text, allow_partial=True)


def _usage(fresh: int, cached: int, output: int, thinking: int) -> dict[str, Any]:
    return {
        "input_tokens": fresh,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": thinking},
    }


def _frame(kind: str, **told: Any) -> Frame:
    return Frame({"type": kind, **told}, kind)
