"""How many drafts a row may have verified this round. Numbers in, numbers out; no MLX.

A cap is chosen per row and per drafter (source). A cap of 0 is plain decoding, and always a candidate unless
the user pinned a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from mlx_dspark.engine.live import LiveCaps
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.events import UNKNOWN_OUTLOOK, Outlook, RoundReport
from mlx_dspark.foundation.source import Source

MaxDraft = int | Literal["auto"] | None


class RowCaps(Protocol):
    """The caps of one row. Everything learnt comes through `observe`; the rest is pure.

    `rows` is how many rows the round in question has: what a width costs depends on it.
    """

    def caps(self, rows: int = 1) -> Mapping[str, int]:
        """Most drafts per source, this round; empty or all 0 means plain decoding."""
        ...

    def parked(self, rows: int = 1) -> bool:
        """Whether the row decodes plainly because drafting was losing time, or would."""
        ...

    def measuring(self, rows: int = 1) -> bool:
        """Whether plain rounds are being timed, so that none should be launched ahead."""
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

    def parked(self, rows: int = 1) -> bool:
        del rows
        return False

    def measuring(self, rows: int = 1) -> bool:
        del rows
        return False

    def outlook(self, rows: int, source: str, drafted: int, width: int) -> Outlook:
        del rows, source, drafted, width
        return UNKNOWN_OUTLOOK

    def observe(self, report: RoundReport) -> None:
        del report


def cap_policy(
    max_draft: MaxDraft,
    sources: Sequence[Source],
    *,
    curves: CostCurves | None = None,
    acceptance: Mapping[str, Sequence[float]] | None = None,
) -> CapPolicy:
    """The policy a user's `--max-draft` asks for.

    None: derived once for a request and its depth, parked where it loses; without `curves`, whole blocks or
    none. "auto": the length chosen every round, 0 included. 0: the drafter's whole block, always. N: at most
    N, always. `curves` are this machine's prices of the pair; `acceptance` by source is what is recorded of
    it, the chance of each draft given those before it. Raises UsageError for another `max_draft`.
    """
    if max_draft is None or max_draft == "auto":
        return LiveCaps(sources, choose=max_draft == "auto", curves=curves, acceptance=acceptance)
    if not isinstance(max_draft, int) or isinstance(max_draft, bool) or max_draft < 0:
        raise UsageError(
            f"max_draft is {max_draft!r}, which is out of range.",
            'Give a positive number, 0 for the whole block, or "auto".',
            field="max_draft",
        )
    pinned = {s.name: min(max_draft, s.max_draft) if max_draft else s.max_draft for s in sources}
    return LiveCaps(sources, choose=False, curves=curves, acceptance=acceptance, pinned=pinned)
