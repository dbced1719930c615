"""Key and value rows of one attention layer that sees a window of the newest positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from mlx_dspark.foundation.errors import UnsupportedModel
from mlx_dspark.kernels.attention import Attention, RowArrays, RowMasks, stock_attention
from mlx_dspark.state.base import LayerCapture, Span

ROOM = 256
"""Buffers are sized in multiples of this many positions."""

SLACK = 256
"""A row can go back this many positions: what these saw is still held."""


class _Row:
    """Keys and values of one row: buffers `[1, kv_heads, size, head_dim]` that begin at position `first`."""

    __slots__ = ("first", "keys", "values")

    def __init__(self, keys: mx.array | None = None, values: mx.array | None = None, first: int = 0) -> None:
        self.keys = keys
        self.values = values
        self.first = first

    def write(self, at: int, keys: mx.array, values: mx.array, *, needed: int) -> None:
        """Write from position `at` on. Where room is short, positions before `needed` are let go."""
        end = at + keys.shape[2]
        if self.keys is None or self.values is None or end - self.first > self.keys.shape[2]:
            begin = max(self.first, needed)
            held = slice(begin - self.first, at - self.first)
            self.keys = _moved(self.keys, keys, held, end - begin)
            self.values = _moved(self.values, values, held, end - begin)
            self.first = begin
        self.keys[..., at - self.first : end - self.first, :] = keys
        self.values[..., at - self.first : end - self.first, :] = values

    def read(self, begin: int, end: int) -> tuple[mx.array, mx.array]:
        assert self.keys is not None
        assert self.values is not None
        assert begin >= self.first, "what a position sees is held"
        part = slice(begin - self.first, end - self.first)
        return self.keys[..., part, :], self.values[..., part, :]


def _moved(old: mx.array | None, like: mx.array, held: slice, size: int) -> mx.array:
    """A buffer for `size` positions and some more, which begins with the `held` part of `old`."""
    size = -(-(size + ROOM // 2) // ROOM) * ROOM
    if old is None:
        return mx.zeros((1, like.shape[1], size, like.shape[3]), like.dtype)
    kept = held.stop - held.start
    room = mx.zeros((1, like.shape[1], size - kept, like.shape[3]), like.dtype)
    return mx.concatenate([old[..., held, :], room], axis=2)


class WindowState:
    """Key and value rows of which each position sees `window` positions, its own the last of them.

    Speaks the protocol of mlx-lm's RotatingKVCache. Every row's positions lie in their order in one buffer,
    whose newest part moves to the front of another when it is full. What the committed depth and the `slack`
    positions before it can see is held, and all that open transactions wrote, so a round may be wider than
    window or slack. Model code gets no more keys of a row than the positions written can see.
    """

    def __init__(
        self, n: int = 1, attention: Attention = stock_attention, *, window: int, slack: int = SLACK
    ) -> None:
        assert window >= 1
        self.attention = attention
        self.window = window
        self.slack = slack
        self._rows = [_Row() for _ in range(n)]
        self._span: Span | None = None
        self._open = 0
        self._depth: list[int] = []
        self.offset: Any = 0

    # transaction ---------------------------------------------------------------------------------

    def begin(self, span: Span) -> None:
        if not self._open:
            self._depth = list(span.base)
        self._open += 1
        self._span = span
        self.offset = span.offset

    def commit(self, keep: Sequence[int]) -> None:
        self._depth = [depth + kept for depth, kept in zip(self._depth, keep, strict=True)]
        self._open -= 1
        if not self._open:
            self._span = None

    def rollback(self) -> None:
        self._open = 0
        self._span = None

    # mlx-lm cache protocol -----------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """`[rows, kv_heads, width, head_dim]` in; what the positions written can see out."""
        if len(self._rows) == 1:
            return self.write(0, keys, values)
        pairs = [self.write(i, keys[i : i + 1], values[i : i + 1]) for i in range(len(self._rows))]
        return RowArrays(pair[0] for pair in pairs), RowArrays(pair[1] for pair in pairs)

    def keys_and_values(self) -> tuple[Any, Any]:
        """What `update_and_fetch` gave for the newest transaction, for layers that share it."""
        if len(self._rows) == 1:
            return self.read(0)
        pairs = [self.read(i) for i in range(len(self._rows))]
        return RowArrays(pair[0] for pair in pairs), RowArrays(pair[1] for pair in pairs)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """None, "causal" or booleans `[N, keys]`; for rows that differ, RowMasks of these.

        Raises UnsupportedModel for a `window_size` beyond the state's own.
        """
        assert self._span is not None, "a forward needs an open transaction"
        held = [min(base, self.window - 1) for base in self._span.base]
        made = {each: self.mask(row, N, return_array, window_size) for row, each in enumerate(held)}
        alike = len(held) == 1 or not any(isinstance(mask, mx.array) for mask in made.values())
        return made[held[0]] if alike else RowMasks(made[each] for each in held)

    def base(self, row: int) -> int:
        """The first position that the newest transaction writes of this row."""
        assert self._span is not None, "a forward needs an open transaction"
        return self._span.base[row]

    def write(self, row: int, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """As `update_and_fetch`, for one row."""
        assert self._span is not None, "a forward needs an open transaction"
        assert keys.shape[2] == self._span.width
        at, needed = self._span.base[row], self._seen_from(self._depth[row] - self.slack)
        self._rows[row].write(at, keys, values, needed=needed)
        return self.read(row)

    def read(self, row: int) -> tuple[Any, Any]:
        """As `keys_and_values`, for one row."""
        assert self._span is not None, "a forward needs an open transaction"
        at = self._span.base[row]
        return self._rows[row].read(self._seen_from(at), at + self._span.width)

    def mask(self, row: int, width: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """As `make_mask`, for one row."""
        assert self._span is not None, "a forward needs an open transaction"
        held, seen = min(self._span.base[row], self.window - 1), window_size or self.window
        if seen > self.window:
            raise UnsupportedModel(
                f"Layers of this model see {seen} tokens and keep {self.window}: what they see depends on "
                "how a text is cut into rounds.",
                "Choose another model.",
                field="model_type",
            )
        if return_array or held + width > seen:
            return create_causal_mask(width, held, window_size=seen)
        return None if width == 1 else "causal"

    def _seen_from(self, position: int) -> int:
        """The first position that `position` sees."""
        return max(0, position - self.window + 1)

    # rows ----------------------------------------------------------------------------------------

    def join(self, other: WindowState) -> None:
        self._rows += other._rows

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def replace(self, rows: Sequence[int], other: WindowState) -> None:
        for row, theirs in zip(rows, other._rows, strict=True):
            self._rows[row] = theirs

    def capture(self, row: int, depth: int) -> LayerCapture:
        source = self._rows[row]
        if source.keys is None or depth == 0:
            return LayerCapture((), 0)
        begin = max(source.first, self._seen_from(depth - self.slack))
        kept = tuple(mx.contiguous(a) for a in source.read(begin, depth))
        return LayerCapture(kept, depth, least=begin + self.window - 1 if begin else 0)

    def restore(self, row: int, capture: LayerCapture, to: int) -> None:
        if to == 0:
            self._rows[row] = _Row()
            return
        keys, values = capture.arrays
        first = capture.depth - keys.shape[2]
        assert first <= self._seen_from(to), "a capture is restored at a depth that it names"
        keys, values = (mx.contiguous(a[..., : to - first, :]) for a in capture.arrays)
        self._rows[row] = _Row(keys, values, first)

    def rewindable(self, depth: int, to: int) -> int:
        return min(depth, to)

    def arrays(self) -> list[mx.array]:
        return [a for row in self._rows for a in (row.keys, row.values) if a is not None]
