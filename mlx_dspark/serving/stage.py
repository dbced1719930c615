"""How far a change of the model has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal[
    "finding",
    "fetching",
    "draining",
    "loading",
    "measuring",
    "warming up",
    "restoring",
    "racing",
]


@dataclass(frozen=True)
class Stage:
    """`model` is what it is about, `message` a short phrase for people, `fraction` 0 to 1 or None.

    Of a download `bytes_total` is 0 where the hub does not tell.
    """

    phase: Phase
    model: str
    message: str = ""
    fraction: float | None = None
    bytes_done: int = 0
    bytes_total: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it; `download` is None outside of one."""
        download = None
        if self.phase == "fetching":
            download = {"bytes_done": self.bytes_done, "bytes_total": self.bytes_total or None}
        return {
            "phase": self.phase,
            "model": self.model,
            "message": self.message,
            "fraction": self.fraction,
            "download": download,
        }
