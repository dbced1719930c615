"""What a knob is, and what kinds of values knobs take. The knobs themselves stand in `settings`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, cast, get_type_hints

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.numbers import brief, is_finite, is_whole

_SHOWN_CHARACTERS = 80
_SHOWN_BIASES = 4


class Kind(ABC):
    """What values a knob takes. `want` completes "Give ..."; `many` lets the flag be repeated; a `secret`
    value is in no message."""

    many = False
    secret = False

    @property
    @abstractmethod
    def want(self) -> str: ...

    @abstractmethod
    def parse(self, text: str) -> Any:
        """The value written as `text`, its range not yet checked. Raises ValueError."""

    @abstractmethod
    def accepts(self, value: Any) -> bool: ...

    def gather(self, values: Sequence[Any]) -> Any:
        """One value out of the parsed values of a repeated flag."""
        return values[-1]

    def settled(self, value: Any) -> Any:
        """An accepted value in the form that settings hold."""
        return value

    def shown(self, value: Any) -> str:
        """A refused value, as a person would write it."""
        return shown(value)

    def fault(self, value: Any) -> str:
        """What is wrong with a refused value, to follow its name and `is ...,`."""
        del value
        return "which is not a value it takes"


@dataclass(frozen=True)
class Number(Kind):
    """A finite number from `low` to `high`; with `above`, `low` itself is out.

    `optional` lets None mean "not set".
    """

    low: float
    high: float
    above: bool = False
    optional: bool = False

    @property
    def want(self) -> str:
        start = f"above {self.low:g}, up to" if self.above else f"from {self.low:g} to"
        return f"a number {start} {self.high:g}"

    def parse(self, text: str) -> float:
        return float(text)

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.optional
        within = is_finite(value) and self.low <= value <= self.high
        return within and not (self.above and value == self.low)


@dataclass(frozen=True)
class Whole(Kind):
    """An integer from `low` to `high`, both included; `optional` lets None mean "not set"."""

    low: int
    high: int | None = None
    optional: bool = False

    @property
    def want(self) -> str:
        if self.high is None:
            return f"an integer of {self.low} or more"
        return f"an integer from {self.low} to {self.high}"

    def parse(self, text: str) -> int:
        return int(text)

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.optional
        return is_whole(value) and value >= self.low and (self.high is None or value <= self.high)


@dataclass(frozen=True)
class Choice(Kind):
    """One of some names or numbers, and of its type; `optional` lets None mean "not set"."""

    names: tuple[Any, ...]
    optional: bool = False

    @property
    def want(self) -> str:
        return "one of " + ", ".join(str(name) for name in self.names)

    def parse(self, text: str) -> Any:
        return {str(name): name for name in self.names}.get(text, text)

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.optional
        return any(type(value) is type(name) and value == name for name in self.names)


@dataclass(frozen=True)
class Switch(Kind):
    """On or off; `optional` lets None mean that the program decides."""

    optional: bool = False

    @property
    def want(self) -> str:
        return "true or false"

    def parse(self, text: str) -> bool:
        for value, words in ((True, ("true", "1", "yes", "on")), (False, ("false", "0", "no", "off"))):
            if text.lower() in words:
                return value
        raise ValueError(text)

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool) or (self.optional and value is None)


@dataclass(frozen=True)
class Words(Kind):
    """Any text that is not empty; None means "not set"."""

    want: str = "some text"  # pyright: ignore[reportIncompatibleMethodOverride]

    def parse(self, text: str) -> str:
        return text

    def accepts(self, value: Any) -> bool:
        return value is None or (isinstance(value, str | os.PathLike) and bool(str(value)))


@dataclass(frozen=True)
class Seconds(Kind):
    """A time in seconds; `s`, `m` or `h` after the number name the unit. None means "not set"."""

    want: str = "seconds above 0, or a time like 90s, 10m or 2h"  # pyright: ignore[reportIncompatibleMethodOverride]

    def parse(self, text: str) -> float:
        unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
        return float(text[:-1]) * unit if unit else float(text)

    def accepts(self, value: Any) -> bool:
        return value is None or Number(0, math.inf, above=True).accepts(value)


@dataclass(frozen=True)
class Wholes(Kind):
    """Rising integers of `low` or more with commas between; None means "not set"."""

    low: int

    @property
    def want(self) -> str:
        return f"rising integers of {self.low} or more, with commas between"

    def parse(self, text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    def accepts(self, value: Any) -> bool:
        if value is None:
            return True
        rising = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
        return rising and all(map(Whole(self.low).accepts, value)) and sorted({*value}) == list(value)


class Texts(Kind):
    """Any number of texts, none of them empty. One text alone is a list of one."""

    many = True

    @property
    def want(self) -> str:
        return "a text that is not empty"

    def parse(self, text: str) -> str:
        return text

    def accepts(self, value: Any) -> bool:
        texts = [value] if isinstance(value, str) else value
        listed = isinstance(texts, Sequence) and not isinstance(texts, bytes | bytearray | memoryview)
        return listed and all(isinstance(text, str) and text for text in texts)

    def gather(self, values: Sequence[str]) -> tuple[str, ...]:
        return tuple(values)

    def shown(self, value: Any) -> str:
        texts = value if isinstance(value, list | tuple) else [value]
        return shown(next((text for text in texts if not isinstance(text, str) or not text), value))


class Biases(Kind):
    """Additions to the logits of some token ids, written `ID=NUMBER` with commas between several."""

    many = True

    @property
    def want(self) -> str:
        return "ID=NUMBER, with a token id from 0 and a number from -1000 to 1000"

    def parse(self, text: str) -> dict[int, float]:
        pairs = [each.partition("=") for each in text.split(",")]
        return {int(token): float(bias) for token, _, bias in pairs}

    def accepts(self, value: Any) -> bool:
        token, bias = Whole(0), Number(-1000, 1000)
        return isinstance(value, Mapping) and all(
            token.accepts(key) and bias.accepts(number) for key, number in value.items()
        )

    def gather(self, values: Sequence[dict[int, float]]) -> dict[int, float]:
        return {token: bias for pairs in values for token, bias in pairs.items()}

    def shown(self, value: Any) -> str:
        if not isinstance(value, Mapping):
            return shown(value)
        pairs = [
            f"{shown(token)}={f'{bias:g}' if is_finite(bias) else brief(bias)}"
            for token, bias in islice(value.items(), _SHOWN_BIASES)
        ]
        return ",".join(pairs) + (",..." if len(value) > len(pairs) else "")


class Drafts(Kind):
    """Drafts verified in a round: None (derived), "auto" (each round anew), 0 or "full" (the whole block,
    never none), or a number."""

    @property
    def want(self) -> str:
        return "an integer of 0 or more, auto, or full"

    def parse(self, text: str) -> int | str:
        return self.settled(text) if text in ("auto", "full") else int(text)

    def accepts(self, value: Any) -> bool:
        named = isinstance(value, str) and value in ("auto", "full")
        return value is None or named or Whole(0).accepts(value)

    def settled(self, value: Any) -> Any:
        return 0 if value == "full" else value


class Threshold(Kind):
    """A confidence below which drafts end: a number from 0 (never) to 1, or auto (where it pays)."""

    @property
    def want(self) -> str:
        return "a number from 0 to 1, or auto"

    def parse(self, text: str) -> float | str:
        return text if text == "auto" else float(text)

    def accepts(self, value: Any) -> bool:
        return (isinstance(value, str) and value == "auto") or Number(0, 1).accepts(value)


@dataclass(frozen=True)
class About:
    """The declaration of one knob, written in the annotation of its field.

    `unset` says in words what happens when the knob is not set and its default is None. `env` is the name of
    its variable after the prefix, where that is not the knob's own.
    """

    kind: Kind
    help: str
    unset: str = "none"
    env: str = ""


@dataclass(frozen=True)
class Knob:
    """One declared setting. `env` is empty where a setting belongs to one call and never to a machine."""

    name: str
    default: Any
    env: str
    about: About

    @property
    def kind(self) -> Kind:
        return self.about.kind

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def shown_default(self) -> str:
        """The default as help and reference page show it."""
        if self.default is None or (self.kind.many and not self.default):
            return self.about.unset
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return str(self.default)

    def check(self, value: Any, called: str, *, written: bool = False) -> None:
        """Raises UsageError, calling the knob `called`, when `value` is not one that it takes.

        `written`: it was parsed from text, so that one which still is text reads as it was written.
        """
        if not self.kind.accepts(value):
            raise self.refusal(value, called, written=written)

    def parse(self, text: str, called: str) -> Any:
        """The value written as `text`, range not yet checked. Raises UsageError."""
        try:
            return self.kind.parse(text)
        except ValueError as error:
            raise self.refusal(text, called, written=True) from error

    def refusal(self, value: Any, called: str, *, written: bool = False) -> UsageError:
        """The error that refuses `value`: a text that is given where numbers are is shown in quotes."""
        quoted = isinstance(value, str) and not written and not self.kind.secret
        seen = brief(value) if quoted else self.kind.shown(value)
        names = [str(name) for name in self.kind.names] if isinstance(self.kind, Choice) else []
        return UsageError(
            f"{called} is {seen}, {self.kind.fault(value)}.",
            f"{suggestion(self.kind.shown(value), names)} Give {self.kind.want}.".strip(),
            field=self.name,
        )


def shown(value: Any) -> str:
    """A value in a message: text in quotes, unless it is a number."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return brief(value)
    text = str(value).strip()
    return text if len(text) <= _SHOWN_CHARACTERS else brief(value)


def suggestion(word: str, known: Sequence[str]) -> str:
    """`Did you mean ...?` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word[:_SHOWN_CHARACTERS], known, n=1)
    return f"Did you mean {near[0]}?" if near else ""


class Settings:
    """What the dataclasses of knobs share. Constructing one validates it."""

    group = ""
    env_prefix = "MLX_DSPARK_"

    def __post_init__(self) -> None:
        for knob in self.knobs():
            value = getattr(self, knob.name)
            knob.check(value, knob.name)
            object.__setattr__(self, knob.name, knob.kind.settled(value))

    @classmethod
    def knobs(cls) -> tuple[Knob, ...]:
        """The declared knobs, in order."""
        hints = get_type_hints(cls, include_extras=True)
        return tuple(
            Knob(
                field.name,
                _default_of(field),
                cls.env_prefix and cls.env_prefix + (about.env or field.name.upper()),
                about,
            )
            for field in dataclasses.fields(cast(Any, cls))
            for about in [hints[field.name].__metadata__[0]]
        )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Settings from keyword arguments. Raises UsageError for an unknown name or a value out of range."""
        refuse_unknown(options, [knob.name for knob in cls.knobs()])
        return cls(**options)


def refuse_unknown(names: Iterable[str], known: Sequence[str]) -> None:
    """Raises UsageError for a name of a setting that is none of the known ones."""
    for name in names:
        if name not in known:
            listed = f"The settings are {', '.join(known)}."
            raise UsageError(
                f"There is no setting {brief(name)}.", suggestion(name, known) or listed, field=name
            )


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
