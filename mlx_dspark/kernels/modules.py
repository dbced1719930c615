"""The modules that stand in a model in place of MLX's own when the CPU holds the weights another way.

Each evaluates its input, multiplies outside MLX and hands an array back: a forward is not lazy across them.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_dspark.kernels.base import Floats, HeldMatrix


class HeldLinear(nn.Module):
    """`nn.Linear` or `nn.QuantizedLinear` over a held matrix: [..., inputs] -> [..., outputs].

    Computes in float32 and answers in the type of its input.
    """

    def __init__(self, matrix: HeldMatrix, bias: mx.array | None = None) -> None:
        super().__init__()
        self.matrix = matrix
        self._bias = None if bias is None else np.array(bias.astype(mx.float32))

    def __call__(self, x: mx.array) -> mx.array:
        return as_array(self.multiply(as_rows(x)), x)

    def multiply(self, rows: Floats) -> Floats:
        """[rows, inputs] -> [rows, outputs], in numpy."""
        product = self.matrix.multiply(rows)
        return product if self._bias is None else product + self._bias


class HeldEmbedding(nn.Module):
    """`nn.Embedding` or `nn.QuantizedEmbedding` over a held matrix [vocab, dims], answering in float32."""

    def __init__(self, matrix: HeldMatrix) -> None:
        super().__init__()
        self.matrix = matrix

    def __call__(self, x: mx.array) -> mx.array:
        """[...] -> [..., dims], the rows looked up."""
        indices = np.array(x).astype(np.int64).reshape(-1)
        return mx.array(self.matrix.lookup(indices)).reshape(*x.shape, self.matrix.inputs)

    def as_linear(self, x: mx.array) -> mx.array:
        """[..., dims] -> [..., vocab], the tied head."""
        return as_array(self.matrix.multiply(as_rows(x)), x)


def as_rows(x: mx.array) -> Floats:
    """[..., inputs] -> float32 [rows, inputs], a view of the evaluated array where possible."""
    x = x.astype(mx.float32)
    mx.eval(x)
    return np.array(x, copy=False).reshape(-1, x.shape[-1])


def as_array(rows: Floats, like: mx.array) -> mx.array:
    """[rows, outputs] -> [..., outputs] with the leading axes and the type of `like`."""
    return mx.array(rows).reshape(*like.shape[:-1], rows.shape[-1]).astype(like.dtype)
