"""The lookup drafter: no weights, no taps, and a miss costs nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_dspark.contracts import Ask, Observation, Proposal, Source, Target
from mlx_dspark.drafters.lookup.index import LONGEST_MATCH, NgramIndex
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.numbers import brief
from mlx_dspark.nn.probs import PointMass

LONGEST_DRAFT = 64
"""No draft is longer, whatever is asked for."""

LONG_MATCH = 8
"""A match of this many tokens earns a draft of up to twice its length."""

LOOKUP, LOOKUP_LONG = "lookup", "lookup-long"
"""Who drafts after a short match, and after a long one: how far a draft is right differs between the two, so
caps are chosen apart."""


@dataclass
class LongDraftGate:
    """Forbids match-scaled drafts after two that were mostly refused; one probe after eight base drafts."""

    failures: int = 0
    base_rounds: int = 0

    @property
    def open(self) -> bool:
        return self.failures < 2 or self.base_rounds >= 8

    def observe(self, long: bool, drafted: int, accepted: int) -> None:
        if not long:
            self.base_rounds += 1
            return
        self.base_rounds = 0
        self.failures = self.failures + 1 if 2 * accepted < drafted else 0


@dataclass
class _Row:
    index: NgramIndex
    gate: LongDraftGate = field(default_factory=LongDraftGate)
    asked: int = 0


class LookupRows:
    """One n-gram index and one gate per row."""

    def __init__(self, rows: list[_Row]) -> None:
        self.rows = rows

    @property
    def depth(self) -> list[int]:
        return [len(row.index.tokens) for row in self.rows]

    def join(self, other: LookupRows) -> None:
        self.rows += other.rows

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


class LookupDrafter:
    """Drafts what followed the latest earlier occurrence of the last `min_n` to `max_n` tokens.

    A draft has `max_draft` tokens; a match of 8 tokens or more earns up to twice its length, at most
    `long_draft`, unless the gate is closed. `long_draft` of `max_draft` or less turns scaling off.
    Raises UsageError when a size is out of range.
    """

    name = LOOKUP
    taps: tuple[int, ...] = ()

    def __init__(self, *, min_n: int = 3, max_n: int = 4, max_draft: int = 6, long_draft: int = 32) -> None:
        for field_name, value, least in (("max_draft", max_draft, 1), ("lookup_long_draft", long_draft, 0)):
            if not isinstance(value, int) or not least <= value <= LONGEST_DRAFT:
                raise UsageError(
                    f"{field_name} is {brief(value)}, which is out of range.",
                    f"Give an integer from {least} to {LONGEST_DRAFT}.",
                    field=field_name,
                )
        if not 1 <= min_n <= max_n <= LONGEST_MATCH:
            raise UsageError(
                f"min_n {min_n} and max_n {max_n} are no range of n-gram sizes.",
                f"Give 1 <= min_n <= max_n <= {LONGEST_MATCH}.",
                field="max_n",
            )
        self._min_n, self._max_n = min_n, max_n
        self._base, self._long = max_draft, max(max_draft, long_draft)
        self._vocab = 0

    @property
    def max_draft(self) -> int:
        return self._long

    @property
    def sources(self) -> tuple[Source, ...]:
        usual = Source(LOOKUP, self._base, sporadic=True)
        scaled = Source(LOOKUP_LONG, self._long, sporadic=True, likely=0.9)
        return (usual, scaled) if self._long > self._base else (usual,)

    def bind(self, target: Target) -> None:
        self._vocab = target.spec.vocab

    def new_rows(self, n: int = 1) -> LookupRows:
        return LookupRows([_Row(NgramIndex(self._min_n, self._max_n)) for _ in range(n)])

    def observe(self, rows: LookupRows, seen: Observation) -> None:
        for row, tokens, drafted, accepted in zip(
            rows.rows, seen.tokens, seen.drafted, seen.accepted, strict=True
        ):
            row.index.extend(tokens)
            if drafted and drafted == row.asked:
                row.gate.observe(drafted > self._base, drafted, accepted)
            row.asked = 0

    def blind(self, rows: LookupRows, anchors: Sequence[int], asked: Collection[str]) -> bool:
        return not any(
            row.index.may_match_after(anchor) for row, anchor in zip(rows.rows, anchors, strict=True)
        )

    def propose(self, rows: LookupRows, ask: Ask) -> Proposal:
        usual, scaled = (
            [min(cap, most) for cap, most in zip(ask.caps, ask.by_source.get(name, ask.caps), strict=True)]
            for name in (LOOKUP, LOOKUP_LONG)
        )
        asked = zip(rows.rows, ask.anchors, usual, scaled, strict=True)
        found, source = zip(*(self._draft(*each) for each in asked), strict=True)
        width = max(map(len, found))
        tokens = mx.array([draft + [0] * (width - len(draft)) for draft in found], dtype=mx.int32)
        tokens = tokens.reshape(len(found), width)
        return Proposal(tokens, tuple(map(len, found)), PointMass(tokens, self._vocab), source)

    def _draft(self, row: _Row, anchor: int, usual: int, scaled: int) -> tuple[list[int], str]:
        """The draft after `anchor`, of as many tokens as the two caps allow, and who drafted it."""
        row.asked = 0
        match = row.index.match(anchor) if usual or scaled else None
        if match is None:
            return [], ""
        start, length = match
        long = bool(scaled) and self._long > self._base and length >= LONG_MATCH and row.gate.open
        size = min(2 * length, self._long, scaled) if long else min(self._base, usual)
        draft = [*row.index.tokens[start : start + size], anchor][:size]
        row.asked = len(draft)
        return draft, (LOOKUP_LONG if long else LOOKUP) if draft else ""
