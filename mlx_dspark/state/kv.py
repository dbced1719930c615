"""Growing key and value rows of one attention layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from mlx_dspark.kernels.attention import Attention, RowArrays, RowMasks, stock_attention
from mlx_dspark.state.base import LayerCapture, Span

STEP = 256
"""Buffers grow by multiples of this many positions."""


class GrowingRow:
    """Arrays of one row that grow together: buffers `[1, kv_heads, size, n]`, or none while it is empty."""

    __slots__ = ("buffers",)

    def __init__(self, buffers: tuple[mx.array, ...] = ()) -> None:
        self.buffers = buffers

    def write(self, at: int, new: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        """Write `[1, kv_heads, width, n]` from position `at` on; return everything up to the last of them."""
        end = at + new[0].shape[2]
        if self.buffers:
            self.reserve(at, end)
        else:
            self.buffers = tuple(_grown(None, each, 0, end) for each in new)
        for buffer, each in zip(self.buffers, new, strict=True):
            buffer[..., at:end, :] = each
        return self.read(end)

    def reserve(self, filled: int, end: int) -> None:
        """Have room for `end` positions, of which the first `filled` stay; a row that is empty has none."""
        if self.buffers and end > self.buffers[0].shape[2]:
            self.buffers = tuple(_grown(old, old, filled, end) for old in self.buffers)

    def read(self, end: int) -> tuple[mx.array, ...]:
        """The positions before `end`."""
        return tuple(buffer[..., :end, :] for buffer in self.buffers)


def _grown(old: mx.array | None, like: mx.array, filled: int, end: int) -> mx.array:
    """A buffer that holds `end` positions and begins with the first `filled` positions of `old`."""
    size = -(-end // STEP) * STEP
    shape = (1, like.shape[1], size - filled, like.shape[3])
    room = mx.zeros(shape, like.dtype)
    return room if old is None else mx.concatenate([old[..., :filled, :], room], axis=2)


class KVState:
    """Key and value rows that grow without bound; any suffix can be taken back.

    Speaks the mlx-lm cache protocol (`offset`, `update_and_fetch`, `make_mask`). Writing past a row's depth
    costs nothing to undo: what is not committed is overwritten. `attention` is how its rows are attended to.
    """

    def __init__(self, n: int = 1, attention: Attention = stock_attention) -> None:
        self.attention = attention
        self._rows = [GrowingRow() for _ in range(n)]
        self._span: Span | None = None
        self.offset: Any = 0

    # transaction ---------------------------------------------------------------------------------

    def begin(self, span: Span) -> None:
        self._span = span
        self.offset = span.offset

    def commit(self, keep: Sequence[int]) -> None:
        del keep
        self._span = None

    def rollback(self) -> None:
        self._span = None

    # mlx-lm cache protocol -----------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, ...]:
        """`[rows, kv_heads, width, head_dim]` in; everything up to and including it out."""
        if len(self._rows) == 1:
            return self.write(0, keys, values)
        pairs = [self.write(i, keys[i : i + 1], values[i : i + 1]) for i in range(len(self._rows))]
        return RowArrays(pair[0] for pair in pairs), RowArrays(pair[1] for pair in pairs)

    def keys_and_values(self) -> tuple[Any, ...]:
        """What `update_and_fetch` gave for the newest transaction, for layers that share it."""
        if len(self._rows) == 1:
            return self.read(0)
        pairs = [self.read(i) for i in range(len(self._rows))]
        return RowArrays(pair[0] for pair in pairs), RowArrays(pair[1] for pair in pairs)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if len(self._rows) == 1:
            return self.mask(0, N, return_array, window_size)
        if window_size is None and not return_array:
            return None if N == 1 else "causal"
        return RowMasks(self.mask(row, N, return_array, window_size) for row in range(len(self._rows)))

    @property
    def keys(self) -> mx.array:
        """The buffer of keys, of one row. Model code may put another array of the same numbers there."""
        return self.buffer(self._only(), 0)

    @keys.setter
    def keys(self, buffer: mx.array) -> None:
        self.put_buffer(self._only(), 0, buffer)

    @property
    def values(self) -> mx.array:
        """As `keys`; of layers that keep no values, these may be anything."""
        return self.buffer(self._only(), 1)

    @values.setter
    def values(self, buffer: mx.array) -> None:
        self.put_buffer(self._only(), 1, buffer)

    @classmethod
    def of(cls, rows: Sequence[tuple[mx.array, ...]], attention: Attention) -> KVState:
        """Rows of these buffers, `()` for one that is empty."""
        made = cls(0, attention)
        made._rows = [GrowingRow(buffers) for buffers in rows]
        return made

    def buffers(self, row: int) -> tuple[mx.array, ...]:
        """Keys and values of a row, with the room behind them; nothing of one that is empty."""
        return self._rows[row].buffers

    def _only(self) -> int:
        if len(self._rows) > 1:
            raise AttributeError("several rows have buffers of their own")
        return 0

    def buffer(self, row: int, which: int) -> mx.array:
        """Keys (0) or values (1) of a row, with the room behind them."""
        return self._rows[row].buffers[which]

    def put_buffer(self, row: int, which: int, buffer: mx.array) -> None:
        """Take an array of the same shape for a row's keys (0) or values (1)."""
        buffers = list(self._rows[row].buffers)
        buffers[which] = buffer
        self._rows[row].buffers = tuple(buffers)

    def room(self) -> tuple[mx.array, ...]:
        """Keys and values of one row, with room for the newest transaction; nothing where it is empty or
        rows lie apart."""
        if len(self._rows) != 1 or self._span is None:
            return ()
        self._rows[0].reserve(self._span.base[0], self._span.end)
        return self._rows[0].buffers

    def fill(self, keys: mx.array, values: mx.array) -> None:
        """Take what `room` gave with the newest transaction written into it."""
        self._rows[0].buffers = (keys, values)

    def base(self, row: int) -> int:
        """The first position that the newest transaction writes of this row."""
        assert self._span is not None, "a forward needs an open transaction"
        return self._span.base[row]

    def write(self, row: int, keys: mx.array, values: mx.array) -> tuple[Any, ...]:
        """As `update_and_fetch`, for one row."""
        assert self._span is not None, "a forward needs an open transaction"
        assert keys.shape[2] == self._span.width
        return self._rows[row].write(self._span.base[row], (keys, values))

    def read(self, row: int) -> tuple[Any, ...]:
        """As `keys_and_values`, for one row."""
        assert self._span is not None, "a forward needs an open transaction"
        return self._rows[row].read(self._span.base[row] + self._span.width)

    def mask(self, row: int, width: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """As `make_mask`, for one row."""
        assert self._span is not None, "a forward needs an open transaction"
        return create_attention_mask(width, self._span.base[row], return_array, window_size)

    # rows ----------------------------------------------------------------------------------------

    def join(self, other: KVState) -> None:
        self._rows += other._rows

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def replace(self, rows: Sequence[int], other: KVState) -> None:
        for row, theirs in zip(rows, other._rows, strict=True):
            self._rows[row] = theirs

    def capture(self, row: int, depth: int) -> LayerCapture:
        if depth == 0:
            return LayerCapture((), 0)
        return LayerCapture(tuple(mx.contiguous(a[..., :depth, :]) for a in self._rows[row].buffers), depth)

    def restore(self, row: int, capture: LayerCapture, to: int) -> None:
        kept = capture.arrays if to else ()
        self._rows[row] = GrowingRow(tuple(mx.contiguous(array[..., :to, :]) for array in kept))

    def rewindable(self, depth: int, to: int) -> int:
        return min(depth, to)

    def arrays(self) -> list[mx.array]:
        return [buffer for row in self._rows for buffer in row.buffers]
