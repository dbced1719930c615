"""Scripted drafters, and the stock greedy oracle that every mode must equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from mlx_dspark.contracts import (
    Ask,
    Forward,
    Logits,
    Observation,
    Proposal,
    Source,
    Target,
    TargetSpec,
)
from mlx_dspark.nn.probs import Dense, PointMass
from mlx_dspark.state.rows import RowStates


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

    def blind(self, rows: ScriptedRows, anchors: Sequence[int], asked: Collection[str]) -> bool:
        return False

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


class TableTarget:
    """A target whose logits depend on the last token alone: `table` `[vocab, vocab]`, a row per token."""

    def __init__(self, table: mx.array, context: int = 512) -> None:
        self._table = table
        vocab = table.shape[0]
        self.spec = TargetSpec("table", vocab, hidden=1, layers=0, context=context)

    def new_rows(self, n: int = 1, *, rectangle: bool = False) -> RowStates:
        return RowStates([], n)

    def forward(
        self,
        tokens: mx.array,
        rows: RowStates,
        *,
        taps: tuple[int, ...] = (),
        logits: Logits | mx.array = Logits.ALL,
    ) -> Forward:
        assert not taps
        assert tokens.shape[0] == len(rows)
        out = self._table[tokens]
        if isinstance(logits, mx.array):
            return Forward(mx.take_along_axis(out, logits[:, :, None], axis=1), None)
        return Forward({Logits.ALL: out, Logits.LAST: out[:, -1:], Logits.NONE: None}[logits], None)

    def embed(self, tokens: mx.array) -> mx.array:
        raise NotImplementedError("a table has no embedding")

    def unembed(self, hidden: mx.array) -> mx.array:
        raise NotImplementedError("a table has no head")


class TableDrafter(ScriptedDrafter):
    """Draws each draft from `q` `[vocab, vocab]`, a row per last token; lengths vary from row to row."""

    def __init__(self, q: mx.array, max_draft: int = 3, seed: int = 0) -> None:
        super().__init__(lambda _, n: [0] * n, 1.0, vocab=q.shape[0], max_draft=max_draft, seed=seed)
        self._q = q

    def propose(self, rows: ScriptedRows, ask: Ask) -> Proposal:
        lengths = tuple(self._random.randint(0, cap) for cap in ask.caps)
        last, width = mx.array(list(ask.anchors)), max(lengths)
        first = mx.array(list(ask.positions))[:, None] + 1
        tokens, probs = [], []
        for i in range(width):
            q = self._q[last]
            gumbel = ask.noise.draft_gumbel(first + i, q.shape[-1])[:, 0]
            last = mx.argmax(mx.log(q) + gumbel, axis=-1)
            tokens.append(last)
            probs.append(q)
        if not width:
            empty = mx.zeros((len(lengths), 0), mx.int32)
            return Proposal(empty, lengths, PointMass(empty, self._vocab), ("",) * len(lengths))
        drafted = mx.stack(tokens, axis=1).astype(mx.int32)
        source = tuple(self.name if n else "" for n in lengths)
        return Proposal(drafted, lengths, Dense(mx.stack(probs, axis=1)), source)
