"""Layers that fold their past into arrays of a fixed size: nothing can be cut off, so a round is replayed.

The mixer of such a layer reads the arrays as they were before the round, and writes what they are after it
together with a replay: the round's own inputs to the recurrence (the *tape*), run again over fewer positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx

from mlx_dspark.state.base import LayerCapture, Span

Arrays = tuple[mx.array, ...]


class Kept:
    """The first `lengths[r]` positions of each row, 0 to `longest`; the layers of a batch share it."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self.longest = max(self.lengths)

    @cached_property
    def level(self) -> bool:
        """Whether all rows keep the same number: then cutting at `longest` says it all."""
        return min(self.lengths) == self.longest

    @cached_property
    def array(self) -> mx.array:
        """int32 `[rows]`."""
        return mx.array(self.lengths, dtype=mx.int32)

    @cached_property
    def mask(self) -> mx.array | None:
        """bool `[rows, longest]`, true where kept; None where all is."""
        return None if self.level else mx.arange(self.longest) < self.array[:, None]


Replay = Callable[[Arrays, Kept], Arrays]
"""What the arrays, given as they were before the round, are after the positions kept of it.

A row's result must not depend on other rows, and be the arrays unchanged for a length of 0.
"""


def extended(window: mx.array, inputs: mx.array) -> mx.array:
    """The inputs of a causal convolution led by those it still sees: `[rows, size + width, channels]`."""
    return mx.concatenate([window, inputs], axis=1)


def last_of(seen: mx.array, size: int) -> mx.array:
    """The window `[rows, size, channels]` after all of `seen`."""
    return mx.contiguous(seen[:, seen.shape[1] - size :])


def window_of(seen: mx.array, size: int, kept: Kept) -> mx.array:
    """The window after the positions kept of `seen`, which begins with the window before them."""
    if kept.level:
        return mx.contiguous(seen[:, kept.longest : kept.longest + size])
    places = kept.array[:, None] + mx.arange(size)
    return mx.take_along_axis(seen, places[..., None], axis=1)


class _Round:
    """A round that is written and not yet kept. Without `replay` nothing was written."""

    __slots__ = ("after", "replay", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.after: Arrays = ()
        self.replay: Replay | None = None

    def resolved(self, before: Arrays, keep: Sequence[int]) -> Arrays:
        """The arrays after the positions kept; `before` are those it started from, of the rows that are
        not void."""
        width = self.span.width
        assert self.replay is not None, "a round that keeps something needs a forward"
        if min(keep) == width:
            return self.after
        partial = [kept for kept in keep if 0 < kept < width]
        arrays = before
        if partial:
            arrays = self.replay(before, _shared(self.span, [min(k, max(partial)) for k in keep]))
            arrays = _rows_of(before, [kept == 0 for kept in keep], arrays)
        return _rows_of(self.after, [kept == width for kept in keep], arrays)


def _shared(span: Span, lengths: list[int]) -> Kept:
    """One Kept for all layers that begin the same span."""
    return span.shared.setdefault(tuple(lengths), Kept(lengths))


def _rows_of(new: Arrays, chosen: Sequence[bool], old: Arrays) -> Arrays:
    """`old` with the chosen rows of `new`."""
    if not any(chosen):
        return old
    if all(chosen):
        return new
    rows = mx.array(list(chosen))
    return tuple(mx.where(rows.reshape(-1, *[1] * (b.ndim - 1)), a, b) for a, b in zip(new, old, strict=True))


class RecurrentState:
    """Arrays `[rows, ...]` of one layer, stacked over rows. Only the depths they were captured at can be
    restored.

    `slots` is how many arrays mlx-lm's cache for the layer has. Model code sees a cache without mask and
    offset. Positions past a row's own in a ragged round, like rejected drafts, come after the ones that count
    and are never kept, so a forward needs no mask.
    Arrays are never written to: each round makes new ones.
    """

    def __init__(self, n: int = 1, *, slots: int = 0) -> None:
        self._n = n
        self.slots = slots
        self._held: Arrays | None = None
        self._open: deque[_Round] = deque()

    # mixers --------------------------------------------------------------------------------------

    @property
    def untouched(self) -> bool:
        """Whether nothing was ever written: what the arrays look like is not known yet."""
        return self._held is None

    @property
    def starting(self) -> list[bool]:
        """Whether each row is at the beginning of its text in the round being written."""
        assert self._open, "a forward needs an open transaction"
        return [base == 0 for base in self._open[-1].span.base]

    def before(self, *empty: tuple[Sequence[int], mx.Dtype]) -> Arrays:
        """The arrays that the round being written starts from; `empty` gives shape (without rows) and type
        of each, which begin as zeros."""
        assert self._open, "a forward needs an open transaction"
        if self._held is None:
            self._held = tuple(mx.zeros((self._n, *shape), dtype) for shape, dtype in empty)
        return self._open[-2].after if len(self._open) > 1 else self._held

    def write(self, after: Arrays, replay: Replay) -> None:
        """What the round being written makes of the arrays, and how to make less of it."""
        assert self._open[-1].replay is None, "one forward a transaction"
        self._open[-1].after = after
        self._open[-1].replay = replay

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> None:
        """No position is masked."""

    # transaction ---------------------------------------------------------------------------------

    def begin(self, span: Span) -> None:
        self._open.append(_Round(span))

    def commit(self, keep: Sequence[int]) -> None:
        round_ = self._open.popleft()
        if any(keep):
            assert self._held is not None, "a round that keeps something needs a forward"
            self._held = round_.resolved(self._held, keep)

    def rollback(self) -> None:
        self._open.clear()

    # rows ----------------------------------------------------------------------------------------

    def join(self, other: RecurrentState) -> None:
        mine, theirs = self._as(other), other._as(self)
        if mine is not None and theirs is not None:
            self._held = tuple(mx.concatenate(list(pair)) for pair in zip(mine, theirs, strict=True))
        self._n += other._n

    def select(self, rows: Sequence[int]) -> None:
        if self._held is not None:
            chosen = mx.array(list(rows), dtype=mx.int32)
            self._held = tuple(mx.take(array, chosen, axis=0) for array in self._held)
        self._n = len(rows)

    def replace(self, rows: Sequence[int], other: RecurrentState) -> None:
        order = list(range(self._n))
        for place, row in zip(rows, range(self._n, self._n + other._n), strict=True):
            order[place] = row
        self.join(other)
        self.select(order)

    def capture(self, row: int, depth: int) -> LayerCapture:
        if self._held is None or depth == 0:
            return LayerCapture((), 0)
        return LayerCapture(tuple(mx.contiguous(array[row : row + 1]) for array in self._held), depth)

    def restore(self, row: int, capture: LayerCapture, to: int) -> None:
        whole = RecurrentState(1)
        whole._held = capture.arrays if to else None
        self.replace([row], whole)

    def rewindable(self, depth: int, to: int) -> int:
        return depth if depth <= to else 0

    def arrays(self) -> list[mx.array]:
        return [*(self._held or ()), *(array for round_ in self._open for array in round_.after)]

    def _as(self, other: RecurrentState) -> Arrays | None:
        """The arrays held; zeros shaped as those of `other` where only that one holds some."""
        if self._held is not None or other._held is None:
            return self._held
        return tuple(mx.zeros((self._n, *array.shape[1:]), array.dtype) for array in other._held)


class RecurrentRow(RecurrentState):
    """One row of a RecurrentState in its newest transaction, for model code that takes one at a time.

    What the rows write reaches the state when the last of them has written.
    """

    def __init__(self, state: RecurrentState, row: int, written: dict[int, tuple[Arrays, Replay]]) -> None:
        super().__init__(1, slots=state.slots)
        self._state = state
        self._row = row
        self._written = written

    @classmethod
    def all_of(cls, state: RecurrentState) -> list[RecurrentRow]:
        written: dict[int, tuple[Arrays, Replay]] = {}
        return [cls(state, row, written) for row in range(state._n)]

    @property
    def untouched(self) -> bool:
        return self._state.untouched

    @property
    def starting(self) -> list[bool]:
        return self._state.starting[self._row : self._row + 1]

    def before(self, *empty: tuple[Sequence[int], mx.Dtype]) -> Arrays:
        return _row_of(self._state.before(*empty), self._row)

    def write(self, after: Arrays, replay: Replay) -> None:
        self._written[self._row] = after, replay
        if len(self._written) < self._state._n:
            return
        rows = [self._written[row] for row in range(len(self._written))]

        def replay_each(before: Arrays, kept: Kept) -> Arrays:
            parts = [
                replay(_row_of(before, row), Kept([length])) if length else _row_of(before, row)
                for row, (length, (_, replay)) in enumerate(zip(kept.lengths, rows, strict=True))
            ]
            return stacked(parts)

        self._state.write(stacked([after for after, _ in rows]), replay_each)


def _row_of(arrays: Arrays, row: int) -> Arrays:
    return tuple(array[row : row + 1] for array in arrays)


def stacked(rows: Sequence[Arrays]) -> Arrays:
    """The arrays of several rows as those of a batch."""
    return tuple(mx.concatenate(list(parts)) for parts in zip(*rows, strict=True))
