"""Rows as deep as one likes without reading a text: what a row holds, repeated. For timing, which asks for no
meaning."""

from __future__ import annotations

import mlx.core as mx

from mlx_dspark.state.base import LayerCapture, LayerState
from mlx_dspark.state.kv import KVState
from mlx_dspark.state.recurrent import RecurrentState
from mlx_dspark.state.rows import Capture, RowStates
from mlx_dspark.state.window import WindowState

KINDS = (KVState, WindowState, RecurrentState)
"""What can be filled so."""


def can_fill(rows: RowStates) -> bool:
    """Whether every layer is of a kind that can be filled without a forward."""
    return all(isinstance(layer, KINDS) for layer in rows.layers)


def fill(rows: RowStates, seed: Capture, depth: int) -> None:
    """Make every row `depth` tokens deep with the content of `seed`, over and over.

    `seed` is a capture of such a row, at least one token deep; `can_fill` must hold of `rows`.
    """
    layers = zip(rows.layers, seed.layers, strict=True)
    deep = Capture(tuple(_deepened(layer, kept, depth) for layer, kept in layers), depth)
    for row in range(len(rows)):
        rows.restore(row, deep)
    mx.eval(rows.arrays())


def bytes_per_token(seed: Capture) -> float:
    """About how many bytes one more token of depth takes in all layers; too many where a window bounds it."""
    grown = sum(a.nbytes for kept in seed.layers for a in kept.arrays if _grows(a, kept))
    return grown / seed.depth


def _grows(array: mx.array, kept: LayerCapture) -> bool:
    return array.ndim == 4 and array.shape[2] == kept.depth


def _deepened(layer: LayerState, kept: LayerCapture, depth: int) -> LayerCapture:
    if isinstance(layer, RecurrentState) or not kept.arrays:
        return LayerCapture(kept.arrays, depth)
    held = min(depth, layer.window + layer.slack) if isinstance(layer, WindowState) else depth
    arrays = tuple(_repeated(array, held) for array in kept.arrays)
    first = depth - held
    least = first + layer.window - 1 if isinstance(layer, WindowState) and first else 0
    return LayerCapture(arrays, depth, least)


def _repeated(array: mx.array, n: int) -> mx.array:
    """`[1, heads, m, size]` to `[1, heads, n, size]`."""
    return mx.take(array, mx.arange(n) % array.shape[2], axis=2)
