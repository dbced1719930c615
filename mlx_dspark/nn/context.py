"""What a block drafter remembers of the target: per row and layer, keys and values of the context.

Only committed positions are context, so nothing here is ever taken back after a refused draft. A block's own
keys and values are scratch past the end of the context. Keys are rotated at their absolute position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

STEP = 256
"""Buffers grow, and layers with a limit shed, in steps of this many positions."""


@dataclass(frozen=True)
class LayerCapture:
    """Keys and values `[1, kv_heads, n, head_dim]` of positions `first` to `first + n`."""

    keys: mx.array | None
    values: mx.array | None
    first: int


@dataclass(frozen=True)
class RowCapture:
    """A row as it was; later writes do not reach it. `features` were observed but not yet absorbed."""

    layers: tuple[LayerCapture, ...]
    features: tuple[mx.array, ...]
    absorbed: int
    depth: int
    limits: tuple[int | None, ...]

    def rewindable(self, to: int) -> int:
        """The furthest depth at or below `to` that this capture can be restored at; 0 always can."""
        to = min(to, self.depth)
        for layer, limit in zip(self.layers, self.limits, strict=True):
            if layer.first and (limit is None or to - limit < layer.first):
                return 0
        return to


class ContextLayer:
    """Keys and values of one row in one layer; with a `limit`, only the last `limit` positions are kept."""

    def __init__(self, limit: int | None = None, *, first: int = 0) -> None:
        self.limit = limit
        self.first = first
        self.count = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add committed positions: `[1, kv_heads, n, head_dim]` each, at least one."""
        new = keys.shape[2]
        if self.limit is not None and new >= self.limit:
            self.first += self.count + new - self.limit
            self.count, self.keys, self.values = 0, None, None
            keys, values, new = keys[:, :, -self.limit :], values[:, :, -self.limit :], self.limit
        self._write(keys, values)
        self.count += new
        if self.limit is not None and self.count > self.limit + STEP:
            self._shed(self.count - self.limit)

    def with_block(self, keys: mx.array, values: mx.array, span: int | None) -> tuple[mx.array, mx.array]:
        """The last `span` context positions (None: all) followed by the block, which is not kept."""
        begin, end = self.count - self.visible(span), self.count + keys.shape[2]
        all_keys, all_values = self._write(keys, values)
        return all_keys[:, :, begin:end], all_values[:, :, begin:end]

    def visible(self, span: int | None) -> int:
        """How many context positions a block sees under `span`."""
        return self.count if span is None else min(span, self.count)

    def capture(self) -> LayerCapture:
        """A copy of the context."""
        if self.keys is None or self.values is None:
            return LayerCapture(None, None, self.first)
        keys, values = (mx.contiguous(held[:, :, : self.count]) for held in (self.keys, self.values))
        return LayerCapture(keys, values, self.first)

    @classmethod
    def restored(cls, capture: LayerCapture, depth: int, limit: int | None) -> ContextLayer:
        """The context of `capture` up to position `depth`."""
        layer = cls(limit, first=capture.first)
        count = depth - capture.first
        if capture.keys is not None and capture.values is not None and count > 0:
            layer.keys, layer.values = capture.keys[:, :, :count], capture.values[:, :, :count]
            layer.count = count
        return layer

    def _write(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write past the context, into a buffer that no capture holds."""
        end = self.count + keys.shape[2]
        self.keys = _room(self.keys, keys, self.count, end)
        self.values = _room(self.values, values, self.count, end)
        self.keys[:, :, self.count : end] = keys
        self.values[:, :, self.count : end] = values
        return self.keys, self.values

    def _shed(self, oldest: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        self.keys = self.keys[:, :, oldest : self.count]
        self.values = self.values[:, :, oldest : self.count]
        self.first += oldest
        self.count -= oldest


def _room(held: mx.array | None, like: mx.array, count: int, end: int) -> mx.array:
    """A buffer that keeps the first `count` positions of `held` and has room up to `end`."""
    if held is not None and end <= held.shape[2]:
        return held
    size = -(-end // STEP) * STEP
    room = mx.zeros((1, like.shape[1], size - count, like.shape[3]), dtype=like.dtype)
    return room if held is None else mx.concatenate([held[:, :, :count], room], axis=2)


class ContextRow:
    """One row: a context per layer, and features that were observed but not yet absorbed into it."""

    def __init__(self, limits: Sequence[int | None]) -> None:
        self.layers = [ContextLayer(limit) for limit in limits]
        self.features: list[mx.array] = []
        self.absorbed = 0
        self.depth = 0

    def observe(self, features: mx.array) -> None:
        """Take the features `[n, taps * hidden]` of the next `n` positions."""
        self.features.append(features)
        self.depth += features.shape[0]

    def arrays(self) -> list[mx.array]:
        """The buffers of all layers."""
        held = [buffer for layer in self.layers for buffer in (layer.keys, layer.values)]
        return [buffer for buffer in held if buffer is not None]

    def capture(self) -> RowCapture:
        """The row as it is now."""
        layers = tuple(layer.capture() for layer in self.layers)
        limits = tuple(layer.limit for layer in self.layers)
        return RowCapture(layers, tuple(self.features), self.absorbed, self.depth, limits)

    @classmethod
    def restored(cls, capture: RowCapture, depth: int) -> ContextRow:
        """The row of `capture` cut to `depth`, which must be one it can be rewound to."""
        if capture.rewindable(depth) != depth:
            raise ValueError(f"a capture of depth {capture.depth} cannot be restored at {depth}")
        row = cls(capture.limits)
        row.absorbed, row.depth = min(depth, capture.absorbed), depth
        if depth:
            pairs = zip(capture.layers, capture.limits, strict=True)
            row.layers = [ContextLayer.restored(layer, row.absorbed, limit) for layer, limit in pairs]
        if depth > row.absorbed:
            waiting = mx.concatenate(list(capture.features))
            row.features = [waiting[: depth - row.absorbed]]
        return row


class ContextRows:
    """The state of a block drafter for some rows.

    `confidences` are those of the last proposal, `[rows that drafted, width]`, unevaluated; None without a
    confidence head.
    """

    def __init__(self, rows: Sequence[ContextRow]) -> None:
        self.rows = list(rows)
        self.confidences: mx.array | None = None

    @property
    def depth(self) -> list[int]:
        """Observed tokens per row."""
        return [row.depth for row in self.rows]

    def join(self, other: ContextRows) -> None:
        """Append the rows of `other`, which must not be used afterwards."""
        self.rows += other.rows

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.rows = [self.rows[row] for row in rows]

    def capture(self, row: int) -> RowCapture:
        """One row as it is now, unmoved by later writes."""
        return self.rows[row].capture()

    def restore(self, row: int, capture: RowCapture, depth: int | None = None) -> None:
        """Put a captured row in place of row `row`, cut to `depth` (None: whole).

        Raises ValueError when the capture cannot be rewound to `depth`.
        """
        self.rows[row] = ContextRow.restored(capture, capture.depth if depth is None else depth)
