"""One row of a batch's states, for model code that cannot be given several."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_dspark.state.chunked import ChunkedState
from mlx_dspark.state.kv import KVState
from mlx_dspark.state.recurrent import RecurrentRow, RecurrentState
from mlx_dspark.state.rows import RowStates
from mlx_dspark.state.window import WindowState


class RowAlone:
    """Row `row` of `state` in its newest transaction, as mlx-lm's model code sees a cache."""

    def __init__(self, state: KVState | WindowState, row: int) -> None:
        self._state = state
        self._row = row
        self.attention = state.attention
        self.offset = state.base(row)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, ...]:
        return self._state.write(self._row, keys, values)

    def keys_and_values(self) -> tuple[Any, ...]:
        return self._state.read(self._row)

    @property
    def keys(self) -> mx.array:
        return self._buffers.buffer(self._row, 0)

    @keys.setter
    def keys(self, buffer: mx.array) -> None:
        self._buffers.put_buffer(self._row, 0, buffer)

    @property
    def values(self) -> mx.array:
        return self._buffers.buffer(self._row, 1)

    @values.setter
    def values(self, buffer: mx.array) -> None:
        self._buffers.put_buffer(self._row, 1, buffer)

    @property
    def _buffers(self) -> KVState:
        if not isinstance(self._state, KVState):
            raise AttributeError("a window has no buffers of all positions")
        return self._state

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self._state.mask(self._row, N, return_array, window_size)


class ChunkedRowAlone(RowAlone):
    """As RowAlone, of a ChunkedState."""

    start_position = ChunkedState.start_position
    maybe_trim_front = ChunkedState.maybe_trim_front


def rows_alone(rows: RowStates) -> list[list[Any]] | None:
    """The caches of each row, or None where a layer keeps something that has no such view."""
    alone = [_alone(layer, len(rows)) for layer in rows.layers]
    if any(not layer for layer in alone):
        return None
    return [rows.arranged([layer[row] for layer in alone]) for row in range(len(rows))]


def _alone(layer: Any, n: int) -> list[Any]:
    if isinstance(layer, RecurrentState):
        return RecurrentRow.all_of(layer)
    if isinstance(layer, ChunkedState):
        return [ChunkedRowAlone(layer, row) for row in range(n)]
    return [RowAlone(layer, row) for row in range(n)] if isinstance(layer, KVState | WindowState) else []
