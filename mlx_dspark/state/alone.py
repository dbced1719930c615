"""One row of an attention state, for model code that cannot be given several."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_dspark.state.kv import KVState
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

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self._state.mask(self._row, N, return_array, window_size)


def rows_alone(rows: RowStates) -> list[list[Any]] | None:
    """The caches of each row, or None where a layer keeps something that has no such view."""
    layers = [layer for layer in rows.layers if isinstance(layer, KVState | WindowState)]
    if len(layers) < len(rows.layers):
        return None
    return [[RowAlone(layer, row) for layer in layers] for row in range(len(rows))]
