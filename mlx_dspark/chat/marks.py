"""Marks in text that arrives in pieces, and what says that one is only quoted."""

from __future__ import annotations

from collections.abc import Iterable

_QUOTES = "`\"'“”‘’«»"


def held_back(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of `text` that begins a mark without being all of it."""
    marks = tuple(marks)
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0


class Prose:
    """What the text so far says about a mark that comes next: whether it is quoted.

    Quoted is what stands in a fenced block of code (three backticks or tildes at the beginning of a line), in
    code within a line (an odd number of backticks before it), or right after a quotation mark.
    """

    def __init__(self) -> None:
        self._fenced = False
        self._lead = ""
        self._ticks = 0
        self._last = ""

    def advance(self, text: str) -> None:
        """More text, none of which is a mark."""
        if not text:
            return
        for i, part in enumerate(text.split("\n")):
            if i:
                self._end_line()
            self._ticks += part.count("`")
            if len(self._lead) < 3:
                self._lead = (self._lead + part).lstrip()[:3]
        self._last = text[-1]

    def _end_line(self) -> None:
        self._fenced ^= self._lead in ("```", "~~~")
        self._lead, self._ticks = "", 0

    @property
    def line_begins(self) -> bool:
        """Whether only white space stands on the line so far."""
        return not self._lead

    @property
    def quoting(self) -> bool:
        """Whether what comes next is quoted."""
        return self._fenced or self._ticks % 2 == 1 or self.after_quote

    @property
    def fenced(self) -> bool:
        """Whether what comes next stands in a block of code."""
        return self._fenced

    @property
    def after_quote(self) -> bool:
        """Whether the last character is a quotation mark or a backtick."""
        return self._last != "" and self._last in _QUOTES


def is_quote(character: str) -> bool:
    """Whether a character is a quotation mark or a backtick."""
    return character != "" and character in _QUOTES
