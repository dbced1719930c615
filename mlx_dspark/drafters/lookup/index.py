"""Where each n-gram of a growing token sequence ended last."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST_MATCH = 32
"""Matches are measured up to this many tokens."""


class NgramIndex:
    """For every n from `min_n` to `max_n`: n-gram to the position just after its latest occurrence.

    The tokens are those observed; a suffix to look up may run past them by the anchor.
    Prompt lookup decoding (Saxena, 2023).
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        assert 1 <= min_n <= max_n <= LONGEST_MATCH
        self.tokens: list[int] = []
        self._sizes = range(max_n, min_n - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._shortest = min_n
        self._beginnings: set[tuple[int, ...]] = set()

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for n in self._sizes:
                if n <= end:
                    self._ends[tuple(self.tokens[end - n :])] = end
            self._beginnings.add(tuple(self.tokens[max(0, end - self._shortest + 1) :]))

    def may_match_after(self, anchor: int) -> bool:
        """Whether some token after `anchor` could end a suffix that occurred before.

        It cannot when the shortest n-gram but its last token never occurred.
        """
        if self._shortest == 1:
            return True
        suffix = (*self.tokens[-self._shortest :], anchor)[-self._shortest + 1 :]
        return suffix in self._beginnings

    def match(self, anchor: int) -> tuple[int, int] | None:
        """`(start, length)` for the longest n-gram of the suffix ending in `anchor` that occurred before.

        Its continuation begins at `start` and may be the anchor; `length` tokens before it match.
        """
        suffix = [*self.tokens[-(LONGEST_MATCH - 1) :], anchor]
        for n in self._sizes:
            if n > len(suffix):
                continue
            start = self._ends.get(tuple(suffix[-n:]))
            if start is not None:
                return start, self._matched(suffix, start, n)
        return None

    def _matched(self, suffix: list[int], start: int, n: int) -> int:
        while n < min(len(suffix), start) and suffix[-n - 1] == self.tokens[start - n - 1]:
            n += 1
        return n
