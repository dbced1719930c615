"""A matrix in dense float32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Floats, Source


class DenseMatrix:
    """float32 [outputs, inputs]; four bytes a weight, and BLAS chooses its own order of additions."""

    def __init__(self, source: Source) -> None:
        self.outputs, self.inputs = source.outputs, source.inputs
        self._weight = np.array(dequantized(source), copy=True)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def multiply(self, rows: Floats) -> Floats:
        """[rows, inputs] -> [rows, outputs]."""
        return rows @ self._weight.T

    def lookup(self, indices: NDArray[np.int64]) -> Floats:
        """[n] -> [n, inputs]."""
        return self._weight[indices]


class Dense:
    """Dense float32 through numpy's BLAS."""

    name = "dense"
    version = 1

    def refusal(self, source: Source) -> str | None:
        return None

    def hold(self, source: Source) -> DenseMatrix:
        return DenseMatrix(source)


def dequantized(source: Source) -> mx.array:
    """The matrix in float32 [outputs, inputs], evaluated."""
    weight = source.weight
    if source.bits:
        weight = mx.dequantize(
            weight, *source.float32_scales(), source.group_size, source.bits, mode=source.mode
        )
    weight = weight.astype(mx.float32)
    mx.eval(weight)
    return weight
