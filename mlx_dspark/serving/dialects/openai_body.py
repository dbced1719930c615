"""What the bodies of OpenAI's chat and text completions share, and the fields of theirs that are not served.

https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr

from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.serving.ask import Ask, Defaults
from mlx_dspark.serving.dialects.fields import (
    AS_LIST,
    AS_TEXT,
    FIRST_ONLY,
    LONGEST_NAME,
    TEXT_OR_LIST,
    Count,
    Open,
    Real,
    Unserved,
    checked_stops,
    shown,
    told_names,
    unknown_fields,
)

HARMLESS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options.include_obfuscation",
        "user",
    }
)
"""Taken, and without effect: nothing is stored, and none of these changes an answer."""


_MOST_BIASES = 10_000
Stop = Annotated[
    Annotated[StrictStr, AS_TEXT] | Annotated[list[StrictStr], FIRST_ONLY, AS_LIST], TEXT_OR_LIST
]


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > _MOST_BIASES:
        raise ValueError(f"up to {_MOST_BIASES} token ids")
    return biases


Biases = Annotated[dict[str, Real], BeforeValidator(_few)]


class StreamOptions(Open):
    """`include_usage`: a last chunk tells the tokens used."""

    include_usage: StrictBool | None = None


class Sampled(Open):
    """The fields that both bodies have."""

    model: StrictStr | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: StrictInt | None = None
    min_p: Real | None = None
    repetition_penalty: Real | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    logit_bias: Biases | None = None
    max_tokens: Count | None = None
    stop: Stop | None = None
    seed: StrictInt | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=8)] | None = None


def shared_ask(
    body: Sampled,
    defaults: Defaults,
    logprobs: int | None,
    harmless: Collection[str],
    unserved: Mapping[str, Unserved],
) -> Ask:
    """What a body asks for, but for the prompt. Raises RequestError naming the field."""
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "stream_options is given, and stream is not true.",
            "Leave one of the two out.",
            field="stream_options",
        )
    return Ask(
        (),
        _sampling(body, defaults, logprobs),
        defaults.tokens(body.max_tokens),
        _stops(body.stop),
        body.n or 1,
        bool(body.stream),
        (body.model or "")[:LONGEST_NAME],
        told_names(unknown_fields(body, harmless, unserved)),
        {"usage": not body.stream or bool(body.stream_options and body.stream_options.include_usage)},
    )


def with_limit(ask: Ask, defaults: Defaults, limit: int | None) -> Ask:
    """The ask with another limit, where one is given."""
    return ask if limit is None else replace(ask, max_tokens=defaults.tokens(limit))


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    return checked_stops(() if stop is None else (stop,) if isinstance(stop, str) else stop, "stop")


def _sampling(body: Sampled, defaults: Defaults, logprobs: int | None) -> SamplingParams:
    return defaults.sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=None if body.logit_bias is None else _biases(body.logit_bias),
        seed=body.seed,
        logprobs=logprobs,
    )


def _biases(given: Mapping[str, Any]) -> dict[int, float]:
    """Token ids to numbers. Raises RequestError where a name is no token id."""
    for name in given:
        if not (name.isascii() and name.isdecimal() and len(name) < 20):
            raise RequestError(
                f"logit_bias names {shown(name)}, which is not a token id.",
                "Give token ids (0 and up) with numbers.",
                field="logit_bias",
            )
    return {int(token): bias for token, bias in given.items()}
