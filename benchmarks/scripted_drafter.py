"""A drafter that knows what comes, and is right as often as it is told to be."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import mlx.core as mx

from mlx_dspark.contracts import Ask, Observation, Proposal, Source, Target
from mlx_dspark.nn.probs import PointMass


class ScriptedRows:
    """How many tokens each row has."""

    def __init__(self, depth: list[int]) -> None:
        self.depth = depth

    def join(self, other: ScriptedRows) -> None:
        self.depth += other.depth

    def select(self, rows: Sequence[int]) -> None:
        self.depth = [self.depth[row] for row in rows]


class ScriptedDrafter:
    """Drafts `script`, a text with its prompt, where each token is another one with a chance of 1 -
    `acceptance`, drawn by its place. Beyond the end it drafts nothing. Its drafts cost next to nothing."""

    name = "script"
    taps: tuple[int, ...] = ()
    max_draft = 15

    def __init__(self, script: Sequence[int], acceptance: float) -> None:
        self._script, self._acceptance = script, acceptance
        self._vocab = 0

    @property
    def sources(self) -> tuple[Source, ...]:
        return (Source(self.name, self.max_draft),)

    def bind(self, target: Target) -> None:
        self._vocab = target.spec.vocab

    def new_rows(self, n: int = 1) -> ScriptedRows:
        return ScriptedRows([0] * n)

    def observe(self, rows: ScriptedRows, seen: Observation) -> None:
        rows.depth = [depth + len(tokens) for depth, tokens in zip(rows.depth, seen.tokens, strict=True)]

    def blind(self, rows: ScriptedRows, anchors: Sequence[int], asked: Collection[str]) -> bool:
        return False

    def propose(self, rows: ScriptedRows, ask: Ask) -> Proposal:
        found = [
            [self._draft(at) for at in range(position + 1, min(position + 1 + cap, len(self._script)))]
            for position, cap in zip(ask.positions, ask.caps, strict=True)
        ]
        width = max(map(len, found))
        tokens = mx.array([draft + [0] * (width - len(draft)) for draft in found], dtype=mx.int32)
        tokens = tokens.reshape(len(found), width)
        return Proposal(
            tokens, tuple(map(len, found)), PointMass(tokens, self._vocab), (self.name,) * len(found)
        )

    def _draft(self, at: int) -> int:
        right = random.Random(at).random() < self._acceptance
        return self._script[at] if right else (self._script[at] + 1) % self._vocab
