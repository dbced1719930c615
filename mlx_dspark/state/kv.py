"""Growing key and value rows of one attention layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from mlx_dspark.kernels.attention import Attention, RowArrays, stock_attention
from mlx_dspark.state.base import LayerCapture, Span

STEP = 256
"""Buffers grow by multiples of this many positions."""


class _Row:
    """Keys and values of one row: buffers `[1, kv_heads, size, head_dim]`."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: mx.array | None = None, values: mx.array | None = None) -> None:
        self.keys = keys
        self.values = values

    def write(self, at: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write from position `at` on; return everything up to the last position written."""
        end = at + keys.shape[2]
        old_keys, old_values = self.keys, self.values
        if old_keys is None or old_values is None:
            self.keys = _grown(None, keys, 0, end)
            self.values = _grown(None, values, 0, end)
        elif end > old_keys.shape[2]:
            self.keys = _grown(old_keys, keys, at, end)
            self.values = _grown(old_values, values, at, end)
        assert self.keys is not None
        assert self.values is not None
        self.keys[..., at:end, :] = keys
        self.values[..., at:end, :] = values
        return self.keys[..., :end, :], self.values[..., :end, :]


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
        self._rows = [_Row() for _ in range(n)]
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

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """`[rows, kv_heads, width, head_dim]` in; everything up to and including it out."""
        assert self._span is not None, "a forward needs an open transaction"
        assert keys.shape[2] == self._span.width
        base = self._span.base
        if len(self._rows) == 1:
            return self._rows[0].write(base[0], keys, values)
        pairs = [
            row.write(at, keys[i : i + 1], values[i : i + 1])
            for i, (row, at) in enumerate(zip(self._rows, base, strict=True))
        ]
        return RowArrays(pair[0] for pair in pairs), RowArrays(pair[1] for pair in pairs)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if len(self._rows) == 1:
            return create_attention_mask(N, self.offset, return_array, window_size)
        assert window_size is None, "several rows of growing keys have no window"
        return None if N == 1 else "causal"

    # rows ----------------------------------------------------------------------------------------

    def join(self, other: KVState) -> None:
        self._rows += other._rows

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def replace(self, rows: Sequence[int], other: KVState) -> None:
        for row, theirs in zip(rows, other._rows, strict=True):
            self._rows[row] = theirs

    def capture(self, row: int, depth: int) -> LayerCapture:
        source = self._rows[row]
        if source.keys is None or source.values is None or depth == 0:
            return LayerCapture((), 0)
        kept = tuple(mx.contiguous(a[..., :depth, :]) for a in (source.keys, source.values))
        return LayerCapture(kept, depth)

    def restore(self, row: int, capture: LayerCapture, to: int) -> None:
        if to == 0:
            self._rows[row] = _Row()
            return
        keys, values = (mx.contiguous(array[..., :to, :]) for array in capture.arrays)
        self._rows[row] = _Row(keys, values)

    def rewindable(self, depth: int, to: int) -> int:
        return min(depth, to)

    def arrays(self) -> list[mx.array]:
        return [a for row in self._rows for a in (row.keys, row.values) if a is not None]
