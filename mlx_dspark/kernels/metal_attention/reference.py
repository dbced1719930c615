"""What the kernel must equal: attention in float32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
    window: int = 0,
) -> Floats:
    """As the kernel's `attend`, in float32 and on the CPU, one key-value head at a time."""
    rows, heads, width, dim = queries.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    out = np.zeros((rows, kv_heads, group, width, dim), np.float32)
    grouped = queries.reshape(rows, kv_heads, group, width, dim)
    shown = np.broadcast_to(seen(width, length, mask, window), (rows, heads, width, length))
    shown = shown.reshape(rows, kv_heads, group, width, length)
    joining = None if sinks is None else _plain(sinks).reshape(kv_heads, group, 1, 1)
    for row in range(rows):
        for head in range(kv_heads):
            q, k, v = (_plain(each[row, head]) for each in (grouped, keys, values))
            scores = np.where(shown[row, head], (q * np.float32(scale)) @ k.T, -np.inf)
            out[row, head] = _mixed(scores, v, None if joining is None else joining[head])
    return out.reshape(rows, heads, width, dim)


def seen(width: int, length: int, mask: Any, window: int) -> NDArray[np.bool_]:
    """Which keys a query sees; broadcasts to `[rows, heads, width, length]`."""
    if isinstance(mask, mx.array):
        return np.array(mask)
    if mask is None:
        return np.ones((width, length), np.bool_)
    behind = np.arange(length - width, length)[:, None] - np.arange(length)
    return (behind >= 0) & (behind < window) if window else behind >= 0


def _mixed(scores: Floats, values: Floats, sinks: Floats | None) -> Floats:
    """Softmax of `[..., length]` times values; zeros where nothing is seen."""
    most = scores.max(-1, keepdims=True)
    if sinks is not None:
        most = np.maximum(most, sinks)
    most = np.where(np.isinf(most), np.float32(0), most)
    shares = np.exp(scores - most)
    total = shares.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - most)
    mixed = (shares @ values) / np.where(total == 0, np.float32(1), total)
    return mixed.astype(np.float32)


def _plain(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32))
