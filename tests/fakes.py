"""Scripted drafters, and the stock greedy oracle that every mode must equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from mlx_dspark.contracts import Ask, Observation, Proposal, Source, Target
from mlx_dspark.nn.probs import PointMass


def stock_greedy(model: Any, prompt: Sequence[int], n: int) -> list[int]:
    """`n` greedy ids of stock mlx-lm, end-of-sequence ids not obeyed."""
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=n)
    return [int(token) for token, _ in steps]


class ScriptedRows:
    """Rows that remember every token observed, to check that none is missed."""

    def __init__(self, n: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.features: list[list[mx.array]] = [[] for _ in range(n)]

    @property
    def depth(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def join(self, other: ScriptedRows) -> None:
        self.tokens += other.tokens
        self.features += other.features

    def select(self, rows: Sequence[int]) -> None:
        self.tokens = [self.tokens[row] for row in rows]
        self.features = [self.features[row] for row in rows]


class ScriptedDrafter:
    """Drafts the true continuation, each token replaced by a wrong one with probability `1 - right`.

    `oracle` maps a token sequence to its continuation. Lengths are drawn from 0 to the cap when `ragged`.
    """

    def __init__(
        self,
        oracle: Callable[[Sequence[int], int], list[int]],
        right: float,
        *,
        vocab: int,
        max_draft: int = 16,
        ragged: bool = False,
        taps: tuple[int, ...] = (),
        name: str = "scripted",
        seed: int = 0,
    ) -> None:
        self.name = name
        self.taps = taps
        self.max_draft = max_draft
        self.last_rows: ScriptedRows | None = None
        self._oracle = oracle
        self._right = right
        self._vocab = vocab
        self._ragged = ragged
        self._random = random.Random(seed)

    @property
    def sources(self) -> tuple[Source, ...]:
        return (Source(self.name, self.max_draft),)

    def bind(self, target: Target) -> None:
        assert target.spec.vocab == self._vocab

    def new_rows(self, n: int = 1) -> ScriptedRows:
        return ScriptedRows(n)

    def observe(self, rows: ScriptedRows, seen: Observation) -> None:
        self.last_rows = rows
        for r, tokens in enumerate(seen.tokens):
            rows.tokens[r] += tokens
            if seen.features is not None and tokens:
                rows.features[r].append(seen.features[r, : len(tokens)])

    def propose(self, rows: ScriptedRows, ask: Ask) -> Proposal:
        drafts = []
        for r, cap in enumerate(ask.caps):
            assert ask.positions[r] == len(rows.tokens[r]), "every committed token is observed once"
            size = self._random.randint(0, cap) if self._ragged else cap
            truth = self._oracle([*rows.tokens[r], ask.anchors[r]], size)[:size] if size else []
            drafts.append([self._spoiled(token) for token in truth])
        width = max(map(len, drafts))
        tokens = mx.array([d + [0] * (width - len(d)) for d in drafts], dtype=mx.int32)
        tokens = tokens.reshape(len(drafts), width)
        source = tuple(self.name if d else "" for d in drafts)
        return Proposal(tokens, tuple(map(len, drafts)), PointMass(tokens, self._vocab), source)

    def _spoiled(self, token: int) -> int:
        if self._random.random() < self._right:
            return token
        return (token + 1 + self._random.randrange(self._vocab - 1)) % self._vocab


class TextOracle:
    """The continuation of any prefix of known texts; elsewhere, zeros."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [list(text) for text in texts]

    def __call__(self, prefix: Sequence[int], n: int) -> list[int]:
        for text in self._texts:
            if text[: len(prefix)] == list(prefix):
                return (text[len(prefix) : len(prefix) + n] + [0] * n)[:n]
        return [0] * n
