"""One JSON value (RFC 8259) that arrives in pieces, refused at the first character that is not its own."""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_DEPTH = 128
"""Objects and arrays within each other; a value that is deeper is refused."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_WHOLE_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = re.compile(r"[0-9A-Fa-f]+")

_Step = Callable[[str, int], int]


class JsonText:
    """Reads a value character by character; `begun` is what was read of it already.

    Control characters that stand bare in a string, which JSON forbids and models write, are escaped. `taken`
    gives the text since the last call, of which a number or a word comes whole; all of it, joined, is the
    beginning of valid JSON, and valid JSON once `done`.
    """

    def __init__(self, begun: str = "") -> None:
        self.done = False
        self.failed = False
        self._out: list[str] = []
        self._all: list[str] = []
        self._stack: list[str] = []
        self._key = False
        self._scalar = ""
        self._hex = 0
        self._step: _Step = self._value
        self.feed(begun)

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._all)

    def taken(self) -> str:
        """What was read since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def feed(self, text: str, *, ended: bool = False) -> int:
        """Read on; how many characters belong to the value. With `ended`, no more will come."""
        at = 0
        while at < len(text) and not (self.done or self.failed):
            at = self._step(text, at)
        if ended and not (self.done or self.failed):
            if self._step == self._scalar_on and not self._stack:
                self._end_scalar()
            else:
                self.failed = True
        return at

    # Each step reads from `at` and gives the next place; where that is the same, the step changed.

    def _value(self, text: str, at: int) -> int:
        if space := _SPACE.match(text, at):
            return self._keep(space.group(), space.end()) if self._stack else space.end()
        character = text[at]
        if character in "{[":
            return self._open(character, at)
        if character == '"':
            return self._begin_string(at, key=False)
        if _SCALAR.match(character):
            self._scalar, self._step = "", self._scalar_on
            return at
        return self._fail(at)

    def _first_value(self, text: str, at: int) -> int:
        if text[at] == "]":
            return self._close(text[at], at)
        if not _SPACE.match(text, at):
            self._step = self._value
        return self._value(text, at)

    def _open(self, character: str, at: int) -> int:
        if len(self._stack) == MAX_DEPTH:
            return self._fail(at)
        self._stack.append("}" if character == "{" else "]")
        self._step = self._first_key if character == "{" else self._first_value
        return self._keep(character, at + 1)

    def _first_key(self, text: str, at: int) -> int:
        return self._close(text[at], at) if text[at] == "}" else self._next_key(text, at)

    def _next_key(self, text: str, at: int) -> int:
        if space := _SPACE.match(text, at):
            return self._keep(space.group(), space.end())
        return self._begin_string(at, key=True) if text[at] == '"' else self._fail(at)

    def _colon(self, text: str, at: int) -> int:
        if space := _SPACE.match(text, at):
            return self._keep(space.group(), space.end())
        if text[at] != ":":
            return self._fail(at)
        self._step = self._value
        return self._keep(":", at + 1)

    def _more(self, text: str, at: int) -> int:
        if space := _SPACE.match(text, at):
            return self._keep(space.group(), space.end())
        character = text[at]
        if character == self._stack[-1]:
            return self._close(character, at)
        if character != ",":
            return self._fail(at)
        self._step = self._next_key if self._stack[-1] == "}" else self._value
        return self._keep(character, at + 1)

    def _close(self, character: str, at: int) -> int:
        self._stack.pop()
        self._end_value()
        return self._keep(character, at + 1)

    def _begin_string(self, at: int, *, key: bool) -> int:
        self._key, self._step = key, self._string
        return self._keep('"', at + 1)

    def _string(self, text: str, at: int) -> int:
        if plain := _PLAIN.match(text, at):
            return self._keep(plain.group(), plain.end())
        character = text[at]
        if character == "\\":
            self._step = self._escape
            return self._keep(character, at + 1)
        if character != '"':
            return self._keep(f"\\u{ord(character):04x}", at + 1)
        if self._key:
            self._step = self._colon
        else:
            self._end_value()
        return self._keep(character, at + 1)

    def _escape(self, text: str, at: int) -> int:
        character = text[at]
        if character not in '"\\/bfnrtu':
            return self._fail(at)
        self._hex = 4
        self._step = self._hexes if character == "u" else self._string
        return self._keep(character, at + 1)

    def _hexes(self, text: str, at: int) -> int:
        if not _HEX.match(text[at]):
            return self._fail(at)
        self._hex -= 1
        if not self._hex:
            self._step = self._string
        return self._keep(text[at], at + 1)

    def _scalar_on(self, text: str, at: int) -> int:
        if not (run := _SCALAR.match(text, at)):
            self._end_scalar()
            return at
        self._scalar += run.group()
        return run.end()

    def _end_scalar(self) -> None:
        if _WHOLE_SCALAR.fullmatch(self._scalar):
            self._keep(self._scalar, 0)
            self._end_value()
        else:
            self.failed = True

    def _end_value(self) -> None:
        self._step = self._more
        self.done = not self._stack

    def _keep(self, text: str, end: int) -> int:
        self._out.append(text)
        self._all.append(text)
        return end

    def _fail(self, at: int) -> int:
        self.failed = True
        return at
