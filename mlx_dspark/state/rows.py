"""A batch is a list of rows: the states of all layers, moved together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_dspark.state.base import LayerCapture, LayerState, Span
from mlx_dspark.state.layout import Forms
from mlx_dspark.state.rectangle import RectangleKV

MOST_OPEN = 2
"""Rounds of a target in flight: one, and one that is launched ahead of it."""


@dataclass(frozen=True, slots=True)
class Capture:
    """One row of every layer at one moment, of `depth` committed tokens."""

    layers: tuple[LayerCapture, ...]
    depth: int

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


class Transaction:
    """`width` positions per row that are written but not yet kept.

    Leaving it without a commit rolls it back, and everything begun after it.
    """

    __slots__ = ("_owner", "_void", "width")

    def __init__(self, owner: RowStates, width: int) -> None:
        self._owner = owner
        self.width = width
        self._void: set[int] = set()

    @property
    def open(self) -> bool:
        return self in self._owner._open

    def commit(self, keep: Sequence[int]) -> None:
        """Row `r` keeps the first `keep[r]` positions. The oldest transaction must close first.

        When an older transaction kept less than all of a row, the younger ones must keep nothing of it.
        """
        self._owner._commit(self, keep)

    def rollback(self) -> None:
        self._owner._rollback(self)


class RowStates:
    """Layer states of some rows. `depth[r]` counts the committed tokens of row `r`; the list itself is never
    changed, only replaced. `most_open` transactions may be open at once.

    `groups` says how mlx-lm's list of caches is made of the layers, in their order: None is a layer by
    itself, a number so many of them in a tuple. Where there are `forms`, growing keys and values take the one
    that suits the rows when rows come or go, and before the first round of what is new or restored; a
    rectangle that has become padding for the most part is parted before the next round.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        n: int = 1,
        *,
        groups: Sequence[int | None] | None = None,
        forms: Forms | None = None,
    ) -> None:
        self.layers = list(layers)
        self._forms = forms
        self.groups = [None] * len(self.layers) if groups is None else list(groups)
        self.depth = [0] * n
        self.most_open = MOST_OPEN
        self.newest: Span | None = None
        """What the newest transaction writes; of use while that is open."""
        self._open: deque[Transaction] = deque()
        self._settled = False

    def __len__(self) -> int:
        return len(self.depth)

    @property
    def cache(self) -> list[Any]:
        """The layers as the list of caches that mlx-lm model code expects."""
        return self.arranged(self.layers)

    @property
    def padded(self) -> bool:
        """Whether growing keys and values lie in a rectangle."""
        return any(isinstance(layer, RectangleKV) for layer in self.layers)

    def arranged(self, layers: Sequence[Any]) -> list[Any]:
        """What stands for each layer, as the list of caches that mlx-lm model code expects."""
        return arranged(layers, self.groups)

    def begin(self, width: int) -> Transaction:
        """Open a transaction of `width` positions per row; at most `most_open` may be open."""
        assert width >= 1
        assert len(self._open) < self.most_open, f"at most {self.most_open} rounds are in flight"
        if not self._open:
            self._lay_out_before_a_round()
        ahead = sum(transaction.width for transaction in self._open)
        span = Span([depth + ahead for depth in self.depth] if ahead else self.depth, width)
        for layer in self.layers:
            layer.begin(span)
        self.newest = span
        transaction = Transaction(self, width)
        self._open.append(transaction)
        return transaction

    @contextmanager
    def transaction(self, width: int) -> Iterator[Transaction]:
        """`begin`, rolled back on leaving unless committed."""
        transaction = self.begin(width)
        try:
            yield transaction
        finally:
            if transaction.open:
                transaction.rollback()

    def _commit(self, transaction: Transaction, keep: Sequence[int]) -> None:
        assert transaction.open
        assert self._open[0] is transaction, "transactions close first in, first out"
        assert all(keep[row] == 0 for row in transaction._void), "a voided row keeps nothing"
        assert 0 <= min(keep) <= max(keep) <= transaction.width
        for layer in self.layers:
            layer.commit(keep)
        self._open.popleft()
        self.depth = [depth + kept for depth, kept in zip(self.depth, keep, strict=True)]
        if self._open:
            self._open[0]._void.update(row for row, kept in enumerate(keep) if kept < transaction.width)

    def _rollback(self, transaction: Transaction) -> None:
        assert transaction.open
        assert self._open[0] is transaction, "rolling back starts at the oldest transaction"
        for layer in self.layers:
            layer.rollback()
        self._open.clear()

    def join(self, other: RowStates) -> None:
        """Append the rows of `other`, which must not be used afterwards."""
        assert not self._open
        assert not other._open
        depth = self.depth + other.depth
        padded = self._to_be_padded(depth)
        for states in (self, other):
            states._lay_out(padded=padded)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs)
        self.depth = depth

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        assert not self._open
        for layer in self.layers:
            layer.select(rows)
        self.depth = [self.depth[row] for row in rows]
        self._lay_out(padded=self._to_be_padded(self.depth))

    def replace(self, rows: Sequence[int], other: RowStates) -> None:
        """The rows of `other`, which must not be used afterwards, take these places, in this order."""
        assert not self._open
        assert not other._open
        assert len(rows) == len(other)
        depth = replaced(self.depth, rows, other.depth)
        padded = self._to_be_padded(depth)
        for states in (self, other):
            if states.padded != padded:
                states._lay_out(padded=padded)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.replace(rows, theirs)
        self.depth = depth

    def capture(self, row: int) -> Capture:
        """The committed content of a row; later writes do not move it."""
        depth = self.depth[row]
        return Capture(tuple(layer.capture(row, depth) for layer in self.layers), depth)

    def restore(self, row: int, capture: Capture, to: int | None = None) -> None:
        """Make `row` what was captured, cut back to depth `to` (default: all of it).

        `to` must be a depth that `rewindable` named.
        """
        assert not self._open
        depth = capture.depth if to is None else to
        assert self.rewindable(capture, depth) == depth
        for layer, kept in zip(self.layers, capture.layers, strict=True):
            layer.restore(row, kept, depth)
        self._settled = False
        self.depth = replaced(self.depth, [row], [depth])

    def rewindable(self, capture: Capture, to: int) -> int:
        """The furthest depth, at most `to`, that every layer can restore `capture` at."""
        depth, reach = -1, min(to, capture.depth)
        while reach != depth:
            depth = reach
            for layer, kept in zip(self.layers, capture.layers, strict=True):
                reach = layer.rewindable(kept.depth, reach)
                reach = reach if reach >= kept.least else 0
        return depth

    def _to_be_padded(self, depth: Sequence[int]) -> bool:
        return self._forms.padded(depth) if self._forms is not None else self.padded

    def _lay_out_before_a_round(self) -> None:
        padded = self._to_be_padded(self.depth)
        if padded != self.padded and (self.padded or not self._settled):
            self._lay_out(padded=padded)
        self._settled = True

    def _lay_out(self, *, padded: bool) -> None:
        """Layer by layer, so that one at most is held in both forms."""
        if self._forms is not None:
            for index, layer in enumerate(self.layers):
                self.layers[index] = self._forms.of(layer, self.depth, padded=padded)

    def arrays(self) -> list[mx.array]:
        """Every array held, for evaluation."""
        return [array for layer in self.layers for array in layer.arrays()]


def arranged(layers: Sequence[Any], groups: Sequence[int | None]) -> list[Any]:
    """Layers as mlx-lm's list of caches, with `groups` as in `RowStates`."""
    rest = iter(layers)
    return [next(rest) if size is None else tuple(next(rest) for _ in range(size)) for size in groups]


def replaced(old: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """A copy of `old` with `new` in these places."""
    answer = list(old)
    for place, value in zip(places, new, strict=True):
        answer[place] = value
    return answer
