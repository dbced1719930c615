"""The one attention seam: model code calls `scaled_dot_product_attention`, and rows of a batch part here.

Projections run over the whole batch, attention runs per row, because rows share no keys. Which attention a
row gets is its state's to say: a state carries the choice of the target that made it, so two models in one
process do not disturb each other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from threading import get_ident
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.kernels.cuda_attention.attend import attend, takes

_SEAM = "scaled_dot_product_attention"

FEW_QUERIES = 32

Attention = Callable[[mx.array, mx.array, mx.array, float, Any, Any], mx.array]
"""`(queries, keys, values, scale, mask, sinks)` to `[batch, heads, width, head_dim]`."""


class RowArrays(tuple[Any, ...]):
    """Keys or values of several rows, each as its state's attention takes them for the row alone, which is
    `[1, kv_heads, depth of the row, head_dim]` for MLX's own."""

    __slots__ = ()


class RowMasks(tuple[Any, ...]):
    """Masks of several rows that differ, each as for the row alone: None, "causal" or `[width, keys]`."""

    __slots__ = ()


def stock_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
) -> mx.array:
    """MLX's own; on CUDA products of grouped heads for few queries, but one without a mask.

    MLX's CUDA back end hands more than one query to cuDNN, which makes a plan for every new length of the
    keys, and a decoding round has a new length each time. Under a mask its own kernel is several times slower
    than products.
    """
    width, array = queries.shape[2], isinstance(mask, mx.array)
    if width <= FEW_QUERIES and (width > 1 or array) and mx.cuda.is_available():
        if takes(queries, keys, mask, sinks):
            return attend(queries, keys, values, scale, mask, sinks)
        if sinks is None and (not array or mask.dtype == mx.bool_):
            seen = causal_mask(width, keys.shape[2]) if mask is not None and not array else mask
            return grouped(queries, keys, values, scale, seen)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def attends_buffers(queries: mx.array, keys: mx.array, sinks: Any) -> bool:
    """Whether `buffer_attention` of these is a kernel here."""
    return mx.cuda.is_available() and takes(queries, keys, "causal", sinks)


def buffer_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: Any, lengths: mx.array
) -> mx.array:
    """Causal attention over buffers `[rows, kv_heads, size, head_dim]` of which row `r` has filled the first
    `lengths[r]` positions (int32), the last of them those of its queries. Nothing else of them counts."""
    if attends_buffers(queries, keys, sinks):
        return attend(queries, keys, values, scale, "causal", sinks, lengths=lengths)
    width = queries.shape[2]
    last = lengths[:, None] - width + mx.arange(width)
    seen = mx.arange(keys.shape[2]) <= last[:, None, :, None]
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=seen, sinks=sinks)


def causal_mask(width: int, length: int) -> mx.array:
    """`[width, length]`: which of `length` keys each of the last `width` positions sees. Layers share one."""
    return _causal_mask(width, length, get_ident())


@lru_cache(maxsize=8)
def _causal_mask(width: int, length: int, thread: int) -> mx.array:
    del thread
    return mx.arange(length) <= mx.arange(length - width, length)[:, None]


def grouped(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> mx.array:
    """Attention as matrix products over groups of query heads. `mask` of booleans, which broadcasts to
    `[rows, 1, width, keys]`, shows what is seen; None: everything."""
    rows, heads, width, dim = queries.shape
    groups = keys.shape[1]
    together = (queries * scale).reshape(rows, groups, heads // groups * width, dim)
    scores = together @ keys.swapaxes(-1, -2)
    if mask is not None:
        mask = mask if mask.ndim == 2 else mask[:, :, None]
        apart = scores.reshape(rows, groups, heads // groups, width, -1)
        scores = mx.where(mask, apart, mx.finfo(scores.dtype).min).reshape(scores.shape)
    shares = mx.softmax(scores, axis=-1, precise=True)
    return (shares @ values).reshape(rows, heads, width, dim)


def cpu_attention() -> Attention:
    """The CPU back end's attention where its kernel applies, else MLX's; MLX's where llvmlite is missing."""
    if find_spec("llvmlite") is None:
        return stock_attention
    from mlx_dspark.kernels.cpu_attention.attend import attend, takes

    def attention(
        queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        if takes(queries, keys, values, mask, sinks):
            return attend(queries, keys, values, scale, causal=mask is not None)
        return stock_attention(queries, keys, values, scale, mask, sinks)

    return attention


def rowwise(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`stock`, unless the cache is a state that carries its own attention; then that, row by row.

    Layers that share another layer's keys have no cache: MLX's own attention is theirs.
    """

    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> mx.array:
        attention = getattr(cache, "attention", None)
        if attention is None and not isinstance(keys, RowArrays):
            return stock(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        attention = attention or stock_attention
        if not isinstance(keys, RowArrays):
            return attention(queries, keys, values, scale, mask, sinks)
        assert not isinstance(mask, mx.array), "rows that differ have masks of their own"
        masks = mask if isinstance(mask, RowMasks) else (mask,) * len(keys)
        outputs = [
            attention(queries[row : row + 1], keys[row], values[row], scale, masks[row], sinks)
            for row in range(len(keys))
        ]
        return mx.concatenate(outputs, axis=0)

    scaled_dot_product_attention.rowwise = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def install_row_attention(model: nn.Module) -> None:
    """Make the modules that `model` is built from ask the state how to attend.

    The name is replaced in each module that defines a part of the model and uses it; other caches than ours
    take the path they took before. Installing twice changes nothing.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        home = sys.modules[name]
        stock = getattr(home, _SEAM, None)
        if stock is not None and not getattr(stock, "rowwise", False):
            setattr(home, _SEAM, rowwise(stock))
