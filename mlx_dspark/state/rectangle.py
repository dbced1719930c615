"""Growing key and value rows of one attention layer, held as one padded rectangle."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_dspark.state.base import LayerCapture
from mlx_dspark.state.kv import STEP


class RectangleKV:
    """The content of KVState in one buffer `[rows, kv_heads, size, head_dim]`, each row filled to its depth.

    One attention call serves all rows under a mask, so the cost of a layer does not grow with their number;
    `join` and `select` copy. Worth it for many rows of similar depth; the states' laws are the same.
    """

    def __init__(self, n: int = 1) -> None:
        self._depth = [0] * n
        self._open: deque[int] = deque()
        self._base = [0] * n
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self.offset: Any = 0

    # transaction ---------------------------------------------------------------------------------

    def begin(self, width: int) -> None:
        ahead = sum(self._open)
        self._open.append(width)
        self._base = [depth + ahead for depth in self._depth]
        self.offset = mx.array(self._base, dtype=mx.int32)

    def commit(self, keep: Sequence[int]) -> None:
        width = self._open.popleft()
        for row, kept in enumerate(keep):
            assert 0 <= kept <= width
            self._depth[row] += kept

    def rollback(self) -> None:
        self._open.clear()

    # mlx-lm cache protocol -----------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """`[rows, kv_heads, width, head_dim]` in; everything up to the deepest row out."""
        assert self._open, "a forward needs an open transaction"
        width = keys.shape[2]
        assert width == self._open[-1]
        end = max(self._base) + width
        self._keys, self._values = _fitted(self._keys, keys, end), _fitted(self._values, values, end)
        if len(set(self._base)) == 1:
            self._keys[:, :, end - width : end] = keys
            self._values[:, :, end - width : end] = values
        else:
            at = (self.offset[:, None] + mx.arange(width))[:, None, :, None]
            self._keys = mx.put_along_axis(self._keys, mx.broadcast_to(at, keys.shape), keys, axis=2)
            self._values = mx.put_along_axis(self._values, mx.broadcast_to(at, values.shape), values, axis=2)
        return self._keys[:, :, :end], self._values[:, :, :end]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """`[rows, 1, N, deepest]`: a row's position sees its own past, and no other row's padding."""
        assert window_size is None, "rows of growing keys have no window"
        end = max(self._base) + N
        reach = (self.offset[:, None] + mx.arange(N))[:, None, :, None]
        return mx.arange(end) <= reach

    # rows ----------------------------------------------------------------------------------------

    def join(self, other: RectangleKV) -> None:
        assert not self._open
        assert not other._open
        depth = max(*self._depth, *other._depth)
        if depth:
            self._keys, self._values = (
                mx.concatenate([_held(mine, theirs, n, depth), _held(theirs, mine, m, depth)])
                for mine, theirs, n, m in (
                    (self._keys, other._keys, len(self._depth), len(other._depth)),
                    (self._values, other._values, len(self._depth), len(other._depth)),
                )
            )
        self._depth += other._depth

    def select(self, rows: Sequence[int]) -> None:
        assert not self._open
        self._depth = [self._depth[row] for row in rows]
        if self._keys is not None and self._values is not None:
            chosen, depth = mx.array(list(rows), dtype=mx.int32), max(self._depth, default=0)
            self._keys = mx.take(self._keys[:, :, :depth], chosen, axis=0)
            self._values = mx.take(self._values[:, :, :depth], chosen, axis=0)

    def capture(self, row: int) -> LayerCapture:
        depth = self._depth[row]
        if self._keys is None or self._values is None or depth == 0:
            return LayerCapture((), 0)
        kept = tuple(mx.contiguous(a[row : row + 1, :, :depth]) for a in (self._keys, self._values))
        return LayerCapture(kept, depth)

    def restore(self, row: int, capture: LayerCapture, to: int) -> None:
        assert not self._open
        self._depth[row] = to
        if to:
            keys, values = capture.arrays
            rows = len(self._depth)
            self._keys = _fitted(self._keys, mx.repeat(keys[:, :, :1], rows, axis=0), to)
            self._values = _fitted(self._values, mx.repeat(values[:, :, :1], rows, axis=0), to)
            self._keys[row : row + 1, :, :to] = keys[:, :, :to]
            self._values[row : row + 1, :, :to] = values[:, :, :to]

    def rewindable(self, depth: int, to: int) -> int:
        return min(depth, to)

    def arrays(self) -> list[mx.array]:
        return [a for a in (self._keys, self._values) if a is not None]


def _fitted(buffer: mx.array | None, like: mx.array, end: int) -> mx.array:
    """`buffer`, grown to hold `end` positions of rows like those of `like`."""
    held = 0 if buffer is None else buffer.shape[2]
    if buffer is not None and end <= held:
        return buffer
    size = -(-end // STEP) * STEP
    room = mx.zeros((*like.shape[:2], size - held, like.shape[3]), like.dtype)
    return room if buffer is None else mx.concatenate([buffer, room], axis=2)


def _held(buffer: mx.array | None, like: mx.array | None, rows: int, depth: int) -> mx.array:
    """Exactly `depth` positions of `rows` rows; zeros where nothing was written."""
    template = buffer if buffer is not None else like
    assert template is not None
    if buffer is None:
        return mx.zeros((rows, template.shape[1], depth, template.shape[3]), template.dtype)
    return _fitted(buffer, buffer, depth)[:, :, :depth]
