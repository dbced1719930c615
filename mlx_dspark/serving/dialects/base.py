"""What a dialect is: a translation of request bodies into asks, and of answers into frames.

A plain answer is `Encoder.fold` of the frames that a streamed one consists of, so the two cannot disagree.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from mlx_dspark.serving.ask import Ask, Defaults
from mlx_dspark.serving.events import AnswerEvent
from mlx_dspark.serving.faults import Fault


def json_bytes(value: Any) -> bytes:
    """A value as JSON in UTF-8; a lone surrogate becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event: its data, and its name where the dialect names events."""

    data: Any
    event: str = ""

    def encode(self) -> bytes:
        """The frame on the wire (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
        data = self.data.encode() if isinstance(self.data, str) else json_bytes(self.data)
        name = f"event: {self.event}\n".encode() if self.event else b""
        return name + b"data: " + data + b"\n\n"


@dataclass(frozen=True)
class About:
    """What is known of an answer before it begins. `prompt_tokens` has one count for each prompt."""

    id: str
    created: int
    model: str
    mode: str
    prompt_tokens: tuple[int, ...]


class Encoder(ABC):
    """One answer's frames. `choice` numbers the answers of a request, from 0."""

    @abstractmethod
    def begin(self) -> Sequence[Frame]:
        """Sent before anything is known of the answer's text."""

    @abstractmethod
    def take(self, choice: int, event: AnswerEvent) -> Sequence[Frame]:
        """What an event adds."""

    @abstractmethod
    def end(self) -> Sequence[Frame]:
        """Sent after the last choice has ended."""

    @abstractmethod
    def keep_alive(self) -> Sequence[Frame]:
        """A real frame of the protocol that says nothing; no part of the fold."""

    @abstractmethod
    def failed(self, fault: Fault) -> Sequence[Frame]:
        """Sent in place of the rest, once a stream has begun."""

    @abstractmethod
    def fold(self, frames: Sequence[Frame]) -> dict[str, Any]:
        """The body of the plain answer, from all frames but keep-alives."""


class Dialect(ABC):
    """One way to ask and to be answered. It has the routes `paths`, and `body` is what it takes there.

    `counting` are its routes that only count the tokens of a prompt. `names` are its own for the fields of a
    conversation, where they differ.
    """

    paths: tuple[str, ...]
    body: type[BaseModel]
    counting: tuple[str, ...] = ()
    names: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def decode(self, body: Any, defaults: Defaults) -> Ask:
        """The request that a body amounts to. Raises RequestError naming the field."""

    @abstractmethod
    def encoder(self, ask: Ask, about: About) -> Encoder:
        """For the answer to `ask`."""

    @abstractmethod
    def error(self, fault: Fault) -> dict[str, Any]:
        """The body of an error."""

    def status(self, fault: Fault) -> int:
        """The HTTP status of an error."""
        return fault.code

    def counted(self, tokens: int) -> dict[str, Any]:
        """The body that tells how many tokens a prompt has."""
        return {"input_tokens": tokens}
