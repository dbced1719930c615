"""The product in float32 on exactly dequantized weights."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 8192


def product(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, group: int, bits: int
) -> NDArray[np.float32]:
    """`x` [rows, inputs] -> [rows, outputs]. Multiplied by numpy: MLX's own float32 product may round its
    operands on a GPU."""
    wide = np.array(x.astype(mx.float32))
    parts = []
    for first in range(0, weight.shape[0], _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        steps, starts = scales[some].astype(mx.float32), biases[some].astype(mx.float32)
        exact = mx.dequantize(weight[some], steps, starts, group_size=group, bits=bits)
        parts.append(wide @ np.array(exact).T)
    return np.concatenate(parts, axis=1)
