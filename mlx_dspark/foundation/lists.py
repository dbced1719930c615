"""Kinds of knobs that hold several values in one text, with commas between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_dspark.foundation.knobs import Choice, Drafts, Kind, Whole, shown

DERIVED = "derived"


@dataclass(frozen=True)
class Listed(Kind):
    """One to `most` different values of the kind `item`, at least `least`; None means "not set"."""

    item: Kind
    least: int = 1
    most: int = 64

    @property
    def want(self) -> str:
        several = "several" if self.least == 1 else f"{self.least} to {self.most}"
        return f"{several} of these with commas between: {self.item.want}"

    def parse(self, text: str) -> tuple[Any, ...]:
        return tuple(self.item.parse(part.strip()) for part in text.split(","))

    def accepts(self, value: Any) -> bool:
        if value is None:
            return True
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        return (
            listed
            and self.least <= len(value) <= self.most
            and all(map(self.item.accepts, value))
            and len({*value}) == len(value)
        )

    def settled(self, value: Any) -> Any:
        return value if value is None else tuple(map(self.item.settled, value))

    def shown(self, value: Any) -> str:
        if not isinstance(value, list | tuple):
            return shown(value)
        return ",".join(map(self.item.shown, value))

    def fault(self, value: Any) -> str:
        if isinstance(value, list | tuple) and all(map(self.item.accepts, value)):
            twice = [each for i, each in enumerate(value) if each in value[:i]]
            if twice:
                return f"where {self.item.shown(twice[0])} is named twice"
        return super().fault(value)


class Sizes(Whole):
    """A number of tokens; `k` after it stands for 1024."""

    @property
    def want(self) -> str:
        return f"a number of tokens from {self.low}, or one like 8k"

    def parse(self, text: str) -> int:
        return int(text[:-1]) * 1024 if text.lower().endswith("k") else int(text)


class Caps(Kind):
    """`Drafts`, where `derived` stands for None: what happens without --max-draft."""

    @property
    def want(self) -> str:
        return "derived, auto, full, or an integer from 0, where 0 is full too"

    def parse(self, text: str) -> int | str | None:
        return None if text == DERIVED else Drafts().parse(text)

    def shown(self, value: Any) -> str:
        return DERIVED if value is None else shown(value)

    def accepts(self, value: Any) -> bool:
        return Drafts().accepts(value)

    def settled(self, value: Any) -> Any:
        return Drafts().settled(value)


@dataclass(frozen=True)
class Drafting:
    """Who drafts and at most how much: a `mode` of LoadSettings, or `control`, and a `max_draft`."""

    mode: str
    max_draft: int | str | None = None


@dataclass(frozen=True)
class Draftings(Kind):
    """A mode, or a mode and a cap as MODE:CAP; those of `bare` take no cap."""

    modes: tuple[str, ...]
    bare: tuple[str, ...]

    @property
    def want(self) -> str:
        names, bare = ", ".join((*self.bare, *self.modes)), " and ".join(self.bare)
        return f"{names}; all but {bare} may have a cap, as MODE:CAP"

    def parse(self, text: str) -> Drafting:
        mode, colon, cap = text.partition(":")
        return Drafting(mode, Caps().parse(cap) if colon else None)

    def shown(self, value: Any) -> str:
        if not isinstance(value, Drafting):
            return shown(value)
        return value.mode if value.max_draft is None else f"{value.mode}:{value.max_draft}"

    def accepts(self, value: Any) -> bool:
        if not isinstance(value, Drafting):
            return False
        if value.mode in self.bare:
            return value.max_draft is None
        return Choice(self.modes).accepts(value.mode) and Caps().accepts(value.max_draft)

    def settled(self, value: Any) -> Any:
        return replace(value, max_draft=Caps().settled(value.max_draft))
