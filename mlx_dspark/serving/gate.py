"""How many answers may be under way, and when to come again where that is too many."""

from __future__ import annotations

import math

from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.serving.faults import refused

_WEIGHT = 0.2
_SHORTEST, _LONGEST = 1, 60


class Gate:
    """Counts answers from when they are admitted until they end. Used in one thread."""

    def __init__(self, rows: int, queue: int) -> None:
        """`rows` are made at once, `queue` may wait besides."""
        self._queue = queue
        self.resize(rows)
        self._seconds = 1.0
        self.under_way = 0

    def resize(self, rows: int) -> None:
        """So many are made at once from now on."""
        self._rows = rows
        self._most = rows + self._queue

    @property
    def waiting(self) -> int:
        """How many of them wait, at least."""
        return max(0, self.under_way - self._rows)

    def enter(self, answers: int, field: str = "n") -> None:
        """Admit so many, for which `field` asks. Raises Refused where there is no room now, RequestError
        where there never is."""
        if answers > self._most:
            raise RequestError(
                f"{field} asks for {answers} answers at once, and this server takes {self._most}.",
                "Ask for fewer.",
                field=field,
            )
        if self.under_way + answers > self._most:
            raise refused(
                "rate_limit",
                f"The queue is full: {self.under_way} answers are under way.",
                headers={"retry-after": str(self.retry_after)},
            )
        self.under_way += answers

    def leave(self, answers: int, seconds: float | None = None) -> None:
        """So many are over, after so long; None: they never began."""
        self.under_way -= answers
        if seconds is not None:
            self._seconds += _WEIGHT * (seconds - self._seconds)

    @property
    def retry_after(self) -> int:
        """Seconds after which there should be room."""
        return max(_SHORTEST, min(_LONGEST, math.ceil(self._seconds / self._rows)))
