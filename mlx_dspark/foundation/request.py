"""What one request asks for: token ids, limits and sampling parameters. Knows no text and no MLX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

from mlx_dspark.foundation.errors import EmptyPrompt, RequestError
from mlx_dspark.foundation.numbers import brief, is_finite, is_whole

FinishReason = Literal["stop", "length", "cancelled"]
"""`stop`: an end-of-sequence id or a stop string; `length`: the token limit; `cancelled`: by the caller."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (DeepSpec `utils/sampling.py`)."""


def _require(ok: bool, name: str, value: object, want: str) -> None:
    if not ok:
        raise RequestError(f"{name} is {brief(value)}, which is out of range.", f"Give {want}.", field=name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn.

    The logits go through these steps in this order, in float32: repetition, presence and frequency
    penalties, logit bias, temperature, top-k, top-p, min-p. Repetition counts prompt and output; presence and
    frequency count the output only. Temperatures below 1e-5 take the arg-max.

    `seed` fixes the noise of this request alone. `logprobs` asks for log-probabilities: `0` for the chosen
    token, `n` for the `n` most likely tokens too.

    Raises RequestError naming the field when a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        t = self.temperature
        _require(is_finite(t) and 0 <= t <= 100, "temperature", t, "a number from 0 to 100")
        p = self.top_p
        _require(is_finite(p) and 0 < p <= 1, "top_p", p, "a number above 0, at most 1")
        k = self.top_k
        _require(is_whole(k) and k >= 0, "top_k", k, "0 (off) or a positive integer")
        m = self.min_p
        _require(is_finite(m) and 0 <= m <= 1, "min_p", m, "a number from 0 to 1")
        r = self.repetition_penalty
        _require(is_finite(r) and 0 < r <= 10, "repetition_penalty", r, "a number above 0, up to 10 (1: off)")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(is_finite(value) and -10 <= value <= 10, name, value, "a number from -10 to 10 (0: off)")
        want = "token ids (0 and up) with numbers from -1000 to 1000"
        _require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, f"a mapping of {want}")
        for token, bias in self.logit_bias.items():
            ok = is_whole(token) and token >= 0 and is_finite(bias) and -1000 <= bias <= 1000
            _require(ok, "logit_bias", {token: bias}, want)
        s = self.seed
        _require(s is None or (is_whole(s) and 0 <= s < 2**64), "seed", s, "an integer from 0 to 2^64 - 1")
        n = self.logprobs
        _require(n is None or (is_whole(n) and 0 <= n <= 100), "logprobs", n, "an integer from 0 to 100")

    @property
    def greedy(self) -> bool:
        """Whether the next token is the arg-max."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on the tokens that came before, beyond the model itself."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class StopCheck(Protocol):
    """Told every committed token once, in order; answers True when the text must end with it."""

    def __call__(self, token: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request as the engine sees it.

    `prompt` holds token ids; `max_new_tokens` is exact; `end_ids` end the text and are part of the committed
    tokens' stream but never of the text; `stop_check` sees every committed token.

    Raises EmptyPrompt, or RequestError naming the field when a value is out of range.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_ids: frozenset[int] = frozenset()
    stop_check: StopCheck | None = None

    def __post_init__(self) -> None:
        ids = self.prompt
        listed = isinstance(ids, Sequence) and all(is_whole(token) and token >= 0 for token in ids)
        _require(listed, "prompt", ids, "token ids, which are integers from 0")
        if not ids:
            raise EmptyPrompt("The prompt is empty.", "Give at least one token of text.", field="prompt")
        n = self.max_new_tokens
        _require(is_whole(n) and n >= 1, "max_new_tokens", n, "a positive integer")
