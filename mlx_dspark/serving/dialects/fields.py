"""Fields that a protocol has and this server does not: harmless ones, and those that are refused by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag

from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.foundation.numbers import brief

Real = Annotated[float, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0)]
MOST_STOPS = 16
_LONGEST_STOP = 1000
_MOST_TOLD = 32
_LONGEST_TOLD = 64
LONGEST_NAME = 128
"""Characters of the name of a model that are told back."""

AS_TEXT, AS_LIST = Tag("as text"), Tag("as a list")


class _FirstOnly(FailFast):
    """Can stand in a union."""

    def __hash__(self) -> int:
        return id(self)


FIRST_ONLY = _FirstOnly()
"""A list's first bad item is told, and the rest are not looked at."""


def text_or_list(value: Any) -> str | None:
    """Which of AS_TEXT and AS_LIST a value is."""
    return AS_TEXT.tag if isinstance(value, str) else AS_LIST.tag if isinstance(value, list) else None


TEXT_OR_LIST = Discriminator(
    text_or_list, custom_error_type="text_or_list", custom_error_message="text, or a list of parts"
)


def shown(value: Any) -> str:
    """A value of a body as JSON has it, briefly; of lists and objects only the kind."""
    match value:
        case dict():
            return "an object"
        case list() | tuple():
            return f"a list of {len(value)}"
        case str():
            return json.dumps(value if len(value) <= _LONGEST_TOLD else value[:_LONGEST_TOLD] + "…")
        case None | bool():
            return json.dumps(value)
        case _:
            return brief(value)


def told_names(names: Collection[str]) -> tuple[str, ...]:
    """Names that clients chose, each once, as many and as long as are told back."""
    distinct = list(dict.fromkeys(names))
    told = [name[:_LONGEST_TOLD] + "…" * (len(name) > _LONGEST_TOLD) for name in distinct[:_MOST_TOLD]]
    more = len(distinct) - len(told)
    return (*told, f"and {more} more") if more else tuple(told)


class Open(BaseModel):
    """A body whose unknown names are kept, to be reported."""

    model_config = ConfigDict(extra="allow")


def checked_stops(stops: Sequence[str], name: str) -> tuple[str, ...]:
    """The stop strings of a body. Raises RequestError naming their field."""
    if len(stops) > MOST_STOPS or any(len(each) > _LONGEST_STOP for each in stops):
        raise RequestError(
            f"{name} has {len(stops)} texts, the longest of {max(map(len, stops))} characters.",
            f"Give up to {MOST_STOPS} of up to {_LONGEST_STOP} characters.",
            field=name,
        )
    if not all(stops):
        raise RequestError(
            f"{name} holds an empty text.", "Give stop strings of at least one character.", field=name
        )
    return tuple(stops)


@dataclass(frozen=True)
class Unserved:
    """A field that would change the answer. `neutral` are the values that ask for nothing, beside null."""

    neutral: tuple[Any, ...] = ()
    instead: str = "Leave it out."

    def check(self, name: str, value: Any) -> None:
        """Raises RequestError naming the field where it asks for something."""
        if value is None or any(type(value) is type(each) and value == each for each in self.neutral):
            return
        raise RequestError(
            f"{name} is {shown(value)}, which this server does not do.", self.instead, field=name
        )


def unknown_fields(
    body: BaseModel, harmless: Collection[str], unserved: Mapping[str, Unserved]
) -> tuple[str, ...]:
    """The names in a body, at any depth, that its protocol does not know, as `messages.name`.

    `harmless` and `unserved` name a nested field in the same way. Raises RequestError for one of `unserved`
    that asks for something.
    """
    unknown: dict[str, None] = {}
    for name, value in _extras(body, ""):
        if name in unserved:
            unserved[name].check(name, value)
        elif name not in harmless:
            unknown[name] = None
    return tuple(unknown)


def _extras(body: BaseModel, inside: str) -> Iterator[tuple[str, Any]]:
    for name, value in (body.model_extra or {}).items():
        yield inside + name, value
    for name in type(body).model_fields:
        value = getattr(body, name)
        for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            if isinstance(each, BaseModel):
                yield from _extras(each, f"{inside}{name}.")
