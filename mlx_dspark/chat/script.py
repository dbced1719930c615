"""What a grammar asks of the text: a call's syntax as a sequence of questions, answered as the text arrives.

A grammar is a generator. It yields a `Match`, `Maybe`, `Until` or `Json`, and is sent what was read; it
yields a `Declare`, `Begin`, `End` or `Calls` to say what it found. Where the text is cut into pieces makes no
difference to it. It raises Broken where what it read is not a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from mlx_dspark.chat.json_text import JsonText
from mlx_dspark.chat.marks import held_back

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each declared tool, by its name."""


class Broken(Exception):
    """The text is not a call."""


class Ask(ABC):
    """A question to the text: `feed` gives how much of it was read, until `done` or `failed`."""

    done = False
    failed = False
    value: Any = None

    @abstractmethod
    def feed(self, text: str, ended: bool) -> int:
        """Read from `text`, what was not read before and then more of it; with `ended`, no more will come."""


class Match(Ask):
    """Text that a pattern matches; the value is the match.

    The pattern ends in a literal, bounds its repeats, and looks at nothing around it: a word boundary at the
    end of what has arrived would be a guess.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = regex.compile(pattern, regex.DOTALL)

    def feed(self, text: str, ended: bool) -> int:
        found = self._pattern.match(text, partial=not ended)
        if found is None:
            return self._miss()
        if found.partial:
            return 0
        self.value, self.done = found, True
        return found.end()

    def _miss(self) -> int:
        self.failed = True
        return 0


class Maybe(Match):
    """As Match, but text that does not match is left alone; the value is then None."""

    def _miss(self) -> int:
        self.done = True
        return 0


class Until(Ask):
    """Text up to `end`, which is read too; the value is the text before it.

    `spans` are pairs of marks between which `end` is not looked for. With `or_all`, the end of the answer
    will do in place of `end`.
    """

    def __init__(self, end: str, spans: Sequence[tuple[str, str]] = (), *, or_all: bool = False) -> None:
        self._end, self._or_all = end, or_all
        self._outside = dict(spans)
        self._closer = ""
        self._parts: list[str] = []

    def feed(self, text: str, ended: bool) -> int:
        at = 0
        while not self.done:
            marks = (self._closer,) if self._closer else tuple(filter(None, (self._end, *self._outside)))
            place, mark = min(((p, m) for m in marks if (p := text.find(m, at)) >= 0), default=(-1, ""))
            if place < 0:
                return self._rest(text, at, marks, ended)
            at = self._found(text, at, place, mark)
        return at

    def _found(self, text: str, at: int, place: int, mark: str) -> int:
        end = place + len(mark)
        if not self._closer and mark == self._end:
            self._parts.append(text[at:place])
            self._finish()
        else:
            self._parts.append(text[at:end])
            self._closer = "" if self._closer else self._outside[mark]
        return end

    def _rest(self, text: str, at: int, marks: tuple[str, ...], ended: bool) -> int:
        end = len(text) if ended else len(text) - held_back(text[at:], marks)
        self._parts.append(text[at:end])
        if ended and self._or_all:
            self._finish()
        elif ended:
            self.failed = True
        return end

    def _finish(self) -> None:
        self.value, self.done = "".join(self._parts), True


class Json(Ask):
    """A JSON value, of which `begun` was read already; the value is its text.

    `streamed`: the pieces are the arguments of the call that began, and are given out as they come.
    """

    def __init__(self, begun: str = "", *, streamed: bool = False) -> None:
        self.streamed = streamed
        self._text = JsonText(begun)

    def feed(self, text: str, ended: bool) -> int:
        used = self._text.feed(text, ended=ended)
        self.done, self.failed = self._text.done, self._text.failed
        self.value = self._text.text if self.done else None
        return used

    def taken(self) -> str:
        """What was read since the last call."""
        return self._text.taken()


@dataclass(frozen=True, slots=True)
class Declare:
    """A tool of this name is about to be called. Where there is none, all that follows is text."""

    name: str


@dataclass(frozen=True, slots=True)
class Begin:
    """The call begins whose arguments a streamed Json reads next."""

    name: str


@dataclass(frozen=True, slots=True)
class End:
    """The call that began is complete."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Whole calls, each a name and its arguments. One that is not declared breaks them all."""

    calls: tuple[tuple[str, Any], ...]


Say = Declare | Begin | End | Calls
Script = Generator[Ask | Say, Any, None]


@dataclass(frozen=True, slots=True)
class Grammar:
    """One syntax of tool calls: what opens a section of them, and how a section is read from there on.

    `marks` are its other literals, some of which a vocabulary may hold as control tokens.
    """

    name: str
    openers: tuple[str, ...]
    read: Callable[[str, Schemas], Script]
    marks: tuple[str, ...] = ()
