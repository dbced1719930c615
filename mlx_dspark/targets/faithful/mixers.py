"""Whether a mixer of ours computes what the installed mlx-lm's own does, asked of the mixer at load."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_dspark.state.base import Span
from mlx_dspark.state.recurrent import RecurrentState

_FOREIGN = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_WIDTH, _KEPT = 5, 3


def mixer_is_faithful(mixer: Any, hidden: int, dtype: mx.Dtype) -> bool:
    """Outputs and state of five positions, and the state where three of them are kept, against mlx-lm's own.

    Rounding may differ; another computation differs by far more.
    """
    x = mx.cos(mx.arange(_WIDTH * hidden) * 0.7).reshape(1, _WIDTH, hidden).astype(dtype)
    try:
        state = RecurrentState(1)
        state.begin(Span([0], _WIDTH))
        ours = [mixer(x, None, state), *state.arrays()[-len(state.before()) :]]
        state.commit([_KEPT])
        ours += state.arrays()
        theirs = [*_stock(mixer, x), *_stock(mixer, x[:, :_KEPT])[1:]]
        return all(_alike(a, b) for a, b in zip(ours, theirs, strict=True))
    except _FOREIGN:
        return False


def _stock(mixer: Any, x: mx.array) -> list[mx.array]:
    cache = ArraysCache(size=4)
    out = mixer(x, None, cache)
    return [out, *(array for array in cache.cache if array is not None)]


def _alike(a: mx.array, b: mx.array) -> bool:
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return a.shape == b.shape and bool((mx.abs(a - b).max() <= mx.abs(b).max() / 32).item())
