"""Who says how many drafts a row may have verified: the protocols, and numbers that stay. No MLX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mlx_dspark.foundation.events import UNKNOWN_OUTLOOK, Outlook, RoundReport


class RowCaps(Protocol):
    """The caps of one row. Everything learnt comes through `observe`; the rest is pure.

    `rows` is how many rows the round in question has: what a width costs depends on it.
    """

    def caps(self, rows: int = 1) -> Mapping[str, int]:
        """Most drafts per source, this round; empty or all 0 means plain decoding."""
        ...

    def settled(self, rows: int) -> object | None:
        """While this is the same object, caps of so many rows, whether they are parked and what they expect
        of a plain round stay as they are, for rows that do not get DEPTH_STEP deeper; None where that cannot
        be said."""
        ...

    def parked(self, rows: int = 1) -> bool:
        """Whether drafting was losing time, or would: a round without drafts is then plain for that."""
        ...

    def measuring(self, rows: int = 1) -> bool:
        """Whether plain rounds are being timed, so that none should be launched ahead."""
        ...

    def thresholds(self, rows: int = 1) -> Mapping[str, float]:
        """Per source, the confidence below which its drafts end; absent or 0: they are as long as allowed."""
        ...

    def outlook(self, rows: int, source: str, drafted: int, width: int) -> Outlook:
        """What is expected of a round of so many rows and such a width, in which `source` drafts `drafted`
        tokens for this row."""
        ...

    def observe(self, report: RoundReport) -> None:
        """Told every round of the row, in order, prefill included."""
        ...


class CapPolicy(Protocol):
    """Makes the caps of new rows; what rows share (round times) lives here."""

    def row(self) -> RowCaps: ...


class FixedCaps:
    """A number for every source, never overridden; nothing is expected of it. Serves as policy and caps."""

    def __init__(self, caps: Mapping[str, int]) -> None:
        self._caps = dict(caps)

    def row(self) -> FixedCaps:
        return self

    def caps(self, rows: int = 1) -> Mapping[str, int]:
        del rows
        return self._caps

    def settled(self, rows: int) -> object | None:
        del rows
        return None

    def parked(self, rows: int = 1) -> bool:
        del rows
        return False

    def measuring(self, rows: int = 1) -> bool:
        del rows
        return False

    def thresholds(self, rows: int = 1) -> Mapping[str, float]:
        del rows
        return {}

    def outlook(self, rows: int, source: str, drafted: int, width: int) -> Outlook:
        del rows, source, drafted, width
        return UNKNOWN_OUTLOOK

    def observe(self, report: RoundReport) -> None:
        del report
