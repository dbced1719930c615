"""What the attention kernel must equal: MLX's own."""

from __future__ import annotations

import mlx.core as mx


def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float, causal: bool) -> mx.array:
    """[batch, heads, rows, head_dim], the shape of `queries`."""
    mask = "causal" if causal else None
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
