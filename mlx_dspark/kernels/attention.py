"""The one attention seam: model code calls `scaled_dot_product_attention`, and rows of a batch part here.

Projections run over the whole batch, attention runs per row, because rows share no keys. With one row the
model code receives plain arrays and takes MLX's own path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_SEAM = "scaled_dot_product_attention"


class RowArrays(tuple[mx.array, ...]):
    """Keys or values of several rows, each `[1, kv_heads, depth of the row, head_dim]`."""

    __slots__ = ()


def rowwise(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`stock` for plain arrays; row by row for RowArrays."""

    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> mx.array:
        if not isinstance(keys, RowArrays):
            return stock(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        assert mask is None or isinstance(mask, str), "a mask of several rows is causal or absent"
        outputs = [
            mx.fast.scaled_dot_product_attention(
                queries[row : row + 1], keys[row], values[row], scale=scale, mask=mask, sinks=sinks
            )
            for row in range(len(keys))
        ]
        return mx.concatenate(outputs, axis=0)

    scaled_dot_product_attention.rowwise = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def install_row_attention(model: nn.Module) -> None:
    """Make the modules that `model` is built from able to attend over several rows.

    The name is replaced in each module that defines a part of the model and uses it; plain arrays take the
    path they took before. Installing twice changes nothing.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        home = sys.modules[name]
        stock = getattr(home, _SEAM, None)
        if stock is not None and not getattr(stock, "rowwise", False):
            setattr(home, _SEAM, rowwise(stock))
