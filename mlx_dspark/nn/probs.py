"""The distribution a draft was drawn from, in the forms drafters have it.

Acceptance is exact only if q is the very distribution that the draft was drawn from, after every temperature
and truncation, given the drafts before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import mlx.core as mx


class DraftProbs(Protocol):
    """q of one proposal, in the target's vocabulary."""

    def of_tokens(self, tokens: mx.array) -> mx.array:
        """q of each drafted token: `[rows, width]` ids to `[rows, width]` float32.

        `tokens` may be wider than the proposal, as it is when proposals of several widths share a round;
        what is said of slots past the proposal's own width means nothing.
        """
        ...

    def at(self, index: mx.array) -> mx.array:
        """q at one slot per row: `[rows]` to `[rows, vocab]` float32. Slots past the end are clipped."""
        ...

    def point(self, row: int) -> bool:
        """Whether row `row`'s drafts are certain to the drafter (all mass on the drafted token)."""
        ...

    def select(self, rows: Sequence[int]) -> DraftProbs:
        """q of these rows, in this order."""
        ...


def _slots(width: int, of: int) -> mx.array:
    """Slots `[width]` of a proposal `of` wide; those past its end repeat the last."""
    return mx.minimum(mx.arange(width), of - 1)


def _slot_of_each_row(values: mx.array, index: mx.array) -> mx.array:
    """`[rows, width, n]` and `[rows]` slots to `[rows, n]`."""
    index = mx.clip(index, 0, values.shape[1] - 1)
    return mx.take_along_axis(values, index[:, None, None], axis=1)[:, 0]


def _rows_of(values: mx.array, rows: Sequence[int]) -> mx.array:
    return mx.take(values, mx.array(list(rows), dtype=mx.int32), axis=0)


def _one_hot(tokens: mx.array, vocab: int) -> mx.array:
    return (tokens[..., None] == mx.arange(vocab)).astype(mx.float32)


@dataclass(frozen=True)
class PointMass:
    """A drafter that does not draw: lookup, or any drafter taking its arg-max. `tokens` `[rows, width]`."""

    tokens: mx.array
    vocab: int

    def of_tokens(self, tokens: mx.array) -> mx.array:
        drafted = mx.take(self.tokens, _slots(tokens.shape[1], self.tokens.shape[1]), axis=1)
        return (tokens == drafted).astype(mx.float32)

    def at(self, index: mx.array) -> mx.array:
        return _one_hot(_slot_of_each_row(self.tokens[..., None], index)[:, 0], self.vocab)

    def point(self, row: int) -> bool:
        return True

    def select(self, rows: Sequence[int]) -> PointMass:
        return PointMass(_rows_of(self.tokens, rows), self.vocab)


@dataclass(frozen=True)
class Dense:
    """`probs` `[rows, width, vocab]`, any float dtype, each slot summing to one.

    `points` marks the rows whose draft is the arg-max of `probs` instead of a draw; empty: none.
    """

    probs: mx.array
    points: tuple[bool, ...] = ()

    def of_tokens(self, tokens: mx.array) -> mx.array:
        probs = mx.take(self.drawn, _slots(tokens.shape[1], self.probs.shape[1]), axis=1)
        return mx.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]

    def at(self, index: mx.array) -> mx.array:
        return _slot_of_each_row(self.drawn, index)

    def point(self, row: int) -> bool:
        return bool(self.points) and self.points[row]

    def select(self, rows: Sequence[int]) -> Dense:
        return Dense(_rows_of(self.probs, rows), tuple(map(self.point, rows)))

    @cached_property
    def drawn(self) -> mx.array:
        """`probs` in float32, with certain rows one-hot."""
        probs = self.probs.astype(mx.float32)
        if not any(self.points):
            return probs
        certain = _one_hot(mx.argmax(probs, axis=-1), probs.shape[-1])
        return mx.where(mx.array(self.points)[:, None, None], certain, probs)


@dataclass(frozen=True)
class MappedVocab:
    """q over a reduced draft vocabulary: `probs` `[rows, width, draft_vocab]`.

    `d2t` `[draft_vocab]` holds offsets as the checkpoints do: draft id `j` is target id `j + d2t[j]`, all
    different and below `vocab`. Target tokens outside the map have q 0, so the residual keeps their whole
    mass. `points` as in Dense.
    """

    probs: mx.array
    d2t: mx.array
    vocab: int
    points: tuple[bool, ...] = ()

    def of_tokens(self, tokens: mx.array) -> mx.array:
        draft_ids, mapped = self._draft_ids
        q = self._reduced.of_tokens(mx.take(draft_ids, tokens))
        return mx.where(mx.take(mapped, tokens), q, 0.0)

    def at(self, index: mx.array) -> mx.array:
        draft_ids, mapped = self._draft_ids
        return mx.where(mapped, mx.take(self._reduced.at(index), draft_ids, axis=-1), 0.0)

    def point(self, row: int) -> bool:
        return self._reduced.point(row)

    def select(self, rows: Sequence[int]) -> MappedVocab:
        reduced = self._reduced.select(rows)
        return MappedVocab(reduced.probs, self.d2t, self.vocab, reduced.points)

    @cached_property
    def _reduced(self) -> Dense:
        return Dense(self.probs, self.points)

    @cached_property
    def _draft_ids(self) -> tuple[mx.array, mx.array]:
        """The draft id of each target id, and whether it has one: both `[vocab]`."""
        draft_ids = mx.arange(self.d2t.size, dtype=mx.int32)
        target_ids = draft_ids + self.d2t.astype(mx.int32)
        inverse = mx.full((self.vocab,), -1, dtype=mx.int32)
        inverse[target_ids] = draft_ids
        return mx.maximum(inverse, 0), inverse >= 0


@dataclass(frozen=True)
class Candidates:
    """q over a few ids of each slot: `probs` `[rows, width, n]` of the target's `ids`, same shape.

    The ids of a slot are distinct and below `vocab`; others have q 0. `points` as in Dense.
    """

    probs: mx.array
    ids: mx.array
    vocab: int
    points: tuple[bool, ...] = ()

    def of_tokens(self, tokens: mx.array) -> mx.array:
        slots = _slots(tokens.shape[1], self.ids.shape[1])
        drafted = mx.take(self.ids, slots, axis=1) == tokens[..., None]
        return mx.sum(mx.where(drafted, mx.take(self._few.drawn, slots, axis=1), 0.0), axis=-1)

    def at(self, index: mx.array) -> mx.array:
        ids, q = _slot_of_each_row(self.ids, index), self._few.at(index)
        return mx.put_along_axis(mx.zeros((ids.shape[0], self.vocab)), ids, q, axis=-1)

    def point(self, row: int) -> bool:
        return self._few.point(row)

    def select(self, rows: Sequence[int]) -> Candidates:
        few = self._few.select(rows)
        return Candidates(few.probs, _rows_of(self.ids, rows), self.vocab, few.points)

    @cached_property
    def _few(self) -> Dense:
        return Dense(self.probs, self.points)


@dataclass(frozen=True)
class ByRow:
    """Rows drafted by different drafters: row `r` is row `parts[r][1]` of `parts[r][0]`."""

    parts: Sequence[tuple[DraftProbs, int]]

    def of_tokens(self, tokens: mx.array) -> mx.array:
        return self._gather(lambda part, rows: part.of_tokens(_rows_of(tokens, rows)))

    def at(self, index: mx.array) -> mx.array:
        return self._gather(lambda part, rows: part.at(_rows_of(index, rows)))

    def point(self, row: int) -> bool:
        part, its_row = self.parts[row]
        return part.point(its_row)

    def select(self, rows: Sequence[int]) -> ByRow:
        return ByRow([self.parts[row] for row in rows])

    def _gather(self, ask: Callable[[DraftProbs, list[int]], mx.array]) -> mx.array:
        """Ask each part once for all of its rows, and put the answers in row order."""
        rows_of_part: dict[int, list[int]] = {}
        for row, (part, _) in enumerate(self.parts):
            rows_of_part.setdefault(id(part), []).append(row)
        answers = [
            ask(self.parts[rows[0]][0].select([self.parts[row][1] for row in rows]), rows)
            for rows in rows_of_part.values()
        ]
        order = [row for rows in rows_of_part.values() for row in rows]
        return _rows_of(mx.concatenate(answers), sorted(range(len(order)), key=order.__getitem__))
