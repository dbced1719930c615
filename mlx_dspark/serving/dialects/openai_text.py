"""OpenAI's text completions: raw text, or token ids, gone on with.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Discriminator, Field, StrictInt, StrictStr, Tag

from mlx_dspark.foundation.events import Text
from mlx_dspark.serving.ask import Ask, Defaults, Prompt
from mlx_dspark.serving.dialects.base import About, Dialect, Encoder, Frame
from mlx_dspark.serving.dialects.fields import FIRST_ONLY, Unserved
from mlx_dspark.serving.dialects.openai_body import HARMLESS, Sampled, shared_ask
from mlx_dspark.serving.dialects.openai_frames import DONE, FINISH, Tally, closing, error_body
from mlx_dspark.serving.events import AnswerEvent, Ended, Logprobs
from mlx_dspark.serving.faults import Fault

UNSERVED: Mapping[str, Unserved] = MappingProxyType(
    {
        "best_of": Unserved((1,), "Use n, and choose."),
        "echo": Unserved((False,), "Put the prompt before the answer yourself."),
        "suffix": Unserved(("",), "Put what is to follow into the prompt."),
    }
)
"""Refused by name, unless the value asks for nothing."""
MOST_IDS = 1_000_000
_MOST_PROMPTS = 32
Ids = Annotated[list[StrictInt], Field(min_length=1, max_length=MOST_IDS), FIRST_ONLY]
Texts = Annotated[list[StrictStr], Field(min_length=1, max_length=_MOST_PROMPTS), FIRST_ONLY]
Several = Annotated[list[Ids], Field(min_length=1, max_length=_MOST_PROMPTS), FIRST_ONLY]


def _kind(prompt: Any) -> str | None:
    """What a prompt is, by its first item."""
    if isinstance(prompt, str):
        return "as text"
    if not isinstance(prompt, list):
        return None
    first: Any = prompt[0] if prompt else ""
    return "as ids" if isinstance(first, int) else "as lists" if isinstance(first, list) else "as texts"


TextPrompt = Annotated[
    Annotated[StrictStr, Tag("as text")]
    | Annotated[Ids, Tag("as ids")]
    | Annotated[Several, Tag("as lists")]
    | Annotated[Texts, Tag("as texts")],
    Discriminator(
        _kind, custom_error_type="prompt", custom_error_message="text, token ids, or a list of either"
    ),
]


class TextBody(Sampled):
    """The body of `/v1/completions`."""

    prompt: TextPrompt
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None


class OpenAIText(Dialect):
    """`/v1/completions`."""

    paths = ("/v1/completions", "/completions")
    body = TextBody

    def decode(self, body: TextBody, defaults: Defaults) -> Ask:
        ask = shared_ask(body, defaults, body.logprobs, HARMLESS, UNSERVED)
        return replace(ask, prompts=_prompts(body.prompt))

    def encoder(self, ask: Ask, about: About) -> TextEncoder:
        return TextEncoder(ask, about)

    def error(self, fault: Fault) -> dict[str, Any]:
        return error_body(fault)


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(each if isinstance(each, str) else tuple(each) for each in prompt)


class TextEncoder(Encoder):
    """Chunks of text, then the reason to finish, then usage where it was asked for."""

    def __init__(self, ask: Ask, about: About) -> None:
        self._ask = ask
        self._about = about
        self._tally = Tally(ask, about)
        self._offsets = [0] * ask.choices

    def begin(self) -> Sequence[Frame]:
        return []

    def take(self, choice: int, event: AnswerEvent) -> Sequence[Frame]:
        match event:
            case Text():
                return [self._piece(choice, event.text)]
            case Logprobs():
                return [self._piece(choice, "", logprobs=self._logprobs(choice, event))]
            case Ended():
                last = self._tally.take(choice, event)
                frame = self._piece(choice, "", finish=FINISH[event.ending])
                return [Frame(frame.data | {"x_mlx_dspark": self._tally.stats()}) if last else frame]
            case _:
                return []

    def end(self) -> Sequence[Frame]:
        usage = self._chunk([]) | {"usage": self._tally.usage()}
        return [Frame(usage), Frame(DONE)] if self._ask.details["usage"] else [Frame(DONE)]

    def keep_alive(self) -> Sequence[Frame]:
        return [self._piece(self._tally.unended(), "")]

    def failed(self, fault: Fault) -> Sequence[Frame]:
        return [Frame(error_body(fault)), Frame(DONE)]

    def fold(self, frames: Sequence[Frame]) -> dict[str, Any]:
        chunks = [frame.data for frame in frames if frame.data != DONE]
        choices = [
            {"index": index, "text": "", "logprobs": None, "finish_reason": None}
            for index in range(self._ask.choices)
        ]
        for piece in (piece for chunk in chunks for piece in chunk["choices"]):
            choice = choices[piece["index"]]
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"] or choice["finish_reason"]
            choice["logprobs"] = _added(choice["logprobs"], piece["logprobs"])
        return self._chunk(choices) | closing(chunks)

    def _piece(
        self,
        choice: int,
        text: str,
        *,
        finish: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> Frame:
        told = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return Frame(self._chunk([told]))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self._about.id}",
            "object": "text_completion",
            "created": self._about.created,
            "model": self._about.model,
            "choices": choices,
        }

    def _logprobs(self, choice: int, event: Logprobs) -> dict[str, Any]:
        told: dict[str, list[Any]] = {
            "tokens": [token.text for token in event.tokens],
            "token_logprobs": [token.logprob for token in event.tokens],
            "top_logprobs": [{top.text: top.logprob for top in token.top} for token in event.tokens],
            "text_offset": [],
        }
        for token in event.tokens:
            told["text_offset"].append(self._offsets[choice])
            self._offsets[choice] += len(token.text)
        return told


def _added(logprobs: dict[str, Any] | None, more: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if more is None or logprobs is None:
        return dict(more) if more is not None else logprobs
    return {name: [*logprobs[name], *values] for name, values in more.items()}
