"""Several drafters in order: per row, the first with a draft wins; all observe everything."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_dspark.contracts import Ask, Drafter, DraftRows, Observation, Proposal, Source, Target
from mlx_dspark.nn.probs import ByRow


class FirstHitRows:
    """The rows of every part, side by side."""

    def __init__(self, parts: list[DraftRows]) -> None:
        self.parts = parts

    @property
    def depth(self) -> list[int]:
        return self.parts[0].depth

    def join(self, other: FirstHitRows) -> None:
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.join(theirs)

    def select(self, rows: Sequence[int]) -> None:
        for part in self.parts:
            part.select(rows)


class FirstHit:
    """Asks its parts in order; a row that has a draft is not asked for again. Itself a drafter.

    At most one part taps the target; its taps are the composition's.
    """

    def __init__(self, parts: Sequence[Drafter]) -> None:
        assert parts
        assert sum(bool(part.taps) for part in parts) <= 1, "one part at most taps the target"
        self.parts = tuple(parts)

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(source for part in self.parts for source in part.sources)

    @property
    def taps(self) -> tuple[int, ...]:
        return next((part.taps for part in self.parts if part.taps), ())

    @property
    def max_draft(self) -> int:
        return max(part.max_draft for part in self.parts)

    def bind(self, target: Target) -> None:
        for part in self.parts:
            part.bind(target)

    def new_rows(self, n: int = 1) -> FirstHitRows:
        return FirstHitRows([part.new_rows(n) for part in self.parts])

    def observe(self, rows: FirstHitRows, seen: Observation) -> None:
        for part, own in zip(self.parts, rows.parts, strict=True):
            part.observe(own, seen)

    def blind(self, rows: FirstHitRows, anchors: Sequence[int], asked: Collection[str]) -> bool:
        """Of the parts only those that are asked."""
        parts = zip(self.parts, rows.parts, strict=True)
        return all(
            part.blind(own, anchors, asked)
            for part, own in parts
            if any(source.name in asked for source in part.sources)
        )

    def propose(self, rows: FirstHitRows, ask: Ask) -> Proposal:
        n = len(ask.anchors)
        won: list[tuple[Proposal, int] | None] = [None] * n
        proposals: list[Proposal] = []
        for part, own in zip(self.parts, rows.parts, strict=True):
            caps = self._caps_of(part, ask)
            open_caps = [0 if won[r] else caps[r] for r in range(n)]
            if not any(open_caps):
                continue
            proposal = part.propose(own, replace(ask, caps=open_caps))
            proposals.append(proposal)
            for r in range(n):
                if proposal.lengths[r] and won[r] is None:
                    won[r] = (proposal, r)
        if len(proposals) == 1:
            return proposals[0]
        return _merged(proposals, won, n)

    @staticmethod
    def _caps_of(part: Drafter, ask: Ask) -> Sequence[int]:
        caps = [ask.by_source[source.name] for source in part.sources if source.name in ask.by_source]
        return [max(row) for row in zip(*caps, strict=True)] if caps else ask.caps


def _merged(proposals: list[Proposal], won: list[tuple[Proposal, int] | None], n: int) -> Proposal:
    """One proposal whose rows come from different drafters."""
    winner = [won[r][0] if won[r] is not None else None for r in range(n)]  # type: ignore[index]
    if not proposals or not any(winner):
        empty = mx.zeros((n, 0), dtype=mx.int32)
        return Proposal(empty, (0,) * n, proposals[0].q if proposals else ByRow([]), ("",) * n)
    width = max(p.lengths[r] for r, p in enumerate(winner) if p is not None)
    rows, lengths, sources = [], [], []
    for r, proposal in enumerate(winner):
        m = proposal.lengths[r] if proposal is not None else 0
        taken = proposal.tokens[r, :m].astype(mx.int32) if proposal is not None else mx.zeros(0, mx.int32)
        rows.append(mx.concatenate([taken, mx.zeros(width - m, dtype=mx.int32)]))
        lengths.append(m)
        sources.append(proposal.source[r] if proposal is not None else "")
    q = ByRow([((p or proposals[0]).q, r) for r, p in enumerate(winner)])
    return Proposal(mx.stack(rows), tuple(lengths), q, tuple(sources))
