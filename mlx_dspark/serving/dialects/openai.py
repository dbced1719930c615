"""OpenAI's chat completions. https://platform.openai.com/docs/api-reference/chat"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mlx_dspark.foundation.events import Text, ToolCallArguments, ToolCallBegan
from mlx_dspark.serving.ask import Ask, Defaults
from mlx_dspark.serving.dialects.base import About, Dialect, Encoder, Frame
from mlx_dspark.serving.dialects.openai_chat_body import ChatBody, chat_ask
from mlx_dspark.serving.dialects.openai_frames import DONE, FINISH, Tally, closing, error_body
from mlx_dspark.serving.events import AnswerEvent, Ended, Logprobs, TokenText
from mlx_dspark.serving.faults import Fault


class OpenAIChat(Dialect):
    """`/v1/chat/completions`."""

    paths = ("/v1/chat/completions", "/chat/completions")
    body = ChatBody
    names = MappingProxyType({"effort": "reasoning_effort", "thinking": "enable_thinking"})

    def decode(self, body: ChatBody, defaults: Defaults) -> Ask:
        return chat_ask(body, defaults)

    def encoder(self, ask: Ask, about: About) -> ChatEncoder:
        return ChatEncoder(ask, about)

    def error(self, fault: Fault) -> dict[str, Any]:
        return error_body(fault)


class ChatEncoder(Encoder):
    """Chunks: the role, then deltas, then the reason to finish, then usage where it was asked for."""

    def __init__(self, ask: Ask, about: About) -> None:
        self._ask = ask
        self._about = about
        self._name = f"chatcmpl-{about.id}"
        self._tally = Tally(ask, about)

    def begin(self) -> Sequence[Frame]:
        return [self._delta(i, {"role": "assistant", "content": ""}) for i in range(self._ask.choices)]

    def take(self, choice: int, event: AnswerEvent) -> Sequence[Frame]:
        match event:
            case Text(channel="reasoning"):
                return [self._delta(choice, {"reasoning_content": event.text})]
            case Text():
                return [self._delta(choice, {"content": event.text})]
            case ToolCallBegan():
                function = {"name": event.name, "arguments": ""}
                begun = {"index": event.index, "id": event.id, "type": "function", "function": function}
                return [self._delta(choice, {"tool_calls": [begun]})]
            case ToolCallArguments():
                more = {"index": event.index, "function": {"arguments": event.text}}
                return [self._delta(choice, {"tool_calls": [more]})]
            case Logprobs():
                told = {"content": [_token(token) for token in event.tokens], "refusal": None}
                return [self._delta(choice, {}, logprobs=told)]
            case Ended():
                return [self._last(choice, event)]
            case _:
                return []

    def end(self) -> Sequence[Frame]:
        usage = self._chunk([]) | {"usage": self._tally.usage()}
        return [Frame(usage), Frame(DONE)] if self._ask.details["usage"] else [Frame(DONE)]

    def keep_alive(self) -> Sequence[Frame]:
        return [self._delta(self._tally.unended(), {"content": ""})]

    def failed(self, fault: Fault) -> Sequence[Frame]:
        return [Frame(error_body(fault)), Frame(DONE)]

    def fold(self, frames: Sequence[Frame]) -> dict[str, Any]:
        chunks = [frame.data for frame in frames if frame.data != DONE]
        choices = [_Choice(index) for index in range(self._ask.choices)]
        for chunk in chunks:
            for delta in chunk["choices"]:
                choices[delta["index"]].take(delta)
        head = {"id": self._name, "object": "chat.completion", "created": self._about.created}
        folded = [choice.folded() for choice in choices]
        return head | {"model": self._about.model, "choices": folded} | closing(chunks)

    def _last(self, choice: int, ended: Ended) -> Frame:
        last = self._tally.take(choice, ended)
        frame = self._delta(choice, {}, finish=FINISH[ended.ending])
        return Frame(frame.data | {"x_mlx_dspark": self._tally.stats()}) if last else frame

    def _delta(
        self,
        choice: int,
        delta: Mapping[str, Any],
        *,
        finish: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> Frame:
        told = {"index": choice, "delta": dict(delta), "logprobs": logprobs, "finish_reason": finish}
        return Frame(self._chunk([told]))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "chat.completion.chunk",
            "created": self._about.created,
            "model": self._about.model,
            "choices": choices,
        }


class _Choice:
    """One choice as its deltas add up, the way the SDKs add them."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._texts: dict[str, str] = {}
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[Any] | None = None
        self._finish: str | None = None

    def take(self, told: Mapping[str, Any]) -> None:
        for name in ("content", "reasoning_content"):
            if name in told["delta"]:
                self._texts[name] = self._texts.get(name, "") + told["delta"][name]
        for call in told["delta"].get("tool_calls", ()):
            self._call(call)
        if told["logprobs"] is not None:
            self._logprobs = [*(self._logprobs or ()), *told["logprobs"]["content"]]
        self._finish = told["finish_reason"] or self._finish

    def _call(self, call: Mapping[str, Any]) -> None:
        if call["index"] == len(self._calls):
            begun = {name: call[name] for name in ("id", "type")}
            self._calls.append(begun | {"function": dict(call["function"])})
        else:
            self._calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def folded(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._texts.get("content", "")}
        if "reasoning_content" in self._texts:
            message["reasoning_content"] = self._texts["reasoning_content"]
        if self._calls:
            message["tool_calls"] = self._calls
            message["content"] = message["content"] or None
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {
            "index": self._index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish,
        }


def _token(token: TokenText) -> dict[str, Any]:
    told = _one(token)
    return told | {"top_logprobs": [_one(each) for each in token.top]}


def _one(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}
