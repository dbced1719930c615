"""What finding, fetching and reading a model says while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One step as a short phrase, such as "reading weights"; `fraction` is 0 to 1, or None when not known.

    `detail` is what changes while the step lasts, such as the rate of a download; empty where nothing does.
    A download tells its bytes; a total of 0 is not known.
    """

    message: str
    fraction: float | None = None
    detail: str = ""
    bytes_done: int = 0
    bytes_total: int = 0


Progress = Callable[[LoadProgress], None]


def silent(_: LoadProgress) -> None:
    """The listener of callers that show nothing."""
