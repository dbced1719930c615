"""Typed reading of one row of a registry file: every error names file, line, row and field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlx_dspark.foundation.errors import BadCheckpoint
from mlx_dspark.foundation.numbers import brief, is_finite, is_whole

TARGET = "target"
ALL = "all"
"""The content of figures that are a mean over contents."""


@dataclass(frozen=True)
class Expected:
    """How long drafts of one mode are on one content, as measured with whole drafts of `cap` tokens.

    `accept_length` counts the tokens a round commits, the target's own included; `reached[i]` is the share of
    rounds that accepted at least `i + 1` drafts, empty where that is not known. `basis` says of what the
    figures are where that is not the row's own target on prompts like those that the guard measures.
    """

    mode: str
    content: str
    cap: int
    accept_length: float
    reached: tuple[float, ...] = ()
    basis: str = ""

    @property
    def loose(self) -> bool:
        """Whether a right drafter may be some way off: a mean over contents, or figures of other prompts."""
        return bool(self.basis) or self.content == ALL


class Row:
    """One [[pair]] of `file`, which begins at `line` (0: not known) and is the `number`th."""

    def __init__(self, values: Mapping[str, Any], file: Path, line: int, number: int) -> None:
        self.values = dict(values)
        self.file = file
        self._line = f", line {line}" if line else ""
        self._number = number
        self._read: set[str] = set()

    def bad(self, name: str, problem: str) -> NoReturn:
        """Raises BadCheckpoint about field `name`."""
        called = self.values.get("id")
        row = repr(called) if isinstance(called, str) and called else f"number {self._number}"
        raise BadCheckpoint(
            f"{self.file}{self._line}: {name} of the pair {row} {problem}.", "Correct the row.", field=name
        )

    def required(self, name: str) -> str:
        """A text that must be there."""
        value = self.word(name)
        return value if value is not None else self.bad(name, "is missing")

    def word(self, name: str) -> str | None:
        """A text that is not empty; None where it is left out."""
        value = self._take(name)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            self.bad(name, f"is {brief(value)}, not a text")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """A list of texts; empty where it is left out."""
        value = self._take(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            self.bad(name, f"is {brief(value)}, not a list of texts")
        return tuple(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._take(name)
        if value is not None and not isinstance(value, bool):
            self.bad(name, f"is {brief(value)}, not true or false")
        return default if value is None else value

    def whole(self, name: str) -> int | None:
        """A number of 1 or more without a fraction; None where it is left out."""
        value = self._take(name)
        if value is not None and (not is_whole(value) or value < 1):
            self.bad(name, f"is {brief(value)}, not a whole number of at least 1")
        return value

    def number(self, name: str) -> float | None:
        """A number above 0; None where it is left out."""
        value = self._take(name)
        if value is not None and (not is_finite(value) or value <= 0):
            self.bad(name, f"is {brief(value)}, not a number above 0")
        return None if value is None else float(value)

    def numbers(self, name: str) -> dict[str, float]:
        """A table of numbers above 0; empty where it is left out."""
        value = self._take(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.bad(name, f"is {brief(value)}, not a table of numbers")
        for key, each in value.items():
            if not is_finite(each) or each <= 0:
                self.bad(f"{name}.{key}", f"is {brief(each)}, not a number above 0")
        return {key: float(each) for key, each in value.items()}

    def wholes(self, name: str, keys: Collection[str]) -> dict[str, int]:
        """A table of whole numbers of 1 or more for some of the `keys`; empty where it is left out."""
        found = self.numbers(name)
        for key, each in found.items():
            self._one_of(f"{name}.{key}", key, keys)
            if each != int(each) or each < 1:
                self.bad(f"{name}.{key}", f"is {brief(each)}, not a whole number of at least 1")
        return {key: int(each) for key, each in found.items()}

    def texts(self, name: str, keys: Collection[str]) -> dict[str, str]:
        """A table of texts for some of the `keys`, or one text for all but the first of them; empty where it
        is left out."""
        value = self._take(name)
        if value is None:
            return {}
        if isinstance(value, str) and value.strip():
            return dict.fromkeys(list(keys)[1:], value)
        if not isinstance(value, dict):
            self.bad(name, f"is {brief(value)}, neither a text nor a table of texts")
        for key, each in value.items():
            self._one_of(f"{name}.{key}", key, keys)
            if not isinstance(each, str) or not each.strip():
                self.bad(f"{name}.{key}", f"is {brief(each)}, not a text")
        return dict(value)

    def unknown(self, modes: Collection[str]) -> tuple[str, ...]:
        """The names of fields that nothing could be found out about: of this row, and not given in it."""
        names = self.words("unknown")
        for name in names:
            field, _, part = name.partition(".")
            given = self.values.get(field)
            if field not in self._read or field == "unknown":
                self.bad("unknown", f"names {name!r}, which is not a field that a row has")
            if part and part not in (TARGET, *modes):
                self.bad("unknown", f"names {name!r}, and drafters names {', '.join(modes)}")
            if part in given if part and isinstance(given, dict) else given is not None:
                self.bad("unknown", f"names {name!r}, which the row gives")
        return names

    def _one_of(self, name: str, key: str, keys: Collection[str]) -> None:
        if key not in keys:
            self.bad(name, f"is of none of {', '.join(keys)}")

    def drafters(self, modes: Collection[str]) -> dict[str, str]:
        """Who drafts in each mode: at least one."""
        value = self._take("drafters")
        if not isinstance(value, dict) or not value:
            self.bad("drafters", "is missing" if value is None else f"is {brief(value)}, not a table by mode")
        for mode, name in value.items():
            if mode not in modes:
                self.bad("drafters", f"has the mode {mode!r}, which is none of {', '.join(modes)}")
            if not isinstance(name, str) or not name:
                self.bad(f"drafters.{mode}", f"is {brief(name)}, not a drafter's name")
        return dict(value)

    def expected(self, modes: Collection[str]) -> tuple[Expected, ...]:
        """The entries of [[pair.expected]]."""
        value = self._take("expected")
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.bad("expected", "is not a list of tables: write [[pair.expected]]")
        found = [self._one_expected(item, modes) for item in value]
        if len({(each.mode, each.content) for each in found}) < len(found):
            self.bad("expected", "has two entries for one mode and content")
        return tuple(found)

    def _one_expected(self, values: Mapping[str, Any], modes: Collection[str]) -> Expected:
        fields = {"mode", "content", "cap", "accept_length", "reached", "basis"}
        for name in sorted(values.keys() - fields):
            self.bad(f"expected.{name}", "is not a field of it")
        mode, content = values.get("mode"), values.get("content", ALL)
        cap, length, reached = values.get("cap"), values.get("accept_length"), values.get("reached", [])
        if not isinstance(mode, str) or mode not in modes:
            self.bad("expected.mode", f"is {brief(mode)}, and drafters names {', '.join(modes)}")
        if not isinstance(content, str) or not content:
            self.bad("expected.content", f"is {brief(content)}, not a text")
        if not is_whole(cap) or cap < 1:
            self.bad("expected.cap", f"is {brief(cap)}, not a whole number of at least 1")
        if not is_finite(length) or not 1 <= length <= cap + 1:
            self.bad("expected.accept_length", f"is {brief(length)}, not from 1 to {cap + 1}")
        falls = isinstance(reached, list) and all(is_finite(share) and 0 <= share <= 1 for share in reached)
        if not falls or sorted(reached, reverse=True) != reached or len(reached) not in (0, cap):
            self.bad("expected.reached", f"is {brief(reached)}, not {cap} shares from 1 to 0 that never rise")
        if not isinstance(basis := values.get("basis", ""), str):
            self.bad("expected.basis", f"is {brief(basis)}, not a text")
        return Expected(mode, content, cap, float(length), tuple(map(float, reached)), basis)

    def refuse_unknown(self) -> None:
        """Raises BadCheckpoint where the row has a field that nothing reads."""
        for name in sorted(self.values.keys() - self._read):
            self.bad(name, "is not a field that a row has")

    def _take(self, name: str) -> Any:
        self._read.add(name)
        return self.values.get(name)
