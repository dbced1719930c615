"""Growing key and value rows of one attention layer, held in few bits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from mlx_dspark.foundation.errors import UnsupportedModel
from mlx_dspark.kernels.attention import Attention
from mlx_dspark.state.kv import KVState

GROUP = 64
"""So many numbers of one position share a scale and an offset."""


class QuantizedKVState(KVState):
    """The content of KVState quantized to `bits` as MLX does it, in groups of 64 within each position.

    A position is quantized by itself, so what is held of a text does not depend on the rounds it came in.
    Attention is mlx-lm's own for quantized keys. Raises UnsupportedModel where heads do not divide into
    groups, or attention sinks come with them.
    """

    def __init__(self, n: int = 1, *, bits: int) -> None:
        super().__init__(n, _attention(bits))
        self.bits = bits

    def write(self, row: int, keys: mx.array, values: mx.array) -> tuple[Any, ...]:
        """`[1, kv_heads, width, head_dim]` in; everything up to and including it out, keys and values each as
        packed numbers, scales and offsets."""
        assert self._span is not None, "a forward needs an open transaction"
        assert keys.shape[2] == self._span.width
        packed: list[mx.array] = []
        for each in (keys, values):
            check_head_size(each.shape[3])
            packed += mx.quantize(each, group_size=GROUP, bits=self.bits)
        held = self._rows[row].write(self._span.base[row], tuple(packed))
        return held[:3], held[3:]

    def read(self, row: int) -> tuple[Any, ...]:
        held = super().read(row)
        return held[:3], held[3:]


def check_head_size(size: int) -> None:
    """Raises UnsupportedModel for heads that do not divide into groups."""
    if size % GROUP:
        raise cannot_quantize(f"its heads are {size} wide, which is no multiple of {GROUP}")


def cannot_quantize(reason: str) -> UnsupportedModel:
    """What is raised where keys and values cannot be held in few bits."""
    return UnsupportedModel(
        f"The keys and values of this model cannot be quantized: {reason}.",
        "Leave --kv-bits out.",
        field="kv_bits",
    )


def _attention(bits: int) -> Attention:
    def attention(queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: Any) -> mx.array:
        if sinks is not None:
            raise cannot_quantize("it has attention sinks")
        return quantized_scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, group_size=GROUP, bits=bits
        )

    return attention
