"""Whether the engine lives and delivers, judged by what it delivered. No MLX, no HTTP."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Protocol

PATIENCE = 4.0
"""Seconds without a sign of life that are always borne."""
VISIBLE = 4.8
"""Seconds after which silence is told of in any case."""
_TIMES_LONGEST = 3.0
"""How many times the longest wait of late is borne: a chunk of a long prompt takes its time."""
_LATE = 64


class Delivers(Protocol):
    """A request that the engine has, until it has ended."""

    @property
    def ended(self) -> bool: ...


@dataclass(frozen=True)
class Vitals:
    """`reason` says what is wrong where something is; `silent` is in seconds, 0 while nobody waits."""

    state: str
    silent: float = 0.0
    reason: str = ""

    @property
    def well(self) -> bool:
        return self.state == "ok"


class Pulse:
    """When the engine last delivered something, and to whom it owes more."""

    def __init__(self, alive: Callable[[], bool], *, now: Callable[[], float] = monotonic) -> None:
        self._alive = alive
        self._now = now
        self._lock = Lock()
        self._owed: list[Delivers] = []
        self._last = now()
        self._waits: deque[float] = deque(maxlen=_LATE)

    def expect(self, request: Delivers) -> None:
        """The engine has one more request."""
        with self._lock:
            if not self._owes():
                self._last = self._now()
            self._owed.append(request)

    def heard(self) -> None:
        """The engine delivered something. Called in its thread, and never waits long."""
        with self._lock:
            now = self._now()
            self._waits.append(now - self._last)
            self._last = now

    def vitals(self) -> Vitals:
        """How the engine is now."""
        if not self._alive():
            return Vitals("dead", reason="The engine's thread has ended.")
        with self._lock:
            silent = self._now() - self._last if self._owes() else 0.0
            patience = min(VISIBLE, max(PATIENCE, self._borne()))
        if silent <= patience:
            return Vitals("ok", silent)
        return Vitals("stalled", silent, f"The engine has delivered nothing for {silent:.1f} s.")

    def lost(self, seconds: float) -> bool:
        """Whether the engine has delivered nothing for so long, and for longer than its waits of late allow
        for."""
        silent = self.vitals().silent
        with self._lock:
            return silent > max(seconds, self._borne())

    def _borne(self) -> float:
        return _TIMES_LONGEST * max(self._waits, default=0.0)

    def _owes(self) -> int:
        self._owed = [request for request in self._owed if not request.ended]
        return len(self._owed)
