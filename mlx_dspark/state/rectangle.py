"""Growing key and value rows of one attention layer, held as one padded rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_dspark.kernels.attention import Attention, stock_attention
from mlx_dspark.state.base import LayerCapture, Span
from mlx_dspark.state.kv import STEP, KVState

BLOCK = 32
"""Attention sees multiples of this many positions: where each round had a shape of its own, a GPU would plan
each anew, and MLX's buffer cache keep the buffers of them all. Divides STEP."""


class RectangleKV:
    """The content of KVState in one buffer `[rows, kv_heads, size, head_dim]`, each row filled to its depth.

    One attention call serves all rows under a mask, so a layer is one call, however many they are. A round
    writes in place; what copies the buffer (growing, `join`, `select`) is evaluated layer by layer and leaves
    nothing in MLX's buffer cache, so one layer at most is held twice. Where it is worth it, `layout.py` says;
    the states' laws are the same.
    """

    def __init__(self, n: int = 1, attention: Attention = stock_attention) -> None:
        self._n = n
        self.attention = attention
        self._span: Span | None = None
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self.offset: Any = 0

    # transaction ---------------------------------------------------------------------------------

    def begin(self, span: Span) -> None:
        self._span = span
        self.offset = span.offset
        self._hold(span.end)

    def commit(self, keep: Sequence[int]) -> None:
        del keep
        self._span = None

    def rollback(self) -> None:
        self._span = None

    # mlx-lm cache protocol -----------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """`[rows, kv_heads, width, head_dim]` in; everything up to the deepest row and a little more out."""
        span = self._span
        assert span is not None, "a forward needs an open transaction"
        assert keys.shape[2] == span.width
        if self._keys is None or self._values is None:
            self._keys, self._values = (_room(self._n, like, span.end) for like in (keys, values))
        if span.level:
            self._keys[:, :, span.end - span.width : span.end] = keys
            self._values[:, :, span.end - span.width : span.end] = values
        else:
            at = span.positions
            self._keys = mx.put_along_axis(self._keys, mx.broadcast_to(at, keys.shape), keys, axis=2)
            self._values = mx.put_along_axis(self._values, mx.broadcast_to(at, values.shape), values, axis=2)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` gave for the newest transaction, for layers that share it."""
        assert self._span is not None, "a forward needs an open transaction"
        assert self._keys is not None
        assert self._values is not None
        reach = _rounded(self._span.end, BLOCK)
        return self._keys[:, :, :reach], self._values[:, :, :reach]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """`[rows, 1, N, keys]`: a row's position sees its own past, or a window of it, and no padding."""
        assert self._span is not None, "a forward needs an open transaction"
        assert self._span.width == N
        keys, positions = mx.arange(_rounded(self._span.end, BLOCK)), self._span.positions
        seen = keys <= positions
        return seen if window_size is None else seen & (positions < keys + window_size)

    def room(self) -> tuple[mx.array, ...]:
        """Keys and values of all rows, with room for the newest transaction; nothing where all are empty."""
        return tuple(self.arrays()) if self._span is not None else ()

    def fill(self, keys: mx.array, values: mx.array) -> None:
        """Take what `room` gave with the newest transaction written into it."""
        self._keys, self._values = keys, values

    # rows ----------------------------------------------------------------------------------------

    def join(self, other: RectangleKV) -> None:
        self._hold_as(other)
        other._hold_as(self)
        pairs = zip(self.arrays(), other.arrays(), strict=True)
        joined = [mx.concatenate(list(pair)) for pair in pairs]
        other._keys = other._values = None
        self._set(joined)
        self._n += other._n

    def select(self, rows: Sequence[int]) -> None:
        chosen = mx.array(list(rows), dtype=mx.int32)
        self._set([mx.take(buffer, chosen, axis=0) for buffer in self.arrays()])
        self._n = len(rows)

    def replace(self, rows: Sequence[int], other: RectangleKV) -> None:
        """Writes into the buffer: nothing is copied but the newcomers."""
        self._hold_as(other)
        places = mx.array(list(rows), dtype=mx.int32)
        for mine, theirs in zip(self.arrays(), other.arrays(), strict=False):
            mine[places, :, : theirs.shape[2]] = theirs
        self._set(self.arrays())

    def capture(self, row: int, depth: int) -> LayerCapture:
        if depth == 0:
            return LayerCapture((), 0)
        return LayerCapture(tuple(mx.contiguous(a[row : row + 1, :, :depth]) for a in self.arrays()), depth)

    def restore(self, row: int, capture: LayerCapture, to: int) -> None:
        if to == 0:
            return
        keys, values = capture.arrays
        if self._keys is None or self._values is None:
            self._keys, self._values = (_room(self._n, like, to) for like in (keys, values))
        self._hold(to)
        self._keys[row : row + 1, :, :to] = keys[:, :, :to]
        self._values[row : row + 1, :, :to] = values[:, :, :to]

    def rewindable(self, depth: int, to: int) -> int:
        return min(depth, to)

    def arrays(self) -> list[mx.array]:
        return [a for a in (self._keys, self._values) if a is not None]

    # other forms ---------------------------------------------------------------------------------

    @classmethod
    def of(cls, rows: KVState, depth: Sequence[int], attention: Attention) -> RectangleKV:
        """The rows of `rows`, of which row `r` holds `depth[r]` positions, in one buffer."""
        made = cls(len(depth), attention)
        filled = [(row, end, rows.buffers(row)) for row, end in enumerate(depth) if end]
        if filled:
            buffers = [_room(len(depth), like, max(depth)) for like in filled[0][2]]
            for row, end, theirs in filled:
                for mine, each in zip(buffers, theirs, strict=True):
                    mine[row : row + 1, :, :end] = each[:, :, :end]
            made._set(buffers)
        return made

    def apart(self, depth: Sequence[int], attention: Attention) -> KVState:
        """The rows, of which row `r` holds `depth[r]` positions, each in buffers of its own."""
        rows: list[tuple[mx.array, ...]] = []
        for row, end in enumerate(depth):
            part = slice(row, row + 1), slice(None), slice(_rounded(end, STEP))
            rows.append(tuple(mx.contiguous(buffer[part]) for buffer in self.arrays()) if end else ())
        mx.eval(rows)
        self._keys = self._values = None
        mx.clear_cache()
        return KVState.of(rows, attention)

    def fit(self, end: int) -> None:
        """Hold no room that rows of up to `end` positions do not need."""
        size = _rounded(end, STEP)
        if self._keys is not None and size < self._keys.shape[2]:
            self._set([mx.contiguous(buffer[:, :, :size]) for buffer in self.arrays()])

    # buffers -------------------------------------------------------------------------------------

    def _hold(self, end: int) -> None:
        """Have room for `end` positions, where there is a buffer at all."""
        if self._keys is not None and end > self._keys.shape[2]:
            self._set([_grown(buffer, end) for buffer in self.arrays()])

    def _hold_as(self, other: RectangleKV) -> None:
        """Have a buffer at least as long as that of `other`, where it has one."""
        if other._keys is None or other._values is None:
            return
        end = other._keys.shape[2]
        if self._keys is None:
            self._keys, self._values = (_room(self._n, like, end) for like in (other._keys, other._values))
        self._hold(end)

    def _set(self, buffers: list[mx.array]) -> None:
        """Take these buffers, and give the memory of what they were made from back."""
        if buffers:
            mx.eval(buffers)
            self._keys, self._values = buffers
            del buffers
            mx.clear_cache()


def _room(rows: int, like: mx.array, end: int) -> mx.array:
    """Zeros for `rows` rows of `end` positions or somewhat more, shaped and typed as those of `like`."""
    return mx.zeros((rows, like.shape[1], _rounded(end, STEP), like.shape[3]), like.dtype)


def _grown(buffer: mx.array, end: int) -> mx.array:
    rows, heads, held, dim = buffer.shape
    room = mx.zeros((rows, heads, _rounded(end, STEP) - held, dim), buffer.dtype)
    return mx.concatenate([buffer, room], axis=2)


def _rounded(end: int, step: int) -> int:
    return -(-end // step) * step
