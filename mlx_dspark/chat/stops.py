"""Where an answer's text ends: stop strings and end-of-sequence ids, neither of them ever shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mlx_dspark.chat.detokenize import Detokenizer
from mlx_dspark.foundation.errors import RequestError


class StopFinder:
    """Looks for stop strings in text that arrives in pieces.

    Law: what `push` and `finish` give out does not depend on where the text is cut into pieces. The match
    that ends first wins; of those that end at one place, the longest. Only text that might begin a stop
    string waits.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises RequestError when a stop string is empty."""
        if not all(stops):
            raise RequestError(
                "stop holds an empty text.", "Give stop strings of at least one character.", field="stop"
            )
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    @property
    def found(self) -> bool:
        """Whether a stop string has come."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """The text that is now certain to be shown."""
        if self.found:
            return ""
        self._held += text
        matches = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            end, at = min(matches)
            self.matched = self._held[at:end]
            return self._give(at)
        return self._give(len(self._held) - self._waiting())

    def finish(self) -> str:
        """The text that was waiting; no more will come."""
        return "" if self.found else self._give(len(self._held))

    def _give(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        return shown

    def _waiting(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


class TextStops:
    """One answer's text as it grows, and the check that ends it. Implements StopCheck.

    The engine feeds it every committed token in order; the reader takes what may be shown.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), end_ids: Collection[int] = ()
    ) -> None:
        """Raises RequestError when a stop string is empty."""
        self._detokenizer = detokenizer
        self._finder = StopFinder(stops)
        self._end_ids = frozenset(end_ids)
        self._ready: list[str] = []
        self._ended = False

    def __call__(self, token: int) -> bool:
        """Take one committed token; True when the text ends with it. Later tokens are not read."""
        if not self._ended and token in self._end_ids:
            self._ended = True
        if not self._ended:
            self._ready.append(self._finder.push(self._detokenizer.push(token)))
            self._ended = self._finder.found
        return self._ended

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._finder.matched

    def take(self) -> str:
        """The text that became certain since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def finish(self) -> str:
        """The last of the text. Call once, when no more tokens come."""
        if not self._finder.found:
            self._ready.append(self._finder.push(self._detokenizer.finish()))
            self._ready.append(self._finder.finish())
        self._ended = True
        return self.take()
