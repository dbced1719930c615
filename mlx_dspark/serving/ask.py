"""One request as the server sees it, whatever its dialect, and what the server puts where a request says
nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from mlx_dspark.foundation.chat import Conversation
from mlx_dspark.foundation.request import SamplingParams

Prompt = Conversation | str | tuple[int, ...]
"""What to answer: a conversation, raw text to go on with, or token ids."""


@dataclass(frozen=True)
class Ask:
    """A checked request: each of `prompts` is answered `n` times.

    `details` is the dialect's own, for its encoder. `ignored` names what the protocol does not know.
    """

    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    max_tokens: int
    stops: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    model: str = ""
    ignored: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def choices(self) -> int:
        """How many answers are asked for."""
        return len(self.prompts) * self.n

    @property
    def multiple(self) -> str:
        """The field that asks for more than one answer."""
        return "n" if self.n > 1 or len(self.prompts) == 1 else "prompt"


@dataclass(frozen=True)
class Defaults:
    """What holds where a request says nothing. `max_tokens_cap` bounds what it may say."""

    max_tokens: int = 2048
    max_tokens_cap: int = 32768
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    thinking: bool | None = None
    effort: str | None = None

    def sampling(self, **asked: Any) -> SamplingParams:
        """The sampling of a request that says `asked`, where None says nothing. Raises RequestError."""
        said = {name: value for name, value in asked.items() if value is not None}
        usual = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return SamplingParams(**(usual | said))

    def tokens(self, asked: int | None) -> int:
        """The limit of an answer for which `asked` tokens are asked."""
        return min(asked or self.max_tokens, self.max_tokens_cap)


def seed_of_choice(seed: int | None, choice: int) -> int | None:
    """The seed of one of several answers: the first one's is the request's own."""
    if seed is None or choice == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest())
