"""Fields that a protocol has and this server does not: harmless ones, and those that are refused by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt

from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.foundation.numbers import brief

Real = StrictFloat | StrictInt
Count = Annotated[int, Field(strict=True, ge=0)]
MOST_STOPS = 16
_LONGEST_STOP = 1000


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
            f"{name} is {_told(value)}, which this server does not do.", self.instead, field=name
        )


def _told(value: Any) -> str:
    """A value in a message: those that hold others may hold a secret."""
    return "given" if isinstance(value, Mapping | list) else brief(value)


def unknown_fields(
    body: BaseModel, harmless: Collection[str], unserved: Mapping[str, Unserved]
) -> tuple[str, ...]:
    """The names in a body, at any depth, that its protocol does not know, as `messages.name`.

    `harmless` and `unserved` name a nested field in the same way. Raises RequestError for one of `unserved`
    that asks for something.
    """
    unknown: list[str] = []
    for name, value in _extras(body, ""):
        if name in unserved:
            unserved[name].check(name, value)
        elif name not in harmless and name not in unknown:
            unknown.append(name)
    return tuple(unknown)


def _extras(body: BaseModel, inside: str) -> Iterator[tuple[str, Any]]:
    for name, value in (body.model_extra or {}).items():
        yield inside + name, value
    for name in type(body).model_fields:
        value = getattr(body, name)
        for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            if isinstance(each, BaseModel):
                yield from _extras(each, f"{inside}{name}.")
